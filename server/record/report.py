"""The privacy report of a run, computed from its folder: the plan, the journal, the ledger and the metrics.

The epsilon that is claimed is composed again from the ledger's charges at the plan's delta, and the ledger is checked
against the plan and the journal: each charge must be the plan's cost of a round, or of an evaluation by the sites that
is due; each site in a sum must have been charged for it, and the epsilons in the journal must be those of the charges.
If they disagree, the report says that the ledger does not verify and why, and `privacy/report/report.py` claims no
guarantee.

So what a site has spent is a function of the numbers of its charges for rounds and for evaluations. Of the site with
most charges it is composed again for at most `COMPOSED` numbers, the first and the last among them; for a number
between, the journal's figure is taken if it lies between its neighbours, and composed again if it does not.

If the plan names a ledger over runs (`privacy/ledger/dataset.py`), the report also states the epsilon of all runs
together; without one it says that epsilon is that of this run alone.

In a simulation the sites' own ledgers are in the run folder as well. If a site's ledger counts more than the
coordinator's (a site whose process was killed may train a round twice), the report states the site's epsilon. If an
update is in a sum and its site's own ledger has no charge for it, or is lost, the report claims no guarantee either.

`privacy/accounting/claims.py` puts the plan's guarantee into words. Refused: a report that the run writes as it goes,
because a reader who doubts it could not compute it again.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError

from cloister.privacy.accounting import claims
from cloister.privacy.accounting.accountant import Spent, spent
from cloister.privacy.accounting.group import epsilons
from cloister.privacy.accounting.terms import Terms, terms_of
from cloister.privacy.accounting.trust import Shares, shares
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import FIRST, Entry, History, read_history
from cloister.privacy.mechanism.events import (
    CorrelatedGaussian,
    Event,
    Gaussian,
    SampledGaussian,
    bare,
    from_json,
    to_json,
)
from cloister.privacy.report.report import (
    LARGEST_EPSILON,
    MOST_FIGURES,
    AnswerRow,
    AuditRow,
    CostRow,
    DatasetRow,
    FigureRow,
    GroupRow,
    Ledger,
    LedgerRow,
    QuestionsRow,
    RoundRow,
    RunReport,
    SecureSum,
    SiteRow,
)
from cloister.protocol.errors import AccountingError, BudgetError, LedgerError, RunFolderError, StorageError
from cloister.protocol.machine.prerequisites import releases
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Purpose
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.registry import kind_of
from cloister.server.record.folder import RunFiles, opened, read_answer, read_plan, stored_checkpoints
from cloister.server.record.history import RunHistory, hash_of_plan, run_history

_PACKAGES = ("cloister", "torch", "flwr", "dp-accounting", "opacus")
COMPOSED = 16
"""Numbers of charges for which epsilon is composed again although the journal has it."""
_NO_LEDGER = "It has no ledger of its own: it never trained, or the ledger is lost."
_SAME = 1e-6
"""Relative difference that two machines may find between the same epsilons: their transforms round differently."""


def gather(path: Path, *, clock: Callable[[], float] = time.time) -> RunReport:
    """The report of the run in a folder; if the run is under way, of the rounds that are done.

    It only reads and takes no lock. It takes seconds for any number of rounds: 0.3 s for each of `COMPOSED` figures.

    Args:
        path: The run files.
        clock: Seconds since the epoch: the report's date.

    Raises:
        RunFolderError: there is no run in the folder, the run has not begun, or a file is missing or damaged.
    """
    files, plan = RunFiles(path), read_plan(path)
    history = run_history(files)
    terms = terms_of(plan, _dimension(files) if plan.privacy.unit == "site" and plan.question is None else 1)
    account = _account(files, plan, history, terms)
    asked = None
    if terms is not None and (plan.question is not None or plan.charged_evaluations):
        asked = shares(account.together.elements(), terms.delta, terms.accountant, adaptive=False)
    return RunReport(
        run=plan.run.name,
        run_id=history.run,
        created=_moment(clock()),
        plan_digest=plan.digest(),
        plan=json.dumps(json.loads(plan.to_json()), indent=2, ensure_ascii=False),
        roster_hash=history.roster_hash,
        versions=releases(_PACKAGES),
        unit=plan.privacy.unit,
        unit_in_words=claims.unit(plan),
        relation=claims.relation(plan),
        mechanism=claims.mechanism(plan, terms),
        method=claims.PROSE.line("method", plan),
        clip=None if terms is None else terms.asked.bound if terms.asked else plan.privacy.clip,
        noise_multiplier=None if terms is None else terms.noise_multiplier,
        sampling_rate=plan.privacy.sampling_rate,
        accountant="" if terms is None else claims.accountant(plan, account.most),
        delta=None if terms is None else terms.delta,
        epsilon=account.epsilon,
        budget=None if terms is None else terms.budget,
        stopped_by_budget=history.stopped in ("budget", "dataset"),
        declared_noise=terms is not None and plan.simulation.noise_seed is not None,
        rounds=_rounds(files, history, account),
        sites=_site_rows(files, plan, history, account),
        allowed=None if terms is None else _finite(terms.allowed(plan.run.rounds, plan.cohort.attempts)),
        federation=plan.cohort.sites,
        assumptions=claims.assumptions(plan, terms, simulated=history.simulated),
        trusted=claims.PROSE.said("trusted", plan, history.simulated),
        not_covered=_not_covered(files, plan, history),
        secure=_secure(plan),
        ledger=account.ledger,
        audit=audit_row(files.audit),
        dataset=over_runs(plan, history, account.epsilon),
        units=claims.things(plan),
        groups=_groups(account, terms),
        trust_model=claims.PROSE.line("trust_model", plan),
        protected_from=claims.PROSE.line("protected_from", plan),
        responsible=claims.PROSE.said("responsible", plan, history.simulated),
        exposure=claims.PROSE.line("exposure", plan, history.simulated),
        label=plan.data.label,
        protected=None if plan.cohort.units is None else plan.cohort.units * plan.cohort.sites,
        released=_released(plan),
        answer=_answer(files, plan),
        asked=None if asked is None else _asked(asked, account.epsilon),
    )


def _answer(files: RunFiles, plan: Plan) -> AnswerRow | None:
    """The answer to a question; None: there is none yet."""
    if plan.question is None or not files.final.is_dir():
        return None
    answer = read_answer(files)
    drawn = set(kind_of(plan).drawn(answer.figures))
    figures = tuple(
        FigureRow(
            each.name,
            each.value,
            None if each.value is None else each.noise,
            each.sampling,
            answer.public.get(each.name),
            each in drawn,
        )
        for each in answer.figures[:MOST_FIGURES]
    )
    return AnswerRow(answer.sites, figures, max(0, len(answer.figures) - MOST_FIGURES))


def _released(plan: Plan) -> Literal["models", "models and evaluations", "answer"]:
    if plan.question is not None:
        return "answer"
    return "models and evaluations" if plan.charged_evaluations else "models"


# What it cost, by its ledgers


_Charges: TypeAlias = frozenset[tuple[str, int]]
"""Charges of a site, each as JSON with how often."""


class _Composer:
    """Charges, each as JSON -> their cost together at the plan's delta; equal sets of charges are composed once."""

    def __init__(self, terms: Terms) -> None:
        self._delta = terms.delta
        self._accountant = terms.accountant
        self._known: dict[_Charges, float] = {}

    def spent(self, charges: Counter[str]) -> Spent:
        """The cost, composed."""
        events = [event for text, times in charges.items() for event in list(from_json(text)) * times]
        return spent(events, self._delta, self._accountant)

    def epsilon(self, charges: Counter[str]) -> float:
        """Epsilon, composed if it is not known."""
        key = frozenset(charges.items())
        if key not in self._known:
            self._known[key] = self.spent(charges).epsilon
        return self._known[key]

    def follow(self, charges: Sequence[str], journaled: Mapping[_Charges, float]) -> None:
        """Know epsilon of the first 1, 2, ... of some charges, to all of them.

        Args:
            charges: The charges of a site, in order.
            journaled: What the journal has, by the charges until then.
        """
        spread = (1 + step * (len(charges) - 1) / (COMPOSED - 1) for step in range(COMPOSED))
        again = sorted({round(number) for number in spread} if charges else set())
        composed = {number: self.epsilon(Counter(charges[:number])) for number in again}
        before, until = 0.0, Counter[str]()
        for number, charge in enumerate(charges, 1):
            until[charge] += 1
            key = frozenset(until.items())
            if number not in composed and key in journaled:
                above = composed[next(each for each in again if each > number)]
                if before <= journaled[key] <= above:
                    self._known[key] = journaled[key]
            before = self.epsilon(until)


