"""Sound plans: read one, or build one; its sections agree with each other, or a `PlanError` says what does not.

`Plan` is sound by construction. An error names the field, its value, what was expected and the fix.
`protocol/plan/settings.py` checks each field on its own, and `plan.py` says beside a field where it has an
effect (`Only`). What is left is here: settings that each section allows, but that together would release what no charge
covers, would break the masks of the secure sum, or contradict what they mean. Each refusal names one of these three
(`Because`), and no other reason is one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import model_validator
from pydantic_core import PydanticUndefined

from cloister.protocol.errors import ParameterError, PlanError
from cloister.protocol.plan.plan import (
    AUTO,
    MOST_CLASSES,
    MOST_CORRELATED,
    MOST_GROUPS,
    NO_EVALUATION,
    SCORED,
    SMALLEST_COHORT,
    WIDEST_BALANCE,
    AdapterSection,
    CorrelatedSection,
    LocalSection,
    PrivacySection,
    PublicSection,
    QuestionSection,
    ServerSection,
)
from cloister.protocol.plan.plan import Plan as Contract
from cloister.protocol.plan.settings import Because, Only, Overrides, Section, Settings
from cloister.protocol.plan.threshold import LARGEST


class Refusal(NamedTuple):
    """Why a plan is not sound."""

    field: str
    expected: str
    fix: str
    because: Because
    value: Any = None
    """What is wrong; None: the field's value in the plan."""


class Plan(Contract):
    """The contract of a run, sound by construction: each way to one checks it.

    `Plan(local=LocalSection(steps=50), run={"rounds": 3})` has the given sections, typed or as mappings, and the
    defaults of the others. Only `model_copy` does not check what it changes.

    Raises:
        PlanError: a field is wrong, or the plan is not sound: the first refusal.
    """

    @classmethod
    def _filled(cls, values: dict[str, Any]) -> dict[str, Any]:
        return _asks(values)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for refusal in refusals(self):
            value = _value(self, refusal.field) if refusal.value is None else refusal.value
            shown = () if value is None else ("set" if isinstance(value, Section) else value,)
            raise PlanError(refusal.field, *shown, expected=refusal.expected, fix=refusal.fix)
        return self

    @classmethod
    def load(cls, plan: str | Path, overrides: Overrides = ()) -> Plan:
        """Read a plan, with overrides on top, and check it.

        Args:
            plan: A TOML file, or the name of a shipped plan, such as `private-sites`.
            overrides: As for `parse`.

        Raises:
            PlanError: there is no such plan, it cannot be read, is blank or no TOML, or is not sound.
        """
        path = Path(plan)
        if isinstance(plan, Path) or path.is_file() or path.suffix or len(path.parts) > 1:
            return cls.parse(_SETTINGS.read(path), overrides, origin=str(plan))
        known = shipped_plans()
        if plan not in known:
            names = ", ".join(sorted(known))
            raise PlanError("plan", plan, expected=f"an existing TOML file, or a shipped plan: {names}")
        return cls.parse(known[plan], overrides, origin=f"the shipped plan {plan}")

    @classmethod
    def parse(cls, text: str, overrides: Overrides = (), *, origin: str = "plan") -> Plan:
        """Read a plan from TOML text, with overrides on top, and check it.

        What the text sets and an override leaves without effect is dropped, unless it has a reason (`Only.why`):
        another optimizer does not need the constants of the one before, but no override takes a charge or a mask away
        unseen.

        Args:
            text: The TOML.
            overrides: Values by field, such as `{"local.steps": 50}`; None stands for the field's default. Or texts, as
                of `--set`: `local.steps=50`.
            origin: What an error about the text as a whole calls it.

        Raises:
            PlanError: the text is no TOML, or the plan is not sound.
        """
        if not isinstance(overrides, Mapping):
            overrides = list(overrides)
        given = [override.partition("=")[0].strip() for override in overrides]
        return from_json(
            _effective(
                json.dumps(_asks(json.loads(_SETTINGS.to_json(text, overrides, origin=origin)))), given
            )
        )

    def changed(self, values: Mapping[str, Any] | None = None, **sections: Any) -> Plan:
        """The plan with other values of some fields, checked: `changed({"local.steps": 50})`, `changed(local={"steps":
        50})`. Other fields that have no effect beside them get their defaults, as in `parse`.

        Args:
            values: By field; None stands for its default. One of them may itself have no effect beside the others.
            sections: The same, by section.

        Raises:
            PlanError: the plan is not sound.
        """
        fields = {
            f"{section}.{name}": value
            for section, found in sections.items()
            for name, value in dict(found).items()
        }
        return changed(self, {**(values or {}), **fields})


