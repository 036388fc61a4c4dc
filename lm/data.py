"""Records -> token sequences: read what a site holds, tokenise it once, and draw batches from it.

Reading is left to `datasets`, which maps JSONL and Parquet from disk as Arrow. What follows is arrays: two int32
matrices of the plan's sequence length (and positions where several examples share a sequence) that are written once as
`.npy` and mapped by every process of the site. A data loader with workers and collators was refused: tokens are made
before training starts, so that a step waits for nothing and a batch is one fancy index into a mapped matrix.

Every record becomes one *example*: its tokens, which of them are learned, and how many bytes of text each stands for.
Cutting, packing and splitting are then the same slices for text, prompts and chats.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets  # type: ignore[import-untyped]  # it ships no types
import jinja2
import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cloister.lm.tokenizer import byte_tokenizer, looks_like_path, on_hub
from cloister.protocol.errors import DataError, StorageError
from cloister.protocol.plan import DataSection
from cloister.protocol.storage import write_folder

NOT_LEARNED = -100
"""The label that transformers' loss ignores."""

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_BATCH_CHARACTERS = 1 << 20
_HASHED_BYTES = 64 << 20

Record = Mapping[str, Any]
Spans = Sequence[tuple[int, int]]
"""The parts of a text that are learned, as (start, stop) in characters, in order."""
_Coded = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""The tokens of a text, and which of them are learned."""


# Roles of a token: not learned; learned, and part of the text; learned, and only the end of it
_CONTEXT, _ANSWER, _END = 0, 1, 2


class Records(Protocol):
    """What records are read as: something list-like of dicts, such as a `datasets.Dataset` or a list."""

    def __len__(self) -> int:
        """Count the records."""

    def __getitem__(self, index: int, /) -> Record:
        """Return one record."""

    def __iter__(self) -> Iterator[Any]:
        """Go through the records in order."""


@dataclass(frozen=True)
class Sequences:
    """Token sequences of one length, ready for a causal language model that shifts labels itself.

    With `positions`, several examples share a sequence and must not see each other. Transformers keeps them apart when
    it is given the positions, no attention mask and `use_cache=False`.
    """

    tokens: NDArray[np.int32]
    """(N, L): token ids; padding comes last."""
    labels: NDArray[np.int32]
    """(N, L): the token at the same place where it is learned from what stands before it, else -100."""
    positions: NDArray[np.int32] | None
    """(N, L): place of a token in its example; None where they are 0..L-1 in every sequence."""
    n_bytes: int
    """UTF-8 bytes of the learned text, end-of-text tokens not counted: a loss summed in bits over this is bits per
    byte. Where a cut separates a learned token from its record, the record's bytes count evenly by token."""

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def n_tokens(self) -> int:
        """Labels that are learned."""
        return int(np.count_nonzero(self.labels != NOT_LEARNED))


@dataclass(frozen=True)
class Prepared:
    """One holder's records as token sequences, for training and for evaluation."""

    train: Sequences
    """What is trained on."""
    held_out: Sequences
    """What is only evaluated on: empty if `data.held_out` is 0."""
    dropped: int
    """Records of which nothing can be learned: empty, or with the whole answer past the sequence length."""


