"""A stream that adds no noise and keeps what noise would have been added to: exact sums, for tests of sensitivity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.privacy.mechanism.noise import NoiseStream


class Overheard(NoiseStream):
    """Draws batches and dropout as a real stream does; its children write into the same lists."""

    def __init__(self, key: bytes, *, declared: bool = False) -> None:
        super().__init__(key, declared=declared)
        self.sums: list[npt.NDArray[np.float64]] = []
        self.sigmas: list[float] = []

    def child(self, purpose: str) -> Overheard:
        made = super().child(purpose)
        made.sums, made.sigmas = self.sums, self.sigmas
        return made

    def add_gaussian(self, vector: Any, sigma: float, offset: int = 0, *, threads: int = 1) -> None:
        self.sums.append(vector.astype(np.float64))
        self.sigmas.append(sigma)

    def gaussian(self, into: Any, sigma: float, offset: int = 0, *, threads: int = 1) -> npt.NDArray[Any]:
        self.sigmas.append(sigma)
        return np.zeros(into)

    def skellam(
        self, size: int, variance: float, offset: int = 0, *, threads: int = 1
    ) -> npt.NDArray[np.int64]:
        self.sigmas.append(math.sqrt(variance))
        return np.zeros(size, np.int64)
