"""The best trial of a private search as the search releases it: a copy of its run folder without any time.

When a trial began and ended, beside when its search did, tells about how many trials there were, and the price of a
search holds only toward those who do not know that number. So the copy has what is read of a finished run, and nothing
else: plan, settings, journal, metrics and ledgers without time stamps and seconds, checkpoints without the facts of
their rounds, the roster, public records, and of each site its configuration and ledger. The final model is made of the
last checkpoint.

Of a site's folder nothing else is copied, such as its records and keys: a copy is what its owner gives to others.

Refused: a list of the files that are left out. What a run folder gains later would be released with its times.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save_file

from cloister.privacy.ledger.ledger import Ledger, read_history
from cloister.protocol.machine.storage import on_disk, write_folder
from cloister.server.record.folder import RunFiles, stored_checkpoints
from cloister.server.record.journal import MEASURED, Journal
from cloister.server.sum.spending import OWNER
from cloister.simulations.search.search import Values

SETTINGS = "settings.json"
"""What the search set, beside the plan."""

_TIMES = ("seconds", "phase_seconds")
_EVERY_FILE_S = 315532800
"""1 January 1980, the first day that every format of archives can state; in seconds since the epoch."""


def publish(trial: RunFiles, settings: Values, path: Path) -> None:
    """Write the released copy of a finished trial, durably.

    Args:
        trial: The trial.
        settings: What the search set in it.
        path: The copy, which is replaced if it exists.

    Raises:
        CloisterError: the trial is damaged, or the disk refuses.
    """
    write_folder(path, lambda folder: _copy(trial, RunFiles(folder), settings))


def remove_dates(path: Path) -> None:
    """Let every file and folder under a path, and at last the path itself, be of 1 January 1980; once.

    Raises:
        StorageError: the disk refuses it.
    """
    if path.stat().st_mtime == _EVERY_FILE_S:
        return
    for each in (*path.rglob("*"), path):
        set_date(each, _EVERY_FILE_S)


def set_date(path: Path, seconds: float | None = None) -> None:
    """Let a file or folder be of another time, in seconds since the epoch; None: of now.

    Raises:
        StorageError: the disk refuses it.
    """
    with on_disk(path):
        os.utime(path, None if seconds is None else (seconds, seconds), follow_symlinks=False)


def _copy(trial: RunFiles, made: RunFiles, settings: Values) -> None:
    (made.path / SETTINGS).write_text(json.dumps(settings))
    shutil.copyfile(trial.plan_file, made.plan_file)
    if trial.public.exists():
        shutil.copyfile(trial.public, made.public)
    with Journal(trial.journal) as journal, Journal(made.journal, clock=_no_time) as copy:
        for entry in journal.entries():
            if entry.step != MEASURED:
                copy.record(entry.round, entry.attempt, entry.step, _timeless(entry.detail))
    for row in trial.metrics():
        with made.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_timeless(row)) + "\n")
    made.checkpoints.mkdir()
    for checkpoint in stored_checkpoints(trial.checkpoints).values():
        _copy_checkpoint(checkpoint, made.checkpoints / checkpoint.name)
    _copy_ledger(OWNER, trial.ledger, made.ledger)
    made.sites.path.mkdir()
    for known in (trial.sites.roster, trial.sites.public_records):
        if known.exists():
            shutil.copyfile(known, made.sites.path / known.name)
    for site in trial.sites.names():
        made.sites.state(site).mkdir(parents=True)
        shutil.copyfile(trial.sites.config(site), made.sites.config(site))
    for site, ledger in trial.sites.ledgers().items():
        _copy_ledger(site, ledger, made.sites.ledger(site))


def _no_time() -> float:
    return 0.0


def _timeless(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in _TIMES}


def _copy_checkpoint(source: Path, target: Path) -> None:
    with safe_open(source, framework="np") as file:
        named = {name: value for name, value in file.metadata().items() if name != "facts"}
        save_file({name: file.get_tensor(name) for name in file.keys()}, target, named)  # noqa: SIM118 -- not a dict


def _copy_ledger(owner: str, source: Path, target: Path) -> None:
    """The same charges in the same order, in a chain of its own: the hash of an entry covers its time."""
    charges = [entry.charge for entry in read_history(source).entries]
    Ledger(target, owner, lambda _texts, _delta: 0.0, clock=_no_time).charge_all(charges, None)
