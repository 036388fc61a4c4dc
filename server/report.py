"""The privacy report of a run, from what its folder holds: the plan, the journal, the ledger, the metrics.

Nothing is taken from memory or believed once. Every epsilon is composed anew from the ledger's charges at the plan's
delta, and the ledger is held against the other two witnesses: each charge must be what the plan's terms cost, each
site in a sum must have paid for it, and the journal's own figures must be those of the charges. What does not agree
makes the ledger one that does not verify, with the reason, and then `privacy/report.py` claims nothing.

Of a simulation the sites' ledgers lie in the run folder too. Where a site has counted more than the coordinator, such
as for a round that it trained twice because its process was killed between, the site's figure is the one reported.

What the plan's mechanism means in words is `server/claims.py`. Refused: reports that the run writes as it goes, which
would be its memory of itself, and could not be made anew by somebody who doubts them.
"""

from __future__ import annotations

import io
import json
import math
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from cloister.aggregation.graph import assumed, parameters, tolerated
from cloister.privacy.accounting import Accountant, Spent, spent
from cloister.privacy.events import Event, Gaussian, SampledGaussian, from_json, to_json
from cloister.privacy.ledger import FIRST, Entry, History, read_history
from cloister.privacy.report import (
    AuditRow,
    Ledger,
    LedgerRow,
    RoundRow,
    RunReport,
    SecureSum,
    SiteRow,
)
from cloister.privacy.terms import Terms, terms_of
from cloister.protocol.errors import AccountingError, LedgerError, RunFolderError
from cloister.protocol.plan import Plan
from cloister.protocol.roster import load_roster
from cloister.server import claims
from cloister.server import journal as steps
from cloister.server.folder import RunFolder, read_plan
from cloister.server.journal import Journal

_SITES = "sites"
"""Where a simulation keeps its sites' folders (`simulations/federation.py`)."""
_PACKAGES = ("cloister", "torch", "flwr", "dp-accounting", "opacus")
_SAME = 1e-6
"""By how much of itself an epsilon may differ between machines, whose transforms round differently."""


def gather(path: Path, *, clock: Callable[[], float] = time.time) -> RunReport:
    """The report of the run in a folder: finished, stopped, or still under way, and then of the rounds that are done.

    It only reads, and takes no lock. Composing costs some 0.4 s for each round under privacy loss distributions.

    Args:
        path: The run folder.
        clock: Seconds since the epoch, for when the report is made.

    Raises:
        RunFolderError: there is no run in it, it has not begun, or what the report needs is missing or damaged.
    """
    # It reads only, so it needs no lock, and a run under way can be reported.
    folder = RunFolder(path, read_plan(path), io.BytesIO())
    plan = folder.plan
    course = _course(folder)
    simulated = (path / _SITES).is_dir()
    terms = terms_of(plan, _dimension(folder) if plan.privacy.unit == "site" else 1)
    account = _account(folder, course, terms, simulated=simulated)
    return RunReport(
        run=plan.run.name,
        run_id=course.run,
        created=_moment(clock()),
        plan_digest=plan.digest(),
        plan=json.dumps(json.loads(plan.to_json()), indent=2, ensure_ascii=False),
        roster_hash=_roster_hash(folder, course),
        versions=_versions(),
        unit=plan.privacy.unit,
        unit_in_words=claims.unit(plan),
        relation=claims.relation(plan),
        mechanism=claims.mechanism(plan, terms),
        method=claims.method(plan),
        clip=None if terms is None else plan.privacy.clip,
        noise_multiplier=None if terms is None else terms.noise_multiplier,
        sampling_rate=plan.privacy.sampling_rate,
        accountant="" if terms is None else claims.accountant(plan, account.most),
        delta=None if terms is None else terms.delta,
        epsilon=account.epsilon,
        budget=None if terms is None else terms.budget,
        stopped_by_budget=course.stopped == "budget",
        declared_noise=terms is not None and plan.simulation.noise_seed is not None,
        rounds=_rounds(folder, course, account),
        sites=_site_rows(folder, course, account),
        assumptions=claims.assumptions(plan, terms, simulated=simulated),
        trusted=claims.trusted(plan, simulated=simulated),
        not_covered=(*_missing_rounds(plan, course), *claims.not_covered(plan)),
        secure=_secure(plan),
        ledger=account.ledger,
        audit=_audit(path / "audit.json"),
    )


# What the run did, by its journal


