"""The secure sum: the coordinator learns the sum of the sites' vectors modulo 2^b, and nothing else, even if it lies.

After Bonawitz et al. 2017 ("Practical secure aggregation", the malicious-server variant with a consistency step), with
the graph of Bell et al. 2020 above 64 sites. n sites, at most A of them colluding with the coordinator, at most D
dropping out. Everything a site sends is signed with the identity key that the roster holds (`protocol.roster`), over
the protocol's name, the step and `ctx`, the hash of everything that the parties must agree on about this attempt
(`Attempt.context`). The steps are those of a round (`protocol.messages.Step`, `server/round.py`), which draws the
cohort in step 1.

2. Advertise. A site checks the attempt that it is asked to join (2a-2d) and answers with two one-time X25519 keys: c
   for shares, s for masks. U1 are the sites that answered.
3. Share. A site checks the keys of U1 (3a-3e), draws the seed b of its self-mask, shares b and s t-of-n among the
   holders that the graph gives, encrypts each share for its holder, and commits to b. U2 are the sites that answered.
4. Mask. A site opens the shares that it received (4a-4c) and uploads y = x + PRG(b) + sum over neighbours j in U2 of
   +-PRG(s_ij) mod 2^b, s_ij from X25519 of the two mask keys, + for the site whose name sorts first. U3 are the sites
   whose upload is complete.
5. Consistency. A site checks U3 (5a-5d) and signs it, once.
6. Unmask. Shown enough signatures under the one list that it signed itself (6a-6d), a site writes a durable mark that
   it has answered, and only then reveals the share of b of each survivor, or that of s of each dropout: never both.
7. Sum. The coordinator reconstructs the secrets, checks b against its commitment and s against the advertised key, and
   removes the masks from its accumulator. With fewer than t shares the attempt ends, and nothing was revealed.

This file has what both sides share; `secure_site.py` and `secure_coordinator.py` are one side each. None of them does
I/O or reads a clock; randomness and the durable mark are passed in. `SecureSite` and `SecureCoordinator` are one
attempt each: a new attempt has new keys. Each check is a method, so that a test can remove it and see the attack that
it prevents succeed. Refused: a check inside an adapter, where a second engine would lack it.

A site answers at most one list of survivors in all attempts at one round. The reason is that a retry sums the same
updates again: from the sums over U3 and over U3 without one site, that site's update follows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cloister.aggregation import keys, masks
from cloister.aggregation.graph import Graph
from cloister.protocol.encoding import pack
from cloister.protocol.errors import MaskError, MemberError, StaleError
from cloister.protocol.messages import (
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Peers,
    Reveal,
    Shares,
    Signed,
    Survivors,
    Unmask,
)
from cloister.protocol.roster import Roster
from cloister.protocol.threshold import Parameters, Tolerance
from cloister.protocol.wire import to_bytes


@dataclass(frozen=True)
class Contract:
    """What every party derives by itself from the plan and its pinned roster; the same for the whole run."""

    run: str
    """Name of the run."""
    roster: Roster
    """The sites' identities."""
    plan: bytes
    """The plan's digest."""
    tolerance: Tolerance
    """How many of a cohort may drop out or collude with the coordinator."""
    ring_bits: Literal[16, 32]
    """b: elements are integers modulo 2^b."""
    length: int
    """d: elements of a vector."""
    layout: bytes
    """Digest of what the elements mean."""
    cipher: masks.Cipher = "aes-256-ctr"
    """The mask's keystream."""


@dataclass(frozen=True)
class Answered:
    """A site's durable mark: it has revealed shares for these survivors, and for no others in this round."""

    run: str
    round: int
    attempt: int
    survivors: bytes
    """Digest of the list of survivors, the same in every attempt."""


class Attempt:
    """What follows from a contract and a `Begin`: the graph, t, and the context of every message of the attempt."""

    def __init__(self, contract: Contract, begin: Begin) -> None:
        self.contract = contract
        self.round = begin.round
        self.attempt = begin.attempt
        self.model = begin.model
        self.parameters = contract.tolerance.parameters(len(begin.cohort))
        self.graph = Graph(begin.cohort, self.parameters, contract.roster.hash, begin.round)
        self.cohort = frozenset(begin.cohort)
        self.context = context(contract, begin, self.parameters)


