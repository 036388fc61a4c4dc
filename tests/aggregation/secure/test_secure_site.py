"""What a site refuses, and what each of its checks prevents.

The attacks come last. Each is a function in which a lying coordinator, alone or with colluding sites, plays against
sites of a given class. It is run twice: against `SecureSite` it ends in a typed refusal; against a double whose one
check is taken out it succeeds, in most cases by opening one site's update. So the attack is real, and its test fails
when the check is gone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.aggregation.secure import keys, shamir
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import Message, SecureSite, Seeds
from cloister.aggregation.secure.secure_sum import (
    Answered,
    Attempt,
    Contract,
    context,
    share_hash,
    survivors_digest,
    transcript,
)
from cloister.aggregation.vector import masks
from cloister.protocol.errors import (
    AgreementError,
    AnsweredError,
    ExclusiveError,
    MemberError,
    OneTimeKeyError,
    SecureSumError,
    ShareError,
    SignatureError,
    StaleError,
    StepError,
    TooFewSitesError,
    UpdateError,
)
from cloister.protocol.identity.roster import Card, Roster
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.messages import (
    NOTHING_CARRIED,
    TRAIN,
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Peers,
    Reveal,
    Signed,
    Step,
    Survivors,
    Unmask,
)
from cloister.protocol.plan.threshold import Parameters, Tolerance, assumed, parameters, tolerated
from cloister.tests.parties import protocol_parties
from cloister.tests.parties.protocol_parties import (
    LENGTH,
    MODEL,
    Parties,
    TrustsAnyKey,
    names_of,
    roster,
    signed,
)
from cloister.tests.tools.raises import raises

# The order of the steps.


def test_messages_handled_again_give_the_same_reply() -> None:
    parties = Parties(3)
    parties.reveal(parties.to_request())
    site, said = parties.sites["site-001"], parties.said["site-001"]
    begin, peers, inbox, survivors, request = parties.told["site-001"]
    assert isinstance(begin, Begin)
    assert isinstance(peers, Peers)
    assert isinstance(inbox, Inbox)
    assert isinstance(survivors, Survivors)
    assert isinstance(request, Unmask)
    assert [site.advertise(begin), site.share(peers)] == said[:2]
    assert parties.mask("site-001", inbox) == said[2]
    assert [site.confirm(survivors), site.unmask(request)] == said[3:5]
    assert len(parties.marks["site-001"]) == 1


def test_steps_out_of_order_are_refused() -> None:
    parties, other = Parties(3), Parties(3)
    peers = other.advertise()
    site = parties.sites["site-000"]
    for call in (
        lambda: site.share(peers),
        lambda: site.receive(Inbox(bytes(32), (), (), ())),
        lambda: site.mask([(0, np.zeros(LENGTH, np.uint32))], instructions=MODEL),
        lambda: site.take_seeds(instructions=MODEL),
        lambda: site.masked(bytes(32)),
        lambda: site.confirm(Survivors(bytes(32), ())),
    ):
        with pytest.raises(StepError):
            call()
    inboxes = other.share(peers)
    site, name = other.sites["site-000"], "site-000"
    site.receive(inboxes[name])
    with raises(StepError, "masking", says="37 elements"):
        site.masked(bytes(32))
    with raises(StepError, "survivors", says="upload"):
        site.confirm(Survivors(other.coordinator.attempt.context, other.names))
    with raises(StepError, "unmask", says="signature"):
        site.unmask(Unmask(other.coordinator.attempt.context, (), (), (), ()))


def test_messages_of_another_attempt_are_refused_at_every_step() -> None:
    old, new = Parties(4), Parties(4, attempt=2)
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
    old_survivors, new_survivors = old.upload(old_inboxes), new.upload(new_inboxes)
    with pytest.raises(StaleError):
        site.confirm(old_survivors)
    old_request, new_request = (
        parties.confirm(survivors)["site-000"]
        for parties, survivors in ((old, old_survivors), (new, new_survivors))
    )
    with pytest.raises(StaleError):
        site.unmask(old_request)
    for change in ({"signatures": old_request.signatures}, {"statements": old_request.statements}):
        with pytest.raises(SignatureError):
            site.unmask(dataclasses.replace(new_request, **change))
    assert not new.marks["site-000"]


# Masking.


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    bits=st.sampled_from([16, 32]),
    order=st.randoms(),
    ranks=st.booleans(),
)
def test_any_shard_layout_gives_the_same_upload(cuts: list[int], bits: Any, order: Any, ranks: bool) -> None:
    """A site masks its whole vector in any pieces, or hands its seeds to its ranks, which mask in any order."""
    whole, sharded = (Parties(3, ring_bits=bits, length=5000) for _ in range(2))
    inboxes = [parties.share(parties.advertise()) for parties in (whole, sharded)]
    name = whole.names[1]
    whole.mask(name, inboxes[0][name])
    site, vector = sharded.sites[name], sharded.vectors[name].copy()
    site.receive(inboxes[1][name])
    bounds = [0, *sorted(cuts), 5000]
    shards = [(start, vector[start:end]) for start, end in itertools.pairwise(bounds)]
    if ranks:
        order.shuffle(shards)
        seeds = site.take_seeds(instructions=MODEL)
        for start, shard in shards:
            masks.apply(shard, seeds.add, seeds.subtract, offset=start)
    else:
        site.mask(shards, instructions=MODEL)
    site.masked(bytes(32))
    np.testing.assert_array_equal(whole.masked[name], vector)
    assert not np.array_equal(vector, whole.vectors[name])


def test_an_element_is_masked_once() -> None:
    parties = Parties(3)
    inboxes = parties.share(parties.advertise())
    site, vector = parties.sites["site-000"], np.zeros(LENGTH, np.uint32)
    site.receive(inboxes["site-000"])
    others: list[Any] = [vector.astype(np.uint16), vector.astype(np.int32), vector.reshape(1, -1)]
    for other in others:
        with raises(UpdateError, "span at 0", says="uint32"):
            site.mask([(0, other)], instructions=MODEL)
    parts = {(start, end): (start, vector[start:end]) for start, end in ((0, 10), (9, LENGTH), (10, LENGTH))}
    for pieces in (
        [parts[0, 10]],
        [parts[10, LENGTH]],
        [parts[0, 10], parts[9, LENGTH]],
        [(1, vector)],
        [parts[10, LENGTH], parts[0, 10]],
    ):
        with pytest.raises(UpdateError):
            site.mask(pieces, instructions=MODEL)
    with raises(StaleError, "instructions"):
        site.mask([(0, vector)], instructions=bytes(32))
    assert not vector.any(), "nothing is masked by what is refused"
    with raises(StepError, "masking", says="37 elements"):
        site.masked(bytes(32))
    site.mask([parts[0, 10], parts[10, LENGTH]], instructions=MODEL)
    with raises(StepError, "masking"):
        site.mask([(0, vector)], instructions=MODEL)
    with raises(StepError, "masking"):
        site.take_seeds(instructions=MODEL)
    site.masked(bytes(32))
    with pytest.raises(StepError):
        site.masked(b"1" * 32)
    with pytest.raises(StepError):
        site.mask([(0, vector)], instructions=MODEL)


def test_a_vector_that_was_not_masked_to_the_end_is_never_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    parties = Parties(3, length=10**6)
    inboxes = parties.share(parties.advertise())
    site, vector = parties.sites["site-000"], np.zeros(10**6, np.uint32)
    site.receive(inboxes["site-000"])

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(masks, "_apply_part", fail)
    with pytest.raises(MemoryError):
        site.mask([(0, vector)], instructions=MODEL, threads=2)
    with raises(StepError, "masking", says="masked first"):
        site.masked(bytes(32))
    with raises(StepError, "masking"):
        site.mask([(0, vector)], instructions=MODEL)


def test_seeds_are_given_once() -> None:
    parties = Parties(3)
    inboxes = parties.share(parties.advertise())
    site = parties.sites["site-000"]
    site.receive(inboxes["site-000"])
    site.take_seeds(instructions=MODEL)
    with pytest.raises(StepError):
        site.take_seeds(instructions=MODEL)
    with pytest.raises(StepError):
        site.mask([(0, np.zeros(LENGTH, np.uint32))], instructions=MODEL)


def test_seeds_are_not_shown_in_logs() -> None:
    assert "secret" not in repr(Seeds((b"secret",), (b"secret",)))


# Lists, and who is in them.


def test_a_site_whose_neighbours_are_gone_shares_nothing() -> None:
    """The sites are enough in all, but too few of them hold shares of this one."""
    parties = Parties(200, site=TrustsAnyKey, tolerance=Tolerance(0.1, 0.1))
    name, attempt = parties.names[0], parties.coordinator.attempt
    own = parties.sites[name].advertise(parties.coordinator.begin)
    key = keys.public_key(bytes(32))
    everything = [
        own,
        *(Advertise(own.context, other, key, key, NOTHING_CARRIED) for other in parties.names[1:]),
    ]
    gone = attempt.parameters.k - attempt.parameters.threshold
    for more, reply in ((1, None), (0, attempt.parameters.threshold)):
        absent = attempt.graph.neighbours(name)[: gone + more]
        peers = Peers(own.context, tuple(message for message in everything if message.site not in absent))
        assert len(peers.advertised) >= attempt.parameters.quorum
        if reply is None:
            with raises(TooFewSitesError, "holders of site-000's shares"):
                parties.sites[name].share(peers)
        else:
            assert len(parties.sites[name].share(peers).sealed) == reply


def test_a_cohort_without_the_site_or_too_small_is_refused() -> None:
    parties = Parties(4)
    begin, site = parties.coordinator.begin, parties.sites["site-000"]
    elsewhere = dataclasses.replace(site.contract, roster=roster(names_of(5)[1:]))
    site.contract = elsewhere
    with raises(MemberError, "cohort", says="draw"):
        site.advertise(begin)
    site.contract = parties.contract
    site.member = dataclasses.replace(site.member, minimum=5)
    with raises(TooFewSitesError, "cohort"):
        site.advertise(begin)
    site.member = dataclasses.replace(site.member, minimum=4)
    site.advertise(begin)


def test_a_site_of_the_roster_outside_the_cohort_is_refused() -> None:
    """It may collude and sign anything that it is asked to: it is still not one of the sites that were drawn."""
    parties = Parties(4, roster=roster(names_of(5)))
    (outsider,) = set(names_of(5)).difference(parties.names)
    peers = parties.advertise()
    extra = signed(dataclasses.replace(peers.advertised[0], site=outsider))
    everybody = tuple(sorted((*peers.advertised, extra), key=lambda message: message.site))
    with raises(MemberError, "keys", says=outsider):
        parties.sites[parties.names[0]].share(dataclasses.replace(peers, advertised=everybody))


def test_lists_that_cannot_be_are_refused_at_every_step() -> None:
    error: type[SecureSumError]
    change: dict[str, Any]
    parties = Parties(5, minimum=4)
    peers = parties.advertise()
    site, name = parties.sites["site-000"], "site-000"
    for advertised, error in (
        (peers.advertised[1:], MemberError),  # own key missing
        (peers.advertised[::-1], MemberError),
        ((*peers.advertised, peers.advertised[-1]), MemberError),
        ((*peers.advertised, dataclasses.replace(peers.advertised[-1], site="site-9")), MemberError),
        (peers.advertised[:3], TooFewSitesError),
    ):
        with pytest.raises(error):
            site.share(dataclasses.replace(peers, advertised=advertised))
    inboxes = parties.share(peers)
    inbox = inboxes[name]
    sealed, hashes = inbox.sealed, inbox.hashes
    for change, error in (
        ({"sharers": inbox.sharers[1:]}, MemberError),
        ({"sharers": inbox.sharers[::-1]}, MemberError),
        ({"sharers": (*inbox.sharers, "site-9")}, MemberError),
        ({"sharers": inbox.sharers[:3], "sealed": sealed[:2], "hashes": hashes[:2]}, TooFewSitesError),
        ({"sealed": sealed[1:]}, ShareError),
        ({"sealed": sealed[::-1]}, ShareError),
        ({"hashes": hashes[1:]}, ShareError),
        ({"hashes": hashes[::-1]}, ShareError),
        ({"sharers": inbox.sharers[:4]}, ShareError),
        ({"sealed": (sealed[0], *sealed)}, ShareError),
        ({"hashes": (hashes[0], *hashes)}, ShareError),
    ):
        with pytest.raises(error):
            site.receive(dataclasses.replace(inbox, **change))
    survivors = parties.upload(inboxes)
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
    request = parties.confirm(survivors)[name]
    digest = survivors_digest(parties.agreed(peers, inbox.sharers), listed)
    own = signed(Confirm(ctx, name, digest)).signature
    for change, error in (
        ({"survivors": listed[:4]}, AgreementError),
        ({"signatures": request.signatures[:2]}, AgreementError),
        ({"signatures": (request.signatures[0],) * 5}, MemberError),
        ({"signatures": tuple((other, own) for other, _ in request.signatures)}, SignatureError),
        ({"signatures": (*request.signatures[:4], ("site-9", own))}, MemberError),
        ({"dropouts": ("site-004",)}, ExclusiveError),
        ({"dropouts": ("site-9",)}, MemberError),
        ({"statements": request.statements[1:]}, MemberError),
        ({"statements": request.statements[::-1]}, MemberError),
        ({"statements": (request.statements[1], *request.statements[1:])}, MemberError),
        ({"statements": (("site-000", *request.statements[1][1:]), *request.statements[1:])}, SignatureError),
    ):
        with pytest.raises(error):
            site.unmask(dataclasses.replace(request, **change))
    assert not parties.marks[name]
    site.unmask(request)


def test_only_survivors_vouch_for_the_list_and_dropouts_come_in_order() -> None:
    parties = Parties(7)
    peers = parties.advertise()
    request = parties.confirm(parties.upload(parties.share(peers), parties.names[:5]))["site-000"]
    site, dropped = parties.sites["site-000"], "site-005"
    digest = survivors_digest(parties.agreed(peers, parties.names), request.survivors)
    vouched = signed(Confirm(request.context, dropped, digest)).signature
    signatures = (*request.signatures, (dropped, vouched))
    with raises(MemberError, "signatures", says=dropped):
        site.unmask(dataclasses.replace(request, signatures=signatures))
    with raises(MemberError, "dropouts", says="sorted"):
        site.unmask(dataclasses.replace(request, dropouts=request.dropouts[::-1]))
    site.unmask(request)


# The mark.


def test_the_mark_is_written_before_shares_leave() -> None:
    """If it cannot be written, nothing is revealed, and the site answers once it can."""
    parties = Parties(3)
    request = parties.to_request()["site-000"]
    site = parties.sites["site-000"]
    wrote = site.answered

    def full(mark: Answered) -> None:
        raise OSError("disk full")

    site.answered = full
    with raises(OSError, "disk full"):
        site.unmask(request)
    site.answered = wrote
    assert site.unmask(request).self_shares
    assert [(mark.run, mark.round, mark.attempt) for mark in parties.marks["site-000"]] == [("run", 1, 1)]


# What a coordinator can compute from the messages that it has.


def decrypt(
    peers: Peers, private: bytes, sealed: bytes, *, sender: str, recipient: str
) -> tuple[bytes, bytes]:
    """The shares of b and s in a ciphertext, with the private key under which the recipient is sent shares."""
    public = {message.site: message.share_key for message in peers.advertised}
    key = keys.share_key(
        keys.Exchange(private).secret(public[sender]),
        transcript=transcript(peers.context, peers.advertised),
        context=peers.context,
        sender=sender,
        recipient=recipient,
    )
    opened = keys.decrypt_share(sealed, key, context=peers.context, sender=sender, recipient=recipient)
    return opened[: shamir.SHARE], opened[shamir.SHARE :]


def open_update(
    parties: Parties,
    victim: str,
    seed: bytes,
    peers: Peers,
    private: bytes | None = None,
    privates: Mapping[str, bytes] = {},
) -> masks.Ring:
    """The victim's vector from its upload, its b, and its s (or the others' private mask keys)."""
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
        mask = keys.mask_seed(
            secret,
            transcript=transcript(peers.context, peers.advertised),
            context=peers.context,
            one=victim,
            other=other,
        )
        (subtract if victim < other else add).append(mask)
    opened = parties.masked[victim].copy()
    masks.apply(opened, add, subtract)
    return opened


def combine(parties: Parties, shares: Mapping[str, bytes]) -> bytes:
    """The secret from the shares that the named holders gave."""
    attempt = parties.coordinator.attempt
    holders = sorted(shares)[: attempt.parameters.threshold]
    interpolation = shamir.Interpolation([attempt.graph.index(holder) for holder in holders])
    return interpolation.secret([shares[holder] for holder in holders])


def assert_opened(parties: Parties, victim: str, opened: masks.Ring) -> None:
    np.testing.assert_array_equal(opened, parties.vectors[victim])


# Attacks.


def asks_for_both_secrets(kind: type[SecureSite]) -> None:
    """One site in both lists."""
    parties = Parties(4, site=kind)
    peers = parties.advertise()
    requests = parties.confirm(parties.upload(parties.share(peers)))
    victim = parties.names[0]
    both = dataclasses.replace(requests[victim], dropouts=(victim,))
    replies = {name: parties.sites[name].unmask(both) for name in parties.names}
    seed = combine(parties, {name: dict(reply.self_shares)[victim] for name, reply in replies.items()})
    private = combine(parties, {name: dict(reply.mask_shares)[victim] for name, reply in replies.items()})
    assert_opened(parties, victim, open_update(parties, victim, seed, peers, private))


class AnswersForBoth(SecureSite):
    def _check_exclusive(self, request: Unmask) -> None:
        pass


def shows_every_site_its_own_survivors(kind: type[SecureSite]) -> None:
    """Each site is shown a list of its own, with the 6 sites that every policy demands; only 4 are in all of them."""
    parties = Parties(10, site=kind, minimum=6)
    peers = parties.advertise()
    parties.upload(parties.share(peers))
    names, ctx = parties.names, parties.coordinator.attempt.context
    part, others = names[:4], names[4:]
    replies = {}
    for place, name in enumerate(names):
        extra = (
            {others[place % 6], others[(place + 1) % 6]} if name in part else {name, others[place % 6 - 1]}
        )
        listed = tuple(sorted({*part, *extra}))
        assert len(listed) == 6
        signature = parties.sites[name].confirm(Survivors(ctx, listed)).signature
        dropouts = tuple(site for site in names if site not in listed)
        request = Unmask(ctx, listed, dropouts, ((name, signature),), parties.statements(listed))
        replies[name] = parties.sites[name].unmask(request)
    opened = np.add.reduce([parties.masked[name] for name in part], dtype=np.uint32)
    seeds = [
        combine(parties, {name: dict(reply.self_shares)[site] for name, reply in replies.items()})
        for site in part
    ]
    masks.apply(opened, (), seeds)
    public = {message.site: message.mask_key for message in peers.advertised}
    for dropout in others:
        shares = {name: dict(reply.mask_shares).get(dropout) for name, reply in replies.items()}
        private = combine(parties, {name: share for name, share in shares.items() if share is not None})
        for site in part:
            seed = keys.mask_seed(
                keys.Exchange(private).secret(public[site]),
                transcript=transcript(ctx, peers.advertised),
                context=ctx,
                one=site,
                other=dropout,
            )
            masks.apply(opened, (), [seed])  # part sorts before others
    np.testing.assert_array_equal(opened, parties.plain_sum(part))  # 4 updates, where 6 are the least


class TrustsAnyList(SecureSite):
    def _check_agreement(self, request: Unmask) -> None:
        pass


def swaps_the_keys_of_all_peers(kind: type[SecureSite]) -> None:
    """The coordinator stands between the victim and all others, with keys of its own."""
    parties = Parties(5, site=kind)
    real = parties.advertise()
    victim, ctx = parties.names[2], parties.coordinator.attempt.context
    privates = {name: hashlib.sha256(name.encode()).digest() for name in parties.names}

    def forged_of(message: Advertise) -> Advertise:
        own = keys.public_key(privates[message.site])
        return dataclasses.replace(message, share_key=own, mask_key=own)

    forged = Peers(ctx, tuple(m if m.site == victim else forged_of(m) for m in real.advertised))
    shares = parties.sites[victim].share(forged)
    opened: dict[str, bytes] = {}
    sealed = []
    for other, ciphertext in shares.sealed:
        opened[other], _ = decrypt(forged, privates[other], ciphertext, sender=victim, recipient=other)
        key = keys.share_key(
            keys.Exchange(privates[other]).secret(real.advertised[2].share_key),
            transcript=transcript(ctx, forged.advertised),
            context=ctx,
            sender=other,
            recipient=victim,
        )
        sealed.append(
            (other, keys.encrypt_share(bytes(66), key, context=ctx, sender=other, recipient=victim))
        )
    hashes = tuple(
        (other, *(share_hash(ctx, bytes(33), sender=other, holder=victim),) * 2) for other, _ in sealed
    )
    parties.mask(victim, Inbox(ctx, parties.names, tuple(sealed), hashes))
    found = open_update(parties, victim, combine(parties, opened), forged, privates=privates)
    assert_opened(parties, victim, found)


def replays_the_share_step(kind: type[SecureSite]) -> None:
    """The same step again, with other peers: the same secrets would be shared by two polynomials."""
    parties = Parties(6, site=kind)
    peers = parties.advertise()
    site = parties.sites["site-000"]
    first = site.share(peers)
    second = site.share(dataclasses.replace(peers, advertised=peers.advertised[:4]))
    assert [to for to, _ in second.sealed] == [to for to, _ in first.sealed[:3]]


class AnswersEachTime(SecureSite):
    def _check_order(self, step: Step, message: Message) -> Any:
        return None


def asks_for_an_old_attempt(kind: type[SecureSite]) -> None:
    """A site that was in attempt 3 is drawn into attempt 2 again."""
    parties = Parties(4, site=kind, attempt=2, newest=(1, 3))
    np.testing.assert_array_equal(parties.run(), parties.plain_sum())


class JoinsAnyAttempt(SecureSite):
    def _check_fresh(self, begin: Begin) -> None:
        pass


def takes_two_sums_of_one_round(kind: type[SecureSite]) -> None:
    """Attempt 1 is opened but said to have failed; attempt 2 leaves out one site: their difference is its update."""
    first = Parties(5, site=kind)
    whole = first.run()
    marks = {name: written[0] for name, written in first.marks.items()}
    second = Parties(5, site=kind, attempt=2, earlier=marks)
    victim = second.names[0]
    assert_opened(second, victim, whole - second.run({victim: 3}))


class ForgetsWhatItAnswered(SecureSite):
    def _check_earlier(self, survivors: tuple[str, ...]) -> None:
        pass


def gives_one_site_another_model(kind: type[SecureSite]) -> None:
    """The victim is given a model of the coordinator's choice, and is summed with all the others."""
    parties = Parties(4, site=kind)
    begin = parties.coordinator.begin
    victim, other = parties.sites["site-000"], dataclasses.replace(begin, instructions=b"x" * 32)
    messages = [site.advertise(other if site is victim else begin) for site in parties.sites.values()]
    ctx = messages[1].context
    peers = Peers(ctx, tuple(messages))
    replies = [site.share(peers) for site in parties.sites.values()]
    sealed = {reply.site: dict(reply.sealed) for reply in replies}
    total = np.zeros(LENGTH, np.uint32)
    for name, site in parties.sites.items():
        others = [sender for sender in parties.names if sender != name]
        inbox = tuple((sender, sealed[sender][name]) for sender in others)
        hashes = tuple((sender, bytes(32), bytes(32)) for sender in others)  # no share is needed for this
        site.receive(Inbox(ctx, parties.names, inbox, hashes))
        vector = parties.vectors[name].copy()
        site.mask([(0, vector)], instructions=other.instructions if site is victim else MODEL)
        total += vector
    masks.apply(total, (), [parties.self_seed(name) for name in parties.names])
    np.testing.assert_array_equal(total, parties.plain_sum())


