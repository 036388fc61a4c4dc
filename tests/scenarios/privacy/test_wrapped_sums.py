"""A trusted coordinator's noise where another site lies in its integers, which no party can check under masks.

What is released is a function of the sum with its noise, modulo 2^b, wherever a liar has moved the sum: to the edge of
the ring, where a step of a site wraps by 2^b steps, or where the mean's float32 is coarse. Each check is shown to fail
where the noise is added after the sum was decoded (`late`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.aggregation.features.feature import Given, Summed
from cloister.aggregation.features.registry import Coordinated
from cloister.aggregation.features.site_unit import Protected
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.span import manifest_of
from cloister.clients.site import Site
from cloister.clients.state.kept import Written
from cloister.clients.training.release import contribution
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.audit.lower_bounds import distinguish
from cloister.privacy.mechanism.clip import rounded_l2
from cloister.privacy.mechanism.correlated import CorrelatedNoise
from cloister.privacy.mechanism.noise import NoiseStream, add_steps
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.plan.soundness import parse
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.run import run
from cloister.tests.parties.federation import PRIVATE, Federation, tiny

Z, SIZE, SITES = 4.0, 256, 12
PLAN = [
    "aggregation.weighting=uniform",
    "server.evaluation=none",
    "privacy.unit=site",
    "privacy.trusted_coordinator=true",
    f"privacy.noise_multiplier={Z}",
    f"cohort.sites={SITES}",
    "aggregation.colluders=0.0",
]
ADAPTIVE = ["privacy.adaptive={count_noise=8.0}"]
CORRELATED = [
    "privacy.correlated.separation=2",
    "privacy.correlated.participations=3",
    "run.rounds=6",
    f"cohort.sites={2 * SITES}",
    "cohort.fraction=0.5",
]
KINDS = pytest.mark.parametrize(
    "changes", [[], ADAPTIVE, CORRELATED], ids=["plain", "adaptive", "correlated"]
)
BITS = pytest.mark.parametrize("bits", [16, 32])


class Fixed(NoiseStream):
    """A stream whose samples are given: those of the update, and then that of the count."""

    samples: npt.NDArray[np.float64]

    def child(self, purpose: str) -> Self:
        made = super().child(purpose)
        made.samples = self.samples[SIZE:] if purpose == "count" else self.samples
        return made

    def gaussian(self, size: int, sigma: float, offset: int = 0) -> npt.NDArray[np.float64]:
        return self.samples[offset : offset + size]


class FixedRows(CorrelatedNoise):
    """Correlated noise whose rows are given."""

    samples: npt.NDArray[np.float64]

    def add(self, total: npt.NDArray[np.integer[Any]], sigma: float, number: int) -> None:
        add_steps(total, self.samples)


class Coordinator:
    """A plan's coordinator, which opens sums of all of its sites."""

    def __init__(self, *changes: str) -> None:
        self.plan = parse("", [*PLAN, *changes])
        self.sums = Sums(self.plan, SIZE)
        self.layout = self.sums.training
        terms = terms_of(self.plan, SIZE)
        assert terms is not None
        assert terms.mechanism is not None
        self.terms, self.mechanism = terms, terms.mechanism
        self.sites = self.plan.cohort.size()
        self.dtype, self.signed = self.layout.ring.dtype, self.layout.ring.signed_dtype
        self.largest = 2 ** (self.plan.aggregation.ring_bits - 1) - 1

    def steps(self, update: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The signed integers of a site with an update, in clipping norms: those of the update, and the count."""
        made = Protected(self.layout, self.mechanism, 1.0, NoiseStream.fresh())
        sent = contribution(made, LocalUpdate(update.astype(np.float32), 0, 0.0))
        return sent[: self.mechanism.size].view(self.signed).astype(np.int64)

    def released(
        self, steps: npt.NDArray[np.int64], samples: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.float64]:
        """The mean update of a sum in steps, and the next clipping norm, with the given noise or a fresh one."""
        total: RingVector = np.concatenate(
            [steps.astype(self.dtype), self.layout.ring.encode_counters([self.sites])]
        )
        opened = self.layout.open(total, self.sites)
        noise: Any = NoiseStream.fresh()
        if self.mechanism.correlation is not None:
            rows = CorrelatedNoise if samples is None else FixedRows
            noise = rows(self.mechanism.correlation, noise, SIZE)
        elif samples is not None:
            noise = Fixed.from_declared_seed(1)
        if samples is not None:
            noise.samples = samples
        features = Coordinated(
            self.sums, Given(noise=noise.row if self.mechanism.correlation else lambda _: noise)
        )
        names = tuple(map(str, range(self.sites)))
        summed = Summed(1, 0, names, opened.counters, (), {}, (1,))
        assert opened.counters == {WEIGHT: self.sites}
        mean = features.decode(summed, opened)
        features.before_step(mean, [summed])
        return np.append(mean.astype(np.float64), features.figures([summed])["clip"])


def late(patch: pytest.MonkeyPatch) -> None:
    """The defect: the noise is added to the decoded mean."""
    add_noise, decode = SiteMechanism.add_noise, SiteMechanism.decode
    waiting: list[npt.NDArray[np.float64]] = []

    def later(self: SiteMechanism, total: RingVector, noise: Any) -> None:
        steps = np.zeros_like(total)
        add_noise(self, steps, noise)
        waiting.append(steps.view(f"i{total.itemsize}").astype(np.float64))

    def noised(self: SiteMechanism, mean: Any, sites: int, clip: float) -> Any:
        mean += waiting.pop() / self.scale / sites
        return decode(self, mean, sites, clip)

    patch.setattr(SiteMechanism, "add_noise", later)
    patch.setattr(SiteMechanism, "decode", noised)


def update_of(coordinator: Coordinator, length: float = 0.9) -> npt.NDArray[np.int64]:
    """The steps of a site whose update is as long in clipping norms, the same in all coordinates."""
    return coordinator.steps(np.full(SIZE, length / math.sqrt(SIZE)))


# What is released depends on the noised sum alone.


def check_of_the_noised_sum_alone(coordinator: Coordinator, liars: npt.NDArray[np.int64]) -> None:
    """With the site's steps in the sum, or in the noise instead, the same is released: as of integers modulo 2^b."""
    site, random = update_of(coordinator), np.random.default_rng(2)
    assert np.linalg.norm(site[:SIZE]) <= rounded_l2(coordinator.mechanism.scale, SIZE)
    for liar in liars:
        noise: npt.NDArray[np.float64] = np.rint(random.normal(size=site.size) * coordinator.mechanism.scale)
        with_it = coordinator.released(liar + site, noise + 0.3)
        assert np.array_equal(with_it, coordinator.released(np.full_like(site, liar), noise + site + 0.3))


def places(coordinator: Coordinator) -> npt.NDArray[np.int64]:
    """At the edge of the ring, where a step wraps; and where a mean in float32 is coarse."""
    random = np.random.default_rng(1)
    edge, coarse = coordinator.largest, (coordinator.largest + 1) // 2
    return np.concatenate([[edge, -edge - 1, 0], coarse + random.integers(0, coarse // 2, 20)])


@KINDS
@BITS
def test_what_is_released_depends_on_the_noised_sum_alone(changes: list[str], bits: int) -> None:
    coordinator = Coordinator(*changes, f"aggregation.ring_bits={bits}")
    check_of_the_noised_sum_alone(coordinator, places(coordinator))


@KINDS
@BITS
@pytest.mark.parametrize("place", ["edge", "coarse"])
def test_noise_after_decoding_is_found(
    changes: list[str], bits: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late(monkeypatch)
    coordinator = Coordinator(*changes, f"aggregation.ring_bits={bits}")
    liars = places(coordinator)
    with pytest.raises(AssertionError):
        check_of_the_noised_sum_alone(coordinator, liars[:1] if place == "edge" else liars[3:])


@given(st.integers(-(2**31), 2**31 - 1), st.booleans())
@settings(max_examples=50, deadline=None)
def test_noise_does_not_depend_on_where_the_sum_is(place: int, adaptive: bool) -> None:
    mechanism = Coordinator(*(ADAPTIVE if adaptive else [])).mechanism
    stream, zero = NoiseStream.from_declared_seed(3), np.zeros(mechanism.size, np.uint32)
    total = np.full(mechanism.size, place).astype(np.uint32)
    before = total.copy()
    mechanism.add_noise(zero, stream)
    mechanism.add_noise(total, stream)
    assert np.array_equal(total - before, zero)
    sigma = mechanism.scale * mechanism.deviation
    assert np.std(zero[:SIZE].view(np.int32)) == pytest.approx(sigma, rel=0.3)


def test_a_mean_in_float32_needs_no_room_in_the_noise() -> None:
    """It is exactly that of the rounded vectors."""
    mechanism = Coordinator().mechanism
    assert mechanism.deviation * mechanism.scale == pytest.approx(
        Z * rounded_l2(mechanism.scale, SIZE), rel=1e-15
    )


# What is played.

PLAYS = 60


def refuted(coordinator: Coordinator, score: Callable[[npt.NDArray[np.float64], Any], float]) -> float:
    """The epsilon of one round that a liar refutes with confidence 95 %: the sum of all others is at the edge."""
    site = update_of(coordinator)
    edge = np.full_like(site, coordinator.largest)
    scores = np.array(
        [
            [score(coordinator.released(edge + part)[:SIZE], site[:SIZE]) for _ in range(2 * PLAYS)]
            for part in (np.zeros_like(site), site)
        ]
    )
    learned, played = scores[:, :PLAYS], scores[:, PLAYS:]
    without, with_it = np.median(learned, axis=1)
    said = (played - (without + with_it) / 2) * (1 if with_it > without else -1) > 0
    wrong, right = said.sum(axis=1)
    return distinguish(int(wrong), PLAYS, PLAYS - int(right), PLAYS, coordinator.terms.delta, 0.95)


def scores_of(coordinator: Coordinator) -> Sequence[Callable[[npt.NDArray[np.float64], Any], float]]:
    """What the adversary looks at: the mean of the coordinates, and how far the steps are from the edge, on its ring,
    along the site's update."""

    def along(mean: npt.NDArray[np.float64], site: npt.NDArray[np.int64]) -> float:
        steps = np.rint(mean * coordinator.sites * coordinator.mechanism.scale).astype(np.int64)
        apart = (steps - coordinator.largest).astype(coordinator.dtype).view(coordinator.signed)
        return float(apart @ site.astype(np.float64))

    return [lambda mean, _site: float(mean.mean()), along]


@BITS
@pytest.mark.parametrize("changes", [[], CORRELATED], ids=["plain", "correlated"])
def test_a_liar_at_the_edge_of_the_ring_refutes_nothing(
    changes: list[str], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(*changes, f"aggregation.ring_bits={bits}")
    stated = coordinator.terms.epsilon(1)
    for score in scores_of(coordinator):
        assert refuted(coordinator, score) < stated
    late(monkeypatch)
    assert max(refuted(coordinator, score) for score in scores_of(coordinator)) > stated + 1


# A run with real sites, masks and messages.


class Lied:
    """A run of one round, in which the last site moves the sum of its own and the others' integers to the edge.

    It knows what the others send, as in the definition of the guarantee, but for the first site: the victim.
    """

    def __init__(self, folder: Path, *, records: bool, patch: pytest.MonkeyPatch) -> None:
        plan = tiny(
            *PRIVATE, "privacy.unit=site", "privacy.trusted_coordinator=true", "privacy.noise_multiplier=8.0"
        )
        assert plan.aggregation.secure
        federation = Federation(
            folder, plan.model_copy(update={"run": plan.run.model_copy(update={"rounds": 1})})
        )
        victim, *_, liar = federation.names
        if not records:
            (federation.sites_folder / victim / "data.jsonl").write_text("")
            shutil.rmtree(federation.sites_folder / "sequences", ignore_errors=True)
        honest, known = Site._made, list[npt.NDArray[Any]]()

        def made(site: Site, *what: Any) -> Written:
            written = honest(site, *what)
            vector = np.concatenate([part for _, part in written.pieces])
            if site.name == liar:
                size = federation.layout.size
                vector[:size] = 2**31 - 1 - np.add.reduce([each[:size] for each in known], dtype=np.uint32)
                pieces = [(0, vector)]
                return Written(manifest_of(pieces), pieces)
            if site.name != victim:
                known.append(vector)
            return written

        patch.setattr(Site, "_made", made)
        with RunFolder.create(folder / "run", federation.plan) as out:
            outcome = run(out, federation.channel, lambda _: None, roster=federation.roster)
        assert outcome.rounds == 1
        assert len(known) == len(federation.names) - 2
        kept = Checkpoints(folder / "run" / "checkpoints", federation.layout, 2)
        before, after = (kept.load(number).weights.astype(np.float64) for number in (0, 1))
        self.step = after - before


def seen(folder: Path, patch: pytest.MonkeyPatch) -> float:
    """How much the mean of the step's coordinates depends on the victim's records, in deviations of what noise does:
    wrapped by noise, each coordinate is at one edge of the ring or at the other."""
    means, most = [], 0.0
    for records in (False, True):
        with patch.context() as each:
            step = Lied(folder / str(records), records=records, patch=each).step
        means.append(step.mean())
        most = max(most, float(np.abs(step).max()) / math.sqrt(step.size / 2))
    return float(abs(means[1] - means[0]) / most)


def test_a_run_shows_no_site_to_a_liar_at_the_edge_of_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(tmp_path, monkeypatch) < 6


def test_a_run_with_noise_after_decoding_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    assert seen(tmp_path, monkeypatch) > 12
