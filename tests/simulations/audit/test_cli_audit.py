"""Audits of steps under unit record, and refusals: honest code raises no alarm, and code with a planted defect does."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.cli.main import main
from cloister.clients.training.dpsgd import ClippedSum, PerUnit, PrivateTrainer, UnitGradients
from cloister.lm.model.weights import Named
from cloister.lm.text.sequences import Sequences
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.audit.fit import Check
from cloister.privacy.ledger.ledger import Ledger, read_history
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.server.record.folder import RunFolder
from cloister.simulations.audit.audit import audit
from cloister.simulations.audit.audit import audit as honest
from cloister.simulations.audit.audited import played
from cloister.simulations.audit.records import RecordGame
from cloister.simulations.audit.steps import Observed, Seen
from cloister.tests.simulations.audit.audited import (
    BASE,
    BY_HOOKS,
    BYTES,
    DEVIATION,
    EMPTY,
    HIGHER_RATES,
    INSIDE,
    LENGTH,
    NOISE,
    OFTEN,
    ONE_BY_ONE,
    OTHER_CLIPS,
    OTHER_DRAWS,
    OTHERWISE_SENT,
    RATE,
    RECORD,
    RELEASES,
    REPEATED,
    REPEATS,
    SMALL,
    TWICE,
    folder_of,
    ran,
    repeat_halves,
)
from cloister.tests.tools.mutants import (
    LESS_NOISE_IN_STEPS,
    STEPS,
    UNCHARGED,
    Mutant,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.slow
def test_an_audit_takes_noise_and_terms_from_where_a_run_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; the other tests give it streams, so that they can be repeated."""
    run = folder_of(
        tmp_path, RECORD.replace("noise_multiplier = 0.6", "target_epsilon = 2.0"), overrides=OFTEN
    )
    with RunFolder.reopen(run) as folder, monkeypatch.context() as patch:
        asked: list[tuple[str, int]] = []

        def noise_of(_plan: Plan, who: str, number: int) -> NoiseStream:
            asked.append((who, number))
            return NoiseStream.from_declared_seed(number).child(who)

        patch.setattr("cloister.simulations.audit.audit.noise_of", noise_of)
        found = honest(folder, canaries=1000, steps=20)
        both = ("site-000", "site-000 without records")
        assert asked == [(who, number) for number in (1, 2) for who in both]
        assert not found.row.problem
    with RunFolder.reopen(run) as folder, monkeypatch.context() as patch:
        Mutant("clients.training.work:train", "terms.noise_multiplier", "0.01").plant(patch)
        found = honest(folder, canaries=1000, steps=10)
        assert "standard deviation of the noise" in str(found.row.problem)


# --- unit record ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_audit_of_honest_steps_raises_no_alarm(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = ran(capsys, record)
    assert (code, err, found["alarm"]) == (0, "", False)
    assert found["row"]["epsilon"] <= found["claimed"]
    assert found["claimed"] == found["claimed_run"]
    assert found["at_half_noise"] > found["claimed"], "it could have seen half of the noise missing"
    kept = json.loads((record / "audit.json").read_text())
    assert {name: found[name] for name in kept} == kept
    assert (found["row"]["claimed"], found["row"]["what"]) == (found["claimed"], found["what"])
    assert found["row"]["canaries"] == 10_000
    visible = {check["what"]: check["visible"] for check in found["checks"] if check["visible"] is not None}
    assert visible["standard deviation of the noise"] < 0.01
    assert visible["what one unit changes, in clipping norms"] < 0.01
    assert visible["rate at which units are drawn"] < 0.1


