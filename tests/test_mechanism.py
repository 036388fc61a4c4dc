"""What the coordinator makes of an opened sum, through the real code from the site to the released mean.

The released noise is measured against z C over the number of sites, with the confidence that `WRONG` states, and each
measure is shown to fail on noise that is wrong by a factor of 2.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cloister.aggregation.average import WEIGHT, Opened, PlainSum, SumLayout
from cloister.aggregation.ring import RingVector
from cloister.aggregation.secure_messages import (
    Advertise,
    Confirm,
    Masked,
    Reveal,
    Shares,
    from_bytes,
    to_bytes,
)
from cloister.aggregation.secure_sum import Coordinator
from cloister.aggregation.sums import TRAIN, contract_for, training_layout
from cloister.clients.attempt import Attempts, Member
from cloister.clients.release import Finished, for_site_unit
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import Coding, terms_of
from cloister.protocol.plan import AdaptiveSection, Plan
from cloister.protocol.roster import Card, Roster, new_identity
from cloister.protocol.soundness import parse
from cloister.server.mechanism import Released, released

WRONG = 1e-9
SITE = ["aggregation.weighting=uniform", "server.evaluation=none", "privacy.unit=site", "cohort.sites=8"]
CENTRAL = [*SITE, "privacy.trusted_coordinator=true"]
SECRET = NoiseStream.from_declared_seed(23)
SIZE = 20_000
Floats = npt.NDArray[np.float32]


class Federation:
    """A plan's sites, whose updates are given, and its coordinator."""

    def __init__(self, base: list[str], *changes: str, size: int = SIZE) -> None:
        self.plan: Plan = parse("", [*base, "privacy.noise_multiplier=1.5", *changes])
        terms = terms_of(self.plan, size)
        assert terms is not None
        assert terms.coding is not None
        self.size = size
        self.coding: Coding = terms.coding
        self.layout: SumLayout = training_layout(self.plan, size)

    def vectors(self, updates: npt.NDArray[Any], clip: float, what: str = "") -> list[RingVector]:
        return [
            for_site_unit(
                Finished(update.astype(np.float32), 9, 1.0),
                self.layout,
                self.coding,
                clip,
                SECRET.child(f"{what}/{number}"),
            )
            for number, update in enumerate(updates)
        ]

    def opened(self, updates: npt.NDArray[Any], clip: float = 1.0, what: str = "") -> Opened:
        total = PlainSum(self.layout)
        for vector in self.vectors(updates, clip, what):
            total.add(vector)
        return total.open()

    def released(
        self, opened: Opened, clip: float = 1.0, what: str = "", coding: Coding | None = None
    ) -> Released:
        stream = SECRET.child(f"coordinator{what}")
        return released(opened, coding or self.coding, clip, self.plan.privacy.adaptive, stream)


def silence(sites: int, size: int = SIZE) -> Floats:
    return np.zeros((sites, size), np.float32)


def assert_deviation(samples: npt.NDArray[Any], sigma: float) -> None:
    """The two-sided chi-square test of the variance at the level `WRONG`, for normal samples with mean 0."""
    statistic = float(np.square(samples.astype(np.float64) / sigma).sum())
    low, high = stats.chi2.ppf([WRONG / 2, 1 - WRONG / 2], samples.size)
    assert low < statistic < high, f"deviation {math.sqrt(statistic / samples.size) * sigma}, not {sigma}"


# The noise of what is released.

ADAPTIVE = "privacy.adaptive={count_noise=2.0}"
Z_DELTA = 1 / math.sqrt(1.5**-2 - 4.0**-2)


@pytest.mark.parametrize("sites", [8, 6])
@pytest.mark.parametrize("clip", [1.0, 0.02])
@pytest.mark.parametrize(("more", "z"), [([], 1.5), ([ADAPTIVE], Z_DELTA)], ids=["fixed", "adaptive"])
def test_a_trusted_coordinator_adds_z_clipping_norms_to_the_sum(
    sites: int, clip: float, more: list[str], z: float
) -> None:
    federation = Federation(CENTRAL, *more)
    opened = federation.opened(silence(sites), clip)
    mean = federation.released(opened, clip).mean
    assert mean.dtype == np.float32
    assert mean.shape == (SIZE,)
    # The rounded vectors' own norm is a little above C, and the noise with it: never below.
    assert 1 <= federation.coding.deviation / z < 1.0001
    assert_deviation(mean, z * clip / sites)
    for wrong in (0.5, 2.0):
        coding = dataclasses.replace(federation.coding, deviation=federation.coding.deviation * wrong)
        with pytest.raises(AssertionError, match="deviation"):
            assert_deviation(federation.released(opened, clip, coding=coding).mean, z * clip / sites)


