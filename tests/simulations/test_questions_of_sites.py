"""Questions with unit `site`: each site counts once, by the mean over its records, and is protected as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cloister
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.ledger import read_history
from cloister.privacy.mechanism.events import Skellam, from_json
from cloister.server.record.folder import RunFiles
from cloister.tests.parties.federation import MODEL
from cloister.tests.tools.command import done, found, lone_refusal, set_options

SITE: dict[str, Any] = {"unit": "site", "noise_multiplier": 0.05, "delta": 1e-3}
"""Little noise, to see what it is added to."""
PLAN = """[privacy]
unit = "site"
noise_multiplier = 2.0
delta = 1e-3
[cohort]
sites = 4
[aggregation]
colluders = 0.0
[simulation]
source = "{}"
field = "ward"
durable = false
"""
TRAINING = f"""[run]
rounds = 2
{MODEL}[data]
sequence_length = 16
[local]
steps = 1
batch_size = 2
[server]
evaluation = "none"
"""
ASKS = '[question]\nkind = "mean"\nfield = "age"\nrange = [0, 100]\n'


def asked(tmp_path: Path, question: dict[str, Any], sites: dict[str, Any]) -> cloister.Run:
    """A run that has asked these sites."""
    given: dict[str, Any] = {"question": question, "privacy": SITE, "simulation": {"durable": False}}
    return cloister.ask(cloister.Plan(**given), sites=sites, out=tmp_path / "run", workers=1, quiet=True)


def test_each_site_counts_once_however_many_records_it_has(tmp_path: Path) -> None:
    sites = {
        "large": [{"ward": "a"}] * 300 + [{"ward": "b"}] * 100,
        "small": [{"ward": "b"}],
        "other": [{"ward": "c"}] * 2,
    }
    run = asked(tmp_path, {"kind": "histogram", "field": "ward", "values": ["a", "b"]}, sites)
    for name, total in (("a", 0.75), ("b", 1.25), ("other", 1.0)):
        assert run.answer.cells[name] == pytest.approx(total, abs=5 * run.answer.deviation)
    files = RunFiles(tmp_path / "run")
    ledgers = [files.ledger, *files.sites.ledgers().values()]
    terms = terms_of(run.plan, 1)
    assert terms is not None
    for path in ledgers:
        for entry in read_history(path).entries:
            (event,) = from_json(entry.charge.event)
            assert isinstance(event, Skellam)
            assert (event.unit, event.asked) == ("site", True)
            assert (event,) == terms.round_events
    assert [len(read_history(path).entries) for path in ledgers] == [3, 1, 1, 1]


def test_the_words_of_most_records_of_a_site_count(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    sites = {
        name: [{"text": f"fever {first}{second}{name} pain"} for first in letters for second in letters[:2]]
        for name in ("x", "y", "z")
    }
    question = {"kind": "vocabulary", "field": "text", "words": 2, "buckets": 16384}
    run = asked(tmp_path, question, sites)
    assert {figure.name for figure in run.answer.figures} == {" pain", "fever"}


def test_a_run_and_a_question_protect_the_same_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are composed in one ledger, which tells the share of the question."""
    data = tmp_path / "records.jsonl"
    records = [{"ward": f"w{n % 4}", "age": n % 90, "text": f"a text of some words {n}"} for n in range(80)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    ledger, plans = tmp_path / "over.sqlite", {}
    for name, begins in (("train", TRAINING), ("ask", ASKS)):
        plans[name] = tmp_path / f"{name}.toml"
        more = PLAN.format(data)
        if name == "train":
            more = more.replace("[aggregation]", '[aggregation]\nweighting = "uniform"')
        plans[name].write_text(begins + more)
    over = ["--ledger", str(ledger), "--dataset", "wards", "--workers", "1"]
    trained = found(capsys, "simulate", str(plans["train"]), *over, "--out", str(tmp_path / "run"))
    checked = found(capsys, "plan", "check", str(plans["ask"]))
    assert [*checked["expected_errors"]] == ["4"]  # sites are the units
    told = found(capsys, "ask", str(plans["ask"]), *over, "--out", str(tmp_path / "asked"))
    assert told["epsilon"] == pytest.approx(checked["epsilon"])
    assert max(trained["epsilon"], told["epsilon"]) < told["dataset"]["epsilon"]
    (dataset,) = found(capsys, "ledger", "show", str(ledger))["datasets"]
    assert dataset["asked"]["questions"]["epsilon"] == pytest.approx(told["epsilon"], rel=0.05)
    assert dataset["asked"]["rest"]["epsilon"] == pytest.approx(trained["epsilon"], rel=0.05)
    report = " ".join(done(capsys, "report", str(tmp_path / "asked")).split())
    assert "This run protects everything that one site holds: the answer" in report
    # A question about records protects another unit.
    other = set_options(["privacy.unit=record", "privacy.delta=1e-6"])
    line = lone_refusal(capsys, "ask", str(plans["ask"]), *over, *other, "--out", str(tmp_path / "other"))
    assert "epsilons of different units do not add up" in line


@pytest.mark.parametrize("field", ["privacy.clip=2.0", "question.most_units=5", "aggregation.secure=false"])
def test_what_has_no_effect_or_no_cover_is_refused(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(ASKS + PLAN.format(tmp_path / "none.jsonl"))
    assert field.partition("=")[0] in lone_refusal(capsys, "plan", "check", str(plan), "--set", field)
