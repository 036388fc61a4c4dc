"""A whole federation on one machine: real sites with folders of their own, and the real apps, on one engine.

A simulated site is an ordinary site: it has its own folder with its records, its TOML and its state, and is served by
the same `ClientApp` as a deployed one. Only the machine that it runs on and the speed of its hardware are simulated.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from cloister.clients.app import client_app
from cloister.clients.ranks.device_mesh import mesh_for
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig, read_config
from cloister.clients.site import Simulated, Site
from cloister.clients.state.kept import DECLARED_ROUNDING, base_path, save_vector
from cloister.clients.training.release import MUST_STAY
from cloister.lm.data.prepare import Prepared, check_usable
from cloister.lm.data.store import Store
from cloister.lm.model import saved
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import count_parameters
from cloister.lm.tasks.registry import carried, take, task_of, tokenizer_of
from cloister.lm.tasks.task import sample_line
from cloister.lm.text.corpus import Corpus, check_corpus, corpus_records
from cloister.lm.text.records import Records, Unusable, read_each
from cloister.lm.text.sources import overlap
from cloister.privacy.accounting.signal import advice, signal_of, summary
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import DataError, EngineError, ModelError, PlanError, RunFolderError, one_line
from cloister.protocol.identity.roster import (
    Card,
    Roster,
    load_identity,
    load_roster,
    new_identity,
    save_identity,
    save_roster,
)
from cloister.protocol.machine.storage import sync_to_disk, write_file, write_folder, write_new
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.envelope import Sender
from cloister.protocol.plan.plan import Plan, ProfileSection
from cloister.protocol.plan.template import to_toml
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import of_sequences
from cloister.server.federation.app import GridChannel, MeetingChannel, server_app
from cloister.server.record.folder import RunFolder, SitesFolder
from cloister.server.record.history import identity, next_start, reached, run_history
from cloister.server.record.journal import CREATED, DONE, FINISHED
from cloister.server.record.outcome import Outcome, finish
from cloister.server.record.phases import Phase, Phases
from cloister.server.record.progress import Event, Observer, Preparing, Started, Step, Warned
from cloister.server.record.public import base_of, public_model
from cloister.server.run import run
from cloister.simulations import store
from cloister.simulations.engines import fork_server
from cloister.simulations.engines.flower import run_on_flower
from cloister.simulations.engines.grid import LocalGrid
from cloister.simulations.engines.process import peak_rss, return_freed_memory
from cloister.simulations.faults import Faulty
from cloister.simulations.given import Given, check_apart
from cloister.simulations.partition import (
    Alter,
    keep_apart,
    name_of,
    partition,
    unaltered,
    write_records,
    write_sites,
)
from cloister.simulations.poison import altered, multiplied, scale_of

_RUN_ID = 1
_MEETING_S = 600.0
"""Seconds for which sites of a cluster may take to tell their names, before the run begins with those that have."""


def simulate(
    folder: RunFolder,
    observe: Observer,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    watch: Callable[[str, bool], None] = lambda _site, _at_work: None,
) -> Outcome:
    """Run a folder's plan to its end, from the beginning or from where an earlier process stopped.

    Args:
        folder: The run folder; the sites' folders are made in it, under `sites/`.
        observe: Receives the run's events.
        workers: Worker processes; None: as many as the hardware of this machine, or of the cluster, allows.
        ray_address: HOST:PORT of a running Ray cluster, for Flower's simulation runtime; None: worker processes of this
            machine.
        watch: Called when a site of this machine starts and stops working.

    Raises:
        CloisterError: the run stopped; it can be resumed.
    """
    plan = folder.plan
    if workers is not None and workers < 1:
        raise EngineError("--workers", workers, expected="1 or more")
    if reached(folder, FINISHED):
        return replace(finish(folder, observe), coordinator_rss=peak_rss())
    phases = Phases()
    with phases.during(Phase.PREPARE):
        dataset = DatasetLedger.of(plan)
        on_cpu = ray_address is None and not torch.cuda.is_available()
        _check(folder, dataset, 1 + len(_places(plan, workers)) if on_cpu else 0)
    sites = folder.sites.path
    outcomes: list[Outcome] = []

    def main(grid: Grid, _context: Context) -> None:
        outcomes.append(_coordinate(folder, grid, observe, dataset, phases))

    worker_rss: int | None = None
    app = server_app(main)
    if ray_address is not None:
        run_on_flower(
            app,
            partial(make_client_app, sites.absolute(), plan, carried(plan.data)),
            plan.cohort.sites,
            ray_address,
            workers=workers,
            threads=plan.local.threads,
            workers_per_gpu=plan.simulation.workers_per_gpu,
            shared=folder.path,
        )
    else:
        make_app = partial(make_client_app, sites, plan, carried(plan.data))
        with local_grid(folder, make_app, workers, watch) as grid:
            app(grid, Context(_RUN_ID, 0, {}, RecordDict(), {}))
            children = multiprocessing.active_children()
            peaks = [peak_rss(child.pid) for child in children if child.name.startswith("cloister ")]
            worker_rss = max((peak for peak in peaks if peak is not None), default=None)
    return replace(outcomes[0], coordinator_rss=peak_rss(), worker_rss=worker_rss)


def _coordinate(
    folder: RunFolder, grid: Grid, observe: Observer, dataset: DatasetLedger | None, phases: Phases
) -> Outcome:
    """The coordinator of a simulation, which also makes what the sites need."""
    plan = folder.plan

    def told(event: Event) -> None:
        if isinstance(event, Started):
            return_freed_memory()  # of the model that was loaded: its weights now lie in the optimizer's vector
        observe(event)

    with phases.during(Phase.PREPARE):
        public = _prepare(folder, observe)  # while the engine's processes import what they need
        roster = load_roster(folder.sites.roster) if plan.aggregation.secure else None
        channel = _channel(folder, grid, identity(folder, roster))
    return run(
        folder,
        channel,
        told,
        roster=roster,
        public=public,
        noise=partial(noise_of, plan, "coordinator"),
        dataset=dataset,
        phases=phases,
    )


def _channel(folder: RunFolder, grid: Grid, run_identity: str) -> GridChannel:
    """The channel to a run's sites: the nodes of the local engine are known, others tell their names."""
    sender = Sender(load_identity(folder.sites.coordinator), run_identity, next_start(folder))
    names = [name_of(folder.plan, index) for index in range(folder.plan.cohort.sites)]
    if isinstance(grid, LocalGrid):
        return GridChannel(grid, sender, dict(enumerate(names, 1)))
    channel = MeetingChannel(grid, sender, names)
    channel.meet(len(names), _MEETING_S)
    return channel


