"""How a site asks over the door to join a federation, and waits for the version that has it.

`protocol/identity/short_authentication.py` numbers the exchange. Nothing that the door says is believed before a person
has compared the code; before the site installs anything, the person compares the fingerprint of the federation too.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.clients.network.door import talking
from cloister.clients.network.route import Route
from cloister.protocol.errors import CloisterError, DoorError, RosterError, UntrustedError
from cloister.protocol.identity.address import host_of
from cloister.protocol.identity.certificates import check_authority, issued_by, names_of, read_certificate
from cloister.protocol.identity.document import LONGEST
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import check_name
from cloister.protocol.identity.session import NONCE, Entrance, Nonces
from cloister.protocol.identity.short_authentication import Exchange, commitment
from cloister.protocol.messages import door_pb2 as pb
from cloister.protocol.messages.transfer import HANDSHAKE_S, STALL_S, VERSION

_POLL_S = 3.0
"""Seconds between two questions of a site that waits."""


@dataclass(frozen=True)
class Enrolment:
    """A request that waits at a door."""

    entrance: Entrance
    """The federation, as the door says it, at the address that the person typed."""
    code: str
    """What the person tells the coordinator."""


def enrol(address: str, request: Request, identity: Ed25519PrivateKey) -> Enrolment:
    """Ask at a door to become a site.

    Args:
        address: HOST:PORT of the door.
        request: The site's request.
        identity: The key of the request.

    Raises:
        ConnectionFailedError: no door can be reached there.
        UntrustedError: the server shows another certificate than before, or says that it is of another authority.
        MemberError: the coordinator refuses the request.
        DoorError: the server is no door, or of another release.
        CloisterError: it names a federation, address or authority that cannot be one.
    """
    with Route(Entrance("", address, b""), HANDSHAKE_S) as route:  # 1
        route.choose()
        route.resolve()
        shown = route.shown_certificate()
    certificate = shown.public_bytes(Encoding.DER)
    nonce, document = os.urandom(NONCE), request.to_toml()
    try:
        with talking(Entrance("", address, certificate), "Enrol", HANDSHAKE_S) as call:
            call.say(commit=pb.Commit(version=VERSION, commitment=commitment(document, nonce)))  # 2
            founded = call.hear("founded").founded  # 3
            if len(founded.nonce) != NONCE:
                raise DoorError("nonce", f"{len(founded.nonce)} bytes", expected=f"{NONCE} bytes")
            check_name(founded.name)  # both are shown to a person
            host_of(founded.address)
            authority = read_certificate(founded.authority, "of the door's authority")
            check_authority(authority, datetime.datetime.now(datetime.UTC))
            if not issued_by(shown, authority):
                raise UntrustedError(
                    f"certificate of {address}", expected="one of the authority that the server names"
                )
            named = Entrance(founded.name, founded.address, founded.authority)
            exchange = Exchange(document, Nonces(nonce, founded.nonce), named, certificate)
            signature = exchange.sign(identity)
            call.say(reveal=pb.Reveal(request=document, nonce=nonce, signature=signature))  # 4
            call.hear("waiting")
    except UntrustedError as error:
        host, names = host_of(address), names_of(shown)
        if "Hostname" in str(error.value) and host not in names:
            raise UntrustedError(
                f"certificate of {address}",
                ", ".join(names),
                expected=f"one for {host}",
                fix="use the address of the federation, or let the coordinator add the name: cloister coordinator "
                f"renew --certificate-name {host}",
            ) from error
        raise UntrustedError(
            f"certificate of {address}",
            error.value or "of another authority",
            expected="the one that the server showed first, for this host",
            fix="run the command again; if it repeats, a device is between: use cloister site request",
        ) from error
    return Enrolment(Entrance(founded.name, address, founded.authority), exchange.code)  # 5


def following(
    entrance: Entrance, name: str, identity: Ed25519PrivateKey, installed: int
) -> tuple[Federation, int] | None:
    """The version after the one that a site has, and the number of the newest; None while its request waits.

    Args:
        entrance: The federation.
        name: The site's name.
        identity: Its key, which the newest version has.
        installed: The version that it has; 0, or one that has no next: the newest is sent.

    Raises:
        UntrustedError: the server has no certificate of the authority.
        MemberError: the request does not wait any longer.
        DoorError: the coordinator cannot be reached.
        RosterError: what it sends is no version of this federation.
    """
    with talking(entrance, "Enrol", STALL_S) as call:
        call.introduce(entrance, name, identity, installed=installed)
        said = call.hear("waiting", "document")
        parts, last = b"", said.newest
        while said.WhichOneof("said") == "document":
            parts += said.document
            if len(parts) > LONGEST:
                raise RosterError("federation", f"{len(parts)} bytes", expected=f"at most {LONGEST}")
            said = call.hear("document", "")
        if not parts:
            return None
    federation = Federation.from_toml(parts.decode(errors="replace"), "what the coordinator has sent")
    if (federation.name, federation.authority) != (entrance.federation, entrance.authority):
        raise RosterError(
            "federation",
            federation.name,
            expected=f"{entrance.federation}, with the authority of the code",
            fix="do not install it: ask the coordinator",
        )
    return federation, last


def wait_for_approval(
    enrolment: Enrolment,
    name: str,
    identity: Ed25519PrivateKey,
    told: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> Federation:
    """Wait until a version has the site; a coordinator that cannot be reached is tried again.

    Args:
        enrolment: The request that waits.
        name: The site's name.
        identity: Its key.
        told: Receives a line when the coordinator is away.
        pause: Waits for some seconds.

    Raises:
        CloisterError: as for `following`, but not where the coordinator is away.
    """
    away = False
    while True:
        try:
            found = following(enrolment.entrance, name, identity, 0)
            away = False
            if found is not None:
                return found[0]
        except CloisterError as error:
            if type(error) is not DoorError:
                raise
            if not away:
                told(f"{error}; trying again")
            away = True
        pause(_POLL_S)
