"""Every message round-trips through bytes, and anything but exactly one message within its limits is refused."""

from __future__ import annotations

import dataclasses
import math
import struct
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.protocol.encoding import Value, pack, unpack
from cloister.protocol.errors import EncodingError
from cloister.protocol.messages import messages, wire
from cloister.protocol.messages.messages import (
    TRAIN,
    Advertise,
    Contribute,
    Contribution,
    Elements,
    Inbox,
    Instructions,
    Join,
    Joined,
    Limit,
    Peers,
    Reply,
    Request,
    Reveal,
    Shares,
    Step,
    SumId,
    Survivors,
    Unmask,
)
from cloister.protocol.messages.wire import (
    VERSION,
    Buffer,
    decode,
    decode_reply,
    decode_request,
    encode,
    from_bytes,
)
from cloister.protocol.plan.threshold import LARGEST
from cloister.tests.tools.raises import raises

KINDS: list[type[Any]] = [kind for kind in vars(messages).values() if dataclasses.is_dataclass(kind)]  # type: ignore[misc]  # classes, not instances
"""Every message, and what messages are made of."""
REQUESTS: tuple[type[Any], ...] = typing.get_args(Request)
REPLIES: tuple[type[Any], ...] = typing.get_args(Reply)

SUM = SumId("run", bytes(32), TRAIN, 1)
VECTOR = np.arange(5, dtype=np.float32)
TOLD = Instructions(SUM, bytes(32), (("a feature", b"told"),))
CONTRIBUTE = Contribute(TOLD, 1, None, VECTOR)
CONTRIBUTION = Contribution("site-0", SUM, bytes(32), None, (), (VECTOR.astype(np.uint32),))

on_every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """The types of a message's fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def values_of(hint: Any, limit: Any = None) -> st.SearchStrategy[Any]:
    """Values of a field's type, within its limits."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return values_of(arguments[0], arguments[1])
    if isinstance(limit, Elements):
        numbers = st.lists(st.integers(0, 2**8 - 1), max_size=6)
        return st.builds(lambda dtype, of: np.array(of, dtype), st.sampled_from(limit.dtypes), numbers)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is types.UnionType:
        return st.one_of([values_of(one) for one in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=min(3, limit.most)).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(one) for one in arguments))
    if hint is int:
        return st.integers(0, 2**64 - 1)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is str:
        return st.text(max_size=min(20, limit.most), min_size=limit.least)
    if hint is bytes:
        return st.binary(max_size=min(64, limit.most), min_size=limit.least)
    if hint is type(None):
        return st.none()
    return made_of(hint)


def made_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of a kind."""
    return st.builds(kind, *(values_of(hint) for hint in hints_of(kind).values()))


def same(one: Any, other: Any) -> bool:
    """Whether two messages are the same, down to the element types of their vectors."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other) and not other.flags.writeable
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def as_bytes(frames: list[Buffer]) -> list[bytes]:
    return [bytes(wire.view(frame)) for frame in frames]


# Round trips.


def test_every_message_that_a_carrier_takes_is_tried_here() -> None:
    assert set(REQUESTS) | set(REPLIES) <= set(KINDS)


