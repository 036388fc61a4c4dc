"""A sum over a cohort as the adapters carry it: both ends are real, and the channel is in this process."""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.aggregation.secure import keys
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import Member
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.span import Piece, manifest_digest, manifest_of
from cloister.clients.state.attempt import Attempts
from cloister.clients.state.attempt_files import AttemptFiles
from cloister.clients.training.work import masking
from cloister.lm.model.layout import Layout
from cloister.protocol.errors import (
    AgreementError,
    AnsweredError,
    EncodingError,
    SecureSumError,
    StaleError,
    StepError,
    TooFewSitesError,
)
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import (
    EVALUATE,
    TRAIN,
    Advertise,
    Agree,
    Begin,
    Confirm,
    Contribution,
    Failed,
    Inbox,
    Join,
    Masked,
    Reply,
    Request,
    Reveal,
    Shares,
    Signed,
    Step,
    SumId,
    Survivors,
    Told,
    Unmask,
)
from cloister.protocol.messages.wire import Buffer, decode_reply, decode_request, encode, view
from cloister.protocol.plan.soundness import parse
from cloister.server.record import journal as steps
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.journal import Journal
from cloister.server.record.progress import AttemptFailed, Event, SiteFailed
from cloister.server.sum.channel import Failure
from cloister.server.sum.members import Members
from cloister.server.sum.party import Party
from cloister.server.sum.sum import sum_over
from cloister.server.sum.wanted import Failed as SumFailed
from cloister.server.sum.wanted import Total, Wanted
from cloister.tests.parties.federation import RUN, Loopback, VectorSite, step_of, whole
from cloister.tests.tools.power import Power, killed_at
from cloister.tests.tools.raises import raises
from cloister.tests.tools.seeds import seed_of

NAMES = [f"site-{number:03d}" for number in range(12)]
IDENTITIES = {name: new_identity() for name in NAMES}
MODEL = np.linspace(-1, 1, 50, dtype=np.float32)
LAYOUT = Layout.of([("weights", torch.nn.Parameter(torch.zeros(50)))])
STEPS = ["advertise", "share", "update", "confirm", "unmask"]


def update_of(name: str) -> np.ndarray:
    return np.random.default_rng(NAMES.index(name)).normal(0, 0.1, 50).astype(np.float32)


class Run:
    """Sites whose updates are given, each with its own folder, and the coordinator's party for their sum.

    Args:
        folder: Where they keep what they must.
        sites: Number of sites.
        settings: Of the plan, besides those that these tests share.
    """

    def __init__(self, folder: Path, sites: int, *settings: str) -> None:
        self.folder = folder
        self.plan = parse("", [f"cohort.sites={sites}", "cohort.quorum=0.5", "local.steps=1", *settings])
        self.names = NAMES[:sites]
        self.roster = Roster.of(Card.of(name, IDENTITIES[name]) for name in self.names)
        self.contract = Sums(self.plan, LAYOUT.size, LAYOUT.digest()).contract(TRAIN, RUN, self.roster)
        self.minimum = 3
        """Fewest sites that each site sums with."""
        for name in self.names:
            AttemptFiles.create(folder / name, folder)
        self.live: dict[tuple[str, int], Attempts] | None = None
        """Attempts in memory, for sites whose process lives on; None for a new process at every message."""
        self.channel = Loopback({name: partial(self.site, name) for name in self.names})
        self.events: list[Event] = []
        self.journal = Journal(folder / "journal")
        members = Members(self.channel, self.plan, RUN, lambda _failure: None, roster=self.roster)
        self.party = Party(
            Sums.over(self.plan, LAYOUT, b""),
            RUN,
            self.roster,
            members,
            self.journal,
            KeptAttempt(folder / "attempt"),
            self.events.append,
            clock=lambda: 0.0,
        )

    def attempts(self, name: str) -> Attempts:
        """What a process of the site has of its attempts."""
        member = Member(name, IDENTITIES[name], self.minimum)
        made = Attempts(self.folder / name, self.contract, member)
        return made if self.live is None else self.live.setdefault((name, self.minimum), made)

    def site(self, name: str) -> VectorSite:
        secure = self.plan.aggregation.secure
        return VectorSite(
            name,
            IDENTITIES[name],
            self.attempts(name),
            partial(self.vector, name),
            roster=self.roster.hash,
            secure=secure,
        )

    def vector(self, name: str) -> RingVector:
        layout = Sums(self.plan, LAYOUT.size).training
        counters = {"tokens": 100 + NAMES.index(name), "loss": 7}
        values, clipped = layout.encode(update_of(name), counters["tokens"], seed_of(NAMES.index(name)))
        tail = layout.tail({"weight": counters["tokens"], "clipped": clipped, **counters})
        return np.concatenate([values, tail])

    def pieces(self, name: str) -> list[Piece]:
        """The vector in two spans, as a site with two ranks has it."""
        vector = self.vector(name)
        return [(0, vector[:20].copy()), (20, vector[20:].copy())]

    def sum(self, number: int = 1) -> Total | SumFailed:
        return sum_over(self.party, Wanted(TRAIN, number, MODEL))

    def reasons(self) -> list[str]:
        """Why sites were left out."""
        return [event.reason for event in self.events if isinstance(event, SiteFailed)]


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def open_(sites: int = 6, *settings: str) -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, sites, *settings))
        return runs[-1]

    yield open_
    for run in runs:
        run.journal.__exit__()


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is synced to disk, for a test of many runs that no power cut ends."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


def expected(names: Iterable[str]) -> dict[str, Any]:
    names = list(names)
    weights = np.array([100 + NAMES.index(name) for name in names])
    mean = np.average([update_of(name).astype(np.float64) for name in names], axis=0, weights=weights)
    return {"mean": mean, "tokens": int(weights.sum())}


@pytest.mark.slow
@given(
    bits=st.sampled_from([16, 32]),
    sites=st.integers(7, 9),  # of which two may drop out
    down=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(STEPS)), max_size=2, unique_by=lambda d: d[0]),
    lives_on=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("unsynced")
def test_the_secure_sum_is_the_plain_sum_to_the_last_bit(
    open_run: Callable[..., Run], bits: int, sites: int, down: list[tuple[int, str]], lives_on: bool
) -> None:
    ring = f"aggregation.ring_bits={bits}"
    secure, plain = open_run(sites, ring), open_run(sites, ring, "aggregation.secure=false")
    secure.live = {} if lives_on else None
    lost = {NAMES[index % sites]: step for index, step in down}
    secure.channel.lose(*((name, step, 1) for name, step in lost.items()))
    # A site that drops out after its vector is in the sum still counts.
    counted = [name for name in secure.names if lost.get(name) not in ("advertise", "share", "update")]
    plain.channel.lose(*((name, "update", 1) for name in set(plain.names) - set(counted)))
    masked, clear = secure.sum(), plain.sum()
    assert isinstance(masked, Total)
    assert isinstance(clear, Total)
    assert masked.sites == clear.sites == len(counted)
    assert np.array_equal(masked.opened.mean, clear.opened.mean)
    assert masked.opened.counters == clear.opened.counters
    assert masked.opened.counters["tokens"] == expected(counted)["tokens"]
    np.testing.assert_allclose(
        masked.opened.mean, expected(counted)["mean"], atol=0.02 if bits == 16 else 1e-6
    )


