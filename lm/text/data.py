"""Examples -> token sequences: split off held-out ones, lay both parts out, cache them on disk, draw batches.

Sequences are two int32 matrices of the plan's sequence length (and positions where several examples share a sequence).
They are written once, and memory-mapped by every process of the site. A data loader with workers and collators
was refused: all tokens are made before training starts, so no step waits for data, and a batch is one fancy index into
a mapped matrix.

Under the privacy units `record` and `owner` each row also belongs to a unit. A unit, which the guarantee protects, is
one record, one window of a text, or one owner with some of its records (`UnitRule`). It has its own rows, and
everything done to it here (cutting, choosing, holding out, dropping) depends on its own content and the public seed,
not on other units. So adding or removing one unit does not change the rows of any other, and the guarantee that
training gives for units holds for the records, windows or owners behind them. For the same reason a record that cannot
be used, such as one without an owner, is left out: an error would say that there is one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import nsmallest
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cloister.lm.text.examples import ANSWER, CONTEXT, Example, compared, to_examples
from cloister.lm.text.records import Record, Unusable, fingerprint, owner_of, read_each
from cloister.lm.text.tokenizer import tokenizer_digest
from cloister.protocol.errors import DataError
from cloister.protocol.machine.storage import on_disk, write_folder
from cloister.protocol.plan.plan import DataSection, Plan, PrivacySection

_NOTHING_LEARNABLE = "without a learnable token within data.sequence_length"
_DUPLICATE = "equal to an earlier one"
_NOT_COMPARED = "in comparing choices, because one does not fit or has no token before it"

NOT_LEARNED = -100
"""The label that transformers' loss ignores."""


@dataclass(frozen=True)
class Sequences:
    """Token sequences of one length, with the labels that are learned: of tokens, or of a classifier's whole sequences.

    With `positions`, several examples share a sequence and must not attend to each other. Transformers separates them
    when it is given the positions, no attention mask and `use_cache=False`.
    """

    tokens: NDArray[np.int32]
    """(N, L): token ids; padding comes last."""
    labels: NDArray[np.int32]
    """(N, L): the token at the same position where it is learned from the tokens before it, else -100. (N, 1): the
    class of each sequence."""
    positions: NDArray[np.int32] | None
    """(N, L): position of the token in its example; None where it is 0..L-1 in every sequence."""
    n_bytes: int
    """UTF-8 bytes of the learned text, without end-of-text tokens: the divisor of the summed loss in bits per
    byte. Where a record is cut, its bytes are divided evenly among its learned tokens."""
    starts: NDArray[np.int64] | None = None
    """(U + 1,): unit u has exactly the rows starts[u]:starts[u + 1], at least one; None without units."""
    shares: NDArray[np.float32] | None = None
    """(N,): weight of a row in the gradient of its unit, 1 in all; None: the same for all rows of a unit."""
    answers: NDArray[np.int32] | None = None
    """(R,): where each of R prompts is completed with each of C choices, in N = R C rows in this order, the choice that
    is its own. The labels are then those by which the choices of a prompt are compared. None: without choices."""

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def n_tokens(self) -> int:
        """Number of labels that are learned."""
        return int(np.count_nonzero(self.labels != NOT_LEARNED))

    @property
    def classified(self) -> bool:
        """Whether a sequence has one label, its class."""
        return bool(self.labels.shape[1] == 1)

    def targets(self, rows: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.int64]:
        """What the model's outputs are compared with, -100 where nothing is learned.

        Args:
            rows: R rows of the sequences.

        Returns:
            (R, L): for each position the token that follows it; of sequences with one label (R, 1): their classes.
        """
        labels = self.labels[rows]
        return labels.astype(np.int64) if self.classified else next_tokens(labels)


