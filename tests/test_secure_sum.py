"""The secure sum: exact for every dropout pattern, silent below the threshold, and firm against liars.

The attacks come last. Each is a function that plays a lying coordinator or a lying site against sites of a
given class. It is run twice: against `Site` it ends in a typed refusal; against a double whose one check is
taken out it succeeds, in most cases by opening one site's update, which shows that the attack is real and
that the test can fail.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.aggregation import keys, masks, shamir
from cloister.aggregation.secure_messages import (
    Advertise,
    Begin,
    Confirm,
    Inbox,
    M,
    Masked,
    Peers,
    Reveal,
    Shares,
    Survivors,
    Unmask,
    from_bytes,
    to_bytes,
    traffic,
)
from cloister.aggregation.secure_sum import (
    Answered,
    Attempt,
    Contract,
    Coordinator,
    Seeds,
    Site,
    context,
    survivors_digest,
    transcript,
)
from cloister.protocol.errors import (
    AgreementError,
    AnsweredError,
    EncodingError,
    ExclusiveError,
    MaskError,
    MemberError,
    OneTimeKeyError,
    ReconstructionError,
    SecureSumError,
    ShareError,
    SignatureError,
    StaleError,
    StepError,
    ThresholdError,
    TooFewSitesError,
)
from cloister.protocol.roster import Card, Roster, new_identity

MODEL = hashlib.sha256(b"model").digest()
LENGTH = 37


@functools.cache
def identity(name: str) -> Ed25519PrivateKey:
    return new_identity(lambda size: hashlib.sha256(name.encode()).digest()[:size])


@functools.cache
def roster(names: tuple[str, ...]) -> Roster:
    return Roster.of(Card.of(name, identity(name)) for name in names)


def carried(message: M) -> M:
    """The message after a trip over the wire."""
    return from_bytes(type(message), to_bytes(message))


class TrustsAnyKey(Site):
    """Without the check of signatures; also used where thousands of them would only take time."""

    def _check_signatures(self, messages: Sequence[Any]) -> None:
        pass


class Federation:
    """n sites and a coordinator in one process. Each step can be run for some of the sites."""

    def __init__(
        self,
        n: int,
        *,
        site: type[Site] = Site,
        coordinator: type[Coordinator] = Coordinator,
        minimum: int = 2,
        bits: Literal[16, 32] = 32,
        length: int = LENGTH,
        tolerance: tuple[float, float] = (0.0, 0.0),
        cipher: masks.Cipher = "aes-256-ctr",
        attempt: int = 1,
        seed: int = 0,
        options: Mapping[str, Any] = {},
    ) -> None:
        self.names = tuple(f"site-{number:03d}" for number in range(n))
        self.random = random.Random(f"{seed} {attempt}").randbytes
        self.contract = Contract(
            "run", roster(self.names), bytes(32), *tolerance, bits, length, b"layout", cipher
        )
        self.coordinator = coordinator(self.contract, 1, attempt, MODEL, self.names)
        self.marks: dict[str, list[Answered]] = {name: [] for name in self.names}
        self.sites = {
            name: site(
                self.contract,
                name,
                identity(name),
                minimum=minimum,
                random=self.random,
                answered=self.marks[name].append,
                **options,
            )
            for name in self.names
        }
        draw, kind = np.random.default_rng(seed), np.dtype(f"uint{bits}")
        self.vectors: dict[str, masks.Ring] = {
            name: draw.integers(0, 2**bits, length, dtype=kind.type) for name in self.names
        }
        self.masked: dict[str, masks.Ring] = {}
        self.reveals: dict[str, Reveal] = {}

    def advertise(self, names: Iterable[str] | None = None) -> Peers:
        for name in self.names if names is None else names:
            self.coordinator.advertised(carried(self.sites[name].advertise(carried(self.coordinator.begin))))
        return carried(self.coordinator.peers())

    def share(self, peers: Peers, names: Iterable[str] | None = None) -> dict[str, Inbox]:
        for name in (m.site for m in peers.advertised) if names is None else names:
            self.coordinator.shared(carried(self.sites[name].share(peers)))
        return self.coordinator.inboxes()

    def mask(self, name: str, inbox: Inbox) -> Masked:
        self.sites[name].receive(carried(inbox))
        self.masked[name] = self.vectors[name].copy()
        self.sites[name].mask(self.masked[name], model=MODEL)
        return carried(self.sites[name].masked(hashlib.sha256(self.masked[name].tobytes()).digest()))

    def upload(self, inboxes: Mapping[str, Inbox], names: Iterable[str] | None = None) -> Survivors:
        for name in inboxes if names is None else names:
            self.coordinator.fold(self.mask(name, inboxes[name]), self.masked[name])
        return carried(self.coordinator.survivors())

    def confirm(self, survivors: Survivors, names: Iterable[str] | None = None) -> Unmask:
        for name in survivors.survivors if names is None else names:
            self.coordinator.confirmed(carried(self.sites[name].confirm(survivors)))
        return carried(self.coordinator.request())

    def reveal(self, request: Unmask, names: Iterable[str] | None = None) -> None:
        for name in request.survivors if names is None else names:
            self.reveals[name] = carried(self.sites[name].unmask(request))
            self.coordinator.revealed(self.reveals[name])

    def to_request(self) -> Unmask:
        return self.confirm(self.upload(self.share(self.advertise())))

    def plain_sum(self, names: Iterable[str] | None = None) -> masks.Ring:
        chosen = [self.vectors[name] for name in (self.names if names is None else names)]
        total: masks.Ring = np.add.reduce(chosen, dtype=chosen[0].dtype)
        return total


# What the sum is.


def run(federation: Federation, lasts: Mapping[str, int]) -> masks.Ring:
    """Run an attempt in which each site drops out after step `lasts[name]`, 0 to 5 (5: not at all).

    A site that drops out after step 2 has been sent its inbox and masks, but its upload does not arrive.
    """
    last = {name: lasts.get(name, 5) for name in federation.names}

    def left(step: int) -> list[str]:
        return [name for name in federation.names if last[name] >= step]

    inboxes = federation.share(federation.advertise(left(1)), left(2))
    for name in set(left(2)) - set(left(3)):
        federation.mask(name, inboxes[name])
    federation.reveal(federation.confirm(federation.upload(inboxes, left(3)), left(4)), left(5))
    return federation.coordinator.sum(threads=2)


def expected(federation: Federation, lasts: Mapping[str, int]) -> masks.Ring | None:
    """The plain sum over U3, or None where too few sites are left at some step."""
    parameters = federation.coordinator.attempt.parameters
    counts = [sum(lasts.get(name, 5) >= step for name in federation.names) for step in range(1, 6)]
    quorum = max(parameters.quorum, 2)
    if any(count < quorum for count in counts[:3]) or counts[3] < parameters.agreement:
        return None
    survivors = [name for name in federation.names if lasts.get(name, 5) >= 3]
    revealing = {name for name in federation.names if lasts.get(name, 5) >= 5}
    graph = federation.coordinator.attempt.graph
    shared = [name for name in federation.names if lasts.get(name, 5) >= 2]
    if any(len(revealing.intersection(graph.holders(name))) < parameters.threshold for name in shared):
        return None
    return federation.plain_sum(survivors)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(2, 9),
    bits=st.sampled_from([16, 32]),
    cipher=st.sampled_from(["aes-256-ctr", "chacha20"]),
    lasts=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 5, 5, 5, 5]), min_size=9, max_size=9),
    colluders=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_every_dropout_pattern_gives_the_plain_sum_or_a_typed_end(
    n: int, bits: Any, cipher: Any, lasts: list[int], colluders: float, seed: int
) -> None:
    federation = Federation(n, bits=bits, cipher=cipher, tolerance=(0.0, colluders), seed=seed)
    pattern = dict(zip(federation.names, lasts, strict=False))
    plain = expected(federation, pattern)
    if plain is None:
        with pytest.raises(TooFewSitesError):
            run(federation, pattern)
    else:
        found = run(federation, pattern)
        assert found.dtype == plain.dtype
        np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("n", [7, 64, 66])
def test_two_dropouts_after_each_step(n: int, after: int) -> None:
    federation = Federation(n, site=Site if n < 64 else TrustsAnyKey, tolerance=(0.1, 0.05))
    pattern = {federation.names[1]: after, federation.names[n - 1]: after}
    np.testing.assert_array_equal(run(federation, pattern), expected(federation, pattern))


def test_dropouts_at_all_steps_above_64_sites() -> None:
    federation = Federation(80, tolerance=(0.2, 0.05))
    assert not federation.coordinator.attempt.parameters.complete
    pattern = {name: place % 5 for place, name in enumerate(federation.names[::6])}
    plain = expected(federation, pattern)
    assert plain is not None
    np.testing.assert_array_equal(run(federation, pattern), plain)


@settings(max_examples=4, deadline=None)
@given(n=st.integers(65, 72), seed=st.integers(0, 2**32), data=st.data())
def test_every_tolerated_dropout_pattern_above_64_sites(n: int, seed: int, data: st.DataObject) -> None:
    federation = Federation(n, site=TrustsAnyKey, tolerance=(0.1, 0.05), seed=seed)
    dropped = data.draw(st.sets(st.sampled_from(federation.names), max_size=n // 10))
    pattern = {name: data.draw(st.integers(0, 4)) for name in sorted(dropped)}
    plain = expected(federation, pattern)
    assert plain is not None
    np.testing.assert_array_equal(run(federation, pattern), plain)


def test_a_site_whose_neighbours_are_gone_shares_nothing() -> None:
    """The sites are enough in all, but too few of them hold shares of this one."""
    federation = Federation(200, site=TrustsAnyKey, tolerance=(0.1, 0.1))
    name, attempt = federation.names[0], federation.coordinator.attempt
    own = federation.sites[name].advertise(federation.coordinator.begin)
    key = keys.public_key(bytes(32))
    everyone = [own, *(Advertise(own.context, other, key, key) for other in federation.names[1:])]
    gone = attempt.parameters.k - attempt.parameters.threshold
    for more, reply in ((1, None), (0, attempt.parameters.threshold)):
        absent = attempt.graph.neighbours(name)[: gone + more]
        peers = Peers(own.context, tuple(message for message in everyone if message.site not in absent))
        assert len(peers.advertised) >= attempt.parameters.quorum
        if reply is None:
            with pytest.raises(TooFewSitesError, match="holders of site-000"):
                federation.sites[name].share(peers)
        else:
            assert len(federation.sites[name].share(peers).sealed) == reply


def test_above_64_sites_more_dropouts_than_the_plan_tolerates_end_the_attempt() -> None:
    """The graph stays connected for D dropouts only, so a site signs no list that leaves out more."""
    federation = Federation(70, site=TrustsAnyKey, tolerance=(0.1, 0.05))
    inboxes = federation.share(federation.advertise())
    most = federation.coordinator.attempt.parameters.dropouts
    with pytest.raises(TooFewSitesError):
        federation.upload(inboxes, federation.names[most + 1 :])
    site, name = federation.sites[federation.names[-1]], federation.names[-1]
    ctx = federation.coordinator.attempt.context
    with pytest.raises(TooFewSitesError, match=f"at least {70 - most}"):
        site.confirm(Survivors(ctx, federation.names[most + 1 :]))
    site.confirm(Survivors(ctx, federation.names[most:]))
    assert name in federation.masked


def test_the_sum_is_the_same_without_masks_and_with_any_number_of_threads() -> None:
    sums = []
    for seed in (1, 1):
        federation = Federation(6, length=200_000, seed=seed)
        sums.append(run(federation, {}))
    np.testing.assert_array_equal(sums[0], sums[1])
    np.testing.assert_array_equal(sums[0], federation.plain_sum())


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    bits=st.sampled_from([16, 32]),
    order=st.randoms(),
    ranks=st.booleans(),
)
def test_any_shard_layout_gives_the_same_upload(cuts: list[int], bits: Any, order: Any, ranks: bool) -> None:
    """A site may mask shard by shard in any order, or hand its seeds to its ranks."""
    whole, sharded = (Federation(3, bits=bits, length=5000) for _ in range(2))
    inboxes = [federation.share(federation.advertise()) for federation in (whole, sharded)]
    name = whole.names[1]
    whole.mask(name, inboxes[0][name])
    site, vector = sharded.sites[name], sharded.vectors[name].copy()
    site.receive(inboxes[1][name])
    bounds = [0, *sorted(cuts), 5000]
    shards = [(start, vector[start:end]) for start, end in itertools.pairwise(bounds)]
    order.shuffle(shards)
    seeds = site.take_seeds(model=MODEL) if ranks else None
    for start, shard in shards:
        if seeds is None:
            site.mask(shard, model=MODEL, offset=start)
        else:
            masks.apply(shard, seeds.add, seeds.subtract, offset=start)
    site.masked(bytes(32))
    np.testing.assert_array_equal(whole.masked[name], vector)
    assert not np.array_equal(vector, whole.vectors[name])


def test_uploads_leave_one_accumulator_and_nothing_else() -> None:
    """Whatever n, the coordinator keeps no vector: the uploads may be overwritten once they are folded."""
    federation = Federation(5)
    inboxes = federation.share(federation.advertise())
    for name in federation.names:
        federation.coordinator.fold(federation.mask(name, inboxes[name]), federation.masked[name])
        federation.masked[name][:] = 0
    federation.reveal(federation.confirm(federation.coordinator.survivors()))
    np.testing.assert_array_equal(federation.coordinator.sum(), federation.plain_sum())


def test_a_masked_vector_says_nothing_without_its_seeds() -> None:
    """Equal vectors, and vectors of zeros, give uploads that look uniform and differ in every attempt."""
    uploads = []
    for attempt in (1, 2):
        federation = Federation(4, length=100_000, attempt=attempt)
        for vector in federation.vectors.values():
            vector[:] = 0
        federation.upload(federation.share(federation.advertise()))
        uploads += list(federation.masked.values())
    for upload in uploads:
        counts = np.bincount(upload >> 24, minlength=256)
        assert (
            abs(float(((counts - upload.size / 256) ** 2 / (upload.size / 256)).sum()) - 255) < 6 * 510**0.5
        )
    for one, other in itertools.combinations(uploads, 2):
        assert np.count_nonzero(one == other) < 5


def test_messages_handled_again_give_the_same_reply() -> None:
    federation = Federation(3)
    site, name = federation.sites["site-001"], "site-001"
    peers = federation.advertise()
    inboxes = federation.share(peers)
    survivors = federation.upload(inboxes)
    request = federation.confirm(survivors)
    federation.reveal(request)
    done = [
        (site.advertise(federation.coordinator.begin), site.advertise(federation.coordinator.begin)),
        (site.share(peers), site.share(peers)),
        (site.confirm(survivors), site.confirm(survivors)),
        (site.unmask(request), federation.reveals[name]),
        (site.masked(hashlib.sha256(federation.masked[name].tobytes()).digest()), None),
    ]
    assert all(one == other for one, other in done[:4])
    site.receive(inboxes[name])
    assert len(federation.marks[name]) == 1


def test_each_attempt_has_fresh_keys_and_a_retry_takes_the_same_updates() -> None:
    first, second = Federation(4), Federation(4, attempt=2)
    before, after = first.advertise(), second.advertise()
    used = [key for m in (*before.advertised, *after.advertised) for key in (m.share_key, m.mask_key)]
    assert len(set(used)) == len(used) == 16
    second.reveal(second.confirm(second.upload(second.share(after))))
    np.testing.assert_array_equal(second.coordinator.sum(), first.plain_sum())


# Below the threshold.


def assert_no_secret(federation: Federation) -> None:
    """No combination of the shares that were revealed gives any site's b or s."""
    attempt = federation.coordinator.attempt
    pieces: dict[tuple[str, str], dict[int, bytes]] = {}
    for holder, reveal in federation.reveals.items():
        for kind, shares in (("b", reveal.self_shares), ("s", reveal.mask_shares)):
            for site, share in shares:
                pieces.setdefault((site, kind), {})[attempt.graph.index(holder)] = share
    for name, owner in federation.sites.items():
        for kind, secret in (("b", owner._self_seed), ("s", owner._mask_private)):
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
    federation = Federation(n, seed=n)
    threshold = federation.coordinator.attempt.parameters.threshold
    dropped = data.draw(st.sets(st.sampled_from(federation.names), max_size=n - threshold))
    survivors = [name for name in federation.names if name not in dropped]
    inboxes = federation.share(federation.advertise())
    request = federation.confirm(federation.upload(inboxes, survivors))
    answering = data.draw(st.permutations(survivors))[: threshold - 1]
    federation.reveal(request, answering)
    before = federation.coordinator._accumulator
    assert before is not None
    masked = before.copy()
    assert not federation.coordinator.enough
    with pytest.raises(TooFewSitesError, match="try the round again"):
        federation.coordinator.sum()
    assert_no_secret(federation)
    np.testing.assert_array_equal(before, masked)
    federation.reveal(request, [next(name for name in survivors if name not in answering)])
    np.testing.assert_array_equal(federation.coordinator.sum(), federation.plain_sum(survivors))


