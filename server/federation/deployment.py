"""What a deployed run begins with, kept in its folder; and whether a federation can run a plan."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from cloister.protocol.errors import PlanError, RunFolderError
from cloister.protocol.identity.federation import Federation
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.messages.joining import check_size
from cloister.protocol.plan.plan import SIMULATED_PUBLIC, Plan
from cloister.server.record.folder import RunFiles


@dataclass(frozen=True)
class Deployment:
    """What a deployed run began with, kept in its folder."""

    version: int
    """The version of the federation: its roster is the run's, whatever is installed later."""
    wait_s: float
    """Seconds for which the run waits for all sites before it begins with those that are needed."""

    def write(self, files: RunFiles) -> None:
        """Keep it, durably.

        Raises:
            StorageError: the disk refuses.
        """
        write_bytes(files.deployment, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, files: RunFiles) -> Deployment:
        """Read it.

        Raises:
            RunFolderError: the folder is not that of a deployed run.
        """
        try:
            return cls(**json.loads(files.deployment.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise RunFolderError(
                str(files.path),
                expected="the folder of a deployed run",
                fix=f"make one: cloister submit PLAN; continue a simulation: {files.resume_command()}",
            ) from error


def refusal_in(log: Path) -> str:
    """Why the process of a run has refused to go on: the last line of its log, as `cloister` ends it.

    Args:
        log: The log, in either format.

    Returns:
        The reason; empty if the last line is another one, or there is no log.
    """
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            last = "".join(deque(file, maxlen=1)).strip()
    except FileNotFoundError:
        return ""
    if not last.startswith("{"):
        return last.removeprefix("cloister: ") if last.startswith("cloister: ") else ""
    try:
        found = json.loads(last)
    except ValueError:
        return ""
    ends = (found.get("level"), found.get("logger")) == ("ERROR", "cloister")
    return str(found["message"]) if ends else ""


def check_deployable(plan: Plan, federation: Federation, files: RunFiles | None = None) -> None:
    """Check that a federation can run a plan.

    Args:
        plan: The plan.
        federation: The federation.
        files: The run folder, where a rehearsal has put what a simulation makes.

    Raises:
        RosterError: it has not as many sites as the plan.
        PlanError: the plan needs what only a simulation has.
    """
    check_size(federation.roster, plan)
    if plan.server.evaluation == SIMULATED_PUBLIC and not (files and files.sites.public_records.exists()):
        raise PlanError(
            "server.evaluation",
            plan.server.evaluation,
            expected="public records in a deployment, which has no simulated ones",
            fix='name a file or a dataset, "none", or "" for an evaluation at the sites',
        )
