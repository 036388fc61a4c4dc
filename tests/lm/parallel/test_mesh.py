"""A model trained by the ranks of a mesh against the same model trained by one process, and what a mesh refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.vector.span import check_pieces
from cloister.clients.checks.doctor import site_bytes
from cloister.clients.checks.memory_estimate import estimated_memory
from cloister.lm.measures.confusion import Confusion
from cloister.lm.model.model import configuration, load_model, save_pretrained
from cloister.lm.parallel.mesh import Mesh, choose
from cloister.lm.parallel.shards import Cuts, Region, between, region
from cloister.lm.tasks.task import HeldOut
from cloister.lm.training.train import LocalUpdate
from cloister.protocol.errors import ModelError
from cloister.protocol.messages.blocks import Span
from cloister.protocol.plan.soundness import from_json, parse
from cloister.tests.parties.ranks.rank_rounds import (
    UNUSED,
    Held,
    Job,
    change,
    forward_passes,
    generated,
    held,
    refused_update,
    score,
    several,
    tiny,
    train,
    train_after_a_forward_pass,
    train_compiled,
)
from cloister.tests.parties.ranks.ranks import run_ranks
from cloister.tests.tools.carrying import carry_in
from cloister.tests.tools.raises import raises

# PEFT asks transformers 5.23 for a property under the name that transformers is phasing out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

MESHES = [Mesh(2, 1, 1), Mesh(1, 2, 1), Mesh(1, 1, 2), Mesh(1, 2, 2)]
DATA = [Mesh(2, 1, 1), Mesh(1, 2, 1)]
TENSOR = [Mesh(1, 1, 2), Mesh(1, 2, 2)]
KEEP, MUON = "local.optimizer_state=keep", "local.optimizer=muon"
DIVIDED = ("local.batch_size=5", "local.accumulation=2", "local.proximal=30")
"""Rows that two ranks do not share equally, in several micro-batches. The penalty shows a gradient of the loss that has
another length, which clipping hides."""


def by_degrees(mesh: Mesh) -> str:
    return f"{mesh.replicate}-{mesh.shard}-{mesh.tensor}"


on_all = pytest.mark.parametrize("mesh", MESHES, ids=by_degrees)
on_data = pytest.mark.parametrize("mesh", DATA, ids=by_degrees)
on_tensor = pytest.mark.parametrize("mesh", TENSOR, ids=by_degrees)

LLAMA: tuple[str, ...] = ("llama",)
BFLOAT16, ROUNDED_LLAMA = Mesh(1, 2, 2), ("llama", "local.precision=bfloat16")
ALL = [LLAMA, ("llama", *DIVIDED)]
WITH_TENSOR = [("qwen3",), ("llama", "model.config.tie_word_embeddings=true")]
FFA = ("llama", "model.adapter.scheme=ffa-lora", "model.adapter.rank=2")
CLASSES = (
    "llama",
    "data.task=classify",
    'data.classes=["a", "b", "c"]',
    "data.class_weights=[0.5, 1, 20]",
    *DIVIDED,
)
TARGETS = ("t5", "data.task=sequence-to-sequence", "data.format=prompt", "data.target_length=8", *DIVIDED)
PREFERENCES = (*FFA, "data.task=prefer", "data.format=prompt", *DIVIDED)
ENTITIES = ("bert", "data.task=token-classify", 'data.classes=["a"]', *DIVIDED)
MASKED = ("bert", "data.task=masked", "data.mask_share=0.3", *DIVIDED)
WITH_DATA = [
    FFA,
    ("llama", "model.adapter.scheme=rolora", "model.adapter.rank=1", *DIVIDED),
    ("llama", "aggregation.part=0.5", *DIVIDED),
    ("gpt2",),
    CLASSES,
    TARGETS,
    PREFERENCES,
    ENTITIES,
    MASKED,
]
REPLICAS, WITH_MUON = Mesh(2, 1, 1), (*FFA, MUON)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@cache
def one_process(folder: Path, kind: str, *overrides: str) -> tuple[Job, LocalUpdate]:
    """A round from the plan's initial model, and its result."""
    plan = tiny(kind, *overrides)
    model = load_model(plan)
    path = folder / f"start-{len(list(folder.glob('start-*')))}.npy"
    np.save(path, model.layout.flatten(model.module))
    job = Job(plan.to_json(), path)
    return job, train(None, jobs=[job])[0]


