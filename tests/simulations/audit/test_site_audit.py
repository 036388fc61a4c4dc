"""Audits of rounds under unit site: of honest code, which raise no alarm, and with a defect planted in it, which do."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cloister.cli.main import main
from cloister.clients.ranks.ranks import Ranks
from cloister.tests.simulations.audit.audited import (
    ADAPTIVE,
    CENTRAL,
    FEW,
    INSIDE,
    NOISE,
    OTHERWISE_SENT,
    QUIET,
    RECORDS,
    RELEASES,
    REPEATED,
    REPEATS,
    SITE,
    SPEED,
    TAIL,
    TWICE,
    folder_of,
    ran,
    repeat_halves,
)
from cloister.tests.tools.mutants import (
    ADD_NOISE,
    ENCODE,
    LESS_NOISE_OF_SITES,
    LESS_NOISE_OF_THE_COORDINATOR,
    TERMS,
    UNCHARGED,
    UNPAID_ROUND,
    Mutant,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "overrides"),
    [((SITE,), ()), ((SITE,), CENTRAL), ((SITE, ADAPTIVE), ())],
    ids=["sites", "coordinator", "adaptive"],
)
def test_an_audit_of_honest_rounds_raises_no_alarm(
    sections: tuple[str, ...], overrides: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_of(tmp_path, *sections, overrides=overrides)
    for _ in range(3):
        code, found, err = ran(capsys, run, *FEW)
        assert (code, err, found["alarm"]) == (0, "", False)
        assert 0 < found["claimed"] < found["claimed_run"]
        assert found["checks"][0]["visible"] < 0.05
        assert not list(run.glob("audit-*")), "the audit's own sites are removed"


def test_an_audit_of_sites_with_meshes_plays_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer that plants canaries is in this process."""
    mesh = "simulation.profiles=[{share=1.0,mesh={shard=2}}]"
    run = folder_of(tmp_path, SITE, overrides=(*QUIET, mesh))
    monkeypatch.setattr(Ranks, "call", lambda *_, **__: pytest.fail("ranks were started"))
    code, found, err = ran(capsys, run, *FEW)
    assert (code, err, found["alarm"]) == (0, "", False)


CHANGE, COUNT = "what one site changes in a sum", "what one site changes in the count"
OF_COORDINATE, TAIL_OF = "correlation of the count's noise", "privacy.mechanism.site_noise:SiteMechanism.tail"
COORDINATE, MODEL = (
    "furthest deviation of the noise at a coordinate",
    "rounds whose model does not follow from the noised sums",
)
TOLD = "other values that sites have told"
STEP = "features.step(context.model, mean, rounds)"
LONGER = Mutant(ENCODE, "(scaled, self.scale,", "(scaled, 1.01 * self.scale,")
LEAKS = [
    (Mutant("clients.training.release:contribution", TAIL, f"vector[0] += int(update.loss); {TAIL}"), CHANGE),
    (Mutant("server.round.round:_step", STEP, f"mean[0] = number; {STEP}"), MODEL),
    (OTHERWISE_SENT[-2], TOLD),
    (Mutant("clients.consent.admission:Admission.joined", SPEED, SPEED.replace("1.0", RECORDS)), TOLD),
]
"""Something leaves beside the noised sum."""


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        *((mutant, CHANGE if "scale" in mutant.old else NOISE) for mutant in LESS_NOISE_OF_SITES),
        (LONGER, CHANGE),
        *LEAKS,
        (UNCHARGED, RELEASES),
        (UNPAID_ROUND, RELEASES),
    ],
    ids=str,
)
def test_rounds_that_are_not_what_is_charged_raise_an_alarm(
    mutant: Mutant,
    found: str,
    site: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, site, *FEW)
    assert (code, result["alarm"]) == (3, True)
    assert found in result["row"]["problem"]


