"""How a command talks to the coordinator's process on the same machine: one JSON request, then lines of JSON.

The process listens on a port of loopback that the system chooses, and writes the port and a secret into the
federation's folder, which its owner alone can read. Python's `multiprocessing.connection` proves on both sides that the
other one has the secret. Requests are bytes of JSON: nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from cloister.protocol.errors import CloisterError, EngineError
from cloister.protocol.storage import write_bytes

_log = logging.getLogger(__name__)

Answer = Iterator[Mapping[str, Any]]
_FILE = "control.json"
_SECRET = 32
_MOST = 64
"""Commands that are answered at the same time."""
_LONGEST = 2**16
"""Bytes of the longest request."""


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
        self._listener = Listener(("127.0.0.1", 0))
        port = self._listener.address[1]
        write_bytes(self._path, json.dumps({"port": port, "key": self._key.hex()}).encode(), durable=False)
        self._path.chmod(0o600)
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
                # Not in the thread that accepts: a connection that says nothing would keep others out.
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                try:
                    for line in self._answer(json.loads(connection.recv_bytes(_LONGEST))):
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
        EngineError: no coordinator runs there, it refuses, or it has ended.
    """
    try:
        found = json.loads((folder / _FILE).read_bytes())
        connection = Client(("127.0.0.1", int(found["port"])), authkey=bytes.fromhex(found["key"]))
    except (OSError, EOFError, ValueError, KeyError, AuthenticationError) as error:
        raise EngineError(
            "coordinator",
            str(folder),
            expected="the folder of a federation whose coordinator runs on this machine",
            fix=f"start it: cloister coordinator start {folder}",
        ) from error
    with connection:
        connection.send_bytes(json.dumps(request).encode())
        while True:
            try:
                line = json.loads(connection.recv_bytes())
            except EOFError:
                return
            except OSError as error:
                raise EngineError("coordinator", str(folder), expected="one that goes on running") from error
            if "refused" in line:
                raise _relayed(str(line["refused"]))
            yield line


def _relayed(line: str) -> EngineError:
    """The error whose line the coordinator's process has sent."""
    error = EngineError("command", expected="one that the coordinator accepts")
    error.args = (line,)
    return error
