"""Runs with a bound on every site's update: masked and in clear, with sites that lie, with retries and with a stop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from cloister.aggregation.features.compression import FIRST, LEAST_BOUND, Scales, bounds_in
from cloister.aggregation.features.feature import Basis, Given, Summed
from cloister.aggregation.features.norm_bound import Bounded, bound_of, longest_signal
from cloister.aggregation.features.registry import Coordinated, layout_of, norm_of_update
from cloister.aggregation.secure.secure_sum import sketch_seed
from cloister.aggregation.secure.sketches import Sketches
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT, Counter, SumLayout
from cloister.aggregation.vector.ring import Ring
from cloister.aggregation.vector.rotation import ROTATED
from cloister.aggregation.vector.sketch import REACH, Lengths, from_bytes, to_bytes
from cloister.aggregation.vector.span import manifest_of
from cloister.clients.consent.admission import Admission
from cloister.clients.ranks.resident import Resident
from cloister.clients.site import Simulated, Site
from cloister.clients.state.attempt_files import AttemptFiles
from cloister.clients.state.kept import Written
from cloister.lm.model.layout import Layout
from cloister.lm.model.schedule import Schedule
from cloister.privacy.ledger.policy import Policy
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import PlanError, PolicyError, QuorumError, SpoiledError, UpdateError
from cloister.protocol.identity.audit_log import AuditLog, Fact
from cloister.protocol.messages.messages import (
    TRAIN,
    Agree,
    Confirm,
    Contribution,
    Failed,
    Reply,
    Request,
    SumId,
    Survivors,
)
from cloister.server.record.folder import RunFolder
from cloister.server.record.progress import AttemptFailed, RoundAbandoned, RoundDone, SiteFailed
from cloister.server.run import run
from cloister.server.sum import sum as sum_module
from cloister.tests.parties.federation import RECORD, Federation, tiny
from cloister.tests.scenarios.test_compressed_run import Run
from cloister.tests.scenarios.test_liars import resigned
from cloister.tests.tools.raises import raises

IN_CLEAR = [*RECORD, "aggregation.norm_bound=auto", "run.rounds=2"]
BOUNDED = [*IN_CLEAR, "aggregation.secure=true"]
FIVE = ["cohort.sites=5", "cohort.quorum=0.6", "aggregation.dropouts=0.2", "aggregation.colluders=0.0"]


class Declared(Run):
    """A run whose noise is the same in each process, and in each run."""

    def __init__(self, path: Path, *settings: str) -> None:
        super().__init__(path, *settings)
        base = NoiseStream.from_declared_seed(1)

        def declared(name: str, made: Callable[[], Site]) -> Site:
            site = made()
            noise = Simulated(noise=lambda number: base.child(f"{name} {number}"), one_owner=True)
            return Site(site.config, self.resident, simulated=noise)

        self.resident = Resident()
        for name, make in self.channel.sites.items():
            self.channel.sites[name] = partial(declared, name, cast(Callable[[], Site], make))


# Honest runs.


@pytest.mark.parametrize(
    "changes",
    [
        ["aggregation.ring_bits=16"],
        ["aggregation.ring_bits=8", "aggregation.compression={}"],
        ["aggregation.norm_bound=0.01"],
        ["aggregation.part=0.5", "local.optimizer=sgd"],
    ],
    ids=["16 bits", "8 bits", "clipped", "parts"],
)
def test_a_masked_run_is_that_in_clear_and_loses_no_round(tmp_path: Path, changes: list[str]) -> None:
    masked = Declared(tmp_path / "masked", *BOUNDED, *changes)
    clear = Declared(tmp_path / "clear", *IN_CLEAR, *changes)
    assert masked.go().params_sha256 == clear.go().params_sha256
    assert len(masked.of(RoundDone)) == 2
    assert not masked.of(AttemptFailed)
    confirmed = [step for step, _ in masked.channel.asked if step == "confirm"]
    assert len(confirmed) == 2 * masked.plan.cohort.sites, "one exchange, as without sketches"


def test_an_update_is_scaled_to_the_bound(tmp_path: Path) -> None:
    norms = []
    for bound in ("0.01", "1e6"):
        done = Run(tmp_path / bound, *IN_CLEAR, f"aggregation.norm_bound={bound}", "local.clip_norm=0.0")
        done.go()
        norms.append([event.update_norm for event in done.of(RoundDone)])
    assert max(norms[0]) <= 0.01
    assert min(norms[1]) > 0.01


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_the_bound_auto_leaves_honest_updates_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """It has room for what the steps do, noise included, and no more than five times that."""
    found: list[float] = []
    release = Bounded.release

    def watched(code: Bounded, values: Any, *others: Any) -> Any:
        found.append(float(np.linalg.norm(values.astype(np.float64))) / code.bound)
        return release(code, values, *others)

    monkeypatch.setattr(Bounded, "release", watched)
    Run(tmp_path, *IN_CLEAR, f"local.optimizer={optimizer}").go()
    assert 0.2 < max(found) <= 1


@pytest.mark.parametrize("step", ["confirm", "unmask"])
def test_a_run_that_is_stopped_after_the_sketches_goes_on_to_the_same_model(
    tmp_path: Path, step: str
) -> None:
    whole, stopped = (Declared(tmp_path / name, *BOUNDED) for name in ("whole", "stopped"))
    expected = whole.go().params_sha256

    class EndedError(Exception):
        pass

    def before(site: str, request: Request) -> None:
        last = site == list(stopped.folders)[-1]
        if last and isinstance(request, Agree) and (request.told.STEP.label, request.sum.round) == (step, 2):
            raise EndedError

    stopped.channel.before = before
    with pytest.raises(EndedError):
        stopped.go()
    again = Declared(tmp_path / "stopped")
    assert again.go().params_sha256 == expected


# Sites that lie.


class Liar:
    """A site whose vector and sketch are other ones than those that it has trained.

    Args:
        monkeypatch: Changes the sites.
        federation: The federation; its last site lies.
        added: What it adds to each value of its update, in steps.
        honest: Whether its sketch is that of its vector; otherwise that of its update.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, federation: Federation, added: float, *, honest: bool
    ) -> None:
        self.name, size = federation.names[-1], federation.layout.size
        effect, lengths = np.full(size, round(added), np.int32).view(np.uint32), Lengths(size, 1.0)
        made, sketch = Site._made, Site._sketch

        def lying(site: Site, *arguments: Any) -> Written:
            written = made(site, *arguments)
            if site.name != self.name:
                return written
            vector = np.concatenate([piece for _, piece in written.pieces])
            vector[:size] += effect
            return Written(manifest_of([(0, vector)]), [(0, vector)])

        def claimed(site: Site, about: SumId, tries: int, seed: bytes, count: int) -> bytes:
            true = sketch(site, about, tries, seed, count)
            if site.name != self.name or not honest:
                return true
            return to_bytes(from_bytes(true) + lengths.sketch([(0, effect)], seed))

        monkeypatch.setattr(Site, "_made", lying)
        monkeypatch.setattr(Site, "_sketch", claimed)


