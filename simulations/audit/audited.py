"""The result of an audit, and what all its games share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import norm

from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig
from cloister.clients.site import Site
from cloister.clients.state.kept import DECLARED_ROUNDING
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.model import LanguageModel, device_for
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.train import Trainer
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.audit.fit import Check, misfits, problem
from cloister.privacy.audit.lower_bounds import ALARM, distinguish
from cloister.privacy.ledger.ledger import Entry, Ledger
from cloister.privacy.mechanism.events import Event, from_json
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.report.report import AuditRow
from cloister.protocol.machine.storage import write_new
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan import soundness
from cloister.protocol.plan.plan import NO_EVALUATION, Plan

Progress = Callable[[int, int], None]
"""Receives the work done so far, and the total."""
Streams = Callable[[], NoiseStream]
"""Returns a new stream of noise at each call."""
Noises = Callable[[str, int], NoiseStream]
"""From a site's name, or `coordinator`, and a round to the stream of its noise."""

_LENGTHS = (("run", "rounds"), ("local", "steps"))

FAR = 100.0
"""Length of a canary's contribution before it is clipped, in clipping norms."""
LENGTHS = (2.0, FAR, 10.0)
"""Lengths of what is planted in turn, to see what one unit or site changes; each is beyond the clip."""
NOTICED = 10**9
"""Loss and tokens of a canary: figures that do not go unnoticed where they leave a site."""

T = TypeVar("T", bound=Trainer | PrivateTrainer)


@dataclass(frozen=True)
class Audited:
    """The result of an audit."""

    what: str
    """The game that was played, in words."""
    row: AuditRow
    """The guesses, and the lower bound on epsilon that they prove."""
    claimed: float
    """Epsilon of what was charged for what was played."""
    claimed_run: float
    """Epsilon that the accountant claims for the run."""
    delta: float
    """Delta of all these epsilons."""
    at_half_noise: float
    """The bound to expect if the noise had half of its standard deviation: the power of the guesses."""
    checks: tuple[Check, ...]
    """The factors of the mechanism as they were applied."""

    @property
    def refuted(self) -> bool:
        """Whether the guesses refute the claim."""
        return self.row.refuting is not None and self.row.refuting > self.claimed

    @property
    def alarm(self) -> bool:
        """Whether the claim is refuted, or a factor is not what was charged: wrong with probability 1e-4 at most."""
        return self.refuted or bool(misfits(self.checks))


def judged(
    scores: npt.NDArray[np.float64],
    included: npt.NDArray[np.bool_],
    deviation: float,
    confidence: float,
    what: str,
    claimed: tuple[float, float],
    delta: float,
    checks: tuple[Check, ...],
) -> Audited:
    """The result of independent games, each with one target that is there or not by a fair coin.

    The coins are guessed by a threshold of the scores that does not depend on them.

    Args:
        scores: (runs,): without the target of mean 0, with it of mean 1.
        included: (runs,): the coins.
        deviation: Claimed standard deviation of a score.
        confidence: Confidence of the reported bound.
        what: The games, in words.
        claimed: Epsilon of one game, and that of the run.
        delta: Delta of these epsilons.
        checks: As in `Audited`.
    """
    runs, present = len(included), int(included.sum())
    threshold, at_half_noise = _threshold(deviation, runs, delta, confidence)
    said = scores > threshold
    false_positives, false_negatives = int((said & ~included).sum()), int((~said & included).sum())
    bound, refuting = (
        distinguish(false_positives, runs - present, false_negatives, present, delta, level)
        if 0 < present < runs
        else 0.0
        for level in (confidence, ALARM)
    )
    right = runs - false_positives - false_negatives
    row = AuditRow(runs, runs, right, confidence, bound, claimed[0], what, refuting, problem(checks))
    return Audited(what, row, *claimed, delta, at_half_noise, checks)