@pytest.mark.slow
def test_no_more_rounds_are_played_than_the_plan_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site that crashed after its charges has made its updates again, and has paid for more."""
    run = folder_of(tmp_path, RECORD, overrides=OFTEN)
    paid = [entry.charge for entry in read_history(run / "ledger.sqlite").entries]
    own = Ledger(run / "sites" / "site-000" / "state" / "ledger.sqlite", "site-000", composed)
    for number, again in itertools.product(range(3), (paid[0], paid[-1])):
        own.charge(replace(again, id=f"{again.id}/{number}", dataset="site-000"), None)
    code, found, err = ran(capsys, run, "--canaries", "1000")
    assert (code, err) == (0, "")
    assert "over 40 steps" in found["what"]
    assert found["claimed"] < found["claimed_run"]


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        *((mutant, NOISE) for mutant in LESS_NOISE_IN_STEPS),
        *((mutant, BYTES) for mutant in OTHERWISE_SENT),
        *((mutant, LENGTH) for mutant in OTHER_CLIPS),
        *((mutant, RATE) for mutant in HIGHER_RATES),
        *OTHER_DRAWS,
        (Mutant(STEPS, DEVIATION, f"(1 if len(batch) else 0.2) * {DEVIATION}"), EMPTY),
        (Mutant(STEPS, "range(local.steps)", "range(local.steps + 1)"), RELEASES),
        (Mutant(STEPS, 'noise.child(f"step-{step + 1}")', 'noise.child("step")'), REPEATED),
        (UNCHARGED, RELEASES),
    ],
    ids=str,
)
def test_steps_that_are_not_what_is_charged_raise_an_alarm(
    mutant: Mutant,
    found: str,
    often: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant.plant(monkeypatch)
    code, result, err = ran(capsys, often, *SMALL)
    assert (code, result["alarm"]) == (3, True)
    assert found in result["row"]["problem"]
    assert err.count("\n") == 1
    assert f"alarm: {result['row']['problem']}" in err or "epsilon is at least" in err


@pytest.mark.parametrize("how", REPEATS)
def test_noise_that_repeats_inside_a_release_raises_an_alarm(
    how: str, often: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_halves(monkeypatch, how)
    code, result, _ = ran(capsys, often, *SMALL)
    assert code == 3
    assert TWICE in result["row"]["problem"]
    assert how != "again" or INSIDE in result["row"]["problem"]
    assert NOISE not in result["row"]["problem"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        (replace(LESS_NOISE_IN_STEPS[0], new="noise_multiplier=0.99 * terms.noise_multiplier"), NOISE),
        (OTHER_CLIPS[2], LENGTH),
        (HIGHER_RATES[0], RATE),
    ],
    ids=str,
)
def test_at_the_default_length_small_errors_raise_an_alarm(
    mutant: Mutant,
    found: str,
    record: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundredth of noise and clip, a tenth of the rate."""
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, record)
    assert code == 3
    assert found in result["row"]["problem"]


