"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
kellerjordan.github.io/posts/muon): with momentum m, a matrix W and its gradient G take the step

    B <- m B + (1 - m) G,    W <- W - rate (weight_decay W + 0.2 sqrt(max(rows, columns)) O),
    O = NewtonSchulz(m B + (1 - m) G), five iterations: B with its singular values moved near 1.

The factor 0.2 sqrt(max(rows, columns)) gives a step the root mean square of an AdamW step (Liu et al. 2025, "Muon is
scalable for LLM training", eq. 4). Its best learning rate can still be another one (`docs/learning.md`).

These are the steps of `torch.optim.Muon`, bit for bit if the iterations are in bfloat16. That class always iterates in
bfloat16, which a processor without arithmetic for it emulates: a step then takes 17 times as long as in float32
(`benchmarks/muon.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, (X X^T) X and (X X^T)^2 X in an iteration (Jordan et al.)."""
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon on matrices; `state` ("momentum_buffer") is that of `torch.optim.Muon`.

    Args:
        matrices: Parameters of two dimensions, float32.
        lr: Learning rate.
        momentum: Nesterov's momentum m, from 0 to below 1.
        weight_decay: Decoupled weight decay.
        dtype: That of the iterations.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's also takes a closure; no caller has one
        """Take a step on each matrix that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                buffer = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
                direction = matrix.grad.lerp(buffer, momentum)
                matrix.mul_(1 - rate * group["weight_decay"])
                scaled = rate * (0.2 * math.sqrt(max(matrix.shape)))
                matrix.add_(orthogonalized(direction, self._dtype), alpha=-scaled)


def iterations_in(device: torch.device) -> torch.dtype:
    """The dtype of the iterations on a device.

    Tensor cores are made for bfloat16, in which Jordan et al. iterate; many processors have no arithmetic for it.
    """
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with its singular values moved near 1, by five iterations of a quintic polynomial (Jordan et al.).

    Args:
        matrix: Two dimensions.
        dtype: That of the iterations and of the result.
    """
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.to(dtype)
    found = found.T if tall else found  # the products of the smaller side are the cheaper ones
    found = found / found.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
