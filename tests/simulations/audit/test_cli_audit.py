"""Audits of honest code, which raise no alarm, and of code with a defect planted in it, which do."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.cli.main import main
from cloister.clients.ranks.ranks import Ranks
from cloister.clients.training.dpsgd import ClippedSum, PerUnit, PrivateTrainer, UnitGradients
from cloister.lm.model.model import load_model
from cloister.lm.model.weights import Named
from cloister.lm.text.data import Sequences
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.audit.fit import Check
from cloister.privacy.ledger.ledger import Ledger, read_history
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.sum.spending import Spending
from cloister.simulations.audit.audit import audit
from cloister.simulations.audit.audit import audit as honest
from cloister.simulations.audit.audited import played
from cloister.simulations.audit.records import RecordGame
from cloister.simulations.audit.steps import Observed, Seen
from cloister.simulations.federation import lay_out
from cloister.tests.tools.mutants import (
    ADD_NOISE,
    ENCODE,
    LESS_NOISE_IN_STEPS,
    LESS_NOISE_OF_SITES,
    LESS_NOISE_OF_THE_COORDINATOR,
    STEPS,
    TERMS,
    UNCHARGED,
    UNPAID_ROUND,
    Mutant,
)

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
evaluation = "simulation:public"
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
FEW = ("--canaries", "4")
"""Updates of two honest sites in two rounds of four sites."""
SMALL = ("--canaries", "1000", "--steps", "20")
OFTEN = ("privacy.sampling_rate=0.05",)
QUIET = ("privacy.noise_multiplier=0.1",)
CENTRAL = ("privacy.trusted_coordinator=true", "aggregation.secure=false")
ADAPTIVE = "[privacy.adaptive]\ncount_noise = 8.0\n"


def folder_of(path: Path, *sections: str, overrides: tuple[str, ...] = ()) -> Path:
    """A run that has paid for its rounds, as `simulate` leaves it, but for what no audit reads."""
    data = path / "records.jsonl"
    path.mkdir(parents=True, exist_ok=True)
    records = [{"text": f"record {number}: the fox jumps over {number} lazy dogs"} for number in range(40)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    simulation = f'\n[simulation]\npartition = "iid"\nsource = "{data}"\npublic = 0.1\n'
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
    checkpoints.save(0, model.layout.flatten(model.module))
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
def often(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("often"), RECORD, overrides=OFTEN)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("site"), SITE, overrides=QUIET)


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("central"), SITE, overrides=(*QUIET, *CENTRAL))


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every stream that is asked for is another one, and the same in every run of a test."""
    # Not declared, so that they are used as secret ones are.
    streams = (NoiseStream(NoiseStream.from_declared_seed(seed).key) for seed in itertools.count())
    repeatable = functools.partial(audit, streams=lambda: next(streams))
    monkeypatch.setattr("cloister.simulations.audit.audit.audit", repeatable)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def ran(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """An audit of a run that several tests audit: the alarm of another one is not of it."""
    (run / "audit.json").unlink(missing_ok=True)
    capsys.readouterr()
    code = main(["audit", str(run), "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


@pytest.mark.slow
def test_an_audit_takes_noise_and_terms_from_where_a_run_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; the other tests give it streams, so that they can be repeated."""
    run = folder_of(
        tmp_path, RECORD.replace("noise_multiplier = 0.6", "target_epsilon = 2.0"), overrides=OFTEN
    )
    with RunFolder.reopen(run) as folder, monkeypatch.context() as patch:
        asked: list[tuple[str, int]] = []

        def noise_of(_plan: Plan, who: str, number: int) -> NoiseStream:
            asked.append((who, number))
            return NoiseStream.from_declared_seed(number).child(who)

        patch.setattr("cloister.simulations.audit.audit.noise_of", noise_of)
        found = honest(folder, canaries=1000, steps=20)
        both = ("site-000", "site-000 without records")
        assert asked == [(who, number) for number in (1, 2) for who in both]
        assert not found.row.problem
    with RunFolder.reopen(run) as folder, monkeypatch.context() as patch:
        Mutant("clients.training.work:train", "terms.noise_multiplier", "0.01").plant(patch)
        found = honest(folder, canaries=1000, steps=10)
        assert "standard deviation of the noise" in str(found.row.problem)


# --- unit record ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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
    visible = {check["what"]: check["visible"] for check in found["checks"] if check["visible"] is not None}
    assert visible["standard deviation of the noise"] < 0.01
    assert visible["what one unit changes, in clipping norms"] < 0.01
    assert visible["rate at which units are drawn"] < 0.1


@pytest.mark.slow
def test_no_more_rounds_are_played_than_the_plan_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site that crashed after its charges has made its updates again, and has paid for more."""
    run = folder_of(tmp_path, RECORD, overrides=OFTEN)
    paid = [entry.charge for entry in read_history(run / "ledger.sqlite").entries]
    own = Ledger(run / "sites" / "site-000" / "state" / "ledger.sqlite", "site-000", composed)
    for number, again in itertools.product(range(3), (paid[0], paid[-1])):
        own.charge(replace(again, id=f"{again.id}/{number}", dataset="site-000"), None)
    code, found, err = ran(capsys, run, "--canaries", "1000")
    assert (code, err) == (0, "")
    assert "over 40 steps" in found["what"]
    assert found["claimed"] < found["claimed_run"]


NOISE, RATE, LENGTH = (
    "standard deviation of the noise: ",
    "rate at which units are drawn",
    "what one unit changes",
)
EMPTY, RELEASES = "standard deviation of the noise of empty batches", "releases: "
INSIDE, REPEATED = (
    "correlation of the noise inside a release",
    "furthest projection of the noise on that of another release",
)
BYTES = "answers whose bytes do not follow from the noised sums"
OF_SIZE, OFTEN_DRAWN, AGAIN, TOGETHER = (
    "rate at which units of size ",
    "share of units in 2 steps or more",
    "most units that two steps share",
    "draws of two units together, at one distance",
)
OF_THE_BATCH = "spread of the sizes of batches"
TWICE = "magnitudes that are twice in a release"

RELEASE = "noised = total.release("
DEVIATION = "noise_multiplier * privacy.clip"
SENT = "return local\n"
TAIL = "vector[layout.size :] = code.tail("
SPEED = 'if plan.local.balance == "weighted" else 1.0'
RECORDS = "1.0 + __import__('pathlib').Path(self._config.data).read_bytes().count(10)"
OTHERWISE_SENT = [
    Mutant(STEPS, RELEASE, "noised = total.so_far().float(); total.release("),
    Mutant("clients.training.work:train", SENT, f"local.vector[0] = local.loss; {SENT}"),
    Mutant("clients.training.work:train", SENT, f"local.vector[-1] += local.tokens; {SENT}"),
    Mutant("clients.training.release:contribution", TAIL, f"vector[0] = int(update.loss) % 2**16; {TAIL}"),
    Mutant("clients.site:Site.contribute", "if not orders.timed:", "if False:"),
    Mutant("clients.consent.admission:Admission.joined", SPEED, SPEED.replace("1.0", RECORDS)),
]
"""What leaves does not follow from the noised sums: sums without noise, loss, number of tokens, time of training, and
number of records."""
CLIP, NORM = "self.plan.privacy.clip", "torch.linalg.vector_norm(torch.stack(parts), dim=0)"
OTHER_CLIPS = [
    *(
        Mutant("clients.training.dpsgd:PrivateTrainer.new_sum", CLIP, f"{by} * {CLIP}")
        for by in (2, 1.03, 1.01)
    ),
    Mutant("clients.training.dpsgd:_norms", NORM, "torch.stack(parts).amax(dim=0)"),
    Mutant(
        "clients.training.dpsgd:ClippedSum.add",
        "self._scale(gradients, norms)\n    self._check(gradients)",
        "self._scale(gradients, norms.where(norms > 3 * self._clip, 1e-9))",
    ),
]
"""A longer clip, one of each layer for itself, and none of what is a little too long."""
BY_HOOKS = Mutant(
    "clients.training.dpsgd:PrivateTrainer._by_hooks",
    "sizes = sequences.starts[units + 1] - sequences.starts[units]",
    "units = np.concatenate([np.arange(*sequences.starts[each : each + 2]) for each in units] or [units]);"
    " sequences = __import__('dataclasses').replace(sequences, starts=np.arange(len(sequences) + 1));"
    " sizes = np.ones_like(units)",
)
ONE_BY_ONE = Mutant(
    "clients.training.dpsgd:PrivateTrainer._one_by_one",
    "zip(sequences.starts[units], sequences.starts[units + 1], strict=True)",
    "((row, row + 1) for unit in units for row in range(*sequences.starts[unit : unit + 2]))",
)
HIGHER_RATES = [
    Mutant("clients.training.dpsgd:poisson_batch", "< rate", "< 1.1 * rate"),
    Mutant(STEPS, "n_units, self._rate", "n_units, 1.1 * self._rate"),
]
DRAWN, BATCH = "np.flatnonzero(noise.generator().random(n) < rate)", 'own.child("batch"), n_units, self._rate'
SIZES = "np.diff(sequences.starts)"
OF_ONE_SIZE = "np.sort(noise.generator().permutation(n)[: round(n * rate)])"
EPOCH = 'np.sort(noise.child("epoch").generator().permutation(n_units)[step::20])'
OTHER_DRAWS = [
    (Mutant("clients.training.dpsgd:poisson_batch", "< rate", "< 0.9 * rate"), RATE),
    (Mutant(STEPS, BATCH, BATCH.replace("_rate", f"_rate * {SIZES} ** 0.1")), OF_SIZE),
    (
        Mutant(
            STEPS, BATCH, BATCH.replace("_rate", f"_rate * (1 + 0.2 * ({SIZES} == 2) - 0.2 * ({SIZES} == 8))")
        ),
        OF_SIZE,
    ),
    (
        Mutant("clients.training.dpsgd:poisson_batch", "random(n)", "random(n // 2 + 1).repeat(2)[:n]"),
        TOGETHER,
    ),
    (
        Mutant(
            "clients.training.dpsgd:poisson_batch",
            "random(n)",
            "random(n // 2 + 1)[np.arange(n) % (n // 2 + 1)]",
        ),
        TOGETHER,
    ),
    (Mutant(STEPS, 'own.child("batch")', 'noise.child(f"batch-{step // 2}")'), OFTEN_DRAWN),
    (Mutant(STEPS, 'own.child("batch")', 'noise.child(f"batch-{min(step, 8)}")'), AGAIN),
    (Mutant(STEPS, f"poisson_batch({BATCH})", EPOCH), OFTEN_DRAWN),
    (Mutant("clients.training.dpsgd:poisson_batch", DRAWN, OF_ONE_SIZE), OF_THE_BATCH),
]
"""Fewer units; by their number of sequences, at the right rate over all of them too; in pairs of neighbours, and of the
two halves; the same in two steps; none again before all others were drawn; as many in each step."""


REPEATS: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "again": lambda half: half,
    "mirrored": lambda half: half[::-1],
    "negated": lambda half: -half,
    "permuted": np.random.default_rng(0).permutation,
    "in a fixed order": lambda half: half[np.random.default_rng(0).permutation(half.size)],
}


def repeat_halves(patch: pytest.MonkeyPatch, how: str) -> None:
    """The second half of each vector of noise is the first half again."""
    gaussians, skellams = NoiseStream.gaussian, NoiseStream.skellam

    def repeated(noise: npt.NDArray[Any]) -> npt.NDArray[Any]:
        half = noise.size // 2
        noise[half : 2 * half] = REPEATS[how](noise[:half])
        return noise

    def add_gaussian(self: NoiseStream, vector: Any, sigma: float, offset: int = 0, **how: int) -> None:
        vector += self.gaussian(vector.size, sigma, offset).astype(vector.dtype)

    def gaussian(self: NoiseStream, size: int, *law: Any) -> npt.NDArray[np.float64]:
        return repeated(gaussians(self, size, *law))

    def skellam(self: NoiseStream, size: int, *law: Any, **how: Any) -> npt.NDArray[np.int64]:
        return repeated(skellams(self, size, *law, **how))

    patch.setattr(NoiseStream, "add_gaussian", add_gaussian)
    patch.setattr(NoiseStream, "gaussian", gaussian)
    patch.setattr(NoiseStream, "skellam", skellam)


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        *((mutant, NOISE) for mutant in LESS_NOISE_IN_STEPS),
        *((mutant, BYTES) for mutant in OTHERWISE_SENT),
        *((mutant, LENGTH) for mutant in OTHER_CLIPS),
        *((mutant, RATE) for mutant in HIGHER_RATES),
        *OTHER_DRAWS,
        (Mutant(STEPS, DEVIATION, f"(1 if len(batch) else 0.2) * {DEVIATION}"), EMPTY),
        (Mutant(STEPS, "range(local.steps)", "range(local.steps + 1)"), RELEASES),
        (Mutant(STEPS, 'noise.child(f"step-{step + 1}")', 'noise.child("step")'), REPEATED),
        (UNCHARGED, RELEASES),
    ],
    ids=str,
)
def test_steps_that_are_not_what_is_charged_raise_an_alarm(
    mutant: Mutant,
    found: str,
    often: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant.plant(monkeypatch)
    code, result, err = ran(capsys, often, *SMALL)
    assert (code, result["alarm"]) == (3, True)
    assert found in result["row"]["problem"]
    assert err.count("\n") == 1
    assert f"alarm: {result['row']['problem']}" in err or "epsilon is at least" in err


@pytest.mark.parametrize("how", REPEATS)
def test_noise_that_repeats_inside_a_release_raises_an_alarm(
    how: str, often: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_halves(monkeypatch, how)
    code, result, _ = ran(capsys, often, *SMALL)
    assert code == 3
    assert TWICE in result["row"]["problem"]
    assert how != "again" or INSIDE in result["row"]["problem"]
    assert NOISE not in result["row"]["problem"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        (replace(LESS_NOISE_IN_STEPS[0], new="noise_multiplier=0.99 * terms.noise_multiplier"), NOISE),
        (OTHER_CLIPS[2], LENGTH),
        (HIGHER_RATES[0], RATE),
    ],
    ids=str,
)
def test_at_the_default_length_small_errors_raise_an_alarm(
    mutant: Mutant,
    found: str,
    record: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundredth of noise and clip, a tenth of the rate."""
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, record)
    assert code == 3
    assert found in result["row"]["problem"]


@pytest.mark.parametrize(
    ("settings", "mutant"),
    [(["local.batch_size=1", "local.steps=4"], ONE_BY_ONE), (["privacy.method=opacus"], BY_HOOKS)],
    ids=["reference", "opacus"],
)
def test_sequences_of_a_unit_that_are_clipped_apart_raise_an_alarm(
    settings: list[str],
    mutant: Mutant,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Opacus, and by `reference`, which takes a batch of one sequence one after the other too."""
    run = folder_of(tmp_path, RECORD, overrides=(*OFTEN, *settings))
    few = ("--canaries", "100", "--steps", "4")
    assert ran(capsys, run, *few)[0] == 0
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, *few)
    assert code == 3
    assert f"{LENGTH}, in clipping norms: 2," in result["row"]["problem"]


@pytest.mark.parametrize(
    "settings",
    [
        (
            "local.optimizer=muon",
            "local.optimizer_state=keep",
            "local.warmup_steps=39",
            "server.evaluation=simulation:public",
            "server.evaluate_every=2",
        ),
        ("local.optimizer=sgd", "local.proximal=0.1", "model.adapter.scheme=rolora", "model.adapter.rank=4"),
        ("aggregation.ring_bits=8", "aggregation.compression.first_scale=0.01"),
    ],
    ids=["kept state", "adapter", "compressed"],
)
def test_what_leaves_follows_from_the_noised_sums(
    settings: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last byte, whatever a site keeps from round to round."""
    run = folder_of(tmp_path, RECORD, overrides=(*OFTEN, *settings))
    code, found, err = ran(capsys, run, *SMALL)
    assert (code, err) == (0, "")
    OTHERWISE_SENT[0].plant(monkeypatch)
    code, found, _ = ran(capsys, run, *SMALL)
    assert code == 3
    assert f"{BYTES}: 2, charged 0" in found["row"]["problem"]


def test_gradients_that_are_not_clipped_are_noticed(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)
    monkeypatch.setattr(ClippedSum, "_check", lambda *_: None)
    code, result, _ = ran(capsys, record, *SMALL)
    assert code == 3
    assert LENGTH in result["row"]["problem"]


def test_a_claim_that_the_guesses_refute_raises_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the guesses alone: every canary is in every step, and the accountant is told the same."""
    every = ("privacy.sampling_rate=1.0", "privacy.noise_multiplier=6.0", "privacy.delta=1e-9")
    run = folder_of(tmp_path, RECORD, overrides=every)
    LESS_NOISE_IN_STEPS[1].plant(monkeypatch)
    monkeypatch.setattr(RecordGame, "_checks", lambda *_: (Check("noise", 1.0, 1.0, 1.0, 0.01),))
    code, result, err = ran(capsys, run, "--canaries", "200", "--steps", "2")
    assert code == 3
    assert result["row"]["refuting"] > result["claimed"]
    assert result["row"]["refuting"] < result["row"]["epsilon"]
    assert result["row"]["problem"] == ""
    assert "is claimed" in err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_honest_steps_raise_no_alarm(
    seed: int, record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = (NoiseStream.from_declared_seed(1000 * (seed + 1) + n) for n in itertools.count())
    with RunFolder.reopen(record) as folder:
        folder.audit.unlink(missing_ok=True)
        found = audit(folder, canaries=500, steps=10, streams=lambda: next(streams))
    assert not found.alarm, found.row.problem
    assert min(check.p for check in found.checks) > 1e-4


@pytest.mark.slow
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


def test_a_warm_up_is_no_longer_than_the_steps_that_are_played() -> None:
    plan = parse("".join((BASE, RECORD)), ["local.warmup_steps=39", "server.evaluation=none"])
    terms = terms_of(plan, 100)
    assert terms is not None
    assert played(plan, terms, local={"steps": 4}).local.warmup_steps == 15
    assert played(plan, terms).local.warmup_steps == 39


def test_canaries_follow_what_a_round_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoLoRA trains one factor in odd rounds and the other in even ones; a canary in the other would never be seen."""
    adapter = ("model.adapter.scheme=rolora", "model.adapter.rank=4", "privacy.sampling_rate=0.05")
    run = folder_of(tmp_path, RECORD, overrides=(*adapter, "privacy.noise_multiplier=5.0"))
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)
    monkeypatch.setattr(ClippedSum, "_check", lambda *_: None)
    code, found, _ = ran(capsys, run, "--canaries", "400")
    assert code == 3
    assert found["row"]["correct"] == found["row"]["guesses"], (
        "40 steps of 0.05: hardly any canary is never drawn"
    )


@pytest.mark.slow
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
    rests: list[npt.NDArray[np.float64]] = []
    learned: list[float] = []
    monkeypatch.setattr(NoiseStream, "add_gaussian", lambda *_, **__: None)
    right = Observed.take

    def take(self: Observed, released: torch.Tensor, seen: Seen, places: npt.NDArray[np.bool_]) -> None:
        learned.append(float(np.linalg.norm(released.numpy() / 0.5 - seen.rest)))
        rests.append(seen.rest)
        right(self, released, seen, places)

    monkeypatch.setattr(Observed, "take", take)
    ran(capsys, run, "--canaries", "30")
    assert len(rests) == 8
    assert min(learned) > 2.0, "there are real gradients beside the last unit, in clipping norms"
    for rest in rests:
        drawn = rest[np.abs(rest) > 2e-5]
        assert 0 < len(drawn) < 30
        assert drawn == pytest.approx(1.0, abs=1e-4)


# --- unit site --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "overrides"),
    [((SITE,), ()), ((SITE,), CENTRAL), ((SITE, ADAPTIVE), ())],
    ids=["sites", "coordinator", "adaptive"],
)
def test_an_audit_of_honest_rounds_raises_no_alarm(
    sections: tuple[str, ...], overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path, *sections, overrides=overrides)
    for _ in range(3):
        code, found, err = ran(capsys, run, *FEW)
        assert (code, err, found["alarm"]) == (0, "", False)
        assert 0 < found["claimed"] < found["claimed_run"]
        assert found["checks"][0]["visible"] < 0.05
        assert not list(run.glob("audit-*")), "the audit's own sites are removed"


def test_an_audit_of_sites_with_meshes_plays_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer that plants canaries is in this process."""
    mesh = "simulation.profiles=[{share=1.0,mesh={shard=2}}]"
    run = folder_of(tmp_path, SITE, overrides=(*QUIET, mesh))
    monkeypatch.setattr(Ranks, "call", lambda *_, **__: pytest.fail("ranks were started"))
    code, found, err = ran(capsys, run, *FEW)
    assert (code, err, found["alarm"]) == (0, "", False)


CHANGE, COUNT = "what one site changes in a sum", "what one site changes in the count"
OF_COORDINATE, TAIL_OF = "correlation of the count's noise", "privacy.mechanism.site_noise:SiteMechanism.tail"
COORDINATE, MODEL = (
    "furthest deviation of the noise at a coordinate",
    "rounds whose model does not follow from the noised sums",
)
TOLD = "other values that sites have told"
STEP = "features.step(context.model, mean, rounds)"
LONGER = Mutant(ENCODE, "(scaled, self.scale,", "(scaled, 1.01 * self.scale,")
LEAKS = [
    (Mutant("clients.training.release:contribution", TAIL, f"vector[0] += int(update.loss); {TAIL}"), CHANGE),
    (Mutant("server.round.round:_step", STEP, f"mean[0] = number; {STEP}"), MODEL),
    (OTHERWISE_SENT[-2], TOLD),
    (Mutant("clients.consent.admission:Admission.joined", SPEED, SPEED.replace("1.0", RECORDS)), TOLD),
]
"""Something leaves beside the noised sum."""


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        *((mutant, CHANGE if "scale" in mutant.old else NOISE) for mutant in LESS_NOISE_OF_SITES),
        (LONGER, CHANGE),
        *LEAKS,
        (UNCHARGED, RELEASES),
        (UNPAID_ROUND, RELEASES),
    ],
    ids=str,
)
def test_rounds_that_are_not_what_is_charged_raise_an_alarm(
    mutant: Mutant,
    found: str,
    site: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, site, *FEW)
    assert (code, result["alarm"]) == (3, True)
    assert found in result["row"]["problem"]


def test_a_total_beside_the_vector_raises_an_alarm(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact number of tokens, summed as the number of sites is."""
    total = '((found := make(basis)), found.counters + (type(found.counters[0])("tokens", 1 << 50),))'
    more = f'__import__("dataclasses").replace((told := {total})[0], counters=told[1])'
    Mutant("aggregation.features.registry:layout_of", "return make(basis)", f"return {more}").plant(
        monkeypatch
    )
    tail = "aggregation.features.site_unit:Protected.tail"
    Mutant(tail, "{WEIGHT: 1}", '{WEIGHT: 1, "tokens": tokens}').plant(monkeypatch)
    code, result, _ = ran(capsys, site, *FEW)
    assert (code, result["alarm"]) == (3, True)
    assert TOLD in result["row"]["problem"]
    before = (site / "audit.json").read_bytes()
    assert main(["audit", str(site), *FEW]) == 2, (
        "another one, which may be weaker or lucky, takes no alarm back"
    )
    assert "no alarm of an earlier audit" in capsys.readouterr().err
    assert (site / "audit.json").read_bytes() == before


def test_longer_updates_than_the_clip_end_an_audit_of_sums_in_clear(
    central: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator itself checks them, as in a run."""
    LONGER.plant(monkeypatch)
    code, _, err = ran(capsys, central, "--canaries", "8")
    assert (code, "norm of the update, in steps is" in err) == (2, True)


@pytest.mark.parametrize("mutant", LESS_NOISE_OF_THE_COORDINATOR, ids=str)
def test_less_noise_of_a_trusted_coordinator_raises_an_alarm(
    mutant: Mutant, central: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, central, "--canaries", "8")
    assert (code, result["alarm"]) == (3, True)
    expected = REPEATED if "declared" in mutant.new else NOISE
    assert expected in result["row"]["problem"]


@pytest.mark.parametrize("how", [how for how in REPEATS if how != "permuted"])
@pytest.mark.parametrize("name", ["site", "central"])
def test_noise_that_repeats_inside_a_round_raises_an_alarm(
    name: str,
    how: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = request.getfixturevalue(name)
    repeat_halves(monkeypatch, how)
    code, result, _ = ran(capsys, run, *FEW)
    assert code == 3
    assert TWICE in result["row"]["problem"]
    assert how != "again" or INSIDE in result["row"]["problem"]
    assert NOISE not in result["row"]["problem"]


@pytest.mark.slow
def test_a_hundredth_of_the_noise_of_sites_is_missed(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 30 rounds; by default there are 125."""
    Mutant(ENCODE, "self.variance, offset", "0.98 * self.variance, offset").plant(monkeypatch)
    code, result, _ = ran(capsys, site, "--canaries", "60")
    assert code == 3
    assert NOISE in result["row"]["problem"]


SKELLAM, GAUSSIAN = (
    "skellam(extra, self.variance, self.dimension)",
    'noise.child("count").gaussian(1, 2 * self.count_step * self.count_deviation)',
)
TWO = (*CENTRAL, "cohort.sites=2")
NOTHING_SENT = Mutant(ENCODE, "-1) if finite else 0", "-1) if finite else 1")
"""A site without records counts as one within the clip."""
NUMBERS = itertools.count()
"""Of runs: terms are cached."""


@pytest.mark.parametrize(
    ("overrides", "mutant", "rounds", "found"),
    [
        ((), None, 3, ""),
        (TWO, None, 3, ""),
        ((), NOTHING_SENT, 2, COUNT),
        ((), Mutant(ENCODE, "(1 if norm", "(3 if norm"), 2, COUNT),
        (TWO, NOTHING_SENT, 2, COUNT),
        (
            (),
            Mutant("privacy.mechanism.site_noise:distributed", "extra=((event.", "extra=() and ((event."),
            2,
            COORDINATE,
        ),
        ((), Mutant(TAIL_OF, SKELLAM, SKELLAM.replace("variance", "variance / 1e6")), 6, COORDINATE),
        ((), Mutant(TAIL_OF, SKELLAM, SKELLAM.replace("self.dimension", "0")), 6, OF_COORDINATE),
        (TWO, Mutant(ADD_NOISE, GAUSSIAN, f"1e-3 * {GAUSSIAN}"), 6, COORDINATE),
        (TWO, Mutant(ADD_NOISE, GAUSSIAN, GAUSSIAN.replace("count", "update", 1)), 6, OF_COORDINATE),
    ],
    ids=str,
)
def test_the_count_of_adaptive_clipping_is_audited(
    overrides: tuple[str, ...],
    mutant: Mutant | None,
    rounds: int,
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sites of a round add noise, or the coordinator of two."""
    if mutant is not None:
        mutant.plant(monkeypatch)
    adaptive = "[privacy.adaptive]\ncount_noise = 1.5\n"
    run = folder_of(tmp_path, SITE, adaptive, overrides=(*overrides, f"run.name=count-{next(NUMBERS)}"))
    code, result, _ = ran(capsys, run, "--canaries", str(2 * rounds))
    assert code == (0 if mutant is None else 3)
    assert found in result["row"]["problem"]


def test_noise_that_counts_on_colluding_sites_raises_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder_of(tmp_path, SITE, overrides=(*QUIET, "run.name=counted"))
    Mutant("protocol.plan.plan:Plan._honest", "self.quorum(n) - found.colluders", "self.cohort.size()").plant(
        monkeypatch
    )
    code, result, _ = ran(capsys, run, *FEW)
    assert code == 3
    assert NOISE in result["row"]["problem"]


GROUPS = ("cohort.sites=9", "aggregation.groups=3", "aggregation.colluders=0.0")
OF_COHORT = Mutant(
    TERMS,
    "sites, plan.honest(), bits",
    "plan.cohort.size(), plan.quorum(plan.cohort.size()), bits",
)
"""The noise of a group's sum is that of a sum over the whole cohort."""


@pytest.mark.parametrize("mutant", [None, OF_COHORT], ids=str)
def test_each_group_of_a_round_has_the_noise_that_is_charged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mutant: Mutant | None
) -> None:
    name = "run.name=groups" if mutant is None else "run.name=of-cohort"  # terms are cached
    run = folder_of(tmp_path, SITE, overrides=(*QUIET, *GROUPS, name))
    if mutant is not None:
        mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, "--canaries", "9")
    assert (code, result["alarm"]) == ((0, False) if mutant is None else (3, True))
    assert mutant is None or NOISE in result["row"]["problem"]


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


@pytest.mark.slow
def test_what_a_person_reads_says_both_figures(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(record), "--canaries", "20", "--steps", "2"]) == 0
    out, _ = capsys.readouterr()
    for word in ("audited   epsilon is at least", "claimed   epsilon is at most", "no alarm"):
        assert word in out
    for line, what in (
        (r"measured  standard deviation of the noise: \S+, charged 1", "noise"),
        (r"          what one unit changes, in clipping norms: \S+, charged 1", "clip"),
        (r"          rate at which units are drawn: \S+, charged 0.003", "rate"),
    ):
        assert re.search(rf"^{line}; an error of \S+ % would be found$", out, re.MULTILINE), what