def federation(path: Path, *settings: str) -> Federation:
    return Federation(path / "federation", tiny(*BOUNDED, *FIVE, "run.rounds=3", *settings))


def steps_in(federation: Federation) -> float:
    """Steps of each value of an update that is as long as the bound."""
    lengths = Sums.over(federation.plan, federation.layout, b"").training.lengths()
    assert lengths is not None
    return lengths.longest / math.sqrt(lengths.size)


def go(federation: Federation, path: Path) -> list[object]:
    events: list[object] = []
    with RunFolder.create(path / "run", federation.plan) as folder:
        run(folder, federation.channel, events.append, roster=federation.roster)
    return events


def of(events: list[object], kind: type[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_site_that_is_too_long_is_named_and_left_out_and_no_round_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = federation(tmp_path, "cohort.attempts=1")
    liar = Liar(monkeypatch, lying, 5 * steps_in(lying), honest=True)
    events = go(lying, tmp_path)
    assert [(event.round, event.attempt) for event in of(events, AttemptFailed)] == [(1, 1)]
    # With one sketch of an update the next attempt has none: the round is given up, and the next one is without it.
    assert [event.round for event in of(events, RoundAbandoned)] == [1]
    assert [event.sites for event in of(events, RoundDone)] == [4, 4]
    named = [event.reason for event in of(events, SiteFailed) if event.site == liar.name]
    assert any("left out of all later sums" in reason for reason in named)
    asked = lying.channel.asked
    first = asked[: asked.index(("confirm", liar.name)) + 1]
    assert "unmask" not in dict(first)


def test_the_next_attempt_of_the_round_is_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying = federation(tmp_path, "cohort.attempts=2")
    Liar(monkeypatch, lying, 5 * steps_in(lying), honest=True)
    events = go(lying, tmp_path)
    assert len(of(events, AttemptFailed)) == 1
    assert [event.sites for event in of(events, RoundDone)] == [4, 4, 4]


def test_without_the_check_of_lengths_it_moves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sketches, "check_length", lambda *_: None)  # removes the guard
    lying = federation(tmp_path)
    Liar(monkeypatch, lying, 5 * steps_in(lying), honest=True)
    norms = [event.update_norm for event in of(go(lying, tmp_path), RoundDone)]
    bound = bound_of(Sums.over(lying.plan, lying.layout, b""))
    assert min(norms) > 3 * bound / 5


def test_a_site_that_sketches_another_vector_spoils_its_rounds_and_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = federation(tmp_path, "cohort.attempts=2")
    liar = Liar(monkeypatch, lying, 1, honest=False)
    with pytest.raises(SpoiledError):
        go(lying, tmp_path)
    assert ("unmask", liar.name) in lying.channel.asked
    with pytest.MonkeyPatch.context() as without:
        without.setattr(Sketches, "check_sum", lambda *_: None)  # removes the guard
        other = federation(tmp_path / "other", "cohort.attempts=2")
        assert len(of(go(other, tmp_path / "other"), RoundDone)) == 3


def test_a_liar_in_clear_is_a_dropout_by_the_norm_of_its_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = federation(tmp_path, "aggregation.secure=false")
    liar = Liar(monkeypatch, lying, 1.01 * steps_in(lying), honest=False)
    events = go(lying, tmp_path)
    assert [event.sites for event in of(events, RoundDone)] == [4, 4, 4]
    assert {event.site for event in of(events, SiteFailed)} == {liar.name}


def test_a_complaint_stops_no_sketch(tmp_path: Path) -> None:
    """What a site complains of is in the statement whose signature all survivors check."""
    complained = federation(tmp_path, "aggregation.colluders=0.2")
    liar, honest, *_ = complained.names

    def lie(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == liar:
            assert reply.statement is not None
            statement = dataclasses.replace(reply.statement, complaints=(honest,))
            return dataclasses.replace(reply, statement=resigned(complained, statement))
        return reply

    complained.channel.tamper = lie
    events = go(complained, tmp_path)
    assert [event.round for event in of(events, RoundDone)] == [1, 2, 3]


def test_liars_within_the_bound_are_in_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lying = federation(tmp_path)
    Liar(monkeypatch, lying, 0.2 * steps_in(lying), honest=True)
    assert [event.sites for event in of(go(lying, tmp_path), RoundDone)] == [5, 5, 5]


# How much of an update is seen.


def test_a_site_makes_as_many_sketches_of_an_update_as_the_plan_has_attempts(tmp_path: Path) -> None:
    """Whatever ends the attempts, and in whatever process of the coordinator."""
    lost = federation(tmp_path, "cohort.attempts=2", "cohort.quorum=1.0", "aggregation.dropouts=0.0")
    name, seeds = lost.names[0], set()

    def watch(step: str, reply: Reply) -> Reply:
        if isinstance(reply, Confirm) and reply.site == name and reply.sketched is not None:
            seeds.add(sketch_seed(reply.survivors))
        return reply

    lost.channel.tamper = watch
    lost.channel.down = lambda site, step, request: (
        step == "unmask" and site != name and isinstance(request, Agree) and request.sum.round == 1
    )
    events = go(lost, tmp_path)
    assert len(of(events, AttemptFailed)) == 2
    assert [event.round for event in of(events, RoundAbandoned)] == [1]
    assert len(of(events, RoundDone)) == 2
    assert len(seeds) == 2 + 2
    (folder,) = (lost.sites_folder / name).glob("**/secure/train")
    with AttemptFiles.turn(folder, "") as files:
        assert files.state(None).marks.sketched == (3, 1, 1)


@pytest.mark.parametrize("damaged", [False, True])
def test_no_site_makes_one_more_for_a_coordinator_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """All sites sketch, and all answers but one are lost, in two attempts; then another process asks again. Where
    `damaged`, a slot of the marks of one site is lost before it is asked for its sketch, each time."""
    lost = federation(tmp_path, "cohort.attempts=2", "cohort.quorum=1.0", "aggregation.dropouts=0.0")
    name, seeds, events = lost.names[0], set[bytes](), list[object]()

    def lose(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Confirm):
            seeds.add(sketch_seed(reply.survivors))
            return reply if reply.site == name else Failed(reply.site, "lost")
        return reply

    def damage(site: str, request: Request) -> None:
        if damaged and site == name and isinstance(request, Agree) and isinstance(request.told, Survivors):
            (marks,) = (lost.sites_folder / name).glob("**/secure/train/marks")
            whole = bytearray(marks.read_bytes())
            with AttemptFiles.turn(marks.parent, f"{request.sum.run}/train") as files:
                whole[files.state(None).marks.writes % 2 * (len(whole) // 2) + 20] ^= 1
            marks.write_bytes(whole)

    lost.channel.tamper, lost.channel.before = lose, damage
    monkeypatch.setattr(sum_module, "_sketched", lambda *_: False)  # an honest one gives the round up
    with pytest.raises(QuorumError):
        go(lost, tmp_path)
    assert len(seeds) == 2
    with RunFolder.reopen(tmp_path / "run") as folder, pytest.raises(QuorumError):
        run(folder, lost.channel, events.append, roster=lost.roster)
    assert len(seeds) == 2
    refused = {event.site for event in of(events, SiteFailed) if "sketches of one update" in event.reason}
    assert refused == set(lost.names)


@pytest.mark.parametrize(("bits", "liars"), [(8, 2), (16, 4)])
@pytest.mark.parametrize("place", ["everywhere", "one block"])
def test_liars_that_fill_the_room_for_rounding_make_no_larger_room(bits: int, liars: int, place: str) -> None:
    """Bounds of blocks follow the mean, and the room follows the bounds: without a limit both grow in each round."""
    changes = [f"aggregation.ring_bits={bits}", "aggregation.compression={}", "aggregation.norm_bound=1.0"]
    plan, size = tiny(*BOUNDED, *changes, "cohort.sites=8"), 20 * ROTATED
    basis = Basis(plan, size)
    layout, most = layout_of(basis), norm_of_update(basis)
    direction = np.ones(size) if place == "everywhere" else np.eye(20)[3].repeat(ROTATED)
    grown = []
    assert layout.blocks is not None
    assert layout.blocks.most_kept == 1, "a residual of one step"
    for limit in (1.0, math.inf):
        scales, norms = Scales.first(plan, size, limit), []
        for _ in range(12):
            bounds = np.maximum(scales.bounds, scales.bounds.max() * LEAST_BOUND)
            lengths = layout.lengths(bounds)
            assert lengths is not None
            norms.append(lengths.bound)
            mean = direction / np.linalg.norm(direction) * REACH * liars * lengths.bound / 8
            scales = scales.after(plan, mean.astype(np.float32), 8, 1.0, None, limit)
        grown.append(max(norms))
    assert grown[0] <= most
    assert bits == 16 or grown[1] > 1.5 * most, "without the limit"


@pytest.mark.parametrize(
    ("bits", "sites", "times"),
    [(8, 8, "2.4 times"), (8, 43, "25 times"), (16, 8, "1.04 times"), (16, 100, "1.3 times")],
)
def test_the_room_for_rounding_is_what_the_page_says(bits: int, sites: int, times: str) -> None:
    few = [f"aggregation.ring_bits={bits}", "aggregation.compression={}", "aggregation.norm_bound=1.0"]
    room = norm_of_update(Basis(tiny(*BOUNDED, *few, f"cohort.sites={sites}"), 10**6))
    figure = times.partition(" ")[0]
    assert f"{room:.{len(figure.replace('.', ''))}g}" == figure
    said = (Path(__file__).resolve().parents[3] / "docs" / "poisoning.md").read_text(encoding="utf-8")
    words = " ".join(said.replace("`norm_bound` ", "").replace("at 8 bits for", "for").split())
    assert f"{times} for {sites}" in words.replace("at 8 bits for", "for")


@pytest.mark.parametrize(
    "changes",
    [["aggregation.part=0.125"], ["model.adapter.scheme=rolora", "aggregation.part=0.25"]],
    ids=["part", "rolora"],
)
def test_liars_that_heat_one_part_after_the_other_make_no_larger_room(
    monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    """The bounds of a whole vector are made by many rounds, and one round may have all blocks that were heated."""
    few = ["aggregation.ring_bits=8", "aggregation.compression={}", "aggregation.norm_bound=1.0"]
    plan = tiny(*BOUNDED, *few, "cohort.sites=43", "run.rounds=40", *changes)
    names = [f"layers.{layer}.lora_{half}.w" for layer in range(32) for half in "AB"]
    layout = Layout(tuple(names), ((ROTATED,),) * len(names), "")
    sums = Sums.over(plan, layout, b"")
    stated = max(norm_of_update(sums.of_round(TRAIN, number)) for number in range(1, 41))
    assert max(rooms_of_heated(sums, 4)) <= stated
    monkeypatch.setattr(Scales, "at_most", floored)  # removes the guard
    assert max(rooms_of_heated(sums, 4)) > 1.2 * stated


def floored(scales: Scales, *_: object) -> Scales:
    """As `Scales.at_most`, without its limit on all bounds together."""
    return Scales(np.maximum(scales.bounds, scales.bounds.max() * LEAST_BOUND), 1.0)


def rooms_of_heated(sums: Sums, liars: int) -> list[float]:
    """T of each round, where in each the liars add all that they can to the block that they have not heated longest."""
    sites, rooms, heated = sums.plan.cohort.size(), [], dict[int, int]()
    coordinator = Coordinated(sums, Given())
    for number in range(1, sums.plan.run.rounds + 1):
        of = sums.of_round(TRAIN, number)
        told = coordinator.tell(number, (), {})
        lengths = of.training.lengths(coordinator.bounds(told))
        assert lengths is not None
        rooms.append(lengths.bound)
        mean, own = np.zeros(of.parameters, np.float32), 0
        places = [
            span.start // ROTATED + more
            for span in sums.part((number,))
            for more in range(span.size // ROTATED)
        ]
        own = min(range(len(places)), key=lambda at: heated.get(places[at], 0))
        heated[places[own]] = number
        length = 1.4 * liars * lengths.bound / sites
        mean[own * ROTATED : (own + 1) * ROTATED] = length / math.sqrt(ROTATED)
        summed = Summed(number, 0, tuple(map(str, range(sites))), {WEIGHT: sites}, told, {}, (number,))
        coordinator.before_step(mean, [summed])
        coordinator.after_step()
    return rooms


def test_a_coordinator_bounds_the_scales_that_it_makes_by_the_norm_bound() -> None:
    """Of a mean that is far too long."""
    few = ["aggregation.ring_bits=8", "aggregation.compression={}", "aggregation.norm_bound=1.0"]
    plan, size = tiny(*BOUNDED, *few, "cohort.sites=8"), 4 * ROTATED
    sums = Sums(plan, size)
    coordinator = Coordinated(sums, Given())
    first = coordinator.bounds(coordinator.tell(1, (), {}))
    assert first is not None
    assert first.max() <= 1.01 * FIRST / math.sqrt(size), "of an update as long as the bound"
    mean = np.full(size, 100.0, np.float32)
    made = Scales(first, 0.0)
    limited = made.after(plan, mean, 8, 1.0, None, 1.0).bounds
    summed = Summed(1, 0, tuple(map(str, range(8))), {WEIGHT: 8}, (), {}, (1,))
    coordinator.before_step(mean, [summed])
    coordinator.after_step()
    assert coordinator.state()["compression/bounds"].tolist() == pytest.approx(limited.tolist())


def test_a_site_refuses_blocks_that_one_row_would_tell_apart() -> None:
    plan = tiny(*BOUNDED, "aggregation.ring_bits=8", "aggregation.compression={}")
    bounds = np.array([1.0, LEAST_BOUND], np.float32)
    assert bounds_in(bounds.tobytes(), plan, 2 * ROTATED).tolist() == bounds.tolist()
    with raises(UpdateError, "scales[1]"):
        bounds_in((bounds * [1, 0.99]).astype("<f4").tobytes(), plan, 2 * ROTATED)


def test_in_clear_a_site_of_little_weight_sends_a_short_vector() -> None:
    """Its update is divided by the weights of all, so as long as that of the heaviest site it would count far more."""
    layout = SumLayout(Ring(32, 1.0, 8), 100, (Counter(WEIGHT, 50, 1),), heaviest=50, norm_bound=1.0)
    for weight, refused in ((50, False), (1, True)):
        vector = layout.ring.encode(np.full(100, 0.1, np.float32), bytes(32), factor=1.0)[0]
        vector = np.minimum(vector, layout.ring.levels * weight // 50)  # what single values may be
        vector[:] = vector if weight == 50 else 0
        vector[:1] = vector[0] if weight == 50 else layout.ring.levels // 50
        whole = np.concatenate([vector, layout.tail({WEIGHT: weight})])
        layout.check([(0, whole)])
        if refused:
            whole[:2] = layout.ring.levels // 50
            with raises(UpdateError, "norm of the update, in steps"):
                layout.check([(0, whole)])


def test_no_plan_shows_all_of_an_update() -> None:
    """The coordinator of a family of plans may choose the attempts."""
    plan = tiny(*BOUNDED, "cohort.attempts=2")
    layout_of(Basis(plan, 1024))
    with raises(PlanError, "cohort.attempts"):
        layout_of(Basis(plan, 1023))
    layout_of(Basis(tiny(*IN_CLEAR), 10))


@pytest.mark.parametrize("part", [0.1, 0.25])
def test_what_is_printed_of_a_plan_whose_rounds_train_parts_holds_in_every_round(part: float) -> None:
    """The largest block may be drawn late."""
    shapes = {f"layers.{layer}.w": (10, 10 + layer) for layer in range(12)} | {"embedding": (100, 50)}
    layout = Layout(tuple(shapes), tuple(shapes.values()), "")
    schedule = Schedule.of(tiny(*BOUNDED, f"aggregation.part={part}"), layout)
    sizes = [schedule.of_round(number).size for number in range(1, 500)]
    assert set(sizes) == schedule.sizes(499)
    assert set(sizes[:4]) < schedule.sizes(499)


@pytest.mark.parametrize(("steps", "batch"), [(1, 128), (64, 8)])
def test_the_longest_signal_of_sgd_has_no_noise(steps: int, batch: int) -> None:
    plan = tiny(*BOUNDED, "local.optimizer=sgd", f"local.steps={steps}", f"local.batch_size={batch}")
    basis = Basis(plan, 10_000)
    assert longest_signal(basis) == pytest.approx(
        min(bound_of(basis), steps * plan.local.learning_rate * plan.privacy.clip)
    )


def test_an_attempt_that_ends_by_a_liar_does_not_count_where_another_one_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two attempts the first ends before step 5, for dropouts, and the next by a vector that is too long."""
    lying = federation(tmp_path, "cohort.attempts=2", "run.rounds=1")
    Liar(monkeypatch, lying, 5 * steps_in(lying), honest=True)
    asked = 0

    def down(_site: str, step: str, _request: Request) -> bool:
        nonlocal asked
        asked += step == "share"
        return step == "share" and asked <= 5

    lying.channel.down = down
    events = go(lying, tmp_path)
    assert [event.attempt for event in of(events, AttemptFailed)] == [1, 2]
    assert [event.sites for event in of(events, RoundDone)] == [4]


# What a site's people allow, and see.


def test_a_site_without_a_policy_sends_no_sketch(tmp_path: Path) -> None:
    """But in a simulation, all of whose sites one person has started."""
    asked = federation(tmp_path)
    config = asked.site().config
    with raises(PolicyError, "aggregation.norm_bound"):
        Site(config, asked.resident).join(asked.join_request())
    Site(config, asked.resident, simulated=Simulated(one_owner=True)).join(asked.join_request())


@pytest.mark.parametrize("after", [Policy(units=("record",)), None], ids=["refuses", "gone"])
def test_no_sketch_leaves_after_the_policy_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: Policy | None
) -> None:
    changed = federation(tmp_path, "cohort.attempts=1")
    for name, make in changed.channel.sites.items():
        deployed = partial(Site, cast(Site, make()).config, changed.resident)  # no simulated ones
        changed.channel.sites[name] = deployed
    allowed, sent = [True], []
    policy = Policy(units=("record",), sketches=1)
    monkeypatch.setattr(Admission, "policy", lambda _self: policy if allowed[0] else after)

    def before(_site: str, request: Request) -> None:
        allowed[0] = not (isinstance(request, Agree) and isinstance(request.told, Survivors))

    def watch(_step: str, reply: Reply) -> Reply:
        sent.extend([reply] if isinstance(reply, Confirm) else [])
        return reply

    changed.channel.before, changed.channel.tamper = before, watch
    with pytest.raises(QuorumError):
        go(changed, tmp_path)
    assert not sent


def test_the_audit_log_has_a_line_for_each_sketch(tmp_path: Path) -> None:
    class Lines(AuditLog):
        def __init__(self) -> None:
            self.facts: list[Fact] = []

        def __bool__(self) -> bool:
            return True

        def record(self, *facts: Fact) -> None:
            self.facts.extend(facts)

    logged, lines = federation(tmp_path, "run.rounds=2"), Lines()
    name, alone = logged.names[0], Simulated(one_owner=True)
    config = logged.site().config
    logged.channel.sites[name] = lambda: Site(config, logged.resident, simulated=alone, audit_log=lines)
    go(logged, tmp_path)
    released = [(fact.round, fact.detail.partition(",")[0]) for fact in lines.facts if fact.what == "release"]
    assert released == [(1, "train"), (1, "sketch 1"), (2, "train"), (2, "sketch 1")]
