"""The privacy report of a run as data: its parts, what it may claim, and what an epsilon means.

A guarantee is claimed only if nothing in the report contradicts it: `verdict` looks for a ledger that does not verify,
noise that can be recomputed, a loss above the claim, an audit that refutes the claim, and an epsilon or a delta so
large that the guarantee would be true but without practical protection. `privacy/report/page.py` shows the report;
`server/record/report.py` gathers it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from cloister.privacy.report.figures import at_least, at_most, rounded, scientific
from cloister.protocol.errors import CloisterError

LARGEST_EPSILON = 10.0
"""No guarantee is claimed above it: a fair coin could be guessed in more than 99.99 of 100 cases (`meaning`)."""
UNCLAIMED_DELTA = 1e-2
"""No guarantee is claimed from it on: delta is, roughly, the probability that the bound fails."""
MOST_FIGURES = 60
"""Figures of an answer that are shown."""
_TRUSTING = ", against those who know the noise of no more sites than the plan of each question assumes"

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class _Strict:
    """A part of a report, of which every field is read as it is declared."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class RoundRow(_Strict):
    """A finished round, or one that was given up and released nothing."""

    round: Count
    """Its number, from 1."""
    epsilon: NonNegative | None
    """Epsilon after it, the largest of the sites'; None without a guarantee."""
    loss: float | None
    """Held-out loss after it, nats per token; None if it was not evaluated."""
    sites: Count
    """Sites whose updates are in its sum; 0 for a round that was given up."""


@dataclass(frozen=True)
class SiteRow(_Strict):
    """What one site did in the run."""

    name: str
    """The site's name."""
    rounds: Count
    """Rounds in whose sum its update is."""
    epsilon: NonNegative | None
    """Epsilon of this run for the units of this site; None without a guarantee."""
    notes: str = ""
    """What it refused or did not finish, as sentences."""


@dataclass(frozen=True)
class SecureSum(_Strict):
    """The secure sum of a round with the whole cohort."""

    sites: Count
    """n: sites in a cohort, or in a group of it."""
    neighbours: Count
    """k: sites with which each site shares masks."""
    threshold: Count
    """t: neighbours whose shares open a site's mask."""
    dropouts: Count
    """Sites that may drop out without ending an attempt: the others are the quorum."""
    colluders: Count
    """Sites that may collude with the coordinator without learning more than the sum of the others."""
    ring_bits: Count
    """Updates are summed modulo 2^ring_bits."""
    honest: Count
    """The fewest updates of honest sites in a sum that is opened, whichever sites drop out."""
    parts: bool = False
    """Whether a coordinator that chooses the dropouts may open sums of several parts of a cohort."""
    groups: Count = 1
    """Groups of a round, each with a sum of its own; the other figures are those of the smallest."""
    sketches: bool = False
    """Whether each site sends the coordinator a sketch of its own update."""
    trace_groups: Count = 1
    """Groups in which rounds are summed after a sum that no honest sites can have; of the other figures the least
    honest updates are those of the smallest of them, and so are the dropouts."""


@dataclass(frozen=True)
class LedgerRow(_Strict):
    """One charge."""

    number: Count
    """Its place in the ledger."""
    written: str
    """When it was written, ISO 8601."""
    site: str
    """The site whose units it charges."""
    event: str
    """What was charged, in words."""
    epsilon: NonNegative | None
    """Epsilon of this run for the site's units after it; None if the row is not a charge."""
    hash: str
    """Its hash, in hex; it covers the hash of the previous row."""


@dataclass(frozen=True)
class Ledger(_Strict):
    """The list of charges, and whether its hash chain verifies."""

    rows: tuple[LedgerRow, ...]
    """Every charge of the run, in order."""
    head: str
    """Hash of the last row, in hex. A copy of it kept elsewhere shows whether the ledger was changed later."""
    verified: bool
    """Whether the hash chain verifies from the first row to the head and agrees with the plan and the journal."""
    problem: str = ""
    """Why it does not verify; empty if it does."""


@dataclass(frozen=True)
class FigureRow(_Strict):
    """A figure of the answer to a question."""

    name: str
    """What it is."""
    value: float | None
    """The figure; None where the noise hides it."""
    noise: NonNegative | None
    """Standard deviation by the noise; None without a value."""
    sampling: NonNegative | None
    """Standard deviation by the choice of the units, at most; None: it has none, or none is known."""
    public: float | None = None
    """The same of the public records of the plan, without noise; None without it."""
    drawn: bool = False
    """Whether a plot compares it with others."""


