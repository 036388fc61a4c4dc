"""A task: what a plan's model learns from records. One class in one file of this folder is all of it.

Records become examples, examples rows of tokens and labels, and a row goes through the model as logits and targets. The
loss of a row is the sum of the cross-entropies of its targets, and training divides it by their number. An evaluation
is sums of counters, from which the figures follow.

What is done to one example depends on that example and the plan alone: a privacy unit is protected only if no record
decides how another is read, cut, batched or scored.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.lm.tasks.auto import Auto
from cloister.lm.text.examples import BATCH_CHARACTERS, Example, Text
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, one_each
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import DataSection

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

Draw = Callable[[tuple[int, ...]], NDArray[np.float64]]
"""Numbers of a shape, uniform in [0, 1)."""

_REFUSED = "refused by the task"

_Read = tuple[Record, tuple[Text, ...], dict[str, Any], str]
"""A record, its texts, what else an example has of it, and its place."""


@dataclass(frozen=True)
class HeldOut:
    """Sums over scored labels; `+` adds two of them."""

    loss_nats: float = 0.0
    """Sum of -log p(label), in nats."""
    correct: int = 0
    """Labels to which the model gave the highest probability."""
    tokens: int = 0
    """Labels scored."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """The task's counters (`Task.counters`) by name; 0 where one is missing."""

    def __add__(self, other: HeldOut) -> HeldOut:
        names = dict.fromkeys((*self.counts, *other.counts))
        return HeldOut(
            self.loss_nats + other.loss_nats,
            self.correct + other.correct,
            self.tokens + other.tokens,
            {name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in names},
        )

    @property
    def loss(self) -> float:
        """Nats per label; NaN where nothing was scored."""
        return self.loss_nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows a float."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf

    @property
    def accuracy(self) -> float:
        """Fraction of labels with the highest probability; NaN where nothing was scored."""
        return self.correct / self.tokens if self.tokens else math.nan


class Pass(Protocol):
    """A forward pass through a model, on its device and in its precision (`lm/model/passes.py`)."""

    module: nn.Module

    def outputs(self, **inputs: Any) -> Any:
        """What the model gives for its inputs, with its logits (B, T, V)."""

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The logits of that."""

    def places(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The inputs of packed tokens (B, L): the tokens, and `position_ids` where the model takes them."""

    def before_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """1 up to the last token of each row (B, L) that is no padding, and 0 after it; int64 (B, L)."""


class Scoring(Protocol):
    """The evaluation of one model, for what a task asks it beside the labels of held-out records."""

    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer of the model."""

    @property
    def forward(self) -> Pass:
        """The forward pass."""

    def each_rows(
        self,
        score: Callable[[slice, torch.Tensor, torch.Tensor, torch.Tensor | None], None],
        sequences: Sequences,
        *,
        trim: bool = False,
    ) -> None:
        """Call `score` with the rows, tokens, targets and positions of each batch, without a pass."""

    def each_batch(
        self,
        score: Callable[[slice, torch.Tensor, torch.Tensor], None],
        sequences: Sequences,
        *,
        trim: bool = False,
    ) -> None:
        """Call `score` with the rows, targets and logits of each batch (`lm/training/evaluate.py`)."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this process, added up over all ranks."""


