"""Correlated noise over the rounds of a run: later rounds cancel a part of the noise of earlier ones.

Let row t of G be the sum of the sites' clipped updates in round t of n. The run releases, row by row,

    G + C^-1 Z = C^-1 (C G + Z),        the elements of Z independent, from N(0, (z sens(C))^2),

which is post-processing of one Gaussian mechanism of noise multiplier z on C G. That holds for rounds that depend on
what earlier ones released, too, because C is lower triangular (Denisov et al. 2022, "Improved differential privacy for
SGD via optimal private linear operators on adaptive streams", Theorem 2.1). A round whose row is never released costs
nothing. A model is a prefix sum of updates; its noise after round t is row t of A C^-1 Z, where A sums prefixes, and a
good C makes it small.

C is a buffered linear Toeplitz matrix (BLT; Dvijotham et al. 2024, "Efficient and near-optimal noise generation for
streaming differential privacy"; McMahan et al. 2024, "A hassle-free algorithm for private learning in practice"):

    C[t, s] = c_(t-s),      c_0 = 1,      c_u = sum_j omega_j theta_j^(u-1),

so that C^-1 Z takes one buffer of the model's size for each theta (their Algorithm 3). The inverse of a BLT is a BLT:
the generating functions are C(x) = prod_j (1 - theta'_j x) / (1 - theta_j x) and its reciprocal, so a pair of decays
(theta, theta') determines both, and partial fractions give omega (Dvijotham et al. 2024, Lemma 5.2). If they interlace,
1 >= theta_1 > theta'_1 > theta_2 > ... > theta'_d > 0, then every omega is positive and sum_j omega_j = sum_j (theta_j
- theta'_j) < 1, so that the coefficients of C are positive and do not increase.

Sensitivity: a site takes part in at most k rounds, any two of them at least b apart, with its vectors or with zeros.
In each of its rounds G changes by a vector of norm at most 1. Columns of C have inner products that are not negative,
so the worst vectors are equal; and where the coefficients do not increase either, the worst rounds are the first that
the pattern allows (Kalinin and Lampert 2024, "Banded square root matrix factorization for differentially private model
training", Theorem 2):

    sens(C) = || sum over j < k of column j b of C ||.

Loss: sens(C) times the root of the largest variance of a prefix sum, for Z of variance 1. The last prefix has the
largest: sum over t of e_t^2, where e are the prefix sums of the coefficients of C^-1. Without correlation (C = I) the
loss is sqrt(n k). jax-privacy minimises its square, with `error = "max"`.

Refused: banded matrices, whose noise needs as many buffers as a site's separation; and the noise of the sites instead
of a coordinator's, which a dropout would take along, so that later rounds would cancel what was never added.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.privacy.mechanism.noise import NoiseStream, add_steps
from cloister.protocol.errors import AccountingError
from cloister.protocol.messages.blocks import cut

Coefficients = npt.NDArray[np.float64]

_ENOUGH = 0.01
"""Another buffer is taken if it lowers the square of the loss by at least this part, as in jax-privacy."""
_LEAST, _LARGEST = -18.0, 3.0
"""Bounds on the logarithms of the gaps between rates: equal rates have no partial fractions."""
_STEP = 1e-30
"""Imaginary step of the derivative."""


@dataclass(frozen=True)
class Blt:
    """A BLT and its inverse.

    Raises:
        AccountingError: the decays do not interlace.
    """

    decay: tuple[float, ...] = ()
    """theta of C, decreasing; empty: the identity, which correlates nothing."""
    inverse_decay: tuple[float, ...] = ()
    """theta' of C^-1, decreasing."""

    def __post_init__(self) -> None:
        ordered = [*itertools.chain.from_iterable(zip(self.decay, self.inverse_decay, strict=False)), 0.0]
        falls = all(high > low for high, low in itertools.pairwise(ordered))
        if len(self.decay) != len(self.inverse_decay) or not falls or ordered[0] > 1:
            raise AccountingError(
                "decay",
                (self.decay, self.inverse_decay),
                expected="1 >= theta_1 > theta'_1 > theta_2 > ... > 0",
            )

    @property
    def scale(self) -> tuple[float, ...]:
        """omega of C."""
        return tuple(_scale(_column(self.decay), _column(self.inverse_decay))[:, 0].tolist())

    def coefficients(self, rounds: int) -> Coefficients:
        """The first column of C: shape (rounds,), float64, positive and not increasing."""
        return _coefficients(_column(self.decay), _column(self.inverse_decay), rounds)[:, 0]

    def inverse_coefficients(self, rounds: int) -> Coefficients:
        """The first column of C^-1: shape (rounds,), float64."""
        return _coefficients(_column(self.inverse_decay), _column(self.decay), rounds)[:, 0]