@dataclass(frozen=True)
class _Account:
    """The privacy cost of the run."""

    ledger: Ledger
    epsilon: float | None
    """The largest of the sites; None if it is not finite or there is no privacy unit."""
    most: Spent | None
    """The cost of the site that has spent most."""
    events: tuple[Event, ...]
    """What that site released."""
    together: Counter[str]
    """The events of the sites, each as in a ledger, and as often as the site that was charged most often for it."""
    after: Mapping[int, float | None]
    """For each round that is done the largest epsilon of a site by the coordinator's ledger, with the evaluation of its
    model."""
    sites: Mapping[str, float | None]
    """Epsilon of each site that was charged."""
    charged: Mapping[str, frozenset[int]] | None
    """For each site the rounds for which it was charged; None without a ledger."""
    notes: Mapping[str, str]
    """For each site whose own ledger counts more, a sentence that says so."""


def _account(files: RunFiles, plan: Plan, history: RunHistory, terms: Terms | None) -> _Account:
    if terms is None:
        return _Account(Ledger((), FIRST.hex(), verified=True), None, None, (), Counter(), {}, {}, None, {})
    try:
        charges = _history(files.ledger)
    except (LedgerError, RunFolderError) as error:
        return _Account(
            Ledger((), "", verified=False, problem=str(error)), None, None, (), Counter(), {}, {}, None, {}
        )
    entries = [entry for entry in charges.entries if entry.charge.run == history.run]
    problem = _foreign_charge(entries, terms)
    if history.plan not in ("", plan.digest()) or history.plan_file not in ("", hash_of_plan(files)):
        problem = f"{files.plan_file} is not the plan with which the run began"
    if problem:
        return _Account(_ledger(charges, entries, None, problem), None, None, (), Counter(), {}, {}, None, {})
    compose = _Composer(terms)
    mine: dict[str, list[Entry]] = {}
    until: list[Counter[str]] = []  # for each row, the charges of its site until then
    so_far: dict[str, Counter[str]] = {}
    for entry in entries:
        site = entry.charge.dataset
        mine.setdefault(site, []).append(entry)
        so_far[site] = so_far.get(site, Counter()) + Counter([entry.charge.event])
        until.append(so_far[site])
    at_done, evaluated = (_most_charges(entries, history.done, after) for after in (TRAIN, EVALUATE))
    journaled = _journaled(history, at_done)
    longest = max(mine.values(), key=len, default=[])  # the charges of the other sites begin alike
    compose.follow([entry.charge.event for entry in longest], journaled)
    problem = _unpaid(history, mine) or _contradiction(history, _largest(compose, at_done))
    counted: dict[str, list[Entry]] = dict(mine)
    costs = {site: compose.epsilon(charges) for site, charges in so_far.items()}
    notes: dict[str, str] = {}
    owned = list(_own_ledgers(files, history, compose)) if history.simulated else []
    for own in owned:
        known = costs.get(own.site)
        if own.paid and (known is None or own.epsilon > known):
            costs[own.site], counted[own.site] = own.epsilon, own.paid
            notes[own.site] = (
                f"Epsilon is that of its own ledger, which has {len(own.paid)} charges for this run; the "
                f"coordinator's has {len(mine.get(own.site, ()))}."
            )
        problem = problem or own.problem
    if history.simulated:
        problem = problem or _unpaid(
            history, {own.site: own.paid for own in owned}, "the sites' own ledgers hold"
        )
        notes |= dict.fromkeys(mine.keys() - {own.site for own in owned}, _NO_LEDGER)
    top = max(costs, key=lambda site: costs[site], default="")
    most = compose.spent(_texts(counted.get(top, ())))
    return _Account(
        ledger=_ledger(charges, entries, [_finite(compose.epsilon(each)) for each in until], problem),
        epsilon=_finite(most.epsilon),
        most=most,
        events=tuple(event for entry in counted.get(top, ()) for event in from_json(entry.charge.event)),
        together=reduce(or_, map(_texts, counted.values()), Counter()),
        after=_largest(compose, evaluated),
        sites={site: _finite(cost) for site, cost in costs.items()},
        charged={site: frozenset(entry.charge.round for entry in paid) for site, paid in mine.items()},
        notes=notes,
    )


