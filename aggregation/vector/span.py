"""A vector in spans (`protocol/messages/blocks.py`): whether they tile it, and the hashes of its spans.

After training, no code depends on which device holds which parameter: a rank has a span, and rounding, clipping, noise
and masks are keyed by the offset in the whole vector. A vector that is sent in spans is named by its manifest: offset,
length and BLAKE3 hash of each span, in their order. A site signs the digest of the manifest, so no rank needs the whole
vector. Refused: a hash over the whole vector, which must be computed in one place; a Merkle tree of fixed leaves,
because manifests are short and receivers check each span as it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from cloister.protocol.encoding import pack
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import Span
from cloister.protocol.messages.digest import vector_hash

Manifest: TypeAlias = tuple[tuple[int, int, bytes], ...]
"""(offset, length, hash) of each span of a vector, in their order; the hash is `digest.vector_hash`."""

Piece: TypeAlias = tuple[int, npt.NDArray[Any]]
"""Offset and elements of one span."""

HASH = 32
"""Bytes of a span's hash."""

_MANIFEST = "cloister/manifest/1"


def check_tiles(spans: Iterable[Span], length: int) -> None:
    """Check that spans cover a vector in their order, without gaps or overlaps.

    Args:
        spans: The spans, in the order of their offsets; they need not meet at block boundaries.
        length: Elements of the vector.

    Raises:
        UpdateError: the spans leave a gap, overlap or end elsewhere.
    """
    end = 0
    for span in spans:
        if span.start != end:
            raise UpdateError("start of a span", span.start, expected=f"{end}, where the span before it ends")
        end = span.stop
    if end != length:
        raise UpdateError("end of the last span", end, expected=f"{length}, the length of the vector")


def check_pieces(pieces: Sequence[Piece], length: int, dtype: npt.DTypeLike) -> None:
    """Check that the pieces of a vector are of its type and tile it, in their order.

    Args:
        pieces: Offset and elements of each span.
        length: Elements of the whole vector.
        dtype: Type of the elements.

    Raises:
        UpdateError: a piece has another type or more than one dimension, or the pieces do not tile the vector.
    """
    for offset, vector in pieces:
        if vector.dtype != dtype or vector.ndim != 1:
            raise UpdateError(
                f"span at {offset}",
                f"{vector.dtype}{list(vector.shape)}",
                expected=f"one dimension of {np.dtype(dtype).name}",
            )
    check_tiles((Span(offset, offset + vector.size) for offset, vector in pieces), length)


def check_manifest(manifest: Manifest, length: int) -> None:
    """Check that a manifest, which may come from another machine, tiles a vector.

    Raises:
        UpdateError: its spans leave a gap, overlap, are empty or out of order, or a hash does not have 32 bytes.
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


def check_received(
    manifest: Manifest, vectors: Sequence[npt.NDArray[Any]], length: int, dtype: npt.DTypeLike
) -> list[Piece]:
    """The pieces of a vector that came from another party, checked against the manifest that came with them.

    Args:
        manifest: Offset, length and hash of each span.
        vectors: Elements of each span, in the manifest's order.
        length: Elements of the whole vector.
        dtype: Type of the elements.

    Raises:
        UpdateError: the manifest does not tile the vector, or a span has another length, type or hash than the manifest
            states.
    """
    check_manifest(manifest, length)
    if len(vectors) != len(manifest):
        raise UpdateError("spans", len(vectors), expected=f"the {len(manifest)} of the manifest")
    pieces = [(offset, vector) for (offset, _, _), vector in zip(manifest, vectors, strict=True)]
    check_pieces(pieces, length, dtype)
    if manifest_of(pieces) != manifest:
        raise UpdateError("spans", expected="elements that match the hashes of the manifest")
    return pieces


def manifest_of(pieces: Iterable[Piece]) -> Manifest:
    """The manifest of a vector that lies in pieces, in the order of their offsets; empty pieces have no entry."""
    return tuple((offset, vector.size, vector_hash(vector)) for offset, vector in pieces if vector.size)


def add_pieces(total: npt.NDArray[Any], pieces: Iterable[Piece]) -> None:
    """Add the pieces of a vector to a whole vector, in place."""
    for offset, vector in pieces:
        part = total[offset : offset + vector.size]
        np.add(part, vector, out=part)
