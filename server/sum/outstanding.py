"""The requests of asynchronous rounds that sites work on, which outlive the rounds in which they were asked."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping

from cloister.protocol.messages.messages import Contribute, Reply
from cloister.server.sum.channel import Failure
from cloister.server.sum.members import Members


class Outstanding:
    """At most one request for each site, until it is answered, fails or misses its deadline.

    Args:
        members: The sites.
        deadline_s: Seconds from its request after which a site that has not answered is a failure.
    """

    def __init__(self, members: Members, deadline_s: float) -> None:
        self._members = members
        self._deadline_s = deadline_s
        self._asked: dict[str, Contribute] = {}
        self._unsent: dict[str, Contribute] = {}
        self._answers: Generator[tuple[str, Reply | Failure]] | None = None

    def ask(self, sites: Iterable[str], request: Contribute) -> None:
        """Ask those of some sites that have no request; it is sent when the next answer is waited for."""
        for site in sites:
            if site not in self._asked:
                self._asked[site] = self._unsent[site] = request

    def next(self) -> tuple[str, Contribute, Reply | Failure] | None:
        """Wait for the next answer: its site, what the site was asked, and the answer; None if no site is asked.

        The vectors of an answer may be used until the next call.
        """
        if not self._asked:
            return None
        if self._answers is None:
            self._answers = self._members.stream(self._take, self._deadline_s, group="asynchronous rounds")
        site, reply = next(self._answers)
        return site, self._asked.pop(site), reply

    def close(self) -> None:
        """Withdraw all requests; idempotent."""
        if self._answers is not None:
            self._answers.close()

    def _take(self) -> Mapping[str, Contribute]:
        unsent, self._unsent = self._unsent, {}
        return unsent
