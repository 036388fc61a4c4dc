"""The secure sum: the coordinator learns the sum of the sites' vectors modulo 2^b, and nothing else, even if it lies;
where the contract says so, it also learns a sketch of each vector.

After Bonawitz et al. 2017 ("Practical secure aggregation", the malicious-server variant with a consistency step), with
the graph of Bell et al. 2020 above 64 sites, in its malicious variant. n sites, at most A of them colluding with the
coordinator, at most D absent or dropping out. Everything a site sends is signed with the identity key that the roster
holds (`protocol.identity.roster`), over the protocol's name, the step and `ctx`, the hash of everything that the
parties must agree on about this attempt (`Attempt.context`). The steps are those of a round (`Step` in
`protocol/messages/messages.py`, `server/round/round.py`). In step 1 each party repeats the public draw of the cohort
(`protocol.messages.cohort`): n, A, k and t follow from it, and sites that are absent are dropouts.

2. Advertise. A site checks the attempt that it is asked to join (2a-2c) and answers with two one-time X25519 keys: c
   for shares, s for masks; and with the history of what it carries from earlier rounds. U1 are the sites that answered,
   of one history unless the instructions let nobody use it.
3. Share. A site checks the keys of U1 (3a-3f), draws the seed b of its self-mask, shares b and s t-of-n among the
   holders that the graph gives, encrypts each share for its holder, commits to b and to each share. U2 are the sites
   that answered.
4. Mask. A site checks the instructions and U1's histories (4e) before it makes its vector x, and U2 (4a-4d), opens the
   shares that it received, and uploads y = x + PRG(b) + sum over neighbours j
   in U2 of +-PRG(s_ij) mod 2^b, s_ij from X25519 of the two mask keys, + for the site whose name sorts first. It signs
   with y the keys of U1 and the list U2, and names the sites whose share it cannot open. U3 are the sites whose upload
   is complete.
5. Consistency. A site checks U3 (5a-5d) and signs it, with U1 and U2, once. Where the contract has sketches, it also
   checks the signatures under the digests of all masked vectors (5e), signs those too, and sends the coordinator a
   sketch of its vector under the seed that follows from them. If one is too long, the coordinator ends the attempt,
   before any share is revealed.
6. Unmask. Shown enough signatures under the one list that it signed itself, and for each survivor whose share it holds
   a statement that the survivor masked with the same U1 and U2 (6a-6e), a site writes a durable mark that it has
   answered, and only then reveals the share of b of each survivor, or that of s of each dropout: never both.
7. Sum. The coordinator reconstructs the secrets, checks b against its commitment and s against the advertised key, and
   removes the masks from its accumulator. With fewer than t shares the attempt ends, and nothing was revealed. Sketches
   must add up to that of the sum.

This file has what both sides share; `secure_site.py` and `secure_coordinator.py` are one side each. None of them does
I/O or reads a clock; randomness and the durable mark are passed in. `SecureSite` and `SecureCoordinator` are one
attempt each: a new attempt has new keys. Each check is a method, so that a test can remove it and see the attack that
it prevents succeed. Refused: a check inside an adapter, where a second engine would lack it.

All sites of an attempt compute by the same instructions, whose digest is in ctx, and what they carry from earlier
rounds has the same history at all of them: what is not the same at all sites singles one out (docs/secure-sum.md).

A site answers for one digest of instructions and one list of survivors in all attempts at a round. A retry sums the
same updates again: from the sums over U3 and over U3 without one site, that site's update follows.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from cloister.aggregation.secure import keys
from cloister.aggregation.secure.graph import Graph
from cloister.protocol.encoding import pack
from cloister.protocol.errors import MemberError, StaleError
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.messages import (
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Peers,
    Reveal,
    Shares,
    Signed,
    Sketched,
    Survivors,
    Unmask,
)
from cloister.protocol.messages.wire import to_bytes
from cloister.protocol.plan.threshold import Parameters, Tolerance


@dataclass(frozen=True)
class Contract:
    """What every party derives by itself from the plan and its pinned roster; the same for the whole run but for the
    group."""

    run: str
    """Name of the run."""
    roster: Roster
    """The sites' identities."""
    plan: bytes
    """The plan's digest."""
    draw: Draw
    """The draw of each round's cohort from the roster."""
    tolerance: Tolerance
    """How many of a cohort may drop out, and how many of the roster may collude with the coordinator."""
    ring_bits: Literal[8, 16, 32]
    """b: elements are integers modulo 2^b."""
    length: int
    """d: elements of a vector."""
    layout: bytes
    """Digest of what the elements mean."""
    group: int = 0
    """The group of each round's cohort that is summed. A site derives its own from the draw, so that no coordinator can
    have it in two sums of a round."""
    sketches: bool = False
    """Whether each site sends a sketch of its vector in step 5."""


@dataclass(frozen=True)
class Answered:
    """A site's durable mark: it has revealed shares by these instructions for these survivors alone in this round."""

    run: str
    round: int
    attempt: int
    survivors: bytes
    """Digest of the instructions and of the survivors, the same in every attempt (`answered_digest`)."""


class Attempt:
    """What follows from a contract and a `Begin`: the cohort, the graph, t, and the context of every message.

    Raises:
        ParameterError: the cohort cannot tolerate the dropouts and colluders of the contract.
    """

    def __init__(self, contract: Contract, begin: Begin) -> None:
        self.contract = contract
        self.round = begin.round
        self.attempt = begin.attempt
        self.instructions = begin.instructions
        sites = contract.roster.names
        cohort = contract.draw.divided(sites, begin.round)[contract.group]
        self.parameters = contract.tolerance.parameters(len(sites), len(cohort))
        self.graph = _graph(cohort, self.parameters, contract.roster.hash, begin.round)
        self.cohort = frozenset(cohort)
        self.context = context(contract, begin, cohort, self.parameters)


