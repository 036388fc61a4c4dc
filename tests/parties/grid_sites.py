"""The sites that the tests of LocalGrid run in worker processes, and how a test talks to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.protocol.errors import DataError
from cloister.simulations.engines.grid import LocalGrid
from cloister.tests.tools.descriptors import readable

VECTOR = np.arange(1_000_000, dtype=np.float32)


Open = Callable[..., LocalGrid]


def make_app(folder: Path) -> ClientApp:
    """The sites of these tests; they write to the socket, and read from the pipes, in `folder`."""
    app = ClientApp()

    def answer(message: Message, **values: Any) -> Message:
        return Message(RecordDict({"out": ConfigRecord(values)}), reply_to=message)

    def tell(message: Message) -> None:
        """Send the site and the process id to the test, which waits for them."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
            events.sendto(f"{message.metadata.dst_node_id} {os.getpid()}".encode(), str(folder / "events"))

    @app.query("who")
    def who(message: Message, context: Context) -> Message:
        seen = cast(ConfigRecord, context.state.setdefault("seen", ConfigRecord({"count": 0})))
        seen["count"] = cast(int, seen["count"]) + 1
        return answer(
            message,
            node=context.node_id,
            partition=context.node_config["partition-id"],
            count=seen["count"],
            pid=os.getpid(),
            device=os.environ.get("TEST_DEVICE", ""),
            files=len(os.listdir("/dev/fd")),
        )

    @app.query("segment")
    def segment(message: Message, context: Context) -> Message:
        data = cast(ArrayRecord, message.content["model"])["vector"].data
        assert isinstance(data, memoryview)
        assert data.readonly
        (line,) = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "cloister-vector" in line
        ]
        return answer(
            message, inode=line.split()[4], total=float(np.frombuffer(data, np.float32).sum(dtype=np.float64))
        )

    @app.query("double")
    def double(message: Message, context: Context) -> Message:
        record = ArrayRecord()
        for name, array in cast(ArrayRecord, message.content["model"]).items():
            record[name] = raw(np.frombuffer(array.data, np.float32) * context.node_id)
        return Message(RecordDict({"model": record}), reply_to=message)

    @app.query("hang")
    def hang(message: Message, context: Context) -> Message:
        tell(message)
        threading.Event().wait()
        raise AssertionError

    @app.query("meet")
    def meet(message: Message, context: Context) -> Message:
        tell(message)
        (folder / f"gate{context.node_id}").read_bytes()  # until the test opens the other end
        return who(message, context)

    @app.query("hang_some")
    def hang_some(message: Message, context: Context) -> Message:
        return hang(message, context) if context.node_id % 2 else answer(message, node=context.node_id)

    @app.query("family")
    def family(message: Message, context: Context) -> Message:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (folder / "child").write_text(str(child.pid))
        return hang(message, context)

    @app.query("exit")
    def leave(message: Message, context: Context) -> Message:
        os._exit(7)

    @app.query("fail")
    def fail(message: Message, context: Context) -> Message:
        if context.node_id == 1:
            raise ValueError("two\n  lines")
        raise DataError("site.data", "nowhere", expected="a file")

    @app.query("nothing")
    def nothing(message: Message, context: Context) -> Message:
        return cast(Message, None)

    return app


def make_no_app(error: Exception) -> ClientApp:
    raise error


def make_dying_app() -> ClientApp:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def raw(vector: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    array = Array("float32", vector.shape, "raw", b"")
    array.data = vector.data.cast("B")  # type: ignore[assignment]  # Flower says bytes, and takes any buffer
    return array


def model(vector: np.ndarray[Any, np.dtype[np.float32]] = VECTOR) -> RecordDict:
    record = ArrayRecord()
    record["vector"] = raw(vector)
    return RecordDict({"model": record})


class Events:
    """A socket to which sites report that they have begun; a test waits for it instead of sleeping."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(60)
        self._socket.bind(str(folder / "events"))

    def next(self) -> tuple[int, int]:
        """Site and process id of the next site that has begun."""
        node, pid = self._socket.recv(100).decode().split()
        return int(node), int(pid)

    def empty(self) -> bool:
        """Whether every site that has begun was returned by `next`."""
        return not readable(self._socket.fileno(), 0)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def opener(folder: Path) -> Iterator[Open]:
    """A function that opens grids, by default for `make_app(folder)`; they are closed at exit."""
    grids: list[LocalGrid] = []

    def open_grid(
        sites: int, workers: int = 2, make: Callable[[], ClientApp] | None = None, **options: Any
    ) -> LocalGrid:
        configs = [{"partition-id": number} for number in range(sites)]
        environments = [{"TEST_DEVICE": str(number), "OMP_NUM_THREADS": "1"} for number in range(workers)]
        options.setdefault("log", folder / "log")
        grids.append(LocalGrid(make or partial(make_app, folder), configs, workers=environments, **options))
        return grids[-1]

    yield open_grid
    for grid in grids:
        grid.close()


def ask(grid: LocalGrid, action: str, content: RecordDict | None = None, **options: Any) -> list[Message]:
    """One message of the same content to every site."""
    timeout = options.pop("timeout", None)
    shared = RecordDict() if content is None else content
    messages = [Message(shared, node, f"query.{action}", **options) for node in grid.get_node_ids()]
    return list(grid.send_and_receive(messages, timeout=timeout))


def said(reply: Message) -> dict[str, Any]:
    return dict(cast(ConfigRecord, reply.content["out"]))


def warm(grid: LocalGrid) -> None:
    """Wait until both workers work."""
    devices: set[str] = set()
    while len(devices) < 2:
        devices |= {said(reply)["device"] for reply in ask(grid, "who")}


def ended(pid: int) -> bool:
    """Wait until a process that is not our child is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return readable(fd, 30)
    finally:
        os.close(fd)
