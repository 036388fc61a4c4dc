"""A feature of a plan, as the round, the sum and the messages know it: by the hooks of its two halves alone.

A feature is one file in this folder and a line in `registry.py`. Its section of the plan has the same subject. It has

- a site's half (`AtSite`), which is made for one update from what all sites of the sum were told, and checks that;
- a coordinator's half (`AtCoordinator`), which is made for a run, and whose state is in the run's checkpoints;
- the figures of a round that it adds (`Figure`), and perhaps another layout of the sum.

What a feature tells is in the instructions of the sum: the same bytes for all its sites, in all attempts
(`messages.Instructions`). A hook gets what it needs as arguments, so that no feature imports a party.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy.typing as npt

from cloister.aggregation.vector.average import SumLayout
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.privacy.mechanism.clip import Gather, alone
from cloister.privacy.mechanism.correlated import CorrelatedRow
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.figure import Figure
from cloister.protocol.messages.blocks import Span
from cloister.protocol.messages.messages import ByFeature
from cloister.protocol.plan.plan import Plan

if TYPE_CHECKING:  # torch and dp-accounting take seconds to import, and displays need the figures alone
    from cloister.lm.model.layout import Layout
    from cloister.lm.model.schedule import Schedule
    from cloister.lm.tasks.task import HeldOut
    from cloister.lm.training.moments import Carry
    from cloister.privacy.accounting.terms import Terms

State: TypeAlias = dict[str, npt.NDArray[Any]]
"""What a checkpoint keeps of a feature."""
Figures: TypeAlias = dict[str, Any]
"""Values of figures by their names, as JSON has them."""


@dataclass(frozen=True)
class Basis:
    """What a feature is made from, alike at all parties."""

    plan: Plan
    parameters: int
    """Number of parameters that the sum has."""
    most: int = field(default=0, kw_only=True)
    """Number of parameters that the run trains, by which privacy is accounted for; 0: those of the sum."""
    schedule: Schedule | None = field(default=None, kw_only=True)
    """What each round trains; None: no layout is known, and every round trains all."""

    def trained_in(self, rounds: Sequence[int]) -> Layout | None:
        """What at least one of some rounds trains; None: every round trains all."""
        if self.schedule is None or not self.plan.scheduled:
            return None
        names = (name for number in rounds for name in self.schedule.of_round(number).names)
        return self.schedule.layout.only(names)

    def part(self, rounds: Sequence[int]) -> tuple[Span, ...]:
        """Where the parameters that some rounds train lie in the vector of all that the run trains."""
        trained = self.trained_in(rounds)
        if self.schedule is None or trained is None:
            return (Span(0, self.parameters),)
        return self.schedule.layout.spans(trained)

    @cached_property
    def terms(self) -> Terms | None:
        """The plan's privacy; None without a privacy unit.

        Raises:
            PlanError: as `terms_of`.
        """
        from cloister.privacy.accounting.terms import terms_of

        return terms_of(self.plan, self.most or self.parameters)


# At a site.


class Me(NamedTuple):
    """A site, as its halves need it."""

    name: str
    cohort: Callable[[], tuple[str, ...] | None]
    """The sites of the sum as this site has drawn them, sorted; None for a sum in clear, of which it knows the size."""


@dataclass(frozen=True)
class Clipped:
    """What was clipped in a span: for the tail of the vector only; it must not leave the site otherwise."""

    values: int = 0
    """Values of the span beyond the ring's bound."""
    count: int = 0
    """What the site adds to adaptive clipping's count, as `SiteMechanism.encode` returns it; the same for all spans."""


class Portion(NamedTuple):
    """A span of an update, which one process codes."""

    offset: int = 0
    """Element of the update where it starts."""
    gather: Gather = alone
    """Collects the numbers of all spans (`privacy.mechanism.clip.Gather`)."""
    out: RingVector | None = None
    """Ring integers of the span to write into; by default new ones."""


WHOLE = Portion()
"""All of the update, in one process."""


