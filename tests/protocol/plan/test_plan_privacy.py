"""Plans with and without privacy: what would not keep its guarantee is refused, with field, reason and fix."""

from importlib.resources import files
from pathlib import Path

import pytest

from cloister.protocol.errors import PlanError
from cloister.protocol.plan import soundness
from cloister.protocol.plan.soundness import load, parse
from cloister.protocol.plan.template import to_toml
from cloister.tests.tools.raises import raises

COMMON = ["aggregation.weighting=uniform", "server.evaluation=none"]
RECORD = [*COMMON, "privacy.unit=record", "privacy.noise_multiplier=1.0", "privacy.sampling_rate=0.1"]
OWNER = [*RECORD, "privacy.unit=owner", "data.owner=patient_id"]
SITE = [*COMMON, "privacy.unit=site", "privacy.noise_multiplier=1.0"]
NONE: list[str] = []

# The plan, what is changed in it, the field that the refusal begins with, and words of its reason and of its fix.
UNSOUND = [
    # How much noise, and how much may be spent.
    (
        RECORD,
        ["privacy.target_epsilon=2.0"],
        "privacy.noise_multiplier is 1.0",
        "remove privacy.target_epsilon",
    ),
    (
        SITE,
        ["privacy.target_epsilon=2.0"],
        "privacy.noise_multiplier is 1.0",
        "remove privacy.target_epsilon",
    ),
    (
        [*COMMON, "privacy.unit=site"],
        [],
        "privacy.noise_multiplier: expected a value",
        "or privacy.target_epsilon",
    ),
    (
        [*COMMON, "privacy.unit=record", "privacy.sampling_rate=0.1"],
        [],
        "privacy.noise_multiplier: expected a value",
        "or privacy.target_epsilon",
    ),
    (
        [*COMMON, "privacy.unit=site", "privacy.target_epsilon=2.0"],
        ["privacy.budget=1.0"],
        "privacy.budget is 1.0: expected no value; only valid with privacy.target_epsilon not set",
        "remove privacy.budget",
    ),
    # What leaves beside the noised sum.
    (RECORD, ["aggregation.weighting=tokens"], "aggregation.weighting is 'tokens'", 'weighting = "uniform"'),
    (SITE, ["aggregation.weighting=tokens"], "aggregation.weighting is 'tokens'", 'weighting = "uniform"'),
    (RECORD, ["server.evaluation=sites"], "server.evaluation is 'sites': expected another value", '"none"'),
    (SITE, ["server.evaluation=sites"], "server.evaluation is 'sites': expected another value", '"none"'),
    (
        RECORD,
        ["simulation.per_site=true"],
        "simulation.per_site is True: expected no value",
        "remove simulation.per_site",
    ),
    (
        SITE,
        ["simulation.per_site=true"],
        "simulation.per_site is True: expected no value",
        "remove simulation.per_site",
    ),
    # What the accountant assumes of batches.
    (
        [*COMMON, "privacy.unit=record", "privacy.noise_multiplier=1.0"],
        [],
        "privacy.sampling_rate: expected a value with privacy.unit",
        "set privacy.sampling_rate",
    ),
    (
        SITE,
        ["privacy.sampling_rate=0.1"],
        "privacy.sampling_rate is 0.1: expected no value",
        "remove privacy.sampling_rate",
    ),
    (
        RECORD,
        ["privacy.record=window", "data.format=prompt"],
        "privacy.record is 'window': expected no value",
        'set data.format = "text", or remove privacy.record',
    ),
    # Settings of one unit under the other, which would look as if they did something.
    (
        SITE,
        ["privacy.record=window"],
        "privacy.record is 'window'",
        'only valid with privacy.unit = "record" or "owner": without',
    ),
    (
        SITE,
        ["privacy.windows=2"],
        "privacy.windows is 2",
        'only valid with privacy.unit = "record" or "owner": without',
    ),
    (
        SITE,
        ["privacy.method=opacus"],
        "privacy.method is 'opacus'",
        'only valid with privacy.unit = "record" or "owner": without',
    ),
    (
        RECORD,
        ["privacy.trusted_coordinator=true"],
        "privacy.trusted_coordinator",
        'only valid with privacy.unit = "site": without',
    ),
    (RECORD, ["privacy.adaptive={}"], "privacy.adaptive", "remove privacy.adaptive"),
    (OWNER, ["privacy.adaptive={}"], "privacy.adaptive", "remove privacy.adaptive"),
    (
        RECORD,
        ["privacy.records=2"],
        "privacy.records is 2",
        'only valid with privacy.unit = "owner": without',
    ),
    (SITE, ["privacy.records=2"], "privacy.records is 2", 'only valid with privacy.unit = "owner": without'),
    # Who a record belongs to.
    (OWNER, ["data.owner=''"], "data.owner is '': expected another value", "set data.owner"),
    (
        RECORD,
        ["data.owner=patient"],
        "data.owner is 'patient': expected no value",
        'set privacy.unit = "none" or "owner"',
    ),
    (SITE, ["data.owner=patient"], "data.owner is 'patient': expected no value", "or remove data.owner"),
    (OWNER, ["aggregation.weighting=tokens"], "aggregation.weighting is 'tokens'", 'weighting = "uniform"'),
    (OWNER, ["server.evaluation=sites"], "server.evaluation is 'sites': expected another value", '"none"'),
    # No party adds enough noise.
    (
        SITE,
        ["aggregation.secure=false"],
        'aggregation.secure is False: expected true with privacy.unit = "site"',
        "privacy.trusted_coordinator = true if you do",
    ),
    # A guarantee that is not there.
    (NONE, ["privacy.adaptive={}"], "privacy.adaptive is 'set'", 'privacy.unit = "site"'),
    *(
        (NONE, [f"privacy.{setting}"], f"privacy.{setting.split('=')[0]} is", "or remove privacy.")
        for setting in (
            "clip=0.5",
            "noise_multiplier=1.0",
            "target_epsilon=2.0",
            "delta=1e-6",
            "budget=3.0",
            "accountant=rdp",
            "sampling_rate=0.1",
            "record=window",
            "windows=2",
            "records=2",
            "method=opacus",
            "trusted_coordinator=true",
        )
    ),
]

