"""The site-level mechanism at both ends: noise, sensitivity, mean, ring and clipping norm are those that are charged.

Everything goes from a plan through the code that a site and the coordinator run. Statistical checks state their
confidence: right noise fails one of them with the probability `WRONG`, were the seeds not fixed. Each is shown to fail
when the noise is wrong by a factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from cloister.aggregation.features.site_unit import Protected
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import SumLayout
from cloister.aggregation.vector.ring import RingVector
from cloister.clients.training.release import contribution
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.accounting.accountant import mechanism as kind_of
from cloister.privacy.accounting.accountant import spent
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.mechanism import site_noise
from cloister.privacy.mechanism.events import Gaussian, Skellam
from cloister.privacy.mechanism.noise import LARGEST_VARIANCE, NoiseStream
from cloister.privacy.mechanism.site_noise import (
    SiteMechanism,
    central,
    distributed,
    noised_with,
    skellam_for,
)
from cloister.protocol.errors import AccountingError, PlanError, UpdateError
from cloister.protocol.plan.plan import LARGEST_CLIP, SMALLEST_CLIP, AdaptiveSection, Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.mutants import ADD_NOISE, ENCODE, TAIL, Mutant
from cloister.tests.tools.raises import raises
from cloister.tests.tools.repeats import repeats

WRONG = 1e-9
SITE = ["aggregation.weighting=uniform", "server.evaluation=none", "privacy.unit=site", "cohort.sites=8"]
CENTRAL = [*SITE, "privacy.trusted_coordinator=true"]
ADAPTIVE = "privacy.adaptive={count_noise=2.0}"
SECRET = NoiseStream.from_declared_seed(11)
SIZE = 20_000
Floats = npt.NDArray[np.float32]


class Federation:
    """A plan with `size` coordinates: what its sites send, and what its coordinator makes of the sum."""

    def __init__(self, base: list[str], *changes: str, size: int = SIZE) -> None:
        self.plan: Plan = parse("", [*base, "privacy.noise_multiplier=1.5", *changes])
        terms = terms_of(self.plan, size)
        assert terms is not None
        assert terms.mechanism is not None
        self.size, self.terms = size, terms
        self.mechanism: SiteMechanism = terms.mechanism
        self.layout: SumLayout = Sums(self.plan, size).training

    def vector(
        self, update: npt.NDArray[Any], clip: float = 1.0, who: str = "site", *, silent: bool = False
    ) -> RingVector:
        """What a site sends; a colluder is silent, and adds no noise."""
        mechanism = dataclasses.replace(self.mechanism, variance=0.0) if silent else self.mechanism
        finished = LocalUpdate(update.astype(np.float32), 100, 2.0)
        return contribution(Protected(self.layout, mechanism, clip, SECRET.child(who)), finished)

    def vectors(
        self, updates: npt.NDArray[Any], clip: float = 1.0, what: str = "", *, silent: int = 0
    ) -> list[RingVector]:
        """What the sites send, the first `silent` of them without noise."""
        return [
            self.vector(update, clip, f"{what}/{number}", silent=number < silent)
            for number, update in enumerate(updates)
        ]

    def opened(
        self,
        vectors: Iterable[RingVector],
        noise: NoiseStream | None = None,
        mechanism: SiteMechanism | None = None,
    ) -> tuple[Floats, int]:
        """The decoded mean of all values, in clipping norms, and the number of sites; without `noise` there is none of
        the coordinator's."""
        sent = list(vectors)
        total = np.add.reduce(sent, dtype=self.layout.ring.dtype)  # as masks leave it
        opened = self.layout.open(total, len(sent))
        if noise is not None:
            assert opened.total is not None
            (mechanism or self.mechanism).add_noise(opened.total, noise)
        return opened.mean, opened.counters["weight"]

    def summed(self, vectors: Iterable[RingVector]) -> npt.NDArray[np.float64]:
        """The decoded sum of all values, in clipping norms."""
        mean, sites = self.opened(vectors)
        return mean.astype(np.float64) * sites

    def released(
        self,
        vectors: Iterable[RingVector],
        clip: float = 1.0,
        what: str = "",
        mechanism: SiteMechanism | None = None,
    ) -> tuple[Floats, float]:
        """The mean update that the coordinator goes on with, and the next clipping norm."""
        mean, sites = self.opened(vectors, SECRET.child(f"coordinator{what}"), mechanism)
        return self.mechanism.decode(mean, sites, clip)

    def steps(self, update: Floats, clip: float = 1.0, who: str = "site") -> npt.NDArray[np.int64]:
        """The signed integers that a site sends without its noise."""
        values = self.vector(update, clip, who, silent=True)[: self.mechanism.size]
        return values.view(np.int32 if values.itemsize == 4 else np.int16).astype(np.int64)


