"""Who takes part in a run: which names, which refusals and which replies the coordinator believes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.errors import BudgetError, EngineError, PolicyError, RosterError
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.joining import sign_joined
from cloister.protocol.messages.messages import (
    TRAIN,
    Agree,
    Begin,
    Confirm,
    Contribution,
    Failed,
    Join,
    Joined,
    Refused,
    Reply,
    Request,
    SumId,
)
from cloister.protocol.messages.refusal import sign_refusal
from cloister.protocol.messages.wire import Buffer, encode, view
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json
from cloister.server.record.folder import RunFolder
from cloister.server.run import run
from cloister.server.sum.channel import Failure
from cloister.server.sum.members import Members
from cloister.tests.parties.federation import RUN, Loopback, tiny
from cloister.tests.tools.raises import raises

NAMES = ["site-000", "site-001", "site-002", "site-003"]
IDENTITIES = {name: new_identity() for name in NAMES}
ROSTER = Roster.of(Card.of(name, key) for name, key in IDENTITIES.items())
MASKED, CLEAR = tiny(), tiny("aggregation.secure=false")
"""Three of the four sites are enough."""


def joined(name: str, request: Join) -> Joined:
    """The answer of the site of that name."""
    plan = bytes.fromhex(from_json(request.plan).digest())
    return sign_joined(IDENTITIES[name], request, site=name, plan=plan, roster=ROSTER.hash)


class Named:
    """A site that answers what a test gives it to answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reply: Callable[[Request], Reply] = lambda request: (
            joined(name, request) if isinstance(request, Join) else Confirm(bytes(32), name, bytes(32))
        )

    def answer(self, request: Request) -> Reply:
        return self.reply(request)

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        raise AssertionError("this site refuses nothing by itself")


class Party:
    """Four sites and what the coordinator hears of them."""

    def __init__(self, plan: Plan = MASKED) -> None:
        self.plan = plan
        self.sites = {name: Named(name) for name in NAMES}
        self.channel = Loopback({name: lambda site=site: site for name, site in self.sites.items()})  # type: ignore[misc]  # each its own
        self.heard: list[Failure] = []

    def join(self) -> Members:
        roster = ROSTER if self.plan.aggregation.secure else None
        return Members(self.channel, self.plan, RUN, self.heard.append, roster=roster)

    def replies(self, name: str, reply: Reply) -> None:
        """From now on the site of that name answers with this."""
        self.sites[name].reply = lambda _request: reply

    def refusal(
        self,
        name: str,
        *,
        key: Ed25519PrivateKey | None = None,
        run: str = RUN,
        plan: bytes | None = None,
        reason: str = "no",
    ) -> Refused:
        """A refusal of that site, signed with its key or another."""
        digest = bytes.fromhex(self.plan.digest()) if plan is None else plan
        return sign_refusal(key or IDENTITIES[name], site=name, run=run, plan=digest, reason=reason)

    def request(self) -> Agree:
        sum_id = SumId(RUN, bytes.fromhex(self.plan.digest()), TRAIN, 1)
        return Agree(sum_id, Begin(1, 1, bytes(32)))

    def ask(self, members: Members) -> dict[str, Reply | Failure]:
        """What each site that has joined answers, by the name that the answer has."""
        return {
            reply.site: reply
            for reply in members.ask(dict.fromkeys(members.sites, self.request()), 60, group="1")
        }


# Join.


def test_sites_join_under_their_names_whatever_the_nodes_are_called() -> None:
    party = Party()
    first, third = party.sites["site-001"], party.sites["site-003"]
    first.reply, third.reply = third.reply, first.reply
    members = party.join()
    assert members.sites == NAMES
    assert members.refusals == []
    # Requests go to the node that gave the name.
    list(members.ask({"site-003": party.request()}, 60, group="1"))
    assert party.channel.asked[-1] == ("advertise", "site-001")