# Steps and messages.


def test_steps_out_of_order_are_refused_at_a_site() -> None:
    federation, other = Federation(3), Federation(3)
    peers = other.advertise()
    site = federation.sites["site-000"]
    for call in (
        lambda: site.share(peers),
        lambda: site.receive(Inbox(bytes(32), (), ())),
        lambda: site.mask(np.zeros(LENGTH, np.uint32), model=MODEL),
        lambda: site.take_seeds(model=MODEL),
        lambda: site.masked(bytes(32)),
        lambda: site.confirm(Survivors(bytes(32), ())),
    ):
        with pytest.raises(StepError):
            call()
    inboxes = other.share(peers)
    site, name = other.sites["site-000"], "site-000"
    site.receive(inboxes[name])
    with pytest.raises(StepError, match="all 37 elements"):
        site.masked(bytes(32))
    with pytest.raises(StepError, match="upload"):
        site.confirm(Survivors(other.coordinator.attempt.context, other.names))
    with pytest.raises(StepError, match="signature"):
        site.unmask(Unmask(other.coordinator.attempt.context, (), (), ()))


def test_an_element_is_masked_once() -> None:
    federation = Federation(3)
    inboxes = federation.share(federation.advertise())
    site, vector = federation.sites["site-000"], np.zeros(LENGTH, np.uint32)
    site.receive(inboxes["site-000"])
    others: list[Any] = [vector.astype(np.uint16), vector.astype(np.int32), vector.reshape(1, -1)]
    for other in others:
        with pytest.raises(MaskError, match="uint32"):
            site.mask(other, model=MODEL)
    doubled = np.zeros(2 * LENGTH, np.uint32)
    with pytest.raises(MaskError, match="strided"):
        site.mask(doubled[::2], model=MODEL)
    with pytest.raises(MaskError, match="offset"):
        site.mask(vector[:1], model=MODEL, offset=-1)
    with pytest.raises(StepError, match="all 37 elements"):
        site.masked(bytes(32))
    site.mask(vector[10:20], model=MODEL, offset=10)
    site.mask(vector[:0], model=MODEL, offset=15)  # a rank without elements
    for start, end in ((0, 11), (19, 30), (10, 20), (12, 13), (0, LENGTH)):
        with pytest.raises(MaskError, match="not masked before"):
            site.mask(vector[start:end], model=MODEL, offset=start)
    with pytest.raises(MaskError, match="part of"):
        site.mask(vector, model=MODEL, offset=1)
    with pytest.raises(StepError, match="not both"):
        site.take_seeds(model=MODEL)
    with pytest.raises(StaleError, match="model"):
        site.mask(vector[:10], model=bytes(32))
    site.mask(vector[20:], model=MODEL, offset=20)
    site.mask(vector[:10], model=MODEL)
    site.masked(bytes(32))
    with pytest.raises(StepError):
        site.masked(b"1" * 32)
    with pytest.raises(StepError):
        site.mask(vector[:0], model=MODEL)