_graph = lru_cache(maxsize=8)(Graph)


def context(contract: Contract, begin: Begin, cohort: tuple[str, ...], parameters: Parameters) -> bytes:
    """ctx: SHA-256 of the run, round, attempt, roster, plan, instructions, cohort, n, k, t, ring, layout and whether
    vectors are sketched."""
    return hashlib.sha256(
        pack(
            keys.PROTOCOL,
            "context",
            contract.run,
            begin.round,
            begin.attempt,
            contract.roster.hash,
            contract.plan,
            begin.instructions,
            cohort,
            parameters.n,
            parameters.k,
            parameters.threshold,
            contract.ring_bits,
            contract.length,
            contract.layout,
            int(contract.sketches),
        )
    ).digest()


@lru_cache(maxsize=8)  # a process that plays many sites computes each of these once
def transcript(ctx: bytes, advertised: tuple[Advertise, ...]) -> bytes:
    """Hash of all keys of U1, the salt of derived keys: sites that were shown different keys share no secret."""
    return hashlib.sha256(pack("transcript", ctx, tuple(message.body() for message in advertised))).digest()


@lru_cache(maxsize=8)
def sharers_digest(ctx: bytes, transcript_: bytes, sharers: tuple[str, ...]) -> bytes:
    """H(ctx || U1's keys || U2), which a site signs with its masked vector."""
    return hashlib.sha256(pack("sharers", ctx, transcript_, sharers)).digest()


@lru_cache(maxsize=8)
def survivors_digest(sharers: bytes, survivors: tuple[str, ...], digests: tuple[bytes, ...] = ()) -> bytes:
    """H(`sharers_digest` || U3 || the digests of their masked vectors), which the survivors sign; without sketches the
    digests are none."""
    return hashlib.sha256(pack("survivors", sharers, survivors, digests)).digest()


def sketch_seed(survivors: bytes) -> bytes:
    """The public seed of the sketches of an attempt, from `survivors_digest`: nobody knows it before the last honest
    vector was masked and signed, because its digest depends on a mask that its site has drawn. A coordinator that lies
    can choose among those of the lists of survivors that it could show (docs/secure-sum.md)."""
    return hashlib.sha256(pack("sketch", survivors)).digest()


def commitment(ctx: bytes, seed: bytes) -> bytes:
    """H(b || ctx). Both have 32 bytes; b has 256 bits of entropy, so its hash hides it."""
    return hashlib.sha256(seed + ctx).digest()


def share_hash(ctx: bytes, share: bytes, *, sender: str, holder: str) -> bytes:
    """Hash of one share. A share is uniform in a field of 256 bits, so its hash hides it."""
    return hashlib.sha256(pack("share", ctx, sender, holder, share)).digest()


def answered_digest(roster: bytes, instructions: bytes, survivors: tuple[str, ...]) -> bytes:
    """The digest of the roster, of the instructions and of U3 in a site's durable mark: the same in every attempt."""
    return hashlib.sha256(pack("answered", roster, instructions, survivors)).digest()


def ring_dtype(ring_bits: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned type whose overflow is the reduction modulo 2^ring_bits; it has 8, 16 or 32 bits."""
    return np.dtype(f"uint{ring_bits}")


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
            what, expected="the same run, round, attempt, roster, plan, instructions and cohort as here"
        )


def check_signature(roster: Roster, message: Signed, ctx: bytes, *, remember: bool = False) -> None:
    """Check a site's signature under a message of this attempt; `remember` as for `keys.verify`.

    Raises:
        MemberError: the site is not in the roster.
        StaleError: the message is of another attempt.
        SignatureError: the site did not sign it.
    """
    key = roster.key(message.site)
    check_context(message.context, ctx, f"message of {message.site}")
    keys.verify(
        key, message.signature, message.STEP.label, ctx, message.body(), site=message.site, remember=remember
    )


def traffic(parameters: Parameters, name_length: int, sketch: int = 0) -> tuple[int, int]:
    """Bytes that one site sends and receives in an attempt besides its vector and the model, if no site drops out.

    Args:
        parameters: Of the cohort.
        name_length: Characters of a site's name.
        sketch: Bytes of a sketch, where vectors are sketched.
    """
    n, k, holders = parameters.n, parameters.k, parameters.n if parameters.complete else parameters.k
    name, key, signature = "x" * name_length, bytes(32), bytes(64)
    names, sealed = (name,) * n, ((name, bytes(82)),) * k
    own = Advertise(key, name, key, key, key, signature)
    sent = (
        own,
        Shares(key, name, key, sealed, ((name, key, key),) * holders, signature),
        Masked(key, name, key, key, (), signature),
        Confirm(
            key, name, key, signature, Sketched(key, name, key, bytes(sketch), signature) if sketch else None
        ),
        Reveal(key, name, ((name, bytes(33)),) * holders, (), signature),
    )
    received = (
        Begin(1, 1, key),
        Peers(key, (own,) * n),
        Inbox(key, names, sealed, ((name, key, key),) * k),
        Survivors(key, names, ((name, key, (), signature),) * n if sketch else ()),
        Unmask(
            key,
            names,
            (),
            ((name, signature),) * parameters.agreement,
            ((name, key, (), signature),) * holders,
        ),
    )
    return sum(len(to_bytes(message)) for message in sent), sum(
        len(to_bytes(message)) for message in received
    )
