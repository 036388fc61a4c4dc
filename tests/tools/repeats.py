"""Whether noise repeats itself: a vector against itself at every distance, by one Fourier transform."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.fft import irfft, rfft

_LEAST = 10_000
"""Products in a sum: so many that it is normal far into its tails."""


def repeats(vector: npt.NDArray[Any], wrong: float) -> int | None:
    """The distance at which a vector is most like itself; None if independent samples are as alike as that at some one
    with a probability above `wrong`.

    Args:
        vector: Shape (d,), samples of one law.
        wrong: The probability with which independent samples are said to repeat.
    """
    white = (vector - vector.mean()) / vector.std()
    spectrum = rfft(white, 2 * white.size)
    lags = np.arange(1, white.size - _LEAST)
    alike = np.abs(irfft(np.abs(spectrum) ** 2)[lags]) / np.sqrt(white.size - lags)
    most = int(alike.argmax())
    return int(lags[most]) if alike[most] > stats.norm.isf(wrong / 2 / lags.size) else None
