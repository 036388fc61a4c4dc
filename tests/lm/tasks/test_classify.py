"""Sequence classification: records with a label, a head that is trained, a confusion matrix that is an exact sum."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from cloister.aggregation.sums import Sums
from cloister.cli.main import main
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import Prepared, prepare, unit_rule
from cloister.lm.measures.confusion import Confusion
from cloister.lm.model.model import LanguageModel, load_model, load_saved
from cloister.lm.model.schedule import Schedule
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.records import Unusable
from cloister.lm.text.sequences import Sequences
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.lm.training.optimizer import hidden_matrices
from cloister.lm.training.train import Trainer
from cloister.privacy.accounting.claims import unit_in_words
from cloister.protocol.errors import DataError, ModelError, PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.record.folder import read_plan
from cloister.server.record.progress import Event, RoundDone
from cloister.tests.parties.evaluated import evaluate
from cloister.tests.tools.command import done, found, lone_refusal, refusal, set_options
from cloister.tests.tools.kills import kill_while, killed_run
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # read by PEFT
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
WORDS = {
    "cold": "fever cough chill sneeze shiver",
    "skin": "rash itch burn spot blister",
    "bone": "break fall knee hip ache",
}
CLASSES = tuple(WORDS)
PLAN = """
[run]
name = "notes"
rounds = 2

