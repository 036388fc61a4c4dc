"""Held-out evaluation of the global model: at the coordinator where it has records for it, else at the sites.

At the sites, totals of loss, correct tokens, tokens and bytes travel through the same ring as updates do; the
coordinator learns the totals over all sites that answered.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cloister.aggregation.average import PlainSum
from cloister.aggregation.sums import BYTES, CORRECT, LOSS, LOSS_SCALE, TOKENS, evaluation_layout
from cloister.lm.data import prepare
from cloister.lm.evaluate import HeldOut, evaluate
from cloister.lm.model import LanguageModel, device_for
from cloister.lm.records import read_records
from cloister.protocol.errors import QuorumError
from cloister.protocol.messages import Evaluate
from cloister.protocol.plan import Plan
from cloister.server.checkpoint import params_sha256
from cloister.server.progress import Observer, SiteFailed
from cloister.server.round import Channel, fold

Evaluation = Callable[[int, npt.NDArray[np.float32]], HeldOut]


def at_sites(plan: Plan, channel: Channel, observe: Observer) -> Evaluation:
    """Evaluation by every site on its own held-out records, weighted by their tokens.

    The function returned raises `QuorumError` when no site answers.
    """

    def held_out(round_number: int, weights: npt.NDArray[np.float32]) -> HeldOut:
        request = Evaluate(plan.to_json(), round_number, params_sha256(weights), weights)
        total = PlainSum(evaluation_layout(plan))
        for reply in channel.ask(channel.sites, request, plan.cohort.deadline_s):
            refusal = fold(total, reply, round_number, request.model_hash)
            if refusal is not None:
                observe(SiteFailed(round_number, reply.site, refusal))
        sums = total.open().counters
        if not sums[TOKENS]:
            raise QuorumError(
                f"evaluation of round {round_number}",
                "no answer",
                expected="held-out sums of at least one site",
                fix="see each site's reason above; `cloister resume` tries again",
            )
        return HeldOut(sums[LOSS] / LOSS_SCALE, sums[CORRECT], sums[TOKENS], sums[BYTES])

    return held_out


def at_coordinator(plan: Plan, model: LanguageModel) -> Evaluation:
    """Evaluation on the public records that `plan.server.evaluation` names.

    Raises:
        DataError: there are no records.
    """
    records = read_records(plan.server.evaluation)
    data = plan.data.model_copy(update={"held_out": 0.0})
    sequences = prepare(records, model.tokenizer, data, seed=plan.run.seed).train
    device = device_for("auto")

    def held_out(round_number: int, weights: npt.NDArray[np.float32]) -> HeldOut:
        model.layout.scatter(weights, model.module.to(device))
        return evaluate(model.module, sequences, plan.local.batch_size, device, plan.local.precision)

    return held_out
