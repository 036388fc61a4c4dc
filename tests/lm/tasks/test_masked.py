"""Masked language modelling: which tokens are hidden, by which randomness, and what is learned from them."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from cloister.cli.main import main
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import Prepared, prepare, unit_rule
from cloister.lm.model.model import LanguageModel, load_model, load_saved
from cloister.lm.tasks.masked import Masked
from cloister.lm.tasks.registry import task_of, tokenizer_of
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.lm.text.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_digest
from cloister.lm.training.train import Trainer
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import DataError, ModelError, PlanError
from cloister.protocol.plan.plan import ModelSection, Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.parties.evaluated import evaluate
from cloister.tests.tools.command import found, lone_refusal, set_options
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
AUTO: Any = AutoModelForMaskedLM  # transformers leaves its automatic classes untyped
MASK, PAD, LENGTH = 258, 257, 32
PLAN = f"""
[run]
name = "masked"
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
task = "masked"
sequence_length = {LENGTH}
held_out = 0.2

[local]
steps = 2
batch_size = 4
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
OWNER = ("privacy.unit=owner", "data.owner=patient", "privacy.records=2", "privacy.windows=2")
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")


def plan_of(*settings: str) -> Plan:
    return parse(PLAN, settings)


def texts(count: int) -> list[dict[str, Any]]:
    return [
        {"text": f"Note {number}: " + "a word and another " * (number % 4), "patient": number % 3}
        for number in range(count)
    ]


def made(records: list[dict[str, Any]], *settings: str) -> Prepared:
    plan = plan_of(*settings)
    units = unit_rule(plan.data, plan.privacy)
    return prepare(records, tokenizer_of(plan), plan.data, seed=0, units=units)


def some(n: int = 6, *settings: str) -> Sequences:
    return made(texts(n), "data.held_out=0.0", "server.evaluation=none", *settings).train


def whole_row() -> Sequences:
    """One sequence without padding."""
    return made(
        [{"text": "a word and another one, and more"}], "data.held_out=0.0", "server.evaluation=none"
    ).train


class Seen:
    """What a model's forward passes were given, one row after the other."""

    def __init__(self, model: LanguageModel) -> None:
        self.rows: list[npt.NDArray[np.int64]] = []
        model.module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _module: object, _arguments: object, given: dict[str, torch.Tensor]) -> None:
        self.rows += list(given["input_ids"].numpy().copy())


# --- what is hidden ---------------------------------------------------------------------------------------------------


def drawn(share: float = 0.15, rows: int = 600) -> tuple[npt.NDArray[np.int32], ...]:
    """Tokens, and what is drawn of them: tokens as the model gets them, labels."""
    task = Masked(plan_of(f"data.mask_share={share}").data)
    tokens = np.full((rows, LENGTH), 65, np.int32)
    tokens[:, -4:] = PAD
    labels = np.where(tokens == PAD, np.int32(NOT_LEARNED), tokens)
    generator = np.random.default_rng(0)
    return tokens, *task.drawn(tokens, labels, tokenizer_of(plan_of()), generator.random)


def wrong_shares() -> int:
    """How many shares are not those of the paper, by more than five deviations, or places are not what they may be."""
    wrong = 0
    for share in (0.15, 0.4):
        tokens, hidden, labels = drawn(share)
        possible, learned = tokens != PAD, labels != NOT_LEARNED
        wrong += int(
            (learned & ~possible).sum()
            + (labels != tokens)[learned].sum()
            + (hidden != tokens)[~learned].sum()
        )
        masked, same = (hidden == MASK)[learned], (hidden == tokens)[learned]
        rates = [
            (learned[possible].mean(), share, possible.sum()),
            (masked.mean(), 0.8 + 0.1 / 259, learned.sum()),
            (same.mean(), 0.1 + 0.1 / 259, learned.sum()),
        ]
        wrong += sum(abs(rate - p) > 5 * np.sqrt(p * (1 - p) / n) for rate, p, n in rates)
        others = hidden[learned & (hidden != MASK) & (hidden != tokens)]
        wrong += not (len(set(others.tolist())) > 80 and others.min() >= 0 and others.max() <= 258)
    return wrong