class IgnoresTheModel(SecureSite):
    def _attempt(self, begin: Begin) -> Attempt:
        attempt = super()._attempt(begin)
        any_model, cohort = dataclasses.replace(begin, instructions=b""), attempt.graph.sites
        attempt.context = context(self.contract, any_model, cohort, attempt.parameters)
        return attempt


@dataclasses.dataclass(frozen=True)
class Those(Draw):
    """A draw that the coordinator chooses."""

    sites: tuple[str, ...] = ()

    def cohort(self, sites: Iterable[str], round_number: int) -> tuple[str, ...]:
        return self.sites


class OfThose(Tolerance):
    """Colluders are a fraction of the sites that the coordinator chooses."""

    def parameters(self, sites: int, n: int) -> Parameters:
        return parameters(n, tolerated(n, self.dropouts), assumed(n, self.colluders))


class TakesTheOfferedCohort(SecureSite):
    """Its contract has the cohort that the coordinator shows."""


class TakesAnyContext(SecureCoordinator):
    def _check_signature(self, message: Signed) -> None:
        pass


def begins_with_fewer_sites(kind: type[SecureSite]) -> None:
    """Attempt 2 begins without the victim, so that n, A and t are lower; five honest sites answered in attempt 1.

    Two of the eleven sites collude: they answer both times. Four honest sites are left, enough for t = 6 but not 7.
    """
    first = Parties(11, site=kind, tolerance=Tolerance(0.1, 0.1))
    victim, colluding, answering = first.names[0], first.names[9:], first.names[:5]
    requests = first.to_request()
    first.reveal(requests, [*answering, *colluding])
    whole = first.coordinator.sum()
    marks = {name: first.marks[name][0] for name in answering}
    offered = dataclasses.replace(
        first.contract, draw=Those(0, TRAIN, 10, first.names[1:]), tolerance=OfThose(0.1, 0.1)
    )
    second = Parties(
        11, site=kind, coordinator=TakesAnyContext, attempt=2, earlier=marks, **fields_of(offered)
    )
    if kind is not TakesTheOfferedCohort:
        for site in second.sites.values():
            site.contract = first.contract
    second.vectors |= {name: first.vectors[name] for name in second.names}
    inboxes = second.share(second.advertise())
    signing = [name for name in second.names if name not in answering]
    second.reveal(second.confirm(second.upload(inboxes), signing), signing)
    assert_opened(first, victim, whole - second.coordinator.sum())


