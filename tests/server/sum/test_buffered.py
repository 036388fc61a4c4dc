"""Asynchronous rounds with compressed updates, and with rounds that train a part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cloister.aggregation.features.compression import NAME as COMPRESSION
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT
from cloister.aggregation.vector.rotation import ROTATED, signs
from cloister.lm.model.schedule import Schedule
from cloister.protocol.errors import CloisterError
from cloister.protocol.messages.messages import Contribute, Contribution, Reply, Request
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.outcome import Outcome
from cloister.server.record.progress import RoundDone, SiteAnswered
from cloister.tests.scenarios.test_async import ASYNC, CLEAR, Run
from cloister.tests.tools.kills import die_at, kill_while
from cloister.tests.tools.mutants import Mutant

SPARSE = ["aggregation.part=0.5", "model.config.num_hidden_layers=3"]
ROLORA = ["model.adapter.scheme=rolora", "model.adapter.rank=2"]
COMPRESSED = ["aggregation.ring_bits=8", "aggregation.compression={}"]
KINDS = {
    "sparse": SPARSE,
    "rolora": ROLORA,
    "compressed": COMPRESSED,
    "compressed sparse": [*COMPRESSED, *SPARSE],
    "compressed rolora": [*COMPRESSED, *ROLORA],
}
STALE = ["cohort.buffer=2", "cohort.staleness=3", "run.rounds=6", "data.packing=false"]


@dataclass
class Arrived:
    """An update as it arrived."""

    into: int
    """The round that sums it."""
    reply: Contribution
    bounds: npt.NDArray[np.float32]
    """What its site was told of the bounds of its blocks; empty without compression."""


def stale_run(path: Path, *settings: str) -> tuple[Run, list[Arrived], Outcome]:
    """A run with a site whose updates are several rounds old, and its updates as they arrived."""
    party = Run(path, *ASYNC, *STALE, *settings)
    slow, *_ = party.names
    told: dict[str, npt.NDArray[np.float32]] = {}
    arrived: list[Arrived] = []

    def asked(site: str, request: Request) -> None:
        if isinstance(request, Contribute):
            told[site] = np.frombuffer(dict(request.told.features).get(COMPRESSION, b""), "<f4")

    def turn(waiting: list[str]) -> str:
        return slow if len(arrived) in (4, 11) else next(name for name in waiting if name != slow)

    def keep(_step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution):
            arrived.append(Arrived(len(party.of(RoundDone)) + 1, reply, told[reply.site]))
        return reply

    party.channel.before, party.channel.turn, party.channel.tamper = asked, turn, keep
    return party, arrived, party.go()


def hadamard(blocks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The orthonormal transform of each row, by its recursion."""
    if blocks.shape[1] == 1:
        return blocks
    one, other = np.split(blocks, 2, axis=1)
    joined: npt.NDArray[np.float64] = np.hstack([hadamard(one + other), hadamard(one - other)]) / np.sqrt(2)
    return joined


def expected_steps(party: Run, arrived: list[Arrived]) -> Iterator[tuple[npt.NDArray[np.float64], set[int]]]:
    """The mean of each round, NaN where no update has a coordinate; and the ages of its updates."""
    schedule, size = Schedule.of(party.plan, party.layout), party.layout.size
    for number in range(1, party.plan.run.rounds + 1):
        total, weight, ages = np.zeros(size), np.zeros(size), set()
        for each in (each for each in arrived if each.into == number):
            model = each.reply.sum.round
            part = schedule.of_round(model)
            layout = Sums(party.plan, part.size, most=size).training
            vector = np.concatenate(each.reply.spans)
            counters = layout.ring.decode_counters(vector[layout.size :])
            tokens = counters[layout.names.index(WEIGHT)]
            steps = vector[: layout.size].view(layout.ring.signed_dtype).astype(np.float64)
            if each.bounds.size:
                rows = steps.reshape(-1, ROTATED) * each.bounds[:, None].astype(np.float64)
                values = (hadamard(rows) * signs(party.plan.run.seed)).ravel()[: part.size]
                values /= layout.ring.levels
            else:
                values = steps / layout.ring.scale
            values = values * layout.heaviest / tokens  # the update itself: it was coded times its weight
            own = tokens / np.sqrt(1 + number - model)
            for name, (first, end) in zip(part.names, pairwise(part.offsets), strict=True):
                at = party.layout.offsets[party.layout.names.index(name)]
                total[at : at + end - first] += own * values[first:end]
                weight[at : at + end - first] += own
            ages.add(number - model)
        with np.errstate(invalid="ignore"):
            yield total / weight, ages


def check_means(path: Path, *settings: str) -> None:
    """Each model is the one before, moved by the mean of the updates as they arrived, where they have one."""
    party, arrived, _ = stale_run(path, *settings)
    every_age, some_stay = set[int](), False
    for number, (mean, ages) in enumerate(expected_steps(party, arrived), start=1):
        before, after = party.model(number - 1), party.model(number)
        moved = ~np.isnan(mean)
        np.testing.assert_array_equal(after[~moved], before[~moved])
        np.testing.assert_allclose(after[moved], before[moved] + mean[moved], atol=3e-7)
        assert np.abs(mean[moved]).max() > 1e-4, "a wrong mean would be seen"
        every_age |= ages
        some_stay |= not moved.all()
    assert every_age >= {0, 2}
    assert some_stay == party.plan.scheduled


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if " " in kind else []) for kind in KINDS]
)
def test_a_mean_is_over_the_updates_that_have_a_coordinate_by_the_bounds_of_their_round(
    kind: str, tmp_path: Path
) -> None:
    check_means(tmp_path, *KINDS[kind])