class Task(ABC):
    """What the model of a plan learns from records.

    Args:
        data: What a record is.
    """

    auto: ClassVar[Auto]
    """The class of the model."""
    ends: ClassVar[bool] = True
    """Whether texts end with the end-of-text token."""
    by_opacus: ClassVar[bool] = True
    """Whether tests compare the gradients of Opacus's hooks with single passes; they see each row of a pass once."""
    masks: ClassVar[bool] = False
    """Whether tokens are hidden by a mask token."""

    def __init__(self, data: DataSection) -> None:
        self.data = data

    # Records -> examples.

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that a tokenizer can make examples, without any record.

        Raises:
            DataError: it cannot.
        """
        return

    @abstractmethod
    def sample(self) -> dict[str, Any]:
        """A record with the fields that the task reads."""

    @property
    def content(self) -> tuple[str, ...]:
        """The fields by which two records are the same: by default those that hold text."""
        return tuple(name for name, value in self.sample().items() if not isinstance(value, int | float))

    @abstractmethod
    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """The texts that are made of a record, each with the spans that are learned; None: it is left out.

        Args:
            tokenizer: The tokenizer.
            unusable: `tried` of it calls what may fail, and leaves the record out.
            place: Where the record is.
            record: The record.
        """

    def beside(self, unusable: Unusable, place: str, record: Record) -> dict[str, Any] | None:
        """What an example has of a record beside its tokens, by the field of `Example`; arguments as for `texts`."""
        return {}

    @abstractmethod
    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """Makes examples of texts, each from its own text.

        Raises:
            DataError: no text can become an example with this tokenizer.
        """

    def merged(self, parts: Sequence[Example], beside: Mapping[str, Any]) -> Example:
        """The example of a record, from those of its texts."""
        (only,) = parts
        return replace(only, **beside)

    def examples(
        self,
        records: Iterable[Record],
        tokenizer: PreTrainedTokenizerBase,
        unusable: Unusable,
        owner: str = "",
    ) -> Iterator[tuple[Record, Example]]:
        """Turn each record into one example of any length; an empty record gives an empty example.

        Args:
            records: The records.
            tokenizer: The tokenizer.
            unusable: Counts the records that are left out: those that lack the plan's fields, have another type in
                them, or that the chat template or the tokenizer refuses.
            owner: The field of a record that is still needed; empty: none is.

        Yields:
            A record with no other field than `owner`, and its example; in the order of the records, without those
            that are left out.

        Raises:
            DataError: as `check` and `encoder`.
        """
        self.check(tokenizer)
        encode = self.encoder(tokenizer)

        def read() -> Iterator[_Read]:
            numbers = itertools.count(1)
            for record in records:
                number = next(numbers)
                place = unusable.place or f"record {number}"
                # An own task may raise anything for a record, and that must tell nobody that the record is there.
                texts = unusable.tried(_REFUSED, self._checked_texts, tokenizer, unusable, place, record)
                beside = unusable.tried(_REFUSED, self.beside, unusable, place, record) if texts else None
                owned = {owner: record.get(owner)} if owner and texts else {}
                del record  # no record must take the memory of another
                if texts is not None and beside is not None:
                    yield owned, texts, beside, unusable.place
                del texts, beside, owned

        for batch in _by_size(read()):
            made = unusable.tried_together(
                "refused by the tokenizer",
                lambda batch: [
                    _whole(self.merged(parts, beside))
                    for parts, (_, _, beside, _) in zip(_grouped(encode, batch), batch, strict=True)
                ],
                batch,
                [each[3] for each in batch],
            )
            for (record, _, _, place), example in zip(batch, made, strict=True):
                if example is not None:
                    unusable.place = place
                    yield record, example

    def _checked_texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """As `texts`, which may be that of a package.

        Raises:
            DataError: they are no texts with spans.
        """
        texts = self.texts(tokenizer, unusable, place, record)
        for text, spans in texts or ():
            if not isinstance(text, str) or any(len(span) != 2 for span in spans):
                raise DataError(
                    place, type(text).__name__, expected="texts, each with the spans that are learned"
                )
        return texts

    # Examples -> sequences.

    @property
    def divides(self) -> bool:
        """Whether a record without a privacy unit goes on in further sequences, and its end can be held out."""
        return False

    @property
    def grain(self) -> int:
        """Tokens at whose multiples an example that divides may be divided."""
        return 1

    @property
    def packs(self) -> bool:
        """Whether a sequence may have several records."""
        return False

    @property
    def tokens_each(self) -> int:
        """Tokens of a sequence."""
        return self.data.sequence_length

    @property
    def labels_each(self) -> int:
        """Labels of a sequence."""
        return self.data.sequence_length

    def cut(self, example: Example, length: int) -> Example:
        """The first tokens of an example, which may be more than a sequence; its labels stay with them."""
        return example

    def rows(self, example: Example) -> NDArray[np.bool_]:
        """For each sequence of an example that starts a new sequence: whether anything of it is learned."""
        assert example.labels is not None
        return np.array([len(example) > 0 and bool((example.labels != NOT_LEARNED).any())])

    def lay_out(self, examples: Sequence[Example], pad: int, *, packing: bool) -> Sequences:
        """Place examples in sequences; drop sequences of which nothing is learned.

        Args:
            examples: The examples.
            pad: The padding's token.
            packing: Whether a sequence may have several of them.
        """
        return one_each(examples, self.tokens_each, self.labels_each, pad)

    def answered(self, example: Example) -> Example:
        """An example that is held out, with the roles of what an evaluation scores."""
        return example

    def asked(
        self, held_out: Sequence[Example], tokenizer: PreTrainedTokenizerBase, unusable: Unusable
    ) -> Sequences | None:
        """What an evaluation asks the model beside the labels of held-out records; None: nothing.

        Args:
            held_out: The examples that are held out.
            tokenizer: The tokenizer.
            unusable: Counts the records of which nothing can be asked.
        """
        return None

    def scored(self, held_out: Sequences, tokenizer: PreTrainedTokenizerBase) -> Sequences:
        """Held-out sequences as an evaluation scores them: what is random in training is fixed here, for each row by
        its own tokens, so that the losses of two rounds can be compared and no record changes another's."""
        return held_out

    # The model.

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set what the task needs in the configuration of a model."""
        return

    @property
    def longest(self) -> int:
        """The most tokens that the model's positions are for."""
        return self.data.sequence_length

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs of a pass through the model by which it is tried: of rows of tokens (B, L) without padding, as
        `outputs` makes them."""
        return {"input_ids": tokens}

    def in_public(self) -> DataSection:
        """What is learned in training on public text."""
        return self.data

    def outputs(
        self, forward: Pass, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, T, V) and what they are compared with (B, T), -100 where nothing is.

        Args:
            forward: The forward pass.
            tokens: (B, L) int64.
            targets: (B, M) int64, as `targets` gives them.
            positions: (B, L): `position_ids` of packed records, or None.
        """
        return forward.logits(**forward.places(tokens, positions)), targets

    def drawn(
        self,
        tokens: NDArray[np.int32],
        labels: NDArray[np.int32],
        tokenizer: PreTrainedTokenizerBase,
        draw: Draw,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Rows of tokens (R, L) and labels (R, M) as they are learned this time, where that is random.

        Training calls it at each use of a row. What is drawn must not depend on the rows but by their number.

        Args:
            tokens: The rows, which are not changed.
            labels: Their labels, which are not changed.
            tokenizer: The tokenizer.
            draw: Gives random numbers for shapes (R, ...).
        """
        return tokens, labels

    def targets(self, labels: NDArray[np.int32]) -> NDArray[np.int64]:
        """Labels (R, M) as the model's outputs are compared with them: (R, M) int64, -100 where nothing is learned."""
        return labels.astype(np.int64)

    def learned(self, targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of labels that each row of targets (R, M) is learned from: (R,)."""
        return np.asarray((targets != NOT_LEARNED).sum(axis=1), np.int64)

    def row_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each row in nats, (B,), summed over its targets, as `outputs` gives logits and targets.

        A row's loss is a function of that row alone. Training divides it by the row's number of labels (`learned`).
        """
        from cloister.lm.tasks.losses import losses_of_rows

        return losses_of_rows(logits, targets)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of rows, ()."""
        if type(self).row_losses is not Task.row_losses:
            return self.row_losses(logits, targets).sum()
        from cloister.lm.tasks.losses import summed_loss

        return summed_loss(logits, targets)

    def factors(self, targets: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """What the loss of each row of targets (R, M) is multiplied by in training: (R,); None: 1."""
        return None

    # An evaluation.

    def counters(self) -> tuple[str, ...]:
        """The names of the sums of an evaluation beside loss, labels and correct ones."""
        return ()

    def known(self, sequences: Sequences) -> Mapping[str, int]:
        """The counters that held-out sequences have without a model."""
        return {}

    def count(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        """The counters of a batch, as `outputs` gives it: (K,) int64 in the order of `counters`; None: zeros."""
        return None

    def answers(self, scoring: Scoring, asked: Sequences) -> HeldOut:
        """The counters of what `asked` has made."""
        return HeldOut()

    def predicted(
        self, module: Any, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> list[dict[str, Any]] | None:
        """What a saved model finds in a text, in rows for a table; None: it writes text instead (`cloister generate`).

        Args:
            module: The model, in evaluation mode on the CPU.
            tokenizer: Its tokenizer.
            text: The text, of which no more is read than of a record.

        Raises:
            DataError: the text cannot be used.
        """
        return None

    @abstractmethod
    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """The figures of the sums on held-out records, by their names in `figures.py`; those that there are."""

    def nothing_learnable(self, longest: int, count: int) -> DataError:
        """That none of `count` records has anything to learn in its first `longest` tokens."""
        field, answer = self.wanting()
        return DataError(
            field,
            expected=f"at least one record with a learnable token in its first {longest} tokens, "
            f"but none of the {count} has one",
            fix=f"raise data.sequence_length, or {answer}",
        )

    def wanting(self) -> tuple[str, str]:
        """The field of the plan that names what is learned, and what to do where records have nothing in it."""
        return "data.text_field", "check the records"


def drawn_by(generators: Sequence[np.random.Generator]) -> Draw:
    """Draws of each of G generators for its own R / G rows, in their order."""

    def draw(shape: tuple[int, ...]) -> NDArray[np.float64]:
        each = (shape[0] // len(generators), *shape[1:])
        return np.concatenate([generator.random(each) for generator in generators])

    return draw


def _whole(example: Example) -> Example:
    """An example that can be laid out beside others.

    Raises:
        DataError: its labels are no list of whole numbers.
    """
    labels = example.labels
    if labels is not None and not (labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)):
        raise DataError("labels", labels.shape, expected="whole numbers, one after the other")
    return example


def sample_line(task: Task) -> str:
    """A record with the fields that a plan asks for, as a line of JSONL."""
    owner = {task.data.owner: "..."} if task.data.owner else {}
    return json.dumps(task.sample() | owner, ensure_ascii=False)


def _by_size(read: Iterable[_Read]) -> Iterator[list[_Read]]:
    """Collect records into batches of limited size: the intermediate results of a tokenizer call are large."""
    batch: list[_Read] = []
    size = 0
    for item in read:
        batch.append(item)
        size += sum(len(text) for text, _ in item[1]) + sum(len(str(owner)) for owner in item[0].values())
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _grouped(
    encode: Callable[[Sequence[Text]], list[Example]], batch: Sequence[_Read]
) -> Iterator[list[Example]]:
    """The examples of the texts of each record."""
    made = iter(encode([text for _, texts, _, _ in batch for text in texts]))
    for _, texts, _, _ in batch:
        yield [next(made) for _ in texts]
