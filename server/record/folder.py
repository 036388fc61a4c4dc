"""The run folder: every file and folder of a run, each named here and nowhere else."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open

from cloister.privacy.report.answer import Answer
from cloister.protocol.errors import PlanError, RunFolderError, StorageError
from cloister.protocol.figure import finite
from cloister.protocol.machine.closing import Closing
from cloister.protocol.machine.storage import lock, on_disk, remove, sync, write_bytes
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import GIVEN, SIMULATED_PUBLIC, Plan


class _Inside:
    """A name in a folder: the attribute of an object with a `path` is the path of that name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: SitesFolder | RunFiles, _: object = None) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class SitesFolder:
    """The names in the folder that holds a simulation's sites; whether they exist is not checked."""

    path: Path

    roster = _Inside("roster.toml")
    """The roster of all sites."""
    coordinator = _Inside("coordinator.pem")
    """The key that signs the run's requests."""
    public_records = _Inside("public.jsonl")
    """The records that no site has."""
    sequences = _Inside("sequences")
    """The token sequences of all sites (`simulations/store.py`)."""

    def site(self, name: str) -> Path:
        """The folder of a site."""
        return self.path / name

    def config(self, name: str) -> Path:
        """The configuration of a site."""
        return self.site(name) / "site.toml"

    def state(self, name: str) -> Path:
        """The state folder of a site."""
        return self.site(name) / "state"

    def names(self) -> list[str]:
        """The names of the sites that have a configuration, sorted."""
        return sorted(file.parent.name for file in self.path.glob("*/site.toml"))

    def ledgers(self) -> dict[str, Path]:
        """The sites' ledgers that exist, by the site's name, sorted."""
        files = {file.parents[1].name: file for file in self.path.glob("*/state/ledger.sqlite")}
        return dict(sorted(files.items()))


@dataclass(frozen=True)
class RunFiles:
    """The names in a run folder; whether they exist is not checked, and nothing is locked."""

    path: Path

    plan_file = _Inside("plan.json")
    """The plan, as canonical JSON."""
    journal = _Inside("journal.sqlite")
    """The steps that were begun and done."""
    attempt = _Inside("attempt")
    """The folder of what is needed to go on with the attempt that is under way."""
    ledger = _Inside("ledger.sqlite")
    """The coordinator's privacy ledger."""
    noise = _Inside("noise.json")
    """The key of the noise that a trusted coordinator adds, until the run is finished."""
    public = _Inside("public.safetensors")
    """The model after public training."""
    metrics_file = _Inside("metrics.jsonl")
    """The metrics, one line of JSON for each round."""
    given = _Inside("given")
    """The folder of public records that a Python program gave, each file named by their hash."""
    tensorboard = _Inside("tensorboard")
    """The folder of TensorBoard events."""
    checkpoints = _Inside("checkpoints")
    """The folder of checkpoints of the global model, one safetensors file a round."""
    answer = _Inside("final/answer.json")
    """The answer to a question."""
    final = _Inside("final")
    """The folder of the last model, for `from_pretrained`."""
    compressed = _Inside("compressed")
    """The folder of a smaller copy of it, if `cloister compress` wrote it."""
    report_page = _Inside("report.html")
    """The privacy report as a page, if `cloister report` wrote it."""
    report_data = _Inside("report.json")
    """The privacy report as JSON."""
    audit = _Inside("audit.json")
    """The result of an audit."""
    deployment = _Inside("deployment.json")
    """What a deployed run began with: the version of its federation, its transport."""
    federation = _Inside("federation")
    """The coordinator's folder of the federation, in a rehearsal."""
    events = _Inside("events.jsonl")
    """The events of a deployed run with their times, one line of JSON for each."""
    coordinator_log = _Inside("coordinator.log")
    """The standard error of a deployed run's process."""
    spool = _Inside("spool")
    """The folder of a deployed run's uploads that are not summed yet."""

    @property
    def sites(self) -> SitesFolder:
        """The folder of a simulation's sites, with their roster and the records that no site has."""
        return SitesFolder(self.path / "sites")

    site_outcomes = _Inside("sites.json")
    """Each simulated site's held-out loss before and after the run."""
    workers_log = _Inside("workers.log")
    """The standard error of a simulation's worker processes."""
    lock = _Inside(".lock")
    """The file that is locked by the process that works in the folder."""

    def resume_command(self, federation: str = "FEDERATION") -> str:
        """The command that continues the run.

        Args:
            federation: The folder of the federation that a deployed run belongs to, where it is known.
        """
        run = shlex.quote(str(self.path))
        if not self.deployment.exists():
            return f"cloister resume {run}"
        if self.federation.exists():
            return f"cloister up --again {run}"
        return f"cloister submit --to {shlex.quote(federation)} --again {run}"

    def evaluated_on(self, plan: Plan) -> str:
        """The value of `server.evaluation`, with the file of the records that a simulation gives to no site."""
        simulated = plan.server.evaluation == SIMULATED_PUBLIC
        return str(self.sites.public_records) if simulated else self.place(plan.server.evaluation)

    def place(self, source: str) -> str:
        """A source of public records, or the file of the run folder that has those that were given in its place."""
        given = source.startswith(GIVEN)
        return str(self.given / f"{source.removeprefix(GIVEN)}.jsonl") if given else source

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds' metrics, up to the first invalid line, such as one that a crash cut short."""
        lines = self.metrics_file.read_bytes().splitlines() if self.metrics_file.exists() else []
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # not JSON, or not UTF-8
                break
            if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                break
            rows.append(row)
        return rows


