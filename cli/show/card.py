"""The model card of an exported model: Markdown with YAML front matter, from plan, ledger, journal and report.

What it says of privacy is what the run's privacy report says, in the same sentences (`privacy/report/report.py`,
`privacy/accounting/claims.py`): the verdict, and with a guarantee its figures and assumptions. What is not covered is
always listed. It names no site and quotes no record; sources of data have the names that the plan gives them. Its text
is `card.md.jinja`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from importlib import resources

import jinja2
from huggingface_hub import ModelCardData

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.measures.figures import FIGURES as EVALUATED
from cloister.lm.output.export import Form, base_name
from cloister.lm.tasks.registry import task_of
from cloister.privacy.report.figures import at_most, scientific
from cloister.privacy.report.report import LARGEST_EPSILON, RunReport, Verdict, verdict
from cloister.privacy.report.summary import plain, several
from cloister.protocol.plan.plan import AT_SITES, SIMULATED_PUBLIC, Plan
from cloister.server.record.outcome import Outcome

_SPECIAL = re.compile(r"([\\`*_\[\]<>|])")


def claim(report: RunReport) -> Verdict:
    """The report's verdict, without the details of a ledger that does not verify: those name sites."""
    elsewhere = "the run's privacy report has the reason"
    return verdict(
        replace(report, ledger=replace(report.ledger, problem=report.ledger.problem and elsewhere))
    )


def claim_facts(report: RunReport) -> dict[str, object]:
    """What a run may claim, for `--json`."""
    found = claim(report)
    return {
        "guarantee": found.holds,
        "sentence": found.sentence,
        "epsilon": report.epsilon if found.holds else None,
        "delta": report.delta if found.holds else None,
    }


def to_card(
    report: RunReport,
    plan: Plan,
    outcome: Outcome,
    form: Form,
    *,
    simulated: bool,
    licence: str = "",
    own_base: bool,
) -> str:
    """The card, as the text of a README.md.

    Args:
        report: The run's privacy report.
        plan: The run's plan.
        outcome: The run's figures.
        form: What the folder holds.
        simulated: Whether the run was a simulation.
        licence: What the base model's own card states as its licence; empty if that is not known.
        own_base: Whether an adapter's base lies in the folder.
    """
    evaluated_on = {
        AT_SITES: "held-out records of the sites",
        SIMULATED_PUBLIC: "records that the simulation gave to no site",
    }.get(plan.server.evaluation, _code(plan.server.evaluation))
    found = claim(report)
    return _template().render(
        report=report,
        plan=plan,
        outcome=outcome,
        form=form,
        simulated=simulated,
        licence=licence,
        own_base=own_base,
        front=_front(plan, form, private=found.holds),
        claim=found,
        several=several(report),
        largest_epsilon=LARGEST_EPSILON,
        nothing_claimed=plain(report)[0].lines,
        evaluated_on=evaluated_on,
        figures=FIGURES,
        evaluated=EVALUATED,
        auto=task_of(plan.data).auto,
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"text": _text, "code": _code, "figure": _figure, "number": "{:g}".format}
    environment.filters |= {"at_most": at_most, "scientific": scientific}
    source = resources.files("cloister.cli.show").joinpath("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _front(plan: Plan, form: Form, *, private: bool) -> str:
    """What the hub reads; it has no licence, because no party of the run has stated one for the result."""
    card = ModelCardData(
        library_name="peft" if form == "adapter" else "transformers",
        pipeline_tag=task_of(plan.data).auto.pipeline,
        tags=["cloister", "federated-learning", *(["differential-privacy"] if private else [])],
    )
    if base_name(plan.model):
        card["base_model"] = base_name(plan.model)
        card["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
    return card.to_yaml()


def _figure(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _text(value: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """A value that a party chose, as code in one line, whatever characters it has."""
    line = " ".join(value.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{edge}{line}{edge}{fence}"
