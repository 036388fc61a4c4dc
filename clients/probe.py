"""A site's question to the coordinator's probe: whether it answers this site, and what it says of itself."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from cloister.clients.exchange import open_channel
from cloister.protocol.address import host_of
from cloister.protocol.errors import ConnectionFailedError, MemberError
from cloister.protocol.exchange_pb2 import About, Proof
from cloister.protocol.findings import Skipped
from cloister.protocol.probe import METHOD, signed
from cloister.protocol.refusal import printable


@dataclass(frozen=True)
class Answer:
    """What the coordinator said of itself."""

    about: About
    """As the coordinator sent it; texts in it are not yet made printable."""
    ahead_s: float
    """Seconds by which its clock is ahead of this one, give or take `error_s`."""
    error_s: float
    """Half a round trip."""


def ask(
    address: str,
    root: bytes,
    fingerprint: bytes,
    identity: Ed25519PrivateKey,
    name: str,
    *,
    limit_s: float,
) -> Answer | Skipped:
    """Ask the probe at an address.

    Args:
        address: HOST:PORT of the exchange.
        root: Certificate of the federation's authority, in PEM.
        fingerprint: SHA-256 of the server's certificate, which was verified.
        identity: The site's identity key.
        name: The site's name.
        limit_s: Seconds for the answer.

    Returns:
        The answer; skipped, if the server is an exchange that serves a run.

    Raises:
        MemberError: the coordinator does not know the site or its key.
        ConnectionFailedError: there is no answer.
    """
    proof = Proof(
        name=name,
        key=identity.public_key().public_bytes_raw(),
        signature=identity.sign(signed(fingerprint)),
    )
    with closing(open_channel(address, host_of(address), root)) as channel:
        try:
            asked = time.time()
            data = channel.unary_unary(METHOD)(proof.SerializeToString(), timeout=limit_s)
            error_s = (time.time() - asked) / 2
            about = About.FromString(data)
        except DecodeError:
            why = f"{len(data)} bytes that are no answer"
        except grpc.RpcError as error:
            why = printable(error.details() or "no reason given")
            match error.code():
                case grpc.StatusCode.UNIMPLEMENTED:
                    return Skipped("the exchange serves a run, and no probe")
                case grpc.StatusCode.PERMISSION_DENIED:
                    raise MemberError(
                        "site",
                        expected=f"one that the coordinator knows by this key ({why})",
                        fix="install the newest version: cloister site install FILE, with the file that the "
                        "coordinator sends",
                    ) from None
        else:
            return Answer(about, about.time - asked - error_s, error_s)
    raise ConnectionFailedError(
        "probe",
        why,
        expected=f"an answer of the coordinator within {limit_s:g} s",
        fix="a device between ends or holds long connections: ask your network's administrator about proxies and "
        f"inspection for {address}; the MTU of a VPN may be too large",
    )
