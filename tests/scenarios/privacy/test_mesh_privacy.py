"""Private rounds of the ranks of a mesh: the noised sums and the update of one process, with noise of the claimed
deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cloister.lm.model.model import load_model
from cloister.lm.parallel.mesh import Mesh
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.tests.lm.parallel.test_mesh import by_degrees, same_round
from cloister.tests.parties.ranks.rank_privacy import (
    CLIP,
    SIZES,
    PrivateJob,
    PrivateRound,
    Z,
    in_units,
    private,
    teaches_nothing,
    train_privately,
    train_with_a_failing_unit,
)
from cloister.tests.parties.ranks.rank_rounds import Job, several, start_of
from cloister.tests.parties.ranks.ranks import run_ranks
from cloister.tests.tools.mutants import Mutant

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

NOISE = NoiseStream.from_declared_seed(5)
MESHES = [Mesh(2, 1, 1), Mesh(1, 2, 1), Mesh(1, 1, 2), Mesh(2, 2, 1), Mesh(1, 2, 2)]
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")
ROLORA = ("model.adapter.scheme=rolora", "model.adapter.rank=1")
OWNERS = ("privacy.unit=owner", "data.owner=patient", "privacy.windows=2", "privacy.records=2")
HOOKS = "privacy.method=opacus"
on_all = pytest.mark.parametrize("mesh", MESHES, ids=by_degrees)


RELEASE = "clients.training.dpsgd:ClippedSum.release"
DIVIDED = [
    Mutant(RELEASE, "(values[begin:end], sigma,", "(values[begin:end], sigma / 2,"),
    Mutant(
        "clients.training.dpsgd:_add_to_columns",
        "(of_rows.reshape(-1), sigma,",
        "(of_rows.reshape(-1), sigma / 2,",
    ),
]
"""Noise divided by the number of ranks, as in an optimizer that divides it by the world size."""

SUM_IN_REPLICA = "lm.parallel.shards:Shards.sum_in_replica"
MUTANTS = [
    (Mesh(1, 2, 1), "records", Mutant(SUM_IN_REPLICA, '"shard", "tensor"', '"tensor",')),
    (Mesh(1, 1, 2), "records", Mutant(SUM_IN_REPLICA, '"shard", "tensor"', '"shard",')),
    (
        Mesh(1, 1, 2),
        "records",
        Mutant("clients.training.dpsgd:ClippedSum._norms", "if each.counts", "if True"),
    ),
    (Mesh(2, 1, 1), "records", Mutant(RELEASE, "self._weights.sum_over_replicas(self._sum)", "pass")),
    (
        Mesh(2, 1, 1),
        "records",
        Mutant("clients.training.dpsgd:PrivateTrainer._steps", "batch[weights.units]", "batch"),
    ),
    (
        Mesh(1, 2, 1),
        "nothing is learned",
        Mutant(RELEASE, "sigma, offset, threads", "sigma, begin, threads"),
    ),
]


def mutants_of(mesh: Mesh) -> list[tuple[str, list[Mutant]]]:
    """The rounds that a mesh trains with mutants."""
    divided = [("nothing is learned", DIVIDED)] if mesh.size == 2 else []
    return divided + [(name, [mutant]) for its, name, mutant in MUTANTS if its == mesh]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("private")


@cache
def jobs_for(mesh: Mesh, folder: Path) -> dict[str, PrivateJob]:
    """The rounds that a mesh trains, by what they show."""
    jobs = {
        "records": job_of(folder, "llama", "local.accumulation=2", "local.proximal=3"),
        "owners": job_of(folder, "llama", *OWNERS, owners=True),
        "nothing is learned": job_of(folder, "llama", "local.steps=1", nothing=True),
        "not finite": job_of(folder, "llama", poisoned=True),
    }
    if mesh.size > 2:
        return {name: jobs[name] for name in names(mesh)}
    if mesh.tensor == 1:
        jobs["adapter"] = job_of(folder, "llama", *ROLORA)
        jobs["tied"] = job_of(folder, "gpt2")
    else:
        jobs["norms of heads"] = job_of(folder, "qwen3")
    if mesh.shard == mesh.tensor == 1:
        jobs["nothing is learned, by hooks"] = job_of(folder, "llama", HOOKS, "local.steps=1", nothing=True)
        jobs["adapter, by hooks"] = job_of(folder, "llama", HOOKS, *FFA)
        jobs["records, by hooks"] = job_of(folder, "llama", HOOKS, "local.accumulation=2", "local.proximal=3")
    return jobs


@cache
def job_of(
    folder: Path,
    kind: str,
    *overrides: str,
    owners: bool = False,
    nothing: bool = False,
    poisoned: bool = False,
    sizes: Sequence[int] = SIZES,
) -> PrivateJob:
    plan = private(kind, *overrides)
    model = load_model(plan)
    start = model.layout.flatten(model.module)
    sequences = teaches_nothing() if nothing else in_units(sizes, owners=owners or poisoned)
    if poisoned:
        assert sequences.shares is not None
        sequences.shares[[2, 9]] = np.nan  # of a window of the second unit, and of one of the sixth
    path = folder / f"start-{len(list(folder.glob('start-*')))}.npy"
    np.save(path, start)
    return PrivateJob(Job(plan.to_json(), path), sequences, NOISE)


@cache
def by_one(job: PrivateJob) -> PrivateRound:
    return train_privately(None, jobs=[job])[0]


@dataclass(frozen=True)
class Found:
    """What the ranks of a mesh have found, for each rank."""

    rounds: dict[str, list[PrivateRound]]
    mutated: list[list[PrivateRound]]
    """The rounds of `mutants_of`, each with its mutants."""


@cache
def on(mesh: Mesh, folder: Path) -> Found:
    """Every round of a mesh, by all its ranks, done by the same processes; those with mutants come last."""
    jobs, mutants = jobs_for(mesh, folder), mutants_of(mesh)
    works = [partial(train_privately, jobs=list(jobs.values()))]
    works += [partial(train_privately, jobs=[jobs[name]], mutants=planted) for name, planted in mutants]
    rounds, *mutated = zip(*run_ranks(mesh, partial(several, works=works)), strict=True)
    by_job = [list(parts) for parts in zip(*rounds, strict=True)]
    return Found(
        dict(zip(jobs, by_job, strict=True)),
        [[part for (part,) in parts] for parts in mutated],
    )


def mutated(mesh: Mesh, name: str, mutants: list[Mutant], folder: Path) -> list[PrivateRound]:
    """A round with mutants, by all ranks."""
    return on(mesh, folder).mutated[mutants_of(mesh).index((name, mutants))]


def summed(rounds: Sequence[PrivateRound], size: int) -> list[Any]:
    """The noised sum (size,) of each step, from all ranks; those that have the same part must have the same bits."""
    sums = []
    for parts in zip(*(round.sums for round in rounds), strict=True):
        whole = np.full(size, np.nan, np.float32)
        for held, values in (each for part in parts for each in part):
            rows = np.arange(held.rows.start, held.rows.stop)[:, None] * held.width
            places = (held.offset + rows + np.arange(held.columns.start, held.columns.stop)).ravel()
            known = ~np.isnan(whole[places])
            assert np.array_equal(whole[places][known], values[known]), held
            whole[places] = values
        sums.append(whole)
    return sums


def names(mesh: Mesh) -> list[str]:
    """What `jobs_for` has, without making it."""
    if mesh.size > 2:
        return ["records", "nothing is learned"]
    either = ["adapter", "tied"] if mesh.tensor == 1 else ["norms of heads"]
    hooks = (
        ["nothing is learned, by hooks", "adapter, by hooks", "records, by hooks"]
        if mesh.shard == mesh.tensor == 1
        else []
    )
    return ["records", "owners", "nothing is learned", "not finite", *either, *hooks]


EACH = [pytest.param(mesh, name, id=f"{by_degrees(mesh)}-{name}") for mesh in MESHES for name in names(mesh)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), EACH)
def test_ranks_release_the_noised_sums_of_one_process(mesh: Mesh, name: str, folder: Path) -> None:
    job, found = jobs_for(mesh, folder)[name], on(mesh, folder).rounds[name]
    one = by_one(job)
    size = start_of(job.job).size
    assert one.update.tokens > 0 or "nothing" in name
    for together, alone in zip(summed(found, size), summed([one], size), strict=True):
        # The noise is the same to the bit; the gradients are rounded in another order.
        assert np.nanmax(np.abs(together - alone)) < 1e-4 * CLIP
        np.testing.assert_array_equal(
            np.isnan(together), np.isnan(alone), "a part that the round does not train"
        )
    assert len(one.sums) == len(found[0].sums)
    same_round([part.update for part in found], one.update)
    assert {part.method for part in found} == {"opacus" if "hooks" in name else "reference"}


# --- the noise that is released ---------------------------------------------------------------------------------------


def deviation(rounds: Sequence[PrivateRound], size: int) -> tuple[float, float, float]:
    """Sum of squares of what was released, in variances of the claimed noise, and the bounds of its chi-square law."""
    noise = np.concatenate(summed(rounds, size)).astype(np.float64) / (Z * CLIP)
    low, high = stats.chi2.interval(1 - 1e-9, noise.size)
    return float(low), float((noise**2).sum()), float(high)


NOISES = [(mesh, name) for mesh in MESHES for name in names(mesh) if name.startswith("nothing")]


@pytest.mark.parametrize(("mesh", "name"), NOISES, ids=lambda value: str(value).replace(" ", "-"))
def test_the_released_noise_has_the_claimed_deviation(mesh: Mesh, name: str, folder: Path) -> None:
    found = on(mesh, folder).rounds[name]
    low, squares, high = deviation(found, by_one(jobs_for(mesh, folder)[name]).update.vector.size)
    assert low <= squares <= high


@pytest.mark.parametrize("mesh", [Mesh(2, 1, 1), Mesh(1, 2, 1), Mesh(1, 1, 2)], ids=by_degrees)
def test_noise_that_is_divided_by_the_number_of_ranks_is_found(mesh: Mesh, folder: Path) -> None:
    job = jobs_for(mesh, folder)["nothing is learned"]
    parts = mutated(mesh, "nothing is learned", DIVIDED, folder)
    low, squares, _ = deviation(parts, by_one(job).update.vector.size)
    assert squares < low / 2


@pytest.mark.parametrize(("mesh", "name", "mutant"), MUTANTS, ids=lambda value: str(value).replace(" ", "-"))
def test_other_sums_are_found(mesh: Mesh, name: str, mutant: Mutant, folder: Path) -> None:
    """A norm of a part, a part that counts twice, units that count never or twice, noise at other places."""
    job = jobs_for(mesh, folder)[name]
    parts = mutated(mesh, name, [mutant], folder)
    alone = by_one(job)
    size = alone.update.vector.size
    try:
        sums = summed(parts, size)
    except AssertionError:  # ranks that have the same part have different sums of it
        return
    one = summed([alone], size)
    assert max(float(np.abs(each - other).max()) for each, other in zip(sums, one, strict=True)) > 1e-3 * CLIP


def test_replicas_count_a_unit_as_zero_on_which_the_model_fails(folder: Path) -> None:
    """No rank waits for another one within a unit, so the round goes on."""
    plan = private("llama", "privacy.sampling_rate=0.9", "local.steps=2")
    model = load_model(plan)
    np.save(folder / "fails.npy", model.layout.flatten(model.module))
    job = PrivateJob(Job(plan.to_json(), folder / "fails.npy"), in_units(), NOISE)
    (one,) = train_with_a_failing_unit(None, jobs=[job])
    (whole,) = train_privately(None, jobs=[job])
    ranks = run_ranks(Mesh(2, 1, 1), partial(train_with_a_failing_unit, jobs=[job]))
    size = model.layout.size
    for found, expected, without in zip(
        *(summed(each, size) for each in ([part for (part,) in ranks], [one], [whole])), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert not np.allclose(expected, without, rtol=0, atol=1e-4), "the unit was not drawn"
