"""The noise that is applied is the noise that is charged: through `Site` and a whole run, with a mutant of each factor.

What is released is observed where it is released, and compared with the events in the ledgers of those who released it
and with the plan. The data teaches nothing, or what it teaches is known.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from cloister.clients.state.kept import run_folder, update_path
from cloister.clients.training.dpsgd import ClippedSum, PrivateTrainer
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.ledger.ledger import Ledger
from cloister.privacy.mechanism.events import Event, Gaussian, SampledGaussian, Skellam, from_json
from cloister.protocol.errors import CloisterError
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.run import run
from cloister.tests.parties.federation import CENTRAL, PRIVATE, RECORD, RUN, SKELLAM, Federation, tiny
from cloister.tests.tools.mutants import (
    CHARGE,
    ENCODE,
    LESS_NOISE_IN_STEPS,
    LESS_NOISE_OF_SITES,
    LESS_NOISE_OF_THE_COORDINATOR,
    OTHER_STEPS,
    TERMS,
    UNCHARGED,
    UNPAID_ROUND,
    Mutant,
)

WRONG = 1e-9
"""Probability with which an honest release fails one of these checks."""
NUMBERS = itertools.count()
KILLED = (AssertionError, CloisterError)
"""A mutant is found by a check here, or a guard in the code stops it."""


def within(found: float, law: Any, what: str) -> None:
    low, high = law.interval(1 - WRONG)
    assert low <= found <= high, f"{what} is {found}, not from {low} to {high}"


def as_charged(noise: npt.NDArray[np.float64]) -> None:
    """Check that rows of noise, each over the standard deviation that was charged for it, are white."""
    rows, size = noise.shape
    products = noise @ noise.T
    low, high = stats.chi2.interval(1 - WRONG, size)
    squares = np.diagonal(products)
    assert ((low <= squares) & (squares <= high)).all(), f"variances of {squares / size}"
    limit = stats.norm.isf(WRONG / 2) * math.sqrt(size)
    assert (np.abs(noise.sum(axis=1)) < limit).all(), f"means of {noise.mean(axis=1)}"
    between = products[~np.eye(rows, dtype=bool)]
    assert (np.abs(between) < limit).all(), f"correlations of {np.sort(between / size)}"


# Units record and owner: what a site adds up in each step, and what it releases of it.

Z, CLIP, RATE, UNITS, LOCAL = 1.5, 0.25, 0.3, 20, 2
DPSGD = [
    f"privacy.noise_multiplier={Z}",
    f"privacy.clip={CLIP}",
    f"privacy.sampling_rate={RATE}",
    f"local.steps={LOCAL}",
    "local.learning_rate=1e-30",
    "local.batch_size=12",
]
OWNER = [
    *PRIVATE,
    "aggregation.secure=false",
    "privacy.unit=owner",
    "data.owner=patient",
    "privacy.records=3",
]


@dataclass
class Step:
    """A step that a site took."""

    units: int = 0
    """Clipped terms of its sum."""
    noise: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """What was released less the exact sum, in clipping norms."""
    norm: float = 0.0
    """L2 norm of the exact sum, in clipping norms."""


class Watched:
    """A sum of a step, as the trainer uses it."""

    def __init__(self, inner: ClippedSum, step: Step) -> None:
        self._inner = inner
        self._step = step

    def add(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        self._step.units += len(gradients[0])
        return self._inner.add(gradients)

    def release(self, *how: Any) -> torch.Tensor:
        exact = self._inner.so_far()
        released = self._inner.release(*how)
        self._step.noise = (released - exact).numpy() / CLIP
        self._step.norm = float(exact.norm()) / CLIP
        return released


class Observed:
    """Two sites that train three times each, of which one is a round again after its update was lost."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *settings: str) -> None:
        data = folder / "data.jsonl"
        plan = tiny(*settings, f"run.name=seen-{next(NUMBERS)}", f"simulation.source={data}")
        owners = 3 if plan.privacy.unit == "owner" else 1
        records = [
            {"patient": f"p{number % UNITS}", "text": f"patient {number} was seen. "}
            for number in range(owners * UNITS)
        ]
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.federation = Federation(folder, plan)
        self.steps: list[Step] = []
        right = PrivateTrainer.new_sum

        def new_sum(trainer: PrivateTrainer, names: Sequence[str]) -> Any:
            self.steps.append(Step())
            return Watched(right(trainer, names), self.steps[-1])

        patch.setattr(PrivateTrainer, "new_sum", new_sum)
        model = self.federation.model * np.float32(30)  # gradients are far longer than the clip
        for index in range(2):
            site = self.federation.joined(index, data=str(data))
            for number in (1, 2, 2):
                update_path(run_folder(site.config.folder, RUN), number).unlink(missing_ok=True)
                site.contribute(self.federation.request(model=model, number=number))

    def events(self) -> list[SampledGaussian]:
        entries = [*self.federation.entries(0), *self.federation.entries(1)]
        found = [event for entry in entries for event in from_json(entry.charge.event)]
        return [event for event in found if isinstance(event, SampledGaussian)]

    def check(self) -> None:
        """Everything between plan, charge and release."""
        plan, events, steps = self.federation.plan.privacy, self.events(), self.steps
        each = self.federation.plan.local.steps
        assert plan.sampling_rate is not None
        unit: Literal["record", "owner"] = "owner" if plan.unit == "owner" else "record"
        assert set(events) == {SampledGaussian(Z, plan.sampling_rate, each, unit)}
        assert len(steps) == sum(event.steps for event in events) == 6 * each
        as_charged(np.stack([step.noise for step in steps]) / events[0].noise_multiplier)
        for step in steps:
            assert step.norm <= step.units * (1 + 1e-8), "a term is longer than the clip"
        assert max(step.norm for step in steps) > 0.99, "gradients are long enough to be clipped"
        drawn = np.array([step.units for step in steps])
        within(int(drawn.sum()), stats.binom(len(steps) * UNITS, events[0].sampling_rate), "draws")


