"""Training on public text before a federation begins, which costs no privacy.

It is common practice, because a language model that is trained privately from random weights learns little (Li et al.
2022, "Large language models can be strong differentially private learners").

The training is the same as a site's (`train.py`), of every parameter of the model, with its own settings. Where the
federation then trains an adapter, the result is the base model under the adapter, which is sent to every site.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from cloister.lm.data.prepare import prepare
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import device_for, load_model
from cloister.lm.tasks.registry import task_of
from cloister.lm.text.corpus import corpus_records
from cloister.lm.training.train import Trainer
from cloister.protocol.plan.plan import AdapterSection, LocalSection, Plan, PrivacySection


def train_in_public(plan: Plan, source: str, progress: Callable[[int], None]) -> Vector:
    """Train the plan's model without its adapter on `public.source`; return every parameter in layout order.

    Args:
        plan: The plan, whose `public.source` is not empty.
        source: Where those records are.
        progress: Called with the number of steps taken so far.

    Raises:
        CloisterError: the records or the model cannot be loaded, or training gave non-finite numbers.
    """
    public = plan.public
    local = LocalSection(
        steps=public.steps,
        batch_size=public.batch_size,
        learning_rate=public.learning_rate,
        warmup_steps=public.steps // 10,
        precision=plan.local.precision,
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else plan.local.threads,
    )
    alone = plan.model_copy(
        update={
            "run": plan.run.model_copy(update={"rounds": 1}),
            "model": plan.model.model_copy(update={"adapter": AdapterSection()}),
            "data": task_of(plan.data)
            .in_public()
            .model_copy(update={"held_out": 0.0, "packing": True, "owner": ""}),
            "privacy": PrivacySection(),
            "local": local,
        }
    )
    model = load_model(alone)
    sequences = prepare(
        corpus_records(source, field="public.source", split=public.split).records,
        model.tokenizer,
        alone.data,
        seed=plan.run.seed,
    ).train
    start = model.layout.flatten(model.module)
    update = Trainer(alone, model, device_for("auto")).train(
        start, sequences, round=1, site_seed=(_PUBLIC,), part=model.layout, progress=progress
    )
    return start + update.vector


_PUBLIC = 0x7075626C
"""Separates the random choices of public training from those of a site, whose seeds have 128 bits."""
