"""A rehearsal: a deployment on one machine, with real processes, TLS, keys and authentication, for one plan.

The run folder is that of a simulation, with the coordinator's folder of the federation beside. Every party has the
folder, the files and the processes that it would have on its own machine, and reaches the others over loopback.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from cloister.protocol.errors import EngineError
from cloister.protocol.identity.address import LOOPBACK, free_port
from cloister.protocol.machine.child import Child
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.plan.plan import Plan
from cloister.server.federation.control import command
from cloister.server.federation.deployment import Deployment, check_not_simulated, refusal_in
from cloister.server.federation.registry import Registry, Terms
from cloister.server.record.folder import RunFiles, RunFolder, SitesFolder
from cloister.server.record.progress import Observer, Preparing
from cloister.simulations.engines import fork_server
from cloister.simulations.federation import lay_out_records, write_config
from cloister.simulations.partition import name_of
from cloister.simulations.rehearsal.provision import parties

_START_S = 120.0
"""Seconds within which a coordinator is ready."""


def prepare(folder: RunFolder, observe: Observer) -> None:
    """Make all parties of a rehearsal: the sites' folders with keys and records, and the coordinator's.

    Args:
        folder: The run folder, new.
        observe: Receives the run's events.

    Raises:
        CloisterError: the records cannot be read or divided, or the plan is for simulations only.
    """
    plan = folder.plan
    check_not_simulated(plan)
    observe(Preparing("data and keys of the sites"))
    write_folder(folder.sites.path, partial(_fill, plan, folder.federation), durable=plan.simulation.durable)
    registry = Registry.open(folder.federation)
    Deployment(registry.federation.version, _START_S, str(registry.path)).write(folder)


def _fill(plan: Plan, federation: Path, folder: Path) -> None:
    sites, now = SitesFolder(folder), datetime.datetime.now(datetime.UTC)
    lay_out_records(plan, folder)
    names = [name_of(plan, index) for index in range(plan.cohort.sites)]
    for index, name in enumerate(names):
        sites.site(name).chmod(0o700)
        write_config(plan, sites, index)
    terms = Terms(name="rehearsal", door=f"{LOOPBACK}:{free_port()}", certificate_names=("localhost",))
    parties(federation, terms, {name: (sites.site(name), "rehearsal") for name in names}, now)


@contextmanager
def running(
    files: RunFiles,
    plan: Plan,
    told: Callable[[str], None],
    *,
    log_format: str = "text",
    metrics: Sequence[str] = (),
) -> Iterator[None]:
    """A context in which all processes of a rehearsal run, and in which its run is submitted.

    A process that ends is started again.

    Args:
        files: The run folder.
        plan: Its plan.
        told: Receives a line for each process that has ended; in threads.
        log_format: How its processes log, as in `cloister coordinator start`.
        metrics: The options of `cloister coordinator start` for metrics.

    Raises:
        EngineError: the coordinator does not start; the error has the last line of its log.
    """
    federation = files.federation
    with ExitStack() as opened:
        listen = ["--bind", Registry.open(federation).federation.door, *metrics]
        start = ["coordinator", "start", str(federation), "--log-format", log_format, *listen]
        log, gone = files.path / "federation.log", threading.Event()

        def ended(line: str) -> None:
            told(line)
            gone.set()

        opened.enter_context(Child("cloister", start, log, ended=ended))
        for name in files.sites.names():
            arguments = ["site", "start", str(files.sites.config(name)), "--log-format", log_format]
            file = files.sites.site(name) / "site.log"
            variables = fork_server.variables(plan)
            opened.enter_context(Child("cloister", arguments, file, environment=variables, ended=told))
        _wait_for_coordinator(federation, log, gone)
        (found,) = command(federation, do="status")
        if not any(entry["state"] in ("running", "waiting") for entry in found["runs"]):
            list(command(federation, do="submit", run=str(files.path.absolute())))
        yield


def _wait_for_coordinator(federation: Path, log: Path, ended: threading.Event) -> None:
    """Wait until it answers commands; `ended` is set when its process has ended."""
    until, look = time.monotonic() + _START_S, threading.Event()
    while True:
        try:
            list(command(federation, do="status"))
            return
        except EngineError:
            refused = ended.is_set() and refusal_in(log)
            if refused or time.monotonic() > until:
                because = f" ({refused})" if refused else f" within {_START_S:g} s"
                raise EngineError(
                    "coordinator", expected=f"one that starts{because}", fix=f"see {log}"
                ) from None
        look.wait(0.2)
