"""Figures that only a simulation has, because one process reads every site's folder; never part of a deployment."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from cloister.aggregation.average import weight_of
from cloister.lm.layout import Layout
from cloister.lm.model import load_model
from cloister.protocol.plan import MeshSection, Plan
from cloister.server.checkpoint import Checkpoints
from cloister.server.folder import RunFolder
from cloister.simulations import trained
from cloister.simulations.partition import site_name

Vector = npt.NDArray[np.float32]


def aggregation_error(folder: RunFolder) -> float | None:
    """The error of averaging A and B separately, instead of their products, in the last round of a `lora` run.

    ||sum_i w_i B_i A_i - (sum_i w_i B_i)(sum_i w_i A_i)|| / ||sum_i w_i B_i A_i||, Frobenius norm over all adapted
    layers, with w_i the sites' weights. It is 0 for schemes that train one factor at a time.

    Returns:
        The relative error; None for another scheme, with a privacy unit, if the sites' updates were
        removed, or where a site's ranks have trained: none of them has a whole update.
    """
    plan = folder.plan
    if not trained.kept(plan) or any(each.mesh != MeshSection() for each in plan.simulation.profiles):
        return None
    layout = load_model(plan).layout
    start = Checkpoints(folder.checkpoints, layout, plan.server.keep_checkpoints).load(plan.run.rounds - 1)
    updates = _updates(folder, plan)
    return adapter_error(layout, start.weights, updates) if updates else None


def adapter_error(layout: Layout, start: Vector, updates: list[tuple[float, Vector]]) -> float:
    """The error that `aggregation_error` defines, from the round's start and each site's weight and update."""
    whole = sum(weight for weight, _ in updates)
    products: defaultdict[str, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(()))
    factors: defaultdict[str, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(()))
    for weight, update in updates:
        parts = layout.split(start + update)
        for name, part in parts.items():
            factors[name] = factors[name] + weight / whole * part.astype(np.float64)
            if ".lora_B." in name:
                other = parts[name.replace(".lora_B.", ".lora_A.")].astype(np.float64)
                products[name] = products[name] + weight / whole * (part.astype(np.float64) @ other)
    norms = [
        (
            float(np.sum((product - factors[name] @ factors[name.replace(".lora_B.", ".lora_A.")]) ** 2)),
            float(np.sum(product**2)),
        )
        for name, product in products.items()
    ]
    wrong, right = (sum(column) for column in zip(*norms, strict=True))
    return float(np.sqrt(wrong / right)) if right else 0.0


def _updates(folder: RunFolder, plan: Plan) -> list[tuple[float, Vector]]:
    """Weight and update of each site that still has its update of the last round."""
    found = []
    for index in range(plan.cohort.sites):
        update = trained.load(folder.sites.state(site_name(index)), plan.run.rounds)
        if update is not None:
            tokens, vector = update
            aggregation = plan.aggregation
            by_tokens = weight_of(tokens, plan.most_labels(), aggregation.temperature)
            found.append((float(by_tokens) if aggregation.weighting == "tokens" else 1.0, vector))
    return found
