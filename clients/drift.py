"""Drift: what a site has changed in the fragments of the model that it has not sent yet (`aggregation.fragments`).

A site trains all fragments in each round, and a round sums one of them. With the global model g and the drift v of
earlier rounds the site trains from g + v to w, sends w - g on the round's fragment, and keeps w - g on all others as
its drift; that of the fragment is 0 from then on. So a fragment is sent with the steps of all rounds since it was sent
last (Streaming DiLoCo: Douillard et al. 2025).

Drift is the distance to a global model, so it is dropped where that has moved. The site takes a fragment as moved by
each round after the one of its drift, whether that round took place or not: round numbers are public, and what became
of a round is not told to a site that was not in it. A round that was abandoned, or whose mean the gate refused, thus
costs a site that was not in its sum the drift of one fragment, which had not moved. A site that was in the sum has sent
its change, which is lost with the round, as any update is. The drift of the other fragments stays in both cases.

What is kept counts once, by the rule of `carried.py`. Under masks a site whose update was not summed thus forgets all
that it trained in that round, not the fragment alone.

With a privacy unit drift costs nothing more. Unit `site`: what a site sends may be any function of its records and of
earlier models, for it is clipped to C and noised. Units `record` and `owner`: each local step is noised, on all
parameters, and charged with its round; which of them are sent, and when, is post-processing.

A file `drift-<round>` has the vector, float32, little-endian, with zeros in the fragment of that round.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloister.clients.carried import Carried
from cloister.lm.layout import Vector
from cloister.lm.parts import Parts
from cloister.protocol.blocks import Span
from cloister.protocol.storage import disk_refusal

_FLOAT = np.dtype("<f4")


def drifts(state: Path, run: str, plan: str, size: int) -> Carried:
    """The drifts of a site in a run.

    Args:
        state: The site's state folder.
        run: Identity of the run.
        plan: Digest of the plan.
        size: d, trained parameters of its model.
    """
    return Carried(state, run, plan, "drift", _FLOAT.itemsize * size)


@dataclass(frozen=True)
class Drift:
    """The drift of one update: that with which it starts, and where that with which it ends is written."""

    before: Path | None
    """File of the drift with which the update starts; None: zeros."""
    moved: frozenset[Span]
    """The fragments that have moved since."""
    after: Path
    """The new file."""

    @classmethod
    def of(cls, carried: Carried, base: int, round: int, parts: Parts, after: Path) -> Drift:
        """The drift of the update of a round.

        Args:
            carried: The drifts of the site.
            base: The round with whose drift the update starts; 0: none.
            round: The round.
            parts: The plan's.
            after: The new file.
        """
        since = range(base + 1, min(round, base + 1 + len(parts.spans)))  # after so many, all have moved
        return cls(carried.path(base) if base else None, frozenset(map(parts.of, since)), after)

    def read(self, size: int) -> Vector:
        """(size,) float32: the drift with which the update starts.

        Raises:
            StorageError: the disk refuses the access.
        """
        if self.before is None:
            return np.zeros(size, np.float32)
        try:
            drift = np.fromfile(self.before, _FLOAT, size).astype(np.float32, copy=False)
        except OSError as error:
            raise disk_refusal(self.before, error) from error
        for span in self.moved:
            span.of(drift)[:] = 0
        return drift

    def write(self, drift: Vector) -> None:
        """Write the drift with which the update ends, (size,) float32, for its owner only.

        Raises:
            StorageError: the disk refuses the write.
        """
        try:
            self.after.touch(0o600)
            drift.astype(_FLOAT, copy=False).tofile(self.after)
        except OSError as error:
            raise disk_refusal(self.after, error) from error
