"""Audits of questions: of honest code, which raise no alarm, and with a defect between plan and effect, which do."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cloister.cli.main import main
from cloister.lm.model.model import load_model, save_pretrained
from cloister.protocol.plan.soundness import Plan
from cloister.server.record.folder import RunFolder
from cloister.simulations.audit import questions
from cloister.simulations.federation import lay_out
from cloister.tests.parties.federation import MODEL
from cloister.tests.simulations.audit.audited import (
    NOISE,
    RECORDS,
    REPEATED,
    REPEATS,
    SPEED,
    TWICE,
    ran,
    repeat_halves,
)
from cloister.tests.test_packaging import ROOT, built
from cloister.tests.tools.mutants import UNCHARGED, Mutant

WARDS = (
    'kind = "histogram"\nfield = "ward"\nvalues = [' + ", ".join(f'"w{ward}"' for ward in range(24)) + "]\n"
)
AGES = 'kind = "histogram"\nfield = "age"\nedges = [0, 18, 65]\n'
LENGTHS = 'kind = "histogram"\nfield = "ward"\nmeasure = "characters"\nedges = [1, 3]\n'
MEAN = 'kind = "mean"\nfield = "age"\nrange = [0.0, 100.0]\n'
EVALUATE = 'kind = "evaluate"\nfigures = ["confusion", "loss"]\n'
COMPARE = 'kind = "compare"\nfigures = ["accuracy", "loss"]\nothers = ["OTHER"]\n'
WORDS = 'kind = "vocabulary"\nfield = "text"\nwords = 8\nbuckets = 4096\n'
AT_TWO_SITES = f"{WARDS}sites_of_owner = 2\n"
CLASSES = 'task = "classify"\nclasses = ["calm", "ill"]\nsequence_length = 16\nheld_out = 0.3\n'
FEW = ("--canaries", "8")
"""Answers of three sites."""
NUMBERS = itertools.count()
"""Of plans: terms are cached."""


def question(path: Path, asks: str, unit: str = "owner") -> Path:
    """A plan of a question to three sites of twenty patients each, as a file."""
    path.mkdir(parents=True, exist_ok=True)
    data = path / "patients.jsonl"
    records = [
        {"ward": f"w{bed % 30}", "age": bed, "patient": bed // 2, "text": f"bed {bed}", "label": "ill"}
        for bed in range(120)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    owner, evaluates = 'owner = "patient"\n' if unit == "owner" else "", asks in (EVALUATE, COMPARE)
    plan = path / "question.toml"
    if asks == COMPARE:
        model = load_model(Plan.parse(f"[run]\nseed = 3\n{MODEL}[data]\n{CLASSES}"))
        save_pretrained(model, model.layout.flatten(model.module), path / "other")
    plan.write_text(
        f'[run]\nname = "question-{next(NUMBERS)}"\n[question]\n'
        f"{asks.replace('OTHER', str(path / 'other'))}{MODEL if evaluates else ''}"
        f"[data]\n{owner}{CLASSES if evaluates else ''}"
        f'[privacy]\nunit = "{unit}"\nnoise_multiplier = 3.0\ndelta = 1e-6\n'
        f'[cohort]\nsites = 3\n[simulation]\nsource = "{data}"\npartition = "iid"\n'
    )
    return plan


def folder_of(plan_file: Path) -> Path:
    """The folder of the question, as far as an audit reads it."""
    plan, run = Plan.load(plan_file), plan_file.parent / "run"
    with RunFolder.create(run, plan) as folder:
        folder.sites.path.mkdir()
        lay_out(plan, folder.sites.path)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asks", "unit"),
    [
        (WARDS, "record"),
        (WARDS, "owner"),
        (AGES, "owner"),
        (LENGTHS, "record"),
        (MEAN, "record"),
        (MEAN, "owner"),
        (EVALUATE, "record"),
        (EVALUATE, "owner"),
        (COMPARE, "record"),
        (COMPARE, "owner"),
        (AGES, "site"),
        (MEAN, "site"),
        (EVALUATE, "site"),
        (COMPARE, "site"),
        (WORDS, "site"),
        (WORDS, "record"),
        (WORDS, "owner"),
        (AT_TWO_SITES, "owner"),
    ],
)
def test_an_audit_of_an_honest_question_raises_no_alarm(
    asks: str, unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(question(tmp_path, asks, unit))
    code, found, err = ran(capsys, run, *FEW)
    assert (code, err, found["alarm"]) == (0, "", False)
    assert 0 < found["claimed"] == found["claimed_run"]
    assert found["row"]["epsilon"] <= found["claimed"]
    checks = {check["what"]: check for check in found["checks"]}
    assert checks[CHANGE]["visible"] < 0.05, "a unit has moved the sum nearly as far as is charged"
    assert checks[NOISE.removesuffix(": ")]["visible"] < 0.6
    assert not list(run.glob("audit-*")), "the audit's own sites are removed"


def test_a_question_is_audited_before_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = question(tmp_path, MEAN)
    assert main(["audit", str(plan), "--canaries", "2"]) == 0
    out = capsys.readouterr().out
    assert "played    2 answers of 3 sites, with or without one owner of site-000" in out
    assert "would be found" in out
    assert "no alarm: the claim is not refuted, which does not prove it" in out
    assert {path.name for path in tmp_path.iterdir()} == {"patients.jsonl", "question.toml"}


def test_what_no_audit_of_a_question_plays_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = question(tmp_path, WARDS)
    assert main(["audit", str(plan), "--steps", "3"]) == 2
    assert "--steps" in capsys.readouterr().err
    plan.write_text("[run]\nrounds = 2\n")
    assert main(["audit", str(plan)]) == 2
    assert "question: expected a plan with a [question]" in capsys.readouterr().err


CHANGE, L1 = "what one unit changes in a sum, in steps", "the same, summed over the cells"
PAID = "answers without the plan's charge in "
AT_SITE, AT_COORDINATOR, OVER_RUNS = (
    f"{PAID}{ledger}" for ledger in ("a site's ledger", "the coordinator's ledger", "a ledger over runs")
)
MULTIPLIER = "noise multiplier of the plan"
FOLLOWS, TOLD = "answers that are not the noised sums", "other values that sites have told"

UNIT_SUM, ENCODE, STEPS = (
    f"privacy.mechanism.unit_sum:{name}" for name in ("unit_sum", "UnitSum.encode", "UnitSum.steps")
)
ANSWERED, ANSWER = "clients.training.ask:Asked.update", "task.code.answer(units)"
OWN, OVER = "clients.consent.spending:Spending._charge", "privacy.ledger.dataset:DatasetLedger"
DRAWN, STREAM = "clients.site:Site._charged", "self._simulated.noise(about.round)"
CUT = "np.where(within, rounded, np.trunc(scaled))"
TOUCHED = "len(part.at) <= self.shape.touched and ("
ENCODED = "self.asked.encode(units, self.noise, vector[: self.layout.size])"
CODE, SKELLAM = "aggregation.features.question:UnitCode.answer", 'noise.child("skellam")'
PAY, CHARGED = (
    "clients.consent.spending:Spending.pay",
    "self._charge(plan, run, round_number, events, purpose)",
)
REPLACE = '__import__("dataclasses").replace'
NO_NOISE = f"{REPLACE}(task.code, asked={REPLACE}(task.code.asked, variance=1e-6))"
SMALLER = f"({REPLACE}(events[0], l2=events[0].l2 / 2),)"
OWNERS = "lm.questions.question:by_unit"

HALF = Mutant(ENCODE, "self.variance)", "self.variance / 4)")
BY_RECORD = Mutant(OWNERS, 'plan.privacy.unit != "record"', "False")
UNPAID = Mutant(PAY, CHARGED, CHARGED.replace("events", "()"))
NOT_OVER_RUNS = Mutant(PAY, "if self._shared is not None:", "if False:")
ALL_WORDS = Mutant("lm.questions.vocabulary:_drawn", "len(words) <= most", "True")
UNOPENED = Mutant("server.sum.spending:Spending.before_opening", 'self.terms.unit == "site"', "False")
EACH_ROW = Mutant("lm.questions.evaluate:_units", "[0, len(sequences)]", "[*range(len(sequences) + 1)]")
EVERY_WORD = Mutant("lm.questions.vocabulary:_most_frequent", "question.words,", "len(counts),")
NOT_CUT = Mutant(STEPS, "norms > self.bound * (1 + _MARGIN)", "norms > np.inf")
NOT_BY_MOST = Mutant("lm.questions.evaluate:_with", "_cut(loss, most, least) / most", "1e3 * loss")
FIRST = [(HALF, NOISE), (BY_RECORD, CHANGE), (UNPAID, AT_SITE), (NOT_OVER_RUNS, OVER_RUNS)]
LESS_NOISE = [
    (Mutant(UNIT_SUM, "whole / honest,", "whole / honest / 2,"), NOISE),
    (Mutant(UNIT_SUM, "Skellam(whole,", "Skellam(4 * whole,"), NOISE),
    (Mutant("privacy.accounting.terms:_asked", "plan.honest()", "plan.cohort.size()"), NOISE),
    (Mutant("privacy.accounting.terms:_asked", "unit_sum(noise,", "unit_sum(noise / 2,"), MULTIPLIER),
    (
        Mutant(
            "protocol.plan.plan:Plan._honest", "self.quorum(n) - found.colluders", "2 * self.cohort.size()"
        ),
        NOISE,
    ),
    (
        Mutant(ANSWERED, ANSWER, f"({NO_NOISE} if '/site-001/' in str(path) else task.code).answer(units)"),
        NOISE,
    ),
    (Mutant(ENCODE, f"{SKELLAM}.skellam", "type(noise).from_declared_seed(1).skellam"), REPEATED),
    (Mutant(DRAWN, STREAM, "NoiseStream.from_declared_seed(about.round)"), REPEATED),
]
"""Half of the noise, or of its variance, on the way to a vector; noise that counts on all sites, and none at one; the
same at all sites, and in all answers."""
OTHER_UNITS = [
    (Mutant(OWNERS, "total / count", "total / count * (-1) ** len(owned)"), CHANGE),
    (Mutant(OWNERS, "in owned.values()", "in [*owned.values()][:9]"), CHANGE),
    (NOT_CUT, CHANGE),
    (Mutant(STEPS, "* self.bound, scaled)", "* self.bound * 1.01, scaled)"), CHANGE),
    (Mutant(STEPS, CUT, f"({CUT} + (scaled > 0))"), CHANGE),
    (Mutant(ENCODE, "total +=", "total += 2 *"), CHANGE),
]
"""An owner that changes the vectors of others, or takes the place of one; vectors that are not cut, too long or rounded
up beyond the bound, or counted twice."""
LEAKS = [
    (Mutant(CODE, ENCODED, f"units = list(units); {ENCODED}; vector[0] += sum(map(len, units))"), CHANGE),
    (Mutant(ANSWERED, ANSWER, f"(made := {ANSWER}, made.__setitem__(0, made[0] + 1))[0]"), FOLLOWS),
    (Mutant("clients.consent.admission:Admission.joined", SPEED, SPEED.replace("1.0", RECORDS)), TOLD),
]
"""Something leaves beside the noised sum: the number of units, a number, and that of the records."""
CHARGES = [
    (UNCHARGED, AT_SITE),
    (Mutant(PAY, CHARGED, CHARGED.replace("events", SMALLER)), AT_SITE),
    (Mutant(f"{OVER}._charge", "to_json(events)", f"to_json({SMALLER})"), OVER_RUNS),
    (
        Mutant("server.sum.spending:Spending._charge", "for site in sites", "for site in list(sites)[1:]"),
        AT_COORDINATOR,
    ),
    (Mutant(PAY, CHARGED, CHARGED.replace("events", "(*events, *events)")), AT_SITE),
    (Mutant(OWN, "dataset=self._config.data_name", "dataset=run"), AT_SITE),
    (Mutant(OWN, "run=run,", 'run=f"other-{run}",'), AT_SITE),
    (Mutant(OWN, "release_id(run, purpose,", 'release_id(run, "evaluate",'), AT_SITE),
    (Mutant(OWN, "delta=plan.privacy.delta", "delta=plan.privacy.delta * 1e5"), AT_SITE),
    (Mutant(f"{OVER}._charge", "delta=self._plan.privacy.delta", "delta=0.5"), OVER_RUNS),
    (Mutant(UNIT_SUM, "shape.copies * l2, l1", "shape.copies * l2 / 2, l1"), CHANGE),
    (Mutant(UNIT_SUM, "rounded_l1(l2, shape.touched)", "rounded_l1(l2, shape.touched) / 2"), L1),
]
"""No charge, one for a smaller change than is made, or one that is not composed with the others, in each ledger."""


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        *FIRST,
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (*LESS_NOISE, *OTHER_UNITS, *LEAKS, *CHARGES)
        ),
    ],
    ids=str,
)
def test_an_answer_that_is_not_what_is_charged_raises_an_alarm(
    mutant: Mutant,
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = folder_of(question(tmp_path, WARDS))
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, *FEW)
    assert (code, result["alarm"]) == (3, True)
    assert found in result["row"]["problem"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asks", "unit", "mutants", "found"),
    [
        (MEAN, "owner", [NOT_CUT, Mutant(OWNERS, "total / count", "total")], CHANGE),
        (MEAN, "owner", [BY_RECORD], CHANGE),
        (EVALUATE, "owner", [Mutant("lm.data.prepare:_split_units", "if rule.owner:", "if False:")], CHANGE),
        (EVALUATE, "owner", [HALF], NOISE),
        (COMPARE, "owner", [HALF], NOISE),
        (COMPARE, "owner", [NOT_CUT, NOT_BY_MOST], CHANGE),
        (WORDS, "owner", [ALL_WORDS, Mutant(ENCODE, TOUCHED, "(")], L1),
        (AT_TWO_SITES, "owner", [Mutant(UNIT_SUM, "shape.copies * l2, l1", "l2, l1")], CHANGE),
        (AGES, "site", [HALF], NOISE),
        (AGES, "site", [BY_RECORD], CHANGE),
        (AGES, "site", [UNPAID], AT_SITE),
        (AGES, "site", [UNOPENED], AT_COORDINATOR),
        (EVALUATE, "site", [EACH_ROW], CHANGE),
        (WORDS, "site", [EVERY_WORD, Mutant(ENCODE, TOUCHED, "(")], L1),
    ],
    ids=str,
)
def test_other_kinds_and_units_are_audited(
    asks: str,
    unit: str,
    mutants: list[Mutant],
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = folder_of(question(tmp_path, asks, unit))
    for mutant in mutants:
        mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, "--canaries", "4" if asks == WORDS else "30")
    assert (code, result["alarm"]) == (3, True)
    assert found in result["row"]["problem"]


@pytest.mark.slow
def test_rows_that_count_as_units_are_seen_where_a_site_holds_out_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records are repeated."""
    plan = question(tmp_path, EVALUATE, "site")
    plan.write_text(plan.read_text().replace("held_out = 0.3", "held_out = 0.02"))
    run = folder_of(plan)
    EACH_ROW.plant(monkeypatch)
    code, result, _ = ran(capsys, run, *FEW)
    assert (code, result["alarm"]) == (3, True)
    assert CHANGE in result["row"]["problem"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [
        Mutant(OWNERS, "total / count", "total"),
        Mutant("protocol.questions.histogram:Histogram.bound", "return 1.0", "return 0.5"),
    ],
    ids=str,
)
def test_a_longer_vector_that_is_cut_raises_no_alarm(
    mutant: Mutant, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is wrong, and each unit is protected as is charged."""
    run = folder_of(question(tmp_path, WARDS))
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, *FEW)
    assert (code, result["alarm"]) == (0, False)


@pytest.mark.slow
@pytest.mark.parametrize("how", [how for how in REPEATS if how != "permuted"])
def test_noise_that_repeats_inside_an_answer_raises_an_alarm(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of each site's noise is the first half again."""
    run = folder_of(question(tmp_path, WARDS))
    repeat_halves(monkeypatch, how)
    code, result, _ = ran(capsys, run, *FEW)
    assert code == 3
    assert TWICE in result["row"]["problem"]
    assert NOISE not in result["row"]["problem"]


@pytest.mark.slow
def test_the_noise_of_every_site_is_seen_where_an_answer_shows_that_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With very many cells the sites take turns; that of the first site alone would hide the others."""
    monkeypatch.setattr(questions, "_MOST_SEEN", 1)
    run = folder_of(question(tmp_path / "honest", WARDS))
    code, result, _ = ran(capsys, run, "--canaries", "30")
    assert (code, result["alarm"]) == (0, False)
    run = folder_of(question(tmp_path / "silent", WARDS))
    silent = f"({NO_NOISE} if '/site-001/' in str(path) else task.code).answer(units)"
    Mutant(ANSWERED, ANSWER, silent).plant(monkeypatch)
    code, result, _ = ran(capsys, run, "--canaries", "30")
    assert (code, result["alarm"]) == (3, True)
    assert NOISE in result["row"]["problem"]


@pytest.mark.slow
def test_a_defect_in_the_built_wheel_raises_an_alarm(tmp_path: Path) -> None:
    """As a site would install it: the source with a defect is built, and the audit is run from the wheel alone."""
    ignored = shutil.ignore_patterns(".[!s]*", "build", "*.egg-info", "__pycache__", "runs", "tests", "docs")
    plan, code = (
        question(tmp_path / "asked", WARDS),
        "import sys, cloister.cli.main as it; print(it.__file__)",
    )
    for number, (mutant, told) in enumerate([(None, ""), *FIRST[:3]]):
        source, folder = tmp_path / f"source-{number}", tmp_path / f"installed-{number}"
        shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
        if mutant is not None:
            mutant.write(source)
        with zipfile.ZipFile(built(source, "wheel", tmp_path / f"wheel-{number}")) as wheel:
            wheel.extractall(folder)
        done = subprocess.run(
            [sys.executable, "-c", f"{code}; sys.exit(it.main({['audit', str(plan), *FEW]!r}))"],
            env=os.environ | {"PYTHONPATH": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout.startswith(str(folder)), done.stderr
        assert done.returncode == (0 if mutant is None else 3), done.stderr
        assert told in " ".join(done.stdout.split())