@dataclass(frozen=True)
class _OwnLedger:
    """A simulated site's own ledger. A site that was asked and did not train has no charge, and no ledger if it never
    trained."""

    site: str
    paid: list[Entry]
    """Its charges for this run; none if it does not verify."""
    epsilon: float
    problem: str
    """Why it contradicts the run; empty if it does not."""


def _own_ledgers(files: RunFiles, history: RunHistory, compose: _Composer) -> Iterator[_OwnLedger]:
    for site, path in files.sites.ledgers().items():
        try:
            paid = [entry for entry in _history(path).entries if entry.charge.run == history.run]
            epsilon = compose.epsilon(_texts(paid))
        except (LedgerError, AccountingError) as error:
            yield _OwnLedger(site, [], 0.0, f"the ledger of {site} itself does not verify: {error}")
        else:
            yield _OwnLedger(site, paid, epsilon, "")


def most_charges(files: RunFiles, purpose: Purpose = TRAIN) -> tuple[int, int]:
    """The most charges of a site for one purpose in a run folder, by the coordinator's ledger; by that and the
    simulated sites' own.

    The second is more if a site's update was lost in a crash after its charge, and was made and charged again.

    Raises:
        LedgerError: a ledger is damaged.
    """

    def most(path: Path) -> int:
        entries = read_history(path).entries if path.is_file() else ()
        charges = (entry.charge for entry in entries)
        paid = Counter((charge.run, charge.dataset) for charge in charges if charge.purpose == purpose)
        return max(paid.values(), default=0)

    charged = most(files.ledger)
    return charged, max(charged, *map(most, files.sites.ledgers().values()), 0)


