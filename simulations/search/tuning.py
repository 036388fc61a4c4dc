"""A search in a folder: its trials one after the other or several at a time, its best one, and its price.

Without a privacy unit all trials and the study stay in the folder. Under a privacy unit (Papernot and Steinke 2022,
"Hyperparameter Tuning with Renyi Differential Privacy"; `events.Selection` states the theorem)

1. the ledger over runs, if the plan names one, is charged for the whole search;
2. the number of trials and the settings of each are drawn from the system's randomness, durably;
3. the trials run under `sealed/`, and nothing says how many there are or what they score;
4. the best one by its held-out loss on public records, the first of equals, becomes `best/`; with no trial, or none
   that has finished, the untrained model is the result, in `untrained/`;
5. `sealed/` is removed, with every other trial and score. No file that is left has a time (`publication.py`): how long
   the search took tells about how many trials there were.

A process that was killed goes on: it draws nothing again, and a trial is resumed as a run is. Where `sealed/` and the
result are gone, the search is over: other trials would be a second search for the price of one. A trial in which a site
was charged more than the plan says (it trained a round again after a crash) costs more than its price, so it is
removed, unseen, and run again. Equal losses are decided by the order of the trials, which is exchangeable and so adds
nothing to the theorem's total order. Refused: a fixed number of trials, whose best one costs what all of them cost.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from cloister.lm.model.model import load_model, save_pretrained
from cloister.privacy.accounting.accountant import spent
from cloister.privacy.accounting.selection import draw as draw_number
from cloister.privacy.accounting.selection import quantile
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.protocol.errors import BudgetError, CloisterError, EngineError, PlanError, RunFolderError
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json
from cloister.server.record.folder import RunFiles, RunFolder, locked, make_folder
from cloister.server.record.history import reached
from cloister.server.record.journal import FINISHED
from cloister.server.record.outcome import finish, outcome
from cloister.server.record.public import base_of, public_model
from cloister.server.record.report import beyond_a_trial
from cloister.simulations.search import search as searches
from cloister.simulations.search.publication import SETTINGS, publish, remove_dates, set_date
from cloister.simulations.search.search import Search, Value, Values
from cloister.simulations.search.study import State, Study, Trial, stored
from cloister.simulations.search.trials import Engine, Processes

Told = Callable[[Trial], None]
"""Receives a trial when it begins and when it ends; never under a privacy unit."""

_AGAIN = 3
"""Times that a trial in which a site was charged more than the plan says is run again."""


@dataclass(frozen=True)
class Price:
    """What a search under a privacy unit costs those who see nothing but its best trial."""

    epsilon: float
    """Of the search."""
    one: float
    """Of one trial, had it been a run of its own."""
    delta: float
    """The plan's."""
    many: int
    """Number of trials that one search in a hundred exceeds."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: Trial | None
    """The best trial, without its number under a privacy unit (then 0); None: there is none."""
    folder: Path | None
    """Its run folder, or under a privacy unit without a best trial the one of the untrained model."""
    trials: Sequence[Trial] = field(default=())
    """All trials; none under a privacy unit."""


class SearchFolder(Closing):
    """The folder of a search, in which this process alone works until it closes it; a context manager."""

    def __init__(self, path: Path, plan: Plan, search: Search, lock: IO[bytes]) -> None:
        self.path = path
        self.plan = plan
        self.search = search
        self._lock = lock
        self._drawn = path / "drawn"

    @classmethod
    def create(cls, path: Path, plan: Plan, search: Search) -> Self:
        """Make the folder of a new search, whose plan and settings are checked.

        Raises:
            PlanError, BudgetError: under a privacy unit, the plan has no trials with the price of a search, or the
                price is more than its budget.
            RunFolderError: it is not new or empty, or cannot be made.
            StorageError: it cannot be written.
        """
        if plan.privacy.unit != "none":
            plan = searches.private_plan(plan, search, secrets.token_hex(16))
            price(plan)
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
            search = searches.recorded(json.dumps(facts["search"]))
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
    def private(self) -> bool:
        """Whether the plan has a privacy unit."""
        return self.plan.privacy.unit != "none"

    def begun(self) -> bool:
        """Whether it has a trial, or one may have been drawn."""
        return any(
            (self.path / name).exists() for name in ("study.sqlite", "sealed", "drawn", "best", "untrained")
        )

    def discard(self) -> None:
        """Remove the folder of a search that was refused before its first trial."""
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def sealed(self) -> Path:
        """Under a privacy unit, the trials while the search goes on."""
        return self.path / "sealed"

    @property
    def drawn(self) -> bool:
        """Under a privacy unit, whether trials were drawn: never a second time for the same price."""
        return self._drawn.exists()

    def keep_drawn(self) -> None:
        """Keep, durably, that trials were drawn."""
        if not self.drawn:
            write_bytes(self._drawn, b"")

    @property
    def best(self) -> Path:
        """Under a privacy unit, the run folder of the best trial."""
        return self.path / "best"

    @property
    def untrained(self) -> Path:
        """Under a privacy unit, the result if no trial is the best."""
        return self.path / "untrained"

    def trial(self, number: int) -> Path:
        """The run folder of a trial."""
        return (self.sealed if self.private else self.path / "trials") / f"{number:04d}"


def price(plan: Plan) -> Price:
    """What a search costs, by a plan that `search.private_plan` returned.

    Raises:
        BudgetError: it is more than the plan's budget.
    """
    terms = searches.terms(plan)
    selection, chosen = terms.selection, plan.simulation.search
    assert selection is not None, "the plan is that of a trial"
    assert chosen is not None, "which says of which search"
    accountant = plan.privacy.accountant
    found = spent([selection], terms.delta, accountant).epsilon
    if terms.budget is not None and found > terms.budget:
        name = "budget" if plan.privacy.target_epsilon is None else "target_epsilon"
        raise BudgetError(
            f"privacy.{name}",
            terms.budget,
            expected=f"at least the {found:.4g} that the search costs, and not only what one trial does",
            fix="set privacy.noise_multiplier, and privacy.budget to what the search may cost"
            if name == "target_epsilon"
            else "raise it, lower mean, or add noise",
        )
    return Price(
        found,
        spent(terms.events(plan.run.rounds), terms.delta, accountant).epsilon,
        terms.delta,
        quantile(chosen.mean, chosen.shape, 0.99),
    )


def price_facts(plan: Plan) -> dict[str, Any]:
    """The law of a search by the plan of its trials, and its price, for `--json`."""
    cost, chosen = price(plan), plan.simulation.search
    assert chosen is not None, "it is the plan of a trial"
    return {
        **chosen.model_dump(include={"law", "mean", "shape"}),
        "epsilon": cost.epsilon,
        "epsilon_of_one": cost.one,
        "delta": cost.delta,
    }


def tune(folder: SearchFolder, engine: Engine, told: Told) -> Found:
    """Run a search to its end, from the beginning or from where an earlier process stopped.

    Args:
        folder: The folder.
        engine: What runs the sites of each trial.
        told: Receives the trials; it is not called under a privacy unit.

    Raises:
        CloisterError: the search stopped; it can be continued.
    """
    if not folder.private:
        path = folder.path / "study.sqlite"
        with stored(path):
            study = Study(path, folder.search, folder.plan.run.rounds)
            _run(folder, engine, _Open(folder, study, told), folder.path / "trials.log")
            trials = study.trials()
        complete = [trial for trial in trials if trial.state == "complete"]
        best = min(complete, key=_rank, default=None)
        return Found(best, folder.trial(best.number) if best else None, trials)
    if not (folder.best.exists() or (folder.untrained / "final").exists()):
        if engine.ray_address is not None:
            raise EngineError(
                "--ray-address",
                engine.ray_address,
                expected="no value under a privacy unit: Ray leaves traces of every trial",
            )
        _run_sealed(folder, engine)
    found = Found(None, folder.untrained)
    if folder.best.exists():
        # Here, because the final model of an adapter names its base by the path.
        with RunFolder.reopen(folder.best) as run:
            finish(run, lambda _event: None)
        values: dict[str, Value] = json.loads((folder.best / SETTINGS).read_bytes())
        best = Trial(0, values, "complete", outcome(RunFiles(folder.best)).final_loss)
        found = Found(best, folder.best)
    shutil.rmtree(folder.sealed, ignore_errors=True)
    remove_dates(folder.path)
    return found


def _rank(trial: Trial) -> tuple[float, int]:
    loss = math.inf if trial.loss is None or math.isnan(trial.loss) else trial.loss
    return loss, trial.number


def _run(folder: SearchFolder, engine: Engine, source: _Open | _Sealed, log: Path) -> None:
    """Run the trials of a source, at most `workers` at the same time."""
    coming = True
    with Processes(engine, log) as processes:
        while True:
            while coming and len(processes) < folder.search.workers:
                found = source.next()
                coming = found is not None
                if found is not None:
                    number, values = found
                    processes.start(number, folder.trial(number), searches.trial_plan(folder.plan, values))
            if not len(processes):
                return
            for heard in processes.hear():
                match heard.what:
                    case "loss":
                        go_on = source.loss(heard.number, heard.round, heard.loss)
                        processes.answer(heard.number, go_on=go_on)
                    case "done":
                        source.end(heard.number, "complete", "")
                    case "pruned" | "failed" as state:
                        source.end(heard.number, state, heard.reason)
                coming = True


class _Open:
    """The trials of a study, which anyone may see."""

    def __init__(self, folder: SearchFolder, study: Study, told: Told) -> None:
        self._folder = folder
        self._study = study
        self._told = told
        self._left = study.unfinished()

    def next(self) -> tuple[int, Values] | None:
        """The next trial, begun by a killed process or new and with a sound plan; None: there is none."""
        while (trial := self._left.pop(0) if self._left else self._study.begin()) is not None:
            try:
                searches.trial_plan(self._folder.plan, trial.values)
            except PlanError as error:
                self.end(trial.number, "failed", str(error))
                continue
            self._told(trial)
            return trial.number, trial.values
        return None

    def loss(self, number: int, round_number: int, loss: float) -> bool:
        """As the pruner decides."""
        return not math.isfinite(loss) or self._study.seen(number, round_number, loss)

    def end(self, number: int, state: State, reason: str) -> None:
        """Keep the loss of its final model, if it is a number."""
        loss = None
        if state == "complete":
            loss = outcome(RunFiles(self._folder.trial(number))).final_loss
            if loss is None or not math.isfinite(loss):
                state, loss, reason = "failed", None, "the held-out loss of its final model is not a number"
        self._study.end(number, state, loss, reason)
        self._told(next(trial for trial in self._study.trials() if trial.number == number))


def _run_sealed(folder: SearchFolder, engine: Engine) -> None:
    """Steps 1 to 4 of the module's description; an error after step 2 is told in the log under `sealed/` alone."""
    drawn_file = folder.sealed / "drawn.json"
    terms, dataset = searches.terms(folder.plan), DatasetLedger.of(folder.plan)
    if not drawn_file.exists():
        if folder.drawn:
            raise RunFolderError(
                str(folder.path),
                expected="the result of this search or its trials, and they were moved or removed",
                fix="begin a new search: it is charged, and this one cannot run twice for its price",
            )
        if dataset is not None:
            dataset.pay_search(terms)
        folder.sealed.mkdir(mode=0o700, exist_ok=True)
        write_bytes(drawn_file, json.dumps(_draw(folder)).encode())
    elif dataset is not None:
        dataset.check_paid("", 0)
    folder.keep_drawn()
    drawn: list[dict[str, Value]] = json.loads(drawn_file.read_bytes())
    source, log = _Sealed(folder, drawn, terms), folder.sealed / "trials.log"
    try:
        _run(folder, engine, source, log)
        if dataset is not None:
            set_date(dataset.path)  # otherwise it is of the time of the charge, when the search began
        best = source.best()
        if best is None:
            _write_untrained(folder)
            return
        publish(RunFiles(folder.trial(best)), drawn[best], folder.sealed / "best")
        os.rename(folder.sealed / "best", folder.best)
    except (CloisterError, OSError) as error:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"{error}\n")
        # Its text may have the number or the path of a trial, and so a number that the search has reached.
        raise EngineError("search", expected="trials that end without an error", fix=f"see {log}") from None