SOUND = {
    "nothing promised": NONE,
    "record": RECORD,
    "record in clear, because the noise is in the update": [*RECORD, "aggregation.secure=false"],
    "record by a target": [
        *COMMON,
        "privacy.unit=record",
        "privacy.target_epsilon=3.0",
        "privacy.sampling_rate=0.1",
    ],
    "record with a budget": [*RECORD, "privacy.budget=3.0"],
    "record of windows": [*RECORD, "privacy.record=window"],
    "every record in every batch": [*RECORD, "privacy.sampling_rate=1.0"],
    "owner": OWNER,
    "owner with one record each": [*OWNER, "privacy.records=1"],
    "owner of windows": [*OWNER, "privacy.record=window"],
    "owner in clear, because the noise is in the update": [*OWNER, "aggregation.secure=false"],
    "site": SITE,
    "site by a target": [*COMMON, "privacy.unit=site", "privacy.target_epsilon=3.0"],
    "site with adaptive clipping": [*SITE, "privacy.adaptive={count_noise=2.0}"],
    "site with a trusted coordinator": [*SITE, "privacy.trusted_coordinator=true"],
    "site with a trusted coordinator, in clear": [
        *SITE,
        "privacy.trusted_coordinator=true",
        "aggregation.secure=false",
    ],
}


def refusal(settings: list[str]) -> str:
    with pytest.raises(PlanError) as caught:
        parse("", settings)
    return str(caught.value)


@pytest.mark.parametrize(("base", "changes", "field", "fix"), UNSOUND, ids=lambda value: str(value)[-60:])
def test_what_would_not_keep_its_guarantee_is_refused(
    base: list[str], changes: list[str], field: str, fix: str
) -> None:
    line = refusal([*base, *changes])
    assert line.startswith(field)
    assert fix in line
    assert "\n" not in line


