"""A gate on the released mean: a round whose mean is too long, or makes the model worse, leaves the model as it was.

Under the secure sum nobody sees one site's update, so no defence can judge it; what can be judged is what was released.
The gate does, after the sum was opened and charged (step 7) and around the server's step (8):

- `server.gate.norm`: the L2 norm of the mean, before the step.
- `server.gate.loss`: the held-out loss on the coordinator's public records, after the step, against that of the model
  before the round.

Both are post-processing of the sum with public data: they cost no privacy. The charge of a refused round stays, because
its sum was released. A gate does not find a site whose update is small, or raises a loss that nobody measures, such as
that of a backdoor. Refused: dropping single updates by their distance to others (Krum and its kin, Blanchard et al.
2017), which needs each update in clear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloister.aggregation.features.feature import AtCoordinator, Feature
from cloister.protocol.plan.plan import GateSection

if TYPE_CHECKING:  # torch takes seconds to import
    from cloister.lm.tasks.task import HeldOut


class _AtCoordinator(AtCoordinator):
    def refuses_mean(self, norm: float) -> str:
        most = self.plan.server.gate.norm
        if most is None or norm <= most:
            return ""
        return f"the norm of the mean update is {norm:.4g}, and server.gate.norm is {most:g}"

    def compares(self) -> bool:
        return self.plan.server.gate.loss is not None

    def refuses_model(self, before: HeldOut, after: HeldOut) -> str:
        most = self.plan.server.gate.loss
        if most is None or after.loss <= before.loss + most:  # not for a loss that is no number
            return ""
        change = f"from {before.loss:.4f} to {after.loss:.4f}"
        return f"the held-out loss would go {change}, and server.gate.loss is {most:g}"


FEATURE = Feature(
    "gate", wanted=lambda basis: basis.plan.server.gate != GateSection(), coordinator=_AtCoordinator
)
