"""The token sequences of all simulated sites: made in one pass, and mapped from one file for each kind of array.

A deployed site makes its sequences itself (`lm/data/prepare.py`). For thousands of sites on one machine that costs a
reader, a folder and several synced files for each. Here one process makes those of all sites, from the same records
in the same way, and a worker that plays a site slices what is mapped. Nothing is synced, because it can be made
again: a run that goes on checks the files by their record (`lm/model/saved.py`) first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cloister.lm.data.prepare import Preparation, Prepared
from cloister.lm.data.store import write_prepared
from cloister.lm.model import saved
from cloister.protocol.errors import DataError
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.plan.plan import Plan


def make(
    folder: Path,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    sites: Sequence[Path],
    progress: Callable[[int], None] = lambda _done: None,
) -> None:
    """Make the store of a plan's sites, whole or not at all.

    Args:
        folder: The store.
        plan: The plan.
        tokenizer: Its tokenizer.
        sites: For each site its records, in JSONL.
        progress: Receives the number of sites that are done.

    Raises:
        StorageError: the disk is full or refuses the write.
    """

    def made() -> Iterator[Prepared | None]:
        for done, path in enumerate(sites, 1):
            yield _prepared(path, plan, tokenizer)
            progress(done)

    def fill(temporary: Path) -> None:
        write_prepared(temporary, made())
        saved.record(temporary)

    write_folder(folder, fill, durable=False)


def _prepared(path: Path, plan: Plan, tokenizer: PreTrainedTokenizerBase) -> Prepared | None:
    """The sequences of a site; None if it cannot make any: it fails by itself, in its own name, when it is asked."""
    try:
        return Preparation(plan, tokenizer, str(path), "train", path.parent).make()
    except DataError:
        return None
