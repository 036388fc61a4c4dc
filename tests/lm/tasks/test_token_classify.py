"""Token classification: words with tags, a trained head, and entities that are counted as seqeval counts them."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from cloister.aggregation.sums import Sums
from cloister.cli.main import main
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import prepare, unit_rule
from cloister.lm.measures.entities import Entities, count, tags_of
from cloister.lm.model.model import load_model
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.notes import TYPES, letters, notes
from cloister.lm.text.records import Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.text.tokenizer import byte_tokenizer, train_tokenizer
from cloister.lm.training.train import Trainer
from cloister.protocol.errors import DataError, PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.record.folder import read_plan
from cloister.tests.parties.evaluated import evaluate
from cloister.tests.tools.command import found, lone_refusal, set_options
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
AUTO: Any = AutoModelForTokenClassification  # transformers leaves its automatic classes untyped
PLAN = """
[run]
name = "entities"
rounds = 2

[model]
name = "builtin:bert"

[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
hidden_dropout_prob = 0.0
attention_probs_dropout_prob = 0.0

[data]
task = "token-classify"
classes = ["drug", "dose"]
sequence_length = 48
held_out = 0.2

[local]
steps = 6
batch_size = 8
learning_rate = 1e-2

[cohort]
sites = 3

[simulation]
partition = "iid"
durable = false
"""
RECORD = (
    "data.held_out=0.0",
    "simulation.public=0.2",
    "server.evaluation=simulation:public",
    "aggregation.weighting=uniform",
    "privacy.unit=record",
    "privacy.sampling_rate=0.3",
    "privacy.noise_multiplier=1.0",
    "privacy.delta=1e-3",
)
OWNER = ("privacy.unit=owner", "data.owner=patient", "privacy.records=2")
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")


def plan_of(*settings: str) -> Plan:
    return parse(PLAN, settings)


def doses(count: int) -> list[dict[str, Any]]:
    """The notes that name a drug and a dose alone, or nothing."""
    made = []
    for record in notes(3 * count, seed=1):
        kept = [span for span in record["spans"] if span["label"] in ("drug", "dose")]
        made.append(record | {"spans": kept})
    return made[:count]


# --- figures ----------------------------------------------------------------------------------------------------------


def random_tags(draw: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """True tags of a batch, with -100 at some places, and tags that a model gives."""
    shape, tags = (draw.integers(1, 4), draw.integers(1, 9)), 1 + 2 * size
    chances = np.array([draw.uniform(0, 3), *np.ones(tags - 1)])
    true = draw.choice(tags, shape, p=chances / chances.sum())
    given = np.where(draw.random(shape) < 0.6, true, draw.choice(tags, shape))
    return np.where(draw.random(shape) < 0.2, NOT_LEARNED, true), given


def by_seqeval(true: np.ndarray, given: np.ndarray, tags: tuple[str, ...]) -> list[list[list[str]]]:
    """True and given tags of the words of each row, by name."""
    rows = [(row, other, row != NOT_LEARNED) for row, other in zip(true, given, strict=True)]
    return [
        [[tags[tag] for tag in row[kept]] for row, _, kept in rows],
        [[tags[tag] for tag in other[kept]] for _, other, kept in rows],
    ]


def disagreements(cases: int) -> int:
    """Of so many random batches those with other figures than seqeval's, and of the sum of all."""
    types, draw, wrong = ("drug", "side-effect", "_"), np.random.default_rng(0), 0
    tags, names = tags_of(types), Entities.names(3)
    total, all_true, all_given = np.zeros(9, np.int64), [], []
    for _ in range(cases):
        true, given = random_tags(draw, 3)
        counted = count(torch.tensor(given), torch.tensor(true), 3).numpy()
        total += counted
        wanted, found = by_seqeval(true, given, tags)
        all_true += wanted
        all_given += found
        wrong += not same(counted, wanted, found, names) if any(wanted) else bool(counted.any())
    return wrong + (not same(total, all_true, all_given, names))


def same(counted: np.ndarray, true: list[list[str]], given: list[list[str]], names: tuple[str, ...]) -> bool:
    micro = Entities.counted(dict(zip(names, counted.tolist(), strict=True)), 3).micro()
    reference = [score(true, given, zero_division=0) for score in (precision_score, recall_score, f1_score)]
    exact = len(get_entities(true)) == counted[2::3].sum() and len(get_entities(given)) == counted[1::3].sum()
    return exact and [micro.precision, micro.recall, micro.f1] == pytest.approx(reference, rel=1e-12)


def test_entities_are_counted_as_seqeval_does() -> None:
    assert disagreements(1000) == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(tags % 2 == 1) | other_kind | new_row", "(tags % 2 == 1) | new_row"),
        ("(tags % 2 == 1) | other_kind | new_row", "(tags % 2 == 1) | other_kind"),
        ("(tags % 2 == 1) | other_kind | new_row", "other_kind | new_row"),
        ("(~inside | begins)", "(~inside)"),
    ],
)
def test_another_count_is_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Mutant("lm.measures.entities:spans_of", old, new).plant(monkeypatch)
    with contextlib.suppress(RuntimeError):  # beginnings and ends of other numbers
        assert disagreements(50)


