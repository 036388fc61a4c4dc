"""The run folder: everything that a run leaves behind, in one place that is named in one place.

plan.json          the plan, canonical
journal.sqlite     what was begun and what was done
ledger.sqlite      the privacy that was spent, as the coordinator counts it
public.safetensors the model that public training gave
metrics.jsonl      one line for each round
tensorboard/       the same as TensorBoard events
checkpoints/       the global model, one safetensors file a round
final/             the last model, for `from_pretrained`
"""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cloister.protocol import soundness
from cloister.protocol.errors import PlanError, RunFolderError, StorageError
from cloister.protocol.plan import Plan
from cloister.protocol.storage import write_bytes


class RunFolder:
    """A run folder that this process alone works in, until it is closed; a context manager.

    Build it with `create` or `reopen`.
    """

    def __init__(self, path: Path, plan: Plan, lock: IO[bytes], *, made: bool = False) -> None:
        self.path = path
        self.plan = plan
        self._lock = lock
        self._made = made

    @classmethod
    def create(cls, path: Path, plan: Plan) -> RunFolder:
        """Make a folder for a new run.

        Raises:
            RunFolderError: there is something in it already, or it cannot be made.
        """
        try:
            if (path / "plan.json").exists():
                raise RunFolderError(
                    str(path),
                    expected="a new folder, and this one holds another run",
                    fix=f"go on with it by `cloister resume {shlex.quote(str(path))}`, or choose another --out",
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
        folder = cls(path, plan, _take(path), made=made)
        try:
            write_bytes(path / "plan.json", plan.to_json().encode())
        except StorageError as error:  # there is nothing to resume
            folder.discard()
            raise RunFolderError(
                str(path), expected=error.expected, fix="free space, or choose another --out"
            ) from error
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run, to resume it.

        Raises:
            RunFolderError: it is no run folder, or another process works in it.
        """
        plan = read_plan(path)
        return cls(path, plan, _take(path))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def discard(self) -> None:
        """Remove what a new run made, in a folder that was new or empty; one that was empty is so again.

        For a run that was refused before it had anything to lose.
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
        """Let go of the folder."""
        self._lock.close()

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / "journal.sqlite"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def ledger(self) -> Path:
        """The coordinator's privacy ledger."""
        return self.path / "ledger.sqlite"

    @property
    def public(self) -> Path:
        """What public training gave."""
        return self.path / "public.safetensors"

    @property
    def final(self) -> Path:
        """The folder of the final model."""
        return self.path / "final"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard events."""
        return self.path / "tensorboard"

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds' metrics, up to the first line that is none, such as one cut off by a crash."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # no JSON, or no UTF-8
                break
            if not isinstance(row, dict) or not isinstance(row.get("round"), int):
                break
            rows.append(row)
        return rows

    def truncate_metrics(self, last_round: int) -> None:
        """Drop the metrics of rounds after `last_round`, which will be done again."""
        kept = [json.dumps(row) + "\n" for row in self.metrics() if row["round"] <= last_round]
        write_bytes(self.path / "metrics.jsonl", "".join(kept).encode())

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one round's metrics.

        Raises:
            StorageError: the disk is full.
        """
        path = self.path / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dict(row)) + "\n")
        except OSError as error:
            raise StorageError(
                str(path),
                expected=f"a disk that takes the write ({error.strerror})",
                fix="free space, then resume",
            ) from error


def read_plan(path: Path) -> Plan:
    """The plan of the run in a folder.

    Raises:
        RunFolderError: there is no run in it, or its plan cannot be read.
    """
    file = path / "plan.json"
    try:
        return soundness.from_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(
            str(path), expected="the folder of a run, with a plan.json in it", fix="runs are kept under runs/"
        ) from None
    except OSError as error:
        raise RunFolderError(
            str(path),
            expected=f"the folder of a run, with a plan.json that can be read ({error.strerror})",
        ) from error
    except PlanError as error:
        raise RunFolderError(
            str(file),
            expected=f"a whole plan ({error})",
            fix="restore it from a copy, or start a new run",
        ) from error


def _take(path: Path) -> IO[bytes]:
    try:
        lock = (path / ".lock").open("wb")
    except OSError as error:
        raise RunFolderError(
            str(path),
            expected=f"a folder that can be written to ({error.strerror})",
            fix="mend its permissions",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunFolderError(str(path), expected="a run that no other process is working on") from None
    except OSError as error:
        lock.close()
        raise RunFolderError(
            str(path), expected=f"a file system that can lock a file ({error.strerror})"
        ) from error
    return lock
