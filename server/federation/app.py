"""The coordinator as a Flower `ServerApp`: the only file in `server/` that imports Flower."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.flower import INVITATION, INVITE, REASON, Tasks, heartbeat
from cloister.protocol.messages.messages import Reply, Request
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.wire import encode, view
from cloister.server.sum.channel import Failure, reply_in

_log = logging.getLogger(__name__)

_BUNDLE = """\
[project]
name = "cloister"
version = "1.0.0"

[tool.flwr.app]
publisher = "cloister"

[tool.flwr.app.components]
serverapp = "cloister.server.federation.app:nothing"
clientapp = "cloister.clients.app:nothing"
"""
"""The bundle that Flower wants of a run. It has no module, and names none that there is: coordinator and sites run
their own installed apps, and do not open it."""
_INVITED_S = 120.0
"""Seconds for which Flower keeps an invitation for a node that does not fetch it."""

_RETRY_S = 30.0
"""Seconds for which a call of Flower's grid is repeated while the SuperLink does not answer."""

_GRACE_S = 60.0
"""Seconds by which a message's TTL exceeds the deadline, so that the deadline ends an attempt first."""


@runtime_checkable
class StreamingGrid(Protocol):
    """A grid that takes messages while others wait for their replies."""

    def stream(self, messages: Callable[[], Iterable[Message]]) -> Iterator[Message]:
        """Push what `messages` returns, now and again before each wait, and yield each reply as it arrives."""


class GridChannel:
    """The nodes of a Flower grid, as a `Channel`. Its `stream` needs a `StreamingGrid`.

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
        messages = _messages(requests, deadline_s + _GRACE_S, group)
        waiting = dict.fromkeys(requests)
        for message in self._grid.send_and_receive(messages, timeout=deadline_s):
            node = message.metadata.src_node_id
            if node in waiting:
                del waiting[node]
                yield node, _reply(node, message)
        for node in waiting:
            yield node, Failure(f"node {node}", f"timeout: no answer within {deadline_s:g} s")

    def stream(
        self, requests: Callable[[], Mapping[int, Request]], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Streaming.stream`, over a `StreamingGrid` alone; the deadline is the messages' TTL."""
        assert isinstance(self._grid, StreamingGrid), "Flower's own grids send no message while others wait"
        for message in self._grid.stream(lambda: _messages(requests(), deadline_s, group)):
            node = message.metadata.src_node_id
            yield node, _reply(node, message)


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """A `ServerApp` whose main function is `run`."""
    app = ServerApp()
    app.main()(run)
    return app


class SuperLink(Closing):
    """Flower's SuperLink on this machine, for the coordinator; a context manager.

    Args:
        address: HOST:PORT of its local API.
        secret: The secret that it was started with.
        certificate: The root of its certificate, in PEM.
    """

    def __init__(self, address: str, secret: bytes, certificate: bytes) -> None:
        self._address = address
        self._certificate = certificate
        self._tasks = Tasks(address, secret, certificate)
        self._control = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="cloister")],
        )

    def close(self) -> None:
        """Close the connections."""
        self._control.close()
        self._tasks.close()

    def admit(self, keys: Mapping[str, str]) -> bool:
        """Let SuperNodes with these keys connect, and no others.

        Args:
            keys: By site, the public key of its SuperNode in OpenSSH's format.

        Returns:
            Whether all of them can. Flower's database keeps a key that was removed, and never registers it again:
            where a site is back, an empty database is needed.

        Raises:
            EngineError: the SuperLink does not answer, or refuses a key.
        """
        with self._answering():
            wanted = {_pem(key) for key in keys.values()}
            nodes = self._control.ListNodes(ListNodesRequest()).nodes_info
            removed = {node.public_key for node in nodes if node.status == NodeStatus.UNREGISTERED}
            known = {node.public_key: node.node_id for node in nodes if node.public_key not in removed}
            for key, node in known.items():
                if key not in wanted:
                    self._control.UnregisterNode(UnregisterNodeRequest(node_id=node))
            for key in sorted(wanted - set(known) - removed):
                self._control.RegisterNode(RegisterNodeRequest(public_key=key))
            return not wanted & removed

    @contextmanager
    def run(self, keys: Mapping[str, str]) -> Iterator[FlowerRun]:
        """A run of Flower, whose `ServerApp` this process is for as long as the context lasts.

        Args:
            keys: As for `admit`.

        Raises:
            EngineError: the SuperLink does not answer, or does not start the run.
        """
        bundle, _ = build_fab_from_files({"pyproject.toml": _BUNDLE.encode()})
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        with self._answering():
            number = self._control.StartRun(StartRunRequest(fab=fab)).run_id
            while True:
                taken = self._tasks.take("flwr-serverapp")
                if taken is None:
                    raise EngineError("Flower's run", number, expected="a SuperLink that has a task for it")
                client, token = taken
                given = client.PullTaskInput(PullTaskInputRequest())
                if given.run.run_id == number:
                    break
                failed = PushTaskOutputRequest(
                    sub_status=SubStatus.FAILED, details="its coordinator has ended"
                )
                client.PushTaskOutput(failed)
                client.close()
        context = context_from_proto(given.context)
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, number
        TaskIdentity.node_id = context.node_id
        grid = HttpGrid(self._address, False, self._certificate, token=token)
        grid._retry_invoker.max_time = _RETRY_S  # Flower has no public way: it would try without a limit
        grid.set_run(run_from_proto(given.run))
        flower = FlowerRun(grid, {_pem(key): name for name, key in keys.items()})
        try:
            with heartbeat(client, lost=flower.lose), flower.answering():
                yield flower
        finally:
            try:
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details=""))
            except httpx.HTTPError as error:
                _log.info("the end of Flower's run was not told: %s", one_line(error))
            grid.close()
            client.close()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                "SuperLink", self._address, expected=f"an answer ({one_line(error)})"
            ) from error


