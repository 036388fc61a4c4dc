"""The audit with unit site: rounds of a run, with or without each honest site's canary in a sum.

A new federation in one process runs the plan (`rounds.py`): real sites join, and `server.run.run` asks them, sums
their updates, under masks if the plan has them, charges, decodes, adds a trusted coordinator's noise, and keeps the
model. Only training is replaced: by a fair coin a site has no records in a round, or its update is `FAR` clipping norms
along one coordinate that no other site has. No site drops out. As many sites add noise as the claim counts on; the
others, which may collude or drop out, have no records and add none: the worst case that needs no lie. The server's
optimizer is federated averaging, which is post-processing.

The adversary sees the noised sums, from which the models follow, and with adaptive clipping their counts, from which
the clipping norms follow; with `aggregation.groups` it sees the sum of each group, which the charge covers too, and a
sum below is that of a group. With independent noise each honest site in each round is a game of its own, held against
the charge for one round. With correlated noise a site flips its coin once for all its rounds, and is held against the
charge for the run. A score is the noised length of the site's canary: with W = C Y / sens(C), Y the rounds' sums in
clipping norms and C the matrix of the noise (without one, the identity), and u = C p / sens(C) for the rounds p of the
site,

    score = <u, W_j> / |u|   at the site's coordinate j,    |u| <= 1.

A clipped update adds -1 to the count, and no records 0. A sum has one count, so only the first site of a sum is scored
by its count too: with standard deviations s and t of sum and count, z^-2 = s^-2 + t^-2, and all other counts known, by
z^2 (score / s^2 - count / t^2), which a canary moves by 1 as well, with a standard deviation of z.

Noise is independent between coordinates (AES in counter mode, `privacy/mechanism/noise.py`); the confidence depends
on that. What is left of W and of the counts without the canaries is noise alone, and `privacy/audit/fit.py` compares
it with the charge. In five more federations, all of whose noise is the same, one site has no records, or an update
along all coordinates of half a clipping norm, or of `LENGTHS`: so far one site changes what is released. The count of
groups is not attacked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from scipy.linalg import toeplitz

from cloister.lm.model.layout import Vector
from cloister.privacy.accounting.accountant import epsilon_of
from cloister.privacy.accounting.terms import Terms, participation
from cloister.privacy.audit.fit import Check, Noise, change, counted
from cloister.privacy.mechanism.clip import rounded_l2
from cloister.privacy.mechanism.correlated import Blt, sensitivity
from cloister.privacy.mechanism.events import Event, Skellam
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism, noised_with
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.plan import Plan
from cloister.simulations.audit.audited import (
    FAR,
    LENGTHS,
    Audited,
    Noises,
    Progress,
    Streams,
    judged,
    played,
)
from cloister.simulations.audit.rounds import Federation, Released, Samples
from cloister.simulations.partition import name_of

_UPDATES = 500
"""Updates of sites, unless the caller says otherwise."""
_ROUNDED = 2.0**-22
"""Relative error of what is released: it is rounded to float32 when it is decoded and scaled."""
_MOVE = 1e-3
"""Learning rate of the clipping norm: so small that no count moves it beyond its bounds."""


@dataclass(frozen=True)
class Game:
    """A coin of an honest site."""

    site: str
    column: int
    """The coordinate of its canary."""
    sums: tuple[int, ...]
    """The sums with the site that the coin decides, from 0: each round has one, or one for each group."""
    included: bool
    """The coin."""
    counted: bool
    """Whether the count is in its score: it is the first site of its sum."""


Games: TypeAlias = list[Game]


@dataclass(frozen=True)
class Law:
    """What an event charges for, in clipping norms."""

    multiplier: float
    """z of sum and count together."""
    change: float
    """Largest L2 norm of a site's part of the sum."""
    deviation: float
    """Of the noise on each coordinate of the sum; with correlated noise on those of C Y / sens(C)."""
    count: float
    """Of the noise on the count, in units of what one site adds; infinite: nothing is charged for it."""
    grid: float
    """Step between the values of the noise, over its deviation."""

    @classmethod
    def of(cls, event: Event, mechanism: SiteMechanism) -> Law:
        """The law of an event of a mechanism.

        Args:
            event: What was charged.
            mechanism: Of the plan's terms.
        """
        if isinstance(event, Skellam):
            root, change = math.sqrt(event.variance), event.l2 / mechanism.scale
            extra = [l2 / math.sqrt(variance) for variance, l2, _ in event.extra]
            of_update, count = root / event.l2, 1 / extra[0] if extra else math.inf
            multiplier, deviation = math.hypot(1 / of_update, *extra) ** -1, root / mechanism.scale
            return cls(multiplier, change, deviation, count, 1 / root)
        change = rounded_l2(mechanism.scale, mechanism.dimension) / mechanism.scale
        of_update, count = event.noise_multiplier, math.inf
        if mechanism.adaptive is not None:
            count = 2 * mechanism.adaptive.count_noise
            of_update = noised_with(of_update, mechanism.adaptive.count_noise)
        grid = 1 / (mechanism.scale * mechanism.deviation)
        return cls(event.noise_multiplier, change, of_update * change, count, grid)


