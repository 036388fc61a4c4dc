"""A mask: a 32-byte seed expanded to a keystream of ring integers, added to or subtracted from a vector.

The mask of a seed is one fixed infinite sequence of elements: element e of the mask is the little-endian
integer in bytes [e w, (e + 1) w) of the keystream, w = 1, 2 or 4 bytes. A keystream is seekable, so a vector
masked in one piece or shard by shard, by any number of ranks or threads, gets the same bytes.

Memory bandwidth determines the design. A vector is traversed once, in blocks that stay in a core's cache, and every
seed's keystream is added to a block while it is cached. Besides the vector, the memory is two blocks for each thread,
for any number of seeds. AES comes from `cryptography` (OpenSSL), which releases the GIL, as does NumPy, so threads run
in parallel. Refused: ChaCha20 as a second keystream, because every processor that trains a language model has AES
instructions, with which AES is faster; a mask as a separate vector (one more copy of the model for each neighbour).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from cloister.protocol.errors import MaskError
from cloister.protocol.messages.blocks import in_threads

Ring = npt.NDArray[np.unsignedinteger[Any]]

TYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
"""Types of the elements that can be masked."""

SEED = 32
"""Bytes of a seed."""
LONGEST = 2**38
"""Maximum number of elements of a mask."""
BLOCK = 256 * 1024
"""Bytes of a block. The block of the vector, its keystream and the encrypted zeros share one core's cache."""

_ZEROS = bytes(BLOCK)


def keystream(seed: bytes, offset: int) -> CipherContext:
    """The keystream of `seed` from byte `offset` on: encrypting zeros with it gives the next bytes.

    AES-256-CTR starts from the 128-bit big-endian counter 0 (NIST SP 800-38A). A seed is used for one mask, so a
    constant nonce is safe.

    Args:
        seed: 32 bytes, uniformly random or from a KDF.
        offset: Byte of the keystream to start from.
    """
    if len(seed) != SEED:
        raise MaskError("seed", f"{len(seed)} bytes", expected=f"{SEED} bytes")
    block, skip = divmod(offset, 16)
    context = Cipher(algorithms.AES(seed), modes.CTR(block.to_bytes(16, "big"))).encryptor()
    context.update(bytes(skip))
    return context


def apply(
    vector: Ring,
    add: Sequence[bytes] = (),
    subtract: Sequence[bytes] = (),
    *,
    offset: int = 0,
    threads: int = 1,
) -> None:
    """Add the masks of the seeds `add` to `vector` and subtract those of `subtract`, modulo 2^b, in place.

    Args:
        vector: Shape (d,), of one of `TYPES`, contiguous, writable: elements [offset, offset + d) of the whole
            vector.
        add: Seeds of 32 bytes.
        subtract: Seeds of 32 bytes.
        offset: Element of the whole vector where `vector` starts.
        threads: Parts of the vector that are worked on at the same time; the result does not depend on it.

    Raises:
        MaskError: the vector has another type or shape, or would end past element 2^38.
    """
    check(vector, offset)
    if vector.size == 0 or not (add or subtract):
        return

    def work(part: Ring, begin: int) -> None:
        _apply_part(part, add, subtract, offset + begin)

    in_threads(work, vector, range(0, vector.size, BLOCK // vector.itemsize), threads)


def _apply_part(vector: Ring, add: Sequence[bytes], subtract: Sequence[bytes], offset: int) -> None:
    start = offset * vector.itemsize
    streams: list[tuple[np.ufunc, CipherContext]] = [(np.add, keystream(seed, start)) for seed in add]
    streams += [(np.subtract, keystream(seed, start)) for seed in subtract]
    stream = np.empty(BLOCK // vector.itemsize, vector.dtype.newbyteorder("<"))
    stream_bytes, zeros = stream.data.cast("B"), memoryview(_ZEROS)
    for begin in range(0, vector.size, stream.size):
        block = vector[begin : begin + stream.size]
        nbytes = block.nbytes
        keys, into, source = stream[: block.size], stream_bytes[:nbytes], zeros[:nbytes]
        for fold, context in streams:
            context.update_into(source, into)
            fold(block, keys, out=block)


def check(vector: Ring, offset: int) -> None:
    """Refuse a vector that `apply` cannot mask.

    Raises:
        MaskError: the vector has another type or shape, or would end past element 2^38.
    """
    if vector.dtype not in TYPES or vector.ndim != 1:
        raise MaskError(
            "vector",
            f"{vector.dtype}{list(vector.shape)}",
            expected="one dimension of uint8, uint16 or uint32",
        )
    if not vector.flags.c_contiguous or not vector.flags.writeable:
        raise MaskError("vector", "strided or read-only", expected="a contiguous array that can be written")
    if offset < 0 or offset + vector.size > LONGEST:
        raise MaskError("offset", offset, expected=f"0 or more, ending before element {LONGEST}")
