"""The unit `owner` through the doors that a coordinator uses: what one owner can change, charge, report and audit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.cli.main import main
from cloister.lm.data import prepare
from cloister.lm.data.prepare import UnitRule
from cloister.privacy.accounting.accountant import spent
from cloister.privacy.mechanism.events import SampledGaussian, from_json
from cloister.privacy.report.report import verdict
from cloister.protocol.errors import PolicyError
from cloister.protocol.plan.soundness import load
from cloister.server.record.folder import RunFolder
from cloister.server.record.report import gather
from cloister.simulations.federation import simulate
from cloister.tests.parties.federation import PRIVATE, Federation, tiny
from cloister.tests.tools.overheard import Overheard
from cloister.tests.tools.raises import raises

CLIP, NOISE = 0.25, 1.5
OWNER = [
    *PRIVATE,
    "aggregation.secure=false",
    "privacy.unit=owner",
    "data.owner=patient",
    "privacy.records=3",
    f"privacy.clip={CLIP}",
    f"privacy.noise_multiplier={NOISE}",
    "privacy.sampling_rate=1.0",
    "local.steps=1",
]

Record = dict[str, object]
OTHERS: list[Record] = [
    {
        "patient": f"p{number % 5}",
        "text": f"patient {number % 5} was seen on day {number}. " * (1 + number % 3),
    }
    for number in range(12)
]
"""Five owners with two or three records each."""
ONE: list[Record] = [{"patient": "x", "text": "a short note"}]
MANY: list[Record] = [{"patient": "x", "text": f"note {number} of many. " * 20} for number in range(60)]
ADVERSARIAL: list[Record] = [
    {"patient": "x", "text": text}
    for text in (*(letter * 900 for letter in "aaabcz~"), *(record["text"] for record in OTHERS))
]
"""Of one byte each, and the others' records again."""
NUMBERED: list[Record] = [
    {"patient": 7 if number % 2 else "7", "text": f"note {number} of one. " * 20} for number in range(6)
]
"""Of one owner, whom some files name by a number and others by its text."""


def written(path: Path, records: Iterable[Record]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def federate(tmp_path: Path) -> Callable[..., Federation]:
    source = f"simulation.source={written(tmp_path / 'records.jsonl', OTHERS)}"
    return lambda *settings: Federation(tmp_path, tiny(*OWNER, source, *settings))


def summed(federation: Federation, records: list[Record], *, far: float = 30.0) -> Overheard:
    """What a site with these records adds noise to in its first round, from a model that makes long gradients."""
    count = len(list(federation.folder.glob("data-*")))
    data = written(federation.folder / f"data-{count}.jsonl", records)
    stream = Overheard.from_declared_seed(3)
    state = str(federation.folder / f"state-{count}")
    site = federation.joined(data=data, state=state, noise=lambda _round: stream)
    site.contribute(federation.request(model=federation.model * np.float32(far)))
    return stream


@pytest.mark.parametrize(
    "their", [ONE, MANY, ADVERSARIAL, NUMBERED], ids=["one", "many", "adversarial", "numbered"]
)
@pytest.mark.parametrize("at", [0, 5, 12])
@pytest.mark.parametrize("method", ["reference", "opacus"])
def test_one_owner_changes_the_sum_by_at_most_the_clip(
    federate: Callable[..., Federation], their: list[Record], at: int, method: str
) -> None:
    federation = federate(f"privacy.method={method}", "local.batch_size=12")
    neighbour = [*OTHERS[:at], *their, *OTHERS[at:]]
    with_it, without = summed(federation, neighbour), summed(federation, OTHERS)
    assert with_it.sigmas == without.sigmas == [NOISE * CLIP]
    # By Opacus the last bits of a gradient depend on the units beside it.
    moved = float(np.linalg.norm(with_it.sums[0] - without.sums[0])) / CLIP
    assert 0.9 < moved <= 1 + (1e-8 if method == "reference" else 1e-5)


def test_records_as_units_would_let_one_owner_change_it_by_more(
    federate: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = federate()
    monkeypatch.setattr(prepare, "unit_rule", lambda *_: UnitRule("record", 4))
    with_it, without = summed(federation, [*OTHERS, *MANY]), summed(federation, OTHERS)
    assert np.linalg.norm(with_it.sums[0] - without.sums[0]) > 10 * CLIP


def test_a_step_draws_owners(federate: Callable[..., Federation]) -> None:
    """At the rate q an owner is in a step or not, with all its records: the sum has one clipped norm or none."""
    federation = federate("privacy.sampling_rate=0.5", "local.steps=40", "local.learning_rate=1e-12")
    norms = [float(np.linalg.norm(total)) / CLIP for total in summed(federation, MANY).sums]
    drawn = sum(norm > 0 for norm in norms)
    assert all(norm == 0 or norm == pytest.approx(1, rel=1e-4) for norm in norms)
    assert 5 < drawn < 35


@pytest.mark.parametrize("value", [None, "", 1.5, ["x"]])
def test_a_record_without_an_owner_changes_nothing_that_leaves(
    federate: Callable[..., Federation], value: object, caplog: pytest.LogCaptureFixture
) -> None:
    federation = federate()
    without = summed(federation, OTHERS)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        found = summed(federation, [OTHERS[0], {"patient": value, "text": "of no one"}, *OTHERS[1:]])
    np.testing.assert_array_equal(found.sums[0], without.sums[0])
    (told,) = caplog.messages
    assert told.startswith(
        "site-000: must stay at this site: 12 records are used: 5 units to train on, 0 held"
    )
    assert told.endswith("; left out: 1 without an owner in 'patient', text or a whole number")


def test_the_sites_ledger_says_what_was_paid_for(federate: Callable[..., Federation]) -> None:
    federation = federate("privacy.sampling_rate=0.5", "local.steps=2")
    federation.joined(data=written(federation.folder / "data.jsonl", OTHERS)).contribute(federation.request())
    (entry,) = federation.entries()
    assert entry.charge.what == (
        "update, per all records of one owner at one site, named by the field 'patient', of which at most 3 are used, "
        "each with its first 64 tokens"
    )
    assert from_json(entry.charge.event) == (SampledGaussian(NOISE, 0.5, 2, "owner"),)


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        ("most_rounds = 9", ""),
        ('units = ["owner"]', ""),
        ('owner_fields = ["patient"]', ""),
        ('units = ["record", "site"]', "unit of privacy"),
        ('owner_fields = ["patient_id"]', "data.owner"),
    ],
)
def test_a_sites_policy_names_the_unit_and_the_field(
    federate: Callable[..., Federation], policy: str, refused: str
) -> None:
    federation = federate()
    data = written(federation.folder / "data.jsonl", OTHERS)
    site = federation.site(data=data, policy=f"secure_required = false\nleast_cohort = 1\n{policy}\n")
    if not refused:
        site.join(federation.join_request())
        return
    with raises(PolicyError, refused):
        site.join(federation.join_request())