def next_tokens(labels: NDArray[np.int32]) -> NDArray[np.int64]:
    """The target of each position: `labels` (N, L) shifted one to the left, -100 at the end; (N, L) int64."""
    targets = np.full(labels.shape, NOT_LEARNED, dtype=np.int64)
    targets[:, :-1] = labels[:, 1:]
    return targets


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
    or more records is held out, and of a single text the last tokens are. The first token of a sequence, and of each
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
        evaluated: Hold out all records, whatever `data.held_out` is; only without `units`.

    Raises:
        DataError: no record can be used, or part of one single prompt or chat would have to be held out, where that is
            an error; or as `check_tokenizer`.
    """
    refuse = units is None if refuse is None else refuse
    unusable = unusable or Unusable(open_=refuse)
    examples = to_examples(records, tokenizer, data, unusable)
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    pieces = _learnable(examples, data, units, unusable)
    if data.deduplicate:
        pieces = _unique(pieces, unusable)
    if units is not None:
        *sides, used = _split_units(pieces, data, seed, units)
        parts = [_lay_out_units(side, data, pad, shared=bool(units.owner)) for side in sides]
        return Prepared(parts[0], parts[1], used, unusable.left_out, unusable.places)
    whole = [example for _, (example,) in pieces]
    if refuse and not whole:
        raise unusable.first or _nothing_learnable(data, data.sequence_length, unusable.left_out.total())
    train: list[Example]
    train, held_out = ([], whole) if evaluated else _split(whole, data, seed, refuse=refuse)
    asked = None
    if data.choices and refuse:
        asked = _lay_out_choices(held_out, tokenizer, data, unusable)
    parts = [_lay_out(part, data, pad) for part in (train, held_out)]
    return Prepared(parts[0], parts[1], len(whole), unusable.left_out, unusable.places, asked)


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
        unusable = Unusable(open_=open_)
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
        """The cache key: SHA-256, in hex, of everything that `make` depends on.

        Raises:
            DataError: as `fingerprint`.
        """
        digest = hashlib.sha256(fingerprint(self.source, split=self.split))
        rule = [] if self._units is None else [json.dumps(asdict(self._units))]
        data, seed = self.plan.data.model_dump_json(), str(self.plan.run.seed)
        for part in (data, seed, tokenizer_digest(self.tokenizer), self.plan.privacy.unit, *rule):
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
    data, rule = plan.data, unit_rule(plan.data, plan.privacy)
    examples = to_examples(records, tokenizer, data, unusable)
    found = _learnable(examples, data, rule, unusable)
    if sum(1 for _ in itertools.islice(found, None if whole else 1)):
        return
    longest = data.sequence_length * (1 if rule is None or data.task == "classify" else rule.windows)
    raise unusable.first or _nothing_learnable(data, longest, unusable.left_out.total())


def batches(n: int, batch_size: int, seed: tuple[int, ...]) -> Iterator[NDArray[np.int64]]:
    """Draw endless batches of indices below `n`: each epoch visits every index once, in its own random order.

    A batch may span epochs, so every batch has exactly `batch_size` indices, also where `n` is smaller. The same `seed`
    gives the same batches.

    Args:
        n: Number of sequences, 1 or more.
        batch_size: Indices in a batch, 1 or more.
        seed: Of the random orders.
    """
    assert n > 0 < batch_size, "batches of nothing would never come"
    waiting = np.empty(0, np.int64)
    for epoch in itertools.count():
        waiting = np.concatenate([waiting, shuffled((*seed, epoch), n)])
        whole = len(waiting) // batch_size * batch_size
        drawn, waiting = waiting[:whole], waiting[whole:]
        yield from drawn.reshape(-1, batch_size)


_TYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "labels": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "starts": np.dtype(np.int64),
    "shares": np.dtype(np.float32),
    "answers": np.dtype(np.int32),
}
"""The arrays of `Sequences`, each kind in a file of its own."""
_INDEX = "index.json"


def write_prepared(folder: Path, sites: Iterable[Prepared | None]) -> None:
    """Write the sequences of one site or many into a folder, which `Store` maps.

    Args:
        folder: The folder, which is there and empty.
        sites: The sequences of each site; None: its records could not be used.
    """
    with contextlib.ExitStack() as stack:
        files = {kind: stack.enter_context(open(folder / f"{kind}.bin", "wb")) for kind in _TYPES}
        index = [None if prepared is None else _entry(prepared, files) for prepared in sites]
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _entry(prepared: Prepared, files: Mapping[str, BinaryIO]) -> dict[str, Any]:
    """Append the arrays of a site to the files, and return where they are."""
    entry: dict[str, Any] = {
        "records": prepared.records,
        "left_out": dict(prepared.left_out),
        "places": dict(prepared.places),
    }
    for name, part in prepared.parts():
        arrays = {}
        for kind, type_ in _TYPES.items():
            array = getattr(part, kind)
            if array is not None:
                file = files[kind]
                arrays[kind] = (file.tell() // type_.itemsize, array.shape)
                file.write(np.ascontiguousarray(array, type_).tobytes())
        entry[name] = {"n_bytes": part.n_bytes, "arrays": arrays}
    return entry


class Store:
    """What `write_prepared` wrote, mapped: the arrays are read-only and shared between processes.

    Args:
        folder: The folder.

    Raises:
        DataError: it is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._whole():
            self._index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            files = {kind: folder / f"{kind}.bin" for kind in _TYPES}
            self._arrays: dict[str, NDArray[Any]] = {
                kind: np.memmap(path, _TYPES[kind], "r") if path.stat().st_size else np.empty(0, _TYPES[kind])
                for kind, path in files.items()
            }

    def site(self, index: int) -> Prepared | None:
        """The sequences of the site with a number; None if its records could not be used, and it must say why.

        Raises:
            DataError: they are damaged.
        """
        entry = self._index[index]
        if entry is None:
            return None
        with self._whole():
            train, held_out = (self._sequences(entry[part]) for part in ("train", "held_out"))
            asked = self._sequences(entry["asked"]) if "asked" in entry else None
        left_out, places = Counter(entry["left_out"]), entry.get("places", {})
        return Prepared(train, held_out, entry["records"], left_out, places, asked)

    def _sequences(self, entry: dict[str, Any]) -> Sequences:
        arrays: dict[str, Any] = {"positions": None}
        for kind, (offset, shape) in entry["arrays"].items():
            size = int(np.prod(shape))
            arrays[kind] = self._arrays[kind][offset : offset + size].reshape(shape)
        return Sequences(**arrays, n_bytes=entry["n_bytes"])

    def left_out(self) -> tuple[Counter[str], dict[str, str]]:
        """Number of records that the sites leave out, by the reason, and the place of the first of each."""
        counts, places = Counter[str](), dict[str, str]()
        for entry in filter(None, self._index):
            counts.update(entry["left_out"])
            places = entry.get("places", {}) | places
        return counts, places

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                "prepared data",
                str(self._folder),
                expected=f"a folder of tokenised data ({error})",
                fix="remove the folder, and the next start makes it again",
            ) from error


