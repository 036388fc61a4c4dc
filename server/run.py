"""A whole run of the coordinator: from joined sites to a final model, from the beginning or from where it stopped."""

from __future__ import annotations

import math
import secrets
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch.utils.tensorboard import SummaryWriter

from cloister.lm.layout import Vector, params_sha256
from cloister.lm.model import LanguageModel, load_model, save_pretrained
from cloister.lm.public import train_in_public
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import terms_of
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import QuorumError, RunFolderError
from cloister.protocol.plan import NO_EVALUATION, Plan
from cloister.protocol.roster import Roster
from cloister.protocol.storage import write_file
from cloister.server import journal as steps
from cloister.server.checkpoint import Checkpoints
from cloister.server.evaluate import Evaluation, at_coordinator, at_sites, nowhere
from cloister.server.folder import RunFolder
from cloister.server.journal import Journal
from cloister.server.optimizer import ServerOptimizer
from cloister.server.progress import (
    BudgetSpent,
    Evaluated,
    Finished,
    Observer,
    Preparing,
    PublicStep,
    Refusing,
    RoundAbandoned,
    Started,
)
from cloister.server.round import RoundContext, cohort_of, run_round
from cloister.server.spending import Spending
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
    epsilon: float | None = None
    """The largest epsilon of a site, by the coordinator's ledger; None without a privacy unit."""
    stopped: str = ""
    """Why the run ended before its last round: `budget`, `refused`, or not at all."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens learned from in a second of a round."""
        return self.tokens / self.seconds if self.seconds else 0.0


def public_model(folder: RunFolder, observe: Observer) -> Vector | None:
    """The model that public training gives, made once and kept in the run folder; None where the plan asks for none.

    It comes before the sites are asked to join, because it goes to them where they train an adapter (`base_of`).

    Raises:
        CloisterError: it cannot be trained.
        RunFolderError: what was kept is damaged.
    """
    plan = folder.plan
    if not plan.public.source:
        return None
    path = folder.public
    if not path.exists():
        observe(Preparing("the model with public text"))
        trained = train_in_public(plan, lambda step: observe(PublicStep(step, plan.public.steps)))
        facts = {"plan": plan.digest(), "params_sha256": params_sha256(trained)}
        write_file(path, lambda temporary: save_file({"model": trained}, temporary, metadata=facts))
    try:
        with safe_open(path, framework="np") as file:
            kept: Vector = file.get_tensor("model")
            facts = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            str(path),
            expected=f"the publicly trained model ({error})",
            fix="remove it, and it is trained again",
        ) from error
    if facts.get("params_sha256") != params_sha256(kept):
        raise RunFolderError(
            str(path),
            expected="weights with the SHA-256 that was recorded with them",
            fix="remove it, and it is trained again",
        )
    return kept


def base_of(plan: Plan, public: Vector | None) -> Vector | None:
    """What the sites need of public training: all of it under an adapter, nothing where it is the initial model."""
    return None if plan.model.adapter.scheme == "full" else public