def test_what_arrives_is_masked_and_differs_in_every_attempt(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    seen: list[np.ndarray] = []

    def watch(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution):
            seen.append(whole(reply))
        return reply

    run.channel.tamper = watch
    # Too few sites sign in the first try: all vectors are sent again, under new masks.
    run.channel.lose(*((name, "confirm", 1) for name in NAMES[:4]))
    total = run.sum()
    assert isinstance(total, Total)
    assert total.attempts == 2
    assert len(seen) == 12
    for name, first, second in zip(run.names, seen[:6], seen[6:], strict=True):
        plain = run.vector(name)
        assert not np.any(first == plain)
        assert not np.any(first == second)


def test_too_few_sites_end_the_attempt_with_nothing_revealed(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    run.channel.lose(*((name, "confirm", tries) for name in NAMES[:4] for tries in range(1, 9)))
    assert run.sum() == SumFailed(3, bound=False)
    assert not any(step == "unmask" for step, _ in run.channel.asked)
    for name in run.names:
        with AttemptFiles.turn(run.folder / name, run.contract.run) as files:
            assert files.state(None).marks.answered is None
    # A later process tries again, and counts its tries from there.
    assert run.sum() == SumFailed(6, bound=False)


def test_once_shares_were_asked_for_only_those_survivors_are_asked_again(
    open_run: Callable[..., Run],
) -> None:
    run = open_run(6)
    run.channel.lose(("site-005", "update", 1), *((name, "unmask", 1) for name in NAMES[:3]))
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites, total.cohort) == (2, 5, 6)
    asked = run.channel.asked
    assert ("update", "site-005") not in asked[asked.index(("unmask", "site-004")) :]


def test_a_round_whose_survivors_are_lost_is_bound(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    run.channel.lose(
        *((name, "unmask", 1) for name in NAMES[:3]),
        *(("site-000", "update", tries) for tries in range(2, 9)),
    )
    assert run.sum() == SumFailed(3, bound=True)
    # The sites that answered refuse another list, so no other site is asked for anything more in vain.
    assert sum(step == "confirm" for step, _ in run.channel.asked) == 6
    # The next round is not bound.
    run.channel.lose()
    assert isinstance(run.sum(2), Total)


# A coordinator that is killed goes on with the same attempt.


class Watched:
    """What a coordinator asks and what sites answer, byte for byte, until it is killed.

    Args:
        run: The run.
        lost: A site and the step at which its answer is lost, until the coordinator is killed.
    """

    def __init__(self, run: Run, lost: tuple[str, str] = ("", "")) -> None:
        self._run = run
        self.said: dict[tuple[str, str], tuple[bytes, ...]] = {}
        """By step and site: request and answer."""
        self._request = b""
        run.channel.before, run.channel.garble = self._asked, self._answered
        run.channel.lose((*lost, 1))

    def kill_at(self, step: str, site: str) -> None:
        """Let the coordinator die when a site has answered a step, and cut its power; then start it again."""

        def die(now: str, reply: Reply) -> Reply:
            if (now, reply.site) == (step, site):
                raise KeyboardInterrupt
            return reply

        run = self._run
        run.channel.tamper = die
        with pytest.raises(KeyboardInterrupt):
            run.sum()
        run.channel.tamper = lambda _step, reply: reply
        run.channel.lose()
        run.channel.asked.clear()
        run.party = dataclasses.replace(run.party, complaints=set(), left_out={}, refused=set())

    def _asked(self, _site: str, request: Request) -> None:
        first, *_ = encode(request)
        self._request = bytes(view(first))

    def _answered(self, site: str, step: str, frames: list[Buffer]) -> list[Buffer]:
        if step != "join":
            said = (self._request, *(bytes(view(frame)) for frame in frames))
            assert self.said.setdefault((step, site), said) == said
        return frames


@pytest.mark.parametrize("killer", [0, 5])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_coordinator_goes_on_with_the_same_attempt(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, step: str, killer: int
) -> None:
    """A site that was a dropout of the step before is there again: a coordinator that forgot it would ask it."""
    run = open_run(6)
    away = "site-002" if step != "advertise" else ""
    earlier = STEPS[max(0, STEPS.index(step) - 1)]
    watched = Watched(run, (away, earlier))
    (run.folder / "attempt").mkdir()
    with Power(run.folder / "attempt", monkeypatch) as power:
        watched.kill_at(step, run.names[killer])
        power.cut()
        total = run.sum()
    assert isinstance(total, Total)
    summed = [name for name in run.names if name != away or step == "unmask"]  # its vector is in the sum
    assert (total.attempts, total.sites) == (1, len(summed))
    assert total.opened.counters["tokens"] == expected(summed)["tokens"]
    asked = {now for now, _ in run.channel.asked}
    assert asked == set(STEPS[STEPS.index(step) :])
    assert run.journal.count(f"{TRAIN} {steps.BEGUN}", 1) == 1


def test_a_coordinator_that_is_killed_again_and_again_asks_the_same_again(
    open_run: Callable[..., Run],
) -> None:
    run = open_run(6)
    watched = Watched(run)
    for step in STEPS:
        for site in (run.names[0], run.names[-1]):
            watched.kill_at(step, site)
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (1, 6)


def test_a_sum_that_was_opened_is_opened_again_without_asking_a_site(open_run: Callable[..., Run]) -> None:
    """The coordinator is killed between the sum and what makes the round done."""
    run = open_run(6)
    first = run.sum()
    run.channel.asked.clear()
    again = run.sum()
    assert isinstance(first, Total)
    assert isinstance(again, Total)
    assert np.array_equal(again.opened.mean, first.opened.mean)
    assert not run.channel.asked


@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("journal", [False, True], ids=["replies", "replies and journal"])
def test_a_coordinator_that_lies_of_what_it_asked_gets_no_second_answer(
    open_run: Callable[..., Run], step: str, journal: bool
) -> None:
    """It is killed, and starts again as if it had asked for nothing, without one of the sites."""
    run = open_run(6)
    sent: dict[tuple[bytes, str, str], set[bytes]] = {}
    """By attempt, step and site, what the site has sent."""

    def note(site: str, step: str, frames: list[Buffer]) -> list[Buffer]:
        reply = decode_reply(frames)
        signed = reply.statement if isinstance(reply, Contribution) else reply
        if isinstance(signed, Signed):
            answers = sent.setdefault((signed.context, step, site), set())
            answers.add(b"".join(bytes(view(frame)) for frame in frames))
        return frames

    watched = Watched(run)
    run.channel.garble = note
    watched.kill_at(step, run.names[3])
    assert (step, run.names[3]) in {(now, site) for _, now, site in sent}
    shutil.rmtree(run.folder / "attempt")
    if journal:
        run.journal.__exit__()
        (run.folder / "journal").unlink()
        run.journal = Journal(run.folder / "journal")
        run.party = dataclasses.replace(run.party, journal=run.journal)
    run.channel.down = lambda site, _step, _request: site == run.names[5]
    total = run.sum()
    assert {len(answers) for answers in sent.values()} == {1}
    if step == "unmask":  # some have revealed their shares for all six
        assert isinstance(total, SumFailed)
    else:
        assert isinstance(total, Total)
        assert (total.attempts, total.sites) == (2, 5)


def test_a_damaged_sum_of_vectors_ends_the_attempt_and_not_the_round(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    Watched(run).kill_at("unmask", run.names[3])
    path = run.folder / "attempt" / "sum"
    damaged = bytearray(path.read_bytes())
    damaged[7] ^= 1
    path.write_bytes(damaged)
    run.channel.garble = lambda _site, _step, frames: frames
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (2, 6)
    assert total.opened.counters["tokens"] == expected(run.names)["tokens"]


def test_a_liar_that_was_seen_before_a_crash_is_left_out_after_it(open_run: Callable[..., Run]) -> None:
    run = open_run(8)

    def lie(step: str, reply: Reply) -> Reply:
        if isinstance(reply, Reveal) and reply.site == NAMES[0]:
            wrong = tuple((site, bytes(33)) for site, _ in reply.self_shares)
            return cast(Reply, resigned(dataclasses.replace(reply, self_shares=wrong)))
        return reply

    run.channel.tamper = lie
    assert isinstance(run.sum(), Total)
    run.party = dataclasses.replace(run.party, left_out={})
    run.sum()
    assert set(run.party.left_out) == {NAMES[0]}


# What a site or the network makes of a reply.


@pytest.mark.parametrize(
    ("manifest_too", "reason"), [(False, "match the hashes of the manifest"), (True, "that the site signed")]
)
def test_a_vector_that_is_not_the_signed_one_is_left_out(
    open_run: Callable[..., Run], manifest_too: bool, reason: str
) -> None:
    run = open_run(6)

    def swap(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == "site-001":
            vector = whole(reply).copy()
            vector[0] += 1
            manifest = manifest_of([(0, vector)]) if manifest_too else reply.manifest
            return dataclasses.replace(reply, manifest=manifest, spans=(vector,))
        return reply

    run.channel.tamper = swap
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 5
    assert total.opened.counters["tokens"] == expected(n for n in run.names if n != "site-001")["tokens"]
    (given,) = run.reasons()
    assert reason in given


@pytest.mark.parametrize("how", ["another site's statement", "no statement"])
def test_a_vector_without_a_statement_of_its_own_site_is_left_out(
    open_run: Callable[..., Run], how: str
) -> None:
    """site-001 sends what site-000 signed, which was lost on its way: it would count as site-001's vector."""
    run = open_run(6)
    stolen: list[Contribution] = []

    def steal(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == "site-000":
            stolen.append(reply)
            return Failed("site-000", "lost")
        if isinstance(reply, Contribution) and reply.site == "site-001":
            if how == "no statement":
                return dataclasses.replace(reply, statement=None)
            return dataclasses.replace(stolen[0], site="site-001")
        return reply

    run.channel.tamper = steal
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 4
    assert total.opened.counters["tokens"] == expected(run.names[2:])["tokens"]
    assert run.reasons()[1] == "statement of site-001: expected one that the site itself has signed"


@pytest.mark.parametrize("name", ["site-000", "site-001"])
def test_a_site_that_speaks_for_another_is_left_out(open_run: Callable[..., Run], name: str) -> None:
    """site-001 answers with the keys of site-000, in either name."""
    run = open_run(6)
    stolen: list[Advertise] = []

    def impersonate(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Advertise):
            stolen.append(reply)
            if reply.site == "site-001":
                return dataclasses.replace(stolen[0], site=name)
        return reply

    run.channel.tamper = impersonate
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 5
    (reason,) = run.reasons()
    assert ("under the name 'site-000'" if name == "site-000" else "signature") in reason


@pytest.mark.parametrize("secure", ["true", "false"])
@pytest.mark.parametrize("what", ["round", "purpose", "run", "plan", "instructions"])
def test_a_contribution_to_another_sum_is_left_out(
    open_run: Callable[..., Run], secure: str, what: str
) -> None:
    """It was late, or a site mixed it up: without masks nothing else would tell."""
    run = open_run(6, f"aggregation.secure={secure}")
    other: dict[str, dict[str, Any]] = {
        "round": {"round": 2},
        "purpose": {"purpose": "evaluate"},
        "run": {"run": "another"},
        "plan": {"plan": bytes(32)},
    }

    def late(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == "site-001":
            if what == "instructions":
                return dataclasses.replace(reply, told=bytes(32))
            return dataclasses.replace(reply, sum=dataclasses.replace(reply.sum, **other[what]))
        return reply

    run.channel.tamper = late
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 5
    assert total.opened.counters["tokens"] == expected(n for n in run.names if n != "site-001")["tokens"]
    (reason,) = run.reasons()
    assert reason.startswith("stale update: ")


@pytest.mark.parametrize("step", STEPS)
def test_a_reply_of_another_step_is_left_out(open_run: Callable[..., Run], step: str) -> None:
    run = open_run(6)
    first: dict[str, Reply] = {}

    def repeat(now: str, reply: Reply) -> Reply:
        earlier = first.setdefault(reply.site, reply)
        if reply.site == "site-001" and now == step:
            return Failed("site-001", "") if now == "advertise" else earlier
        return reply

    run.channel.tamper = repeat
    assert isinstance(run.sum(), Total)
    (reason,) = run.reasons()
    assert reason == "no reason given" or reason.startswith("it answered with Advertise, not with ")


def test_an_attempt_that_failed_says_why(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    run.channel.lose(*((name, "advertise", 1) for name in NAMES[:4]))
    assert isinstance(run.sum(), Total)
    (failed,) = [event for event in run.events if isinstance(event, AttemptFailed)]
    assert "sites" in failed.reason
    assert run.journal.count(f"{TRAIN} {steps.FAILED}", 1) == 1


# The site's side, across processes.


def begun(open_run: Callable[..., Run]) -> tuple[Run, dict[str, Inbox]]:
    """Sites that have shared their secrets; the inbox of each."""
    run = open_run(4)
    coordinator = SecureCoordinator(run.contract, 1, 1, vector_hash(MODEL))
    for name in run.names:
        advertised = run.attempts(name).agree(coordinator.begin, 1)
        assert isinstance(advertised, Advertise)
        assert run.attempts(name).agree(coordinator.begin, 1) == advertised  # asked twice
        coordinator.advertised(advertised)
    peers = coordinator.peers()
    for name in run.names:
        shares = run.attempts(name).agree(peers, 1)
        assert isinstance(shares, Shares)
        coordinator.shared(shares)
    return run, coordinator.inboxes()


def mask(run: Run, inbox: Inbox, pieces: list[Piece] | None = None) -> tuple[Masked, bytes]:
    """The first site's answer to the request for its vector, in a new process: statement, and vector."""
    name, model = run.names[0], vector_hash(MODEL)
    made = run.pieces(name) if pieces is None else pieces
    statement, masked = run.attempts(name).mask(inbox, 1, model, lambda _history: made, masking(model))
    assert masked.manifest == manifest_of(masked.pieces)
    assert statement.digest == manifest_digest(masked.manifest)
    return statement, b"".join(vector.tobytes() for _, vector in masked.pieces)


def test_a_vector_that_was_lost_is_masked_again_to_the_same_bytes(open_run: Callable[..., Run]) -> None:
    run, inboxes = begun(open_run)
    inbox = inboxes[run.names[0]]
    first = mask(run, inbox)
    assert mask(run, inbox) == first
    run.live = {}
    assert [mask(run, inbox), mask(run, inbox)] == [first, first]


@pytest.mark.parametrize("lives_on", [False, True])
def test_no_other_vector_is_masked_in_an_attempt(open_run: Callable[..., Run], lives_on: bool) -> None:
    """The difference of two vectors under one keystream would be that of the values."""
    run, inboxes = begun(open_run)
    run.live = {} if lives_on else None
    inbox = inboxes[run.names[0]]
    first = mask(run, inbox)
    other = [(offset, vector + 1) for offset, vector in run.pieces(run.names[0])]
    with raises(StepError, "masked vector"):
        mask(run, inbox, other)
    fewer = dataclasses.replace(
        inbox, sharers=inbox.sharers[:-1], sealed=inbox.sealed[:-1], hashes=inbox.hashes[:-1]
    )
    for changed in (fewer, dataclasses.replace(inbox, sealed=(*inbox.sealed[:-1], (NAMES[3], bytes(82))))):
        with raises(StepError, "update", says="one request"):
            mask(run, changed)
    assert mask(run, inbox) == first


def test_a_crash_while_masking_never_leads_to_a_second_vector_under_one_mask(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first has left: its digest was not kept."""
    run, inboxes = begun(open_run)
    run.live = {}
    inbox = inboxes[run.names[0]]

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cloister.aggregation.vector.masks.apply", crash)
        with pytest.raises(KeyboardInterrupt):
            mask(run, inbox)
    first = mask(run, inbox)
    other = [(offset, vector + 1) for offset, vector in run.pieces(run.names[0])]
    with raises(StepError, "masked vector"):
        mask(run, inbox, other)
    assert mask(run, inbox) == first


def test_secrets_are_readable_by_the_site_alone_and_wiped_when_it_has_answered(
    open_run: Callable[..., Run],
) -> None:
    run = open_run(4)
    kept: list[bytes] = []
    unmask: dict[str, Unmask] = {}

    def look(_step: str, reply: Reply) -> Reply:
        path = run.folder / reply.site / "attempt"
        assert path.stat().st_mode & 0o077 == 0
        kept.append(path.read_bytes())
        return reply

    def note(site: str, request: Request) -> None:
        if isinstance(request, Agree) and isinstance(request.told, Unmask):
            unmask[site] = request.told

    run.channel.tamper, run.channel.before = look, note
    assert isinstance(run.sum(), Total)
    assert len(kept[0]) > 100
    for name in run.names:
        assert (run.folder / name / "attempt").read_bytes() == b""
        others = dataclasses.replace(unmask[name], signatures=unmask[name].signatures[1:])
        with raises(StepError, "attempt", says="not yet answered"):
            run.attempts(name).agree(others, 1)


def test_a_vector_of_one_round_is_not_masked_for_another(open_run: Callable[..., Run]) -> None:
    """Otherwise one update could be summed in two rounds, over different sites."""
    run, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)
    with raises(StaleError, "round", says="of the attempt"):
        run.attempts(name).mask(inboxes[name], 2, model, lambda _history: run.pieces(name), masking(model))
    with raises(StaleError, "round", says="of the attempt"):
        run.attempts(name).agree(Begin(5, 1, model), 1)


def test_only_the_steps_of_the_protocol_can_be_asked_for(open_run: Callable[..., Run]) -> None:
    """The shares for a site come with a request for its vector, and in no other way."""
    run, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)
    sum_id = SumId(RUN, bytes.fromhex(run.plan.digest()), TRAIN, 1)
    others: list[Any] = [inboxes[name], sum_id, None]
    for told in others:
        with raises(EncodingError, "Agree.told", says="Begin or Peers or Survivors or Unmask"):
            decode_request(encode(Agree(sum_id, told)))
    assert run.attempts(name).mask(inboxes[name], 1, model, lambda _history: run.pieces(name), masking(model))


def test_two_messages_at_once_mask_one_vector(open_run: Callable[..., Run]) -> None:
    """While one vector is being made, another process is asked for the same update."""
    run, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)
    inside: list[object] = []

    def make(_history: bytes) -> list[Piece]:
        inside.append(
            run.attempts(name).mask(
                inboxes[name], 1, model, lambda _history: run.pieces(name), masking(model)
            )
        )
        return run.pieces(name)

    with raises(StepError, "attempt", says="unchanged"):
        run.attempts(name).mask(inboxes[name], 1, model, make, masking(model))
    assert len(inside) == 1


def test_a_torn_file_costs_one_attempt(open_run: Callable[..., Run]) -> None:
    run = open_run(5)
    assert isinstance(run.sum(1), Total)
    for name in run.names:
        (run.folder / name / "attempt").write_bytes(b"")
    begin = Begin(1, 1, bytes(32))
    with pytest.raises(StaleError):  # the durable mark still says which round was answered
        run.attempts("site-000").agree(begin, 1)
    assert isinstance(run.sum(2), Total)


def test_a_survivor_that_has_not_joined_again_is_a_dropout(
    open_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The coordinator is restarted after step 6 began, and one of the survivors stays away."""
    run = open_run(7)
    run.channel.lose(*((name, "unmask", 1) for name in run.names[:5]))
    run.channel.before = lambda _site, request: die_at_second_try(request)
    with pytest.raises(KeyboardInterrupt):
        run.sum()
    away = run.names[6]
    run.channel.before = lambda _site, _request: None
    run.channel.down = lambda site, _step, _request: site == away
    members = Members(run.channel, run.plan, RUN, lambda _failure: None, roster=run.roster)
    assert away not in members.sites
    run.party = dataclasses.replace(run.party, members=members)
    run.channel.down = lambda _site, _step, _request: False
    run.events.clear()
    run.sum()
    assert any("has not joined again" in reason for reason in run.reasons())


def die_at_second_try(request: Request) -> None:
    if not isinstance(request, Join) and request.tries == 2:
        raise KeyboardInterrupt


class Slow:
    """A channel on which some sites never answer a step: they cost the whole timeout of the request."""

    def __init__(self, inner: Loopback, silent: set[tuple[str, str]]) -> None:
        self._inner = inner
        self._silent = silent
        self.now = 0.0
        self.timeouts: dict[str, float] = {}
        """By step."""

    def nodes(self) -> range:
        return self._inner.nodes()

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        step = step_of(next(iter(requests.values())))
        if step != "join":
            self.timeouts[step] = deadline_s
        mute = {
            node
            for node, request in requests.items()
            if (step_of(request), self._inner.names[node]) in self._silent
        }
        heard = {node: request for node, request in requests.items() if node not in mute}
        yield from self._inner.ask(heard, deadline_s, group=group)
        for node in mute:
            self.now += deadline_s
            yield node, Failure(f"node {node}", "timeout")


@pytest.mark.parametrize("step", STEPS)
def test_a_silent_site_is_a_dropout_of_its_step_and_takes_no_time_of_the_others(
    open_run: Callable[..., Run], step: str
) -> None:
    run = open_run(8)
    slow = Slow(run.channel, {(step, run.names[3])})
    members = Members(slow, run.plan, RUN, lambda _failure: None, roster=run.roster)
    run.party = dataclasses.replace(run.party, members=members, clock=lambda: slow.now)
    total = run.sum()
    assert isinstance(total, Total)
    assert total.attempts == 1
    whole = run.plan.cohort.deadline_s
    assert slow.timeouts == dict.fromkeys(STEPS, whole / 4) | {"update": whole}
    assert sum(slow.timeouts.values()) == run.plan.cohort.attempt_s()


# Sites that lie in their counters.


def lie_in(run: Run, liar: str, counter: str, total: int) -> None:
    """Let a site send what makes the total of a counter over all sites of the run this number."""
    honest, layout = run.vector, Sums(run.plan, LAYOUT.size).training
    start = layout.size + layout.names.index(counter) * layout.ring.limbs
    limbs = slice(start, start + layout.ring.limbs)

    def vector(name: str) -> RingVector:
        sent = honest(name)
        if name == liar:
            sent[limbs] = layout.ring.encode_counters([total])
            for other in run.names:
                sent[limbs] -= 0 if other == liar else honest(other)[limbs]
        return sent

    run.vector = vector  # type: ignore[method-assign]  # what its sites send


FALSE_TOTALS = {
    "weights that sum to nothing": ("weight", 0),
    "a weight that applies the mean many times": ("weight", 1),
    "a weight of fewer sites": ("weight", 5),
    "a weight that stops the model": ("weight", 2**60),
    "more tokens than there can be": ("tokens", 2**62),
    "more loss than there can be": ("loss", 2**63),
    "more clipped values than there are": ("clipped", 6 * 50 + 1),
}


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize(("counter", "total"), FALSE_TOTALS.values(), ids=FALSE_TOTALS)
def test_a_site_that_lies_in_a_counter_spoils_its_round_and_nothing_else(
    open_run: Callable[..., Run], counter: str, total: int, secure: bool
) -> None:
    """Under masks the sum is opened, and makes no mean: with the total of that counter as the reason. In clear the
    coordinator sees which site it is, and goes on without it."""
    run = open_run(6, f"aggregation.secure={str(secure).lower()}")
    honest = run.vector
    lie_in(run, run.names[0], counter, total)
    found = run.sum()
    if secure:
        assert isinstance(found, SumFailed)
        assert found == SumFailed(1, bound=True, spoiled=found.spoiled)  # an attempt would sum the same again
        assert f"total of {counter}" in found.spoiled
        assert str(total) in found.spoiled
    else:
        assert isinstance(found, Total)
        assert found.names == tuple(run.names[1:])
        assert f"total of {counter}" in run.reasons()[0]
    run.vector = honest  # type: ignore[method-assign]  # as above
    assert isinstance(run.sum(2), Total)


@pytest.mark.parametrize("step", [2**31 - 1, -(2**31)])
def test_a_site_that_sends_a_value_beyond_the_bound_in_clear_is_a_dropout(
    open_run: Callable[..., Run], step: int
) -> None:
    run = open_run(6, "aggregation.secure=false")
    honest = run.vector

    def vector(name: str) -> RingVector:
        sent = honest(name)
        if name == run.names[0]:
            sent[7] = np.uint32(step % 2**32)
        return sent

    run.vector = vector  # type: ignore[method-assign]  # what its sites send
    found = run.sum()
    assert isinstance(found, Total)
    assert found.names == tuple(run.names[1:])
    assert f"steps of a value of the update is {step}: expected at most" in run.reasons()[0]


@pytest.mark.parametrize("total", [5, 7, 1, 0, 600])
def test_with_uniform_weights_the_total_weight_is_the_number_of_sites(
    open_run: Callable[..., Run], total: int
) -> None:
    run = open_run(6, "aggregation.weighting=uniform")
    layout = Sums(run.plan, LAYOUT.size).training

    def vector(name: str) -> RingVector:
        tail = dict.fromkeys(layout.names, 0) | {"weight": 1}
        return np.concatenate([layout.encode(update_of(name), 1, seed_of(0))[0], layout.tail(tail)])

    run.vector = vector  # type: ignore[method-assign]  # what its sites send
    assert isinstance(run.sum(1), Total)
    lie_in(run, run.names[0], "weight", total)
    found = run.sum(2)
    assert isinstance(found, SumFailed)
    assert "expected 6 for 6 updates" in found.spoiled


# Sites that lie: the others go on.


def resigned(message: Any) -> Any:
    """A message that its own site has signed, after a change."""
    signature = keys.sign(IDENTITIES[message.site], message.STEP.label, message.context, message.body())
    return dataclasses.replace(message, signature=signature)


def garbage(step: str, reply: Reply) -> Reply:
    """site-000 sends shares that no other site can open."""
    if isinstance(reply, Shares) and reply.site == NAMES[0]:
        return cast(
            Reply, resigned(dataclasses.replace(reply, sealed=tuple((to, b"?") for to, _ in reply.sealed)))
        )
    return reply


def test_a_site_that_sends_garbage_costs_one_attempt_and_is_left_out(open_run: Callable[..., Run]) -> None:
    run = open_run(8)
    run.channel.tamper = garbage
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites, total.cohort) == (2, 7, 8)
    assert total.opened.counters["tokens"] == expected(run.names[1:])["tokens"]
    assert run.reasons() == [
        "left out of all later sums: 7 sites could not open the shares that it sent them"
    ]
    run.channel.asked.clear()
    later = run.sum(2)
    assert isinstance(later, Total)
    assert later.attempts == 1
    assert {site for _, site in run.channel.asked} == set(run.names[1:])
    (entry,) = [entry for entry in run.journal.entries() if entry.step == steps.LEFT_OUT]
    assert entry.detail["site"] == NAMES[0]


@pytest.mark.parametrize("colluders", [0.34, 0.5])
def test_garbage_for_few_holders_costs_one_attempt_and_nobody_is_called_a_liar(
    open_run: Callable[..., Run], colluders: float
) -> None:
    """As many complaints as sites may lie: the sender is not proven to be bad, but the round goes on without it."""
    run = open_run(12, f"aggregation.colluders={colluders}", "cohort.quorum=0.2", "aggregation.dropouts=0.0")
    parameters = run.contract.tolerance.parameters(12, 12)
    few = NAMES[1 : 12 - parameters.threshold + 2]
    assert len(few) <= parameters.colluders

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and reply.site == NAMES[0]:
            sealed = tuple((to, b"?" if to in few else text) for to, text in reply.sealed)
            return cast(Reply, resigned(dataclasses.replace(reply, sealed=sealed)))
        return reply

    run.channel.tamper = lie
    for number in (1, 2):
        total = run.sum(number)
        assert isinstance(total, Total)
        assert (total.attempts, total.sites) == (2, 11)
    assert run.party.left_out == {}


def test_a_site_that_others_complain_of_is_not_counted_on_for_its_own_share(
    open_run: Callable[..., Run],
) -> None:
    """With it there are just t openers; it does not reveal, and the others would be bound to a list with it."""
    run = open_run(12, "aggregation.colluders=0.34", "cohort.quorum=0.2", "aggregation.dropouts=0.0")
    few = NAMES[1 : 12 - run.contract.tolerance.parameters(12, 12).threshold + 1]

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and reply.site == NAMES[0]:
            sealed = tuple((to, b"?" if to in few else text) for to, text in reply.sealed)
            return cast(Reply, resigned(dataclasses.replace(reply, sealed=sealed)))
        return Failed(NAMES[0], "gone") if isinstance(reply, Reveal) and reply.site == NAMES[0] else reply

    run.channel.tamper = lie
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (2, 11)


@pytest.mark.parametrize(("accused", "left_out"), [(NAMES[1:2], set()), (NAMES[1:6], {NAMES[0]})])
def test_one_complaint_leaves_nobody_out_where_no_site_is_assumed_to_lie(
    open_run: Callable[..., Run], accused: list[str], left_out: set[str]
) -> None:
    run = open_run(6, "aggregation.colluders=0.0")
    run.channel.tamper = Accuser(run, NAMES[:1], lambda _liar, _present: tuple(accused))
    run.sum()
    assert set(run.party.left_out) == left_out


class Accuser:
    """Sites that complain of shares that they could open.

    Args:
        run: The run.
        liars: The sites.
        chosen: From a liar, and the honest sites that take part in the attempt, sorted, to those that it accuses.
    """

    def __init__(
        self, run: Run, liars: Collection[str], chosen: Callable[[str, list[str]], tuple[str, ...]]
    ) -> None:
        self._liars = liars
        self._chosen = chosen
        self._present: set[str] = set()
        self._attempt = 0
        run.channel.before = self.asked

    def asked(self, site: str, request: Request) -> None:
        if isinstance(request, Agree) and isinstance(request.told, Begin):
            if request.told.attempt != self._attempt:
                self._attempt = request.told.attempt
                self._present.clear()
            self._present.add(site)

    def __call__(self, _step: str, reply: Reply) -> Reply:
        if not isinstance(reply, Contribution) or reply.statement is None or reply.site not in self._liars:
            return reply
        accused = self._chosen(reply.site, sorted(self._present.difference(self._liars)))
        statement = resigned(dataclasses.replace(reply.statement, complaints=accused))
        return dataclasses.replace(reply, statement=statement)


ACCUSATIONS: dict[str, Callable[[str, list[str]], tuple[str, ...]]] = {
    "all": lambda _liar, present: tuple(present),
    "one": lambda _liar, present: tuple(present[:1]),
    "each another": lambda liar, present: (present[NAMES.index(liar) % len(present)],),
}


@pytest.mark.parametrize("accuses", ACCUSATIONS)
@pytest.mark.parametrize(
    ("sites", "few", "settings"),
    [
        (4, 1, []),
        (5, 1, []),
        (8, 1, []),
        (8, 2, ["aggregation.colluders=0.25", "aggregation.dropouts=0.25"]),
        (10, 3, ["aggregation.colluders=0.3", "aggregation.dropouts=0.3"]),
    ],
)
@pytest.mark.usefixtures("unsynced")
def test_false_complaints_stop_no_round_and_no_honest_site_is_left_out(
    open_run: Callable[..., Run], sites: int, few: int, settings: list[str], accuses: str
) -> None:
    """As many liars as are assumed: their silence would cost nothing, so their complaints must not cost the round."""
    run = open_run(sites, *settings)
    accused = run.names[-few:]
    run.channel.tamper = Accuser(run, accused, ACCUSATIONS[accuses])
    for number in (1, 2, 3):
        assert isinstance(run.sum(number), Total)
    assert set(run.party.left_out) <= set(accused)
    assert len(run.party.complaints) <= few * (sites - few)


def victims(liars: int, attempts: int, rounds: int, open_run: Callable[..., Run]) -> list[bool]:
    """By round, whether the last site is in the sum, while a quarter of the sites complains of it in each attempt."""
    quarter = ("aggregation.colluders=0.25", "aggregation.dropouts=0.25")
    run = open_run(4 * liars, f"cohort.attempts={attempts}", *quarter)
    assert run.contract.tolerance.parameters(4 * liars, 4 * liars).colluders == liars
    *others, victim = run.names
    accusers = others[:liars]
    run.channel.tamper = Accuser(
        run, accusers, lambda _liar, present: (victim,) if victim in present else tuple[str, ...]()
    )
    summed: list[bool] = []
    for number in range(1, rounds + 1):
        total = run.sum(number)
        assert isinstance(total, Total)
        assert total.attempts == 2
        summed.append(victim in total.names)
    assert run.party.left_out == {}
    return summed


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.usefixtures("unsynced")
def test_a_liar_that_complains_of_a_site_in_each_round_keeps_it_out_of_every_second_sum_at_most(
    open_run: Callable[..., Run], attempts: int
) -> None:
    summed = victims(1, attempts, 6, open_run)
    assert all(first or second for first, second in itertools.pairwise(summed))


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.usefixtures("unsynced")
def test_two_liars_do_not_keep_a_site_out_of_all_sums(open_run: Callable[..., Run], attempts: int) -> None:
    summed = victims(2, attempts, 6, open_run)
    assert summed.count(True) >= 2


def garbage_for(victims: Collection[str], liar: str) -> Callable[[str, Reply], Reply]:
    """Some sites cannot open the shares that a liar sends them."""

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and reply.site == liar:
            sealed = tuple((to, b"?" if to in victims else text) for to, text in reply.sealed)
            return cast(Reply, resigned(dataclasses.replace(reply, sealed=sealed)))
        return reply

    return lie


def revealing(run: Run, silent: Callable[[str, int], bool], rounds: int) -> list[set[str]]:
    """By round the sites of the sum, none if the round is lost, while some sites do not reveal their shares."""
    summed: list[set[str]] = []
    number = 0
    run.channel.down = lambda site, step, _request: step == "unmask" and silent(site, number)
    for number in range(1, rounds + 1):
        total = run.sum(number)
        summed.append(set(total.names) if isinstance(total, Total) else set())
        assert isinstance(total, Total) or total.bound
    assert run.party.left_out == {}
    return summed


def lost(summed: list[set[str]]) -> list[int]:
    return [number for number, names in enumerate(summed, 1) if not names]


# t = 4: with the liar in the place of its victim, and silent, there are three.
FIVE = ("cohort.quorum=0.3", "aggregation.colluders=0.01", "aggregation.dropouts=0.0")


@pytest.mark.parametrize("lie", ["garbage", "complaint"])
@pytest.mark.usefixtures("unsynced")
def test_a_liar_that_stays_in_its_turn_and_does_not_reveal_loses_fewer_and_fewer_rounds(
    open_run: Callable[..., Run], lie: str
) -> None:
    run = open_run(5, *FIVE)
    victim, liar = run.names[0], run.names[-1]
    run.channel.tamper = (
        garbage_for([victim], liar)
        if lie == "garbage"
        else Accuser(run, [liar], lambda _liar, present: (victim,) if victim in present else ())
    )
    summed = revealing(run, lambda site, _number: site == liar, 8)
    assert lost(summed) == [1, 3, 7]  # by turns it would be 5 too
    assert all(victim in names for names in summed if names)


@pytest.mark.usefixtures("unsynced")
def test_a_site_that_did_not_reveal_once_is_not_out_for_good(open_run: Callable[..., Run]) -> None:
    run = open_run(5, *FIVE)
    liar, victim = run.names[0], run.names[-1]
    run.channel.tamper = Accuser(
        run, [liar], lambda _liar, present: (victim,) if victim in present else tuple[str, ...]()
    )
    summed = revealing(run, lambda site, number: site == victim and number == 1, 8)
    assert lost(summed) == [1]
    assert [number for number, names in enumerate(summed, 1) if victim in names] == [3, 7]


@pytest.mark.usefixtures("unsynced")
def test_where_few_can_open_the_shares_of_a_site_no_other_is_to_blame(open_run: Callable[..., Run]) -> None:
    run = open_run(7, "cohort.quorum=0.3", "aggregation.colluders=0.1", "aggregation.dropouts=0.2")
    victim, honest, *_, liar = run.names
    run.channel.tamper = garbage_for([victim], liar)
    summed = revealing(run, lambda site, number: site == liar or (site == honest and number == 1), 5)
    assert lost(summed) == [1]
    assert [liar in names for names in summed[3:]] == [False, False]
    assert all(honest in names for names in summed[1:])


@pytest.mark.usefixtures("unsynced")
def test_a_liar_that_reveals_does_not_lose_every_third_round_with_one_that_does_not(
    open_run: Callable[..., Run],
) -> None:
    """In the turn of the first two honest sites are out, and the silence of the second is then one too many."""
    run = open_run(8, "cohort.quorum=0.3", "aggregation.colluders=0.25", "aggregation.dropouts=0.25")
    *honest, silent, liar = run.names
    run.channel.tamper = garbage_for(honest[:2], liar)
    summed = revealing(run, lambda site, _number: site == silent, 9)
    assert lost(summed) == [2, 5]  # by turns they would be 2, 5 and 8
    assert all(honest[2] in names for names in summed if names)


@pytest.mark.usefixtures("unsynced")
def test_sites_that_lost_rounds_are_asked_where_the_sum_needs_them(open_run: Callable[..., Run]) -> None:
    run = open_run(5, *FIVE)
    liar, absent, *_, victim = run.names
    run.channel.tamper = Accuser(run, [liar], lambda _liar, present: (victim,) if victim in present else ())
    assert lost(revealing(run, lambda site, _number: site == victim, 1)) == [1]
    run.channel.tamper = lambda _step, reply: reply
    summed = [run.sum(number) for number in (2, 3)]
    run.channel.down = lambda site, _step, _request: site == absent
    summed.append(run.sum(4))
    assert [len(total.names) for total in summed if isinstance(total, Total)] == [5, 5, 4]


@pytest.mark.usefixtures("unsynced")
def test_the_turn_of_a_site_that_is_not_asked_keeps_nobody_out(open_run: Callable[..., Run]) -> None:
    run = open_run(9, "cohort.quorum=0.3", "aggregation.colluders=0.2", "aggregation.dropouts=0.34")
    *honest, liar, other = run.names
    run.channel.tamper = garbage_for(honest[:2], liar)
    assert lost(revealing(run, lambda site, _number: site in (liar, other), 3)) == [1, 3]
    run.channel.tamper = garbage_for(honest[2:4], other)
    total = run.sum(4)  # of the six in complaints the fifth has its turn, the first liar
    assert isinstance(total, Total)
    assert (total.names, total.attempts) == (tuple(honest), 2)


class Evaluations(Run):
    """The same for evaluations at the sites."""

    def attempts(self, name: str) -> Attempts:
        contract = Sums.over(self.plan, LAYOUT, b"").contract(EVALUATE, RUN, self.roster)
        return Attempts(self.folder / name, contract, Member(name, IDENTITIES[name], self.minimum))

    def vector(self, name: str) -> RingVector:
        layout = Sums(self.plan, LAYOUT.size).evaluation
        return layout.tail(dict.fromkeys(layout.names, 1))

    def sum(self, number: int = 1) -> Total | SumFailed:
        return sum_over(self.party, Wanted(EVALUATE, number, MODEL))


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("victim_first", [False, True])
@pytest.mark.usefixtures("unsynced")
def test_turns_go_on_where_a_sum_is_due_every_few_rounds(
    tmp_path: Path, every: int, victim_first: bool
) -> None:
    """By the number of the round, one of the two would have each turn."""
    quarter = ("aggregation.colluders=0.25", "aggregation.dropouts=0.25")
    run = Evaluations(tmp_path, 4, "run.rounds=100", f"server.evaluate_every={every}", *quarter)
    liar, victim = (run.names[-1], run.names[0]) if victim_first else (run.names[0], run.names[-1])
    run.channel.tamper = Accuser(
        run, [liar], lambda _liar, present: (victim,) if victim in present else tuple[str, ...]()
    )
    summed: list[bool] = []
    for number in range(0, 6 * every, every):
        total = run.sum(number)
        assert isinstance(total, Total)
        summed.append(victim in total.names)
    run.journal.__exit__()
    assert all(first or second for first, second in itertools.pairwise(summed))
    assert run.party.left_out == {}


def test_a_resumed_run_knows_the_complaints(open_run: Callable[..., Run]) -> None:
    run = open_run(8)
    run.channel.tamper = Accuser(run, run.names[-1:], ACCUSATIONS["one"])
    run.sum()
    (entry,) = [entry for entry in run.journal.entries() if entry.step == steps.COMPLAINED]
    assert entry.detail == {"pairs": [["site-007", "site-000"]]}


def test_leaving_sites_out_changes_neither_n_nor_a_nor_t(open_run: Callable[..., Run]) -> None:
    """Otherwise a coordinator that calls sites liars would choose who is in, and lower the threshold."""
    run = open_run(8)
    run.party.left_out.update(dict.fromkeys(run.names[:4], "a lie"))  # t = 5
    assert run.sum() == SumFailed(3, bound=False)
    run.party.left_out.popitem()
    assert isinstance(run.sum(), Total)
    # A site that is still asked has the same context as in a sum of all.
    everybody = SecureCoordinator(run.contract, 2, 1, vector_hash(MODEL))
    own = run.attempts(run.names[5]).agree(everybody.begin, 2)
    assert isinstance(own, Advertise)
    everybody.advertised(own)


def test_two_sites_that_reveal_wrong_shares_do_not_end_the_round(open_run: Callable[..., Run]) -> None:
    run = open_run(8)

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Reveal) and reply.site in NAMES[:2]:
            wrong = tuple((site, bytes(33)) for site, _ in reply.self_shares)
            return cast(Reply, resigned(dataclasses.replace(reply, self_shares=wrong)))
        return reply

    run.channel.tamper = lie
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (1, 8)
    assert total.opened.counters["tokens"] == expected(run.names)["tokens"]
    assert set(run.party.left_out) == set(NAMES[:2])


def test_a_site_that_shares_another_secret_costs_one_round(open_run: Callable[..., Run]) -> None:
    """Its lie shows when the shares are put together, after the others are bound to a list with it."""
    run = open_run(8)

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and reply.site == NAMES[3]:
            return cast(Reply, resigned(dataclasses.replace(reply, commitment=bytes(32))))
        return reply

    run.channel.tamper = lie
    assert run.sum(1) == SumFailed(3, bound=True)
    assert set(run.party.left_out) == {NAMES[3]}
    total = run.sum(2)
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (1, 7)


def test_a_site_that_claims_other_sharers_or_complaints_is_a_dropout(open_run: Callable[..., Run]) -> None:
    run = open_run(8)

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.statement is not None and reply.site in NAMES[:2]:
            change: dict[str, Any] = (
                {"sharers": bytes(32)} if reply.site == NAMES[0] else {"complaints": ("site-9",)}
            )
            return dataclasses.replace(
                reply, statement=resigned(dataclasses.replace(reply.statement, **change))
            )
        return reply

    run.channel.tamper = lie
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 6
    assert [reason.partition(":")[0] for reason in run.reasons()] == [
        "sharers of site-000",
        "complaints of site-001",
    ]


def test_the_cohort_is_the_draw_and_absent_sites_are_dropouts(open_run: Callable[..., Run]) -> None:
    run = open_run(12, "cohort.fraction=0.67", "aggregation.colluders=0.05")
    drawn = run.contract.draw.cohort(run.names, 1)
    assert len(drawn) == 8
    run.channel.down = lambda site, step, _request: step == "join" and site == drawn[0]
    members = Members(run.channel, run.plan, RUN, lambda _failure: None, roster=run.roster)
    run.party = dataclasses.replace(run.party, members=members)
    run.channel.asked.clear()
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.sites, total.cohort) == (7, 8)
    assert {site for _, site in run.channel.asked} == set(drawn[1:])


def test_more_sites_than_the_ring_has_room_for_are_refused(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    layout = Sums(run.plan, LAYOUT.size).training
    small = dataclasses.replace(layout, ring=dataclasses.replace(layout.ring, terms=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sums, "training", small)
        assert run.sum() == SumFailed(3, bound=False)
    (failed, *_) = [event for event in run.events if isinstance(event, AttemptFailed)]
    assert failed.reason == "sites in the cohort is 6: expected at most 5, for which the ring has room"


def test_an_attempt_does_not_go_on_after_a_later_one_has_begun(open_run: Callable[..., Run]) -> None:
    """The marks of two attempts at one round would be written by turns."""
    run, inboxes = begun(open_run)
    name, model = run.names[0], vector_hash(MODEL)
    run.attempts(name).mask(inboxes[name], 1, model, lambda _history: run.pieces(name), masking(model))
    later = SecureCoordinator(run.contract, 1, 2, model)
    run.attempts(name).agree(later.begin, 1)
    first = SecureCoordinator(run.contract, 1, 1, model)
    with raises(StepError, "survivors", says="upload"):
        run.attempts(name).agree(Survivors(first.attempt.context, tuple(run.names)), 1)
    with raises(StepError, "update", says="keys"):
        run.attempts(name).mask(inboxes[name], 1, model, lambda _history: run.pieces(name), masking(model))
    with raises(StaleError, "attempt", says="after attempt 2 of round 1"):
        run.attempts(name).agree(first.begin, 1)


# A power cut, a killed process, and two processes at once.


class View:
    """One view of an attempt at round 1, as a coordinator that may lie shows it to its victim, the first site.

    The other sites collude: each view has its own, which draw the same secrets and say what fits the view. So two views
    are the same up to the step at which one of them loses its last site, and differ from there.

    Args:
        run: The run; the victim is its own site.
        folder: Where the other sites keep what they must.
        attempt: The attempt.
        loses: The step at which the last site drops out.
        model: Hash of the global model.
    """

    def __init__(
        self, run: Run, folder: Path, *, attempt: int = 1, loses: Step | None = None, model: bytes = b""
    ) -> None:
        self._run, self._loses, others = run, loses, run.names[1:]
        self._coordinator = SecureCoordinator(run.contract, 1, attempt, model or vector_hash(MODEL))
        for name in others:
            AttemptFiles.create(folder / name, folder)
        self._others = {
            name: Attempts(
                folder / name,
                run.contract,
                Member(name, IDENTITIES[name], 3),
                random=partial(secret_of, name),
            )
            for name in others
        }

    def message(self, step: Step) -> Told | Inbox:
        """What the victim is sent at a step, after the steps before it; the other sites answer it here."""
        coordinator = self._coordinator
        told: dict[Step, Callable[[], Any]] = {
            Step.ADVERTISE: lambda: coordinator.begin,
            Step.SHARE: coordinator.peers,
            Step.UPDATE: coordinator.inboxes,
            Step.CONFIRM: coordinator.survivors,
            Step.UNMASK: coordinator.request,
        }
        found = told[step]()
        messages: dict[str, Told | Inbox] = (
            found if step in (Step.UPDATE, Step.UNMASK) else dict.fromkeys(self._run.names, found)
        )
        if step is self._loses:
            self._others.popitem()
        for name, attempts in self._others.items():
            self.hear(*answer(self._run, attempts, name, messages[name]))
        return messages[self._run.names[0]]

    def hear(self, reply: Signed, pieces: list[Piece]) -> None:
        """Take a site's answer."""
        match reply:
            case Advertise():
                self._coordinator.advertised(reply)
            case Shares():
                self._coordinator.shared(reply)
            case Masked():
                self._coordinator.fold(reply, pieces)
            case Confirm():
                self._coordinator.confirmed(reply)
            case Reveal():
                self._coordinator.revealed(reply)


def secret_of(name: str, size: int) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:size]


def answer(run: Run, attempts: Attempts, name: str, message: Told | Inbox) -> tuple[Signed, list[Piece]]:
    """A site's answer to a message of round 1, and its masked vector."""
    if not isinstance(message, Inbox):
        return attempts.agree(message, 1), []
    model = vector_hash(MODEL)
    statement, masked = attempts.mask(message, 1, model, lambda _history: run.pieces(name), masking(model))
    return statement, masked.pieces


def asked(run: Run, message: Told | Inbox) -> tuple[Signed, list[Piece]]:
    """The answer of the victim's new process."""
    return answer(run, run.attempts(run.names[0]), run.names[0], message)


def content(answered: tuple[Signed, list[Piece]]) -> tuple[Signed, bytes]:
    """All bytes of an answer."""
    reply, pieces = answered
    return reply, b"".join(vector.tobytes() for _, vector in pieces)


LIES: dict[Step, dict[str, Any]] = {
    Step.ADVERTISE: {"model": bytes(32)},
    Step.SHARE: {"loses": Step.ADVERTISE},
    Step.UPDATE: {"loses": Step.SHARE},
    Step.CONFIRM: {"loses": Step.UPDATE},
    Step.UNMASK: {"loses": Step.UPDATE},
}
"""For each step, the view whose message at that step is another than that of the view of all sites."""
STEPS_OF_PEERS = (Step.SHARE, Step.UPDATE, Step.CONFIRM)
SYNCS = {Step.ADVERTISE: 2, Step.SHARE: 1, Step.UPDATE: 2, Step.CONFIRM: 1, Step.UNMASK: 3}


@pytest.mark.parametrize("kill", [False, True], ids=["power cut", "killed, then power cut"])
@pytest.mark.parametrize("step", SYNCS)
def test_no_power_cut_leads_to_a_second_answer(
    open_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Step, kill: bool
) -> None:
    """At every sync of a step, and after its answer: the first message is sent again, and then another."""
    for sync in range(SYNCS[step] + 1):
        run = open_run(6)
        with Power(run.folder / run.names[0], monkeypatch) as power:
            view = View(run, tmp_path / f"view {sync}")
            lie = View(run, tmp_path / f"lie {sync}", **LIES[step])
            for earlier in list(Step)[: list(Step).index(step)]:
                heard = asked(run, view.message(earlier))
                view.hear(*heard)
                if step is not Step.ADVERTISE:
                    lie.message(earlier)
                    if (step, earlier) != (Step.UNMASK, Step.CONFIRM):  # the others are enough for that list
                        lie.hear(*heard)
            message, other = view.message(step), lie.message(step)
            assert other != message
            left = []
            with power.stopped_at(sync) as ended:
                left.append(content(asked(run, message)))
            assert bool(ended) == (sync < SYNCS[step])
            if not kill:
                power.cut()
            left.append(content(asked(run, message)))  # nothing is lost: the same answer is given again
            power.cut()
            with contextlib.suppress(SecureSumError):
                left.append(content(asked(run, other)))
            left.append(content(asked(run, message)))
            assert len(left) == 2 + (not ended)
            assert len(set(left)) == 1


@pytest.mark.parametrize("power_cut", [False, True])
def test_no_kill_in_the_next_attempt_brings_back_a_step_of_the_one_before(
    open_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power_cut: bool
) -> None:
    """At every call that writes: then the site is asked for its steps again, with other sites in the sum."""
    for call in itertools.count():
        run = open_run(6)
        with Power(run.folder / run.names[0], monkeypatch) as power:
            view = View(run, tmp_path / f"view {call}")
            lies = {
                step: View(run, tmp_path / f"{step.name} {call}", **LIES[step]) for step in STEPS_OF_PEERS
            }
            said: dict[Step, set[Any]] = {}
            others = {}
            for step in (Step.ADVERTISE, *STEPS_OF_PEERS):
                heard = asked(run, view.message(step))
                said[step] = {content(heard)}
                view.hear(*heard)
                for of, lie in lies.items():
                    if list(Step).index(step) <= list(Step).index(of):
                        others[step, of] = lie.message(step)
                        if step is not of:
                            lie.hear(*heard)
            following = View(run, tmp_path / f"next {call}", attempt=2).message(Step.ADVERTISE)
            with killed_at(call, monkeypatch) as ended:
                asked(run, following)
            if power_cut:
                power.cut()
            for step in STEPS_OF_PEERS:
                with contextlib.suppress(SecureSumError):
                    said[step].add(content(asked(run, others[step, step])))
            assert {step: len(answers) for step, answers in said.items()} == dict.fromkeys(said, 1)
            asked(run, following)
        if not ended:
            break
    assert call > 4


@pytest.mark.parametrize("sync", range(SYNCS[Step.UNMASK] + 1))
def test_no_power_cut_leads_to_an_answer_for_other_survivors_in_a_later_attempt(
    open_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: int
) -> None:
    run = open_run(6)
    revealed = 0
    with Power(run.folder / run.names[0], monkeypatch) as power:
        view = View(run, tmp_path / "first")
        for step in Step:
            message = view.message(step)
            if step is Step.UNMASK:
                with power.stopped_at(sync):
                    asked(run, message)
                    revealed += 1
            else:
                view.hear(*asked(run, message))
        power.cut()
        other = View(run, tmp_path / "second", attempt=2, loses=Step.UPDATE)
        with contextlib.suppress(AnsweredError):
            for step in Step:
                other.hear(*asked(run, other.message(step)))
                power.cut()
            revealed += 1
    assert revealed == 1 or (sync in (1, 2) and revealed == 0)  # with the mark on disk, and no answer sent


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_is_not_newer_is_not_joined_after_a_power_cut(
    open_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    run = open_run(6)
    with Power(run.folder / run.names[0], monkeypatch) as power:
        asked(run, View(run, tmp_path / "joined", attempt=2).message(Step.ADVERTISE))
        power.cut()
        old = View(run, tmp_path / "old", attempt=attempt, model=bytes(32)).message(Step.ADVERTISE)
        with raises(StaleError, "attempt", says="after attempt 2 of round 1"):
            asked(run, old)


@pytest.mark.parametrize("step", STEPS)
def test_an_honest_coordinator_goes_on_after_a_power_cut(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    run = open_run(6)
    with Power(run.folder / run.names[0], monkeypatch) as power:

        def cut(now: str, reply: Reply) -> Reply:
            if now == step and reply.site == run.names[0]:
                power.cut()
            return reply

        run.channel.tamper = cut
        total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (1, 6)
    assert total.opened.counters["tokens"] == expected(run.names)["tokens"]


def test_of_two_messages_at_once_one_is_answered(
    open_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of a site are shown two lists of survivors, the second while the first has not yet kept its own."""
    run = open_run(6)
    view, lie = View(run, tmp_path / "view"), View(run, tmp_path / "lie", loses=Step.UPDATE)
    for step in (Step.ADVERTISE, Step.SHARE, Step.UPDATE):
        heard = asked(run, view.message(step))
        lie.message(step)
        view.hear(*heard)
        lie.hear(*heard)
    messages = [view.message(Step.CONFIRM), lie.message(Step.CONFIRM)]
    happened: SimpleQueue[str] = SimpleQueue()
    second_is_there = threading.Event()
    write, lock = os.pwrite, fcntl.flock

    def watched_write(descriptor: int, data: bytes, at: int) -> int:
        if not happened.qsize() and not second_is_there.is_set():
            happened.put("the first is about to write")
            assert second_is_there.wait(60)
        else:
            happened.put("the second is about to write")
        return write(descriptor, data, at)

    def watched_lock(descriptor: int, how: int) -> None:
        try:
            lock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            happened.put("the second waits")
            lock(descriptor, how)

    monkeypatch.setattr(os, "pwrite", watched_write)
    monkeypatch.setattr(fcntl, "flock", watched_lock)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(asked, run, messages[0])
        assert happened.get(timeout=60) == "the first is about to write"
        second = pool.submit(asked, run, messages[1])
        seen = happened.get(timeout=60)
        second_is_there.set()
        assert isinstance(first.result(60)[0], Confirm)
        with pytest.raises(AgreementError):
            second.result(60)
    assert seen == "the second waits"


def test_a_site_that_raises_its_minimum_holds_to_it_in_the_attempt_that_is_running(
    open_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = open_run(6)
    run.live = {}
    view = View(run, tmp_path / "view", loses=Step.UPDATE)
    for step in (Step.ADVERTISE, Step.SHARE, Step.UPDATE):
        view.hear(*asked(run, view.message(step)))
    message = view.message(Step.CONFIRM)
    run.minimum = 6
    with raises(TooFewSitesError, "survivors", says="at least 6 "):
        asked(run, message)
    run.minimum = 3
    assert asked(run, message)


def test_a_damaged_attempt_ends_and_the_next_one_is_joined(open_run: Callable[..., Run]) -> None:
    run = open_run(6)

    def damage(step: str, reply: Reply) -> Reply:
        if step == "share" and reply.site == run.names[0]:
            path = run.folder / reply.site / "attempt"
            path.write_bytes(path.read_bytes()[:-1])
        return reply

    run.channel.tamper = damage
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites) == (1, 5)
    assert any("joined and not yet answered" in reason for reason in run.reasons())
    run.channel.tamper = lambda _step, reply: reply
    total = run.sum(2)
    assert isinstance(total, Total)
    assert total.sites == 6


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_kill_while_an_attempt_is_joined_again_does_not_end_it(
    open_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power_cut: bool
) -> None:
    """At every call that writes: the first message of an attempt is repeated, and then once more."""
    for call in itertools.count():
        run = open_run(6)
        with Power(run.folder / run.names[0], monkeypatch) as power:
            begin = View(run, tmp_path / f"view {call}").message(Step.ADVERTISE)
            said = content(asked(run, begin))
            with killed_at(call, monkeypatch) as ended:
                asked(run, begin)
            if power_cut:
                power.cut()
            assert content(asked(run, begin)) == said
        if not ended:
            break
    assert call
