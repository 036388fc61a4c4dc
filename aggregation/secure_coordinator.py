"""The coordinator's side of one attempt at a secure sum; `secure_sum.py` numbers the steps."""

from __future__ import annotations

import functools
import hmac
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

import numpy as np

from cloister.aggregation import keys, masks, shamir
from cloister.aggregation.secure_sum import (
    Attempt,
    Contract,
    check_signature,
    commitment,
    ring_dtype,
    survivors_digest,
    transcript,
)
from cloister.aggregation.span import Piece, add_pieces, check_pieces
from cloister.protocol.errors import (
    AgreementError,
    MaskError,
    MemberError,
    ReconstructionError,
    ShareError,
    StepError,
    TooFewSitesError,
    UpdateError,
)
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
    Step,
    Survivors,
    Unmask,
)


class SecureCoordinator:
    """The coordinator's side of one attempt.

    The five pairs of methods follow the steps: the first takes one site's message and raises if it is not valid
    (that site is then a dropout; the attempt continues), the second ends the step and returns what the
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
        threshold = contract.tolerance.parameters(len(sites)).threshold
        self.begin = Begin(round_, attempt, model, sites, threshold)
        """The first message to each site of the cohort."""
        self.attempt = Attempt(contract, self.begin)
        self._step: Step | None = Step.ADVERTISE
        self._probe = keys.Exchange(bytes(keys.KEY))
        self._advertised: dict[str, Advertise] = {}
        self._shared: dict[str, Shares] = {}
        self._folded: set[str] = set()
        self._accumulator: masks.Ring | None = None
        self._confirmed: dict[str, Confirm] = {}
        self._revealed: dict[str, Reveal] = {}
        self._suspects: set[str] = set()

    # 2. Advertise.

    def advertised(self, message: Advertise) -> None:
        """Step 2: take one site's keys.

        Raises:
            StaleError, SignatureError, MemberError, StepError, OneTimeKeyError: the message is not valid.
        """
        self._check(message, Step.ADVERTISE, self.attempt.cohort, self._advertised)
        self._probe.secret(message.share_key)  # a key of low order would be refused by every other site
        self._probe.secret(message.mask_key)
        self._advertised[message.site] = message

    def peers(self) -> Peers:
        """Step 2, end: the message to each site of U1."""
        self._close(Step.ADVERTISE, self._advertised)
        messages = tuple(self._advertised[site] for site in sorted(self._advertised))
        self._transcript = transcript(self.attempt.context, messages)
        return Peers(self.attempt.context, messages)

    # 3. Share.

    def shared(self, message: Shares) -> None:
        """Step 3: take one site's encrypted shares.

        Raises:
            StaleError, SignatureError, MemberError, StepError, ShareError: the message cannot stand.
        """
        self._check(message, Step.SHARE, self._advertised, self._shared)
        expected = [site for site in self.attempt.graph.neighbours(message.site) if site in self._advertised]
        if [site for site, _ in message.sealed] != expected:
            raise ShareError(f"shares of {message.site}", expected="one for each of its neighbours, sorted")
        self._shared[message.site] = message

    def inboxes(self) -> dict[str, Inbox]:
        """Step 3, end: the message to each site of U2."""
        self._close(Step.SHARE, self._shared)
        self._sharers = tuple(sorted(self._shared))
        sealed: dict[str, list[tuple[str, bytes]]] = {site: [] for site in self._sharers}
        for sender in self._sharers:
            for recipient, ciphertext in self._shared[sender].sealed:
                if recipient in sealed:
                    sealed[recipient].append((sender, ciphertext))
        return {
            site: Inbox(self.attempt.context, self._sharers, tuple(sealed[site])) for site in self._sharers
        }

    # 4. Mask.

    def fold(self, message: Masked, pieces: Sequence[Piece]) -> None:
        """Step 4: add one site's whole masked vector to the accumulator; the vector is not needed after that.

        It is added as a whole or not at all: an incomplete upload is not folded, and its site is not in U3.

        Args:
            message: The site's statement; the caller checks the pieces against its digest (`span.check_received`).
            pieces: Offset and elements of each span, of the ring's type, that tile the vector; they are only read.

        Raises:
            StaleError, SignatureError, MemberError, StepError, MaskError: the upload is not valid.
        """
        self._check(message, Step.UPDATE, self._shared, self._folded)
        self._check_upload(message.site, pieces)
        if self._accumulator is None:
            self._accumulator = np.zeros(self.contract.length, ring_dtype(self.contract.ring_bits))
        add_pieces(self._accumulator, pieces)
        self._folded.add(message.site)

    def _check_upload(self, site: str, pieces: Sequence[Piece]) -> None:
        try:
            check_pieces(pieces, self.contract.length, ring_dtype(self.contract.ring_bits))
        except UpdateError as error:
            raise MaskError(f"vector of {site}", expected=f"pieces that tile it ({error})") from error

    def survivors(self) -> Survivors:
        """Step 4, end: the message to each site of U3."""
        self._close(Step.UPDATE, self._folded)
        self._survivors = tuple(sorted(self._folded))
        return Survivors(self.attempt.context, self._survivors)

    # 5. Consistency.

    def confirmed(self, message: Confirm) -> None:
        """Step 5: take one site's signature under the survivors.

        Raises:
            StaleError, SignatureError, MemberError, StepError, AgreementError: the message is not valid.
        """
        self._check(message, Step.CONFIRM, self._folded, self._confirmed)
        if message.survivors != survivors_digest(self.attempt.context, self._survivors):
            raise AgreementError(f"survivors of {message.site}", expected="the list that was sent")
        self._confirmed[message.site] = message

    def request(self) -> Unmask:
        """Step 5, end: the message to each site of U3."""
        self._close(Step.CONFIRM, self._confirmed, least=self.attempt.parameters.agreement)
        dropouts = tuple(site for site in self._sharers if site not in self._folded)
        signatures = tuple((site, self._confirmed[site].signature) for site in sorted(self._confirmed))
        return Unmask(self.attempt.context, self._survivors, dropouts, signatures)

    # 6. Unmask.

    def revealed(self, message: Reveal) -> None:
        """Step 6: take one site's shares.

        Raises:
            StaleError, SignatureError, MemberError, StepError, ShareError: the message cannot stand.
        """
        self._check(message, Step.UNMASK, self._folded, self._revealed)
        held = set(self.attempt.graph.holders(message.site))  # holding shares is mutual
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
        return self._step is Step.UNMASK and all(
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

    # 7. Sum.

    def sum(self, *, threads: int = 1, pool: Executor | None = None) -> masks.Ring:
        """Step 7: reconstruct the secrets and remove the masks.

        Returns:
            Shape (length,), uint16 or uint32: the sum of the survivors' vectors modulo 2^b. It is the
            accumulator.

        Raises:
            TooFewSitesError: a secret has fewer than t shares; more may arrive. Nothing was reconstructed.
            ReconstructionError: a site's shares do not match its commitment or key; the error names the site.
            StepError: the sum was taken before, or this is not the current step.
        """
        if self._step is not Step.UNMASK or self._accumulator is None:
            raise StepError("sum", expected="it once, after the shares were requested")
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
        self._step = None
        masks.apply(self._accumulator, add, subtract, cipher=self.contract.cipher, threads=threads, pool=pool)
        return self._accumulator

    def _reconstruct(self, site: str, shares: dict[str, bytes], fits: Callable[[str, bytes], bool]) -> bytes:
        """The secret of `site`; with more than t shares, even if one holder's share is wrong."""
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
                continue  # not a field element, or not a secret: a share is wrong
            if fits(site, secret):
                if left_out is not None:
                    self._suspects.add(left_out)
                return secret
        raise ReconstructionError(
            f"secret of {site}",
            expected=f"shares that match the commitment of {site}: {site} or a holder of its shares sent wrong data",
            fix="try the round again",
        )

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
        count, needed = len(list(sites)), self.attempt.parameters.quorum if least is None else least
        if count < needed:
            raise TooFewSitesError(
                f"sites that finished the step {step.label}",
                count,
                expected=f"at least {needed} of {self.attempt.parameters.n}",
                fix="try the round again",
            )
        self._step = Step(step + 1)


@functools.lru_cache(maxsize=64)
def _interpolation(indices: tuple[int, ...]) -> shamir.Interpolation:
    return shamir.Interpolation(indices)
