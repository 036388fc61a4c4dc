"""The coordinator as a Flower `ServerApp`: the only part of `server/` that knows Flower's grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from cloister.lm.layout import Vector
from cloister.privacy.policy import LONGEST_REASON, Refusal
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import EngineError, SecureSumError, UpdateError
from cloister.protocol.messages import (
    Agree,
    Agreed,
    Contribution,
    Evaluate,
    Failure,
    Join,
    Joined,
    Refused,
    Reply,
    Request,
    Train,
)
from cloister.protocol.plan import Plan
from cloister.protocol.records import from_records, to_records, with_private
from cloister.protocol.roster import Roster

_GRACE_S = 60.0
"""How much longer than the deadline a message may live, so that it is the deadline that ends an attempt."""


class GridChannel:
    """The sites behind a Flower grid, by name.

    Args:
        grid: Flower's grid.
        plan: The plan that every site is asked to join.
        run: Identity of the run.
        refused: Told of each site that does not join, and why.
        base: Frozen parameters that sites are to use in the place of those that the plan gives.
        roster: The sites' identities, by which a refusal is believed.

    Raises:
        EngineError: too few sites join for any cohort to reach its quorum.
    """

    def __init__(
        self,
        grid: Grid,
        plan: Plan,
        run: str,
        refused: Callable[[Failure], None],
        *,
        base: Vector | None = None,
        roster: Roster | None = None,
    ) -> None:
        self._grid = grid
        self._plan = plan
        self._run = run
        self._roster = roster
        self._nodes: dict[str, int] = {}
        self._refusals: list[Failure] = []
        nodes = list(grid.get_node_ids())
        reasons = []
        join = Join(plan.to_json(), run)
        if base is not None:
            join = Join(plan.to_json(), run, vector_hash(base).hex(), base)
        for node, reply in self._exchange(nodes, join, plan.cohort.deadline_s):
            if isinstance(reply, Joined) and reply.site not in self._nodes:
                self._nodes[reply.site] = node
                continue
            failure = reply if isinstance(reply, Failure) else Failure(f"node {node}", "a name already taken")
            reasons.append(failure.reason)
            if failure.refused:
                self._refusals.append(failure)
            refused(failure)
        if len(self._nodes) < plan.cohort.needed():
            why = f" ({reasons[0]})" if reasons else ""
            raise EngineError(
                "sites",
                len(self._nodes),
                expected=f"at least {plan.cohort.needed()} of {plan.cohort.sites} to join{why}",
            )

    @property
    def sites(self) -> Sequence[str]:
        """Names of the sites that have joined, sorted."""
        return sorted(self._nodes)

    @property
    def refusals(self) -> Sequence[Failure]:
        """Sites that refused to join, by their own policy or budget."""
        return self._refusals

    def ask(
        self,
        sites: Iterable[str],
        request: Request,
        deadline_s: float,
        private: Mapping[str, bytes] | None = None,
    ) -> Iterator[Reply | Failure]:
        """Send one request to each site, with bytes for it alone; yield one answer for each as it comes."""
        names = {self._nodes[site]: site for site in sites}
        secrets = {self._nodes[site]: found for site, found in (private or {}).items()}
        for node, reply in self._exchange(list(names), request, deadline_s, secrets):
            if isinstance(reply, Failure):
                yield Failure(names[node], reply.reason, reply.refused)
            elif reply.site != names[node]:
                yield Failure(names[node], f"it answered under the name {reply.site!r}")
            else:
                yield reply

    def _exchange(
        self,
        nodes: list[int],
        request: Request,
        deadline_s: float,
        private: Mapping[int, bytes] | None = None,
    ) -> Iterator[tuple[int, Reply | Failure]]:
        kind, answer = _KINDS[type(request)]
        content = to_records(request)  # its vectors are in every message, and an engine may send them once
        group = str(getattr(request, "round", 0))
        messages = [
            Message(
                with_private(content, private[node]) if private else content,
                node,
                kind,
                ttl=deadline_s + _GRACE_S,
                group_id=group,
            )
            for node in nodes
        ]
        waiting = set(nodes)
        for message in self._grid.send_and_receive(messages, timeout=deadline_s):
            node = message.metadata.src_node_id
            if node not in waiting:
                continue
            waiting.discard(node)
            reply = _read(node, message, answer)
            yield node, self._explained(reply) if isinstance(reply, Refused) else reply
        for node in sorted(waiting):
            yield node, Failure(f"node {node}", f"no answer within cohort.deadline_s = {deadline_s:g} s")

    def _explained(self, refused: Refused) -> Failure:
        """A refusal in words, and whether the site has signed it."""
        if self._roster is None:
            reason = refused.statement.decode(errors="replace")[:LONGEST_REASON]
            shown = "".join(letter if letter.isprintable() else "?" for letter in reason)
            return Failure(refused.site, f"it refuses: {shown}", refused=True)
        try:
            refusal = Refusal.from_bytes(refused.statement)
            refusal.verify(self._roster, run=self._run, plan_digest=self._plan.digest())
        except SecureSumError as error:
            return Failure(refused.site, f"a refusal that is not its own: {error}")
        if refusal.site != refused.site:
            return Failure(refused.site, f"a refusal that {refusal.site} has signed")
        return Failure(refused.site, f"it refuses, signed: {refusal.reason}", refused=True)


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """A `ServerApp` whose main function is `run`."""
    app = ServerApp()
    app.main()(run)
    return app


def _read(node: int, message: Message, answer: type[Reply]) -> Reply | Failure:
    if message.has_error():
        return Failure(f"node {node}", " ".join((message.error.reason or "no reason given").split()))
    fields = message.content.get("fields")
    kind: type[Reply] = answer
    if isinstance(fields, ConfigRecord) and set(fields) == {"site", "statement"}:
        kind = Refused  # a contribution has a statement too, and more
    try:
        return from_records(kind, message.content)
    except UpdateError as error:
        return Failure(f"node {node}", str(error))


_KINDS: dict[type[Request], tuple[str, type[Reply]]] = {
    Join: ("query.join", Joined),
    Agree: ("query.agree", Agreed),
    Train: ("train", Contribution),
    Evaluate: ("evaluate", Contribution),
}
