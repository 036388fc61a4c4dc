"""Whole runs of a task by the command line, and gradients of single units, for tests of tasks."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloister.cli.main import main
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import Prepared, prepare, unit_rule
from cloister.lm.model.model import LanguageModel
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import read_plan
from cloister.tests.tools.command import set_options

CPU = torch.device("cpu")
Records = Sequence[dict[str, Any]]


class Made:
    """A finished run."""

    def __init__(self, folder: Path, plan: str, records: Records, *settings: str) -> None:
        self.run, source = folder / "run", folder / "records.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "plan.toml").write_text(f'{plan}\n[simulation]\ndurable = false\nsource = "{source}"\n')
        command = ["simulate", str(folder / "plan.toml"), "--out", str(self.run), "--workers", "1", "--json"]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([*command, *set_options(settings)]) == 0
        self.answer: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
        self.plan = read_plan(self.run)

    def records(self, site: str) -> Records:
        """The records of a site."""
        lines = (self.run / "sites" / site / "data.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def prepared(self, site: str) -> Prepared:
        """What a site has made of its records."""
        return prepare(self.records(site), byte_tokenizer(), self.plan.data, seed=self.plan.run.seed)


def in_units(plan: Plan, records: Records) -> Prepared:
    """Records as the units of a plan."""
    rule = unit_rule(plan.data, plan.privacy)
    return prepare(records, byte_tokenizer(), plan.data, seed=plan.run.seed, units=rule)


def of_units(plan: Plan, model: LanguageModel, records: Records) -> list[dict[str, torch.Tensor]]:
    """The gradient of each unit of some records before it is clipped, by the names of the parameters."""
    sequences = in_units(plan, records).train
    assert sequences.starts is not None
    trained = model.trainable()
    model.module.eval()  # without dropout, to compare
    with PrivateTrainer(plan, model, CPU).per_unit_gradients(trained) as gradients:
        found = [
            {name: each[0].clone() for (name, _), each in zip(trained, one.gradients, strict=True)}
            for one in gradients(sequences, np.arange(len(sequences.starts) - 1))
        ]
    model.module.zero_grad(set_to_none=True)
    return found