def _texts(paid: Iterable[Entry]) -> Counter[str]:
    return Counter(entry.charge.event for entry in paid)


def _most_charges(
    entries: Iterable[Entry], rounds: Iterable[int], after: Purpose
) -> dict[int, list[Counter[str]]]:
    """For each round the most charges that sites have for it and the rounds before it: those of one site, or of several
    of which none has all that another has.

    Args:
        entries: The ledger.
        rounds: The rounds.
        after: `train`: when the round is done, and before its model is evaluated; `evaluate`: after that.
    """

    def moment(entry: Entry) -> tuple[int, bool]:
        return entry.charge.round, entry.charge.purpose == EVALUATE

    found: dict[int, list[Counter[str]]] = {}
    paid: dict[str, Counter[str]] = {}
    most: list[Counter[str]] = []
    coming = sorted(entries, key=moment, reverse=True)
    for number in sorted(rounds):
        while coming and moment(coming[-1]) <= (number, after == EVALUATE):
            charge = coming.pop().charge
            mine = paid[charge.dataset] = paid.get(charge.dataset, Counter()) + Counter([charge.event])
            if not any(mine <= other for other in most):
                most = [other for other in most if not other <= mine] + [mine]
        found[number] = most
    return found


def _journaled(history: RunHistory, most: Mapping[int, Sequence[Counter[str]]]) -> dict[_Charges, float]:
    """The journal's epsilons of the most charges when rounds were done, where one site has them."""
    return {
        frozenset(charges[0].items()): epsilon
        for done, charges in most.items()
        if len(charges) == 1 and (epsilon := history.done[done].get("epsilon")) is not None
    }