PAY = "clients.consent.spending:Spending.pay"
UNPAID = [
    UNCHARGED,
    UNPAID_ROUND,
    Mutant("clients.consent.spending:Spending._charge", ", round_number, secrets.token_hex(8)", ""),
]
"""Rounds that nothing is charged for, or under the id of another charge."""
STEP_MUTANTS = [
    *LESS_NOISE_IN_STEPS,
    *OTHER_STEPS,
    *UNPAID,
    Mutant(PAY, CHARGE, f"if round_number not in rounds_paid: {CHARGE}"),
    Mutant("clients.training.dpsgd:ClippedSum._scale", "(self._clip *", "(2 * self._clip *"),
    Mutant("privacy.mechanism.noise:NoiseStream.fresh", "random(KEY)", "bytes(KEY)"),
]
OWNER_MUTANTS = [
    LESS_NOISE_IN_STEPS[0],
    Mutant("lm.data.prepare:unit_rule", 'if privacy.unit == "owner":', "if False:"),
]


@pytest.mark.parametrize("settings", [RECORD, OWNER], ids=["record", "owner"])
def test_steps_have_the_noise_clip_rate_and_number_that_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    Observed(tmp_path, monkeypatch, *settings, *DPSGD).check()


@pytest.mark.parametrize(
    ("settings", "mutant"),
    [
        *(([*RECORD, *DPSGD], mutant) for mutant in STEP_MUTANTS),
        *(([*OWNER, *DPSGD], mutant) for mutant in OWNER_MUTANTS),
    ],
    ids=lambda value: str(value) if isinstance(value, Mutant) else "",
)
def test_a_step_that_is_not_what_is_charged_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], mutant: Mutant
) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises(KILLED):
        Observed(tmp_path, monkeypatch, *settings).check()


# Unit site: what a run releases after each round, from updates that are known.

PLACE, SITES, HONEST = 7, 4, 2
"""All canaries' coordinate. Of four sites one may collude, and three are enough for a sum: two honest ones."""
QUIET = ["privacy.noise_multiplier=0.2", f"privacy.clip={CLIP}", "run.rounds=2", "local.steps=1"]
ADAPTIVE = "privacy.adaptive={count_noise=0.12}"


