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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cloister.protocol.encoding import Value, pack, unpack
from cloister.protocol.errors import EncodingError
from cloister.protocol.messages.messages import Elements, Limit, Reply, Request

VERSION = "cloister/wire/9"
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
    kind: Any = type(message)
    first = pack(VERSION, *_writer(kind)(message, vectors))
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
    by_name: dict[str, Any] = {kind.__name__: kind for kind in kinds}
    kind = by_name.get(values[1]) if len(values) > 1 and isinstance(values[1], str) else None
    if kind is None:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise EncodingError("message", values[1] if len(values) > 1 else "", expected=expected)
    frames = iter(vectors)
    message: T = _reader(kind, kind.__name__)(values[1:], frames)
    unused = sum(1 for _ in frames)
    if unused:
        raise EncodingError(
            "message", f"{len(vectors)} vectors", expected=f"{len(vectors) - unused}, as it announces"
        )
    return message


# In a process that plays many sites, several get the same message, which cannot be changed.
@functools.lru_cache(maxsize=4)
def _decoded(kinds: tuple[type[Any], ...], data: bytes) -> Any:
    return _decode(kinds, data, [])


def from_bytes(kind: type[T], data: bytes) -> T:
    """The message of `kind` that `to_bytes` wrote.

    Raises:
        EncodingError: `data` is anything else.
    """
    return decode((kind,), [data])


# Each type of a message is compiled once to a function that writes it and one that reads it: with hundreds of sites, a
# message has thousands of texts and keys.

Write: TypeAlias = Callable[[Any, list[npt.NDArray[Any]]], Value]
"""From a value of the type, and the list to which its vectors are added, to what `encoding.pack` takes."""
Read: TypeAlias = Callable[[Any, Iterator[memoryview]], Any]
"""From what `encoding.unpack` gave, and the frames of the vectors that follow, to a value of the type."""


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _parts(hint: Any) -> tuple[Any, Limit | Elements | None]:
    """A type without its `Annotated`, and the limit that this states."""
    if typing.get_origin(hint) is Annotated:
        inner, limit = typing.get_args(hint)
        return inner, limit
    return hint, None


