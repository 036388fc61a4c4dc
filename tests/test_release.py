"""What leaves a site under the unit `site`: the noise that was promised, the sensitivity that was charged, and no more.

Statistical checks state their confidence: right noise fails one of them with the probability `WRONG`, were the seeds
not fixed. Each is shown to fail when the noise is wrong by a factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from cloister.aggregation.average import PlainSum, SumLayout
from cloister.aggregation.ring import RingVector
from cloister.aggregation.sums import training_layout
from cloister.clients.release import Finished, for_site_unit, in_clear_units
from cloister.privacy.accounting import Skellam
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import Coding, terms_of
from cloister.protocol.errors import UpdateError
from cloister.protocol.plan import LARGEST_CLIP, SMALLEST_CLIP, Plan
from cloister.protocol.soundness import parse

WRONG = 1e-9
SITE = ["aggregation.weighting=uniform", "server.evaluation=none", "privacy.unit=site"]
ADAPTIVE = "privacy.adaptive={count_noise=2.0}"
SECRET = NoiseStream.from_declared_seed(11)
Floats = npt.NDArray[np.float32]


class Release:
    """A plan with `size` coordinates, and what its sites send."""

    def __init__(self, size: int, *changes: str) -> None:
        self.plan: Plan = parse("", [*SITE, "privacy.noise_multiplier=1.5", *changes])
        terms = terms_of(self.plan, size)
        assert terms is not None
        assert terms.coding is not None
        self.size, self.terms = size, terms
        self.coding: Coding = terms.coding
        self.layout: SumLayout = training_layout(self.plan, size)

    def vector(
        self, update: Floats, clip: float = 1.0, who: str = "site", *, silent: bool = False
    ) -> RingVector:
        """What a site sends; a colluder is silent, and adds no noise."""
        coding = dataclasses.replace(self.coding, variance=0.0) if silent else self.coding
        return for_site_unit(Finished(update, 100, 2.0), self.layout, coding, clip, SECRET.child(who))

    def summed(self, vectors: Iterable[RingVector]) -> npt.NDArray[np.float64]:
        """The decoded sum of all values, in units of the clipping norm."""
        total = PlainSum(self.layout)
        for vector in vectors:
            total.add(vector)
        opened = total.open()
        return opened.mean.astype(np.float64) * opened.counters["weight"]

    def steps(self, update: Floats, clip: float = 1.0, who: str = "site") -> npt.NDArray[np.int64]:
        """The signed integers that a site sends without its noise."""
        values = self.vector(update, clip, who, silent=True)[: self.layout.size]
        return values.view(np.int32 if values.itemsize == 4 else np.int16).astype(np.int64)


def assert_deviation(samples: npt.NDArray[Any], sigma: float) -> None:
    """The two-sided chi-square test of the variance at the level `WRONG`, for normal samples with mean 0."""
    statistic = float(np.square(samples.astype(np.float64) / sigma).sum())
    low, high = stats.chi2.ppf([WRONG / 2, 1 - WRONG / 2], samples.size)
    assert low < statistic < high, f"deviation {math.sqrt(statistic / samples.size) * sigma}, not {sigma}"


def zeros(size: int) -> Floats:
    return np.zeros(size, np.float32)


# The noise.

COHORTS = [
    # sites, quorum, colluders, dropouts of this round
    (8, 1.0, 0.0, 0),
    (8, 0.75, 0.1, 2),  # just the floor is met
    (8, 0.75, 0.1, 1),
    (8, 0.75, 0.1, 0),
    (20, 0.6, 0.3, 8),
    (20, 0.6, 0.3, 0),
]


def noise_of(release: Release, dropouts: int, scale: float = 1.0) -> tuple[npt.NDArray[np.float64], int, int]:
    """The decoded sum of zero updates: noise alone; its honest terms, and the fewest that the plan counts on."""
    cohort = release.plan.cohort
    colluders = math.ceil(cohort.sites * release.plan.aggregation.colluders - 1e-9)
    if scale != 1.0:
        release.coding = dataclasses.replace(release.coding, variance=release.coding.variance * scale)
    survivors = cohort.sites - dropouts
    sent = (
        release.vector(zeros(release.size), who=f"site-{number}", silent=number < colluders)
        for number in range(survivors)
    )
    return release.summed(sent), survivors - colluders, cohort.needed() - colluders


@pytest.mark.parametrize(("sites", "quorum", "colluders", "dropouts"), COHORTS)
@pytest.mark.parametrize("z", [0.3, 4.0])
def test_the_sum_has_the_noise_that_was_charged_and_more_with_more_survivors(
    sites: int, quorum: float, colluders: float, dropouts: int, z: float
) -> None:
    release = Release(
        20_000,
        f"cohort.sites={sites}",
        f"cohort.quorum={quorum}",
        f"aggregation.colluders={colluders}",
        "aggregation.dropouts=0.0",
        f"privacy.noise_multiplier={z}",
    )
    noise, honest, floor = noise_of(release, dropouts)
    assert honest >= floor >= 1
    assert_deviation(noise, z * math.sqrt(honest / floor))
    (event,) = release.terms.round_events
    assert isinstance(event, Skellam)
    # The event that was charged names that noise, in steps, where just the floor is met.
    assert math.sqrt(event.variance) / release.coding.scale == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("factor", [1 / 4, 1 / 2, 0.9])
def test_noise_of_a_wrong_variance_is_found(factor: float) -> None:
    release = Release(20_000, "cohort.quorum=0.75", "cohort.sites=8")
    noise, honest, floor = noise_of(release, 2, scale=factor)
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(noise, 1.5 * math.sqrt(honest / floor))


def test_the_noise_is_there_in_a_ring_of_16_bits() -> None:
    release = Release(20_000, "cohort.quorum=1.0", "cohort.sites=8", "aggregation.ring_bits=16")
    noise, honest, floor = noise_of(release, 0)
    assert_deviation(noise, 1.5 * math.sqrt(honest / floor))


def test_the_noise_of_sites_is_independent_and_of_one_release_never_used_again() -> None:
    release = Release(20_000)
    noise = [release.summed([release.vector(zeros(release.size), who=who)]) for who in ("a", "b", "c")]
    bound = stats.norm.isf(WRONG / 2) / math.sqrt(release.size)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(np.corrcoef(noise[left], noise[right])[0, 1])) < bound
        assert np.count_nonzero(noise[left] == noise[right]) < release.size / 100
    # Within one vector, too.
    assert abs(float(np.corrcoef(noise[0][:-1], noise[0][1:])[0, 1])) < 1.01 * bound
    same = release.summed([release.vector(zeros(release.size), who="a")])
    assert np.array_equal(same, noise[0])  # one stream gives one noise: its owner must take a new one
    assert abs(float(np.corrcoef(same, noise[0])[0, 1])) > bound


def test_rounding_and_noise_come_from_different_streams() -> None:
    """Noise does not follow the rounding's coins, whatever is rounded."""
    release = Release(20_000)
    update = np.full(release.size, 0.5 / release.coding.scale, np.float32)
    noised = release.vector(update)[: release.size].view(np.int32).astype(np.float64)
    coins = release.steps(update).astype(np.float64)
    assert 0.4 < coins.mean() < 0.6
    noise = noised - coins
    assert_deviation(noise, math.sqrt(release.coding.variance))
    assert abs(float(np.corrcoef(noise, coins)[0, 1])) < stats.norm.isf(WRONG / 2) / math.sqrt(release.size)


