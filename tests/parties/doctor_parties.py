"""The parties of the doctor's tests: a federation on loopback, and servers and proxies with a fault."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.protocol.identity.address import free_port, port_of
from cloister.protocol.identity.certificates import certificate_to_pem, issue
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.federation.registry import Registry
from cloister.simulations.rehearsal.provision import PROVISION, provision
from cloister.tests.tools.command import ran

SITE = "east-clinic"
NOW = datetime.datetime.now(datetime.UTC)
Handle = Callable[[socket.socket], None]


class Listener:
    """A TCP server on loopback.

    Args:
        handle: Called with each connection, which stays open until this ends, unless it closes it.
        port: The port; 0: any.
    """

    def __init__(self, handle: Handle = lambda _connection: None, port: int = 0) -> None:
        self._handle = handle
        self._server = socket.create_server(("127.0.0.1", port))
        self._open: list[socket.socket] = []
        self.port = int(self._server.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            connection.settimeout(10)
            self._open.append(connection)
            with contextlib.suppress(OSError):
                self._handle(connection)


def tls(certificate: Path, key: Path, protocols: tuple[str, ...] = ("h2",)) -> Handle:
    """A TLS server that says nothing after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if protocols:
        context.set_alpn_protocols(list(protocols))

    def handle(connection: socket.socket) -> None:
        with context.wrap_socket(connection.dup(), server_side=True) as made:
            made.recv(1)  # until the peer closes

    return handle


def says(answer: bytes) -> Handle:
    """A server that answers every first message with the same bytes, and closes."""

    def handle(connection: socket.socket) -> None:
        connection.recv(2**14)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    return handle


class Rehearsal:
    """A federation on loopback.

    Args:
        path: Its folder.
        capsys: Captures what the commands print.
        door: HOST:PORT of its door; empty: a free port of loopback.
        made: When the federation is made.
        days: Days for which the door's certificate is valid.
    """

    def __init__(
        self,
        path: Path,
        capsys: pytest.CaptureFixture[str],
        door: str = "",
        *,
        made: datetime.datetime = NOW,
        days: int = 398,
    ) -> None:
        self.capsys = capsys
        self.door = door or f"127.0.0.1:{free_port()}"
        sites = "".join(f'[[site]]\nname = "{name}"\ncontact = "test"\n' for name in (SITE, "north"))
        settings = path.with_suffix(".toml")
        settings.write_text(f'name = "oncology"\ndoor = "{self.door}"\ncertificate_days = {days}\n{sites}')
        provision(PROVISION.load(settings), path, made)
        self.coordinator = path / "coordinator"
        self.folder = path / "sites" / SITE
        self.site = self.folder / "site.toml"

    @property
    def registry(self) -> Registry:
        """The coordinator's folder."""
        return Registry.open(self.coordinator)

    def reissue(self, names: list[str], made: datetime.datetime = NOW, days: int = 398) -> None:
        """Replace the certificate of the door."""
        folder, registry = self.coordinator, self.registry
        authority, own = registry._key("authority"), registry._key("door")
        certificate = issue(registry.certificate("authority"), authority, own, names, made, days)
        (folder / "door.pem").write_bytes(certificate_to_pem(certificate))

    def serves(self, protocols: tuple[str, ...] = ("h2",)) -> Listener:
        """A TLS server with the door's certificate at its address."""
        pem, key = (self.coordinator / f"door.{kind}" for kind in ("pem", "key"))
        return Listener(tls(pem, key, protocols), port_of(self.door))

    def answers(self) -> Door:
        """The door; a context manager."""

        def certificate() -> ServerCertificate:
            pem, key = ((self.coordinator / f"door.{kind}").read_bytes() for kind in ("pem", "key"))
            return ServerCertificate(pem, key)

        return Door(certificate, lambda: self.registry.federation, f"127.0.0.1:{port_of(self.door)}")

    def doctor(self, *options: str, code: int | None = None) -> Report:
        """What the doctor finds at the site."""
        return self.report(str(self.site), *options, code=code)

    def report(self, path: str, *options: str, code: int | None = None) -> Report:
        """What the doctor finds at a party; without the JSON it prints the same."""
        found, out, err = ran(self.capsys, "doctor", path, *options, "--json")
        assert err == ""
        (line,) = out.splitlines()
        report = Report(found, json.loads(line))
        assert found == (0 if report.first is None else 1)
        assert code in (None, found), report.hops
        return report


class Report:
    """What a doctor has found.

    Args:
        code: Its exit code.
        found: Its JSON.
    """

    def __init__(self, code: int, found: dict[str, Any]) -> None:
        self.code = code
        self.found = found
        self.first: str | None = found["first"]
        self.hops: dict[str, dict[str, str]] = {hop["hop"]: hop for hop in found["hops"]}

    def fault(self, hop: str) -> str:
        """Reason and fix of the first failure, which is at that hop."""
        assert self.first == hop, self.hops
        failed = [name for name, each in self.hops.items() if each["state"] == "failed"]
        assert failed[0] == hop
        assert self.found["ok"] is False
        assert self.hops[hop]["fix"]
        return f"{self.hops[hop]['what']}; {self.hops[hop]['fix']}"

    def states(self, *hops: str) -> set[str]:
        """The states of some hops."""
        return {self.hops[hop]["state"] for hop in hops}


@contextlib.contextmanager
def crowded() -> Iterator[str]:
    """An address where a firewall seems to drop connections: the queue of its listener is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        for _ in range(3):
            each = socket.socket()
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                each.connect(server.getsockname())
            waiting.append(each)
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for each in waiting:
            each.close()
