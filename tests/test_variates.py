"""SCAFFOLD: control variates against the algorithm written out, and what crashes, dropouts and liars do to them."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from cloister.clients.config import read_config
from cloister.clients.places import mesh_for
from cloister.clients.site import preparation_of
from cloister.lm.data import NOT_LEARNED, Sequences, batches
from cloister.lm.model import LanguageModel, load_model
from cloister.lm.optimizer import learning_rate
from cloister.protocol.cohort import draw_of
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import ModelError, PlanError, StaleError, StorageError, UpdateError
from cloister.protocol.messages import EVALUATE, TRAIN, Contribute, ControlVariate, Failed, SumId
from cloister.protocol.plan import MeshSection, Plan
from cloister.protocol.soundness import parse
from cloister.protocol.transfer import Parcel
from cloister.server.checkpoint import Checkpoint, Checkpoints
from cloister.server.cost import cost
from cloister.server.gate import Gate
from cloister.server.progress import AttemptFailed, Event, RoundDone, SiteAnswered
from cloister.tests.command import found
from cloister.tests.federation import RUN, Federation, tiny
from cloister.tests.test_compressed_run import Run, final
from cloister.tests.test_site import Attack

# PEFT asks transformers 5.23 for a property under the name that transformers is phasing out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

Floats = npt.NDArray[np.float32]
SCAFFOLD = [
    "local.optimizer=sgd",
    "local.control_variates=true",
    "local.learning_rate=0.5",
    "local.warmup_steps=3",
    "local.clip_norm=0.5",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
]
ROUNDS = [*SCAFFOLD, "server.optimizer=nesterov", "server.learning_rate=0.5"]
CLEAR = "aggregation.secure=false"
LOSSY = [*ROUNDS, "aggregation.dropouts=0.25", "aggregation.colluders=0", "cohort.quorum=0.5"]


def checkpoint(run: Run, number: int) -> Checkpoint:
    return Checkpoints(run.folder / "checkpoints", load_model(run.plan).layout, 2).load(number)


def common(run: Run, number: int) -> Floats:
    """c after a round."""
    controls = checkpoint(run, number).controls
    assert controls is not None
    return controls.common


def summed(run: Run, number: int) -> dict[str, int]:
    """The last round of each site whose change is in c."""
    controls = checkpoint(run, number).controls
    assert controls is not None
    return controls.summed


def own(run: Run, number: int) -> dict[str, Floats]:
    """c_i of each site after a round."""
    last = summed(run, number)
    files = {name: run.states[name] / f"variate-{each:05d}.safetensors" for name, each in last.items()}
    return {name: load_file(path)["variate"] for name, path in files.items()}


def check_mean(run: Run, number: int) -> None:
    """c is the mean of the c_i over all sites of the federation."""
    expected = np.sum(list(own(run, number).values()), axis=0, dtype=np.float64) / run.plan.cohort.sites
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(common(run, number), expected, rtol=0, atol=2e-8)


# The algorithm


def gradients(
    plan: Plan, model: LanguageModel, weights: Floats, data: Sequences, rows: npt.NDArray[np.int64]
) -> Floats:
    """The gradient of a batch, clipped."""
    module = model.module.eval()
    model.layout.scatter(weights, module)
    inputs, labels = torch.tensor(data.tokens[rows]).long(), torch.tensor(data.labels[rows]).long()
    logits = module(input_ids=inputs).logits
    loss = functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=NOT_LEARNED
    )
    parameters = dict(module.named_parameters())
    names = model.layout.names
    each = torch.autograd.grad(loss, [parameters[name] for name in names])
    flat = np.concatenate([part.numpy().ravel() for part in each])
    norm = math.sqrt(float(np.square(flat, dtype=np.float64).sum()))
    assert norm > plan.local.clip_norm  # so that the test covers it
    return flat * np.float32(plan.local.clip_norm / norm)


def site_seed(plan: Plan, site: str, number: int) -> int:
    text = f"training/{plan.run.seed}/{site}/{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def scaffold(run: Run) -> tuple[Floats, Floats, dict[str, Floats]]:
    """Algorithm 1 with option II as the paper has it, each site sending its change of control variate: x, c, c_i."""
    plan, model = run.plan, load_model(run.plan)
    local, layout = plan.local, model.layout
    x = layout.flatten(model.module).astype(np.float64)
    c = np.zeros(layout.size)
    variates = {name: np.zeros(layout.size) for name in run.states}
    data = {}
    for name, folder in run.states.items():
        config = read_config(folder.parent / "site.toml")
        data[name] = preparation_of(config, plan, model.tokenizer).make().train
    matrices = np.concatenate([np.full(math.prod(shape), len(shape) >= 2) for shape in layout.shapes])
    total = plan.run.rounds * local.steps
    for number in range(1, plan.run.rounds + 1):
        cohort = draw_of(plan, TRAIN).cohort(run.states, number)
        moves, changes = [], []
        for name in cohort:
            seed = (plan.run.seed, number, site_seed(plan, name, number))
            drawn = batches(len(data[name]), local.batch_size, seed)
            y, sizes = x.copy(), 0.0
            for step in range(local.steps):
                rate = learning_rate(local, (number - 1) * local.steps + step, total)
                g = gradients(plan, model, y.astype(np.float32), data[name], next(drawn))
                y -= rate * (g + local.weight_decay * matrices * y - variates[name] + c)
                sizes += rate
            after = variates[name] - c + (x - y) / sizes
            moves.append(y - x)
            changes.append(after - variates[name])
            variates[name] = after
        x += plan.server.learning_rate * np.mean(moves, axis=0)
        c += len(cohort) / plan.cohort.sites * np.mean(changes, axis=0)
    return (
        x.astype(np.float32),
        c.astype(np.float32),
        {name: v.astype(np.float32) for name, v in variates.items()},
    )


def test_a_run_is_the_algorithm_as_it_is_published(tmp_path: Path) -> None:
    """Learning rates change in each round, gradients are clipped, weights decay, and a cohort is three of four sites.
    The sites send updates alone; here each also sends the change of its control variate."""
    run = Run(
        tmp_path,
        *SCAFFOLD,
        "local.steps=3",
        "local.weight_decay=0.1",
        "cohort.fraction=0.75",
        "server.learning_rate=0.7",
        CLEAR,
    )
    run.go()
    weights, c, variates = scaffold(run)
    moved = float(np.abs(weights - checkpoint(run, 0).weights).max())
    np.testing.assert_allclose(checkpoint(run, 3).weights, weights, rtol=0, atol=1e-4 * moved)
    np.testing.assert_allclose(common(run, 3), c, rtol=0, atol=1e-4 * np.abs(c).max())
    assert {
        name: number for name, number in summed(run, 3).items() if number < 3
    }  # one was not in the last round
    for name, found_here in own(run, 3).items():
        np.testing.assert_allclose(found_here, variates[name], rtol=0, atol=1e-4 * np.abs(c).max())
    check_mean(run, 3)


SKEWED = """
[model.config]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2

