"""Consents: a site's people consent to one run of a plan, so that no coordinator has the same updates summed twice.

The difference of the sum over some sites and the sum over all but one of them, of the same updates, is that site's
update, and two runs of one plan train the same updates. So a consent is to a plan, by its digest, and the first run
that joins with it takes it. `plan` of the site's TOML is the first consent to that plan, and `families` of its policy
the first to each plan of them; `cloister site accept` gives further ones. Without a consent that is free, the site
joins no run.

The consents to a plan are numbered, and the lowest free one is taken. The files, none of which is ever replaced:

    <digest>.<number>.given     a consent, unless the site's TOML or policy gives it
    <digest>.<number>.taken     the run that has taken it
    run-<hash>                  the digest of the plan of a run: a run has one plan

Each is written whole and synced by the first process that needs it, the last one after the run has taken a consent
durably. So where a process was killed and then the power was cut, only that one can be lost: every message of the run
is refused until the site joins again, and the consent is not free. The files stay when the folder of a run is removed.
A plan has no free consent while a folder of a run has joined it and no consent says so: the consents were lost.
"""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path

from cloister.clients.state.kept import joined_folders, run_id
from cloister.protocol.errors import ConsentError, PinnedError, StorageError
from cloister.protocol.machine.storage import sync_folders, write_bytes, write_new

_log = logging.getLogger(__name__)

_OFFERS = 8
"""Plans that are kept for the site's people to read. Each is at most as long as a message (`wire.py`)."""


class Consents:
    """The consents in a site's state folder.

    Args:
        state: The site's state folder.
        site: The site's name, for messages.
        plan: Digest of the plan to which the site's own files consent; empty: to none.
    """

    def __init__(self, state: Path, site: str, plan: str) -> None:
        self._state = state
        self._folder = state / "consents"
        self._site = site
        self._plan = plan

    def give(self, digest: str) -> bool:
        """Consent to one more run of a plan, durably; returns False where an earlier consent to it is still free.

        Raises:
            StorageError: the disk refuses the write.
        """
        if self.is_free(digest):
            return False
        write_new(self._file(digest, len(self.runs(digest)) + 1, "given"), b"")
        return True

    def runs(self, digest: str) -> list[str]:
        """The runs that have taken a consent to a plan, in their order."""
        runs = []
        for number in count(1):
            run = _read(self._file(digest, number, "taken"))
            if run is None:
                break
            runs.append(run)
        return runs

    def is_free(self, digest: str) -> bool:
        """Whether a consent to a plan is given and no run has taken it."""
        return self._given(digest, len(self.runs(digest)) + 1)

    def keep_offer(self, digest: str, plan: str) -> None:
        """Keep the text of a plan that was refused for want of a consent, so that the site's people can read it.

        The newest `_OFFERS` are kept. A disk that refuses is logged only: the join is refused in any case.
        """
        offers = self._state / "offers"
        try:
            write_bytes(offers / f"{digest}.json", plan.encode(), durable=False)
            for old in self._offers()[_OFFERS:]:
                old.unlink(missing_ok=True)
        except (StorageError, OSError) as error:
            _log.warning("the plan %s is not kept: %s", digest, error)

    def offers(self) -> list[str]:
        """The texts of the plans that were refused for want of a consent, the newest first."""
        return [path.read_text(encoding="utf-8") for path in self._offers()]

    def _offers(self) -> list[Path]:
        found = (self._state / "offers").glob("*.json")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def check_free(self, digest: str, run: str) -> None:
        """Check that a run may join: it has joined before, or a consent to its plan is free.

        Args:
            digest: Digest of the plan.
            run: Identity of the run.

        Raises:
            PinnedError: the site has joined the run with another plan.
            ConsentError: no consent is free.
            StorageError: another run has joined with a consent that was lost.
        """
        self._check_plan(digest, run, _read(self._of_run(run)) or digest)
        runs = self.runs(digest)
        lost = joined_folders(self._state, digest) - {run_id(each) for each in (run, *runs)}
        if lost:
            raise StorageError(
                str(self._folder),
                expected=f"the consent that the run in {self._state / 'runs' / min(lost)} has taken",
                fix="restore the folder from a backup; if the site has answered nothing but the join of that run, "
                "remove the run's folder",
            )
        if run not in runs and not self.is_free(digest):
            raise self._refusal(digest, run, runs)

    def take(self, digest: str, run: str) -> None:
        """Take a consent to a plan for a run, durably, unless the run has taken one before.

        Args:
            digest: Digest of the plan.
            run: Identity of the run.

        Raises:
            PinnedError: the site has joined the run with another plan.
            ConsentError: no consent is free.
            StorageError: it cannot be kept, or others were lost.
        """
        while run not in (runs := self.runs(digest)):
            self.check_free(digest, run)
            write_new(self._file(digest, len(runs) + 1, "taken"), run.encode())
        # Also what a process made that was killed before it synced.
        sync_folders(self._folder, self._state.parent)
        write_new(self._of_run(run), digest.encode())
        self.check(digest, run)

    def check(self, digest: str, run: str) -> None:
        """Check that the site has joined a run of a plan.

        Args:
            digest: Digest of the plan.
            run: Identity of the run.

        Raises:
            PinnedError: it has not.
        """
        known = _read(self._of_run(run))
        if known is None or run not in self.runs(digest):
            raise PinnedError("run", run, expected=f"{self._site} to be asked to join it first")
        self._check_plan(digest, run, known)

    def _check_plan(self, digest: str, run: str, known: str) -> None:
        if known != digest:
            raise PinnedError(
                "digest of the plan",
                digest,
                expected=f"{known}, with which {self._site} has joined the run {run}",
            )

    def _refusal(self, digest: str, run: str, runs: list[str]) -> ConsentError:
        had = f", and the run {runs[-1]} has taken the last one" if runs else ""
        return ConsentError(
            "run",
            run,
            expected=f"a consent of {self._site} to its plan that no other run has taken{had}",
            fix=f"read the plan first; to take part in one run of it: cloister site accept SITE.toml {digest}",
        )

    def _given(self, digest: str, number: int) -> bool:
        return self._file(digest, number, "given").exists() or (number == 1 and self._plan == digest)

    def _file(self, digest: str, number: int, kind: str) -> Path:
        return self._folder / f"{digest}.{number}.{kind}"

    def _of_run(self, run: str) -> Path:
        return self._folder / f"run-{run_id(run)}"


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()  # as text it would have other ends of lines
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(str(path), expected=f"a consent that can be read ({error})") from error
