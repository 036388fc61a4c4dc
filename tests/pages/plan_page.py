"""The page `docs/plan.md`: every field of a plan with its meaning, and which features of a plan go together.

`python -m cloister.tests.pages.plan_page` prints it; tests compare it with the page of the release. The fields are
read from the sections of `protocol/plan/plan.py`. The features are put two by two into one plan that is sound with
either alone, and the checks of the plan judge it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cloister.protocol.errors import PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.settings import Because, InWords, Settings
from cloister.protocol.plan.soundness import refusals
from cloister.protocol.plan.template import filled, inner_of, meaning, told, toml_value

_HEAD = """# The fields of a plan

A plan is one TOML file with the sections below. `cloister plan new` prints one with every field and its meaning;
`cloister plan check` prints how a plan will run. Unknown fields, wrong types and combinations that contradict each
other are refused, with the fix. A section or field that is left out has its default; "not set" is a field without a
value. An override (`--set`) drops the fields of the file that it leaves without effect. Fields that protect, or
that name a charge or a mask, are refused instead, and the error says what to change. They are those of `[privacy]`,
`data.owner`, the ledger over runs and the bound of the gate, and values that no unit allows.

This page is made from `protocol/plan/plan.py` by `make docs`.
"""
_KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
_LIMITS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
}


_PRIVATE = {
    "server.evaluation": "none",
    "aggregation.weighting": "uniform",
    "privacy.noise_multiplier": "1.0",
}
_OF_SITES = {**_PRIVATE, "privacy.unit": "site"}


@dataclass(frozen=True)
class Feature:
    """What sets a feature, and what a plan needs to be sound with it; each by field, as `--set` takes it."""

    name: str
    sets: Mapping[str, str]
    needs: Mapping[str, str]


FEATURES: tuple[Feature, ...] = (
    Feature("secure sum", {"aggregation.secure": "true"}, {}),
    Feature("unit record", {"privacy.unit": "record"}, {**_PRIVATE, "privacy.sampling_rate": "0.1"}),
    Feature("unit site", {"privacy.unit": "site"}, _OF_SITES),
    Feature("adaptive clipping", {"privacy.adaptive": "{}"}, _OF_SITES),
    Feature(
        "correlated noise",
        {"privacy.correlated": "{separation = 4, participations = 3}"},
        {
            **_OF_SITES,
            "privacy.trusted_coordinator": "true",
            "cohort.sites": "16",
            "cohort.fraction": "0.25",
            "aggregation.colluders": "0.0",
            "aggregation.dropouts": "0.0",
        },
    ),
    Feature(
        "asynchronous rounds",
        {"cohort.mode": "async"},
        {"aggregation.secure": "false", "server.evaluation": "none"},
    ),
    Feature("groups", {"aggregation.groups": "3"}, {"cohort.sites": "24", "aggregation.colluders": "0.0"}),
    Feature("compression", {"aggregation.compression": "{}"}, {"aggregation.ring_bits": "16"}),
    Feature("norm bound", {"aggregation.norm_bound": "1.0"}, {"aggregation.secure": "false"}),
    Feature("rolora", {"model.adapter.scheme": "rolora"}, {}),
    Feature("sparse rounds", {"aggregation.part": "0.5"}, {}),
    Feature("ffa-lora", {"model.adapter.scheme": "ffa-lora"}, {}),
    Feature("balance by declared speed", {"local.balance": "weighted"}, {}),
    Feature("balance by measured speed", {"local.balance": "dynamic"}, {}),
    Feature("proximal term", {"local.proximal": "0.1"}, {}),
    Feature("Muon", {"local.optimizer": "muon"}, {}),
    Feature("SGD", {"local.optimizer": "sgd"}, {}),
    Feature("kept moments", {"local.optimizer_state": "keep"}, {}),
    Feature("weights by tokens", {"aggregation.weighting": "tokens"}, {}),
    Feature("classification", {"data.task": "classify"}, {"data.classes": '["a", "b"]'}),
    Feature("prompts", {"data.format": "prompt"}, {}),
    Feature("sequence to sequence", {"data.task": "sequence-to-sequence"}, {"data.format": "prompt"}),
    Feature(
        "preferences", {"data.task": "prefer"}, {"data.format": "prompt", "model.adapter.scheme": "ffa-lora"}
    ),
    Feature("NF4 base", {"model.adapter.base_precision": "nf4"}, {"model.adapter.scheme": "ffa-lora"}),
    Feature("evaluation at sites", {"server.evaluation": '"sites"'}, {}),
    Feature("Adam at the server", {"server.optimizer": "adam"}, {}),
    Feature("gate by loss", {"server.gate.loss": "0.1"}, {"server.evaluation": "public.jsonl"}),
    Feature("declared noise seed", {"simulation.noise_seed": "1"}, {}),
)


@dataclass(frozen=True)
class Pair:
    """Two features, and why they are refused."""

    one: str
    other: str
    because: Because | None
    """None: they go together."""


def pairs() -> Iterator[Pair]:
    """Each two features that are not values of one field, as the checks judge a plan with both."""
    for one, other in combinations(FEATURES, 2):
        if any(other.sets.get(field, value) != value for field, value in one.sets.items()):
            continue
        found = next(refusals(plan_of(one, other)), None)
        yield Pair(one.name, other.name, found.because if found else None)


def plan_of(*features: Feature) -> Plan:
    """The plan with some features, which is not checked as a whole."""
    settings = {key: value for feature in features for key, value in feature.needs.items()}
    settings |= {key: value for feature in features for key, value in feature.sets.items()}
    reader = Settings(Plan, "plan", PlanError)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return reader.from_json(reader.to_json("run.rounds = 12", overrides, origin="features"))


def to_table() -> str:
    """The pairs as Markdown."""
    found = list(pairs())
    refused = [pair for pair in found if pair.because]
    lines = [
        f"Of {len(found)} pairs of the features below, {len(found) - len(refused)} may be in one plan. The others are",
        "refused for one of three reasons. `charge`: something would be released that no charge covers. `mask`: the",
        "secure sum would not hide a vector. `definition`: one contradicts what the other means.",
        "",
        "| feature | refused beside |",
        "|---|---|",
    ]
    for feature in FEATURES:
        beside = [
            f"{pair.other if pair.one == feature.name else pair.one} (`{pair.because}`)"
            for pair in refused
            if feature.name in (pair.one, pair.other)
        ]
        lines.append(f"| {feature.name} | {', '.join(beside) or 'none'} |")
    return "\n".join(lines) + "\n"


def to_page() -> str:
    """The page of all fields, as Markdown."""
    parts = [_HEAD]
    for path, section, holder in _sections(Plan, ()):
        parts.append(f"## `[{'.'.join(path)}]`\n\n{filled(meaning(section, holder))}\n")
        schema = section.model_json_schema()
        for name, field in section.model_fields.items():
            if inner_of(field) is None:
                said = f"**`{name}`** ({_kind(schema, name, field)}): {told(field)}"
                parts.append(filled(said, first="- ", rest="  "))
        if parts[-1].startswith("- "):
            parts[-1] += "\n"
    parts.append(f"\n## Features that go together\n\n{to_table()}")
    return "\n".join(parts).rstrip() + "\n"


def _sections(
    section: type[BaseModel], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], type[BaseModel], FieldInfo]]:
    """The sections below a section, with their paths and the fields that hold them."""
    for name, field in section.model_fields.items():
        inner = inner_of(field)
        if inner is not None:
            yield (*path, name), inner, field
            yield from _sections(inner, (*path, name))


def _kind(schema: Mapping[str, Any], name: str, field: FieldInfo) -> str:
    """The type, limits and default of a field, in words."""
    known = schema["properties"][name]
    known |= next((each for each in known.get("anyOf", ()) if each.get("type") != "null"), {})
    if "enum" in known:
        kind = " or ".join(f"`{json.dumps(each)}`" for each in known["enum"])
    elif known.get("type") == "array":
        kind = "list"
    elif known.get("type") == "object":
        kind = "table"
    else:
        words = (each.expected for each in field.metadata if isinstance(each, InWords))
        kind = next(words, _KINDS[known["type"]])
    limits = [f"{word} {known[limit]:,}" for limit, word in _LIMITS.items() if limit in known]
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "not set" if value is None else f"default `{toml_value(value)}`"
    return "; ".join([", ".join([kind, *limits]), default])


if __name__ == "__main__":
    print(to_page(), end="")
