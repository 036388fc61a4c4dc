"""The door, as a Flower grid in the process of a run. Its nodes are the sites of the run, from 1 in their order.

Vectors of requests are written to files, which the door sends to the sites; vectors of replies are files that the door
has received, and are mapped. So the memory of both processes is flat in the number of sites.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from google.protobuf.message import Message as ProtoMessage

from cloister.aggregation.sums import Sums
from cloister.protocol.encoding import pack
from cloister.protocol.errors import EngineError
from cloister.protocol.machine.storage import on_disk
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.transfer import CHUNK, SMALL, VERSION
from cloister.protocol.messages.wire import view
from cloister.protocol.plan.plan import Plan
from cloister.server.door.behind import LENGTH
from cloister.server.door.carrier import Carrier, array_of

_END_S = 30.0
"""Seconds for which the door may still read when a run leaves it."""


class DoorGrid(Carrier):
    """A run's grid; a context manager.

    Args:
        far: This end of the pair of sockets of which the door serves the other (`Door.serve`).
        run: Label of the run, the same after a restart.
        folder: For vectors under way; of this run alone. What an earlier process has received stays in it.
        sites: The names of the sites.
        most_bytes: The most bytes of the vectors of one reply.
        seen: Called in a thread of the grid when other sites are connected, or bytes have moved.
    """

    def __init__(
        self,
        far: socket.socket,
        run: str,
        folder: Path,
        sites: Sequence[str],
        most_bytes: int,
        seen: Callable[[list[pb.Site]], None] = lambda _sites: None,
    ) -> None:
        super().__init__()
        self._far = far
        self._sites = tuple(sites)
        self._node_of = {name: node for node, name in enumerate(sites, 1)}
        self._folder = folder / "requests"
        self._tell_seen = seen
        self._changed = threading.Condition()
        """Guards the fields below, and is notified when one changes."""
        self._seen: dict[str, pb.Site] = {}
        """By name, the sites that have been connected."""
        self._waiting: dict[str, tuple[Message, bytes]] = {}
        """By message id, messages without an answer: each with the id of its request."""
        self._answers: dict[str, tuple[Message, pb.Answer]] = {}
        """By message id, answers that were not pulled."""
        self._happened = False
        self._over = False
        self._parcels: dict[int, tuple[ArrayRecord, pb.Ask]] = {}
        """Those of the newest push, by the identity of an object that lives."""
        with on_disk(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replies = str(folder / "replies")
        self._send(begin=pb.Begin(run=run, folder=replies, sites=self._sites, most_bytes=most_bytes))
        self._thread = threading.Thread(target=self._read, name="door", daemon=True)
        self._thread.start()

    def close(self, *, over: bool = False) -> None:
        """Leave the door; idempotent.

        Args:
            over: Tell the sites that the run is over; what it has received is removed.
        """
        if over and not self._over:
            self._send(over=pb.Over())
        self._retain(())
        with contextlib.suppress(OSError):  # it has ended
            self._far.shutdown(socket.SHUT_WR)  # the door reads to the end, and closes its own
        self._thread.join(_END_S)
        self._far.close()

    # What is known of the sites.

    def connected(self) -> list[pb.Site]:
        """All sites that have been connected in this run, by node: whether they are now, and the bytes that moved."""
        with self._changed:
            return sorted(self._seen.values(), key=lambda site: self._node_of[site.name])

    def wait_for(self, sites: int, timeout_s: float) -> int:
        """Wait until so many sites are connected; returns how many are, also when the time is over."""

        def online() -> int:
            return sum(site.online for site in self._seen.values())

        with self._changed:
            self._changed.wait_for(lambda: online() >= sites or self._over, timeout_s)
            self._check_open()
            return online()

    # Flower's Grid.

    def get_node_ids(self) -> list[int]:
        """The nodes of all sites that have been connected: also of those that are to connect again."""
        return [self._node_of[site.name] for site in self.connected()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Ask sites; a record of frames that several messages have is written once.

        A site that is not connected is asked when it is back, if that is before the deadline.

        Raises:
            StorageError: the disk refuses.
            EngineError: the coordinator's process has ended.
        """
        batch = list(messages)
        asked: dict[int, list[Message]] = {}
        parcels: dict[int, tuple[ArrayRecord, pb.Ask]] = {}
        for message in batch:
            record = message.content.array_records["frames"]
            known = self._parcels.get(id(record)) or parcels.get(id(record))
            parcels[id(record)] = known or (record, self._parcel(record))
            asked.setdefault(id(record), []).append(message)
        self._parcels = parcels
        ids = [self._numbered(message) for message in batch]
        with self._changed:
            self._check_open()
            for key, group in asked.items():
                request = parcels[key][1].request.id
                self._waiting |= {message.metadata.message_id: (message, request) for message in group}
        for key, group in asked.items():
            parcel = parcels[key][1]
            self._send(
                ask=pb.Ask(
                    sites=[self._sites[message.metadata.dst_node_id - 1] for message in group],
                    request=parcel.request,
                    paths=parcel.paths,
                    deadline_s=group[0].metadata.ttl,
                    envelopes=[_envelope(message) for message in group],
                )
            )
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived, without waiting. Their vectors stay mapped as long as they are in use."""
        with self._changed:
            found = [self._answers.pop(id) for id in list(message_ids) if id in self._answers]
        replies = []
        for message, answer in found:
            replies.append(_reply(message, answer))
            self._send(taken=answer.of)
        return replies

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `Carrier.wait`.

        Raises:
            EngineError: the coordinator's process has ended.
        """
        with self._changed:
            happened = self._changed.wait_for(
                lambda: self._happened or bool(self._answers) or self._over, timeout_s
            )
            self._happened = False
            if not self._answers:
                self._check_open()
            return happened

    def cancel(self, message_ids: Iterable[str]) -> None:
        """As `Carrier.cancel`."""
        with self._changed:
            dropped = []
            for id in list(message_ids):
                if id in self._answers:
                    message, answer = self._answers.pop(id)
                    dropped.append((message, answer.of.request))
                elif id in self._waiting:
                    dropped.append(self._waiting.pop(id))
        for message, request in dropped:
            site = self._sites[message.metadata.dst_node_id - 1]
            self._send(withdrawn=pb.Of(site=site, request=request))

    # The socket.

    def _send(self, **said: ProtoMessage) -> None:
        data = pb.FromRun(**said).SerializeToString()
        with contextlib.suppress(OSError):  # the reading thread sees it too, and the next wait raises
            self._far.sendall(LENGTH.pack(len(data)) + data)

    def _read(self) -> None:
        with self._far.makefile("rb") as file:
            while len(head := file.read(LENGTH.size)) == LENGTH.size:
                said = pb.ToRun.FromString(file.read(LENGTH.unpack(head)[0]))
                if said.WhichOneof("said") == "answer":
                    self._answered(said.answer)
                else:
                    self._saw(said.seen)
        with self._changed:
            self._over = True
            for site in self._seen.values():
                site.online = False
            self._changed.notify_all()

    def _answered(self, answer: pb.Answer) -> None:
        with self._changed:
            node = self._node_of[answer.of.site]
            self._know(answer.seen)
            for id, (message, request) in self._waiting.items():
                if message.metadata.dst_node_id == node and request == answer.of.request:
                    del self._waiting[id]
                    self._answers[id] = message, answer
                    break
            self._changed.notify_all()

    def _saw(self, seen: pb.Seen) -> None:
        with self._changed:
            for site in seen.sites:
                self._know(site)
            self._happened = True
            self._changed.notify_all()
        self._tell_seen(self.connected())

    def _know(self, site: pb.Site) -> None:
        if site.online or site.name in self._seen:
            self._seen[site.name] = site

    def _check_open(self) -> None:
        if self._over:
            raise EngineError("coordinator", expected="its process to go on running")

    # Files.

    def _parcel(self, record: ArrayRecord) -> pb.Ask:
        """Write the vectors of a request; as the door takes it, without its sites."""
        frames = [view(record[name].data) for name in sorted(record)]
        frame = bytes(frames[0]) if frames[0].nbytes <= SMALL else b""
        named = [
            (blake3(data).digest() if data.nbytes else b"", data)
            for data in (frames[1:] if frame else frames)
        ]
        paths = tuple(str(self._folder / name.hex()) if name else "" for name, _ in named)
        id = hashlib.sha256(pack(VERSION, frame, tuple((name, data.nbytes) for name, data in named))).digest()
        self._retain({*paths, *(path for _, known in self._parcels.values() for path in known.paths)})
        with on_disk(self._folder):
            for path, (_, data) in zip(paths, named, strict=True):
                if path and not Path(path).exists():
                    part = Path(f"{path}.part")
                    with part.open("wb") as file:
                        file.write(data)
                    part.replace(path)
        vectors = [pb.Vector(hash=name, size=data.nbytes) for name, data in named]
        return pb.Ask(request=pb.Letter(id=id, frame=frame, vectors=vectors), paths=paths)

    def _retain(self, paths: Iterable[str]) -> None:
        """Remove the vectors of earlier requests: the door has those mapped that it still sends."""
        kept = set(paths)
        for path in self._folder.iterdir() if self._folder.exists() else ():
            if str(path) not in kept:
                path.unlink(missing_ok=True)


def _envelope(message: Message) -> bytes:
    signed = message.content.config_records["envelope"]["signed"]
    assert isinstance(signed, bytes), "`GridChannel` makes it"
    return signed


def _reply(message: Message, answer: pb.Answer) -> Message:
    if answer.failure:
        return Message(Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, answer.failure), reply_to=message)
    frames = [memoryview(answer.frame)] if answer.frame else []
    frames += [np.memmap(path, np.uint8, "r").data if path else memoryview(b"") for path in answer.paths]
    record = ArrayRecord()
    for number, frame in enumerate(frames):
        record[f"{number:04d}"] = array_of(frame)
    return Message(RecordDict({"frames": record}), reply_to=message)


def most_bytes_of(plan: Plan, parameters: int) -> int:
    """The most bytes of the vectors of one reply of a site.

    Args:
        plan: The plan.
        parameters: Trained parameters of its model.
    """
    sums = Sums(plan, parameters)
    layouts = [sums.training, sums.evaluation] if plan.at_sites else [sums.training]
    return max(CHUNK, *(layout.length * np.dtype(layout.ring.dtype).itemsize for layout in layouts))