[model.adapter]
scheme = "ffa-lora"
rank = 1
alpha = 1e-3

[data]
task = "classify"
classes = ["yes", "no"]
sequence_length = 4
held_out = 0.2

[run]
rounds = 4

[local]
steps = 10
batch_size = 2
optimizer = "sgd"
learning_rate = 0.1
schedule = "constant"
clip_norm = 0

[cohort]
sites = 4

[aggregation]
weighting = "uniform"

[server]
evaluate_every = 4

[simulation]
partition = "natural"
field = "site"
durable = false
"""
"""Logistic regression, but for a factor of an adapter that hardly counts: all texts are equal, three sites say yes and
one says no. A site's own optimum is at infinity."""


def test_on_skewed_data_many_local_steps_end_at_a_lower_loss_than_fedavg(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best model says yes with probability 3/4, and has the entropy of that as its loss. FedAvg ends where the
    site that says no has moved as far as the others together, which overstates them."""
    records = [
        {"text": "same", "label": label, "site": f"{number}"}
        for number, label in enumerate(["yes", "yes", "yes", "no"])
        for _ in range(10)
    ]
    source, plan = tmp_path / "records.jsonl", tmp_path / "plan.toml"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    plan.write_text(f'{SKEWED}source = "{source}"\n')
    excess = {}
    for setting in ("false", "true"):
        name = ["--out", str(tmp_path / setting), "--set", f"local.control_variates={setting}"]
        answer = found(capsys, "simulate", str(plan), *name, "--workers", "1")
        excess[setting] = answer["final_loss"] + 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    assert excess["false"] > 0.04
    assert 0 < excess["true"] < excess["false"] / 4


# Attempts, dropouts, stops


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run under masks that nothing disturbed."""
    made = Run(tmp_path_factory.mktemp("masked"), *ROUNDS)
    made.go()
    return made


def same(run: Run, other: Run) -> None:
    """Two runs end with the same bits: model, c and every c_i."""
    assert final(run) == final(other)
    last = run.plan.run.rounds
    np.testing.assert_array_equal(common(run, last), common(other, last))
    mine, others = own(run, last), own(other, last)
    assert mine.keys() == others.keys() == run.states.keys()
    for name, variate in mine.items():
        np.testing.assert_array_equal(variate, others[name])


def test_a_contribution_is_no_longer_than_without(masked: Run) -> None:
    size = load_model(masked.plan).layout.size
    sent = (next(iter(masked.states.values())) / "update-00003.ring").stat().st_size
    assert 4 * size < sent < 4 * size + 100
    plain = tiny("aggregation.weighting=uniform", "server.optimizer=nesterov")
    mine, others = cost(masked.plan, size, size), cost(plain, size, size)
    assert mine.bytes_up == others.bytes_up == sent
    assert mine.bytes_down == 2 * others.bytes_down  # c comes with the model
    assert mine.coordinator_bytes == others.coordinator_bytes + 4 * size


def test_a_retry_and_a_survivor_without_a_mark_change_nothing(masked: Run, tmp_path: Path) -> None:
    """The first attempt at round 1 fails when all sites have made their updates. In round 2 a survivor never reveals
    its shares, and the others' shares open the sum: it has no mark that says that its update is in it."""
    run = Run(tmp_path, *LOSSY)
    names = list(run.states)

    def down(site: str, step: str, request: Any) -> bool:
        if step not in ("confirm", "unmask"):
            return False
        number, tries = request.sum.round, request.sum.tries
        first = number == 1 and tries == 1 and step == "confirm" and site in names[:2]
        return first or (number == 2 and step == "unmask" and site == names[0])

    run.channel.down = down
    run.go()
    assert len(run.of(AttemptFailed)) == 1
    assert [event.sites for event in run.of(RoundDone)] == [4] * 3
    same(run, masked)
    check_mean(run, 3)


def test_a_lost_update_leaves_its_site_as_it_was_under_masks_and_in_clear(tmp_path: Path) -> None:
    """In round 2 the first site trains, and its update does not arrive; in clear it is told nothing of that."""

    def lose(step: str, reply: Any) -> Any:
        if step == "update" and reply.site == "site-000" and reply.sum.round == 2:
            return Failed(reply.site, "its upload was cut")
        return reply

    run, clear = Run(tmp_path / "masked", *LOSSY), Run(tmp_path / "clear", *LOSSY, CLEAR)
    seen: list[dict[str, int]] = []
    for each in (run, clear):
        each.channel.tamper = lose
    run.go(lambda event: seen.append(summed(run, event.round)) if isinstance(event, RoundDone) else None)
    clear.go()
    assert [event.sites for event in run.of(RoundDone)] == [4, 3, 4]
    assert [told["site-000"] for told in seen] == [1, 1, 3]
    assert sorted(path.name for path in run.states["site-000"].glob("variate-*")) == [
        "variate-00001.safetensors",  # what its last update was made with
        "variate-00003.safetensors",
    ]
    same(clear, run)
    check_mean(run, 3)


def test_a_run_that_stopped_goes_on_to_the_same_bits_as_its_clear_twin(masked: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, *ROUNDS, CLEAR).stop_at(
        lambda event: isinstance(event, SiteAnswered) and event.round == 1,
        lambda event: isinstance(event, RoundDone) and event.round == 2,
        lambda event: isinstance(event, SiteAnswered) and event.round == 3,
    )
    same(run, masked)


def test_a_mean_that_the_gate_refuses_changes_no_control_variate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is refused by its norm, before the step, and one by the model's loss, after it."""
    monkeypatch.setattr(Gate, "of_model", lambda _self, number, _weights: "worse" if number == 3 else "")
    run = Run(tmp_path, *ROUNDS, "run.rounds=4", CLEAR)
    seen: list[tuple[Floats, dict[str, int]]] = []

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone):
            seen.append((common(run, event.round).copy(), summed(run, event.round)))

    monkeypatch.setattr(
        Gate, "of_mean", lambda _self, _norm: "too long" if len(run.of(RoundDone)) == 1 else ""
    )
    run.go(observe)
    assert [event.refused for event in run.of(RoundDone)] == ["", "too long", "worse", ""]
    for c, of_sites in seen[1:3]:
        np.testing.assert_array_equal(c, seen[0][0])
        assert set(of_sites.values()) == {1}
    assert set(seen[3][1].values()) == {4}
    check_mean(run, 4)


