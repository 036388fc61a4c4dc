"""The loss of each simulated site before and after a run, on its own held-out records; never part of a deployment.

Worker processes evaluate the sites. Their app answers with a site's own losses, in clear, and is not the app of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.clients.ranks.resident import Resident
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import load_model
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.plan import NO_EVALUATION, Plan
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.outcome import outcome
from cloister.server.record.progress import Observer, Step
from cloister.server.record.public import base_of, public_model
from cloister.simulations.engines.grid import LocalGrid
from cloister.simulations.federation import local_grid, open_site
from cloister.simulations.partition import site_name

_QUERY = "held_out"
_STEPS = "held-out losses of sites"

_TTL_S = 14 * 24 * 3600.0
"""Seconds after which a worker that evaluates a site is given up: longer than all of them take."""


@dataclass(frozen=True)
class SiteOutcome:
    """The effect of the run for one simulated site."""

    site: str
    """The site's name."""
    sequences: int
    """Its training sequences."""
    before: float | None
    """Loss of the initial model on its own held-out records, nats per token; None if it holds nothing out."""
    after: float | None
    """Loss of the final model on the same records."""


@dataclass(frozen=True)
class Losses:
    """What `per_site` found."""

    sites: tuple[SiteOutcome, ...]
    """The sites that could be evaluated, in their order."""
    problems: Mapping[str, str]
    """The other sites, each with the reason."""


def not_evaluated(plan: Plan) -> str:
    """Why the sites of a plan cannot be evaluated one by one; empty if they can."""
    if plan.server.evaluation == NO_EVALUATION:
        return f'server.evaluation is "{NO_EVALUATION}"'
    return "" if plan.data.held_out else "data.held_out is 0"


def per_site(
    folder: RunFolder,
    observe: Observer = lambda _event: None,
    *,
    workers: int | None = None,
    watch: Callable[[str, bool], None] = lambda _site, _at_work: None,
) -> Losses:
    """Evaluate the initial and the final model on each site's own held-out records.

    Worker processes of this machine do it, one site at a time each, whatever engine the run had. The plan's
    `server.evaluation_sequences` bounds it. A site that cannot be evaluated, because its folder was removed for
    instance, is a problem of that site alone.

    Args:
        folder: The folder of a finished run whose plan `not_evaluated` does not refuse.
        observe: Receives the progress.
        workers: Worker processes; None: as many as the hardware of this machine allows.
        watch: Called when a site starts and stops working.

    Raises:
        RunFolderError: a checkpoint is missing or damaged.
        EngineError: worker processes cannot be started.
    """
    plan, count = folder.plan, folder.plan.cohort.sites
    observe(Step(_STEPS, 0, 2 * count))
    base = base_of(plan, public_model(folder, lambda _event: None))
    base_hash = b"" if base is None else vector_hash(base)
    checkpoints = Checkpoints(folder.checkpoints, load_model(plan).layout, plan.server.keep_checkpoints)
    make_app = partial(make_losses_app, folder.sites.path, plan, base_hash)
    found: dict[tuple[int, str], ConfigRecord] = {}
    problems: dict[str, str] = {}
    done = 0
    rounds = (0, outcome(folder).rounds)
    with local_grid(folder, make_app, workers, watch) as grid:
        for number in rounds:
            for node, reply in _ask(grid, checkpoints.load(number).weights):
                done += 1
                site = site_name(node - 1)
                if reply.has_error():
                    problems[site] = reply.error.reason or "no reason was given"
                else:
                    found[number, site] = reply.content.config_records["figures"]
                observe(Step(_STEPS, done, 2 * count))
    sites = []
    for index in range(count):
        site = site_name(index)
        if site not in problems:
            before, after = (found[number, site] for number in rounds)
            sites.append(SiteOutcome(site, cast(int, before["sequences"]), _loss(before), _loss(after)))
    return Losses(tuple(sites), problems)


def keep(folder: RunFolder, sites: Sequence[SiteOutcome]) -> None:
    """Write `sites.json`.

    Raises:
        StorageError: the disk refuses it.
    """
    write_bytes(folder.site_outcomes, json.dumps([asdict(site) for site in sites], indent=1).encode())


def make_losses_app(sites: Path, plan: Plan, base_hash: bytes) -> ClientApp:
    """The app of the workers that evaluate sites one by one: it answers with a site's own losses, in clear.

    No site of a run is served by it: the app of a run (`clients/app.py`), deployed or simulated, has no such message.

    Args:
        sites: The folder of the simulated sites.
        plan: The run's plan.
        base_hash: Hash of the base model; empty: that of the plan.
    """
    app, resident = ClientApp(), Resident()

    @app.query(_QUERY)
    def held_out(message: Message, context: Context) -> Message:
        site = open_site(sites, plan, int(context.node_config["partition-id"]), resident)
        weights = np.frombuffer(message.content.array_records["model"]["weights"].data, np.float32)
        found = site.held_out(plan, weights, base_hash)
        figures = ConfigRecord({"sequences": site.sequences(plan, base_hash), "loss": found.loss})
        return Message(RecordDict({"figures": figures}), reply_to=message)

    return app


def _ask(grid: LocalGrid, weights: Vector) -> Iterator[tuple[int, Message]]:
    """Send a model to all sites; yields node and reply of each as it answers."""
    array = Array("float32", weights.shape, "cloister.vector", b"")
    # Flower's constructor requires bytes, which would be a copy.
    array.data = weights.data  # type: ignore[assignment]  # LocalGrid accepts any buffer
    record = ArrayRecord()
    record["weights"] = array
    messages = [
        Message(RecordDict({"model": record}), node, f"query.{_QUERY}", ttl=_TTL_S)
        for node in grid.get_node_ids()
    ]
    for reply in grid.send_and_receive(messages):
        yield reply.metadata.src_node_id, reply


def _loss(figures: ConfigRecord) -> float | None:
    loss = cast(float, figures["loss"])
    return None if math.isnan(loss) else loss
