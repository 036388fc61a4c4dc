"""`cloister budget`: epsilon, noise and table from the command line, for people and for programs."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from cloister.cli.main import main
from cloister.privacy.accounting.accountant import spent
from cloister.privacy.mechanism.events import (
    ADD_OR_REMOVE,
    ADD_OR_REMOVE_OWNER,
    ZERO_OUT,
    Gaussian,
    SampledGaussian,
)
from cloister.privacy.mechanism.site_noise import skellam_for

KEYS = {"epsilon", "delta", "noise_multiplier", "accountant", "unit", "relation"}


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
    rounds = "--rounds 12 --steps-per-round 5"
    answer = found(capsys, f"--unit record --noise-multiplier 0.6 --batch-size 32 --examples 11000 {rounds}")
    expected = spent([SampledGaussian(0.6, 32 / 11_000, 60)], 1e-5)
    assert answer == {
        "epsilon": expected.epsilon,
        "delta": 1e-5,
        "noise_multiplier": 0.6,
        "accountant": "pld",
        "unit": "record",
        "relation": ADD_OR_REMOVE,
    }
    assert answer["epsilon"] == pytest.approx(1.68, abs=0.01)
    rate = 32 / 11_000
    assert answer == found(capsys, f"--unit record --noise-multiplier 0.6 --sampling-rate {rate} --steps 60")


@pytest.mark.slow
def test_epsilon_of_owners_and_of_several_records_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--noise-multiplier 1 --sampling-rate 0.01 --steps 500"
    owner = found(capsys, f"--unit owner {options}")
    assert (owner["unit"], owner["relation"]) == ("owner", ADD_OR_REMOVE_OWNER)
    assert owner["epsilon"] == pytest.approx(1.3261, abs=1e-3)
    record = found(capsys, f"--unit record {options} --group 4")
    assert set(record) == KEYS | {"group", "group_epsilon"}
    assert record["epsilon"] == owner["epsilon"]
    assert record["group_epsilon"] == pytest.approx(6.2431, abs=1e-3)
    printed = done(capsys, f"--unit record {options} --group 4")
    assert "epsilon 6.25 at delta 1e-05 for 4 records together" in printed
    printed = done(capsys, f"--unit owner {options}")
    assert f"protects  one owner; neighbours: {ADD_OR_REMOVE_OWNER}" in printed
    assert "every owner is in a step with probability 0.01" in printed
    assert "whether a given owner's data was used" in printed


def test_noise_for_an_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--unit record --target-epsilon 3 --sampling-rate 0.01 --steps 100 --accountant rdp --delta 1e-6"
    )
    answer = found(capsys, options)
    assert set(answer) == KEYS
    assert 0.99 * 3 < answer["epsilon"] <= 3
    again = spent([SampledGaussian(answer["noise_multiplier"], 0.01, 100)], 1e-6, "rdp")
    assert again.epsilon == answer["epsilon"]
    printed = done(capsys, options)
    typed = re.search(r"^noise multiplier (\S+) for epsilon 3$", printed, re.MULTILINE)
    assert typed is not None
    assert spent([SampledGaussian(float(typed[1]), 0.01, 100)], 1e-6, "rdp").epsilon <= 3


def test_a_trusted_coordinator_adds_gaussian_noise(capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, "--unit site --central --noise-multiplier 4 --rounds 20")
    assert answer["epsilon"] == spent([Gaussian(4.0, 20)], 1e-5).epsilon
    assert (answer["accountant"], answer["relation"]) == ("pld", ZERO_OUT)
    assert "trusted" in done(capsys, "--unit site --central --noise-multiplier 4 --rounds 20")


def test_sites_among_themselves_add_skellam_noise(capsys: pytest.CaptureFixture[str]) -> None:
    scale = "--sites 10 --quorum 0.6 --colluders 0.15 --clip 0.5 --dimension 1000000000"
    answer = found(capsys, f"--unit site --noise-multiplier 4 --rounds 20 {scale}")
    event = skellam_for(4.0, 0.5, 10**9, 10, 4, 32).event
    assert answer["epsilon"] == spent([event] * 20, 1e-5).epsilon
    assert answer["accountant"] == "rdp"
    assert answer["epsilon"] > spent([Gaussian(4.0, 20)], 1e-5, "rdp").epsilon
    printed = done(capsys, f"--unit site --noise-multiplier 4 --rounds 20 {scale}")
    assert "from 4 honest sites of the 6 or more of 10" in printed
    assert "rdp accountant: Skellam noise is composed by Renyi divergences" in printed


def test_people_read_what_is_protected_and_what_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--unit record --noise-multiplier 1 --batch-size 10 --examples 1000 --steps 50"
    printed = done(capsys, options)
    epsilon = spent([SampledGaussian(1.0, 0.01, 50)], 1e-5).epsilon
    shown = re.search(r"^epsilon (\S+) at delta 1e-05 \(pld accountant\)$", printed, re.MULTILINE)
    assert shown is not None
    assert epsilon <= float(shown[1]) < epsilon + 0.011
    assert f"protects  one record; neighbours: {ADD_OR_REMOVE}" in printed
    assert "every record is in a step with probability 0.01" in printed
    assert "In plain words: " in printed
    assert "caution" not in printed
    assert "caution: delta 0.01 is not below 1 / 1,000 examples" in done(capsys, f"{options} --delta 0.01")


@pytest.mark.parametrize(
    ("options", "counted", "lengths"),
    [
        ("--unit site --central", "rounds", [10, 30, 100, 300]),
        ("--unit site --rounds 2", "rounds", [1, 2, 4]),
        pytest.param(
            "--unit record --sampling-rate 0.5 --accountant rdp --steps 40",
            "steps",
            [10, 20, 40, 80],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_noise_or_target_there_is_a_table(
    capsys: pytest.CaptureFixture[str], options: str, counted: str, lengths: list[int]
) -> None:
    answer = found(capsys, options)
    assert set(answer) == KEYS | {"table"}
    assert (answer["epsilon"], answer["noise_multiplier"]) == (None, None)
    assert all(set(row) == KEYS | {counted} for row in answer["table"])
    assert sorted({row[counted] for row in answer["table"]}) == lengths
    costs = {(row[counted], row["noise_multiplier"]): row["epsilon"] for row in answer["table"]}
    noises = sorted({noise for _, noise in costs})
    assert len(costs) == len(lengths) * len(noises)
    for length in lengths:
        by_noise = [costs[length, noise] for noise in noises]
        assert by_noise == sorted(by_noise, reverse=True)
    printed = done(capsys, options)
    assert f"{costs[lengths[-1], noises[-1]]:.1f}"[:2] in printed
    assert "--target-epsilon" in printed


SITE, RECORD = "--unit site --noise-multiplier 1 --rounds 3", "--unit record --noise-multiplier 1 --steps 3"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (f"{SITE} --target-epsilon 2", "--noise-multiplier and --target-epsilon"),
        (f"{SITE} --sampling-rate 0.1", "--sampling-rate"),
        (f"{SITE} --steps-per-round 2", "--steps-per-round"),
        (f"{SITE} --central --clip 0", "--clip"),
        (f"{SITE} --sites 0", "--sites"),
        (f"{SITE} --sites 2 --colluders 0.9", "colluders"),
        (f"{SITE} --quorum 1.5", "--quorum"),
        (f"{SITE} --colluders -1", "fraction"),
        (f"{SITE} --dimension 0", "dimension"),
        (f"{SITE} --delta 1", "delta"),
        ("--unit site --noise-multiplier 1", "--rounds"),
        ("--unit site --noise-multiplier 1 --rounds 0", "--rounds"),
        ("--unit site --noise-multiplier 0 --rounds 1", "noise_multiplier"),
        ("--unit site --target-epsilon -1 --rounds 1", "target_epsilon"),
        (RECORD, "--sampling-rate"),
        (f"{RECORD} --sampling-rate 0.1 --batch-size 3 --examples 30", "--sampling-rate"),
        (f"{RECORD} --batch-size 3", "--batch-size and --examples"),
        (f"{RECORD} --batch-size 31 --examples 30", "--batch-size"),
        (f"{RECORD} --batch-size 3 --examples 0", "--batch-size"),
        (f"{RECORD} --sampling-rate 1.5", "sampling_rate"),
        (f"{RECORD} --sampling-rate 0.1 --central", "--central"),
        (f"{RECORD} --sampling-rate 0.1 --group 1", "--group"),
        ("--unit owner --target-epsilon 1 --steps 3 --sampling-rate 0.1 --group 2", "--group"),
        ("--unit owner --noise-multiplier 1 --steps 3 --sampling-rate 0.1 --sites 3", "--sites"),
        (f"{RECORD} --sampling-rate 0.1 --sites 0", "--sites"),
        (f"{RECORD} --sampling-rate 0.1 --rounds 2", "--steps"),
        ("--unit record --noise-multiplier 1 --sampling-rate 0.1", "--steps or --rounds"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    capsys: pytest.CaptureFixture[str], options: str, named: str
) -> None:
    capsys.readouterr()
    assert main(["budget", *options.split()]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("cloister: ")
    assert streams.err.count("\n") == 1
    assert named in streams.err


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