# --- records ----------------------------------------------------------------------------------------------------------


def made_of(*records: dict[str, Any], tokenizer: Any = None, settings: tuple[str, ...] = ()) -> list[Any]:
    """The examples of records, and at the end why others are left out."""
    unusable = Unusable()
    task = task_of(plan_of(*settings).data)
    made = [each for _, each in task.examples(records, tokenizer or byte_tokenizer(), unusable)]
    return [*made, dict(unusable.left_out)]


def labelled(example: Any, tokenizer: Any) -> list[tuple[str, int]]:
    """The tokens of an example that have a label, as text."""
    shown = np.flatnonzero(example.labels != NOT_LEARNED)
    return [(tokenizer.decode([example.tokens[at]]).strip(), int(example.labels[at])) for at in shown]


def span(start: int, end: int, label: str = "drug") -> dict[str, Any]:
    return {"start": start, "end": end, "label": label}


def test_the_first_token_of_a_word_has_its_tag() -> None:
    """Entities that begin and end inside of words; a character of two bytes before them."""
    text = "Ü: aspirin plus 50mg, (aspirin)."
    record = {"text": text, "spans": [span(4, 9), span(17, 20, "dose"), span(22, 31)]}
    *made, left_out = made_of(record)
    assert left_out == {}
    words = [
        ("\ufffd", 0),
        (":", 0),
        ("a", 1),
        ("p", 0),
        ("5", 3),
        (",", 0),
        ("(", 1),
        ("a", 2),
        (")", 2),
        (".", 0),
    ]
    assert labelled(made[0], byte_tokenizer()) == words
    trained = train_tokenizer(["aspirin plus 50 mg"] * 3, "bpe", 270)
    (example, _) = made_of(record, tokenizer=trained)
    assert len(example.tokens) < len(text)
    assert [tag for _, tag in labelled(example, trained)] == [tag for _, tag in words]


def test_a_token_of_two_words_has_the_tag_of_the_first() -> None:
    tokenizer = train_tokenizer(["ab).ab). ab)."] * 9, "bpe", 262)
    record = {"text": "ab).", "spans": [span(3, 4)]}
    example, left_out = made_of(record, tokenizer=tokenizer)
    pieces = [tokenizer.decode([token]) for token in example.tokens]
    assert left_out == {}
    assert ")." in pieces, "the tokenizer must join the two words"
    assert labelled(example, tokenizer) == [("ab", 0), (").", 0)]


def test_words_may_be_listed_with_their_tags() -> None:
    settings = ("data.text_field=tokens", "data.spans_field=tags")
    record = {"tokens": ["take", "two", "aspirin", "now"], "tags": ["O", "B-dose", "I-drug", "O"]}
    *made, left_out = made_of(record, settings=settings)
    assert left_out == {}
    assert labelled(made[0], byte_tokenizer()) == [("t", 0), ("t", 3), ("a", 2), ("n", 0)]
    assert byte_tokenizer().decode(made[0].tokens) == "take two aspirin now"
    wrong = [["O"] * 3, ["O"] * 5, ["O", "O", "B-other", "O"], ["O", "O", 0, "O"], "O O O O", None]
    *made, left_out = made_of(*(record | {"tags": tags} for tags in wrong), settings=settings)
    assert (made, sum(left_out.values())) == ([], 6)
    *made, left_out = made_of({"tokens": ["take", ""], "tags": ["O", "O"]}, settings=settings)
    assert (made, sum(left_out.values())) == ([], 1)


