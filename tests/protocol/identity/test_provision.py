"""Provisioning by commands: keys stay where they were made, and nothing is approved or installed unseen."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import shutil
import ssl
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from cloister.cli.verbs import coordinator, site
from cloister.clients.setup.config import read_config
from cloister.protocol.encoding import pack
from cloister.protocol.errors import CertificateError, RosterError
from cloister.protocol.identity.certificates import new_authority, new_key, read_certificate
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import Card, Roster, load_identity, load_roster, new_identity
from cloister.protocol.machine.storage import sync_to_disk
from cloister.server.federation.registry import Registry, Terms
from cloister.tests.parties.provisioned import FOUNDING, NAMES, Parties, state
from cloister.tests.tools.command import done, found, lone_refusal, ran, refusal
from cloister.tests.tools.raises import raises

TODAY = datetime.date(2026, 1, 2)


pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def parties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Parties:
    """Folders in which nothing is yet."""
    return Parties(tmp_path, capsys)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a federation that is installed at its three sites; made by the first test that needs it."""
    return tmp_path_factory.mktemp("installed")


@pytest.fixture
def installed(
    template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Parties, dict[str, Any]]:
    """A federation that is installed at its three sites, and what its coordinator printed."""
    if not any(template.iterdir()):
        Parties(template, capsys).made()
    parties = Parties(template, capsys).copied(tmp_path)
    return parties, found(capsys, "coordinator", "show", str(parties.coordinator))


def later(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """Let the commands run some days later."""
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda _zone: now), UTC=datetime.UTC)
    monkeypatch.setattr(coordinator, "datetime", clock)
    monkeypatch.setattr(site, "datetime", clock)


# The request of a site.


def test_a_site_makes_keys_settings_and_a_request(parties: Parties) -> None:
    answer = parties.request("a-hospital", "Dr Zoë Example, ward 7")
    folder = parties.folder("a-hospital")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "identity.pem").stat().st_mode) == 0o600
    request = Request.from_toml(Path(answer["request"]).read_text(encoding="utf-8"))
    assert request.card == Card.of("a-hospital", load_identity(folder / "identity.pem"))
    assert request.contact == "Dr Zoë Example, ward 7"
    assert request.fingerprint.hex() == answer["fingerprint"]
    config = read_config(folder / "site.toml")
    assert (config.name, config.data, config.state) == ("a-hospital", "data.jsonl", str(folder / "state"))
    assert config.identity == str(folder / "identity.pem")
    assert (config.federation, config.roster, config.roster_hash) == ("", "", "")
    assert (config.minimum_cohort, config.secure) == (3, True)


def test_a_request_is_made_once(parties: Parties) -> None:
    first = parties.request("a-hospital")
    before = state(parties.path)
    assert parties.request("a-hospital") == first
    assert state(parties.path) == before
    command = ["site", "request", "--folder", str(parties.folder("a-hospital")), "--contact"]
    assert "--contact" in lone_refusal(parties.capsys, *command, "someone else", "--name", "a-hospital")
    assert "--name" in lone_refusal(parties.capsys, *command, "x", "--name", "b.bank")
    assert state(parties.path) == before


def test_what_a_request_refuses_leaves_nothing(parties: Parties) -> None:
    def refused(name: str, contact: str, folder: Path) -> str:
        command = ["site", "request", "--name", name, "--contact", contact, "--folder", str(folder)]
        return lone_refusal(parties.capsys, *command)

    for name in ("", "two words", "../up", "x" * 65, "ä"):
        assert "card name" in refused(name, "x", parties.path / "new")
    for contact in ("", " ", "x" * 201, "a\nb", "\x1b[2J", "\u202e"):
        assert "contact" in refused("x", contact, parties.path / "new")
    assert list(parties.path.iterdir()) == []
    (parties.path / "file").touch()
    assert "file" in refused("x", "x", parties.path / "file")
    assert "file" in refused("x", "x", parties.path / "file" / "below")


def test_settings_that_are_there_are_kept(parties: Parties) -> None:
    folder = parties.folder("a-hospital")
    folder.mkdir()
    mine = 'name = "a-hospital"\ndata = "mine.jsonl"\nstate = "s"\n[mesh]\nreplicate = 1\n'
    (folder / "site.toml").write_text(mine)
    request = parties.request("a-hospital")
    assert (folder / "site.toml").read_text() == mine
    version = parties.approve(request)
    parties.install("a-hospital", version)
    text = (folder / "site.toml").read_text()
    assert mine in text
    config = read_config(folder / "site.toml")
    assert (config.data, config.roster_hash) == (str(folder / "mine.jsonl"), version["roster_hash"]) or (
        config.data == "mine.jsonl" and config.roster_hash == version["roster_hash"]
    )
    assert config.mesh.replicate == 1


def test_a_request_of_which_a_byte_was_changed_is_refused(parties: Parties) -> None:
    text = Path(parties.request("a-hospital")["request"]).read_text(encoding="utf-8")
    assert_no_change_passes(text, Request.from_toml)