def fields_of(contract: Contract) -> dict[str, Any]:
    return {field.name: getattr(contract, field.name) for field in dataclasses.fields(contract)}


class TakesTheOfferedRoster(SecureSite):
    """Without the pinned roster: its contract has the roster that the coordinator shows."""


def invents_sites(kind: type[SecureSite]) -> None:
    """All sites but one are inventions of the coordinator: the sum less their zeros is the update."""
    victim, *invented = "site-000", *(f"sybil-{number}" for number in range(4))
    names = roster((victim, *invented))
    parties = Parties(5, site=kind, coordinator=TakesAnyContext, roster=names)
    if kind is not TakesTheOfferedRoster:
        parties.sites[victim].contract = Parties(5).contract
    for name in invented:
        parties.vectors[name][:] = 0
    assert_opened(parties, victim, parties.run())


def draws_too_small_a_cohort(kind: type[SecureSite]) -> None:
    """A cohort of the victim and one colluding site, where the victim demands three."""
    parties = Parties(2, site=kind, minimum=3)
    victim, colluding = parties.names
    assert_opened(parties, victim, parties.run() - parties.vectors[colluding])


class JoinsAnySum(SecureSite):
    def _check_size(self, what: str, size: int, least: int) -> None:
        pass


def changes_the_victims_own_key(kind: type[SecureSite]) -> None:
    """The victim is shown its own entry with keys of the coordinator's."""
    parties = Parties(4, site=kind)
    peers = parties.advertise()
    own = dataclasses.replace(peers.advertised[0], share_key=keys.public_key(bytes(32)))
    changed = dataclasses.replace(peers, advertised=(own, *peers.advertised[1:]))
    assert parties.sites["site-000"].share(changed).sealed


