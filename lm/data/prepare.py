"""Records -> token sequences: make examples by the plan's task, split off held-out ones, lay both parts out.

Under the privacy units `record` and `owner` each row also belongs to a unit. A unit, which the guarantee protects, is
one record, one window of a text, or one owner with some of its records (`UnitRule`). It has its own rows, and
everything done to it here (cutting, choosing, holding out, dropping) depends on its own content and the public seed,
not on other units. So adding or removing one unit does not change the rows of any other, and the guarantee that
training gives for units holds for the records, windows or owners behind them. For the same reason a record that cannot
be used, such as one without an owner, is left out: an error would say that there is one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import Task
from cloister.lm.text.examples import Example
from cloister.lm.text.records import Record, Unusable, fingerprint, owner_of, read_each
from cloister.lm.text.sequences import Sequences, shuffled
from cloister.lm.text.tokenizer import tokenizer_digest
from cloister.protocol.errors import DataError
from cloister.protocol.machine.prerequisites import releases
from cloister.protocol.plan.plan import DataSection, Plan, PrivacySection
from cloister.protocol.plan.tasks import is_own

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_NOTHING_LEARNABLE = "without a learnable token within data.sequence_length"
_DUPLICATE = "equal to an earlier one"
_MAKERS = ("cloister", "jinja2", "pyarrow", "tokenizers", "transformers")
"""The packages that make sequences of records: another release may make others of the same records."""


@dataclass(frozen=True)
class Prepared:
    """One data holder's records as token sequences, for training and for evaluation."""

    train: Sequences
    """Sequences to train on."""
    held_out: Sequences
    """Sequences used only for evaluation; empty if `data.held_out` is 0."""
    records: int
    """Number of records that are used."""
    left_out: Mapping[str, int]
    """Number of the other records, by the reason: not readable, without the plan's fields or a label that is a class,
    without a completion that is a choice, refused by template or tokenizer, without an owner, or without a learnable
    token (empty, or the whole answer is past the sequence length). And number of the records that are used, of which
    the choices are not compared. No reason quotes a record."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Place of the first record that is left out, by the reason."""
    asked: Sequences | None = None
    """The prompts of the held-out records, each completed with each choice; None without choices, and under a privacy
    unit, under which no site evaluates."""

    def parts(self) -> Iterator[tuple[str, Sequences]]:
        """The sequences for each purpose, by the name of their field."""
        yield "train", self.train
        yield "held_out", self.held_out
        if self.asked is not None:
            yield "asked", self.asked

    def summary(self) -> str:
        """What was made of the records, in one line for the person whose records they are."""
        what, counts = "sequences", (len(self.train), len(self.held_out))
        if self.train.starts is not None and self.held_out.starts is not None:
            what, counts = "units", (len(self.train.starts) - 1, len(self.held_out.starts) - 1)
        made = f"{self.records} records are used: {counts[0]} {what} to train on, {counts[1]} held out"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{made}; left out: {reasons}" if reasons else made


@dataclass(frozen=True)
class UnitRule:
    """How records become the units that the privacy units `record` and `owner` protect."""

    record: Literal["record", "window"]
    """`record`: a piece is one record; `window`: a piece is one sequence cut from a text."""
    windows: int
    """Where a piece is a record: maximum number of its sequences that are learned from, the first ones."""
    owner: str = ""
    """Field that says who a record belongs to: the owner with its pieces is the unit; empty: each piece is a unit."""
    records: int = 1
    """Where an owner is the unit: maximum number of its pieces that are learned from."""


def unit_rule(data: DataSection, privacy: PrivacySection) -> UnitRule | None:
    """The unit rule of a plan; None unless `privacy.unit` is `record` or `owner`."""
    if not privacy.dpsgd:
        return None
    if privacy.unit == "owner":
        return UnitRule(privacy.record, privacy.windows, data.owner, privacy.records)
    return UnitRule(privacy.record, privacy.windows)


