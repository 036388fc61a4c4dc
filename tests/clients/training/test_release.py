"""The exit of a site: which code is used for which plan, what is not in the vector, and the way under real masks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cloister.aggregation.features.feature import Clipped, Code, Portion
from cloister.aggregation.features.in_clear import InClear
from cloister.aggregation.features.site_unit import Protected
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import Member
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.average import WEIGHT, PlainSum, SumLayout, weight_of
from cloister.aggregation.vector.ring import RingVector
from cloister.clients.state.attempt import Attempts
from cloister.clients.state.attempt_files import AttemptFiles
from cloister.clients.training.release import contribution
from cloister.clients.training.work import masking
from cloister.lm.training.moments import Carry
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.site_noise import SiteMechanism
from cloister.protocol.errors import PlanError, UpdateError
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.blocks import BLOCK, Span, tile
from cloister.protocol.messages.messages import TRAIN, Advertise, Confirm, Reveal, Shares
from cloister.protocol.plan.plan import AggregationSection
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.codes import code_for
from cloister.tests.tools.raises import raises
from cloister.tests.tools.seeds import seed_of

WRONG = 1e-9
SITE = ["aggregation.weighting=uniform", "server.evaluation=none", "privacy.unit=site", "cohort.sites=8"]
SECRET = NoiseStream.from_declared_seed(23)
SIZE = 20_000
Floats = npt.NDArray[np.float32]


def exit_of(size: int) -> tuple[SiteMechanism, SumLayout]:
    """The mechanism and the layout of a plan of the unit `site`."""
    plan = parse("", [*SITE, "privacy.noise_multiplier=1.5"])
    terms = terms_of(plan, size)
    assert terms is not None
    assert terms.mechanism is not None
    return terms.mechanism, Sums(plan, size).training


def assert_deviation(samples: npt.NDArray[Any], sigma: float) -> None:
    """The two-sided chi-square test of the variance at the level `WRONG`, for normal samples with mean 0."""
    statistic = float(np.square(samples.astype(np.float64) / sigma).sum())
    low, high = stats.chi2.ppf([WRONG / 2, 1 - WRONG / 2], samples.size)
    assert low < statistic < high, f"deviation {math.sqrt(statistic / samples.size) * sigma}, not {sigma}"


def zeros(size: int) -> Floats:
    return np.zeros(size, np.float32)


def test_an_update_of_another_length_does_not_leave() -> None:
    mechanism, layout = exit_of(5)
    with raises(UpdateError, "update", says="vector of 5"):
        contribution(Protected(layout, mechanism, 1.0, SECRET), LocalUpdate(zeros(4), 1, 0.5))


def test_nothing_of_the_data_stands_beside_the_vector() -> None:
    """Tokens and loss of a site are in no place of what it sends."""
    mechanism, layout = exit_of(7)
    assert layout.names == ("weight",)
    one, other = (
        contribution(
            Protected(layout, mechanism, 1.0, SECRET.child("x")), LocalUpdate(zeros(7), tokens, loss)
        )
        for tokens, loss in ((1, 0.5), (10**6, 99.0))
    )
    assert np.array_equal(one, other)
    assert one.size == 7 + layout.ring.limbs
    record = parse(
        "", [*SITE[:2], "privacy.unit=record", "privacy.noise_multiplier=1.0", "privacy.sampling_rate=0.1"]
    )
    layout = Sums(record, 7).training
    one, other = (
        contribution(
            InClear(layout, seed_of(0), AggregationSection(weighting="uniform")),
            LocalUpdate(zeros(7), tokens, loss),
        )
        for tokens, loss in ((1, 0.5), (10**6, 99.0))
    )
    assert np.array_equal(one, other)
    assert one.size == 7 + layout.ring.limbs
    # Without privacy both are in it.
    layout = Sums(parse(""), 7).training
    one, other = (
        contribution(InClear(layout, seed_of(0), AggregationSection()), LocalUpdate(zeros(7), tokens, loss))
        for tokens, loss in ((1, 0.5), (4000, 99.0))
    )
    assert not np.array_equal(one, other)
    assert one.size == 7 + 4 * layout.ring.limbs


@pytest.mark.parametrize("lost", [(), (2, 5)], ids=["all", "two drop out"])
@pytest.mark.parametrize("bits", [16, 32])
def test_under_real_masks_the_noise_is_that_of_the_survivors(
    tmp_path: Path, lost: tuple[int, ...], bits: int
) -> None:
    """The whole way: noise, masks, shares, the masks of dropouts taken off, and the released mean."""
    plan = parse(
        "",
        [*SITE, f"aggregation.ring_bits={bits}", "aggregation.dropouts=0.25", "privacy.noise_multiplier=1.5"],
    )
    terms, layout = terms_of(plan, SIZE), Sums(plan, SIZE).training
    assert terms is not None
    mechanism = terms.mechanism
    assert mechanism is not None
    names = [f"site-{number}" for number in range(8)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, identities[name]) for name in names)
    contract = Sums(plan, SIZE, "layout").contract(TRAIN, "0123", roster)
    model = bytes(32)
    coordinator = SecureCoordinator(contract, 1, 1, model)
    attempts = {
        name: Attempts(tmp_path / name, contract, Member(name, identities[name], 3)) for name in names
    }
    for name in names:
        AttemptFiles.create(tmp_path / name, tmp_path)
        advertise = attempts[name].agree(coordinator.begin, 1)
        assert isinstance(advertise, Advertise)
        coordinator.advertised(advertise)
    peers = coordinator.peers()
    for name in names:
        shares = attempts[name].agree(peers, 1)
        assert isinstance(shares, Shares)
        coordinator.shared(shares)
    inboxes = coordinator.inboxes()
    updates = np.random.default_rng(3).normal(0, 1e-3, (8, SIZE))
    left = [number for number in range(8) if number not in lost]
    vectors = [
        contribution(
            Protected(layout, mechanism, 1.0, SECRET.child(str(number))),
            LocalUpdate(update.astype(np.float32), 9, 1.0),
        )
        for number, update in enumerate(updates)
    ]
    for number in left:
        statement, masked = attempts[names[number]].mask(
            inboxes[names[number]],
            1,
            model,
            lambda _history, vector=vectors[number]: [(0, vector.copy())],  # type: ignore[misc]  # bound now
            masking(model),
        )
        coordinator.fold(statement, masked.pieces)
    survivors = coordinator.survivors()
    for number in left:
        confirm = attempts[names[number]].agree(survivors, 1)
        assert isinstance(confirm, Confirm)
        coordinator.confirmed(confirm)
    requests = coordinator.request()
    for number in left:
        reveal = attempts[names[number]].agree(requests[names[number]], 1)
        assert isinstance(reveal, Reveal)
        coordinator.revealed(reveal)
    opened = layout.open(coordinator.sum(), len(left))
    mean, _ = mechanism.decode(opened.mean, opened.counters[WEIGHT], 1.0)
    assert opened.counters == {WEIGHT: len(left)}
    clear = PlainSum(layout)
    for number in left:
        clear.add([(0, vectors[number])])
    assert np.array_equal(mean, clear.open().mean)
    noise = mean - updates[left].mean(axis=0)
    assert_deviation(noise, 1.5 * math.sqrt(len(left) / 5) / len(left))
    with pytest.raises(AssertionError, match="deviation"):
        assert_deviation(noise, 1.5 * math.sqrt(len(left) / 5) / len(left) / 2)


# Spans: a site's update at several ranks.


class Ranks:
    """Threads that each hold one span, and meet at a barrier to gather what they have."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._barrier = Barrier(len(spans), timeout=60)
        self._given: list[list[float]] = [[] for _ in spans]

    def _gather(self, rank: int, numbers: list[float]) -> list[float]:
        self._given[rank] = numbers
        self._barrier.wait()
        gathered = [number for given in self._given for number in given]
        self._barrier.wait()
        return gathered

    def contribution(self, code: Code, update: LocalUpdate) -> RingVector:
        """What the ranks send, each its span and the last one the tail, assembled."""

        def release(rank: int) -> tuple[RingVector, Clipped]:
            span = self._spans[rank]
            gather = partial(self._gather, rank)
            return code.release(span.of(update.vector), update.tokens, Portion(span.start, gather))

        with ThreadPoolExecutor(len(self._spans)) as pool:
            sent = list(pool.map(release, range(len(self._spans))))
        tail = code.tail([clipped for _, clipped in sent], update.tokens, update.loss)
        return np.concatenate([*(values for values, _ in sent), tail])


SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(1, 5).flatmap(lambda n: st.sampled_from([n * BLOCK - 1, n * BLOCK, n * BLOCK + 1])),
    st.integers(1, 5 * BLOCK),
)
KINDS = ["none", "weighted", "record", "site", "adaptive", "central", "central-adaptive"]


def code_of(kind: str, size: int, bits: int) -> Code:
    changes = [f"aggregation.ring_bits={bits}"]
    if kind == "weighted":
        changes += ["aggregation.weighting=tokens", "aggregation.bound=0.02"]
    else:
        changes += ["aggregation.weighting=uniform"]
    if kind in ("none", "record"):
        changes += ["aggregation.bound=0.02"]
    if kind == "record":
        changes += [
            *SITE[1:2],
            "privacy.unit=record",
            "privacy.noise_multiplier=1.0",
            "privacy.sampling_rate=0.1",
        ]
    elif kind not in ("none", "weighted"):
        central, adaptive = str("central" in kind).lower(), "adaptive" in kind
        changes += [*SITE, "privacy.noise_multiplier=1.5", f"privacy.trusted_coordinator={central}"]
        changes += ["privacy.adaptive={count_noise=2.0}"] if adaptive else []
    plan = parse("", changes)
    of_round = 0.3 if plan.privacy.adaptive else plan.privacy.clip
    sums, clip = Sums(plan, size), of_round if plan.privacy.unit == "site" else None
    return code_for(sums, rounding=seed_of(7), clip=clip, noise=SECRET.child(kind))