def read_records(source: str, *, split: str = "train", cache: Path | None = None) -> Records:
    """Read the records of a file, a folder of files of one kind, or a hub data set.

    Args:
        source: A `.txt` file (one record `{"text": ...}`), a `.jsonl`, `.json` or `.parquet` file, a folder (its files
            of these kinds in the order of their names, others left alone), or a hub name, `owner/name` or
            `owner/name:configuration`.
        split: Split of a hub data set; files have none.
        cache: Folder for the Arrow files from which large data is mapped. Without one, local files are read into
            memory and leave no copy on disk, and a hub data set uses the hub's own cache.

    Raises:
        DataError: the source is missing, empty, without records, or broken (with file and line); a folder mixes
            kinds; or the hub lacks the name or cannot be reached.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if looks_like_path(source) or path.suffix in _KINDS:
            raise DataError("data", source, expected="an existing file or folder")
        return _read_hub(source, split, cache)
    files, kind = _files(path)
    for file in files:
        if file.stat().st_size == 0:
            raise DataError("data", str(file), expected="a file with records, and this one is empty")
    records = _read_texts(files) if kind == "text" else _read_tables(files, kind, cache)
    if len(records) == 0:
        raise DataError("data", source, expected="at least one record")
    return records


def prepare(
    records: Records, tokenizer: PreTrainedTokenizerBase, data: DataSection, *, seed: int
) -> Prepared:
    """Tokenise records, keep some of them apart, and lay the rest out as sequences of `data.sequence_length`.

    Which records are held out depends on `seed` and on the records only: at least one of two or more is held out, and
    of one single text the last tokens are. The first token of a sequence, and of each example in a packed one, has
    nothing before it to be learned from, so its label is -100.

    Raises:
        DataError: a record lacks the plan's field or has another type in it; the tokenizer cannot do chats; nothing
            can be learned; or there is one single prompt or chat and some must be held out.
    """
    examples = [example for example in _examples(records, tokenizer, data) if example.role[1:].any()]
    dropped = len(records) - len(examples)
    if not examples:
        raise DataError(
            f"data.{data.format}",
            expected=f"at least one record with something to learn in its first {data.sequence_length} tokens, "
            f"and none of the {len(records)} has that",
            fix="raise data.sequence_length or look at the records",
        )
    train, held_out = _split(examples, data, seed)
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    return Prepared(_lay_out(train, data, pad), _lay_out(held_out, data, pad), dropped)


def batches(n: int, batch_size: int, seed: tuple[int, ...]) -> Iterator[NDArray[np.int64]]:
    """Draw batches of indices below `n` without end: each epoch visits every index once, in an order of its own.

    An epoch that ends inside a batch is followed by the next in the same batch, so that every batch has exactly
    `batch_size` indices, also where `n` is smaller. The same `seed` gives the same batches.

    Raises:
        ValueError: `n` or `batch_size` is less than 1.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(f"batches of {batch_size} from {n} sequences: both must be at least 1")
    return _batches(n, batch_size, seed)


def save_prepared(folder: Path, prepared: Prepared) -> None:
    """Write prepared sequences to `folder`, which appears whole or not at all, in the place of what was there.

    Raises:
        StorageError: the disk is full or refuses the write; what was there is untouched.
    """

    def fill(temporary: Path) -> None:
        about: dict[str, Any] = {"dropped": prepared.dropped, "parts": {}}
        for name, part in (("train", prepared.train), ("held_out", prepared.held_out)):
            arrays = {"tokens": part.tokens, "labels": part.labels, "positions": part.positions}
            present = {kind: array for kind, array in arrays.items() if array is not None}
            for kind, array in present.items():
                np.save(temporary / f"{name}-{kind}.npy", array)
            about["parts"][name] = {"n_bytes": part.n_bytes, "rows": len(part), "arrays": list(present)}
        (temporary / "prepared.json").write_text(json.dumps(about), encoding="utf-8")

    write_folder(folder, fill)


