"""The secure sum as a whole: exact for every dropout pattern, and below the threshold nothing is opened.

`test_secure_site.py` and `test_secure_coordinator.py` have the attacks on one side each.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.aggregation.secure import keys, shamir
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import Member, SecureSite
from cloister.aggregation.secure.secure_sum import Answered, Attempt, commitment, context, traffic
from cloister.aggregation.vector import masks
from cloister.protocol.errors import EncodingError, ShareError, TooFewSitesError
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.messages import (
    TRAIN,
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Peers,
    Reveal,
    Shares,
    Step,
    Survivors,
    Unmask,
)
from cloister.protocol.messages.wire import from_bytes, to_bytes
from cloister.protocol.plan.threshold import Tolerance
from cloister.tests.parties.protocol_parties import (
    LENGTH,
    MODEL,
    Parties,
    TrustsAnyKey,
    carried,
    identity,
    names_of,
    roster,
)
from cloister.tests.tools.raises import raises

# What the sum is.


def expected(parties: Parties, lasts: Mapping[str, int]) -> masks.Ring | None:
    """The plain sum over U3, or None where too few sites are left at some step."""
    parameters, graph = parties.coordinator.attempt.parameters, parties.coordinator.attempt.graph

    def left(step: Step) -> set[str]:
        return {name for name in parties.names if lasts.get(name, Step.UNMASK) >= step}

    least = max(parameters.quorum, 2)
    if any(len(left(step)) < least for step in (Step.ADVERTISE, Step.SHARE, Step.UPDATE)):
        return None
    if len(left(Step.CONFIRM)) < parameters.agreement:
        return None
    revealing = left(Step.UNMASK)
    if any(
        len(revealing.intersection(graph.holders(name))) < parameters.threshold for name in left(Step.SHARE)
    ):
        return None
    return parties.plain_sum(sorted(left(Step.UPDATE)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(3, 9),
    bits=st.sampled_from([16, 32]),
    lasts=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 6, 6, 6, 6]), min_size=9, max_size=9),
    colluders=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_every_dropout_pattern_gives_the_plain_sum_or_a_typed_error(
    n: int, bits: int, lasts: list[int], colluders: float, seed: int
) -> None:
    parties = Parties(n, ring_bits=bits, tolerance=Tolerance(0.0, colluders), seed=seed)
    pattern = dict(zip(parties.names, lasts, strict=False))
    plain = expected(parties, pattern)
    if plain is None:
        with pytest.raises(TooFewSitesError):
            parties.run(pattern)
    else:
        found = parties.run(pattern)
        assert found.dtype == plain.dtype
        np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("last", range(1, 6))
def test_two_sites_drop_out_after_each_step(last: int) -> None:
    parties = Parties(7, tolerance=Tolerance(0.1, 0.05))
    pattern = {parties.names[1]: last, parties.names[6]: last}
    plain = expected(parties, pattern)
    assert plain is not None
    np.testing.assert_array_equal(parties.run(pattern), plain)


@pytest.mark.parametrize(("n", "complete"), [(64, True), (65, False)])
def test_on_both_sides_of_64_sites_a_site_may_drop_out_after_each_step(n: int, complete: bool) -> None:
    """64 sites mask with all others; one more, and each masks with its neighbours in the graph."""
    parties = Parties(n, site=TrustsAnyKey, tolerance=Tolerance(0.1, 0.05))
    assert parties.coordinator.attempt.parameters.complete is complete
    pattern = {name: 1 + place % 5 for place, name in enumerate(parties.names[::11])}
    assert set(pattern.values()) == {1, 2, 3, 4, 5}
    plain = expected(parties, pattern)
    assert plain is not None
    np.testing.assert_array_equal(parties.run(pattern), plain)


def test_dropouts_at_all_steps_above_64_sites() -> None:
    parties = Parties(80, tolerance=Tolerance(0.2, 0.05))
    assert not parties.coordinator.attempt.parameters.complete
    pattern = {name: 1 + place % 5 for place, name in enumerate(parties.names[::6])}
    plain = expected(parties, pattern)
    assert plain is not None
    np.testing.assert_array_equal(parties.run(pattern), plain)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(n=st.integers(65, 72), seed=st.integers(0, 2**32), data=st.data())
def test_every_tolerated_dropout_pattern_above_64_sites(n: int, seed: int, data: st.DataObject) -> None:
    parties = Parties(n, site=TrustsAnyKey, tolerance=Tolerance(0.1, 0.05), seed=seed)
    dropped = data.draw(st.sets(st.sampled_from(parties.names), max_size=n // 10))
    pattern = {name: data.draw(st.integers(1, 5)) for name in sorted(dropped)}
    plain = expected(parties, pattern)
    assert plain is not None
    np.testing.assert_array_equal(parties.run(pattern), plain)


def test_above_64_sites_more_dropouts_than_the_plan_tolerates_end_the_attempt() -> None:
    """The graph stays connected for D dropouts only, so a site signs no list that leaves out more."""
    parties = Parties(70, site=TrustsAnyKey, tolerance=Tolerance(0.1, 0.05))
    inboxes = parties.share(parties.advertise())
    most = parties.coordinator.attempt.parameters.dropouts
    with pytest.raises(TooFewSitesError):
        parties.upload(inboxes, parties.names[most + 1 :])
    site, ctx = parties.sites[parties.names[-1]], parties.coordinator.attempt.context
    with raises(TooFewSitesError, "survivors", says=f"at least {70 - most}"):
        site.confirm(Survivors(ctx, parties.names[most + 1 :]))
    site.confirm(Survivors(ctx, parties.names[most:]))


def test_the_sum_is_the_same_with_any_number_of_threads() -> None:
    """At the sites and at the coordinator; the vector has enough blocks for each thread to get one."""
    length = 3 * masks.BLOCK // 4 + 5
    uploads = []
    for threads in (1, 2, 4):
        parties = Parties(4, length=length)
        np.testing.assert_array_equal(
            parties.run({"site-003": 3}, threads=threads), parties.plain_sum(names_of(3))
        )
        uploads.append(parties.masked)
    for name in names_of(4):
        for upload in uploads[1:]:
            np.testing.assert_array_equal(upload[name], uploads[0][name])


def test_uploads_leave_one_accumulator_and_nothing_else() -> None:
    """For any n the coordinator keeps no vector: the uploads may be overwritten once they are folded."""
    parties = Parties(5)
    inboxes = parties.share(parties.advertise())
    for name in parties.names:
        parties.coordinator.fold(parties.mask(name, inboxes[name]), [(0, parties.masked[name])])
        parties.masked[name][:] = 0
    parties.reveal(parties.confirm(parties.coordinator.survivors()))
    np.testing.assert_array_equal(parties.coordinator.sum(), parties.plain_sum())


def test_a_masked_vector_says_nothing_without_its_seeds() -> None:
    """Vectors of zeros give uploads that look uniform, and differ between sites and between attempts."""
    uploads = []
    for attempt in (1, 2):
        parties = Parties(4, length=100_000, attempt=attempt)
        for vector in parties.vectors.values():
            vector[:] = 0
        parties.upload(parties.share(parties.advertise()))
        uploads += list(parties.masked.values())
    for upload in uploads:
        counts, mean = np.bincount(upload >> 24, minlength=256), upload.size / 256
        chi_square = float(((counts - mean) ** 2 / mean).sum())
        assert abs(chi_square - 255) < 6 * 510**0.5
    for one, other in itertools.combinations(uploads, 2):
        assert np.count_nonzero(one == other) < 5


# Several attempts.


def test_each_attempt_has_fresh_keys_and_a_retry_takes_the_same_updates() -> None:
    first, second = Parties(4), Parties(4, attempt=2)
    before, after = first.advertise(), second.advertise()
    used = [key for m in (*before.advertised, *after.advertised) for key in (m.share_key, m.mask_key)]
    assert len(set(used)) == len(used) == 16
    second.reveal(second.confirm(second.upload(second.share(after))))
    np.testing.assert_array_equal(second.coordinator.sum(), first.plain_sum())


def test_a_retry_over_the_same_survivors_is_answered() -> None:
    """After a crash between the answers and the sum, the round can be opened if no other site is missing."""
    first = Parties(4)
    total = first.run({"site-003": 3})
    marks = {name: written[0] for name, written in first.marks.items() if written}
    assert set(marks) == set(names_of(3))
    second = Parties(4, attempt=2, earlier=marks)
    np.testing.assert_array_equal(second.run({"site-003": 3}), total)


def test_a_mark_of_another_round_or_run_does_not_bind() -> None:
    for mark in (Answered("run", 2, 1, b"x"), Answered("walk", 1, 1, b"x")):
        parties = Parties(3, earlier=dict.fromkeys(names_of(3), mark))
        np.testing.assert_array_equal(parties.run(), parties.plain_sum())


def test_an_attempt_survives_a_crash_of_its_process() -> None:
    """A site that is rebuilt from its seed and the messages that it was sent gives the same replies."""
    parties = Parties(3)
    name = "site-001"

    def build() -> SecureSite:
        return SecureSite(
            parties.contract,
            Member(name, identity(name), 2),
            random=keys.random_from(b"s" * 32),
            answered=parties.marks[name].append,
        )

    parties.sites[name] = build()
    parties.reveal(parties.to_request())
    said, vector = parties.said[name], parties.masked[name]
    begin, peers, inbox, survivors, request = parties.told[name]
    parties.sites[name] = again = build()
    assert isinstance(begin, Begin)
    assert isinstance(peers, Peers)
    assert isinstance(inbox, Inbox)
    assert isinstance(survivors, Survivors)
    assert isinstance(request, Unmask)
    replies = [again.advertise(begin), again.share(peers), parties.mask(name, inbox)]
    assert [*replies, again.confirm(survivors), again.unmask(request)] == said[:5]
    np.testing.assert_array_equal(parties.masked[name], vector)
    assert parties.marks[name] == [parties.marks[name][0]] * 2
    np.testing.assert_array_equal(parties.coordinator.sum(), parties.plain_sum())


# Below the threshold.


def assert_no_secret(parties: Parties) -> None:
    """No combination of the shares that were revealed gives any site's b or s."""
    attempt = parties.coordinator.attempt
    pieces: dict[tuple[str, str], dict[int, bytes]] = {}
    for holder, reveal in parties.reveals.items():
        for kind, shares in (("b", reveal.self_shares), ("s", reveal.mask_shares)):
            for site, share in shares:
                pieces.setdefault((site, kind), {})[attempt.graph.index(holder)] = share
    for name in parties.names:
        for kind, secret in (("b", parties.self_seed(name)), ("s", parties.mask_private(name))):
            collected = pieces.get((name, kind), {})
            assert len(collected) < attempt.parameters.threshold
            for size in range(1, len(collected) + 1):
                for indices in itertools.combinations(collected, size):
                    try:
                        found = shamir.Interpolation(indices).secret([collected[x] for x in indices])
                    except ShareError:
                        continue
                    assert found != secret


