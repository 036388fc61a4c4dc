"""An audit of a run: the mechanism that its code really is, attacked with canaries, beside the epsilon that is claimed.

What is played against is the code that a site or the coordinator runs, with fresh noise and none of the run's own
secrets. The adversary is the strongest that the claim is meant for. The games are those of `privacy/audit.py`.

Unit record, one run (Steinke, Nasr and Jagielski 2023) with gradient canaries (Nasr et al. 2021): behind the first
site's own units stand canaries, each included by its own fair coin. A canary is drawn into batches as every unit is,
and its gradient is `_FAR` clipping norms along one coordinate that no other canary has, so that clipping is attacked
as well. The adversary sees every noised sum, and takes off the sum of the real units' clipped gradients, which it
knows: they depend on the canaries through earlier releases alone, so that giving them away costs no canary anything.
Its score of a canary is the log-likelihood ratio of what is left at that coordinate over the steps, for the noise
multiplier z and the sampling rate q that are claimed:

    sum over steps of ln(1 - q + q exp((x - 1/2) / z^2)),    x in units of the clipping norm.

Unit site, many runs: one round's sum is taken again and again, with the update of one site far beyond the clip along
one coordinate or, by a coin, zero. The other honest sites of the smallest sum send zero, and colluders no noise: the
worst case. A run's score is that coordinate of what is released. Noise is independent from coordinate to coordinate
(AES in counter mode, `privacy/noise.py`), so one vector of the others' noise serves as many runs as it has
coordinates; the confidence rests on that. With adaptive clipping the count of unclipped sites is not attacked.

How many coins are guessed, and where the threshold is, is fixed before anything is seen: it is what would show the
most if the noise had half of its standard deviation. What that would be is given with the result, because an audit
that could not have seen it says little by its silence. Refused: canaries made of text, a weaker adversary at the same
cost; and a way to ask for canaries by a plan or a message: they exist in this file alone.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm

from cloister.aggregation.average import WEIGHT
from cloister.aggregation.graph import assumed
from cloister.aggregation.sums import training_layout
from cloister.clients.dpsgd import ClippedSum, PerUnit, PrivateTrainer, UnitGradients
from cloister.clients.release import Finished, Protected, contribution
from cloister.clients.site import load_site
from cloister.lm.data import Prepared, Sequences, cached, prepare, prepared_key, unit_rule
from cloister.lm.layout import Layout, Vector
from cloister.lm.model import LanguageModel, device_for, load_model
from cloister.lm.records import read_records
from cloister.lm.train import Named
from cloister.privacy.accounting import epsilon_of
from cloister.privacy.audit import count, distinguish, guess, lower_bound
from cloister.privacy.events import SampledGaussian
from cloister.privacy.ledger import read_history
from cloister.privacy.noise import NoiseStream
from cloister.privacy.report import AuditRow
from cloister.privacy.terms import Terms, terms_of
from cloister.protocol.errors import CloisterError, RunFolderError
from cloister.protocol.plan import Plan
from cloister.protocol.storage import write_bytes
from cloister.server.checkpoint import Checkpoints
from cloister.server.folder import RunFolder
from cloister.server.run import base_of, public_model
from cloister.simulations.partition import site_name

Progress = Callable[[int, int], None]
"""Told how much is done, of how much."""
Streams = Callable[[], NoiseStream]
"""Gives a new stream of noise each time."""

_MOST_CANARIES = 10_000
_RUNS = 20_000
_FAR = 100.0
"""Length of what a canary adds, in clipping norms, before it is clipped."""
_WIDTH = 64
"""Coordinates of the sums that are taken for the unit site."""
_REHEARSALS = 5
_REHEARSED = 20_000_000
"""Scores of single steps that a rehearsal may take in all."""


@dataclass(frozen=True)
class Audited:
    """What an audit found."""

    what: str
    """What was played, in words."""
    row: AuditRow
    """Guesses, and the lower bound on epsilon that they prove."""
    claimed: float
    """Epsilon that accounting claims for what was played."""
    claimed_run: float
    """Epsilon that it claims for the run."""
    delta: float
    """Delta at which all of them are stated."""
    at_half_noise: float
    """The bound to expect if the noise had half of its standard deviation: what this audit can see."""

    @property
    def alarm(self) -> bool:
        """Whether the claim is refuted."""
        return self.row.epsilon > self.claimed


def audit(
    folder: RunFolder,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    streams: Streams = NoiseStream.fresh,
    progress: Progress = lambda _done, _of: None,
) -> Audited:
    """Audit the mechanism of a simulated run, and keep what was found in its `audit.json`.

    Args:
        folder: The run.
        canaries: Canaries (unit record), by default one for each coordinate, but at most 10,000 and 0.1 / delta,
            far beyond which Theorem 3.1 of the paper proves nothing; or runs of one round (unit site).
        steps: Unit record: local steps to take, at most; all that a site of the run took by default. More than a
            round's are whole rounds.
        confidence: Probability with which the bound is true.
        streams: Noise, coins and batches: a stream that nothing else has had, each time.
        progress: Told how far it is.

    Raises:
        CloisterError: the plan has no privacy unit, an option is out of range, or the run is not there.
    """
    plan = folder.plan
    if plan.privacy.unit == "none":
        raise CloisterError(
            "privacy.unit", "none", expected="record or site: without a unit there is no claim to audit"
        )
    if not 0 < confidence < 1:
        raise CloisterError("--confidence", confidence, expected="between 0 and 1")
    if canaries is not None and canaries < 1:
        raise CloisterError("--canaries", canaries, expected="1 or more")
    if steps is not None and (steps < 1 or plan.privacy.unit == "site"):
        raise CloisterError("--steps", steps, expected="1 or more, with privacy.unit = 'record' only")
    rounds = _rounds_paid_for(folder)
    public = public_model(folder, lambda _event: None)
    model = load_model(plan, base_of(plan, public))
    terms = terms_of(plan, model.layout.size)
    assert terms is not None, "a plan with a unit has terms"
    if terms.unit == "site":
        found = audit_sites(
            plan, terms, model.layout.size, rounds, canaries or _RUNS, confidence, streams, progress
        )
    else:
        kept = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
        start = kept.load(0).weights
        device, sequences = _first_site(folder.path / "sites", plan, model)
        game = RecordGame(plan, terms, model, sequences, start, device)
        found = game.audit(rounds, canaries, steps, confidence, streams, progress)
    shown = {
        "row": asdict(found.row),
        "claimed": found.claimed,
        "what": found.what,
        "delta": found.delta,
        "at_half_noise": found.at_half_noise,
    }
    write_bytes(folder.path / "audit.json", (json.dumps(shown, indent=1) + "\n").encode())
    return found


def _rounds_paid_for(folder: RunFolder) -> int:
    """Rounds of the site that has spent the most: what the run's own claim is about.

    Raises:
        RunFolderError: the run has released nothing.
        LedgerError: its ledger is damaged.
    """
    entries = read_history(folder.ledger).entries if folder.ledger.exists() else ()
    if not entries:
        raise RunFolderError(
            str(folder.path),
            expected="a run that has released something, with its ledger, and nothing was charged in this one",
            fix="run it first",
        )
    return max(Counter(entry.charge.dataset for entry in entries).values())


def _first_site(sites: Path, plan: Plan, model: LanguageModel) -> tuple[torch.device, Sequences]:
    """The device of the first simulated site, and its training sequences as it lays them out."""
    path = sites / site_name(0) / "site.toml"
    if not path.is_file():
        raise RunFolderError(
            str(path),
            expected="the folder of a simulated site, whose records stay in the audit",
            fix="audit a simulation of the same plan",
        )
    site = load_site(path).config
    cache, seed = Path(site.state) / "data", plan.run.seed
    units = unit_rule(plan.data, plan.privacy)

    def make() -> Prepared:
        records = read_records(site.data, split=site.split, cache=cache)
        return prepare(records, model.tokenizer, plan.data, seed=seed, units=units)

    key = prepared_key(site.data, model.tokenizer, plan.data, seed=seed, split=site.split, units=units)
    return device_for(site.device), cached(cache, key, make).train


# --- unit record ------------------------------------------------------------------------------------------------------


class WatchedSum(ClippedSum):
    """A clipped sum that is given out as every other, while the adversary looks on.

    Args:
        layout: As for `ClippedSum`, like what follows.
        names: Parameters.
        clip: L2 norm C.
        device: Where gradients lie.
        watch: Given what was released, less what the adversary knows, float32 of shape (layout.size,).
    """

    def __init__(
        self,
        layout: Layout,
        names: Sequence[str],
        clip: float,
        device: torch.device,
        watch: Callable[[torch.Tensor], None],
    ) -> None:
        super().__init__(layout, names, clip, device)
        self._watch = watch
        self._known = torch.zeros(())

    def know(self) -> None:
        """Take what was added until now as known to the adversary."""
        assert self._sum is not None
        self._known = self._sum.clone()

    def release(self, noise: NoiseStream, sigma: float, threads: int = 1) -> torch.Tensor:
        """As of every sum."""
        released = super().release(noise, sigma, threads)
        self._watch(released - self._known)
        return released


class CanaryTrainer(PrivateTrainer):
    """Takes the steps of `PrivateTrainer`, which it changes in nothing, with canaries behind the real units.

    Args:
        plan: As for `PrivateTrainer`.
        model: As for `PrivateTrainer`.
        device: As for `PrivateTrainer`.
        included: (M,) bool: the coins.
        places: Draws the canaries' coordinates in each round; public.
        score: What is left of a step's noised sum at the canaries' coordinates (M,), in clipping norms -> what that
            adds to their scores.
    """

    def __init__(
        self,
        plan: Plan,
        model: LanguageModel,
        device: torch.device,
        included: npt.NDArray[np.bool_],
        places: np.random.Generator,
        score: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    ) -> None:
        super().__init__(plan, model, device)
        self.scores: npt.NDArray[np.float64] = np.zeros(len(included))
        """(M,): the scores, over the steps that were taken."""
        self._included = np.flatnonzero(included)
        self._layout = model.layout
        self._random = places
        self._score = score
        self._clip = plan.privacy.clip
        self._rows = plan.local.batch_size
        self._coordinates: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._real = 0

    def among(self, sequences: Sequences) -> Sequences:
        """The sequences, with the canaries that are included as further units, without any tokens, behind them."""
        assert sequences.starts is not None
        self._real = len(sequences.starts) - 1
        end = np.full(len(self._included), sequences.starts[-1])
        return replace(sequences, starts=np.append(sequences.starts, end))

    @contextmanager
    def _gradients(self, trained: Named) -> Iterator[PerUnit]:
        begins = dict(zip(self._layout.names, self._layout.offsets, strict=False))
        theirs = np.concatenate([np.arange(p.numel()) + begins[name] for name, p in trained])
        chosen = self._random.choice(len(theirs), len(self.scores), replace=False)
        self._coordinates = theirs[chosen]
        sizes, shapes = [p.numel() for _, p in trained], [p.shape for _, p in trained]
        device = trained[0][1].device

        def planted(canaries: npt.NDArray[np.int64]) -> UnitGradients:
            flat = torch.zeros(len(canaries), len(theirs), device=device)
            flat[torch.arange(len(canaries)), torch.from_numpy(chosen[canaries])] = _FAR * self._clip
            parts = torch.split(flat, sizes, dim=1)
            gradients = [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
            return UnitGradients(gradients, torch.zeros(len(canaries)), np.zeros(len(canaries), np.int64))

        with super()._gradients(trained) as real:

            def both(sequences: Sequences, units: npt.NDArray[np.int64]) -> Iterator[UnitGradients]:
                yield from real(sequences, units[units < self._real])
                self._watched.know()
                canaries = self._included[units[units >= self._real] - self._real]
                for first in range(0, len(canaries), self._rows):
                    yield planted(canaries[first : first + self._rows])

            yield both

    def _new_sum(self, names: Sequence[str]) -> ClippedSum:
        self._watched = WatchedSum(self._layout, names, self._clip, self._device, self._see)
        return self._watched

    def _see(self, left: torch.Tensor) -> None:
        self.scores += self._score(left.cpu().numpy()[self._coordinates].astype(np.float64) / self._clip)


@dataclass(frozen=True)
class RecordGame:
    """One run of DP-SGD with canaries."""

    plan: Plan
    terms: Terms
    model: LanguageModel
    sequences: Sequences
    """The site's real units."""
    start: Vector
    """The run's initial model."""
    device: torch.device

    def audit(
        self,
        rounds: int,
        canaries: int | None,
        steps: int | None,
        confidence: float,
        streams: Streams,
        progress: Progress,
    ) -> Audited:
        """Take the steps, guess the coins, and bound epsilon; arguments as those of the module's `audit`.

        After a round the model goes on from the site's own update: what the coordinator makes of it costs no privacy.
        """
        plan, terms = self.plan, self.terms
        m = self._canaries(canaries)
        each = min(plan.local.steps, steps or plan.local.steps)
        rounds_played = min(rounds, (steps or rounds * each) // each)
        taken = rounds_played * each
        k, at_half_noise = self._rehearsed(m, taken, confidence)
        included = streams().child("coins").generator().random(m) < 0.5
        shorter = plan.model_copy(update={"local": plan.local.model_copy(update={"steps": each})})
        places = np.random.Generator(np.random.Philox(plan.run.seed))
        trainer = CanaryTrainer(shorter, self.model, self.device, included, places, self._score)
        sequences, weights = trainer.among(self.sequences), self.start
        for number in range(1, rounds_played + 1):
            before = (number - 1) * each

            def tell(step: int, before: int = before) -> None:
                progress(before + step, taken)

            update = trainer.train(
                weights,
                sequences,
                round=number,
                noise=streams(),
                noise_multiplier=terms.noise_multiplier,
                progress=tell,
            )
            weights = weights + update.vector
        correct, guesses = count(guess(trainer.scores, k, 0), included)
        bound = lower_bound(correct, guesses, m, terms.delta, confidence)
        claimed = self._claimed(taken)
        what = f"{m} gradient canaries among the records of {site_name(0)}, over {taken} steps of DP-SGD, each seen"
        return Audited(
            what,
            AuditRow(m, guesses, correct, confidence, bound, claimed, what),
            claimed,
            terms.epsilon(rounds),
            terms.delta,
            at_half_noise,
        )

    def _claimed(self, steps: int) -> float:
        event = SampledGaussian(self.terms.noise_multiplier, self._rate, steps)
        return epsilon_of((event,), self.terms.delta, self.terms.accountant)

    @property
    def _rate(self) -> float:
        rate = self.plan.privacy.sampling_rate
        assert rate is not None, "a sound plan has it"
        return rate

    def _canaries(self, wanted: int | None) -> int:
        """How many canaries; each has a coordinate of its own in every round."""
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
        """Log-likelihood ratio of one step."""
        z, q = self.terms.noise_multiplier, self._rate
        absent = math.log1p(-q) if q < 1 else -math.inf
        ratio: npt.NDArray[np.float64] = np.logaddexp(absent, math.log(q) + (seen - 0.5) / z**2)
        return ratio

    def _rehearsed(self, m: int, steps: int, confidence: float) -> tuple[int, float]:
        """The number of guesses that shows the most where the noise is half of what it should be, and what it shows.

        From coins, batches and noise of its own.
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
        if not bounds[best]:  # nothing to go by: most of the canaries that can be expected in some batch
            drawn = 1 - (1 - self._rate) ** steps
            return max(1, round(0.6 * drawn * m / 2)), 0.0
        return numbers[best], bounds[best]


# --- unit site --------------------------------------------------------------------------------------------------------


def audit_sites(
    plan: Plan,
    terms: Terms,
    dimension: int,
    rounds: int,
    runs: int,
    confidence: float,
    streams: Streams,
    progress: Progress,
) -> Audited:
    """Take one round's sum `runs` times, with a canary or, by a coin, zero in the place of one site's update.

    Args:
        plan: The plan.
        terms: Its terms, at the dimension of its model.
        dimension: Coordinates of an update.
        rounds: Rounds of the run's own claim.
        runs: Times that the sum is taken.
        confidence: As in `audit`, like what follows.
        streams: Noise and coins.
        progress: Told how far it is.
    """
    assert terms.mechanism is not None, "unit site has a mechanism"
    mechanism = replace(terms.mechanism, dimension=_WIDTH)
    layout = replace(training_layout(plan, dimension), size=_WIDTH)
    sites = plan.cohort.needed()
    if mechanism.variance:
        sites -= assumed(plan.cohort.size(), plan.aggregation.colluders)
    clip = plan.privacy.clip
    zero = Finished(np.zeros(_WIDTH, np.float32), 0, 0.0)
    included = streams().child("coins").generator().random(runs) < 0.5
    scores = np.empty(runs)
    for first in range(0, runs, _WIDTH):
        others = np.zeros(layout.length, layout.ring.dtype)
        for _ in range(sites - 1):
            np.add(others, contribution(Protected(layout, mechanism, clip, streams()), zero), out=others)
        for run in range(first, min(runs, first + _WIDTH)):
            place = run - first
            update = zero.vector.copy()
            update[place] = _FAR * clip if included[run] else 0.0
            code = Protected(layout, mechanism, clip, streams())
            own = contribution(code, Finished(update, 0, 0.0))
            opened = layout.open(np.add(others, own))
            summed = opened.counters[WEIGHT]
            mean, _ = mechanism.decode(opened.mean, summed, clip, streams())
            scores[run] = mean[place] * summed / clip
        progress(min(runs, first + _WIDTH), runs)
    threshold, at_half_noise = _threshold(mechanism.deviation, runs, terms.delta, confidence)
    said = scores > threshold
    present = int(included.sum())
    false_positives, false_negatives = int((said & ~included).sum()), int((~said & included).sum())
    bound = (
        distinguish(false_positives, runs - present, false_negatives, present, terms.delta, confidence)
        if 0 < present < runs
        else 0.0
    )
    claimed = terms.epsilon(1)
    what = f"one round's sum, taken {runs} times, with one site's update far beyond the clip in it or not"
    right = runs - false_positives - false_negatives
    return Audited(
        what,
        AuditRow(runs, runs, right, confidence, bound, claimed, what),
        claimed,
        terms.epsilon(rounds),
        terms.delta,
        at_half_noise,
    )


def _threshold(deviation: float, runs: int, delta: float, confidence: float) -> tuple[float, float]:
    """The threshold that shows the most where the noise is half of what it should be, and what it shows.

    Args:
        deviation: Standard deviation of the noise that is claimed, in clipping norms.
        runs: With and without the canary together.
        delta: Of the claim.
        confidence: Of the bound.
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
