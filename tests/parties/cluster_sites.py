"""Sites of the tests on a Ray cluster.

Ray's workers import this module, so it imports nothing that they do not need: torch would cost each of them seconds.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.protocol.errors import DataError

PATIENCE_S = 150  # Ray gives a process that starts on a busy machine 60 s, and then tries another


def await_(condition: Callable[[], Any]) -> Any:
    """The first true value of a condition on other processes, which offer no event."""
    last = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < last
        threading.Event().wait(0.02)
    return value


def raw(vector: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    array = Array("float32", vector.shape, "raw", b"")
    array.data = vector.data.cast("B")  # type: ignore[assignment]  # Flower says bytes, and takes any buffer
    return array


def processes(_worker: object) -> tuple[int, int]:
    """The process of a worker, which runs this, and that of the raylet which has started it."""
    return os.getpid(), os.getppid()


def this_node() -> str:
    import ray  # a variable of the environment must be set before its first import

    return str(ray.get_runtime_context().get_node_id())


def make_nothing() -> ClientApp:
    raise LookupError("no such app")


def make_endless() -> ClientApp:
    """Sites that never answer; each says on which node it is, and in which process."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        address = cast(str, cast(ConfigRecord, message.content["busy"])["address"])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
            events.sendto(f"{this_node()} {os.getpid()}".encode(), address)
        threading.Event().wait()
        raise AssertionError

    return app


def make_counting() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = cast(int, context.node_config["partition-id"])
        if number == 1:
            raise DataError("site.data", "nowhere", expected="a file")
        data = cast(ArrayRecord, message.content["model"])["vector"].data
        record = ArrayRecord()
        record["vector"] = raw(np.frombuffer(data, np.float32) * number)
        calls = cast(ConfigRecord, context.state.setdefault("calls", ConfigRecord({"count": 0})))
        calls["count"] = cast(int, calls["count"]) + 1
        fields = ConfigRecord({"number": number, "calls": calls["count"]})
        return Message(RecordDict({"model": record, "fields": fields}), reply_to=message)

    return app


def make_app() -> ClientApp:
    """Sites that say on which node they are, and how they have got the vector, when sites are at work on two nodes."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        vector = np.frombuffer(cast(ArrayRecord, message.content["model"])["vector"].data, np.float32)
        start = vector.ctypes.data
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [(line[0].split("-"), line[5:]) for line in maps]
        ((mapped, *_),) = [name for (first, last), name in spans if int(first, 16) <= start < int(last, 16)]
        node = this_node()
        nodes = Path(cast(str, cast(ConfigRecord, message.content["nodes"])["folder"]))
        (nodes / node).touch()
        await_(lambda: len(list(nodes.iterdir())) == 2)
        said: dict[str, Any] = {"node": node, "mapped": mapped, "sum": float(vector.sum())}
        return Message(RecordDict({"said": ConfigRecord(said)}), reply_to=message)

    return app
