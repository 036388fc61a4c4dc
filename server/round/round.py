"""One round, in numbered steps.

1. Draw the cohort. Journal the round and the attempt. Sites that are absent are dropouts.
2. Advertise: each site returns signed one-time keys.
3. Share: each site verifies its peers against the roster and returns encrypted key shares.
4. Update: each site trains from the global model and returns its masked contribution; contributions fold into one
   accumulator as they arrive. A site that fails or misses the deadline is a dropout.
5. Consistency: the survivors sign the same list of survivors.
6. Unmask: survivors reveal shares. With too few sites, here or before, the attempt ends with nothing opened, and the
   round is retried; the sites have kept their finished updates.
7. Charge the ledger, then open the sum: decode the totals and the weighted mean. A coordinator that is trusted to add
   noise adds it to the integers of the sum before the mean is decoded, as a function of the run's key, the round and,
   unless it is correlated, the sum: a sum that is opened again gets the same noise (`noise.py`).
8. Server step: the mean is a pseudo-gradient for the server's optimizer. A feature may refuse the mean, or the model
   after the step; then model and optimizer are as they were.
9. Checkpoint atomically, then journal the round as done. The checkpoint releases the sum: until it is in place nothing
   has left this process, and once it is, the round is not repeated (`checkpoint.py`).

With `aggregation.groups` the cohort is divided into groups in step 1. Steps 2 to 7 make a sum for each, at the same
time, and each sum has a trusted coordinator's noise for itself. Then the median of the groups' means by coordinate
(`aggregation/features/groups.py`) is the mean of step 8. A group whose sum cannot be opened any more, or makes no
mean, is left out; the round is abandoned unless more than half of the groups are left. After a sum that no honest sites
can have, `aggregation.trace_groups` divides rounds too (`server/sum/trace.py`): the mean is that of the groups that are
left, by their weights, and the round is abandoned if none is.

With `cohort.mode = "async"` (FedBuff) a round has the steps 1, 4 and 7 to 9: step 4 ends when the buffer is full, and
sites that are still training go on in the rounds after it.

Steps 1 to 7 have the same numbers in `server/sum/sum.py`. What the plan's features do in them is in
`aggregation/features/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cloister.aggregation.features.feature import Summed
from cloister.aggregation.vector.rotation import Floats
from cloister.lm.tasks.task import HeldOut
from cloister.protocol.errors import QuorumError
from cloister.protocol.messages.messages import TRAIN
from cloister.server.record import journal as steps
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.phases import Phase
from cloister.server.record.progress import Refusing, RoundAbandoned, RoundDone
from cloister.server.round.evaluate import Evaluations, Measured
from cloister.server.sum import trace
from cloister.server.sum.party import Party
from cloister.server.sum.sum import sums_over
from cloister.server.sum.wanted import Failed, Total, Wanted


@dataclass
class RoundContext:
    """The objects that all rounds of a run share."""

    party: Party
    checkpoints: Checkpoints
    model: Floats
    """(d,) float32, the global model; step 8 alone writes it."""
    evaluations: Evaluations
    released: Callable[[int, Floats, int], None] = lambda _group, _mean, _sites: None
    """Receives the mean of each sum with the noise of the round, before anything else is computed from it: the group
    (from 0), shape (d,) float32, and the sites in it."""

    @property
    def weights(self) -> Floats:
        """(d,) float32, the global model; a read-only view that the next step changes."""
        view = self.model.view()
        view.flags.writeable = False
        return view

    def measured(self, number: int) -> Measured | None:
        """The evaluation of the model after a round, made once, while it is the newest; None: there is none."""
        with self.party.phases.during(Phase.EVALUATE):
            return self.evaluations.of(number, self.weights)


def run_round(context: RoundContext, number: int) -> RoundDone | RoundAbandoned | Refusing:
    """Run one round, in as many attempts as the plan allows.

    A round is abandoned, with the model unchanged, if shares were requested and the same survivors could not finish it,
    because a site that has answered does not answer for another list; if too few sites carry one history, because in
    the next round none uses what it carries; or if the sum that was opened makes no mean; with groups, if too few of
    them are left. Of groups that trace a site one is enough, and a group with too few sites is lost. If so many sites
    refuse that no attempt is possible, the round is not run.

    Raises:
        QuorumError: every attempt ended with too few sites, or too few have joined for a group; the run can be resumed.
    """
    party = context.party
    # 1. Draw the cohort.
    trace.divide(party, number)
    cohorts = party.groups(TRAIN, number)
    # 2 to 7.
    wanted = [Wanted(TRAIN, number, context.weights, group) for group in range(len(cohorts))]
    made = sums_over(party, wanted)
    # A group that traces a site is lost alone, unless all others are absent too.
    whole = party.division(TRAIN, number) == "plan" or not any(
        isinstance(it, Total) or it.bound for it in made
    )
    for group, (cohort, result) in enumerate(zip(cohorts, made, strict=True)):
        if isinstance(result, Failed) and not result.bound and whole:
            return _too_few(party, number, group, cohort, result)
    trace.leave_out(party, number)
    totals = {each.group: total for each, total in zip(wanted, made, strict=True) if isinstance(total, Total)}
    done: RoundDone | RoundAbandoned
    if party.features.enough(len(totals), len(cohorts)):
        sums = [(total.summed(wanted[group]), total) for group, total in totals.items()]
        lost = sum(len(cohort) for group, cohort in enumerate(cohorts) if group not in totals)
        # 7, end, and 8.
        done = _done(context, number, made, sums, lost)
    else:
        done = _abandoned(context, number, made)
    # 9. Checkpoint, then journal.
    with party.phases.during(Phase.CHECKPOINT):
        digest = context.checkpoints.save(number, context.weights, done.facts(), party.features.state())
        done = replace(done, params_sha256=digest)
        party.journal.record(number, done.attempts, steps.DONE, done.facts())
    party.observe(done)
    return done


def _done(
    context: RoundContext,
    number: int,
    made: Sequence[Total | Failed],
    sums: Sequence[tuple[Summed, Total]],
    lost: int,
) -> RoundDone:
    """7, end: the mean of the round, with its noise. 8: step by it. Returns the facts of the round.

    Args:
        context: The run.
        number: The round.
        made: Its sums as they ended.
        sums: Those that were opened, whose means are overwritten.
        lost: Sites in groups without a sum.
    """
    party, features, means = context.party, context.party.features, []
    seen, totals = [summed for summed, _ in sums], [total for _, total in sums]
    for summed, total in sums:
        means.append(features.decode(summed, total.opened))
        context.released(summed.group, means[-1], total.sites)
    mean = features.combine(means, seen)
    norm = float(np.linalg.norm(mean))
    figures = features.before_step(mean, seen)
    refused = features.refuses_mean(norm) or _step(context, number, mean, seen[0].rounds)
    if not refused:
        features.after_step()
    return RoundDone(
        round=number,
        attempts=max(result.attempts for result in made),
        sites=sum(total.sites for total in totals),
        dropouts=lost + sum(total.cohort - total.sites for total in totals),
        seconds=max(total.seconds for total in totals),
        update_norm=norm,
        params_sha256="",  # of the checkpoint
        epsilon=party.spending.epsilon() if party.spending else None,
        phase_seconds=party.phases.lap(),
        refused=refused,
        label=party.plan.data.label,
        opened=_opened(made),
        behind=_apart(party, number, lost, totals) if party.plan.carries else None,
        figures=figures | features.figures(seen),
    )


def _apart(party: Party, number: int, lost: int, totals: Sequence[Total]) -> bool:
    """Whether sites may carry different histories from a round: also where groups were told different things."""
    return lost > 0 or party.division(TRAIN, number) == "trace" or any(total.behind for total in totals)


def _abandoned(context: RoundContext, number: int, made: Sequence[Total | Failed]) -> RoundAbandoned:
    """The facts of a round without a mean."""
    party = context.party
    return RoundAbandoned(
        number,
        max(result.attempts for result in made),
        "",
        party.spending.epsilon() if party.spending else None,
        next((it.spoiled for it in made if isinstance(it, Failed) and it.spoiled), ""),
        party.phases.lap(),
        _opened(made),
        all(it.apart for it in made if isinstance(it, Failed)),
    )


def _opened(made: Sequence[Total | Failed]) -> list[int]:
    """The groups, from 1, whose sum was opened: a spoiled one too, whose total no honest sites can have."""
    return [group for group, it in enumerate(made, 1) if isinstance(it, Total) or it.spoiled]


def _too_few(party: Party, number: int, group: int, cohort: Sequence[str], failed: Failed) -> Refusing:
    """What ends a round of which a sum was not opened.

    Raises:
        QuorumError: too few sites finished, of enough that do not refuse.
    """
    plan, draw, needed = party.plan, party.draw(TRAIN, number), party.quorum(TRAIN, number, group)
    refusing = sorted(party.refused.intersection(cohort))
    if len(cohort) - len(refusing) < needed:
        return Refusing(number, tuple(refusing))
    fewer = "cohort.buffer" if plan.cohort.mode == "async" else "cohort.quorum"
    of_group = f", group {group + 1} of {draw.groups}" if draw.groups > 1 else ""
    raise QuorumError(
        f"round {number}{of_group}",
        f"{failed.attempts} failed attempts",
        expected=f"{needed} of {len(cohort)} sites to finish in one of them{failed.dropped}",
        fix="repair the sites and continue the run: nothing is lost; sites keep to the plan that they have joined, "
        f"so a lower {fewer} or a longer cohort.deadline_s needs a new run",
    )


def _step(context: RoundContext, number: int, mean: Floats, rounds: Sequence[int]) -> str:
    """8: step by the mean of updates of the models of some rounds. Returns why the step was undone, or ''."""
    features = context.party.features
    compares = features.compares()
    before = _public(context, number - 1) if compares else None
    features.step(context.model, mean, rounds)
    if not compares:
        return ""
    assert before is not None, "it was made before the step"
    # The step was made in the only copy of the model.
    if refused := features.refuses_model(before, _public(context, number)):
        kept = context.checkpoints.load(number - 1)
        context.model[:] = kept.weights
        features.undo(kept.features)
        context.evaluations.repeat(number)
    return refused


def _public(context: RoundContext, number: int) -> HeldOut:
    """The evaluation of the model after a round on public records."""
    measured = context.measured(number)
    found = None if measured is None else measured.held_out
    assert found is not None, "a sound plan whose features compare models has public records"
    return found