def _largest(compose: _Composer, most: Mapping[int, Sequence[Counter[str]]]) -> dict[int, float | None]:
    """For each round the largest epsilon of some charges."""
    return {number: _finite(max(map(compose.epsilon, each), default=0.0)) for number, each in most.items()}


def _groups(account: _Account, terms: Terms | None) -> tuple[GroupRow, ...]:
    """What holds for several units together, by the charges of the site that has spent most."""
    if terms is None or account.epsilon is None:
        return ()
    found = epsilons(account.events, terms.delta, account.epsilon, LARGEST_EPSILON)
    return tuple(GroupRow(units, epsilon) for units, epsilon in found.items())


def _history(path: Path) -> History:
    if not path.is_file():
        raise RunFolderError(str(path), expected="the ledger of this run, which is missing")
    return read_history(path)


def _ledger(
    charges: History, entries: Sequence[Entry], epsilons: Sequence[float | None] | None, problem: str
) -> Ledger:
    rows = tuple(
        LedgerRow(
            number=entry.number,
            written=_moment(entry.time),
            site=entry.charge.dataset,
            event=f"{_OF[entry.charge.purpose]} {entry.charge.round}: {_charge_in_words(entry)}",
            epsilon=None if epsilons is None else epsilons[at],
            hash=entry.hash.hex(),
        )
        for at, entry in enumerate(entries)
    )
    return Ledger(rows, charges.head.hex(), verified=not problem, problem=problem)


_OF: dict[Purpose, str] = {TRAIN: "round", EVALUATE: "evaluation after round"}


def _charge_in_words(entry: Entry) -> str:
    try:
        words = "; ".join(_event_in_words(event) for event in from_json(entry.charge.event))
        return words or "covered by the charge of the site's first round"
    except AccountingError:
        return entry.charge.event


def _event_in_words(event: Event) -> str:
    match event:
        case SampledGaussian(noise, rate, count):
            on = f" on {event.unit}s" if event.unit != "record" else ""
            return f"{count} Poisson-sampled Gaussian steps{on}, noise multiplier {noise:g}, rate {rate:g}"
        case Gaussian(noise, count):
            return f"{_times(count)}Gaussian noise on a sum, noise multiplier {noise:g}"
        case CorrelatedGaussian(noise, rounds, separation, most):
            return (
                f"correlated Gaussian noise on the sums of all {rounds} rounds, noise multiplier {noise:g}, for a site "
                f"in at most {most} rounds that are at least {separation} apart"
            )
        case _:
            of = f" of {event.honest} sites" if event.honest else ""
            return (
                f"{_times(event.count)}Skellam noise{of} on a sum of integers, variance {event.variance:.6g}, "
                f"L2 norm of one {event.unit} at most {event.l2:.6g}"
                + (", and a noised count" if event.extra else "")
            )


def _times(count: int) -> str:
    return "" if count == 1 else f"{count} times "


def _foreign_charge(entries: Sequence[Entry], terms: Terms) -> str:
    """The first charge that is not the plan's cost of a round or of an evaluation that is due, in words; empty if there
    is none."""
    charged: Counter[tuple[str, Purpose]] = Counter()
    due = () if terms.evaluated is None else terms.evaluated.due
    for entry in entries:
        of = entry.charge.dataset, entry.charge.purpose
        events = terms.cost(entry.charge.purpose, charged[of])
        expected = {to_json(events), to_json(map(bare, events))}  # the second: as earlier versions wrote it
        charged[of] += 1
        if entry.charge.event not in expected:
            return f"row {entry.number} charges {_charge_in_words(entry)}, which is not the cost of the plan's rounds"
        if entry.charge.purpose == EVALUATE and entry.charge.round not in due:
            return f"row {entry.number} charges an evaluation after round {entry.charge.round}, which the plan has not"
        if entry.charge.delta != terms.delta:
            return f"row {entry.number} is at delta {entry.charge.delta:g}, and the plan's is {terms.delta:g}"
    return ""