_SETTINGS = Settings(Contract, "plan", PlanError)
"""Reads the fields, and does not check the whole."""
_SOUND = Settings(Plan, "plan", PlanError)

load, parse, from_json = Plan.load, Plan.parse, _SOUND.from_json


def shipped_plans() -> dict[str, str]:
    """The text of each plan that comes with the program, by name."""
    paths = sorted(Path(__file__).with_name("shipped").glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def changed(plan: Contract, values: Mapping[str, Any]) -> Plan:
    """`Plan.changed` of any plan."""
    tree: dict[str, Any] = json.loads(plan.to_json())
    _SETTINGS.put(tree, values)
    return from_json(_effective(_SETTINGS.text(tree), list(values), even_given=True))


def _effective(text: str, given: Sequence[str], *, even_given: bool = False) -> str:
    """A plan as JSON without the fields that have no effect beside some given ones; given ones stay, unless they may
    have none. A field with a reason (`Only.why`) stays too, to be refused."""
    plan, tree = _SETTINGS.from_json(text), json.loads(text)
    for field, value, default, tags in _tagged(plan, ""):
        known = any(field == each or each.startswith(f"{field}.") for each in given)
        if (known and not even_given) or any(tag.why or tag.when for tag in tags):
            continue
        if not _broken(plan, value, default, tags) or not {tag.field for tag in tags} & set(given):
            continue
        *path, name = field.split(".")
        reduce(lambda section, key: section.get(key, {}), path, tree).pop(name, None)
    return json.dumps(tree)


def recorded(text: str | bytes) -> Contract:
    """Read a plan from JSON that was written for a checked one; each field is checked, but not the plan as a whole.

    Raises:
        PlanError: the text is no JSON, or a field is wrong.
    """
    return _SETTINGS.from_json(text)


def refusals(plan: Contract) -> Iterator[Refusal]:
    """Why a plan is not sound; nothing if it is."""
    vector = _of_effect, _of_sum, _of_groups, _of_compression, _of_norm_bound, _of_buffer
    training = _of_question, _of_records, _of_guarantee, _of_training, _of_balance, _of_simulation, _of_poison
    for check in (*vector, *training):
        yield from check(plan)


def _value(plan: Contract, field: str) -> Any:
    """The value of a field, such as `local.steps`; None where a section on the way is not set."""
    found: Any = plan
    for name in field.split("."):
        found = getattr(found, name, None)
    return found


def _of_effect(plan: Contract) -> Iterator[Refusal]:
    """Fields, and values of fields, that are not valid beside others (`Only`); and fields that are needed."""
    useless: dict[frozenset[str], list[str]] = {}  # the fields to remove, by the fields that leave them so
    for field, value, default, tags in _tagged(plan, ""):
        useless.setdefault(_causes(_broken(plan, value, default, tags)), []).append(field)
    for field, value, default, tags in _tagged(plan, ""):
        if broken := _broken(plan, value, default, tags):
            first = next((tag for tag in broken if tag.why), broken[0])
            expected = f"{'another value; this one is' if first.when else 'no value;'} only valid with {_words(broken)}"
            remove = " and ".join(useless[_causes(broken)])
            other = f"set {field} = {json.dumps(default)}" if first.when else f"remove {remove}"
            fix = first.fix or f"{' and '.join(tag.remedy for tag in broken)}, or {other}"
            yield Refusal(field, expected + (f": {first.why}" if first.why else ""), fix, first.because)
        needed = [tag for tag in tags if not tag.when]
        example = next((tag.required for tag in needed if tag.required), "")
        if example and not value and all(_holds(plan, tag) for tag in needed):
            either = [field, *(tag.field for tag in needed if tag.values == (None,))]
            fix = f"set {' or '.join(either)}, such as {field} = {example}"
            yield Refusal(field, f"a value with {_words(needed)}", fix, "definition", value)


def _words(tags: Sequence[Only]) -> str:
    return " and ".join(tag.words for tag in tags)


def _broken(plan: Contract, value: Any, default: Any, tags: Sequence[Only]) -> list[Only]:
    """The conditions of a field that its value does not meet."""
    return [tag for tag in tags if tag.applies(value, default) and not _holds(plan, tag)]


def _holds(plan: Contract, tag: Only) -> bool:
    return tag.holds(_value(plan, tag.field)) or (bool(tag.unless) and _value(plan, tag.unless) is not None)


def _causes(tags: Sequence[Only]) -> frozenset[str]:
    return frozenset(tag.field for tag in tags)


def _tagged(section: Section, path: str) -> Iterator[tuple[str, Any, Any, list[Only]]]:
    """The fields of a section, and of those below it, that are only valid with others: value, default, conditions."""
    for name, field in type(section).model_fields.items():
        value, at = getattr(section, name), f"{path}.{name}".lstrip(".")
        if tags := [each for each in field.metadata if isinstance(each, Only)]:
            default = field.get_default(call_default_factory=True)
            yield at, value, None if default is PydanticUndefined else default, tags
        if isinstance(value, Section):
            yield from _tagged(value, at)


def _of_sum(plan: Contract) -> Iterator[Refusal]:
    """A sum that overflows, or a secure sum over too few or too many sites, or without a threshold."""
    sites, bits = plan.cohort.size(), plan.aggregation.ring_bits
    if sites * 2 > 2 ** (bits - 1) - 1:
        yield Refusal(
            "aggregation.ring_bits",
            f"a ring in which the sum of {sites} sites cannot overflow",
            "set aggregation.ring_bits = 32"
            if not plan.aggregation.few_bits
            else "set aggregation.ring_bits = 16, or lower cohort.fraction",
            "mask",
        )
    listed = plan.cohort.sites if plan.aggregation.secure else sites * (plan.local.balance != "fixed")
    if listed > LARGEST:
        yield Refusal(
            "cohort.sites",
            f"at most {LARGEST} sites with aggregation.secure = true or local.balance: a message lists as many",
            'lower cohort.sites, or set local.balance = "fixed", and aggregation.secure = false if the coordinator '
            "may see every update",
            "mask",
        )
    if not plan.aggregation.secure:
        return
    for n in sorted({*plan.summed(), sites} - {0}):  # `_of_groups` refuses groups without a site
        error = _insecure(plan, n)
        if error is not None and n == sites:
            yield Refusal(error.field, error.expected, error.fix, "mask", error.value)
        elif error is not None:
            federation, traced = plan.cohort.sites, plan.aggregation.trace_groups > 1
            field = "aggregation.trace_groups" if traced else "aggregation.groups"
            fewer = range(min(_value(plan, field) - 1, MOST_GROUPS), 1 if traced else 2, -1)
            sound = next((count for count in fewer if _secure_in(plan, count)), None)
            instead = f"remove {field}" if sound is None else f"set {field} = {sound}"
            yield Refusal(
                field,
                f"groups that are each a secure sum of their own; of a group of {n} that is drawn from the "
                f"{federation} sites, up to {plan.tolerance().colluders_in(federation, n)} may collude: expected "
                f"{error.expected}",
                f"{instead}, or lower aggregation.colluders",
                "mask",
            )


def _insecure(plan: Contract, n: int) -> ParameterError | None:
    """Why a draw of n sites is no secure sum; None if it is one."""
    if n < SMALLEST_COHORT:
        field = "cohort.sites" if plan.cohort.sites < SMALLEST_COHORT else "cohort.fraction"
        return ParameterError(
            field,
            _value(plan, field),
            expected=f"at least {SMALLEST_COHORT} sites in each sum with aggregation.secure = true, not {n}; each of "
            "two sites could compute the other's update from the sum",
            fix=f"raise {field}, or set aggregation.secure = false if the coordinator may see every update",
        )
    try:
        plan.threshold(n)
    except ParameterError as error:
        return error
    return None


def _secure_in(plan: Contract, groups: int) -> bool:
    """Whether each of so many groups is a secure sum."""
    least, more = divmod(plan.cohort.size(), groups)
    return all(_insecure(plan, n) is None for n in range(least, least + 1 + bool(more)))


def _of_groups(plan: Contract) -> Iterator[Refusal]:
    """Groups whose median is not robust, and what is only sound for one mean over all sites of a round."""
    cohort, most = plan.cohort, min(MOST_GROUPS, plan.cohort.size())
    why = {
        "groups": "; the median of two means is their mean, which one poisoned site moves",
        "trace_groups": "",
    }
    for name, reason in why.items():
        least, field = 3 if reason else 2, f"aggregation.{name}"
        if _value(plan, field) == 1 or least <= _value(plan, field) <= most:
            continue
        yield Refusal(
            field,
            f"{least} to {most}: each group has at least one of the {cohort.size()} sites of a round, and many groups "
            f"take long{reason}",
            f"set {field} = {least}, or remove it"
            if most >= least
            else f"remove {field}, or raise cohort.{'sites' if cohort.fraction == 1 else 'fraction'}",
            "definition",
        )


def _of_compression(plan: Contract) -> Iterator[Refusal]:
    """Few bits where they would destroy the updates, save nothing, or break a guarantee; bounds that follow from
    nothing."""
    aggregation = plan.aggregation
    compression, named = aggregation.compression, aggregation.few_bits
    if plan.privacy.unit == "site" and named:
        levels, size = (2 ** (aggregation.ring_bits - 1) - 1) // plan.cohort.size(), 10**6
        inflated = math.sqrt(levels**2 + size / 4) / levels
        yield Refusal(
            named,
            f'no compression with privacy.unit = "site": rounding an update to {levels} steps of its norm '
            f"makes the norm, and so the noise, {inflated:.4g} times as large for {size:,} parameters",
            f"remove [{named}], and set aggregation.ring_bits = 32",
            "charge",
        )
    first = compression is not None and compression.first_scale is None
    by_steps = aggregation.norm_bound == AUTO and plan.privacy.unit == "none"
    for field in ("compression.first_scale",) * first + ("norm_bound",) * by_steps:
        if not plan.local.bounded:
            yield Refusal(
                f"aggregation.{field}",
                f'a number with local.optimizer = "{plan.local.optimizer}" and local.clip_norm = 0: nothing else '
                "bounds an update",
                f"set local.clip_norm = 1.0, or aggregation.{field}",
                "definition",
            )


def _of_norm_bound(plan: Contract) -> Iterator[Refusal]:
    """A bound on updates whose check would show more of one site than its privacy unit covers, or is another's."""
    bound, unit, secure = plan.aggregation.norm_bound, plan.privacy.unit, plan.aggregation.secure
    if bound is not None and (unit == "site" or (unit == "none" and secure)):
        yield Refusal(
            "aggregation.norm_bound",
            'privacy.unit = "record" or "owner": a sketch shows the coordinator a part of one site\'s update, and with '
            "other units that has not all of its noise; unit site is bounded by privacy.clip",
            "remove aggregation.norm_bound"
            if unit == "site"
            else 'set privacy.unit = "record", or aggregation.secure = false if the coordinator may see every update',
            "charge",
            bound,
        )


def _of_buffer(plan: Contract) -> Iterator[Refusal]:
    """A buffer that would wait for more updates than there are sites."""
    cohort = plan.cohort
    if cohort.mode == "async" and cohort.needed() > cohort.sites:
        yield Refusal(
            "cohort.buffer",
            f"at most {cohort.sites}, the number of sites: a site has one update of each model",
            "lower cohort.buffer",
            "definition",
        )


_ASKED: dict[str, Any] = {"run.rounds": 1, "aggregation.weighting": "uniform"}
"""Fields that have one value in a question, which is filled in where a text does not set them."""
_AS_EVER = (
    "aggregation.ring_bits",
    "aggregation.groups",
    "aggregation.trace_groups",
    "aggregation.part",
    "aggregation.norm_bound",
    "cohort.fraction",
    "faults.poison",
    *(f"model.adapter.{name}" for name in AdapterSection.model_fields),
    *(f"local.{name}" for name in LocalSection.model_fields),
    *(f"public.{name}" for name in PublicSection.model_fields),
    *(f"server.{name}" for name in ServerSection.model_fields if name != "evaluation"),
)
"""Fields that have their defaults in a question."""


def _asks(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a plan with what a question fixes."""
    if not values.get("question"):
        return values
    filled = dict(values)
    for field, value in {"run.name": "question", "server.evaluation": NO_EVALUATION, **_ASKED}.items():
        section, _, name = field.partition(".")
        if isinstance(found := filled.get(section, {}), dict):
            filled[section] = {name: value, **found}
    return filled


def _of_question(plan: Contract) -> Iterator[Refusal]:
    """A question without noise that covers it, with parts that it does not use, or without cells."""
    question, default = plan.question, Contract()
    if question is None:
        return
    for field, right, fix in (
        (
            "privacy.unit",
            ("record", "owner", "site"),
            'set privacy.unit = "record", privacy.target_epsilon and privacy.delta',
        ),
        ("aggregation.secure", (True,), "set aggregation.secure = true"),
    ):
        if _value(plan, field) not in right:
            yield Refusal(
                field,
                "a privacy unit, and the secure sum, in a question: the noise that covers a unit is that of all sites "
                "together",
                fix,
                "charge",
            )
    public = question.kind in _OF_MODELS and not plan.at_sites
    fixed = _ASKED | {"server.evaluation": plan.server.evaluation if public else NO_EVALUATION}
    for field, value in (fixed | {field: _value(default, field) for field in _AS_EVER}).items():
        if _value(plan, field) != value:
            yield Refusal(
                field,
                f"{json.dumps(value, default=str)} in a question, which trains nothing and asks all sites once",
                f"remove {field}",
                "definition",
            )
    for field, wanted, fix in _of_cells(plan, question):
        yield Refusal(field, wanted, fix, "definition")


_OF_MODELS = ("compare", "evaluate")
"""Kinds of questions that are about models."""
_NARROWEST = 1e-9
"""Least width of a range, relative to its ends, by which numbers in it are told apart."""
SHARE = "share of "
"""Begins the name of the figure of a cell's share."""
RESERVED = ("other", "units")
"""Names of cells and figures that no value may have."""


def _of_cells(plan: Contract, question: QuestionSection) -> Iterator[tuple[str, str, str]]:
    """What is wrong with the cells of a question and with its unit: the field, what was expected, and the fix."""
    if question.kind == "histogram":
        if bool(question.values) == bool(question.edges):
            yield "question.values", "either values or edges", 'set question.values = ["no", "yes"], or edges'
        shares = {f"{SHARE}{value}" for value in (*question.values, *RESERVED)}
        if len({*question.values, *RESERVED}) < len(question.values) + len(RESERVED) or shares & {
            *question.values
        }:
            wanted = f"different values, none of {', '.join(RESERVED)}, and none that is {SHARE}another"
            yield "question.values", wanted, "list each once"
        kinds = {isinstance(edge, str) for edge in question.edges}
        finite = all(isinstance(edge, str) or math.isfinite(edge) for edge in question.edges)
        increasing = finite and len(kinds) < 2 and all(low < high for low, high in pairwise(question.edges))  # type: ignore[operator]  # all numbers or all texts, as `kinds` has shown
        if not increasing or (question.measure != "value" and True in kinds):
            wanted = "all numbers" if question.measure != "value" else "all numbers or all texts"
            yield "question.edges", f"increasing edges, {wanted}", "set question.edges = [0, 18, 65]"
    if question.kind == "mean" and question.range:
        low, high = question.range
        if not high - low > _NARROWEST * max(abs(low), abs(high), 1e-100):
            yield (
                "question.range",
                "two numbers in increasing order, and not too near",
                "set question.range = [0, 120]",
            )
    if question.kind in _OF_MODELS:
        yield from _of_models(plan, question)
    elif plan.privacy.record == "window":
        wanted = "record in a question about a field, which reads whole records"
        yield "privacy.record", wanted, "remove privacy.record"
    if plan.privacy.unit != "none" and plan.privacy.clip != PrivacySection().clip:
        yield (
            "privacy.clip",
            "1.0 in a question, whose vectors are bounded by its kind",
            "remove privacy.clip",
        )


_MOST_OTHERS = 7


def _of_models(plan: Contract, question: QuestionSection) -> Iterator[tuple[str, str, str]]:
    """What is wrong with a question about models; as for `_of_cells`."""
    figures, task, only = question.figures, plan.data.task, 'set question.figures = ["accuracy"]'
    if not figures or len(set(figures)) < len(figures) or {"accuracy", "confusion"} <= {*figures}:
        yield "question.figures", "one figure or more, each once; confusion has the accuracy in it", only
    several = any(" as " in name for name in plan.data.classes)
    if "entities" in figures and (len(figures) > 1 or task != "token-classify" or question.kind == "compare"):
        wanted = 'no "entities" but alone, in an evaluation with data.task = "token-classify"'
        yield "question.figures", wanted, only
    if "confusion" in figures and (task != "classify" or several or question.kind == "compare"):
        wanted = 'no "confusion" but in an evaluation with data.task = "classify", and no " as " in the name of a class'
        yield "question.figures", wanted, only
    names = (plan.model.name, *question.others)
    fewest, most = (1, 1) if question.kind == "compare" else (0, _MOST_OTHERS)
    if not fewest <= len(question.others) <= most or len({*names, ""}) <= len(names):
        many = "one model" if most == 1 else f"at most {most} models"
        wanted = f"{many} besides model.name, each once"
        yield "question.others", wanted, 'set question.others = ["FOLDER"]'
    if not plan.data.held_out:
        yield ("data.held_out", "more than 0 in an evaluation of held-out records", "set data.held_out = 0.1")
    if task not in SCORED:
        wanted = (
            f'a question about a field with data.task = "{task}": what a model does on its units has no bound'
        )
        yield "question.kind", wanted, "ask a histogram or a mean"


def _of_records(plan: Contract) -> Iterator[Refusal]:
    """Classes or choices that are too few or not different, or weights for others."""
    data = plan.data
    fewest = 2 if data.kind.single or data.choices else 1
    for what, names in (("classes", data.classes), ("choices", data.choices)):
        wrong = [name for name, times in Counter(names).items() if not name or times > 1]
        if names and (wrong or not fewest <= len(names) <= MOST_CLASSES):
            yield Refusal(
                f"data.{what}",
                f"{fewest} to {MOST_CLASSES} {what}: different names that are not empty",
                f'list them, such as data.{what} = ["no", "yes"], and name each once',
                "definition",
                wrong[0] if wrong else len(names),
            )
    if data.class_weights and len(data.class_weights) != len(data.classes):
        yield Refusal(
            "data.class_weights",
            f"{len(data.classes)} weights, one for each of data.classes",
            "list one for each class, or remove data.class_weights",
            "definition",
            len(data.class_weights),
        )


def _of_guarantee(plan: Contract) -> Iterator[Refusal]:
    """An update that the noise of one site alone would protect; correlated noise that would not cancel."""
    privacy = plan.privacy
    if privacy.unit == "site" and not privacy.trusted_coordinator and not plan.aggregation.secure:
        yield Refusal(
            "aggregation.secure",
            'true with privacy.unit = "site", unless the coordinator is trusted; the noise of one site alone '
            "does not protect its update",
            "set aggregation.secure = true, or privacy.trusted_coordinator = true if you do trust it",
            "charge",
        )
    if privacy.correlated is not None:
        yield from _of_correlated(plan, privacy.correlated)


def _of_correlated(plan: Contract, correlated: CorrelatedSection) -> Iterator[Refusal]:
    """Correlated noise that would not cancel, or cohorts that do not keep to the pattern that it covers."""
    cohort, rounds = plan.cohort, plan.run.rounds
    turns, left = divmod(cohort.sites, cohort.size())
    if left or turns == 1:
        yield Refusal(
            "cohort.fraction",
            f"cohorts that take the {cohort.sites} sites in turn, with privacy.correlated; cohorts of {cohort.size()} "
            + (
                f"leave {left} sites over"
                if left
                else "have each site in every round, where it gains nothing"
            ),
            "choose cohort.sites and cohort.fraction so that the cohort's size divides the number of sites",
            "charge",
        )
    times = -(-rounds // turns)
    for name, right, limit in (
        ("separation", correlated.separation <= turns, f"at most {turns}"),
        ("participations", correlated.participations >= times, f"at least {times}"),
    ):
        if not right:
            yield Refusal(
                f"privacy.correlated.{name}",
                f"{limit}, because {cohort.sites} sites in cohorts of {cohort.size()} take part every {turns} rounds, "
                f"some sites {times} times in {rounds} rounds",
                f"set privacy.correlated.{name} = {limit.split()[-1]}, or change cohort.fraction or run.rounds",
                "charge",
            )
    if rounds > MOST_CORRELATED:
        yield Refusal(
            "run.rounds",
            f"at most {MOST_CORRELATED} with privacy.correlated, for which its matrix is computed in seconds",
            "lower run.rounds, or remove privacy.correlated",
            "charge",
        )


def _of_training(plan: Contract) -> Iterator[Refusal]:
    """Moments that no site would ever use."""
    local = plan.local
    if local.optimizer_state == "keep" and plan.aggregation.secure and plan.drawn:
        yield Refusal(
            "local.optimizer_state",
            '"reset" with aggregation.secure = true where each sum is over a part of the federation that is drawn anew '
            "(cohort.fraction below 1, or aggregation.groups with local.balance): all sites of a masked sum begin with "
            "what they carry by the same instructions, and otherwise with nothing, so it would never be used",
            'set local.optimizer_state = "reset", or cohort.fraction = 1 and local.balance = "fixed"',
            "mask",
        )


def _of_balance(plan: Contract) -> Iterator[Refusal]:
    """Limits of unequal steps that expose a site, or a list of them that is too long."""
    local = plan.local
    if local.balance == "fixed":
        return
    fewest, largest = -(-local.steps // WIDEST_BALANCE), WIDEST_BALANCE * local.steps
    if local.least_steps is not None:
        largest = min(largest, WIDEST_BALANCE * local.least_steps)
    for name, given, low, high in (
        ("least_steps", local.least_steps, fewest, local.steps),
        ("most_steps", local.most_steps, local.steps, largest),
    ):
        if given is not None and not low <= given <= high:
            yield Refusal(
                f"local.{name}",
                f"{low} to {high}: a site of median speed takes the {local.steps} of local.steps, and with a range "
                f"wider than {WIDEST_BALANCE} from least to most a coordinator could let one site train almost alone",
                f"change local.{name}, local.steps or the other limit",
                "mask",
            )


_NOT_A_SITE = ("coordinator", "sequences")
"""Names that another party, or a folder beside those of the sites, has."""


def _of_simulation(plan: Contract) -> Iterator[Refusal]:
    """Profiles of more than all sites; names that are not one for each site."""
    names = plan.simulation.sites
    wrong = [name for name, times in Counter(names).items() if times > 1 or name in _NOT_A_SITE]
    if names and (wrong or len(names) != plan.cohort.sites):
        yield Refusal(
            "simulation.sites",
            f"{plan.cohort.sites} different names, as many as cohort.sites, and none of {', '.join(_NOT_A_SITE)}",
            "name each site once",
            "definition",
            wrong[0] if wrong else len(names),
        )
    shares = sum(profile.share for profile in plan.simulation.profiles)
    if shares > 1 + 1e-9:
        yield Refusal(
            "simulation.profiles", "shares that add up to at most 1", "lower the shares", "definition", shares
        )


def _of_poison(plan: Contract) -> Iterator[Refusal]:
    """Poison that changes nothing."""
    poison, data = plan.faults.poison, plan.data
    if poison is None:
        return
    if poison.kind in ("label-flip", "backdoor") and data.task == "token-classify":
        yield Refusal(
            "faults.poison.kind",
            'sign-flip or scale with data.task = "token-classify": the entities of a text are places in it, and fit no '
            "other text",
            'set faults.poison.kind = "sign-flip"',
            "definition",
        )
    elif poison.kind == "label-flip" and data.format == "text" and not data.answer_field:
        yield Refusal(
            "faults.poison.kind",
            'another kind with data.format = "text", whose records have no answers',
            'set faults.poison.kind = "backdoor", or use prompts or messages',
            "definition",
        )
    elif poison.kind == "backdoor" and data.outcomes and poison.target not in data.outcomes:
        names, what = ("classes", "label") if data.classes else ("choices", "completion")
        yield Refusal(
            "faults.poison.target",
            f"one of data.{names}: a record with another {what} is not used",
            f'set faults.poison.target = "{data.outcomes[0]}"',
            "definition",
        )
