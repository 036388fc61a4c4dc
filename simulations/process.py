"""State of a process: environment variables and Flower node, which both engines set, and its peak memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def identify(run_id: int, node_id: int) -> None:
    """Set the run and the node that this process's messages come from.

    Flower's `Message` reads both from a process global, and has no argument for them. Flower's own runtimes set it in
    the same way.
    """
    from flwr.supercore.task_identity import TaskIdentity  # Flower takes half a second to import

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 1


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process and restore their previous values at exit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def peak_rss(pid: int | None = None) -> int | None:
    """Largest resident set that a process has had, in bytes: the kernel's VmHWM; None if it is not known.

    Not `getrusage`: its ru_maxrss may be that of the program that started this one, and for workers, which are children
    of the fork server, it is zero.

    Args:
        pid: The process; None for this one.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system, or the process has ended
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
