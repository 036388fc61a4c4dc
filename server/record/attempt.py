"""What the coordinator keeps of the attempt that is under way, so that after a crash it goes on with the same one.

At the end of each step the replies that it has are written, synced, before the next step's first request is sent. A
request follows from the replies of the steps before it and from nothing else: no request is random. So a coordinator
that starts again sends the requests of the step in which it died byte for byte, to the same sites, and a site gives the
answer that it gave before. A site that was a dropout stays one, and the survivors stay the same.

With the replies of step 4, which are the sites' statements, the sum of their masked vectors is kept: no vector is sent
again in steps 5 and 6, and a site that has wiped its secrets need not mask again. A step that was not finished is
asked for again as a whole.

Each group of a round (`aggregation.groups`) has an attempt of its own, kept in a folder of its own.

There is one file for each step, with the context of its attempt (`secure_sum.context`), and one for the sum. Those of
the next attempt replace them. Refused: entries of the journal, which would grow by all replies of all attempts.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cloister.aggregation.vector.masks import Ring
from cloister.protocol.encoding import pack, unpack
from cloister.protocol.errors import EncodingError
from cloister.protocol.machine.storage import sync_folders, write_bytes, write_file
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.messages.messages import Advertise, Confirm, Masked, Reveal, Shares, Signed, Step
from cloister.protocol.messages.wire import from_bytes, to_bytes

M = TypeVar("M", Advertise, Shares, Confirm, Reveal)
S = TypeVar("S", Advertise, Shares, Masked, Confirm, Reveal)


class KeptAttempt:
    """The replies of an attempt's finished steps, and the sum of its masked vectors, on disk.

    Args:
        folder: Theirs alone; it is made when the first is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of_group(self, group: int) -> KeptAttempt:
        """What is kept of the attempt at a group's sum."""
        return KeptAttempt(self._folder / f"group-{group + 1}") if group else self

    def keep(self, context: bytes, kind: type[M], replies: Sequence[M]) -> None:
        """Keep the replies with which a step ends, durably.

        Args:
            context: Of the attempt.
            kind: What they are.
            replies: Theirs.

        Raises:
            StorageError: the disk refuses.
        """
        self._write(kind.STEP, context, b"", replies)

    def replies(self, context: bytes, kind: type[M]) -> list[M] | None:
        """The replies with which a step of this attempt has ended; None if it has not."""
        kept = self._read(context, kind)
        return None if kept is None else kept[1]

    def keep_sum(self, context: bytes, statements: Sequence[Masked], vector: Ring) -> None:
        """Keep the end of step 4, durably.

        Args:
            context: Of the attempt.
            statements: Those of the sites whose vectors are in the sum.
            vector: The sum of their masked vectors.

        Raises:
            StorageError: the disk refuses.
        """
        write_file(self._sum, vector.tofile)
        self._write(Step.UPDATE, context, vector_hash(vector), statements)

    def sum(self, context: bytes, dtype: npt.DTypeLike) -> tuple[list[Masked], Ring] | None:
        """What `keep_sum` kept of this attempt; None if step 4 has not ended.

        Args:
            context: Of the attempt.
            dtype: The ring's.
        """
        kept = self._read(context, Masked)
        if kept is None or not self._sum.exists():
            return None
        digest, statements = kept
        vector: Ring = np.fromfile(self._sum, dtype)
        return (statements, vector) if vector_hash(vector) == digest else None

    def remove(self) -> None:
        """Remove all files: the run is over."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _sum(self) -> Path:
        return self._folder / "sum"

    def _path(self, step: Step) -> Path:
        return self._folder / step.label

    def _write(self, step: Step, context: bytes, digest: bytes, replies: Sequence[Signed]) -> None:
        content = pack(context, digest, tuple(to_bytes(reply) for reply in replies))
        write_bytes(self._path(step), content)

    def _read(self, context: bytes, kind: type[S]) -> tuple[bytes, list[S]] | None:
        """What `_write` wrote for this attempt; None if it wrote nothing that is whole."""
        try:
            match unpack(self._path(kind.STEP).read_bytes()):
                case (bytes(of), bytes(digest), tuple(replies)) if of == context:
                    sync_folders(self._folder, self._folder)  # its process may have been killed before it did
                    return digest, [from_bytes(kind, reply) for reply in replies if isinstance(reply, bytes)]
        except (FileNotFoundError, EncodingError):
            pass
        return None
