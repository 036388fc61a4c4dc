"""A model on a mesh: tensor parallelism, checkpointing, compilation, sharding, memory, in this order.

Each step needs the ones before it: sharding divides what tensor parallelism has left of a parameter, its hooks lie
around compiled blocks, and memory is allocated when every rank's part of each parameter is known. No step renames a
parameter, because names are the layout, and none communicates weights: each rank has the same values, or none yet.

Gradients are summed over ranks and not averaged, because each rank's loss is divided by the tokens of the whole step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from cloister.lm.model.model import LanguageModel
from cloister.lm.model.origin import plain
from cloister.lm.parallel.mesh import Mesh, check_styles, degrees


def parallelize(
    model: LanguageModel,
    ranks: DeviceMesh | None,
    device: torch.device,
    *,
    checkpointing: bool = False,
    compile: bool = False,
    sum_replicas: bool = True,
) -> None:
    """Divide a model among the ranks of a mesh, in place; every rank calls it with the same model.

    Args:
        model: The model on the CPU, whose parameters have the same values in every rank; or without values
            (`load_model(empty=True)`), which the first round's global model then gives.
        ranks: The mesh, from `mesh.build`, which fits the model (`Mesh.check`); None for one process, for which only
            steps 2, 3 and 5 do anything.
        device: This rank's device.
        checkpointing: Compute the activations of each block again in the backward pass instead of keeping them.
        compile: Compile each block with `torch.compile`.
        sum_replicas: Sum gradients over sharded replicas in a backward pass; otherwise each replica keeps its own, as
            gradients of single units must be clipped before they are summed.

    Raises:
        ModelError: the tensor-parallel plan of the model's output layer has an unknown style.
    """
    mesh = Mesh() if ranks is None else degrees(ranks)
    # transformers and PEFT know the model without its adapter by these names.
    inner: Any = plain(model.module)

    # 1. Tensor parallelism.
    if ranks is not None and mesh.tensor > 1:
        plan = _tensor_plan(inner, mesh)
        parallelize_module(inner, ranks["tensor"], plan, src_data_rank=None)

    blocks = list(_blocks(inner))

    # 2. Activation checkpointing.
    if checkpointing:
        for block in blocks:  # `forward`, because the hooks of sharding must not run again with it
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    # 3. Compilation.
    if compile:
        for block in blocks:
            block.compile()

    # 4. Sharding. Replicas that are not sharded need nothing: `Shards.add_replicas` sums their gradients.
    if ranks is not None and mesh.shard > 1:
        # The logits are a view, which only an operation in place could harm.
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning
        )
        data = ranks["replicate", "shard"] if mesh.replicate > 1 and sum_replicas else ranks["shard"]
        for part in (*blocks, model.module):
            sharded: Any = fully_shard(part, mesh=data)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)

    # 5. Memory.
    _allocate(model.module, device)


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are gathered when they are needed; the root is the first."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _blocks(inner: Any) -> Iterator[nn.Module]:
    """The blocks: what transformers never splits between devices; not the embedding, which may be tied."""
    whole, embedding = set(getattr(inner, "_no_split_modules", None) or ()), inner.get_input_embeddings()
    named = (module for module in inner.modules() if type(module).__name__ in whole)
    return (module for module in named if all(part is not embedding for part in module.modules()))


def _tensor_plan(inner: Any, mesh: Mesh) -> dict[str, ParallelStyle]:
    """The styles of the modules that the model's own plan names; a tied output layer stays whole with the embedding."""
    prefix = f"{inner.base_model_prefix}."
    named = {prefix + name: style for name, style in (inner.config.base_model_tp_plan or {}).items()}
    if not inner.config.tie_word_embeddings:
        named |= dict(type(inner)._tp_plan or {})
    check_styles(named, inner.config.model_type, mesh.tensor)
    return {name: _style(style) for name, style in named.items()}


def _style(name: str) -> ParallelStyle:
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    }
    # A norm of the heads that this rank has: its gradient is the sum over the ranks of a tensor group. The dimension
    # does not matter, as long as the norm is not over it.
    return styles.get(name) or SequenceParallel(use_local_output=True)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give memory on the device to the parameters that have none, and move the others; buffers keep their values."""
    if any(parameter.is_meta for parameter in module.parameters()):
        buffers = {name: buffer.to(device, copy=True) for name, buffer in module.named_buffers()}
        module.to_empty(device=device)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        tie: Any = module.tie_weights  # a plain tied parameter has become two
        tie()
    module.to(device)
