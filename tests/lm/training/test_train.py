"""Local training against loops written out by hand, and its independence of whatever ran before."""

import hashlib
import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.model.schedule import Schedule
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, batches
from cloister.lm.training.optimizer import learning_rate
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.protocol.errors import DataError, ModelError, StorageError, UpdateError
from cloister.protocol.plan.plan import LocalSection, Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.carrying import carry_in
from cloister.tests.tools.raises import raises

# PEFT asks transformers 5.23 for a property under the name that transformers is phasing out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
SITE = (7, 1)


def plan_of(kind: str = "llama", *overrides: str) -> Plan:
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    if kind == "llama":
        config["intermediate_size"] = 64  # its default has 2 million parameters
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    local = ["local.steps=4", "local.batch_size=4", "run.rounds=3", "data.sequence_length=16", "run.seed=11"]
    return parse("", [f"model.name=builtin:{kind}", *settings, *local, *overrides])


def some(n: int = 20, seed: int = 0, length: int = 16) -> Sequences:
    """Random tokens; sequences differ much in how many of them are learned."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 64, (n, length)).astype(np.int32)
    share = random.random((n, 1)) * 0.9
    labels = np.where(random.random((n, length)) < share, NOT_LEARNED, tokens).astype(np.int32)
    labels[:, 0] = NOT_LEARNED
    return Sequences(tokens, labels, None, n_bytes=1)


class Run:
    """A plan with its model and trainer, and the initial vector."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model = load_model(plan)
        self.start = self.model.layout.flatten(self.model.module)
        self.trainer = Trainer(plan, self.model, CPU)

    def train(
        self, start: np.ndarray | None = None, data: Sequences | None = None, **options: Any
    ) -> LocalUpdate:
        options = dict[str, Any](round=1, site_seed=SITE) | options
        if (state := options.pop("state", None)) is not None:
            options["carry"] = carry_in(state, options["round"])
        return self.trainer.train(
            self.start if start is None else start, some() if data is None else data, **options
        )


# --- references -------------------------------------------------------------------------------------------------------


def steps_by_hand(
    plan: Plan, model: LanguageModel, data: Sequences, rounds: int = 1, mu: float = 0.0
) -> tuple[np.ndarray, float]:
    """Rounds in a row, by AdamW's paper or plain SGD; the final vector and the last round's mean loss."""
    local, module = plan.local, model.module.eval()
    beta1, beta2 = local.betas
    parameters = [p for p in module.parameters() if p.requires_grad]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    anchors = [p.detach().clone() for p in parameters]
    total, time = plan.run.rounds * local.steps, 0
    for round in range(1, rounds + 1):
        nats, tokens = 0.0, 0
        drawn = batches(len(data), local.batch_size * local.accumulation, (plan.run.seed, round, *SITE))
        for _ in range(local.steps):
            rows = next(drawn)
            inputs, labels = torch.tensor(data.tokens[rows]).long(), torch.tensor(data.labels[rows]).long()
            logits = module(input_ids=inputs).logits
            loss = functional.cross_entropy(
                logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
            )
            learned = int((labels[:, 1:] != NOT_LEARNED).sum())
            nats, tokens = nats + loss.item() * learned, tokens + learned
            # FedProx as its paper writes it, through autograd.
            penalty = sum(((p - anchor) ** 2).sum() for p, anchor in zip(parameters, anchors, strict=True))
            gradients = torch.autograd.grad(loss + mu / 2 * penalty, parameters)
            norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
            if local.clip_norm and norm > local.clip_norm:
                gradients = tuple(g * (local.clip_norm / norm) for g in gradients)
            rate = learning_rate(local, time, total)
            time += 1
            with torch.no_grad():
                for p, g, (first, second) in zip(parameters, gradients, moments, strict=True):
                    p.mul_(1 - rate * (local.weight_decay if p.ndim >= 2 else 0))
                    if local.optimizer == "sgd":
                        p.sub_(rate * g)
                        continue
                    first.mul_(beta1).add_(g, alpha=1 - beta1)
                    second.mul_(beta2).add_(g * g, alpha=1 - beta2)
                    p.sub_(rate * (first / (1 - beta1**time)) / ((second / (1 - beta2**time)).sqrt() + 1e-8))
    return model.layout.flatten(module), nats / tokens


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["local.clip_norm=0"],
        ["local.weight_decay=0.3", "local.warmup_steps=2", "local.betas=[0.8, 0.99]"],
        ["local.accumulation=2", "local.batch_size=2"],
        ["model.adapter.scheme=lora", "model.adapter.rank=2"],
        ["local.optimizer=sgd", "local.learning_rate=0.3", "local.weight_decay=0.3"],
    ],
)
def test_a_round_is_a_plain_loop(overrides: list[str]) -> None:
    run = Run(plan_of("llama", *overrides))
    update = run.train()
    expected, loss = steps_by_hand(run.plan, load_model(run.plan), some())
    assert update.loss == pytest.approx(loss, rel=1e-6)
    # Adam divides by the root of tiny second moments, so single elements are the last to agree.
    np.testing.assert_allclose(run.start + update.vector, expected, rtol=0, atol=1e-5)
    assert np.linalg.norm(run.start + update.vector - expected) < 1e-5 * np.linalg.norm(update.vector)


