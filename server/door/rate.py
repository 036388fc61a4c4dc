"""How many messages a peer may send."""

from __future__ import annotations

import time

from cloister.protocol.errors import DoorError


class Rate:
    """A token bucket.

    Args:
        burst: Messages that may come at once.
        per_s: Messages that may come in a second after that.
        what: What they are called in a refusal.
    """

    def __init__(self, burst: int, per_s: float, what: str = "messages") -> None:
        self._burst, self._per_s, self._what = burst, per_s, what
        self._left, self._at = float(burst), time.monotonic()

    def take(self) -> None:
        """Count one message.

        Raises:
            DoorError: there were too many.
        """
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            raise DoorError(self._what, expected=f"at most {self._per_s:g} a second")
        self._left -= 1