@dataclass(frozen=True)
class AnswerRow(_Strict):
    """The answer to a question."""

    sites: Count
    """Sites in the sum."""
    figures: tuple[FigureRow, ...]
    """Its figures, at most `MOST_FIGURES` of them."""
    more: Count = 0
    """Number of the others, which are in `answer.json`."""


@dataclass(frozen=True)
class CostRow(_Strict):
    """What some releases cost."""

    epsilon: NonNegative | None
    """Epsilon of all of them together; None if it is not finite."""
    delta: NonNegative
    """The delta for which it holds."""


@dataclass(frozen=True)
class QuestionsRow(_Strict):
    """What questions make of the cost of a run, or of all runs (`privacy/accounting/trust.py`)."""

    questions: CostRow
    """The questions alone; it trusts the same parties as the epsilon of all together."""
    rest: CostRow | None
    """All else alone; None: there is nothing else."""
    against_all: CostRow | None
    """All together against the coordinator and all other sites together; None: there is no figure."""
    why_not: str = ""
    """Why there is no figure; empty if there is."""


@dataclass(frozen=True)
class DatasetRow(_Strict):
    """What the run's dataset has spent over all runs that charged it in one ledger (`privacy/ledger/dataset.py`)."""

    name: str
    """The dataset's name in the ledger."""
    ledger: str
    """The ledger's file."""
    runs: Count
    """Runs that charged the dataset, with this one."""
    epsilon: NonNegative | None
    """Epsilon of all these runs together; None if it is not finite or not known."""
    delta: NonNegative
    """The delta for which it holds: the report's, or twice that if the mechanisms of runs differ."""
    limit: Positive | None
    """Epsilon that may be spent over all runs; None without a limit."""
    head: str
    """Head of the ledger, in hex."""
    problem: str = ""
    """Why nothing is known of the other runs; empty if it is."""
    asked: QuestionsRow | None = None
    """What questions among these runs make of `epsilon`; None: no run is a question."""


@dataclass(frozen=True)
class GroupRow(_Strict):
    """What holds for several units together, such as several records of one person."""

    units: Annotated[int, Field(ge=1)]
    """How many."""
    epsilon: NonNegative | None
    """Epsilon for all of them together, at the report's delta; None above `LARGEST_EPSILON`."""


@dataclass(frozen=True)
class AuditRow(_Strict):
    """What an audit with canaries found (`cloister.privacy.audit.lower_bounds`)."""

    canaries: Count
    """Canaries, each included by a fair coin."""
    guesses: Count
    """Coins that were guessed."""
    correct: Count
    """Guesses that were right."""
    confidence: Annotated[float, Field(gt=0, lt=1)]
    """Probability with which the bound is true."""
    epsilon: NonNegative
    """Lower bound on epsilon, at the report's delta."""
    claimed: NonNegative | None = None
    """Epsilon that is claimed for what was played, which may be less than the run; None: the epsilon of the run."""
    what: str = ""
    """What was played, in words."""
    refuting: NonNegative | None = None
    """The bound at the confidence of an alarm, which alone refutes a claim; None: `epsilon` does."""
    problem: str = ""
    """What was released and not charged, in words; empty if what was released fits the charge."""

    def refutes(self, epsilon: float) -> bool:
        """Whether the guesses refute a claim of `epsilon`, or of what was played."""
        bound = self.epsilon if self.refuting is None else self.refuting
        return bound > (epsilon if self.claimed is None else min(epsilon, self.claimed))


