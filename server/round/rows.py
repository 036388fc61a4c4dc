"""The lines of metrics of a run: a round's facts, and the evaluation of its model if that is due."""

from __future__ import annotations

from typing import Any

from torch.utils.tensorboard import SummaryWriter

from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFolder
from cloister.server.record.phases import added
from cloister.server.record.progress import Evaluated, Warned
from cloister.server.record.tracking import scalars
from cloister.server.round.round import RoundContext

_PATIENCE = 3
"""Evaluations after that of the initial model, none of which has a lower loss, after which a run warns."""


def what_to_change(plan: Plan) -> str:
    """What to change where the held-out loss does not fall."""
    if plan.privacy.unit == "none":
        return "try a lower local.learning_rate, or more local.steps"
    return "see by cloister plan check how long the noise is beside the signal, or try a lower local.learning_rate"


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
        self._losses: dict[int, float] | None = None

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
        if (loss := measured.figures.get("loss")) is not None:
            self._watch(number, loss)
        return dict(measured.figures)

    def _watch(self, number: int, loss: float) -> None:
        """Warn once if the held-out loss does not fall."""
        if self._losses is None:  # those of an earlier process too
            self._losses = {row["round"]: row["loss"] for row in self._folder.metrics() if "loss" in row}
        self._losses[number] = loss
        losses = [self._losses[each] for each in sorted(self._losses)]
        if len(losses) == 1 + _PATIENCE and min(losses[1:]) >= losses[0]:
            text = f"the held-out loss has not fallen in {_PATIENCE} evaluations: {losses[0]:.4g} -> {loss:.4g} nats"
            self._context.party.observe(Warned(f"{text}; {what_to_change(self._context.party.plan)}"))

    def _timed(self, row: dict[str, Any]) -> dict[str, Any]:
        """A line with the seconds that its process has spent since the line before it."""
        lap = self._context.party.phases.lap()
        return row | {"phase_seconds": added(row.get("phase_seconds", {}), lap)}
