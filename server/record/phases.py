"""Where the time of a run goes: seconds by phase.

At any moment at most one phase counts: a phase that begins inside another one interrupts it. So the phases of a process
add up to at most its wall clock, and nothing is counted twice. What overlaps is named at its phase.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum


class Phase(StrEnum):
    """What a run spends its time on, at the coordinator. Steps have the numbers of `server/round/round.py`."""

    PREPARE = "prepare"
    """The model, public training, records for evaluation; in a simulation also the data of the sites, while its worker
    processes start. Under a privacy unit a deployed site prepares its data in its first round, in `train`."""
    JOIN = "join"
    """From the first request to join to the last answer: the sites load the model and prepare their data, and in a
    simulation the worker processes finish their start."""
    TRAIN = "train"
    """Step 4 of all attempts, failed ones included: from the requests to the last contribution; in an asynchronous
    round to the one that fills the buffer, while other sites go on in every phase. The sites train and
    mask their updates, and the messages travel; the coordinator adds each update to the sum as it arrives, which
    overlaps with the training of other sites."""
    SUM = "sum"
    """The other steps of all attempts before the checkpoint: 1 to 3 and 5 to 8."""
    EVALUATE = "evaluate"
    """Held-out evaluation, at the coordinator or as a sum over sites with all of its steps; not that of single sites
    after the run (`simulation.per_site`)."""
    CHECKPOINT = "checkpoint"
    """Step 9; also the initial and the final model on disk."""


class Phases:
    """A stopwatch with one reading for each phase; for one thread.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: Phase | None = None
        self._since = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count what happens inside the context for a phase, and not for the one around it."""
        around = self._switch(phase)
        try:
            yield
        finally:
            self._switch(around)

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last call, without phases that did not run."""
        self._switch(self._running)
        spent = dict(self._spent)
        self._spent.clear()
        return spent

    def _switch(self, phase: Phase | None) -> Phase | None:
        """Let another phase count; returns the one that did."""
        before, now = self._running, self._clock()
        if before is not None:
            self._spent[before.value] += now - self._since
        self._running, self._since = phase, now
        return before


def added(*laps: Mapping[str, float]) -> dict[str, float]:
    """The sums of several laps, in the order of `Phase`; phases that did not run are left out."""
    total = {phase.value: sum(lap.get(phase.value, 0.0) for lap in laps) for phase in Phase}
    return {phase: seconds for phase, seconds in total.items() if any(phase in lap for lap in laps)}
