"""The hash of a vector: it names a global model in the protocol, and a site signs it for its masked vector.

BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), 256 bits. Each party hashes each vector that it sends or gets,
so hashing speed limits a round: one core does SHA-256 at a third of the speed. Short inputs, and hashes that are shown
to people, use SHA-256.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from cloister.protocol.messages.messages import Instructions
from cloister.protocol.messages.wire import to_bytes


def vector_hash(vector: npt.NDArray[Any]) -> bytes:
    """32 bytes: the hash of a vector's numbers as little-endian bytes; it does not cover shape and type."""
    return blake3(np.ascontiguousarray(vector).view(np.uint8).data).digest()


@lru_cache(maxsize=8)  # a process that plays many sites is told the same by the coordinator for all of them
def instructions_digest(told: Instructions) -> bytes:
    """32 bytes that name everything that the sites of a sum are told: the hash of its canonical encoding."""
    return hashlib.sha256(to_bytes(told)).digest()
