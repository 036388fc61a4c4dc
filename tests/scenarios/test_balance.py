"""Local steps by speed: who decides them, what a site accepts of them, and that they give no site more weight."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.aggregation.features.balance import NAME, LocalSteps, Measured, balanced, own_steps, steps_in
from cloister.aggregation.features.in_clear import TOKENS
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT
from cloister.cli.main import main
from cloister.clients.network.serve import answered
from cloister.clients.ranks.resident import Resident
from cloister.clients.site import Site
from cloister.clients.state.kept import run_folder
from cloister.lm.training.optimizer import LocalOptimizer
from cloister.protocol.errors import BalanceError, EngineError, PlanError, StaleError, UpdateError
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import (
    EVALUATE,
    TRAIN,
    Contribute,
    Contribution,
    Failed,
    Joined,
    Refused,
    Reply,
    Request,
)
from cloister.protocol.messages.wire import decode_reply, encode
from cloister.protocol.plan.plan import LocalSection
from cloister.protocol.plan.soundness import load, parse
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.journal import BEGUN, MEASURED, Journal
from cloister.server.record.progress import SiteAnswered
from cloister.server.sum.channel import Failure
from cloister.server.sum.members import Members
from cloister.server.sum.party import Party
from cloister.server.sum.sum import sum_over
from cloister.server.sum.wanted import Total, Wanted
from cloister.simulations.faults import Faulty
from cloister.tests.clients.test_site import Attack
from cloister.tests.parties.envelopes import guard_of
from cloister.tests.parties.federation import (
    RUN,
    TINY,
    Federation,
    changed,
    contribution_of,
    tiny,
    whole,
    write_records,
)
from cloister.tests.scenarios.test_resume import at
from cloister.tests.tools.kills import kill_while, killed_run
from cloister.tests.tools.raises import raises

UNIFORM = ["aggregation.weighting=uniform"]
WEIGHTED = [*UNIFORM, "local.balance=weighted", "local.steps=4"]
DYNAMIC = [*UNIFORM, "local.balance=dynamic", "local.steps=4"]
CLEAR = ["aggregation.secure=false"]


pytestmark = pytest.mark.usefixtures("unsynced")


# From speeds to steps.


@pytest.mark.parametrize(
    ("speeds", "steps"),
    [
        ([1, 1, 1], [20, 20, 20]),
        ([0.5, 1, 2], [10, 20, 40]),
        ([5, 10, 20], [10, 20, 40]),
        ([0.9, 1, 1.13], [18, 20, 23]),
        ([1, 1, 1, 0.25], [20, 20, 20, 10]),
        ([1e-6, 1, 1e6], [10, 20, 40]),
        ([1e-300, 1, 1e300], [10, 20, 40]),
        ([None, 1, 2, 3], [20, 10, 20, 30]),
        ([None, None], [20, 20]),
        ([None, 1e-9], [20, 20]),
        ([2, 4], [13, 27]),
        ([1], [20]),
    ],
)
def test_the_median_site_takes_the_plans_steps_and_others_in_proportion(
    speeds: list[float | None], steps: list[int]
) -> None:
    local = LocalSection(steps=20, balance="dynamic")
    assert local.step_limits() == (10, 40)
    named = {f"site-{number}": speed for number, speed in enumerate(speeds)}
    wanted = tuple(zip(named, steps, strict=True))
    assert balanced(local, named) == wanted
    assert balanced(local, dict(reversed(named.items()))) == wanted


@given(
    speeds=st.lists(st.none() | st.floats(1e-15, 1e15), min_size=1, max_size=9),
    steps=st.integers(1, 10**6),
)
def test_no_speed_makes_a_list_that_a_site_refuses(speeds: list[float | None], steps: int) -> None:
    plan = changed(tiny(*WEIGHTED), "local", steps=steps)
    plan = changed(plan, "cohort", sites=len(speeds))
    named = {f"site-{number}": speed for number, speed in enumerate(speeds)}
    taken = balanced(plan.local, named)
    shares = [own_steps(plan, taken, site, tuple(named)) for site in named]
    assert [(site, own.steps) for site, own in zip(named, shares, strict=True)] == list(taken)
    assert sum(own.factor * own.steps for own in shares) == pytest.approx(sum(own.steps for own in shares))
    least, most = plan.local.step_limits()
    assert least <= steps <= most <= 4 * least


# What a plan may say.


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (["steps=20"], (10, 40)),
        (["steps=1"], (1, 2)),
        (["steps=3"], (2, 6)),
        (["steps=20", "least_steps=5"], (5, 20)),
        (["steps=20", "least_steps=20"], (20, 40)),
        (["steps=20", "most_steps=60"], (15, 60)),
        (["steps=20", "most_steps=80"], (20, 80)),
        (["steps=20", "most_steps=20"], (10, 20)),
        (["steps=20", "least_steps=15", "most_steps=60"], (15, 60)),
    ],
)
def test_the_limits_of_the_steps(given: list[str], limits: tuple[int, int]) -> None:
    plan = parse("", [*WEIGHTED, *(f"local.{each}" for each in given)])
    assert plan.local.step_limits() == limits
    assert plan.most_tokens() == limits[1] * 16 * 128
    assert parse("", [f"local.{given[0]}"]).local.step_limits() == (plan.local.steps, plan.local.steps)


UNIT = ["privacy.noise_multiplier=1.0", "server.evaluation=none", *UNIFORM]


@pytest.mark.parametrize(
    ("settings", "field", "part"),
    [
        (["local.least_steps=5"], "local.least_steps", "only valid with local.balance"),
        (["local.most_steps=50"], "local.most_steps", "only valid with local.balance"),
        ([*WEIGHTED, "local.steps=20", "local.least_steps=4"], "local.least_steps is 4", "5 to 20"),
        ([*WEIGHTED, "local.steps=20", "local.least_steps=21"], "local.least_steps is 21", "5 to 20"),
        ([*WEIGHTED, "local.steps=20", "local.most_steps=19"], "local.most_steps is 19", "20 to 80"),
        ([*WEIGHTED, "local.steps=20", "local.most_steps=81"], "local.most_steps is 81", "20 to 80"),
        (
            [*WEIGHTED, "local.steps=20", "local.least_steps=10", "local.most_steps=41"],
            "local.most_steps is 41",
            "20 to 40: a site of median speed",
        ),
        (
            ["local.balance=weighted", *UNIT, "privacy.unit=record", "privacy.sampling_rate=0.1"],
            "local.balance",
            "each step is charged",
        ),
        (
            [
                "local.balance=dynamic",
                *UNIT,
                "privacy.unit=owner",
                "privacy.sampling_rate=0.1",
                "data.owner=p",
            ],
            "local.balance",
            "each step is charged",
        ),
        (["local.balance=dynamic", *UNIT, "privacy.unit=site"], "local.balance", "no charge covers"),
        (
            ["local.balance=weighted", *UNIFORM, *CLEAR, "cohort.sites=10001"],
            "cohort.sites",
            "at most 10000",
        ),
    ],
)
def test_unsound_balance_is_refused(settings: list[str], field: str, part: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse("", settings)
    assert str(refused.value).startswith(field)
    assert part in str(refused.value)


def test_declared_speeds_are_allowed_where_whole_updates_are_protected() -> None:
    """The factor is public and comes before the clip, so the sensitivity is that of the plan without it."""
    parse("", ["local.balance=weighted", *UNIT, "privacy.unit=site"])


# What a site accepts.


def shorter(steps: LocalSteps) -> LocalSteps:
    return steps[:-1]


def renamed(steps: LocalSteps) -> LocalSteps:
    return (*steps[:-1], ("site-009", steps[-1][1]))


def one(count: int, index: int, steps: LocalSteps) -> LocalSteps:
    changed_steps = list(steps)
    changed_steps[index] = (steps[index][0], count)
    return tuple(changed_steps)


LIES: dict[str, tuple[Callable[[LocalSteps], LocalSteps], str]] = {
    # what is told, and the field that the refusal names
    "no list": (lambda _steps: (), "local steps"),
    "a shorter list": (shorter, "local steps"),
    "a longer list": (lambda steps: (*steps, ("site-009", 4)), "local steps"),
    "a stranger": (renamed, "local steps"),
    "a site twice": (lambda steps: (*steps[:-1], steps[0]), "local steps"),
    "another order": (lambda steps: steps[::-1], "local steps"),
    "without the site": (lambda steps: steps[1:], "local steps"),
    "too few steps of another site": (partial(one, 1, 1), "local steps of site-001"),
    "too many steps of another site": (partial(one, 9, 2), "local steps of site-002"),
    "too many of its own": (partial(one, 9, 0), "local steps of site-000"),
}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Sites that no test here lets train."""
    return Federation(tmp_path_factory.mktemp("masked"), tiny(*WEIGHTED))


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return Federation(tmp_path_factory.mktemp("clear"), tiny(*WEIGHTED, *CLEAR))


