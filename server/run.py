"""A whole run of the coordinator: from joined sites to a final model, from the start or a finished round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from cloister.aggregation.features.feature import Given
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.rotation import Floats
from cloister.lm.model.layout import Vector, params_sha256
from cloister.lm.model.model import LanguageModel, load_model
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
from cloister.server.record.outcome import Outcome, outcome, public_beside, save_result
from cloister.server.record.phases import Phase, Phases
from cloister.server.record.progress import (
    BudgetSpent,
    Finished,
    NotJoined,
    Observer,
    Preparing,
    Refusing,
    RoundAbandoned,
    Started,
)
from cloister.server.record.public import base_of
from cloister.server.round.evaluate import Evaluation, Evaluations, at_coordinator, at_sites, nowhere
from cloister.server.round.noise import kept_noise
from cloister.server.round.round import RoundContext, run_round
from cloister.server.round.rows import Rows
from cloister.server.sum.channel import Channel
from cloister.server.sum.members import Members
from cloister.server.sum.outstanding import Outstanding
from cloister.server.sum.party import Party
from cloister.server.sum.spending import Spending


def run(
    folder: RunFolder,
    channel: Channel,
    observe: Observer,
    *,
    roster: Roster | None = None,
    public: Vector | None = None,
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
        sums = Sums.over(plan, model.layout, b"" if base is None else vector_hash(base))
        checkpoints = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
        done = _adopt(journal, checkpoints)
        last = done.round if done else 0
        spending = None
        if sums.terms is not None:
            spending = Spending(sums.terms, run_identity, folder.ledger, dataset=dataset)
        party = Party(
            sums,
            run_identity,
            roster,
            members,
            journal,
            KeptAttempt(_private(folder.attempt)),
            observe,
            clock,
            spending,
            phases=phases,
            outstanding=Outstanding(members, plan.cohort.deadline_s) if plan.cohort.mode == "async" else None,
            given=_given(folder, journal, sums, noise, last),
            audit_log=audit_log,
        )
        _recall(party)
        with phases.during(Phase.CHECKPOINT):
            weights = _begin(party, checkpoints, model, None if base is not None else public)
        model.layout.place(weights, model.module)  # one copy of the model, which evaluation uses too
        for failure in members.refusals:
            journal.record(last, 0, steps.REFUSED, {"site": failure.site, "reason": failure.reason})
        evaluations = Evaluations(_evaluation(party, model, folder.evaluated_on(plan)))
        beside = public_beside(folder, model)  # before anything is charged: its records may be missing
        context = RoundContext(party, checkpoints, weights, evaluations, released)
        preparing.close()
        observe(Started(plan, tuple(members.sites), model.layout.size, last))
        folder.truncate_metrics(last)
        with SummaryWriter(str(folder.tensorboard), purge_step=last + 1) as board:
            rows = Rows(context, folder, board)
            if not any(row["round"] == last for row in folder.metrics()):
                # A process that was killed may have journaled this round without reporting it.
                newest = journal.newest(steps.DONE)
                assert newest is not None, "the initial model is journaled"
                rows.report(newest.detail)
            with closing(party.outstanding) if party.outstanding else nullcontext():
                last, stopped = _rounds(context, rows, last)
        with phases.during(Phase.CHECKPOINT):
            save_result(folder, sums, model, weights, beside)
            digest = params_sha256(weights)
        epsilon = (
            party.spending.epsilon() if party.spending else None
        )  # also of a round that was not finished
        end = {"params_sha256": digest, "stopped": stopped, "epsilon": epsilon, "phase_seconds": phases.lap()}
        journal.record(last, 1, steps.FINISHED, end)
        folder.noise.unlink(missing_ok=True)
        party.kept.remove()
        observe(Finished(last, epsilon))
    return outcome(folder)


def _given(
    folder: RunFolder, journal: Journal, sums: Sums, noise: Callable[[int], NoiseStream], last: int
) -> Given:
    """What the run gives its features. A trusted coordinator's noise comes from one key, durable before round 1."""
    mechanism = sums.terms.mechanism if sums.terms else None
    drawn: Callable[[int], NoiseStream | CorrelatedRow] = noise
    if mechanism is not None and not mechanism.variance and last < sums.plan.run.rounds:
        matrix = mechanism.correlation or Blt()
        blt, stream = kept_noise(folder.noise, journal, matrix, lambda: noise(0), last)
        drawn = noise if stream.declared else lambda number: stream.child(f"round-{number}")
        if (pattern := participation(sums.plan)) is not None:
            mechanism = mechanism.correlated_by(blt, pattern)
            drawn = CorrelatedNoise(blt, stream, sums.parameters).row
    return Given(mechanism=mechanism, noise=drawn)


