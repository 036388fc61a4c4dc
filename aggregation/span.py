"""Spans: contiguous ranges of the flat vector, how they tile it, and the hashes of the spans of a vector.

After training nothing knows which device holds which parameter: a rank has a span, and rounding, clipping, noise and
masks are keyed by the offset in the whole vector. A vector that is sent in spans is named by its manifest: offset,
length and BLAKE3 hash of each span, in their order. The digest of the manifest is what a site signs, so no rank has to
have seen the whole vector. Refused: a hash over the whole vector, which must be computed in one place; a Merkle tree of
fixed leaves, because manifests are short and receivers check each span as it arrives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from cloister.protocol.blocks import BLOCK
from cloister.protocol.digest import vector_hash
from cloister.protocol.encoding import pack
from cloister.protocol.errors import UpdateError

Manifest: TypeAlias = tuple[tuple[int, int, bytes], ...]
"""(offset, length, hash) of each span of a vector, in their order; the hash is `digest.vector_hash`."""

HASH = 32
"""Bytes of a span's hash."""

_MANIFEST = "cloister/manifest/1"


@dataclass(frozen=True, order=True)
class Span:
    """Elements [start, stop) of a vector; it may be empty.

    Raises:
        ValueError: it is not 0 <= start <= stop.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"span is [{self.start}, {self.stop}): expected 0 <= start <= stop")

    @property
    def size(self) -> int:
        """Elements in the span."""
        return self.stop - self.start

    def of(self, vector: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The span's elements of the whole vector, as a view."""
        return vector[self.start : self.stop]


def tile(length: int, parts: int) -> tuple[Span, ...]:
    """Cut a vector into `parts` spans that meet at blocks and differ in length by at most a block.

    A vector with fewer blocks than parts leaves some spans empty.

    Args:
        length: Elements of the vector, 0 or more.
        parts: Spans, 1 or more.

    Raises:
        ValueError: an argument is out of range.
    """
    if length < 0 or parts < 1:
        raise ValueError(f"length is {length}, parts is {parts}: expected 0 or more, and 1 or more")
    blocks = -(-length // BLOCK)
    edges = [min(length, part * blocks // parts * BLOCK) for part in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(edges))


def check_tiles(spans: Iterable[Span], length: int) -> None:
    """Check that spans cover a vector in their order, without gaps or overlaps.

    Args:
        spans: The spans, in the order of their offsets; they need not meet at blocks.
        length: Elements of the vector.

    Raises:
        UpdateError: they do not.
    """
    end = 0
    for span in spans:
        if span.start != end:
            raise UpdateError("start of a span", span.start, expected=f"{end}, where the span before it ends")
        end = span.stop
    if end != length:
        raise UpdateError("end of the last span", end, expected=f"{length}, the length of the vector")


def hash_spans(vector: npt.NDArray[Any], spans: Iterable[Span], offset: int = 0) -> Manifest:
    """The entries of the manifest for spans of a vector; empty spans have none.

    Args:
        vector: Elements [offset, offset + d) of the whole vector.
        spans: Spans inside of it.
        offset: Element of the whole vector where `vector` starts.

    Raises:
        ValueError: a span is not inside of the vector.
    """
    entries = []
    for span in spans:
        begin, end = span.start - offset, span.stop - offset
        if begin < 0 or end > vector.size:
            raise ValueError(
                f"span is [{span.start}, {span.stop}): expected it in [{offset}, {offset + vector.size})"
            )
        if span.size:
            entries.append((span.start, span.size, vector_hash(vector[begin:end])))
    return tuple(entries)


def check_manifest(manifest: Manifest, length: int) -> None:
    """Check that a manifest, which may come from another machine, tiles a vector.

    Raises:
        UpdateError: its spans leave a gap, overlap, are empty or out of order, or a hash has not 32 bytes.
    """
    for offset, size, digest in manifest:
        if offset < 0 or size < 1 or len(digest) != HASH:
            raise UpdateError(
                "entry of a manifest",
                (offset, size, f"{len(digest)} bytes"),
                expected=f"an offset from 0, a length from 1, and a hash of {HASH} bytes",
            )
    check_tiles((Span(offset, offset + size) for offset, size, _ in manifest), length)


def manifest_digest(manifest: Manifest) -> bytes:
    """32 bytes that name a vector by its manifest: BLAKE3 of the manifest's canonical encoding.

    The same vector in another tiling has another manifest and another digest.

    Raises:
        EncodingError: an offset or a length is negative or does not fit in 64 bits.
    """
    return blake3(pack(_MANIFEST, manifest)).digest()


def assemble(pieces: Sequence[tuple[int, npt.NDArray[Any]]], length: int) -> npt.NDArray[Any]:
    """The whole vector from its spans.

    Args:
        pieces: Offset and elements of each span, in any order.
        length: Elements of the vector.

    Raises:
        UpdateError: they do not tile it.
        ValueError: there are none.
    """
    ordered = sorted(pieces, key=lambda piece: (piece[0], piece[1].size))
    check_tiles((Span(offset, offset + values.size) for offset, values in ordered), length)
    whole: npt.NDArray[Any] = np.concatenate([values for _, values in ordered])
    return whole
