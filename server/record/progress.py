"""The events of a run, which a display, a log or a test can observe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cloister.protocol.plan.plan import Plan


@dataclass(frozen=True)
class Event:
    """Something that has happened in a run."""


@dataclass(frozen=True)
class Preparing(Event):
    """A slow preparation runs before the first round."""

    what: str


@dataclass(frozen=True)
class Warned(Event):
    """Something that a person should change, or should know before the result is used."""

    text: str


@dataclass(frozen=True)
class Connected(Event):
    """In a deployment, other sites than before are connected."""

    sites: tuple[str, ...]
    missing: Mapping[str, str]
    """The sites that are not, each with what is known of the reason."""


@dataclass(frozen=True)
class Moved(Event):
    """In a deployment, bytes of vectors have moved."""

    sent: Mapping[str, int]
    """By site, bytes that it was sent so far."""
    received: Mapping[str, int]
    """By site, bytes that it has uploaded so far."""


@dataclass(frozen=True)
class NotJoined(Event):
    """A site does not take part, unless it joins later."""

    site: str
    """The name that it gives itself; `node` and a number where it gives none, or that of another site."""
    reason: str


@dataclass(frozen=True)
class Started(Event):
    """The sites have joined."""

    plan: Plan
    sites: tuple[str, ...]
    parameters: int
    """Trained parameters."""
    done: int
    """Number of rounds that an earlier process finished."""


@dataclass(frozen=True)
class RoundStarted(Event):
    """An attempt at a round, or at the evaluation of its model, begins."""

    round: int
    attempt: int
    purpose: str
    """`train` or `evaluate`."""
    cohort: tuple[str, ...]
    updates: int | None = None
    """Updates that end the round; None with `cohort.mode = "sync"`, where each site of the cohort sends one."""
    group: int = 0
    """With `aggregation.groups` the group whose sum it is, from 1; `cohort` has its sites. Otherwise 0."""

    def beside(self, other: RoundStarted | None) -> bool:
        """Whether it is an attempt at the sum of a group, and so is another, in the same round: both go on together."""
        return (
            other is not None
            and min(self.group, other.group) > 0
            and (self.round, self.purpose) == (other.round, other.purpose)
        )


@dataclass(frozen=True)
class SiteAnswered(Event):
    """A site's contribution has been added to the sum."""

    round: int
    site: str


@dataclass(frozen=True)
class SiteFailed(Event):
    """A site is a dropout of this attempt."""

    round: int
    site: str
    reason: str


@dataclass(frozen=True)
class Traced(Event):
    """A round is summed in groups, because a site has lied in a sum of which nothing says which site it was."""

    round: int
    groups: int
    spoiled: int
    """Sums that no honest sites can have, without those that a site explains that is left out."""
    common: tuple[str, ...]
    """Sites that are in all of them, sorted; none: more than one site has lied."""


@dataclass(frozen=True)
class AttemptFailed(Event):
    """An attempt ended with too few sites, and no sum was opened."""

    round: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class Evaluated(Event):
    """The model after a round (0: the initial model) was evaluated on held-out records."""

    round: int
    figures: Mapping[str, Any]
    """By name (`lm/measures/figures.py`), and the confusion matrix of classes or choices."""


@dataclass(frozen=True)
class NotEvaluated(Event):
    """Every attempt to evaluate the model after a round failed; training continues."""

    round: int
    attempts: int
    spoiled: str = ""
    """The total that no honest sites can have, if a sum was opened: a site lied in its counters."""


@dataclass(frozen=True)
class RoundAbandoned(Event):
    """A round was abandoned, the model is unchanged: sites had answered, but too few were left to finish, or what was
    opened makes no mean."""

    round: int
    attempts: int
    params_sha256: str
    epsilon: float | None = None
    """As in `RoundDone`."""
    spoiled: str = ""
    """As in `NotEvaluated`."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """As in `RoundDone`."""
    opened: Sequence[int] = ()
    """As in `RoundDone`."""
    apart: bool = False
    """Whether that is because sites carry another history: no shares were asked for, and the next round uses nothing
    that is carried."""

    def facts(self) -> dict[str, Any]:
        """As `RoundDone.facts`."""
        return asdict(self)


@dataclass(frozen=True)
class Refusing(Event):
    """Too many sites refuse a round, by policy or budget, so the run ends with its current model."""

    round: int
    sites: tuple[str, ...]


@dataclass(frozen=True)
class BudgetSpent(Event):
    """The next round would exceed a budget: the run ends with its last model."""

    round: int
    """The round that was not started."""
    epsilon: float
    """Epsilon spent so far."""
    budget: float
    """The plan's budget, or the dataset's limit over all runs."""
    dataset: str = ""
    """Name of the dataset whose limit over all runs is meant; empty: the plan's budget is."""


@dataclass(frozen=True)
class Step(Event):
    """A step of something slow before the first round, or after the last."""

    what: str
    """What is done, in words."""
    done: int
    of: int


@dataclass(frozen=True)
class RoundDone(Event):
    """A round is done: its model is on disk and journaled."""

    round: int
    attempts: int
    sites: int
    """Sites whose updates are in the mean."""
    dropouts: int
    """Sites of the cohort whose updates are not; in an asynchronous round only those that failed in it."""
    seconds: float
    """From the first request of the attempt that counted to the decoded mean."""
    update_norm: float
    """L2 norm of the mean update."""
    params_sha256: str
    """SHA-256 of the global model after the round."""
    epsilon: float | None = None
    """Largest epsilon of a site after the round, by the coordinator's ledger; None without a privacy unit."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`phases.py`) since this process wrote a line of metrics, before this round's checkpoint."""
    refused: str = ""
    """Why a feature refused the mean, so that the model is that of the round before; empty: none did. The sum was
    released and is charged."""
    opened: Sequence[int] = ()
    """The groups, from 1, whose sum was opened, also where it makes no mean; without groups there is one."""
    label: str = "token"
    """What a plan learns from: each `token`, or each `text` that is classified."""
    behind: bool | None = None
    """Where sites carry something into the next round, whether its histories may differ (`server.sum.wanted.Total`)."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What the plan's features tell of the round, by the names of their figures (`aggregation/features/`)."""

    def facts(self) -> dict[str, Any]:
        """The round as journal, checkpoint and metrics have it: its figures beside its other fields."""
        facts = asdict(self)
        figures: dict[str, Any] = facts.pop("figures")
        return facts | figures


@dataclass(frozen=True)
class Finished(Event):
    """The last round is done and the final model is on disk."""

    rounds: int
    epsilon: float | None = None
    """Largest epsilon of a site, by the coordinator's ledger; None without a privacy unit."""


Observer = Callable[[Event], None]
