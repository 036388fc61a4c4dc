"""A whole run of the coordinator: from joined sites to a final model, from the beginning or from where it stopped."""

from __future__ import annotations

import math
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from cloister.lm.layout import params_sha256
from cloister.lm.model import load_model, save_pretrained
from cloister.protocol.errors import QuorumError, RunFolderError
from cloister.protocol.roster import Roster
from cloister.server import journal as steps
from cloister.server.checkpoint import Checkpoints
from cloister.server.evaluate import Evaluation, at_coordinator, at_sites
from cloister.server.folder import RunFolder
from cloister.server.journal import Journal
from cloister.server.optimizer import ServerOptimizer
from cloister.server.progress import Evaluated, Finished, Observer, Preparing, RoundAbandoned, Started
from cloister.server.round import RoundContext, run_round
from cloister.server.sum import Channel, Party


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    rounds: int
    initial_loss: float | None
    final_loss: float | None
    """Held-out loss, nats per token; None, as what follows, where no evaluation came about."""
    perplexity: float | None
    accuracy: float | None
    bits_per_byte: float | None
    tokens: int
    """Tokens learned from, over all rounds and sites."""
    seconds: float
    """Time in rounds, from the first request to the decoded mean, over all processes that worked on the run."""
    params_sha256: str

    @property
    def tokens_per_second(self) -> float:
        """Tokens learned from in a second of a round."""
        return self.tokens / self.seconds if self.seconds else 0.0


