"""The coordinator as a Flower `ServerApp`: the only file in `server/` that imports Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from cloister.protocol.messages import Reply, Request
from cloister.protocol.wire import encode, view
from cloister.server.channel import Failure, reply_in

_GRACE_S = 60.0
"""Seconds by which a message's TTL exceeds the deadline, so that the deadline ends an attempt first."""


class GridChannel:
    """The nodes of a Flower grid, as a `Channel`.

    Args:
        grid: Flower's grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> Sequence[int]:
        """Flower's node ids."""
        return list(self._grid.get_node_ids())

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Channel.ask`; a request or vector that goes to several nodes is encoded once."""
        encoded: dict[int, ArrayRecord] = {}
        views: dict[int, Array] = {}
        messages = []
        for node, request in requests.items():
            record = encoded.get(id(request))
            if record is None:
                record = encoded[id(request)] = _record(request, views)
            content = RecordDict({"frames": record})
            messages.append(Message(content, node, "query", ttl=deadline_s + _GRACE_S, group_id=group))
        waiting = dict.fromkeys(requests)
        for message in self._grid.send_and_receive(messages, timeout=deadline_s):
            node = message.metadata.src_node_id
            if node in waiting:
                del waiting[node]
                yield node, _reply(node, message)
        for node in waiting:
            yield node, Failure(f"node {node}", f"timeout: no answer within {deadline_s:g} s")


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
            data = view(frame)
            array = Array("uint8", (data.nbytes,), "cloister.frame", b"")
            # Flower's constructor requires bytes, which would be a copy.
            array.data = data  # type: ignore[assignment]  # Flower's transport accepts any buffer
            if number:
                known[id(frame)] = array
        record[f"{number:04d}"] = array
    return record


def _reply(node: int, message: Message) -> Reply | Failure:
    if message.has_error():
        return Failure(f"node {node}", message.error.reason or "")
    frames = message.content.get("frames")
    held = [frames[name].data for name in sorted(frames)] if isinstance(frames, ArrayRecord) else []
    return reply_in(held, node)
