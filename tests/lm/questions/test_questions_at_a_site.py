"""What a question makes of a site's records: each unit's vector follows from that unit alone."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from cloister.lm.data.prepare import Preparation, UnitRule, prepare, unit_rule
from cloister.lm.model import writes
from cloister.lm.model.model import LanguageModel, load_model, outline, save_pretrained
from cloister.lm.questions import evaluate as evaluate_module
from cloister.lm.questions import vocabulary as vocabulary_module
from cloister.lm.questions.public import public_totals
from cloister.lm.questions.question import Held
from cloister.lm.questions.registry import asked_by
from cloister.lm.tasks.registry import tokenizer_of
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.tokenizer import train_tokenizer
from cloister.protocol.errors import DataError, ModelError
from cloister.protocol.plan.soundness import Plan
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.vectors import Vectors
from cloister.tests.tools.raises import raises

PRIVATE = 'unit = "record"\nnoise_multiplier = 5.0\n'
OWNERS = 'unit = "owner"\nnoise_multiplier = 5.0\n[data]\nowner = "patient"\n'
HISTOGRAM = 'kind = "histogram"\nfield = "ward"\nvalues = ["a", "7"]\n'
RANGES = 'kind = "histogram"\nfield = "age"\nedges = [0, 18, 65.5]\n'
DATES = 'kind = "histogram"\nfield = "day"\nedges = ["2024-01-01", "2025-01-01"]\n'
LENGTHS = 'kind = "histogram"\nfield = "note"\nmeasure = "characters"\nedges = [1, 10]\n'
TOKENS = LENGTHS.replace("characters", "tokens")
MEAN = 'kind = "mean"\nfield = "age"\nrange = [0, 100]\n'


def question(text: str, privacy: str = PRIVATE) -> Plan:
    return Plan.parse(f"[question]\n{text}[privacy]\n{privacy}")


def held(records: list[Any], prepared: Callable[[], Any] = lambda: None) -> Held:
    def read(unusable: Unusable) -> Iterator[Record]:
        yield from records

    return Held(read, prepared, torch.device("cpu"))


def vectors(plan: Plan, records: list[Any]) -> Vectors:
    made = list(asked_by(plan)(plan, held(records), ()))
    return np.concatenate(made) if made else np.empty((0, kind_of(plan).count(plan)))


@pytest.mark.parametrize(
    ("text", "field", "values", "at"),
    [
        (HISTOGRAM, "ward", ["a", "7", 7, "b", None, True, 7.0, ["a"], 10**400], [0, 1, 1, 2, 2, 2, 2, 2, 2]),
        (
            RANGES,
            "age",
            [-1, 0, 17.9, 18, 65.5, 90, "30", "x", None, math.nan],
            [0, 1, 1, 2, 3, 3, 2, 4, 4, 4],
        ),
        (DATES, "day", ["2023-12-31", "2024-01-01", "2025-05-05", 2024, None], [0, 1, 2, 3, 3]),
        (LENGTHS, "note", ["", "x", "x" * 10, 5, None], [0, 1, 2, 3, 3]),
    ],
)
def test_each_record_is_in_one_cell(text: str, field: str, values: list[Any], at: list[int]) -> None:
    plan = question(text)
    made = vectors(plan, [*({field: value} for value in values), {}])
    assert (made.sum(axis=1) == 1).all()
    assert made.argmax(axis=1).tolist() == [*at, kind_of(plan).count(plan) - 1]


def test_tokens_of_the_plan_are_counted(tmp_path: Path) -> None:
    """Of a trained tokenizer they are fewer than the bytes; sites with another one are told apart."""
    texts = ["a few words", "a few words and a few", "", 5, None]
    train_tokenizer(["a few words and a few words"] * 9, "bpe", 270).save_pretrained(tmp_path / "own")
    found = {}
    for name in ("auto", str(tmp_path / "own")):
        changes = {"model.tokenizer": name, "question.measure": "tokens", "question.edges": [1, 8, 18]}
        plan = Plan.parse(f"[question]\n{LENGTHS}[privacy]\n{PRIVATE}", changes)
        found[name] = vectors(plan, [{"note": text} for text in texts]).argmax(axis=1).tolist()
        assert found[name][2:] == [0, 4, 4]
        assert load_model(plan).layout.source
    assert found["auto"][:2] == [2, 3]
    assert max(found[str(tmp_path / "own")][:2]) < 3
    assert load_model(plan).layout.source != load_model(question(LENGTHS)).layout.source


def test_numbers_are_cut_and_scaled() -> None:
    made = vectors(question(MEAN), [{"age": age} for age in (0, 50, 100, 1e9, -5, "75", None)])
    y = np.array([-1, 0, 1, 1, -1, 0.5])
    assert np.allclose(made[:-1], np.stack([np.ones(6), y, y * y], axis=1))
    assert not made[-1].any()
    assert (np.linalg.norm(made, axis=1) <= kind_of(question(MEAN)).bound(question(MEAN)) * (1 + 1e-15)).all()


def test_an_owner_counts_once_however_many_records_it_has() -> None:
    plan = question(HISTOGRAM, OWNERS)
    records = [{"ward": "a", "patient": 1}] * 30 + [{"ward": "7", "patient": "1"}] * 10
    records += [{"ward": "b", "patient": 2}, {"ward": "a"}, {"ward": "a", "patient": None}]
    made = vectors(plan, records)
    assert np.allclose(np.sort(made, axis=0), np.sort([[0.75, 0.25, 0], [0, 0, 1]], axis=0))


@pytest.mark.parametrize("text", [RANGES, MEAN, HISTOGRAM, LENGTHS, TOKENS])
def test_no_record_raises(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its site would drop out, and tell that the record is there."""
    odd = [
        "42\x1f",
        "\x1c7",
        "1e999",
        "-1e-400",
        "\ud800",
        10**5000,
        -(10**400),
        1e308,
        math.inf,
        [],
        {},
        b"7",
        5e-324,
    ]
    for value in odd:
        vectors(question(text), [{"age": value, "ward": value, "note": value}] * 2)

    def fails(*_: Any) -> None:
        raise ArithmeticError("of this record")

    monkeypatch.setattr("cloister.lm.questions.tabular._measure", lambda _plan: fails)
    made = vectors(question(text), [{"age": 1}])
    assert made.tolist() == ([[0, 0, 0]] if text == MEAN else [[*[0] * (made.shape[1] - 1), 1]])