@settings(max_examples=25, deadline=None)
@given(n=st.integers(3, 8), data=st.data())
def test_below_the_threshold_no_shares_give_a_secret(n: int, data: st.DataObject) -> None:
    parties = Parties(n, seed=n)
    threshold = parties.coordinator.attempt.parameters.threshold
    dropped = data.draw(st.sets(st.sampled_from(parties.names), max_size=n - threshold))
    survivors = [name for name in parties.names if name not in dropped]
    inboxes = parties.share(parties.advertise())
    request = parties.confirm(parties.upload(inboxes, survivors))
    answering = data.draw(st.permutations(survivors))[: threshold - 1]
    parties.reveal(request, answering)
    assert parties.coordinator.lacking
    with raises(TooFewSitesError, "sites that revealed shares"):
        parties.coordinator.sum()
    assert_no_secret(parties)
    # One more share, and the sum is exact: the try above took no mask off the accumulator.
    parties.reveal(request, [next(name for name in survivors if name not in answering)])
    np.testing.assert_array_equal(parties.coordinator.sum(), parties.plain_sum(survivors))


def test_the_secrets_that_these_tests_look_for_are_those_of_the_sites() -> None:
    parties = Parties(3)
    parties.to_request()
    ctx = parties.coordinator.attempt.context
    for name in parties.names:
        advertised, shares, *_ = parties.said[name]
        assert isinstance(advertised, Advertise)
        assert isinstance(shares, Shares)
        assert keys.public_key(parties.share_private(name)) == advertised.share_key
        assert keys.public_key(parties.mask_private(name)) == advertised.mask_key
        assert commitment(ctx, parties.self_seed(name)) == shares.commitment


