"""t-of-n sharing of 32-byte secrets (Shamir 1979) over the field of p = 2^256 + 297.

p is the least prime above 2^256, so every 32-byte secret is a field element and no secret is refused or
reduced. A secret is the value at 0 of a uniformly random polynomial of degree t - 1; a share is its value at
x = 1, 2, ...: any t shares give the secret, any t - 1 are independent of it. This interpolation is the only
cryptographic arithmetic of the secure sum that this project implements; everything below it comes from
`cryptography`.

Python's integer arithmetic does not run in constant time. Shares are made once, from fresh secrets, on a site's own
machine, and are opened by the coordinator, which may know the secrets: no other party is there to measure the time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from cloister.protocol.errors import ShareError

PRIME = 2**256 + 297
SECRET = 32
"""Bytes of a secret."""
SHARE = 33
"""Bytes of a share's value."""

_DRAWN = SHARE + 16  # a coefficient is 392 random bits modulo p: within 2^-135 of uniform


def share(
    secret: bytes, threshold: int, indices: Sequence[int], random: Callable[[int], bytes]
) -> list[bytes]:
    """Split `secret` into shares, of which any `threshold` reconstruct it.

    Args:
        secret: 32 bytes.
        threshold: t, from 1 to the number of indices.
        indices: Distinct x-coordinates in [1, 2^32), one for each share.
        random: Returns the given number of bytes from a cryptographic source.

    Returns:
        One share of 33 bytes (big-endian) for each index, in their order.
    """
    if len(secret) != SECRET:
        raise ShareError("secret", f"{len(secret)} bytes", expected=f"{SECRET} bytes")
    _check_indices(indices)
    if not 1 <= threshold <= len(indices):
        raise ShareError("threshold", threshold, expected=f"1 to {len(indices)}, the number of shares")
    drawn = random((threshold - 1) * _DRAWN)
    polynomial = [
        int.from_bytes(drawn[at : at + _DRAWN], "big") % PRIME for at in range(0, len(drawn), _DRAWN)
    ]
    polynomial.append(int.from_bytes(secret, "big"))  # highest degree first
    shares = []
    for x in indices:
        value = 0
        for coefficient in polynomial:
            value = value * x + coefficient  # reduced once at the end: x is small, so the value grows slowly
        shares.append((value % PRIME).to_bytes(SHARE, "big"))
    return shares


class Interpolation:
    """Lagrange interpolation at 0 from a fixed set of indices, for any number of secrets shared at them."""

    def __init__(self, indices: Sequence[int]) -> None:
        _check_indices(indices)
        self.indices = tuple(indices)
        self._coefficients = _at_zero(self.indices)

    def secret(self, shares: Sequence[bytes]) -> bytes:
        """The secret whose shares at `indices` are `shares`.

        Raises:
            ShareError: there is not one well-formed share for each index, or the result is not a 32-byte secret.
        """
        if len(shares) != len(self.indices):
            raise ShareError("shares", len(shares), expected=f"{len(self.indices)} of them")
        total = sum(c * _value(s) for c, s in zip(self._coefficients, shares, strict=True)) % PRIME
        if total >> (8 * SECRET):
            raise ShareError("shares", expected="shares of a 32-byte secret, but these give a larger number")
        return total.to_bytes(SECRET, "big")


def _at_zero(indices: tuple[int, ...]) -> list[int]:
    """The Lagrange coefficients prod_{j != i} x_j / (x_j - x_i) mod p, with one modular inverse for all."""
    product = functools.reduce(_times, indices)
    below = []  # x_i prod_{j != i} (x_j - x_i): product / below_i is the coefficient
    for x in indices:
        below.append(functools.reduce(_times, (other - x for other in indices if other != x), x))
    # Montgomery's trick: invert the product of all, then remove one factor at a time.
    prefixes = list(itertools.accumulate(below, _times, initial=1))
    inverse = pow(prefixes[-1], -1, PRIME)
    coefficients = [0] * len(indices)
    for i in range(len(indices) - 1, -1, -1):
        coefficients[i] = product * inverse % PRIME * prefixes[i] % PRIME
        inverse = inverse * below[i] % PRIME
    return coefficients


def _times(one: int, other: int) -> int:
    return one * other % PRIME


def _value(share_bytes: bytes) -> int:
    value = int.from_bytes(share_bytes, "big")
    if len(share_bytes) != SHARE or value >= PRIME:
        raise ShareError("share", f"{len(share_bytes)} bytes", expected=f"{SHARE} bytes of a number below p")
    return value


def _check_indices(indices: Sequence[int]) -> None:
    if not indices or len(set(indices)) != len(indices) or not all(1 <= x < 2**32 for x in indices):
        raise ShareError("indices", list(indices), expected="distinct numbers from 1 to 2^32 - 1")
