"""The hash of a vector: it names a global model in the protocol, and a site signs it for its masked vector.

BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), 256 bits. Each party hashes each vector that it sends or gets,
so hashing speed limits a round: one core does SHA-256 at a third of the speed. Short inputs, and hashes that are shown
to people, use SHA-256.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from cloister.protocol.encoding import pack


def vector_hash(vector: npt.NDArray[Any]) -> bytes:
    """32 bytes: the hash of a vector's numbers as little-endian bytes; it does not cover shape and type."""
    return blake3(np.ascontiguousarray(vector).view(np.uint8).data).digest()


def basis(
    model: bytes,
    clip: float,
    steps: tuple[tuple[str, int], ...] = (),
    scales: bytes = b"",
) -> bytes:
    """32 bytes that name all that the vectors of a sum are computed from.

    Args:
        model: Hash of the global model.
        clip: Clipping norm, if the unit of privacy is the site; otherwise 0.
        steps: Local steps of each site of the cohort; empty where the plan gives all sites the same.
        scales: Bounds of the blocks of a compressed update, as the message has them; otherwise empty.
    """
    counted = (steps,) if steps else ()
    scaled = (scales,) if scales else ()  # bytes, so it is not taken for steps
    return hashlib.sha256(pack("cloister/basis/1", model, clip.hex(), *counted, *scaled)).digest()