def test_a_vector_that_was_not_masked_to_the_end_is_never_signed() -> None:
    federation = Federation(3)
    inboxes = federation.share(federation.advertise())
    site, vector = federation.sites["site-000"], np.zeros(LENGTH, np.uint32)
    site.receive(inboxes["site-000"])
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    site.contract = dataclasses.replace(site.contract, length=(length := 10**6))
    with pytest.raises(RuntimeError):
        site.mask(np.zeros(length, np.uint32), model=MODEL, threads=2, pool=pool)
    with pytest.raises(StepError, match="to be masked first"):
        site.masked(bytes(32))
    with pytest.raises(MaskError, match="not masked before"):
        site.mask(vector, model=MODEL)


def test_seeds_are_given_once() -> None:
    federation = Federation(3)
    inboxes = federation.share(federation.advertise())
    site = federation.sites["site-000"]
    site.receive(inboxes["site-000"])
    site.take_seeds(model=MODEL)
    with pytest.raises(StepError):
        site.take_seeds(model=MODEL)
    with pytest.raises(StepError):
        site.mask(np.zeros(LENGTH, np.uint32), model=MODEL)


def test_an_attempt_outlives_its_process() -> None:
    """A site rebuilt from its seed and the messages it was sent has given, and gives, the same replies."""
    federation = Federation(3)
    name = "site-001"

    def build() -> Site:
        return Site(
            federation.contract,
            name,
            identity(name),
            minimum=2,
            random=keys.random_from(b"s" * 32),
            answered=federation.marks[name].append,
        )

    first = federation.sites[name] = build()
    federation.reveal(federation.to_request())
    again = federation.sites[name] = build()
    begin, peers, inbox, survivors, request = (message for message, _ in first._done)
    vector = federation.masked[name]
    assert isinstance(begin, Begin)
    assert isinstance(peers, Peers)
    assert isinstance(inbox, Inbox)
    assert isinstance(survivors, Survivors)
    assert isinstance(request, Unmask)
    assert again.advertise(begin) == first.advertise(begin)
    assert again.share(peers) == first.share(peers)
    federation.mask(name, inbox)
    np.testing.assert_array_equal(federation.masked[name], vector)
    assert again.confirm(survivors) == first.confirm(survivors)
    assert again.unmask(request) == first.unmask(request)
    assert federation.marks[name] == [federation.marks[name][0]] * 2
    np.testing.assert_array_equal(federation.coordinator.sum(), federation.plain_sum())


@pytest.mark.parametrize("n", [4, 70])
def test_the_traffic_that_is_announced_is_the_traffic(n: int) -> None:
    federation = Federation(n, site=TrustsAnyKey, tolerance=(0.1, 0.1))
    federation.reveal(federation.to_request())
    site = federation.sites["site-001"]
    up = sum(len(to_bytes(reply)) for _, reply in site._done if reply)
    up += len(to_bytes(site.masked(hashlib.sha256(federation.masked["site-001"].tobytes()).digest())))
    down = sum(len(to_bytes(message)) for message, _ in site._done)
    assert traffic(federation.coordinator.attempt.parameters, len("site-001")) == (up, down)


