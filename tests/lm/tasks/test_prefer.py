"""Preferences: DPO's loss and gradients against the formula on each text alone, one pair as one unit, the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cloister.clients.training.dpsgd import check_method
from cloister.lm.data.prepare import prepare
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.model.passes import Forward
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.records import Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.lm.training.evaluate import Evaluator
from cloister.lm.training.public import train_in_public
from cloister.lm.training.train import Trainer
from cloister.privacy.accounting.claims import unit_in_words
from cloister.protocol.errors import PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.simulations.poison import altered
from cloister.tests.parties.task_runs import CPU, Made, in_units, of_units
from cloister.tests.tools.command import done, found
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # read by PEFT
    pytest.mark.usefixtures("one_thread"),
]

PLAN = """
[run]
name = "polite"
rounds = 2

[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2

[model.adapter]
scheme = "ffa-lora"
rank = 2

[data]
task = "prefer"
format = "prompt"
sequence_length = 16
beta = 0.3
held_out = 0.2

[local]
steps = 8
batch_size = 4
learning_rate = 2e-2

[cohort]
sites = 3
"""
RECORD = (
    "data.held_out=0.0",
    "simulation.public=0.2",
    "server.evaluation=simulation:public",
    "aggregation.weighting=uniform",
    "privacy.unit=record",
    "privacy.sampling_rate=0.3",
    "privacy.noise_multiplier=0.5",
    "privacy.delta=1e-3",
)
OWNER = ("privacy.unit=owner", "data.owner=by", "privacy.records=2")
SCHEMES = ("ffa-lora", "rolora", "lora")


def plan_of(*settings: str) -> Plan:
    return parse(PLAN, settings)


def pairs(count: int) -> list[dict[str, Any]]:
    """Answers in small and in large letters, of different lengths; some are cut."""
    words = ("yes", "no, never", "perhaps it is so", "of course")
    return [
        {"prompt": f"{n % 7}? ", "chosen": word, "rejected": words[(n + 1) % 4].upper(), "by": n % 4}
        for n in range(count)
        for word in [words[n % 4]]
    ]


def moved(*settings: str) -> LanguageModel:
    """The plan's model with an adapter that has been trained, so that it is not the reference."""
    model = load_model(plan_of(*settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for _, parameter in model.trainable():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def rows_of(records: list[dict[str, Any]], *settings: str) -> Sequences:
    data = plan_of("data.held_out=0.0", "server.evaluation=none", *settings).data
    return prepare(records, byte_tokenizer(), data, seed=0).train


def log_probability(module: Any, prompt: str, completion: str) -> torch.Tensor:
    """Of the tokens of a completion and the end token that fit into a sequence, from the one text alone."""
    tokens = [*prompt.encode(), *completion.encode(), 256][:16]
    logits = module(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    each = logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    total: torch.Tensor = each[len(prompt.encode()) - 1 :].sum()
    return total


def formula(module: Any, record: dict[str, Any], beta: float = 0.3) -> torch.Tensor:
    """The loss as DPO's authors and TRL's DPOTrainer (`loss_type="sigmoid"`) have it, with PEFT's own way to the
    reference."""
    texts = [(record["prompt"], record[field]) for field in ("chosen", "rejected")]
    trained = {name: each.requires_grad for name, each in module.named_parameters()}
    with torch.no_grad(), module.disable_adapter():
        reference = [log_probability(module, *text) for text in texts]
    for name, each in module.named_parameters():
        each.requires_grad_(trained[name])
    chosen, rejected = (log_probability(module, *text) for text in texts)
    logits = (chosen - rejected) - (reference[0] - reference[1])
    return -functional.logsigmoid(beta * logits)


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_row_has_both_texts_of_a_pair() -> None:
    records = [
        {"prompt": "a? ", "chosen": "yes", "rejected": "not at all, never"},
        {"prompt": "a prompt of 15 b", "chosen": "yes", "rejected": "no"},  # no completion fits
        {"prompt": "a? ", "chosen": "yes"},
        {"prompt": "", "chosen": "b", "rejected": ""},  # nothing is rejected
        {"prompt": "", "chosen": "b", "rejected": "c"},
    ]
    unusable = Unusable()
    data = plan_of("data.held_out=0.0", "server.evaluation=none").data
    made = prepare(records, byte_tokenizer(), data, seed=0, unusable=unusable)
    assert dict(made.left_out) == {
        "without the fields of a pair": 1,
        "without a learnable token within data.sequence_length": 2,
    }
    tokens, labels = made.train.tokens, made.train.labels
    assert tokens.shape == labels.shape == (2, 32)
    first, second = [*b"a? yes", 256], [*b"a? not at all, never", 256][:16]
    assert tokens[0].tolist() == first + [257] * 9 + second
    assert labels[0].tolist() == [NOT_LEARNED] * 3 + first[3:] + [NOT_LEARNED] * 12 + second[3:]
    assert labels[1].tolist() == ([NOT_LEARNED, 256] + [NOT_LEARNED] * 14) * 2
    assert task_of(data).learned(task_of(data).targets(labels)).tolist() == [1, 1]


def test_the_unit_is_a_pair() -> None:
    plan = plan_of(*RECORD)
    made = in_units(plan, pairs(9)).train
    assert made.starts is not None
    np.testing.assert_array_equal(made.starts, np.arange(10))
    assert unit_in_words(plan.data, plan.privacy) == (
        "one prompt with its two completions, of which the first 16 tokens of the prompt with each completion are used"
    )
    assert plan.most_labels() == 8 * 4


def test_public_training_learns_the_chosen_completions() -> None:
    task = task_of(plan_of().data)
    learned = task_of(task.in_public())
    ((_, example),) = learned.examples(pairs(1), byte_tokenizer(), Unusable())
    assert example.tokens.tolist() == [*b"0? yes", 256]
    assert example.role.tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.slow
def test_the_reference_has_the_public_training(tmp_path: Path) -> None:

    path = tmp_path / "public.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in pairs(8)))
    plan = plan_of(f"public.source={path}", "public.steps=2", "public.batch_size=4")
    base = train_in_public(plan, str(path), lambda _: None)
    model, fresh = load_model(plan, base), load_model(plan)
    assert loss_of(model, rows_of(pairs(4))) == pytest.approx(np.log(2), abs=1e-6)
    weights, others = (dict(each.module.named_parameters()) for each in (model, fresh))
    name = "base_model.model.model.embed_tokens.weight"
    assert not torch.equal(weights[name], others[name])


def loss_of(model: LanguageModel, data: Sequences) -> float:
    return Evaluator(task_of(plan_of().data), model.module, 4, CPU).held_out(data).loss


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_at_the_start_the_model_is_its_reference_bit_by_bit(scheme: str) -> None:
    plan, data = plan_of(f"model.adapter.scheme={scheme}"), rows_of(pairs(5))
    model = load_model(plan)
    trained = {name for name, each in model.module.named_parameters() if each.requires_grad}
    task = task_of(plan.data)
    forward = Forward(task, model.module, CPU, "float32")
    targets = task.targets(data.labels)
    logits, wanted = forward(torch.tensor(data.tokens).long(), torch.tensor(targets))
    assert logits.shape == (5, 1, 2)
    assert not logits.any()
    assert wanted.tolist() == [[1]] * 5
    found = Evaluator(task, model.module, 4, CPU).held_out(data)
    assert (found.correct, found.tokens) == (0, 5)
    assert found.loss == pytest.approx(np.log(2), abs=1e-7)
    assert {name for name, each in model.module.named_parameters() if each.requires_grad} == trained


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_and_gradient_are_those_of_the_formula_on_each_text_alone(scheme: str) -> None:
    settings = (
        f"model.adapter.scheme={scheme}",
        "local.steps=1",
        "local.batch_size=6",
        "local.clip_norm=0.0",
    )
    plan, records = plan_of(*settings), pairs(6)
    model, data = moved(*settings), rows_of(records)
    module: Any = model.module.eval()
    trainer = Trainer(plan, model, CPU)
    trained = (
        model.trainable() if scheme != "rolora" else [e for e in model.trainable() if ".lora_B." in e[0]]
    )
    losses = torch.stack([formula(module, record) for record in records])
    wanted = torch.autograd.grad(losses.mean(), [parameter for _, parameter in trained])
    sums = Evaluator(task_of(plan.data), module, 4, CPU).held_out(data)
    assert sums.loss_nats == pytest.approx(losses.sum().item(), rel=1e-5)
    assert sums.correct == int((losses < np.log(2)).sum())
    assert 0 < sums.correct < 6
    figures = task_of(plan.data).figures(sums)
    assert figures == {"loss": sums.loss, "preference_accuracy": sums.correct / 6}
    seen: dict[str, torch.Tensor] = {}

    def keep(_optimizer: object, _arguments: object, _options: object) -> None:
        parameters = dict(module.named_parameters())
        seen.update({name: each.grad.clone() for name, each in parameters.items() if each.grad is not None})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        update = trainer.train(model.layout.flatten(module), data, round=1, site_seed=(0,))
    finally:
        hook.remove()
    assert update.tokens == 6
    assert update.loss == pytest.approx(sums.loss, rel=1e-5)
    assert seen.keys() == {name for name, _ in trained}
    for (name, _), gradient in zip(trained, wanted, strict=True):
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [(), OWNER], ids=["record", "owner"])
@pytest.mark.parametrize("scheme", ["ffa-lora", "lora"])
def test_the_gradient_of_a_unit_is_that_of_its_own_pairs(scheme: str, settings: tuple[str, ...]) -> None:
    adapter = f"model.adapter.scheme={scheme}"
    plan, records = plan_of(*RECORD, adapter, *settings), pairs(8)
    model = moved(*RECORD, adapter)
    trained = model.trainable()
    own: list[list[dict[str, Any]]] = [[record] for record in records]
    if settings:
        own = [[record for record in records if record["by"] == by] for by in range(4)]
    gradients = of_units(plan, model, records)
    assert len(gradients) == len(own)
    for some, gradient in zip(own, gradients, strict=True):
        loss = torch.stack([formula(model.module, record) for record in some]).mean()
        wanted = torch.autograd.grad(loss, [parameter for _, parameter in trained])
        for (name, _), each in zip(trained, wanted, strict=True):
            torch.testing.assert_close(gradient[name], each, rtol=1e-4, atol=1e-5)


def test_the_reference_has_no_dropout_and_no_gradient() -> None:
    model, data = moved(), rows_of(pairs(2))
    seen = []

    def see(module: torch.nn.Module, *_: object) -> None:
        seen.append((module.training, torch.is_grad_enabled()))

    dict(model.module.named_modules())["base_model.model.model.layers.0"].register_forward_pre_hook(see)
    task = task_of(plan_of().data)
    targets = torch.tensor(task.targets(data.labels))
    Forward(task, model.module.train(), CPU, "float32")(torch.tensor(data.tokens).long(), targets)
    assert seen == [(False, False), (True, True)]
    assert all(each.training for each in model.module.modules())


def test_another_pair_in_the_batch_changes_nothing() -> None:
    model, task = moved(), task_of(plan_of().data)
    forward, data = Forward(task, model.module.eval(), CPU, "float32"), rows_of(pairs(4))
    tokens, targets = torch.tensor(data.tokens).long(), torch.tensor(task.targets(data.labels))
    parameters = [parameter for _, parameter in model.trainable()]

    def of_first(rows: list[int]) -> tuple[float, list[torch.Tensor]]:
        logits, wanted = forward(tokens[rows], targets[rows])
        loss = functional.cross_entropy(logits[0], wanted[0])
        return loss.item(), list(torch.autograd.grad(loss, parameters))

    alone, gradients = of_first([0])
    for others in ([1, 2], [3, 3]):
        loss, beside = of_first([0, *others])
        assert loss == pytest.approx(alone, rel=1e-5)
        for one, other in zip(gradients, beside, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_row_that_is_no_record_has_no_loss_and_no_gradient() -> None:
    model, task = moved(), task_of(plan_of().data)
    forward = Forward(task, model.module.eval(), CPU, "float32")
    targets: npt.NDArray[np.int64] = np.full((1, 32), NOT_LEARNED)
    logits, wanted = forward(torch.zeros(1, 32, dtype=torch.long), torch.tensor(targets))
    assert wanted.tolist() == [[NOT_LEARNED]]
    loss = functional.cross_entropy(logits[0], wanted[0], reduction="sum")
    gradients = torch.autograd.grad(loss, [parameter for _, parameter in model.trainable()])
    assert not any(each.any() for each in gradients)
    assert task.learned(targets).tolist() == [0]


def test_opacus_is_refused() -> None:
    plan = plan_of(*RECORD, "privacy.method=opacus")
    with raises(PlanError, "privacy.method"):
        check_method(plan, load_model(plan))


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("model.adapter.scheme=full",), "data.task"),
        (("data.format=text",), "data.task"),
        (("data.completion_field=answer",), "data.completion_field"),
        (("data.beta=0",), "data.beta"),
        (("data.packing=false",), "data.packing"),
        (("data.task=causal", "data.beta=0.2"), "data.beta"),
        (("data.task=causal", "data.chosen_field=good"), "data.chosen_field"),
        ((*RECORD, "privacy.windows=2"), "privacy.windows"),
    ],
)
def test_an_unsound_plan_is_refused(settings: tuple[str, ...], field: str) -> None:
    with raises(PlanError, field):
        plan_of(*settings)


def test_poison_changes_the_chosen_completion() -> None:
    share = "faults.poison.share=1.0"
    flipped = plan_of("faults.poison.kind=label-flip", share)
    records = list(altered(flipped, 0, pairs(3)))
    assert [record["chosen"] for record in records] == ["no, never", "perhaps it is so", "yes"]
    planted = plan_of(
        "faults.poison.kind=backdoor", share, "faults.poison.trigger=xx", "faults.poison.target=bad"
    )
    (record,) = altered(planted, 0, pairs(1))
    assert (record["prompt"], record["chosen"], record["rejected"]) == ("0?  xx", "bad", "NO, NEVER")


# --- whole runs, by the command line ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_under_masks_learns_the_preferences_at_the_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path, PLAN, pairs(90), "model.adapter.scheme=rolora")
    answer = made.answer
    assert answer["initial_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert answer["final_loss"] < 0.6
    assert answer["preference_accuracy"] > 0.9
    assert (answer["pairs"], answer["tokens"], answer["accuracy"]) == (2 * 3 * 8 * 4, None, None)
    done(capsys, "export", str(made.run), str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    for words in (
        "text-generation",
        "nats per pair",
        "preference accuracy",
        "`rejected`, by DPO with beta 0.3",
    ):
        assert words in card
    assert done(capsys, "generate", str(made.run), "--prompt", "3? ", "--tokens", "4").startswith("3? ")


@pytest.mark.slow
def test_a_private_run_is_evaluated_on_public_pairs(tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    made = Made(tmp_path, PLAN, pairs(60), *RECORD)
    assert made.answer["epsilon"] > 0
    assert made.answer["pairs"] is None  # how many is private
    final = made.run / "final"
    auto: Any = AutoPeftModelForCausalLM
    module = auto.from_pretrained(final).eval()
    lines = (made.run / "sites" / "public.jsonl").read_text().splitlines()

    losses = [formula(module, json.loads(line)).item() for line in lines]
    assert made.answer["final_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
def test_the_shipped_plan_learns_privately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller model and fewer steps of it."""
    settings = ("model.config.hidden_size=16", "model.config.num_hidden_layers=1", "run.rounds=2")
    more = (
        "data.sequence_length=48",
        "local.steps=8",
        "server.evaluation_sequences=60",
        "simulation.noise_seed=1",
    )
    options = [each for setting in (*settings, *more) for each in ("--set", setting)]
    answer = found(capsys, "simulate", "prefer", *options, "--out", str(tmp_path / "run"), "--workers", "1")
    assert answer["final_loss"] < answer["initial_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert answer["preference_accuracy"] > 0.6
