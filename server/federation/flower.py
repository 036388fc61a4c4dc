"""The coordinator in a Flower federation that is there already: the `ServerApp` that a bundle names.

Its run configuration has the folder of the federation on this machine, and the plan. It makes a run folder in the
federation's `runs`, as `cloister submit` does, or continues the one that `run` names. Whoever operates the SuperLink
carries the messages: requests are signed, replies are sealed (`protocol/messages/envelope.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from cloister.lm.model.model import count_parameters
from cloister.protocol.errors import CloisterError, EngineError, ModelError
from cloister.protocol.machine.child import append_to
from cloister.protocol.messages.envelope import LARGEST_SEALED
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json
from cloister.server.door.grid import most_bytes_of
from cloister.server.federation.app import GridChannel, MeetingChannel, server_app
from cloister.server.federation.deployed import Begun, coordinate
from cloister.server.federation.deployment import Deployment, check_deployable
from cloister.server.federation.registry import Registry
from cloister.server.record.events import to_json, with_time
from cloister.server.record.folder import RunFolder, free_path
from cloister.server.record.progress import Event

_log = logging.getLogger(__name__)


def check_carried(plan: Plan) -> None:
    """Check that each vector of a plan fits into a message of Flower.

    Flower sends arrays in chunks and states no limit for a message, but each party has all of it in memory, and no
    payload of its HTTP has 2 GiB; a sealed frame has the same limit.

    Raises:
        ModelError: a vector is larger.
    """
    counts = count_parameters(plan)
    based = counts.parameters if plan.public.source and plan.model.adapter.scheme != "full" else 0
    largest = max(4 * max(counts.trained, based), most_bytes_of(plan, counts.trained))
    if largest > LARGEST_SEALED:
        raise ModelError(
            "model",
            f"vectors of {largest:,} bytes",
            expected=f"at most {LARGEST_SEALED:,} in a Flower federation, which has each of them in memory",
            fix="train an adapter, or deploy the plan at a door: cloister coordinator start",
        )


def _main(grid: Grid, context: Context) -> None:
    try:
        _run(grid, context)
    except CloisterError as error:
        _log.error("%s", error)
        raise


def _run(grid: Grid, context: Context) -> None:
    said = {name: str(value) for name, value in context.run_config.items()}
    registry = Registry.open(Path(said["federation"]))
    with _folder(said, registry) as folder, append_to(folder.events) as events:
        one_at_a_time = threading.Lock()

        def observe(event: Event) -> None:
            with one_at_a_time:
                line = to_json(event)
                print(line, flush=True)  # which Flower keeps as the run's log
                events.write(with_time(line))
                events.flush()

        check_carried(folder.plan)
        coordinate(folder, registry, observe, partial(_met, grid))


def _folder(said: dict[str, str], registry: Registry) -> RunFolder:
    """The run folder: a new one, or the one that is continued."""
    if said["run"]:
        return RunFolder.reopen(Path(said["run"]))
    plan = from_json(said["plan"])
    check_deployable(plan, registry.federation)
    try:
        wait_s = float(said["wait"])
    except ValueError:
        raise EngineError("wait", said["wait"], expected="seconds") from None
    folder = RunFolder.create(free_path(registry.path / "runs", plan.run.name), plan)
    Deployment(registry.federation.version, wait_s, str(registry.path.absolute())).write(folder)
    return folder


@contextmanager
def _met(grid: Grid, begun: Begun) -> Iterator[GridChannel]:
    """The messages of a run over Flower's grid, when its sites, or as many as it needs, have told their names."""
    roster, cohort = begun.federation.roster, begun.folder.plan.cohort
    channel = MeetingChannel(grid, begun.sender(roster), roster.names)
    if (met := channel.meet(cohort.sites, begun.deployment.wait_s)) < cohort.needed():
        raise EngineError(
            "sites",
            met,
            expected=f"at least {cohort.needed()} of {cohort.sites} that answer within {begun.deployment.wait_s:g} s",
            fix="see the logs of the other SuperNodes; continue with: flwr run BUNDLE --run-config 'run=\"RUN\"'",
        )
    yield channel


app = server_app(_main)