def context(contract: Contract, begin: Begin, parameters: Parameters) -> bytes:
    """ctx: SHA-256 of the run, round, attempt, roster, plan, model, cohort, n, t, ring, layout and cipher."""
    return hashlib.sha256(
        pack(
            keys.PROTOCOL,
            "context",
            contract.run,
            begin.round,
            begin.attempt,
            contract.roster.hash,
            contract.plan,
            begin.model,
            begin.cohort,
            parameters.n,
            parameters.threshold,
            contract.ring_bits,
            contract.length,
            contract.layout,
            contract.cipher,
        )
    ).digest()


def transcript(ctx: bytes, advertised: Iterable[Advertise]) -> bytes:
    """Hash of all keys of U1, the salt of derived keys: sites that were shown different keys share no secret."""
    return hashlib.sha256(pack("transcript", ctx, tuple(message.body() for message in advertised))).digest()


def survivors_digest(ctx: bytes, survivors: tuple[str, ...]) -> bytes:
    """H(ctx || U3), which the survivors sign."""
    return hashlib.sha256(pack("survivors", ctx, survivors)).digest()


def commitment(ctx: bytes, seed: bytes) -> bytes:
    """H(b || ctx). Both have 32 bytes; b has 256 bits of entropy, so its hash hides it."""
    return hashlib.sha256(seed + ctx).digest()


def answered_digest(survivors: tuple[str, ...]) -> bytes:
    """The digest of U3 in a site's durable mark: the same in every attempt."""
    return hashlib.sha256(pack("answered", survivors)).digest()


def ring_dtype(ring_bits: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    """The unsigned type whose overflow is the reduction modulo 2^ring_bits."""
    return np.dtype(np.uint16) if ring_bits == 16 else np.dtype(np.uint32)


def check_vector(vector: masks.Ring, ring_bits: int) -> None:
    """Refuse a vector of another type or shape.

    Raises:
        MaskError: the vector does not have one dimension of the ring's type.
    """
    if vector.dtype != ring_dtype(ring_bits) or vector.ndim != 1:
        raise MaskError(
            "vector", f"{vector.dtype}{list(vector.shape)}", expected=f"one dimension of uint{ring_bits}"
        )


def check_names(what: str, sites: tuple[str, ...]) -> None:
    """Refuse a list of names that is not sorted or has a duplicate.

    Raises:
        MemberError: the list is not in order.
    """
    if any(one >= other for one, other in itertools.pairwise(sites)):
        raise MemberError(what, expected="each site once, sorted by name")


def check_context(ctx: bytes, own: bytes, what: str) -> None:
    """Refuse a message of another attempt.

    Raises:
        StaleError: the contexts differ.
    """
    if ctx != own:
        raise StaleError(
            what, expected="the same run, round, attempt, roster, plan, model and cohort as here"
        )


def check_signature(roster: Roster, message: Signed, ctx: bytes) -> None:
    """Check a site's signature under a message of this attempt.

    Raises:
        MemberError: the site is not in the roster.
        StaleError: the message is of another attempt.
        SignatureError: the site did not sign it.
    """
    key = roster.key(message.site)
    check_context(message.context, ctx, f"message of {message.site}")
    keys.verify(key, message.signature, message.STEP.label, ctx, message.body(), site=message.site)


def traffic(parameters: Parameters, name_length: int) -> tuple[int, int]:
    """Bytes that one site sends and receives in an attempt besides its vector and the model, if no site drops out.

    Args:
        parameters: Of the cohort.
        name_length: Characters of a site's name.
    """
    n, holders = parameters.n, parameters.n if parameters.complete else parameters.k
    name, key, signature = "x" * name_length, bytes(32), bytes(64)
    names, sealed = (name,) * n, ((name, bytes(82)),) * parameters.k
    own = Advertise(key, name, key, key, signature)
    sent = (
        own,
        Shares(key, name, key, sealed, signature),
        Masked(key, name, key, signature),
        Confirm(key, name, key, signature),
        Reveal(key, name, ((name, bytes(33)),) * holders, (), signature),
    )
    received = (
        Begin(1, 1, key, names, parameters.threshold),
        Peers(key, (own,) * n),
        Inbox(key, names, sealed),
        Survivors(key, names),
        Unmask(key, names, (), ((name, signature),) * n),
    )
    return sum(len(to_bytes(message)) for message in sent), sum(
        len(to_bytes(message)) for message in received
    )
