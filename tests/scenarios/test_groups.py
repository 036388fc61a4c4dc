"""The median of the means of groups: the public division, a sum for each group, what fails, and what poison does."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from cloister.aggregation.features.groups import median
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.sums import Sums
from cloister.clients.site import Site
from cloister.privacy.accounting.claims import assumptions, mechanism
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.mechanism.events import Skellam
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.errors import MemberError, PlanError, QuorumError, SecureSumError, TooFewSitesError
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Advertise, Agree, Join, Request
from cloister.protocol.plan.soundness import load, parse
from cloister.protocol.plan.threshold import parameters
from cloister.server.display import LiveDisplay
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import run_history
from cloister.server.record.journal import BEGUN, UNMASKING, Journal
from cloister.server.record.progress import (
    AttemptFailed,
    Event,
    Finished,
    RoundAbandoned,
    RoundDone,
    RoundStarted,
    SiteAnswered,
)
from cloister.server.run import run
from cloister.simulations.federation import simulate
from cloister.simulations.poison import multiplied
from cloister.tests.clients.test_site import Attack
from cloister.tests.parties.federation import CENTRAL, PRIVATE, RUN, SKELLAM, Federation, tiny
from cloister.tests.tools.command import found, set_options
from cloister.tests.tools.kills import die, kill_while
from cloister.tests.tools.raises import raises

GROUPS = ("cohort.sites=12", "aggregation.groups=3", "aggregation.colluders=0.0", "server.evaluation=none")
LOOSE = ("aggregation.dropouts=0.25",)
ONE_ROUND = ("run.rounds=1", "aggregation.secure=false")


class Case:
    """A run of twelve sites in three groups of four."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.federation = Federation(folder, tiny("run.rounds=2", *GROUPS, *LOOSE, *settings))
        self.plan, self.out = self.federation.plan, folder / "run"
        self.events: list[Event] = []
        RunFolder.create(self.out, self.plan).close()

    def run(self, **options: Any) -> list[RoundDone | RoundAbandoned]:
        """Run it, or go on with it, to its end; its rounds."""
        roster = self.federation.roster if self.plan.aggregation.secure else None
        with RunFolder.reopen(self.out) as folder:
            run(folder, self.federation.channel, self.events.append, roster=roster, **options)
        return self.rounds()

    def rounds(self) -> list[RoundDone | RoundAbandoned]:
        """Its rounds that are done, by the journal's account."""
        kinds = RoundDone | RoundAbandoned
        return [event for event in self.events if isinstance(event, kinds)]

    def done(self) -> bool:
        """Whether it is finished."""
        return any(isinstance(event, Finished) for event in self.events)

    def groups(self, number: int = 1) -> tuple[tuple[str, ...], ...]:
        return draw_of(self.plan, TRAIN).divided(self.federation.names, number)

    def poison(self, *sites: str, factor: float) -> None:
        for name in sites:
            opener = self.federation.channel.sites[name]

            def site(opener: Callable[[], Any] = opener) -> Site:
                poisoned: Site = opener()
                poisoned._simulated = replace(poisoned._simulated, task=partial(multiplied, factor))
                return poisoned

            self.federation.channel.sites[name] = site

    def down(self, when: Callable[[str, str, int], bool]) -> None:
        """Let sites not answer: given site, step and round."""

        def is_down(site: str, step: str, request: Request) -> bool:
            return not isinstance(request, Join) and when(site, step, request.sum.round)

        self.federation.channel.down = is_down

    def weights(self) -> np.ndarray:
        """The model after the last round, as a flat vector."""
        kept = Checkpoints(self.out / "checkpoints", self.federation.layout, 2)
        return kept.load(self.plan.run.rounds).weights


# --- the division -----------------------------------------------------------------------------------------------------


