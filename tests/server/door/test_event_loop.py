"""The event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cloister.server.door.event_loop import EventLoop, LoopEndedError

WAIT_S = 60.0


def test_a_call_is_made_in_the_thread_of_the_loop_and_its_error_is_raised_here() -> None:
    loop = EventLoop("called")
    assert loop.call(lambda: threading.current_thread().name) == "called"
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0)
    loop.end()


def test_a_loop_that_has_ended_says_so() -> None:
    loop = EventLoop("ended")
    assert not loop.over
    loop.end()
    assert loop.over
    with pytest.raises(LoopEndedError):
        loop.call(lambda: None)


def test_a_call_beside_the_end_is_made_or_refused() -> None:
    """None waits for a loop that no longer runs, as a status that is asked for while a run closes might."""
    loop = EventLoop("ends")
    made, refused, begun = 0, threading.Event(), threading.Event()

    def call() -> None:
        nonlocal made
        try:
            while True:
                loop.call(begun.set)
                made += 1
        except LoopEndedError:
            refused.set()

    threading.Thread(target=call, daemon=True).start()
    assert begun.wait(WAIT_S)
    loop.end()
    assert refused.wait(WAIT_S)
    assert made


def test_what_is_left_in_it_is_cancelled() -> None:
    loop = EventLoop("left")
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    task = loop.run(begin())
    loop.end()
    assert cancelled.is_set()
    assert task.cancelled()
