"""The HTTP proxy through which a site reaches the coordinator, as the environment names it."""

from __future__ import annotations

import urllib.request


def proxy_for(host: str) -> str | None:
    """The proxy for a host by HTTPS_PROXY and NO_PROXY, in capitals or not; None: it is reached directly."""
    if urllib.request.proxy_bypass(host):
        return None
    proxy = urllib.request.getproxies().get("https")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None
