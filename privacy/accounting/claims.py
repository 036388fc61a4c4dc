"""A plan's guarantee in words: its unit, its mechanism, its assumptions, who is trusted, and what is not covered.

Every sentence follows from the plan alone and not from what a run did, so a test can check it against its plan. The
sentences are in `claims.jinja`, each under the condition that says which plans it belongs to.
Refused: a table of sentences and conditions, because a sentence can depend on several parts of a plan.
"""

from __future__ import annotations

from cloister.privacy.accounting.accountant import Spent
from cloister.privacy.accounting.prose import Prose
from cloister.privacy.accounting.terms import Terms, participation
from cloister.privacy.mechanism.correlated import Blt, loss
from cloister.protocol.plan.plan import (
    AT_SITES,
    NO_EVALUATION,
    SIMULATED_PUBLIC,
    DataSection,
    ModelSection,
    Plan,
    PrivacySection,
)
from cloister.protocol.questions.registry import of_sequences
from cloister.protocol.questions.within import question_within


def thing(plan: Plan) -> str:
    """The name of one unit, of a plan with a privacy unit."""
    if plan.privacy.unit in ("owner", "site"):
        return plan.privacy.unit
    if not of_sequences(plan):
        return "record"
    if plan.privacy.record == "window":
        return "window"
    return plan.data.kind.thing


def unit(plan: Plan) -> str:
    """What the guarantee protects, with its article; empty without a privacy unit."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return "everything that one site holds"
    if not of_sequences(plan):  # it reads the fields of whole records
        sites = 1 if plan.question is None else plan.question.sites_of_owner
        where = "one site" if sites == 1 else f"up to {sites} sites"
        owner = f"all records of one owner at {where}, named by the field {plan.data.owner!r}"
        return owner if plan.privacy.unit == "owner" else f"one {thing(plan)}"
    return unit_in_words(plan.data, plan.privacy)


def unit_in_words(data: DataSection, privacy: PrivacySection) -> str:
    """What the guarantee of unit `record` protects: "one text, of which the first 512 tokens ...".

    With unit `owner`: "all records of one owner at one site, named by the field 'patient_id', of which at most 8 ...".
    """
    if privacy.unit == "owner":
        owned = (
            f"all records of one owner at one site, named by the field {data.owner!r}, of which at most "
            f"{privacy.records}"
        )
        if privacy.record == "window":
            return f"{owned} windows of {data.sequence_length} tokens are used"
        each = f", each with its {_used(data, privacy)}" if data.kind.used else ""
        return f"{owned} are used{each}"
    if privacy.record == "window":
        return f"a window of {data.sequence_length} tokens of a text"
    used = f", of which the {_used(data, privacy)} are used" if data.kind.used else ""
    return f"one {data.kind.whole}{used}"


def _used(data: DataSection, privacy: PrivacySection) -> str:
    """What of a record is used at most, in words."""
    tokens = data.sequence_length * (privacy.windows if data.kind.windows else 1)
    return data.kind.used.format(tokens=tokens, targets=data.target_length)


def charged_unit(plan: Plan) -> str:
    """The unit in which a dataset is charged over its runs: with what differs between units of two plans.

    A site is the records that a division of the dataset gives it: a site of another division is no such unit.
    """
    if plan.privacy.unit == "site":
        data, way = plan.simulation, plan.simulation.partition
        by = f" by the field {data.field!r}" if data.field else ""
        by += f" with alpha {data.alpha!r}" if way == "dirichlet" else ""
        grouped = data.field and way in ("natural", "auto")  # in order of size
        fixed = (data.sites or grouped) and not data.public
        drawn = "" if fixed else f", drawn with seed {plan.run.seed}, without a share of {data.public!r}"
        if data.sites:  # no figure of their records is in a charge: it would tell what they are
            return f"one site of {', '.join(data.sites)}, with the records that it was given{drawn}"
        return f"one site of {plan.cohort.sites} of {data.source} ({data.split}), {way}{by}{drawn}"
    if plan.privacy.unit == "owner":
        return f"one owner, named by the field {plan.data.owner!r}"
    if plan.privacy.record == "window":
        tokenizer, field = plan.model.tokenizer_name, plan.data.text_field
        if plan.model.revision != ModelSection().revision:  # another one may have another tokenizer
            tokenizer += f" at {plan.model.revision}"
        # Other tasks take places of a window for tokens of their own.
        made = "" if plan.data.task == "causal" and plan.data.format == "text" else f" for {plan.data.task}"
        return f"one window of {plan.data.sequence_length} tokens ({tokenizer}) of the field {field!r}{made}"
    return f"one {plan.data.kind.thing}"  # also of a question about fields of the same records


def things(plan: Plan) -> str:
    """The name of several units; empty without a privacy unit."""
    if plan.privacy.unit == "none":
        return ""
    return plan.data.kind.things if thing(plan) == plan.data.kind.thing else f"{thing(plan)}s"


def in_steps(plan: Plan) -> bool:
    """Whether each site adds all of the noise that covers its units, in its own steps (DP-SGD)."""
    return plan.privacy.dpsgd and plan.question is None


def shared_noise(plan: Plan) -> bool:
    """Whether the sites' noise covers their units only together."""
    return plan.question is not None or (plan.privacy.unit == "site" and not plan.privacy.trusted_coordinator)


def tells(plan: Plan) -> bool:
    """Whether sites tell of their units by the mechanism of questions, in the whole run or in its evaluations."""
    return plan.question is not None or bool(plan.charged_evaluations)


def relation(plan: Plan) -> str:
    """How neighbouring data sets differ: the words after `data sets that differ by`."""
    if plan.privacy.unit == "none":
        return ""
    if plan.privacy.unit == "site":
        return (
            "adding or removing all records of one site, which sends zeros in every coordinate if it has none"
        )
    if plan.privacy.unit == "owner":
        sites = 1 if plan.question is None else plan.question.sites_of_owner
        return f"adding or removing all records of one owner at {'one site' if sites == 1 else f'up to {sites} sites'}"
    return f"adding or removing one such {thing(plan)} at one site"


def mechanism(plan: Plan, terms: Terms | None) -> str:
    """What adds noise to what."""
    return "" if terms is None else PROSE.line("mechanism", plan, terms)


def accountant(plan: Plan, most: Spent | None) -> str:
    """How losses were composed; `most` is what the site with the largest loss has spent, if any site was charged."""
    text = PROSE.line("accountant", plan, plan.privacy.accountant if most is None else most.accountant)
    return f"{text}. {most.note[:1].upper()}{most.note[1:]}" if most is not None and most.note else text


def assumptions(plan: Plan, terms: Terms | None, *, simulated: bool) -> tuple[str, ...]:
    """What must be true for the guarantee to hold; `simulated`: the sites' own ledgers were read as well."""
    return () if terms is None else PROSE.said("assumptions", plan, simulated)


PROSE = Prose(
    "cloister.privacy.accounting",
    "claims.jinja",
    loss=loss,
    independent=Blt(),
    participation=participation,
    question_within=question_within,
    thing=thing,
    in_steps=in_steps,
    of_sequences=of_sequences,
    shared_noise=shared_noise,
    used=_used,
    AT_SITES=AT_SITES,
    NO_EVALUATION=NO_EVALUATION,
    SIMULATED_PUBLIC=SIMULATED_PUBLIC,
)
"""What a plan says, by macro. Besides those of the functions: `trust_model` (where noise is added, as NIST SP
800-226), `protected_from`, `responsible`, `exposure`, `method`, `trusted`, `poisoned` and `not_covered`."""