@dataclass(frozen=True)
class RunReport(_Strict):
    """Everything that the page shows.

    Raises:
        CloisterError: a claim is incomplete, or smaller than what a round or a site spent.
    """

    run: str
    """Name of the run."""
    run_id: str
    """The run's identifier."""
    created: str
    """When the report was made, ISO 8601."""
    plan_digest: str
    """SHA-256 of the plan, in hex."""
    plan: str
    """The plan, as TOML or JSON."""
    roster_hash: str | None
    """Hash of the roster of the sites' keys, in hex; None if there is no roster."""
    versions: dict[str, str]
    """Versions of the software, by name."""

    unit: Literal["none", "record", "owner", "site"]
    """What the guarantee protects."""
    unit_in_words: str
    """The unit in the data's own words, with its article: `one discharge letter (one line of a site's JSONL)`."""
    relation: str
    """How neighbouring data sets differ: `adding or removing one such letter`."""
    mechanism: str
    """What adds noise to what, in words."""
    method: str
    """How it is computed: how per-record gradients are taken, or who adds the noise."""
    clip: Positive | None
    """Clipping norm C (L2)."""
    noise_multiplier: NonNegative | None
    """Standard deviation of the noise over C."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None
    """Probability with which a unit is in a step's batch; None if nothing is sampled in secret."""
    accountant: str
    """How losses are composed."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None
    """Delta of the claim."""
    epsilon: NonNegative | None
    """Epsilon of the claim: the largest over the sites. None if no finite epsilon can be claimed."""
    budget: Positive | None
    """Epsilon that may be spent; None without a limit."""
    stopped_by_budget: bool
    """Whether the run ended because the next round would have exceeded the budget, or the dataset's limit."""
    declared_noise: bool
    """Whether the noise was drawn from a declared seed, as in a repeatable simulation."""

    rounds: tuple[RoundRow, ...]
    """The rounds that are done, in order."""
    sites: tuple[SiteRow, ...]
    """The sites that are known, which may be fewer than those of the plan."""
    assumptions: tuple[str, ...]
    """What must be true for the guarantee to hold: sampling, honest survivors, arithmetic."""
    trusted: tuple[str, ...]
    """Who is trusted, and with what."""
    not_covered: tuple[str, ...]
    """What the guarantee says nothing about."""
    secure: SecureSum | None
    """The secure sum; None if the coordinator saw every update."""
    ledger: Ledger
    """The charges."""
    audit: AuditRow | None = None
    """The audit; None if there was none."""
    dataset: DatasetRow | None = None
    """All runs on the dataset; None if no ledger counts them: then epsilon is that of this run alone."""
    units: str = ""
    """Several units in the data's own words: `discharge letters`."""
    groups: tuple[GroupRow, ...] = ()
    """What holds for several units together, by their number; none without a finite epsilon."""
    trust_model: str = ""
    """Where the noise is added, and so who sees what before it."""
    protected_from: str = ""
    """Against whom the guarantee holds, in plain words."""
    responsible: tuple[str, ...] = ()
    """Who is responsible for what, in plain words."""
    exposure: str = ""
    """How exposed the data is before anything is released."""
    protected: Count | None = None
    """About how many units all sites have together, as the plan states it in public; None: it does not."""
    released: Literal["models", "models and evaluations", "answer"] = "models"
    """What was given out."""
    label: str = "token"
    """What a loss is per: a `token`, or a `text` that is classified."""
    allowed: NonNegative | None = None
    """Largest epsilon of a site that the plan allows in the run (`Terms.allowed`); None: it is not known, or not
    finite."""
    answer: AnswerRow | None = None
    """The answer to a question; None: the run trains, or has no answer yet."""
    asked: QuestionsRow | None = None
    """What a question, or evaluations by the sites, make of `epsilon`; None: the run has neither."""
    federation: Count = 0
    """Sites of the plan; 0: as many as are known."""
    format: Literal[1] = 1
    """Version of this form."""

    @property
    def members(self) -> int:
        """Sites of the plan, also those that were never asked."""
        return max(len(self.sites), self.federation)

    def __post_init__(self) -> None:
        """Refuse a report that contradicts itself."""
        if self.unit != "none":
            for name in ("unit_in_words", "relation", "mechanism", "accountant"):
                if not getattr(self, name).strip():
                    raise CloisterError(name, getattr(self, name), expected=f"words, with unit {self.unit!r}")
            if self.epsilon is not None and self.delta is None:
                raise CloisterError("delta", None, expected="a delta, because an epsilon is claimed")
        elif self.epsilon is not None:
            raise CloisterError("epsilon", self.epsilon, expected="none, because unit is 'none'")
        for what, spent in [
            *((f"round {row.round}", row.epsilon) for row in self.rounds),
            *((f"site {row.name}", row.epsilon) for row in self.sites),
        ]:
            if spent is not None and self.epsilon is not None and spent > self.epsilon:
                raise CloisterError("epsilon", self.epsilon, expected=f"at least the {spent} of {what}")
        known = [math.inf if row.epsilon is None else row.epsilon for row in self.groups]
        if known != sorted(known) or (self.groups and self.epsilon is not None and known[0] < self.epsilon):
            raise CloisterError("groups", known, expected="epsilons that rise from that of the report")
        over = None if self.dataset is None else self.dataset.epsilon
        if over is not None and self.epsilon is not None and over < self.epsilon:
            raise CloisterError(
                "dataset.epsilon",
                over,
                expected=f"at least the {self.epsilon} of this run, which is one of its runs",
            )
        _check_against_all("asked.against_all", self.asked, self.epsilon)
        if self.dataset is not None:
            _check_against_all("dataset.asked.against_all", self.dataset.asked, self.dataset.epsilon)