@pytest.mark.parametrize(
    ("settings", "mutant"),
    [(["local.batch_size=1", "local.steps=4"], ONE_BY_ONE), (["privacy.method=opacus"], BY_HOOKS)],
    ids=["reference", "opacus"],
)
def test_sequences_of_a_unit_that_are_clipped_apart_raise_an_alarm(
    settings: list[str],
    mutant: Mutant,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Opacus, and by `reference`, which takes a batch of one sequence one after the other too."""
    run = folder_of(tmp_path, RECORD, overrides=(*OFTEN, *settings))
    few = ("--canaries", "100", "--steps", "4")
    assert ran(capsys, run, *few)[0] == 0
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, *few)
    assert code == 3
    assert f"{LENGTH}, in clipping norms: 2," in result["row"]["problem"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            (
                "local.optimizer=muon",
                "local.optimizer_state=keep",
                "local.warmup_steps=39",
                "server.evaluation=simulation:public",
                "server.evaluate_every=2",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "local.optimizer=sgd",
                "local.proximal=0.1",
                "model.adapter.scheme=rolora",
                "model.adapter.rank=4",
            ),
            marks=pytest.mark.slow,
        ),
        ("aggregation.ring_bits=8", "aggregation.compression.first_scale=0.01"),
    ],
    ids=["kept state", "adapter", "compressed"],
)
def test_what_leaves_follows_from_the_noised_sums(
    settings: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last byte, whatever a site keeps from round to round."""
    run = folder_of(tmp_path, RECORD, overrides=(*OFTEN, *settings))
    code, found, err = ran(capsys, run, *SMALL)
    assert (code, err) == (0, "")
    OTHERWISE_SENT[0].plant(monkeypatch)
    code, found, _ = ran(capsys, run, *SMALL)
    assert code == 3
    assert f"{BYTES}: 2, charged 0" in found["row"]["problem"]


def test_gradients_that_are_not_clipped_are_noticed(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)
    monkeypatch.setattr(ClippedSum, "_check", lambda *_: None)
    code, result, _ = ran(capsys, record, *SMALL)
    assert code == 3
    assert LENGTH in result["row"]["problem"]


def test_a_claim_that_the_guesses_refute_raises_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the guesses alone: every canary is in every step, and the accountant is told the same."""
    every = ("privacy.sampling_rate=1.0", "privacy.noise_multiplier=6.0", "privacy.delta=1e-9")
    run = folder_of(tmp_path, RECORD, overrides=every)
    LESS_NOISE_IN_STEPS[1].plant(monkeypatch)
    monkeypatch.setattr(RecordGame, "_checks", lambda *_: (Check("noise", 1.0, 1.0, 1.0, 0.01),))
    code, result, err = ran(capsys, run, "--canaries", "200", "--steps", "2")
    assert code == 3
    assert result["row"]["refuting"] > result["claimed"]
    assert result["row"]["refuting"] < result["row"]["epsilon"]
    assert result["row"]["problem"] == ""
    assert "is claimed" in err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_honest_steps_raise_no_alarm(
    seed: int, record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = (NoiseStream.from_declared_seed(1000 * (seed + 1) + n) for n in itertools.count())
    with RunFolder.reopen(record) as folder:
        folder.audit.unlink(missing_ok=True)
        found = audit(folder, canaries=500, steps=10, streams=lambda: next(streams))
    assert not found.alarm, found.row.problem
    assert min(check.p for check in found.checks) > 1e-4


@pytest.mark.slow
def test_fewer_steps_are_held_against_their_own_claim(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--canaries", "50", "--confidence", "0.9")
    found = {steps: ran(capsys, record, "--steps", str(steps), *options)[1] for steps in (4, 25, 1000)}
    for asked, taken in ((4, 4), (25, 20), (1000, 40)):  # more than a round's are whole rounds
        assert f" over {taken} steps " in found[asked]["what"]
    assert found[4]["claimed"] < found[25]["claimed"] < found[1000]["claimed"] == found[4]["claimed_run"]
    assert found[4]["row"]["canaries"] == 50
    assert found[4]["row"]["confidence"] == 0.9


def test_a_warm_up_is_no_longer_than_the_steps_that_are_played() -> None:
    plan = parse("".join((BASE, RECORD)), ["local.warmup_steps=39", "server.evaluation=none"])
    terms = terms_of(plan, 100)
    assert terms is not None
    assert played(plan, terms, local={"steps": 4}).local.warmup_steps == 15
    assert played(plan, terms).local.warmup_steps == 39


def test_canaries_follow_what_a_round_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoLoRA trains one factor in odd rounds and the other in even ones; a canary in the other would never be seen."""
    adapter = ("model.adapter.scheme=rolora", "model.adapter.rank=4", "privacy.sampling_rate=0.05")
    run = folder_of(tmp_path, RECORD, overrides=(*adapter, "privacy.noise_multiplier=5.0"))
    monkeypatch.setattr(ClippedSum, "_scale", lambda *_: None)
    monkeypatch.setattr(ClippedSum, "_check", lambda *_: None)
    code, found, _ = ran(capsys, run, "--canaries", "400")
    assert code == 3
    assert found["row"]["correct"] == found["row"]["guesses"], (
        "40 steps of 0.05: hardly any canary is never drawn"
    )


@pytest.mark.slow
def test_the_real_records_stay_and_canaries_need_no_backward_pass(
    record: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    honest = PrivateTrainer.per_unit_gradients

    @contextmanager
    def spied(self: PrivateTrainer, trained: Named) -> Iterator[PerUnit]:
        with honest(self, trained) as gradients:

            def spy(sequences: Sequences, units: npt.NDArray[np.int64]) -> Iterator[UnitGradients]:
                assert sequences.starts is not None
                assert (sequences.starts[units + 1] > sequences.starts[units]).all(), "no canary has tokens"
                seen.extend(units.tolist())
                return gradients(sequences, units)

            yield spy

    monkeypatch.setattr(PrivateTrainer, "per_unit_gradients", spied)
    assert ran(capsys, record, "--canaries", "1000")[0] == 0  # some 60 are drawn
    assert seen


def test_only_noise_and_canaries_are_left_to_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real gradients, which the adversary knows, are far above the noise of some coordinates: they must not hide it."""
    run = folder_of(tmp_path, RECORD, overrides=("privacy.sampling_rate=0.5", "local.steps=2"))
    rests: list[npt.NDArray[np.float64]] = []
    learned: list[float] = []
    monkeypatch.setattr(NoiseStream, "add_gaussian", lambda *_, **__: None)
    right = Observed.take

    def take(self: Observed, released: torch.Tensor, seen: Seen, places: npt.NDArray[np.bool_]) -> None:
        learned.append(float(np.linalg.norm(released.numpy() / 0.5 - seen.rest)))
        rests.append(seen.rest)
        right(self, released, seen, places)

    monkeypatch.setattr(Observed, "take", take)
    ran(capsys, run, "--canaries", "30")
    assert len(rests) == 8
    assert min(learned) > 2.0, "there are real gradients beside the last unit, in clipping norms"
    for rest in rests:
        drawn = rest[np.abs(rest) > 2e-5]
        assert 0 < len(drawn) < 30
        assert drawn == pytest.approx(1.0, abs=1e-4)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    code, found, err = ran(capsys, run, *options)
    assert (code, found) == (2, {})
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_audited_is_refused_in_one_line(
    record: Path, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "privacy.unit is 'none'" in refusal(
        capsys, folder_of(tmp_path / "none", "\n[cohort]\nsites = 4\n")
    )
    assert "at most the" in refusal(capsys, record, "--canaries", "100000000")
    assert "--canaries is 0" in refusal(capsys, record, "--canaries", "0")
    assert "--steps is 0" in refusal(capsys, record, "--steps", "0")
    assert "privacy.unit = 'record'" in refusal(capsys, site, "--steps", "3")
    assert "--confidence is 1.0" in refusal(capsys, record, "--confidence", "1")
    assert "plan.json" in refusal(capsys, tmp_path / "nothing")
    bare = folder_of(tmp_path / "bare", RECORD)
    (bare / "ledger.sqlite").unlink()
    assert "expected a run with charges in its ledger" in refusal(capsys, bare)


@pytest.mark.slow
def test_what_a_person_reads_says_both_figures(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(record), "--canaries", "20", "--steps", "2"]) == 0
    out, _ = capsys.readouterr()
    for word in ("audited   epsilon is at least", "claimed   epsilon is at most", "no alarm"):
        assert word in out
    for line, what in (
        (r"measured  standard deviation of the noise: \S+, charged 1", "noise"),
        (r"          what one unit changes, in clipping norms: \S+, charged 1", "clip"),
        (r"          rate at which units are drawn: \S+, charged 0.003", "rate"),
    ):
        assert re.search(rf"^{line}; an error of \S+ % would be found$", out, re.MULTILINE), what
