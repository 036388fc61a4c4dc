"""The parties of the doctor's tests: a federation on loopback, and servers and proxies with a fault."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from cloister.protocol.identity.address import free_port
from cloister.protocol.identity.certificates import certificate_to_pem, issue, key_from_pem
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
    """A federation on loopback, with a SuperLink that has no fault.

    Args:
        path: Its folder.
        capsys: Captures what the commands print.
        exchange: HOST:PORT of the exchange.
        superlink: HOST:PORT of the SuperLink; empty: one is started.
        made: When the federation is made.
        days: Days for which the servers' certificates are valid.
    """

    def __init__(
        self,
        path: Path,
        capsys: pytest.CaptureFixture[str],
        *,
        exchange: str = "",
        superlink: str = "",
        made: datetime.datetime = NOW,
        days: int = 398,
    ) -> None:
        self.capsys = capsys
        self.exchange = exchange or f"127.0.0.1:{free_port()}"
        self.superlink = superlink or f"127.0.0.1:{free_port()}"
        self._serving = not superlink
        sites = "".join(f'[[site]]\nname = "{name}"\ncontact = "test"\n' for name in (SITE, "north"))
        text = f'name = "oncology"\nsuperlink = "{self.superlink}"\nexchange = "{self.exchange}"\n'
        settings = path.with_suffix(".toml")
        settings.write_text(f"{text}certificate_days = {days}\n{sites}")
        provision(PROVISION.load(settings), path, made)
        self.coordinator = path / "coordinator"
        self.folder = path / "sites" / SITE
        self.site = self.folder / "site.toml"

    @property
    def registry(self) -> Registry:
        """The coordinator's folder."""
        return Registry.open(self.coordinator)

    @property
    def authority(self) -> Path:
        """The certificate that the site has installed."""
        (found,) = self.folder.glob("federation/*/authority.pem")
        return found

    def reissue(self, names: list[str], made: datetime.datetime = NOW, days: int = 398) -> None:
        """Replace the certificate of the SuperLink."""
        folder, registry = self.coordinator, self.registry
        authority, own = (
            key_from_pem((folder / f"{name}.key").read_bytes(), name) for name in ("authority", "superlink")
        )
        certificate = issue(registry.certificate("authority"), authority, own, names, made, days)
        (folder / "superlink.pem").write_bytes(certificate_to_pem(certificate))

    def serves(self, server: str = "exchange", protocols: tuple[str, ...] = ("h2",)) -> Listener:
        """A TLS server with the SuperLink's certificate, at the address of a server."""
        pem, key = (self.coordinator / f"superlink.{kind}" for kind in ("pem", "key"))
        return Listener(tls(pem, key, protocols), int(getattr(self, server).rpartition(":")[2]))

    @contextlib.contextmanager
    def answers(self, words: str = "unknown key", bind: str = "") -> Iterator[None]:
        """A SuperLink that refuses each SuperNode with these words."""

        def refuse(_request: bytes, context: grpc.ServicerContext) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

        pull = {"PullMessages": grpc.unary_unary_rpc_method_handler(refuse)}
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("flwr.proto.Fleet", pull),))
        key, pem = ((self.coordinator / f"superlink.{kind}").read_bytes() for kind in ("key", "pem"))
        server.add_secure_port(bind or self.superlink, grpc.ssl_server_credentials([(key, pem)]))
        server.start()
        try:
            yield
        finally:
            server.stop(0).wait()

    def doctor(self, *options: str, code: int | None = None) -> Report:
        """What the doctor finds at the site."""
        with self.answers() if self._serving else contextlib.nullcontext():
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
