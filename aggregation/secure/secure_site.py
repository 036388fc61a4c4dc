"""One site's side of one attempt at a secure sum; `secure_sum.py` numbers the steps and the checks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation.secure import keys, shamir
from cloister.aggregation.secure.secure_sum import (
    Answered,
    Attempt,
    Contract,
    answered_digest,
    check_context,
    check_names,
    check_signature,
    commitment,
    ring_dtype,
    share_hash,
    sharers_digest,
    sketch_seed,
    survivors_digest,
    transcript,
)
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.span import Piece, check_pieces
from cloister.protocol.errors import (
    AgreementError,
    AnsweredError,
    ExclusiveError,
    MemberError,
    OneTimeKeyError,
    ShareError,
    StaleError,
    StepError,
    TooFewSitesError,
)
from cloister.protocol.messages.messages import (
    NOTHING_CARRIED,
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
    Statements,
    Step,
    Survivors,
    Told,
    Unmask,
)

S = TypeVar("S", bound=Signed)
Message: TypeAlias = Told | Inbox


@dataclass(frozen=True)
class Seeds:
    """The masks of one site's vector, for its own ranks.

    A rank calls `masks.apply(shard, seeds.add, seeds.subtract, offset=...)`.
    """

    add: tuple[bytes, ...] = field(repr=False)
    subtract: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True)
class Member:
    """A site, the same for every secure sum."""

    name: str
    """Its name in the roster."""
    identity: Ed25519PrivateKey
    minimum: int
    """The fewest sites whose sum it takes part in, by its policy."""


@dataclass(frozen=True)
class Past:
    """What a site has done before an attempt."""

    answered: Answered | None = None
    """The mark that it wrote in an earlier attempt at this round, if there is one."""
    joined: tuple[int, int] = (0, 0)
    """Round and attempt that it joined last; only a later attempt is accepted."""
    history: bytes = NOTHING_CARRIED
    """Digest of all instructions on which the state that it carries depends."""


@dataclass(frozen=True, repr=False)
class _OneTimeKeys:
    """The keys that a site has made for one attempt."""

    share: keys.Exchange
    mask: keys.Exchange
    mask_private: bytes


@dataclass(frozen=True, repr=False)
class _Shared:
    """After step 3: U1, and what this site has shared among its holders."""

    peers: dict[str, Advertise]
    transcript: bytes
    secrets: dict[str, bytes]
    """By holder: the secret under which it is sent shares, and sends its own."""
    self_seed: bytes
    own: dict[str, tuple[bytes, bytes]]
    """The shares that this site holds of itself, under its name; none unless it is among its holders."""


@dataclass(frozen=True, repr=False)
class _Received:
    """After step 4: U2, and the shares of others."""

    sharers: tuple[str, ...]
    agreed: bytes
    """Digest of the keys of U1 and of U2."""
    held: dict[str, tuple[bytes, bytes]]
    """By peer: its share of b, its share of s."""
    complaints: tuple[str, ...]
    """Senders of shares that could not be opened."""
    seeds: Seeds


class SecureSite:
    """One site's side of one attempt; each step is idempotent.

    The same message handled twice gives the same reply; a different message for a step that is done is refused.

    Args:
        contract: As the site derives it from the plan and its pinned roster.
        member: The site.
        random: Returns that many bytes from a cryptographic source.
        answered: Writes the mark durably; called before shares are revealed, and may raise to prevent that.
        past: What the site has done before the attempt.
    """

    def __init__(
        self,
        contract: Contract,
        member: Member,
        *,
        random: Callable[[int], bytes],
        answered: Callable[[Answered], None],
        past: Past = Past(),
    ) -> None:
        self.contract = contract
        self.member = member
        self.name = member.name
        self.answered = answered
        self._random = random
        self._past = past
        self._done: dict[Step, tuple[Message, Any]] = {}  # by finished step: the message and the reply
        self._masks: Literal["closed", "open", "used"] = "closed"
        """`open`: the masks may be used, here or by the ranks, once; `used`: they were, to the end."""
        self._masked: Masked | None = None

    # 2. Advertise.

    def advertise(self, begin: Begin) -> Advertise:
        """Step 2: join the attempt with fresh one-time keys.

        Raises:
            StaleError, MemberError, TooFewSitesError, ParameterError, StepError: it refuses.
        """
        if (reply := self._check_order(Step.ADVERTISE, begin)) is not None:
            return reply  # type: ignore[no-any-return]  # the reply of this same step
        self._check_fresh(begin)  # 2a
        attempt = self._attempt(begin)
        self._check_drawn(attempt)  # 2b
        self._check_size("cohort", attempt.parameters.n, self.member.minimum)  # 2c
        self.attempt = attempt
        share, private = keys.Exchange(self._random(keys.KEY)), self._random(keys.KEY)
        self._keys = own = _OneTimeKeys(share, keys.Exchange(private), private)
        ctx, history = attempt.context, self._past.history
        return self._finish(begin, Advertise(ctx, self.name, own.share.public, own.mask.public, history))

    def _attempt(self, begin: Begin) -> Attempt:
        return Attempt(self.contract, begin)

    def _check_fresh(self, begin: Begin) -> None:
        if (begin.round, begin.attempt) <= self._past.joined:
            raise StaleError(
                "attempt",
                f"{begin.attempt} of round {begin.round}",
                expected=f"one after attempt {self._past.joined[1]} of round {self._past.joined[0]}",
            )

    def _check_drawn(self, attempt: Attempt) -> None:
        if self.name not in attempt.cohort:
            raise MemberError("cohort", f"without {self.name}", expected=f"a draw of {self.name}")

    def _check_size(self, what: str, size: int, least: int) -> None:
        if size < least:
            raise TooFewSitesError(what, size, expected=f"at least {least} sites")

    # 3. Share.

    def share(self, peers: Peers) -> Shares:
        """Step 3: check the keys of U1 and share b and s among the holders.

        Raises:
            StaleError, MemberError, OneTimeKeyError, SignatureError, TooFewSitesError, StepError: it refuses.
        """
        if (reply := self._check_order(Step.SHARE, peers)) is not None:
            return reply  # type: ignore[no-any-return]  # the reply of this same step
        self._check_context(peers.context)
        advertised = {message.site: message for message in peers.advertised}
        check_names("keys", tuple(message.site for message in peers.advertised))  # 3a: no duplicates
        self._check_within("keys", advertised, self.attempt.cohort)  # 3b
        self._check_own_keys(advertised.get(self.name))  # 3c
        self._check_signatures([message for site, message in advertised.items() if site != self.name])  # 3d
        self._check_size("sites with keys", len(advertised), self._least())  # 3e
        graph, threshold, ctx = self.attempt.graph, self.attempt.parameters.threshold, self.attempt.context
        holders = [site for site in graph.holders(self.name) if site in advertised]
        self._check_holders(holders)  # 3f

        shown = transcript(ctx, peers.advertised)
        secrets = {
            site: self._keys.share.secret(advertised[site].share_key) for site in holders if site != self.name
        }
        seed = self._random(masks.SEED)
        indices = [graph.index(site) for site in holders]
        self_shares = shamir.share(seed, threshold, indices, self._random)
        mask_shares = shamir.share(self._keys.mask_private, threshold, indices, self._random)
        own, sealed, hashes = {}, [], []
        for site, self_share, mask_share in zip(holders, self_shares, mask_shares, strict=True):
            hashes.append((site, *self._hashes(self.name, site, (self_share, mask_share))))
            if site == self.name:
                own[site] = (self_share, mask_share)
                continue
            key = keys.share_key(
                secrets[site], transcript=shown, context=ctx, sender=self.name, recipient=site
            )
            share = keys.encrypt_share(
                self_share + mask_share, key, context=ctx, sender=self.name, recipient=site
            )
            sealed.append((site, share))
        self._shared = _Shared(advertised, shown, secrets, seed, own)
        committed = commitment(ctx, seed)
        return self._finish(peers, Shares(ctx, self.name, committed, tuple(sealed), tuple(hashes)))

    def _check_holders(self, present: Iterable[str]) -> None:
        """3f, 4c: t holders of this site's shares, itself among them in the complete graph."""
        holders = set(self.attempt.graph.holders(self.name)).intersection(present)
        what = f"holders of {self.name}'s shares"
        self._check_size(what, len(holders), self.attempt.parameters.threshold)

    def _hashes(self, sender: str, holder: str, shares: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        own, mask = (share_hash(self.attempt.context, it, sender=sender, holder=holder) for it in shares)
        return own, mask

    def _check_own_keys(self, returned: Advertise | None) -> None:
        if returned is None:
            raise MemberError("keys", f"without {self.name}", expected="this site's own among them")
        if returned != self._done[Step.ADVERTISE][1]:
            raise OneTimeKeyError("own one-time keys", expected="the ones that this site advertised")

    def _check_signatures(self, messages: Sequence[Signed]) -> None:
        for message in messages:
            check_signature(self.contract.roster, message, self.attempt.context, remember=True)

    def _least(self) -> int:
        """Fewest remaining sites with which this site continues."""
        return max(self.member.minimum, self.attempt.parameters.quorum)

    # 4. Mask.

    def receive(self, inbox: Inbox) -> None:
        """Step 4, first half: open the shares of the others and derive the masks.

        The same message after `masked`, because its answer was lost, lets the masks be applied again, to the vector
        that was signed: `masked` then refuses another digest.

        A share that cannot be opened is left out, and `masked` names its sender: one bad site does not stop the others.

        Raises:
            StaleError, MemberError, TooFewSitesError, ShareError, OneTimeKeyError, StepError: it refuses.
        """
        if self._check_order(Step.UPDATE, inbox) is not None:
            if self._masked is not None:
                self._masks = "open"
            return
        self._check_context(inbox.context)
        check_names("sharers", inbox.sharers)  # 4a
        self._check_within("sharers", inbox.sharers, self._shared.peers)
        self._check_includes_me("sharers", inbox.sharers)
        self._check_size("sharers", len(inbox.sharers), self._least())  # 4b
        self._check_holders(inbox.sharers)  # 4c
        neighbours = [site for site in self.attempt.graph.neighbours(self.name) if site in inbox.sharers]
        for what, senders in (
            ("shares", [sender for sender, _ in inbox.sealed]),
            ("hashes of shares", [sender for sender, _, _ in inbox.hashes]),
        ):
            if senders != neighbours:
                wrong = sorted(set(senders).symmetric_difference(neighbours))
                raise ShareError(what, wrong, expected="one from each neighbour that shared, sorted by name")
        held = {}
        for (site, ciphertext), (_, *hashes) in zip(inbox.sealed, inbox.hashes, strict=True):
            with contextlib.suppress(ShareError):
                held[site] = self._open(site, ciphertext, tuple(hashes))  # 4d

        seeds = {
            site: keys.mask_seed(
                self._keys.mask.secret(self._shared.peers[site].mask_key),
                transcript=self._shared.transcript,
                context=self.attempt.context,
                one=self.name,
                other=site,
            )
            for site in neighbours
        }
        self._received = _Received(
            inbox.sharers,
            sharers_digest(self.attempt.context, self._shared.transcript, inbox.sharers),
            self._shared.own | held,
            tuple(site for site in neighbours if site not in held),
            Seeds(
                (self._shared.self_seed, *(seed for site, seed in seeds.items() if self.name < site)),
                tuple(seed for site, seed in seeds.items() if self.name > site),
            ),
        )
        self._done[Step.UPDATE] = (inbox, ())
        self._masks = "open"

    def _open(self, sender: str, sealed: bytes, hashes: tuple[bytes, ...]) -> tuple[bytes, bytes]:
        key = keys.share_key(
            self._shared.secrets[sender],
            transcript=self._shared.transcript,
            context=self.attempt.context,
            sender=sender,
            recipient=self.name,
        )
        opened = self._decrypt(sealed, key, sender)
        if len(opened) != 2 * shamir.SHARE:
            raise ShareError(
                f"share of {sender}", f"{len(opened)} bytes", expected=f"{2 * shamir.SHARE} bytes"
            )
        shares = opened[: shamir.SHARE], opened[shamir.SHARE :]
        if self._hashes(sender, self.name, shares) != hashes:
            raise ShareError(f"share of {sender}", expected=f"the one that {sender} has signed the hash of")
        return shares

    def _decrypt(self, sealed: bytes, key: bytes, sender: str) -> bytes:
        return keys.decrypt_share(
            sealed, key, context=self.attempt.context, sender=sender, recipient=self.name
        )

    def mask(self, pieces: Sequence[Piece], *, instructions: bytes, threads: int = 1) -> None:
        """Step 4: mask the site's whole vector, in place and once: two vectors under one mask reveal their difference.

        Args:
            pieces: Offset and elements of each span, of the ring's unsigned type, contiguous, that tile the vector.
            instructions: Digest of the instructions that the vector was computed by.
            threads: Parts that are masked at the same time.

        Raises:
            UpdateError: the pieces have another type, or do not tile the vector.
            MaskError: a piece is not contiguous, or read-only.
            StaleError: the vector was computed by other instructions than the attempt's.
            StepError: this is not the current step.
        """
        self._check_may_mask(instructions)
        check_pieces(pieces, self.contract.length, ring_dtype(self.contract.ring_bits))
        self._masks = "closed"
        seeds = self._received.seeds
        for offset, vector in pieces:
            masks.apply(vector, seeds.add, seeds.subtract, offset=offset, threads=threads)
        self._masks = "used"

    def take_seeds(self, *, instructions: bytes) -> Seeds:
        """Step 4, for a site whose ranks mask their own shards: the seeds, returned only once.

        They must not leave the site.

        Args:
            instructions: As for `mask`.

        Raises:
            StaleError: the vector was computed by other instructions than the attempt's.
            StepError: this is not the current step, or they were taken, or the vector was masked here.
        """
        self._check_may_mask(instructions)
        self._masks = "used"
        return self._received.seeds

    def masked(self, digest: bytes) -> Masked:
        """Step 4, end: sign the masked vector's digest and the sharers that it was masked with; nothing can be masked
        after this, until the step's message arrives again.

        Raises:
            StepError: this is not the current step, parts of the vector are not masked, or another vector was signed.
        """
        if self._masked is None:
            if self._masks != "used":
                expected = (
                    f"the shares of the others, and all {self.contract.length} elements to be masked first"
                )
                raise StepError("masking", expected=expected)
            ctx, received = self.attempt.context, self._received
            self._masked = self._sign(Masked(ctx, self.name, digest, received.agreed, received.complaints))
        self._check_same(self._masked, digest)
        self._masks = "closed"
        return self._masked

    def _check_same(self, signed: Masked, digest: bytes) -> None:
        """Two vectors under one keystream would reveal their difference."""
        if signed.digest != digest:
            raise StepError("masked vector", expected="the one that was signed before")

    def _check_may_mask(self, instructions: bytes) -> None:
        if self._masks != "open":
            raise StepError("masking", expected="it once, after the shares and before the upload")
        self._check_instructions(instructions)

    def check_told(self, instructions: bytes, *, fresh: bool) -> None:
        """4e, before a vector is made: it will be computed by the instructions of this attempt, and from state of one
        history at all sites or from none.

        Args:
            instructions: Their digest, computed by the site itself.
            fresh: Whether they let no site use what it carries.

        Raises:
            StaleError: the attempt has other instructions.
            AgreementError: the sites of U1 carry what depends on different instructions.
            StepError: this site has not seen the keys of U1.
        """
        if Step.SHARE not in self._done:
            raise StepError("update", expected="the keys of the other sites first")
        self._check_instructions(instructions)
        if not fresh:
            self._check_one_history()

    def _check_instructions(self, instructions: bytes) -> None:
        own = self.attempt.instructions
        if instructions != own:
            raise StaleError(
                "instructions", instructions.hex(), expected=f"{own.hex()}, those of this attempt"
            )

    def _check_one_history(self) -> None:
        others = sorted(
            site for site, peer in self._shared.peers.items() if peer.history != self._past.history
        )
        if others:
            raise AgreementError(
                "history of carried state",
                others[0],
                expected="that of this site at all sites of the sum, or instructions that let none use it",
            )

    # 5. Consistency.

    def confirm(self, survivors: Survivors) -> Confirm:
        """Step 5: check the list of survivors and sign it.

        Raises:
            StaleError, MemberError, TooFewSitesError, AnsweredError, AgreementError, StepError: it refuses.
        """
        if self._masked is None:
            raise StepError("survivors", expected="the upload of this site first")
        listed = survivors.survivors
        self._check_context(survivors.context)
        check_names("survivors", listed)  # 5a
        self._check_within("survivors", listed, self._received.sharers)
        self._check_includes_me("survivors", listed)
        self._check_size("survivors", len(listed), self._least())  # 5b
        self._check_earlier(listed)  # 5c
        self._check_one_list(listed)  # 5d
        self._check_statements(survivors)  # 5e
        ctx, agreed = self.attempt.context, self._received.agreed
        reply = self._sign(Confirm(ctx, self.name, survivors_digest(agreed, listed, _digests(survivors))))
        self._done.setdefault(Step.CONFIRM, (survivors, reply))
        return reply

    @property
    def seed(self) -> bytes:
        """Step 5, where vectors are sketched: the seed of the sketch.

        Raises:
            StepError: this site has not signed the survivors, or vectors are not sketched.
        """
        if not self.contract.sketches:
            raise StepError("sketch", expected="none in this sum")
        return sketch_seed(self._confirmed().survivors)

    def sketched(self, sketch: bytes) -> Confirm:
        """Step 5, end, where vectors are sketched: the reply with the sketch, which the coordinator alone gets.

        Args:
            sketch: Of the vector that this site has masked, before its masks, under `seed`.

        Raises:
            StepError: as for `seed`.
        """
        if not self.contract.sketches:
            raise StepError("sketch", expected="none in this sum")
        confirm = self._confirmed()
        signed = self._sign(Sketched(confirm.context, self.name, confirm.survivors, sketch))
        return dataclasses.replace(confirm, sketched=signed)

    def _confirmed(self) -> Confirm:
        if Step.CONFIRM not in self._done:
            raise StepError("sketch", expected="this site's signature under the survivors first")
        _, confirm = self._done[Step.CONFIRM]
        assert isinstance(confirm, Confirm), "the reply of that step"
        return confirm

    def _shown(self) -> Survivors:
        """What this site was shown in step 5."""
        shown, _ = self._done[Step.CONFIRM]
        assert isinstance(shown, Survivors), "the message of that step"
        return shown

    def _check_statements(self, survivors: Survivors) -> None:
        """5e: the seed of the sketches follows from the vectors that all survivors have signed, and is one in an
        attempt. Otherwise a coordinator could name any seed; so it can only choose among lists of survivors."""
        if Step.CONFIRM in self._done:
            if self._shown().statements != survivors.statements:
                raise AgreementError("statements", expected="those that this site signed in this attempt")
            return
        wanted = survivors.survivors if self.contract.sketches else ()
        stated = tuple(site for site, *_ in survivors.statements)
        if stated != wanted:
            raise MemberError("statements", len(stated), expected=f"{len(wanted)}, in the survivors' order")
        self._check_stated(survivors.statements)
        assert self._masked is not None, "a vector was signed before the survivors were shown"
        if wanted and _digests(survivors)[wanted.index(self.name)] != self._masked.digest:
            raise AgreementError("digest of this site's vector", expected="the one that it signed")

    def _check_stated(self, statements: Statements) -> None:
        """Sites have masked these vectors, with the same U1 and U2 as this one."""
        ctx, agreed = self.attempt.context, self._received.agreed
        self._check_signatures(
            [
                Masked(ctx, site, digest, agreed, complaints, signature)
                for site, digest, complaints, signature in statements
            ]
        )

    def _check_earlier(self, survivors: tuple[str, ...]) -> None:
        earlier = self._past.answered
        if earlier is None or (earlier.run, earlier.round) != (self.contract.run, self.attempt.round):
            return
        if earlier.survivors != answered_digest(
            self.contract.roster.hash, self.attempt.instructions, survivors
        ):
            raise AnsweredError(
                "survivors",
                f"{len(survivors)} sites",
                expected=f"the same survivors and instructions as in attempt {earlier.attempt}, which this site "
                "answered: the difference of two sums would reveal updates",
                fix="continue with the next round",
            )

    def _check_one_list(self, survivors: tuple[str, ...]) -> None:
        """5d, 6a: one list in an attempt."""
        shown, _ = self._done.get(Step.CONFIRM, (None, None))
        if isinstance(shown, Survivors) and shown.survivors != survivors:
            raise AgreementError("survivors", expected="the one list that this site signed in this attempt")

    # 6. Unmask.

    def unmask(self, request: Unmask) -> Reveal:
        """Step 6: reveal one share of one secret of each peer, after the mark is written.

        Raises:
            StaleError, AgreementError, SignatureError, MemberError, ExclusiveError, AnsweredError, StepError: it
                refuses; SignatureError also where a survivor has masked with other sharers than this site.
            Exception: whatever `answered` raised; nothing was revealed.
        """
        self._check_context(request.context)
        if (reply := self._check_repeat(request)) is not None:
            return reply
        self._check_one_list(request.survivors)  # 6a
        self._check_agreement(request)  # 6b
        check_names("dropouts", request.dropouts)  # 6c
        self._check_exclusive(request)  # 6d
        self._check_masked_alike(request)  # 6e
        ctx, survivors = self.attempt.context, request.survivors
        held = self._received.held
        self_shares = tuple((site, held[site][0]) for site in survivors if site in held)
        mask_shares = tuple((site, held[site][1]) for site in request.dropouts if site in held)
        answered = answered_digest(self.contract.roster.hash, self.attempt.instructions, survivors)
        mark = Answered(self.contract.run, self.attempt.round, self.attempt.attempt, answered)
        self.answered(mark)  # durable before the reply exists
        return self._finish(request, Reveal(ctx, self.name, self_shares, mask_shares))

    def _check_repeat(self, request: Unmask) -> Reveal | None:
        if Step.CONFIRM not in self._done:
            raise StepError("unmask", expected="this site's signature under the survivors first")
        if Step.UNMASK not in self._done:
            return None
        before, reply = self._done[Step.UNMASK]
        if before != request:
            raise AnsweredError("unmask", expected="the one request that this site answered in this attempt")
        return reply  # type: ignore[no-any-return]  # the reply of this same step

    def _check_agreement(self, request: Unmask) -> None:
        ctx = self.attempt.context
        digest = survivors_digest(self._received.agreed, request.survivors, _digests(self._shown()))
        signers = tuple(site for site, _ in request.signatures)
        check_names("signatures", signers)
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
            raise ExclusiveError(
                "survivors and dropouts", both, expected="each site in only one of the two lists"
            )
        if sorted(request.survivors + request.dropouts) != sorted(self._received.sharers):
            raise MemberError("survivors and dropouts", expected="together exactly the sites that shared")

    def _check_masked_alike(self, request: Unmask) -> None:
        """6e: each survivor whose share this site holds has masked with the same U1 and U2 as this site.

        Otherwise a coordinator could tell one site that its neighbours dropped out, so that it masks with few others or
        none, and then have the same neighbours open its self-mask.
        """
        held = [site for site in request.survivors if site in self._received.held]
        stated = [site for site, *_ in request.statements]
        if stated != held:
            wrong = sorted(set(stated).symmetric_difference(held))
            raise MemberError(
                "statements", wrong, expected="that of each survivor whose share is wanted, sorted by name"
            )
        self._check_stated(request.statements)
        shown = self._shown().statements
        if shown and not set(shown).issuperset(request.statements):
            raise AgreementError("statements", expected="those that were shown with the survivors")

    # All steps.

    def _check_order(self, step: Step, message: Message) -> Any:
        """The earlier reply to this same message; None if the step is the next one."""
        if step in self._done:
            before, reply = self._done[step]
            if before != message:
                raise StepError(step.label, expected="one request in an attempt")
            return reply
        due = Step(Step.ADVERTISE + len(self._done))
        if step is not due:
            raise StepError(step.label, expected=f"{due.label} first")
        return None

    def _check_context(self, ctx: bytes) -> None:
        check_context(ctx, self.attempt.context, "message")

    def _check_within(self, what: str, sites: Iterable[str], known: Iterable[str]) -> None:
        extra = sorted(set(sites).difference(known))
        if extra:
            raise MemberError(what, extra[0], expected="only sites of the previous step")

    def _check_includes_me(self, what: str, sites: Iterable[str]) -> None:
        if self.name not in sites:
            raise MemberError(what, f"without {self.name}", expected="this site to be in it")

    def _sign(self, message: S) -> S:
        signature = keys.sign(self.member.identity, message.STEP.label, message.context, message.body())
        return dataclasses.replace(message, signature=signature)

    def _finish(self, request: Message, reply: S) -> S:
        signed = self._sign(reply)
        self._done[signed.STEP] = (request, signed)
        return signed


def _digests(survivors: Survivors) -> tuple[bytes, ...]:
    """Of the masked vectors in a list of survivors, where vectors are sketched."""
    return tuple(digest for _, digest, *_ in survivors.statements)