class Whitened:
    """Rows of noise C^-1 Z to rows of Z: the inverse of `privacy.mechanism.correlated.CorrelatedNoise`.

    Args:
        blt: C.
        size: Elements of a row.
    """

    def __init__(self, blt: Blt, size: int) -> None:
        self._scale = np.array(blt.scale)
        self._decay = np.array(blt.decay)[:, None]
        self._buffers = np.zeros((len(blt.decay), size))

    def __call__(self, row: Samples) -> Samples:
        """The next row, (d,)."""
        white: Samples = row + self._scale @ self._buffers
        self._buffers *= self._decay
        self._buffers += row
        return white


class Sums:
    """What is seen of the sums of a run.

    Args:
        games: The games.
        plan: The plan that is played.
        terms: Its privacy.
        law: What a round is claimed to cost.
        size: d, coordinates of an update.
        progress: Receives the rounds seen.
    """

    def __init__(
        self, games: Games, plan: Plan, terms: Terms, law: Law, size: int, progress: Progress
    ) -> None:
        counted = plan.privacy.adaptive is not None and plan.aggregation.groups == 1
        self.noise = Noise(size + counted, count=counted, grid=law.grid)
        """What is left of sums and counts without the canaries."""
        self.others = 0
        """Rounds whose model does not follow from the sums."""
        self._games = games
        self._plan = plan
        self._law = law
        self._progress = progress
        self._columns = sorted({game.column for game in games})
        self._rows: list[Samples] = []
        self._counts: list[float] = []
        self._pattern = participation(plan)
        if self._pattern is not None:
            assert terms.mechanism is not None, "unit site has a mechanism"
            assert terms.mechanism.correlation is not None, "and a matrix"
            self._blt = terms.mechanism.correlation
            self._white = Whitened(self._blt, size)

    def see(self, released: Released) -> None:
        """Take a round."""
        self.others += not released.follows
        for values in released.sums:
            self._rows.append(values[self._columns])
            included = [
                game.column for game in self._games if game.included and len(self._rows) - 1 in game.sums
            ]
            values[included] -= 1
            noise = values if self._pattern is None else self._white(values) / self._sensitivity
            noise = noise / self._law.deviation
            if released.count is not None:
                self._counts.append(released.count + len(included))
                noise = np.append(noise, self._counts[-1] / self._law.count)
            self.noise.see(noise)
        self._progress(released.round, self._plan.run.rounds)

    def scores(self) -> Samples:
        """Of each game."""
        rounds, scores = len(self._rows), []
        matrix = np.eye(rounds)
        if self._pattern is not None:
            matrix = np.tril(toeplitz(self._blt.coefficients(rounds))) / self._sensitivity
        white = matrix @ np.array(self._rows)
        for game in self._games:
            canary = matrix[:, list(game.sums)].sum(axis=1)
            column = white[:, self._columns.index(game.column)]
            score = float(canary @ column) / float(np.linalg.norm(canary))
            if game.counted and self._counts:
                count = self._counts[game.sums[0]] - game.included  # less all others' parts
                weights = self._law.deviation**-2, self._law.count**-2
                score = (score * weights[0] - count * weights[1]) / sum(weights)
            scores.append(score)
        return np.array(scores)

    @property
    def _sensitivity(self) -> float:
        assert self._pattern is not None, "independent noise has no matrix"
        return sensitivity(self._blt, self._pattern)


