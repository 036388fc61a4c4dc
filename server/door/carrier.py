"""A Flower `Grid` that waits for replies and withdraws messages: what ours add to `push_messages` and `pull_messages`.

A message's TTL is the deadline of its reply. The grid itself answers with an `Error` where it passes.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator

from flwr.app import Array, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from cloister.protocol.machine.closing import Closing

_RUN_ID = 1
_COORDINATOR = 0
"""Node id of the coordinator; sites are 1 to n."""


def identify(run_id: int, node_id: int) -> None:
    """Set the run and the node that this process's messages come from.

    Flower's `Message` reads both from a process global, and has no argument for them. Flower's own runtimes set it in
    the same way.
    """
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, 1


def array_of(frame: memoryview) -> Array:
    """A frame as Flower's messages have it, not copied."""
    array = Array("uint8", (frame.nbytes,), "cloister.frame", b"")
    # Flower's constructor requires bytes, which would be a copy.
    array.data = frame  # type: ignore[assignment]  # its transport and `wire` take any buffer
    return array


class Carrier(Grid, Closing):
    """A grid of ours, for one thread that pushes and pulls."""

    def __init__(self) -> None:
        self._run = Run.create_empty(_RUN_ID)
        identify(_RUN_ID, _COORDINATOR)
        self._numbers = itertools.count(1)

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something has happened, such as a reply, or the timeout; returns whether something has."""

    @abstractmethod
    def cancel(self, message_ids: Iterable[str]) -> None:
        """Withdraw messages, and drop their replies; those that are not known are ignored."""

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run
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

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Push messages and yield each reply as it arrives; nothing is pushed before the first reply is requested.

        After `timeout` seconds, and where the caller closes the iterator early, the messages without a reply are
        withdrawn.
        """
        until = None if timeout is None else time.monotonic() + timeout
        waiting = dict.fromkeys(self.push_messages(messages))
        try:
            while waiting:
                for reply in self.pull_messages(waiting):
                    del waiting[reply.metadata.reply_to_message_id]
                    yield reply
                left = None if until is None else max(0.0, until - time.monotonic())
                if waiting and not self.wait(left) and left == 0:
                    return
        finally:
            self.cancel(waiting)

    def _numbered(self, message: Message) -> str:
        """Give a message its id. Metadata has no setter for it; Flower's own grids set it in the same way."""
        id = str(next(self._numbers))
        message.metadata.__dict__["_message_id"] = id
        return id