class Code(Protocol):
    """How an update becomes the ring integers that are summed; it can be sent to another process."""

    @property
    def layout(self) -> SumLayout:
        """Layout of the sum."""

    @property
    def protects(self) -> bool:
        """Whether the code protects the update as a whole: it sends noise alone for an update that is not there (NaN),
        and nothing about an update may be seen by a failure."""

    def release(self, values: Floats, tokens: int, of: Portion = WHOLE) -> tuple[RingVector, Clipped]:
        """The ring integers of one span.

        Args:
            values: Shape (d,), float32: elements [offset, offset + d) of the update, whole blocks of it.
            tokens: What the site learned from.
            of: Where in the update they are, and where their integers go.

        Raises:
            UpdateError: the span ends beyond the update or inside a block that goes on; or, unless the code `protects`,
                the values are not finite.
            StorageError: the disk refuses the access.
        """

    def tail(self, clipped: Sequence[Clipped], tokens: int, loss: float) -> RingVector:
        """The span after the update's.

        Args:
            clipped: What `release` returned for each span.
            tokens: What the site learned from.
            loss: Mean training loss over them.
        """


@dataclass(frozen=True)
class Secrets:
    """What a site has for the code of one update, and no other party."""

    rounding: bytes
    """Seed of the stochastic rounding (`ring.Dither`)."""
    noise: NoiseStream | None
    """A stream that nothing else uses: one for each update, the same at all its ranks; None without a privacy unit."""
    carry: Carry | None
    """What the site carries from round to round; None where the plan carries nothing."""


@dataclass(frozen=True)
class AtSite:
    """A site's half of a feature for one update; picklable. Each hook of this class leaves the update as it is.

    A subclass is made by `read`.
    """

    @classmethod
    def read(cls, basis: Basis, told: bytes, me: Me) -> AtSite:
        """The half for one update.

        Args:
            basis: The plan.
            told: What `AtCoordinator.tell` returned, from another party.
            me: The site.

        Raises:
            CloisterError: the plan does not allow what was told.
        """
        return cls()

    def steps(self, steps: int) -> int:
        """The optimizer steps of the update.

        Args:
            steps: As many as without this feature.
        """
        return steps

    def factor(self) -> float:
        """What the trained update is scaled by before it is coded."""
        return 1.0

    def code(self, layout: SumLayout, secrets: Secrets, factor: float) -> Code | None:
        """How the update is coded; None: as without this feature.

        Args:
            layout: The layout of the sum.
            secrets: Of this update.
            factor: What the update is scaled by.

        Raises:
            StorageError: the disk is full.
        """
        return None

    def around(self, code: Code) -> Code:
        """The code that another feature has made, and what this one does before it."""
        return code

    def blocks(self) -> Floats | None:
        """The bounds of the blocks in which the update is coded; None: as without this feature."""
        return None

    def timed(self) -> bool:
        """Whether the site tells how many seconds it has trained."""
        return False


# At the coordinator.


@dataclass(frozen=True)
class Summed:
    """A sum of a round that was opened, as features see it: all but its mean, which may lack a coordinator's noise."""

    round: int
    group: int
    """From 0."""
    names: tuple[str, ...]
    """Sites whose vectors are in it, sorted."""
    counters: Mapping[str, int]
    told: ByFeature
    """What its sites were told."""
    noted: Mapping[str, Any]
    """What the attempt at it has noted."""
    rounds: tuple[int, ...]
    """The rounds whose models the updates are of; its own alone, but for asynchronous rounds."""


@dataclass(frozen=True)
class Given:
    """What a run gives its features at the coordinator."""

    declared: Callable[[str], float | None] = lambda _site: None
    """The speed that a site has declared when it joined; None where it has not joined."""
    mechanism: SiteMechanism | None = None
    """The mechanism of the unit `site`, with the matrix with which the run began; None: that of the terms."""
    noise: Callable[[int], NoiseStream | CorrelatedRow] = lambda _round: NoiseStream.fresh()
    """Returns, for a round, a stream that no other round uses, or its row of the run's correlated noise."""


