"""The audit with unit record or owner: one run of DP-SGD with gradient canaries, and guesses of the coins that
included them.

A new `Site` with the first site's records joins the plan and is asked to contribute in round after round, as by a
coordinator: its ledger is charged, `Site` calls the trainer with its noise, and its coded update is the next model. The
sum is in clear; no other site takes part. Only the trainer is replaced (`Resident.trainer`): `CanaryTrainer` takes the
steps of `PrivateTrainer` and plants canaries in them.

Steinke, Nasr and Jagielski 2023, with the gradient canaries of Nasr et al. 2021. Canaries are appended to the site's
own units, each included by its own fair coin. A canary stands for a unit, a record or an owner with whatever
records, and is drawn into batches as every unit is. Its gradient is
`FAR` clipping norms along one coordinate that no other canary has, so that clipping is attacked as well. The adversary
sees every noised sum and subtracts the sum of the real units' clipped gradients, which it knows: they depend on the
canaries only through earlier releases, so revealing them costs no canary anything. Its score of a canary is the
log-likelihood ratio of the rest at that coordinate over the steps, for the noise multiplier z and the sampling rate
q that are claimed:

    sum over steps of ln(1 - q + q exp((x - 1/2) / z^2)),    x in units of the clipping norm.

What is left at the coordinates of canaries that were not in a step is its noise alone, and `privacy.audit.Fit` compares
it with the charge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloister.aggregation.average import PlainSum
from cloister.aggregation.scales import Scales
from cloister.aggregation.sums import training_layout
from cloister.clients.config import SiteConfig
from cloister.clients.dpsgd import ClippedSum, PerUnit, PrivateTrainer, UnitGradients
from cloister.clients.resident import Resident
from cloister.clients.site import Site
from cloister.lm.data import Sequences
from cloister.lm.layout import Vector
from cloister.lm.model import LanguageModel
from cloister.lm.train import LocalUpdate
from cloister.lm.weights import Named
from cloister.privacy.accounting import composed, epsilon_of
from cloister.privacy.audit import ALARM, Fit, count, guess, lower_bound, problem
from cloister.privacy.events import SampledGaussian, from_json
from cloister.privacy.ledger import Ledger
from cloister.privacy.noise import NoiseStream
from cloister.privacy.report import AuditRow
from cloister.privacy.terms import Terms
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import CloisterError
from cloister.protocol.messages import TRAIN, Contribute, Instructions, Join, SumId
from cloister.protocol.plan import Plan
from cloister.simulations.audited import FAR, Audited, Noises, Progress, Streams, house, played

_MOST_CANARIES = 10_000
_REHEARSALS = 5
_REHEARSED = 20_000_000
"""Scores of single steps that all rehearsals together may take."""


class WatchedSum(ClippedSum):
    """A trainer's own clipped sum, which the adversary sees when it is released.

    Args:
        inner: The sum.
        watch: Receives the released sum minus the part that the adversary knows, float64 of shape (layout.size,).
    """

    def __init__(self, inner: ClippedSum, watch: Callable[[torch.Tensor], None]) -> None:
        self._inner = inner  # which does all of it: there is no second sum
        self._watch = watch
        self.known = torch.zeros(())
        """(layout.size,) float64: the part of the sum that the adversary knows."""

    def add(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `ClippedSum.add`."""
        return self._inner.add(gradients)

    def so_far(self) -> torch.Tensor:
        """As `ClippedSum.so_far`."""
        return self._inner.so_far()

    def know(self) -> None:
        """Reveal to the adversary everything added so far."""
        self.known = self.so_far()

    def release(self, noise: NoiseStream, sigma: float, threads: int = 1) -> torch.Tensor:
        """As `ClippedSum.release`; the adversary sees the result."""
        released = self._inner.release(noise, sigma, threads)
        self._watch(released - self.known)
        return released


