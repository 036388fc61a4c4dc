"""A smaller or faster copy of a saved model: pruned, in 8 bits, or a smaller model that learns from it.

- Pruning sets the weights of linear layers with the smallest magnitude to zero, a share of each layer
  (`torch.nn.utils.prune.l1_unstructured`). The file keeps its size; it has zeros that a sparse format can drop.
- 8 bits: each weight of a linear layer but the output layer becomes an integer, with a scale for each output channel
  (torchao, weight-only). The folder needs torchao where it is loaded.
- Distillation (Hinton, Vinyals and Dean 2015, "Distilling the knowledge in a neural network", at temperature 1): a
  model of a smaller configuration learns the teacher's distribution of the next token.

Refused: 4 bits by torchao, whose release 0.18 packs two weights into a byte for CUDA only; on a CPU it stores each in a
byte, which is no smaller than 8 bits.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune as pruning

from cloister.lm.model.model import (
    device_for,
    from_config,
    load_saved,
    no_progress_bars,
    seeded,
    short,
    takes_positions,
)
from cloister.lm.tasks.auto import CAUSAL
from cloister.lm.tasks.causal import Causal
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, next_tokens
from cloister.lm.training.evaluate import Evaluator, subset, to_device
from cloister.protocol.errors import ModelError
from cloister.protocol.machine.prerequisites import check_extra
from cloister.protocol.plan.plan import DataSection

_FIXED = ("vocab_size", "model_type", "max_position_embeddings")
"""Fields of a configuration that the student shares with its teacher."""


@dataclass(frozen=True)
class Measured:
    """The figures of a model in a folder."""

    weight_bytes: int
    """Bytes of its weights on disk."""
    zeros: float
    """Fraction of its weights that are zero."""
    figures: Mapping[str, Any]
    """Those of its evaluation, by name (`lm/measures/figures.py`)."""
    tokens_per_second: float
    """Tokens that go forward in a second, in batches, on this machine."""


def measure(folder: Path, sequences: Sequences, batch_size: int) -> Measured:
    """Load a model from its folder and evaluate it, on the first GPU or the CPU.

    Raises:
        ModelError: the folder has no complete model.
    """
    module, _ = load_saved(folder)
    device = device_for("auto")
    module.to(device)
    task = Causal(DataSection())
    evaluator = Evaluator(task, module, batch_size, device)
    evaluator.held_out(subset(sequences, batch_size, 0))  # the first pass is slower
    begun = time.perf_counter()
    found = evaluator.held_out(sequences)
    seconds = time.perf_counter() - begun
    state = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    zeros = sum(int((tensor == 0).sum()) for tensor in map(_values, state))
    return Measured(
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        zeros=zeros / max(1, sum(tensor.numel() for tensor in state)),
        figures=task.figures(found),
        tokens_per_second=sequences.tokens.size / seconds,
    )


def prune(source: Path, folder: Path, share: float) -> None:
    """Write the model with the smallest weights of each linear layer at zero.

    Args:
        source: A full model.
        folder: Where it is written.
        share: Fraction of the weights of each layer, between 0 and 1.
    """
    module, tokenizer = load_saved(source)
    for layer in _linear_layers(module):
        pruning.l1_unstructured(layer, "weight", amount=share)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        pruning.remove(layer, "weight")  # type: ignore[no-untyped-call]  # as above
    _save(module, tokenizer, folder)


def to_8_bits(source: Path, folder: Path) -> None:
    """Write the model with the weights of its linear layers, but the output layer, in 8 bits.

    Raises:
        ModelError: torchao is not installed.
    """
    check_extra("torchao", "compress", ModelError, "--int8")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    auto: Any = AutoModelForCausalLM  # transformers leaves its automatic classes untyped
    _, tokenizer = load_saved(source)
    with no_progress_bars():
        chosen = TorchAoConfig(Int8WeightOnlyConfig(version=2))
        module = auto.from_pretrained(
            source, dtype=torch.float32, quantization_config=chosen, local_files_only=True
        )
    _save(module, tokenizer, folder)


@dataclass(frozen=True)
class Recipe:
    """How a student is trained."""

    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences in a step."""
    learning_rate: float
    """Peak learning rate."""
    seed: int
    """Seed of the student's weights and of the order of the sequences."""


