"""How a command talks to the coordinator's process on the same machine: one JSON request, then lines of JSON.

The process listens on a port of loopback that the system chooses, and writes the port and a secret into the
federation's folder, which its owner alone can read. Python's `multiprocessing.connection` proves on both sides that the
other one has the secret. Requests are bytes of JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from cloister.protocol.errors import CloisterError, EngineError
from cloister.protocol.machine.storage import own_files, write_bytes

Answer = Iterator[Mapping[str, Any]]
_FILE = "control.json"
_SECRET = 32
_MOST = 64
"""Commands that are answered at the same time."""
_LONGEST = 2**16
"""Bytes of the longest request."""
_REQUEST_S = 10.0
"""Seconds in which a connection must have proved that it has the secret, and have sent its request."""
_SILENCE_S = 60
"""Seconds after which either side gives the other up, when it neither sends nor takes a byte. An answer that lasts has
a line more often."""


class Control:
    """Listens for commands until it is closed.

    Args:
        folder: The federation's folder.
        answer: Returns the answer to a request, which may last; called in a thread for each command. A `CloisterError`
            is the answer too.
    """

    def __init__(self, folder: Path, answer: Callable[[Mapping[str, Any]], Answer]) -> None:
        self._path = folder / _FILE
        self._answer = answer
        self._free = threading.Semaphore(_MOST)
        self._closed = False
        self._key = os.urandom(_SECRET)
        self._listener = Listener(("127.0.0.1", 0), backlog=2 * _MOST)
        port = self._listener.address[1]
        with own_files():
            write_bytes(
                self._path, json.dumps({"port": port, "key": self._key.hex()}).encode(), durable=False
            )
        self._thread = threading.Thread(target=self._listen, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._path.unlink(missing_ok=True)
        self._closed = True
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            self._free.acquire()
            threading.Thread(target=self._serve, args=(connection,), name="command", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            with connection, suppress(OSError, EOFError, AuthenticationError):  # the command has ended
                _give_up_after_silence(connection)
                # Not in the thread that accepts: a connection that says nothing would keep others out.
                with _cut_after(connection, _REQUEST_S):
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    request = connection.recv_bytes(_LONGEST)
                try:
                    for line in self._answer(json.loads(request)):
                        connection.send_bytes(json.dumps(line).encode())
                except (CloisterError, ValueError) as error:
                    connection.send_bytes(json.dumps({"refused": str(error)}).encode())
        finally:
            self._free.release()


def command(folder: Path, **request: Any) -> Answer:
    """Send a request to the coordinator's process, and yield its answer as it comes.

    Args:
        folder: The federation's folder.
        request: The request.

    Raises:
        EngineError: no coordinator runs there, it refuses, it has ended, or it has sent nothing for a minute.
    """
    try:
        found = json.loads((folder / _FILE).read_bytes())
        connection = _connected(int(found["port"]), bytes.fromhex(found["key"]))
    except (OSError, EOFError, ValueError, KeyError, AuthenticationError) as error:
        start = f"start it: cloister coordinator start {shlex.quote(str(folder))}"
        expected = "the folder of a federation whose coordinator runs on this machine"
        raise _lost(folder, error, expected, start) from error
    with connection:
        answered = False
        try:
            connection.send_bytes(json.dumps(request).encode())
            while True:
                try:
                    line = json.loads(connection.recv_bytes())
                except EOFError:
                    if answered:
                        return
                    raise
                if "refused" in line:
                    raise _relayed(str(line["refused"]))
                answered = True
                yield line
        except (OSError, EOFError) as error:
            see = f"see whether it runs: cloister status {shlex.quote(str(folder))}"
            raise _lost(folder, error, "one that goes on running", see) from error


def _connected(port: int, key: bytes) -> Connection:
    """A connection to a process on this machine, when both sides have proved that they have the key."""
    with socket.create_connection(("127.0.0.1", port), _SILENCE_S) as opened:
        opened.setblocking(True)  # the limits below are the system's, not Python's
        connection = Connection(opened.detach())
    try:
        _give_up_after_silence(connection)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        connection.close()
        raise
    return connection


def _give_up_after_silence(connection: Connection) -> None:
    """Let the reads and writes of a connection fail with OSError when nothing moves for `_SILENCE_S`."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _SILENCE_S, 0))


@contextmanager
def _cut_after(connection: Connection, seconds: float) -> Iterator[None]:
    """A context that cuts the connection if it lasts longer, however slowly bytes come."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:

        def cut() -> None:
            with suppress(OSError):
                same.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _lost(folder: Path, error: Exception, expected: str, fix: str) -> EngineError:
    if isinstance(error, BlockingIOError):
        expected = f"one that answers within {_SILENCE_S} s"
    return EngineError("coordinator", str(folder), expected=expected, fix=fix)


def _relayed(line: str) -> EngineError:
    """The error whose line the coordinator's process has sent."""
    error = EngineError("command", expected="one that the coordinator accepts")
    error.args = (line,)
    return error
