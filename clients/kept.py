"""The files of a site that later messages need: the plan that it joined, the base model, its finished updates.

The secure sum keeps its attempts by itself (`attempt_files.py`), and so does the data (`lm/data.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cloister.lm.layout import Vector
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import PinnedError, StorageError, UpdateError
from cloister.protocol.messages import Join
from cloister.protocol.plan import Plan
from cloister.protocol.soundness import from_json
from cloister.protocol.storage import write_bytes, write_file

Ring = npt.NDArray[np.unsignedinteger[Any]]


def update_path(state: Path, round_number: int) -> Path:
    """Where a site with a state folder keeps its finished update of a round."""
    return state / f"update-{round_number:05d}.safetensors"


class Kept:
    """A site's state folder.

    Args:
        state: The folder.
        bases: Folder of base models; several sites of one machine may share it.
    """

    def __init__(self, state: Path, bases: Path) -> None:
        self._state = state
        self._bases = bases

    # The plan and the base of a run, which travel once, when the site joins.

    def remember(self, request: Join, digest: bytes) -> None:
        """Keep what a join has brought, for the messages that follow, which name the plan by its digest."""
        if request.base_hash:
            self._keep_base(request)
        joined = {"digest": digest.hex(), "plan": request.plan, "base": request.base_hash.hex()}
        # Not synced: the pins are, and a site that lost this file in a power cut is asked to join again.
        write_bytes(self._joined(request.run), json.dumps(joined).encode(), durable=False)

    def recall(
        self, run: str, digest: bytes, find: Callable[[bytes, Callable[[], Plan]], Plan]
    ) -> tuple[Plan, bytes]:
        """The plan that the site joined in a run, and the hash of its base model, which is empty where there is none.

        Args:
            run: Identity of the run.
            digest: Digest of the plan, as a message names it.
            find: Finds a plan by its digest in memory, or reads it.

        Raises:
            PinnedError: the site has not joined that run, or has joined another plan in it.
        """
        try:
            joined = json.loads(self._joined(run).read_bytes())
            named, text, base_hash = joined["digest"], str(joined["plan"]), bytes.fromhex(joined["base"])
        except (OSError, ValueError, KeyError, TypeError):
            raise PinnedError("run", run, expected="a run that this site was asked to join first") from None
        if named != digest.hex():
            raise PinnedError(
                "digest of the plan", digest.hex(), expected=f"{named}, which was joined in this run"
            )

        def read() -> Plan:
            plan = from_json(text)
            if plan.digest() != named:
                raise StorageError(str(self._joined(run)), expected="the plan that this site has joined")
            return plan

        return find(digest, read), base_hash

    def _joined(self, run: str) -> Path:
        return self._state / "runs" / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}.json"

    def _keep_base(self, request: Join) -> None:
        path = self.base_path(request.base_hash)
        if path.exists():
            return
        own = vector_hash(request.base)
        if own != request.base_hash:
            raise UpdateError(
                "base model", own.hex(), expected=f"the model with the hash {request.base_hash.hex()}"
            )
        if not np.isfinite(request.base).all():
            raise UpdateError("base model", "non-finite", expected="finite weights")
        write_file(path, lambda temporary: save_vector(temporary, request.base))

    def base_path(self, base_hash: bytes) -> Path:
        """Where the base model with a hash is kept."""
        return base_path(self._bases, base_hash)

    def base(self, base_hash: bytes) -> Vector | None:
        """The base model with a hash; None for the empty hash.

        Raises:
            StorageError: it is missing, or not what it was.
        """
        if not base_hash:
            return None
        path = self.base_path(base_hash)
        try:
            base: Vector = np.load(path)
        except (OSError, ValueError) as error:
            raise StorageError(
                str(path), expected=f"the base model that this site was given ({error})"
            ) from error
        if vector_hash(base) != base_hash:
            raise StorageError(
                str(path), expected="the base model that this site was given, and it has changed"
            )
        return base

    # Finished updates, so that a later attempt at a round does not train again.

    def keep_update(
        self,
        round_number: int,
        tensors: Mapping[str, npt.NDArray[Any]],
        facts: Mapping[str, str],
        *,
        durable: bool,
    ) -> None:
        """Keep the finished update of a round, and remove those of other rounds.

        Args:
            round_number: The round.
            tensors: `contribution`, the vector that is summed, before its masks; others are for inspection.
            facts: What it was made for; `update` gives it back for the same facts only.
            durable: Sync it before this returns.

        Raises:
            StorageError: the disk is full.
        """
        path = update_path(self._state, round_number)
        write_file(
            path, lambda temporary: save_file(dict(tensors), temporary, metadata=dict(facts)), durable=durable
        )
        for old in self._state.glob("update-*.safetensors"):
            if old != path:
                old.unlink(missing_ok=True)

    def update(self, round_number: int, facts: Mapping[str, str], length: int, dtype: type) -> Ring | None:
        """The finished update of a round, if it was made for the same facts and has this length and type."""
        try:
            with safe_open(update_path(self._state, round_number), framework="np") as file:
                made, vector = file.metadata() or {}, file.get_tensor("contribution")
        except (OSError, SafetensorError):
            return None
        if any(made.get(name) != value for name, value in facts.items()):
            return None
        if vector.shape != (length,) or vector.dtype != dtype:
            return None
        found: Ring = vector
        return found


def base_path(folder: Path, base_hash: bytes) -> Path:
    """Where the base model with a hash is kept in a folder."""
    return folder / f"base-{base_hash.hex()}.npy"


def save_vector(path: Path, vector: Vector) -> None:
    """Write what `Kept.base` reads."""
    with path.open("wb") as file:
        np.save(file, vector)
