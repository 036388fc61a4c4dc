"""What a site carries from one of its updates into the next: the optimizer's moments (`local.optimizer_state = "keep"`)
and what compressed updates left out (`aggregation/features/compression.py`).

Carried state depends on all instructions that the site has computed by since it carried nothing. Were they not those of
the other sites of a sum, the coordinator could make what the others carry drown their updates, and see the one that is
left. So the state has a history, which the site advertises:

    history = H(history before || digest of the instructions),        0 where nothing is carried

A sum is over sites of one history, or its instructions are `fresh`, and then no site uses what it carries
(`secure_site.py`, check 4e). What is carried after a fresh round depends on that round alone.

Each round that made an update has a folder `carried/<round>` with what the update left, and `history.json`, which has
plan, model and the hash of each other file: a site whose newest state is damaged, or of another model, carries nothing.
The folder is made whole with the update, and the one before is kept: an update that is made again after a crash starts
from the same state, because only earlier rounds are looked at.
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

import numpy as np

from cloister.lm.training.moments import Carry
from cloister.protocol.encoding import pack
from cloister.protocol.errors import StepError
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.messages.digest import instructions_digest, vector_hash
from cloister.protocol.messages.messages import NOTHING_CARRIED, Instructions

_log = logging.getLogger(__name__)
_HISTORY = "history.json"

T = TypeVar("T")


@dataclass(frozen=True)
class _State:
    folder: Path | None = None
    history: bytes = NOTHING_CARRIED


_NOTHING = _State()


class Carried:
    """What a site carries through a run.

    Args:
        folder: The folder of the run in the site's state folder.
        plan: Digest of the plan.
        model: As `Sums.model`: what was made with another model is not carried on.
    """

    def __init__(self, folder: Path, plan: str, model: str) -> None:
        self._folder = folder / "carried"
        self._of = {"plan": plan, "model": model}

    def history(self, round_number: int) -> bytes:
        """The history of what the site carries into a round."""
        return self._newest(round_number).history

    def make(self, told: Instructions, history: bytes, make: Callable[[Carry], T], *, durable: bool) -> T:
        """Let `make` make the update of a round, and keep what it leaves; remove all but this and what it began with.

        Args:
            told: The instructions of the round.
            history: What the update must begin with, unless they are fresh.
            make: Makes the update.
            durable: Sync what is kept before this returns.

        Raises:
            StepError: what the site carries has another history; nothing was made.
            StorageError: the disk refuses the access.
        """
        newest = self._newest(told.sum.round)
        # An update of an earlier round may have ended since the other sites were told what this one carries.
        if not told.fresh and newest.history != history:
            raise StepError(
                "carried state", expected="the state that this site has advertised in the attempt"
            )
        before = _NOTHING if told.fresh else newest
        path, made = self._path(told.sum.round), []

        def fill(after: Path) -> None:
            after.chmod(0o700)
            made.append(make(Carry(before.folder, after)))
            files = {file.name: _hash(file) for file in after.iterdir()}
            left = {"history": extended(before.history, told).hex(), "files": files}
            (after / _HISTORY).write_text(json.dumps(self._of | left))

        write_folder(path, fill, durable=durable)
        for old in set(self._folder.iterdir()) - {path, newest.folder}:
            shutil.rmtree(old, ignore_errors=True)
        return made[0]

    def _newest(self, before: int) -> _State:
        """What the newest update of an earlier round has left, if it was of this model and nothing of it is damaged."""
        rounds = [int(path.name) for path in self._folder.glob("?????*") if path.name.isdigit()]
        newest = max((number for number in rounds if number < before), default=None)
        if newest is None:
            return _NOTHING
        folder = self._path(newest)
        try:
            read = json.loads((folder / _HISTORY).read_bytes())
            if not self._of.items() <= read.items():
                return _NOTHING
            history = bytes.fromhex(read["history"])
            if len(history) != len(NOTHING_CARRIED):
                raise ValueError(f"a history of {len(history)} bytes")
            for name, digest in read["files"].items():
                if _hash(folder / name) != digest:
                    raise ValueError(f"{name} has changed")
            return _State(folder, history)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("what the site carried is lost: %s is damaged (%s)", folder, error)
            return _NOTHING

    def _path(self, round_number: int) -> Path:
        return self._folder / f"{round_number:05d}"


def extended(history: bytes, told: Instructions) -> bytes:
    """The history of what is left by an update that began with `history`, and was computed by `told`."""
    return hashlib.sha256(pack("cloister/carried/1", history, instructions_digest(told))).digest()


def _hash(file: Path) -> str:
    return vector_hash(np.memmap(file, np.uint8, "r")).hex()