def assert_deviation(samples: npt.NDArray[Any], sigma: float) -> None:
    """The two-sided chi-square test of the variance at the level `WRONG`, for normal samples with mean 0."""
    statistic = float(np.square(samples.astype(np.float64) / sigma).sum())
    low, high = stats.chi2.ppf([WRONG / 2, 1 - WRONG / 2], samples.size)
    assert low < statistic < high, f"deviation {math.sqrt(statistic / samples.size) * sigma}, not {sigma}"


def zeros(size: int, *sites: int) -> Floats:
    return np.zeros((*sites, size), np.float32)


# The noise: one property of the whole mechanism.

COHORTS = st.sampled_from(
    [
        # sites, quorum, colluders, dropouts of this round
        (3, 1.0, 0.0, 0),
        (8, 1.0, 0.0, 0),
        (8, 0.75, 0.1, 2),  # the sum has the fewest sites that are opened
        (8, 0.75, 0.1, 1),
        (8, 0.75, 0.1, 0),
        (20, 0.6, 0.3, 6),  # t = 14 is more than the quorum
        (20, 0.6, 0.3, 0),
    ]
)


def check_claimed_deviation(
    cohort: tuple[int, float, float, int], z: float, clip: float, norm: float, central: bool, adaptive: bool
) -> None:
    """The released mean is that of the clipped updates, with the noise that the round's event charges.

    Colluders send no noise, so the sum of `survivors` has the noise of `survivors - colluders` sites, each of which
    adds 1 / (floor - colluders) of the variance (z' C)^2. z' is z, or the z_delta of Andrew et al. 2021 beside a count.
    """
    sites, quorum, share, dropouts = cohort
    federation = Federation(
        CENTRAL if central else SITE,
        f"cohort.sites={sites}",
        f"cohort.quorum={quorum}",
        f"aggregation.colluders={share}",
        "aggregation.dropouts=0.0",
        f"privacy.noise_multiplier={z}",
        *([f"privacy.adaptive={{count_noise={2 * z}}}"] if adaptive else []),
        size=3000,
    )
    colluders, floor, survivors = (
        math.ceil(sites * share - 1e-9),
        federation.plan.quorum(),
        sites - dropouts,
    )
    on_update = 1 / math.sqrt(z**-2 - (4 * z) ** -2) if adaptive else z
    random = np.random.default_rng(5)
    updates = random.normal(size=(survivors, 3000))
    updates *= norm * clip / np.linalg.norm(updates, axis=1)[:, None]
    mean, _ = federation.released(federation.vectors(updates, clip, silent=colluders), clip)
    noise = mean - updates.mean(axis=0) / max(1.0, norm)
    counted = 1.0 if central else (survivors - colluders) / (floor - colluders)
    assert counted >= 1
    assert_deviation(noise, on_update * math.sqrt(counted) * clip / survivors)
    # The charge is for no less noise than that: z against one site's largest integers, where just the floor is met.
    (event,) = federation.terms.round_events
    mechanism = federation.mechanism
    if isinstance(event, Skellam):
        assert math.sqrt(event.variance) / mechanism.scale == pytest.approx(on_update, rel=1e-12)
        assert event.variance == pytest.approx((floor - colluders) * mechanism.variance, rel=1e-12)
    else:
        assert event == Gaussian(z, 1)
    assert len(getattr(event, "extra", ())) == (1 if adaptive and not central else 0)


@given(
    cohort=COHORTS,
    z=st.floats(0.3, 5),
    clip=st.sampled_from([1.0, 0.02, 37.0]),
    norm=st.sampled_from([0.0, 0.5, 1.0, 40.0]),
    central=st.booleans(),
    adaptive=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_decoded_sum_has_the_claimed_deviation(
    cohort: tuple[int, float, float, int], z: float, clip: float, norm: float, central: bool, adaptive: bool
) -> None:
    check_claimed_deviation(cohort, z, clip, norm, central, adaptive)


# The noise: independence, and the count's own.


def test_the_noise_is_there_in_a_ring_of_16_bits() -> None:
    federation = Federation(SITE, "cohort.quorum=1.0", "aggregation.ring_bits=16")
    noise = federation.summed(federation.vectors(zeros(SIZE, 8), silent=1))
    assert_deviation(noise, 1.5)


def test_the_noise_of_sites_is_independent_and_of_one_release_never_used_again() -> None:
    federation = Federation(SITE, size=20_000)
    noise = [
        federation.summed([federation.vector(zeros(federation.size), who=who)]) for who in ("a", "b", "c")
    ]
    bound = stats.norm.isf(WRONG / 2) / math.sqrt(federation.size)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(np.corrcoef(noise[left], noise[right])[0, 1])) < bound
        assert np.count_nonzero(noise[left] == noise[right]) < federation.size / 100
    same = federation.summed([federation.vector(zeros(federation.size), who="a")])
    assert np.array_equal(same, noise[0])  # one stream gives one noise: its owner must take a new one
    assert abs(float(np.corrcoef(same, noise[0])[0, 1])) > bound


