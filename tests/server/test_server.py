"""The coordinator's parts: cohort, optimizer, journal, checkpoints, run folder."""

import dataclasses
import errno
import json
import os
import sqlite3
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.features.feature import Basis, Given
from cloister.aggregation.features.server_optimizer import OPTIMIZERS, ServerOptimizer
from cloister.lm.model.layout import Layout, params_sha256
from cloister.protocol.errors import RunFolderError, StorageError, UpdateError
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.plan import Plan, ServerSection
from cloister.protocol.plan.soundness import parse
from cloister.protocol.plan.threshold import parameters
from cloister.server.federation.cost import cost, secure_cost
from cloister.server.record import checkpoint as checkpoint_module
from cloister.server.record import journal as steps
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.journal import Journal
from cloister.tests.tools.raises import raises

SITES = [f"site-{index:03d}" for index in range(40)]


# cohort


@given(fraction=st.floats(0.01, 1), seed=st.integers(0, 2**32), number=st.integers(1, 10**6))
def test_a_cohort_is_a_repeatable_sample_without_replacement(fraction: float, seed: int, number: int) -> None:
    clear = "aggregation.secure=false"  # which refuses no small cohort
    plan = parse("", [f"cohort.fraction={fraction!r}", f"run.seed={seed}", "cohort.sites=40", clear])
    cohort = draw_of(plan, TRAIN).cohort(SITES, number)
    assert len(set(cohort)) == len(cohort) == plan.cohort.size()
    assert set(cohort) <= set(SITES)
    assert cohort == tuple(sorted(cohort)) == draw_of(plan, TRAIN).cohort(SITES[::-1], number)


def test_every_site_is_drawn_equally_often() -> None:
    plan = parse("", ["cohort.fraction=0.25", "cohort.sites=40"])
    counts = dict.fromkeys(SITES, 0)
    for number in range(1, 4001):
        for site in draw_of(plan, TRAIN).cohort(SITES, number):
            counts[site] += 1
    # Binomial(4000, 1/4): standard deviation 27.4.
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 27.4


def test_the_place_of_a_site_in_the_draw_depends_on_all_names() -> None:
    """A site that chooses its name, or whose name stays while another's changes, cannot plan for a place."""
    draw = draw_of(parse("", ["cohort.fraction=0.25", "cohort.sites=40"]), TRAIN)
    others = [*SITES[:-1], "another"]
    rounds = (
        {number for number in range(1, 201) if "site-000" in draw.cohort(SITES, number)},
        {number for number in range(1, 201) if "site-000" in draw.cohort(others, number)},
    )
    # Two independent draws of a quarter agree in 5/8 of the rounds: binomial(200, 5/8), standard deviation 6.9.
    assert abs(len(rounds[0] ^ rounds[1]) - 75) < 5 * 6.9
    evaluations = dataclasses.replace(draw, purpose="evaluate")
    assert [draw.cohort(SITES, number) for number in range(9)] != [
        evaluations.cohort(SITES, number) for number in range(9)
    ]


# optimizer


def start(size: int = 50) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


class Stepped:
    """A model that an optimizer moves."""

    def __init__(self, **section: Any) -> None:
        self.weights = start()
        server = ServerSection.model_validate_json(json.dumps(section))
        self.optimizer = ServerOptimizer(Basis(Plan(server=server), self.weights.size), Given())

    def step(self, update: np.ndarray) -> None:
        self.optimizer.step(self.weights, update.copy(), (1,))


def test_fedavg_is_the_mean_of_the_local_models() -> None:
    locals_ = np.random.default_rng(1).normal(size=(4, 50)).astype(np.float32)
    model = Stepped(optimizer="fedavg", learning_rate=1.0)
    model.step((locals_ - start()).mean(axis=0))
    np.testing.assert_allclose(model.weights, locals_.mean(axis=0), atol=1e-6)


def test_nesterov_follows_its_formula() -> None:
    model = Stepped(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
    weights, velocity = start().astype(np.float64), np.zeros(50)
    for seed in range(4):
        update = np.random.default_rng(seed).normal(size=50).astype(np.float32)
        model.step(update)
        velocity = 0.9 * velocity - update
        weights -= 0.7 * (0.9 * velocity - update)
    np.testing.assert_allclose(model.weights, weights, atol=1e-5)


def test_adam_follows_its_formula() -> None:
    model = Stepped(optimizer="adam", learning_rate=0.1, betas=(0.9, 0.99), epsilon=1e-3)
    weights, first, second = start().astype(np.float64), np.zeros(50), np.zeros(50)
    for step in range(1, 5):
        update = np.random.default_rng(step).normal(size=50).astype(np.float32)
        model.step(update)
        first, second = 0.9 * first - 0.1 * update, 0.99 * second + 0.01 * update.astype(np.float64) ** 2
        weights -= 0.1 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-3)
    np.testing.assert_allclose(model.weights, weights, atol=1e-5)


