"""A message as frames of bytes, and back: the one form in which messages leave a process, for every transport.

The first frame is canonical (`encoding.py`): the version of this form, the message's kind, and its fields in their
order. Each vector in the message is a frame of its own behind it, in the order in which the fields name them; its place
in the first frame holds its element type and length. So a transport moves vectors without copying them, and may send a
vector that many messages share only once.

Received frames are never trusted: `decode` accepts exactly one message of the expected kinds whose texts, byte
strings and tuples keep the limits that `messages.py` states, and refuses everything else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
import sys
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cloister.protocol.encoding import Value, pack, unpack
from cloister.protocol.errors import EncodingError
from cloister.protocol.messages import Elements, Limit, Reply, Request

VERSION = "cloister/wire/2"
"""First field of each message; it changes when a message does."""
LONGEST = 2**22
"""Bytes of a first frame: more than any message takes, whose longest list has `LARGEST` entries."""
MOST_VECTORS = 1024
"""Vectors in a message."""

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[Any]
T = TypeVar("T")

_FLOAT = struct.Struct(">d")

assert sys.byteorder == "little", "vectors travel little-endian, and this machine is not"


def encode(message: object) -> list[Buffer]:
    """The frames of a message; its vectors are those of the message, not copied."""
    vectors: list[npt.NDArray[Any]] = []
    first = pack(VERSION, type(message).__name__, *_fields(message, vectors))
    return [first, *vectors]


def view(frame: Buffer) -> memoryview:
    """The bytes of a frame, not copied."""
    return frame.view(np.uint8).data if isinstance(frame, np.ndarray) else memoryview(frame)


def to_bytes(message: object) -> bytes:
    """The canonical bytes of a message without vectors."""
    first, *vectors = encode(message)
    assert not vectors, f"{type(message).__name__} has vectors"
    return bytes(view(first))


def decode_request(frames: Sequence[Buffer]) -> Request:
    """The request in these frames.

    Raises:
        EncodingError: they are anything else.
    """
    return cast(Request, decode(typing.get_args(Request), frames))


def decode_reply(frames: Sequence[Buffer]) -> Reply:
    """The reply in these frames.

    Raises:
        EncodingError: they are anything else.
    """
    return cast(Reply, decode(typing.get_args(Reply), frames))


def decode(kinds: tuple[type[T], ...], frames: Sequence[Buffer]) -> T:
    """The message of one of these kinds in these frames; its vectors are read-only views of the frames.

    Args:
        kinds: The messages that are expected.
        frames: The first frame, and one for each vector.

    Raises:
        EncodingError: they are anything else.
    """
    if not 1 <= len(frames) <= 1 + MOST_VECTORS:
        raise EncodingError("message", f"{len(frames)} frames", expected=f"1 to {1 + MOST_VECTORS}")
    first = view(frames[0])
    if first.nbytes > LONGEST:
        raise EncodingError("message", f"{first.nbytes} bytes", expected=f"at most {LONGEST}")
    vectors = [view(frame) for frame in frames[1:]]
    data = bytes(first)
    return _decoded(kinds, data) if not vectors else _decode(kinds, data, vectors)


def _decode(kinds: tuple[type[T], ...], data: bytes, vectors: list[memoryview]) -> T:
    values = unpack(data)
    if not values or values[0] != VERSION:
        raise EncodingError(
            "version of the message",
            values[0] if values else "",
            expected=VERSION,
            fix="install the same release of cloister at the coordinator and at the sites",
        )
    by_name = {kind.__name__: kind for kind in kinds}
    kind = by_name.get(values[1]) if len(values) > 1 and isinstance(values[1], str) else None
    if kind is None:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise EncodingError("message", values[1] if len(values) > 1 else "", expected=expected)
    reader = _Reader(vectors)
    message: T = reader.read(kind, values[2:], kind.__name__)
    reader.close()
    return message


@functools.lru_cache(
    maxsize=4
)  # in a process that plays many sites, several get the same message; it cannot be changed
def _decoded(kinds: tuple[type[Any], ...], data: bytes) -> Any:
    return _decode(kinds, data, [])


def from_bytes(kind: type[T], data: bytes) -> T:
    """The message of `kind` that `to_bytes` wrote.

    Raises:
        EncodingError: `data` is anything else.
    """
    return decode((kind,), [data])


def _fields(message: object, vectors: list[npt.NDArray[Any]]) -> tuple[Value, ...]:
    fields = dataclasses.fields(message)  # type: ignore[arg-type]  # a dataclass
    return tuple(_value(getattr(message, field.name), vectors) for field in fields)


def _value(value: Any, vectors: list[npt.NDArray[Any]]) -> Value:
    if isinstance(value, np.ndarray):
        vectors.append(np.ascontiguousarray(value))
        return (value.dtype.name, value.size)
    if isinstance(value, tuple):
        return tuple(_value(item, vectors) for item in value)
    if isinstance(value, float):
        return _FLOAT.pack(value)
    if value is None:
        return ()
    if dataclasses.is_dataclass(value):
        return (type(value).__name__, *_fields(value, vectors))
    return cast(Value, value)


class _Reader:
    """Builds a message of values, and hands out the frames of its vectors in order."""

    def __init__(self, frames: list[memoryview]) -> None:
        self._frames = frames
        self._used = 0

    def close(self) -> None:
        """Refuse frames that no field has named."""
        if self._used != len(self._frames):
            raise EncodingError(
                "message", f"{len(self._frames)} vectors", expected=f"{self._used}, as it announces"
            )

    def read(self, kind: Any, values: tuple[Value, ...], where: str) -> Any:
        """The dataclass `kind` with these values of its fields."""
        hints = _hints(kind)
        if len(values) != len(hints):
            raise EncodingError(where, f"{len(values)} fields", expected=f"{len(hints)}")
        parts = zip(hints.items(), values, strict=True)
        return kind(*(self._build(hint, value, f"{where}.{name}") for (name, hint), value in parts))

    def _build(self, hint: Any, value: Value, where: str, limit: Limit | Elements | None = None) -> Any:
        """`value` as the type that `hint` names."""
        origin = typing.get_origin(hint)
        if origin is Annotated:
            inner, *notes = typing.get_args(hint)
            return self._build(inner, value, where, notes[0])
        if isinstance(limit, Elements):
            return self._vector(limit, value, where)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._nested((hint,), value, where)
        if origin is types.UnionType:
            kinds = tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
            if value == () and len(kinds) < len(typing.get_args(hint)):
                return None
            return self._nested(kinds, value, where)
        if origin is Literal:
            if value not in typing.get_args(hint):
                raise EncodingError(where, value, expected=" or ".join(typing.get_args(hint)))
            return value
        if hint is float:
            return _float(value, where)
        if origin is tuple:
            return self._tuple(typing.get_args(hint), value, where, limit)
        if type(value) is not hint:
            raise EncodingError(where, value, expected=hint.__name__)
        if isinstance(value, str | bytes):
            _check_limit(value, where, limit)
        return value

    def _tuple(self, hints: tuple[Any, ...], value: Value, where: str, limit: Limit | None) -> Any:
        if not isinstance(value, tuple):
            raise EncodingError(where, value, expected="a list")
        if hints[-1] is Ellipsis:
            _check_limit(value, where, limit)
            return tuple(self._build(hints[0], item, where) for item in value)
        if len(hints) != len(value):
            raise EncodingError(where, f"{len(value)} items", expected=f"{len(hints)}")
        return tuple(self._build(hint, item, where) for hint, item in zip(hints, value, strict=True))

    def _nested(self, kinds: tuple[Any, ...], value: Value, where: str) -> Any:
        if isinstance(value, tuple) and value:
            for kind in kinds:
                if value[0] == kind.__name__:
                    return self.read(kind, value[1:], where)
        raise EncodingError(where, value, expected=" or ".join(kind.__name__ for kind in kinds))

    def _vector(self, elements: Elements, value: Value, where: str) -> npt.NDArray[Any]:
        match value:
            case (str(dtype), int(size)) if dtype in elements.dtypes:
                pass
            case _:
                raise EncodingError(where, value, expected=f"a vector of {' or '.join(elements.dtypes)}")
        if self._used == len(self._frames):
            raise EncodingError(where, "missing", expected=f"a frame with {size} elements")
        frame = self._frames[self._used]
        self._used += 1
        if frame.nbytes != size * np.dtype(dtype).itemsize:
            raise EncodingError(where, f"{frame.nbytes} bytes", expected=f"{size} elements of {dtype}")
        vector = np.frombuffer(frame, dtype=dtype) if size else np.empty(0, dtype)
        vector.flags.writeable = False
        return vector


def _check_limit(value: str | bytes | tuple[Value, ...], where: str, limit: Limit | None) -> None:
    assert limit is not None, f"{where} has no limit in its type"
    if not limit.least <= len(value) <= limit.most:
        exactly = f"{limit.most}" if limit.least == limit.most else f"{limit.least} to {limit.most}"
        unit = {str: "characters", bytes: "bytes", tuple: "items"}[type(value)]
        raise EncodingError(where, f"{len(value)} {unit}", expected=f"{exactly} {unit}")


def _float(value: Value, where: str) -> float:
    if isinstance(value, bytes) and len(value) == _FLOAT.size:
        number = float(_FLOAT.unpack(value)[0])
        if math.isfinite(number):
            return number
    raise EncodingError(where, value, expected="a finite number")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
