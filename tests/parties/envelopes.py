"""A coordinator whose key every process of a test knows, for sites that a test makes up."""

import itertools
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.clients.network.guard import Guard
from cloister.protocol.messages.envelope import Sender

COORDINATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = COORDINATOR.public_key().public_bytes_raw()
_STARTS = itertools.count(1)


def sender_of(run: str) -> Sender:
    """The coordinator's side of a run, each time after another start."""
    return Sender(COORDINATOR, run, next(_STARTS))


def guard_of(site: str, state: Path = Path("/nowhere")) -> Guard:
    """The guard of a site that has no state, and no identity key."""
    return Guard(site, PUBLIC.hex(), state, lambda _run: Ed25519PrivateKey.generate())
