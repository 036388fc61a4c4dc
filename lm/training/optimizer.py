"""A site's optimizer: what steps on which parameter, and the learning rate of the run's steps.

`local.optimizer = "adamw"` is AdamW (Loshchilov & Hutter 2019) on every parameter. `"muon"` is Muon
(`lm/training/muon.py`) on the matrices of hidden layers. Jordan et al. and `torch.optim.Muon` keep it to those:
embeddings, the output layer, gains and biases take AdamW steps, and so do parameters of three or more dimensions.
With an adapter, Muon steps on each factor of a hidden layer, A (rank, in) and B (out, rank), as on a matrix of its own.
Neither source covers factors: what is orthogonalized is the step of a factor, not the change of the product B A. A head
that is trained whole beside an adapter takes AdamW steps, as without one.

`"sgd"` is plain stochastic gradient descent, W <- W - rate (weight_decay W + G), which keeps no state.

The learning rate follows the steps of the whole run, not of the round, and those of the plan: a site that takes more or
fewer than `local.steps` in a round (`local.balance`) goes through the same part of the schedule in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cloister.lm.model.model import heads_of, is_classifier, plain
from cloister.lm.training.muon import Muon, iterations_in
from cloister.protocol.plan.plan import LocalSection, Plan


class LocalOptimizer:
    """The plan's optimizer of a round's parameters.

    Args:
        plan: The plan.
        module: The plan's model, which says what is a hidden layer.
        trained: Names and parameters that the round trains.
        device: Device of the parameters.
    """

    def __init__(
        self, plan: Plan, module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]], device: torch.device
    ) -> None:
        local = self._local = plan.local
        self._whole_run = plan.run.rounds * local.steps
        self._trained = trained
        by_muon = hidden_matrices(module) if local.optimizer == "muon" else set()
        matrices = [parameter for name, parameter in trained if name in by_muon]
        others = [parameter for name, parameter in trained if name not in by_muon]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            rate, momentum, decay = local.learning_rate, local.momentum, local.weight_decay
            dtype = iterations_in(device)
            self._parts.append(Muon(matrices, lr=rate, momentum=momentum, weight_decay=decay, dtype=dtype))
        if others:
            self._parts.append(_by_element(others, local, device))

    def step(self, number: float) -> None:
        """Step with the learning rate of the plan's local step `number` of the run, from 0; drop the gradients."""
        rate = learning_rate(self._local, number, self._whole_run)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def states(self) -> dict[str, tuple[torch.Tensor | None, list[torch.Tensor]]]:
        """By parameter the steps that AdamW has taken, float32 of one element, and the moments in its shape.

        They are the optimizer's own, zeros before a first step; a caller may set them.
        """
        part_of = {
            id(p): part for part in self._parts for group in part.param_groups for p in group["params"]
        }
        return {name: _state(part_of[id(parameter)], parameter) for name, parameter in self._trained}


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
    if plan.local.optimizer == "sgd":
        return 0
    by_muon = hidden_matrices(module) if plan.local.optimizer == "muon" else set()
    return sum(elements * (1 if name in by_muon else 2) for name, elements in trained.items())


def hidden_matrices(module: nn.Module) -> set[str]:
    """The names of a model's 2-D parameters that belong to no embedding and not to its output layer or head.

    Of a layer with an adapter these are its weight, which is frozen, and both factors. The factors of an adapter of the
    output layer belong to that layer.
    """
    causal: Any = module  # transformers leaves the method untyped
    heads = [causal.get_output_embeddings()]
    if is_classifier(module):
        classifier = plain(module)  # the children of an adapter are no heads
        heads = [getattr(classifier, name) for name in heads_of(classifier)]
    outer = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    outer += [head for head in heads if head is not None]
    excluded = {id(parameter) for layer in outer for parameter in layer.parameters()}
    return {name for name, p in module.named_parameters() if p.ndim == 2 and id(p) not in excluded}


def _by_element(
    parameters: list[nn.Parameter], local: LocalSection, device: torch.device
) -> torch.optim.Optimizer:
    groups, rate = _decayed(parameters, local), local.learning_rate
    if local.optimizer == "sgd":
        # Without momentum, torch's weight decay is the decoupled one: it is added to the gradient that was clipped.
        return torch.optim.SGD(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, betas=local.betas, fused=device.type in ("cpu", "cuda"))


def _decayed(parameters: list[nn.Parameter], local: LocalSection) -> list[dict[str, Any]]:
    """Groups of parameters: those of two or more dimensions have weight decay."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": local.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _state(
    part: torch.optim.Optimizer, parameter: nn.Parameter
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """A parameter's steps and moments; before the first step they are made here as torch makes them then."""
    state, names = part.state[parameter], _MOMENTS[type(part)]
    if isinstance(part, torch.optim.AdamW) and "step" not in state:
        state["step"] = torch.zeros((), device=parameter.device)
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(parameter)
    return state.get("step"), [state[name] for name in names]


_MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
}
