"""The audit with unit site: rounds of a run, with or without each honest site's canary in a sum.

A new federation in one process runs the plan: real sites join, and `server.run.run` asks them, sums their updates,
under masks if the plan has them, charges, decodes, adds a trusted coordinator's noise, and keeps the model. Only
training is replaced (`Resident.trainer`): a site's update is `FAR` clipping norms along one coordinate that no other
site has, or, by a fair coin, zero. No site drops out. As many sites add noise as the claim counts on; the others, which
may collude or drop out, add none: the worst case that needs no lie. The server's optimizer is federated averaging,
which is post-processing.

The adversary sees the model after each round, from which the sum follows; with `aggregation.groups` it sees the sum of
each group, which the charge covers too, and a sum below is that of a group. With independent noise each honest site in
each round is a game of its own, held against the charge for one round. With correlated noise a site flips its coin once
for all its rounds, and is held against the charge for the run. A score is the noised length of the site's canary: with
W = C Y / sens(C), Y the rounds' sums in clipping norms and C the matrix of the noise (without one, the identity), and u
= C p / sens(C) for the rounds p of the site,

    score = <u, W_j> / |u|   at the site's coordinate j,    |u| <= 1.

Noise is independent between coordinates (AES in counter mode, `privacy/noise.py`); the confidence depends on that. What
is left of W at coordinates without a canary is noise alone, and `privacy.audit.Fit` compares it with the charge. With
adaptive clipping the count of unclipped sites is not attacked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import toeplitz
from scipy.stats import norm

from cloister.aggregation.rotation import Floats
from cloister.clients.config import SiteConfig
from cloister.clients.resident import Resident
from cloister.clients.serve import serve
from cloister.clients.site import Site
from cloister.lm.data import Sequences
from cloister.lm.layout import Vector
from cloister.lm.model import LanguageModel
from cloister.lm.train import LocalUpdate, Trainer
from cloister.privacy.accounting import composed, epsilon_of
from cloister.privacy.audit import ALARM, Fit, distinguish, problem
from cloister.privacy.correlated import sensitivity
from cloister.privacy.events import Event, Selection, Skellam, from_json
from cloister.privacy.ledger import Ledger
from cloister.privacy.noise import NoiseStream
from cloister.privacy.report import AuditRow
from cloister.privacy.terms import Terms, participation
from cloister.protocol.cohort import draw_of
from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.messages import TRAIN, Reply, Request
from cloister.protocol.plan import Plan
from cloister.protocol.roster import Card, Roster, new_identity, save_identity, save_roster
from cloister.protocol.wire import encode
from cloister.server.channel import Failure, reply_in
from cloister.server.checkpoint import Checkpoints
from cloister.server.folder import RunFolder
from cloister.server.progress import RoundDone
from cloister.server.run import run
from cloister.simulations.audited import FAR, Audited, Noises, Progress, Streams, house, played
from cloister.simulations.partition import site_name

_UPDATES = 500
"""Updates of sites, unless the caller says otherwise."""
_MOST_SEEN = 10_000
"""Coordinates of a model that are looked at."""


@dataclass(frozen=True)
class Game:
    """A coin of an honest site."""

    site: str
    column: int
    """The place of its canary among the coordinates that are looked at."""
    sums: tuple[int, ...]
    """The sums with the site that the coin decides, from 0: each round has one, or one for each group."""
    included: bool
    """The coin."""


Games: TypeAlias = list[Game]


class _Silent(NoiseStream):
    """The stream of a site that adds no noise."""

    def skellam(
        self, size: int, variance: float, offset: int = 0, *, threads: int = 1
    ) -> npt.NDArray[np.int64]:
        return np.zeros(size, np.int64)


class CanaryTrainer(Trainer):
    """Returns a canary or zero as a site's update; no record is used.

    Args:
        plan: As for `Trainer`.
        model: As for `Trainer`.
        device: As for `Trainer`.
        canaries: The coordinate of each canary that is included, by the site's state folder and the round.
    """

    def __init__(
        self, plan: Plan, model: LanguageModel, device: torch.device, canaries: Mapping[tuple[Path, int], int]
    ) -> None:
        super().__init__(plan, model, device)
        self._length = FAR * plan.privacy.clip
        self._canaries = canaries

    def train(
        self,
        start: Vector,
        sequences: Sequences,
        *,
        round: int,
        state: Path | None = None,
        **options: Any,
    ) -> LocalUpdate:
        """The update of the site with that state folder."""
        assert state is not None
        update = np.zeros_like(start)
        if (state, round) in self._canaries:
            update[self._canaries[state, round]] = self._length
        return LocalUpdate(update, 0, 0.0, 0)


class CanaryResident(Resident):
    """A process whose sites return canaries.

    Args:
        canaries: As for `CanaryTrainer`.
    """

    def __init__(self, canaries: Mapping[tuple[Path, int], int]) -> None:
        super().__init__()
        self._canaries = canaries

    def trainer(self, plan: Plan, model: LanguageModel, device: torch.device) -> CanaryTrainer:
        """The trainer of all sites."""
        return CanaryTrainer(plan, model, device, self._canaries)


class _InProcess:
    """A `Channel` to sites in this process; every message goes through its bytes."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites

    def nodes(self) -> Sequence[int]:
        return range(len(self._sites))

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        for node, request in requests.items():
            frames = serve(partial(self._sites.__getitem__, node), encode(request), one_line)
            yield node, reply_in(frames, node)


