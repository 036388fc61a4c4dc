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
   noise adds it here; correlated noise is a function of the run's key and the round, so that a sum that is opened again
   after a crash gets the same.
8. Server step: the mean is a pseudo-gradient for the server's optimizer, which steps on the part of the model that the
   round sums (`lm/parts.py`). A mean that the plan's gate refuses leaves model, optimizer and control variates as they
   were (`gate.py`).
9. Checkpoint atomically, then journal the round as done. The checkpoint releases the sum: until it is in place nothing
   has left this process, and once it is, the round is not repeated (`checkpoint.py`).

With `cohort.mode = "async"` (FedBuff) a round has the steps 1, 4 and 7 to 9: step 4 ends when the buffer is full, and
sites that are still training go on in the rounds after it.

Steps 1 to 7 have the same numbers in `sum.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from cloister.aggregation.average import CLIPPED, WEIGHT
from cloister.aggregation.rotation import Floats
from cloister.aggregation.scales import Scales
from cloister.aggregation.sums import LOSS, LOSS_SCALE, TOKENS, training_layout
from cloister.lm.optimizer import step_sizes
from cloister.lm.parts import parts_of
from cloister.privacy.correlated import CorrelatedRow
from cloister.privacy.noise import NoiseStream
from cloister.privacy.site_noise import SiteMechanism
from cloister.protocol.errors import QuorumError
from cloister.protocol.messages import TRAIN
from cloister.server import journal as steps
from cloister.server.checkpoint import Checkpoints
from cloister.server.gate import Gate
from cloister.server.optimizer import ServerOptimizer
from cloister.server.phases import Phase
from cloister.server.progress import Refusing, RoundAbandoned, RoundDone
from cloister.server.sum import Failed, Party, Total, Wanted, sum_over
from cloister.server.variates import ControlVariates


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
    """Returns, for a round, a stream that nothing else uses, or its row of the run's correlated noise."""
    scales: Scales | None = None
    """The bounds of the next round's compressed updates, with `aggregation.compression`."""
    controls: ControlVariates | None = None
    """The control variates of the next round, with `local.control_variates`."""


def run_round(context: RoundContext, number: int) -> RoundDone | RoundAbandoned | Refusing:
    """Run one round, in as many attempts as the plan allows.

    A round is abandoned, with the model unchanged, if shares were requested and the same survivors could not finish it,
    because a site that has answered does not answer for another list; or if the sum that was opened makes no mean. If
    so many sites refuse that no attempt is possible, the round is not run.

    Raises:
        QuorumError: every attempt ended with too few sites; the run can be resumed.
    """
    party, plan = context.party, context.party.plan
    # 1. Draw the cohort.
    cohort = party.cohort(TRAIN, number)
    # 2 to 7.
    clip = context.clip
    wanted = Wanted(
        TRAIN, number, context.optimizer.weights, clip, scales=context.scales, controls=context.controls
    )
    total = sum_over(party, wanted)
    if isinstance(total, Failed) and not total.bound:
        refusing = sorted(party.refused.intersection(cohort))
        if len(cohort) - len(refusing) < plan.quorum():
            return Refusing(number, tuple(refusing))
        fewer = "cohort.buffer" if plan.cohort.mode == "async" else "cohort.quorum"
        raise QuorumError(
            f"round {number}",
            f"{total.attempts} failed attempts",
            expected=f"{plan.quorum()} of {len(cohort)} sites to finish in one of them",
            fix=f"repair the sites or lower {fewer}, then continue the run: nothing is lost",
        )
    norm: float | None = None
    refused = ""
    if not isinstance(total, Failed):
        mean = total.opened.mean
        if context.mechanism is not None:
            sites, part = total.opened.counters[WEIGHT], parts_of(plan, party.layout).of(number)
            mechanism = context.mechanism.on(part.size)
            mean, context.clip = mechanism.decode(mean, sites, clip, context.noise(number))
        norm = float(np.linalg.norm(mean))
        scales = _next_scales(context, total, mean)
        # 8. Server step.
        refused = _step(context, number, mean, norm, total.names)
        if not refused:
            context.scales = scales
    # 9. Checkpoint, then journal.
    epsilon = party.spending.epsilon() if party.spending else None
    done: RoundDone | RoundAbandoned
    if isinstance(total, Failed) or norm is None:
        spoiled = isinstance(total, Failed) and total.spoiled
        done = RoundAbandoned(number, total.attempts, "", epsilon, context.clip, spoiled, party.phases.lap())
    else:
        counters = total.opened.counters
        tokens = counters.get(TOKENS)
        taken = [number for _, number in total.steps]
        ages = [age for each in (total.staleness or {}).values() for age in each]
        done = RoundDone(
            round=number,
            attempts=total.attempts,
            sites=total.sites,
            dropouts=total.cohort - total.sites,
            tokens=tokens,
            seconds=total.seconds,
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
            too_stale=total.too_stale if ages else None,
            staleness=total.staleness,
            refused=refused,
            label=plan.data.label,
            multiple=context.scales.multiple if context.scales else None,
        )
    with party.phases.during(Phase.CHECKPOINT):
        weights, state = context.optimizer.weights, context.optimizer.state()
        digest = context.checkpoints.save(
            number, weights, state, asdict(done), context.scales, context.controls
        )
        done = replace(done, params_sha256=digest)
        party.journal.record(number, done.attempts, steps.DONE, asdict(done))
    party.observe(done)
    return done


def _step(
    context: RoundContext, number: int, mean: npt.NDArray[np.float32], norm: float, sites: tuple[str, ...]
) -> str:
    """8. Step by the mean of sites, which is overwritten; returns why the gate refused it, with model and control
    variates unchanged, or ''."""
    gate, optimizer, phases = context.gate, context.optimizer, context.party.phases
    if refused := gate.of_mean(norm):
        return refused
    with phases.during(Phase.EVALUATE):
        gate.before(number, optimizer.weights)
    if context.controls is not None:
        plan = context.party.plan
        context.controls.add(number, mean, sites, step_sizes(plan, number), plan.cohort.sites)
    optimizer.step(mean, parts_of(context.party.plan, context.party.layout).of(number))
    with phases.during(Phase.EVALUATE):
        refused = gate.of_model(number, optimizer.weights)
    if refused:  # the step was made in the only copy of the model
        before = context.checkpoints.load(number - 1)
        optimizer.restore(before.weights, before.optimizer)
        context.controls = before.controls
    return refused


def _next_scales(context: RoundContext, total: Total, mean: Floats) -> Scales | None:
    """The bounds of the next round's compressed updates, from what this one has released; None without compression."""
    plan, scales = context.party.plan, context.scales
    if scales is None:
        return None
    counters, heaviest = total.opened.counters, training_layout(plan, mean.size).heaviest
    weight = counters[WEIGHT] / heaviest
    return scales.after(plan, mean, total.sites, weight, counters.get(CLIPPED))
