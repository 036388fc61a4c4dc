"""One site's side of every carrier: what leaves it, whatever comes and whatever goes wrong; and Flower as a carrier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, validate_object_content
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.clients.app import client_app
from cloister.clients.network.serve import Served, answered, reticent
from cloister.protocol.encoding import pack, unpack
from cloister.protocol.errors import (
    BudgetError,
    CloisterError,
    DataError,
    EngineError,
    PlanError,
    PolicyError,
    StaleError,
    StorageError,
    UpdateError,
)
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages import wire
from cloister.protocol.messages.messages import (
    LONGEST_REASON,
    TRAIN,
    Agree,
    Confirm,
    Contribute,
    Contribution,
    Failed,
    Inbox,
    Instructions,
    Join,
    Joined,
    Refused,
    Reply,
    Request,
    SumId,
    Survivors,
)
from cloister.protocol.messages.refusal import sign_refusal, verify_refusal
from cloister.protocol.messages.wire import VERSION, Buffer, decode_reply, encode, view
from cloister.server.display import describe
from cloister.server.door.carrier import identify
from cloister.server.federation.app import GridChannel
from cloister.server.record.progress import NotJoined
from cloister.server.sum.channel import Failure, reply_in
from cloister.server.sum.members import Members
from cloister.tests.parties.envelopes import guard_of, sender_of
from cloister.tests.parties.federation import RUN, SKELLAM, Federation, changed, contribution_of, tiny, whole

SECRET = "patient 7 was seen in /data/ward-3"
SUM = SumId(RUN, bytes(32), TRAIN, 1)
REQUEST = Agree(SUM, Survivors(bytes(32), ("site-0", "site-1")))


class Acts:
    """A site that does what a test says."""

    name = "site-0"
    guard = guard_of("site-0")

    def __init__(self, act: Callable[[Request], Reply]) -> None:
        self.act = act

    def answer(self, request: Request) -> Reply:
        return self.act(request)

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        assert not isinstance(request, Join)
        return sign_refusal(
            KEY, site=self.name, run=request.sum.run, plan=request.sum.plan, reason="its policy forbids it"
        )


KEY = new_identity()
ROSTER = Roster.of([Card.of("site-0", KEY), Card.of("site-1", new_identity())])


def confirm(_request: Request) -> Reply:
    return Confirm(bytes(32), "site-0", bytes(32))


def raises(error: BaseException) -> Served:
    def act(_request: Request) -> Reply:
        raise error

    return Acts(act)


def told(site: Served, request: Request = REQUEST) -> Reply:
    return decode_reply(answered(lambda: site, encode(request)))


def everything(reply: Reply) -> bytes:
    """All that leaves."""
    return b"".join(bytes(view(frame)) for frame in encode(reply))


# What leaves.


@pytest.mark.parametrize(
    "kind",
    [UpdateError, StorageError, DataError, PlanError],
    ids=lambda kind: kind.__name__,
)
def test_an_error_of_a_site_tells_its_class_alone(kind: type[CloisterError]) -> None:
    error = kind("loss", SECRET, expected=SECRET)
    reply = told(raises(error))
    assert reply == Failed("site-0", f"{kind.__name__}: the reason is in the site's own log")
    assert "patient" not in everything(reply).decode(errors="replace")
    # Without the guard it would have left.
    assert SECRET in str(decode_reply(answered(lambda: raises(error), encode(REQUEST), explain=str)))


@pytest.mark.parametrize(
    "error",
    [ValueError(SECRET), KeyError(SECRET), RuntimeError(SECRET), MemoryError(SECRET), RecursionError(SECRET)],
    ids=repr,
)
def test_a_defect_in_a_site_is_a_failure_that_tells_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "cloister"):
        reply = told(raises(error))
    assert reply == Failed("site-0", f"{type(error).__name__}: the reason is in the site's own log")
    assert "patient 7" in caplog.text  # the site's people need it


def test_an_interrupt_is_not_a_reply() -> None:
    with pytest.raises(KeyboardInterrupt):
        told(raises(KeyboardInterrupt()))


def test_a_refusal_of_the_secure_sum_is_told_in_full() -> None:
    """It is about the coordinator's own messages."""
    error = StaleError("round", 3, expected="2, the round of the attempt")
    assert told(raises(error)) == Failed("site-0", str(error))


