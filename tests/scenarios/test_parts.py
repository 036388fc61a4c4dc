"""Runs whose rounds train a part of the model: sparse rounds, and RoLoRA's halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cloister.aggregation.features.feature import Basis, Given
from cloister.aggregation.features.server_optimizer import ServerOptimizer
from cloister.aggregation.sums import Sums
from cloister.lm.model.layout import Layout
from cloister.lm.model.model import load_model
from cloister.lm.model.schedule import Schedule
from cloister.protocol.errors import CloisterError
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.soundness import parse
from cloister.server.record.checkpoint import Checkpoint, Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.progress import RoundDone
from cloister.simulations.audit.audit import audit
from cloister.tests.parties.federation import CENTRAL, RECORD, SKELLAM, tiny
from cloister.tests.scenarios.test_compressed_run import EIGHT_BITS, Run, sent_bytes

PART = ["aggregation.part=0.5", "model.config.num_hidden_layers=3", "run.rounds=4", "server.evaluation=none"]
HALVES = ["model.adapter.scheme=rolora", "model.adapter.rank=2", "run.rounds=4", "server.evaluation=none"]
KEEP = ["local.optimizer_state=keep", "server.optimizer=adam"]
NOISE = ["simulation.noise_seed=3", "privacy.noise_multiplier=1.0"]


def models(made: Run) -> tuple[Layout, list[Checkpoint]]:
    layout = load_model(made.plan).layout
    kept = Checkpoints(made.folder / "checkpoints", layout, 9)
    return layout, [kept.load(number) for number in range(made.plan.run.rounds + 1)]


def finished(path: Path, *settings: str) -> Run:
    made = Run(path, *settings, "server.keep_checkpoints=9")
    made.go()
    return made


def digests(made: Run) -> list[str]:
    return [event.params_sha256 for event in made.of(RoundDone)]


@pytest.mark.parametrize("settings", [PART, HALVES], ids=["sparse", "rolora"])
@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_a_round_moves_what_it_trains_and_nothing_else(
    settings: list[str], optimizer: str, tmp_path: Path
) -> None:
    made = finished(tmp_path, *settings, f"server.optimizer={optimizer}")
    layout, kept = models(made)
    schedule = Schedule.of(made.plan, layout)
    for number in range(1, 5):
        part = schedule.of_round(number)
        assert 0 < part.size < layout.size
        trained = layout.spread(np.ones(part.size, np.float32), part).astype(bool)
        before, after = kept[number - 1], kept[number]
        for name, values in {
            "weights": (before.weights, after.weights),
            **{
                name: (before.features.get(name, np.zeros(layout.size)), value)
                for name, value in after.features.items()
                if value.shape == (layout.size,)
            },
        }.items():
            moved = values[0] != values[1]
            assert not moved[~trained].any(), name
            assert moved[trained].mean() > 0.5, name
    if optimizer == "adam":
        steps = [
            sum(name in schedule.of_round(number).names for number in range(1, 5)) for name in layout.names
        ]
        np.testing.assert_array_equal(kept[4].features["optimizer/step"], steps)


@pytest.mark.parametrize("settings", [PART, HALVES], ids=["sparse", "rolora"])
def test_a_site_sends_what_the_round_trains(settings: list[str], tmp_path: Path) -> None:
    made = finished(tmp_path, *settings)
    layout, _ = models(made)
    part = Schedule.of(made.plan, layout).of_round(4)
    folder = made.kept(next(iter(made.folders)))
    limbs = Sums(made.plan, part.size).training.length - part.size
    assert sent_bytes(folder / "update-00004.ring") == 4 * (part.size + limbs)


@pytest.mark.parametrize(
    "settings",
    [[*PART, *KEEP], [*HALVES, *KEEP], [*PART, *EIGHT_BITS], [*HALVES, *EIGHT_BITS]],
    ids=["sparse", "rolora", "sparse compressed", "rolora compressed"],
)
def test_the_masked_sum_and_its_clear_twin_have_the_same_bits(settings: list[str], tmp_path: Path) -> None:
    """With kept moments and a server that has moments of its own."""
    masked = finished(tmp_path / "masked", *settings)
    clear = finished(tmp_path / "clear", *settings, "aggregation.secure=false")
    assert digests(masked) == digests(clear)
    assert len(set(digests(masked))) == 4


@pytest.mark.parametrize(
    "settings",
    [[*PART, *KEEP], [*HALVES, *KEEP], [*PART, *EIGHT_BITS]],
    ids=["sparse", "rolora", "sparse compressed"],
)
def test_a_run_that_was_stopped_ends_with_the_same_model(settings: list[str], tmp_path: Path) -> None:
    through = finished(tmp_path / "through", *settings)
    stopped = Run(tmp_path / "stopped", *settings, "server.keep_checkpoints=9")
    last = stopped.stop_at(*(_done(number) for number in (1, 2, 3)))
    assert digests(last)[-1] == digests(through)[-1]


def test_moments_outlive_the_rounds_that_do_not_train_their_parameters(tmp_path: Path) -> None:
    """The halves of RoLoRA alternate, so moments of the round before would never be used."""
    kept = finished(tmp_path / "kept", *HALVES, "local.optimizer_state=keep")
    reset = finished(tmp_path / "reset", *HALVES)
    assert digests(kept)[:2] == digests(reset)[:2]
    assert digests(kept)[2] != digests(reset)[2]


def _done(number: int) -> Callable[[Any], bool]:
    return lambda event: isinstance(event, RoundDone) and event.round == number


@pytest.mark.parametrize(
    "unit",
    [RECORD, [*CENTRAL, "privacy.noise_multiplier=1.0"], [*SKELLAM, "privacy.adaptive={}"]],
    ids=["record", "central", "skellam"],
)
@pytest.mark.parametrize("settings", [PART, HALVES], ids=["sparse", "rolora"])
def test_private_rounds_add_noise_to_all_that_they_train(
    settings: list[str], unit: list[str], tmp_path: Path
) -> None:
    made = finished(tmp_path, *unit, *settings, *NOISE)
    layout, kept = models(made)
    schedule = Schedule.of(made.plan, layout)
    for number in range(1, 5):
        part = schedule.of_round(number)
        trained = layout.spread(np.ones(part.size, np.float32), part).astype(bool)
        moved = kept[number].weights != kept[number - 1].weights
        assert not moved[~trained].any()
        assert moved[trained].mean() > 0.99


def test_noise_of_unit_site_is_that_of_a_whole_round(tmp_path: Path) -> None:
    """Its standard deviation does not depend on how much is trained, and its charge is that of all parameters."""
    made = finished(tmp_path, *SKELLAM, *PART, "privacy.noise_multiplier=50.0", "simulation.noise_seed=5")
    layout, kept = models(made)
    schedule, sums = Schedule.of(made.plan, layout), Sums.over(made.plan, layout, b"")
    mechanism = sums.terms
    assert mechanism is not None
    for number in (1, 2):
        of_round = sums.of_round(TRAIN, number)
        assert of_round.terms == sums.terms
        part = schedule.of_round(number)
        change = layout.pick(kept[number].weights - kept[number - 1].weights, part)
        expected = 50.0 * made.plan.privacy.clip / made.plan.cohort.sites
        assert change.std() == pytest.approx(expected, rel=0.6)
        assert change.std() > 0.99 * expected


@pytest.mark.parametrize("settings", [PART, HALVES], ids=["sparse", "rolora"])
def test_masks_of_other_parts_do_not_cancel(settings: list[str]) -> None:
    """The contract of a round's sum has its part, so a site that sums another part signs another context."""
    plan = tiny(*settings)
    layout = load_model(plan).layout
    sums = Sums.over(plan, layout, b"")
    rounds = [sums.of_round(TRAIN, number) for number in (1, 2, 3, 4)]
    assert len({each.model for each in rounds}) == len(
        {each.trained.names for each in rounds if each.trained}
    )
    assert all(each.model != sums.model for each in rounds)