def run(
    folder: RunFolder,
    channel: Channel,
    observe: Observer,
    *,
    roster: Roster | None = None,
    public: Vector | None = None,
    evaluation: str = "",
    noise: Callable[[int], NoiseStream] = lambda _round: NoiseStream.fresh(),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the folder's plan to its end, from the last round that was done.

    Args:
        folder: The run folder.
        channel: The sites that have joined.
        observe: Told what happens.
        roster: The sites' identities, for a plan that sums securely.
        public: What `public_model` gave.
        evaluation: Public records to evaluate on, in the place of those that the plan names.
        noise: For each round a stream for noise that the coordinator adds.
        clock: Seconds, for durations.

    Raises:
        CloisterError: what stopped the run; what was done is on disk, and a later call goes on from there.
    """
    plan = folder.plan
    observe(Preparing("model"))
    base = base_of(plan, public)
    model = load_model(plan, base)
    checkpoints = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
    run_identity = identity(folder)
    with Journal(folder.journal) as journal:
        done = journal.newest(steps.DONE)
        clip = plan.privacy.clip
        if done is None:
            initial_weights = (
                model.layout.flatten(model.module) if public is None or base is not None else public
            )
            optimizer = ServerOptimizer(plan.server, initial_weights)
            digest = checkpoints.save(0, optimizer.weights, {})
            initial = {"round": 0, "params_sha256": digest}
            journal.record(0, 1, steps.DONE, initial)
        else:
            checkpoint = checkpoints.load(done.round)
            optimizer = ServerOptimizer(plan.server, checkpoint.weights, checkpoint.optimizer)
            clip = done.detail.get("clip") or clip
        last = done.round if done else 0
        terms = terms_of(plan, model.layout.size)
        party = Party(
            plan,
            run_identity,
            roster,
            model.layout,
            channel,
            journal,
            observe,
            clock,
            "" if base is None else vector_hash(base).hex(),
            Spending(terms, run_identity, folder.ledger) if terms else None,
        )
        for failure in channel.refusals:
            journal.record(last, 0, steps.REFUSED, {"site": failure.site, "reason": failure.reason})
        mechanism = terms.mechanism if terms else None
        context = RoundContext(party, checkpoints, optimizer, mechanism, clip if mechanism else 0.0, noise)
        evaluate = _evaluation(party, model, evaluation or plan.server.evaluation)
        observe(Started(plan, tuple(channel.sites), model.layout.size, last))
        folder.truncate_metrics(last)
        with SummaryWriter(str(folder.tensorboard), purge_step=last + 1) as board:
            if not any(row["round"] == last for row in folder.metrics()):
                # A process that was killed may have journaled a round and not yet reported it.
                _report(context, folder, board, done.detail if done else initial, evaluate)
            last, stopped = _rounds(context, folder, board, evaluate, last)
        save_pretrained(model, optimizer.weights, folder.final)
        digest = params_sha256(optimizer.weights)
        journal.record(last, 1, steps.FINISHED, {"params_sha256": digest, "stopped": stopped})
        observe(Finished(last))
    return outcome(folder)


def _rounds(
    context: RoundContext, folder: RunFolder, board: SummaryWriter, evaluate: Evaluation, last: int
) -> tuple[int, str]:
    """Carry through the rounds that are left; the last that was done, and why it is the last, if there were more."""
    party, plan = context.party, context.party.plan
    abandoned = 0
    for number in range(last + 1, plan.run.rounds + 1):
        spending = party.spending
        if spending is not None and not spending.affords(number, cohort_of(party, number)):
            assert spending.terms.budget is not None
            party.observe(BudgetSpent(number, spending.epsilon(), spending.terms.budget))
            _report_end(context, folder, last, evaluate)
            return last, "budget"
        result = run_round(context, number)
        if isinstance(result, Refusing):
            party.observe(result)
            _report_end(context, folder, last, evaluate)
            return last, "refused"
        last = number
        _report(context, folder, board, asdict(result), evaluate)
        abandoned = abandoned + 1 if isinstance(result, RoundAbandoned) else 0
        if abandoned == plan.cohort.attempts:
            raise QuorumError(
                f"rounds {number - abandoned + 1} to {number}",
                "given up",
                expected="survivors that reveal their shares",
                fix="see above which sites did not, and mend them; `cloister resume` goes on after them",
            )
    return last, ""


def _evaluation(party: Party, model: LanguageModel, source: str) -> Evaluation:
    if not source:
        return at_sites(party)
    return nowhere if source == NO_EVALUATION else at_coordinator(party.plan, model, source)


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
    model = load_model(folder.plan, base_of(folder.plan, public_model(folder, lambda _event: None)))
    checkpoints = Checkpoints(folder.checkpoints, model.layout, folder.plan.server.keep_checkpoints)
    save_pretrained(model, checkpoints.load(outcome(folder).rounds).weights, folder.final)


def identity(folder: RunFolder, roster: Roster | None = None) -> str:
    """The run's identity: drawn once, so that no message of another run of the same plan is taken for one of this.

    Raises:
        RunFolderError: the folder holds a run, and its journal is gone.
    """
    with Journal(folder.journal) as journal:
        if journal.newest(steps.CREATED) is None:
            _check_nothing_lost(folder)
            facts = {"run": secrets.token_hex(16)}
            if roster is not None:
                facts["roster"] = roster.hash.hex()
            journal.record(0, 0, steps.CREATED, facts)
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
        tokens=sum(row.get("tokens") or 0 for row in rows),
        seconds=sum(row.get("seconds", 0.0) for row in rows),
        params_sha256=end.detail["params_sha256"],
        epsilon=next((row["epsilon"] for row in reversed(rows) if row.get("epsilon") is not None), None),
        stopped=end.detail.get("stopped", ""),
    )


def _report_end(context: RoundContext, folder: RunFolder, number: int, evaluate: Evaluation) -> None:
    """Evaluate the model that a run ends with early, where that was not due."""
    rows = {row["round"]: row for row in folder.metrics()}
    if "loss" in rows.get(number, {}):
        return
    held_out = evaluate(number, context.optimizer.weights.copy())
    if held_out is not None:
        found = Evaluated(
            number, held_out.loss, held_out.perplexity, held_out.accuracy, held_out.bits_per_byte
        )
        context.party.observe(found)
        folder.truncate_metrics(number - 1)
        folder.add_metrics(rows.get(number, {"round": number}) | asdict(found))


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
