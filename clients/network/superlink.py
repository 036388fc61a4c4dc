"""Whether Flower's SuperLink refuses the clock of this machine.

A SuperNode signs the time with each call. The SuperLink of Flower 1.39 refuses a time that is more than 5 s ahead of
its own or 305 s behind, and the SuperNode then ends with status 0 and does not say why.
"""

from __future__ import annotations

import datetime
from contextlib import closing

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from cloister.clients.network.door import open_channel
from cloister.protocol.identity.address import host_of
from cloister.protocol.messages.transfer import HANDSHAKE_S


def refuses_clock(
    address: str, root: bytes, now: datetime.datetime, limit_s: float = HANDSHAKE_S
) -> bool | None:
    """Ask the SuperLink, with a key that it does not know: it looks at the time first.

    Args:
        address: HOST:PORT at which sites reach it.
        root: Certificate of the federation's authority, in PEM.
        now: The time by this machine's clock, with a zone.
        limit_s: Seconds for the answer.

    Returns:
        Whether it refuses this time; None if it does not answer.
    """
    key, stamp = generate_private_key(SECP384R1()), now.isoformat()
    metadata = (
        (
            "flwr-public-key-bin",
            key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        ),
        ("flwr-timestamp", stamp),
        ("flwr-signature-bin", key.sign(stamp.encode(), ECDSA(SHA256()))),
    )
    with closing(open_channel(address, host_of(address), root)) as channel:
        try:
            channel.unary_unary("/flwr.proto.Fleet/PullMessages")(b"", metadata=metadata, timeout=limit_s)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return None
            return bool(error.details() == "Invalid timestamp")
    return False