def _check_against_all(field: str, asked: QuestionsRow | None, epsilon: float | None) -> None:
    """Refuse a figure against all other parties that is smaller than that against some of them."""
    if asked is None or asked.against_all is None:
        return
    more, less = (math.inf if each is None else each for each in (asked.against_all.epsilon, epsilon))
    if more < less:
        raise CloisterError(field, more, expected=f"at least the {less} against some of them")


@dataclass(frozen=True)
class Verdict:
    """Whether the report claims a guarantee, and the one sentence that says so."""

    holds: bool
    """Whether a guarantee is claimed."""
    sentence: str
    """The guarantee, or that there is none and why."""


def verdict(report: RunReport) -> Verdict:
    """The guarantee in one sentence, or why there is none.

    A guarantee is claimed if all of these hold: there is a privacy unit, a finished round and a finite epsilon; the
    noise cannot be recomputed; the ledger verifies and holds charges; no row of the ledger is above the claim; no audit
    refutes the claim; epsilon is at most `LARGEST_EPSILON`; delta is below `UNCLAIMED_DELTA`; and with unit `site`
    delta is below 1 over the number of sites of the plan.
    """
    reason = _objection(report)
    if reason:
        return Verdict(False, reason)
    assert report.epsilon is not None
    assert report.delta is not None
    return Verdict(
        True,
        f"This run protects {report.unit_in_words}: {_released(report)} is "
        f"differentially private with epsilon {at_most(report.epsilon)} {_over_runs(report)} and delta "
        f"{scientific(report.delta)} between data sets that differ by {report.relation}, provided that every "
        "assumption on this page holds.",
    )


def _released(report: RunReport) -> str:
    """What the guarantee is about."""
    if report.released == "answer":
        return "the answer that it released, with all that was opened for it,"
    evaluated = " with all evaluations by its sites" if report.released == "models and evaluations" else ""
    return f"every model that it released over {_rounds(report.rounds)}{evaluated}"


def _over_runs(report: RunReport) -> str:
    """Which runs epsilon counts."""
    dataset = report.dataset
    if dataset is None:
        return "for this run alone"
    if dataset.problem:
        return f"for this run alone (what all runs on {dataset.name!r} cost together is not known)"
    runs = "1 run" if dataset.runs == 1 else f"{dataset.runs} runs"
    many = "without bound" if dataset.epsilon is None else at_most(dataset.epsilon)
    weak = "" if protects_together(report) else ", no protection to speak of"
    trusting = _TRUSTING if dataset.asked else ""
    together = f"{many} at delta {scientific(dataset.delta)}{weak or trusting}"
    return f"for this run (over the {runs} on {dataset.name!r} together it is {together})"


def protects_together(report: RunReport) -> bool:
    """Whether what all runs on the data cost together is a guarantee that would be claimed of one run."""
    found = report.dataset
    return found is not None and protects(report, CostRow(found.epsilon, found.delta))


def protects(report: RunReport, cost: CostRow) -> bool:
    """Whether a cost over runs is a guarantee that would be claimed of one run."""
    return cost.epsilon is not None and cost.epsilon <= LARGEST_EPSILON and not _published(report, cost.delta)


def _published(report: RunReport, delta: float) -> str:
    """What a run may publish and meet a delta, where that is too much; else empty."""
    if delta >= UNCLAIMED_DELTA:
        return "each unit with probability 1/100"
    if report.unit == "site" and report.members and delta >= 1 / report.members:
        return f"one of its {report.members:,} sites, drawn at random,"
    return ""


def _objection(report: RunReport) -> str:
    """Why no guarantee is claimed; empty if one is."""
    if report.unit == "none":
        return (
            "This run gives no privacy guarantee: no noise was added for privacy, and its models may repeat their "
            "training data."
        )
    if report.declared_noise:
        return (
            "No privacy guarantee holds for this run: its noise was drawn from a declared seed, and anyone who has the "
            "seed can recompute the noise and subtract it."
        )
    reason = _unclaimed(report)
    if reason:
        return f"No privacy guarantee is claimed for this run: {reason}."
    if report.epsilon is None:
        return (
            "No privacy guarantee holds for this run: no finite epsilon can be stated for what it released."
        )
    return ""


