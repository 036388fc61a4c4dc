"""What the folder of a run says now: its plan, rounds, sites and failures. Read for `cloister watch`, never written.

The rounds come from `metrics.jsonl`, which every run has. What happens within a round comes from the events of a
deployed run, each line read once; of a simulation, which writes none, from its journal.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloister.cli.display import answers, describe, with_group
from cloister.protocol.errors import EngineError
from cloister.protocol.plan import Plan
from cloister.protocol.soundness import recorded
from cloister.server import journal as steps
from cloister.server.deployment import refusal_in
from cloister.server.events import from_json
from cloister.server.folder import RunFiles, read_plan
from cloister.server.journal import Journal
from cloister.server.progress import (
    AttemptFailed,
    BudgetSpent,
    Connected,
    Event,
    Moved,
    NotEvaluated,
    Preparing,
    Refusing,
    RoundAbandoned,
    RoundDone,
    RoundStarted,
    SiteAnswered,
    SiteFailed,
    Started,
    Step,
)

_FAILURES = 8
"""Failures that are kept."""
_RECENT = 10
"""Rounds whose mean time tells the time that is left."""
_DOING = {"train": "training", "evaluate": "evaluation"}
_STOPPED = {
    "budget": "ended before its last round: the next one would have exceeded the privacy budget",
    "dataset": "ended before its last round: the next one would have exceeded the limit of its dataset over all runs",
    "refused": "ended before its last round: too many sites refused",
}


@dataclass(frozen=True)
class Failure:
    """Something that went wrong."""

    at: str
    """When, in ISO 8601; empty if that is not known."""
    what: str
    """What, in words. It may contain text of a site."""


@dataclass(frozen=True)
class SiteView:
    """A site of a deployed run."""

    name: str
    state: str
    """What it does, in words. It may contain text of the site."""
    well: bool
    """Whether it is connected and has not failed in the present attempt."""
    sent: int
    """Bytes that it was sent."""
    received: int
    """Bytes that came from it."""


@dataclass(frozen=True)
class View:
    """A run at one moment."""

    plan: Plan
    path: Path
    rows: tuple[Mapping[str, Any], ...]
    """The metrics of each round that is done; round 0 is the initial model."""
    status: str
    """What it does now, in words."""
    state: str
    """`running`, which an interrupted simulation is too, `stopped` or `finished`."""
    left_s: float | None
    """Seconds until the last round is done, if the rounds to come take as long as the last ones; None: not known."""
    changed: datetime | None
    """When its files changed last; None if it has none but the plan."""
    parameters: int | None
    """Trained parameters; None if that is not known."""
    sites: tuple[SiteView, ...]
    """By name; empty for a simulation."""
    failures: tuple[Failure, ...]
    """The last ones, the newest first."""

    @property
    def done(self) -> int:
        """Rounds that are done."""
        return int(self.rows[-1]["round"]) if self.rows else 0


class Watched:
    """A run that is read again and again; not for several threads at a time.

    Args:
        path: The run folder.
        clock: Seconds since the epoch.

    Raises:
        RunFolderError: it is not the folder of a run.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._files = RunFiles(path)
        self._plan = read_plan(path, recorded)
        self._clock = clock
        self._read = 0
        """Bytes of the events that were read."""
        self._begin()
        self._begun: RoundStarted | None = None
        self._connected: Connected | None = None
        self._moved = Moved({}, {})
        self._failures: deque[Failure] = deque(maxlen=_FAILURES)
        self._parameters: int | None = None

    def _begin(
        self, cohort: tuple[str, ...] = (), status: str = "not started yet", updates: int | None = None
    ) -> None:
        """Another attempt, or another step of the run."""
        self._status = status
        self._updates = updates
        self._arrived = 0
        self._cohort = cohort
        self._answered: set[str] = set()
        self._failed: dict[str, str] = {}

    def view(self) -> View:
        """The run now.

        Raises:
            RunFolderError: its journal is damaged.
        """
        files = self._files
        deployed = files.deployment.exists()
        for line in self._new_lines():
            try:
                self._take(from_json(line), str(json.loads(line).get("at", "")))
            except EngineError:  # of another release
                continue
        rows = tuple(files.metrics())
        stopped: str | None = None
        failures = list(self._failures)
        if files.journal.exists():
            with Journal(files.journal) as journal:
                finished = journal.newest(steps.FINISHED)
                stopped = None if finished is None else str(finished.detail.get("stopped", ""))
                if not deployed:
                    failures = self._read_journal(journal)
        changed = self._changed()
        reason = self._reason() if stopped is None else ""
        answered = f": {answers(self._arrived, self._cohort, self._updates)}" if self._cohort else ""
        status = self._status + (answered if deployed else "")
        if stopped is not None:
            status = _STOPPED.get(stopped, "all rounds are done")
        elif reason:
            status = reason
        done = int(rows[-1]["round"]) if rows else 0
        return View(
            plan=self._plan,
            path=files.path,
            rows=rows,
            status=status,
            state="finished" if stopped is not None else "stopped" if reason else "running",
            left_s=None if reason or stopped is not None else self._left(rows, changed),
            changed=None if changed is None else datetime.fromtimestamp(changed, UTC),
            parameters=self._parameters,
            sites=self._sites(running=stopped is None and not reason and done < self._plan.run.rounds),
            failures=tuple(reversed(failures)),
        )

    def _new_lines(self) -> list[bytes]:
        """The whole lines of events since the last call."""
        try:
            with self._files.events.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines()

    def _take(self, event: Event, at: str) -> None:
        """Take the next event."""
        match event:
            case Preparing() | Step():
                self._status = describe(event) or self._status
            case Connected():
                self._connected = event
            case Moved():
                self._moved = event
            case Started(parameters=parameters):
                self._parameters = parameters
            case RoundStarted() if event.beside(self._begun):
                self._status = _attempt(event.round, event.attempt, event.purpose)
                self._cohort = with_group(self._cohort, event)
                self._arrived -= len(self._answered.intersection(event.cohort))
                self._answered.difference_update(event.cohort)
                for site in event.cohort:
                    self._failed.pop(site, None)
            case RoundStarted(number, attempt, purpose, cohort, updates):
                self._begun = event
                self._begin(cohort, _attempt(number, attempt, purpose), updates)
            case SiteAnswered(site=site):
                self._arrived += 1
                self._answered.add(site)
            case SiteFailed(site=site, reason=reason):
                self._failed[site] = reason
                self._failures.append(Failure(at, describe(event)))
            case RoundDone(refused=refused) if refused:
                self._failures.append(Failure(at, describe(event)))
            case AttemptFailed() | RoundAbandoned() | NotEvaluated() | BudgetSpent() | Refusing():
                self._failures.append(Failure(at, describe(event)))

    def _read_journal(self, journal: Journal) -> list[Failure]:
        """What a simulation does, and its last failures."""
        begun = max(
            (entry for purpose in _DOING if (entry := journal.newest(f"{purpose} {steps.BEGUN}"))),
            key=lambda entry: entry.round,
            default=None,
        )
        if begun is not None:
            self._status = _attempt(begun.round, begun.attempt, begun.step.split()[0])
        found = []
        failed = [
            steps.of_sum(purpose, steps.FAILED, group)
            for purpose in _DOING
            for group in range(self._plan.aggregation.groups)
        ]
        for step in (*failed, steps.REFUSED, steps.LEFT_OUT):
            entry = journal.newest(step)
            if entry is not None:
                what = {steps.REFUSED: " refused", steps.LEFT_OUT: " is left out"}.get(
                    step, f"attempt {entry.attempt}"
                )
                who = f"{entry.detail.get('site', '')}{what}"
                found.append((entry.round, f"round {entry.round}: {who}: {entry.detail['reason']}"))
        return [Failure("", what) for _, what in sorted(found)]

    def _changed(self) -> float | None:
        """When a file of the run was written last, in seconds since the epoch."""
        files = self._files
        wal = files.journal.with_name(f"{files.journal.name}-wal")
        seen = [path.stat().st_mtime for path in (files.events, files.metrics_file, wal) if path.exists()]
        return max(seen, default=None)

    def _reason(self) -> str:
        """Why the process of a deployed run has ended, if it said so after the last event."""
        log, events = self._files.coordinator_log, self._files.events
        if not log.exists() or not events.exists() or log.stat().st_mtime < events.stat().st_mtime:
            return ""
        reason = refusal_in(log)
        return f"stopped: {reason}" if reason else ""

    def _left(self, rows: tuple[Mapping[str, Any], ...], changed: float | None) -> float | None:
        recent = [sum(row.get("phase_seconds", {}).values()) for row in rows if row["round"]][-_RECENT:]
        if not recent or changed is None:
            return None
        each = float(sum(recent)) / len(recent)
        since = max(0.0, self._clock() - self._files.metrics_file.stat().st_mtime)
        to_come = self._plan.run.rounds - int(rows[-1]["round"])
        return max(0.0, each * to_come - min(since, each))

    def _sites(self, *, running: bool) -> tuple[SiteView, ...]:
        """Every site that is known, by name, those that are not well first."""
        if self._connected is None:
            return ()
        found = []
        for name in sorted({*self._connected.sites, *self._connected.missing}):
            missing, failed = self._connected.missing.get(name), self._failed.get(name)
            if not running:
                state, well = "", True
            elif missing is not None:
                state, well = f"not connected: {missing}" if missing else "not connected", False
            elif failed is not None:
                state, well = f"dropped out: {failed}", False
            elif name in self._answered:
                state, well = "has answered", True
            else:
                state, well = "asked" if name in self._cohort else "connected", True
            moved = self._moved
            found.append(SiteView(name, state, well, moved.sent.get(name, 0), moved.received.get(name, 0)))
        return tuple(sorted(found, key=lambda site: site.well))


def _attempt(number: int, attempt: int, purpose: str) -> str:
    again = f", attempt {attempt}" if attempt > 1 else ""
    return f"round {number}, {_DOING[purpose]}{again}"