@pytest.mark.parametrize("sites", [8, 7, 6])
@pytest.mark.parametrize("clip", [1.0, 0.02])
@pytest.mark.parametrize(("more", "z"), [([], 1.5), ([ADAPTIVE], Z_DELTA)], ids=["fixed", "adaptive"])
def test_the_sites_together_have_added_it_already(sites: int, clip: float, more: list[str], z: float) -> None:
    federation = Federation(
        SITE, "aggregation.colluders=0.1", *more
    )  # the floor is 6 sites, 1 of them silent
    opened = federation.opened(silence(sites), clip)
    mean = federation.released(opened, clip).mean
    sigma = z * math.sqrt(sites / 5) * clip / sites
    assert_deviation(mean, sigma)
    assert not np.array_equal(mean, mean[::-1])
    quarter = dataclasses.replace(federation.coding, variance=federation.coding.variance / 4)
    federation.coding = quarter
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(federation.released(federation.opened(silence(sites), clip), clip).mean, sigma)


def test_the_coordinator_adds_nothing_where_the_sites_have() -> None:
    federation = Federation(SITE)
    opened = federation.opened(silence(8))
    one, other = (federation.released(opened, what=what).mean for what in ("a", "b"))
    assert np.array_equal(one, other)
    assert np.array_equal(one, opened.mean)


def test_central_noise_is_new_in_every_round() -> None:
    federation = Federation(CENTRAL)
    opened = federation.opened(silence(8))
    one, other = (federation.released(opened, what=what).mean for what in ("a", "b"))
    assert abs(float(np.corrcoef(one, other)[0, 1])) < stats.norm.isf(WRONG / 2) / math.sqrt(SIZE)


def test_the_opened_sum_is_left_as_it_was() -> None:
    federation = Federation(CENTRAL, ADAPTIVE)
    opened = federation.opened(silence(8))
    before = opened.mean.copy()
    federation.released(opened)
    assert np.array_equal(opened.mean, before)


@pytest.mark.parametrize("lost", [(), (2, 5)], ids=["all", "two drop out"])
@pytest.mark.parametrize("bits", [16, 32])
def test_under_real_masks_the_noise_is_that_of_the_survivors(
    tmp_path: Path, lost: tuple[int, ...], bits: int
) -> None:
    """The whole way: noise, masks, shares, the masks of dropouts taken off, and the released mean."""
    federation = Federation(
        SITE, f"aggregation.ring_bits={bits}", "aggregation.dropouts=0.25", "privacy.noise_multiplier=1.5"
    )
    names = [f"site-{number}" for number in range(8)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, identities[name]) for name in names)
    contract = contract_for(TRAIN, federation.plan, roster, "0123", SIZE, "layout")
    model = bytes(32)
    coordinator = Coordinator(contract, 1, 1, model, names)
    attempts = {
        name: Attempts(tmp_path / name, contract, Member(name, identities[name], 3), {}) for name in names
    }
    for name in names:
        coordinator.advertised(from_bytes(Advertise, attempts[name].agree(1, to_bytes(coordinator.begin), 1)))
    peers = to_bytes(coordinator.peers())
    for name in names:
        coordinator.shared(from_bytes(Shares, attempts[name].agree(2, peers, 1)))
    inboxes = coordinator.inboxes()
    updates = np.random.default_rng(3).normal(0, 1e-3, (8, SIZE))
    left = [number for number in range(8) if number not in lost]
    vectors = federation.vectors(updates, 1.0)
    for number in left:
        inbox = to_bytes(inboxes[names[number]])
        statement, masked = attempts[names[number]].mask(inbox, 1, model, 1, vectors[number].copy)
        coordinator.fold(from_bytes(Masked, statement), masked)
    survivors = to_bytes(coordinator.survivors())
    for number in left:
        coordinator.confirmed(from_bytes(Confirm, attempts[names[number]].agree(4, survivors, 1)))
    unmask = to_bytes(coordinator.request())
    for number in left:
        coordinator.revealed(from_bytes(Reveal, attempts[names[number]].agree(5, unmask, 1)))
    opened = federation.layout.open(coordinator.sum())
    mean = federation.released(opened).mean
    assert opened.counters == {WEIGHT: len(left)}
    clear = PlainSum(federation.layout)
    for number in left:
        clear.add(vectors[number])
    assert np.array_equal(mean, clear.open().mean)
    noise = mean - updates[left].mean(axis=0)
    assert_deviation(noise, 1.5 * math.sqrt(len(left) / 5) / len(left))
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(noise, 1.5 * math.sqrt(len(left) / 5) / len(left) / 2)


