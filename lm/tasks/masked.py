"""Masked language modelling: hidden tokens are learned from those before and after them (Devlin et al. 2019, "BERT:
Pre-training of deep bidirectional transformers for language understanding").

Each token of a text is learned with probability `data.mask_share`, on its own. Of the learned ones 80 % are replaced by
the mask token, 10 % by a random token of the vocabulary, and 10 % are left as they are. Special tokens, also those that
are written out in a text, are never learned. Each sequence has as many tokens of one text as fit between the special
tokens of the tokenizer, as users call the saved model; a text goes on in further sequences.

What is learned is drawn anew at each use of a sequence. With DP-SGD it comes from the site's secret stream, as dropout
does: it is the mechanism's own randomness, with the same law for every unit. Otherwise it is a function of the public
seed, the round, the step and the place in the batch, the same at all sites: a model could be crafted that learns only
where certain places are hidden, and the sum of updates would be that of the one site that hides them. An evaluation
draws from a fixed seed and the sequence's own tokens.

The loss of a sequence is the mean over its learned tokens; where nothing is learned it is 0, and so is its gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloister.lm.tasks.auto import MASKED
from cloister.lm.tasks.task import Draw, HeldOut, Pass, Task, drawn_by
from cloister.lm.text.examples import ANSWER, CONTEXT, Encoder, Example, Text, text_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.text.special import Surround
from cloister.protocol.errors import DataError

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_HIDDEN, _RANDOM = 0.8, 0.1
"""Of the learned tokens, the share that the mask token replaces, and that a random token does."""
_SHOWN = 5
"""Tokens that a prediction lists for each mask token."""


class Masked(Task):
    """Texts of which tokens are hidden."""

    auto = MASKED
    ends = False
    masks = True
    by_opacus = False  # no test compares its gradients with single passes

    def sample(self) -> dict[str, Any]:
        """A text."""
        return {self.data.text_field: "..."}

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """The text."""
        without = f"without the fields of data.format {self.data.format!r}"
        text = unusable.tried(without, text_in, record, place, self.data.text_field)
        return None if text is None else ((text, [(0, len(text))]),)

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """Texts in pieces that fill a sequence each, with the special tokens of the tokenizer."""
        encode, around = Encoder(tokenizer, whole=True, close=False), Surround(tokenizer, self.data)
        special = np.array(sorted(tokenizer.all_special_ids), np.int32)

        def pieces(text: Example) -> Example:
            starts = range(0, len(text), around.room)
            parts = [around(text.tokens[at : at + around.room]) for at in starts]
            tokens = np.concatenate([text.tokens[:0], *parts])
            role = np.where(np.isin(tokens, special), CONTEXT, ANSWER).astype(np.uint8)
            return Example(tokens, role, text.bytes_each)

        return lambda batch: [pieces(text) for text in encode(batch)]

    @property
    def divides(self) -> bool:
        """A text does."""
        return True

    @property
    def grain(self) -> int:
        """A sequence, which has its special tokens at both ends."""
        return self.data.sequence_length

    def cut(self, example: Example, length: int) -> Example:
        """The first sequences."""
        return example.piece(0, length)

    def rows(self, example: Example) -> NDArray[np.bool_]:
        """Sequences with a token that may be learned."""
        return np.asarray((self._rows(example, 0)[1] != NOT_LEARNED).any(axis=1), np.bool_)

    def lay_out(self, examples: Sequence[Example], pad: int, *, packing: bool) -> Sequences:
        """Place the pieces of each example in sequences of their own; the labels are the tokens that may be learned."""
        none = np.empty((0, self.data.sequence_length), np.int32)
        made = [self._rows(example, pad) for example in examples]
        tokens, labels = (np.concatenate([none, *(each[part] for each in made)]) for part in (0, 1))
        kept = (labels != NOT_LEARNED).any(axis=1)
        return Sequences(tokens[kept], labels[kept], None, 0)

    def _rows(self, example: Example, pad: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The tokens (R, L) of the sequences of an example, and of them those that may be learned, else -100 (R, L)."""
        length = self.data.sequence_length
        tokens = np.full(-(-len(example) // length) * length, pad, np.int32)
        labels = np.full(len(tokens), NOT_LEARNED, np.int32)
        tokens[: len(example)] = example.tokens
        labels[: len(example)] = np.where(example.role == ANSWER, example.tokens, NOT_LEARNED)
        return tokens.reshape(-1, length), labels.reshape(-1, length)

    def scored(self, held_out: Sequences, tokenizer: PreTrainedTokenizerBase) -> Sequences:
        """Hide tokens of each sequence by a fixed seed and its own tokens."""
        if not len(held_out):
            return held_out
        own = drawn_by([_generator_of(row) for row in held_out.tokens])
        tokens, labels = self.drawn(held_out.tokens, held_out.labels, tokenizer, own)
        return Sequences(tokens, labels, None, 0)

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Name the padding's token."""
        config.get_text_config().pad_token_id = tokenizer.pad_token_id

    def drawn(
        self,
        tokens: NDArray[np.int32],
        labels: NDArray[np.int32],
        tokenizer: PreTrainedTokenizerBase,
        draw: Draw,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Choose the tokens that are learned, and hide them: two numbers for each place, whatever is there."""
        numbers = draw((*tokens.shape, 2))
        chance, other = numbers[..., 0] / self.data.mask_share, numbers[..., 1] * len(tokenizer)
        learned = (labels != NOT_LEARNED) & (chance < 1)
        hidden = np.where(chance < _HIDDEN, np.int32(tokenizer.mask_token_id), other.astype(np.int32))
        changed = learned & (chance < _HIDDEN + _RANDOM)
        return np.where(changed, hidden, tokens), np.where(learned, labels, np.int32(NOT_LEARNED))

    def outputs(
        self, forward: Pass, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, L, V). The model attends in both directions, so it is told where the padding begins."""
        return forward.logits(input_ids=tokens, attention_mask=forward.before_padding(tokens)), targets

    def predicted(self, module: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> list[dict[str, Any]]:
        """The most probable tokens at each mask token."""
        import torch

        tokens = tokenizer(text, truncation=True, max_length=self.data.sequence_length)["input_ids"]
        places = [place for place, token in enumerate(tokens) if token == tokenizer.mask_token_id]
        if not places:
            wanted = f"a text with {tokenizer.mask_token} in its first {self.data.sequence_length} tokens"
            raise DataError("text", text, expected=wanted)
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([tokens])).logits[0, places, : len(tokenizer)]
        best = logits.softmax(-1).topk(_SHOWN)
        return [
            {"mask": number, "token": tokenizer.decode([token]), "probability": probability}
            for number, (shares, found) in enumerate(
                zip(best.values.tolist(), best.indices.tolist(), strict=True), 1
            )
            for probability, token in zip(shares, found, strict=True)
        ]

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """Loss, accuracy and perplexity of hidden tokens."""
        return {"loss": held_out.loss, "accuracy": held_out.accuracy, "perplexity": held_out.perplexity}


def _generator_of(row: NDArray[np.int32]) -> np.random.Generator:
    """Random numbers that a row of tokens determines."""
    digest = hashlib.sha256(b"cloister/masks/" + row.astype("<i4").tobytes()).digest()
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence(int.from_bytes(digest[:16], "little")))
    )
