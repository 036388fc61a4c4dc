"""A site whose ranks train, code and mask: the same update as one process gives, and what a killed rank costs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cloister.aggregation.sums import Sums
from cloister.clients.ranks import device_mesh
from cloister.clients.ranks.device_mesh import mesh_for
from cloister.clients.ranks.ranks import Ranks
from cloister.clients.ranks.resident import Resident
from cloister.clients.ranks.team import Team
from cloister.clients.site import Site
from cloister.clients.state.kept import Kept, run_folder, write_pieces
from cloister.lm.model.model import load_model, save_pretrained
from cloister.lm.parallel.mesh import Mesh
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import ModelError, RankError, StepError, StorageError
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.plan import MeshSection
from cloister.simulations.federation import declare_rounding
from cloister.tests.clients.test_site import Attack, in_clear
from cloister.tests.parties.federation import RECORD, RUN, SKELLAM, Federation, tiny, whole
from cloister.tests.parties.federation import whole as whole_vector
from cloister.tests.parties.ranks.rank_work import unpickles_nothing_of_peers
from cloister.tests.tools.command import found, refusal, set_options
from cloister.tests.tools.raises import raises

MESHES = {
    "replicate": MeshSection(replicate=2),
    "shard": MeshSection(shard=2),
    "tensor": MeshSection(tensor=2),
}
WIDE = ["model.config.hidden_size=64", "model.config.intermediate_size=128"]
"""A model whose update is several blocks, so that each rank has some."""
ZERO = "local.learning_rate=1e-30"
"""Updates are zeros on every mesh: the rest is rounding and noise."""
ONE_ROW = ["local.batch_size=1", "local.clip_norm=0", "privacy.clip=0.001"]
"""Only one rank has a row, and nothing is summed in another order: the update is that of one process to the bit. It is
longer than the clipping norm, so each rank must know the norm of the whole."""
BALANCED = ["local.balance=weighted", "local.steps=3"]
"""The first site takes two steps, and its update is scaled before it is clipped."""


@pytest.fixture
def open_site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    """Opens sites of a federation, each with a process's memory of its own, and ends their ranks.

    No rank unpickles what another sends.
    """
    monkeypatch.setattr("cloister.clients.ranks.rank.main", unpickles_nothing_of_peers)
    residents: list[Resident] = []

    def opened(
        federation: Federation, mesh: MeshSection | None = None, base: Any = None, **options: Any
    ) -> Site:
        residents.append(Resident())
        site = federation.site(resident=residents[-1], mesh=mesh or MeshSection(), **options)
        site.join(federation.join_request(base=base))
        return site

    yield opened
    for resident in residents:
        resident.close()
    assert not ranks()


def weights(run: Path, number: int) -> Any:
    """The model after a round, as one vector."""
    tensors = load_file(run / "checkpoints" / f"round-{number:05d}.safetensors")
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors) if name.startswith("model/")])


def ranks() -> list[Any]:
    """The processes of ranks that this process has started."""
    return [each for each in multiprocessing.active_children() if each.name.startswith("cloister rank")]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], RECORD], ids=["not private", "records"])
@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_give_the_update_of_one_process(
    mesh: str, settings: list[str], tmp_path: Path, open_site: Callable[..., Site]
) -> None:
    """Trained, in clear: equal up to rounding. A private update has the noise of one process, and one charge."""
    # With so short a gradient AdamW's epsilon dominates, and rounding is not amplified where a gradient is near zero.
    blocks = "model.config.num_hidden_layers=2"
    federation = Federation(tmp_path, in_clear(tiny(*WIDE, blocks, "local.clip_norm=1e-6", *settings)))
    noise = NoiseStream.from_declared_seed(5)
    decoded = []
    for number, section in enumerate((MeshSection(), MESHES[mesh])):
        state = str(tmp_path / str(number))
        site = open_site(
            federation, section, state=state, secure=False, noise=lambda number: noise.child(f"{number}")
        )
        contribution = site.contribute(federation.request())
        assert len(contribution.spans) == (1 if number == 0 else 3)
        assert len(federation.entries()) == (number + 1 if settings else 0)
        decoded.append(whole_vector(contribution).view(np.int32).astype(np.int64))
    (one, several), size = decoded, federation.layout.size
    largest = np.abs(one[:size]).max()
    assert largest > 1e5
    assert np.abs(one - several)[:size].max() <= 1e-4 * largest
    assert np.array_equal(one[size:][:2], several[size:][:2]), "weight and tokens"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("replicate", [ZERO]),
        ("shard", [ZERO]),
        ("tensor", [ZERO]),
        ("replicate", ONE_ROW),
        ("shard", [*ONE_ROW, *BALANCED]),
    ],
)
def test_equal_updates_leave_as_equal_bytes_and_open_under_the_masks_of_ranks(
    mesh: str, settings: list[str], tmp_path: Path, open_site: Callable[..., Site]
) -> None:
    """Clipped, rounded and noised by each rank for its own span."""
    kept = []
    for folder, section in (("one", MeshSection()), ("several", MESHES[mesh])):
        federation = Federation(tmp_path / folder, tiny(*SKELLAM, *WIDE, *settings))
        noise = NoiseStream.from_declared_seed(5).child
        attack = Attack(
            federation, clip=federation.plan.privacy.clip, noise=lambda number, draw=noise: draw(f"{number}")
        )
        attack.sites[0] = open_site(federation, section, noise=lambda number, draw=noise: draw(f"{number}"))
        attack.carry_through(())
        length = Sums(federation.plan, federation.layout.size).training.length
        updates = [
            np.fromfile(path, np.uint32, length)
            for path in sorted(federation.folder.rglob("update-00001.ring"))
        ]
        assert len(updates) == 4
        assert np.array_equal(attack.coordinator.sum(), np.sum(updates, axis=0, dtype=np.uint32))
        kept.append(updates[0].tobytes())
        assert len(ranks()) == (0 if folder == "one" else 2)
    assert kept[0] == kept[1]
    assert len(set(kept[0])) > 100, "there is noise in it"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["replicate", "shard"])
def test_ranks_compress_as_one_process_and_keep_the_same_residual(
    mesh: str, tmp_path: Path, open_site: Callable[..., Site]
) -> None:
    """Each rank rotates and codes its own blocks; the second update has what the first one's code left out."""
    compressed = ["aggregation.ring_bits=8", "aggregation.compression={}", *ONE_ROW[:2]]
    federation = Federation(tmp_path, in_clear(tiny(*WIDE, *compressed)))
    left = []
    for name, section in (("one", MeshSection()), ("several", MESHES[mesh])):
        state = tmp_path / name
        declare_rounding(federation.plan, federation.names[0], state)  # both round alike
        site = open_site(federation, section, state=str(state), secure=False)
        sent = [whole_vector(site.contribute(federation.request(number=number))) for number in (1, 2)]
        residuals = [
            (run_folder(state, RUN) / "carried" / f"{number:05d}" / "residual").read_bytes()
            for number in (1, 2)
        ]
        left.append(([each.tobytes() for each in sent], residuals))
    assert left[0] == left[1]
    (first, second), (residual, _) = left[0]
    assert first != second
    assert len(set(residual[len(federation.scales()) :])) > 20


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["replicate", "shard"])
def test_ranks_scale_to_the_bound_as_one_process_and_their_spans_are_sketched(
    mesh: str,
    tmp_path: Path,
    open_site: Callable[..., Site],
    small_plan: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each rank must know the norm of the whole. Under masks the coordinator checks the sketch of all spans."""
    clear = ["aggregation.secure=false", "aggregation.weighting=uniform", "aggregation.norm_bound=1e-4"]
    federation = Federation(tmp_path, tiny(*WIDE, *ONE_ROW[:2], *clear))
    sent = []
    for name, section in (("one", MeshSection()), ("several", MESHES[mesh])):
        state = tmp_path / name
        declare_rounding(federation.plan, federation.names[0], state)  # both round alike
        site = open_site(federation, section, state=str(state), secure=False)
        sent.append(whole_vector(site.contribute(federation.request())))
    assert np.array_equal(sent[0], sent[1])
    steps = sent[0][: federation.layout.size].view(np.int32).astype(np.float64)
    ring = Sums(federation.plan, federation.layout.size).training.ring
    assert np.linalg.norm(steps) / ring.scale == pytest.approx(1e-4, rel=1e-3)
    masked = [
        *("aggregation.secure=true", "aggregation.norm_bound=0.01", "data.held_out=0.0", "run.rounds=2"),
        f"simulation.profiles=[{{share=0.25,mesh={{{mesh}=2}}}}]",
    ]
    settings = set_options([each for each in RECORD if "secure" not in each] + masked)
    outcome = found(
        capsys, "simulate", str(small_plan), "--out", str(tmp_path / "run"), "--workers", "1", *settings
    )
    assert outcome["rounds"] == 2


@pytest.mark.slow
def test_a_site_that_changes_its_mesh_goes_on_with_its_moments(
    tmp_path: Path, open_site: Callable[..., Site]
) -> None:
    keep = "local.optimizer_state=keep"
    federation = Federation(tmp_path, in_clear(tiny(*WIDE, "local.clip_norm=1e-6", keep)))
    sent, states = [], []
    for name, first in (("one", MeshSection()), ("several", MESHES["shard"])):
        for number, section in enumerate((first, MeshSection()), 1):
            site = open_site(federation, section, state=str(tmp_path / name), secure=False)
            contribution = site.contribute(federation.request(number=number))
        sent.append(whole_vector(contribution).view(np.int32)[: federation.layout.size].astype(np.int64))
        states.append(sorted(path.parent.name for path in (tmp_path / name).rglob("moments")))
    largest = np.abs(sent[0]).max()
    assert largest > 1e5
    assert np.abs(sent[0] - sent[1]).max() <= 1e-4 * largest
    assert states[0] == states[1] == ["00001", "00002"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Train", "Mask"])
def test_a_killed_rank_costs_no_attempt_and_no_charge_for_a_kept_update(
    moment: str, tmp_path: Path, open_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, tiny(*SKELLAM))
    attack = Attack(federation, clip=1.0)
    site = attack.sites[0] = open_site(federation, MESHES["shard"])
    inbox = attack.deal()[site.name]
    site.held_out(federation.plan, federation.model)  # which starts the ranks
    (victim,) = (each for each in ranks() if each.name.startswith("cloister rank 1"))
    call = Ranks.call

    def killing(self: Ranks[Any, Any], *commands: Any, **options: Any) -> list[Any]:
        """One rank does not get far with the command: it is stopped, and killed while the others are at work."""
        if type(commands[0]).__name__ == moment:
            os.kill(victim.pid, signal.SIGSTOP)
            killer = threading.Timer(0.2, victim.kill)
            killer.start()
        return call(self, *commands, **options)

    monkeypatch.setattr(Ranks, "call", killing)
    begun = time.monotonic()
    with raises(RankError, "rank 1 of 2 on cpu", says="SIGKILL"):
        attack.contribute(site, inbox, clip=1.0)
    assert time.monotonic() - begun < 10
    assert not ranks()
    monkeypatch.undo()
    assert len(federation.entries()) == 1
    first, again = (attack.contribute(site, inbox, clip=1.0) for _ in range(2))
    assert first.statement == again.statement
    assert np.array_equal(whole_vector(first), whole_vector(again))
    assert time.monotonic() - begun < 60
    # Where the update was kept, it is sent again; an update that is trained again is another release.
    assert len(federation.entries()) == (1 if moment == "Mask" else 2)


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_when_its_round_is_over(
    tmp_path: Path, open_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, tiny("cohort.deadline_s=700", "cohort.attempts=2"))
    site = open_site(federation, MESHES["shard"])
    first = site.held_out(federation.plan, federation.model)
    os.kill(ranks()[1].pid, signal.SIGSTOP)
    call, told = Ranks.call, []

    def soon(self: Ranks[Any, Any], *commands: Any, timeout_s: float) -> list[Any]:
        """The time passes faster."""
        told.append(timeout_s)
        return call(self, *commands, timeout_s=timeout_s / 1000)

    monkeypatch.setattr(Ranks, "call", soon)
    begun = time.monotonic()
    with raises(
        RankError, "rank 1 of 2 on cpu", "rank 0 of 2 on cpu, rank 1 of 2 on cpu", says="within 2.8 s"
    ):
        site.held_out(federation.plan, federation.model)
    assert 2.8 <= time.monotonic() - begun < 10
    assert told == [2 * 2 * 700]
    assert not ranks()
    monkeypatch.undo()
    assert site.held_out(federation.plan, federation.model) == first


@pytest.mark.parametrize(
    ("settings", "shard"),
    [([], 2), (["local.optimizer=muon"], 1), ([*RECORD, "privacy.method=opacus"], 1), (RECORD, 2)],
)
def test_a_site_of_several_gpus_uses_one_for_a_plan_that_shards_cannot_train(
    settings: list[str], shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the site names no mesh; the GPUs, which this machine may lack, have too little memory for a copy each."""
    gpus = ["cuda:0", "cuda:1"]
    monkeypatch.setattr(device_mesh, "devices_of", lambda *_, **__: gpus)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=2**16))
    assert mesh_for(tiny(*settings), MeshSection(), "auto") == (Mesh(shard=shard), gpus[:shard])


