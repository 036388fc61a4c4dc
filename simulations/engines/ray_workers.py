"""Worker processes in a Ray cluster, as a backend of Flower's simulation runtime.

It stands in for Flower's own `RayBackend`, which puts a dead actor back among the idle ones, where it is the next to be
chosen and fails every message from then on, and which copies the model into every message. Here:

- a worker that dies is replaced; its site's answer is an error, as on `LocalGrid`;
- a vector that several messages hold is put into Ray's object store once, and each node fetches it once; its workers
  map it read-only;
- the end of the run does not wait for a site that still works.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable
from queue import Empty, Queue
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.server.superlink.fleet.vce.backend import Backend
from ray.exceptions import RayError

from cloister.protocol.errors import EngineError, one_line, visible
from cloister.server.door.carrier import identify
from cloister.simulations.engines.cluster import Room

_IN_BAND = 100_000  # bytes; Ray itself sends smaller arguments within a message
_POLL_S = 0.5  # until a thread that waits sees that the run is over

Bytes = npt.NDArray[np.uint8]


class RayWorkers(Backend):
    """Workers that serve the sites of one run, one message at a time each.

    Args:
        make_app: Makes the app of the sites, once in each worker; picklable.
        count: Number of workers.
        each: What Ray reserves for a worker.
        over: Set when the run is over.
        config: Flower's configuration of a backend, which has nothing for this one.
    """

    def __init__(
        self,
        make_app: Callable[[], ClientApp],
        count: int,
        each: Room,
        over: threading.Event,
        config: object = None,
    ) -> None:
        actor: Any = ray.remote(
            num_cpus=each.cpus, num_gpus=each.gpus, scheduling_strategy="SPREAD", max_restarts=0
        )(_Worker)
        self._new: Callable[[], Any] = lambda: actor.remote(make_app)
        self._count = count
        self._over = over
        self._idle: Queue[Any] = Queue()
        self._vectors = _Vectors()

    # Flower's Backend.

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """Start the workers; the app is not Flower's to give, because it is made in them."""
        for _ in range(self._count):
            self._start()

    @property
    def num_workers(self) -> int:
        """Number of messages that Flower hands over at once."""
        return self._count

    def is_worker_idle(self) -> bool:
        """Whether a worker is idle."""
        return not self._idle.empty()

    def terminate(self) -> None:
        """End the threads that still wait; the workers end with the connection to Ray."""
        self._over.set()

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """The reply of a site and its new context; called by as many threads as there are workers."""
        packed, vectors = self._vectors.packed(message)
        worker = self._next_idle()
        answer = worker.answer.remote(packed, context, *vectors)
        while not ray.wait([answer], timeout=_POLL_S)[0]:
            self._check_not_over()
        try:
            result: tuple[Message, Context] = ray.get(answer)
        except RayError as error:
            # It may be out of reach, and alive.
            ray.kill(worker)
            self._start()
            reason = visible((str(error).strip().splitlines() or [type(error).__name__])[-1])[:300]
            lost = Error(ErrorCode.CLIENT_APP_CRASHED, f"the site's worker process ended ({reason})")
            return Message(lost, reply_to=message), context
        self._idle.put(worker)
        return result

    def _start(self) -> None:
        """Start a worker, which is idle when it is ready.

        Ray places it on a node with room, at once or when there is some. One that cannot start is taken for idle as
        well: its first message fails and says why.
        """
        worker = self._new()
        ready = worker.ready.remote().future()
        ready.add_done_callback(lambda _done: self._idle.put(worker))

    def _next_idle(self) -> Any:
        while True:
            try:
                return self._idle.get(timeout=_POLL_S)
            except Empty:
                self._check_not_over()

    def _check_not_over(self) -> None:
        if self._over.is_set():
            raise EngineError("Ray cluster", expected="the run to wait for this site, and it is over")


class _Vectors:
    """The vectors of messages, each in Ray's object store once, for as long as the coordinator has it.

    Vectors are told apart by the identity of their memoryview, which messages of one round share.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refs: dict[int, ray.ObjectRef[Bytes]] = {}

    def packed(self, message: Message) -> tuple[bytes, list[ray.ObjectRef[Bytes]]]:
        """A message without its large vectors, and where these are."""
        file = io.BytesIO()
        packer = _Packer(file, self._put)
        packer.dump(message)
        return file.getvalue(), packer.refs

    def _put(self, view: memoryview) -> ray.ObjectRef[Bytes]:
        with self._lock:
            ref = self._refs.get(id(view))
            if ref is None:
                ref = self._refs[id(view)] = ray.put(np.frombuffer(view, np.uint8))
                weakref.finalize(view, self._refs.pop, id(view), None)
            return ref


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, put: Callable[[memoryview], ray.ObjectRef[Bytes]]) -> None:
        super().__init__(file, protocol=5)
        self._put = put
        self.refs: list[ray.ObjectRef[Bytes]] = []

    def persistent_id(self, value: object) -> int | None:
        if type(value) is not memoryview or value.nbytes < _IN_BAND:
            return None
        self.refs.append(self._put(value))
        return len(self.refs) - 1


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: bytes, vectors: tuple[Bytes, ...]) -> None:
        super().__init__(io.BytesIO(packed))
        self._vectors = vectors

    def persistent_load(self, number: int) -> memoryview:
        return self._vectors[number].data


class _Worker:
    """In a Ray actor: an app and the sites that it serves in turn."""

    def __init__(self, make_app: Callable[[], ClientApp]) -> None:
        self._app = make_app()

    def ready(self) -> None:
        """Return when the app is made."""

    def answer(self, packed: bytes, context: Context, *vectors: Bytes) -> tuple[Message, Context]:
        """The reply to a packed message, and the site's context; Ray has fetched the vectors to this node."""
        message = _Unpacker(packed, vectors).load()
        identify(message.metadata.run_id, message.metadata.dst_node_id)
        try:
            return self._app(message, context), context
        except Exception as error:  # any exception of a handler becomes an error reply, as on LocalGrid
            traceback.print_exc()
            reply = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, one_line(error))
            return Message(reply, reply_to=message), context


# Ray pickles replies, and an Array's data may be a memoryview, which pickle rejects by default. Actors import this
# module because they unpickle `_Worker`, so the reducer is registered at both ends.
copyreg.pickle(memoryview, lambda view: (memoryview, (pickle.PickleBuffer(view),)))
