"""A whole run of the coordinator: from joined sites to a final model, from the start or a finished round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from cloister.aggregation.features.scales import Scales
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.rotation import Floats
from cloister.lm.model.layout import Vector, params_sha256
from cloister.lm.model.model import LanguageModel, load_model, save_pretrained
from cloister.lm.tasks.confusion import Confusion
from cloister.lm.tasks.evaluate import HeldOut
from cloister.privacy.accounting.terms import participation
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.mechanism.correlated import Blt, CorrelatedNoise, CorrelatedRow
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import QuorumError, SpoiledError
from cloister.protocol.identity.audit_log import NO_AUDIT_LOG, AuditLog
from cloister.protocol.identity.roster import Roster
from cloister.protocol.machine.storage import sync_folders
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.joining import check_size
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.plan import NO_EVALUATION
from cloister.server.record import journal as steps
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity
from cloister.server.record.journal import Entry, Journal
from cloister.server.record.outcome import Outcome, outcome
from cloister.server.record.phases import Phase, Phases, added
from cloister.server.record.progress import (
    BudgetSpent,
    Evaluated,
    Finished,
    NotJoined,
    Observer,
    Preparing,
    Refusing,
    RoundAbandoned,
    Started,
)
from cloister.server.record.public import base_of
from cloister.server.record.tracking import scalars
from cloister.server.round.channel import Channel
from cloister.server.round.evaluate import Evaluation, at_coordinator, at_sites, nowhere
from cloister.server.round.gate import Gate
from cloister.server.round.members import Members
from cloister.server.round.noise import kept_noise
from cloister.server.round.optimizer import ServerOptimizer
from cloister.server.round.outstanding import Outstanding
from cloister.server.round.round import RoundContext, run_round
from cloister.server.round.spending import Spending
from cloister.server.round.sum import Party


def run(
    folder: RunFolder,
    channel: Channel,
    observe: Observer,
    *,
    roster: Roster | None = None,
    public: Vector | None = None,
    evaluation: str = "",
    noise: Callable[[int], NoiseStream] = lambda _round: NoiseStream.fresh(),
    dataset: DatasetLedger | None = None,
    clock: Callable[[], float] = time.monotonic,
    phases: Phases | None = None,
    audit_log: AuditLog = NO_AUDIT_LOG,
    released: Callable[[int, Floats, int], None] = lambda _group, _mean, _sites: None,
) -> Outcome:
    """Ask the sites to join, then run the folder's plan to its end, from the last round that is done.

    Args:
        folder: The run folder.
        channel: Carries the messages; a `Streaming` one with `cohort.mode = "async"`.
        observe: Receives the run's events.
        roster: The sites' identities, for a plan that sums securely.
        public: What `public_model` returned.
        evaluation: Public records to evaluate on, instead of those that the plan names.
        noise: Returns, for 0, a stream from which the noise that a trusted coordinator adds in all rounds is derived;
            if that is declared, and not correlated, for a round the stream of its noise.
        dataset: In a simulation, the ledger over runs, which its sites charge.
        clock: Seconds, for durations.
        phases: Counts the seconds of the run's phases; it may have counted before this call.
        audit_log: Has a line for each join, refusal, release and charge before its effect.
        released: As in `RoundContext`, for an audit.

    Raises:
        RosterError: the roster has not as many sites as the plan; no site was asked.
        CloisterError: the run stopped. Finished rounds are on disk, and a later call continues after them.
    """
    plan = folder.plan
    if roster is not None:
        check_size(roster, plan)
    run_identity = identity(folder, roster)
    phases = phases or Phases(clock)
    with ExitStack() as preparing, Journal(folder.journal) as journal:
        preparing.enter_context(phases.during(Phase.PREPARE))
        base = base_of(plan, public)
        observe(Preparing("sites"))
        with phases.during(Phase.JOIN):
            members = Members(
                channel,
                plan,
                run_identity,
                lambda failure: observe(NotJoined(failure.site, failure.reason)),
                base=base,
                roster=roster,
                audit_log=audit_log,
            )
        observe(Preparing("model"))
        model = load_model(plan, base)
        checkpoints = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
        done = _adopt(journal, checkpoints)
        clip = plan.privacy.clip
        scales = None if plan.aggregation.compression is None else Scales.first(plan, model.layout.size)
        if done is None:
            weights = (
                model.layout.flatten(model.module) if public is None or base is not None else public.copy()
            )
            with phases.during(Phase.CHECKPOINT):
                digest = checkpoints.save(0, weights, {}, scales=scales)
                initial = {"round": 0, "params_sha256": digest}
                journal.record(0, 1, steps.DONE, initial)
            optimizer = ServerOptimizer(plan.server, weights)
        else:
            checkpoint = checkpoints.load(done.round)
            weights = checkpoint.weights
            optimizer = ServerOptimizer(plan.server, weights, checkpoint.optimizer)
            scales = checkpoint.scales
            clip = done.detail.get("clip") or clip
        model.layout.place(weights, model.module)  # one copy of the model, which evaluation uses too
        last = done.round if done else 0
        sums = Sums.over(plan, model.layout, b"" if base is None else vector_hash(base))
        terms = sums.terms
        party = Party(
            sums,
            run_identity,
            roster,
            members,
            journal,
            KeptAttempt(_private(folder.attempt)),
            observe,
            clock,
            Spending(terms, run_identity, folder.ledger, dataset=dataset) if terms else None,
            left_out={
                entry.detail["site"]: entry.detail["reason"]
                for entry in journal.entries()
                if entry.step == steps.LEFT_OUT
            },
            complaints={
                (by, of)
                for entry in journal.entries()
                if entry.step == steps.COMPLAINED
                for by, of in entry.detail["pairs"]
            },
            phases=phases,
            outstanding=Outstanding(members, plan.cohort.deadline_s) if plan.cohort.mode == "async" else None,
            audit_log=audit_log,
        )
        for entry in journal.entries():
            if entry.step == steps.MEASURED:
                party.measured.add(entry.detail)
        for failure in members.refusals:
            journal.record(last, 0, steps.REFUSED, {"site": failure.site, "reason": failure.reason})
        mechanism = terms.mechanism if terms else None
        drawn: Callable[[int], NoiseStream | CorrelatedRow] = noise
        if mechanism is not None and not mechanism.variance and last < plan.run.rounds:
            matrix = mechanism.correlation or Blt()
            blt, stream = kept_noise(folder.noise, journal, matrix, lambda: noise(0), last)
            drawn = noise if stream.declared else lambda number: stream.child(f"round-{number}")
            if (pattern := participation(plan)) is not None:
                mechanism = mechanism.correlated_by(blt, pattern)
                drawn = CorrelatedNoise(blt, stream, model.layout.size).row
        gate = Gate(plan.server.gate, _evaluation(party, model, evaluation or plan.server.evaluation))
        clip = clip if mechanism else 0.0
        context = RoundContext(party, checkpoints, optimizer, gate, mechanism, clip, drawn, released, scales)
        preparing.close()
        observe(Started(plan, tuple(members.sites), model.layout.size, last))
        folder.truncate_metrics(last)
        with SummaryWriter(str(folder.tensorboard), purge_step=last + 1) as board:
            if not any(row["round"] == last for row in folder.metrics()):
                # A process that was killed may have journaled this round without reporting it.
                _report(context, folder, board, done.detail if done else initial)
            with closing(party.outstanding) if party.outstanding else nullcontext():
                last, stopped = _rounds(context, folder, board, last)
        with phases.during(Phase.CHECKPOINT):
            save_pretrained(model, optimizer.weights, folder.final)
            digest = params_sha256(optimizer.weights)
        end = {"params_sha256": digest, "stopped": stopped, "phase_seconds": phases.lap()}
        journal.record(last, 1, steps.FINISHED, end)
        folder.noise.unlink(missing_ok=True)
        party.kept.remove()
        observe(Finished(last))
    return outcome(folder)


def _adopt(journal: Journal, checkpoints: Checkpoints) -> Entry | None:
    """The newest round that is done: a crash may have come between its checkpoint and the journal."""
    while (done := journal.newest(steps.DONE)) is not None:
        facts = checkpoints.done(done.round + 1)
        if facts is None:
            break
        journal.record(done.round + 1, facts["attempts"], steps.DONE, facts)
    return done


def _rounds(context: RoundContext, folder: RunFolder, board: SummaryWriter, last: int) -> tuple[int, str]:
    """Run the remaining rounds; returns the last that is done, and why the run ended before its last round, or ''."""
    party, plan = context.party, context.party.plan
    abandoned = spoiled = 0
    for number in range(last + 1, plan.run.rounds + 1):
        known_liars = len(party.left_out)
        if party.members.newcomers():
            with party.phases.during(Phase.JOIN):
                party.members.admit()
        with party.phases.during(Phase.SUM):
            sites = party.present(party.cohort(TRAIN, number))
            result = _exceeded(party, number, sites) or run_round(context, number)
            if isinstance(result, Refusing):  # another run on the same dataset may have spent meanwhile
                result = _exceeded(party, number, sites) or result
        if isinstance(result, BudgetSpent | Refusing):
            why = "refused" if isinstance(result, Refusing) else "dataset" if result.dataset else "budget"
            party.record("refusal", number, 0, {"": f"the run ends: {why}"})
            party.observe(result)
            _report_end(context, folder, last)
            return last, why
        last = number
        _report(context, folder, board, asdict(result))
        if isinstance(result, RoundAbandoned) and result.spoiled:
            spoiled += 1  # by a site that cannot be named: honest sites spoil none, so all of them count
            if spoiled == min(plan.cohort.attempts, plan.run.rounds):
                raise SpoiledError(
                    f"round {number}",
                    result.spoiled,
                    expected="totals that honest sites can have: a site lied in its counters, which no party can trace "
                    "under masks",
                    fix="the model has no such round in it; find the site, have it repaired or start a run without it, "
                    "or continue this run with the next round",
                )
        elif not isinstance(result, RoundAbandoned):
            abandoned = 0
        elif len(party.left_out) == known_liars:  # otherwise later rounds are without the site that lied
            abandoned += 1
        if abandoned == plan.cohort.attempts:
            raise QuorumError(
                f"rounds {number - abandoned + 1} to {number}",
                "given up",
                expected="survivors that reveal their shares",
                fix="see above which sites did not, and repair them; the run continues with the next round",
            )
    return last, ""


def _exceeded(party: Party, number: int, sites: Sequence[str]) -> BudgetSpent | None:
    """The budget that a round of these sites would exceed."""
    return None if party.spending is None else party.spending.exceeded(number, sites)


def _evaluation(party: Party, model: LanguageModel, source: str) -> Evaluation:
    if not source:
        return at_sites(party)
    return nowhere if source == NO_EVALUATION else at_coordinator(party.plan, model, source)


def _report_end(context: RoundContext, folder: RunFolder, number: int) -> None:
    """Evaluate the model with which a run ends early, if no evaluation was due there."""
    rows = {row["round"]: row for row in folder.metrics()}
    plan = context.party.plan
    if "loss" in rows.get(number, {}) or not (plan.server.evaluation or plan.evaluates(number)):
        return  # sites evaluate in the rounds of the plan only
    found = _evaluated(context, number)
    if found:
        folder.truncate_metrics(number - 1)
        folder.add_metrics(_timed(rows.get(number, {"round": number}) | found, context.party.phases))


def _report(
    context: RoundContext,
    folder: RunFolder,
    board: SummaryWriter,
    facts: dict[str, Any],
) -> None:
    """Evaluate the model after a round if that is due, and write the round's line of metrics."""
    number, plan = facts["round"], context.party.plan
    row = dict(facts)
    if plan.evaluates(number):
        row |= _evaluated(context, number)
    row = _timed(row, context.party.phases)
    for name, value in scalars(row).items():
        board.add_scalar(name, value, number)
    board.flush()
    folder.add_metrics(row)


