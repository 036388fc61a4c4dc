"""The metrics of a run as an experiment tracker takes them: Weights & Biases or MLflow.

They are read from what the coordinator writes after each round (`metrics.jsonl`), which is what TensorBoard shows too.
So a run does not depend on a tracker or its network, and any run can be sent, while it goes on or later. Sent are the
figures of rounds and the fields of the plan, without [simulation] and [faults]: no names of sites, and nothing that a
privacy unit keeps at the sites, because the coordinator does not have it.

What the trackers' packages would add on their own account is switched off: observations of the machine, its name, its
list of packages, the console, the repository, reports to their makers. One thing has no switch: Weights & Biases keeps
with a run the platform, which of the known frameworks were imported, and the versions of Python, of Transformers and
of its own package. A path that the plan names is sent as the plan names it.

A tracker gets a round once: the last round that has arrived is kept in the run folder, for each tracker, server and
project.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from cloister.protocol.errors import EngineError, StorageError
from cloister.protocol.machine.prerequisites import check_extra
from cloister.protocol.machine.storage import lock, write_bytes
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFiles, read_plan
from cloister.server.record.history import reached
from cloister.server.record.journal import FINISHED

Kind = Literal["wandb", "mlflow"]

_MOST_PARAMETERS = 100
"""Parameters that MLflow's servers accept in one request."""
_FINISH_S = 120
"""Seconds after which Weights & Biases is taken for unreachable."""
_MOST_VALUE = 500
"""Characters of the longest value of a parameter: the least that MLflow's servers accept."""


class Tracker(Protocol):
    """A run at a tracker."""

    @property
    def id(self) -> str:
        """The run's identity there, with which it is continued."""

    def log(self, number: int, figures: Mapping[str, float]) -> bool:
        """Send the figures of a round; returns whether they have arrived, otherwise they have when `close` returns."""

    def close(self, *, finished: bool) -> None:
        """Wait until all has been sent, and say whether the run is finished."""


Open = Callable[[str, str, Mapping[str, str]], Tracker]
"""Opens a run by its name, its identity at the tracker (empty: a new run) and its parameters."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a round, as TensorBoard and the trackers show them: all that are finite numbers."""
    seconds = {f"phase_seconds/{phase}": each for phase, each in row.get("phase_seconds", {}).items()}
    return {
        name: value
        for name, value in (dict(row) | seconds).items()
        if name != "round" and isinstance(value, int | float) and math.isfinite(value)
    }


def parameters(plan: Plan) -> dict[str, str]:
    """The fields of a plan on which the parties agree, by SECTION.FIELD, as JSON; and its digest."""
    found = {"digest": plan.digest()}
    for section, fields in plan.model_dump(mode="json", exclude={"simulation", "faults"}).items():
        found |= {
            f"{section}.{name}": json.dumps(value, ensure_ascii=False, sort_keys=True)
            for name, value in (fields or {}).items()
        }
    if plan.simulation.noise_seed is not None:
        found["privacy.guarantee"] = "none: the noise comes from a declared seed (simulation.noise_seed)"
    return {name: value[:_MOST_VALUE] for name, value in found.items()}


def send(files: RunFiles, place: str, opener: Open, *, ended: Callable[[], bool]) -> Iterator[int]:
    """Send the rounds of a run that were not sent yet, and yield each one's number.

    The newest round of a run that goes on is sent when another follows it: an evaluation may be added to it till then.

    Args:
        files: The run folder.
        place: Names the tracker, its server and the project there: what was sent is kept by it.
        opener: Opens the run there.
        ended: Called when all rounds were sent, and the run is not finished; may wait. Whether to stop.

    Raises:
        RunFolderError: the folder holds no run.
        StorageError: another process sends this run to a tracker, or the disk refuses.
        EngineError: the tracker refuses.
    """
    plan = read_plan(files.path)
    with ExitStack() as opened:
        opened.enter_context(
            lock(files.path / "tracking.lock", "a run that no other process sends to a tracker")
        )
        sent = _Sent(files.path / "tracking.json", place)
        tracker = opener(plan.run.name, sent.id, parameters(plan))
        sent.keep(tracker.id, sent.round)
        finished, last = False, sent.round
        try:
            while True:
                finished = reached(files, FINISHED)  # before the rows, which are complete if it is
                rows = files.metrics()
                for row in rows if finished else rows[:-1]:
                    if row["round"] > last:
                        arrived = tracker.log(row["round"], scalars(row))
                        last = row["round"]
                        if arrived:
                            sent.keep(tracker.id, last)
                        yield last
                if finished or ended():
                    return
        finally:
            tracker.close(finished=finished)
            sent.keep(tracker.id, last)