def load_prepared(folder: Path) -> Prepared:
    """Map the sequences that `save_prepared` wrote; the arrays are read-only and shared between processes.

    Raises:
        DataError: the folder is missing or damaged.
    """
    try:
        about = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        parts = {}
        for name in ("train", "held_out"):
            part = about["parts"][name]
            mode: Any = "r" if part["rows"] else None  # nothing cannot be mapped
            arrays = {kind: np.load(folder / f"{name}-{kind}.npy", mmap_mode=mode) for kind in part["arrays"]}
            parts[name] = Sequences(
                arrays["tokens"], arrays["labels"], arrays.get("positions"), int(part["n_bytes"])
            )
        return Prepared(parts["train"], parts["held_out"], int(about["dropped"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(
            "prepared data",
            str(folder),
            expected=f"a folder of tokenised data ({error})",
            fix="remove the folder",
        ) from error


def cached(folder: Path, key: str, make: Callable[[], Prepared]) -> Prepared:
    """Return the sequences filed under `key` in `folder`, mapped from disk; make them first if they are not there.

    Of several processes that ask at once one makes them and the others wait for it.

    Args:
        folder: Where one site keeps its tokenised data.
        key: What the sequences depend on, from `prepared_key`.
        make: Makes them; called only if they are not there.

    Raises:
        DataError: what is filed there is damaged.
        StorageError: the disk is full or refuses the write.
    """
    filed = folder / f"tokens-{key[:32]}"
    if not filed.exists():
        lock = FileLock(folder / f".{filed.name}.lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise StorageError(
                str(folder), expected=f"a folder that can be written to ({error.strerror})"
            ) from error
        try:
            if not filed.exists():
                save_prepared(filed, make())
        finally:
            lock.release()
    return load_prepared(filed)


def prepared_key(
    source: str, tokenizer: PreTrainedTokenizerBase, data: DataSection, *, seed: int, split: str = "train"
) -> str:
    """SHA-256, in hex, of all that `prepare(read_records(source))` depends on.

    A file counts by name, size and time of change, and up to 64 MiB also by its content; a hub data set by its name.
    """
    digest = hashlib.sha256()
    for part in (data.model_dump_json(), str(seed), source, split, _identity(tokenizer)):
        digest.update(hashlib.sha256(part.encode()).digest())
    path = Path(source).expanduser()
    for file in _files(path)[0] if path.exists() else []:
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        if status.st_size <= _HASHED_BYTES:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# Reading


def _files(path: Path) -> tuple[list[Path], str]:
    """The files that `path` stands for, in order, and their one kind."""
    if path.is_file():
        if path.suffix not in _KINDS:
            raise DataError("data", str(path), expected=f"a file that ends in {', '.join(_KINDS)}")
        return [path], _KINDS[path.suffix]
    files = sorted(file for file in path.iterdir() if file.suffix in _KINDS and not file.name.startswith("."))
    kinds = sorted({_KINDS[file.suffix] for file in files})
    if not kinds:
        raise DataError("data", str(path), expected=f"a folder with files that end in {', '.join(_KINDS)}")
    if len(kinds) > 1:
        raise DataError(
            "data", str(path), expected=f"files of one kind, and this folder mixes {', '.join(kinds)}"
        )
    return files, kinds[0]


def _read_texts(files: Iterable[Path]) -> Records:
    texts = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            expected = f"UTF-8 text, and byte {error.start} is not"
            raise DataError("data", str(file), expected=expected) from None
        except OSError as error:
            raise DataError("data", str(file), expected=f"a readable file ({error.strerror})") from error
        texts.append({"text": text})
    return texts


def _read_tables(files: Sequence[Path], kind: str, cache: Path | None) -> Records:
    with contextlib.ExitStack() as stack:
        folder = str(cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="cloister-")))
        names = [glob.escape(str(file.resolve())) for file in files]
        stack.enter_context(_quiet())
        # By default bytes that are no UTF-8 pass here and fail where a record is read; a named encoding is checked.
        options = {"encoding": "utf-8-sig"} if kind == "json" else {}
        try:
            records: Records = datasets.load_dataset(
                kind,
                data_files=names,
                split="train",
                cache_dir=folder,
                keep_in_memory=cache is None,
                **options,
            )
        except Exception as error:  # datasets raises whatever the line it could not read led to
            if kind == "json":
                for file in files:
                    _check_lines(file)
            root = error
            while root.__cause__ is not None:
                root = root.__cause__  # type: ignore[assignment]  # only `Exception`s are chained here
            if "No space left" in str(root):
                raise StorageError(
                    folder, expected="a disk with room for the data", fix="make room"
                ) from error
            reason = str(root).strip().partition("\n")[0]
            where = str(files[0]) if len(files) == 1 else str(files[0].parent)
            raise DataError("data", where, expected=f"readable {kind} records ({reason})") from error
    return records


def _check_lines(file: Path) -> None:
    """Find the first line that is no JSON object, or see that there is none, or that it is one document."""
    objects = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if number == 1 and file.suffix == ".json":
                    return _check_document(file)
                reason = getattr(error, "msg", str(error))
                raise DataError(f"{file}, line {number}", expected=f"one JSON object ({reason})") from None
            if number == 1 and isinstance(record, list) and file.suffix == ".json":
                return _check_document(file)
            if not isinstance(record, dict):
                raise DataError(f"{file}, line {number}", record, expected="one JSON object")
            objects += 1
    if not objects:
        raise DataError("data", str(file), expected="a file with records, and this one has none")
    return None


def _check_document(file: Path) -> None:
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        reason = getattr(error, "msg", str(error))
        raise DataError(f"{file}, line {line}", expected=f"a JSON list of objects ({reason})") from None
    for number, record in enumerate(document if isinstance(document, list) else [], start=1):
        if not isinstance(record, dict):
            raise DataError(f"{file}, record {number}", record, expected="one JSON object")


def _read_hub(source: str, split: str, cache: Path | None) -> Records:
    name, _, configuration = source.partition(":")
    online = on_hub(name, kind="dataset", revision="main", field="data", error=DataError)
    with _quiet(), _offline(not online):
        try:
            records: Records = datasets.load_dataset(
                name, configuration or None, split=split, cache_dir=None if cache is None else str(cache)
            )
        except Exception as error:  # datasets raises whatever the file it did not expect led to
            if not online:
                expected = "an existing path, or a data set in the hub's local cache, because the hub cannot be reached"
                raise DataError("data", source, expected=expected, fix="download it first") from error
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                "data", source, expected=f"a data set with a split {split!r} ({reason})"
            ) from error
    if len(records) == 0:
        raise DataError("data", source, expected="at least one record")
    return records


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the progress bars and logs of datasets off the terminal; what matters is in its exceptions."""
    level, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _offline(switch: bool) -> Iterator[None]:
    """Make datasets look at its cache only, where it would retry an absent network for half a minute."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or switch
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


