"""The secure sum: the coordinator learns the sum of the sites' vectors modulo 2^b, and nothing else, even if
it lies.

After Bonawitz et al. 2017 ("Practical secure aggregation", the malicious-server variant with a consistency
step), with the graph of Bell et al. 2020 above 64 sites. n sites, at most A of them colluding with the
coordinator, at most D dropping out. Everything a site sends is signed with the identity key that the roster
holds (`protocol.roster`), over the protocol's name, the step and `ctx`, the hash of all that the parties must
agree on about this attempt (`Attempt.context`).

1. Advertise. A site checks what it is asked to join (1a-1d) and answers with two one-time X25519 keys: c for
   shares, s for masks. U1 are the sites that answered.
2. Share. A site checks the keys of U1 (2a-2e), draws the seed b of its self-mask, shares b and s t-of-n among
   the holders that the graph gives, encrypts each share for its holder, and commits to b. U2 are the sites
   that answered.
3. Mask. A site opens the shares that it was sent (3a-3c) and uploads y = x + PRG(b) + sum over neighbours j
   in U2 of +-PRG(s_ij) mod 2^b, s_ij from X25519 of the two mask keys, + for the site whose name sorts first.
   U3 are the sites whose upload is complete.
4. Consistency. A site checks U3 (4a-4d) and signs it, once.
5. Unmask. Shown enough signatures under the one list that it signed itself (5a-5d), a site writes a durable
   mark that it has answered, and only then reveals the share of b of each survivor, or that of s of each
   dropout: never both.
6. Sum. The coordinator reconstructs the secrets, checks b against its commitment and s against the advertised
   key, and takes the masks off its accumulator. Fewer than t shares: the attempt ends, and nothing was
   learned.

This module does no I/O and reads no clock; randomness and the durable mark are passed in. `Site` and
`Coordinator` are one attempt each: a new attempt has new keys. Each check is a method, so that a test can
take it out and watch the attack that it stops succeed. Refused: a check inside an adapter, where a second
engine would lack it.

A site answers at most one list of survivors in all attempts at one round. The reason is that a retry sums the
same updates again: from the sums over U3 and over U3 without one site, that site's update follows.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import hmac
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation import keys, masks, shamir
from cloister.aggregation.graph import Graph
from cloister.aggregation.secure_messages import (
    Advertise,
    Begin,
    Confirm,
    Inbox,
    Masked,
    Message,
    Peers,
    Reveal,
    Shares,
    Signed,
    Survivors,
    Unmask,
)
from cloister.protocol.encoding import pack
from cloister.protocol.errors import (
    AgreementError,
    AnsweredError,
    ExclusiveError,
    MaskError,
    MemberError,
    OneTimeKeyError,
    ReconstructionError,
    ShareError,
    StaleError,
    StepError,
    ThresholdError,
    TooFewSitesError,
)
from cloister.protocol.roster import Roster
from cloister.protocol.threshold import Parameters, assumed, parameters, tolerated

S = TypeVar("S", bound=Signed)


@dataclass(frozen=True)
class Contract:
    """What every party knows by itself, from the plan and from the roster that it pinned; the same for the
    whole run.
    """

    run: str
    """Name of the run."""
    roster: Roster
    """The sites' identities."""
    plan: bytes
    """The plan's digest."""
    dropouts: float
    """Largest fraction of a cohort that may drop out."""
    colluders: float
    """Largest fraction of a cohort that may collude with the coordinator."""
    ring_bits: Literal[16, 32]
    """b: elements are integers modulo 2^b."""
    length: int
    """d: elements of a vector."""
    layout: bytes
    """Digest of what the elements mean."""
    cipher: masks.Cipher = "aes-256-ctr"
    """The mask's keystream."""

    def parameters(self, n: int) -> Parameters:
        """k and t for a cohort of `n` sites.

        Raises:
            ParameterError: the plan's tolerances cannot be met.
        """
        return parameters(n, tolerated(n, self.dropouts), assumed(n, self.colluders))


@dataclass(frozen=True)
class Answered:
    """A site's durable mark: it has revealed shares for these survivors, and answers for no others in this
    round.
    """

    run: str
    round: int
    attempt: int
    survivors: bytes
    """Digest of the list of survivors, the same in every attempt."""


@dataclass(frozen=True)
class Seeds:
    """The masks of one site's vector, for its own ranks: `masks.apply(shard, seeds.add, seeds.subtract,
    offset=...)`.
    """

    add: tuple[bytes, ...] = field(repr=False)
    subtract: tuple[bytes, ...] = field(repr=False)