def test_fedprox_equals_its_penalty_through_autograd() -> None:
    mu = 30.0
    run = Run(plan_of("llama", f"local.proximal={mu}", "local.clip_norm=0"))
    update = run.train()
    expected, loss = steps_by_hand(run.plan, load_model(run.plan), some(), mu=mu)
    free, _ = steps_by_hand(run.plan, load_model(run.plan), some())
    np.testing.assert_allclose(run.start + update.vector, expected, rtol=0, atol=5e-6)
    assert update.loss == pytest.approx(loss, rel=1e-6), "the penalty is no part of the reported loss"
    assert np.linalg.norm(expected - free) > 0.05 * np.linalg.norm(free - run.start)
    assert np.linalg.norm(update.vector) < np.linalg.norm(free - run.start)


def test_accumulation_is_a_larger_batch_whatever_the_padding() -> None:
    whole = Run(plan_of("llama", "local.batch_size=16")).train()
    parts = Run(plan_of("llama", "local.batch_size=8", "local.accumulation=2")).train()
    assert parts.tokens == whole.tokens
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    np.testing.assert_allclose(parts.vector, whole.vector, rtol=0, atol=2e-6)


def test_tokens_are_the_learned_labels_of_the_batches_drawn() -> None:
    run, data = Run(plan_of()), some()
    drawn = batches(len(data), 4, (11, 1, *SITE))
    rows = np.concatenate([next(drawn) for _ in range(4)])
    update = run.train(data=data)
    assert update.tokens == int((data.labels[rows][:, 1:] != NOT_LEARNED).sum())
    assert update.tokens <= run.plan.most_tokens()


def test_blocks_of_steps_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Run(plan_of()).train()
    monkeypatch.setattr("cloister.lm.training.train.BLOCK_TOKENS", 3 * 4 * 16)  # three steps, then one
    parts = Run(plan_of()).train()
    np.testing.assert_array_equal(parts.vector, whole.vector)


def test_packed_records_do_not_see_each_other() -> None:
    data = some(4)
    positions = np.tile(np.array([*range(6), *range(10)], np.int32), (4, 1))
    run = Run(plan_of())
    packed, plain = run.train(data=replace(data, positions=positions)), run.train(data=data)
    assert packed.loss != plain.loss
    by_hand = Run(plan_of())
    seen: list[torch.Tensor] = []
    by_hand.model.module.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    by_hand.train(data=replace(data, positions=positions))
    assert all(torch.equal(each, torch.from_numpy(positions).long()) for each in seen)


# --- learning rate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1.0 * 1 / 5),
        (3, 1.0 * 4 / 5),
        (4, 1.0),
        (4 + 5, 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2),
        (4 + 10, 0.1 + 0.9 * 0.25),
        (19, 0.1),
        (40, 0.1),
    ],
)
def test_warm_up_then_cosine(step: int, expected: float) -> None:
    local = LocalSection(learning_rate=1.0, warmup_steps=4, final_learning_rate=0.1)
    assert learning_rate(local, step, 20) == pytest.approx(expected)