def reason_of(site: Site, request: Request) -> str:
    """What the coordinator of a deployed site learns of a refusal."""
    reply = decode_reply([bytes(frame) for frame in answered(lambda: site, encode(request))])
    assert isinstance(reply, Failed)
    return reply.reason


CLEAR_LIES = [lie for lie in LIES if lie not in ("a shorter list", "a stranger")]
"""In clear a site knows no other names, and not all sites need to have joined."""


@pytest.mark.parametrize(
    ("how", "lie"), [*(("masked", lie) for lie in LIES), *(("clear", lie) for lie in CLEAR_LIES)]
)
def test_a_list_that_the_plan_does_not_allow_is_refused_before_training(
    how: str, lie: str, request: pytest.FixtureRequest
) -> None:
    federation: Federation = request.getfixturevalue(how)
    tell, field = LIES[lie]
    site, steps = federation.joined(), tell(federation.steps())
    sent = federation.request(steps=steps)
    if how == "masked":  # the attempt has the same list, so only the check of the list itself is left
        attack = Attack(federation, attempt=1 + time.monotonic_ns())
        contract, digest = attack.coordinator.contract, instructions_digest(sent.told)
        attack.coordinator = SecureCoordinator(contract, 1, attack.coordinator.attempt.attempt, digest)
        sent = replace(sent, inbox=attack.deal()[site.name])
    with raises(BalanceError, field):
        site.contribute(sent)
    assert reason_of(site, sent).startswith(f"{field} ")
    assert not list(federation.folder.rglob("update-*"))


