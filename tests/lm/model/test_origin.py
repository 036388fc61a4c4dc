"""The digest of what a model is made from: of everything that was loaded, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, PreTrainedModel

from cloister.lm.model.model import from_config, from_pretrained, locate
from cloister.lm.model.origin import origin
from cloister.lm.tasks.auto import CAUSAL
from cloister.lm.text.tokenizer import byte_tokenizer, load_tokenizer
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import ModelSection
from cloister.tests.tools.raises import raises

SECTION = ModelSection(name="somewhere")
TOKENIZER = byte_tokenizer()
TRAINED = ["model.layers.0.mlp.up_proj.weight"]


def model() -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        "llama",
        vocab_size=264,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return from_config(made, CAUSAL)


def digest(module: PreTrainedModel) -> str:
    return origin(SECTION, module, TOKENIZER, TRAINED)


def test_a_class_of_models_of_a_package_is_not_what_the_plan_alone_decides() -> None:
    """It may read a table from a file of the site when it is built."""
    package = {"version": "1.0", "sha256": "0" * 64}
    own = ModelSection(name="builtin:own", type="own:model", package=package)  # type: ignore[arg-type]  # as in TOML
    first, second = model(), model()
    assert origin(own, first, TOKENIZER, TRAINED) == origin(own, second, TOKENIZER, TRAINED) != ""
    buffer(second)
    assert origin(own, first, TOKENIZER, TRAINED) != origin(own, second, TOKENIZER, TRAINED)
    assert origin(ModelSection(), first, TOKENIZER, TRAINED) == ""


def lm_head(module: PreTrainedModel) -> None:
    module.get_parameter("lm_head.weight").data[3, 5] += 1e-6


def buffer(module: PreTrainedModel) -> None:
    name, value = next(iter(module.named_buffers()))
    assert value.numel(), name
    value.data[-1] += 1e-6


def type_of_settings(module: PreTrainedModel) -> None:
    other: Any = type("OtherConfig", (type(module.config),), {})
    made = other.__new__(other)
    vars(made).update(vars(module.config))
    module.config = made


def type_of_model(module: PreTrainedModel) -> None:
    other: Any = type("OtherForCausalLM", (type(module),), {})
    module.__class__ = other


CHANGES: dict[str, Callable[[PreTrainedModel], None]] = {
    "a frozen value": lm_head,
    "a buffer": buffer,
    "a setting that is saved": lambda module: setattr(module.config, "rms_norm_eps", 1e-5),
    "a setting that is not saved": lambda module: setattr(module.config, "_is_quantized", True),
    "an unknown setting": lambda module: setattr(module.config, "another", 1),
    "the type of the settings": type_of_settings,
    "the type of the model": type_of_model,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_decides_an_update_is_in_the_digest(change: Callable[[PreTrainedModel], None]) -> None:
    module = model()
    known = digest(module)
    assert digest(model()) == known
    change(module)
    assert digest(module) != known


def test_place_release_and_trained_values_are_not(tmp_path: Path) -> None:
    module = model()
    known = digest(module)
    module.config._name_or_path = "/elsewhere"
    module.config.transformers_version = "0"
    module.get_parameter(TRAINED[0]).data.zero_()
    assert digest(module) == known


def test_a_configuration_that_sites_cannot_compare_is_refused() -> None:
    module = model()
    module.config.another = object()
    with pytest.raises(ModelError):
        digest(module)


def test_a_tokenizer_that_keeps_files_and_not_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Wav2Vec2CTCTokenizer"}')
    with raises(ModelError, "model.tokenizer", says="tokenizers library"):
        load_tokenizer(ModelSection(name="builtin:llama", tokenizer=str(tmp_path)))


# PEFT asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_frozen_factor_of_an_adapter_is_that_of_the_plan_and_not_in_the_digest() -> None:
    """Its last bits are those of a processor."""
    adapter = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"]))
    trained = [name for name, _ in adapter.named_parameters() if "lora_B" in name]
    known = origin(SECTION, adapter, TOKENIZER, trained)
    drawn = next(value for name, value in adapter.named_parameters() if "lora_A" in name)
    drawn.data += 1e-8
    assert origin(SECTION, adapter, TOKENIZER, trained) == known
    next(value for name, value in adapter.named_parameters() if "q_proj.base_layer" in name).data += 1e-6
    assert origin(SECTION, adapter, TOKENIZER, trained) != known


# --- the memory of what was loaded ------------------------------------------------------------------------------------


def as_one_memory(folder: Path) -> None:
    """Two parameters of equal values are one storage in the file."""
    values = model_of_equal_projections().state_dict()
    values["model.layers.0.mlp.gate_proj.weight"] = values["model.layers.0.mlp.up_proj.weight"]
    as_bin(folder, values)


def transposed(folder: Path) -> None:
    values = model_of_equal_projections().state_dict()
    as_bin(folder, {name: each.T.contiguous().T if each.ndim == 2 else each for name, each in values.items()})


def as_bin(folder: Path, values: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(values, folder / "pytorch_model.bin")


def longer_header(folder: Path) -> None:
    """The tensors begin elsewhere in the file, at an address that no vector instruction likes."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + size], content[8 + size :]
    file.write_bytes((size + 4).to_bytes(8, "little") + header + b"    " + rest)


def model_of_equal_projections() -> PreTrainedModel:
    module = model()
    mlp = module.get_submodule("model.layers.0.mlp")
    mlp.get_parameter("gate_proj.weight").data.copy_(mlp.get_parameter("up_proj.weight").data)
    return module


@pytest.mark.parametrize("stored", [lambda folder: None, as_one_memory, transposed, longer_header])
def test_how_a_file_stores_the_values_does_not_reach_training(
    stored: Callable[[Path], None], tmp_path: Path
) -> None:
    """The digest is of the values alone, and the memory of two tensors, or its strides, decide steps on them too."""
    for name in ("as it is", "stored"):
        model_of_equal_projections().save_pretrained(tmp_path / name)
    stored(tmp_path / "stored")
    plain, module = (from_pretrained(locate(str(folder)), CAUSAL) for folder in sorted(tmp_path.iterdir()))
    held = [*module.parameters(), *module.buffers()]
    assert len({each.untyped_storage().data_ptr() for each in held}) == len(held)
    assert all(each.is_contiguous() and each.storage_offset() == 0 for each in held)
    assert all(each.data_ptr() % 64 == 0 for each in held)
    assert digest(module) == digest(plain)


def test_a_file_that_is_written_over_changes_no_loaded_model(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    module = from_pretrained(locate(str(tmp_path)), CAUSAL)
    known = digest(module)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        size = file.seek(0, 2)
        file.seek(-64, 2)
        file.write(bytes(64))
    assert size > 64
    assert digest(module) == known
