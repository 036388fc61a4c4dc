"""A site's policy: each demand below, at and above what it allows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.privacy.ledger import policy as policies
from cloister.privacy.ledger.policy import Policy, load_policy
from cloister.protocol.errors import PolicyError
from cloister.protocol.plan.plan import AdapterSection, Plan, PrivacySection
from cloister.protocol.plan.soundness import parse
from cloister.protocol.questions.registry import KINDS
from cloister.tests.parties.federation import changed
from cloister.tests.tools.raises import raises

HASH = "ab" * 32

PLAN: Plan = parse("", ["run.rounds=10", "data.sequence_length=64"])
PLAN = changed(PLAN, "privacy", unit="record", delta=1e-5)
PLAN = changed(PLAN, "model", name="meta-llama/Llama-3.2-1B", adapter=AdapterSection(scheme="ffa-lora"))

PLACES = {
    "window": ("data", "sequence_length"),
    "owner_field": ("data", "owner"),
    "delta": ("privacy", "delta"),
    "trusted_coordinator": ("privacy", "trusted_coordinator"),
    "secure": ("aggregation", "secure"),
    "norm_bound": ("aggregation", "norm_bound"),
    "attempts": ("cohort", "attempts"),
    "model": ("model", "name"),
    "tokenizer": ("model", "tokenizer"),
    "revision": ("model", "revision"),
    "rounds": ("run", "rounds"),
}
"""Where the plan has what it offers."""


@dataclasses.dataclass(frozen=True)
class Offer:
    """A plan, and what the site knows of it."""

    plan: Plan = PLAN
    noise: float = 1.0
    epsilon: float = 8.0
    cohort: int = 8
    roster_hash: str = HASH

    def but(self, **values: Any) -> Offer:
        """This offer with other values, which the plan need not allow."""
        plan = self.plan
        for name in values.keys() - Offer.__dataclass_fields__:
            value = values.pop(name)
            if name == "unit":
                window = value == "window"
                unit, record = ("record", "window") if window else (value, "record")
                plan = changed(plan, "privacy", unit=unit, record=record)
            elif name == "adapter":
                plan = changed(plan, "model", adapter=plan.model.adapter.model_copy(update={"scheme": value}))
            else:
                section, field = PLACES[name]
                plan = changed(plan, section, **{field: value})
        return dataclasses.replace(self, plan=plan, **values)

    def check(self, demanded: Policy) -> None:
        figures = {field: getattr(self, field) for field in ("noise", "epsilon", "cohort", "roster_hash")}
        demanded.check(self.plan, **figures)


OFFER = Offer()


def policy(path: Path, text: str) -> Policy:
    path.write_text(text, encoding="utf-8")
    return load_policy(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


# demand as in TOML, field of the offer, what passes, what does not
DEMANDS: list[tuple[str, str, list[Any], list[Any]]] = [
    ('units = ["record"]', "unit", ["record"], ["none", "window", "owner", "site"]),
    ('units = ["owner"]', "unit", ["owner"], ["none", "record", "window", "site"]),
    ('units = ["window"]', "unit", ["window"], ["none", "record", "site"]),
    ('units = ["record", "site"]', "unit", ["record", "site"], ["none", "window", ""]),
    ('units = ["none", "record", "site"]', "unit", ["none", "record", "site"], ["window", "other"]),
    ('least_window = 64\nunits = ["window"]', "window", [64, 65], [63, 0, -64, math.nan]),
    (
        'owner_fields = ["patient_id", "person"]',
        "owner_field",
        ["patient_id", "person"],
        ["note_id", "Patient_id", ""],
    ),
    ("least_noise = 1", "noise", [1.0, 1.5], [math.nextafter(1, 0), 0.0, -1.0, math.nan]),
    (
        "greatest_epsilon = 8.0\ngreatest_delta = 0.5",
        "epsilon",
        [0.0, 7.5, 8.0],
        [math.nextafter(8, 9), 20.0, math.inf, math.nan],
    ),
    ("greatest_delta = 1e-6", "delta", [1e-7, 1e-6], [math.nextafter(1e-6, 1), 1e-5, math.nan]),
    ("trusted_coordinator = false", "trusted_coordinator", [False], [True]),
    ("trusted_coordinator = true", "trusted_coordinator", [True, False], []),
    ("least_cohort = 8", "cohort", [8, 9], [7, 0, -8]),
    ("secure_required = true", "secure", [True], [False, 1, None]),
    ("secure_required = false", "secure", [True, False], []),
    ("sketches = 0", "norm_bound", [None], [1.0, "auto"]),
    ("sketches = 3", "norm_bound", [None, 1.0, "auto"], []),
    (f'roster_hash = "{HASH}"', "roster_hash", [HASH, HASH.upper()], ["", "cd" * 32, HASH[:-1]]),
    ('models = ["builtin:llama"]', "model", ["builtin:llama"], ["builtin:llama2", "Builtin:llama", ""]),
    (
        'models = ["meta-llama/*", "gpt2"]',
        "model",
        ["meta-llama/x", "gpt2"],
        ["meta-llama", "evil/meta-llama/x", "gpt2-xl"],
    ),
    ('tokenizers = ["bytes"]', "tokenizer", ["bytes"], ["byte", "Bytes", "/tmp/bytes", "builtin:llama", ""]),
    (
        'tokenizers = ["meta-llama/*", "gpt2"]',
        "tokenizer",
        ["meta-llama/x", "gpt2"],
        ["meta-llama", "evil/meta-llama/x", "gpt2-xl", "bytes"],
    ),
    ('adapters = ["ffa-lora", "rolora"]', "adapter", ["ffa-lora", "rolora"], ["lora", "full", ""]),
    ("most_rounds = 10", "rounds", [1, 9, 10], [11, 1000]),
]


@pytest.mark.parametrize(("demand", "field", "passes", "refused"), DEMANDS, ids=[each[0] for each in DEMANDS])
def test_a_demand_lets_pass_what_meets_it_and_nothing_else(
    path: Path, demand: str, field: str, passes: list[Any], refused: list[Any]
) -> None:
    demanded = policy(path, demand)
    offer = OFFER.but(unit={"window": "window", "owner_field": "owner"}.get(field, "record"))
    for value in passes:
        offer.but(**{field: value}).check(demanded)
    for value in refused:
        with pytest.raises(PolicyError) as error:
            offer.but(**{field: value}).check(demanded)
        assert error.value.value is value  # what is offered
        assert demand.split(" = ")[0] in str(error.value)  # by which demand
        assert error.value.expected


@pytest.mark.parametrize(
    ("demand", "field", "refused"),
    [
        (demand, field, refused)
        for demand, field, _, refused in DEMANDS
        if field not in ("epsilon", "delta") and '"none"' not in demand
    ],
)
def test_an_offer_that_another_demand_refuses_tells_nothing_of_the_spending(
    path: Path, demand: str, field: str, refused: list[Any]
) -> None:
    """Otherwise refusals of plans that cannot be accepted would tell, one after the other, what is left."""
    demanded = policy(path, f"greatest_epsilon = 8.0\ngreatest_delta = 0.5\n{demand}")
    unit = {"window": "window", "owner_field": "owner"}.get(field, "record")
    for value in refused:
        said = set()
        for spent in (0.1, 1e6):
            offer = OFFER.but(unit=unit, epsilon=spent)
            with pytest.raises(PolicyError) as error:
                offer.but(**{field: value}).check(demanded)
            said.add(str(error.value))
        assert len(said) == 1


def test_the_sketches_of_an_update_are_counted(path: Path) -> None:
    """A family of plans may have cohorts with more attempts."""
    demanded, offer = policy(path, "sketches = 2"), OFFER.but(norm_bound=1.0)
    for attempts in (1, 2):
        offer.but(attempts=attempts).check(demanded)
    with raises(PolicyError, "sketches of one update (cohort.attempts)"):
        offer.but(attempts=3).check(demanded)
    OFFER.but(attempts=3).check(demanded)


def test_every_demand_is_tried() -> None:
    assert {each[0].split(" = ")[0] for each in DEMANDS} == set(Policy.model_fields) - {
        "families",
        "packages",
        "questions",
        "greatest_question_epsilon",
    }


def test_a_family_of_plans_is_no_demand_and_needs_a_limit_over_runs(path: Path) -> None:
    family = f'families = ["{"a" * 64}"]'
    with raises(PolicyError, f"{path}: families"):
        policy(path, family)
    OFFER.check(policy(path, f"{family}\ngreatest_epsilon = 8.0\ngreatest_delta = 0.5"))


@pytest.mark.parametrize("unit", ["none", "record", "site"])
def test_the_length_of_a_window_counts_where_a_window_is_the_unit(path: Path, unit: str) -> None:
    demanded = policy(path, 'least_window = 64\nunits = ["none", "record", "window", "site"]')
    short = OFFER.but(unit=unit, window=2)
    short.check(demanded)
    with raises(PolicyError, "tokens in a window", says="least_window"):
        short.but(unit="window").check(demanded)


@pytest.mark.parametrize(
    ("demand", "field"),
    [
        ("least_noise", "noise multiplier"),
        ("greatest_epsilon", "policy.toml: greatest_epsilon"),
        ("greatest_delta", "privacy.delta"),
        ("least_cohort", "fewest sites in a sum"),
        ("units", "unit of privacy"),
    ],
)
def test_without_the_demand_the_same_offer_passes(path: Path, demand: str, field: str) -> None:
    """So that each refusal comes from its own demand."""
    offer = OFFER.but(unit="site", noise=0.1, delta=0.1, epsilon=90.0, cohort=4)
    demands = {
        "units": '["record"]',
        "least_noise": "1.0",
        "greatest_epsilon": "8.0",
        "greatest_delta": "1e-6",
        "least_cohort": "8",
    }
    with raises(PolicyError, field, says=demand):
        offer.check(policy(path, f"{demand} = {demands[demand]}"))
    offer.check(policy(path, "secure_required = true"))


def test_a_message_says_what_is_demanded_offered_and_accepted(path: Path) -> None:
    with pytest.raises(PolicyError) as error:
        OFFER.check(policy(path, "greatest_epsilon = 4.0\ngreatest_delta = 0.5"))
    assert str(error.value) == (
        "epsilon of the site's data after the run is 8.0: expected at most 4.0, by greatest_epsilon of the site's "
        "policy"
    )
    with raises(PolicyError, "model.adapter.scheme", says="ffa-lora, rolora"):
        OFFER.but(adapter="lora").check(policy(path, 'adapters = ["ffa-lora", "rolora"]'))


def test_what_is_left_out_still_demands_a_guarantee_masks_and_a_cohort(path: Path) -> None:
    least = policy(path, "most_rounds = 1000")
    OFFER.check(least)
    changes: tuple[dict[str, Any], ...] = (
        {"unit": "none"},
        {"unit": "window"},
        {"secure": False},
        {"trusted_coordinator": True},
        {"cohort": 2},
    )
    for change in changes:
        with pytest.raises(PolicyError):
            OFFER.but(**change).check(least)


@given(
    noise=st.floats(),
    epsilon=st.floats(),
    least=st.floats(0, 100),
    greatest=st.floats(0, 100, exclude_min=True),
)
def test_figures_pass_exactly_where_they_are_within_both_limits(
    noise: float, epsilon: float, least: float, greatest: float
) -> None:
    demanded = Policy(least_noise=least, greatest_epsilon=greatest, greatest_delta=0.5)
    try:
        OFFER.but(noise=noise, epsilon=epsilon).check(demanded)
        passed = True
    except PolicyError:
        passed = False
    assert passed == (noise >= least and epsilon <= greatest)


# The file


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("", "", "empty"),
        ("# greatest_epsilon = 1\n", "", "at least one demand"),
        ("greatest_epsilom = 1.0", "greatest_epsilom", "mean greatest_epsilon?"),
        ("[privacy]\nleast_noise = 1.0", "privacy", "one of the keys"),
        ("least_noise = nan", "least_noise", "nan"),
        ("least_noise = -1.0", "least_noise", "equal to 0"),
        ("greatest_epsilon = 1.0", "greatest_epsilon", "greatest_delta"),
        ("greatest_epsilon = inf", "greatest_epsilon", "inf"),
        ("greatest_epsilon = 0.0", "greatest_epsilon", "greater than 0"),
        ('greatest_epsilon = "8"', "greatest_epsilon", "a number"),
        ("greatest_delta = 1.0", "greatest_delta", "less than 1"),
        ("least_window = 0", "least_window", "equal to 1"),
        ("least_window = 1.5", "least_window", "an integer"),
        ("trusted_coordinator = 1", "trusted_coordinator", "a boolean"),
        ("least_cohort = 0", "least_cohort", "0"),
        ("least_cohort = 3.5", "least_cohort", "an integer"),
        ("secure_required = 1", "secure_required", "a boolean"),
        ('roster_hash = "abc"', "roster_hash", "64 hexadecimal digits"),
        ("units = []", "units", "at least 1 item"),
        ('units = "record"', "units", "array"),
        ('units = ["records"]', "units[0]", "'none', 'record', 'window', 'owner' or 'site'"),
        ('adapters = ["dora"]', "adapters[0]", "'full', 'ffa-lora', 'rolora' or 'lora'"),
        ('models = [""]', "models[0]", "at least 1 character"),
        ("most_rounds = 0", "most_rounds", "0"),
        ("most_rounds = 2026-01-01", "", "no dates"),
        ("most_rounds = ", "", "valid TOML"),
        ('units = ["none", "record"]\nleast_noise = 1.0', "units", "least_noise"),
        ('units = ["none"]\ngreatest_epsilon = 1.0', "units", "greatest_epsilon"),
        ('units = ["none"]\ngreatest_delta = 1e-5', "units", "greatest_delta"),
    ],
)
def test_a_wrong_policy_is_refused_in_one_line(path: Path, text: str, key: str, says: str) -> None:
    with raises(PolicyError, f"{path}: {key}" if key else "policy", says=says) as error:
        policy(path, text)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_policy_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with raises(PolicyError, "policy", says="existing"):
        load_policy(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'models = ["\xff"]')
    with raises(PolicyError, "policy", says="readable"):
        load_policy(tmp_path / "latin.toml")


def test_units_and_schemes_are_those_of_a_plan() -> None:
    units, pieces = (get_args(PrivacySection.model_fields[name].annotation) for name in ("unit", "record"))
    assert set(get_args(policies.Unit)) == {*units, *pieces}
    assert get_args(policies.Scheme) == get_args(AdapterSection.model_fields["scheme"].annotation)


# What a plan offers


@pytest.mark.parametrize(
    ("unit", "record", "offered"),
    [
        ("record", "record", "record"),
        ("record", "window", "window"),
        ("owner", "record", "owner"),
        ("owner", "window", "owner"),
        ("site", "record", "site"),
        ("none", "record", "none"),
    ],
)
def test_a_window_is_a_unit_of_its_own(unit: str, record: str, offered: str) -> None:
    offer = Offer(changed(PLAN, "privacy", unit=unit, record=record))
    for each in get_args(policies.Unit):
        if each == offered:
            offer.check(Policy(units=(each,)))
        else:
            with raises(PolicyError, "unit of privacy", says=(each, repr(offered))):
                offer.check(Policy(units=(each,)))


def _listing(demand: str, patterns: tuple[str, ...]) -> Policy:
    return Policy(models=patterns) if demand == "models" else Policy(tokenizers=patterns)


@pytest.mark.parametrize("demand", ["models", "tokenizers"])
def test_a_name_stands_for_its_main_branch_alone(demand: str) -> None:
    """Somebody may open a pull request, which is a revision of another's repository."""
    offer = OFFER.but(model="acme/chat", tokenizer="auto", revision="refs/pr/7")
    for patterns in (("acme/chat",), ("acme/*",), ("*@main",), ("acme/chat@refs/pr/8", "other@refs/pr/7")):
        with raises(PolicyError, "model.name" if demand == "models" else "model.tokenizer"):
            offer.check(_listing(demand, patterns))
    for patterns in (("acme/chat@refs/pr/7",), ("bytes", "acme/*@refs/pr/*")):
        offer.check(_listing(demand, patterns))
    OFFER.but(model="acme/chat", tokenizer="auto").check(_listing(demand, ("acme/chat",)))
    if demand == "tokenizers":  # another repository's is read at its main branch
        other = OFFER.but(model="acme/chat", tokenizer="acme/words", revision="refs/pr/7")
        other.check(Policy(tokenizers=("acme/words",)))