def test_there_is_no_list_where_the_plan_has_none(clear: Federation, tmp_path: Path) -> None:
    fixed = Federation(tmp_path, tiny(*CLEAR))
    site = fixed.joined()
    with raises(UpdateError, "instructions of features", says="this plan"):
        site.contribute(fixed.request(steps=tuple((name, 2) for name in fixed.names)))
    with raises(UpdateError, "instructions of features", says="evaluation"):
        clear.joined().contribute(clear.request(purpose=EVALUATE, steps=clear.steps()))


def test_sites_that_were_told_different_lists_do_not_finish_a_sum(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*WEIGHTED))
    honest, other = federation.steps(), one(8, 0, federation.steps())
    # The same attempt for all, but one site is told another list with the model.
    attack = Attack(federation)
    inboxes = attack.deal()
    with raises(StaleError, "instructions"):
        attack.contribute(attack.sites[1], inboxes["site-001"], steps=other)
    attack.contribute(attack.sites[0], inboxes["site-000"], steps=honest)
    # Or the attempt itself is another one for this site.
    second = Attack(federation, attempt=2)
    digest = instructions_digest(federation.told(steps=other))
    begun = SecureCoordinator(second.coordinator.contract, 1, 2, digest)
    for site in second.sites:
        reply: Any = second.agree(site, (begun if site.name == "site-001" else second.coordinator).begin)
        coordinator = begun if site.name == "site-001" else second.coordinator
        coordinator.advertised(reply)
        if site.name == "site-001":
            with raises(StaleError, "message of site-001"):
                second.coordinator.advertised(reply)


@pytest.mark.parametrize("secure", [True, False])
def test_a_kept_update_belongs_to_its_list(secure: bool, tmp_path: Path) -> None:
    """A second update of a round, of other steps, would let the coordinator compute the difference of two sums."""
    federation = Federation(tmp_path, tiny(*WEIGHTED, *([] if secure else CLEAR)))
    other = one(8, 3, federation.steps())  # the site's own number is the same, but its factor is not
    assert other != federation.steps()

    def contributed(attempt: int, steps: LocalSteps) -> Contribution:
        if not secure:
            return federation.joined().contribute(federation.request(tries=attempt, steps=steps))
        attack = Attack(federation, attempt=attempt)
        digest = instructions_digest(federation.told(steps=steps))
        attack.coordinator = SecureCoordinator(attack.coordinator.contract, 1, attempt, digest)
        return attack.contribute(attack.sites[0], attack.deal()["site-000"], steps=steps)

    first = contributed(1, federation.steps())
    update = next(federation.folder.rglob("update-00001.ring")).read_bytes()
    with raises(StaleError, "update of round 1", says="instructions"):
        contributed(2, other)
    again = contributed(3, federation.steps())
    assert next(federation.folder.rglob("update-00001.ring")).read_bytes() == update
    assert secure or np.array_equal(whole(first), whole(again))


