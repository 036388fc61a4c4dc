"""The run folder: every file and folder of a run, each named here and nowhere else.

plan.json          the plan, canonical
journal.sqlite     the steps that were begun and done
attempt/           what is needed to go on with the attempt that is under way
ledger.sqlite      the privacy that was spent, as the coordinator counts it
noise.json         the key of a trusted coordinator's noise, until the run is finished
public.safetensors the model after public training
metrics.jsonl      one line for each round
tensorboard/       the same as TensorBoard events
checkpoints/       the global model, one safetensors file a round
final/             the last model, for `from_pretrained`
compressed/        a smaller copy of it, if `cloister compress` wrote it
report.html, report.json  the privacy report, if `cloister report` wrote it
audit.json         the result of an audit of the run

A deployed run also has:

deployment.json    what the run began with: the version of its federation, its transport
events.jsonl       every event of the run, with its time
coordinator.log    the standard error of the run's process
spool/             vectors that sites have uploaded and that are not summed yet

A simulation also has:

sites/             the sites' own folders, their roster, and the records that no site has
sites.json         each site's held-out loss before and after the run
workers.log        the standard error of the worker processes
"""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cloister.protocol import soundness
from cloister.protocol.errors import PlanError, RunFolderError, StorageError
from cloister.protocol.plan import Plan
from cloister.protocol.storage import write_bytes


@dataclass(frozen=True)
class SitesFolder:
    """The names in the folder that holds a simulation's sites; whether they exist is not checked."""

    path: Path

    @property
    def roster(self) -> Path:
        """The roster of all sites."""
        return self.path / "roster.toml"

    @property
    def public_records(self) -> Path:
        """The records that no site has."""
        return self.path / "public.jsonl"

    @property
    def sequences(self) -> Path:
        """The token sequences of all sites (`simulations/store.py`)."""
        return self.path / "sequences"

    def site(self, name: str) -> Path:
        """The folder of a site."""
        return self.path / name

    def config(self, name: str) -> Path:
        """The configuration of a site."""
        return self.site(name) / "site.toml"

    def state(self, name: str) -> Path:
        """The state folder of a site."""
        return self.site(name) / "state"

    def ledger(self, name: str) -> Path:
        """The privacy ledger of a site."""
        return self.state(name) / "ledger.sqlite"

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

    @property
    def plan_file(self) -> Path:
        """The plan, as canonical JSON."""
        return self.path / "plan.json"

    @property
    def journal(self) -> Path:
        """The journal."""
        return self.path / "journal.sqlite"

    @property
    def attempt(self) -> Path:
        """The folder of the attempt that is under way."""
        return self.path / "attempt"

    @property
    def ledger(self) -> Path:
        """The coordinator's privacy ledger."""
        return self.path / "ledger.sqlite"

    @property
    def noise(self) -> Path:
        """The key of the noise that a trusted coordinator adds."""
        return self.path / "noise.json"

    @property
    def public(self) -> Path:
        """The model after public training."""
        return self.path / "public.safetensors"

    @property
    def metrics_file(self) -> Path:
        """The metrics, one line of JSON for each round."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The folder of the final model."""
        return self.path / "final"

    @property
    def compressed(self) -> Path:
        """The folder of a smaller copy of the final model."""
        return self.path / "compressed"

    @property
    def report_page(self) -> Path:
        """The privacy report as a page."""
        return self.path / "report.html"

    @property
    def report_data(self) -> Path:
        """The privacy report as JSON."""
        return self.path / "report.json"

    @property
    def audit(self) -> Path:
        """The result of an audit."""
        return self.path / "audit.json"

    @property
    def deployment(self) -> Path:
        """What a deployed run began with."""
        return self.path / "deployment.json"

    @property
    def federation(self) -> Path:
        """The coordinator's folder of the federation, in a rehearsal."""
        return self.path / "federation"

    @property
    def events(self) -> Path:
        """The events of a deployed run, one line of JSON for each."""
        return self.path / "events.jsonl"

    @property
    def coordinator_log(self) -> Path:
        """The standard error of a deployed run's process."""
        return self.path / "coordinator.log"

    @property
    def spool(self) -> Path:
        """The folder of a deployed run's uploads."""
        return self.path / "spool"

    @property
    def sites(self) -> SitesFolder:
        """The folder of a simulation's sites."""
        return SitesFolder(self.path / "sites")

    @property
    def site_outcomes(self) -> Path:
        """Each simulated site's held-out loss before and after the run."""
        return self.path / "sites.json"

    @property
    def workers_log(self) -> Path:
        """The standard error of a simulation's worker processes."""
        return self.path / "workers.log"

    @property
    def lock(self) -> Path:
        """The file that is locked by the process that works in the folder."""
        return self.path / ".lock"

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