@dataclass(frozen=True)
class Found:
    """What the ranks of a mesh have found, for each rank."""

    rounds: dict[tuple[str, ...], list[LocalUpdate]]
    changes: list[tuple[int, Any]]
    held: list[Held]
    scores: list[HeldOut]
    packed: list[LocalUpdate]
    """Of a round of packed records, with activation checkpointing."""
    bfloat16: list[list[LocalUpdate]]
    """Of rounds in bfloat16, without and with activation checkpointing, on `BFLOAT16`."""
    generated: list[list[HeldOut]]
    """Of the targets that the model answers with, on `DATA`."""


@cache
def on(mesh: Mesh, folder: Path) -> Found:
    """Everything that needs this mesh, done by the same ranks."""
    plans = plans_of(mesh)
    job, _ = one_process(folder, *LLAMA)
    np.save(folder / "end.npy", end_of(job))
    bfloat16, _ = one_process(folder, *ROUNDED_LLAMA)
    rounded = [bfloat16, replace(bfloat16, checkpointing=True)] if mesh == BFLOAT16 else []
    answering = [partial(generated, job=one_process(folder, *TARGETS)[0])] if mesh in DATA else []
    rounds, changes, parts, scores, packed, in_bfloat16, *answers = zip(
        *run_ranks(
            mesh,
            partial(
                several,
                works=[
                    partial(train, jobs=[one_process(folder, *plan)[0] for plan in plans]),
                    partial(change, job=job, end=folder / "end.npy"),
                    partial(held, job=job),
                    partial(score, job=replace(job, packed=True)),
                    partial(train, jobs=[replace(job, packed=True, checkpointing=True)]),
                    partial(train, jobs=rounded),
                    *answering,
                ],
            ),
        ),
        strict=True,
    )
    by_plan = [list(updates) for updates in zip(*rounds, strict=True)]
    return Found(
        dict(zip(plans, by_plan, strict=True)),
        list(changes),
        list(parts),
        list(scores),
        [update for (update,) in packed],
        [list(updates) for updates in zip(*in_bfloat16, strict=True)],
        [list(each) for each in answers],
    )


def plans_of(mesh: Mesh) -> list[tuple[str, ...]]:
    return [
        *ALL,
        *(WITH_TENSOR if mesh.tensor > 1 else WITH_DATA),
        *([WITH_MUON] if mesh == REPLICAS else []),
    ]


def end_of(job: Job) -> Any:
    """A model not far from the job's global model."""
    start = np.load(job.start)
    return start + np.random.default_rng(1).normal(0, 1e-3, start.size).astype(np.float32)


def joined(parts: Sequence[LocalUpdate], size: int) -> Any:
    whole = np.concatenate([part.vector for part in parts])
    assert (whole.size, whole.dtype.name) == (size, "float32")
    return whole


def same_round(parts: Sequence[LocalUpdate], whole: LocalUpdate) -> None:
    """Check that the ranks' results are that of one process."""
    vector = joined(parts, whole.vector.size)
    assert np.abs(vector - whole.vector).max() < 1e-4 * np.abs(whole.vector).max()
    assert {part.loss for part in parts} == {parts[0].loss}
    assert parts[0].loss == pytest.approx(whole.loss, abs=1e-5)
    assert {part.tokens for part in parts} == {whole.tokens}


