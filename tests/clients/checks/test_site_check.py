"""`cloister site check` of a site's devices: what each rank will hold, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloister.clients.checks.memory_estimate import estimated_memory
from cloister.lm.model.model import load_model
from cloister.lm.model.schedule import Schedule
from cloister.lm.parallel.mesh import SUM_BYTES, Mesh, build
from cloister.tests.parties.federation import RECORD, TINY, tiny
from cloister.tests.tools.command import found, lone_refusal, ran, refusal, set_options


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The arguments that check the devices of a site without data, on a machine without GPUs, for the tiny plan."""
    (tmp_path / "plan.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def arguments(*settings: str, device: str = "cpu", **mesh: int) -> list[str]:
        table = "".join(f"{name} = {degree}\n" for name, degree in mesh.items())
        (tmp_path / "site.toml").write_text(
            f'name = "a"\ndata = "missing.jsonl"\nstate = "state"\ndevice = "{device}"\n[mesh]\n{table}'
        )
        changed = set_options(settings)
        return ["site", "check", "site.toml", "plan.toml", "--only", "devices", *changed]

    return arguments


# Where the devices are here


@pytest.mark.parametrize(
    ("settings", "mesh"), [(RECORD, {}), ([], {"shard": 2})], ids=["private-alone", "two-ranks"]
)
def test_what_each_rank_holds_is_compared_with_the_machine(
    settings: list[str],
    mesh: dict[str, int],
    check: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = check(*settings, **mesh)
    before = sorted(tmp_path.rglob("*"))
    answer = found(capsys, *call)
    assert sorted(tmp_path.rglob("*")) == before
    assert (answer["absent"], len(answer["ranks"])) == ([], max([1, *mesh.values()]))
    for rank in answer["ranks"]:
        assert rank["device"] == "cpu"
        assert rank["sums_bytes"] == (SUM_BYTES * rank["parameters"] if settings else 0)
        assert 0 < rank["needed_bytes"] < rank["memory_bytes"]


def test_ranks_that_need_more_than_the_machine_has_are_refused(
    check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cloister.cli.verbs.devices.memory_of", lambda device: 10_000)
    line = refusal(capsys, *check(shard=2))
    assert "mesh is 'replicate 1, shard 2, tensor 1" in line
    assert "at most the 10 kB of cpu, but those on it need" in line
    assert line.endswith("check for GPUs of another machine with --device cuda")


# Where they are not


def absent(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = ran(capsys, *arguments, "--json")
    assert (code, err) == (4, "")
    answer = json.loads(out)
    assert len(answer["absent"]) == len(answer["ranks"])
    assert isinstance(answer, dict)
    return answer


@pytest.mark.parametrize(
    "mesh", [{"shard": 8}, {"replicate": 2, "shard": 4}], ids=["shard", "replicate-shard"]
)
def test_the_ranks_of_absent_gpus_together_hold_the_model(
    mesh: dict[str, int], check: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted on the model itself, with its weights."""
    answer = absent(capsys, *check(device="cuda", **mesh))
    model = load_model(tiny())
    shapes = {name: tuple(each.shape) for name, each in model.module.named_parameters()}
    whole, copies = sum(map(math.prod, shapes.values())), mesh.get("replicate", 1)
    ranks = answer["ranks"]
    assert [rank["device"] for rank in ranks] == [f"cuda:{number}" for number in range(8)]
    assert sum(rank["parameters"] for rank in ranks) == copies * whole
    for what, factor in (("weights", 4), ("gradients", 4), ("moments", 8)):
        assert [rank[f"{what}_bytes"] for rank in ranks] == [factor * rank["parameters"] for rank in ranks]
    edges = [edge for rank in ranks for edge in rank["span"]]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0, whole)
    assert (
        sum(rank["update_bytes"] for rank in ranks) == sum(rank["coded_bytes"] for rank in ranks) == 4 * whole
    )
    block = sum(math.prod(shape) for name, shape in shapes.items() if ".layers.0." in name)
    assert {rank["gathered_bytes"] for rank in ranks} == {4 * max(block, whole - block)}


def test_the_moments_on_disk_are_counted_once(
    check: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two moments, of a round and of the one before, however many replicas there are."""
    reset, kept = (
        absent(capsys, *check(f"local.optimizer_state={each}", device="cuda", replicate=3))
        for each in ("reset", "keep")
    )
    assert kept["state_bytes"] - reset["state_bytes"] == 16 * reset["ranks"][0]["parameters"]


def test_a_mesh_of_64_gpus_is_a_narrow_table(
    check: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ran(capsys, *check(device="cuda", replicate=32, shard=2))
    assert (code, err) == (4, "")
    table, said = out.splitlines()[:-1], out.splitlines()[-1]
    assert said.startswith("devices absent: this machine lacks 64 of the 64 devices")
    assert len(table) < 25
    assert max(map(len, table)) <= 80
    assert any("0 to 63: 64" in line for line in table)


def test_few_ranks_are_built_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def counted(mesh: Mesh, device: str) -> Any:
        built.append(mesh)
        return build(mesh, device)

    monkeypatch.setattr("cloister.clients.checks.memory_estimate.build", counted)
    assert len(estimated_memory(tiny(), Mesh(shard=8, replicate=16))) == 128
    assert len(built) <= 4


@pytest.mark.parametrize("scheme", ["ffa-lora", "rolora"])
def test_only_the_trained_factors_of_an_adapter_have_gradients(scheme: str) -> None:
    plan = tiny(f"model.adapter.scheme={scheme}", "model.adapter.base_precision=bfloat16")
    model = load_model(plan)
    stored = sum(each.numel() * each.element_size() for each in model.module.parameters())
    rounds = [Schedule.of(plan, model.layout).of_round(number).size for number in (1, 2)]
    (one,) = estimated_memory(plan, Mesh())
    assert (one.part.weights, one.part.gradients, one.part.moments) == (
        stored,
        4 * max(rounds),
        8 * max(rounds),
    )
    assert one.span.size == model.layout.size
    assert one.part.gathered == 0


# What is refused


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mesh_that_does_not_fit_the_model_is_refused(
    device: str, check: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = "mesh.tensor is 4: expected a divisor of the model's num_attention_heads = 2"
    assert refused in lone_refusal(capsys, *check(device=device, tensor=4))
    assert "mesh.shard is 0" in lone_refusal(capsys, *check(device=device, shard=0))
    assert "device is 'gpu'" in lone_refusal(capsys, *check(device="gpu"))


def test_a_wrong_mesh_is_refused_before_data_is_prepared(
    check: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    both = [argument for argument in check(tensor=4) if argument not in ("--only", "devices")]
    assert "mesh.tensor is 4" in lone_refusal(capsys, *both)