def test_every_site_is_sent_the_plan_and_the_base_when_it_joins() -> None:
    party, base, seen = Party(), np.arange(3, dtype=np.float32), []
    party.channel.before = lambda _site, request: seen.append(request)
    Members(party.channel, party.plan, RUN, party.heard.append, base=base, roster=ROSTER)
    assert len(seen) == 4
    for request in seen:
        assert isinstance(request, Join)
        assert (request.run, request.plan) == (RUN, party.plan.to_json())
        assert request.base_hash == vector_hash(base)
        assert np.array_equal(request.base, base)


@pytest.mark.parametrize("plan", [MASKED, CLEAR], ids=["masked", "clear"])
def test_a_name_is_taken_once(plan: Plan) -> None:
    """A site that was started twice gets each message once."""
    party = Party(plan)
    party.sites["site-003"].reply = party.sites["site-001"].reply
    members = party.join()
    assert members.sites == NAMES[:3]
    assert party.heard == [Failure("node 3", "a name already taken")]
    list(members.ask({"site-001": party.request()}, 60, group="1"))
    assert party.channel.asked[-1] == ("advertise", "site-001")


def test_a_name_that_is_not_in_the_roster_does_not_join() -> None:
    """Every honest site would refuse a cohort with it."""
    party = Party()
    party.replies("site-003", Joined("stranger"))
    assert party.join().sites == NAMES[:3]
    expected = "a name that is not its own: site is 'stranger': expected a site of the roster"
    assert party.heard == [Failure("node 3", expected)]


class Thief:
    """A node that answers under the name of site-001, whose answers to joins it has overheard.

    Args:
        party: The federation, which has joined once.
        steal: Makes its answer of the request and what it has overheard.
    """

    def __init__(self, party: Party, steal: Callable[[Join, Joined], Joined]) -> None:
        self._steal = steal
        self._overheard = Joined("site-001")
        party.channel.tamper = self._overhear
        party.join()

    def _overhear(self, _step: str, reply: Reply) -> Reply:
        if isinstance(reply, Joined) and reply.site == "site-001":
            self._overheard = reply
        return reply

    def answer(self, request: Request) -> Reply:
        assert isinstance(request, Join)
        return self._steal(request, self._overheard)


def altered(**fields: Any) -> Callable[[Join, Joined], Joined]:
    """What site-001 has answered to a join with these fields."""
    return lambda request, _overheard: joined("site-001", dataclasses.replace(request, **fields))


THEFTS: dict[str, Callable[[Join, Joined], Joined]] = {
    "without a signature": lambda _request, _overheard: Joined("site-001"),
    "with the thief's own signature": lambda request, _overheard: dataclasses.replace(
        joined("site-002", request), site="site-001"
    ),
    "with a stranger's signature": lambda request, _overheard: sign_joined(
        new_identity(), request, site="site-001", plan=bytes.fromhex(MASKED.digest()), roster=ROSTER.hash
    ),
    "by an answer to an earlier join, or at another node": lambda _request, overheard: overheard,
    "by an answer in another run": altered(run="past"),
    "by an answer under another roster": lambda request, _overheard: sign_joined(
        IDENTITIES["site-001"],
        request,
        site="site-001",
        plan=bytes.fromhex(MASKED.digest()),
        roster=bytes(32),
    ),
    "by an answer to another plan": altered(plan=tiny("run.rounds=9").to_json()),
    "by an answer with another base model": altered(base_hash=bytes(32)),
    "by a signed refusal": lambda request, _overheard: Joined(
        "site-001",
        sign_refusal(
            IDENTITIES["site-001"],
            site="site-001",
            run=request.run,
            plan=bytes.fromhex(MASKED.digest()),
            reason="no",
        ).signature,
    ),
}