@pytest.mark.parametrize(
    ("settings", "mesh", "field", "says"),
    [
        (
            [],
            MeshSection(tensor=4),
            "mesh.tensor",
            "num_attention_heads = 2",
        ),
        ([*RECORD, "privacy.method=opacus"], MeshSection(shard=2), "mesh", "privacy.method"),
        (
            [*RECORD, "privacy.method=opacus"],
            MeshSection(checkpointing=True),
            "mesh",
            "privacy.method",
        ),
        (RECORD, MeshSection(compile=True), "mesh.compile", "privacy.unit"),
        (["local.optimizer=muon"], MeshSection(shard=2), "mesh", "muon"),
        (
            ["local.optimizer=muon", "model.adapter.scheme=ffa-lora"],
            MeshSection(tensor=2),
            "mesh",
            "muon",
        ),
        (
            ["model.adapter.scheme=ffa-lora", "model.adapter.base_precision=bfloat16"],
            MeshSection(replicate=2),
            "mesh",
            "base_precision is 'bfloat16'",
        ),
    ],
)
def test_what_a_mesh_cannot_train_is_refused_when_the_site_joins(
    settings: list[str],
    mesh: MeshSection,
    field: str,
    says: str,
    tmp_path: Path,
    open_site: Callable[..., Site],
) -> None:
    federation = Federation(tmp_path, tiny(*settings))
    with raises(ModelError, field, says=says):
        open_site(federation, mesh, secure=federation.plan.aggregation.secure)


