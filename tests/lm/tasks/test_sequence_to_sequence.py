"""Sequence to sequence: sources and targets, T5's own loss, greedy targets, exact match and ROUGE-L as exact sums."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from cloister.clients.training.dpsgd import check_method
from cloister.lm.data.prepare import prepare
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.sequence_to_sequence import rouge_l
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.records import Unusable
from cloister.lm.text.sequences import NOT_LEARNED
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.lm.training.evaluate import Evaluator, held_out
from cloister.lm.training.optimizer import hidden_matrices
from cloister.lm.training.train import Trainer
from cloister.privacy.accounting.claims import unit_in_words
from cloister.protocol.errors import DataError, PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
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
name = "colours"
rounds = 2

[model]
name = "builtin:t5"

[model.config]
d_model = 16
d_kv = 8
d_ff = 32
num_layers = 1
num_heads = 2

[data]
task = "sequence-to-sequence"
format = "prompt"
sequence_length = 20
target_length = 8
held_out = 0.2

[local]
steps = 12
batch_size = 8
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
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")
COLOURS = ("red", "blue", "dark green", "ultramarine blue")
MODELS: Any = AutoModelForSeq2SeqLM  # transformers leaves its automatic classes untyped


def plan_of(*settings: str) -> Plan:
    return parse(PLAN, settings)


def colours(count: int) -> list[dict[str, Any]]:
    """Sentences with a colour; the last colour is longer than a target, and some sentences are longer than a source."""
    return [
        {"prompt": f"{'it is' if n % 5 else 'I believe that it is'} {name}!", "completion": name, "by": n % 4}
        for n in range(count)
        for name in [COLOURS[n % 4]]
    ]


def alone(module: Any, record: dict[str, Any]) -> torch.Tensor:
    """Transformers' own loss of one record, without padding."""
    source = list(record["prompt"].encode())[:20]
    target = [*record["completion"].encode(), 256][:8]
    loss: torch.Tensor = module(input_ids=torch.tensor([source]), labels=torch.tensor([target])).loss
    return loss


def roused(*settings: str) -> LanguageModel:
    """The plan's model with larger weights, so that it does not write the same for each source."""
    model = load_model(plan_of(*settings))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


# --- figures ----------------------------------------------------------------------------------------------------------


def test_rouge_l_is_that_of_rouge_score() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer, draw = RougeScorer(["rougeL"], use_stemmer=False), random.Random(0)
    words = ["the", "The", "a", "b2", "naïve", "\u0130x", "x-y", "don't", "7", "...", "\u4e2d", "", "\n"]
    for case in range(1000):
        target, given = (" ".join(draw.choices(words, k=draw.randint(0, 12))) for _ in range(2))
        if case % 3 == 0:
            given = "".join(draw.choices(string.printable, k=draw.randint(0, 30)))
        assert rouge_l(target, given) == pytest.approx(
            scorer.score(target, given)["rougeL"].fmeasure, abs=1e-12
        )


def test_figures_follow_from_sums() -> None:
    task = task_of(plan_of().data)
    names = task.counters()
    one = HeldOut(2.0, 3, 8, dict(zip(names, (2, 1, 1_500_000), strict=True)))
    figures = task.figures(one + one)
    assert (figures["exact_match"], figures["rouge_l"], figures["accuracy"]) == (0.5, 0.75, 3 / 8)
    assert "rouge_l" not in task.figures(HeldOut(2.0, 3, 8))


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_row_is_a_source_with_its_target_and_the_end_token() -> None:
    records = [
        *colours(5),
        {"prompt": "", "completion": "red"},
        {"prompt": "it is", "completion": ""},
        {"prompt": "x"},
    ]
    unusable = Unusable()
    made = prepare(
        records,
        byte_tokenizer(),
        plan_of("data.held_out=0.0", "server.evaluation=none").data,
        seed=0,
        unusable=unusable,
    )
    assert made.train.tokens.shape == (5, 20)
    assert made.train.labels.shape == (5, 8)
    for record, tokens, labels in zip(
        records, made.train.tokens.tolist(), made.train.labels.tolist(), strict=False
    ):
        source, target = list(record["prompt"].encode())[:20], [*record["completion"].encode(), 256][:8]
        assert tokens == source + [257] * (20 - len(source))
        assert labels == target + [NOT_LEARNED] * (8 - len(target))
    assert dict(made.left_out) == {
        "without the fields of data.format 'prompt'": 1,
        "without a learnable token within data.sequence_length": 2,
    }


def test_a_source_has_the_tokens_on_which_users_call_the_saved_model() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 256)]
    )
    ((_, example),) = task_of(plan_of().data).examples(colours(1), tokenizer, Unusable())
    assert (
        example.tokens.tolist()
        == tokenizer(colours(1)[0]["prompt"], truncation=True, max_length=20)["input_ids"]
    )
    assert example.labels is not None
    assert example.labels.tolist() == [*b"red", 256]
    with raises(DataError, "data.sequence_length"):
        prepare(colours(3), tokenizer, replace_length(1), seed=0)


