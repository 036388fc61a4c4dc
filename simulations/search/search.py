"""A search over fields of a plan: its settings, the plan of each trial, and what is refused before the first one.

A search never changes what a run is compared by, whose data it reads, or what a privacy unit protects, and by which
noise.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cloister.protocol.errors import CloisterError, PlanError, SearchError
from cloister.protocol.plan.plan import NO_EVALUATION, Count, Plan
from cloister.protocol.plan.settings import Section, Settings
from cloister.protocol.plan.soundness import changed

Value = bool | int | float | str
Bound = Annotated[int | float, Field(ge=-1e15, le=1e15)]
Values = Mapping[str, Value]
"""By field of the plan, what a trial sets it to."""

LARGEST_GRID = 1000
"""Most points of a grid, each of which is read as a plan before the first trial."""

_SECTIONS = {
    "run": "rounds",
    "model.adapter": "scheme rank alpha",
    "local": "steps batch_size accumulation optimizer learning_rate momentum weight_decay warmup_steps schedule "
    "final_learning_rate clip_norm optimizer_state proximal",
    "cohort": "fraction buffer staleness",
    "privacy": "clip",
    "public": "steps batch_size learning_rate",
    "server": "optimizer learning_rate momentum epsilon",
}
SEARCHED = tuple(f"{section}.{name}" for section, names in _SECTIONS.items() for name in names.split())
"""The fields that may be searched, besides those of `model.config`."""


class ParameterSection(Section):
    """A field of the plan, and what it may be: a list of choices, or a range."""

    field: Annotated[str, Field(min_length=1)]
    """The field, such as `local.learning_rate`."""
    choices: tuple[Value, ...] | None = None
    """What it may be; without `low` and `high`."""
    low: Bound | None = None
    """The least number; with two whole bounds, and a whole step, the numbers are whole."""
    high: Bound | None = None
    """The largest number, which is included; with `step` the last step up to it is the largest."""
    log: bool = False
    """Draw the logarithm evenly, and not the number."""
    step: Bound | None = None
    """Distance of the numbers from `low` on; None: any number, or of whole ones each."""

    @property
    def whole(self) -> bool:
        """Whether the numbers of a range are whole."""
        return all(isinstance(bound, int) for bound in (self.low, self.high, self.step or 1))

    def points(self) -> tuple[Value, ...]:
        """What it may be, where that is a list: choices, or the steps of a range; else no value."""
        if self.choices is not None:
            return self.choices
        low, high = self.bounds()
        step = self.step or (1 if self.whole and not self.log else None)
        if step is None:
            return ()
        count = round((high - low) / step) + 1
        return tuple(low + number * step for number in range(min(count, LARGEST_GRID + 1)))

    def edges(self) -> tuple[Value, ...]:
        """The values that are tried before the first trial: all choices, or the bounds of a range."""
        return self.choices if self.choices is not None else self.bounds()

    def bounds(self) -> tuple[int | float, int | float]:
        """The smallest and the largest number of a range."""
        assert self.low is not None, "it is a range"
        assert self.high is not None, "it is a range"
        steps = 0 if self.step is None else (self.high - self.low) / self.step
        if self.step is None or abs(steps - round(steps)) < 1e-9:
            return self.low, self.high
        return self.low, self.low + self.step * math.floor(steps)

    def draw(self, source: random.Random) -> Value:
        """A value, drawn evenly from the choices, the steps or the range."""
        if self.choices is not None:
            return source.choice(self.choices)
        low, high = self.bounds()
        if self.step is not None:
            return low + self.step * source.randrange(round((high - low) / self.step) + 1)
        if not self.whole:
            return (
                math.exp(source.uniform(math.log(low), math.log(high)))
                if self.log
                else source.uniform(low, high)
            )
        if not self.log:
            return source.randint(int(low), int(high))
        drawn = math.exp(source.uniform(math.log(low - 0.5), math.log(high + 0.5)))
        return min(max(round(drawn), int(low)), int(high))


class Search(Section):
    """A search: which fields, how trials are chosen, and how many."""

    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """How settings are chosen: `grid`: each combination; `random`; `tpe`: by the losses of earlier trials."""
    trials: Count | None = None
    """Trials. None: all points of a grid; a value is needed otherwise."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the sampler."""
    pruner: Literal["none", "median", "hyperband"] = "none"
    """Which trials are ended early by their losses after each round."""
    startup: Count = 5
    """Trials that are not ended early by the pruner `median`."""
    workers: Count = 1
    """Trials that run at the same time, each in a process with its own workers for the sites."""
    parameter: tuple[ParameterSection, ...] = ()
    """The fields that are searched."""

    def grid(self) -> Iterator[Values]:
        """All points of the grid; the last parameter changes fastest."""
        names = [parameter.field for parameter in self.parameter]
        for values in itertools.product(*(parameter.points() for parameter in self.parameter)):
            yield dict(zip(names, values, strict=True))

    def count(self) -> int:
        """Trials."""
        if self.trials is not None:
            return self.trials
        return math.prod(len(parameter.points()) for parameter in self.parameter)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        _check(self)
        return self


