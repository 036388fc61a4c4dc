"""The secure sum alone, in memory: sites and a coordinator of the pure protocol, with no plan, no folder, no training.

Every message goes through its bytes. Each step can be run for some of the sites only: the others have dropped out.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation.secure import keys
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import Member, Message, Past, SecureSite
from cloister.aggregation.secure.secure_sum import Answered, Contract, ring_dtype, sharers_digest, transcript
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.sketch import Integers, Lengths
from cloister.aggregation.vector.sketch import to_bytes as to_sent
from cloister.aggregation.vector.span import manifest_digest, manifest_of
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.messages import (
    TRAIN,
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
from cloister.protocol.messages.wire import from_bytes, to_bytes
from cloister.protocol.plan.threshold import Tolerance

MODEL = hashlib.sha256(b"model").digest()
LENGTH = 37
"""Elements of a vector, where a test does not say another number."""

M = TypeVar("M")
S = TypeVar("S", bound=Signed)
T = TypeVar("T", bound=Message)


@functools.cache
def identity(name: str) -> Ed25519PrivateKey:
    """The identity key of a site; from its name, because making one takes time."""
    return new_identity(lambda size: hashlib.sha256(name.encode()).digest()[:size])


@functools.cache
def roster(names: tuple[str, ...]) -> Roster:
    """The roster of these sites."""
    return Roster.of(Card.of(name, identity(name)) for name in names)


def names_of(n: int) -> tuple[str, ...]:
    """The names of n sites, sorted."""
    return tuple(f"site-{number:03d}" for number in range(n))


def carried(message: M) -> M:
    """The message after a trip over the wire."""
    return from_bytes(type(message), to_bytes(message))


def signed(message: S, *, by: str = "") -> S:
    """The message, signed by its site, or by another one that speaks in its name."""
    key = identity(by or message.site)
    return replace(message, signature=keys.sign(key, message.STEP.label, message.context, message.body()))


class TrustsAnyKey(SecureSite):
    """Without the check of signatures; also used where thousands of them would only take time."""

    def _check_signatures(self, messages: Sequence[Signed]) -> None:
        pass


class Parties:
    """n sites and a coordinator, in one attempt.

    Args:
        n: Sites of the cohort, which is drawn from the roster; by default the roster has no others.
        site: What the sites are.
        coordinator: What the coordinator is.
        minimum: Fewest sites whose sum a site takes part in.
        attempt: The attempt at round 1.
        seed: Of the vectors, and with the attempt of what the sites draw.
        earlier: Marks that sites wrote in an earlier attempt.
        newest: Round and attempt that the sites joined last.
        model: Hash of the model.
        lengths: What of a vector is sketched; None: nothing.
        contract: Fields of the contract that are not the usual ones.
    """

    def __init__(
        self,
        n: int,
        *,
        site: Callable[..., SecureSite] = SecureSite,
        coordinator: type[SecureCoordinator] = SecureCoordinator,
        minimum: int = 2,
        attempt: int = 1,
        seed: int = 0,
        earlier: Mapping[str, Answered] = {},
        newest: tuple[int, int] = (0, 0),
        model: bytes = MODEL,
        lengths: Lengths | None = None,
        **contract: Any,
    ) -> None:
        usual = Contract(
            "run",
            roster(names_of(n)),
            bytes(32),
            Draw(0, TRAIN, n),
            Tolerance(0.0, 0.0),
            32,
            LENGTH,
            b"layout",
            sketches=lengths is not None,
        )
        self.contract = replace(usual, **contract)
        self.names = self.contract.draw.cohort(self.contract.roster.names, 1)
        self.lengths = lengths
        self.coordinator = coordinator(self.contract, 1, attempt, model, lengths=lengths)
        self.marks: dict[str, list[Answered]] = {name: [] for name in self.names}
        """The durable marks that each site has written."""
        self.told: dict[str, list[Message]] = {name: [] for name in self.names}
        """What each site was told, step by step."""
        self.said: dict[str, list[Signed]] = {name: [] for name in self.names}
        """What each site replied."""
        self._drawn: dict[str, list[bytes]] = {name: [] for name in self.names}
        self.sites = {
            name: site(
                self.contract,
                Member(name, identity(name), minimum),
                random=self._source(name, f"{seed} {attempt} {name}"),
                answered=self.marks[name].append,
                past=Past(earlier.get(name), newest),
            )
            for name in self.names
        }
        draw, bits = np.random.default_rng(seed), self.contract.ring_bits
        dtype: Any = ring_dtype(bits)
        self.vectors: dict[str, masks.Ring] = {
            name: draw.integers(0, 2**bits, self.contract.length, dtype=dtype) for name in self.names
        }
        self.masked: dict[str, masks.Ring] = {}
        self.reveals: dict[str, Reveal] = {}

    def _source(self, name: str, seed: str) -> Callable[[int], bytes]:
        draw = random.Random(seed).randbytes

        def source(size: int) -> bytes:
            self._drawn[name].append(draw(size))
            return self._drawn[name][-1]

        return source

    # The secrets of a site, in the order in which it draws them: `test_secure_sum.py` checks that they are these.

    def share_private(self, name: str) -> bytes:
        """The private key of c, under which the site is sent shares."""
        return self._drawn[name][0]

    def mask_private(self, name: str) -> bytes:
        """The private key of s, from which the site's masks come."""
        return self._drawn[name][1]

    def self_seed(self, name: str) -> bytes:
        """The seed b of the site's self-mask."""
        return self._drawn[name][2]

    # The steps.

    def _ask(self, name: str, handle: Callable[[T], S], told: T) -> S:
        self.told[name].append(told)
        reply = carried(handle(told))
        self.said[name].append(reply)
        return reply

    def advertise(self, names: Iterable[str] | None = None) -> Peers:
        """Step 2, of these sites."""
        begin = carried(self.coordinator.begin)
        for name in self.names if names is None else names:
            self.coordinator.advertised(self._ask(name, self.sites[name].advertise, begin))
        return carried(self.coordinator.peers())

    def share(self, peers: Peers, names: Iterable[str] | None = None) -> dict[str, Inbox]:
        """Step 3, of these sites."""
        for name in (message.site for message in peers.advertised) if names is None else names:
            self.coordinator.shared(self._ask(name, self.sites[name].share, peers))
        return self.coordinator.inboxes()

    def mask(self, name: str, inbox: Inbox, *, threads: int = 1) -> Masked:
        """Step 4 at one site: it masks its vector, and nothing of that reaches the coordinator."""
        site, vector = self.sites[name], self.vectors[name].copy()

        def handle(told: Inbox) -> Masked:
            site.receive(told)
            site.mask([(0, vector)], instructions=self.coordinator.attempt.instructions, threads=threads)
            return site.masked(manifest_digest(manifest_of([(0, vector)])))

        self.masked[name] = vector
        return self._ask(name, handle, carried(inbox))

    def upload(
        self, inboxes: Mapping[str, Inbox], names: Iterable[str] | None = None, *, threads: int = 1
    ) -> Survivors:
        """Step 4, of these sites."""
        for name in inboxes if names is None else names:
            self.coordinator.fold(self.mask(name, inboxes[name], threads=threads), [(0, self.masked[name])])
        return carried(self.coordinator.survivors())

    def confirm(self, survivors: Survivors, names: Iterable[str] | None = None) -> dict[str, Unmask]:
        """Step 5, of these sites."""
        for name in survivors.survivors if names is None else names:
            self.coordinator.confirmed(self._ask(name, partial(self._confirmed, name), survivors))
        return {name: carried(request) for name, request in self.coordinator.request().items()}

    def _confirmed(self, name: str, told: Survivors) -> Confirm:
        confirm = self.sites[name].confirm(told)
        if self.lengths is None:
            return confirm
        return self.sites[name].sketched(to_sent(self.sketch(name, self.sites[name].seed)))

    def sketch(self, name: str, seed: bytes) -> Integers:
        """The sketch that a site sends."""
        assert self.lengths is not None, "vectors are sketched"
        return self.lengths.sketch([(0, self.vectors[name])], seed)

    def reveal(self, requests: Mapping[str, Unmask], names: Iterable[str] | None = None) -> None:
        """Step 6, of these sites."""
        for name in requests if names is None else names:
            self.reveals[name] = self._ask(name, self.sites[name].unmask, requests[name])
            self.coordinator.revealed(self.reveals[name])

    def to_request(self) -> dict[str, Unmask]:
        """Steps 2 to 5, of all sites."""
        return self.confirm(self.upload(self.share(self.advertise())))

    def run(self, lasts: Mapping[str, int] = {}, *, threads: int = 1) -> masks.Ring:
        """Steps 2 to 7, where each site drops out after step `lasts[name]`, 1 to 5; the others do not.

        A site that drops out after step 3 has been sent its inbox and masks, but its upload does not arrive.
        """

        def left(step: Step) -> list[str]:
            return [name for name in self.names if lasts.get(name, Step.UNMASK) >= step]

        inboxes = self.share(self.advertise(left(Step.ADVERTISE)), left(Step.SHARE))
        for name in set(left(Step.SHARE)) - set(left(Step.UPDATE)):
            self.mask(name, inboxes[name])
        survivors = self.upload(inboxes, left(Step.UPDATE), threads=threads)
        self.reveal(self.confirm(survivors, left(Step.CONFIRM)), left(Step.UNMASK))
        return self.coordinator.sum(threads=threads)

    def statements(self, names: Iterable[str]) -> tuple[tuple[str, bytes, tuple[str, ...], bytes], ...]:
        """What these sites have signed with their masked vectors, as a request for shares shows it."""
        signed = {name: reply for name in names for reply in self.said[name] if isinstance(reply, Masked)}
        return tuple((it.site, it.digest, it.complaints, it.signature) for _, it in sorted(signed.items()))

    def agreed(self, peers: Peers, sharers: Iterable[str]) -> bytes:
        """The digest of U1's keys and U2, which is signed with a masked vector."""
        return sharers_digest(peers.context, transcript(peers.context, peers.advertised), tuple(sharers))

    def plain_sum(self, names: Iterable[str] | None = None) -> masks.Ring:
        """The sum of these sites' vectors modulo 2^b."""
        chosen = [self.vectors[name] for name in (self.names if names is None else names)]
        total: masks.Ring = np.add.reduce(chosen, dtype=chosen[0].dtype)
        return total
