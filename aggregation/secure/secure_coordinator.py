"""The coordinator's side of one attempt at a secure sum; `secure_sum.py` numbers the steps."""

from __future__ import annotations

import bisect
import functools
import hmac
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.aggregation.secure import keys, shamir
from cloister.aggregation.secure.secure_sum import (
    Attempt,
    Contract,
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
from cloister.aggregation.secure.sketches import Sketches
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.sketch import Lengths
from cloister.aggregation.vector.span import Piece, add_pieces, check_pieces
from cloister.protocol.errors import (
    AgreementError,
    LengthError,
    MaskError,
    MemberError,
    ReconstructionError,
    ShareError,
    StepError,
    TooFewSitesError,
    UpdateError,
)
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
    Statements,
    Step,
    Survivors,
    Unmask,
)

_PROBE = keys.Exchange(bytes(keys.KEY))
"""The key of no party, with which a public key is tried."""


@dataclass
class Found:
    """What an attempt has found out about sites."""

    liars: dict[str, str] = field(default_factory=dict)
    """Sites that lied, each with what it did; its own signed messages prove it."""
    unopened: tuple[str, ...] = ()
    """Sites whose shares too few others could open, so that the attempt ended; those others may have lied."""
    behind: tuple[str, ...] = ()
    """Sites that have advertised another history than most, and are dropouts of the attempt for that."""