def test_a_total_beside_the_vector_raises_an_alarm(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact number of tokens, summed as the number of sites is."""
    total = '((found := make(basis)), found.counters + (type(found.counters[0])("tokens", 1 << 50),))'
    more = f'__import__("dataclasses").replace((told := {total})[0], counters=told[1])'
    Mutant("aggregation.features.registry:layout_of", "layout = make(basis)", f"layout = {more}").plant(
        monkeypatch
    )
    tail = "aggregation.features.site_unit:Protected.tail"
    Mutant(tail, "{WEIGHT: 1}", '{WEIGHT: 1, "tokens": tokens}').plant(monkeypatch)
    code, result, _ = ran(capsys, site, *FEW)
    assert (code, result["alarm"]) == (3, True)
    assert TOLD in result["row"]["problem"]
    before = (site / "audit.json").read_bytes()
    assert main(["audit", str(site), *FEW]) == 2, (
        "another one, which may be weaker or lucky, takes no alarm back"
    )
    assert "no alarm of an earlier audit" in capsys.readouterr().err
    assert (site / "audit.json").read_bytes() == before


def test_longer_updates_than_the_clip_end_an_audit_of_sums_in_clear(
    central: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator itself checks them, as in a run."""
    LONGER.plant(monkeypatch)
    code, _, err = ran(capsys, central, "--canaries", "8")
    assert (code, "norm of the update, in steps is" in err) == (2, True)


@pytest.mark.parametrize("mutant", LESS_NOISE_OF_THE_COORDINATOR, ids=str)
def test_less_noise_of_a_trusted_coordinator_raises_an_alarm(
    mutant: Mutant, central: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, central, "--canaries", "8")
    assert (code, result["alarm"]) == (3, True)
    expected = REPEATED if "declared" in mutant.new else NOISE
    assert expected in result["row"]["problem"]


@pytest.mark.parametrize("how", [how for how in REPEATS if how != "permuted"])
@pytest.mark.parametrize("name", ["site", "central"])
def test_noise_that_repeats_inside_a_round_raises_an_alarm(
    name: str,
    how: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = request.getfixturevalue(name)
    repeat_halves(monkeypatch, how)
    code, result, _ = ran(capsys, run, *FEW)
    assert code == 3
    assert TWICE in result["row"]["problem"]
    assert how != "again" or INSIDE in result["row"]["problem"]
    assert NOISE not in result["row"]["problem"]


@pytest.mark.slow
def test_a_hundredth_of_the_noise_of_sites_is_missed(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 30 rounds; by default there are 125."""
    Mutant(ENCODE, "self.variance, offset", "0.98 * self.variance, offset").plant(monkeypatch)
    code, result, _ = ran(capsys, site, "--canaries", "60")
    assert code == 3
    assert NOISE in result["row"]["problem"]


SKELLAM, GAUSSIAN = (
    "skellam(extra, self.variance, self.dimension)",
    'noise.child("count").gaussian(1, 2 * self.count_step * self.count_deviation)',
)
TWO = (*CENTRAL, "cohort.sites=2")
NOTHING_SENT = Mutant(ENCODE, "-1) if finite else 0", "-1) if finite else 1")
"""A site without records counts as one within the clip."""
NUMBERS = itertools.count()
"""Of runs: terms are cached."""


@pytest.mark.parametrize(
    ("overrides", "mutant", "rounds", "found"),
    [
        ((), None, 3, ""),
        (TWO, None, 3, ""),
        ((), NOTHING_SENT, 2, COUNT),
        ((), Mutant(ENCODE, "(1 if norm", "(3 if norm"), 2, COUNT),
        (TWO, NOTHING_SENT, 2, COUNT),
        (
            (),
            Mutant("privacy.mechanism.site_noise:distributed", "extra=((event.", "extra=() and ((event."),
            2,
            COORDINATE,
        ),
        ((), Mutant(TAIL_OF, SKELLAM, SKELLAM.replace("variance", "variance / 1e6")), 6, COORDINATE),
        ((), Mutant(TAIL_OF, SKELLAM, SKELLAM.replace("self.dimension", "0")), 6, OF_COORDINATE),
        (TWO, Mutant(ADD_NOISE, GAUSSIAN, f"1e-3 * {GAUSSIAN}"), 6, COORDINATE),
        (TWO, Mutant(ADD_NOISE, GAUSSIAN, GAUSSIAN.replace("count", "update", 1)), 6, OF_COORDINATE),
    ],
    ids=str,
)
def test_the_count_of_adaptive_clipping_is_audited(
    overrides: tuple[str, ...],
    mutant: Mutant | None,
    rounds: int,
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sites of a round add noise, or the coordinator of two."""
    if mutant is not None:
        mutant.plant(monkeypatch)
    adaptive = "[privacy.adaptive]\ncount_noise = 1.5\n"
    run = folder_of(tmp_path, SITE, adaptive, overrides=(*overrides, f"run.name=count-{next(NUMBERS)}"))
    code, result, _ = ran(capsys, run, "--canaries", str(2 * rounds))
    assert code == (0 if mutant is None else 3)
    assert found in result["row"]["problem"]


def test_noise_that_counts_on_colluding_sites_raises_an_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder_of(tmp_path, SITE, overrides=(*QUIET, "run.name=counted"))
    Mutant("protocol.plan.plan:Plan._honest", "self.quorum(n) - found.colluders", "self.cohort.size()").plant(
        monkeypatch
    )
    code, result, _ = ran(capsys, run, *FEW)
    assert code == 3
    assert NOISE in result["row"]["problem"]


GROUPS = ("cohort.sites=9", "aggregation.groups=3", "aggregation.colluders=0.0")
OF_COHORT = Mutant(
    TERMS,
    "sites, plan.honest(), bits",
    "plan.cohort.size(), plan.quorum(plan.cohort.size()), bits",
)
"""The noise of a group's sum is that of a sum over the whole cohort."""


@pytest.mark.parametrize("mutant", [None, OF_COHORT], ids=str)
def test_each_group_of_a_round_has_the_noise_that_is_charged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mutant: Mutant | None
) -> None:
    name = "run.name=groups" if mutant is None else "run.name=of-cohort"  # terms are cached
    run = folder_of(tmp_path, SITE, overrides=(*QUIET, *GROUPS, name))
    if mutant is not None:
        mutant.plant(monkeypatch)
    code, result, _ = ran(capsys, run, "--canaries", "9")
    assert (code, result["alarm"]) == ((0, False) if mutant is None else (3, True))
    assert mutant is None or NOISE in result["row"]["problem"]