def _unpaid(history: RunHistory, charged: Mapping[str, Sequence[Entry]], holds: str = "it holds") -> str:
    """The first round or evaluation that was released without its charges, in words; empty if there is none."""
    rounds = {
        purpose: {
            site: {entry.charge.round for entry in paid if entry.charge.purpose == purpose}
            for site, paid in charged.items()
        }
        for purpose in (TRAIN, EVALUATE)
    }
    for number, sites_asked in sorted(history.evaluated.items()):
        paid = {site for site, of in rounds[EVALUATE].items() if number in of}
        if missing := sorted(sites_asked - paid):
            return f"{holds} no charge for {missing[0]}, which has evaluated the model of round {number}"
    for number in history.summed:
        paid = {site for site, of in rounds[TRAIN].items() if number in of}
        summed, sites = history.survivors.get(number, frozenset()), history.done[number].get("sites")
        if sites is not None and len(summed) < sites:
            return f"the journal names {len(summed)} of the {sites} sites in the sum of round {number}"
        if missing := sorted(summed - paid):
            return f"{holds} no charge for {missing[0]}, whose update is in the sum of round {number}"
    return ""


def _contradiction(history: RunHistory, after: Mapping[int, float | None]) -> str:
    """The first round after which the journal has another epsilon, in words; empty if there is none."""
    for number in sorted(history.done):
        recorded, composed = history.done[number].get("epsilon"), after[number]
        if recorded is None:
            continue
        if not math.isclose(recorded, math.inf if composed is None else composed, rel_tol=_SAME):
            found = "nothing finite" if composed is None else f"{composed:.6g}"
            return f"its epsilon after round {number} is {found}, and the journal has {recorded:.6g}"
    return ""


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def over_runs(plan: Plan, history: RunHistory, epsilon: float | None) -> DatasetRow | None:
    """What the dataset has spent over all runs; None if the plan names no ledger for it.

    Args:
        plan: The plan of a run.
        history: Its history.
        epsilon: Epsilon of the run by the coordinator's ledger: a site that was asked and did not train is charged
            there only. None without a guarantee.
    """
    shared = DatasetLedger.of(plan)
    if shared is None:
        return None
    name, path = shared.dataset, str(shared.path)
    try:
        found = shared.spent({history.run: history.summed}, {history.run: history.evaluated})
    except (AccountingError, BudgetError, LedgerError, StorageError) as error:
        return DatasetRow(name, path, 0, None, plan.privacy.delta, shared.limit, "", str(error))
    over = _finite(max(found.epsilon, epsilon or 0.0))
    asked = None if found.shares is None else _asked(found.shares, over)
    return DatasetRow(name, path, found.runs, over, found.delta, shared.limit, found.head, asked=asked)


def _asked(parts: Shares, over: float | None) -> QuestionsRow:
    """The figures of a run, or a dataset, with questions; that against all other parties is at least the epsilon of
    all together."""
    own, least = parts.against_all, math.inf if over is None else over
    return QuestionsRow(
        questions=_cost(parts.questions),
        rest=None if parts.rest is None else _cost(parts.rest),
        against_all=None if own is None else CostRow(_finite(max(own.epsilon, least)), own.delta),
        why_not=parts.why_not,
    )


def _cost(found: Spent) -> CostRow:
    return CostRow(_finite(found.epsilon), found.delta)


# Tables and facts


