"""LocalGrid: Flower's `Grid` on one machine, scheduling messages over worker processes.

`workers.py` starts and ends the processes, `segments.py` carries vectors in shared memory; this file decides which
worker handles which message and when, and turns crashes and deadlines into Flower's `Error` replies.

Alternative refused: Flower's own simulation runtime, with an object store, a scheduler and daemons for a cluster
(`flower.py` uses it on a cluster). On one machine its start and its rounds take tens of times longer.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from cloister.protocol.errors import EngineError
from cloister.server.door.carrier import Carrier
from cloister.simulations.engines.segments import PushSegments
from cloister.simulations.engines.workers import Raised, State, Worker, WorkerPool

_REPLY_SECONDS = 5.0  # to receive the rest of a reply that has begun to arrive when the deadline passes


class LocalGrid(Carrier):
    """Runs a `ClientApp` for many sites in a few worker processes of this machine.

    Sites are the nodes 1 to n. Worker processes start at the first push and are replaced when they crash. A site runs
    on any of them, preferably the one that it ran on last, and never twice at once. Its `Context` is kept between
    messages, as in Flower. The grid belongs to one thread; use it as a context manager.

    The content of a message must not change until its reply has arrived: it is copied when a worker gets it.

    Args:
        make_client_app: Makes the app, once in each worker process; picklable.
        node_configs: For each site its `Context.node_config`.
        workers: For each worker process its environment variables, such as `CUDA_VISIBLE_DEVICES`.
        slots: For each site the worker slots that it takes while it works, capped at the number of workers; default 1.
        preload: Modules to import once, before workers are forked, so that workers start fast.
        log: File to which workers' output is appended; by default it goes where the coordinator's goes.
        watch: Called with a site's node id and True when it starts to work, False when it stops.

    Raises:
        EngineError: the fork server cannot be started.
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
        super().__init__()
        assert workers, "the sites need a worker process"
        self._pool = WorkerPool(make_client_app, workers, preload=preload, log=log)
        self._watch = watch or (lambda node, working: None)
        self._slots = [min(count, len(workers)) for count in slots or [1] * len(node_configs)]
        self._contexts = [
            Context(self._run.run_id, node, dict(config), RecordDict(), {})
            for node, config in enumerate(node_configs, 1)
        ]

        self._queue: list[_Job] = []
        """Waiting jobs, those of earlier pushes first."""
        self._home: dict[int, int] = {}
        """For each site that has worked, the index of the worker that it had last."""
        self._jobs: dict[str, _Job] = {}
        """By message id, the messages that were pushed and are not answered."""
        self._working: dict[Worker, _Job] = {}
        """What each busy worker works on."""
        self._replies: dict[str, Message] = {}
        """By message id of the request, the replies that the caller has not taken yet."""
        self._pushes = 0

    def close(self) -> None:
        """End the worker processes, kill those that are busy, and drop unanswered messages; idempotent."""
        self._pool.close()
        for job in self._jobs.values():
            job.segments.close()
        self._jobs.clear()
        self._working.clear()
        self._replies.clear()
        self._queue.clear()

    # Flower's Grid.

    def get_node_ids(self) -> Iterable[int]:
        """The sites: 1 to n."""
        return range(1, len(self._contexts) + 1)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Queue messages and give idle workers their first; the others are sent as replies are taken.

        Returns:
            The id of each message, to pull its reply by.

        Raises:
            ValueError: a message is for a site that does not exist; nothing was queued.
            EngineError: workers cannot be started, or the grid is closed.
        """
        if self._pool.closed:
            raise EngineError("grid", expected="an open one, and it has been closed")
        batch = list(messages)
        for message in batch:
            if not 1 <= message.metadata.dst_node_id <= len(self._contexts):
                sites = f"a site from 1 to {len(self._contexts)}"
                raise ValueError(f"dst_node_id is {message.metadata.dst_node_id}: expected {sites}")
        segments = PushSegments(batch)
        self._pushes += 1
        ids = []
        for message in batch:
            id = self._numbered(message)
            job = _Job(message, segments, _expiry(message), id, message.metadata.dst_node_id, self._pushes)
            self._jobs[job.id] = job
            self._queue.append(job)
            ids.append(job.id)
        self._dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies that have arrived, without waiting; the grid makes progress only inside its own methods.

        A worker gets its next message when its reply is taken, so that at most one reply per worker, and one more, are
        in memory. A site answers with an `Error` if its worker crashed, its handler raised or its message outlived its
        TTL; a worker that is busy with it then is killed.

        Raises:
            EngineError: worker processes cannot be started.
        """
        ids = list(message_ids)
        while not any(id in self._replies for id in ids) and self._advance(time.monotonic()):
            self._dispatch()
        replies = [self._replies.pop(id) for id in ids if id in self._replies]
        if not self._jobs and not self._pool.closed:
            self._pool.start_missing()  # replacements start while the coordinator works
        return replies

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `Carrier.wait`. No worker begins with a message after the timeout.

        Raises:
            EngineError: worker processes cannot be started, or the grid is closed.
        """
        if self._replies:
            return True
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._dispatch(deadline)
        happened = self._advance(deadline)
        self._dispatch(deadline)  # before a reply is pulled: the worker works while the caller handles it
        return happened

    # Scheduling.

    def _dispatch(self, deadline: float = math.inf) -> None:
        """Until `deadline`, give every idle worker a job, if one fits."""
        if time.monotonic() >= deadline:
            return
        self._pool.start_missing()
        for worker in self._pool.idle():
            while worker.state is State.IDLE and (job := self._take(worker.index)):
                if job.expires <= time.monotonic():
                    job.segments.release(job.message)
                    self._fail(
                        job,
                        ErrorCode.MESSAGE_UNAVAILABLE,
                        f"timeout: its site was not free within {job.message.metadata.ttl:g} s",
                    )
                else:
                    self._assign(worker, job)

    def _take(self, index: int) -> _Job | None:
        """Dequeue a worker's next job, if one fits: of the earliest push, so that sites that are asked again and again
        do not keep others waiting; of a new site or one that it had last, or of another worker's site. Where a job of
        an earlier push does not fit yet, those of later ones wait for it."""
        busy = {job.node for job in self._working.values()}
        free = len(self._pool) - sum(self._slots[node - 1] for node in busy)
        found, earliest = None, 0
        for job in self._queue if free > 0 else ():  # up to one that suits: thousands may wait
            if job.node in busy:
                continue
            earliest = earliest or job.push
            if job.push != earliest:
                break
            if self._slots[job.node - 1] <= free:
                found = found or job
                if self._home.get(job.node, index) == index:
                    found = job
                    break
        if found is not None:
            self._queue.remove(found)
        return found

    def _assign(self, worker: Worker, job: _Job) -> None:
        """Give a job to an idle worker; if the worker has crashed, try once more with another worker."""
        try:
            worker.assign(job.message, self._contexts[job.node - 1], job.segments, _left(job.expires))
        except (ConnectionError, TimeoutError):
            self._lose(worker)
            # An idle worker's crash is not the site's fault, but a message may crash whatever worker receives it.
            if job.retried:
                job.segments.release(job.message)
                self._fail(
                    job, ErrorCode.CLIENT_APP_CRASHED, "two worker processes ended when the message came"
                )
            else:
                job.retried = True
                bisect.insort_left(self._queue, job, key=lambda each: each.push)
            return
        job.segments.release(job.message)
        self._working[worker] = job
        self._home[job.node] = worker.index
        self._watch(job.node, True)

    def _advance(self, deadline: float) -> bool:
        """Wait until `deadline` for one event and handle it; False if there was none."""
        until = min([deadline, *(job.expires for job in self._working.values())])
        worker = self._pool.wait(_left(until))
        if worker is None:
            return self._expire()
        self._hear(worker, deadline)
        return True

    def _hear(self, worker: Worker, deadline: float) -> None:
        """Receive what a worker says, or replace it if it has crashed."""
        try:
            said = self._pool.hear(worker, _left(max(deadline, time.monotonic() + _REPLY_SECONDS)))
        except (EOFError, OSError):  # includes a timeout: it stopped in the middle of its reply
            self._lose(worker)
            return
        if said is None:
            return
        job = self._working.pop(worker)
        self._watch(job.node, False)
        if isinstance(said, Raised):
            self._fail(job, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, said.reason)
        else:
            self._contexts[job.node - 1] = said.context
            self._finish(job, said.reply)

    def _lose(self, worker: Worker) -> None:
        """Replace a worker that has crashed; its job fails."""
        job = self._working.pop(worker, None)
        how = self._pool.replace(worker)
        if job:
            self._watch(job.node, False)
            self._fail(job, ErrorCode.CLIENT_APP_CRASHED, f"the site's worker process {how}")

    def _expire(self) -> bool:
        """Kill the workers whose message has outlived its TTL; True if there was one."""
        now = time.monotonic()
        expired = [job for job in self._working.values() if job.expires <= now]
        for job in expired:
            self._stop(job)
            self._fail(
                job,
                ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
                f"timeout: no answer within {job.message.metadata.ttl:g} s",
            )
        return bool(expired)

    def _stop(self, job: _Job) -> None:
        """Kill the worker that works on a job, if there is one."""
        for worker in [worker for worker, its in self._working.items() if its is job]:
            del self._working[worker]
            self._pool.kill(worker)
            self._watch(job.node, False)

    def cancel(self, message_ids: Iterable[str]) -> None:
        """As `Carrier.cancel`; workers that are busy with one of the messages are killed."""
        ids = list(message_ids)
        dropped = {id: job for id in ids if (job := self._jobs.pop(id, None))}
        for job in [job for job in self._queue if job.id in dropped]:
            job.segments.release(job.message)
            self._queue.remove(job)
        for id in ids:
            self._replies.pop(id, None)
        for job in dropped.values():
            self._stop(job)

    def _finish(self, job: _Job, reply: Message) -> None:
        self._numbered(reply)
        del self._jobs[job.id]
        self._replies[job.id] = reply

    def _fail(self, job: _Job, code: int, reason: str) -> None:
        self._finish(job, Message(Error(code, reason), reply_to=job.message))


@dataclass(eq=False)
class _Job:
    """A message that was pushed and is not answered yet."""

    message: Message
    segments: PushSegments
    expires: float
    """On the monotonic clock, in seconds."""
    id: str
    node: int
    push: int
    """The number of the push that it was in."""
    retried: bool = False


def _left(until: float) -> float | None:
    """Seconds until a time on the monotonic clock, at least 0; None if it is infinite."""
    return None if until == math.inf else max(0.0, until - time.monotonic())


def _expiry(message: Message) -> float:
    """When a message's TTL, which counts in wall-clock time, ends on the monotonic clock."""
    return time.monotonic() + message.metadata.created_at + message.metadata.ttl - time.time()