class Attempt:
    """What a contract and a `Begin` give: the graph, t, and the context that everything in the attempt is
    bound to.
    """

    def __init__(self, contract: Contract, begin: Begin) -> None:
        self.contract = contract
        self.round = begin.round
        self.attempt = begin.attempt
        self.model = begin.model
        self.parameters = contract.parameters(len(begin.cohort))
        self.graph = Graph(begin.cohort, self.parameters, contract.roster.hash, begin.round)
        self.cohort = frozenset(begin.cohort)
        self.context = context(contract, begin, self.parameters)


def context(contract: Contract, begin: Begin, parameters: Parameters) -> bytes:
    """ctx: 32 bytes that stand for the run, round, attempt, roster, plan, model, cohort, n, t, ring and
    layout.
    """
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
    """Hash of all keys of U1, the salt of what is derived: sites shown different keys share no secret."""
    return hashlib.sha256(pack("transcript", ctx, tuple(message.body() for message in advertised))).digest()


def survivors_digest(ctx: bytes, survivors: tuple[str, ...]) -> bytes:
    """H(ctx || U3), which the survivors sign."""
    return hashlib.sha256(pack("survivors", ctx, survivors)).digest()


def commitment(ctx: bytes, seed: bytes) -> bytes:
    """H(b || ctx). Both have 32 bytes; b has 256 bits of entropy, so its hash hides it."""
    return hashlib.sha256(seed + ctx).digest()


