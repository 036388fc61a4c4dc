"""Causal language modelling: each token is learned from the tokens before it.

The learned tokens are every token of a text, the completion after a prompt, or the assistant's turns of a chat, and in
each case the end-of-text token that follows. A text that is longer than a sequence continues in the next one; a prompt
or chat is cut, or continues up to `privacy.windows` under a privacy unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloister.lm.tasks.auto import CAUSAL
from cloister.lm.tasks.task import HeldOut, Task
from cloister.lm.text.examples import CONTEXT, END, Encoder, Example, Text, messages_in, rendered, text_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import Sequences, joined, next_tokens
from cloister.protocol.errors import DataError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

BYTES = "bytes"
"""UTF-8 bytes of the learned text."""


class Causal(Task):
    """Texts, prompts with completions, or chats."""

    auto = CAUSAL

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check for a chat template, and for the offsets of tokens in a text, where the format needs them."""
        if self.data.format == "messages" and not tokenizer.chat_template:
            raise DataError(
                "data.format",
                "messages",
                expected="'prompt' or 'text', because the tokenizer has no chat template",
                fix="set model.tokenizer to one with a chat template",
            )
        if self.data.format != "text" and not tokenizer.is_fast:
            raise DataError(
                "data.format",
                expected="'text', because the tokenizer cannot give the offsets of its tokens in a text",
                fix="set model.tokenizer to a fast tokenizer (of the tokenizers library)",
            )

    def sample(self) -> dict[str, Any]:
        """A text, a prompt with its completion, or a chat."""
        if self.data.format == "messages":
            return {
                self.data.messages_field: [{"role": role, "content": "..."} for role in ("user", "assistant")]
            }
        if self.data.format == "prompt":
            return {self.data.prompt_field: "...", self.data.completion_field: "..."}
        return {self.data.text_field: "..."}

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """One text, of a chat as its template renders it."""
        without = f"without the fields of data.format {self.data.format!r}"
        if (fields := unusable.tried(without, self._fields, place, record)) is None:
            return None
        if isinstance(fields, tuple):
            return (fields,)
        text = unusable.tried("refused by the chat template", rendered, tokenizer, place, fields)
        return None if text is None else (text,)

    def _fields(self, place: str, record: Record) -> Text | list[dict[str, Any]]:
        """A text or prompt as it is learned, or the messages of a chat."""
        data = self.data
        if data.format == "messages":
            return messages_in(record, place, data.messages_field)
        if data.format == "prompt":
            prompt = text_in(record, place, data.prompt_field)
            text = prompt + text_in(record, place, data.completion_field)
            return text, [(len(prompt), len(text))]
        text = text_in(record, place, data.text_field)
        return text, [(0, len(text))]

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """Tokens with the begin and end tokens of the tokenizer, which the template of a chat adds itself."""
        return Encoder(tokenizer, whole=self.data.format == "text", close=self.data.format != "messages")

    def answered(self, example: Example) -> Example:
        """Of a chat the answers' own tokens: what its template adds behind each is the same in all of them."""
        if self.data.format != "messages":
            return example
        return replace(example, role=np.where(example.role == END, CONTEXT, example.role).astype(np.uint8))

    @property
    def divides(self) -> bool:
        """A text does."""
        return self.data.format == "text"

    @property
    def packs(self) -> bool:
        """If the plan says so."""
        return self.data.packing

    def cut(self, example: Example, length: int) -> Example:
        """The first tokens."""
        return example.piece(0, length)

    def rows(self, example: Example) -> NDArray[np.bool_]:
        """Sequences with a learned token that is not their first, which has none before it."""
        length = self.data.sequence_length
        role = np.zeros(-(-len(example) // length) * length, np.uint8)
        role[: len(example)] = example.role
        return np.asarray(role.reshape(-1, length)[:, 1:].any(axis=1), np.bool_)

    def lay_out(self, examples: Sequence[Example], pad: int, *, packing: bool) -> Sequences:
        """Place examples one after the other, or each in sequences of its own."""
        apart = self.data.format != "text"
        return joined(examples, self.data.sequence_length, pad, packing=packing, apart=apart)

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let BERT-like models, which attend to later tokens by default, attend to earlier ones only."""
        if getattr(config, "is_decoder", True) is False and not config.is_encoder_decoder:
            config.is_decoder = True

    def targets(self, labels: NDArray[np.int32]) -> NDArray[np.int64]:
        """For each position the token that follows it."""
        return next_tokens(labels)

    def counters(self) -> tuple[str, ...]:
        """The bytes."""
        return (BYTES,)

    def known(self, sequences: Sequences) -> Mapping[str, int]:
        """The bytes."""
        return {BYTES: sequences.n_bytes}

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """Loss, accuracy, perplexity, and bits per byte: loss_nats / (ln 2 x bytes), comparable between tokenizers."""
        n_bytes = held_out.counts.get(BYTES, 0)
        return {
            "loss": held_out.loss,
            "accuracy": held_out.accuracy,
            "perplexity": held_out.perplexity,
            "bits_per_byte": held_out.loss_nats / (np.log(2) * n_bytes) if n_bytes else float("nan"),
        }

    def wanting(self) -> tuple[str, str]:
        """The field of the text, the completion or the chat."""
        if self.data.format == "messages":
            return "data.messages_field", "give the turns to be learned the role 'assistant'"
        if self.data.format == "prompt":
            return "data.completion_field", "check the records"
        return super().wanting()
