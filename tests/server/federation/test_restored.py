"""The folder of a deployed run against its coordinator's audit log: a restored backup knows of less."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloister.privacy.ledger.ledger import Charge, Ledger
from cloister.protocol.errors import RunFolderError
from cloister.protocol.identity.audit_log import NAME, AuditLog, Fact, What
from cloister.protocol.plan.soundness import parse
from cloister.server.federation.deployment import Deployment, check_newest
from cloister.server.record import journal as steps
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.history import identity
from cloister.server.record.journal import Journal
from cloister.tests.tools.raises import raises

pytestmark = pytest.mark.usefixtures("unsynced")


class Run:
    """The folder of a deployed run, and the audit log of its federation."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path / "run", AuditLog(path / NAME)
        with RunFolder.create(self.path, parse("")) as folder:
            Deployment(1, 0.0, str(path)).write(folder)
        self.files = RunFiles(self.path)
        self.id = identity(self.files)

    def begin(self, number: int, attempt: int, purpose: str = "train") -> None:
        with Journal(self.files.journal) as journal:
            journal.record(number, attempt, f"{purpose} {steps.BEGUN}", {"cohort": []})

    def unmask(self, number: int, attempt: int, purpose: str = "train") -> None:
        self.begin(number, attempt, purpose)
        with Journal(self.files.journal) as journal:
            journal.record(number, attempt, f"{purpose} {steps.UNMASKING}", {"survivors": []})

    def charge(self, number: int) -> str:
        """Charge a round; the hash of its entry."""
        ledger = Ledger(self.files.ledger, "coordinator", lambda _events, _delta: 0.1)
        named = {
            "id": f"{self.id} {number}",
            "dataset": "north",
            "run": self.id,
            "what": "update",
            "event": "{}",
        }
        return ledger.charge(Charge(**named, round=number, attempt=1, delta=1e-5), None).hash.hex()

    def tell(
        self, what: What, number: int, attempt: int, detail: str = "train, in the sum", run: str = ""
    ) -> None:
        self.log.record(Fact(what, run or self.id, "plan", number, attempt, "north", detail))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose folder and log agree: after round 2 and its charges."""
    found = Run(tmp_path)
    for number in (1, 2):
        found.unmask(number, 1)
        found.tell("charge", number, 1, f"head of the ledger {found.charge(number)}")
        found.tell("release", number, 1)
    found.tell("release", 9, 1, run="of another run")
    check_newest(found.files)
    return found


def test_a_journal_that_lacks_a_round_or_an_attempt_is_refused(run: Run) -> None:
    for later in ((2, 2), (3, 1)):
        run.tell("release", *later)
        with raises(RunFolderError, run.path):
            check_newest(run.files)
        run.begin(*later)  # as a copy that was made while the attempt was under way
        run.unmask(*later, "evaluate")
        with raises(RunFolderError, run.path):
            check_newest(run.files)
        run.unmask(*later)
        check_newest(run.files)


def test_a_ledger_that_lacks_a_charge_is_refused(run: Run) -> None:
    kept = run.files.ledger.read_bytes()
    run.begin(3, 1)
    run.tell("charge", 3, 1, f"head of the ledger {run.charge(3)}")
    run.tell(
        "charge", 3, 1, f"head of the ledger {run.charge(1)}"
    )  # one that is repeated has its first entry
    check_newest(run.files)
    run.files.ledger.write_bytes(kept)
    with raises(RunFolderError, run.path):
        check_newest(run.files)
    run.files.ledger.unlink()
    with raises(RunFolderError, run.path):
        check_newest(run.files)


def test_without_a_log_or_a_deployment_nothing_is_compared(run: Run, tmp_path: Path) -> None:
    run.tell("release", 3, 1)
    (tmp_path / NAME).rename(tmp_path / "elsewhere")
    check_newest(run.files)
    (tmp_path / "elsewhere").rename(tmp_path / NAME)
    run.files.deployment.unlink()
    check_newest(run.files)
