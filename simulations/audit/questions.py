"""The audit of a question: it is answered many times, with one unit at the first site or without it.

Each answer is that of a new federation in one process (`rounds.py`): real sites join, charge their ledgers, make the
vectors of their units, add noise and mask; `server.run.run` charges, opens the sum and keeps the answer. No site drops
out. The vector that a site codes is seen before its mask, and is coded again with the same rounding and without noise.

First one unit more is compared with none, in sums that all have the same noise. The unit is a record, or an owner of
`_MANY` records, with the values at the ends of the question's range, values and edges, and far beyond; where a model is
evaluated, a record of the first site or an owner of its records that is held out. It comes before the run's records of
the first site, so that what it leaves for others or takes from them is seen; all numbers are rounded to the nearest
step, because the draws of the others would be other ones. Or, with the draws of the mechanism, it is a vector of
`LENGTHS` bounds along all cells, after those of the records.

An owner who may be at several sites (`question.sites_of_owner`) is at the first ones, at each with all of the records.
With unit `site` the unit is all that the first site has: `_MANY` of these values or of its own records, or where a
model is evaluated its first `_TRIED` records, repeated until two rows are held out.

Then a fair coin decides for each answer whether the unit that has moved the sum most is there, alone; the noise is new.
The adversary knows the vectors of all sites but the fewest that the claim counts on. A score is the noised sum x of
these along the change v by the unit,

    <x, v> / |v|^2,    of mean 0 or 1, and a standard deviation of z s B / |v|.

`privacy/audit/fit.py` compares the noise of all sites, cells and answers with the charge: each site adds its part of
the variance, on its own. Each answer must be charged once, with the cost that follows from the plan: to the ledger of
each site, to the coordinator's for each site, and to a ledger over runs, which all answers have whether the plan names
one or not.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.linalg import norm

from cloister.aggregation.features.question import UnitCode
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.rotation import Floats
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig
from cloister.clients.site import Simulated
from cloister.clients.training.work import Task
from cloister.lm.data.prepare import Preparation, Prepared
from cloister.lm.model.model import LanguageModel
from cloister.lm.text.records import Record, Unusable, read_each
from cloister.privacy.accounting.accountant import epsilon_of
from cloister.privacy.accounting.terms import Terms
from cloister.privacy.audit.fit import Check, Noise, change, counted
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import read_history
from cloister.privacy.mechanism.events import Event, Skellam
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.privacy.mechanism.unit_sum import UnitSum
from cloister.protocol.errors import CloisterError, EngineError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import of_sequences
from cloister.protocol.questions.vectors import Sparse, Vectors
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import identity
from cloister.server.run import run
from cloister.simulations.audit.audited import (
    LENGTHS,
    Audited,
    Noises,
    Progress,
    Streams,
    charged,
    charged_for,
    judged,
    prepared,
)
from cloister.simulations.audit.rounds import InProcess, Samples, Silent, gathered
from cloister.simulations.audit.sites import honest_of
from cloister.simulations.partition import name_of, write_records

_VECTORS = 500
"""Vectors of sites, unless the caller says otherwise, or they have `_MOST_SEEN` cells already."""
_FEWEST = 8
"""Answers that may be fewer for that."""
_MANY = 64
"""Records of an owner that is planted."""
_TRIED = 1000
"""Records, or names of an owner, that are tried until one is held out."""
_OFTEN = 64
"""How often a site's records are repeated at most until two rows are held out."""
_BEYOND = (-1e299, 1e299, "", " ".join(map(str, range(10_000))), None)
"""Values that are beyond the ends of a question, or none that it knows; a text of many words."""
_MOST_SEEN = 2**22
"""Samples of noise that are seen of an answer: those of some sites, which take turns."""
_LEDGERS = "in a site's ledger", "in the coordinator's ledger", "in a ledger over runs"
_ROUNDED = 2.0**-22
"""Relative error of an answer: a mean in float32."""


class _Even(NoiseStream):
    """A stream whose draws round to the nearest step."""

    def generator(self) -> Any:
        """As `NoiseStream.generator`; all numbers are one half."""
        return SimpleNamespace(random=partial(np.full, fill_value=0.5))


@dataclass(frozen=True)
class _Watched(UnitCode):
    """The code of a site."""

    planted: Sequence[Vectors | Sparse]
    """Each (1, K), or of one unit: units after its own."""
    again: bool
    """Whether it codes again without noise, for which all vectors are in memory."""
    see: Callable[[RingVector, RingVector], None]
    """Receives its vector with noise, before the mask, and the same without noise: each (L,)."""

    def answer(self, units: Iterable[Vectors | Sparse]) -> RingVector:
        """As `UnitCode.answer`."""
        made = chain(units, self.planted)
        known = list(made) if self.again else []
        sent = super().answer(known if self.again else made)
        self.see(sent.copy(), UnitCode(self.layout, self.asked, Silent(self.noise.key)).answer(known))
        return sent


