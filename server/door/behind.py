"""A run behind the door: what its process says, over a socket of this machine, and what the door answers.

Each message is sent after its length in four bytes. The socket is one of a pair, of which the process of the run has
inherited the other end, so nobody else can reach it.
"""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message

from cloister.protocol.messages import door_pb2 as pb
from cloister.server.door.sites import Asked, Site

LENGTH = struct.Struct("!I")
LONGEST = 2**26
"""Bytes of the longest message: a request to 10,000 sites, whose vectors are files."""


class Behind:
    """A run that is under way.

    Args:
        begin: What it has begun with.
        writer: Where answers go.
    """

    def __init__(self, begin: pb.Begin, writer: asyncio.StreamWriter) -> None:
        self.label = begin.run
        self.folder = Path(begin.folder)
        self.sites = frozenset(begin.sites)
        self.most_bytes = begin.most_bytes
        self._writer = writer
        self._seen = b""

    def tell(self, **said: Message) -> None:
        """Queue a message; what a run has not read yet is at most a few kilobytes for each site."""
        data = pb.ToRun(**said).SerializeToString()
        self._writer.write(LENGTH.pack(len(data)) + data)

    def answer(self, site: Site, request: bytes, **said: Any) -> None:
        """Tell the reply of a site, its `frame` and `paths`, or why it has none, the `failure`."""
        of = pb.Of(site=site.name, request=request)
        self.tell(answer=pb.Answer(of=of, seen=_seen(site), **said))

    def show(self, sites: list[Site]) -> None:
        """Tell which of its sites are connected, and the bytes that have moved, if that has changed."""
        seen = pb.Seen(sites=[_seen(site) for site in sites if site.name in self.sites])
        data = seen.SerializeToString()
        if data != self._seen:
            self._seen = data
            self.tell(seen=seen)


def _seen(site: Site) -> pb.Site:
    online = site.session is not None
    return pb.Site(name=site.name, online=online, sent=site.sent, received=site.received)


async def received(reader: asyncio.StreamReader) -> pb.FromRun:
    """The next message of a run.

    Raises:
        asyncio.IncompleteReadError: its process has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    assert length <= LONGEST, "DoorGrid sends no longer message"
    said: pb.FromRun = pb.FromRun.FromString(await reader.readexactly(length))
    return said


def asked_in(ask: pb.Ask, run: str) -> Asked:
    """A request as the door keeps it; its vectors are mapped, and stay so when their files are removed."""
    letter = ask.request
    letter.run = run
    offered = {
        vector.hash: np.memmap(path, np.uint8, "r", shape=(vector.size,)).data
        for vector, path in zip(letter.vectors, ask.paths, strict=True)
        if vector.size
    }
    return Asked(letter.id, pb.ToSite(request=letter).SerializeToString(), offered, ask.deadline_s)