def test_no_part_of_a_vector_has_the_noise_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector longer than what is drawn at a time."""
    federation = Federation(SITE, size=2**18 + 2**16)

    def sent() -> npt.NDArray[np.int32]:
        return federation.vector(zeros(federation.size))[: federation.size].view(np.int32)

    assert repeats(sent(), WRONG) is None
    Mutant(ENCODE, "self.variance, offset + begin", "self.variance, offset").plant(monkeypatch)
    assert repeats(sent(), WRONG) == 2**18


def test_rounding_and_noise_come_from_different_streams() -> None:
    """Noise does not follow the rounding's coins, whatever is rounded."""
    federation = Federation(SITE, size=20_000)
    update = np.full(federation.size, 0.5 / federation.mechanism.scale, np.float32)
    noised = federation.vector(update)[: federation.size].view(np.int32).astype(np.float64)
    coins = federation.steps(update).astype(np.float64)
    assert 0.4 < coins.mean() < 0.6
    noise = noised - coins
    assert_deviation(noise, math.sqrt(federation.mechanism.variance))
    assert abs(float(np.corrcoef(noise, coins)[0, 1])) < stats.norm.isf(WRONG / 2) / math.sqrt(
        federation.size
    )


def test_a_trusted_coordinator_gets_no_noise_from_sites() -> None:
    federation = Federation(SITE, "privacy.trusted_coordinator=true", size=50)
    noise = federation.summed([federation.vector(zeros(50), who=str(number)) for number in range(8)])
    assert not noise.any()


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
    """Neighbours: the site without records, as its code sends an update that is not finite."""
    changes = [f"aggregation.ring_bits={bits}", f"privacy.trusted_coordinator={str(central).lower()}"]
    federation = Federation(SITE, *changes, *([ADAPTIVE] if adaptive else []), size=update.size)
    without = federation.steps(np.full(update.size, math.nan, np.float32), clip, f"coins-{coins}")
    steps = federation.steps(update, clip, f"coins-{coins}") - without
    values, count = steps[: update.size], steps[update.size :]
    l2 = math.sqrt(int((values**2).sum()))
    (event,) = federation.terms.round_events
    if isinstance(event, Skellam):
        assert l2 <= event.l2
        assert int(np.abs(values).sum()) <= event.l1
        for (_, most, _), found in zip(event.extra, count, strict=True):
            assert abs(int(found)) <= most
    else:
        # The central noise is z times what one site can change the sum by.
        assert (
            l2 / federation.mechanism.scale * federation.terms.noise_multiplier
            <= federation.mechanism.deviation
        )
    assert count.size == int(adaptive)
    assert all(abs(int(found)) == federation.mechanism.count_step for found in count)


def test_without_the_clip_one_site_would_change_it_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(SITE, size=60)
    (event,) = federation.terms.round_events
    assert isinstance(event, Skellam)
    update = np.full(60, 1.0, np.float32)
    assert np.linalg.norm(federation.steps(update)) <= event.l2
    monkeypatch.setattr("cloister.privacy.mechanism.site_noise.norm_of", lambda sums: 0.0)
    assert np.linalg.norm(federation.steps(update)) <= event.l2  # `clip` holds the bound by itself
    monkeypatch.setattr("cloister.privacy.mechanism.site_noise.clip", lambda vector, *_: (vector, 0.0))
    with raises(UpdateError, "norm of the update"):  # the rounding holds the bound by itself
        federation.steps(update)
    monkeypatch.setattr(
        "cloister.privacy.mechanism.site_noise.integer_round",
        lambda vector, scale, *others: np.copyto(
            others[-1], np.rint(vector * scale).astype(np.int64), casting="unsafe"
        ),
    )
    assert np.linalg.norm(federation.steps(update)) > event.l2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_leaves_as_zeros(bad: float) -> None:
    """An error would reveal facts about this one site's update, without noise."""
    federation = Federation(SITE, ADAPTIVE, size=5)
    update = zeros(5)
    update[3] = bad
    nothing = federation.vector(np.full(5, math.nan))
    assert np.array_equal(federation.vector(update), nothing)  # as a site without records
    assert not federation.steps(update).any()  # in the count neither
    assert np.array_equal(nothing[:5], federation.vector(zeros(5))[:5])  # its noise is there


