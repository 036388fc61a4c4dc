"""Every message of a run, as a frozen dataclass; `wire.py` turns each into bytes and back, for every transport.

A request goes from the coordinator to one site, and one reply comes back. After the join each request names its sum by
a `SumId`, and the plan only by its digest. Vectors are flat and one-dimensional; the plan's model
(`lm/model/layout.py`) and `aggregation/sums.py` define their layout.

The steps in which sites are asked have the numbers of `server/round/round.py`. Code takes them from `Step` alone.
What a site signs in a step is signed over the step's label, the attempt's context and `body()`.

Each text, byte string and tuple states its limit in its type. `wire.py` refuses a message that exceeds one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cloister.protocol.encoding import Value
from cloister.protocol.plan.threshold import LARGEST


class Step(IntEnum):
    """The steps of a round in which sites are asked, with the numbers of `server/round/round.py`."""

    ADVERTISE = 2
    SHARE = 3
    UPDATE = 4
    CONFIRM = 5
    UNMASK = 6

    @property
    def label(self) -> str:
        """The step's name in signatures, in `[faults]` and in logs."""
        return self.name.lower()


TRAIN: Literal["train"] = "train"
EVALUATE: Literal["evaluate"] = "evaluate"
Purpose: TypeAlias = Literal["train", "evaluate"]
"""What a sum is of: updates, or totals over held-out records."""
Division: TypeAlias = Literal["plan", "trace"]
"""How the cohort of a sum of updates is divided into groups: as the plan says, or into those of
`aggregation.trace_groups`."""


class Limit(NamedTuple):
    """In an `Annotated` type: the most characters of a text, bytes of a byte string, or items of a tuple."""

    most: int
    least: int = 0


class Elements(NamedTuple):
    """In an `Annotated` type: the element types that a vector may have."""

    dtypes: tuple[str, ...]


Name: TypeAlias = Annotated[str, Limit(64)]
Names: TypeAlias = Annotated[tuple[Name, ...], Limit(LARGEST)]
Digest: TypeAlias = Annotated[bytes, Limit(32, 32)]
Key: TypeAlias = Annotated[bytes, Limit(32, 32)]
Signature: TypeAlias = Annotated[bytes, Limit(64)]
"""Of Ed25519, 64 bytes; empty in a message that is not signed yet."""
Sealed: TypeAlias = Annotated[tuple[tuple[Name, Annotated[bytes, Limit(128)]], ...], Limit(LARGEST)]
"""A site's name and a share that is encrypted for it, or by it."""
Hashes: TypeAlias = Annotated[tuple[tuple[Name, Digest, Digest], ...], Limit(LARGEST)]
"""A site's name, and the hashes of the shares of b and of s that it holds, or that it made."""
Revealed: TypeAlias = Annotated[tuple[tuple[Name, Annotated[bytes, Limit(64)]], ...], Limit(LARGEST)]
"""A site's name and a share of one of its secrets."""
Statements: TypeAlias = Annotated[tuple[tuple[Name, Digest, Names, Signature], ...], Limit(LARGEST)]
"""(site, digest, complaints, signature) of the `Masked` of sites."""
Floats: TypeAlias = Annotated[npt.NDArray[np.float32], Elements(("float32",))]
Ring: TypeAlias = Annotated[npt.NDArray[np.unsignedinteger[Any]], Elements(("uint8", "uint16", "uint32"))]

LONGEST_PLAN = 2**20
"""Characters of a plan's JSON."""
MOST_SPANS = 1000
"""Spans in which a vector travels: ranks of a site, and one for the tail."""
NOTHING_CARRIED = bytes(32)
"""The history of a site that carries nothing from earlier rounds."""
LONGEST_TOLD = 2**21
"""Bytes that a feature tells: the bounds of half a million blocks, or 8.5e9 parameters, of a compressed update."""
LONGEST_SKETCH = 1024
"""Bytes of a sketch."""
_MOST_FEATURES = 16
LONGEST_REASON = 1000
"""Characters of the reason in a refusal or a failure."""
ByFeature: TypeAlias = Annotated[
    tuple[tuple[Name, Annotated[bytes, Limit(LONGEST_TOLD)]], ...], Limit(_MOST_FEATURES)
]
"""A feature's name and what it tells all sites of a sum (`aggregation/features/`), sorted by name."""


@dataclass(frozen=True)
class SumId:
    """Which sum a message belongs to; the same in every attempt at it."""

    run: Name
    """Identity of the run."""
    plan: Digest
    """Digest of the plan that the site has joined."""
    purpose: Purpose
    """What is summed."""
    round: int
    """Round, from 1; in an evaluation the round whose model it is, from 0."""
    division: Division = "plan"
    """The division of the round's cohort."""


# Join.


@dataclass(frozen=True)
class Join:
    """Asks a site to check the plan and get ready: load the model's layout and its data."""

    run: Name
    """Identity of the run, drawn at random when it began."""
    plan: Annotated[str, Limit(LONGEST_PLAN)]
    """The plan, as canonical JSON. It travels in this message alone."""
    challenge: Digest
    """Random bytes, fresh for each node at each join, which the site signs (`joining.py`)."""
    base_hash: Annotated[bytes, Limit(32)]
    """Hash of `base`; empty where there is none."""
    base: Floats
    """The frozen parameters, where public training has made others than the plan gives; otherwise no element."""


