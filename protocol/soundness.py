"""The only ways to a plan: read it, then check that its sections agree with each other.

`load`, `parse` and `from_json` return a sound `Plan` or raise `PlanError` with the field, its value, what was expected
and the fix. `protocol/settings.py` checks each field on its own; the checks here are across sections: settings that
each section allows, but that together break a guarantee, cannot run, or have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cloister.protocol.errors import ParameterError, PlanError
from cloister.protocol.plan import (
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
    LocalSection,
    Plan,
    PrivacySection,
)
from cloister.protocol.settings import Section, Settings
from cloister.protocol.threshold import LARGEST

_SETTINGS = Settings(Plan, "plan", PlanError)
_STEPS = 'privacy.unit = "record" or "owner"'


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
    """Refuse settings that each section allows but that contradict each other."""
    sites, bits = plan.cohort.size(), plan.aggregation.ring_bits
    if sites * 2 > 2 ** (bits - 1) - 1:
        raise PlanError(
            "aggregation.ring_bits",
            bits,
            expected=f"a ring in which the sum of {sites} sites cannot overflow",
            fix="set aggregation.ring_bits = 32"
            if plan.aggregation.compression is None
            else "set aggregation.ring_bits = 16, or lower cohort.fraction",
        )
    if plan.aggregation.temperature != 1 and plan.aggregation.weighting != "tokens":
        raise PlanError(
            "aggregation.temperature",
            plan.aggregation.temperature,
            expected='no value; only valid with aggregation.weighting = "tokens", which no privacy unit allows',
            fix='remove aggregation.temperature, or set aggregation.weighting = "tokens"',
        )
    _check_groups(plan)
    _check_compression(plan)
    _check_mode(plan)
    _check_task(plan)
    if plan.aggregation.secure:
        _check_secure(plan)
    if plan.privacy.unit == "none":
        _check_not_private(plan)
    else:
        _check_private(plan)
    if (plan.server.evaluation == SIMULATED_PUBLIC) != (plan.simulation.public > 0):
        raise PlanError(
            "simulation.public",
            plan.simulation.public,
            expected=f'more than 0 if and only if server.evaluation = "{SIMULATED_PUBLIC}", not '
            f"{plan.server.evaluation!r}",
            fix=f'set server.evaluation = "{SIMULATED_PUBLIC}", or simulation.public = 0'
            if plan.simulation.public
            else "set simulation.public = 0.1, or other records in server.evaluation",
        )
    if plan.model.config and not plan.model.name.startswith("builtin:"):
        raise PlanError(
            "model.config",
            dict(plan.model.config),
            expected="no value; only valid with a builtin: model: a loaded model has its own configuration",
            fix="remove [model.config], or set model.name to a builtin: model",
        )
    if plan.local.warmup_steps >= plan.run.rounds * plan.local.steps and plan.local.warmup_steps:
        raise PlanError(
            "local.warmup_steps",
            plan.local.warmup_steps,
            expected=f"fewer than the run's {plan.run.rounds * plan.local.steps} local steps",
            fix="lower local.warmup_steps or raise run.rounds",
        )
    if plan.model.adapter.scheme == "rolora" and plan.local.optimizer_state == "keep":
        raise PlanError(
            "local.optimizer_state",
            "keep",
            expected='"reset" with model.adapter.scheme = "rolora", which trains another factor every round',
            fix='set local.optimizer_state = "reset"',
        )
    if plan.local.optimizer_state == "keep" and plan.aggregation.secure and plan.drawn:
        raise PlanError(
            "local.optimizer_state",
            "keep",
            expected='"reset" with aggregation.secure = true where each sum is over a part of the federation '
            "(cohort.fraction below 1, or aggregation.groups): all sites of a masked sum begin with what they carry "
            "from the same rounds, and with nothing where they took part in different ones, so it would never be used",
            fix='set local.optimizer_state = "reset", or cohort.fraction = 1 without aggregation.groups',
        )
    _check_balance(plan)
    _check_muon(plan)
    _check_sgd(plan)
    _check_base_precision(plan)
    if plan.model.adapter.scheme == "rolora" and plan.server.optimizer != "fedavg":
        raise PlanError(
            "server.optimizer",
            plan.server.optimizer,
            expected='"fedavg" with model.adapter.scheme = "rolora"; momentum would change the frozen factor',
            fix='set server.optimizer = "fedavg"',
        )
    if plan.data.held_out == 0 and not plan.server.evaluation:
        raise PlanError(
            "data.held_out",
            0.0,
            expected="more than 0 if server.evaluation is empty, because sites then evaluate on held-out records",
            fix='set data.held_out = 0.1, or set server.evaluation to public records or "none"',
        )
    if plan.server.gate.loss is not None and plan.server.evaluation in ("", NO_EVALUATION):
        raise PlanError(
            "server.gate.loss",
            plan.server.gate.loss,
            expected="no value unless server.evaluation names public records: the gate compares losses on them",
            fix="remove server.gate.loss, or name public records in server.evaluation",
        )
    if plan.server.evaluation == NO_EVALUATION and plan.server.evaluation_sequences is not None:
        raise PlanError(
            "server.evaluation_sequences",
            plan.server.evaluation_sequences,
            expected=f'no value with server.evaluation = "{NO_EVALUATION}"',
            fix="remove server.evaluation_sequences, or name public records in server.evaluation",
        )
    _check_poison(plan)
    _check_dataset(plan)
    if sum(profile.share for profile in plan.simulation.profiles) > 1 + 1e-9:
        raise PlanError(
            "simulation.profiles",
            sum(profile.share for profile in plan.simulation.profiles),
            expected="shares that add up to at most 1",
            fix="lower the shares",
        )


def _check_poison(plan: Plan) -> None:
    """Refuse poison that changes nothing, or under which an epsilon would not hold."""
    poison = plan.faults.poison
    if poison is None:
        return
    if poison.kind == "label-flip" and plan.privacy.dpsgd:
        raise PlanError(
            "faults.poison.kind",
            "label-flip",
            expected=f'another kind with privacy.unit = "{plan.privacy.unit}": it gives a record the answer of the '
            "next one, so a record that is added or removed changes others, and the stated epsilon would not hold",
            fix='set faults.poison.kind = "backdoor", or privacy.unit = "site"',
        )
    if poison.kind == "label-flip" and plan.data.format == "text" and plan.data.task != "classify":
        raise PlanError(
            "faults.poison.kind",
            "label-flip",
            expected='another kind with data.format = "text", whose records have no answers',
            fix='set faults.poison.kind = "backdoor", or use prompts or messages',
        )
    if poison.kind == "backdoor" and plan.data.outcomes and poison.target not in plan.data.outcomes:
        names, what = ("classes", "label") if plan.data.classes else ("choices", "completion")
        raise PlanError(
            "faults.poison.target",
            poison.target,
            expected=f"one of data.{names}: a record with another {what} is not used",
            fix=f'set faults.poison.target = "{plan.data.outcomes[0]}"',
        )
    if poison.kind == "scale" and poison.factor == 1:
        raise PlanError(
            "faults.poison.factor",
            1.0,
            expected='another number with faults.poison.kind = "scale"; 1 changes nothing',
            fix="set faults.poison.factor = 10",
        )


def _check_mode(plan: Plan) -> None:
    """Refuse asynchronous rounds that are not sound or would wait for all sites, and their settings without them."""
    cohort = plan.cohort
    if cohort.mode == "sync":
        for name in ("buffer", "staleness"):
            if getattr(cohort, name) is not None:
                raise PlanError(
                    f"cohort.{name}",
                    getattr(cohort, name),
                    expected='no value; only valid with cohort.mode = "async"',
                    fix=f'set cohort.mode = "async", or remove cohort.{name}',
                )
        return
    if plan.aggregation.secure:
        raise PlanError(
            "aggregation.secure",
            True,
            expected='false with cohort.mode = "async": asynchronous rounds are refused under the secure sum, because '
            "the coordinator would choose which updates are summed, and masks of sites with different models do not "
            "cancel",
            fix='set cohort.mode = "sync", or aggregation.secure = false if the coordinator may see every update',
        )
    if plan.privacy.unit != "none":
        raise PlanError(
            "privacy.unit",
            plan.privacy.unit,
            expected='"none" with cohort.mode = "async": the time that a site takes depends on its data and decides '
            "which updates are summed, and by which weight, which no charge covers",
            fix='set cohort.mode = "sync", or privacy.unit = "none"',
        )
    if cohort.fraction != 1:
        raise PlanError(
            "cohort.fraction",
            cohort.fraction,
            expected='1 with cohort.mode = "async", where all sites train all the time',
            fix="remove cohort.fraction; cohort.buffer is the number of updates in a round",
        )
    if cohort.quorum != CohortSection().quorum:
        raise PlanError(
            "cohort.quorum",
            cohort.quorum,
            expected='no value with cohort.mode = "async", where a round has cohort.buffer updates',
            fix="remove cohort.quorum, or set cohort.buffer",
        )
    if cohort.needed() > cohort.sites:
        raise PlanError(
            "cohort.buffer",
            cohort.buffer,
            expected=f"at most {cohort.sites}, the number of sites: a site has one update of each model",
            fix="lower cohort.buffer",
        )
    if plan.local.balance != "fixed":
        raise PlanError(
            "local.balance",
            plan.local.balance,
            expected='"fixed" with cohort.mode = "async", where no site waits for slower ones',
            fix='set local.balance = "fixed"',
        )
    if not plan.server.evaluation:
        raise PlanError(
            "server.evaluation",
            "",
            expected='public records or "none" with cohort.mode = "async": an evaluation at the sites would wait for '
            "the slowest one",
            fix='set server.evaluation to public records, or to "none"',
        )
    if plan.model.adapter.scheme == "rolora":
        raise PlanError(
            "model.adapter.scheme",
            "rolora",
            expected='another scheme with cohort.mode = "async": a stale update may be of the factor that the round '
            "does not train",
            fix='set model.adapter.scheme = "ffa-lora"',
        )


def _check_task(plan: Plan) -> None:
    """Refuse a classifier without two different classes or on data without one label for a text; classes without it;
    choices on data without completions."""
    data, privacy = plan.data, plan.privacy
    if data.choices:
        if data.task != "generate" or data.format != "prompt":
            raise PlanError(
                "data.choices",
                ", ".join(data.choices),
                expected='no value; only valid with data.task = "generate" and data.format = "prompt", whose '
                "completions are the choices",
                fix='set data.format = "prompt", or remove data.choices',
            )
        _check_names("choices", data.choices)
    if data.task != "classify":
        for name, default in (("classes", ()), ("class_weights", ()), ("label_field", "label")):
            if getattr(data, name) != default:
                raise PlanError(
                    f"data.{name}",
                    getattr(data, name),
                    expected='no value; only valid with data.task = "classify"',
                    fix=f'set data.task = "classify", or remove data.{name}',
                )
        return
    if data.format != "text":
        raise PlanError(
            "data.format",
            data.format,
            expected='"text" with data.task = "classify": a text has one label',
            fix='set data.format = "text", data.text_field and data.label_field',
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
        raise PlanError(
            "privacy.windows",
            privacy.windows,
            expected='no value with data.task = "classify", which uses the first data.sequence_length tokens of a text',
            fix="remove privacy.windows",
        )
    if privacy.dpsgd and privacy.record == "window":
        raise PlanError(
            "privacy.record",
            "window",
            expected='"record" with data.task = "classify": the label is of the whole text',
            fix='set privacy.record = "record"',
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


def _check_groups(plan: Plan) -> None:
    """Refuse groups whose median is not robust, and what is only sound for one mean over all sites of a round."""
    groups, cohort, fix = plan.aggregation.groups, plan.cohort, "remove aggregation.groups"
    if groups == 1:
        return
    if groups == 2:
        raise PlanError(
            "aggregation.groups",
            groups,
            expected="3 or more: the median of two means is their mean, which one poisoned site moves",
            fix="set aggregation.groups = 3, or remove it" if cohort.size() > 2 else fix,
        )
    if groups > MOST_GROUPS and cohort.size() >= MOST_GROUPS:
        raise PlanError(
            "aggregation.groups",
            groups,
            expected=f"at most {MOST_GROUPS}: the time of the median grows with the square of their number",
            fix="lower aggregation.groups",
        )
    if groups > cohort.size():
        raise PlanError(
            "aggregation.groups",
            groups,
            expected=f"at most {cohort.size()}, the sites of a round: each group has at least one",
            fix=f"{'lower' if cohort.size() > 2 else 'remove'} aggregation.groups, or raise "
            f"{'cohort.sites' if cohort.fraction == 1 else 'cohort.fraction'}",
        )
    for refused, field, value, expected in (
        (
            cohort.mode == "async",
            "cohort.mode",
            cohort.mode,
            '"sync" with aggregation.groups: a buffer has the updates that arrive first, of whatever groups',
        ),
        (
            plan.privacy.correlated is not None,
            "privacy.correlated",
            "set",
            "no value with aggregation.groups: a median is not linear, so no later round cancels the noise in it",
        ),
        (
            plan.aggregation.compression is not None,
            "aggregation.compression",
            "set",
            "no compression with aggregation.groups: scales and remainders are made for the mean over all sites",
        ),
    ):
        if refused:
            raise PlanError(field, value, expected=expected, fix=f"remove it, or {fix}")


def _check_compression(plan: Plan) -> None:
    """Refuse few bits where they would destroy the updates, save nothing, or break a guarantee."""
    aggregation, unit = plan.aggregation, plan.privacy.unit
    compression, bits = aggregation.compression, aggregation.ring_bits
    if unit == "site" and (compression is not None or bits == 8):
        levels, size = (2 ** (bits - 1) - 1) // plan.cohort.size(), 10**6
        inflated = math.sqrt(levels**2 + size / 4) / levels
        raise PlanError(
            "aggregation.compression" if compression is not None else "aggregation.ring_bits",
            "set" if compression is not None else bits,
            expected=f'no compression with privacy.unit = "site": rounding an update to {levels} steps of its norm '
            f"makes the norm, and so the noise, {inflated:.4g} times as large for {size:,} parameters",
            fix="remove [aggregation.compression], and set aggregation.ring_bits = 32",
        )
    if compression is None:
        if bits == 8:
            raise PlanError(
                "aggregation.ring_bits",
                8,
                expected="16 or 32 without [aggregation.compression]: with one bound for all values, 8 bits round most "
                "of them to noise",
                fix="add the section [aggregation.compression], or set aggregation.ring_bits = 16",
            )
        return
    if bits == 32:
        raise PlanError(
            "aggregation.ring_bits",
            32,
            expected="8 or 16 with [aggregation.compression], which saves nothing with 32",
            fix="set aggregation.ring_bits = 8, or remove [aggregation.compression]",
        )
    if not SMALLEST_CLIP <= aggregation.bound <= LARGEST_CLIP:
        raise PlanError(
            "aggregation.bound",
            aggregation.bound,
            expected=f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:g} with [aggregation.compression]: the bounds of blocks are "
            "float32",
            fix="set aggregation.bound = 1.0",
        )
    if plan.cohort.mode == "async":
        raise PlanError(
            "aggregation.compression",
            "set",
            expected='no compression with cohort.mode = "async": scales are those of one round, and the updates of a '
            "buffer are of several",
            fix='remove [aggregation.compression], or set cohort.mode = "sync"',
        )
    if plan.model.adapter.scheme == "rolora":
        raise PlanError(
            "model.adapter.scheme",
            "rolora",
            expected="another scheme with [aggregation.compression]: rounding a rotated block would change the frozen "
            "factor",
            fix='set model.adapter.scheme = "ffa-lora", or remove [aggregation.compression]',
        )


def _check_balance(plan: Plan) -> None:
    """Refuse unequal steps where they would be charged, weigh twice or publish what data decides, or limits of them
    that expose a site."""
    local, unit = plan.local, plan.privacy.unit
    if local.balance == "fixed":
        for name in ("least_steps", "most_steps"):
            if getattr(local, name) is not None:
                raise PlanError(
                    f"local.{name}",
                    getattr(local, name),
                    expected='no value; only valid with local.balance = "weighted" or "dynamic"',
                    fix=f'set local.balance, or remove local.{name}; with "fixed" each site takes local.steps',
                )
        return
    steps = local.steps
    for name, fewest, largest, why in (
        ("least_steps", -(-steps // WIDEST_BALANCE), steps, "a quarter of local.steps to local.steps"),
        ("most_steps", steps, WIDEST_BALANCE * steps, "local.steps to four times local.steps"),
    ):
        given = getattr(local, name)
        if given is not None and not fewest <= given <= largest:
            raise PlanError(
                f"local.{name}",
                given,
                expected=f"{fewest} to {largest}, {why}: a site of median speed takes local.steps",
                fix=f"change local.{name} or local.steps",
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
        raise PlanError(
            "local.balance",
            local.balance,
            expected=f'"fixed" with privacy.unit = "{unit}": each step is charged, and all sites are charged the same',
            fix='set local.balance = "fixed"',
        )
    if unit == "site" and local.balance == "dynamic":
        raise PlanError(
            "local.balance",
            "dynamic",
            expected='"fixed" or "weighted" with privacy.unit = "site": the time that a site takes depends on its '
            "data, and the list of steps would publish it without a charge",
            fix='set local.balance = "weighted"',
        )
    if plan.aggregation.weighting != "uniform":
        raise PlanError(
            "aggregation.weighting",
            plan.aggregation.weighting,
            expected=f'"uniform" with local.balance = "{local.balance}": by tokens, a site with more steps would count '
            "for more",
            fix='set aggregation.weighting = "uniform"',
        )
    if plan.cohort.size() > LARGEST:
        raise PlanError(
            "local.balance",
            local.balance,
            expected=f'"fixed" with a cohort of more than {LARGEST} sites: a message lists at most as many',
            fix='lower cohort.fraction, or set local.balance = "fixed"',
        )


def _check_muon(plan: Plan) -> None:
    """Refuse Muon where no parameter would take its steps, and its momentum without it."""
    local, scheme = plan.local, plan.model.adapter.scheme
    if local.optimizer == "muon" and scheme != "full":
        raise PlanError(
            "local.optimizer",
            "muon",
            expected=f'"adamw" with model.adapter.scheme = "{scheme}"; Muon is for matrices of hidden layers, and an '
            "adapter trains factors",
            fix='set local.optimizer = "adamw"',
        )
    if local.optimizer != "muon" and local.momentum != LocalSection().momentum:
        raise PlanError(
            "local.momentum",
            local.momentum,
            expected='no value; only valid with local.optimizer = "muon"',
            fix='remove local.momentum, or set local.optimizer = "muon"',
        )


def _check_sgd(plan: Plan) -> None:
    """Refuse settings of other optimizers, which have no effect on SGD, and scales of updates that nothing bounds."""
    local, compression = plan.local, plan.aggregation.compression
    if local.optimizer != "sgd":
        return
    default = LocalSection()
    for name in ("betas", "optimizer_state"):
        if getattr(local, name) != getattr(default, name):
            raise PlanError(
                f"local.{name}",
                getattr(local, name),
                expected='no value with local.optimizer = "sgd", which keeps no moments',
                fix=f'remove local.{name}, or set local.optimizer = "adamw"',
            )
    if compression is not None and compression.first_scale is None and not local.clip_norm:
        raise PlanError(
            "aggregation.compression.first_scale",
            expected='a value with local.optimizer = "sgd" and local.clip_norm = 0: nothing else bounds the updates of '
            "round 1",
            fix="set local.clip_norm = 1.0, or aggregation.compression.first_scale",
        )


def _check_base_precision(plan: Plan) -> None:
    """Refuse a base in lower precision that is trained, or that would be computed with in another precision."""
    adapter = plan.model.adapter
    if adapter.base_precision == "float32":
        return
    if adapter.scheme == "full":
        raise PlanError(
            "model.adapter.base_precision",
            adapter.base_precision,
            expected='"float32" with model.adapter.scheme = "full", which trains every weight; a lower precision is '
            "only valid for a frozen base",
            fix='set model.adapter.scheme = "ffa-lora", or remove model.adapter.base_precision',
        )
    if plan.local.precision == "float32":
        raise PlanError(
            "local.precision",
            "float32",
            expected=f'"auto" or "bfloat16" with model.adapter.base_precision = "{adapter.base_precision}", with which '
            "arithmetic is in bfloat16",
            fix='set local.precision = "auto", or model.adapter.base_precision = "float32"',
        )


def _check_dataset(plan: Plan) -> None:
    """Refuse a ledger over runs that would not charge what is released."""
    simulation = plan.simulation
    if simulation.search is not None:
        _check_search(plan)
    if bool(simulation.ledger) != bool(simulation.dataset):
        name, other = ("ledger", "dataset") if simulation.dataset else ("dataset", "ledger")
        raise PlanError(
            f"simulation.{name}",
            "",
            expected=f"a value with simulation.{other}: a ledger over runs keeps the spending of a dataset by its name",
            fix=f"set both, or remove simulation.{other}",
        )
    if simulation.greatest_epsilon is not None and not simulation.ledger:
        raise PlanError(
            "simulation.greatest_epsilon",
            simulation.greatest_epsilon,
            expected="no value; only valid with simulation.ledger, over whose runs it is a limit",
            fix="set simulation.ledger and simulation.dataset, or privacy.budget for this run alone",
        )
    if not simulation.ledger:
        return
    if not Path(simulation.ledger).is_absolute():
        raise PlanError(
            "simulation.ledger",
            simulation.ledger,
            expected="an absolute path: a run that is resumed in another folder would find another file",
            fix="write the whole path, or use --ledger, which completes it",
        )
    if plan.privacy.unit == "none":
        raise PlanError(
            "simulation.ledger",
            simulation.ledger,
            expected="no value; only valid with a privacy unit, because nothing else is charged",
            fix='set privacy.unit = "record", "owner" or "site", or remove simulation.ledger and simulation.dataset',
        )
    if simulation.noise_seed is not None:
        raise PlanError(
            "simulation.noise_seed",
            simulation.noise_seed,
            expected="no value with simulation.ledger: noise from a declared seed protects nothing, and no charge "
            "would cover it",
            fix="remove simulation.noise_seed, or simulation.ledger and simulation.dataset",
        )


def _check_search(plan: Plan) -> None:
    """Refuse a trial whose search cannot have the price of its best trial alone."""
    if plan.privacy.unit == "none":
        raise PlanError(
            "simulation.search",
            "set",
            expected="no value; only valid with a privacy unit, because nothing else is charged",
            fix="remove simulation.search",
        )
    if plan.simulation.noise_seed is not None:
        raise PlanError(
            "simulation.noise_seed",
            plan.simulation.noise_seed,
            expected="no value in a search: all trials would have the same noise, and their price is that of "
            "independent ones",
            fix="remove simulation.noise_seed",
        )


def _check_not_private(plan: Plan) -> None:
    """Refuse privacy settings without a privacy unit: they have no effect, but suggest a guarantee."""
    default = PrivacySection()
    for name in PrivacySection.model_fields:
        value = getattr(plan.privacy, name)
        if value != getattr(default, name):
            raise PlanError(
                f"privacy.{name}",
                value if not isinstance(value, Section) else "set",
                expected="no value; only valid with a privacy unit",
                fix=f'set privacy.unit = "record", "owner" or "site", or remove privacy.{name}',
            )
    if plan.data.owner:
        raise _owner_without_unit(plan)
    if plan.local.sampler == "poisson":
        raise PlanError(
            "local.sampler",
            "poisson",
            expected=f'"shuffle" or "auto"; "poisson" is only valid with {_STEPS}',
            fix='set local.sampler = "auto"',
        )


def _check_private(plan: Plan) -> None:
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
        raise PlanError(
            "privacy.budget",
            privacy.budget,
            expected="no budget together with privacy.target_epsilon, which is the budget",
            fix="remove privacy.budget",
        )
    if plan.aggregation.weighting != "uniform":
        raise PlanError(
            "aggregation.weighting",
            plan.aggregation.weighting,
            expected='"uniform" with a privacy unit; weights by tokens depend on the data, which breaks the '
            "sensitivity of the mean",
            fix='set aggregation.weighting = "uniform"',
        )
    if not plan.server.evaluation:
        raise PlanError(
            "server.evaluation",
            "",
            expected='public records or "none" with a privacy unit; losses on the sites\' own records would be '
            "released without a charge to the ledger",
            fix='set server.evaluation to public records, or to "none"',
        )
    if plan.simulation.per_site:
        raise PlanError(
            "simulation.per_site",
            True,
            expected="false with a privacy unit; each site's own losses and number of sequences would be released "
            "without a charge to the ledger",
            fix="remove simulation.per_site, or --per-site",
        )
    if privacy.dpsgd and privacy.sampling_rate is None:
        raise PlanError(
            "privacy.sampling_rate",
            expected=f"a value with {_STEPS}: the probability that a unit is in a batch",
            fix="set privacy.sampling_rate to the expected batch size divided by the number of units of a site",
        )
    if privacy.dpsgd and local.sampler == "shuffle":
        raise PlanError(
            "local.sampler",
            "shuffle",
            expected=f'"poisson" with {_STEPS}; the accountant assumes it',
            fix='set local.sampler = "auto"',
        )
    if not privacy.dpsgd and local.sampler == "poisson":
        raise PlanError(
            "local.sampler",
            "poisson",
            expected=f'"shuffle" or "auto"; "poisson" is only valid with {_STEPS}',
            fix='set local.sampler = "auto"',
        )
    if not privacy.dpsgd and privacy.sampling_rate is not None:
        raise PlanError(
            "privacy.sampling_rate",
            privacy.sampling_rate,
            expected=f"no value; only valid with {_STEPS}: cohorts are public, so sampling them amplifies nothing",
            fix="remove privacy.sampling_rate",
        )
    for name, default in (
        ("record", "record"),
        ("windows", 4),
        ("method", "auto"),
    ):
        if not privacy.dpsgd and getattr(privacy, name) != default:
            raise PlanError(
                f"privacy.{name}",
                getattr(privacy, name),
                expected=f"no value; only valid with {_STEPS}",
                fix=f"remove privacy.{name}",
            )
    if privacy.unit == "owner" and not plan.data.owner:
        raise PlanError(
            "data.owner",
            "",
            expected='the field that says who a record belongs to, with privacy.unit = "owner"',
            fix='set data.owner, such as "patient_id"',
        )
    if privacy.unit != "owner" and plan.data.owner:
        raise _owner_without_unit(plan)
    if privacy.unit != "owner" and privacy.records != 8:
        raise PlanError(
            "privacy.records",
            privacy.records,
            expected='no value; only valid with privacy.unit = "owner"',
            fix="remove privacy.records",
        )
    if privacy.dpsgd and privacy.record == "window" and plan.data.format != "text":
        raise PlanError(
            "privacy.record",
            "window",
            expected=f'"record" with data.format = "{plan.data.format}"; "window" is only valid with '
            'data.format = "text"',
            fix='set privacy.record = "record"',
        )
    if not privacy.dpsgd and plan.model.adapter.scheme == "rolora":
        raise PlanError(
            "model.adapter.scheme",
            "rolora",
            expected='another scheme with privacy.unit = "site"; the noise would change the frozen factor',
            fix='set model.adapter.scheme = "ffa-lora"',
        )
    if privacy.dpsgd and (privacy.trusted_coordinator or privacy.adaptive is not None):
        name = "trusted_coordinator" if privacy.trusted_coordinator else "adaptive"
        raise PlanError(
            f"privacy.{name}",
            "set",
            expected='no value; only valid with privacy.unit = "site"',
            fix=f"remove privacy.{name}",
        )
    if not privacy.dpsgd and not privacy.trusted_coordinator and not plan.aggregation.secure:
        raise PlanError(
            "aggregation.secure",
            False,
            expected='true with privacy.unit = "site", unless the coordinator is trusted; the noise of one site alone '
            "does not protect its update",
            fix="set aggregation.secure = true, or privacy.trusted_coordinator = true if you do trust it",
        )
    if privacy.correlated is not None:
        _check_correlated(plan, privacy.correlated)


def _check_correlated(plan: Plan, correlated: CorrelatedSection) -> None:
    """Refuse correlated noise that would not cancel, or cohorts that do not keep to the pattern that it covers."""
    privacy, cohort, rounds = plan.privacy, plan.cohort, plan.run.rounds
    if privacy.unit != "site":
        raise PlanError(
            "privacy.correlated",
            "set",
            expected='no value; only valid with privacy.unit = "site"',
            fix="remove privacy.correlated",
        )
    if not privacy.trusted_coordinator:
        raise PlanError(
            "privacy.trusted_coordinator",
            False,
            expected="true with privacy.correlated: a site that drops out would take its part of the noise along, and "
            "later rounds would cancel noise that was never added",
            fix="set privacy.trusted_coordinator = true if you do trust it, or remove privacy.correlated",
        )
    if not plan.aggregation.secure:
        raise PlanError(
            "aggregation.secure",
            False,
            expected="true with privacy.correlated: the cohorts are cut from the roster, and a site that answers twice "
            "in a round, as it may in clear, would be in two sums with the same noise",
            fix="set aggregation.secure = true, or remove privacy.correlated",
        )
    if privacy.adaptive is not None:
        raise PlanError(
            "privacy.adaptive",
            "set",
            expected="no value with privacy.correlated: noise of one round is cancelled by that of later ones only if "
            "all have the same clipping norm",
            fix="remove privacy.adaptive or privacy.correlated",
        )
    turns, left = divmod(cohort.sites, cohort.size())
    if left:
        raise PlanError(
            "cohort.fraction",
            cohort.fraction,
            expected=f"cohorts that take the {cohort.sites} sites in turn, with privacy.correlated; cohorts of "
            f"{cohort.size()} leave {left} sites over",
            fix="choose cohort.sites and cohort.fraction so that the cohort's size divides the number of sites",
        )
    if turns == 1:
        raise PlanError(
            "cohort.fraction",
            cohort.fraction,
            expected="less than 1 with privacy.correlated, which gains nothing where each site is in every round",
            fix="lower cohort.fraction, or remove privacy.correlated",
        )
    if correlated.separation > turns:
        raise PlanError(
            "privacy.correlated.separation",
            correlated.separation,
            expected=f"at most {turns}, because {cohort.sites} sites in cohorts of {cohort.size()} take part every "
            f"{turns} rounds",
            fix=f"set privacy.correlated.separation = {turns}, or lower cohort.fraction",
        )
    times = -(-rounds // turns)
    if times > correlated.participations:
        raise PlanError(
            "privacy.correlated.participations",
            correlated.participations,
            expected=f"at least {times}, because some sites take part {times} times in {rounds} rounds",
            fix=f"set privacy.correlated.participations = {times}, or run.rounds = {correlated.participations * turns}",
        )
    if rounds > MOST_CORRELATED:
        raise PlanError(
            "run.rounds",
            rounds,
            expected=f"at most {MOST_CORRELATED} with privacy.correlated, for which its matrix is computed in seconds",
            fix="lower run.rounds, or remove privacy.correlated",
        )


def _owner_without_unit(plan: Plan) -> PlanError:
    return PlanError(
        "data.owner",
        plan.data.owner,
        expected='no value; only valid with privacy.unit = "owner"',
        fix='set privacy.unit = "owner", or remove data.owner',
    )


def _check_secure(plan: Plan) -> None:
    """Refuse a secure sum over too few or too many sites, or with a threshold that the survivors cannot meet."""
    if plan.cohort.sites > LARGEST:
        raise PlanError(
            "cohort.sites",
            plan.cohort.sites,
            expected=f"at most {LARGEST} sites with aggregation.secure = true",
            fix="lower cohort.sites, or set aggregation.secure = false if the coordinator may see every update",
        )
    if plan.aggregation.groups > 1:
        _check_secure_groups(plan)
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


def _check_secure_groups(plan: Plan) -> None:
    """Refuse groups that are too small for a secure sum of their own, or in which too many sites may collude."""
    groups, sites = plan.aggregation.groups, plan.cohort.sites
    for n in plan.summed():
        if (why := _insecure(plan, n)) is not None:
            fewer = next((count for count in range(groups - 1, 2, -1) if _secure_in(plan, count)), None)
            instead = "remove aggregation.groups" if fewer is None else f"set aggregation.groups = {fewer}"
            raise PlanError(
                "aggregation.groups",
                groups,
                expected=f"groups that are each a secure sum of their own; of a group of {n} that is drawn from the "
                f"{sites} sites, up to {plan.tolerance().colluders_in(sites, n)} may collude: {why}",
                fix=f"{instead}, or lower aggregation.colluders",
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
