"""Requests reach a site only in the coordinator's own envelopes, and sealed replies reach the coordinator alone."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from cloister.clients.app import client_app
from cloister.clients.network import serve as serving
from cloister.clients.network.guard import Guard
from cloister.clients.network.serve import serve
from cloister.clients.site import Site
from cloister.clients.state.kept import run_folder
from cloister.protocol.errors import BudgetError, EncodingError, PolicyError, SignatureError
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.envelope import Envelope, Sender, body_of
from cloister.protocol.messages.messages import (
    TRAIN,
    Agree,
    Begin,
    Contribute,
    Failed,
    Instructions,
    Join,
    Joined,
    Refused,
    Reply,
    Request,
    SumId,
)
from cloister.protocol.messages.wire import Buffer, decode_reply, encode, from_bytes, to_bytes, view
from cloister.server.door.carrier import array_of, identify
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.history import identity, next_start
from cloister.tests.parties.envelopes import COORDINATOR, PUBLIC
from cloister.tests.parties.federation import RUN, Federation, consents_of, tiny
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

IDENTITY, OTHER = new_identity(), new_identity()
ROSTER = Roster.of([Card.of("site-0", IDENTITY), Card.of("site-1", OTHER)])


class Recorder:
    """A site that has joined the run, and notes what reaches it."""

    def __init__(self, state: Path, name: str = "site-0") -> None:
        self.name = name
        self.guard = Guard(name, PUBLIC.hex(), state, lambda _run: IDENTITY)
        self.asked: list[Request] = []
        run_folder(state, RUN).mkdir(parents=True)

    def answer(self, request: Request) -> Reply:
        self.asked.append(request)
        return Joined(self.name)

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        raise AssertionError("it has no policy")


def request(text: str = "{}", run: str = RUN) -> list[Buffer]:
    return encode(Join(run, text, bytes(32), b"", np.empty(0, np.float32)))


def signed(
    frames: Sequence[Buffer],
    *,
    site: str = "site-0",
    run: str = RUN,
    counter: int = 2**32 + 1,
    key: Ed25519PrivateKey = COORDINATOR,
) -> bytes:
    bare = Envelope(run, site, body_of(frames), counter)
    return to_bytes(replace(bare, signature=key.sign(bare.signed)))


@pytest.fixture
def site(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path)


def told(site: Recorder, envelope: bytes, frames: Sequence[Buffer], *, sealed: bool = False) -> Reply:
    return decode_reply(serving.serve(lambda: site, envelope, frames, sealed=sealed))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def of_another_run(frames: Sequence[Buffer]) -> bytes:
    return signed(frames, run="another")


LIES: dict[str, Callable[[Sequence[Buffer]], bytes]] = {
    "none": lambda _frames: b"",
    "garbage": lambda _frames: b"garbage",
    "another member's key": lambda frames: signed(frames, key=OTHER),
    "another site": lambda frames: signed(frames, site="site-1"),
    "another body": lambda _frames: signed(request("{ }")),
    "another run": of_another_run,
    "edited": lambda frames: to_bytes(replace(from_bytes(Envelope, signed(frames)), counter=2**40)),
    "another reply key": lambda frames: to_bytes(
        replace(from_bytes(Envelope, signed(frames)), reply_key=bytes(range(32)))
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_reaches_neither_the_site_nor_its_state(site: Recorder, tmp_path: Path, lie: str) -> None:
    frames, before = request(), bytes_of(tmp_path)
    assert isinstance(told(site, LIES[lie](frames), frames), Failed)
    assert not site.asked
    assert bytes_of(tmp_path) == before
    assert told(site, signed(frames), frames) == Joined("site-0")  # the true one is served after it


VERIFIED = "protocol.messages.envelope:verified"
SIGNATURE = "not signed_by(coordinator, envelope.signed, envelope.signature)"
WITHOUT = {
    "another member's key": Mutant(VERIFIED, SIGNATURE, "False"),
    "edited": Mutant(VERIFIED, SIGNATURE, "False"),
    "another site": Mutant(VERIFIED, "envelope.site != site", "False"),
    "another body": Mutant(VERIFIED, "envelope.body != body_of(frames)", "False"),
    "another run": Mutant("clients.network.serve:serve", "run != named", "False"),
}


@pytest.mark.parametrize("lie", WITHOUT)
def test_a_lie_is_served_without_the_guard_against_it(
    site: Recorder, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    WITHOUT[lie].plant(monkeypatch)
    frames = request()
    assert told(site, LIES[lie](frames), frames) == Joined("site-0")


@pytest.mark.parametrize(("counter", "old"), [(5, "counter < highest"), (6, "digest != known")])
def test_a_replay_is_served_without_the_guard_against_it(
    site: Recorder, monkeypatch: pytest.MonkeyPatch, counter: int, old: str
) -> None:
    frames, other = request("1"), request("2")
    assert told(site, signed(frames, counter=6), frames) == Joined("site-0")
    assert isinstance(told(site, signed(other, counter=counter), other), Failed)
    Mutant("clients.network.guard:_advance", old, "False").plant(monkeypatch)
    assert told(site, signed(other, counter=counter), other) == Joined("site-0")


def test_only_requests_that_come_later_or_again_are_served(site: Recorder) -> None:
    first, second = request("1"), request("2")
    one, two = signed(first, counter=2**32 + 5), signed(second, counter=2**32 + 6)
    assert told(site, one, first) == told(site, one, first) == Joined("site-0")
    assert isinstance(told(site, signed(second, counter=2**32 + 5), second), Failed), "the counter of another"
    assert told(site, two, second) == Joined("site-0")
    late = told(site, one, first)
    assert isinstance(late, Failed)
    assert "counter of the request" in late.reason
    third = signed(first, counter=2 * 2**32 + 1)
    assert told(site, third, first) == Joined("site-0"), "the first request after another start"
    assert len(site.asked) == 4


@pytest.mark.parametrize("guarded", [True, False])
def test_an_older_join_is_refused_as_soon_as_a_site_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """A carrier kept it from an earlier start of the coordinator; while the site has not joined, it can come again."""
    if not guarded:
        Mutant("clients.network.serve:serve", "isinstance(reply, Joined)", "False").plant(monkeypatch)
    federation = Federation(tmp_path, tiny())
    site = federation.site(pinned=False)
    older, newer = (
        encode(replace(federation.join_request(), challenge=bytes([start]) * 32)) for start in (1, 2)
    )

    def answer(frames: Sequence[Buffer], start: int) -> Reply:
        return decode_reply(serving.serve(lambda: site, for_real(site, frames, start << 32), frames, str))

    for _ in range(2):
        refused = answer(older, 1)
        assert isinstance(refused, Failed)
        assert "consent" in refused.reason
    consents_of(site).give(federation.plan.digest())
    assert isinstance(answer(newer, 2), Joined)
    stale = answer(older, 1)
    assert isinstance(stale, Failed if guarded else Joined)
    if isinstance(stale, Failed):
        assert "counter of the request" in stale.reason
        assert isinstance(answer(newer, 2), Joined)
        assert isinstance(answer(newer, 3), Joined)


def test_the_counter_outlives_the_folder_of_the_run(site: Recorder, tmp_path: Path) -> None:
    frames = request()
    first, second = signed(frames, counter=2**32 + 5), signed(frames, counter=2**32 + 6)
    assert told(site, second, frames) == Joined("site-0")
    shutil.rmtree(tmp_path / "runs")
    assert isinstance(told(site, first, frames), Failed)
    assert told(site, second, frames) == Joined("site-0")


def test_the_counter_outlives_the_process(tmp_path: Path) -> None:
    frames = request()
    first, second = signed(frames, counter=2**32 + 7), signed(frames, counter=2**32 + 8)
    process = multiprocessing.get_context("fork").Process(target=_serve_and_die, args=(tmp_path, second))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again = Recorder.__new__(Recorder)
    again.name, again.asked = "site-0", []
    again.guard = Guard("site-0", PUBLIC.hex(), tmp_path, lambda _run: IDENTITY)
    assert isinstance(told(again, first, frames), Failed)
    assert told(again, second, frames) == Joined("site-0")


def _serve_and_die(state: Path, envelope: bytes) -> None:
    told(Recorder(state), envelope, request())
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_start_of_the_coordinator_counts_from_above_the_one_before(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "run")
    with RunFolder.create(files.path, tiny()) as folder:
        run = identity(folder)
    counters = []
    for _ in range(2):
        sender = Sender(COORDINATOR, run, next_start(files))
        counters += [from_bytes(Envelope, sender.envelope("site-0", bytes(32))).counter for _ in range(2)]
    assert counters == sorted(set(counters))
    assert counters[2] >> 32 == 2


def test_a_site_without_a_coordinator_serves_nobody(site: Recorder, tmp_path: Path) -> None:
    site.guard = replace(site.guard, coordinator="")
    frames = request()
    assert isinstance(told(site, signed(frames), frames), Failed)
    assert not site.asked


def test_vectors_are_covered_by_the_hashes_in_the_first_frame(tmp_path: Path) -> None:
    """Of each request that has a vector: one bit of it is changed on the way."""
    federation = Federation(tmp_path, tiny("public.source=public.txt", "model.adapter.scheme=ffa-lora"))
    base = np.ones(4, np.float32)
    join = replace(federation.join_request(), base_hash=vector_hash(base), base=base)
    site = federation.joined()
    told_all = Instructions(SumId(RUN, bytes.fromhex(federation.plan.digest()), TRAIN, 1), vector_hash(base))
    for number, each in enumerate((join, Contribute(told_all, 1, None, base)), 1):
        first, vector = encode(each)
        changed = bytearray(bytes(view(vector)))
        changed[5] ^= 1
        frames = [first, bytes(changed)]
        reply = decode_reply(serve(lambda: site, for_real(site, frames, number), frames, str))
        assert isinstance(reply, Failed)
        assert "the one with the hash" in reply.reason


def for_real(site: Site, frames: Sequence[Buffer], counter: int = 2**50, run: str = RUN) -> bytes:
    site.config = site.config.model_copy(update={"coordinator": PUBLIC.hex()})
    return signed(frames, site=site.name, counter=counter, run=run)


def test_nobody_but_the_coordinator_moves_a_real_site(tmp_path: Path) -> None:
    """A member, or who operates the carrier, sends a join of another plan and the begin of the last attempt."""
    federation = Federation(tmp_path, tiny())
    site = federation.joined()
    site.config = site.config.model_copy(update={"coordinator": PUBLIC.hex(), "plan": ""})
    app, state = client_app(lambda _context, _resident: site), site.config.folder
    plan = bytes.fromhex(federation.plan.digest())
    begin = Agree(SumId(RUN, plan, TRAIN, 1), Begin(1, 2**31 - 1, bytes(32)))
    other = federation.join_request(tiny("run.rounds=2"), "of a stranger")
    identify(1, 1)
    for attempt in (begin, other):
        frames, before = encode(attempt), bytes_of(state)
        for envelope in (b"", signed(frames, site=site.name, key=OTHER), signed(frames, site="site-001")):
            record = ArrayRecord()
            for number, frame in enumerate(map(view, frames)):
                record[f"{number:04d}"] = array_of(frame)
            content = RecordDict({"frames": record, "envelope": ConfigRecord({"signed": envelope})})
            reply = app(Message(content, 1, "query"), Context(1, 1, {}, RecordDict(), {}))
            answer = reply.content["frames"]
            assert isinstance(answer, ArrayRecord)
            failed = decode_reply([answer[name].data for name in sorted(answer)])
            assert isinstance(failed, Failed)
        assert bytes_of(state) == before
    # Signed, both reach it.
    assert not isinstance(
        decode_reply(serve(lambda: site, for_real(site, encode(begin)), encode(begin))), Failed
    )
    offered = decode_reply(
        serve(lambda: site, for_real(site, encode(other), 2**51, other.run), encode(other), str)
    )
    assert isinstance(offered, Failed)
    assert "consent" in offered.reason
    assert (state / "offers").exists()


# Sealed replies.


def exchange(site: Recorder, sender: Sender, frames: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
    envelope = sender.envelope(site.name, body_of(frames))
    return envelope, serve(lambda: site, envelope, frames, sealed=True)


def test_a_sealed_reply_is_read_by_the_coordinator_alone(site: Recorder) -> None:
    sender = Sender(COORDINATOR, RUN, 1, ROSTER)
    envelope, sealed = exchange(site, sender, request())
    assert decode_reply(sender.opened("site-0", envelope, sealed)) == Joined("site-0")
    assert not any(b"Joined" in bytes(view(frame)) for frame in sealed)
    for other in (
        Sender(COORDINATOR, RUN, 1, ROSTER),
        Sender(OTHER, RUN, 1, ROSTER),
    ):  # its reply key is another
        with raises(SignatureError, "reply"):
            other.opened("site-0", envelope, sealed)


def test_a_reply_is_of_one_request_and_one_site(site: Recorder) -> None:
    sender = Sender(COORDINATOR, RUN, 1, ROSTER)
    first, reply = exchange(site, sender, request("1"))
    second, other = exchange(site, sender, request("2"))
    for envelope, frames, name in (
        (first, other, "site-0"),
        (second, reply, "site-0"),
        (first, reply, "site-1"),
    ):
        with raises(SignatureError, "reply"):
            sender.opened(name, envelope, frames)


def test_what_others_make_or_change_is_no_reply(site: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender(COORDINATOR, RUN, 1, ROSTER)
    envelope, sealed = exchange(site, sender, request())
    head, body = (bytes(view(frame)) for frame in sealed)
    for changed in ([head, body[:-1] + bytes([body[-1] ^ 1])], [head, body, body], [head, b""]):
        with raises(SignatureError, "reply"):
            sender.opened("site-0", envelope, changed)
    garbage: list[Sequence[Buffer]] = [[], [head], encode(Joined("site-0")), [b"", body]]
    for frames in garbage:
        with pytest.raises(EncodingError):
            sender.opened("site-0", envelope, frames)
    site.guard = replace(
        site.guard, identity=lambda _run: OTHER
    )  # anybody can seal to the key in the envelope
    again, forged = exchange(site, sender, request())
    with raises(SignatureError, "reply"):
        sender.opened("site-0", again, forged)
    verify = "site.verify(head.signature, _signed(envelope, head.key))"
    Mutant("protocol.messages.envelope:open_sealed", verify, "pass").plant(monkeypatch)
    assert decode_reply(sender.opened("site-0", again, forged)) == Joined("site-0")


def test_a_reply_that_cannot_be_sealed_is_a_failure_that_tells_nothing(site: Recorder) -> None:
    def lost(_run: str) -> Ed25519PrivateKey:
        raise OverflowError("patient 7")

    site.guard = replace(site.guard, identity=lost)
    _, frames = exchange(site, Sender(COORDINATOR, RUN, 1, ROSTER), request())
    assert decode_reply(frames) == Failed("", "OverflowError: the reason is in the site's own log")


def test_over_others_carriers_a_site_seals_or_is_silent(
    site: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = request()
    assert isinstance(told(site, signed(frames), frames, sealed=True), Failed)
    assert not site.asked
    Mutant("clients.network.guard:Guard.admit", "sealed and not envelope.reply_key", "False").plant(
        monkeypatch
    )
    assert told(site, signed(frames), frames, sealed=True) == Joined("site-0")
