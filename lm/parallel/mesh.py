"""The mesh of a site: how its processes, one for each device (ranks), divide one model and its batches among them.

Three degrees, whose product is the number of ranks:

- `replicate`: copies of the model, each on other rows of a batch.
- `shard`: ranks that share one copy and gather a layer's weights when they need them (FSDP; Rajbhandari et al. 2020,
  "ZeRO: memory optimizations toward training trillion parameter models"), each on other rows of a batch.
- `tensor`: ranks that divide each matrix product of a layer, on the same rows (Shoeybi et al. 2019, "Megatron-LM:
  training multi-billion parameter language models using model parallelism").

Ranks are numbered in the order of the fields of `Coordinates`. Replicas are the outermost dimension because they
communicate least, once in a step; `tensor` is the innermost, because its ranks communicate in every layer. So ranks
that communicate most are neighbours.

A mesh is checked before a process starts (`Mesh.check`), and again when the processes are connected (`build`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cloister.protocol.errors import ModelError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

STYLES = frozenset(
    {
        "colwise",
        "colwise_rep",
        "colwise_gather_output",
        "rowwise",
        "rowwise_split_input",
        "replicated_with_grad_allreduce",
    }
)
"""Entries of a model's tensor-parallel plan that `parallelize.py` can apply."""
STATE_BYTES = 16
"""Bytes for each trained parameter: weight, gradient and AdamW's two moments, in float32."""
SUM_BYTES = 20
"""Bytes for each trained parameter more where gradients of single units are clipped: an integer sum (8 bytes), and its
release in float64 and float32."""
WEIGHT_BYTES = 4
"""Bytes for each frozen parameter: a weight in float32."""
FOR_STATE = 0.7
"""Fraction of a device's memory that parameters and their state may take; the rest is for activations."""


class Coordinates(NamedTuple):
    """The place of a rank in its mesh, each from 0; the outermost dimension is the first."""

    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Mesh:
    """The degrees of a mesh."""

    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that share the weights of one copy."""
    tensor: int = 1
    """Ranks that divide each matrix product."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor

    @property
    def data(self) -> int:
        """Parts into which a micro-batch is divided."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank (from 0): ranks that differ only in `tensor` follow each other."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        return Coordinates(rest, shard, tensor)

    def check(self, devices: int, config: PreTrainedConfig, adapter: str) -> None:
        """Check that a site can train a model on this mesh; starts nothing.

        Args:
            devices: Devices that the site has for its ranks.
            config: Configuration of the model.
            adapter: The plan's `model.adapter.scheme`.

        Raises:
            ModelError: there are too few devices, or tensor parallelism does not fit the model.
        """
        self.check_devices(devices, "lower a degree, or remove [mesh]")
        if self.tensor == 1:
            return
        if adapter != "full":
            raise self._tensor(f"1 with model.adapter.scheme = '{adapter}'", "set mesh.shard instead")
        text = config.get_text_config()
        check_styles(getattr(text, "base_model_tp_plan", None) or {}, text.model_type, self.tensor)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            value = getattr(text, name, None)
            if isinstance(value, int) and value % self.tensor:
                raise self._tensor(f"a divisor of the model's {name} = {value}", "")

    def check_devices(self, devices: int, fix: str) -> None:
        """Check that there are as many devices as ranks.

        Raises:
            ModelError: there are too few; it says the fix.
        """
        if self.size > devices:
            raise ModelError(
                "mesh",
                self.degrees(),
                expected=f"a product of at most {devices}, the site's devices, but it is {self.size}",
                fix=fix,
            )

    def degrees(self) -> str:
        """The degrees in words, such as `replicate 2, shard 1, tensor 4`."""
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))

    def _tensor(self, expected: str, fix: str) -> ModelError:
        return ModelError("mesh.tensor", self.tensor, expected=expected, fix=fix)


def check_styles(plan: dict[str, str], model_type: str, tensor: int) -> None:
    """Check that a model's tensor-parallel plan can be applied.

    Args:
        plan: Names of modules with the style of each.
        model_type: The model's type, for the error.
        tensor: The degree, for the error.

    Raises:
        ModelError: the plan is empty or has an unknown style.
    """
    unknown = sorted(set(plan.values()) - STYLES)
    if plan and not unknown:
        return
    reason = f"has the styles {', '.join(unknown)}, which are not supported" if plan else "is missing"
    raise ModelError(
        "mesh.tensor",
        tensor,
        expected=f"1, because the tensor-parallel plan of the model type {model_type} {reason}",
        fix="set mesh.shard instead",
    )


def choose(
    devices: int, bytes_per_device: int, trained: int, frozen: int = 0, *, private: bool = False
) -> Mesh:
    """The mesh that `auto` means: replicas where the model and its state fit in one device, else shards.

    Args:
        devices: Devices that the site has for its ranks, 1 or more.
        bytes_per_device: Memory of the smallest of them.
        trained: Trained parameters.
        frozen: Frozen parameters.
        private: Whether gradients of single units are clipped.
    """
    each = STATE_BYTES + SUM_BYTES if private else STATE_BYTES
    fits = each * trained + WEIGHT_BYTES * frozen <= FOR_STATE * bytes_per_device
    return Mesh(replicate=devices) if fits else Mesh(shard=devices)


def build(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Connect the ranks of a mesh; every rank calls it after `init_process_group`, whose ranks are those of the mesh.

    Args:
        mesh: The mesh.
        device_type: `cpu` or `cuda`; for `cuda`, the current device is the rank's own.

    Returns:
        A mesh of torch whose dimensions are the fields of `Coordinates`.

    Raises:
        ModelError: the number of processes or this process's place in the mesh is another.
    """
    if dist.get_world_size() != mesh.size:
        raise ModelError(
            "mesh", mesh.degrees(), expected=f"a product of {dist.get_world_size()}, the processes started"
        )
    names = Coordinates._fields
    shape = tuple(getattr(mesh, name) for name in names)
    ranks = init_device_mesh(device_type, shape, mesh_dim_names=names)
    found, expected = ranks.get_coordinate(), mesh.coordinates(dist.get_rank())
    if tuple(found or ()) != expected:
        raise ModelError(f"place of rank {dist.get_rank()} in the mesh", found, expected=str(expected))
    return ranks


def degrees(ranks: DeviceMesh) -> Mesh:
    """The degrees of a mesh that `build` made."""
    return Mesh(*ranks.shape)
