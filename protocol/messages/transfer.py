"""How vectors travel through the door: their names, the limits and times of both ends, and files that grow and resume.

A vector is named by its BLAKE3 hash, which most messages state: the model's in a request, each span's in a manifest. It
is sent in chunks from the offset that its receiver has, and the receiver hashes what arrives. A vector that is broken
off in the middle is continued, also by another process.

One rule says how long both ends wait: a transfer lives while its byte counter moves (`STALL_S`). No timeout depends on
the size of a model.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from cloister.protocol.errors import TransferError
from cloister.protocol.machine.storage import on_disk, write_at
from cloister.protocol.messages.door_pb2 import Part
from cloister.protocol.messages.messages import Contribute, Contribution, Join, Reply, Request
from cloister.protocol.messages.wire import LONGEST, MOST_VECTORS, encode, view

_log = logging.getLogger(__name__)

VERSION = "cloister/door/4"
"""Sent in the first message of a session or an enrolment; it changes when door.proto does."""
CHUNK = 2**18
"""Bytes of a vector in one message."""
SMALL = 2**18
"""Bytes of the longest first frame that is sent in a session; a longer one travels as a vector does."""
MESSAGE = CHUNK + 2**16
"""Bytes of the longest message that either end receives."""
STREAMS = 4
"""Vectors of one message that are sent at the same time."""

HANDSHAKE_S = 10.0
"""Seconds in which a connection must have proved who it is."""
HEARTBEAT_S = 15.0
"""Seconds between two heartbeats of a site; firewalls and proxies end connections that are idle for 60."""
SILENT_S = 60.0
"""Seconds after which an end whose peer has said nothing ends the session."""
STALL_S = 120.0
"""Seconds after which a transfer that has moved no chunk is over."""
SLOWEST = 2**16
"""Bytes a second: after the deadline of its request an upload is waited for while it moves, but no longer than the
largest reply takes at this rate."""

_HASH = 32
_SHARE = 0.9
"""The most of a disk's free bytes that vectors may take: peers must not fill the disk for everything else."""


@dataclass(frozen=True)
class Named:
    """A vector, or a long first frame, with the name under which it travels."""

    name: bytes
    """BLAKE3 hash of `data`; empty for an empty vector, which does not travel."""
    data: memoryview


@dataclass(frozen=True)
class Parcel:
    """A message as it travels."""

    frame: bytes
    """The first frame; empty if it is the first of `vectors`."""
    vectors: tuple[Named, ...]

    @classmethod
    def of(cls, message: Request | Reply) -> Parcel:
        """The parcel of a message; its vectors are those of the message, not copied."""
        first, *vectors = encode(message)
        frame = bytes(view(first))
        named = [Named(name, view(vector)) for name, vector in zip(_names(message), vectors, strict=True)]
        if len(frame) <= SMALL:
            return cls(frame, tuple(named))
        return cls(b"", (Named(blake3(frame).digest(), memoryview(frame)), *named))


def _names(message: Request | Reply) -> list[bytes]:
    """The hashes of a message's vectors, as the message itself states them; the receiver checks them."""
    match message:
        case Contribute():
            return [message.told.model]
        case Join():
            return [message.base_hash]
        case Contribution():
            return [digest for _, size, digest in message.manifest if size]
        case _:
            return []


def check_vectors(vectors: Sequence[tuple[bytes, int]], most: int) -> None:
    """Check the names and sizes of the vectors that a peer announces, before anything is allocated for them.

    Args:
        vectors: Hash and bytes of each.
        most: The most bytes of all of them.

    Raises:
        TransferError: there are too many, a hash has another length, or they have more bytes.
    """
    if len(vectors) > 1 + MOST_VECTORS:
        raise TransferError("vectors", len(vectors), expected=f"at most {1 + MOST_VECTORS}")
    for name, size in vectors:
        if size and len(name) != _HASH:
            raise TransferError("hash of a vector", f"{len(name)} bytes", expected=f"{_HASH} bytes")
    total = sum(size for _, size in vectors)
    if total > most:
        raise TransferError("vectors", f"{total} bytes", expected=f"at most {most} bytes")