class _Sent:
    """What of a run was sent to a tracker."""

    def __init__(self, path: Path, place: str) -> None:
        self._path = path
        self._place = place
        try:
            self._all: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
            known = self._all.get(place, {"id": "", "round": -1})
            self.id, self.round = str(known["id"]), int(known["round"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                str(path), expected=f"what was sent ({error})", fix="remove it, and send the run as a new one"
            ) from error

    def keep(self, id: str, number: int) -> None:
        if (id, number) != (self.id, self.round):
            self.id, self.round = id, number
            self._all[self._place] = {"id": id, "round": number}
            write_bytes(self._path, json.dumps(self._all).encode(), durable=False)


class Wandb:
    """A run at Weights & Biases.

    Args:
        project: The project there.
        folder: Where its own files are kept: those of an offline run are sent with `wandb sync`.
        offline: Whether to write files alone, without a network.
        name: As for `Open`, like the others.
        id: The run's identity there.
        config: Its parameters.
    """

    def __init__(
        self, project: str, folder: Path, offline: bool, name: str, id: str, config: Mapping[str, str]
    ) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # read when it opens a run
        check_extra("wandb", "tracking", EngineError, "--to", "wandb")
        import wandb

        # What it observes of the machine, the console and the repository is not the run's.
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            host="cloister",
            program="cloister",
            x_disable_machine_info=True,
            x_save_requirements=False,
            finish_timeout=_FINISH_S,
            finish_timeout_raises=True,
        )
        with _accepted("wandb", wandb.Error, fix="log in with `wandb login`, or use --offline"):
            self._run = wandb.init(
                project=project,
                name=name,
                id=id or secrets.token_hex(8),
                resume="allow",
                mode="offline" if offline else "online",
                dir=str(folder),
                config=dict(config),
                settings=settings,
            )
        self.id, self._refusal = str(self._run.id), wandb.Error

    def log(self, number: int, figures: Mapping[str, float]) -> bool:
        """As `Tracker.log`."""
        self._run.log(dict(figures), step=number)
        return False  # it waits in a queue

    def close(self, *, finished: bool) -> None:
        """As `Tracker.close`."""
        with _accepted("wandb", self._refusal, fix="run the command again, or use --offline"):
            self._run.finish(exit_code=0 if finished else 1)


class Mlflow:
    """A run at an MLflow server.

    Args:
        experiment: The experiment there.
        address: The server's, such as `http://127.0.0.1:5000`; empty: that of MLFLOW_TRACKING_URI.
        name: As for `Open`, like the others.
        id: The run's identity there.
        config: Its parameters.
    """

    def __init__(self, experiment: str, address: str, name: str, id: str, config: Mapping[str, str]) -> None:
        # Its own retries would last for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when the package is imported
        check_extra("mlflow", "tracking", EngineError, "--to", "mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        uri = address or os.environ.get("MLFLOW_TRACKING_URI", "")
        _check_address(uri)
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        refusals = MlflowException, ModuleNotFoundError
        with _accepted("mlflow", *refusals, fix="see whether the server answers", address=uri):
            client = MlflowClient(tracking_uri=uri)
            if not id:
                found = client.get_experiment_by_name(experiment)
                where = found.experiment_id if found else client.create_experiment(experiment)
                id = client.create_run(where, run_name=name).info.run_id
                given = [Param(field, value) for field, value in config.items()]
                try:
                    for first in range(0, len(given), _MOST_PARAMETERS):
                        client.log_batch(id, params=given[first : first + _MOST_PARAMETERS])
                except MlflowException:
                    client.delete_run(id)  # the next call makes another
                    raise
        self._client, self.id, self._refusal, self._address = client, id, MlflowException, uri

    def log(self, number: int, figures: Mapping[str, float]) -> bool:
        """As `Tracker.log`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with self._accepted():
            self._client.log_batch(
                self.id, [Metric(name, each, now, number) for name, each in figures.items()]
            )
        return True

    def close(self, *, finished: bool) -> None:
        """As `Tracker.close`."""
        with self._accepted():
            if finished:
                self._client.set_terminated(self.id, "FINISHED")

    def _accepted(self) -> AbstractContextManager[None]:
        fix = "run the command again: it continues after the last round that was sent"
        return _accepted("mlflow", self._refusal, fix=fix, address=self._address)


def _check_address(uri: str) -> None:
    """Refuse an address that MLflow would not take for one, without a word of it: it may have a password."""
    try:
        address = urlsplit(uri)
        of_server = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # brackets, port
        of_server, address = False, urlsplit("")
    if not (of_server or address.scheme in ("file", "sqlite")):
        raise EngineError(
            "--uri",
            expected="the address of an MLflow server, such as http://127.0.0.1:5000, or MLFLOW_TRACKING_URI",
            fix="file:FOLDER and sqlite:///FILE are valid too",
        )


@contextmanager
def _accepted(kind: Kind, *refusals: type[Exception], fix: str, address: str = "") -> Iterator[None]:
    """Raise what a tracker refuses as an error in one line, without the user and the password of its address."""
    try:
        yield
    except refusals as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        user = urlsplit(address).netloc.rpartition("@")[0]
        reason = reason.replace(f"{user}@", "") if user else reason
        expected = f"a tracker that accepts the run ({reason})"
        raise EngineError("--to", kind, expected=expected, fix=fix) from error