def test_without_these_checks_every_one_of_those_plans_would_be_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So none of them is refused for another reason, and each row above tests its own check."""
    for check in ("_of_effect", "_of_guarantee"):
        monkeypatch.setattr(soundness, check, lambda plan: iter(()))
    for base, changes, _, _ in UNSOUND:
        parse("", [*base, *changes])


@pytest.mark.parametrize("settings", SOUND.values(), ids=SOUND)
def test_sound_plans_are_taken(settings: list[str]) -> None:
    plan = parse("", settings)
    assert soundness.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("setting", ["noise_multiplier=2.0", "delta=1e-6", "clip=0.5", "budget=9.0"])
def test_the_guarantee_is_part_of_what_the_parties_agree_on(setting: str) -> None:
    assert parse("", [*SITE, f"privacy.{setting}"]).digest() != parse("", SITE).digest()


def test_a_declared_seed_of_the_noise_is_none_of_the_contract() -> None:
    """It is of a simulation alone: a real site has no way to be given one."""
    assert parse("", [*SITE, "simulation.noise_seed=7"]).digest() == parse("", SITE).digest()


@pytest.mark.parametrize("scheme", ["flora", "fedex-lora"])
@pytest.mark.parametrize("base", [NONE, RECORD, SITE], ids=["none", "record", "site"])
def test_adapters_that_cannot_be_summed_are_refused(base: list[str], scheme: str) -> None:
    line = refusal([*base, f"model.adapter.scheme={scheme}"])
    assert line.startswith("model.adapter.scheme")
    assert "each site's own factors" in line
    assert '"ffa-lora"' in line


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (["cohort.sites=2"], "cohort.sites"),
        (["cohort.fraction=0.25"], "cohort.fraction"),
        (["aggregation.dropouts=0.5"], "aggregation.dropouts"),
        (["aggregation.ring_bits=16", "cohort.sites=20000"], "aggregation.ring_bits"),
    ],
)
def test_a_secure_sum_that_protects_nobody_is_refused_under_privacy_too(
    changes: list[str], field: str
) -> None:
    assert refusal([*SITE, *changes]).startswith(field)


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("privacy.noise_multiplier=0.0", "privacy.noise_multiplier"),
        ("privacy.noise_multiplier=-1.0", "privacy.noise_multiplier"),
        ("privacy.noise_multiplier=inf", "privacy.noise_multiplier"),
        ("privacy.noise_multiplier=nan", "privacy.noise_multiplier"),
        ("privacy.clip=0.0", "privacy.clip"),
        ("privacy.clip=inf", "privacy.clip"),
        ("privacy.delta=0.0", "privacy.delta"),
        ("privacy.delta=1.0", "privacy.delta"),
        ("privacy.budget=0.0", "privacy.budget"),
        ("privacy.sampling_rate=0.0", "privacy.sampling_rate"),
        ("privacy.sampling_rate=1.5", "privacy.sampling_rate"),
        ("privacy.unit=patient", "privacy.unit"),
        ("privacy.noise=1.0", "privacy.noise"),
        ("privacy.adaptive={quantile=1.0}", "privacy.adaptive.quantile"),
        ("privacy.adaptive={count_noise=0.0}", "privacy.adaptive.count_noise"),
    ],
)
def test_values_out_of_range_are_named(setting: str, field: str) -> None:
    assert refusal([*SITE, setting]).startswith(field)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("private-code.toml", "record"),
        ("private-sites.toml", "site"),
        ("correlated-sites.toml", "site"),
        ("not-private.toml", "none"),
        ("classify.toml", "none"),
        ("clinical-notes.toml", "owner"),
        ("masked.toml", "none"),
        *((f"flowertune-{task}.toml", "none") for task in ("general", "finance", "medical", "code")),
    ],
)
def test_shipped_plans_protect_what_their_names_say(name: str, unit: str) -> None:
    plan = load(Path(str(files("cloister.protocol.plan.shipped").joinpath(name))))
    assert plan.privacy.unit == unit


@pytest.mark.parametrize("clip", ["1e-7", "1e7", "inf"])
def test_a_clipping_norm_that_float32_has_no_room_for_is_refused(clip: str) -> None:
    """Rounding could lift a clipped gradient above it, and the failure would tell of the record."""
    with raises(PlanError, "privacy.clip"):
        parse("", [*RECORD, f"privacy.clip={clip}"])


@pytest.mark.parametrize(
    ("mechanism", "override", "field", "removed"),
    [
        (
            [*SITE, "privacy.trusted_coordinator=true", "privacy.adaptive.quantile=0.4"],
            ["privacy.unit=none"],
            "privacy.noise_multiplier",
            "remove privacy.noise_multiplier and privacy.trusted_coordinator and privacy.adaptive",
        ),
        (
            [*OWNER, "privacy.records=2", "privacy.windows=2"],
            ["privacy.unit=site"],
            "data.owner",
            "remove data.owner and privacy.sampling_rate and privacy.windows and privacy.records",
        ),
        (
            [*OWNER, "privacy.records=2"],
            ["privacy.unit=record"],
            "data.owner",
            "remove data.owner and privacy.records",
        ),
        (
            [*RECORD, "privacy.windows=2"],
            ["data.task=classify", 'data.classes=["a","b"]'],
            "privacy.windows",
            "remove privacy.windows",
        ),
    ],
)
def test_an_override_drops_no_part_of_the_mechanism(
    mechanism: list[str], override: list[str], field: str, removed: str
) -> None:
    text = to_toml(parse("", mechanism), comments=False)
    with raises(PlanError, field, says="only valid") as refused:
        parse(text, override)
    assert refused.value.fix.endswith(removed)