def test_a_reason_is_one_printable_line_of_bounded_length() -> None:
    error = StaleError("round", "\x1b[2J\n" * 9, expected="\x1b[2J\n" * LONGEST_REASON)
    reply = told(raises(error))
    assert isinstance(reply, Failed)
    assert reply.reason.isprintable()
    assert len(reply.reason) == LONGEST_REASON


@pytest.mark.parametrize("kind", [PolicyError, BudgetError], ids=lambda kind: kind.__name__)
def test_what_policy_or_budget_forbids_is_a_signed_refusal(kind: type[PolicyError | BudgetError]) -> None:
    reply = told(raises(kind("epsilon", SECRET, expected="less")))
    assert isinstance(reply, Refused)
    assert (reply.site, reply.run, reply.reason) == ("site-0", RUN, "its policy forbids it")
    assert SECRET.encode() not in everything(reply)
    verify_refusal(reply, ROSTER, run=RUN, plan=SUM.plan)


def test_a_refusal_that_cannot_be_signed_is_a_failure_that_tells_nothing() -> None:
    class Keyless(Acts):
        def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
            raise DataError("identity", SECRET, expected="a key")

    def forbid(_request: Request) -> Reply:
        raise PolicyError("rounds", 3, expected="1")

    assert told(Keyless(forbid)) == Failed("site-0", "DataError: the reason is in the site's own log")


@pytest.mark.parametrize("error", [PlanError("site", SECRET, expected="a file"), OSError(SECRET)], ids=repr)
def test_a_site_that_cannot_be_opened_fails_without_a_name(error: Exception) -> None:
    def find() -> Served:
        raise error

    reply = decode_reply(answered(find, encode(REQUEST)))
    assert reply == Failed("", f"{type(error).__name__}: the reason is in the site's own log")


@given(frames=st.lists(st.binary(max_size=40), max_size=3))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_garbage_is_answered_by_a_failure_and_the_site_is_not_asked(frames: list[bytes]) -> None:
    asked: list[Request] = []
    site = Acts(lambda request: asked.append(request) or confirm(request))  # type: ignore[func-returns-value]  # append gives None
    reply = decode_reply(answered(lambda: site, frames))
    assert isinstance(reply, Failed)
    assert reply.site == "site-0"
    assert reply.reason
    assert not asked


def test_a_request_that_is_cut_or_has_frames_too_many_is_answered_by_a_failure() -> None:
    first = bytes(view(encode(REQUEST)[0]))
    for frames in ([first[:-1]], [first + b"0"], [first, b""], [], encode(confirm(REQUEST))):
        reply = decode_reply(answered(lambda: Acts(confirm), frames))
        assert isinstance(reply, Failed)
    assert decode_reply(answered(lambda: Acts(confirm), [first])) == confirm(REQUEST)


# A real site.


def test_an_error_tells_the_coordinator_nothing_of_a_sites_records(tmp_path: Path) -> None:
    """A plan that looks for another field in the records makes an error that quotes one."""
    federation = Federation(tmp_path, tiny())
    nosy = changed(federation.plan, "data", format="messages", messages_field="text")
    request = encode(federation.join_request(nosy))
    site = federation.consenting(plan=nosy)
    assert decode_reply(answered(lambda: site, request)) == Failed(
        "site-000", "DataError: the reason is in the site's own log"
    )
    explained = decode_reply(answered(lambda: federation.consenting(1, plan=nosy), request, explain=str))
    assert isinstance(explained, Failed)
    assert "was seen on day" in explained.reason  # which shows what would have left


