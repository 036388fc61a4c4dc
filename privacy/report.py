"""The report that a data officer reads and signs: what a run claims about privacy, as JSON and as one page of HTML.

The page is a pure function of a `RunReport`, and says nothing that is not in it. It opens from disk without a network:
no script, font or image from anywhere else, plots drawn as SVG. The first thing on it is the guarantee in one sentence,
or that there is none. A sentence is claimed only where nothing in the report speaks against it: `verdict` looks for a
ledger that does not verify, noise that can be recomputed, a loss above the claim, an audit that refutes it, or an
epsilon or a delta so large that the sentence would be true and protect nobody.

Numbers are rounded to the side that claims less: epsilon and delta up, the noise multiplier and an audit's bound down.
Refused: a page that computes in the browser (a reader could not print and sign what a script shows), and a plotting
library (several megabytes for two lines).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from cloister.protocol.errors import CloisterError

if TYPE_CHECKING:
    import jinja2

LARGEST_EPSILON = 10.0
"""Above it nothing is claimed: a fair coin could be guessed in more than 99.99 of 100 cases (`meaning`)."""
UNCLAIMED_DELTA = 1e-2
"""From it on nothing is claimed: delta is, roughly, the chance that the bound fails."""

_PARTS = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class RoundRow:
    """A round that was done."""

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

    round: Count
    """Its number, from 1."""
    epsilon: NonNegative | None
    """Epsilon after it, the largest of the sites'; None without a guarantee."""
    loss: float | None
    """Held-out loss after it, nats per token; None where it was not evaluated."""
    sites: Count
    """Sites whose updates are in its sum."""


@dataclass(frozen=True)
class SiteRow:
    """What one site did in the run."""

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

    name: str
    """The site's name."""
    rounds: Count
    """Rounds that it took part in."""
    steps: Count
    """Local steps that it took, in abandoned rounds too."""
    epsilon: NonNegative | None
    """Epsilon of this run for the units of this site; None without a guarantee."""
    notes: str = ""
    """What it refused or did not finish, in words."""


@dataclass(frozen=True)
class SecureSum:
    """The secure sum of a round with the whole cohort."""

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

    sites: Count
    """n: sites in a cohort."""
    neighbours: Count
    """k: sites with which each site shares masks."""
    threshold: Count
    """t: neighbours whose shares open a site's mask."""
    dropouts: Count
    """Sites that may drop out without ending an attempt."""
    colluders: Count
    """Sites that may collude with the coordinator without learning more than the sum of the others."""
    ring_bits: Count
    """Updates are summed modulo 2^ring_bits."""


@dataclass(frozen=True)
class LedgerRow:
    """One charge."""

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

    number: Count
    """Its place in the ledger."""
    written: str
    """When it was written, ISO 8601."""
    site: str
    """Whose units it charges."""
    event: str
    """What was charged, in words."""
    epsilon: NonNegative | None
    """Epsilon of this run for the site's units after it; None where the row is no charge."""
    hash: str
    """Its hash, in hex, which covers the row before it."""


@dataclass(frozen=True)
class Ledger:
    """The list of charges, and whether its chain of hashes holds."""

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

    rows: tuple[LedgerRow, ...]
    """Every charge of the run, in order."""
    head: str
    """Hash of the last row, in hex: whoever keeps it can tell whether the ledger was changed later."""
    verified: bool
    """Whether the chain was checked from the first row to the head and holds."""
    problem: str = ""
    """What does not hold, in words."""


@dataclass(frozen=True)
class AuditRow:
    """What an audit with canaries found (`cloister.privacy.audit`)."""

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

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
    """Epsilon that is claimed of what was played, which may be less than the run; None: that of the run."""
    what: str = ""
    """What was played, in words."""


