"""The messages of a run as Flower's `RecordDict`, and back.

Vectors become raw `Array`s (little-endian, C order), everything else one `ConfigRecord`. A record that does not hold
exactly the fields of the message that was expected is refused: what comes over the wire is data, never trusted.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from cloister.protocol.errors import UpdateError
from cloister.protocol.messages import Reply, Request

Spoken = Request | Reply
M = TypeVar("M", bound=Spoken)

_HINTS = {kind: get_type_hints(kind) for kind in get_args(Spoken)}

_STYPE = "cloister.raw"
_DTYPES = ("float32", "uint16", "uint32")

assert sys.byteorder == "little", "vectors travel little-endian, and this machine is not"


def to_records(message: Spoken) -> RecordDict:
    """Encode a message."""
    config = ConfigRecord()
    arrays = ArrayRecord()
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, np.ndarray):
            array = Array(str(value.dtype), tuple(value.shape), _STYPE, b"")
            # Flower's constructor insists on bytes, which would be a copy.
            array.data = value.data.cast("B")  # type: ignore[assignment]  # what carries it takes any buffer
            arrays[field.name] = array
        else:
            config[field.name] = value
    return RecordDict({"fields": config, "vectors": arrays})


def with_private(records: RecordDict, private: bytes) -> RecordDict:
    """The same message with bytes for one site alone; vectors and fields are shared, not copied."""
    return RecordDict({**records, "private": ConfigRecord({"bytes": private})})


def private_of(records: RecordDict) -> bytes:
    """The bytes that came beside a message for this site alone; none give empty ones.

    Raises:
        UpdateError: the record holds something else.
    """
    record = records.get("private", ConfigRecord({"bytes": b""}))
    found = record.get("bytes") if isinstance(record, ConfigRecord) else None
    if not isinstance(found, bytes):
        raise UpdateError("private", sorted(records), expected="bytes for this site")
    return found


def from_records(kind: type[M], records: RecordDict) -> M:
    """Decode a message of the given kind; vectors are read-only views of the record's own memory.

    Raises:
        UpdateError: the records do not hold exactly that message.
    """
    config = records.get("fields")
    arrays = records.get("vectors")
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise UpdateError(kind.__name__, sorted(records), expected="the records 'fields' and 'vectors'")
    hints = _HINTS[kind]
    if {*config, *arrays} != set(hints) or {*config} & {*arrays}:
        raise UpdateError(kind.__name__, sorted({*config, *arrays}), expected=f"the fields {sorted(hints)}")
    values: dict[str, Any] = {}
    for name, hint in hints.items():
        if hint in (str, int, float, bytes):
            value = config.get(name)
            if type(value) is not hint:
                raise UpdateError(f"{kind.__name__}.{name}", value, expected=hint.__name__)
            values[name] = value
        else:
            values[name] = _vector(f"{kind.__name__}.{name}", arrays.get(name))
    return kind(**values)


def _vector(field: str, array: Array | None) -> npt.NDArray[Any]:
    if array is None or array.stype != _STYPE or array.dtype not in _DTYPES or len(array.shape) != 1:
        raise UpdateError(field, expected=f"a one-dimensional vector of {' or '.join(_DTYPES)}")
    vector = np.frombuffer(array.data, dtype=array.dtype)
    if vector.shape != array.shape:
        raise UpdateError(field, vector.shape, expected=f"the {array.shape[0]} elements that were announced")
    vector.flags.writeable = False
    return vector
