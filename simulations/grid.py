"""LocalGrid: Flower's `Grid` on one machine, by worker processes and shared memory.

The idea: a message is a few kilobytes and a vector. The few kilobytes are pickled and go over a Unix socket; each
vector is copied once into an anonymous memory segment whose file descriptor goes beside them, and whoever receives it
maps the segment read-only. One model for a hundred sites is one copy. Nothing has a name in a file system, so nothing
is left behind however a process dies, and nothing polls: the coordinator waits on its workers' sockets with the exact
time that is left.

The larger alternative that was refused: Flower's own simulation runtime, an object store, a scheduler and daemons for
a cluster (`flower.py` runs on it where there is one). On one machine its start and its rounds cost tens of times more.

Vectors that a site or the coordinator receives are memoryviews over such a segment, in `Array.data` where Flower itself
puts bytes. Flower's `Array(...)` and `ArrayRecord({...})` insist on bytes when they are built, so whoever wants to send
a buffer without copying it sets `array.data` afterwards and adds the array by `record[name] = array`.
"""

from __future__ import annotations

import io
import itertools
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, forkserver, get_context, parent_process, resource_tracker, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from cloister.protocol.errors import CloisterError, EngineError

T = TypeVar("T")

_RUN_ID = 1
_COORDINATOR = 0  # node id of the coordinator; sites are 1 to n
_IN_BAND = 1 << 14  # bytes; a smaller vector is cheaper inside the message than as a segment
_FDS_AT_ONCE = 250  # the kernel takes 253 in one message
_START_ATTEMPTS = 3  # worker processes that may die one after the other before they are ready
_EXIT_SECONDS = 2.0  # for a worker that is dying, or has nothing to do and was told so, to be gone
_REPLY_SECONDS = 5.0  # for the rest of a reply that has begun to arrive, where the deadline has passed
_SPARE_SEGMENTS = 2  # of a worker's, that wait for its next reply
_HEADER = struct.Struct("!QI")  # bytes of the pickle, number of segments


