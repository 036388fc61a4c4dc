"""A join: the roster that a plan needs, and the site's signed answer, which only the site itself can give.

The coordinator sends each node a challenge of its own, 32 fresh random bytes. The site signs it together with the
run, the plan, the base model and the speed that it declares. So a node cannot join under the name of another site:
neither without its identity key, nor by replaying an answer that the site has given to another coordinator, in
another join or at another node.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import RosterError, SignatureError
from cloister.protocol.identity.roster import Roster, signed_by
from cloister.protocol.messages.messages import Join, Joined
from cloister.protocol.plan.plan import Plan

_JOINED = "cloister-joined-2"


def sign_joined(
    identity: Ed25519PrivateKey, request: Join, *, site: str, plan: bytes, roster: bytes, speed: float = 1.0
) -> Joined:
    """The answer of `site`, which joins.

    Args:
        identity: The site's identity key.
        request: What it was asked.
        site: Its name.
        plan: Digest of the request's plan, 32 bytes, as the site computes it.
        roster: Hash of the roster that the site has pinned; empty if it has none.
        speed: As in `Joined`.
    """
    return Joined(site, identity.sign(_signed(request, site, plan, roster, speed)), speed)


def verify_joined(joined: Joined, roster: Roster, request: Join, *, plan: bytes) -> None:
    """Check that the site that an answer names has given it to this request.

    Args:
        joined: The answer.
        roster: The roster, which has the site's public key.
        request: What the node was asked, with its own challenge.
        plan: Digest of the request's plan, 32 bytes.

    Raises:
        MemberError: the site is not in the roster.
        SignatureError: the site did not sign this answer to this request.
    """
    key = roster.key(joined.site)
    content = _signed(request, joined.site, plan, roster.hash, joined.speed)
    if not signed_by(key.public_bytes_raw(), content, joined.signature):
        raise SignatureError(
            f"answer of {joined.site} to the join",
            expected="a signature of this join's challenge with the key that the roster has for it",
        )


def check_size(roster: Roster, plan: Plan) -> None:
    """Check that a roster has as many sites as a plan.

    The ring of every sum, the draw and the threshold are computed from `cohort.sites`.

    Raises:
        RosterError: it has another number.
    """
    sites = len(roster.cards)
    if sites != plan.cohort.sites:
        raise RosterError(
            "roster",
            f"{sites} sites",
            expected=f"{plan.cohort.sites} sites, as cohort.sites of the plan",
            fix=f"set cohort.sites = {sites} in the plan (--sites), or install the newest version of the federation",
        )


def _signed(request: Join, site: str, plan: bytes, roster: bytes, speed: float) -> bytes:
    return pack(_JOINED, request.run, plan, roster, request.challenge, request.base_hash, site, speed.hex())
