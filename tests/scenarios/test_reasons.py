"""What sites and nodes say, on its way to events, the journal and a terminal: one printable line, shown as it is."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from rich.console import Console

from cloister.aggregation.secure.secure_site import Member
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.ring import RingVector
from cloister.clients.state.attempt import Attempts
from cloister.clients.state.attempt_files import AttemptFiles
from cloister.lm.model.layout import Layout
from cloister.protocol.encoding import pack
from cloister.protocol.errors import PlanError
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.messages import (
    LONGEST_REASON,
    TRAIN,
    Advertise,
    Confirm,
    Contribution,
    Failed,
    Joined,
    Masked,
    Refused,
    Reply,
    Reveal,
    Shares,
    SumId,
)
from cloister.protocol.messages.refusal import sign_refusal
from cloister.protocol.messages.wire import Buffer, decode_reply, encode
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json
from cloister.server.display import LineDisplay, LiveDisplay, describe
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.journal import Journal
from cloister.server.record.progress import Event, SiteFailed
from cloister.server.sum.channel import Failure
from cloister.server.sum.members import Members
from cloister.server.sum.party import Party
from cloister.server.sum.sum import sum_over
from cloister.server.sum.wanted import Failed as SumFailed
from cloister.server.sum.wanted import Total, Wanted
from cloister.tests.parties.federation import RUN, Loopback, VectorSite, tiny
from cloister.tests.tools.seeds import seed_of

EVIL = "\x1b[2J\x9b31m\r\nall is \u202ewell\u2066\u200b\u2028 [bold red]x[/] :smile:\x07"
"""Escape sequences, new lines, bidirectional controls, characters without width, and markup of the display."""
NAMES = [f"site-{number:03d}" for number in range(4)]
BAD = "site-001"
IDENTITIES = {name: new_identity() for name in NAMES}
ROSTER = Roster.of(Card.of(name, key) for name, key in IDENTITIES.items())
LAYOUT = Layout.of([("weights", torch.nn.Parameter(torch.zeros(5)))])
MASKED, CLEAR = tiny(), tiny("aggregation.secure=false")
MODEL = np.zeros(5, np.float32)
DIGEST, SIGNATURE = bytes(32), bytes(64)
SUM = SumId(EVIL, DIGEST, TRAIN, 1)

EVERY_KIND: dict[type[Any], Reply] = {
    Joined: Joined(EVIL, SIGNATURE),
    Advertise: Advertise(DIGEST, EVIL, DIGEST, DIGEST, SIGNATURE),
    Shares: Shares(DIGEST, EVIL, DIGEST, ((EVIL, b""),), ((EVIL, DIGEST, DIGEST),), SIGNATURE),
    Contribution: Contribution(
        EVIL, SUM, DIGEST, Masked(DIGEST, EVIL, DIGEST, DIGEST, (EVIL,), SIGNATURE), (), ()
    ),
    Confirm: Confirm(DIGEST, EVIL, DIGEST, SIGNATURE),
    Reveal: Reveal(DIGEST, EVIL, ((EVIL, b""),), ((EVIL, b""),), SIGNATURE),
    Refused: Refused(EVIL, EVIL, DIGEST, EVIL, SIGNATURE),
    Failed: Failed(EVIL, EVIL),
}
"""Every reply, with such text in each of its fields."""
STEPS = {"join", "advertise", "share", "update", "confirm", "unmask"}


def spoiled(value: Any) -> Iterator[Any]:
    """This reply with such text in one of its fields, for each field."""
    if isinstance(value, str):
        if value != TRAIN:  # a purpose, of which there are two
            yield EVIL
    elif isinstance(value, tuple):
        for at, item in enumerate(value[:2]):  # two rows of a list are enough
            yield from ((*value[:at], other, *value[at + 1 :]) for other in spoiled(item))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for other in spoiled(getattr(value, field.name)):
                yield dataclasses.replace(value, **{field.name: other})


def lies(own: Reply, plan: Plan) -> list[Reply]:
    """What the bad site may answer instead of its own reply."""
    under_its_name = [dataclasses.replace(reply, site=BAD) for reply in EVERY_KIND.values()]
    digest = bytes.fromhex(plan.digest())
    refused = sign_refusal(IDENTITIES[BAD], site=BAD, run=RUN, plan=digest, reason="no")
    signed = pack("cloister-refusal-1", BAD, RUN, digest.hex(), EVIL)
    itself = dataclasses.replace(refused, reason=EVIL, signature=IDENTITIES[BAD].sign(signed))
    markup = sign_refusal(IDENTITIES[BAD], site=BAD, run=RUN, plan=digest, reason=EVIL)
    return [*spoiled(own), *EVERY_KIND.values(), *under_its_name, itself, markup]


class Sites:
    """Four sites, of which one answers with a lie in one step, and all that the coordinator makes of it.

    Args:
        folder: Where sites and coordinator keep their files.
        plan: The plan.
        step: The step in which the bad site lies.
        which: The number of the lie.
    """

    def __init__(self, folder: Path, plan: Plan, step: str, which: int) -> None:
        self.folder, self.plan, self.step, self.which = folder, plan, step, which
        self.lies = 0
        """Lies that there are to tell in that step."""
        contract = Sums(plan, LAYOUT.size, LAYOUT.digest()).contract(TRAIN, RUN, ROSTER)
        for name in NAMES:
            AttemptFiles.create(folder / name, folder)
        self.sites = {
            name: VectorSite(
                name,
                IDENTITIES[name],
                Attempts(folder / name, contract, Member(name, IDENTITIES[name], 3)),
                self.vector,
                roster=ROSTER.hash,
                secure=plan.aggregation.secure,
            )
            for name in NAMES
        }
        self.channel = Loopback({name: partial(self.sites.__getitem__, name) for name in NAMES})
        self.channel.garble = self.garble
        self.events: list[Event] = []
        self.journaled: list[Any] = []

    def vector(self) -> RingVector:
        """The vector of each site: an update of zeros, learned from one token."""
        layout = Sums(self.plan, LAYOUT.size).training
        values, _ = layout.encode(MODEL, 1, seed_of(0))
        return np.concatenate([values, layout.tail(dict.fromkeys(layout.names, 1))])

    def garble(self, site: str, step: str, frames: list[Buffer]) -> list[Buffer]:
        if (site, step) != (BAD, self.step):
            return frames
        all_lies = lies(decode_reply(frames), self.plan)
        self.lies = len(all_lies)
        return encode(all_lies[self.which])

    def run(self) -> Total | SumFailed:
        """All joins, and one sum."""

        def hear(failure: Failure) -> None:
            self.events.append(SiteFailed(0, failure.site, failure.reason))

        roster = ROSTER if self.plan.aggregation.secure else None
        with Journal(self.folder / "journal.sqlite") as journal:
            members = Members(self.channel, self.plan, RUN, hear, roster=roster)
            kept = KeptAttempt(self.folder / "attempt")
            party = Party(
                Sums.over(self.plan, LAYOUT, b""),
                RUN,
                roster,
                members,
                journal,
                kept,
                self.events.append,
                clock=lambda: 0.0,
            )
            total = sum_over(party, Wanted(TRAIN, 1, MODEL))
            self.journaled = [(entry.step, entry.detail) for entry in journal.entries()]
        self.journaled += [(failure.site, failure.reason) for failure in members.refusals]
        return total


def texts(value: Any) -> Iterator[str]:
    """Every text in a journal's entry or an event."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts(list(value.items()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from texts([getattr(value, field.name) for field in dataclasses.fields(value)])


