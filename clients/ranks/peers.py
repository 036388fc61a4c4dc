"""Who is at the far end of the ranks' connections: a rank of the same site, or nobody may start.

Gloo, which carries tensors between ranks, listens on the loopback interface and knows a peer by a small number that the
peer sends. Another user of the machine can connect first and take a rank's place. So before the first collective the
site's process compares the connections of all ranks: each has two ends, and both must be in ranks of this site. An end
that another process has is in no rank, because the kernel gives a pair of addresses to one connection at a time. It
does not matter what that process has sent, or whose it is.

A connection that is made later reaches no collective: a listener of gloo hands a connection only to a peer for which it
still waits, once, and when the ranks are compared, every rank has every peer of every process group. No group is made
after that (`tests/parties/ranks/ranks.py` checks it on each mesh).

Refused: to ask only that the far end belongs to the same user, which lets every other program of that user in. A
network namespace for the ranks needs privileges; gloo's TLS is not in torch's wheel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cloister.protocol.errors import RankError

Address = tuple[str, int]
"""Host and port."""
_ESTABLISHED = "01"  # as the kernel writes it


class Connection(NamedTuple):
    """An established TCP connection, as the process at one end sees it."""

    here: Address
    there: Address


def connections() -> list[Connection]:
    """The TCP connections of this process, those among them that gloo has accepted and not used."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, a closed one, or one without a peer
            borrowed = socket.socket(fileno=int(name))
            try:
                if borrowed.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(Connection(borrowed.getsockname()[:2], borrowed.getpeername()[:2]))
            finally:
                borrowed.detach()
    return found


def check(ranks: Sequence[str], found: Sequence[Sequence[Connection]]) -> None:
    """Check that ranks are connected with each other and with nobody else.

    Args:
        ranks: Their names.
        found: The connections of each, when all of its process groups are connected.

    Raises:
        RankError: a rank is connected with another process, or not with each of its peers.
    """
    rank_at = {each: rank for rank, its in enumerate(found) for each in its}
    for rank, its in enumerate(found):
        peers = {rank}
        for each in its:
            peer = rank_at.get(Connection(each.there, each.here))
            if peer is None:
                raise RankError(
                    ranks[rank],
                    expected="connections with ranks of this site only, but at the far end of one, "
                    f"{each.there[0]}:{each.there[1]}, is {_owner(each)}",
                    fix="this start sent nothing; end that user's process if it does so again",
                )
            peers.add(peer)
        for peer in set(range(len(ranks))) - peers:
            raise RankError(ranks[rank], expected=f"a connection with {ranks[peer]}")


def _owner(connection: Connection) -> str:
    """Who has the far end of a connection, for a person: the kernel's table, in which ports are hexadecimal."""
    ends = (f":{connection.there[1]:04X}", f":{connection.here[1]:04X}")
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for row in map(str.split, Path("/proc/net", name).read_text().splitlines()[1:]):
                if (row[1][-5:], row[2][-5:], row[3]) == (*ends, _ESTABLISHED):
                    return f"a process of user {row[7]}"
    return "a process that has closed it"
