"""Ledgers from the command line: what is printed, and what the exit code says."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cli.main import main
from cloister.cli.verbs.ledger import rounded_up
from cloister.privacy.accounting.accountant import over_runs, spent
from cloister.privacy.ledger.ledger import Charge, Ledger
from cloister.privacy.mechanism.events import Gaussian, SampledGaussian, Skellam, to_json
from cloister.tests.parties.federation import verified

STEPS = SampledGaussian(noise_multiplier=1.0, sampling_rate=0.01, steps=20)
ROUND = Gaussian(noise_multiplier=4.0, count=1)


def charge(number: int, **other: Any) -> Charge:
    fields: dict[str, Any] = {
        "id": f"run-a/{number}",
        "dataset": "ward",
        "run": "run-a",
        "round": number,
        "attempt": 1,
        "what": "update",
        "event": to_json([STEPS]),
        "delta": 1e-5,
    }
    return Charge(**fields | other)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Two runs on one dataset, and one on another."""
    made = Ledger(tmp_path / "ledger.sqlite", "site-1", lambda events, delta: 0.0, clock=lambda: 1.5)
    for number in (1, 2, 3):
        made.charge(charge(number), None)
    made.charge(charge(7, run="run-b", delta=1e-6), None)
    made.charge(charge(8, dataset="[lab]", event=to_json([ROUND])), None)
    return made


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["ledger", *arguments])
    return code, *capsys.readouterr()


