"""The events of a run as JSON: how the process of a run tells them to others, and how they are kept in its folder."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cloister.protocol.errors import EngineError
from cloister.server.record.progress import Event, Started

_KINDS = {kind.__name__: kind for kind in Event.__subclasses__()}


def to_json(event: Event) -> str:
    """An event as one line of JSON: its fields, and its class as `event`."""
    name = type(event).__name__
    facts = {field.name: getattr(event, field.name) for field in fields(event)}
    if isinstance(event, Started):
        facts["plan"] = json.loads(event.plan.to_json())
    return json.dumps({"event": name} | facts, default=dict)


def with_time(line: str | bytes) -> bytes:
    """The line of an event as it is kept in a run's folder, with the present time."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at} | json.loads(line)).encode() + b"\n"


def from_json(line: str | bytes) -> Event:
    """Read what `to_json` wrote.

    Raises:
        EngineError: the line is anything else, such as one of another release.
    """
    try:
        facts = dict(json.loads(line))
        kind = str(facts.pop("event"))
        facts.pop("at", None)  # the time, in a file
        event: Event = _adapter(kind).validate_json(json.dumps(facts))
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        raise EngineError("event of a run", expected="a line of JSON of this release of cloister") from error
    return event


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[kind])