@pytest.mark.parametrize("thief", ["site-000", "site-002"], ids=["before it", "after it"])
@pytest.mark.parametrize("how", THEFTS)
def test_a_node_does_not_take_the_name_of_another_site(how: str, thief: str) -> None:
    """Whichever of the two answers first, the site joins, and the messages for it go to its own node."""
    party = Party()
    party.sites[thief].reply = Thief(party, THEFTS[how]).answer
    members = party.join()
    assert members.sites == [name for name in NAMES if name != thief]
    (failure,) = party.heard
    assert failure.site == f"node {NAMES.index(thief)}"
    assert failure.reason.startswith("a name that is not its own: answer of site-001 to the join: expected")
    assert not failure.refused
    list(members.ask({"site-001": party.request()}, 60, group="1"))
    assert party.channel.asked[-1] == ("advertise", "site-001")


def test_every_node_is_sent_a_challenge_of_its_own_at_each_join() -> None:
    party, seen = Party(), []
    party.channel.before = lambda _site, request: seen.append(request)
    party.join()
    party.join()
    challenges = {request.challenge for request in seen if isinstance(request, Join)}
    assert len(challenges) == len(seen) == 8
    assert {len(challenge) for challenge in challenges} == {32}


def test_where_sums_are_in_clear_no_answer_is_signed() -> None:
    """Without a roster there is no key to verify a signature with."""
    party = Party(CLEAR)
    for name in NAMES:
        party.replies(name, Joined(name))
    assert party.join().sites == NAMES
    party.replies("site-003", Joined("no [bold]\x1b[2J"))
    assert party.join().sites == NAMES[:3]
    assert party.heard == [Failure("node 3", "a name that is not printable")]


def test_a_node_that_cannot_join_is_not_named_as_a_site_because_nothing_proves_its_name() -> None:
    named_as = {name: f"node 3 (unverified name: {name})" for name in ("site-003", "site-000")}
    for said, named in (*named_as.items(), ("", "node 3")):
        party = Party()
        party.replies("site-003", Failed(said, "its data is gone"))
        assert party.join().sites == NAMES[:3]
        assert party.heard == [Failure(named, "its data is gone")]


def test_too_few_sites_end_the_run_with_each_reason() -> None:
    party = Party()
    party.replies("site-001", Failed("site-001", "its disk is full"))
    assert party.join().sites == ["site-000", "site-002", "site-003"]
    party.replies("site-003", Failed("site-003", "its key is lost"))
    with raises(
        EngineError,
        "sites",
        says=(
            "2",
            "3 of 4",
            "(node 1 (unverified name: site-001): its disk is full; ",
            "node 3 (unverified name: site-003): its key is lost)",
        ),
    ):
        party.join()


def test_a_site_that_is_down_does_not_join() -> None:
    party = Party()
    party.channel.down = lambda site, _step, _request: site == "site-002"
    assert party.join().sites == ["site-000", "site-001", "site-003"]
    (failure,) = party.heard
    assert (failure.site, failure.reason, failure.refused) == ("node 2", "it is down", False)


def test_a_site_that_answers_with_another_message_does_not_join() -> None:
    party = Party()
    party.replies("site-002", Confirm(bytes(32), "site-002", bytes(32)))
    assert party.join().sites == ["site-000", "site-001", "site-003"]
    assert party.heard == [Failure("node 2", "it answered with Confirm")]


@pytest.mark.parametrize("names", [NAMES[:3], [*NAMES, "site-004"]], ids=["smaller", "larger"])
def test_a_roster_of_another_size_than_the_plans_ends_the_run_before_a_site_is_asked(
    tmp_path: Path, names: list[str]
) -> None:
    party, keys = Party(), {"site-004": new_identity(), **IDENTITIES}
    roster = Roster.of(Card.of(name, keys[name]) for name in names)
    with (
        RunFolder.create(tmp_path / "run", party.plan) as folder,
        raises(RosterError, "roster", says=(f"'{len(names)} sites'", "expected 4 sites", "set")),
    ):
        run(folder, party.channel, lambda _event: None, roster=roster)
    assert party.channel.asked == []


# Refusals.


def test_a_signed_refusal_to_join_is_believed() -> None:
    party = Party()
    party.replies("site-001", party.refusal("site-001"))
    members = party.join()
    assert members.sites == ["site-000", "site-002", "site-003"]
    assert party.heard == members.refusals == [Failure("site-001", "it refuses, signed: no", refused=True)]


