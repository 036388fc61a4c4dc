"""The coordinator as a Flower `ServerApp`, and its messages over any Flower `Grid`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from cloister.protocol.messages.messages import Failed, Reply, Request
from cloister.protocol.messages.wire import encode, view
from cloister.server.door.carrier import Carrier, array_of
from cloister.server.sum.channel import Failure, reply_in

_GRACE_S = 60.0
"""Seconds by which a message's TTL exceeds its deadline on a grid that is not ours, so that the deadline ends first."""
_POLL_S = 0.1
"""Seconds between two pulls from a grid that cannot wait."""


class GridChannel:
    """The nodes of a Flower grid, as a `Channel`. It needs `push_messages` and `pull_messages` alone.

    A `Carrier` waits, ends a request at its deadline, and is told which requests are withdrawn. Any other grid is asked
    again and again; a reply that comes after the deadline is ignored.

    Args:
        grid: Flower's grid.
        names: By node, the name under which its site has proved itself to the grid; a reply under another one is a
            failure. Of other nodes the messages themselves prove it.
    """

    def __init__(self, grid: Grid, names: Mapping[int, str] | None = None) -> None:
        self._grid = grid
        self._names = names or {}
        self._records: dict[int, tuple[Request, ArrayRecord]] = {}
        """Those of the newest push, by the identity of a request that lives."""

    def nodes(self) -> Sequence[int]:
        """Flower's node ids."""
        return list(self._grid.get_node_ids())

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
        waiting: dict[str, tuple[int, float]] = {}
        try:
            while True:
                if batch := requests():
                    until = time.monotonic() + deadline_s
                    ids = self._grid.push_messages(self._messages(batch, deadline_s, group))
                    waiting |= {id: (node, until) for id, node in zip(ids, batch, strict=True)}
                if not waiting:
                    return
                replies = list(self._grid.pull_messages(list(waiting)))
                if not replies:
                    for node in self._wait(waiting):
                        yield node, Failure(f"node {node}", f"timeout: no answer within {deadline_s:g} s")
                while replies:  # each is dropped before the next: its vectors are mapped
                    message = replies.pop(0)
                    asked = waiting.pop(message.metadata.reply_to_message_id, None)
                    if asked is not None:
                        yield asked[0], self._reply(asked[0], message)
                    del message
        finally:
            self._records = {}
            if isinstance(self._grid, Carrier):
                self._grid.cancel(list(waiting))

    def _wait(self, waiting: dict[str, tuple[int, float]]) -> list[int]:
        """Wait for a reply; the nodes that are late, which are dropped, where the grid ends no request itself."""
        if isinstance(self._grid, Carrier):
            self._grid.wait()
            return []
        late = {id: node for id, (node, until) in waiting.items() if time.monotonic() >= until}
        for id in late:
            del waiting[id]
        if not late:
            time.sleep(_POLL_S)  # Flower's own grids have no call that waits
        return list(late.values())

    def _messages(self, requests: Mapping[int, Request], deadline_s: float, group: str) -> list[Message]:
        ttl = deadline_s + (0 if isinstance(self._grid, Carrier) else _GRACE_S)
        live = {id(each): self._records[id(each)] for each in requests.values() if id(each) in self._records}
        views: dict[int, Array] = {}
        messages = []
        for node, request in requests.items():
            if id(request) not in live:
                live[id(request)] = request, _record(request, views)
            content = RecordDict({"frames": live[id(request)][1]})
            messages.append(Message(content, node, "query", ttl=ttl, group_id=group))
        self._records = live
        return messages

    def _reply(self, node: int, message: Message) -> Reply | Failure:
        if message.has_error():
            return Failure(f"node {node}", message.error.reason or "")
        frames = message.content.get("frames")
        held = [frames[name].data for name in sorted(frames)] if isinstance(frames, ArrayRecord) else []
        reply, name = reply_in(held, node), self._names.get(node)
        if name is None or isinstance(reply, Failure | Failed) or reply.site == name:
            return reply
        return Failure(name, f"it answered under the name {reply.site!r}")


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """A `ServerApp` whose main function is `run`."""
    app = ServerApp()
    app.main()(run)
    return app


def _record(request: Request, known: dict[int, Array]) -> ArrayRecord:
    """The frames of a request, as arrays; `known` caches those of vectors that requests share, by identity."""
    record = ArrayRecord()
    for number, frame in enumerate(encode(request)):
        array = known.get(id(frame))
        if array is None:
            array = array_of(view(frame))
            if number:
                known[id(frame)] = array
        record[f"{number:04d}"] = array
    return record