def test_the_shares_are_those_of_the_paper() -> None:
    assert wrong_shares() == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(chance < 1)", "(chance < 0.9)"),
        ("np.where(chance < _HIDDEN,", "np.where(chance < 0.7,"),
        ("chance < _HIDDEN + _RANDOM", "chance < 1"),
        ("(labels != NOT_LEARNED) & ", ""),
        ("* len(tokenizer)", "* 50"),
    ],
)
def test_other_shares_are_seen(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Mutant("lm.tasks.masked:Masked.drawn", old, new).plant(monkeypatch)
    assert wrong_shares()


def test_the_mask_token_is_of_this_task_alone() -> None:
    section = ModelSection()
    assert tokenizer_digest(load_tokenizer(section)) == tokenizer_digest(byte_tokenizer())
    masks = load_tokenizer(section, masks=True)
    assert (masks.mask_token_id, len(masks)) == (MASK, 259)
    assert byte_tokenizer().mask_token_id is None


def test_a_checkpoint_whose_tokenizer_has_no_mask_token_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("bert", vocab_size=264).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with raises(ModelError, "model.name"):
        load_model(plan_of(f"model.name={tmp_path}", "model.config={}"))


def test_each_sequence_has_the_special_tokens_around_it() -> None:
    plan = plan_of("data.sequence_length=8")
    tokenizer = tokenizer_of(plan)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A <|pad|>", special_tokens=[("<|end|>", 256), ("<|pad|>", 257)]
    )
    records = [{"text": "abcdefgh<|mask|>i"}, {"text": ""}, {"text": "k"}]
    part = prepare(records, tokenizer, plan.data, seed=0, evaluated=True).held_out
    assert len(part) == 3
    train = prepare(
        records,
        tokenizer,
        plan_of("data.sequence_length=8", "data.held_out=0.0", "server.evaluation=none").data,
        seed=0,
    ).train
    assert train.tokens.tolist() == [
        [256, *b"abcdef", 257],
        [256, *b"gh", MASK, *b"i", 257, PAD, PAD],
        [256, *b"k", 257, *[PAD] * 5],
    ]
    learnable = np.where(train.labels == NOT_LEARNED, 0, train.labels)
    assert learnable.tolist() == [[0, *b"abcdef", 0], [0, *b"gh", 0, *b"i", 0, 0, 0], [0, *b"k", *[0] * 6]]


def test_a_single_text_is_held_out_by_whole_sequences() -> None:
    parts = made([{"text": "x" * (LENGTH * 10)}])
    assert (len(parts.train), len(parts.held_out)) == (8, 2)
    with raises(DataError, "data.text"):
        made([{"text": "x" * LENGTH}])


# --- by which randomness ----------------------------------------------------------------------------------------------


def test_an_evaluation_hides_by_the_rows_own_tokens() -> None:
    records = texts(30)
    whole, fewer = made(records).held_out, made(records).held_out
    np.testing.assert_array_equal(whole.tokens, fewer.tokens)
    assert 0 < (whole.labels != NOT_LEARNED).sum() < 0.5 * (whole.tokens != PAD).sum()
    assert (whole.tokens == MASK).any()
    task, tokenizer = task_of(plan_of().data), tokenizer_of(plan_of())
    data = some(12)
    every = task.scored(data, tokenizer)
    alone = task.scored(replace(data, tokens=data.tokens[3:5], labels=data.labels[3:5]), tokenizer)
    np.testing.assert_array_equal(alone.tokens, every.tokens[3:5])
    np.testing.assert_array_equal(alone.labels, every.labels[3:5])
    full = [{"text": letter * LENGTH} for letter in "abcdefgh"]
    places = made(full, "data.held_out=0.8").held_out.labels != NOT_LEARNED
    assert len({tuple(row) for row in places.tolist()}) > 4, "rows of other tokens hide other places"


def trained_rows(settings: tuple[str, ...] = (), **options: Any) -> list[list[int]]:
    """The rows of a round without privacy, with their hidden tokens."""
    plan = plan_of(*settings)
    model = load_model(plan)
    seen = Seen(model)
    options = dict[str, Any](round=1, site_seed=(1,)) | options
    Trainer(plan, model, CPU).train(model.layout.flatten(model.module), whole_row(), **options)
    return [row.tolist() for row in seen.rows]


def test_masks_are_fresh_in_each_step_and_round_and_the_same_at_all_sites() -> None:
    """All rows are of one text: only what is hidden differs."""
    one, other_site, next_round = trained_rows(), trained_rows(site_seed=(2,)), trained_rows(round=2)
    assert len(set(map(tuple, one))) > 6, "eight uses of one row in two steps"
    assert one == other_site
    assert not {*map(tuple, one)} & {*map(tuple, next_round)}
    assert one != trained_rows(("run.seed=1",))


