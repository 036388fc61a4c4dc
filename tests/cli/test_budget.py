"""`cloister budget`: epsilon, noise and table from the command line, for people and for programs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloister.cli.main import main
from cloister.cli.verbs.plan import privacy_rows
from cloister.privacy.accounting.accountant import spent
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.mechanism.events import (
    Gaussian,
    SampledGaussian,
)
from cloister.privacy.mechanism.site_noise import skellam_for
from cloister.privacy.mechanism.unit_sum import Shape, unit_sum
from cloister.privacy.report.figures import at_most
from cloister.protocol.plan.soundness import load, shipped_plans
from cloister.protocol.questions.kind import question_of

OWNERS = "adding or removing all records of one owner at one site"
SITES = "adding or removing all records of one site, which sends zeros in every coordinate if it has none"
KEYS = {"epsilon", "delta", "noise_multiplier", "accountant", "unit", "relation"}
STEPS = "--set local.steps=50 --set privacy.sampling_rate=0.01 --set privacy.delta=1e-5"
OWNER = "--set privacy.unit=owner --set data.owner=who"


def done(capsys: pytest.CaptureFixture[str], line: str) -> str:
    capsys.readouterr()
    code = main(["budget", *line.split()])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return streams.out


def found(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    answer = json.loads(done(capsys, f"{line} --json"))
    assert isinstance(answer, dict)
    return answer


def test_epsilon_of_a_noise_for_records(capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, f"--noise-multiplier 0.6 {STEPS} --set local.steps=5 --rounds 12")
    expected = spent([SampledGaussian(0.6, 0.01, 60)], 1e-5)
    assert answer == {
        "epsilon": expected.epsilon,
        "delta": 1e-5,
        "noise_multiplier": 0.6,
        "accountant": "pld",
        "unit": "record",
        "relation": "adding or removing one such window at one site",
    }


@pytest.mark.slow
def test_epsilon_of_owners_and_of_several_records_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--noise-multiplier 1 {STEPS} --rounds 10"
    owner = found(capsys, f"{OWNER} {options}")
    assert (owner["unit"], owner["relation"]) == ("owner", OWNERS)
    assert owner["epsilon"] == pytest.approx(1.3261, abs=1e-3)
    record = found(capsys, f"{options} --group 4")
    assert set(record) == KEYS | {"group", "group_epsilon"}
    assert record["epsilon"] == owner["epsilon"]
    assert record["group_epsilon"] == pytest.approx(6.2431, abs=1e-3)
    printed = done(capsys, f"{options} --group 4")
    assert "epsilon 6.25 at delta 1e-05 (for 4 windows together)" in printed
    printed = done(capsys, f"{OWNER} {options}")
    assert f"neighbours differ by {OWNERS}" in printed
    assert "whether one owner's data was used" in printed


def test_noise_for_an_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--target-epsilon 3 {STEPS} --rounds 2 --set privacy.accountant=rdp --set privacy.delta=1e-6"
    answer = found(capsys, options)
    assert set(answer) == KEYS
    assert 0.99 * 3 < answer["epsilon"] <= 3
    again = spent([SampledGaussian(answer["noise_multiplier"], 0.01, 100)], 1e-6, "rdp")
    assert again.epsilon == answer["epsilon"]
    printed = done(capsys, options)
    typed = re.search(r"^noise multiplier (\S+) for epsilon 3$", printed, re.MULTILINE)
    assert typed is not None
    assert spent([SampledGaussian(float(typed[1]), 0.01, 100)], 1e-6, "rdp").epsilon <= 3


@pytest.fixture
def sites(tmp_path: Path) -> str:
    """A plan with unit `site` and a fixed clipping norm."""
    text = shipped_plans()["private-sites"].replace("[privacy.adaptive]\ncount_noise = 6.0\n", "")
    (tmp_path / "sites.toml").write_text(text)
    return f"{tmp_path / 'sites.toml'} --set privacy.delta=1e-5"


def test_a_trusted_coordinator_adds_gaussian_noise(capsys: pytest.CaptureFixture[str], sites: str) -> None:
    options = f"{sites} --set privacy.trusted_coordinator=true --noise-multiplier 4 --rounds 20"
    answer = found(capsys, options)
    assert answer["epsilon"] == spent([Gaussian(4.0, 20)], 1e-5).epsilon
    assert (answer["accountant"], answer["relation"]) == ("pld", SITES)
    assert "The coordinator adds Gaussian noise" in done(capsys, options)


def test_sites_among_themselves_add_skellam_noise(capsys: pytest.CaptureFixture[str], sites: str) -> None:
    options = f"{sites} --noise-multiplier 4 --rounds 20"
    answer = found(capsys, options)
    event = skellam_for(4.0, 1.0, 256, 120, 96, 32).event
    assert answer["epsilon"] == spent([event] * 20, 1e-5).epsilon
    assert answer["accountant"] == "rdp"
    assert answer["epsilon"] > spent([Gaussian(4.0, 20)], 1e-5, "rdp").epsilon
    printed = done(capsys, options)
    assert "At least 96 honest sites are in every sum" in printed
    assert "rdp accountant: Skellam noise is composed by Renyi divergences" in printed


def test_a_question_has_a_figure_against_all_other_parties(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the budget, and in the check of the plan by which a site decides."""
    (tmp_path / "question.toml").write_text(
        '[question]\nkind = "histogram"\nfield = "ward"\nvalues = ["a", "b"]\n'
        '[privacy]\nunit = "record"\nnoise_multiplier = 20.0\ndelta = 1e-6\n[cohort]\nsites = 8\n'
    )
    question = str(tmp_path / "question.toml")
    answer = found(capsys, f"{question} --noise-multiplier 20")
    asked = unit_sum(20.0, Shape(3, 3, 1.0), 8, question_of(load(Path(question))).most_units, 5, 32, "record")
    own = spent([replace(asked.event, variance=asked.variance)], 1e-6).epsilon
    assert set(answer) == KEYS | {"against_all_epsilon"}
    assert (answer["epsilon"], answer["against_all_epsilon"]) == (spent([asked.event], 1e-6).epsilon, own)
    assert answer["epsilon"] < own / 2
    printed = done(capsys, f"{question} --noise-multiplier 20")
    line = "(against the coordinator and all other sites together)"
    assert f"epsilon {at_most(own)} at delta 1e-06 {line}" in printed
    assert main(["plan", "check", question, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against_all_epsilon"] == own
    plan = load(Path(question))
    terms = terms_of(plan, 1)
    assert terms is not None
    assert f"{at_most(own)} at delta 1e-06" in dict(privacy_rows(plan, terms)).values()
    assert "against" not in done(capsys, f"--noise-multiplier 1 {STEPS} --rounds 1")


def test_people_read_what_is_protected_and_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    printed = done(capsys, f"--noise-multiplier 1 {STEPS} --rounds 1")
    epsilon = spent([SampledGaussian(1.0, 0.01, 50)], 1e-5).epsilon
    shown = re.search(r"^epsilon (\S+) at delta 1e-05 \(pld accountant\)$", printed, re.MULTILINE)
    assert shown is not None
    assert epsilon <= float(shown[1]) < epsilon + 0.011
    assert (
        "protects  a window of 128 tokens of a text; neighbours differ by adding or removing one such window"
        in printed
    )
    assert "In each of the 50 local steps" in printed
    assert "In plain words: " in printed


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        pytest.param("", [3, 6, 12, 24], marks=pytest.mark.slow),
        ("private-sites --rounds 2", [1, 2, 4]),
        ("correlated-sites", [60]),
    ],
)
def test_without_noise_or_target_there_is_a_table(
    capsys: pytest.CaptureFixture[str], options: str, lengths: list[int]
) -> None:
    answer = found(capsys, options)
    assert set(answer) == {"table"}
    assert all(set(row) == KEYS | {"rounds"} for row in answer["table"])
    assert sorted({row["rounds"] for row in answer["table"]}) == lengths
    costs = {(row["rounds"], row["noise_multiplier"]): row["epsilon"] for row in answer["table"]}
    noises = sorted({noise for _, noise in costs})
    assert len(costs) == len(lengths) * len(noises)
    for length in lengths:
        by_noise = [costs[length, noise] for noise in noises]
        assert by_noise == sorted(by_noise, reverse=True)
    printed = done(capsys, options)
    assert f"{costs[lengths[-1], noises[-1]]:.1f}"[:2] in printed
    assert "--target-epsilon" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--noise-multiplier 1 --target-epsilon 2", "--noise-multiplier and --target-epsilon"),
        ("--noise-multiplier 1 --group 1", "--group"),
        ("--target-epsilon 1 --group 2", "--group"),
        ("--noise-multiplier 0", "privacy.noise_multiplier"),
        ("--target-epsilon -1", "privacy.target_epsilon"),
        ("--noise-multiplier 1 --rounds 0", "run.rounds"),
        ("--noise-multiplier 1 --set privacy.sampling_rate=1.5", "privacy.sampling_rate"),
        ("private-sites --noise-multiplier 1 --set privacy.sampling_rate=0.1", "privacy.sampling_rate"),
        ("not-private", "privacy.unit"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    capsys: pytest.CaptureFixture[str], options: str, named: str
) -> None:
    capsys.readouterr()
    assert main(["budget", *options.split()]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"cloister: {named}")
    assert streams.err.count("\n") == 1


def test_help_does_not_load_the_accountants() -> None:
    code = "import sys, cloister.cli.main as c\ntry: c.main(['budget', '--help'])\nexcept SystemExit: pass\n"
    code += (
        "print([name for name in sys.modules if name.split('.')[0] in ('dp_accounting', 'scipy', 'torch')])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--target-epsilon" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "[]"
