"""Values sent over a Unix socket between processes of one machine, with their vectors in shared memory.

A message is a few kilobytes and vectors. The few kilobytes are pickled and written to the socket. Each vector is in an
anonymous memory segment, of which the file descriptor is sent after the pickle, and the receiver maps the segment
read-only. One model that is sent to a hundred sites or to all ranks is one copy. Segments have no name in any file
system, so the kernel frees them when the last process that uses them ends, even if it crashes.

What is unpickled runs code, so the socket has no name: it is one of a pair, of which two processes of one owner have an
end each.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cloister.protocol.errors import EngineError

_FDS_AT_ONCE = 250  # the kernel accepts 253 in one message
_HEADER = struct.Struct("!QI")  # bytes of the pickle, number of segments

# Stands for each segment in a pickle, where only its place in the order matters. Not read-only: of such a buffer the
# unpickler would ask for bytes.
_OUTSIDE = pickle.PickleBuffer(bytearray())


class Segment:
    """An anonymous memory segment, open in this process as long as this object exists.

    In a value that a `Channel` sends, its contents arrive as what the other end's `received` makes of them.
    """

    def __init__(self, fd: int) -> None:
        """Own an open file descriptor."""
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False

    @classmethod
    def make(cls) -> Self:
        """An empty one."""
        if sys.platform == "linux":
            return cls(os.memfd_create("cloister-vector", os.MFD_CLOEXEC))
        fd, path = tempfile.mkstemp()
        os.unlink(path)
        return cls(fd)

    def mapped(self, protection: int = mmap.PROT_READ) -> mmap.mmap:
        """All of it, which stays mapped as long as the result or a view of it is in use."""
        return mmap.mmap(self.fd, 0, mmap.MAP_SHARED, protection)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Segment is sent only through a Channel")


class SharedVector:
    """A vector in shared memory, which stays mapped as long as `array` or a view of it is in use.

    Attributes:
        segment: Where it is.
        array: The numbers, of shape (size,). The process that made it may write; one that received it may only read.
    """

    def __init__(self, size: int, dtype: npt.DTypeLike) -> None:
        """A vector of zeros."""
        segment = Segment.make()
        os.ftruncate(segment.fd, max(1, size * np.dtype(dtype).itemsize))  # an empty one cannot be mapped
        self._map(segment, size, dtype, mmap.PROT_READ | mmap.PROT_WRITE)

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Self:
        """A copy of a vector."""
        made = cls(array.size, array.dtype)
        made.array[:] = array
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return self._received, (self.segment, self.array.size, self.array.dtype)

    @classmethod
    def _received(cls, segment: Segment, size: int, dtype: npt.DTypeLike) -> Self:
        received = cls.__new__(cls)
        received._map(segment, size, dtype, mmap.PROT_READ)
        return received

    def _map(self, segment: Segment, size: int, dtype: npt.DTypeLike, protection: int) -> None:
        self.segment = segment
        self.array: npt.NDArray[Any] = np.frombuffer(segment.mapped(protection), dtype, size)


@dataclass(frozen=True)
class Frame:
    """A value as it is sent; it may be sent several times, and keeps its segments until then."""

    pickled: bytes
    segments: tuple[Segment, ...]


def packed(value: object, reduce: Callable[[object], Any] = lambda _: NotImplemented) -> Frame:
    """A value, ready to be sent.

    Args:
        value: What to send.
        reduce: How an object in it is pickled, as `reducer_override` of a pickler.

    Raises:
        Exception: it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, reduce)
    pickler.dump(value)
    return Frame(file.getvalue(), tuple(pickler.segments))


class Channel:
    """One end of a connected Unix stream socket.

    Args:
        socket: The socket; `close` closes it.
    """

    def __init__(self, socket: socket.socket) -> None:
        self._socket = socket

    def fileno(self) -> int:
        """The socket's file descriptor, to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()

    def send(self, frame: Frame, timeout_s: float | None = None) -> None:
        """Send a whole value.

        Args:
            frame: The value.
            timeout_s: Seconds to wait while the other end does not read; None to wait without limit.

        Raises:
            ConnectionError: the other end is closed.
            TimeoutError: the timeout passed.
        """
        fds = [segment.fd for segment in frame.segments]
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_HEADER.pack(len(frame.pickled), len(fds)) + frame.pickled)
        for start in range(0, len(fds), _FDS_AT_ONCE):
            socket.send_fds(self._socket, [b"\0"], fds[start : start + _FDS_AT_ONCE])

    def receive(self, timeout_s: float | None = None) -> Any:
        """Receive a value.

        Args:
            timeout_s: Seconds to wait for each part of it; None to wait without limit.

        Raises:
            EOFError, ConnectionError: the other end is closed.
            TimeoutError: the timeout passed.
            EngineError: this process has too many open files.
            UnpicklingError: the value has come and cannot be built in this process.
        """
        self._socket.settimeout(timeout_s)
        length, count = _HEADER.unpack(self._exactly(_HEADER.size))
        pickled = self._exactly(length)
        segments: list[Segment] = []
        while len(segments) < count:
            wanted = min(count - len(segments), _FDS_AT_ONCE)
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            byte, fds, _, _ = socket.recv_fds(self._socket, 1, wanted, flags)
            if not byte:
                raise EOFError
            segments += map(Segment, fds)
            if len(fds) < wanted:
                raise EngineError("open files", expected=f"room for {count} more; raise `ulimit -n`")
        try:
            return pickle.loads(pickled, buffers=[self.received(segment) for segment in segments])
        except Exception as error:  # whatever a class of the value raises
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    def received(self, segment: Segment) -> Any:
        """What becomes of a segment in a value that is received."""
        return segment

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._socket.recv_into(view[got:])
            if not count:
                raise EOFError
            got += count
        return data


class _Pickler(pickle.Pickler):
    """Pickles everything but segments, which are out of band (PEP 574)."""

    def __init__(self, file: io.BytesIO, reduce: Callable[[object], Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: buffer is not _OUTSIDE)
        self._reduce = reduce
        self.segments: list[Segment] = []
        """In the order in which the unpickler asks for them."""

    def reducer_override(self, value: object) -> Any:
        """How to pickle `value`."""
        if not isinstance(value, Segment):
            return self._reduce(value)
        self.segments.append(value)
        return _same, (_OUTSIDE,)


def _same(value: object) -> object:
    return value