# What an update counts.


def test_the_update_of_a_site_is_scaled_by_its_steps(tmp_path: Path) -> None:
    """By the mean of the list over its own number; the same steps are taken."""
    federation = Federation(tmp_path, tiny(*WEIGHTED, *CLEAR))
    layout = Sums(federation.plan, federation.layout.size).training
    opened = []
    for numbers in ((2, 2, 2, 2), (2, 8, 8, 2)):
        site = federation.joined(state=str(tmp_path / f"{numbers}"))
        steps = tuple(zip(federation.names, numbers, strict=True))
        sent = whole(site.contribute(federation.request(steps=steps)))
        opened.append(layout.open(sent.copy(), 1))
    assert np.abs(opened[0].mean).max() > 1e-3
    np.testing.assert_allclose(opened[1].mean, opened[0].mean * 2.5, atol=4e-7)
    for found in opened:
        assert found.counters["weight"] == 1
        assert found.counters["tokens"] == opened[0].counters["tokens"]


LINEAR = [
    "local.betas=[0.0, 0.0]",  # a step of AdamW is then the rate times the sign of the gradient,
    "local.learning_rate=7.62939453125e-06",  # 2^-17; such small steps do not change it
    "local.schedule=constant",
    "local.clip_norm=0",
    "local.batch_size=32",  # all sequences of the site
    "aggregation.bound=0.001",
]


def test_sites_of_equal_data_count_alike_whatever_their_steps(tmp_path: Path) -> None:
    """On a loss whose gradient is constant, the mean is that of sites which all take the mean number of steps."""
    means = []
    for name, settings in (("balanced", WEIGHTED), ("equal", [*UNIFORM, "local.steps=5"])):
        federation = Federation(tmp_path / name, tiny(*settings, *CLEAR, *LINEAR))
        records = (federation.sites_folder / "site-000" / "data.jsonl").read_text()
        for other in federation.names:
            (federation.sites_folder / other / "data.jsonl").write_text(records)
        steps: LocalSteps | None = None
        if name == "balanced":
            steps = (("site-000", 2), ("site-001", 8), ("site-002", 2), ("site-003", 8))
        layout = Sums(federation.plan, federation.layout.size).training
        for index in range(2):
            vector = whole(federation.joined(index).contribute(federation.request(steps=steps)))
            means.append(layout.open(vector.copy(), 1).mean)
    one_of_two, one_of_eight, equal, _ = means
    scale = np.abs(equal).max()
    assert scale == pytest.approx(5 * 2**-17, rel=1e-2)
    for mean in (one_of_two, one_of_eight):
        assert np.quantile(np.abs(mean - equal), 0.9) < 0.02 * scale


def test_by_tokens_a_site_counts_by_the_tokens_of_a_step(tmp_path: Path) -> None:
    """Twice the steps are twice the tokens, and no more weight."""
    by_tokens = "aggregation.weighting=tokens"
    federation = Federation(tmp_path, tiny(*WEIGHTED, *CLEAR, by_tokens, "data.packing=true"))
    records = (federation.sites_folder / "site-000" / "data.jsonl").read_text()
    layout, weights, tokens = Sums(federation.plan, federation.layout.size).training, [], []
    for index, steps in ((0, (("site-000", 2), ("site-001", 8))), (1, (("site-000", 2), ("site-001", 8)))):
        (federation.sites_folder / federation.names[index] / "data.jsonl").write_text(records)
        vector = whole(federation.joined(index).contribute(federation.request(steps=steps)))
        totals = layout.counted(vector[layout.size :], 1)
        weights.append(totals[WEIGHT])
        tokens.append(totals[TOKENS])
    assert 3.5 < tokens[1] / tokens[0] < 4.5
    assert weights == [round(2.5 * tokens[0]), round(0.625 * tokens[1])]
    assert 0.9 < weights[0] / weights[1] < 1.1


