"""The coordinator's step: the mean update, negated, is a pseudo-gradient for a `torch.optim` optimizer.

Reddi et al. 2021 (Adaptive federated optimization), Douillard et al. 2023 (DiLoCo: Nesterov 0.9). SGD with learning
rate 1 and no momentum is exactly FedAvg. A step is post-processing of the sum: it costs no privacy.

A step goes block by block through the model, and takes no memory but the mean's, in which the new model is made:
`torch.optim` would hold several vectors of the model's size while it steps on all of it.

A round that trains a part of the model (`lm/model/schedule.py`) moves that part alone: the others keep their weights,
moments and numbers of steps, of which each parameter then has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from cloister.lm.model.layout import Layout
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import all_finite
from cloister.protocol.plan.plan import ServerSection

Vector = npt.NDArray[np.float32]

_BLOCK = 2**18
"""Elements that step together: what torch makes for them, a few arrays of 1 MB, does not count beside a large model."""
_STEPS = "step"
"""What `torch.optim` calls the number of steps; everything else of a state is as long as the parameter."""


class ServerOptimizer:
    """The global model as one flat vector, with the optimizer's state.

    Args:
        section: The optimizer and its constants.
        start: (d,) float32, the global model; it belongs to the optimizer afterwards, which writes into it.
        state: A result of `state()`, from which to continue; it belongs to the optimizer afterwards.
        layout: That of the model, where rounds train parts of it.
    """

    def __init__(
        self,
        section: ServerSection,
        start: Vector,
        state: Mapping[str, torch.Tensor] | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._section = section
        self._weights = start
        self._state = dict(state or {})
        self._layout = layout

    @property
    def weights(self) -> Vector:
        """(d,) float32, the global model; a read-only view that the next step changes."""
        view = self._weights.view()
        view.flags.writeable = False
        return view

    def step(self, mean_update: Vector, part: Layout | None = None) -> None:
        """Move the global model by the mean of the sites' updates.

        Args:
            mean_update: float32, the vector of what the round has trained; overwritten.
            part: What the round has trained; None: the whole model.

        Raises:
            UpdateError: the step gives a non-finite value; the model is unchanged, the moments are not.
        """
        weights, moved, before = torch.from_numpy(self._weights), torch.from_numpy(mean_update), self._state
        after: dict[str, torch.Tensor] = {}
        blocks = list(self._blocks(part))
        for number, block, own in blocks:
            stepped = torch.nn.Parameter(weights[block].clone())
            stepped.grad = -moved[own]
            optimizer = self._optimizer(stepped)
            for name, value in before.items():
                steps = value[number] if value.ndim else value
                optimizer.state[stepped][name] = steps.clone() if name == _STEPS else value[block]
            optimizer.step()
            for name, value in optimizer.state[stepped].items():
                if name == _STEPS and part is None:
                    after[name] = value
                    continue
                if name not in after:
                    after[name] = self._kept(name, before)
                after[name][number if name == _STEPS else block] = value
            moved[own] = stepped.detach()
        self._state = after
        if not all_finite(mean_update):
            raise UpdateError(
                "global model", "non-finite", expected="finite weights", fix="lower server.learning_rate"
            )
        for _, block, own in blocks:
            weights[block] = moved[own]

    def _blocks(self, part: Layout | None) -> Iterator[tuple[int, slice, slice]]:
        """What steps together: the number of its parameter, and its place in the model and in the mean."""
        if part is None:
            for begin in range(0, len(self._weights), _BLOCK):
                yield 0, slice(begin, begin + _BLOCK), slice(begin, begin + _BLOCK)
            return
        assert self._layout is not None, "a part of a model has a place in its layout"
        places = {name: place for place, name in enumerate(self._layout.names)}
        for name, (first, end) in zip(part.names, itertools.pairwise(part.offsets), strict=True):
            number = places[name]
            shift = self._layout.offsets[number] - first
            for begin in range(first, end, _BLOCK):
                own = slice(begin, min(begin + _BLOCK, end))
                yield number, slice(own.start + shift, own.stop + shift), own

    def _kept(self, name: str, before: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What is written for the parameters that step: the steps in memory of their own, because blocks of a parameter
        read them one after the other."""
        if name in before:
            return before[name].clone() if name == _STEPS else before[name]
        if name != _STEPS:
            return torch.zeros(len(self._weights))
        assert self._layout is not None, "a part of a model has a place in its layout"
        return torch.zeros(len(self._layout.names))

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


def moments(section: ServerSection) -> int:
    """Vectors of the model's size that an optimizer keeps beside the model: those after a step of one parameter."""
    optimizer = ServerOptimizer(section, np.zeros(1, np.float32))
    optimizer.step(np.zeros(1, np.float32))
    return len(optimizer.state().keys() - {_STEPS})