def test_a_sites_reply_never_has_both_shares_of_one_site() -> None:
    parties = Parties(6)
    inboxes = parties.share(parties.advertise())
    parties.reveal(parties.confirm(parties.upload(inboxes, parties.names[:4])))
    assert set(parties.reveals) == set(parties.names[:4])
    for reply in parties.reveals.values():
        alive, dropped = {site for site, _ in reply.self_shares}, {site for site, _ in reply.mask_shares}
        assert (alive, dropped) == (set(parties.names[:4]), set(parties.names[4:]))


# Messages, and what they are bound to.


@pytest.mark.parametrize("n", [4, 66])
def test_the_announced_traffic_is_the_traffic(n: int) -> None:
    parties = Parties(n, site=TrustsAnyKey, tolerance=Tolerance(0.1, 0.1))
    parties.reveal(parties.to_request())
    up = sum(len(to_bytes(reply)) for reply in parties.said["site-001"])
    down = sum(len(to_bytes(message)) for message in parties.told["site-001"])
    assert traffic(parties.coordinator.attempt.parameters, len("site-001")) == (up, down)


def test_every_message_survives_the_wire_and_nothing_else_does() -> None:
    parties = Parties(3)
    parties.reveal(parties.to_request())
    messages: list[Any] = [*parties.told["site-001"], *parties.said["site-001"]]
    kinds: list[type[Any]] = [
        Begin,
        Peers,
        Inbox,
        Survivors,
        Unmask,
        Advertise,
        Shares,
        Masked,
        Confirm,
        Reveal,
    ]
    assert [type(message) for message in messages] == kinds
    for message in messages:
        data = to_bytes(message)
        assert from_bytes(type(message), data) == message
        for kind in kinds:
            if kind is not type(message):
                with pytest.raises(EncodingError):
                    from_bytes(kind, data)
        for cut in range(0, len(data), 7):
            with pytest.raises(EncodingError):
                from_bytes(type(message), data[:cut])
    for field, value in (
        ("attempt", "1"),
        ("instructions", "m"),
        ("round", ()),
    ):
        wrong: dict[str, Any] = {field: value}
        with pytest.raises(EncodingError):
            carried(dataclasses.replace(parties.coordinator.begin, **wrong))


