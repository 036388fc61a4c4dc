"""The number of neighbours of a site and of shares that open a secret: (k, t), from the size of a cohort.

Of n sites, at most D drop out and at most A collude with the coordinator, who may lie. Up to 64 sites every pair shares
a mask (Bonawitz et al. 2017). The complete graph needs that no two disjoint groups of honest sites, each helped by all
colluders, hold t shares of both secrets of one site: 2 t > n + A, so t = floor((n + A) / 2) + 1; and that the survivors
hold t: t <= n - D. A site holds a share of its own.

Above 64 sites, each site has k neighbours only, in a Harary graph (Bell et al. 2020; `aggregation/graph.py` lays it
out). The same must hold in each neighbourhood, except with a small probability (Bell et al. 2020, and the bounds of
Google's open implementation, `fcp/secagg/server/graph_parameter_finder.cc`, adversary class "semi-malicious"):

- honest survivors stay connected except with probability 2^-41: a removed set that disconnects the ring holds k / 2
  successive sites in two places, so the probability is at most n (n - k - 1) / 2 C(D + A, k) / C(n, k), 0 if k > D + A;
- t1 = least number that the colluders among k neighbours exceed with probability below 2^-41 / n (hypergeometric); as
  above t = floor((t1 + k) / 2) + 1 then leaves no two disjoint groups, which is t1 <- ceil((t1 + k - 1.25) / 2),
  t1 + 1;
- t2 = largest number that the surviving neighbours fall below with probability under 2^-20 / n; t <= t2;
- k is the least even number for which all this holds.

These bounds take dropouts and colluders to be independent of the ring's order. The order is public, so the first bound
does not hold against an adversary that chooses dropouts or colluders after seeing it: a coordinator that invents D
dropouts in the right places may split the honest sites into parts, and learn the sum of each, when k <= D + A (with a
tenth of each: from 358 sites on). A part is then never smaller than t - t1 + 1 honest sites, because the secrets of one
open only with the help of t - t1 honest neighbours in the same part: `Parameters.smallest_part`. The complete graph has
no such weakness.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from cloister.protocol.errors import ParameterError

COMPLETE_UP_TO = 64
"""Largest cohort in which every pair shares a mask."""
LARGEST = 10_000
"""Largest cohort."""

_INSECURE = -41 * math.log(2)  # two bad events of 2^-41 each: 40 bits of statistical security
_INCORRECT = -20 * math.log(2)


@dataclass(frozen=True)
class Parameters:
    """The parameters for the size of a cohort and the plan's tolerances; every site computes them itself."""

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
        """Fewest signatures under one list of survivors that exclude a second list: those of more than half of all
        honest sites.

        In the complete graph this is t. With fewer signatures, a coordinator could show different lists to different
        groups.
        """
        return (self.n + self.colluders) // 2 + 1

    @property
    def quorum(self) -> int:
        """Least number of survivors: t in the complete graph, n - D where dropouts could disconnect the graph."""
        return max(self.threshold, self.agreement) if self.complete else self.n - self.dropouts

    @property
    def smallest_part(self) -> int:
        """Least number of honest updates in any sum that can be opened, for any D sites reported as dropouts."""
        if (
            self.k > self.dropouts + self.colluders
        ):  # removing fewer than k sites cannot disconnect a k-connected graph
            return self.quorum - self.colluders
        return self.k - self.threshold + 2


def tolerated(n: int, fraction: float) -> int:
    """The largest whole number of `n` sites within `fraction` of them; 0.1 of 10 is 1 despite floating-point rounding.

    Raises:
        ParameterError: the fraction is below 0, 1 or more, or NaN.
    """
    if not 0 <= fraction < 1:
        raise ParameterError("fraction of the cohort", fraction, expected="0 or more and less than 1")
    return math.floor(fraction * n + 1e-9)


def assumed(n: int, fraction: float) -> int:
    """The least whole number of `n` sites that is not below `fraction` of them: at least 1 unless the fraction is 0.

    Colluders are rounded up and dropouts down: if one site in ten may collude, one of eight may too.

    Raises:
        ParameterError: the fraction is below 0, 1 or more, or NaN.
    """
    if not 0 <= fraction < 1:
        raise ParameterError("fraction of the cohort", fraction, expected="0 or more and less than 1")
    return math.ceil(fraction * n - 1e-9)


@functools.lru_cache(maxsize=256)
def parameters(n: int, dropouts: int, colluders: int) -> Parameters:
    """k and t for `n` sites of which up to `dropouts` drop out and up to `colluders` collude with the coordinator.

    Raises:
        ParameterError: no k and t withstand that many dropouts and colluders.
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
    return Parameters(n, dropouts, colluders, n - 1, majority)  # no smaller k is safe: complete graph


@dataclass(frozen=True)
class Tolerance:
    """What a plan tolerates in any cohort, as fractions of its sites: at least 0 and less than 1."""

    dropouts: float
    """Largest fraction that may drop out."""
    colluders: float
    """Largest fraction that may collude with the coordinator."""

    def parameters(self, n: int) -> Parameters:
        """k and t for a cohort of `n` sites.

        Raises:
            ParameterError: a fraction is out of range, or no k and t withstand that many dropouts and colluders.
        """
        return parameters(n, tolerated(n, self.dropouts), assumed(n, self.colluders))


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
    # Hoeffding: the mass above `start` is less than exp(-30) of the tail; the factor 1 + 1e-9 below covers it.
    start = min(marked, k, math.ceil(k * marked / n + math.sqrt(k * (30 - log_tail) / 2)))
    point = math.exp(_log_choose(marked, start) + _log_choose(n - marked, k - start) - _log_choose(n, k))
    total, tail = 0.0, math.exp(log_tail)
    for x in range(start, 0, -1):
        total += point
        if total * (1 + 1e-9) >= tail:  # conservative: the factor can only raise x
            return x
        point *= x * (n - marked - k + x) / ((marked - x + 1) * (k - x + 1))
    return 0


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