[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2

[data]
task = "classify"
classes = ["cold", "skin", "bone"]
sequence_length = 16
held_out = 0.2

[local]
steps = 6
batch_size = 8
learning_rate = 4e-3

[cohort]
sites = 3

[simulation]
partition = "iid"
durable = false
"""
PUBLIC = ("data.held_out=0.0", "simulation.public=0.2", "server.evaluation=simulation:public")
RECORD = (
    *PUBLIC,
    "aggregation.weighting=uniform",
    "privacy.unit=record",
    "privacy.sampling_rate=0.3",
    "privacy.noise_multiplier=1.0",
    "privacy.delta=1e-3",
)
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")
CLASSIFIERS: Any = AutoModelForSequenceClassification  # transformers leaves its automatic classes untyped
CAUSAL: Any = AutoModelForCausalLM


def plan_of(*settings: str) -> Plan:
    return parse(PLAN, settings)


def notes(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Notes of a few words, each with the kind of ailment that they are of; so short and so long that some are cut."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        (label,) = draw.choices(CLASSES, (3, 2, 1))
        text = " ".join(draw.choices(WORDS[label].split(), k=draw.randint(1, 4)))
        made.append({"text": text, "label": label, "patient": number % 9})
    return made


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Made:
    """A finished run, by the command line."""

    def __init__(self, folder: Path, *settings: str, records: list[dict[str, Any]] | None = None) -> None:
        self.run, plan = folder / "run", folder / "plan.toml"
        plan.write_text(f'{PLAN}source = "{write(folder / "notes.jsonl", records or notes(90))}"\n')
        arguments = set_options(settings)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            command = ["simulate", str(plan), "--out", str(self.run), "--workers", "1", "--json"]
            assert main([*command, *arguments]) == 0
        self.answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        self.plan = read_plan(self.run)

    def records(self, site: str) -> list[dict[str, Any]]:
        lines = (self.run / "sites" / site / "data.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run under masks that trains every parameter, and evaluates at the sites."""
    return Made(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run with the unit `record` that trains an adapter and a head, and evaluates on public records."""
    return Made(tmp_path_factory.mktemp("private"), *RECORD, *FFA, "privacy.noise_multiplier=0.5")


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_those_worked_out_by_hand() -> None:
    """Three classes; no record of the third, and none taken for the second."""
    confusion = Confusion.of([3, 0, 1, 2, 0, 2, 0, 0, 0])
    assert confusion.counts == ((3, 0, 1), (2, 0, 2), (0, 0, 0))
    assert (confusion.records, confusion.accuracy) == (8, 3 / 8)
    first, second, third = confusion.by_class()
    assert (first.precision, first.recall, first.f1, first.support) == (3 / 5, 3 / 4, 2 / 3, 4)
    assert (second.precision, second.recall, second.f1, second.support) == (0, 0, 0, 4)
    assert (third.precision, third.recall, third.f1, third.support) == (0, 0, 0, 0)
    macro = confusion.macro()
    assert (macro.precision, macro.recall, macro.f1) == pytest.approx((1 / 5, 1 / 4, 2 / 9))
    other = Confusion.of([5, 1, 2, 4])
    assert [each.f1 for each in other.by_class()] == pytest.approx([10 / 13, 8 / 11])
    assert other.accuracy == pytest.approx(9 / 12)
    assert np.isnan(Confusion.of([0] * 4).accuracy)


def test_matrices_add_up() -> None:
    one = HeldOut(1.0, 3, 8, dict(zip(Confusion.names("class", 2), (3, 0, 1, 4), strict=True)))
    assert Confusion.counted((one + one).counts, "class", 2).counts == ((6, 0), (2, 8))
    assert (HeldOut() + one) == one


# --- records ----------------------------------------------------------------------------------------------------------


def examples_of(*records: dict[str, Any], settings: tuple[str, ...] = ()) -> list[Any]:
    data = plan_of(*settings).data
    unusable = Unusable()
    made = [example for _, example in task_of(data).examples(records, byte_tokenizer(), unusable)]
    return [*made, unusable.left_out]


def test_a_label_is_the_place_of_its_name_in_the_plan() -> None:
    *made, _ = examples_of(
        *({"note": "a", "kind": kind} for kind in (7, "no", "7", "yes")),
        settings=('data.classes=["no", "yes", "7"]', "data.text_field=note", "data.label_field=kind"),
    )
    assert [example.labels.tolist() for example in made] == [[2], [0], [2], [1]]


@pytest.mark.parametrize("label", ["scald", None, True, 1.0, ["cold"], ""])
def test_a_record_with_another_label_cannot_be_used(label: object) -> None:
    record = {"text": "fever", "label": label}
    *made, left_out = examples_of(record, {"text": "rash", "label": "skin"})
    assert [example.labels.tolist() for example in made] == [[1]]
    assert left_out == {"without a label in data.classes": 1}
    with raises(DataError, "record 1, field label", says="cold, skin"):
        prepare([{"text": "fever", "label": "scald"}], byte_tokenizer(), plan_of().data, seed=0)


def test_a_text_has_the_tokens_on_which_users_call_the_saved_model(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A <|pad|>", special_tokens=[("<|end|>", 256), ("<|pad|>", 257)]
    )
    records = [
        {"text": text, "label": "bone"} for text in ("a", "a knee that aches in the morning", "hip", "")
    ]
    made = list(task_of(plan_of().data).examples(records, tokenizer, Unusable(), "text"))
    for (record, example), length in zip(made[:3], (3, 16, 5), strict=True):
        called = tokenizer(record["text"], truncation=True, max_length=16)["input_ids"]
        assert example.tokens.tolist() == called
        assert len(called) == length
    assert len(made[3][1]) == 0
    with raises(DataError, "data.sequence_length"):
        list(task_of(plan_of("data.sequence_length=2").data).examples(records, tokenizer, Unusable()))


def test_each_text_is_a_sequence_with_its_class() -> None:
    records = notes(40)
    made = prepare(records, byte_tokenizer(), plan_of().data, seed=0)
    assert (len(made.train), len(made.held_out)) == (32, 8)
    seen = []
    for part in (made.train, made.held_out):
        assert part.labels.shape == (len(part), 1)
        assert part.n_tokens == len(part)
        np.testing.assert_array_equal(task_of(plan_of().data).targets(part.labels), part.labels)
        for tokens, (label,) in zip(part.tokens, part.labels, strict=True):
            text = bytes(token for token in tokens if token < 256).decode()
            seen.append((text, CLASSES[label]))
            assert set(tokens[len(text) :]) <= {257}
    assert sorted(seen) == sorted((record["text"][:16], record["label"]) for record in records)


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_a_unit_has_one_sequence_of_each_record(unit: str) -> None:
    owner = ("privacy.unit=owner", "data.owner=patient", "privacy.records=2") if unit == "owner" else ()
    plan = plan_of(*RECORD, *owner)
    records = [*notes(36), {"text": "fever", "label": "none"}, {"text": "", "label": "cold"}]
    records = [record | {"patient": record.get("patient", 1)} for record in records]
    made = prepare(records, byte_tokenizer(), plan.data, seed=0, units=unit_rule(plan.data, plan.privacy))
    assert made.train.starts is not None
    expected = np.arange(37) if unit == "record" else np.arange(0, 19, 2)
    np.testing.assert_array_equal(made.train.starts, expected)
    assert made.train.labels.shape == (expected[-1], 1)
    reasons = {
        "without a label in data.classes": 1,
        "without a learnable token within data.sequence_length": 1,
    }
    assert (made.records, dict(made.left_out)) == (36, reasons)
    words = unit_in_words(plan.data, plan.privacy)
    assert words.endswith("first 16 tokens are used" if unit == "record" else "its first 16 tokens")


# --- the model --------------------------------------------------------------------------------------------------------


def folder_of(path: Path, kind: str, auto: Any = CLASSIFIERS, **config: Any) -> str:
    """A saved model of random weights with the byte tokenizer."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    made = auto.from_config(
        AutoConfig.for_model(kind, **sizes, vocab_size=264, bos_token_id=None, eos_token_id=None, **config)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return f"model.name={path}"


def loaded(*settings: str) -> LanguageModel:
    named = any(setting.startswith("model.name=/") for setting in settings)
    return load_model(plan_of(*settings, *(("model.config={}",) if named else ())))


def some(n: int = 6, seed: int = 0) -> Sequences:
    """Texts of different lengths, padded."""
    made = prepare(
        notes(n, seed), byte_tokenizer(), plan_of("data.held_out=0.0", "server.evaluation=none").data, seed=0
    )
    return made.train


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_loss_and_gradient_are_those_of_transformers_on_texts_without_padding(
    tmp_path: Path, kind: str
) -> None:
    config: dict[str, Any] = {"id2label": dict(enumerate(CLASSES)), "pad_token_id": 257}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) if kind == "gpt2" else {}
    dropout |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if kind == "bert" else {}
    name = folder_of(tmp_path, kind, **config, **dropout)
    steps = ("local.steps=1", "local.batch_size=6", "local.clip_norm=0.0", "local.learning_rate=1e-3")
    model, data = loaded(name, *steps), some()
    plain = CLASSIFIERS.from_pretrained(tmp_path).train()
    losses, given = [], []
    for tokens, label in zip(data.tokens, data.labels, strict=True):
        text = torch.tensor(tokens[tokens != 257])[None].long()
        out = plain(input_ids=text, labels=torch.tensor(label).long())
        losses.append(out.loss)
        given.append(int(out.logits.argmax()))
    sums = evaluate(model.module, data, 4, CPU, task=task_of(plan_of().data))
    assert sums.loss_nats == pytest.approx(torch.stack(losses).sum().item(), rel=1e-5)
    expected = np.zeros((3, 3), int)
    for (true,), other in zip(data.labels, given, strict=True):
        expected[true, other] += 1
    assert Confusion.counted(sums.counts, "class", 3).counts == tuple(map(tuple, expected.tolist()))
    assert (sums.correct, sums.tokens) == (int(np.trace(expected)), 6)

    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    trainer = Trainer(plan_of(name, "model.config={}", *steps), model, CPU)

    def keep(optimizer: Any, _arguments: object, _options: object) -> None:
        parameters = dict(model.module.named_parameters())
        seen.update({name: each.grad.clone() for name, each in parameters.items() if each.grad is not None})

    hook = register_optimizer_step_pre_hook(keep)
    try:
        trained = trainer.train(model.layout.flatten(model.module), data, round=1, site_seed=(0,))
    finally:
        hook.remove()
    assert trained.tokens == 6
    assert trained.loss == pytest.approx(sums.loss, rel=1e-5)
    assert set(seen) == set(model.layout.names)
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_a_model_without_a_head_gets_one_for_the_classes(tmp_path: Path) -> None:
    name = folder_of(tmp_path, "llama", CAUSAL)
    model = loaded(name)
    config: Any = model.module.config
    assert (config.num_labels, config.id2label, config.pad_token_id) == (3, dict(enumerate(CLASSES)), 257)
    assert "score.weight" in model.layout.names
    assert model.own_base
    stored = CAUSAL.from_pretrained(tmp_path).state_dict()
    own = model.module.state_dict()
    assert all(torch.equal(own[key], each) for key, each in stored.items() if key != "lm_head.weight")
    again, others = loaded(name).module.state_dict(), loaded(name, "run.seed=1").module.state_dict()
    assert torch.equal(own["score.weight"], again["score.weight"])
    assert not torch.equal(own["score.weight"], others["score.weight"])


@pytest.mark.parametrize(
    ("labels", "fits"),
    [
        (CLASSES, True),
        (("LABEL_0", "LABEL_1", "LABEL_2"), True),
        (("skin", "cold", "bone"), False),
        (("cold", "skin"), False),
    ],
)
def test_a_head_is_kept_for_the_classes_that_it_has(
    tmp_path: Path, labels: tuple[str, ...], fits: bool
) -> None:
    name = folder_of(tmp_path, "llama", id2label=dict(enumerate(labels)), pad_token_id=257)
    if not fits:
        with raises(ModelError, "data.classes"):
            loaded(name)
        return
    model = loaded(name)
    stored = CLASSIFIERS.from_pretrained(tmp_path).state_dict()
    assert torch.equal(model.module.state_dict()["score.weight"], stored["score.weight"])
    assert model.own_base is (labels != CLASSES)


def test_an_incomplete_checkpoint_is_no_model_without_a_head(tmp_path: Path) -> None:
    """Bert's pooler is not its head: no checkpoint of a language model that lacks it is a whole model."""
    name = folder_of(tmp_path, "bert", CAUSAL, is_decoder=True)
    with raises(
        ModelError, "model.name", says="2 are not (bert.pooler.dense.bias, bert.pooler.dense.weight)"
    ):
        loaded(name)


def test_the_head_is_trained_whole_beside_every_adapter(tmp_path: Path) -> None:
    name = folder_of(tmp_path, "distilbert", id2label=dict(enumerate(CLASSES)), pad_token_id=257)
    for scheme, rounds in (
        ("ffa-lora", (("B",), ("B",))),
        ("rolora", (("B",), ("A",))),
        ("lora", (("A", "B"), ("A", "B"))),
    ):
        model = loaded(name, f"model.adapter.scheme={scheme}", "model.adapter.rank=2")
        schedule = Schedule.of(parse("", [f"model.adapter.scheme={scheme}"]), model.layout)
        for number, factors in enumerate(rounds, 1):
            names = [each for each, _ in model.trainable(schedule.of_round(number))]
            heads = [each for each in names if "lora_" not in each]
            assert len(heads) == 4
            assert all("classifier.modules_to_save.default." in each for each in heads)
            assert {each.partition("lora_")[2][:1] for each in names if "lora_" in each} == set(factors)
            parameters = dict(model.module.named_parameters())
            assert {each for each, held in parameters.items() if held.requires_grad} == set(names)


def test_muon_leaves_the_head_to_adamw() -> None:
    names = hidden_matrices(loaded().module)
    assert "score.weight" not in names
    assert "model.layers.0.mlp.up_proj.weight" in names
    model = loaded(*FFA)
    trained = {name for name, _ in model.trainable()}
    head = "base_model.model.score.modules_to_save.default.weight"
    assert trained - hidden_matrices(model.module) == {head}


def test_a_head_gets_no_adapter_and_no_low_precision() -> None:
    with raises(ModelError, "model.adapter.targets", says="alone"):
        loaded(*FFA, 'model.adapter.targets=["score"]')
    parameters = dict(loaded(*FFA, "model.adapter.base_precision=bfloat16").module.named_parameters())
    lowered = {name for name, each in parameters.items() if each.dtype == torch.bfloat16}
    assert any("q_proj" in name for name in lowered)
    assert not any("score" in name for name in lowered)


@pytest.mark.parametrize("settings", [(), FFA])
def test_the_gradients_of_opacus_are_those_of_single_backward_passes(settings: tuple[str, ...]) -> None:
    model = loaded(*settings)
    plan, data = plan_of(*RECORD, *settings, "privacy.method=opacus"), some(7)
    sequences = Sequences(data.tokens, data.labels, None, 0, np.arange(8))
    trainer = PrivateTrainer(plan, model, CPU)
    trained = model.trainable()
    parameters = [parameter for _, parameter in trained]
    units = np.arange(7)
    model.module.train()
    with trainer.per_unit_gradients(trained) as gradients:
        by_hooks = [
            torch.cat(each) for each in zip(*(g.gradients for g in gradients(sequences, units)), strict=True)
        ]
    model.module.eval()
    for unit in range(7):
        tokens = torch.tensor(data.tokens[unit])[None].long()
        tokens = tokens[tokens != 257][None]
        logits = model.module(input_ids=tokens).logits
        loss = functional.cross_entropy(logits, torch.tensor(data.labels[unit]).long())
        for hooked, alone in zip(by_hooks, torch.autograd.grad(loss, parameters), strict=True):
            torch.testing.assert_close(hooked[unit], alone, rtol=1e-4, atol=1e-6)


# --- weights of the classes -------------------------------------------------------------------------------------------

WEIGHTS = (0.5, 1.0, 20.0)
WEIGHTED = "data.class_weights=[0.5, 1.0, 20.0]"


def loss_of(model: LanguageModel, data: Sequences, row: int) -> torch.Tensor:
    """-log p of the class of one text, without padding."""
    text = torch.tensor(data.tokens[row])
    logits = model.module(input_ids=text[text != 257][None].long()).logits
    return functional.cross_entropy(logits, torch.tensor(data.labels[row]).long())


@pytest.mark.parametrize(("rows", "micro_batches"), [(6, 1), (2, 3)])
def test_a_weighted_loss_is_divided_by_the_number_of_texts(rows: int, micro_batches: int) -> None:
    """One step of a constant rate, of which the optimizer sees the gradient: the same in any micro-batches."""
    settings = (WEIGHTED, "local.steps=1", f"local.batch_size={rows}", f"local.accumulation={micro_batches}")
    model, data = loaded(*settings), some()
    start = model.layout.flatten(model.module)
    losses = [WEIGHTS[int(data.labels[row, 0])] * loss_of(model, data, row) for row in range(6)]
    loss = torch.stack(losses).sum() / 6
    parameters = dict(model.module.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[name] for name in model.layout.names])
    seen: dict[str, torch.Tensor] = {}

    def keep(optimizer: Any, _arguments: object, _options: object) -> None:
        grads = {name: parameters[name].grad for name in model.layout.names}
        seen.update({name: each.clone() for name, each in grads.items() if each is not None})

    trainer = Trainer(plan_of(*settings, "local.clip_norm=0.0"), model, CPU)
    hook = register_optimizer_step_pre_hook(keep)
    try:
        trained = trainer.train(start, data, round=1, site_seed=(0,))
    finally:
        hook.remove()
    assert trained.loss == pytest.approx(loss.item(), rel=1e-5)
    assert trained.tokens == 6
    for name, gradient in zip(model.layout.names, gradients, strict=True):
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["reference", "opacus"])
def test_a_weight_does_not_change_what_one_record_changes(method: str) -> None:
    """The gradient of a record is that of its weighted loss, and is clipped after it: no record moves the sum further
    than the clipping norm."""
    largest = "data.class_weights=[1000.0, 0.001, 1000.0]"
    plan = plan_of(*RECORD, largest, "privacy.clip=0.5", f"privacy.method={method}")
    model, data = loaded(), some(7)
    weights = [plan.data.class_weights[int(label)] for label in data.labels[:, 0]]
    trainer = PrivateTrainer(plan, model, CPU)
    trained = model.trainable()
    parameters = [parameter for _, parameter in trained]
    total = trainer.new_sum([name for name, _ in trained])
    sequences = Sequences(data.tokens, data.labels, None, 0, np.arange(8))
    moved = []
    model.module.train()  # where Opacus's hooks are active
    for unit in range(7):
        alone = torch.autograd.grad(loss_of(model, data, unit), parameters)
        with trainer.per_unit_gradients(trained) as gradients:
            (found,) = gradients(sequences, np.array([unit]))
        for gradient, other in zip(found.gradients, alone, strict=True):
            torch.testing.assert_close(
                gradient[0], weights[unit] * other, rtol=1e-4, atol=1e-5 * weights[unit]
            )
        before = total.so_far()
        total.add(found.gradients)
        moved.append(float((total.so_far() - before).norm()))
    assert max(moved) <= 0.5
    for weight, norm in zip(weights, moved, strict=True):
        assert norm == pytest.approx(0.5, rel=1e-4) if weight > 1 else norm < 0.5


