"""The tasks of a plan: what the contract and the words of a guarantee need to know of each.

What a task does with records and with the model is one class in one file of `lm/tasks/`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

TASKS = ("causal", "choices", "classify", "sequence-to-sequence", "prefer", "token-classify", "masked")
"""The tasks that come with cloister; another one is PACKAGE:NAME of an installed package."""
Format: TypeAlias = Literal["text", "prompt", "messages"]


class Kind(NamedTuple):
    """What a record of a task is."""

    thing: str
    """One record, in words."""
    things: str
    """Several."""
    whole: str
    """One record with everything that is learned from it."""
    label: str = "token"
    """What a label stands for that is learned."""
    windows: bool = True
    """Whether a record may go on in further sequences; otherwise it is cut to one."""
    labels: str = "sequence_length"
    """The field of `[data]` with the most labels that a sequence is learned from; empty: it has one."""
    used: str = "first {tokens} tokens"
    """What of a record is used; empty: its task says it."""
    model: str = "language model"
    """What the trained model is called."""
    writes: Literal["", "continuation", "answer"] = "continuation"
    """What the model writes after a prompt; empty: it writes no text."""

    @property
    def single(self) -> bool:
        """Whether a sequence has one label, instead of one for each token at most."""
        return not self.labels


_PROMPT = Kind("prompt with its completion", "prompts with their completions", "prompt with its completion")
_BY_FORMAT = {
    "text": Kind("text", "texts", "text"),
    "prompt": _PROMPT,
    "messages": Kind("chat", "chats", "chat"),
}
_BY_TASK = {
    "choices": _PROMPT,
    "classify": Kind(
        "text",
        "texts",
        "text with its label",
        "text",
        windows=False,
        labels="",
        model="text classifier",
        writes="",
    ),
    "sequence-to-sequence": _PROMPT._replace(
        windows=False,
        labels="target_length",
        used="first {tokens} tokens of the prompt and first {targets} of the completion",
        model="sequence-to-sequence model",
        writes="answer",
    ),
    "prefer": Kind(
        "prompt with its two completions",
        "prompts with their two completions",
        "prompt with its two completions",
        "pair",
        windows=False,
        labels="",
        used="first {tokens} tokens of the prompt with each completion",
    ),
    "token-classify": Kind(
        "text", "texts", "text with its entities", "word", windows=False, model="token classifier", writes=""
    ),
    "masked": Kind("text", "texts", "text", model="masked language model", writes=""),
}


_OWN = Kind("record", "records", "record", "label", windows=False, used="", model="model", writes="")


OWN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}:[A-Za-z_][A-Za-z0-9_-]{0,99}"
"""PACKAGE:NAME, as a pattern: what an installed package registers under a name."""


def is_own(name: str) -> bool:
    """Whether a task, an optimizer or a class of models is that of an installed package, not of cloister."""
    return ":" in name


def kind_of(task: str, form: Format) -> Kind:
    """What a record of a task is; of `causal` it depends on the format."""
    return _OWN if is_own(task) else _BY_TASK.get(task) or _BY_FORMAT[form]
