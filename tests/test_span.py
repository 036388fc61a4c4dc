"""Spans: every tiling covers the vector at block edges; manifests name a vector, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.span import (
    Manifest,
    Span,
    assemble,
    check_manifest,
    check_tiles,
    hash_spans,
    manifest_digest,
    tile,
)
from cloister.protocol.blocks import BLOCK, cut
from cloister.protocol.digest import vector_hash
from cloister.protocol.encoding import pack
from cloister.protocol.errors import UpdateError

VECTOR = np.arange(5 * BLOCK + 3, dtype=np.uint32)


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
    with pytest.raises(UpdateError, match="span"):
        check_tiles([Span(*span) for span in spans], 10)
    check_tiles([Span(0, 4), Span(4, 4), Span(4, 10)], 10)
    check_tiles([], 0)


def test_a_manifest_is_the_hash_of_each_span_and_its_digest_is_canonical() -> None:
    spans = tile(VECTOR.size, 3)
    manifest = hash_spans(VECTOR, spans)
    assert manifest == tuple((s.start, s.size, vector_hash(VECTOR[s.start : s.stop])) for s in spans)
    check_manifest(manifest, VECTOR.size)
    assert manifest_digest(manifest) == blake3(pack("cloister/manifest/1", manifest)).digest()
    # A rank that has one span hashes that one alone.
    apart = [entry for span in spans for entry in hash_spans(span.of(VECTOR), [span], span.start)]
    assert tuple(apart) == manifest
    assert hash_spans(VECTOR[:0], tile(0, 2)) == ()


def test_whatever_changes_in_a_vector_changes_the_digest() -> None:
    digests = {manifest_digest(hash_spans(VECTOR, tile(VECTOR.size, parts))) for parts in (1, 2, 3)}
    for where in (0, BLOCK, VECTOR.size - 1):
        changed = VECTOR.copy()
        changed[where] ^= 1
        digests.add(manifest_digest(hash_spans(changed, tile(VECTOR.size, 3))))
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


def test_spans_assemble_in_any_order_and_nothing_else_does() -> None:
    pieces: list[tuple[int, Any]] = [(span.start, span.of(VECTOR)) for span in tile(VECTOR.size, 5)]
    assert np.array_equal(assemble(pieces[::-1], VECTOR.size), VECTOR)
    with pytest.raises(UpdateError, match="span"):
        assemble(pieces[:-1], VECTOR.size)
    with pytest.raises(UpdateError, match="span"):
        assemble([*pieces, pieces[0]], VECTOR.size)


def test_a_span_outside_of_the_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="expected it in"):
        hash_spans(VECTOR[:10], [Span(4, 11)])
    with pytest.raises(ValueError, match="expected it in"):
        hash_spans(VECTOR[10:20], [Span(4, 11)], 10)
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="start <= stop"):
            Span(start, stop)
    with pytest.raises(ValueError, match="parts is 0"):
        tile(5, 0)