@pytest.mark.parametrize("longest", [3.4e38, 1e-45, 1.0])
@pytest.mark.parametrize("clip", [SMALLEST_CLIP, LARGEST_CLIP])
def test_no_update_makes_a_site_fail(longest: float, clip: float) -> None:
    update = np.full(64, longest, np.float32)
    federation = Federation(SITE, "privacy.trusted_coordinator=true", size=64)
    values = federation.steps(update, clip)
    mechanism = federation.mechanism
    assert mechanism is not None
    norm = float(np.linalg.norm(update.astype(np.float64)))
    assert np.linalg.norm(values / mechanism.scale) == pytest.approx(min(1.0, norm / clip), abs=1e-4)


@pytest.mark.slow
def test_the_mean_is_right_on_average() -> None:
    """Rounding is stochastic and noise has mean 0: over many releases the sum is that of the clipped updates."""
    federation = Federation(
        SITE, "aggregation.ring_bits=16", "cohort.sites=8", "privacy.noise_multiplier=0.2", size=40
    )
    random = np.random.default_rng(0)
    updates = random.normal(0, 0.05, (8, 40)).astype(np.float32)
    updates[0] *= 100  # is clipped
    clipped = updates.astype(np.float64) / np.maximum(1, np.linalg.norm(updates, axis=1))[:, None]
    rounds = 400
    total = np.zeros(40)
    for number in range(rounds):
        total += federation.summed(federation.vector(updates[i], who=f"{number}/{i}") for i in range(8))
    deviation = math.sqrt(8 * (federation.mechanism.variance + 0.25) / rounds) / federation.mechanism.scale
    off = (total / rounds - clipped.sum(0)) / deviation
    assert np.abs(off).max() < stats.norm.isf(WRONG / 80)
    assert np.abs(clipped.sum(0)).max() / deviation > 2 * stats.norm.isf(WRONG / 80)  # zeros would be found


@pytest.mark.parametrize("clip", [0.25, 1.0, 8.0])
def test_the_update_is_measured_in_clipping_norms(clip: float) -> None:
    federation = Federation(
        SITE,
        "privacy.trusted_coordinator=true",
        ADAPTIVE,
        "cohort.sites=3",
        "aggregation.dropouts=0.0",
        size=30,
    )
    direction = np.random.default_rng(1).normal(size=30)
    direction /= np.linalg.norm(direction)
    for norm, shown in ((clip / 2, 0.5), (clip * 0.999, 0.999), (clip * 1.001, 1.0), (clip * 50, 1.0)):
        sent = federation.vector((direction * norm).astype(np.float32), clip)
        found = federation.summed([sent])
        np.testing.assert_allclose(found[:-1], direction * shown, atol=3e-7)
        assert found[-1] * federation.mechanism.scale == pytest.approx(
            federation.mechanism.count_step * (1 if norm <= clip else -1), rel=1e-6
        )


# What the coordinator makes of the sum.

Z_DELTA = 1 / math.sqrt(1.5**-2 - 4.0**-2)


@pytest.mark.parametrize("sites", [8, 6])
@pytest.mark.parametrize("clip", [1.0, 0.02])
@pytest.mark.parametrize(("more", "z"), [([], 1.5), ([ADAPTIVE], Z_DELTA)], ids=["fixed", "adaptive"])
def test_a_trusted_coordinator_adds_z_clipping_norms_to_the_sum(
    sites: int, clip: float, more: list[str], z: float
) -> None:
    federation = Federation(CENTRAL, *more)
    vectors = federation.vectors(zeros(SIZE, sites), clip)
    mean, _ = federation.released(vectors, clip)
    assert mean.dtype == np.float32
    assert mean.shape == (SIZE,)
    # The rounded vectors' own norm is a little above C, and the noise with it: never below.
    assert 1 <= federation.mechanism.deviation / z < 1.0001
    assert_deviation(mean, z * clip / sites)
    for wrong in (0.5, 2.0):
        planted = dataclasses.replace(federation.mechanism, deviation=federation.mechanism.deviation * wrong)
        with pytest.raises(AssertionError, match="deviation"):
            assert_deviation(federation.released(vectors, clip, mechanism=planted)[0], z * clip / sites)