def test_a_constant_schedule_is_constant_after_warm_up() -> None:
    local = LocalSection(learning_rate=0.5, warmup_steps=2, schedule="constant")
    rates = [learning_rate(local, step, 10) for step in range(6)]
    assert rates == pytest.approx([0.5 / 3, 1.0 / 3, 0.5, 0.5, 0.5, 0.5])
    assert learning_rate(LocalSection(learning_rate=0.5), 0, 1) == 0.5


def test_the_schedule_counts_the_steps_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan_of("llama", "local.warmup_steps=3"))
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW) -> None:
        rates.extend({group["lr"] for group in self.param_groups})
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    for round in (1, 2, 3):
        run.train(round=round)
    assert rates == [learning_rate(run.plan.local, step, 12) for step in range(12)]


# --- independence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["full", "rolora"])
def test_what_ran_before_leaves_nothing(scheme: str, tmp_path: Path) -> None:
    """GPT-2 has dropout; the adapter's rounds freeze and thaw."""
    rank = [] if scheme == "full" else ["model.adapter.rank=2"]
    plan = plan_of("gpt2", f"model.adapter.scheme={scheme}", *rank)
    fresh = Run(plan).train(round=2, site_seed=(3,), data=some(seed=3))
    used = Run(plan)
    first = used.train()
    used.train(start=used.start + 1, round=3, site_seed=(9,), data=some(seed=9), state=tmp_path)
    torch.manual_seed(77)
    used.model.module.requires_grad_(True)
    used.model.module.eval()
    for parameter in used.model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = torch.random.get_rng_state()
    again = used.train(round=2, site_seed=(3,), data=some(seed=3))
    assert torch.equal(torch.random.get_rng_state(), before), "training drew from the process's generator"
    np.testing.assert_array_equal(again.vector, fresh.vector)
    assert (again.loss, again.tokens) == (fresh.loss, fresh.tokens)
    np.testing.assert_array_equal(used.train().vector, first.vector)
    assert all(parameter.grad is None for parameter in used.model.module.parameters())
    assert not [*tmp_path.rglob("moments")], "a state that is reset is not written"


def weights_sha256(model: LanguageModel) -> str:
    """A hash of the layout and of every parameter, trained or not."""
    digest = hashlib.sha256(model.layout.digest().encode())
    for name, parameter in sorted(model.module.named_parameters()):
        digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_another_process_gives_the_same_weights_and_the_same_bits(tmp_path: Path) -> None:
    """One new interpreter for both: it loads a model with an adapter, and trains one without."""
    plan, adapted = plan_of("gpt2", "local.threads=2"), plan_of("gpt2", "model.adapter.scheme=ffa-lora")
    here = Run(plan).train()
    code = f"""
import hashlib, sys, numpy as np, torch
torch.set_num_threads(1); torch.manual_seed(3)
from cloister.lm.training.train import Trainer
from cloister.lm.text.sequences import Sequences
from cloister.lm.model.model import LanguageModel, load_model
from cloister.protocol.plan.soundness import from_json
plan, adapted = map(from_json, sys.stdin.read().split("\\0"))
{inspect.getsource(weights_sha256)}
print(weights_sha256(load_model(adapted)))
model = load_model(plan)
arrays = np.load(sys.argv[1])
data = Sequences(arrays["tokens"], arrays["labels"], None, 1)
start = model.layout.flatten(model.module)
update = Trainer(plan, model, torch.device("cpu")).train(start, data, round=1, site_seed={SITE})
np.save(sys.argv[2], update.vector); print(update.loss.hex())
"""
    data = some()
    np.savez(tmp_path / "data.npz", tokens=data.tokens, labels=data.labels)
    there = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data.npz"), str(tmp_path / "update.npy")],
        input=f"{plan.to_json()}\0{adapted.to_json()}",
        env=os.environ | {"PYTHONHASHSEED": "1"},  # this process has another: PEFT keeps its targets in sets
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    sha256, loss = there.stdout.split()
    assert sha256 == weights_sha256(load_model(adapted))
    np.testing.assert_array_equal(np.load(tmp_path / "update.npy"), here.vector)
    assert float.fromhex(loss) == here.loss


def test_rounds_sites_and_seeds_draw_different_batches() -> None:
    run = Run(plan_of("llama", "local.schedule=constant"))
    updates = [run.train(), run.train(round=2), run.train(site_seed=(7, 2))]
    updates.append(Run(plan_of("llama", "local.schedule=constant", "run.seed=12")).train(start=run.start))
    assert len({update.vector.tobytes() for update in updates}) == 4


