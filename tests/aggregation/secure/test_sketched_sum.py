"""What sites that lie in their vectors and sketches can add to a sum that is accepted, and what each check prevents.

A liar here has all bytes of its site: its vector, its sketch, which it makes when it knows the seed and what the other
liars send, and whether it goes on. The honest vectors and masks are those of the protocol.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import SecureSite
from cloister.aggregation.secure.secure_sum import Attempt
from cloister.aggregation.secure.sketches import Sketches
from cloister.aggregation.vector.sketch import (
    REACH,
    ROWS,
    SKETCH_BYTES,
    SLACK,
    Integers,
    Lengths,
    estimate,
    to_bytes,
)
from cloister.protocol.errors import (
    AgreementError,
    LengthError,
    MemberError,
    SecureSumError,
    SignatureError,
    StepError,
    TooFewSitesError,
    UpdateError,
)
from cloister.protocol.messages.messages import Confirm, Masked, Sketched, Survivors
from cloister.protocol.plan.threshold import Tolerance
from cloister.tests.parties.protocol_parties import LENGTH, MODEL, Parties, carried, signed
from cloister.tests.tools.raises import raises

SIZE, BOUND, SITES = 30, 1000.0, 5
LENGTHS = Lengths(SIZE, BOUND)
ONE_DROPS_OUT = Tolerance(0.2, 0.0)
Vector = npt.NDArray[np.int64]


def honest_vector(draw: np.random.Generator, size: int = LENGTH) -> Vector:
    """As long as an honest one may be, and with a tail that is no update."""
    vector = draw.normal(size=size)
    vector[SIZE:] = 0
    vector *= (BOUND - math.sqrt(SIZE)) / np.linalg.norm(vector)
    whole = np.rint(vector).astype(np.int64)
    whole[SIZE:] = draw.integers(0, 2**20, size - SIZE)
    return whole


class Liars(Parties):
    """A federation of which some sites lie in their vectors and sketches; the others are honest.

    Args:
        liars: How many lie.
        effect: What they add together to the honest vectors of all sites but them.
    """

    def __init__(self, liars: int = 0, effect: Vector | None = None, **others: Any) -> None:
        super().__init__(SITES, lengths=others.pop("lengths", LENGTHS), **others)
        draw = np.random.default_rng(others.get("seed", 0))
        self.liars, self.effect = self.names[:liars], effect
        self.plain = {name: honest_vector(draw, self.contract.length) for name in self.names}
        for at, name in enumerate(self.liars):
            self.plain[name] = np.zeros(self.contract.length, np.int64)
            if not at and effect is not None:
                self.plain[name][: effect.size] = effect
        dtype = next(iter(self.vectors.values())).dtype
        self.vectors = {name: vector.astype(dtype) for name, vector in self.plain.items()}

    def added(self, total: npt.NDArray[np.unsignedinteger[Any]]) -> float:
        """The length of what the liars have added to the sum of the honest sites, as the coordinator reads it."""
        honest = sum(self.plain[name] for name in self.names if name not in self.liars)
        lifted = total.view(np.dtype(f"i{total.itemsize}")).astype(np.int64)
        return float(np.linalg.norm((lifted - honest)[:SIZE]))


class Sharing(Liars):
    """Each liar sends its part of the sketch of what they add together: the best that they can do."""

    def sketch(self, name: str, seed: bytes) -> Integers:
        if name not in self.liars:
            return super().sketch(name, seed)
        assert self.effect is not None
        whole = LENGTHS.sketch([(0, self.effect.astype(np.int32).view(np.uint32))], seed)
        part = whole // len(self.liars)
        return whole - part * (len(self.liars) - 1) if name == self.liars[0] else part


def along(direction: npt.NDArray[Any], length: float) -> Vector:
    whole: Vector = np.rint(direction / np.linalg.norm(direction) * length).astype(np.int64)
    return whole


# Honest sites.


def test_a_sum_of_honest_sites_is_exact_and_no_longer_exchange_is_needed() -> None:
    parties = Liars()
    total = parties.run()
    np.testing.assert_array_equal(total.view(np.int32), sum(parties.plain.values()))
    replies = [reply for reply in parties.said[parties.names[0]] if isinstance(reply, Confirm)]
    assert len(parties.told[parties.names[0]]) == 5
    (confirm,) = replies
    assert confirm.sketched is not None
    assert len(confirm.sketched.sketch) == SKETCH_BYTES


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_no_honest_round_is_refused(bits: int) -> None:
    """In 1,000 rounds, whose sites are as long as they may be; also where products are far beyond the ring."""
    draw, largest = np.random.default_rng(bits), 2 ** (bits - 1) // SITES
    for number in range(1000):
        size = int(draw.integers(1, SIZE + 1))
        vectors = (
            draw.integers(-largest, largest + 1, (SITES, size))
            if number % 2
            else np.full((SITES, size), -largest)
        )
        lengths = Lengths(size, max(float(np.linalg.norm(vector)) for vector in vectors) + 1e-9)
        seed, checks = draw.bytes(32), Sketches(lengths)
        dtype = np.dtype(f"i{bits // 8}")
        sketches = [
            lengths.sketch([(0, vector.astype(dtype).view(f"u{bits // 8}"))], seed) for vector in vectors
        ]
        for sketch in sketches:
            checks.check_length("site", sketch)
        total = vectors.sum(axis=0).astype(dtype).view(f"u{bits // 8}")
        for at, sketch in enumerate(sketches):
            checks.take(str(at), to_bytes(sketch))
        checks.check_sum(total, seed, SITES)


def test_counters_are_in_no_sketch() -> None:
    parties = Liars()
    for name in parties.names:
        parties.vectors[name][SIZE:] = 2**31
    parties.run()


def test_an_honest_site_that_drops_out_after_its_upload_stops_nothing() -> None:
    parties = Liars(tolerance=ONE_DROPS_OUT)
    total = parties.run({parties.names[0]: 4})
    np.testing.assert_array_equal(total.view(np.int32), sum(parties.plain.values()))


# Liars.


def test_a_liar_that_is_as_long_as_it_may_be_is_in_the_sum() -> None:
    effect = along(np.arange(SIZE) + 1, BOUND)
    parties = Sharing(1, effect)
    assert parties.added(parties.run()) == pytest.approx(BOUND, rel=0.01)


def test_a_site_whose_vector_is_too_long_is_named_before_any_share_is_revealed() -> None:
    parties = Sharing(1, along(np.arange(SIZE) + 1, 4 * BOUND))
    survivors = parties.upload(parties.share(parties.advertise()))
    liar, *others = parties.names
    for name in others:
        parties.coordinator.confirmed(parties._confirmed(name, survivors))
    with raises(LengthError, f"update of {liar}"):
        parties.coordinator.confirmed(parties._confirmed(liar, survivors))
    with raises(LengthError, f"updates of {liar}"):
        parties.coordinator.request()
    assert parties.coordinator.sketches is not None
    assert parties.coordinator.sketches.too_long.keys() == {liar}
    assert not any(parties.marks.values())


class Denying(Liars):
    """The liars sketch vectors of zeros."""

    def sketch(self, name: str, seed: bytes) -> Integers:
        return np.zeros(ROWS, np.int64) if name in self.liars else super().sketch(name, seed)


FAR = along(np.ones(SIZE), 50 * BOUND)
WRAP = np.zeros(SIZE, np.int64)
WRAP[3] = 2**31 - 1


@pytest.mark.parametrize("effect", [FAR, WRAP], ids=["far", "wrap"])
def test_a_sum_that_is_not_what_was_sketched_is_refused(
    effect: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(UpdateError, "sum of the updates"):
        Denying(2, effect).run()
    monkeypatch.setattr(Sketches, "check_sum", lambda *_: None)  # removes the guard
    parties = Denying(2, effect)
    assert parties.added(parties.run()) > 10 * REACH * BOUND


def test_without_the_check_of_lengths_a_liar_adds_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LengthError):
        Sharing(2, FAR).run()
    monkeypatch.setattr(Sketches, "check_length", lambda *_: None)  # removes the guard
    parties = Sharing(2, FAR)
    assert parties.added(parties.run()) > 10 * REACH * BOUND


@pytest.mark.parametrize(("length", "accepted"), [(1, True), (1.6, None), (2.5, False), (40, False)])
def test_a_liar_that_sends_no_sketch_gains_what_one_sketch_may_hide(
    length: float, accepted: bool | None
) -> None:
    """One of five is missing: what is left of the sum is at most what one vector may be, by its estimate."""
    parties = Sharing(1, along(np.arange(SIZE) - 7, length * BOUND), tolerance=ONE_DROPS_OUT)
    try:
        total = parties.run({parties.liars[0]: 4})
    except UpdateError:
        assert not accepted
    else:
        assert accepted is not False
        assert parties.added(total) <= REACH * BOUND


def test_a_sketch_that_is_missing_is_room_for_one_and_not_for_two() -> None:
    """By the coordinator's own check: between what one and two sketches may hide."""
    effect = along(np.ones(SIZE), 1.1 * SLACK * BOUND)
    total = effect.astype(np.int32).view(np.uint32)
    hidden = [
        seed
        for seed in (bytes([number]) * 32 for number in range(20))
        if estimate(LENGTHS.sketch([(0, total)], seed)) > SLACK * BOUND
    ]
    assert hidden
    for seed in hidden:
        with raises(UpdateError, "sum of the updates"):
            Sketches(LENGTHS).check_sum(total, seed, 1)
        Sketches(LENGTHS).check_sum(total, seed, 2)


