"""Spans: every tiling covers the vector at block edges; manifests name a vector, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.vector.span import (
    Manifest,
    check_manifest,
    check_received,
    check_tiles,
    manifest_digest,
    manifest_of,
)
from cloister.protocol.encoding import pack
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import BLOCK, Span, cut, tile
from cloister.protocol.messages.digest import vector_hash
from cloister.tests.tools.raises import raises

VECTOR = np.arange(5 * BLOCK + 3, dtype=np.uint32)


def pieces_of(vector: Any, parts: int) -> list[tuple[int, Any]]:
    return [(span.start, span.of(vector)) for span in tile(vector.size, parts)]


@given(length=st.integers(0, 100 * BLOCK), parts=st.integers(1, 40))
def test_a_tiling_covers_the_vector_in_whole_blocks_of_about_one_size(length: int, parts: int) -> None:
    spans = tile(length, parts)
    assert len(spans) == parts
    check_tiles(spans, length)
    assert all(span.start % BLOCK == 0 or span.start == length for span in spans)
    assert max(span.size for span in spans) - min(span.size for span in spans) <= BLOCK


@given(offset=st.integers(0, 3 * BLOCK), size=st.integers(0, 3 * BLOCK))
def test_blocks_are_cut_at_global_offsets(offset: int, size: int) -> None:
    end = 0
    for begin, stop, number, skip in cut(offset, size):
        assert begin == end
        assert number * BLOCK + skip == offset + begin
        assert stop == size or (offset + stop) % BLOCK == 0
        end = stop
    assert end == size


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 4)],
        [(0, 11)],
        [(1, 10)],
        [(0, 4), (5, 10)],
        [(0, 5), (4, 10)],
        [(4, 10), (0, 4)],
        [(0, 10), (0, 10)],
    ],
)
def test_spans_that_do_not_tile_are_refused(spans: list[tuple[int, int]]) -> None:
    with raises(UpdateError, "end of the last span", "start of a span"):
        check_tiles([Span(*span) for span in spans], 10)
    check_tiles([Span(0, 4), Span(4, 4), Span(4, 10)], 10)
    check_tiles([], 0)


def test_a_manifest_is_the_hash_of_each_span_and_its_digest_is_canonical() -> None:
    spans = tile(VECTOR.size, 3)
    manifest = manifest_of(pieces_of(VECTOR, 3))
    assert manifest == tuple((s.start, s.size, vector_hash(VECTOR[s.start : s.stop])) for s in spans)
    check_manifest(manifest, VECTOR.size)
    assert manifest_digest(manifest) == blake3(pack("cloister/manifest/1", manifest)).digest()
    # A rank that has one span hashes that one alone.
    apart = [entry for piece in pieces_of(VECTOR, 3) for entry in manifest_of([piece])]
    assert tuple(apart) == manifest
    assert manifest_of(pieces_of(VECTOR[:0], 2)) == ()


def test_whatever_changes_in_a_vector_changes_the_digest() -> None:
    digests = {manifest_digest(manifest_of(pieces_of(VECTOR, parts))) for parts in (1, 2, 3)}
    for where in (0, BLOCK, VECTOR.size - 1):
        changed = VECTOR.copy()
        changed[where] ^= 1
        digests.add(manifest_digest(manifest_of(pieces_of(changed, 3))))
    assert len(digests) == 6


def of_two(*, second: int = 4, length: int = 6, digest: bytes = bytes(32)) -> Manifest:
    return ((0, 4, bytes(32)), (second, length, digest))


@pytest.mark.parametrize(
    "manifest",
    [
        (),
        of_two(second=5),
        of_two(second=3),
        of_two(length=7),
        of_two(length=0),
        of_two(digest=bytes(31)),
        of_two()[::-1],
        of_two()[:1],
        ((-1, 11, bytes(32)),),
        (*of_two(), (10, 0, bytes(32))),
    ],
)
def test_a_manifest_that_does_not_tile_the_vector_is_refused(manifest: Manifest) -> None:
    with pytest.raises(UpdateError):
        check_manifest(manifest, 10)
    check_manifest(of_two(), 10)


def test_what_is_received_is_what_the_manifest_says_or_refused() -> None:
    pieces = pieces_of(VECTOR, 3)
    manifest, spans = manifest_of(pieces), [values for _, values in pieces]
    assert [offset for offset, _ in check_received(manifest, spans, VECTOR.size, np.uint32)] == [
        offset for offset, _ in pieces
    ]
    flipped = spans[1].copy()
    flipped[7] ^= 1
    for wrong in (
        spans[:-1],
        [*spans, spans[0]],
        spans[::-1],
        [spans[0], flipped, spans[2]],
        [spans[0], spans[1][:-1], spans[2]],
        [span.astype(np.float32) for span in spans],
    ):
        with raises(UpdateError, "spans", "start of a span", "span at 0"):
            check_received(manifest, wrong, VECTOR.size, np.uint32)
    with raises(UpdateError, "end of the last span"):
        check_received(manifest, spans, VECTOR.size + 1, np.uint32)


def test_a_span_or_tiling_that_cannot_be_is_refused() -> None:
    for start, stop in ((-1, 2), (3, 2)):
        with raises(ValueError, "span"):
            Span(start, stop)
    with raises(ValueError, "length", says="parts is 0"):
        tile(5, 0)
