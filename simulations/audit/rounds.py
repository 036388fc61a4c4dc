"""Rounds of a run with unit site in one process; an audit chooses each site's update, and sees what is released.

Everything is what a run has: sites join, messages go through their bytes, ledgers are charged, sums are masked and
opened. Only the trainer is an audit's (`Resident.trainer`), and what a site has for records in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloister.aggregation.features.feature import Basis, Given
from cloister.aggregation.features.groups import median
from cloister.aggregation.features.server_optimizer import ServerOptimizer
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.rotation import Floats
from cloister.clients.network.serve import answered
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig
from cloister.clients.site import Simulated, Site
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.privacy.mechanism.events import Event
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.identity.roster import Card, Roster, new_identity, save_identity, save_roster
from cloister.protocol.messages.messages import Contribution, Joined, Reply, Request
from cloister.protocol.messages.wire import encode
from cloister.protocol.plan.plan import Plan
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity
from cloister.server.record.progress import RoundDone
from cloister.server.run import run
from cloister.server.sum.channel import Failure, reply_in
from cloister.simulations.audit.audited import NOTICED, Noises, TrainedBy, charged, house, prepared
from cloister.simulations.partition import name_of

Update = Callable[[str, int], Vector | None]
"""From a site's name and a round to its update before the clip; None: it has no records."""
Samples = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Released:
    """What is released of a round."""

    round: int
    """From 1."""
    sums: tuple[Samples, ...]
    """The noised sum of each group, (d,), in clipping norms."""
    count: float | None
    """With adaptive clipping the noised sum of what sites add to the count, in units of what one adds; None without it,
    or with groups, of whose clipping norms only the median is seen."""
    follows: bool
    """Whether the model after the round follows from the model before it and the noised sums."""


class Silent(NoiseStream):
    """The stream of a site that adds no noise."""

    def skellam(self, size: int, variance: float, offset: int = 0) -> npt.NDArray[np.int64]:
        """As `NoiseStream.skellam`: zeros."""
        return np.zeros(size, np.int64)


@dataclass
class _Turn:
    """The update that is being made: sites of one process make theirs one after the other."""

    update: Vector | None = None
    """As `Update` gives it."""


class _GivenTrainer(Trainer):
    """Returns the update that an audit has chosen, with a loss that is noticed wherever it is.

    Args:
        plan: As for `Trainer`.
        model: As for `Trainer`.
        device: As for `Trainer`.
        turn: Has it.
    """

    def __init__(self, plan: Plan, model: LanguageModel, device: torch.device, turn: _Turn) -> None:
        super().__init__(plan, model, device)
        self._turn = turn

    def train(self, start: Vector, sequences: Sequences, **options: Any) -> LocalUpdate:
        """The update of the site whose turn it is."""
        assert self._turn.update is not None, "a site without records does not train"
        return LocalUpdate(self._turn.update.copy(), NOTICED, float(NOTICED))


class InProcess:
    """A `Channel` to sites in this process; every message goes through its bytes."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self.told: set[tuple[str, float]] = set()
        """What sites have told beside their names, signatures and vectors."""

    def nodes(self) -> Sequence[int]:
        """As `Channel.nodes`."""
        return range(len(self._sites))

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """As `Channel.ask`."""
        for node, request in requests.items():
            frames = answered(partial(self._sites.__getitem__, node), encode(request), one_line)
            reply = reply_in(frames, node)
            if isinstance(reply, Joined):
                self.told.add(("speed", reply.speed))
            elif isinstance(reply, Contribution):
                self.told.add(("seconds", reply.seconds))
            yield node, reply


@dataclass(frozen=True)
class _Member:
    """What a site of an audit has in a round."""

    name: str
    plan: Plan
    turn: _Turn
    update: Update
    noised: Collection[tuple[str, int]]
    noises: Noises

    def noise(self, number: int) -> NoiseStream:
        """The site's noise. It is asked for at the beginning of the site's turn."""
        self.turn.update = self.update(self.name, number)
        return self.noises(self.name, number) if (self.name, number) in self.noised else Silent.fresh()

    def sequences(self) -> Prepared:
        """The site's records in the round."""
        return prepared(self.plan, 0 if self.turn.update is None else 1)


