"""A search in a folder: its trials one after the other or several at a time, and its best one.

All trials and the study stay in the folder. Under a privacy unit each trial charges a ledger over runs, so that the
report of each states the epsilon of all (`price.py`). A process that was killed goes on: it chooses nothing again, and
a trial is resumed as a run is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from cloister.privacy.ledger.dataset import DatasetLedger, DatasetSpent
from cloister.protocol.errors import PlanError, RunFolderError
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import changed, from_json
from cloister.server.record.folder import RunFiles, locked, make_folder
from cloister.server.record.history import reached, run_history
from cloister.server.record.journal import DONE
from cloister.server.record.outcome import outcome, remove_secrets
from cloister.simulations.search import search as searches
from cloister.simulations.search.price import charged_plan, check_price, limited, price_of
from cloister.simulations.search.search import Search
from cloister.simulations.search.study import State, Study, Trial, stored
from cloister.simulations.search.trials import Engine, Heard, Processes

Told = Callable[[Trial | Heard], None]
"""Receives a trial when it begins and when it ends, and between them the loss after each of its evaluations."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: Trial | None
    """The best trial; None: none has finished."""
    trials: Sequence[Trial]
    """All trials."""
    spent: DatasetSpent | None
    """What the dataset has spent by the ledger over runs; None without a privacy unit."""


