"""Messages survive Flower's records, and records that are not the message are refused."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from cloister.protocol.errors import UpdateError
from cloister.protocol.messages import (
    Agree,
    Agreed,
    Contribution,
    Evaluate,
    Join,
    Joined,
    Reply,
    Request,
    Train,
)
from cloister.protocol.records import from_records, private_of, to_records, with_private

VECTOR = np.arange(5, dtype=np.float32)


@pytest.mark.parametrize(
    "message",
    [
        Join("{}", "run"),
        Joined("site-0", 7),
        Agree("{}", "run", "train", 2, 3, 1),
        Agreed("site-0", bytes(range(256))),
        Train("{}", 1, 2, "run", "abc", VECTOR),
        Evaluate("{}", 0, 1, "run", "abc", VECTOR),
        Contribution("site-0", 3, "abc", b"signed", VECTOR.astype(np.uint32)),
        Contribution("site-0", 3, "abc", b"signed", VECTOR.astype(np.uint16)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_round_trip(message: Request | Reply) -> None:
    again = from_records(type(message), to_records(message))
    assert type(again) is type(message)
    for name, value in vars(message).items():
        other = getattr(again, name)
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype
            assert np.array_equal(other, value)
            assert not other.flags.writeable
        else:
            assert other == value


def test_records_that_are_not_the_message_are_refused() -> None:
    good = to_records(Train("{}", 1, 2, "run", "abc", VECTOR))
    with pytest.raises(UpdateError, match="the records 'fields' and 'vectors'"):
        from_records(Train, RecordDict({}))
    with pytest.raises(UpdateError, match="the fields"):
        from_records(Contribution, good)
    wrong_type = to_records(Train("{}", 1, 2, "run", "abc", VECTOR))
    fields = wrong_type["fields"]
    assert isinstance(fields, ConfigRecord)
    fields["round"] = "x"
    with pytest.raises(UpdateError, match=r"Train.round is 'x': expected int"):
        from_records(Train, wrong_type)
    for change in ({"dtype": "float64"}, {"shape": (4,)}, {"stype": "numpy.ndarray"}, {"data": b"123"}):
        broken = to_records(Train("{}", 1, 2, "run", "abc", VECTOR))
        vectors = broken["vectors"]
        assert isinstance(vectors, ArrayRecord)
        for name, value in change.items():
            setattr(vectors["model"], name, value)
        with pytest.raises((UpdateError, ValueError)):
            from_records(Train, broken)


def test_private_bytes_travel_beside_a_message_whose_vectors_are_shared() -> None:
    shared = to_records(Train("{}", 1, 2, "run", "abc", VECTOR))
    one, other = with_private(shared, b"one"), with_private(shared, b"other")
    assert (private_of(shared), private_of(one), private_of(other)) == (b"", b"one", b"other")
    assert one["vectors"] is other["vectors"] is shared["vectors"]
    assert from_records(Train, one).round == 1
    one["private"] = ConfigRecord({"bytes": "text"})
    with pytest.raises(UpdateError, match="bytes for this site"):
        private_of(one)
