"""Every message of a run, as a frozen dataclass; `records.py` carries them through Flower.

A request goes from the coordinator to one site, a reply comes back. Vectors are flat and one-dimensional; their layout
is defined by the plan's model (`lm/layout.py`) and `aggregation/average.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Join:
    """Asks a site to check the plan and get ready: load the model's layout and its data."""

    plan: str
    """The plan, as canonical JSON."""


@dataclass(frozen=True)
class Joined:
    """A site is ready."""

    site: str
    """The site's name."""
    parameters: int
    """Number of trained parameters, as the site counts them."""


@dataclass(frozen=True)
class Train:
    """Asks a site for its update of the round."""

    plan: str
    """The plan, as canonical JSON."""
    round: int
    """Round, from 1."""
    attempt: int
    """Attempt at that round, from 1."""
    model_hash: str
    """SHA-256, in hex, of `model`'s bytes."""
    model: npt.NDArray[np.float32]
    """The global model's trained parameters."""


@dataclass(frozen=True)
class Evaluate:
    """Asks a site for held-out sums of a model."""

    plan: str
    """The plan, as canonical JSON."""
    round: int
    """Round whose model this is; 0 is the initial model."""
    model_hash: str
    """SHA-256, in hex, of `model`'s bytes."""
    model: npt.NDArray[np.float32]
    """The global model's trained parameters."""


@dataclass(frozen=True)
class Contribution:
    """A site's part of a sum: ring integers (`aggregation/average.py` says of what)."""

    site: str
    """The site's name."""
    round: int
    """Round it belongs to."""
    model_hash: str
    """The model it was computed from."""
    vector: npt.NDArray[np.unsignedinteger[Any]]
    """Ring integers of the plan's width."""


@dataclass(frozen=True)
class Failure:
    """A site did not do what it was asked."""

    site: str
    """The site's name."""
    reason: str
    """One line that says why."""


Request = Join | Train | Evaluate
Reply = Joined | Contribution