class IgnoresItsOwnKey(SecureSite):
    def _check_own_keys(self, returned: Advertise | None) -> None:
        pass


class SmallGraph(Tolerance):
    """Four neighbours for each of nine sites, of which four may drop out: k <= D, as above some hundred sites."""

    def parameters(self, sites: int, n: int) -> Parameters:
        return Parameters(n, 4, 0, 4, 3)


def tells_one_site_that_its_neighbours_are_gone(kind: type[SecureSite]) -> None:
    """The victim is told that all its neighbours dropped out after step 3, and the others that they did not.

    The victim then masks with no other site, and its neighbours reveal the seed of its own mask.
    """
    parties = Parties(9, site=kind, tolerance=SmallGraph(0.0, 0.0))
    victim, graph = parties.names[0], parties.coordinator.attempt.graph
    inboxes = parties.share(parties.advertise())
    gone = graph.neighbours(victim)
    left = tuple(name for name in parties.names if name not in gone)
    parties.mask(victim, dataclasses.replace(inboxes[victim], sharers=left, sealed=(), hashes=()))
    others = [name for name in parties.names if name != victim]
    for name in others:
        parties.mask(name, inboxes[name])
    survivors = Survivors(parties.coordinator.attempt.context, parties.names)
    signatures = tuple((name, parties.sites[name].confirm(survivors).signature) for name in others)
    shares = {}
    for name in gone:
        statements = parties.statements(graph.neighbours(name))
        request = Unmask(survivors.context, parties.names, (), signatures, statements)
        shares[name] = dict(parties.sites[name].unmask(request).self_shares)[victim]
    opened = parties.masked[victim].copy()
    masks.apply(opened, (), [combine(parties, shares)])
    assert_opened(parties, victim, opened)


