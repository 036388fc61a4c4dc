"""Compressed updates: rotation and code, scales, error feedback, and the way through a whole simulated run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.linalg import hadamard

from cloister.aggregation.features.compression import (
    LEAST_SHARE,
    SMALLEST,
    START,
    Scales,
    bounds_in,
    residuals,
)
from cloister.aggregation.features.feature import Given, Summed
from cloister.aggregation.features.registry import Coordinated
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT, SumLayout
from cloister.aggregation.vector.compression import BlockCode, Kept
from cloister.aggregation.vector.ring import Ring
from cloister.aggregation.vector.rotation import ROTATED, hadamard_transform, rotated_blocks, signs
from cloister.protocol.errors import PlanError, UpdateError
from cloister.protocol.messages.blocks import BLOCK, Span, tile
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import TRAIN, Instructions, SumId
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.carrying import carry_in
from cloister.tests.tools.raises import raises
from cloister.tests.tools.seeds import seed_of

Floats = npt.NDArray[np.float32]
EIGHT_BITS = ["aggregation.ring_bits=8", "aggregation.compression={}"]
SITES = 8
MANY = 2**17
"""More than this is coded in several steps."""


def code_of(values: int, terms: int = SITES, bits: Any = 8, seed: int = 3) -> BlockCode:
    return BlockCode(values, seed, Ring(bits, 1.0, terms))


def rms(vector: npt.NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(vector, dtype=np.float64))))


def heavy_tailed(size: int) -> list[Floats]:
    """An update of each site: what all have in common, and a part of its own; Student's t with three degrees."""
    random = np.random.default_rng(11)
    common = random.standard_t(3, size)
    return [(1e-3 * (common + random.standard_t(3, size))).astype(np.float32) for _ in range(SITES)]


# Rotation and code


def test_the_rotation_is_that_of_the_hadamard_matrix() -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((2, ROTATED)).astype(np.float32)
    scales = np.array([1, 0.25], np.float32)
    found = hadamard_transform(x.copy(), np.empty_like(x), scales)
    expected = np.empty((2, ROTATED))
    for block, row in zip(expected, x, strict=True):  # H of 2^14 is the product of two of 2^7
        block[:] = (hadamard(128) @ row.reshape(128, 128).astype(np.float64) @ hadamard(128)).reshape(-1)
    expected *= scales[:, None]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    again = hadamard_transform(found, np.empty_like(x), np.reciprocal(scales))
    np.testing.assert_allclose(again / ROTATED, x, atol=1e-5)
    assert set(signs(1)) == {1.0, -1.0}
    assert not np.array_equal(signs(1), signs(2))


def test_a_spike_is_spread_over_its_block_and_comes_back() -> None:
    """One value of a block has all of its energy; without the rotation it would be clipped or the rest be zeros."""
    code = code_of(MANY + 100)
    x = np.zeros(code.values, np.float32)
    x[[77, MANY + 3]] = 1.0, -2.0
    bounds = np.linspace(4, 5, code.blocks, dtype=np.float32) / np.float32(np.sqrt(ROTATED))
    total = np.zeros(code.size, np.uint8)
    for seed in range(SITES):
        coded, clipped = code.encode(x, bounds, seed_of(seed))
        assert clipped == 0
        total += coded
    mean = code.decode(total, bounds, 1 / SITES)
    assert mean.shape == x.shape
    step = float(bounds[0]) / code.ring.levels
    assert rms(mean - x) < step / 2
    assert mean[77] == pytest.approx(1.0, abs=5 * step)
    assert mean[MANY + 3] == pytest.approx(-2.0, abs=5 * step)


@pytest.mark.parametrize(("bits", "terms"), [(8, 8), (8, 63), (16, 8)])
def test_the_largest_values_do_not_wrap(bits: Any, terms: int) -> None:
    code = code_of(ROTATED, terms, bits)
    x = (np.sqrt(ROTATED) * signs(3)).astype(np.float32)  # its rotation has one coordinate, of ROTATED
    total = np.zeros(code.size, code.ring.dtype)
    for seed in range(terms):
        coded, clipped = code.encode(x, np.full(1, 100.0, np.float32), seed_of(seed))
        assert clipped == 1
        total += coded
    assert int(total.view(code.ring.signed_dtype).max()) == terms * code.ring.levels