def test_each_site_of_a_cohort_is_in_one_group_and_finds_it_by_itself() -> None:
    plan = parse(
        "", ["cohort.sites=40", "cohort.fraction=0.5", "aggregation.groups=3", "aggregation.secure=false"]
    )
    draw, names = draw_of(plan, TRAIN), [f"site-{number:02d}" for number in range(40)]
    assert draw.sizes == (7, 7, 6)
    assert plan.summed() == (6, 7)
    divisions = [draw.divided(names, number) for number in range(1, 6)]
    for number, groups in enumerate(divisions, 1):
        assert tuple(map(len, groups)) == draw.sizes
        assert tuple(sorted(itertools.chain(*groups))) == draw.cohort(names, number)
        assert all(
            draw.group_of(site, names[::-1], number) == g for g, group in enumerate(groups) for site in group
        )
        assert {draw.group_of(site, names, number) for site in set(names).difference(*groups)} == {0}
    assert len(set(divisions)) == 5, "each round divides anew"
    assert draw_of(plan, EVALUATE).groups == 1
    with_all = draw_of(parse("", ["cohort.sites=12", *GROUPS[1:3]]), TRAIN)
    assert with_all.divided(names[:12], 1) != with_all.divided(names[:12], 2)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_the_median_is_that_of_numpy(count: int) -> None:
    means = list(np.random.default_rng(count).normal(size=(count, 2**15 + 7)).astype(np.float32))
    expected = np.median(np.stack(means), axis=0)
    got = median(means)
    assert got is means[0]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


# --- what a plan may say ----------------------------------------------------------------------------------------------


def test_groups_in_which_too_many_sites_may_collude_are_refused_with_the_figure() -> None:
    """Of 1000 sites of which a tenth colludes, a drawn group of 25 may have 24 colluders; one of 50 has 17 others."""
    of = ["cohort.sites=1000", "aggregation.colluders=0.1", "aggregation.dropouts=0.1"]
    with pytest.raises(PlanError) as refused:
        parse("", [*of, "aggregation.groups=40"])
    assert refused.value.field == "aggregation.groups"
    assert "of a group of 25 that is drawn from the 1000 sites, up to 24 may collude" in str(refused.value)
    assert "set aggregation.groups = 28" in str(refused.value)
    assert parse("", [*of, "aggregation.groups=28"]).summed() == (35, 36)
    plan = parse("", [*of, "aggregation.groups=20"])
    assert plan.threshold() == parameters(50, 5, 33)
    assert (plan.summed(), plan.quorum(), plan.honest()) == ((50,), 42, 42 - 33)
    assert plan.threshold(1000).n == 1000


@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        (["aggregation.groups=2"], "aggregation.groups", "the median of two means is their mean"),
        # In a moment: the search for a number that is sound begins at the most that there may be.
        ([f"aggregation.groups={10**15}"], "aggregation.groups", "at least 3 sites in each sum"),
        (["aggregation.groups=13", "aggregation.secure=false"], "aggregation.groups", "3 to 12"),
        (["aggregation.groups=5"], "aggregation.groups", "at least 3 sites in each sum"),
        (
            ["aggregation.secure=false", "cohort.mode=async"],
            "cohort.mode",
            "a buffer has the updates that arrive first",
        ),
        (
            [
                *PRIVATE,
                "privacy.unit=site",
                "privacy.trusted_coordinator=true",
                "privacy.correlated={separation=2,participations=1}",
            ],
            "privacy.correlated",
            "a median is not linear",
        ),
    ],
    ids=["two", "endless", "too many", "too small", "async", "correlated"],
)
def test_what_is_not_sound_with_groups_is_refused_with_the_reason(
    settings: list[str], field: str, why: str
) -> None:
    with pytest.raises(PlanError) as refused:
        tiny(*GROUPS, *settings)
    assert refused.value.field == field
    assert why in str(refused.value)


