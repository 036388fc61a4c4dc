"""Private steps against loops written out by hand; what one record can change; and the noise that is released."""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from torch.nn import functional

from cloister.clients.training import dpsgd
from cloister.clients.training.dpsgd import (
    ClippedSum,
    PrivateTrainer,
    UnitGradients,
    check_method,
    poisson_batch,
)
from cloister.clients.training.release import MUST_STAY
from cloister.lm.model.layout import Layout
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.model.schedule import Schedule
from cloister.lm.model.weights import whole
from cloister.lm.parallel.parallelize import parallelize
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.optimizer import learning_rate
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import ModelError, PlanError, UpdateError
from cloister.protocol.messages.blocks import Span
from cloister.protocol.plan.plan import Plan, PrivacySection
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.carrying import carry_in
from cloister.tests.tools.overheard import Overheard
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
LENGTH = 12
METHODS = ["reference", "opacus"]
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")


class Silent(NoiseStream):
    """Batches and dropout as from a real stream, and no noise."""

    def add_gaussian(self, *_: Any, **__: Any) -> None:
        pass


SILENT, NOISY = Silent.from_declared_seed(5), NoiseStream.from_declared_seed(5)


def plan_of(*overrides: str, kind: str = "llama", **privacy: Any) -> Plan:
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    if kind != "gpt2":
        config |= {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    if kind in ("llama", "qwen2"):
        config.pop("head_dim")
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    local = ["local.steps=2", "local.batch_size=4", f"data.sequence_length={LENGTH}"]
    plan = parse("", [f"model.name=builtin:{kind}", *settings, *local, *overrides])
    section = {"unit": "record", "sampling_rate": 0.4, "clip": 0.3} | privacy
    return plan.model_copy(update={"privacy": PrivacySection.model_validate(section)})


def some(
    sizes: tuple[int, ...] = (1, 3, 1, 2, 1, 4, 1, 1, 2, 1), seed: int = 0, length: int = LENGTH
) -> Sequences:
    """Units of so many windows, of random tokens below 60, that differ much in how many are learned."""
    random = np.random.default_rng(seed)
    n = sum(sizes)
    tokens = random.integers(0, 60, (n, length)).astype(np.int32)
    labels = np.where(random.random((n, length)) < random.random((n, 1)) * 0.9, NOT_LEARNED, tokens)
    labels[:, 0], labels[:, 1] = NOT_LEARNED, tokens[:, 1]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Sequences(tokens, labels.astype(np.int32), None, n_bytes=1, starts=starts)


class Run:
    """A plan with its model and trainer, the initial vector, and the gradients that AdamW was given."""

    def __init__(self, plan: Plan, device: torch.device = CPU) -> None:
        self.plan = plan
        self.model = load_model(plan)
        self.start = self.model.layout.flatten(self.model.module)
        self.trainer = PrivateTrainer(plan, self.model, device)

    def train(self, data: Sequences | None = None, **options: Any) -> LocalUpdate:
        options = dict[str, Any](round=1, noise=NOISY, noise_multiplier=1.0) | options
        start = options.pop("start", self.start)
        if (state := options.pop("state", None)) is not None:
            options["carry"] = carry_in(state, options["round"])
        return self.trainer.train(start, some() if data is None else data, **options)

    def summed(self, data: Sequences, units: list[int]) -> npt.NDArray[np.float64]:
        """The clipped sum of these units, before noise."""
        module, layout = self.model.module.train(), self.model.layout
        trained = self.model.trainable()
        total = ClippedSum(layout, [name for name, _ in trained], self.plan.privacy.clip, CPU)
        with self.trainer.per_unit_gradients(trained) as gradients:
            for each in gradients(data, np.array(units, np.int64)):
                total.add(each.gradients)
        module.zero_grad(set_to_none=True)
        return total.release(SILENT, 1.0).double().numpy()


def stepped(monkeypatch: pytest.MonkeyPatch) -> list[npt.NDArray[np.float32]]:
    """The flat gradients of every AdamW step from now on."""
    seen: list[npt.NDArray[np.float32]] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append(torch.cat([g.flatten() for g in grads if g is not None]).cpu().numpy().copy())
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    return seen


# --- references -------------------------------------------------------------------------------------------------------


def unit_gradient(model: LanguageModel, data: Sequences, unit: int) -> list[torch.Tensor]:
    """The gradient of one unit through autograd, one window and one label mean after the other."""
    return gradient_of_rows(model, data, range(*data.starts[unit : unit + 2]))  # type: ignore[index]  # it has units


def gradient_of_rows(model: LanguageModel, data: Sequences, rows: range) -> list[torch.Tensor]:
    """The gradient of the mean over rows of the mean loss of a learned token."""
    parameters = [p for _, p in model.trainable()]
    losses = []
    for row in rows:
        logits = model.module(input_ids=torch.tensor(data.tokens[row : row + 1]).long()).logits
        losses.append(functional.cross_entropy(logits[0, :-1], torch.tensor(data.labels[row, 1:]).long()))
    return list(torch.autograd.grad(torch.stack(losses).mean(), parameters))


def norm(gradients: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))


