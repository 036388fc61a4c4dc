"""Checkpoints: models on disk, each in one safetensors file that is written whole or not at all.

A checkpoint holds the trained parameters by name, what the plan's features need for the next round, the facts of its
round, and the SHA-256 of the flat vector, which is checked on reading. Old checkpoints are removed only after a newer
one is in place.

A checkpoint that is in place is the result of its round. If a crash comes before the journal says so, the round is not
repeated: its model may have been read here, and a second one could have other survivors or other noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from cloister.lm.model.layout import Layout, params_sha256
from cloister.protocol.errors import RunFolderError
from cloister.protocol.machine.storage import sync_folders, write_file
from cloister.server.record.folder import checkpoint_file, opened, stored_checkpoints

Vector = npt.NDArray[np.float32]

_FIX = "restore the file from a backup; a round cannot be repeated, because sites answer each round only once"
_MODEL, _FEATURES = "model/", "features/"


@dataclass(frozen=True)
class Checkpoint:
    """The global model after a round."""

    round: int
    weights: Vector
    """(d,) float32, the trained parameters."""
    features: dict[str, npt.NDArray[Any]]
    """What the plan's features need for the next round, by `feature/name`."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: The folder of the checkpoints.
        layout: Names and shapes of the trained parameters.
        keep: Number of newest checkpoints to keep, in addition to the initial model.
    """

    def __init__(self, folder: Path, layout: Layout, keep: int) -> None:
        self._folder = folder
        self._layout = layout
        self._keep = keep

    def path(self, round_number: int) -> Path:
        """The file of a round's model."""
        return checkpoint_file(self._folder, round_number)

    def save(
        self,
        round_number: int,
        weights: Vector,
        facts: Mapping[str, Any] | None = None,
        features: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> str:
        """Write the model after a round, then remove checkpoints older than the `keep` newest.

        Args:
            round_number: The round; 0 for the initial model.
            weights: (d,) float32.
            facts: The facts of the round, for `done`; None for the initial model.
            features: What the plan's features need for the next round (`Coordinated.state`).

        Returns:
            The SHA-256 of `weights`.

        Raises:
            StorageError: the disk is full; earlier checkpoints are unchanged.
        """
        digest = params_sha256(weights)
        tensors: dict[str, npt.NDArray[Any]] = {
            _MODEL + name: part for name, part in self._layout.split(weights).items()
        }
        tensors |= {_FEATURES + name: part for name, part in (features or {}).items()}
        named = {"round": str(round_number), "params_sha256": digest, "layout": self._layout.digest()}
        if facts is not None:
            named["facts"] = json.dumps({**facts, "params_sha256": digest})
        write_file(self.path(round_number), lambda path: save_file(tensors, path, metadata=named))
        stored = list(stored_checkpoints(self._folder).values())
        for old in stored[1 : -self._keep]:
            old.unlink(missing_ok=True)
        return digest

    def done(self, round_number: int) -> dict[str, Any] | None:
        """The facts of a round whose checkpoint is in place; None if there is no checkpoint with facts.

        Raises:
            RunFolderError: the checkpoint is damaged.
        """
        path = self.path(round_number)
        if not path.exists():
            return None
        sync_folders(path.parent, path.parent)  # the process that wrote it may have been killed before it did
        with opened(path, expected="a whole checkpoint", framework="pt", fix=_FIX) as file:
            named = file.metadata() or {}
        facts: dict[str, Any] | None = json.loads(named["facts"]) if "facts" in named else None
        return facts

    def load(self, round_number: int) -> Checkpoint:
        """Read the model after a round.

        Raises:
            RunFolderError: the checkpoint is missing, damaged, or of another model.
        """
        path = self.path(round_number)
        with opened(path, expected="a whole checkpoint", framework="pt", fix=_FIX) as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict

        def part(prefix: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        if facts.get("layout") != self._layout.digest():
            raise RunFolderError(str(path), expected="a checkpoint of the model that the plan names")
        weights = self._layout.join({name: t.numpy() for name, t in part(_MODEL).items()})
        if params_sha256(weights) != facts.get("params_sha256"):
            raise RunFolderError(
                str(path), expected="weights that match the SHA-256 recorded with them", fix=_FIX
            )
        return Checkpoint(round_number, weights, {name: t.numpy() for name, t in part(_FEATURES).items()})
