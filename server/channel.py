"""What a run knows of whatever carries its messages to the sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloister.protocol.messages import Reply, Request


@dataclass(frozen=True)
class Failure:
    """A site did not do what it was asked."""

    site: str
    """The site's name, or that of its node while the name is not known."""
    reason: str
    """One line that says why."""
    refused: bool = False
    """Whether the site itself refused, by its policy or its budget: asking again is of no use."""


class Channel(Protocol):
    """The nodes behind a carrier, each of which serves one site; `members.py` knows which."""

    def nodes(self) -> Sequence[int]:
        """The nodes that can be asked, by the carrier's own numbers."""

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        """Send each node its request, and yield one answer for each node as it comes.

        A carrier may send a vector that several requests share only once.

        Args:
            requests: By node.
            deadline_s: Seconds after which a node that has not answered is a `Failure`.
            group: What the requests have in common, for a carrier's own logs.
        """