@dataclass(frozen=True)
class SiteGame:
    """Rounds of a run with canaries of its sites."""

    plan: Plan
    terms: Terms
    public: Vector | None
    """The run's publicly trained model."""
    model: LanguageModel
    site: SiteConfig
    """A site of the run; its records are not used, but sites that join have some."""
    folder: Path
    """An empty folder for the audit's own federation."""

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
        terms, counted = self.terms, self._counted()
        count = self.plan.run.rounds  # of correlated noise, all rounds are one game
        if participation(self.plan) is None:
            each = counted * self.plan.aggregation.groups
            count = math.ceil(canaries / each if canaries else _UPDATES / self.plan.cohort.size())
        server = {"optimizer": "fedavg", "learning_rate": 1.0, "keep_checkpoints": 2}
        plan = played(self.plan, terms, run={"rounds": count}, server=server)
        size = self.model.layout.size
        seen = np.unique(np.linspace(0, size - 1, min(size, _MOST_SEEN)).astype(np.int64))
        everyone = [site_name(index) for index in range(plan.cohort.sites)]
        draw = draw_of(plan, TRAIN)
        cohorts = [group for number in range(1, count + 1) for group in draw.divided(everyone, number)]
        drawn = [cohort[:counted] for cohort in cohorts]
        names = sorted(set(chain(*drawn)))
        columns = dict(zip(names, range(0, len(seen), max(2, len(seen) // len(names))), strict=False))
        random = coins().child("coins").generator()
        games: Games = []
        for name, column in columns.items():
            mine = [index for index, sites in enumerate(drawn) if name in sites]
            for played_sums in [mine] if participation(plan) else [[index] for index in mine]:
                games.append(Game(name, column, tuple(played_sums), bool(random.random() < 0.5)))
        sums, charged = self._play(plan, drawn, games, seen, noises, progress)
        # What one game costs is the first charge of its site; correlated noise has no other one.
        events = charged[games[0].site][: len(terms.round_events)] or terms.round_events
        z = max(map(_multiplier, events))
        scores, fit = self._scored(plan, games, sums)
        due = sum(len(terms.events(sum(name in cohort for cohort in cohorts))) for name in everyone)
        checks = fit.checks(z, due, sum(map(len, charged.values())))
        included = np.array([game.included for game in games])
        runs, present = len(games), int(included.sum())
        threshold, at_half_noise = _threshold(z, runs, terms.delta, confidence)
        said = scores > threshold
        false_positives, false_negatives = int((said & ~included).sum()), int((~said & included).sum())
        bound, refuting = (
            distinguish(false_positives, runs - present, false_negatives, present, terms.delta, level)
            if 0 < present < runs
            else 0.0
            for level in (confidence, ALARM)
        )
        claimed = epsilon_of(events, terms.delta, terms.accountant)
        what = f"{count} rounds of a run with {runs} updates of honest sites far beyond the clip or zero"
        right = runs - false_positives - false_negatives
        return Audited(
            what,
            AuditRow(runs, runs, right, confidence, bound, claimed, what, refuting, problem(checks)),
            claimed,
            terms.epsilon(rounds),
            terms.delta,
            at_half_noise,
            checks,
            fit.samples,
        )

    def _counted(self) -> int:
        """Sites of a sum that add noise in the worst case: not those that may be missing, split off or lying."""
        plan = self.plan
        if plan.privacy.trusted_coordinator:
            return plan.summed()[0]
        sums = [(plan.threshold(n), plan.quorum(n)) for n in plan.summed()]
        return min(found.smallest_part if found.splits else left - found.colluders for found, left in sums)

    def _play(
        self,
        plan: Plan,
        honest: Sequence[Sequence[str]],
        games: Games,
        seen: npt.NDArray[np.int64],
        noises: Noises,
        progress: Progress,
    ) -> tuple[npt.NDArray[np.float64], dict[str, tuple[Event, ...]]]:
        """Run the plan.

        Returns:
            The sums that were released, in clipping norms, (sums, K) at the coordinates `seen`; and what each site's
            own ledger was charged for.
        """
        names = [site_name(index) for index in range(plan.cohort.sites)]
        identities = {name: new_identity() for name in names}
        roster = Roster.of(Card.of(name, key) for name, key in identities.items())
        save_roster(roster, self.folder / "roster.toml")
        groups = plan.aggregation.groups
        noised = {(index // groups + 1, name) for index, sites in enumerate(honest) for name in sites}
        canaries = {
            (self._state(game.site), index // groups + 1): int(seen[game.column])
            for game in games
            if game.included
            for index in game.sums
        }
        resident = CanaryResident(canaries)
        sites = []
        for name, key in identities.items():
            identity = self.folder / name / "identity.pem"
            config = house(
                self._state(name),
                self.site,
                name=name,
                identity=str(identity),
                roster=str(self.folder / "roster.toml"),
                roster_hash=roster.hash.hex(),
                secure=plan.aggregation.secure,
            )
            save_identity(key, identity)

            def noise(number: int, name: str = name) -> NoiseStream:
                return noises(name, number) if (number, name) in noised else _Silent.fresh()

            sites.append(Site(config, resident, noise=noise, bases=self.folder))
        models: list[npt.NDArray[np.float64]] = []
        factors: list[float] = []
        of_groups: list[npt.NDArray[np.float64]] = []
        clip = plan.privacy.clip
        with RunFolder.create(self.folder / "run", plan) as folder:
            kept = Checkpoints(folder.checkpoints, self.model.layout, plan.server.keep_checkpoints)

            def observe(event: object) -> None:
                nonlocal clip
                if not isinstance(event, RoundDone):
                    return
                if not models:
                    models.append(kept.load(0).weights[seen].astype(np.float64))
                models.append(kept.load(event.round).weights[seen].astype(np.float64))
                factors.append(event.sites / clip)
                clip = event.clip
                progress(event.round, plan.run.rounds)

            def released(_group: int, mean: Floats, count: int) -> None:
                if groups > 1:
                    of_groups.append(mean[seen].astype(np.float64) * count / clip)

            run(
                folder,
                _InProcess(sites),
                observe,
                roster=roster if plan.aggregation.secure else None,
                public=self.public,
                noise=partial(noises, "coordinator"),
                released=released,
            )
        if len(factors) < plan.run.rounds:
            raise EngineError(
                "rounds of the audit", len(factors), expected=f"all {plan.run.rounds} to be done"
            )
        charged = {}
        for name in names:
            entries = Ledger(self._state(name) / "ledger.sqlite", name, composed).entries()
            charged[name] = tuple(event for entry in entries for event in from_json(entry.charge.event))
        sums = np.array(of_groups) if of_groups else np.diff(models, axis=0) * np.array(factors)[:, None]
        return sums, charged

    def _state(self, name: str) -> Path:
        return self.folder / name / "state"

    def _scored(
        self, plan: Plan, games: Games, sums: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], Fit]:
        """The games' scores, and the noise that is left beside the canaries."""
        matrix, pattern = np.eye(len(sums)), participation(plan)
        if pattern is not None:
            assert self.terms.mechanism is not None
            assert self.terms.mechanism.correlation is not None
            blt = self.terms.mechanism.correlation
            matrix = np.tril(toeplitz(blt.coefficients(len(sums)))) / sensitivity(blt, pattern)
        white = matrix @ sums
        free = np.ones(white.shape, np.bool_)
        scores = []
        for game in games:
            canary = matrix[:, list(game.sums)].sum(axis=1)
            scores.append(float(canary @ white[:, game.column]) / float(np.linalg.norm(canary)))
            if game.included:
                free[canary != 0, game.column] = False
        fit = Fit(white.shape[1])
        for values, alone in zip(white, free, strict=True):
            fit.see(values, alone)
        fit.see_canaries(np.array([s for s, game in zip(scores, games, strict=True) if game.included]))
        return np.array(scores), fit


def _multiplier(event: Event) -> float:
    """z of an event: the standard deviation of the noise over the largest L2 norm of a site's vector."""
    if isinstance(event, Skellam):
        return math.sqrt(event.variance) / event.l2
    assert not isinstance(event, Selection), "no site is charged a selection"
    return event.noise_multiplier


def _threshold(deviation: float, runs: int, delta: float, confidence: float) -> tuple[float, float]:
    """The threshold that gives the largest bound if the noise is half of the claimed, and that bound.

    Args:
        deviation: Claimed standard deviation of the noise, in clipping norms.
        runs: Runs, with and without the canary together.
        delta: Delta of the claim.
        confidence: Confidence of the bound.
    """
    half, each = deviation / 2, max(1, runs // 2)
    candidates = 0.5 + np.linspace(-4, 4, 161) * max(half, 0.125)
    best = (0.5, 0.0)
    for threshold in candidates:
        wrong = round(each * float(norm.sf(threshold / half)))
        missed = round(each * float(norm.cdf((threshold - 1) / half)))
        bound = distinguish(wrong, each, missed, each, delta, confidence)
        if bound > best[1]:
            best = (float(threshold), bound)
    return best
