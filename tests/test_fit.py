"""What was released against what is charged: honest noise fits as often as it says, and each defect is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binom, chi2

from cloister.privacy.audit import ALARM
from cloister.privacy.fit import (
    LEVEL,
    MISFIT,
    MOST_CHECKS,
    Check,
    Noise,
    change,
    counted,
    enough_noise,
    misfits,
    problem,
    rate,
)

Samples = npt.NDArray[np.float64]
SIZE, RELEASES = 401, 20
AMOUNT, RELEASE, PLACE = (
    "standard deviation of the noise",
    "least deviation of the noise in a release",
    "furthest deviation of the noise at a coordinate",
)
LAG, REPEATED, DEPENDS, COUNT = (
    "correlation of the noise inside a release",
    "furthest projection of the noise on that of another release",
    "variance of these projections",
    "correlation of the count's noise with that of a coordinate",
)


def noise(
    defect: Callable[[Samples, int], Samples] = lambda noise, _release: noise,
    *,
    size: int = SIZE,
    releases: int = RELEASES,
    seed: int = 24,
) -> tuple[Check, ...]:
    """The checks of releases of honest noise, with a defect."""
    seen, generator = Noise(size, count=True), np.random.default_rng(seed)
    for release in range(releases):
        seen.see(defect(generator.standard_normal(size), release))
    return seen.checks()


def named(checks: tuple[Check, ...]) -> set[str]:
    return {check.what for check in misfits(checks)}


def test_the_checks_of_an_audit_and_its_guesses_share_the_probability_of_a_false_alarm() -> None:
    assert pytest.approx(1e-4) == MOST_CHECKS * LEVEL + 1 - ALARM
    assert MOST_CHECKS * LEVEL == MISFIT


def test_honest_noise_fits_as_often_as_it_says() -> None:
    """Of 150 fits, each check is below 5 % in 5 % of them, or in fewer where its probability is a bound."""
    trials = 150
    found = [noise(seed=seed, size=100 if seed % 2 else 101, releases=12) for seed in range(trials)]
    low, high = binom.interval(1 - 1e-6, trials, 0.05)
    for checks in zip(*found, strict=True):
        below = sum(check.p < 0.05 for check in checks)
        assert (0 if checks[0].what == LAG else low) <= below <= high, checks[0].what
    assert not any(misfits(checks) for checks in found)


def test_noise_that_is_not_everywhere_fits_where_it_is() -> None:
    """As of rounds that train other parameters by turns."""
    seen, generator, odd = Noise(SIZE), np.random.default_rng(25), np.arange(SIZE) % 2 == 1
    for release in range(RELEASES):
        where = odd if release % 2 else ~odd
        seen.see(np.where(where, generator.standard_normal(SIZE), 50.0), where)
    assert not misfits(seen.checks())
    one = Noise(3)
    one.see(generator.standard_normal(3))
    assert not misfits(one.checks()), "there is no other release"


def scaled(factor: float, *, of: int | None = None) -> Callable[[Samples, int], Samples]:
    return lambda noise, release: noise * (factor if of in (None, release) else 1.0)


def halves(noise: Samples, _release: int) -> Samples:
    half = noise.size // 2
    return np.concatenate([noise[:half], noise[:half], noise[2 * half :]])


def mirrored(noise: Samples, _release: int) -> Samples:
    return np.concatenate([noise[: noise.size // 2], noise[: noise.size - noise.size // 2][::-1]])


def at(place: int, value: float) -> Callable[[Samples, int], Samples]:
    return lambda noise, _release: np.where(np.arange(noise.size) == place, value, noise)


def of_coordinate(noise: Samples, _release: int) -> Samples:
    return np.append(noise[:-1], noise[7])


def again(of: int, sign: float) -> Callable[[Samples, int], Samples]:
    kept: list[Samples] = []

    def defect(noise: Samples, release: int) -> Samples:
        kept.append(noise)
        return sign * kept[of] if release == RELEASES - 1 else noise

    return defect


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        (scaled(0.9), {AMOUNT}),
        (scaled(0.5, of=7), {RELEASE}),
        (scaled(0.0, of=7), {RELEASE}),
        (at(5, 0.0), {PLACE}),
        (at(SIZE - 1, 0.0), {PLACE}),
        (at(5, 4.0), {PLACE}),
        (halves, {LAG, DEPENDS}),
        (mirrored, {DEPENDS}),
        (again(3, 1.0), {REPEATED}),
        (again(3, -1.0), {REPEATED}),
    ],
    ids=[
        "less",
        "less in one release",
        "none in one release",
        "none at a coordinate",
        "none on the count",
        "a constant at a coordinate",
        "halves",
        "mirrored",
        "a release again",
        "a release cancelled",
    ],
)
def test_noise_that_is_not_as_charged_is_named(
    defect: Callable[[Samples, int], Samples], expected: set[str]
) -> None:
    checks = noise(defect)
    assert named(checks) >= expected
    assert named(checks) <= expected | {AMOUNT, RELEASE, REPEATED, DEPENDS, COUNT}
    assert min(expected) in problem(checks)


def test_halves_of_one_release_are_enough() -> None:
    assert LAG in named(noise(halves, releases=1))
    assert LAG in named(noise(halves, releases=1, size=400)), "the lag is its own opposite on the circle"


def test_a_count_that_has_the_noise_of_a_coordinate_is_named() -> None:
    assert named(noise(of_coordinate, releases=8)) == {COUNT}


def test_noise_is_held_against_what_is_charged() -> None:
    """In units of what was seen: what fits 1 does not fit 1.1, and twice the noise fits 2."""
    seen, generator = Noise(SIZE), np.random.default_rng(26)
    for _ in range(RELEASES):
        seen.see(2 * generator.standard_normal(SIZE))
    assert not misfits(seen.checks(2.0))
    assert AMOUNT in named(seen.checks(2.2))
    assert PLACE in named(seen.checks(1.0)), "more than is charged is something else beside it"


@pytest.mark.parametrize("samples", [300, 600_000])
def test_the_smallest_lack_of_noise_is_found_as_often_as_it_says(samples: int) -> None:
    visible = enough_noise("noise", samples, samples).visible
    assert visible is not None
    assert samples < 1000 or visible < 0.01
    squares = (1 - visible) ** 2 * chi2.ppf([0.985, 0.995], samples)
    assert [bool(misfits((enough_noise("noise", each, samples),))) for each in squares] == [True, False]


@pytest.mark.parametrize(("places", "charged"), [(10**7, 0.003), (2000, 0.5), (60, 0.003)])
def test_the_smallest_error_of_the_rate_is_found_as_often_as_it_says(places: int, charged: float) -> None:
    visible = rate("rate", 0, places, charged).visible
    assert visible is not None
    drawn = [int(binom.ppf(part, places, charged * (1 + visible))) for part in (0.005, 0.02)]
    found = [bool(misfits((rate("rate", each, places, charged),))) for each in drawn]
    assert found == [False, True]
    honest = binom.ppf([0.001, 0.999], places, charged)
    assert not any(misfits((rate("rate", int(each), places, charged),)) for each in honest)


def test_of_few_places_no_error_of_the_rate_is_found() -> None:
    found = rate("rate", 1, 1, 0.4)
    assert (found.visible, misfits((found,))) == (None, ())


def test_lengths_and_numbers_are_exact() -> None:
    within, beyond = change("change", 1.0005, 1.0, 0.001), change("change", 1.0015, 1.0, 0.001)
    assert (named((within,)), named((beyond,))) == (set(), {"change"})
    assert within.visible == pytest.approx(1.001 / 1.0005 - 1)
    assert beyond.visible is None
    assert not misfits((counted("number", 3, 3), counted("number", 2, 3), change("change", 0.0, 1.0)))
    assert problem((counted("number", 4, 3), beyond)) == "number: 4, charged 3; change: 1.002, charged 1"


def test_more_checks_than_share_the_probability_are_a_defect() -> None:
    check: Any = counted("number", 1, 1)
    misfits((check,) * MOST_CHECKS)
    with pytest.raises(AssertionError, match="its part"):
        misfits((check,) * (MOST_CHECKS + 1))
    assert math.isclose(LEVEL, MISFIT / 16)