class RunFolder(RunFiles, Closing):
    """A run folder in which this process alone works until it closes the folder; a context manager.

    Build it with `create` or `reopen`.
    """

    def __init__(self, path: Path, plan: Plan, lock: IO[bytes], *, made: bool = False) -> None:
        super().__init__(path)
        self.plan = plan
        self._lock = lock
        self._made = made

    @classmethod
    def create(cls, path: Path, plan: Plan) -> RunFolder:
        """Make a folder for a new run.

        Raises:
            RunFolderError: the folder is not empty or cannot be made.
        """
        files = RunFiles(path)
        made = make_folder(path, files.plan_file.name, "run", files.resume_command)
        folder = cls(path, plan, locked(path, "run"), made=made)
        try:
            write_bytes(files.plan_file, plan.to_json().encode())
        except StorageError as error:  # nothing can be resumed without a plan
            folder.discard()
            raise RunFolderError.of(error, str(path), fix="free space, or choose another --out") from error
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run, to resume it.

        Raises:
            RunFolderError: it is not a run folder, or another process works in it.
        """
        return cls(path, read_plan(path), locked(path, "run"))

    def discard(self) -> None:
        """Remove what a new run made, and the folder itself if the run made it.

        For a run that was refused before it had any result.
        """
        with suppress(OSError):
            for entry in self.path.iterdir():
                remove(entry)
        self.close()
        if self._made:
            with suppress(OSError):
                self.path.rmdir()

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def truncate_metrics(self, last_round: int) -> None:
        """Drop the metrics of rounds after `last_round`, which will run again."""
        kept = [json.dumps(row) + "\n" for row in self.metrics() if row["round"] <= last_round]
        write_bytes(self.metrics_file, "".join(kept).encode())

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one round's metrics.

        Raises:
            StorageError: the disk is full.
        """
        with on_disk(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(row)) + "\n")
            file.flush()
            sync(file.fileno())  # so that a power cut loses no line but the newest, which is written again


def free_path(folder: Path, name: str) -> Path:
    """A path in a folder that nothing has: `name`, or `name-2` and so on."""
    paths = (folder / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def checkpoint_file(folder: Path, round_number: int) -> Path:
    """The file of a round's model in a folder of checkpoints; round 0 is the initial model."""
    return folder / f"round-{round_number:05d}.safetensors"


def stored_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder of checkpoints, by round, in order."""
    files = {path.stem.removeprefix("round-"): path for path in folder.glob("round-*.safetensors")}
    return dict(sorted((int(number), path) for number, path in files.items() if number.isdecimal()))


def trained_plan(path: Path) -> soundness.Plan:
    """The plan of the run in a folder, which trains a model.

    Raises:
        RunFolderError: as `read_plan`, or the run asked a question.
    """
    plan = read_plan(path)
    if plan.question is not None:
        raise RunFolderError(
            str(path),
            expected="a run that trained a model; this one asked a question",
            fix=f"cloister ask {path}",
        )
    return plan


def read_answer(files: RunFiles) -> Answer:
    """The answer in a run folder.

    Raises:
        RunFolderError: it is missing or damaged.
    """
    try:
        return Answer.from_json(files.answer.read_bytes())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunFolderError(
            str(files.answer),
            expected=f"the answer of a finished question ({error})",
            fix=files.resume_command(),
        ) from error


def read_plan(path: Path) -> soundness.Plan:
    """The plan of the run in a folder.

    Raises:
        RunFolderError: there is no run in it, or its plan cannot be read.
    """
    file = RunFiles(path).plan_file
    try:
        return soundness.from_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(
            str(path),
            expected=f"the folder of a run, with a {file.name} in it",
            fix="runs are kept under runs/",
        ) from None
    except OSError as error:
        raise RunFolderError(
            str(path), expected=f"the folder of a run, with a {file.name} that can be read ({error.strerror})"
        ) from error
    except PlanError as error:
        raise RunFolderError(
            str(file), expected=f"a whole plan ({error})", fix="restore it from a backup, or start a new run"
        ) from error


def make_folder(path: Path, file: str, what: str, command: Callable[[], str]) -> bool:
    """Make the folder of a new run or search.

    Args:
        path: The folder.
        file: The file that such a folder has from its beginning.
        what: What the folder is of: `run` or `search`.
        command: Gives the command that continues another one that is there.

    Returns:
        Whether there was no folder before.

    Raises:
        RunFolderError: the folder is not empty or cannot be made.
    """
    try:
        if (path / file).exists():
            raise RunFolderError(
                str(path),
                expected=f"a new folder, and this one holds another {what}",
                fix=f"continue it with `{command()}`, or choose another --out",
            )
        made = not path.exists()
        if not made and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(
                str(path),
                expected="a new or empty folder, and this one holds other files",
                fix="choose another --out",
            )
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            str(path), expected=f"a folder that can be made ({error.strerror})", fix="choose another --out"
        ) from error
    return made


@contextmanager
def opened(path: Path, *, expected: str, framework: str = "np", fix: str = "") -> Iterator[Any]:
    """A safetensors file of a run, as `safe_open` gives it.

    Raises:
        RunFolderError: the file is not there or damaged; `expected` and `fix` say what it is and what to do.
    """
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise RunFolderError(str(path), expected=f"{expected} ({error})", fix=fix) from error


def locked(path: Path, what: str) -> IO[bytes]:
    """Lock the folder of a run or search until the returned file is closed or this process ends.

    Raises:
        RunFolderError: another process works in it, or it cannot be written to.
    """
    try:
        return lock(RunFiles(path).lock, f"a {what} that no other process is working on")
    except StorageError as error:
        raise RunFolderError.of(error) from error
