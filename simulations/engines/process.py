"""State of a process: environment variables and Flower node, which both engines set, its memory and its collector."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


def return_freed_memory() -> None:
    """Let glibc return to the system what this process has freed; no effect with another C library.

    It keeps freed arrays of up to 32 MB for later ones: after its first site, a worker keeps as much as gradients and
    moments took. To return each array at once (M_MMAP_THRESHOLD) was tried and refused: a step of training, which
    allocates the same arrays again and again, took 1.5 times as long.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def collect_rarely() -> None:
    """Let Python search for garbage in cycles more rarely, and not among the objects that this process has by now.

    Messages of thousands of small objects start the collector again and again, and there is next to nothing for it to
    find: a federation's vectors are freed by reference counts. It took 8 % of a round of 200 sites. What a worker has
    been forked with also stays shared with the other workers, because nothing writes to it.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@contextmanager
def as_before() -> Iterator[None]:
    """Collect rarely until exit, and then let this process be as it was: its collector, and the threads of torch."""
    import torch

    threads, thresholds, frozen = torch.get_num_threads(), gc.get_threshold(), gc.get_freeze_count()
    collect_rarely()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()


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