# --- the same round ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("plan", ALL, ids=["plain", "divided"])
@on_all
def test_ranks_train_as_one_process(mesh: Mesh, plan: tuple[str, ...], folder: Path) -> None:
    same_round(on(mesh, folder).rounds[plan], one_process(folder, *plan)[1])


@pytest.mark.parametrize("plan", WITH_TENSOR, ids=["norms-of-heads", "tied"])
@on_tensor
def test_models_under_tensor_parallelism(mesh: Mesh, plan: tuple[str, ...], folder: Path) -> None:
    same_round(on(mesh, folder).rounds[plan], one_process(folder, *plan)[1])


@pytest.mark.parametrize(
    "plan",
    WITH_DATA,
    ids=["ffa-lora", "rolora", "sparse", "tied", "classes", "targets", "preferences", "entities", "masked"],
)
@on_data
def test_adapters_and_models_under_data_parallelism(mesh: Mesh, plan: tuple[str, ...], folder: Path) -> None:
    """Rank 1 of two shards has nothing of an A of rank 1."""
    same_round(on(mesh, folder).rounds[plan], one_process(folder, *plan)[1])


def test_muon_steps_on_whole_matrices_in_replicas(folder: Path) -> None:
    same_round(on(REPLICAS, folder).rounds[WITH_MUON], one_process(folder, *WITH_MUON)[1])


def test_ranks_train_with_the_weights_of_classes(folder: Path) -> None:
    """Without the weights the update that they are compared with is another one."""
    weighted, plain = (
        one_process(folder, *plan)[1] for plan in (CLASSES, (*CLASSES, "data.class_weights=[]"))
    )
    assert np.linalg.norm(weighted.vector - plain.vector) > 0.1 * np.linalg.norm(plain.vector)


@on_all
def test_packed_records_and_checkpointing(mesh: Mesh, folder: Path) -> None:
    job, other = one_process(folder, *LLAMA)
    whole = train(None, jobs=[replace(job, packed=True)])[0]
    same_round(on(mesh, folder).packed, whole)
    assert np.linalg.norm(whole.vector - other.vector) > 0.01 * np.linalg.norm(whole.vector)


@on_all
def test_ranks_evaluate_as_one_process(mesh: Mesh, folder: Path) -> None:
    job, _ = one_process(folder, *LLAMA)
    whole = score(None, job=replace(job, packed=True))
    assert whole.loss != pytest.approx(score(None, job=job).loss, abs=1e-4), "attention stays within a record"
    given = np.array(Confusion.counted(whole.counts, "choice", 3).counts).sum(0)
    assert given.sum() == 5 > given.max()
    for found in on(mesh, folder).scores:
        assert found.loss_nats == pytest.approx(whole.loss_nats, rel=1e-6)
        assert (found.correct, found.tokens) == (whole.correct, whole.tokens)
        assert found.counts == whole.counts


@on_data
def test_ranks_generate_the_targets_of_one_process(mesh: Mesh, folder: Path) -> None:
    """Two ranks share seven rows in batches of five, so that one has more rows than the other."""
    job, _ = one_process(folder, *TARGETS)
    whole = generated(None, job=job)
    assert whole.counts["generated targets"] == 7
    for found in on(mesh, folder).generated[0]:
        assert found.loss_nats == pytest.approx(whole.loss_nats, rel=1e-6)
        assert (found.correct, found.tokens, found.counts) == (whole.correct, whole.tokens, whole.counts)


@on_all
def test_equal_weights_give_equal_bytes(mesh: Mesh, folder: Path) -> None:
    job, _ = one_process(folder, *LLAMA)
    expected = end_of(job) - np.load(job.start)
    found = on(mesh, folder).changes
    check_pieces(found, expected.size, np.float32)
    assert all(vector.size for _, vector in found)
    assert b"".join(vector.tobytes() for _, vector in found) == expected.tobytes()


