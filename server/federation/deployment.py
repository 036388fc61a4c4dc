"""What a deployed run begins with, kept in its folder; and whether a federation can run a plan."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from cloister.privacy.ledger.ledger import read_history
from cloister.protocol.errors import PlanError, RunFolderError
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import facts_of
from cloister.protocol.identity.federation import Federation
from cloister.protocol.machine.storage import write_bytes
from cloister.protocol.messages.joining import check_size
from cloister.protocol.plan.plan import SIMULATED_PUBLIC, Plan
from cloister.server.record import journal as steps
from cloister.server.record.folder import RunFiles
from cloister.server.record.journal import Journal


@dataclass(frozen=True)
class Deployment:
    """What a deployed run began with, kept in its folder."""

    version: int
    """The version of the federation: its roster is the run's, whatever is installed later."""
    wait_s: float
    """Seconds for which the run waits for all sites before it begins with those that are needed."""
    federation: str = ""
    """The coordinator's folder of the federation."""

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


def check_newest(files: RunFiles) -> None:
    """Refuse the folder of a deployed run that is older than its coordinator's audit log, as a restored backup is.

    The sites of a sum are in the journal, and each charge in the ledger, before the audit log has a release of it.
    Where the log is not on this machine, or the run has not begun, nothing can be compared.

    Raises:
        RunFolderError: the journal or the ledger lacks what the log has.
    """
    if not files.deployment.exists() or not files.journal.exists():
        return
    with Journal(files.journal) as journal:
        created = journal.newest(steps.CREATED)
        opened = {
            (entry.step.split()[0], entry.round, entry.attempt)
            for entry in journal.entries()
            if f" {steps.UNMASKING}" in entry.step or f" {steps.OPENING}" in entry.step
        }
    federation = Deployment.read(files).federation
    if created is None or not federation:
        return
    facts = list(facts_of(Path(federation) / AUDIT_LOG, created.detail["run"]))
    for fact in facts:
        purpose = fact.detail.partition(",")[0]
        if fact.what == "release" and (purpose, fact.round, fact.attempt) not in opened:
            of = f"round {fact.round}, attempt {fact.attempt} ({purpose})"
            raise _older(files, f"{of}, of which the audit log has a release")
    entries = read_history(files.ledger).entries if files.ledger.exists() else ()
    kept = {entry.hash.hex() for entry in entries}
    for fact in facts:
        if fact.what == "charge" and fact.detail.split()[-1] not in kept:
            raise _older(files, f"in its ledger the charge of round {fact.round}, which the audit log has")


def _older(files: RunFiles, expected: str) -> RunFolderError:
    return RunFolderError(
        str(files.path),
        "a folder that is older than the audit log, such as a restored backup",
        expected=expected,
        fix="restore a newer copy; without one begin a new run, because this folder knows of less than was released",
    )


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


def check_not_simulated(plan: Plan) -> None:
    """Check that a plan asks a deployment for no privacy that only a simulation can give: a ledger over runs is charged
    by a simulation alone, and a report of declared noise would be false of sites that draw their noise.

    Raises:
        PlanError: it does.
    """
    for name, value in (("ledger", plan.simulation.ledger), ("noise_seed", plan.simulation.noise_seed)):
        if value not in ("", None):
            raise PlanError(
                f"simulation.{name}",
                value,
                expected="no value in a deployment: only a simulation reads it, and each site has its own ledger",
                fix="remove it, or run the plan with cloister simulate",
            )


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
    check_not_simulated(plan)
    if plan.server.evaluation == SIMULATED_PUBLIC and not (files and files.sites.public_records.exists()):
        raise PlanError(
            "server.evaluation",
            plan.server.evaluation,
            expected="public records in a deployment, which has no simulated ones",
            fix='name a file or a dataset, "none", or "sites"',
        )
