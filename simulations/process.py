"""State of a process that both engines set: environment variables, memory, and the Flower node that it acts for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from flwr.supercore.task_identity import TaskIdentity

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def identify(run_id: int, node_id: int) -> None:
    """Set the run and the node that this process's messages come from.

    Flower's `Message` reads both from a process global, and has no argument for them. Flower's own runtimes set it in
    the same way.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 1


def return_freed_memory() -> None:
    """Let glibc return arrays of 1 MB or more to the system as soon as they are freed.

    By default it raises that size, to at most 32 MB, whenever it frees a larger array. Then a process keeps as much as
    its first model, gradients and moments took. Has no effect with another C library.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


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