def dpsgd_by_hand(plan: Plan, data: Sequences, noise: NoiseStream, z: float) -> npt.NDArray[np.float32]:
    """Round 1 from Abadi et al.'s Algorithm 1, with torch's own AdamW; the final vector."""
    model, local, clip = load_model(plan), plan.local, plan.privacy.clip
    layout = model.layout
    model.module.train()
    trained = [p for _, p in model.trainable()]
    anchors = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": local.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=local.betas,
    )
    rate = plan.privacy.sampling_rate
    assert data.starts is not None
    assert rate is not None
    for step in range(local.steps):
        own = noise.child("dpsgd/round-1").child(f"step-{step + 1}")
        drawn = own.child("batch").generator().random(len(data.starts) - 1)
        total = [torch.zeros_like(p) for p in trained]
        for unit in range(len(drawn)):
            if drawn[unit] < rate:
                gradient = unit_gradient(model, data, unit)
                factor = min(1.0, clip / norm(gradient))
                total = [t + factor * g for t, g in zip(total, gradient, strict=True)]
        sample = own.child("noise").gaussian(layout.size, z * clip) * (not isinstance(noise, Silent))
        parts = np.split(sample, layout.offsets[1:-1])
        for p, t, part, anchor in zip(trained, total, parts, anchors, strict=True):
            pull = local.proximal * (p.detach() - anchor)
            p.grad = (t + torch.from_numpy(part).float().view_as(t)) / (
                local.batch_size * local.accumulation
            ) + pull
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(local, step, plan.run.rounds * local.steps)
        optimizer.step()
        optimizer.zero_grad()
    return layout.flatten(model.module)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("noise", [SILENT, NOISY], ids=["silent", "noisy"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("local.clip_norm=0.001", "local.weight_decay=0.3", "local.warmup_steps=2"),
        (*FFA, "local.proximal=2.0", "local.accumulation=2"),
        ("model.adapter.scheme=lora", "model.adapter.rank=2"),
    ],
    ids=["full", "ffa-lora", "lora"],
)
def test_a_round_is_a_loop_over_units(overrides: tuple[str, ...], noise: NoiseStream, method: str) -> None:
    plan = plan_of(*overrides, method=method)
    run = Run(plan)
    assert run.trainer.method == method
    update = run.train(noise=noise, noise_multiplier=0.7)
    expected = dpsgd_by_hand(plan, some(), noise, 0.7)
    moved = np.linalg.norm(expected - run.start)
    assert moved > 0.01
    # Adam divides by the root of tiny second moments, so single elements are the last to agree.
    np.testing.assert_allclose(run.start + update.vector, expected, rtol=0, atol=2e-4)
    assert np.linalg.norm(run.start + update.vector - expected) < 1e-3 * moved


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "llama" else pytest.mark.slow) for kind in dpsgd.RIGHT_BY_OPACUS],
)
@pytest.mark.parametrize(
    "overrides",
    [(), FFA, ("model.adapter.scheme=lora", "model.adapter.rank=2")],
    ids=["full", "ffa-lora", "lora"],
)
def test_the_gradients_of_opacus_are_those_of_single_backward_passes(
    kind: str, overrides: tuple[str, ...]
) -> None:
    assert_right(Run(plan_of("model.config.num_hidden_layers=2", *overrides, kind=kind, method="opacus")))


def assert_right(run: Run) -> None:
    run.model.module.double()  # in float32 the rounding of two paths differs by 3e-5 on some processors
    run.model.module.train()
    data, trained = some(), run.model.trainable()
    for name, parameter in trained:  # B is zero at first, and hides what lies before it
        if ".lora_B." in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    assert data.starts is not None
    units = np.arange(len(data.starts) - 1)
    with run.trainer.per_unit_gradients(trained) as gradients:
        found = [
            ([g[at].clone() for g in each.gradients], each.tokens[at])
            for each in gradients(data, units)
            for at in range(len(each.tokens))
        ]
    assert len(found) == len(units)
    for unit, (gradient, tokens) in enumerate(found):
        expected = unit_gradient(run.model, data, unit)
        assert norm(gradient) == pytest.approx(norm(expected), rel=1e-5)
        assert norm([g - e for g, e in zip(gradient, expected, strict=True)]) < 1e-5 * norm(expected)
        rows = slice(data.starts[unit], data.starts[unit + 1])
        assert tokens == np.count_nonzero(data.labels[rows, 1:] != NOT_LEARNED)
    assert not any(hasattr(p, "grad_sample") for p in run.model.module.parameters())