# A run


@pytest.fixture(scope="module")
def run(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owners")
    records = [
        {"patient": number % 40, "text": f"patient {number % 40} was seen on day {number}. "}
        for number in range(160)
    ]
    settings = [
        *("data.owner=patient", "privacy.unit=owner", "privacy.noise_multiplier=1.5", "privacy.delta=1e-4"),
        *("privacy.sampling_rate=0.2", "data.held_out=0.0", "aggregation.weighting=uniform", "run.rounds=2"),
        *("server.evaluation=none", "simulation.partition=natural", "simulation.field=patient"),
        *("aggregation.dropouts=0.25", "aggregation.colluders=0.25"),
        f"simulation.source={written(folder / 'records.jsonl', records)}",
    ]
    with RunFolder.create(folder / "run", load(small_plan, settings)) as made:
        simulate(made, lambda _event: None, workers=2)
    return folder / "run"


@pytest.mark.slow
def test_the_report_names_the_owner_as_the_unit(run: Path) -> None:
    report = gather(run)
    assert report.unit == "owner"
    assert report.epsilon == spent([SampledGaussian(1.5, 0.2, 4, "owner")], 1e-4).epsilon
    steps = "2 Poisson-sampled Gaussian steps on owners, noise multiplier 1.5, rate 0.2"
    assert all(row.event.endswith(steps) for row in report.ledger.rows)
    claim = verdict(report)
    assert claim.holds
    assert (
        "all records of one owner at one site, named by the field 'patient', of which at most 8 are used"
        in claim.sentence
    )
    assert "differ by adding or removing all records of one owner at one site" in claim.sentence
    assert any("this owner pays at both" in line for line in report.not_covered)
    assert all(site.epsilon == report.epsilon for site in report.sites)


def test_an_audit_of_owners_raises_no_alarm(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["audit", str(run), "--json", "--canaries", "24"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert "24 gradient canaries among the owners of site-000" in found["what"]
    assert found["must_stay_at_this_site"], "it is computed from the records, and no charge covers it"
    assert found["row"]["epsilon"] <= found["claimed"] == found["claimed_run"]
