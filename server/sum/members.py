"""The members of a run: the sites that have joined, and which refusals are accepted as their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import numpy as np

from cloister.lm.model.layout import Vector
from cloister.protocol.errors import EngineError, SecureSumError
from cloister.protocol.identity.audit_log import NO_AUDIT_LOG, AuditLog, Fact
from cloister.protocol.identity.roster import Roster
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.joining import verify_joined
from cloister.protocol.messages.messages import Failed, Join, Joined, Refused, Reply, Request
from cloister.protocol.messages.refusal import printable, verify_refusal
from cloister.protocol.plan.plan import FASTEST, SLOWEST, Plan
from cloister.server.sum.channel import Channel, Failure, Streaming

_NAMED = 10
"""Nodes that did not join, of which the reason why a run cannot begin names each."""


class Members:
    """The sites that have joined a run, by name.

    Args:
        channel: Carries the messages.
        plan: The plan that every site is asked to join.
        run: Identity of the run.
        refused: Called with each site that does not join, and the reason; later too, for one that comes later.
        base: Frozen parameters that sites use instead of those of the plan.
        roster: The sites' identities, which verify names and refusals; None if the plan sums in clear, where each node
            has the name that it gives first.
        audit_log: Has a line for each join and refusal before its effect.

    Raises:
        EngineError: too few sites join for any cohort to reach its quorum.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        run: str,
        refused: Callable[[Failure], None],
        *,
        base: Vector | None = None,
        roster: Roster | None = None,
        audit_log: AuditLog = NO_AUDIT_LOG,
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._digest = bytes.fromhex(plan.digest())
        self._run = run
        self._refused = refused
        self._roster = roster
        self._audit_log = audit_log
        self._base = np.empty(0, np.float32) if base is None else base
        self._base_hash = b"" if base is None else vector_hash(base)
        self._asked: set[int] = set()
        self._nodes: dict[str, int] = {}
        self._speeds: dict[str, float] = {}
        self._refusals: list[Failure] = []
        reasons = self.admit()
        if len(self._nodes) < plan.cohort.needed():
            more = f"; and {len(reasons) - _NAMED} more" * (len(reasons) > _NAMED)
            why = f" ({'; '.join(reasons[:_NAMED])}{more})" if reasons else ""
            raise EngineError(
                "sites",
                len(self._nodes),
                expected=f"at least {plan.cohort.needed()} of {plan.cohort.sites} to join{why}",
            )

    def newcomers(self) -> list[int]:
        """The nodes that have not been asked to join: all at first, later those that have come since."""
        return [node for node in self._channel.nodes() if node not in self._asked]

    def admit(self) -> list[str]:
        """Ask the newcomers to join.

        Returns:
            Why nodes did not join. A failure is not signed, so the name in it is unverified.
        """
        plan = self._plan.to_json()
        requests = {
            node: Join(self._run, plan, os.urandom(32), self._base_hash, self._base)
            for node in self.newcomers()
        }
        self._asked.update(requests)
        reasons = []
        answers = self._channel.ask(requests, self._plan.cohort.deadline_s, group="join") if requests else ()
        for node, reply in answers:
            if not isinstance(reply, Joined):
                claimed = printable(reply.site) if isinstance(reply, Failed) else ""
                named = f"node {node} (unverified name: {claimed})" if claimed else f"node {node}"
                failure = self._failure(named, reply)
            elif problem := self._problem(reply, requests[node]):
                failure = Failure(f"node {node}", problem)
            else:
                self._audit_log.record(Fact("join", self._run, self._digest.hex(), site=reply.site))
                self._nodes[reply.site] = node
                self._speeds[reply.site] = reply.speed
                continue
            reasons.append(f"{failure.site}: {failure.reason}")
            if failure.refused:
                refusal = Fact(
                    "refusal", self._run, self._digest.hex(), site=failure.site, detail=failure.reason
                )
                self._audit_log.record(refusal)
                self._refusals.append(failure)
            self._refused(failure)
        return reasons

    @property
    def sites(self) -> Sequence[str]:
        """Names of the sites that have joined, sorted."""
        return sorted(self._nodes)

    @property
    def speeds(self) -> Mapping[str, float]:
        """The speed that each site that has joined declares, relative to the others."""
        return self._speeds

    @property
    def refusals(self) -> Sequence[Failure]:
        """Sites that refused to join, by their own policy or budget."""
        return self._refusals

    def ask(
        self, requests: Mapping[str, Request], deadline_s: float, *, group: str
    ) -> Iterator[Reply | Failure]:
        """Send each site its request; yield one answer for each as it arrives: a reply in its own name, or a failure.

        Args:
            requests: By site.
            deadline_s: Seconds after which a site that has not answered is a failure.
            group: A label of the requests, for logs.
        """
        for site in requests:
            if site not in self._nodes:
                yield Failure(site, "it has not joined again since the coordinator was restarted")
        names = {self._nodes[site]: site for site in requests if site in self._nodes}
        by_node = {node: requests[site] for node, site in names.items()}
        for node, reply in self._channel.ask(by_node, deadline_s, group=group):
            yield self._answer(names[node], reply)

    def stream(
        self, requests: Callable[[], Mapping[str, Request]], deadline_s: float, *, group: str
    ) -> Generator[tuple[str, Reply | Failure]]:
        """Send sites their requests, and yield each answer with the site's name, while further requests come.

        Args:
            requests: As for `Streaming.stream`, by site; of sites that have joined.
            deadline_s: As for `Streaming.stream`.
            group: A label of the requests, for logs.
        """
        assert isinstance(self._channel, Streaming), "asynchronous rounds were not refused on this transport"
        names: dict[int, str] = {}

        def by_node() -> Mapping[int, Request]:
            asked = {self._nodes[site]: (site, request) for site, request in requests().items()}
            names.update({node: site for node, (site, _) in asked.items()})
            return {node: request for node, (_, request) in asked.items()}

        for node, reply in self._channel.stream(by_node, deadline_s, group=group):
            yield names[node], self._answer(names[node], reply)

    def _answer(self, name: str, reply: Reply | Failure) -> Reply | Failure:
        """A reply of the site named `name`, or its failure."""
        if isinstance(reply, Failure | Failed | Refused):
            return self._failure(name, reply)
        return reply if reply.site == name else _under_another_name(name, reply.site)

    def _problem(self, joined: Joined, request: Join) -> str:
        """Why the node that has answered `request` does not join under the name that it gives; empty if it does."""
        if self._roster is not None:
            try:
                verify_joined(joined, self._roster, request, plan=self._digest)
            except SecureSumError as error:
                return f"a name that is not its own: {error}"
        elif not joined.site or printable(joined.site) != joined.site:
            return "a name that is not printable"
        if not SLOWEST <= joined.speed <= FASTEST:
            return f"its speed is {joined.speed:g}: expected {SLOWEST:g} to {FASTEST:g}"
        return "a name already taken" if joined.site in self._nodes else ""

    def _failure(self, name: str, reply: Reply | Failure) -> Failure:
        """The failure of a site named `name`: the reason in words, and whether the site itself has signed it."""
        match reply:
            case Failure():
                return Failure(name, reply.reason, reply.refused)
            case Failed():
                return Failure(name, reply.reason)
            case Refused():
                return self._refusal(name, reply)
            case _:
                return Failure(name, f"it answered with {type(reply).__name__}")

    def _refusal(self, name: str, refused: Refused) -> Failure:
        joined = name in self._nodes
        if self._roster is None:  # nothing is signed, so a site that has joined can refuse only for itself
            if joined and refused.site != name:
                return _under_another_name(name, refused.site)
            return Failure(printable(refused.site) or name, f"it refuses: {refused.reason}", refused=True)
        try:
            verify_refusal(refused, self._roster, run=self._run, plan=self._digest)
        except SecureSumError as error:
            return Failure(name, f"a refusal that is not its own: {error}")
        if joined and refused.site != name:
            return Failure(name, f"a refusal that {refused.site} has signed")
        return Failure(refused.site, f"it refuses, signed: {refused.reason}", refused=True)


def _under_another_name(name: str, given: str) -> Failure:
    return Failure(name, f"it answered under the name {given!r}")