def alter(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        guards = db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            db.execute(f"DROP TRIGGER {name}")
        db.execute(statement)
        for _, sql in guards:
            db.execute(sql)
        db.commit()


def test_verify_prints_entries_and_head(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    head = verified(ledger).head
    for where in (ledger.path, ledger.path.parent):  # the file, or the run folder
        code, out, err = ran(capsys, "verify", str(where))
        assert (code, err) == (0, "")
        assert out.splitlines()[:2] == ["entries 5", f"head {head}"]
        assert out.splitlines()[2].startswith("ok: ")
        code, out, err = ran(capsys, "verify", str(where), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == {"ledger": str(ledger.path), "entries": 5, "head": head, "ok": True}


def test_verify_against_a_noted_head(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    early, head = ledger.entries()[1].hash.hex(), verified(ledger).head
    for noted in (early, head, head.upper()):
        assert ran(capsys, "verify", str(ledger.path), "--head", noted)[0] == 0
    alter(ledger.path, "DELETE FROM entries WHERE number = 5")
    assert ran(capsys, "verify", str(ledger.path))[0] == 0  # a chain alone does not show it
    assert ran(capsys, "verify", str(ledger.path), "--head", early)[0] == 0
    code, out, err = ran(capsys, "verify", str(ledger.path), "--head", head)
    assert (code, out) == (1, "")
    assert f"the noted head {head}" in err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_verify_says_which_entry_does_not_hold(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    alter(ledger.path, "UPDATE entries SET event = '[]' WHERE number = 3")
    code, out, err = ran(capsys, "verify", str(ledger.path), *flags)
    assert code == 1
    assert err.startswith("cloister: ")
    assert err.count("\n") == 1
    assert "entry 3:" in err
    if flags:
        answer = json.loads(out)
        assert (answer["ok"], answer["problem"]) == (False, err.removeprefix("cloister: ").strip())
    else:
        assert out == ""


def test_a_file_that_is_no_ledger_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text("[run]\nrounds = 3\n" * 100)
    code, _, err = ran(capsys, "verify", str(tmp_path / "plan.toml"))
    assert code == 1
    assert "not a database" in err


def test_wrong_input_is_refused(ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for arguments in (
        ["verify", str(tmp_path / "none")],
        ["verify", str(tmp_path / "empty")],
        ["show", str(tmp_path / "empty")],
        ["verify", str(ledger.path), "--head", "abc"],
    ):
        code, out, err = ran(capsys, *arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "ledger.sqlite"]  # nothing was made


def test_show_composes_by_dataset_and_run(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "show", str(ledger.path), "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["entries"], found["head"]) == (5, verified(ledger).head)
    lab, ward = found["datasets"]
    assert (lab["dataset"], ward["dataset"]) == ("[lab]", "ward")
    assert lab["epsilon"] == spent([ROUND], 1e-5).epsilon
    # At the smallest delta that an entry of the dataset names.
    assert (ward["delta"], ward["accountant"]) == (1e-6, "pld")
    assert ward["epsilon"] == spent([STEPS] * 4, 1e-6).epsilon
    assert [(run["run"], run["entries"], run["rounds"]) for run in ward["runs"]] == [
        ("run-a", 3, [1, 2, 3]),
        ("run-b", 1, [7]),
    ]
    assert ward["runs"][0]["epsilon"] == spent([STEPS] * 3, 1e-6).epsilon < ward["epsilon"]


def test_show_prints_a_table(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    code, out, _ = ran(capsys, "show", str(ledger.path))
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    total = rounded_up(spent([STEPS] * 4, 1e-6).epsilon)
    assert ["ward", "run-a", "1 to 3", "3", rounded_up(spent([STEPS] * 3, 1e-6).epsilon), "1e-06"] in rows
    assert ["ward", "all runs together", "", "4", total, "1e-06"] in rows
    assert any(row[0] == "[lab]" for row in rows)  # as it is, not as markup
    assert verified(ledger).head in out
    assert "Ledger of site-1" in out


def test_runs_whose_mechanisms_differ_are_shown_at_twice_delta(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.charge(charge(9, run="run-c", event=to_json([ROUND])), None)
    _, ward = json.loads(ran(capsys, "show", str(ledger.path), "--json")[1])["datasets"]
    events = [*[to_json([STEPS])] * 4, to_json([ROUND])]
    assert (ward["epsilon"], ward["delta"]) == (over_runs(events, 1e-6).epsilon, 2e-6)
    assert ward["epsilon"] > spent([*[STEPS] * 4, ROUND], 1e-6).epsilon
    assert [run["delta"] for run in ward["runs"]] == [1e-6] * 3
    monkeypatch.setenv("COLUMNS", "110")
    shown = " ".join(ran(capsys, "show", str(ledger.path))[1].split())
    assert "mechanisms that differ are composed by Renyi divergences, and hold at twice delta" in shown


def test_a_dataset_with_questions_has_their_share_and_a_figure_against_all_others(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    lab, ward = json.loads(ran(capsys, "show", str(ledger.path), "--json")[1])["datasets"]
    assert "asked" not in {**lab, **ward}
    assert "all others" not in ran(capsys, "show", str(ledger.path))[1]
    question = Skellam(6e10, 1e4, 2e4, 1, unit="record", honest=6)
    ledger.charge(charge(9, run="run-c", event=to_json([question])), None)
    _, ward = json.loads(ran(capsys, "show", str(ledger.path), "--json")[1])["datasets"]
    runs, own = [to_json([STEPS])] * 4, to_json([replace(question, variance=1e10)])
    assert ward["epsilon"] == over_runs([*runs, to_json([question])], 1e-6).epsilon
    asked, figures = (
        ward["asked"],
        {"against_all": [*runs, own], "questions": [to_json([question])], "rest": runs},
    )
    assert asked["why_not"] == ""
    for name, events in figures.items():
        found = over_runs(events, 1e-6)
        assert (asked[name]["epsilon"], asked[name]["delta"]) == (found.epsilon, found.delta)
    shown = ran(capsys, "show", str(ledger.path))[1]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    for name, label in (
        ("against_all", "against all others together"),
        ("questions", "questions alone"),
        ("rest", "all else alone"),
    ):
        cost = asked[name]
        assert ["ward", label, "", "", rounded_up(cost["epsilon"]), f"{cost['delta']:g}"] in rows
    assert "parts need not add up" in " ".join(shown.split())
    ledger.charge(charge(11, dataset="[lab]", event=to_json([question])), None)
    shown = ran(capsys, "show", str(ledger.path))[1]
    assert re.search(r"\[lab\] +│ +questions alone", shown)  # as it is, not as markup
    # A trusted coordinator adds the noise.
    ledger.charge(charge(10, run="run-d", event=to_json([ROUND])), None)
    _, ward = json.loads(ran(capsys, "show", str(ledger.path), "--json")[1])["datasets"]
    assert ward["asked"]["against_all"] is None
    shown = ran(capsys, "show", str(ledger.path))[1]
    assert "against all others together │" not in shown
    assert "no figure against all others together: in one of the runs the coordinator" in " ".join(
        shown.split()
    )


def test_show_of_an_empty_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ledger(tmp_path / "ledger.sqlite", "site-1", lambda events, delta: 0.0)
    assert ran(capsys, "show", str(tmp_path)) == (0, "nothing was charged yet\n", "")
    assert json.loads(ran(capsys, "show", str(tmp_path), "--json")[1])["datasets"] == []


def test_show_refuses_a_ledger_that_does_not_hold(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.sqlite"
    shutil.copy(ledger.path, copy)  # at rest a ledger is one file
    assert ran(capsys, "show", str(copy))[0] == 0
    alter(copy, "UPDATE entries SET delta = 0.5 WHERE number = 4")
    code, out, err = ran(capsys, "show", str(copy))
    assert (code, out) == (2, "")
    assert "entry 4:" in err


@given(st.floats(0, 1e300))
def test_epsilon_is_never_shown_smaller_than_it_is(epsilon: float) -> None:
    shown = Decimal(rounded_up(epsilon))
    assert Decimal(epsilon) <= shown <= Decimal(epsilon) * Decimal("1.0001001")


def test_what_has_no_bound_says_so() -> None:
    assert rounded_up(None) == "no bound"