def _choices(hint: Any) -> tuple[Any, ...] | None:
    """The dataclasses that a value of the type may be of; None for a type of another kind."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return (hint,)
    if typing.get_origin(hint) is types.UnionType:
        return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
    return None


# Writing.


@functools.cache
def _writer(kind: Any) -> Callable[[Any, list[npt.NDArray[Any]]], tuple[Value, ...]]:
    """Writes a dataclass: its name, then its fields."""
    fields = [(name, _write_as(hint)) for name, hint in _hints(kind).items()]
    name = kind.__name__

    def write(message: Any, vectors: list[npt.NDArray[Any]]) -> tuple[Value, ...]:
        return (
            name,
            *(
                getattr(message, field) if write is None else write(getattr(message, field), vectors)
                for field, write in fields
            ),
        )

    return write


def _write_as(hint: Any) -> Write | None:
    """How a value of a type is written; None where `pack` takes it as it is."""
    hint, limit = _parts(hint)
    if isinstance(limit, Elements):
        return _write_vector
    if _choices(hint) is not None:
        return _write_choice
    if hint is float:
        return lambda value, _vectors: _FLOAT.pack(value)
    if typing.get_origin(hint) is tuple:
        inner = {_write_as(item) for item in typing.get_args(hint) if item is not Ellipsis}
        if inner == {None}:
            return None
        (write,) = inner  # no message mixes them in a tuple
        assert write is not None
        return lambda values, vectors: tuple(write(value, vectors) for value in values)
    return None


def _write_choice(value: Any, vectors: list[npt.NDArray[Any]]) -> Value:
    kind: Any = type(value)
    return () if value is None else _writer(kind)(value, vectors)


def _write_vector(value: Any, vectors: list[npt.NDArray[Any]]) -> Value:
    vectors.append(np.ascontiguousarray(value))
    return (value.dtype.name, value.size)


# Reading. Nothing is trusted; `where` names the field in an error.


@functools.cache
def _reader(kind: Any, where: str) -> Read:
    """Reads a dataclass from its name, which the caller has checked, and its fields."""
    fields = [_read_as(hint, f"{where}.{name}") for name, hint in _hints(kind).items()]

    def read(value: Any, frames: Iterator[memoryview]) -> Any:
        if len(value) != len(fields) + 1:
            raise EncodingError(where, f"{len(value) - 1} fields", expected=f"{len(fields)}")
        return kind(*[field(part, frames) for field, part in zip(fields, value[1:], strict=True)])

    return read


def _read_as(hint: Any, where: str) -> Read:
    """How a value of a type is read."""
    inner, limit = _parts(hint)
    if isinstance(limit, Elements):
        return functools.partial(_read_vector, limit.dtypes, where)
    choices = _choices(inner)
    if choices is not None:
        readers = {kind.__name__: _reader(kind, where) for kind in choices}
        return functools.partial(_read_choice, readers, where, len(choices) < len(typing.get_args(inner)))
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is Literal:
        return functools.partial(_read_literal, arguments, where)
    if inner is float:
        return functools.partial(_read_float, where)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            assert limit is not None, f"{where} has no limit in its type"
            return functools.partial(_read_list, _read_as(arguments[0], where), limit, where)
        return functools.partial(_read_tuple, [_read_as(item, where) for item in arguments], where)
    if inner is int:
        return functools.partial(_read_int, where)
    assert inner in (str, bytes), f"{where} has a type that no message may have"
    assert limit is not None, f"{where} has no limit in its type"
    return functools.partial(_read_text, inner, limit, where)


def _read_text(
    kind: type[str] | type[bytes], limit: Limit, where: str, value: Any, _frames: Iterator[memoryview]
) -> Any:
    if type(value) is not kind:
        raise EncodingError(where, value, expected=kind.__name__)
    return _within(value, limit, where)


def _read_list(item: Read, limit: Limit, where: str, value: Any, frames: Iterator[memoryview]) -> Any:
    if type(value) is not tuple:
        raise EncodingError(where, value, expected="a list")
    return tuple([item(each, frames) for each in _within(value, limit, where)])


def _read_tuple(items: Sequence[Read], where: str, value: Any, frames: Iterator[memoryview]) -> Any:
    if type(value) is not tuple:
        raise EncodingError(where, value, expected="a list")
    if len(value) != len(items):
        raise EncodingError(where, f"{len(value)} items", expected=f"{len(items)}")
    return tuple([item(each, frames) for item, each in zip(items, value, strict=True)])


def _read_choice(
    readers: Mapping[str, Read], where: str, optional: bool, value: Any, frames: Iterator[memoryview]
) -> Any:
    if optional and value == ():
        return None
    if type(value) is tuple and value and type(value[0]) is str and value[0] in readers:
        return readers[value[0]](value, frames)
    raise EncodingError(where, value, expected=" or ".join(readers))


def _read_literal(allowed: tuple[str, ...], where: str, value: Any, _frames: Iterator[memoryview]) -> Any:
    if value not in allowed:
        raise EncodingError(where, value, expected=" or ".join(allowed))
    return value


def _read_int(where: str, value: Any, _frames: Iterator[memoryview]) -> Any:
    if type(value) is not int:
        raise EncodingError(where, value, expected="int")
    return value


def _read_float(where: str, value: Any, _frames: Iterator[memoryview]) -> float:
    if isinstance(value, bytes) and len(value) == _FLOAT.size:
        number = float(_FLOAT.unpack(value)[0])
        if math.isfinite(number):
            return number
    raise EncodingError(where, value, expected="a finite number")


def _read_vector(
    dtypes: tuple[str, ...], where: str, value: Any, frames: Iterator[memoryview]
) -> npt.NDArray[Any]:
    match value:
        case (str(dtype), int(size)) if dtype in dtypes:
            pass
        case _:
            raise EncodingError(where, value, expected=f"a vector of {' or '.join(dtypes)}")
    frame = next(frames, None)
    if frame is None:
        raise EncodingError(where, "missing", expected=f"a frame with {size} elements")
    if frame.nbytes != size * np.dtype(dtype).itemsize:
        raise EncodingError(where, f"{frame.nbytes} bytes", expected=f"{size} elements of {dtype}")
    vector = np.frombuffer(frame, dtype=dtype) if size else np.empty(0, dtype)
    vector.flags.writeable = False
    return vector


def _within(value: Any, limit: Limit, where: str) -> Any:
    """A text, a byte string or a list that keeps its limit."""
    if limit.least <= len(value) <= limit.most:
        return value
    exactly = f"{limit.most}" if limit.least == limit.most else f"{limit.least} to {limit.most}"
    unit = {"str": "characters", "bytes": "bytes", "tuple": "items"}[type(value).__name__]
    raise EncodingError(where, f"{len(value)} {unit}", expected=f"{exactly} {unit}")