def test_a_real_site_signs_its_refusal_to_join(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*SKELLAM))
    site = federation.site(policy="most_rounds = 1\n")
    reply = decode_reply(answered(lambda: site, encode(federation.join_request())))
    assert isinstance(reply, Refused)
    plan = bytes.fromhex(federation.plan.digest())
    verify_refusal(reply, federation.roster, run=RUN, plan=plan)
    assert "run.rounds is 3: expected at most 1, by most_rounds of the site's policy" in reply.reason


def test_reticence_does_not_depend_on_the_words() -> None:
    for error in (ValueError(SECRET), UpdateError("x", SECRET, expected="y"), KeyError(SECRET)):
        assert SECRET not in reticent(error)


# Flower as a carrier.


class Wire(Grid):
    """Flower's grid in this process: one site behind each node; a test may change what comes back."""

    def __init__(self, sites: dict[int, Served]) -> None:
        self._apps = {
            node: client_app(lambda _context, _resident, site=site: site)  # type: ignore[misc]  # each its own
            for node, site in sites.items()
        }
        self.change: Callable[[Message, Message], Message | None] = lambda _message, reply: reply
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}

    # The channel asks for the nodes and exchanges messages; a use of anything else of Flower's Grid ends the test.

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self._apps)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.sent.append(message)
            ids.append(f"{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            node = message.metadata.dst_node_id
            identify(1, node)
            reply = self.change(message, self._apps[node](message, Context(1, node, {}, RecordDict(), {})))
            identify(1, 0)
            if reply is not None:
                self.replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]


MODEL = np.linspace(-1, 1, 50, dtype=np.float32)
VECTOR = np.arange(50, dtype=np.uint32)


class Echo(Acts):
    """A site that contributes a fixed vector."""

    def __init__(self, name: str) -> None:
        super().__init__(self.contribute)
        self.name = name
        self.guard = guard_of(name)
        self.seen: list[Request] = []

    def contribute(self, request: Request) -> Reply:
        self.seen.append(request)
        if isinstance(request, Join):
            return Joined(self.name)
        assert isinstance(request, Contribute)
        return contribution_of(request, self.name, VECTOR)


@pytest.fixture
def grid() -> Wire:
    identify(1, 0)
    return Wire({node: Echo(f"site-{node}") for node in (1, 2, 3)})


def inbox(node: int) -> Inbox:
    return Inbox(bytes(32), ("site-1", "site-2"), (("site-1", bytes([node])),), ())


def ask_of(node: int) -> Contribute:
    return Contribute(Instructions(SUM, bytes(32), (("a feature", b"told"),)), 1, inbox(node), MODEL)


def channel_of(grid: Grid) -> GridChannel:
    return GridChannel(grid, sender_of(RUN), {node: f"site-{node}" for node in grid.get_node_ids()})


def ask(grid: Grid, deadline_s: float = 60) -> dict[int, Reply | Failure]:
    requests = {node: ask_of(node) for node in grid.get_node_ids()}
    return dict(channel_of(grid).ask(requests, deadline_s, group="1"))


def test_requests_and_replies_survive_flowers_messages(grid: Wire) -> None:
    replies = ask(grid)
    assert sorted(replies) == [1, 2, 3]
    for node, reply in replies.items():
        assert isinstance(reply, Contribution)
        assert (reply.site, reply.sum) == (f"site-{node}", SUM)
        assert np.array_equal(whole(reply), VECTOR)
        assert whole(reply).dtype == np.uint32


def deployed(message: Message) -> Message:
    """The message as a deployed node receives it: through the objects that Flower's SuperLink checks and stores."""
    objects = {name: nested.deflate() for name, nested in get_all_nested_objects(message).items()}
    for content in objects.values():
        validate_object_content(content)
    received = inflate_object_from_contents(message.object_id, objects)
    assert isinstance(received, Message)
    return received


