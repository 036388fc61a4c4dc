"""The sum of units with noise: what one unit moves, the noise that is added, and the room in the ring."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from cloister.privacy.accounting.accountant import spent
from cloister.privacy.mechanism.events import from_json, to_json
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.unit_sum import Shape, UnitSum, unit_sum
from cloister.protocol.errors import AccountingError
from cloister.protocol.questions.vectors import Sparse
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

ONE = Shape(3, 3, 1.0)


def mechanism(z: float = 4.0, bound: float = 1.0, cells: int = 3, *, honest: int = 6) -> UnitSum:
    return unit_sum(z, Shape(cells, cells, bound), 8, 1000, honest, 32, "record")


@given(
    arrays.arrays(np.float64, (4, 5), elements=st.floats(allow_nan=True, allow_infinity=True, width=64)),
    st.sampled_from([1.0, math.sqrt(2), math.sqrt(3)]),
    st.integers(0, 2**32),
)
def test_no_unit_moves_the_sum_further_than_is_charged(
    vectors: np.typing.NDArray[np.float64], bound: float, seed: int
) -> None:
    """In exact arithmetic, whatever its vector is."""
    asked = mechanism(bound=bound, cells=5)
    largest = Fraction(asked.event.l2) ** 2
    for row in asked.steps(vectors, np.random.default_rng(seed).random(vectors.shape)):
        assert sum(Fraction(int(step)) ** 2 for step in row) <= largest
        assert sum(abs(int(step)) for step in row) <= asked.event.l1


def test_a_vector_of_whole_steps_is_told_exactly() -> None:
    asked, draws = mechanism(), np.full((3, 3), 1 - 2**-53)
    assert (asked.steps(np.eye(3), draws) == int(asked.scale) * np.eye(3, dtype=np.int64)).all()
    assert (
        asked.steps(np.array([[0.5, 0.25, -0.5]]), draws[:1]) == asked.scale * np.array([0.5, 0.25, -0.5])
    ).all()
    assert not asked.steps(np.array([[np.nan, 1.0, 0.0], [np.inf, 0.0, 0.0]]), draws[:2]).any()


def test_rounding_has_no_bias() -> None:
    """Not even where all units are the same, and their number is large beside the noise."""
    asked = unit_sum(4.0, Shape(3, 3, math.sqrt(3)), 8, 100_000, 6, 32, "record")
    vector = np.array([1.0, 1 / 3, -1 / 7])
    units = [np.tile(vector, (10_000, 1))] * 20
    noisy = np.empty(3, np.uint32)
    asked.encode(units, NoiseStream.from_declared_seed(3), noisy)
    silent = np.empty(3, np.uint32)
    asked.encode([], NoiseStream.from_declared_seed(3), silent)
    error = (noisy - silent).view(np.int32) / asked.scale - 200_000 * vector
    assert np.abs(error).max() < 5 * math.sqrt(200_000 / 4) / asked.scale


HALF = Mutant("privacy.mechanism.unit_sum:UnitSum.encode", "self.variance)", "self.variance / 4)")


@pytest.mark.parametrize("mutant", [None, HALF], ids=["as it is", "half the noise"])
def test_the_noise_of_the_honest_sites_is_what_is_charged(
    monkeypatch: pytest.MonkeyPatch, mutant: Mutant | None
) -> None:
    """With half of its deviation the same test fails."""
    if mutant is not None:
        mutant.plant(monkeypatch)
    asked = mechanism(cells=20_000)
    total = np.zeros(asked.shape.cells, np.uint32)
    for site in range(6):
        out = np.empty(asked.shape.cells, np.uint32)
        asked.encode([], NoiseStream.from_declared_seed(site), out)
        total += out
    noise = total.view(np.int32).astype(np.float64)
    chance = stats.chi2.cdf(float(noise @ noise) / asked.event.variance, noise.size)
    assert bool(chance < 1e-9) is (mutant is not None)
    assert abs(noise.mean()) < 6 * noise.std() / math.sqrt(noise.size)
    assert asked.deviation(6) == pytest.approx(math.sqrt(asked.event.variance) / asked.scale)


def test_units_are_added_in_parts_of_any_size() -> None:
    asked, vectors = mechanism(), np.eye(3)[np.arange(50) % 3]
    whole, parts = np.empty(3, np.uint32), np.empty(3, np.uint32)
    asked.encode([vectors], NoiseStream.from_declared_seed(1), whole)
    asked.encode([vectors[:7], vectors[7:7], vectors[7:]], NoiseStream.from_declared_seed(1), parts)
    assert (whole == parts).all()


def test_a_vector_by_its_cells_is_that_vector() -> None:
    asked = unit_sum(4.0, Shape(100, 3, 1.0), 8, 1000, 6, 32, "record")
    whole, sparse, nothing = (np.empty(100, np.uint32) for _ in range(3))
    vector = np.zeros((1, 100))
    vector[0, [4, 17, 80]] = 0.5, 0.25, 0.5
    asked.encode([vector], NoiseStream.from_declared_seed(1), whole)
    asked.encode(
        [Sparse(np.array([4, 17, 80]), vector[0, [4, 17, 80]])], NoiseStream.from_declared_seed(1), sparse
    )
    assert (whole == sparse).all()
    asked.encode([], NoiseStream.from_declared_seed(1), nothing)
    for at in (
        [4, 4, 17],
        [17, 4],
        [1, 2, 3, 4],
    ):  # a cell twice would be longer than it looks; more than 3 cells
        asked.encode([Sparse(np.array(at), np.full(len(at), 0.5))], NoiseStream.from_declared_seed(1), sparse)
        assert (sparse == nothing).all()
    asked.encode([Sparse(np.array([4]), np.array([1e9]))], NoiseStream.from_declared_seed(1), sparse)
    assert int((sparse - nothing).view(np.int32)[4]) == int(asked.scale)


def test_a_unit_at_several_sites_is_charged_for_all_of_them() -> None:
    """Three vectors in one sum move it three times as far; the noise is as many times as large."""
    one, three = (
        unit_sum(4.0, ONE, 8, 10, 6, 32, "owner"),
        unit_sum(4.0, Shape(3, 3, 1.0, 3), 8, 10, 6, 32, "owner"),
    )
    step = three.steps(np.array([[1.0, 0.0, 0.0]]), np.zeros((1, 3)))[0]
    assert three.event.l2 >= 3 * float(np.linalg.norm(step))
    assert three.event.l1 >= 3 * np.abs(step).sum()
    assert three.deviation(6) == pytest.approx(3 * one.deviation(6))
    assert spent([three.event], 1e-6).epsilon == pytest.approx(spent([one.event], 1e-6).epsilon, rel=1e-3)


def test_the_ring_has_room_for_the_units_and_the_noise() -> None:
    asked = unit_sum(4.0, ONE, 8, 100_000, 6, 32, "record")
    furthest = 8 * 100_000 * asked.scale + 12 * math.sqrt(8 * asked.variance)
    assert 2**30 < furthest < 2**31
    with raises(AccountingError, "question.most_units"):
        unit_sum(1.0, ONE, 1000, 10**5, 700, 32, "record")
    for cells, touched in ((2**17, 2**17), (2**26, 10)):
        with raises(AccountingError, "question.kind"):
            unit_sum(1.0, Shape(cells, touched, 1.0), 8, 1000, 6, 32, "record")


def test_the_unit_of_an_event_decides_what_else_it_is_composed_with() -> None:
    """A record in a question costs as much beside steps on records as alone; a site counts twice for a record."""
    asked = mechanism()
    steps = from_json(
        '[{"mechanism":"sampled-gaussian","noise_multiplier":1.0,"sampling_rate":0.01,"steps":100,"unit":"record"}]'
    )
    text = to_json([asked.event])
    assert '"unit":"record"' in text
    assert from_json(text) == (asked.event,)
    of_site = unit_sum(4.0, ONE, 8, 1000, 6, 32, "site").event
    assert "unit" not in to_json([of_site])  # as ledgers have it that know no other
    together = spent([*steps, asked.event], 1e-6).epsilon
    assert together < spent([*steps, of_site], 1e-6).epsilon
    one, two = spent(steps, 5e-7).epsilon, spent([asked.event], 5e-7).epsilon
    assert max(spent(steps, 1e-6).epsilon, spent([asked.event], 1e-6).epsilon) < together <= one + two
    assert spent([asked.event], 1e-6, group=2).epsilon > 1.9 * spent([asked.event], 1e-6).epsilon
