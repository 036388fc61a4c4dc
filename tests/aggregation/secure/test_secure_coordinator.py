"""What the coordinator refuses, and what each of its checks prevents.

The attacks are played by a lying site, alone or against a coordinator whose one check is taken out: with the check
the coordinator refuses the message, names the liar, or gives the exact sum; without it the sum is wrong, unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cloister.aggregation.secure import keys, shamir
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import SecureSite
from cloister.aggregation.secure.secure_sum import commitment
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.span import Piece
from cloister.protocol.errors import (
    AgreementError,
    MaskError,
    MemberError,
    OneTimeKeyError,
    ReconstructionError,
    ShareError,
    SignatureError,
    StaleError,
    StepError,
    TooFewSitesError,
)
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import Advertise, Peers, Shares, Signed, Survivors
from cloister.protocol.plan.threshold import Tolerance
from cloister.tests.parties.protocol_parties import MODEL, Parties, names_of, roster, signed
from cloister.tests.tools.raises import raises

# Messages that cannot stand.


def test_late_unknown_and_repeated_messages_are_refused() -> None:
    parties = Parties(4)
    coordinator = parties.coordinator
    own = [parties.sites[name].advertise(coordinator.begin) for name in parties.names]
    for message in own[:3]:
        coordinator.advertised(message)
    with raises(StepError, "advertise of site-000", says="one message"):
        coordinator.advertised(own[0])
    with pytest.raises(StepError):
        coordinator.sum()
    with pytest.raises(StepError):
        coordinator.inboxes()
    peers = coordinator.peers()
    with raises(StepError, "advertise of site-003", says="the step share"):
        coordinator.advertised(own[3])
    shares = parties.sites["site-000"].share(peers)
    with pytest.raises(MemberError):
        coordinator.shared(dataclasses.replace(shares, site="site-003"))
    with pytest.raises(StaleError):
        coordinator.shared(dataclasses.replace(shares, context=bytes(32)))
    for change in (
        {"sealed": shares.sealed[:1]},
        {"sealed": shares.sealed[::-1]},
        {"sealed": (*shares.sealed, ("site-003", b""))},
        {"hashes": shares.hashes[1:]},
        {"hashes": shares.hashes[::-1]},
    ):
        changed: Any = dataclasses.replace(shares, **change)
        with pytest.raises(ShareError):
            coordinator.shared(signed(changed))
    coordinator.shared(shares)
    with raises(TooFewSitesError, "sites that finished the step share"):
        coordinator.inboxes()


def test_a_sum_is_taken_once() -> None:
    parties = Parties(3)
    parties.run()
    with pytest.raises(StepError):
        parties.coordinator.sum()


def test_a_sum_of_masked_vectors_is_taken_over_by_a_later_process() -> None:
    first, other = Parties(4), Parties(4, attempt=2)
    with raises(StepError, "sum of masked vectors"):
        _ = first.coordinator.folded
    first.upload(first.share(first.advertise()))
    other.upload(other.share(other.advertise()))
    statements, accumulator = first.coordinator.folded
    later = Parties(4)  # with the same secrets
    inboxes = later.share(later.advertise())
    for wrong, vector, error in (
        (other.coordinator.folded[0], accumulator, StaleError),
        ([*statements, statements[0]], accumulator, StepError),
        (statements, accumulator[:-1], MaskError),
    ):
        with pytest.raises(error):
            later.coordinator.fold_again(wrong, vector.copy())
    later.coordinator.fold_again(statements, accumulator.copy())
    for name in later.names:
        later.mask(name, inboxes[name])
    later.reveal(later.confirm(later.coordinator.survivors()))
    np.testing.assert_array_equal(later.coordinator.sum(), later.plain_sum())


def test_a_site_of_the_roster_outside_the_cohort_is_refused() -> None:
    parties = Parties(4, roster=roster(names_of(5)))
    (outsider,) = set(names_of(5)).difference(parties.names)
    begin, ctx = parties.coordinator.begin, parties.coordinator.attempt.context
    own = parties.sites[parties.names[0]].advertise(begin)
    with raises(MemberError, "site", says=outsider):
        parties.coordinator.advertised(signed(dataclasses.replace(own, site=outsider)))
    parties.advertise()
    with raises(MemberError, "site", says=outsider):
        parties.coordinator.shared(signed(Shares(ctx, outsider, bytes(32), (), ())))


def test_a_changed_message_is_refused_at_every_step() -> None:
    parties = Parties(3)
    coordinator, site = parties.coordinator, parties.sites["site-000"]

    def refused(take: Callable[[Any], None], message: Any, **change: Any) -> None:
        with pytest.raises(SignatureError):
            take(dataclasses.replace(message, **change))
        with pytest.raises(SignatureError):
            take(dataclasses.replace(message, signature=bytes(64)))

    refused(coordinator.advertised, site.advertise(coordinator.begin), mask_key=keys.public_key(bytes(32)))
    peers = parties.advertise()
    refused(coordinator.shared, site.share(peers), commitment=bytes(32))
    inboxes = parties.share(peers)
    statement = parties.mask("site-000", inboxes["site-000"])
    pieces: list[Piece] = [(0, parties.masked["site-000"])]
    with pytest.raises(SignatureError):
        coordinator.fold(dataclasses.replace(statement, digest=bytes(32)), pieces)
    lie: Any
    for lie, error in (
        ({"sharers": bytes(32)}, AgreementError),
        ({"complaints": ("site-002", "site-001")}, MemberError),
        ({"complaints": ("site-000",)}, MemberError),
        ({"complaints": ("site-009",)}, MemberError),
    ):
        with pytest.raises(error):
            coordinator.fold(signed(dataclasses.replace(statement, **lie)), pieces)
    coordinator.fold(statement, [(0, parties.masked["site-000"])])
    survivors = parties.upload(inboxes, parties.names[1:])
    reply = site.confirm(survivors)
    refused(coordinator.confirmed, reply, survivors=bytes(32))
    with pytest.raises(AgreementError):
        coordinator.confirmed(signed(dataclasses.replace(reply, survivors=bytes(32))))
    requests = parties.confirm(survivors)
    shares = site.unmask(requests["site-000"])
    refused(coordinator.revealed, shares, self_shares=shares.self_shares[::-1])
    for lie in (
        shares.self_shares[::-1],
        shares.self_shares[1:],
        ((shares.self_shares[0][0], b""), *shares.self_shares[1:]),
    ):
        with pytest.raises(ShareError):
            coordinator.revealed(signed(dataclasses.replace(shares, self_shares=lie)))
    parties.reveal(requests)
    np.testing.assert_array_equal(coordinator.sum(), parties.plain_sum())
    assert set(coordinator.found.liars) == {"site-000"}  # for the empty share


def test_a_key_of_low_order_is_refused_before_it_reaches_a_site() -> None:
    parties = Parties(3)
    site = parties.sites["site-000"]
    message = site.advertise(parties.coordinator.begin)
    for key, value in (("share_key", bytes(32)), ("mask_key", bytes(32)), ("mask_key", b"short")):
        change: Any = {key: value}
        with pytest.raises(OneTimeKeyError):
            parties.coordinator.advertised(signed(dataclasses.replace(message, **change)))


# Attacks by sites.


class TakesAnySignature(SecureCoordinator):
    def _check_signature(self, message: Signed) -> None:
        pass


def speaks_for_another(kind: type[SecureCoordinator]) -> Peers:
    """A site, or someone on the line, sends keys in the name of another site."""
    parties = Parties(4, coordinator=kind)
    message = parties.sites["site-003"].advertise(parties.coordinator.begin)
    forged = signed(dataclasses.replace(message, site="site-000"), by="site-003")
    parties.coordinator.advertised(forged)
    return parties.advertise(["site-001", "site-002"])


def test_a_wrong_signature_is_refused() -> None:
    with raises(SignatureError, "signature of site-000"):
        speaks_for_another(SecureCoordinator)
    assert speaks_for_another(TakesAnySignature).advertised[0].site == "site-000"


class TakesAnySeed(SecureCoordinator):
    def _fits_commitment(self, site: str, seed: bytes) -> bool:
        return True


class TakesAnyShare(TakesAnySeed):
    def _check_revealed(self, holder: str, sender: str, share: bytes, which: int) -> None:
        pass


def wrong_share(share: bytes) -> bytes:
    return (int.from_bytes(share, "big") ^ 1).to_bytes(shamir.SHARE, "big")


def reveals_wrong_shares(kind: type[SecureCoordinator], answering: int) -> Parties:
    """Two holders of eight reveal shares that are not those they were sent; `answering` of the others do not."""
    parties = Parties(8, coordinator=kind, tolerance=Tolerance(0.0, 0.1))
    requests = parties.to_request()
    for liar in parties.names[:2]:
        reply = parties.sites[liar].unmask(requests[liar])
        lie = tuple((site, wrong_share(share)) for site, share in reply.self_shares)
        with contextlib.suppress(ShareError):
            parties.coordinator.revealed(signed(dataclasses.replace(reply, self_shares=lie)))
    parties.reveal(requests, parties.names[2 : 2 + answering])
    return parties


def test_wrong_shares_are_left_out_and_name_their_holders() -> None:
    parties = reveals_wrong_shares(SecureCoordinator, 6)
    np.testing.assert_array_equal(parties.coordinator.sum(), parties.plain_sum())
    assert set(parties.coordinator.found.liars) == set(parties.names[:2])
    unnoticed = reveals_wrong_shares(TakesAnyShare, 6)
    assert (unnoticed.coordinator.sum() - unnoticed.plain_sum()).any()
    assert not unnoticed.coordinator.found.liars


def test_where_the_others_are_not_enough_nothing_is_opened() -> None:
    parties = reveals_wrong_shares(SecureCoordinator, 4)
    with pytest.raises(TooFewSitesError):
        parties.coordinator.sum()
    assert set(parties.coordinator.found.liars) == set(parties.names[:2])


def sends_garbage(parties: Parties, liar: str, to: Sequence[str]) -> Survivors:
    """A site sends ciphertexts that no holder among `to` can open."""
    peers = parties.advertise()
    shares = parties.sites[liar].share(peers)
    garbage = tuple((site, b"garbage" if site in to else text) for site, text in shares.sealed)
    parties.coordinator.shared(signed(dataclasses.replace(shares, sealed=garbage)))
    inboxes = parties.share(peers, [name for name in parties.names if name != liar])
    return parties.upload(inboxes)


def test_a_site_that_sends_garbage_is_named_before_the_others_are_bound() -> None:
    parties = Parties(8, tolerance=Tolerance(0.0, 0.1))
    liar, *others = parties.names
    with raises(ReconstructionError, "shares of site-000", says="5 survivors"):
        sends_garbage(parties, liar, others)
    assert parties.coordinator.found.unopened == (liar,)
    assert parties.coordinator.complaints == {(other, liar) for other in others}


@pytest.mark.parametrize("places", [[1], [1, 2]])
def test_the_sum_goes_on_without_shares_that_are_not_needed(places: list[int]) -> None:
    parties = Parties(8, tolerance=Tolerance(0.0, 0.1))
    survivors = sends_garbage(parties, "site-000", [parties.names[place] for place in places])
    parties.reveal(parties.confirm(survivors))
    np.testing.assert_array_equal(parties.coordinator.sum(), parties.plain_sum())
    assert parties.coordinator.complaints == {(parties.names[place], "site-000") for place in places}


def test_hashes_of_other_shares_are_complained_of() -> None:
    """A site signs hashes that its shares do not have: otherwise honest holders would seem to lie."""
    parties = Parties(8, tolerance=Tolerance(0.0, 0.1))
    peers = parties.advertise()
    liar = "site-003"
    shares = parties.sites[liar].share(peers)
    hashes = tuple((holder, bytes(32), of_s) for holder, _, of_s in shares.hashes)
    parties.coordinator.shared(signed(dataclasses.replace(shares, hashes=hashes)))
    inboxes = parties.share(peers, [name for name in parties.names if name != liar])
    with raises(ReconstructionError, "shares of site-003"):
        parties.upload(inboxes)
    assert {of for _, of in parties.coordinator.complaints} == {liar}


class TakesAnyPrivateKey(SecureCoordinator):
    def _fits_key(self, site: str, private: bytes) -> bool:
        return True


class KeepsItsOwnKey(SecureSite):
    """A site that goes on with its own keys, whatever keys it has advertised."""

    def _check_own_keys(self, returned: Advertise | None) -> None:
        pass


def advertises_a_key_it_does_not_share(kind: type[SecureCoordinator]) -> masks.Ring:
    """A site signs another mask key than the one whose private key it shares, and drops out."""
    parties = Parties(6, coordinator=kind, site=KeepsItsOwnKey)
    liar = "site-002"
    others = [name for name in parties.names if name != liar]
    message = parties.sites[liar].advertise(parties.coordinator.begin)
    lie = signed(dataclasses.replace(message, mask_key=keys.public_key(bytes(32))))
    parties.coordinator.advertised(lie)
    inboxes = parties.share(parties.advertise(others))
    parties.reveal(parties.confirm(parties.upload(inboxes, others)))
    return parties.coordinator.sum() - parties.plain_sum(others)


def test_a_wrong_key_is_noticed() -> None:
    with raises(ReconstructionError, "secrets of site-002"):
        advertises_a_key_it_does_not_share(SecureCoordinator)
    assert advertises_a_key_it_does_not_share(TakesAnyPrivateKey).any()


def commits_to_another_seed(kind: type[SecureCoordinator]) -> masks.Ring:
    """A site masks with another b than the one that it shares, and commits to the one that it masks with."""
    parties = Parties(6, coordinator=kind)
    liar, other_seed = "site-002", bytes(32)
    peers = parties.advertise()
    others = [name for name in parties.names if name != liar]
    lie = commitment(peers.context, other_seed)
    shares = parties.sites[liar].share(peers)
    parties.coordinator.shared(signed(dataclasses.replace(shares, commitment=lie)))
    inboxes = parties.share(peers, others)
    site, vector = parties.sites[liar], parties.vectors[liar].copy()
    site.receive(inboxes[liar])
    seeds = site.take_seeds(instructions=MODEL)
    masks.apply(vector, (other_seed, *seeds.add[1:]), seeds.subtract)
    parties.coordinator.fold(site.masked(vector_hash(vector)), [(0, vector)])
    parties.reveal(parties.confirm(parties.upload(inboxes, others)))
    return parties.coordinator.sum() - parties.plain_sum()


def test_a_wrong_commitment_is_noticed() -> None:
    with raises(ReconstructionError, "secrets of site-002"):
        commits_to_another_seed(SecureCoordinator)
    assert commits_to_another_seed(TakesAnySeed).any()


class AddsAnyVector(SecureCoordinator):
    def _check_upload(self, site: str, pieces: Sequence[Piece]) -> None:
        pass


def uploads_one_element(kind: type[SecureCoordinator]) -> masks.Ring:
    """A vector of the wrong length, of a kind that NumPy would spread over the whole accumulator."""
    parties = Parties(4, coordinator=kind)
    inboxes = parties.share(parties.advertise())
    liar = parties.names[0]
    statement = parties.mask(liar, inboxes[liar])
    with contextlib.suppress(MaskError):
        parties.coordinator.fold(statement, [(0, parties.masked[liar][:1])])
    survivors = parties.upload(inboxes, parties.names[1:])
    parties.reveal(parties.confirm(survivors))
    return parties.coordinator.sum() - parties.plain_sum(survivors.survivors)


def test_a_wrong_length_is_refused_and_the_others_are_summed() -> None:
    assert not uploads_one_element(SecureCoordinator).any()
    assert uploads_one_element(AddsAnyVector).any()
    parties = Parties(4)
    inboxes = parties.share(parties.advertise())
    statement = parties.mask("site-000", inboxes["site-000"])
    vector = parties.masked["site-000"]
    wrong: Any
    for wrong in (
        [(0, vector[:-1])],
        [(0, np.append(vector, vector))],
        [(0, vector.astype(np.uint16))],
        [(0, vector.astype(np.float64))],
        [(1, vector)],
        [(0, vector[:9]), (10, vector[10:])],
        [(0, vector[:9]), (8, vector[8:])],
        [(9, vector[9:]), (0, vector[:9])],
    ):
        with pytest.raises(MaskError):
            parties.coordinator.fold(statement, wrong)
    parties.coordinator.fold(statement, [(0, vector[:9]), (9, vector[9:])])
    with pytest.raises(StepError):
        parties.coordinator.fold(statement, [(0, vector[:9]), (9, vector[9:])])
