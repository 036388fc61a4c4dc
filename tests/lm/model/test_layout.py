"""The flat layout: flattening and restoring are inverse, and invalid vectors are refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cloister.lm.model import transfer
from cloister.lm.model.layout import Layout
from cloister.protocol.errors import UpdateError
from cloister.tests.tools.raises import raises


class Tied(nn.Module):
    """A linear head on its own embedding, as GPT-2 has."""

    def __init__(self) -> None:
        super().__init__()
        self.z_embedding = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.z_embedding.weight


def test_parameters_lie_in_the_order_of_their_names_and_tied_ones_once() -> None:
    module = Tied()
    layout = Layout.of(module.named_parameters())
    assert layout.names == ("body.bias", "body.weight", "z_embedding.weight")
    assert layout.offsets == (0, 3, 12, 27)
    assert layout.size == 27
    expected = [module.body.bias, module.body.weight, module.z_embedding.weight]
    np.testing.assert_array_equal(
        layout.flatten(module), torch.cat([p.detach().flatten() for p in expected]).numpy()
    )


def test_frozen_parameters_are_left_out() -> None:
    module = Tied()
    module.body.weight.requires_grad_(False)
    layout = Layout.of(module.named_parameters())
    assert layout.names == ("body.bias", "z_embedding.weight")
    before = module.body.weight.detach().clone()
    layout.scatter(np.ones(18, np.float32), module)
    assert torch.equal(module.body.weight, before)


shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6)


@given(shapes, st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_scatter_and_flatten_are_inverse(shapes: list[tuple[int, ...]], seed: int) -> None:
    module = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)})
    layout = Layout.of(module.named_parameters())
    assert layout.size == sum(map(math.prod, shapes))
    vector = np.random.default_rng(seed).standard_normal(layout.size, dtype=np.float32)
    layout.scatter(vector, module)
    np.testing.assert_array_equal(layout.flatten(module), vector)
    parts = layout.split(vector)
    for name, (begin, end) in zip(layout.names, itertools.pairwise(layout.offsets), strict=True):
        assert parts[name].base is not None, "split must not copy"
        np.testing.assert_array_equal(parts[name].ravel(), vector[begin:end])
        np.testing.assert_array_equal(parts[name], module[name].detach().numpy())
    np.testing.assert_array_equal(layout.join(dict(reversed(parts.items()))), vector)


def test_scatter_takes_read_only_memory_and_keeps_no_hold_of_it() -> None:
    module = Tied()
    layout = Layout.of(module.named_parameters())
    vector = np.frombuffer(np.arange(27, dtype=np.float32).tobytes(), np.float32)
    assert not vector.flags.writeable
    layout.scatter(vector, module)
    with torch.no_grad():
        module.body.bias.zero_()
    np.testing.assert_array_equal(vector, np.arange(27, dtype=np.float32))
    writable = vector.copy()
    layout.scatter(writable, module)
    writable[:] = -1
    np.testing.assert_array_equal(layout.flatten(module), vector)


def test_the_digest_tells_names_and_shapes_apart() -> None:
    layouts = [
        Layout(("a", "b"), ((2, 3), (4,))),
        Layout(("a", "c"), ((2, 3), (4,))),
        Layout(("a", "b"), ((3, 2), (4,))),
        Layout(("a", "b"), ((2, 3), (4, 1))),
        Layout(("a",), ((2, 3),)),
    ]
    assert len({layout.digest() for layout in layouts}) == len(layouts)
    assert layouts[0].digest() == Layout(("a", "b"), ((2, 3), (4,))).digest()
    # Parties of different releases compare digests: the encoding may not drift. printf '[["a",[2,3]]]' | sha256sum
    assert layouts[4].digest() == "9e65a904445b69358271c68815e436293f42276c61ddbac3025b8b2688870ef4"


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(26, np.float32),
        np.zeros(28, np.float32),
        np.zeros(27, np.float64),
        np.zeros((27, 1), np.float32),
    ],
)
def test_another_models_vector_is_refused(vector: np.ndarray) -> None:
    module = Tied()
    layout = Layout.of(module.named_parameters())
    before = layout.flatten(module)
    with raises(UpdateError, "the model's vector", says="(27,)"):
        layout.scatter(vector, module)
    np.testing.assert_array_equal(layout.flatten(module), before)


def test_join_names_the_parameter_that_is_wrong() -> None:
    layout = Layout(("a", "b"), ((2, 3), (4,)))
    with raises(UpdateError, "the model's parameters", says="'b'"):
        layout.join({"a": np.zeros((2, 3))})
    with raises(UpdateError, "the model's parameters", says="'c'"):
        layout.join({"a": np.zeros((2, 3)), "b": np.zeros(4), "c": np.zeros(1)})
    with raises(UpdateError, "the model's parameter a"):
        layout.join({"a": np.zeros((3, 2)), "b": np.zeros(4)})


@pytest.mark.gpu
def test_scatter_and_flatten_reach_a_gpu() -> None:
    module = Tied().cuda()
    layout = Layout.of(module.named_parameters())
    vector = np.arange(27, dtype=np.float32)
    layout.scatter(vector, module)
    np.testing.assert_array_equal(layout.flatten(module), vector)


@pytest.mark.gpu
def test_vectors_longer_than_a_buffer_reach_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", 1000)
    module = nn.ModuleDict({name: nn.Linear(count, 77) for name, count in (("a", 13), ("b", 40), ("c", 91))})
    layout = Layout.of(module.cuda().named_parameters())
    for seed in range(20):
        vector = np.random.default_rng(seed).standard_normal(layout.size, np.float32)
        vector.flags.writeable = False
        layout.scatter(vector, module)
        np.testing.assert_array_equal(layout.flatten(module), vector)