class CanaryTrainer(PrivateTrainer):
    """Takes the unchanged steps of `PrivateTrainer`, with canaries appended to the real units.

    Args:
        plan: As for `PrivateTrainer`.
        model: As for `PrivateTrainer`.
        device: As for `PrivateTrainer`.
        included: (M,) bool: the coins.
        score: The rest of a step's noised sum at the canaries' coordinates (M,), in clipping norms -> the
            increase of their scores (M,).
        progress: Receives the steps taken.
    """

    def __init__(
        self,
        plan: Plan,
        model: LanguageModel,
        device: torch.device,
        included: npt.NDArray[np.bool_],
        score: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
        progress: Callable[[int], None],
    ) -> None:
        super().__init__(plan, model, device)
        self.scores: npt.NDArray[np.float64] = np.zeros(len(included))
        """(M,): the scores over the steps that were taken."""
        self.fit = Fit(len(included))
        """What was released, against the charge."""
        self._included = np.flatnonzero(included)
        self._drawn = np.zeros(len(included), np.bool_)
        self._layout = model.layout
        self._seed = plan.run.seed
        self._score = score
        self._progress = progress
        self._clip = plan.privacy.clip
        self._rows = plan.local.batch_size
        self._coordinates: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._real = 0

    def train(self, start: Vector, sequences: Sequences, **options: Any) -> LocalUpdate:
        """As `PrivateTrainer.train`, with the included canaries among the units."""
        return super().train(start, self.among(sequences), **options)

    def among(self, sequences: Sequences) -> Sequences:
        """The sequences, with the included canaries appended as units without tokens."""
        assert sequences.starts is not None
        starts = sequences.starts
        self._real = len(starts) - 1
        return replace(sequences, starts=np.append(starts, np.full(len(self._included), starts[-1])))

    @contextmanager
    def per_unit_gradients(self, trained: Named) -> Iterator[PerUnit]:
        """As `PrivateTrainer.per_unit_gradients`; units after the real ones are canaries, one-hot and `FAR` long."""
        begins = dict(zip(self._layout.names, self._layout.offsets, strict=False))
        theirs = np.concatenate([np.arange(p.numel()) + begins[name] for name, p in trained])
        # A canary has the same coordinate in all rounds that train the same parameters, which is public.
        places = np.random.Generator(np.random.Philox(self._seed))
        chosen = places.choice(len(theirs), len(self.scores), replace=False)
        self._coordinates = theirs[chosen]
        sizes, shapes = [p.numel() for _, p in trained], [p.shape for _, p in trained]
        device = trained[0][1].device

        def planted(canaries: npt.NDArray[np.int64]) -> UnitGradients:
            flat = torch.zeros(len(canaries), len(theirs), device=device)
            flat[torch.arange(len(canaries)), torch.from_numpy(chosen[canaries])] = FAR * self._clip
            parts = torch.split(flat, sizes, dim=1)
            gradients = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
            return UnitGradients(gradients, torch.zeros(len(canaries)), np.zeros(len(canaries), np.int64))

        with super().per_unit_gradients(trained) as real:

            def both(sequences: Sequences, units: npt.NDArray[np.int64]) -> Iterator[UnitGradients]:
                yield from real(sequences, units[units < self._real])
                self.watched.know()
                canaries = self._included[units[units >= self._real] - self._real]
                self._drawn[canaries] = True
                for first in range(0, len(canaries), self._rows):
                    yield planted(canaries[first : first + self._rows])

            yield both

    def new_sum(self, names: Sequence[str]) -> ClippedSum:
        """As `PrivateTrainer.new_sum`; the adversary sees what it releases."""
        self.watched = WatchedSum(super().new_sum(names), self.see)
        return self.watched

    def see(self, left: torch.Tensor) -> None:
        """Score the canaries by the rest of a step's released sum, float64 of shape (layout.size,)."""
        seen = left.cpu().numpy()[self._coordinates] / self._clip
        self.scores += self._score(seen)
        self.fit.see(seen, ~self._drawn)
        self.fit.see_canaries(seen[self._drawn])
        self._drawn[:] = False
        self._progress(self.fit.releases)


class CanaryResident(Resident):
    """A process whose sites train with canaries.

    Args:
        make: Makes the trainer of a plan, model and device.
    """

    def __init__(self, make: Callable[[Plan, LanguageModel, torch.device], CanaryTrainer]) -> None:
        super().__init__()
        self._make = make

    def trainer(self, plan: Plan, model: LanguageModel, device: torch.device) -> CanaryTrainer:
        """The trainer; it remains as `used`."""
        self.used = self._make(plan, model, device)
        return self.used