OF_MODEL = "server.sum.buffered:Buffered._model"
MEAN = "aggregation.vector.average:_merged"


@pytest.mark.parametrize(
    ("kind", "mutant"),
    [
        ("compressed", Mutant(OF_MODEL, "bounds(told.features)", "bounds(self.told.features)")),
        ("sparse", Mutant(OF_MODEL, "part((number,))", "part((self.wanted.round,))")),
        ("rolora", Mutant(MEAN, "for weight, _ in have)", "for weight, *_ in parts)")),
        ("sparse", Mutant(MEAN, "firsts[at] + start - spans[at].start", "firsts[at]")),
        (
            "compressed sparse",
            Mutant("aggregation.vector.average:BufferedSum.open", "self._number - number", "0"),
        ),
    ],
    ids=str,
)
def test_a_wrong_mean_is_found(
    kind: str, mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, CloisterError, RuntimeError)):
        check_means(tmp_path, *KINDS[kind])


@pytest.mark.parametrize("kind", ["sparse", "rolora"])
def test_what_no_update_in_a_buffer_has_trained_keeps_its_moments(kind: str, tmp_path: Path) -> None:
    """Also with moments that sites keep, each of their own last round with the parameter."""
    settings = ["server.optimizer=adam", "server.learning_rate=0.01", "local.optimizer_state=keep"]
    party, arrived, _ = stale_run(tmp_path, *KINDS[kind], *settings)
    layout, schedule = party.layout, Schedule.of(party.plan, party.layout)
    kept = Checkpoints(party.folder / "checkpoints", layout, 9)
    trained = [
        {
            name
            for each in arrived
            if each.into == number
            for name in schedule.of_round(each.reply.sum.round).names
        }
        for number in range(1, 7)
    ]
    assert any(names < set(layout.names) for names in trained)
    counts = np.array([sum(name in names for names in trained) for name in layout.names])
    np.testing.assert_array_equal(kept.load(6).features["optimizer/step"], counts)
    for number, names in enumerate(trained[1:], start=2):
        before, after = kept.load(number - 1), kept.load(number)
        for values in ("exp_avg", "exp_avg_sq"):
            then, now = (layout.split(state.features[f"optimizer/{values}"]) for state in (before, after))
            for name in layout.names:
                assert (then[name] != now[name]).any() == (name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_of_all_sites_is_a_synchronous_round_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    """For two rounds: in the third, synchronous bounds follow what was clipped, and asynchronous ones do not."""
    settings = [*KINDS[kind], "server.optimizer=nesterov", "run.rounds=2"]
    synchronous = Run(tmp_path / "sync", *CLEAR, *settings)
    buffered = Run(tmp_path / "async", *ASYNC, *settings, "cohort.buffer=4")
    buffered.channel.turn = lambda waiting: waiting[-1]
    assert synchronous.go().params_sha256 == buffered.go().params_sha256


def killed(path: Path) -> None:
    Run(path).go(die_at(lambda event: isinstance(event, SiteAnswered) and event.round == 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compressed", "compressed sparse", "rolora"])
def test_a_run_that_is_killed_in_a_buffer_goes_on_from_its_last_round(kind: str, tmp_path: Path) -> None:
    """With a buffer of all sites the weights are those of a run that was not killed, residuals and bounds included."""
    settings = [*ASYNC, *KINDS[kind], "cohort.buffer=4", "run.rounds=4"]
    whole = Run(tmp_path / "whole", *settings).go()
    Run(tmp_path / "killed", *settings)
    kill_while(killed, tmp_path / "killed")
    party = Run(tmp_path / "killed")
    assert party.go().params_sha256 == whole.params_sha256
    assert [event.round for event in party.of(RoundDone)] == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_stale_updates_that_is_killed_in_a_buffer_goes_on(kind: str, tmp_path: Path) -> None:
    Run(tmp_path / "run", *ASYNC, *KINDS[kind], "cohort.buffer=2", "run.rounds=5")
    kill_while(killed, tmp_path / "run")
    party = Run(tmp_path / "run")
    assert party.go().rounds == 5
    assert all(np.isfinite(party.model(number)).all() for number in range(6))


def test_residuals_of_updates_of_other_models_are_added_to_the_next_update(tmp_path: Path) -> None:
    """What a site leaves out goes into its next update, by the bounds with which it was made."""
    party, arrived, _ = stale_run(tmp_path / "with", *COMPRESSED)
    fast = party.names[1]
    of_site = [each for each in arrived if each.reply.site == fast]
    (carried,) = (tmp_path / "with" / "sites" / fast / "state").glob("runs/*/carried")
    rounds = sorted(int(path.name) for path in carried.iterdir())
    assert rounds == [each.reply.sum.round for each in of_site][-2:]
    for number, each in zip(rounds, of_site[-2:], strict=True):
        made = np.fromfile(carried / f"{number:05d}" / "residual", "<f4", each.bounds.size)
        np.testing.assert_array_equal(made, each.bounds)
