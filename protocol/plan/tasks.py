"""The tasks of a plan: what the contract and the words of a guarantee need to know of each.

What a task does with records and with the model is one class in one file of `lm/tasks/`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

TaskName: TypeAlias = Literal["causal", "choices", "classify", "token-classify", "masked"]
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
    single: bool = False
    """Whether a sequence has one label, instead of one for each token at most."""
    model: str = "language model"
    """What the trained model is called."""


_PROMPT = Kind("prompt with its completion", "prompts with their completions", "prompt with its completion")
_BY_FORMAT = {
    "text": Kind("text", "texts", "text"),
    "prompt": _PROMPT,
    "messages": Kind("chat", "chats", "chat"),
}
_BY_TASK = {
    "choices": _PROMPT,
    "classify": Kind(
        "text", "texts", "text with its label", "text", windows=False, single=True, model="text classifier"
    ),
    "token-classify": Kind(
        "text", "texts", "text with its entities", "word", windows=False, model="token classifier"
    ),
    "masked": Kind("text", "texts", "text", model="masked language model"),
}


def kind_of(task: str, form: Format) -> Kind:
    """What a record of a task is; of `causal` it depends on the format."""
    return _BY_TASK.get(task) or _BY_FORMAT[form]