class _Watch:
    """Sees what is released of each round.

    Args:
        plan: The plan; its server's optimizer has no state.
        kept: The run's checkpoints.
        see: Receives it.
    """

    def __init__(self, plan: Plan, kept: Checkpoints, see: Callable[[Released], None]) -> None:
        self._plan = plan
        self._kept = kept
        self._see = see
        self._clip = plan.privacy.clip
        self._means: list[tuple[Floats, int]] = []
        self.rounds = 0

    def released(self, _group: int, mean: Floats, sites: int) -> None:
        """As `server.round.round.RoundContext.released`."""
        self._means.append((mean.copy(), sites))

    def observe(self, event: object) -> None:
        """As `server.record.progress.Observer`."""
        if not isinstance(event, RoundDone):
            return
        self.rounds += 1
        means, self._means = self._means, []
        sums = tuple(mean.astype(np.float64) * (sites / self._clip) for mean, sites in means)
        count, follows = self._count(event, means), self._follows(event, means)
        self._clip = event.figures["clip"]
        self._see(Released(event.round, sums, count, follows))

    def _count(self, event: RoundDone, means: Sequence[tuple[Floats, int]]) -> float | None:
        """From where the clipping norm has moved (`privacy.mechanism.site_noise`)."""
        adaptive = self._plan.privacy.adaptive
        if adaptive is None or len(means) > 1:
            return None
        moved = math.log(event.figures["clip"] / self._clip) / adaptive.learning_rate
        return means[0][1] * (2 * (adaptive.quantile - moved) - 1)

    def _follows(self, event: RoundDone, means: Sequence[tuple[Floats, int]]) -> bool:
        weights = self._kept.load(event.round - 1).weights
        server = ServerOptimizer(Basis(self._plan, weights.size), Given())
        server.step(weights, median([mean for mean, _ in means]), (event.round,))
        return np.array_equal(weights, self._kept.load(event.round).weights)


def gathered(
    folder: Path,
    plan: Plan,
    like: SiteConfig,
    resident: Resident,
    simulated: Callable[[str], Simulated],
    data: Mapping[str, Path] | None = None,
) -> tuple[Roster, list[Site]]:
    """New sites with new identities and ledgers, each in a folder of its name.

    Args:
        folder: A new folder.
        plan: The plan, to which each of them consents.
        like: A site of the run.
        resident: The process of all of them.
        simulated: What a site is given, by its name.
        data: The records of sites; None: the first site has those of `like`. The others have none.

    Returns:
        Their roster, and the sites in the order of their names.
    """
    names = [name_of(plan, index) for index in range(plan.cohort.sites)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, key) for name, key in identities.items())
    folder.mkdir()
    save_roster(roster, folder / "roster.toml")
    sites = []
    for name in names:
        identity = folder / name / "identity.pem"
        config = house(
            folder / name / "state",
            like,
            records=name == names[0] and data is None,
            name=name,
            identity=str(identity),
            roster=str(folder / "roster.toml"),
            roster_hash=roster.hash.hex(),
            plan=plan.digest(),
            secure=plan.aggregation.secure,
        )
        if data is not None and name in data:
            config = config.model_copy(update={"data": str(data[name])})
        save_identity(identities[name], identity)
        sites.append(Site(config, resident, simulated=simulated(name)))
    return roster, sites


@dataclass(frozen=True)
class Federation:
    """The sites of an audit."""

    model: LanguageModel
    public: Vector | None
    """The run's publicly trained model."""
    site: SiteConfig
    """A site of the run; its records are not used, but the first site has them when it joins."""

    def play(
        self,
        folder: Path,
        plan: Plan,
        update: Update,
        see: Callable[[Released], None],
        noises: Noises,
        noised: Collection[tuple[str, int]],
    ) -> tuple[dict[str, tuple[Event, ...]], int]:
        """Run a plan.

        Args:
            folder: A new folder.
            plan: The plan; its server averages.
            update: Gives each site's update.
            see: Receives what is released of each round.
            noises: Gives the noise of sites and coordinator.
            noised: The sites that add noise, with the round.

        Returns:
            What each site's own ledger was charged for; and how many values they have sent beside the noised sum,
            beyond one speed, one of seconds and the number of sites.

        Raises:
            EngineError: a round was not done.
        """
        turn = _Turn()
        resident = TrainedBy(partial(_GivenTrainer, turn=turn))

        def simulated(name: str) -> Simulated:
            member = _Member(name, plan, turn, update, noised, noises)
            return Simulated(noise=member.noise, bases=folder, sequences=member.sequences, one_owner=True)

        roster, sites = gathered(folder, plan, self.site, resident, simulated)
        channel = InProcess(sites)
        with RunFolder.create(folder / "run", plan) as out:
            kept = Checkpoints(out.checkpoints, self.model.layout, plan.server.keep_checkpoints)
            watch = _Watch(plan, kept, see)
            run(
                out,
                channel,
                watch.observe,
                roster=roster if plan.aggregation.secure else None,
                public=self.public,
                noise=partial(noises, "coordinator"),
                released=watch.released,
            )
            run_id = identity(out)
        if watch.rounds < plan.run.rounds:
            raise EngineError(
                "rounds of the audit", watch.rounds, expected=f"all {plan.run.rounds} to be done"
            )
        totals = Sums(plan, self.model.layout.size).training.counters
        return {site.name: charged(site, plan, run_id) for site in sites}, len(channel.told) - 2 + len(
            totals
        ) - 1