# What a coordinator may send


def told(federation: Federation, scale: float = 0.0, last: int = 0) -> ControlVariate:
    vector = np.full(federation.layout.size, scale, np.float32)
    return ControlVariate(vector_hash(vector), vector, last)


def test_sites_that_were_told_different_control_variates_do_not_finish_a_sum(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*SCAFFOLD))
    zero, other = told(federation), told(federation, 1e-3)
    attack = Attack(federation, control=zero.hash)
    inboxes = attack.deal()
    request = replace(federation.request(inbox=inboxes["site-001"]), control=other)
    with pytest.raises(StaleError, match="model"):
        attack.sites[1].contribute(request)
    attack.sites[1].contribute(replace(request, control=zero))


def test_a_round_has_one_update_of_one_control_variate(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*SCAFFOLD, CLEAR))
    site, zero = federation.joined(), told(federation)
    request = replace(federation.request(), control=zero)
    first = site.contribute(request)
    again = federation.site().contribute(replace(federation.request(tries=2), control=zero))
    assert again.manifest == first.manifest
    for other in (told(federation, 1e-3), told(federation, last=1)):
        number = 1 if not other.summed else 2
        if number == 2:
            site.contribute(replace(federation.request(number=2), control=zero))
        with pytest.raises(StaleError, match="control variate"):
            site.contribute(replace(federation.request(number=number, tries=3), control=other))


