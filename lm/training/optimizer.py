"""A site's optimizer: what steps on which parameter, and the learning rate of the run's steps.

`local.optimizer = "adamw"` is AdamW (Loshchilov & Hutter 2019) on every parameter. `"muon"` is Muon
(`lm/training/muon.py`) on the matrices of hidden layers. Jordan et al. and `torch.optim.Muon` keep it to those:
embeddings, the output layer, gains and biases take AdamW steps, and so do parameters of three or more dimensions.
With an adapter, Muon steps on each factor of a hidden layer, A (rank, in) and B (out, rank), as on a matrix of its own.
Neither source covers factors: what is orthogonalized is the step of a factor, not the change of the product B A. A head
that is trained whole beside an adapter takes AdamW steps, as without one.

`"sgd"` is plain stochastic gradient descent, W <- W - rate (weight_decay W + G), which keeps no state. An optimizer of
an installed package is a `Kind` that it registers in the group `cloister.optimizers` (docs/extend.md).

The learning rate follows the steps of the whole run, not of the round, and those of the plan: a site that takes more or
fewer than `local.steps` in a round (`local.balance`) goes through the same part of the schedule in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cloister.lm.model.model import class_of, heads_of
from cloister.lm.model.origin import plain
from cloister.lm.model.weights import Named
from cloister.lm.training.muon import Muon, iterations_in
from cloister.protocol.errors import PackageError
from cloister.protocol.machine.packages import load
from cloister.protocol.plan.plan import LocalSection, Plan
from cloister.protocol.plan.tasks import is_own

Parameters: TypeAlias = Sequence[nn.Parameter]

_STEPS = "step"
"""What `torch.optim` calls the number of steps; everything else of a state has the shape of the parameter."""


class Stepper(NamedTuple):
    """What steps on some parameters."""

    make: Callable[[Parameters, LocalSection, torch.device], Optimizer]
    """Makes it."""
    keeps: tuple[str, ...] = ()
    """Its state, by the names that `torch.optim` gives it; zeros before the first step."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What it keeps in the shape of a parameter."""
        return tuple(name for name in self.keeps if name != _STEPS)


class Kind(NamedTuple):
    """An optimizer that `local.optimizer` names."""

    others: Stepper
    """For all parameters but those of `matrices`."""
    matrices: Stepper | None = None
    """For the matrices of hidden layers, each of which it needs whole; None: they are no exception."""
    rms: Callable[[LocalSection, int], float] = lambda _local, _parameters: 1.0
    """About the largest root mean square of a step in units of the learning rate: of the plan's section, and the number
    of parameters that the step is over."""

    @property
    def vectors(self) -> int:
        """The most moments of a parameter."""
        return max(len(each.moments) for each in (self.others, self.matrices) if each is not None)

    def steppers(self, module: nn.Module, trained: Named) -> list[tuple[Stepper, Named]]:
        """Those that step on at least one parameter, each with its parameters; arguments as for `LocalOptimizer`."""
        hidden = set() if self.matrices is None else hidden_matrices(module)
        of_matrices = [(name, each) for name, each in trained if name in hidden]
        others = [(name, each) for name, each in trained if name not in hidden]
        shares = ((self.matrices, of_matrices), (self.others, others))
        return [(stepper, share) for stepper, share in shares if stepper is not None and share]


class LocalOptimizer:
    """The plan's optimizer of a round's parameters.

    Args:
        plan: The plan.
        module: The plan's model, which says what is a hidden layer.
        trained: Names and parameters that the round trains.
        device: Device of the parameters.
    """

    def __init__(self, plan: Plan, module: nn.Module, trained: Named, device: torch.device) -> None:
        local = self._local = plan.local
        self._whole_run = plan.run.rounds * local.steps
        kind = optimizer_of(local)
        self.vectors = kind.vectors
        """The most moments of a parameter."""
        self._parts = [
            (stepper, share, stepper.make([parameter for _, parameter in share], local, device))
            for stepper, share in kind.steppers(module, trained)
        ]

    def step(self, number: float) -> None:
        """Step with the learning rate of the plan's local step `number` of the run, from 0; drop the gradients."""
        rate = learning_rate(self._local, number, self._whole_run)
        for _, _, part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def states(self) -> dict[str, tuple[torch.Tensor | None, list[torch.Tensor]]]:
        """By parameter the number of steps, float32 of one element, where it is kept, and the moments in its shape.

        They are the optimizer's own, zeros before a first step; a caller may set them.
        """
        return {
            name: _state(stepper, part.state[parameter], parameter)
            for stepper, share, part in self._parts
            for name, parameter in share
        }


