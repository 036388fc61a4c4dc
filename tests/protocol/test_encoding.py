"""Canonical bytes: one encoding for each value, and one value for each accepted encoding."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cloister.protocol.encoding import DEEPEST, Value, pack, unpack
from cloister.protocol.errors import EncodingError

values: st.SearchStrategy[Value] = st.recursive(
    st.integers(0, 2**64 - 1) | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


def test_the_bytes_are_the_ones_that_are_written_down() -> None:
    parts = [
        "74 0000000000000004",
        "69 0000000000000001",
        "73 0000000000000002 c3a9",
        "62 0000000000000001 00",
        "74 0000000000000000",
    ]
    assert pack(1, "é", b"\x00", ()) == bytes.fromhex("".join(parts))


def depth(value: Value) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, tuple) else 1


@given(st.lists(values, max_size=4).map(tuple))
def test_round_trip(value: tuple[Value, ...]) -> None:
    assume(depth(value) <= DEEPEST)
    assert unpack(pack(*value)) == value


@given(st.lists(values, max_size=3).map(tuple), st.lists(values, max_size=3).map(tuple))
def test_two_values_never_share_an_encoding(one: tuple[Value, ...], other: tuple[Value, ...]) -> None:
    assert (pack(*one) == pack(*other)) == (one == other)


@given(st.binary(max_size=60))
def test_accepted_bytes_are_canonical(data: bytes) -> None:
    try:
        value = unpack(data)
    except EncodingError:
        return
    assert pack(*value) == data


@given(st.lists(values, min_size=1, max_size=3).map(tuple), st.data())
def test_a_cut_or_longer_encoding_is_refused(value: tuple[Value, ...], data: st.DataObject) -> None:
    encoded = pack(*value)
    with pytest.raises(EncodingError):
        unpack(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(EncodingError):
        unpack(encoded + b"\x00")


def test_what_has_no_encoding_is_refused() -> None:
    with pytest.raises(EncodingError):
        pack(-1)
    with pytest.raises(EncodingError):
        pack(2**64)
    with pytest.raises(TypeError):
        pack(True)
    with pytest.raises(TypeError):
        pack(1.5)  # type: ignore[arg-type]  # what the test is about
    with pytest.raises(EncodingError):
        unpack(b"t" + (2**63).to_bytes(8, "big"))
    with pytest.raises(EncodingError):
        unpack((b"t" + (1).to_bytes(8, "big")) * 50 + b"t" + bytes(8))
