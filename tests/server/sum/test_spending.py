"""The coordinator's ledger in whole runs of real sites: what is charged when, the stop at the budget, and crashes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.aggregation.features.server_optimizer import ServerOptimizer
from cloister.aggregation.vector.average import SumLayout
from cloister.clients.consent import spending as clients_spending
from cloister.clients.state.kept import run_id
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import count_parameters
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.privacy.ledger.ledger import Entry, Ledger, read_history
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.errors import StorageError
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.messages import TRAIN, Contribute, Request
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity
from cloister.server.record.outcome import Outcome
from cloister.server.record.progress import (
    BudgetSpent,
    Event,
    Finished,
    Refusing,
    RoundDone,
    RoundStarted,
    SiteAnswered,
)
from cloister.server.record.report import gather
from cloister.server.run import run
from cloister.server.sum.spending import Spending
from cloister.simulations.federation import lay_out, simulate
from cloister.tests.parties.federation import (
    CENTRAL,
    RECORD,
    SKELLAM,
    Federation,
    changed,
    spent_on,
    tiny,
    write_records,
)
from cloister.tests.tools.kills import kill_while, killed_again

UNITS = pytest.mark.parametrize("settings", [RECORD, CENTRAL, SKELLAM], ids=["record", "central", "skellam"])
NAMES = [f"site-{number:03d}" for number in range(4)]
QUICK = ("local.steps=1", "aggregation.dropouts=0.25")


def privacy_of(settings: list[str]) -> Terms:
    plan = tiny(*settings, *QUICK)
    terms = terms_of(plan, count_parameters(plan)[1])
    assert terms is not None
    return terms


class Run:
    """A run's folder with its sites; `go` is what one process of the coordinator does."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.federation = Federation(folder, plan)
        self.plan = self.federation.plan
        self.channel = self.federation.channel
        self.out = folder / "run"
        self.events: list[Event] = []
        RunFolder.create(self.out, self.plan).close()
        with RunFolder.reopen(self.out) as opened:
            self.identity = identity(opened)
        terms = terms_of(self.plan, self.federation.layout.size)
        assert terms is not None
        self.terms = terms

    def go(self) -> Outcome:
        roster = self.federation.roster if self.plan.aggregation.secure else None
        with RunFolder.reopen(self.out) as folder:
            return run(folder, self.federation.channel, self.events.append, roster=roster, clock=lambda: 0.0)

    def charged(self) -> list[tuple[int, str]]:
        """(round, site) of every entry of the coordinator's ledger, in order."""
        return [(entry.charge.round, entry.charge.dataset) for entry in coordinators(self.out)]

    def charges_at_sites(self) -> list[int]:
        """For each site the entries of its own ledger."""
        return [len(self.federation.entries(index)) for index in range(len(NAMES))]


def coordinators(out: Path) -> tuple[Entry, ...]:
    """What the coordinator's ledger has, read by another connection: what is committed."""
    path = out / "ledger.sqlite"
    return Ledger(path, "coordinator", composed).entries() if path.exists() else ()


Begin = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    def begin_(settings: list[str], *changes: str) -> Run:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return Run(folder, tiny(*settings, *QUICK, *changes))

    return begin_


def rounds(*numbers: int, sites: Iterable[str] = NAMES) -> list[tuple[int, str]]:
    return [(number, site) for number in numbers for site in sites]


# The charge comes first.