@pytest.mark.parametrize("new", ["seeds[1:2]", "seeds[:1]", "seeds"])
def test_other_seeds_are_seen(new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Mutant("lm.training.train:_of_step", "*seeds[:2]", f"*{new}").plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_masks_are_fresh_in_each_step_and_round_and_the_same_at_all_sites()


def private_rows(noise: NoiseStream, data: Sequences | None = None) -> list[list[int]]:
    """The rows of a private round in which every unit is drawn."""
    plan = plan_of(*RECORD, "privacy.sampling_rate=1.0")
    model = load_model(plan)
    seen = Seen(model)
    data = some(5, *RECORD) if data is None else data
    PrivateTrainer(plan, model, CPU).train(
        model.layout.flatten(model.module), data, round=1, noise=noise, noise_multiplier=1.0
    )
    return [row.tolist() for row in seen.rows]


def test_masks_of_private_steps_come_from_the_secret_stream() -> None:
    stream = NoiseStream.from_declared_seed
    state = torch.get_rng_state()
    one, again, other = private_rows(stream(1)), private_rows(stream(1)), private_rows(stream(2))
    assert one == again
    assert one != other
    assert one[: len(one) // 2] != one[len(one) // 2 :], "the two steps hide other tokens"
    assert torch.equal(torch.get_rng_state(), state)


def test_the_masks_of_a_unit_have_one_law_at_any_place() -> None:
    """A unit more changes the masks of later units to others of the same law, drawn from states of their own."""
    data, rows = whole_row(), np.zeros(400, np.int64)
    many = replace(data, tokens=data.tokens[rows], labels=data.labels[rows], starts=np.arange(401))
    seen = np.array(private_rows(NoiseStream.from_declared_seed(3), many)[:400])
    masked = (seen == MASK)[:, (data.labels[0] != NOT_LEARNED)]
    for half in (masked[:200], masked[200:]):
        p, n = 0.15 * 0.8, half.size
        assert abs(half.mean() - p) < 5 * np.sqrt(p * (1 - p) / n)
    assert len(set(map(tuple, seen.tolist()))) > 300


# --- what is learned --------------------------------------------------------------------------------------------------


def loss_of(module: Any, row: npt.NDArray[np.int64], labels: npt.NDArray[np.int32]) -> torch.Tensor:
    """transformers' own mean loss of one row, without its padding."""
    kept = torch.tensor(row[row != PAD])[None], torch.tensor(labels[row != PAD])[None].long()
    loss: torch.Tensor = module(input_ids=kept[0], labels=kept[1]).loss
    return loss


@pytest.mark.parametrize("unit", [(), OWNER], ids=["record", "owner"])
def test_the_gradient_of_a_unit_is_that_of_its_rows_with_the_same_masks(unit: tuple[str, ...]) -> None:
    plan = plan_of(*RECORD, *unit)
    model, data = load_model(plan), some(6, *RECORD, *unit)
    assert data.starts is not None
    trainer, trained, task = PrivateTrainer(plan, model, CPU), model.trainable(), task_of(plan.data)
    seen: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
    draw = type(task).drawn

    def keep(self: Any, *arguments: Any) -> Any:
        seen.append(draw(self, *arguments))
        return seen[-1]

    model.module.eval()
    with pytest.MonkeyPatch.context() as patch, trainer.per_unit_gradients(trained) as gradients:
        patch.setattr(Masked, "drawn", keep)
        units = list(gradients(data, np.arange(len(data.starts) - 1)))
    assert len(units) == len(data.starts) - 1
    tokens, labels = (np.concatenate([each[part] for each in seen]) for part in (0, 1))
    parameters = [parameter for _, parameter in trained]
    shares = data.shares if data.shares is not None else None
    for begin, end, one in zip(data.starts[:-1], data.starts[1:], units, strict=True):
        losses = [
            loss_of(model.module, tokens[row].astype(np.int64), labels[row])
            * (1 / (end - begin) if shares is None else float(shares[row]))
            for row in range(begin, end)
            if (labels[row] != NOT_LEARNED).any()
        ]
        wanted = torch.autograd.grad(torch.stack(losses).sum(), parameters) if losses else None
        for at, gradient in enumerate(one.gradients):
            other = torch.zeros_like(parameters[at]) if wanted is None else wanted[at]
            torch.testing.assert_close(gradient[0], other, rtol=1e-4, atol=1e-6)


def test_where_nothing_is_hidden_nothing_is_learned(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(*RECORD, "data.mask_share=1e-9")
    model, data = load_model(plan), some(4, *RECORD)
    trainer, trained = PrivateTrainer(plan, model, CPU), model.trainable()
    with trainer.per_unit_gradients(trained) as gradients:
        for one in gradients(data, np.arange(4)):
            assert not any(gradient.any() for gradient in one.gradients)
            assert (float(one.nats.sum()), int(one.tokens.sum())) == (0.0, 0)
    assert not caplog.records, "no unit failed"
    plan = plan_of("data.mask_share=1e-9")
    update = Trainer(plan, model, CPU).train(
        model.layout.flatten(model.module), data, round=1, site_seed=(0,)
    )
    assert (update.tokens, update.loss) == (0, 0.0)
    assert not update.vector.any()


def test_a_held_out_loss_is_that_of_transformers() -> None:
    plan = plan_of()
    model, data = load_model(plan), made(texts(40)).held_out
    sums = evaluate(model.module, data, 4, CPU, task=task_of(plan.data))
    counts = (data.labels != NOT_LEARNED).sum(1)
    model.module.eval()
    nats = sum(
        float(loss_of(model.module, row.astype(np.int64), labels).detach()) * count
        for row, labels, count in zip(data.tokens, data.labels, counts, strict=True)
        if count
    )
    assert sums.tokens == counts.sum()
    assert sums.loss_nats == pytest.approx(nats, rel=1e-5)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("data.format=prompt",), "data.task"),
        (("data.mask_share=0.0",), "data.mask_share"),
        (("data.mask_share=1.0",), "data.mask_share"),
        (("data.task=causal", "model.name=builtin:llama", "data.mask_share=0.2"), "data.mask_share"),
        (('data.classes=["a", "b"]',), "data.classes"),
        (("data.packing=false",), "data.packing"),
        (("faults.poison={share=0.4, kind='label-flip'}",), "faults.poison.kind"),
    ],
)
def test_an_unsound_plan_is_refused(settings: tuple[str, ...], field: str) -> None:
    with raises(PlanError, field):
        plan_of(*settings)


