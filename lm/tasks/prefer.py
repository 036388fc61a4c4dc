"""Preferences: which of two completions of a prompt is the better one, learned by direct preference optimization.

The loss of a pair is that of Rafailov et al. 2023 ("Direct preference optimization: your language model is secretly a
reward model", eq. 7), with x the prompt, y_w the completion that was chosen and y_l the one that was rejected:

    -log sigmoid(beta ((log p(y_w | x) - log q(y_w | x)) - (log p(y_l | x) - log q(y_l | x))))

p is the model that is trained. q, the reference, is the model at the run's start, public training included.
log p(y | x) is the sum over the tokens of y and the end token that fit into a sequence, in float32. A pair counts as
right where the logarithm's argument is above 1/2: the model has moved towards the chosen completion.

q is p without its adapter. Every scheme of the project's adapters begins at no change (B = 0) and leaves the base as it
is, so both are the same module, and at the start the same bits. q's pass is in the same step, in evaluation mode and
without gradients. Refused: a cache of log q. It would be one more file of the sites about single records, to be tied to
the weights and deleted with the run; here nothing is kept, and a pair that is drawn costs about a third more.

Both completions of a pair are one row, so one unit: its gradient is that of the pair's loss, before any norm is taken.
No other pair has a part in it. Losses that compare the records of a batch with each other (contrastive ones, in-batch
negatives) are not offered: a record would change the gradients of others, and clipping bounds none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloister.lm.tasks.auto import CAUSAL
from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.task import HeldOut, Pass, Task
from cloister.lm.text.examples import CONTEXT, Encoder, Example, Text, text_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, next_tokens
from cloister.protocol.plan.plan import DataSection

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class Prefer(Task):
    """Prompts with a chosen and a rejected completion.

    A row has both texts, each of L = `data.sequence_length` tokens: 2 L tokens and labels.
    """

    auto = CAUSAL
    by_opacus = False

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """As for prompts."""
        Causal(self.data).check(tokenizer)

    def sample(self) -> dict[str, Any]:
        """A prompt with its completions."""
        data = self.data
        return dict.fromkeys((data.prompt_field, data.chosen_field, data.rejected_field), "...")

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """The prompt with the chosen completion, and with the rejected one."""
        return unusable.tried("without the fields of a pair", self._texts, place, record)

    def _texts(self, place: str, record: Record) -> tuple[Text, ...]:
        data = self.data
        prompt = text_in(record, place, data.prompt_field)
        both = (prompt + text_in(record, place, field) for field in (data.chosen_field, data.rejected_field))
        return tuple((text, [(len(prompt), len(text))]) for text in both)

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """As for prompts."""
        return Encoder(tokenizer, whole=False, close=True)

    def merged(self, parts: Sequence[Example], beside: Mapping[str, Any]) -> Example:
        """The tokens of both texts; labels where they lie in a row; beside them the first one's number of tokens."""
        length = self.data.sequence_length
        cut = [part.piece(0, length) for part in parts]
        labels = np.full((2, length), NOT_LEARNED, np.int32)
        for row, part in zip(labels, cut, strict=True):
            row[: len(part)] = np.where(part.role == CONTEXT, NOT_LEARNED, part.tokens)
        labels[:, 0] = NOT_LEARNED  # the first token has none before it
        tokens, roles = (
            np.concatenate(each) for each in zip(*((p.tokens, p.role) for p in cut), strict=True)
        )
        return Example(tokens, roles, 0.0, labels.reshape(-1), len(cut[0]))

    @property
    def tokens_each(self) -> int:
        """Those of both texts."""
        return 2 * self.data.sequence_length

    @property
    def labels_each(self) -> int:
        """Those of both texts."""
        return 2 * self.data.sequence_length

    def rows(self, example: Example) -> NDArray[np.bool_]:
        """Whether a token of each completion fits: a loss that sees one of them alone would compare nothing."""
        assert example.labels is not None
        return np.array([_compared(example.labels[None])[0]])

    def lay_out(self, examples: Sequence[Example], pad: int, *, packing: bool) -> Sequences:
        """Each pair in a row of its own: the text that was chosen, padded, and the one that was rejected."""
        length = self.data.sequence_length
        tokens = np.full((len(examples), 2 * length), pad, np.int32)
        labels = np.full(tokens.shape, NOT_LEARNED, np.int32)
        for row, learned, example in zip(tokens, labels, examples, strict=True):
            first = example.beside
            row[:first] = example.tokens[:first]
            row[length : length + len(example) - first] = example.tokens[first:]
            assert example.labels is not None
            learned[:] = example.labels
        return Sequences(tokens, labels, None, 0)

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """As for prompts."""
        Causal(self.data).configure(config, tokenizer)

    def in_public(self) -> DataSection:
        """The chosen completions: public training makes the model that the preferences then move."""
        update = {"task": "causal", "completion_field": self.data.chosen_field}
        return self.data.model_copy(update=update)

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Two texts of each row."""
        return {"input_ids": tokens.repeat(2, 1)}

    def targets(self, labels: NDArray[np.int32]) -> NDArray[np.int64]:
        """For each position of a text the token that follows it."""
        return next_tokens(labels.reshape(-1, self.data.sequence_length)).reshape(labels.shape)

    def learned(self, targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """One pair."""
        return _compared(targets).astype(np.int64)

    def outputs(
        self, forward: Pass, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, 1, 2), 0 and the sigmoid's argument; and 1 (B, 1), where anything is learned: their cross-entropy
        is the loss. Equal log probabilities are no preference, and 0 counts as the larger one."""
        import torch

        length = self.data.sequence_length
        texts, wanted = tokens.reshape(-1, length), targets.reshape(-1, length)
        with _reference(forward.module):
            reference = self.row_losses(forward.logits(input_ids=texts), wanted)
        nats = self.row_losses(forward.logits(input_ids=texts), wanted)
        chosen, rejected = (reference - nats).view(-1, 2).unbind(1)
        margin = self.data.beta * (chosen - rejected)
        learned = (wanted != NOT_LEARNED).any(1).view(-1, 2).all(1)
        logits = torch.stack([torch.zeros_like(margin), margin], 1)
        return logits[:, None], torch.where(learned, 1, NOT_LEARNED)[:, None]

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """Loss of pairs, and the share of them in which the model has moved towards the chosen completion."""
        return {"loss": held_out.loss, "preference_accuracy": held_out.accuracy}

    def wanting(self) -> tuple[str, str]:
        """The fields of the completions."""
        return "data.chosen_field", "check the records"


def _compared(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether rows of two texts (R, 2 L) have a label of each: (R,)."""
    both: NDArray[np.bool_] = (labels.reshape(len(labels), 2, -1) != NOT_LEARNED).any(2).all(1)
    return both


@contextmanager
def _reference(module: nn.Module) -> Iterator[None]:
    """The module without its adapter, in evaluation mode and without gradients.

    PEFT's own `disable_adapter` sets `requires_grad` of all factors when it ends, of those that a round does not train
    too, and of parameters that a mesh has divided.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in module.modules() if isinstance(each, BaseTunerLayer)]
    assert layers, "a sound plan has an adapter"
    training = module.training
    try:
        for layer in layers:
            layer._disable_adapters = True
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        module.train(training)
