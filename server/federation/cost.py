"""The cost of a plan, before it runs: parameters, bytes on the wire and memory."""

from __future__ import annotations

from dataclasses import dataclass

from cloister.aggregation.features.server_optimizer import OPTIMIZERS
from cloister.aggregation.secure.secure_sum import traffic
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.sketch import SKETCH_BYTES
from cloister.protocol.plan.plan import Plan

_FLOAT, _DOUBLE = 4, 8
_NAME = len("site-000")


@dataclass(frozen=True)
class Cost:
    """The cost of a plan."""

    parameters: int
    """Parameters of the model, adapters included."""
    trained_parameters: int
    """Parameters that are trained and summed."""
    cohort: int
    """Sites in a round."""
    bytes_down: int
    """Bytes to one site in a round: the global model, and the scales of a compressed update."""
    bytes_up: int
    """Bytes from one site in a round: its contribution."""
    coordinator_bytes: int
    """Peak bytes of memory for vectors and model at the coordinator; independent of the number of sites. With
    `aggregation.groups` or `aggregation.trace_groups` it has a sum for each group at the same time. With
    `cohort.mode = "async"` also one model for each site, because each may work on another one, and a sum for each model
    of which an update may be in the buffer. Replies that are being read come on top: shared segments in a simulation,
    mapped files behind the door."""
    bytes_of_run: int
    """Bytes of the models that go to sites and of the updates that come back, in all rounds, without counters."""
    tokens_per_round: int
    """The most tokens on which the updates in a round were trained."""


def cost(plan: Plan, parameters: int, trained: int, summed: int | None = None) -> Cost:
    """The cost of a plan.

    Args:
        plan: The plan.
        parameters: Parameters of its model, as `lm.model.model.Counts` has them, like what follows.
        trained: Those that are trained.
        summed: Those that a round trains and sums; None: all of them.
    """
    summed = trained if summed is None else summed
    layout = Sums(plan, summed, most=trained).training
    up = layout.length * plan.aggregation.ring_bits // 8
    scales = 0 if layout.blocks is None else layout.blocks.blocks
    buffers = plan.privacy.correlated.buffers if plan.privacy.correlated else 0
    updates = plan.cohort.size()
    sums = max(plan.aggregation.groups, plan.aggregation.trace_groups)
    vectors = 1 + OPTIMIZERS[plan.server.optimizer].moments + bool(plan.public.source)  # with the weights
    if plan.cohort.mode == "async":  # a sum for each model with an update in the buffer, and the mean of all
        updates = plan.quorum()
        sums = min(updates, 1 + plan.cohort.most_stale())
        vectors += plan.cohort.sites + (sums > 1)
    if plan.aggregation.ring_bits < 32:  # otherwise a sum becomes a mean in its own memory
        vectors += sums
    arrays = trained * _FLOAT + summed * plan.aggregation.ring_bits // 8
    return Cost(
        parameters=parameters,
        trained_parameters=trained,
        cohort=plan.cohort.size(),
        bytes_down=(trained + scales) * _FLOAT,
        bytes_up=up,
        coordinator_bytes=(parameters - trained) * _FLOAT
        + vectors * trained * _FLOAT
        + buffers * trained * _DOUBLE
        + sums * up,
        bytes_of_run=plan.run.rounds * updates * arrays,
        tokens_per_round=plan.most_tokens() * updates,
    )


@dataclass(frozen=True)
class SecureCost:
    """The tolerances of a plan's secure sum, and its cost for a round."""

    n: int
    """Sites in the cohort, or in the smallest group of it."""
    k: int
    """Neighbours with which a site shares masks."""
    t: int
    """Shares that open a secret."""
    dropouts: int
    """Sites that may drop out."""
    colluders: int
    """Sites of the cohort that may collude with the coordinator."""
    quorum: int
    """Sites that must finish for a sum to be opened: the plan's quorum, or more where the secure sum needs more."""
    overhead_bytes_up: int
    """Bytes from one site in a round, without its vector."""
    overhead_bytes_down: int
    """Bytes to one site in a round, without the model."""


def secure_cost(plan: Plan) -> SecureCost | None:
    """The cost of the secure sum; None for a plan that sums in clear."""
    if not plan.aggregation.secure:
        return None
    sizes = plan.in_groups(plan.aggregation.groups)
    found = plan.threshold(sizes[0])
    sent, received = traffic(found, _NAME, SKETCH_BYTES * plan.sketches)
    return SecureCost(
        n=found.n,
        k=found.k,
        t=found.threshold,
        dropouts=found.dropouts,
        colluders=found.colluders,
        quorum=max(map(plan.quorum, sizes)),
        overhead_bytes_up=sent,
        overhead_bytes_down=received,
    )