def replace_length(length: int) -> Any:
    return plan_of().data.model_copy(update={"sequence_length": length})


def test_the_unit_is_a_prompt_with_its_completion() -> None:
    plan = plan_of(*RECORD)
    made = in_units(plan, colours(9)).train
    assert made.starts is not None
    np.testing.assert_array_equal(made.starts, np.arange(10))
    assert unit_in_words(plan.data, plan.privacy) == (
        "one prompt with its completion, of which the first 20 tokens of the prompt and first 8 of the completion "
        "are used"
    )


# --- the model --------------------------------------------------------------------------------------------------------


def test_loss_and_gradient_are_those_of_transformers_on_pairs_without_padding() -> None:
    settings = ("local.steps=1", "local.batch_size=6", "local.clip_norm=0.0")
    model, records = roused(*settings), colours(6)
    data = prepare(
        records, byte_tokenizer(), plan_of("data.held_out=0.0", "server.evaluation=none").data, seed=0
    ).train
    module: Any = model.module.eval()
    tokens = [min(8, len(record["completion"]) + 1) for record in records]
    losses = [alone(module, record) * count for record, count in zip(records, tokens, strict=True)]
    total = torch.stack(losses).sum()
    sums = Evaluator(task_of(plan_of().data), module, 4, CPU).held_out(data)
    assert sums.loss_nats == pytest.approx(total.item(), rel=1e-5)
    assert sums.tokens == sum(tokens)
    parameters = dict(module.named_parameters())
    wanted = torch.autograd.grad(total / sum(tokens), [parameters[name] for name in model.layout.names])
    seen: dict[str, torch.Tensor] = {}

    def keep(_optimizer: object, _arguments: object, _options: object) -> None:
        seen.update({name: each.grad.clone() for name, each in parameters.items() if each.grad is not None})

    trainer = Trainer(plan_of(*settings), model, CPU)
    hook = register_optimizer_step_pre_hook(keep)
    try:
        trained = trainer.train(model.layout.flatten(module), data, round=1, site_seed=(0,))
    finally:
        hook.remove()
    assert trained.tokens == sum(tokens)
    assert trained.loss == pytest.approx(sums.loss, rel=1e-5)
    for name, gradient in zip(model.layout.names, wanted, strict=True):
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapter", [(), FFA], ids=["full", "ffa-lora"])
def test_the_gradient_of_a_unit_is_that_of_its_own_pairs(adapter: tuple[str, ...]) -> None:
    owner = ("privacy.unit=owner", "data.owner=by", "privacy.records=2")
    for settings in ((), owner):
        plan, records = plan_of(*RECORD, *adapter, *settings), colours(8)
        model = roused(*RECORD, *adapter)
        trained = model.trainable()
        own: list[list[dict[str, Any]]] = [[record] for record in records]
        if settings:
            own = [[record for record in records if record["by"] == by] for by in range(4)]
        gradients = of_units(plan, model, records)
        assert len(gradients) == len(own)
        for some, gradient in zip(own, gradients, strict=True):
            loss = torch.stack([alone(model.module, record) for record in some]).mean()
            wanted = torch.autograd.grad(loss, [parameter for _, parameter in trained])
            for (name, _), each in zip(trained, wanted, strict=True):
                torch.testing.assert_close(gradient[name], each, rtol=1e-4, atol=1e-5)


def test_opacus_is_refused() -> None:
    plan = plan_of(*RECORD, "privacy.method=opacus")
    with raises(PlanError, "privacy.method"):
        check_method(plan, load_model(plan))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_an_evaluation_compares_what_transformers_generates(rows: int) -> None:
    """Of some records the completion is what the model writes, so that both measures are neither 0 nor 1."""
    plan = plan_of(f"local.batch_size={rows}")
    model = load_model(plan)
    module, tokenizer = model.module.eval(), model.tokenizer
    torch.manual_seed(20)
    with torch.no_grad():  # it often ends early, and would often take a token that only pads the vocabulary
        for name, parameter in module.named_parameters():
            if "norm" not in name and name != "shared.weight":
                parameter.add_(torch.randn_like(parameter))
        shared = dict(module.named_parameters())["shared.weight"]
        shared[256] *= 2
        shared[258:] *= 2
        shared[128:256] *= 0.3  # so that it writes text
    records = colours(10)
    exact, total = 0, 0
    for number, record in enumerate(records):
        given = generated(module, tokenizer, record["prompt"])
        if number % 2:
            record["completion"] = given + ("" if given and number % 4 == 1 else " x")
        target = str(tokenizer.decode(list(record["completion"].encode())[:8]))
        exact += given == target
        total += round(1e6 * rouge_l(target, given))
    made = prepare(records, tokenizer, plan.data, seed=0, evaluated=True)
    counts = held_out(plan, model, CPU, made).counts
    assert list(counts.values()) == [10, exact, total]
    assert 0 < exact < 10
    assert 0 < total < 10**7


