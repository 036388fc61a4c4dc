"""Records -> examples: the tokens of each record, which of them are learned, and their bytes of text.

Texts, prompts and chats all become examples here, so later steps (splitting, cutting, packing) handle one type. A
record is first rendered as one text with the spans that are learned, then tokenised.

An example depends on its own record alone, also where a chat template makes it (`chat.py`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from cloister.lm.text import chat
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.tokenizer import END as END_OF_TEXT
from cloister.lm.text.tokenizer import PAD, byte_tokenizer, tokenizer_digest
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import DataSection

BATCH_CHARACTERS = 1 << 20
"""Characters from which texts are given to the tokenizer in several calls."""

LONGEST_WITH_PLACES = 4 << 20
"""UTF-8 bytes of the longest prompt or chat: to find the places of its tokens takes 285 times as much memory."""

MOST_RENDERED = 1 << 30
"""Characters of a chat times its messages, which bounds the time in which its turns are found: some seconds."""

Spans = Sequence[tuple[int, int]]
"""The parts of a text that are learned, as (start, stop) in characters, in order."""
_Text = tuple[str, Spans]
"""A rendered record: the text, and what of it is learned."""
_Coded = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""The tokens of a text, and which of them are learned."""

CONTEXT, ANSWER, END = 0, 1, 2
"""Roles of a token: not learned; learned, and part of the text; learned, and the end-of-text token."""


@dataclass(frozen=True)
class Example:
    """The tokens of one record, or of a piece of one."""

    tokens: NDArray[np.int32]
    """(n,): token ids."""
    role: NDArray[np.uint8]
    """(n,): the role of each token: `CONTEXT`, `ANSWER` or `END`."""
    bytes_each: float
    """UTF-8 bytes of text that an `ANSWER` token stands for."""
    label: int | None = None
    """Of a classifier's text its class, an index of `data.classes`; its tokens are not learned, but all have a role."""
    question: tuple[str, int] | None = None
    """Where a record has a choice: its prompt, and the choice that completes it, an index of `data.choices`."""

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, start: int, stop: int | None) -> Example:
        """Tokens `start` to `stop`, without a copy."""
        return replace(self, tokens=self.tokens[start:stop], role=self.role[start:stop])


def to_examples(
    records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, data: DataSection, unusable: Unusable
) -> Iterator[tuple[Record, Example]]:
    """Turn each record into one example of any length; an empty record gives an empty example.

    The learned tokens are every token of a text, the completion after a prompt, or the assistant's turns of a chat, and
    in each case the end-of-text token that follows. A text that is classified is cut to the sequence length and has the
    special tokens that the tokenizer adds by itself, because users of the saved model call it on the same tokens.

    Args:
        records: The records.
        tokenizer: The tokenizer.
        data: What a record is.
        unusable: Counts the records that lack the plan's field, have another type in it, have no label in
            `data.classes`, have a completion that is not in `data.choices`, are a chat that the template refuses, or
            cannot be tokenised, or are a prompt or chat of more than `LONGEST_WITH_PLACES` bytes.

    Yields:
        A record, and its example; in the order of the records, without those that are left out.

    Raises:
        DataError: as `check_tokenizer`.
    """
    check_tokenizer(tokenizer, data)
    # A chat template adds the begin and end tokens of a chat itself.
    encode = (
        _classified(tokenizer, data)
        if data.task == "classify"
        else _Encoder(tokenizer, whole=data.format == "text", close=data.format != "messages")
    )
    classes = {name: index for index, name in enumerate(data.classes)}
    choices = {name: index for index, name in enumerate(data.choices)}

    def rendered() -> Iterator[_Rendered]:
        for number, record in enumerate(records, start=1):
            place = unusable.place or f"record {number}"
            without = f"without the fields of data.format {data.format!r}"
            if (fields := unusable.tried(without, _fields, data, place, record)) is None:
                continue
            text = unusable.tried("refused by the chat template", _rendered, tokenizer, place, fields)
            if text is None:
                continue
            of: dict[str, Any] = {}
            if classes:
                wrong = "without a label in data.classes"
                of["label"] = unusable.tried(wrong, _label, data, classes, place, record)
            if choices:
                wrong = "with a completion that is not in data.choices"
                of["question"] = unusable.tried(wrong, _question, data, choices, place, record)
            if None not in of.values():
                yield record, text, of, unusable.place

    for batch in _by_size(rendered()):
        texts, places = [each[1] for each in batch], [each[3] for each in batch]
        examples = unusable.tried_together("refused by the tokenizer", encode, texts, places)
        for (record, _, of, place), example in zip(batch, examples, strict=True):
            if example is not None:
                unusable.place = place
                yield record, replace(example, **of)


