"""Vectors in shared memory: values sent over a Unix socket whose vectors travel as file descriptors.

A message is a few kilobytes and a vector. The few kilobytes are pickled and written to the socket. Each vector is
copied once into an anonymous memory segment; the segment's file descriptor is sent after the pickle, and the receiver
maps the segment read-only. One model that is sent to a hundred sites is one copy. Segments have no name in any file
system, so the kernel frees them when the last process that uses them ends, even if it crashes.

A received vector is a memoryview over a segment, in `Array.data`, where Flower itself puts bytes. The constructors
`Array(...)` and `ArrayRecord({...})` of Flower accept bytes only: to send a buffer without a copy, set `array.data`
after construction and add the array with `record[name] = array`.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, Message

from cloister.protocol.errors import EngineError
from cloister.simulations.process import return_freed_memory

_IN_BAND = 1 << 14  # bytes; pickling a smaller vector costs less than a segment
_FDS_AT_ONCE = 250  # the kernel accepts 253 in one message
_SPARE_SEGMENTS = 2  # segments that a worker keeps for its next reply
_LARGEST_LENT = (
    1 << 24
)  # bytes; what reuse saves for a larger vector is small beside the time of its training
_HEADER = struct.Struct("!QI")  # bytes of the pickle, number of segments


class Segments(Protocol):
    """Where a sender puts the vectors of the value that it sends."""

    def segment(self, data: bytes | memoryview) -> int:
        """The file descriptor of a segment that holds a copy of `data`; valid at least until `sent`."""
        ...

    def sent(self) -> None:
        """Note that the value was sent, or that sending it failed."""
        ...


class PushSegments:
    """The vectors of messages that are pushed together.

    A vector is copied when the first message that holds it is sent, and its segment is closed when the last message
    that holds it is released. Vectors are told apart by the identity of their `Array.data`.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._uses = Counter(key for message in messages for key in _keys(message))
        self._segments: dict[int, tuple[Any, int]] = {}  # keeps the data alive, so that its id stays unique

    def segment(self, data: bytes | memoryview) -> int:
        """The file descriptor of the segment that holds a vector."""
        if id(data) not in self._segments:
            self._segments[id(data)] = (data, _segment(memoryview(data).cast("B")))
        return self._segments[id(data)][1]

    def sent(self) -> None:
        """Close the segments of vectors that no unreleased message holds."""
        for key in [key for key in self._segments if self._uses[key] <= 0]:
            os.close(self._segments.pop(key)[1])

    def release(self, message: Message) -> None:
        """Note that a message was sent or dropped, and close the segments that only it still held."""
        self._uses.subtract(_keys(message))
        self.sent()

    def close(self) -> None:
        """Close every segment."""
        self._uses.clear()
        self.sent()


