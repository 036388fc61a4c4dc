"""The updates of scheme `lora` as the simulated sites trained them, for the aggregation error that a run ends with.

A site does not keep them by itself: they have neither masks nor noise. A simulation keeps those of the last round, and
none under a privacy unit.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cloister.clients.release import Finished
from cloister.lm.layout import Vector
from cloister.protocol.plan import Plan
from cloister.protocol.storage import write_file


def kept(plan: Plan) -> bool:
    """Whether the updates of a plan are kept."""
    sync, unprotected = plan.cohort.mode == "sync", plan.privacy.unit == "none"
    return plan.model.adapter.scheme == "lora" and sync and unprotected


def keep(plan: Plan, state: Path, round_number: int, finished: Finished) -> None:
    """Keep a site's update in its state folder, readable by its owner only, and remove those of other rounds.

    Nothing is kept for a plan whose updates are not.

    Raises:
        StorageError: the disk is full.
    """
    if not kept(plan):
        return
    path = _path(state, round_number)

    def write(file: Path) -> None:
        file.touch(0o600)
        save_file({"update": finished.vector}, file, metadata={"tokens": str(finished.tokens)})

    write_file(path, write, durable=False)
    for old in state.glob("trained-*"):
        if old != path:
            old.unlink(missing_ok=True)


def load(state: Path, round_number: int) -> tuple[int, Vector] | None:
    """Tokens and update of a site in a round; None if they are not there."""
    try:
        with safe_open(_path(state, round_number), framework="np") as file:
            return int((file.metadata() or {})["tokens"]), file.get_tensor("update")
    except (OSError, SafetensorError):
        return None


def _path(state: Path, round_number: int) -> Path:
    return state / f"trained-{round_number:05d}.safetensors"