CLASSIFY = """[question]
kind = "evaluate"
{}
[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[data]
{}
sequence_length = 16
held_out = 0.5
{}
[privacy]
unit = "{}"
noise_multiplier = 5.0
"""
CLASSES = 'task = "classify"\nclasses = ["calm", "ill"]\n'


def evaluated(
    figures: str, data: str, unit: str, records: list[Record], changes: dict[str, Any] | None = None
) -> tuple[Plan, Vectors]:
    owner = 'owner = "patient"' if unit == "owner" else ""
    plan = Plan.parse(CLASSIFY.format(f"figures = {figures}", data, owner, unit), changes or {})
    model = load_model(plan)
    rule = unit_rule(plan.data, plan.privacy)
    prepared = prepare(records, model.about[0].tokenizer, plan.data, seed=0, units=rule, refuse=False)
    made = asked_by(plan)(plan, held(records, lambda: prepared), model.about)
    return plan, np.concatenate(list(made))


def notes(count: int) -> list[Record]:
    return [
        {"text": f"bed {bed} {'fever' * (bed % 3)}", "label": ("calm", "ill")[bed % 2], "patient": bed // 3}
        for bed in range(count)
    ]


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_what_is_told_of_a_unit_does_not_depend_on_the_others(unit: str) -> None:
    """To the last bit, and in the share of held-out units that is left."""
    _, few = evaluated('["confusion", "loss"]', CLASSES, unit, notes(30))
    _, many = evaluated('["confusion", "loss"]', CLASSES, unit, notes(60))
    rows = {row.tobytes() for row in many}
    assert len(few) > 3
    assert all(row.tobytes() in rows for row in few)
    assert len(many) > len(few)


def test_what_a_model_keeps_of_a_unit_reaches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a buffer that only long rows write to, or in a tensor among its attributes."""
    construct: Any = LlamaMLP.__init__
    forward: Any = LlamaMLP.forward

    def constructed(self: Any, *arguments: Any, **settings: Any) -> None:
        construct(self, *arguments, **settings)
        self.register_buffer("seen", torch.zeros(()))
        self.total = torch.zeros(())

    def keeping(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = forward(self, x) * (1 + self.seen + self.total)
        if x.shape[1] > 4 and not x.is_meta:
            self.seen += x.detach().mean().abs() * 1e3
            self.total += x.detach().mean().abs() * 1e3
        return made

    monkeypatch.setattr(LlamaMLP, "__init__", constructed)
    monkeypatch.setattr(LlamaMLP, "forward", keeping)
    monkeypatch.setattr(writes, "_KNOWN", {})
    _, few = evaluated('["confusion", "loss"]', CLASSES, "record", notes(30))
    _, many = evaluated('["confusion", "loss"]', CLASSES, "record", notes(60))
    rows = {row.tobytes() for row in many}
    assert len(few) > 3
    assert all(row.tobytes() in rows for row in few)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"data.held_out": 0.4}, False),
        ({"run.seed": 1}, False),
        ({"privacy.unit": "site"}, False),
    ],
)
def test_what_a_run_has_held_out_is_what_a_question_evaluates(
    change: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    """Records are prepared in the same way, where data, seed and unit are the same."""
    file = tmp_path / "notes.jsonl"
    file.write_text("".join(json.dumps(note) + "\n" for note in notes(40)))
    asks = CLASSIFY.format('figures = ["accuracy"]', CLASSES, "", "record")
    trains = {
        "aggregation.weighting": "uniform",
        "server.evaluation": "none",
        "privacy.sampling_rate": None if change.get("privacy.unit") else 0.1,
        "local.steps": 2,
    }
    asked, trained = Plan.parse(asks), Plan.parse(asks[asks.index("[model") :], trains | change)
    tokenizer = tokenizer_of(asked)
    keys, rows = [], []
    for plan in (asked, trained):
        preparation = Preparation(plan, tokenizer, str(file), "train", tmp_path)
        keys.append(preparation.key())
        rows.append(preparation.make().held_out.tokens.tobytes())
    assert (keys[0] == keys[1]) is same
    assert (rows[0] == rows[1]) is same


def test_an_evaluation_is_that_of_the_sums() -> None:
    """A causal model: the shares of right labels, weighted as labels, are the accuracy."""
    plan, made = evaluated('["accuracy", "loss"]', "", "record", notes(20))
    assert np.allclose(made[:, 0] + made[:, 1], 1)
    assert ((made >= 0) & (made <= 1)).all()
    assert (np.linalg.norm(made, axis=1) <= kind_of(plan).bound(plan)).all()
    assert np.allclose(made[:, 2] * 10, math.log(264), atol=1.0)  # of an untrained model, nats per byte


def test_a_site_is_the_mean_over_the_labels_of_its_held_out_records() -> None:
    """One without records is zeros."""
    plan, made = evaluated('["accuracy", "loss"]', CLASSES, "site", notes(40))
    assert made.shape == (1, 3)
    assert made[0, 0] + made[0, 1] == pytest.approx(1)
    _, none = evaluated('["accuracy", "loss"]', CLASSES, "site", [])
    assert not none.any()
    assert (np.linalg.norm(made, axis=1) <= kind_of(plan).bound(plan)).all()


def test_a_row_on_which_the_model_fails_leaves_the_others_of_its_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, whole = evaluated('["confusion"]', CLASSES, "site", notes(40))
    row, calls = evaluate_module._Scorer.row, itertools.count()

    def fails(self: Any, sequences: Any, at: int) -> Any:
        if next(calls) == 1:
            raise IndexError("index out of range")
        return row(self, sequences, at)

    monkeypatch.setattr(evaluate_module._Scorer, "row", fails)
    _, rest = evaluated('["confusion"]', CLASSES, "site", notes(40))
    assert rest.sum() == pytest.approx(1)
    assert not np.array_equal(rest, whole)


def test_a_site_counts_only_so_many_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.lm.questions.vocabulary._MOST_KNOWN", 4)
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [f"fever pain {first}{second}" for first in letters for second in letters]
    (unit,) = question_words(texts)
    assert unit == {b"fever", b" pain"}


def test_a_unit_on_which_the_model_fails_counts_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise IndexError("index out of range")

    monkeypatch.setattr("cloister.lm.questions.evaluate.Forward.__call__", fails)
    _, made = evaluated('["accuracy"]', CLASSES, "record", notes(20))
    assert len(made)
    assert not made.any()


def saved(folder: Path, seed: int, data: str = CLASSES) -> str:
    """Another model for the plans of this file."""
    plan = Plan.parse(CLASSIFY.format("", data, "", "record"), {"run.seed": seed})
    (model,) = load_model(plan).about
    save_pretrained(model, model.layout.flatten(model.module), folder)
    return str(folder)


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_several_models_are_asked_about_the_same_units(unit: str, tmp_path: Path) -> None:
    """Each has the cells that it would have alone, and a comparison is the difference by unit."""
    names = [saved(tmp_path / str(seed), seed) for seed in (3, 4)]
    base = {"model.name": names[0], "model.config": {}}
    both = base | {"question.others": [names[1]]}
    plan, two = evaluated('["accuracy", "loss"]', CLASSES, unit, notes(60), both)
    _, one = evaluated('["accuracy", "loss"]', CLASSES, unit, notes(60), base)
    _, other = evaluated('["accuracy", "loss"]', CLASSES, unit, notes(60), base | {"model.name": names[1]})
    assert np.array_equal(two, np.concatenate([one, other], axis=1))
    assert not np.array_equal(one, other)
    assert kind_of(plan).cells(plan)[3] == f"right of {names[1]}"
    assert kind_of(plan).bound(plan) == 2.0
    plan, compared = evaluated(
        '["accuracy", "loss"]', CLASSES, unit, notes(60), both | {"question.kind": "compare"}
    )
    assert np.allclose(compared[:, 0] - compared[:, 1], one[:, 0] - other[:, 0])
    assert np.allclose(compared[:, :3].sum(axis=1), 1)
    assert np.allclose(compared[:, 3], one[:, 2] - other[:, 2])
    assert (np.linalg.norm(compared, axis=1) <= kind_of(plan).bound(plan)).all()


def test_models_with_other_tokens_are_not_compared(tmp_path: Path) -> None:
    name, other = saved(tmp_path / "one", 3), saved(tmp_path / "two", 4)
    train_tokenizer(["a few words"], "bpe", 260).save_pretrained(other)
    changes = {"model.name": name, "model.config": {}, "question.others": [other], "question.kind": "compare"}
    with raises(ModelError, "question.others"):
        evaluated('["accuracy"]', CLASSES, "record", notes(20), changes)


@pytest.mark.parametrize("load", [load_model, outline])
@pytest.mark.parametrize("field", ["model.name", "question.others"])
def test_a_model_that_lacks_the_head_is_refused(
    load: Callable[[Plan], LanguageModel], field: str, tmp_path: Path
) -> None:
    """Its head would be new and random: the figures would tell nothing of the model, and cost epsilon."""
    headed, bare = saved(tmp_path / "headed", 3), saved(tmp_path / "bare", 3, "")
    name, others = (bare, []) if field == "model.name" else (headed, [bare])
    changes = {"model.name": name, "model.config": {}, "question.others": others}
    plan = Plan.parse(CLASSIFY.format('figures = ["accuracy"]', CLASSES, "", "record"), changes)
    with raises(ModelError, field):
        load(plan)


def question_words(texts: list[str]) -> list[set[bytes]]:
    """The words of a site that count, two at most."""
    plan = Plan.parse(
        '[question]\nkind = "vocabulary"\nfield = "text"\nwords = 2\n[privacy]\nunit = "site"\n'
        "noise_multiplier = 5.0\n"
    )
    return list(vocabulary_module._units(plan, held([{"text": text} for text in texts])))


ENTITIES = 'task = "token-classify"\nclasses = ["drug", "name"]\n'


def tagged(count: int) -> list[Record]:
    """Texts with 1 to 4 entities."""
    records: list[Record] = []
    for number in range(count):
        words = [f"w{number}"] + ["aspirin"] * (1 + number % 4)
        text = " ".join(words)
        starts = [len(" ".join(words[:at])) + 1 for at in range(1, len(words))]
        spans = [{"start": start, "end": start + 7, "label": "drug"} for start in starts]
        records.append({"text": text, "spans": spans, "patient": number // 3})
    return records


@pytest.mark.parametrize("unit", ["record", "owner"])
@pytest.mark.parametrize("most", [1, 64])
def test_entities_of_a_unit_are_counted_and_cut(unit: str, most: int) -> None:
    """As an evaluation counts them, where they are few; of more all count less, and what is lost is told."""
    changes = {"question.most_entities": most, "data.sequence_length": 64}
    plan, made = evaluated('["entities"]', ENTITIES, unit, tagged(60), changes)
    kind = kind_of(plan)
    assert (made <= 1).all()
    assert (np.linalg.norm(made, axis=1) <= kind.bound(plan)).all()
    true = made[:, 2] * most + made[:, 3] * most
    if most == 64:
        assert not made[:, 3].any()
        assert set(np.round(true)) <= set(range(1, 13))
        assert (true == np.round(true)).all()
        figures = {each.name: each.value for each in kind.figures(plan, made.sum(axis=0), 1e-9)}
        right, given, wanted, _ = made.sum(axis=0)
        assert figures["entity F1"] == pytest.approx(2 * right / (given + wanted))
        assert figures["entities not counted"] == 0.0
    else:
        assert made[:, 1:3].max() == 1.0
        assert made[:, 3].max() > 0


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_public_records_are_all_evaluated_each_as_a_unit(unit: str, tmp_path: Path) -> None:
    """With the figures that the sites' sum would have of them; none needs an owner."""
    public = tmp_path / "public.jsonl"
    records = [{key: note[key] for key in ("text", "label")} for note in notes(30)]
    public.write_text("".join(json.dumps(record) + "\n" for record in records))
    plan, _ = evaluated('["confusion", "loss"]', CLASSES, unit, notes(10))
    model = load_model(plan)
    totals = public_totals(plan, model, str(public))
    assert totals[:4].sum() == pytest.approx(30)
    whole = plan.model_copy(update={"data": plan.data.model_copy(update={"held_out": 1.0, "owner": ""})})
    prepared = prepare(records, model.about[0].tokenizer, whole.data, seed=0, units=UnitRule("record", 1))
    made = asked_by(plan)(plan, held(records, lambda: prepared), model.about)
    assert np.allclose(totals, np.concatenate(list(made)).sum(axis=0))
    public.write_text(json.dumps({"text": "bed 1", "label": "none of the classes"}) + "\n")
    with raises(DataError, "server.evaluation"):
        public_totals(plan, model, str(public))
