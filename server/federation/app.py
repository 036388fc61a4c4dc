"""The coordinator as a Flower `ServerApp`, and its messages over any Flower `Grid`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from cloister.protocol.errors import SecureSumError
from cloister.protocol.messages.envelope import Sender, body_of
from cloister.protocol.messages.messages import Failed, Reply, Request
from cloister.protocol.messages.wire import Buffer, encode, view
from cloister.server.door.carrier import Carrier, array_of
from cloister.server.sum.channel import Failure, reply_in

_GRACE_S = 60.0
"""Seconds by which a message's TTL exceeds its deadline on a grid that is not ours, so that the deadline ends first."""
_GREETING_S = 120.0
"""Seconds after which a node that has not told its site's name is asked again."""
_POLL_S = 0.1
"""Seconds between two pulls from a grid that cannot wait."""
_AGAIN_S = 1.0
"""Seconds after which a request to a site that was away is sent again."""
_AWAY = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""What Flower says of a node that has ended, or begins, and not of what its app has done."""


class GridChannel:
    """The nodes of a Flower grid, as a `Channel`. It needs `push_messages` and `pull_messages` alone.

    A `Carrier` waits, ends a request at its deadline, and is told which requests are withdrawn. Any other grid is asked
    again and again; a reply that comes after the deadline is ignored.

    Args:
        grid: Flower's grid.
        sender: Signs each request for its site.
        names: The names of sites by node; a node that has none yet is not asked. A reply under another name is a
            failure.
    """

    def __init__(self, grid: Grid, sender: Sender, names: Mapping[int, str]) -> None:
        self._grid = grid
        self._sender = sender
        self._names = names
        self._records: dict[int, _Encoded] = {}
        """Those of the newest push, by the identity of a request that lives."""

    def nodes(self) -> Sequence[int]:
        """Flower's node ids."""
        return [node for node in self._grid.get_node_ids() if node in self._names]

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Channel.ask`; a request or vector that goes to several nodes is encoded once."""
        batches = iter((requests,))
        return self.stream(lambda: next(batches, {}), deadline_s, group=group)

    def stream(
        self, requests: Callable[[], Mapping[int, Request]], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Streaming.stream`, otherwise as `ask`."""
        waiting: dict[str, _Asked] = {}
        away: list[_Asked] = []
        try:
            while True:
                if batch := requests():
                    self._push(waiting, self._asked(batch, deadline_s, group))
                self._push(waiting, self._returned(away))
                if not waiting and not away:
                    return
                replies = list(self._grid.pull_messages(list(waiting))) if waiting else []
                if not replies:
                    for node in self._wait(waiting, away):
                        yield node, Failure(f"node {node}", f"timeout: no answer within {deadline_s:g} s")
                while replies:  # each is dropped before the next: its vectors are mapped
                    message = replies.pop(0)
                    of = waiting.pop(message.metadata.reply_to_message_id, None)
                    if of is not None and self._is_away(message):
                        away.append(of)
                    elif of is not None:
                        yield of.node, self._reply(of, message)
                    del message
        finally:
            self._records = {}
            if isinstance(self._grid, Carrier):
                self._grid.cancel(list(waiting))

    def _wait(self, waiting: dict[str, _Asked], away: list[_Asked]) -> list[int]:
        """Wait for a reply; the nodes that are late, which are dropped, where the grid ends no request itself."""
        if isinstance(self._grid, Carrier):
            self._grid.wait()
            return []
        now = time.monotonic()
        late = [of.node for of in (*waiting.values(), *away) if now >= of.until]
        for id in [id for id, of in waiting.items() if of.node in late]:
            del waiting[id]
        away[:] = [of for of in away if of.node not in late]
        if not late:
            time.sleep(_POLL_S)  # Flower's own grids have no call that waits
        return late

    def _is_away(self, reply: Message) -> bool:
        """Whether a request is to be sent again when its site is back."""
        return False

    def _returned(self, away: list[_Asked]) -> list[_Asked]:
        """Those that are sent again now, which are dropped from the list."""
        return []

    def _place(self, node: int) -> int:
        """The node of the grid at which the site with a node's name is now."""
        return node

    def _asked(self, requests: Mapping[int, Request], deadline_s: float, group: str) -> list[_Asked]:
        """Requests as they are sent; what several nodes get is encoded and hashed once."""
        until = time.monotonic() + deadline_s
        live = {id(each): self._records[id(each)] for each in requests.values() if id(each) in self._records}
        views: dict[int, Array] = {}
        asked = []
        for node, request in requests.items():
            if id(request) not in live:
                live[id(request)] = _encoded(request, views)
            each = live[id(request)]
            envelope = self._sender.envelope(self._names[node], each.body)
            asked.append(_Asked(node, each.record, envelope, deadline_s, until, group))
        self._records = live
        return asked

    def _push(self, waiting: dict[str, _Asked], asked: Sequence[_Asked]) -> None:
        grace, messages = 0.0 if isinstance(self._grid, Carrier) else _GRACE_S, []
        for each in asked:
            content = RecordDict({"frames": each.record, "envelope": ConfigRecord({"signed": each.envelope})})
            ttl, node = each.deadline_s + grace, self._place(each.node)
            messages.append(Message(content, node, "query", ttl=ttl, group_id=each.group))
        if messages:
            waiting |= dict(zip(self._grid.push_messages(messages), asked, strict=True))

    def _reply(self, of: _Asked, message: Message) -> Reply | Failure:
        node, name = of.node, self._names[of.node]
        if message.has_error():
            return Failure(f"node {node}", message.error.reason or "")
        frames = message.content.get("frames")
        held: Sequence[Buffer] = []
        if isinstance(frames, ArrayRecord):
            held = [frames[each].data for each in sorted(frames)]
        try:
            held = self._sender.opened(name, of.envelope, held)
        except SecureSumError as error:
            # Not sealed, so nobody's: of a site that does not know the coordinator.
            said = reply_in(held, node)
            why = f" (it says: {said.reason})" if isinstance(said, Failed) else ""
            return Failure(f"node {node}", f"{error}{why}")
        reply = reply_in(held, node)
        if isinstance(reply, Failure | Failed) or reply.site == name:
            return reply
        return Failure(name, f"it answered under the name {reply.site!r}")


