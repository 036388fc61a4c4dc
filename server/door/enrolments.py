"""Requests of strangers that wait at the door until a person approves them: few, small, each for a limited time.

Nothing is accepted here. A request waits with the code of its exchange (`protocol/identity/short_authentication.py`),
and `cloister coordinator approve` compares the code that a person was told. A request is kept in memory only: after a
restart its site asks again, with another commitment and another code.

A waiting site holds no connection. It asks from time to time, and proves that it has the key of the request.
"""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from cloister.protocol.errors import DoorError, MemberError, RosterError
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.short_authentication import Exchange, check_revealed
from cloister.server.door.rate import Rate, Rates

_PLACES = 16
"""Requests that may wait."""
_AT_ADDRESS = 4
"""Requests that may wait of one address: several sites may be behind one."""
_LONGEST = 2**12
"""Bytes of a request; one with the longest name and contact has 1,600."""
_UNHEARD_S = 3600.0
"""Seconds for which a request waits without its site."""
_LONGEST_S = 24 * 3600.0
"""Seconds for which a request waits in all."""
_BURST, _RATE = 20, 0.2
"""Commitments of an address that may come at once, and a second."""
_ALL_BURST, _ALL_RATE = 200, 1.0
"""Those of all addresses: each is a try to get the code that a site reads aloud."""
_WRONG = 3
"""Wrong codes after which a request waits no longer."""
_REMEMBERED = 1024
"""Commitments, names and ends of requests that are remembered, of each the newest."""

V = TypeVar("V")


@dataclass(eq=False)
class Waiting:
    """A request that waits."""

    request: Request
    document: str
    """The request as it came."""
    code: str
    address: str
    """Where it came from."""
    since: datetime
    begun: float
    """When it came (`time.monotonic`)."""
    heard: float
    """When its site was heard last."""
    wrong: int = 0
    """Wrong codes that were compared with it."""