# Examples


@dataclass(frozen=True)
class _Example:
    """The tokens of one record, or of a piece of one."""

    tokens: NDArray[np.int32]
    """(n,): token ids."""
    role: NDArray[np.uint8]
    """(n,): whether a token is learned: `_CONTEXT`, `_ANSWER` or `_END`."""
    bytes_each: float
    """UTF-8 bytes of text that an `_ANSWER` token stands for."""

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, start: int, stop: int) -> _Example:
        return _Example(self.tokens[start:stop], self.role[start:stop], self.bytes_each)


def _examples(records: Records, tokenizer: PreTrainedTokenizerBase, data: DataSection) -> Iterator[_Example]:
    """Turn each record into its example; a prompt or chat is cut at the sequence length, a text is not."""
    render: Callable[[int, Record], tuple[str, Spans]]
    if data.format == "text":
        render = functools.partial(_render_text, data)
    elif data.format == "prompt":
        render = functools.partial(_render_prompt, data)
    else:
        if not tokenizer.chat_template:
            raise DataError(
                "data.format",
                "messages",
                expected="prompt or text with a tokenizer that has no chat template",
                fix="set model.tokenizer to one that has",
            )
        render = functools.partial(_render_chat, data, tokenizer)
    # A chat template says itself where a chat begins and ends.
    encode = _Encoder(tokenizer, whole=data.format == "text", close=data.format != "messages")
    for batch in _by_size(render(number, record) for number, record in enumerate(records, start=1)):
        for example in encode(batch):
            yield example if data.format == "text" else example.piece(0, data.sequence_length)


def _by_size(rendered: Iterable[tuple[str, Spans]]) -> Iterator[list[tuple[str, Spans]]]:
    """Gather texts until they are worth a call of the tokenizer, whose intermediate results are large."""
    batch: list[tuple[str, Spans]] = []
    size = 0
    for item in rendered:
        batch.append(item)
        size += len(item[0])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _render_text(data: DataSection, number: int, record: Record) -> tuple[str, Spans]:
    text = _field(record, number, data.text_field)
    return text, [(0, len(text))]


def _render_prompt(data: DataSection, number: int, record: Record) -> tuple[str, Spans]:
    prompt = _field(record, number, data.prompt_field)
    text = prompt + _field(record, number, data.completion_field)
    return text, [(len(prompt), len(text))]


_STAND_IN = "\ue0f1\ue0f2\ue0f3"  # private-use characters, which no template and hardly any text contains


def _render_chat(
    data: DataSection, tokenizer: PreTrainedTokenizerBase, number: int, record: Record
) -> tuple[str, Spans]:
    """Render a chat and find the assistant's turns in it.

    Where a turn stands is found by rendering the chat once more with a stand-in for the turn's content: what differs
    between the two is the turn. This holds also for templates that strip, rearrange or shorten what was said.
    What the template puts behind a turn (its end token) is learned with it.
    """
    messages = _messages(record, number, data.messages_field)

    def rendered(turns: list[dict[str, Any]]) -> str:
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False))
        except jinja2.TemplateError as error:
            raise DataError(
                f"record {number}", expected=f"a chat that the template takes ({error})"
            ) from error

    full = rendered(messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        stand_in = {**message, "content": _STAND_IN}
        other = rendered([*messages[:index], stand_in, *messages[index + 1 :]])
        if _STAND_IN not in other:
            raise DataError(f"record {number}", expected="a chat template that keeps what the assistant says")
        start = _shared(full, other)
        end = len(full) - _shared(full[start:][::-1], other[start:][::-1])
        behind = rendered([*messages[:index], stand_in]).rpartition(_STAND_IN)[2]
        spans.append((start, end + _shared(full[end:], behind)))
    return full, spans


def _messages(record: Record, number: int, name: str) -> list[dict[str, Any]]:
    messages = _value(record, number, name)
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"record {number}, field {name}", messages, expected="a list of {role, content}")
    kept = []
    for message in messages:
        # Arrow gives every message every key that any message has; a template must not take None for a value.
        kept.append({key: value for key, value in message.items() if value is not None})
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise DataError(
                f"record {number}, field {name}",
                message,
                expected="messages with a text role and a text content",
            )
    return kept


