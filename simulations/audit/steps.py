"""What an audit plants into the steps of DP-SGD, and what it sees of them.

A site contributes twice to each round. First with its records (`CanaryTrainer`): canaries, whose coins are guessed,
are among its units, and each batch has one more unit, with which the sum is compared to the sum without it, under the
same noise. Then from the same model without any record (`Repeating`): its optimizer gets the noised sums that were seen
before, so what it sends must be the same to the last byte. Else something left the site that does not follow from
noised sums and public data. Its own sums, which nobody gets, are those of empty batches.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cloister.clients.training.dpsgd import ClippedSum, PerUnit, PrivateTrainer, UnitGradients
from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import LanguageModel
from cloister.lm.model.weights import Named
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.audit.fit import Draws, Noise
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import Plan
from cloister.simulations.audit.audited import FAR, LENGTHS, NOTICED

Places = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Seen:
    """A release, in clipping norms."""

    noise: npt.NDArray[np.float64]
    """(layout.size,): the released sum less the exact one."""
    rest: npt.NDArray[np.float64]
    """(layout.size,): the released sum without the last unit, less the part that the adversary knows."""
    change: float
    """L2 norm by which the last unit changes the released sum."""
    rounding: float
    """Largest error of `change`: released sums are rounded to float32."""


class WatchedSum(ClippedSum):
    """A trainer's own clipped sum, and what is released without its last unit, under the same noise.

    Args:
        inner: The sum.
        clip: C.
        watch: Receives the released sum and what is seen of it; returns what the trainer gets.
    """

    def __init__(
        self, inner: ClippedSum, clip: float, watch: Callable[[torch.Tensor, Seen], torch.Tensor]
    ) -> None:
        self._inner = inner  # which does all of it: there is no second sum
        self._clip = clip
        self._watch = watch
        self._known: torch.Tensor | float = 0.0
        self._without: ClippedSum | None = None

    def add(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `ClippedSum.add`."""
        return self._inner.add(gradients)

    def so_far(self) -> torch.Tensor:
        """As `ClippedSum.so_far`."""
        return self._inner.so_far()

    def know(self) -> None:
        """Reveal to the adversary everything added so far."""
        self._known = self.so_far()

    def before_last(self) -> None:
        """What is added from here on is the last unit."""
        self._without = copy.deepcopy(self._inner)

    def release(self, noise: NoiseStream, sigma: float, threads: int = 1) -> torch.Tensor:
        """As `ClippedSum.release`; the adversary sees the result."""
        exact = self.so_far()
        released = without = self._inner.release(noise, sigma, threads)
        if self._without is not None:
            without = self._without.release(noise, sigma, threads)
        one, other = released.double() / self._clip, without.double() / self._clip
        seen = Seen(
            (one - exact / self._clip).cpu().numpy(),
            (other - self._known / self._clip).cpu().numpy(),
            float((one - other).norm()),
            2.0**-24 * float(one.norm() + other.norm()),
        )
        return self._watch(released, seen)