@dataclass(frozen=True)
class RunReport:
    """Everything that is on the page.

    Raises:
        CloisterError: a claim is incomplete, or smaller than what a round or a site spent.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _PARTS

    run: str
    """Name of the run."""
    run_id: str
    """Its identifier."""
    created: str
    """When the report was made, ISO 8601."""
    plan_digest: str
    """SHA-256 of the plan, in hex."""
    plan: str
    """The plan, as TOML or JSON."""
    roster_hash: str | None
    """Hash of the roster of the sites' keys, in hex; None where there is no roster."""
    versions: dict[str, str]
    """Versions of the software, by name."""

    unit: Literal["none", "record", "site"]
    """What the guarantee protects."""
    unit_in_words: str
    """The unit in the data's own words, with its article: `one discharge letter (one line of a site's JSONL)`."""
    relation: str
    """How neighbouring data sets differ: `adding or removing one such letter`."""
    mechanism: str
    """What adds noise to what, in words."""
    method: str
    """How it was computed: the path of per-record gradients, or who adds the noise."""
    clip: Positive | None
    """Clipping norm C (L2)."""
    noise_multiplier: NonNegative | None
    """Standard deviation of the noise over C."""
    sampling_rate: Annotated[float, Field(gt=0, le=1)] | None
    """Probability with which a record is in a step's batch; None where nothing is sampled in secret."""
    accountant: str
    """How losses are composed."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None
    """Delta of the claim."""
    epsilon: NonNegative | None
    """Epsilon of the claim: the largest over the sites. None where nothing finite can be claimed."""
    budget: Positive | None
    """Epsilon that may be spent; None without a limit."""
    stopped_by_budget: bool
    """Whether the run ended because the next round would have exceeded the budget."""
    declared_noise: bool
    """Whether noise came from a declared seed, as in a simulation that is to be repeatable."""

    rounds: tuple[RoundRow, ...]
    """The rounds that were done, in order."""
    sites: tuple[SiteRow, ...]
    """The sites."""
    assumptions: tuple[str, ...]
    """What must be true for the guarantee to hold: sampling, honest survivors, arithmetic."""
    trusted: tuple[str, ...]
    """Who is trusted, with what."""
    not_covered: tuple[str, ...]
    """What the guarantee says nothing about."""
    secure: SecureSum | None
    """The secure sum; None where the coordinator saw every update."""
    ledger: Ledger
    """The charges."""
    audit: AuditRow | None = None
    """The audit, where there was one."""
    format: Literal[1] = 1
    """Version of this form."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
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


@dataclass(frozen=True)
class Verdict:
    """Whether the report claims a guarantee, and the one sentence that says so."""

    holds: bool
    """Whether a guarantee is claimed."""
    sentence: str
    """The guarantee, or that there is none and why."""


def verdict(report: RunReport) -> Verdict:
    """The guarantee in one sentence, or why there is none.

    A guarantee is claimed if there is a unit, a finished round and a finite epsilon, the noise cannot be recomputed,
    the ledger verifies and holds the charges, no row of it is above the claim, no audit refutes the claim, epsilon is
    at most `LARGEST_EPSILON`, and delta is below `UNCLAIMED_DELTA` and, where a site is the unit, below 1 over the
    number of sites.
    """
    reason = _objection(report)
    if reason:
        return Verdict(False, reason)
    assert report.epsilon is not None
    assert report.delta is not None
    return Verdict(
        True,
        f"This run protects {report.unit_in_words}: every model that it released over {_rounds(report.rounds)} is "
        f"differentially private with epsilon {at_most(report.epsilon)} and delta {scientific(report.delta)} between "
        f"data sets that differ by {report.relation}, provided that every assumption on this page holds.",
    )