@dataclass(frozen=True)
class RecordGame:
    """One run of DP-SGD with canaries."""

    plan: Plan
    terms: Terms
    model: LanguageModel
    base: Vector | None
    """Frozen parameters that the run's sites use instead of those of the plan."""
    start: Vector
    """The run's initial model."""
    site: SiteConfig
    """The site whose records are used."""
    folder: Path
    """An empty folder for the audit's own site."""

    def audit(
        self,
        rounds: int,
        canaries: int | None,
        steps: int | None,
        confidence: float,
        coins: Streams,
        noises: Noises,
        progress: Progress,
    ) -> Audited:
        """Take the steps, guess the coins, and bound epsilon; arguments as in `simulations.audit.audit`.

        After a round the model continues from the site's own update: the server step is post-processing.
        """
        terms = self.terms
        m = self._canaries(canaries)
        each = min(self.plan.local.steps, steps or self.plan.local.steps)
        rounds_played = min(rounds, (steps or rounds * each) // each)
        taken = rounds_played * each
        k, at_half_noise = self._rehearsed(m, taken, confidence)
        included = coins().child("coins").generator().random(m) < 0.5
        plan = played(self.plan, terms, aggregation={"secure": False}, local={"steps": each})

        def make(plan: Plan, model: LanguageModel, device: torch.device) -> CanaryTrainer:
            return CanaryTrainer(
                plan, model, device, included, self._score, lambda step: progress(step, taken)
            )

        resident = CanaryResident(make)
        config = house(self.folder / "state", self.site, name=self.site.name, secure=False)
        site = Site(config, resident, noise=partial(noises, config.name), bases=self.folder)
        self._play(site, plan, rounds_played)
        ledger = Ledger(config.folder / "ledger.sqlite", site.name, composed)
        events = [event for entry in ledger.entries() for event in from_json(entry.charge.event)]
        charged = [event for event in events if isinstance(event, SampledGaussian)]
        claimed = epsilon_of(charged, terms.delta, terms.accountant)
        fit = resident.used.fit
        checks = fit.checks(
            max((event.noise_multiplier for event in charged), default=terms.noise_multiplier),
            fit.releases,
            sum(event.steps for event in charged),
            fit.releases * int(included.sum()),
            min((event.sampling_rate for event in charged), default=self._rate),
        )
        correct, guesses = count(guess(resident.used.scores, k, 0), included)
        bound, refuting = (
            lower_bound(correct, guesses, m, terms.delta, level) for level in (confidence, ALARM)
        )
        what = f"{m} gradient canaries among the {terms.unit}s of {site.name}"
        what += f", over {taken} steps of DP-SGD, each seen"
        return Audited(
            what,
            AuditRow(m, guesses, correct, confidence, bound, claimed, what, refuting, problem(checks)),
            claimed,
            terms.epsilon(rounds),
            terms.delta,
            at_half_noise,
            checks,
            fit.samples,
        )

    def _play(self, site: Site, plan: Plan, rounds: int) -> None:
        """Ask the site for its updates, as a coordinator does."""
        run = "audit"
        base_hash = b"" if self.base is None else vector_hash(self.base)
        base = np.empty(0, np.float32) if self.base is None else self.base
        site.join(Join(run, plan.to_json(), bytes(32), base_hash, base))
        layout, weights = training_layout(plan, self.start.size), self.start
        scales = None if plan.aggregation.compression is None else Scales.first(plan, layout.values)
        for number in range(1, rounds + 1):
            about = SumId(run, bytes.fromhex(plan.digest()), TRAIN, number)
            bounds = scales.to_bytes() if scales else b""
            told = Instructions(
                about, vector_hash(weights), scales=bounds, state="carried" if plan.carries else "fresh"
            )
            sent = site.contribute(Contribute(told, 1, None, weights))
            total = PlainSum(layout)
            total.add([(0, np.concatenate(sent.spans))])
            mean = total.open(scales.bounds if scales else None).mean
            scales = scales.after(plan, mean, 1, 1.0, None) if scales else None
            weights = weights + mean

    @property
    def _rate(self) -> float:
        rate = self.plan.privacy.sampling_rate
        assert rate is not None, "a sound plan has it"
        return rate

    def _canaries(self, wanted: int | None) -> int:
        """The number of canaries; each needs its own coordinate in every round."""
        rounds = range(1, min(2, self.plan.run.rounds) + 1)
        most = min(sum(p.numel() for _, p in self.model.trainable_in_round(number)) for number in rounds)
        if wanted is None:
            return max(1, min(_MOST_CANARIES, most, int(0.1 / self.terms.delta)))
        if wanted > most:
            raise CloisterError(
                "--canaries", wanted, expected=f"at most the {most} coordinates that every round trains"
            )
        return wanted

    def _score(self, seen: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The log-likelihood ratio of one step, (M,) -> (M,)."""
        z, q = self.terms.noise_multiplier, self._rate
        absent = math.log1p(-q) if q < 1 else -math.inf
        ratio: npt.NDArray[np.float64] = np.logaddexp(absent, math.log(q) + (seen - 0.5) / z**2)
        return ratio

    def _rehearsed(self, m: int, steps: int, confidence: float) -> tuple[int, float]:
        """The number of guesses that gives the largest bound if the noise is half of the claimed, and that bound.

        It simulates the scores, with separate coins, batches and noise.
        """
        random = np.random.Generator(np.random.Philox(0))
        rehearsals = max(1, min(_REHEARSALS, _REHEARSED // (m * steps)))
        numbers = sorted({max(1, round(m / 2 * 0.75**power)) for power in range(32)})
        right = np.zeros(len(numbers))
        for _ in range(rehearsals):
            included = random.random(m) < 0.5
            scores = np.zeros(m)
            for _ in range(steps):
                seen = random.normal(0, self.terms.noise_multiplier / 2, m)
                scores += self._score(seen + (included & (random.random(m) < self._rate)))
            best_first = included[np.argsort(-scores)]
            right += np.cumsum(best_first)[np.array(numbers) - 1] / rehearsals
        bounds = [
            lower_bound(int(correct), k, m, self.terms.delta, confidence)
            for correct, k in zip(right, numbers, strict=True)
        ]
        best = int(np.argmax(bounds))
        if not bounds[
            best
        ]:  # no bound to maximise: guess most of the canaries that are expected in some batch
            drawn = 1 - (1 - self._rate) ** steps
            return max(1, round(0.6 * drawn * m / 2)), 0.0
        return numbers[best], bounds[best]
