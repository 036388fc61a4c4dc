"""The ring code: exact sums in any order, no bias, no wrap, exact counters."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.aggregation.vector.average import BufferedSum, Counter, OfModel, PlainSum, SumLayout
from cloister.aggregation.vector.ring import Ring, RingVector
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import Span
from cloister.tests.tools.raises import raises
from cloister.tests.tools.seeds import seed_of

Bits = Literal[8, 16, 32]
BITS: st.SearchStrategy[Bits] = st.sampled_from([8, 16, 32])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def contribution(
    layout: SumLayout, values: npt.NDArray[np.float32], weight: int, seed: int = 0, **counters: int
) -> RingVector:
    """A site's whole vector, in one span."""
    coded, clipped = layout.encode(values, weight, seed_of(seed))
    return np.concatenate([coded, layout.tail({"weight": weight, "clipped": clipped, **counters})])


@given(
    bits=BITS,
    terms=st.integers(1, 64),
    seed=st.integers(0, 2**32),
    bound=st.sampled_from([1e-3, 0.7, 1.0, 30.0]),
)
@settings(deadline=None)
def test_sum_decodes_to_the_sum_within_one_step_for_each_term(
    bits: Bits, terms: int, seed: int, bound: float
) -> None:
    ring = Ring(bits, bound, terms)
    random = rng(seed)
    values = random.uniform(-bound, bound, (terms, 50)).astype(np.float32)
    values[0, :2] = bound, -bound
    total = np.zeros(50, dtype=ring.dtype)
    for row in values:
        coded, clipped = ring.encode(row, random.bytes(32))
        assert clipped == int(np.count_nonzero(np.abs(row.astype(np.float64)) > bound))
        total += coded
    exact = np.clip(values.astype(np.float64), -bound, bound).sum(axis=0)
    assert np.abs(ring.decode(total) - exact).max() <= terms / ring.scale * (1 + 1e-9)


@given(bits=BITS, terms=st.integers(1, 1000))
@settings(deadline=None)
def test_the_largest_sum_does_not_wrap(bits: Bits, terms: int) -> None:
    terms = min(terms, 2 ** (bits - 1) - 1)
    ring = Ring(bits, 1.0, terms)
    for sign in (1, -1):
        coded, _ = ring.encode(np.full(3, sign * 5, dtype=np.float32), seed_of(0))
        total = np.zeros(3, dtype=ring.dtype)
        for _ in range(terms):
            total += coded
        np.testing.assert_allclose(ring.decode(total), sign * terms, rtol=1e-12)


def test_a_ring_without_room_for_one_step_is_refused() -> None:
    with raises(ValueError, "a ring of 16 bits"):
        Ring(16, 1.0, 2**15)


def test_sum_does_not_depend_on_order() -> None:
    ring = Ring(32, 1.0, 9)
    random = rng(3)
    coded = [
        ring.encode(random.normal(size=1000).astype(np.float32) * 0.1, seed_of(seed))[0] for seed in range(9)
    ]
    forward = sum(coded[1:], coded[0].copy())
    backward = sum(coded[-2::-1], coded[-1].copy())
    assert np.array_equal(forward, backward)
    # The floats behind them do depend on it, which is why they are not what is summed.
    floats = [ring.decode(one).astype(np.float32) for one in coded]
    assert not np.array_equal(sum(floats[1:], floats[0]), sum(floats[-2::-1], floats[-1]))


def test_rounding_is_unbiased() -> None:
    ring = Ring(16, 1.0, 1)
    value = np.float32(0.3 / ring.scale)  # between two steps
    coded, _ = ring.encode(np.full(200_000, value), seed_of(1))
    mean = ring.decode(coded).mean() * ring.scale
    # A Bernoulli(0.3) mean over 200 000 draws has a standard deviation of 0.00102.
    assert abs(mean - 0.3) < 5 * 0.00103


