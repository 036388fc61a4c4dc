"""Every message of a run, as a frozen dataclass; `records.py` carries them through Flower.

A request goes from the coordinator to one site, a reply comes back. Vectors are flat and one-dimensional; their layout
is defined by the plan's model (`lm/layout.py`) and `aggregation/sums.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Join:
    """Asks a site to check the plan and get ready: load the model's layout and its data."""

    plan: str
    """The plan, as canonical JSON."""
    run: str
    """Identity of the run, drawn at random when it began."""
    base_hash: str = ""
    """Hash of `base`, in hex; empty where there is none."""
    base: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """The frozen parameters, where public training has made others than the plan gives; otherwise no element."""


@dataclass(frozen=True)
class Agree:
    """Carries one step of the secure sum to a site: 1 advertise, 2 share, 4 confirm or 5 unmask.

    The step's own message is different for each site and travels beside this one, as `private` bytes.
    """

    plan: str
    """The plan, as canonical JSON."""
    run: str
    """Identity of the run, drawn at random when it began."""
    purpose: str
    """`train` or `evaluate`: what the sum is of."""
    step: int
    """Step of the secure sum."""
    round: int
    """Round, from 1; in an evaluation the round whose model it is, from 0."""
    tries: int
    """Attempts at this sum that have failed, plus one."""
    base: str = ""
    """As in `Train`."""


@dataclass(frozen=True)
class Agreed:
    """A site's part of one step of the secure sum."""

    site: str
    """The site's name."""
    body: bytes
    """The step's own message."""


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
    tries: int
    """Attempts at this round that have failed, plus one."""
    run: str
    """Identity of the run."""
    model_hash: str
    """Hash of `model`, in hex (`digest.py`)."""
    model: npt.NDArray[np.float32]
    """The global model's trained parameters."""
    base: str = ""
    """Hash of the frozen parameters that go with it (`Join.base`), in hex; empty: those that the plan gives."""
    clip: float = 0.0
    """Clipping norm of the round, where the unit of privacy is the site; otherwise 0."""


@dataclass(frozen=True)
class Evaluate:
    """Asks a site for held-out sums of a model."""

    plan: str
    """The plan, as canonical JSON."""
    round: int
    """Round whose model this is; 0 is the initial model."""
    tries: int
    """Attempts at this evaluation that have failed, plus one."""
    run: str
    """Identity of the run."""
    model_hash: str
    """Hash of `model`, in hex (`digest.py`)."""
    model: npt.NDArray[np.float32]
    """The global model's trained parameters."""
    base: str = ""
    """As in `Train`."""


@dataclass(frozen=True)
class Contribution:
    """A site's part of a sum: ring integers (`aggregation/average.py` says of what)."""

    site: str
    """The site's name."""
    round: int
    """Round it belongs to."""
    model_hash: str
    """The model it was computed from."""
    statement: bytes
    """Under the secure sum the site's signed statement of the masked vector's digest, else empty."""
    vector: npt.NDArray[np.unsignedinteger[Any]]
    """Ring integers of the plan's width; under the secure sum they are masked."""


@dataclass(frozen=True)
class Refused:
    """A site's policy or budget forbids what it was asked."""

    site: str
    """The site's name."""
    statement: bytes
    """Its signed `privacy.policy.Refusal`; where it has no identity, the reason alone, in UTF-8."""


@dataclass(frozen=True)
class Failure:
    """A site did not do what it was asked."""

    site: str
    """The site's name."""
    reason: str
    """One line that says why."""
    refused: bool = False
    """Whether it said so itself, by its policy or its budget: asking again is of no use."""


Request = Join | Agree | Train | Evaluate
Reply = Joined | Agreed | Contribution | Refused
