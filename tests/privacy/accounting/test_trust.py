"""Whom an epsilon trusts: the noise of one site alone, by what sites draw, and the share of questions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cloister.privacy.accounting import trust
from cloister.privacy.accounting.accountant import over_runs, skellam_rdp, spent
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.accounting.trust import Shares, alone
from cloister.privacy.mechanism import unit_sum
from cloister.privacy.mechanism.events import (
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    Skellam,
    to_json,
)
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import distributed
from cloister.protocol.plan.plan import AdaptiveSection
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.mutants import Mutant

DELTA = 1e-6
STEPS = SampledGaussian(1.0, 0.01, 200)


def asked(z: float = 8.0, *, honest: int = 6, cells: int = 3) -> unit_sum.UnitSum:
    return unit_sum.unit_sum(z, unit_sum.Shape(cells, cells, 1.0), 8, 1000, honest, 32, "record")


def ledger(*events: Event) -> list[str]:
    return [to_json([event]) for event in events]


def found(*events: Event) -> Shares:
    parts = trust.shares(ledger(*events), DELTA)
    assert parts is not None
    return parts


def test_the_noise_of_one_site_is_what_it_draws() -> None:
    """By the variance of its samples, and by that of the mechanism, exactly."""
    question = asked(cells=20_000)
    (own,) = alone([question.event]).events
    assert isinstance(own, Skellam)
    assert own == replace(question.event, variance=question.event.variance / 6, honest=1)
    assert own.variance == question.variance
    out = np.empty(question.shape.cells, np.uint32)
    question.encode([], NoiseStream.from_declared_seed(1), out)
    noise = out.view(np.int32).astype(np.float64)
    assert 1e-6 < stats.chi2.cdf(float(noise @ noise) / own.variance, noise.size) < 1 - 1e-6


def test_a_sum_of_updates_and_its_count_have_the_noise_of_one_site() -> None:
    mechanism = distributed(4.0, 100, 8, 5, 32, AdaptiveSection(count_noise=6.0))
    (own,) = alone([mechanism.event]).events
    assert isinstance(own, Skellam)
    step = float(mechanism.count_step)
    assert (own.variance, own.extra) == (mechanism.variance, ((mechanism.variance, step, step),))


def test_what_one_site_draws_costs_what_the_formula_says() -> None:
    """Two equal questions by hand: the curve at variance v / 6, converted (Canonne et al. 2020, Proposition 12)."""
    event = asked().event
    own, orders = found(event, event).against_all, np.arange(2, 400)
    rdp = np.array([2 * skellam_rdp(int(a), event.variance / 6, event.l2, event.l1) for a in orders])
    by_hand = (rdp + np.log1p(-1 / orders) - np.log(DELTA * orders) / (orders - 1)).min()
    assert own is not None
    assert own.epsilon == pytest.approx(by_hand, rel=2e-3)
    assert own.epsilon > 2 * spent([event, event], DELTA).epsilon


def test_alone_it_is_alone_already() -> None:
    once = alone([STEPS, asked().event]).events
    assert alone(once).events == once
    assert alone([]).events == ()


def figures_of_a_run_and_two_questions() -> None:
    """All figures, each by the events that it is about, with the noise that a site draws."""
    large, small = asked(8.0), asked(20.0, honest=5)
    parts = found(STEPS, large.event, small.event)
    own = [replace(each.event, variance=each.variance) for each in (large, small)]
    assert parts.against_all == over_runs(ledger(STEPS, *own), DELTA)
    assert parts.questions == over_runs(ledger(large.event, small.event), DELTA)
    assert parts.rest == over_runs(ledger(STEPS), DELTA)
    together = over_runs(ledger(STEPS, large.event, small.event), DELTA)
    assert parts.rest is not None
    assert parts.questions.epsilon < parts.rest.epsilon < together.epsilon < parts.against_all.epsilon


OWN = "privacy.accounting.trust:_own_part"
REST = "if not is_question(event)"
MUTANTS = [
    Mutant(OWN, "variance=event.variance / event.honest", "variance=event.variance"),
    Mutant(OWN, "variance=event.variance / event.honest", "variance=event.variance / event.honest**2"),
    Mutant(
        OWN, "variance=event.variance / event.honest", "variance=event.variance, l2=event.l2 / event.honest"
    ),
    Mutant("privacy.accounting.trust:shares", REST, "if True"),
    Mutant("privacy.accounting.trust:shares", "if is_question(event)", "if True"),
    Mutant("privacy.accounting.trust:is_question", 'event.unit != "site"', 'event.unit == "site"'),
    Mutant("privacy.accounting.trust:shares", "cost(own)", "cost(listed)"),
    Mutant("privacy.accounting.trust:shares", "max(found", "min(found"),
    Mutant("privacy.mechanism.unit_sum:unit_sum", "honest=honest", "honest=1"),
    Mutant("privacy.mechanism.unit_sum:unit_sum", "honest=honest", "honest=contributors"),
]


def test_a_run_and_two_questions_have_all_figures() -> None:
    figures_of_a_run_and_two_questions()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_each_mutant_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises(AssertionError):
        figures_of_a_run_and_two_questions()


def test_the_count_of_adaptive_clipping_is_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Mutant(OWN, "(variance / event.honest,", "(variance,").plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_sum_of_updates_and_its_count_have_the_noise_of_one_site()


def test_without_questions_there_is_nothing_to_tell_apart() -> None:
    for events in ([STEPS], [Gaussian(4.0, 1)], [distributed(4.0, 100, 8, 5, 32).event], []):
        assert trust.shares(ledger(*events), DELTA) is None
    assert alone([STEPS, STEPS]).events == (STEPS, STEPS)


def test_questions_alone_have_no_rest() -> None:
    parts = found(asked().event)
    assert parts.rest is None
    assert parts.questions == spent([asked().event], DELTA)


def test_equal_noise_of_more_or_fewer_sites_is_one_mechanism_except_against_all_others() -> None:
    six, three = asked().event, replace(asked().event, honest=3)
    assert six != three
    assert over_runs(ledger(six, three), DELTA) == spent([six, six], DELTA)
    parts = found(six, three)
    assert parts.against_all is not None
    assert (parts.against_all.delta, parts.questions.delta) == (2 * DELTA, DELTA)


def test_against_all_others_nothing_costs_less_than_against_some() -> None:
    """Sums of one and of two sites are two mechanisms, and the noise of one site is the same in both."""
    one = replace(asked(honest=1).event, count=10)
    two = replace(one, variance=2 * one.variance, honest=2, count=1)
    parts, together = found(one, two), over_runs(ledger(one, two), DELTA)
    (own,) = {replace(event, count=1) for event in alone([one, two]).events if isinstance(event, Skellam)}
    assert spent([replace(own, count=11)], DELTA).epsilon < together.epsilon
    assert parts.against_all is not None
    assert parts.against_all.epsilon == together.epsilon


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Gaussian(4.0, 1), "the coordinator adds the noise"),
        (CorrelatedGaussian(4.0, 4, 2, 2), "the coordinator adds the noise"),
        (replace(STEPS, trusts="coordinator"), "no crafted weights"),
        (Skellam(1e12, 1e4, 1e5, 1), "does not say of how many sites"),
        (Skellam(1e12, 1e4, 1e5, 1, unit="record"), "does not say of how many sites"),
    ],
)
def test_where_others_are_trusted_there_is_no_figure(event: Event, why: str) -> None:
    parts = found(asked().event, event)
    assert parts.against_all is None
    assert why in parts.why_not
    assert parts.questions.epsilon > 0


STEP_PLAN = ("privacy.unit=record", "privacy.noise_multiplier=1.0", "privacy.sampling_rate=0.01")
COMMON = ("aggregation.weighting=uniform", "server.evaluation=none")


@pytest.mark.parametrize(("method", "holds"), [("reference", True), ("opacus", False)])
def test_steps_by_opacus_trust_the_coordinator(method: str, holds: bool) -> None:
    terms = terms_of(parse("", (*STEP_PLAN, *COMMON, f"privacy.method={method}")), 1)
    assert terms is not None
    own = alone(terms.round_events)
    assert (own.events == terms.round_events, bool(own.why_not)) == (holds, not holds)


def test_the_noise_of_sites_says_of_how_many() -> None:
    plan = parse("", ("privacy.unit=site", "privacy.noise_multiplier=4.0", "cohort.sites=200", *COMMON))
    terms = terms_of(plan, 1000)
    assert terms is not None
    assert terms.mechanism is not None
    (own,) = alone(terms.round_events).events
    assert isinstance(own, Skellam)
    assert own.variance == terms.mechanism.variance
    assert terms.round_events == (replace(own, variance=own.variance * plan.honest(), honest=plan.honest()),)
