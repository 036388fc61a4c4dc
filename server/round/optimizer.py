"""The coordinator's step: the mean update, negated, is a pseudo-gradient for a `torch.optim` optimizer.

Reddi et al. 2021 (Adaptive federated optimization), Douillard et al. 2023 (DiLoCo: Nesterov 0.9). SGD with learning
rate 1 and no momentum is exactly FedAvg. A step is post-processing of the sum: it costs no privacy.

A step goes block by block through the model, and takes no memory but the mean's, in which the new model is made:
`torch.optim` would hold several vectors of the model's size while it steps on all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import all_finite
from cloister.protocol.plan.plan import ServerSection

Vector = npt.NDArray[np.float32]

_BLOCK = 2**18
"""Elements that step together: what torch makes for them, a few arrays of 1 MB, does not count beside a large model."""


class ServerOptimizer:
    """The global model as one flat vector, with the optimizer's state.

    Args:
        section: The optimizer and its constants.
        start: (d,) float32, the global model; it belongs to the optimizer afterwards, which writes into it.
        state: A result of `state()`, from which to continue; it belongs to the optimizer afterwards.
    """

    def __init__(
        self, section: ServerSection, start: Vector, state: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._section = section
        self._weights = start
        self._state = dict(state or {})

    @property
    def weights(self) -> Vector:
        """(d,) float32, the global model; a read-only view that the next step changes."""
        view = self._weights.view()
        view.flags.writeable = False
        return view

    def step(self, mean_update: Vector) -> None:
        """Move the global model by the mean of the sites' updates.

        Args:
            mean_update: (d,) float32; overwritten.

        Raises:
            UpdateError: the step gives a non-finite value; the model is unchanged, the moments are not.
        """
        weights, moved, before = torch.from_numpy(self._weights), torch.from_numpy(mean_update), self._state
        after: dict[str, torch.Tensor] = {}
        for begin in range(0, len(weights), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            part = torch.nn.Parameter(weights[block].clone())
            part.grad = -moved[block]
            optimizer = self._optimizer(part)
            for name, value in before.items():
                optimizer.state[part][name] = value[block] if value.ndim else value.clone()
            optimizer.step()
            for name, value in optimizer.state[part].items():
                if not value.ndim:  # the number of steps
                    after[name] = value
                    continue
                if name not in after:
                    after[name] = before[name] if name in before else torch.empty_like(weights)
                after[name][block] = value
            moved[block] = part.detach()
        self._state = after
        if not all_finite(mean_update):
            raise UpdateError(
                "global model", "non-finite", expected="finite weights", fix="lower server.learning_rate"
            )
        weights.copy_(moved)

    def restore(self, weights: Vector, state: Mapping[str, torch.Tensor]) -> None:
        """Go back to an earlier model.

        Args:
            weights: (d,) float32; copied.
            state: A result of `state()`; it belongs to the optimizer afterwards.
        """
        self._weights[:] = weights
        self._state = dict(state)

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, which the next step changes; empty for FedAvg."""
        return dict(self._state)

    def _optimizer(self, part: torch.nn.Parameter) -> torch.optim.Optimizer:
        section = self._section
        match section.optimizer:
            case "fedavg":
                return torch.optim.SGD([part], lr=section.learning_rate)
            case "nesterov":
                return torch.optim.SGD(
                    [part], lr=section.learning_rate, momentum=section.momentum, nesterov=True
                )
            case "adam":
                return torch.optim.Adam(
                    [part], lr=section.learning_rate, betas=section.betas, eps=section.epsilon
                )
