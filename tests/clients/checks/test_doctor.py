"""`cloister doctor`: each fault is induced, and the message names the hop that fails first and what to do."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256

from cloister.aggregation.sums import Sums
from cloister.clients.checks.doctor import site_bytes
from cloister.protocol.identity.address import free_port, port_of
from cloister.protocol.identity.certificates import read_certificate
from cloister.protocol.machine.storage import lock
from cloister.protocol.plan.soundness import parse
from cloister.server.federation.control import Control
from cloister.server.federation.doctor import coordinator_bytes
from cloister.tests.parties.doctor_parties import (
    NOW,
    SITE,
    Listener,
    Rehearsal,
    Report,
    crowded,
    says,
    tls,
)
from cloister.tests.parties.door_parties import Relay
from cloister.tests.tools.command import lone_refusal, ran

SOON = ("--timeout", "1")
"""For a fault that is found by waiting."""
DAY = datetime.timedelta(days=1)

pytestmark = pytest.mark.usefixtures("unsynced")

Make = Callable[..., Rehearsal]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Make:
    """Makes a federation."""
    return lambda *given, **options: Rehearsal(tmp_path / "parties", capsys, *given, **options)


@pytest.fixture
def parties(make: Make) -> Rehearsal:
    """A federation, whose door is not served."""
    return make()


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Without a fault


WAY = ("proxy", "DNS", "TCP", "CONNECT", "TLS", "door")
"""The hops to the door."""


def test_every_hop_is_checked(parties: Rehearsal) -> None:
    with parties.answers():
        report = parties.doctor(code=0)
    assert list(report.hops) == ["federation", "keys", "releases", "disk", "devices", *WAY]
    assert report.states(*report.hops) == {"ok"}


def test_all_of_it_goes_through_a_proxy(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the address resolves nowhere but at the proxy."""
    port = free_port()
    parties = make(f"fl.invalid:{port}")
    with parties.answers(), Relay(f"127.0.0.1:{port}", proxy=True) as relay:
        monkeypatch.setenv("https_proxy", f"http://name:word@{relay.address}")
        report = parties.doctor(code=0)
    assert "word" not in str(report.found)
    assert report.states(*report.hops) == {"ok"}
    assert relay.connects == 2 * [f"CONNECT {parties.door} HTTP/1.1"]


