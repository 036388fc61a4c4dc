"""What a site carries from one of its updates into the next: remainders (`feedback.py`) and drift (`drift.py`).

It depends on what was sent, so it counts once, and only if the update is in a sum. What the update of a round leaves is
kept beside what that update was made with, and when the next update is made, the site decides with which of the two:

- Under masks with that of the newest round in which it has revealed shares, by its durable mark (`attempt_files.py`). A
  site reveals them only as a survivor, whose update is in the sum. What was left in a round in which it has not is
  dropped with the update that was not summed.
- In clear a site is told nothing after it has sent its update, so with that of the newest round in which it made one,
  also if that update came too late.

If all the sites' shares were revealed and the coordinator still abandons the round, the update is lost, and what it
left counts as if it were not.

Attempts of one round send the same kept update. An update that is made again after a crash is made with the same as
before, because only what earlier rounds left is looked at.

`NAME-<round>.json`, which is written after the file `NAME-<round>`, has the run, the plan and the round of what the
update was made with.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cloister.protocol.storage import write_bytes, write_file

_log = logging.getLogger(__name__)
_NAME = re.compile(r".*-(\d{5,})\.json")

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    run: str
    plan: str
    base: int
    """The round whose file the update was made with; 0: none."""


class Carried:
    """The files of one kind that a site carries through a run.

    Args:
        state: The site's state folder.
        run: Identity of the run.
        plan: Digest of the plan.
        name: Of the files.
        size: Bytes of each.
    """

    def __init__(self, state: Path, run: str, plan: str, name: str, size: int) -> None:
        self._state = state
        self._run = run
        self._plan = plan
        self._file = name
        self._size = size

    def base(self, round_number: int, summed: Callable[[int], bool]) -> int:
        """The round whose file the update of a round is made with; 0: there is none.

        Args:
            round_number: The round.
            summed: Whether the update of an earlier round is in a sum, as far as the site knows.
        """
        earlier = [number for number in self._entries() if number < round_number]
        if not earlier:
            return 0
        newest = max(earlier)
        base = newest if summed(newest) else self._entries()[newest].base
        if base and not self._whole(base):
            path = self.path(base).name
            _log.warning("what the update of round %d left is lost: %s is missing or damaged", base, path)
            return 0
        return base

    def keep(self, round_number: int, base: int, make: Callable[[Path], T], *, durable: bool) -> T:
        """Let `make` make the update of a round and write what it leaves into a new file; remove all files but this and
        that of `base`.

        Args:
            round_number: The round.
            base: What `base` returned.
            make: Gets the path of the file, which it creates in its full size.
            durable: Sync the file before this returns.

        Raises:
            StorageError: the disk is full.
        """
        made: list[T] = []
        write_file(self.path(round_number), lambda temporary: made.append(make(temporary)), durable=durable)
        entry = {"run": self._run, "plan": self._plan, "base": base}
        write_bytes(self.path(round_number).with_suffix(".json"), json.dumps(entry).encode(), durable=durable)
        needed = {self.path(number).name for number in (round_number, base)}
        for old in self._state.glob(f"{self._file}-*"):
            if old.stem not in needed:
                old.unlink(missing_ok=True)
        return made[0]

    def path(self, round_number: int) -> Path:
        """The file of a round."""
        return self._state / f"{self._file}-{round_number:05d}"

    def _whole(self, round_number: int) -> bool:
        path = self.path(round_number)
        return path.exists() and path.stat().st_size == self._size

    def _entries(self) -> dict[int, _Entry]:
        """The rounds of this run and plan that have a file."""
        found = {}
        for path in self._state.glob(f"{self._file}-*.json"):
            match = _NAME.fullmatch(path.name)
            try:
                read = json.loads(path.read_bytes())
                entry = _Entry(str(read["run"]), str(read["plan"]), int(read["base"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # torn by a crash: the update was not made
            if match and (entry.run, entry.plan) == (self._run, self._plan):
                found[int(match[1])] = entry
        return found
