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

from cloister.aggregation import keys, masks, shamir
from cloister.aggregation.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure_site import SecureSite
from cloister.aggregation.secure_sum import commitment
from cloister.aggregation.span import Piece
from cloister.protocol.digest import vector_hash
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
from cloister.protocol.messages import Advertise, Peers, Shares, Signed
from cloister.tests.protocol_parties import MODEL, Parties, names_of, roster, signed

# Messages that cannot stand.


def test_late_unknown_and_repeated_messages_are_refused() -> None:
    parties = Parties(4)
    coordinator = parties.coordinator
    own = [parties.sites[name].advertise(coordinator.begin) for name in parties.names]
    for message in own[:3]:
        coordinator.advertised(message)
    with pytest.raises(StepError, match="one message from each"):
        coordinator.advertised(own[0])
    with pytest.raises(StepError):
        coordinator.sum()
    with pytest.raises(StepError):
        coordinator.inboxes()
    peers = coordinator.peers()
    with pytest.raises(StepError, match="a message of the step share"):
        coordinator.advertised(own[3])
    shares = parties.sites["site-000"].share(peers)
    with pytest.raises(MemberError):
        coordinator.shared(dataclasses.replace(shares, site="site-003"))
    with pytest.raises(StaleError):
        coordinator.shared(dataclasses.replace(shares, context=bytes(32)))
    for sealed in (shares.sealed[:1], shares.sealed[::-1], (*shares.sealed, ("site-003", b""))):
        changed = signed(dataclasses.replace(shares, sealed=sealed))
        with pytest.raises(ShareError):
            coordinator.shared(changed)
    coordinator.shared(shares)
    with pytest.raises(TooFewSitesError, match="try the round again"):
        coordinator.inboxes()


def test_a_sum_is_taken_once() -> None:
    parties = Parties(3)
    parties.run()
    with pytest.raises(StepError):
        parties.coordinator.sum()


def test_a_site_of_the_roster_outside_the_cohort_is_refused() -> None:
    parties = Parties(4, roster=roster(names_of(5)))
    outsider = "site-004"
    begin, ctx = parties.coordinator.begin, parties.coordinator.attempt.context
    own = parties.sites["site-000"].advertise(begin)
    with pytest.raises(MemberError, match=outsider):
        parties.coordinator.advertised(signed(dataclasses.replace(own, site=outsider)))
    parties.advertise()
    with pytest.raises(MemberError, match=outsider):
        parties.coordinator.shared(signed(Shares(ctx, outsider, bytes(32), ())))


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
    with pytest.raises(SignatureError):
        coordinator.fold(dataclasses.replace(statement, digest=bytes(32)), [(0, parties.masked["site-000"])])
    coordinator.fold(statement, [(0, parties.masked["site-000"])])
    survivors = parties.upload(inboxes, parties.names[1:])
    reply = site.confirm(survivors)
    refused(coordinator.confirmed, reply, survivors=bytes(32))
    with pytest.raises(AgreementError):
        coordinator.confirmed(signed(dataclasses.replace(reply, survivors=bytes(32))))
    request = parties.confirm(survivors)
    shares = site.unmask(request)
    refused(coordinator.revealed, shares, self_shares=shares.self_shares[::-1])
    for lie in (
        shares.self_shares[::-1],
        shares.self_shares[1:],
        ((shares.self_shares[0][0], b""), *shares.self_shares[1:]),
    ):
        with pytest.raises(ShareError):
            coordinator.revealed(signed(dataclasses.replace(shares, self_shares=lie)))
    parties.reveal(request)
    np.testing.assert_array_equal(coordinator.sum(), parties.plain_sum())


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
    with pytest.raises(SignatureError, match="site-000"):
        speaks_for_another(SecureCoordinator)
    assert speaks_for_another(TakesAnySignature).advertised[0].site == "site-000"


class TakesAnySeed(SecureCoordinator):
    def _fits_commitment(self, site: str, seed: bytes) -> bool:
        return True


def wrong_share(share: bytes) -> bytes:
    return (int.from_bytes(share, "big") ^ 1).to_bytes(shamir.SHARE, "big")


def reveals_wrong_shares(kind: type[SecureCoordinator], answering: int) -> masks.Ring:
    """A holder reveals shares that are not the ones it was given; `answering` - 1 others do not."""
    parties = Parties(6, coordinator=kind)
    request = parties.to_request()
    liar, *honest = parties.names[1], parties.names[0], *parties.names[2:]
    reply = parties.sites[liar].unmask(request)
    lie = tuple((site, wrong_share(share)) for site, share in reply.self_shares)
    parties.coordinator.revealed(signed(dataclasses.replace(reply, self_shares=lie)))
    parties.reveal(request, honest[: answering - 1])
    return parties.coordinator.sum() - parties.plain_sum()


@pytest.mark.parametrize("answering", [5, 6])
def test_a_wrong_share_is_left_out_where_others_are_enough(answering: int) -> None:
    assert not reveals_wrong_shares(SecureCoordinator, answering).any()
    assert reveals_wrong_shares(TakesAnySeed, answering).any()  # unnoticed: the sum is wrong


def test_a_wrong_share_is_noticed_where_others_are_not_enough() -> None:
    with pytest.raises(ReconstructionError, match="site-000"):
        reveals_wrong_shares(SecureCoordinator, 4)
    assert reveals_wrong_shares(TakesAnySeed, 4).any()


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
    with pytest.raises(ReconstructionError, match="site-002"):
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
    seeds = site.take_seeds(model=MODEL)
    masks.apply(vector, (other_seed, *seeds.add[1:]), seeds.subtract)
    parties.coordinator.fold(site.masked(vector_hash(vector)), [(0, vector)])
    parties.reveal(parties.confirm(parties.upload(inboxes, others)))
    return parties.coordinator.sum() - parties.plain_sum()


def test_a_wrong_commitment_is_noticed() -> None:
    with pytest.raises(ReconstructionError, match="site-002"):
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