@pytest.mark.parametrize(
    "spans",
    [
        [span(0, 4), span(3, 6)],
        [span(5, 7), span(7, 12)],
        [span(0, 99)],
        [span(-2, 3)],
        [span(3, 3)],
        [span(4, 5)],
        [span(0, 4, "secret")],
        [{"start": 0, "end": 4}],
        [{"start": True, "end": 4, "label": "drug"}],
        [{"start": 0.0, "end": 4, "label": "drug"}],
        [span(0, 4) | {"label": ["drug"]}],
        ["drug"],
        {"start": 0, "end": 4, "label": "drug"},
        None,
    ],
)
def test_a_record_with_entities_that_cannot_be_is_left_out(spans: object) -> None:
    record, other = {"text": "take aspirin", "spans": spans}, {"text": "take aspirin", "spans": []}
    *made, left_out = made_of(record, other)
    assert [labelled(each, byte_tokenizer()) for each in made] == [[("t", 0), ("a", 0)]]
    (reason,) = left_out
    assert "secret" not in reason
    assert "aspirin" not in reason


def test_a_text_is_cut_between_the_special_tokens() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A <|pad|>", special_tokens=[("<|end|>", 256), ("<|pad|>", 257)]
    )
    text = "one two three four"
    record = {"text": text, "spans": [span(0, 3), span(14, 18)]}
    (example, _) = made_of(record, tokenizer=tokenizer, settings=("data.sequence_length=12",))
    assert example.tokens.tolist() == tokenizer(text, truncation=True, max_length=12)["input_ids"]
    assert np.flatnonzero(example.labels != NOT_LEARNED).tolist() == [1, 5, 9]
    assert example.labels[[1, 5, 9]].tolist() == [1, 0, 0]
    with raises(DataError, "data.sequence_length"):
        made_of(record, tokenizer=tokenizer, settings=("data.sequence_length=2",))


def test_the_notes_have_their_entities_where_they_say() -> None:
    for records in (notes(40), letters(40)):
        for record in records:
            for each in record["spans"]:
                assert record["text"][each["start"] : each["end"]].strip()
                assert each["label"] in TYPES
        settings = (f"data.classes={json.dumps(TYPES)}", "data.sequence_length=160")
        *made, left_out = made_of(*records, settings=settings)
        assert (len(made), left_out) == (40, {})
    assert notes(30) == notes(40)[:30]
    assert notes(3) != notes(3, seed=1)
    assert len({record["patient"] for record in notes(40)}) > 10


# --- the model --------------------------------------------------------------------------------------------------------


def folder_of(path: Path, kind: str) -> str:
    """A saved model of random weights with the byte tokenizer, without dropout."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    if kind == "gpt2":
        sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    if kind == "bert":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    named = {"id2label": dict(enumerate(tags_of(("drug", "dose")))), "pad_token_id": 257}
    torch.manual_seed(0)
    made = AUTO.from_config(
        AutoConfig.for_model(
            kind,
            **sizes,
            **named,
            classifier_dropout=0.0,
            vocab_size=264,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    made.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return f"model.name={path}"


def some(n: int = 6, *settings: str) -> Sequences:
    plan = plan_of("data.held_out=0.0", "server.evaluation=none", *settings)
    return prepare(
        doses(n), byte_tokenizer(), plan.data, seed=0, units=unit_rule(plan.data, plan.privacy)
    ).train


def loss_of(module: Any, data: Sequences, row: int) -> torch.Tensor:
    """transformers' own loss of one text, without padding."""
    kept = np.flatnonzero(data.tokens[row] != 257)
    text, labels = (torch.tensor(each[row][kept])[None].long() for each in (data.tokens, data.labels))
    loss: torch.Tensor = module(input_ids=text, labels=labels).loss
    return loss


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
def test_loss_and_unit_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    name = folder_of(tmp_path, kind)
    model, data = load_model(plan_of(name, "model.config={}")), some()
    plain = AUTO.from_pretrained(tmp_path).eval()
    words = (data.labels != NOT_LEARNED).sum(1)
    assert len(set(words)) > 1
    nats = sum(float(loss_of(plain, data, row).detach()) * words[row] for row in range(6))
    sums = evaluate(model.module, data, 4, CPU, task=task_of(plan_of().data))
    assert sums.loss_nats == pytest.approx(nats, rel=1e-5)
    assert sums.tokens == words.sum()
    for unit in ((), OWNER):
        plan = plan_of(*RECORD, *unit, name, "model.config={}")
        data = some(6, *RECORD, *unit)
        assert data.starts is not None
        trainer = PrivateTrainer(plan, model, CPU)
        trained, parameters = model.trainable(), dict(plain.named_parameters())
        model.module.eval()
        with trainer.per_unit_gradients(trained) as gradients:
            units = list(gradients(data, np.arange(len(data.starts) - 1)))
        for begin, end, one in zip(data.starts[:-1], data.starts[1:], units, strict=True):
            loss = torch.stack([loss_of(plain, data, row) for row in range(begin, end)]).mean()
            wanted = torch.autograd.grad(loss, [parameters[each] for each, _ in trained])
            for gradient, other in zip(one.gradients, wanted, strict=True):
                torch.testing.assert_close(gradient[0], other, rtol=1e-4, atol=1e-6)