def test_what_a_person_reads_says_that_there_are_groups(
    small_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cloister.cli.main import main

    options = set_options(GROUPS)
    assert main(["plan", "check", str(small_plan), *options]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "groups, of whose means the median is taken 3 of 4 sites" in shown
    assert "secure sum of a group: sites n, neighbours k, threshold t 4, 3, 3" in shown
    plan = tiny(*GROUPS, *PRIVATE, "privacy.unit=site")
    said = mechanism(plan, terms_of(plan, 100))
    assert "divides the sites of a round into 3 groups; a site is in one of them" in said
    assert "At least 3 honest sites are in every sum" in said
    assumed = " ".join(assumptions(plan, terms_of(plan, 100), simulated=False))
    assert "was opened or about to be opened, also if the round was given up" in assumed, (
        "other groups' sums were"
    )


def test_the_fix_that_a_refusal_of_groups_names_is_one() -> None:
    def fix(*settings: str) -> str:
        with pytest.raises(PlanError) as refused:
            tiny("aggregation.secure=false", *settings)
        return refused.value.fix

    assert fix("cohort.sites=2", "aggregation.groups=3") == "remove aggregation.groups, or raise cohort.sites"
    assert fix("cohort.sites=2", "aggregation.groups=2") == "remove aggregation.groups, or raise cohort.sites"
    assert fix("cohort.sites=3", "aggregation.groups=2") == "set aggregation.groups = 3, or remove it"
    assert fix("cohort.sites=200", "aggregation.groups=101") == "set aggregation.groups = 3, or remove it"
    tiny("aggregation.secure=false", "cohort.sites=200", "aggregation.groups=100")
    half = ("cohort.sites=8", "cohort.fraction=0.5", "aggregation.groups=5")
    assert fix(*half) == "set aggregation.groups = 3, or remove it"


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_the_model_moves_by_the_median_of_the_groups_means(tmp_path: Path) -> None:
    released: list[np.ndarray] = []
    case = Case(tmp_path / "a", "run.rounds=1", "server.keep_checkpoints=2")
    (done,) = case.run(released=lambda _group, mean, _sites: released.append(mean.copy()))
    assert isinstance(done, RoundDone)
    assert (done.sites, done.dropouts, done.figures["groups"]) == (12, 0, [1, 2, 3])
    moved = np.median(np.stack(released), axis=0)
    assert done.update_norm == pytest.approx(np.linalg.norm(moved), rel=1e-5)


@pytest.mark.slow
def test_in_clear_the_model_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    masked = Case(tmp_path / "masked", "run.rounds=1").run()
    clear = Case(tmp_path / "clear", "run.rounds=1", "aggregation.secure=false").run()
    assert [done.params_sha256 for done in masked] == [done.params_sha256 for done in clear]


CARRYING = {
    "moments": ["local.optimizer_state=keep"],
    "residuals": ["aggregation.compression={}", "aggregation.ring_bits=16", "aggregation.weighting=tokens"],
}


@pytest.mark.parametrize("settings", CARRYING.values(), ids=CARRYING)
def test_groups_that_are_drawn_anew_carry_on_what_all_sites_have_alike(
    tmp_path: Path, settings: list[str]
) -> None:
    """All sites were told the same in round 1, whatever their group, so round 2 is fresh for none of them."""
    settings = ["server.evaluation=none", *settings]
    masked = Case(tmp_path / "masked", *settings)
    done = masked.run()
    clear = Case(tmp_path / "clear", "aggregation.secure=false", *settings).run()
    assert [each.params_sha256 for each in done] == [each.params_sha256 for each in clear]
    assert masked.groups(1) != masked.groups(2)
    with Journal(masked.out / "journal.sqlite") as journal:
        begun = [entry for entry in journal.entries() if entry.step.startswith(f"{TRAIN} {BEGUN}")]
    assert [(entry.round, entry.detail["fresh"]) for entry in begun] == [(1, True)] * 3 + [(2, False)] * 3


def test_after_a_group_without_a_sum_no_site_uses_what_it_carries(tmp_path: Path) -> None:
    """Its sites have absorbed a round that is in no sum."""
    case = Case(tmp_path, "run.rounds=2", "server.evaluation=none", *CARRYING["moments"])
    lost = set(case.groups()[0])
    case.down(lambda site, step, number: number == 1 and step == "unmask" and site in lost)
    first, _ = case.run()
    assert isinstance(first, RoundDone)
    assert first.figures["groups"] == [2, 3]
    with Journal(case.out / "journal.sqlite") as journal:
        begun = [entry for entry in journal.entries() if entry.step.startswith(f"{TRAIN} {BEGUN}")]
    assert [entry.detail["fresh"] for entry in begun if entry.round == 2] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("settings", [CENTRAL, SKELLAM])
def test_groups_are_summed_with_the_noise_of_the_unit_site(tmp_path: Path, settings: list[str]) -> None:
    done = Case(tmp_path, *settings).run()
    assert [each.figures["groups"] for each in done if isinstance(each, RoundDone)] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.slow
def test_groups_of_unequal_size_take_their_own_local_steps_and_evaluate_together(tmp_path: Path) -> None:
    settings = (
        "cohort.sites=14",
        "local.balance=weighted",
        "aggregation.weighting=uniform",
        "server.evaluation=sites",
    )
    case = Case(tmp_path, "run.rounds=1", *settings)
    (done,) = case.run()
    assert isinstance(done, RoundDone)
    assert (done.sites, done.dropouts, done.figures["groups"]) == (14, 0, [1, 2, 3])
    started = [event for event in case.events if isinstance(event, RoundStarted)]
    assert [(event.purpose, event.group, len(event.cohort)) for event in started] == [
        (EVALUATE, 0, 14),
        *((TRAIN, group, size) for group, size in ((1, 5), (2, 5), (3, 4))),
        (EVALUATE, 0, 14),
    ]
    assert [event.beside(before) for before, event in itertools.pairwise(started)] == [
        False,
        True,
        True,
        False,
    ]


def test_sites_of_all_groups_are_asked_together(tmp_path: Path) -> None:
    """One request of each step for all groups; a group that fails tries again, and no other site is asked again."""
    case = Case(tmp_path, "run.rounds=1")
    lost = set(case.groups()[1][:2])
    case.federation.channel.down = lambda site, step, request: (
        step == "share" and site in lost and not isinstance(request, Join) and request.tries == 1
    )
    (done,) = case.run()
    assert isinstance(done, RoundDone)
    assert (done.sites, done.attempts) == (12, 2)
    asked = [step for step, _ in itertools.groupby(step for step, _ in case.federation.channel.asked)]
    assert asked == ["join", *(2 * ["advertise", "share", "update", "confirm", "unmask"])]
    again = {site for step, site in case.federation.channel.asked[-4:]}
    assert again == set(case.groups()[1])
    assert [event.reason[:8] for event in case.events if isinstance(event, AttemptFailed)] == ["group 2:"]
    trained = [site for step, site in case.federation.channel.asked if step == "update"]
    assert sorted(trained) == sorted(case.federation.names)


@pytest.mark.slow
def test_a_group_that_cannot_finish_is_left_out_and_half_of_them_end_the_round(tmp_path: Path) -> None:
    """Sites that have answered for a list of survivors answer for no other."""
    case = Case(tmp_path)
    case.federation.channel.down = partial(_two_down, case)
    first, second = case.run()
    assert isinstance(first, RoundDone)
    assert (first.figures["groups"], first.sites, first.dropouts) == ([2, 3], 8, 4)
    assert isinstance(second, RoundAbandoned)
    assert second.params_sha256 == first.params_sha256
    with RunFolder.reopen(case.out) as folder:
        history = run_history(folder)
    assert history.survivors[1] == frozenset(itertools.chain(*case.groups(1)[1:]))
    assert history.asked[case.groups(1)[0][0]] >= {1}


def _two_down(case: Case, site: str, step: str, request: Request) -> bool:
    """Two sites of the first group in round 1, and of the first two groups in round 2, reveal no shares."""
    if isinstance(request, Join) or step != "unmask":
        return False
    groups = case.groups(request.sum.round)[: request.sum.round]
    return any(site in group[:2] for group in groups)


@pytest.mark.slow
def test_a_group_with_too_few_sites_stops_the_run_and_the_others_are_not_asked_again(tmp_path: Path) -> None:
    case = Case(tmp_path, "run.rounds=1")
    lost = set(case.groups()[2][:2])
    case.down(lambda site, step, _: step == "advertise" and site in lost)
    with raises(QuorumError, "round 1, group 3 of 3", says=("3 failed", "3 of 4 sites")):
        case.run()
    case.federation.channel.down = lambda *_: False
    case.federation.channel.asked.clear()
    (done,) = case.run()
    assert isinstance(done, RoundDone)
    assert (done.sites, done.figures["groups"]) == (12, [1, 2, 3])
    asked = {site for step, site in case.federation.channel.asked if step != "join"}
    assert asked == set(case.groups()[2])
    assert done.params_sha256 == Case(tmp_path / "twin", "run.rounds=1").run()[0].params_sha256


def test_in_clear_a_group_of_too_few_sites_that_have_joined_does_not_end_the_run(tmp_path: Path) -> None:
    """Seven of fourteen sites are enough to begin, and two are too few for a group of five. Nobody refuses."""
    case = Case(tmp_path, *ONE_ROUND, "cohort.sites=14", "cohort.quorum=0.5")
    missing = case.federation.names[:7]
    case.federation.channel.down = lambda site, *_: site in missing
    with raises(QuorumError, "round 1", says=("7 sites", "3 or more in each group of 5 sites")):
        case.run()
    case.federation.channel.down = lambda *_: False
    case.run()
    assert case.done()


def test_what_is_shown_counts_the_sites_of_all_groups_when_one_begins_again() -> None:
    """Two of five sites have answered when the second group begins again, without one of them."""
    events: list[Event] = [
        RoundStarted(1, 1, TRAIN, ("a", "b"), group=1),
        RoundStarted(1, 1, TRAIN, ("c", "d", "e"), group=2),
        SiteAnswered(1, "a"),
        SiteAnswered(1, "c"),
        RoundStarted(1, 2, TRAIN, ("c", "d"), group=2),
        SiteAnswered(1, "b"),
        SiteAnswered(1, "c"),
    ]
    shown = io.StringIO()
    with LiveDisplay(Console(file=shown, width=200), 1) as display:
        for event in events:
            display.event(event)
    assert "3 of 5 sites have answered" in shown.getvalue()


def test_in_clear_a_site_that_joins_later_does_not_change_the_groups_of_a_round_that_has_begun(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path, "run.rounds=1", "aggregation.secure=false", "cohort.quorum=0.25")
    late = case.federation.names[0]
    case.federation.channel.down = lambda site, step, _: step == "update" or site == late
    with pytest.raises(QuorumError):
        case.run()
    case.federation.channel.down = lambda *_: False
    case.federation.channel.asked.clear()
    case.run()
    assert ("update", late) not in case.federation.channel.asked


# --- a lying coordinator ----------------------------------------------------------------------------------------------


def test_an_evaluation_needs_the_sites_of_a_whole_cohort_and_not_those_of_a_group(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*GROUPS[:3], *LOOSE, "cohort.quorum=1.0"))
    attack = Attack(federation, purpose=EVALUATE)
    with raises(TooFewSitesError, "survivors", says=("11", "at least 12")):
        attack.carry_through((federation.names[0],))


def test_a_coordinator_cannot_put_a_site_into_another_group(tmp_path: Path) -> None:
    """No message names a group: a site signs for its own, and sites of another group refuse its keys."""
    case = Case(tmp_path)
    federation, plan = case.federation, case.plan
    layout = federation.layout
    victim, (mate, *_) = case.groups()[0][0], case.groups()[1]
    contract = Sums(plan, layout.size, layout.digest()).contract(TRAIN, RUN, federation.roster, group=1)
    other = SecureCoordinator(contract, 1, 1, instructions_digest(federation.told()))
    assert victim not in other.attempt.cohort
    sites = {name: federation.joined(federation.names.index(name)) for name in (victim, mate)}
    replies = {name: site.agree(Agree(federation.sum_id(), other.begin)) for name, site in sites.items()}
    keys = replies[victim]
    assert isinstance(keys, Advertise)
    assert keys.context != other.attempt.context
    with pytest.raises(SecureSumError):
        other.advertised(keys)
    for name in other.attempt.cohort - {mate}:
        other.advertised(_keys(federation.joined(federation.names.index(name)), federation, other))
    advertised = replies[mate]
    assert isinstance(advertised, Advertise)
    other.advertised(advertised)
    peers = other.peers()
    everyone = tuple(sorted((*peers.advertised, keys), key=lambda each: each.site))
    told = Agree(federation.sum_id(), replace(peers, advertised=everyone))
    with raises(MemberError, "keys"):
        sites[mate].agree(told)


def _keys(site: Site, federation: Federation, coordinator: SecureCoordinator) -> Advertise:
    reply = site.agree(Agree(federation.sum_id(), coordinator.begin))
    assert isinstance(reply, Advertise)
    return reply


# --- noise ------------------------------------------------------------------------------------------------------------


def test_each_group_has_noise_of_the_coordinator_for_itself(tmp_path: Path) -> None:
    """A declared stream gives every round the same noise; within a round the groups' differ."""
    released: list[np.ndarray] = []
    noisy = ("privacy.noise_multiplier=50.0", "privacy.clip=0.1")
    case = Case(tmp_path, *ONE_ROUND, *CENTRAL, *noisy)
    case.run(
        noise=NoiseStream.from_declared_seed,
        released=lambda _group, mean, sites: released.append(mean * sites / 0.1),
    )
    assert np.std(released, axis=1) == pytest.approx([50.0] * 3, rel=0.05)
    assert np.abs(np.corrcoef(released)[np.triu_indices(3, 1)]).max() < 0.1


def test_the_smallest_group_has_all_of_the_noise_that_is_charged() -> None:
    """Of 16 sites groups of 5 and 6 are drawn; of the smallest sums of them 2 and 3 sites are surely honest."""
    plan = parse("", [*SKELLAM, "cohort.sites=16", "aggregation.groups=3"])
    terms = terms_of(plan, 100)
    assert terms is not None
    assert terms.mechanism is not None
    (event,) = terms.round_events
    assert isinstance(event, Skellam)
    honest = [plan.quorum(n) - plan.threshold(n).colluders for n in plan.summed()]
    assert (plan.summed(), honest) == ((5, 6), [2, 3])
    assert event.variance == pytest.approx(2 * terms.mechanism.variance, rel=1e-12)


def test_adaptive_clipping_moves_by_the_median_of_the_groups(tmp_path: Path) -> None:
    """A site that lies in its count moves the count of its group alone."""
    private = (*PRIVATE, "privacy.unit=site", "privacy.adaptive={count_noise=2.0}", "run.rounds=1")
    clips: list[float] = []
    real = SiteMechanism.decode

    def decode(*given: Any) -> tuple[Any, float]:
        update, clip = real(*given)
        clips.append(clip if len(clips) else 1e3)
        return update, clips[-1]

    with mock.patch.object(SiteMechanism, "decode", decode):
        (done,) = Case(tmp_path, *private).run()
    assert len(clips) == 3
    assert isinstance(done, RoundDone)
    assert done.figures["clip"] == sorted(clips)[1]


# --- poison -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_poisoned_site_ruins_the_mean_and_not_the_median(tmp_path: Path) -> None:
    """One of twelve sites in one of three groups; distances are from the model of an honest run without groups."""
    whole = Case(tmp_path / "honest", *ONE_ROUND, "aggregation.groups=1")
    whole.run()
    honest, start = whole.weights(), whole.federation.model

    def distance(groups: int, factor: float) -> float:
        case = Case(tmp_path / f"{groups}-{factor}", *ONE_ROUND, f"aggregation.groups={groups}")
        case.poison(case.federation.names[4], factor=factor)
        case.run()
        return float(np.linalg.norm(case.weights() - honest) / np.linalg.norm(honest - start))

    assert distance(1, -10.0) > 0.8
    assert distance(3, -10.0) < 0.4
    assert distance(3, 30.0) < 0.4


# --- crashes ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The coordinator's process ends here."""


@pytest.mark.slow
def test_a_coordinator_that_is_killed_after_any_entry_of_the_journal_goes_on(tmp_path: Path) -> None:
    """With the attempts of all groups, at the steps where they are, and the same weights."""
    whole = Case(tmp_path / "whole")
    whole.run()
    case, record = Case(tmp_path / "killed"), Journal.record
    for life in itertools.count(5, 2):  # a process that goes on writes some entries again
        if case.done():
            break
        left = life

        def record_and_die(journal: Journal, *entry: Any) -> None:
            nonlocal left
            record(journal, *entry)
            left -= 1
            if not left:
                raise Killed

        with mock.patch.object(Journal, "record", record_and_die), suppress(Killed):
            case.run()
    assert life > 7
    assert np.array_equal(case.weights(), whole.weights())
    asked = [entry for entry in case.federation.channel.asked if entry[0] == "update"]
    assert len(asked) == 24, "an update was asked for again"


def killed(plan: Path, out: Path) -> None:
    """A run that dies when the second of three groups is about to reveal shares in round 2."""
    record = Journal.record

    def record_and_die(journal: Journal, number: int, attempt: int, step: str, *rest: Any) -> None:
        record(journal, number, attempt, step, *rest)
        if (number, step) == (2, f"train {UNMASKING} 2"):
            die()

    with mock.patch.object(Journal, "record", record_and_die):
        simulate(RunFolder.create(out, load(plan)), lambda _event: None, workers=1)


@pytest.mark.slow
def test_a_simulation_that_is_killed_between_its_groups_goes_on_to_the_same_weights(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = tmp_path / "groups.toml", tmp_path / "killed"
    text = small_plan.read_text().replace("rounds = 3", "rounds = 2").replace("sites = 4", "sites = 9")
    plan.write_text(
        text.replace(
            "[server]", '[aggregation]\ngroups = 3\ncolluders = 0.0\n\n[server]\nevaluation = "none"'
        )
    )
    whole = found(capsys, "simulate", str(plan), "--out", str(tmp_path / "whole"), "--workers", "1")
    kill_while(killed, plan, out)
    assert found(capsys, "resume", str(out), "--workers", "1")["params_sha256"] == whole["params_sha256"]
