"""The page of `cloister watch`: a run at one moment as HTML, with every value escaped.

The whole page is rendered once for a browser that opens it, and its content again for each change: the browser computes
nothing and only puts the new content in the place of the old one. Templates: `watch.html.jinja` and `run.html.jinja`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_HALF_EVEN
from typing import Any

from markupsafe import Markup

from cloister.cli.plan import size
from cloister.cli.view import View
from cloister.lm.confusion import Confusion
from cloister.privacy.claims import charged_unit
from cloister.privacy.figures import at_most, rounded, scientific
from cloister.privacy.page import Tick, plot, template
from cloister.protocol.plan import Plan

_SITES = 100
"""Rows of the table of sites."""
_ROUNDS = 10
"""Rows of the table of rounds."""
_CLASSES = 12
"""Most classes whose confusion matrix is shown."""


@dataclass(frozen=True)
class Content:
    """What a browser shows of a run."""

    title: str
    """The title of the page."""
    main: Markup
    """The content of the page."""


def content(view: View) -> Content:
    """The content of the page for a run at one moment."""
    private = view.plan.privacy.unit != "none"
    main = template("run.html.jinja", __package__).render(
        size=size,
        moment=_moment,
        view=view,
        words=in_words(view.plan, view.parameters),
        left=_left(view.left_s),
        figures=_figures(view),
        plots=[
            each
            for each in (
                plot(
                    "Held-out loss",
                    f"nats per {view.plan.data.label}",
                    _series(view, "loss"),
                    write=_loss,
                    from_zero=False,
                ),
                plot(
                    "Epsilon",
                    "epsilon, the largest of the sites",
                    _series(view, "epsilon") if private else [],
                    write=at_most,
                    from_zero=True,
                    limit=_budget(view.plan),
                ),
            )
            if each
        ],
        headings=_headings(view.plan),
        rounds=[(row["round"], _cells(row, view.plan)) for row in reversed(view.rows[-_ROUNDS:])],
        classes=_classes(view),
        counted=view.plan.data.counted,
        most_sites=_SITES,
    )
    name, of = view.plan.run.name, view.plan.run.rounds
    done = "finished" if view.state == "finished" else f"{view.done}/{of}"
    return Content(f"{done} · {name}", Markup(main))  # the template has escaped every value


def whole(shown: Content, nonce: str) -> str:
    """The whole page, whose only style and script have this nonce."""
    return template("watch.html.jinja", __package__).render(title=shown.title, main=shown.main, nonce=nonce)


def in_words(plan: Plan, parameters: int | None) -> str:
    """A plan in a few sentences."""
    sites, rounds, steps = plan.cohort.sites, plan.run.rounds, plan.local.steps
    drawn = "all of them" if plan.cohort.fraction == 1 else f"{plan.cohort.fraction:.0%} of them"
    if plan.cohort.mode == "async":
        drawn = f"asynchronous, the next {plan.quorum():,} updates"
    by = {
        "fixed": "",
        "weighted": " on average, by declared speed",
        "dynamic": " on average, by measured speed",
    }
    trained = "" if parameters is None else f", which train {parameters:,} parameters"
    how = (
        "Updates are summed under masks."
        if plan.aggregation.secure
        else "Updates are summed in clear: the coordinator sees each."
    )
    if plan.aggregation.groups > 1:
        how += f" The model moves by the median of the means of {plan.aggregation.groups} groups."
    privacy = plan.privacy
    if privacy.unit == "none":
        guarantee = "No differential privacy."
    else:
        limit = _limit(plan)
        most = "" if limit is None else f" of at most {limit:g}"
        of = charged_unit(plan).removeprefix("one ")
        guarantee = f"Private per {of}, with epsilon{most} at delta {scientific(privacy.delta)}."
    return (
        f"{rounds:,} round{'s' * (rounds != 1)} of {sites:,} sites, {drawn} in each{trained}; "
        f"{steps:,} local steps{by[plan.local.balance]}. {how} {guarantee}"
    )


def _figures(view: View) -> list[tuple[str, str, str]]:
    """Name, value and remark of each figure."""
    found = []
    losses, last = _series(view, "loss"), view.rows[-1] if view.rows else {}
    if losses:
        start = "at the start" if losses[0][0] == 0 else f"after round {losses[0][0]}"
        before = f"{_loss(losses[0][1])} {start}" if len(losses) > 1 else ""
        found.append(("held-out loss", _loss(losses[-1][1]), before))
    spent, limit = _series(view, "epsilon"), _limit(view.plan)
    if spent:
        of = "no budget" if limit is None else f"of a budget of {limit:g}"
        found.append(("epsilon spent", at_most(spent[-1][1]), of))
    if last.get("sites") is not None:
        found.append(
            ("sites in the last mean", f"{last['sites']:,}", f"{last.get('dropouts', 0):,} dropped out")
        )
    if last.get("mean_staleness") is not None:
        stale = f"{last['most_staleness']:,} at most, {last['too_stale']:,} updates dropped"
        found.append(("staleness in the last mean", f"{last['mean_staleness']:.1f}", stale))
    seconds = [float(row["seconds"]) for row in view.rows if row.get("seconds")]
    if seconds:
        rate = last["tokens"] / last["seconds"] if last.get("tokens") and last.get("seconds") else None
        found.append(
            (
                "last round took",
                f"{seconds[-1]:.1f} s",
                f"{rate:,.0f} {view.plan.data.label}s/s" if rate else "",
            )
        )
    if view.sites:
        connected = sum(not site.state.startswith("not connected") for site in view.sites)
        if view.state == "running":
            found.append(("sites connected", f"{connected:,} of {len(view.sites):,}", ""))
        moved = size(sum(site.received for site in view.sites))
        found.append(("received from sites", moved, f"{size(sum(site.sent for site in view.sites))} sent"))
    again = sum(max(0, row["attempts"] - 1) for row in view.rows if row.get("attempts"))
    found.append(("attempts that failed", f"{again:,}", "in rounds that are done"))
    return found


def _series(view: View, field: str) -> list[tuple[int, float]]:
    return [(row["round"], float(row[field])) for row in view.rows if isinstance(row.get(field), int | float)]


def _limit(plan: Plan) -> float | None:
    """The epsilon that the run may spend; None: no limit."""
    return plan.privacy.target_epsilon if plan.privacy.budget is None else plan.privacy.budget


def _budget(plan: Plan) -> Tick | None:
    limit = _limit(plan)
    return None if limit is None else Tick(limit, f"budget {limit:g}")


def _headings(plan: Plan) -> list[str]:
    last = "training loss" if plan.privacy.unit == "none" else "epsilon"
    figures = ("perplexity", "bits/byte")
    if plan.data.outcomes:
        figures = ("accuracy" if plan.data.classes else "choice accuracy", "macro F1")
    return ["sites", "held-out loss", *figures, last, "seconds"]


def _classes(view: View) -> tuple[list[str], list[tuple[str, list[str]]]] | None:
    """The held-out texts of the last evaluation by class, or the prompts by choice: headings, and for each its name and
    cells."""
    row = next((row for row in reversed(view.rows) if row.get("confusion")), None)
    if row is None:
        return None
    classes, confusion = view.plan.data.outcomes, Confusion(tuple(map(tuple, row["confusion"])))
    cells = len(classes) <= _CLASSES
    counted = f"{view.plan.data.counted[0]}s"
    headings = ["precision", "recall", "F1", counted, *(f"as {name}" for name in classes if cells)]
    lines = []
    for name, each, counts in zip(classes, confusion.by_class(), confusion.counts, strict=True):
        figures = [f"{each.precision:.3f}", f"{each.recall:.3f}", f"{each.f1:.3f}", f"{each.support:,}"]
        lines.append((name, figures + [f"{count:,}" for count in counts if cells]))
    return headings, lines


def _cells(row: Mapping[str, Any], plan: Plan) -> list[str]:
    private = plan.privacy.unit != "none"

    def shown(field: str, form: str) -> str:
        value = row.get(field)
        return "" if value is None else format(value, form)

    spent = row.get("epsilon")
    last = ("" if spent is None else at_most(spent)) if private else shown("train_loss", ".3f")
    sites = shown("sites", ",") if row["round"] == 0 or "sites" in row else "given up"
    figures = (shown("perplexity", ".2f"), shown("bits_per_byte", ".3f"))
    if plan.data.outcomes:
        accuracy = "accuracy" if plan.data.classes else "choice_accuracy"
        figures = (shown(accuracy, ".1%"), shown("macro_f1", ".3f"))
    return [sites, shown("loss", ".3f"), *figures, last, shown("seconds", ".1f")]


def _loss(value: float) -> str:
    return str(rounded(value, 3, ROUND_HALF_EVEN))


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {max(10, round(seconds, -1)):.0f} s left"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"


def _moment(at: str) -> str:
    """An ISO time for people: `2026-11-22 14:05:22 UTC`."""
    try:
        return f"{datetime.fromisoformat(at):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return at
