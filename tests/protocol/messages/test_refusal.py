"""A refusal that only the site itself can have signed, for one run and one plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.protocol.encoding import pack
from cloister.protocol.errors import EncodingError, MemberError, SignatureError, StaleError
from cloister.protocol.identity.roster import Card, Roster
from cloister.protocol.messages.messages import LONGEST_REASON, Refused
from cloister.protocol.messages.refusal import sign_refusal, verify_refusal
from cloister.protocol.messages.wire import VERSION, from_bytes, to_bytes
from cloister.tests.tools.raises import raises

PLAN = bytes.fromhex("12" * 32)
RUN = "0a1b2c"


@pytest.fixture(scope="module")
def keys() -> dict[str, Ed25519PrivateKey]:
    return {
        name: Ed25519PrivateKey.from_private_bytes(name[-1].encode() * 32) for name in ("site-1", "site-2")
    }


@pytest.fixture(scope="module")
def roster(keys: dict[str, Ed25519PrivateKey]) -> Roster:
    return Roster.of(Card.of(name, key) for name, key in keys.items())


@pytest.fixture
def refusal(keys: dict[str, Ed25519PrivateKey]) -> Refused:
    return sign_refusal(keys["site-1"], site="site-1", run=RUN, plan=PLAN, reason="epsilon is 9: expected 8")


def test_a_refusal_is_read_back_and_verified(refusal: Refused, roster: Roster) -> None:
    arrived = from_bytes(Refused, to_bytes(refusal))
    assert arrived == refusal
    verify_refusal(arrived, roster, run=RUN, plan=PLAN)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("site", "site-2"),
        ("run", "0a1b2d"),
        ("plan", bytes.fromhex("34" * 32)),
        ("reason", "epsilon is 9: expected 7"),
        ("signature", bytes(64)),
        ("signature", b""),
    ],
)
def test_a_refusal_that_was_altered_is_not_the_sites_own(
    refusal: Refused, roster: Roster, field: str, value: Any
) -> None:
    altered = dataclasses.replace(refusal, **{field: value})
    arrived = from_bytes(Refused, to_bytes(altered))
    with raises(SignatureError, f"refusal of {arrived.site}"):
        verify_refusal(arrived, roster, run=arrived.run, plan=arrived.plan)


def test_no_byte_of_a_refusal_can_be_changed(refusal: Refused, roster: Roster) -> None:
    whole = to_bytes(refusal)
    for at in range(len(whole)):
        altered = bytearray(whole)
        altered[at] ^= 1
        with pytest.raises((EncodingError, MemberError, StaleError, SignatureError)):
            verify_refusal(from_bytes(Refused, bytes(altered)), roster, run=RUN, plan=PLAN)


def test_a_refusal_in_the_name_of_another_site_is_not_believed(
    keys: dict[str, Ed25519PrivateKey], roster: Roster
) -> None:
    forged = sign_refusal(keys["site-2"], site="site-1", run=RUN, plan=PLAN, reason="no")
    with pytest.raises(SignatureError):
        verify_refusal(forged, roster, run=RUN, plan=PLAN)
    stranger = sign_refusal(keys["site-2"], site="site-9", run=RUN, plan=PLAN, reason="no")
    with pytest.raises(MemberError):
        verify_refusal(stranger, roster, run=RUN, plan=PLAN)


def test_a_refusal_of_another_run_or_plan_is_stale(refusal: Refused, roster: Roster) -> None:
    with raises(StaleError, "run of the refusal of site-1"):
        verify_refusal(refusal, roster, run="ffff", plan=PLAN)
    with raises(StaleError, "plan digest of the refusal of site-1"):
        verify_refusal(refusal, roster, run=RUN, plan=bytes.fromhex("34" * 32))


def test_a_reason_is_signed_as_one_printable_line(keys: dict[str, Ed25519PrivateKey], roster: Roster) -> None:
    reason = "no\n\x1b[2Jmore " + "x" * 2000
    made = sign_refusal(keys["site-1"], site="site-1", run="r", plan=PLAN, reason=reason)
    assert made.reason.startswith("no ?[2Jmore xxx")
    assert len(made.reason) == LONGEST_REASON
    verify_refusal(made, roster, run="r", plan=PLAN)


@pytest.mark.parametrize(
    ("run", "plan", "reason", "error", "field"),
    [
        ("r", PLAN, "no\x1b[2J", EncodingError, "reason of a refusal"),
        ("r", PLAN, "no\nyes", EncodingError, "reason of a refusal"),
        ("r", PLAN, "", EncodingError, "reason of a refusal"),
        ("r", PLAN, "x" * 1001, EncodingError, "Refused.reason"),
        ("", PLAN, "no", StaleError, "run of the refusal of site-1"),
        ("r\x07", PLAN, "no", StaleError, "run of the refusal of site-1"),
        ("r" * 65, PLAN, "no", EncodingError, "Refused.run"),
        ("r", PLAN + b"A", "no", EncodingError, "Refused.plan"),
        ("r", PLAN[:-1], "no", EncodingError, "Refused.plan"),
    ],
)
def test_a_refusal_that_cannot_be_shown_is_refused_although_it_is_signed(
    keys: dict[str, Ed25519PrivateKey],
    roster: Roster,
    run: str,
    plan: bytes,
    reason: str,
    error: type[Exception],
    field: str,
) -> None:
    signature = keys["site-1"].sign(pack("cloister-refusal-1", "site-1", run, plan.hex(), reason))
    sent = to_bytes(Refused("site-1", run, plan, reason, signature))
    with raises(error, field):
        verify_refusal(from_bytes(Refused, sent), roster, run="r", plan=PLAN)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        pack("cloister/wire/0", "Refused", "site-1", "r", PLAN, "no", bytes(64)),
        pack(VERSION, "Joined", "site-1", b""),
        pack(VERSION, "Refused", "site-1", "r", PLAN, "no"),
        pack(VERSION, "Refused", "site-1", 1, PLAN, "no", bytes(64)),
    ],
)
def test_bytes_that_are_no_refusal_are_refused(data: bytes) -> None:
    with pytest.raises(EncodingError):
        from_bytes(Refused, data)
