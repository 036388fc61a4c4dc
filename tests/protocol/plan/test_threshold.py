"""k and t: Google's published parameters, exact tails, and the plan's own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.protocol.errors import ParameterError
from cloister.protocol.plan import threshold
from cloister.protocol.plan.soundness import parse
from cloister.protocol.plan.threshold import Tolerance, assumed, parameters, tolerated
from cloister.tests.tools.raises import raises

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


@pytest.fixture
def googles_tail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tail of colluding neighbours that Google takes, 2^-41 / n, in place of 2^-80 / n."""
    monkeypatch.setattr(threshold, "OUTVOTED", -41 * math.log(2))
    parameters.cache_clear()
    yield
    parameters.cache_clear()


@pytest.mark.usefixtures("googles_tail")
@pytest.mark.parametrize(("n", "colluders", "dropouts", "k", "t"), PUBLISHED)
def test_published_parameters(n: int, colluders: float, dropouts: float, k: int, t: int) -> None:
    d, a = tolerated(n, dropouts), tolerated(n, colluders)
    found = parameters(n, d, a)
    above = d + a + 2 - (d + a) % 2
    if k > d + a or above > 2 * k:
        assert (found.k, found.threshold) == (k, t)
    else:  # Google stops at a graph that dropouts in the right places can disconnect
        assert found.k == above
        assert found.threshold > t


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
    t1 = next(x for x in range(k + 1) if tail(n, colluders, k, x + 1) < Fraction(1, 2**80 * n))
    lost = next(x for x in range(k + 1) if tail(n, dropouts, k, x + 1) < Fraction(1, 2**20 * n))
    t = max(math.ceil((t1 + k - 1.25) / 2) + 1, 2)
    return t if t <= k - lost else None


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(65, 220), st.floats(0, 0.3), st.floats(0, 0.3))
def test_parameters_are_exactly_the_least_that_suit(n: int, dropouts: float, colluders: float) -> None:
    d, a = int(n * dropouts), int(n * colluders)
    try:
        found = parameters(n, d, a)
    except ParameterError:
        assert (n + a) // 2 + 1 > n - d
        return
    suitable = {k: t for k in range(2, n - 1, 2) if (t := suits(n, d, a, k)) is not None}
    if not suitable:
        assert found.complete
        assert found.threshold == (n + a) // 2 + 1
        return
    least = min(suitable)
    connected = min((k for k in suitable if k > d + a and k <= 2 * least), default=None)
    assert found.k == (connected or least)
    assert found.threshold == suitable[found.k]


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 400), st.floats(0, 0.9), st.data())
def test_the_colluders_of_a_draw_are_exactly_the_least_that_are_improbable(
    sites: int, fraction: float, data: st.DataObject
) -> None:
    n, marked = data.draw(st.integers(2, sites)), assumed(sites, fraction)
    try:
        found = Tolerance(0.0, fraction).parameters(sites, n).colluders
    except ParameterError:
        return
    assert found == next(x for x in range(n + 1) if tail(sites, marked, n, x + 1) < Fraction(1, 2**80))


@pytest.mark.parametrize(
    ("sites", "n", "dropouts", "colluders", "expected"),  # A, k, t
    [
        (8, 8, 0.1, 0.1, (1, 7, 5)),
        (120, 120, 0.1, 0.1, (12, 38, 26)),
        (40, 20, 0.1, 0.1, (4, 19, 13)),
        (100, 20, 0.1, 0.1, (10, 19, 16)),
        (1000, 200, 0.1, 0.02, (20, 56, 39)),
        (1000, 200, 0.1, 0.1, (64, 106, 86)),
    ],
)
def test_a_draw_may_have_more_than_its_part_of_the_colluders(
    sites: int, n: int, dropouts: float, colluders: float, expected: tuple[int, int, int]
) -> None:
    found = Tolerance(dropouts, colluders).parameters(sites, n)
    assert (found.colluders, found.k, found.threshold) == expected


def test_a_tail_that_no_float_holds_is_not_taken_for_zero() -> None:
    """All 3000 marked of 10,000 are in a draw of 8000 with a probability below 1e-350."""
    found = Tolerance(0.0, 0.3).parameters(10_000, 8000).colluders
    assert 2400 < found < 2600


def test_a_cohort_that_cannot_tolerate_the_colluders_is_refused_with_sizes_that_can() -> None:
    with raises(ParameterError, "aggregation.colluders", says="4 of the 11 sites"):
        Tolerance(0.1, 0.1).parameters(11, 3)
    with raises(ParameterError, "aggregation.dropouts and aggregation.colluders", says="13 of the 100 sites"):
        Tolerance(0.1, 0.1).parameters(100, 5)
    with raises(ParameterError, "aggregation.dropouts and aggregation.colluders") as caught:
        Tolerance(0.5, 0.1).parameters(100, 100)
    assert "draw a cohort" not in str(caught.value)
    with raises(ParameterError, "sites in the cohort", says=("9", "2 to 8")):
        Tolerance(0.1, 0.1).parameters(8, 9)