def _draw(folder: SearchFolder) -> list[dict[str, Value]]:
    """The settings of every trial: as many as the law gives."""
    chosen = folder.plan.simulation.search
    assert chosen is not None, "the plan is that of a trial"
    source: random.Random = secrets.SystemRandom()
    number = draw_number(chosen.mean, chosen.shape)
    return [dict(searches.draw(folder.plan, folder.search, source)) for _ in range(number)]


class _Sealed:
    """The trials that were drawn; nothing is said of them."""

    def __init__(self, folder: SearchFolder, drawn: Sequence[Values], terms: Terms) -> None:
        self._folder = folder
        self._drawn = drawn
        self._terms = terms
        self._left = list(range(len(drawn)))
        self._again: dict[int, int] = {}

    def next(self) -> tuple[int, Values] | None:
        """The next one that was drawn and is not over."""
        while self._left:
            number = self._left.pop(0)
            if not self._over(number):
                return number, self._drawn[number]
        return None

    def loss(self, _number: int, _round_number: int, _loss: float) -> bool:
        """Each trial goes on to its end."""
        return True

    def end(self, number: int, state: State, reason: str) -> None:
        """Run a trial again that cost more than its price; one that failed has the worst score."""
        path = self._folder.trial(number)
        if state == "failed":
            write_bytes(path / "failed.json", json.dumps(reason).encode())
            return
        problem = beyond_a_trial(RunFiles(path), self._terms)
        if problem:
            self._again[number] = self._again.get(number, 0) + 1
            if self._again[number] > _AGAIN:
                raise EngineError(
                    "trial", expected=f"sites that train each round once, but {problem}", fix=f"see {path}"
                )
            shutil.rmtree(path)
            self._left.insert(0, number)

    def best(self) -> int | None:
        """The number of the trial with the least loss, the first of equals; None if none has a loss."""
        losses = {number: self._loss(number) for number in range(len(self._drawn))}
        finite = {number: loss for number, loss in losses.items() if loss is not None and math.isfinite(loss)}
        return min(finite, key=lambda number: (finite[number], number), default=None)

    def _loss(self, number: int) -> float | None:
        path = self._folder.trial(number)
        return None if (path / "failed.json").exists() else outcome(RunFiles(path)).final_loss

    def _over(self, number: int) -> bool:
        path = self._folder.trial(number)
        if (path / "failed.json").exists():
            return True
        finished = (path / "plan.json").exists() and reached(RunFiles(path), FINISHED)
        return finished and not beyond_a_trial(RunFiles(path), self._terms)


def _write_untrained(folder: SearchFolder) -> None:
    """The model of a run before its first round: what the search returns if no trial is the best."""
    work = folder.sealed / "untrained"
    shutil.rmtree(work, ignore_errors=True)
    with RunFolder.create(work, folder.plan) as made:
        public = public_model(made, lambda _event: None)
    base = base_of(folder.plan, public)
    model = load_model(folder.plan, base)
    weights = model.layout.flatten(model.module) if public is None or base is not None else public
    save_pretrained(model, weights, folder.untrained / "final")


def to_json(folder: SearchFolder, found: Found) -> dict[str, Any]:
    """The result for a program."""
    best = found.best
    answer: dict[str, Any] = {
        "search": str(folder.path),
        "best": None if best is None else str(found.folder),
        "model": None if found.folder is None else str(found.folder / "final"),
        "loss": None if best is None else best.loss,
        "settings": None if best is None else dict(best.values),
    }
    if folder.private:
        return answer | price_facts(folder.plan)
    trials = [
        {
            "trial": trial.number,
            "state": trial.state,
            "loss": trial.loss,
            "settings": dict(trial.values),
            "reason": trial.reason,
        }
        for trial in found.trials
    ]
    return answer | {"trials": trials}