def generated(module: Any, tokenizer: Any, prompt: str) -> str:
    """The greedy target of a source by transformers."""
    source = torch.tensor([tokenizer(prompt, truncation=True, max_length=20)["input_ids"]])
    with torch.no_grad():
        output = module.generate(
            input_ids=source,
            attention_mask=torch.ones_like(source),
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=list(range(258, 264)),
        )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def test_muon_leaves_the_shared_embedding_to_adamw() -> None:
    hidden = hidden_matrices(load_model(plan_of()).module)
    assert "shared.weight" not in hidden
    assert not [name for name in hidden if "relative_attention_bias" in name]
    assert "decoder.block.0.layer.1.EncDecAttention.q.weight" in hidden


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("data.format=text",), "data.task"),
        (("data.packing=false",), "data.packing"),
        (("data.target_length=1",), "data.target_length"),
        (("data.task=causal", "data.target_length=9"), "data.target_length"),
        ((*RECORD, "privacy.windows=2"), "privacy.windows"),
    ],
)
def test_an_unsound_plan_is_refused(settings: tuple[str, ...], field: str) -> None:
    with raises(PlanError, field):
        plan_of(*settings)


# --- whole runs, by the command line ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_under_masks_is_evaluated_at_the_sites_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [each for each in colours(150) if each["completion"] in ("red", "blue")]
    made = Made(tmp_path, PLAN, plain, "local.steps=40", "local.learning_rate=1e-2")
    answer, final = made.answer, made.run / "final"
    assert answer["final_loss"] < answer["initial_loss"]
    module, tokenizer = MODELS.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    exact, total, count = 0, 0, 0
    for site in ("site-000", "site-001", "site-002"):
        part = made.prepared(site).held_out
        for tokens, labels in zip(part.tokens, part.labels, strict=True):
            both = (each[(each >= 0) & (each < 256)].tolist() for each in (tokens, labels))
            source, target = (bytes(each).decode() for each in both)
            given = generated(module, tokenizer, source)
            count, exact, total = (
                count + 1,
                exact + (given == target),
                total + round(1e6 * rouge_l(target, given)),
            )
    assert (answer["exact_match"], answer["rouge_l"]) == (exact / count, pytest.approx(total / count / 1e6))
    assert exact
    facts = found(capsys, "export", str(made.run), str(tmp_path / "model"))
    assert facts["rouge_l"] == answer["rouge_l"]
    card = (tmp_path / "model" / "README.md").read_text()
    for words in ("text2text-generation", "sequence-to-sequence model", "AutoModelForSeq2SeqLM", "ROUGE-L"):
        assert words in card
    written = done(
        capsys, "generate", str(made.run), "--prompt", "it is red!", "--temperature", "0", "--tokens", "8"
    )
    assert written == generated(module, tokenizer, "it is red!") + "\n"


@pytest.mark.slow
def test_a_private_adapter_is_evaluated_on_public_records_and_loads_with_peft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForSeq2SeqLM

    made = Made(tmp_path, PLAN, colours(60), *RECORD, *FFA)
    assert made.answer["epsilon"] > 0
    assert made.answer["rouge_l"] is not None
    done(capsys, "export", str(made.run), str(tmp_path / "merged"), "--merge")
    auto: Any = AutoPeftModelForSeq2SeqLM
    adapter, merged = auto.from_pretrained(made.run / "final"), MODELS.from_pretrained(tmp_path / "merged")
    given = {"input_ids": torch.tensor([list(b"it is")]), "decoder_input_ids": torch.tensor([[257, 65]])}
    with torch.no_grad():
        torch.testing.assert_close(adapter.eval()(**given).logits, merged.eval()(**given).logits)


@pytest.mark.slow
def test_the_shipped_plan_learns_to_summarize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller model and fewer steps of it."""
    settings = (
        "model.config.d_model=16",
        "model.config.num_layers=1",
        "data.sequence_length=32",
        "run.rounds=1",
    )
    more = (
        "local.steps=8",
        "server.evaluation_sequences=8",
        "server.evaluate_every=1",
        "data.target_length=16",
    )
    options = [each for setting in (*settings, *more) for each in ("--set", setting)]
    answer = found(
        capsys, "simulate", "summarize", *options, "--out", str(tmp_path / "run"), "--workers", "1"
    )
    assert answer["final_loss"] < answer["initial_loss"]
    assert answer["exact_match"] is not None