def test_as_many_sketches_arrive_as_sites_must_finish() -> None:
    """Each one that is missing leaves room for what no honest site has sent."""
    parties = Sharing(1, along(np.arange(SIZE) - 7, BOUND), tolerance=ONE_DROPS_OUT)
    needed = SITES - 1
    parties.coordinator = SecureCoordinator(parties.contract, 1, 1, MODEL, needed=needed, lengths=LENGTHS)
    assert parties.coordinator.attempt.parameters.agreement < needed
    with raises(TooFewSitesError, "sites that finished the step confirm"):
        parties.run({parties.liars[0]: 4, parties.names[-1]: 4})


# 10,000 random attacks, by the coordinator's own checks; and 100 that go through the protocol.


def random_effect(draw: np.random.Generator) -> Vector:
    """What liars add: heavy coordinates, spread ones, wraps, and sums of honest vectors of the other sign."""
    kind, effect = draw.integers(5), np.zeros(SIZE, np.int64)
    length = BOUND * 10 ** draw.uniform(-1, 3)
    if kind == 0:
        effect[draw.integers(SIZE)] = round(length)
    elif kind == 1:
        effect = along(draw.normal(size=SIZE), length)
    elif kind == 2:
        effect[draw.integers(SIZE, size=3)] = draw.choice([-(2**31), 2**31 - 1, 2**30, -(2**30)], 3)
    elif kind == 3:
        effect = along(draw.choice([-1, 1], SIZE), length)
    else:
        effect = along(0.5 ** np.arange(SIZE) * draw.choice([-1, 1], SIZE), length)
    return effect