def test_each_optimizer_of_the_plan_is_in_the_table() -> None:
    assert set(get_args(ServerSection.model_fields["optimizer"].annotation)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_what_torch_keeps(name: str) -> None:
    """Its vectors are counted in `cost`; what the table left out would be lost when a run goes on."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    section = ServerSection.model_validate_json(f'{{"optimizer": "{name}"}}')
    optimizer = OPTIMIZERS[name].make(parameter, section)
    optimizer.step()
    state = {each: value for each, value in optimizer.state[parameter].items() if value is not None}
    assert set(state) == set(OPTIMIZERS[name].keeps)
    assert sum(value.shape == parameter.shape for value in state.values()) == OPTIMIZERS[name].moments


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_state(name: str) -> None:
    through, stopped, resumed = (Stepped(optimizer=name) for _ in range(3))
    updates = [np.random.default_rng(seed).normal(size=50).astype(np.float32) for seed in range(4)]
    for update in updates[:2]:
        through.step(update)
        stopped.step(update)
    resumed.weights[:] = stopped.weights
    resumed.optimizer.restore(stopped.optimizer.state())
    for update in updates[2:]:
        through.step(update)
        resumed.step(update)
    assert np.array_equal(through.weights, resumed.weights)


def test_a_step_to_infinity_is_refused_and_undone() -> None:
    model = Stepped(learning_rate=3e38)
    with raises(UpdateError, "global model", says="server.learning_rate"):
        model.step(np.full(50, 3e38, dtype=np.float32))
    assert np.array_equal(model.weights, start())


# journal


def test_the_journal_survives_and_counts(tmp_path: Path) -> None:
    with Journal(tmp_path / "j", clock=lambda: 1.0) as journal:
        journal.record(0, 1, steps.DONE, {"x": 1})
        journal.record(1, 1, steps.BEGUN)
        journal.record(1, 1, steps.FAILED)
        journal.record(1, 2, steps.BEGUN)
    with Journal(tmp_path / "j") as journal:
        last = journal.newest(steps.DONE)
        assert last is not None
        assert (last.round, last.detail) == (0, {"x": 1})
        assert journal.count(steps.BEGUN, 1) == 2
        assert journal.count(steps.FAILED, 1) == 1
        assert journal.newest(steps.FINISHED) is None


def test_a_journal_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"no database at all, but long enough to be looked at" * 30)
    with raises(RunFolderError, tmp_path / "j"):
        Journal(tmp_path / "j")


def test_a_full_disk_refuses_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def connect_to_a_full_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(*arguments, **options)
        database.execute("PRAGMA max_page_count = 2")  # SQLite's own "database or disk is full"
        return database

    monkeypatch.setattr(sqlite3, "connect", connect_to_a_full_disk)
    with Journal(tmp_path / "j") as journal:

        def write_on() -> None:
            for number in range(10_000):
                journal.record(number, 1, steps.BEGUN, {"cohort": SITES})

        with raises(StorageError, tmp_path / "j", says="full"):
            write_on()
        assert sqlite3.connect(tmp_path / "j").execute("PRAGMA integrity_check").fetchone() == ("ok",)


# checkpoints


def layout() -> Layout:
    return Layout.of([("b", parameter(4, 5)), ("a", parameter(30))])


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape))


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, layout(), keep=2)
    state: dict[str, np.ndarray[Any, Any]] = {"optimizer/exp_avg": start(), "site_unit/clip": np.array(0.1)}
    digest = checkpoints.save(3, start(), features=state)
    loaded = checkpoints.load(3)
    assert digest == params_sha256(start())
    assert np.array_equal(loaded.weights, start())
    assert {name: value.tolist() for name, value in loaded.features.items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_the_first_and_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, layout(), keep=2)
    for number in range(6):
        checkpoints.save(number, start() * number)
    assert sorted(os.listdir(tmp_path)) == [f"round-{n:05d}.safetensors" for n in (0, 4, 5)]


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, layout(), keep=2)
    checkpoints.save(1, start())

    def no_room(_tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_module, "save_file", no_room)
    with raises(StorageError, "round-00002.safetensors", says="No space left"):
        checkpoints.save(2, start() * 2)
    assert os.listdir(tmp_path) == ["round-00001.safetensors"]
    assert np.array_equal(checkpoints.load(1).weights, start())


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, layout(), keep=2)
    checkpoints.save(1, start())
    whole = checkpoints.path(1).read_bytes()
    with raises(RunFolderError, "round-00002.safetensors", says="whole"):
        checkpoints.load(2)
    checkpoints.path(1).write_bytes(whole[:-10])
    with raises(RunFolderError, "round-00001.safetensors", says="whole"):
        checkpoints.load(1)
    checkpoints.path(1).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with raises(RunFolderError, "round-00001.safetensors", says="SHA-256"):
        checkpoints.load(1)
    checkpoints.path(1).write_bytes(whole)
    other = Checkpoints(tmp_path, Layout.of([("a", parameter(50))]), keep=2)
    with raises(RunFolderError, "round-00001.safetensors", says="the plan"):
        other.load(1)


# run folder


def plan() -> Plan:
    return parse("")


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", plan()).close()
    with raises(RunFolderError, tmp_path / "run", says=("another run", "cloister resume")):
        RunFolder.create(tmp_path / "run", plan())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.doc").touch()
    with raises(RunFolderError, tmp_path / "other", says="other files"):
        RunFolder.create(tmp_path / "other", plan())
    assert os.listdir(tmp_path / "other") == ["thesis.doc"]
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError):
        RunFolder.create(tmp_path / "file", plan())


def test_two_processes_cannot_work_on_one_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", plan())
    with raises(RunFolderError, tmp_path / "run", says="no other process"):
        RunFolder.reopen(tmp_path / "run")
    folder.close()
    RunFolder.reopen(tmp_path / "run").close()


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with raises(RunFolderError, tmp_path, says="plan.json"):
        RunFolder.reopen(tmp_path)


def test_each_line_of_metrics_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may else lose those of several rounds, of which only the newest is written again."""
    synced: list[str] = []
    with RunFolder.create(tmp_path / "run", plan()) as folder:
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/dev/fd/{file}").read_text()))
        folder.add_metrics({"round": 0})
        folder.add_metrics({"round": 1})
    assert synced == ['{"round": 0}\n', '{"round": 0}\n{"round": 1}\n']


def test_metrics_cut_off_by_a_crash_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", plan())
    for number in range(3):
        folder.add_metrics({"round": number})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')
    assert [row["round"] for row in folder.metrics()] == [0, 1, 2]
    folder.truncate_metrics(1)
    assert (folder.path / "metrics.jsonl").read_text() == '{"round": 0}\n{"round": 1}\n'
    folder.close()


# cost


def test_the_cost_of_the_secure_sum_follows_its_parameters() -> None:
    found = secure_cost(parse("", ["cohort.sites=100"]))
    assert found is not None
    graph = parameters(100, 10, 10)
    assert (found.n, found.k, found.t) == (100, graph.k, graph.threshold)
    assert (found.dropouts, found.colluders) == (10, 10)
    assert found.overhead_bytes_down > found.overhead_bytes_up > 0
    assert secure_cost(parse("", ["aggregation.secure=false"])) is None


def test_costs_are_counted() -> None:
    found = cost(parse("", ["cohort.sites=10", "cohort.fraction=0.5"]), parameters=1000, trained=100)
    assert found.cohort == 5
    assert found.bytes_down == 400
    assert 400 < found.bytes_up < 400 + 200
    assert (
        found.coordinator_bytes == 4 * 1000 + found.bytes_up
    )  # as tests/scenarios/test_memory.py measures it
    adam = ["cohort.sites=10", "server.optimizer=adam", "aggregation.ring_bits=16"]
    kept = cost(parse("", adam), parameters=1000, trained=100)
    assert kept.coordinator_bytes == 4 * (1000 + 2 * 100 + 100) + kept.bytes_up
    # The coordinator's memory does not grow with the sites.
    many = cost(parse("", ["cohort.sites=5000", "cohort.fraction=1"]), parameters=1000, trained=100)
    assert many.coordinator_bytes < found.coordinator_bytes * 1.1