class RunFolder(RunFiles):
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
        try:
            if files.plan_file.exists():
                raise RunFolderError(
                    str(path),
                    expected="a new folder, and this one holds another run",
                    fix=f"continue it with `{files.resume_command()}`, or choose another --out",
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
                str(path),
                expected=f"a folder that can be made ({error.strerror})",
                fix="choose another --out",
            ) from error
        folder = cls(path, plan, _locked(files), made=made)
        try:
            write_bytes(files.plan_file, plan.to_json().encode())
        except StorageError as error:  # nothing can be resumed without a plan
            folder.discard()
            raise RunFolderError(
                str(path), expected=error.expected, fix="free space, or choose another --out"
            ) from error
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run, to resume it.

        Raises:
            RunFolderError: it is not a run folder, or another process works in it.
        """
        plan = read_plan(path)
        return cls(path, plan, _locked(RunFiles(path)))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def discard(self) -> None:
        """Remove what a new run made, and the folder itself if the run made it.

        For a run that was refused before it had any result.
        """
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
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
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(row)) + "\n")
        except OSError as error:
            raise StorageError(
                str(self.metrics_file),
                expected=f"a disk that accepts the write ({error.strerror})",
                fix="free space, then resume",
            ) from error


def checkpoint_file(folder: Path, round_number: int) -> Path:
    """The file of a round's model in a folder of checkpoints; round 0 is the initial model."""
    return folder / f"round-{round_number:05d}.safetensors"


def stored_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder of checkpoints, by round, in order."""
    files = {path.stem.removeprefix("round-"): path for path in folder.glob("round-*.safetensors")}
    return dict(sorted((int(number), path) for number, path in files.items() if number.isdecimal()))


def read_plan(path: Path, parse: Callable[[bytes], Plan] = soundness.from_json) -> Plan:
    """The plan of the run in a folder.

    Args:
        path: The folder.
        parse: How the plan is checked; `soundness.recorded` where its run is only reported.

    Raises:
        RunFolderError: there is no run in it, or its plan cannot be read.
    """
    file = RunFiles(path).plan_file
    try:
        return parse(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(
            str(path),
            expected=f"the folder of a run, with a {file.name} in it",
            fix="runs are kept under runs/",
        ) from None
    except OSError as error:
        raise RunFolderError(
            str(path),
            expected=f"the folder of a run, with a {file.name} that can be read ({error.strerror})",
        ) from error
    except PlanError as error:
        raise RunFolderError(
            str(file),
            expected=f"a whole plan ({error})",
            fix="restore it from a backup, or start a new run",
        ) from error


def _locked(files: RunFiles) -> IO[bytes]:
    try:
        lock = files.lock.open("wb")
    except OSError as error:
        raise RunFolderError(
            str(files.path),
            expected=f"a folder that can be written to ({error.strerror})",
            fix="correct its permissions",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunFolderError(str(files.path), expected="a run that no other process is working on") from None
    except OSError as error:
        lock.close()
        raise RunFolderError(
            str(files.path), expected=f"a file system that can lock a file ({error.strerror})"
        ) from error
    return lock
