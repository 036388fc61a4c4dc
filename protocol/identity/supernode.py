"""The key by which Flower's SuperLink authenticates a site's SuperNode: ECDSA on a NIST curve, in OpenSSH's format.

Flower 1.39 reads the private key from a file (`--auth-supernode-private-key`) and gets the public one from the
coordinator (`flwr supernode register`). A site makes the key itself; only the public part leaves its machine.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    SECP521R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from cloister.protocol.errors import RosterError
from cloister.protocol.identity.roster import check_private
from cloister.protocol.machine.storage import write_new


def make_supernode_key(path: Path, *, durable: bool = True) -> None:
    """Write a new private key on P-384 to `path`, readable by its owner only; a key that is there stays.

    Args:
        path: Its file.
        durable: Sync the file before this returns.

    Raises:
        StorageError: the file cannot be written.
    """
    key = generate_private_key(SECP384R1())
    write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), durable=durable)


def load_supernode_key(path: Path) -> str:
    """The public part of the key at `path`, as one line in OpenSSH's format.

    Raises:
        RosterError: the file is missing or unreadable, has no such key, or others than its owner can read it.
    """
    check_private(path, "supernode_key")
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise RosterError(
            "supernode_key", str(path), expected="an unencrypted private ECDSA key in OpenSSH's format"
        )
    return _line(key.public_key())


def check_supernode_key(line: str) -> None:
    """Check that a line is a public ECDSA key on a NIST curve in OpenSSH's format, without a comment.

    Raises:
        RosterError: it is not.
    """
    try:
        key = load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm, NotImplementedError):  # the last for a compressed point
        key = None
    if (
        not isinstance(key, EllipticCurvePublicKey)
        or not isinstance(key.curve, SECP256R1 | SECP384R1 | SECP521R1)
        or _line(key) != line
    ):
        raise RosterError(
            "supernode", line, expected="a public ECDSA key on a NIST curve, as OpenSSH writes it"
        )


def _line(key: EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