def honest_of(plan: Plan) -> int:
    """Sites of a sum that add noise in the worst case: not those that may be missing, split off or lying."""
    if plan.privacy.trusted_coordinator:
        return plan.summed()[0]
    sums = [(plan.threshold(n), plan.quorum(n)) for n in plan.summed()]
    return min(found.smallest_part if found.splits else left - found.colluders for found, left in sums)


@dataclass(frozen=True)
class SiteGame:
    """Rounds of a run with canaries of its sites."""

    plan: Plan
    terms: Terms
    federation: Federation
    folder: Path
    """An empty folder for the audit's own federations."""

    def audit(
        self,
        rounds: int,
        canaries: int | None,
        confidence: float,
        coins: Streams,
        noises: Noises,
        progress: Progress,
    ) -> Audited:
        """Play the rounds, guess the coins, and bound epsilon; arguments as in `simulations.audit.audit`."""
        terms, honest = self.terms, honest_of(self.plan)
        count = self.plan.run.rounds  # of correlated noise, all rounds are one game
        if participation(self.plan) is None:
            each = honest * self.plan.aggregation.groups
            count = math.ceil(canaries / each if canaries else _UPDATES / self.plan.cohort.size())
        plan = self._played(count)
        cohorts = _cohorts(plan)
        drawn = [cohort[:honest] for cohort in cohorts]
        games = self._games(plan, drawn, coins)
        claimed_law = self._law(terms.round_events)
        seen = Sums(games, plan, terms, claimed_law, self._size, progress)
        charged, told = self._main(plan, drawn, games, seen, noises)
        # What one game costs is the first charge of its site; correlated noise has no other one.
        events = charged[games[0].site][: len(terms.round_events)] or terms.round_events
        law = self._law(events)
        everyone = sorted(set(chain(*cohorts)))
        due = sum(len(terms.events(sum(name in cohort for cohort in cohorts))) for name in everyone)
        checks = (
            *seen.noise.checks(law.multiplier / claimed_law.multiplier),
            *self._changes(honest, law, noises),
            counted("releases", due, sum(map(len, charged.values()))),
            counted("rounds whose model does not follow from the noised sums", seen.others, 0),
            counted("other values that sites have told", told, 0),
        )
        included = np.array([game.included for game in games])
        claimed = epsilon_of(events, terms.delta, terms.accountant), terms.epsilon(rounds)
        what = f"{count} rounds of a run with {len(games)} updates of honest sites"
        what += " far beyond the clip or none"
        return judged(seen.scores(), included, law.multiplier, confidence, what, claimed, terms.delta, checks)

    def _played(self, rounds: int) -> Plan:
        """The plan with so many rounds; what the server does with means and counts is post-processing."""
        sections: dict[str, dict[str, Any]] = {
            "run": {"rounds": rounds},
            "server": {"optimizer": "fedavg", "learning_rate": 1.0, "keep_checkpoints": 2, "gate": {}},
        }
        adaptive = self.plan.privacy.adaptive
        if adaptive is not None:
            sections["privacy"] = {"adaptive": adaptive.model_dump() | {"learning_rate": _MOVE}}
        return played(self.plan, self.terms, **sections)

    def _law(self, events: Sequence[Event]) -> Law:
        assert self.terms.mechanism is not None, "unit site has a mechanism"
        laws = [Law.of(event, self.terms.mechanism) for event in events]
        return max(laws, key=lambda law: law.multiplier)

    @property
    def _size(self) -> int:
        return self.federation.model.layout.size

    def _games(self, plan: Plan, drawn: Sequence[Sequence[str]], coins: Streams) -> Games:
        """The coins of the honest sites of each sum."""
        names, random = sorted(set(chain(*drawn))), coins().child("coins").generator()
        columns = dict(zip(names, range(0, self._size, max(2, self._size // len(names))), strict=False))
        games: Games = []
        for name, column in columns.items():
            mine = [index for index, sites in enumerate(drawn) if name in sites]
            for sums in [mine] if participation(plan) else [[index] for index in mine]:
                first = drawn[sums[0]][0] == name
                games.append(Game(name, column, tuple(sums), bool(random.random() < 0.5), first))
        return games

    def _main(
        self, plan: Plan, drawn: Sequence[Sequence[str]], games: Games, seen: Sums, noises: Noises
    ) -> tuple[dict[str, tuple[Event, ...]], int]:
        """Play all games; as `Federation.play`."""
        groups = plan.aggregation.groups
        noised = {(name, index // groups + 1) for index, sites in enumerate(drawn) for name in sites}
        canaries = {
            (game.site, index // groups + 1): game.column
            for game in games
            if game.included
            for index in game.sums
        }

        def update(name: str, number: int) -> Vector | None:
            if (name, number) not in canaries:
                return None
            vector = np.zeros(self._size, np.float32)
            vector[canaries[name, number]] = FAR * plan.privacy.clip
            return vector

        return self.federation.play(self.folder / "main", plan, update, seen.see, noises, noised)

    def _changes(self, honest: int, law: Law, noises: Noises) -> tuple[Check, ...]:
        """How far the records of one site change what one round releases, with all noise the same."""
        plan = self._played(1)

        @functools.cache
        def same(who: str, number: int) -> NoiseStream:
            # Declared, because a coordinator's secret noise is different for another sum.
            return NoiseStream(noises(who, number).key, declared=True)

        cohorts = _cohorts(plan)
        noised = {(name, 1) for cohort in cohorts for name in cohort[:honest]}
        signs = np.random.Generator(np.random.Philox(plan.run.seed)).choice(
            np.array([-1, 1], np.float32), self._size
        )
        one = signs * np.float32(plan.privacy.clip / math.sqrt(self._size))
        worlds: list[Released] = []
        updates = {"without": None, "within": one * np.float32(0.5)}
        updates |= {f"beyond-{length:g}": one * np.float32(length) for length in LENGTHS}
        for folder, update in updates.items():

            def of_one(name: str, _round: int, update: Vector | None = update) -> Vector | None:
                return update if name == cohorts[0][0] else None

            self.federation.play(self.folder / folder, plan, of_one, worlds.append, same, noised)
        sums = [np.concatenate(world.sums) for world in worlds]
        rounding = 2 * _ROUNDED * max(float(np.linalg.norm(each)) for each in sums)
        moved = max(float(np.linalg.norm(each - sums[0])) for each in sums[1:])
        found = [change("what one site changes in a sum, in clipping norms", moved, law.change, rounding)]
        if all(world.count is not None for world in worlds):
            counts = np.array([world.count for world in worlds])
            error = _ROUNDED * (2 * float(np.abs(counts).max()) + plan.cohort.size())
            moved = float(np.abs(counts[1:] - counts[0]).max())
            found.append(change("what one site changes in the count", moved, 1.0, error))
        return tuple(found)


def _cohorts(plan: Plan) -> list[list[str]]:
    """The sites of each sum of a run: each round has one, or one for each group."""
    everyone = [name_of(plan, index) for index in range(plan.cohort.sites)]
    draw = draw_of(plan, TRAIN)
    return [
        list(group) for number in range(1, plan.run.rounds + 1) for group in draw.divided(everyone, number)
    ]