def _classified(
    tokenizer: PreTrainedTokenizerBase, data: DataSection
) -> Callable[[Sequence[_Text]], list[Example]]:
    """Encodes texts that are classified: between the special tokens of the tokenizer, in at most a sequence."""
    encode = _Encoder(tokenizer, whole=True, close=False)
    start, end = _special_tokens(tokenizer)
    room = data.sequence_length - len(start) - len(end)
    if room < 1:
        raise DataError(
            "data.sequence_length",
            data.sequence_length,
            expected=f"room for a token of the text beside the {len(start) + len(end)} special ones of the tokenizer",
            fix="raise data.sequence_length",
        )

    def cut(batch: Sequence[_Text]) -> list[Example]:
        examples = []
        for example in encode(batch):
            text = example.piece(0, room)
            if len(text):
                tokens = _joined(start, text.tokens, end)
                text = replace(text, tokens=tokens, role=np.full(len(tokens), ANSWER, np.uint8))
            examples.append(text)
        return examples

    return cut


def _joined(before: Sequence[int], tokens: NDArray[np.int32], after: Sequence[int]) -> NDArray[np.int32]:
    """Tokens (n,) between others."""
    return np.concatenate([before, tokens, after], dtype=np.int32, casting="unsafe")


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after every text by itself."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for first in range(len(whole) - len(plain) + 1):
        if whole[first : first + len(plain)] == plain:
            return whole[:first], whole[first + len(plain) :]
    raise DataError(
        "data.task",
        "classify",
        expected="a tokenizer that adds its special tokens around a text and leaves the text's own",
        fix="set model.tokenizer to another one",
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, data: DataSection) -> None:
    """Check that a tokenizer can make examples of a plan's format, without any record.

    Raises:
        DataError: it has no chat template, or cannot give the offsets of its tokens in a text, where the format needs
            them; or two choices have the same tokens, so that neither can be more probable.
    """
    if data.format == "messages" and not tokenizer.chat_template:
        raise DataError(
            "data.format",
            "messages",
            expected="'prompt' or 'text', because the tokenizer has no chat template",
            fix="set model.tokenizer to one with a chat template",
        )
    if data.format != "text" and not tokenizer.is_fast:
        raise DataError(
            "data.format",
            expected="'text', because the tokenizer cannot give the offsets of its tokens in a text",
            fix="set model.tokenizer to a fast tokenizer (of the tokenizers library)",
        )
    known: dict[tuple[int, ...], str] = {}
    for choice in data.choices:
        other = known.setdefault(tuple(tokenizer(choice, add_special_tokens=False)["input_ids"]), choice)
        if other != choice:
            raise DataError(
                "data.choices",
                choice,
                expected=f"other tokens than those of the choice {other!r}, which the tokenizer makes equal to it",
                fix="keep one of the two, or set model.tokenizer to another one",
            )


def sample_record(data: DataSection) -> str:
    """A record with the fields that a plan asks for, as a line of JSONL."""
    turns = [{"role": role, "content": "..."} for role in ("user", "assistant")]
    record: dict[str, Any] = {data.text_field: "..."}
    if data.format == "messages":
        record = {data.messages_field: turns}
    elif data.format == "prompt":
        record = {data.prompt_field: "...", data.completion_field: (*data.choices, "...")[0]}
    fields = {data.label_field: data.classes[:1], data.owner: ["..."] * bool(data.owner)}
    return json.dumps(record | {name: few[0] for name, few in fields.items() if few}, ensure_ascii=False)


_Rendered = tuple[Record, _Text, dict[str, Any], str]
"""A record, its text, the label or question of its example (classes and choices are never both), and its place."""


@lru_cache(maxsize=1)
def _digest_of_bytes() -> str:
    return tokenizer_digest(byte_tokenizer())