def _objection(report: RunReport) -> str:
    if report.unit == "none":
        return (
            "This run gives no privacy guarantee: no noise was added for privacy, and its models may repeat what they "
            "were trained on."
        )
    if report.declared_noise:
        return (
            "No privacy guarantee holds for this run: its noise was drawn from a declared seed, and whoever has the "
            "seed can recompute the noise and take it off."
        )
    if not report.ledger.verified:
        return (
            "No privacy guarantee is claimed for this run: its ledger does not verify"
            f" ({report.ledger.problem or 'no reason was recorded'})."
        )
    if not any(row.sites for row in report.rounds):  # a round that was given up is a row without sites
        return (
            "No privacy guarantee is claimed for this run: no round of it was finished, so it released no model that "
            "was trained on the sites' data, and there is nothing to claim."
        )
    if report.epsilon is None:
        return (
            "No privacy guarantee holds for this run: no finite epsilon can be stated for what it released."
        )
    if not report.ledger.rows:
        return (
            "No privacy guarantee is claimed for this run: its ledger holds no charge for what it released."
        )
    for row in report.ledger.rows:
        if row.epsilon is not None and row.epsilon > report.epsilon:
            return (
                f"No privacy guarantee is claimed for this run: row {row.number} of the ledger is at epsilon "
                f"{at_most(row.epsilon)}, above the {at_most(report.epsilon)} that would be claimed."
            )
    claimed = report.epsilon
    if report.audit is not None and report.audit.claimed is not None:
        claimed = min(claimed, report.audit.claimed)
    if report.audit is not None and report.audit.epsilon > claimed:
        return (
            f"No privacy guarantee is claimed for this run: an audit found that epsilon is above "
            f"{at_least(report.audit.epsilon)}, and {at_most(claimed)} would be claimed."
        )
    assert report.delta is not None
    sites = len(report.sites)
    if report.delta >= UNCLAIMED_DELTA:
        return (
            f"No privacy guarantee is claimed for this run: a run that publishes each unit with a chance of 1 in 100 "
            f"would meet its delta, which is {scientific(report.delta)}."
        )
    if report.unit == "site" and sites and report.delta >= 1 / sites:
        return (
            f"No privacy guarantee is claimed for this run: a run that publishes one of its {sites:,} sites, drawn at "
            f"random, would meet its delta, which is {scientific(report.delta)}."
        )
    if report.epsilon > LARGEST_EPSILON:
        return (
            f"No privacy guarantee is claimed for this run: its epsilon is {at_most(report.epsilon)}, and above "
            f"{LARGEST_EPSILON:g} a guess whether one unit was used could be right in more than 99.99 of 100 cases."
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
    """What an (epsilon, delta) allows, in numbers that need no logarithm; each is rounded up."""

    factor: str
    """e^epsilon: by how much the probability of an outcome can differ between neighbours, but for delta."""
    guess: str
    """Most often, in per cent, that a fair coin between two neighbours can be guessed from the outcome."""
    weak: bool
    """Whether that is 99 of 100 or more: such an epsilon says little by itself."""


def meaning(epsilon: float, delta: float) -> Meaning:
    """What an (epsilon, delta) allows.

    With M (epsilon, delta)-DP and D, D' neighbours, P[M(D) in S] <= e^epsilon P[M(D') in S] + delta. A guess of the
    coin that chose between D and D' is right with probability (e^epsilon + delta) / (e^epsilon + 1) at most (Kairouz,
    Oh and Viswanath 2015, Theorem 2.1, at equal priors).
    """
    if epsilon > 700:  # beyond float64, and beyond any meaning
        return Meaning("more than 10³⁰⁰", "100.0", True)
    factor = math.exp(epsilon)
    chance = (factor + delta) / (factor + 1)
    return Meaning(_factor(factor), str(_round(100 * chance, 1, ROUND_CEILING)), chance >= 0.99)


def _factor(value: float) -> str:
    if value < 1e6:
        return f"{_round(value, 2 if value < 100 else 0, ROUND_CEILING):,}"
    return scientific(value)


def at_most(value: float) -> str:
    """A loss, rounded up: two decimals, or two digits where it is below 0.1."""
    return _rounded(value, ROUND_CEILING)


def at_least(value: float) -> str:
    """A strength, rounded down: two decimals, or two digits where it is below 0.1."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> str:
    exact = Decimal(repr(value))
    if exact == 0 or exact >= Decimal("0.1"):
        return str(_round(value, 2, rounding))
    return f"{_round(value, 1 - exact.adjusted(), rounding):f}"


def scientific(value: float) -> str:
    """A positive number as `1 × 10⁻⁵`, rounded up to three digits."""
    exact = Decimal(repr(value))
    exponent = exact.adjusted()
    mantissa = exact.scaleb(-exponent).quantize(Decimal("0.01"), ROUND_CEILING)
    if mantissa >= 10:
        mantissa, exponent = mantissa / 10, exponent + 1
    shown = f"{mantissa:f}".rstrip("0").rstrip(".")
    return f"{shown} × 10{str(exponent).translate(_SUPERSCRIPT)}"


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _round(value: float, decimals: int, rounding: str) -> Decimal:
    """Of the shortest decimal that is this float, so that 0.1 stays 0.1."""
    return Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), rounding)


def to_json(report: RunReport) -> str:
    """The report as JSON, one value for each field; `from_json` gives the same report back."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str | bytes) -> RunReport:
    """Read `to_json`'s text.

    Raises:
        CloisterError: it is no such text, has an unknown field or lacks one, or contradicts itself.
    """
    try:
        return TypeAdapter(RunReport).validate_json(text)
    except ValidationError as error:
        first: ErrorDetails = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "text"
        raise CloisterError(
            f"report.json: {where}",
            expected=f"a report of this version ({first['msg'][:1].lower()}{first['msg'][1:]})",
            fix="make it anew with: cloister report RUN",
        ) from None


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Where, in the plot's units."""
    label: str
    """What it says."""


@dataclass(frozen=True)
class Plot:
    """A line over rounds, in the coordinates of a drawing that is 360 wide and 224 high."""

    width: ClassVar[int] = 360
    height: ClassVar[int] = 224
    left: ClassVar[int] = 40
    right: ClassVar[int] = 308
    top: ClassVar[int] = 22
    bottom: ClassVar[int] = 184

    title: str
    """What is plotted."""
    description: str
    """The plot in a sentence, for those who do not see it."""
    axis: str
    """What the vertical axis counts."""
    points: tuple[tuple[float, float], ...]
    """Of the line."""
    last: str
    """Value at the last point."""
    x_ticks: tuple[Tick, ...]
    """Rounds."""
    y_ticks: tuple[Tick, ...]
    """Values."""
    limit: Tick | None
    """A horizontal line."""


def plot(
    title: str,
    axis: str,
    values: Sequence[tuple[int, float]],
    *,
    write: Callable[[float], str],
    from_zero: bool,
    limit: Tick | None = None,
) -> Plot | None:
    """Lay out a line over rounds.

    Args:
        title: What is plotted.
        axis: What the vertical axis counts.
        values: (round, value), in order of round.
        write: How a value is written, beside the last point and in the description.
        from_zero: Whether the vertical axis starts at 0.
        limit: A horizontal line at this value, and its label.

    Returns:
        The plot; None without values.
    """
    if not values:
        return None
    heights = [value for _, value in values] + ([limit.at] if limit else [])
    low, high = (0.0 if from_zero else min(heights)), max(heights)
    step = _step((high - low) or abs(high) or 1.0, 4)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if high <= low:
        high = low + step
    first, last = values[0][0], values[-1][0]

    def x(round_number: float) -> float:
        if last == first:
            return (Plot.left + Plot.right) / 2
        return round(Plot.left + (Plot.right - Plot.left) * (round_number - first) / (last - first), 2)

    def y(value: float) -> float:
        return round(Plot.bottom - (Plot.bottom - Plot.top) * (value - low) / (high - low), 2)

    every = max(1, math.ceil(_step(last - first, 6))) if last > first else 1
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    # Multiples of the step, and the first round; one too near to the first would be written over it.
    rounds = [first, *(n for n in range(first + 1, last + 1) if n % every == 0 and n - first > every / 2)]
    return Plot(
        title=title,
        description=f"{title}: {write(values[0][1])} after round {first}, {write(values[-1][1])} after round {last}"
        + (f"; {limit.label} at {_number(limit.at)}." if limit else "."),
        axis=axis,
        points=tuple((x(number), y(value)) for number, value in values),
        last=write(values[-1][1]),
        x_ticks=tuple(Tick(x(number), str(number)) for number in rounds),
        y_ticks=tuple(
            Tick(y(low + n * step), f"{low + n * step:.{decimals}f}")
            for n in range(round((high - low) / step) + 1)
        ),
        limit=Tick(y(limit.at), limit.label) if limit else None,
    )


def _step(span: float, parts: int) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that covers `span` in `parts` steps."""
    power: float = 10.0 ** math.floor(math.log10(span / parts))
    return next(
        factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power * parts >= span * (1 - 1e-9)
    )


def _number(value: float) -> str:
    return f"{value:.6g}"


def to_html(report: RunReport) -> str:
    """The report as one page that opens without a network, with every value escaped."""
    claim = verdict(report)
    epsilons = [(row.round, row.epsilon) for row in report.rounds if row.epsilon is not None]
    losses = [(row.round, row.loss) for row in report.rounds if row.loss is not None]
    budget = Tick(report.budget, f"budget {_number(report.budget)}") if report.budget else None
    plots = [
        plot(
            "Epsilon over rounds",
            "epsilon, the largest of the sites",
            epsilons if claim.holds else [],
            write=at_most,
            from_zero=True,
            limit=budget,
        ),
        plot(
            "Held-out loss over rounds",
            "nats per token",
            losses,
            write=lambda loss: str(_round(loss, 3, ROUND_HALF_EVEN)),
            from_zero=False,
        ),
    ]
    claimed = report.epsilon is not None and report.delta is not None
    return _template().render(
        report=report,
        verdict=claim,
        meaning=meaning(report.epsilon or 0.0, report.delta or 0.0) if claim.holds and claimed else None,
        plots=[each for each in plots if each],
    )


@cache
def _template() -> jinja2.Template:
    import jinja2  # what only asks for a report's JSON does not pay for it

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = {
        "at_most": at_most,
        "at_least": at_least,
        "scientific": scientific,
        "number": _number,
        "multiplier": lambda value: f"{_round(value, 4, ROUND_FLOOR).normalize():f}",
    }
    environment.filters.update(filters)
    source = resources.files("cloister.privacy").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)