@pytest.mark.slow
def test_a_federation_trains_on_three_meshes(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command, with the secure sum; evaluated at the sites, by their ranks."""
    meshes = [
        "{share=0.25,mesh={replicate=2}}",
        "{share=0.25,mesh={shard=2}}",
        "{share=0.25,mesh={tensor=2}}",
    ]
    out = tmp_path / "run"
    profiles = f"simulation.profiles=[{','.join(meshes)}]"
    outcome = found(
        capsys, "simulate", str(small_plan), "--out", str(out), "--workers", "1", "--set", profiles
    )
    assert outcome["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-5)
    several, one, start = (
        weights(Path(run), number) for run, number in ((out, 3), (whole["run"], 3), (out, 0))
    )
    assert np.linalg.norm(several - one) <= 1e-4 * np.linalg.norm(one - start)


@pytest.mark.slow
def test_a_model_that_does_not_fit_into_one_rank_is_trained_and_released_by_two(tmp_path: Path) -> None:
    """In a process whose memory allocator returns what is freed: otherwise fragments decide what fits."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, "-m", "cloister.tests.parties.ranks.rank_memory", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines() == ["1 rank: cannot allocate memory", "2 ranks: released"], done.stderr[
        -3000:
    ]


def test_another_update_is_not_masked_in_its_place(
    tmp_path: Path, open_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the site makes its update of the same round from other facts."""
    federation = Federation(tmp_path, tiny(*SKELLAM))
    attack = Attack(federation, clip=1.0)
    site = attack.sites[0] = open_site(federation, MESHES["shard"])
    inbox = attack.deal()[site.name]
    masking = Team.masking

    def replaced(self: Team, path: Path, *more: Any) -> Any:
        def mask(secure: Any, pieces: list[Any]) -> Any:
            other = [(0, np.full(sum(piece.size for _, piece in pieces), 7, np.uint32))]
            Kept(site.config.folder, path.parent).keep(
                federation.sum_id(),
                lambda file: write_pieces(file, other),
                {"model": "another"},
                durable=False,
            )
            return masking(self, path, *more)(secure, pieces)

        return mask

    monkeypatch.setattr(Team, "masking", replaced)
    with raises(StepError, "update", says="not to change"):
        attack.contribute(site, inbox, clip=1.0)


@pytest.mark.slow
def test_ranks_build_on_a_public_base_of_a_checkpoint_under_an_adapter(
    tmp_path: Path, open_site: Callable[..., Site]
) -> None:
    """Its digest has the frozen values, which are those of the base and no more those of the checkpoint."""
    made = load_model(tiny())
    save_pretrained(made, made.layout.flatten(made.module), tmp_path / "checkpoint")
    model = [f"model.name={tmp_path / 'checkpoint'}", "model.config={}", "model.tokenizer=auto"]
    adapter = ["model.adapter.scheme=ffa-lora", "public.source=public.txt", "server.evaluation=none"]
    adapter += ["aggregation.secure=false"]
    federation = Federation(tmp_path / "sites", tiny(*model, *adapter))
    plain = load_model(tiny(*model))
    base = plain.layout.flatten(plain.module) + np.float32(0.01)
    alone = federation.site(0, resident=Resident())
    alone.join(federation.join_request(base=base))
    site = open_site(federation, MESHES["replicate"], secure=False, base=base)
    about = federation.sum_id()
    assert site._open(about).sums.model == alone._open(about).sums.model
    assert whole(site.contribute(federation.request())).size


def test_ranks_build_on_the_base_that_the_site_was_given_and_on_no_other(
    tmp_path: Path, open_site: Callable[..., Site]
) -> None:
    federation = Federation(
        tmp_path, in_clear(tiny("model.adapter.scheme=ffa-lora", "public.source=public.txt"))
    )
    whole_model = load_model(tiny())
    base = whole_model.layout.flatten(whole_model.module)
    site = open_site(federation, MESHES["shard"], secure=False, base=base)
    site.held_out(federation.plan, federation.model, vector_hash(base))
    ranks()[0].kill()
    (path,) = federation.folder.rglob("base-*.npy")
    np.save(path, 3 * base)
    with pytest.raises(RankError):
        site.held_out(federation.plan, federation.model, vector_hash(base))
    with raises(StorageError, path, says="changed"):
        site.held_out(federation.plan, federation.model, vector_hash(base))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("tensor=3", "simulation.profiles[0].mesh.tensor is 3: expected a divisor"),
        ("shard=1000", "simulation.profiles[0].mesh is 'replicate 1, shard 1000"),
        ("shard=0", "simulation.profiles[0].mesh.shard is 0: expected"),
    ],
)
def test_a_profile_with_a_wrong_mesh_is_refused_before_anything_is_made(
    mesh: str, expected: str, small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = f"simulation.profiles=[{{share=1.0,mesh={{{mesh}}}}}]"
    options = ["--out", str(tmp_path / "run"), "--set", profiles]
    assert expected in refusal(capsys, "simulate", str(small_plan), *options)
    assert not (tmp_path / "run").exists()