class Site:
    """One site's side of one attempt. A step's message handled twice gives the same reply; another message is
    refused.

    Args:
        contract: What the site knows by itself.
        name: Its name in the roster.
        identity: Its identity key.
        minimum: The fewest sites whose sum it takes part in: its policy.
        random: Gives that many bytes from a cryptographic source.
        answered: Writes the mark durably; it is called before shares are revealed, and may raise to stop
            that.
        earlier: The mark that the site wrote in an earlier attempt at this round, if there is one.
        newest: Round and attempt that the site joined last; an attempt not after it is refused.
    """

    def __init__(
        self,
        contract: Contract,
        name: str,
        identity: Ed25519PrivateKey,
        *,
        minimum: int,
        random: Callable[[int], bytes],
        answered: Callable[[Answered], None],
        earlier: Answered | None = None,
        newest: tuple[int, int] = (0, 0),
    ) -> None:
        self.contract = contract
        self.name = name
        self.minimum = minimum
        self._identity = identity
        self._random = random
        self.answered = answered
        self._earlier = earlier
        self._newest = newest
        self._done: list[tuple[Message, Any]] = []  # for each step that was done: the message and the reply
        self._masked: Masked | None = None
        self._ranges: list[tuple[int, int]] = []  # of the vector whose masks were used, sorted
        self._applied = 0  # elements that were masked to the end
        self._seeds_taken = False

    # 1. Advertise.

    def advertise(self, begin: Begin) -> Advertise:
        """Step 1: join the attempt with fresh one-time keys.

        Raises:
            StaleError, MemberError, TooFewSitesError, ParameterError, ThresholdError, StepError: why it does
            not.
        """
        if (reply := self._check_order(1, begin)) is not None:
            return reply  # type: ignore[no-any-return]  # the reply of this same step
        self._check_fresh(begin)  # 1a
        self._check_cohort(begin.cohort)  # 1b
        attempt = self._attempt(begin)
        self._check_size("cohort", len(begin.cohort), self.minimum)  # 1c
        self._check_threshold(begin.threshold, attempt.parameters.threshold)  # 1d
        self.attempt = attempt
        self._share_key = keys.Exchange(self._random(keys.KEY))
        self._mask_private = self._random(keys.KEY)
        self._mask_key = keys.Exchange(self._mask_private)
        return self._finish(
            begin, Advertise(attempt.context, self.name, self._share_key.public, self._mask_key.public)
        )

    def _attempt(self, begin: Begin) -> Attempt:
        return Attempt(self.contract, begin)

    def _check_fresh(self, begin: Begin) -> None:
        if (begin.round, begin.attempt) <= self._newest:
            raise StaleError(
                "attempt",
                f"{begin.attempt} of round {begin.round}",
                expected=f"one after attempt {self._newest[1]} of round {self._newest[0]}",
            )

    def _check_cohort(self, cohort: tuple[str, ...]) -> None:
        _check_names("cohort", cohort)
        for site in cohort:
            if site not in self.contract.roster:
                raise MemberError("cohort", site, expected="only sites of the roster")
        if self.name not in cohort:
            raise MemberError("cohort", f"without {self.name}", expected="this site to be in it")

    def _check_size(self, what: str, size: int, least: int) -> None:
        if size < least:
            raise TooFewSitesError(what, size, expected=f"at least {least} sites")

    def _check_threshold(self, offered: int, own: int) -> None:
        if offered != own:
            raise ThresholdError("threshold", offered, expected=f"{own}, which the plan gives")

    # 2. Share.

    def share(self, peers: Peers) -> Shares:
        """Step 2: check the keys of U1 and share b and s among the holders.

        Raises:
            StaleError, MemberError, OneTimeKeyError, SignatureError, TooFewSitesError, StepError: why it does
            not.
        """
        if (reply := self._check_order(2, peers)) is not None:
            return reply  # type: ignore[no-any-return]  # the reply of this same step
        self._check_context(peers.context)
        advertised = {message.site: message for message in peers.advertised}
        _check_names("keys", tuple(message.site for message in peers.advertised))  # 2a: no duplicates
        self._check_within("keys", advertised, self.attempt.cohort)  # 2b
        self._check_own_keys(advertised.get(self.name))  # 2c
        self._check_signatures([message for site, message in advertised.items() if site != self.name])  # 2d
        self._check_size("sites with keys", len(advertised), self._least())  # 2e
        graph, threshold, ctx = self.attempt.graph, self.attempt.parameters.threshold, self.attempt.context
        holders = [site for site in graph.holders(self.name) if site in advertised]
        self._check_size(f"holders of {self.name}'s shares", len(holders), threshold)

        self._peers = advertised
        self._transcript = transcript(ctx, peers.advertised)
        self._share_secrets = {
            site: self._share_key.secret(advertised[site].share_key) for site in holders if site != self.name
        }
        self._self_seed = self._random(masks.SEED)
        indices = [graph.index(site) for site in holders]
        self_shares = shamir.share(self._self_seed, threshold, indices, self._random)
        mask_shares = shamir.share(self._mask_private, threshold, indices, self._random)
        self._held: dict[str, tuple[bytes, bytes]] = {}  # by peer: its share of b, its share of s
        sealed = []
        for site, self_share, mask_share in zip(holders, self_shares, mask_shares, strict=True):
            if site == self.name:
                self._held[site] = (self_share, mask_share)
                continue
            key = keys.share_key(
                self._share_secrets[site],
                transcript=self._transcript,
                context=ctx,
                sender=self.name,
                recipient=site,
            )
            share = keys.encrypt_share(
                self_share + mask_share, key, context=ctx, sender=self.name, recipient=site
            )
            sealed.append((site, share))
        return self._finish(peers, Shares(ctx, self.name, commitment(ctx, self._self_seed), tuple(sealed)))

    def _check_own_keys(self, returned: Advertise | None) -> None:
        if returned is None:
            raise MemberError("keys", f"without {self.name}", expected="this site's own among them")
        if returned != self._done[0][1]:
            raise OneTimeKeyError("own one-time keys", expected="the ones that this site advertised")

    def _check_signatures(self, messages: Sequence[Signed]) -> None:
        for message in messages:
            _check_signature(self.contract.roster, message, self.attempt.context)

    def _least(self) -> int:
        """Sites that must be left for this site to go on."""
        return max(self.minimum, self.attempt.parameters.quorum)

    # 3. Mask.

    def receive(self, inbox: Inbox) -> None:
        """Step 3, first half: open the shares of the others and derive the masks.

        Raises:
            StaleError, MemberError, TooFewSitesError, ShareError, OneTimeKeyError, StepError: why it does
            not.
        """
        if self._check_order(3, inbox) is not None:
            return
        self._check_context(inbox.context)
        _check_names("sharers", inbox.sharers)  # 3a
        self._check_within("sharers", inbox.sharers, self._peers)
        self._check_includes_me("sharers", inbox.sharers)
        self._check_size("sharers", len(inbox.sharers), self._least())  # 3b
        sealed = dict(inbox.sealed)
        neighbours = [site for site in self.attempt.graph.neighbours(self.name) if site in inbox.sharers]
        _check_names("shares", tuple(sender for sender, _ in inbox.sealed))
        if sorted(sealed) != neighbours:
            wrong = set(sealed).symmetric_difference(neighbours)
            raise ShareError("shares", sorted(wrong), expected="one from each neighbour that shared")
        held = {site: self._open(site, sealed[site]) for site in neighbours}  # 3c

        self._held |= held
        self._sharers = inbox.sharers
        seeds = {
            site: keys.mask_seed(
                self._mask_key.secret(self._peers[site].mask_key),
                transcript=self._transcript,
                context=self.attempt.context,
                one=self.name,
                other=site,
            )
            for site in neighbours
        }
        self._seeds = Seeds(
            (self._self_seed, *(seed for site, seed in seeds.items() if self.name < site)),
            tuple(seed for site, seed in seeds.items() if self.name > site),
        )
        self._done.append((inbox, ()))

    def _open(self, sender: str, sealed: bytes) -> tuple[bytes, bytes]:
        key = keys.share_key(
            self._share_secrets[sender],
            transcript=self._transcript,
            context=self.attempt.context,
            sender=sender,
            recipient=self.name,
        )
        opened = self._decrypt(sealed, key, sender)
        if len(opened) != 2 * shamir.SHARE:
            raise ShareError(
                f"share of {sender}", f"{len(opened)} bytes", expected=f"{2 * shamir.SHARE} bytes"
            )
        return opened[: shamir.SHARE], opened[shamir.SHARE :]

    def _decrypt(self, sealed: bytes, key: bytes, sender: str) -> bytes:
        return keys.decrypt_share(
            sealed, key, context=self.attempt.context, sender=sender, recipient=self.name
        )

    def mask(
        self,
        vector: masks.Ring,
        *,
        model: bytes,
        offset: int = 0,
        threads: int = 1,
        pool: Executor | None = None,
    ) -> None:
        """Step 3: mask elements [offset, offset + len(vector)) of the site's vector, in place.

        The whole vector or its shards, in any order, each element once: two vectors under one mask give away
        their difference.

        Args:
            vector: Shape (m,), uint16 or uint32 as the ring, contiguous.
            model: Hash of the global model that the vector was computed from.
            offset: Where `vector` starts in the whole vector of `length` elements.
            threads: Parts that are masked at the same time.
            pool: Where they run; by default a pool for this call.

        Raises:
            MaskError: wrong type or place, or part of it was masked before.
            StaleError: the vector was computed from another model than the attempt's.
            StepError: it is not the time.
        """
        self._check_may_mask(model)
        _check_vector(vector, self.contract.ring_bits)
        if vector.size == 0:
            return
        end = offset + vector.size
        masks.check(vector, offset)  # before its range is recorded
        if end > self.contract.length:
            raise MaskError("shard", f"[{offset}, {end})", expected=f"a part of [0, {self.contract.length})")
        self._check_not_masked(offset, end)
        bisect.insort(self._ranges, (offset, end))
        masks.apply(
            vector,
            self._seeds.add,
            self._seeds.subtract,
            offset=offset,
            cipher=self.contract.cipher,
            threads=threads,
            pool=pool,
        )
        self._applied += vector.size

    def take_seeds(self, *, model: bytes) -> Seeds:
        """Step 3, for a site whose ranks mask their own shards: the seeds, given once. They must not leave
        the site.

        Args:
            model: Hash of the global model that the vector was computed from.

        Raises:
            StaleError: the vector was computed from another model than the attempt's.
            StepError: it is not the time, or they were taken, or the vector was masked here.
        """
        self._check_may_mask(model)
        if self._ranges:
            raise StepError("masks", expected="either to be applied here or given to ranks, not both")
        self._seeds_taken = True
        return self._seeds

    def masked(self, digest: bytes) -> Masked:
        """Step 3, end: sign the masked vector's digest; nothing can be masked from here on.

        Raises:
            StepError: it is not the time, or parts of the vector are not masked.
        """
        if self._masked is None:
            if len(self._done) != 3:
                raise StepError("masking", expected="the shares of the others first")
            if not self._seeds_taken and self._applied != self.contract.length:
                raise StepError("masking", expected=f"all {self.contract.length} elements to be masked first")
            self._masked = self._sign(Masked(self.attempt.context, self.name, digest))
        if self._masked.digest != digest:
            raise StepError("masked vector", expected="the one that was signed before")
        return self._masked

    def _check_may_mask(self, model: bytes) -> None:
        if len(self._done) != 3 or self._masked is not None or self._seeds_taken:
            raise StepError("masking", expected="to come once, after the shares and before the upload")
        if model != self.attempt.model:
            raise StaleError(
                "model", model.hex(), expected=f"{self.attempt.model.hex()}, which this attempt is about"
            )

    def _check_not_masked(self, start: int, end: int) -> None:
        at = bisect.bisect_left(self._ranges, (start, end))
        before = self._ranges[at - 1][1] if at else 0
        after = self._ranges[at][0] if at < len(self._ranges) else end
        if before > start or after < end:
            raise MaskError("shard", f"[{start}, {end})", expected="elements that were not masked before")

    # 4. Consistency.

    def confirm(self, survivors: Survivors) -> Confirm:
        """Step 4: sign the list of survivors, if this site can stand by it.

        Raises:
            StaleError, MemberError, TooFewSitesError, AnsweredError, AgreementError, StepError: why it does
            not.
        """
        if self._masked is None:
            raise StepError("survivors", expected="the upload of this site first")
        listed = survivors.survivors
        self._check_context(survivors.context)
        _check_names("survivors", listed)  # 4a
        self._check_within("survivors", listed, self._sharers)
        self._check_includes_me("survivors", listed)
        self._check_size("survivors", len(listed), self._least())  # 4b
        self._check_earlier(listed)  # 4c
        self._check_one_list(listed)  # 4d
        ctx = self.attempt.context
        reply = self._sign(Confirm(ctx, self.name, survivors_digest(ctx, listed)))
        if len(self._done) == 3:
            self._done.append((survivors, reply))
        return reply

    def _check_earlier(self, survivors: tuple[str, ...]) -> None:
        if self._earlier is None or (self._earlier.run, self._earlier.round) != (
            self.contract.run,
            self.attempt.round,
        ):
            return
        if self._earlier.survivors != _answered_digest(survivors):
            raise AnsweredError(
                "survivors",
                f"{len(survivors)} sites",
                expected=f"the same as in attempt {self._earlier.attempt}, which this site answered: "
                "the difference of two sums would open updates",
                fix="go on with the next round",
            )

    def _check_one_list(self, survivors: tuple[str, ...]) -> None:
        """4d, 5a: one list in an attempt."""
        shown = self._done[3][0] if len(self._done) > 3 else None
        if isinstance(shown, Survivors) and shown.survivors != survivors:
            raise AgreementError("survivors", expected="the one list that this site signed in this attempt")

    # 5. Unmask.

    def unmask(self, request: Unmask) -> Reveal:
        """Step 5: reveal one share of one secret of each peer, after the mark is written.

        Raises:
            StaleError, AgreementError, SignatureError, MemberError, ExclusiveError, AnsweredError, StepError:
            why not. Exception: what `answered` raised; nothing was revealed.
        """
        self._check_context(request.context)
        if (reply := self._check_repeat(request)) is not None:
            return reply
        self._check_one_list(request.survivors)  # 5a
        self._check_agreement(request)  # 5b
        _check_names("dropouts", request.dropouts)  # 5c
        self._check_exclusive(request)  # 5d
        ctx, survivors = self.attempt.context, request.survivors
        self_shares = tuple((site, self._held[site][0]) for site in survivors if site in self._held)
        mask_shares = tuple((site, self._held[site][1]) for site in request.dropouts if site in self._held)
        mark = Answered(
            self.contract.run, self.attempt.round, self.attempt.attempt, _answered_digest(survivors)
        )
        self.answered(mark)  # durable before the reply exists
        return self._finish(request, Reveal(ctx, self.name, self_shares, mask_shares))

    def _check_repeat(self, request: Unmask) -> Reveal | None:
        if len(self._done) < 4:
            raise StepError("unmask", expected="this site's signature under the survivors first")
        if len(self._done) == 4:
            return None
        before, reply = self._done[4]
        if before != request:
            raise AnsweredError("unmask", expected="the one request that this site answered in this attempt")
        return reply  # type: ignore[no-any-return]  # the reply of this same step

    def _check_agreement(self, request: Unmask) -> None:
        ctx = self.attempt.context
        digest = survivors_digest(ctx, request.survivors)
        signers = tuple(site for site, _ in request.signatures)
        _check_names("signatures", signers)
        self._check_within("signatures", signers, request.survivors)
        self._check_signatures(
            [Confirm(ctx, site, digest, signature) for site, signature in request.signatures]
        )
        needed = self.attempt.parameters.agreement
        if len(signers) < needed:
            raise AgreementError(
                "signatures under the survivors", len(signers), expected=f"at least {needed} sites'"
            )

    def _check_exclusive(self, request: Unmask) -> None:
        both = sorted(set(request.survivors) & set(request.dropouts))
        if both:
            raise ExclusiveError("survivors and dropouts", both, expected="each site in one of the two lists")
        if sorted(request.survivors + request.dropouts) != sorted(self._sharers):
            raise MemberError("survivors and dropouts", expected="exactly the sites that shared between them")

    # All steps.

    def _check_order(self, step: int, message: Message) -> Any:
        """The reply that was given to this same message before; None if the step is next."""
        if len(self._done) >= step:
            before, reply = self._done[step - 1]
            if before != message:
                raise StepError(f"step {step}", expected="to be asked for once in an attempt")
            return reply
        if len(self._done) != step - 1:
            raise StepError(f"step {step}", expected=f"step {len(self._done) + 1} first")
        return None

    def _check_context(self, ctx: bytes) -> None:
        _check_context(ctx, self.attempt.context, "message")

    def _check_within(self, what: str, sites: Iterable[str], known: Iterable[str]) -> None:
        extra = sorted(set(sites).difference(known))
        if extra:
            raise MemberError(what, extra[0], expected="only sites of the step before")

    def _check_includes_me(self, what: str, sites: Iterable[str]) -> None:
        if self.name not in sites:
            raise MemberError(what, f"without {self.name}", expected="this site to be in it")

    def _sign(self, message: S) -> S:
        signature = keys.sign(self._identity, message.STEP, message.context, message.body())
        return dataclasses.replace(message, signature=signature)

    def _finish(self, request: Message, reply: S) -> S:
        signed = self._sign(reply)
        self._done.append((request, signed))
        return signed


