"""The pipe between a site's process and one of its ranks: pickled values, whose vectors are in shared memory.

A `SharedVector` in a value travels as the file descriptor of an anonymous memory segment: a model that all ranks are
given is one copy, and the kernel frees it when the last process that uses it ends, even if it crashes.

What is unpickled runs code, so the socket has no name: it is one of a pair, of which the site's process and the rank
have an end each. Between ranks, whose sockets other users can reach (`peers.py`), nothing is pickled.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
import struct
import weakref
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_HEADER = struct.Struct("!QI")  # bytes of the pickle, number of file descriptors
MOST_VECTORS = 250  # in one value; the kernel accepts 253 file descriptors in one message


class SharedVector:
    """A vector in anonymous shared memory, which stays mapped as long as `array` or a view of it is in use.

    Attributes:
        array: The numbers, of shape (size,). The process that made it may write; one that received it may only read.
    """

    def __init__(self, size: int, dtype: npt.DTypeLike) -> None:
        """A vector of zeros."""
        fd = os.memfd_create("cloister-rank", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(1, size * np.dtype(dtype).itemsize))  # an empty segment cannot be mapped
        self._map(fd, size, dtype, mmap.PROT_READ | mmap.PROT_WRITE)

    @classmethod
    def of(cls, array: Array) -> Self:
        """A copy of a vector."""
        made = cls(array.size, array.dtype)
        made.array[:] = array
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a SharedVector is sent only through a Pipe")

    @classmethod
    def _received(cls, fd: int, size: int, dtype: npt.DTypeLike) -> Self:
        received = cls.__new__(cls)
        received._map(fd, size, dtype, mmap.PROT_READ)
        return received

    def _map(self, fd: int, size: int, dtype: npt.DTypeLike, protection: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        self.array: Array = np.frombuffer(mmap.mmap(fd, 0, mmap.MAP_SHARED, protection), dtype, size)

    def fileno(self) -> int:
        """The segment's file descriptor, open as long as this object exists."""
        return self._fd


@dataclass(frozen=True)
class Frame:
    """A value as it is sent; it may be sent several times, and keeps its vectors until then."""

    pickled: bytes
    vectors: tuple[SharedVector, ...]


def packed(value: object) -> Frame:
    """A value, ready to be sent.

    Raises:
        ValueError: it has more than 250 shared vectors.
        Exception: it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    if len(pickler.vectors) > MOST_VECTORS:
        raise ValueError(
            f"shared vectors is {len(pickler.vectors)}: expected at most {MOST_VECTORS} in one value"
        )
    return Frame(file.getvalue(), tuple(pickler.vectors))


class Pipe:
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
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_HEADER.pack(len(frame.pickled), len(frame.vectors)) + frame.pickled)
        if frame.vectors:
            socket.send_fds(self._socket, [b"\0"], [vector.fileno() for vector in frame.vectors])

    def receive(self, timeout_s: float | None = None) -> Any:
        """Receive a value.

        Args:
            timeout_s: Seconds to wait for each part of it; None to wait without limit.

        Raises:
            EOFError, ConnectionError: the other end is closed.
            TimeoutError: the timeout passed.
            OSError: this process has too many open files.
            UnpicklingError: the value has come and cannot be built in this process.
        """
        self._socket.settimeout(timeout_s)
        length, count = _HEADER.unpack(self._exactly(_HEADER.size))
        pickled = self._exactly(length)
        fds: list[int] = []
        if count:
            byte, fds, _, _ = socket.recv_fds(self._socket, 1, count, socket.MSG_CMSG_CLOEXEC)
            if not byte:
                raise EOFError
        unpickler = _Unpickler(pickled, fds)
        try:
            if len(fds) < count:
                raise OSError(errno.EMFILE, f"too many open files for {count} vectors; raise `ulimit -n`")
            return unpickler.load()
        except OSError:
            raise
        except Exception as error:  # whatever a class of the value raises
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error
        finally:
            for fd in unpickler.fds:
                os.close(fd)

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
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.vectors: list[SharedVector] = []

    def persistent_id(self, value: object) -> tuple[int, str] | None:
        if not isinstance(value, SharedVector):
            return None
        self.vectors.append(value)
        return value.array.size, value.array.dtype.str


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytearray, fds: list[int]) -> None:
        super().__init__(io.BytesIO(pickled))
        self.fds = fds
        """Those that no vector has taken; vectors are built in the order in which they were pickled."""

    def persistent_load(self, told: tuple[int, str]) -> SharedVector:
        return SharedVector._received(self.fds.pop(0), *told)