def test_opacus_is_refused_where_it_is_not_proven() -> None:
    plan = plan_of(*RECORD, "privacy.method=opacus")
    with raises(PlanError, "privacy.method"):
        PrivateTrainer(plan, load_model(plan), CPU)


# --- whole runs, by the command line ----------------------------------------------------------------------------------


def simulated(folder: Path, *settings: str) -> dict[str, Any]:
    """The answer of a run."""
    plan, records = folder / "plan.toml", folder / "texts.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in texts(60)))
    plan.write_text(f'{PLAN}source = "{records}"\n')
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command = ["simulate", str(plan), "--out", str(folder / "run"), "--workers", "1", "--json"]
        assert main([*command, *set_options(settings)]) == 0
    answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return answer


@pytest.mark.slow
def test_a_run_under_masks_ends_with_a_masked_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = simulated(tmp_path, "local.steps=10")
    assert answer["final_loss"] < answer["initial_loss"]
    assert answer["tokens"] > 0
    run = str(tmp_path / "run")
    final = tmp_path / "run" / "final"
    module, tokenizer = AUTO.from_pretrained(final).eval(), AutoTokenizer.from_pretrained(final)
    text = f"Note 7: a w{tokenizer.mask_token}rd"
    listed = found(capsys, "predict", run, "--text", text)["found"]
    with torch.no_grad():
        logits = module(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[
            0, 11, :259
        ]
    assert len(listed) == 5
    assert listed[0]["probability"] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)
    assert "a text with <|mask|>" in lone_refusal(capsys, "predict", run, "--text", "no mask")
    assert "a task whose model writes text" in lone_refusal(capsys, "generate", run, "--prompt", "a")


@pytest.mark.slow
@pytest.mark.parametrize("unit", [(), OWNER], ids=["record", "owner"])
def test_a_private_adapter_loads_with_peft(
    unit: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModel

    answer = simulated(tmp_path, *RECORD, *unit, *FFA)
    assert answer["epsilon"] > 0
    run = tmp_path / "run"
    done = found(capsys, "export", str(run), str(tmp_path / "adapter"))
    assert done["form"] == "adapter"
    found(capsys, "export", str(run), str(tmp_path / "merged"), "--merge")
    tokens = torch.randint(0, 255, (2, 20))
    models = [load_saved(run / "final")[0], AutoPeftModel.from_pretrained(tmp_path / "adapter")]
    merged = AUTO.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        for each in models:
            torch.testing.assert_close(
                each.eval()(input_ids=tokens).logits, merged(input_ids=tokens).logits, rtol=1e-5, atol=1e-6
            )
    card = (tmp_path / "merged" / "README.md").read_text()
    for words in ("pipeline_tag: fill-mask", "masked language model", "AutoModelForMaskedLM"):
        assert words in card


@pytest.mark.slow
def test_the_shipped_plan_learns_from_the_manual(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smaller model and fewer steps of it."""
    settings = (
        "model.config.hidden_size=16",
        "model.config.intermediate_size=32",
        "model.config.num_hidden_layers=1",
        "run.rounds=1",
        "local.steps=12",
        "local.warmup_steps=0",
        "local.learning_rate=1e-2",
        "server.evaluation_sequences=20",
    )
    out = str(tmp_path / "run")
    answer = found(capsys, "simulate", "masked", *set_options(settings), "--out", out, "--workers", "1")
    assert answer["final_loss"] < answer["initial_loss"]