@on_all
def test_a_rank_has_its_part_and_the_right_buffers(mesh: Mesh, folder: Path) -> None:
    whole = held(None, job=one_process(folder, *LLAMA)[0])
    most = {Mesh(2, 1, 1): 1.0, Mesh(1, 2, 1): 0.51, Mesh(1, 1, 2): 0.65, Mesh(1, 2, 2): 0.33}
    parts = on(mesh, folder).held
    for found in parts:
        assert found.names == whole.names
        assert found.buffers.keys() == whole.buffers.keys() != set()
        for name, buffer in whole.buffers.items():
            np.testing.assert_array_equal(found.buffers[name], buffer)
        assert found.elements <= most[mesh] * whole.elements
    assert sum(part.first for part in parts) == whole.elements, "one rank writes each part of a state"
    assert len({part.draws for part in parts}) == mesh.data, "dropout of each row"


@on_all
def test_what_a_rank_will_hold_is_known_before_it_starts(mesh: Mesh, folder: Path) -> None:
    found = estimated_memory(tiny(*LLAMA), mesh)
    assert [each.part.parameters for each in found] == [each.elements for each in on(mesh, folder).held]


@pytest.mark.slow
def test_a_rank_without_rows_takes_part(folder: Path) -> None:
    plans = [(*LLAMA, f"local.batch_size={rows}") for rows in (1, 2)]
    jobs = [one_process(folder, *plan)[0] for plan in plans]
    found = run_ranks(Mesh(1, 3, 1), partial(train, jobs=jobs))
    for plan, parts in zip(plans, zip(*found, strict=True), strict=True):
        same_round(parts, one_process(folder, *plan)[1])


def test_bfloat16_changes_little(folder: Path) -> None:
    _, whole = one_process(folder, *ROUNDED_LLAMA)
    found = on(BFLOAT16, folder).bfloat16
    assert len(found) == 2
    for parts in found:
        vector = joined(parts, whole.vector.size)
        assert np.linalg.norm(vector - whole.vector) < 0.02 * np.linalg.norm(whole.vector)
        assert parts[0].loss == pytest.approx(whole.loss, rel=1e-3)


@pytest.mark.slow
def test_checkpointing_compilation_and_weights_that_were_gathered_before(folder: Path) -> None:
    """Activations are computed again, each block is compiled once, and a round does not use the weights of an
    evaluation before it."""
    job, whole = one_process(folder, *LLAMA)
    checkpointed = replace(job, checkpointing=True)
    once, twice, rounds, after, compiled = zip(
        *run_ranks(
            Mesh(1, 2, 1),
            partial(
                several,
                works=[
                    partial(forward_passes, job=job),
                    partial(forward_passes, job=checkpointed),
                    partial(train, jobs=[checkpointed]),
                    partial(train_after_a_forward_pass, job=job),
                    partial(train_compiled, job=job),
                ],
            ),
        ),
        strict=True,
    )
    assert (once, twice) == ((2, 2), (4, 4))
    same_round([parts[0] for parts in rounds], whole)
    same_round(after, whole)
    updates, graphs = zip(*compiled, strict=True)
    same_round(updates, whole)
    assert all(number > 0 for number in graphs)