@on_every_kind
@given(data=st.data())
@few
def test_every_message_survives_its_bytes(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(made_of(kind))
    frames = as_bytes(encode(message))
    again = decode((kind,), frames)
    assert same(message, again)
    assert as_bytes(encode(again)) == frames


def test_vectors_are_not_copied() -> None:
    frames = encode(CONTRIBUTE)
    assert np.shares_memory(frames[1], VECTOR)
    model = decode((Contribute,), frames).model
    assert np.shares_memory(model, VECTOR)
    assert not model.flags.writeable


@pytest.mark.parametrize("of", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_frames_may_be_any_buffer(of: Any) -> None:
    frames = [of(frame) for frame in as_bytes(encode(CONTRIBUTE))]
    assert same(CONTRIBUTE, decode((Contribute,), frames))


def test_a_message_has_one_encoding_and_two_messages_have_two() -> None:
    """A site may be told a message twice, and knows it again by its bytes."""
    one, other = Survivors(bytes(32), ("a", "bc")), Survivors(bytes(32), ("ab", "c"))
    assert wire.to_bytes(one) != wire.to_bytes(other)
    assert from_bytes(Survivors, wire.to_bytes(one)) == one


# Limits.


def unlimited(hint: Any, limited: bool = False) -> Iterator[str]:
    """The parts of a field's type that may be of any length."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        assert isinstance(arguments[1], Limit | Elements)
        yield from unlimited(arguments[0], limited=True)
    elif origin is np.ndarray or hint in (str, bytes):
        if not limited:
            yield str(hint)
    elif origin is tuple:
        if arguments[-1] is Ellipsis and not limited:
            yield str(hint)
        for one in arguments:
            yield from unlimited(one)
    elif origin is types.UnionType:
        for one in arguments:
            yield from unlimited(one)
    elif origin is not Literal:
        known = hint in (int, float, type(None), Ellipsis) or dataclasses.is_dataclass(hint)
        assert known, f"{hint} is of no type that this test knows"


@on_every_kind
def test_every_text_byte_string_tuple_and_vector_has_a_limit_in_its_type(kind: type[Any]) -> None:
    assert {name: found for name, hint in hints_of(kind).items() if (found := list(unlimited(hint)))} == {}


@dataclass(frozen=True)
class Endless:
    names: tuple[str, ...]


def test_a_field_without_a_limit_would_be_found() -> None:
    assert len(list(unlimited(hints_of(Endless)["names"]))) == 2
    with raises(AssertionError, "Endless.names", says="no limit"):
        decode((Endless,), encode(Endless(("a",))))


def plain(hint: Any, limit: Any = None) -> Any:
    """The shortest value of a field's type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return plain(arguments[0], arguments[1])
    if isinstance(limit, Elements):
        return np.zeros(1, limit.dtypes[0])
    if origin is Literal:
        return arguments[0]
    if origin is types.UnionType:
        return None if type(None) in arguments else plain(arguments[0])
    if origin is tuple:
        return () if arguments[-1] is Ellipsis else tuple(plain(one) for one in arguments)
    if hint is int or hint is float:
        return hint(1)
    if hint is str or hint is bytes:
        return of_length(hint, limit.least)
    return hint(*(plain(one) for one in hints_of(hint).values()))


def of_length(hint: Any, length: int) -> Any:
    return "x" * length if hint is str else bytes(length)


def at_the_limits(hint: Any, limit: Any = None) -> Iterator[tuple[Any, bool]]:
    """Values of a field's type at one of its limits, which are accepted, and one past it, which are not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from at_the_limits(arguments[0], arguments[1])
    elif hint is str or hint is bytes:
        yield of_length(hint, limit.most), True
        yield of_length(hint, limit.most + 1), False
        if limit.least:
            yield of_length(hint, limit.least - 1), False
    elif origin is tuple and arguments[-1] is Ellipsis:
        one = plain(arguments[0])
        yield (one,) * limit.most, True
        yield (one,) * (limit.most + 1), False
        for item, accepted in at_the_limits(arguments[0]):
            yield (item,), accepted
    elif origin is tuple:
        for number, part in enumerate(arguments):
            for item, accepted in at_the_limits(part):
                values = [plain(one) for one in arguments]
                values[number] = item
                yield tuple(values), accepted


LIMITED = [
    pytest.param(kind, name, id=f"{kind.__name__}.{name}")
    for kind in KINDS
    for name, hint in hints_of(kind).items()
    if any(True for _ in at_the_limits(hint))
]
"""Every field with a limit."""


@pytest.mark.parametrize(("kind", "name"), LIMITED)
def test_a_field_at_its_limit_is_accepted_and_one_past_it_is_refused(kind: type[Any], name: str) -> None:
    hints = hints_of(kind)
    seen = set()
    for value, accepted in at_the_limits(hints[name]):
        fields = {other: plain(hint) for other, hint in hints.items()} | {name: value}
        frames = encode(kind(**fields))
        seen.add(accepted)
        if accepted:
            assert getattr(decode((kind,), frames), name) == value
        else:
            with raises(EncodingError, f"{kind.__name__}.{name}") as caught:
                decode((kind,), frames)
            assert str(caught.value.value).endswith((" characters", " bytes", " items"))
    assert seen == {True, False}


def test_a_first_frame_longer_than_any_message_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LONGEST", 100)
    with raises(EncodingError, "message", says="101 bytes"):
        decode_request([bytes(101)])


# What is not one message.


@pytest.mark.parametrize("version", ["cloister/wire/8", "cloister/wire/10", "", 1, b"cloister/wire/9", ()])
def test_a_message_of_another_release_is_refused_with_what_to_do(version: Value) -> None:
    with raises(EncodingError, "version of the message", says="same release"):
        decode_reply([pack(version, "Joined", "site-0", b"", struct.pack(">d", 1.0))])
    assert decode_reply([pack(VERSION, "Joined", "site-0", b"", struct.pack(">d", 1.0))]) == Joined("site-0")


def test_a_message_of_another_kind_is_refused() -> None:
    for kind in REQUESTS:
        with raises(EncodingError, "message", says="Joined or Advertise or "):
            decode_reply(encode(plain(kind)))
    for kind in REPLIES:
        with raises(EncodingError, "message", says="Join or Agree or Contribute"):
            decode_request(encode(plain(kind)))
    for name in ("Endless", "object", "", 1, b"Join", ("Join",)):
        with raises(EncodingError, "message", says="Join or Agree or Contribute"):
            decode_request([pack(VERSION, name)])
    with pytest.raises(EncodingError):
        decode_request([pack(VERSION)])


@pytest.mark.parametrize("frames", [[], [b""], [pack()], [b"", b""]], ids=repr)
def test_no_message_at_all_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(EncodingError):
        decode_request(frames)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(seconds: float) -> None:
    frames = encode(dataclasses.replace(CONTRIBUTION, seconds=seconds))
    with raises(EncodingError, "Contribution.seconds", says="finite"):
        decode_reply(frames)


@pytest.mark.parametrize(
    "seconds", [1, "1.0", b"", struct.pack(">f", 1.0), struct.pack(">d", 1.0) + b"0", ()]
)
def test_a_number_has_one_form(seconds: Any) -> None:
    first, vector = as_bytes(encode(CONTRIBUTION))
    *fields, _ = unpack(first)
    with raises(EncodingError, "Contribution.seconds"):
        decode_reply([pack(*fields, seconds), vector])


def test_every_vector_has_exactly_one_frame() -> None:
    first, model = as_bytes(encode(CONTRIBUTE))
    for frames, field, says in (
        ([first], "Contribute.model", ("'missing'", "5 elements")),
        ([first, model, model], "message", ("'2 vectors'", "expected 1,")),
        ([first, model, b""], "message", ("'2 vectors'", "expected 1,")),
        ([first, b""], "Contribute.model", ("'0 bytes'", "5 elements")),
        ([first, model[:-1]], "Contribute.model", ("'19 bytes'", "5 elements")),
        ([first, model + model], "Contribute.model", ("'40 bytes'", "5 elements")),
        ([model, first], "message", ()),
        ([first, *[b""] * (wire.MOST_VECTORS + 1)], "message", (f"'{wire.MOST_VECTORS + 2} frames'",)),
    ):
        with raises(EncodingError, field, says=says):
            decode_request(frames)
    with raises(EncodingError, "message", says="1 vectors"):
        decode_reply([*encode(Joined("site-0")), b""])


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint8", "uint16", "object", "", ">f4", 4])
def test_a_vector_of_another_element_type_is_refused(dtype: Value) -> None:
    version, kind, *fields = unpack(as_bytes(encode(CONTRIBUTE))[0])
    fields[3] = (dtype, 5)
    with raises(EncodingError, "Contribute.model", says="a vector of float32"):
        decode_request([pack(version, kind, *fields), VECTOR])


@pytest.mark.parametrize("size", [4, 6, 0, 2**64 - 1, "5", ()])
def test_a_vector_of_another_length_than_announced_is_refused(size: Value) -> None:
    version, kind, *fields = unpack(as_bytes(encode(CONTRIBUTE))[0])
    fields[3] = ("float32", size)
    with raises(EncodingError, "Contribute.model"):
        decode_request([pack(version, kind, *fields), VECTOR])


@pytest.mark.parametrize(
    ("dtype", "wrong"), [(np.uint8, np.uint16), (np.uint16, np.uint32), (np.uint32, np.uint8)]
)
def test_ring_integers_have_one_of_three_widths(dtype: Any, wrong: Any) -> None:
    message = dataclasses.replace(CONTRIBUTION, spans=(VECTOR.astype(dtype),))
    first, vector = encode(message)
    assert same(message, decode_reply([first, vector]))
    with raises(EncodingError, "Contribution.spans"):
        decode_reply([first, VECTOR.astype(wrong)])
    floats: Any = VECTOR
    with raises(EncodingError, "Contribution.spans", says="a vector of uint8 or uint16 or uint32"):
        decode_reply(encode(dataclasses.replace(CONTRIBUTION, spans=(floats,))))


@on_every_kind
@given(data=st.data())
@few
def test_a_message_cut_or_extended_is_refused(kind: type[Any], data: st.DataObject) -> None:
    first, *vectors = as_bytes(encode(data.draw(made_of(kind))))
    cut = first[: data.draw(st.integers(0, len(first) - 1))]
    more = first + data.draw(st.binary(min_size=1, max_size=20))
    for frame in (cut, more):
        with pytest.raises(EncodingError):
            decode((kind,), [frame, *vectors])
    values = unpack(first)
    for changed in (values[:-1], (*values, data.draw(st.integers(0, 9)))):
        with pytest.raises(EncodingError):
            decode((kind,), [pack(*changed), *vectors])


def refused_or_itself(kinds: tuple[type[Any], ...], frames: list[bytes]) -> bool:
    """Whether frames are refused; otherwise they are checked to be exactly what their message is encoded to."""
    try:
        message: Any = decode(kinds, frames)
    except EncodingError:
        return True
    assert as_bytes(encode(message)) == frames
    return False


@on_every_kind
@given(data=st.data())
@few
def test_a_message_with_changed_bytes_is_refused_or_another_message(
    kind: type[Any], data: st.DataObject
) -> None:
    first, *vectors = as_bytes(encode(data.draw(made_of(kind))))
    changed = bytearray(first)
    for place in data.draw(st.lists(st.integers(0, len(first) - 1), min_size=1, max_size=3)):
        changed[place] ^= data.draw(st.integers(1, 255))
    refused_or_itself((kind,), [bytes(changed), *vectors])


@given(frames=st.lists(st.binary(max_size=60), max_size=3))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused(frames: list[bytes]) -> None:
    assert refused_or_itself(REQUESTS, frames)
    assert refused_or_itself(REPLIES, frames)


anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.integers(0, 2**64 - 1),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.sampled_from(["train", "float32", "uint32", bytes(32), *(kind.__name__ for kind in KINDS)]),
    ),
    lambda inner: st.lists(inner, max_size=6).map(tuple),
    max_leaves=20,
)


@on_every_kind
@given(data=st.data())
@few
def test_a_field_of_any_other_value_is_refused_or_another_message(
    kind: type[Any], data: st.DataObject
) -> None:
    """Well encoded, with the right version, kind and number of fields, and one field that may be anything."""
    first, *vectors = as_bytes(encode(data.draw(made_of(kind))))
    values = list(unpack(first))
    values[data.draw(st.integers(2, len(values) - 1))] = data.draw(anything)
    refused_or_itself((kind,), [pack(*values), *vectors])


@pytest.mark.slow
@given(values=st.lists(anything, max_size=6), kind=st.sampled_from(KINDS))
@settings(max_examples=200, deadline=None)
def test_values_that_were_never_a_message_are_refused_or_another_message(
    values: list[Any], kind: type[Any]
) -> None:
    refused_or_itself((kind,), [pack(VERSION, kind.__name__, *values)])


@pytest.mark.parametrize("depth", [9, 5000])
def test_tuples_nested_too_deep_are_refused(depth: int) -> None:
    with pytest.raises(EncodingError):
        decode_request([struct.pack(">cQ", b"t", 1) * depth + struct.pack(">cQ", b"t", 0)])


def test_steps_have_the_numbers_of_a_round() -> None:
    assert [(step.value, step.label) for step in Step] == [
        (2, "advertise"),
        (3, "share"),
        (4, "update"),
        (5, "confirm"),
        (6, "unmask"),
    ]


def test_a_base_model_travels_with_the_join_alone() -> None:
    for base in (np.empty(0, np.float32), VECTOR):
        join = Join("run", "{}", bytes(32), bytes(32), base)
        assert same(join, decode_request(encode(join)))


def test_a_name_that_is_text_is_not_the_same_name_as_bytes() -> None:
    survivors = Survivors(bytes(32), ("a",))
    values = list(unpack(wire.to_bytes(survivors)))
    assert values[3] == ("a",)
    values[3] = (b"a",)
    with raises(EncodingError, "Survivors.survivors", says="expected str"):
        from_bytes(Survivors, pack(*values))


def test_the_longest_messages_are_within_the_limit() -> None:
    n, name, key, signature = LARGEST, "x" * 64, bytes(32), bytes(64)
    shares = ((name, bytes(64)),) * n
    for message in (
        Peers(key, (Advertise(key, name, key, key, signature),) * n),
        Shares(key, name, key, ((name, bytes(82)),) * n, ((name, key, key),) * n, signature),
        Inbox(key, (name,) * n, ((name, bytes(82)),) * n, ((name, key, key),) * 64),
        Unmask(key, (name,) * n, (), ((name, signature),) * n, ((name, key, (), signature),) * 64),
        Reveal(key, name, shares, shares, signature),
        Join("run", "x" * messages.LONGEST_PLAN, key, key, VECTOR),
    ):
        first = encode(message)[0]
        assert wire.view(first).nbytes <= wire.LONGEST, type(message).__name__
