"""Reasons for which a plan is refused: each is counted once, and there are not more than a reader can know.

A reason is the `expected` of a `Refusal`, a `PlanError` or a `ParameterError`, an entry of a table of refusals, or the
`why` of a tag (`Only`). Not counted are a field's own type and limits, a number that the accountant cannot reach, a
file that cannot be read, and what one site decides: its configuration, its policy, its devices.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from cloister.protocol.errors import PlanError
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.settings import Because, Only, Section
from cloister.protocol.plan.soundness import parse
from cloister.protocol.plan.template import to_toml
from cloister.tests.pages.plan_page import to_page

MOST = 54
TREE = Path(soundness.__file__).resolve().parents[2]
FOLDERS = ("protocol", "privacy", "lm", "aggregation", "clients", "server", "simulations", "cli")
OF_ONE_SITE = ("clients/consent", "clients/setup")
OF_CALLERS = (
    "an existing TOML file, or a shipped plan",
    "a cloister.Plan",
    "a plan with a question",
    "a plan with a [question]",
    "none: a question trains nothing",
    "a table [data] with the classes",
    "0 or more",
    "2 to {LARGEST}",
    "2 to {min(sites, LARGEST)}",
    "at most {self.sum_layout.ring.terms}",
)
"""How the reasons begin for which no plan is refused, but its file, or what a function is called with."""


def nodes() -> Iterator[ast.AST]:
    for folder in FOLDERS:
        for path in sorted((TREE / folder).rglob("*.py")):
            place = str(path.relative_to(TREE))
            if not place.startswith(OF_ONE_SITE):
                yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def reason_of(node: ast.AST) -> str:
    """The reason that a node of the source states; empty: none, or one that is stated elsewhere."""
    match node:
        case ast.Call(func=ast.Name(id="PlanError" | "ParameterError")):
            found = next(each.value for each in node.keywords if each.arg == "expected")
        case ast.Call(func=ast.Name(id="Refusal"), args=[_, found, _, ast.Constant() | ast.Attribute(), *_]):
            pass
        case ast.Tuple(elts=[*others, found, ast.Constant(value=because)]) if because in get_args(
            Because
        ) and not all(isinstance(each, ast.Constant) for each in others):
            pass
        case _:
            return ""
    said = ast.unparse(found)
    elsewhere = said.endswith(".expected") or said.removeprefix("f").strip("'\"").startswith(OF_CALLERS)
    return "" if elsewhere else said


def tags(section: type[Section] = Plan) -> Iterator[Only]:
    for field in section.model_fields.values():
        yield from (each for each in field.metadata if isinstance(each, Only))
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from tags(kind)


def reasons() -> set[str]:
    return {reason_of(node) for node in nodes()} - {""} | {tag.why for tag in tags()} - {""}


def test_a_plan_is_refused_for_few_reasons() -> None:
    found = reasons()
    assert len(found) <= MOST, "\n".join(sorted(found))


def test_a_tag_of_a_charge_or_a_mask_says_why() -> None:
    assert all(tag.why for tag in tags() if tag.because != "definition")


PRIVATE = ["aggregation.weighting=uniform", "server.evaluation=none", "privacy.noise_multiplier=1.0"]


@pytest.mark.parametrize(
    ("file", "override", "field"),
    [
        (
            [*PRIVATE, "privacy.unit=site", "privacy.delta=1e-6"],
            ["privacy.unit=none"],
            "privacy.noise_multiplier",
        ),
        (
            [*PRIVATE, "privacy.unit=site", "simulation.ledger=/ledger", "simulation.dataset=mine"],
            ["simulation.ledger=''"],
            "simulation.dataset",
        ),
        (["simulation.per_site=true"], [*PRIVATE, "privacy.unit=site"], "simulation.per_site"),
        (
            ["local.balance=dynamic", "server.evaluation=none"],
            [*PRIVATE, "privacy.unit=record", "privacy.sampling_rate=0.1"],
            "local.balance",
        ),
    ],
)
def test_an_override_drops_nothing_that_names_a_charge_or_a_mask(
    file: list[str], override: list[str], field: str
) -> None:
    text = to_toml(parse("", file), comments=False)
    with pytest.raises(PlanError) as refused:
        parse(text, override)
    assert refused.value.field == field


def test_an_override_drops_the_public_records_and_the_compression_that_it_leaves_without_effect() -> None:
    file = ["server.evaluation=simulation:public", "simulation.public=0.1"]
    file += ["aggregation.ring_bits=8", "aggregation.compression={}"]
    override = ["server.evaluation=none", "aggregation.ring_bits=32"]
    assert parse(to_toml(parse("", file), comments=False), override) == parse("", override)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("simulation.alpha=0.1", "simulation.alpha"),
        ("aggregation.ring_bits=8", "aggregation.ring_bits"),
        ("aggregation.compression={}", "aggregation.compression"),
        ("simulation.public=0.1", "simulation.public"),
        ("server.evaluation=simulation:public", "simulation.public"),
        ("simulation.dataset=mine", "simulation.dataset"),
        ("simulation.ledger=ledger.sqlite", "simulation.ledger"),
        ("data.task=classify", "data.classes"),
        ("faults.poison={share=0.1,kind='label-flip'}", "faults.poison.kind"),
    ],
)
def test_a_field_without_effect_or_without_the_other_is_refused(override: str, field: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse("", [override])
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


def test_a_section_says_with_which_fields_it_is_valid() -> None:
    for text in (to_page(), to_toml(Plan(), comments=True)):
        assert (
            "Let the clipping norm follow a quantile of the update norms. Only with `privacy.unit"
            in " ".join(text.replace("\n# ", " ").split())
        )
