"""What a simulation alone can see."""

import numpy as np
import pytest
import torch
from torch import nn

from cloister.lm.layout import Layout
from cloister.simulations.inspection import adapter_error


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