class SearchFolder(Closing):
    """The folder of a search, in which this process alone works until it closes it; a context manager."""

    def __init__(self, path: Path, plan: Plan, search: Search, lock: IO[bytes]) -> None:
        self.path = path
        self.plan = plan
        self.search = search
        self._lock = lock

    @classmethod
    def create(cls, path: Path, plan: Plan, search: Search) -> Self:
        """Make the folder of a new search, whose plan and settings are checked.

        Raises:
            PlanError, BudgetError: under a privacy unit, its noise is declared, or the search costs more than may be
                spent.
            RunFolderError: it is not new or empty, or cannot be made.
            StorageError: it cannot be written.
        """
        own = not plan.simulation.ledger
        plan = charged_plan(plan, path)
        if (price := price_of(plan, search)) is not None:
            check_price(plan, price)
            plan = limited(plan, price, own)
        make_folder(path, "search.json", "search", lambda: f"cloister tune --again {path}")
        lock = locked(path, "search")
        facts = {"plan": json.loads(plan.to_json()), "search": search.model_dump(mode="json")}
        write_bytes(path / "search.json", json.dumps(facts, indent=1).encode())
        return cls(path, plan, search, lock)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Open the folder of a search that was begun, to continue it.

        Raises:
            RunFolderError: there is no search in it, or another process works in it.
        """
        file = path / "search.json"
        try:
            facts = json.loads(file.read_bytes())
            plan = from_json(json.dumps(facts["plan"]))
            search = searches.SEARCH.from_json(json.dumps(facts["search"]))
        except FileNotFoundError:
            raise RunFolderError(
                str(path), expected=f"the folder of a search, with a {file.name} in it"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, PlanError) as error:
            raise RunFolderError(
                str(file), expected=f"a whole search ({error})", fix="restore it from a backup"
            ) from error
        return cls(path, plan, search, locked(path, "search"))

    def close(self) -> None:
        """Let other processes work on it."""
        self._lock.close()

    @property
    def study(self) -> Path:
        """The study, which is there once the search has begun."""
        return self.path / "study.sqlite"

    def discard(self) -> None:
        """Remove the folder of a search that was refused before its first trial."""
        shutil.rmtree(self.path, ignore_errors=True)

    def trial(self, number: int) -> RunFiles:
        """The run folder of a trial."""
        return RunFiles(self.path / "trials" / f"{number:04d}")

    def spent(self, trials: Sequence[Trial]) -> DatasetSpent | None:
        """What the dataset has spent by the ledger over runs; None without a privacy unit.

        Raises:
            LedgerError: the ledger is missing, damaged or altered, or lacks a charge of a trial.
            StorageError: it cannot be read.
        """
        dataset = DatasetLedger.of(self.plan)
        if dataset is None:
            return None
        runs = [self.trial(trial.number) for trial in trials]
        done = [run_history(run) for run in runs if reached(run, DONE)]
        return dataset.spent(
            {history.run: history.summed for history in done},
            {history.run: history.evaluated for history in done},
        )


def tune(folder: SearchFolder, engine: Engine, told: Told) -> Found:
    """Run a search to its end, from the beginning or from where an earlier process stopped.

    Args:
        folder: The folder.
        engine: What runs the sites of each trial.
        told: Receives the trials.

    Raises:
        CloisterError: the search stopped; it can be continued.
    """
    dataset = DatasetLedger.of(folder.plan)
    if dataset is not None and not folder.study.exists():
        dataset.create()
    with stored(folder.study):
        study = Study(folder.study, folder.search, folder.plan.run.rounds)
        folder.spent(study.trials())  # before another trial is run, which would make a lost ledger anew
        _run(folder, engine, study, told)
        trials = study.trials()
    complete = [trial for trial in trials if trial.state == "complete"]
    return Found(min(complete, key=_rank, default=None), trials, folder.spent(trials))


def _rank(trial: Trial) -> tuple[float, int]:
    loss = math.inf if trial.loss is None or math.isnan(trial.loss) else trial.loss
    return loss, trial.number


def _run(folder: SearchFolder, engine: Engine, study: Study, told: Told) -> None:
    """Run the trials of a study, at most `workers` at the same time: first those that a killed process had begun."""
    left = study.unfinished()

    def end(number: int, state: State, reason: str) -> None:
        """Keep how a trial has ended, and the loss of its final model, if it is a number."""
        loss = outcome(folder.trial(number)).final_loss if state == "complete" else None
        if state == "complete" and (loss is None or not math.isfinite(loss)):
            state, loss, reason = "failed", None, "the held-out loss of its final model is not a number"
        remove_secrets(folder.trial(number))  # also of one that was ended early: it is not continued
        study.end(number, state, loss, reason)
        told(next(trial for trial in study.trials() if trial.number == number))

    with Processes(engine, folder.path / "trials.log") as processes:
        while True:
            while len(processes) < folder.search.workers:
                trial = left.pop(0) if left else study.begin()
                if trial is None:
                    break
                try:
                    plan = changed(folder.plan, trial.values)
                except PlanError as error:
                    end(trial.number, "failed", str(error))
                    continue
                folder.spent([])  # the ledger is there
                told(trial)
                processes.start(trial.number, folder.trial(trial.number).path, plan)
            if not len(processes):
                return
            for heard in processes.hear():
                match heard.what:
                    case "loss":
                        number, loss = heard.number, heard.loss
                        go_on = not math.isfinite(loss) or study.seen(number, heard.round, loss)
                        processes.answer(number, go_on=go_on)
                        told(heard)
                    case "done":
                        end(heard.number, "complete", "")
                    case "pruned" | "failed" as state:
                        end(heard.number, state, heard.reason)


def to_json(folder: SearchFolder, found: Found) -> dict[str, Any]:
    """The result for a program."""
    best = found.best
    run = None if best is None else folder.trial(best.number)
    return {
        "search": str(folder.path),
        "best": None if run is None else str(run.path),
        "model": None if run is None else str(run.final),
        "loss": None if best is None else best.loss,
        "settings": None if best is None else dict(best.values),
        "epsilon": None if found.spent is None else found.spent.epsilon,
        "delta": None if found.spent is None else found.spent.delta,
        "trials": [
            {
                "trial": trial.number,
                "state": trial.state,
                "loss": trial.loss,
                "settings": dict(trial.values),
                "reason": trial.reason,
            }
            for trial in found.trials
        ],
    }
