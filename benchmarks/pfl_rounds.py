"""Seconds of a round of pfl-research's federated averaging, for `benchmarks/scale.py`, in an environment of its own.

    .venv-pfl/bin/python benchmarks/pfl_rounds.py MODEL SEQUENCES --threads 2

MODEL is a saved causal language model of transformers; SEQUENCES a file of NumPy, (clients, sequences, length) int64.
Every client trains in every round: two steps of fused AdamW, made anew for each client, with gradients clipped to norm
1, in batches of ten sequences in order. One process trains them one after the other (`SimulatedBackend`), which is how
pfl-research simulates on one machine without more GPUs. A round is from one `after_central_iteration` to the next: it
writes nothing to disk.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

STEPS, BATCH = 2, 10
RATE, CLIP = 1e-3, 1.0
BETAS = (0.9, 0.95)


class Trained(torch.nn.Module):
    """A causal language model as pfl-research trains it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens_BT, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())

    def metrics(self, tokens_BT: torch.Tensor) -> dict[str, Any]:
        """Of the first round, the only one in which pfl-research evaluates: costs nothing."""
        from pfl.metrics import Weighted

        return {"sequences": Weighted.from_unweighted(len(tokens_BT))}


class Clock:
    """The callback that notes when a round ends."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self.ends: list[float] = []

    def on_train_begin(self, *, model: object) -> Any:
        self.ends.append(time.perf_counter())
        return self._metrics()

    def after_central_iteration(self, _metrics: object, _model: object, **_: int) -> tuple[bool, Any]:
        self.ends.append(time.perf_counter())
        return False, self._metrics()

    def on_train_end(self, *, model: object) -> None:
        pass


def seconds(model: Path, sequences: Path, rounds: int) -> list[float]:
    """The duration of each round."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # transformers leaves its automatic classes untyped
    trained = Trained(auto.from_pretrained(model, dtype=torch.float32)).train()
    clients = [PyTorchTensorDataset((torch.from_numpy(rows),)) for rows in np.load(sequences)]
    dataset = FederatedDataset(
        clients.__getitem__, get_user_sampler("minimize_reuse", list(range(len(clients))))
    )
    clock = Clock(Metrics)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=len(clients),
            val_cohort_size=None,
        ),
        SimulatedBackend(dataset, dataset),
        PyTorchModel(
            trained,
            partial(torch.optim.AdamW, betas=BETAS, weight_decay=0.0, fused=True),
            torch.optim.SGD(trained.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(
            local_batch_size=BATCH,
            local_num_epochs=None,
            local_num_steps=STEPS,
            local_learning_rate=RATE,
            local_max_grad_norm=CLIP,
        ),
        NNEvalHyperParams(local_batch_size=BATCH),
        [clock],
        send_metrics_to_platform=False,
    )
    return np.diff(clock.ends).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("sequences", type=Path)
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch's threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    np.random.seed(0)  # pfl-research draws from NumPy's global generator
    print(json.dumps(seconds(arguments.model, arguments.sequences, arguments.rounds)))


if __name__ == "__main__":
    main()
