"""The frozen base under an adapter, stored in lower precision (`model.adapter.base_precision`).

The rule is that of QLoRA (Dettmers et al. 2023, "QLoRA: Efficient finetuning of quantized LLMs", section 3): weights
are stored in a small type and computed with in bfloat16, and the adapter stays in float32.

- `bfloat16`: the weights of linear layers and embeddings are rounded to bfloat16. The products of a forward pass in
  bfloat16 round them alike, so only the rounding of embeddings changes a result, and nothing changes it for a
  checkpoint in bfloat16.
- `nf4`: the weights of linear layers but the output layer are in NF4 with double quantization (`bitsandbytes`); those
  of the output layer, of embeddings and of GPT-2's transposed layers are in bfloat16.

Gains of norms, biases and every other parameter stay in float32, as in `peft.prepare_model_for_kbit_training`; layers
of bitsandbytes round their biases when they use them. The output of an embedding is float32, so the sums over layers
are those of a model in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from cloister.protocol.errors import ModelError
from cloister.protocol.machine.prerequisites import check_extra

_TRAINED = (".lora_", ".modules_to_save.", ".original_module")
"""In the names of what is trained beside a base: factors, and a classifier's head, whose first values PEFT keeps."""

BasePrecision = Literal["float32", "bfloat16", "nf4"]


def check_machine(precision: BasePrecision) -> None:
    """Refuse a precision that this machine does not have.

    Raises:
        ModelError: NF4 without a CUDA GPU, or without bitsandbytes.
    """
    if precision != "nf4":
        return
    field = "model.adapter.base_precision"
    if not torch.cuda.is_available():
        raise ModelError(
            field,
            precision,
            expected="a CUDA GPU on every party, the coordinator too, and this machine has none",
            fix='set model.adapter.base_precision = "bfloat16"',
        )
    check_extra("bitsandbytes", "quantized", ModelError, field, precision)


def lower(module: nn.Module, precision: BasePrecision) -> bool:
    """Store the base under an adapter in a lower precision.

    Args:
        module: A PEFT model on the CPU in float32.
        precision: The precision of the base.

    Returns:
        Whether a weight has another value than before.
    """
    changed = False
    for name, layer, quantized in list(_lowered(module, precision)):
        if quantized:
            assert isinstance(layer, nn.Linear)
            module.set_submodule(name, _quantized(layer))
            changed = True
            continue
        if isinstance(layer, nn.Embedding):
            layer.register_forward_hook(lambda _layer, _inputs, output: output.float())
        weight: Any = layer.weight
        lowered = weight.detach().to(torch.bfloat16)
        changed = changed or not torch.equal(lowered.to(weight.dtype), weight)
        weight.data = lowered  # the parameter stays, because several layers may have it
    return changed


def element_bytes(module: nn.Module, precision: BasePrecision) -> dict[str, float]:
    """Bytes of an element of each parameter, by its name, after `lower`; nothing is stored anew.

    NF4 with double quantization takes 4 bits, and for each 64 elements 8 bits, and for each 256 of those 32 bits
    (QLoRA, section 3).

    Args:
        module: As for `lower`, also without memory.
        precision: The precision of the base.
    """
    quantized = 0.5 + 1 / 64 + 4 / (64 * 256)
    lowered = {
        id(layer.weight): quantized if to_4_bits else 2 for _, layer, to_4_bits in _lowered(module, precision)
    }
    return {name: lowered.get(id(each), each.element_size()) for name, each in module.named_parameters()}


def is_lowered(module: nn.Module) -> bool:
    """Whether a model has parameters in less than 32 bits, with which products are in bfloat16."""
    return any(parameter.element_size() < 4 for parameter in module.parameters())


def in_float32(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state with the values that it computes with, in float32, by the names of an unquantized model."""
    state = module.state_dict()
    for name, layer in module.named_modules():
        weight = f"{name}.weight"
        quantized = getattr(getattr(layer, "weight", None), "quant_state", None)
        if quantized is None or weight not in state:  # an adapter shows the weight of its layer as its own
            continue
        from bitsandbytes.functional import dequantize_4bit

        state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{weight}.")}
        state[weight] = dequantize_4bit(state[weight], quantized)
    return {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}


def _lowered(module: nn.Module, precision: BasePrecision) -> Iterator[tuple[str, nn.Module, bool]]:
    """The layers whose weights are stored in lower precision, by name, and whether that is NF4."""
    if precision == "float32":
        return
    from transformers.pytorch_utils import Conv1D

    causal: Any = module  # partly untyped
    head = causal.get_output_embeddings()
    for name, layer in module.named_modules():
        if any(part in name for part in _TRAINED):
            continue
        if isinstance(layer, nn.Linear | nn.Embedding | Conv1D):
            yield name, layer, precision == "nf4" and isinstance(layer, nn.Linear) and layer is not head


def _quantized(layer: nn.Linear) -> nn.Module:
    """The layer with its weight in NF4, made on the GPU and moved back to the CPU."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    has_bias = layer.bias is not None
    with torch.device("meta"):
        quantized: nn.Module = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=has_bias,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
    weight = layer.weight.detach().to(torch.bfloat16)  # the type that it is computed with
    quantized.weight = Params4bit(weight, quant_type="nf4", module=quantized).to("cuda").to("cpu")
    quantized.bias = layer.bias
    return quantized