class Released:
    """A run whose sites' updates are a hundred clipping norms long, along one coordinate."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *settings: str) -> None:
        federation = Federation(folder, tiny(*settings, *QUIET, f"run.name=seen-{next(NUMBERS)}"))
        self.federation, self.out, self.plan = federation, folder / "run", federation.plan

        def train(_: Trainer, start: Any, *_more: Any, **_how: Any) -> LocalUpdate:
            update = np.zeros_like(start)
            update[PLACE] = 100 * CLIP
            return LocalUpdate(update, 0, 0.0)

        patch.setattr(Trainer, "train", train)
        clips = [CLIP]
        RunFolder.create(self.out, self.plan).close()
        with RunFolder.reopen(self.out) as made:
            roster = federation.roster if self.plan.aggregation.secure else None

            def watch(event: object) -> None:
                clips.append(getattr(event, "figures", {}).get("clip", 0.0))

            run(made, federation.channel, watch, roster=roster, clock=lambda: 0.0)
        kept = Checkpoints(self.out / "checkpoints", federation.layout, 9)
        models = [kept.load(number).weights.astype(np.float64) for number in range(3)]
        self.sums = np.diff(models, axis=0) * SITES / np.array([clip for clip in clips if clip][:2])[:, None]
        """In clipping norms."""

    def charges(self) -> dict[tuple[str, int], list[tuple[Event, ...]]]:
        """What each ledger has for each site and round, the sites' own and the coordinator's."""
        own = [entry for index in range(SITES) for entry in self.federation.entries(index)]
        all_of_them = Ledger(self.out / "ledger.sqlite", "coordinator", composed).entries()
        found: dict[tuple[str, int], list[tuple[Event, ...]]] = {}
        for name, entries in (("site", own), ("coordinator", all_of_them)):
            for entry in entries:
                found.setdefault((name, entry.charge.round), []).append(from_json(entry.charge.event))
        return found

    def check(self) -> None:
        """Everything between plan, charge and release."""
        charges = self.charges()
        assert {who: len(events) for who, events in charges.items()} == dict.fromkeys(
            itertools.product(("site", "coordinator"), (1, 2)), SITES
        )
        costs = {events for each in charges.values() for events in each}
        assert [len(events) for events in costs] == [1], "every round costs the same one event"
        ((event,),) = costs
        z = self.plan.privacy.noise_multiplier
        assert z is not None
        if isinstance(event, Skellam):
            parts = ((event.variance, event.l2, event.l1), *event.extra)
            together = sum(l2**2 / variance for variance, l2, _ in parts) ** -0.5
            deviation = math.sqrt(event.variance / event.l2**2 * SITES / HONEST)
        else:
            assert isinstance(event, Gaussian)
            together = deviation = event.noise_multiplier
        assert together == pytest.approx(z, rel=1e-2)
        noise = self.sums / deviation
        canaries = noise[:, PLACE].copy()
        noise[:, PLACE] = 0
        as_charged(noise)
        for canary in canaries:
            within(float(canary), stats.norm(SITES / deviation), "sum of the clipped canaries")


COUNT = [
    Mutant("protocol.plan.plan:Plan._honest", "self.quorum(n) - found.colluders", "self.quorum(n)"),
    Mutant(
        "protocol.plan.plan:Plan._honest",
        "self.quorum(n) - found.colluders",
        "self.cohort.size() - found.colluders",
    ),
    Mutant(TERMS, "plan.honest(), bits", "sites, bits"),
]
"""Noise of sites that a sum may lack, or that a colluding site knows."""
CHARGES = [
    *UNPAID,
    Mutant("server.sum.spending:Spending.before_opening", "self._charge(round_number, sites)", "()"),
]
SITE_MUTANTS = [
    *LESS_NOISE_OF_SITES,
    *COUNT,
    *CHARGES,
    Mutant("privacy.mechanism.site_noise:skellam_for", "whole / honest,", "whole / honest / 4,"),
    Mutant(
        "privacy.mechanism.site_noise:skellam_for",
        "Skellam(whole,",
        "Skellam(4 * whole,",
    ),
    Mutant("privacy.mechanism.noise:NoiseStream.fresh", "random(KEY)", "bytes(KEY)"),
]
CENTRAL_MUTANTS = [
    *LESS_NOISE_OF_THE_COORDINATOR,
    *CHARGES,
    Mutant("privacy.mechanism.site_noise:central", "deviation=on_update *", "deviation=0.5 * on_update *"),
    Mutant(
        "privacy.mechanism.site_noise:central",
        "Gaussian(noise_multiplier, 1)",
        "Gaussian(2 * noise_multiplier, 1)",
    ),
    Mutant(ENCODE, "(scaled, self.scale,", "(scaled, 2 * self.scale,"),
]
ADAPTIVE_MUTANTS = [
    LESS_NOISE_OF_SITES[0],
    Mutant(
        "privacy.mechanism.site_noise:distributed",
        "if sigma_b else noise_multiplier",
        "if False else noise_multiplier",
    ),
    Mutant(
        "privacy.mechanism.site_noise:distributed",
        "extra=((event.variance, float(step), float(step)),)",
        "extra=()",
    ),
]


@pytest.mark.parametrize(
    "settings", [SKELLAM, CENTRAL, [*SKELLAM, ADAPTIVE]], ids=["sites", "coordinator", "adaptive"]
)
def test_rounds_have_the_noise_clip_and_number_that_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    Released(tmp_path, monkeypatch, *settings).check()


@pytest.mark.parametrize(
    ("settings", "mutant"),
    [
        *((SKELLAM, mutant) for mutant in SITE_MUTANTS),
        *((CENTRAL, mutant) for mutant in CENTRAL_MUTANTS),
        *(([*SKELLAM, ADAPTIVE], mutant) for mutant in ADAPTIVE_MUTANTS),
    ],
    ids=lambda value: str(value) if isinstance(value, Mutant) else "",
)
def test_a_round_that_is_not_what_is_charged_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], mutant: Mutant
) -> None:
    mutant.plant(monkeypatch)
    with pytest.raises(KILLED):
        Released(tmp_path, monkeypatch, *settings).check()
