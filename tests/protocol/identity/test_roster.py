"""The roster: a card vouches for itself, a roster holds no doubt, and its hash is of names and keys only."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from cloister.protocol.errors import MemberError, RosterError, StorageError
from cloister.protocol.identity import roster as rosters
from cloister.protocol.identity.document import to_base64
from cloister.protocol.identity.roster import Card, Roster
from cloister.tests.tools.raises import raises


def identity(number: int) -> Ed25519PrivateKey:
    return rosters.new_identity(lambda size: bytes([number]) * size)


def card(name: str, number: int) -> Card:
    return Card.of(name, identity(number))


CARDS = [card("north", 1), card("east", 2), card("south-2.b", 3)]


def test_golden_card_and_hash() -> None:
    """What sites printed and pinned stays valid: these bytes must never change."""
    assert to_base64(CARDS[0].public) == "iojj3XQJ8ZX9UtstPLpdcspnCb8dlBIb83SIAbQPb1w="
    assert to_base64(CARDS[0].signature) == (
        "4+pLJf9LmudFTHSRAUwwOufmdqnWEz0aqnzvBcNFgAGkLE8M+AVftCcUGAz9cOvDaEO8DkthYgjYPVGAeRmBCw=="
    )
    assert Roster.of(CARDS).hash.hex() == "26154d20ab20301f0ec58d5de7fb0f4e3157a2976146a33a99b93ecad629c373"


# The y coordinates of the eight points of low order; those of order 8 as libsodium lists them.
LOW_ORDER = [
    1,
    -1,
    0,
    int.from_bytes(
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
    ),
    int.from_bytes(
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
    ),
]


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("y", LOW_ORDER)
def test_a_key_for_which_anybody_can_sign_is_refused(
    y: int, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = (y % (2**255 - 19) | sign << 255).to_bytes(32, "little")
    neutral = bytes([1]) + bytes(63)  # R and s of a signature that a point of low order accepts now and then
    cards = [Card(f"site-{number}", public, neutral) for number in range(64)]
    for one in cards:
        with raises(RosterError, "card"):
            one.verify()
    monkeypatch.setattr(rosters, "_has_full_order", lambda _public: True)
    if (y, sign) != (1, 1):  # the library itself refuses this encoding
        assert any(verifies(one) for one in cards)


def verifies(one: Card) -> bool:
    try:
        one.verify()
    except RosterError:
        return False
    return True


@pytest.mark.parametrize("name", ["", "a b", "-a", "é", "a" * 65, "a/b", "a\n"])
def test_names_that_do_not_print_well_are_refused(name: str) -> None:
    with raises(RosterError, "card name"):
        card(name, 1)


def test_nobody_can_show_a_key_that_is_not_theirs() -> None:
    stolen = dataclasses.replace(card("mallory", 9), public=CARDS[0].public)
    with raises(RosterError, "card"):
        stolen.verify()
    with pytest.raises(RosterError):
        dataclasses.replace(CARDS[0], name="east").verify()
    with pytest.raises(RosterError):
        Roster.of([*CARDS, stolen])


def test_the_hash_is_of_names_and_keys_in_any_order() -> None:
    roster = Roster.of(CARDS)
    assert roster.names == ("east", "north", "south-2.b")
    assert Roster.of(reversed(CARDS)) == roster
    assert Roster.of(reversed(CARDS)).hash == roster.hash
    others = [
        CARDS[:2],
        [*CARDS, card("west", 4)],
        [card("north", 5), *CARDS[1:]],
        [card("nord", 1), *CARDS[1:]],
    ]
    assert len({roster.hash, *(Roster.of(cards).hash for cards in others)}) == 5


def test_a_roster_knows_its_sites() -> None:
    roster = Roster.of(CARDS)
    assert "north" in roster
    assert "west" not in roster
    assert roster.key("north").public_bytes_raw() == CARDS[0].public
    with raises(MemberError, "site", says="west"):
        roster.key("west")


def test_doubtful_rosters_are_refused() -> None:
    with raises(RosterError, "roster", says="at least one"):
        Roster.of([])
    with raises(RosterError, "roster", says="each name"):
        Roster.of([*CARDS, card("north", 4)])
    with raises(RosterError, "roster", says=("north, west", "each key")):
        Roster.of([*CARDS, card("west", 1)])


def test_a_pin_holds() -> None:
    roster = Roster.of(CARDS)
    assert roster.pinned(roster.hash.hex().upper() + "\n") is roster
    with raises(RosterError, "roster hash", says="pinned"):
        Roster.of(CARDS[:2]).pinned(roster.hash.hex())


def test_a_roster_survives_its_file(tmp_path: Path) -> None:
    roster, path = Roster.of(CARDS), tmp_path / "roster.toml"
    rosters.save_roster(roster, path)
    rosters.save_roster(roster, path)
    assert rosters.load_roster(path) == roster
    assert os.listdir(tmp_path) == ["roster.toml"]


def test_a_changed_roster_file_is_refused(tmp_path: Path) -> None:
    text = Roster.of(CARDS).to_toml()
    other = Roster.of(CARDS[:2])
    for changed in (
        "",
        "[",
        "format = 1",
        text.replace("cloister-roster-1", "cloister-roster-2"),
        text.replace('name = "east"', 'name = "ost"'),
        text.replace('name = "east"', "name = 3"),
        text.replace('name = "east"', 'title = "east"'),
        text.replace('key = "', 'key = "!'),
        text.replace(Roster.of(CARDS).hash.hex(), other.hash.hex()),
        text + "\nextra = 1\n",
    ):
        with pytest.raises(RosterError):
            Roster.from_toml(changed)
    with pytest.raises(RosterError):
        rosters.load_roster(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with raises(RosterError, "roster", says="utf-8"):
        rosters.load_roster(tmp_path / "binary")
    with pytest.raises(StorageError):
        rosters.save_roster(other, tmp_path / "binary" / "roster.toml")


def test_an_identity_is_kept_once_and_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    rosters.save_identity(identity(1), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Card.of("north", rosters.load_identity(path)) == CARDS[0]
    with raises(RosterError, "identity", says="existing"):
        rosters.save_identity(identity(2), path)
    assert Card.of("north", rosters.load_identity(path)) == CARDS[0]
    with pytest.raises(StorageError):
        rosters.save_identity(identity(2), path / "identity.pem")
    assert Card.of("a", rosters.new_identity()) != Card.of("a", rosters.new_identity())


def test_what_is_no_identity_is_refused(tmp_path: Path) -> None:
    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    locked = identity(1).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    file = tmp_path / "identity.pem"
    file.touch(0o600)
    for pem in (b"", b"pem", other, locked):
        file.write_bytes(pem)
        with raises(RosterError, "identity", says="Ed25519"):
            rosters.load_identity(file)
    with pytest.raises(RosterError):
        rosters.load_identity(tmp_path / "none")


def test_an_identity_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    rosters.save_identity(identity(1), path)
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610):
        path.chmod(mode)
        with raises(RosterError, f"permissions of {path}", says=f"'{mode:04o}'"):
            rosters.load_identity(path)
    path.chmod(0o400)
    assert Card.of("north", rosters.load_identity(path)) == CARDS[0]
