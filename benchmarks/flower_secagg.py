"""Seconds of a round of Flower's own SecAgg+, in Flower's simulation, with clients that train nothing.

    python benchmarks/flower_secagg.py [--sites 9] [--coordinates 1000000] [--rounds 3] [--json]

A client's `fit` returns one float32 vector at once. A round is one call of `SecAggPlusWorkflow`, in the process of the
`ServerApp`: from choosing the clients to the parameters that the strategy made of the sum, with the model sent to each
client in it. It does not include start-up, one warm-up round and evaluation. The workflow has no default for
`num_shares` and `reconstruction_threshold`; 3 and 2, those of Flower's example of it, give each client two neighbours
and so three masks. `--shares 1.0 --threshold 0.5` makes all clients neighbours, as this project does up to 64 sites.
All other settings are Flower's defaults.

Each round starts from zeros and must end at the mean of the vectors, within the step of the quantisation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from cloister.benchmarks.engines import ray_here
from cloister.simulations.engines.flower import run_on_flower

SHARES, THRESHOLD = 3, 2
EXAMPLES = 1000
"""A client's weight: the workflow's default `max_weight`, with which a vector keeps its whole resolution."""
STEP = 16 / 2**22
"""Of the default quantisation: a range of 16 in 2^22 steps."""
PARAMETERS = "parameters"


def update(site: int, sites: int, d: int) -> npt.NDArray[np.float32]:
    """(d,) float32 in ±0.5, a different one for each site, made at negligible cost in place of training."""
    vector = np.full(d, (site + 1) / (2 * sites), np.float32)
    vector[::1000] *= np.linspace(-1, 1, len(vector[::1000]))
    return vector


def mean(sites: int, d: int) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.mean(
        [update(site, sites, d) for site in range(sites)], axis=0, dtype=np.float64
    )
    return found


def make_client_app(sites: int, d: int) -> ClientApp:
    """Clients that answer at once."""

    class Ready(NumPyClient):
        def __init__(self, site: int) -> None:
            self.site = site

        def fit(
            self, parameters: NDArrays, config: dict[str, Scalar]
        ) -> tuple[NDArrays, int, dict[str, Scalar]]:
            return [update(self.site, sites, d)], EXAMPLES, {}

    def client_fn(context: Context) -> Client:
        return Ready(int(context.node_config["partition-id"])).to_client()

    return ClientApp(client_fn=client_fn, mods=[secaggplus_mod])


class TimedRound:
    """The fit workflow: SecAgg+, its time, and a check of its result."""

    def __init__(self, sites: int, d: int, shares: int | float, threshold: int | float) -> None:
        self.workflow = SecAggPlusWorkflow(shares, threshold)
        self.expected = mean(sites, d)
        self.seconds: list[float] = []

    def __call__(self, grid: Grid, context: Context) -> None:
        before = context.state.array_records[PARAMETERS]
        start = time.perf_counter()
        self.workflow(grid, context)
        self.seconds.append(time.perf_counter() - start)
        (found,) = context.state.array_records[PARAMETERS].to_numpy_ndarrays()
        furthest = float(np.abs(found - self.expected).max())
        if furthest > 2 * STEP:
            raise SystemExit(f"the mean is off by {furthest:.3g}: expected at most {2 * STEP:.3g}")
        zeros = [np.zeros_like(array) for array in before.to_numpy_ndarrays()]
        context.state.array_records[PARAMETERS] = ArrayRecord(zeros)


def measure(sites: int, d: int, rounds: int, shares: int | float, threshold: int | float) -> list[float]:
    """Seconds of each round that counts."""
    timed = TimedRound(sites, d, shares, threshold)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=sites,
            min_available_clients=sites,
            initial_parameters=ndarrays_to_parameters([np.zeros(d, np.float32)]),
        )
        legacy = LegacyContext(context, config=ServerConfig(num_rounds=rounds + 1), strategy=strategy)
        DefaultWorkflow(fit_workflow=timed)(grid, legacy)

    with ray_here(len(os.sched_getaffinity(0))) as address:
        run_on_flower(app, partial(make_client_app, sites, d), sites, address)
    assert len(timed.seconds) == rounds + 1
    return timed.seconds[1:]


def number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=9)
    parser.add_argument("--coordinates", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="rounds whose median is taken")
    parser.add_argument("--shares", type=number, default=SHARES, help="num_shares: a number, or 1.0 for all")
    parser.add_argument("--threshold", type=number, default=THRESHOLD, help="reconstruction_threshold")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seconds = measure(options.sites, options.coordinates, options.rounds, options.shares, options.threshold)
    if options.json:
        print(json.dumps({"round_s": statistics.median(seconds), "rounds": seconds}))
    else:
        Console().print(
            f"Flower SecAgg+, {options.sites} sites x {options.coordinates} coordinates: "
            f"{statistics.median(seconds):.2f} s a round"
        )


if __name__ == "__main__":
    main()