HOSTILE = {
    "arrays in arrays": "x = " + "[" * 10**5,
    "tables in tables": "x = " + "{a=" * 10**5,
    "a long number": "version = " + "9" * 5000,
    "a dotted key": ".".join("a" * 10**5) + " = 1",
    "long names of tables": "".join(f"[{'.'.join('a' * dots)}]\n" for dots in range(1, 1500)),
    "many lines": "a = 1\n" * 10**6,
    "a long line": f'a = "{"x" * 2**21}"',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_is_made_to_cost_much_is_refused_at_once(
    parties: Parties, tmp_path: Path, what: str
) -> None:
    """As TOML some of them take minutes, gigabytes, or more stack than there is."""
    parties.request("a-hospital")
    file = tmp_path / "sent"
    file.write_text(HOSTILE[what])
    started = time.process_time()
    told = {"request": str(file), "fingerprint": "0" * 64}
    for command in (
        parties.approving(told),
        (
            "site",
            "install",
            str(file),
            "--folder",
            str(parties.folder("a-hospital")),
            "--fingerprint",
            "0" * 64,
        ),
    ):
        assert "expected the whole file, unchanged (line" in lone_refusal(parties.capsys, *command)
    assert time.process_time() - started < 2


def test_a_request_with_another_card_is_refused(parties: Parties) -> None:
    """The card has a signature of its own, and a key for which anybody can sign is refused."""
    parties.request("a-hospital")
    identity = load_identity(parties.folder("a-hospital") / "identity.pem")
    request = Request.from_toml((parties.folder("a-hospital") / "a-hospital.request").read_text())
    path = parties.path / "lie.request"
    neutral = bytes([1])
    for card in (
        replace(request.card, signature=bytes(64)),
        Card("a-hospital", neutral + bytes(31), neutral + bytes(63)),
    ):
        lie = replace(request, card=card)
        lie = replace(lie, signature=identity.sign(signed_content(lie)))
        path.write_text(lie.to_toml(), encoding="utf-8")
        told = {"request": str(path), "fingerprint": lie.fingerprint.hex()}
        line = lone_refusal(parties.capsys, *parties.approving(told))
        assert "expected a signature made with the key on it" in line


def signed_content(request: Request) -> bytes:
    """What the identity key of a request signs."""
    card = request.card
    return pack("cloister-request-2", card.name, card.public, card.signature, request.contact, request.date)


def test_a_file_of_a_federation_of_which_a_byte_was_changed_is_refused(
    installed: tuple[Parties, dict[str, Any]],
) -> None:
    parties, version = installed
    following = parties.change("revoke", "c-lab")  # also a list of revoked keys and a version before
    assert following["version"] == version["version"] + 1
    text = Path(following["file"]).read_text(encoding="utf-8")
    assert_no_change_passes(text, Federation.from_toml, step=3)


def assert_no_change_passes(text: str, read: Callable[[str], object], step: int = 1) -> None:
    right = read(text)
    assert read(text.replace("\n", "\r\n") + "\r\n\r\n") == right  # as mail may change it
    for at in range(0, len(text.rstrip()), step):
        other = "x" if text[at] != "x" else "y"
        torn = (text[:at] + text[at + 1 :], text[:at]) if at % 16 < step else ()
        for changed in (text[:at] + other + text[at + 1 :], *torn):
            with pytest.raises(RosterError):
                read(changed)
    for more in ("# a comment\n", "extra = 1\n", "\n[more]\n"):
        for changed in (text + more, more + text):
            with pytest.raises(RosterError):
                read(changed)


# The approval by the coordinator.


def test_approval_makes_one_file_for_all_sites(parties: Parties) -> None:
    requests = [parties.request(name) for name in NAMES]
    mailed = Path(requests[0]["request"])
    mailed.write_bytes(b"\xef\xbb\xbf" + mailed.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    printed = done(parties.capsys, *parties.approving(*requests))
    version = found(parties.capsys, "coordinator", "show", str(parties.coordinator))
    federation = parties.read(version)
    assert federation.fingerprint.hex() == version["fingerprint"]
    assert federation.roster.hash.hex() == version["roster_hash"]
    assert federation.roster.names == NAMES
    assert (federation.version, federation.door) == (1, "fl.example.org:9443")
    shown = printed.replace("-", "")
    assert all(request["fingerprint"] in shown for request in [*requests, version])
    assert stat.S_IMODE(parties.coordinator.stat().st_mode) == 0o700
    for key in parties.coordinator.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(list(parties.coordinator.glob("*.key"))) == 3


def test_a_request_is_approved_only_by_its_fingerprint(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = parties.request("a-hospital"), parties.request("b.bank")
    command = parties.approving(one)
    for wrong in (other["fingerprint"], one["fingerprint"][:-1] + "g", one["fingerprint"][:32], ""):
        line = refusal(parties.capsys, *[wrong if word == one["fingerprint"] else word for word in command])
        assert "fingerprint" in line
    digits = one["fingerprint"]
    for at in (0, 31, 32, 63):
        changed = digits[:at] + ("0" if digits[at] != "0" else "1") + digits[at + 1 :]
        assert "do not approve" in refusal(parties.capsys, *[changed if w == digits else w for w in command])
    assert "that of a request" in refusal(parties.capsys, *command, "--fingerprint", other["fingerprint"])
    both = [*command[:4], other["request"], *command[4:]]
    assert "request of b.bank" in refusal(parties.capsys, *both)  # which was not compared
    nothing = [word for word in command if word not in ("--fingerprint", digits)]
    assert "--fingerprint" in refusal(parties.capsys, *nothing)  # no terminal
    assert not (parties.coordinator / "federation-1.toml").exists()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda _prompt: other["fingerprint"])
    assert "do not approve" in refusal(parties.capsys, *nothing)
    grouped = ":".join(digits[at : at + 4].upper() for at in range(0, 64, 4))
    monkeypatch.setattr("builtins.input", lambda prompt: grouped if "a-hospital" in prompt else "")
    assert "version 1" in done(parties.capsys, *nothing)


def test_a_name_or_key_that_is_taken_is_refused(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    parties, _ = installed
    before = state(parties.coordinator)
    other = Parties(tmp_path / "other", parties.capsys)
    assert "not taken" in refusal(parties.capsys, *parties.approving(other.request("b.bank")))
    assert "it is taken" in refusal(parties.capsys, *parties.approving(other.request("B.Bank")))
    other.folder("same-key").mkdir(mode=0o700)
    shutil.copy(parties.folder("b.bank") / "identity.pem", other.folder("same-key"))
    assert "b.bank, same-key" in refusal(parties.capsys, *parties.approving(other.request("same-key")))
    twice = [other.request("d-new"), Parties(tmp_path / "more", parties.capsys).request("d-new")]
    assert "not taken" in refusal(parties.capsys, *parties.approving(*twice))
    assert state(parties.coordinator) == before


def test_an_approval_can_be_repeated(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, version = installed
    before = state(parties.coordinator)
    assert parties.approve(parties.request("a-hospital")) == version
    assert state(parties.coordinator) == before


def test_a_folder_that_is_no_federation_is_left_alone(parties: Parties) -> None:
    (parties.coordinator).mkdir()
    (parties.coordinator / "mine").write_text("mine")
    command = parties.approving(parties.request("a-hospital"))
    assert "folder of the federation" in lone_refusal(parties.capsys, *command)
    create = ["coordinator", "create", str(parties.coordinator), *FOUNDING]
    assert "an empty one" in lone_refusal(parties.capsys, *create)
    assert state(parties.coordinator) == {"mine": b"mine"}
    (parties.coordinator / "mine").unlink()
    assert "version 0\n" in done(parties.capsys, *create)
    assert "an empty one" in lone_refusal(parties.capsys, *create)
    assert "version 1" in done(parties.capsys, *command)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--address", "fl.example.org", "door"),
        ("--address", "fl.example.org:0", "door"),
        ("--address", "fl.example.org:65536", "door"),
        ("--address", "-x:1", "door"),
        ("--address", "300.1.1.1:1", "door"),
        ("--address", "[::g]:1", "door"),
        ("--name", "two words", "name"),
        ("--certificate-name", "*.example.org", "certificate_names"),
        ("--certificate-days", "0", "certificate_days"),
        ("--authority-days", "-1", "authority_days"),
    ],
)
def test_wrong_terms_are_refused(parties: Parties, option: str, value: str, said: str) -> None:
    create = ["coordinator", "create", str(parties.coordinator), *FOUNDING]
    line = lone_refusal(parties.capsys, *create, f"{option}={value}")
    assert said in line
    assert "\n" not in line
    assert not parties.coordinator.exists()


def test_a_registry_replaces_no_folder(parties: Parties) -> None:
    parties.coordinator.mkdir()
    (parties.coordinator / "mine").write_text("mine")
    terms = Terms(name="x", door="a:1")
    request = Request.from_toml(Path(parties.request("a-hospital")["request"]).read_text())
    with raises(RosterError, "folder", says="empty"):
        Registry.create(parties.coordinator, terms, [request], datetime.datetime.now(datetime.UTC))
    assert state(parties.coordinator) == {"mine": b"mine"}


def test_a_damaged_version_is_not_continued(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    parties, _ = installed
    parties.change("remove", "c-lab")
    another = Path(Parties(tmp_path / "other", parties.capsys).made()["file"]).read_bytes()
    first, second = (parties.coordinator / f"federation-{number}.toml" for number in (1, 2))
    for path, other in (
        (first, first.read_bytes()[:-40]),
        (first, second.read_bytes()),
        (first, another),
        (second, b""),
    ):
        before = path.read_bytes()
        path.write_bytes(other)
        for action in (["show"], ["remove", "b.bank"], ["revoke", "b.bank"], ["renew"]):
            lone_refusal(parties.capsys, "coordinator", *action, str(parties.coordinator))
        path.write_bytes(before)
    first.unlink()
    assert "gap" in lone_refusal(parties.capsys, "coordinator", "show", str(parties.coordinator))


def test_a_certificate_that_expired_is_named_and_renewed(
    installed: tuple[Parties, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, _ = installed
    request = parties.request("d-new")
    later(monkeypatch, 500)
    line = lone_refusal(parties.capsys, *parties.approving(request))
    assert "certificate of the door is 'expired on" in line
    assert f"cloister coordinator renew {parties.coordinator}" in line
    before = (parties.coordinator / "door.pem").read_bytes()
    parties.change("renew")
    assert (parties.coordinator / "door.pem").read_bytes() != before
    assert parties.approve(request)["version"] == 2
    later(monkeypatch, 5000)
    line = lone_refusal(parties.capsys, "coordinator", "renew", str(parties.coordinator))
    assert "certificate of the authority is 'expired on" in line


def test_a_certificate_of_another_authority_is_refused(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    parties, _ = installed
    other = Parties(tmp_path / "other", parties.capsys)
    other.made()
    request = parties.request("d-new")
    for name in ("door.pem", "door.key", "authority.pem", "authority.key"):
        right = (parties.coordinator / name).read_bytes()
        for wrong in ((other.coordinator / name).read_bytes(), b"", right[:-60]):
            (parties.coordinator / name).write_bytes(wrong)
            assert str(parties.coordinator) in lone_refusal(parties.capsys, *parties.approving(request))
        (parties.coordinator / name).write_bytes(right)
    before = state(parties.coordinator)
    for names in (("door",), ("authority", "door")):  # a key and its certificate
        for path in (parties.coordinator / f"{name}.{kind}" for name in names for kind in ("key", "pem")):
            path.write_bytes((other.coordinator / path.name).read_bytes())
        assert str(parties.coordinator) in lone_refusal(parties.capsys, *parties.approving(request))
        for file, content in before.items():
            (parties.coordinator / file).write_bytes(content)
    assert parties.approve(request)["version"] == 2


def test_a_certificate_of_which_a_bit_was_changed_is_read_or_refused_in_silence() -> None:
    der = new_authority(new_key(), "x", datetime.datetime.now(datetime.UTC), 1).public_bytes(Encoding.DER)
    refused = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for at in range(len(der)):
            try:
                read_certificate(der[:at] + bytes([der[at] ^ 128]) + der[at + 1 :], "x")
            except CertificateError:
                refused += 1
    assert refused > 20
    assert not warned


def handshake(folder: Path, authority: Path, host: str) -> None:
    """A TLS handshake between the coordinator and a site, in memory."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "door.pem", folder / "door.key")
    trusting = ssl.create_default_context(cafile=str(authority))
    trusting.minimum_version = ssl.TLSVersion.TLSv1_3
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        trusting.wrap_bio(to_client, to_server, server_hostname=host),
        serving.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        waiting = []
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(end)
        if not waiting:
            return
    raise AssertionError("the handshake does not end")


def test_a_site_trusts_the_coordinator_under_its_names_alone(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    parties, version = installed
    authority = Path(parties.install("a-hospital", version)["installed"]).with_name("authority.pem")
    handshake(parties.coordinator, authority, "fl.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(parties.coordinator, authority, "fl.example.net")
    renewed = parties.change("renew", "--address", "[::1]:443", "--certificate-name", "10.0.0.7")
    assert renewed["changes"] == [
        {"kind": "moved", "what": "door", "detail": "from fl.example.org:9443 to [::1]:443"}
    ]
    for host in ("::1", "10.0.0.7"):
        handshake(parties.coordinator, authority, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(parties.coordinator, authority, "fl.example.org")
    parties.install("a-hospital", renewed)
    other = Parties(tmp_path / "other", parties.capsys)
    other.made()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other.coordinator, authority, "fl.example.org")


# The installation at a site.


def test_an_installed_site_is_ready(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, version = installed
    config = read_config(parties.folder("b.bank") / "site.toml")
    roster = load_roster(Path(config.roster)).pinned(config.roster_hash)
    assert roster == parties.read(version).roster
    assert roster.key("b.bank") == load_identity(Path(config.identity)).public_key()
    assert Federation.from_toml(Path(config.federation).read_text()) == parties.read(version)
    for folder in (parties.folder("b.bank"), Path(config.federation).parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    moved = parties.path / "moved"
    parties.folder("b.bank").rename(moved)  # nothing in it names the place where it was
    config = read_config(moved / "site.toml")
    assert load_roster(Path(config.roster)).hash.hex() == config.roster_hash


def test_an_installation_can_be_repeated(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, version = installed
    before = state(parties.folder("a-hospital"))
    assert "none: this version is installed" in parties.shown("a-hospital", version)
    assert state(parties.folder("a-hospital")) == before
    (parties.folder("a-hospital") / "federation").rename(parties.path / "lost")
    settings = parties.folder("a-hospital") / "site.toml"
    settings.write_text(
        re.sub(r"(?m)^(federation|roster|roster_hash) = .*$", r'\1 = ""', settings.read_text())
    )
    parties.install("a-hospital", version)
    assert state(parties.folder("a-hospital")) == before
    for name in ("authority.pem", "roster.toml"):
        Path(read_config(settings).federation).with_name(name).write_text("damaged")
    parties.install("a-hospital", version)
    assert state(parties.folder("a-hospital")) == before


def test_a_version_is_installed_only_by_its_fingerprint(
    installed: tuple[Parties, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, _ = installed
    version = parties.change("remove", "c-lab")
    before = state(parties.folder("a-hospital"))
    command = parties.installing("a-hospital", version)
    digits = version["fingerprint"]
    for at in (0, 1, 31, 32, 62, 63):
        changed = digits[:at] + ("0" if digits[at] != "0" else "1") + digits[at + 1 :]
        line = lone_refusal(parties.capsys, *[changed if word == digits else word for word in command])
        assert "do not go on" in line
    for wrong in (digits[:-1], digits + "0", "", "x" * 64):
        assert "64 hex" in lone_refusal(
            parties.capsys, *[wrong if word == digits else word for word in command]
        )
    plain = [word for word in command if word not in ("--fingerprint", digits)]
    assert "--fingerprint" in refusal(parties.capsys, *plain)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda _prompt: "0" * 64)
    assert "do not go on" in refusal(parties.capsys, *plain)
    assert state(parties.folder("a-hospital")) == before
    monkeypatch.setattr("builtins.input", lambda _prompt: digits)
    assert "removed   c-lab" in done(parties.capsys, *plain)


def test_a_site_refuses_a_version_with_another_card_for_it(parties: Parties, tmp_path: Path) -> None:
    """The coordinator makes keys of its own for a site, and tells the right fingerprint of that federation."""
    requests = [parties.request(name) for name in NAMES]
    forger = Parties(tmp_path / "forger", parties.capsys)
    forged = forger.approve(*requests[1:], forger.request("a-hospital"))
    before = state(parties.folder("a-hospital"))
    line = lone_refusal(parties.capsys, *parties.installing("a-hospital", forged))
    assert "the request that this site made" in line
    assert requests[0]["fingerprint"] in line
    assert state(parties.folder("a-hospital")) == before
    without = Parties(tmp_path / "without", parties.capsys).approve(*requests[1:])
    assert "not, or no longer, a member" in lone_refusal(
        parties.capsys, *parties.installing("a-hospital", without)
    )


def test_older_versions_gaps_forks_and_other_federations_are_refused(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    parties, first = installed
    second = parties.approve(parties.request("d-new"))
    third = parties.change("remove", "c-lab")
    fork = parties.copied(tmp_path / "fork")
    for number in (2, 3):
        (fork.coordinator / f"federation-{number}.toml").unlink()
    forked = fork.change("remove", "b.bank")
    forked_on = fork.change("renew", "--address", "elsewhere:1")
    other = Parties(tmp_path / "other", parties.capsys)
    (other.path).mkdir()
    other.folder("a-hospital").symlink_to(parties.folder("a-hospital"))
    request = other.request("a-hospital")
    namesake = other.approve(request)
    renamed = parties.forged(replace(parties.read(namesake), name="cardiology"))
    at = "a-hospital"

    def refused(version: dict[str, Any]) -> str:
        before = state(parties.folder(at))
        line = lone_refusal(parties.capsys, *parties.installing(at, version))
        assert state(parties.folder(at)) == before
        return line

    assert "install the file of version 2 first" in refused(third)
    parties.install(at, second)
    assert "this file is older" in refused(first)
    assert "another version 2 than the installed one" in refused(forked)
    assert "does not follow the installed one" in refused(forked_on)
    assert "a site of two federations has two folders" in refused(renamed)
    assert "this file is older" in refused(namesake)
    parties.install(at, third)
    assert "this file is older" in refused(second)


def test_a_pinned_roster_that_was_edited_is_refused(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, first = installed
    second = parties.change("remove", "c-lab")
    settings = parties.folder("a-hospital") / "site.toml"
    settings.write_text(settings.read_text().replace(first["roster_hash"], second["roster_hash"]))
    assert "roster_hash" in lone_refusal(parties.capsys, *parties.installing("a-hospital", second))


def test_settings_that_cannot_be_changed_are_refused(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, _ = installed
    second = parties.change("remove", "c-lab")
    settings = parties.folder("a-hospital") / "site.toml"
    text = settings.read_text()
    roster = next(line for line in text.splitlines() if line.startswith("roster ="))
    value = roster.split(" = ")[1].strip('"')
    settings.write_text(text.replace(roster, f'roster = """\n{value}"""'))
    assert "on a line of its own" in refusal(parties.capsys, *parties.installing("a-hospital", second))
    hidden = f"\ndata = '''\n{roster}\n'''\n"
    settings.write_text(re.sub(r"\ndata = .*\n", lambda _: hidden, text))
    assert "on a line of its own" in refusal(parties.capsys, *parties.installing("a-hospital", second))
    settings.write_text(text.replace(roster, f"{roster} # mine"))
    parties.install("a-hospital", second)
    settings.write_text(text + "[")
    assert "valid TOML" in lone_refusal(parties.capsys, *parties.installing("a-hospital", second))


def test_an_authority_that_expired_is_not_installed(
    installed: tuple[Parties, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, _ = installed
    second = parties.change("remove", "c-lab")
    for days, said in ((4000, "expired on"), (-30, "valid from")):
        later(monkeypatch, days)
        line = lone_refusal(parties.capsys, *parties.installing("a-hospital", second))
        assert f"certificate of the authority is '{said}" in line


def test_a_sites_key_that_others_can_read_is_refused(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, version = installed
    path = parties.folder("a-hospital") / "identity.pem"
    path.chmod(0o640)
    for command in (
        parties.installing("a-hospital", version),
        ["site", "request", "--name", "a-hospital", "--contact", "x", "--folder", str(path.parent)],
        ["site", "check", str(path.parent / "site.toml")],
    ):
        line = lone_refusal(parties.capsys, *command)
        assert f"permissions of {path} is '0640': expected 0600" in line
        assert "chmod 600" in line
    path.chmod(0o600)
    other = parties.folder("b.bank") / path.name
    for wrong in (b"", path.read_bytes()[:60], (path.parent / "site.toml").read_bytes(), other.read_bytes()):
        path.write_bytes(wrong)
        lone_refusal(parties.capsys, *parties.installing("a-hospital", version))


def test_a_coordinators_key_that_others_can_read_is_refused(
    installed: tuple[Parties, dict[str, Any]],
) -> None:
    parties, _ = installed
    for name in ("authority", "door"):
        path = parties.coordinator / f"{name}.key"
        path.chmod(0o604)
        for command in (
            parties.approving(parties.request("d-new")),
            ["coordinator", "renew", str(parties.coordinator)],
        ):
            assert f"permissions of {path} is '0604'" in lone_refusal(parties.capsys, *command)
        path.chmod(0o600)


# Changes between runs.


def changes(version: dict[str, Any]) -> list[tuple[str, str]]:
    return [(change["kind"], change["what"]) for change in version["changes"]]


def test_sites_are_added_removed_rotated_and_revoked(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    parties, _ = installed
    again = Parties(tmp_path / "again", parties.capsys)
    old = (parties.folder("b.bank") / "identity.pem").read_bytes()
    steps: list[tuple[tuple[str, str], Callable[[], dict[str, Any]]]] = [
        (("added", "d-new"), lambda: parties.approve(parties.request("d-new"))),
        (("rotated", "b.bank"), lambda: parties.approve(parties.rotate("b.bank"))),
        (("removed", "d-new"), lambda: parties.change("remove", "d-new")),
        (("added", "d-new"), lambda: parties.approve(parties.request("d-new"))),
        (("revoked", "c-lab"), lambda: revoked(parties, "c-lab", again.request("c-lab"))),
        (("revoked", "d-new"), lambda: parties.change("revoke", "d-new")),
    ]
    for number, (change, step) in enumerate(steps, 2):
        version = step()
        assert version["version"] == number
        assert changes(version) == [change]
        shown = parties.shown("a-hospital", version)
        assert f"  {change[0]:<8}  {change[1]}  " in shown
        assert ("did NOT sign" in shown) == (change == ("revoked", "c-lab"))
        assert changes(parties.install("b.bank", version)) == [change]
    config = read_config(parties.folder("b.bank") / "site.toml")
    assert Path(config.identity).name == "identity-2.pem"
    assert (parties.folder("b.bank") / "identity.pem").read_bytes() == old
    roster = load_roster(Path(config.roster))
    assert roster.names == NAMES
    for name, path in (
        ("b.bank", parties.folder("b.bank") / "identity-2.pem"),
        ("c-lab", again.folder("c-lab") / "identity.pem"),
    ):
        assert roster.key(name) == load_identity(path).public_key()
    version = again.install("c-lab", version)
    assert changes(version) == []
    assert changes(parties.install("b.bank", parties.approve(parties.rotate("b.bank")))) == [
        ("rotated", "b.bank")
    ]
    assert Path(read_config(parties.folder("b.bank") / "site.toml").identity).name == "identity-3.pem"


def revoked(parties: Parties, name: str, request: dict[str, Any]) -> dict[str, Any]:
    return parties.change(
        "revoke", name, "--request", request["request"], "--fingerprint", request["fingerprint"]
    )


def test_a_rotation_is_made_once_and_keeps_the_present_keys(
    installed: tuple[Parties, dict[str, Any]],
) -> None:
    parties, _ = installed
    settings = (parties.folder("a-hospital") / "site.toml").read_bytes()
    first = parties.rotate("a-hospital")
    before = state(parties.path)
    assert parties.rotate("a-hospital") == first
    assert state(parties.path) == before
    assert (parties.folder("a-hospital") / "site.toml").read_bytes() == settings
    assert stat.S_IMODE((parties.folder("a-hospital") / "identity-2.pem").stat().st_mode) == 0o600
    second = parties.change("remove", "c-lab")  # a version comes in between
    parties.install("a-hospital", second)
    assert read_config(parties.folder("a-hospital") / "site.toml").identity.endswith("identity.pem")
    third = parties.approve(parties.rotate("a-hospital"))
    assert changes(parties.install("a-hospital", third)) == [("rotated", "a-hospital")]


def test_a_site_without_a_federation_rotates_nothing(parties: Parties) -> None:
    parties.request("a-hospital")
    before = state(parties.path)
    folder = str(parties.folder("a-hospital"))
    assert "an installed one" in lone_refusal(parties.capsys, "site", "rotate", "--folder", folder)
    assert state(parties.path) == before


def test_a_key_that_the_old_one_did_not_sign_is_no_rotation(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path
) -> None:
    """A lying coordinator puts a key of its own into the roster, in each way that is not shown as a revocation."""
    parties, version = installed
    federation = parties.read(version)
    mine, others = new_identity(), load_identity(parties.folder("c-lab") / "identity.pem")
    unsigned = Request.of("b.bank", mine, "x", TODAY)
    by_itself = Request.of("b.bank", mine, "x", TODAY, replaces=mine)
    by_another = Request.of("b.bank", mine, "x", TODAY, replaces=others)
    right = parties.rotate("b.bank")
    honest = Request.from_toml(Path(right["request"]).read_text())
    replayed = replace(unsigned, rotation=honest.rotation)
    same_key = Request.of("b.bank", load_identity(parties.folder("b.bank") / "identity.pem"), "x", TODAY)
    for request in (unsigned, by_itself, by_another, replayed, same_key):
        sites = tuple(request if site.name == "b.bank" else site for site in federation.sites)
        lie = replace(federation, version=2, previous=federation.fingerprint, sites=sites)
        line = lone_refusal(parties.capsys, *parties.installing("a-hospital", parties.forged(lie)))
        assert "request of b.bank" in line
        assert "ask the coordinator which step was made" in line
    lie = replace(federation, version=2, previous=federation.fingerprint, revoked=(bytes(32),))
    assert "revoked keys" in lone_refusal(
        parties.capsys, *parties.installing("a-hospital", parties.forged(lie))
    )
    for request in (by_itself, by_another, replayed):
        path = tmp_path / "lie.request"
        path.write_text(request.to_toml(), encoding="utf-8")
        told = {"request": str(path), "fingerprint": request.fingerprint.hex()}
        assert "not taken" in lone_refusal(parties.capsys, *parties.approving(told))


@pytest.mark.parametrize(
    ("field", "what"), [("authority", "certificate authority"), ("coordinator", "coordinator's key")]
)
def test_another_authority_or_coordinators_key_is_refused(
    installed: tuple[Parties, dict[str, Any]], tmp_path: Path, field: str, what: str
) -> None:
    parties, version = installed
    other = Parties(tmp_path / "other", parties.capsys)
    federation, another = parties.read(version), getattr(other.read(other.made()), field)
    lie = replace(federation, version=2, previous=federation.fingerprint, **{field: another})
    line = lone_refusal(parties.capsys, *parties.installing("a-hospital", parties.forged(lie)))
    assert f"{what}: expected that of the installed version" in line


def test_a_revoked_key_never_comes_back(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, _ = installed
    version = parties.change("revoke", "c-lab")
    assert "was not revoked" in refusal(parties.capsys, *parties.approving(parties.request("c-lab")))
    federation = parties.read(version)
    parties.install("a-hospital", version)
    own = Request.from_toml((parties.folder("c-lab") / "c-lab.request").read_text())
    back = replace(
        federation, version=3, previous=federation.fingerprint, revoked=(), sites=(*federation.sites, own)
    )
    line = lone_refusal(parties.capsys, *parties.installing("a-hospital", parties.forged(back)))
    assert "revoked keys" in line


def test_a_removed_key_may_come_back(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, _ = installed
    parties.change("remove", "c-lab")
    assert changes(parties.approve(parties.request("c-lab"))) == [("added", "c-lab")]


def test_a_site_that_was_revoked_or_removed_learns_it(installed: tuple[Parties, dict[str, Any]]) -> None:
    parties, _ = installed
    version = parties.change("remove", "c-lab")
    assert "no longer, a member" in lone_refusal(parties.capsys, *parties.installing("c-lab", version))
    assert "because it replaces a key" in lone_refusal(
        parties.capsys, *parties.approving(parties.rotate("c-lab"))
    )
    unknown = lone_refusal(parties.capsys, "coordinator", "remove", "c-lab", str(parties.coordinator))
    assert "expected one of a-hospital, b.bank" in unknown


def test_a_replacement_is_of_the_site_whose_key_is_revoked(
    installed: tuple[Parties, dict[str, Any]],
) -> None:
    parties, _ = installed
    other = parties.request("d-new")
    command = ["coordinator", "revoke", "c-lab", str(parties.coordinator), "--request", other["request"]]
    assert "the request of c-lab" in lone_refusal(
        parties.capsys, *command, "--fingerprint", other["fingerprint"]
    )


# Secrets, full disks, interrupts.


def test_no_secret_is_printed_or_sent(parties: Parties) -> None:
    printed = ""

    def run(*command: str) -> dict[str, Any]:
        nonlocal printed
        for words in (command, (*command, "--json")):
            _, out, err = ran(parties.capsys, *words)
            printed += out + err
        answer = json.loads(out)
        assert isinstance(answer, dict)
        return answer

    requests = [
        run("site", "request", "--name", name, "--contact", "x", "--folder", str(parties.folder(name)))
        for name in NAMES
    ]
    parties.approve(*requests)
    version = run("coordinator", "show", str(parties.coordinator))
    for name in NAMES:
        run(*parties.installing(name, version))
    rotated = run("site", "rotate", "--folder", str(parties.folder("b.bank")))
    second = run(*parties.approving(rotated))
    run(*parties.installing("b.bank", second))
    run("coordinator", "renew", str(parties.coordinator))
    for path in parties.path.rglob("*"):  # given in the place of other files
        if path.is_file() and b"PRIVATE" in path.read_bytes():
            for command in (
                ["coordinator", "approve", str(parties.coordinator), str(path)],
                ["site", "install", str(path), "--folder", str(parties.folder("b.bank"))],
                ["provision", str(path), "--out", str(parties.path / "new")],
            ):
                _, out, err = ran(parties.capsys, *command)
                printed += out + err
    for path in parties.path.rglob("*.pem"):
        path.chmod(0o644)
    for name in NAMES:
        _, out, err = ran(parties.capsys, *parties.installing(name, second))  # errors name the files
        printed += out + err
    secret = [path for path in parties.path.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]
    assert len(secret) == len(NAMES) + 1 + 3, (
        "one of each site, one of the rotation, three of the coordinator"
    )
    public = [path for path in parties.path.rglob("*") if path.is_file() and path not in secret]
    everything = printed.encode() + b"".join(path.read_bytes() for path in public)
    for path in secret:
        body = [line for line in path.read_bytes().splitlines() if not line.startswith(b"-----")]
        assert not any(line in everything for line in body if len(line) > 16)
        if path.name.startswith("identity"):
            path.chmod(0o600)
            raw = load_identity(path).private_bytes_raw()
            assert raw.hex().encode() not in everything
            assert raw not in everything


def test_files_with_secrets_are_private_whatever_the_umask(parties: Parties) -> None:
    before = os.umask(0)
    try:
        parties.made()
        parties.rotate("a-hospital")
    finally:
        os.umask(before)
    for path in parties.path.rglob("*"):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        elif b"PRIVATE" in path.read_bytes():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
@pytest.mark.parametrize("party", ["request", "approve", "install", "rotate", "remove", "renew", "provision"])
def test_a_command_that_is_interrupted_at_any_write_is_completed_by_another(
    installed: tuple[Parties, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    party: str,
    error: BaseException,
) -> None:
    """Each sync to disk fails in turn: what is there is whole, and nothing else is there."""
    parties, _ = installed
    new = parties.request("d-new")
    second = parties.copied(tmp_path / "second").change("remove", "c-lab")
    settings = tmp_path / "federation.toml"
    settings.write_text(PROVISION)
    commands = {
        "request": ["site", "request", "--name", "e", "--contact", "x", "--folder", str(parties.folder("e"))],
        "approve": parties.approving(new),
        "install": parties.installing("a-hospital", second),
        "rotate": ["site", "rotate", "--folder", str(parties.folder("a-hospital"))],
        "remove": ["coordinator", "remove", "c-lab", str(parties.coordinator)],
        "renew": ["coordinator", "renew", str(parties.coordinator)],
        "provision": ["provision", str(settings), "--out", str(tmp_path / "all")],
    }
    command = commands[party]
    sync_to_disk(True)
    for failing in range(200):
        syncs = iter(range(failing))

        def fails(_descriptor: int, syncs: Iterator[int] = syncs) -> None:
            if next(syncs, None) is None:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails)
            code, _, err = ran(parties.capsys, *command)
        assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".old")]
        if code == 0 or "expected one of" in err or "a new folder" in err:  # it was done by the one before
            break
        assert (code, len(err.splitlines())) == (2 if isinstance(error, OSError) else 130, 1)
        assert "Traceback" not in err
        whole(parties, tmp_path / "all")
    assert failing > 0


def whole(parties: Parties, provisioned: Path) -> None:
    """Check every file that an interrupted command has left."""
    for folder in (*(parties.folder(name) for name in (*NAMES, "e")), parties.coordinator):
        for path in folder.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            if path.suffix == ".request":
                Request.from_toml(content.decode())
            elif path.name.startswith("federation") and path.suffix == ".toml":
                Federation.from_toml(content.decode())
            elif path.name.startswith("identity"):
                load_identity(path)
            elif path.suffix == ".key":
                assert content.endswith(b"PRIVATE KEY-----\n")
            elif path.suffix == ".pem":
                assert content.endswith(b"-----END CERTIFICATE-----\n")
            elif path.name == "site.toml":
                config = read_config(path)
                assert not config.roster or load_roster(Path(config.roster)).hash.hex() == config.roster_hash
            elif path.name == "roster.toml":
                assert isinstance(load_roster(path), Roster)
    if provisioned.exists():
        everything = found(parties.capsys, "coordinator", "show", str(provisioned / "coordinator"))
        for name in everything["sites"]:
            assert (
                read_config(provisioned / "sites" / name / "site.toml").roster_hash
                == everything["roster_hash"]
            )


# All at once.

PROVISION = """
name = "rehearsal"
door = "127.0.0.1:9443"
certificate_names = ["localhost"]

[[site]]
name = "north"
contact = "rehearsal"

[[site]]
name = "east"
contact = "rehearsal"
"""


def test_provision_makes_a_folder_for_each_party(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, out = tmp_path / "federation.toml", tmp_path / "all"
    settings.write_text(PROVISION)
    out.mkdir()
    printed = done(capsys, "provision", str(settings), "--out", str(out))
    assert "has had the keys of all parties" in printed
    out.rename(tmp_path / "copied")
    folder = tmp_path / "copied"
    assert sorted(path.name for path in folder.iterdir()) == ["coordinator", "sites"]
    version = found(capsys, "coordinator", "show", str(folder / "coordinator"))
    assert version["sites"] == ["east", "north"]
    assert str(tmp_path).encode() not in b"".join(state(folder).values())
    parties = Parties(folder / "sites", capsys)
    parties.coordinator = folder / "coordinator"
    for name in ("east", "north"):
        config = read_config(parties.folder(name) / "site.toml")
        assert (config.name, config.roster_hash) == (name, version["roster_hash"])
        before = state(parties.folder(name))
        assert parties.install(name, version)["changes"] == []
        assert state(parties.folder(name)) == before
    handshake(folder / "coordinator", Path(config.federation).with_name("authority.pem"), "localhost")
    following = parties.approve(parties.rotate("north"))  # it goes on as any other
    assert changes(parties.install("east", following)) == [("rotated", "north")]
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "rehearsal"\n', "", "name: expected a value"),
        ('name = "east"', 'name = "North"', "it is taken"),
        ('name = "east"', 'name = "a b"', "site[1].name"),
        ('contact = "rehearsal"', 'contact = ""', "site[0].contact"),
        ('contact = "rehearsal"', 'contact = "\\u0007"', "contact"),
        ('contact = "rehearsal"', 'contact = "x"\ncontcat = "x"', "did you mean site[0].contact?"),
        ("127.0.0.1:9443", "127.0.0.1", "door"),
        ('"localhost"', '"local host"', "certificate_names[0]"),
        (PROVISION, 'name = "x"\ndoor = "a:1"\n', "site"),
        (PROVISION, "", "empty"),
    ],
)
def test_wrong_federations_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    settings, out = tmp_path / "federation.toml", tmp_path / "all"
    settings.write_text(PROVISION.replace(old, new, 1))
    assert said in lone_refusal(capsys, "provision", str(settings), "--out", str(out))
    assert not out.exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "federation.toml"
    settings.write_text(PROVISION)
    for out in (tmp_path, settings):
        assert "an empty one" in lone_refusal(capsys, "provision", str(settings), "--out", str(out))
    assert list(tmp_path.iterdir()) == [settings]
