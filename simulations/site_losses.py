"""The loss of each simulated site before and after a run, on its own held-out records; never part of a deployment.

Worker processes evaluate the sites. Their app answers with a site's own losses, in clear, and is not the app of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.clients.ranks.resident import Resident
from cloister.lm.model.model import load_model
from cloister.protocol.errors import PlanError
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.plan import NO_EVALUATION, Plan
from cloister.server.door.carrier import array_of
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.outcome import outcome
from cloister.server.record.progress import Observer, Step
from cloister.server.record.public import base_of, public_model
from cloister.simulations.federation import local_grid, open_site
from cloister.simulations.partition import name_of

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
        folder: The folder of a finished run.
        observe: Receives the progress.
        workers: Worker processes; None: as many as the hardware of this machine allows.
        watch: Called when a site starts and stops working.

    Raises:
        PlanError: the plan evaluates nothing, or the sites hold nothing out.
        RunFolderError: a checkpoint is missing or damaged.
        EngineError: worker processes cannot be started.
    """
    plan, count = folder.plan, folder.plan.cohort.sites
    if plan.server.evaluation == NO_EVALUATION or not plan.data.held_out:
        field = "server.evaluation" if plan.server.evaluation == NO_EVALUATION else "data.held_out"
        raise PlanError(field, expected="an evaluation, on records that sites hold out")
    observe(Step(_STEPS, 0, count))
    base = base_of(plan, public_model(folder, lambda _event: None))
    base_hash = b"" if base is None else vector_hash(base)
    checkpoints = Checkpoints(folder.checkpoints, load_model(plan).layout, plan.server.keep_checkpoints)
    models = ArrayRecord()
    for name, number in (("before", 0), ("after", outcome(folder).rounds)):
        models[name] = array_of(checkpoints.load(number).weights.view(np.uint8).data)
    make_app = partial(make_losses_app, folder.sites.path, plan, base_hash)
    found: dict[str, SiteOutcome] = {}
    problems: dict[str, str] = {}
    with local_grid(folder, make_app, workers, watch) as grid:
        asked = (
            Message(RecordDict({"models": models}), node, f"query.{_QUERY}", ttl=_TTL_S)
            for node in grid.get_node_ids()
        )
        for done, reply in enumerate(grid.send_and_receive(asked), 1):
            site = name_of(plan, reply.metadata.src_node_id - 1)
            if reply.has_error():
                problems[site] = reply.error.reason or "no reason was given"
            else:
                found[site] = SiteOutcome(
                    site, **json.loads(str(reply.content.config_records["figures"]["json"]))
                )
            observe(Step(_STEPS, done, count))
    return Losses(tuple(found[site] for site in sorted(found)), problems)


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
        figures: dict[str, float | None] = {"sequences": site.sequences(plan, base_hash)}
        for name, model in message.content.array_records["models"].items():
            loss = site.held_out(plan, np.frombuffer(model.data, np.float32), base_hash).loss
            figures[name] = None if math.isnan(loss) else loss
        return Message(RecordDict({"figures": ConfigRecord({"json": json.dumps(figures)})}), reply_to=message)

    return app
