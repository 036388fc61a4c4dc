"""Waiting for a file descriptor of any number: `select.select` takes none above 1023, and a long suite has some."""

from __future__ import annotations

import select


def readable(descriptor: int, within_s: float) -> bool:
    """Whether a file, socket, pipe or process (`os.pidfd_open`: it has ended) can be read in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
