"""What a plan will cost, before anything runs: parameters, bytes on the wire, memory at the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from cloister.aggregation.sums import training_layout
from cloister.protocol.plan import Plan

_FLOAT = 4
_OPTIMIZER_VECTORS = {"fedavg": 0, "nesterov": 1, "adam": 2}
_WORK_VECTORS = 6
"""Float32 vectors beside the weights at the peak of a round: the copy that is sent and its encoding while sites work;
the total decoded in float64, the mean, its negation and the weights before the step when the sum is opened."""


@dataclass(frozen=True)
class Cost:
    """What a plan costs."""

    parameters: int
    """Parameters of the model, adapters included."""
    trained_parameters: int
    """Those that are trained and summed."""
    cohort: int
    """Sites in a round."""
    bytes_down: int
    """Bytes to one site in a round: the global model."""
    bytes_up: int
    """Bytes from one site in a round: its contribution."""
    coordinator_bytes: int
    """Memory for vectors and model at the coordinator, at its peak; it does not grow with the sites."""
    tokens_per_round: int
    """Largest number of tokens that the cohort learns from in a round."""


def cost(plan: Plan, parameters: int, trained: int) -> Cost:
    """The cost of a plan whose model has `parameters` parameters, of which `trained` are trained."""
    up = training_layout(plan, trained).length * plan.aggregation.ring_bits // 8
    vectors = 1 + _OPTIMIZER_VECTORS[plan.server.optimizer] + _WORK_VECTORS
    return Cost(
        parameters=parameters,
        trained_parameters=trained,
        cohort=plan.cohort.size(),
        bytes_down=trained * _FLOAT,
        bytes_up=up,
        coordinator_bytes=parameters * _FLOAT + vectors * trained * _FLOAT + 2 * up,
        tokens_per_round=plan.most_tokens() * plan.cohort.size(),
    )
