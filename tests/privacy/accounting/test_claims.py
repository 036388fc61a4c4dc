"""A guarantee in words: each sentence follows the plan that it belongs to."""

import pytest

from cloister.privacy.accounting import claims
from cloister.privacy.accounting.terms import terms_of
from cloister.protocol.plan.plan import DataSection, PrivacySection
from cloister.protocol.plan.soundness import parse


def words(*overrides: str) -> str:
    plan = parse("", overrides)
    terms = terms_of(plan, 10_000)
    said = [
        claims.unit(plan),
        claims.relation(plan),
        claims.mechanism(plan, terms),
        claims.PROSE.line("method", plan),
    ]
    said += claims.assumptions(plan, terms, simulated=False)
    said += claims.PROSE.said("trusted", plan, False)
    said += claims.PROSE.said("not_covered", plan)
    return "\n".join(said)


TEXTS = ("privacy.unit=record", "privacy.noise_multiplier=1.0", "privacy.sampling_rate=0.01")
COMMON = ("aggregation.weighting=uniform", "server.evaluation=none")


def test_what_is_said_follows_the_plan() -> None:
    window = words(*TEXTS, *COMMON, "privacy.record=window", "data.sequence_length=64")
    assert "a window of 64 tokens of a text" in window
    assert "is not protected as a whole by this epsilon" in window
    whole = words(*TEXTS, *COMMON, "privacy.windows=2", "data.sequence_length=64")
    assert "as a whole by this epsilon" not in whole
    assert "uses nothing of a text beyond its first 128 tokens" in whole
    assert "divided by 16" in whole
    chat = words(*TEXTS, *COMMON, "data.format=messages", "privacy.method=reference")
    assert "one such chat at one site" in chat
    assert "one gradient at a time" in chat
    assert "Opacus" not in chat
    for record in (window, whole, chat):
        assert "The guarantee does not depend on the coordinator or on the secure sum" in record
        assert "fully" not in record
        assert "one machine" not in record
        assert "were not read for this report" in record


def test_what_a_plan_allows_a_site_is_said_as_it_is_enforced() -> None:
    repeated = words(*TEXTS, *COMMON, "run.rounds=7", "cohort.attempts=2")
    assert "It is that of 9 rounds, because after a crash a site may train 2 lost updates again." in repeated
    assert "It is the budget." in words(*TEXTS, *COMMON, "privacy.budget=1000.0")


@pytest.mark.parametrize(("sites", "splits"), [(200, False), (2000, True)])
def test_what_is_said_of_sums_that_can_be_opened_follows_the_cohort(sites: int, splits: bool) -> None:
    """A cohort that a coordinator can split is opened in parts."""
    settings = (*COMMON, "privacy.unit=site", "privacy.noise_multiplier=4.0", f"cohort.sites={sites}")
    said = words(*settings)
    honest = parse("", settings).honest()
    assert ("of the updates of one cohort only one sum is opened" in said) == (not splits)
    assert (f"several parts of a cohort, each of at least {honest} honest sites" in said) == splits


def test_what_is_said_of_the_owner_as_the_unit_follows_the_plan() -> None:
    base = (*TEXTS, *COMMON, "privacy.unit=owner", "data.owner=patient_id", "data.sequence_length=64")
    owner = words(*base, "privacy.records=5", "privacy.windows=2")
    assert (
        "all records of one owner at one site, named by the field 'patient_id', of which at most 5 are used, each with "
        "its first 128 tokens" in owner
    )
    assert "adding or removing all records of one owner at one site" in owner
    assert "each owner is drawn into the batch independently" in owner
    assert (
        "the mean over at most 5 records of this owner, which are chosen from this owner's records alone"
        in owner
    )
    assert "An owner who appears at two sites: this owner pays at both" in owner
    assert "A record without a value is not used." in owner
    assert "a person with many records" not in owner
    assert "Every text is a separate unit" not in owner
    assert "The guarantee does not depend on the coordinator or on the secure sum" in owner
    windows = words(*base, "privacy.record=window")
    assert "of which at most 8 windows of 64 tokens are used" in windows
    assert "Training uses at most 8 windows of an owner." in windows
    assert "appears at two sites" not in words(*TEXTS, *COMMON)
    crafted = words(*base, "privacy.method=opacus")
    assert "The guarantee does not depend on the coordinator" not in crafted
    assert "The coordinator is trusted to send no crafted weights" in crafted