def _begin(party: Party, checkpoints: Checkpoints, model: LanguageModel, public: Vector | None) -> Vector:
    """The model, (d,) float32, as the last finished round has left it.

    Args:
        party: The run; its journal gets round 0, the initial model, if the run begins, and its features their state.
        checkpoints: The run's.
        model: The plan's model.
        public: The parameters with which a run begins; None: those of the model.
    """
    journal, features = party.journal, party.features
    done = journal.newest(steps.DONE)
    if done is None:
        start = model.layout.flatten(model.module) if public is None else public.copy()
        digest = checkpoints.save(0, start, features=features.state())
        journal.record(0, 1, steps.DONE, {"round": 0, "params_sha256": digest})
        return start
    checkpoint = checkpoints.load(done.round)
    features.restore(checkpoint.features)
    return checkpoint.weights


def _recall(party: Party) -> None:
    """Take what the journal says of sites: liars, complaints, and what the times of earlier sums say."""
    for entry in party.journal.entries():
        match entry.step:
            case steps.LEFT_OUT:
                party.left_out[entry.detail["site"]] = entry.detail["reason"]
            case steps.COMPLAINED:
                party.complaints.update((by, of) for by, of in entry.detail["pairs"])
            case steps.MEASURED:
                party.features.recall(entry.detail)


def _adopt(journal: Journal, checkpoints: Checkpoints) -> Entry | None:
    """The newest round that is done: a crash may have come between its checkpoint and the journal."""
    while (done := journal.newest(steps.DONE)) is not None:
        facts = checkpoints.done(done.round + 1)
        if facts is None:
            break
        journal.record(done.round + 1, facts["attempts"], steps.DONE, facts)
    return done


def _rounds(context: RoundContext, rows: Rows, last: int) -> tuple[int, str]:
    """Run the remaining rounds; returns the last that is done, and why the run ended before its last round, or ''."""
    party, plan = context.party, context.party.plan
    begun = first = last + 1  # `first` follows the last round that is done
    limit = min(plan.cohort.attempts, plan.run.rounds - last)
    lost = spoiled = 0
    for number in range(begun, plan.run.rounds + 1):
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
            rows.report_end(last)
            return last, why
        last = number
        rows.report(result.facts())
        if not isinstance(result, RoundAbandoned):
            first, lost = number + 1, 0
            continue
        traced = plan.aggregation.trace_groups > 1 and party.division(TRAIN, number) == "plan"
        if result.spoiled and traced and number < plan.run.rounds:
            continue  # the next round is divided, and a site that lies in it loses its group alone
        # Later rounds are without a site that is known to have lied, and the next one has no histories to differ.
        if len(party.left_out) == known_liars and not result.apart:
            lost += 1
        if result.spoiled and len(party.left_out) == known_liars:
            spoiled += 1  # by a site that cannot be named: honest sites spoil none, so all of them count
        if spoiled == limit:
            raise SpoiledError(
                f"round {number}",
                result.spoiled,
                expected="a sum that honest sites can have: a site lied in it, and nothing in one sum says which",
                fix="the model has no such round in it; find the site, have it repaired or start a run without it, "
                "or with aggregation.trace_groups, or continue this run with the next round, if there is one",
            )
        # A process that has done no round does not end a run well, whoever has lost its rounds.
        if lost == limit or (number == plan.run.rounds and first == begun):
            raise QuorumError(
                f"rounds {first} to {number}",
                "given up",
                expected="survivors that reveal their shares, totals that honest sites can have, and one history of "
                "what sites carry",
                fix="repair the sites that are named above; the run continues with the next round, if it has one",
            )
    if not any(entry.step == steps.DONE and entry.detail.get("sites") for entry in party.journal.entries()):
        # Where all rounds were lost before the process began, none is left that could say so.
        raise QuorumError(
            f"rounds 1 to {plan.run.rounds}",
            "given up",
            expected="at least one round with a sum",
            fix="repair the sites, and start a new run",
        )
    return last, ""


def _exceeded(party: Party, number: int, sites: Sequence[str]) -> BudgetSpent | None:
    """The budget that a round of these sites would exceed."""
    return None if party.spending is None else party.spending.exceeded(number, sites)


def _evaluation(party: Party, model: LanguageModel, source: str) -> Evaluation:
    if party.plan.at_sites:
        return at_sites(party)
    if party.plan.question is not None or source == NO_EVALUATION:
        return nowhere
    return at_coordinator(party.plan, model, source)


def _private(folder: Path) -> Path:
    """The folder, made, and open to its owner only: its content opens a sum before a trusted coordinator's noise."""
    folder.mkdir(mode=0o700, exist_ok=True)
    sync_folders(folder, folder.parent)
    return folder
