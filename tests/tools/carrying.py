"""What a round begins with, and leaves, in tests of training: a folder that has one for each round."""

from __future__ import annotations

import shutil
from pathlib import Path

from cloister.lm.training.moments import Carry


def carry_in(folder: Path, round: int) -> Carry:
    """The newest of the earlier rounds in a folder, and an empty folder of this round."""
    earlier = [int(path.name) for path in folder.glob("*") if path.name.isdigit() and int(path.name) < round]
    after = folder / str(round)
    shutil.rmtree(after, ignore_errors=True)
    after.mkdir(parents=True)
    return Carry(folder / str(max(earlier)) if earlier else None, after)