@dataclass(frozen=True)
class _Answer:
    """What is seen of an answer."""

    sent: RingVector
    """(S, L): the vectors of the sites before their masks."""
    bare: RingVector
    """(S, L): the same without noise."""
    follows: bool
    """Whether what was opened is the sum of `sent`."""
    events: tuple[Event, ...]
    """What the first site's own ledger was charged."""
    unpaid: Sequence[int]
    """By `_LEDGERS`: how often the charge of the answer is not the plan's."""
    told: Set[tuple[str, float]]
    """What sites have told beside their vectors: a speed and a number of seconds."""


class _Seen:
    """What is seen of all answers.

    Args:
        terms: The plan's privacy.
        sites: Sites of a sum.
        honest: Those that the adversary does not know.
        along: (K,): the change of the sum by the unit that the coins decide.
    """

    def __init__(self, terms: Terms, sites: int, honest: int, along: Samples) -> None:
        asked = _asked(terms)
        self._cells, self._honest, self._along = asked.shape.cells, honest, along / (along @ along)
        self._seen = min(sites, max(1, _MOST_SEEN // asked.shape.cells))
        self._deviation = math.sqrt(asked.event.variance / honest)
        self._noise = Noise(self._seen * asked.shape.cells, grid=1 / self._deviation)
        self._variance = asked.event.variance
        self.answers: list[_Answer] = []
        """The answers, without the vectors."""
        self.scores: list[float] = []
        """Of each."""
        self.lengths: list[tuple[float, float]] = []
        """L2 and L1 norm of the sum without noise, which is that of one unit or none."""

    def see(self, answer: _Answer) -> None:
        """Take an answer."""
        # Of many cells not all sites are seen in one answer, but each in turn.
        turn = len(self.answers) * (self._seen < len(answer.sent))
        seen = (np.arange(self._seen) + turn) % len(answer.sent)
        noise = _signed(answer.sent - answer.bare)[seen, : self._cells]
        self._noise.see(noise.ravel() / self._deviation)
        self.scores.append(float(_total(answer.sent[: self._honest])[: self._cells] @ self._along))
        self.lengths.append(_lengths(_total(answer.bare)[: self._cells]))
        none = answer.sent[:0]
        self.answers.append(replace(answer, sent=none, bare=none))

    def checks(self, law: Skellam) -> tuple[Check, ...]:
        """What was seen against what was charged."""
        told = set[tuple[str, float]]().union(*(each.told for each in self.answers))
        return (
            *self._noise.checks(math.sqrt(law.variance / self._variance)),
            *(
                counted(f"answers without the plan's charge {where}", sum(unpaid), 0)
                for where, *unpaid in zip(_LEDGERS, *(each.unpaid for each in self.answers), strict=True)
            ),
            counted("answers that are not the noised sums", sum(not a.follows for a in self.answers), 0),
            counted("other values that sites have told", len(told) - 2, 0),
        )


@dataclass(frozen=True)
class QuestionGame:
    """Answers of a question, with one unit or without it."""

    plan: Plan
    terms: Terms
    model: LanguageModel
    site: SiteConfig
    """The site whose records are used."""
    folder: Path
    """An empty folder for the audit's own federations."""
    resident: Resident = field(default_factory=Resident)
    """The process of their sites."""

    def audit(
        self, answers: int | None, confidence: float, coins: Streams, noises: Noises, progress: Progress
    ) -> Audited:
        """Play, guess the coins, and bound epsilon; arguments as in `simulations.audit.audit`, where the number of
        answers is `canaries`.

        Raises:
            CloisterError: no unit that is tried changes the answer.
        """
        terms, asked, sites = self.terms, _asked(self.terms), self.plan.cohort.size()
        most = max(_FEWEST, _MOST_SEEN // (sites * asked.shape.cells))
        count = answers or min(math.ceil(_VECTORS / sites), most)
        unit, along, lengths = list[Record](), np.zeros(1), list[tuple[float, float]]()
        for records, by in self._moved(noises):
            lengths.append(_lengths(by))
            if records and lengths[-1][0] > norm(along):
                unit, along = records, by[: asked.shape.cells]
        if not unit:
            raise CloisterError(
                "question", question_of(self.plan).kind, expected=f"one {terms.unit} that changes the answer"
            )
        included = coins().child("coins").generator().random(count) < 0.5
        seen = _Seen(terms, sites, honest_of(self.plan), along)
        for number, there in enumerate(included, 1):
            noise = partial(_of_answer, noises, number)
            seen.see(self._play(unit if there else [], [], noise, again=True))
            progress(number, count)
        events = seen.answers[0].events or terms.round_events
        law = events[0]
        assert isinstance(law, Skellam), "a question has this noise"
        l2, l1 = map(max, zip(*lengths, *seen.lengths, strict=True))
        checks = (
            *seen.checks(law),
            change(
                "noise multiplier of the plan", terms.noise_multiplier, math.sqrt(law.variance) / law.l2, 1e-9
            ),
            change("what one unit changes in a sum, in steps", l2, law.l2),
            change("the same, summed over the cells", l1, law.l1),
        )
        one = "all records" if terms.unit == "site" else f"one {terms.unit}"
        what = f"{count} answers of {sites} sites, with or without {one} of {self.site.name}"
        claimed = epsilon_of(events, terms.delta, terms.accountant), terms.epsilon(1)
        deviation = math.sqrt(law.variance) / float(norm(along))
        return judged(
            np.array(seen.scores), included, deviation, confidence, what, claimed, terms.delta, checks
        )

    def _moved(self, noises: Noises) -> Iterator[tuple[list[Record], Samples]]:
        """Units, of which one that is planted has no records, each with its change (L,) of a sum with the same
        noise."""

        same = functools.cache(partial(_of_answer, noises, 0))

        def even(name: str) -> NoiseStream:
            return _Even(same(name).key)

        shape, units = _asked(self.terms).shape, self._units()
        taken = {_line(record) for unit in units for record in unit}
        own = [] if self.terms.unit == "site" else self._records()  # of a site all records are one unit
        rest = [record for record in own if _line(record) not in taken]
        without = self._play([], rest, even).sent
        for unit in units:
            yield unit, _total(self._play(unit, rest, even).sent - without)
        signs = np.random.Generator(np.random.Philox(self.plan.run.seed)).choice((-1.0, 1.0), shape.touched)
        one, at = signs * (shape.bound / math.sqrt(shape.touched)), np.arange(shape.touched)
        without = self._play([], rest, same).sent
        for length in LENGTHS:
            few = shape.touched < shape.cells
            planted = Sparse(at * (shape.cells // shape.touched), length * one) if few else length * one[None]
            yield [], _total(self._play([], rest, same, planted).sent - without)

    def _units(self) -> list[list[Record]]:
        """The records of each unit."""
        question, own = question_of(self.plan), self._records()[:_TRIED]
        if of_sequences(self.plan):
            return [self._of_site(own) if self.terms.unit == "site" else self._held_out(own)]
        ends = (*question.values, *question.edges, *(question.range or ()))
        units: list[Sequence[Record]] = [own[: self._many]]
        if question.field:
            values = (*ends[:1], *ends[-1:], *_BEYOND)
            each = [{**(own[0] if own else {}), question.field: value} for value in values]
            units += [[record] * self._many for record in each]
            units += [each * (self._many // len(each))] * (self._many > 1)
        return [self._of_owner(unit, "the owner of an audit") for unit in units]

    def _held_out(self, own: Sequence[Record]) -> list[Record]:
        """A unit of the site's own records that is held out, of which the owner gets a new name.

        Raises:
            CloisterError: none is found.
        """
        path = self.folder / "held-out.jsonl"
        for number in range(_TRIED):
            unit = self._of_owner(own if self._many > 1 else own[number:], f"the owner {number} of an audit")
            write_records(path, unit := unit[: self._many])
            starts = self._prepared(path).held_out.starts
            units = 0 if starts is None else len(starts) - 1
            if units == 1 or (units and self._many > 1):  # an owner is one; more are a defect to be seen
                return unit
        raise CloisterError(
            f"records of {self.site.name}",
            expected=f"one {self.terms.unit} that is held out, of the first {_TRIED:,}",
            fix="audit a question to sites with more records",
        )

    def _of_site(self, own: list[Record]) -> list[Record]:
        """The site's own records, so often that rows which count as units would be seen: two or more are held out.

        Raises:
            CloisterError: fewer are.
        """
        path = self.folder / "held-out.jsonl"
        for times in range(1, _OFTEN + 1):
            write_records(path, own * times)
            if len(self._prepared(path).held_out) > 1:
                return own * times
        raise CloisterError(
            f"records of {self.site.name}",
            expected=f"two rows that are held out, with each record {_OFTEN} times",
            fix="audit a question to sites with more records, or set data.deduplicate = false",
        )

    def _of_owner(self, records: Sequence[Record], name: str) -> list[Record]:
        """The records, with unit owner of one new owner."""
        owner = {self.plan.data.owner: name} if self.terms.unit == "owner" else {}
        return [{**record, **owner} for record in records]

    @property
    def _many(self) -> int:
        """Records of a unit."""
        return 1 if self.terms.unit == "record" else _MANY

    def _records(self) -> list[Record]:
        """The records of the site."""
        return list(read_each(self.site.data, Unusable(), split=self.site.split))

    def _play(
        self,
        unit: list[Record],
        rest: list[Record],
        noise: Callable[[str], NoiseStream],
        *planted: Vectors | Sparse,
        again: bool = False,
    ) -> _Answer:
        """Answer once.

        Args:
            unit: The records of a unit, which are at as many sites as one may be at.
            rest: Further records of the first site; the others have none.
            noise: Gives the noise of a site.
            planted: As for `_Watched`, at the sites of a unit.
            again: As for `_Watched`; else `bare` is of no unit.

        Raises:
            EngineError: the question was not answered.
        """
        plan, terms, opened = self.plan, self.terms, list[tuple[Floats, int]]()
        vectors: dict[str, tuple[RingVector, RingVector]] = {}
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            folder, ledger = Path(temporary) / "sites", Path(temporary) / "runs.sqlite"
            holders = [name_of(plan, index) for index in range(_asked(terms).shape.copies)]
            data = {name: Path(temporary) / f"{name}.jsonl" for name in holders}
            for name, path in data.items():
                write_records(path, [*unit, *(rest if name == self.site.name else ())])
            dataset, made = (
                _over_runs(plan, ledger),
                {name: self._prepared(path) for name, path in data.items()},
            )

            def simulated(name: str) -> Simulated:
                def see(sent: RingVector, bare: RingVector) -> None:
                    vectors[name] = sent, bare

                def watched(task: Task) -> Task:
                    code = task.code
                    assert isinstance(code, UnitCode), "a question has the code of units"
                    more = planted if name in data else ()
                    return replace(task, code=_Watched(code.layout, code.asked, code.noise, more, again, see))

                rows = made[name] if name in made else prepared(plan, 0)
                return Simulated(lambda _round: noise(name), folder, dataset, lambda: rows, True, watched)

            roster, sites = gathered(folder, plan, self.site, self.resident, simulated, data)
            channel = InProcess(sites)
            with RunFolder.create(folder / "run", plan) as out:
                seen = partial(_opened, opened)
                run(out, channel, lambda _event: None, roster=roster, dataset=dataset, released=seen)
            run_id = identity(out)
            own = [charged(site, plan, run_id) for site in sites]
            for_sites = [
                charged_for(read_history(out.ledger).entries, site.name, plan, run_id) for site in sites
            ]
            ledgers = own, for_sites, [charged_for(read_history(ledger).entries, "audit", plan, run_id)]
        if len(opened) != 1 or len(vectors) != len(sites):
            raise EngineError("sites in the answer", len(vectors), expected=f"all {len(sites)}")
        sent, bare = (np.stack([vectors[site.name][which] for site in sites]) for which in (0, 1))
        mean, summed = opened[0]
        exact = _total(sent)[: mean.size]
        wrong = np.abs(mean.astype(np.float64) * (summed * _asked(terms).scale) - exact).max()
        follows = bool(wrong <= _ROUNDED * np.abs(exact).max())
        unpaid = [sum(each != terms.round_events for each in of) for of in ledgers]
        return _Answer(sent, bare, follows, own[0], unpaid, channel.told)

    def _prepared(self, data: Path) -> Prepared:
        """The sequences of records; none where the question does not read any."""
        split, folder = self.site.split, self.folder
        made = Preparation(self.plan, self.model.tokenizer, str(data), split, folder)
        return made.make() if of_sequences(self.plan) else prepared(self.plan, 0)


def _opened(opened: list[tuple[Floats, int]], _group: int, mean: Floats, sites: int) -> None:
    opened.append((mean.copy(), sites))


def _lengths(vector: Samples) -> tuple[float, float]:
    return float(norm(vector)), float(norm(vector, 1))


def _of_answer(noises: Noises, number: int, name: str) -> NoiseStream:
    return noises(name, number)


def _asked(terms: Terms) -> UnitSum:
    assert terms.asked is not None, "a question has a mechanism"
    return terms.asked


def _over_runs(plan: Plan, path: Path) -> DatasetLedger:
    """A new ledger over runs, whatever the plan names; each owner is at one site."""
    fields = {"ledger": str(path), "dataset": "audit", "greatest_epsilon": None}
    fields |= {"partition": "natural", "field": plan.data.owner}
    simulation = plan.simulation.model_copy(update=fields)
    made = DatasetLedger(plan.model_copy(update={"simulation": simulation}))
    made.create()
    return made


def _line(record: Record) -> str:
    return json.dumps(record, sort_keys=True, default=repr)


def _signed(vector: RingVector) -> npt.NDArray[np.signedinteger[Any]]:
    """Ring integers as those around zero."""
    return vector.view(f"i{vector.itemsize}")


def _total(vectors: RingVector) -> Samples:
    """The sum of ring integers over sites, around zero."""
    return _signed(vectors.sum(axis=0, dtype=vectors.dtype)).astype(np.float64)