class Coordinator:
    """The coordinator's side of one attempt.

    The five pairs of methods follow the steps: the first takes one site's message and raises if it cannot
    stand (that site is then a dropout; the attempt goes on), the second ends the step and gives what the
    sites are sent next, or raises `TooFewSitesError`, which ends the attempt. Not thread-safe.

    Args:
        contract: As at the sites.
        round_: Round, from 1.
        attempt: Attempt at that round, from 1.
        model: Hash of the global model.
        cohort: Names of the round's sites.
    """

    def __init__(
        self, contract: Contract, round_: int, attempt: int, model: bytes, cohort: Iterable[str]
    ) -> None:
        self.contract = contract
        sites = tuple(sorted(cohort))
        threshold = contract.parameters(len(sites)).threshold
        self.begin = Begin(round_, attempt, model, sites, threshold)
        """What each site of the cohort is sent first."""
        self.attempt = Attempt(contract, self.begin)
        self._step = 1
        self._probe = keys.Exchange(bytes(keys.KEY))
        self._advertised: dict[str, Advertise] = {}
        self._shared: dict[str, Shares] = {}
        self._folded: set[str] = set()
        self._accumulator: masks.Ring | None = None
        self._confirmed: dict[str, Confirm] = {}
        self._revealed: dict[str, Reveal] = {}
        self._suspects: set[str] = set()

    # 1. Advertise.

    def advertised(self, message: Advertise) -> None:
        """Step 1: take one site's keys.

        Raises:
            StaleError, SignatureError, MemberError, StepError, OneTimeKeyError: the message cannot stand.
        """
        self._check(message, 1, self.attempt.cohort, self._advertised)
        self._probe.secret(message.share_key)  # a key of low order would be refused by every other site
        self._probe.secret(message.mask_key)
        self._advertised[message.site] = message

    def peers(self) -> Peers:
        """Step 1, end: what each site of U1 is sent."""
        self._close(1, self._advertised)
        messages = tuple(self._advertised[site] for site in sorted(self._advertised))
        self._transcript = transcript(self.attempt.context, messages)
        return Peers(self.attempt.context, messages)

    # 2. Share.

    def shared(self, message: Shares) -> None:
        """Step 2: take one site's encrypted shares.

        Raises:
            StaleError, SignatureError, MemberError, StepError, ShareError: the message cannot stand.
        """
        self._check(message, 2, self._advertised, self._shared)
        expected = [site for site in self.attempt.graph.neighbours(message.site) if site in self._advertised]
        if [site for site, _ in message.sealed] != expected:
            raise ShareError(f"shares of {message.site}", expected="one for each of its neighbours, sorted")
        self._shared[message.site] = message

    def inboxes(self) -> dict[str, Inbox]:
        """Step 2, end: what each site of U2 is sent."""
        self._close(2, self._shared)
        self._sharers = tuple(sorted(self._shared))
        sealed: dict[str, list[tuple[str, bytes]]] = {site: [] for site in self._sharers}
        for sender in self._sharers:
            for recipient, ciphertext in self._shared[sender].sealed:
                if recipient in sealed:
                    sealed[recipient].append((sender, ciphertext))
        return {
            site: Inbox(self.attempt.context, self._sharers, tuple(sealed[site])) for site in self._sharers
        }

    # 3. Mask.

    def fold(self, message: Masked, vector: masks.Ring) -> None:
        """Step 3: add one site's whole masked vector to the accumulator; it is not needed after that.

        Either all of it is added or nothing: an upload that did not come whole is not folded, and its site is
        not in U3.

        Args:
            message: The site's statement; its digest is checked by whoever received the vector's bytes.
            vector: Shape (length,), of the ring's type; may be a memory map. It is only read.

        Raises:
            StaleError, SignatureError, MemberError, StepError, MaskError: the upload cannot stand.
        """
        self._check(message, 3, self._shared, self._folded)
        self._check_upload(message.site, vector)
        if self._accumulator is None:
            self._accumulator = np.zeros(self.contract.length, _dtype(self.contract.ring_bits))
        np.add(self._accumulator, vector, out=self._accumulator)
        self._folded.add(message.site)

    def _check_upload(self, site: str, vector: masks.Ring) -> None:
        _check_vector(vector, self.contract.ring_bits)
        if vector.size != self.contract.length:
            raise MaskError(
                f"vector of {site}", f"{vector.size} elements", expected=f"{self.contract.length} elements"
            )

    def survivors(self) -> Survivors:
        """Step 3, end: what each site of U3 is sent."""
        self._close(3, self._folded)
        self._survivors = tuple(sorted(self._folded))
        return Survivors(self.attempt.context, self._survivors)

    # 4. Consistency.

    def confirmed(self, message: Confirm) -> None:
        """Step 4: take one site's signature under the survivors.

        Raises:
            StaleError, SignatureError, MemberError, StepError, AgreementError: the message cannot stand.
        """
        self._check(message, 4, self._folded, self._confirmed)
        if message.survivors != survivors_digest(self.attempt.context, self._survivors):
            raise AgreementError(f"survivors of {message.site}", expected="the list that was sent")
        self._confirmed[message.site] = message

    def request(self) -> Unmask:
        """Step 4, end: what each site of U3 is sent."""
        self._close(4, self._confirmed, least=self.attempt.parameters.agreement)
        dropouts = tuple(site for site in self._sharers if site not in self._folded)
        signatures = tuple((site, self._confirmed[site].signature) for site in sorted(self._confirmed))
        return Unmask(self.attempt.context, self._survivors, dropouts, signatures)

    # 5. Unmask.

    def revealed(self, message: Reveal) -> None:
        """Step 5: take one site's shares.

        Raises:
            StaleError, SignatureError, MemberError, StepError, ShareError: the message cannot stand.
        """
        self._check(message, 5, self._folded, self._revealed)
        held = set(self.attempt.graph.holders(message.site))  # to hold shares is mutual
        self_shares = [site for site in self._survivors if site in held]
        mask_shares = [site for site in self._sharers if site in held and site not in self._folded]
        if [site for site, _ in message.self_shares] != self_shares or [
            site for site, _ in message.mask_shares
        ] != mask_shares:
            raise ShareError(
                f"shares from {message.site}", expected="one of each site that it holds shares of"
            )
        if any(len(share) != shamir.SHARE for _, share in message.self_shares + message.mask_shares):
            raise ShareError(f"shares from {message.site}", expected=f"{shamir.SHARE} bytes each")
        self._revealed[message.site] = message

    @property
    def enough(self) -> bool:
        """Every secret that is needed has t shares."""
        needed = self.attempt.parameters.threshold
        return self._step == 5 and all(
            sum(holder in self._revealed for holder in self.attempt.graph.holders(site)) >= needed
            for site in self._needed()
        )

    def _needed(self) -> list[str]:
        """The survivors, and the dropouts that share a mask with one."""
        return [
            site
            for site in self._sharers
            if site in self._folded or not self._folded.isdisjoint(self.attempt.graph.neighbours(site))
        ]

    # 6. Sum.

    def sum(self, *, threads: int = 1, pool: Executor | None = None) -> masks.Ring:
        """Step 6: reconstruct the secrets and take the masks off.

        Returns:
            Shape (length,), uint16 or uint32: the sum of the survivors' vectors modulo 2^b. It is the
            accumulator.

        Raises:
            TooFewSitesError: a secret has fewer than t shares; more may come. Nothing was reconstructed.
            ReconstructionError: a site's shares, commitment or key do not fit together; it is named.
            StepError: the sum was taken before, or it is not the time.
        """
        if self._step != 5 or self._accumulator is None:
            raise StepError("sum", expected="to be taken once, after the shares were asked for")
        if not self.enough:
            raise TooFewSitesError(
                "sites that revealed shares",
                len(self._revealed),
                expected=f"{self.attempt.parameters.threshold} holders of each secret",
                fix="try the round again",
            )
        graph, ctx = self.attempt.graph, self.attempt.context
        self_shares: dict[str, dict[str, bytes]] = {}
        mask_shares: dict[str, dict[str, bytes]] = {}
        for holder in sorted(self._revealed):
            for into, shares in (
                (self_shares, self._revealed[holder].self_shares),
                (mask_shares, self._revealed[holder].mask_shares),
            ):
                for site, share in shares:
                    into.setdefault(site, {})[holder] = share
        add: list[bytes] = []
        subtract: list[bytes] = []
        for site in self._needed():
            if site in self._folded:
                subtract.append(self._reconstruct(site, self_shares[site], self._fits_commitment))
                continue
            exchange = keys.Exchange(self._reconstruct(site, mask_shares[site], self._fits_key))
            for other in graph.neighbours(site):
                if other in self._folded:
                    seed = keys.mask_seed(
                        exchange.secret(self._advertised[other].mask_key),
                        transcript=self._transcript,
                        context=ctx,
                        one=site,
                        other=other,
                    )
                    (subtract if other < site else add).append(seed)
        self._step = 6
        masks.apply(self._accumulator, add, subtract, cipher=self.contract.cipher, threads=threads, pool=pool)
        return self._accumulator

    def _reconstruct(self, site: str, shares: dict[str, bytes], fits: Callable[[str, bytes], bool]) -> bytes:
        """The secret of `site`; with more than t shares, whatever one holder says."""
        threshold = self.attempt.parameters.threshold
        holders = sorted(
            shares, key=lambda holder: (holder in self._suspects, self.attempt.graph.index(holder))
        )
        for left_out in (None, *holders[:threshold]):
            chosen = [holder for holder in holders if holder != left_out][:threshold]
            if len(chosen) < threshold:
                break
            chosen.sort(key=self.attempt.graph.index)
            interpolation = _interpolation(tuple(self.attempt.graph.index(holder) for holder in chosen))
            try:
                secret = interpolation.secret([shares[holder] for holder in chosen])
            except ShareError:
                continue  # no field element, or no secret: one of them is wrong
            if fits(site, secret):
                if left_out is not None:
                    self._suspects.add(left_out)
                return secret
        raise ReconstructionError(
            f"secret of {site}",
            expected=f"shares that fit what {site} committed to: {site} or a holder of its shares was wrong",
            fix="try the round again",
        )

    def _fits_commitment(self, site: str, seed: bytes) -> bool:
        return hmac.compare_digest(commitment(self.attempt.context, seed), self._shared[site].commitment)

    def _fits_key(self, site: str, private: bytes) -> bool:
        return keys.public_key(private) == self._advertised[site].mask_key

    # All steps.

    def _check(self, message: Signed, step: int, known: Iterable[str], seen: Iterable[str]) -> None:
        if self._step != step:
            raise StepError(f"step {step} of {message.site}", expected=f"a message of step {self._step}")
        if message.site not in known:
            raise MemberError("site", message.site, expected="one of the step before")
        if message.site in seen:
            raise StepError(f"step {step} of {message.site}", expected="one message of each site")
        self._check_signature(message)

    def _check_signature(self, message: Signed) -> None:
        _check_signature(self.contract.roster, message, self.attempt.context)

    def _close(self, step: int, sites: Iterable[str], least: int | None = None) -> None:
        if self._step != step:
            raise StepError(f"end of step {step}", expected=f"the end of step {self._step}")
        count, needed = len(list(sites)), self.attempt.parameters.quorum if least is None else least
        if count < needed:
            raise TooFewSitesError(
                f"sites that finished step {step}",
                count,
                expected=f"at least {needed} of {self.attempt.parameters.n}",
                fix="try the round again",
            )
        self._step = step + 1


