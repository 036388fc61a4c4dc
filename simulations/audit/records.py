"""The audit with unit record or owner: one run of DP-SGD with gradient canaries, and guesses of the coins that
included them.

A new `Site` with the first site's records joins the plan and is asked to contribute in round after round, as by a
coordinator: its ledger is charged, `Site` calls the trainer with its noise, and its coded update is the next model. The
sum is in clear; no other site takes part. Only the trainer is replaced (`Resident.trainer`), by those of
`steps.py`. A second `Site` of the same name, with an empty file of records, gets the same requests, and the
noised sums of the first one instead of its own: both must answer with the same bytes, to the join too.

Steinke, Nasr and Jagielski 2023, with the gradient canaries of Nasr et al. 2021. Canaries are appended to the site's
own units, each included by its own fair coin. A canary stands for a unit, a record or an owner with whatever
records, and is drawn into batches as every unit is. Its gradient is
`FAR` clipping norms along one coordinate that no other canary has, so that clipping is attacked as well. The adversary
sees every noised sum and subtracts the sum of the real units' clipped gradients, which it knows: they depend on the
canaries only through earlier releases, so revealing them costs no canary anything. Its score of a canary is the
log-likelihood ratio of the rest at that coordinate over the steps, for the noise multiplier z and the sampling rate
q that are claimed:

    sum over steps of ln(1 - q + q exp((x - 1/2) / z^2)),    x in units of the clipping norm.

`privacy/audit/fit.py` compares with the charge: the noise of all sums at all coordinates, how far one more unit moves
a sum under the same noise, and which units are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.fft import next_fast_len

from cloister.aggregation.features.feature import Given, Summed
from cloister.aggregation.features.registry import Coordinated
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import PlainSum
from cloister.clients.setup.config import SiteConfig
from cloister.clients.site import Simulated, Site
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.model.schedule import Schedule
from cloister.privacy.accounting.accountant import epsilon_of
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.audit.fit import Check, Draws, change, counted, enough_noise, problem
from cloister.privacy.audit.lower_bounds import ALARM, lower_bound, right
from cloister.privacy.mechanism.events import SampledGaussian
from cloister.privacy.report.report import AuditRow
from cloister.protocol.errors import CloisterError
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import (
    TRAIN,
    Contribute,
    Contribution,
    Instructions,
    Join,
    Joined,
    SumId,
)
from cloister.protocol.messages.wire import encode, view
from cloister.protocol.plan.plan import Plan
from cloister.simulations.audit.audited import (
    Audited,
    Noises,
    Progress,
    Streams,
    TrainedBy,
    charged,
    house,
    played,
    prepared,
)
from cloister.simulations.audit.steps import CanaryTrainer, Observed, Repeating

RUN = "audit"
"""Identity of the run that is played."""
_MOST_CANARIES = 10_000
_REHEARSALS = 5
_REHEARSED = 20_000_000
"""Scores of single steps that all rehearsals together may take."""
_DRAWS = 100_000
"""Draws of units in all steps, from which the sampling rate is found."""
_MOST_COUNTED = 2**22
"""Units of a step that are only counted."""
_SIZES = np.array([1, 2, 8])
"""Their sequences, in turn."""


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
    """An empty folder for the audit's own sites."""

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
        # More may be charged than the plan has rounds: updates that were made again after a crash.
        rounds_played = min(rounds, self.plan.run.rounds, (steps or rounds * each) // each)
        taken = rounds_played * each
        k, at_half_noise = self._rehearsed(m, taken, confidence)
        included = coins().child("coins").generator().random(m) < 0.5
        plan = played(self.plan, terms, aggregation={"secure": False}, local={"steps": each})
        observed = Observed(self.model.layout, terms.noise_multiplier, self.folder)
        drawn_from = int(included.sum()) + min(_MOST_COUNTED, math.ceil(_DRAWS / (self._rate * taken)))
        draws = Draws(np.resize(_SIZES, next_fast_len(drawn_from)))
        planted = partial(
            CanaryTrainer,
            included=included,
            draws=draws,
            score=self._score,
            observed=observed,
            progress=lambda step: progress(step, taken),
        )
        first, second = TrainedBy(planted), TrainedBy(partial(Repeating, observed=observed))
        name = self.site.name
        simulated = Simulated(noise=partial(noises, name), bases=self.folder, one_owner=True)
        site = Site(self._config("first", plan, records=True), first, simulated=simulated)
        empty = replace(
            simulated, noise=partial(noises, f"{name} without records"), sequences=lambda: prepared(plan, 0)
        )
        repeated = Site(self._config("second", plan, records=False), second, simulated=empty)
        different = self._play((site, repeated), plan, rounds_played, observed)
        claimed = epsilon_of(charged(site, plan, RUN), terms.delta, terms.accountant)
        both = [
            event
            for event in charged(site, plan, RUN) + charged(repeated, plan, RUN)
            if isinstance(event, SampledGaussian)
        ]
        checks = self._checks(observed, draws, both, different)
        correct = right(first.used.scores, included, k)
        bound, refuting = (lower_bound(correct, k, m, terms.delta, level) for level in (confidence, ALARM))
        what = f"{m} gradient canaries among the {terms.unit}s of {name}"
        what += f", over {taken} steps of DP-SGD, each seen"
        row = AuditRow(m, k, correct, confidence, bound, claimed, what, refuting, problem(checks))
        return Audited(what, row, claimed, terms.epsilon(rounds), terms.delta, at_half_noise, checks)

    def _config(self, folder: str, plan: Plan, *, records: bool) -> SiteConfig:
        fields = {"name": self.site.name, "plan": plan.digest(), "secure": False}
        return house(self.folder / folder, self.site, records=records, **fields)

    def _checks(
        self, observed: Observed, draws: Draws, charged: Sequence[SampledGaussian], different: int
    ) -> tuple[Check, ...]:
        """What was seen, against what both sites' ledgers were charged."""
        z = max((event.noise_multiplier for event in charged), default=self.terms.noise_multiplier)
        q = min((event.sampling_rate for event in charged), default=self._rate)
        over = z / self.terms.noise_multiplier
        steps = sum(event.steps for event in charged)
        return (
            *observed.noise.checks(over),
            enough_noise(
                "standard deviation of the noise of empty batches",
                observed.squares / over**2,
                observed.samples,
            ),
            change("what one unit changes, in clipping norms", observed.change, 1 + 1e-8, observed.rounding),
            *draws.checks(q),
            counted("releases", observed.noise.releases, steps),
            counted("answers whose bytes do not follow from the noised sums", different, 0),
        )

    def _play(self, sites: Sequence[Site], plan: Plan, rounds: int, observed: Observed) -> int:
        """Ask the sites to join and for their updates, as a coordinator does.

        Returns:
            Requests to which they have not sent the same bytes.
        """

        def differ(answers: Sequence[Joined | Contribution]) -> bool:
            frames = [[bytes(view(frame)) for frame in encode(each)] for each in answers]
            return frames[0] != frames[1]

        base_hash = b"" if self.base is None else vector_hash(self.base)
        base = np.empty(0, np.float32) if self.base is None else self.base
        join = Join(RUN, plan.to_json(), bytes(32), base_hash, base)
        different = int(differ([site.join(join) for site in sites]))
        sums, weights = Sums.over(plan, self.model.layout, base_hash), self.start
        names = tuple(site.name for site in sites[:1])
        features = Coordinated(sums, Given())
        for number in range(1, rounds + 1):
            about = SumId(RUN, bytes.fromhex(plan.digest()), TRAIN, number)
            by_feature = features.tell(number, names, {})
            state: Literal["fresh", "carried"] = "carried" if plan.carries else "fresh"
            told = Instructions(about, vector_hash(weights), by_feature, state)
            asked = Contribute(told, 1, None, weights)
            sent = [site.contribute(asked) for site in sites]
            different += not observed.forget() or differ(sent)
            part = sums.of_round(TRAIN, number)
            total = PlainSum(part.training, features.bounds(by_feature))
            total.add([(0, np.concatenate(sent[0].spans))])
            opened = total.open()
            summed = Summed(number, 0, names, opened.counters, by_feature, {}, (number,))
            mean = features.combine([features.decode(summed, opened)], [summed])
            features.before_step(mean, [summed])
            weights = weights + (
                mean if part.trained is None else self.model.layout.spread(mean, part.trained)
            )
            features.after_step()
        return different

    @property
    def _rate(self) -> float:
        rate = self.plan.privacy.sampling_rate
        assert rate is not None, "a sound plan has it"
        return rate

    def _canaries(self, wanted: int | None) -> int:
        """The number of canaries; each needs its own coordinate in every round."""
        parts = Schedule.of(self.plan, self.model.layout).layouts(self.plan.run.rounds)
        most = min(part.size for part in parts)
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
        return np.logaddexp(absent, math.log(q) + (seen - 0.5) / z**2)

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
        # No bound to maximise: guess most of the canaries that are expected in some batch.
        if not bounds[best]:
            drawn = 1 - (1 - self._rate) ** steps
            return max(1, round(0.6 * drawn * m / 2)), 0.0
        return numbers[best], bounds[best]
