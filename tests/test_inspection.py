"""What a simulation alone can see."""

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cloister.clients.resident import Resident
from cloister.lm.layout import Layout
from cloister.server.folder import RunFolder
from cloister.simulations.federation import open_site
from cloister.simulations.inspection import adapter_error, aggregation_error
from cloister.tests.federation import CENTRAL, Federation, tiny


def finished(folder: Path, *settings: str) -> list[Path]:
    """The files that a simulated site has with its updates, after it has contributed."""
    federation = Federation(folder, tiny("model.adapter.scheme=lora", "model.adapter.rank=1", *settings))
    site = open_site(federation.sites_folder, federation.plan, 0, Resident())
    site.join(federation.join_request())
    for number in (1, 2):
        site.contribute(federation.request(number=number))
    return sorted(site.config.folder.glob("trained-*"))


def test_a_simulation_keeps_the_last_update_without_privacy_and_none_with_a_unit(tmp_path: Path) -> None:
    (path,) = finished(tmp_path / "open", "aggregation.secure=false")
    assert path.name == "trained-00002.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert finished(tmp_path / "private", *CENTRAL) == []


def test_there_is_no_error_to_see_where_ranks_have_trained(tmp_path: Path) -> None:
    """The error of the sites alone that keep a whole update would be another figure."""
    lora = ["model.adapter.scheme=lora", "simulation.profiles=[{share=0.25,mesh={shard=2}}]"]
    with RunFolder.create(tmp_path / "run", tiny(*lora)) as folder:
        assert aggregation_error(folder) is None


def two_factors() -> Layout:
    shapes = {"x.lora_A.w": (2, 5), "x.lora_B.w": (4, 2)}
    return Layout.of([(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()])


def test_the_error_of_averaging_factors_apart_is_its_definition() -> None:
    layout, random = two_factors(), np.random.default_rng(0)
    start = random.normal(size=layout.size).astype(np.float32)
    updates = [(weight, random.normal(size=layout.size).astype(np.float32)) for weight in (1.0, 2.0, 5.0)]
    weights = np.array([weight for weight, _ in updates]) / 8
    locals_ = [layout.split(start + update) for _, update in updates]
    factors_a = np.array([local["x.lora_A.w"] for local in locals_])
    factors_b = np.array([local["x.lora_B.w"] for local in locals_])
    mean_product = np.einsum("n,nij,njk->ik", weights, factors_b, factors_a)
    product_of_means = np.einsum("n,nij->ij", weights, factors_b) @ np.einsum("n,njk->jk", weights, factors_a)
    expected = np.linalg.norm(mean_product - product_of_means) / np.linalg.norm(mean_product)
    assert adapter_error(layout, start, updates) == pytest.approx(expected, rel=1e-5)
    assert expected > 0.1


def test_training_one_factor_at_a_time_has_no_error() -> None:
    layout, random = two_factors(), np.random.default_rng(0)
    start = random.normal(size=layout.size).astype(np.float32)
    updates = []
    for weight in (1.0, 2.0):
        update = random.normal(size=layout.size).astype(np.float32)
        layout.split(update)["x.lora_A.w"][:] = 0
        updates.append((weight, update))
    assert adapter_error(layout, start, updates) < 1e-6
