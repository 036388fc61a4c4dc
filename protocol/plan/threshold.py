"""The number of neighbours of a site and of shares that open a secret: (k, t), from the size of a cohort.

Of the n sites of a cohort, at most D drop out and at most A collude with the coordinator, who may lie. Up to 64 sites
every pair shares a mask (Bonawitz et al. 2017). The complete graph needs that no two disjoint groups of honest sites,
each helped by all colluders, hold t shares of both secrets of one site: 2 t > n + A, so t = floor((n + A) / 2) + 1; and
that the survivors hold t: t <= n - D. A site holds a share of its own.

A plan states its colluders as a fraction of the federation. A cohort that is drawn from it may have more than its part
of them, and the author of a plan may try seeds until it does. So A is the least number that a draw exceeds with
probability below 2^-80 (hypergeometric), which is 2^-40 for an author who tries 2^40 seeds; it is never more than all
colluders of the federation (`Tolerance`).

With `aggregation.groups` each group of a round is such a draw, with n, A, k and t of its own. One of G groups has more
colluders than assumed with probability below G 2^-80.

Above 64 sites, each site has k neighbours only, in a Harary graph (Bell et al. 2020; `aggregation/secure/graph.py`
lays it out). The same must hold in each neighbourhood, except with a small probability (Bell et al. 2020, and the
bounds of Google's open implementation, `fcp/secagg/server/graph_parameter_finder.cc`, adversary class
"semi-malicious"):

- honest survivors stay connected except with probability 2^-41: a removed set that disconnects the ring holds k / 2
  successive sites in two places, so the probability is at most n (n - k - 1) / 2 C(D + A, k) / C(n, k), 0 if k > D + A;
- t1 = least number that the colluders among k neighbours exceed with probability below 2^-80 / n (hypergeometric); as
  above t = floor((t1 + k) / 2) + 1 then leaves no two disjoint groups, which is t1 <- ceil((t1 + k - 1.25) / 2),
  t1 + 1. Google's tail is 2^-41 / n; ours is finer because the ring's order depends on the roster, and the last site
  to enter the roster may try 2^40 keys;
- t2 = largest number that the surviving neighbours fall below with probability under 2^-20 / n; t <= t2;
- k is the least even number for which all this holds, or the least above D + A if that at most doubles k.

These bounds take dropouts to be independent of the ring's order. The order is public, so the first bound does not hold
against a coordinator that invents D dropouts in the right places: where k <= D + A it may split the honest sites into
parts, and learn the sum of each. A part is then never smaller than t - t1 + 1 honest sites, because the secrets of one
open only with the help of t - t1 honest neighbours in the same part: `Parameters.smallest_part`. Where k > D + A, and
in the complete graph, no set of dropouts splits the honest sites.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from cloister.protocol.errors import ParameterError

COMPLETE_UP_TO = 64
"""Largest cohort in which every pair shares a mask."""
LARGEST = 10_000
"""Largest cohort."""

DISCONNECTED = -41 * math.log(2)
"""Logarithm of the probability with which random dropouts and colluders may disconnect the honest sites."""
OUTVOTED = -80 * math.log(2)
"""Logarithm of the probability with which a draw, or any of n neighbourhoods, may have more colluders than assumed."""
INCORRECT = -20 * math.log(2)
"""Logarithm of the probability with which any of n neighbourhoods may lose more sites than assumed."""


@dataclass(frozen=True)
class Parameters:
    """The parameters for the size of a cohort and the plan's tolerances; every site computes them itself."""

    n: int
    """Sites in the cohort."""
    dropouts: int
    """D: sites that may drop out."""
    colluders: int
    """A: sites of the cohort that may collude with the coordinator."""
    k: int
    """Neighbours of a site."""
    threshold: int
    """t: shares that open a secret."""

    @cached_property
    def complete(self) -> bool:
        """Every pair shares a mask."""
        return self.k == self.n - 1

    @cached_property
    def agreement(self) -> int:
        """Fewest signatures under one list of survivors that exclude a second list: those of more than half of all
        honest sites.

        In the complete graph this is t. With fewer signatures, a coordinator could show different lists to different
        groups.
        """
        return (self.n + self.colluders) // 2 + 1

    @cached_property
    def quorum(self) -> int:
        """Least number of survivors: t in the complete graph, n - D where dropouts could disconnect the graph."""
        return max(self.threshold, self.agreement) if self.complete else self.n - self.dropouts

    @property
    def smallest_part(self) -> int:
        """Least number of honest updates in any sum that can be opened, for any D sites reported as dropouts."""
        return self.k - self.threshold + 2 if self.splits else self.quorum - self.colluders

    @property
    def splits(self) -> bool:
        """Whether a coordinator that chooses the dropouts can split the honest sites: k sites can disconnect them."""
        return not self.complete and self.k <= self.dropouts + self.colluders


def tolerated(n: int, fraction: float) -> int:
    """The largest whole number of `n` sites within `fraction` of them, which is from 0 to below 1.

    0.1 of 10 is 1 despite floating-point rounding.
    """
    return math.floor(fraction * n + 1e-9)


def assumed(n: int, fraction: float) -> int:
    """The least whole number of `n` sites that is not below `fraction` of them, to within 1e-9 of a site.

    Colluders are rounded up and dropouts down: if one site in ten may collude, one of eight may too.
    """
    return math.ceil(fraction * n - 1e-9)