def prepare(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    data: DataSection,
    *,
    seed: int,
    units: UnitRule | None = None,
    unusable: Unusable | None = None,
    refuse: bool | None = None,
    evaluated: bool = False,
) -> Prepared:
    """Tokenise records, split off the held-out ones, lay out both parts in sequences of the plan's length.

    A text that is longer than a sequence continues in the next one; a prompt, a chat, or a text that is classified is
    truncated.

    Which records are held out depends only on `seed` and the records: if `data.held_out` is not 0, at least one of two
    or more records is held out, and of a single text the last tokens are. With `data.owner` the same is true of owners
    with all of their records, and a single owner is refused. The first token of a sequence, and of each
    example in a packed one, has no token before it to be learned from, so its label is -100.

    With `units`, `data.packing` is ignored, prompts and chats continue in further sequences as texts do, but texts that
    are classified do not, and a hash of
    `seed` and the unit's own tokens, or its owner, decides whether the unit is held out. A draw over all records, as
    without `units`, would be wrong: one more record would reshuffle all the others between training and evaluation, and
    training sets that differ everywhere are not neighbours. The cost is that the number held out is only close to
    `data.held_out`, and that either part may be empty. A window that is a unit may be held out while its neighbours in
    the text are trained on. Of an owner's pieces those with the smallest hashes of `seed` and their tokens are used.

    Args:
        records: The records.
        tokenizer: The tokenizer.
        data: What a record is.
        seed: The plan's seed.
        units: How records become units; None where nothing smaller than the whole site is protected.
        unusable: Counts the records that cannot be used, which are left out.
        refuse: Whether it is an error if no record can be used, or none held out; None: without `units`.
        evaluated: Hold out all records, whatever `data.held_out` is; only without `units`. They need no owner.

    Raises:
        DataError: no record can be used, or part of one single prompt or chat would have to be held out, where that is
            an error; or as `Task.check`.
    """
    refuse = units is None if refuse is None else refuse
    unusable = unusable or Unusable(open_=refuse)
    task = task_of(data)
    owner = "" if evaluated else _owners(units, data)
    examples = task.examples(records, tokenizer, unusable, owner)
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    pieces = _learnable(examples, task, units, unusable, owner, pad)
    if data.deduplicate:
        pieces = _unique(pieces, unusable, task, pad)
    if units is not None:
        trained, kept, used = _split_units(pieces, data, seed, units)
        sides = trained, [each for each in (_scored(unit, task) for unit in kept) if each.pieces]
        parts = [_lay_out_units(side, task, pad, shared=bool(units.owner)) for side in sides]
        return Prepared(parts[0], parts[1], used, unusable.left_out, unusable.places)
    owned = [(owner, example) for owner, (example,) in pieces]
    whole = [example for _, example in owned]
    if refuse and not whole:
        raise unusable.first or task.nothing_learnable(data.sequence_length, unusable.left_out.total())
    train: list[Example]
    if evaluated:
        train, held_out = [], whole
    elif data.owner and data.held_out:
        train, held_out = _split_owners(owned, data.held_out, seed, refuse=refuse)
    else:
        train, held_out = _split(whole, task, seed, refuse=refuse)
    held_out = [task.answered(example) for example in held_out]
    asked = task.asked(held_out, tokenizer, unusable) if refuse else None
    laid_out, scored = (task.lay_out(part, pad, packing=task.packs) for part in (train, held_out))
    scored = task.scored(scored, tokenizer)
    return Prepared(laid_out, scored, len(whole), unusable.left_out, unusable.places, asked)