@functools.lru_cache(maxsize=64)
def _interpolation(indices: tuple[int, ...]) -> shamir.Interpolation:
    return shamir.Interpolation(indices)


def _answered_digest(survivors: tuple[str, ...]) -> bytes:
    return hashlib.sha256(pack("answered", survivors)).digest()


def _dtype(ring_bits: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype(np.uint16) if ring_bits == 16 else np.dtype(np.uint32)


def _check_vector(vector: masks.Ring, ring_bits: int) -> None:
    if vector.dtype != _dtype(ring_bits) or vector.ndim != 1:
        raise MaskError(
            "vector", f"{vector.dtype}{list(vector.shape)}", expected=f"one dimension of uint{ring_bits}"
        )


def _check_names(what: str, sites: tuple[str, ...]) -> None:
    if any(one >= other for one, other in itertools.pairwise(sites)):
        raise MemberError(what, expected="each site once, sorted by name")


def _check_context(ctx: bytes, own: bytes, what: str) -> None:
    if ctx != own:
        raise StaleError(
            what, expected="the same run, round, attempt, roster, plan, model and cohort as here"
        )


def _check_signature(roster: Roster, message: Signed, ctx: bytes) -> None:
    key = roster.key(message.site)
    _check_context(message.context, ctx, f"message of {message.site}")
    keys.verify(key, message.signature, message.STEP, ctx, message.body(), site=message.site)