def optimizer_of(local: LocalSection) -> Kind:
    """The optimizer of a plan. That of a package is imported once its files were compared with the plan.

    Raises:
        PackageError: the package is absent, or another one than the plan names, or its name is no optimizer.
    """
    if not is_own(local.optimizer):
        return OPTIMIZERS[local.optimizer]
    assert local.package is not None, "a sound plan names its version and files"
    pin = local.package.version, local.package.sha256
    found = load("local.optimizer", "cloister.optimizers", local.optimizer, pin)
    if not isinstance(found, Kind):
        expected = "a cloister.lm.training.optimizer.Kind"
        raise PackageError("local.optimizer", local.optimizer, expected=expected)
    return found


def learning_rate(local: LocalSection, step: float, total: int) -> float:
    """Learning rate of local step `step` (from 0; it may be between two steps) of a run of `total`.

    Warm-up gives (step + 1) / (warmup_steps + 1) of the peak; then the peak, or the cosine of Loshchilov & Hutter 2017
    ("SGDR", eq. 5) from the peak at step `warmup_steps` to `final_learning_rate` of it at the last step, and there it
    stays.
    """
    if step < local.warmup_steps:
        return local.learning_rate * (step + 1) / (local.warmup_steps + 1)
    if local.schedule == "constant":
        return local.learning_rate
    done = min(1.0, (step - local.warmup_steps) / max(1, total - 1 - local.warmup_steps))
    final = local.final_learning_rate
    return local.learning_rate * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


def moment_elements(plan: Plan, module: nn.Module, trained: Mapping[str, int]) -> int:
    """Elements, in float32, of the moments that the plan's optimizer keeps; arguments as for `LocalOptimizer`, but of
    the parameters their elements by name."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if name in trained]
    steppers = optimizer_of(plan.local).steppers(module, named)
    return sum(len(stepper.moments) * trained[name] for stepper, share in steppers for name, _ in share)


def hidden_matrices(module: nn.Module) -> set[str]:
    """The names of a model's 2-D parameters that belong to no embedding and not to its output layer or head.

    Of a layer with an adapter these are its weight, which is frozen, and both factors. The factors of an adapter of the
    output layer belong to that layer.
    """
    causal: Any = module  # transformers leaves the method untyped
    heads = [causal.get_output_embeddings()]
    if class_of(module).head:
        classifier = plain(module)  # the children of an adapter are no heads
        heads = [getattr(classifier, name) for name in heads_of(classifier)]
    outer = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    outer += [head for head in heads if head is not None]
    excluded = {id(parameter) for layer in outer for parameter in layer.parameters()}
    return {name for name, p in module.named_parameters() if p.ndim == 2 and id(p) not in excluded}


def _muon(matrices: Parameters, local: LocalSection, device: torch.device) -> Optimizer:
    rate, momentum, decay = local.learning_rate, local.momentum, local.weight_decay
    return Muon(matrices, lr=rate, momentum=momentum, weight_decay=decay, dtype=iterations_in(device))


def _adamw(parameters: Parameters, local: LocalSection, device: torch.device) -> Optimizer:
    fused = device.type in ("cpu", "cuda")
    return AdamW(_decayed(parameters, local), lr=local.learning_rate, betas=local.betas, fused=fused)


def _sgd(parameters: Parameters, local: LocalSection, _: torch.device) -> Optimizer:
    # Without momentum, torch's weight decay is the decoupled one: it is added to the gradient that was clipped.
    return SGD(_decayed(parameters, local), lr=local.learning_rate)


def _decayed(parameters: Parameters, local: LocalSection) -> list[dict[str, Any]]:
    """Groups of parameters: those of two or more dimensions have weight decay."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": local.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _state(
    stepper: Stepper, state: dict[str, torch.Tensor], parameter: nn.Parameter
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """A parameter's steps and moments; before the first step they are made here as torch makes them then."""
    for name in stepper.keeps:
        if name not in state:
            state[name] = (
                torch.zeros((), device=parameter.device) if name == _STEPS else torch.zeros_like(parameter)
            )
    return state.get(_STEPS), [state[name] for name in stepper.moments]


_BY_ELEMENT = Stepper(_adamw, (_STEPS, "exp_avg", "exp_avg_sq"))

OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(_BY_ELEMENT),
    "muon": Kind(_BY_ELEMENT, matrices=Stepper(_muon, ("momentum_buffer",))),
    # A step is as long as the clipped gradient.
    "sgd": Kind(Stepper(_sgd), rms=lambda local, parameters: local.clip_norm / math.sqrt(parameters)),
}