def test_the_coordinator_adds_nothing_where_the_sites_have() -> None:
    federation = Federation(SITE)
    vectors = federation.vectors(zeros(SIZE, 8))
    one, other = (federation.released(vectors, what=what)[0] for what in ("a", "b"))
    assert np.array_equal(one, other)
    assert np.array_equal(one, federation.opened(vectors)[0])
    assert not np.array_equal(one, one[::-1])


def test_central_noise_is_new_in_every_round() -> None:
    federation = Federation(CENTRAL)
    vectors = federation.vectors(zeros(SIZE, 8))
    one, other = (federation.released(vectors, what=what)[0] for what in ("a", "b"))
    assert abs(float(np.corrcoef(one, other)[0, 1])) < stats.norm.isf(WRONG / 2) / math.sqrt(SIZE)


def test_the_coordinator_adds_its_noise_where_the_sum_was_opened() -> None:
    federation = Federation(CENTRAL, ADAPTIVE)
    total = np.zeros(federation.layout.length, np.uint32)
    total[-federation.layout.ring.limbs :] = federation.layout.ring.encode_counters([8])
    opened = federation.layout.open(total, 8)
    assert opened.total is not None
    federation.mechanism.add_noise(opened.total, SECRET)
    mean = opened.mean
    assert np.shares_memory(mean, total)
    update, _ = federation.mechanism.decode(mean, 8, 1.0)
    assert update.any()
    assert np.shares_memory(update, mean)


@pytest.mark.parametrize("base", [SITE, CENTRAL], ids=["site", "central"])
def test_the_released_mean_is_that_of_the_clipped_updates(base: list[str]) -> None:
    federation = Federation(base, "privacy.noise_multiplier=0.02", size=50)
    clip = 0.3
    updates = np.random.default_rng(4).normal(0, 0.03, (8, 50))
    updates[0] *= 20
    norms = np.linalg.norm(updates, axis=1)
    expected = (updates * np.minimum(1, clip / norms)[:, None]).mean(axis=0)
    rounds = 60
    found = np.mean(
        [
            federation.released(federation.vectors(updates, clip, str(number)), clip, str(number))[0]
            for number in range(rounds)
        ],
        axis=0,
    )
    spread = 0.02 * math.sqrt(8 / 5) * clip / 8 / math.sqrt(rounds)
    assert np.abs(found - expected).max() < stats.norm.isf(WRONG / 100) * spread
    assert np.abs(found - updates.mean(axis=0)).max() > 10 * spread  # it was clipped


def test_the_clipping_norm_stays_without_adaptive_clipping() -> None:
    federation = Federation(CENTRAL)
    assert federation.released(federation.vectors(zeros(SIZE, 8)), 0.37)[1] == 0.37


# Adaptive clipping.


def mechanism_for(adaptive: AdaptiveSection, count_step: int, count_deviation: float) -> SiteMechanism:
    """A mechanism of one coordinate whose sites add the noise."""
    return SiteMechanism(
        dimension=1,
        scale=1024.0,
        variance=1.0,
        deviation=1.0,
        event=Skellam(1.0, 1.0, 1.0, 1),
        adaptive=adaptive,
        count_step=count_step,
        count_deviation=count_deviation,
    )


@given(
    unclipped=st.integers(0, 8),
    quantile=st.floats(0.01, 0.99),
    rate=st.floats(0.01, 3),
    clip=st.floats(1e-4, 1e4),  # nowhere near where C ends
)
@settings(max_examples=100, deadline=None)
def test_the_clipping_norm_moves_as_the_paper_says(
    unclipped: int, quantile: float, rate: float, clip: float
) -> None:
    """Andrew et al. 2021, equation 2, by hand: C <- C exp(-eta (b - gamma)), here with the sites' count in clear."""
    mechanism = mechanism_for(AdaptiveSection(quantile=quantile, learning_rate=rate), 300, 1.0)
    sum_of_signs = unclipped - (8 - unclipped)
    mean = np.array([0.5, sum_of_signs * 300 / 1024 / 8], np.float32)
    update, next_clip = mechanism.decode(mean, 8, clip)
    move = min(max(-rate * (unclipped / 8 - quantile), -math.log(10)), math.log(10))
    assert next_clip == pytest.approx(clip * math.exp(move), rel=1e-5)
    assert update.shape == (1,)
    assert update[0] == pytest.approx(0.5 * clip, rel=1e-6)