# --- kept optimizer state ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kept_moments_go_on_on_any_other_mesh(folder: Path, tmp_path: Path) -> None:
    """The moments of each round are those of the newest one, whatever mesh that had, and each is written once."""
    job, first = one_process(folder, "llama", KEEP)
    alone, changing = tmp_path / "alone", tmp_path / "changing"
    meshes = [Mesh(1, 2, 2), Mesh(2), None, Mesh(1, 1, 2)]
    for round, mesh in enumerate(meshes, 1):
        expected = train(None, jobs=[replace(job, round=round, carry=carry_in(alone, round))])[0]
        work = partial(train, jobs=[replace(job, round=round, carry=carry_in(changing, round))])
        parts = [train(None, jobs=work.keywords["jobs"])] if mesh is None else run_ranks(mesh, work)
        same_round([part[0] for part in parts], expected)
        assert [path.name for path in (changing / str(round)).iterdir()] == ["moments"]
        kept = [np.fromfile(each / str(round) / "moments", np.float32) for each in (alone, changing)]
        steps = len(kept[0]) - 2 * first.vector.size
        assert set(kept[0][:steps]) == set(kept[1][:steps]) == {2.0 * round}
        for found, right in zip(*(np.split(each[steps:], 2) for each in reversed(kept)), strict=True):
            assert np.abs(found - right).max() < 1e-4 * np.abs(right).max() > 0
    plan = from_json(job.plan)
    not_kept = plan.model_copy(update={"local": plan.local.model_copy(update={"optimizer_state": "reset"})})
    counted = site_bytes(plan) - site_bytes(not_kept)
    assert 2 * kept[1].nbytes == pytest.approx(counted, rel=0.01)  # those of two rounds are kept
    reset = train(None, jobs=[replace(job, round=4)])[0]
    assert np.abs(reset.vector - expected.vector).max() > 1e-2 * np.abs(first.vector).max()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_every_rank_refuses_an_update_that_is_not_finite_in_one_span(folder: Path, tmp_path: Path) -> None:
    job, _ = one_process(folder, "llama")
    start = np.load(job.start)
    layout = load_model(tiny("llama")).layout
    layout.split(start)["model.embed_tokens.weight"][UNUSED] = np.inf
    np.save(tmp_path / "start.npy", start)
    refused = run_ranks(
        Mesh(1, 2, 1), partial(refused_update, job=replace(job, start=tmp_path / "start.npy"))
    )
    assert all("round 1 is 'non-finite'" in error for error in refused)


def test_another_number_of_processes_is_refused(folder: Path) -> None:
    job, _ = one_process(folder, "llama")
    with raises(ModelError, "mesh", says=("replicate 2", "product of 1")):
        run_ranks(Mesh(2, 1, 1), partial(train, jobs=[job]), processes=1)


MOE = ("model.config.moe_intermediate_size=16", "model.config.num_experts=2")


@pytest.mark.parametrize(
    ("mesh", "kind", "overrides", "field", "says"),
    [
        (Mesh(4, 2, 2), "llama", (), "mesh", ("replicate 4, shard 2", "at most 8", "16")),
        (Mesh(tensor=4), "llama", (), "mesh.tensor", "num_key_value_heads = 2"),
        (Mesh(tensor=3), "llama", (), "mesh.tensor", "num_attention_heads = 4"),
        (
            Mesh(tensor=2),
            "llama",
            ("model.config.intermediate_size=69",),
            "mesh.tensor",
            "intermediate_size = 69",
        ),
        (Mesh(tensor=2), "gpt2", (), "mesh.tensor", ("gpt2 is missing", "mesh.shard")),
        (Mesh(tensor=2), "qwen3_moe", MOE, "mesh.tensor", ("qwen3_moe", "packed_colwise")),
        (
            Mesh(tensor=2),
            "llama",
            ("model.adapter.scheme=ffa-lora",),
            "mesh.tensor",
            ("model.adapter.scheme = 'ffa-lora'", "mesh.shard"),
        ),
    ],
)
def test_a_mesh_that_does_not_fit(
    mesh: Mesh, kind: str, overrides: tuple[str, ...], field: str, says: str | tuple[str, ...]
) -> None:
    plan = tiny(kind, *overrides)
    with raises(ModelError, field, says=says):
        mesh.check(8, configuration(plan), plan.model.adapter.scheme)


def test_meshes_that_fit() -> None:
    fit = [(Mesh(2, 2, 1), "gpt2"), (Mesh(1, 2, 2), "qwen3"), (Mesh(2, 1, 2), "llama")]
    for mesh, kind in fit:
        mesh.check(4, configuration(tiny(kind)), "full")