def test_a_loss_curve_repeats_itself_exactly_and_falls() -> None:
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 8, np.uint8).astype(np.int32)
    tokens = np.lib.stride_tricks.sliding_window_view(text, 16)[::7].copy()
    labels = tokens.copy()
    labels[:, 0] = NOT_LEARNED
    data = Sequences(tokens, labels, None, 1)

    def curve() -> list[str]:
        run = Run(plan_of("llama", "local.steps=15", "local.learning_rate=0.01", "run.rounds=3"))
        vector, losses = run.start, []
        for round in (1, 2, 3):
            update = run.train(vector, data, round=round)
            vector = vector + update.vector
            losses.append(update.loss)
        return [loss.hex() for loss in losses]

    first = curve()
    assert first == curve()
    losses = [float.fromhex(loss) for loss in first]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 2.0 < losses[0]


def test_the_global_model_is_not_modified_and_may_be_read_only() -> None:
    run = Run(plan_of())
    frozen = np.frombuffer(run.start.tobytes(), np.float32)
    np.testing.assert_array_equal(run.train(start=frozen).vector, run.train().vector)
    np.testing.assert_array_equal(frozen, run.start)


def test_threads_are_the_plans() -> None:
    Run(plan_of("llama", "local.threads=2")).train()
    assert torch.get_num_threads() == 2


def test_progress_is_told_every_step() -> None:
    steps: list[int] = []
    Run(plan_of()).train(progress=steps.append)
    assert steps == [1, 2, 3, 4]


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("round", "moved"), [(1, "lora_B"), (2, "lora_A"), (3, "lora_B")])
def test_an_update_of_rolora_has_the_half_that_the_round_trains(round: int, moved: str) -> None:
    run = Run(
        plan_of("llama", "model.adapter.scheme=rolora", "model.adapter.rank=2", "local.weight_decay=0.5")
    )
    start = run.start + np.float32(0.01)
    trained = Schedule.of(run.plan, run.model.layout).of_round(round)
    for name, part in trained.split(run.train(start, round=round).vector).items():
        assert moved in name
        assert np.any(part), name
    frozen = dict(run.model.module.named_parameters())
    for name, part in run.model.layout.split(start).items():
        assert moved in name or np.array_equal(frozen[name].detach().numpy(), part), name


def test_an_adapter_leaves_its_base_alone() -> None:
    run = Run(plan_of("gpt2", "model.adapter.scheme=ffa-lora", "model.adapter.rank=2"))
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in run.model.module.named_parameters()
        if name not in run.model.layout.names
    }
    assert np.any(run.train().vector)
    now = dict(run.model.module.named_parameters())
    assert all(torch.equal(now[name], before) for name, before in frozen.items())


# --- kept optimizer state ---------------------------------------------------------------------------------------------

KEEP = ("local.optimizer_state=keep",)


def test_kept_moments_continue_as_if_there_were_no_rounds(tmp_path: Path) -> None:
    run = Run(plan_of("llama", *KEEP, "local.weight_decay=0.1"))
    vector = run.start
    for round in (1, 2):
        vector = vector + run.train(vector, round=round, state=tmp_path).vector
    expected, _ = steps_by_hand(run.plan, load_model(run.plan), some(), rounds=2)
    np.testing.assert_allclose(vector, expected, rtol=0, atol=5e-6)
    reset = Run(plan_of("llama", "local.weight_decay=0.1"))
    other = reset.start
    for round in (1, 2):
        other = other + reset.train(other, round=round).vector
    assert np.abs(other - expected).max() > 1e-4, "the test would not see that the moments were lost"


def test_a_round_done_again_begins_from_the_same_moments(tmp_path: Path) -> None:
    run = Run(plan_of("llama", *KEEP))
    for round in (1, 2, 3):
        first = run.train(round=round, state=tmp_path)
        again = Run(run.plan).train(round=round, state=tmp_path)
        np.testing.assert_array_equal(first.vector, again.vector)
    fresh = run.train(round=3, state=tmp_path / "other")
    assert not np.array_equal(fresh.vector, first.vector)


