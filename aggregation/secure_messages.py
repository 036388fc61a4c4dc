"""Every message of the secure sum, as a frozen dataclass <-> canonical bytes.

`to_bytes(message)` and `from_bytes(kind, data)` are inverse to each other; `from_bytes` refuses whatever is
not exactly one message of that kind. Vectors travel by other means. Each message carries the `context` of its
attempt (`secure_sum`); what a site sends is signed by its identity key over the step, the context and
`body()`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from cloister.protocol.encoding import Value, pack, unpack
from cloister.protocol.errors import EncodingError
from cloister.protocol.threshold import Parameters


@dataclass(frozen=True)
class Begin:
    """Coordinator to site, step 1: an attempt is about to start."""

    round: int
    attempt: int
    model: bytes
    """SHA-256 of the global model."""
    cohort: tuple[str, ...]
    """The n sites of the round, sorted by name."""
    threshold: int
    """t, as the coordinator computes it."""


@dataclass(frozen=True)
class Advertise:
    """Site to coordinator to all sites, step 1: one-time keys."""

    STEP: ClassVar = "advertise"
    context: bytes
    site: str
    share_key: bytes
    """X25519 public key c, under which the site is sent shares."""
    mask_key: bytes
    """X25519 public key s, from which its masks come."""
    signature: bytes = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.share_key, self.mask_key)


@dataclass(frozen=True)
class Peers:
    """Coordinator to each site of U1, step 2: the keys of U1, sorted by name."""

    context: bytes
    advertised: tuple[Advertise, ...]


@dataclass(frozen=True)
class Shares:
    """Site to coordinator, step 2: a commitment to its self-mask's seed, and an encrypted share for each
    neighbour.
    """

    STEP: ClassVar = "share"
    context: bytes
    site: str
    commitment: bytes
    """H(b || context)."""
    sealed: tuple[tuple[str, bytes], ...]
    """(recipient, ciphertext), sorted by recipient."""
    signature: bytes = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.commitment, self.sealed)


@dataclass(frozen=True)
class Inbox:
    """Coordinator to each site of U2, step 3: who shared, and the ciphertexts for this site."""

    context: bytes
    sharers: tuple[str, ...]
    """U2, sorted."""
    sealed: tuple[tuple[str, bytes], ...]
    """(sender, ciphertext), sorted by sender."""


@dataclass(frozen=True)
class Masked:
    """Site to coordinator, step 3: its masked vector is this one."""

    STEP: ClassVar = "mask"
    context: bytes
    site: str
    digest: bytes
    """Digest of the vector's bytes, by the hash that the exchange uses."""
    signature: bytes = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.digest)


@dataclass(frozen=True)
class Survivors:
    """Coordinator to each site of U3, step 4: whose vectors are in the sum."""

    context: bytes
    survivors: tuple[str, ...]
    """U3, sorted."""


@dataclass(frozen=True)
class Confirm:
    """Site to coordinator to all survivors, step 4: its signature under the one list it was shown."""

    STEP: ClassVar = "confirm"
    context: bytes
    site: str
    survivors: bytes
    """H(context || U3)."""
    signature: bytes = b""

    def body(self) -> Value:
        """What is signed. It does not name the site: the same bytes are signed by all."""
        return self.survivors


@dataclass(frozen=True)
class Unmask:
    """Coordinator to each survivor, step 5: whose shares are wanted, and who signed that list."""

    context: bytes
    survivors: tuple[str, ...]
    """U3, sorted: the share of b is wanted."""
    dropouts: tuple[str, ...]
    """U2 without U3, sorted: the share of s is wanted."""
    signatures: tuple[tuple[str, bytes], ...]
    """(site, its signature of `Confirm`), sorted by site."""


@dataclass(frozen=True)
class Reveal:
    """Site to coordinator, step 5: one share of one secret of each peer."""

    STEP: ClassVar = "reveal"
    context: bytes
    site: str
    self_shares: tuple[tuple[str, bytes], ...]
    """(survivor, share of its b)."""
    mask_shares: tuple[tuple[str, bytes], ...]
    """(dropout, share of its s)."""
    signature: bytes = b""

    def body(self) -> Value:
        """What is signed."""
        return (self.site, self.self_shares, self.mask_shares)


Signed = Advertise | Shares | Masked | Confirm | Reveal
Message = Begin | Peers | Inbox | Survivors | Unmask | Signed
M = TypeVar("M", bound=Message)


def to_bytes(message: Message) -> bytes:
    """The canonical bytes of `message`."""
    return pack(type(message).__name__, *_fields(message))


def from_bytes(kind: type[M], data: bytes) -> M:
    """The message of `kind` that `data` encodes.

    Raises:
        EncodingError: `data` is anything else.
    """
    values = unpack(data)
    if not values or values[0] != kind.__name__:
        raise EncodingError("message", values[0] if values else "", expected=kind.__name__)
    message: M = _build(kind, values[1:], kind.__name__)
    return message


def traffic(parameters: Parameters, name_length: int) -> tuple[int, int]:
    """Bytes that one site sends and receives in an attempt besides its vector and the model, if nobody drops
    out.

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


def _fields(message: object) -> tuple[Value, ...]:
    return tuple(
        tuple(_fields(item) if dataclasses.is_dataclass(item) else item for item in value)
        if isinstance(value, tuple)
        else value
        for value in (getattr(message, field.name) for field in dataclasses.fields(message))  # type: ignore[arg-type]  # a dataclass
    )


def _build(annotation: Any, value: Value, where: str) -> Any:
    """`value` as the type that `annotation` names, or EncodingError."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        fields = _annotations(annotation)
        if isinstance(value, tuple) and len(value) == len(fields):
            parts = zip(fields.items(), value, strict=True)
            return annotation(*(_build(inner, part, f"{where}.{name}") for (name, inner), part in parts))
    elif isinstance(annotation, types.GenericAlias) and isinstance(value, tuple):
        inner = typing.get_args(annotation)
        if inner[-1] is Ellipsis:
            return tuple(_build(inner[0], item, where) for item in value)
        if len(inner) == len(value):
            return tuple(_build(one, item, where) for one, item in zip(inner, value, strict=True))
    elif isinstance(annotation, type) and type(value) is annotation:
        return value
    raise EncodingError(where, value, expected=str(getattr(annotation, "__name__", annotation)))


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