FORGERIES: dict[str, Callable[[Party], Refused]] = {
    "unsigned": lambda party: dataclasses.replace(party.refusal("site-001"), signature=b""),
    "signed by a stranger": lambda party: party.refusal("site-001", key=new_identity()),
    "signed by another site": lambda party: party.refusal("site-001", key=IDENTITIES["site-002"]),
    "of another run": lambda party: party.refusal("site-001", run="past"),
    "of another plan": lambda party: party.refusal("site-001", plan=bytes(32)),
    "with changed words": lambda party: dataclasses.replace(party.refusal("site-001"), reason="its budget"),
    "in another name": lambda party: dataclasses.replace(party.refusal("site-001"), site="site-002"),
    "of a site that is not in the roster": lambda party: dataclasses.replace(
        party.refusal("site-001"), site="stranger"
    ),
    "without a reason": lambda party: party.refusal("site-001", reason=""),
}
on_every_forgery = pytest.mark.parametrize("how", list(FORGERIES))


@on_every_forgery
def test_a_refusal_that_is_not_the_sites_own_is_not_believed(how: str) -> None:
    """It does not join, but the coordinator cannot show that it refused."""
    party = Party()
    party.replies("site-001", FORGERIES[how](party))
    members = party.join()
    assert members.sites == ["site-000", "site-002", "site-003"]
    assert members.refusals == []
    (failure,) = party.heard
    assert (failure.site, failure.refused) == ("node 1", False)
    assert failure.reason.startswith("a refusal that is not its own: ")


@on_every_forgery
def test_a_refusal_in_a_round_that_is_not_the_sites_own_is_not_believed(how: str) -> None:
    """The site is asked again in the next attempt."""
    party = Party()
    members = party.join()
    party.replies("site-001", FORGERIES[how](party))
    failure = party.ask(members)["site-001"]
    assert isinstance(failure, Failure)
    assert not failure.refused
    assert failure.reason.startswith("a refusal that is not its own: ")


def test_a_site_cannot_refuse_for_another_in_a_round_by_showing_its_old_refusal() -> None:
    """site-002 holds a true refusal of site-001: it does not take site-001 out."""
    party = Party()
    members = party.join()
    party.replies("site-002", party.refusal("site-001"))
    replies = party.ask(members)
    assert replies["site-002"] == Failure("site-002", "a refusal that site-001 has signed")
    assert isinstance(replies["site-001"], Confirm)


def test_a_signed_refusal_in_a_round_is_believed() -> None:
    party = Party()
    members = party.join()
    party.replies("site-001", party.refusal("site-001"))
    assert party.ask(members)["site-001"] == Failure("site-001", "it refuses, signed: no", refused=True)


def test_where_sums_are_in_clear_a_refusal_needs_no_signature() -> None:
    party = Party(CLEAR)
    party.replies("site-001", Refused("site-001", RUN, bytes(32), "no", b""))
    members = party.join()
    assert party.heard == members.refusals == [Failure("site-001", "it refuses: no", refused=True)]
    party.replies("site-002", Refused("site-002", RUN, bytes(32), "no", b""))
    assert party.ask(members)["site-002"] == Failure("site-002", "it refuses: no", refused=True)


def test_where_sums_are_in_clear_a_site_refuses_for_no_other() -> None:
    """Nothing is signed in clear: a node can refuse only for itself."""
    party = Party(CLEAR)
    members = party.join()
    party.replies("site-002", Refused("site-001", RUN, bytes(32), "no", b""))
    replies = party.ask(members)
    assert isinstance(replies["site-001"], Confirm)
    assert replies["site-002"] == Failure("site-002", "it answered under the name 'site-001'")


# Replies.


def test_a_reply_under_another_name_is_a_failure_of_the_site_that_sent_it() -> None:
    party = Party()
    members = party.join()
    party.replies("site-002", Confirm(bytes(32), "site-001", bytes(32)))
    replies = party.ask(members)
    assert replies["site-002"] == Failure("site-002", "it answered under the name 'site-001'")
    assert isinstance(replies["site-001"], Confirm)
    assert len(replies) == 4