def test_where_opacus_is_wrong_the_comparison_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpsgd, "_wrong_by_opacus", lambda *_: "")
    with pytest.raises(AssertionError, match="no gradient for each row"):
        assert_right(Run(plan_of(kind="gpt2", method="opacus")))


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_an_owner_is_the_mean_over_its_records_of_their_means_over_windows(
    method: str,
) -> None:
    run = Run(plan_of(method=method, unit="owner", windows=2, records=2))
    run.model.module.double().train()
    records = (1, 2, 2, 1, 1, 2)  # windows of each; two belong to one owner, but for the last
    data = some(records)
    starts = np.array([0, 3, 6, 7, 9])
    shares = np.repeat(1 / np.repeat([2, 2, 1, 1], [2, 2, 1, 1]) / records, records).astype(np.float32)
    owned = replace(data, starts=starts, shares=shares)
    trained = run.model.trainable()
    with run.trainer.per_unit_gradients(trained) as gradients:
        found = [
            [g[at].clone() for g in each.gradients]
            for each in gradients(owned, np.arange(4))
            for at in range(len(each.tokens))
        ]
    means = [unit_gradient(run.model, data, record) for record in range(len(records))]
    for owner, (first, last) in enumerate([(0, 1), (2, 3), (4, 4), (5, 5)]):
        expected = [(one + other) / 2 for one, other in zip(means[first], means[last], strict=True)]
        assert norm([g - e for g, e in zip(found[owner], expected, strict=True)]) < 1e-5 * norm(expected)
    equal = gradient_of_rows(run.model, owned, range(3))
    assert norm([g - e for g, e in zip(found[0], equal, strict=True)]) > 1e-2 * norm(equal)


# --- which method -----------------------------------------------------------------------------------------------------

TIED = "model.config.tie_word_embeddings=true"


@pytest.mark.parametrize(
    ("overrides", "privacy", "reason"),
    [
        ((), {}, ""),
        (FFA, {}, ""),
        ((TIED, *FFA), {}, ""),
        ((TIED,), {}, "tied"),
        (("model.name=builtin:gpt2",), {}, "type gpt2"),
        (("model.name=builtin:gpt2", *FFA), {}, "type gpt2"),
        ((), {"windows": 5}, "5 windows"),
        ((), {"windows": 5, "record": "window"}, ""),
        ((), {"unit": "owner", "windows": 2, "records": 2}, ""),
        ((), {"unit": "owner", "windows": 1, "records": 5}, "the 5 windows of one owner"),
        ((), {"unit": "owner", "windows": 5, "records": 4, "record": "window"}, ""),
    ],
)
def test_opacus_is_refused_where_it_is_not_proven_right(
    overrides: tuple[str, ...], privacy: dict[str, Any], reason: str
) -> None:
    kind = "gpt2" if any("gpt2" in override for override in overrides) else "llama"
    plan = plan_of(*overrides, kind=kind, method="opacus", **privacy)
    model = load_model(plan)
    found = why_not(plan, model)
    assert reason in found if reason else found == ""
    plain = plan.model_copy(update={"privacy": plan.privacy.model_copy(update={"method": "reference"})})
    assert why_not(plain, model) == ""


def why_not(plan: Plan, model: LanguageModel) -> str:
    """What is expected of the plan's method for a model; empty: it may be used."""
    try:
        check_method(plan, model)
    except PlanError as error:
        return error.expected if error.field == "privacy.method" else str(error)
    return ""