def run(
    folder: RunFolder,
    channel: Channel,
    observe: Observer,
    *,
    roster: Roster | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the folder's plan to its end, from the last round that was done.

    Args:
        folder: The run folder.
        channel: The sites that have joined.
        observe: Told what happens.
        roster: The sites' identities, for a plan that sums securely.
        clock: Seconds, for durations.

    Raises:
        CloisterError: what stopped the run; what was done is on disk, and a later call goes on from there.
    """
    plan = folder.plan
    observe(Preparing("model"))
    model = load_model(plan)
    checkpoints = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
    run_identity = identity(folder)
    with Journal(folder.journal) as journal:
        done = journal.newest(steps.DONE)
        if done is None:
            optimizer = ServerOptimizer(plan.server, model.layout.flatten(model.module))
            digest = checkpoints.save(0, optimizer.weights, {})
            initial = {"round": 0, "params_sha256": digest}
            journal.record(0, 1, steps.DONE, initial)
        else:
            checkpoint = checkpoints.load(done.round)
            optimizer = ServerOptimizer(plan.server, checkpoint.weights, checkpoint.optimizer)
        last = done.round if done else 0
        party = Party(plan, run_identity, roster, model.layout, channel, journal, observe, clock)
        evaluate = at_coordinator(plan, model) if plan.server.evaluation else at_sites(party)
        context = RoundContext(party, checkpoints, optimizer)
        observe(Started(plan, tuple(channel.sites), model.layout.size, last))
        folder.truncate_metrics(last)
        with SummaryWriter(str(folder.tensorboard), purge_step=last + 1) as board:
            if not any(row["round"] == last for row in folder.metrics()):
                # A process that was killed may have journaled a round and not yet reported it.
                _report(context, folder, board, done.detail if done else initial, evaluate)
            abandoned = 0
            for number in range(last + 1, plan.run.rounds + 1):
                result = run_round(context, number)
                _report(context, folder, board, asdict(result), evaluate)
                abandoned = abandoned + 1 if isinstance(result, RoundAbandoned) else 0
                if abandoned == plan.cohort.attempts:
                    raise QuorumError(
                        f"rounds {number - abandoned + 1} to {number}",
                        "given up",
                        expected="survivors that reveal their shares",
                        fix="see above which sites did not, and mend them; `cloister resume` goes on after them",
                    )
        save_pretrained(model, optimizer.weights, folder.final)
        digest = params_sha256(optimizer.weights)
        journal.record(plan.run.rounds, 1, steps.FINISHED, {"params_sha256": digest})
        observe(Finished(plan.run.rounds))
    return outcome(folder)


def _check_nothing_lost(folder: RunFolder) -> None:
    """A journal that knows of no round, beside a run that had some, is not the journal of that run.

    Raises:
        RunFolderError: there are checkpoints or metrics that it knows nothing of; nothing was touched.
    """
    later = [
        path for path in folder.checkpoints.glob("round-*.safetensors") if "round-00000" not in path.name
    ]
    if later or folder.metrics():
        raise RunFolderError(
            str(folder.journal),
            expected="the journal of this run, and it is gone",
            fix="bring it back from a copy, or start a new run with another --out",
        )


def finish(folder: RunFolder) -> None:
    """Write `final/` from the last checkpoint of a run that has come to its end.

    Raises:
        RunFolderError: the checkpoint is missing or damaged.
        StorageError: the disk is full.
    """
    model = load_model(folder.plan)
    checkpoints = Checkpoints(folder.checkpoints, model.layout, folder.plan.server.keep_checkpoints)
    save_pretrained(model, checkpoints.load(folder.plan.run.rounds).weights, folder.final)


def identity(folder: RunFolder) -> str:
    """The run's identity: drawn once, so that no message of another run of the same plan is taken for one of this.

    Raises:
        RunFolderError: the folder holds a run, and its journal is gone.
    """
    with Journal(folder.journal) as journal:
        if journal.newest(steps.CREATED) is None:
            _check_nothing_lost(folder)
            journal.record(0, 0, steps.CREATED, {"run": secrets.token_hex(16)})
        created = journal.newest(steps.CREATED)
    assert created is not None
    return str(created.detail["run"])


def reached(folder: RunFolder, step: str) -> bool:
    """Whether the run's journal has come to a step."""
    if not folder.journal.exists():
        return False
    with Journal(folder.journal) as journal:
        return journal.newest(step) is not None


def outcome(folder: RunFolder) -> Outcome:
    """Read what came of a finished run."""
    with Journal(folder.journal) as journal:
        end = journal.newest(steps.FINISHED)
        known = {entry.round: entry.detail for entry in journal.entries() if entry.step == steps.DONE}
    reported = {row["round"]: row for row in folder.metrics()}
    rows = [known[number] | reported.get(number, {}) for number in sorted(known)]
    evaluated = [row for row in rows if "loss" in row]
    if end is None:
        raise RunFolderError(
            str(folder.path),
            expected="a run that has come to its end",
            fix=f"cloister resume {shlex.quote(str(folder.path))}",
        )
    initial = next((row["loss"] for row in evaluated if row["round"] == 0), None)
    final = evaluated[-1] if evaluated and evaluated[-1]["round"] == end.round else {}
    return Outcome(
        rounds=end.round,
        initial_loss=initial,
        final_loss=final.get("loss"),
        perplexity=final.get("perplexity"),
        accuracy=final.get("accuracy"),
        bits_per_byte=final.get("bits_per_byte"),
        tokens=sum(row.get("tokens", 0) for row in rows),
        seconds=sum(row.get("seconds", 0.0) for row in rows),
        params_sha256=end.detail["params_sha256"],
    )


def _report(
    context: RoundContext,
    folder: RunFolder,
    board: SummaryWriter,
    facts: dict[str, Any],
    evaluate: Evaluation,
) -> None:
    """Evaluate the model after a round where that is due, and write its line of metrics."""
    number, plan, observe = facts["round"], context.party.plan, context.party.observe
    row = dict(facts)
    if number % plan.server.evaluate_every == 0 or number == plan.run.rounds:
        held_out = evaluate(number, context.optimizer.weights.copy())
        if held_out is not None:
            found = Evaluated(
                number, held_out.loss, held_out.perplexity, held_out.accuracy, held_out.bits_per_byte
            )
            observe(found)
            row |= asdict(found)
    for name, value in row.items():
        if name != "round" and isinstance(value, int | float) and math.isfinite(value):
            board.add_scalar(name, value, number)
    board.flush()
    folder.add_metrics(row)
