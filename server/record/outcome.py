"""The outcome of a finished run: its figures, and its final model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister.aggregation.features.question import asked_of
from cloister.aggregation.features.registry import FIGURES
from cloister.aggregation.sums import Sums
from cloister.lm.measures.confusion import CONFUSION, Confusion
from cloister.lm.measures.entities import ENTITIES, Entities
from cloister.lm.measures.figures import FIGURES as EVALUATED
from cloister.lm.model import saved
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import LanguageModel, load_model, save_pretrained
from cloister.lm.questions.public import public_totals
from cloister.privacy.report.answer import Answer
from cloister.protocol.errors import RunFolderError
from cloister.protocol.figure import Figure
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.plan import NO_EVALUATION, Plan
from cloister.protocol.questions.estimate import Totals
from cloister.server.record import journal as steps
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.server.record.journal import Journal
from cloister.server.record.phases import added
from cloister.server.record.progress import Observer, Preparing
from cloister.server.record.public import base_of, public_model


@dataclass(frozen=True)
class Outcome:
    """The figures of a finished run."""

    rounds: int
    initial_loss: float | None
    figures: Mapping[str, Any]
    """By name: those of the final model, if it was evaluated (`lm/measures/figures.py`), and of all rounds together
    those that the plan's features tell (`aggregation/features/`)."""
    round_seconds: float
    """Time in rounds, each from the first request of the attempt that counted to the decoded mean, over all processes
    that worked on the run. A part of the phases `train` and `sum`."""
    phase_seconds: Mapping[str, float]
    """Seconds by phase (`phases.py`), over all processes that worked on the run. A process that was stopped counts up
    to the last round that it finished. Empty for the best trial of a private search."""
    params_sha256: str
    given_up: int = 0
    """Rounds that were given up: the model has nothing of them."""
    gate_refused: int = 0
    """Rounds whose mean the gate refused."""
    epsilon: float | None = None
    """The largest epsilon of a site by the coordinator's ledger, which counts a round that was not finished; None
    without a privacy unit."""
    stopped: str = ""
    """Why the run ended before its last round: `budget`, `dataset` (the limit over all runs) or
    `refused`; empty if it did not."""
    coordinator_rss: int | None = None
    """Largest resident set of the coordinator's process, in bytes: the kernel's VmHWM, which counts pages that several
    processes share in each of them. Of the process that returns this; None if not known."""
    confusion: Confusion | None = None
    """The confusion matrix of the final model on held-out texts or prompts; None without classes and choices."""
    entities: Entities | None = None
    """The entities of held-out texts that the final model finds; None without a task that looks for them."""
    worker_rss: int | None = None
    """The same of that worker process of a simulation for which it was largest, of those alive at the run's end."""

    @property
    def final_loss(self) -> float | None:
        """Held-out loss, nats per label that is learned; None if the final model was not evaluated."""
        return self.figures.get("loss")

    @property
    def tokens(self) -> int:
        """Labels that were trained on, over all rounds and sites: tokens, or texts or words that are classified."""
        return self.figures.get("tokens") or 0

    def shown(self, figures: Sequence[Figure], label: str) -> Iterator[tuple[str, str]]:
        """The figures of the run but its loss, in words and for readers; those that there are.

        Args:
            figures: Which.
            label: What the plan learns from (`Kind.label`).
        """
        for figure in figures:
            if figure.name != "loss" and (shown := figure.shown(self.figures.get(figure.name))):
                yield figure.named(label), shown

    def values(self, figures: Sequence[Figure]) -> dict[str, Any]:
        """Figures of the run but its loss, as JSON has them; None for one that there is not."""
        return {figure.name: self.figures.get(figure.name) for figure in figures if figure.name != "loss"}

    @property
    def tokens_per_second(self) -> float:
        """`tokens` / `round_seconds`."""
        return self.tokens / self.round_seconds if self.round_seconds else 0.0


def outcome(files: RunFiles) -> Outcome:
    """Read the figures of a finished run from its journal and metrics.

    Raises:
        RunFolderError: the run is not finished.
    """
    with Journal(files.journal) as journal:
        end = journal.newest(steps.FINISHED)
        known = {entry.round: entry.detail for entry in journal.entries() if entry.step == steps.DONE}
    reported = {row["round"]: row for row in files.metrics()}
    rows = [known[number] | reported.get(number, {}) for number in sorted(known)]
    evaluated = [row for row in rows if "loss" in row]
    if end is None:
        raise RunFolderError(str(files.path), expected="a finished run", fix=files.resume_command())
    initial = next((_number(row["loss"]) for row in evaluated if row["round"] == 0), None)
    final = evaluated[-1] if evaluated and evaluated[-1]["round"] == end.round else {}
    figures = {figure.name: figure.of_run(rows) for figure in FIGURES if figure.over}
    figures |= {figure.name: _number(final[figure.name]) for figure in EVALUATED if figure.name in final}
    return Outcome(
        rounds=end.round,
        initial_loss=initial,
        figures={name: value for name, value in figures.items() if value is not None},
        round_seconds=sum(row.get("seconds", 0.0) for row in rows),
        phase_seconds=added(
            *(row.get("phase_seconds", {}) for row in rows), end.detail.get("phase_seconds", {})
        ),
        params_sha256=end.detail["params_sha256"],
        given_up=sum(not row.get("sites") for row in rows if row["round"]),
        gate_refused=sum(bool(row.get("refused")) for row in rows),
        epsilon=end.detail.get("epsilon"),
        stopped=end.detail.get("stopped", ""),
        confusion=Confusion(tuple(map(tuple, final[CONFUSION]))) if final.get(CONFUSION) else None,
        entities=Entities(tuple(map(tuple, final[ENTITIES]))) if final.get(ENTITIES) else None,
    )


