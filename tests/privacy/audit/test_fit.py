"""What was released against what is charged: honest noise fits as often as it says, and each defect is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binom, chi2

from cloister.privacy.audit.fit import (
    LEVEL,
    MISFIT,
    MOST_CHECKS,
    Check,
    Draws,
    Noise,
    change,
    counted,
    enough_noise,
    misfits,
    problem,
    rate,
)
from cloister.privacy.audit.lower_bounds import ALARM
from cloister.tests.tools.raises import raises

Samples = npt.NDArray[np.float64]
SIZE, RELEASES = 401, 20
AMOUNT, RELEASE, PLACE = (
    "standard deviation of the noise",
    "least deviation of the noise in a release",
    "furthest deviation of the noise at a coordinate",
)
LAG, TWICE, REPEATED, SAME, DEPENDS, COUNT = (
    "correlation of the noise inside a release",
    "magnitudes that are twice in a release",
    "furthest projection of the noise on that of another release",
    "magnitudes that two releases have at the same coordinates",
    "variance of these projections",
    "correlation of the count's noise with that of a coordinate",
)


def noise(
    defect: Callable[[Samples, int], Samples] = lambda noise, _release: noise,
    *,
    size: int = SIZE,
    releases: int = RELEASES,
    seed: int = 24,
    grid: float = 0.0,
) -> tuple[Check, ...]:
    """The checks of releases of honest noise, with a defect."""
    seen, generator = Noise(size, count=True, grid=grid), np.random.default_rng(seed)
    for release in range(releases):
        found = defect(generator.standard_normal(size), release)
        seen.see(np.round(found / grid) * grid if grid else found)
    return seen.checks()


def named(checks: tuple[Check, ...]) -> set[str]:
    return {check.what for check in misfits(checks)}


def test_the_checks_of_an_audit_and_its_guesses_share_the_probability_of_a_false_alarm() -> None:
    assert pytest.approx(1e-4) == MOST_CHECKS * LEVEL + 1 - ALARM
    assert MOST_CHECKS * LEVEL == MISFIT


def test_honest_noise_fits_as_often_as_it_says() -> None:
    """Of 150 fits, each check is below 5 % in 5 % of them, or in fewer where its probability is a bound."""
    repeats = 150
    found = [noise(seed=seed, size=100 if seed % 2 else 101, releases=12) for seed in range(repeats)]
    low, high = binom.interval(1 - 1e-6, repeats, 0.05)
    for checks in zip(*found, strict=True):
        below = sum(check.p < 0.05 for check in checks)
        assert (0 if checks[0].what in (LAG, TWICE, SAME) else low) <= below <= high, checks[0].what
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


def negated(noise: Samples, _release: int) -> Samples:
    return np.concatenate([noise[: noise.size // 2], -noise[: noise.size - noise.size // 2]])


def permuted(noise: Samples, release: int) -> Samples:
    """With signs, and another permutation in each release."""
    half, generator = noise.size // 2, np.random.default_rng(release)
    signs = generator.choice(np.array([-1.0, 1.0]), half)
    return np.concatenate([noise[:half], signs * generator.permutation(noise[:half]), noise[2 * half :]])


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
        (mirrored, {DEPENDS, TWICE}),
        (negated, {LAG, TWICE}),
        (permuted, {TWICE}),
        (again(3, 1.0), {REPEATED, SAME}),
        (again(3, -1.0), {REPEATED, SAME}),
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
        "negated",
        "permuted",
        "a release again",
        "a release cancelled",
    ],
)
def test_noise_that_is_not_as_charged_is_named(
    defect: Callable[[Samples, int], Samples], expected: set[str]
) -> None:
    checks = noise(defect)
    assert named(checks) >= expected
    assert named(checks) <= expected | {AMOUNT, RELEASE, REPEATED, DEPENDS, COUNT, TWICE}
    assert min(expected) in problem(checks)


def part_again(share: float, sign: float = 1.0) -> Callable[[Samples, int], Samples]:
    """Each second release has a share of the noise of the one before it, at the same coordinates."""
    kept: list[Samples] = []

    def defect(noise: Samples, release: int) -> Samples:
        kept.append(noise.copy())
        if release % 2:
            noise[: round(share * noise.size)] = sign * kept[-2][: round(share * noise.size)]
        return noise

    return defect


@pytest.mark.parametrize("grid", [0.0, 2.0**-19, 2.0**-12])
@pytest.mark.parametrize(
    ("size", "share", "sign"),
    [(300, 0.02, 1.0), (75_000, 0.003, 1.0), (75_000, 0.02, -1.0), (75_000, 0.5, 1.0)],
)
def test_noise_that_is_there_again_in_a_part_of_another_release_is_named(
    size: int, share: float, sign: float, grid: float
) -> None:
    if grid < 2.0**-12:
        assert SAME in named(noise(part_again(share, sign), size=size, grid=grid))
    assert SAME in named(noise(part_again(10 * share, sign), size=size, grid=grid))
    assert not misfits(noise(size=size, grid=grid))


@pytest.mark.parametrize("grid", [2.0**-9, 2.0**-5, 1.0])
def test_integers_of_little_noise_are_alike_by_their_law(grid: float) -> None:
    checks = {check.what: check for check in noise(size=100_000, releases=40, grid=grid)}
    assert checks[SAME].p > 1e-3


@pytest.mark.parametrize("grid", [0.0, 2.0**-19, 2.0**-12])
@pytest.mark.parametrize("defect", [halves, mirrored, negated, permuted])
@pytest.mark.parametrize("size", [300, 1_000_000])
def test_a_part_of_a_release_that_is_another_part_is_named_at_every_size(
    size: int, defect: Callable[[Samples, int], Samples], grid: float
) -> None:
    """In one release of two, of floats and of integers."""
    assert TWICE in named(noise(defect, size=size, releases=2, grid=grid))
    assert not misfits(noise(size=size, releases=2, grid=grid))


@pytest.mark.parametrize("grid", [2.0**-9, 2.0**-5, 1.0])
def test_integers_of_little_noise_repeat_by_their_law(grid: float) -> None:
    checks = {check.what: check for check in noise(size=100_000, releases=4, grid=grid)}
    assert checks[TWICE].p > 1e-3


def test_honest_magnitudes_repeat_as_seldom_as_it_says() -> None:
    """Of a grid at which the bound is near: of 400 fits, 5 % at most are below 5 %, and few of them far below."""
    found = [
        {check.what: check.p for check in noise(size=1200, releases=1, grid=2.0**-11, seed=seed)}[TWICE]
        for seed in range(400)
    ]
    assert sum(p < 0.05 for p in found) <= binom.ppf(0.999, 400, 0.05)


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


DRAWN, OF_SIZE, OFTEN, AGAIN, TOGETHER, SIZES = (
    "rate at which units are drawn",
    "rate at which units of size",
    "share of units in",
    "most units that two steps share",
    "draws of two units together, at one distance",
    "spread of the sizes of batches",
)
UNITS, STEPS, Q = 3000, 20, 0.05


def draws(defect: Callable[[Any, int], Any], q: float = Q, seed: int = 27) -> tuple[Check, ...]:
    """The checks of honest steps, whose (n,) uniform numbers have a defect."""
    seen, generator = Draws(np.resize([1, 2, 8], UNITS)), np.random.default_rng(seed)
    for step in range(STEPS):
        seen.see(np.flatnonzero(defect(generator.random(UNITS), step) < q))
    return seen.checks(q)


def kept(steps: tuple[int, int]) -> Callable[[Samples, int], Samples]:
    before: list[Samples] = []

    def defect(uniform: Samples, step: int) -> Samples:
        before.append(uniform)
        return before[steps[0]] if step == steps[1] else uniform

    return defect


def epoch(_uniform: Samples, step: int) -> Samples:
    return np.where(np.random.default_rng(28).permutation(UNITS) % STEPS == step, 0.0, 1.0)


def of_one_size(uniform: Samples, _step: int) -> Samples:
    return np.where(uniform.argsort().argsort() < UNITS * Q, 0.0, 1.0)


def one_of_each_stratum(uniform: Samples, _step: int) -> Samples:
    strata = uniform.reshape(-1, round(1 / Q))
    return np.where(strata == strata.min(1, keepdims=True), 0.0, 1.0).ravel()


@pytest.mark.slow
@pytest.mark.parametrize("q", [0.003, Q, 0.5, 0.99])
def test_honest_draws_fit_as_often_as_they_say(q: float) -> None:
    repeats = 60
    found = [draws(lambda uniform, _step: uniform, q, seed) for seed in range(repeats)]
    for checks in zip(*found, strict=True):
        assert sum(check.p < 0.05 for check in checks) <= binom.ppf(1 - 1e-6, repeats, 0.05), checks[0].what
    assert not any(misfits(checks) for checks in found)


@pytest.mark.parametrize(("steps", "others"), [(3, 0), (20, 100_000)])
def test_a_fixed_size_is_seen_of_three_steps_and_among_many_others(steps: int, others: int) -> None:
    """Of which the others are counted alone."""
    generator = np.random.default_rng(29)
    honest, fixed = Draws(np.ones(100_000, np.int64)), Draws(np.ones(100_000, np.int64))
    units = 100_000 + others
    for _ in range(steps):
        for seen, drawn in (
            (honest, np.flatnonzero(generator.random(units) < 0.2)),
            (fixed, generator.permutation(units)[: units // 5]),
        ):
            seen.see(np.sort(drawn[drawn >= others]) - others, int((drawn < others).sum()), others)
    assert not misfits(honest.checks(0.2))
    assert SIZES in problem(fixed.checks(0.2))


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        (lambda uniform, _step: uniform / 1.2, DRAWN),
        (lambda uniform, _step: uniform * 1.2, DRAWN),
        (lambda uniform, _step: uniform / np.resize([1, 1.5, 0.5], UNITS), OF_SIZE),
        (lambda uniform, _step: uniform[: UNITS // 2].repeat(2), TOGETHER),
        (lambda uniform, _step: np.tile(uniform[: UNITS // 2], 2), TOGETHER),
        (kept((3, 17)), AGAIN),
        (epoch, OFTEN),
        (of_one_size, SIZES),
        (one_of_each_stratum, SIZES),
        (lambda uniform, step: uniform / 2 if step % 2 else uniform + 1, SIZES),
    ],
    ids=[
        "too often",
        "too seldom",
        "by size",
        "neighbours",
        "halves",
        "a step again",
        "an epoch",
        "of one size",
        "one of each stratum",
        "in every second step",
    ],
)
def test_draws_that_are_not_as_charged_are_named(
    defect: Callable[[Samples, int], Samples], expected: str
) -> None:
    assert expected in problem(draws(defect))


def test_at_the_rate_1_there_is_nothing_to_compare() -> None:
    assert draws(lambda uniform, _step: uniform, 1.0) == ()


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
    with raises(AssertionError, "each check"):
        misfits((check,) * (MOST_CHECKS + 1))
    assert math.isclose(LEVEL, MISFIT / 18)


@pytest.mark.parametrize("others", [30, 31, 10_100])
def test_the_spread_of_the_sizes_of_batches_is_said_in_few_digits(others: int) -> None:
    """All of them give the number of other units, since sizes are whole numbers."""
    draws = Draws(np.ones(400, np.int64))
    for drawn in range(3):
        draws.see(np.arange(9 + drawn), others=others // 50, of=others)
    (check,) = (each for each in draws.checks(0.02) if each.what.startswith("spread"))
    assert check.found == float(f"{check.found:.2g}") > 0
    assert check.p == float(f"{check.p:.1g}") > 0