def load_prepared(folder: Path) -> Prepared:
    """Map the sequences of one site.

    Raises:
        DataError: the folder is missing or damaged.
    """
    found = Store(folder).site(0)
    assert found is not None, "a site keeps only what it can use"
    return found


def prepared_path(folder: Path, key: str) -> Path:
    """Where `cached` keeps the sequences with a key."""
    return folder / f"tokens-2-{key[:32]}"


def cached(folder: Path, key: str, make: Callable[[], Prepared]) -> Prepared:
    """Return the sequences cached under `key` in `folder`, mapped from disk; make them on a cache miss.

    If several processes miss at the same time, one makes the sequences and the others wait.

    Args:
        folder: The cache folder of one site's tokenised data.
        key: The cache key, from `Preparation.key`.
        make: Makes the sequences; called only on a cache miss.

    Raises:
        DataError: the cached folder is damaged.
        StorageError: the disk is full or refuses the write.
    """
    filed = prepared_path(folder, key)
    if not filed.exists():
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / f".{filed.name}.lock").open("wb")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filed.exists():
                made = make()
                write_folder(filed, lambda temporary: write_prepared(temporary, [made]))
    return load_prepared(filed)


def _first(example: Example) -> int:
    """The first token of an example that can be learned from: of a text that is classified every one, otherwise the
    second, because a token is learned from those before it."""
    return 1 if example.label is None else 0