@dataclass(frozen=True)
class Joined:
    """A site is ready; `joining.py` signs and verifies it."""

    site: Name
    """The site's name."""
    signature: Signature = b""
    """With the site's identity key; empty where the site has none."""
    speed: float = 1.0
    """The speed that the site declares, relative to the others, with `local.balance = "weighted"`; otherwise 1."""


# Step 2: advertise.


@dataclass(frozen=True)
class Begin:
    """Coordinator to each site of the cohort, step 2: an attempt is about to start."""

    STEP: ClassVar = Step.ADVERTISE
    round: int
    """Round, as in `SumId`."""
    attempt: int
    """Attempt at the round, from 1. The cohort, k and t are not told: each site computes them."""
    instructions: Digest
    """Digest of the instructions that the sites will get in step 4 (`digest.instructions_digest`)."""


@dataclass(frozen=True)
class Advertise:
    """Site to coordinator to all sites, step 2: one-time keys."""

    STEP: ClassVar = Step.ADVERTISE
    context: Digest
    site: Name
    share_key: Key
    """X25519 public key c, under which the site is sent shares."""
    mask_key: Key
    """X25519 public key s, from which its masks come."""
    history: Digest
    """Digest of all instructions on which the state that the site carries depends (`clients/state/carried.py`)."""
    signature: Signature = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.share_key, self.mask_key, self.history)


# Step 3: share.


@dataclass(frozen=True)
class Peers:
    """Coordinator to each site of U1, step 3: the keys of U1, sorted by name."""

    STEP: ClassVar = Step.SHARE
    context: Digest
    advertised: Annotated[tuple[Advertise, ...], Limit(LARGEST)]


@dataclass(frozen=True)
class Shares:
    """Site to coordinator, step 3: a commitment to its self-mask's seed, and an encrypted share for each neighbour."""

    STEP: ClassVar = Step.SHARE
    context: Digest
    site: Name
    commitment: Digest
    """H(b || context)."""
    sealed: Sealed
    """(recipient, ciphertext), sorted by recipient."""
    hashes: Hashes
    """(holder, hash of its share of b, hash of its share of s), sorted by holder; in the complete graph the site itself
    is a holder too."""
    signature: Signature = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.commitment, self.sealed, self.hashes)


# Step 4: update.


@dataclass(frozen=True)
class Inbox:
    """Coordinator to each site of U2, step 4: the sites that shared, and the ciphertexts for this site."""

    context: Digest
    sharers: Names
    """U2, sorted."""
    sealed: Sealed
    """(sender, ciphertext), sorted by sender."""
    hashes: Hashes
    """(sender, hash of the share of its b, hash of the share of its s), sorted by sender."""


@dataclass(frozen=True)
class Instructions:
    """What the sites of a sum are told to compute: the same for all of them, and the same in every attempt.

    A site's vector depends on this, on the plan and on the site itself. Under the secure sum the digest is in the
    context of the attempt, so the masks of sites that were told different things do not cancel: what one site alone was
    told would single out its vector. So nothing here may be for one site. A site finds what is its own by its name.
    """

    sum: SumId
    """Which sum; its purpose says what is asked for."""
    model: Digest
    """Hash of the global model's trained parameters (`digest.vector_hash`)."""
    features: ByFeature = ()
    """For an update, what the plan's features tell."""
    state: Literal["fresh", "carried"] = "fresh"
    """Whether each site begins with what it carries from earlier rounds (`clients/state/carried.py`), or none does."""

    @property
    def fresh(self) -> bool:
        """No site uses what it carries."""
        return self.state == "fresh"


@dataclass(frozen=True)
class Contribute:
    """Asks a site for its part of a sum: its update of the round, or its held-out totals of the model."""

    told: Instructions
    """What all sites of the sum are told."""
    tries: int
    """As in `Agree`."""
    inbox: Inbox | None
    """Under the secure sum, the shares that other sites have for this one. It does not reach training."""
    model: Floats
    """The vector that `told.model` names."""

    @property
    def sum(self) -> SumId:
        """Which sum."""
        return self.told.sum


@dataclass(frozen=True)
class Masked:
    """Site to coordinator to the holders of its shares, step 4: its masked vector is this one, with these sharers."""

    STEP: ClassVar = Step.UPDATE
    context: Digest
    site: Name
    digest: Digest
    """Digest of the masked vector's manifest."""
    sharers: Digest
    """Digest of U1's keys and of U2, with which the site masked (`secure_sum.sharers_digest`)."""
    complaints: Names
    """Its neighbours in U2 whose share it cannot open, or whose share does not match its hash; sorted."""
    signature: Signature = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.digest, self.sharers, self.complaints)


