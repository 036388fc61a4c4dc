"""A report in words: one page for a reader who is not an engineer, and the questions of NIST SP 800-226.

NIST SP 800-226 ("Guidelines for Evaluating Differential Privacy Guarantees", 2025) lists what to ask of a claim of
differential privacy. The questions here are in our own words; each answer holds the facts of one run. Both are pure
functions of a `RunReport`, and claim nothing where `verdict` does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloister.privacy.report.figures import at_least, at_most, scientific
from cloister.privacy.report.report import LARGEST_EPSILON, DatasetRow, RunReport, meaning, verdict


@dataclass(frozen=True)
class Part:
    """A question or heading, and what is said under it."""

    title: str
    """The question or heading."""
    lines: tuple[str, ...]
    """Sentences."""


def _part(title: str, *lines: str) -> Part:
    return Part(title, tuple(filter(None, lines)))


def plain(report: RunReport) -> tuple[Part, ...]:
    """The run for a reader who is not an engineer: no formula, no Greek letter."""
    if not verdict(report).holds:
        return (
            _part(
                "What this means",
                "Nothing is claimed. Treat the models of this run as if they could repeat the data on which "
                "they were trained, and give them only to people who may see that data.",
            ),
            _part("What to do", "Ask the engineers about the reason above before anything is signed."),
        )
    assert report.epsilon is not None
    assert report.delta is not None
    return (
        _part(
            "What was protected",
            f"{_capital(report.unit_in_words)}. The models are nearly the same with it and without it. "
            f"{len(report.sites)} {'site' if len(report.sites) == 1 else 'sites'} took part.",
        ),
        _part("From whom", report.protected_from),
        Part("How strong the protection is", tuple(_strength(report, report.epsilon, report.delta))),
        *((_part("How this run was chosen", report.search),) if report.search else ()),
        _part(
            "What it does not cover",
            "What is true of many people: the models are meant to learn it, with or without any one of them. "
            f"More {several(report)} than the figures above say. How the data was collected and is stored. The "
            "full list is below.",
        ),
        Part("What to check before you sign", tuple(_checks(report))),
        Part("Who is responsible for what", report.responsible),
    )


def _strength(report: RunReport, epsilon: float, delta: float) -> list[str]:
    guess = meaning(epsilon, delta).guess
    lines = [
        (
            "Suppose somebody tosses a coin to decide whether one of them is used, and somebody else guesses from the "
            f"models how the coin fell. Of 100 guesses at most {guess} are right. Without the models, 50 are."
        )
    ]
    larger = [row for row in report.groups if row.units > 1]
    told = [row for row in larger if row.epsilon is not None]
    if told and told[0].epsilon is not None:
        guess = meaning(told[0].epsilon, delta).guess
        lines.append(
            f"Of guesses about {told[0].units} {several(report)}, all used or none, at most {guess} of 100 are right."
        )
    lost = next((row for row in larger if row.epsilon is None), None)
    if lost is not None:
        lines.append(f"For {lost.units} or more {several(report)}, there is no protection to speak of.")
    lines.append(f"With a chance of about 1 in {_one_in(delta)}, the protection of one of them may fail.")
    dataset = report.dataset
    if dataset is None or dataset.problem:
        lines.append(
            "All this is true of this run alone. Every other run on the same data weakens the protection, and this "
            "report does not count other runs."
        )
    elif dataset.epsilon is None or dataset.epsilon > LARGEST_EPSILON:
        lines.append(f"All {_runs(dataset)} on this data together leave no protection to speak of.")
    else:
        lines.append(
            f"All this is true of this run. For someone who sees the models of all {_runs(dataset)} on this data, at "
            f"most {meaning(dataset.epsilon, dataset.delta).guess} of 100 guesses are right."
        )
    return lines


def several(report: RunReport) -> str:
    """Units that differ together, in words."""
    if report.unit == "record":
        return f"{report.units} of one person"
    return f"{report.units} together"


def _checks(report: RunReport) -> list[str]:
    thing = report.units or "units"
    found = [
        f"Is what was protected what you want to protect? How many {thing} can one person have at most?",
        (
            "Was the same data used in other runs or for other purposes, and who counts them?"
            if report.dataset is None or report.dataset.problem
            else f"Did all uses of this data go through the ledger {report.dataset.ledger}, under the name "
            f"{report.dataset.name}?"
        ),
        "Do the people named below know and accept what they are responsible for?",
        "Keep a copy of this report: the head of the ledger in it shows later whether the ledger was changed.",
    ]
    if report.audit is None:
        found.append("No audit of this run is on file. Ask for one: it can find noise that is missing.")
    return found


def questions(report: RunReport) -> tuple[Part, ...]:
    """The questions of NIST SP 800-226 with the answers of this run; none without a privacy unit."""
    if report.unit == "none":
        return ()
    claim = verdict(report)
    claimed = claim.holds and report.epsilon is not None and report.delta is not None
    return (
        _part("What is the privacy unit?", f"{_capital(report.unit_in_words)}."),
        _part("When are two data sets neighbours?", f"When they differ by {report.relation}."),
        Part("What is the trust model?", (report.trust_model,) if report.trust_model else report.trusted),
        _part("How large is epsilon?", _epsilon(report) if claimed else claim.sentence),
        _part("How large is delta?", _delta(report)),
        _part("How do the costs of several releases and runs add up?", _composition(report, claimed=claimed)),
        Part("Which mechanism, and is the implementation right?", tuple(_implementation(report))),
        _part(
            "Which side channels remain?",
            "Participation, dropouts, refusals, durations and the size of messages are not noised, and "
            "durations can depend on the data.",
        ),
        _part("How exposed is the data before a release?", report.exposure),
        _part("What does the noise cost in usefulness?", _usefulness(report)),
        _part("What is not covered?", f"{len(report.not_covered)} points: see “What is not covered”."),
    )


def _epsilon(report: RunReport) -> str:
    assert report.epsilon is not None
    assert report.delta is not None
    guess = meaning(report.epsilon, report.delta).guess
    return (
        f"{at_most(report.epsilon)}, {'this run' if _counts(report.dataset) else 'this run alone'}: at most {guess} of "
        "100 guesses of a fair coin are right. "
        + ("No budget was set." if report.budget is None else f"The budget was {report.budget:.6g}.")
    )


def _delta(report: RunReport) -> str:
    if report.delta is None:
        return "None is stated."
    text = (
        f"{scientific(report.delta)}, about 1 in {_one_in(report.delta)}. It should be well below one over the number "
        "of "
    )
    if report.unit == "site":
        return f"{text}sites, of which there are {len(report.sites):,}."
    return f"{text}{report.units or 'units'}, which only the sites know."


def _composition(report: RunReport, *, claimed: bool) -> str:
    text = f"Within the run: {report.accountant}."
    dataset = report.dataset
    if not _counts(dataset):
        return f"{text} Over several runs: not counted here; this report is of this run alone."
    assert dataset is not None
    if not claimed:
        return f"{text} Over several runs: {_runs(dataset)} charged {dataset.name} in {dataset.ledger}."
    over = "no finite epsilon" if dataset.epsilon is None else f"epsilon {at_most(dataset.epsilon)}"
    limit = "without a limit" if dataset.limit is None else f"with a limit of {dataset.limit:.6g}"
    return (
        f"{text} Over several runs: {_runs(dataset)} on {dataset.name} together have {over} at delta "
        f"{scientific(dataset.delta)}, {limit}, in the ledger {dataset.ledger} (head {dataset.head})."
    )


def _implementation(report: RunReport) -> list[str]:
    lines = [report.mechanism]
    if report.declared_noise:
        lines.append("The noise came from a declared seed and can be recomputed.")
    lines.append(
        "Floating-point arithmetic and the source of randomness are assumed, not proved: see “Assumptions”."
    )
    if report.audit is None:
        lines.append("No audit is on file.")
    else:
        lines.append(
            f"An audit found epsilon to be at least {at_least(report.audit.epsilon)}; it can refute a claim, and "
            "cannot prove one."
        )
    return lines


def _usefulness(report: RunReport) -> str:
    losses = [row.loss for row in report.rounds if row.loss is not None]
    measured = (
        f"The held-out loss after the last evaluated round is {losses[-1]:.3f} nats per {report.label}."
        if losses
        else "It was not measured: no held-out loss is on file."
    )
    return f"{measured} Noise hides rare texts more than common ones; what that costs small groups was not measured."


def _counts(dataset: DatasetRow | None) -> bool:
    return dataset is not None and not dataset.problem


def _runs(dataset: DatasetRow) -> str:
    return "1 run" if dataset.runs == 1 else f"{dataset.runs} runs"


def _one_in(delta: float) -> str:
    """1 / delta, rounded down."""
    return f"{math.floor(1 / delta * (1 + 1e-12)):,}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
