"""What a site keeps of a sum: valid only whole, for the same facts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cloister.clients.state.kept import Kept, run_folder, update_path, write_pieces
from cloister.protocol.errors import StaleError
from cloister.protocol.messages.messages import TRAIN, SumId
from cloister.tests.tools.raises import raises

RUN, FACTS = "a run", {"model": "one", "instructions": "these"}
VECTOR = np.arange(1, 23, dtype=np.uint16)


def about(number: int) -> SumId:
    return SumId(RUN, bytes(32), TRAIN, number)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    made = Kept(tmp_path, tmp_path)
    pieces = [(0, VECTOR[:5]), (5, VECTOR[5:])]
    made.keep(about(1), lambda path: write_pieces(path, pieces), FACTS, durable=True)
    return made


def test_a_vector_comes_back_in_its_pieces(kept: Kept) -> None:
    found = kept.made(about(1), FACTS, VECTOR.size, VECTOR.dtype)
    assert found is not None
    assert [(offset, piece.tolist()) for offset, piece in found.pieces] == [
        (0, VECTOR[:5].tolist()),
        (5, VECTOR[5:].tolist()),
    ]
    for _, piece in found.pieces:
        piece[:] = 0  # masks are added in place
    again = kept.made(about(1), FACTS, VECTOR.size, VECTOR.dtype)
    assert again is not None
    assert np.array_equal(np.concatenate([piece for _, piece in again.pieces]), VECTOR)


def cut(content: bytes, length: int) -> bytes:
    return content[:length]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        *(partial(cut, length=length) for length in (0, 7, VECTOR.nbytes - 1, VECTOR.nbytes, -9, -8, -1)),
        *(partial(flipped, at=place) for place in (0, VECTOR.nbytes - 1, -1, -8)),
        lambda content: content[VECTOR.itemsize :],
        lambda content: content + bytes(8),
    ],
)
def test_a_file_that_is_not_whole_is_none(
    change: Callable[[bytes], bytes], kept: Kept, tmp_path: Path
) -> None:
    path = update_path(run_folder(tmp_path, RUN), 1)
    path.write_bytes(change(path.read_bytes()))
    assert kept.made(about(1), FACTS, VECTOR.size, VECTOR.dtype) is None


def test_a_vector_of_another_length_or_type_is_none(kept: Kept) -> None:
    assert kept.made(about(1), FACTS, VECTOR.size - 1, VECTOR.dtype) is None
    assert kept.made(about(1), FACTS, VECTOR.size // 2, np.uint32) is None
    assert kept.made(about(2), FACTS, VECTOR.size, VECTOR.dtype) is None


def test_other_facts_are_refused_by_their_names(kept: Kept) -> None:
    with raises(StaleError, "update of round 1", "model"):
        kept.made(about(1), {**FACTS, "model": "another"}, VECTOR.size, VECTOR.dtype)


def test_the_newest_round_is_kept_alone(kept: Kept, tmp_path: Path) -> None:
    kept.keep(about(2), lambda path: write_pieces(path, [(0, VECTOR)]), FACTS, durable=False)
    assert [path.name for path in run_folder(tmp_path, RUN).iterdir()] == ["update-00002.ring"]
