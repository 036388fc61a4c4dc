"""The hash of a vector: what names a global model in the protocol, and what a site signs of its masked vector.

BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020), 256 bits. Each party hashes each vector that it sends or gets,
so its speed is the round's: one core does SHA-256 at a third of it. Short things, and what is shown to people, keep
SHA-256.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3


def vector_hash(vector: npt.NDArray[Any]) -> bytes:
    """32 bytes that stand for a vector's numbers, as little-endian bytes; shape and type are not in them."""
    return blake3(np.ascontiguousarray(vector).view(np.uint8).data).digest()
