"""The features that a plan may have, in the order of their hooks; and those of one plan, as each end asks them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features import (
    asynchronous,
    balance,
    compression,
    gate,
    groups,
    in_clear,
    norm_bound,
    question,
    server_optimizer,
    site_unit,
)
from cloister.aggregation.features.feature import (
    AtCoordinator,
    AtSite,
    Basis,
    Code,
    Feature,
    Figures,
    Given,
    Me,
    Secrets,
    State,
    Summed,
)
from cloister.aggregation.vector.average import WEIGHT, Opened, SumLayout, weighted
from cloister.aggregation.vector.rotation import Floats
from cloister.protocol.errors import RunFolderError, UpdateError
from cloister.protocol.figure import Figure
from cloister.protocol.messages.messages import ByFeature

if TYPE_CHECKING:  # torch takes seconds to import
    from cloister.lm.tasks.task import HeldOut

T = TypeVar("T")

FEATURES: tuple[Feature, ...] = (
    in_clear.FEATURE,
    site_unit.FEATURE,
    question.FEATURE,
    compression.FEATURE,
    norm_bound.FEATURE,
    balance.FEATURE,
    groups.FEATURE,
    asynchronous.FEATURE,
    gate.FEATURE,
    server_optimizer.FEATURE,
)
"""Of several that make a layout, a code or a mean, the last one of a plan does."""

FIGURES: tuple[Figure, ...] = tuple(figure for feature in FEATURES for figure in feature.figures)
"""The figures of a round that features add."""


def features_of(basis: Basis) -> tuple[Feature, ...]:
    """The features of a plan."""
    return tuple(feature for feature in FEATURES if feature.wanted(basis))


def layout_of(basis: Basis) -> SumLayout:
    """The layout of a round's sum.

    Raises:
        PlanError: a feature of the plan has no layout for so many parameters.
    """
    make = [feature.layout for feature in features_of(basis) if feature.layout is not None][-1]
    layout = make(basis)
    for feature in features_of(basis):
        if feature.within is not None:
            layout = feature.within(basis, layout)
    return layout


def norm_of_update(basis: Basis) -> float:
    """T': the bound on the norm of an update with the room for its rounding, in the round that has most.

    Raises:
        PlanError: as `layout_of`.
    """
    layout, bounds, room = layout_of(basis), None, 1.0
    if layout.blocks is not None:
        most = compression.Scales.most(basis.plan, layout.blocks.values, layout.norm_bound)
        bounds = np.hypot(most.bounds, compression.SMALLEST * basis.plan.aggregation.bound)
        room = 1 + 1 / 32  # of weights that are rounded
    lengths = layout.lengths(bounds)
    assert lengths is not None, "a plan with aggregation.norm_bound"
    return lengths.bound * room


@dataclass(frozen=True)
class Orders:
    """What a site does for one update, by all features of the plan; picklable."""

    halves: tuple[AtSite, ...]

    @classmethod
    def read(cls, basis: Basis, told: ByFeature, me: Me) -> Orders:
        """The orders in the instructions of a sum.

        Args:
            basis: The plan.
            told: What features have told, from another party.
            me: The site.

        Raises:
            CloisterError: the plan does not allow them.
        """
        features = features_of(basis)
        names, given = tuple(sorted(feature.name for feature in features if feature.tells)), dict(told)
        if tuple(name for name, _ in told) != names:
            raise UpdateError(
                "instructions of features",
                ", ".join(name for name, _ in told) or "none",
                expected=", ".join(names) or "none, under this plan",
            )
        return cls(tuple(feature.site.read(basis, given.get(feature.name, b""), me) for feature in features))

    def steps(self, steps: int) -> int:
        """The optimizer steps of the update; `steps` are those of the plan."""
        for half in self.halves:
            steps = half.steps(steps)
        return steps

    @property
    def factor(self) -> float:
        """What the trained update is scaled by before it is coded."""
        return math.prod(half.factor() for half in self.halves)

    @property
    def timed(self) -> bool:
        """Whether the site tells how many seconds it has trained."""
        return any(half.timed() for half in self.halves)

    def code(self, layout: SumLayout, secrets: Secrets) -> Code:
        """How the update is coded.

        Args:
            layout: The layout of the sum.
            secrets: Of this update.

        Raises:
            StorageError: the disk is full.
        """
        found = None
        for half in self.halves:
            found = half.code(layout, secrets, self.factor) or found
        assert found is not None, "one feature codes"
        for half in self.halves:
            found = half.around(found)
        return found

    @property
    def blocks(self) -> Floats | None:
        """The bounds of the blocks in which the update is coded; None: it has none."""
        return _first((half.blocks() for half in self.halves), None)


class Coordinated:
    """The coordinator's halves of the features of a run.

    Args:
        basis: The plan.
        given: What the run gives them.
    """

    def __init__(self, basis: Basis, given: Given) -> None:
        self._halves: dict[str, AtCoordinator] = {
            feature.name: feature.coordinator(basis, given) for feature in features_of(basis)
        }
        self._tell = sorted(feature.name for feature in features_of(basis) if feature.tells)

    def tell(self, number: int, cohort: Sequence[str], kept: Mapping[str, str]) -> ByFeature:
        """What the sites of a sum are told.

        Args:
            number: The round.
            cohort: The sites of the sum.
            kept: What `kept` returned for it, if it has begun before.
        """
        return tuple(
            (name, bytes.fromhex(kept[name]) if name in kept else self._halves[name].tell(number, cohort))
            for name in self._tell
        )

    def kept(self, told: ByFeature) -> dict[str, str]:
        """What the journal keeps of what is told."""
        return {name: each.hex() for name, each in told if self._halves[name].keeps()}

    def cohort(self, told: ByFeature, cohort: tuple[str, ...]) -> tuple[str, ...]:
        """The sites of a sum, once something was told; `cohort` are those that are drawn now."""
        for name, each in told:
            cohort = self._halves[name].cohort(each, cohort)
        return cohort

    def bounds(self, told: ByFeature) -> Floats | None:
        """The bounds by which a sum's blocks are decoded; None: its layout has none."""
        return _first((self._halves[name].bounds(each) for name, each in told), None)

    def timed(self, trainings: Mapping[str, tuple[ByFeature, float]]) -> dict[str, Any]:
        """What the times of a sum's sites say, by feature, for the journal; then `recall` gets it.

        Args:
            trainings: By site what it was told for its update, and the seconds of its training.
        """
        by_site = {site: (dict(told), seconds) for site, (told, seconds) in trainings.items()}
        found = {
            name: self._halves[name].timed(
                {site: (told[name], seconds) for site, (told, seconds) in by_site.items() if name in told}
            )
            for name in self._tell
        }
        return {name: noted for name, noted in found.items() if noted is not None}

    def recall(self, noted: Mapping[str, Any]) -> None:
        """Take what `timed` returned, in this process or an earlier one."""
        for name, each in noted.items():
            self._halves[name].recall(each)

    def decode(self, summed: Summed, opened: Opened) -> Floats:
        """7, end. The mean of a sum as it is released, (d,) float32, in the memory of what was opened."""
        for half in self._halves.values():
            assert opened.total is not None, "noise is added before the mean is read"
            half.protect(summed, opened.total)
        mean = opened.mean
        return _first((half.decode(summed, mean) for half in self._halves.values()), mean)

    def enough(self, opened: int, groups: int) -> bool:
        """7, end. Whether so many of a round's groups make a mean."""
        return all(half.enough(opened, groups) for half in self._halves.values())

    def combine(self, means: Sequence[Floats], sums: Sequence[Summed]) -> Floats:
        """7, end. One mean of those of a round's sums, which may be overwritten; by default by their weights."""
        combined = _first((half.combine(means) for half in self._halves.values()), None)
        return weighted(means, [summed.counters[WEIGHT] for summed in sums]) if combined is None else combined

    def before_step(self, mean: Floats, sums: Sequence[Summed]) -> Figures:
        """8, before the server's step; as `AtCoordinator.before_step`: no feature can write to the mean."""
        seen, halves = np.asarray(mean.data.toreadonly()), self._halves.values()
        return {name: value for half in halves for name, value in half.before_step(seen, sums).items()}

    def refuses_mean(self, norm: float) -> str:
        """8, before the server's step: why a mean of that norm must not change the model; empty: it may."""
        return _first((half.refuses_mean(norm) or None for half in self._halves.values()), "")

    def step(self, weights: Floats, mean: Floats, rounds: Sequence[int]) -> None:
        """8, the server's step; as `AtCoordinator.step`."""
        for half in self._halves.values():
            half.step(weights, mean, rounds)

    def undo(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """8: the step was refused; `state` is what `state` returned before it."""
        for feature, half in self._halves.items():
            half.undo(_of(feature, state))

    def compares(self) -> bool:
        """Whether `refuses_model` needs evaluations."""
        return any(half.compares() for half in self._halves.values())

    def refuses_model(self, before: HeldOut, after: HeldOut) -> str:
        """8, after the server's step; as `AtCoordinator.refuses_model`."""
        return _first((half.refuses_model(before, after) or None for half in self._halves.values()), "")

    def after_step(self) -> None:
        """8, end: the mean has changed the model."""
        for half in self._halves.values():
            half.after_step()

    def figures(self, sums: Sequence[Summed]) -> Figures:
        """8, end: the other figures of a round; `sums` are those of which its mean was made."""
        return {name: value for half in self._halves.values() for name, value in half.figures(sums).items()}

    def state(self) -> State:
        """What the next round depends on, for the checkpoint, by `feature/name`."""
        return {
            f"{feature}/{name}": value
            for feature, half in self._halves.items()
            for name, value in half.state().items()
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take what `state` returned.

        Raises:
            RunFolderError: it has other names.
        """
        known = {f"{feature}/{name}" for feature, half in self._halves.items() for name in half.names()}
        if not self.state().keys() <= state.keys() <= known:
            raise RunFolderError(
                "checkpoint",
                expected="the state of the plan's features, as this release of cloister writes it",
                fix="continue the run with the release that began it, or start a new run",
            )
        for feature, half in self._halves.items():
            half.restore(_of(feature, state))


def _of(feature: str, state: Mapping[str, npt.NDArray[Any]]) -> State:
    """The part of a state that is a feature's."""
    prefix = f"{feature}/"
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _first(found: Iterable[T | None], otherwise: T) -> T:
    """The first that there is; those after it are not asked for."""
    return next((each for each in found if each is not None), otherwise)
