"""The HTTP proxy through which a site reaches the coordinator, as the environment names it."""

from __future__ import annotations

import ipaddress
import os
import urllib.request

from cloister.protocol.machine.flower import use_proxy

_OF_GRPC = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPT_GRPC = ("no_grpc_proxy", "no_proxy")


def proxy_for(host: str) -> str | None:
    """The proxy for a host by HTTPS_PROXY and NO_PROXY, in capitals or not; None: it is reached directly."""
    if urllib.request.proxy_bypass(host):
        return None
    return _with_scheme(urllib.request.getproxies().get("https"))


def proxy_of_supernode(host: str) -> str | None:
    """The proxy by which Flower's SuperNode connects to a host; None: it is reached directly.

    `cloister site start` makes the environment of the SuperNode by `use_proxy`. gRPC reads from it `grpc_proxy`,
    `https_proxy` or `http_proxy`, the first that is set, and `no_grpc_proxy` or `no_proxy`
    (`src/core/handshaker/http_connect/http_proxy_mapper.cc`).
    """
    environment = dict(os.environ)
    use_proxy(environment)
    spared = next((value for name in _EXCEPT_GRPC if (value := environment.get(name))), "")
    if any(_covers(entry.strip(), host) for entry in spared.split(",") if entry.strip()):
        return None
    return _with_scheme(next((value for name in _OF_GRPC if (value := environment.get(name))), None))


def _covers(entry: str, host: str) -> bool:
    """Whether an entry of `no_proxy` is a host, a domain that it is in, or a range with its IP address."""
    domain = entry.removeprefix(".").lower()
    if host.lower() == domain or host.lower().endswith(f".{domain}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _with_scheme(proxy: str | None) -> str | None:
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None