class MasksWithAnySharers(SecureSite):
    """Two checks stand in the way: what a site masks with, and what its neighbours compare."""

    def _check_holders(self, present: Iterable[str]) -> None:
        pass

    def _check_masked_alike(self, request: Unmask) -> None:
        pass


def opens_two_models_in_one_round(kind: type[SecureSite]) -> None:
    """The same survivors give an update for a second model: a round of two sums, as any number of them."""
    first = Parties(5, site=kind)
    first.run()
    marks = {name: written[0] for name, written in first.marks.items()}
    other = hashlib.sha256(b"another model").digest()
    second = Parties(5, site=kind, attempt=2, earlier=marks, model=other)
    np.testing.assert_array_equal(second.run(), second.plain_sum())


def asks_twice_with_other_lists(kind: type[SecureSite]) -> None:
    """First all sites are survivors; then, in the same attempt, the victim has dropped out."""
    parties = Parties(5, site=kind)
    peers = parties.advertise()
    requests = parties.confirm(parties.upload(parties.share(peers)))
    parties.reveal(requests)
    victim, others = parties.names[0], parties.names[1:]
    shares = {name: dict(reply.self_shares)[victim] for name, reply in parties.reveals.items()}
    seed = combine(parties, shares)
    ctx = parties.coordinator.attempt.context
    signatures = tuple(
        (name, parties.sites[name].confirm(Survivors(ctx, others)).signature) for name in others
    )
    again = Unmask(ctx, others, (victim,), signatures, parties.statements(others))
    replies = {name: parties.sites[name].unmask(again) for name in others}
    private = combine(parties, {name: dict(reply.mask_shares)[victim] for name, reply in replies.items()})
    assert_opened(parties, victim, open_update(parties, victim, seed, peers, private))