def test_a_trusted_coordinator_gets_no_noise_from_sites() -> None:
    release = Release(50, "privacy.trusted_coordinator=true")
    noise = release.summed([release.vector(zeros(50), who=str(number)) for number in range(8)])
    assert not noise.any()


def test_the_count_is_under_noise_of_its_own() -> None:
    """Adaptive clipping: one coordinate, so many releases of it."""
    release = Release(3, ADAPTIVE, "cohort.sites=8", "cohort.quorum=1.0", "aggregation.colluders=0.0")
    coding, step = release.coding, release.coding.count_step
    counts = []
    for number in range(500):
        sent = [release.vector(zeros(3), who=f"{number}/{site}") for site in range(8)]
        counts.append(release.summed(sent)[-1] * coding.scale / (2 * step))
    # Eight sites that were not clipped, +1/2 each, under the noise that the plan asks for.
    assert_deviation(np.array(counts) - 4, coding.count_deviation)
    assert coding.count_deviation == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(np.array(counts) - 4, coding.count_deviation * 2)


# The sensitivity.

UPDATES = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-2, 2, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), 2.0**127, -(2.0**127)]),
    ),
)


@given(
    update=UPDATES,
    clip=st.sampled_from([1.0, 1e-3, 0.37, 1e6, 2.0**-40]),
    bits=st.sampled_from([16, 32]),
    central=st.booleans(),
    adaptive=st.booleans(),
    coins=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_one_site_changes_the_sum_by_no_more_than_was_charged(
    update: Floats, clip: float, bits: int, central: bool, adaptive: bool, coins: int
) -> None:
    """Neighbours: its vector is replaced by zeros, so what it changes is its vector."""
    changes = [f"aggregation.ring_bits={bits}", f"privacy.trusted_coordinator={str(central).lower()}"]
    release = Release(update.size, *changes, *([ADAPTIVE] if adaptive else []))
    steps = release.steps(update, clip, f"coins-{coins}")
    values, count = steps[: update.size], steps[update.size :]
    l2 = math.sqrt(int((values**2).sum()))
    (event,) = release.terms.round_events
    if isinstance(event, Skellam):
        assert l2 <= event.l2
        assert int(np.abs(values).sum()) <= event.l1
        for (_, most, _), found in zip(event.extra, count, strict=True):
            assert abs(int(found)) <= most
    else:
        # The central noise is z times what one site can change the sum by.
        assert l2 / release.coding.scale * release.terms.noise_multiplier <= release.coding.deviation
    assert count.size == int(adaptive)
    assert all(abs(int(found)) == release.coding.count_step for found in count)


def test_without_the_clip_one_site_would_change_it_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Release(60)
    (event,) = release.terms.round_events
    assert isinstance(event, Skellam)
    update = np.full(60, 1.0, np.float32)
    assert np.linalg.norm(release.steps(update)) <= event.l2
    monkeypatch.setattr("cloister.clients.release.l2_norm", lambda vector: 0.0)
    assert np.linalg.norm(release.steps(update)) <= event.l2  # `clip` holds the bound by itself
    monkeypatch.setattr("cloister.clients.release.clip", lambda vector, bound: (vector, 0.0))
    with pytest.raises(UpdateError, match="clip it first"):  # the rounding holds the bound by itself
        release.steps(update)
    monkeypatch.setattr(
        "cloister.clients.release.integer_round",
        lambda vector, scale, bound, random: np.rint(vector * scale).astype(np.int64),
    )
    assert np.linalg.norm(release.steps(update)) > event.l2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_leaves_as_zeros(bad: float) -> None:
    """An error would tell, of this one site and without noise, what its update is."""
    release = Release(5)
    update = zeros(5)
    update[3] = bad
    assert np.array_equal(release.vector(update), release.vector(zeros(5)))


@pytest.mark.parametrize("longest", [3.4e38, 1e-45, 1.0])
@pytest.mark.parametrize("clip", [SMALLEST_CLIP, LARGEST_CLIP])
def test_no_update_makes_a_site_fail(longest: float, clip: float) -> None:
    update = np.full(64, longest, np.float32)
    release = Release(64, "privacy.trusted_coordinator=true")
    values = release.steps(update, clip)
    coding = release.terms.coding
    assert coding is not None
    norm = float(np.linalg.norm(update.astype(np.float64)))
    assert np.linalg.norm(values / coding.scale) == pytest.approx(min(1.0, norm / clip), abs=1e-4)


def test_an_update_of_another_length_does_not_leave() -> None:
    with pytest.raises(UpdateError, match="a vector of 5 values"):
        Release(5).vector(zeros(4))


# What is carried.


def test_the_mean_is_right_on_average() -> None:
    """Rounding is stochastic and noise has mean 0: over many releases the sum is that of the clipped updates."""
    release = Release(40, "aggregation.ring_bits=16", "cohort.sites=8", "privacy.noise_multiplier=0.2")
    random = np.random.default_rng(0)
    updates = random.normal(0, 0.05, (8, 40)).astype(np.float32)
    updates[0] *= 100  # is clipped
    clipped = updates.astype(np.float64) / np.maximum(1, np.linalg.norm(updates, axis=1))[:, None]
    rounds = 400
    total = np.zeros(40)
    for number in range(rounds):
        total += release.summed(release.vector(updates[i], who=f"{number}/{i}") for i in range(8))
    deviation = math.sqrt(8 * (release.coding.variance + 0.25) / rounds) / release.coding.scale
    off = (total / rounds - clipped.sum(0)) / deviation
    assert np.abs(off).max() < stats.norm.isf(WRONG / 80)
    assert np.abs(clipped.sum(0)).max() / deviation > 2 * stats.norm.isf(WRONG / 80)  # zeros would be found


@pytest.mark.parametrize("clip", [0.25, 1.0, 8.0])
def test_the_update_is_measured_in_clipping_norms(clip: float) -> None:
    release = Release(
        30, "privacy.trusted_coordinator=true", ADAPTIVE, "cohort.sites=3", "aggregation.dropouts=0.0"
    )
    direction = np.random.default_rng(1).normal(size=30)
    direction /= np.linalg.norm(direction)
    for norm, shown in ((clip / 2, 0.5), (clip * 0.999, 0.999), (clip * 1.001, 1.0), (clip * 50, 1.0)):
        sent = release.vector((direction * norm).astype(np.float32), clip)
        found = release.summed([sent])
        np.testing.assert_allclose(found[:-1], direction * shown, atol=3e-7)
        assert found[-1] * release.coding.scale == pytest.approx(
            release.coding.count_step * (1 if norm <= clip else -1), rel=1e-6
        )


def test_nothing_of_the_data_stands_beside_the_vector() -> None:
    """Tokens and loss of a site are in no place of what it sends."""
    release = Release(7)
    assert release.layout.counters == ("weight",)
    one, other = (
        for_site_unit(
            Finished(zeros(7), tokens, loss), release.layout, release.coding, 1.0, SECRET.child("x")
        )
        for tokens, loss in ((1, 0.5), (10**6, 99.0))
    )
    assert np.array_equal(one, other)
    assert one.size == 7 + release.layout.ring.limbs
    record = parse(
        "", [*SITE[:2], "privacy.unit=record", "privacy.noise_multiplier=1.0", "privacy.sampling_rate=0.1"]
    )
    layout = training_layout(record, 7)
    one, other = (
        in_clear_units(Finished(zeros(7), tokens, loss), layout, np.random.default_rng(0), weighted=False)
        for tokens, loss in ((1, 0.5), (10**6, 99.0))
    )
    assert np.array_equal(one, other)
    assert one.size == 7 + layout.ring.limbs
    # Without privacy both are in it.
    layout = training_layout(parse(""), 7)
    one, other = (
        in_clear_units(Finished(zeros(7), tokens, loss), layout, np.random.default_rng(0), weighted=True)
        for tokens, loss in ((1, 0.5), (4000, 99.0))
    )
    assert not np.array_equal(one, other)
    assert one.size == 7 + 4 * layout.ring.limbs
