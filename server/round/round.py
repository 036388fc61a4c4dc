"""One round, in numbered steps.

1. Draw the cohort. Journal the round and the attempt. Sites that are absent are dropouts.
2. Advertise: each site returns signed one-time keys.
3. Share: each site verifies its peers against the roster and returns encrypted key shares.
4. Update: each site trains from the global model and returns its masked contribution; contributions fold into one
   accumulator as they arrive. A site that fails or misses the deadline is a dropout.
5. Consistency: the survivors sign the same list of survivors.
6. Unmask: survivors reveal shares. With too few sites, here or before, the attempt ends with nothing opened, and the
   round is retried; the sites have kept their finished updates.
7. Charge the ledger, then open the sum: decode the weighted mean and the totals. A coordinator that is trusted to add
   noise adds it here, as a function of the run's key, the round and, unless it is correlated, the sum: a sum that is
   opened again gets the same noise (`noise.py`).
8. Server step: the mean is a pseudo-gradient for the server's optimizer. A mean that the plan's gate refuses leaves
   model and optimizer as they were (`gate.py`).
9. Checkpoint atomically, then journal the round as done. The checkpoint releases the sum: until it is in place nothing
   has left this process, and once it is, the round is not repeated (`checkpoint.py`).

With `aggregation.groups` the cohort is divided into groups in step 1. Steps 2 to 7 make a sum for each, at the same
time, and each sum has a trusted coordinator's noise for itself. Then the median of the groups' means by coordinate
(`aggregation/features/median.py`) is the mean of step 8. A group whose sum cannot be opened any more, or makes no
mean, is left out; the round is abandoned unless more than half of the groups are left.

With `cohort.mode = "async"` (FedBuff) a round has the steps 1, 4 and 7 to 9: step 4 ends when the buffer is full, and
sites that are still training go on in the rounds after it.

Steps 1 to 7 have the same numbers in `sum.py`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features.median import median
from cloister.aggregation.features.scales import Scales
from cloister.aggregation.sums import LOSS, LOSS_SCALE, TOKENS
from cloister.aggregation.vector.average import CLIPPED, WEIGHT
from cloister.aggregation.vector.rotation import Floats
from cloister.privacy.mechanism.correlated import CorrelatedRow
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.errors import QuorumError
from cloister.protocol.messages.messages import TRAIN
from cloister.server.record import journal as steps
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.phases import Phase
from cloister.server.record.progress import Refusing, RoundAbandoned, RoundDone
from cloister.server.round.gate import Gate
from cloister.server.round.noise import of_sum
from cloister.server.round.optimizer import ServerOptimizer
from cloister.server.round.sum import Failed, Party, Total, Wanted, sums_over


@dataclass
class RoundContext:
    """The objects that all rounds of a run share."""

    party: Party
    checkpoints: Checkpoints
    optimizer: ServerOptimizer
    gate: Gate
    """Judges the mean, and evaluates the model."""
    mechanism: SiteMechanism | None = None
    """How updates are summed if the unit of privacy is the site."""
    clip: float = 0.0
    """Clipping norm of the next round, if the unit of privacy is the site."""
    noise: Callable[[int], NoiseStream | CorrelatedRow] = lambda _round: NoiseStream.fresh()
    """Returns, for a round, a stream that no other round uses, or its row of the run's correlated noise."""
    released: Callable[[int, Floats, int], None] = lambda _group, _mean, _sites: None
    """Receives the mean of each sum with the noise of the round, before anything else is computed from it: the group
    (from 0), shape (d,) float32, and the sites in it."""
    scales: Scales | None = None
    """The bounds of the next round's compressed updates, with `aggregation.compression`."""