class Observed:
    """What was seen of the steps of all rounds.

    Args:
        layout: Of the model.
        deviation: Standard deviation that is claimed for the noise, in clipping norms.
        folder: An empty folder, for the released sums of a round.
    """

    def __init__(self, layout: Layout, deviation: float, folder: Path) -> None:
        self.noise = Noise(layout.size)
        """Of all sums."""
        self.squares = 0.0
        """Of the noise of empty batches, over the claimed deviation."""
        self.samples = 0
        """Of this noise."""
        self.change = self.rounding = 0.0
        """Of the step in which the last unit changed the sum most."""
        self._layout = layout
        self._deviation = deviation
        self._folder = folder
        self._released: deque[Path] = deque()

    def places(self, names: Sequence[str]) -> Places:
        """(layout.size,): the elements of the named parameters."""
        named, sizes = np.isin(self._layout.names, names), np.diff(self._layout.offsets)
        return np.repeat(named, sizes)

    def take(self, released: torch.Tensor, seen: Seen, places: Places) -> None:
        """Take the sum of a batch, and keep it for `repeated`."""
        self.noise.see(seen.noise / self._deviation, places)
        if seen.change - seen.rounding > self.change - self.rounding or not self.change:
            self.change, self.rounding = seen.change, seen.rounding
        path = self._folder / f"released-{self.noise.releases}.npy"
        np.save(path, released.cpu().numpy())
        self._released.append(path)

    def take_empty(self, seen: Seen, places: Places) -> None:
        """Take the sum of an empty batch."""
        noise = seen.noise / self._deviation
        self.noise.see(noise, places)
        self.squares += float(np.square(noise).sum())
        self.samples += int(places.sum())

    def repeated(self) -> Vector | None:
        """The first released sum that was not given back yet; None: there is none."""
        if not self._released:
            return None
        path = self._released.popleft()
        released: Vector = np.load(path)
        path.unlink()
        return released

    def forget(self) -> bool:
        """Drop the released sums that were not given back; whether there are none."""
        left = len(self._released)
        while self.repeated() is not None:
            pass
        return not left