def distil(
    source: Path,
    folder: Path,
    config: Path,
    sequences: Sequences,
    recipe: Recipe,
    progress: Callable[[int], None] = lambda _step: None,
) -> None:
    """Train a model of a smaller configuration to give the distributions of a model, and write it.

    The loss is the mean over the labels of KL(teacher || student), in nats; AdamW, with a tenth of the steps as warm-up
    and a cosine after that.

    Args:
        source: The teacher: a full model.
        folder: Where the student is written, with the teacher's tokenizer.
        config: A JSON file with the fields of the teacher's configuration that the student changes.
        sequences: Public text.
        recipe: How the student is trained.
        progress: Called with the number of steps taken so far.

    Raises:
        ModelError: the file is no configuration of a smaller model of the teacher's type.
    """
    teacher, tokenizer = load_saved(source)
    with seeded("distil", recipe.seed):
        student = _student(teacher, config)
    device = device_for("auto")
    teacher.to(device).eval().requires_grad_(False)
    student.to(device).train()
    optimizer = torch.optim.AdamW(
        student.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    warmup = max(1, recipe.steps // 10)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, recipe.steps - warmup))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [warmup])
    targets = next_tokens(sequences.labels)
    order = torch.Generator().manual_seed(recipe.seed)
    rows = torch.empty(0, dtype=torch.int64)
    for step in range(recipe.steps):
        while len(rows) < recipe.batch_size:
            rows = torch.cat([rows, torch.randperm(len(sequences), generator=order)])
        chosen, rows = rows[: recipe.batch_size].numpy(), rows[recipe.batch_size :]
        given: dict[str, torch.Tensor] = {"input_ids": to_device(sequences.tokens[chosen], device)}
        if sequences.positions is not None and takes_positions(student):
            given["position_ids"] = to_device(sequences.positions[chosen], device)
        learned = to_device(targets[chosen], device) != NOT_LEARNED  # (B, L)
        with torch.no_grad():
            wanted = teacher(**given).logits[learned].float().log_softmax(-1)  # (T, V)
        found = student(**given).logits[learned].float().log_softmax(-1)
        loss = functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1)
    _save(student.cpu(), tokenizer, folder)


def _student(teacher: Any, file: Path) -> Any:
    """A fresh model of the teacher's type with some fields of its configuration changed."""
    try:
        changes = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError("--distil", str(file), expected=f"a JSON file ({error})") from error
    config = type(teacher.config).from_dict(teacher.config.to_dict())
    if not isinstance(changes, dict):
        raise ModelError("--distil", str(file), expected="an object with fields of the model's configuration")
    known = set(teacher.config.to_dict()) - set(_FIXED)
    for key in changes:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            raise ModelError(
                f"--distil: {key}",
                changes[key],
                expected=f"a field of the configuration of {teacher.config.model_type} that a student may change",
                fix=f"did you mean {nearest[0]}?" if nearest else "",
            )
    try:
        for key, value in changes.items():
            setattr(config, key, value)
        student = from_config(config, CAUSAL)
        with torch.no_grad():
            assert student(input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits.ndim == 3
    except Exception as error:  # each of transformers' 200 model types raises its own types
        raise ModelError(
            "--distil", str(file), expected=f"a configuration of a model ({short(error)})"
        ) from error
    sizes = [sum(each.numel() for each in module.parameters()) for module in (student, teacher)]
    if sizes[0] >= sizes[1]:
        raise ModelError(
            "--distil", f"{sizes[0]:,} parameters", expected=f"fewer than the {sizes[1]:,} of the model"
        )
    return student


def _linear_layers(module: nn.Module) -> list[nn.Module]:
    """The linear layers of a model but its output layer, also GPT-2's transposed ones."""
    from transformers.pytorch_utils import Conv1D

    causal: Any = module  # partly untyped
    head = causal.get_output_embeddings()
    return [
        layer for layer in module.modules() if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    ]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, also of one that is stored as integers and scales."""
    unpack = getattr(tensor, "dequantize", None)
    plain: torch.Tensor = unpack() if type(tensor) is not torch.Tensor and unpack is not None else tensor
    return plain


def _save(module: Any, tokenizer: Any, folder: Path) -> None:
    module.config.use_cache = True  # a saved model is loaded for generation
    with no_progress_bars():
        module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