@pytest.mark.parametrize("chunk", [64, 5 * 2**20])
def test_requests_and_replies_survive_flowers_own_transport(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The apps give Flower memoryviews where it documents bytes; a deployment serializes them in chunks."""
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", chunk)

    class Deployed(Wire):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            return super().push_messages([deployed(message) for message in messages])

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return [deployed(reply) for reply in super().pull_messages(message_ids)]

    identify(1, 0)
    sites = {node: Echo(f"site-{node}") for node in (1, 2)}
    replies = ask(Deployed(dict(sites)))
    for node, site in sites.items():
        (request,) = site.seen
        assert isinstance(request, Contribute)
        assert request.inbox == inbox(node)
        assert np.array_equal(request.model, MODEL)
        reply = replies[node]
        assert isinstance(reply, Contribution)
        assert np.array_equal(whole(reply), VECTOR)


def test_each_site_gets_its_own_request_and_all_of_them_one_vector() -> None:
    """An engine sends a vector that many messages share only once, if it is one object."""
    sites = {node: Echo(f"site-{node}") for node in (1, 2, 3)}
    grid = Wire(dict(sites))
    ask(grid)
    for node, site in sites.items():
        (request,) = site.seen
        assert isinstance(request, Contribute)
        assert request.inbox == inbox(node)
        assert np.array_equal(request.model, MODEL)
        assert not request.model.flags.writeable
    vectors = [message.content["frames"]["0001"] for message in grid.sent]
    assert vectors[0] is vectors[1] is vectors[2]


def test_a_site_that_does_not_answer_in_time_is_a_timeout(grid: Wire) -> None:
    grid.change = lambda _message, reply: None if reply.metadata.src_node_id == 2 else reply
    replies = ask(grid, 0.2)
    assert replies[2] == Failure("node 2", "timeout: no answer within 0.2 s")
    assert isinstance(replies[1], Contribution)
    assert isinstance(replies[3], Contribution)


def test_an_error_of_flower_is_a_failure_in_one_printable_line(grid: Wire) -> None:
    reasons = iter(["\x1b[2Jlost\nits way", "", None])
    grid.change = lambda message, _reply: Message(Error(1, next(reasons)), reply_to=message)
    replies = ask(grid)
    assert [reply.reason for reply in replies.values() if isinstance(reply, Failure)] == [
        "?[2Jlost its way",
        "no reason given",
        "no reason given",
    ]


def frames_of(*frames: bytes) -> RecordDict:
    record = ArrayRecord()
    for number, frame in enumerate(frames):
        record[f"{number:04d}"] = Array("uint8", (len(frame),), "cloister.frame", frame)
    return RecordDict({"frames": record})


CUT = [bytes(view(frame)) for frame in encode(contribution_of(ask_of(3), "site-2", VECTOR))]
CUT[1] = CUT[1][:-1]
"""A contribution whose vector has no whole number of elements."""
GARBAGE = [
    RecordDict(),
    RecordDict({"frames": ConfigRecord({"0000": b""})}),
    RecordDict({"other": ConfigRecord({"0000": b""})}),
    frames_of(),
    frames_of(b""),
    frames_of(b"garbage", b""),
    frames_of(*CUT),
    frames_of(bytes(view(encode(REQUEST)[0]))),
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_records_that_are_no_reply_are_a_failure_of_their_node(grid: Wire, content: RecordDict) -> None:
    def change(_message: Message, reply: Message) -> Message:
        if reply.metadata.src_node_id == 2:
            reply.content = content
        return reply

    grid.change = change
    replies = ask(grid)
    assert isinstance(replies[1], Contribution)
    failure = replies[2]
    assert isinstance(failure, Failure)
    assert failure.site == "node 2"
    assert failure.reason.isprintable()
    assert isinstance(replies[3], Contribution)


@pytest.mark.parametrize("content", GARBAGE[:-1], ids=range(len(GARBAGE) - 1))
def test_records_that_are_no_request_are_answered_by_a_failure(content: RecordDict) -> None:
    site = Echo("site-1")
    app = client_app(lambda _context, _resident: site)
    identify(1, 1)
    reply = app(Message(content, 1, "query"), Context(1, 1, {}, RecordDict(), {}))
    assert not reply.has_error()
    frames = reply.content["frames"]
    assert isinstance(frames, ArrayRecord)
    failed = decode_reply([frames[name].data for name in sorted(frames)])
    assert isinstance(failed, Failed)
    assert failed.site == "", "it is told to nobody who has signed nothing"
    assert not site.seen


def test_a_node_that_answers_twice_or_unasked_is_heard_once() -> None:
    class Twice(Wire):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = super().pull_messages(message_ids)
            return [*replies, *replies]

    grid = Twice({node: Echo(f"site-{node}") for node in (1, 2)})
    request = Contribute(Instructions(SUM, bytes(32), (("a feature", b"told"),)), 1, None, MODEL)
    answers = list(channel_of(grid).ask({1: request, 2: request}, 60, group="1"))
    assert [node for node, _ in answers] == [1, 2]


# Another release.

OLD = f"{VERSION.rpartition('/')[0]}/{int(VERSION.rpartition('/')[2]) - 1}"
"""The version of the messages of the release before this one."""
FIX = "install the same release of cloister at the coordinator and at the sites"


def released(frames: Sequence[Buffer], version: str) -> list[bytes]:
    """A message as another release sends it: its first field is that release's version."""
    first, *vectors = [bytes(view(frame)) for frame in frames]
    return [pack(version, *unpack(first)[1:]), *vectors]


def of_old_sites(*nodes: int) -> Wire:
    """Four nodes, of which some have the release before."""
    grid = Wire({node: Echo(f"site-{node}") for node in (1, 2, 3, 4)})

    def change(_message: Message, reply: Message) -> Message:
        if reply.metadata.src_node_id in nodes:
            # A site that cannot read the request answers with a failure, in its own version.
            failed = Failed("", f"version of the message is {VERSION!r}: expected {OLD}; {FIX}")
            reply.content = frames_of(*released(encode(failed), OLD))
        return reply

    grid.change = change
    return grid


def join(grid: Grid, heard: list[Failure]) -> Members:
    return Members(channel_of(grid), tiny("aggregation.secure=false"), RUN, heard.append)


def test_a_site_of_another_release_is_named_at_the_join_with_what_to_do() -> None:
    heard: list[Failure] = []
    line = f"version of the message is {OLD!r}: expected {VERSION}; {FIX}"
    assert join(of_old_sites(2), heard).sites == ["site-1", "site-3", "site-4"]
    assert heard == [Failure("node 2", line)]
    assert describe(NotJoined(heard[0].site, heard[0].reason)) == f"node 2 did not join: {line}"
    with pytest.raises(EngineError) as stopped:
        join(of_old_sites(1, 2, 3, 4), heard)
    reasons = "; ".join(f"node {node}: {line}" for node in range(1, 5))
    assert str(stopped.value) == f"sites is 0: expected at least 3 of 4 to join ({reasons})"


def test_a_coordinator_of_another_release_hears_which_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot read the reply either: its own error, with both versions, is the line that its people see."""
    site = Echo("site-1")
    request = Join(RUN, tiny().to_json(), bytes(32), b"", np.empty(0, np.float32))
    answer = answered(lambda: site, released(encode(request), OLD))
    line = f"version of the message is {OLD!r}: expected {VERSION}; {FIX}"
    assert decode_reply(answer) == Failed("site-1", line)
    assert not site.seen
    assert line in caplog.text  # for the site's people
    monkeypatch.setattr("cloister.protocol.messages.wire.VERSION", OLD)
    wire._decoded.cache_clear()  # another release is another process
    assert reply_in(answer, 1) == Failure(
        "node 1", f"version of the message is {VERSION!r}: expected {OLD}; {FIX}"
    )


def test_a_node_whose_reply_cannot_be_read_does_not_join_and_the_others_do() -> None:
    for content in GARBAGE:
        grid = Wire({node: Echo(f"site-{node}") for node in (1, 2, 3, 4)})

        def change(_message: Message, reply: Message, content: RecordDict = content) -> Message:
            if reply.metadata.src_node_id == 2:
                reply.content = content
            return reply

        grid.change = change
        heard: list[Failure] = []
        assert join(grid, heard).sites == ["site-1", "site-3", "site-4"]
        assert [failure.site for failure in heard] == ["node 2"]
