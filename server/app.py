"""The coordinator as a Flower `ServerApp`: the only part of `server/` that knows Flower's grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from cloister.protocol.errors import EngineError, UpdateError
from cloister.protocol.messages import (
    Agree,
    Agreed,
    Contribution,
    Evaluate,
    Failure,
    Join,
    Joined,
    Reply,
    Request,
    Train,
)
from cloister.protocol.plan import Plan
from cloister.protocol.records import from_records, to_records, with_private

_GRACE_S = 60.0
"""How much longer than the deadline a message may live, so that it is the deadline that ends an attempt."""


class GridChannel:
    """The sites behind a Flower grid, by name.

    Args:
        grid: Flower's grid.
        plan: The plan that every site is asked to join.
        run: Identity of the run.
        refused: Told of each site that does not join, and why.

    Raises:
        EngineError: too few sites join for any cohort to reach its quorum.
    """

    def __init__(self, grid: Grid, plan: Plan, run: str, refused: Callable[[Failure], None]) -> None:
        self._grid = grid
        self._nodes: dict[str, int] = {}
        nodes = list(grid.get_node_ids())
        reasons = []
        for node, reply in self._exchange(nodes, Join(plan.to_json(), run), plan.cohort.deadline_s):
            if isinstance(reply, Joined) and reply.site not in self._nodes:
                self._nodes[reply.site] = node
                continue
            failure = reply if isinstance(reply, Failure) else Failure(f"node {node}", "a name already taken")
            reasons.append(failure.reason)
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
            if not isinstance(reply, Failure) and reply.site != names[node]:
                reply = Failure(names[node], f"it answered under the name {reply.site!r}")
            yield Failure(names[node], reply.reason) if isinstance(reply, Failure) else reply

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
            yield node, _read(node, message, answer)
        for node in sorted(waiting):
            yield node, Failure(f"node {node}", f"no answer within cohort.deadline_s = {deadline_s:g} s")


def server_app(run: Callable[[Grid, Context], None]) -> ServerApp:
    """A `ServerApp` whose main function is `run`."""
    app = ServerApp()
    app.main()(run)
    return app


def _read(node: int, message: Message, answer: type[Reply]) -> Reply | Failure:
    if message.has_error():
        return Failure(f"node {node}", " ".join((message.error.reason or "no reason given").split()))
    try:
        return from_records(answer, message.content)
    except UpdateError as error:
        return Failure(f"node {node}", str(error))


_KINDS: dict[type[Request], tuple[str, type[Reply]]] = {
    Join: ("query.join", Joined),
    Agree: ("query.agree", Agreed),
    Train: ("train", Contribution),
    Evaluate: ("evaluate", Contribution),
}
