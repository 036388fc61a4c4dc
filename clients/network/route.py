"""The way from a site to the door, hop by hop, as gRPC takes it: proxy, DNS, TCP, CONNECT, TLS.

It is made here with sockets, because gRPC says of most failures only that the server is not available. Each method
makes one hop, and needs those before it.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from cloister.clients.network.proxy import proxy_for
from cloister.protocol.errors import CertificateError, ConnectionFailedError, one_line
from cloister.protocol.identity.address import Endpoint, host_of, port_of, resolve
from cloister.protocol.identity.certificates import names_of, read_certificate
from cloister.protocol.identity.session import Entrance
from cloister.protocol.machine.closing import Closing

_HEAD = 2**14
"""Bytes of the longest head of a proxy's answer."""


@dataclass
class Route(Closing):
    """The way to the door."""

    entrance: Entrance
    """Where it is, and the authority of its certificate; no other is trusted."""
    limit_s: float
    """Seconds for each wait."""
    _proxy: _Proxy | None = None
    _endpoints: list[Endpoint] = field(default_factory=list)
    _socket: socket.socket | None = field(default=None, repr=False)

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def address(self) -> str:
        """The door's, HOST:PORT."""
        return self.entrance.address

    @property
    def host(self) -> str:
        """The door's host, which is the name in its certificate."""
        return self.entrance.server_name

    def choose(self) -> str:
        """Find the proxy for the door, if there is one.

        Raises:
            ConnectionFailedError: the environment names none that can be used.
        """
        used = proxy_for(self.host)
        if used is None:
            return "none: HTTPS_PROXY is not set, or NO_PROXY has this host"
        self._proxy = _Proxy.of(used)
        return f"{self._proxy.address}, as the environment says"

    def resolve(self) -> str:
        """Find the IP addresses of the door, or of the proxy, which then resolves the door's name.

        Raises:
            ConnectionFailedError: the name does not resolve.
        """
        address = self._proxy.address if self._proxy else self.address
        try:
            self._endpoints = resolve(host_of(address), port_of(address), self.limit_s)
        except ConnectionFailedError as error:
            direct = "ask for this name in your DNS; where only a proxy resolves names, set HTTPS_PROXY"
            fix = "correct HTTPS_PROXY" if self._proxy else direct
            raise ConnectionFailedError.of(error, fix=fix) from error.__cause__
        return f"{host_of(address)} is {', '.join(dict.fromkeys(each.ip for each in self._endpoints))}"

    def connect(self) -> str:
        """Connect to the door or the proxy, by the first of its addresses that accepts.

        Raises:
            ConnectionFailedError: none does.
        """
        self.close()
        until = time.monotonic() + self.limit_s
        failure: OSError = TimeoutError()
        for endpoint in self._endpoints:
            made = socket.socket(endpoint.family, socket.SOCK_STREAM)
            made.settimeout(max(0.001, until - time.monotonic()))
            try:
                made.connect(endpoint.sockaddr)
            except OSError as error:
                made.close()
                failure = error
                continue
            self._socket = made
            return f"connected to {endpoint.ip} port {endpoint.sockaddr[1]!r}"
        late = isinstance(failure, TimeoutError)
        why = f"no answer within {self.limit_s:g} s" if late else failure.strerror or str(failure)
        raise ConnectionFailedError(
            "proxy" if self._proxy else "address",
            self._proxy.address if self._proxy else self.address,
            expected=f"a server that accepts a TCP connection ({why})",
            fix=self._unreachable(late),
        )

    def tunnel(self) -> str:
        """Ask the proxy, if there is one, for a connection to the door.

        Raises:
            ConnectionFailedError: it refuses, or is no HTTP proxy.
        """
        if self._proxy is None:
            return "not needed: no proxy"
        code, line = self._asked_for_tunnel(self._proxy)
        if code == 200:
            return f"{self._proxy.address} connects to {self.address}"
        fix = {
            407: "the proxy does not accept the name and password in HTTPS_PROXY: correct them"
            if self._proxy.credentials
            else "the proxy needs a name and password: HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT",
            403: f"ask the proxy's administrator to allow CONNECT to {self.address}",
            0: "HTTPS_PROXY names something that is not an HTTP proxy: correct it",
        }.get(code, f"if the proxy's administrator lets it through: {self._nothing_there()}")
        raise ConnectionFailedError(
            f"answer of the proxy {self._proxy.address}",
            line,
            expected=f"200 for CONNECT {self.address}",
            fix=fix,
        )

    def handshake(self) -> str:
        """Make the TLS connection, and check chain, dates and name of the server's certificate, and HTTP/2 (ALPN).

        Raises:
            ConnectionFailedError: the server speaks no TLS or HTTP/2, or has another certificate.
        """
        assert self._socket is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.entrance.root.decode("ascii"))
        context.set_alpn_protocols(["h2"])
        plain, self._socket = self._socket, None
        plain.settimeout(self.limit_s)
        try:
            self._socket = made = context.wrap_socket(plain, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise self._judged(error) from error
        except TimeoutError:
            raise self._no_tls(
                f"an answer in TLS within {self.limit_s:g} s, not silence",
                "a device between, or another program at that port, accepts connections and says nothing: ask the "
                "coordinator what listens there, and your network's administrator whether TLS passes",
            ) from None
        except ssl.SSLEOFError as error:
            raise self._closed() from error
        except ssl.SSLError as error:
            raise self._no_tls(
                f"TLS ({error.reason or one_line(error)})",
                "another program listens at that port, or a server without TLS: ask the coordinator what it is",
            ) from error
        except OSError as error:
            raise self._closed() from error
        if (agreed := made.selected_alpn_protocol()) != "h2":
            raise ConnectionFailedError(
                "ALPN",
                agreed or "",
                expected="h2, which gRPC needs",
                fix="a proxy in front of the server ends TLS: the coordinator must let TCP through to it as it is, for "
                f"{self.address}",
            )
        der = made.getpeercert(binary_form=True)
        assert der is not None
        until = x509.load_der_x509_certificate(der).not_valid_after_utc
        return f"{made.version()}, certificate of this federation's authority for {self.host}, until {until:%Y-%m-%d}"

    def _asked_for_tunnel(self, proxy: _Proxy) -> tuple[int, str]:
        """The status of the proxy's answer, 0 if it is none of HTTP, and its first line."""
        assert self._socket is not None
        asked = f"CONNECT {self.address} HTTP/1.1\r\nHost: {self.address}\r\n"
        if proxy.credentials:
            asked += f"Proxy-Authorization: Basic {base64.b64encode(proxy.credentials.encode()).decode()}\r\n"
        until = time.monotonic() + self.limit_s
        head = b""
        try:
            self._socket.sendall(f"{asked}\r\n".encode())
            while b"\r\n\r\n" not in head and len(head) < _HEAD:
                self._socket.settimeout(max(0.001, until - time.monotonic()))
                more = self._socket.recv(2**12)
                if not more:
                    break
                head += more
        except TimeoutError:
            return 0, f"nothing within {self.limit_s:g} s"
        except OSError as error:
            return 0, error.strerror or str(error)
        line = head.partition(b"\r\n")[0].decode("ascii", "replace")[:100]
        found = re.match(r"HTTP/1\.[01] ([0-9]{3})\b", line)
        return (int(found[1]) if found else 0), line or "nothing"

    def _judged(self, error: ssl.SSLCertVerificationError) -> ConnectionFailedError:
        """What is wrong with a certificate that could not be verified."""
        shown = self.shown_certificate()
        now = datetime.datetime.now(datetime.UTC)
        valid = f"one that is valid on {now:%Y-%m-%d %H:%M} UTC"
        match error.verify_code:
            case 10:  # X509_V_ERR_CERT_HAS_EXPIRED
                what, expected = f"expired on {shown.not_valid_after_utc:%Y-%m-%d %H:%M}", valid
                fix = "check this machine's clock; if it is right, the coordinator runs `cloister coordinator renew`"
            case 9:  # X509_V_ERR_CERT_NOT_YET_VALID
                what, expected = f"valid from {shown.not_valid_before_utc:%Y-%m-%d %H:%M}", valid
                fix = "set this machine's clock by NTP (timedatectl set-ntp true); else the coordinator's was wrong"
            case 62 | 64:  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
                what, expected = f"for {', '.join(_names(shown)) or 'no name'}", f"one for {self.host}"
                fix = (
                    f"the coordinator runs `cloister coordinator renew`, with --certificate-name {self.host}"
                )
            case _:
                digest = shown.fingerprint(SHA256()).hex()
                what = f"from {shown.issuer.rfc4514_string()}"
                expected = "one that this federation's authority has signed"
                fix = (
                    f"ask your network's administrator to let TLS to {self.address} through unopened; or it is another "
                    f"server: ask the coordinator for the SHA-256 of its certificate, here {digest}"
                )
        return ConnectionFailedError("certificate", what, expected=expected, fix=fix)

    def shown_certificate(self) -> x509.Certificate:
        """The certificate that the server shows, whoever it is of, in a connection of its own.

        Raises:
            ConnectionFailedError: it does not show one again.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        self.connect()
        self.tunnel()
        if self._socket is None:
            raise self._closed()
        self._socket.settimeout(self.limit_s)
        plain, self._socket = self._socket, None
        try:
            with context.wrap_socket(plain, server_hostname=self.host) as made:
                return read_certificate(made.getpeercert(binary_form=True) or b"", "the server's")
        except (OSError, CertificateError) as error:
            raise self._closed() from error

    def _unreachable(self, late: bool) -> str:
        """What to do where no TCP connection is made; `late`: there was no answer."""
        if self._proxy:
            return f"is {self._proxy.address} the proxy of your network, and does it run? correct HTTPS_PROXY"
        if late:
            return (
                f"a firewall drops it: ask your network's administrator to let TCP port {port_of(self.address)} out to "
                f"{self.host}, or set HTTPS_PROXY"
            )
        return self._nothing_there()

    def _nothing_there(self) -> str:
        return (
            "ask the coordinator whether `cloister coordinator start` runs, and whether its firewall lets TCP port "
            f"{port_of(self.address)} in"
        )

    def _no_tls(self, expected: str, fix: str) -> ConnectionFailedError:
        return ConnectionFailedError("server", self.address, expected=expected, fix=fix)

    def _closed(self) -> ConnectionFailedError:
        return self._no_tls(
            "a TLS handshake, but the connection was closed",
            "a firewall that looks into connections ends it, or another program listens there: ask your network's "
            f"administrator to let TLS to {self.address} through, and the coordinator what listens there",
        )


@dataclass(frozen=True)
class _Proxy:
    address: str
    credentials: str = field(repr=False)
    """`NAME:PASSWORD`; empty: none."""

    @classmethod
    def of(cls, url: str) -> _Proxy:
        """The proxy that a URL names.

        Raises:
            ConnectionFailedError: gRPC cannot use it.
        """
        parts = urlsplit(url)
        with contextlib.suppress(ValueError):  # of a port that is none
            if parts.scheme == "http" and parts.hostname and parts.port:
                host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
                words = [unquote(word) for word in (parts.username, parts.password) if word is not None]
                return cls(f"{host}:{parts.port}", ":".join(words))
        raise ConnectionFailedError(
            "HTTPS_PROXY",
            _shown(url),
            expected="http://HOST:PORT, the one kind of proxy that gRPC can use",
            fix="set HTTPS_PROXY, and https_proxy if it is set, to the HTTP proxy of your network",
        )


def _shown(url: str) -> str:
    """A proxy's URL without name and password."""
    head, _, rest = url.rpartition("@")
    return f"{head.partition('://')[0]}://{rest}" if head else url


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        return names_of(certificate)
    except x509.ExtensionNotFound:
        return []