@pytest.mark.parametrize("settings", [CENTRAL, SKELLAM], ids=["central", "skellam"])
def test_a_sum_of_sites_is_charged_before_it_is_opened(
    begin: Begin, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = begin(settings, "run.rounds=2")
    seen: list[list[tuple[int, str]]] = []
    right = SumLayout.open

    def open_(self: SumLayout, *sums: Any) -> Any:
        seen.append(case.charged())
        return right(self, *sums)

    monkeypatch.setattr(SumLayout, "open", open_)
    case.go()
    assert seen == [rounds(1), rounds(1, 2)]
    # The test sees a coordinator that does not charge.
    other, seen[:] = begin(settings, "run.rounds=1"), []
    monkeypatch.setattr(Spending, "before_opening", lambda *_: ())
    case = other
    case.go()
    assert seen == [[]]


@pytest.mark.slow
def test_records_are_charged_before_any_site_is_asked_to_train(begin: Begin) -> None:
    case = begin(RECORD, "run.rounds=2")
    seen: list[list[tuple[int, str]]] = []

    def look(site: str, request: Request) -> None:
        if isinstance(request, Contribute) and site == NAMES[0]:
            seen.append(case.charged())

    case.channel.before = look
    case.go()
    assert seen == [rounds(1), rounds(1, 2)]


@pytest.mark.slow
@UNITS
def test_a_ledger_that_cannot_be_written_opens_nothing(
    begin: Begin, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = begin(settings)
    right = Ledger.charge_all
    opened: list[object] = []
    trained: list[str] = []

    def full(self: Ledger, charges: Any, *more: Any) -> Any:
        if self.owner == "coordinator":
            raise StorageError("ledger", expected="a disk that accepts the write")
        return right(self, charges, *more)

    def look(site: str, request: Request) -> None:
        if isinstance(request, Contribute):
            trained.append(site)

    case.channel.before = look
    monkeypatch.setattr(Ledger, "charge_all", full)
    monkeypatch.setattr(SumLayout, "open", lambda *_: opened.append(1))
    with pytest.raises(StorageError):
        case.go()
    assert opened == []
    assert trained == ([] if settings is RECORD else NAMES)
    # When the disk accepts writes again, the run goes on, and each round is charged once.
    monkeypatch.undo()
    assert case.go().rounds == 3
    assert sorted(case.charged()) == rounds(1, 2, 3)


@pytest.mark.slow
def test_records_are_charged_at_each_site_that_was_asked_and_sites_where_they_are_in_the_sum(
    begin: Begin,
) -> None:
    for settings, expected in ((RECORD, NAMES), (CENTRAL, NAMES[:3]), (SKELLAM, NAMES[:3])):
        case = begin(settings, "run.rounds=1")
        case.channel.down = lambda site, step, _request: site == NAMES[3] and step != "join"
        case.go()
        assert case.charged() == rounds(1, sites=expected)


def test_a_second_attempt_is_the_same_release_and_is_charged_once(begin: Begin) -> None:
    case = begin(RECORD, "run.rounds=1", "cohort.attempts=2")
    case.channel.lose((NAMES[2], "update", 1), (NAMES[3], "update", 1))
    case.go()
    assert case.channel.asked == [("join", name) for name in NAMES] + 2 * [("update", name) for name in NAMES]
    assert case.charged() == rounds(1)
    assert case.charges_at_sites() == [1, 1, 1, 1]


# Epsilon.


@pytest.mark.slow
@UNITS
def test_epsilon_is_the_accountants_of_the_rounds_that_were_done(begin: Begin, settings: list[str]) -> None:
    case = begin(settings)
    outcome = case.go()
    after = [event.epsilon for event in case.events if isinstance(event, RoundDone)]
    assert after == [case.terms.epsilon(1), case.terms.epsilon(2), case.terms.epsilon(3)]
    assert outcome.epsilon == case.terms.epsilon(3)
    # The ledger of each site gives the same.
    for index, name in enumerate(NAMES):
        own = Ledger(Path(case.federation.site(index).config.ledger), name, composed)
        (dataset,) = read_history(own.path).datasets()
        assert spent_on(own, dataset, 1e-3) == pytest.approx(case.terms.epsilon(3))


def test_a_site_is_charged_for_the_rounds_that_drew_it(begin: Begin) -> None:
    case = begin(CENTRAL, "cohort.fraction=0.5", "cohort.quorum=1.0", "run.rounds=4")
    outcome = case.go()
    drawn = Counter(
        site for number in range(1, 5) for site in draw_of(case.plan, TRAIN).cohort(NAMES, number)
    )
    assert len(set(drawn.values())) > 1
    spending = Spending(case.terms, case.identity, case.out / "ledger.sqlite")
    assert spending.epsilons() == {site: case.terms.epsilon(count) for site, count in drawn.items()}
    assert outcome.epsilon == spending.epsilon() == case.terms.epsilon(max(drawn.values()))


def test_two_runs_in_one_ledger_are_not_mixed(tmp_path: Path) -> None:
    terms = privacy_of(CENTRAL)
    path = tmp_path / "ledger.sqlite"
    one, other = (Spending(terms, name, path) for name in ("one", "other"))
    one.before_opening(1, NAMES)
    assert other.epsilon() == 0
    other.before_opening(1, NAMES[:1])
    assert other.epsilons() == {NAMES[0]: terms.epsilon(1)}


def test_each_unit_is_charged_at_its_own_moment_only(tmp_path: Path) -> None:
    for settings, early in ((RECORD, True), (CENTRAL, False)):
        terms = privacy_of(settings)
        spending = Spending(terms, "run", tmp_path / f"{early}.sqlite")
        spending.before_training(1, NAMES)
        assert bool(spending.epsilons()) == early
        spending.before_opening(1, NAMES)
        assert spending.epsilons() == dict.fromkeys(NAMES, terms.epsilon(1))


# The budget.


def budget(settings: list[str], rounds_paid: int) -> str:
    return f"privacy.budget={privacy_of(settings).epsilon(rounds_paid) * 1.0001}"


@pytest.mark.slow
@UNITS
def test_the_round_that_would_exceed_the_budget_is_not_begun(
    begin: Begin, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = budget(settings, 2)
    case = begin(settings, limit)
    outcome = case.go()
    assert (outcome.rounds, outcome.stopped) == (2, "budget")
    assert outcome.epsilon == case.terms.epsilon(2) <= case.plan.privacy.budget  # type: ignore[operator]  # it is set
    assert [event.round for event in case.events if isinstance(event, RoundStarted)] == [1, 2]
    (stop,) = [event for event in case.events if isinstance(event, BudgetSpent)]
    assert (stop.round, stop.epsilon, stop.budget) == (3, outcome.epsilon, case.plan.privacy.budget)
    assert case.charged() == rounds(1, 2)
    assert case.charges_at_sites() == [2, 2, 2, 2]
    assert (case.out / "final" / "model.safetensors").exists()
    # Without the guard the sites, which check the same themselves, refuse; without their check too, it goes on.
    monkeypatch.setattr(Spending, "exceeded", lambda *_: None)
    refused = begin(settings, limit).go()
    assert (refused.rounds, refused.stopped) == (2, "refused")
    monkeypatch.setattr(clients_spending.Spending, "pay", lambda *_: None)
    on = begin(settings, limit).go()
    assert on.rounds == 3
    assert on.epsilon is not None
    assert on.epsilon > stop.budget


@pytest.mark.slow
def test_a_target_is_enough_for_every_round(begin: Begin) -> None:
    settings = [entry for entry in RECORD if "noise_multiplier" not in entry]
    case = begin(settings, "privacy.target_epsilon=4.0")
    outcome = case.go()
    assert (outcome.rounds, outcome.stopped) == (3, "")
    assert outcome.epsilon is not None
    assert 4.0 * 0.99 <= outcome.epsilon <= 4.0


@pytest.mark.slow
def test_a_round_that_was_charged_is_finished_also_at_the_end_of_the_budget(begin: Begin) -> None:
    case = begin(RECORD, budget(RECORD, 2))
    crash_at(case, 2)
    with pytest.raises(KeyboardInterrupt):
        case.go()
    assert case.charged() == rounds(1, 2)
    case.channel.before = lambda _site, _request: None
    outcome = case.go()
    assert (outcome.rounds, outcome.stopped) == (2, "budget")
    assert case.charged() == rounds(1, 2)


@pytest.mark.slow
def test_a_run_whose_sites_refuse_ends_with_the_model_it_has(begin: Begin) -> None:
    """The sites' own budgets stop it, where the plan has none."""
    case = begin(RECORD, "cohort.attempts=1")
    limit = case.terms.epsilon(2) * 1.0001
    policy = f"secure_required = false\ngreatest_epsilon = {limit}\ngreatest_delta = {case.terms.delta}\n"

    def tighten(_site: str, request: Request) -> None:
        """Two sites get a policy in the last round, whose cost it forbids."""
        last = isinstance(request, Contribute) and request.sum.round == 3
        for index, name in enumerate(NAMES[:2] if last else []):
            case.channel.sites[name] = partial(case.federation.site, index, policy=policy)

    case.channel.before = tighten
    outcome = case.go()
    assert (outcome.rounds, outcome.stopped) == (2, "refused")
    # Two sites have trained for the round that was not finished, and that is counted.
    assert outcome.epsilon == case.terms.epsilon(3) == gather(case.out).epsilon
    (ended,) = [event for event in case.events if isinstance(event, Finished)]
    assert ended.epsilon == outcome.epsilon
    assert any(isinstance(event, Refusing) and event.sites == tuple(NAMES[:2]) for event in case.events)
    assert case.charges_at_sites() == [2, 2, 3, 3]


# Crashes.


def crash_at(case: Run, number: int, site: str = NAMES[2]) -> None:
    """The coordinator's process ends when it is about to ask a site to train in that round."""

    def crash(name: str, request: Request) -> None:
        if isinstance(request, Contribute) and (request.sum.round, name) == (number, site):
            raise KeyboardInterrupt

    case.channel.before = crash


def never(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


MOMENTS = {
    "asking": None,
    "paying": "cloister.server.sum.spending.Spending.before_opening",
    "opening": "cloister.aggregation.vector.average.SumLayout.open",
    "noising": "cloister.privacy.mechanism.site_noise.SiteMechanism.add_noise",
    "decoding": "cloister.privacy.mechanism.site_noise.SiteMechanism.decode",
    "saving": "cloister.server.record.checkpoint.Checkpoints.save",
    "journaling": "cloister.server.record.progress.asdict",
}


@pytest.mark.parametrize(
    ("settings", "moment"),
    [*((CENTRAL, moment) for moment in MOMENTS), (SKELLAM, "asking"), (SKELLAM, "opening")],
    ids=[*MOMENTS, "asking-skellam", "opening-skellam"],
)
def test_a_resumed_run_charges_no_round_twice(
    begin: Begin, settings: list[str], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = begin(settings, "run.rounds=2")
    where = MOMENTS[moment]
    with monkeypatch.context() as patch:
        if where is None:
            crash_at(case, 1)
        elif moment == "saving":
            right = SumLayout.open  # before it, the initial model is saved

            def open_(self: SumLayout, *sums: Any) -> Any:
                patch.setattr(where, never)
                return right(self, *sums)

            patch.setattr(SumLayout, "open", open_)
        else:
            patch.setattr(where, never)
        with pytest.raises(KeyboardInterrupt):
            case.go()
    case.channel.before = lambda _site, _request: None
    outcome = case.go()
    assert outcome.rounds == 2
    assert case.charged() == rounds(1, 2)
    assert outcome.epsilon == case.terms.epsilon(2)
    assert case.charges_at_sites() == [2, 2, 2, 2]


# Noise of a trusted coordinator: one for a sum.


@pytest.mark.parametrize(
    "changes",
    [(), ("aggregation.secure=true",), ("privacy.adaptive={count_noise=2.0}",)],
    ids=["clear", "masked", "adaptive"],
)
def test_a_sum_that_is_opened_again_from_a_copy_of_the_folder_gets_the_same_noise(
    begin: Begin, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = begin(CENTRAL, "run.rounds=1", *changes)
    noises: list[npt.NDArray[np.int32]] = []
    norms: list[float] = []
    add_noise, decode = SiteMechanism.add_noise, SiteMechanism.decode

    def noised(self: SiteMechanism, total: npt.NDArray[np.uint32], *noise: Any) -> None:
        exact = total.copy()
        add_noise(self, total, *noise)
        noises.append((total - exact).view(np.int32)[: self.dimension])

    def decoded(self: SiteMechanism, *what: Any) -> tuple[Vector, float]:
        update, norm = decode(self, *what)
        norms.append(norm)
        return update, norm

    monkeypatch.setattr(SiteMechanism, "add_noise", noised)
    monkeypatch.setattr(SiteMechanism, "decode", decoded)
    with monkeypatch.context() as patch:
        patch.setattr(ServerOptimizer, "step", never)
        with pytest.raises(KeyboardInterrupt):
            case.go()
    assert (case.out / "noise.json").stat().st_mode & 0o777 == 0o600
    copies = [case.out.with_name(name) for name in ("first", "second", "third")]
    for copy in copies:
        shutil.copytree(case.out, copy)
    models = []
    for copy in copies[:2]:
        case.out = copy
        models.append(case.go().params_sha256)
    assert models[0] == models[1]
    assert len(noises) == 3
    assert all(np.array_equal(noise, noises[0]) for noise in noises)
    assert len(set(norms)) == 1
    assert case.charges_at_sites() == [1, 1, 1, 1]
    if case.plan.aggregation.secure:
        return
    # In clear another site may be missing: the sum is another one, and its noise is independent.
    case.out = copies[2]
    case.channel.down = lambda site, _step, request: isinstance(request, Contribute) and site == NAMES[0]
    assert case.go().params_sha256 != models[0]
    assert abs(np.corrcoef(noises[3], noises[0])[0, 1]) < 0.1
    assert np.std(noises[3]) == pytest.approx(np.std(noises[0]), rel=0.1)


# kill -9 of real processes.


class Nth:
    """The moment at which events of a kind and round have come so often."""

    def __init__(self, kind: type, number: int, times: int) -> None:
        self._wanted, self._left = (kind, number), times

    def __call__(self, event: Event) -> bool:
        self._left -= (type(event), getattr(event, "round", 0)) == self._wanted
        return self._left == 0


@pytest.mark.slow
def test_after_kill_9_every_release_has_a_charge_and_no_round_two(tmp_path: Path) -> None:
    records = write_records(tmp_path / "records.jsonl")
    plan = changed(tiny(*RECORD, *QUICK), "simulation", source=str(records))
    out = tmp_path / "run"
    RunFolder.create(out, plan).close()
    lay_out(plan, out / "sites")
    sites, before, own = out / "sites", list[Entry](), dict[str, list[Entry]]()
    released = set[str]()

    def check(charged: int) -> None:
        now = coordinators(out)
        assert list(now[: len(before)]) == before, "a charge was lost or changed"
        before[:] = now
        keys = [(entry.charge.round, entry.charge.dataset) for entry in now]
        assert len(keys) == len(set(keys))
        assert set(keys) >= set(rounds(*range(1, charged + 1)))
        for name in NAMES:
            entries = list(Ledger(sites / name / "state" / "ledger.sqlite", name, composed).entries())
            assert entries[: len(own.get(name, []))] == own.get(name, [])
            own[name] = entries
            paid = {(entry.charge.run, entry.charge.round) for entry in entries}
            for kept in (sites / name / "state").glob("runs/*/update-*.ring"):
                of = {(run_id(run), number) for run, number in paid}
                assert (kept.parent.name, int(kept.stem.split("-")[1])) in of, "a release without a charge"
                released.add(name)
            assert {number for _, number in paid} >= set(range(1, charged))

    # When two sites have answered; and when all have, and the sum is not opened.
    for moment, charged in ((Nth(SiteAnswered, 1, 2), 1), (Nth(SiteAnswered, 2, 4), 2)):
        kill_while(killed_again, out, moment)
        check(charged)
    with RunFolder.reopen(out) as folder:
        simulate(folder, lambda _event: None, workers=1)
    check(3)
    assert released == set(NAMES)
    assert sorted((entry.charge.round, entry.charge.dataset) for entry in before) == rounds(1, 2, 3)
    for name in NAMES:
        assert {entry.charge.round for entry in own[name]} == {1, 2, 3}
    # A site that was killed at work was charged once more at most for each kill.
    assert 12 <= sum(map(len, own.values())) <= 12 + 2