def test_a_site_goes_through_the_plans_learning_rates_in_any_number_of_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers: list[float] = []
    step = LocalOptimizer.step

    def noted(optimizer: LocalOptimizer, number: float) -> None:
        numbers.append(number)
        step(optimizer, number)

    monkeypatch.setattr(LocalOptimizer, "step", noted)
    federation = Federation(tmp_path, tiny(*WEIGHTED, *CLEAR, "local.optimizer_state=keep"))
    site = federation.joined()
    for number, own in ((1, 8), (2, 2)):  # and the second round loads the state of the first
        site.contribute(federation.request(number=number, steps=one(own, 0, federation.steps())))
    assert numbers == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 6]
    assert (run_folder(site.config.folder, RUN) / "carried" / "00002" / "moments").exists()


# What the coordinator does.


class Stopped(BaseException):
    """The coordinator's process ends here."""


class Coordinator:
    """The sums of a federation, over one journal.

    Args:
        federation: Its sites.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.sent: list[tuple[str, LocalSteps]] = []
        """Site and list of each request for an update."""
        federation.channel.before = self._note

    def _note(self, site: str, request: Request) -> None:
        if isinstance(request, Contribute):
            self.sent.append((site, steps_in(dict(request.told.features)[NAME])))

    @contextmanager
    def party(self) -> Iterator[Party]:
        """A new process's side of the run."""
        federation = self.federation
        with Journal(federation.folder / "journal") as journal:
            roster = federation.roster if federation.plan.aggregation.secure else None
            members = Members(federation.channel, federation.plan, RUN, lambda _: None, roster=roster)
            kept = KeptAttempt(federation.folder / "attempt")
            yield Party(
                Sums.over(federation.plan, federation.layout, b""),
                RUN,
                roster,
                members,
                journal,
                kept,
                lambda _event: None,
            )

    def sum(self, party: Party, number: int = 1) -> Total:
        total = sum_over(party, Wanted(TRAIN, number, self.federation.model))
        assert isinstance(total, Total)
        return total

    def lists(self) -> set[LocalSteps]:
        """The different lists that were sent."""
        return {steps for _, steps in self.sent}


def steps_of(total: Total) -> LocalSteps:
    """The list that the sites of a sum were told."""
    return steps_in(dict(total.told)[NAME])


def listed(begun: dict[str, Any]) -> LocalSteps:
    """The list in the journal's entry of an attempt."""
    return steps_in(bytes.fromhex(begun["told"][NAME]))


def declare(federation: Federation, *speeds: float) -> None:
    """Let the sites declare these speeds from now on."""
    for name, speed in zip(federation.names, speeds, strict=True):
        index = federation.names.index(name)
        federation.channel.sites[name] = partial(federation.site, index, speed=speed)


def stop_at(step: str, calls: int) -> Callable[[str, str, Request], bool]:
    """Ends the coordinator's process before its n-th request of a step."""
    left = [calls]

    def down(_site: str, its: str, _request: Request) -> bool:
        left[0] -= its == step
        if not left[0]:
            raise Stopped
        return False

    return down


@pytest.mark.parametrize("secure", [True, False])
def test_steps_by_declared_speed_are_decided_once_for_a_round(secure: bool, tmp_path: Path) -> None:
    """Also where an attempt failed, and where the coordinator stopped, and sites declare something else later."""
    federation = Federation(tmp_path, tiny(*WEIGHTED, *([] if secure else CLEAR)))
    declare(federation, 0.5, 1.0, 1.0, 3.0)
    coordinator = Coordinator(federation)
    first: LocalSteps = (("site-000", 2), ("site-001", 4), ("site-002", 4), ("site-003", 8))
    with coordinator.party() as party:
        assert party.members.speeds == dict(zip(federation.names, (0.5, 1.0, 1.0, 3.0), strict=True))
        federation.channel.lose(("site-000", "update", 1), ("site-001", "update", 1))  # too few are left
        federation.channel.down = both(federation.channel.down, stop_at("update", 6))
        with pytest.raises(Stopped):
            coordinator.sum(party)
    assert coordinator.lists() == {first}
    declare(federation, 9.0, 1.0, 1.0, 1.0)
    federation.channel.down = lambda *_: False
    with coordinator.party() as party:
        total = coordinator.sum(party)
        begun = [entry for entry in party.journal.entries() if entry.step == f"{TRAIN} {BEGUN}"]
        assert steps_of(total) == first
        assert coordinator.lists() == {first}
        assert len(begun) == 2, "the second attempt went on"
        assert steps_of(coordinator.sum(party, 2)) == (
            ("site-000", 8),
            ("site-001", 4),
            ("site-002", 4),
            ("site-003", 4),
        )


