"""The mask graph: the neighbours of every site of a cohort, with which it shares masks.

In the complete graph every pair shares a mask (Bonawitz et al. 2017). In a larger cohort each site shares masks only
with its k neighbours in a Harary graph: the sites lie on a ring in a public pseudorandom order, and each is connected
to the k / 2 nearest on either side (Bell et al. 2020). A site's cost then grows with k, which grows with log n.
`protocol/plan/threshold.py` computes k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from cloister.protocol.encoding import pack
from cloister.protocol.errors import MemberError
from cloister.protocol.plan.threshold import Parameters


class Graph:
    """The neighbours of every site of a cohort."""

    def __init__(self, cohort: Sequence[str], parameters: Parameters, key: bytes, round_: int) -> None:
        """Build the graph.

        Args:
            cohort: Names of the n sites, distinct, in any order.
            parameters: For that n.
            key: The roster's hash: with the round it fixes the order on the ring, by a keyed hash of each name.
            round_: The round.

        Raises:
            MemberError: the cohort is not n distinct sites.
        """
        self.sites = tuple(sorted(cohort))
        self.parameters = parameters
        if len(set(self.sites)) != parameters.n or len(self.sites) != parameters.n:
            raise MemberError("cohort", len(self.sites), expected=f"{parameters.n} different sites")
        self._index = {site: x for x, site in enumerate(self.sites, 1)}
        self._ring: list[str] = []
        if not parameters.complete:
            self._ring = sorted(self.sites, key=lambda site: _position(site, key, round_))
        self._place = {site: at for at, site in enumerate(self._ring)}

    def index(self, site: str) -> int:
        """The x-coordinate of the shares that `site` holds, from 1 to n."""
        return self._index[site]

    def neighbours(self, site: str) -> tuple[str, ...]:
        """The sites that share a mask with `site`, sorted."""
        if self.parameters.complete:
            return tuple(other for other in self.sites if other != site)
        return tuple(sorted(self._near(site)))

    def holders(self, site: str) -> tuple[str, ...]:
        """The sites that hold shares of `site`'s secrets, sorted: its neighbours, and in the complete graph itself."""
        return self.sites if self.parameters.complete else self.neighbours(site)

    def _near(self, site: str) -> Iterator[str]:
        at, n = self._place[site], len(self._ring)
        for step in range(1, self.parameters.k // 2 + 1):
            yield self._ring[(at + step) % n]
            yield self._ring[(at - step) % n]


def _position(site: str, key: bytes, round_: int) -> bytes:
    return hashlib.blake2b(pack("cloister/ring/1", round_, site), key=key, digest_size=32).digest()