def displayed(events: list[Event]) -> tuple[list[str], list[str]]:
    """The lines that each of the two displays shows of events."""
    lines, live = io.StringIO(), io.StringIO()
    for event in events:
        LineDisplay(Console(file=lines, width=5000)).event(event)
    with LiveDisplay(Console(file=live, width=5000), 1) as display:
        for event in events:
            display.event(event)
    return lines.getvalue().splitlines(), live.getvalue().splitlines()


def test_there_is_a_lie_of_every_kind() -> None:
    assert set(EVERY_KIND) == set(get_args(Reply))


@pytest.mark.parametrize(
    ("plan", "step"),
    [(MASKED, step) for step in sorted(STEPS)] + [(CLEAR, "join"), (CLEAR, "update")],
    ids=lambda value: value if isinstance(value, str) else ("masked" if value is MASKED else "clear"),
)
def test_what_a_site_says_is_one_printable_line_wherever_it_goes(
    tmp_path: Path, plan: Plan, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every text field of every reply to every request."""
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    which, count, markup = 0, 1, 0
    while which < count:
        folder = tmp_path / str(which)
        folder.mkdir()
        sites = Sites(folder, plan, step, which)
        assert isinstance(sites.run(), Total)  # the others go on
        count, which = sites.lies, which + 1
        for text in texts([sites.journaled, *sites.events]):
            assert text.isprintable()
            assert len(text) <= LONGEST_REASON + len("it refuses, signed: ")
        lines, live = displayed(sites.events)
        assert all(line.isprintable() for line in (*lines, *live))
        assert lines == [line for line in map(describe, sites.events) if line]  # as it is, markup and all
        said = [describe(event) for event in sites.events if isinstance(event, SiteFailed)]
        assert set(said) <= {line.rstrip() for line in live}
        markup += any("[bold red]x[/] :smile:" in line for line in said)
    assert count > len(EVERY_KIND)
    assert markup


# Texts of other parties that have no message of their own.


def test_what_a_node_says_is_cut() -> None:
    failure = Failure("node 1" + EVIL * 10**4, EVIL * 10**4)
    assert len(failure.site) == len(failure.reason) == LONGEST_REASON
    assert failure.reason.isprintable()
    assert failure.site.isprintable()
    assert Failure("node 1", "").reason == Failure("node 1", "\n").reason == "no reason given"


@pytest.mark.parametrize("where", ["{evil}", "run.{evil}"])
def test_an_error_about_a_plan_that_a_coordinator_sent_is_one_printable_line(where: str) -> None:
    """It goes to the log of the site."""
    key = where.format(evil=EVIL).removeprefix("run.")
    tree: dict[str, Any] = {"run": {key: 1}} if where.startswith("run.") else {key: 1}
    with pytest.raises(PlanError) as caught:
        from_json(json.dumps(tree))
    assert "[bold red]x[/]" in str(caught.value)
    assert str(caught.value).isprintable()