def test_a_control_variate_that_was_lost_is_not_replaced_by_another(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*SCAFFOLD, CLEAR))
    site = federation.joined()
    site.contribute(replace(federation.request(), control=told(federation)))
    kept = site.config.folder / "variate-00001.safetensors"
    assert kept.stat().st_mode & 0o777 == 0o600
    content = kept.read_bytes()
    request = replace(federation.request(number=2), control=told(federation, last=1))
    kept.write_bytes(content[:-1])
    with pytest.raises(StorageError, match=r"variate-00001.*expected the control variate of round 1"):
        site.contribute(request)
    kept.unlink()
    with pytest.raises(StorageError, match=r"variate-00001.*expected the control variate of round 1"):
        site.contribute(request)
    kept.write_bytes(content.replace(RUN.encode(), RUN[::-1].encode()))
    with pytest.raises(StorageError, match="of this run and plan"):
        site.contribute(request)
    assert not list(site.config.folder.glob("update-00002*"))
    kept.write_bytes(content)
    site.contribute(request)


def test_control_variates_that_are_not_as_they_should_be_are_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*SCAFFOLD, CLEAR, "server.evaluation="))
    site, zero = federation.joined(), told(federation)
    short = zero.common[1:]
    for control, words in (
        (None, "missing"),
        (replace(zero, hash=bytes(32)), "expected the one with the hash 00"),
        (told(federation, np.inf), "^control variate is 'non-finite'"),
        (ControlVariate(vector_hash(short), short, 0), "of shape"),
        (replace(zero, summed=1), "1: expected 0 to 0"),
        (replace(zero, summed=-1), "-1: expected 0 to 0"),
    ):
        with pytest.raises(UpdateError, match=words):
            site.contribute(replace(federation.request(), control=control))
    assert not list(site.config.folder.glob("update-*"))
    with pytest.raises(UpdateError, match="only valid for an update"):
        site.contribute(replace(federation.request(purpose=EVALUATE), control=zero))
    plain = Federation(tmp_path / "plain", tiny(CLEAR))
    with pytest.raises(UpdateError, match="only valid for an update under a plan"):
        plain.joined().contribute(replace(plain.request(), control=zero))