def random_sketches(draw: np.random.Generator, whole: Integers, liars: int) -> list[Integers]:
    """What they send when they know the seed: parts of the truth, noise on it, or what others have sent."""
    kind = draw.integers(4)
    if kind == 0:
        return [whole // liars + (whole - whole // liars * liars) * (not at) for at in range(liars)]
    if kind == 1:
        return [
            np.rint(whole / liars + draw.normal(scale=BOUND / 10, size=ROWS)).astype(np.int64)
            for _ in range(liars)
        ]
    if kind == 2:
        return [np.clip(whole, -int(BOUND), int(BOUND)) // liars for _ in range(liars)]
    return [np.full(ROWS, draw.choice([-(2**62), 0, int(BOUND), 2**62])) for _ in range(liars)]


def accepted(sketches: Sequence[Integers], effect: Vector, missing: int, seed: bytes) -> bool:
    """Whether the coordinator's own checks accept what liars add, without the honest part, which cancels exactly."""
    checks = Sketches(LENGTHS)
    try:
        for at, sketch in enumerate(sketches):
            checks.take(str(at), to_bytes(sketch))
        checks.check_sum(effect.astype(np.int32).view(np.uint32), seed, len(sketches) + missing)
    except (LengthError, UpdateError):
        return False
    return True


def attack(tries: int, attempts: int = 3) -> list[float]:
    """What is accepted of random attacks: what was added, over the bound that is proven."""
    draw, found = np.random.default_rng(tries), []
    for _ in range(tries):
        liars, missing = int(draw.integers(1, 4)), int(draw.integers(0, 2))
        effect = random_effect(draw)
        for _ in range(attempts):  # a retry has another seed
            seed = draw.bytes(32)
            whole = LENGTHS.sketch([(0, effect.astype(np.int32).view(np.uint32))], seed)
            if accepted(random_sketches(draw, whole, liars), effect, missing, seed):
                lifted = effect.astype(np.int32).astype(np.int64)
                found.append(float(np.linalg.norm(lifted)) / (REACH * (liars + missing) * BOUND))
                break
    return found


@pytest.mark.slow
def test_of_10000_random_attacks_none_adds_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = attack(10_000)
    assert len(found) > 1000, "some are accepted"
    assert max(found) <= 1
    for guard in ("check_length", "check_sum"):
        with monkeypatch.context() as without:
            without.setattr(Sketches, guard, lambda *_: None)
            assert max(attack(300)) > 10


def test_100_optimised_attacks_add_no_more_than_the_bound() -> None:
    """By liars that share the sketch of what they add, at lengths around what is accepted."""
    directions: tuple[Callable[[np.random.Generator], npt.NDArray[Any]], ...] = (
        lambda _: np.eye(1, SIZE)[0],
        lambda draw: draw.normal(size=SIZE),
        lambda _: 0.5 ** np.arange(SIZE),
        lambda draw: -honest_vector(draw)[:SIZE],
    )
    draw, found, refused = np.random.default_rng(3), [], 0
    for number in range(100):
        liars = 1 + number % 2
        times = (0.9, 1.2, 1.4, 1.6, 2.0)[number % 5]
        parties = Sharing(liars, along(directions[number % 4](draw), times * liars * BOUND), seed=number)
        try:
            found.append(parties.added(parties.run()) / (liars * BOUND))
        except (LengthError, UpdateError):
            refused += 1
    assert max(found) <= REACH
    assert max(found) > 1.3, "what is accepted is about 1.5 times the longest honest one"
    assert refused > 20


# What each other check prevents.


def to_survivors(parties: Parties) -> Survivors:
    return parties.upload(parties.share(parties.advertise()))


def other_statement(parties: Parties, name: str) -> Masked:
    """What a site could have signed in this attempt, of another vector."""
    (said,) = (reply for reply in parties.said[name] if isinstance(reply, Masked))
    return dataclasses.replace(said, digest=bytes(32))


def shown_with(survivors: Survivors, message: Masked) -> Survivors:
    """The list of survivors with another statement of one site."""
    changed = (message.site, message.digest, message.complaints, message.signature)
    kept = (each if each[0] != message.site else changed for each in survivors.statements)
    return dataclasses.replace(survivors, statements=tuple(kept))


def test_a_site_sketches_under_one_seed_which_all_survivors_have_signed() -> None:
    parties = Liars()
    survivors = to_survivors(parties)
    name, other, *_ = parties.names
    site = parties.sites[name]
    with raises(StepError, "sketch"):
        site.sketched(bytes(SKETCH_BYTES))
    with raises(AgreementError, "digest of this site's vector"):
        site.confirm(shown_with(survivors, signed(other_statement(parties, name))))
    with raises(SignatureError, f"signature of {other}"):  # as a coordinator makes one
        site.confirm(shown_with(survivors, other_statement(parties, other)))
    stated = survivors.statements
    for statements in ((), stated[1:], (*stated, stated[0]), stated[::-1]):
        with raises(MemberError, "statements"):
            site.confirm(dataclasses.replace(survivors, statements=statements))
    first = site.confirm(survivors)
    seed = site.seed
    colluding = shown_with(survivors, signed(other_statement(parties, other)))
    with raises(AgreementError, "statements"):
        site.confirm(colluding)
    assert site.confirm(survivors) == first
    assert site.seed == seed


class AnyStatement(SecureSite):
    """Without check 5e."""

    def _check_statements(self, survivors: Survivors) -> None:
        pass


def test_without_the_check_of_statements_a_coordinator_chooses_the_seed_of_each_site() -> None:
    parties = Liars(site=AnyStatement)
    survivors = to_survivors(parties)
    first, seeds = parties.names[0], set()
    for name in parties.names:
        invented = dataclasses.replace(other_statement(parties, first), digest=name.encode().ljust(32))
        parties.sites[name].confirm(shown_with(survivors, invented))
        seeds.add(parties.sites[name].seed)
    assert len(seeds) == SITES


def test_shares_are_asked_for_by_the_statements_that_were_shown() -> None:
    """A site that works with the coordinator has signed two vectors."""
    parties = Liars()
    requests = parties.confirm(to_survivors(parties))
    name, other, *_ = parties.names
    message = signed(other_statement(parties, other))
    changed = (message.site, message.digest, message.complaints, message.signature)
    kept = (each if each[0] != other else changed for each in requests[name].statements)
    with raises(AgreementError, "statements"):
        parties.sites[name].unmask(dataclasses.replace(requests[name], statements=tuple(kept)))
    assert not parties.marks[name]


def test_a_sketch_is_of_this_attempt_of_its_own_site_and_signed() -> None:
    parties = Liars()
    survivors = to_survivors(parties)
    one, other = (parties._confirmed(name, survivors) for name in parties.names[:2])
    assert one.sketched is not None
    wrong: list[tuple[Sketched | None, type[SecureSumError]]] = [
        (None, LengthError),
        (other.sketched, LengthError),  # replayed
        (dataclasses.replace(one.sketched, site=other.site), LengthError),
        (dataclasses.replace(one.sketched, sketch=to_bytes(np.zeros(ROWS, np.int64))), SignatureError),
        (signed(dataclasses.replace(one.sketched, survivors=bytes(32))), LengthError),
        (signed(dataclasses.replace(one.sketched, sketch=bytes(8))), LengthError),
        (signed(one.sketched, by=other.site), SignatureError),
    ]
    for sketched, error in wrong:
        with pytest.raises(error):
            parties.coordinator.confirmed(carried(dataclasses.replace(one, sketched=sketched)))
    assert parties.coordinator.sketches is not None
    assert not parties.coordinator.sketches.too_long, "anyone may have sent those"
    parties.coordinator.confirmed(one)


def test_a_sum_without_sketches_takes_none() -> None:
    parties = Parties(SITES)
    survivors = to_survivors(parties)
    assert survivors.statements == ()
    site = parties.sites[parties.names[0]]
    stated = parties.statements(parties.names)
    with raises(MemberError, "statements"):
        site.confirm(dataclasses.replace(survivors, statements=stated))
    site.confirm(survivors)
    with raises(StepError, "sketch"):
        site.sketched(bytes(SKETCH_BYTES))
    with raises(StepError, "sketch"):
        _ = site.seed


def test_whether_vectors_are_sketched_is_in_the_context() -> None:
    with_, without = Liars().coordinator, Parties(SITES).coordinator
    assert Attempt(with_.contract, with_.begin).context != Attempt(without.contract, without.begin).context
    assert dataclasses.replace(with_.contract, sketches=False) == without.contract


def test_an_estimate_of_half_a_length_is_what_the_reach_assumes() -> None:
    assert 2 * SLACK == REACH
