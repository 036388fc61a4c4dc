"""A process of a console script, such as a site in a rehearsal, that this process starts and keeps running.

`Child` starts it, starts it again when it ends, and ends it. A child also ends when its parent is killed: it runs in
`python -m cloister.protocol.machine.child`, whose standard input is a pipe that only the parent holds open.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO

from cloister.protocol.errors import EngineError, StorageError
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.fork_server import ending

_FIRST_S, _LONGEST_S = 1.0, 60.0
"""The first and the longest wait before a child that has ended is started again."""
_STEADY_S = 60.0
"""A child that has run so long begins with the first wait again."""
END_S = 10
"""Seconds for which a child may end by itself after SIGTERM, and its interpreter shut down at the end."""


class Child(Closing):
    """A console script of this environment, as a process that is kept running; a context manager.

    Args:
        name: The script, such as `cloister`.
        arguments: Its arguments.
        log: File to which its output is appended; its owner alone can read it.
        environment: Variables besides those of this process.
        ended: Called in a thread of this class with one line each time it has ended and will be started again.

    Raises:
        EngineError: the script is not installed.
        StorageError: the log cannot be written.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        ended: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._name = name
        self._arguments = tuple(arguments)
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._ended = ended
        self._stopped = threading.Event()
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)
        self._output = append_to(log)
        try:
            self._start()
        except BaseException:
            self._output.close()
            raise
        self._thread.start()

    def close(self) -> None:
        """End it, and do not start it again; idempotent."""
        with self._guard:
            self._stopped.set()
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join()
        self._output.close()

    def _start(self) -> None:
        with self._guard:
            if self._stopped.is_set():
                return
            self._process = spawn(
                self._name, self._arguments, self._environment, output=self._output, log=self._output
            )

    def _keep(self) -> None:
        wait = _FIRST_S
        while True:
            process = self._process
            assert process is not None, "it was started before this thread"
            started = time.monotonic()
            status = process.wait()
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            if self._stopped.is_set():
                return
            wait = _FIRST_S if time.monotonic() - started >= _STEADY_S else wait
            self._ended(f"{self._name} {ending(status)}; it starts again in {wait:g} s; its log: {self._log}")
            if self._stopped.wait(wait):
                return
            wait = min(2 * wait, _LONGEST_S)
            self._start()


def spawn(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[bytes] | int,
    log: IO[bytes],
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a console script of this environment, which ends when the pipe to its standard input is closed.

    Args:
        name: The script.
        arguments: Its arguments.
        environment: All of its variables.
        output: File for its standard output, or `subprocess.PIPE`.
        log: File for its standard error.
        inherited: File descriptors that it has too, under the same numbers.

    Raises:
        EngineError: the script is not installed.
    """
    if not _scripts(name):
        raise EngineError(name, expected="it installed in this environment")
    return subprocess.Popen(
        [sys.executable, "-m", "cloister.protocol.machine.child", name, *arguments],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=log,
        env=environment,
        pass_fds=inherited,
        start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends it in order
    )


def append_to(path: Path) -> IO[bytes]:
    """Open a log to append to it; only its owner can read it.

    Raises:
        StorageError: the disk refuses.
    """
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    except OSError as error:
        raise StorageError(str(path), expected=f"a log that can be written ({error.strerror})") from error


def _scripts(name: str) -> list[Callable[[], object]]:
    return [found.load for found in entry_points(group="console_scripts", name=name)]


def _end_with_parent() -> None:
    """Wait until the parent's end of the pipe is closed, which the system does however it ends."""
    while os.read(0, 1):
        pass
    signal.alarm(END_S)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the console script that the first argument names, with the others."""
    # When an interpreter shuts down, its daemon threads have stopped, and gRPC may wait for a lock that one of them
    # holds. No thread could end the process then; the system ends it by SIGALRM.
    atexit.register(lambda: signal.alarm(END_S))
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    sys.argv = sys.argv[1:]
    (load,) = _scripts(sys.argv[0])
    script = load()
    assert callable(script), "a console script is a function"
    sys.exit(script())


if __name__ == "__main__":
    main()
