"""Multiple choice: prompts whose completion is one of the plan's choices, and the choice that a model finds most
probable, counted in one confusion matrix over all sites."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.normalizers import Lowercase
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cloister.aggregation.sums import Sums
from cloister.cli.main import main
from cloister.lm.data.prepare import prepare
from cloister.lm.data.store import load_prepared, write_prepared
from cloister.lm.measures.confusion import Confusion
from cloister.lm.model.model import load_model, load_saved
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.records import Unusable
from cloister.lm.text.sequences import NOT_LEARNED
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.lm.training.evaluate import Evaluator, subset
from cloister.protocol.errors import DataError, PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.command import done, found, lone_refusal, refusal, set_options
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
    ),  # read by PEFT
    pytest.mark.usefixtures("one_thread"),
]

CHOICES = ("no", "no, never", "yes")
"""One of them begins with another, and one is much longer: a mean per token would choose otherwise."""
WORDS = {"no": "fever cough chill", "no, never": "rash itch burn", "yes": "break fall knee"}
PLAN = """
[run]
name = "questions"
rounds = 2

[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2

[data]
format = "prompt"
task = "choices"
choices = ["no", "no, never", "yes"]
sequence_length = 32
held_out = 0.2

[local]
steps = 24
batch_size = 8
learning_rate = 3e-2
schedule = "constant"

[cohort]
sites = 3

[simulation]
partition = "iid"
durable = false
"""
RECORD = (
    "data.held_out=0.0",
    "aggregation.weighting=uniform",
    "privacy.unit=record",
    "privacy.sampling_rate=0.3",
    "privacy.noise_multiplier=0.5",
    "privacy.delta=1e-3",
    "privacy.windows=1",
    "privacy.accountant=rdp",
    "privacy.method=reference",
    "model.adapter.scheme=ffa-lora",
    "model.adapter.rank=2",
)
LONG = {"prompt": "a question of some words ", "completion": "no"}
"""With the longest choice it does not fit into a sequence, and with its own it does."""
CAUSAL: Any = AutoModelForCausalLM  # transformers leaves its automatic classes untyped
FAST: Any = PreTrainedTokenizerFast  # and this one


def plan_of(*settings: str) -> Plan:
    return parse(PLAN, settings)


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of a few words, no two alike, most of them with the choice that the words belong to."""
    draw = random.Random(seed)
    made: dict[str, str] = {}
    while len(made) < count:
        (choice,) = draw.choices(CHOICES, (3, 2, 2))
        words = " ".join(draw.choices(WORDS[choice].split(), k=draw.randint(1, 3)))
        made[f"{words} {draw.randrange(99)}? "] = choice if draw.random() < 0.8 else draw.choice(CHOICES)
    return [{"prompt": prompt, "completion": choice} for prompt, choice in made.items()]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Made:
    """A finished run, by the command line."""

    def __init__(self, folder: Path, records: list[dict[str, Any]], *settings: str) -> None:
        self.run, self.path = folder / "run", folder / "plan.toml"
        self.path.write_text(f'{PLAN}source = "{write(folder / "questions.jsonl", records)}"\n')
        arguments = set_options(settings)
        printed, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
            command = ["simulate", str(self.path), "--out", str(self.run), "--workers", "1", "--json"]
            assert main([*command, *arguments]) == 0
        self.told = told.getvalue()
        self.answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        self.rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def records(self, site: str) -> list[dict[str, Any]]:
        lines = (self.run / "sites" / site / "data.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run under masks that evaluates at the sites."""
    return Made(tmp_path_factory.mktemp("secure"), questions(90))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run with the unit `record` that trains an adapter and evaluates on public records. One record of the sites has
    a completion that is no choice, and one of the public records does not fit with each choice."""
    folder = tmp_path_factory.mktemp("private")
    public = write(folder / "public.jsonl", [*questions(20, seed=1), LONG])
    records = [*questions(30), {"prompt": "fever? ", "completion": "maybe"}]
    return Made(folder, records, *RECORD, f"server.evaluation={public}", "run.rounds=1", "local.steps=2")


# --- the choice of a model --------------------------------------------------------------------------------------------


def random_model() -> Any:
    """Weights so large that each token depends much on those before it."""
    torch.manual_seed(0)
    module = load_model(plan_of()).module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module.eval()


def log_p(module: Any, tokenizer: Any, prompt: str, choices: Sequence[str] = CHOICES) -> list[float]:
    """For each choice the sum of log p over its tokens and the end of the text."""
    sums, before = [], len(tokenizer(prompt)["input_ids"])
    for choice in choices:
        ids = [*tokenizer(prompt + choice)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([ids])).logits[0].double()
        given = torch.log_softmax(logits, -1)[torch.arange(before - 1, len(ids) - 1), ids[before:]]
        sums.append(float(given.sum()))
    return sums


def matrix(module: Any, tokenizer: Any, records: list[dict[str, Any]]) -> list[list[int]]:
    """The confusion matrix of a model."""
    found = np.zeros((3, 3), np.int64)
    for record in records:
        given = int(np.argmax(log_p(module, tokenizer, record["prompt"])))
        found[CHOICES.index(record["completion"]), given] += 1
    counts: list[list[int]] = found.tolist()
    return counts


def held_out(made: Made, site: str) -> list[dict[str, Any]]:
    """The records of a site that were held out: those whose text is in a held-out sequence."""
    records = made.records(site)
    part = prepare(records, byte_tokenizer(), plan_of("data.packing=false").data, seed=0).held_out
    texts = {bytes(token for token in row if token < 256).decode() for row in part.tokens}
    return [record for record in records if record["prompt"] + record["completion"] in texts]


def test_the_matrix_is_the_exact_sum_over_the_sites_of_what_the_saved_model_says(secure: Made) -> None:
    final = secure.run / "final"
    module, tokenizer = CAUSAL.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    records = [record for index in range(3) for record in held_out(secure, f"site-00{index}")]
    expected = matrix(module, tokenizer, records)
    figures = secure.answer["classification"]
    assert (figures["classes"], figures["confusion"]) == (list(CHOICES), expected)
    confusion = Confusion(tuple(map(tuple, expected)))
    assert figures["records"] == len(records) == 18
    assert figures["accuracy"] == confusion.accuracy == np.trace(expected) / 18
    macro = confusion.macro()
    assert figures["macro"] == {"precision": macro.precision, "recall": macro.recall, "f1": macro.f1}
    assert [each["class"] for each in figures["by_class"]] == list(CHOICES)
    assert [each["recall"] for each in figures["by_class"]] == [each.recall for each in confusion.by_class()]
    last = secure.rows[-1]
    assert (last["confusion"], last["macro_f1"]) == (expected, macro.f1)
    assert last["choice_accuracy"] == confusion.accuracy
    # Of a model that was not trained, each token has about the same probability: the shortest choice is the likeliest.
    assert secure.rows[0]["confusion"] == [[each["support"], 0, 0] for each in figures["by_class"]]


@pytest.mark.parametrize("choices", [True, False])
def test_masks_change_no_count_and_choices_nothing_else(secure: Made, tmp_path: Path, choices: bool) -> None:
    """A first round in clear, with and without choices."""
    settings = ("aggregation.secure=false", "run.rounds=1", *(() if choices else ("data.task=causal",)))
    twin = Made(tmp_path, questions(90), *settings)
    same = ("params_sha256", "loss", "perplexity", "accuracy", "bits_per_byte", "tokens")
    counted = ("confusion", "choice_accuracy", "macro_precision", "macro_recall", "macro_f1")
    for row, other in zip(secure.rows[:2], twin.rows, strict=True):
        assert [row.get(name) for name in same] == [other.get(name) for name in same]
        expected = [row[name] if choices else None for name in counted]
        assert [other.get(name) for name in counted] == expected
    assert (twin.answer["classification"] is None) != choices


@pytest.mark.parametrize(("choices", "batch_size"), [(("aaab", "caab", "aaad"), 1), (("caab", "ca", "b"), 7)])
def test_each_token_of_a_choice_counts_and_the_end_of_the_text(
    choices: tuple[str, ...], batch_size: int
) -> None:
    """A model of random weights: choices of one length, and of others, of which a mean would take longer ones."""
    module, others = random_model(), 0
    settings = (f"data.choices={json.dumps(choices)}", "data.completion_field=other")
    records = [{"prompt": record["prompt"], "other": choices[1]} for record in questions(20)]
    made = prepare(records, byte_tokenizer(), plan_of(*settings).data, seed=0, evaluated=True)
    assert made.asked is not None
    expected = [0, 0, 0]
    for record in records:
        sums = np.array(log_p(module, byte_tokenizer(), record["prompt"], choices))
        expected[int(np.argmax(sums))] += 1
        others += bool(np.argmax(sums) != np.argmax(sums / [len(choice) + 1 for choice in choices]))
        *_, second, first = sorted(sums)
        assert first - second > 1e-4, "float32 could give another order"
    assert others > 0 or choices == ("aaab", "caab", "aaad")
    task = task_of(plan_of(*settings).data)
    found = task.answers(Evaluator(task, module, batch_size, torch.device("cpu")), made.asked)
    assert Confusion.counted(found.counts, "choice", 3).counts == ((0, 0, 0), tuple(expected), (0, 0, 0))
    assert (found.tokens, found.loss_nats) == (0, 0.0)


def test_the_figures_are_shown_where_the_loss_is(secure: Made, capsys: pytest.CaptureFixture[str]) -> None:
    macro, accuracy = (secure.answer["classification"][name] for name in ("macro", "accuracy"))
    assert f"choice accuracy {accuracy:.1%}" in secure.told
    shown = done(capsys, "resume", str(secure.run))
    figures = [f"{each:.3f}" for each in macro.values()]
    words = ("nats per token", "perplexity", "choice accuracy", f"{accuracy:.1%}", "macro F1", *figures)
    for each in (*words, "Held-out prompts by choice", "taken for", "cloister generate"):
        assert each in shown


# --- under a privacy unit ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_private_adapter_is_evaluated_on_public_records_alone(private: Made) -> None:
    assert "1 with a completion that is not in data.choices" in private.told
    module, tokenizer = load_saved(private.run / "final")
    expected = matrix(module, tokenizer, questions(20, seed=1))
    figures = private.answer["classification"]
    assert (figures["records"], figures["confusion"]) == (20, expected)
    assert private.answer["epsilon"] > 0


@pytest.mark.slow
def test_the_model_card_has_the_figures(
    private: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = found(capsys, "export", str(private.run), str(tmp_path / "adapter"))
    assert facts["classification"] == private.answer["classification"]
    card = (tmp_path / "adapter" / "README.md").read_text()
    for words in (
        "| prompts | 20 |",
        "| choices | `no`, `no, never`, `yes` |",
        "| `no, never` |",
        "perplexity",
    ):
        assert words in card


def test_counts_of_the_sites_records_are_refused_under_a_unit(
    private: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*RECORD, "data.held_out=0.2"]
    arguments = set_options(settings)
    out = str(private.run.parent / "no")
    line = lone_refusal(capsys, "simulate", str(private.path), *arguments, "--out", out)
    assert "server.evaluation is 'sites': expected another value" in line


def test_public_records_of_which_no_choices_can_be_compared_are_refused(
    secure: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = write(tmp_path / "public.jsonl", [LONG, LONG])
    command = ["simulate", str(secure.path), "--out", str(tmp_path / "run"), "--workers", "1"]
    line = refusal(capsys, *command, "--set", f"server.evaluation={public}")
    assert "server.evaluation" in line
    assert "expected a prompt that fits into data.sequence_length with each of data.choices" in line


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", ["maybe", "No", "no ", "", None, 1, ["no"]])
def test_a_record_with_another_completion_cannot_be_used(completion: object) -> None:
    records = [{"prompt": "fever? ", "completion": completion}, *questions(3)]
    data = plan_of().data
    unusable = Unusable()
    made = prepare(records, byte_tokenizer(), data, seed=0, unusable=unusable)
    assert made.records == 3
    (reason,) = made.left_out
    expected = "with a completion that is not in data.choices"
    assert reason == (
        expected if isinstance(completion, str) else "without the fields of data.format 'prompt'"
    )
    with raises(DataError, "record 1, field completion", says="'no', 'no, never'"):
        prepare([{"prompt": "", "completion": "maybe"}], byte_tokenizer(), data, seed=0)


def test_prompts_that_do_not_fit_with_each_choice_are_not_compared() -> None:
    """Nor are those without a token before the choice; both are in the loss."""
    records = [LONG, {"prompt": "", "completion": "yes"}, *questions(4)]
    made = prepare(records, byte_tokenizer(), plan_of().data, seed=0, evaluated=True)
    assert made.asked is not None
    assert made.asked.answers is not None
    assert made.asked.answers.tolist() == [CHOICES.index(record["completion"]) for record in questions(4)]
    assert (made.records, len(made.train)) == (6, 0)
    assert made.left_out == {"in comparing choices, because one does not fit or has no token before it": 2}


def test_a_subset_has_whole_prompts(tmp_path: Path) -> None:
    made = prepare(questions(12), byte_tokenizer(), plan_of().data, seed=0, evaluated=True)
    (tmp_path / "kept").mkdir()
    write_prepared(tmp_path / "kept", [made])
    kept = load_prepared(tmp_path / "kept").asked
    assert kept is not None
    assert made.asked is not None
    some = subset(kept, 5, seed=3)
    assert some.answers is not None
    assert len(some.answers) == 5
    texts = [bytes(token for token in row if token < 256).decode() for row in some.tokens]
    answers = {record["prompt"]: record["completion"] for record in questions(12)}
    for index, answer in enumerate(some.answers):
        own = texts[3 * index + answer].removesuffix(CHOICES[answer])
        assert answers[own] == CHOICES[answer]
        assert texts[3 * index : 3 * index + 3] == [own + choice for choice in CHOICES]
    np.testing.assert_array_equal(subset(kept, 12, seed=3).tokens, made.asked.tokens)


@pytest.mark.parametrize(
    ("merges", "no", "yes"),
    [
        ([(":", " "), (": ", "y")], [": "], [": y"]),
        ([(" ", "y"), (":", " ")], [": "], [":", " y"]),
    ],
)
def test_choices_that_a_tokenizer_joins_to_the_prompt_are_compared_from_the_same_token(
    merges: list[tuple[str, str]], no: list[str], yes: list[str]
) -> None:
    """A prompt that ends in `: ` has other tokens before `yes` than before `no`."""
    words = [*"ab: noyes", *(one + other for one, other in merges), "<end>", "<pad>"]
    words = list(dict.fromkeys(words))
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer = FAST(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    data = plan_of('data.choices=["no", "yes"]').data
    made = prepare([{"prompt": "ab: ", "completion": "yes"}], tokenizer, data, seed=0, evaluated=True)
    assert made.asked is not None
    names = [[words[label] for label in row if label != NOT_LEARNED] for row in made.asked.labels]
    assert names == [[*no, "n", "o", "<end>"], [*yes, *"es", "<end>"]]


def test_choices_that_a_tokenizer_makes_equal_are_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    with raises(DataError, "data.choices", says="choice 'no'"):
        prepare(questions(4), tokenizer, plan_of('data.choices=["no", "yes", "No"]').data, seed=0)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        (
            ("data.format=text", 'data.choices=["a", "b"]'),
            "data.task",
            'data.format = "prompt"',
        ),
        (("data.task=causal", 'data.choices=["a", "b"]'), "data.choices", "only valid"),
        (('data.choices=["one"]',), "data.choices", "is 1: expected 2 to 256"),
        (('data.choices=["a", "b", "a"]',), "data.choices", "is 'a': expected 2 to 256"),
        (('data.choices=["a", ""]',), "data.choices", "is '': expected 2 to 256"),
        (
            ("faults.poison.kind=backdoor", "faults.poison.share=0.1", "faults.poison.target=maybe"),
            "faults.poison.target",
            "one of data.choices",
        ),
    ],
)
def test_an_unsound_plan_is_refused(settings: tuple[str, ...], field: str, says: str) -> None:
    with raises(PlanError, field, says=says):
        plan_of(*settings)


def test_the_counters_of_an_evaluation_are_those_of_the_choices() -> None:
    layout = Sums(plan_of(), 0).evaluation
    assert len(layout.counters) == len(set(layout.names)) == 4 + 9
    assert len(Sums(plan_of("data.task=causal"), 0).evaluation.counters) == 4