class AnswersTwice(SecureSite):
    """Two checks stand in the way of one fact: at the signature and at the answer."""

    def _check_one_list(self, survivors: tuple[str, ...]) -> None:
        pass

    def _check_repeat(self, request: Unmask) -> Reveal | None:
        return None


def asks_for_the_vector_again(kind: type[SecureSite]) -> None:
    """The site has made its vector anew, with other noise: two vectors under one keystream give their difference."""
    parties = Parties(4, site=kind)
    inboxes = parties.share(parties.advertise())
    victim = parties.names[0]
    parties.mask(victim, inboxes[victim])
    first, before = parties.masked[victim], parties.vectors[victim]
    parties.vectors[victim] = before[::-1].copy()
    parties.mask(victim, inboxes[victim])
    np.testing.assert_array_equal(parties.masked[victim] - first, parties.vectors[victim] - before)


class MasksAnotherVector(SecureSite):
    def _check_same(self, signed: Masked, digest: bytes) -> None:
        pass


COORDINATOR_LIES: list[tuple[Callable[[type[SecureSite]], None], type[SecureSumError], type[SecureSite]]] = [
    (asks_for_both_secrets, ExclusiveError, AnswersForBoth),
    (shows_every_site_its_own_survivors, AgreementError, TrustsAnyList),
    (swaps_the_keys_of_all_peers, SignatureError, TrustsAnyKey),
    (replays_the_share_step, StepError, AnswersEachTime),
    (asks_for_an_old_attempt, StaleError, JoinsAnyAttempt),
    (takes_two_sums_of_one_round, AnsweredError, ForgetsWhatItAnswered),
    (gives_one_site_another_model, StaleError, IgnoresTheModel),
    (begins_with_fewer_sites, StaleError, TakesTheOfferedCohort),
    (invents_sites, StaleError, TakesTheOfferedRoster),
    (draws_too_small_a_cohort, TooFewSitesError, JoinsAnySum),
    (changes_the_victims_own_key, OneTimeKeyError, IgnoresItsOwnKey),
    (tells_one_site_that_its_neighbours_are_gone, TooFewSitesError, MasksWithAnySharers),
    (opens_two_models_in_one_round, AnsweredError, ForgetsWhatItAnswered),
    (asks_twice_with_other_lists, AgreementError, AnswersTwice),
    (asks_for_the_vector_again, StepError, MasksAnotherVector),
]


