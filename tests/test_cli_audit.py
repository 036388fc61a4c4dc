"""Audits of honest code, which raise no alarm, and of code with a defect planted in it, which do."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.cli.main import main
from cloister.clients import dpsgd
from cloister.clients.dpsgd import ClippedSum, PerUnit, PrivateTrainer, UnitGradients
from cloister.lm.data import Sequences
from cloister.lm.model import load_model
from cloister.lm.train import Named
from cloister.privacy.noise import Floats, NoiseStream
from cloister.privacy.terms import terms_of
from cloister.protocol.plan import Plan
from cloister.protocol.soundness import parse
from cloister.server.checkpoint import Checkpoints
from cloister.server.folder import RunFolder
from cloister.server.spending import Spending
from cloister.simulations.audit import audit
from cloister.simulations.audit_records import CanaryTrainer
from cloister.simulations.federation import lay_out

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BASE = """
[run]
name = "audited"
rounds = 4

[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32

[data]
sequence_length = 16
held_out = 0.0

[local]
steps = 10
batch_size = 4

[aggregation]
weighting = "uniform"

[server]
evaluation = "none"
"""
RECORD = """
[cohort]
sites = 4

[privacy]
unit = "record"
record = "window"
noise_multiplier = 0.6
clip = 0.5
delta = 1e-5
sampling_rate = 0.003
"""
SITE = """
[cohort]
sites = 4

[privacy]
unit = "site"
noise_multiplier = 2.0
clip = 0.5
delta = 1e-2
"""
RUNS = ("--canaries", "6000")
"""Of a round: enough to see half of the noise missing."""


def folder_of(path: Path, *sections: str, overrides: tuple[str, ...] = ()) -> Path:
    """A run that has paid for its rounds, as `simulate` leaves it, but for what no audit reads."""
    data = path / "records.jsonl"
    path.mkdir(parents=True, exist_ok=True)
    records = [{"text": f"record {number}: the fox jumps over {number} lazy dogs"} for number in range(40)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    simulation = f'\n[simulation]\npartition = "iid"\nsource = "{data}"\n'
    plan = parse("".join((BASE, *sections, simulation)), list(overrides))
    run = path / "run"
    with RunFolder.create(run, plan) as folder:
        folder.sites.path.mkdir()
        lay_out(plan, folder.sites.path)
        begin(folder, plan)
    return run


def begin(folder: RunFolder, plan: Plan) -> None:
    model = load_model(plan)
    checkpoints = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
    checkpoints.save(0, model.layout.flatten(model.module), {})
    terms = terms_of(plan, model.layout.size)
    if terms is None:
        return
    spending = Spending(terms, "run", folder.ledger)
    for number in range(1, plan.run.rounds + 1):
        spending.before_training(number, ["site-000", "site-001"])
        spending.before_opening(number, ["site-000", "site-001"])


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("record"), RECORD)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("site"), SITE)


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every stream that is asked for is another one, and the same in every run of a test."""
    streams = (NoiseStream.from_declared_seed(seed) for seed in itertools.count())
    repeatable = functools.partial(audit, streams=lambda: next(streams))
    monkeypatch.setattr("cloister.simulations.audit.audit", repeatable)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def ran(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    capsys.readouterr()
    code = main(["audit", str(run), "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def halve(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NoiseStream.add_gaussian

    def add(self: NoiseStream, vector: Floats, sigma: float, offset: int = 0, *, threads: int = 1) -> None:
        honest(self, vector, sigma / 2, offset, threads=threads)

    monkeypatch.setattr(NoiseStream, "add_gaussian", add)


def quieter_skellam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the standard deviation."""
    honest = NoiseStream.skellam

    def skellam(self: NoiseStream, size: int, variance: float, offset: int = 0, *, threads: int = 1) -> Any:
        return honest(self, size, variance / 4, offset, threads=threads)

    monkeypatch.setattr(NoiseStream, "skellam", skellam)


# --- unit record ------------------------------------------------------------------------------------------------------


def test_an_audit_of_honest_steps_raises_no_alarm(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = ran(capsys, record)
    assert (code, err, found["alarm"]) == (0, "", False)
    assert found["row"]["epsilon"] <= found["claimed"]
    assert found["claimed"] == found["claimed_run"]
    assert found["at_half_noise"] > found["claimed"], "it could have seen half of the noise missing"
    kept = json.loads((record / "audit.json").read_text())
    assert {name: found[name] for name in kept} == kept
    assert (found["row"]["claimed"], found["row"]["what"]) == (found["claimed"], found["what"])
    assert found["row"]["canaries"] == 10_000


def test_half_of_the_noise_on_steps_is_noticed(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    halve(monkeypatch)
    code, found, err = ran(capsys, record)
    assert (code, found["alarm"]) == (3, True)
    assert found["row"]["epsilon"] > found["claimed"]
    assert "alarm" in err
    assert err.count("\n") == 1


def test_gradients_that_are_not_clipped_are_noticed(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)
    monkeypatch.setattr(dpsgd.ClippedSum, "_check", lambda *_: None)
    assert ran(capsys, record)[0] == 3


def test_records_drawn_more_often_than_accounted_are_noticed(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = dpsgd.poisson_batch

    def often(noise: NoiseStream, n: int, rate: float) -> npt.NDArray[np.int64]:
        return honest(noise, n, 16 * rate)

    monkeypatch.setattr(dpsgd, "poisson_batch", often)
    assert ran(capsys, record)[0] == 3


def test_steps_without_noise_are_noticed(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoiseStream, "add_gaussian", lambda *_, **__: None)
    assert ran(capsys, record)[0] == 3


def test_fewer_steps_are_held_against_their_own_claim(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--canaries", "50", "--confidence", "0.9")
    found = {steps: ran(capsys, record, "--steps", str(steps), *options)[1] for steps in (4, 25, 1000)}
    for asked, taken in ((4, 4), (25, 20), (1000, 40)):  # more than a round's are whole rounds
        assert f" over {taken} steps " in found[asked]["what"]
    assert found[4]["claimed"] < found[25]["claimed"] < found[1000]["claimed"] == found[4]["claimed_run"]
    assert found[4]["row"]["canaries"] == 50
    assert found[4]["row"]["confidence"] == 0.9


def test_canaries_follow_what_a_round_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoLoRA trains one factor in odd rounds and the other in even ones; a canary in the other would never be seen."""
    adapter = ("model.adapter.scheme=rolora", "model.adapter.rank=4", "privacy.sampling_rate=0.05")
    run = folder_of(tmp_path, RECORD, overrides=(*adapter, "privacy.noise_multiplier=5.0"))
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)
    monkeypatch.setattr(dpsgd.ClippedSum, "_check", lambda *_: None)
    code, found, _ = ran(capsys, run, "--canaries", "400")
    assert code == 3
    assert found["row"]["correct"] == found["row"]["guesses"], (
        "40 steps of 0.05: hardly any canary is never drawn"
    )


def test_the_real_records_stay_and_canaries_need_no_backward_pass(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    honest = PrivateTrainer.per_unit_gradients

    @contextmanager
    def spied(self: PrivateTrainer, trained: Named) -> Iterator[PerUnit]:
        with honest(self, trained) as gradients:

            def spy(sequences: Sequences, units: npt.NDArray[np.int64]) -> Iterator[UnitGradients]:
                assert sequences.starts is not None
                assert (sequences.starts[units + 1] > sequences.starts[units]).all(), "no canary has tokens"
                seen.extend(units.tolist())
                return gradients(sequences, units)

            yield spy

    monkeypatch.setattr(PrivateTrainer, "per_unit_gradients", spied)
    assert ran(capsys, record, "--canaries", "1000")[0] == 0  # some 60 are drawn
    assert seen


def test_only_noise_and_canaries_are_left_to_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real gradients, which the adversary knows, are far above the noise of some coordinates: they must not hide it."""
    run = folder_of(tmp_path, RECORD, overrides=("privacy.sampling_rate=0.5", "local.steps=2"))
    seen: list[npt.NDArray[np.float32]] = []
    learned: list[float] = []
    monkeypatch.setattr(NoiseStream, "add_gaussian", lambda *_, **__: None)

    def see(self: CanaryTrainer, left: torch.Tensor) -> None:
        learned.append(float(self.watched.known.norm()))
        seen.append(left.numpy())

    monkeypatch.setattr(CanaryTrainer, "see", see)
    ran(capsys, run, "--canaries", "30")
    assert len(seen) == 8
    assert min(learned) > 1.0, "there are real gradients in it, in clipping norms of 0.5"
    for left in seen:
        drawn = left[np.abs(left) > 1e-5]
        assert 0 < len(drawn) < 30
        assert drawn == pytest.approx(0.5, abs=1e-4)


# --- unit site --------------------------------------------------------------------------------------------------------


def test_an_audit_of_honest_rounds_raises_no_alarm(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = ran(capsys, site, *RUNS)
    assert (code, found["alarm"]) == (0, False)
    assert 0 < found["row"]["epsilon"] <= found["claimed"] < found["claimed_run"]
    assert found["at_half_noise"] > found["claimed"]


def test_half_of_the_noise_on_rounds_is_noticed(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quieter_skellam(monkeypatch)
    assert ran(capsys, site, *RUNS)[0] == 3


@pytest.mark.parametrize("planted", [False, True])
def test_a_trusted_coordinators_noise_is_audited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    run = folder_of(tmp_path, SITE, overrides=("privacy.trusted_coordinator=true",))
    if planted:
        halve(monkeypatch)
    assert ran(capsys, run, *RUNS)[0] == (3 if planted else 0)


def test_adaptive_clipping_is_audited_for_its_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder_of(tmp_path, SITE, "[privacy.adaptive]\ncount_noise = 8.0\n")
    assert ran(capsys, run, *RUNS)[0] == 0
    quieter_skellam(monkeypatch)
    assert ran(capsys, run, *RUNS)[0] == 3


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    code, found, err = ran(capsys, run, *options)
    assert (code, found) == (2, {})
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_audited_is_refused_in_one_line(
    record: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "privacy.unit is 'none'" in refusal(
        capsys, folder_of(tmp_path / "none", "\n[cohort]\nsites = 4\n")
    )
    assert "at most the" in refusal(capsys, record, "--canaries", "100000000")
    assert "--canaries is 0" in refusal(capsys, record, "--canaries", "0")
    assert "--steps is 0" in refusal(capsys, record, "--steps", "0")
    assert "privacy.unit = 'record'" in refusal(capsys, site, "--steps", "3")
    assert "--confidence is 1.0" in refusal(capsys, record, "--confidence", "1")
    assert "plan.json" in refusal(capsys, tmp_path / "nothing")
    bare = folder_of(tmp_path / "bare", RECORD)
    (bare / "ledger.sqlite").unlink()
    assert "expected a run with charges in its ledger" in refusal(capsys, bare)


def test_what_a_person_reads_says_both_figures(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(record), "--canaries", "20", "--steps", "2"]) == 0
    out, _ = capsys.readouterr()
    for word in ("audited   epsilon is at least", "claimed   epsilon is at most", "no alarm", "too weak"):
        assert word in out