def test_in_clear_a_round_keeps_the_cohort_of_its_list(tmp_path: Path) -> None:
    """A site that joins only after the coordinator was restarted takes part from the next round."""
    federation = Federation(tmp_path, tiny(*WEIGHTED, *CLEAR))
    coordinator = Coordinator(federation)
    federation.channel.garble = lambda site, step, frames: (
        [] if (site, step) == ("site-003", "join") else frames
    )
    federation.channel.down = stop_at("update", 2)
    with coordinator.party() as party, pytest.raises(Stopped):
        coordinator.sum(party)
    federation.channel.garble = lambda _site, _step, frames: frames
    federation.channel.down = lambda *_: False
    with coordinator.party() as party:
        assert coordinator.sum(party).cohort == 3
        assert {site for site, _ in coordinator.sent} == {"site-000", "site-001", "site-002"}
        assert coordinator.sum(party, 2).sites == 4


def both(
    one_: Callable[[str, str, Request], bool], other: Callable[[str, str, Request], bool]
) -> Callable[[str, str, Request], bool]:
    """A site does not answer if either says so."""
    return lambda *asked: other(*asked) or one_(*asked)


def test_a_speed_is_the_sites_own_and_told_only_where_the_plan_asks(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*WEIGHTED))
    declare(federation, 0.5, 1.0, 1.0, 3.0)
    request = federation.join_request()
    joined = federation.channel.sites["site-003"]().answer(request)
    assert isinstance(joined, Joined)
    assert joined.speed == 3.0
    unasked = Federation(tmp_path / "fixed", tiny())
    declare(unasked, 0.5, 1.0, 1.0, 3.0)
    assert set(unasked.members().speeds.values()) == {1.0}
    # A carrier changes what the sites declare: none of them joins.
    heard: list[Failure] = []
    federation.channel.tamper = lambda _step, reply: altered(reply)
    with raises(EngineError, "sites", says="signature"):
        federation.members(refused=heard.append)
    assert len(heard) == 4
    # Without signatures nothing but the range is checked.
    open_ = Federation(tmp_path / "clear", tiny(*WEIGHTED, *CLEAR))
    open_.channel.tamper = lambda _step, reply: altered(reply, 1e300 if reply.site == "site-001" else 2.0)
    members = Members(open_.channel, open_.plan, RUN, heard.append)
    assert heard[-1].reason == "its speed is 1e+300: expected 1e-06 to 1e+06"
    assert list(members.speeds) == ["site-000", "site-002", "site-003"]


def altered(reply: Reply, speed: float = 2.0) -> Reply:
    return replace(reply, speed=speed) if isinstance(reply, Joined) else reply


def timed(seconds: dict[str, float]) -> Callable[[str, Reply], Reply]:
    """Sites report these times."""

    def tamper(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site in seconds:
            return replace(reply, seconds=seconds[reply.site])
        return reply

    return tamper


def test_steps_by_measured_speed_follow_the_times_of_earlier_rounds(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*DYNAMIC, *CLEAR))
    coordinator = Coordinator(federation)
    channel = federation.channel
    names = federation.names
    with coordinator.party() as party:
        channel.tamper = timed({names[0]: 8.0, names[1]: 4.0, names[2]: 4.0, names[3]: 2.0})
        assert [count for _, count in steps_of(coordinator.sum(party, 1))] == [4, 4, 4, 4]
        # Twice the steps in the same time is twice the speed: the same list again.
        channel.tamper = timed({names[0]: 4.0, names[1]: 4.0, names[2]: 4.0, names[3]: 4.0})
        assert [count for _, count in steps_of(coordinator.sum(party, 2))] == [2, 4, 4, 8]
        # Times that cannot be measure nothing.
        channel.tamper = timed({names[0]: 0.0, names[1]: -1.0, names[2]: 1e300, names[3]: 5e-324})
        assert [count for _, count in steps_of(coordinator.sum(party, 3))] == [2, 4, 4, 8]
        measured = [entry.detail[NAME] for entry in party.journal.entries() if entry.step == MEASURED]
    assert measured == [
        dict(zip(names, (0.5, 1.0, 1.0, 2.0), strict=True)),
        dict(zip(names, (0.5, 1.0, 1.0, 2.0), strict=True)),
    ]