class MeetingChannel(GridChannel):
    """A channel over a grid that does not know whose its nodes are: each is asked for its site's name first.

    What a node says is not proved: it decides only for whom a request to it is signed, and no other site serves that.
    A process that starts again is another node of Flower's. The node whose reply was first signed by a site stands for
    the site from then on; where it has ended, its requests go to a node that says that it is that site, until their
    deadline.

    Args:
        grid: Flower's grid.
        sender: As for `GridChannel`.
        sites: The sites of the run; nodes of others are not asked.
    """

    def __init__(self, grid: Grid, sender: Sender, sites: Collection[str]) -> None:
        self._met: dict[int, str] = {}
        super().__init__(grid, sender, self._met)
        self._sites = sites
        self._greeted: dict[int, float] = {}
        """By node without a name, when it was asked last."""
        self._unanswered: dict[str, int] = {}
        self._homes: dict[str, int] = {}
        """By site that has signed a reply, the node that stands for it."""
        self._places: dict[int, int] = {}
        """By such a node that has ended, the node that gets its requests."""
        self._turns = Counter[int]()
        """How often a node has got requests of another one: one that lies about its name is not asked alone."""

    def nodes(self) -> Sequence[int]:
        """The nodes of sites that have told their names."""
        self.meet(0, 0)
        return list(dict.fromkeys(self._homes.get(self._met[node], node) for node in super().nodes()))

    def _reply(self, of: _Asked, message: Message) -> Reply | Failure:
        reply = super()._reply(of, message)
        if isinstance(reply, Failure):  # perhaps of a node that lies about its name: another one may be next
            self._places.pop(of.node, None)
        else:
            self._homes.setdefault(self._met[of.node], of.node)
        return reply

    def _is_away(self, reply: Message) -> bool:
        return reply.has_error() and reply.error.code in _AWAY

    def _place(self, node: int) -> int:
        return self._places.get(node, node)

    def _returned(self, away: list[_Asked]) -> list[_Asked]:
        now, found = time.monotonic(), list[_Asked]()
        if all(now < of.again for of in away):
            return found
        self.meet(0, 0)
        live = set(self._grid.get_node_ids())
        for of in away:
            of.again = now + _AGAIN_S
            named = [node for node in live if self._met.get(node) == self._met[of.node]]
            if self._place(of.node) not in live and named:
                self._places[of.node] = place = min(named, key=lambda node: self._turns[node])
                self._turns[place] += 1
            if self._place(of.node) in live:
                of.deadline_s = max(0.0, of.until - now)
                found.append(of)
        away[:] = [of for of in away if of not in found]
        return found

    def meet(self, sites: int, timeout_s: float) -> int:
        """Wait until so many sites have told their names; returns how many have, also when the time is over."""
        until = time.monotonic() + timeout_s
        while True:
            self._greet()
            for message in self._grid.pull_messages(list(self._unanswered)):
                node = self._unanswered.pop(message.metadata.reply_to_message_id)
                record = None if message.has_error() else message.content.get("hello")
                name = record.get("site") if isinstance(record, ConfigRecord) else None
                if isinstance(name, str) and name in self._sites:
                    self._met[node] = name
            met = len(set(self._met.values()))
            if met >= sites or time.monotonic() >= until:
                return met
            time.sleep(_POLL_S)  # as in `_wait`: no call of Flower's own grids waits

    def _greet(self) -> None:
        now = time.monotonic()
        nodes = [
            node
            for node in self._grid.get_node_ids()
            if node not in self._met and now - self._greeted.get(node, -_GREETING_S) >= _GREETING_S
        ]
        hello = RecordDict({"hello": ConfigRecord()})
        messages = [Message(hello, node, "query", ttl=_GREETING_S, group_id="hello") for node in nodes]
        if messages:
            self._unanswered |= dict(zip(self._grid.push_messages(messages), nodes, strict=True))
            self._greeted |= dict.fromkeys(nodes, now)


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """A `ServerApp` whose main function is `run`."""
    app = ServerApp()
    app.main()(run)
    return app


@dataclass(eq=False)
class _Asked:
    """A request that waits for its reply."""

    node: int
    record: ArrayRecord
    envelope: bytes
    deadline_s: float
    """Seconds that the site has from when it is sent."""
    until: float
    """Its deadline, on the monotonic clock."""
    group: str
    again: float = 0.0
    """When it may be sent again, on the same clock."""


@dataclass(frozen=True)
class _Encoded:
    """A request as it is sent, to each node that gets it."""

    request: Request
    record: ArrayRecord
    body: bytes
    """What its envelopes have of it."""


def _encoded(request: Request, known: dict[int, Array]) -> _Encoded:
    """A request with its frames as arrays; `known` caches those of vectors that requests share, by identity."""
    record, frames = ArrayRecord(), encode(request)
    for number, frame in enumerate(frames):
        array = known.get(id(frame))
        if array is None:
            array = array_of(view(frame))
            if number:
                known[id(frame)] = array
        record[f"{number:04d}"] = array
    return _Encoded(request, record, body_of(frames))