def test_rotated_blocks_with_a_scale_each_have_a_tenth_of_the_error_of_one_scale() -> None:
    """The squared error of the mean over the squared norm of the mean, of eight heavy-tailed vectors in an 8-bit ring;
    blocks differ in size as the layers of a model do. One scale has the largest value as its bound."""
    updates = heavy_tailed(8 * ROTATED)
    for update in updates:
        update.reshape(8, ROTATED)[:] *= 2.0 ** -np.arange(8, dtype=np.float32)[:, None]
    mean = np.mean(updates, axis=0, dtype=np.float64)
    energy = float(np.square(mean).sum())

    largest = float(max(np.abs(update).max() for update in updates))
    ring = Ring(8, largest, SITES)
    one_scale = np.zeros(mean.size, np.uint8)
    code = code_of(mean.size)
    total = np.zeros(code.size, np.uint8)
    bounds = np.array(
        [
            3 * max(rms(update[block : block + ROTATED]) for update in updates)
            for block in range(0, mean.size, ROTATED)
        ],
        np.float32,
    )
    for seed, update in enumerate(updates):
        one_scale += ring.encode(update, seed_of(seed))[0]
        total += code.encode(update, bounds, seed_of(seed))[0]
    error_of_one = float(np.square(ring.decode(one_scale) / SITES - mean).sum()) / energy
    error = float(np.square(code.decode(total, bounds, 1 / SITES) - mean).sum()) / energy
    assert error < 0.012, error
    assert error_of_one > 0.05, error_of_one