_DATA = bytes([Part.DESCRIPTOR.fields_by_name["data"].number << 3 | 2])
"""What a `Part` with data begins with: the field's number and the wire type of bytes."""


def part_of(data: memoryview) -> bytes:
    """A serialized `Part` with data, copied once; protobuf would copy it three times."""
    return b"".join((_DATA, _varint(data.nbytes), data))


def data_of(part: bytes) -> memoryview:
    """The data of a serialized `Part`, not copied.

    Raises:
        TransferError: it is not the canonical form of a `Part` with data alone.
    """
    for head in range(2, 7):  # the length takes one to five bytes
        data = memoryview(part)[head:]
        if part[:head] == _DATA + _varint(data.nbytes):
            return data
    raise TransferError("part", f"{len(part)} bytes", expected="a part of a vector")


def _varint(number: int) -> bytes:
    """A number in protobuf's encoding."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))


class Arrivals:
    """Vectors that arrive, as files in one folder: resumable, checked by hash, mapped when whole.

    Args:
        folder: The folder; it is made when the first vector arrives. Files of an earlier process are continued.
        most: The most bytes of all vectors together.
        coming: Returns the bytes that all such folders on this disk still wait for; None: there is this one.
    """

    def __init__(self, folder: Path, most: int, coming: Callable[[], int] | None = None) -> None:
        self._folder = folder
        self._coming = coming or (lambda: self.missing)
        self._most = most + LONGEST
        self._known: dict[bytes, Arrival] = {}
        self._left: dict[str, int] | None = None
        """Bytes of the files of an earlier process, by the hash in their names; None: not looked for yet."""

    def begin(self, name: bytes, size: int) -> Arrival:
        """The file of a vector, which may have its first bytes already.

        Args:
            name: Its hash.
            size: Its bytes.

        Raises:
            TransferError: it exceeds a limit, or has been announced with another size.
            StorageError: the disk refuses, or what is to come would take more than `_SHARE` of what is free.
        """
        known = self._known.get(name)
        if known is not None:
            if known.size != size:
                raise TransferError("size of a vector", size, expected=f"{known.size}, as announced before")
            return known
        others = [(each.name, each.size) for each in self._known.values()]
        check_vectors([*others, (name, size)], self._most)
        if not size:
            raise TransferError("size of a vector", size, expected="1 byte or more")
        with on_disk(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(name, size)
        arrival = self._known[name] = Arrival(self._folder / name.hex(), name, size)
        return arrival

    def _make_room(self, name: bytes, size: int) -> None:
        """Remove what an earlier process has left where it takes too much, and check that the disk has room."""
        if self._left is None:
            self._left = {path.stem: path.stat().st_size for path in self._folder.iterdir()}
        there = self._left.pop(name.hex(), 0)
        if sum((size, *self._left.values(), *(each.size for each in self._known.values()))) > self._most:
            self.retain({name, *self._known})
        free, coming = shutil.disk_usage(self._folder).free, self._coming()
        if size - there + coming > _SHARE * free:
            raise OSError(None, f"{size} bytes, {coming} are still to come, and {free} are free")

    @property
    def missing(self) -> int:
        """Bytes that are still to come."""
        return sum(each.missing for each in self._known.values() if not each.whole)

    def open(self, name: bytes, size: int) -> memoryview:
        """A vector that is whole, mapped from its file; an empty one is always there.

        Raises:
            TransferError: it has not arrived as a whole.
        """
        path = self.file(name, size)
        if path is None:
            return memoryview(b"")
        with on_disk(path):
            return np.memmap(path, np.uint8, "r").data

    def file(self, name: bytes, size: int) -> Path | None:
        """The file of a vector that is whole; None for an empty one.

        Raises:
            TransferError: it has not arrived as a whole.
        """
        if not size:
            return None
        arrival = self._known.get(name)
        if arrival is None or arrival.size != size or not arrival.whole:
            raise TransferError("vector", name.hex(), expected="one that has arrived as a whole")
        return arrival.path

    @property
    def names(self) -> set[bytes]:
        """The vectors of which there are files, those of an earlier process too."""
        return {bytes.fromhex(path.stem) for path in self._folder.glob("*")}

    def retain(self, names: Collection[bytes]) -> None:
        """Remove all files but those of these vectors; what is mapped stays until it is dropped."""
        for name in [name for name in self._known if name not in names]:
            del self._known[name]
        kept = {name.hex() for name in names}
        for path in self._folder.glob("*") if self._folder.exists() else ():
            if path.stem not in kept:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # some file systems keep what is still open elsewhere
                    _log.warning("%s is not removed: %s", path, error.strerror)
        if self._left is not None:
            self._left = {stem: size for stem, size in self._left.items() if stem in kept}


class Arrival:
    """One vector that arrives. Only the stream that has taken its turn last may add to it.

    Args:
        path: Its file, which has a suffix until the vector is whole.
        name: Its hash.
        size: Its bytes.
    """

    def __init__(self, path: Path, name: bytes, size: int) -> None:
        self.name = name
        self.size = size
        self.whole = False
        """Whether all bytes are there and match the hash."""
        self.path = path
        """Its file, once it is whole."""
        self._part = path.with_suffix(".part")
        self._lock = threading.Lock()
        self._turn = 0
        self._held: int | None = None
        self._hash = blake3()

    @property
    def missing(self) -> int:
        """Bytes that are still to come."""
        return self.size - (self._held or 0)

    def take(self) -> tuple[int, int]:
        """Take the turn from the stream that has it.

        Returns:
            The turn, and the bytes that are there already.

        Raises:
            StorageError: the disk refuses.
        """
        with self._lock, on_disk(self.path):
            self._turn += 1
            if self._held is None:
                self._held = self._found()
            return self._turn, self._held

    def add(self, turn: int, parts: Sequence[memoryview]) -> int:
        """Write the next chunks; returns how many bytes are there then.

        Raises:
            TransferError: another stream has the turn, or these are not the next `CHUNK` bytes or the last ones.
            StorageError: the disk refuses; the bytes before stay.
        """
        with self._lock, on_disk(self.path):
            held = self._held_by(turn)
            with os.fdopen(os.open(self._part, os.O_WRONLY | os.O_CREAT, 0o600), "wb", 0) as file:
                for data in parts:
                    self.check(held, data)
                    write_at(file.fileno(), data, held)
                    self._hash.update(data)
                    held = self._held = held + data.nbytes
            return held

    def check(self, held: int, data: memoryview) -> None:
        """Check that a part is the next chunk after `held` bytes: smaller ones would cost more than they carry.

        Raises:
            TransferError: it is longer or shorter.
        """
        following = min(CHUNK, self.size - held)
        if data.nbytes != following or not following:
            raise TransferError("part", f"{data.nbytes} bytes", expected=f"{following} bytes, the next chunk")

    def finish(self, turn: int) -> None:
        """Check the hash of a vector whose bytes are all there.

        Raises:
            TransferError: another stream has the turn, or the hash is another: then the file is empty again.
        """
        with self._lock, on_disk(self.path):
            held = self._held_by(turn)
            if self.whole:
                return
            digest = self._hash.digest()
            if held != self.size or digest != self.name:
                self._held, self._hash = 0, blake3()
                self._part.unlink(missing_ok=True)
                raise TransferError(
                    "vector", digest.hex(), expected=f"{self.size} bytes with the hash {self.name.hex()}"
                )
            self._part.replace(self.path)
            self.whole = True

    def _held_by(self, turn: int) -> int:
        if turn != self._turn or self._held is None:
            raise TransferError("vector", self.name.hex(), expected="one stream that sends it")
        return self._held

    def _found(self) -> int:
        """Hash what an earlier process has left; returns its bytes."""
        if self.path.exists():
            self.path.replace(self._part)
        try:
            file = self._part.open("rb")
        except FileNotFoundError:
            return 0
        held = 0
        with file:
            while chunk := file.read(CHUNK):
                self._hash.update(chunk)
                held += len(chunk)
        if held > self.size:
            self._hash = blake3()
            self._part.unlink()
            return 0
        return held