@pytest.mark.parametrize(("attack", "refusal", "double"), COORDINATOR_LIES, ids=lambda a: a.__name__)
def test_a_lying_coordinator_is_refused(
    attack: Callable[[type[SecureSite]], None], refusal: type[SecureSumError], double: type[SecureSite]
) -> None:
    with pytest.raises(refusal) as caught:
        attack(SecureSite)
    assert type(caught.value) is refusal


@pytest.mark.parametrize(("attack", "refusal", "double"), COORDINATOR_LIES, ids=lambda a: a.__name__)
def test_the_same_lie_succeeds_without_the_check(
    attack: Callable[[type[SecureSite]], None], refusal: type[SecureSumError], double: type[SecureSite]
) -> None:
    attack(double)


def test_the_same_names_under_another_key_are_other_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A colluder with the new key of a name is missing in the second sum: the difference of the sums is an update."""
    first = Parties(5)
    first.run()
    marks = {name: written[0] for name, written in first.marks.items()}
    Parties(5, attempt=2, earlier=marks).run()  # the same sum again
    known = protocol_parties.identity

    def renewed(name: str) -> Ed25519PrivateKey:
        return known(f"{name} later" if name == "site-004" else name)

    monkeypatch.setattr(protocol_parties, "identity", renewed)
    later = Roster.of(Card.of(name, renewed(name)) for name in first.names)
    with pytest.raises(AnsweredError):
        Parties(5, attempt=2, earlier=marks, roster=later).run()


def test_the_second_answer_is_refused_also_where_the_second_signature_is_not() -> None:
    class SignsTwice(SecureSite):
        def _check_one_list(self, survivors: tuple[str, ...]) -> None:
            pass

    with pytest.raises(AnsweredError):
        asks_twice_with_other_lists(SignsTwice)


def test_neighbours_refuse_to_open_a_site_that_masked_with_other_sharers() -> None:
    class MasksWithAlmostNobody(SecureSite):
        def _check_holders(self, present: Iterable[str]) -> None:
            pass

    with raises(SignatureError, "signature of site-000"):
        tells_one_site_that_its_neighbours_are_gone(MasksWithAlmostNobody)


# Shares that cannot be opened.


def alters_a_share(parties: Parties, name: str, sender: str) -> None:
    """One bit of the ciphertext from `sender` to `name` is flipped on its way; all other steps are honest."""
    inboxes = parties.share(parties.advertise())
    altered = tuple(
        (site, bytes([text[0], text[1] ^ 1, *text[2:]]) if site == sender else text)
        for site, text in inboxes[name].sealed
    )
    inboxes[name] = dataclasses.replace(inboxes[name], sealed=altered)
    parties.reveal(parties.confirm(parties.upload(inboxes)))


def test_a_site_goes_on_without_a_share_that_it_cannot_open() -> None:
    parties = Parties(6)
    alters_a_share(parties, "site-000", "site-002")
    statement = parties.said["site-000"][2]
    assert isinstance(statement, Masked)
    assert statement.complaints == ("site-002",)
    revealed = [site for site, _ in parties.reveals["site-000"].self_shares]
    assert revealed == [name for name in parties.names if name != "site-002"]
    np.testing.assert_array_equal(parties.coordinator.sum(), parties.plain_sum())


def test_a_share_that_is_not_checked_is_revealed_wrong() -> None:
    """The cipher and the hash both refuse it: without them the coordinator takes the holder for a liar."""

    class OpensAnything(SecureSite):
        def _decrypt(self, sealed: bytes, key: bytes, sender: str) -> bytes:
            start = (1).to_bytes(4, "little") + bytes(12)
            return Cipher(algorithms.ChaCha20(key, start), None).decryptor().update(sealed[:-16])

    class ComparesNothing(OpensAnything):
        def _hashes(self, sender: str, holder: str, shares: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
            return (bytes(32), bytes(32))

    only_the_hash = Parties(6, site=OpensAnything, tolerance=Tolerance(0.0, 0.1))
    alters_a_share(only_the_hash, "site-000", "site-002")
    np.testing.assert_array_equal(only_the_hash.coordinator.sum(), only_the_hash.plain_sum())
    assert only_the_hash.coordinator.found.liars == {}
    nothing = Parties(6, site=ComparesNothing)
    with raises(ShareError, "share of site-000 from site-000"):
        alters_a_share(nothing, "site-000", "site-002")


# What is signed.


def test_the_statement_and_the_list_bind_the_keys_and_the_sharers() -> None:
    """Sites that were shown other keys of one site, or other sharers, sign neither the same statement nor one list."""
    signatures = set()
    for other_keys, sharers in ((False, 6), (True, 6), (False, 5), (True, 5)):
        parties = Parties(6)
        peers, site = parties.advertise(), parties.sites["site-000"]
        if other_keys:
            key = keys.public_key(bytes(32))
            second = signed(Advertise(peers.context, "site-005", key, key, NOTHING_CARRIED))
            peers = dataclasses.replace(peers, advertised=(*peers.advertised[:-1], second))
        site.share(peers)
        others = parties.names[1:sharers]
        sealed, hashes = (tuple((name, *rest) for name in others) for rest in ((b"",), (bytes(32),) * 2))
        site.receive(Inbox(peers.context, parties.names[:sharers], sealed, hashes))
        site.take_seeds(instructions=MODEL)
        statement = site.masked(bytes(32))
        listed = site.confirm(Survivors(peers.context, parties.names[:4]))
        signatures |= {statement.sharers, listed.survivors}
    assert len(signatures) == 8
