"""The only ways to a plan: read it, then check that its sections agree with each other.

`load`, `parse` and `from_json` return a sound `Plan` or raise `PlanError` with the field, its value, what was expected
and the fix. `protocol/plan/settings.py` checks each field on its own; the checks here are across sections: settings
that each section allows, but that together break a guarantee, cannot run, or have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cloister.protocol.errors import ParameterError, PlanError
from cloister.protocol.plan.plan import (
    LARGEST_CLIP,
    MOST_CLASSES,
    MOST_CORRELATED,
    MOST_GROUPS,
    NO_EVALUATION,
    SIMULATED_PUBLIC,
    SMALLEST_CLIP,
    SMALLEST_COHORT,
    WIDEST_BALANCE,
    CohortSection,
    CorrelatedSection,
    Plan,
    PrivacySection,
)
from cloister.protocol.plan.settings import Section, Settings
from cloister.protocol.plan.threshold import LARGEST

_SETTINGS = Settings(Plan, "plan", PlanError)
_DEFAULT = Plan()
_STEPS = 'privacy.unit = "record" or "owner"'
_EVALUATED = (
    f'set server.evaluation to a file of public records, to "{NO_EVALUATION}", or in a simulation to '
    f'"{SIMULATED_PUBLIC}" with simulation.public = 0.1'
)


class _Refusal(NamedTuple):
    """Why a plan is not sound; its value is that of the field in the plan."""

    field: str
    expected: str
    fix: str


def load(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """Read the TOML plan at `path`, with `section.key=value` overrides on top, and check it.

    Raises:
        PlanError: the file cannot be read, is blank or no TOML, or the plan is not sound.
    """
    return parse(_SETTINGS.read(path), overrides, origin=str(path))


def parse(text: str, overrides: Iterable[str] = (), *, origin: str = "plan") -> Plan:
    """Read a plan from TOML text, with `section.key=value` overrides on top, and check it.

    Raises:
        PlanError: the text is no TOML, or the plan is not sound.
    """
    plan = from_json(_SETTINGS.to_json(text, overrides, origin=origin))
    if plan.simulation.search is not None:
        raise PlanError(
            "simulation.search",
            "set",
            expected="no value in a plan that is not a trial: only `cloister tune` sets it, which charges the search",
            fix="remove [simulation.search]",
        )
    return plan


def from_json(text: str | bytes) -> Plan:
    """Read a plan from JSON and check it.

    Raises:
        PlanError: the text is no JSON, or the plan is not sound.
    """
    plan = _SETTINGS.from_json(text)
    _check_sound(plan)
    return plan


def recorded(text: str | bytes) -> Plan:
    """Read the plan of a run that an earlier release may have started, in order to report it.

    Each field is checked, but not the plan as a whole: this release may refuse what that release ran.

    Raises:
        PlanError: the text is no JSON, or a field is wrong.
    """
    return _SETTINGS.from_json(text)


def _check_sound(plan: Plan) -> None:
    """Refuse settings that each section allows but that contradict each other.

    Raises:
        PlanError: the first refusal, with the value that the plan has.
    """
    for field, expected, fix in _refusals(plan):
        value = _value(plan, field)
        shown = () if value is None else ("set" if isinstance(value, Section) else value,)
        raise PlanError(field, *shown, expected=expected, fix=fix)


def _value(plan: Plan, field: str) -> Any:
    """The value of a field, such as `local.steps`."""
    return reduce(getattr, field.split("."), plan)


def _without_effect(plan: Plan) -> Iterator[_Refusal]:
    """Refuse settings that have an effect only with another one: they would suggest what the run does not do."""
    unit, local, cohort, data = plan.privacy.unit, plan.local, plan.cohort, plan.data
    of_privacy = (f"privacy.{name}" for name in PrivacySection.model_fields if name != "unit")
    for effective, condition, fields in (
        (
            unit != "none",
            'privacy.unit = "record", "owner" or "site"',
            (*of_privacy, "simulation.ledger", "simulation.search"),
        ),
        (
            plan.privacy.dpsgd,
            _STEPS,
            ("privacy.record", "privacy.windows", "privacy.method"),
        ),
        (unit == "owner", 'privacy.unit = "owner"', ("data.owner", "privacy.records")),
        (
            unit == "site",
            'privacy.unit = "site"',
            ("privacy.trusted_coordinator", "privacy.adaptive", "privacy.correlated"),
        ),
        (bool(plan.simulation.ledger), "simulation.ledger", ("simulation.greatest_epsilon",)),
        (
            plan.aggregation.weighting == "tokens",
            'aggregation.weighting = "tokens"',
            ("aggregation.temperature",),
        ),
        (cohort.mode == "async", 'cohort.mode = "async"', ("cohort.buffer", "cohort.staleness")),
        (
            local.balance != "fixed",
            'local.balance = "weighted" or "dynamic"',
            ("local.least_steps", "local.most_steps"),
        ),
        (local.optimizer == "muon", 'local.optimizer = "muon"', ("local.momentum",)),
        (
            local.optimizer != "sgd",
            'local.optimizer = "adamw" or "muon"',
            ("local.betas", "local.optimizer_state"),
        ),
        (
            data.task == "generate" and data.format == "prompt",
            'data.task = "generate" and data.format = "prompt"',
            ("data.choices",),
        ),
        (
            data.task == "classify",
            'data.task = "classify"',
            ("data.classes", "data.class_weights", "data.label_field"),
        ),
        (plan.model.name.startswith("builtin:"), "a builtin: model in model.name", ("model.config",)),
    ):
        for field in fields if not effective else ():
            if _value(plan, field) != _value(_DEFAULT, field):
                yield _Refusal(
                    field, f"no value; only valid with {condition}", f"set {condition}, or remove {field}"
                )
    if plan.local.sampler == "poisson" and not plan.privacy.dpsgd:
        yield _Refusal(
            "local.sampler",
            f'"shuffle" or "auto"; "poisson" is only valid with {_STEPS}',
            'set local.sampler = "auto"',
        )


def _refusals(plan: Plan) -> Iterator[_Refusal]:
    """Why a plan is not sound; empty if it is."""
    yield from _without_effect(plan)
    sites, bits = plan.cohort.size(), plan.aggregation.ring_bits
    if sites * 2 > 2 ** (bits - 1) - 1:
        yield _Refusal(
            "aggregation.ring_bits",
            f"a ring in which the sum of {sites} sites cannot overflow",
            "set aggregation.ring_bits = 32"
            if plan.aggregation.compression is None
            else "set aggregation.ring_bits = 16, or lower cohort.fraction",
        )
    yield from _check_groups(plan)
    yield from _check_compression(plan)
    yield from _check_mode(plan)
    yield from _check_task(plan)
    if plan.aggregation.secure:
        yield from _check_secure(plan)
    if plan.privacy.unit != "none":
        yield from _check_private(plan)
    if (plan.server.evaluation == SIMULATED_PUBLIC) != (plan.simulation.public > 0):
        yield _Refusal(
            "simulation.public",
            f'more than 0 if and only if server.evaluation = "{SIMULATED_PUBLIC}", not '
            f"{plan.server.evaluation!r}",
            f'set server.evaluation = "{SIMULATED_PUBLIC}", or simulation.public = 0'
            if plan.simulation.public
            else "set simulation.public = 0.1, or other records in server.evaluation",
        )
    if plan.local.warmup_steps >= plan.run.rounds * plan.local.steps and plan.local.warmup_steps:
        yield _Refusal(
            "local.warmup_steps",
            f"fewer than the run's {plan.run.rounds * plan.local.steps} local steps",
            "lower local.warmup_steps or raise run.rounds",
        )
    if plan.model.adapter.scheme == "rolora" and plan.local.optimizer_state == "keep":
        yield _Refusal(
            "local.optimizer_state",
            '"reset" with model.adapter.scheme = "rolora", which trains another factor every round',
            'set local.optimizer_state = "reset"',
        )
    if plan.local.optimizer_state == "keep" and plan.aggregation.secure and plan.drawn:
        yield _Refusal(
            "local.optimizer_state",
            '"reset" with aggregation.secure = true where each sum is over a part of the federation '
            "(cohort.fraction below 1, or aggregation.groups): all sites of a masked sum begin with what they carry "
            "from the same rounds, and with nothing where they took part in different ones, so it would never be used",
            'set local.optimizer_state = "reset", or cohort.fraction = 1 without aggregation.groups',
        )
    yield from _check_balance(plan)
    yield from _check_optimizer(plan)
    yield from _check_base_precision(plan)
    if plan.model.adapter.scheme == "rolora" and plan.server.optimizer != "fedavg":
        yield _Refusal(
            "server.optimizer",
            '"fedavg" with model.adapter.scheme = "rolora"; momentum would change the frozen factor',
            'set server.optimizer = "fedavg"',
        )
    if plan.data.held_out == 0 and not plan.server.evaluation:
        yield _Refusal(
            "data.held_out",
            "more than 0 if server.evaluation is empty, because sites then evaluate on held-out records",
            f"set data.held_out = 0.1; or {_EVALUATED}",
        )
    if plan.server.gate.loss is not None and plan.server.evaluation in ("", NO_EVALUATION):
        yield _Refusal(
            "server.gate.loss",
            "no value unless server.evaluation names public records: the gate compares losses on them",
            "remove server.gate.loss, or name public records in server.evaluation",
        )
    if plan.server.evaluation == NO_EVALUATION and plan.server.evaluation_sequences is not None:
        yield _Refusal(
            "server.evaluation_sequences",
            f'no value with server.evaluation = "{NO_EVALUATION}"',
            "remove server.evaluation_sequences, or name public records in server.evaluation",
        )
    yield from _check_poison(plan)
    yield from _check_dataset(plan)
    if sum(profile.share for profile in plan.simulation.profiles) > 1 + 1e-9:
        raise PlanError(
            "simulation.profiles",
            sum(profile.share for profile in plan.simulation.profiles),
            expected="shares that add up to at most 1",
            fix="lower the shares",
        )


def _check_poison(plan: Plan) -> Iterator[_Refusal]:
    """Refuse poison that changes nothing, or under which an epsilon would not hold."""
    poison = plan.faults.poison
    if poison is None:
        return
    if poison.kind == "label-flip" and plan.privacy.dpsgd:
        yield _Refusal(
            "faults.poison.kind",
            f'another kind with privacy.unit = "{plan.privacy.unit}": it gives a record the answer of the '
            "next one, so a record that is added or removed changes others, and the stated epsilon would not hold",
            'set faults.poison.kind = "backdoor", or privacy.unit = "site"',
        )
    if poison.kind == "label-flip" and plan.data.format == "text" and plan.data.task != "classify":
        yield _Refusal(
            "faults.poison.kind",
            'another kind with data.format = "text", whose records have no answers',
            'set faults.poison.kind = "backdoor", or use prompts or messages',
        )
    if poison.kind == "backdoor" and plan.data.outcomes and poison.target not in plan.data.outcomes:
        names, what = ("classes", "label") if plan.data.classes else ("choices", "completion")
        yield _Refusal(
            "faults.poison.target",
            f"one of data.{names}: a record with another {what} is not used",
            f'set faults.poison.target = "{plan.data.outcomes[0]}"',
        )
    if poison.kind == "scale" and poison.factor == 1:
        yield _Refusal(
            "faults.poison.factor",
            'another number with faults.poison.kind = "scale"; 1 changes nothing',
            "set faults.poison.factor = 10",
        )


def _check_mode(plan: Plan) -> Iterator[_Refusal]:
    """Refuse asynchronous rounds that are not sound or would wait for all sites, and their settings without them."""
    cohort = plan.cohort
    if cohort.mode == "sync":
        return
    if plan.aggregation.secure:
        yield _Refusal(
            "aggregation.secure",
            'false with cohort.mode = "async": asynchronous rounds are refused under the secure sum, because '
            "the coordinator would choose which updates are summed, and masks of sites with different models do not "
            "cancel",
            'set cohort.mode = "sync", or aggregation.secure = false if the coordinator may see every update',
        )
    if plan.privacy.unit != "none":
        yield _Refusal(
            "privacy.unit",
            '"none" with cohort.mode = "async": the time that a site takes depends on its data and decides '
            "which updates are summed, and by which weight, which no charge covers",
            'set cohort.mode = "sync", or privacy.unit = "none"',
        )
    if cohort.fraction != 1:
        yield _Refusal(
            "cohort.fraction",
            '1 with cohort.mode = "async", where all sites train all the time',
            "remove cohort.fraction; cohort.buffer is the number of updates in a round",
        )
    if cohort.quorum != CohortSection().quorum:
        yield _Refusal(
            "cohort.quorum",
            'no value with cohort.mode = "async", where a round has cohort.buffer updates',
            "remove cohort.quorum, or set cohort.buffer",
        )
    if cohort.needed() > cohort.sites:
        yield _Refusal(
            "cohort.buffer",
            f"at most {cohort.sites}, the number of sites: a site has one update of each model",
            "lower cohort.buffer",
        )
    if plan.local.balance != "fixed":
        yield _Refusal(
            "local.balance",
            '"fixed" with cohort.mode = "async", where no site waits for slower ones',
            'set local.balance = "fixed"',
        )
    if not plan.server.evaluation:
        yield _Refusal(
            "server.evaluation",
            'public records or "none" with cohort.mode = "async": an evaluation at the sites would wait for '
            "the slowest one",
            _EVALUATED,
        )
    if plan.model.adapter.scheme == "rolora":
        yield _Refusal(
            "model.adapter.scheme",
            'another scheme with cohort.mode = "async": a stale update may be of the factor that the round '
            "does not train",
            'set model.adapter.scheme = "ffa-lora"',
        )


def _check_task(plan: Plan) -> Iterator[_Refusal]:
    """Refuse a classifier without two different classes or on data without one label for a text; classes without it;
    choices on data without completions."""
    data, privacy = plan.data, plan.privacy
    if data.choices:
        _check_names("choices", data.choices)
    if data.task != "classify":
        return
    if data.format != "text":
        yield _Refusal(
            "data.format",
            '"text" with data.task = "classify": a text has one label',
            'set data.format = "text", data.text_field and data.label_field',
        )
    _check_names("classes", data.classes)
    if data.class_weights and len(data.class_weights) != len(data.classes):
        raise PlanError(
            "data.class_weights",
            len(data.class_weights),
            expected=f"{len(data.classes)} weights, one for each of data.classes",
            fix="list one for each class, or remove data.class_weights",
        )
    if privacy.dpsgd and privacy.windows != PrivacySection().windows:
        yield _Refusal(
            "privacy.windows",
            'no value with data.task = "classify", which uses the first data.sequence_length tokens of a text',
            "remove privacy.windows",
        )
    if privacy.dpsgd and privacy.record == "window":
        yield _Refusal(
            "privacy.record",
            '"record" with data.task = "classify": the label is of the whole text',
            'set privacy.record = "record"',
        )


def _check_names(what: Literal["classes", "choices"], names: tuple[str, ...]) -> None:
    """Refuse too few or too many classes or choices, an empty one, or two that are equal."""
    if not 2 <= len(names) <= MOST_CLASSES:
        raise PlanError(
            f"data.{what}",
            len(names),
            expected=f"2 to {MOST_CLASSES} {what}",
            fix=f'list them, such as data.{what} = ["no", "yes"]',
        )
    if "" in names or len(set(names)) < len(names):
        raise PlanError(
            f"data.{what}",
            next(each for each in names if not each or names.count(each) > 1),
            expected="different names that are not empty",
            fix="name each once",
        )


def _check_groups(plan: Plan) -> Iterator[_Refusal]:
    """Refuse groups whose median is not robust, and what is only sound for one mean over all sites of a round."""
    groups, cohort, fix = plan.aggregation.groups, plan.cohort, "remove aggregation.groups"
    if groups == 1:
        return
    if groups == 2:
        yield _Refusal(
            "aggregation.groups",
            "3 or more: the median of two means is their mean, which one poisoned site moves",
            "set aggregation.groups = 3, or remove it" if cohort.size() > 2 else fix,
        )
    if groups > MOST_GROUPS and cohort.size() >= MOST_GROUPS:
        yield _Refusal(
            "aggregation.groups",
            f"at most {MOST_GROUPS}: the time of the median grows with the square of their number",
            "lower aggregation.groups",
        )
    if groups > cohort.size():
        yield _Refusal(
            "aggregation.groups",
            f"at most {cohort.size()}, the sites of a round: each group has at least one",
            f"{'lower' if cohort.size() > 2 else 'remove'} aggregation.groups, or raise "
            f"{'cohort.sites' if cohort.fraction == 1 else 'cohort.fraction'}",
        )
    for refused, field, expected in (
        (
            cohort.mode == "async",
            "cohort.mode",
            '"sync" with aggregation.groups: a buffer has the updates that arrive first, of whatever groups',
        ),
        (
            plan.privacy.correlated is not None,
            "privacy.correlated",
            "no value with aggregation.groups: a median is not linear, so no later round cancels the noise in it",
        ),
        (
            plan.aggregation.compression is not None,
            "aggregation.compression",
            "no compression with aggregation.groups: scales and residuals are made for the mean over all sites",
        ),
    ):
        if refused:
            yield _Refusal(field, expected, f"remove it, or {fix}")


def _check_compression(plan: Plan) -> Iterator[_Refusal]:
    """Refuse few bits where they would destroy the updates, save nothing, or break a guarantee."""
    aggregation, unit = plan.aggregation, plan.privacy.unit
    compression, bits = aggregation.compression, aggregation.ring_bits
    if unit == "site" and (compression is not None or bits == 8):
        levels, size = (2 ** (bits - 1) - 1) // plan.cohort.size(), 10**6
        inflated = math.sqrt(levels**2 + size / 4) / levels
        yield _Refusal(
            "aggregation.compression" if compression is not None else "aggregation.ring_bits",
            f'no compression with privacy.unit = "site": rounding an update to {levels} steps of its norm '
            f"makes the norm, and so the noise, {inflated:.4g} times as large for {size:,} parameters",
            "remove [aggregation.compression], and set aggregation.ring_bits = 32",
        )
    if compression is None:
        if bits == 8:
            yield _Refusal(
                "aggregation.ring_bits",
                "16 or 32 without [aggregation.compression]: with one bound for all values, 8 bits round most "
                "of them to noise",
                "add the section [aggregation.compression], or set aggregation.ring_bits = 16",
            )
        return
    if bits == 32:
        yield _Refusal(
            "aggregation.ring_bits",
            "8 or 16 with [aggregation.compression], which saves nothing with 32",
            "set aggregation.ring_bits = 8, or remove [aggregation.compression]",
        )
    if not SMALLEST_CLIP <= aggregation.bound <= LARGEST_CLIP:
        yield _Refusal(
            "aggregation.bound",
            f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:g} with [aggregation.compression]: the bounds of blocks are "
            "float32",
            "set aggregation.bound = 1.0",
        )
    if plan.cohort.mode == "async":
        yield _Refusal(
            "aggregation.compression",
            'no compression with cohort.mode = "async": scales are those of one round, and the updates of a '
            "buffer are of several",
            'remove [aggregation.compression], or set cohort.mode = "sync"',
        )
    if plan.model.adapter.scheme == "rolora":
        yield _Refusal(
            "model.adapter.scheme",
            "another scheme with [aggregation.compression]: rounding a rotated block would change the frozen "
            "factor",
            'set model.adapter.scheme = "ffa-lora", or remove [aggregation.compression]',
        )


def _check_balance(plan: Plan) -> Iterator[_Refusal]:
    """Refuse unequal steps where they would be charged, weigh twice or publish what data decides, or limits of them
    that expose a site."""
    local, unit = plan.local, plan.privacy.unit
    if local.balance == "fixed":
        return
    steps = local.steps
    for name, fewest, largest, why in (
        ("least_steps", -(-steps // WIDEST_BALANCE), steps, "a quarter of local.steps to local.steps"),
        ("most_steps", steps, WIDEST_BALANCE * steps, "local.steps to four times local.steps"),
    ):
        given = getattr(local, name)
        if given is not None and not fewest <= given <= largest:
            yield _Refusal(
                f"local.{name}",
                f"{fewest} to {largest}, {why}: a site of median speed takes local.steps",
                f"change local.{name} or local.steps",
            )
    least, most = local.step_limits()
    if most > WIDEST_BALANCE * least:
        raise PlanError(
            "local.most_steps",
            most,
            expected=f"at most {WIDEST_BALANCE * least}, four times local.least_steps: with a wider range a "
            "coordinator could let one site train almost alone",
            fix=f"lower local.most_steps, or raise local.least_steps to {-(-most // WIDEST_BALANCE)}",
        )
    if unit in ("record", "owner"):
        yield _Refusal(
            "local.balance",
            f'"fixed" with privacy.unit = "{unit}": each step is charged, and all sites are charged the same',
            'set local.balance = "fixed"',
        )
    if unit == "site" and local.balance == "dynamic":
        yield _Refusal(
            "local.balance",
            '"fixed" or "weighted" with privacy.unit = "site": the time that a site takes depends on its '
            "data, and the list of steps would publish it without a charge",
            'set local.balance = "weighted"',
        )
    if plan.aggregation.weighting != "uniform":
        yield _Refusal(
            "aggregation.weighting",
            f'"uniform" with local.balance = "{local.balance}": by tokens, a site with more steps would count '
            "for more",
            'set aggregation.weighting = "uniform"',
        )
    if plan.cohort.size() > LARGEST:
        yield _Refusal(
            "local.balance",
            f'"fixed" with a cohort of more than {LARGEST} sites: a message lists at most as many',
            'lower cohort.fraction, or set local.balance = "fixed"',
        )


def _check_optimizer(plan: Plan) -> Iterator[_Refusal]:
    """Refuse Muon where no parameter would take its steps, and scales of updates that nothing bounds."""
    local, scheme, compression = plan.local, plan.model.adapter.scheme, plan.aggregation.compression
    if local.optimizer == "muon" and scheme != "full":
        yield _Refusal(
            "local.optimizer",
            f'"adamw" with model.adapter.scheme = "{scheme}"; Muon is for matrices of hidden layers, and an '
            "adapter trains factors",
            'set local.optimizer = "adamw"',
        )
    if (
        local.optimizer == "sgd"
        and compression is not None
        and compression.first_scale is None
        and not local.clip_norm
    ):
        yield _Refusal(
            "aggregation.compression.first_scale",
            'a value with local.optimizer = "sgd" and local.clip_norm = 0: nothing else bounds the updates of '
            "round 1",
            "set local.clip_norm = 1.0, or aggregation.compression.first_scale",
        )


def _check_base_precision(plan: Plan) -> Iterator[_Refusal]:
    """Refuse a base in lower precision that is trained, or that would be computed with in another precision."""
    adapter = plan.model.adapter
    if adapter.base_precision == "float32":
        return
    if adapter.scheme == "full":
        yield _Refusal(
            "model.adapter.base_precision",
            '"float32" with model.adapter.scheme = "full", which trains every weight; a lower precision is '
            "only valid for a frozen base",
            'set model.adapter.scheme = "ffa-lora", or remove model.adapter.base_precision',
        )
    if plan.local.precision == "float32":
        yield _Refusal(
            "local.precision",
            f'"auto" or "bfloat16" with model.adapter.base_precision = "{adapter.base_precision}", with which '
            "arithmetic is in bfloat16",
            'set local.precision = "auto", or model.adapter.base_precision = "float32"',
        )


def _check_dataset(plan: Plan) -> Iterator[_Refusal]:
    """Refuse a ledger over runs that would not charge what is released."""
    simulation = plan.simulation
    if simulation.search is not None and simulation.noise_seed is not None:
        yield _Refusal(
            "simulation.noise_seed",
            "no value in a search: all trials would have the same noise, and their price is that of "
            "independent ones",
            "remove simulation.noise_seed",
        )
    if bool(simulation.ledger) != bool(simulation.dataset):
        name, other = ("ledger", "dataset") if simulation.dataset else ("dataset", "ledger")
        yield _Refusal(
            f"simulation.{name}",
            f"a value with simulation.{other}: a ledger over runs keeps the spending of a dataset by its name",
            f"set both, or remove simulation.{other}",
        )
    if not simulation.ledger:
        return
    if not Path(simulation.ledger).is_absolute():
        yield _Refusal(
            "simulation.ledger",
            "an absolute path: a run that is resumed in another folder would find another file",
            "write the whole path, or use --ledger, which completes it",
        )
    if simulation.noise_seed is not None:
        yield _Refusal(
            "simulation.noise_seed",
            "no value with simulation.ledger: noise from a declared seed protects nothing, and no charge "
            "would cover it",
            "remove simulation.noise_seed, or simulation.ledger and simulation.dataset",
        )


def _check_private(plan: Plan) -> Iterator[_Refusal]:
    """Refuse a plan that would not keep its guarantee, or that would release values that no ledger is charged for."""
    privacy, local = plan.privacy, plan.local
    given = [name for name in ("noise_multiplier", "target_epsilon") if getattr(privacy, name) is not None]
    if len(given) != 1:
        both = given or ["neither"]
        raise PlanError(
            "privacy",
            " and ".join(both),
            expected="exactly one of noise_multiplier and target_epsilon; each determines the other",
            fix="keep one of them"
            if given
            else "set one of them; `cloister budget` shows the epsilon or the noise",
        )
    if privacy.budget is not None and privacy.target_epsilon is not None:
        yield _Refusal(
            "privacy.budget",
            "no budget together with privacy.target_epsilon, which is the budget",
            "remove privacy.budget",
        )
    if plan.aggregation.weighting != "uniform":
        yield _Refusal(
            "aggregation.weighting",
            '"uniform" with a privacy unit; weights by tokens depend on the data, which breaks the '
            "sensitivity of the mean",
            'set aggregation.weighting = "uniform"',
        )
    if not plan.server.evaluation:
        yield _Refusal(
            "server.evaluation",
            'public records or "none" with a privacy unit; losses on the sites\' own records would be '
            "released without a charge to the ledger",
            _EVALUATED,
        )
    if plan.simulation.per_site:
        yield _Refusal(
            "simulation.per_site",
            "false with a privacy unit; each site's own losses and number of sequences would be released "
            "without a charge to the ledger",
            "remove simulation.per_site, or --per-site",
        )
    if privacy.dpsgd and privacy.sampling_rate is None:
        yield _Refusal(
            "privacy.sampling_rate",
            f"a value with {_STEPS}: the probability that a unit is in a batch",
            "set privacy.sampling_rate to the expected batch size divided by the number of units of a site",
        )
    if privacy.dpsgd and local.sampler == "shuffle":
        yield _Refusal(
            "local.sampler",
            f'"poisson" with {_STEPS}; the accountant assumes it',
            'set local.sampler = "auto"',
        )
    if not privacy.dpsgd and privacy.sampling_rate is not None:
        yield _Refusal(
            "privacy.sampling_rate",
            f"no value; only valid with {_STEPS}: cohorts are public, so sampling them amplifies nothing",
            "remove privacy.sampling_rate",
        )
    if privacy.unit == "owner" and not plan.data.owner:
        yield _Refusal(
            "data.owner",
            'the field that says who a record belongs to, with privacy.unit = "owner"',
            'set data.owner, such as "patient_id"',
        )
    if privacy.dpsgd and privacy.record == "window" and plan.data.format != "text":
        yield _Refusal(
            "privacy.record",
            f'"record" with data.format = "{plan.data.format}"; "window" is only valid with '
            'data.format = "text"',
            'set privacy.record = "record"',
        )
    if not privacy.dpsgd and plan.model.adapter.scheme == "rolora":
        yield _Refusal(
            "model.adapter.scheme",
            'another scheme with privacy.unit = "site"; the noise would change the frozen factor',
            'set model.adapter.scheme = "ffa-lora"',
        )
    if not privacy.dpsgd and not privacy.trusted_coordinator and not plan.aggregation.secure:
        yield _Refusal(
            "aggregation.secure",
            'true with privacy.unit = "site", unless the coordinator is trusted; the noise of one site alone '
            "does not protect its update",
            "set aggregation.secure = true, or privacy.trusted_coordinator = true if you do trust it",
        )
    if privacy.correlated is not None:
        yield from _check_correlated(plan, privacy.correlated)


def _check_correlated(plan: Plan, correlated: CorrelatedSection) -> Iterator[_Refusal]:
    """Refuse correlated noise that would not cancel, or cohorts that do not keep to the pattern that it covers."""
    privacy, cohort, rounds = plan.privacy, plan.cohort, plan.run.rounds
    if not privacy.trusted_coordinator:
        yield _Refusal(
            "privacy.trusted_coordinator",
            "true with privacy.correlated: a site that drops out would take its part of the noise along, and "
            "later rounds would cancel noise that was never added",
            "set privacy.trusted_coordinator = true if you do trust it, or remove privacy.correlated",
        )
    if not plan.aggregation.secure:
        yield _Refusal(
            "aggregation.secure",
            "true with privacy.correlated: the cohorts are cut from the roster, and a site that answers twice "
            "in a round, as it may in clear, would be in two sums with the same noise",
            "set aggregation.secure = true, or remove privacy.correlated",
        )
    if privacy.adaptive is not None:
        yield _Refusal(
            "privacy.adaptive",
            "no value with privacy.correlated: noise of one round is cancelled by that of later ones only if "
            "all have the same clipping norm",
            "remove privacy.adaptive or privacy.correlated",
        )
    turns, left = divmod(cohort.sites, cohort.size())
    if left:
        yield _Refusal(
            "cohort.fraction",
            f"cohorts that take the {cohort.sites} sites in turn, with privacy.correlated; cohorts of "
            f"{cohort.size()} leave {left} sites over",
            "choose cohort.sites and cohort.fraction so that the cohort's size divides the number of sites",
        )
    if turns == 1:
        yield _Refusal(
            "cohort.fraction",
            "less than 1 with privacy.correlated, which gains nothing where each site is in every round",
            "lower cohort.fraction, or remove privacy.correlated",
        )
    if correlated.separation > turns:
        yield _Refusal(
            "privacy.correlated.separation",
            f"at most {turns}, because {cohort.sites} sites in cohorts of {cohort.size()} take part every "
            f"{turns} rounds",
            f"set privacy.correlated.separation = {turns}, or lower cohort.fraction",
        )
    times = -(-rounds // turns)
    if times > correlated.participations:
        yield _Refusal(
            "privacy.correlated.participations",
            f"at least {times}, because some sites take part {times} times in {rounds} rounds",
            f"set privacy.correlated.participations = {times}, or run.rounds = {correlated.participations * turns}",
        )
    if rounds > MOST_CORRELATED:
        yield _Refusal(
            "run.rounds",
            f"at most {MOST_CORRELATED} with privacy.correlated, for which its matrix is computed in seconds",
            "lower run.rounds, or remove privacy.correlated",
        )


def _check_secure(plan: Plan) -> Iterator[_Refusal]:
    """Refuse a secure sum over too few or too many sites, or with a threshold that the survivors cannot meet."""
    if plan.cohort.sites > LARGEST:
        yield _Refusal(
            "cohort.sites",
            f"at most {LARGEST} sites with aggregation.secure = true",
            "lower cohort.sites, or set aggregation.secure = false if the coordinator may see every update",
        )
    if plan.aggregation.groups > 1:
        yield from _check_secure_groups(plan)
    n = plan.cohort.size()
    if n < SMALLEST_COHORT:
        field = "cohort.sites" if plan.cohort.sites < SMALLEST_COHORT else "cohort.fraction"
        raise PlanError(
            field,
            plan.cohort.fraction if field == "cohort.fraction" else n,
            expected=f"a cohort of at least {SMALLEST_COHORT} sites with aggregation.secure = true, not {n}; "
            "each of two sites could compute the other's update from the sum",
            fix=f"raise {field}, or set aggregation.secure = false if the coordinator may see every update",
        )
    try:
        plan.threshold(n)
    except ParameterError as error:
        raise PlanError(error.field, error.value, expected=error.expected, fix=error.fix) from error


def _check_secure_groups(plan: Plan) -> Iterator[_Refusal]:
    """Refuse groups that are too small for a secure sum of their own, or in which too many sites may collude."""
    groups, sites = plan.aggregation.groups, plan.cohort.sites
    for n in plan.summed():
        if (why := _insecure(plan, n)) is not None:
            fewer = next((count for count in range(groups - 1, 2, -1) if _secure_in(plan, count)), None)
            instead = "remove aggregation.groups" if fewer is None else f"set aggregation.groups = {fewer}"
            yield _Refusal(
                "aggregation.groups",
                f"groups that are each a secure sum of their own; of a group of {n} that is drawn from the "
                f"{sites} sites, up to {plan.tolerance().colluders_in(sites, n)} may collude: {why}",
                f"{instead}, or lower aggregation.colluders",
            )


def _insecure(plan: Plan, n: int) -> str | None:
    """Why a drawn group of n sites is no secure sum; None if it is one."""
    if n < SMALLEST_COHORT:
        return f"expected at least {SMALLEST_COHORT} sites in each group"
    try:
        plan.threshold(n)
    except ParameterError as error:
        return f"expected {error.expected}"
    return None


def _secure_in(plan: Plan, groups: int) -> bool:
    """Whether each of so many groups is a secure sum."""
    least, more = divmod(plan.cohort.size(), groups)
    return all(_insecure(plan, n) is None for n in range(least, least + 1 + bool(more)))