def _number(figure: float | None) -> float:
    """A figure of an evaluation; JSON has None for what is no number (`finite`)."""
    return math.nan if figure is None else figure


_LARGE = 10**9  # bytes, which take a second to read where they are not in memory


def remove_secrets(files: RunFiles) -> None:
    """Remove what could open a run's last sum without noise, of a run that is not continued."""
    files.noise.unlink(missing_ok=True)
    for secret in (files.attempt, files.spool):
        shutil.rmtree(secret, ignore_errors=True)


def public_beside(folder: RunFolder, model: LanguageModel) -> Totals | None:
    """What a question about models finds on the public records of its plan; None without such records.

    Raises:
        DataError: they cannot be used.
    """
    plan, source = folder.plan, folder.evaluated_on(folder.plan)
    return None if plan.question is None or source == NO_EVALUATION else public_totals(plan, model, source)


def save_result(
    folder: RunFolder, sums: Sums, model: LanguageModel, weights: Vector, public: Totals | None
) -> None:
    """Write what a run is for: its last model, or the answer to its question.

    A question that ended before its round has no answer, and leaves no folder.

    Args:
        folder: The run folder.
        sums: Of the run.
        model: Its model.
        weights: (d,) float32, as the last round has left them.
        public: What `public_beside` has found.

    Raises:
        StorageError: the disk is full or refuses the write; an existing folder is unchanged.
    """
    if folder.plan.question is None:
        save_pretrained(model, weights, folder.final)
        return
    with Journal(folder.journal) as journal:
        done = journal.newest(steps.DONE)
    sites = 0 if done is None else done.detail.get("sites", 0)
    if sites:
        totals, deviation = weights.astype(np.float64) * sites, asked_of(sums).deviation(sites)
        answer = Answer.of(sums.plan, totals, sites, deviation, public)
        text = json.dumps(answer.to_json(), indent=1) + "\n"

        def write(staging: Path) -> None:
            (staging / folder.answer.name).write_text(text, encoding="utf-8")
            saved.record(staging)

        write_folder(folder.final.absolute(), write)


def private_plan(files: RunFiles) -> Plan:
    """The plan of a finished run, what came out of which is private.

    Raises:
        RunFolderError: the run is not finished, or has no guarantee.
    """
    plan = read_plan(files.path)
    outcome(files)  # refuses a run that is not finished
    if plan.privacy.unit == "none" or plan.simulation.noise_seed is not None:
        raise RunFolderError(
            str(files.path),
            expected="a run with a privacy unit and secret noise: what is made from it shows its records",
        )
    return plan


def finish(folder: RunFolder, observe: Observer) -> Outcome:
    """Write the final model of a finished run again, from its last checkpoint, if it is missing or damaged.

    Before that, what could open its last sum without noise is removed, if a crash has left it.

    Returns:
        The run's outcome.

    Raises:
        RunFolderError: the checkpoint is missing or damaged.
        DataError: the public records of a question cannot be used.
        StorageError: the disk is full.
    """
    remove_secrets(folder)  # a crash may have come between the journal and the end of the run
    final, done = folder.final, outcome(folder)
    if not final.is_dir():
        why = "it is missing"
    elif saved.recorded(final):
        if saved.size(final) > _LARGE:
            observe(Preparing(f"the check of the final model, {saved.size(final) / 1e9:.1f} GB"))
        why = saved.damage(final)
    else:
        why = f"{saved.RECORD} is missing"
    if why:
        observe(Preparing(f"the final model again, from the last checkpoint: {why}"))
        base = base_of(folder.plan, public_model(folder, observe))
        model = load_model(folder.plan, base)
        checkpoints = Checkpoints(folder.checkpoints, model.layout, folder.plan.server.keep_checkpoints)
        sums = Sums.over(folder.plan, model.layout, b"" if base is None else vector_hash(base))
        weights = checkpoints.load(done.rounds).weights
        save_result(folder, sums, model, weights, public_beside(folder, model))
    return done
