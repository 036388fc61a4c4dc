"""One round, in numbered steps.

1. Draw the cohort. Journal the round and the attempt.
2. Advertise: each site returns signed one-time keys.
3. Share: each site verifies its peers against the roster and returns encrypted key shares.
4. Update: each site trains from the global model and returns its masked contribution; contributions fold into one
   accumulator as they arrive. A site that fails or misses the deadline is a dropout.
5. Consistency: the survivors sign the same list of survivors.
6. Unmask: survivors reveal shares. Too few sites, here or before: the attempt ends with nothing revealed and the round
   is tried again, by sites that kept their finished updates.
7. Open the sum: decode the weighted mean and the totals.
8. Server step: the mean is a pseudo-gradient for the server's optimizer.
9. Checkpoint atomically, then journal the round as done.

Steps 1 to 7 are those of `sum.py`, with the same numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from cloister.aggregation.average import CLIPPED
from cloister.aggregation.sums import LOSS, LOSS_SCALE, TOKENS, TRAIN
from cloister.protocol.cohort import draw
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import QuorumError
from cloister.protocol.messages import Train
from cloister.server import journal as steps
from cloister.server.checkpoint import Checkpoints
from cloister.server.optimizer import ServerOptimizer
from cloister.server.progress import RoundAbandoned, RoundDone
from cloister.server.sum import Failed, Party, sum_over


@dataclass
class RoundContext:
    """What every round of a run works with."""

    party: Party
    checkpoints: Checkpoints
    optimizer: ServerOptimizer


def run_round(context: RoundContext, number: int) -> RoundDone | RoundAbandoned:
    """Carry one round through, in as many attempts as the plan allows.

    A round is abandoned, with the model as it was, when shares were asked for and the same survivors could not finish
    it: what the others have answered already forbids them to answer for another list.

    Raises:
        QuorumError: every attempt ended with too few sites; nothing of the run is lost.
    """
    party, plan = context.party, context.party.plan
    # 1. Draw the cohort.
    joined = set(party.channel.sites)
    known = party.roster.names if party.roster else party.channel.sites
    # From all sites of the roster, so that each of them can repeat the draw; who has not joined is not asked.
    cohort = [site for site in draw(plan, known, number) if site in joined]
    # 2 to 7.
    model = context.optimizer.weights.copy()
    model_hash = vector_hash(model).hex()
    total = sum_over(
        party,
        TRAIN,
        cohort,
        plan.cohort.needed(),
        lambda tries: Train(plan.to_json(), number, tries, party.run, model_hash, model),
    )
    if isinstance(total, Failed) and not total.bound:
        raise QuorumError(
            f"round {number}",
            f"{total.attempts} failed attempts",
            expected=f"{plan.cohort.needed()} of {len(cohort)} sites to finish in one of them",
            fix="mend the sites or lower cohort.quorum; nothing is lost, and `cloister resume` tries again",
        )
    # 8. Server step.
    if not isinstance(total, Failed):
        context.optimizer.step(total.opened.mean)
    # 9. Checkpoint, then journal.
    digest = context.checkpoints.save(number, context.optimizer.weights, context.optimizer.state())
    done: RoundDone | RoundAbandoned
    if isinstance(total, Failed):
        done = RoundAbandoned(round=number, attempts=total.attempts, params_sha256=digest)
    else:
        counters = total.opened.counters
        done = RoundDone(
            round=number,
            attempts=total.attempts,
            sites=total.sites,
            dropouts=len(cohort) - total.sites,
            tokens=counters[TOKENS],
            seconds=total.seconds,
            train_loss=counters[LOSS] / LOSS_SCALE / max(counters[TOKENS], 1),
            clipped=counters[CLIPPED],
            update_norm=float(np.linalg.norm(total.opened.mean)),
            params_sha256=digest,
        )
    party.journal.record(number, done.attempts, steps.DONE, asdict(done))
    party.observe(done)
    return done
