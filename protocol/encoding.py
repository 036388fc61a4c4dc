"""The canonical encoding of everything that is signed or hashed: no two values have the same encoding.

A value is an integer in [0, 2^64), text, bytes, or a tuple of values. Each is written as one tag byte and a
fixed-width length or value: `i` and 8 bytes; `s` or `b`, 8 bytes of length and the bytes; `t`, 8 bytes of
count and the values. All numbers are big-endian. `unpack(pack(*values)) == values`, and any bytes that `pack`
would not write are refused. Refused: JSON and protobuf, which have several encodings of one value.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from cloister.protocol.errors import EncodingError

Value: TypeAlias = "int | str | bytes | tuple[Value, ...]"

_HEAD = struct.Struct(">cQ")  # tag, and value, length or count

DEEPEST = 8
"""Maximum nesting of tuples that `unpack` reads; messages need four."""


def pack(*values: Value) -> bytes:
    """Encode `values` as one tuple.

    Raises:
        EncodingError: an integer is negative or does not fit in 64 bits.
        TypeError: a value is of another type.
    """
    into: list[bytes] = []
    _write(values, into)
    return b"".join(into)


def unpack(data: bytes) -> tuple[Value, ...]:
    """Decode bytes that `pack` wrote.

    Raises:
        EncodingError: `data` is not exactly the encoding of a tuple.
    """
    if data[:1] != b"t":
        raise EncodingError("message", f"{len(data)} bytes", expected="exactly one encoded tuple")
    values, end = _read(data, _HEAD.size, _count(data, 0), 1)
    if end != len(data):
        raise EncodingError("message", f"{len(data)} bytes", expected="exactly one encoded tuple")
    return values


# Both run for each text and key of each message: the branches are in the order of how often they are taken.


def _write(values: tuple[Value, ...], into: list[bytes]) -> None:
    into.append(_head(b"t", len(values)))
    for value in values:
        if isinstance(value, bytes):
            into += (_head(b"b", len(value)), value)
        elif isinstance(value, str):
            text = value.encode()
            into += (_head(b"s", len(text)), text)
        elif isinstance(value, tuple):
            _write(value, into)
        elif isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{type(value).__name__} has no canonical encoding")
        elif not 0 <= value < 2**64:
            raise EncodingError("integer", value, expected="0 to 2^64 - 1")
        else:
            into.append(_head(b"i", value))


def _read(data: bytes, at: int, count: int, depth: int) -> tuple[tuple[Value, ...], int]:
    """The `count` values of a tuple that begin at `at`, and where they end."""
    if count and depth > DEEPEST:
        raise EncodingError("message", f"{len(data)} bytes", expected=f"at most {DEEPEST} nested tuples")
    values: list[Value] = []
    for _ in range(count):
        try:
            tag, number = _heads(data, at)
        except struct.error:
            raise _incomplete(data) from None
        at += _HEAD.size
        if tag == b"b" or tag == b"s":
            end = at + number
            if end > len(data):
                raise _too_long(data, at, number)
            part = data[at:end]
            at = end
            values.append(part if tag == b"b" else _text(part))
        elif tag == b"t":
            inner, at = _read(data, at, _count(data, at - _HEAD.size), depth + 1)
            values.append(inner)
        elif tag == b"i":
            values.append(number)
        else:
            raise EncodingError("message", tag, expected="a tag of i, s, b or t")
    return tuple(values), at


_head = _HEAD.pack
_heads = _HEAD.unpack_from


def _count(data: bytes, at: int) -> int:
    """The count of the tuple whose head is at `at`: each of its values takes at least one byte."""
    if len(data) - at < _HEAD.size:
        raise _incomplete(data)
    count: int = _heads(data, at)[1]
    if count > len(data) - at - _HEAD.size:
        raise _too_long(data, at + _HEAD.size, count)
    return count


def _text(part: bytes) -> str:
    try:
        return part.decode()
    except UnicodeDecodeError:
        raise EncodingError("message", part, expected="text in UTF-8") from None


def _incomplete(data: bytes) -> EncodingError:
    return EncodingError("message", f"{len(data)} bytes", expected="a complete encoding")


def _too_long(data: bytes, at: int, number: int) -> EncodingError:
    return EncodingError(
        "message", f"a length of {number}", expected=f"at most the {len(data) - at} bytes left"
    )