def _field(record: Record, number: int, name: str) -> str:
    value = _value(record, number, name)
    if not isinstance(value, str):
        raise DataError(f"record {number}, field {name}", value, expected="text")
    return value


def _value(record: Record, number: int, name: str) -> Any:
    if not isinstance(record, Mapping):
        raise DataError(f"record {number}", record, expected="an object with named fields")
    value = record.get(name)
    if value is None:
        has = ", ".join(sorted(key for key, other in record.items() if other is not None)) or "none"
        raise DataError(
            f"record {number}",
            expected=f"a field {name!r}, and it has {has}",
            fix="name the field in [data] of the plan",
        )
    return value


def _shared(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


class _Encoder:
    """Texts with learned spans -> examples, with the beginning and end tokens that the tokenizer's models expect."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, whole: bool, close: bool) -> None:
        """Set up for texts that are learned as a `whole` or in spans, and that it must `close` or that are closed."""
        self.tokenizer = tokenizer
        self.whole = whole
        alone = tokenizer("")["input_ids"]
        self.start = alone[:1] if close and alone[:1] == [tokenizer.bos_token_id] else []
        self.end = [tokenizer.eos_token_id] if close else []
        self.special = [str(token) for token in tokenizer.all_special_tokens]
        # Bytes are their own tokens: reading them off is far faster than looking each one up, and equal (tested).
        self.bytes = _identity(tokenizer) == _identity(byte_tokenizer())
        if not whole and not tokenizer.is_fast:
            raise DataError(
                "data.format",
                expected="text, with a tokenizer that cannot say where in a text its tokens stand",
                fix="set model.tokenizer to one of the tokenizers library",
            )

    def __call__(self, batch: Sequence[tuple[str, Spans]]) -> Iterator[_Example]:
        if self.bytes and not any(token in text for text, _ in batch for token in self.special):
            coded = _as_bytes(batch)
        elif self.whole:
            coded = self._as_wholes([text for text, _ in batch])
        else:
            coded = self._in_spans(batch)
        for (text, spans), (tokens, learned) in zip(batch, coded, strict=True):
            n_bytes = sum(len(text[start:stop].encode()) for start, stop in spans)
            before = self.start if text else []
            after = self.end if text and tokens[-1:].tolist() != self.end else []
            yield _Example(
                np.concatenate([np.array(before, np.int32), tokens, np.array(after, np.int32)]),
                np.pad(learned.astype(np.uint8), (len(before), len(after)), constant_values=(_CONTEXT, _END)),
                n_bytes / max(1, int(np.count_nonzero(learned))),
            )

    def _as_wholes(self, texts: Sequence[str]) -> Iterator[_Coded]:
        # The intermediate results of a tokenizer take some 100 bytes a token, so a long text goes in pieces.
        for text in texts:
            parts = [np.array(self._call([piece])["input_ids"][0], np.int32) for piece in _pieces(text)]
            tokens = np.concatenate(parts)
            yield tokens, np.ones(len(tokens), bool)

    def _in_spans(self, batch: Sequence[tuple[str, Spans]]) -> Iterator[_Coded]:
        called = self._call([text for text, _ in batch], return_offsets_mapping=True)
        for (_, spans), ids, offsets in zip(
            batch, called["input_ids"], called["offset_mapping"], strict=True
        ):
            begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
            learned = np.zeros(len(ids), bool)
            for start, stop in spans:
                # A token across the border belongs to the answer: without it the answer could not be written.
                learned |= (begin < stop) & (end > start)
            yield np.array(ids, np.int32), learned

    def _call(self, texts: list[str], **options: bool) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)


def _as_bytes(batch: Sequence[tuple[str, Spans]]) -> Iterator[_Coded]:
    for text, spans in batch:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        learned = np.zeros(len(tokens), bool)
        for start, stop in spans:
            first = len(text[:start].encode())
            learned[first : first + len(text[start:stop].encode())] = True
        yield tokens, learned


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text behind line ends."""
    start = 0
    while len(text) - start > _BATCH_CHARACTERS:
        stop = start + _BATCH_CHARACTERS
        stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
    yield text[start:]


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """All of a tokenizer that decides about tokens, as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return json.dumps(
        [type(tokenizer).__name__, inner, tokenizer.special_tokens_map, tokenizer.chat_template], default=str
    )


# Layout


def _split(examples: list[_Example], data: DataSection, seed: int) -> tuple[list[_Example], list[_Example]]:
    """Choose the held-out examples; both lists keep the order of the records."""
    if data.held_out == 0:
        return examples, []
    n = len(examples)
    if n > 1:
        n_held_out = min(max(1, round(n * data.held_out)), n - 1)
        held_out = set(_shuffle((seed,), n)[:n_held_out].tolist())
        return [e for i, e in enumerate(examples) if i not in held_out], [
            examples[i] for i in sorted(held_out)
        ]
    only = examples[0]
    if data.format != "text" or len(only) < 4:
        raise DataError(
            f"data.{data.format}",
            expected="two records or more, of which one can be held out",
            fix="add records, or set data.held_out = 0 and name public records in server.evaluation",
        )
    cut = min(max(2, round(len(only) * (1 - data.held_out))), len(only) - 2)
    return [only.piece(0, cut)], [only.piece(cut, len(only))]


def _lay_out(examples: Sequence[_Example], data: DataSection, pad: int) -> Sequences:
    """Place examples in sequences of L tokens; a sequence from which nothing can be learned is left out."""
    length = data.sequence_length
    apart = data.packing and data.format != "text"
    if not examples:
        nothing = np.empty((0, length), np.int32)
        return Sequences(nothing, nothing, nothing if apart else None, 0)
    placed = list(_placed(examples, length, pad, whole=apart, joined=data.packing))
    ends = np.cumsum([len(example) for example in placed])
    tokens = np.concatenate([example.tokens for example in placed]).reshape(-1, length)
    role = np.concatenate([example.role for example in placed]).reshape(-1, length)
    # What comes first, in a sequence or in an example apart, follows nothing that it could be predicted from.
    role[:, 0] = _CONTEXT
    positions = None
    if apart:
        starts = np.repeat(ends - [len(example) for example in placed], [len(example) for example in placed])
        positions = (np.arange(tokens.size) - starts).astype(np.int32).reshape(-1, length)
        role[positions == 0] = _CONTEXT
    answers = np.add.reduceat(role.ravel() == _ANSWER, np.append(0, ends[:-1]), dtype=np.int64)
    n_bytes = round(float(answers @ np.array([example.bytes_each for example in placed])))
    labels = np.where(role == _CONTEXT, np.int32(NOT_LEARNED), tokens)
    kept = role.any(axis=1)
    if not kept.all():
        tokens, labels = tokens[kept], labels[kept]
        positions = None if positions is None else positions[kept]
    return Sequences(tokens, labels, positions, n_bytes)


def _placed(
    examples: Iterable[_Example], length: int, pad: int, *, whole: bool, joined: bool
) -> Iterator[_Example]:
    """Put padding between and behind examples, so that a cut every `length` tokens falls where it may.

    An example that must stay `whole` goes into a new sequence if it does not fit into the open one; one that may not
    be `joined` to the one before always does.
    """

    def padding(n: int) -> Iterator[_Example]:
        if n:
            yield _Example(np.full(n, pad, np.int32), np.full(n, _CONTEXT, np.uint8), 0.0)

    room = 0  # in the sequence that is open
    for example in examples:
        if not joined or (whole and len(example) > room):
            yield from padding(room)
            room = 0
        yield example
        room = (room - len(example)) % length
    yield from padding(room)


def _batches(n: int, batch_size: int, seed: tuple[int, ...]) -> Iterator[NDArray[np.int64]]:
    waiting = np.empty(0, np.int64)
    for epoch in itertools.count():
        waiting = np.concatenate([waiting, _shuffle((*seed, epoch), n)])
        whole = len(waiting) // batch_size * batch_size
        yield from waiting[:whole].reshape(-1, batch_size)
        waiting = waiting[whole:]


def _shuffle(seed: tuple[int, ...], n: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).permutation(n)