def test_seeds_are_not_shown_in_logs() -> None:
    assert "secret" not in repr(Seeds((b"secret",), (b"secret",)))


def test_the_mark_is_written_before_shares_leave() -> None:
    """If it cannot be written, nothing is revealed, and the site answers once it can."""
    federation = Federation(3)
    request = federation.to_request()
    site = federation.sites["site-000"]
    wrote = site.answered

    def full(mark: Answered) -> None:
        raise OSError("disk full")

    site.answered = full
    with pytest.raises(OSError, match="disk full"):
        site.unmask(request)
    site.answered = wrote
    assert site.unmask(request).self_shares
    assert [(mark.run, mark.round, mark.attempt) for mark in federation.marks["site-000"]] == [("run", 1, 1)]


def test_late_unknown_and_repeated_messages_are_refused_by_the_coordinator() -> None:
    federation = Federation(4)
    coordinator = federation.coordinator
    own = [federation.sites[name].advertise(coordinator.begin) for name in federation.names]
    for message in own[:3]:
        coordinator.advertised(message)
    with pytest.raises(StepError, match="one message of each"):
        coordinator.advertised(own[0])
    with pytest.raises(StepError):
        coordinator.sum()
    with pytest.raises(StepError):
        coordinator.inboxes()
    peers = coordinator.peers()
    with pytest.raises(StepError, match="message of step 2"):
        coordinator.advertised(own[3])
    shares = federation.sites["site-000"].share(peers)
    with pytest.raises(MemberError):
        coordinator.shared(dataclasses.replace(shares, site="site-003"))
    with pytest.raises(StaleError):
        coordinator.shared(dataclasses.replace(shares, context=bytes(32)))
    for sealed in (shares.sealed[:1], shares.sealed[::-1], (*shares.sealed, ("site-003", b""))):
        changed = federation.sites["site-000"]._sign(dataclasses.replace(shares, sealed=sealed))
        with pytest.raises(ShareError):
            coordinator.shared(changed)
    coordinator.shared(shares)
    with pytest.raises(TooFewSitesError, match="try the round again"):
        coordinator.inboxes()


def test_a_sum_is_taken_once() -> None:
    federation = Federation(3)
    federation.reveal(federation.to_request())
    federation.coordinator.sum()
    with pytest.raises(StepError):
        federation.coordinator.sum()


def test_every_message_survives_the_wire_and_nothing_else_does() -> None:
    federation = Federation(3)
    request = federation.to_request()
    federation.reveal(request)
    site = federation.sites["site-001"]
    messages: list[Any] = [
        federation.coordinator.begin,
        *(message for message, _ in site._done),
        site._masked,
    ]
    messages += [reply for _, reply in site._done if reply]
    kinds: set[type[Any]] = {
        Begin,
        Advertise,
        Peers,
        Shares,
        Inbox,
        Masked,
        Survivors,
        Confirm,
        Unmask,
        Reveal,
    }
    assert {type(message) for message in messages} == kinds
    for message in messages:
        data = to_bytes(message)
        assert from_bytes(type(message), data) == message
        for kind in kinds - {type(message)}:
            with pytest.raises(EncodingError):
                from_bytes(kind, data)
        for cut in range(0, len(data), 7):
            with pytest.raises(EncodingError):
                from_bytes(type(message), data[:cut])
    for field, value in (
        ("attempt", "1"),
        ("cohort", (b"a",)),
        ("cohort", ("a", 1)),
        ("model", "m"),
        ("round", ()),
    ):
        wrong: Any = {field: value}
        with pytest.raises(EncodingError):
            carried(dataclasses.replace(federation.coordinator.begin, **wrong))