# The mean.


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
            federation.released(federation.opened(updates, clip, str(number)), clip, str(number)).mean
            for number in range(rounds)
        ],
        axis=0,
    )
    spread = 0.02 * math.sqrt(8 / 5) * clip / 8 / math.sqrt(rounds)
    assert np.abs(found - expected).max() < stats.norm.isf(WRONG / 100) * spread
    assert np.abs(found - updates.mean(axis=0)).max() > 10 * spread  # it was clipped


def test_the_clipping_norm_stays_without_adaptive_clipping() -> None:
    federation = Federation(CENTRAL)
    assert federation.released(federation.opened(silence(8)), 0.37).clip == 0.37


# Adaptive clipping.


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
    coding = Coding(scale=1024.0, variance=1.0, deviation=1.0, count_step=300, count_deviation=1.0)
    sum_of_signs = unclipped - (8 - unclipped)
    opened = Opened(np.array([0.5, sum_of_signs * 300 / 1024 / 8], np.float32), {WEIGHT: 8})
    adaptive = AdaptiveSection(quantile=quantile, learning_rate=rate)
    found = released(opened, coding, clip, adaptive, SECRET)
    move = min(max(-rate * (unclipped / 8 - quantile), -math.log(10)), math.log(10))
    assert found.clip == pytest.approx(clip * math.exp(move), rel=1e-5)
    assert found.mean.shape == (1,)
    assert found.mean[0] == pytest.approx(0.5 * clip, rel=1e-6)


@pytest.mark.parametrize("base", [SITE, CENTRAL], ids=["site", "central"])
def test_the_noise_on_the_clipping_norm_is_what_the_plan_pays_for(base: list[str]) -> None:
    federation = Federation(base, "privacy.adaptive={count_noise=0.9,learning_rate=0.2}", size=2)
    moves = []
    for number in range(300):
        opened = federation.opened(silence(8, 2), what=f"count/{number}")
        moves.append(math.log(federation.released(opened, what=str(number)).clip))
    # All eight unclipped: b = 1 with noise of 0.9 sites; eight sites' noise where five are counted on.
    sigma = 0.9 * (math.sqrt(8 / 5) if base is SITE else 1.0) / 8
    noise = np.array(moves) / -0.2 - (1 - 0.5)
    assert_deviation(noise, sigma * (1.0 if base is CENTRAL else federation.coding.count_deviation / 0.9))
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(noise, 2 * sigma)


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
            found = federation.released(
                federation.opened(updates, clip, f"{start}/{number}"), clip, str(number)
            )
            clip = found.clip
            clips.append(clip)
        settled = np.exp(np.mean(np.log(clips[-30:])))
        reached = float((norms <= settled).mean())
        assert abs(reached - quantile) < 0.1, (start, settled)
        assert clips[0] != pytest.approx(settled, rel=0.5)


def test_a_round_of_wild_noise_moves_the_clipping_norm_by_ten_at_most() -> None:
    coding = Coding(scale=1024.0, variance=1.0, deviation=1.0, count_step=1, count_deviation=1e6)
    adaptive = AdaptiveSection(learning_rate=1.0)
    for total, factor in ((1e9, 0.1), (-1e9, 10.0)):
        opened = Opened(np.array([0.0, total], np.float32), {WEIGHT: 8})
        assert released(opened, coding, 2.0, adaptive, SECRET).clip == pytest.approx(2.0 * factor)
