"""Worker processes on one machine: how they start, what they do, how they end, and how they are replaced.

Workers are forked by Python's fork server, which has imported what they need, so that a start takes milliseconds. A
worker makes its `ClientApp` once, then handles one message at a time and answers each over its own socket. It leads a
process group, so that every process that a site starts ends with it, and it kills its group when the coordinator dies.
The coordinator waits on the workers' sockets and process sentinels; nothing polls.
"""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from multiprocessing import connection, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.machine import fork_server
from cloister.server.door.carrier import identify
from cloister.simulations.engines.process import collect_rarely, environment
from cloister.simulations.engines.segments import Channel, LentSegments, PushSegments, Segments

T = TypeVar("T")

_START_ATTEMPTS = 3  # consecutive workers that may end before they are ready
_EXIT_SECONDS = 2.0  # how long a worker that is idle, or already ending, has to exit before it is killed


# What a worker says.


@dataclass(frozen=True)
class Ready:
    """The worker has made its client app."""


@dataclass(frozen=True)
class Unusable:
    """The client app could not be made."""

    reason: str


@dataclass(frozen=True)
class Answered:
    """The client app returned a reply."""

    reply: Message
    context: Context
    """The site's context as the client app left it."""


@dataclass(frozen=True)
class Raised:
    """The client app raised an exception, or returned what cannot be sent."""

    reason: str


class State(Enum):
    """What a worker process is doing."""

    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    ENDED = auto()


@dataclass(eq=False)
class Worker:
    """The coordinator's end of one worker process; a replacement is another object."""

    index: int
    """Its place in the pool, which its replacement inherits."""
    process: ForkServerProcess
    channel: Channel
    state: State = State.STARTING

    def assign(
        self, message: Message, context: Context, segments: Segments, timeout: float | None = None
    ) -> None:
        """Give an idle worker a message to handle.

        Raises:
            ConnectionError: the process has ended.
            TimeoutError: it did not read the message within `timeout` seconds.
        """
        self.channel.put((message, context, self.channel.returned()), segments, timeout)
        self.state = State.BUSY

    def end(self, patience: float = 0.0) -> str:
        """End the process and every process that its site has started.

        Args:
            patience: Seconds that the process has to exit by itself before it is killed.

        Returns:
            How it ended, such as "exited with status 7".
        """
        self.state = State.ENDED
        self.channel.close()
        return fork_server.end(self.process, patience)


