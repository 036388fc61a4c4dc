"""The channel: the interface between a run and the transport of its messages to the sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cloister.protocol.errors import EncodingError
from cloister.protocol.messages.messages import Reply, Request
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.wire import Buffer, decode_reply


@dataclass(frozen=True)
class Failure:
    """A site did not do what it was asked.

    Name and reason may be the site's own words. They are made printable here, because they go to a terminal, to the
    journal and into a report.
    """

    site: str
    """The site's name, or that of its node while the name is not known."""
    reason: str
    """The reason, in one printable line."""
    refused: bool = False
    """Whether the site itself refused, by its policy or its budget: a retry is pointless."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", printable(self.site))
        object.__setattr__(self, "reason", printable(self.reason) or "no reason given")


def reply_in(frames: Sequence[Buffer], node: int) -> Reply | Failure:
    """The reply in the frames that a node has sent; its failure if they are anything else."""
    try:
        return decode_reply(frames)
    except EncodingError as error:
        return Failure(f"node {node}", str(error))


class Channel(Protocol):
    """The nodes of a transport, each of which serves one site; `members.py` maps sites to nodes."""

    def nodes(self) -> Sequence[int]:
        """The nodes that can be asked, by the transport's own numbers."""

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """Send each node its request, and yield one answer for each node as it arrives.

        A transport may send a vector that several requests share only once.

        Args:
            requests: By node.
            deadline_s: Seconds after which a node that has not answered is a `Failure`.
            group: A label of the requests, for the transport's own logs.
        """


@runtime_checkable
class Streaming(Channel, Protocol):
    """A channel that takes requests while others wait for their answers, as asynchronous rounds need."""

    def stream(
        self, requests: Callable[[], Mapping[int, Request]], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """Send each node its request, and yield each answer as it arrives, while further requests come.

        Args:
            requests: Returns the requests to send, by node, to nodes without an unanswered one. It is called at the
                start and again before each wait for an answer. The iterator ends when it returns none and no request
                is unanswered.
            deadline_s: Seconds, from its request, after which a node that has not answered is a `Failure`.
            group: As for `ask`.
        """
