"""A grid of Flower's whose nodes end and begin again: a site is asked where it is, until the deadline of its step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from cloister.clients.network.guard import Guard
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.envelope import Sender
from cloister.protocol.messages.messages import Join, Joined, Reply, Request
from cloister.server.door.carrier import identify
from cloister.server.federation import app
from cloister.server.federation.app import MeetingChannel
from cloister.server.sum.channel import Failure
from cloister.tests.clients.network.test_serve import MODEL, Acts, Wire
from cloister.tests.parties.envelopes import COORDINATOR, PUBLIC

NAMES = ("north", "south")
KEYS = {name: new_identity() for name in NAMES}
STRANGER = new_identity()


class Known(Acts):
    """A site that signs its replies with a key."""

    def __init__(self, name: str, key: Ed25519PrivateKey) -> None:
        super().__init__(self._joined)
        self.name = name
        self.guard = Guard(name, PUBLIC.hex(), Path("/nowhere"), lambda _run: key)
        self.asked = 0

    def _joined(self, _request: Request) -> Reply:
        self.asked += 1
        return Joined(self.name)


class Nodes(Wire):
    """Nodes of which a test may end some and begin others."""

    def __init__(self) -> None:
        self.sites = {node: Known(name, KEYS[name]) for node, name in enumerate(NAMES, 1)}
        self.of_error = ErrorCode.NODE_UNAVAILABLE
        self.at_push: Callable[[], None] = lambda: None
        super().__init__(dict(self.sites))

    def get_node_ids(self) -> Iterable[int]:
        return list(self.sites)

    def begin(self, node: int, name: str, key: Ed25519PrivateKey) -> Known:
        known = self.sites[node] = Known(name, key)
        Wire.__init__(self, dict(self.sites))
        return known

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            if message.metadata.dst_node_id in self.sites:
                ids += super().push_messages([message])
                continue
            ids.append(f"away {len(self.replies)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.replies[ids[-1]] = Message(Error(self.of_error, "it is away"), reply_to=message)
        self.at_push()
        return ids


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(app, "_AGAIN_S", 0.02)
    identify(1, 0)
    return Nodes()


@pytest.fixture
def channel(grid: Nodes) -> MeetingChannel:
    roster = Roster.of([Card.of(name, key) for name, key in KEYS.items()])
    made = MeetingChannel(grid, Sender(COORDINATOR, "a run", 1, roster), NAMES)
    assert made.meet(2, 10) == 2
    assert list(made.nodes()) == [1, 2]
    assert ask(made, 1, 2) == {1: Joined("north"), 2: Joined("south")}
    return made


def ask(channel: MeetingChannel, *nodes: int, deadline_s: float = 30) -> dict[int, Reply | Failure]:
    request = Join("a run", "a plan", bytes(32), bytes(32), MODEL)
    return dict(channel.ask(dict.fromkeys(nodes, request), deadline_s, group="1"))


def test_a_site_whose_process_is_another_node_is_asked_there(grid: Nodes, channel: MeetingChannel) -> None:
    del grid.sites[1]
    assert list(channel.nodes()) == [2]
    again = grid.begin(7, "north", KEYS["north"])
    assert list(channel.nodes()) == [2, 1], "no newcomer: the site is that of its first node"
    assert ask(channel, 1, 2) == {1: Joined("north"), 2: Joined("south")}
    assert again.asked == 1
    assert ask(channel, 1) == {1: Joined("north")}


@pytest.mark.parametrize("error", app._AWAY)
def test_a_site_that_is_away_is_waited_for(grid: Nodes, channel: MeetingChannel, error: int) -> None:
    del grid.sites[1]
    grid.of_error, pushes = error, threading.Semaphore(0)

    def back() -> None:
        pushes.release()
        if pushes._value == 1:
            threading.Timer(0.3, grid.begin, (7, "north", KEYS["north"])).start()

    grid.at_push = back
    assert ask(channel, 1, 2) == {1: Joined("north"), 2: Joined("south")}


def test_a_site_that_stays_away_is_late(grid: Nodes, channel: MeetingChannel) -> None:
    del grid.sites[1]
    found = ask(channel, 1, 2, deadline_s=0.3)
    assert found[2] == Joined("south")
    assert isinstance(late := found[1], Failure)
    assert late.reason.startswith("timeout")


def test_what_an_app_says_is_an_answer(grid: Nodes, channel: MeetingChannel) -> None:
    del grid.sites[1]
    grid.of_error = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert ask(channel, 1) == {1: Failure("node 1", "it is away")}


def test_a_node_under_a_name_that_is_not_its_own_keeps_no_site_out(
    grid: Nodes, channel: MeetingChannel
) -> None:
    """While its site is there it gets no request of it; when the site is away both are asked in turn."""
    liar = grid.begin(6, "north", STRANGER)
    assert ask(channel, 1, 2) == {1: Joined("north"), 2: Joined("south")}
    assert liar.asked == 0
    del grid.sites[1]
    grid.begin(7, "north", KEYS["north"])
    assert Joined("north") in [ask(channel, 1)[1] for _ in range(2)]
