"""Addresses of servers, and the names in their certificates."""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import random
import re
import socket
import threading
from collections.abc import Callable
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from cloister.protocol.errors import ConnectionFailedError, EngineError, RosterError

LOOPBACK = "127.0.0.1"
"""Where processes of one machine reach each other."""

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DNS = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_ADDRESS = re.compile(r"(\[(?P<six>[^\]]*)\]|(?P<name>[^:\[\]]*)):(?P<port>[1-9][0-9]{0,4})")


def check_host(name: str) -> str:
    """A DNS name or an IP address, as it is.

    Raises:
        RosterError: it is neither.
    """
    numeric = ":" in name or re.fullmatch(r"[0-9.]*", name)
    try:
        right = bool(ipaddress.ip_address(name)) if numeric else bool(_DNS.fullmatch(name))
    except ValueError:
        right = False
    if not right:
        raise RosterError("name", name, expected="a DNS name such as fl.example.org, or an IP address")
    return name


def host_of(address: str) -> str:
    """The host of an address HOST:PORT; an IPv6 address stands in brackets there.

    Raises:
        RosterError: it is no such address.
    """
    found = _ADDRESS.fullmatch(address)
    try:
        if found is None or int(found["port"]) > 65535:
            raise RosterError("port", expected="1 to 65535")
        return check_host(found["six"] or found["name"])
    except RosterError:
        raise RosterError(
            "address", address, expected="HOST:PORT, such as fl.example.org:9443 or [2001:db8::1]:9443"
        ) from None


def port_of(address: str) -> int:
    """The port of an address that `host_of` accepts."""
    return int(address.rpartition(":")[2])


def everywhere(address: str) -> str:
    """Where a server listens that sites reach at an address: at its port, at all addresses of the machine."""
    return f"[::]:{port_of(address)}"


class Endpoint(NamedTuple):
    """An IP address and a port, as `socket` takes them."""

    family: int
    """Of the address: IPv4 or IPv6."""
    sockaddr: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
    """For `socket.connect`."""

    @property
    def ip(self) -> str:
        """The IP address."""
        return str(self.sockaddr[0])


def resolve(host: str, port: int, limit_s: float) -> list[Endpoint]:
    """The IP addresses of a host, each once.

    Args:
        host: A DNS name or an IP address.
        port: The port.
        limit_s: Seconds after which a resolver that does not answer is given up; its thread ends when it answers.

    Raises:
        ConnectionFailedError: the name does not resolve.
    """
    answers: queue.SimpleQueue[list[Endpoint] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(Endpoint(each[0], each[4]) for each in found)))
        except (OSError, UnicodeError) as error:
            answers.put(error if isinstance(error, OSError) else OSError(0, str(error)))

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        answer = OSError(0, f"no answer of the resolver within {limit_s:g} s")
    if isinstance(answer, OSError):
        why = answer.strerror or str(answer)
        raise ConnectionFailedError("host", host, expected=f"a name that DNS resolves ({why})") from answer
    return answer


def free_port() -> int:
    """A TCP port of loopback that is free now, for a server that cannot choose one itself.

    It is below the ports that systems take for outgoing connections: a client that tries again and again to reach one
    of those, while nothing listens there, can connect to itself, and then the port is taken.

    Raises:
        EngineError: none was found.
    """
    for port in random.sample(range(10_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
    raise EngineError("port", LOOPBACK, expected="a free one from 10000 to 32000")


def _checked(check: Callable[[str], str]) -> AfterValidator:
    """A validator of a field, of a check that raises a `RosterError`."""

    def validate(text: str) -> str:
        try:
            check(text)
        except RosterError as error:
            raise ValueError(error.expected) from None
        return text

    return AfterValidator(validate)


Address = Annotated[str, _checked(host_of)]
"""HOST:PORT in settings."""
Host = Annotated[str, _checked(check_host)]
"""A DNS name or an IP address in settings."""
