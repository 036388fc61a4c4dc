"""`cloister site check` of a site's devices: what each rank will hold, a step where they are here, what is refused."""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloister.clients.holdings import holdings
from cloister.lm.mesh import Mesh, build
from cloister.lm.model import load_model
from cloister.tests.command import found, lone_refusal, ran, refusal, set_options
from cloister.tests.federation import RECORD, SKELLAM, TINY, tiny
from cloister.tests.rank_work import dies_at_start, interrupts_the_site


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
    ("settings", "mesh"),
    [(["local.optimizer_state=keep", *SKELLAM], {"shard": 2}), (RECORD, {}), (RECORD, {"replicate": 2})],
    ids=["two-ranks", "private-alone", "private-ranks"],
)
def test_a_step_is_taken_without_data_charge_or_file(
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
    assert (answer["ran"], answer["absent"], len(answer["ranks"])) == (True, [], max([1, *mesh.values()]))
    assert answer["seconds_per_step"] > 0
    expected = 4 * 15 * (4 if settings == RECORD else 1)  # a record has up to 4 windows
    tokens = answer["tokens_per_second"] * answer["seconds_per_step"]
    assert 0 < tokens == pytest.approx(expected, rel=2 if settings == RECORD else 1e-9)
    for rank in answer["ranks"]:
        assert rank["device"] == "cpu"
        assert rank["needed_bytes"] < rank["peak_bytes"] < rank["memory_bytes"]


def test_private_units_go_through_the_private_trainer(
    check: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Which refuses Opacus for this model, in one line, though it does so in another process."""
    model = ["model.name=builtin:gpt2", "model.config={n_embd=16,n_head=2}"]
    code, _, err = ran(capfd, *check(*RECORD, *model, "privacy.method=opacus"))
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("cloister: privacy.method is 'opacus': expected reference or auto")


def no_rank_is_left() -> bool:
    return not [each for each in multiprocessing.active_children() if each.name.startswith("cloister rank")]


def test_a_rank_that_dies_is_one_line(
    check: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("cloister.clients.rank.main", dies_at_start)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, _, err = ran(capfd, *check(shard=2))
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith(
        "cloister: rank 1 of 2 on cpu: expected one that connects to its peers, but it was killed"
    )
    (log,) = tmp_path.glob("cloister-ranks-*.log")
    assert line.endswith(f"see {log}")
    assert no_rank_is_left()


def test_ctrl_c_is_one_line(
    check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cloister.clients.rank.main", interrupts_the_site)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = ran(capsys, *check(shard=2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, err) == (130, "cloister: interrupted\n")
    assert no_rank_is_left()


def test_ranks_that_need_more_than_the_machine_has_are_not_started(
    check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cloister.clients.rank.main", dies_at_start)
    monkeypatch.setattr("cloister.cli.devices.memory_of", lambda device: 10_000)
    line = refusal(capsys, *check(shard=2))
    assert "mesh is 'replicate 1, shard 2, tensor 1" in line
    assert "at most the 10 kB of cpu, but those on it need" in line
    assert line.endswith("check for GPUs of another machine with --device cuda")


# Where they are not


def absent(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = ran(capsys, *arguments, "--json")
    assert (code, err) == (4, "")
    answer = json.loads(out)
    assert (answer["ran"], answer["seconds_per_step"]) == (False, None)
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
    assert said.startswith("devices absent: not run here: this machine lacks 64 of the 64 devices")
    assert len(table) < 25
    assert max(map(len, table)) <= 80
    assert any("0-63" in line for line in table)


def test_few_ranks_are_built_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def counted(mesh: Mesh, device: str) -> Any:
        built.append(mesh)
        return build(mesh, device)

    monkeypatch.setattr("cloister.clients.holdings.build", counted)
    assert len(holdings(tiny(), Mesh(shard=8, replicate=16))) == 128
    assert len(built) <= 4


def test_every_block_of_a_pipeline_is_in_one_stage() -> None:
    plan = tiny("model.config.num_hidden_layers=10")
    stages = [each.part.parameters for each in holdings(plan, Mesh(pipeline=8))]
    assert sum(stages) == holdings(plan, Mesh())[0].part.parameters
    assert stages[1] == 2 * stages[2]
    assert len(set(stages[2:7])) == 1


@pytest.mark.parametrize("scheme", ["ffa-lora", "rolora"])
def test_only_the_trained_factors_of_an_adapter_have_gradients(scheme: str) -> None:
    plan = tiny(f"model.adapter.scheme={scheme}", "model.adapter.base_precision=bfloat16")
    model = load_model(plan)
    stored = sum(each.numel() * each.element_size() for each in model.module.parameters())
    rounds = [sum(each.numel() for _, each in model.trainable_in_round(number)) for number in (1, 2)]
    (one,) = holdings(plan, Mesh())
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