class LentSegments:
    """The segments of a worker's replies, which are reused after the coordinator has returned them.

    For the kernel a new segment costs several times more than a copy into an existing one. A segment of more than
    16 MB is not kept for that: it is freed as soon as the coordinator has read it.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[int, int]] = {}  # by inode: file descriptor and size
        self._free: dict[int, tuple[int, int]] = {}
        self._now: dict[int, tuple[Any, int]] = {}  # of the value being sent; keeps the data alive, as above

    def segment(self, data: bytes | memoryview) -> int:
        """The file descriptor of a segment that holds a vector until the coordinator returns it."""
        if id(data) not in self._now:
            view = memoryview(data).cast("B")
            inode = next((inode for inode, (_, size) in self._free.items() if size == len(view)), None)
            if inode is None:
                fd = _segment(view)
                inode = os.fstat(fd).st_ino
            else:
                fd, _ = self._free.pop(inode)
                _write(fd, view)
            if len(view) <= _LARGEST_LENT:
                self._lent[inode] = fd, len(view)
            self._now[id(data)] = data, fd
        return self._now[id(data)][1]

    def sent(self) -> None:
        """Forget which vectors the sent value held, and close the segments that are not reused."""
        lent = {fd for fd, _ in self._lent.values()}
        closed = [fd for _, fd in self._now.values() if fd not in lent]
        self._now.clear()
        for fd in closed:
            os.close(fd)
        if closed:
            return_freed_memory()  # of a large model's training, which is over

    def take_back(self, inodes: Iterable[int]) -> None:
        """Mark returned segments as free, and close all but the last few free ones."""
        for inode in inodes:
            if inode in self._lent:  # otherwise it was closed when it was sent
                self._free[inode] = self._lent.pop(inode)
        for inode in list(self._free)[:-_SPARE_SEGMENTS]:
            os.close(self._free.pop(inode)[0])


class Channel:
    """One end of a Unix socket that carries pickled values, each followed by the segments of its vectors.

    Args:
        socket: A connected stream socket; its owner closes it.
        borrows: Record which received segments are no longer mapped in this process, for `returned`.
    """

    def __init__(self, socket: socket.socket, *, borrows: bool = False) -> None:
        self.socket = socket
        self._borrows = borrows
        self._returned: list[int] = []

    def send(self, value: object, segments: Segments, timeout: float | None = None) -> None:
        """Send a whole value.

        Args:
            value: What to send; the data of its larger `Array`s goes into `segments`.
            segments: Where its vectors go; told `sent` at the end, also after an error.
            timeout: Seconds to wait while the other end does not read; None to wait without limit.

        Raises:
            OSError: the other end is lost, or the timeout passed.
            Exception: `value` cannot be pickled; nothing was sent.
        """
        try:
            file = io.BytesIO(b"\0" * _HEADER.size)
            file.seek(_HEADER.size)
            pickler = _Pickler(file, segments)
            pickler.dump(value)
            fds = pickler.fds
            frame = file.getbuffer()
            _HEADER.pack_into(frame, 0, len(frame) - _HEADER.size, len(fds))
            self.socket.settimeout(timeout)
            self.socket.sendall(frame)
            for start in range(0, len(fds), _FDS_AT_ONCE):
                socket.send_fds(self.socket, [b"\0"], fds[start : start + _FDS_AT_ONCE])
        finally:
            segments.sent()

    def receive(self, timeout: float | None = None) -> Any:
        """Receive a value; its vectors are memoryviews over segments that stay mapped while they are referenced.

        Args:
            timeout: Seconds to wait for each part of it; None to wait without limit.

        Raises:
            EOFError: the other end is closed.
            OSError: the other end is lost, or the timeout passed.
            EngineError: this process has too many open files.
        """
        self.socket.settimeout(timeout)
        length, count = _HEADER.unpack(self._exactly(_HEADER.size))
        pickled = self._exactly(length)
        fds: list[int] = []
        try:
            while len(fds) < count:
                wanted = min(count - len(fds), _FDS_AT_ONCE)
                byte, some, _, _ = socket.recv_fds(
                    self.socket, 1, wanted, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
                if not byte:
                    raise EOFError
                fds += some
                if len(some) < wanted:
                    raise EngineError("open files", expected=f"room for {count} more; raise `ulimit -n`")
            buffers = [self._borrow(fd) for fd in fds]
        finally:
            for fd in fds:
                os.close(fd)
        return pickle.loads(pickled, buffers=buffers)

    def returned(self) -> list[int]:
        """Inodes of received segments that this process has unmapped since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def _borrow(self, fd: int) -> memoryview:
        view = _map(fd)
        if self._borrows:
            # Calls a method, not self._returned.append: a list that `returned` gave away must not grow.
            note = weakref.finalize(view.obj, self._note, os.fstat(fd).st_ino)
            note.atexit = False
        return view

    def _note(self, inode: int) -> None:
        self._returned.append(inode)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self.socket.recv_into(view[got:])
            if not count:
                raise EOFError
            got += count
        return data


class _Pickler(pickle.Pickler):
    """Pickles everything but the data of larger `Array`s, which become out-of-band buffers (PEP 574)."""

    def __init__(self, file: io.BytesIO, segments: Segments) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: None)
        self._segments = segments
        self.fds: list[int] = []
        """File descriptors of segments, in the order in which the unpickler asks for their contents."""

    def reducer_override(self, value: object) -> Any:
        """How to pickle `value`."""
        if not isinstance(value, Array):
            return NotImplemented
        data: bytes | pickle.PickleBuffer
        if memoryview(value.data).nbytes < _IN_BAND:
            data = bytes(value.data)
        else:
            self.fds.append(self._segments.segment(value.data))
            data = pickle.PickleBuffer(b"")  # only its place in the order matters
        return _array, (value.dtype, value.shape, value.stype, data)


def _array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    array = Array(dtype, shape, stype, b"")
    array.data = data
    return array


def _keys(message: Message) -> Iterator[int]:
    if message.has_content():
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                yield from (id(array.data) for array in record.values())


def _segment(data: memoryview) -> int:
    """The file descriptor of a new anonymous segment that holds a copy of `data`."""
    fd = -1
    try:
        if sys.platform == "linux":
            fd = os.memfd_create("cloister-vector", os.MFD_CLOEXEC)
        else:
            fd, path = tempfile.mkstemp()
            os.unlink(path)
        _write(fd, data)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise EngineError(
            "shared memory", expected=f"room for a vector of {len(data)} bytes ({error})"
        ) from error
    return fd


def _write(fd: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def _map(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
