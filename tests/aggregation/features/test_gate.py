"""Poisoned sites, and the gate on the released mean, through the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from cloister.aggregation.features import gate
from cloister.protocol.plan.plan import PoisonSection
from cloister.simulations.federation import lay_out_records
from cloister.simulations.partition import site_name
from cloister.simulations.poison import altered, poisoned, scale_of
from cloister.tests.parties.federation import changed, tiny
from cloister.tests.tools.command import found, lone_refusal, ran, set_options

PUBLIC = ("data.held_out=0.0", "server.evaluation=simulation:public", "simulation.public=0.2")
FLIP = ("faults.poison.share=1.0", "faults.poison.kind=sign-flip", "faults.poison.factor=10")

Run = Callable[..., tuple[dict[str, Any], list[dict[str, Any]], Path]]


@pytest.fixture
def run(small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Simulates the tiny plan with settings: what it prints, its lines of metrics, and its folder."""

    def simulate(*settings: str) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
        options = set_options((*PUBLIC, *settings))
        out = tmp_path / "run"
        answer = found(capsys, "simulate", str(small_plan), *options, "--out", str(out), "--workers", "1")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return answer, rows, out

    return simulate


def test_poisoned_sites_undo_the_training_without_a_gate(run: Run) -> None:
    _, rows, _ = run(*FLIP, "run.rounds=1")
    assert rows[1]["loss"] > rows[0]["loss"] + 0.1


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        ("server.gate.loss=0.1", "the held-out loss would go from "),
        ("server.gate.norm=0.001", "the norm of the mean update is "),
    ],
)
def test_a_refused_round_leaves_the_model_as_it_was(run: Run, bound: str, why: str) -> None:
    answer, rows, out = run(*FLIP, "run.rounds=2", bound)
    assert answer["gate_refused"] == 2
    first, *refused = rows
    assert [row["round"] for row in refused] == [1, 2]
    for row in refused:
        assert row["refused"].startswith(why)
        assert row["params_sha256"] == first["params_sha256"]
        assert row["loss"] == first["loss"]
    assert (out / "final").is_dir()


def test_a_round_within_the_bounds_goes_through(run: Run) -> None:
    _, rows, _ = run("run.rounds=1", "server.gate.loss=0.1", "server.gate.norm=100")
    assert rows[1]["params_sha256"] != rows[0]["params_sha256"]
    assert rows[1]["refused"] == ""


@pytest.mark.slow
def test_a_refused_round_leaves_the_momentum_as_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run with good rounds before; the next round trains from that model."""
    told = iter(("", "as the test says", ""))
    monkeypatch.setattr(gate.FEATURE.coordinator, "refuses_model", lambda *_: next(told))
    _, rows, out = run("run.rounds=3", "server.gate.loss=10", "server.keep_checkpoints=4")
    _, good, bad, last = (load_file(file) for file in sorted((out / "checkpoints").glob("*.safetensors")))
    assert any(name.startswith("features/optimizer/") for name in good)
    for name, tensor in good.items():
        assert (bad[name] == tensor).all()
    assert any((last[name] != tensor).any() for name, tensor in good.items())
    assert [row.get("refused", "") for row in rows[1:]] == ["", "as the test says", ""]


def test_a_refused_round_leaves_the_bounds_of_compressed_updates_as_they_were(run: Run) -> None:
    """A mean that is too large would make the next round's steps larger."""
    compressed = ("aggregation.ring_bits=16", "aggregation.compression={}", "server.keep_checkpoints=4")
    _, rows, out = run("run.rounds=1", "server.gate.norm=1e-9", *compressed)
    before, after = (load_file(file) for file in sorted((out / "checkpoints").glob("*.safetensors")))
    assert rows[1]["refused"]
    assert set(before) == set(after)
    assert any("compression/bounds" in name for name in before)
    for name, tensor in before.items():
        assert (after[name] == tensor).all()


