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


class Rates:
    """A `Rate` for each address, as for `Rate`; of the addresses that came last, `MOST` are known."""

    MOST = 1024

    def __init__(self, burst: int, per_s: float, what: str = "messages") -> None:
        self._burst, self._per_s, self._what = burst, per_s, what
        self._of: dict[str, Rate] = {}
        """The one that came last is the last."""

    def take(self, address: str) -> None:
        """Count one of an address.

        Raises:
            DoorError: there were too many.
        """
        rate = self._of.pop(address, None) or Rate(self._burst, self._per_s, self._what)
        self._of[address] = rate
        if len(self._of) > self.MOST:
            del self._of[next(iter(self._of))]
        rate.take()