class FlowerRun:
    """A run of Flower: its grid, and invitations to its nodes.

    Args:
        grid: Flower's grid.
        names: By public key of a SuperNode in PEM, the name of its site.
    """

    def __init__(self, grid: HttpGrid, names: Mapping[bytes, str]) -> None:
        self.grid = grid
        self.lost = False
        """Whether Flower has given the run up; a new one is needed for messages."""
        self._names = names
        self._invited: dict[str, str] = {}

    def lose(self) -> None:
        """Note that Flower has given the run up."""
        self.lost = True

    def nodes(self) -> dict[str, int]:
        """The SuperNodes that are connected: by site, Flower's number of its node.

        Raises:
            EngineError: the SuperLink does not answer.
        """
        with self.answering():
            found = list(self.grid.get_nodes())
        return {
            self._names[node.public_key]: node.node_id for node in found if node.public_key in self._names
        }

    def invite(self, invitations: Mapping[str, tuple[int, bytes]]) -> None:
        """Send invitations.

        Args:
            invitations: By site, its node and the invitation.

        Raises:
            EngineError: the SuperLink does not answer.
        """
        messages = [
            Message(
                RecordDict({INVITE: ConfigRecord({INVITATION: invitation})}),
                node,
                f"query.{INVITE}",
                ttl=_INVITED_S,
                group_id=INVITE,
            )
            for node, invitation in invitations.values()
        ]
        with self.answering():
            sent = list(self.grid.push_messages(messages))
        self._invited.update({id: name for id, name in zip(sent, invitations, strict=True) if id})

    def refusals(self) -> list[tuple[str, str]]:
        """Sites that have refused an invitation since the last call, each with the reason.

        Raises:
            EngineError: the SuperLink does not answer.
        """
        with self.answering():
            replies = list(self.grid.pull_messages(list(self._invited))) if self._invited else []
        refused = []
        for reply in replies:
            name = self._invited.pop(reply.metadata.reply_to_message_id, "")
            if name and (reason := _refusal(reply)):
                refused.append((name, reason))
        return refused

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Turn the errors of Flower's grid inside the context into one of ours.

        Raises:
            EngineError: the SuperLink does not answer, or has ended the run.
        """
        try:
            yield
        except RunNotRunningException as error:  # it is a BaseException
            self.lost = True
            raise EngineError("Flower's run", expected="one that the SuperLink has not ended") from error
        except (httpx.HTTPError, ValueError, RuntimeError) as error:
            raise EngineError("SuperLink", expected=f"an answer ({one_line(error)})") from error


def _refusal(reply: Message) -> str:
    """Why a site does not accept an invitation; empty if it does."""
    if reply.has_error():
        return printable(reply.error.reason or "") or "no reason given"
    record = reply.content.get(INVITE)
    reason = record.get(REASON) if isinstance(record, ConfigRecord) else None
    return printable(reason) if isinstance(reason, str) else "it does not know invitations"


def _pem(key: str) -> bytes:
    """A public key as Flower keeps it."""
    public = load_ssh_public_key(key.encode())
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _messages(requests: Mapping[int, Request], ttl_s: float, group: str) -> list[Message]:
    encoded: dict[int, ArrayRecord] = {}
    views: dict[int, Array] = {}
    messages = []
    for node, request in requests.items():
        record = encoded.get(id(request))
        if record is None:
            record = encoded[id(request)] = _record(request, views)
        messages.append(Message(RecordDict({"frames": record}), node, "query", ttl=ttl_s, group_id=group))
    return messages


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
