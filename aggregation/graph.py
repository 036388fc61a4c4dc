"""Who masks with whom, and how many shares open a secret: the graph and its (k, t).

Up to 64 sites every pair shares a mask (Bonawitz et al. 2017). Above, each site masks with k others only, its
neighbours in a Harary graph: sites stand on a ring in an order that no one chose, and each is joined to the k
/ 2 nearest on either side (Bell et al. 2020), so that a site's cost grows with k, which grows with log n.

Of n sites, at most D drop out and at most A collude with the coordinator, who may lie. The complete graph
needs that no two disjoint groups of honest sites, each helped by all colluders, hold t shares of both secrets
of one site: 2 t > n + A, so t = floor((n + A) / 2) + 1; and that the survivors hold t: t <= n - D. A site
holds a share of its own.

The Harary graph asks the same of each neighbourhood, with room for chance (Bell et al. 2020, and the
bounds of Google's open implementation, `fcp/secagg/server/graph_parameter_finder.cc`, adversary class
"semi-malicious"):

- honest survivors stay connected but with probability 2^-41: a removed set that disconnects the ring holds k
  / 2 successive sites in two places, so the probability is at most n (n - k - 1) / 2 C(D + A, k) / C(n, k), 0
  if k > D + A;
- t1 = least number that the colluders among k neighbours exceed with probability below 2^-41 / n
  (hypergeometric); as above t = floor((t1 + k) / 2) + 1 then leaves no two disjoint groups, which is t1 <-
  ceil((t1 + k - 1.25) / 2), t1 + 1;
- t2 = largest number that the surviving neighbours fall below with probability under 2^-20 / n; t <= t2;
- k is the least even number for which all this holds.

These bounds take dropouts and colluders to be independent of the ring's order. The order is public, so
whoever chooses them after seeing it is not bound by the first: a coordinator that invents D dropouts in the
right places may split the honest sites into parts, and learn the sum of each, when k <= D + A (with a tenth
of each: from 358 sites on). A part is then never smaller than t - t1 + 1 honest sites, because the secrets of
one open only with the help of t - t1 honest neighbours in the same part: `Parameters.smallest_part`. The
complete graph has no such weakness.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloister.protocol.encoding import pack
from cloister.protocol.errors import MemberError, ParameterError

COMPLETE_UP_TO = 64
"""Largest cohort in which every pair shares a mask."""
LARGEST = 10_000
"""Largest cohort."""

_INSECURE = -41 * math.log(2)  # two bad events of 2^-41 each: 40 bits of statistical security
_INCORRECT = -20 * math.log(2)


@dataclass(frozen=True)
class Parameters:
    """What a cohort's size and the plan's tolerances give; every site computes them itself."""

    n: int
    """Sites in the cohort."""
    dropouts: int
    """D: sites that may drop out."""
    colluders: int
    """A: sites that may collude with the coordinator."""
    k: int
    """Neighbours of a site."""
    threshold: int
    """t: shares that open a secret."""

    @property
    def complete(self) -> bool:
        """Every pair shares a mask."""
        return self.k == self.n - 1

    @property
    def agreement(self) -> int:
        """Signatures under one list of survivors that no other list can have too: more than half of all
        honest sites'.

        In the complete graph this is t. With fewer, a coordinator could put different lists to different
        groups.
        """
        return (self.n + self.colluders) // 2 + 1

    @property
    def quorum(self) -> int:
        """Least number of survivors: t in the complete graph, n - D where dropouts could cut the graph."""
        return max(self.threshold, self.agreement) if self.complete else self.n - self.dropouts

    @property
    def smallest_part(self) -> int:
        """Least number of honest updates in anything that can be opened, whichever D sites are said to have
        dropped.
        """
        if (
            self.k > self.dropouts + self.colluders
        ):  # nothing that may be removed disconnects a k-connected graph
            return self.quorum - self.colluders
        return self.k - self.threshold + 2


def tolerated(n: int, fraction: float) -> int:
    """The largest whole number of `n` sites within `fraction` of them; 0.1 of 10 is 1, whatever binary
    rounding says.
    """
    if not 0 <= fraction < 1:
        raise ParameterError("fraction of the cohort", fraction, expected="0 or more and less than 1")
    return math.floor(fraction * n + 1e-9)


def assumed(n: int, fraction: float) -> int:
    """The least whole number of `n` sites that is not below the fraction: at least 1 unless it is 0.

    Colluders are rounded up and dropouts down: a plan that says one site in ten may collude must withstand one
    also among eight.
    """
    if not 0 <= fraction < 1:
        raise ParameterError("fraction of the cohort", fraction, expected="0 or more and less than 1")
    return math.ceil(fraction * n - 1e-9)


@functools.lru_cache(maxsize=256)
def parameters(n: int, dropouts: int, colluders: int) -> Parameters:
    """k and t for `n` sites of which up to `dropouts` drop out and up to `colluders` collude with the
    coordinator.

    Raises:
        ParameterError: no k and t can give that.
    """
    if not 2 <= n <= LARGEST:
        raise ParameterError("sites in the cohort", n, expected=f"2 to {LARGEST}")
    if dropouts < 0 or colluders < 0:
        raise ParameterError("dropouts and colluders", (dropouts, colluders), expected="0 or more")
    majority = (n + colluders) // 2 + 1
    if majority > n - dropouts:
        raise ParameterError(
            "aggregation.dropouts and aggregation.colluders",
            f"{dropouts} and {colluders} of {n} sites",
            expected=f"a threshold of {majority} that the {n - dropouts} survivors can meet",
            fix="lower aggregation.dropouts or aggregation.colluders: 2 x dropouts + colluders < sites, "
            "or draw a larger cohort",
        )
    if n > COMPLETE_UP_TO:
        for k in range(2, n - 1, 2):
            threshold = _harary_threshold(n, dropouts, colluders, k)
            if threshold is not None:
                return Parameters(n, dropouts, colluders, k, threshold)
    return Parameters(n, dropouts, colluders, n - 1, majority)  # no smaller graph is safe: every pair


def _harary_threshold(n: int, dropouts: int, colluders: int, k: int) -> int | None:
    if _log_disconnected(n, dropouts + colluders, k) >= _INSECURE:
        return None
    t1 = _most(n, colluders, k, _INSECURE - math.log(n))
    t2 = k - _most(n, dropouts, k, _INCORRECT - math.log(n))
    threshold = max((t1 + k) // 2 + 1, 2)
    return threshold if threshold <= t2 else None


def _log_disconnected(n: int, removed: int, k: int) -> float:
    """Logarithm of a bound on the probability that `removed` random sites disconnect the others."""
    if k > removed:
        return -math.inf
    return math.log(n) + math.log(n - k - 1) - math.log(2) + _log_choose(removed, k) - _log_choose(n, k)


def _most(n: int, marked: int, k: int, log_tail: float) -> int:
    """Least x that the `marked` among k of n sites exceed with probability below exp(log_tail)."""
    # Hoeffding: what lies above `start` is less than exp(-30) of the tail, and the slack below covers it.
    start = min(marked, k, math.ceil(k * marked / n + math.sqrt(k * (30 - log_tail) / 2)))
    point = math.exp(_log_choose(marked, start) + _log_choose(n - marked, k - start) - _log_choose(n, k))
    total, tail = 0.0, math.exp(log_tail)
    for x in range(start, 0, -1):
        total += point
        if total * (1 + 1e-9) >= tail:  # rounding errs to the safe side
            return x
        point *= x * (n - marked - k + x) / ((marked - x + 1) * (k - x + 1))
    return 0


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


class Graph:
    """The neighbours of every site of a cohort."""

    def __init__(self, cohort: Sequence[str], parameters: Parameters, key: bytes, round_: int) -> None:
        """Lay out the graph.

        Args:
            cohort: Names of the n sites, distinct, in any order.
            parameters: For that n.
            key: The roster's hash: with the round it fixes the order on the ring, by a keyed hash of each
                name.
            round_: The round.
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
        """The sites that hold shares of `site`'s secrets, sorted: its neighbours; in the complete graph also
        itself.
        """
        return self.sites if self.parameters.complete else self.neighbours(site)

    def _near(self, site: str) -> Iterator[str]:
        at, n = self._place[site], len(self._ring)
        for step in range(1, self.parameters.k // 2 + 1):
            yield self._ring[(at + step) % n]
            yield self._ring[(at - step) % n]


def _position(site: str, key: bytes, round_: int) -> bytes:
    return hashlib.blake2b(pack("cloister/ring/1", round_, site), key=key, digest_size=32).digest()
