"""The coordinator's side of SCAFFOLD: c, and whose changes are in it.

A site has two control variates: that of the last sum that it was in, and that of the update that it made last. It
cannot know whether that update was summed: its upload may be lost, the round abandoned, or the mean refused by the
gate. The coordinator knows, so it tells each site the last round in which the site's change is in c. Both are in the
checkpoint of a round, with its model: they are of one moment, whatever crashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from cloister.aggregation.variates import move
from cloister.protocol.digest import vector_hash
from cloister.protocol.messages import ControlVariate

Vector = npt.NDArray[np.float32]


class ControlVariates:
    """c, and the last round of each site whose change is in it.

    Args:
        common: (d,) float32, c; it belongs to this object afterwards, which writes into it.
        summed: By site the last round whose change is in c; sites without one have changed nothing.
    """

    def __init__(self, common: Vector, summed: Mapping[str, int]) -> None:
        self._common = common
        self._summed = dict(summed)

    @classmethod
    def first(cls, size: int) -> ControlVariates:
        """Those of round 1: zeros."""
        return cls(np.zeros(size, np.float32), {})

    @property
    def common(self) -> Vector:
        """(d,) float32, c; a read-only view that `add` changes."""
        view = self._common.view()
        view.flags.writeable = False
        return view

    @property
    def summed(self) -> dict[str, int]:
        """By site the last round whose change is in c."""
        return dict(self._summed)

    def messages(self, sites: Iterable[str]) -> dict[str, ControlVariate]:
        """What each site is told in a round."""
        common = self.common
        digest = vector_hash(common)
        return {site: ControlVariate(digest, common, self._summed.get(site, 0)) for site in sites}

    def add(
        self, round_number: int, mean: Vector, sites: Iterable[str], sizes: float, federation: int
    ) -> None:
        """Take up a round.

        Args:
            round_number: The round.
            mean: (d,) float32: the mean of the updates; not modified.
            sites: Those whose updates are in it.
            sizes: H, the sum of the round's learning rates.
            federation: N, the sites of the federation.
        """
        summed = dict.fromkeys(sites, round_number)
        move(self._common, self._common, mean, sizes, len(summed) / federation)
        self._summed |= summed