def local_grid(
    folder: RunFolder,
    make_app: Callable[[], ClientApp],
    workers: int | None,
    watch: Callable[[str, bool], None],
) -> LocalGrid:
    """Worker processes of this machine for the sites of a run.

    Args:
        folder: The run folder.
        make_app: Makes the app of the sites; picklable.
        workers: As for `simulate`.
        watch: As for `simulate`.
    """
    plan = folder.plan
    return LocalGrid(
        make_app,
        [{"partition-id": index} for index in range(plan.cohort.sites)],
        workers=_places(plan, workers),
        slots=[profile_of(plan, index).slots for index in range(plan.cohort.sites)],
        preload=fork_server.modules(plan),
        log=folder.workers_log,
        watch=lambda node, at_work: watch(name_of(plan, node - 1), at_work),
    )


def _check(folder: RunFolder, dataset: DatasetLedger | None, processes: int) -> None:
    """Refuse here, not at every site, records that are not there, a model that does not fit the plan, and a run that a
    limit over runs forbids.

    Args:
        folder: The run folder.
        dataset: The ledger over runs.
        processes: Processes of this machine that have the model in its memory; 0 if that is not known.

    Raises:
        CloisterError: the run is refused.
    """
    plan = folder.plan
    parameters, trained, _ = count_parameters(plan)
    terms = terms_of(plan, trained)
    if not folder.sites.path.exists():
        if reached(folder, CREATED):
            raise RunFolderError(
                str(folder.sites.path),
                expected="the sites of this run with their ledgers, which are missing",
                fix="restore the folder from a backup, or start a new run",
            )
        check_corpus(plan.simulation.source, field="simulation.source", split=plan.simulation.split)
    if processes:
        _check_memory(parameters, processes)
    for index, profile in enumerate(plan.simulation.profiles):
        try:
            mesh_for(plan, profile.mesh, "auto")
        except (ModelError, PlanError) as error:
            raise type(error).of(error, f"simulation.profiles[{index}].{error.field}") from error
    if dataset is None:
        return
    assert terms is not None, "a sound plan with a ledger has a privacy unit"
    history = run_history(folder) if reached(folder, DONE) else None
    names = [name_of(plan, index) for index in range(plan.cohort.size())]  # as many as one round draws
    released = (history.summed, tuple(history.evaluated)) if history else ((), ())
    dataset.check(terms, history.run if history else "", released[0], names, released[1])


