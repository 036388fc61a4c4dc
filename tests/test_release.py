"""The exit of a site: which code is used for which plan, what is not in the vector, and the way under real masks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from cloister.aggregation.average import WEIGHT, PlainSum, SumLayout
from cloister.aggregation.secure_coordinator import SecureCoordinator
from cloister.aggregation.sums import contract_for, training_layout
from cloister.clients.attempt import Attempts, Member
from cloister.clients.release import Finished, for_site_unit, in_clear_units
from cloister.privacy.noise import NoiseStream
from cloister.privacy.site_noise import SiteMechanism
from cloister.privacy.terms import terms_of
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages import TRAIN, Advertise, Confirm, Reveal, Shares
from cloister.protocol.roster import Card, Roster, new_identity
from cloister.protocol.soundness import parse

WRONG = 1e-9
SITE = ["aggregation.weighting=uniform", "server.evaluation=none", "privacy.unit=site", "cohort.sites=8"]
SECRET = NoiseStream.from_declared_seed(23)
SIZE = 20_000
Floats = npt.NDArray[np.float32]


def exit_of(size: int) -> tuple[SiteMechanism, SumLayout]:
    """The mechanism and the layout of a plan of the unit `site`."""
    plan = parse("", [*SITE, "privacy.noise_multiplier=1.5"])
    terms = terms_of(plan, size)
    assert terms is not None
    assert terms.mechanism is not None
    return terms.mechanism, training_layout(plan, size)


def assert_deviation(samples: npt.NDArray[Any], sigma: float) -> None:
    """The two-sided chi-square test of the variance at the level `WRONG`, for normal samples with mean 0."""
    statistic = float(np.square(samples.astype(np.float64) / sigma).sum())
    low, high = stats.chi2.ppf([WRONG / 2, 1 - WRONG / 2], samples.size)
    assert low < statistic < high, f"deviation {math.sqrt(statistic / samples.size) * sigma}, not {sigma}"


def zeros(size: int) -> Floats:
    return np.zeros(size, np.float32)


def test_an_update_of_another_length_does_not_leave() -> None:
    mechanism, layout = exit_of(5)
    with pytest.raises(UpdateError, match="a vector of 5 values"):
        for_site_unit(Finished(zeros(4), 1, 0.5), layout, mechanism, 1.0, SECRET)


def test_nothing_of_the_data_stands_beside_the_vector() -> None:
    """Tokens and loss of a site are in no place of what it sends."""
    mechanism, layout = exit_of(7)
    assert layout.counters == ("weight",)
    one, other = (
        for_site_unit(Finished(zeros(7), tokens, loss), layout, mechanism, 1.0, SECRET.child("x"))
        for tokens, loss in ((1, 0.5), (10**6, 99.0))
    )
    assert np.array_equal(one, other)
    assert one.size == 7 + layout.ring.limbs
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


@pytest.mark.parametrize("lost", [(), (2, 5)], ids=["all", "two drop out"])
@pytest.mark.parametrize("bits", [16, 32])
def test_under_real_masks_the_noise_is_that_of_the_survivors(
    tmp_path: Path, lost: tuple[int, ...], bits: int
) -> None:
    """The whole way: noise, masks, shares, the masks of dropouts taken off, and the released mean."""
    plan = parse(
        "",
        [*SITE, f"aggregation.ring_bits={bits}", "aggregation.dropouts=0.25", "privacy.noise_multiplier=1.5"],
    )
    terms, layout = terms_of(plan, SIZE), training_layout(plan, SIZE)
    assert terms is not None
    mechanism = terms.mechanism
    assert mechanism is not None
    names = [f"site-{number}" for number in range(8)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, identities[name]) for name in names)
    contract = contract_for(TRAIN, plan, roster, "0123", SIZE, "layout")
    model = bytes(32)
    coordinator = SecureCoordinator(contract, 1, 1, model, names)
    attempts = {
        name: Attempts(tmp_path / name, contract, Member(name, identities[name], 3), {}) for name in names
    }
    for name in names:
        advertise = attempts[name].agree(coordinator.begin, 1)
        assert isinstance(advertise, Advertise)
        coordinator.advertised(advertise)
    peers = coordinator.peers()
    for name in names:
        shares = attempts[name].agree(peers, 1)
        assert isinstance(shares, Shares)
        coordinator.shared(shares)
    inboxes = coordinator.inboxes()
    updates = np.random.default_rng(3).normal(0, 1e-3, (8, SIZE))
    left = [number for number in range(8) if number not in lost]
    vectors = [
        for_site_unit(
            Finished(update.astype(np.float32), 9, 1.0), layout, mechanism, 1.0, SECRET.child(str(number))
        )
        for number, update in enumerate(updates)
    ]
    for number in left:
        statement, masked = attempts[names[number]].mask(
            inboxes[names[number]], 1, model, 1, vectors[number].copy
        )
        coordinator.fold(statement, masked)
    survivors = coordinator.survivors()
    for number in left:
        confirm = attempts[names[number]].agree(survivors, 1)
        assert isinstance(confirm, Confirm)
        coordinator.confirmed(confirm)
    unmask = coordinator.request()
    for number in left:
        reveal = attempts[names[number]].agree(unmask, 1)
        assert isinstance(reveal, Reveal)
        coordinator.revealed(reveal)
    opened = layout.open(coordinator.sum())
    mean, _ = mechanism.decode(opened.mean, opened.counters[WEIGHT], 1.0, SECRET)
    assert opened.counters == {WEIGHT: len(left)}
    clear = PlainSum(layout)
    for number in left:
        clear.add(vectors[number])
    assert np.array_equal(mean, clear.open().mean)
    noise = mean - updates[left].mean(axis=0)
    assert_deviation(noise, 1.5 * math.sqrt(len(left) / 5) / len(left))
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(noise, 1.5 * math.sqrt(len(left) / 5) / len(left) / 2)
