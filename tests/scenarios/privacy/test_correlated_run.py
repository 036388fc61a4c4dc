"""Correlated noise in whole runs of real sites: the noise that is applied, what is charged, and what a crash leaves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import toeplitz

from cloister.aggregation.features.server_optimizer import ServerOptimizer
from cloister.clients.consent.spending import Spending as SiteSpending
from cloister.clients.state.carried import Carried
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import count_parameters, load_model
from cloister.lm.training.moments import Carry
from cloister.privacy.accounting import claims
from cloister.privacy.accounting import terms as privacy_terms
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.privacy.ledger.ledger import Entry, Ledger
from cloister.privacy.mechanism import site_noise
from cloister.privacy.mechanism.correlated import (
    Blt,
    CorrelatedNoise,
    Participation,
    loss,
    optimal,
    sensitivity,
)
from cloister.privacy.mechanism.events import CorrelatedGaussian, from_json
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.privacy.report.report import verdict
from cloister.protocol.errors import PlanError, PolicyError, RunFolderError, StaleError
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.messages import TRAIN, Agree, Contribute, Inbox, Instructions
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json as plan_from_json
from cloister.server import run as run_module
from cloister.server.record import journal as steps
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.journal import Journal
from cloister.server.record.progress import RoundDone, SiteAnswered
from cloister.server.record.report import gather
from cloister.server.run import run
from cloister.simulations.audit.audit import audit
from cloister.simulations.federation import simulate
from cloister.tests.parties.federation import PRIVATE, RECORD, TINY, Federation, tiny, write_records
from cloister.tests.scenarios.test_compressed_run import Run as Masked
from cloister.tests.tools.command import found, ran, set_options
from cloister.tests.tools.kills import die, kill_while
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

Z, CLIP, SITES, SIZE, ROUNDS = 2.0, 0.5, 6, 3, 6
CORRELATED = [
    *PRIVATE,
    "privacy.unit=site",
    "privacy.trusted_coordinator=true",
    "privacy.noise_multiplier=2.0",
    "privacy.clip=0.5",
    "privacy.delta=1e-4",
    "privacy.correlated.separation=2",
    "privacy.correlated.participations=3",
    f"cohort.sites={SITES}",
    "cohort.fraction=0.5",
    "aggregation.colluders=0.0",
    f"run.rounds={ROUNDS}",
    "local.steps=1",
    "server.keep_checkpoints=100",
]
"""Three of six sites in turn: each in three of six rounds, two rounds apart."""
NOTHING = "local.learning_rate=1e-30"
"""Training that teaches nothing: all updates are zero, and what is released is the noise."""
PATTERN = Participation(ROUNDS, 2, 3)
NUMBERS = itertools.count()
WRONG = 1e-9
"""Probability with which an honest run fails a test of its noise."""


class Run:
    """A run's folder with its sites; `go` is what one process of the coordinator does."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.federation = Federation(folder, plan)
        self.plan = self.federation.plan
        self.out = folder / "run"
        RunFolder.create(self.out, self.plan).close()
        terms = terms_of(self.plan, self.federation.layout.size)
        assert terms is not None
        self.terms = terms

    def go(self) -> None:
        with RunFolder.reopen(self.out) as folder:
            roster = self.federation.roster
            run(folder, self.federation.channel, lambda _: None, roster=roster, clock=lambda: 0.0)

    def charges(self) -> list[Entry]:
        return list(Ledger(self.out / "ledger.sqlite", "coordinator", composed).entries())

    def trained(self) -> int:
        return sum(step == "update" for step, _ in self.federation.channel.asked)


def models(out: Path, plan: Plan, layout: Any) -> np.ndarray:
    """The global model after each round, shape (rounds + 1, d)."""
    kept = Checkpoints(out / "checkpoints", layout, 100)
    return np.stack([kept.load(number).weights.astype(np.float64) for number in range(plan.run.rounds + 1)])


