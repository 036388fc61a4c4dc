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
    value, end = _read(data, 0, 0)
    if not isinstance(value, tuple) or end != len(data):
        raise EncodingError("message", f"{len(data)} bytes", expected="exactly one encoded tuple")
    return value


def _write(value: Value, into: list[bytes]) -> None:
    if isinstance(value, bytes):
        into += (_HEAD.pack(b"b", len(value)), value)
    elif isinstance(value, str):
        text = value.encode()
        into += (_HEAD.pack(b"s", len(text)), text)
    elif isinstance(value, bool):
        raise TypeError("bool has no canonical encoding; use 0 or 1")
    elif isinstance(value, int):
        if not 0 <= value < 2**64:
            raise EncodingError("integer", value, expected="0 to 2^64 - 1")
        into.append(_HEAD.pack(b"i", value))
    elif isinstance(value, tuple):
        into.append(_HEAD.pack(b"t", len(value)))
        for item in value:
            _write(item, into)
    else:
        raise TypeError(f"{type(value).__name__} has no canonical encoding")


def _read(data: bytes, at: int, depth: int) -> tuple[Value, int]:
    if len(data) - at < 9 or depth > DEEPEST:
        raise EncodingError("message", f"{len(data)} bytes", expected="a complete encoding")
    tag, number = data[at : at + 1], int.from_bytes(data[at + 1 : at + 9], "big")
    at += 9
    if tag == b"i":
        return number, at
    if number > len(data) - at:
        raise EncodingError(
            "message", f"a length of {number}", expected=f"at most the {len(data) - at} bytes left"
        )
    if tag == b"b":
        return data[at : at + number], at + number
    if tag == b"s":
        try:
            return data[at : at + number].decode(), at + number
        except UnicodeDecodeError:
            raise EncodingError("message", data[at : at + number], expected="text in UTF-8") from None
    if tag == b"t":
        items: list[Value] = []
        for _ in range(number):
            item, at = _read(data, at, depth + 1)
            items.append(item)
        return tuple(items), at
    raise EncodingError("message", tag, expected="a tag of i, s, b or t")
