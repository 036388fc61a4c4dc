"""What a plan can ask of learning, through the command line, on a part of the Python manual: each changes the run,
ends with the same bits under masks as in clear, and is refused under a privacy unit where it would leak.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloister.lm.text.corpus import corpus_records
from cloister.tests.parties.federation import TINY
from cloister.tests.tools.command import done, found, lone_refusal, set_options

pytestmark = pytest.mark.usefixtures("one_thread")

FEATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "8 bits": (("local.clip_norm=1.0",), ("aggregation.ring_bits=8", "aggregation.compression={}")),
    "temperature": (("aggregation.weighting=tokens",), ("aggregation.temperature=3.0",)),
    "deduplicate": ((), ("data.deduplicate=true",)),
    "Muon": ((), ("local.optimizer=muon",)),
    "kept moments": ((), ("local.optimizer_state=keep",)),
}
"""For each feature the settings that it needs, and its own."""


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny plan with some records of the Python manual, each of them twice."""
    folder = tmp_path_factory.mktemp("manual")
    texts = [record["text"][:600] for record in list(corpus_records("builtin:python-docs").records)[:48]]
    source = folder / "manual.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 2), encoding="utf-8")
    plan = folder / "plan.toml"
    plan.write_text(f'{TINY}source = "{source}"\n', encoding="utf-8")
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_it_changes_the_run_the_same_under_masks_as_in_clear(
    feature: str, manual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed, own = FEATURES[feature]

    def run(name: str, *settings: str) -> dict[str, Any]:
        given = ("--out", str(tmp_path / name), "--workers", "1", "--seed", "3")
        return found(capsys, "simulate", str(manual), *given, *set_options(settings))

    without, masked = run("without", *needed), run("masked", *needed, *own)
    clear = run("clear", *needed, *own, "aggregation.secure=false")
    assert masked["params_sha256"] == clear["params_sha256"] != without["params_sha256"]
    assert masked["final_loss"] < masked["initial_loss"]
    up = [
        found(capsys, "plan", "check", str(manual), *set_options(given))["bytes_up"]
        for given in (needed, (*needed, *own))
    ]
    assert (up[1] < up[0]) == (feature == "8 bits")


RECORD = ("privacy.unit=record", "privacy.sampling_rate=0.5", "aggregation.secure=false")
SITE = ("privacy.unit=site",)
UNIT = (
    *("privacy.noise_multiplier=1.0", "privacy.delta=1e-3", "aggregation.weighting=uniform"),
    *("data.held_out=0.0", "server.evaluation=none"),
)


@pytest.mark.parametrize(
    ("feature", "unit", "said"),
    [
        ("8 bits", SITE, "aggregation.compression is 'set': expected no compression"),
        ("temperature", RECORD, "aggregation.weighting is 'tokens': expected another value"),
        ("temperature", SITE, "aggregation.weighting is 'tokens': expected another value"),
    ],
)
def test_it_is_refused_under_a_unit_where_it_would_leak(
    feature: str, unit: tuple[str, ...], said: str, manual: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = (*UNIT, *unit)
    done(capsys, "plan", "check", str(manual), *set_options(sound))
    given = set_options((*sound, *FEATURES[feature][0], *FEATURES[feature][1]))
    assert said in lone_refusal(capsys, "plan", "check", str(manual), *given)
