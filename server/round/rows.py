"""The lines of metrics of a run: a round's facts, and the evaluation of its model if that is due."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from cloister.server.record.folder import RunFolder
from cloister.server.record.phases import added
from cloister.server.record.progress import Evaluated
from cloister.server.record.tracking import scalars
from cloister.server.round.round import RoundContext


class Rows:
    """Writes the lines of metrics.

    Args:
        context: The rounds.
        folder: The run folder.
        board: Shows the same.
    """

    def __init__(self, context: RoundContext, folder: RunFolder, board: SummaryWriter) -> None:
        self._context = context
        self._folder = folder
        self._board = board

    def report(self, facts: dict[str, Any]) -> None:
        """Evaluate the model after a round if that is due, and write the round's line.

        Args:
            facts: The facts of the round.
        """
        number, row = facts["round"], dict(facts)
        if self._context.party.plan.evaluates(number):
            row |= self._evaluated(number)
        row = self._timed(row)
        for name, value in scalars(row).items():
            self._board.add_scalar(name, value, number)
        self._board.flush()
        self._folder.add_metrics(row)

    def report_end(self, number: int) -> None:
        """Evaluate the model with which a run ends early, if no evaluation was due there."""
        rows = {row["round"]: row for row in self._folder.metrics()}
        plan = self._context.party.plan
        if "loss" in rows.get(number, {}) or (plan.at_sites and not plan.evaluates(number)):
            return  # sites evaluate in the rounds of the plan only
        found = self._evaluated(number)
        if found:
            self._folder.truncate_metrics(number - 1)
            self._folder.add_metrics(self._timed(rows.get(number, {"round": number}) | found))

    def _evaluated(self, number: int) -> dict[str, Any]:
        """The figures of the model after a round, observed; empty without an evaluation."""
        context = self._context
        measured = context.measured(number)
        if measured is None:
            return {}
        context.party.observe(Evaluated(number, measured.told))
        return dict(measured.figures)

    def _timed(self, row: dict[str, Any]) -> dict[str, Any]:
        """A line with the seconds that its process has spent since the line before it."""
        lap = self._context.party.phases.lap()
        return row | {"phase_seconds": added(row.get("phase_seconds", {}), lap)}