def _learnable(
    examples: Iterable[tuple[Record, Example]], data: DataSection, rule: UnitRule | None, unusable: Unusable
) -> Iterator[tuple[bytes, list[Example]]]:
    """For each record that is used its owner, empty without owners, and its pieces with a learnable token.

    Without a rule a record is one piece: a text whole, a prompt or chat cut to a sequence.
    """
    length, field = data.sequence_length, "" if rule is None else rule.owner
    without_owner = f"without an owner in {field!r}, text or a whole number"
    for record, example in examples:
        owner = unusable.tried(without_owner, owner_of, record, field) if field else b""
        if owner is None:
            continue
        if rule is None:
            pieces = [example.piece(0, None if data.format == "text" else length)]
        elif rule.record == "record":
            pieces = [example.piece(0, rule.windows * length)]
        else:
            pieces = [example.piece(at, at + length) for at in range(0, len(example), length)]
        learnable = [piece for piece in pieces if _learnable_rows(piece, length).any()]
        if learnable:
            yield owner, learnable
        else:
            unusable.leave_out(_NOTHING_LEARNABLE)


def _unique(
    made: Iterable[tuple[bytes, list[Example]]], unusable: Unusable
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
            content = hashlib.sha256(
                _tokens(piece) + piece.role.tobytes() + str(piece.label).encode()
            ).digest()
            known = hashlib.sha256(len(owner).to_bytes(8) + owner + content).digest()
            if known not in seen:
                seen.add(known)
                new.append(piece)
        if new:
            yield owner, new
        else:
            unusable.leave_out(_DUPLICATE)


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


def _nothing_learnable(data: DataSection, longest: int, count: int) -> DataError:
    field, answer = {
        "text": ("data.text_field", "check the records"),
        "prompt": ("data.completion_field", "check the records"),
        "messages": ("data.messages_field", "give the turns to be learned the role 'assistant'"),
    }[data.format]
    return DataError(
        field,
        expected=f"at least one record with a learnable token in its first {longest} tokens, "
        f"but none of the {count} has one",
        fix=f"raise data.sequence_length, or {answer}",
    )


class _Unit(NamedTuple):
    """One unit: a piece, or the pieces of one owner that are used."""

    identity: bytes
    """What decides whether the unit is held out."""
    pieces: list[Example]
    """The pieces, by rank."""


def _lay_out_units(units: Sequence[_Unit], data: DataSection, pad: int, *, shared: bool) -> Sequences:
    """Place units in sequences of their own; `shared`: a piece has the same share of its unit whatever its length."""
    pieces = [piece for unit in units for piece in unit.pieces]
    rows = np.array([_learnable_rows(piece, data.sequence_length).sum() for piece in pieces], np.int64)
    counts = np.array([len(unit.pieces) for unit in units], np.int64)
    starts = np.concatenate([[0], np.cumsum(rows)])[np.concatenate([[0], np.cumsum(counts)])]
    shares = np.repeat(1 / (np.repeat(counts, counts) * rows), rows).astype(np.float32)
    laid_out = _lay_out(pieces, data.model_copy(update={"packing": False}), pad)
    return replace(laid_out, starts=starts, shares=shares if shared else None)


def _learnable_rows(example: Example, length: int) -> NDArray[np.bool_]:
    """For each sequence of an example that starts a new sequence: whether a token of it is learned."""
    role = np.zeros(-(-len(example) // length) * length, np.uint8)
    role[: len(example)] = example.role
    return np.asarray(role.reshape(-1, length)[:, _first(example) :].any(axis=1), np.bool_)


def _chosen(identity: bytes, kind: str, share: float, seed: int) -> bool:
    """Whether a unit is held out: with probability `share` over its hash, which alone decides."""
    return int.from_bytes(_hash(f"held out{kind and ' '}{kind}", seed, identity)[:8], "big") < share * 2**64


def _hash(purpose: str, seed: int, content: bytes) -> bytes:
    return hashlib.sha256(f"cloister/{purpose}/{seed}/".encode() + content).digest()


def _tokens(example: Example) -> bytes:
    return example.tokens.astype("<i4").tobytes()


def _split(
    examples: list[Example], data: DataSection, seed: int, *, refuse: bool
) -> tuple[list[Example], list[Example]]:
    """Choose the held-out examples; both lists keep the order of the records.

    Raises:
        DataError: `refuse`, and nothing can be held out of a single example.
    """
    n = len(examples)
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
    if data.format != "text" or data.task == "classify" or len(only) < 4:
        if not refuse:
            return examples, []
        raise DataError(
            f"data.{data.format}",
            expected="at least two records, so that one can be held out",
            fix="add records, or set data.held_out = 0 and name public records in server.evaluation",
        )
    cut = min(max(2, round(len(only) * (1 - data.held_out))), len(only) - 2)
    return [only.piece(0, cut)], [only.piece(cut, len(only))]


def _lay_out(examples: Sequence[Example], data: DataSection, pad: int) -> Sequences:
    """Place examples in sequences of L tokens; drop sequences without a learned token."""
    length = data.sequence_length
    apart = data.packing and data.format != "text"
    if data.task == "classify":
        return _lay_out_classes(examples, length, pad)
    if not examples:
        nothing = np.empty((0, length), np.int32)
        return Sequences(nothing, nothing, nothing if apart else None, 0)
    placed = list(_placed(examples, length, pad, whole=apart, joined=data.packing))
    sizes = np.array([len(example) for example in placed])
    starts = np.cumsum(sizes) - sizes
    tokens = np.concatenate([example.tokens for example in placed]).reshape(-1, length)
    role = np.concatenate([example.role for example in placed]).reshape(-1, length)
    # The first token of a sequence, or of an example kept apart, has no context to be predicted from.
    role[:, 0] = CONTEXT
    positions = None
    if apart:
        places = np.arange(tokens.size) - np.repeat(starts, sizes)
        positions = places.astype(np.int32).reshape(-1, length)
        role[positions == 0] = CONTEXT
    answers = np.add.reduceat(role.ravel() == ANSWER, starts, dtype=np.int64)
    n_bytes = round(float(answers @ np.array([example.bytes_each for example in placed])))
    labels = np.where(role == CONTEXT, np.int32(NOT_LEARNED), tokens)
    kept = role.any(axis=1)
    if not kept.all():
        tokens, labels = tokens[kept], labels[kept]
        positions = None if positions is None else positions[kept]
    return Sequences(tokens, labels, positions, n_bytes)


def _lay_out_classes(examples: Sequence[Example], length: int, pad: int) -> Sequences:
    """Place texts that are classified in sequences of their own, each with its class as its label."""
    tokens = np.full((len(examples), length), pad, np.int32)
    for row, example in zip(tokens, examples, strict=True):
        row[: len(example)] = example.tokens
    labels = np.array([example.label for example in examples], np.int32).reshape(-1, 1)
    return Sequences(tokens, labels, None, 0)


def _lay_out_choices(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, data: DataSection, unusable: Unusable
) -> Sequences:
    """Place the prompt of each example with each choice in a sequence of its own. A prompt that does not fit with one
    of them is left out, because choices of which one is cut cannot be compared."""
    length, pad = data.sequence_length, tokenizer.pad_token_id
    size = len(data.choices)
    tokens = np.full((len(examples) * size, length), pad, np.int32)
    labels = np.full(tokens.shape, NOT_LEARNED, np.int32)
    answers: list[int] = []
    for answer, completed, first in compared(examples, tokenizer, data):
        # The first token of a sequence has no context to be predicted from.
        if first == 0 or max(map(len, completed)) > length:
            unusable.leave_out(_NOT_COMPARED)
            continue
        for row, example in enumerate(completed, len(answers) * size):
            tokens[row, : len(example)] = example.tokens
            labels[row, first : len(example)] = example.tokens[first:]
        answers.append(answer)
    used = slice(len(answers) * size)
    return Sequences(tokens[used], labels[used], None, 0, answers=np.array(answers, np.int32))


def _placed(
    examples: Iterable[Example], length: int, pad: int, *, whole: bool, joined: bool
) -> Iterator[Example]:
    """Insert padding between and after examples, so that cuts every `length` tokens fall where they may.

    With `whole`, an example that does not fit into the current sequence starts a new one. Without `joined`, every
    example starts a new sequence.
    """

    def padding(n: int) -> Iterator[Example]:
        if n:
            yield Example(np.full(n, pad, np.int32), np.full(n, CONTEXT, np.uint8), 0.0)

    room = 0  # tokens left in the current sequence
    for example in examples:
        if not joined or (whole and len(example) > room):
            yield from padding(room)
            room = 0
        yield example
        room = (room - len(example)) % length
    yield from padding(room)


def shuffled(seed: tuple[int, ...], n: int) -> NDArray[np.int64]:
    """The indices below `n` in a random order, which `seed` and `n` alone determine: (n,)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(n)
