"""Processes from Python's fork server: how the server starts, and how a process that it forks begins and ends.

The fork server imports modules once; a process that it forks has them in milliseconds. Workers of a simulation and the
ranks of a site are such processes. The system's parent of one is the fork server; here its parent is the process that
asked for it, and it ends with that one.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from multiprocessing import connection, forkserver, get_context, parent_process, resource_tracker
from multiprocessing.context import ForkServerProcess
from socket import socket, socketpair
from types import ModuleType

from cloister.protocol.errors import EngineError, one_line

_server = forkserver._forkserver  # Python has no public name for the state that is read below


@contextmanager
def running(preload: Sequence[str], *, needs_main: bool = False) -> Iterator[None]:
    """A context in which the fork server runs.

    A process that was itself forked takes new processes from the server that it comes from, while that one runs: it
    has the imports, and a new one would take seconds and memory for them again.

    Args:
        preload: Modules that it imports, if it is started here.
        needs_main: Whether new processes import the `__main__` of this one.

    Raises:
        EngineError: it cannot be started, or what is done in the context says that it does not answer.
    """
    get_context("forkserver").set_forkserver_preload(list(preload))
    try:
        with _main_module(needed=needs_main):
            if _inherited():
                with _none_started():
                    yield
            else:
                with _interrupts_held():
                    forkserver.ensure_running()
                yield
    except (EOFError, OSError) as error:
        raise EngineError(
            "worker process",
            expected=f"one that starts, but its fork server does not answer ({one_line(error)})",
            fix=f"import {', '.join(preload)} in a fresh interpreter to see why",
        ) from error


def begin() -> None:
    """Begin a process that the fork server has forked.

    It leads a process group, so that what it starts can be ended with it. It ignores Ctrl-C, which its parent handles.
    When its parent ends in any way, its group is killed.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def start(target: Callable[..., None], *arguments: object, name: str) -> tuple[ForkServerProcess, socket]:
    """Start a process in the context of `running`.

    Args:
        target: Its main function; its first argument is the process's end of a pair of sockets.
        arguments: The other arguments, picklable.
        name: The name of the process, after that of the project.

    Returns:
        The process, and the other end.
    """
    ours, theirs = socketpair()
    with theirs:
        process = get_context("forkserver").Process(
            target=target, args=(theirs, *arguments), name=f"cloister {name}"
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
    return process, ours


def redirect(*output: int) -> None:
    """Let standard output and standard error of this process go to two open files."""
    for stream, number, fd in zip((sys.stdout, sys.stderr), (1, 2), output, strict=True):
        stream.flush()
        os.dup2(fd, number)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def kill(process: ForkServerProcess) -> None:
    """Kill a process that `start` has started, and every process that it has started; does not wait for their end."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it did not lead a group yet, or the group is empty
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def end(process: ForkServerProcess, patience: float = 0.0) -> str:
    """End a process that `start` has started, and every process that it has started.

    Args:
        process: The process.
        patience: Seconds that it has to exit by itself before it is killed.

    Returns:
        How it ended, such as "exited with status 7".
    """
    process.join(patience)
    code = process.exitcode
    kill(process)
    process.join()
    process.close()
    return ending(-signal.SIGKILL if code is None else code)


def ending(status: int) -> str:
    """How a process with an exit status of `multiprocessing` ended, such as "was killed by SIGKILL"."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)  # includes this process, even if it is busy


def _inherited() -> bool:
    """Whether the fork server that this process comes from runs, and forks for this process."""
    state = vars(_server)
    alive = state["_forkserver_alive_fd"]
    if alive is None or state["_forkserver_pid"] is not None:
        return False  # there is none, or it was started here
    if state.get("_forkserver_authkey", b"not in this Python") is None:
        return False  # since Python 3.14 it forks only for the process that started it
    poll = select.poll()
    poll.register(alive, 0)
    return not poll.poll(0)  # a pipe that only the server reads: an error is reported if it has ended


@contextmanager
def _none_started() -> Iterator[None]:
    """Keep Python from starting another fork server: it recognises its own by a process id that is not known here."""
    vars(_server)["ensure_running"] = lambda: None
    try:
        yield
    finally:
        del vars(_server)["ensure_running"]


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
    """Keep new processes from importing this one's `__main__`, such as a command line, if they do not need it."""
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
    address, process = vars(_server).get("_forkserver_address"), vars(_server).get("_forkserver_pid")
    if process is not None:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    elif address is not None:
        with suppress(OSError):
            os.unlink(address)
            os.rmdir(os.path.dirname(address))
