"""Which of its own parameters and buffers a model writes to in a pass, and whether a pass depends on those before it.

Some types write to themselves: RWKV rescales its weights, Gemma 3n clamps some, I-BERT keeps ranges of activations. In
private steps such a write would carry a trace of a unit into the gradients of others, or without noise into the update.

The passes run on a copy of the module's structure whose tensors have shapes and no values (torch's `FakeTensorMode`).
So what is found holds for all weights and tokens: a pass that asked for a value, to decide by it what to do, would fail
here. Every write is seen, also those behind `.data`, of which autograd's version counters know nothing.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Writes(NamedTuple):
    """What a model writes to."""

    evaluation: frozenset[str]
    """The parameters and buffers that a pass in evaluation mode writes to."""
    training: frozenset[str]
    """Those that a forward and backward pass in training mode writes to."""
    repeats: bool
    """Whether a training pass does the same after an evaluation and after another training pass, and none makes a
    parameter or buffer that was not there."""


Inputs = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""From tokens (B, L) to the inputs of a pass (`Task.inputs`)."""

_KNOWN: dict[tuple[Any, ...], Writes | None] = {}
"""The writes of models that this process has loaded, by what determines them: following the passes takes 0.2 s."""
_MOST_KNOWN = 32


def writes_of(module: nn.Module, inputs: Inputs, length: int, *, rows: int = 1, again: bool) -> Writes | None:
    """What the passes of a model that was just built write to; the module and the random state are not touched.

    Passes without values follow from the structure of the module and its configuration, so they are taken once for
    each of these in a process.

    Args:
        module: A model of transformers, with or without memory for its parameters.
        inputs: Makes the inputs of a pass.
        length: Tokens of a row.
        rows: Most rows of a pass; passes with one row are followed too.
        again: Whether to train again after the evaluation; else `repeats` says nothing of what depends on it.

    Returns:
        None if the passes cannot be followed without values, as with most mixtures of experts.
    """
    shapes = tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in _named(module))
    given = tuple(
        (name, each.shape) for name, each in inputs(torch.zeros(1, length, dtype=torch.long)).items()
    )
    key = (repr(module), repr(getattr(module, "config", None)), shapes, given, length, rows, again)
    if key not in _KNOWN:
        while len(_KNOWN) >= _MOST_KNOWN:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[key] = _followed(module, inputs, length, rows, again=again)
    return _KNOWN[key]


def _followed(module: nn.Module, inputs: Inputs, length: int, rows: int, *, again: bool) -> Writes | None:
    """As `writes_of`, by passes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    modes = (True, False, True, True) if again else (True, False)
    without = FakeTensorMode(allow_non_fake_inputs=True)
    with _quiet():
        try:
            empty, names = _without_values(module, without)
            with without:
                passes = [
                    (mode, _pass(empty, names, inputs, (size, length), training=mode))
                    for size in sorted({1, rows})
                    for mode in modes
                ]
        except Exception:  # an operation that asks for a value raises one of many types
            return None
    evaluation, training = (
        frozenset().union(*(each.written for mode, each in passes if mode == wanted))
        for wanted in (False, True)
    )
    trained = [each.operations for mode, each in passes if mode]
    later = [trained[at : at + 3][1:] for at in range(0, len(trained), 3)] if again else []
    # What a pass makes of nothing is not put back, so the passes after it would find it.
    made = dict(_named(empty)).keys() ^ dict(_named(module))
    return Writes(evaluation, training, all(one == other for one, other in later) and not made)


class Kept:
    """All that a pass may change of a module, to put it back: the bits of some of its parameters and buffers, and what
    the modules and their configurations have as attributes.

    Some types keep a state in attributes: the longest sequence, the kind of attention. Tensors among the attributes get
    their bits back too. What else an attribute refers to, such as a list, is assumed not to be changed in place; no
    known type does so.

    Args:
        module: The module, or a rank's part of it.
        names: Of parameters and buffers; those that the module does not have are ignored.
        device: Where the bits are kept; None: where the tensors are.
    """

    def __init__(self, module: nn.Module, names: Collection[str], device: torch.device | None = None) -> None:
        self._kept = [
            (place, key, tensor, tensor.detach().to(device or tensor.device, copy=True))
            for prefix, owner in module.named_modules()
            for place in (owner._parameters, owner._buffers)
            for key, tensor in place.items()
            if tensor is not None and f"{prefix}.{key}".lstrip(".") in names
        ]
        parts = list(module.modules())
        configs = {
            id(each): each for part in parts if hasattr(each := getattr(part, "config", None), "__dict__")
        }
        places = [each for part in parts for each in (vars(part), part._buffers, part._modules)]
        self._attributes = [(place, dict(place)) for place in (*places, *map(vars, configs.values()))]
        # Tensors that are no buffers.
        self._kept += [
            (place, key, each, each.detach().to(device or each.device, copy=True))
            for place, before in self._attributes
            if not any(place is part._buffers for part in parts)
            for key, each in before.items()
            if isinstance(each, torch.Tensor)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the modules the attributes and tensors that they had, and each tensor the bits that it had."""
        for place, before in self._attributes:
            place.clear()
            place.update(before)
        for place, key, tensor, value in self._kept:
            tensor.copy_(value)
            if place.get(key) is not tensor:
                place[key] = tensor