def _check_memory(parameters: int, processes: int) -> None:
    """Refuse a model whose float32 weights alone exceed this machine's memory: the kernel would kill the run.

    Raises:
        ModelError: they do.
    """
    needed, memory = 4 * parameters * processes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ModelError(
            "model",
            f"{parameters:,} parameters",
            expected=f"weights that {processes} processes hold in {memory / 1e9:.0f} GB of memory, and they take "
            f"{needed / 1e9:.0f} GB",
            fix="set a smaller model in [model.config], or use fewer --workers",
        )


def _prepare(folder: RunFolder, observe: Observer) -> Vector | None:
    """Make what the sites need, as far as it is not there: their folders, their sequences, and the base model.

    Returns:
        What `public_model` returns.
    """
    plan, sites = folder.plan, folder.sites.path
    if not sites.exists():
        observe(Preparing("data of the sites"))
        write_folder(sites, partial(lay_out, plan), durable=plan.simulation.durable)
    made = saved.recorded(folder.sites.sequences) and not saved.damage(folder.sites.sequences)
    if of_sequences(plan) and not made:
        _make_sequences(plan, folder.sites, observe)
    public = public_model(folder, observe)
    base = base_of(plan, public)
    if base is not None and not (path := base_path(sites, vector_hash(base))).exists():
        write_file(path, lambda temporary: save_vector(temporary, base))  # where all sites look: on disk once
    return public


def make_client_app(sites: Path, plan: Plan, task: bytes = b"") -> ClientApp:
    """The `ClientApp` of every simulated site of a run; in a worker process, which serves no other run.

    Args:
        sites: The folder of the sites.
        plan: The plan.
        task: Its task, if a Python program gave the class (`lm.tasks.registry.carried`).
    """
    take(plan.data, task)
    sync_to_disk(plan.simulation.durable)
    return client_app(partial(_site_of, sites, plan), explain=one_line)  # one machine, one owner


def profile_of(plan: Plan, index: int) -> ProfileSection:
    """The profile of the site with a number: profiles take their share of the sites in order."""
    reached = 0.0
    for profile in plan.simulation.profiles:
        reached += profile.share
        if index < round(reached * plan.cohort.sites):
            return profile
    return ProfileSection(share=1.0)


def noise_of(plan: Plan, who: str, round_number: int) -> NoiseStream:
    """The stream of the noise of a site, or the `coordinator`, in a round; secret, unless the plan declares a seed."""
    seed = plan.simulation.noise_seed
    if seed is None:
        return NoiseStream.fresh()
    return NoiseStream.from_declared_seed(seed).child(f"{who}/{round_number}")


def declare_rounding(plan: Plan, site: str, state: Path) -> None:
    """Give a simulated site a key of its rounding that follows from the plan, so that a simulation can be repeated."""
    key = hashlib.sha256(f"rounding key/{plan.run.seed}/{site}".encode()).digest()
    write_new(state / DECLARED_ROUNDING, key, durable=False)