def skewed(count: int) -> list[dict[str, Any]]:
    """Texts of which one in six is `rare`. Of those that say `itch` it is one in four, so a model that has learned the
    probabilities takes none for it; if a rare one counts for ten, it takes all that say `itch` for it."""
    draw = random.Random(0)
    kinds = [("fever", "usual")] * 2 + [("itch", "usual")] * 3 + [("itch", "rare")]
    found = (kinds[number % 6] for number in range(count))
    return [{"text": f"{word} {draw.choice('abc')}", "label": label} for word, label in found]


def test_a_weight_raises_the_recall_of_a_rare_class(tmp_path: Path) -> None:
    settings = (
        'data.classes=["usual", "rare"]',
        "local.steps=24",
        "local.learning_rate=2e-2",
        "run.rounds=1",
    )
    recalls: list[float] = []
    for weights in ("[]", "[1.0, 10.0]"):
        folder = tmp_path / f"run-{len(recalls)}"
        folder.mkdir()
        made = Made(folder, *settings, f"data.class_weights={weights}", records=skewed(90))
        rare = made.answer["classification"]["by_class"][1]
        assert rare["support"] > 0
        recalls.append(rare["recall"])
    assert recalls == [0.0, 1.0]
    final = folder / "run" / "final"
    module, tokenizer = CLASSIFIERS.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    losses = []
    for index in range(3):
        part = held_out(made, f"site-00{index}").held_out
        for tokens, (label,) in zip(part.tokens, part.labels, strict=True):
            text = bytes(token for token in tokens if token < 256).decode()
            with torch.no_grad():
                logits = module(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits
            losses.append(functional.cross_entropy(logits, torch.tensor([int(label)])).item())
    assert made.answer["final_loss"] == pytest.approx(np.mean(losses), rel=1e-4), (
        "held-out losses have no weights"
    )


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        (("data.format=prompt",), "data.task", "another value"),
        (('data.classes=["one"]',), "data.classes", "is 1: expected 2 to 256"),
        (("data.classes=[]",), "data.classes", "a value with data.task"),
        (('data.classes=["a", "b", "a"]',), "data.classes", "is 'a': expected 2 to 256"),
        (('data.classes=["a", ""]',), "data.classes", "is '': expected 2 to 256"),
        (
            ("data.task=causal", 'data.classes=["a", "b"]'),
            "data.classes",
            'only valid with data.task = "classify"',
        ),
        (("data.task=causal", "data.classes=[]", "data.label_field=kind"), "data.label_field", "kind"),
        (("data.class_weights=[1.0, 2.0]",), "data.class_weights", "is 2: expected 3"),
        (("data.class_weights=[1.0, 0.0, 1.0]",), "data.class_weights[1]", "0.0"),
        (("data.class_weights=[1.0, -1.0, 1.0]",), "data.class_weights[1]", "-1.0"),
        (("data.class_weights=[1.0, inf, 1.0]",), "data.class_weights[1]", "inf"),
        (("data.class_weights=[1.0, nan, 1.0]",), "data.class_weights[1]", "nan"),
        (("data.class_weights=[1.0, 1001.0, 1.0]",), "data.class_weights[1]", "1001.0"),
        (
            ("data.task=causal", "data.classes=[]", "data.class_weights=[1.0]"),
            "data.class_weights",
            "only valid with data.task",
        ),
        (
            (*RECORD, "privacy.record=window"),
            "privacy.record",
            "only valid",
        ),
        ((*RECORD, "privacy.windows=2"), "privacy.windows", "no value"),
    ],
)
def test_an_unsound_plan_is_refused(settings: tuple[str, ...], field: str, says: str) -> None:
    with raises(PlanError, field, says=says):
        plan_of(*settings)