def white(released: np.ndarray, plan: Plan) -> None:
    """Check that the steps of models are C^-1 Z, with the noise that a noise multiplier of `Z` needs.

    C and its sensitivity are computed here from the matrix's parameters; a site's rounds are columns 0, 2 and 4.
    """
    blt = optimal(PATTERN, 6)
    powers = [
        sum(w * t ** (u - 1) for w, t in zip(blt.scale, blt.decay, strict=True)) for u in range(1, ROUNDS)
    ]
    c = np.tril(toeplitz([1.0, *powers]))
    sens = np.linalg.norm(c[:, [0, 2, 4]].sum(axis=1))
    assert blt.decay, "the rounds are correlated"
    z = c @ np.diff(released, axis=0) * plan.cohort.size() / (plan.privacy.clip * Z * sens)
    for row in (z.ravel(), *z):
        tail = stats.chi2.sf(row @ row, row.size)
        assert WRONG / 2 < tail < 1 - WRONG / 2, f"variance {row @ row / row.size}"
    limit = stats.norm.isf(WRONG / 2) / math.sqrt(z.shape[1])
    for later in range(1, ROUNDS):
        for earlier in range(later):
            assert abs(np.corrcoef(z[later], z[earlier])[0, 1]) < limit, (
                f"rounds {earlier + 1} and {later + 1}"
            )


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Run]:
    def begin_(*changes: str) -> Run:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        # A name of its own, because the terms of a plan are computed once in a process.
        return Run(folder, tiny(*CORRELATED, *changes, f"run.name=run-{next(NUMBERS)}"))

    return begin_


Begin = Callable[..., Run]


# The noise that is applied.


def test_the_noise_of_a_run_is_the_noise_that_is_charged(begin: Begin) -> None:
    case = begin(NOTHING)
    case.go()
    white(models(case.out, case.plan, case.federation.layout), case.plan)
    (event,) = case.terms.round_events
    assert event == CorrelatedGaussian(Z, ROUNDS, 2, 3)


HALF = 0.5


def half_sigma(patch: pytest.MonkeyPatch) -> None:
    right = CorrelatedNoise.add
    patch.setattr(CorrelatedNoise, "add", lambda self, v, sigma, row: right(self, v, HALF * sigma, row))


def half_sensitivity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(site_noise, "sensitivity", lambda *of: HALF * sensitivity(*of))


def half_deviation(patch: pytest.MonkeyPatch) -> None:
    right = site_noise.central

    def planted(*arguments: Any, **options: Any) -> SiteMechanism:
        made = right(*arguments, **options)
        return dataclasses.replace(made, deviation=made.deviation * HALF)

    patch.setattr("cloister.privacy.accounting.terms.central", planted)


def half_of_what_is_decoded(patch: pytest.MonkeyPatch) -> None:
    right = SiteMechanism.decode
    patch.setattr(SiteMechanism, "decode", lambda self, m, n, c: (right(self, m, n, c)[0] * HALF, c))


def no_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CorrelatedNoise, "add", lambda *_: None)


def one_participation(patch: pytest.MonkeyPatch) -> None:
    def planted(blt: Blt, pattern: Participation) -> float:
        return sensitivity(blt, dataclasses.replace(pattern, most=1))

    patch.setattr(site_noise, "sensitivity", planted)


def other_matrix(patch: pytest.MonkeyPatch) -> None:
    """The noise of independent rounds, with the deviation of the correlated ones."""
    right = CorrelatedNoise.__init__
    patch.setattr(CorrelatedNoise, "__init__", lambda self, _blt, *rest: right(self, Blt(), *rest))


def one_row_for_all(patch: pytest.MonkeyPatch) -> None:
    right = CorrelatedNoise.row
    patch.setattr(CorrelatedNoise, "row", lambda self, _number: right(self, 1))


@pytest.mark.parametrize(
    "mutant",
    [
        half_sigma,
        half_sensitivity,
        half_deviation,
        half_of_what_is_decoded,
        no_noise,
        one_participation,
        other_matrix,
        one_row_for_all,
    ],
)
def test_less_noise_or_other_noise_is_seen(
    begin: Begin, mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    case = begin(NOTHING)
    case.go()
    released = models(case.out, case.plan, case.federation.layout)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match=r"variance|rounds \d and \d"):
        white(released, case.plan)


# What is charged.


