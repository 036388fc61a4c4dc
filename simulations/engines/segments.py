"""The vectors of Flower's messages in shared memory (`protocol/machine/segments.py`): which segments hold them, and
how long.

A received vector is a memoryview over a segment, in `Array.data`, where Flower itself puts bytes. The constructors
`Array(...)` and `ArrayRecord({...})` of Flower accept bytes only: to send a buffer without a copy, set `array.data`
after construction and add the array with `record[name] = array`.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from socket import socket
from typing import Any, TypeAlias

from flwr.app import Array, ArrayRecord, Message

from cloister.protocol.errors import EngineError
from cloister.protocol.machine import segments as shared
from cloister.protocol.machine.segments import Segment, packed
from cloister.simulations.engines.process import return_freed_memory

_IN_BAND = 1 << 14  # bytes; pickling a smaller vector costs less than a segment
_SPARE_SEGMENTS = 2  # segments that a worker keeps for its next reply
_LARGEST_LENT = 1 << 24  # bytes; what reuse saves for a larger vector is small beside its training


class PushSegments:
    """The vectors of messages that are pushed together.

    A vector is copied when the first message that holds it is sent, and its segment is closed when the last message
    that holds it is released. Vectors are told apart by the identity of their `Array.data`.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._uses = Counter(key for message in messages for key in _keys(message))
        self._segments: dict[int, tuple[Any, Segment]] = {}  # keeps the data alive, so its id stays unique

    def segment(self, data: bytes | memoryview) -> Segment:
        """The segment that holds a vector."""
        if id(data) not in self._segments:
            self._segments[id(data)] = data, _holding(Segment.make(), memoryview(data).cast("B"))
        return self._segments[id(data)][1]

    def sent(self) -> None:
        """Close the segments of vectors that no unreleased message holds."""
        for key in [key for key in self._segments if self._uses[key] <= 0]:
            del self._segments[key]

    def release(self, message: Message) -> None:
        """Note that a message was sent or dropped, and close the segments that only it still held."""
        self._uses.subtract(_keys(message))
        self.sent()

    def close(self) -> None:
        """Close every segment."""
        self._segments.clear()


class LentSegments:
    """The segments of a worker's replies, which are reused after the coordinator has returned them.

    For the kernel a new segment costs several times more than a copy into an existing one. A segment of more than
    16 MB is not kept for that: it is freed as soon as the coordinator has read it.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[Segment, int]] = {}  # by inode: a segment and its size
        self._free: dict[int, tuple[Segment, int]] = {}
        # Of the value that is sent; keeps the data alive, as above.
        self._now: dict[int, tuple[Any, Segment]] = {}
        self._freed = False

    def segment(self, data: bytes | memoryview) -> Segment:
        """The segment that holds a vector until the coordinator returns it."""
        if id(data) not in self._now:
            view = memoryview(data).cast("B")
            inode = next((inode for inode, (_, size) in self._free.items() if size == len(view)), None)
            segment = _holding(Segment.make() if inode is None else self._free.pop(inode)[0], view)
            if len(view) <= _LARGEST_LENT:
                self._lent[os.fstat(segment.fd).st_ino] = segment, len(view)
            else:
                self._freed = True
            self._now[id(data)] = data, segment
        return self._now[id(data)][1]

    def sent(self) -> None:
        """Forget which vectors the sent value held, which closes the segments that are not reused."""
        self._now.clear()
        if self._freed:
            self._freed = False
            return_freed_memory()  # of a large model's training, which is over

    def take_back(self, inodes: Iterable[int]) -> None:
        """Mark returned segments as free, and close all but the last few free ones."""
        for inode in inodes:
            if inode in self._lent:  # otherwise it was closed when it was sent
                self._free[inode] = self._lent.pop(inode)
        for inode in list(self._free)[:-_SPARE_SEGMENTS]:
            del self._free[inode]


Segments: TypeAlias = PushSegments | LentSegments
"""Where a sender puts the vectors of the value that it sends."""


class Channel(shared.Channel):
    """One end of a Unix socket that carries values with Flower's messages.

    Args:
        socket: A connected stream socket; `close` closes it.
        borrows: Record which received segments are no longer mapped in this process, for `returned`.
    """

    def __init__(self, socket: socket, *, borrows: bool = False) -> None:
        super().__init__(socket)
        self._borrows = borrows
        self._returned: list[int] = []

    def put(self, value: object, segments: Segments, timeout_s: float | None = None) -> None:
        """Send a whole value.

        Args:
            value: What to send; the data of its larger `Array`s goes into `segments`.
            segments: Where its vectors go; told `sent` at the end, also after an error.
            timeout_s: Seconds to wait while the other end does not read; None to wait without limit.

        Raises:
            OSError: the other end is lost, or the timeout passed.
            Exception: `value` cannot be pickled; nothing was sent.
        """

        def reduce(value: object) -> Any:
            if not isinstance(value, Array):
                return NotImplemented
            small = memoryview(value.data).nbytes < _IN_BAND
            data = bytes(value.data) if small else segments.segment(value.data)
            return _array, (value.dtype, value.shape, value.stype, data)

        try:
            self.send(packed(value, reduce), timeout_s)
        finally:
            segments.sent()

    def returned(self) -> list[int]:
        """Inodes of received segments that this process has unmapped since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def received(self, segment: Segment) -> memoryview:
        """A view of its contents."""
        view = memoryview(segment.mapped())
        if self._borrows:
            # Calls a method, not self._returned.append: a list that `returned` gave away must not grow.
            note = weakref.finalize(view.obj, self._note, os.fstat(segment.fd).st_ino)
            note.atexit = False
        return view

    def _note(self, inode: int) -> None:
        self._returned.append(inode)


def _array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    array = Array(dtype, shape, stype, b"")
    array.data = data
    return array


def _keys(message: Message) -> Iterator[int]:
    if message.has_content():
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                yield from (id(array.data) for array in record.values())


def _holding(segment: Segment, data: memoryview) -> Segment:
    """A segment after a copy of `data` into it."""
    written = 0
    try:
        while written < len(data):
            written += os.pwrite(segment.fd, data[written:], written)
    except OSError as error:
        raise EngineError(
            "shared memory", expected=f"room for a vector of {len(data)} bytes ({error})"
        ) from error
    return segment