def test_a_step_divides_by_its_words(tmp_path: Path) -> None:
    settings = ("local.steps=1", "local.batch_size=6", "local.clip_norm=0.0")
    name = folder_of(tmp_path, "bert")
    model, data = load_model(plan_of(name, "model.config={}", *settings)), some()
    trained = Trainer(plan_of(name, "model.config={}", *settings), model, CPU).train(
        model.layout.flatten(model.module), data, round=1, site_seed=(0,)
    )
    plain = AUTO.from_pretrained(tmp_path).eval()
    words = (data.labels != NOT_LEARNED).sum(1)
    nats = sum(float(loss_of(plain, data, row).detach()) * words[row] for row in range(6))
    assert trained.tokens == words.sum()
    assert trained.loss == pytest.approx(nats / words.sum(), rel=1e-5)


@pytest.mark.parametrize(("kind", "adapter"), [("llama", ()), ("bert", FFA)])
def test_the_gradients_of_opacus_are_those_of_single_backward_passes(
    tmp_path: Path, kind: str, adapter: tuple[str, ...]
) -> None:
    name = folder_of(tmp_path, kind)
    plan, data = (
        plan_of(*RECORD, name, "model.config={}", "privacy.method=opacus", *adapter),
        some(6, *RECORD),
    )
    model = load_model(plan)
    trainer, trained = PrivateTrainer(plan, model, CPU), model.trainable()
    parameters = [parameter for _, parameter in trained]
    with torch.no_grad():
        for parameter in parameters:  # the factors of an adapter begin at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.module.train()
    with trainer.per_unit_gradients(trained) as gradients:
        parts = [each.gradients for each in gradients(data, np.arange(6))]
    hooked = [torch.cat(each) for each in zip(*parts, strict=True)]
    model.module.eval()
    for row in range(6):
        wanted = torch.autograd.grad(loss_of(model.module, data, row), parameters)
        for gradient, other in zip(hooked, wanted, strict=True):
            torch.testing.assert_close(gradient[row], other, rtol=1e-4, atol=1e-6)


def test_opacus_is_refused_where_positions_are_trained(tmp_path: Path) -> None:
    plan = plan_of(*RECORD, folder_of(tmp_path, "bert"), "model.config={}", "privacy.method=opacus")
    with raises(PlanError, "privacy.method"):
        PrivateTrainer(plan, load_model(plan), CPU)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("data.format=prompt",), "data.task"),
        (("data.classes=[]",), "data.classes"),
        (('data.classes=["a", "a"]',), "data.classes"),
        (('data.classes=["a", ""]',), "data.classes"),
        (("data.class_weights=[1.0, 2.0]",), "data.class_weights"),
        (("data.label_field=kind",), "data.label_field"),
        (("data.packing=false",), "data.packing"),
        (("data.mask_share=0.2",), "data.mask_share"),
        (("data.task=causal", "data.classes=[]", "data.spans_field=entities"), "data.spans_field"),
        ((*RECORD, "privacy.windows=2"), "privacy.windows"),
        (("faults.poison={share=0.4, kind='label-flip'}",), "faults.poison.kind"),
        (("faults.poison={share=0.4, kind='backdoor', target='drug'}",), "faults.poison.kind"),
    ],
)
def test_an_unsound_plan_is_refused(settings: tuple[str, ...], field: str) -> None:
    with raises(PlanError, field):
        plan_of(*settings)


def test_one_type_is_enough_and_the_counters_are_those_of_words() -> None:
    plan = plan_of('data.classes=["drug"]')
    assert Sums(plan, 10).training.heaviest == 6 * 8 * 48
    assert len(Sums(plan, 0).evaluation.counters) == 3 + 3


# --- whole runs, by the command line ----------------------------------------------------------------------------------


