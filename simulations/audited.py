"""The result of an audit, and the arguments that all its games share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloister.privacy.noise import NoiseStream
from cloister.privacy.report import AuditRow

Progress = Callable[[int, int], None]
"""Receives the work done so far, and the total."""
Streams = Callable[[], NoiseStream]
"""Returns a new stream of noise at each call."""

FAR = 100.0
"""Length of a canary's contribution before it is clipped, in clipping norms."""


@dataclass(frozen=True)
class Audited:
    """The result of an audit."""

    what: str
    """The game that was played, in words."""
    row: AuditRow
    """The guesses, and the lower bound on epsilon that they prove."""
    claimed: float
    """Epsilon that the accountant claims for what was played."""
    claimed_run: float
    """Epsilon that the accountant claims for the run."""
    delta: float
    """Delta of all these epsilons."""
    at_half_noise: float
    """The bound to expect if the noise had half of its standard deviation: the power of this audit."""

    @property
    def alarm(self) -> bool:
        """Whether the claim is refuted."""
        return self.row.epsilon > self.claimed
