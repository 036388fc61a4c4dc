"""The cost of an engine: rounds in which sites do nothing, on `local` and on `flower`, in one run.

The same two apps run on both engines. A case is a number of sites and the content of its messages: nothing, or the
model to each site and an update back (1e6 float32, 4 MB, each way; the model is one object in every message).

* round_s: median seconds of a round, from the first message pushed to the last reply read by the `ServerApp`.
* start_s: seconds from the start of the engine, and of a Ray for it, until the `ServerApp` knows all sites and has the
  replies of its first round, less one round_s. That covers processes, registering the sites, and the imports that the
  engine alone needs (Ray); not importing Flower in this process, which both need.

Each measurement runs in a process of its own, so that none profits from the warm state of another. The coordinator
reads every byte of a reply once (it sums the vector) on both engines, as a run would. Both get as many workers as this
process may use CPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from rich.table import Table

from cloister.simulations.engines.flower import run_on_flower
from cloister.simulations.engines.grid import LocalGrid

PARAMETERS = 1_000_000
ENGINES = ("local", "flower")


@dataclass(frozen=True)
class Case:
    name: str
    sites: int
    vectors: bool


CASES = (Case("10 sites", 10, False), Case("100 sites", 100, False), Case("100 sites x 4 MB", 100, True))


@dataclass(frozen=True)
class Result:
    case: str
    engine: str
    start_s: float
    round_s: float


def vector_records() -> RecordDict:
    data = np.ones(PARAMETERS, np.float32).tobytes()
    return RecordDict({"vectors": ArrayRecord({"vector": Array("float32", (PARAMETERS,), "raw", data)})})


def make_client_app() -> ClientApp:
    """Sites that answer at once."""
    app = ClientApp()
    update: list[RecordDict] = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if message.content and not update:
            update.append(vector_records())
        return Message(update[0] if message.content else RecordDict(), reply_to=message)

    return app


def server_app(case: Case, rounds: int, answered: list[float]) -> ServerApp:
    """One round and then `rounds` more; `answered` gets the time of the end of each."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = list(grid.get_node_ids())
        while len(nodes) < case.sites:  # Flower registers them while this thread already runs
            nodes = list(grid.get_node_ids())
        content = vector_records() if case.vectors else RecordDict()
        for _ in range(rounds + 1):
            replies = 0
            for reply in grid.send_and_receive([Message(content, node, "train") for node in nodes]):
                replies += 1
                if case.vectors:
                    data = cast(ArrayRecord, reply.content["vectors"])["vector"].data
                    assert np.frombuffer(data, np.float32).sum() == PARAMETERS
                assert reply.has_content()
            assert replies == case.sites
            answered.append(time.perf_counter())

    return app


@contextmanager
def ray_here(cpus: int) -> Iterator[str]:
    """The address of a Ray of one node on this machine."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray annotates no result


def measure(case: Case, engine: str, rounds: int) -> Result:
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    answered: list[float] = []
    app = server_app(case, rounds, answered)
    begun = time.perf_counter()
    if engine == "local":
        configs = [{"partition-id": number} for number in range(case.sites)]
        with LocalGrid(make_client_app, configs, workers=[{"OMP_NUM_THREADS": "1"}] * cpus) as grid:
            app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), {}))
    else:
        with ray_here(cpus) as address:
            run_on_flower(app, make_client_app, case.sites, address)
    round_s = statistics.median(end - start for start, end in itertools.pairwise(answered))
    return Result(case.name, engine, answered[0] - begun - round_s, round_s)


def measure_alone(case: Case, engine: str, rounds: int) -> Result:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--repeats", str(rounds), "--alone", case.name, engine]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return Result(**json.loads(printed.splitlines()[-1]))


def table(results: list[Result]) -> Table:
    found = {(result.case, result.engine): result for result in results}
    shown = Table(
        "", *(f"{what} {engine}" for what in ("start", "round") for engine in (*ENGINES, "x")), box=None
    )
    shown.columns[0].no_wrap = True
    for column in shown.columns[1:]:
        column.justify = "right"
    for case in CASES:
        local, flower = (found[case.name, engine] for engine in ENGINES)
        shown.add_row(
            case.name,
            f"{local.start_s:.2f} s",
            f"{flower.start_s:.2f} s",
            f"{flower.start_s / local.start_s:.0f} x",
            f"{local.round_s * 1e3:.1f} ms",
            f"{flower.round_s * 1e3:.1f} ms",
            f"{flower.round_s / local.round_s:.0f} x",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds that do nothing, on the engines local and flower.")
    parser.add_argument("--json", action="store_true", help="print a list of results instead of a table")
    parser.add_argument("--repeats", type=int, default=5, help="rounds whose median is taken")
    parser.add_argument(
        "--alone", nargs=2, metavar=("CASE", "ENGINE"), help="print one measurement, in this process"
    )
    options = parser.parse_args()
    if options.alone:
        (case,) = (case for case in CASES if case.name == options.alone[0])
        print(json.dumps(asdict(measure(case, options.alone[1], options.repeats))))
        return
    results = [measure_alone(case, engine, options.repeats) for case in CASES for engine in ENGINES]
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
    else:
        Console().print(table(results))


if __name__ == "__main__":
    main()
