"""The only exit of a site: a finished update becomes the vector that is summed, span by span.

How it is coded is the plan's features' (`Code`): values one by one, in rotated blocks, or by the mechanism of unit
`site`. A rank releases its span of the update; the owner of the tail then makes the rest of the vector from what was
clipped in all spans. A site that is one process has one span.

The vector is kept and sent again in a retry of the round: noise is drawn once for an update, so that repeated sums of
the update cannot average the noise away.
"""

from __future__ import annotations

import numpy as np

from cloister.aggregation.features.feature import Code, Portion
from cloister.aggregation.vector.ring import RingVector
from cloister.lm.training.train import LocalUpdate
from cloister.protocol.errors import UpdateError

MUST_STAY = "must stay at this site"
"""Marks what is said of the site's own records to the persons of the site: exact, and charged to no ledger."""


def contribution(code: Code, update: LocalUpdate) -> RingVector:
    """The whole vector of a site that is one process: one span, and the tail.

    Args:
        code: The code of the plan's updates.
        update: The result of local training.

    Raises:
        UpdateError: the update has another length; or, in clear, it is not finite.
    """
    layout = code.layout
    if update.vector.shape != (layout.values,):
        raise UpdateError("update", update.vector.shape, expected=f"a vector of {layout.values} values")
    vector: RingVector = np.empty(layout.length, layout.ring.dtype)
    _, clipped = code.release(update.vector, update.tokens, Portion(out=vector[: layout.size]))
    vector[layout.size :] = code.tail([clipped], update.tokens, update.loss)
    return vector