def _evaluated(context: RoundContext, number: int) -> dict[str, Any]:
    """The figures of the model after a round, observed; empty without an evaluation."""
    with context.party.phases.during(Phase.EVALUATE):
        held_out = context.gate.held_out(number, context.optimizer.weights)
    if held_out is None:
        return {}
    found = _figures(number, held_out, classified=context.party.plan.data.task == "classify")
    context.party.observe(found)
    return {name: value for name, value in asdict(found).items() if value is not None}


def _figures(number: int, held_out: HeldOut, *, classified: bool) -> Evaluated:
    found = Evaluated(
        number,
        held_out.loss,
        None if classified else held_out.perplexity,
        held_out.accuracy,
        None if classified else held_out.bits_per_byte,
    )
    if not held_out.confusion:
        return found
    confusion = Confusion(held_out.confusion)
    macro = confusion.macro()
    return replace(
        found,
        choice_accuracy=None if classified or not confusion.records else confusion.accuracy,
        macro_precision=macro.precision,
        macro_recall=macro.recall,
        macro_f1=macro.f1,
        confusion=confusion.counts,
    )


def _timed(row: dict[str, Any], phases: Phases) -> dict[str, Any]:
    """A line of metrics with the seconds that its process has spent since the line before it."""
    return row | {"phase_seconds": added(row.get("phase_seconds", {}), phases.lap())}


def _private(folder: Path) -> Path:
    """The folder, made, and open to its owner only: its content opens a sum before a trusted coordinator's noise."""
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folders(folder, folder.parent)
    return folder
