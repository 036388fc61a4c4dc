"""The report as data: its claims, the cases without a claim, the meaning of an epsilon, and JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import pytest
from pydantic import TypeAdapter

from cloister.privacy.report import report as privacy_report
from cloister.privacy.report.report import (
    LARGEST_EPSILON,
    UNCLAIMED_DELTA,
    AuditRow,
    CostRow,
    DatasetRow,
    GroupRow,
    Ledger,
    LedgerRow,
    QuestionsRow,
    RoundRow,
    RunReport,
    SecureSum,
    SiteRow,
    meaning,
    to_json,
    verdict,
)
from cloister.protocol.errors import CloisterError
from cloister.tests.tools.raises import raises

SITES = (
    "charite-berlin",
    "ospedale-maggiore",
    "st-thomas",
    "karolinska",
    "clinic-barcelona",
    "uz-leuven",
    "rigshospitalet",
    "mayo-rochester",
)
EPSILONS = (0.61, 0.78, 0.90, 1.00, 1.10, 1.19, 1.27, 1.35, 1.42, 1.49, 1.56, 1.6795)
LOSSES = (2.680, 2.651, 2.630, 2.610, 2.595, 2.580, 2.565, 2.552, 2.540, 2.530, 2.519, 2.511)


def realistic(*, site: str = SITES[0], **changes: Any) -> RunReport:
    """Eight sites, twelve rounds, a hundred charges; `changes` replace fields, `site` the name of the first site."""
    names = (site, *SITES[1:])
    rows: list[LedgerRow] = []
    head = ""
    for number in range(100):
        head = hashlib.sha256(f"{head}/{number}".encode()).hexdigest()
        written = f"2026-03-14T{9 + number // 60:02d}:{number % 60:02d}:00Z"
        event = f"round {number // 8 + 1}: 5 Poisson-sampled Gaussian steps, rate 0.0029, noise 0.6"
        rows.append(
            LedgerRow(number + 1, written, names[number % 8], event, EPSILONS[min(11, number // 8)], head)
        )
    notes = {
        3: "round 5: did not answer before the deadline",
        6: "round 2: refused a second list of survivors",
    }
    whole = RunReport(
        run="discharge-letters",
        run_id="9f2c41d07ab84e53",
        created="2026-03-14T10:52:00Z",
        plan_digest=hashlib.sha256(b"plan").hexdigest(),
        plan='[run]\nname = "discharge-letters"\nrounds = 12\n\n[privacy]\nunit = "record"\nnoise_multiplier = 0.6\n',
        roster_hash=hashlib.sha256(b"roster").hexdigest(),
        versions={"cloister": "0.1.0", "dp-accounting": "0.6.0", "torch": "2.13.0"},
        unit="record",
        unit_in_words="one discharge letter (one line of a site's JSONL file)",
        relation="adding or removing one such letter",
        mechanism="DP-SGD in each site: the gradient of each letter is clipped to norm C, and Gaussian noise is added.",
        method="gradients of each record by Opacus",
        clip=1.0,
        noise_multiplier=0.60009,
        sampling_rate=0.0029,
        accountant="privacy loss distributions, composed over every step of a site",
        delta=1e-5,
        epsilon=1.6795,
        budget=2.0,
        stopped_by_budget=False,
        declared_noise=False,
        rounds=tuple(
            RoundRow(at + 1, epsilon, loss, 7 if at == 4 else 8)
            for at, (epsilon, loss) in enumerate(zip(EPSILONS, LOSSES, strict=True))
        ),
        sites=tuple(
            SiteRow(
                name,
                11 if at == 3 else 12,
                1.61 if at == 3 else 1.6795,
                notes.get(at, ""),
            )
            for at, name in enumerate(names)
        ),
        assumptions=(
            "Batches are Poisson-sampled: each letter is in a batch with probability 0.0029, on its own.",
            "Arithmetic is in 32-bit floating point; the guarantee is of real arithmetic.",
        ),
        trusted=("Each site, with its own letters: it runs the code that clips and adds noise.",),
        not_covered=(
            "Choosing hyperparameters by looking at other runs over the same letters.",
            "What the base model learned before the run, from public text.",
        ),
        secure=SecureSum(sites=8, neighbours=7, threshold=5, dropouts=1, colluders=1, ring_bits=32, honest=6),
        ledger=Ledger(tuple(rows), head, verified=True),
        audit=AuditRow(canaries=1000, guesses=100, correct=75, confidence=0.95, epsilon=0.6729),
        units="discharge letters",
        groups=tuple(
            GroupRow(units, epsilon)
            for units, epsilon in ((1, 1.6795), (2, 2.9371), (5, 5.9812), (10, None), (100, None))
        ),
        trust_model="Each site is the curator of its own letters and adds the noise before anything leaves it.",
        protected_from="Everybody who gets the trained models; also the coordinator and the other sites.",
        responsible=(
            "Each site looks after its own data and machine, and adds the noise.",
            "The coordinator runs the training and stops at the budget.",
            "The person who signs decides whether the protection is strong enough.",
        ),
        exposure="Records were not collected: each site kept its own.",
    )
    if "epsilon" in changes:  # they begin at that of the report
        changes = {"groups": (), **changes}
    return dataclasses.replace(whole, **changes)


def read(text: str | bytes) -> RunReport:
    """The report in `report.json`."""
    return TypeAdapter(RunReport).validate_json(text)


def without_privacy(**changes: Any) -> RunReport:
    whole = realistic()
    return dataclasses.replace(
        whole,
        unit="none",
        epsilon=None,
        delta=None,
        audit=None,
        groups=(),
        rounds=tuple(dataclasses.replace(row, epsilon=None) for row in whole.rounds),
        sites=tuple(dataclasses.replace(row, epsilon=None) for row in whole.sites),
        ledger=Ledger((), "", verified=True),
        **changes,
    )


SENTENCE = (
    "This run protects one discharge letter (one line of a site's JSONL file): every model that it released over "
    "rounds 1 to 12 is differentially private with epsilon 1.68 for this run alone and delta 1 × 10⁻⁵ between data "
    "sets that differ by adding or removing one such letter, provided that every assumption on this page holds."
)


def test_the_guarantee_is_one_sentence() -> None:
    assert verdict(realistic()).holds
    assert verdict(realistic()).sentence == SENTENCE


OBJECTIONS = {
    "no unit": (without_privacy(), "This run gives no privacy guarantee"),
    "declared noise": (realistic(declared_noise=True), "declared seed"),
    "no epsilon": (realistic(epsilon=None), "no finite epsilon"),
    "no round": (realistic(rounds=()), "it finished no round"),
    "only a round that was given up": (
        realistic(rounds=(RoundRow(1, 0.61, 2.7, 0),)),
        "it finished no round",
    ),
    "broken ledger": (
        realistic(ledger=Ledger((), "", verified=False, problem="row 7 was changed")),
        "row 7 was changed",
    ),
    "empty ledger": (realistic(ledger=Ledger((), "", verified=True)), "its ledger holds no charge"),
    "ledger above": (
        realistic(ledger=Ledger((LedgerRow(9, "", "a", "", 1.7, ""),), "", verified=True)),
        "row 9 of the ledger has epsilon 1.70, above the 1.68",
    ),
    "audit": (
        realistic(audit=AuditRow(9, 9, 9, 0.95, 1.6999)),
        "epsilon is above 1.69, and 1.68 would be claimed",
    ),
    "large delta": (realistic(delta=0.01), "its delta is 1 × 10⁻², and a run that publishes each unit"),
    "large epsilon": (realistic(epsilon=10.001), "its epsilon is 10.01, and above 10 a guess"),
}


@pytest.mark.parametrize(("report", "says"), OBJECTIONS.values(), ids=OBJECTIONS)
def test_nothing_is_claimed_where_something_speaks_against_it(report: RunReport, says: str) -> None:
    found = verdict(report)
    assert not found.holds
    assert says in found.sentence


def test_epsilon_is_claimed_up_to_ten_and_a_guess_may_then_be_all_but_certain() -> None:
    for epsilon in (9.9, LARGEST_EPSILON):
        assert verdict(realistic(epsilon=epsilon)).holds
    assert not verdict(realistic(epsilon=math.nextafter(LARGEST_EPSILON, math.inf))).holds
    odds = math.exp(LARGEST_EPSILON)
    assert odds / (odds + 1) > 0.9999  # as the sentence says


@pytest.mark.parametrize("count", [49, 101, 120, 4999])  # 49 * (1 / 49) is below 1 in float64
def test_a_delta_that_a_run_which_publishes_one_site_would_meet_is_not_claimed(count: int) -> None:
    sites = tuple(SiteRow(f"site-{at:03d}", 1, 1.0) for at in range(count))
    met = realistic(unit="site", sites=sites, delta=1 / count)
    assert not verdict(met).holds
    few = dataclasses.replace(met, sites=sites[:40])  # the others took no part
    assert not verdict(dataclasses.replace(few, federation=count)).holds
    assert dataclasses.replace(few, federation=count).members == count
    below = min(math.nextafter(1 / count, 0), math.nextafter(UNCLAIMED_DELTA, 0))
    assert verdict(dataclasses.replace(met, delta=below)).holds
    if count > 100:
        assert f"publishes one of its {count:,} sites, drawn at random" in verdict(met).sentence
        assert verdict(dataclasses.replace(met, unit="record")).holds  # the sites are not its units


def test_delta_is_claimed_below_one_in_a_hundred() -> None:
    assert verdict(realistic(delta=math.nextafter(UNCLAIMED_DELTA, 0))).holds
    assert not verdict(realistic(delta=UNCLAIMED_DELTA)).holds
    assert not verdict(realistic(delta=0.5)).holds


def test_without_the_guard_a_broken_ledger_would_be_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail: with the objections removed the same report claims its epsilon."""
    broken = realistic(ledger=Ledger((), "", verified=False, problem="row 7 was changed"))
    monkeypatch.setattr(privacy_report, "_objection", lambda report: "")
    assert verdict(broken).holds