def test_the_time_of_a_training_is_reported_alike_each_time_and_only_where_the_plan_measures(
    tmp_path: Path,
) -> None:
    ticks = iter(range(0, 1000, 5))
    for name, settings, reported in (("dynamic", DYNAMIC, 5.0), ("weighted", WEIGHTED, 0.0)):
        federation = Federation(tmp_path / name, tiny(*settings, *CLEAR))
        site = Site(federation.site().config, Resident(), clock=lambda: float(next(ticks)))
        site.join(federation.join_request())
        assert site.contribute(federation.request()).seconds == reported
        assert site.contribute(federation.request(tries=2)).seconds == reported, "it was kept"


def test_a_simulated_site_reports_the_time_of_its_own_hardware(clear: Federation) -> None:
    class Timed:
        name = "site-000"

        def answer(self, request: Request) -> Reply:
            assert isinstance(request, Contribute)
            return replace(contribution_of(request, self.name, np.zeros(1, np.uint32)), seconds=3.0)

        guard = guard_of("site-000")

        def refuse(self, request: Request, error: Exception) -> Refused:
            raise AssertionError("it refuses nothing")

    reply = Faulty(Timed(), clear.plan, 0.25).answer(clear.request())
    assert isinstance(reply, Contribution)
    assert reply.seconds == 12.0


def test_a_speed_is_the_median_of_the_newest_rounds() -> None:
    measured = Measured()
    assert measured.get("a") is None
    for speed in (100.0, 1.0, 2.0, 3.0, 4.0, 50.0):
        measured.add({"a": speed})
    assert measured.get("a") == 3.0


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_steps_of_its_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with the measured speeds. One site's hardware is slow; a person sees the range of steps."""
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    text = TINY.replace("steps = 2", 'steps = 8\nbalance = "dynamic"').replace("rounds = 3", "rounds = 4")
    profile = "[[simulation.profiles]]\nshare = 0.25\nspeed = 0.2\n[aggregation]\nweighting = 'uniform'\n"
    plan.write_text(f'{text}source = "{write_records(tmp_path / "records.jsonl")}"\n{profile}')
    kill_while(killed_run, plan, out, partial(at, SiteAnswered, 3))
    with Journal(out / "journal.sqlite") as journal:
        killed = journal.newest("train begun")
        assert killed is not None
        earlier = [entry.detail[NAME] for entry in journal.entries() if entry.step == MEASURED]
    assert main(["resume", str(out)]) == 0
    printed = capsys.readouterr().out
    with Journal(out / "journal.sqlite") as journal:
        entries = journal.entries()
    begun = {
        (entry.round, entry.attempt): listed(entry.detail) for entry in entries if entry.step == "train begun"
    }
    measured = Measured()
    local, names = load(plan).local, [site for site, _ in begun[1, 1]]
    assert [count for _, count in begun[1, 1]] == [8] * 4
    assert begun[3, 1] == listed(killed.detail)
    assert (3, 2) not in begun, "round 3 had begun"
    assert len(earlier) == 2
    for number, speeds in ((2, earlier[:1]), (3, earlier[1:])):
        measured.add(speeds[0])
        wanted = balanced(local, {name: measured.get(name) for name in names})
        assert begun[number, 1] == wanted
        assert dict(wanted)["site-000"] == 4, "five times slower, and half the steps at least"
    (later,) = [entry.detail[NAME] for entry in entries if entry.step == MEASURED and entry.round == 3]
    measured.add(
        later
    )  # of the sites whose update was not kept: round 4 has the speeds of the process that was killed
    wanted = balanced(local, {name: measured.get(name) for name in names})
    assert begun[4, 1] == wanted
    most = max(count for _, count in wanted)
    assert f"fewest local steps 4, most local steps {most}" in printed
    assert "most local steps" in printed
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("least_steps") for row in rows] == [None, 8, 4, 4, 4]