def test_spans_have_the_same_bytes_as_the_whole() -> None:
    size = 5 * BLOCK + ROTATED + 1234  # more than is coded at once
    code = code_of(size)
    random = np.random.default_rng(2)
    x = random.standard_normal(size).astype(np.float32)
    bounds = random.uniform(0.5, 2, code.blocks).astype(np.float32)
    kept_before = random.integers(-90, 90, code.size).astype(np.int8)
    kept = Kept(kept_before, bounds[::-1].copy())
    residual = np.empty(code.size, np.int8)
    whole, clipped = code.encode(x, bounds, seed_of(5), factor=0.7, kept=kept, residual=residual)
    assert clipped > 0
    for parts in (2, 3, 5):
        pieces, lefts, counted = [], [], 0
        for span in tile(size, parts):
            place = code.coded(span)
            own = Kept(place.of(kept_before), kept.bounds[place.start // ROTATED : place.stop // ROTATED])
            left = np.empty(place.size, np.int8)
            coded, some = code.encode(
                span.of(x), bounds, seed_of(5), place.start, factor=0.7, kept=own, residual=left
            )
            pieces.append(coded)
            lefts.append(left)
            counted += some
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        np.testing.assert_array_equal(np.concatenate(lefts), residual)
        assert counted == clipped


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("at", [BLOCK + 7, MANY + BLOCK + 7])
def test_a_value_that_cannot_be_coded_is_named(at: int, bad: float) -> None:
    x = np.zeros(MANY + BLOCK + 100, np.float32)
    x[at : at + 93] = bad
    x[3] = 1e37  # larger than others, and can be rotated
    with (
        raises(UpdateError, f"update[{at}]"),
        np.errstate(over="ignore", invalid="ignore"),
    ):
        code_of(x.size).encode(x, np.full(rotated_blocks(x.size), 1e38, np.float32), seed_of(0))


def test_the_block_that_overflows_is_named_not_a_larger_value_elsewhere() -> None:
    x = np.zeros(8 * ROTATED, np.float32)
    x[3] = 3e38
    x[5 * ROTATED : 6 * ROTATED] = 1e36 * signs(3)  # its rotation has all of its energy in one coordinate
    with raises(UpdateError, f"update[{5 * ROTATED}]"), np.errstate(all="ignore"):
        code_of(x.size).encode(x, np.ones(8, np.float32), seed_of(0))


def test_rounding_up_does_not_leave_the_range() -> None:
    """In float32, 16383 and nearly 1 are 16384: two sites would send 32768, which is -32768 in 16 bits."""
    code = code_of(8 * ROTATED, terms=2, bits=16)
    bounds = np.ones(code.blocks, np.float32)
    highest = np.full(code.size, code.ring.levels, np.int16).view(np.uint16)
    coded, clipped = code.encode(code.decode(highest, bounds), bounds, seed_of(3))
    assert clipped < code.size
    assert int(coded.view(np.int16).max()) == code.ring.levels


# Error feedback


def error_of_rounds(rounds: int, *, feedback: bool) -> float:
    """The root mean square error of the mean of what one site sends in some rounds, in units of a round's error."""
    code = code_of(ROTATED)
    x = np.random.default_rng(4).standard_normal(ROTATED).astype(np.float32)
    bounds = [
        np.full(1, 3.0 + 2 * (number % 3), np.float32) for number in range(rounds)
    ]  # they change, and clip
    sent, kept = np.zeros(ROTATED), None
    for number in range(rounds):
        residual = np.empty(code.size, np.int8)
        coded, _ = code.encode(x, bounds[number], seed_of(number), kept=kept, residual=residual)
        sent += code.decode(coded, bounds[number])
        kept = Kept(residual, bounds[number]) if feedback else None
    return rms(sent / rounds - x)


def test_with_feedback_the_mean_of_many_rounds_is_the_true_mean() -> None:
    """What was left out is sent later, so the error falls as 1 / rounds; without it clipped values are missing for
    ever, and the error of rounding falls as 1 / sqrt(rounds)."""
    once = error_of_rounds(1, feedback=True)
    assert error_of_rounds(60, feedback=True) < once / 20
    assert error_of_rounds(60, feedback=False) > once / 10


def test_what_is_left_out_is_bounded() -> None:
    code, x = code_of(ROTATED), np.full(ROTATED, 50.0, np.float32)
    residual = np.empty(code.size, np.int8)
    code.encode(x, np.ones(1, np.float32), seed_of(0), residual=residual)
    assert np.abs(residual.astype(int)).max() == 127
    kept = Kept(residual, np.ones(1, np.float32))
    coded, _ = code.encode(np.zeros(ROTATED, np.float32), np.full(1, 2.0, np.float32), seed_of(0), kept=kept)
    most = np.abs(coded.view(np.int8).astype(int)).max()
    assert code.most_kept / 2 <= most <= code.most_kept / 2 + 1  # its steps are half as large


@pytest.mark.parametrize(("terms", "bits"), [(8, 8), (40, 8), (8, 16)])
def test_no_bounds_make_a_residual_decide_what_a_site_sends(terms: int, bits: Any) -> None:
    """Bounds that shrink from one round to the next: what is left of the earlier one would fill the range, so that the
    site sends a constant whatever it has learned."""
    code = code_of(ROTATED, terms=terms, bits=bits)
    residual = np.full(code.size, 2 ** (bits - 1) - 1, code.ring.signed_dtype)
    x = np.random.default_rng(4).standard_normal(ROTATED).astype(np.float32)
    for before in (1e-3, 1.0, 3.0, 1e6):
        kept = Kept(residual, np.full(1, before, np.float32))
        coded, clipped = code.encode(x, np.full(1, 3.0, np.float32), seed_of(0), kept=kept)
        alone, _ = code.encode(x, np.full(1, 3.0, np.float32), seed_of(0))
        moved = coded.view(code.ring.signed_dtype).astype(int) - alone.view(code.ring.signed_dtype)
        assert moved.max() <= math.ceil(code.most_kept)
        assert clipped < code.size / (2 if code.ring.levels < 4 else 20)


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_left_out_is_exact_up_to_its_limit(bits: Any) -> None:
    code = code_of(MANY + 5, bits=bits)
    most = 2 ** (bits - 1) - 1
    before = np.linspace(-most, most, code.size).astype(code.ring.signed_dtype)
    kept = Kept(before, np.full(code.blocks, 20.0, np.float32))
    values, bounds = np.zeros(code.values, np.float32), np.ones(code.blocks, np.float32)
    after = np.empty_like(before)
    coded, clipped = code.encode(values, bounds, seed_of(7), kept=kept, residual=after)
    z = (before.astype(float) * 20 * code.unit).clip(-code.most_kept, code.most_kept)
    assert clipped == 0
    left = (z - coded.view(code.ring.signed_dtype)) / code.unit
    np.testing.assert_allclose(after, left, rtol=0, atol=0.501)


def test_a_residual_in_a_file_is_that_in_memory(tmp_path: Path) -> None:
    code = code_of(3 * MANY + 17)  # several steps for each rank
    x = np.random.default_rng(8).standard_normal(code.values).astype(np.float32)
    bounds = np.linspace(2, 3, code.blocks, dtype=np.float32)
    first, second = np.empty((2, code.size), np.int8)
    code.encode(x, bounds, seed_of(1), residual=first)
    expected, _ = code.encode(x, bounds, seed_of(2), kept=Kept(first, bounds), residual=second)

    def coded(number: int) -> npt.NDArray[Any]:
        left = residuals(carry_in(tmp_path, number), bounds, code)
        pieces = []
        for span in tile(code.values, 2):  # as two ranks write it
            place = code.coded(span)
            kept, residual = left.kept(code, place), np.empty(place.size, np.int8)
            part, _ = code.encode(
                span.of(x), bounds, seed_of(number), place.start, kept=kept, residual=residual
            )
            left.keep(code, place, residual)
            pieces.append(part)
        return np.concatenate(pieces)

    coded(1)
    np.testing.assert_array_equal(coded(2), expected)
    kept_file = tmp_path / "2" / "residual"
    np.testing.assert_array_equal(np.frombuffer(kept_file.read_bytes()[4 * code.blocks :], np.int8), second)
    assert kept_file.stat().st_mode & 0o777 == 0o600


# Scales


def scales_plan(*settings: str) -> Plan:
    return parse("", [*EIGHT_BITS, f"cohort.sites={SITES}", *settings])


def test_the_first_scales_are_those_of_the_learning_rates() -> None:
    plan = scales_plan("local.steps=10", "local.learning_rate=2e-3", "local.schedule=constant")
    found = Scales.first(plan, ROTATED + 1)
    np.testing.assert_allclose(found.bounds, [3 * 10 * 2e-3] * 2, rtol=1e-6)
    # The steps of SGD are as long as the rates times the norm to which gradients are clipped.
    sgd = scales_plan(
        "local.steps=10",
        "local.learning_rate=2e-3",
        "local.schedule=constant",
        "local.optimizer=sgd",
        "local.clip_norm=5",
    )
    np.testing.assert_allclose(Scales.first(sgd, 100).bounds, [3 * 10 * 2e-3 * 5 / 10], rtol=1e-6)
    chosen = scales_plan("aggregation.compression.first_scale=0.01")
    np.testing.assert_allclose(Scales.first(chosen, 1).bounds, [0.03], rtol=1e-6)


def test_later_scales_follow_the_released_mean_and_the_clipped_values() -> None:
    plan = scales_plan()
    mean = np.repeat(np.array([4e-3, 1e-3, 0.0], np.float32), ROTATED)
    first = Scales.first(plan, mean.size)
    second = first.after(plan, mean, SITES, 1 / 2, 0)  # the sites' mean weight is half of the largest
    multiple = START * np.sqrt(SITES)
    everywhere = np.sqrt((4e-3**2 + 1e-3**2) / 3) / 2
    expected = multiple * np.array([2e-3, 0.5e-3, everywhere * LEAST_SHARE])
    np.testing.assert_allclose(second.bounds, expected, rtol=1e-5)
    assert second.multiple == multiple
    # Nothing was clipped, so the bounds are too large; a tenth was, so they are too small. A privacy unit says nothing.
    assert second.after(plan, mean, SITES, 1, 0).multiple == multiple * 0.75
    most = second.after(plan, mean, SITES, 1, SITES * mean.size // 10).multiple
    assert most == pytest.approx(multiple * 3 / 1.6449, rel=1e-3)
    assert second.after(plan, mean, SITES, 1, None).multiple == multiple
    for clipped, end in ((SITES * mean.size, 3 * SITES), (0, 3)):  # a site that lies in it for many rounds
        lied = second
        for _ in range(12):
            lied = lied.after(plan, mean, SITES, 1, clipped)
        assert lied.multiple == end
    # A mean of zeros says nothing either.
    assert second.after(plan, 0 * mean, SITES, 1, 0) is second
    again = Scales.restored(second.state())
    np.testing.assert_array_equal(again.bounds, second.bounds)
    assert again.multiple == second.multiple


@pytest.mark.parametrize("lied", ["clipped", "weight"])
@pytest.mark.parametrize(("groups", "followed"), [(1, True), (3, False)])
def test_no_group_decides_the_bounds_of_all_by_its_counters(groups: int, followed: bool, lied: str) -> None:
    """One site sets the counters of its group; the median of means withstands that group, so the bounds must too."""
    settings = ["aggregation.colluders=0.0", "cohort.sites=24", f"aggregation.groups={groups}"]
    sums, sites = Sums(parse("", [*EIGHT_BITS, *settings]), ROTATED), 24 // groups
    mean = np.full(ROTATED, 1e-3, np.float32)
    told = []
    for lie in (False, True):
        at_coordinator = Coordinated(sums, Given())
        for number in (1, 2):
            honest = {"weight": sites * sums.training.heaviest // 1000, "clipped": 0}
            worse = {"weight": sites * sums.training.heaviest, "clipped": sites * ROTATED}
            opened = [
                Summed(number, group, ("site",) * sites, {**honest, lied: worse[lied]}, (), {}, (number,))
                if lie and group == 0
                else Summed(number, group, ("site",) * sites, honest, (), {}, (number,))
                for group in range(groups)
            ]
            at_coordinator.before_step(mean, opened)
            at_coordinator.after_step()
        told.append(at_coordinator.tell(3, (), {}))
    assert (told[0] != told[1]) == followed


def test_bounds_of_a_part_of_a_vector_are_those_of_its_elements() -> None:
    """A block of the part has the root mean square of the bounds of its elements; what is not in it stays."""
    whole = Scales(np.array([1.0, 2.0, 4.0, 8.0], np.float32), 3.0)
    half = ROTATED // 2
    spans = (Span(half, 2 * ROTATED), Span(3 * ROTATED, 3 * ROTATED + half))
    part = whole.within(spans)
    np.testing.assert_allclose(part.bounds, np.sqrt([(1 + 4) / 2, (4 + 64) / 2]), rtol=1e-6)
    back = whole.spread(spans, Scales(np.array([3.0, 5.0], np.float32), 7.0))
    np.testing.assert_allclose(back.bounds, [3.0, np.sqrt((9 + 25) / 2), 4.0, 5.0], rtol=1e-6)
    assert back.multiple == 7.0
    everything = (Span(0, 4 * ROTATED - 1),)
    assert whole.within(everything) is whole
    made = Scales(np.arange(4, dtype=np.float32), 1.0)
    assert whole.spread(everything, made) is made


def test_scales_out_of_bounds_are_refused() -> None:
    plan = scales_plan("aggregation.bound=0.5")
    good = np.full(2, 0.1, np.float32)
    np.testing.assert_array_equal(bounds_in(good.tobytes(), plan, ROTATED + 1), good)
    for bad in (np.nan, np.inf, 0.0, -0.1, 0.51, 0.4 * SMALLEST):
        with raises(UpdateError, "scales[1]"):
            bounds_in(np.array([0.1, bad], np.float32).tobytes(), plan, ROTATED + 1)
    for wrong in (b"", good.tobytes()[:-1], good.tobytes() * 2):
        with raises(UpdateError, "scales", says="2 blocks"):
            bounds_in(wrong, plan, ROTATED + 1)


def test_scales_are_bound_in_the_context() -> None:
    told = Instructions(SumId("run", bytes(32), TRAIN, 1), bytes(32))
    features: list[tuple[tuple[str, bytes], ...]] = [(), (("balance", b"1234"),), (("compression", b"1234"),)]
    others = [*features, (("compression", b"1235"),), features[1] + features[2]]
    assert len({instructions_digest(replace(told, features=other)) for other in others}) == len(others)


# Plans


SITE = [
    "privacy.unit=site",
    "privacy.noise_multiplier=1.0",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
]


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        (["aggregation.ring_bits=8"], "aggregation.ring_bits", "add [aggregation.compression]"),
        (["aggregation.compression={}"], "aggregation.compression", "aggregation.ring_bits = 8 or 16"),
        ([*EIGHT_BITS, "cohort.sites=64"], "aggregation.ring_bits", "ring_bits = 16"),
        ([*EIGHT_BITS, *SITE], "aggregation.compression", "33.35 times as large for 1,000,000 parameters"),
        ([*EIGHT_BITS, "aggregation.bound=1e9"], "aggregation.bound", "less than or equal to 1000000"),
        (
            [*EIGHT_BITS, "aggregation.compression.first_scale=0"],
            "aggregation.compression.first_scale",
            "greater than 0",
        ),
    ],
)
def test_plans_that_cannot_be_compressed_are_refused(settings: list[str], field: str, words: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse("", settings)
    assert str(refused.value).startswith(field)
    assert words in str(refused.value)


def test_plans_that_can_be_compressed() -> None:
    record = ["privacy.unit=record", "privacy.sampling_rate=0.5", *SITE[1:]]
    for settings in (
        [],
        ["aggregation.ring_bits=16"],
        record,
        ["model.adapter.scheme=lora"],
        ["cohort.sites=63"],
    ):
        plan = parse("", [*EIGHT_BITS, *settings])
        layout = Sums(plan, ROTATED + 1).training
        assert (layout.size, layout.values) == (2 * ROTATED, ROTATED + 1)
        assert Sums(plan, 0).evaluation.blocks is None
    many = ["cohort.sites=630", "cohort.fraction=0.1"]
    assert (
        Sums(parse("", [*EIGHT_BITS, *many]), 1).training.ring.levels == 2
    )  # by the cohort, not by the federation


def test_without_compression_nothing_changes() -> None:
    plan = parse("")
    assert plan.aggregation.compression is None
    layout = Sums(plan, 7).training
    assert layout == SumLayout(Ring(32, 1.0, 8), 7, layout.counters, plan.most_tokens())
    assert layout.names == (WEIGHT, "tokens", "loss", "clipped")
