"""The devices of a site, and the mesh on which they train a plan's model."""

from __future__ import annotations

import os

import torch

from cloister.lm.mesh import Mesh, choose
from cloister.lm.model import configuration, count_parameters, device_for
from cloister.protocol.errors import ModelError
from cloister.protocol.plan import MeshSection, Plan

RANKS_PER_PROCESSOR = 4
"""Most ranks of a site on the CPU, for each of its processors: more only wait for each other."""
_ALONE = "one device without checkpointing and compile"


def several(mesh: Mesh, section: MeshSection) -> bool:
    """Whether processes of their own train on a mesh: on several devices, or with what changes the model."""
    return mesh.size > 1 or section.checkpointing or section.compile


def mesh_for(plan: Plan, section: MeshSection, device: str) -> tuple[Mesh, list[str]]:
    """The mesh of a site, checked against its devices and the plan, and the torch device of each rank; starts nothing.

    On the CPU each rank is a process, so there is a device for every rank that is asked for, and one if none is.

    Args:
        plan: The plan.
        section: The site's `[mesh]`.
        device: The site's `device`: `auto` (all GPUs that this process sees, else the CPU) or a torch device.

    Raises:
        ModelError: there is no such device, there are too few, or the mesh does not fit the model.
    """
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    here = gpus if gpus and device in ("auto", "cuda") else [str(device_for(device))]
    asked = (section.replicate, section.shard, section.tensor, section.pipeline)
    if any(asked):
        mesh = Mesh(*(degree or 1 for degree in asked))
    elif len(here) > 1 and plan.model.adapter.base_precision == "float32":
        everything, trained = count_parameters(plan)
        memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in here)
        mesh = choose(len(here), memory, trained, everything - trained, private=plan.privacy.dpsgd)
        if mesh.shard > 1 and plan.local.optimizer == "muon":
            mesh = Mesh()
    else:
        mesh = Mesh()
    if not several(mesh, section):
        return mesh, here[:1]
    precision = plan.model.adapter.base_precision
    if precision != "float32":
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected=f"{_ALONE}, because model.adapter.base_precision is '{precision}'",
            fix="remove the site's mesh",
        )
    if plan.local.optimizer == "muon" and mesh.shard * mesh.tensor > 1:
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected="shard 1 and tensor 1, because Muon needs whole matrices",
            fix="set mesh.replicate instead, or use a plan with local.optimizer = 'adamw'",
        )
    if plan.privacy.method == "opacus" and (
        mesh.size > mesh.replicate or section.checkpointing or section.compile
    ):
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected="only replicate above 1, without checkpointing and compile, because privacy.method is 'opacus'",
            fix="set mesh.replicate instead, or use a plan with privacy.method = 'auto'",
        )
    processes = RANKS_PER_PROCESSOR * (os.cpu_count() or 1)
    devices = here * min(mesh.size, processes) if here == ["cpu"] else here
    mesh.check(len(devices), configuration(plan), plan.model.adapter.scheme)
    return mesh, devices[: mesh.size]