@pytest.mark.parametrize(
    ("model", "tokenizer", "offered"),
    [
        ("builtin:llama", "auto", "bytes"),
        ("gpt2", "auto", "gpt2"),
        ("gpt2", "bytes", "bytes"),
        ("gpt2", "owner/other", "owner/other"),
        ("builtin:llama", "owner/other", "owner/other"),
    ],
)
def test_a_tokenizer_is_offered_by_what_is_loaded(model: str, tokenizer: str, offered: str) -> None:
    offer = OFFER.but(model=model, tokenizer=tokenizer)
    offer.check(Policy(tokenizers=(offered,)))
    with raises(PolicyError, "model.tokenizer", says=(repr(offered), "bytes2")):
        offer.check(Policy(tokenizers=("bytes2",)))


@pytest.mark.parametrize(
    ("fields", "trusted"),
    [
        ({"unit": "site", "trusted_coordinator": True}, True),
        ({"unit": "record", "method": "opacus"}, True),
        ({"unit": "record"}, False),
    ],
)
def test_an_offer_says_whether_the_guarantee_depends_on_the_coordinator(
    fields: dict[str, Any], trusted: bool
) -> None:
    offer = Offer(changed(PLAN, "privacy", **fields))
    if trusted:
        with raises(PolicyError, 'privacy.trusted_coordinator, or privacy.method = "opacus",'):
            offer.check(Policy())
    else:
        offer.check(Policy())
    offer.check(Policy(trusted_coordinator=True))


def test_a_policy_can_list_each_kind_of_question() -> None:
    assert {*get_args(policies.QuestionKind)} == KINDS.keys()
