"""Addresses of servers, and the names in their certificates."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Annotated

from pydantic import AfterValidator

from cloister.protocol.errors import RosterError

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
            "address", address, expected="HOST:PORT, such as fl.example.org:9092 or [2001:db8::1]:9092"
        ) from None


def free_port() -> int:
    """A TCP port of loopback that is free now, for a server that cannot choose one itself."""
    with socket.create_server((LOOPBACK, 0)) as bound:
        port: int = bound.getsockname()[1]
    return port


def _address(text: str) -> str:
    try:
        host_of(text)
    except RosterError as error:
        raise ValueError(error.expected) from None
    return text


def _host(text: str) -> str:
    try:
        return check_host(text)
    except RosterError as error:
        raise ValueError(error.expected) from None


Address = Annotated[str, AfterValidator(_address)]
"""HOST:PORT in settings."""
Host = Annotated[str, AfterValidator(_host)]
"""A DNS name or an IP address in settings."""