def moved(base: list[str], rounds: int) -> tuple[Federation, Floats, npt.NDArray[np.float64]]:
    """What rounds release of eight sites with updates of zeros: updates (rounds, 2), and counts (rounds,) as a fraction
    of the sites, less what they would be without noise."""
    federation = Federation(base, "privacy.adaptive={count_noise=0.9,learning_rate=0.2}", size=2)
    updates, clips = [], []
    for number in range(rounds):
        vectors = federation.vectors(zeros(2, 8), what=f"count/{number}")
        update, clip = federation.released(vectors, what=str(number))
        updates.append(update)
        clips.append(clip)
    return federation, np.array(updates), np.log(clips) / -0.2 - (1 - 0.5)


def assert_of_its_own(count: npt.NDArray[np.float64], updates: Floats) -> None:
    """Check that the noise on the count is not that of a coordinate, which would cancel it."""
    alike = np.corrcoef(updates, count, rowvar=False)[-1, :-1]
    assert np.abs(alike).max() < stats.norm.isf(WRONG / 2) / math.sqrt(count.size)


@pytest.mark.parametrize("base", [SITE, CENTRAL], ids=["site", "central"])
def test_the_noise_on_the_clipping_norm_is_what_the_plan_pays_for(base: list[str]) -> None:
    federation, updates, noise = moved(base, 300)
    assert federation.mechanism.count_deviation == pytest.approx(0.9, rel=1e-3)
    # All eight unclipped: b = 1 with noise of 0.9 sites; eight sites' noise where five are counted on.
    sigma = federation.mechanism.count_deviation * (math.sqrt(8 / 5) if base is SITE else 1.0) / 8
    assert_deviation(noise, sigma)
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(noise, 2 * sigma)
    assert_of_its_own(noise, updates)