def test_a_claim_below_what_was_spent_cannot_be_made() -> None:
    with raises(CloisterError, "epsilon", says="1.56 of round 11"):
        realistic(epsilon=1.5)
    sites = (SiteRow("far", 1, 1.68),)
    with raises(CloisterError, "epsilon", says="1.68 of site far"):
        realistic(sites=sites)
    with raises(CloisterError, "epsilon", says="unit is 'none'"):
        realistic(unit="none")
    with raises(CloisterError, "delta", says="None"):
        realistic(delta=None)
    for name in ("unit_in_words", "relation", "mechanism", "accountant"):
        with raises(CloisterError, name):
            realistic(**{name: " "})


@pytest.mark.parametrize(
    "groups",
    [
        (GroupRow(1, 1.6), GroupRow(2, 3.0)),
        (GroupRow(1, 1.6795), GroupRow(2, 1.6)),
        (GroupRow(1, 1.6795), GroupRow(2, None), GroupRow(5, 9.0)),
    ],
    ids=["below the report", "falling", "falling from none"],
)
def test_a_group_is_not_claimed_to_cost_less_than_its_parts(groups: tuple[GroupRow, ...]) -> None:
    with raises(CloisterError, "groups"):
        realistic(groups=groups)


def over_runs(**changes: Any) -> DatasetRow:
    whole = DatasetRow("letters", "/srv/letters.sqlite", 3, 2.1512, 2e-6, 2.5, "ab" * 32)
    return dataclasses.replace(whole, **changes)