def test_the_same_seed_gives_the_same_code() -> None:
    ring = Ring(32, 1.0, 4)
    values = rng(2).normal(size=200_000).astype(np.float32)
    assert np.array_equal(ring.encode(values, seed_of(7))[0], ring.encode(values, seed_of(7))[0])
    assert not np.array_equal(ring.encode(values, seed_of(7))[0], ring.encode(values, seed_of(8))[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_and_named(bad: float) -> None:
    values = np.zeros(100_000, dtype=np.float32)
    values[70_001] = bad
    with raises(UpdateError, "update[70001]", says="finite"):
        Ring(32, 1.0, 2).encode(values, seed_of(0))


@given(
    bits=BITS,
    rows=st.lists(st.tuples(st.integers(0, 2**56 - 1), st.integers(0, 2**40)), min_size=1, max_size=100),
)
def test_counters_add_up_exactly(bits: Bits, rows: list[tuple[int, int]]) -> None:
    ring = Ring(bits, 1.0, len(rows))
    total = np.zeros(2 * ring.limbs, dtype=ring.dtype)
    for row in rows:
        total += ring.encode_counters(row)
    assert ring.decode_counters(total) == [sum(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("terms", [2, 3, 8, 9, 63, 64, 65, 126, 127])
def test_the_largest_counters_add_up_in_the_smallest_ring(terms: int) -> None:
    """With more than 64 terms a limb of 8 bits has one bit, and 127 of them fill all but one step of it."""
    ring, largest = Ring(8, 1.0, terms), 2**64 - 1
    total = np.zeros(ring.limbs, ring.dtype)
    for _ in range(terms):
        total += ring.encode_counters([largest])
    assert ring.decode_counters(total) == [terms * largest]


@pytest.mark.parametrize("bad", [-1, 2**64])
def test_counters_out_of_range_are_refused(bad: int) -> None:
    with raises(ValueError, "a counter"):
        Ring(32, 1.0, 2).encode_counters([bad])


@given(
    bits=BITS,
    weights=st.lists(st.integers(1, 4096), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_weighted_mean_agrees_with_float64(bits: Bits, weights: list[int], seed: int) -> None:
    random = rng(seed)
    ring = Ring(bits, 0.5, len(weights))
    layout = SumLayout(
        ring, 40, (Counter("weight", 4096, 1), Counter("clipped", 40), Counter("seen", 3)), heaviest=4096
    )
    values = random.uniform(-0.5, 0.5, (len(weights), 40)).astype(np.float32)
    total = PlainSum(layout)
    for row, weight in zip(values, weights, strict=True):
        total.add([(0, contribution(layout, row, weight, seed, seen=3))])
    opened = total.open()
    expected = np.average(values.astype(np.float64), axis=0, weights=weights)
    step = len(weights) / ring.scale * 4096 / sum(weights)
    assert np.abs(opened.mean - expected).max() <= step * 1.001 + 1e-7
    assert opened.counters == {"weight": sum(weights), "clipped": 0, "seen": 3 * len(weights)}


def test_contributions_that_do_not_fit_are_refused_and_change_nothing() -> None:
    layout = SumLayout(Ring(32, 1.0, 2), 3, (Counter("weight", 10, 1),), heaviest=10)
    total = PlainSum(layout)
    good = contribution(layout, np.ones(3, np.float32), 10)
    total.add([(0, good)])
    with raises(UpdateError, "span at 0"):
        total.add([(0, good.astype(np.uint16))])
    for pieces in ([(0, good[:-1])], [(1, good)], [(0, good), (0, good)], [(2, good[2:]), (0, good[:2])]):
        with raises(UpdateError, "end of the last span", "start of a span"):
            total.add(pieces)
    with raises(UpdateError, "weight"):
        contribution(layout, np.ones(3, np.float32), 11)
    with raises(UpdateError, "update", says="vector of 3"):
        contribution(layout, np.ones(4, np.float32), 1)
    total.add([(0, good)])
    with raises(UpdateError, "number of updates", says="at most 2"):
        total.add([(0, good)])
    np.testing.assert_allclose(total.open().mean, 1.0, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("name", ["weight", "loss"])
def test_a_counter_with_limbs_that_would_wrap_is_refused_in_clear(bits: Bits, name: str) -> None:
    """Its value is one that a site may state, and in a sum with others it would be another."""
    layout = SumLayout(Ring(bits, 1.0, 8), 3, (Counter("weight", 2**50, 1), Counter("loss", 2**50)), 2**50)
    good = layout.tail({"weight": 3 << 40, "loss": 3 << 40})
    width = layout.ring._limb_bits
    first = layout.names.index(name) * layout.ring.limbs
    total = PlainSum(layout)
    for limb in range(first, first + (40 // width)):
        bad = good.copy()
        bad[limb] = 1 << width  # the same value with 1 less in the next limb
        value = layout.ring.decode_counters(bad)[layout.names.index(name)]
        assert 1 <= value <= 2**50
        with raises(UpdateError, "code of the counters"):
            total.add([(0, np.concatenate([np.zeros(3, layout.ring.dtype), bad]))])
    assert total.terms == 0
    total.add([(0, np.concatenate([np.zeros(3, layout.ring.dtype), good]))])


@pytest.mark.parametrize("kind", [PlainSum, BufferedSum])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("weight", [1, 3, 10])
def test_a_value_beyond_a_sites_weight_is_refused_in_clear(
    kind: type[PlainSum | BufferedSum], bits: Bits, weight: int
) -> None:
    """Wherever it is in the pieces; the counters after it may have any bits."""
    layout = SumLayout(Ring(bits, 1.0, 4), 6, (Counter("weight", 10, 1), Counter("clipped", 2**63)), 10)
    most = min(layout.ring.levels, -(-layout.ring.levels * weight // 10) + 1)
    total = PlainSum(layout) if kind is PlainSum else BufferedSum(2)
    of = OfModel(1, layout, (Span(0, 6),))
    add = total.add if isinstance(total, PlainSum) else lambda pieces: total.add(pieces, of)
    tail = layout.tail({"weight": weight, "clipped": 2**63 - 1})

    def vector(step: int, at: int) -> RingVector:
        values = np.zeros(6, layout.ring.signed_dtype)
        values[at] = step
        whole: RingVector = np.concatenate([values.view(layout.ring.dtype), tail])
        return whole

    for step in (most + 1, -most - 1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1):
        for at in (0, 3, 5):
            bad = vector(step, at)
            for pieces in ([(0, bad)], [(0, bad[:4]), (4, bad[4:])], [(0, bad[:6]), (6, bad[6:])]):
                with raises(UpdateError, "steps of a value of the update", says=f"at most {most} "):
                    add(pieces)
    for step in (most, -most):
        add([(0, vector(step, 5))])
    assert total.terms == 2


@given(masks=st.lists(st.lists(st.booleans(), min_size=9, max_size=9).filter(any), min_size=1, max_size=4))
@settings(deadline=None)
def test_a_coordinate_of_a_buffer_is_the_mean_of_the_updates_that_have_it(masks: list[list[bool]]) -> None:
    """Two updates of each model, of which each trains some coordinates."""
    number, random, buffer = len(masks), rng(len(masks)), BufferedSum(len(masks))
    total, weights = np.zeros(9), np.zeros(9)
    for model, mask in enumerate(masks, start=1):
        have = np.array(mask)
        edges = np.flatnonzero(np.diff([0, *have, 0])).reshape(-1, 2)
        layout = SumLayout(Ring(32, 1.0, 2), int(have.sum()), (Counter("weight", 10, 1),), heaviest=10)
        of = OfModel(model, layout, tuple(Span(int(first), int(end)) for first, end in edges))
        for weight in (3, 10):
            values = random.uniform(-1, 1, layout.size).astype(np.float32)
            buffer.add([(0, contribution(layout, values, weight))], of)
            counts = weight / np.sqrt(1 + number - model)
            total[have] += counts * values
            weights[have] += counts
    assert buffer.terms == 2 * number
    opened = buffer.open()
    assert opened.rounds == tuple(range(1, number + 1))
    assert opened.counters == {"weight": 13 * number}
    np.testing.assert_allclose(opened.mean, (total / np.maximum(weights, 1e-9))[weights > 0], atol=1e-6)


def test_a_refused_update_leaves_a_buffer_as_it_was() -> None:
    layout = SumLayout(Ring(32, 1.0, 2), 3, (Counter("weight", 10, 1),), heaviest=10)
    buffer, of = BufferedSum(2), OfModel(2, layout, (Span(0, 3),))
    with raises(UpdateError, "number of updates", says="at least one"):
        buffer.open()
    good = contribution(layout, np.ones(3, np.float32), 10)
    with raises(UpdateError, "start of a span"):
        buffer.add([(1, good)], of._replace(round=1))
    buffer.add([(0, good)], of)
    opened = buffer.open()
    assert opened.rounds == (2,)
    np.testing.assert_allclose(opened.mean, 1.0, rtol=1e-6)


@given(
    bits=BITS,
    weight=st.integers(1, 97),
    terms=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_no_honest_vector_is_refused_in_clear(bits: Bits, weight: int, terms: int, seed: int) -> None:
    layout = SumLayout(Ring(bits, 0.3, terms), 400, (Counter("weight", 97, 1), Counter("clipped", 400)), 97)
    values = rng(seed).choice(np.array([-9, -0.3, -0.29999998, 0, 0.3, 9], np.float32), 400)
    total = PlainSum(layout)
    total.add([(0, contribution(layout, values, weight, seed))])


def test_an_empty_sum_is_refused() -> None:
    with raises(UpdateError, "number of updates", says="at least one"):
        PlainSum(SumLayout(Ring(32, 1.0, 2), 3, (Counter("weight", 1, 1),))).open()


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("cut", [1, 2, 99, 32_768, 50_001])
def test_an_element_is_rounded_by_the_draw_of_its_offset(bits: Bits, cut: int) -> None:
    """Sixteen bits of AES-256 in counter mode make one number, so a span is entered at its offset."""
    ring = Ring(bits, 1.0, 4)
    values = rng(4).uniform(-2, 2, 70_000).astype(np.float32)
    whole, clipped = ring.encode(values, seed_of(7), factor=0.7)
    left, right = (
        ring.encode(values[:cut], seed_of(7), factor=0.7),
        ring.encode(values[cut:], seed_of(7), cut, factor=0.7),
    )
    np.testing.assert_array_equal(np.concatenate([left[0], right[0]]), whole)
    assert left[1] + right[1] == clipped > 0
    cipher = Cipher(algorithms.AES(seed_of(7)), modes.CTR(bytes(16))).encryptor()
    uniform = (np.frombuffer(cipher.update(bytes(140_000)), "<u2") + 0.5) / 2**16
    within = np.abs(values) < 1
    by_hand = np.floor(values.astype(np.float64) * (ring.scale * 0.7) + uniform)
    signed = whole.view(ring.signed_dtype)
    np.testing.assert_array_equal(signed[within], by_hand[within])
    assert not np.array_equal(ring.encode(values[cut:], seed_of(7), 0, factor=0.7)[0], whole[cut:])