@dataclass(frozen=True)
class _Course:
    """What the journal says about a run."""

    run: str
    """Its identity."""
    created: Mapping[str, Any]
    """What was recorded when it was made."""
    done: Mapping[int, Mapping[str, Any]]
    """The rounds that are done, without the initial model, and their facts; a round given up has no `sites`."""
    asked: Mapping[str, frozenset[int]]
    """For each site the rounds of which an attempt began with it."""
    survivors: Mapping[int, frozenset[str]]
    """Under masks: for each round the sites that were last asked for shares."""
    refusals: Mapping[str, tuple[str, ...]]
    """For each site its refusals, in words."""
    finished: bool
    stopped: str
    """Why it ended before its last round; empty where it did not."""

    @property
    def summed(self) -> list[int]:
        """The rounds whose sum was opened, in order."""
        return sorted(number for number, facts in self.done.items() if facts.get("sites"))


def _course(folder: RunFolder) -> _Course:
    begun = RunFolderError(
        str(folder.path),
        expected="a run that has begun, with its journal",
        fix="a report is of rounds that were done, and this folder knows of none",
    )
    if not folder.journal.exists():
        raise begun
    with Journal(folder.journal) as journal:
        entries = journal.entries()
    created = next((entry.detail for entry in entries if entry.step == steps.CREATED), None)
    if created is None:
        raise begun
    asked: defaultdict[str, set[int]] = defaultdict(set)
    refusals: defaultdict[str, list[str]] = defaultdict(list)
    survivors: dict[int, frozenset[str]] = {}
    for entry in entries:
        if entry.step == f"train {steps.BEGUN}":
            for site in entry.detail["cohort"]:
                asked[site].add(entry.round)
        elif entry.step == f"train {steps.UNMASKING}":
            survivors[entry.round] = frozenset(entry.detail["survivors"])
        elif entry.step == steps.REFUSED:
            when = f"after round {entry.round}" if entry.round else "before the first round"
            refusals[entry.detail["site"]].append(f"{when}: {entry.detail['reason']}")
    end = next((entry.detail for entry in reversed(entries) if entry.step == steps.FINISHED), None)
    return _Course(
        run=str(created["run"]),
        created=created,
        done={entry.round: entry.detail for entry in entries if entry.step == steps.DONE and entry.round},
        asked={site: frozenset(rounds) for site, rounds in asked.items()},
        survivors=survivors,
        refusals={site: tuple(dict.fromkeys(reasons)) for site, reasons in refusals.items()},
        finished=end is not None,
        stopped="" if end is None else end.get("stopped", ""),
    )


# What it cost, by its ledgers


class _Composer:
    """Charges -> what they cost together at the plan's delta; the same charges are composed once."""

    def __init__(self, terms: Terms) -> None:
        self._delta = terms.delta
        self._accountant: Accountant = "rdp" if terms.accountant == "rdp" else "pld"
        self._known: dict[frozenset[tuple[str, int]], Spent] = {}

    def __call__(self, entries: Iterable[Entry]) -> Spent:
        charges = Counter(entry.charge.event for entry in entries)
        key = frozenset(charges.items())
        if key not in self._known:
            events = [event for text in charges.elements() for event in from_json(text)]
            self._known[key] = spent(events, self._delta, self._accountant)
        return self._known[key]


@dataclass(frozen=True)
class _Account:
    """What the run cost."""

    ledger: Ledger
    epsilon: float | None
    """The largest of the sites'; None where nothing finite can be said, or there is no privacy unit."""
    most: Spent | None
    """That of the site that has spent most."""
    after: Mapping[int, float | None]
    """For each done round the largest epsilon of a site, by the coordinator's ledger."""
    sites: Mapping[str, float | None]
    """Epsilon of each site that has paid."""
    charged: Mapping[str, frozenset[int]] | None
    """For each site the rounds that it has paid for; None where no ledger says so."""
    notes: Mapping[str, str]
    """Where a site's own ledger counts more, by site."""


