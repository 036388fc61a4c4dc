"""k and t: Google's published parameters, exact tails, and the plan's own."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.protocol.errors import ParameterError
from cloister.protocol.soundness import parse
from cloister.protocol.threshold import Tolerance, assumed, parameters, tolerated

# Google, fcp/secagg/server/graph_parameter_finder_test.cc, semi-malicious: n, colluders, dropouts, k, t.
PUBLISHED = [
    (100, 0.3, 0.3, 92, 62),
    (1000, 0.3, 0.3, 872, 584),
    (10000, 0.3, 0.3, 4822, 3230),
    (100, 0.05, 0.33, 72, 39),
    (1000, 0.05, 0.33, 398, 223),
    (10000, 0.05, 0.33, 746, 420),
    (100, 0.33, 0.05, 42, 37),
    (1000, 0.33, 0.05, 132, 109),
    (10000, 0.33, 0.05, 178, 146),
    (100, 0.05, 0.05, 16, 11),
    (1000, 0.05, 0.05, 52, 37),
    (10000, 0.05, 0.05, 62, 44),
    (100, 0.33, 0.0, 26, 26),
    (1000, 0.33, 0.0, 38, 37),
    (10000, 0.33, 0.0, 42, 41),
    (100, 0.0, 0.33, 68, 35),
    (1000, 0.0, 0.33, 228, 115),
    (10000, 0.0, 0.33, 326, 164),
    (100, 0.0, 0.0, 2, 2),
    (10000, 0.0, 0.0, 2, 2),
]


@pytest.mark.parametrize(("n", "colluders", "dropouts", "k", "t"), PUBLISHED)
def test_published_parameters(n: int, colluders: float, dropouts: float, k: int, t: int) -> None:
    found = parameters(n, tolerated(n, dropouts), tolerated(n, colluders))
    assert (found.k, found.threshold) == (k, t)


def tail(n: int, marked: int, k: int, least: int) -> Fraction:
    """Exactly: the probability that k of n sites hold at least `least` of the marked."""
    ways = sum(math.comb(marked, x) * math.comb(n - marked, k - x) for x in range(least, min(k, marked) + 1))
    return Fraction(ways, math.comb(n, k))


def suits(n: int, dropouts: int, colluders: int, k: int) -> int | None:
    """The threshold for k neighbours, from the definitions in exact arithmetic; None if there is none."""
    removed = dropouts + colluders
    apart = Fraction(n * (n - k - 1) * math.comb(removed, k), 2 * math.comb(n, k))
    if apart >= Fraction(1, 2**41):
        return None
    t1 = next(x for x in range(k + 1) if tail(n, colluders, k, x + 1) < Fraction(1, 2**41 * n))
    lost = next(x for x in range(k + 1) if tail(n, dropouts, k, x + 1) < Fraction(1, 2**20 * n))
    t = max(math.ceil((t1 + k - 1.25) / 2) + 1, 2)
    return t if t <= k - lost else None


@settings(max_examples=40, deadline=None)
@given(st.integers(65, 220), st.floats(0, 0.3), st.floats(0, 0.3))
def test_parameters_are_exactly_the_least_that_suit(n: int, dropouts: float, colluders: float) -> None:
    d, a = int(n * dropouts), int(n * colluders)
    try:
        found = parameters(n, d, a)
    except ParameterError:
        assert (n + a) // 2 + 1 > n - d
        return
    if found.complete:
        assert all(suits(n, d, a, k) is None for k in range(2, n - 1, 2))
        assert found.threshold == (n + a) // 2 + 1
    else:
        assert suits(n, d, a, found.k) == found.threshold
        assert all(suits(n, d, a, k) is None for k in range(2, found.k, 2))


@given(st.integers(2, 64), st.data())
def test_the_complete_graph_leaves_no_two_groups(n: int, data: st.DataObject) -> None:
    colluders = data.draw(st.integers(0, n))
    dropouts = data.draw(st.integers(0, n))
    if (n + colluders) // 2 + 1 > n - dropouts:
        with pytest.raises(ParameterError, match=r"lower aggregation\.dropouts"):
            parameters(n, dropouts, colluders)
        return
    found = parameters(n, dropouts, colluders)
    assert found.complete
    assert found.threshold == found.agreement == found.quorum
    assert 2 * (found.threshold - colluders) > n - colluders  # honest sites cannot serve two lists
    assert found.threshold <= n - dropouts
    assert found.smallest_part >= 1


@pytest.mark.parametrize("n", [0, 1, 10_001])
def test_sizes_out_of_range_are_refused(n: int) -> None:
    with pytest.raises(ParameterError, match="2 to 10000"):
        parameters(n, 0, 0)


def test_fractions_are_of_whole_sites() -> None:
    assert [tolerated(n, 0.1) for n in (9, 10, 20, 30, 70)] == [0, 1, 2, 3, 7]
    assert tolerated(100, 0.29) == 29
    # A colluder too few would let two lists of survivors be signed; a dropout too few only ends an attempt.
    assert [assumed(n, 0.1) for n in (3, 8, 10, 11, 20)] == [1, 1, 1, 2, 2]
    assert assumed(100, 0.29) == 29
    assert assumed(8, 0.0) == 0
    for fraction in (-0.1, 1.0, math.nan):
        with pytest.raises(ParameterError):
            tolerated(10, fraction)


def test_ten_thousand_sites_are_fast_and_cost_grows_slowly() -> None:
    parameters.cache_clear()
    start = time.perf_counter()
    found = [parameters(n, n // 10, n // 10) for n in (100, 1000, 10_000)]
    assert time.perf_counter() - start < 1
    assert [p.k for p in found] == [32, 96, 122]
    assert [p.smallest_part for p in found] == [80, 31, 39]


@pytest.mark.parametrize(("n", "dropouts", "colluders"), [(8, 0, 1), (20, 2, 2), (100, 10, 10)])
def test_a_tolerance_rounds_dropouts_down_and_colluders_up(n: int, dropouts: int, colluders: int) -> None:
    assert Tolerance(0.1, 0.1).parameters(n) == parameters(n, dropouts, colluders)


def test_a_plan_asks_for_its_own_tolerances_and_cohort() -> None:
    plan = parse(
        "",
        ["cohort.sites=40", "cohort.fraction=0.5", "aggregation.dropouts=0.2", "aggregation.colluders=0.11"],
    )
    assert plan.threshold() == plan.threshold(20) == parameters(20, 4, 3)
    assert plan.threshold(40) == parameters(40, 8, 5)


def test_a_plan_in_clear_may_have_no_threshold() -> None:
    plan = parse("", ["cohort.sites=1", "aggregation.secure=false"])
    with pytest.raises(ParameterError, match="sites in the cohort is 1: expected 2 to 10000"):
        plan.threshold()