def test_moments_that_are_missing_begin_at_zero(tmp_path: Path) -> None:
    """As after a round in which the site had nothing to train on."""
    run = Run(plan_of("llama", *KEEP))
    run.train(round=1, state=tmp_path)
    (tmp_path / "1" / "moments").unlink()
    late = run.train(round=2, state=tmp_path)
    np.testing.assert_array_equal(late.vector, run.train(round=2).vector)


def test_a_disk_that_refuses_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan_of("llama", *KEEP))
    run.train(round=1, state=tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with raises(StorageError, "moments", says="No space left"):
        run.train(round=2, state=tmp_path)
    monkeypatch.undo()
    again = run.train(round=2, state=tmp_path)
    np.testing.assert_array_equal(again.vector, run.train(round=2, state=tmp_path).vector)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite() -> None:
    run = Run(plan_of("llama", "local.learning_rate=1e30", "local.clip_norm=0"))
    with raises(UpdateError, "the update of round 2"):
        run.train(round=2)
    start = run.start.copy()
    start[5] = np.nan
    with raises(UpdateError, "the update of round 1"):
        run.train(start)


def test_a_broken_round_does_not_touch_the_next(tmp_path: Path) -> None:
    run = Run(plan_of("llama", *KEEP))
    expected = run.train()
    with raises(UpdateError, "the update of round 1"):
        run.train(np.full_like(run.start, np.inf), state=tmp_path)
    assert not [*tmp_path.rglob("moments")]
    np.testing.assert_array_equal(run.train().vector, expected.vector)


def test_no_sequences() -> None:
    none = np.zeros((0, 16), np.int32)
    with raises(DataError, "sequences"):
        Run(plan_of()).train(data=Sequences(none, none, None, 0))


def test_a_vector_of_another_model() -> None:
    run = Run(plan_of())
    with raises(UpdateError, "the model's vector", says=f"({run.start.size},)"):
        run.train(run.start[:-1])


def test_too_little_memory() -> None:
    run = Run(plan_of())

    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run.model.module.register_forward_pre_hook(exhausted)
    with raises(ModelError, "local.batch_size"):
        run.train()


def test_sequences_of_which_nothing_is_learned_give_no_update() -> None:
    data = some(3)
    update = Run(plan_of()).train(data=replace(data, labels=np.full_like(data.labels, NOT_LEARNED)))
    assert (update.tokens, update.loss) == (0, 0.0)
    assert not update.vector.any()


# --- precision --------------------------------------------------------------------------------------------------------


def test_bfloat16_keeps_float32_weights() -> None:
    run, exact = Run(plan_of("llama", "local.precision=bfloat16")), Run(plan_of())
    update, reference = run.train(), exact.train()
    assert update.vector.dtype == np.float32
    assert all(parameter.dtype == torch.float32 for parameter in run.model.module.parameters())
    assert update.loss == pytest.approx(reference.loss, rel=0.02)
    assert update.loss != reference.loss


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu() -> None:
    plan = plan_of("llama", "local.precision=float32", "local.optimizer_state=keep")
    model = load_model(plan)
    start = model.layout.flatten(model.module)
    there = Trainer(plan, model, torch.device("cuda:0")).train(start, some(), round=1, site_seed=SITE)
    here = Run(plan).train()
    assert there.loss == pytest.approx(here.loss, rel=1e-5)
    assert np.linalg.norm(there.vector - here.vector) < 1e-2 * np.linalg.norm(here.vector)


def test_a_model_trains_without_dropout() -> None:
    """Masks that are known and differ between sites could leave zeros at all sites but one."""
    drops = [f"model.config.{name}=0.999" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    none = [setting.replace("0.999", "0.0") for setting in drops]
    one, other = (Run(plan_of("gpt2", *settings)).train() for settings in (drops, none))
    assert np.array_equal(one.vector, other.vector)
    assert one.vector.any()


def test_what_a_model_draws_by_itself_is_the_same_at_all_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[float] = []
    backward = Trainer._backward

    def draws(self: Trainer, *arguments: Any) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        return backward(self, *arguments)

    monkeypatch.setattr(Trainer, "_backward", draws)
    run = Run(plan_of())
    updates = [run.train(site_seed=(site,)) for site in (1, 2)]
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert not np.array_equal(updates[0].vector, updates[1].vector), "the order of batches is the site's own"