def test_what_auto_means() -> None:
    card = 80 * 2**30
    assert choose(1, card, 10**11) == Mesh()
    assert choose(8, card, 10**9) == Mesh(replicate=8)
    assert choose(8, card, 8 * 10**9) == Mesh(shard=8)
    assert choose(8, card, 10**7, frozen=8 * 10**9) == Mesh(replicate=8)
    assert choose(8, card, 3 * 10**9) == Mesh(replicate=8)
    assert choose(8, card, 3 * 10**9, private=True) == Mesh(shard=8)
    assert choose(8, card, 10**7, frozen=7 * 10**10) == Mesh(shard=8)


# --- geometry ---------------------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    mesh=st.builds(Mesh, st.integers(1, 2), st.integers(1, 4), st.integers(1, 3)),
    tensor=st.sampled_from([-1, 0, 1]),
)
def test_a_region_is_what_torch_gives_a_rank(shape: list[int], mesh: Mesh, tensor: int) -> None:
    if tensor == 1 and len(shape) != 2:
        tensor = 0
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        part = whole
        for dimension, parts, index in ((tensor, mesh.tensor, at.tensor), (0, mesh.shard, at.shard)):
            if dimension >= 0:
                chunks = torch.chunk(part, parts, dimension)
                part = chunks[index] if index < len(chunks) else part[:0]
        rows, columns = region(shape, Cuts(tensor, 0), mesh, at)
        found = whole.reshape(shape[0], -1)[rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(found.flatten(), part.flatten())


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    edges=st.lists(st.integers(0, 49), min_size=2, max_size=2).map(sorted),
    cuts=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_regions_have_each_element_of_a_span_once(
    rows: int, columns: int, edges: list[int], cuts: tuple[int, int]
) -> None:
    begin, end = (min(edge, rows * columns) for edge in edges)
    row, column = min(cuts[0], rows), min(cuts[1], columns)
    seen = np.zeros((rows, columns), int)
    for across in (Span(0, row), Span(row, rows)):
        for along in (Span(0, column), Span(column, columns)):
            for each in between(Region(across, along), columns, begin, end):
                seen[each.rows.start : each.rows.stop, each.columns.start : each.columns.stop] += 1
    expected = np.zeros(rows * columns, int)
    expected[begin:end] = 1
    np.testing.assert_array_equal(seen.reshape(-1), expected)


# --- a model without memory -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_laid_out_without_its_weights(tmp_path: Path) -> None:
    plan = tiny("llama", "model.config.tie_word_embeddings=true")
    model = load_model(plan)
    save_pretrained(model, model.layout.flatten(model.module), tmp_path / "saved")
    here = parse("", [f"model.name={tmp_path / 'saved'}", "data.sequence_length=16"])
    empty = load_model(here, empty=True)
    assert all(parameter.is_meta for parameter in empty.module.parameters())
    assert not any(buffer.is_meta for buffer in empty.module.buffers())
    assert empty.layout == model.layout


def test_buffers_of_a_checkpoint_are_read_from_it(tmp_path: Path) -> None:
    """Such as the bias of a router, which the global model does not have."""
    plan = tiny("deepseek_v3", *(f"model.config.{setting}" for setting in ROUTED))
    model = load_model(plan)
    for name, buffer in model.module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.fill_(0.25)
    save_pretrained(model, model.layout.flatten(model.module), tmp_path / "saved")
    here = parse("", [f"model.name={tmp_path / 'saved'}", "data.sequence_length=16"])
    found = dict(load_model(here, empty=True).module.named_buffers())
    biases = [buffer for name, buffer in found.items() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bool((buffer == 0.25).all()) for buffer in biases)


ROUTED = [
    *("n_routed_experts=4", "n_group=1", "topk_group=1", "num_experts_per_tok=2", "first_k_dense_replace=1"),
    *("q_lora_rank=8", "kv_lora_rank=8", "qk_rope_head_dim=4", "qk_nope_head_dim=4", "v_head_dim=4"),
    *("moe_intermediate_size=8", "num_key_value_heads=4"),
]
