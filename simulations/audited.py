"""What an audit finds, and what every game of an audit is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cloister.privacy.noise import NoiseStream
from cloister.privacy.report import AuditRow

Progress = Callable[[int, int], None]
"""Receives how much is done, and of how much."""
Streams = Callable[[], NoiseStream]
"""Returns a new stream of noise at each call."""

FAR = 100.0
"""Length of what a canary adds, in clipping norms, before it is clipped."""


@dataclass(frozen=True)
class Audited:
    """What an audit found."""

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
