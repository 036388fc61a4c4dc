"""A search on a real Ray cluster of two nodes on this machine.

It takes a minute or more, because each trial starts workers of its own, so it is no part of the suite; `make
test-deployment` runs it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister.privacy.ledger.ledger import read_history
from cloister.tests.parties.cluster_sites import await_
from cloister.tests.parties.federation import RECORD
from cloister.tests.simulations.engines.test_cluster import TwoNodes, flower, needs_ray, ray_leaves, two
from cloister.tests.tools.command import found, ran, set_options

__all__ = ["flower", "two"]  # fixtures

pytestmark = [needs_ray, *ray_leaves, pytest.mark.deployment, pytest.mark.timeout(900)]


def test_a_search_has_the_same_scores_on_a_cluster(
    small_plan: Path,
    two: TwoNodes,
    flower: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two trials at a time, each with a coordinator of its own, share the cluster."""
    search = tmp_path / "search.toml"
    parameter = '[[parameter]]\nfield = "local.learning_rate"\nchoices = [0.002, 0.004]\n'
    search.write_text(f'sampler = "grid"\nworkers = 2\n{parameter}')
    monkeypatch.chdir(tmp_path)
    short = ["--set", "run.rounds=1", "--json"]
    scores = []
    for out, engine in (("here", ["--workers", "1"]), ("cluster", flower)):
        code, printed, err = ran(capsys, "tune", str(small_plan), str(search), "--out", out, *short, *engine)
        assert code == 0, err
        found = json.loads(printed.splitlines()[-1])
        scores.append([(trial["settings"], trial["loss"]) for trial in found["trials"]])
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
    await_(lambda: not any(two.workers(node) for node in two.raylets))


def test_trials_on_a_cluster_are_charged_to_one_ledger(
    small_plan: Path,
    two: TwoNodes,
    flower: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under the unit `record`, two at a time; sites of both nodes charge it."""
    search = tmp_path / "search.toml"
    search.write_text(
        'sampler = "tpe"\ntrials = 3\nworkers = 2\n'
        '[[parameter]]\nfield = "local.learning_rate"\nlow = 1e-3\nhigh = 1e-1\n'
    )
    monkeypatch.chdir(tmp_path)
    public = "server.evaluation=simulation:public", "simulation.public=0.2", "run.rounds=2"
    options = set_options([*RECORD, *public])
    answer = found(capsys, "tune", str(small_plan), str(search), "--out", "out", *options, *flower)
    assert [trial["state"] for trial in answer["trials"]] == ["complete"] * 3
    entries = read_history(tmp_path / "out" / "ledger.sqlite").entries
    assert len({(entry.charge.run, entry.charge.round) for entry in entries}) == len(entries) == 6
    await_(lambda: not any(two.workers(node) for node in two.raylets))
