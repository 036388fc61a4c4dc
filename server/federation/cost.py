"""The cost of a plan, before it runs: parameters, bytes on the wire, memory and seconds."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloister.aggregation.features.server_optimizer import OPTIMIZERS
from cloister.aggregation.secure import keys, shamir
from cloister.aggregation.secure.secure_sum import ring_dtype, traffic
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector import masks
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.threshold import Parameters

_FLOAT, _DOUBLE = 4, 8
_NAME = len("site-000")
_SAMPLE = 1 << 20  # elements that are masked to measure the speed of this machine


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
    `aggregation.groups` it has a sum for each group at the same time. With
    `cohort.mode = "async"` also one model for each site, because each may work on another one, and a sum for each model
    of which an update may be in the buffer. Replies that are being read come on top: shared segments in a simulation,
    mapped files behind the door."""
    tokens_per_round: int
    """The most tokens on which the updates in a round were trained."""


def cost(plan: Plan, parameters: int, trained: int, summed: int | None = None) -> Cost:
    """The cost of a plan.

    Args:
        plan: The plan.
        parameters: Parameters of its model, as `lm.model.Counts` has them, like what follows.
        trained: Those that are trained.
        summed: Those that a round trains and sums; None: all of them.
    """
    layout = Sums(plan, trained if summed is None else summed, most=trained).training
    up = layout.length * plan.aggregation.ring_bits // 8
    scales = 0 if layout.blocks is None else layout.blocks.blocks
    buffers = plan.privacy.correlated.buffers if plan.privacy.correlated else 0
    updates = plan.cohort.size()
    sums = plan.aggregation.groups
    vectors = 1 + OPTIMIZERS[plan.server.optimizer].moments + bool(plan.public.source)  # with the weights
    if plan.cohort.mode == "async":  # a sum for each model with an update in the buffer, and the mean of all
        updates = plan.quorum()
        sums = min(updates, 1 + plan.cohort.most_stale())
        vectors += plan.cohort.sites + (sums > 1)
    if plan.aggregation.ring_bits < 32:  # otherwise a sum becomes a mean in its own memory
        vectors += sums
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
    site_s: float
    """Seconds of work that it adds at a site, at the present speed of this machine."""
    coordinator_s: float
    """Seconds of work that it adds at the coordinator, without dropouts."""


def secure_cost(plan: Plan, trained: int) -> SecureCost | None:
    """The cost of the secure sum over so many trained parameters; None for a plan that sums in clear.

    The seconds are estimates: the keystream, a key agreement and a sharing are each timed here, for a few milliseconds,
    and multiplied by the number of times that a round needs them. A site applies k + 1 masks and makes two key
    agreements for each neighbour; the coordinator removes the mask of each site and reconstructs its secret.
    """
    if not plan.aggregation.secure:
        return None
    n, found = plan.cohort.size(), plan.threshold()
    length = Sums(plan, trained).training.length
    element_s, agreement_s, sharing_s = _unit_costs(plan, found)
    sent, received = traffic(found, _NAME)
    return SecureCost(
        n=found.n,
        k=found.k,
        t=found.threshold,
        dropouts=found.dropouts,
        colluders=found.colluders,
        quorum=plan.quorum(),
        overhead_bytes_up=sent,
        overhead_bytes_down=received,
        site_s=(found.k + 1) * length * element_s + 2 * found.k * agreement_s + 2 * sharing_s,
        coordinator_s=n * length * element_s + n * sharing_s,
    )


def _unit_costs(plan: Plan, found: Parameters) -> tuple[float, float, float]:
    """Seconds for one element under one mask, one key agreement, one sharing of a secret."""

    def fastest(act: Callable[[], object]) -> float:
        return min(timeit.repeat(act, number=1, repeat=3))

    sample: masks.Ring = np.zeros(_SAMPLE, ring_dtype(plan.aggregation.ring_bits))
    seeds = [bytes([number]) * masks.SEED for number in range(2)]
    element_s = fastest(lambda: masks.apply(sample, seeds, [])) / (2 * _SAMPLE)
    exchange, other = keys.Exchange(b"1" * keys.KEY), keys.Exchange(b"2" * keys.KEY).public
    agreement_s = fastest(lambda: exchange.secret(other))
    indices = list(range(1, found.n + 1))[: max(found.k, found.threshold)]
    sharing_s = fastest(
        lambda: shamir.share(bytes(masks.SEED), found.threshold, indices, keys.random_from(bytes(32)))
    )
    return element_s, agreement_s, sharing_s
