"""The fork server: the process from which workers are forked, so that a worker starts in milliseconds.

Its imports take as long as those of the coordinator. The command line starts it before its own, so that both import at
the same time; a pool of workers starts it if it does not run.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from types import ModuleType

from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.plan import Plan
from cloister.simulations.process import environment


def start(plan: Plan) -> None:
    """Start the fork server for the sites of a plan and do not wait for its imports; none is started if one runs.

    Raises:
        EngineError: it cannot be started.
    """
    with running(modules(plan), variables(plan)):
        pass


def modules(plan: Plan) -> list[str]:
    """The modules that a worker of a plan's sites needs and that take long to import."""
    adapted = ["peft"] if plan.model.adapter.scheme != "full" else []
    loading = ["transformers.modeling_utils", "transformers.modeling_layers"]  # by `lm.model.load_model`
    return ["cloister.simulations.federation", *loading, *adapted]


def variables(plan: Plan) -> dict[str, str]:
    """The environment variables of all workers of a plan's sites; libraries read them when they are imported."""
    threads = str(plan.local.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def running(
    preload: Sequence[str], variables: Mapping[str, str], *, needs_main: bool = False
) -> Iterator[None]:
    """A context in which the fork server runs, and in which new processes get these variables.

    Args:
        preload: Modules that it imports, if it is started here.
        variables: Environment variables.
        needs_main: Whether new processes import the `__main__` of this one.

    Raises:
        EngineError: it cannot be started, or what is done in the context says that it does not answer.
    """
    get_context("forkserver").set_forkserver_preload(list(preload))
    try:
        with environment(variables), _main_module(needed=needs_main):
            with _interrupts_held():
                forkserver.ensure_running()
            yield
    except (EOFError, OSError) as error:
        raise EngineError(
            "worker process",
            expected=f"one that starts, but its fork server does not answer ({one_line(error)})",
            fix=f"import {', '.join(preload)} in a fresh interpreter to see why",
        ) from error


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT: the process that starts meanwhile inherits the mask, and a Ctrl-C here is delivered afterwards.

    The fork server ignores SIGINT itself, but only after it has imported its preloads.
    """
    resource_tracker.ensure_running()  # its start unblocks SIGINT, so it must run before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_module(*, needed: bool) -> Iterator[None]:
    """Keep new processes from importing the coordinator's `__main__`, a command line, if the app does not need it."""
    main = sys.modules["__main__"]
    if not needed:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@atexit.register
def _end() -> None:
    """End the fork server with the process that started it, and remove its socket if that process was killed.

    At exit Python waits for the fork server, which does not end before its imports have: seconds after a Ctrl-C. In
    the fork server itself, the address is known and the process id is not.
    """
    state = vars(forkserver._forkserver)  # Python has no public name for either
    address, process = state.get("_forkserver_address"), state.get("_forkserver_pid")
    if process is not None:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    elif address is not None:
        with suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))