def test_an_audit_of_unit_site_refuses_a_run_of_parts(tmp_path: Path) -> None:
    made = finished(tmp_path, *SKELLAM, *PART, *NOISE)
    with RunFolder.reopen(made.folder) as folder, pytest.raises(CloisterError) as refused:
        audit(folder)
    assert refused.value.field == "aggregation.part"


@dataclass(frozen=True)
class _Drawn:
    """A schedule with some parts."""

    layout: Layout
    names: tuple[tuple[str, ...], ...]

    def of_round(self, number: int) -> Layout:
        return self.layout.only(self.names[number])


@pytest.mark.parametrize("name", ["fedavg", "nesterov", "adam"])
def test_the_servers_optimizer_steps_on_each_parameter_as_if_it_were_alone(name: str) -> None:
    plan = parse("", [f"server.optimizer={name}", "aggregation.part=0.5"])
    layout = Layout(("a", "b", "c"), ((5,), (7,), (3,)))
    drawn: Any = _Drawn(layout, (("a", "c"), ("b",), ("a", "b", "c"), ("c",)))
    start = np.random.default_rng(0).normal(size=15).astype(np.float32)
    models = {"": start.copy()} | {each: part.copy() for each, part in layout.split(start.copy()).items()}

    def made(each: str) -> ServerOptimizer:
        return ServerOptimizer(Basis(plan, models[each].size, schedule=None if each else drawn), Given())

    with mock.patch("cloister.aggregation.features.server_optimizer._BLOCK", 4):
        optimizers = {each: made(each) for each in models}
        for number in range(len(drawn.names)):
            part = drawn.of_round(number)
            update = np.random.default_rng(number).normal(size=part.size).astype(np.float32)
            for each, own in part.split(update.copy()).items():
                optimizers[each].step(models[each], own.copy(), (number,))
            optimizers[""].step(models[""], update, (number,))
            state, optimizers[""] = optimizers[""].state(), made("")  # as after a stop
            optimizers[""].restore(state)
    for each, own in layout.split(models[""].copy()).items():
        np.testing.assert_array_equal(own, models[each])
