"""What a site carries from one of its updates into the next: the optimizer's moments (`local.optimizer_state = "keep"`)
and what compressed updates left out (`feedback.py`).

Carried state depends on all instructions that the site has computed by since it carried nothing. Were they not those of
the other sites of a sum, the coordinator could make what the others carry drown their updates, and see the one that is
left. So the state has a history, which the site advertises:

    history = H(history before || digest of the instructions),        0 where nothing is carried

A sum is over sites of one history, or its instructions are `fresh`, and then no site uses what it carries
(`secure_site.py`, check 4e). What is carried after a fresh round depends on that round alone.

Each round that made an update has a folder `carried/<round>` with what the update left, and `history.json`, which names
run and plan: state of another run is not used. It is made whole with the update, and the one before is kept: an update
that is made again after a crash starts from the same state, because only earlier rounds are looked at.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cloister.lm.moments import Carry
from cloister.protocol.digest import instructions_digest
from cloister.protocol.encoding import pack
from cloister.protocol.messages import NOTHING_CARRIED, Instructions
from cloister.protocol.storage import write_folder

_log = logging.getLogger(__name__)
_HISTORY = "history.json"

T = TypeVar("T")


@dataclass(frozen=True)
class _State:
    folder: Path
    history: bytes


class Carried:
    """What a site carries through a run.

    Args:
        state: The site's state folder.
        run: Identity of the run.
        plan: Digest of the plan.
    """

    def __init__(self, state: Path, run: str, plan: str) -> None:
        self._folder = state / "carried"
        self._of = {"run": run, "plan": plan}

    def history(self, round_number: int) -> bytes:
        """The history of what the site carries into a round."""
        newest = self._newest(round_number)
        return newest.history if newest else NOTHING_CARRIED

    def make(self, told: Instructions, make: Callable[[Carry], T], *, durable: bool) -> T:
        """Let `make` make the update of a round, and keep what it leaves; remove all but this and what it began with.

        Args:
            told: The instructions of the round.
            make: Makes the update.
            durable: Sync what is kept before this returns.

        Raises:
            StorageError: the disk refuses the access.
        """
        round_number = told.sum.round
        newest = self._newest(round_number)
        before = None if told.fresh else newest
        history = extended(before.history if before else NOTHING_CARRIED, told)
        path, made = self._path(round_number), []

        def fill(after: Path) -> None:
            after.chmod(0o700)
            made.append(make(Carry(before.folder if before else None, after)))
            (after / _HISTORY).write_text(json.dumps(self._of | {"history": history.hex()}))

        write_folder(path, fill, durable=durable)
        needed = {path, newest.folder if newest else path}
        for old in set(self._folder.iterdir()) - needed:
            shutil.rmtree(old, ignore_errors=True)
        return made[0]

    def _newest(self, before: int) -> _State | None:
        """The newest state of the run that is of an earlier round."""
        folders = [path for path in self._folder.glob("?????*") if path.name.isdigit()]
        for path in sorted(folders, key=lambda path: int(path.name), reverse=True):
            if int(path.name) < before and (history := self._read(path)) is not None:
                return _State(path, history)
        return None

    def _read(self, folder: Path) -> bytes | None:
        try:
            read = json.loads((folder / _HISTORY).read_bytes())
            if not self._of.items() <= read.items():
                return None
            history = bytes.fromhex(read["history"])
            if len(history) != len(NOTHING_CARRIED):
                raise ValueError(f"a history of {len(history)} bytes")
            return history
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("what the site carried is lost: %s cannot be read (%s)", folder, error)
            return None

    def _path(self, round_number: int) -> Path:
        return self._folder / f"{round_number:05d}"


def extended(history: bytes, told: Instructions) -> bytes:
    """The history of what is left by an update that began with `history`, and was computed by `told`."""
    return hashlib.sha256(pack("cloister/carried/1", history, instructions_digest(told))).digest()
