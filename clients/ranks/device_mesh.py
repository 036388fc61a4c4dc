"""The devices of a site, and the device mesh on which they train a plan's model."""

from __future__ import annotations

import os
import re
from dataclasses import fields

import torch

from cloister.lm.model.model import configuration, count_parameters, device_for
from cloister.lm.parallel.mesh import Mesh, choose
from cloister.lm.tasks.registry import task_of
from cloister.lm.training.optimizer import optimizer_of
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import MeshSection, Plan

RANKS_PER_PROCESSOR = 4
"""Most ranks of a site on the CPU, for each of its processors: more only wait for each other."""
_ALONE = "one device without checkpointing and compile"


def several(mesh: Mesh, section: MeshSection) -> bool:
    """Whether processes of their own train on a mesh: on several devices, or with what changes the model."""
    return mesh.size > 1 or section.checkpointing or section.compile


def mesh_for(
    plan: Plan, section: MeshSection, device: str, *, elsewhere: bool = False
) -> tuple[Mesh, list[str]]:
    """The mesh of a site, checked against its devices and the plan, and the torch device of each rank; starts nothing.

    On the CPU each rank is a process, so there is a device for every rank that is asked for, and one if none is.

    Args:
        plan: The plan.
        section: The site's `[mesh]`.
        device: The site's `device`: `auto` (all GPUs that this process sees, else the CPU) or a torch device.
        elsewhere: The mesh is for another machine, which has the GPUs that this one lacks.

    Raises:
        ModelError: there is no such device, there are too few, or the mesh does not fit the model.
    """
    here = devices_of(device, elsewhere=elsewhere)
    precision = plan.model.adapter.base_precision
    asked = [getattr(section, degree.name) for degree in fields(Mesh)]
    if any(asked):
        mesh = Mesh(*(degree or 1 for degree in asked))
    elif len(here) > 1 and precision == "float32" and not plan.charged_evaluations:
        everything, trained, _ = count_parameters(plan)
        memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in here)
        mesh = choose(len(here), memory, trained, everything - trained, private=plan.privacy.dpsgd)
        alone = optimizer_of(plan.local).matrices or plan.privacy.method == "opacus"
        if mesh.shard > 1 and alone:
            mesh = Mesh()
    else:
        mesh = Mesh()
    if not several(mesh, section):
        return mesh, here[:1]
    if precision != "float32":
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected=f"{_ALONE}, because model.adapter.base_precision is '{precision}'",
            fix="remove the site's mesh",
        )
    _check_evaluations(plan, mesh)
    if task_of(plan.data).auto.head and mesh.tensor > 1:
        raise ModelError(
            "mesh.tensor",
            mesh.tensor,
            expected=f"1 with data.task = {plan.data.task!r}: the head of a classifier is not divided",
            fix="set mesh.shard or mesh.replicate instead",
        )
    _check_optimizer(plan, mesh)
    if plan.privacy.dpsgd and section.compile:
        raise ModelError(
            "mesh.compile",
            True,
            expected=f"false with privacy.unit = '{plan.privacy.unit}': which code computes a gradient depends "
            "on the units before it",
            fix="remove compile from the site's mesh",
        )
    if plan.privacy.method == "opacus" and (mesh.size > mesh.replicate or section.checkpointing):
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected="only replicate above 1, without checkpointing, because privacy.method is 'opacus'",
            fix='set mesh.replicate instead, or use a plan with privacy.method = "reference"',
        )
    devices = devices_for_ranks(here, mesh.size)
    if elsewhere and device in ("auto", "cuda") and len(devices) < mesh.size:
        devices = [f"cuda:{number}" for number in range(mesh.size)]
    mesh.check(len(devices), configuration(plan), plan.model.adapter.scheme)
    return mesh, devices[: mesh.size]


def _check_evaluations(plan: Plan, mesh: Mesh) -> None:
    """Refuse a mesh where one process must have the whole model."""
    if plan.charged_evaluations:
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected=f"{_ALONE}, because with server.evaluation_epsilon one process puts each unit through the model",
            fix="remove the site's mesh",
        )


def _check_optimizer(plan: Plan, mesh: Mesh) -> None:
    """Refuse a mesh whose ranks would have too little of the model to step on."""
    if optimizer_of(plan.local).matrices and mesh.shard * mesh.tensor > 1:
        raise ModelError(
            "mesh",
            mesh.degrees(),
            expected=f"shard 1 and tensor 1, because local.optimizer = '{plan.local.optimizer}' needs whole matrices",
            fix="set mesh.replicate instead, or use a plan with local.optimizer = 'adamw'",
        )


def devices_of(device: str, *, elsewhere: bool = False) -> list[str]:
    """The torch devices that a site's `device` means: one, or all GPUs that this process sees.

    Args:
        device: `auto` (all GPUs, else the CPU) or a torch device.
        elsewhere: A GPU may be one that this machine lacks.

    Raises:
        ModelError: there is no such device.
    """
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if gpus and device in ("auto", "cuda"):
        return gpus
    if elsewhere and re.fullmatch(r"cuda(:\d+)?", device):
        return ["cuda:0" if device == "cuda" else device]
    return [str(device_for(device))]


def devices_for_ranks(devices: list[str], ranks: int) -> list[str]:
    """A device for each rank that the devices of a site have room for: on the CPU each rank is a process."""
    return (
        devices * min(ranks, RANKS_PER_PROCESSOR * (os.cpu_count() or 1)) if devices == ["cpu"] else devices
    )


def is_here(device: str) -> bool:
    """Whether this machine has a torch device, named as `mesh_for` names it."""
    return device == "cpu" or int(device.removeprefix("cuda:")) < torch.cuda.device_count()


def memory_of(device: str) -> int:
    """Bytes of memory of a device that is here; the CPU's is that of the machine, which its ranks share."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)
