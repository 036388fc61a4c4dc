"""A simulated run for a Python program: start it, go on with it, and read what it has found.

The command line executes runs by the same `execute`. No signal handler is installed: Ctrl-C is Python's own
`KeyboardInterrupt`, and leaves a run that goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister.protocol.errors import CloisterError, PackageError, PlanError, RunFolderError, StorageError
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.plan.plan import MeshSection
from cloister.protocol.plan.plan import Plan as Contract
from cloister.protocol.plan.soundness import Plan, changed
from cloister.server.record.folder import RunFiles, RunFolder, free_path, read_answer, read_plan, trained_plan
from cloister.server.record.progress import Preparing

if TYPE_CHECKING:
    from cloister.lm.tasks.registry import Pin
    from cloister.lm.tasks.task import Task
    from cloister.privacy.report.answer import Answer
    from cloister.server.display import LineDisplay
    from cloister.server.record.outcome import Outcome
    from cloister.simulations.given import Given
    from cloister.simulations.report import Report


def simulate(
    plan: Contract,
    *,
    sites: Mapping[str, Any] | None = None,
    public: Any = None,
    evaluation: Any = None,
    out: str | Path | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    quiet: bool = False,
    task: type[Task] | None = None,
) -> Run:
    """Simulate a whole federation on this machine, or a Ray cluster, and return the finished run.

    Records are a path, a `builtin:` or hub name, mappings one by one, a table of pandas or Arrow, or a split of
    `datasets`. Those of sites are copied into the run folder, so that `Run.resume` does not need the objects.

    Args:
        plan: The plan. Its `cohort.sites`, `simulation.source` and `simulation.sites` follow from `sites`.
        sites: The records of each site, by its name; they are the sites in alphabetical order. None: the plan's
            `simulation.source`, divided over the sites.
        public: Public records for training before the first round (`public.source`); None: the plan's own.
        evaluation: Public records for held-out evaluation (`server.evaluation`); None: the plan's own.
        out: The run folder, new or empty; None: one in `runs/` with the name of the run.
        workers: Worker processes; None: as many as the hardware allows.
        ray_address: HOST:PORT of a running Ray cluster, whose nodes share the run folder.
        quiet: Show nothing.
        task: A class of task that no package registers (docs/extend.md). The plan names it and the hash of its source;
            a deployment refuses such a plan.

    Raises:
        CloisterError: the run was refused, and then leaves no folder, or it stopped, and can be resumed.
    """
    _check_plan(plan)
    if plan.question is not None:
        raise PlanError(
            "question",
            plan.question.kind,
            expected="none: a question trains nothing",
            fix="cloister.ask(plan)",
        )
    if task is not None:
        if any(profile.mesh != MeshSection() for profile in plan.simulation.profiles):
            raise PackageError(
                "task",
                task.__name__,
                expected="a task of a package, because a site of simulation.profiles has a mesh, whose ranks do not "
                "know a class that a program gave",
            )
        with _using(task) as pin:
            package = {"version": "object", "sha256": pin.sha256}
            plan = changed(plan, {"data.task": pin.task, "data.package": package})
            return simulate(
                plan,
                sites=sites,
                public=public,
                evaluation=evaluation,
                out=out,
                workers=workers,
                ray_address=ray_address,
                quiet=quiet,
            )
    from cloister.simulations.given import Given

    given = Given.of(plan, sites, public=public, evaluation=evaluation)
    return _run(given, out, workers, ray_address, quiet=quiet)


def ask(
    plan: Contract,
    *,
    sites: Mapping[str, Any] | None = None,
    evaluation: Any = None,
    out: str | Path | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    quiet: bool = False,
) -> Run:
    """Ask the sites of a simulated federation a question; the answer is `Run.answer`.

    Args:
        plan: A plan with a question.
        sites: As for `simulate`.
        evaluation: Public records that a question about models evaluates too; None: the plan's own.
        out: As for `simulate`.
        workers: As for `simulate`.
        ray_address: As for `simulate`.
        quiet: As for `simulate`.

    Raises:
        CloisterError: as of `simulate`.
    """
    _check_plan(plan)
    if plan.question is None:
        raise PlanError(
            "question", expected="a plan with a question", fix="cloister.simulate(plan) trains a model"
        )
    from cloister.simulations.given import Given

    return _run(Given.of(plan, sites, evaluation=evaluation), out, workers, ray_address, quiet=quiet)


def _check_plan(plan: Contract) -> None:
    if not isinstance(plan, Contract):
        raise PlanError(
            "plan", plan, expected="a cloister.Plan", fix="read one from a file: cloister.Plan.load(...)"
        )


def _run(
    given: Given, out: str | Path | None, workers: int | None, ray_address: str | None, *, quiet: bool
) -> Run:
    """Execute a plan with what it was given."""
    path = free_path(Path("runs"), given.plan.run.name) if out is None else Path(out)
    with RunFolder.create(path, given.plan) as folder:
        _execute_shown(folder, workers, ray_address, quiet=quiet, given=given)
    return Run(path)


class Run:
    """A simulated run in its folder. Build it with `simulate` or `open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The run folder."""
        self._files = RunFiles(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in a folder; nothing is locked.

        Raises:
            RunFolderError: there is none.
        """
        read_plan(Path(folder))
        return cls(Path(folder))

    def __repr__(self) -> str:
        return f"cloister.Run.open({str(self.folder)!r})"

    def resume(
        self,
        *,
        workers: int | None = None,
        ray_address: str | None = None,
        quiet: bool = False,
        task: type[Task] | None = None,
    ) -> Run:
        """Go on after the last round that was done, to the end; of a finished run nothing is left to do.

        Args:
            workers: As for `simulate`.
            ray_address: As for `simulate`.
            quiet: As for `simulate`.
            task: The class that `simulate` was given, with the same source.

        Raises:
            CloisterError: the run stopped again; or another process works in the folder, or it was deployed.
        """
        with ExitStack() as context:
            if task is not None:
                context.enter_context(_using(task))
            folder = context.enter_context(reopened(self.folder))
            _execute_shown(folder, workers, ray_address, quiet=quiet)
        return self

    @property
    def plan(self) -> Plan:
        """The plan that the run follows, with what the call of `simulate` has changed."""
        return read_plan(self.folder)

    @property
    def outcome(self) -> Outcome:
        """The figures of the finished run, such as `final_loss`, `epsilon` and `params_sha256`.

        Raises:
            RunFolderError: the run is not finished.
        """
        from cloister.server.record.outcome import outcome

        return outcome(self._files)

    @property
    def answer(self) -> Answer:
        """The answer to the run's question: `figures`, and the noised totals in `cells`.

        Raises:
            RunFolderError: the run asked no question, is not finished, or ended before its sum was opened.
        """
        return read_answer(self._files)

    @property
    def history(self) -> Any:
        """The metrics of the rounds that are done: a pandas DataFrame, or a list of dictionaries without pandas."""
        return _table(self._files.metrics())

    @property
    def ledger(self) -> Any:
        """What the coordinator has charged, as `history`; a `dataset` is that of a site. Empty without a privacy unit.

        Raises:
            LedgerError: the ledger is damaged or altered.
        """
        from cloister.privacy.ledger.ledger import read_history

        entries = read_history(self._files.ledger).entries if self._files.ledger.exists() else ()
        return _table([{"time": entry.time, **asdict(entry.charge)} for entry in entries])

    @property
    def report(self) -> Report:
        """What may be claimed about the run's privacy; a notebook shows it as a page."""
        from cloister.simulations.report import Report

        return Report.of(self.folder)

    @property
    def epsilon(self) -> float | None:
        """Epsilon of the run as its report states it; None where it claims no guarantee."""
        return self.report.epsilon

    def model(self) -> Any:
        """The final model, as transformers or PEFT has it, on the CPU in float32.

        Raises:
            RunFolderError: the run is not finished.
            ModelError: the model is damaged.
        """
        return self._saved()[0]

    def tokenizer(self) -> Any:
        """The tokenizer of the final model; errors as of `model`."""
        return self._saved()[1]

    def _saved(self) -> tuple[Any, Any]:
        from cloister.lm.model.model import load_saved
        from cloister.lm.model.own import know

        trained_plan(self.folder)
        if not self._files.final.is_dir():
            raise RunFolderError(
                str(self.folder), expected="a finished run", fix=f"continue it: {self}.resume()"
            )
        know(self.plan)
        return load_saved(self._files.final)


def reopened(path: Path) -> RunFolder:
    """The folder of a simulation, to go on with it.

    Raises:
        RunFolderError: it holds none, another process works in it, or the run was deployed.
    """
    folder = RunFolder.reopen(path)
    if folder.deployment.exists():
        folder.close()
        raise RunFolderError(
            str(path),
            expected="a simulation, and this run was deployed",
            fix=f"continue it with: {folder.resume_command()}",
        )
    return folder


def execute(
    folder: RunFolder,
    display: LineDisplay,
    *,
    workers: int | None,
    ray_address: str | None,
    new: bool,
    again: str,
) -> Outcome:
    """Execute a folder's plan to its end; this process is afterwards as it was before.

    Args:
        folder: The run folder, new or with some rounds done.
        display: Is told what happens.
        workers: As for `simulate`.
        ray_address: As for `simulate`.
        new: Whether the folder was made for this. A new run that is refused before its first round leaves no folder,
            unless the disk refused a write: then the run can be resumed.
        again: How to go on with the run, for the note of an error that stops it.

    Raises:
        CloisterError, KeyboardInterrupt: the run stopped; a note says how to go on with it, if that is possible.
    """
    try:
        if ray_address is None:
            from cloister.simulations.engines import fork_server

            fork_server.start(folder.plan)
        from cloister.simulations.engines.process import as_before
        from cloister.simulations.federation import simulate  # takes seconds, in which Ctrl-C may come

        with as_before():
            return simulate(
                folder, display.event, workers=workers, ray_address=ray_address, watch=display.watch
            )
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"stopped; continue with: {again}")
        raise
    except CloisterError as error:
        if not _begun(folder):
            if new and not isinstance(error, StorageError):
                folder.discard()
        elif not isinstance(error, RunFolderError):
            error.add_note(f"stopped; continue with: {again}")
        raise


def _begun(folder: RunFolder) -> bool:
    """Whether the folder holds results; a journal that cannot be read may list some."""
    from cloister.server.record.history import reached
    from cloister.server.record.journal import DONE

    try:
        return reached(folder, DONE)
    except RunFolderError:
        return True


def _execute_shown(
    folder: RunFolder,
    workers: int | None,
    ray_address: str | None,
    *,
    quiet: bool,
    given: Given | None = None,
) -> None:
    """Execute a folder's plan under a display: live in a terminal, lines elsewhere, such as in a notebook.

    Args:
        folder: The run folder.
        workers: As for `simulate`.
        ray_address: As for `simulate`.
        quiet: As for `simulate`.
        given: What a new run was given; None: it is not new.
    """
    from rich.console import Console

    from cloister.server.display import display_for

    with display_for(Console(quiet=quiet), folder.plan, json_=quiet) as display:
        if given is not None and given.any:
            display.event(Preparing("data of the sites"))
            _lay_out(folder, given)
        execute(
            folder,
            display,
            workers=workers,
            ray_address=ray_address,
            new=given is not None,
            again=f"{Run(folder.path)!r}.resume()",
        )


def _lay_out(folder: RunFolder, given: Given) -> None:
    """Write what was given to the run folder; a run that was not given all of it leaves no folder."""
    from cloister.simulations.federation import lay_out

    try:
        given.write_public(folder)
        fill = partial(lay_out, folder.plan, given=given)
        write_folder(folder.sites.path, fill, durable=folder.plan.simulation.durable)
    except BaseException:
        folder.discard()
        raise


def _using(task: type[Task]) -> AbstractContextManager[Pin]:
    """The context in which this process knows a class of task."""
    from cloister.lm.tasks.registry import using

    return using(task)


def _table(rows: list[dict[str, Any]]) -> Any:
    with suppress(ImportError):
        import pandas as pd

        return pd.DataFrame(rows)
    return rows