def test_the_exchange_names_both_vectors_of_a_request_by_their_hashes(tmp_path: Path) -> None:
    model, c = np.arange(3, dtype=np.float32), np.ones(3, np.float32)
    sum_id = SumId("run", bytes(32), TRAIN, 1, 1)
    control = ControlVariate(vector_hash(c), c, 0)
    parcel = Parcel.of(Contribute(sum_id, vector_hash(model), 0.0, None, model, control=control))
    assert [(each.name, bytes(each.data)) for each in parcel.vectors] == [
        (vector_hash(model), model.tobytes()),
        (vector_hash(c), c.tobytes()),
    ]


# Plans and devices


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        (["local.optimizer=adamw"], "local.optimizer", '"sgd" with local.control_variates'),
        (["local.proximal=0.1"], "local.proximal", "not tried together"),
        (["local.balance=weighted"], "local.balance", "equal steps"),
        (["aggregation.weighting=tokens"], "aggregation.weighting", "each counted once"),
        (
            ["aggregation.compression={}", "aggregation.ring_bits=8"],
            "aggregation.compression",
            "left out",
        ),
        (["cohort.mode=async", CLEAR], "cohort.mode", "different c"),
        (["model.adapter.scheme=rolora"], "model.adapter.scheme", "no gradients"),
        (
            ["privacy.unit=site", "privacy.noise_multiplier=1.0"],
            "local.control_variates",
            "gradients of earlier rounds",
        ),
        (
            ["privacy.unit=record", "privacy.noise_multiplier=1.0", "privacy.sampling_rate=0.1"],
            "local.control_variates",
            "gradients of earlier rounds",
        ),
    ],
)
def test_plans_for_which_control_variates_are_not_sound_are_refused(
    settings: list[str], field: str, words: str
) -> None:
    with pytest.raises(PlanError) as refused:
        parse("", [*SCAFFOLD, *settings])
    assert str(refused.value).startswith(field)
    assert words in str(refused.value)


def test_settings_of_other_optimizers_are_refused_with_sgd() -> None:
    for settings, field in (
        (["local.betas=[0.8, 0.9]"], "local.betas"),
        (["local.optimizer_state=keep"], "local.optimizer_state"),
        (["local.momentum=0.5"], "local.momentum"),
        (
            ["local.clip_norm=0", "aggregation.compression={}", "aggregation.ring_bits=8"],
            "aggregation.compression.first_scale",
        ),
    ):
        with pytest.raises(PlanError) as refused:
            parse("", ["local.optimizer=sgd", *settings])
        assert str(refused.value).startswith(field)


def test_ranks_do_not_divide_a_control_variate() -> None:
    with pytest.raises(ModelError, match="is true: ranks do not divide"):
        mesh_for(tiny(*SCAFFOLD), MeshSection(shard=2), "cpu")


def test_an_adapter_is_trained_with_control_variates(tmp_path: Path) -> None:
    run = Run(tmp_path, *ROUNDS, CLEAR, "run.rounds=2", "model.adapter.scheme=lora", "model.adapter.rank=2")
    run.go()
    check_mean(run, 2)