def test_the_heaviest_site_and_the_counters_are_those_of_texts() -> None:
    assert Sums(plan_of(), 10).training.heaviest == 6 * 8
    assert Sums(plan_of("data.task=causal", "data.classes=[]"), 10).training.heaviest == 6 * 8 * 16
    layout = Sums(plan_of(), 0).evaluation
    assert len(layout.counters) == len(set(layout.names)) == 3 + 9
    counts = {name: 2**40 + index for index, name in enumerate(layout.names)}
    total = 3 * layout.ring.encode_counters([counts[name] for name in layout.names])
    assert layout.open(total.astype(layout.ring.dtype), 3).counters == {
        name: 3 * each for name, each in counts.items()
    }


# --- whole runs, by the command line ----------------------------------------------------------------------------------


def taken_for(module: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """The class that a saved model gives a text, as its users call it."""
    with torch.no_grad():
        called = tokenizer(text, truncation=True, max_length=16, return_tensors="pt")
        return int(module(input_ids=called["input_ids"]).logits.argmax())


def held_out(made: Made, site: str) -> Prepared:
    return prepare(made.records(site), byte_tokenizer(), made.plan.data, seed=made.plan.run.seed)


def test_the_matrix_is_the_exact_sum_over_the_sites_of_what_the_saved_model_says(full: Made) -> None:
    final = full.run / "final"
    module = CLASSIFIERS.from_pretrained(final).eval()
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert module.config.id2label == dict(enumerate(CLASSES))
    expected: npt.NDArray[np.int64] = np.zeros((3, 3), np.int64)
    for site in ("site-000", "site-001", "site-002"):
        part = held_out(full, site).held_out
        for tokens in part.tokens:
            text = bytes(token for token in tokens if token < 256).decode()
            label = next(kind for kind in CLASSES if text.split()[0] in WORDS[kind])
            expected[CLASSES.index(label), taken_for(module, tokenizer, text)] += 1
    assert expected.tolist() != expected[::-1, ::-1].tolist(), (
        "the test would not see another order of the classes"
    )
    answer = full.answer
    figures = answer["classification"]
    assert figures["confusion"] == expected.tolist()
    assert figures["records"] == 18
    assert figures["accuracy"] == answer["accuracy"] == pytest.approx(np.trace(expected) / 18)
    assert answer["final_loss"] < answer["initial_loss"]
    confusion = Confusion(tuple(map(tuple, expected.tolist())))
    assert figures["macro"]["f1"] == confusion.macro().f1
    assert [each["class"] for each in figures["by_class"]] == list(CLASSES)
    assert [each["recall"] for each in figures["by_class"]] == [each.recall for each in confusion.by_class()]
    assert (answer["perplexity"], answer["tokens"]) == (None, None)
    assert answer["texts"] == 2 * 3 * 6 * 8
    rows = [json.loads(line) for line in (full.run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["confusion"] == expected.tolist()
    assert rows[-1]["macro_f1"] == confusion.macro().f1
    assert not {"perplexity", "bits_per_byte"} & set(rows[-1])


def after_a_round(event: Event) -> bool:
    """The moment when the first round is done."""
    return isinstance(event, RoundDone)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_head_of_an_undisturbed_one(
    full: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    kill_while(killed_run, full.run.parent / "plan.toml", out, after_a_round)
    resumed = found(capsys, "resume", str(out), "--workers", "1")
    for name in ("params_sha256", "final_loss", "classification"):
        assert resumed[name] == full.answer[name]


def test_the_figures_are_shown_where_the_loss_is(full: Made, capsys: pytest.CaptureFixture[str]) -> None:
    shown = done(capsys, "resume", str(full.run))
    macro = full.answer["classification"]["macro"]
    for words in (
        *(f"{each:.3f}" for each in macro.values()),
        "macro precision",
        "nats per text",
        "Held-out texts by class",
        "taken for",
        "texts/s in rounds",
        "cloister export",
    ):
        assert words in shown
    assert "cloister generate" not in shown


def test_commands_that_need_a_language_model_refuse_a_classifier(
    full: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    line = lone_refusal(capsys, "generate", str(full.run), "--prompt", "a")
    assert "data.task is 'classify': expected a task whose model writes text" in line
    line = lone_refusal(capsys, "compress", str(full.run), "--prune", "0.5")
    assert "only a causal LM can be compressed" in line
    assert not (full.run / "compressed").exists()


def test_a_mesh_that_divides_the_head_is_refused(full: Made, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(full.run.parent / "plan.toml")
    profile = "simulation.profiles=[{share=1.0, mesh={tensor=2}}]"
    out = str(full.run.parent / "tensor")
    line = refusal(capsys, "simulate", plan, "--out", out, "--workers", "1", "--set", profile)
    assert "mesh.tensor is 2: expected 1 with data.task = 'classify'" in line


def test_losses_of_the_sites_records_are_refused_under_a_unit(
    full: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*RECORD, "server.evaluation=sites", "simulation.public=0.0", "data.held_out=0.2"]
    arguments = set_options(settings)
    line = lone_refusal(
        capsys,
        "simulate",
        str(full.run.parent / "plan.toml"),
        *arguments,
        "--out",
        str(full.run.parent / "no"),
    )
    assert "server.evaluation is 'sites': expected another value" in line


@pytest.mark.slow
def test_a_private_run_is_evaluated_on_public_records_alone(private: Made) -> None:
    figures = private.answer["classification"]
    public = [json.loads(line) for line in (private.run / "sites" / "public.jsonl").read_text().splitlines()]
    counts = [sum(record["label"] == name for record in public) for name in CLASSES]
    assert [each["support"] for each in figures["by_class"]] == counts
    assert sum(counts) == 18
    assert private.answer["epsilon"] > 0
    assert private.answer["texts"] is None


@pytest.mark.slow
def test_a_private_adapter_and_its_head_load_with_peft_and_merged_without_it(
    private: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForSequenceClassification

    facts = found(capsys, "export", str(private.run), str(tmp_path / "adapter"))
    assert facts["form"] == "adapter"
    assert facts["classification"] == private.answer["classification"]
    done(capsys, "export", str(private.run), str(tmp_path / "merged"), "--merge")
    module, tokenizer = load_saved(private.run / "final")
    auto: Any = AutoPeftModelForSequenceClassification
    adapter, merged = (
        auto.from_pretrained(tmp_path / "adapter"),
        CLASSIFIERS.from_pretrained(tmp_path / "merged"),
    )
    called = tokenizer([note["text"] for note in notes(12, seed=5)], return_tensors="pt", padding=True)
    called.pop("token_type_ids", None)
    with torch.no_grad():
        own, others = (
            (each.eval()(**called).logits for each in (module, adapter)),
            merged.eval()(**called).logits,
        )
    for logits in own:
        torch.testing.assert_close(logits, others, rtol=1e-5, atol=1e-6)
    assert merged.config.id2label == dict(enumerate(CLASSES))
    card = (tmp_path / "merged" / "README.md").read_text()
    for words in (
        "pipeline_tag: text-classification",
        "text classifier",
        "| `bone` |",
        "AutoModelForSequenceCl",
    ):
        assert words in card


@pytest.mark.slow
def test_the_shipped_plan_learns_from_real_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller model and fewer steps of it, on passages of the Python manual and the standard library."""
    settings = (
        "model.config.hidden_size=16",
        "model.config.intermediate_size=32",
        "model.config.num_hidden_layers=1",
        "data.sequence_length=48",
        "run.rounds=1",
        "local.steps=16",
        "local.learning_rate=5e-3",
        "simulation.partition=iid",
        "local.warmup_steps=0",
        "server.evaluation_sequences=20",
    )
    arguments = set_options(settings)
    answer = found(
        capsys, "simulate", "classify", *arguments, "--out", str(tmp_path / "run"), "--workers", "1"
    )
    assert answer["final_loss"] < answer["initial_loss"]
    figures = answer["classification"]
    assert figures["classes"] == ["manual", "docstring", "code"]
    assert figures["records"] == 6 * 20
    assert min(each["support"] for each in figures["by_class"]) > 0
