"""Secret sharing: the field, an independent reference, exactly t shares, and nothing from t - 1."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.secure.shamir import PRIME, SHARE, Interpolation, share
from cloister.protocol.errors import ShareError
from cloister.tests.tools.raises import raises

secrets = st.binary(min_size=32, max_size=32) | st.sampled_from([bytes(32), b"\xff" * 32])


def solve(indices: Sequence[int], values: Sequence[int]) -> list[int]:
    """The polynomial through the points, lowest degree first, by Gaussian elimination modulo p."""
    size = len(indices)
    rows = [
        [pow(x, power, PRIME) for power in range(size)] + [y] for x, y in zip(indices, values, strict=True)
    ]
    for at in range(size):
        pivot = next(row for row in range(at, size) if rows[row][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        inverse = pow(rows[at][at], PRIME - 2, PRIME)
        rows[at] = [value * inverse % PRIME for value in rows[at]]
        for row in range(size):
            if row != at:
                factor = rows[row][at]
                rows[row] = [(a - factor * b) % PRIME for a, b in zip(rows[row], rows[at], strict=True)]
    return [row[-1] for row in rows]


def probably_prime(n: int) -> bool:
    """Miller and Rabin's test to 40 random bases: a composite passes with probability below 2^-80."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(random.randrange(2, n - 1), odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def test_the_field_is_the_least_prime_that_holds_every_secret() -> None:
    assert PRIME == 2**256 + 297
    assert probably_prime(PRIME)
    assert not any(probably_prime(n) for n in range(2**256 + 1, PRIME, 2))


@given(secrets, st.data())
def test_any_t_shares_give_the_secret(secret: bytes, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(1, 2**32 - 1), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(indices)))
    shares = dict(zip(indices, share(secret, threshold, indices, os.urandom), strict=True))
    chosen = data.draw(st.permutations(indices))[:threshold]
    assert Interpolation(chosen).secret([shares[x] for x in chosen]) == secret


@given(secrets, st.integers(1, 8))
def test_shares_are_a_polynomial_of_degree_t_minus_1(secret: bytes, threshold: int) -> None:
    """Against an independent reference: the polynomial through more points has just that degree."""
    indices = list(range(1, threshold + 4))
    values = [int.from_bytes(s, "big") for s in share(secret, threshold, indices, os.urandom)]
    polynomial = solve(indices, values)
    assert polynomial[0].to_bytes(32, "big") == secret
    assert polynomial[threshold:] == [0] * 3


@given(secrets, secrets, st.integers(2, 6))
def test_fewer_shares_fit_every_secret(secret: bytes, other: bytes, threshold: int) -> None:
    """t - 1 shares of one secret, and the right last share, give any other secret."""
    indices = list(range(1, threshold))
    shares = share(secret, threshold, [*indices, threshold], os.urandom)[:-1]
    points = [int.from_bytes(other, "big"), *(int.from_bytes(s, "big") for s in shares)]
    polynomial = solve([0, *indices], points)
    last = sum(c * pow(threshold, power, PRIME) for power, c in enumerate(polynomial)) % PRIME
    assert Interpolation([*indices, threshold]).secret([*shares, last.to_bytes(SHARE, "big")]) == other


def test_coefficients_come_from_the_random_source_and_are_spread() -> None:
    """Flip one bit of the source and every share of a 2-of-n sharing changes; the secret does not."""
    ones = share(bytes(32), 2, [1, 2], lambda n: b"\xff" * n)
    zeros = share(bytes(32), 2, [1, 2], bytes)
    assert zeros == [bytes(33), bytes(33)]
    assert ones[0] != ones[1]
    assert int.from_bytes(ones[0], "big") == (2 ** (8 * 49) - 1) % PRIME
    sizes: list[int] = []

    def counting(size: int) -> bytes:
        sizes.append(size)
        return os.urandom(size)

    share(bytes(32), 5, range(1, 8), counting)
    assert sum(sizes) == 4 * 49


def test_a_wrong_share_gives_another_secret_or_is_refused() -> None:
    shares = share(b"s" * 32, 3, [1, 2, 3], os.urandom)
    changed = (int.from_bytes(shares[0], "big") ^ 1).to_bytes(SHARE, "big")
    with contextlib.suppress(ShareError):
        assert Interpolation([1, 2, 3]).secret([changed, *shares[1:]]) != b"s" * 32


@pytest.mark.parametrize(
    ("threshold", "indices"), [(0, [1, 2]), (3, [1, 2]), (1, []), (2, [1, 1]), (2, [0, 1]), (2, [1, 2**32])]
)
def test_senseless_sharings_are_refused(threshold: int, indices: list[int]) -> None:
    with pytest.raises(ShareError):
        share(bytes(32), threshold, indices, os.urandom)


def test_senseless_shares_are_refused() -> None:
    with pytest.raises(ShareError):
        share(bytes(31), 1, [1], os.urandom)
    interpolation = Interpolation([1, 2])
    for shares in ([bytes(33)], [bytes(33), bytes(32)], [bytes(33), PRIME.to_bytes(33, "big")]):
        with pytest.raises(ShareError):
            interpolation.secret(shares)
    with raises(ShareError, "shares", says="larger"):
        Interpolation([1]).secret([(2**256).to_bytes(33, "big")])
