"""The same two apps on Flower's own simulation runtime, on a Ray cluster.

No part of a run depends on its engine. This file passes the two apps to the runtime and makes the runtime behave as
`LocalGrid` does: the coordinator's exception reaches the caller as the same object, and a site's failure becomes the
same `Error` reply (`ray_workers.py`). Alternative refused: a grid of our own on Ray, because on one machine `LocalGrid`
is faster.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import telemetry

from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.machine.prerequisites import check_extra
from cloister.simulations.engines.process import environment

_REGISTRATION_S = 60
_END_S = 60  # for a coordinator that was interrupted in a long call to stop


def run_on_flower(
    server_app: ServerApp,
    make_client_app: Callable[[], ClientApp],
    sites: int,
    address: str,
    *,
    workers: int | None = None,
    threads: int = 1,
    workers_per_gpu: int = 1,
    shared: Path | None = None,
) -> None:
    """Run the two apps on Flower's simulation runtime until the `ServerApp` returns.

    Node ids are Flower's own; a site reads its number, from 0, from `Context.node_config["partition-id"]`. The workers
    are as many as the cluster has room for: by its GPUs if it has any, else by its CPUs. Ray decides on which node each
    runs, and which GPU it sees.

    Args:
        server_app: The coordinator; it runs in a thread of this process.
        make_client_app: Makes the app of the sites, once in each worker; picklable.
        sites: Number of sites; no more workers are started.
        address: HOST:PORT of a running Ray cluster, which is left running.
        workers: Most workers; None: as many as there is room for.
        threads: CPUs that Ray reserves for a worker, if the cluster has no GPU.
        workers_per_gpu: Workers that share a GPU.
        shared: Folder that all nodes must share.

    Raises:
        EngineError: Ray is not installed, the cluster does not answer or is unfit, or the runtime failed.
        Exception: the exception that the `ServerApp` raised, the same object.
        KeyboardInterrupt: the process was interrupted; the `ServerApp` has stopped.
    """
    check_extra("ray", "ray", EngineError, "--ray-address", address)
    # Ray reads it when it is imported: a thread that outlives the connection must not start another Ray.
    with environment({"RAY_ENABLE_AUTO_CONNECT": "0"}):
        from cloister.simulations.engines.cluster import check_nodes, cluster, room
        from cloister.simulations.engines.ray_workers import RayWorkers

    coordinator = _Coordinator(server_app, sites)
    guarded = ServerApp()
    guarded.main()(coordinator.main)
    with _quietly(), cluster(address):
        if shared is not None:
            check_nodes(shared)
        from flwr.simulation import run_simulation

        place = room(threads, workers_per_gpu)
        count = min(place.workers, sites, workers or sites)
        try:
            with _backend(partial(RayWorkers, make_client_app, count, place, coordinator.over), count):
                run_simulation(guarded, ClientApp(), sites)
        except KeyboardInterrupt:
            coordinator.interrupt()
            raise
        except RuntimeError as error:
            if coordinator.raised is None:
                cause = _root(error)
                raise EngineError(
                    "--ray-address", address, expected=f"Flower's runtime to keep running ({one_line(cause)})"
                ) from error
    if coordinator.raised is not None:
        raise coordinator.raised


class _Coordinator:
    """The `ServerApp` in Flower's thread: whether it is over, and the exception that it raised.

    Flower prints the traceback of an exception that leaves a ServerApp and, in some of its paths, drops it.
    """

    def __init__(self, app: ServerApp, sites: int) -> None:
        self._app = app
        self._sites = sites
        self._thread: int | None = None
        self._ended = threading.Event()
        self.over = threading.Event()
        """Set when the run is over, also by the workers."""
        self.raised: BaseException | None = None

    def main(self, grid: Grid, context: Context) -> None:
        """Run the app once all sites are registered."""
        self._thread = threading.get_ident()
        try:
            _await_nodes(grid, self._sites)
            self._app(grid=grid, context=context)
        except BaseException as error:
            self.raised = error
        finally:
            self.over.set()
            self._ended.set()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in its thread, where it is, as Ctrl-C does in the main thread, and wait for its end.

        Flower leaves its thread alone, which would go on in the run folder, and keep the process from its exit.
        """
        if self._thread is not None and not self._ended.is_set():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
            )
            self._ended.wait(_END_S)


@contextmanager
def _backend(make: Callable[[object], object], threads: int) -> Iterator[None]:
    """Let Flower's runtime use a backend of ours, with a thread for each worker.

    Flower has no argument for either: it knows one backend, and its pool has at most 32 threads, which would be the
    most sites that work at once in a cluster.
    """
    vce = "flwr.server.superlink.fleet.vce"
    with (
        mock.patch(f"{vce}.backend.raybackend.RayBackend", make),
        mock.patch(f"{vce}.vce_api.ThreadPoolExecutor", partial(ThreadPoolExecutor, threads)),
    ):
        yield


def _await_nodes(grid: Grid, sites: int) -> None:
    """Wait until all sites are registered.

    The runtime starts the `ServerApp` before it registers them and offers no event, so this polls.
    """
    pause = threading.Event()
    last = time.monotonic() + _REGISTRATION_S
    while len(list(grid.get_node_ids())) < sites:
        if time.monotonic() > last:
            raise EngineError("Ray cluster", expected=f"{sites} sites registered within {_REGISTRATION_S} s")
        pause.wait(0.02)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _quietly() -> Iterator[None]:
    """Turn off Flower's telemetry, and its log: its errors are raised, so that the log would show them twice."""
    telemetry.FLWR_TELEMETRY_ENABLED = "0"  # and it stays off: a thread of Flower may read it after this
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with environment({"FLWR_TELEMETRY_ENABLED": "0"}):
            yield
    finally:
        logger.setLevel(level)