def _site_of(sites: Path, plan: Plan, context: Context, resident: Resident) -> Faulty:
    index = int(context.node_config["partition-id"])
    return Faulty(open_site(sites, plan, index, resident), plan, profile_of(plan, index).speed)


def open_site(sites: Path, plan: Plan, index: int, resident: Resident) -> Site:
    """The simulated site with a number: an ordinary site, whose noise is secret or that of the declared seed.

    Args:
        sites: The sites' folder, which holds one base model for all of them.
        plan: The run's plan.
        index: The number.
        resident: The state that the process has in memory for its sites.
    """
    config = _config(SitesFolder(sites).config(name_of(plan, index)))
    simulated = Simulated(
        noise=partial(noise_of, plan, config.name),
        bases=sites,
        dataset=DatasetLedger.of(plan),
        sequences=partial(_sequences, SitesFolder(sites).sequences, index),
        one_owner=True,
        task=partial(multiplied, scale_of(plan, index)),
    )
    return Site(config, resident, simulated=simulated)


def _make_sequences(plan: Plan, sites: SitesFolder, observe: Observer) -> None:
    """Tokenise the records of all sites, and tell what is left out."""
    count = plan.cohort.sites
    paths = [sites.site(name_of(plan, index)) / "data.jsonl" for index in range(count)]
    each = max(1, count // 100)

    def progress(done: int) -> None:
        if done % each == 0:
            observe(Step("sites have their data", done, count))

    store.make(sites.sequences, plan, tokenizer_of(plan), paths, progress)
    if line := left_out(plan, sites):
        observe(Preparing(f"data of the sites: {line}"))
    if plan.privacy.unit != "none":
        _tell_signal(plan, Store(sites.sequences).units(), observe)


def _tell_signal(plan: Plan, units: Sequence[int], observe: Observer) -> None:
    """Tell how long the noise of the run is beside what its records add, and what to change.

    Args:
        plan: A plan with a privacy unit.
        units: Of each site.
        observe: Is told it; the counts are exact, and no charge covers them.
    """
    counts = count_parameters(plan)
    terms = terms_of(plan, counts.trained)
    assert terms is not None, "there is a unit"
    of_site = plan.privacy.unit == "site"
    found = signal_of(plan, terms, counts.summed, [1] if of_site else units)
    if found is None:
        return
    must_stay = "" if of_site else f" ({MUST_STAY}: exact counts, which no charge covers)"
    observe(Preparing(f"data of the sites{must_stay}: {summary(plan, found)}"))
    for text in advice(plan, found, plan.cohort.sites if of_site else sum(units)):
        observe(Warned(text))


def left_out(plan: Plan, sites: SitesFolder) -> str:
    """The records that the sites of a simulation do not use, in one line for their owner; empty if they use all."""
    return not_used(*Store(sites.sequences).left_out(), plan) if sites.sequences.exists() else ""


def not_used(counts: Mapping[str, int], places: Mapping[str, str], plan: Plan) -> str:
    """Records that are not used, by the reason; without a privacy unit with the place of the first of each."""
    known = places if plan.privacy.unit == "none" else {}
    shown = (
        f"{number:,} {reason}" + (f" (the first: {known[reason]})" if known.get(reason) else "")
        for reason, number in sorted(counts.items())
    )
    exact = "" if plan.privacy.unit == "none" else f" ({MUST_STAY}: exact counts, which no charge covers)"
    return f"not used{exact}: {', '.join(shown)}" if counts else ""


def _sequences(folder: Path, index: int) -> Prepared | None:
    """The sequences of a site; None where there is no store: the site makes its own."""
    return _store(folder).site(index) if folder.exists() else None


_store = lru_cache(maxsize=4)(Store)
"""The store of a run, mapped once in a worker."""
_config = lru_cache(maxsize=4096)(read_config)
"""A simulated site's configuration, read once in a worker."""


def lay_out(plan: Plan, folder: Path, given: Given | None = None) -> None:
    """Write every site's folder: its records, its keys and its TOML.

    Args:
        plan: The plan.
        folder: The folder of the sites.
        given: The records of `simulation.sites`; None: those of `simulation.source`.

    Raises:
        DataError: the records cannot be read or divided, or none of them can be used; or what was given as public
            has a record of the sites.
        PlanError: what the plan names as public is what its sites are given.
    """
    names = SitesFolder(folder)
    lay_out_records(plan, folder, partial(altered, plan), given)
    identities = {name_of(plan, index): new_identity() for index in range(plan.cohort.sites)}
    roster = Roster.of(Card.of(name, key) for name, key in identities.items())
    save_roster(roster, names.roster)
    coordinator = new_identity()
    save_identity(coordinator, names.coordinator, durable=False)
    for index, (name, key) in enumerate(identities.items()):
        # The folder is synced as a whole.
        save_identity(key, names.site(name) / "identity.pem", durable=False)
        write_config(
            plan,
            names,
            index,
            coordinator=coordinator.public_key().public_bytes_raw().hex(),
            roster="../roster.toml",
            roster_hash=roster.hash.hex(),
        )


def public_sources(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The fields of a plan for public records, each with its source, which may be empty, and the split of it."""
    yield "public.source", plan.public.source, plan.public.split
    yield "server.evaluation", "" if plan.at_sites else plan.server.evaluation, "train"


def _check_public_sources(plan: Plan) -> None:
    """Check that what a plan with a privacy unit names as public is not what its sites are given.

    Raises:
        PlanError: it is: training or evaluation on it at the coordinator would be a release without a charge.
    """
    if plan.privacy.unit == "none":
        return
    records = plan.simulation
    for field, source, split in public_sources(plan):
        # Only splits of the hub are apart, and only by name: `train[:9]`, `train+test` and `all` have records of others
        names = {split, records.split}
        hub = not source.startswith("builtin:") and not Path(source).expanduser().exists()
        apart = hub and len(names) == 2 and "all" not in names and all(map(str.isidentifier, names))
        if source and not apart and overlap(source, records.source, field):
            raise PlanError(
                field,
                source,
                expected="public records, and these are records of the sites (simulation.source)",
                fix="name other records; server.evaluation may be simulation:public, which no site has",
            )


def lay_out_records(plan: Plan, folder: Path, alter: Alter = unaltered, given: Given | None = None) -> None:
    """Write every site's records, and those that no site has; `alter` as for `write_sites`, the rest as `lay_out`."""
    kept, parts, apart = shared_out(plan, given) if given and given.sites else divided(plan)
    if given is not None:
        check_apart(plan, given, kept)
    write_sites(folder, kept, parts, alter, partial(name_of, plan))
    if apart:
        write_records(SitesFolder(folder).public_records, apart)


def divided(
    plan: Plan, unusable: Unusable | None = None
) -> tuple[Records, list[list[int]], list[Mapping[str, Any]]]:
    """Read the records of a simulation and divide them over its sites, without a file written.

    Args:
        plan: The plan.
        unusable: As for `usable`.

    Returns:
        The records of all sites, for each site the indices of its own, and the records that no site has.

    Raises:
        DataError: the records cannot be read or divided, or none of them can be used.
        PlanError: what the plan names as public is what its sites are given.
    """
    simulation = plan.simulation
    _check_public_sources(plan)
    corpus = usable(plan, "simulation.source", simulation.source, simulation.split, unusable)
    kept, apart = keep_apart(corpus.records, simulation.public, plan.run.seed)
    sites, seed = plan.cohort.sites, plan.run.seed
    return kept, partition(kept, simulation, sites, seed, field=corpus.field, least=_least(plan)), apart


def _least(plan: Plan) -> int:
    """Records that a site needs: one more than is held out. The end of a single text can be held out."""
    return 1 if task_of(plan.data).divides or not plan.data.held_out or plan.privacy.unit != "none" else 2


def shared_out(plan: Plan, given: Given) -> tuple[Records, list[list[int]], list[Mapping[str, Any]]]:
    """The records that each site was given, as `divided` returns those that it divides.

    Raises:
        DataError: a site has too few, or none of all records can be used.
    """
    owned = [
        (site, record) for site, name in enumerate(plan.simulation.sites) for record in given.sites[name]
    ]
    with _explained(plan):
        if of_sequences(plan):
            check_usable((record for _, record in owned), tokenizer_of(plan), plan, Unusable())
        else:
            _check_field(plan, [record for _, record in owned])
    kept, apart = keep_apart(owned, plan.simulation.public, plan.run.seed)
    parts: list[list[int]] = [[] for _ in plan.simulation.sites]
    for index, (site, _) in enumerate(kept):
        parts[site].append(index)
    for name, part in zip(plan.simulation.sites, parts, strict=True):
        if len(part) < (least := _least(plan)):
            raise DataError(f"sites[{name!r}]", len(part), expected=f"at least {least} records to train on")
    return [record for _, record in kept], parts, [record for _, record in apart]


@contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Let errors about records show one that the plan can use."""
    try:
        yield
    except DataError as error:
        if error.fix:
            raise
        fix = f"a record of this plan is one line such as {sample_line(task_of(plan.data))}"
        raise DataError.of(error, fix=fix) from error


def usable(
    plan: Plan, field: str, source: str, split: str = "train", unusable: Unusable | None = None
) -> Corpus:
    """Read a source that a field of the plan names, and check that one of its records can be used.

    Args:
        plan: The plan.
        field: The field.
        source: The source.
        split: Split of a hub data set.
        unusable: Counts the records that cannot be used; without it, one that can be used is enough.

    Raises:
        DataError: the records cannot be read, or none of them can be used.
    """
    with _explained(plan):
        corpus = corpus_records(source, field=field, split=split)
        if not of_sequences(plan):
            _check_field(plan, corpus.records)
            return corpus
        count, path = unusable or Unusable(), Path(source).expanduser()
        # Read again where errors can name a line: as a rule the first record can be used.
        records = read_each(str(path), count, documents=True) if path.exists() else corpus.records
        check_usable(records, tokenizer_of(plan), plan, count, whole=unusable is not None)
    return corpus


def _check_field(plan: Plan, records: Records) -> None:
    """Refuse a question about a field that no record has, for the person who owns all of them: it would be charged.

    Raises:
        DataError: none has it.
    """
    field = question_of(plan).field
    if not any(field in record for record in records):
        has = ", ".join(sorted(records[0])) if len(records) else "none"
        raise DataError(
            "question.field",
            field,
            expected=f"a field of the records; those of the first one: {has}",
            fix="name another",
        )


def write_config(plan: Plan, sites: SitesFolder, index: int, **more: str) -> None:
    """Write the `site.toml` of the site with a number, and declare its rounding."""
    name, profile = name_of(plan, index), profile_of(plan, index)
    declare_rounding(plan, name, sites.state(name))
    config = SiteConfig(
        name=name,
        data="data.jsonl",
        state="state",
        identity="identity.pem",
        plan=plan.digest(),
        secure=plan.aggregation.secure,
        speed=profile.speed,
        mesh=profile.mesh,
    ).model_copy(update=more)
    sites.config(name).write_text(to_toml(config, comments=False), encoding="utf-8")


def _places(plan: Plan, workers: int | None) -> list[Mapping[str, str]]:
    """One environment for each worker: its threads, and its GPU where there are any."""
    gpus = torch.cuda.device_count()
    on_cpu = max(1, len(os.sched_getaffinity(0)) // plan.local.threads)
    count = workers or (gpus * plan.simulation.workers_per_gpu if gpus else on_cpu)
    count = min(count, plan.cohort.sites)
    return [
        {**fork_server.variables(plan), **({"CUDA_VISIBLE_DEVICES": _gpu(worker % gpus)} if gpus else {})}
        for worker in range(count)
    ]


def _gpu(index: int) -> str:
    """The name of a GPU by its number among those this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)
