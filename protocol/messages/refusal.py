"""A site's signed refusal: it does not take part in a run, by its own policy or budget.

The signature lets everyone with the roster check that the site itself refused this plan in this run, so that a
coordinator cannot leave a site out by claiming that it refused. Refused: a refusal bound to a round, because a policy
is about a whole run.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import EncodingError, SignatureError, StaleError, visible
from cloister.protocol.identity.roster import Roster, signed_by
from cloister.protocol.messages.messages import LONGEST_REASON, Refused

_REFUSAL = "cloister-refusal-1"


def printable(text: str) -> str:
    """One printable line of at most `LONGEST_REASON` characters."""
    return visible(text)[:LONGEST_REASON]


def sign_refusal(identity: Ed25519PrivateKey, *, site: str, run: str, plan: bytes, reason: str) -> Refused:
    """The refusal of `site`; the reason is made one printable line.

    Args:
        identity: The site's identity key.
        site: Its name.
        run: The run.
        plan: The plan's digest, 32 bytes.
        reason: Why.
    """
    shown = printable(reason)
    return Refused(site, run, plan, shown, identity.sign(_signed(site, run, plan, shown)))


def verify_refusal(refused: Refused, roster: Roster, *, run: str, plan: bytes) -> None:
    """Check that the site that a refusal names has refused this plan in this run.

    Args:
        refused: The refusal.
        roster: The roster, which has the site's public key.
        run: The run at hand.
        plan: Digest of its plan, 32 bytes.

    Raises:
        EncodingError: the reason cannot be shown safely in one line.
        MemberError: the site is not in the roster.
        StaleError: it refused another run or plan.
        SignatureError: the site did not sign this.
    """
    if not refused.reason or printable(refused.reason) != refused.reason:
        raise EncodingError(
            "reason of a refusal",
            printable(refused.reason),
            expected=f"1 to {LONGEST_REASON} printable characters in one line",
        )
    key = roster.key(refused.site)
    for name, found, wanted in (("run", refused.run, run), ("plan digest", refused.plan.hex(), plan.hex())):
        if found != wanted:
            raise StaleError(f"{name} of the refusal of {refused.site}", found, expected=wanted)
    content = _signed(refused.site, refused.run, refused.plan, refused.reason)
    if not signed_by(key.public_bytes_raw(), content, refused.signature):
        raise SignatureError(
            f"refusal of {refused.site}", expected="a signature with the key that the roster has for it"
        )


def _signed(site: str, run: str, plan: bytes, reason: str) -> bytes:
    return pack(_REFUSAL, site, run, plan.hex(), reason)