class LocalGrid(Grid):
    """Runs a `ClientApp` for many sites in a few worker processes of this machine.

    Sites are the nodes 1 to n. Worker processes start at the first push and are replaced when they die; a site runs on
    any of them, preferably the one it ran on last, and never twice at once. Its `Context` stays with it as in Flower.
    A worker leads a process group of its own, so that whatever a site starts ends with it, and ends itself when the
    coordinator dies. The grid belongs to one thread; use it as a context manager.

    The content of a message must not change until its reply is there: it is copied when a worker takes it.

    Args:
        make_client_app: Makes the app, once in each worker process; picklable.
        node_configs: For each site its `Context.node_config`.
        workers: For each worker process the environment variables it gets, such as `CUDA_VISIBLE_DEVICES`.
        slots: For each site the worker slots it takes while it works, capped at the number of workers; default 1.
        preload: Modules to import once, before workers are forked, which makes them start fast.
        log: File to which workers' output is appended; by default it goes where the coordinator's goes.
        watch: Called with a site's node id and True when it starts to work, False when it stops.
    """

    def __init__(
        self,
        make_client_app: Callable[[], ClientApp],
        node_configs: Sequence[Mapping[str, UserConfigValue]],
        *,
        workers: Sequence[Mapping[str, str]],
        slots: Sequence[int] | None = None,
        preload: Sequence[str] = (),
        log: Path | None = None,
        watch: Callable[[int, bool], None] | None = None,
    ) -> None:
        if not workers:
            raise ValueError("workers is empty: expected the environment of at least one worker process")
        if slots is not None and (len(slots) != len(node_configs) or min(slots, default=1) < 1):
            raise ValueError(f"slots is {slots}: expected {len(node_configs)} numbers of at least 1")
        self._factory = pickle.dumps(make_client_app)
        self._environments = [dict(variables) for variables in workers]
        self._preload = [__name__, *preload]
        self._log = log
        self._watch = watch or (lambda node, working: None)
        self._slots = [min(count, len(workers)) for count in slots or [1] * len(node_configs)]
        self._contexts = [
            Context(_RUN_ID, node, dict(config), RecordDict(), {})
            for node, config in enumerate(node_configs, 1)
        ]
        self._run = Run.create_empty(_RUN_ID)
        identify(_RUN_ID, _COORDINATOR)

        self._workers: list[_Worker | None] = [None] * len(workers)
        self._failed_starts = 0
        self._queues: list[deque[_Job]] = [deque() for _ in range(len(workers) + 1)]
        """Jobs that wait: for each worker those of sites it had last, then those of sites that had none."""
        self._home: dict[int, int] = {}
        """For each site that has worked, the index of the worker it had last."""
        self._jobs: dict[str, _Job] = {}
        """By message id, what has been pushed and not answered."""
        self._replies: dict[str, Message] = {}
        """By message id of the request, what nobody has taken yet."""
        self._ready: deque[_Worker] = deque()
        """Workers that the last wait found to have something to say."""
        self._ids = itertools.count(1)
        self._closed = False
        # The fork server imports what it preloads while the coordinator goes on.
        self._in_fork_server(lambda: None)
        # Not a weakref.finalize: it must run before multiprocessing waits for its children at exit.
        self._at_exit = util.Finalize(self, _end_all, (self._workers,), exitpriority=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, kill those that are busy, and drop what was not answered; may be repeated."""
        self._closed = True
        self._at_exit()
        for job in self._jobs.values():
            job.vectors.close()
        self._jobs.clear()
        self._replies.clear()
        self._ready.clear()
        for queue in self._queues:
            queue.clear()

    # Flower's Grid.

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run
        for context in self._contexts:
            context.run_id = run.run_id
        identify(run.run_id, _COORDINATOR)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message; the same as Flower's `Message(...)`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The sites: 1 to n."""
        return range(1, len(self._contexts) + 1)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Queue messages and give idle workers their first; what follows is sent when replies are taken.

        Returns:
            The id of each message, to pull its reply by.

        Raises:
            ValueError: a message is for a site that there is not; nothing was queued.
            EngineError: workers cannot be started, or the grid is closed.
        """
        if self._closed:
            raise EngineError("grid", expected="an open one, and it has been closed")
        batch = list(messages)
        for message in batch:
            if not 1 <= message.metadata.dst_node_id <= len(self._contexts):
                sites = f"a site from 1 to {len(self._contexts)}"
                raise ValueError(f"dst_node_id is {message.metadata.dst_node_id}: expected {sites}")
        vectors = _Vectors(batch)
        ids = []
        for message in batch:
            # Flower's own grids set the id in the same way: Metadata has no setter for it.
            message.metadata.__dict__["_message_id"] = id = str(next(self._ids))
            job = _Job(message, vectors, _expiry(message), id, message.metadata.dst_node_id)
            self._jobs[job.id] = job
            self._queues[self._home.get(job.node, -1)].append(job)
            ids.append(job.id)
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that are there, without waiting; work goes on only inside this grid's methods.

        Raises:
            EngineError: worker processes cannot be started.
        """
        while self._advance(time.monotonic()):
            self._dispatch()
        return [self._replies.pop(id) for id in message_ids if id in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Push messages and yield each reply as it arrives; nothing is pushed before the first is asked for.

        A worker gets its next message when its reply is taken, so that no more replies are in memory than there are
        workers, and one. A site whose worker died, whose handler raised or whose message outlived its TTL answers with
        an `Error`. Once `timeout` seconds have passed, replies that wait are still yielded, messages not yet begun are
        dropped, and workers still busy with this call's messages are killed. So they are when the caller gives the
        iterator up early.

        Raises:
            ValueError: a message is for a site that there is not.
            EngineError: worker processes cannot be started, or the grid is closed.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        pending = dict.fromkeys(self.push_messages(messages))
        try:
            while pending:
                self._dispatch(deadline)
                happened = self._advance(deadline)
                self._dispatch(
                    deadline
                )  # before the reply is yielded: the worker is busy while the caller folds it
                for id in [id for id in self._replies if id in pending]:
                    del pending[id]
                    yield self._replies.pop(id)
                if not happened and time.monotonic() >= deadline:
                    break
        finally:
            self._cancel(pending)
        self._start_missing()  # so that replacements get ready while the coordinator does its part

    # Work.

    def _dispatch(self, deadline: float = math.inf) -> None:
        """Until `deadline`, give every worker that is idle and ready something to do, where something fits."""
        if time.monotonic() >= deadline:
            return
        self._start_missing()
        for worker in self._workers:
            while worker and worker.idle and (job := self._take(worker.index)):
                if job.expires <= time.monotonic():
                    job.vectors.release(job.message)
                    self._fail(
                        job, ErrorCode.MESSAGE_UNAVAILABLE, "the message expired before its site was free"
                    )
                else:
                    self._assign(worker, job)
                worker = self._workers[worker.index]

    def _take(self, index: int) -> _Job | None:
        """The next job for a worker: of a site that it had last, of one that is new, of another worker's."""
        busy = {worker.job.node for worker in self._workers if worker and worker.job}
        free = len(self._workers) - sum(self._slots[node - 1] for node in busy)
        if free <= 0:
            return None
        queues = self._queues
        for queue in (queues[index], queues[-1], *queues[:index], *queues[index + 1 : -1]):
            for position, job in enumerate(queue):
                if self._slots[job.node - 1] <= free and job.node not in busy:
                    del queue[position]
                    return job
        return None

    def _assign(self, worker: _Worker, job: _Job) -> None:
        try:
            work = (job.message, self._contexts[job.node - 1], worker.channel.returned())
            worker.channel.send(work, job.vectors, _left(job.expires))
        except (ConnectionError, TimeoutError):
            # It died while it was idle, which is not the site's fault; but a message must not kill two.
            self._lose(worker)
            if job.retried:
                job.vectors.release(job.message)
                self._fail(
                    job, ErrorCode.CLIENT_APP_CRASHED, "two worker processes ended when the message came"
                )
            else:
                job.retried = True
                self._queues[-1].appendleft(job)
            return
        job.vectors.release(job.message)
        worker.job = job
        self._home[job.node] = worker.index
        self._watch(job.node, True)

    def _advance(self, deadline: float) -> bool:
        """Wait until `deadline` for one thing to happen and deal with it; False when nothing did."""
        if not self._ready:
            alive = [worker for worker in self._workers if worker]
            until = min([deadline, *(worker.job.expires for worker in alive if worker.job)])
            sources = {worker.channel.socket: worker for worker in alive}
            sentinels = {worker.process.sentinel: worker for worker in alive}
            heard = connection.wait([*sources, *sentinels], _left(until))
            # A dead worker's last reply may still be in its socket: which of the two woke us does not matter.
            self._ready.extend(
                worker
                for worker in alive
                if worker.channel.socket in heard or worker.process.sentinel in heard
            )
            if not self._ready:
                return self._expire()
        worker = self._ready.popleft()
        if self._workers[worker.index] is worker:
            self._hear(worker, deadline)
        return True

    def _hear(self, worker: _Worker, deadline: float) -> None:
        """Receive what a worker has to say, or find out that it is dead."""
        try:
            said = worker.channel.receive(_left(max(deadline, time.monotonic() + _REPLY_SECONDS)))
        except (EOFError, OSError):  # a timeout too: it stopped in the middle of its reply
            self._lose(worker)
            return
        if isinstance(said, _Ready):
            worker.ready = True
            self._failed_starts = 0
            return
        if isinstance(said, _Unusable):
            fix = f"see {self._log}" if self._log else ""
            raise EngineError(
                "client app", expected=f"one that a worker process can make, not {said.reason}", fix=fix
            )
        job, worker.job = worker.job, None
        assert job is not None
        self._watch(job.node, False)
        if isinstance(said, _Raised):
            self._fail(job, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, said.reason)
        else:
            reply, self._contexts[job.node - 1] = said
            self._finish(job, reply)

    def _finish(self, job: _Job, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = str(next(self._ids))
        del self._jobs[job.id]
        self._replies[job.id] = reply

    def _fail(self, job: _Job, code: int, reason: str) -> None:
        self._finish(job, Message(Error(code, reason), reply_to=job.message))

    def _lose(self, worker: _Worker) -> None:
        """Replace a worker that died, or that must; its site has crashed."""
        # A process that is dying closes its socket a little before its status is known.
        job, how = worker.job, worker.end(_EXIT_SECONDS)
        self._workers[worker.index] = None
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == _START_ATTEMPTS:
                fix = f"see {self._log}" if self._log else ""
                raise EngineError("worker process", expected=f"one that starts, but it {how}", fix=fix)
        self._start_missing()
        if job:
            self._watch(job.node, False)
            self._fail(job, ErrorCode.CLIENT_APP_CRASHED, f"the site's worker process {how}")

    def _expire(self) -> bool:
        """Kill the workers whose message has outlived its TTL."""
        now = time.monotonic()
        expired = [
            worker.job for worker in self._workers if worker and worker.job and worker.job.expires <= now
        ]
        for job in expired:
            self._stop(job)
            self._fail(
                job, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "the message expired before its site had answered"
            )
        return bool(expired)

    def _stop(self, job: _Job) -> None:
        for worker in self._workers:
            if worker and worker.job is job:
                worker.end()
                self._workers[worker.index] = None
                self._watch(job.node, False)

    def _cancel(self, ids: Iterable[str]) -> None:
        """Forget messages: kill the workers that are busy with them, drop those that wait."""
        dropped = {id: job for id in ids if (job := self._jobs.pop(id, None))}
        for index, queue in enumerate(self._queues if dropped else ()):
            for job in queue:
                if job.id in dropped:
                    job.vectors.release(job.message)
            self._queues[index] = deque(job for job in queue if job.id not in dropped)
        for id in ids:
            self._replies.pop(id, None)
        for job in dropped.values():
            self._stop(job)

    # Worker processes.

    def _start_missing(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker is None and not self._closed:
                self._workers[index] = self._in_fork_server(partial(self._start, index))

    def _start(self, index: int) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = get_context("forkserver").Process(
                target=_work,
                args=(theirs, self._factory, self._environments[index], self._log),
                name=f"cloister worker {index}",
            )
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
        return _Worker(index, process, _Channel(ours, borrows=True))

    def _in_fork_server(self, act: Callable[[], T]) -> T:
        """Do something that needs the fork server; it is started with this grid's preloads and environment."""
        get_context("forkserver").set_forkserver_preload(self._preload)
        # In the pickle, what lives in the main module is in __main__, or in __mp_main__ where this process was spawned.
        # Threads and the like are read when a library is loaded, which may be in the fork server.
        common = set.intersection(*(set(variables.items()) for variables in self._environments))
        try:
            with environment(dict(common)), _main_module(needed=b"_main__" in self._factory):
                with _interrupts_held():
                    forkserver.ensure_running()
                return act()
        except (EOFError, OSError) as error:
            raise EngineError(
                "worker process",
                expected=f"one that starts, but its fork server does not answer ({one_line(error)})",
                fix=f"import {', '.join(self._preload)} in a fresh interpreter to see why",
            ) from error


@dataclass(eq=False)
class _Job:
    """A message on its way."""

    message: Message
    vectors: _Vectors
    expires: float
    """On the monotonic clock."""
    id: str
    node: int
    retried: bool = False


@dataclass(eq=False)
class _Worker:
    """A worker process, from its start to its end; its replacement is another object."""

    index: int
    process: ForkServerProcess
    channel: _Channel
    ready: bool = False
    job: _Job | None = None

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def end(self, patience: float = 0.0) -> str:
        """End the process with whatever its site has started, at once or after `patience` seconds; say how it ended."""
        self.channel.socket.close()
        self.process.join(patience)
        code = self.process.exitcode
        assert self.process.pid is not None
        with suppress(ProcessLookupError):  # it had not come to lead a group, or nobody is left in it
            os.killpg(self.process.pid, signal.SIGKILL)
        if code is None:
            self.process.kill()
            self.process.join()
            code = -signal.SIGKILL
        self.process.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def _end_all(workers: list[_Worker | None]) -> None:
    for worker in workers:
        if worker:
            worker.channel.socket.close()  # an idle one leaves; all at once
    for index, worker in enumerate(workers):
        if worker:
            worker.end(_EXIT_SECONDS if worker.idle else 0.0)
            workers[index] = None


# What a worker says, besides (reply, context).


@dataclass(frozen=True)
class _Ready:
    """It has its client app."""


@dataclass(frozen=True)
class _Unusable:
    """It has none."""

    reason: str


@dataclass(frozen=True)
class _Raised:
    """The handler raised."""

    reason: str


def _work(
    theirs: socket.socket, factory: bytes, variables: Mapping[str, str], log: Path | None
) -> None:  # pragma: no cover - in a worker process
    """A worker process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator to decide
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_coordinator, daemon=True).start()
    os.environ.update(variables)
    if log:
        _append_output(log)
    channel = _Channel(theirs)
    try:
        app: ClientApp = pickle.loads(factory)()
    except Exception as error:  # whatever the factory raises, the coordinator must hear that there is no app
        traceback.print_exc()
        channel.send(_Unusable(one_line(error)), _Vectors())
        return
    channel.send(_Ready(), _Vectors())
    lent = _Lent()
    while True:
        try:
            message, context, returned = channel.receive()
        except (EOFError, ConnectionError):
            return
        lent.take_back(returned)
        identify(message.metadata.run_id, message.metadata.dst_node_id)
        try:
            reply: object = app(message, context)
            if not isinstance(reply, Message):
                raise TypeError(f"the client app returned a {type(reply).__name__}: expected a Message")
            channel.send((reply, context), lent)
        except Exception as error:  # whatever a handler raises is its site's error reply, as in Flower
            traceback.print_exc()
            channel.send(_Raised(one_line(error)), _Vectors())
        # The next wait may be long: give their memory back before it.
        del message, context
        reply = None


def _die_with_coordinator() -> None:
    coordinator = parent_process()
    assert coordinator is not None
    connection.wait([coordinator.sentinel])
    os.killpg(0, signal.SIGKILL)  # this process too, in whatever it is busy with


def _append_output(log: Path) -> None:
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def one_line(error: BaseException) -> str:
    """The reason in an `Error` reply for an exception: a `CloisterError`'s own line, else its class and text."""
    text = str(error) if isinstance(error, CloisterError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split()).removesuffix(":")


# Messages on a socket, vectors in memory.


class _Vectors:
    """The vectors of the messages of one push: each is copied once, when the first message that holds it is sent."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._uses = Counter(key for message in messages for key in _keys(message))
        self._segments: dict[int, tuple[Any, int]] = {}  # the data too, so that its id is not another's

    def segment(self, data: bytes | memoryview) -> int:
        """The file descriptor of the segment that holds a vector; it stays open until the last use is released."""
        if id(data) not in self._segments:
            self._segments[id(data)] = (data, _segment(memoryview(data).cast("B")))
        return self._segments[id(data)][1]

    def release(self, message: Message | None = None) -> None:
        """Say that a message was sent or dropped; vectors that no other message holds are closed."""
        self._uses.subtract(_keys(message) if message else ())
        for key in [key for key in self._segments if self._uses[key] <= 0]:
            os.close(self._segments.pop(key)[1])

    def close(self) -> None:
        """Close every segment."""
        self._uses.clear()
        self.release()


class _Lent:
    """A worker's segments for its replies: written again when the coordinator has let go of them.

    The kernel takes several times longer to make a new segment than to copy a vector into an old one.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[int, int]] = {}  # by inode: file descriptor and size
        self._free: dict[int, tuple[int, int]] = {}
        self._now: dict[int, tuple[Any, int]] = {}  # of the message being sent; the data too, as in _Vectors

    def segment(self, data: bytes | memoryview) -> int:
        """The file descriptor of a segment that holds a vector, until the coordinator lets go of it."""
        if id(data) not in self._now:
            view = memoryview(data).cast("B")
            inode = next((inode for inode, (_, size) in self._free.items() if size == len(view)), None)
            if inode is None:
                fd = _segment(view)
                inode = os.fstat(fd).st_ino
            else:
                fd, _ = self._free.pop(inode)
                _write(fd, view)
            self._lent[inode] = fd, len(view)
            self._now[id(data)] = data, fd
        return self._now[id(data)][1]

    def release(self) -> None:
        """Say that the message was sent."""
        self._now.clear()

    def take_back(self, inodes: Iterable[int]) -> None:
        """Hear which segments nobody reads any more; all but a few of them are given back to the kernel."""
        for inode in inodes:
            self._free[inode] = self._lent.pop(inode)
        for inode in list(self._free)[:-_SPARE_SEGMENTS]:
            os.close(self._free.pop(inode)[0])


def _keys(message: Message) -> Iterator[int]:
    if message.has_content():
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                yield from (id(array.data) for array in record.values())


def _segment(data: memoryview) -> int:
    """A new anonymous segment that holds a copy of `data`."""
    fd = -1
    try:
        if sys.platform == "linux":
            fd = os.memfd_create("cloister-vector", os.MFD_CLOEXEC)
        else:
            fd, path = tempfile.mkstemp()
            os.unlink(path)
        _write(fd, data)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise EngineError(
            "shared memory", expected=f"room for a vector of {len(data)} bytes ({error})"
        ) from error
    return fd


def _write(fd: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], written)


def _map(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))


class _Pickler(pickle.Pickler):
    """Pickles everything but the data of larger `Array`s, which are out-of-band buffers (PEP 574)."""

    def __init__(self, file: io.BytesIO, vectors: _Vectors | _Lent) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda buffer: None)
        self._vectors = vectors
        self.segments: list[int] = []
        """File descriptors, in the order in which the unpickler asks for their contents."""

    def reducer_override(self, value: object) -> Any:
        """How to pickle `value`."""
        if not isinstance(value, Array):
            return NotImplemented
        data: bytes | pickle.PickleBuffer
        if memoryview(value.data).nbytes < _IN_BAND:
            data = bytes(value.data)
        else:
            self.segments.append(self._vectors.segment(value.data))
            data = pickle.PickleBuffer(b"")  # only its place in the order matters
        return _array, (value.dtype, value.shape, value.stype, data)