def _threshold(deviation: float, runs: int, delta: float, confidence: float) -> tuple[float, float]:
    """The threshold that gives the largest bound if the noise is half of the claimed, and that bound.

    Args:
        deviation: Claimed standard deviation of a score.
        runs: Runs, with and without the target together.
        delta: Delta of the claim.
        confidence: Confidence of the bound.
    """
    half, each = deviation / 2, max(1, runs // 2)
    candidates = 0.5 + np.linspace(-4, 4, 161) * max(half, 0.125)
    best = (0.5, 0.0)
    for threshold in candidates:
        wrong = round(each * float(norm.sf(threshold / half)))
        missed = round(each * float(norm.cdf((threshold - 1) / half)))
        bound = distinguish(wrong, each, missed, each, delta, confidence)
        if bound > best[1]:
            best = (float(threshold), bound)
    return best


class TrainedBy(Resident, Generic[T]):
    """A process whose sites train by an audit's trainer; it remains as `used`.

    Args:
        make: Makes it from a plan, its model and a device.
    """

    def __init__(self, make: Callable[[Plan, LanguageModel, torch.device], T]) -> None:
        super().__init__()
        self._make = make

    def trainer(self, plan: Plan, model: LanguageModel, device: torch.device) -> T:
        """The trainer."""
        self.used = self._make(plan, model, device)
        return self.used


def charged(site: Site, plan: Plan, run: str) -> tuple[Event, ...]:
    """What a site's own ledger was charged for its data, as `charged_for`."""
    entries = Ledger(site.config.folder / "ledger.sqlite", site.name, composed).entries()
    return charged_for(entries, site.config.data_name, plan, run)


def charged_for(entries: Iterable[Entry], dataset: str, plan: Plan, run: str) -> tuple[Event, ...]:
    """The events that a new ledger was charged for a dataset.

    None, if any of its charges is for another run, purpose or round, or at another delta: limits and reports would not
    compose it with the others.
    """
    charges, wanted = [entry.charge for entry in entries], (run, TRAIN, plan.privacy.delta)
    if any(
        (charge.run, charge.purpose, charge.delta) != wanted or not 0 < charge.round <= plan.run.rounds
        for charge in charges
    ):
        return ()
    return tuple(
        event for charge in charges if charge.dataset == dataset for event in from_json(charge.event)
    )


def played(plan: Plan, terms: Terms, **sections: dict[str, Any]) -> Plan:
    """A plan like the run's, for an audit to play.

    It has no evaluations. So where the run's are charged, and where the number of rounds or steps changes, it has the
    noise multiplier that the run claims instead of an epsilon to meet, and no budget. The learning rate's warm-up ends
    before its steps do.

    Args:
        plan: The run's plan.
        terms: Its terms.
        sections: Fields to change, by section.

    Raises:
        PlanError: the changes do not fit the plan.
    """
    values = {
        f"{name}.{field}": value for name, fields in sections.items() for field, value in fields.items()
    }
    facts = json.loads(plan.to_json())
    if plan.charged_evaluations or any(
        values.get(f"{name}.{field}", facts[name][field]) != facts[name][field] for name, field in _LENGTHS
    ):
        values |= {
            "privacy.noise_multiplier": terms.noise_multiplier,
            "privacy.target_epsilon": None,
            "privacy.budget": None,
        }
    # No records of an evaluation are kept apart.
    values |= {"server.evaluation": NO_EVALUATION, "simulation.public": 0.0}
    values |= {"server.evaluation_epsilon": None}
    rounds, steps = (
        values.get(field, known)
        for field, known in (("run.rounds", plan.run.rounds), ("local.steps", plan.local.steps))
    )
    values["local.warmup_steps"] = min(plan.local.warmup_steps, rounds * steps - 1)
    return soundness.changed(plan, values)


def house(folder: Path, like: SiteConfig, *, records: bool, **fields: Any) -> SiteConfig:
    """The configuration of a site of an audit: a new state folder and a new ledger.

    Args:
        folder: The state folder, which is made.
        like: Another site.
        records: Whether it has that site's records, whose cache of sequences it shares; otherwise it has none.
        fields: Further fields.
    """
    folder.mkdir(parents=True)
    # One for all: with the same noised sums two sites must send the same bytes.
    write_new(folder / DECLARED_ROUNDING, bytes(32), durable=False)
    none = folder / "records.jsonl"
    none.touch()
    if records:
        cache = like.folder.absolute() / "data"
        cache.mkdir(parents=True, exist_ok=True)
        (folder / "data").symlink_to(cache, target_is_directory=True)
    device = str(device_for(like.device))  # one: the trainer that plants canaries is that of one process
    data = like.data if records else str(none)
    return SiteConfig(data=data, split=like.split, device=device, state=str(folder), **fields)


def prepared(plan: Plan, records: int) -> Prepared:
    """A site's training data of so many records, whose content nobody uses.

    Args:
        plan: The plan.
        records: 0: a site without any.
    """
    length = plan.data.sequence_length
    rows = np.zeros((records, length), np.int32)
    sequences = Sequences(rows, rows, None, 0, np.arange(records + 1))
    return Prepared(sequences, sequences, records, {})
