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

import numpy as np
import numpy.typing as npt

from cloister.lm.tasks.evaluate import HeldOut
from cloister.protocol.plan.plan import GateSection
from cloister.server.round.evaluate import Evaluation


class Gate:
    """The plan's gate, and the last two evaluations, so that the model after a round is evaluated once.

    Args:
        section: The bounds.
        evaluate: Evaluates the model after a round; at the coordinator if the section has a bound on the loss.
    """

    def __init__(self, section: GateSection, evaluate: Evaluation) -> None:
        self._section = section
        self._evaluate = evaluate
        self._known: dict[int, HeldOut | None] = {}

    def held_out(self, number: int, weights: npt.NDArray[np.float32]) -> HeldOut | None:
        """The evaluation of the model after a round, made once.

        Args:
            number: The round; 0: the initial model.
            weights: (d,) float32, the model after it.
        """
        if number not in self._known:
            self._known = {known: found for known, found in self._known.items() if known == number - 1}
            self._known[number] = self._evaluate(number, weights)
        return self._known[number]

    def before(self, number: int, weights: npt.NDArray[np.float32]) -> None:
        """Evaluate the model from which a round starts, if a bound on the loss needs it; arguments as `held_out`."""
        if self._section.loss is not None:
            self.held_out(number - 1, weights)

    def of_mean(self, norm: float) -> str:
        """Why a mean is refused; empty if it is not.

        Args:
            norm: Its L2 norm.
        """
        most = self._section.norm
        if most is None or norm <= most:
            return ""
        return f"the norm of the mean update is {norm:.4g}, and server.gate.norm is {most:g}"

    def of_model(self, number: int, weights: npt.NDArray[np.float32]) -> str:
        """Why the model after a round's step is refused; empty if it is not. Call `before` first.

        Args:
            number: The round.
            weights: (d,) float32, the model after its step.
        """
        most = self._section.loss
        if most is None:
            return ""
        before, after = self.held_out(number - 1, weights), self.held_out(number, weights)
        assert before is not None, "a sound plan with a bound on the loss has public records"
        assert after is not None, "a sound plan with a bound on the loss has public records"
        if after.loss <= before.loss + most:  # not for a loss that is no number
            return ""
        self._known[number] = before  # the model is that of the round before
        change = f"from {before.loss:.4f} to {after.loss:.4f}"
        return f"the held-out loss would go {change}, and server.gate.loss is {most:g}"
