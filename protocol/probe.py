"""A check of the way between a site and its coordinator: what a site signs on it, and what is judged.

The coordinator serves a probe (`server/probe.py`) on the address of the exchange, while no run does; a site asks it
(`clients/probe.py`). The server has the certificate that the federation's authority issued. The site signs the
fingerprint of that, so a signature is not valid at another server, and not in a session of a run
(`invitation.py`), which has another label.
"""

from __future__ import annotations

from cloister.protocol.encoding import pack

METHOD = "/cloister.Probe/Ask"
LARGEST_SKEW_S = 60.0
"""Seconds by which the clocks of two parties may differ."""


def signed(fingerprint: bytes) -> bytes:
    """What a site signs with its identity key.

    Args:
        fingerprint: SHA-256 of the server's certificate, 32 bytes.
    """
    return pack("cloister/probe/2", fingerprint)