@pytest.mark.parametrize(
    ("base", "mutant"),
    [
        (SITE, Mutant(TAIL, "self.variance, self.dimension", "self.variance, 0")),
        (SITE, Mutant(TAIL, "self.variance, self.dimension", "self.variance, self.dimension - 1")),
        (CENTRAL, Mutant(ADD_NOISE, 'child("count")', 'child("update")')),
    ],
    ids=["first", "last", "central"],
)
def test_a_count_with_the_noise_of_a_coordinate_is_found(
    base: list[str], mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.plant(monkeypatch)
    _, updates, count = moved(base, 60)
    with pytest.raises(AssertionError):
        assert_of_its_own(count, updates)


@pytest.mark.slow
@pytest.mark.parametrize("base", [SITE, CENTRAL], ids=["site", "central"])
@pytest.mark.parametrize("quantile", [0.3, 0.7])
def test_the_clipping_norm_comes_to_the_quantile_of_the_norms(base: list[str], quantile: float) -> None:
    """From far too large and from far too small, with what one round ends with as the next one's beginning."""
    federation = Federation(
        base,
        "cohort.sites=40",
        f"privacy.adaptive={{quantile={quantile},learning_rate=0.4,count_noise=2.0}}",
        size=20,
    )
    random = np.random.default_rng(7)
    norms = np.exp(random.normal(0, 0.5, 40))
    directions = random.normal(size=(40, 20))
    updates = directions / np.linalg.norm(directions, axis=1)[:, None] * norms[:, None]
    for start in (20.0, 0.05):
        clip, clips = start, []
        for number in range(80):
            vectors = federation.vectors(updates, clip, f"{start}/{number}")
            _, clip = federation.released(vectors, clip, str(number))
            clips.append(clip)
        settled = np.exp(np.mean(np.log(clips[-30:])))
        reached = float((norms <= settled).mean())
        assert abs(reached - quantile) < 0.1, (start, settled)
        assert clips[0] != pytest.approx(settled, rel=0.5)


@pytest.mark.parametrize("rate", [0.2, 10.0])
def test_a_site_that_lies_in_its_count_moves_the_clipping_norm_little(rate: float) -> None:
    """No further than all honest sites and six deviations of their noise could, and by ten at most."""
    mechanism = mechanism_for(AdaptiveSection(learning_rate=rate), 1, 1.0)
    furthest = min(rate * (0.5 + 6 * mechanism.count_deviation / 8), math.log(10))
    for total, sign in ((1e9, -1), (-1e9, 1)):
        mean = np.array([0.0, total], np.float32)
        moved = mechanism.decode(mean, 8, 2.0)[1]
        assert moved == pytest.approx(2.0 * math.exp(sign * furthest))


# What a round is charged: scale, noise and sensitivity from the published formulas.


@given(st.floats(0.1, 10), st.floats(1.01, 50))
@settings(deadline=None)
def test_update_and_count_together_are_the_mechanism_that_is_charged(z: float, ratio: float) -> None:
    sigma = ratio * z / 2
    noised = noised_with(z, sigma)
    assert noised > z
    assert noised**-2 + (2 * sigma) ** -2 == pytest.approx(z**-2, rel=1e-9)
    together = spent([Gaussian(noised, 5), Gaussian(2 * sigma, 5)], 1e-5)  # a count of +-1/2 moves by 1/2
    assert together.epsilon == pytest.approx(spent([Gaussian(z, 5)], 1e-5).epsilon, rel=1e-6)


@pytest.mark.parametrize("sigma", [0.5, 0.49, 1e-3])
def test_a_count_that_would_spend_the_budget_is_refused(sigma: float) -> None:
    with raises(AccountingError, "privacy.adaptive.count_noise", says="half"):
        noised_with(1.0, sigma)


@given(
    z=st.floats(0.1, 50),
    clip=st.floats(1e-3, 1e3),
    dimension=st.integers(1, 10**10),
    sites=st.integers(3, 1_000),
    lost=st.floats(0, 0.5),
    lying=st.floats(0, 0.5),
    bits=st.sampled_from([16, 32]),
)
def test_the_scale_is_the_largest_that_the_ring_and_the_sampler_take(
    z: float, clip: float, dimension: int, sites: int, lost: float, lying: float, bits: int
) -> None:
    floor = sites - int(lost * sites)
    colluders = min(int(lying * floor), floor - 1)
    found = skellam_for(z, clip, dimension, sites, floor - colluders, bits)
    assert math.frexp(found.scale)[0] == 0.5
    fits = []
    for scale in (found.scale, 2 * found.scale):
        variance = (z * clip * scale) ** 2 / (floor - colluders)
        largest = sites * (scale * clip + 1) + 12 * math.sqrt(sites * variance)
        fits.append(variance <= LARGEST_VARIANCE * (1 + 1e-12) and largest < 2 ** (bits - 1))
    assert fits == [True, False]
    event, bound = found.event, clip * found.scale
    assert found.variance_per_site * (floor - colluders) == pytest.approx(event.variance, rel=1e-12)
    assert event.variance == pytest.approx((z * bound) ** 2, rel=1e-12)
    assert bound < event.l2 <= bound + math.sqrt(dimension)
    assert event.l1 == pytest.approx(min(math.sqrt(dimension) * event.l2, event.l2**2), rel=1e-12)


def test_equal_noise_is_one_mechanism_whatever_the_number_of_sites() -> None:
    """Else a ledger composes runs of cohorts that differ as other mechanisms, at twice delta."""
    found = [skellam_for(7.3, 1.0, 1_000, 120, honest, 32) for honest in range(50, 120)]
    kinds = {kind_of(each.event) for each in found}
    assert len(kinds) == len({each.scale for each in found}) < len({each.event for each in found})


def test_more_noise_than_counted_for_is_not_claimed() -> None:
    """Each site's part does not shrink with those who may not add theirs: fewer honest survivors, more noise each."""
    parts = [skellam_for(2.0, 1.0, 1_000, 10, honest, 32) for honest in (8, 4, 1)]
    ratios = [part.variance_per_site / part.scale**2 for part in parts]
    assert ratios == pytest.approx([4 / 8, 4 / 4, 4 / 1])


def test_a_coarse_ring_costs_more() -> None:
    fine, coarse = (skellam_for(2.0, 1.0, 10**8, 8, 5, bits).event for bits in (32, 16))
    gaussian = spent([Gaussian(2.0, 1)], 1e-5, "rdp").epsilon
    assert spent([fine], 1e-5).epsilon < 1.01 * gaussian
    assert spent([coarse], 1e-5).epsilon > 1.5 * gaussian


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"clip": -1.0}, "clip"),
        ({"dimension": 0}, "dimension"),
        ({"contributors": 3}, "contributors"),
        ({"honest": 0}, "honest"),
        ({"contributors": 40_000, "ring_bits": 16}, "ring_bits"),
    ],
)
def test_a_sum_that_cannot_be_noised_is_refused(change: dict[str, Any], field: str) -> None:
    right: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "clip": 1.0,
        "dimension": 10,
        "contributors": 8,
        "honest": 4,
        "ring_bits": 32,
    }
    skellam_for(**right)
    with raises(AccountingError, field):
        skellam_for(**{**right, **change})


# The ring.

CROWD = [*SITE, "cohort.sites=20", "cohort.quorum=0.8", "aggregation.colluders=0.1"]