@dataclass(frozen=True)
class Preparation:
    """The way from a site's records to the sequences of a plan.

    Records are read one by one and those that cannot be used are left out. Under a privacy unit, `site` included, no
    record makes this fail, or changes what is made of another record.
    """

    plan: Plan
    """The plan."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""
    source: str
    """The records, as for `read_records`."""
    split: str
    """Split of a hub data set."""
    folder: Path
    """Cache folder of the site."""

    def make(self) -> Prepared:
        """The sequences.

        Raises:
            DataError: the source as a whole cannot be read; without a privacy unit also as `prepare`.
            StorageError: the disk is full.
        """
        open_ = self.plan.privacy.unit == "none"
        unusable = Unusable(open_=open_, keeps=open_)
        records = read_each(self.source, unusable, split=self.split, documents=open_)
        return prepare(
            records,
            self.tokenizer,
            self.plan.data,
            seed=self.plan.run.seed,
            units=self._units,
            unusable=unusable,
            refuse=open_,
        )

    def key(self) -> str:
        """The cache key: SHA-256, in hex, of everything that `make` depends on, the releases that made it included.

        Raises:
            DataError: as `fingerprint`.
        """
        digest = hashlib.sha256(fingerprint(self.source, split=self.split))
        rule = [] if self._units is None else [json.dumps(asdict(self._units))]
        data, seed = self.plan.data.model_dump_json(), str(self.plan.run.seed)
        made_by = [f"{name} {release}" for name, release in sorted(releases(_MAKERS).items())]
        for part in (*made_by, data, seed, tokenizer_digest(self.tokenizer), self.plan.privacy.unit, *rule):
            digest.update(hashlib.sha256(part.encode()).digest())
        return digest.hexdigest()

    @property
    def _units(self) -> UnitRule | None:
        return unit_rule(self.plan.data, self.plan.privacy)


def check_usable(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    unusable: Unusable,
    *,
    whole: bool = False,
) -> None:
    """Check that at least one record gives something to train on, for the person who owns all of them.

    Otherwise a plan that names a wrong field would be found by each site in turn, and under a privacy unit, where no
    site fails, by none.

    Args:
        records: The records.
        tokenizer: The plan's tokenizer.
        plan: The plan.
        unusable: Knows the place of the record that is read, where its reader does.
        whole: Look at all records, so that `unusable` counts those that cannot be used.

    Raises:
        DataError: none does; the message is about the first record that cannot be used.
    """
    task, rule = task_of(plan.data), unit_rule(plan.data, plan.privacy)
    owner = _owners(rule, plan.data)
    examples = task.examples(records, tokenizer, unusable, owner)
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    found = _learnable(examples, task, rule, unusable, owner, pad)
    if sum(1 for _ in itertools.islice(found, None if whole else 1)):
        return
    longest = plan.data.sequence_length * (rule.windows if rule is not None and plan.data.kind.windows else 1)
    raise unusable.first or task.nothing_learnable(longest, unusable.left_out.total())


def _owners(rule: UnitRule | None, data: DataSection) -> str:
    """The field that says who a record belongs to; empty without owners."""
    return data.owner if rule is None else rule.owner


def _learnable(
    examples: Iterable[tuple[Record, Example]],
    task: Task,
    rule: UnitRule | None,
    unusable: Unusable,
    field: str,
    pad: int,
) -> Iterator[tuple[bytes, list[Example]]]:
    """For each record that is used its owner, empty without owners, and its pieces with a learnable token.

    Without a rule a record is one piece: a text whole, a prompt or chat cut to a sequence.

    Args:
        examples: Records and what is made of them.
        task: What is learned.
        rule: How records become units.
        unusable: Counts the records that cannot be used.
        field: The one that says who a record belongs to; empty without owners.
        pad: The padding's token.
    """
    without_owner = f"without an owner in {field!r}, text or a whole number"
    for record, example in examples:
        owner = unusable.tried(without_owner, owner_of, record, field) if field else b""
        if owner is None:
            continue
        learnable = unusable.tried("refused by the task", _pieces, example, task, rule, pad)
        if learnable is None:
            continue
        if learnable:
            yield owner, learnable
        else:
            unusable.leave_out(_NOTHING_LEARNABLE)


def _pieces(example: Example, task: Task, rule: UnitRule | None, pad: int) -> list[Example]:
    """The pieces of a record of which something is learned."""
    length = task.data.sequence_length
    if rule is None:
        pieces = [example if task.divides else task.cut(example, length)]
    elif rule.record == "record":
        pieces = [task.cut(example, rule.windows * length)]
    else:
        pieces = [example.piece(at, at + length) for at in range(0, len(example), length)]
    pieces = [piece for piece in pieces if task.rows(piece).any()]
    if is_own(task.data.task):  # what raises for one of them is found here, where the record can be left out
        for piece in pieces:
            _rows(piece, task, pad)
    return pieces


def _unique(
    made: Iterable[tuple[bytes, list[Example]]], unusable: Unusable, task: Task, pad: int
) -> Iterator[tuple[bytes, list[Example]]]:
    """Records without those of their pieces that an earlier record of their owner has; without empty records.

    Equal pieces are compared, not records: a window more or less, where windows are the unit, may make two texts equal,
    and must not decide about their other windows. Pieces of two owners are not compared: one owner more or less would
    change another. So training sets of neighbours differ by one unit, as without this.
    """
    seen: set[bytes] = set()
    for owner, pieces in made:
        new = []
        for piece in pieces:
            labels = b"" if piece.labels is None else piece.labels.tobytes()
            # Of cloister's tasks these are all that rows are made from; another may make them from `beside` too.
            rows = _rows(piece, task, pad) if is_own(task.data.task) else b""
            content = hashlib.sha256(_tokens(piece) + piece.role.tobytes() + labels + rows).digest()
            known = hashlib.sha256(len(owner).to_bytes(8) + owner + content).digest()
            if known not in seen:
                seen.add(known)
                new.append(piece)
        if new:
            yield owner, new
        else:
            unusable.leave_out(_DUPLICATE)


def _rows(piece: Example, task: Task, pad: int) -> bytes:
    """What training sees of a piece."""
    laid_out = task.lay_out([piece], pad, packing=False)
    return laid_out.tokens.tobytes() + laid_out.labels.tobytes()


def _split_units(
    made: Iterable[tuple[bytes, list[Example]]], data: DataSection, seed: int, rule: UnitRule
) -> tuple[list[_Unit], list[_Unit], int]:
    """Units to train on, units held out, and the number of records. No unit changes another."""
    units: list[_Unit] = []
    owned: dict[bytes, list[Example]] = {}
    used = 0

    def rank(piece: Example) -> bytes:
        # It depends on the piece alone: a choice by place or by a common draw would depend on other owners.
        return _hash("piece", seed, _tokens(piece) + piece.role.tobytes())

    for owner, pieces in made:
        used += 1
        if rule.owner:
            owned.setdefault(owner, []).extend(pieces)
        else:
            units += [_Unit(_tokens(piece), [piece]) for piece in pieces]
    for owner, pieces in owned.items():
        units.append(_Unit(owner, nsmallest(rule.records, reversed(pieces), key=rank)))
    sides: tuple[list[_Unit], list[_Unit]] = [], []
    for unit in units:
        sides[_chosen(unit.identity, "owner" if rule.owner else "", data.held_out, seed)].append(unit)
    return (*sides, used)


class _Unit(NamedTuple):
    """One unit: a piece, or the pieces of one owner that are used."""

    identity: bytes
    """What decides whether the unit is held out."""
    pieces: list[Example]
    """The pieces, by rank."""


def _scored(unit: _Unit, task: Task) -> _Unit:
    """A unit that is held out, with what an evaluation scores of it; without pieces if that is nothing."""
    pieces = map(task.answered, unit.pieces)
    return unit._replace(pieces=[piece for piece in pieces if task.rows(piece).any()])


def _lay_out_units(units: Sequence[_Unit], task: Task, pad: int, *, shared: bool) -> Sequences:
    """Place units in sequences of their own; `shared`: a piece has the same share of its unit whatever its length."""
    pieces = [piece for unit in units for piece in unit.pieces]
    rows = np.array([task.rows(piece).sum() for piece in pieces], np.int64)
    counts = np.array([len(unit.pieces) for unit in units], np.int64)
    starts = np.concatenate([[0], np.cumsum(rows)])[np.concatenate([[0], np.cumsum(counts)])]
    shares = np.repeat(1 / (np.repeat(counts, counts) * rows), rows).astype(np.float32)
    laid_out = task.lay_out(pieces, pad, packing=False)
    return replace(laid_out, starts=starts, shares=shares if shared else None)


def _chosen(identity: bytes, kind: str, share: float, seed: int) -> bool:
    """Whether a unit is held out: with probability `share` over its hash, which alone decides."""
    return int.from_bytes(_hash(f"held out{kind and ' '}{kind}", seed, identity)[:8], "big") < share * 2**64


def _hash(purpose: str, seed: int, content: bytes) -> bytes:
    return hashlib.sha256(f"cloister/{purpose}/{seed}/".encode() + content).digest()


def _tokens(example: Example) -> bytes:
    return example.tokens.astype("<i4").tobytes()


def _split_owners(
    owned: list[tuple[bytes, Example]], share: float, seed: int, *, refuse: bool
) -> tuple[list[Example], list[Example]]:
    """Choose owners whose examples are held out; both lists keep the order of the records.

    Raises:
        DataError: `refuse`, and all records are of one owner.
    """
    owners = list(dict.fromkeys(owner for owner, _ in owned))
    if len(owners) < 2:
        if not refuse:
            return [example for _, example in owned], []
        raise DataError(
            "data.owner",
            len(owners),
            expected="records of at least two owners, so that one of them can be held out",
            fix="add records, or set data.held_out = 0 and name public records in server.evaluation",
        )
    count = min(max(1, round(len(owners) * share)), len(owners) - 1)
    held_out = {owners[index] for index in shuffled((seed,), len(owners))[:count]}
    sides: tuple[list[Example], list[Example]] = [], []
    for owner, example in owned:
        sides[owner in held_out].append(example)
    return sides


def _split(
    examples: list[Example], task: Task, seed: int, *, refuse: bool
) -> tuple[list[Example], list[Example]]:
    """Choose the held-out examples; both lists keep the order of the records.

    Raises:
        DataError: `refuse`, and nothing can be held out of a single example.
    """
    data, n = task.data, len(examples)
    if data.held_out == 0 or n == 0:
        return examples, []
    if n > 1:
        n_held_out = min(max(1, round(n * data.held_out)), n - 1)
        is_held_out = np.zeros(n, bool)
        is_held_out[shuffled((seed,), n)[:n_held_out]] = True
        return (
            list(itertools.compress(examples, ~is_held_out)),
            list(itertools.compress(examples, is_held_out)),
        )
    only = examples[0]
    places, fewest = len(only) // task.grain, 2 if task.grain == 1 else 1
    if not task.divides or places < 2 * fewest:
        if not refuse:
            return examples, []
        raise DataError(
            f"data.{data.format}",
            expected="at least two records, so that one can be held out",
            fix="add records, or set data.held_out = 0 and name public records in server.evaluation",
        )
    cut = task.grain * min(max(fewest, round(places * (1 - data.held_out))), places - fewest)
    return [only.piece(0, cut)], [only.piece(cut, len(only))]
