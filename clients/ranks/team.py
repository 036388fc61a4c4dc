"""The work of a site on several devices: its ranks do it (`part.py`), and this process has no model and no update.

The global model is given to all ranks as one copy in shared memory. The masked spans lie in shared memory of the ranks,
from which the carrier sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cloister.aggregation.features.question import UnitCode
from cloister.aggregation.secure.secure_site import SecureSite
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.span import Manifest, Piece
from cloister.clients.ranks.part import Command, Evaluate, Mask, Masked, Model, Part, Train, Trained
from cloister.clients.ranks.ranks import Ranks
from cloister.clients.state import attempt as state
from cloister.clients.state.kept import Written
from cloister.clients.training.work import Task
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.layout import Vector
from cloister.lm.parallel.mesh import Mesh
from cloister.lm.tasks.task import HeldOut
from cloister.protocol.errors import StepError
from cloister.protocol.machine.segments import SharedVector
from cloister.protocol.machine.storage import allocate
from cloister.protocol.messages.blocks import Span, tile
from cloister.protocol.messages.digest import vector_hash
from cloister.protocol.plan.plan import Plan


class Team:
    """The ranks of a site that have a plan's model.

    Args:
        model: What each of them builds.
        mesh: Their mesh.
        devices: The torch device of each rank.
        threads: Threads of torch in each rank.
        timeout_s: Seconds after which ranks that have not done a command are ended.
    """

    elsewhere: ClassVar = True

    def __init__(
        self, model: Model, mesh: Mesh, devices: Sequence[str], threads: int, timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._ranks: Ranks[Command, Any] = Ranks(
            partial(Part, model),
            mesh,
            devices,
            threads=threads,
            preload=[Part.__module__, "transformers.modeling_utils", "transformers.modeling_layers"],
        )

    def update(self, task: Task, start: Vector, path: Path) -> Written:
        """As `Work.update`."""
        layout = task.code.layout
        allocate(path, layout.length * np.dtype(layout.ring.dtype).itemsize)
        answers: list[Trained] = self._call(Train(task, SharedVector.of(start), path))
        tail = task.code.tail([each.clipped for each in answers], answers[0].tokens, answers[0].loss)
        whole = np.memmap(path, layout.ring.dtype, "r+")
        whole[layout.size :] = tail
        whole.flush()
        kept = np.memmap(path, layout.ring.dtype, "r")
        spans = [*(each.span for each in answers), Span(layout.size, layout.length)]
        pieces = [(span.start, np.asarray(span.of(kept))) for span in spans]
        return _written(pieces, [*(each.digest for each in answers), vector_hash(tail)])

    def masking(self, path: Path, size: int, instructions: bytes, threads: int) -> state.Mask:
        """As `Work.masking`: each rank masks its span of the file; the masked vector is in shared memory."""

        def mask(site: SecureSite, pieces: list[Piece]) -> Written:
            length, dtype = sum(piece.size for _, piece in pieces), pieces[0][1].dtype
            spans, seeds = tile(size, len(self._ranks)), site.take_seeds(instructions=instructions)
            command = Mask(path, spans, dtype.str, seeds, threads)
            answers: list[Masked] = self._call(command)
            tail = _span_of(pieces, Span(size, length)).copy()
            if [each.of for each in answers] != [vector_hash(_span_of(pieces, span)) for span in spans]:
                raise StepError(  # another process of the site has replaced the file; nothing has left
                    "update",
                    expected="the file of the finished update not to change",
                    fix="try the round again",
                )
            masks.apply(tail, seeds.add, seeds.subtract, offset=size)
            masked = [(span.start, each.vector.array) for span, each in zip(spans, answers, strict=True)]
            hashes = [each.digest for each in answers]
            return _written([*masked, (size, tail)], [*hashes, vector_hash(tail)])

        return mask

    def held_out(self, plan: Plan, weights: Vector, sequences: Callable[[], Prepared]) -> HeldOut:
        """As `Work.held_out`."""
        found: HeldOut = self._call(Evaluate(SharedVector.of(weights), sequences))[0]
        return found

    def measured(
        self, code: UnitCode, weights: Vector, sequences: Callable[[], Prepared], path: Path
    ) -> Written:
        """As `Work.measured`, which `mesh_for` refuses here."""
        raise AssertionError("one process puts each unit through the model")

    def _call(self, command: Command) -> list[Any]:
        return self._ranks.call(command, timeout_s=self._timeout_s)

    def close(self) -> None:
        """End the ranks; idempotent."""
        self._ranks.close()


def _written(pieces: list[Piece], hashes: Sequence[bytes]) -> Written:
    """Pieces that are not empty, with hashes that the ranks have computed."""
    entries = [(offset, piece.size, digest) for (offset, piece), digest in zip(pieces, hashes, strict=True)]
    manifest: Manifest = tuple(entry for entry in entries if entry[1])
    return Written(manifest, [piece for piece in pieces if piece[1].size])


def _span_of(pieces: list[Piece], span: Span) -> np.ndarray[Any, np.dtype[Any]]:
    """The span's elements, of pieces that tile a vector."""
    parts = [vector[max(span.start - offset, 0) : max(span.stop - offset, 0)] for offset, vector in pieces]
    parts = [part for part in parts if part.size]
    return parts[0] if len(parts) == 1 else np.concatenate([pieces[0][1][:0], *parts])