@dataclass(frozen=True)
class Contribution:
    """A site's part of a sum: ring integers (`aggregation/vector/average.py` says of what)."""

    site: Name
    """The site's name."""
    sum: SumId
    """The sum that it belongs to, as in the request."""
    told: Digest
    """Digest of the instructions that it was computed by."""
    statement: Masked | None
    """Under the secure sum the site's signed statement of the manifest's digest."""
    manifest: Annotated[tuple[tuple[int, int, Digest], ...], Limit(MOST_SPANS)]
    """(offset, length, hash) of each span of the vector, in their order (`aggregation/vector/span.py`)."""
    spans: Annotated[tuple[Ring, ...], Limit(MOST_SPANS)]
    """The spans' ring integers, of the plan's width; under the secure sum they are masked."""
    seconds: float = 0.0
    """Where a feature of the plan wants them: seconds in which the site has trained the update, in this attempt or an
    earlier one; otherwise 0."""


# Step 5: consistency.


@dataclass(frozen=True)
class Survivors:
    """Coordinator to each site of U3, step 5: the sites whose vectors are in the sum."""

    STEP: ClassVar = Step.CONFIRM
    context: Digest
    survivors: Names
    """U3, sorted."""
    statements: Statements = ()
    """Where vectors are sketched: those of all survivors, in their order; otherwise none."""


@dataclass(frozen=True)
class Sketched:
    """Site to coordinator alone, step 5, where vectors are sketched: how long its vector is."""

    STEP: ClassVar = Step.CONFIRM
    context: Digest
    site: Name
    survivors: Digest
    """As in its `Confirm`; the seed of the sketch follows from it."""
    sketch: Annotated[bytes, Limit(LONGEST_SKETCH)]
    """Of the site's vector before its masks (`aggregation/vector/sketch.py`)."""
    signature: Signature = b""

    def body(self) -> Value:
        """What is signed."""
        return ("sketch", self.site, self.survivors, self.sketch)


@dataclass(frozen=True)
class Confirm:
    """Site to coordinator to all survivors, step 5: its signature under the one list it was shown."""

    STEP: ClassVar = Step.CONFIRM
    context: Digest
    site: Name
    survivors: Digest
    """Digest of U1's keys, U2 and U3, and of the digests that came with it (`secure_sum.survivors_digest`)."""
    signature: Signature = b""
    sketched: Sketched | None = None
    """Where vectors are sketched: what no other site is sent."""

    def body(self) -> Value:
        """What is signed. It does not name the site: the same bytes are signed by all."""
        return self.survivors


# Step 6: unmask.


@dataclass(frozen=True)
class Unmask:
    """Coordinator to each survivor, step 6: the sites whose shares are wanted, and the signers of that list."""

    STEP: ClassVar = Step.UNMASK
    context: Digest
    survivors: Names
    """U3, sorted: the share of b is wanted."""
    dropouts: Names
    """U2 without U3, sorted: the share of s is wanted."""
    signatures: Annotated[tuple[tuple[Name, Signature], ...], Limit(LARGEST)]
    """(site, its signature of `Confirm`), sorted by site."""
    statements: Statements
    """Those of each survivor whose share of b the recipient holds; sorted by site."""


@dataclass(frozen=True)
class Reveal:
    """Site to coordinator, step 6: one share of one secret of each peer."""

    STEP: ClassVar = Step.UNMASK
    context: Digest
    site: Name
    self_shares: Revealed
    """(survivor, share of its b)."""
    mask_shares: Revealed
    """(dropout, share of its s)."""
    signature: Signature = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.self_shares, self.mask_shares)


Signed: TypeAlias = Advertise | Shares | Masked | Sketched | Confirm | Reveal
"""What a site signs with its identity key."""
Told: TypeAlias = Begin | Peers | Survivors | Unmask
"""What a site is told in a step of the secure sum that carries no vector."""


@dataclass(frozen=True)
class Agree:
    """Carries one step of the secure sum to a site: advertise, share, confirm or unmask."""

    sum: SumId
    """Which sum."""
    told: Told
    """The step's own message."""
    tries: int = 1
    """Attempts at this sum that have failed, plus one."""


# Any step.


@dataclass(frozen=True)
class Refused:
    """A site's policy or budget forbids what it was asked; `refusal.py` signs and verifies it.

    A refusal is bound to one run and one plan, but not to a time: it can be replayed in the same run.
    """

    site: Name
    """The site's name."""
    run: Name
    """The run that it was asked to take part in."""
    plan: Digest
    """Digest of the plan."""
    reason: Annotated[str, Limit(LONGEST_REASON)]
    """Why, in one printable line. The coordinator reads it: it must not contain anything that the coordinator
    should not know, such as what the site has spent elsewhere."""
    signature: Signature
    """Ed25519 signature with the site's identity key; empty where the site has none."""


@dataclass(frozen=True)
class Failed:
    """A site did not do what it was asked; with the reason."""

    site: Name
    """The site's name; empty where its configuration could not be read."""
    reason: Annotated[str, Limit(LONGEST_REASON)]
    """Why, in one line."""


Request: TypeAlias = Join | Agree | Contribute
Reply: TypeAlias = Joined | Advertise | Shares | Contribution | Confirm | Reveal | Refused | Failed
