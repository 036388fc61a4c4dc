"""The study of a search: Optuna chooses settings and decides which trials end early.

The study is an SQLite file, and this process alone writes it. Each trial is in it before its run begins, so a search
that was killed goes on with the same settings. The sampler is made anew for each trial, with a seed of the search's and
the trial's number: a search that was killed chooses what it would have chosen.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cloister.protocol.errors import EngineError, StorageError, one_line
from cloister.protocol.machine.prerequisites import check_extra
from cloister.simulations.search.search import ParameterSection, Search, Value, Values

if TYPE_CHECKING:
    import optuna

State = Literal["running", "complete", "pruned", "failed"]
_STATES: dict[str, State] = {
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}
"""By Optuna's name."""


@dataclass(frozen=True)
class Trial:
    """A trial of a search."""

    number: int
    """Its number, from 0."""
    values: Mapping[str, Value]
    """What it sets, by field of the plan."""
    state: State
    """`pruned`: ended early; `failed`: its run ended with an error."""
    loss: float | None = None
    """Held-out loss of its final model, nats per token, or of the last one before it was pruned."""
    reason: str = ""
    """Why it failed; empty if it did not."""


@contextlib.contextmanager
def stored(path: Path) -> Iterator[None]:
    """Work with a study in a file.

    Raises:
        StorageError: SQLite refuses the file: it is damaged, or the disk is full.
        EngineError: Optuna is not installed.
    """
    for package in ("optuna", "sqlalchemy"):
        check_extra(package, "tune", EngineError, "cloister tune")
    from optuna.exceptions import OptunaError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, OptunaError) as error:
        raise StorageError(
            str(path),
            expected=f"the study of a search ({one_line(error)})",
            fix="free disk space, or restore it from a backup",
        ) from error


class Study:
    """The trials of a search, durable in an SQLite file.

    Args:
        path: The file; made if missing.
        search: The search.
        rounds: Rounds of a trial, as the plan has them.
    """

    def __init__(self, path: Path, search: Search, rounds: int) -> None:
        import optuna
        from sqlalchemy import URL

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._search = search
        self._study = optuna.create_study(
            storage=URL.create("sqlite", database=str(path.absolute())).render_as_string(),
            study_name="search",
            load_if_exists=True,
            pruner=_pruner(search, rounds),
        )
        if search.sampler == "grid":
            for point in list(search.grid())[len(self._study.trials) :]:
                self._study.enqueue_trial(dict(point))

    def trials(self) -> list[Trial]:
        """All trials that have begun, in order."""
        return [
            Trial(
                trial.number,
                trial.params,
                _STATES[trial.state.name],
                None if trial.state.name == "FAIL" else trial.value,
                str(trial.user_attrs.get("reason", "")),
            )
            for trial in self._study.get_trials()
            if trial.state.name in _STATES
        ]

    def begin(self) -> Trial | None:
        """The next trial, durable; None if all have begun."""
        begun = len(self.trials())
        if begun >= self._search.count():
            return None
        self._study.sampler = self._sampler(begun)
        asked = self._study.ask()
        return Trial(asked.number, self._values(asked), "running")

    def unfinished(self) -> list[Trial]:
        """The trials that a process which has ended had begun, in order; settings it had not chosen are chosen now."""
        from optuna.trial import Trial as Asked

        found = []
        for trial in self._study.get_trials(states=[self._state("RUNNING")]):
            self._study.sampler = self._sampler(trial.number)
            found.append(Trial(trial.number, self._values(Asked(self._study, trial._trial_id)), "running"))
        return found

    def seen(self, number: int, round_number: int, loss: float) -> bool:
        """Keep the loss of a trial after a round; returns whether the trial goes on."""
        from optuna.trial import Trial as Asked

        trial = Asked(self._study, self._study.get_trials(deepcopy=False)[number]._trial_id)
        if round_number not in self._study.trials[number].intermediate_values:
            trial.report(loss, round_number)
        return not trial.should_prune()

    def end(self, number: int, state: State, loss: float | None = None, reason: str = "") -> None:
        """Keep how a trial has ended."""
        if reason:
            trial_id = self._study.get_trials(deepcopy=False)[number]._trial_id
            self._study._storage.set_trial_user_attr(trial_id, "reason", reason)
        ended = next(name for name, ours in _STATES.items() if ours == state)
        self._study.tell(number, loss if state == "complete" else None, self._state(ended))

    def _state(self, name: str) -> optuna.trial.TrialState:
        from optuna.trial import TrialState

        return TrialState[name]

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        from optuna.samplers import RandomSampler, TPESampler

        seed = random.Random(f"{self._search.seed}/{number}").getrandbits(32)
        return TPESampler(seed=seed) if self._search.sampler == "tpe" else RandomSampler(seed=seed)

    def _values(self, asked: optuna.trial.Trial) -> Values:
        return {parameter.field: self._value(asked, parameter) for parameter in self._search.parameter}

    def _value(self, asked: optuna.trial.Trial, parameter: ParameterSection) -> Value:
        if parameter.choices is not None or self._search.sampler == "grid":
            chosen = asked.suggest_categorical(parameter.field, parameter.points())
            assert isinstance(chosen, bool | int | float | str), "no point is None"
            return chosen
        low, high = parameter.bounds()
        if parameter.whole:
            step = int(parameter.step or 1)
            return asked.suggest_int(parameter.field, int(low), int(high), log=parameter.log, step=step)
        return asked.suggest_float(parameter.field, low, high, log=parameter.log, step=parameter.step)


def _pruner(search: Search, rounds: int) -> optuna.pruners.BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if search.pruner == "median":
        return MedianPruner(n_startup_trials=search.startup)
    if search.pruner == "hyperband":
        return HyperbandPruner(min_resource=1, max_resource=rounds)
    return NopPruner()
