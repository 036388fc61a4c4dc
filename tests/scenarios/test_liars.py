"""Sites that lie in the secure sums of a whole run, with real sites: the run goes on without them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cloister.aggregation.secure import keys
from cloister.aggregation.sums import Sums
from cloister.clients.site import Site
from cloister.clients.state.kept import Written
from cloister.privacy.ledger.ledger import read_history
from cloister.protocol.errors import PolicyError, QuorumError, SpoiledError
from cloister.protocol.identity.roster import load_identity
from cloister.protocol.messages.messages import Contribution, Join, Reply, Request, Shares
from cloister.server import run as run_module
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import run_history
from cloister.server.record.progress import RoundAbandoned, RoundDone, RoundStarted, SiteFailed
from cloister.server.round import round as round_module
from cloister.server.run import run
from cloister.server.sum.masked import Masked
from cloister.tests.parties.federation import CENTRAL, SKELLAM, Federation, tiny
from cloister.tests.tools.raises import raises

QUIET = [
    "cohort.sites=8",
    "cohort.quorum=0.3",
    "aggregation.dropouts=0.0",
    "server.evaluation=none",
    "data.held_out=0.0",
]


def resigned(federation: Federation, message: Any) -> Any:
    """A message that its own site has signed, after a change."""
    identity = load_identity(federation.sites_folder / message.site / "identity.pem")
    signature = keys.sign(identity, message.STEP.label, message.context, message.body())
    return dataclasses.replace(message, signature=signature)


def one_liar_in_each_round(federation: Federation, rounds: int) -> None:
    """In each of the first rounds another site commits to another secret than it shares: the round is abandoned."""
    number = 0

    def before(_name: str, request: Request) -> None:
        nonlocal number
        if not isinstance(request, Join):
            number = request.sum.round

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and number <= rounds and reply.site == federation.names[number - 1]:
            changed: Reply = resigned(federation, dataclasses.replace(reply, commitment=bytes(32)))
            return changed
        return reply

    federation.channel.before = before
    federation.channel.tamper = lie


@pytest.mark.parametrize(("attempts", "liars"), [(1, 1), (2, 2)])
def test_liars_that_are_caught_one_a_round_do_not_stop_the_run(
    tmp_path: Path, attempts: int, liars: int
) -> None:
    settings = ["run.rounds=4", f"cohort.attempts={attempts}", "aggregation.colluders=0.25"]
    federation = Federation(tmp_path / "federation", tiny(*QUIET, *settings))
    assert federation.plan.threshold().colluders == 2
    one_liar_in_each_round(federation, liars)
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder:
        run(folder, federation.channel, events.append, roster=federation.roster)
    given_up = [event.round for event in events if isinstance(event, RoundAbandoned)]
    done = [event.round for event in events if isinstance(event, RoundDone)]
    assert given_up == list(range(1, liars + 1))
    assert done == list(range(liars + 1, 5))


def test_rounds_that_end_by_liars_who_are_not_left_out_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masked, "leave_out", lambda *_: None)  # removes the guard
    federation = Federation(
        tmp_path / "federation",
        tiny(*QUIET, "run.rounds=4", "cohort.attempts=1", "aggregation.colluders=0.35"),
    )
    one_liar_in_each_round(federation, 3)
    with (
        RunFolder.create(tmp_path / "run", federation.plan) as folder,
        raises(QuorumError, "rounds 1 to 1", says="given up"),
    ):
        run(folder, federation.channel, lambda _event: None, roster=federation.roster)


def test_two_liars_do_not_lose_all_rounds_by_shares_that_few_can_open_and_silence(tmp_path: Path) -> None:
    """Two of nine are assumed to lie, three may drop out: one sends two sites garbage, and then neither reveals."""
    settings = ["cohort.sites=9", "run.rounds=4", "aggregation.colluders=0.2", "aggregation.dropouts=0.34"]
    federation = Federation(tmp_path / "federation", tiny(*QUIET, *settings))
    parameters = federation.plan.threshold()
    assert (parameters.colluders, parameters.dropouts, parameters.threshold) == (2, 3, 6)
    *honest, liar, other = federation.names

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and reply.site == liar:
            sealed = tuple((to, b"?" if to in honest[:2] else text) for to, text in reply.sealed)
            changed: Reply = resigned(federation, dataclasses.replace(reply, sealed=sealed))
            return changed
        return reply

    federation.channel.tamper = lie
    federation.channel.down = lambda site, step, _request: step == "unmask" and site in (liar, other)
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder:
        run(folder, federation.channel, events.append, roster=federation.roster)
    assert [event.round for event in events if isinstance(event, RoundAbandoned)] == [1, 3]
    assert [event.round for event in events if isinstance(event, RoundDone)] == [2, 4]


def test_a_site_that_was_to_blame_is_asked_if_an_earlier_process_had_too_few_without_it(
    tmp_path: Path,
) -> None:
    """With one attempt in a process. A liar complains of an honest site, three sites lose power before they reveal, and
    later two stay away: without the honest site there are too few."""
    margins = ["aggregation.colluders=0.25", "aggregation.dropouts=0.25"]
    federation = Federation(
        tmp_path / "federation", tiny(*QUIET, *margins, "run.rounds=4", "cohort.attempts=1")
    )
    liar, honest, *_, unsteady, absent, gone = federation.names
    assert federation.plan.quorum() == 6

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == liar and reply.sum.round == 1:
            assert reply.statement is not None
            statement = dataclasses.replace(reply.statement, complaints=(honest,))
            return dataclasses.replace(reply, statement=resigned(federation, statement))
        return reply

    def down(site: str, step: str, request: Request) -> bool:
        if isinstance(request, Join):
            return False
        if request.sum.round == 1:
            return step == "unmask" and site in (unsteady, absent, gone)
        return site in (absent, gone)

    federation.channel.tamper, federation.channel.down = lie, down
    RunFolder.create(tmp_path / "run", federation.plan).close()
    events: list[object] = []
    for field in ("rounds 1 to 1", "round 4", None):
        with (
            RunFolder.reopen(tmp_path / "run") as folder,
            raises(QuorumError, field) if field else contextlib.nullcontext(),
        ):
            run(folder, federation.channel, events.append, roster=federation.roster)
    asked = [honest in each.cohort for each in events if isinstance(each, RoundStarted) and each.round == 4]
    assert asked == [False, True]


@pytest.mark.parametrize("number", [1, 2])
def test_a_site_that_refused_once_and_takes_part_again_does_not_end_a_run(
    tmp_path: Path, number: int
) -> None:
    """In the round before, or in the first attempt at the same. Then another site is away: the run stops and can be
    continued, instead of ending by refusals for good."""
    federation = Federation(tmp_path / "federation", tiny(*QUIET, "cohort.sites=3", "run.rounds=3"))
    first, _, away = federation.names
    opener, refused = federation.channel.sites[first], list[Request]()

    def once() -> Site:
        site: Any = opener()
        answer = site.answer

        def refuse(request: Request) -> Reply:
            if not refused and not isinstance(request, Join) and request.sum.round == number:
                refused.append(request)
                raise PolicyError("noise", 1, expected="another policy")
            return cast(Reply, answer(request))

        site.answer = refuse
        return cast(Site, site)

    federation.channel.sites[first] = once
    federation.channel.down = lambda site, _step, request: (
        site == away and not isinstance(request, Join) and request.sum.round == 2
    )
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder, raises(QuorumError, "round 2"):
        run(folder, federation.channel, events.append, roster=federation.roster)
    assert refused
    assert [event.round for event in events if isinstance(event, RoundDone)] == [1]


def test_a_run_that_has_lost_each_round_does_not_end_well_if_the_liar_is_found_in_the_last(
    tmp_path: Path,
) -> None:
    federation = Federation(
        tmp_path / "federation", tiny(*QUIET, "run.rounds=3", "aggregation.weighting=uniform")
    )
    bad = federation.names[3]
    honest = federation.channel.sites[bad]
    add_to_the_weight(federation, bad, 1)
    liar, now = federation.channel.sites[bad], [0]

    def before(_name: str, request: Request) -> None:
        if not isinstance(request, Join):
            now[0] = request.sum.round
        federation.channel.sites[bad] = liar if now[0] < 3 else honest

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Shares) and now[0] == 3 and reply.site == bad:
            return cast(Reply, resigned(federation, dataclasses.replace(reply, commitment=bytes(32))))
        return reply

    federation.channel.before, federation.channel.tamper = before, lie
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder, raises(QuorumError, "rounds 1 to 3"):
        run(folder, federation.channel, events.append, roster=federation.roster)
    assert [event.round for event in events if isinstance(event, RoundAbandoned)] == [1, 2, 3]


def test_a_sum_that_cannot_be_opened_is_not_charged(tmp_path: Path) -> None:
    federation = Federation(
        tmp_path / "federation", tiny(*QUIET, *SKELLAM, "cohort.sites=3", "run.rounds=2", "cohort.attempts=2")
    )
    away = federation.names[0]
    federation.channel.down = lambda site, step, request: (
        site == away and step == "unmask" and not isinstance(request, Join) and request.sum.round == 1
    )
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder:
        run(folder, federation.channel, events.append, roster=federation.roster)
        charged = {entry.charge.round for entry in read_history(folder.ledger).entries}
    assert [event.round for event in events if isinstance(event, RoundAbandoned)] == [1]
    assert charged == {2}


def test_who_complained_of_whom_is_shown_where_no_sum_is_possible_without_both(tmp_path: Path) -> None:
    settings = ["cohort.sites=3", "run.rounds=2"]
    federation = Federation(tmp_path / "federation", tiny(*QUIET, *settings))
    honest, _, liar = federation.names

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == liar and reply.statement is not None:
            statement = dataclasses.replace(reply.statement, complaints=(honest,))
            return dataclasses.replace(reply, statement=resigned(federation, statement))
        return reply

    federation.channel.tamper = lie
    events: list[object] = []
    with (
        RunFolder.create(tmp_path / "run", federation.plan) as folder,
        raises(QuorumError, "round 1") as raised,
    ):
        run(folder, federation.channel, events.append, roster=federation.roster)
    (failed,) = [event for event in events if isinstance(event, SiteFailed)]
    assert failed.site == honest
    assert liar in failed.reason
    assert honest in raised.value.expected or liar in raised.value.expected


def add_to_the_weight(federation: Federation, name: str, added: int) -> None:
    """Let a site say that its weight is larger, in the vector that it masks."""
    layout = Sums(federation.plan, federation.layout.size).training
    add_to_the_vector(federation, name, layout.size + layout.extra, added)


def add_to_the_vector(federation: Federation, name: str, place: int, added: int) -> None:
    """Let a site add to one ring integer of what it sends, before it masks it."""
    opener = federation.channel.sites[name]

    def site() -> Site:
        liar: Any = opener()
        made = liar._made

        def lie(*args: Any) -> Written:
            written: Written = made(*args)
            written.pieces[0][1][place] += np.uint32(added % 2**32)
            return written

        liar._made = lie
        return cast(Site, liar)

    federation.channel.sites[name] = site


@pytest.mark.parametrize("added", [-8, -7, 1, 2**20], ids=["none", "one", "one more", "huge"])
@pytest.mark.parametrize("unit", [[], SKELLAM], ids=["uniform", "site"])
@pytest.mark.parametrize(("rounds", "attempts"), [(4, 2), (1, 3)])
def test_a_site_that_lies_in_its_weight_does_not_end_a_run_as_if_all_were_well(
    tmp_path: Path, unit: list[str], added: int, rounds: int, attempts: int
) -> None:
    """No mean is applied that was divided by what it says, and the run stops with the reason."""
    settings = [f"run.rounds={rounds}", f"cohort.attempts={attempts}", "aggregation.weighting=uniform", *unit]
    federation = Federation(tmp_path / "federation", tiny(*QUIET, *settings))
    add_to_the_weight(federation, federation.names[3], added)
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder:
        with pytest.raises(SpoiledError) as raised:
            run(folder, federation.channel, events.append, roster=federation.roster)
        spoiled = [event for event in events if isinstance(event, RoundAbandoned)]
        assert len(spoiled) == min(rounds, attempts)
        assert all(f"total of weight is {8 + added}" in event.spoiled for event in spoiled)
        assert raised.value.value == spoiled[-1].spoiled
        assert not [event for event in events if isinstance(event, RoundDone)]
    if rounds <= attempts:  # none is left: continued, it does not end as if all were well either
        with RunFolder.reopen(tmp_path / "run") as folder, pytest.raises(QuorumError):
            run(folder, federation.channel, events.append, roster=federation.roster)
        assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(
    ("rounds", "attempts", "away", "lied", "stopped"),
    [
        (2, 3, {1, 2}, set(), 2),
        (4, 3, {1, 2}, {3}, 3),
        (8, 5, {1, 2, 4}, {3, 5}, 5),
        (5, 3, {2, 4, 5}, set(), 0),
    ],
    ids=["fewer rounds than attempts", "after one another", "mixed", "one is done between"],
)
def test_rounds_that_are_lost_in_two_ways_in_a_row_stop_the_run(
    tmp_path: Path, rounds: int, attempts: int, away: set[int], lied: set[int], stopped: int
) -> None:
    """A site of three, which tolerate no dropout, does not reveal, or lies in its weight."""
    settings = [f"run.rounds={rounds}", f"cohort.attempts={attempts}", "aggregation.weighting=uniform"]
    federation = Federation(tmp_path / "federation", tiny(*QUIET, "cohort.sites=3", *settings))
    bad = federation.names[0]
    honest = federation.channel.sites[bad]
    add_to_the_weight(federation, bad, 1)
    liar = federation.channel.sites[bad]

    def down(site: str, step: str, request: Request) -> bool:
        return (
            site == bad and step == "unmask" and not isinstance(request, Join) and request.sum.round in away
        )

    def before(_name: str, request: Request) -> None:
        if not isinstance(request, Join):
            federation.channel.sites[bad] = liar if request.sum.round in lied else honest

    federation.channel.down, federation.channel.before = down, before
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder:
        if stopped:
            with raises(QuorumError, f"rounds 1 to {stopped}", says="given up"):
                run(folder, federation.channel, events.append, roster=federation.roster)
        else:
            ended = run(folder, federation.channel, events.append, roster=federation.roster)
            assert (ended.rounds, ended.given_up) == (rounds, len(away | lied))
    lost = sorted(away | lied)
    assert [event.round for event in events if isinstance(event, RoundAbandoned)] == lost
    assert len([event for event in events if isinstance(event, RoundDone)]) == (0 if stopped else 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_in_clear_a_site_adds_no_more_than_one_site_to_the_count_of_adaptive_clipping(
    tmp_path: Path, sign: int
) -> None:
    """One that adds more is a dropout: the clipping norm is the one that the others lead to."""
    plan = tiny(*QUIET, "run.rounds=1", *CENTRAL, "privacy.adaptive={count_noise=20.0}")
    federation = Federation(tmp_path / "federation", plan)
    layout = Sums(plan, federation.layout.size).training
    liar = federation.names[3]
    # Updates are within the clipping norm: its own +r, and 100 sites more, or so many less.
    add_to_the_vector(federation, liar, layout.size, sign * 100 * layout.most_extra)
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", plan) as folder:
        run(folder, federation.channel, events.append, roster=federation.roster)
    (failed,) = [event for event in events if isinstance(event, SiteFailed)]
    assert (failed.site, failed.reason.split(" is ")[0]) == (liar, "steps of a value beside the update")
    (done,) = [event for event in events if isinstance(event, RoundDone)]
    assert (done.sites, done.dropouts) == (7, 1)


def test_rounds_that_a_liar_spoils_count_however_many_good_ones_are_between(tmp_path: Path) -> None:
    """It lies in every second round: its lies are counted over the run, not in a row."""
    settings = ["run.rounds=9", "cohort.attempts=2", "aggregation.weighting=uniform"]
    federation = Federation(tmp_path / "federation", tiny(*QUIET, *settings))
    honest = federation.channel.sites[federation.names[0]]
    add_to_the_weight(federation, federation.names[0], 1)
    liar = federation.channel.sites[federation.names[0]]

    def before(_name: str, request: Request) -> None:
        if not isinstance(request, Join):
            lies = request.sum.round % 2 == 0
            federation.channel.sites[federation.names[0]] = liar if lies else honest

    federation.channel.before = before
    events: list[object] = []
    with RunFolder.create(tmp_path / "run", federation.plan) as folder:
        with pytest.raises(SpoiledError):
            run(folder, federation.channel, events.append, roster=federation.roster)
        history = run_history(folder)
    assert [event.round for event in events if isinstance(event, RoundDone)] == [1, 3]
    assert [event.round for event in events if isinstance(event, RoundAbandoned)] == [2, 4]
    # The coordinator has seen all four sums, so reports, ledgers and their checks count each of them.
    assert history.summed == [1, 2, 3, 4]
    assert all(history.survivors[number] == set(federation.names) for number in history.summed)


@pytest.mark.slow
def test_a_run_that_is_resumed_knows_the_complaints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site accuses one other in the first round, and a second one in the second, which another process runs."""
    federation = Federation(
        tmp_path / "federation", tiny(*QUIET, "run.rounds=2", "aggregation.colluders=0.1")
    )
    liar, accused = federation.names[0], {1: federation.names[1:2], 2: federation.names[2:3]}

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.statement is not None and reply.site == liar:
            complaints = accused[reply.sum.round]
            statement = resigned(federation, dataclasses.replace(reply.statement, complaints=complaints))
            return dataclasses.replace(reply, statement=statement)
        return reply

    federation.channel.tamper = lie
    rounds: Callable[..., Any] = round_module.run_round

    def stop_after_the_first(context: Any, number: int) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return rounds(context, number)

    monkeypatch.setattr(run_module, "run_round", stop_after_the_first)
    with RunFolder.create(tmp_path / "run", federation.plan) as folder, pytest.raises(KeyboardInterrupt):
        run(folder, federation.channel, lambda _event: None, roster=federation.roster)
    monkeypatch.setattr(run_module, "run_round", rounds)
    failed: list[str] = []
    with RunFolder.reopen(tmp_path / "run") as folder:
        run(folder, federation.channel, lambda event: failed.append(str(event)), roster=federation.roster)
    assert any("it complained of the shares of 2 sites" in each and liar in each for each in failed)