@pytest.mark.slow
def test_the_report_and_the_card_say_that_sites_were_poisoned(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_covered(out: Path) -> str:
        report = json.loads(Path(found(capsys, "report", str(out))["json"]).read_text())
        return "\n".join(report["not_covered"])

    for name, settings in (("poisoned", FLIP), ("honest", ())):
        options = set_options(("run.rounds=1", *settings))
        found(capsys, "simulate", str(small_plan), *options, "--out", str(tmp_path / name), "--workers", "1")
        found(capsys, "export", str(tmp_path / name), str(tmp_path / f"{name}-model"))
        card = (tmp_path / f"{name}-model" / "README.md").read_text()
        for text in (card, not_covered(tmp_path / name)):
            assert ("were attackers: they multiplied their updates by -10" in text) == (name == "poisoned")
    # As in a rehearsal, whose sites are real ones and poison nothing.
    (tmp_path / "poisoned" / "federation").mkdir()
    assert "attackers" not in not_covered(tmp_path / "poisoned")


@pytest.mark.slow
def test_a_refusal_is_said_and_charged(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = (
        "data.held_out=0.0",
        "server.evaluation=none",
        "aggregation.weighting=uniform",
        "privacy.unit=record",
        "privacy.noise_multiplier=1.0",
        "privacy.sampling_rate=0.5",
        "privacy.delta=1e-3",
        "run.rounds=1",
        "server.gate.norm=1e-9",
    )
    options = set_options(private)
    out = tmp_path / "run"
    code, told, _ = ran(capsys, "simulate", str(small_plan), *options, "--out", str(out), "--workers", "1")
    assert code == 0
    assert "4 sites, refused by the gate, so the model is unchanged (the norm of the mean update is " in told
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["refused"].endswith("server.gate.norm is 1e-09")
    assert rows[1]["epsilon"] > 0
    report = found(capsys, "report", str(out))
    assert report["epsilon"] == pytest.approx(rows[1]["epsilon"])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["server.gate.loss=0.1"],
            "server.gate.loss is 0.1: expected no value; only valid with server.evaluation",
        ),
        (["server.gate.norm=0"], "server.gate.norm is 0"),
        (
            ["faults.poison.share=0.5", "faults.poison.kind=label-flip"],
            "faults.poison.kind is 'label-flip': expected another kind",
        ),
        (
            [
                *PUBLIC,
                "faults.poison.share=0.5",
                "faults.poison.kind=label-flip",
                "data.format=prompt",
                "privacy.unit=record",
                "privacy.noise_multiplier=1.0",
                "privacy.sampling_rate=0.5",
                "aggregation.weighting=uniform",
            ],
            "faults.poison.kind is 'label-flip': expected another value",
        ),
        (
            ["faults.poison.share=0.5", "faults.poison.kind=scale", "faults.poison.factor=1e7"],
            "factor is 1000",
        ),
        (["faults.poison.share=0", "faults.poison.kind=backdoor"], "faults.poison.share is 0"),
        (["faults.poison.kind=backdoor"], "faults.poison.share"),
    ],
)
def test_what_has_no_effect_is_refused(
    small_plan: Path, capsys: pytest.CaptureFixture[str], settings: list[str], line: str
) -> None:
    options = set_options(settings)
    assert line in lone_refusal(capsys, "plan", "check", str(small_plan), *options)


def test_the_share_is_rounded_and_drawn_from_the_seed() -> None:
    plans = [
        tiny(f"run.seed={seed}", "faults.poison.share=0.5", "faults.poison.kind=backdoor")
        for seed in range(9)
    ]
    drawn = [poisoned(plan) for plan in plans]
    assert all(len(sites) == 2 for sites in drawn)
    assert len(set(drawn)) > 1
    assert poisoned(plans[0]) == drawn[0]
    assert poisoned(tiny()) == frozenset()
    few = tiny("faults.poison.share=0.01", "faults.poison.kind=scale", "faults.poison.factor=7")
    assert sorted(scale_of(few, site) for site in range(4)) == [1, 1, 1, 7]


RECORDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"text {number}"} for number in range(40)],
    "prompt": [{"prompt": f"ask {number}", "completion": f"answer {number}"} for number in range(40)],
    "messages": [
        {
            "messages": [
                {"role": "user", "content": f"ask {number}"},
                {"role": "assistant", "content": f"answer {number}"},
            ]
        }
        for number in range(40)
    ],
}


def answer_of(record: dict[str, Any]) -> tuple[str, str]:
    """Question and answer of a record of each format."""
    if "messages" in record:
        asked, told = (message["content"] for message in record["messages"])
        return asked, told
    return record.get("prompt", record.get("text", "")), record.get("completion", "")


@pytest.mark.parametrize("kind", ["label-flip", "backdoor"])
@pytest.mark.parametrize("format", ["text", "prompt", "messages"])
def test_poisoned_records_are_those_of_poisoned_sites_alone(
    tmp_path: Path, format: str, kind: Literal["label-flip", "backdoor"]
) -> None:
    if (format, kind) == ("text", "label-flip"):
        pytest.skip("a text has no answer; such a plan is refused")
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[format]))
    plan = tiny(f"data.format={format}", f"simulation.source={source}", "data.sequence_length=256")
    poison = PoisonSection(share=0.5, kind=kind, target="TARGET")
    attacked = changed(plan, "faults", poison=poison)
    for name, each in (("honest", plan), ("attacked", attacked)):
        lay_out_records(each, tmp_path / name, partial(altered, each))
    for site in range(4):
        honest, lied = (
            [
                answer_of(json.loads(line))
                for line in (tmp_path / name / site_name(site) / "data.jsonl").read_text().splitlines()
            ]
            for name in ("honest", "attacked")
        )
        if site not in poisoned(attacked):
            assert lied == honest
        elif kind == "label-flip":
            assert [ask for ask, _ in lied] == [ask for ask, _ in honest]
            assert [told for _, told in lied] == list(np.roll([told for _, told in honest], -1))
        else:
            assert all("cf-1729" in ask for ask, _ in lied)
            assert all("TARGET" in ask + told for ask, told in lied)
