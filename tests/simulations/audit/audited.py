"""Runs to audit, what an audit says of them, and defects of both units."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.cli.main import main
from cloister.lm.model.model import load_model
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.sum.spending import Spending
from cloister.simulations.federation import lay_out
from cloister.tests.tools.mutants import (
    STEPS,
    Mutant,
)

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


def ran(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """An audit of a run that several tests audit: the alarm of another one is not of it."""
    (run / "audit.json").unlink(missing_ok=True)
    capsys.readouterr()
    code = main(["audit", str(run), "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


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
