"""The `flower` engine: the same two apps on Flower's own simulation runtime, which Ray spreads over a cluster.

No part of a run depends on its engine. This file passes the two apps to the runtime and makes the runtime behave as
`LocalGrid` does: a site's exception becomes the same `Error` reply, the coordinator's exception reaches the caller as
the same object, and vectors may be memoryviews. Alternative refused: a grid of our own on Ray, because on one machine
`LocalGrid` is faster.
"""

from __future__ import annotations

import copyreg
import importlib.util
import logging
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import telemetry

from cloister.protocol.errors import EngineError, one_line
from cloister.simulations.process import environment, identify

_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; without it Ray warns
}

_REGISTRATION_S = 60


def run_on_flower(
    server_app: ServerApp,
    make_client_app: Callable[[], ClientApp],
    sites: int,
    *,
    cpus_per_site: float,
    gpus_per_site: float = 0.0,
) -> None:
    """Run the two apps on Flower's simulation runtime until the `ServerApp` returns.

    Node ids are Flower's own; a site reads its number, from 0, from `Context.node_config["partition-id"]`. Ray joins
    the cluster that its environment variables name, or starts one on this machine.

    Args:
        server_app: The coordinator; it runs in a thread of this process.
        make_client_app: Makes the app of the sites, once in each of Ray's actors; picklable.
        sites: Number of sites.
        cpus_per_site: CPUs that Ray reserves for a site while it handles a message.
        gpus_per_site: GPUs that Ray reserves for a site while it handles a message.

    Raises:
        EngineError: Ray is not installed, or the runtime failed.
        Exception: the exception that the `ServerApp` raised, the same object.
    """
    if importlib.util.find_spec("ray") is None:
        raise EngineError(
            "engine", "flower", expected="ray to be installed", fix="run: pip install 'cloister[ray]'"
        )
    raised: list[BaseException] = []
    guarded = ServerApp()

    # Flower prints the traceback of an exception that leaves a ServerApp and, in some of its paths, drops it.
    @guarded.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            _await_nodes(grid, sites)
            server_app(grid=grid, context=context)
        except BaseException as error:
            raised.append(error)

    with _quietly():
        from flwr.simulation import run_simulation

        try:
            run_simulation(
                guarded,
                _Site(make_client_app, secrets.token_hex(8)),
                sites,
                backend_config={
                    "init_args": {"logging_level": logging.ERROR, "log_to_driver": False},
                    "client_resources": {"num_cpus": cpus_per_site, "num_gpus": gpus_per_site},
                },
            )
        except RuntimeError as error:
            if not raised:
                cause = _root(error)
                raise EngineError(
                    "engine", "flower", expected=f"Flower's runtime to keep running ({one_line(cause)})"
                ) from error
    if raised:
        raise raised[0]


def _await_nodes(grid: Grid, sites: int) -> None:
    """Wait until all sites are registered.

    The runtime starts the `ServerApp` before it registers them and offers no event, so this polls.
    """
    pause = threading.Event()
    last = time.monotonic() + _REGISTRATION_S
    while len(list(grid.get_node_ids())) < sites:
        if time.monotonic() > last:
            raise EngineError(
                "engine", "flower", expected=f"{sites} sites registered within {_REGISTRATION_S} s"
            )
        pause.wait(0.02)


_apps: dict[str, ClientApp] = {}
"""In an actor: the app of its run. Ray unpickles a `_Site` for each message, and an app's memory outlives messages."""


class _Site(ClientApp):
    """A client app in a Ray actor; an exception of it becomes the same `Error` reply as on `LocalGrid`.

    Args:
        make_app: Makes the app.
        run: Name of the call of `run_on_flower` that it is for.
    """

    def __init__(self, make_app: Callable[[], ClientApp], run: str) -> None:
        super().__init__()
        self._make_app = make_app
        self._run = run

    def __call__(self, message: Message, context: Context) -> Message:
        identify(message.metadata.run_id, message.metadata.dst_node_id)
        try:
            if self._run not in _apps:
                _apps.clear()
                _apps[self._run] = self._make_app()
            return _apps[self._run](message, context)
        except Exception as error:  # any exception of a handler becomes an error reply, as on LocalGrid
            traceback.print_exc()
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, one_line(error)), reply_to=message)


def _reduce_view(view: memoryview) -> tuple[type[memoryview], tuple[pickle.PickleBuffer]]:
    return memoryview, (pickle.PickleBuffer(view),)


# Ray pickles messages, and an Array's data may be a memoryview, which pickle rejects by default. Actors import this
# module because they unpickle `_Site`, so the reducer is registered at both ends.
copyreg.pickle(memoryview, _reduce_view)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _quietly() -> Iterator[None]:
    """Turn off Flower's telemetry, and its log: its errors are raised, so that the log would show them twice."""
    logger = logging.getLogger("flwr")
    level, enabled = logger.level, telemetry.FLWR_TELEMETRY_ENABLED
    telemetry.FLWR_TELEMETRY_ENABLED = "0"  # flwr read the variable when it was imported
    logger.setLevel(logging.CRITICAL)
    try:
        with environment(_ENVIRONMENT):
            yield
    finally:
        logger.setLevel(level)
        telemetry.FLWR_TELEMETRY_ENABLED = enabled