CHANGES: list[dict[str, Any]] = [
    {"run": "walk"},
    {"plan": b"p" * 32},
    {"ring_bits": 16},
    {"length": LENGTH + 1},
    {"layout": b"other"},
    {"cipher": "chacha20"},
    {"colluders": 0.3},  # another threshold
    {"roster": roster(tuple(f"site-{number:03d}" for number in range(9)))},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_context_holds_all_that_a_contract_says(change: dict[str, Any]) -> None:
    federation = Federation(8)
    begin = federation.coordinator.begin
    other = dataclasses.replace(federation.contract, **change)
    assert context(federation.contract, begin, federation.contract.parameters(8)) != context(
        other, begin, other.parameters(8)
    )


@pytest.mark.parametrize("field", ["round", "attempt", "model", "cohort"])
def test_the_context_holds_all_that_begins_an_attempt(field: str) -> None:
    federation = Federation(8)
    begin = federation.coordinator.begin
    changed: dict[str, Any] = {
        "round": 2,
        "attempt": 2,
        "model": bytes(32),
        "cohort": (*begin.cohort[:-1], "site-009"),
    }
    other = dataclasses.replace(begin, **{field: changed[field]})
    parameters = federation.contract.parameters(8)
    assert context(federation.contract, begin, parameters) != context(federation.contract, other, parameters)


# Attacks by the coordinator.


def open_update(
    federation: Federation,
    victim: str,
    seed: bytes,
    peers: Peers,
    private: bytes | None = None,
    privates: Mapping[str, bytes] = {},
) -> masks.Ring:
    """The victim's vector from its upload, its b, and its s (or the others' private mask keys)."""
    ctx = federation.coordinator.attempt.context
    salt = transcript(ctx, peers.advertised)
    public = {message.site: message.mask_key for message in peers.advertised}
    add: list[bytes] = []
    subtract = [seed]
    for other in public:
        if other == victim:
            continue
        if private is not None:
            secret = keys.Exchange(private).secret(public[other])
        else:
            secret = keys.Exchange(privates[other]).secret(public[victim])
        mask = keys.mask_seed(secret, transcript=salt, context=ctx, one=victim, other=other)
        (subtract if victim < other else add).append(mask)
    opened = federation.masked[victim].copy()
    masks.apply(opened, add, subtract)
    return opened


def combine(federation: Federation, shares: Mapping[str, bytes], threshold: int | None = None) -> bytes:
    """The secret from the shares that the named holders gave."""
    attempt = federation.coordinator.attempt
    holders = sorted(shares)[: threshold or attempt.parameters.threshold]
    interpolation = shamir.Interpolation([attempt.graph.index(holder) for holder in holders])
    return interpolation.secret([shares[holder] for holder in holders])


def assert_opened(federation: Federation, victim: str, opened: masks.Ring) -> None:
    np.testing.assert_array_equal(opened, federation.vectors[victim])


def asks_for_both_secrets(kind: type[Site]) -> None:
    """One site in both lists."""
    federation = Federation(4, site=kind)
    peers = federation.advertise()
    request = federation.confirm(federation.upload(federation.share(peers)))
    victim = federation.names[0]
    both = dataclasses.replace(request, dropouts=(victim,))
    replies = {name: federation.sites[name].unmask(both) for name in federation.names}
    seed = combine(federation, {name: dict(reply.self_shares)[victim] for name, reply in replies.items()})
    private = combine(federation, {name: dict(reply.mask_shares)[victim] for name, reply in replies.items()})
    assert_opened(federation, victim, open_update(federation, victim, seed, peers, private))


class AnswersForBoth(Site):
    def _check_exclusive(self, request: Unmask) -> None:
        pass


def shows_every_site_its_own_survivors(kind: type[Site]) -> None:
    """Different lists to different sites: each list has the 6 sites that everyone demands, but only 4 are in
    all.
    """
    federation = Federation(10, site=kind, minimum=6)
    peers = federation.advertise()
    federation.upload(federation.share(peers))
    names, ctx = federation.names, federation.coordinator.attempt.context
    part, others = names[:4], names[4:]
    replies = {}
    for place, name in enumerate(names):
        extra = (
            {others[place % 6], others[(place + 1) % 6]} if name in part else {name, others[place % 6 - 1]}
        )
        listed = tuple(sorted({*part, *extra}))
        assert len(listed) == 6
        signature = federation.sites[name].confirm(Survivors(ctx, listed)).signature
        dropouts = tuple(site for site in names if site not in listed)
        replies[name] = federation.sites[name].unmask(Unmask(ctx, listed, dropouts, ((name, signature),)))
    opened = np.add.reduce([federation.masked[name] for name in part], dtype=np.uint32)
    seeds = [
        combine(federation, {name: dict(reply.self_shares)[site] for name, reply in replies.items()})
        for site in part
    ]
    masks.apply(opened, (), seeds)
    public = {message.site: message.mask_key for message in peers.advertised}
    for dropout in others:
        shares = {name: dict(reply.mask_shares).get(dropout) for name, reply in replies.items()}
        private = combine(federation, {name: share for name, share in shares.items() if share is not None})
        for site in part:
            seed = keys.mask_seed(
                keys.Exchange(private).secret(public[site]),
                transcript=transcript(ctx, peers.advertised),
                context=ctx,
                one=site,
                other=dropout,
            )
            masks.apply(opened, (), [seed])  # part sorts before others
    np.testing.assert_array_equal(opened, federation.plain_sum(part))  # 4 updates, where 6 are the least


class TrustsAnyList(Site):
    def _check_agreement(self, request: Unmask) -> None:
        pass


def swaps_the_keys_of_all_peers(kind: type[Site]) -> None:
    """The coordinator stands between the victim and everyone else, with keys of its own."""
    federation = Federation(5, site=kind)
    real = federation.advertise()
    victim, ctx = federation.names[2], federation.coordinator.attempt.context
    privates = {name: hashlib.sha256(name.encode()).digest() for name in federation.names}
    forged = Peers(
        ctx,
        tuple(
            message
            if message.site == victim
            else dataclasses.replace(
                message,
                share_key=keys.public_key(privates[message.site]),
                mask_key=keys.public_key(privates[message.site]),
            )
            for message in real.advertised
        ),
    )
    shares = federation.sites[victim].share(forged)
    salt, own = transcript(ctx, forged.advertised), real.advertised[2]
    opened: dict[str, bytes] = {}
    sealed = []
    for other, ciphertext in shares.sealed:
        secret = keys.Exchange(privates[other]).secret(own.share_key)
        key = keys.share_key(secret, transcript=salt, context=ctx, sender=victim, recipient=other)
        opened[other] = keys.decrypt_share(ciphertext, key, context=ctx, sender=victim, recipient=other)
        key = keys.share_key(secret, transcript=salt, context=ctx, sender=other, recipient=victim)
        sealed.append(
            (other, keys.encrypt_share(bytes(66), key, context=ctx, sender=other, recipient=victim))
        )
    federation.mask(victim, Inbox(ctx, federation.names, tuple(sealed)))
    seed = combine(federation, {name: share[:33] for name, share in opened.items()})
    found = open_update(federation, victim, seed, forged, privates=privates)
    assert_opened(federation, victim, found)


def replays_the_share_step(kind: type[Site]) -> None:
    """The same step again, with other peers: the same secrets would be shared by two polynomials."""
    federation = Federation(6, site=kind)
    peers = federation.advertise()
    site = federation.sites["site-000"]
    first = site.share(peers)
    second = site.share(dataclasses.replace(peers, advertised=peers.advertised[:4]))
    assert [to for to, _ in second.sealed] == [to for to, _ in first.sealed[:3]]


class AnswersEachTime(Site):
    def _check_order(self, step: int, message: Any) -> Any:
        return None


def asks_for_an_old_attempt(kind: type[Site]) -> None:
    """A site that was in attempt 3 is drawn into attempt 2 again."""
    federation = Federation(4, site=kind, attempt=2, options={"newest": (1, 3)})
    federation.reveal(federation.to_request())
    np.testing.assert_array_equal(federation.coordinator.sum(), federation.plain_sum())


class JoinsAnyAttempt(Site):
    def _check_fresh(self, begin: Begin) -> None:
        pass


def takes_two_sums_of_one_round(kind: type[Site]) -> None:
    """Attempt 1 is opened but said to have failed; attempt 2 leaves out one site: their difference is its
    update.
    """
    first = Federation(5, site=kind)
    first.reveal(first.to_request())
    whole = first.coordinator.sum()
    second = Federation(5, site=kind, attempt=2)
    for name, site in second.sites.items():
        site._earlier = first.marks[name][0]
    victim, others = second.names[0], second.names[1:]
    inboxes = second.share(second.advertise())
    second.reveal(second.confirm(second.upload(inboxes, others)))
    assert_opened(second, victim, whole - second.coordinator.sum())


class ForgetsWhatItAnswered(Site):
    def _check_earlier(self, survivors: tuple[str, ...]) -> None:
        pass


def gives_one_site_another_model(kind: type[Site]) -> None:
    """The victim is given a model of the coordinator's choice, and is summed with all the others."""
    federation = Federation(4, site=kind)
    begin = federation.coordinator.begin
    victim, other = federation.sites["site-000"], dataclasses.replace(begin, model=b"x" * 32)
    messages = [site.advertise(other if site is victim else begin) for site in federation.sites.values()]
    ctx = messages[1].context
    peers = Peers(ctx, tuple(messages))
    replies = [site.share(peers) for site in federation.sites.values()]
    sealed = {reply.site: dict(reply.sealed) for reply in replies}
    total = np.zeros(LENGTH, np.uint32)
    for name, site in federation.sites.items():
        inbox = tuple((sender, sealed[sender][name]) for sender in federation.names if sender != name)
        site.receive(Inbox(ctx, federation.names, inbox))
        vector = federation.vectors[name].copy()
        site.mask(vector, model=other.model if site is victim else MODEL)
        total += vector
    masks.apply(total, (), [site._self_seed for site in federation.sites.values()])
    np.testing.assert_array_equal(total, federation.plain_sum())


class IgnoresTheModel(Site):
    def _attempt(self, begin: Begin) -> Attempt:
        attempt = super()._attempt(begin)
        attempt.context = context(self.contract, dataclasses.replace(begin, model=b""), attempt.parameters)
        return attempt


def lowers_the_threshold(kind: type[Site]) -> None:
    """With t = 2 the two colluding sites of six hold enough shares of everything."""
    federation = Federation(6, site=kind)
    coordinator = federation.coordinator
    coordinator.begin = dataclasses.replace(coordinator.begin, threshold=2)
    coordinator.attempt = next(iter(federation.sites.values()))._attempt(coordinator.begin)
    peers = federation.advertise()
    federation.upload(federation.share(peers))
    victim, colluding = federation.names[0], federation.names[4:]
    held = {name: federation.sites[name]._held[victim] for name in colluding}
    seed = combine(federation, {name: share for name, (share, _) in held.items()}, 2)
    private = combine(federation, {name: share for name, (_, share) in held.items()}, 2)
    assert_opened(federation, victim, open_update(federation, victim, seed, peers, private))


class TakesTheOfferedThreshold(Site):
    def _check_threshold(self, offered: int, own: int) -> None:
        pass

    def _attempt(self, begin: Begin) -> Attempt:
        attempt = super()._attempt(begin)
        attempt.parameters = dataclasses.replace(attempt.parameters, threshold=begin.threshold)
        attempt.context = context(self.contract, begin, attempt.parameters)
        return attempt


def invents_sites(kind: type[Site]) -> None:
    """All sites but one are the coordinator's own inventions: the sum less their zeros is the update."""
    names = ("site-000", *(f"sybil-{number}" for number in range(4)))
    federation = Federation(1 + 4, site=kind, seed=5)
    invented = dataclasses.replace(federation.contract, roster=roster(names))
    federation.names, federation.contract = names, invented
    federation.coordinator = Coordinator(invented, 1, 1, MODEL, names)
    if kind is not Site:
        federation.sites["site-000"].contract = invented
    for name in names[1:]:
        federation.sites[name] = Site(
            invented,
            name,
            identity(name),
            minimum=2,
            random=federation.random,
            answered=lambda mark: None,
        )
        federation.vectors[name] = np.zeros(LENGTH, np.uint32)
    federation.reveal(federation.to_request())
    assert_opened(federation, "site-000", federation.coordinator.sum())


class TakesTheOfferedRoster(Site):
    """Its contract is given another roster: the one that it pinned is not looked at."""


def draws_too_small_a_cohort(kind: type[Site]) -> None:
    """A cohort of the victim and one colluding site, where the victim demands three."""
    federation = Federation(2, site=kind, minimum=3)
    federation.reveal(federation.to_request())
    victim, colluding = federation.names
    assert_opened(federation, victim, federation.coordinator.sum() - federation.vectors[colluding])


class JoinsAnySum(Site):
    def _check_size(self, what: str, size: int, least: int) -> None:
        pass


def changes_the_victims_own_key(kind: type[Site]) -> None:
    """The victim is shown its own entry with keys of the coordinator's."""
    federation = Federation(4, site=kind)
    peers = federation.advertise()
    own = dataclasses.replace(peers.advertised[0], share_key=keys.public_key(bytes(32)))
    changed = dataclasses.replace(peers, advertised=(own, *peers.advertised[1:]))
    assert federation.sites["site-000"].share(changed).sealed


class IgnoresItsOwnKey(Site):
    def _check_own_keys(self, returned: Advertise | None) -> None:
        pass


def alters_a_share(kind: type[Site]) -> None:
    """One bit of a ciphertext is flipped on its way: the holder would later reveal a wrong share."""
    federation = Federation(4, site=kind)
    inboxes = federation.share(federation.advertise())
    name, sender = "site-000", "site-002"
    inbox = inboxes[name]
    altered = tuple(
        (site, bytes([text[0], text[1] ^ 1, *text[2:]]) if site == sender else text)
        for site, text in inbox.sealed
    )
    federation.sites[name].receive(dataclasses.replace(inbox, sealed=altered))
    assert len(federation.sites[name]._held) == 4


class DecryptsAnything(Site):
    def _decrypt(self, sealed: bytes, key: bytes, sender: str) -> bytes:
        start = (1).to_bytes(4, "little") + bytes(12)
        return Cipher(algorithms.ChaCha20(key, start), None).decryptor().update(sealed[:-16])


def asks_twice_with_other_lists(kind: type[Site]) -> None:
    """First everyone is alive; then, in the same attempt, the victim has dropped out."""
    federation = Federation(5, site=kind)
    peers = federation.advertise()
    request = federation.confirm(federation.upload(federation.share(peers)))
    federation.reveal(request)
    victim, others = federation.names[0], federation.names[1:]
    shares = {name: dict(reply.self_shares)[victim] for name, reply in federation.reveals.items()}
    seed = combine(federation, shares)
    ctx = federation.coordinator.attempt.context
    signatures = tuple(
        (name, federation.sites[name].confirm(Survivors(ctx, others)).signature) for name in others
    )
    again = Unmask(ctx, others, (victim,), signatures)
    replies = {name: federation.sites[name].unmask(again) for name in others}
    private = combine(federation, {name: dict(reply.mask_shares)[victim] for name, reply in replies.items()})
    assert_opened(federation, victim, open_update(federation, victim, seed, peers, private))


class AnswersTwice(Site):
    """Two checks stand in the way of one fact: at the signature and at the answer."""

    def _check_one_list(self, survivors: tuple[str, ...]) -> None:
        pass

    def _check_repeat(self, request: Unmask) -> Reveal | None:
        return None


COORDINATOR_LIES: list[tuple[Callable[[type[Site]], None], type[SecureSumError], type[Site]]] = [
    (asks_for_both_secrets, ExclusiveError, AnswersForBoth),
    (shows_every_site_its_own_survivors, AgreementError, TrustsAnyList),
    (swaps_the_keys_of_all_peers, SignatureError, TrustsAnyKey),
    (replays_the_share_step, StepError, AnswersEachTime),
    (asks_for_an_old_attempt, StaleError, JoinsAnyAttempt),
    (takes_two_sums_of_one_round, AnsweredError, ForgetsWhatItAnswered),
    (gives_one_site_another_model, StaleError, IgnoresTheModel),
    (lowers_the_threshold, ThresholdError, TakesTheOfferedThreshold),
    (invents_sites, MemberError, TakesTheOfferedRoster),
    (draws_too_small_a_cohort, TooFewSitesError, JoinsAnySum),
    (changes_the_victims_own_key, OneTimeKeyError, IgnoresItsOwnKey),
    (alters_a_share, ShareError, DecryptsAnything),
    (asks_twice_with_other_lists, AgreementError, AnswersTwice),
]


@pytest.mark.parametrize(("attack", "refusal", "double"), COORDINATOR_LIES, ids=lambda a: a.__name__)
def test_a_lying_coordinator_is_refused(
    attack: Callable[[type[Site]], None], refusal: type[SecureSumError], double: type[Site]
) -> None:
    with pytest.raises(refusal) as caught:
        attack(Site)
    assert type(caught.value) is refusal


@pytest.mark.parametrize(("attack", "refusal", "double"), COORDINATOR_LIES, ids=lambda a: a.__name__)
def test_the_same_lie_succeeds_without_the_check(
    attack: Callable[[type[Site]], None], refusal: type[SecureSumError], double: type[Site]
) -> None:
    attack(double)


def test_the_second_answer_is_refused_also_where_the_second_signature_is_not() -> None:
    class SignsTwice(Site):
        def _check_one_list(self, survivors: tuple[str, ...]) -> None:
            pass

    with pytest.raises(AnsweredError):
        asks_twice_with_other_lists(SignsTwice)


def test_a_sites_reply_never_holds_both_shares_of_one_site() -> None:
    federation = Federation(6)
    inboxes = federation.share(federation.advertise())
    federation.reveal(federation.confirm(federation.upload(inboxes, federation.names[:4])))
    for reply in federation.reveals.values():
        alive, dropped = {site for site, _ in reply.self_shares}, {site for site, _ in reply.mask_shares}
        assert (alive, dropped) == (set(federation.names[:4]), set(federation.names[4:]))


def test_masks_of_sites_with_different_models_do_not_cancel() -> None:
    """The second line behind the signatures: the model's hash is in every mask key."""
    secret = keys.Exchange(bytes(32)).secret(keys.public_key(b"1" * 32))
    federation = Federation(4)
    begin, parameters = federation.coordinator.begin, federation.contract.parameters(4)
    seeds = {
        keys.mask_seed(
            secret,
            transcript=bytes(32),
            context=context(federation.contract, dataclasses.replace(begin, model=model), parameters),
            one="a",
            other="b",
        )
        for model in (MODEL, bytes(32))
    }
    assert len(seeds) == 2


def test_messages_of_another_attempt_are_refused_at_every_step() -> None:
    old, new = Federation(4), Federation(4, attempt=2)
    old_peers, new_peers = old.advertise(), new.advertise()
    site = new.sites["site-000"]
    with pytest.raises(StaleError):
        site.share(old_peers)
    with pytest.raises(StaleError):
        site.share(
            dataclasses.replace(new_peers, advertised=(new_peers.advertised[0], *old_peers.advertised[1:]))
        )
    relabelled = [dataclasses.replace(m, context=new_peers.context) for m in old_peers.advertised[1:]]
    with pytest.raises(SignatureError):
        site.share(dataclasses.replace(new_peers, advertised=(new_peers.advertised[0], *relabelled)))
    old_inboxes, new_inboxes = old.share(old_peers), new.share(new_peers)
    with pytest.raises(StaleError):
        site.receive(old_inboxes["site-000"])
    replayed = dataclasses.replace(new_inboxes["site-000"], sealed=old_inboxes["site-000"].sealed)
    with pytest.raises(ShareError):
        site.receive(replayed)
    old_survivors, new_survivors = old.upload(old_inboxes), new.upload(new_inboxes)
    with pytest.raises(StaleError):
        site.confirm(old_survivors)
    old_request, new_request = old.confirm(old_survivors), new.confirm(new_survivors)
    with pytest.raises(StaleError):
        site.unmask(old_request)
    with pytest.raises(SignatureError):
        site.unmask(dataclasses.replace(new_request, signatures=old_request.signatures))
    assert not new.marks["site-000"]


def test_cohorts_that_cannot_be_are_refused() -> None:
    federation = Federation(4)
    begin, site = federation.coordinator.begin, federation.sites["site-000"]
    for cohort in (
        begin.cohort[1:],
        begin.cohort[::-1],
        (begin.cohort[0], *begin.cohort),
        (*begin.cohort, "site-999"),
    ):
        with pytest.raises(MemberError):
            site.advertise(dataclasses.replace(begin, cohort=cohort))
    with pytest.raises(ThresholdError):
        site.advertise(dataclasses.replace(begin, threshold=begin.threshold + 1))
    site.minimum = 5
    with pytest.raises(TooFewSitesError, match="cohort"):
        site.advertise(begin)
    site.minimum = 4
    site.advertise(begin)


def test_a_site_of_the_roster_outside_the_cohort_is_refused() -> None:
    """It may collude and sign whatever it is asked to: it is still not one of the sites that were drawn."""
    federation = Federation(5)
    outsider = federation.names[4]
    federation.names = federation.names[:4]
    federation.coordinator = Coordinator(federation.contract, 1, 1, MODEL, federation.names)
    peers = federation.advertise()
    colluding = federation.sites[outsider]
    extra = colluding._sign(dataclasses.replace(peers.advertised[0], site=outsider))
    longer = dataclasses.replace(peers, advertised=(*peers.advertised, extra))
    with pytest.raises(MemberError, match=outsider):
        federation.sites["site-000"].share(longer)
    with pytest.raises(MemberError, match=outsider):
        federation.coordinator.shared(colluding._sign(Shares(peers.context, outsider, bytes(32), ())))


def test_lists_that_cannot_be_are_refused_at_every_step() -> None:
    error: type[SecureSumError]
    change: dict[str, Any]
    federation = Federation(5, minimum=4)
    peers = federation.advertise()
    site, name = federation.sites["site-000"], "site-000"
    for advertised, error in (
        (peers.advertised[1:], MemberError),  # own key missing
        (peers.advertised[::-1], MemberError),
        ((*peers.advertised, peers.advertised[-1]), MemberError),
        ((*peers.advertised, dataclasses.replace(peers.advertised[-1], site="site-9")), MemberError),
        (peers.advertised[:3], TooFewSitesError),
    ):
        with pytest.raises(error):
            site.share(dataclasses.replace(peers, advertised=advertised))
    inboxes = federation.share(peers)
    inbox = inboxes[name]
    for sharers, sealed, error in (
        (inbox.sharers[1:], inbox.sealed, MemberError),
        (inbox.sharers[::-1], inbox.sealed, MemberError),
        ((*inbox.sharers, "site-9"), inbox.sealed, MemberError),
        (inbox.sharers[:3], inbox.sealed[:2], TooFewSitesError),
        (inbox.sharers, inbox.sealed[1:], ShareError),
        (inbox.sharers[:4], inbox.sealed, ShareError),
        (inbox.sharers, (inbox.sealed[0], *inbox.sealed), MemberError),
        (inbox.sharers, (*inbox.sealed[:3], (inbox.sealed[3][0], inbox.sealed[2][1])), ShareError),
        (inbox.sharers, (*inbox.sealed[:3], (inbox.sealed[3][0], b"")), ShareError),
    ):
        with pytest.raises(error):
            site.receive(Inbox(inbox.context, sharers, sealed))
    survivors = federation.upload(inboxes)
    ctx, listed = survivors.context, survivors.survivors
    for wrong, error in (
        (listed[1:], MemberError),
        (listed[::-1], MemberError),
        ((*listed, listed[-1]), MemberError),
        ((*listed, "site-9"), MemberError),
        (listed[:3], TooFewSitesError),
    ):
        with pytest.raises(error):
            site.confirm(Survivors(ctx, wrong))
    request = federation.confirm(survivors)
    digest = survivors_digest(ctx, listed)
    forged = site._sign(Confirm(ctx, name, digest)).signature
    for change, error in (
        ({"survivors": listed[:4]}, AgreementError),
        ({"signatures": request.signatures[:2]}, AgreementError),
        ({"signatures": (request.signatures[0],) * 5}, MemberError),
        ({"signatures": tuple((site_, forged) for site_, _ in request.signatures)}, SignatureError),
        ({"signatures": (*request.signatures[:4], ("site-9", forged))}, MemberError),
        ({"dropouts": ("site-004",)}, ExclusiveError),
        ({"dropouts": ("site-9",)}, MemberError),
    ):
        with pytest.raises(error):
            site.unmask(dataclasses.replace(request, **change))
    assert not federation.marks[name]
    site.unmask(request)


def test_only_survivors_vouch_for_the_list_and_dropouts_come_in_order() -> None:
    federation = Federation(7)
    inboxes = federation.share(federation.advertise())
    request = federation.confirm(federation.upload(inboxes, federation.names[:5]))
    site, dropped = federation.sites["site-000"], federation.sites["site-005"]
    digest = survivors_digest(request.context, request.survivors)
    vouched = dropped._sign(Confirm(request.context, dropped.name, digest)).signature
    signatures = (*request.signatures, (dropped.name, vouched))
    with pytest.raises(MemberError, match="site-005"):
        site.unmask(dataclasses.replace(request, signatures=signatures))
    with pytest.raises(MemberError, match="sorted by name"):
        site.unmask(dataclasses.replace(request, dropouts=request.dropouts[::-1]))
    site.unmask(request)


def test_a_retry_over_the_same_survivors_is_answered() -> None:
    """After a crash between answer and sum, the round can be opened if nobody else is missing."""
    first = Federation(4)
    inboxes = first.share(first.advertise())
    first.reveal(first.confirm(first.upload(inboxes, first.names[:3])))
    second = Federation(4, attempt=2)
    for name, site in second.sites.items():
        site._earlier = next(iter(first.marks[name]), None)
    inboxes = second.share(second.advertise())
    second.reveal(second.confirm(second.upload(inboxes, second.names[:3])))
    np.testing.assert_array_equal(second.coordinator.sum(), first.coordinator.sum())


def test_a_mark_of_another_round_or_run_does_not_bind() -> None:
    for mark in (Answered("run", 2, 1, b"x"), Answered("walk", 1, 1, b"x")):
        federation = Federation(3, options={"earlier": mark})
        federation.reveal(federation.to_request())
        np.testing.assert_array_equal(federation.coordinator.sum(), federation.plain_sum())


# Attacks by sites. The coordinator refuses, or the sum is exact.


def wrong_share(share: bytes) -> bytes:
    return (int.from_bytes(share, "big") ^ 1).to_bytes(shamir.SHARE, "big")


def reveals_wrong_shares(kind: type[Coordinator], answering: int) -> masks.Ring:
    """A holder reveals shares that are not the ones it was given; t or more others do not."""
    federation = Federation(6, coordinator=kind)
    request = federation.confirm(federation.upload(federation.share(federation.advertise())))
    liar = federation.sites["site-001"]
    reply = liar.unmask(request)
    lie = tuple((site, wrong_share(share)) for site, share in reply.self_shares)
    federation.coordinator.revealed(liar._sign(dataclasses.replace(reply, self_shares=lie)))
    federation.reveal(request, [name for name in federation.names if name != liar.name][: answering - 1])
    return federation.coordinator.sum() - federation.plain_sum()


class TakesAnySeed(Coordinator):
    def _fits_commitment(self, site: str, seed: bytes) -> bool:
        return True


@pytest.mark.parametrize("answering", [5, 6])
def test_a_wrong_share_is_left_out_where_others_are_enough(answering: int) -> None:
    assert not reveals_wrong_shares(Coordinator, answering).any()
    assert reveals_wrong_shares(TakesAnySeed, answering).any()  # unnoticed: the sum is wrong


def test_a_wrong_share_is_noticed_where_others_are_not_enough() -> None:
    with pytest.raises(ReconstructionError, match="site-000"):
        reveals_wrong_shares(Coordinator, 4)
    assert reveals_wrong_shares(TakesAnySeed, 4).any()


def advertises_a_key_it_does_not_share(kind: type[Coordinator]) -> masks.Ring:
    """A site shares another s than the one it masks with, and drops out."""
    federation = Federation(6, coordinator=kind)
    liar = federation.sites["site-002"]
    peers = federation.advertise()
    liar._mask_private = bytes(32)
    inboxes = federation.share(peers)
    others = [name for name in federation.names if name != liar.name]
    federation.reveal(federation.confirm(federation.upload(inboxes, others)))
    return federation.coordinator.sum() - federation.plain_sum(others)


class TakesAnyPrivateKey(Coordinator):
    def _fits_key(self, site: str, private: bytes) -> bool:
        return True


def test_a_wrong_key_is_noticed() -> None:
    with pytest.raises(ReconstructionError, match="site-002"):
        advertises_a_key_it_does_not_share(Coordinator)
    assert advertises_a_key_it_does_not_share(TakesAnyPrivateKey).any()


def commits_to_another_seed(kind: type[Coordinator]) -> masks.Ring:
    """A site masks with another b than the one it shares, and commits to the one it masks with."""
    federation = Federation(6, coordinator=kind)
    liar = federation.sites["site-002"]
    peers = federation.advertise()
    shares = liar.share(peers)
    liar._self_seed = bytes(32)
    ctx = federation.coordinator.attempt.context
    lie = dataclasses.replace(shares, commitment=hashlib.sha256(bytes(32) + ctx).digest())
    liar._done[1] = (peers, liar._sign(lie))
    federation.reveal(federation.confirm(federation.upload(federation.share(peers))))
    return federation.coordinator.sum() - federation.plain_sum()


def test_a_wrong_commitment_is_noticed() -> None:
    with pytest.raises(ReconstructionError, match="site-002"):
        commits_to_another_seed(Coordinator)
    assert commits_to_another_seed(TakesAnySeed).any()


def uploads_one_element(kind: type[Coordinator]) -> masks.Ring:
    """A vector of the wrong length, of a kind that NumPy would spread over the whole accumulator."""
    federation = Federation(4, coordinator=kind)
    inboxes = federation.share(federation.advertise())
    liar = federation.names[0]
    statement = federation.mask(liar, inboxes[liar])
    try:
        federation.coordinator.fold(statement, federation.masked[liar][:1])
        survivors = federation.upload(inboxes, federation.names[1:])
    except MaskError:
        survivors = federation.upload(inboxes, federation.names[1:])
    federation.reveal(federation.confirm(survivors))
    return federation.coordinator.sum() - federation.plain_sum(survivors.survivors)


class AddsAnyVector(Coordinator):
    def _check_upload(self, site: str, vector: masks.Ring) -> None:
        pass


def test_a_wrong_length_is_refused_and_the_others_are_summed() -> None:
    assert not uploads_one_element(Coordinator).any()
    assert uploads_one_element(AddsAnyVector).any()
    federation = Federation(4)
    inboxes = federation.share(federation.advertise())
    statement = federation.mask("site-000", inboxes["site-000"])
    vector = federation.masked["site-000"]
    wrong: Any
    for wrong in (
        vector[:-1],
        np.append(vector, vector),
        vector.astype(np.uint16),
        vector.astype(np.float64),
    ):
        with pytest.raises(MaskError):
            federation.coordinator.fold(statement, wrong)
    federation.coordinator.fold(statement, vector)
    with pytest.raises(StepError):
        federation.coordinator.fold(statement, vector)


def speaks_for_another(kind: type[Coordinator]) -> Peers:
    """A site, or someone on the line, sends keys in the name of another site."""
    federation = Federation(4, coordinator=kind)
    mallory = federation.sites["site-003"]
    message = mallory.advertise(federation.coordinator.begin)
    federation.coordinator.advertised(mallory._sign(dataclasses.replace(message, site="site-000")))
    return federation.advertise(["site-001", "site-002"])


class TakesAnySignature(Coordinator):
    def _check_signature(self, message: Any) -> None:
        pass


def test_a_wrong_signature_is_refused() -> None:
    with pytest.raises(SignatureError, match="site-000"):
        speaks_for_another(Coordinator)
    assert speaks_for_another(TakesAnySignature).advertised[0].site == "site-000"


def test_a_changed_message_is_refused_at_every_step() -> None:
    federation = Federation(3)
    coordinator, site = federation.coordinator, federation.sites["site-000"]

    def refused(take: Callable[[Any], None], message: Any, **change: Any) -> None:
        with pytest.raises(SignatureError):
            take(dataclasses.replace(message, **change))
        with pytest.raises(SignatureError):
            take(dataclasses.replace(message, signature=bytes(64)))

    refused(coordinator.advertised, site.advertise(coordinator.begin), mask_key=keys.public_key(bytes(32)))
    peers = federation.advertise()
    refused(coordinator.shared, site.share(peers), commitment=bytes(32))
    inboxes = federation.share(peers)
    statement = federation.mask("site-000", inboxes["site-000"])
    with pytest.raises(SignatureError):
        coordinator.fold(dataclasses.replace(statement, digest=bytes(32)), federation.masked["site-000"])
    coordinator.fold(statement, federation.masked["site-000"])
    survivors = federation.upload(inboxes, federation.names[1:])
    reply = site.confirm(survivors)
    refused(coordinator.confirmed, reply, survivors=bytes(32))
    with pytest.raises(AgreementError):
        coordinator.confirmed(site._sign(dataclasses.replace(reply, survivors=bytes(32))))
    request = federation.confirm(survivors)
    shares = site.unmask(request)
    refused(coordinator.revealed, shares, self_shares=shares.self_shares[::-1])
    for lie in (
        shares.self_shares[::-1],
        shares.self_shares[1:],
        ((shares.self_shares[0][0], b""), *shares.self_shares[1:]),
    ):
        with pytest.raises(ShareError):
            coordinator.revealed(site._sign(dataclasses.replace(shares, self_shares=lie)))
    federation.reveal(request)
    np.testing.assert_array_equal(coordinator.sum(), federation.plain_sum())


def test_a_key_of_low_order_is_refused_before_it_reaches_a_site() -> None:
    federation = Federation(3)
    site = federation.sites["site-000"]
    message = site.advertise(federation.coordinator.begin)
    for key, value in (("share_key", bytes(32)), ("mask_key", bytes(32)), ("mask_key", b"short")):
        change: Any = {key: value}
        with pytest.raises(OneTimeKeyError):
            federation.coordinator.advertised(site._sign(dataclasses.replace(message, **change)))