SEARCH = Settings(Search, "search", SearchError)
"""Reads a search, and checks what does not depend on the plan."""


def check(plan: Plan, search: Search) -> None:
    """Refuse what the plan does not allow to search, and each trial that is known to be unsound.

    All points of a grid are read, and each choice and bound of a range on its own. A combination of them that is not
    sound is found at its trial.

    Raises:
        PlanError: a trial's plan is not sound.
        SearchError: a field may not be searched, or the settings do not fit the plan.
    """
    if plan.server.evaluation == NO_EVALUATION:
        raise SearchError(
            "server.evaluation",
            NO_EVALUATION,
            expected="held-out records: trials are compared by their loss on them",
            fix="name public records in server.evaluation",
        )
    for parameter in search.parameter:
        _check_field(plan, parameter.field)
    for parameter in search.parameter:
        for value in parameter.edges():
            values = {parameter.field: value}
            with of_trial(values):
                tried = changed(plan, values)
                if parameter.field.startswith("model.config."):
                    from cloister.lm.model.model import count_parameters  # takes seconds to import

                    count_parameters(tried)
    for point in search.grid() if search.sampler == "grid" else ():
        with of_trial(point):
            changed(plan, point)


@contextmanager
def of_trial(values: Values) -> Iterator[None]:
    """Let an error name the trial by its settings.

    Raises:
        PlanError: in place of any error.
    """
    try:
        yield
    except CloisterError as error:
        shown = ", ".join(f"{field} = {value!r}" for field, value in values.items())
        raise PlanError.of(error, f"trial with {shown}: {error.field}") from error


def _check(search: Search) -> None:
    if not search.parameter:
        raise SearchError("parameter", expected="one [[parameter]] or more, each with a field of the plan")
    for at, parameter in enumerate(search.parameter):
        name = f"parameter[{at}]"
        if parameter.field in [other.field for other in search.parameter[:at]]:
            raise SearchError(f"{name}.field", parameter.field, expected="each field once")
        _check_range(name, parameter)
        if search.sampler == "grid" and not parameter.points():
            raise SearchError(
                f"{name}.step",
                expected='choices or a step with sampler = "grid", which takes each value',
                fix=f'add choices or a step for {parameter.field}, or set sampler = "random"',
            )
    if search.sampler == "grid" and math.prod(len(one.points()) for one in search.parameter) > LARGEST_GRID:
        raise SearchError(
            "sampler",
            "grid",
            expected=f"a grid of at most {LARGEST_GRID} points",
            fix='set fewer choices or larger steps, or sampler = "random"',
        )
    if (search.trials is None) != (search.sampler == "grid"):
        expected = "no value with" if search.sampler == "grid" else "a number with"
        raise SearchError("trials", search.trials, expected=f'{expected} sampler = "{search.sampler}"')
    if search.pruner != "median" and search.startup != Search.model_fields["startup"].default:
        raise SearchError("startup", search.startup, expected='no value; only valid with pruner = "median"')


def _check_range(name: str, parameter: ParameterSection) -> None:
    ranged = [parameter.low, parameter.high, parameter.step, parameter.log or None]
    if (parameter.choices is not None) == any(value is not None for value in ranged):
        raise SearchError(f"{name} ({parameter.field})", expected="either choices, or low and high")
    if parameter.choices is not None:
        if not parameter.choices or len(set(parameter.choices)) != len(parameter.choices):
            raise SearchError(f"{name}.choices", parameter.choices, expected="one value or more, each once")
        return
    if parameter.low is None or parameter.high is None:
        raise SearchError(f"{name} ({parameter.field})", expected="both low and high")
    if not (
        math.isfinite(parameter.low) and math.isfinite(parameter.high) and parameter.low < parameter.high
    ):
        raise SearchError(
            f"{name}.low", parameter.low, expected=f"a number below high, which is {parameter.high}"
        )
    if parameter.log and (parameter.low <= 0 or parameter.step is not None):
        raise SearchError(f"{name}.log", True, expected="low above 0, and no step, with log = true")
    if parameter.step is not None and not 0 < parameter.step <= parameter.high - parameter.low:
        raise SearchError(
            f"{name}.step", parameter.step, expected="a number above 0 that fits between low and high"
        )


def _check_field(plan: Plan, field: str) -> None:
    if field == "privacy.clip" and plan.privacy.unit == "none":
        raise SearchError("parameter.field", field, expected="another field; there is no privacy unit")
    if field in SEARCHED or (field.startswith("model.config.") and field.count(".") == 2):
        return
    section = field.rpartition(".")[0]
    known = ", ".join(f"{section}.{name}" for name in _SECTIONS.get(section, "").split())
    raise SearchError(
        "parameter.field",
        field,
        expected="a field of training: not the data, the evaluation, the seed, or what is protected and how; "
        + (f"of [{section}] {known}" if known else f"a field of {', '.join(_SECTIONS)} or model.config"),
    )