@given(st.integers(2, 3000), st.floats(0, 0.4), st.floats(0, 0.4))
@settings(max_examples=60, deadline=None)
def test_no_sum_of_a_single_update_can_be_opened(n: int, dropouts: float, colluders: float) -> None:
    try:
        found = parameters(n, tolerated(n, dropouts), assumed(n, colluders))
    except ParameterError:
        return
    assert 2 <= found.smallest_part <= found.quorum - found.colluders
    if found.complete or found.k > found.dropouts + found.colluders:
        assert found.smallest_part == found.quorum - found.colluders


@given(st.integers(2, 64), st.data())
def test_the_complete_graph_leaves_no_two_groups(n: int, data: st.DataObject) -> None:
    colluders = data.draw(st.integers(0, n))
    dropouts = data.draw(st.integers(0, n))
    majority = (n + colluders) // 2 + 1
    if majority > n - dropouts or majority - colluders < 2:
        with raises(
            ParameterError, "aggregation.dropouts and aggregation.colluders", "aggregation.colluders"
        ):
            parameters(n, dropouts, colluders)
        return
    found = parameters(n, dropouts, colluders)
    assert found.complete
    assert found.threshold == found.agreement == found.quorum
    assert 2 * (found.threshold - colluders) > n - colluders  # honest sites cannot serve two lists
    assert found.threshold <= n - dropouts
    assert found.smallest_part >= 2


@pytest.mark.parametrize("n", [0, 1, 10_001])
def test_sizes_out_of_range_are_refused(n: int) -> None:
    with raises(ParameterError, "sites in the cohort", says="2 to 10000"):
        parameters(n, 0, 0)


def test_fractions_are_of_whole_sites() -> None:
    assert [tolerated(n, 0.1) for n in (9, 10, 20, 30, 70)] == [0, 1, 2, 3, 7]
    assert tolerated(100, 0.29) == 29
    # A colluder too few would let two lists of survivors be signed; a dropout too few only ends an attempt.
    assert [assumed(n, 0.1) for n in (3, 8, 10, 11, 20)] == [1, 1, 1, 2, 2]
    assert assumed(100, 0.29) == 29
    assert assumed(8, 0.0) == 0


def test_ten_thousand_sites_are_fast_and_cost_grows_slowly() -> None:
    parameters.cache_clear()
    start = time.perf_counter()
    found = [parameters(n, n // 10, n // 10) for n in (100, 1000, 10_000)]
    assert time.perf_counter() - start < 1
    assert [p.k for p in found] == [32, 202, 156]
    assert [p.smallest_part for p in found] == [80, 800, 45]


@pytest.mark.parametrize(("n", "dropouts", "colluders"), [(8, 0, 1), (20, 2, 2), (100, 10, 10)])
def test_a_tolerance_rounds_dropouts_down_and_colluders_up(n: int, dropouts: int, colluders: int) -> None:
    assert Tolerance(0.1, 0.1).parameters(n, n) == parameters(n, dropouts, colluders)


def test_a_plan_asks_for_its_own_tolerances_and_cohort() -> None:
    plan = parse(
        "",
        ["cohort.sites=40", "cohort.fraction=0.5", "aggregation.dropouts=0.2", "aggregation.colluders=0.11"],
    )
    assert plan.threshold() == parameters(20, 4, 5)  # all five of the forty may be drawn


@pytest.mark.parametrize(
    ("settings", "quorum"),
    [
        (["cohort.sites=8", "cohort.quorum=0.75"], 6),
        (["cohort.sites=50", "cohort.quorum=0.56", "aggregation.secure=false"], 28),  # 0.56 * 50 is above 28
        (["cohort.sites=8", "cohort.quorum=0.2"], 5),  # t
        (["cohort.sites=120", "cohort.quorum=0.5"], 108),  # n - D
        (["cohort.sites=8", "cohort.quorum=0.2", "aggregation.secure=false"], 2),
    ],
)
def test_the_quorum_that_counts_is_that_of_the_plan_or_of_the_secure_sum(
    settings: list[str], quorum: int
) -> None:
    assert parse("", settings).quorum() == quorum


def test_a_plan_in_clear_may_have_no_threshold() -> None:
    plan = parse("", ["cohort.sites=1", "aggregation.secure=false"])
    with raises(ParameterError, "sites in the cohort", says=("is 1:", "2 to 1")):
        plan.threshold()