def _account(folder: RunFolder, course: _Course, terms: Terms | None, *, simulated: bool) -> _Account:
    if terms is None:
        return _Account(Ledger((), FIRST.hex(), verified=True), None, None, {}, {}, None, {})
    try:
        history = _history(folder.ledger)
    except (LedgerError, RunFolderError) as error:
        return _Account(Ledger((), "", verified=False, problem=str(error)), None, None, {}, {}, None, {})
    entries = [entry for entry in history.entries if entry.charge.run == course.run]
    problem = _foreign_charge(entries, terms)
    if problem:
        return _Account(_ledger(history, entries, None, problem), None, None, {}, {}, None, {})
    compose = _Composer(terms)
    mine: dict[str, list[Entry]] = {}
    after_row: list[float | None] = []
    after_round: dict[int, float | None] = {}
    for entry in entries:
        paid = mine.setdefault(entry.charge.dataset, [])
        paid.append(entry)
        after_row.append(_finite(compose(paid).epsilon))
    for number in course.done:
        until = [[e for e in paid if e.charge.round <= number] for paid in mine.values()]
        after_round[number] = _finite(max((compose(paid).epsilon for paid in until), default=0.0))
    charged = {site: frozenset(entry.charge.round for entry in paid) for site, paid in mine.items()}
    problem = _unpaid(course, charged) or _contradiction(course, after_round)
    costs = {site: compose(paid) for site, paid in mine.items()}
    notes: dict[str, str] = {}
    for site, own in (_site_ledgers(folder.path) if simulated else {}).items():
        try:
            paid = [entry for entry in _history(own).entries if entry.charge.run == course.run]
            cost = compose(paid)
        except (LedgerError, AccountingError) as error:
            problem = problem or f"the ledger of {site} itself does not verify: {error}"
            continue
        known = costs.get(site)
        if paid and (known is None or cost.epsilon > known.epsilon):
            costs[site] = cost
            notes[site] = (
                f"Epsilon is by its own ledger, which has {len(paid)} charges for this run; the "
                f"coordinator's has {len(mine.get(site, ()))}."
            )
    most = max(costs.values(), key=lambda cost: cost.epsilon, default=compose(()))
    return _Account(
        ledger=_ledger(history, entries, after_row, problem),
        epsilon=_finite(most.epsilon),
        most=most,
        after=after_round,
        sites={site: _finite(cost.epsilon) for site, cost in costs.items()},
        charged=charged,
        notes=notes,
    )


def _history(path: Path) -> History:
    if not path.is_file():
        raise RunFolderError(str(path), expected="the ledger of this run, and it is gone")
    return read_history(path)


def _site_ledgers(path: Path) -> dict[str, Path]:
    """A simulated site's own ledger, by the site's name, where it has one."""
    return {file.parents[1].name: file for file in sorted((path / _SITES).glob("*/state/ledger.sqlite"))}


def _ledger(
    history: History, entries: Sequence[Entry], epsilons: Sequence[float | None] | None, problem: str
) -> Ledger:
    rows = tuple(
        LedgerRow(
            number=entry.number,
            written=_moment(entry.time),
            site=entry.charge.dataset,
            event=f"round {entry.charge.round}: {_charge_in_words(entry)}",
            epsilon=None if epsilons is None else epsilons[at],
            hash=entry.hash.hex(),
        )
        for at, entry in enumerate(entries)
    )
    return Ledger(rows, history.head.hex(), verified=not problem, problem=problem)


def _charge_in_words(entry: Entry) -> str:
    try:
        return "; ".join(_event_in_words(event) for event in from_json(entry.charge.event))
    except AccountingError:
        return entry.charge.event


def _event_in_words(event: Event) -> str:
    match event:
        case SampledGaussian(noise, rate, count):
            return f"{count} Poisson-sampled Gaussian steps, noise multiplier {noise:g}, rate {rate:g}"
        case Gaussian(noise, count):
            return f"{_times(count)}Gaussian noise on a sum, noise multiplier {noise:g}"
        case _:
            return (
                f"{_times(event.count)}Skellam noise on a sum of integers, variance {event.variance:.6g}, "
                f"L2 norm of a site at most {event.l2:.6g}" + (", and a noised count" if event.extra else "")
            )


def _times(count: int) -> str:
    return "" if count == 1 else f"{count} times "


def _foreign_charge(entries: Sequence[Entry], terms: Terms) -> str:
    """The first charge that is not what the plan's terms cost, in words; nothing where there is none."""
    expected = to_json(terms.round_events)
    for entry in entries:
        if entry.charge.event != expected:
            return f"row {entry.number} charges {_charge_in_words(entry)}, which is not what the plan's rounds cost"
        if entry.charge.delta != terms.delta:
            return f"row {entry.number} is at delta {entry.charge.delta:g}, and the plan's is {terms.delta:g}"
    return ""


def _unpaid(course: _Course, charged: Mapping[str, frozenset[int]]) -> str:
    """The first round that was released without the charges for it, in words; nothing where there is none."""
    for number in course.summed:
        paid = {site for site, rounds in charged.items() if number in rounds}
        missing = sorted(course.survivors.get(number, frozenset()) - paid)
        if missing:
            return f"it holds no charge for {missing[0]}, whose update is in the sum of round {number}"
        if len(paid) < course.done[number]["sites"]:
            return (
                f"{course.done[number]['sites']} updates are in the sum of round {number}, and it holds "
                f"charges for {len(paid)}"
            )
    return ""