def run_round(context: RoundContext, number: int) -> RoundDone | RoundAbandoned | Refusing:
    """Run one round, in as many attempts as the plan allows.

    A round is abandoned, with the model unchanged, if shares were requested and the same survivors could not finish it,
    because a site that has answered does not answer for another list; if too few sites carry one history, because in
    the next round none uses what it carries; or if the sum that was opened makes no mean; with groups, if that is so in
    half of them or more. If so many sites refuse that no attempt is possible, the round is not run.

    Raises:
        QuorumError: every attempt ended with too few sites, or too few have joined for a group; the run can be resumed.
    """
    party, plan = context.party, context.party.plan
    # 1. Draw the cohort.
    cohorts = party.groups(TRAIN, number)
    # 2 to 7.
    first = Wanted(TRAIN, number, context.optimizer.weights, context.clip, scales=context.scales)
    made = sums_over(party, [replace(first, group=group) for group in range(len(cohorts))])
    for group, (cohort, result) in enumerate(zip(cohorts, made, strict=True)):
        if isinstance(result, Failed) and not result.bound:
            return _too_few(party, number, group, cohort, result)
    totals = {group: total for group, total in enumerate(made) if isinstance(total, Total)}
    norm: float | None = None
    refused = ""
    if 2 * len(totals) > len(cohorts):
        mean = _mean(context, number, totals)
        norm = float(np.linalg.norm(mean))
        names = tuple(sorted(name for total in totals.values() for name in total.names))
        scales = _next_scales(context, next(iter(totals.values())), mean)
        # 8. Server step.
        refused = _step(context, number, mean, norm)
        if not refused:
            context.scales = scales
    # 9. Checkpoint, then journal.
    epsilon = party.spending.epsilon() if party.spending else None
    done: RoundDone | RoundAbandoned
    attempts = max(result.attempts for result in made)
    if norm is None:
        spoiled = next((it.spoiled for it in made if isinstance(it, Failed) and it.spoiled), "")
        done = RoundAbandoned(number, attempts, "", epsilon, context.clip, spoiled, party.phases.lap())
    else:
        counters = Counter[str]()
        for total in totals.values():
            counters.update(total.opened.counters)
        tokens = counters.get(TOKENS)
        taken = [number for total in totals.values() for _, number in total.steps]
        staleness, too_stale = next((total.staleness, total.too_stale) for total in totals.values())
        ages = [age for each in (staleness or {}).values() for age in each]
        lost = sum(len(cohort) for group, cohort in enumerate(cohorts) if group not in totals)
        done = RoundDone(
            round=number,
            attempts=attempts,
            sites=len(names),
            dropouts=lost + sum(total.cohort - total.sites for total in totals.values()),
            tokens=tokens,
            seconds=max(total.seconds for total in totals.values()),
            train_loss=None if tokens is None else counters[LOSS] / LOSS_SCALE / max(tokens, 1),
            clipped=counters.get(CLIPPED),
            update_norm=norm,
            params_sha256="",  # of the checkpoint
            epsilon=epsilon,
            clip=context.clip,
            phase_seconds=party.phases.lap(),
            least_steps=min(taken, default=None),
            most_steps=max(taken, default=None),
            mean_staleness=statistics.fmean(ages) if ages else None,
            most_staleness=max(ages, default=None),
            too_stale=too_stale if ages else None,
            staleness=staleness,
            groups=tuple(group + 1 for group in totals) if len(cohorts) > 1 else None,
            refused=refused,
            label=plan.data.label,
            multiple=context.scales.multiple if context.scales else None,
            behind=any(total.behind for total in totals.values()) if plan.carries else None,
        )
    with party.phases.during(Phase.CHECKPOINT):
        weights, state = context.optimizer.weights, context.optimizer.state()
        digest = context.checkpoints.save(number, weights, state, asdict(done), context.scales)
        done = replace(done, params_sha256=digest)
        party.journal.record(number, done.attempts, steps.DONE, asdict(done))
    party.observe(done)
    return done


def _too_few(party: Party, number: int, group: int, cohort: Sequence[str], failed: Failed) -> Refusing:
    """What ends a round of which a sum was not opened.

    Raises:
        QuorumError: too few sites finished, of enough that do not refuse.
    """
    plan, draw, needed = party.plan, party.sums.draw(TRAIN), party.sums.quorum(TRAIN, group)
    refusing = sorted(party.refused.intersection(cohort))
    if len(cohort) - len(refusing) < needed:
        return Refusing(number, tuple(refusing))
    fewer = "cohort.buffer" if plan.cohort.mode == "async" else "cohort.quorum"
    of_group = f", group {group + 1} of {draw.groups}" if draw.groups > 1 else ""
    raise QuorumError(
        f"round {number}{of_group}",
        f"{failed.attempts} failed attempts",
        expected=f"{needed} of {len(cohort)} sites to finish in one of them",
        fix="repair the sites and continue the run: nothing is lost; sites keep to the plan that they have joined, "
        f"so a lower {fewer} or a longer cohort.deadline_s needs a new run",
    )


def _mean(context: RoundContext, number: int, totals: Mapping[int, Total]) -> Floats:
    """7, end: the mean of the round's sum, or the median of its groups' means, with the noise of the round; the
    clipping norm moves.

    Each group's sum has noise for itself, so a site, which is in one group, pays for one release. What moves the
    clipping norm in each group is noised as well; it moves by their median.
    """
    mechanism = context.mechanism
    means, clips = [], []
    for group, total in totals.items():
        mean, sites = total.opened.mean, total.sites
        if mechanism is not None:
            noise, sites = context.noise(number), total.opened.counters[WEIGHT]
            if isinstance(noise, NoiseStream):
                if context.party.plan.aggregation.groups > 1:
                    noise = noise.child(f"group {group}")
                if not mechanism.variance:
                    noise = of_sum(noise, mean, context.clip, sites, total.names)
            mean, clip = mechanism.decode(mean, sites, context.clip, noise)
            clips.append(clip)
        context.released(group, mean, sites)
        means.append(mean)
    context.clip = statistics.median(clips) if clips else context.clip
    return median(means)


def _step(context: RoundContext, number: int, mean: npt.NDArray[np.float32], norm: float) -> str:
    """8. Step by the mean, which is overwritten; returns why the gate refused it, with the model unchanged, or ''."""
    gate, optimizer, phases = context.gate, context.optimizer, context.party.phases
    if refused := gate.of_mean(norm):
        return refused
    with phases.during(Phase.EVALUATE):
        gate.before(number, optimizer.weights)
    optimizer.step(mean)
    with phases.during(Phase.EVALUATE):
        refused = gate.of_model(number, optimizer.weights)
    if refused:  # the step was made in the only copy of the model
        before = context.checkpoints.load(number - 1)
        optimizer.restore(before.weights, before.optimizer)
    return refused


def _next_scales(context: RoundContext, total: Total, mean: Floats) -> Scales | None:
    """The bounds of the next round's compressed updates, from what this one has released; None without compression."""
    plan, scales = context.party.plan, context.scales
    if scales is None:
        return None
    counters, heaviest = total.opened.counters, context.party.sums.training.heaviest
    weight = counters[WEIGHT] / heaviest
    return scales.after(plan, mean, total.sites, weight, counters.get(CLIPPED))