def _array(dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> Array:
    array = Array(dtype, shape, stype, b"")
    array.data = data
    return array


class _Channel:
    """One end of a worker's socket: pickles, each followed by the segments of its vectors.

    With `borrows`, it keeps note of the segments it has received and nobody reads any more.
    """

    def __init__(self, socket: socket.socket, *, borrows: bool = False) -> None:
        self.socket = socket
        self._borrows = borrows
        self._returned: list[int] = []

    def returned(self) -> list[int]:
        """Inodes of the segments that nobody reads any more, each told once."""
        returned, self._returned = self._returned, []
        return returned

    def _borrow(self, fd: int) -> memoryview:
        view = _map(fd)
        if self._borrows:
            # Through self: a list that was handed over must not grow.
            note = weakref.finalize(view.obj, self._note, os.fstat(fd).st_ino)
            note.atexit = False
        return view

    def _note(self, inode: int) -> None:
        self._returned.append(inode)

    def send(self, value: object, vectors: _Vectors | _Lent, timeout: float | None = None) -> None:
        """Send a value whole; raises before anything has left if it cannot be pickled."""
        try:
            file = io.BytesIO(b"\0" * _HEADER.size)
            file.seek(_HEADER.size)
            pickler = _Pickler(file, vectors)
            pickler.dump(value)
            fds = pickler.segments
            frame = file.getbuffer()
            _HEADER.pack_into(frame, 0, len(frame) - _HEADER.size, len(fds))
            self.socket.settimeout(timeout)
            self.socket.sendall(frame)
            for start in range(0, len(fds), _FDS_AT_ONCE):
                socket.send_fds(self.socket, [b"\0"], fds[start : start + _FDS_AT_ONCE])
        finally:
            vectors.release()

    def receive(self, timeout: float | None = None) -> Any:
        """Receive a value; its vectors are memoryviews over segments that are mapped while they are in use.

        Raises:
            EOFError: the other end is closed.
            OSError: the other end is lost, or stopped in the middle for `timeout` seconds.
        """
        self.socket.settimeout(timeout)
        length, count = _HEADER.unpack(self._exactly(_HEADER.size))
        pickled = self._exactly(length)
        fds: list[int] = []
        try:
            while len(fds) < count:
                wanted = min(count - len(fds), _FDS_AT_ONCE)
                byte, some, _, _ = socket.recv_fds(
                    self.socket, 1, wanted, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
                )
                if not byte:
                    raise EOFError
                fds += some
                if len(some) < wanted:
                    raise EngineError("open files", expected=f"room for {count} more; raise `ulimit -n`")
            buffers = [self._borrow(fd) for fd in fds]
        finally:
            for fd in fds:
                os.close(fd)
        return pickle.loads(pickled, buffers=buffers)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self.socket.recv_into(view[got:])
            if not count:
                raise EOFError
            got += count
        return data


# Time, identity, and what a new process inherits.


def _left(until: float) -> float | None:
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _expiry(message: Message) -> float:
    """When a message's TTL, which is in wall-clock time, ends on the monotonic clock."""
    return time.monotonic() + message.metadata.created_at + message.metadata.ttl - time.time()


def identify(run_id: int, node_id: int) -> None:
    """Flower's messages take their origin from here; its own runtimes set it in the same way."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 1


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment for a while."""
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


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start a process with Ctrl-C blocked, until it ignores it; for this one Ctrl-C only waits.

    The fork server ignores Ctrl-C too, but only when it has imported what it preloads.
    """
    resource_tracker.ensure_running()  # where it starts it, it unblocks Ctrl-C
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_module(*, needed: bool) -> Iterator[None]:
    """Keep new processes from importing the coordinator's `__main__`, a command line, where the app is not in it."""
    main = sys.modules["__main__"]
    if not needed:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
