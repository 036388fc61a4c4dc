"""Who takes part in a run: which names, which refusals and which replies the coordinator believes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import BudgetError, EngineError, PolicyError
from cloister.protocol.messages import (
    TRAIN,
    Agree,
    Begin,
    Confirm,
    Failed,
    Join,
    Joined,
    Refused,
    Reply,
    Request,
    SumId,
)
from cloister.protocol.plan import Plan
from cloister.protocol.refusal import sign_refusal
from cloister.protocol.roster import Card, Roster, new_identity
from cloister.server.channel import Failure
from cloister.server.members import Members
from cloister.tests.federation import RUN, Loopback, tiny

NAMES = ["site-000", "site-001", "site-002", "site-003"]
IDENTITIES = {name: new_identity() for name in NAMES}
ROSTER = Roster.of(Card.of(name, key) for name, key in IDENTITIES.items())
MASKED, CLEAR = tiny(), tiny("aggregation.secure=false")
"""Three of the four sites are enough."""


class Named:
    """A site that answers what a test gives it to answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reply: Callable[[Request], Reply] = lambda request: (
            Joined(name, 7) if isinstance(request, Join) else Confirm(bytes(32), name, bytes(32))
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
        sum_id = SumId(RUN, bytes.fromhex(self.plan.digest()), TRAIN, 1, 1)
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
    party.replies("site-001", Joined("site-003", 7))
    party.replies("site-003", Joined("site-001", 7))
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


def test_a_name_is_taken_once() -> None:
    """A site cannot get the messages of another by joining under its name after it."""
    party = Party()
    party.replies("site-003", Joined("site-001", 7))
    members = party.join()
    assert members.sites == NAMES[:3]
    assert party.heard == [Failure("node 3", "a name already taken")]
    list(members.ask({"site-001": party.request()}, 60, group="1"))
    assert party.channel.asked[-1] == ("advertise", "site-001")


def test_a_name_that_is_not_in_the_roster_does_not_join() -> None:
    """Every honest site would refuse a cohort with it."""
    party = Party()
    party.replies("site-003", Joined("stranger", 7))
    assert party.join().sites == NAMES[:3]
    assert party.heard == [Failure("node 3", "a name that is not in the roster")]


def test_too_few_sites_end_the_run_with_the_first_reason() -> None:
    party = Party()
    party.replies("site-001", Failed("site-001", "its disk is full"))
    assert party.join().sites == ["site-000", "site-002", "site-003"]
    party.replies("site-003", Failed("site-003", "its key is lost"))
    with pytest.raises(
        EngineError, match=r"sites is 2: expected at least 3 of 4 to join \(its disk is full\)"
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


ESCAPE = "\x1b[2Jfine\r\nall sites \u202ejoined\ud7ff\t"


UNPRINTABLE: dict[str, Callable[[str], Reply]] = {
    "failed": lambda site: Failed(site, ESCAPE),
    "failed without a reason": lambda site: Failed(site, ""),
    "refused": lambda site: Refused(site, RUN, bytes(32), ESCAPE, bytes(64)),
    "confirm": lambda site: Confirm(bytes(32), site, bytes(32)),
    "joined": lambda site: Joined(site, 7),
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
    joined = party.join().sites
    assert joined == (NAMES if (what, site) == ("joined", "site-001") else [NAMES[0], *NAMES[2:]])
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