def largest_sum(mechanism: SiteMechanism, n: int) -> float:
    """The largest sum in a coordinate: every site at its bound there, and twelve deviations of all noise."""
    if mechanism.variance:
        return n * max(mechanism.scale + 1, mechanism.count_step) + 12 * math.sqrt(n * mechanism.variance)
    count = mechanism.count_step * (n + 24 * mechanism.count_deviation)
    return max(n * (mechanism.scale + 1) + 12 * mechanism.scale * mechanism.deviation, count)


@pytest.mark.slow
@given(
    n=st.integers(3, 300),
    quorum=st.floats(0.5, 1),
    colluders=st.floats(0, 0.3),
    z=st.floats(0.02, 30),
    dimension=st.integers(1, 10**9),
    bits=st.sampled_from([16, 32]),
    central=st.booleans(),
    count=st.none() | st.floats(0.51, 50),
)
@settings(max_examples=200, deadline=None)
def test_the_largest_sum_does_not_wrap_or_the_plan_is_refused(
    n: int,
    quorum: float,
    colluders: float,
    z: float,
    dimension: int,
    bits: int,
    central: bool,
    count: float | None,
) -> None:
    """`count` is the noise on the count in noise multipliers: just above half, the count takes nearly all of it."""
    changes = [
        f"cohort.sites={n}",
        f"cohort.quorum={quorum}",
        f"aggregation.colluders={colluders}",
        "aggregation.dropouts=0.0",
        f"aggregation.ring_bits={bits}",
        f"privacy.noise_multiplier={z}",
        f"privacy.trusted_coordinator={str(central).lower()}",
    ]
    if count is not None:
        changes.append(f"privacy.adaptive={{count_noise={count * z}}}")
    try:
        plan = parse("", [*CROWD, *changes])
    except PlanError:
        assume(False)
    honest = plan.honest()
    found, refused = None, ""
    try:
        found = terms_of(plan, dimension)
    except PlanError as error:
        refused = error.field
    if refused:
        assert refused in ("privacy.ring_bits", "privacy.adaptive.count_noise")
        assert refused != "privacy.ring_bits" or bits == 16
        return
    assert found is not None
    mechanism = found.mechanism
    assert mechanism is not None
    assert largest_sum(mechanism, n) < 2 ** (bits - 1)
    assert math.log2(mechanism.scale).is_integer()
    assert mechanism.variance <= LARGEST_VARIANCE
    if not central:
        assert mechanism.variance * honest >= (z * mechanism.scale) ** 2 * (1 - 1e-12)
    # Sites and coordinator decode with the scale that was coded with.
    assert Sums(plan, dimension).training.ring.scale == pytest.approx(mechanism.scale, rel=1e-12)


def test_a_finer_code_would_wrap() -> None:
    """The guard against wrapping is not loose: with four times the steps the largest sum is out of the ring."""
    for base in (CROWD, [*CROWD, CENTRAL[-1]]):
        mechanism = Federation(
            base, "privacy.noise_multiplier=1.0", "aggregation.ring_bits=16", size=1000
        ).mechanism
        finer = dataclasses.replace(mechanism, scale=mechanism.scale * 2, variance=mechanism.variance * 4)
        assert largest_sum(mechanism, 20) < 2**15 <= largest_sum(finer, 20)


def test_a_count_that_would_wrap_is_refused_and_taken_without_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adaptive = AdaptiveSection(count_noise=0.625)
    plan = parse(
        "",
        [
            *SITE,
            "cohort.sites=76",
            "cohort.quorum=0.5",
            "aggregation.colluders=0.0",
            "aggregation.dropouts=0.45",
            "aggregation.ring_bits=16",
            "privacy.noise_multiplier=1.0",
            "privacy.adaptive={count_noise=0.625}",
        ],
    )
    with raises(PlanError, "privacy.adaptive.count_noise", says="0.625"):
        terms_of(plan, 1000)
    monkeypatch.setattr(site_noise, "_check_count_fits", lambda *_: None)
    mechanism = distributed(1.0, 1000, 76, plan.honest(), 16, adaptive)
    assert largest_sum(mechanism, 76) > 2**15


def test_a_ring_without_room_is_refused() -> None:
    with raises(AccountingError, "ring_bits"):
        distributed(1.0, 1000, 40_000, 26_000, 16)
    with raises(AccountingError, "ring_bits"):
        central(1.0, 1000, 40_000, 16)
    assert distributed(1.0, 1000, 40_000, 26_000, 32).scale > 1
    assert central(1.0, 1000, 40_000, 32).scale > 1