class Enrolments:
    """The requests that wait; all of it in one thread, but for `following`.

    Args:
        version: Returns an earlier version of the federation; None: it has none with that number.
    """

    def __init__(self, version: Callable[[int], Federation | None] = lambda _: None) -> None:
        self._version = version
        self.failed = 0
        """Commitments that no right request followed, since the door is open."""
        self._waiting: list[Waiting] = []
        """The oldest first."""
        self._rate = Rate(_ALL_BURST, _ALL_RATE)
        self._rates = Rates(_BURST, _RATE)
        self._commitments: dict[bytes, bool] = {}
        self._tries: dict[str, int] = {}
        """Codes that were made for a name."""
        self._ended: dict[bytes, str] = {}
        """Why the request with a key waits no longer."""

    def commit(self, commitment: bytes, address: str) -> None:
        """Take a commitment, which is answered once.

        Args:
            commitment: It.
            address: Where it comes from.

        Raises:
            RosterError: it was answered before, or is none.
            DoorError: too many come from that address.
        """
        self._rates.take(address)
        self._rate.take()
        if len(commitment) != 32 or commitment in self._commitments:
            raise RosterError("commitment", commitment[:32].hex(), expected="a new one of 32 bytes each time")
        _remember(self._commitments, commitment, True)

    def reveal(
        self, commitment: bytes, exchange: Exchange, signature: bytes, address: str, federation: Federation
    ) -> str:
        """Let a request wait.

        Args:
            commitment: What its site has sent first.
            exchange: What the door has seen since.
            signature: Of the exchange, as the site has sent it.
            address: Where it comes from.
            federation: The newest version.

        Returns:
            The name of the site that waits from now on; empty if it is a site already.

        Raises:
            RosterError: the request is another than that of the commitment, or its name is taken.
            SignatureError: the owner of the request's key has not signed the exchange.
            DoorError: it is too long, or there is no place.
        """
        document, now = exchange.request, time.monotonic()
        if len(document.encode()) > _LONGEST:
            raise DoorError("request", f"{len(document)} bytes", expected=f"at most {_LONGEST}")
        check_revealed(commitment, document, exchange.nonces.site)
        request = Request.from_toml(document, "of an enrolment")
        exchange.verify(request.key, signature)
        known = federation.site(request.name)
        if known == request:
            return ""
        if known is not None and not request.rotates(known.key):
            raise RosterError(
                "--name",
                request.name,
                expected="a name that no site of the federation has",
                fix="choose another name and another --folder; for a new key of this site: cloister site rotate",
            )
        self._expire(now)
        again = next((each for each in self._waiting if each.request.key == request.key), None)
        if again is not None and again.request.name != request.name:
            raise RosterError(
                "--name", request.name, expected=f"{again.request.name}, for which this key waits already"
            )
        self._make_place(address, [each for each in self._waiting if each is not again])
        waiting = {each.request.name for each in self._waiting}
        _remember(self._tries, request.name, self._tries.get(request.name, 0) + 1, waiting)
        self._waiting.append(Waiting(request, document, exchange.code, address, datetime.now(UTC), now, now))
        return request.name

    def hear(self, name: str, key: bytes) -> None:
        """A site asks whether its request still waits.

        Raises:
            MemberError: it does not.
        """
        now = time.monotonic()
        self._expire(now)
        for each in self._waiting:
            if each.request.key == key and each.request.name == name:
                each.heard = now
                return
        raise MemberError(
            f"request of {name}",
            self._ended.get(key, "not known: the coordinator may have started again"),
            expected="one that waits at the coordinator",
            fix="run the command again, and tell the coordinator the new code",
        )

    def following(self, installed: int, newest: Federation) -> Federation:
        """The version after the one that a site has installed; the newest, if it has none or that one is not known.

        Raises:
            RosterError: the file of the version was damaged.
        """
        missed = 0 < installed < newest.version - 1
        return (self._version(installed + 1) if missed else None) or newest

    def listed(self) -> list[dict[str, Any]]:
        """Those that wait, as JSON, without their codes."""
        self._expire(time.monotonic())
        return [
            {
                "name": each.request.name,
                "contact": each.request.contact,
                "fingerprint": each.request.fingerprint.hex(),
                "address": each.address,
                "since": each.since.isoformat(timespec="seconds"),
                "tries": self._tries.get(each.request.name, 1),
                "wrong": each.wrong,
            }
            for each in self._waiting
        ]

    def compare(self, name: str, code: str) -> str:
        """The request of a name whose code is the one that a person was told, as a document.

        Raises:
            RosterError: there is none.
        """
        self._expire(time.monotonic())
        waiting = [each for each in self._waiting if each.request.name == name]
        if not waiting:
            raise RosterError("--code", name, expected="the name of a site that waits")
        found = [each for each in waiting if hmac.compare_digest(each.code.encode(), code.encode())]
        if found:
            return found[0].document
        for each in waiting:
            each.wrong += 1
            if each.wrong >= _WRONG:
                self._end(each, f"its code was compared with {_WRONG} wrong ones")
        raise RosterError(
            f"code of {name}",
            code,
            expected="the code of the request that waits",
            fix=f"do not approve it; let {name} read its code again, and if it differs again, someone is between you: "
            "use the files instead (cloister site request)",
        )

    def settle(self, federation: Federation) -> None:
        """Forget the requests of those that are sites now."""
        self._waiting = [each for each in self._waiting if federation.site(each.request.name) != each.request]

    def _make_place(self, address: str, others: list[Waiting]) -> None:
        """Let no more than `others` wait; end the oldest of the address with the most, if all places are taken.

        Raises:
            DoorError: no address has more of them than this one would have; all wait that have waited.
        """
        crowd = Counter(each.address for each in others)
        full = len(others) >= _PLACES
        most, count = max(crowd.items(), key=lambda each: each[1], default=("", 0))
        if crowd[address] >= _AT_ADDRESS or (full and count <= crowd[address] + 1):
            raise DoorError(
                "requests that wait",
                crowd[address] if not full else len(others),
                expected=f"fewer than {_AT_ADDRESS} of an address and {_PLACES} in all",
                fix="try again later, or send the file of `cloister site request` to the coordinator",
            )
        self._waiting = others
        if full:
            self._end(next(each for each in others if each.address == most), "others have taken its place")

    def _expire(self, now: float) -> None:
        for each in list(self._waiting):
            if now - each.heard > _UNHEARD_S or now - each.begun > _LONGEST_S:
                self._end(each, "expired")

    def _end(self, waiting: Waiting, reason: str) -> None:
        self._waiting.remove(waiting)
        _remember(self._ended, waiting.request.key, reason)


def _remember(kept: dict[Any, V], key: Any, value: V, always: Collection[Any] = ()) -> None:
    """Note a value, and forget the oldest of too many that is not to be kept always."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _REMEMBERED:
        del kept[next(each for each in kept if each not in always)]