def _rounds(files: RunFiles, history: RunHistory, account: _Account) -> tuple[RoundRow, ...]:
    losses = {row["round"]: row.get("loss") for row in files.metrics()}
    return tuple(
        RoundRow(
            round=number,
            epsilon=account.after.get(number),
            loss=_loss(losses.get(number)),
            sites=history.done[number].get("sites") or 0,
        )
        for number in sorted(history.done)
    )


def _loss(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _site_rows(files: RunFiles, plan: Plan, history: RunHistory, account: _Account) -> tuple[SiteRow, ...]:
    """The part of each site, as far as the coordinator knows: whether it was asked, was charged, or is in a sum."""
    names = {*history.asked, *history.refusals, *account.sites, *files.sites.names()}
    rows = []
    for name in sorted(names):
        asked = history.asked.get(name, frozenset()).intersection(history.done)
        named = frozenset(number for number, sites in history.survivors.items() if name in sites)
        summed = named.intersection(history.summed)
        notes = [f"Refused {refusal}." for refusal in history.refusals.get(name, ())]
        if name in history.left_out:
            notes.append(f"Left out after it lied in the secure sum {history.left_out[name]}.")
        if len(summed) < len(asked) and plan.cohort.mode != "async":
            notes.append(
                f"Asked in {len(asked)} of the rounds that are done, and in the sum of {len(summed)}."
            )
        if name in account.notes:
            notes.append(account.notes[name])
        rows.append(
            SiteRow(
                name=name,
                rounds=len(summed),
                epsilon=account.sites.get(name, 0.0 if account.charged is not None else None),
                notes=" ".join(notes),
            )
        )
    return tuple(rows)


def _secure(plan: Plan) -> SecureSum | None:
    if not plan.aggregation.secure:
        return None
    bits, groups, traced = plan.aggregation.ring_bits, plan.aggregation.groups, plan.aggregation.trace_groups
    found = plan.threshold(plan.in_groups(groups)[0])
    n, dropouts, honest = found.n, plan.spare(), plan.honest()
    of_sum = plan.splits, groups, plan.sketches, traced
    return SecureSum(n, found.k, found.threshold, dropouts, found.colluders, bits, honest, *of_sum)


def _dimension(files: RunFiles) -> int:
    """The number of trained parameters, from the newest checkpoint."""
    stored = list(stored_checkpoints(files.checkpoints).values())
    if not stored:
        raise RunFolderError(
            str(files.checkpoints),
            expected="a checkpoint of the run, which shows how many parameters are trained",
            fix="restore one from a backup",
        )
    with opened(stored[-1], expected="a whole checkpoint") as file:
        names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118  # not a dict
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def audit_row(path: Path) -> AuditRow | None:
    """What the last audit of a run found; None: there is none.

    Raises:
        RunFolderError: the file is damaged.
    """
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


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _not_covered(files: RunFiles, plan: Plan, history: RunHistory) -> tuple[str, ...]:
    simulated = history.simulated and not files.federation.exists()
    poisoned = claims.PROSE.said("poisoned", plan) if simulated else ()
    return (*_missing_rounds(plan, history), *poisoned, *claims.PROSE.said("not_covered", plan))


def _missing_rounds(plan: Plan, history: RunHistory) -> tuple[str, ...]:
    last, of = max(history.done, default=0), plan.run.rounds
    if not history.finished:
        done = f"{last} of {of} rounds are done, and each further round spends more."
        return (f"The rest of the run, which is not finished. {done}",)
    if last < of:
        why = {
            "budget": "the next round would have exceeded the budget",
            "dataset": "the next round would have exceeded the limit of its dataset over all runs",
            "refused": "too many sites refused to continue",
        }.get(history.stopped, "the run was ended")
        begun = any(last + 1 in rounds for rounds in history.asked.values())
        tried = f" Sites were asked for round {last + 1}; what they spent for it is counted." if begun else ""
        return (f"Rounds {last + 1} to {of} of the plan, which were not finished: {why}.{tried}",)
    return ()
