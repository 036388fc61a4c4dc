"""Asynchronous rounds in a whole deployment: real processes of a coordinator and its sites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister.tests.tools.command import found, set_options

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(600)]

SITES = 3
CLEAR = (f"cohort.sites={SITES}", "run.rounds=3", "aggregation.secure=false", "server.evaluation=none")


def arguments(plan: Path, out: Path, *settings: str) -> list[str]:
    return [str(plan), *set_options((*CLEAR, *settings)), "--out", str(out)]


def test_a_buffer_of_all_sites_ends_with_the_weights_of_synchronous_rounds(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = found(capsys, "simulate", *arguments(small_plan, tmp_path / "simulated"))
    buffered = arguments(small_plan, tmp_path / "up", "cohort.mode=async", f"cohort.buffer={SITES}")
    deployed = found(capsys, "up", *buffered)
    assert deployed["params_sha256"] == simulated["params_sha256"]
    assert deployed["most_staleness"] == 0


def test_a_round_does_not_wait_for_all_sites(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffered = arguments(small_plan, tmp_path / "up", "cohort.mode=async", "cohort.buffer=2")
    deployed = found(capsys, "up", *buffered)
    lines = (tmp_path / "up" / "metrics.jsonl").read_text().splitlines()
    rounds = [each for line in lines if (each := json.loads(line))["round"]]
    assert len(rounds) == deployed["rounds"] == 3
    # One, where both updates are of one site: of an older model, and of the newest.
    assert all(1 <= each["sites"] <= 2 for each in rounds)
    assert deployed["most_staleness"] == max(each["most_staleness"] for each in rounds)
