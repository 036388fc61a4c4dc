"""Token sequences of one length: two int32 matrices, how examples are laid out in them, and how batches are drawn.

A data loader with workers and collators was refused: all tokens are made before training starts, so no step waits for
data, and a batch is one fancy index into a mapped matrix.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.lm.text.examples import ANSWER, CONTEXT, Example

NOT_LEARNED = -100
"""The label that transformers' loss ignores."""


@dataclass(frozen=True)
class Sequences:
    """Token sequences of one length, with the labels that are learned (`lm/tasks/` says what they mean).

    With `positions`, several examples share a sequence and must not attend to each other. Transformers separates them
    when it is given the positions, no attention mask and `use_cache=False`.
    """

    tokens: NDArray[np.int32]
    """(N, L): token ids; padding comes last."""
    labels: NDArray[np.int32]
    """(N, M): the labels of each sequence, -100 where nothing is learned. Of text: (N, L), the token at the same
    position where it is learned from the tokens before it. Of texts with a class: (N, 1), the class."""
    positions: NDArray[np.int32] | None
    """(N, L): position of the token in its example; None where it is 0..L-1 in every sequence."""
    n_bytes: int
    """UTF-8 bytes of the learned text, without end-of-text tokens: the divisor of the summed loss in bits per
    byte. Where a record is cut, its bytes are divided evenly among its learned tokens."""
    starts: NDArray[np.int64] | None = None
    """(U + 1,): unit u has exactly the rows starts[u]:starts[u + 1], at least one; None without units."""
    shares: NDArray[np.float32] | None = None
    """(N,): weight of a row in the gradient of its unit, 1 in all; None: the same for all rows of a unit."""
    answers: NDArray[np.int32] | None = None
    """(R,): where each of R prompts is completed with each of C choices, in N = R C rows in this order, the choice that
    is its own. The labels are then those by which the choices of a prompt are compared. None: without choices."""

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def n_tokens(self) -> int:
        """Number of labels that are learned."""
        return int(np.count_nonzero(self.labels != NOT_LEARNED))


def next_tokens(labels: NDArray[np.int32]) -> NDArray[np.int64]:
    """The target of each position: `labels` (N, L) shifted one to the left, -100 at the end; (N, L) int64."""
    targets = np.full(labels.shape, NOT_LEARNED, dtype=np.int64)
    targets[:, :-1] = labels[:, 1:]
    return targets


def one_each(examples: Sequence[Example], length: int, labels_each: int, pad: int) -> Sequences:
    """Place each example in a sequence of its own, with its labels.

    Args:
        examples: N examples of at most L tokens and M labels.
        length: L.
        labels_each: M.
        pad: The padding's token.
    """
    tokens = np.full((len(examples), length), pad, np.int32)
    labels = np.full((len(examples), labels_each), NOT_LEARNED, np.int32)
    for row, learned, example in zip(tokens, labels, examples, strict=True):
        assert example.labels is not None
        row[: len(example)] = example.tokens[:length]
        learned[: len(example.labels)] = example.labels[:labels_each]
    return Sequences(tokens, labels, None, 0)


def joined(examples: Sequence[Example], length: int, pad: int, *, packing: bool, apart: bool) -> Sequences:
    """Place examples that learn their own tokens in sequences of L tokens; drop sequences without a learned token.

    Args:
        examples: The examples, of any length.
        length: L.
        pad: The padding's token.
        packing: Fill sequences with several examples.
        apart: With `packing`, begin a new sequence where an example does not fit, and number its positions from 0.
    """
    apart = apart and packing
    if not examples:
        nothing = np.empty((0, length), np.int32)
        return Sequences(nothing, nothing, nothing if apart else None, 0)
    placed = list(_placed(examples, length, pad, whole=apart, joined=packing))
    sizes = np.array([len(example) for example in placed])
    starts = np.cumsum(sizes) - sizes
    tokens = np.concatenate([example.tokens for example in placed]).reshape(-1, length)
    role = np.concatenate([example.role for example in placed]).reshape(-1, length)
    # The first token of a sequence, or of an example kept apart, has no context to be predicted from.
    role[:, 0] = CONTEXT
    positions = None
    if apart:
        places = np.arange(tokens.size) - np.repeat(starts, sizes)
        positions = places.astype(np.int32).reshape(-1, length)
        role[positions == 0] = CONTEXT
    answers = np.add.reduceat(role.ravel() == ANSWER, starts, dtype=np.int64)
    n_bytes = round(float(answers @ np.array([example.bytes_each for example in placed])))
    labels = np.where(role == CONTEXT, np.int32(NOT_LEARNED), tokens)
    kept = role.any(axis=1)
    if not kept.all():
        tokens, labels = tokens[kept], labels[kept]
        positions = None if positions is None else positions[kept]
    return Sequences(tokens, labels, positions, n_bytes)


def _placed(
    examples: Iterable[Example], length: int, pad: int, *, whole: bool, joined: bool
) -> Iterator[Example]:
    """Insert padding between and after examples, so that cuts every `length` tokens fall where they may.

    With `whole`, an example that does not fit into the current sequence starts a new one. Without `joined`, every
    example starts a new sequence.
    """

    def padding(n: int) -> Iterator[Example]:
        if n:
            yield Example(np.full(n, pad, np.int32), np.full(n, CONTEXT, np.uint8), 0.0)

    room = 0  # tokens left in the current sequence
    for example in examples:
        if not joined or (whole and len(example) > room):
            yield from padding(room)
            room = 0
        yield example
        room = (room - len(example)) % length
    yield from padding(room)


def batches(n: int, batch_size: int, seed: tuple[int, ...]) -> Iterator[NDArray[np.int64]]:
    """Draw endless batches of indices below `n`: each epoch visits every index once, in its own random order.

    A batch may span epochs, so every batch has exactly `batch_size` indices, also where `n` is smaller. The same `seed`
    gives the same batches.

    Args:
        n: Number of sequences, 1 or more.
        batch_size: Indices in a batch, 1 or more.
        seed: Of the random orders.
    """
    assert n > 0 < batch_size, "batches of nothing would never come"
    waiting = np.empty(0, np.int64)
    for epoch in itertools.count():
        waiting = np.concatenate([waiting, shuffled((*seed, epoch), n)])
        whole = len(waiting) // batch_size * batch_size
        drawn, waiting = waiting[:whole], waiting[whole:]
        yield from drawn.reshape(-1, batch_size)


def shuffled(seed: tuple[int, ...], n: int) -> NDArray[np.int64]:
    """The indices below `n` in a random order, which `seed` and `n` alone determine: (n,)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(n)
