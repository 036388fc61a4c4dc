"""The correlated noise of a run, as it survives a crash: its key and its matrix, on disk before the first round.

The noise of a round is a function of both (`privacy/correlated.py`). So a sum that is opened again after a crash gets
the same noise, and nothing has to be written for a round. The journal has the file's hash: where the file is missing or
changed, the run ends, because new noise would not cancel the old, and the same models could be released twice.

The noise of a round is in one released sum only: a round's checkpoint, once it is in place, is the result of that round
(`checkpoint.py`), and until then nothing of the sum has left the process.

The file is removed when the run is finished: with it, the noise could be subtracted. Refused: the buffers as state,
some models' size for each round, which a crash could leave a round before or behind the release.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from cloister.privacy.correlated import Blt
from cloister.privacy.noise import NoiseStream
from cloister.protocol.errors import RunFolderError
from cloister.protocol.storage import write_file
from cloister.server import journal as steps
from cloister.server.journal import Journal


def kept_noise(
    path: Path, journal: Journal, blt: Blt, fresh: Callable[[], NoiseStream], done: int
) -> tuple[Blt, NoiseStream]:
    """The matrix and the stream of a run: those that it began with, or, before its first round, new ones.

    Args:
        path: The file; readable by its owner only.
        journal: The run's journal.
        blt: The matrix of a run that begins.
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
            expected="the key of the run's noise, which is missing or damaged; with other noise the rounds that are "
            "left would not cancel the noise of those that are done",
            fix="restore it from a backup; without it the run ends with the model of its newest checkpoint",
        )
    facts = json.loads(content)
    decay, inverse = (tuple(map(float.fromhex, facts[name])) for name in ("decay", "inverse_decay"))
    return Blt(decay, inverse), NoiseStream(bytes.fromhex(facts["key"]), declared=facts["declared"])


def _write_secret(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