def _contradiction(course: _Course, after: Mapping[int, float | None]) -> str:
    """The first round after which the journal has another epsilon, in words; nothing where there is none."""
    for number in sorted(course.done):
        recorded, composed = course.done[number].get("epsilon"), after[number]
        if recorded is None:
            continue
        if not math.isclose(recorded, math.inf if composed is None else composed, rel_tol=_SAME):
            found = "nothing finite" if composed is None else f"{composed:.6g}"
            return f"it comes to epsilon {found} after round {number}, and the journal has {recorded:.6g}"
    return ""


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


# Tables and facts


def _rounds(folder: RunFolder, course: _Course, account: _Account) -> tuple[RoundRow, ...]:
    losses = {row["round"]: row.get("loss") for row in folder.metrics()}
    return tuple(
        RoundRow(
            round=number,
            epsilon=account.after.get(number),
            loss=_loss(losses.get(number)),
            sites=course.done[number].get("sites") or 0,
        )
        for number in sorted(course.done)
    )


def _loss(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _site_rows(folder: RunFolder, course: _Course, account: _Account) -> tuple[SiteRow, ...]:
    """What each site did, as far as the coordinator knows: that a site was asked, paid, or is in a sum."""
    names = {*course.asked, *course.refusals, *account.sites}
    names |= {file.parent.name for file in (folder.path / _SITES).glob("*/site.toml")}
    unit = folder.plan.privacy.unit
    rows = []
    for name in sorted(names):
        asked = course.asked.get(name, frozenset()).intersection(course.done)
        summed: frozenset[int] | None = (
            None  # where the coordinator's files do not say whose updates are in a sum
        )
        if folder.plan.aggregation.secure:
            summed = frozenset(number for number in course.summed if name in course.survivors.get(number, ()))
        elif unit == "site" and account.charged is not None:
            summed = account.charged.get(name, frozenset()).intersection(course.summed)
        if account.charged is not None and unit == "record":
            rounds = account.charged.get(name, frozenset())
        else:
            rounds = asked if summed is None else summed
        notes = [f"Refused {refusal}." for refusal in course.refusals.get(name, ())]
        if summed is not None and len(summed) < len(asked):
            notes.append(f"Asked in {len(asked)} of the rounds done, and in the sum of {len(summed)}.")
        if name in account.notes:
            notes.append(account.notes[name])
        rows.append(
            SiteRow(
                name=name,
                rounds=len(rounds),
                steps=len(rounds) * folder.plan.local.steps,
                epsilon=account.sites.get(name, 0.0 if account.charged is not None else None),
                notes=" ".join(notes),
            )
        )
    return tuple(rows)


def _secure(plan: Plan) -> SecureSum | None:
    if not plan.aggregation.secure:
        return None
    n, section = plan.cohort.size(), plan.aggregation
    found = parameters(n, tolerated(n, section.dropouts), assumed(n, section.colluders))
    return SecureSum(n, found.k, found.threshold, found.dropouts, found.colluders, section.ring_bits)


def _roster_hash(folder: RunFolder, course: _Course) -> str | None:
    recorded = course.created.get("roster")
    if recorded:
        return str(recorded)
    file = folder.path / _SITES / "roster.toml"
    if folder.plan.aggregation.secure and file.exists():
        return load_roster(file).hash.hex()
    return None


def _dimension(folder: RunFolder) -> int:
    """Number of trained parameters, from the newest checkpoint."""
    stored = sorted(folder.checkpoints.glob("round-*.safetensors"))
    if not stored:
        raise RunFolderError(
            str(folder.checkpoints),
            expected="a checkpoint of the run, which says how many parameters are trained",
            fix="bring one back from a copy",
        )
    try:
        with safe_open(stored[-1], framework="np") as file:
            names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118  # not a dict
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(str(stored[-1]), expected=f"a whole checkpoint ({error})") from error


def _audit(path: Path) -> AuditRow | None:
    if not path.exists():
        return None
    try:
        return TypeAdapter(AuditRow).validate_json(json.dumps(json.loads(path.read_bytes())["row"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else f"{error}"
        raise RunFolderError(
            str(path),
            expected=f"the result of an audit ({why})",
            fix="run the audit again, or remove the file",
        ) from error


def _versions() -> dict[str, str]:
    """Of the software that makes the report."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # not every extra is installed
    return found


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _missing_rounds(plan: Plan, course: _Course) -> tuple[str, ...]:
    last, of = max(course.done, default=0), plan.run.rounds
    if not course.finished:
        return (
            (
                f"The rest of the run: it is not finished. {last} of {of} rounds are done, and each further "
                "one adds to what is spent."
            ),
        )
    if last < of:
        why = {
            "budget": "the next round would have exceeded the budget",
            "refused": "too many sites refused to go on",
        }.get(course.stopped, "it was ended")
        return (f"Rounds {last + 1} to {of} of the plan, which were not done: {why}.",)
    return ()