class CanaryTrainer(PrivateTrainer):
    """Takes the unchanged steps of `PrivateTrainer`, with more units than the site's.

    After them come the included canaries, one-hot and `FAR` clipping norms long, and units without a gradient, which
    are only counted. The last unit, which is in every batch, is as long, along all coordinates alike, and has a loss
    that is noticed wherever it is. In every second step it is a unit of two equal sequences instead, with the gradients
    of the model for them, made `FAR`^2 times longer: clipped apart, they would move the sum twice as far.

    Args:
        plan: As for `PrivateTrainer`.
        model: As for `PrivateTrainer`.
        device: As for `PrivateTrainer`.
        included: (M,) bool: the coins.
        draws: Takes the units after the site's that are drawn: the included canaries, and those that are counted. Their
            sizes are seen by what draws units, their sequences by nothing.
        score: The rest of a step's noised sum at the canaries' coordinates (M,), in clipping norms -> the
            increase of their scores (M,).
        observed: Takes what is seen.
        progress: Receives the steps taken.
    """

    def __init__(
        self,
        plan: Plan,
        model: LanguageModel,
        device: torch.device,
        *,
        included: npt.NDArray[np.bool_],
        draws: Draws,
        score: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
        observed: Observed,
        progress: Callable[[int], None],
    ) -> None:
        super().__init__(plan, model, device)
        self.scores: npt.NDArray[np.float64] = np.zeros(len(included))
        """(M,): the scores over the steps that were taken."""
        self.taken = 0
        """Steps."""
        self._draws = draws
        self._included = np.flatnonzero(included)
        self._seed = plan.run.seed
        self._score = score
        self._observed = observed
        self._progress = progress
        self._clip = plan.privacy.clip
        self._rows = plan.local.batch_size
        self._coordinates: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._real = 0
        # Opacus takes a whole unit at a time; a plan whose units do not fit has units of one sequence.
        windows = 2 if self._rows > 1 or self.method == "reference" else 1
        tokens = np.tile(np.arange(self.task.tokens_each, dtype=np.int32) % 2, (windows, 1))
        labels = np.tile(np.arange(self.task.labels_each, dtype=np.int32) % 2, (windows, 1))
        far = np.full(windows, FAR**2, np.float32)
        self._unit = Sequences(tokens, labels, None, 0, np.array([0, windows]), far)

    def train(self, start: Vector, sequences: Sequences, **options: Any) -> LocalUpdate:
        """As `PrivateTrainer.train`, with more units after the site's, whose sequences are not there."""
        assert sequences.starts is not None
        self._real = len(sequences.starts) - 1
        starts = np.append(sequences.starts, sequences.starts[-1] + np.cumsum(self._draws.sizes))
        return super().train(start, replace(sequences, starts=starts), **options)

    @contextmanager
    def per_unit_gradients(self, trained: Named) -> Iterator[PerUnit]:
        """As `PrivateTrainer.per_unit_gradients`, for more units than the site's."""
        theirs = np.flatnonzero(self._observed.places([name for name, _ in trained]))
        # A canary has the same coordinate in all rounds that train the same parameters, which is public.
        public = np.random.Generator(np.random.Philox(self._seed))
        chosen = public.choice(len(theirs), len(self.scores), replace=False)
        self._coordinates = theirs[chosen]
        signs = torch.from_numpy(public.choice(np.array([-1, 1], np.float32), (1, len(theirs))))
        sizes, shapes = [p.numel() for _, p in trained], [p.shape for _, p in trained]
        device = trained[0][1].device

        def planted(directions: torch.Tensor, loss: int = 0, length: float = FAR) -> UnitGradients:
            flat = directions.to(device) * (length * self._clip)
            parts = zip(torch.split(flat, sizes, dim=1), shapes, strict=True)
            gradients = [part.reshape(-1, *shape) for part, shape in parts]
            nats = torch.full((len(flat),), float(loss * loss), dtype=torch.float64)
            return UnitGradients(gradients, nats, np.full(len(flat), loss))

        def one_hot(canaries: npt.NDArray[np.int64]) -> UnitGradients:
            flat = torch.zeros(len(canaries), len(theirs), device=device)
            flat[torch.arange(len(canaries)), torch.from_numpy(chosen[canaries])] = 1
            return planted(flat)

        with super().per_unit_gradients(trained) as real:

            def all_of_them(sequences: Sequences, units: npt.NDArray[np.int64]) -> Iterator[UnitGradients]:
                yield from real(sequences, units[units < self._real])
                self.watched.know()
                after = units[units >= self._real] - self._real
                self._draws.see(after, len(units) - len(after), self._real)
                canaries = self._included[after[after < len(self._included)]]
                for first in range(0, len(canaries), self._rows):
                    yield one_hot(canaries[first : first + self._rows])
                self.watched.before_last()
                if self.taken % 2:
                    yield from real(self._unit, np.zeros(1, np.int64))
                else:
                    length = LENGTHS[self.taken // 2 % len(LENGTHS)]
                    yield planted(signs / math.sqrt(len(theirs)), NOTICED, length)

            yield all_of_them

    def new_sum(self, names: Sequence[str]) -> ClippedSum:
        """As `PrivateTrainer.new_sum`; the adversary sees what it releases."""
        places = self._observed.places(names)

        def watch(released: torch.Tensor, seen: Seen) -> torch.Tensor:
            self.scores += self._score(seen.rest[self._coordinates])
            self._observed.take(released, seen, places)
            self.taken += 1
            self._progress(self.taken)
            return released

        self.watched = WatchedSum(super().new_sum(names), self._clip, watch)
        return self.watched


class Repeating(PrivateTrainer):
    """Takes steps by the noised sums that were seen before; what it releases itself is seen and not used.

    Args:
        plan: As for `PrivateTrainer`.
        model: As for `PrivateTrainer`.
        device: As for `PrivateTrainer`.
        observed: Has the noised sums.
    """

    def __init__(self, plan: Plan, model: LanguageModel, device: torch.device, observed: Observed) -> None:
        super().__init__(plan, model, device)
        self._clip = plan.privacy.clip
        self._observed = observed

    def new_sum(self, names: Sequence[str]) -> ClippedSum:
        """As `PrivateTrainer.new_sum`."""
        places = self._observed.places(names)

        def watch(released: torch.Tensor, seen: Seen) -> torch.Tensor:
            self._observed.take_empty(seen, places)
            before = self._observed.repeated()
            return released if before is None else torch.from_numpy(before).to(released.device)

        return WatchedSum(super().new_sum(names), self._clip, watch)