def test_a_failure_is_told_under_the_name_that_the_site_has_joined_with() -> None:
    party = Party()
    members = party.join()
    party.replies("site-002", Failed("site-001", "mine"))
    party.channel.down = lambda site, _step, _request: site == "site-003"
    replies = party.ask(members)
    assert replies["site-002"] == Failure("site-002", "mine")
    assert replies["site-003"] == Failure("site-003", "it is down")
    assert isinstance(replies["site-001"], Confirm)


VECTOR = np.arange(2, dtype=np.uint32)
CONTRIBUTION = Contribution(
    "site-001", SumId(RUN, bytes(32), TRAIN, 1), bytes(32), None, ((0, 2, bytes(32)),), (VECTOR,)
)
UNREADABLE: dict[str, Callable[[list[Buffer]], list[Buffer]]] = {
    "nothing": lambda _frames: [],
    "garbage": lambda _frames: [b"garbage"],
    "cut": lambda frames: [bytes(view(frames[0]))[:-1], *frames[1:]],
    "one frame more": lambda frames: [*frames, b""],
    "no whole elements": lambda _frames: [*encode(CONTRIBUTION)[:1], b"1234567"],
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_reply_that_cannot_be_read_is_a_failure_of_its_node_and_the_others_go_on(how: str) -> None:
    party = Party()
    members = party.join()
    party.channel.garble = lambda site, _step, frames: (
        UNREADABLE[how](frames) if site == "site-001" else frames
    )
    replies = party.ask(members)
    assert isinstance(replies["site-001"], Failure)
    assert not replies["site-001"].refused
    assert [name for name in NAMES if isinstance(replies[name], Confirm)] == [NAMES[0], *NAMES[2:]]
    assert party.join().sites == [NAMES[0], *NAMES[2:]]
    assert [failure.site for failure in party.heard] == ["node 1"]


ESCAPE = "\x1b[2Jfine\r\nall sites \u202ejoined\ud7ff\t"


UNPRINTABLE: dict[str, Callable[[str], Reply]] = {
    "failed": lambda site: Failed(site, ESCAPE),
    "failed without a reason": lambda site: Failed(site, ""),
    "refused": lambda site: Refused(site, RUN, bytes(32), ESCAPE, bytes(64)),
    "confirm": lambda site: Confirm(bytes(32), site, bytes(32)),
    "joined": lambda site: Joined(site, IDENTITIES["site-001"].sign(b"anything")),
}


@pytest.mark.parametrize("plan", [MASKED, CLEAR], ids=["masked", "clear"])
@pytest.mark.parametrize("site", ["site-001", ESCAPE, ""], ids=["own name", "escape sequences", "no name"])
@pytest.mark.parametrize("what", list(UNPRINTABLE))
def test_what_a_site_says_is_one_printable_line(what: str, site: str, plan: Plan) -> None:
    """Names and reasons go to a terminal, a journal and a report."""
    party = Party(plan)
    members = party.join()
    party.replies("site-001", UNPRINTABLE[what](site))
    failures = [reply for reply in party.ask(members).values() if isinstance(reply, Failure)]
    # Where sums are in clear, a node has the name that it gives.
    own = plan is CLEAR and (what, site) == ("joined", "site-001")
    assert party.join().sites == (NAMES if own else [NAMES[0], *NAMES[2:]])
    for failure in (*failures, *party.heard):
        for text in (failure.site, failure.reason):
            assert text
            assert text.isprintable()


def test_a_refusal_whose_reason_is_not_printable_is_not_believed() -> None:
    """Its signature is right, and its words could not be shown as they were signed."""
    party = Party()
    refused = dataclasses.replace(party.refusal("site-001"), reason=ESCAPE)
    party.replies("site-001", refused)
    party.join()
    (failure,) = party.heard
    assert not failure.refused
    assert failure.reason.isprintable()
    assert "printable characters in one line" in failure.reason
