"""Noise: a 32-byte key, expanded into one fixed, infinite and seekable sequence of samples for each law.

A party that can predict the noise can remove it, so it comes from a block cipher under a secret key, never from
NumPy's or torch's own generators. `randomgen.AESCounter` is AES-128 (all ten rounds) applied to a 128-bit
counter that starts at zero, one block for two 64-bit draws: the counter mode of NIST SP 800-38A with the
counter written little-endian, where most libraries write it big-endian. `tests/privacy/mechanism/test_noise.py`
compares its output with `cryptography`'s AES. NumPy's `Generator` turns the draws into samples: Marsaglia and Tsang's
ziggurat for normals, Hormann's transformed rejection (PTRS) for Poisson with a mean of 10 or more. Every law of every
stream has an AES key of its own, derived from the stream's key by HKDF-SHA256 (RFC 5869). So the noise is as
unpredictable as AES-128's output: the guarantee holds against computationally bounded adversaries only.

Both samplers use rejection sampling, so the number of draws behind a sample varies. To make a sequence seekable, it is
cut into the blocks of `protocol/messages/blocks.py`, and each block starts at a fixed counter value, at least 2^64
after that of the block before it: a vector made in one piece, span by span or by several threads gets the same bytes.
Uniform numbers take one draw each and need no blocks. The draws are integers and the same everywhere; samples may
differ in the last bit between builds of NumPy, so ranks that share a stream must use the same build.

Accounting does not cover the finite precision of samples. A float64 normal has 2^52 magnitudes in each of the
ziggurat's 256 layers, and its support has gaps whose pattern can, in principle, reveal the value that it was added to
(Mironov 2012, "On significance of the least significant bits for differential privacy"). `add_gaussian` adds
in float64 and rounds once to the vector's own type, which hides the low bits of a float32 vector but is not a
proof. Skellam noise is integers, without such gaps. The time that sampling takes depends on the samples. Refused:
exact samplers (Canonne, Kamath and Steinke 2020, in OpenDP), which make 1e5 samples per second where a model
needs 1e9.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from randomgen import AESCounter

from cloister.protocol.encoding import pack
from cloister.protocol.messages.blocks import BLOCK, cut, in_threads

Floats: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Samples: TypeAlias = npt.NDArray[Any]

PROTOCOL = "cloister/noise/1"
"""Label in every key derivation; it changes when the sequences change."""
KEY = 32
"""Bytes of a stream's key."""
LARGEST_VARIANCE = 2.0**33
"""Largest variance of Skellam noise: that of two Poisson variables with mean 2^32."""

_BETWEEN_BLOCKS = 2**65  # 64-bit draws: 2^64 values of the counter for each block
_LONGEST = 2**62  # elements; the counter has room for 2^63 blocks


