"""What the door keeps of each site: its session, the request that it is to answer, and the vectors that it uploads."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from cloister.protocol.identity.heads import Head
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.transfer import CHUNK, SLOWEST, STALL_S, Arrivals
from cloister.server.door.rate import Rate

_UNSENT = 64
"""Messages to a site that wait to be sent; a site that does not read them is disconnected."""
_BURST, _RATE = 2048, 100.0
"""Messages of a session and transfers of a site that may come at once, and a second."""
_SESSIONS, _SESSION_S = 30, 5.0
"""Sessions that a site may open at once, and the seconds after which one more: each leaves lines in logs."""


@dataclass(frozen=True)
class Asked:
    """A request, the same for all sites that a run has asked at once."""

    id: bytes
    letter: bytes
    """The request as it is sent, without its envelope."""
    offered: dict[bytes, memoryview]
    """Its vectors, by hash."""
    deadline_s: float


@dataclass(eq=False)
class Pending:
    """A request at one site that waits for its reply."""

    asked: Asked
    folder: Path
    """For the vectors of the reply: the same for the same request, also after a restart."""
    arrivals: Arrivals
    most_bytes: int
    """Of the vectors of the reply."""
    envelope: bytes
    """Of the request at this site."""
    until: float = 0.0
    """The deadline, but for transfers."""
    reply: pb.Letter | None = None
    """What the site has answered."""
    moved_at: float = -STALL_S
    """When the last bytes of an upload have arrived."""
    fetched: int = 0
    """Bytes of the request's vectors that were sent."""
    fetched_at: float = -math.inf
    """When the last of them was; what a site fetches again does not count."""
    timer: asyncio.TimerHandle | None = None
    """Ends the request at its deadline."""

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.asked.deadline_s

    @property
    def letter(self) -> bytes:
        """The request as it is sent, each time: protobuf joins what is serialized one after the other."""
        envelope: bytes = pb.ToSite(request=pb.Letter(envelope=self.envelope)).SerializeToString()
        return self.asked.letter + envelope

    def left_s(self) -> float:
        """Seconds until it is overdue.

        The deadline begins when the site has the request's vectors, and a reply whose upload moves at the deadline is
        waited for as long as it moves; what a site waits for transfers is bounded, each way.
        """
        offered = sum(each.nbytes for each in self.asked.offered.values())
        longest = max(self.most_bytes, CHUNK, offered) / SLOWEST
        end = max(self.until, min(self.fetched_at, self.until + longest) + self.asked.deadline_s)
        return max(end, min(self.moved_at + STALL_S, end + longest)) - time.monotonic()

    def settle(self) -> None:
        """Wait for its deadline no more: a timer would hold its vectors, each an open file, until then."""
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class Session:
    """A connection of a site that has proved who it is."""

    key: bytes = field(repr=False)
    """Names it in uploads and downloads; 32 random bytes."""
    end: Callable[[str], None]
    """Ends it, with the reason that the site is told."""
    seen: Head
    """What the site has seen of the coordinator's audit log."""
    unsent: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(_UNSENT))
    transfers: set[asyncio.Task[Any]] = field(default_factory=set)

    def tell(self, **said: Message) -> None:
        """Queue a message; a site that does not read loses its session."""
        self.send(pb.ToSite(**said).SerializeToString())

    def send(self, message: bytes) -> None:
        """As `tell`, for a message that is serialized."""
        try:
            self.unsent.put_nowait(message)
        except asyncio.QueueFull:
            self.end("the site does not read its messages")


@dataclass(eq=False)
class Site:
    """A site that has proved its identity at least once, or is asked by a run."""

    name: str
    session: Session | None = None
    public: bytes = b""
    """The key with which it has opened its session."""
    installing: asyncio.Task[Any] | None = None
    """Its call for a version of the federation; a newer one ends it."""
    refused: str = ""
    """Why it was refused a session since its last one, though it has proved its key; empty: it was not."""
    pending: Pending | None = None
    left: Pending | None = None
    """A request whose reply came and was not taken by the process of a run that has ended since."""
    taken: Path | None = None
    """The folder of the vectors of the reply that was taken last: they stay until the site is asked for another."""
    rate: Rate = field(default_factory=lambda: Rate(_BURST, _RATE))
    sessions: Rate = field(default_factory=lambda: Rate(_SESSIONS, 1 / _SESSION_S, "sessions"))
    sent: int = 0
    """Bytes of vectors that it was sent in the present run."""
    received: int = 0
    """Bytes of vectors that it has uploaded in the present run."""