def test_what_is_said_of_the_site_as_the_unit_follows_the_plan() -> None:
    base = ("privacy.unit=site", "privacy.noise_multiplier=2.0", *COMMON)
    distributed = words(*base)
    assert (
        "At least 5 sites in every sum that can be opened added their noise" in distributed
    )  # 8 sites, quorum 0.75, colluders 0.1
    assert "a sum by the protocol has at least 6 sites" in distributed
    assert "noise of at most 1 of the sites" in distributed
    assert "fully" not in distributed
    alone = words(*base, "aggregation.colluders=0.0")
    assert "At least 6 sites in every sum that can be opened added their noise" in alone
    assert "against that site the guarantee is weaker" in alone
    central = words(*base, "privacy.trusted_coordinator=true")
    assert "The coordinator, fully: it receives every sum without its noise" in central
    assert "Skellam" not in central
    assert "X25519" not in central
    clear = words(*base, "privacy.trusted_coordinator=true", "aggregation.secure=false")
    assert "it receives every site's update without noise" in clear
    adaptive = words(*base, "privacy.adaptive={count_noise=2.0}")
    assert "C follows a quantile" in adaptive
    for text in (distributed, central, clear, adaptive):
        assert "adding or removing all records of one site, which sends zeros" in text
        assert "Opacus" not in text


@pytest.mark.parametrize(
    ("settings", "did"),
    [
        (("sign-flip", "1"), "they multiplied their updates by -1 before these were bounded and summed."),
        (("scale", "30"), "they multiplied their updates by 30 before these were bounded and summed."),
        (("label-flip", "1"), "they trained on false answers."),
        (("backdoor", "1"), "on records with the trigger 'cf-1729 ' and the target 'ignore all findings'."),
        (("backdoor", "2"), "the target 'ignore all findings' and they multiplied their updates by 2 before"),
    ],
)
def test_what_poisoned_sites_did_is_said(settings: tuple[str, str], did: str) -> None:
    kind, factor = settings
    poison = (f"faults.poison.kind={kind}", f"faults.poison.factor={factor}", "faults.poison.share=0.25")
    (said,) = claims.PROSE.said("poisoned", parse("", [*poison, "privacy.unit=none", "data.format=prompt"]))
    assert "a share of 0.25 of the simulated sites, rounded and at least one, were attackers: they" in said
    assert did in said
    assert claims.PROSE.said("poisoned", parse("", [])) == ()


def test_public_records_and_base_models_are_named_as_not_covered() -> None:
    text = words(
        *TEXTS,
        *COMMON,
        "public.source=builtin:python-docs",
        "model.name=gpt2",
        "server.evaluation=held.jsonl",
    )
    assert "was trained before the first round: builtin:python-docs." in text
    assert "base model learned before the run, and from which data: gpt2." in text
    assert "on which the coordinator evaluates: held.jsonl." in text
    plain = words(*TEXTS, *COMMON)
    assert "before the first round" not in plain
    assert "base model" not in plain
    assert "coordinator evaluates" not in plain
    nothing = words()
    assert "Nothing here bounds" in nothing
    assert "epsilon" not in nothing


def test_a_unit_is_named_after_its_format() -> None:
    data = DataSection(sequence_length=128)
    private = PrivacySection(unit="record", windows=4)
    used = "of which the first 512 tokens are used"
    assert claims.unit_in_words(data, private) == f"one text, {used}"
    window = PrivacySection(unit="record", record="window")
    assert claims.unit_in_words(data, window) == "a window of 128 tokens of a text"


def test_unequal_steps_are_a_part_of_the_mechanism() -> None:
    site = ("privacy.unit=site", "privacy.noise_multiplier=1.0", *COMMON)
    scaled = "Each site first scales its update by the mean of the cohort's local steps over its own"
    assert f"{scaled}: the numbers are public" in words(*site, "local.balance=weighted")
    assert scaled not in words(*site)


def test_a_sentence_is_one_line_and_quotes_a_value_as_it_is() -> None:
    base = (*TEXTS, *COMMON, "privacy.unit=owner", "simulation.ledger=/ledger", "simulation.dataset='a  b'")
    said = words(*base, "data.owner='the  owner'", "public.source='my  texts.txt'")
    for value in ("charged the name 'a  b' in", "The field 'the  owner' has", "round: my  texts.txt."):
        assert value in said
    spaces = said.count("  ")
    assert spaces == said.count("a  b") + said.count("the  owner") + said.count("my  texts")