@dataclass(frozen=True, eq=False)
class NoiseStream:
    """Sequences of noise that are functions of a key: the same key, law and offset give the same noise.

    So the ranks of a sharded site can make one vector's noise without communicating. It also means that noise must not
    be reused: the difference of two releases with the same noise is free of noise. Every release takes a child of its
    own, named for its purpose (`stream.child("round-3/step-2")`). Drawing does not change a stream, so threads may
    share it.
    """

    key: bytes = field(repr=False)
    """32 bytes, uniformly random and secret: for a file that only its owner can read."""
    declared: bool = field(default=False, kw_only=True)
    """Whether the noise comes from a declared seed (`from_declared_seed`), so that no privacy guarantee holds."""

    def __post_init__(self) -> None:
        if len(self.key) != KEY:
            raise ValueError(f"key has {len(self.key)} bytes: expected {KEY}")

    @classmethod
    def fresh(cls, random: Callable[[int], bytes] = os.urandom) -> Self:
        """A stream with a new key of 32 bytes from `random`, by default from the operating system."""
        return cls(random(KEY))

    @classmethod
    def from_declared_seed(cls, seed: int) -> Self:
        """A stream that anyone who knows `seed` can repeat: for tests and simulations, without any privacy.

        Args:
            seed: From 0 to 2^64 - 1.

        Raises:
            EncodingError: the seed is not in that range.
        """
        return cls(_derive(bytes(KEY), KEY, "declared seed", seed), declared=True)

    def child(self, purpose: str) -> Self:
        """The stream for one purpose: independent of this one and of every other child, and declared if this is."""
        return type(self)(_derive(self.key, KEY, "child", purpose), declared=self.declared)

    def generator(self) -> np.random.Generator:
        """A NumPy generator over this stream's keystream, at its beginning: for choices that are not noise.

        Two calls give two generators of the same numbers: take a child for each use.
        """
        return np.random.Generator(self._keystream("generator"))

    def uniform(self, size: int, offset: int = 0) -> Iterator[npt.NDArray[np.float64]]:
        """Uniform numbers in [0, 1), multiples of 2^-53: elements [offset, offset + size) of this stream's sequence.

        Element e is draw e of the keystream, so the sequence is seekable without blocks.

        Args:
            size: d, the number of samples.
            offset: Element of the whole vector where the result starts.

        Returns:
            The samples of each block (`protocol.messages.blocks`) in turn, float64. The array is reused: use or
            copy its content before taking the next block.

        Raises:
            ValueError: an argument is out of range.
        """
        _check_range(offset, size)
        keystream = self._keystream("uniform")
        keystream.advance(offset)
        generator, buffer = np.random.Generator(keystream), np.empty(min(BLOCK, size))
        return (generator.random(out=buffer[: end - begin]) for begin, end, _, _ in cut(offset, size))

    def gaussian(self, size: int, sigma: float, offset: int = 0) -> npt.NDArray[np.float64]:
        """Normal samples with mean 0: elements [offset, offset + size) of this stream's sequence.

        Args:
            size: d, the number of samples.
            sigma: Standard deviation, positive.
            offset: Element of the whole vector where the result starts.

        Returns:
            Shape (d,), float64.

        Raises:
            ValueError: an argument is out of range.
        """
        check_positive("sigma", sigma)
        _check_range(offset, size)
        vector = np.empty(size, np.float64)
        for block, samples in self._normals(vector, offset):
            np.multiply(samples, sigma, out=block)
        return vector

    def add_gaussian(self, vector: Floats, sigma: float, offset: int = 0, *, threads: int = 1) -> None:
        """Add the samples of `gaussian` to `vector` in place, block by block: no second vector is made.

        The sum is taken in float64 and rounded once to the type of `vector`.

        Args:
            vector: Shape (d,), float64 or float32, contiguous and writable.
            sigma: Standard deviation, positive.
            offset: Element of the whole vector where `vector` starts.
            threads: Parts that are worked on at the same time; the result does not depend on it.

        Raises:
            ValueError: an argument is out of range, or the vector has the wrong type, shape or memory layout.
        """
        check_positive("sigma", sigma)
        _check_vector(vector, offset)

        def add(part: Samples, begin: int) -> None:
            for block, samples in self._normals(part, offset + begin):
                np.multiply(samples, sigma, out=samples)
                np.add(block, samples, out=block, dtype=np.float64, casting="same_kind")

        in_threads(add, vector, [begin for begin, *_ in cut(offset, vector.size)], threads)

    def skellam(self, size: int, variance: float, offset: int = 0) -> npt.NDArray[np.int64]:
        """Skellam samples with mean 0, the difference of two independent Poisson(variance / 2): elements
        [offset, offset + size) of this stream's sequence.

        The variance is limited to `LARGEST_VARIANCE`, because PTRS accepts or rejects by the difference of float64
        log-probabilities of magnitude lambda log(lambda). Compared with 60-digit arithmetic at 2000 typical values,
        they were wrong by up to 4e-6 at lambda = 2^29 and 3e-5 at 2^32, and the error grows with lambda.

        Args:
            size: d, the number of samples.
            variance: Variance of a sample, positive, at most `LARGEST_VARIANCE`.
            offset: Element of the whole vector where the result starts.

        Returns:
            Shape (d,), int64.

        Raises:
            ValueError: an argument is out of range.
        """
        check_positive("variance", variance)
        if variance > LARGEST_VARIANCE:
            raise ValueError(
                f"variance is {variance:.6g}: expected at most 2^33, because the sampler of Poisson(variance / 2)"
                " compares log-probabilities in float64, which are too coarse above a mean of 2^32"
            )
        _check_range(offset, size)
        vector, source = np.empty(size, np.int64), _Blocks(self._keystream("skellam"))
        for begin, end, number, skip in cut(offset, size):
            count = skip + end - begin
            positive = source.at(2 * number).poisson(variance / 2, count)
            negative = source.at(2 * number + 1).poisson(variance / 2, count)
            np.subtract(positive[skip:], negative[skip:], out=vector[begin:end])
        return vector

    def _normals(self, vector: Floats, offset: int) -> Iterator[tuple[Samples, Samples]]:
        """Each block of `vector` with its standard normals, float64, in a buffer that all blocks share."""
        source, buffer = _Blocks(self._keystream("gaussian/float64")), np.empty(min(BLOCK, vector.size))
        for begin, end, number, skip in cut(offset, vector.size):
            samples = buffer[: end - begin]
            generator = source.at(number)
            if skip:  # the samples before it in the block determine how many draws are used
                generator.standard_normal(skip)
            generator.standard_normal(out=samples)
            yield vector[begin:end], samples

    def _keystream(self, law: str) -> Any:
        return AESCounter(key=np.frombuffer(_derive(self.key, 16, "law", law), "<u8"))


class _Blocks:
    """A generator that seeks to the start of any block."""

    def __init__(self, keystream: Any) -> None:
        self._keystream = keystream
        self._beginning = keystream.state
        self._generator = np.random.Generator(keystream)

    def at(self, number: int) -> np.random.Generator:
        self._keystream.state = self._beginning  # a tenth of the cost of a new AESCounter
        self._keystream.advance(number * _BETWEEN_BLOCKS)
        return self._generator


def _derive(key: bytes, length: int, *what: str | int) -> bytes:
    return HKDF(SHA256(), length, None, pack(PROTOCOL, *what)).derive(key)


def add_steps(total: npt.NDArray[np.integer[Any]], samples: Samples) -> None:
    """Add samples, rounded to whole steps, to integers modulo 2^b in place; both (d,), the samples below 2^63."""
    total += np.rint(samples).astype(np.int64).astype(total.dtype)


def check_positive(name: str, value: float) -> None:
    """Refuse what is no positive, finite number.

    Raises:
        ValueError: it is none.
    """
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}: expected a positive, finite number")


def _check_range(offset: int, size: int) -> None:
    if size < 0:
        raise ValueError(f"size is {size}: expected 0 or more")
    if offset < 0 or offset + size > _LONGEST:
        raise ValueError(f"offset is {offset}: expected 0 or more, ending before element 2^62")


def _check_vector(vector: Floats, offset: int) -> None:
    if vector.dtype not in (np.dtype(np.float32), np.dtype(np.float64)) or vector.ndim != 1:
        shown = f"{vector.dtype}{list(vector.shape)}"
        raise ValueError(f"vector is {shown}: expected one dimension of float32 or float64")
    if not vector.flags.c_contiguous or not vector.flags.writeable:
        raise ValueError("vector is strided or read-only: expected a contiguous array that can be written")
    _check_range(offset, vector.size)
