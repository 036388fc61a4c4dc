"""The noise of a trusted coordinator, as it survives a crash: one key, on disk before the first round.

All noise of the run is a function of it. So a sum that is opened again, after a crash or from a copy of the run folder,
gets the same noise, and nothing has to be written for a round. The journal has the file's hash: where the file is
missing or changed, the run ends, because the same sum could be released twice with different noise.

Independent noise depends on the opened sum too (`aggregation/features/site_unit.py`: `of_sum`): a copy of the folder
may open another sum of the same round, with other survivors, and the difference of two sums with the same noise has
none.

Correlated noise (`privacy/mechanism/correlated.py`) is a function of key, matrix and round alone, so the matrix is
kept with the key, and the noise of a round is in one released sum only: sites answer for one list of survivors under
the secure sum, which it needs, and a round's checkpoint, once it is in place, is the result of that round
(`checkpoint.py`).

The file is removed when the run is finished: with it, the noise could be subtracted. Refused: the buffers as state,
some models' size for each round, which a crash could leave a round before or behind the release.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from cloister.privacy.mechanism.correlated import Blt
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import RunFolderError
from cloister.protocol.machine.storage import write_file
from cloister.server.record import journal as steps
from cloister.server.record.journal import Journal


def kept_noise(
    path: Path, journal: Journal, blt: Blt, fresh: Callable[[], NoiseStream], done: int
) -> tuple[Blt, NoiseStream]:
    """The matrix and the stream of a run: those that it began with, or, before its first round, new ones.

    Args:
        path: The file; readable by its owner only.
        journal: The run's journal.
        blt: The matrix of a run that begins; without correlation `Blt()`.
        fresh: Returns a stream that nothing else uses.
        done: The last round that is done.

    Raises:
        RunFolderError: the run has begun, and the file is missing or damaged.
        StorageError: the disk refuses the write; the run has not begun.
    """
    begun = journal.newest(steps.NOISE)
    if begun is None and not done:
        stream = fresh()
        facts = {
            "key": stream.key.hex(),
            "declared": stream.declared,
            "decay": [each.hex() for each in blt.decay],
            "inverse_decay": [each.hex() for each in blt.inverse_decay],
        }
        content = json.dumps(facts).encode()
        write_file(path, lambda temporary: _write_secret(temporary, content))
        journal.record(0, 0, steps.NOISE, {"sha256": hashlib.sha256(content).hexdigest()})
        return blt, stream
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if begun is None or hashlib.sha256(content).hexdigest() != begun.detail["sha256"]:
        raise RunFolderError(
            str(path),
            expected="the key of the run's noise, which is missing or damaged; with another key a sum could be "
            "released twice with different noise, and correlated rounds would not cancel",
            fix="restore it from a backup; without it the run ends with the model of its newest checkpoint",
        )
    facts = json.loads(content)
    decay, inverse = (tuple(map(float.fromhex, facts[name])) for name in ("decay", "inverse_decay"))
    return Blt(decay, inverse), NoiseStream(bytes.fromhex(facts["key"]), declared=facts["declared"])


def _write_secret(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
