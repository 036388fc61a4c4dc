"""Which features of a plan go together: each two of them, put into one plan that is sound with either alone.

`docs/plan.md` has the table. A pair is refused for a reason of `soundness.Because` and for no other. Two values of one
field are no pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from cloister.protocol.errors import PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.settings import Because, Settings
from cloister.protocol.plan.soundness import refusals

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
    Feature("NF4 base", {"model.adapter.base_precision": "nf4"}, {"model.adapter.scheme": "ffa-lora"}),
    Feature("evaluation at sites", {"server.evaluation": '""'}, {}),
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
