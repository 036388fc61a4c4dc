"""What happens in a run, as events that a display, a log or a test can watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloister.protocol.plan import Plan


@dataclass(frozen=True)
class Preparing:
    """Something slow goes on before the first round."""

    what: str


@dataclass(frozen=True)
class Started:
    """The sites have joined."""

    plan: Plan
    sites: tuple[str, ...]
    parameters: int
    """Trained parameters."""
    done: int
    """Rounds that were done before, in an earlier process."""


@dataclass(frozen=True)
class RoundStarted:
    """An attempt at a round, or at the evaluation of its model, begins."""

    round: int
    attempt: int
    purpose: str
    """`train` or `evaluate`."""
    cohort: tuple[str, ...]


@dataclass(frozen=True)
class SiteAnswered:
    """A site's contribution has been folded in."""

    round: int
    site: str


@dataclass(frozen=True)
class SiteFailed:
    """A site is a dropout of this attempt."""

    round: int
    site: str
    reason: str


@dataclass(frozen=True)
class AttemptFailed:
    """An attempt ended with too few sites, and nothing revealed."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Evaluated:
    """The model after a round (0: the initial model) was evaluated on held-out records."""

    round: int
    loss: float
    """Nats per token."""
    perplexity: float
    accuracy: float
    bits_per_byte: float


@dataclass(frozen=True)
class NotEvaluated:
    """No evaluation of the model after a round came about; training goes on."""

    round: int
    attempts: int


@dataclass(frozen=True)
class RoundAbandoned:
    """A round was given up with the model as it was: sites had answered, and too few were left to finish."""

    round: int
    attempts: int
    params_sha256: str


@dataclass(frozen=True)
class RoundDone:
    """A round is done: its model is on disk and journaled."""

    round: int
    attempts: int
    sites: int
    """Sites whose updates are in the mean."""
    dropouts: int
    tokens: int
    """Tokens the cohort learned from."""
    seconds: float
    """From the first request of the attempt that counted to the decoded mean."""
    train_loss: float
    """Mean loss in training, nats per token."""
    clipped: int
    """Coordinates beyond `aggregation.bound`, over all sites."""
    update_norm: float
    """L2 norm of the mean update."""
    params_sha256: str
    """SHA-256 of the global model after the round."""


@dataclass(frozen=True)
class Finished:
    """The last round is done and the final model is on disk."""

    rounds: int


Event = (
    Preparing
    | Started
    | RoundStarted
    | SiteAnswered
    | SiteFailed
    | AttemptFailed
    | Evaluated
    | NotEvaluated
    | RoundDone
    | RoundAbandoned
    | Finished
)
Observer = Callable[[Event], None]