class Made:
    """A finished run, by the command line."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.run, plan, records = folder / "run", folder / "plan.toml", folder / "notes.jsonl"
        records.write_text("".join(json.dumps(record) + "\n" for record in doses(90)))
        plan.write_text(f'{PLAN}source = "{records}"\n')
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            command = ["simulate", str(plan), "--out", str(self.run), "--workers", "1", "--json"]
            assert main([*command, *set_options(settings)]) == 0
        self.answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        self.plan = read_plan(self.run)


def tags_by(module: Any, tokenizer: Any, record: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The true tags of the words of a record, and those that a saved model gives as its users call it."""
    text, names = record["text"], module.config.id2label
    called = tokenizer(text, truncation=True, max_length=48, return_tensors="pt", return_offsets_mapping=True)
    offsets = called["offset_mapping"][0].tolist()
    with torch.no_grad():
        given = module(input_ids=called["input_ids"]).logits[0].argmax(-1).tolist()
    true, other = [], []
    for word in re.finditer(r"\w+|[^\w\s]", text):
        at = next(
            (at for at, (begin, end) in enumerate(offsets) if begin < word.end() and end > word.start()), None
        )
        if at is None:
            continue
        own = [each for each in record["spans"] if each["start"] < word.end() and each["end"] > word.start()]
        inside = own and re.search(r"\S", text[own[0]["start"] : word.start()])
        true.append(f"{'I' if inside else 'B'}-{own[0]['label']}" if own else "O")
        other.append(names[given[at]])
    return true, other


@pytest.mark.slow
def test_a_run_under_masks_counts_what_the_saved_model_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path, "local.learning_rate=3e-2", "run.rounds=3")
    final = made.run / "final"
    module, tokenizer = AUTO.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    assert list(module.config.id2label.values()) == list(tags_of(("drug", "dose")))
    true, given = [], []
    for site in sorted((made.run / "sites").glob("site-*/data.jsonl")):
        records = [json.loads(line) for line in site.read_text().splitlines()]
        part = prepare(records, byte_tokenizer(), made.plan.data, seed=made.plan.run.seed).held_out
        by_text = {record["text"].encode()[:48]: record for record in records}
        for row in part.tokens:
            wanted, found_ = tags_by(module, tokenizer, by_text[bytes(token for token in row if token < 256)])
            true.append(wanted)
            given.append(found_)
    assert len(true) == 18
    answer = made.answer
    scores = [score(true, given, zero_division=0) for score in (precision_score, recall_score, f1_score)]
    assert [answer[f"entity_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(scores)
    assert answer["entities"]["micro"]["support"] == len(get_entities(true)) > 0
    assert sum(each["given"] for each in answer["entities"]["by_type"]) == len(get_entities(given)) > 0
    assert answer["final_loss"] < answer["initial_loss"]
    assert (answer["tokens"], answer["words"] > 0) == (None, True)
    text = doses(90)[0]["text"]
    listed = found(capsys, "predict", str(made.run), "--text", text)["found"]
    assert all(text[each["start"] : each["end"]] == each["text"] for each in listed)
    assert "a task whose model writes text" in lone_refusal(
        capsys, "generate", str(made.run), "--prompt", "a"
    )


@pytest.mark.slow
@pytest.mark.parametrize("unit", [(), OWNER], ids=["record", "owner"])
def test_a_private_adapter_and_its_head_load_with_peft(
    unit: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForTokenClassification

    made = Made(tmp_path, *RECORD, *unit, *FFA)
    assert made.answer["epsilon"] > 0
    assert made.answer["words"] is None
    facts = found(capsys, "export", str(made.run), str(tmp_path / "adapter"))
    assert facts["entities"] == made.answer["entities"]
    found(capsys, "export", str(made.run), str(tmp_path / "merged"), "--merge")
    auto: Any = AutoPeftModelForTokenClassification
    adapter, merged = (
        auto.from_pretrained(tmp_path / "adapter").eval(),
        AUTO.from_pretrained(tmp_path / "merged"),
    )
    tokens = torch.randint(0, 255, (2, 20))
    with torch.no_grad():
        own, other = adapter(input_ids=tokens).logits, merged.eval()(input_ids=tokens).logits
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    card = (tmp_path / "merged" / "README.md").read_text()
    for words in (
        "pipeline_tag: token-classification",
        "token classifier",
        "| `dose` |",
        "AutoModelForTokenCl",
    ):
        assert words in card


@pytest.mark.slow
def test_the_shipped_plan_learns_from_made_up_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smaller model and fewer steps of it."""
    settings = (
        "model.config.hidden_size=16",
        "model.config.intermediate_size=32",
        "model.config.num_hidden_layers=1",
        "run.rounds=1",
        "local.steps=2",
        "public.steps=20",
        "server.evaluation_sequences=30",
    )
    out = str(tmp_path / "run")
    answer = found(
        capsys, "simulate", "clinical-notes", *set_options(settings), "--out", out, "--workers", "1"
    )
    assert [each["type"] for each in answer["entities"]["by_type"]] == list(TYPES)
    assert answer["epsilon"] < 4


def test_two_records_are_the_same_if_their_texts_are() -> None:
    """Else a site's text with other entities would pass for a public one."""
    assert task_of(plan_of().data).content == (plan_of().data.text_field,)