class WorkerPool:
    """A fixed number of places for worker processes, each with its own environment.

    The fork server starts when the pool is made; workers start at `start_missing`. The pool belongs to one thread. It
    is closed when it is garbage-collected and at interpreter exit.

    Args:
        make_client_app: Makes the app, once in each worker process; picklable.
        environments: For each worker process its environment variables, such as `CUDA_VISIBLE_DEVICES`.
        preload: Modules that the fork server imports before it forks workers.
        log: File to which workers' output is appended; None leaves it where the coordinator's goes.

    Raises:
        EngineError: the fork server cannot be started.
    """

    def __init__(
        self,
        make_client_app: Callable[[], ClientApp],
        environments: Sequence[Mapping[str, str]],
        *,
        preload: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self.closed = False
        self._factory = pickle.dumps(make_client_app)
        self._environments = [dict(variables) for variables in environments]
        self._preload = [__name__, *preload]
        self._log = log
        self._workers: list[Worker | None] = [None] * len(environments)
        self._failed_starts = 0
        self._to_hear: deque[Worker] = deque()
        """Workers whose socket or sentinel was ready at the last wait."""
        self._in_fork_server(lambda: None)  # its imports run while the coordinator continues
        # Not a weakref.finalize: it must run before multiprocessing waits for its children at exit.
        self._at_exit = util.Finalize(self, _end_all, (self._workers,), exitpriority=0)

    def __len__(self) -> int:
        """Number of places."""
        return len(self._workers)

    def idle(self) -> list[Worker]:
        """The workers that wait for a message, in the order of their places."""
        return [worker for worker in self._workers if worker and worker.state is State.IDLE]

    def start_missing(self) -> None:
        """Start a process in each empty place; it becomes idle when its `Ready` is heard.

        Raises:
            EngineError: the fork server does not answer.
        """
        for index, worker in enumerate(self._workers):
            if worker is None and not self.closed:
                self._workers[index] = self._in_fork_server(partial(self._start, index))

    def wait(self, timeout: float | None) -> Worker | None:
        """Wait for a worker that has said something or has ended.

        Args:
            timeout: Seconds; None to wait without limit.

        Returns:
            The worker, to be heard next; None when the timeout passed first.
        """
        while self._to_hear:
            worker = self._to_hear.popleft()
            if worker.state is not State.ENDED:
                return worker
        alive = [worker for worker in self._workers if worker]
        sources = [
            source for worker in alive for source in (worker.channel.fileno(), worker.process.sentinel)
        ]
        ready = connection.wait(sources, timeout)
        # The last reply of a process that has ended may still be in its socket, so both sources lead to `hear`.
        self._to_hear.extend(
            worker for worker in alive if worker.channel.fileno() in ready or worker.process.sentinel in ready
        )
        return self._to_hear.popleft() if self._to_hear else None

    def hear(self, worker: Worker, timeout: float | None) -> Answered | Raised | None:
        """Receive what a worker says.

        Args:
            worker: A worker that `wait` returned.
            timeout: Seconds that it may stop in the middle; None for no limit.

        Returns:
            The outcome of its message, or None when it has become ready for its first.

        Raises:
            EOFError: the process has ended; replace it.
            OSError: the process has ended, or the timeout passed; replace it.
            EngineError: the client app could not be made.
        """
        said: Ready | Unusable | Answered | Raised = worker.channel.receive(timeout)
        if isinstance(said, Unusable):
            raise EngineError(
                "client app", expected=f"one that a worker process can make, not {said.reason}", fix=self._see
            )
        worker.state = State.IDLE
        if isinstance(said, Ready):
            self._failed_starts = 0
            return None
        return said

    def replace(self, worker: Worker) -> str:
        """End a worker that has crashed or stopped, and start another in its place.

        Returns:
            How it ended.

        Raises:
            EngineError: several workers ended one after the other before they were ready, or none can be started.
        """
        was_starting = worker.state is State.STARTING
        how = worker.end(_EXIT_SECONDS)  # a crashing process closes its socket before its status is known
        self._workers[worker.index] = None
        if was_starting:
            self._failed_starts += 1
            if self._failed_starts == _START_ATTEMPTS:
                raise EngineError("worker process", expected=f"one that starts, but it {how}", fix=self._see)
        self.start_missing()
        return how

    def kill(self, worker: Worker) -> None:
        """Kill a worker; `start_missing` starts another in its place."""
        worker.end()
        self._workers[worker.index] = None

    def close(self) -> None:
        """End all workers, and kill those that are busy; idempotent."""
        self.closed = True
        self._at_exit()
        self._to_hear.clear()

    @property
    def _see(self) -> str:
        return f"see {self._log}" if self._log else ""

    def _start(self, index: int) -> Worker:
        process, ours = fork_server.start(
            _work, self._factory, self._environments[index], self._log, name=f"worker {index}"
        )
        return Worker(index, process, Channel(ours, borrows=True))

    def _in_fork_server(self, act: Callable[[], T]) -> T:
        """Call `act` while the fork server runs; start it, with this pool's preloads and environment, if it does not.

        The fork server gets the variables that all workers share, because libraries read some of them (number of
        threads) when they are loaded, which may be in the fork server.
        """
        common = set.intersection(*(set(variables.items()) for variables in self._environments))
        # The pickle names the main module __main__, or __mp_main__ if multiprocessing spawned this process.
        needs_main = b"_main__" in self._factory
        with environment(dict(common)), fork_server.running(self._preload, needs_main=needs_main):
            return act()


def _end_all(workers: list[Worker | None]) -> None:
    for worker in workers:
        if worker:
            worker.channel.close()  # idle workers exit at this; all of them at the same time
    for index, worker in enumerate(workers):
        if worker:
            worker.end(_EXIT_SECONDS if worker.state is State.IDLE else 0.0)
            workers[index] = None


# In the worker process.


def _work(
    theirs: socket.socket, factory: bytes, variables: Mapping[str, str], log: Path | None
) -> None:  # pragma: no cover - in a worker process
    """The main function of a worker process."""
    fork_server.begin()
    os.environ.update(variables)
    collect_rarely()
    if log:
        with log.open("ab") as file:
            fork_server.redirect(file.fileno(), file.fileno())
    channel = Channel(theirs)
    try:
        app: ClientApp = pickle.loads(factory)()
    except Exception as error:  # any failure to make the app is reported to the coordinator
        traceback.print_exc()
        channel.put(Unusable(one_line(error)), PushSegments())
        return
    try:
        channel.put(Ready(), PushSegments())
    except ConnectionError:  # the coordinator has ended meanwhile
        return
    lent = LentSegments()
    while True:
        try:
            message, context, returned = channel.receive()
        except (EOFError, ConnectionError):
            return
        lent.take_back(returned)
        identify(message.metadata.run_id, message.metadata.dst_node_id)
        reply: object = None
        try:
            reply = app(message, context)
            if not isinstance(reply, Message):
                raise TypeError(f"the client app returned a {type(reply).__name__}: expected a Message")
            channel.put(Answered(reply, context), lent)
        except Exception as error:  # any exception of a handler becomes its site's error reply, as in Flower
            traceback.print_exc()
            channel.put(Raised(one_line(error)), PushSegments())
        del message, context, reply  # frees their memory while the worker waits
