"""State of a process that both engines set: its environment variables, and the Flower node that it acts for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


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
