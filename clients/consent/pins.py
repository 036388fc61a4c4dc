"""Pins: the plan and run that a site has joined, so that a coordinator cannot have the same updates summed twice.

The difference of the sum over some sites and the sum over all but one of them, of the same updates, is that site's
update. So a site takes part in one plan, in one run of it, and in no other plan under that run's identity; it pins both
when it joins, and every later message must match. A pin is written once, whole and synced, by the first process that
needs it, and the last one, the plan of the run, after the others are on disk. So where a process was killed and then
the power was cut, only that one can be lost: every message is refused until the site joins again, and the others
refuse another plan or run.

A new plan in the same state folder is the site's own decision: its digest goes into the site's TOML.
"""

from __future__ import annotations

from pathlib import Path

from cloister.protocol.errors import PinnedError
from cloister.protocol.machine.storage import write_new
from cloister.protocol.plan.plan import Plan


class Pins:
    """The pins in a site's state folder.

    Args:
        folder: The folder of the pins.
        site: The site's name, for messages.
        plan: Digest of the plan that the site's own configuration names; empty: the first that it joined.
    """

    def __init__(self, folder: Path, site: str, plan: str) -> None:
        self._folder = folder
        self._site = site
        self._plan = plan

    def check_free(self, plan: Plan, run: str) -> None:
        """Refuse a plan or run if another is pinned.

        Raises:
            PinnedError: another is pinned.
        """
        digest = plan.digest()
        if self._plan and digest != self._plan:
            raise self._other_plan(digest)
        for name, value in self._of(plan, run):
            self._check_one(name, value, self._read(name) or value, digest)

    def join(self, plan: Plan, run: str) -> None:
        """Pin a plan and a run, unless another is pinned.

        Raises:
            PinnedError: another plan or run is pinned.
            StorageError: the pin cannot be kept.
        """
        for name, value in self._of(plan, run):
            write_new(self._folder / name, value.encode())
        self.check(plan, run)

    def check(self, plan: Plan, run: str) -> None:
        """Refuse a message that does not match the pins.

        Raises:
            PinnedError: it is of another plan or run, or of one that the site has not joined.
        """
        digest = plan.digest()
        if self._plan and digest != self._plan:
            raise self._other_plan(digest)
        for name, value in self._of(plan, run):
            known = self._read(name)
            if known == "":
                raise PinnedError("run", run, expected=f"{self._site} to be asked to join it first")
            self._check_one(name, value, known, digest)

    def _other_plan(self, digest: str) -> PinnedError:
        return PinnedError(
            "digest of the plan", digest, expected=f"{self._plan}, which {self._site} has pinned"
        )

    def _check_one(self, name: str, value: str, known: str, digest: str) -> None:
        if known != value:
            raise PinnedError(
                "plan" if name == "plan" else "run",
                value,
                expected=f"{known}, which {self._site} has joined: another would sum the same updates again",
                fix=f"for a new run give the site a new state folder and keep its ledger, or pin plan = {digest!r} in "
                "its TOML",
            )

    def _of(self, plan: Plan, run: str) -> list[tuple[str, str]]:
        digest = plan.digest()
        first = [] if self._plan else [("plan", digest)]
        safe = run if run.isalnum() and len(run) <= 64 else "unreadable"
        return [*first, (f"run-of-{digest}", run), (f"plan-of-{safe}", digest)]

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
