"""The model card of an exported model: Markdown with YAML front matter, from plan, ledger, journal and report.

What it says of privacy is what the run's privacy report says, in the same sentences (`privacy/report/report.py`,
`privacy/accounting/claims.py`): the verdict, and with a guarantee its figures and assumptions. What is not covered is
always listed. It names no site and quotes no record; sources of data have the names that the plan gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from huggingface_hub import ModelCardData

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.output.export import Form, base_name
from cloister.lm.tasks.figures import FIGURES as EVALUATED
from cloister.privacy.report.figures import at_most, scientific
from cloister.privacy.report.report import LARGEST_EPSILON, RunReport, Verdict, verdict
from cloister.privacy.report.summary import plain, several
from cloister.protocol.plan.plan import NO_EVALUATION, SIMULATED_PUBLIC, Plan
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
    parts = [
        f"# {_text(plan.run.name)}",
        _what(plan, form, simulated=simulated),
        *_privacy(report),
        "## Data",
        _table(_data(plan, simulated=simulated)),
        "## Training",
        _table(_training(report, plan, outcome)),
        "## Evaluation",
        *_evaluation(plan, outcome),
        "## Use",
        _use(form, own_base=own_base, task=plan.data.task),
        "## Provenance",
        _table(_provenance(report, plan, outcome, licence)),
    ]
    return f"---\n{_front(report, plan, form)}---\n\n" + "\n\n".join(parts) + "\n"


def _front(report: RunReport, plan: Plan, form: Form) -> str:
    """What the hub reads; it has no licence, because no party of the run has stated one for the result."""
    tags = ["cloister", "federated-learning"]
    if claim(report).holds:
        tags.append("differential-privacy")
    card = ModelCardData(
        library_name="peft" if form == "adapter" else "transformers",
        pipeline_tag="text-classification" if plan.data.task == "classify" else "text-generation",
        tags=tags,
    )
    if base_name(plan.model):
        card["base_model"] = base_name(plan.model)
        card["base_model_relation"] = "adapter" if form == "adapter" else "finetune"
    return f"{card.to_yaml()}\n"


def _what(plan: Plan, form: Form, *, simulated: bool) -> str:
    kind = "text classifier" if plan.data.task == "classify" else "language model"
    what = {
        "full": f"A {kind}, all of whose parameters were trained",
        "adapter": f"A LoRA adapter of a {kind}, trained",
        "merged": f"A {kind} with a trained LoRA adapter merged into its weights, trained",
    }[form]
    how = "in a simulation of a federation on one machine" if simulated else "by a federation of sites"
    return f"{what} {how} with Cloister."


def _privacy(report: RunReport) -> Iterable[str]:
    found = claim(report)
    yield "## Privacy"
    yield f"**{_text(found.sentence)}**"
    if not found.holds:
        yield from (_text(line) for part in plain(report)[:1] for line in part.lines)
    else:
        assert report.epsilon is not None
        assert report.delta is not None
        rows = [
            ("unit", report.unit_in_words),
            ("neighbouring data sets differ by", report.relation),
            ("epsilon", at_most(report.epsilon)),
            ("delta", scientific(report.delta)),
            ("accountant", report.accountant),
            ("mechanism", report.mechanism),
            ("clipping norm C", _setting(report.clip)),
            ("noise multiplier", _setting(report.noise_multiplier)),
            ("sampling rate", _setting(report.sampling_rate)),
            ("trust model", report.trust_model),
        ]
        rows += [
            (
                f"epsilon of {row.units} {several(report)}",
                f"above {LARGEST_EPSILON:g}: no protection to speak of"
                if row.epsilon is None
                else at_most(row.epsilon),
            )
            for row in report.groups
            if row.units > 1
        ]
        yield _table((name, _text(value)) for name, value in rows if value)
        yield "### Assumptions"
        yield _list(report.assumptions)
    yield "### Who is trusted"
    yield _list(report.trusted)
    yield "### What is not covered"
    yield _list(report.not_covered)


def _data(plan: Plan, *, simulated: bool) -> Iterable[tuple[str, str]]:
    data = plan.data
    source = "the sites' own records, which the plan does not name"
    yield "records of the sites", _code(plan.simulation.source) if simulated else source
    if plan.public.source:
        yield (
            "public text, before the first round",
            f"{_code(plan.public.source)}, {plan.public.steps:,} steps",
        )
    field = {"text": data.text_field, "prompt": data.completion_field, "messages": data.messages_field}[
        data.format
    ]
    yield "format", f"{data.format}; learned from the field {_code(field)}"
    if data.task == "classify":
        yield "classes", f"{', '.join(map(_code, data.classes))}; by the field {_code(data.label_field)}"
    if data.class_weights:
        yield "weights of the classes in the loss", ", ".join(f"{weight:g}" for weight in data.class_weights)
    if data.choices:
        yield "choices", ", ".join(map(_code, data.choices))
    yield "tokens in a sequence", f"{data.sequence_length:,}"


def _training(report: RunReport, plan: Plan, outcome: Outcome) -> Iterable[tuple[str, str]]:
    local, adapter = plan.local, plan.model.adapter
    yield "sites", f"{len(report.sites):,}"
    yield "rounds", f"{outcome.rounds:,} of {plan.run.rounds:,}"
    if plan.cohort.mode == "async":
        yield "sites that trained at the same time", f"{plan.cohort.size():,}"
        yield "updates in a round, asynchronous (FedBuff)", f"{plan.quorum():,}"
    else:
        yield "sites in a round", f"{plan.cohort.size():,}"
    yield "local steps of a site in a round, by the plan", f"{local.steps:,}"
    yield from outcome.shown(FIGURES, plan.data.label)
    yield "sequences in a step", f"{local.batch_size * local.accumulation:,}"
    yield "optimizers", f"{local.optimizer} at the sites, {plan.server.optimizer} at the coordinator"
    yield (
        "trained",
        (
            "every parameter"
            if adapter.scheme == "full"
            else f"LoRA, {adapter.scheme}, rank {adapter.rank}, over a base in {adapter.base_precision}"
        ),
    )
    groups = plan.aggregation.groups
    how = "secure sum, under masks" if plan.aggregation.secure else "in clear"
    if groups > 1:
        how += f"; one for each of {groups} groups of a round, and the model moved by the median of the means"
    yield "sum of the updates", how


def _evaluation(plan: Plan, outcome: Outcome) -> Iterable[str]:
    if outcome.final_loss is None:
        yield "The final model was not evaluated."
        return
    source = plan.server.evaluation
    where = {
        "": "held-out records of the sites",
        SIMULATED_PUBLIC: "records that the simulation gave to no site",
        NO_EVALUATION: "",
    }.get(source, _code(source))
    label, (counted, by) = plan.data.label, plan.data.counted
    yield _table(
        [
            ("evaluated on", where),
            (f"loss, nats per {label}", f"{outcome.final_loss:.4f}"),
            *([(f"{counted}s", f"{outcome.confusion.records:,}")] if outcome.confusion else []),
            *outcome.shown(EVALUATED, label),
            ("loss before the first round", _figure(outcome.initial_loss)),
        ]
    )
    if outcome.confusion is None:
        return
    yield f"| {by} | precision | recall | F1 | {counted}s |\n|---|---|---|---|---|\n" + "\n".join(
        f"| {_code(name)} | {_figure(each.precision)} | {_figure(each.recall)} | {_figure(each.f1)} "
        f"| {each.support:,} |"
        for name, each in zip(plan.data.outcomes, outcome.confusion.by_class(), strict=True)
    )


def _use(form: Form, *, own_base: bool, task: str) -> str:
    kind = "SequenceClassification" if task == "classify" else "CausalLM"
    load = f"AutoModelFor{kind}.from_pretrained(folder)"
    imports = f"from transformers import AutoModelFor{kind}, AutoTokenizer"
    if form == "adapter" and own_base:
        imports = f"from peft import PeftModel\n{imports}"
        load = f'PeftModel.from_pretrained(AutoModelFor{kind}.from_pretrained(f"{{folder}}/base"), folder)'
    elif form == "adapter":
        imports = f"from peft import AutoPeftModelFor{kind}\nfrom transformers import AutoTokenizer"
        load = f"AutoPeftModelFor{kind}.from_pretrained(folder)"
    return (
        f'```python\n{imports}\n\nfolder = "."  # the path of this folder\nmodel = {load}\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n```"
    )


def _provenance(report: RunReport, plan: Plan, outcome: Outcome, licence: str) -> Iterable[tuple[str, str]]:
    fresh = plan.model.name.startswith("builtin:")
    yield (
        "base model",
        f"none: fresh weights of {_code(plan.model.name)}" if fresh else _code(plan.model.name),
    )
    if not fresh:
        yield "revision", _code(plan.model.revision)
        yield "licence of the base model, by its own card", _text(licence or "not known")
    yield "SHA-256 of the trained parameters", _code(outcome.params_sha256)
    yield "SHA-256 of the plan", _code(report.plan_digest)
    yield "run", _code(report.run_id)
    if report.ledger.head and report.unit != "none":
        yield "head of the privacy ledger", _code(report.ledger.head)
    if report.roster_hash:
        yield "SHA-256 of the roster", _code(report.roster_hash)
    yield "software of this card", ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield "written", report.created


def _setting(value: float | None) -> str:
    """A number of the plan, whole; empty if the run has none."""
    return "" if value is None else f"{value!r}"


def _figure(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_text(item)}" for item in items)


def _text(value: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """A value that a party chose, as code in one line, whatever characters it has."""
    line = " ".join(value.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{edge}{line}{edge}{fence}"
