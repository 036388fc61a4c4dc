"""One round, in numbered steps.

1. Draw the cohort. Journal the attempt before anything is asked of a site.
2. Update: each site trains from the global model and returns its contribution; contributions fold into one
   accumulator as they arrive. A site that fails or misses the deadline is a dropout.
3. Fewer than the quorum: journal the failure; the round is tried again, by sites that kept their finished updates.
4. Open the sum: decode the weighted mean and the totals.
5. Server step: the mean is a pseudo-gradient for the server's optimizer.
6. Checkpoint atomically, then journal the round as done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cloister.aggregation.average import CLIPPED, PlainSum
from cloister.aggregation.sums import LOSS, LOSS_SCALE, TOKENS, training_layout
from cloister.protocol.errors import QuorumError, UpdateError
from cloister.protocol.messages import Contribution, Failure, Reply, Request, Train
from cloister.protocol.plan import Plan
from cloister.server import journal as steps
from cloister.server.checkpoint import Checkpoints, params_sha256
from cloister.server.cohort import draw
from cloister.server.journal import Journal
from cloister.server.optimizer import ServerOptimizer
from cloister.server.progress import (
    AttemptFailed,
    Observer,
    RoundDone,
    RoundStarted,
    SiteAnswered,
    SiteFailed,
)


class Channel(Protocol):
    """What the coordinator needs of whatever carries its messages."""

    @property
    def sites(self) -> Sequence[str]:
        """Names of the sites that have joined, sorted."""

    def ask(self, sites: Iterable[str], request: Request, deadline_s: float) -> Iterator[Reply | Failure]:
        """Send one request to each site, and yield what comes back until the deadline, one for each site."""


@dataclass
class RoundContext:
    """What every round of a run works with."""

    plan: Plan
    channel: Channel
    journal: Journal
    checkpoints: Checkpoints
    optimizer: ServerOptimizer
    observe: Observer
    clock: Callable[[], float] = time.monotonic


def run_round(context: RoundContext, number: int) -> RoundDone:
    """Carry one round through, in as many attempts as the plan allows.

    Raises:
        QuorumError: every attempt ended with too few sites; nothing of the run is lost.
    """
    plan, journal = context.plan, context.journal
    failures = journal.count(steps.FAILED, number)
    while failures < plan.cohort.attempts:
        attempt = journal.count(steps.BEGUN, number) + 1
        # 1. Draw the cohort.
        cohort = draw(plan, context.channel.sites, number)
        journal.record(number, attempt, steps.BEGUN, {"cohort": cohort})
        context.observe(RoundStarted(number, attempt, tuple(cohort)))
        # 2. Update.
        started = context.clock()
        model = context.optimizer.weights.copy()
        total = _collect(context, number, attempt, cohort, model)
        # 3. Quorum.
        if total.terms < plan.cohort.needed():
            failures += 1
            journal.record(number, attempt, steps.FAILED, {"finished": total.terms})
            context.observe(AttemptFailed(number, attempt, total.terms, plan.cohort.needed()))
            continue
        # 4. Open the sum.
        opened = total.open()
        seconds = context.clock() - started
        # 5. Server step.
        context.optimizer.step(opened.mean)
        # 6. Checkpoint, then journal.
        digest = context.checkpoints.save(number, context.optimizer.weights, context.optimizer.state())
        tokens = opened.counters[TOKENS]
        done = RoundDone(
            round=number,
            attempts=attempt,
            sites=total.terms,
            dropouts=len(cohort) - total.terms,
            tokens=tokens,
            seconds=seconds,
            train_loss=opened.counters[LOSS] / LOSS_SCALE / max(tokens, 1),
            clipped=opened.counters[CLIPPED],
            update_norm=float(np.linalg.norm(opened.mean)),
            params_sha256=digest,
        )
        journal.record(number, attempt, steps.DONE, asdict(done))
        context.observe(done)
        return done
    raise QuorumError(
        f"round {number}",
        f"{failures} failed attempts",
        expected=f"{plan.cohort.needed()} of {plan.cohort.size()} sites to finish in one of them",
        fix="mend the sites or lower cohort.quorum; nothing is lost, and `cloister resume` tries again",
    )


def _collect(
    context: RoundContext, number: int, attempt: int, cohort: Sequence[str], model: npt.NDArray[np.float32]
) -> PlainSum:
    plan = context.plan
    total = PlainSum(training_layout(plan, model.size))
    request = Train(plan.to_json(), number, attempt, params_sha256(model), model)
    for reply in context.channel.ask(cohort, request, plan.cohort.deadline_s):
        refusal = fold(total, reply, number, request.model_hash)
        context.observe(
            SiteAnswered(number, reply.site) if refusal is None else SiteFailed(number, reply.site, refusal)
        )
    return total


def fold(total: PlainSum, reply: Reply | Failure, round_number: int, model_hash: str) -> str | None:
    """Add a site's contribution to a sum.

    Returns:
        Why it could not be added, in one line; None when it was.
    """
    match reply:
        case Failure():
            return reply.reason
        case Contribution() if (reply.round, reply.model_hash) == (round_number, model_hash):
            try:
                total.add(reply.vector)
            except UpdateError as error:
                return str(error)
            return None
        case Contribution():
            return f"its update is for round {reply.round} or another model, not for round {round_number}"
        case _:
            return f"it answered with {type(reply).__name__}, not with a contribution"
