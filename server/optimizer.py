"""The coordinator's step: the mean update, negated, is a pseudo-gradient for a `torch.optim` optimizer.

Reddi et al. 2021 (Adaptive federated optimization), Douillard et al. 2023 (DiLoCo: Nesterov 0.9). SGD with learning
rate 1 and no momentum is exactly FedAvg. A step is post-processing of the sum: it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from cloister.protocol.errors import UpdateError
from cloister.protocol.plan import ServerSection

Vector = npt.NDArray[np.float32]


class ServerOptimizer:
    """The global model as one flat vector, with the optimizer's state.

    Args:
        section: The optimizer and its constants.
        start: (d,) float32, the global model; copied.
        state: A result of `state()`, from which to continue.
    """

    def __init__(
        self, section: ServerSection, start: Vector, state: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._weights = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self._optimizer: torch.optim.Optimizer
        match section.optimizer:
            case "fedavg":
                self._optimizer = torch.optim.SGD([self._weights], lr=section.learning_rate)
            case "nesterov":
                self._optimizer = torch.optim.SGD(
                    [self._weights], lr=section.learning_rate, momentum=section.momentum, nesterov=True
                )
            case "adam":
                self._optimizer = torch.optim.Adam(
                    [self._weights], lr=section.learning_rate, betas=section.betas, eps=section.epsilon
                )
        if state:
            self._optimizer.state[self._weights] = {name: tensor.clone() for name, tensor in state.items()}

    @property
    def weights(self) -> Vector:
        """(d,) float32, the global model; a view that the next step changes."""
        view: Vector = self._weights.detach().numpy()
        return view

    def step(self, mean_update: Vector) -> None:
        """Move the global model by the mean of the sites' updates, (d,) float32.

        Raises:
            UpdateError: the step gives a non-finite value; the model is unchanged.
        """
        before = self._weights.detach().clone()
        self._weights.grad = torch.from_numpy(-mean_update)
        self._optimizer.step()
        self._weights.grad = None
        if not bool(torch.isfinite(self._weights).all()):
            self._weights.data.copy_(before)
            raise UpdateError(
                "global model", "non-finite", expected="finite weights", fix="lower server.learning_rate"
            )

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors; empty for FedAvg."""
        state = self._optimizer.state.get(self._weights, {})
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