def test_opacus_is_refused_with_checkpointing_and_other_layers() -> None:
    plan = plan_of(method="opacus")
    model = load_model(plan)
    module: Any = model.module
    module.activation_checkpointing_enable()
    assert "checkpointing" in why_not(plan, model)
    module.activation_checkpointing_disable()
    assert why_not(plan, model) == ""

    class Scaled(torch.nn.Linear):
        pass

    module.lm_head.__class__ = Scaled
    assert "type Scaled" in why_not(plan, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it compiles
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_are_refused(method: str) -> None:
    """Which compiled code computes a unit's gradient depends on the shapes of the units before it."""
    plan = plan_of(method=method)
    model = load_model(plan)
    parallelize(model, None, torch.device("cpu"), compile=True)
    with raises(ModelError, "mesh.compile"):
        check_method(plan, model)


def test_a_unit_on_which_the_model_fails_counts_as_zero() -> None:
    """Its error would reveal that it is there: the sum is that of the other units, also where the unit has windows that
    were taken before."""
    run, data, units = Run(plan_of("local.batch_size=1")), some(), [0, 1, 2, 3]
    expected = run.summed(data, [0, 2, 3])
    assert data.starts is not None
    last = data.tokens[data.starts[2] - 1]  # of unit 1

    def fail(_module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens: torch.Tensor = named["input_ids"] if "input_ids" in named else given[0]
        if (tokens.numpy() == last).all(-1).any():
            raise IndexError("index 290 is out of bounds")

    run.model.module.register_forward_pre_hook(fail, with_kwargs=True)
    assert np.array_equal(run.summed(data, units), expected)


LARGER = [
    "data.sequence_length=13",
    "model.config.hidden_size=260",
    "model.config.intermediate_size=901",
    "local.batch_size=8",
    "model.adapter.scheme=lora",
    "model.adapter.rank=3",
]


@pytest.mark.parametrize("unit", [0, 20, 39])
def test_no_weights_let_one_unit_change_the_gradients_of_others(unit: int) -> None:
    """A coordinator may send weights whose output is rounding alone: products of the adapter's factors that cancel,
    times 1e6. A unit that leaves the batch still moves the sum by its own gradient only. With `method="opacus"` the sum
    moves by 8 C for unit 0 on a processor with AVX2, so such a plan trusts the coordinator."""
    run = crafted(plan_of(*LARGER))
    assert removed(run, unit) <= run.plan.privacy.clip * (1 + 1e-8)


def crafted(plan: Plan) -> Run:
    """A run whose down projections have adapters B A x that are zero in exact arithmetic."""
    run, random = Run(plan), np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in run.model.module.named_parameters():
            if "mlp.down_proj.lora_A" in name:
                v, w = random.integers(-(2**10), 2**10, (2, parameter.shape[1])) / 2**4
                parameter.copy_(torch.tensor(np.stack([v + w, v, w])))
            elif "mlp.down_proj.lora_B" in name:
                b = torch.tensor(random.standard_normal(len(parameter)) * 1e6)
                parameter.copy_(torch.stack([b, -b, -b], 1))
    return run


def removed(run: Run, unit: int) -> float:
    """How far the clipped sum of 40 units moves if one of them is not there."""
    data, units = some((1,) * 40, seed=1, length=13), list(range(40))
    moved = run.summed(data, units) - run.summed(data, [each for each in units if each != unit])
    return float(np.linalg.norm(moved))


@pytest.mark.parametrize(("kind", "overrides"), [("gpt2", ()), ("gpt2", FFA), ("llama", (TIED,))])
def test_the_reference_is_right_where_opacus_is_not(kind: str, overrides: tuple[str, ...]) -> None:
    no_dropout = ["resid_pdrop", "embd_pdrop", "attn_pdrop"] if kind == "gpt2" else []
    settings = [f"model.config.{key}=0.0" for key in no_dropout]
    run = Run(plan_of(*settings, *overrides, kind=kind))
    assert run.trainer.method == "reference"
    assert_right(run)


def test_checkpointing_changes_no_gradient_of_the_reference() -> None:
    plain, checkpointed = Run(plan_of(method="reference")), Run(plan_of(method="reference"))
    module: Any = checkpointed.model.module
    module.activation_checkpointing_enable()
    np.testing.assert_allclose(
        checkpointed.summed(some(), [1, 2, 5]), plain.summed(some(), [1, 2, 5]), rtol=0, atol=1e-7
    )


def test_the_windows_of_one_record_may_be_more_than_fit_at_once() -> None:
    at_once, in_pieces = (
        Run(plan_of(f"local.batch_size={size}", method="reference")).summed(some(), [1, 5]) for size in (4, 1)
    )
    np.testing.assert_allclose(in_pieces, at_once, rtol=0, atol=1e-7)


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_each_unit_is_drawn_with_the_plans_rate_on_its_own(rate: float) -> None:
    n, draws = 400, 500
    batches = [poisson_batch(NOISY.child(f"{rate}/{draw}"), n, rate) for draw in range(draws)]
    sizes = np.array([len(batch) for batch in batches])
    per_unit = np.bincount(np.concatenate(batches), minlength=n)
    assert sizes.sum() == per_unit.sum()
    low, high = stats.binom.interval(1 - 1e-9, n * draws, rate)
    assert low <= sizes.sum() <= high
    low, high = stats.binom.interval(1 - 1e-9 / n, draws, rate)
    assert ((low <= per_unit) & (per_unit <= high)).all()
    if rate < 1:  # binomial sizes, and not the constant ones of shuffling
        spread = ((sizes - n * rate) ** 2).sum() / (n * rate * (1 - rate))
        low, high = stats.chi2.interval(1 - 1e-9, draws)
        assert low <= spread <= high
    else:
        assert (sizes == n).all()


def test_what_is_drawn_are_units_with_the_rate_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []

    def spy(noise: NoiseStream, n: int, rate: float) -> npt.NDArray[np.int64]:
        asked.append((n, rate))
        return poisson_batch(noise, n, rate)

    monkeypatch.setattr(dpsgd, "poisson_batch", spy)
    Run(plan_of(sampling_rate=0.25)).train()
    assert asked == [(10, 0.25)] * 2


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_is_a_step_with_noise(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan_of(*FFA, sampling_rate=1e-12, method=method))
    seen = stepped(monkeypatch)
    update = run.train()
    assert (update.tokens, update.loss) == (0, 0.0)
    assert len(seen) == 2
    assert all(gradient.any() for gradient in seen)
    assert update.vector.any()
    no_units = run.train(some(()))
    np.testing.assert_array_equal(no_units.vector, update.vector)


# --- the noise that is released ---------------------------------------------------------------------------------------


def released(run: Run, data: Sequences, z: float, monkeypatch: pytest.MonkeyPatch) -> npt.NDArray[np.float64]:
    """What AdamW got, times the expected batch, where every gradient is zero: the noise on the sum."""
    with monkeypatch.context() as patch:
        seen = stepped(patch)
        run.train(data, noise_multiplier=z)
    local = run.plan.local
    return np.concatenate(seen).astype(np.float64) * (local.batch_size * local.accumulation)


def assert_noise(noise: npt.NDArray[np.float64], sigma: float) -> None:
    low, high = stats.chi2.interval(1 - 1e-9, noise.size)
    assert low <= (noise**2).sum() / sigma**2 <= high
    assert abs(noise.mean()) < 6.2 * sigma / math.sqrt(noise.size)


def teaches_nothing() -> Sequences:
    """Units that go through the model and have no gradient, because nothing of them is learned."""
    data = some()
    return Sequences(data.tokens, np.full_like(data.labels, NOT_LEARNED), None, 1, data.starts)


STEPS = "local.steps=12"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("batch_size", [4, 7])
@pytest.mark.parametrize("scheme", [(), FFA], ids=["full", "ffa-lora"])
def test_the_released_noise_has_the_claimed_deviation(
    method: str,
    accumulation: int,
    batch_size: int,
    scheme: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (f"local.accumulation={accumulation}", f"local.batch_size={batch_size}")
    run = Run(plan_of(*sizes, STEPS, *scheme, clip=0.25, method=method))
    noise = released(run, teaches_nothing(), 0.8, monkeypatch)
    assert noise.size == 12 * run.model.layout.size
    assert_noise(noise, 0.8 * 0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["reference", "opacus"])
def test_a_gpu_releases_the_claimed_noise(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan_of(STEPS, *FFA, clip=0.25, method=method), GPU)
    noise = released(run, teaches_nothing(), 0.8, monkeypatch)
    assert noise.size == 12 * run.model.layout.size
    assert_noise(noise, 0.8 * 0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["reference", "opacus"])
def test_a_gpu_sums_the_same_gradients(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("local.steps=1", "local.precision=float32", method=method)
    seen = stepped(monkeypatch)
    for device in (CPU, GPU):
        Run(plan, device).train(noise_multiplier=1e-6)
    assert np.linalg.norm(seen[0]) > 0.01
    assert np.linalg.norm(seen[0] - seen[1]) < 1e-4 * np.linalg.norm(seen[0])


def test_noise_is_keyed_by_step_round_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan_of(*FFA, sampling_rate=1e-12))
    seen = stepped(monkeypatch)
    run.train(round=1)
    run.train(round=2)
    assert len({gradient.tobytes() for gradient in seen}) == 4
    own = NOISY.child("dpsgd/round-2").child("step-1").child("noise")
    values = np.zeros(run.model.layout.size, np.float32)
    own.add_gaussian(values, 0.3)
    np.testing.assert_array_equal(seen[2], values / np.float32(4))


@pytest.mark.parametrize("rows", [1, 3, 10**6])
def test_a_rectangle_has_the_noise_of_its_place(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quarters of each matrix, as four ranks have them, in any number of rows at a time."""
    layout = load_model(plan_of()).layout
    full = np.zeros(layout.size)
    NOISY.add_gaussian(full, 0.3)
    matrices = [each for each in whole(layout) if each.width > 1]
    monkeypatch.setattr(dpsgd, "_AT_ONCE", rows * max(each.width for each in matrices))

    def half(span: Span, which: int) -> Span:
        return Span(which * span.size // 2, (which + 1) * span.size // 2)

    for top, left in itertools.product((0, 1), repeat=2):
        held = [
            each._replace(rows=half(each.rows, top), columns=half(each.columns, left)) for each in matrices
        ]
        weights: Any = SimpleNamespace(held=held, sum_over_replicas=lambda summed: summed)
        total = ClippedSum(layout, [each.name for each in held], 0.3, CPU, weights)
        expected = []
        for each, part in zip(matrices, held, strict=True):
            matrix = full[each.offset : each.offset + each.size].reshape(-1, each.width)
            rectangle = matrix[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
            expected.append(rectangle.ravel())
        found = total.release(NOISY, 0.3).numpy()
        np.testing.assert_array_equal(found, np.concatenate(expected, dtype=np.float32))


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_change_neither_noise_nor_sum(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stepped(monkeypatch)
    for size, accumulation in ((8, 1), (4, 2)):
        Run(
            plan_of(
                "local.steps=1",
                f"local.batch_size={size}",
                f"local.accumulation={accumulation}",
                method=method,
            )
        ).train()
    np.testing.assert_allclose(seen[0], seen[1], rtol=0, atol=1e-7)


# --- what one unit can change -----------------------------------------------------------------------------------------


def most_changed(run: Run, data: Sequences) -> float:
    """The largest L2 norm by which one unit changes the sum over the others."""
    assert data.starts is not None
    units = list(range(len(data.starts) - 1))
    whole = run.summed(data, units)
    return max(
        float(np.linalg.norm(whole - run.summed(data, [other for other in units if other != unit])))
        for unit in units
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", [(), FFA], ids=["full", "ffa-lora"])
@pytest.mark.parametrize("scale", [1.0, 1e12], ids=["usual", "huge"])
def test_one_unit_changes_the_sum_by_at_most_the_clip(
    method: str, scheme: tuple[str, ...], scale: float
) -> None:
    run = Run(plan_of(*scheme, clip=0.05, method=method))
    head = next(p for name, p in run.model.module.named_parameters() if "lm_head" in name)
    head.data.mul_(scale)  # the gradients of all layers below grow with it
    for seed in range(2):
        changed = most_changed(run, some((1, 3, 1, 4, 2), seed))
        assert changed <= 0.05 * (1 + 1e-6)  # `summed` is float32
        assert changed > 0.05 * 0.99, "nothing here was long enough to be clipped"


def skip_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)


@pytest.mark.parametrize("method", METHODS)
def test_a_sum_that_does_not_clip_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(plan_of(clip=0.05, method=method))
    skip_the_clip(monkeypatch)
    with raises(AssertionError, "a clipped gradient", says="above 0.05"):
        run.train()
    monkeypatch.setattr(ClippedSum, "_check", lambda *_: None)
    assert most_changed(run, some((1, 3, 1, 4, 2))) > 0.05 * 2, "the test above would not see it"


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_keeps_the_bound(method: str) -> None:
    run = Run(plan_of("local.precision=bfloat16", *FFA, clip=0.05, method=method))
    exact = Run(plan_of("local.precision=float32", *FFA, clip=0.05, method=method))
    data = some((1, 3, 1, 4, 2))
    assert 0.05 * 0.99 < most_changed(run, data) <= 0.05 * (1 + 1e-5)
    found, expected = run.summed(data, [0, 1, 2]), exact.summed(data, [0, 1, 2])
    assert 0 < np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_a_short_gradient_is_left_as_it_is() -> None:
    run = Run(plan_of(clip=100.0))
    found = run.summed(some(), [3])
    expected = torch.cat([g.flatten() for g in unit_gradient(run.model, some(), 3)])
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_unit_whose_gradient_is_not_finite_counts_as_zero(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(plan_of(*FFA, "local.steps=1", sampling_rate=1.0, method=method))
    table = next(p for name, p in run.model.module.named_parameters() if "embed_tokens" in name)
    table.data[63] = math.nan
    clean = some((1, 3, 1, 2))
    data = some((1, 3, 1, 2))
    data.tokens[2, 0] = 63  # in one window of the unit that has three
    assert not np.isnan(run.summed(data, [0, 1, 2, 3])).any()
    np.testing.assert_array_equal(run.summed(data, [1]), 0)
    np.testing.assert_allclose(
        run.summed(data, [0, 1, 2, 3]), run.summed(clean, [0, 2, 3]), rtol=0, atol=1e-7
    )
    with caplog.at_level(logging.WARNING):
        update = run.train(data)
    (message,) = caplog.messages
    assert message.startswith("1 gradients of single records")
    assert message.endswith(MUST_STAY)
    assert math.isfinite(update.loss)
    assert update.tokens == np.count_nonzero(data.labels[[0, 4, 5, 6]] != NOT_LEARNED)


@pytest.mark.parametrize("clip", [1e-9, 1.0, 1e10])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20, 1e31, 3e38])
def test_gradients_of_any_size_are_clipped_or_left_out(size: float, clip: float) -> None:
    total = ClippedSum(Layout(("a",), ((1000,),)), ["a"], clip, CPU)
    random = torch.Generator().manual_seed(0)
    gradient = (torch.rand(3, 1000, generator=random) - 0.5) * 2 * size
    gradient[1, 7] = -math.inf
    added = total.add([gradient.clone()])
    released = total.release(SILENT, 1.0).double()
    assert added.tolist() == [float(gradient[0].double().norm()) <= clip * 1e30, False, added[0].item()]
    assert float(released.norm()) <= 2 * clip * (1 + 1e-5)
    one = ClippedSum(Layout(("a",), ((1000,),)), ["a"], clip, CPU)
    if one.add([gradient[:1].clone()]).item() and gradient[0].double().norm() > clip:
        assert float(one.release(SILENT, 1.0).double().norm()) == pytest.approx(clip, rel=1e-5)


def test_a_sum_is_released_once() -> None:
    layout = Layout(("a", "b"), ((2,), (1, 2)))
    total = ClippedSum(layout, ["b"], 1.0, CPU)
    assert total.add([torch.tensor([[[3.0, 4.0]], [[0.0, math.inf]]])]).tolist() == [True, False]
    np.testing.assert_allclose(total.release(SILENT, 1.0).numpy(), [0, 0, 0.6, 0.8], rtol=1e-5)
    with raises(AssertionError, "the sum"):
        total.release(SILENT, 1.0)
    with raises(AssertionError, "a gradient"):
        total.add([torch.zeros(1, 1, 2)])


# --- what rounding can change -----------------------------------------------------------------------------------------


class Planted(PrivateTrainer):
    """Takes the steps of `PrivateTrainer` with gradients that an adversary chose."""

    at_a_time = 1
    planted: npt.NDArray[np.float32]
    """(U, elements of the trained parameters)."""

    @contextmanager
    def per_unit_gradients(self, trained: Any) -> Iterator[Any]:
        sizes, shapes = [p.numel() for _, p in trained], [p.shape for _, p in trained]

        def gradients(_: Sequences, units: npt.NDArray[np.int64]) -> Iterator[UnitGradients]:
            for begin in range(0, len(units), self.at_a_time):
                rows = torch.from_numpy(self.planted[units[begin : begin + self.at_a_time]])
                parts = torch.split(rows, sizes, dim=1)
                each = [part.reshape(-1, *shape).clone() for part, shape in zip(parts, shapes, strict=True)]
                yield UnitGradients(each, torch.zeros(len(rows)), np.zeros(len(rows), np.int64))

        yield gradients


CLIP = 0.5


def adversarial(n: int) -> npt.NDArray[np.float32]:
    """(n, 4): the unit n // 2 decides in which binade the sum is when the later units are added.

    With it the first element of a float32 sum is above n / 2 clips, a power of two, and each later unit rounds to
    nothing; without it the sum is below, where the numbers are twice as dense, and each later unit rounds up.
    """
    units = np.zeros((n, 4), np.float32)
    units[: n // 2, 0] = 10 * CLIP  # to be clipped
    units[n // 2 - 1, 0] = 0.5 * CLIP
    units[n // 2, 0] = 10 * CLIP
    units[n // 2 + 1 :, 0] = -0.41 * CLIP * (n - 1) / 2 * 2.0**-23
    units[n // 2 + 1 :, 1] = CLIP / 7
    return units


def moved_by_the_unit(n: int, at_a_time: int, device: torch.device = CPU) -> float:
    """By how much the unit n // 2 moves the sum of a step of the trainer, in clipping norms."""
    plan = plan_of("local.steps=1", *FFA, clip=CLIP, sampling_rate=1.0)
    trainer = Planted(plan, load_model(plan), device)
    trainer.at_a_time = at_a_time
    layout = load_model(plan).layout
    sums = []
    for units in (adversarial(n), np.delete(adversarial(n), n // 2, axis=0)):
        trainer.planted = np.pad(units, ((0, 0), (0, layout.size - 4)))
        data = some((1,) * len(units))
        stream = Overheard.from_declared_seed(1)
        trainer.train(np.zeros(layout.size, np.float32), data, round=1, noise=stream, noise_multiplier=1.0)
        sums += stream.sums
    with_it, without = sums
    assert with_it[0] > 0.49 * n * CLIP, "the adversary's units were not added up"
    return float(np.linalg.norm(with_it - without)) / CLIP


@pytest.mark.slow
@pytest.mark.parametrize(("n", "at_a_time"), [(4097, 1), (4097, 64), (16385, 64)])
def test_rounding_lets_no_unit_move_the_sum_by_more_than_the_clip(n: int, at_a_time: int) -> None:
    assert 1 - 1e-5 < moved_by_the_unit(n, at_a_time) <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rounding_lets_no_unit_move_the_sum_by_more_on_a_gpu() -> None:
    assert 1 - 1e-5 < moved_by_the_unit(4097, 64, torch.device("cuda")) <= 1


@pytest.mark.slow
def test_in_a_sum_in_float32_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    class InFloat32(ClippedSum):
        def add(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
            flat = [gradient.reshape(len(gradient), -1) for gradient in gradients]
            norms = torch.cat(flat, dim=1).double().norm(dim=1)
            self._scale(flat, norms)
            self.floats = getattr(self, "floats", 0) + torch.cat(flat, dim=1).sum(0)
            return torch.ones(len(norms), dtype=torch.bool)

        def so_far(self) -> torch.Tensor:
            return self.floats.double()

    monkeypatch.setattr(dpsgd, "ClippedSum", InFloat32)
    assert moved_by_the_unit(4097, 1) > 1.2


@pytest.mark.parametrize("clip", [1e-6, 0.7, 1.0, 1e6])
def test_the_sum_is_that_of_the_clipped_gradients(clip: float) -> None:
    """To less than 1e-6 of the clip for each unit; in another order, and in other portions, it is the same sum."""
    gradients = np.random.default_rng(0).normal(0, clip / 20, (300, 400)).astype(np.float32)
    norms = np.linalg.norm(gradients.astype(np.float64), axis=1, keepdims=True)
    expected = (gradients * np.minimum(1, clip / norms)).sum(0)
    sums = []
    for rows, at_a_time in ((gradients, 1), (gradients[::-1].copy(), 7)):
        total = ClippedSum(Layout(("a",), ((400,),)), ["a"], clip, CPU)
        for begin in range(0, 300, at_a_time):
            total.add([torch.from_numpy(rows[begin : begin + at_a_time].copy())])
        sums.append(total.so_far().numpy())
    np.testing.assert_array_equal(sums[0], sums[1])
    assert np.linalg.norm(sums[0] - expected) < 300 * 2e-6 * clip


def test_more_units_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpsgd, "_MOST_UNITS", 3)
    total = ClippedSum(Layout(("a",), ((1,),)), ["a"], 1.0, CPU)
    total.add([torch.ones(2, 1)])
    with pytest.raises(AssertionError, match="3 units do not fit"):
        total.add([torch.ones(1, 1)])


# --- determinism and secrecy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_round_repeats_itself_whatever_ran_before(method: str) -> None:
    plan = plan_of(method=method)
    first = Run(plan).train(round=2)
    used = Run(plan)
    used.train(start=used.start + 1, noise=NoiseStream.from_declared_seed(6))
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again = used.train(round=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(again.vector, first.vector)
    assert (again.loss, again.tokens) == (first.loss, first.tokens)
    other = used.train(round=2, noise=NoiseStream.from_declared_seed(6))
    assert not np.array_equal(other.vector, first.vector)


def test_the_public_seed_decides_nothing() -> None:
    """GPT-2 has dropout: its masks come from the secret stream too."""
    runs = [Run(plan_of(f"run.seed={seed}", kind="gpt2")) for seed in (1, 2)]
    first, second = (run.train(start=runs[0].start, noise=SILENT) for run in runs)
    np.testing.assert_array_equal(first.vector, second.vector)
    masked = runs[0].train(start=runs[0].start, noise=Silent.from_declared_seed(7))
    assert not np.array_equal(masked.vector, first.vector)


def test_dropout_masks_differ_from_stream_to_stream() -> None:
    run = Run(plan_of("local.steps=1", kind="gpt2", sampling_rate=1.0))
    one, other = (run.train(noise=Silent.from_declared_seed(seed)).loss for seed in (1, 2))
    assert one != other, "every unit is drawn: only dropout can differ"


def test_the_masks_of_each_unit_come_from_a_whole_state() -> None:
    """Two seeds that are equal modulo 2^32 give torch's generator for CPUs one state: a seed has no more to give."""
    run, states = Run(plan_of("local.steps=2", kind="gpt2", sampling_rate=1.0)), []
    run.model.module.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    run.train(some((1,) * 5))
    words = [state.view(torch.int64)[3:627] for state in states]
    assert len({tuple(each.tolist()) for each in words}) == len(words) == 10
    for each in words:
        assert not torch.equal(seeded_words(int(each[0])), each)
    assert torch.equal(seeded_words(7), seeded_words(7 + 2**32)), "torch uses all of a seed by now"
    known = np.random.MT19937()
    known.state = {
        "bit_generator": "MT19937",
        "state": {"key": words[3].numpy().astype(np.uint32), "pos": 624},
    }
    generator = torch.Generator()
    generator.set_state(states[3])
    drawn = [torch.randint(2**32, (1,), generator=generator).item() for _ in range(700)]
    assert drawn == known.random_raw(1400)[1::2].tolist(), "the words are not where they are thought to be"


def seeded_words(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state().view(torch.int64)[3:627]


# --- what it shares with the other trainer ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("round", "moved"), [(1, "lora_B"), (2, "lora_A")])
def test_the_frozen_half_of_rolora_stays(round: int, moved: str, method: str) -> None:
    run = Run(plan_of("model.adapter.scheme=rolora", "model.adapter.rank=2", method=method))
    update = run.train(start=run.start + np.float32(0.01), round=round)
    trained = Schedule.of(run.plan, run.model.layout).of_round(round)
    for name, part in trained.split(update.vector).items():
        assert moved in name
        assert np.any(part), name


def test_kept_moments_go_on(tmp_path: Path) -> None:
    run = Run(plan_of("local.optimizer_state=keep"))
    run.train(state=tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["1", "moments"]
    kept, reset = run.train(round=2, state=tmp_path), run.train(round=2)
    assert not np.array_equal(kept.vector, reset.vector)


def test_progress_is_told_every_step_and_rates_follow_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = Run(plan_of("local.warmup_steps=3")), list[int]()
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW) -> None:
        rates.extend({group["lr"] for group in self.param_groups})
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run.train(round=2, progress=steps.append)
    assert steps == [1, 2]
    assert rates == [learning_rate(run.plan.local, at, 20) for at in (2, 3)]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_plans_that_are_not_of_this_kind() -> None:
    """No sound plan comes here with them, so it is a defect."""
    for privacy in ({"unit": "site"}, {"sampling_rate": None}):
        with pytest.raises(AssertionError):
            Run(plan_of(**privacy))


def test_sequences_without_units_and_noise_that_is_none() -> None:
    run, data = Run(plan_of()), some()
    with raises(ValueError, "sequences"):
        run.train(Sequences(data.tokens, data.labels, None, 1))
    for z in (0.0, -1.0, math.nan, math.inf):
        with raises(ValueError, "noise_multiplier"):
            run.train(noise_multiplier=z)


def test_a_change_that_is_not_finite_is_refused_without_the_loss() -> None:
    run = Run(plan_of("local.learning_rate=1e38"))
    with raises(UpdateError, "the update of round 1") as refused:
        run.train(noise_multiplier=1e30)
    assert "loss" not in str(refused.value)
