"""How long the noise of a private run is said to be beside its signal, against sums that are really made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cloister.privacy.accounting.signal import advice, signal_of, summary
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse

RECORD = [
    "cohort.sites=8",
    "aggregation.weighting=uniform",
    "privacy.unit=record",
    "privacy.noise_multiplier=0.5",
    "privacy.sampling_rate=0.1",
    "privacy.delta=1e-6",
    "local.steps=4",
    "local.batch_size=32",
    "server.evaluation=none",
]
SITE = [*RECORD[:2], "server.evaluation=none", "privacy.unit=site", "privacy.noise_multiplier=2.0"]


def plan_of(*settings: str) -> tuple[Plan, Terms]:
    plan = parse("", list(settings))
    terms = terms_of(plan, 1000)
    assert terms is not None
    return plan, terms


def test_the_noise_of_a_step_and_of_a_round_are_those_of_sums() -> None:
    """The longest signal: all gradients of all batches are one vector of norm C."""
    plan, terms = plan_of(*RECORD)
    signal = signal_of(plan, terms, 1000, [320] * 8)
    assert signal is not None
    draw, size, batch = np.random.default_rng(1), 1000, 32
    steps, rounds = [], []
    for _ in range(40):
        sums = 0.5 * draw.normal(size=(8, 4, size))
        steps.append(np.linalg.norm(sums[0, 0]) / batch)
        rounds.append(np.linalg.norm(sums.mean((0, 1))) / batch)
    assert signal.batch == batch
    assert signal.step == pytest.approx(np.mean(steps), rel=0.02)
    assert signal.round == pytest.approx(np.mean(rounds), rel=0.02)
    assert signal.coordinate == pytest.approx(0.5 / 32)
    assert signal.typical == pytest.approx(1 / math.sqrt(1000))


def test_of_a_site_as_unit_the_updates_are_the_signal() -> None:
    plan, terms = plan_of(*SITE)
    signal = signal_of(plan, terms, 400, [1])
    assert signal is not None
    assert signal.round == pytest.approx(2.0 * 20 / 8)
    assert [line for line in advice(plan, signal) if "more sites in a round" in line]
    assert "8 sites in a round" in summary(plan, signal)


@pytest.mark.parametrize(
    ("batch", "accumulation", "warned"), [(32, 1, False), (4, 1, True), (16, 2, False), (128, 1, True)]
)
def test_a_batch_size_that_contradicts_rate_and_units_is_warned_of(
    batch: int, accumulation: int, warned: bool
) -> None:
    plan, terms = plan_of(*RECORD, f"local.batch_size={batch}", f"local.accumulation={accumulation}")
    signal = signal_of(plan, terms, 100, [280] * 8)
    assert signal is not None
    assert bool([line for line in advice(plan, signal) if "set the latter to about 28" in line]) == warned


def test_a_signal_below_the_noise_is_warned_of_and_a_delta_that_is_no_guarantee() -> None:
    plan, terms = plan_of(*RECORD)
    few, many = (signal_of(plan, terms, 100_000, [units] * 8) for units in (140, 14_000))
    assert few is not None
    assert many is not None
    assert few.round > 1 > many.round
    assert [line for line in advice(plan, few) if "learns little" in line]
    assert not [line for line in advice(plan, many) if "learns little" in line]
    assert not [line for line in advice(plan, many, 10**6 - 1) if "privacy.delta" in line]
    assert [line for line in advice(plan, many, 10**6 + 1) if "privacy.delta" in line]


def test_the_shipped_private_run_has_the_ratio_that_is_stated() -> None:
    plan, terms = plan_of(
        *RECORD, "privacy.noise_multiplier=0.65", "privacy.sampling_rate=0.003", "local.steps=5"
    )
    signal = signal_of(plan, terms, 43_000, [11_000] * 8)
    assert signal is not None
    assert signal.round == pytest.approx(0.65, abs=0.03)


def test_sites_without_units_and_questions_have_no_signal() -> None:
    plan, terms = plan_of(*RECORD)
    assert signal_of(plan, terms, 100, [0, 0]) is None
    uneven = signal_of(plan, terms, 100, [100, 300, 200])
    assert uneven is not None
    assert (uneven.fewest, uneven.median, uneven.most) == (100, 200.0, 300)
    assert summary(plan, uneven).startswith("100 to 300 units at a site, 20 expected in a batch")