def test_all_runs_on_a_dataset_are_in_the_sentence() -> None:
    def said(**changes: Any) -> str:
        return verdict(realistic(dataset=over_runs(**changes))).sentence

    together = (
        "epsilon 1.68 for this run (over the 3 runs on 'letters' together it is 2.16 at delta 2 × 10⁻⁶) and"
    )
    assert together in said()
    alone = said(runs=1, epsilon=1.6795, delta=1e-6)
    assert "(over the 1 run on 'letters' together it is 1.68 at delta 1 × 10⁻⁶)" in alone
    at = "at delta 2 × 10⁻⁶, no protection to speak of)"
    assert f"(over the 3 runs on 'letters' together it is 10.01 {at}" in said(epsilon=10.001)
    assert f"it is without bound {at}" in said(epsilon=None)
    weak = (
        "it is 2.16 at delta 1 × 10⁻², no protection to speak of)"  # one run alone would claim nothing either
    )
    assert weak in said(delta=0.01)
    assert "no protection" not in said(delta=0.0099)
    lost = said(epsilon=None, problem="it is missing")
    assert "for this run alone (what all runs on 'letters' cost together is not known)" in lost
    with raises(CloisterError, "dataset.epsilon", says="1.6795"):
        realistic(dataset=over_runs(epsilon=1.5))
    report = realistic(dataset=over_runs())
    assert read(to_json(report)) == report


