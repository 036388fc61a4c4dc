"""An event loop in a thread of its own, for the door, which is asynchronous inside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_CALL_S = 60.0
"""Seconds after which the event loop, which never blocks, is taken for dead."""

T = TypeVar("T")


class LoopEndedError(Exception):
    """The event loop has ended: what was to be called in it was not."""


class EventLoop:
    """Runs from its making until `end`.

    Args:
        name: The name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ended, self._lock = False, threading.Lock()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._ended

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 0.0) -> T:
        """Run a coroutine.

        Args:
            work: The coroutine.
            timeout_s: Seconds for which it may wait for something.

        Raises:
            TimeoutError: it took longer than that and a minute.
        """
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s + _CALL_S)

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in the thread of the loop.

        Raises:
            LoopEndedError: another thread has ended the loop.
            TimeoutError: it took longer than a minute.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        with self._lock:  # the loop makes the calls that were scheduled before its stop
            if self._ended:
                raise LoopEndedError
            self.loop.call_soon_threadsafe(run)
        return done.result(_CALL_S)

    def end(self) -> None:
        """Cancel the tasks that are left, wait for them, and end the thread.

        A server that stops leaves tasks for the calls that it cancelled; a task that is destroyed while it waits is
        reported on standard error, in the middle of whatever the process does then.
        """

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(cancel())
        with self._lock:
            self._ended = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CALL_S)
        self.loop.close()
