"""The server's optimizer: the mean update, negated, is a pseudo-gradient for a `torch.optim` optimizer.

Reddi et al. 2021 (Adaptive federated optimization), Douillard et al. 2023 (DiLoCo: Nesterov 0.9). SGD with learning
rate 1 and no momentum is exactly FedAvg. A step is post-processing of the sum: it costs no privacy.

A step goes block by block through the model, and takes no memory but the mean's, in which the new model is made:
`torch.optim` would hold several vectors of the model's size while it steps on all of it.

A round that trains a part of the model (`lm/model/schedule.py`) moves that part alone: the others keep their weights,
moments and numbers of steps, of which each parameter then has its own.

Another optimizer is a name in `server.optimizer`, and a line in `OPTIMIZERS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from cloister.aggregation.features.feature import AtCoordinator, Basis, Feature, Given, State
from cloister.aggregation.vector.rotation import Floats
from cloister.protocol.errors import UpdateError
from cloister.protocol.messages.blocks import all_finite
from cloister.protocol.plan.plan import ServerSection

if TYPE_CHECKING:  # torch takes seconds to import, and displays need the figures of features alone
    from torch import Tensor, nn, optim

_BLOCK = 2**18
"""Elements that step together: what torch makes for them, a few arrays of 1 MB, does not count beside a large model."""
_STEPS = "step"
"""What `torch.optim` calls the number of steps; everything else of a state is as long as the parameter."""


class Kind(NamedTuple):
    """An optimizer of the mean."""

    make: Callable[[nn.Parameter, ServerSection], optim.Optimizer]
    """Makes it for a part of the model."""
    keeps: tuple[str, ...] = ()
    """Its state, by the names that `torch.optim` gives it; zeros before the first step."""

    @property
    def moments(self) -> int:
        """Vectors of the model's size that it keeps beside the model."""
        return len(set(self.keeps) - {_STEPS})


def _fedavg(part: nn.Parameter, section: ServerSection) -> optim.Optimizer:
    from torch.optim import SGD

    return SGD([part], lr=section.learning_rate)


def _nesterov(part: nn.Parameter, section: ServerSection) -> optim.Optimizer:
    from torch.optim import SGD

    return SGD([part], lr=section.learning_rate, momentum=section.momentum, nesterov=True)


def _adam(part: nn.Parameter, section: ServerSection) -> optim.Optimizer:
    from torch.optim import Adam

    return Adam([part], lr=section.learning_rate, betas=section.betas, eps=section.epsilon)


OPTIMIZERS: dict[str, Kind] = {
    "fedavg": Kind(_fedavg),
    "nesterov": Kind(_nesterov, ("momentum_buffer",)),
    "adam": Kind(_adam, (_STEPS, "exp_avg", "exp_avg_sq")),
}
"""Those that `server.optimizer` names."""


class ServerOptimizer(AtCoordinator):
    """The optimizer of a run, with its state."""

    def __init__(self, basis: Basis, given: Given) -> None:
        super().__init__(basis, given)
        self._basis = basis
        self._kind = OPTIMIZERS[basis.plan.server.optimizer]
        self._kept: dict[str, Tensor] = {}

    def step(self, weights: Floats, mean: Floats, rounds: Sequence[int]) -> None:
        """As `AtCoordinator.step`; the new model is made in the memory of the mean.

        Raises:
            UpdateError: the step gives a non-finite value; the model is unchanged, the moments are not.
        """
        import torch

        model, moved, kept = torch.from_numpy(weights), torch.from_numpy(mean), self._kept
        if not kept:
            kept |= {name: torch.zeros(self._size(name, len(weights))) for name in self._kind.keeps}
        before = {name: value.clone() for name, value in kept.items() if name == _STEPS}
        blocks = list(self._blocks(len(weights), rounds))
        for number, block, own in blocks:
            stepped = torch.nn.Parameter(model[block].clone())
            stepped.grad = -moved[own]
            optimizer = self._kind.make(stepped, self.plan.server)
            state = optimizer.state[stepped]
            for name, value in kept.items():  # blocks of a parameter begin with the same number of steps
                state[name] = before[name][number].clone() if name == _STEPS else value[block]
            optimizer.step()
            for name, value in kept.items():
                value[number if name == _STEPS else block] = state[name]
            moved[own] = stepped.detach()
        if not all_finite(mean):
            raise UpdateError(
                "global model", "non-finite", expected="finite weights", fix="lower server.learning_rate"
            )
        for _, block, own in blocks:
            model[block] = moved[own]

    def undo(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """As `AtCoordinator.undo`."""
        self.restore(state)

    def names(self) -> Collection[str]:
        """As `AtCoordinator.names`."""
        return self._kind.keeps

    def state(self) -> State:
        """As `AtCoordinator.state`."""
        return {name: value.numpy() for name, value in self._kept.items()}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """As `AtCoordinator.restore`."""
        import torch

        self._kept = {name: torch.tensor(value) for name, value in state.items()}

    def _size(self, name: str, parameters: int) -> int:
        """Elements of a state: one for each number of steps, or for each parameter of the model."""
        if name != _STEPS:
            return parameters
        schedule = self._basis.schedule
        return len(schedule.layout.names) if self.plan.scheduled and schedule is not None else 1

    def _blocks(self, parameters: int, rounds: Sequence[int]) -> Iterator[tuple[int, slice, slice]]:
        """What steps together: the place of its number of steps, and its own in the model and in the mean."""
        trained, schedule = self._basis.trained_in(rounds), self._basis.schedule
        if trained is None or schedule is None:
            for begin in range(0, parameters, _BLOCK):
                yield 0, slice(begin, begin + _BLOCK), slice(begin, begin + _BLOCK)
            return
        places = {name: place for place, name in enumerate(schedule.layout.names)}
        for name, (first, end) in zip(trained.names, itertools.pairwise(trained.offsets), strict=True):
            number = places[name]
            shift = schedule.layout.offsets[number] - first
            for begin in range(first, end, _BLOCK):
                own = slice(begin, min(begin + _BLOCK, end))
                yield number, slice(own.start + shift, own.stop + shift), own


FEATURE = Feature("optimizer", wanted=lambda _basis: True, coordinator=ServerOptimizer)