def test_the_whole_run_is_charged_in_a_sites_first_round(begin: Begin) -> None:
    case = begin()
    case.go()
    names = case.federation.roster.names
    drawn = {number: draw_of(case.plan, TRAIN).cohort(names, number) for number in range(1, ROUNDS + 1)}
    charges = case.charges()
    assert [(e.charge.round, e.charge.dataset) for e in charges] == [(n, s) for n in drawn for s in drawn[n]]
    for entry in charges:
        expected = case.terms.round_events if entry.charge.round <= 2 else ()
        assert from_json(entry.charge.event) == expected
    for index in range(SITES):
        events = [from_json(entry.charge.event) for entry in case.federation.entries(index)]
        assert events == [case.terms.round_events, (), ()]
    report = gather(case.out)
    assert report.epsilon == case.terms.epsilon(1) == case.terms.epsilon(3)
    assert {row.epsilon for row in report.sites} == {report.epsilon}
    assert verdict(report).holds, verdict(report).sentence
    assert (
        sum("covered by the charge of the site's first round" in row.event for row in report.ledger.rows)
        == 12
    )
    assert "buffered linear Toeplitz" in report.mechanism


def test_a_run_is_charged_before_its_first_sum_is_opened(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = begin("run.rounds=2")
    seen: list[int] = []
    right = SiteMechanism.decode

    def decode(self: SiteMechanism, *what: Any) -> Any:
        seen.append(len(case.charges()))
        return right(self, *what)

    monkeypatch.setattr(SiteMechanism, "decode", decode)
    case.go()
    assert seen == [3, 6]


def test_a_ledger_that_forgets_the_first_charge_is_not_believed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that charges nothing in the first round either: its report claims nothing."""
    case = begin("run.rounds=2")
    with monkeypatch.context() as patch:
        patch.setattr(Terms, "events", lambda *_: ())
        case.go()
    report = gather(case.out)
    assert not report.ledger.verified
    assert "not the cost of the plan's rounds" in report.ledger.problem


def test_the_target_is_met_by_the_run_as_a_whole() -> None:
    plan = tiny(
        *[each for each in CORRELATED if "noise_multiplier" not in each], "privacy.target_epsilon=2.0"
    )
    terms = terms_of(plan, count_parameters(plan)[1])
    assert terms is not None
    assert 1.99 < terms.epsilon(1) == terms.epsilon(3) <= 2.0 == terms.budget
    independent = tiny(
        *[each for each in CORRELATED if "noise_multiplier" not in each],
        "privacy.target_epsilon=2.0",
        "privacy.correlated.buffers=0",
    )
    same = terms_of(independent, count_parameters(plan)[1])
    assert same is not None
    assert same.noise_multiplier == terms.noise_multiplier
    assert same.mechanism is not None
    assert same.mechanism.deviation == pytest.approx(same.noise_multiplier * math.sqrt(3), rel=1e-4)


# What a site refuses.


@pytest.mark.usefixtures("before_masks")
def test_a_site_takes_part_only_as_often_and_as_far_apart_as_was_paid_for(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = begin().federation
    inbox = Inbox(bytes(32), (), (), ())
    site = federation.joined()

    def asked(number: int) -> None:
        site.contribute(federation.request(inbox=inbox, number=number))

    asked(1)
    with raises(PolicyError, "round", says=("round 3", "site-000 was in round 1")):
        asked(2)
    asked(3)
    asked(3)  # a retry
    with raises(PolicyError, "round", says="round 5"):
        asked(4)
    with pytest.raises(StaleError):
        asked(1)
    asked(5)
    assert [entry.charge.round for entry in federation.entries()] == [1, 3, 5]
    # Without the guard the site would be in rounds that the noise does not cover.
    with monkeypatch.context() as patch:
        patch.setattr(SiteSpending, "_check_pattern", lambda *_: None)
        asked(6)
    assert [entry.charge.round for entry in federation.entries()] == [1, 3, 5, 6]


@pytest.mark.usefixtures("before_masks")
def test_a_site_counts_its_rounds(begin: Begin) -> None:
    federation = begin(
        "run.rounds=4", "privacy.correlated.participations=2", "privacy.correlated.separation=1"
    ).federation
    site = federation.joined()
    inbox = Inbox(bytes(32), (), (), ())
    for number in (1, 2):
        site.contribute(federation.request(inbox=inbox, number=number))
    with raises(PolicyError, "round", says="no more rounds"):
        site.contribute(federation.request(inbox=inbox, number=3))


@pytest.mark.usefixtures("before_masks")
def test_an_update_that_a_crash_lost_is_trained_again_at_no_charge(begin: Begin) -> None:
    federation = begin().federation
    site = federation.joined()
    request = federation.request(inbox=Inbox(bytes(32), (), (), ()), number=1)
    site.contribute(request)
    for file in site.config.folder.glob("runs/*/update-*"):
        file.unlink()
    site.contribute(request)
    events = [from_json(entry.charge.event) for entry in federation.entries()]
    assert [len(each) for each in events] == [1, 0]


def test_cohorts_are_taken_in_turn() -> None:
    plan = tiny(*CORRELATED, "cohort.sites=12", "cohort.fraction=0.25", "privacy.correlated.separation=4")
    names = [f"site-{number:03d}" for number in range(12)]
    draw = draw_of(plan, TRAIN)
    cohorts = [draw.cohort(names, number) for number in range(1, 13)]
    for first in range(9):
        turn = [site for cohort in cohorts[first : first + 4] for site in cohort]
        assert sorted(turn) == names  # each site once in any four rounds that follow each other
    assert cohorts[:4] == cohorts[4:8] == cohorts[8:]
    assert cohorts == [draw.cohort(names[::-1], number) for number in range(1, 13)]
    for other in (dataclasses.replace(draw, seed=1), dataclasses.replace(draw, purpose="evaluate")):
        assert [other.cohort(names, number) for number in range(1, 5)] != cohorts[:4]
    renamed = [*names[:-1], "another"]
    assert {frozenset(draw.cohort(renamed, number)) - {"another"} for number in range(1, 5)} != {
        frozenset(cohort) - {names[-1]} for cohort in cohorts[:4]
    }


# A crash.


class CrashError(Exception):
    """The process ends here."""


def crash(*_: object, **__: object) -> None:
    raise CrashError


def test_a_sum_that_is_opened_again_gets_the_same_noise(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crash is after the second round's mean has its noise, before anything of it is on disk."""
    case = begin(NOTHING)
    seen: list[Vector] = []
    right = ServerOptimizer.step

    def step(self: ServerOptimizer, weights: Vector, mean: Vector, rounds: Sequence[int]) -> None:
        seen.append(mean.copy())
        if len(seen) == 2:
            raise CrashError
        right(self, weights, mean, rounds)

    monkeypatch.setattr(ServerOptimizer, "step", step)
    with pytest.raises(CrashError):
        case.go()
    assert not (case.out / "checkpoints" / "round-00002.safetensors").exists()
    case.go()
    assert np.array_equal(seen[1], seen[2])
    assert not np.array_equal(seen[0], seen[1])
    white(models(case.out, case.plan, case.federation.layout), case.plan)
    # The test sees noise that is drawn anew.
    other = begin(NOTHING)
    seen.clear()
    with pytest.raises(CrashError):
        other.go()
    monkeypatch.setattr(run_module, "kept_noise", lambda _path, _journal, blt, fresh, _done: (blt, fresh()))
    other.go()
    assert not np.array_equal(seen[1], seen[2])
    with pytest.raises(AssertionError):
        white(models(other.out, other.plan, other.federation.layout), other.plan)


def test_a_round_whose_checkpoint_is_in_place_is_not_repeated(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may have been read; with a site less, the same noise would be on two different sums."""
    right = Journal.record

    def record(self: Journal, number: int, attempt: int, step: str, *rest: Any) -> None:
        if (number, step) == (2, steps.DONE):
            raise CrashError
        right(self, number, attempt, step, *rest)

    for repeats in (False, True):
        case = begin("run.rounds=2")
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "record", record)
            with pytest.raises(CrashError):
                case.go()
        model = case.out / "checkpoints" / "round-00002.safetensors"
        before, trained = model.read_bytes(), case.trained()
        shutil.rmtree(case.out / "attempt")  # from which the same sum would be opened again
        with monkeypatch.context() as patch:
            if repeats:  # without the guard
                patch.setattr(run_module, "_adopt", lambda journal, _checkpoints: journal.newest(steps.DONE))
            case.go()
        assert (case.trained() > trained) == repeats
        assert (model.read_bytes() == before) or repeats
        rows = [json.loads(line) for line in (case.out / "metrics.jsonl").read_text().splitlines()]
        assert [(row["round"], row.get("sites")) for row in rows] == [(0, None), (1, 3), (2, 3)]


@pytest.mark.parametrize("loss_of", ["missing", "damaged", "another"])
def test_a_run_whose_noise_is_lost_ends(begin: Begin, loss_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = begin()
    with monkeypatch.context() as patch:
        patch.setattr(ServerOptimizer, "step", crash)
        with pytest.raises(CrashError):
            case.go()
    file = case.out / "noise.json"
    whole = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    assert (case.out / "attempt").stat().st_mode & 0o777 == 0o700
    if loss_of == "missing":
        file.unlink()
    elif loss_of == "damaged":
        file.write_bytes(whole[:-5])
    else:
        other = begin()
        with monkeypatch.context() as patch:
            patch.setattr(ServerOptimizer, "step", crash)
            with pytest.raises(CrashError):
                other.go()
        file.write_bytes((other.out / "noise.json").read_bytes())
    trained, charged = case.trained(), len(case.charges())
    for _ in range(2):
        with raises(RunFolderError, "noise.json", says="missing or damaged"):
            case.go()
    assert (case.trained(), len(case.charges())) == (trained, charged)
    file.write_bytes(whole)
    case.go()
    assert not file.exists()  # a finished run needs it no more


def test_a_run_that_lost_what_its_journal_says_of_its_noise_ends(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = begin()
    right = Journal.record

    def record(self: Journal, number: int, attempt: int, step: str, *rest: Any) -> None:
        if step != steps.NOISE:
            right(self, number, attempt, step, *rest)
        if (number, step) == (1, steps.DONE):
            raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(CrashError):
            case.go()
    with raises(RunFolderError, "noise.json"):
        case.go()


def test_a_run_that_dies_before_its_noise_is_journaled_begins_with_other_noise(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was asked of a site: the key that is left on the disk was never used."""
    case = begin(NOTHING)
    right = Journal.record

    def record(self: Journal, number: int, attempt: int, step: str, *rest: Any) -> None:
        if step == steps.NOISE:
            raise CrashError
        right(self, number, attempt, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", record)
        with pytest.raises(CrashError):
            case.go()
    assert case.trained() == 0
    assert (case.out / "noise.json").exists()
    case.go()
    white(models(case.out, case.plan, case.federation.layout), case.plan)


def test_a_run_keeps_the_matrix_that_it_began_with(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may compute decays that differ; rounds under two matrices would not be one mechanism."""
    case = begin(NOTHING)
    with monkeypatch.context() as patch:
        patch.setattr(ServerOptimizer, "step", crash)
        with pytest.raises(CrashError):
            case.go()
    began = optimal(PATTERN, 6)
    used: list[Blt] = []
    right = CorrelatedNoise.__init__

    def init(self: CorrelatedNoise, blt: Blt, *rest: Any) -> None:
        used.append(blt)
        right(self, blt, *rest)

    with monkeypatch.context() as patch:
        patch.setattr("cloister.privacy.accounting.terms.optimal", lambda *_: Blt((0.9,), (0.1,)))
        privacy_terms._terms.cache_clear()  # as in a new process
        patch.setattr(CorrelatedNoise, "__init__", init)
        case.go()
    assert used == [began]
    white(models(case.out, case.plan, case.federation.layout), case.plan)


def killed_at(plan: str, out: Path, moment: str) -> None:
    """Begin a run and die in round 3."""
    record, save = Journal.record, Checkpoints.save

    def record_and_die(journal: Journal, number: int, attempt: int, step: str, *rest: Any) -> None:
        record(journal, number, attempt, step, *rest)
        if moment == "shares asked for" and (number, step) == (3, f"train {steps.UNMASKING}"):
            die()

    def save_and_die(self: Checkpoints, number: int, *rest: Any, **named: Any) -> str:
        digest = save(self, number, *rest, **named)
        if moment == "checkpoint in place" and number == 3:
            die()
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "record", record_and_die)
        patch.setattr(Checkpoints, "save", save_and_die)
        simulate(RunFolder.create(out, plan_from_json(plan)), lambda _: None, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["shares asked for", "checkpoint in place"])
def test_a_killed_run_goes_on_with_the_same_noise(moment: str, tmp_path: Path) -> None:
    source = write_records(tmp_path / "records.jsonl")
    plan = tiny(*CORRELATED, NOTHING, f"simulation.source={source}")
    out = tmp_path / "run"
    kill_while(killed_at, plan.to_json(), out, moment)
    kept = out / "checkpoints" / "round-00003.safetensors"
    before = kept.read_bytes() if moment == "checkpoint in place" else None
    with RunFolder.reopen(out) as folder:
        simulate(folder, lambda _: None, workers=1)
        secrets = folder.noise, folder.attempt / "sum", folder.spool / "upload"
        assert not any(secret.parent.exists() for secret in secrets[1:])
        assert not folder.noise.exists()
        for secret in secrets:
            secret.parent.mkdir(exist_ok=True)
            secret.write_bytes(b"a crash came between the journal and the removal")
        simulate(folder, lambda _: None, workers=1)
        assert not any(secret.exists() for secret in secrets)
    assert before in (None, kept.read_bytes())
    white(models(out, plan, load_model(plan).layout), plan)


# The plan, and what is said of it.


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (
            "privacy.trusted_coordinator=false",
            "privacy.correlated",
            "privacy.trusted_coordinator = true",
        ),
        ("aggregation.secure=false", "privacy.correlated", "aggregation.secure = true"),
        ("privacy.adaptive.count_noise=4.0", "privacy.adaptive", "the same clipping norm"),
        ("cohort.sites=7", "cohort.fraction", ("cohorts of 4", "3 sites")),
        ("cohort.fraction=1.0", "cohort.fraction", "gains nothing"),
        ("privacy.correlated.separation=3", "privacy.correlated.separation", "at most 2"),
        ("privacy.correlated.participations=2", "privacy.correlated.participations", "at least 3"),
        ("run.rounds=7", "privacy.correlated.participations", "4 times in 7 rounds"),
        ("privacy.correlated.buffers=11", "privacy.correlated.buffers", "10"),
    ],
)
def test_a_plan_that_breaks_the_pattern_or_the_cancellation_is_refused(
    change: str, field: str, says: str | tuple[str, ...]
) -> None:
    tiny(*CORRELATED)
    with raises(PlanError, field, says=says):
        tiny(*CORRELATED, change)


def test_correlated_noise_is_of_no_other_unit() -> None:
    section = ["privacy.correlated.separation=2", "privacy.correlated.participations=3"]
    with raises(PlanError, "privacy.correlated", says='only valid with privacy.unit = "site"') as refused:
        tiny(*RECORD, "aggregation.secure=true", *section)
    assert refused.value.field == "privacy.correlated"
    with raises(PlanError, "privacy.correlated", says="privacy.unit") as refused:
        tiny(*section)
    assert refused.value.field == "privacy.correlated"
    many = [*CORRELATED, "run.rounds=10001", "privacy.correlated.participations=6000"]
    with raises(PlanError, "run.rounds", says="10000") as refused:
        tiny(*many)
    assert refused.value.field == "run.rounds"


def test_the_words_follow_the_plan() -> None:
    plan = tiny(*CORRELATED)
    terms = terms_of(plan, 1000)
    assert terms is not None
    said = claims.mechanism(plan, terms)
    assert "at most 3 of 6 rounds, any two of them at least 2 apart" in said
    assert f"{loss(optimal(PATTERN, 6), PATTERN):.4g} C times the noise multiplier" in said
    assert f"it would be {math.sqrt(18):.4g} C" in said
    assumed = " ".join(claims.assumptions(plan, terms, simulated=False))
    assert "used the noise of each round for one sum only" in assumed
    assert "charged in full in a site's first round" in assumed
    assert "It is that of the whole run, which is charged at once." in assumed
    assert "a public partition of the roster" in assumed
    assert any("The coordinator, fully" in party for party in claims.PROSE.said("trusted", plan, False))


def test_the_figures_of_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tiny(*CORRELATED)
    terms = terms_of(plan, count_parameters(plan)[1])
    assert terms is not None
    settings = set_options(CORRELATED)
    (tmp_path / "plan.toml").write_text(TINY)
    budget = (
        "budget",
        str(tmp_path / "plan.toml"),
        *settings,
        "--noise-multiplier",
        f"{terms.noise_multiplier}",
    )
    assert found(capsys, *budget)["epsilon"] == terms.epsilon(ROUNDS)
    checked = found(capsys, "plan", "check", str(tmp_path / "plan.toml"), *settings)
    assert checked["epsilon"] == terms.epsilon(ROUNDS)
    status, out, _ = ran(capsys, "plan", "check", str(tmp_path / "plan.toml"), *settings)
    assert status == 0
    assert "independent: 4.24" in " ".join(out.split())


@pytest.mark.slow
def test_the_audit_plays_all_rounds_of_it(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    case = begin(NOTHING)
    case.go()
    # As `simulate` lays a run out.
    (case.out / "sites").symlink_to(case.federation.sites_folder)
    with RunFolder.reopen(case.out) as folder:
        honest = audit(folder)
        assert not honest.alarm
        assert "6 rounds of a run with 6 updates of honest sites" in honest.what
        assert honest.claimed == honest.claimed_run == case.terms.epsilon(ROUNDS)
        for mutant in (half_sigma, other_matrix):
            with monkeypatch.context() as patch:
                mutant(patch)
                assert "noise" in audit(folder).row.problem
            folder.audit.unlink()


# Moments that sites keep from their cohort's last round.

KEPT = [
    *(setting for setting in CORRELATED if not setting.startswith("server.keep")),
    "local.optimizer_state=keep",
    "local.steps=3",
    "simulation.noise_seed=7",
    "cohort.sites=8",
    "cohort.quorum=0.75",
]


def test_moments_are_kept_from_a_cohorts_round_to_its_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cohorts take turns: each update of a later turn begins with what the site's own last update has left."""
    begins: dict[tuple[str, int], int | None] = {}
    right = Carried.make

    def make(
        carried: Carried, told: Instructions, history: bytes, made: Callable[[Carry], Any], **how: Any
    ) -> Any:
        def seen(carry: Carry) -> Any:
            site = carry.after.parts[carry.after.parts.index("sites") + 1]
            begins[site, told.sum.round] = int(carry.before.name) if carry.before else None
            assert carry.before is None or (carry.before / "moments").stat().st_size
            return made(carry)

        return right(carried, told, history, seen, **how)

    monkeypatch.setattr(Carried, "make", make)
    party = Masked(tmp_path, *KEPT)
    last = party.stop_at(
        lambda event: isinstance(event, RoundDone) and event.round == 2,
        lambda event: isinstance(event, SiteAnswered) and event.round == 4,
    )
    assert len(last.of(RoundDone)) == 3
    cohorts = [draw_of(party.plan, TRAIN).cohort(party.folders, number) for number in range(1, 7)]
    assert begins == {
        (site, number): number - 2 if number > 2 else None
        for number, cohort in enumerate(cohorts, start=1)
        for site in cohort
    }


@pytest.mark.slow
def test_kept_moments_change_the_model_from_the_second_turn_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that users run; the noise is declared, so that runs can be compared."""
    plan = tmp_path / "plan.toml"
    plan.write_text(TINY)
    source = f"simulation.source={write_records(tmp_path / 'records.jsonl')}"
    weights: list[list[str]] = []
    for state in ("keep", "reset", "keep"):
        options = set_options([*KEPT, "server.keep_checkpoints=9", f"local.optimizer_state={state}", source])
        out = tmp_path / str(len(weights))
        found(capsys, "simulate", str(plan), *options, "--workers", "1", "--out", str(out))
        weights.append([row["params_sha256"] for row in RunFiles(out).metrics()])
    kept, reset, again = weights
    assert kept == again
    assert [one == other for one, other in zip(kept, reset, strict=True)] == [True] * 3 + [False] * 4


def test_a_site_that_is_not_in_a_sum_makes_the_next_round_of_its_own_cohort_fresh(tmp_path: Path) -> None:
    party = Masked(tmp_path, *KEPT)
    lost = draw_of(party.plan, TRAIN).cohort(party.folders, 1)[0]
    party.channel.down = lambda site, step, request: (
        site == lost and step == "update" and isinstance(request, Contribute) and request.sum.round == 1
    )
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [3, 4, 4, 4, 4, 4]
    assert party.states() == ["fresh"] * 3 + ["carried"] * 3


def test_a_coordinator_that_calls_no_round_fresh_gets_no_sum_over_two_histories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that was absent from its cohort's first round carries nothing into the next one, and is not in it."""
    Mutant("server.sum.sum:_fresh", 'bool(done.detail.get("behind", True))', "False").plant(monkeypatch)
    party = Masked(tmp_path, *KEPT)
    absent = draw_of(party.plan, TRAIN).cohort(party.folders, 1)[0]
    party.channel.down = lambda site, step, request: (
        site == absent and step != "join" and isinstance(request, Agree) and request.sum.round == 1
    )
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [3, 4, 3, 4, 3, 4]