def _by_size(rendered: Iterable[_Rendered]) -> Iterator[list[_Rendered]]:
    """Collect texts into batches of limited size: the intermediate results of a tokenizer call are large."""
    batch: list[_Rendered] = []
    size = 0
    for item in rendered:
        batch.append(item)
        size += len(item[1][0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fields(data: DataSection, place: str, record: Record) -> _Text | list[dict[str, Any]]:
    """A text or prompt as it is learned, or the messages of a chat."""
    if data.format == "messages":
        return _messages(record, place, data.messages_field)
    if data.format == "prompt":
        prompt = _field(record, place, data.prompt_field)
        text = prompt + _field(record, place, data.completion_field)
        return text, [(len(prompt), len(text))]
    text = _field(record, place, data.text_field)
    return text, [(0, len(text))]


_STAND_IN = "\ue0f1\ue0f2\ue0f3"  # private-use characters: no template and hardly any text contains them


def _rendered(
    tokenizer: PreTrainedTokenizerBase, place: str, messages: _Text | list[dict[str, Any]]
) -> _Text:
    """A text as it is; a chat rendered, with the assistant's turns in it.

    To locate a turn, the chat is rendered again with a placeholder as the turn's content: the two renderings differ
    exactly in the turn. This also works for templates that strip, reorder or shorten the content. The text that the
    template adds after a turn (its end token) is learned with the turn.
    """
    if isinstance(messages, tuple):
        return messages
    template = tokenizer.get_chat_template()

    def rendered(turns: list[dict[str, Any]]) -> str:
        try:
            return chat.render(template, turns, tokenizer.special_tokens_map)
        except Exception as error:  # a template is a program and can raise any exception
            reason = str(error).strip().partition("\n")[0]
            raise DataError(place, expected=f"a chat that the template accepts ({reason})") from error

    full = rendered(messages)
    if len(full) * len(messages) > MOST_RENDERED:
        raise DataError(place, len(messages), expected="fewer messages, or shorter ones")
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        stand_in = {**message, "content": _STAND_IN}
        other = rendered([*messages[:index], stand_in, *messages[index + 1 :]])
        if _STAND_IN not in other:
            raise DataError(place, expected="a chat template that keeps the assistant's content")
        start = _shared(full, other)
        end = len(full) - _shared(full[start:][::-1], other[start:][::-1])
        behind = rendered([*messages[:index], stand_in]).rpartition(_STAND_IN)[2]
        spans.append((start, end + _shared(full[end:], behind)))
    return full, spans


def _messages(record: Record, place: str, name: str) -> list[dict[str, Any]]:
    messages = _value(record, place, name)
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"{place}, field {name}", messages, expected="a list of {role, content}")
    kept = []
    for message in messages:
        kept.append(_present(message))
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise DataError(
                f"{place}, field {name}", message, expected="messages with a text role and a text content"
            )
    return kept


def _present(value: Any) -> Any:
    """A message without the keys that Arrow added: it gives every object the keys of all objects at its place.

    A template must not see None for an absent key, and one record must not add keys to others.
    """
    if isinstance(value, Mapping):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def _field(record: Record, place: str, name: str) -> str:
    value = _value(record, place, name)
    if not isinstance(value, str):
        raise DataError(f"{place}, field {name}", value, expected="text")
    return value


def _label(data: DataSection, classes: Mapping[str, int], place: str, record: Record) -> int:
    """The class of a record, as an index of `data.classes`."""
    value = _value(record, place, data.label_field)
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not (isinstance(name, str) and name in classes):
        raise DataError(
            f"{place}, field {data.label_field}",
            value,
            expected=f"one of data.classes: {', '.join(data.classes)}",
            fix="add the class to data.classes, or correct the record",
        )
    return classes[name]


def _question(data: DataSection, choices: Mapping[str, int], place: str, record: Record) -> tuple[str, int]:
    """The prompt of a record, and its completion as an index of `data.choices`."""
    completion = _field(record, place, data.completion_field)
    if completion not in choices:
        raise DataError(
            f"{place}, field {data.completion_field}",
            completion,
            expected=f"one of data.choices: {', '.join(map(repr, data.choices))}",
            fix="add the completion to data.choices, or correct the record",
        )
    return _field(record, place, data.prompt_field), choices[completion]


def compared(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, data: DataSection
) -> Iterator[tuple[int, list[Example], int]]:
    """Complete the prompt of each example with each choice, to compare how probable they are.

    The examples of one prompt are compared from the first token that any of the choices changes: where the end of the
    prompt and the beginning of a choice are one token, prompts alone would end at different places. All tokens before
    it are the same, so the sum of log p over the tokens from it on is, up to a term that the choices share, the log
    probability of the whole text.

    Args:
        examples: Examples with a question.
        tokenizer: The tokenizer.
        data: What a record is, with C choices.

    Yields:
        The choice that is an example's own; its prompt with each of the C choices, whole; the token from which they are
        compared.
    """
    questions = [example.question for example in examples if example.question is not None]
    variants = (
        {data.prompt_field: prompt, data.completion_field: choice}
        for prompt, _ in questions
        for choice in data.choices
    )
    made = (example for _, example in to_examples(variants, tokenizer, data, Unusable()))
    for _, answer in questions:
        completed = list(itertools.islice(made, len(data.choices)))
        first = min(int(np.argmax(example.role != CONTEXT)) for example in completed)
        for example in completed[1:]:
            differs = np.flatnonzero(example.tokens[:first] != completed[0].tokens[:first])
            first = int(differs[0]) if len(differs) else first
        yield answer, completed, first


def _value(record: Record, place: str, name: str) -> Any:
    if not isinstance(record, Mapping):
        raise DataError(place, record, expected="an object with named fields")
    value = record.get(name)
    if value is None:
        has = ", ".join(sorted(key for key, other in record.items() if other is not None)) or "none"
        raise DataError(
            place,
            expected=f"a field {name!r}; the fields of the record: {has}",
            fix="set the field of [data] that names it (such as data.text_field), or another data.format",
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
    """Texts with learned spans -> examples, with the begin and end tokens of the tokenizer's models."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, whole: bool, close: bool) -> None:
        """Learn every token if `whole`, else those in spans; add begin and end tokens if `close`."""
        self.tokenizer = tokenizer
        self.whole = whole
        alone = tokenizer("")["input_ids"]
        self.start = alone[:1] if close and alone[:1] == [tokenizer.bos_token_id] else []
        self.end = [tokenizer.eos_token_id] if close else []
        # The ids of byte tokens are the bytes: reading them is much faster than a tokenizer, and equal (tested).
        self.bytes = tokenizer_digest(tokenizer) == _digest_of_bytes()

    def __call__(self, batch: Sequence[_Text]) -> list[Example]:
        longest = 0 if self.whole else max(len(text.encode()) for text, _ in batch)
        if longest > LONGEST_WITH_PLACES:
            limit = f"a prompt with its completion, or a chat, of at most {LONGEST_WITH_PLACES} bytes"
            raise DataError("data", longest, expected=limit)
        if self.bytes:
            coded = _as_bytes(batch)
        elif self.whole:
            coded = self._as_wholes([text for text, _ in batch])
        else:
            coded = self._in_spans(batch)
        examples = []
        for (text, spans), (tokens, learned) in zip(batch, coded, strict=True):
            n_bytes = sum(len(text[start:stop].encode()) for start, stop in spans)
            before = self.start if text else []
            after = self.end if text and tokens[-1:].tolist() != self.end else []
            around = (len(before), len(after))
            role = np.pad(learned.astype(np.uint8), around, constant_values=(CONTEXT, END))
            bytes_each = n_bytes / max(1, int(np.count_nonzero(learned)))
            examples.append(Example(_joined(before, tokens, after), role, bytes_each))
        return examples

    def _as_wholes(self, texts: Sequence[str]) -> Iterator[_Coded]:
        # A tokenizer's intermediate results take about 100 bytes per token: a long text is encoded in pieces.
        for text in texts:
            parts = [np.array(self._call([piece])["input_ids"][0], np.int32) for piece in _pieces(text)]
            tokens = np.concatenate(parts)
            yield tokens, np.ones(len(tokens), bool)

    def _in_spans(self, batch: Sequence[_Text]) -> Iterator[_Coded]:
        called = self._call([text for text, _ in batch], return_offsets_mapping=True)
        for (_, spans), ids, offsets in zip(
            batch, called["input_ids"], called["offset_mapping"], strict=True
        ):
            begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
            learned = np.zeros(len(ids), bool)
            for start, stop in spans:
                # A token that crosses the start of a span is learned: the answer cannot be generated without it.
                learned |= (begin < stop) & (end > start)
            yield np.array(ids, np.int32), learned

    def _call(self, texts: list[str], **options: bool) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)


_SPECIAL = {END_OF_TEXT.encode(): 256, PAD.encode(): 257}
_ANY_SPECIAL = re.compile(b"|".join(map(re.escape, _SPECIAL)))


def _as_bytes(batch: Sequence[_Text]) -> Iterator[_Coded]:
    for text, spans in batch:
        coded = text.encode()
        tokens = np.frombuffer(coded, np.uint8).astype(np.int32)
        learned = np.zeros(len(tokens), bool)
        for start, stop in spans:
            first = len(text[:start].encode())
            learned[first : first + len(text[start:stop].encode())] = True
        kept = np.ones(len(tokens), bool)
        for found in _ANY_SPECIAL.finditer(coded):
            first, stop = found.span()
            tokens[first], learned[first] = _SPECIAL[found.group()], learned[first:stop].any()
            kept[first + 1 : stop] = False
        yield tokens[kept], learned[kept]


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text after line ends, where it has them."""
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        stop = start + BATCH_CHARACTERS
        stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
    yield text[start:]