@functools.lru_cache(maxsize=256)
def parameters(n: int, dropouts: int, colluders: int) -> Parameters:
    """k and t for `n` sites of which up to `dropouts` drop out and up to `colluders` collude with the coordinator.

    Raises:
        ParameterError: no k and t withstand that many dropouts and colluders, or a sum of a single honest update could
            be opened.
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
            fix="lower aggregation.dropouts or aggregation.colluders: 2 x dropouts + colluders < sites",
        )
    found = Parameters(n, dropouts, colluders, n - 1, majority)
    if n > COMPLETE_UP_TO:
        found = _harary(n, dropouts, colluders) or found  # no smaller k is safe: complete graph
    if found.smallest_part < 2:
        raise ParameterError(
            "aggregation.colluders",
            f"{colluders} of a cohort of {n} sites",
            expected=f"sums of at least 2 honest updates: of {found.quorum} survivors, all but "
            f"{found.smallest_part} may collude",
            fix="lower aggregation.colluders",
        )
    return found


@dataclass(frozen=True)
class Tolerance:
    """What a plan tolerates, as fractions: at least 0 and less than 1."""

    dropouts: float
    """Largest fraction of a cohort that may drop out."""
    colluders: float
    """Largest fraction of the federation that may collude with the coordinator."""

    def parameters(self, sites: int, n: int) -> Parameters:
        """k and t for a cohort of `n` sites that are drawn from a federation of `sites` sites.

        Raises:
            ParameterError: a fraction or a size is out of range, or no k and t withstand that many dropouts and
                colluders; it names the nearest sizes of a cohort that do.
        """
        try:
            return self._parameters(sites, n)
        except ParameterError as error:
            larger = self._nearest(sites, range(n + 1, sites + 1))
            smaller = self._nearest(sites, range(min(n, sites + 1) - 1, 1, -1))
            nearest = " or ".join(str(size) for size in (smaller, larger) if size)
            fix = f"draw a cohort of {nearest} of the {sites} sites" if nearest else ""
            both = ", or ".join(part for part in (error.fix, fix) if part)
            raise ParameterError.of(error, fix=both) from error

    def colluders_in(self, sites: int, n: int) -> int:
        """A: the colluders that a cohort of `n` sites, drawn from a federation of `sites` sites, is assumed to have."""
        return _most(sites, assumed(sites, self.colluders), n, OUTVOTED)

    def _parameters(self, sites: int, n: int) -> Parameters:
        if not 2 <= n <= min(sites, LARGEST):
            raise ParameterError("sites in the cohort", n, expected=f"2 to {min(sites, LARGEST)}")
        return parameters(n, tolerated(n, self.dropouts), self.colluders_in(sites, n))

    def _nearest(self, sites: int, sizes: Iterable[int]) -> int | None:
        for n in sizes:
            with contextlib.suppress(ParameterError):
                return self._parameters(sites, n).n
        return None


def _harary(n: int, dropouts: int, colluders: int) -> Parameters | None:
    """The parameters with the least k that is safe, or with one above D + A if that at most doubles k."""
    least = None
    for k in range(2, n - 1, 2):
        threshold = _harary_threshold(n, dropouts, colluders, k)
        if least is not None and k > 2 * least.k:
            break
        if threshold is not None:
            found = Parameters(n, dropouts, colluders, k, threshold)
            if k > dropouts + colluders:
                return found
            least = least or found
    return least


def _harary_threshold(n: int, dropouts: int, colluders: int, k: int) -> int | None:
    if _log_disconnected(n, dropouts + colluders, k) >= DISCONNECTED:
        return None
    t1 = _most(n, colluders, k, OUTVOTED - math.log(n))
    t2 = k - _most(n, dropouts, k, INCORRECT - math.log(n))
    threshold = max((t1 + k) // 2 + 1, 2)
    return threshold if threshold <= t2 else None


def _log_disconnected(n: int, removed: int, k: int) -> float:
    """Logarithm of a bound on the probability that `removed` random sites disconnect the others."""
    if k > removed:
        return -math.inf
    return math.log(n) + math.log(n - k - 1) - math.log(2) + _log_choose(removed, k) - _log_choose(n, k)


@functools.lru_cache(maxsize=4096)
def _most(n: int, marked: int, k: int, log_tail: float) -> int:
    """Least x that the `marked` among k of n sites exceed with probability below exp(log_tail)."""
    # Hoeffding: the mass above `start` is less than exp(-30) of the tail; the slack of 1e-9 below covers it.
    start = min(marked, k, math.ceil(k * marked / n + math.sqrt(k * (30 - log_tail) / 2)))
    log_point = _log_choose(marked, start) + _log_choose(n - marked, k - start) - _log_choose(n, k)
    log_total = log_point
    for x in range(start, 0, -1):
        if log_total + 1e-9 >= log_tail:  # conservative: the slack can only raise x
            return x
        log_point += math.log(x * (n - marked - k + x) / ((marked - x + 1) * (k - x + 1)))
        log_total = max(log_total, log_point) + math.log1p(math.exp(-abs(log_total - log_point)))
    return 0


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