CHANGES: list[dict[str, Any]] = [
    {"run": "walk"},
    {"plan": b"p" * 32},
    {"ring_bits": 16},
    {"length": LENGTH + 1},
    {"layout": b"other"},
    {"tolerance": Tolerance(0.0, 0.3)},  # another threshold
    {"roster": roster(names_of(9))},
    {"draw": Draw(1, TRAIN, 8), "roster": roster(names_of(9))},  # other sites
    {"draw": Draw(0, TRAIN, 7)},  # fewer sites
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_context_holds_all_that_a_contract_says(change: dict[str, Any]) -> None:
    one, other = (
        Parties(8, **({"roster": change["roster"]} if {"draw", "roster"} <= set(change) else {})),
        Parties(8, **change),
    )
    assert one.contract != other.contract
    assert one.coordinator.begin == other.coordinator.begin
    assert one.coordinator.attempt.context != other.coordinator.attempt.context


@pytest.mark.parametrize(
    "change",
    [{"round": 2}, {"attempt": 2}, {"instructions": bytes(32)}],
    ids=lambda change: next(iter(change)),
)
def test_the_context_holds_all_that_begins_an_attempt(change: dict[str, Any]) -> None:
    parties = Parties(8)
    other = Attempt(parties.contract, dataclasses.replace(parties.coordinator.begin, **change))
    assert parties.coordinator.attempt.context != other.context


@pytest.mark.parametrize("field", ["n", "k", "threshold"])
def test_the_context_holds_the_parameters(field: str) -> None:
    parties = Parties(8)
    attempt = parties.coordinator.attempt
    other = dataclasses.replace(attempt.parameters, **{field: 3})
    names, begin = attempt.graph.sites, parties.coordinator.begin
    assert context(parties.contract, begin, names, other) != attempt.context


def test_masks_of_sites_with_different_models_do_not_cancel() -> None:
    """The second line behind the signatures: the model's hash is in every mask key."""
    secret = keys.Exchange(bytes(32)).secret(keys.public_key(b"1" * 32))
    contexts = [
        SecureCoordinator(Parties(4).contract, 1, 1, model).attempt.context for model in (MODEL, bytes(32))
    ]
    seeds = {
        keys.mask_seed(secret, transcript=bytes(32), context=ctx, one="a", other="b") for ctx in contexts
    }
    assert len(seeds) == 2
