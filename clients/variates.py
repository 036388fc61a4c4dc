"""A site's control variates c_i of SCAFFOLD (`aggregation/variates.py`), kept from round to round.

That of a round is what c_i becomes if the update of the round is summed. Whether it was, the coordinator says with the
next request (`server/variates.py`): a site may be in a sum whose end it was not told of, and the reverse. So two are
kept: that of the newest update, and the one that the update was made with. One of them is what the coordinator names.

Attempts of one round send the same kept update. An update that is made again after a crash is made with the same
control variate, writes the same file again, and has the same bytes.

A wrong c_i would shift all later steps of the federation, because c would no longer be the mean of the c_i: a site that
has lost the one that it needs takes no part, and says so.

A file `variate-<round>.safetensors` has the vector, and as metadata the run and the plan.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cloister.protocol.errors import StorageError
from cloister.protocol.storage import write_file

Vector = npt.NDArray[np.float32]

_NAME = "variate"


class Variates:
    """The control variates of a site in a run.

    Args:
        state: The site's state folder.
        run: Identity of the run.
        plan: Digest of the plan.
        size: Elements of a vector.
    """

    def __init__(self, state: Path, run: str, plan: str, size: int) -> None:
        self._state = state
        self._made_by = {"run": run, "plan": plan}
        self._size = size

    def read(self, round_number: int) -> Vector:
        """The control variate of a round.

        Args:
            round_number: The round; 0: the zeros with which a site begins.

        Returns:
            (d,) float32, which may be changed.

        Raises:
            StorageError: it is missing, damaged, or of another run.
        """
        if not round_number:
            return np.zeros(self._size, np.float32)
        path = self.path(round_number)
        try:
            with safe_open(path, framework="pt") as file:
                made_by = file.metadata()
                found = file.get_tensor(_NAME).clone()
        except (OSError, SafetensorError) as error:
            raise _lost(
                path, f"the control variate of round {round_number}, which is in c ({error})"
            ) from error
        if made_by != self._made_by:
            raise _lost(path, "the control variate of this run and plan")
        if found.dtype != torch.float32 or found.shape != (self._size,):
            raise _lost(path, f"{self._size} numbers, as the plan's model has")
        own: Vector = found.numpy()
        return own

    def write(self, round_number: int, base: int, own: Vector) -> None:
        """Keep the control variate of a round, synced, and remove all but this and the one its update was made with.

        Args:
            round_number: The round.
            base: The round of that one; 0: zeros.
            own: (d,) float32.

        Raises:
            StorageError: the disk is full.
        """

        def fill(temporary: Path) -> None:
            temporary.touch(0o600)
            save_file({_NAME: own}, temporary, metadata=self._made_by)

        write_file(self.path(round_number), fill)
        needed = (self.path(round_number), self.path(base))
        for old in self._state.glob(f"{_NAME}-*.safetensors"):
            if old not in needed:
                old.unlink(missing_ok=True)

    def path(self, round_number: int) -> Path:
        """The file of a round's control variate."""
        return self._state / f"{_NAME}-{round_number:05d}.safetensors"


def _lost(path: Path, expected: str) -> StorageError:
    return StorageError(
        str(path), expected=expected, fix="restore the file from a backup, or start a new run without it"
    )