def kept_of_round(module: nn.Module, frozen: Collection[str]) -> Kept:
    """All that the passes of a round may change, besides what is trained; the bits are in the CPU's memory.

    Args:
        module: The module, or a rank's part of it, with memory for its parameters.
        frozen: The names of the frozen parameters that passes may write to; it has all buffers too.
    """
    return Kept(module, {*frozen, *(name for name, _ in module.named_buffers())}, torch.device("cpu"))


def names_of(module: nn.Module) -> frozenset[str]:
    """The names of all parameters and buffers, each once."""
    return frozenset(name for name, _ in _named(module))


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's warnings, and its report of an operation without values that failed, from the user."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


def _without_values(module: nn.Module, mode: Any) -> tuple[Any, dict[int, str]]:
    """A copy of a module whose parameters and buffers have no values, and their names by their storages."""
    copies: dict[int, Any] = {}
    names = {}
    for name, tensor in _named(module):
        with mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        names[_storage(empty)] = name
    return copy.deepcopy(module, copies), names


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sees every operation of a pass, those of the backward pass too."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.written: set[str] = set()
        self.operations: list[tuple[Any, ...]] = []
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = func._schema.arguments
        given = {each.name: value for each, value in zip(named, args, strict=False)} | (kwargs or {})
        for each in named:
            if each.alias_info is not None and each.alias_info.is_write:
                for leaf in tree_leaves(given.get(each.name)):
                    if isinstance(leaf, torch.Tensor) and (name := self._names.get(_storage(leaf))):
                        self.written.add(name)
        scalars = [each for each in tree_leaves(given) if not isinstance(each, torch.Tensor)]
        self.operations.append((func, *scalars))
        return func(*args, **(kwargs or {}))


def _pass(
    module: Any, names: dict[int, str], inputs: Inputs, shape: tuple[int, int], *, training: bool
) -> _Seen:
    """Take rows through a copy without values."""
    module.train(training)
    module.zero_grad(set_to_none=True)
    seen, before = _Seen(names), {name: (each, each.untyped_storage()) for name, each in _named(module)}
    tokens = torch.zeros(*shape, dtype=torch.long)
    with seen, torch.set_grad_enabled(training):
        given = inputs(tokens)
        mask = torch.ones_like(given["input_ids"])
        logits = module(**{"attention_mask": mask, **given}).logits
        if training:
            logits.float().sum().backward()
    # Giving a tensor other data (`tensor.data = ...`) is no operation.
    after = {name: (each, _storage(each)) for name, each in _named(module)}
    seen.written |= before.keys() ^ after
    seen.written |= {
        name
        for name, (tensor, storage) in before.items()
        if name in after and (after[name][0] is not tensor or after[name][1] != storage._cdata)
    }
    return seen


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
