"""Muon against the steps of its authors, written out in NumPy; what takes its steps; its kept state."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.model.schedule import Schedule
from cloister.lm.model.weights import Weights
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.moments import Carry, Moments
from cloister.lm.training.muon import Muon, iterations_in
from cloister.lm.training.optimizer import (
    OPTIMIZERS,
    LocalOptimizer,
    hidden_matrices,
    learning_rate,
    moment_elements,
)
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import OPTIMIZERS as PLANNED
from cloister.protocol.plan.plan import LocalSection, Plan, PrivacySection
from cloister.protocol.plan.soundness import parse
from cloister.tests.lm.training import test_train

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
MUON = "local.optimizer=muon"
KEEP = "local.optimizer_state=keep"
FACTORS = ("model.adapter.rank=4", "model.adapter.base_precision=bfloat16")
"""Of an adapter over a base in lower precision."""
Matrix = npt.NDArray[np.float64]


def plan_of(*overrides: str, kind: str = "llama") -> Plan:
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }
    if kind == "llama":
        config["intermediate_size"] = 48
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    local = ["local.steps=3", "local.batch_size=4", "run.rounds=3", "data.sequence_length=16"]
    return parse("", [f"model.name=builtin:{kind}", *settings, *local, *overrides])


def some(n: int = 12, length: int = 16) -> Sequences:
    """Text that a model can learn in a few steps; each sequence is a unit."""
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 8, np.uint8).astype(np.int32)
    tokens = np.lib.stride_tricks.sliding_window_view(text, length)[::7][:n].copy()
    labels = tokens.copy()
    labels[:, 0] = NOT_LEARNED
    return Sequences(tokens, labels, None, 1, starts=np.arange(n + 1))


class Run(test_train.Run):
    """A plan with its model and trainer, which trains on the text that it can learn."""

    def train(
        self, start: np.ndarray | None = None, data: Sequences | None = None, **options: Any
    ) -> LocalUpdate:
        return super().train(start, some() if data is None else data, **options)

    def rounds(self, *numbers: int, **options: Any) -> tuple[npt.NDArray[np.float32], list[float]]:
        """Some rounds in a row; the final vector, and the loss of each round."""
        vector, losses = self.start, list[float]()
        for round in numbers:
            update = self.train(vector, round=round, **options)
            vector = vector + update.vector
            losses.append(update.loss)
        return vector, losses


# --- the step ---------------------------------------------------------------------------------------------------------


def newton_schulz(G: Matrix) -> Matrix:
    """Jordan et al.: G with its singular values moved near 1, by a quintic polynomial applied five times."""
    X = G / np.linalg.norm(G)
    X = X.T if len(G) > len(G.T) else X
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if len(G) > len(G.T) else X


def muon_by_hand(W: Matrix, gradients: list[Matrix], rates: list[float], m: float, decay: float) -> Matrix:
    """Steps of Muon with Nesterov momentum m, scaled to those of AdamW (Liu et al. 2025, eq. 4)."""
    B = np.zeros_like(W)
    for G, rate in zip(gradients, rates, strict=True):
        B = m * B + (1 - m) * G
        O = newton_schulz(m * B + (1 - m) * G)  # noqa: E741  # the papers' letter
        W = W - rate * (decay * W + 0.2 * np.sqrt(max(W.shape)) * O)
    return W


@pytest.mark.parametrize("m", [0.0, 0.9])
def test_a_step_is_that_of_the_papers(m: float) -> None:
    plan = plan_of(MUON, f"local.momentum={m}", "local.weight_decay=0.5", "local.learning_rate=0.02")
    model = load_model(plan)
    trained = dict(model.trainable())
    optimizer = LocalOptimizer(plan, model.module, list(trained.items()), CPU)
    random = np.random.default_rng(0)
    rates = [learning_rate(plan.local, step, 9) for step in range(3)]
    for kind in ("q_proj", "up_proj", "down_proj"):  # square, tall, wide
        name = f"model.layers.0.{'self_attn' if kind == 'q_proj' else 'mlp'}.{kind}.weight"
        parameter = trained[name]
        before = parameter.detach().double().numpy()
        gradients = [random.standard_normal(before.shape) for _ in rates]
        for step, gradient in enumerate(gradients):
            parameter.grad = torch.from_numpy(gradient).float()
            optimizer.step(step)
        moved = parameter.detach().double().numpy() - before
        expected = muon_by_hand(before, gradients, rates, m, 0.5) - before
        assert np.linalg.norm(moved - expected) < 1e-5 * np.linalg.norm(expected)
        for other in ((0.9 - m, 0.5), (m, 0.0)):  # another momentum, or no decay
            wrong = muon_by_hand(before, gradients, rates, *other) - before
            assert np.linalg.norm(moved - wrong) > 0.06 * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(32, 32), (48, 32), (32, 48), (1, 5)])
def test_steps_in_bfloat16_are_those_of_torch_bit_for_bit(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=random)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = (
        Muon([ours], lr=0.02, momentum=0.9, weight_decay=0.5, dtype=torch.bfloat16),
        torch.optim.Muon([theirs], lr=0.02, momentum=0.9, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        ours.grad = theirs.grad = torch.randn(shape, generator=random)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(ours, theirs)
    assert not torch.equal(ours, start)


def test_a_processor_iterates_in_float32_and_a_gpu_in_bfloat16() -> None:
    assert iterations_in(CPU) == torch.float32
    assert iterations_in(torch.device("cuda")) == torch.bfloat16


def test_a_matrix_of_zeros_takes_no_step() -> None:
    matrix = torch.nn.Parameter(torch.ones(3, 4))
    matrix.grad = torch.zeros(3, 4)
    Muon([matrix], lr=0.1, momentum=0.9, weight_decay=0.0, dtype=torch.float32).step()
    assert torch.equal(matrix, torch.ones(3, 4))


@pytest.mark.parametrize(
    ("kind", "by_adamw"),
    [
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),  # its output layer is its embedding
    ],
)
def test_muon_steps_on_the_matrices_of_hidden_layers_and_adamw_on_the_rest(
    kind: str, by_adamw: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(plan_of(MUON, kind=kind))
    name_of = {id(parameter): name for name, parameter in run.model.module.named_parameters()}
    stepped: dict[type, set[str]] = {Muon: set(), torch.optim.AdamW: set()}
    for cls, seen in stepped.items():
        step = cls.step  # type: ignore[attr-defined]  # both are optimizers

        def spy(self: Any, step: Any = step, seen: set[str] = seen) -> None:
            seen |= {name_of[id(p)] for group in self.param_groups for p in group["params"]}
            step(self)

        monkeypatch.setattr(cls, "step", spy)
    run.train()
    matrices = {name for name, p in run.model.module.named_parameters() if p.ndim == 2}
    assert by_adamw < matrices
    assert stepped[Muon] == matrices - by_adamw
    assert stepped[torch.optim.AdamW] == set(run.model.layout.names) - (matrices - by_adamw)


@pytest.mark.parametrize(
    ("scheme", "number", "factors"),
    [
        ("ffa-lora", 1, {"B"}),
        ("lora", 1, {"A", "B"}),
        ("rolora", 1, {"B"}),
        ("rolora", 2, {"A"}),
    ],
)
def test_muon_steps_on_the_factors_that_a_round_trains(scheme: str, number: int, factors: set[str]) -> None:
    plan = plan_of(
        MUON, *FACTORS, f"model.adapter.scheme={scheme}", 'model.adapter.targets=["q_proj", "lm_head"]'
    )
    model = load_model(plan)
    by_muon = hidden_matrices(model.module) & {
        name for name, _ in model.trainable(Schedule.of(plan, model.layout).of_round(number))
    }
    assert {name.partition(".lora_")[2][0] for name in by_muon} == factors
    assert all("q_proj" in name for name in by_muon), "the factors of the output layer are AdamW's"
    assert len(by_muon) == len(factors)


def test_a_step_of_a_factor_from_zero_has_orthonormal_columns_up_to_its_scale() -> None:
    """The iterations move singular values near 1, to 0.6 at least and 1.3 at most."""
    run = Run(
        plan_of(MUON, *FACTORS, "model.adapter.scheme=ffa-lora", "local.steps=1", "local.learning_rate=0.02")
    )
    moved = run.model.layout.split(run.train().vector)
    before = run.model.layout.split(run.start)
    assert len(moved) == 7
    for name, step in moved.items():
        assert ".lora_B." in name
        assert not before[name].any()
        scale = learning_rate(run.plan.local, 0, 9) * 0.2 * np.sqrt(max(step.shape))
        values = np.linalg.svd(step.astype(np.float64) / scale, compute_uv=False)
        assert len(values) == 4, "one for each column"
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_an_adapter_learns_by_muon() -> None:
    settings = ("model.adapter.scheme=lora", *FACTORS, "local.learning_rate=0.05")
    _, losses = Run(plan_of(MUON, *settings)).rounds(1, 2, 3)
    assert losses[0] > losses[1] > losses[2]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_repeats_itself_exactly() -> None:
    plan = plan_of(MUON, "local.learning_rate=0.01", "local.warmup_steps=2", "local.proximal=0.01")
    vector, losses = Run(plan).rounds(1, 2, 3)
    again, _ = Run(plan).rounds(1, 2, 3)
    np.testing.assert_array_equal(again, vector)
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 1


def test_the_rate_of_both_follows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    for cls in (Muon, torch.optim.AdamW):
        step = cls.step

        def spy(self: Any, step: Any = step) -> None:
            rates.extend({group["lr"] for group in self.param_groups})
            step(self)

        monkeypatch.setattr(cls, "step", spy)
    run = Run(plan_of(MUON, "local.warmup_steps=2"))
    run.train(round=2)
    assert rates == [learning_rate(run.plan.local, step, 9) for step in (3, 3, 4, 4, 5, 5)]


@pytest.mark.parametrize(
    ("settings", "matrix"),
    [
        ((), "model.layers.0.self_attn.q_proj.weight"),
        (
            ("model.adapter.scheme=ffa-lora", "model.adapter.rank=4"),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight",
        ),
    ],
    ids=["full", "ffa-lora"],
)
def test_private_steps_are_muons_too(settings: tuple[str, ...], matrix: str) -> None:
    plan = plan_of(MUON, *settings, "local.steps=1")
    section = {"unit": "record", "sampling_rate": 0.5, "clip": 0.3}
    private = plan.model_copy(update={"privacy": PrivacySection.model_validate(section)})
    model = load_model(private)
    start = model.layout.flatten(model.module)
    noise = NoiseStream.from_declared_seed(1)
    update = PrivateTrainer(private, model, CPU).train(
        start, some(), round=1, noise=noise, noise_multiplier=1.0
    )
    moved = model.layout.split(update.vector)[matrix]
    values = np.linalg.svd(moved.astype(np.float64), compute_uv=False)
    assert values.min() > 0.3 * values.max(), "all alike, where those of noise go down to 1/50"


# --- kept state -------------------------------------------------------------------------------------------------------


def test_each_optimizer_of_the_plan_is_in_the_table() -> None:
    assert tuple(OPTIMIZERS) == PLANNED


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_keeps_what_torch_keeps(kind: str) -> None:
    """What the table left out would not be carried to the next round."""
    section = LocalSection.model_validate_json(f'{{"optimizer": "{kind}"}}')
    for stepper in (OPTIMIZERS[kind].others, OPTIMIZERS[kind].matrices):
        if stepper is not None:
            parameter = torch.nn.Parameter(torch.ones(2, 3))
            parameter.grad = torch.ones(2, 3)
            optimizer = stepper.make([parameter], section, CPU)
            optimizer.step()
            state = {name: value for name, value in optimizer.state[parameter].items() if value is not None}
            assert set(state) == set(stepper.keeps)


@pytest.mark.parametrize("scheme", ["full", "lora"])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_kept_state_continues_as_if_there_were_no_rounds(kind: str, scheme: str, tmp_path: Path) -> None:
    plan = plan_of(f"local.optimizer={kind}", "local.weight_decay=0.1", f"model.adapter.scheme={scheme}")
    whole, cut = load_model(plan), load_model(plan)
    moments = Moments(Carry(tmp_path, tmp_path), cut.layout, Weights(cut), cut.layout)
    optimizers = {id(model): optimizer_of(plan, model) for model in (whole, cut)}
    for step in range(4):
        if step == 2:
            moments.store(optimizers[id(cut)])
            optimizers[id(cut)] = optimizer_of(plan, cut)
            moments.load(optimizers[id(cut)])
        for model in (whole, cut):
            random = torch.Generator().manual_seed(step)
            for _, parameter in model.trainable():
                parameter.grad = torch.randn(parameter.shape, generator=random)
            optimizers[id(model)].step(step)
    np.testing.assert_array_equal(cut.layout.flatten(cut.module), whole.layout.flatten(whole.module))
    assert (tmp_path / "moments").stat().st_size == 4 * len(cut.layout.names) + 8 * cut.layout.size
    elements = sum(each.numel() for _, kept in optimizers[id(cut)].states().values() for each in kept)
    sizes = {name: parameter.numel() for name, parameter in cut.trainable()}
    assert moment_elements(plan, cut.module, sizes) == elements


def optimizer_of(plan: Plan, model: LanguageModel) -> LocalOptimizer:
    return LocalOptimizer(plan, model.module, model.trainable(), CPU)


def test_a_trainer_keeps_muons_momentum(tmp_path: Path) -> None:
    kept, _ = Run(plan_of(MUON, KEEP)).rounds(1, 2, state=tmp_path)
    again = Run(plan_of(MUON, KEEP))
    first = again.train(state=tmp_path / "other")
    (tmp_path / "other" / "1" / "moments").unlink()
    without = again.train(again.start + first.vector, round=2, state=tmp_path / "other")
    assert np.abs(again.start + first.vector + without.vector - kept).max() > 1e-4