def update_of(size: int, scale: float, seed: int) -> LocalUpdate:
    values = np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)
    return LocalUpdate(values, 321, 1.25)


@given(
    size=SIZES,
    parts=st.sampled_from([1, 2, 3, 7]),
    kind=st.sampled_from(KINDS),
    bits=st.sampled_from([16, 32]),
    scale=st.sampled_from([1e-4, 0.01, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_number_of_spans_gives_the_same_bytes(
    size: int, parts: int, kind: str, bits: int, scale: float, seed: int
) -> None:
    code, update = code_of(kind, size, bits), update_of(size, scale, seed)
    whole = contribution(code, update)
    assert whole.shape == (code.layout.length,)
    assert Ranks(tile(size, parts)).contribution(code, update).tobytes() == whole.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_spans_of_several_blocks_give_the_same_bytes(kind: str) -> None:
    size = 6 * BLOCK + 17
    code, update = code_of(kind, size, 32), update_of(size, 0.01, 1)
    whole = contribution(code, update)
    for parts in (1, 2, 3, 7):
        spans = tile(size, parts)
        assert all(span.size for span in spans)
        assert Ranks(spans).contribution(code, update).tobytes() == whole.tobytes()


def test_spans_of_a_compressed_update_give_the_same_bytes_and_leave_the_same(tmp_path: Path) -> None:
    """The last span ends with the padding; each rank reads and writes its own part of what is left out."""
    size = 2 * BLOCK + 17
    plan = parse("", ["aggregation.ring_bits=8", "aggregation.compression={}"])
    blocks = Sums(plan, size).training.blocks
    assert blocks is not None
    bounds = np.geomspace(0.01, 0.03, blocks.blocks).astype(np.float32)

    def sent(number: int, base: int, parts: int) -> bytes:
        """The vector of a round, made by some ranks, and what it has left out."""
        after = tmp_path / f"{number}"
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir()
        carry = Carry(tmp_path / f"{base}" if base else None, after)
        code = code_for(Sums(plan, size), rounding=seed_of(7), carry=carry, bounds=bounds)
        update = update_of(size, 0.01, number)
        vector = Ranks(tile(size, parts)).contribution(code, update) if parts else contribution(code, update)
        assert vector.size == Sums(plan, size).training.length
        return vector.tobytes() + (after / "residual").read_bytes()

    sent(1, 0, 0)
    whole = sent(2, 1, 0)
    for parts in (1, 2, 3, 5):
        assert sent(2, 1, parts) == whole
    assert sent(2, 0, 2) != whole


@pytest.mark.parametrize("where", [0, BLOCK + 5, 3 * BLOCK + 16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_spans_are_zeros_where_one_is_not_finite(where: int, bad: float) -> None:
    size = 3 * BLOCK + 17
    code, update = code_of("adaptive", size, 32), update_of(size, 0.01, 1)
    update.vector[where] = bad
    expected = contribution(code, LocalUpdate(zeros(size), 321, 1.25))
    assert isinstance(code, Protected)
    expected[size] -= (
        code.mechanism.count_step
    )  # of adaptive clipping too: zeros would be counted as within C
    assert np.array_equal(contribution(code, update), expected)
    assert np.array_equal(Ranks(tile(size, 3)).contribution(code, update), expected)


@pytest.mark.parametrize(
    ("kind", "guard"),
    [("none", "dither"), ("site", "skellam"), ("central", "uniform"), ("site", "gather")],
)
def test_a_span_that_ignores_its_place_is_found(
    kind: str, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 * BLOCK + 17
    code, update = code_of(kind, size, 32), update_of(size, 0.01, 1)
    whole = contribution(code, update)
    skellam, uniform = NoiseStream.skellam, NoiseStream.uniform
    if guard == "dither":
        keystream = masks.keystream
        monkeypatch.setattr(masks, "keystream", lambda seed, offset: keystream(seed, 0))
    elif guard == "skellam":
        monkeypatch.setattr(
            NoiseStream, "skellam", lambda self, size, variance, offset=0: skellam(self, size, variance)
        )
    elif guard == "uniform":
        monkeypatch.setattr(NoiseStream, "uniform", lambda self, size, offset=0: uniform(self, size))
    else:
        monkeypatch.setattr(Ranks, "_gather", lambda self, rank, numbers: numbers)
    assert Ranks(tile(size, 1)).contribution(code, update).tobytes() == whole.tobytes()
    assert Ranks(tile(size, 3)).contribution(code, update).tobytes() != whole.tobytes()


@pytest.mark.parametrize(
    ("begin", "end", "kind", "field"),
    [
        (0, BLOCK - 1, UpdateError, "update"),
        (5, BLOCK, ValueError, "offset"),
        (BLOCK, 3 * BLOCK, UpdateError, "update"),
    ],
)
def test_a_span_that_is_not_of_whole_blocks_of_the_update_is_refused(
    begin: int, end: int, kind: type[Exception], field: str
) -> None:
    code = code_of("site", 2 * BLOCK + 9, 32)
    with raises(kind, field, says="multiple of" if kind is ValueError else "whole blocks"):
        code.release(zeros(end - begin), 1, Portion(begin))


def test_a_span_beyond_the_update_is_refused_in_clear() -> None:
    code = code_of("none", 100, 32)
    with raises(UpdateError, "update", says="vector of 100"):
        code.release(zeros(60), 1, Portion(41))


# Weights


def test_a_weight_by_temperature_is_a_power_of_the_tokens() -> None:
    most = 20 * 16 * 128
    for tokens in (0, 1, 7, 1000, most):
        assert weight_of(tokens, most, 1.0) == tokens  # as without a temperature
    for temperature in (1.5, 2.0, 5.0):
        weights = {tokens: weight_of(tokens, most, temperature) for tokens in (100, 1000, most)}
        assert weights[most] == most  # the heaviest site has the whole range of the ring
        assert weights[1000] / weights[100] == pytest.approx(10 ** (1 / temperature), rel=2e-3)
    assert weight_of(0, most, 2.0) == 0  # a site that has learned from nothing is refused, as without
    assert weight_of(1, most, 1e6) == most
    assert weight_of(1, 2**40, 1.0001) == 1


def test_the_mean_of_a_sum_is_weighted_by_temperature() -> None:
    """Two sites of a plan, with 256 and 4096 tokens and T = 2: weights of 1 and 4; other plans have the same bytes."""
    tokens, values = (256, 4096), (0.5, -0.25)

    def mean_of(*settings: str) -> tuple[Floats, list[bytes]]:
        plan = parse("", ["aggregation.secure=false", *settings])
        total = PlainSum(Sums(plan, 3).training)
        sent = []
        for number, (count, value) in enumerate(zip(tokens, values, strict=True)):
            code = code_for(Sums(plan, 3), rounding=seed_of(number), carry=None)
            sent.append(contribution(code, LocalUpdate(np.full(3, value, np.float32), count, 1.0)))
            total.add([(0, sent[-1])])
        opened = total.open()
        assert opened.counters["tokens"] == sum(tokens)
        return opened.mean, [each.tobytes() for each in sent]

    plain, as_ever = mean_of()
    np.testing.assert_allclose(plain, (0.5 * 1 - 0.25 * 16) / 17, atol=1e-6)
    np.testing.assert_allclose(mean_of("aggregation.temperature=2")[0], (0.5 * 1 - 0.25 * 4) / 5, atol=5e-5)
    assert mean_of("aggregation.temperature=1")[1] == as_ever
    few = ["aggregation.ring_bits=16"]
    np.testing.assert_allclose(
        mean_of("aggregation.temperature=2", *few)[0], (0.5 * 1 - 0.25 * 4) / 5, atol=3e-3
    )


def test_a_compressed_update_has_the_same_weight(tmp_path: Path) -> None:
    settings = ["aggregation.compression={}", "aggregation.ring_bits=8", "aggregation.temperature=2"]
    plan = parse("", settings)
    code = code_for(Sums(plan, 3), rounding=seed_of(0), carry=Carry(None, tmp_path))
    counters = code.layout.ring.decode_counters(code.tail([Clipped()], 256, 1.0))
    expected = weight_of(256, plan.most_labels(), 2.0)
    assert counters[code.layout.names.index(WEIGHT)] == expected > 256


@pytest.mark.parametrize(
    "settings",
    [
        ["aggregation.weighting=uniform"],
        [
            "privacy.unit=site",
            "privacy.noise_multiplier=1.0",
            "aggregation.weighting=uniform",
            "server.evaluation=none",
        ],
    ],
)
def test_a_temperature_without_weights_is_refused(settings: list[str]) -> None:
    with raises(PlanError, "aggregation.temperature", says="aggregation.weighting"):
        parse("", [*settings, "aggregation.temperature=2"])
    for wrong in ("0.5", "nan", "inf"):
        with raises(PlanError, "aggregation.temperature"):
            parse("", [f"aggregation.temperature={wrong}"])