class AtCoordinator:
    """The coordinator's half of a feature in a run. Each hook of this class does nothing.

    Args:
        basis: The plan.
        given: What the run gives it.
    """

    def __init__(self, basis: Basis, given: Given) -> None:
        self.plan = basis.plan

    def tell(self, number: int, cohort: Sequence[str]) -> bytes:
        """What all sites of a sum are told in a round, besides the model; empty: nothing.

        Args:
            number: The round.
            cohort: The sites of the sum.
        """
        return b""

    def keeps(self) -> bool:
        """Whether the journal keeps what is told: it depends on more than the newest checkpoint."""
        return False

    def cohort(self, told: bytes, cohort: tuple[str, ...]) -> tuple[str, ...]:
        """The sites of a sum, once something was told.

        Args:
            told: What `tell` returned.
            cohort: The sites that are drawn now: in clear, other sites may have joined meanwhile.
        """
        return cohort

    def bounds(self, told: bytes) -> Floats | None:
        """The bounds by which a sum's blocks are decoded (`SumLayout.open`); None: the layout has no blocks."""
        return None

    def timed(self, trainings: Mapping[str, tuple[bytes, float]]) -> Any:
        """What the times of a sum's sites say, as JSON, for the journal; None: nothing. Then `recall` gets it.

        Args:
            trainings: By site what `tell` returned for its update, perhaps in an earlier round (asynchronous rounds),
                and the seconds of its training as the site has told them.
        """
        return None

    def recall(self, noted: Any) -> None:
        """Take what `timed` returned, in this process or an earlier one."""

    def protect(self, summed: Summed, total: RingVector) -> None:
        """7, end. Add a trusted coordinator's noise to the ring integers of an opened sum, in place.

        Before they are read as signed numbers: a sum that a lying site moves across the edge of the ring is then no
        more than a sum that something public was added to.
        """

    def decode(self, summed: Summed, mean: Floats) -> Floats | None:
        """7, end. The mean of a sum as it is released, (d,) float32; None: as without this feature.

        Args:
            summed: The sum.
            mean: As the code of the updates opens it; it may be overwritten. No other hook gets it.
        """
        return None

    def enough(self, opened: int, groups: int) -> bool:
        """7, end. Whether so many of a round's groups make a mean; all features of a plan must say so."""
        return opened > 0

    def combine(self, means: Sequence[Floats]) -> Floats | None:
        """7, end. One mean of those of a round's groups, which may be overwritten; None: as without this feature."""
        return None

    def before_step(self, mean: Floats, sums: Sequence[Summed]) -> Figures:
        """8, before the server's step, which overwrites the mean. Returns the feature's figures of the mean.

        Args:
            mean: (d,) float32: the round's, as it is released; read-only.
            sums: The sums of which it was made.
        """
        return {}

    def refuses_mean(self, norm: float) -> str:
        """8, before the server's step: why the mean must not change the model; empty: it may.

        Args:
            norm: The L2 norm of the round's mean.
        """
        return ""

    def step(self, weights: Floats, mean: Floats, rounds: Sequence[int]) -> None:
        """8, the server's step: move the model by the mean.

        Args:
            weights: (d,) float32, the global model; overwritten.
            mean: float32, the vector of what the rounds train; it may be overwritten.
            rounds: Those whose models the updates are of.

        Raises:
            UpdateError: the step gives a non-finite value; the model is unchanged.
        """

    def undo(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """8: the step was refused; what `step` has changed must be what it was before.

        Args:
            state: What `state` returned then.
        """

    def compares(self) -> bool:
        """Whether `refuses_model` is asked: then the model is evaluated before and after each step, on public data."""
        return False

    def refuses_model(self, before: HeldOut, after: HeldOut) -> str:
        """8, after the server's step: why the model must be that of the round before; empty: it need not.

        Args:
            before: The evaluation of the model of the round before.
            after: That of the model after the step.
        """
        return ""

    def after_step(self) -> None:
        """8, end: the mean has changed the model. After a mean or a model that was refused this is not called."""

    def figures(self, sums: Sequence[Summed]) -> Figures:
        """8, end: the feature's other figures of the round; one without a value is left out.

        Args:
            sums: The sums of which the mean was made.
        """
        return {}

    def state(self) -> State:
        """What the next round depends on, for the checkpoint."""
        return {}

    def names(self) -> Collection[str]:
        """The names that `state` may have, later in the run too."""
        return self.state().keys()

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take what `state` returned.

        Args:
            state: With those of `state`, and no other than those of `names`.
        """


@dataclass(frozen=True)
class Feature:
    """A feature, as the registry lists it."""

    name: str
    """Its name in instructions, checkpoints and the journal."""
    wanted: Callable[[Basis], bool]
    """Whether a plan has it."""
    site: type[AtSite] = AtSite
    coordinator: type[AtCoordinator] = AtCoordinator
    tells: bool = False
    """Whether it tells the sites something in each round."""
    figures: tuple[Figure, ...] = ()
    """The figures of a round that it adds."""
    layout: Callable[[Basis], SumLayout] | None = None
    """Makes the layout of a round's sum; None: as without it."""
    within: Callable[[Basis, SumLayout], SumLayout] | None = None
    """Changes the layout that another feature has made; None: it does not."""
