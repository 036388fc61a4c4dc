"""The plan: sound or refused, with one line that names field, value, expectation and fix."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cloister.protocol.errors import PlanError
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import load, parse
from cloister.tests.tools.raises import raises


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        parse(text, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("plan", sorted(files("cloister.protocol.plan.shipped").iterdir(), key=str), ids=str)
def test_shipped_plans_are_sound(plan: Path) -> None:
    if plan.name.endswith(".toml"):
        assert parse(plan.read_text(encoding="utf-8")).run.name == plan.name.removesuffix(".toml")


def test_json_round_trip_keeps_the_plan_and_its_digest() -> None:
    plan = parse(
        "[run]\nseed = 3\n[local]\nbetas = [0.8, 0.9]\n[[simulation.profiles]]\nshare = 0.5\nspeed = 0.5\n"
    )
    again = soundness.from_json(plan.to_json())
    assert again == plan
    assert again.digest() == plan.digest()
    assert again.to_json() == plan.to_json()


def test_digest_is_that_of_canonical_json_without_simulation() -> None:
    import hashlib

    plan = parse("")
    tree = json.loads(plan.to_json())
    del tree["simulation"], tree["faults"]
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert plan.digest() == hashlib.sha256(canonical).hexdigest()


@given(
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(1e-9, 1e3),
    name=st.from_regex(r"[A-Za-z0-9][\w.-]{0,20}", fullmatch=True).filter(str.isascii),
)
def test_any_change_of_the_contract_changes_the_digest(seed: int, rate: float, name: str) -> None:
    plan = parse(f'[run]\nseed = {seed}\nname = "{name}"\n[local]\nlearning_rate = {rate!r}\n')
    assert soundness.from_json(plan.to_json()) == plan
    other = parse("", [f"run.seed={seed}", f"run.name='{name}'", f"local.learning_rate={rate!r}"])
    assert other.digest() == plan.digest()
    changed = plan.model_copy(update={"local": plan.local.model_copy(update={"steps": plan.local.steps + 1})})
    assert changed.digest() != plan.digest()


def test_how_a_machine_plays_the_federation_is_not_in_the_digest() -> None:
    for setting in ("simulation.partition=iid", "faults.update=0.5"):
        assert parse("", [setting]).digest() == parse("").digest()
    assert parse("", ["aggregation.secure=false"]).digest() != parse("").digest()


def test_every_field_says_what_it_means() -> None:
    def silent(section: type[BaseModel], path: str) -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            if not field.description:
                missing.append(f"{path}{name}")
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                missing += silent(field.annotation, f"{path}{name}.")
        return missing

    assert silent(Plan, "") == []


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("local.stepz=3", ["local.stepz", "steps", "did you mean local.steps?"]),
        ("local.rounds=3", ["local.rounds", "did you mean run.rounds?"]),
        ("locale.steps=3", ["locale", "did you mean local?"]),
        ("simulation.profiles=[{share=0.5, sped=1.0}]", ["sped", "did you mean", "speed"]),
        ("local.steps='many'", ["local.steps", "'many'", "integer"]),
        ("local.steps=1.5", ["local.steps", "1.5", "integer"]),
        ("local.steps=0", ["local.steps", "0", "greater than or equal to 1"]),
        ("local.steps=true", ["local.steps", "True", "integer"]),
        ("local.learning_rate=nan", ["local.learning_rate", "nan"]),
        ("local.learning_rate=-1", ["local.learning_rate", "-1"]),
        ("local.optimizer_state=kept", ["local.optimizer_state", "'kept'", "'reset' or 'keep'"]),
        ("local.betas=[0.9]", ["local.betas"]),
        ("run.name=''", ["run.name"]),
        ("run.name='../x'", ["run.name", "'../x'"]),
        ("local=3", ["--set", "section.key=value"]),
        ("run.seed.x=3", ["run.seed", "integer"]),
        ("nonsense", ["--set", "'nonsense'", "section.key=value"]),
        ("aggregation.ring_bits=24", ["aggregation.ring_bits", "24", "16 or 32"]),
    ],
)
def test_what_is_wrong_is_named(override: str, parts: list[str]) -> None:
    line = refusal("", override)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("overrides", "field", "fix"),
    [
        (["aggregation.ring_bits=16", "cohort.sites=20000"], "aggregation.ring_bits", "ring_bits = 32"),
        (["cohort.sites=2"], "cohort", "aggregation.secure = false"),
        (["cohort.fraction=0.25"], "cohort.fraction", "aggregation.secure = false"),
        (["aggregation.dropouts=0.5"], "aggregation.dropouts", "lower aggregation.dropouts"),
        (["aggregation.colluders=0.9", "aggregation.dropouts=0.2"], "aggregation.dropouts", "lower"),
        (["model.name=gpt2", "model.config={hidden_size=3}"], "model.config", "remove model.config"),
        (
            ["cohort.sites=40", "cohort.fraction=0.5", "local.optimizer_state=keep"],
            "local.optimizer_state",
            'local.optimizer_state = "reset", or cohort.fraction = 1',
        ),
        (
            [
                "cohort.sites=30",
                "aggregation.groups=3",
                "server.evaluation=none",
                "local.optimizer_state=keep",
                "local.balance=weighted",
            ],
            "local.optimizer_state",
            'local.balance = "fixed"',
        ),
        (["local.momentum=0.9"], "local.momentum", '= "muon"'),
        (["local.optimizer=sgd", "local.betas=[0.8, 0.9]"], "local.betas", '= "adamw"'),
        (["local.optimizer=sgd", "local.optimizer_state=keep"], "local.optimizer_state", 'other than "sgd"'),
        (
            [
                *("local.optimizer=sgd", "local.clip_norm=0"),
                *("aggregation.compression={}", "aggregation.ring_bits=8"),
            ],
            "aggregation.compression.first_scale",
            "local.clip_norm = 1.0",
        ),
        (
            [
                "local.optimizer=sgd",
                "local.clip_norm=0",
                "aggregation.secure=false",
                "aggregation.norm_bound=auto",
            ],
            "aggregation.norm_bound",
            "local.clip_norm = 1.0",
        ),
        (["aggregation.norm_bound=1.0"], "aggregation.norm_bound", 'privacy.unit = "record"'),
        (
            [
                *("aggregation.norm_bound=auto", "privacy.unit=site", "privacy.noise_multiplier=1.0"),
                *("server.evaluation=none", "aggregation.weighting=uniform"),
            ],
            "aggregation.norm_bound",
            "remove aggregation.norm_bound",
        ),
        (["model.adapter.base_precision=nf4"], "model.adapter.base_precision", 'scheme = "ffa-lora"'),
        (
            [
                *("model.adapter.scheme=lora", "model.adapter.base_precision=bfloat16"),
                "local.precision=float32",
            ],
            "local.precision",
            '= "auto"',
        ),
        (["data.held_out=0"], "data.held_out", "held_out = 0.1"),
        (["simulation.profiles=[{share=0.8},{share=0.3}]"], "simulation.profiles", "add up to at most 1"),
    ],
)
def test_unsound_combinations_are_refused_with_the_fix(overrides: list[str], field: str, fix: str) -> None:
    line = refusal("", *overrides)
    assert line.startswith(field)
    assert fix in line


def test_files_that_are_no_plan_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text(" \n")
    (tmp_path / "broken.toml").write_text("[run\n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "date.toml").write_text("[run]\nname = 2020-01-01\n")
    for name, says in [
        ("missing.toml", "existing"),
        ("empty.toml", "is empty"),
        ("broken.toml", "valid TOML"),
        ("binary.toml", "readable"),
        ("date.toml", "no dates"),
        ("", "readable"),
    ]:
        with raises(PlanError, "plan", says=says) as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_an_override_drops_what_it_leaves_without_effect() -> None:
    text = '[server]\noptimizer = "nesterov"\nmomentum = 0.3'
    assert parse(text, ["server.optimizer=adam"]) == parse("", ["server.optimizer=adam"])
    with raises(PlanError, "server.momentum", says="0.3"):
        parse('[server]\noptimizer = "adam"\nmomentum = 0.3', ["run.rounds=3"])
    gated = '[server]\nevaluation = "public.jsonl"\n[server.gate]\nloss = 0.02'
    with raises(PlanError, "server.gate.loss", says="0.02"):
        parse(gated, ["server.evaluation=none"])
    with raises(PlanError, "server.momentum", says="0.2"):
        parse(text, ["server.optimizer=adam", "server.momentum=0.2"])