@dataclass(frozen=True)
class Participation:
    """How often a site takes part in a run."""

    rounds: int
    """n: rounds of the run."""
    separation: int
    """b: least distance of two rounds with one site; 1: they may follow each other."""
    most: int
    """k: most rounds with one site."""

    @property
    def effective(self) -> int:
        """The most rounds with one site for which the run has room."""
        return min(self.most, -(-self.rounds // self.separation))


def sensitivity(blt: Blt, pattern: Participation) -> float:
    """sens(C) of the module's docstring: largest L2 norm of the change of C G by one site whose updates have norm 1.

    It is rounded up by far more than the error of float64.
    """
    return math.sqrt(float(_squared_sensitivity(blt.coefficients(pattern.rounds)[:, None], pattern)[0])) * (
        1 + 1e-9
    )


def loss(blt: Blt, pattern: Participation) -> float:
    """The loss of the module's docstring: the largest standard deviation of a prefix sum's noise, for z = 1.

    In units of the clipping norm; the variance is that of the noise on sums over sites, not on means.
    """
    prefixes = np.cumsum(blt.inverse_coefficients(pattern.rounds))
    return sensitivity(blt, pattern) * math.sqrt(float(prefixes @ prefixes))


@functools.lru_cache(maxsize=64)
def optimal(pattern: Participation, most_buffers: int) -> Blt:
    """A BLT of small loss, with as few of `most_buffers` buffers as are worth it.

    Deterministic on one machine. Other machines may find decays that differ in their last digits, so a run keeps those
    that it began with.
    """
    best = Blt()
    for buffers in range(1, most_buffers + 1):
        found = _optimise(pattern, buffers)
        if found is None or loss(found, pattern) ** 2 * (1 + _ENOUGH) > loss(best, pattern) ** 2:
            break
        best = found
    return best


class CorrelatedNoise:
    """The noise of all rounds of a run: the rows of C^-1 Z, each a function of the stream and the round's number.

    So a round that is repeated gets the same noise, a process that begins in a later round computes what came before,
    and only the stream's key has to be durable. Rows that are not asked for, those of abandoned rounds, are passed
    over.

    It holds one float64 vector of the model's size for each buffer. Beginning at round r computes r rows.

    Args:
        blt: C.
        stream: A stream that nothing else uses.
        size: d, elements of a row.
    """

    def __init__(self, blt: Blt, stream: NoiseStream, size: int) -> None:
        self._scale = np.array(blt.scale)
        self._decay = np.array(blt.decay)[:, None]
        self._stream = stream
        self._buffers = np.zeros((len(blt.decay), size))
        self._next = 1

    def row(self, number: int) -> CorrelatedRow:
        """The noise of round `number`, from 1."""
        return CorrelatedRow(self, number)

    def add(self, total: npt.NDArray[np.integer[Any]], sigma: float, number: int) -> None:
        """Add `sigma` times row `number` of C^-1 Z, for Z of variance 1, to ring integers in place, in whole steps.

        Args:
            total: Shape (d,), integers modulo 2^b.
            sigma: Positive, in steps.
            number: The round, from 1.

        Raises:
            ValueError: the vector has another length, or there is no such round.
        """
        if total.shape != self._buffers.shape[1:] or number < 1:
            raise ValueError(
                f"row {number} for {total.shape}: expected round 1 or later and {self._buffers.shape[1:]}"
            )
        if number < self._next:
            self._buffers[:] = 0
            self._next = 1
        while self._next <= number:
            self._advance(total if self._next == number else None, sigma)

    def _advance(self, total: npt.NDArray[np.integer[Any]] | None, sigma: float) -> None:
        # C W = Z, solved row by row: w_t = z_t - sum_j omega_j S_j, S_j = sum over s < t of theta_j^(t-1-s) w_s.
        stream = self._stream.child(f"round-{self._next}")
        for begin, end, _, _ in cut(0, self._buffers.shape[1]):
            buffers = self._buffers[:, begin:end]
            row = stream.gaussian(end - begin, 1.0, begin)
            row -= self._scale @ buffers
            buffers *= self._decay
            buffers += row
            if total is not None:
                add_steps(total[begin:end], sigma * row)
        self._next += 1


@dataclass(frozen=True)
class CorrelatedRow:
    """The noise of one round."""

    noise: CorrelatedNoise
    number: int
    """The round, from 1."""

    def add_to(self, total: npt.NDArray[np.integer[Any]], sigma: float) -> None:
        """As `CorrelatedNoise.add`, for this round."""
        self.noise.add(total, sigma, self.number)


# Optimisation. The rates -log theta and -log theta' interlace if their gaps are positive, so the logarithms of the gaps
# are free within bounds. Arrays have a last axis of one column for each candidate.


def _optimise(pattern: Participation, buffers: int) -> Blt | None:
    from scipy.optimize import minimize

    rates = np.exp(np.linspace(-math.log(pattern.rounds), math.log(3), 2 * buffers))
    found = minimize(
        _value_and_gradient,
        np.log(np.diff(rates, prepend=0)),
        args=(pattern,),
        method="L-BFGS-B",
        jac=True,
        bounds=[(_LEAST, _LARGEST)] * (2 * buffers),
        options={"maxiter": 1000, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-7},
    )
    decays = np.exp(-np.cumsum(np.exp(found.x))).tolist()
    try:
        return Blt(tuple(decays[::2]), tuple(decays[1::2]))
    except AccountingError:  # two decays are the same float: no use for so many buffers
        return None


def _value_and_gradient(gaps: Coefficients, pattern: Participation) -> tuple[float, Coefficients]:
    """Logarithm of the loss, and its gradient by complex steps (Squire and Trapp 1998), which is exact to rounding."""
    stepped = gaps[:, None] + 1j * _STEP * np.eye(gaps.size)
    decays = np.exp(-np.cumsum(np.exp(stepped), axis=0))
    decay, inverse = decays[::2], decays[1::2]
    squared = _squared_sensitivity(_coefficients(decay, inverse, pattern.rounds), pattern)
    prefixes = np.cumsum(_coefficients(inverse, decay, pattern.rounds), axis=0)
    value = np.log(squared * np.sum(prefixes * prefixes, axis=0)) / 2
    return float(value[0].real), value.imag / _STEP


def _column(decays: tuple[float, ...]) -> Coefficients:
    return np.array(decays, np.float64)[:, None]


def _scale(decay: npt.NDArray[Any], inverse: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """omega_i = prod_j (theta_i - theta'_j) / prod over j != i of (theta_i - theta_j), shape (d, m)."""
    apart = decay[:, None] - decay[None]
    apart[np.arange(len(decay)), np.arange(len(decay))] = 1
    result: npt.NDArray[Any] = np.prod(decay[:, None] - inverse[None], axis=1) / np.prod(apart, axis=1)
    return result


def _coefficients(decay: npt.NDArray[Any], inverse: npt.NDArray[Any], rounds: int) -> npt.NDArray[Any]:
    """The coefficients of BLTs with these decays, shape (rounds, m)."""
    result = np.zeros((rounds, decay.shape[1]), np.result_type(decay, np.float64))
    result[0] = 1
    powers = np.arange(rounds - 1)[:, None]
    for scale, rate in zip(_scale(decay, inverse), np.log(decay), strict=True):
        result[1:] += scale * np.exp(rate * powers)
    return result


def _squared_sensitivity(coefficients: npt.NDArray[Any], pattern: Participation) -> npt.NDArray[Any]:
    """Squared norm of the sum of k columns that are b apart, shape (m,): c_t + c_(t-b) + ... + c_(t-(k-1)b) at t."""
    rounds, b, k = pattern.rounds, pattern.separation, pattern.effective
    periods = -(-rounds // b)
    folded = np.zeros((periods, b, coefficients.shape[1]), coefficients.dtype)
    folded.reshape(periods * b, -1)[:rounds] = coefficients
    summed = np.cumsum(folded, axis=0)
    summed[k:] -= summed[:-k].copy()
    column = summed.reshape(periods * b, -1)[:rounds]
    result: npt.NDArray[Any] = np.sum(column * column, axis=0)
    return result
