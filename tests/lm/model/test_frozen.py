"""A frozen base in lower precision: how it is stored, what it computes, and that a run saves what it computed with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import prepare
from cloister.lm.model.model import LanguageModel, load_model, save_pretrained
from cloister.lm.model.passes import Precision
from cloister.lm.text.corpus import corpus_records
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import Plan, PrivacySection
from cloister.protocol.plan.soundness import parse
from cloister.tests.parties.evaluated import evaluate
from cloister.tests.tools.command import found, refusal, set_options
from cloister.tests.tools.raises import raises

# PEFT asks transformers 5.23 for a property under the name that transformers is phasing out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
LOWER = "model.adapter.base_precision=bfloat16"
NF4 = "model.adapter.base_precision=nf4"


def plan_of(*overrides: str, kind: str = "llama") -> Plan:
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    }
    if kind == "llama":
        config["intermediate_size"] = 64
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    name = kind if "/" in kind else f"builtin:{kind}"
    settings = settings if name != kind else []
    local = ["local.steps=4", "local.batch_size=4", "data.sequence_length=16", "local.learning_rate=0.01"]
    full = "model.adapter.scheme=full" in overrides
    adapter = [] if full else ["model.adapter.scheme=ffa-lora", "model.adapter.rank=2"]
    return parse("", [f"model.name={name}", *settings, *local, *adapter, *overrides])


def some(n: int = 12) -> Sequences:
    """Random tokens; each sequence is a unit."""
    tokens = np.random.default_rng(0).integers(0, 250, (n, 16)).astype(np.int32)
    labels = tokens.copy()
    labels[:, 0] = NOT_LEARNED
    return Sequences(tokens, labels, None, n, starts=np.arange(n + 1))


def trained(plan: Plan, model: LanguageModel) -> LocalUpdate:
    start = model.layout.flatten(model.module)
    return Trainer(plan, model, CPU).train(start, some(), round=1, site_seed=(1,))


def moved(model: LanguageModel) -> npt.NDArray[np.float32]:
    """An adapter that changes what the model says."""
    random = np.random.default_rng(1)
    return 0.1 * random.standard_normal(model.layout.size, dtype=np.float32)


# --- what is stored how -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_matrices_of_the_base_take_half_the_memory_and_nothing_else_is_lowered(kind: str) -> None:
    whole, half = load_model(plan_of(kind=kind)), load_model(plan_of(LOWER, kind=kind))
    before, after = (dict(model.module.named_parameters()) for model in (whole, half))
    assert before.keys() == after.keys()
    for name, parameter in after.items():
        lowered = parameter.ndim == 2 and ".lora_" not in name
        assert parameter.dtype == (torch.bfloat16 if lowered else torch.float32), name
        assert torch.equal(parameter, before[name].to(parameter.dtype)), name
    frozen = {name for name, p in after.items() if ".lora_" not in name}
    sizes = [sum(each[name].nbytes for name in frozen) for each in (before, after)]
    assert sizes[1] < 0.52 * sizes[0]
    assert half.layout == whole.layout
    module: Any = half.module
    if kind == "gpt2":
        assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


# --- what it computes -------------------------------------------------------------------------------------------------


def round_embeddings(model: LanguageModel) -> None:
    """Round the embeddings of a float32 model to bfloat16."""
    embeddings: Any = model.module
    weight = embeddings.get_input_embeddings().weight
    weight.data = weight.data.bfloat16().float()


def test_training_is_that_of_a_float32_base_in_bfloat16_arithmetic_to_the_bit() -> None:
    plan, reference = plan_of(LOWER), plan_of("local.precision=bfloat16")
    model, other = load_model(plan), load_model(reference)
    round_embeddings(other)
    update, expected = trained(plan, model), trained(reference, other)
    assert np.any(update.vector)
    np.testing.assert_array_equal(update.vector, expected.vector)
    assert update.loss == expected.loss
    exact = evaluate(other.module, some(), 4, CPU, "bfloat16")
    assert evaluate(model.module, some(), 4, CPU, "auto") == exact
    assert evaluate(model.module, some(), 4, CPU, "auto") != evaluate(other.module, some(), 4, CPU, "auto")


def test_private_gradients_by_hooks_are_those_of_the_reference() -> None:
    privacy = {"unit": "record", "sampling_rate": 0.5, "clip": 0.3}
    gradients = []
    for method in ("reference", "opacus"):
        section = PrivacySection.model_validate(privacy | {"method": method})
        plan = plan_of(LOWER).model_copy(update={"privacy": section})
        model = load_model(plan)
        model.layout.scatter(moved(model), model.module)
        trainer = PrivateTrainer(plan, model, CPU)
        assert trainer.method == method
        model.module.train()
        with trainer.per_unit_gradients(model.trainable()) as of:
            gradients.append(
                [
                    torch.cat([g[at].flatten().float() for g in each.gradients])
                    for each in of(some(), np.arange(8))
                    for at in range(len(each.tokens))
                ]
            )
    for one, other in zip(*gradients, strict=True):
        assert one.norm() > 0
        assert (one - other).norm() < 2e-2 * one.norm(), "further apart than bfloat16 rounds"


# --- what is saved ----------------------------------------------------------------------------------------------------


def saved_loss(
    folder: Path,
    sequences: Sequences,
    precision: Precision = "bfloat16",
    dtype: torch.dtype | str = "auto",
) -> float:
    """The loss of a saved adapter over its base, as PEFT reads them."""
    from peft import AutoPeftModelForCausalLM

    module = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return evaluate(module, sequences, 4, CPU, precision).loss


def test_a_base_that_rounding_changed_is_saved_with_its_adapter(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = load_model(plan_of("model.adapter.scheme=full"))
    save_pretrained(checkpoint, checkpoint.layout.flatten(checkpoint.module), tmp_path / "float32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "bfloat16"
    )
    checkpoint.tokenizer.save_pretrained(tmp_path / "bfloat16")
    # Transformers reads a checkpoint in its own type; this package, to train on it, in float32.
    for kind, own, dtype in (("float32", True, "auto"), ("bfloat16", False, torch.float32)):
        model = load_model(plan_of(LOWER, kind=str(tmp_path / kind)))
        assert model.own_base == own
        final = tmp_path / f"final-{kind}"
        save_pretrained(model, moved(model), final)
        assert (final / "base").exists() == own
        assert saved_loss(final, some(), dtype=dtype) == evaluate(model.module, some(), 4, CPU).loss


@pytest.mark.slow
def test_a_run_reports_the_loss_of_what_it_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_plan: Path
) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text('{"text": "patient 3 was seen on day 21. patient 3 was seen on day 21."}\n' * 3)
    settings = [
        *("model.adapter.scheme=ffa-lora", LOWER, "data.held_out=0.0", f"server.evaluation={public}"),
        *("public.source=" + str(public), "public.steps=3", "run.rounds=2", "cohort.sites=3"),
    ]
    options = set_options(settings)
    result = found(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "run"), *options)
    plan = parse(small_plan.read_text(), settings)
    data = plan.data.model_copy(update={"held_out": 0.0})
    tokenizer = load_model(plan).tokenizer
    sequences = prepare(corpus_records(str(public)).records, tokenizer, data, seed=plan.run.seed).train
    final = Path(result["run"]) / "final"
    assert saved_loss(final, sequences) == pytest.approx(result["final_loss"], rel=1e-6)
    assert saved_loss(final, sequences, "float32") == pytest.approx(result["final_loss"], rel=1e-2)


# --- NF4 --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_nf4_needs_a_gpu(small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with raises(ModelError, "model.adapter.base_precision", says=("GPU", "bfloat16")):
        load_model(plan_of(NF4))
    options = ["--set", "model.adapter.scheme=ffa-lora", "--set", NF4, "--out", str(tmp_path / "run")]
    told = refusal(capsys, "simulate", str(small_plan), *options)
    assert "model.adapter.base_precision is 'nf4'" in told


@pytest.mark.gpu
def test_nf4_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra cloister[quantized] is not installed")
    device = torch.device("cuda:0")
    plan = plan_of(NF4)
    whole, model = load_model(plan_of()), load_model(plan)
    assert model.layout == whole.layout
    assert model.own_base
    start = moved(model)
    update = Trainer(plan, model, device).train(start, some(), round=1, site_seed=(1,))
    reference = Trainer(plan_of(), whole, device).train(start, some(), round=1, site_seed=(1,))
    assert update.loss == pytest.approx(reference.loss, rel=0.05)
    for name, parameter in model.module.named_parameters():
        if "base_layer" in name:
            assert parameter.nbytes <= whole.module.get_parameter(name).nbytes / 7, name
    model.layout.scatter(start, model.module)
    here = evaluate(model.module, some(), 4, device).loss
    save_pretrained(model, start, tmp_path / "final")
    assert saved_loss(tmp_path / "final", some()) == pytest.approx(here, rel=1e-3)
