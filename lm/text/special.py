"""The special tokens that a tokenizer adds around a text by itself, as users of a saved model call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import DataSection

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


class Surround:
    """The tokens around a text, and the room that they leave for it in a sequence.

    Args:
        tokenizer: The tokenizer.
        data: The plan's section.

    Raises:
        DataError: the special tokens are not around a text, or leave no room for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
        self.start, self.end = _special_tokens(tokenizer, data.task)
        added = len(self.start) + len(self.end)
        self.room = data.sequence_length - added
        """Tokens of a text in a sequence."""
        if self.room < 1:
            raise DataError(
                "data.sequence_length",
                data.sequence_length,
                expected=f"room for a token of the text beside the {added} special ones of the tokenizer",
                fix="raise data.sequence_length",
            )

    def __call__(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens (n,) of a text between the special ones."""
        return joined_tokens(self.start, tokens, self.end)


def joined_tokens(
    before: Sequence[int], tokens: NDArray[np.int32], after: Sequence[int]
) -> NDArray[np.int32]:
    """Tokens (n,) between others."""
    return np.concatenate([before, tokens, after], dtype=np.int32, casting="unsafe")


def _special_tokens(tokenizer: PreTrainedTokenizerBase, task: str) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after every text by itself."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for first in range(len(whole) - len(plain) + 1):
        if whole[first : first + len(plain)] == plain:
            return whole[:first], whole[first + len(plain) :]
    raise DataError(
        "data.task",
        task,
        expected="a tokenizer that adds its special tokens around a text and leaves the text's own",
        fix="set model.tokenizer to another one",
    )