def with_questions(**changes: Any) -> DatasetRow:
    """Runs of which some are questions."""
    asked = QuestionsRow(
        questions=CostRow(0.5231, 2e-6), rest=CostRow(1.8, 1e-6), against_all=CostRow(2.9, 2e-6)
    )
    return over_runs(asked=dataclasses.replace(asked, **changes))


def test_with_questions_the_sentence_says_whom_the_figure_over_all_runs_trusts() -> None:
    report = realistic(dataset=with_questions())
    trusting = "against those who know the noise of no more sites than the plan of each question assumes"
    assert f"together it is 2.16 at delta 2 × 10⁻⁶, {trusting}) and" in verdict(report).sentence
    assert trusting not in verdict(realistic(dataset=over_runs())).sentence
    assert read(to_json(report)) == report
    facts = json.loads(to_json(report))["dataset"]["asked"]
    assert facts["against_all"] == {"epsilon": 2.9, "delta": 2e-6}
    assert (facts["questions"]["epsilon"], facts["rest"]["epsilon"]) == (0.5231, 1.8)


def test_a_figure_against_all_others_below_that_against_some_cannot_be_made() -> None:
    with raises(CloisterError, "dataset.asked.against_all", says="2.1512"):
        realistic(dataset=with_questions(against_all=CostRow(2.15, 2e-6)))
    unbound = dataclasses.replace(with_questions(), epsilon=None)
    with raises(CloisterError, "dataset.asked.against_all", says="inf"):
        realistic(dataset=unbound)
    for fits in (CostRow(None, 2e-6), None):
        assert realistic(dataset=with_questions(against_all=fits))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((4,), "round 4"),
        ((1, 2, 3), "rounds 1 to 3"),
        ((1, 3), "2 rounds from 1 to 3"),
    ],
)
def test_the_rounds_are_named(numbers: tuple[int, ...], words: str) -> None:
    rounds = tuple(RoundRow(number, 1.0, None, 8) for number in numbers)
    assert f"released over {words} is" in verdict(realistic(rounds=rounds)).sentence


def test_the_meaning_is_true_of_randomised_response_and_no_smaller() -> None:
    """The mechanism that meets the bounds: leak the bit with probability delta, else answer with odds e^epsilon."""
    epsilon, delta = 1.2, 0.01
    right = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    found = meaning(epsilon, delta)
    assert math.exp(epsilon) <= float(found.factor) <= math.exp(epsilon) + 0.01
    assert right <= float(found.guess) / 100 <= right + 0.001
    assert meaning(0.0, 1e-9).guess == "50.1"
    assert [meaning(value, 1e-5).weak for value in (4.5, 4.7, 1e9)] == [False, True, True]
    assert meaning(9.0, 1e-5).factor == "8,104"
    assert meaning(1e9, 1e-5).factor == "more than 10³⁰⁰"


def test_json_gives_the_report_back() -> None:
    for report in (
        realistic(),
        without_privacy(),
        realistic(audit=None, secure=None, roster_hash=None, budget=None),
    ):
        assert read(to_json(report)) == report
        assert to_json(read(to_json(report))) == to_json(report)
    assert json.loads(to_json(realistic()))["ledger"]["rows"][99]["number"] == 100


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(realistic(rounds=(RoundRow(1, 1.0, math.nan, 8),)))
