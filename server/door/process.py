"""What a process that opens the door sets before it imports gRPC."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping

ENVIRONMENT: Mapping[str, str] = {
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-RSA-AES128-GCM-SHA256",
    "GRPC_VERBOSITY": "NONE",
}
"""With it the server refuses TLS 1.2, and a peer that is refused does not fill the log with lines of gRPC's own.

gRPC for Python has no setting for the version. It negotiates 1.3 where the peer can. The variable leaves one cipher
suite of TLS 1.2, which needs an RSA key, and the certificate's is ECDSA; the suites of 1.3 do not depend on it."""
_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
_ARENAS = 2


def prepare() -> None:
    """Set the environment, keep less memory for sites that have come and gone, and allow as many files as there may be.

    glibc otherwise keeps what each of gRPC's threads has freed in an arena of its own. Each connection is an open file.
    """
    os.environ.update(ENVIRONMENT)
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
    allow_files()


def allow_files() -> None:
    """Raise the limit of open files as far as this process may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
