"""The vectors of units, as sites make them and add them up."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Vectors: TypeAlias = npt.NDArray[np.float64]
"""(K,): the vector of a record; (U, K): those of units."""


class Sparse(NamedTuple):
    """The vector of one unit by its cells that are not zero."""

    at: npt.NDArray[np.int64]
    """(n,): cells, increasing."""
    values: Vectors
    """(n,)."""
