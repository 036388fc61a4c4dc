"""Records that a program gives: how the plan names them, and that none of a site is public."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import cloister
from cloister.lm.tasks.causal import Causal
from cloister.lm.text.corpus import given_records
from cloister.protocol.errors import DataError, PackageError, PlanError
from cloister.protocol.plan.soundness import parse
from cloister.simulations.given import Given, check_apart
from cloister.simulations.run import simulate
from cloister.tests.tools.raises import raises

PRIVATE = {
    "data.held_out": 0.0,
    "aggregation.weighting": "uniform",
    "aggregation.colluders": 0.25,
    "privacy.unit": "record",
    "privacy.noise_multiplier": 50.0,
    "privacy.sampling_rate": 0.01,
    "privacy.delta": 1e-6,
    "server.evaluation": "none",
    "public.source": "builtin:python-docs",
    "public.steps": 3,
}
PROMPT = {"data.format": "prompt"}
CHAT = {"data.format": "messages"}
CLASSES = {"data.task": "classify", "data.classes": ["a", "b"]}
SPANS = {"data.task": "token-classify", "data.classes": ["n"], "model.name": "builtin:bert"}
PREFER = PROMPT | {"data.task": "prefer", "model.adapter.scheme": "lora", "model.adapter.rank": 2}


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    return {
        "messages": [
            {"role": role, "content": turn, **more} for role, turn in zip(roles, turns, strict=False)
        ]
    }


def given(
    settings: dict[str, Any], private: dict[str, Any], public: dict[str, Any]
) -> tuple[Given, list[Any]]:
    sites = {name: [private] * 3 for name in "abcd"}
    return Given.of(parse("").changed(PRIVATE | settings), sites, public=[public]), [private] * 12


def longer(value: Any) -> Any:
    """A record with other texts."""
    if isinstance(value, dict):
        texts = ("text", "prompt", "messages", "content")
        return {name: longer(each) if name in texts else each for name, each in value.items()}
    return [longer(each) for each in value] if isinstance(value, list) else f"{value} not"


EQUAL: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"text": "is ill"}, {"text": "is ill", "more": 1}),
    ({}, {"text": "is ill"}, {"text": " is\nill"}),
    (PROMPT, {"prompt": "ab", "completion": "c"}, {"prompt": "a", "completion": "bc"}),
    (CHAT, chat("Who?", "Me."), chat("Who?", "Me.", number=1)),
    (CLASSES, {"text": "x y", "label": "a"}, {"text": "x y", "label": "b"}),
    (SPANS, {"text": ["is", "ill"], "spans": ["O", "O"]}, {"text": "is ill", "spans": []}),
    (
        PREFER,
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "d"},
    ),
    (PREFER, {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}),
]


@pytest.mark.parametrize(("settings", "private", "public"), EQUAL)
def test_a_record_of_a_site_is_not_public_in_another_form(
    settings: dict[str, Any], private: dict[str, Any], public: dict[str, Any]
) -> None:
    found, theirs = given(settings, private, public)
    with raises(DataError, "public.source"):
        check_apart(found.plan, found, theirs)


@pytest.mark.parametrize(("settings", "private", "public"), EQUAL)
def test_another_record_is(settings: dict[str, Any], private: dict[str, Any], public: dict[str, Any]) -> None:
    found, theirs = given(settings, private, longer(public))
    check_apart(found.plan, found, theirs)
    found, theirs = given(settings, {"without": "a field"}, {"without": "a field"})
    check_apart(found.plan, found, theirs)


def test_the_name_of_the_records_of_sites_is_no_function_of_them() -> None:
    """It is in the report and in the plan: a hash would tell who knows all records but one which that one is."""
    names = [given({}, {"text": "is ill"}, {"text": "z"})[0].plan.simulation.source for _ in range(3)]
    assert len(set(names)) == 3
    assert all(name.startswith("given:") and len(name) == len(names[0]) for name in names)


OWNERS = PRIVATE | {"privacy.unit": "owner", "data.owner": "who", "privacy.records": 2}


@pytest.mark.parametrize(("settings", "field"), [(OWNERS, "who"), (CLASSES, "label")])
@pytest.mark.parametrize("more", [{}, {"who": 40.5, "label": 2.5}])
def test_a_table_whose_owners_or_labels_are_fractional_is_refused(
    settings: dict[str, Any], field: str, more: dict[str, Any]
) -> None:
    """One record without an owner makes those of all others unusable: the site would train on nothing."""
    rows = [{"text": f"note {number}", "who": number, "label": number % 2} for number in range(9)]
    plan = parse("").changed(PRIVATE | settings)
    for records in (rows, [*rows, {"text": "x", **more}]):
        for table in (pd.DataFrame(records), pd.DataFrame(records, dtype=object)):
            fractional = any(isinstance(value, float) and value == value for value in table[field])
            sites = {"a": table, "b": rows, "c": rows, "d": rows}
            if fractional:
                with raises(DataError, f"sites['a'], column {field}"):
                    Given.of(plan, sites)
            else:
                assert [dict(each) for each in Given.of(plan, sites).sites["a"]][: len(rows)] == rows
        assert [*Given.of(plan, dict.fromkeys("abcd", records)).sites["a"]] == records


def test_no_row_of_a_data_frame_changes_another() -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "n": 1, "more": [1]},
        {"text": "b", "n": "two", "more": {"x": None}},
    ]
    frame = pd.DataFrame([*rows, {"text": None, "n": 2.5, "more": np.arange(2)}], dtype=object)
    read = [dict(each) for each in given_records(frame, "sites")]
    assert read == [*rows, {"text": None, "n": 2.5, "more": [0, 1]}]
    missing = pd.DataFrame(
        {"i": pd.array([1, None], dtype="Int64"), "s": pd.array(["p", None], dtype="string")}
    )
    assert [dict(each) for each in given_records(missing, "sites")] == [
        {"i": 1, "s": "p"},
        {"i": None, "s": None},
    ]


def test_a_plan_is_no_path() -> None:
    plan: Any = "plan.toml"
    with raises(PlanError, "plan", says="Plan.load"):
        simulate(plan)


def test_a_class_is_refused_beside_a_mesh() -> None:
    plan = parse("").changed({"simulation.profiles": [{"share": 1.0, "mesh": {"replicate": 2}}]})
    with raises(PackageError, "task", says="mesh"):
        simulate(plan, task=Causal)


class Counted(Causal):
    """Its counters are counted as they should be."""

    def counters(self) -> tuple[str, ...]:
        return ("rows", "learned")

    def count(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        return torch.tensor([len(targets), int((targets >= 0).sum())])


class TooMany(Counted):
    def counters(self) -> tuple[str, ...]:
        return ("rows",)


class Fractions(Counted):
    def count(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        return torch.tensor([0.5, 1.0])


class Batches(Counted):
    def count(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        return torch.tensor([1, 0])


def test_the_check_of_a_task_counts() -> None:
    notes = [{"text": text} for text in ("no pain", "a rash on both arms", "a fall")]
    cloister.testing.check_per_unit_gradients(Counted, notes)
    for wrong in (TooMany, Fractions):
        with raises(DataError, "data.task", says="counters"):
            cloister.testing.check_per_unit_gradients(wrong, notes)
    with pytest.raises(AssertionError, match="counters"):
        cloister.testing.check_per_unit_gradients(Batches, notes)