class SecureCoordinator:
    """The coordinator's side of one attempt.

    The five pairs of methods follow the steps: the first takes one site's message and raises if it is not valid
    (that site is then a dropout; the attempt continues), the second ends the step and returns what the
    sites are sent next, or raises `TooFewSitesError`, which ends the attempt. Not thread-safe.

    Args:
        contract: As at the sites.
        round_: Round, from 1.
        attempt: Attempt at that round, from 1.
        instructions: Digest of what the sites are told (`digest.instructions_digest`).
        needed: Fewest sites in the sum, where more are needed than the protocol needs.
        fresh: Whether the instructions let no site use what it carries; otherwise all sites of U1 have one history.
        lengths: Where the contract has sketches: what of a vector is sketched.

    Raises:
        ParameterError: the cohort cannot tolerate the dropouts and colluders of the contract.
    """

    def __init__(
        self,
        contract: Contract,
        round_: int,
        attempt: int,
        instructions: bytes,
        *,
        needed: int = 0,
        fresh: bool = False,
        lengths: Lengths | None = None,
    ) -> None:
        assert (lengths is not None) == contract.sketches, "lengths are given where vectors are sketched"
        self.attempt = Attempt(contract, Begin(round_, attempt, instructions))
        self.found = Found()
        self.sketches = None if lengths is None else Sketches(lengths)
        self._fresh = fresh
        self._least = max(needed, self.attempt.parameters.quorum)
        self._step: Step | None = Step.ADVERTISE
        self._advertised: dict[str, Advertise] = {}
        self._shared: dict[str, Shares] = {}
        self._statements: dict[str, Masked] = {}
        """By site whose vector is in the accumulator."""
        self._accumulator: masks.Ring | None = None
        self._confirmed: dict[str, Confirm] = {}
        self._revealed: dict[str, Reveal] = {}

    @property
    def contract(self) -> Contract:
        """As at the sites."""
        return self.attempt.contract

    @property
    def begin(self) -> Begin:
        """The first message to each site of the cohort."""
        return Begin(self.attempt.round, self.attempt.attempt, self.attempt.instructions)

    # 2. Advertise.

    def advertised(self, message: Advertise) -> None:
        """Step 2: take one site's keys.

        Raises:
            StaleError, SignatureError, MemberError, StepError, OneTimeKeyError: the message is not valid.
        """
        self._check(message, Step.ADVERTISE, self.attempt.cohort, self._advertised)
        _PROBE.secret(message.share_key)  # a key of low order would be refused by every other site
        _PROBE.secret(message.mask_key)
        self._advertised[message.site] = message

    def peers(self) -> Peers:
        """Step 2, end: the message to each site of U1, which have one history unless the instructions are fresh."""
        if not self._fresh:
            histories = Counter(message.history for message in self._advertised.values())
            kept = max(histories, key=lambda history: (histories[history], history), default=b"")
            others = {site for site, message in self._advertised.items() if message.history != kept}
            self.found.behind = tuple(sorted(others))
            self._advertised = {s: message for s, message in self._advertised.items() if s not in others}
        self._close(Step.ADVERTISE, self._advertised)
        return Peers(self.attempt.context, self._keys)

    @property
    def _keys(self) -> tuple[Advertise, ...]:
        """The messages of U1."""
        return tuple(self._advertised[site] for site in sorted(self._advertised))

    # 3. Share.

    def shared(self, message: Shares) -> None:
        """Step 3: take one site's encrypted shares.

        Raises:
            StaleError, SignatureError, MemberError, StepError, ShareError: the message cannot stand.
        """
        self._check(message, Step.SHARE, self._advertised, self._shared)
        expected = [site for site in self.attempt.graph.neighbours(message.site) if site in self._advertised]
        holders = [site for site in self.attempt.graph.holders(message.site) if site in self._advertised]
        if [site for site, _ in message.sealed] != expected or [
            site for site, _, _ in message.hashes
        ] != holders:
            raise ShareError(
                f"shares of {message.site}", expected="one, and its hashes, for each of its holders, sorted"
            )
        self._shared[message.site] = message

    def inboxes(self) -> dict[str, Inbox]:
        """Step 3, end: the message to each site of U2."""
        self._close(Step.SHARE, self._shared)
        ctx, sharers = self.attempt.context, tuple(sorted(self._shared))
        self._agreed = sharers_digest(ctx, transcript(ctx, self._keys), sharers)
        sealed: dict[str, list[tuple[str, bytes]]] = {site: [] for site in sharers}
        hashes: dict[str, list[tuple[str, bytes, bytes]]] = {site: [] for site in sharers}
        for sender in sharers:
            shares = self._shared[sender]
            for recipient, ciphertext in shares.sealed:
                if recipient in sealed:
                    sealed[recipient].append((sender, ciphertext))
            for holder, of_b, of_s in shares.hashes:
                if holder in hashes and holder != sender:
                    hashes[holder].append((sender, of_b, of_s))
        return {site: Inbox(ctx, sharers, tuple(sealed[site]), tuple(hashes[site])) for site in sharers}

    # 4. Mask.

    def fold(self, message: Masked, pieces: Sequence[Piece]) -> None:
        """Step 4: add one site's whole masked vector to the accumulator; the vector is not needed after that.

        It is added as a whole or not at all: an incomplete upload is not folded, and its site is not in U3.

        Args:
            message: The site's statement; the caller checks the pieces against its digest (`span.check_received`).
            pieces: Offset and elements of each span, of the ring's type, that tile the vector; they are only read.

        Raises:
            StaleError, SignatureError, MemberError, StepError, AgreementError, MaskError: the upload is not valid.
        """
        self._check_statement(message, self._statements)
        self._check_upload(message.site, pieces)
        if self._accumulator is None:
            self._accumulator = np.zeros(self.contract.length, ring_dtype(self.contract.ring_bits))
        add_pieces(self._accumulator, pieces)
        self._statements[message.site] = message

    @property
    def folded(self) -> tuple[list[Masked], masks.Ring]:
        """Step 4: the statements of all sites whose vectors are folded, and the accumulator, which is not copied.

        Raises:
            StepError: no vector is folded.
        """
        if self._accumulator is None:
            raise StepError("sum of masked vectors", expected="a vector that is folded first")
        return list(self._statements.values()), self._accumulator

    def fold_again(self, statements: Iterable[Masked], accumulator: masks.Ring) -> None:
        """Step 4, in a process that starts again: take what was `folded` in an earlier one.

        Args:
            statements: The sites' statements.
            accumulator: The sum of their masked vectors; it is changed.

        Raises:
            StaleError, SignatureError, MemberError, StepError, AgreementError, MaskError: it is not of this attempt.
        """
        self._check_upload("all sites", [(0, accumulator)])
        taken: dict[str, Masked] = {}
        for message in statements:
            self._check_statement(message, taken)
            taken[message.site] = message
        self._statements, self._accumulator = taken, accumulator

    def _check_statement(self, message: Masked, seen: Iterable[str]) -> None:
        self._check(message, Step.UPDATE, self._shared, seen)
        if message.sharers != self._agreed:
            raise AgreementError(
                f"sharers of {message.site}", expected="the keys and the list that were sent"
            )
        possible = set(self.attempt.graph.neighbours(message.site)).intersection(self._shared)
        check_names(f"complaints of {message.site}", message.complaints)
        if not possible.issuperset(message.complaints):
            raise MemberError(f"complaints of {message.site}", expected="only about neighbours that shared")

    def _check_upload(self, site: str, pieces: Sequence[Piece]) -> None:
        try:
            check_pieces(pieces, self.contract.length, ring_dtype(self.contract.ring_bits))
        except UpdateError as error:
            raise MaskError(f"vector of {site}", expected=f"pieces that tile it ({error})") from error

    def survivors(self) -> Survivors:
        """Step 4, end: the message to each site of U3.

        Raises:
            TooFewSitesError: too few sites are left.
            ReconstructionError: too few of them hold a share of a secret that the sum needs; no site is bound to these
                survivors, so a later attempt may be without the site that sent wrong shares.
        """
        self._close(Step.UPDATE, self._statements)
        self._survivors = tuple(sorted(self._statements))
        accused = {site for _, site in self.complaints}
        threshold = self.attempt.parameters.threshold
        # A site that others complain of may not reveal the share that it holds of itself.
        self.found.unopened = tuple(
            site
            for site in self._needed()
            if len(self._openers(site)) - (site in accused and site in self._openers(site)) < threshold
        )
        if self.found.unopened:
            raise ReconstructionError(
                f"shares of {', '.join(self.found.unopened)}",
                expected=f"{threshold} survivors that can open them",
                fix="try the round again",
            )
        shown = self._stated(self._survivors) if self.sketches is not None else ()
        return Survivors(self.attempt.context, self._survivors, shown)

    @property
    def _agreed_survivors(self) -> bytes:
        shown = self._survivors if self.sketches is not None else ()
        digests = tuple(self._statements[site].digest for site in shown)
        return survivors_digest(self._agreed, self._survivors, digests)

    @property
    def complaints(self) -> frozenset[tuple[str, str]]:
        """What the uploads say of shares that could not be opened: the site that complains, and the one it complains
        of. At least one of the two lies."""
        return frozenset((site, of) for site, said in self._statements.items() for of in said.complaints)

    def _openers(self, site: str) -> list[str]:
        """The survivors that hold shares of `site`, sorted."""
        return [
            holder
            for holder in self.attempt.graph.holders(site)
            if holder in self._statements and site not in self._statements[holder].complaints
        ]

    # 5. Consistency.

    def confirmed(self, message: Confirm) -> None:
        """Step 5: take one site's signature under the survivors, and its sketch.

        Raises:
            StaleError, SignatureError, MemberError, StepError, AgreementError: the message is not valid.
            LengthError: the site's vector is too long, or its sketch is no sketch.
        """
        self._check(message, Step.CONFIRM, self._statements, self._confirmed)
        if message.survivors != self._agreed_survivors:
            raise AgreementError(f"survivors of {message.site}", expected="the list that was sent")
        if self.sketches is not None:
            self._check_sketch(message, self.sketches)
        self._confirmed[message.site] = message

    def _check_sketch(self, message: Confirm, sketches: Sketches) -> None:
        sketched = message.sketched
        if sketched is None or (sketched.site, sketched.survivors) != (message.site, message.survivors):
            raise LengthError(f"sketch of {message.site}", expected="that of its vector in this attempt")
        self._check_signature(sketched)
        sketches.take(message.site, sketched.sketch)

    def request(self) -> dict[str, Unmask]:
        """Step 5, end: the message to each site of U3; sites that are sent the same share one object.

        Raises:
            TooFewSitesError: too few sites agree.
            LengthError: the vector of a site is too long. Nothing was revealed, so a later attempt may be without it.
        """
        agreement = least = self.attempt.parameters.agreement
        if self.sketches is not None:
            self.sketches.check_all()
            # Each sketch that is missing leaves room for what no honest site has sent.
            least = max(agreement, self._least)
        self._close(Step.CONFIRM, self._confirmed, least=least)
        dropouts = tuple(site for site in sorted(self._shared) if site not in self._statements)
        confirmed = sorted(self._confirmed)[:agreement]  # more would only take the sites' time
        signatures = tuple((site, self._confirmed[site].signature) for site in confirmed)
        requests: dict[tuple[str, ...], Unmask] = {}
        return {
            site: requests.setdefault(
                held := tuple(self._asked(site)[0]),
                Unmask(self.attempt.context, self._survivors, dropouts, signatures, self._stated(held)),
            )
            for site in self._survivors
        }

    def _stated(self, sites: Iterable[str]) -> Statements:
        stated = (self._statements[site] for site in sites)
        return tuple((it.site, it.digest, it.complaints, it.signature) for it in stated)

    def _asked(self, holder: str) -> tuple[list[str], list[str]]:
        """The survivors whose share of b, and the dropouts whose share of s, `holder` can reveal; sorted."""
        closed = self._statements[holder].complaints
        held = [site for site in self.attempt.graph.holders(holder) if site not in closed]  # it is mutual
        return [site for site in held if site in self._statements], [
            site for site in held if site in self._shared and site not in self._statements
        ]

    # 6. Unmask.

    def revealed(self, message: Reveal) -> None:
        """Step 6: take one site's shares.

        Raises:
            StaleError, SignatureError, MemberError, StepError, ShareError: the message cannot stand.
        """
        self._check(message, Step.UNMASK, self._statements, self._revealed)
        holder = message.site
        self_shares, mask_shares = self._asked(holder)
        if [site for site, _ in message.self_shares] != self_shares or [
            site for site, _ in message.mask_shares
        ] != mask_shares:
            raise ShareError(f"shares from {holder}", expected="one of each site that it holds shares of")
        for which, shares in enumerate((message.self_shares, message.mask_shares)):
            for sender, share in shares:
                self._check_revealed(holder, sender, share, which)
        self._revealed[holder] = message

    def _check_revealed(self, holder: str, sender: str, share: bytes, which: int) -> None:
        """Check a share of b (0) or s (1) against the hash that its sender has signed; `holder` has compared them."""
        hashes = self._shared[sender].hashes
        _, *expected = hashes[bisect.bisect_left(hashes, holder, key=lambda entry: entry[0])]
        if share_hash(self.attempt.context, share, sender=sender, holder=holder) != expected[which]:
            self.found.liars[holder] = f"it revealed another share of {sender} than the one that it was sent"
            raise ShareError(f"share of {sender} from {holder}", expected=f"the one that {sender} has signed")

    @property
    def lacking(self) -> list[str]:
        """Step 6: the sites whose secret is needed and has fewer than t shares."""
        threshold = self.attempt.parameters.threshold
        return [
            site
            for site in self._needed()
            if sum(holder in self._revealed for holder in self._openers(site)) < threshold
        ]

    def _needed(self) -> list[str]:
        """The survivors, and the dropouts that share a mask with one."""
        return [
            site
            for site in sorted(self._shared)
            if site in self._statements
            or not self._statements.keys().isdisjoint(self.attempt.graph.neighbours(site))
        ]

    # 7. Sum.

    def sum(self, *, threads: int = 1) -> masks.Ring:
        """Step 7: reconstruct the secrets and remove the masks.

        Returns:
            Shape (length,), of the ring's unsigned type: the sum of the survivors' vectors modulo 2^b. It is the
            accumulator.

        Raises:
            TooFewSitesError: a secret has fewer than t shares; more may arrive. Nothing was reconstructed.
            ReconstructionError: the shares that a site has signed do not match its commitment or key; the error names
                the site, and so does `liars`.
            StepError: the sum was taken before, or this is not the current step.
            UpdateError: it is not what was sketched; a site lied in its vector or its sketch.
        """
        if self._step is not Step.UNMASK or self._accumulator is None:
            raise StepError("sum", expected="it once, after the shares were requested")
        if self.lacking:
            raise TooFewSitesError(
                "sites that revealed shares",
                len(self._revealed),
                expected=f"{self.attempt.parameters.threshold} holders of each secret",
                fix="try the round again",
            )
        graph, ctx = self.attempt.graph, self.attempt.context
        shown = transcript(ctx, self._keys)
        # Of survivors the shares of b, of dropouts those of s: never both.
        of: dict[str, dict[str, bytes]] = {}
        for holder, told in self._revealed.items():
            for site, share in (*told.self_shares, *told.mask_shares):
                of.setdefault(site, {})[holder] = share
        secrets = {
            site: self._reconstruct(
                site, of[site], self._fits_commitment if site in self._statements else self._fits_key
            )
            for site in self._needed()
        }
        wrong = [site for site, secret in secrets.items() if secret is None]
        if wrong:
            self.found.liars |= dict.fromkeys(
                wrong, "it shared another secret than the one that it committed to"
            )
            raise ReconstructionError(
                f"secrets of {', '.join(wrong)}",
                expected="shares that match the commitment or the key of the site that signed them",
                fix="try the round again",
            )
        add: list[bytes] = []
        subtract: list[bytes] = []
        for site, secret in secrets.items():
            assert secret is not None
            if site in self._statements:
                subtract.append(secret)
                continue
            exchange = keys.Exchange(secret)
            for other in graph.neighbours(site):
                if other in self._statements:
                    seed = keys.mask_seed(
                        exchange.secret(self._advertised[other].mask_key),
                        transcript=shown,
                        context=ctx,
                        one=site,
                        other=other,
                    )
                    (subtract if other < site else add).append(seed)
        self._step = None
        masks.apply(self._accumulator, add, subtract, threads=threads)
        if self.sketches is not None:
            self.sketches.check_sum(
                self._accumulator, sketch_seed(self._agreed_survivors), len(self._survivors)
            )
        return self._accumulator

    def _reconstruct(
        self, site: str, shares: dict[str, bytes], fits: Callable[[str, bytes], bool]
    ) -> bytes | None:
        """The secret of `site` from t of its shares; None if they, which `site` has signed, are not of its secret."""
        index = self.attempt.graph.index
        chosen = sorted(shares, key=index)[: self.attempt.parameters.threshold]
        interpolation = _interpolation(tuple(index(holder) for holder in chosen))
        try:
            secret = interpolation.secret([shares[holder] for holder in chosen])
        except ShareError:
            return None  # not a field element, or not a secret
        return secret if fits(site, secret) else None

    def _fits_commitment(self, site: str, seed: bytes) -> bool:
        return hmac.compare_digest(commitment(self.attempt.context, seed), self._shared[site].commitment)

    def _fits_key(self, site: str, private: bytes) -> bool:
        return keys.public_key(private) == self._advertised[site].mask_key

    # All steps.

    def _check(self, message: Signed, step: Step, known: Iterable[str], seen: Iterable[str]) -> None:
        if self._step is not step:
            raise StepError(f"{step.label} of {message.site}", expected=f"a message of {self._now}")
        if message.site not in known:
            raise MemberError("site", message.site, expected="a site of the previous step")
        if message.site in seen:
            raise StepError(f"{step.label} of {message.site}", expected="one message from each site")
        self._check_signature(message)

    def _check_signature(self, message: Signed) -> None:
        check_signature(self.contract.roster, message, self.attempt.context)

    @property
    def _now(self) -> str:
        return "no step: the attempt is over" if self._step is None else f"the step {self._step.label}"

    def _close(self, step: Step, sites: Iterable[str], least: int | None = None) -> None:
        if self._step is not step:
            raise StepError(f"end of {step.label}", expected=f"the end of {self._now}")
        count, needed = len(list(sites)), self._least if least is None else least
        if count < needed:
            raise TooFewSitesError(
                f"sites that finished the step {step.label}",
                count,
                expected=f"at least {needed} of {self.attempt.parameters.n}",
                fix="try the round again",
            )
        self._step = Step(step + 1)


_interpolation = functools.lru_cache(maxsize=64)(shamir.Interpolation)