def _nothing(report: RunReport) -> str:
    return "answer" if report.released == "answer" else "model that was trained on the sites' data"


def _unclaimed(report: RunReport) -> str:
    """What keeps a guarantee from being claimed, though noise was added for it; empty if nothing does."""
    if not report.ledger.verified:
        return f"its ledger does not verify ({report.ledger.problem or 'no reason was recorded'})"
    if not any(row.sites for row in report.rounds):  # a round that was given up has no sites
        return f"it finished no round, so it released no {_nothing(report)}"
    if report.epsilon is None:
        return ""
    if not report.ledger.rows:
        return "its ledger holds no charge for what it released"
    return _contradiction(report, report.epsilon) or _weakness(report, report.epsilon)


def _contradiction(report: RunReport, epsilon: float) -> str:
    """A row of the ledger or an audit that contradicts a claim of `epsilon`; empty if there is none."""
    for row in report.ledger.rows:
        if row.epsilon is not None and row.epsilon > epsilon:
            above = f"above the {at_most(epsilon)} that would be claimed"
            return f"row {row.number} of the ledger has epsilon {at_most(row.epsilon)}, {above}"
    audit = report.audit
    if audit is None:
        return ""
    if audit.refutes(epsilon):
        bound = audit.epsilon if audit.refuting is None else audit.refuting
        claimed = epsilon if audit.claimed is None else min(epsilon, audit.claimed)
        return (
            f"an audit found that epsilon is above {at_least(bound)}, and {at_most(claimed)} would be claimed"
        )
    if audit.problem:
        return f"an audit found that what was released is not what was charged ({audit.problem})"
    return ""


def _weakness(report: RunReport, epsilon: float) -> str:
    """Why a guarantee of `epsilon` would be true but without practical protection; empty if it protects."""
    assert report.delta is not None
    if published := _published(report, report.delta):
        delta = scientific(report.delta)
        return f"its delta is {delta}, and a run that publishes {published} would meet that delta as well"
    if epsilon > LARGEST_EPSILON:
        return (
            f"its epsilon is {at_most(epsilon)}, and above {LARGEST_EPSILON:g} a guess of whether one unit was used "
            "can be right in more than 99.99 of 100 cases"
        )
    return ""


def _rounds(rows: Sequence[RoundRow]) -> str:
    numbers = [row.round for row in rows]
    if len(numbers) == 1:
        return f"round {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"rounds {numbers[0]} to {numbers[-1]}"
    return f"{len(numbers)} rounds from {numbers[0]} to {numbers[-1]}"


@dataclass(frozen=True)
class Meaning:
    """What an (epsilon, delta) allows, as numbers for readers; each is rounded up."""

    factor: str
    """e^epsilon: the largest ratio of an outcome's probabilities between neighbours, apart from delta."""
    guess: str
    """Largest probability, in per cent, of guessing from the outcome a fair coin that chose between two neighbours."""
    weak: bool
    """Whether `guess` is 99 or more: such an epsilon says little by itself."""


def meaning(epsilon: float, delta: float) -> Meaning:
    """What an (epsilon, delta) allows.

    With M (epsilon, delta)-DP and D, D' neighbours, P[M(D) in S] <= e^epsilon P[M(D') in S] + delta. A guess of the
    coin that chose between D and D' is right with probability (e^epsilon + delta) / (e^epsilon + 1) at most (Kairouz,
    Oh and Viswanath 2015, Theorem 2.1, at equal priors).
    """
    if epsilon > 700:  # exp overflows float64, and the number would mean nothing
        return Meaning("more than 10³⁰⁰", "100.0", True)
    factor = math.exp(epsilon)
    chance = (factor + delta) / (factor + 1)
    return Meaning(_factor(factor), str(rounded(100 * chance, 1, ROUND_CEILING)), chance >= 0.99)


def _factor(value: float) -> str:
    if value < 1e6:
        return f"{rounded(value, 2 if value < 100 else 0, ROUND_CEILING):,}"
    return scientific(value)


def to_json(report: RunReport) -> str:
    """The report as JSON, one value for each field."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