def test_the_text_fits_a_small_terminal_and_repeats_the_first_failure(
    parties: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = ran(parties.capsys, "doctor", str(parties.site), *SOON)
    assert (code, err) == (1, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == f"site {SITE}: 11 hops; it waits at most 8 s for others"
    at = next(index for index, line in enumerate(lines) if line.startswith("failed "))
    failed, fix = lines[at], lines[at + 1]
    assert failed.split()[1] == "TCP"
    assert lines[-2] == f"first failure: TCP: {failed.split('  ', 2)[-1].split('  ')[-1]}"
    assert lines[-1] == fix.strip()


# Faults at the site


def test_1_no_federation_is_installed(parties: Rehearsal) -> None:
    text = parties.site.read_text()
    kept = [line for line in text.splitlines() if not line.startswith(("federation", "roster"))]
    parties.site.write_text("\n".join(kept))
    report = parties.doctor()
    assert "cloister site install" in report.fault("federation")
    assert report.states("keys", *WAY) == {"skipped"}
    assert report.states("releases", "disk", "devices") == {"ok"}


def test_4_the_site_is_no_member(parties: Rehearsal) -> None:
    edited(parties.site, f'name = "{SITE}"', 'name = "elsewhere"')
    assert "has left: ask the coordinator" in parties.doctor().fault("federation")


def test_5_a_key_can_be_read_by_others(parties: Rehearsal) -> None:
    key = parties.folder / "identity.pem"
    key.chmod(0o644)
    assert f"chmod 600 {key}" in parties.doctor().fault("keys")


def test_6_the_key_is_that_of_another_site(parties: Rehearsal) -> None:
    shutil.copy(parties.folder.parent / "north" / "identity.pem", parties.folder)
    fault = parties.doctor().fault("keys")
    assert "the key that the installed federation has for this site" in fault
    assert "backup" in fault


@pytest.mark.parametrize(("name", "has"), [("numpy", "1.0"), ("flwr", "2.1")])
def test_7_a_package_is_too_old_or_too_new(
    parties: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has: str
) -> None:
    folder = tmp_path / "packages" / f"{name}-{has}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {has}\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    fault = parties.doctor().fault("releases")
    assert f"release of {name} is '{has}'" in fault
    assert f"pip install '{name}" in fault


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid():
        pytest.skip("needs root, to mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_8_the_disk_is_full(parties: Rehearsal, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited(parties.site, 'state = "state"', f'state = "{small_disk / "state"}"')
    fault = parties.doctor().fault("disk")
    assert f"1.05 MB at {small_disk}" in fault
    assert "free space" in fault
    monkeypatch.setattr("cloister.lm.model.model.count_parameters", lambda _plan: (10**4, 10**4, 10**4))
    monkeypatch.setattr(
        "cloister.clients.ranks.device_mesh.count_parameters", lambda _plan: (10**4, 10**4, 10**4)
    )
    assert parties.doctor("--plan", "private-code").states("disk") == {"ok"}  # it needs less
    with (small_disk / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(2**20))
    assert "is '0 B at" in parties.doctor("--plan", "private-code").fault("disk")


def test_9_the_device_is_absent(parties: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    edited(parties.site, 'device = "auto"', 'device = "cuda:1"')
    fault = parties.doctor().fault("devices")
    assert "'cuda:1'" in fault
    assert "nvidia-smi" in fault


def test_10_the_mesh_has_more_ranks_than_devices(parties: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    edited(parties.site, "# shard =", "shard = 4")
    assert "lower a degree of [mesh]" in parties.doctor().fault("devices")


# Faults of name, address and proxy


def test_11_a_name_does_not_resolve(make: Make) -> None:
    report = make("no-such-host.invalid:9443").doctor(*SOON)
    fault = report.fault("DNS")
    assert "'no-such-host.invalid'" in fault
    assert "your DNS" in fault
    for hop in ("TCP", "TLS", "door"):
        assert report.hops[hop] == {"hop": hop, "state": "skipped", "what": "DNS failed", "fix": ""}


def test_12_nothing_listens(parties: Rehearsal) -> None:
    """The coordinator was not started."""
    fault = parties.doctor().fault("TCP")
    assert "Connection refused" in fault
    assert "cloister coordinator start" in fault


def test_13_a_firewall_drops_the_connection(make: Make) -> None:
    with crowded() as address:
        began = time.monotonic()
        fault = make(address).doctor(*SOON).fault("TCP")
        assert time.monotonic() - began < 8  # as the command says
    assert "no answer within 1 s" in fault
    assert f"let TCP port {address.rpartition(':')[2]} out" in fault


@pytest.mark.parametrize(
    ("proxy", "answer", "expected"),
    [
        ("http://{}", b"HTTP/1.1 403 Forbidden\r\n\r\n", "administrator to allow CONNECT"),
        ("http://{}", b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "NAME:PASSWORD"),
        ("http://me:wrong@{}", b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "correct them"),
        ("http://{}", b"SSH-2.0-OpenSSH_9.2\r\n", "not an HTTP proxy"),
    ],
    ids=["refuses", "needs-password", "wrong-password", "is-none"],
)
def test_14_the_proxy_does_not_connect(
    parties: Rehearsal, monkeypatch: pytest.MonkeyPatch, proxy: str, answer: bytes, expected: str
) -> None:
    with Listener(says(answer)) as server:
        monkeypatch.setenv("https_proxy", proxy.format(server.address))
        fault = parties.doctor().fault("CONNECT")
    assert expected in fault
    assert answer.split(b"\r\n")[0].decode() in fault
    assert "wrong" not in fault


def test_14_the_proxy_does_not_reach(parties: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(says(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")) as server:
        monkeypatch.setenv("https_proxy", f"http://{server.address}")
        fault = parties.doctor().fault("CONNECT")
    assert "502 Bad Gateway" in fault
    assert "cloister coordinator start" in fault


def test_15_the_proxy_is_not_there(parties: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"me:secret@127.0.0.1:{free_port()}")
    fault = parties.doctor().fault("TCP")
    assert fault.startswith("proxy is ")
    assert "correct HTTPS_PROXY" in fault
    assert "secret" not in fault


def test_16_the_proxy_is_of_a_kind_that_grpc_cannot_use(
    parties: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for proxy in ("socks5://127.0.0.1:1080", "https://127.0.0.1:3128", "http://127.0.0.1"):
        monkeypatch.setenv("https_proxy", proxy)
        assert "http://HOST:PORT" in parties.doctor().fault("proxy")


@pytest.mark.parametrize("spared", ["fl.invalid", ".invalid", "example.org, fl.invalid"])
def test_18_a_host_without_proxy_is_asked_for_in_dns(
    make: Make, monkeypatch: pytest.MonkeyPatch, spared: str
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", spared)
    assert "HTTPS_PROXY" in make("fl.invalid:9443").doctor(*SOON).fault("DNS")


# Faults of TLS


def test_19_a_server_accepts_and_says_nothing(make: Make) -> None:
    with Listener() as server:
        began = time.monotonic()
        fault = make(server.address).doctor(*SOON).fault("TLS")
        assert time.monotonic() - began < 8  # as the command says
    assert "not silence" in fault
    assert "ask the coordinator what listens there" in fault


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "a server without TLS"), (b"", "let TLS to")],
    ids=["plain", "closes"],
)
def test_20_a_server_without_tls(make: Make, answer: bytes, expected: str) -> None:
    with Listener(says(answer)) as server:
        assert expected in make(server.address).doctor(*SOON).fault("TLS")


def test_21_a_certificate_of_another_authority(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one with the same name: a federation that was made again."""
    other = Rehearsal(tmp_path / "other", capsys).coordinator
    with Listener(tls(other / "door.pem", other / "door.key")) as server:
        fault = make(server.address).doctor().fault("TLS")
    assert "oncology authority" in fault
    shown = read_certificate((other / "door.pem").read_bytes(), "the door's")
    assert shown.fingerprint(SHA256()).hex() in fault
    assert "unopened" in fault


@pytest.mark.parametrize(
    ("names", "made", "days", "expected"),
    [
        (
            ["other.example"],
            NOW,
            398,
            ("for other.example", "one for 127.0.0.1", "--certificate-name 127.0.0.1"),
        ),
        (["127.0.0.1"], NOW - DAY / 2, 0, ("expired on", "clock", "cloister coordinator renew")),
        (["127.0.0.1"], NOW + 9 * DAY, 398, ("valid from", "by NTP")),
    ],
    ids=["another-name", "expired", "not-yet-valid"],
)
def test_22_a_certificate_that_is_not_valid(
    parties: Rehearsal, names: list[str], made: datetime.datetime, days: int, expected: tuple[str, ...]
) -> None:
    parties.reissue(names, made, days)
    with parties.answers():
        fault = parties.doctor().fault("TLS")
    assert all(words in fault for words in expected), fault


def test_23_no_http2(parties: Rehearsal) -> None:
    with parties.serves(protocols=()):
        fault = parties.doctor().fault("TLS")
    assert "expected h2" in fault
    assert "let TCP through" in fault


def test_24_another_server_with_the_certificate(parties: Rehearsal) -> None:
    with parties.serves():
        assert "cloister coordinator start" in parties.doctor(*SOON).fault("door")


# At the coordinator


def coordinator(parties: Rehearsal, *options: str) -> Report:
    return parties.report(str(parties.coordinator), *options)


def listens(port: int, _request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a coordinator's process answers."""
    yield {"address": f"[::]:{port}"}


def test_the_coordinator_checks_itself(parties: Rehearsal) -> None:
    report = coordinator(parties)
    assert report.code == 0
    assert list(report.hops) == ["federation", "certificates", "releases", "disk", "DNS", "port"]
    for port in (port_of(parties.door), 1):
        with (
            lock(parties.coordinator / "lock", "no other coordinator"),
            contextlib.closing(Control(parties.coordinator, partial(listens, port))),
        ):
            report = coordinator(parties)
        assert report.code == 0
        assert ("start it again" in report.hops["port"]["what"]) == (port == 1), "the coordinator has moved"


def test_31_a_port_is_taken(parties: Rehearsal) -> None:
    with Listener(says(b""), port_of(parties.door)):
        assert "ss -ltnp" in coordinator(parties).fault("port")
    with parties.answers():  # of another process than the coordinator's
        assert "ss -ltnp" in coordinator(parties).fault("port")


def test_33_a_certificate_of_the_coordinator_has_expired(make: Make) -> None:
    parties = make(made=NOW - 0.9 * DAY, days=1)
    parties.reissue(["127.0.0.1"], NOW - DAY / 2, 0)
    assert "cloister coordinator renew" in coordinator(parties).fault("certificates")


def test_34_a_certificate_lacks_the_name_of_its_address(parties: Rehearsal) -> None:
    parties.reissue(["other.example"])
    assert "cloister coordinator renew" in coordinator(parties).fault("certificates")


def test_35_a_key_of_the_coordinator_can_be_read_by_others(parties: Rehearsal) -> None:
    (parties.coordinator / "authority.key").chmod(0o640)
    assert "chmod 600" in coordinator(parties).fault("certificates")


def test_36_a_version_is_missing(parties: Rehearsal) -> None:
    parties.registry.file.unlink()
    report = coordinator(parties)
    assert "backup" in report.fault("federation")
    assert report.states("certificates", "DNS", "port") == {"skipped"}


def test_37_the_own_name_does_not_resolve(make: Make) -> None:
    report = coordinator(make(f"fl.invalid:{free_port()}"), *SOON)
    assert "cloister coordinator renew" in report.fault("DNS")


# Wrong usage, and figures


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--plan", "missing.toml"], "missing.toml"),
    ],
)
def test_wrong_options_are_refused(parties: Rehearsal, options: list[str], expected: str) -> None:
    assert expected in lone_refusal(parties.capsys, "doctor", str(parties.site), *options)


def test_wrong_paths_are_refused(parties: Rehearsal, tmp_path: Path) -> None:
    assert "site.toml" in lone_refusal(parties.capsys, "doctor", str(parties.folder))
    assert "missing" in lone_refusal(parties.capsys, "doctor", str(tmp_path / "missing.toml"))


def test_the_space_that_a_plan_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.lm.model.model.count_parameters", lambda _plan: (3000, 1000, 1000))
    plan = parse('local.optimizer_state = "keep"')
    coded = Sums(plan, 1000).training.length * plan.aggregation.ring_bits // 8
    assert coded >= 4000
    assert site_bytes(plan) == 8 * 1000 + 2 * coded + 16 * 1000
    assert coordinator_bytes(plan) == 12 * 1000 * (2 + 2) + 4 * 3000 + 8 * coded
