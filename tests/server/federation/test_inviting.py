"""What the process of a deployed run tells of its sites when it ends, with a SuperLink that does not answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cloister.protocol.errors import EngineError
from cloister.server.door.door import Connected
from cloister.server.federation.deployed import Inviting
from cloister.server.record.progress import Event, Moved


class Away:
    """A SuperLink that does not answer."""

    def run(self, _keys: object) -> Any:
        raise EngineError("superlink", expected="an answer")


def site(sent: int, received: int) -> list[Connected]:
    return [Connected(1, "a", True, sent, received)]


@pytest.mark.parametrize(
    ("last", "lost", "expected"),
    [
        (site(3, 4), False, [Moved({"a": 3}, {"a": 4})]),
        (site(3, 4), True, []),
        ([], False, []),
    ],
    ids=["told", "reader-gone", "channel-ended"],
)
def test_the_end_tells_the_last_bytes_and_raises_nothing(
    last: list[Connected], lost: bool, expected: list[Moved]
) -> None:
    sites, told, begun = [site(1, 2)], [], threading.Event()

    def observe(event: Event) -> None:
        if isinstance(event, Moved):
            if lost and begun.is_set():
                raise BrokenPipeError
            told.append(event)
            begun.set()

    channel: Any = SimpleNamespace(connected=lambda: sites[-1])
    superlink: Any = Away()
    inviting = Inviting(superlink, {}, channel, ("a",), observe)
    assert begun.wait(30)
    sites.append(last)  # within the 2 s in which bytes are not told again
    inviting.close()
    assert told == [Moved({"a": 1}, {"a": 2}), *expected]
