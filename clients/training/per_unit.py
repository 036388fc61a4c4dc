"""What record-level privacy needs of a task, checked on a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import Prepared, prepare, unit_rule
from cloister.lm.model.model import load_model
from cloister.lm.tasks.registry import Pin, using
from cloister.lm.tasks.task import Task
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.evaluate import Evaluator, to_device
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse

_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_CPU = torch.device("cpu")


def check(
    task: type[Task], records: Sequence[Mapping[str, Any]], model: str, data: Mapping[str, Any]
) -> None:
    """As `testing.check_per_unit_gradients`."""
    assert len(records) > 2, "three records or more are needed to see that none depends on another"
    with using(task, Pin(f"tried:{task.__name__}", "0" * 64)) as (name, sha256):
        settings = {"held_out": 0.0, "sequence_length": 32, **data}
        plan = parse("").changed(
            {
                "model.name": model,
                "model.config": _SMALL if model == "builtin:llama" else {},
                "data.task": name,
                "data.package": {"version": "tried", "sha256": sha256},
                **{f"data.{field}": value for field, value in settings.items()},
                "local.batch_size": 4,
                "aggregation.weighting": "uniform",
                "privacy.unit": "record",
                "privacy.noise_multiplier": 1.0,
                "privacy.sampling_rate": 0.5,
                "privacy.delta": 1e-5,
                "server.evaluation": "none",
            }
        )
        loaded = load_model(plan)
        made = _prepared(plan, loaded.tokenizer, records)
        assert made.records == len(records), (
            f"{len(records) - made.records} records cannot be used: {made.left_out}"
        )
        for index in range(len(records)):
            rest = _prepared(plan, loaded.tokenizer, [*records[:index], *records[index + 1 :]])
            _check_rows(made.train, rest.train, index)
        trainer = PrivateTrainer(plan, loaded, _CPU)
        _check_losses(trainer, made.train)
        _check_gradients(trainer, made.train)
        _check_evaluation(trainer, made.train)


def _prepared(plan: Plan, tokenizer: Any, records: Sequence[Mapping[str, Any]]) -> Prepared:
    return prepare(records, tokenizer, plan.data, seed=0, units=unit_rule(plan.data, plan.privacy))


def _check_rows(all_: Sequences, rest: Sequences, left_out: int) -> None:
    assert all_.starts is not None
    kept = np.ones(len(all_), bool)
    kept[all_.starts[left_out] : all_.starts[left_out + 1]] = False
    same = np.array_equal(all_.tokens[kept], rest.tokens) and np.array_equal(all_.labels[kept], rest.labels)
    assert same, f"the rows of other records change where record {left_out + 1} is left out"


def _losses(trainer: PrivateTrainer, sequences: Sequences, rows: NDArray[np.int64]) -> torch.Tensor:
    task = trainer.task
    targets = to_device(task.targets(sequences.labels[rows]), _CPU)
    logits, wanted = trainer.forward(to_device(sequences.tokens[rows], _CPU), targets)
    losses = task.row_losses(logits, wanted)
    assert losses.shape == (len(rows),), (
        f"row_losses has the shape {tuple(losses.shape)} for {len(rows)} rows"
    )
    return losses


def _check_losses(trainer: PrivateTrainer, sequences: Sequences) -> None:
    trainer.module.eval()
    with torch.no_grad():
        together = _losses(trainer, sequences, np.arange(len(sequences)))
        for row in range(len(sequences)):
            alone = _losses(trainer, sequences, np.array([row]))[0]
            assert torch.allclose(alone, together[row], rtol=1e-4, atol=1e-5), (
                f"the loss of row {row} is {alone.item():.6f} alone and {together[row].item():.6f} beside other rows"
            )


def _check_gradients(trainer: PrivateTrainer, sequences: Sequences) -> None:
    assert sequences.starts is not None
    units = len(sequences.starts) - 1
    trained = trainer.model.trainable()
    parameters = [parameter for _, parameter in trained]
    trainer.module.eval()
    with trainer.per_unit_gradients(trained) as gradients:
        together = [each.gradients for each in gradients(sequences, np.arange(units))]
    for unit in range(units):
        rows = np.arange(sequences.starts[unit], sequences.starts[unit + 1])
        learned = trainer.task.learned(trainer.task.targets(sequences.labels[rows]))
        means = _losses(trainer, sequences, rows) / torch.from_numpy(np.maximum(learned, 1))
        factors = trainer.task.factors(trainer.task.targets(sequences.labels[rows]))
        means = means if factors is None else means * torch.from_numpy(factors)
        alone = torch.autograd.grad(means.mean(), parameters, allow_unused=True, materialize_grads=True)
        for (name, _), mine, single in zip(trained, together[unit], alone, strict=True):
            assert torch.allclose(mine[0], single, rtol=1e-3, atol=1e-6), (
                f"the gradient of record {unit + 1} for {name} is not that of its own mean loss"
            )


def _check_evaluation(trainer: PrivateTrainer, sequences: Sequences) -> None:
    task, tokenizer = trainer.task, trainer.model.tokenizer
    evaluators = [
        Evaluator(task, trainer.module, size, _CPU, tokenizer=tokenizer) for size in (1, len(sequences))
    ]
    alone, together = (each.held_out(sequences) for each in evaluators)
    assert alone.counts == together.counts, (
        f"the counters are {alone.counts} of rows one by one and {together.counts} of all rows together"
    )
    figures = task.figures(together)
    assert isinstance(figures, dict), f"figures gives {type(figures).__name__}, not a dictionary"
