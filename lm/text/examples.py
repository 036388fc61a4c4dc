"""Records -> examples: the tokens of each record, which of them are learned, and their bytes of text.

Texts, prompts and chats all become examples here, so later steps (splitting, cutting, packing) handle one type. A
record is first rendered as one text with the spans that are learned, then tokenised. Which texts, and what else is
learned from a record, is for the plan's task to say (`lm/tasks/`).

An example depends on its own record alone, also where a chat template makes it (`chat.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloister.lm.text import chat
from cloister.lm.text.records import Record
from cloister.lm.text.special import Surround, joined_tokens
from cloister.lm.text.tokenizer import END as END_OF_TEXT
from cloister.lm.text.tokenizer import PAD, byte_tokenizer, tokenizer_digest
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import DataSection

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 1 << 20
"""Characters from which texts are given to the tokenizer in several calls."""

LONGEST_WITH_PLACES = 4 << 20
"""UTF-8 bytes of the longest prompt or chat: to find the places of its tokens takes 285 times as much memory."""

MOST_RENDERED = 1 << 30
"""Characters of a chat times its messages, which bounds the time in which its turns are found: some seconds."""

Spans = Sequence[tuple[int, int]]
"""The parts of a text that are learned, as (start, stop) in characters, in order."""
Text = tuple[str, Spans]
"""A rendered text, and what of it is learned."""


class Closing(NamedTuple):
    """A span that a template adds behind an answer: it is learned, and is no part of the answer."""

    start: int
    stop: int


_Coded = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""The tokens of a text, and the role of each."""
Places = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""The tokens of a text (n,), and where in it each begins and ends, in characters, (n,) each."""

CONTEXT, ANSWER, END = 0, 1, 2
"""Roles of a token: not learned; learned, and part of the text; learned, and behind it: the end-of-text token, or what
a template adds there."""


@dataclass(frozen=True)
class Example:
    """The tokens of one record, or of a piece of one."""

    tokens: NDArray[np.int32]
    """(n,): token ids."""
    role: NDArray[np.uint8]
    """(n,): the role of each token: `CONTEXT`, `ANSWER` or `END`."""
    bytes_each: float
    """UTF-8 bytes of text that an `ANSWER` token stands for."""
    labels: NDArray[np.int32] | None = None
    """(m,): what is learned, -100 where nothing is; None: the tokens that have a role, each from those before it."""
    beside: Any = None
    """What else the task has read in the record."""

    def __len__(self) -> int:
        return len(self.tokens)

    def piece(self, start: int, stop: int | None) -> Example:
        """Tokens `start` to `stop`, without a copy."""
        return replace(self, tokens=self.tokens[start:stop], role=self.role[start:stop])


@lru_cache(maxsize=1)
def _digest_of_bytes() -> str:
    return tokenizer_digest(byte_tokenizer())


_STAND_IN = "\ue0f1\ue0f2\ue0f3"  # private-use characters: no template and hardly any text contains them


def rendered(tokenizer: PreTrainedTokenizerBase, place: str, messages: list[dict[str, Any]]) -> Text:
    """A chat as a text, with the assistant's turns in it.

    To locate a turn, the chat is rendered again with a placeholder as the turn's content: the two renderings differ
    exactly in the turn. This also works for templates that strip, reorder or shorten the content. The text that the
    template adds after a turn (its end token) is learned with the turn.
    """
    template = tokenizer.get_chat_template()

    def as_text(turns: list[dict[str, Any]]) -> str:
        try:
            return chat.render(template, turns, tokenizer.special_tokens_map)
        except Exception as error:  # a template is a program and can raise any exception
            reason = str(error).strip().partition("\n")[0]
            raise DataError(place, expected=f"a chat that the template accepts ({reason})") from error

    full = as_text(messages)
    if len(full) * len(messages) > MOST_RENDERED:
        raise DataError(place, len(messages), expected="fewer messages, or shorter ones")
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        stand_in = {**message, "content": _STAND_IN}
        other = as_text([*messages[:index], stand_in, *messages[index + 1 :]])
        if _STAND_IN not in other:
            raise DataError(place, expected="a chat template that keeps the assistant's content")
        start = _shared(full, other)
        end = len(full) - _shared(full[start:][::-1], other[start:][::-1])
        behind = as_text([*messages[:index], stand_in]).rpartition(_STAND_IN)[2]
        spans += [(start, end), Closing(end, end + _shared(full[end:], behind))]
    return full, spans


def messages_in(record: Record, place: str, name: str) -> list[dict[str, Any]]:
    """The chat in a record's field.

    Raises:
        DataError: the record has no such field, or something else in it.
    """
    messages = value_in(record, place, name)
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"{place}, field {name}", messages, expected="a list of {role, content}")
    kept = []
    for message in messages:
        kept.append(present(message))
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise DataError(
                f"{place}, field {name}", message, expected="messages with a text role and a text content"
            )
    return kept


def present(value: Any) -> Any:
    """A message without the keys that Arrow added: it gives every object the keys of all objects at its place.

    A template must not see None for an absent key, and one record must not add keys to others.
    """
    if isinstance(value, Mapping):
        return {key: present(inner) for key, inner in value.items() if inner is not None}
    return [present(inner) for inner in value] if isinstance(value, list) else value


def text_in(record: Record, place: str, name: str) -> str:
    """The text in a record's field; errors as `messages_in`."""
    value = value_in(record, place, name)
    if not isinstance(value, str):
        raise DataError(f"{place}, field {name}", value, expected="text")
    return value


def value_in(record: Record, place: str, name: str) -> Any:
    """What is in a record's field; errors as `messages_in`."""
    if not isinstance(record, Mapping):
        raise DataError(place, record, expected="an object with named fields")
    value = record.get(name)
    if value is None:
        has = ", ".join(sorted(key for key, other in record.items() if other is not None)) or "none"
        raise DataError(
            f"{place}, field {name}",
            expected=f"a field of that name; the fields of the record: {has}",
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


class Encoder:
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

    def __call__(self, batch: Sequence[Text]) -> list[Example]:
        """The example of each text, which depends on no other one."""
        if self.bytes:
            if not self.whole:
                _check_longest(text for text, _ in batch)
            coded = _as_bytes(batch)
        elif self.whole:
            coded = self._as_wholes([text for text, _ in batch])
        else:
            coded = self._in_spans(batch)
        examples = []
        for (text, spans), (tokens, roles) in zip(batch, coded, strict=True):
            own = (span for span in spans if not isinstance(span, Closing))
            n_bytes = sum(len(text[start:stop].encode()) for start, stop in own)
            before = self.start if text else []
            after = self.end if text and tokens[-1:].tolist() != self.end else []
            around = (len(before), len(after))
            role = np.pad(roles, around, constant_values=(CONTEXT, END))
            bytes_each = n_bytes / max(1, int(np.count_nonzero(roles == ANSWER)))
            examples.append(Example(joined_tokens(before, tokens, after), role, bytes_each))
        return examples

    def places(self, texts: Sequence[str]) -> Iterator[Places]:
        """The tokens of each text, without any around it, and their places; those of a text depend on no other one."""
        _check_longest(texts)
        if self.bytes:
            yield from map(_places_of_bytes, texts)
            return
        called = self._call([*texts], return_offsets_mapping=True)
        for ids, offsets in zip(called["input_ids"], called["offset_mapping"], strict=True):
            begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
            yield np.array(ids, np.int32), begin, end

    def _as_wholes(self, texts: Sequence[str]) -> Iterator[_Coded]:
        # A tokenizer's intermediate results take about 100 bytes per token: a long text is encoded in pieces.
        for text in texts:
            parts = [np.array(self._call([piece])["input_ids"][0], np.int32) for piece in _pieces(text)]
            tokens = np.concatenate(parts)
            yield tokens, np.full(len(tokens), ANSWER, np.uint8)

    def _in_spans(self, batch: Sequence[Text]) -> Iterator[_Coded]:
        for (_, spans), (tokens, begin, end) in zip(
            batch, self.places([text for text, _ in batch]), strict=True
        ):
            role = np.zeros(len(tokens), np.uint8)
            for span in _answers_last(spans):
                # A token that crosses the start of a span is learned: the answer cannot be generated without it.
                role[(begin < span[1]) & (end > span[0])] = _role_of(span)
            yield tokens, role

    def _call(self, texts: list[str], **options: bool) -> Any:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)


def in_one_sequence(
    tokenizer: PreTrainedTokenizerBase, data: DataSection
) -> Callable[[Sequence[Text]], list[Example]]:
    """Encodes texts between the special tokens that the tokenizer adds by itself, each cut to a sequence.

    Raises:
        DataError: as `Surround`.
    """
    encode, around = Encoder(tokenizer, whole=True, close=False), Surround(tokenizer, data)

    def cut(example: Example) -> Example:
        text = example.piece(0, around.room)
        tokens = around(text.tokens) if len(text) else text.tokens
        return replace(text, tokens=tokens, role=np.full(len(tokens), ANSWER, np.uint8))

    return lambda batch: [cut(example) for example in encode(batch)]


_SPECIAL = {END_OF_TEXT.encode(): 256, PAD.encode(): 257}
_ANY_SPECIAL = re.compile(b"|".join(map(re.escape, _SPECIAL)))


def _answers_last(spans: Spans) -> list[tuple[int, int]]:
    """Spans in the order in which they give a token its role, which is that of the last one that it touches."""
    return sorted(spans, key=lambda span: not isinstance(span, Closing))


def _role_of(span: tuple[int, int]) -> int:
    return END if isinstance(span, Closing) else ANSWER


def _check_longest(texts: Iterable[str]) -> None:
    longest = max(len(text.encode()) for text in texts)
    if longest > LONGEST_WITH_PLACES:
        limit = f"a text of at most {LONGEST_WITH_PLACES} bytes, where places in it are read"
        raise DataError("data", longest, expected=limit)


def _places_of_bytes(text: str) -> Places:
    coded = text.encode()
    tokens = np.frombuffer(coded, np.uint8).astype(np.int32)
    begin = (
        np.cumsum((tokens & 0xC0) != 0x80) - 1
    )  # a byte that continues a character has the place of its first one
    end = begin + 1
    kept = np.ones(len(tokens), bool)
    for found in _ANY_SPECIAL.finditer(coded):
        first, stop = found.span()
        tokens[first], end[first] = _SPECIAL[found.group()], end[stop - 1]
        kept[first + 1 : stop] = False
    return tokens[kept], begin[kept], end[kept]


def _as_bytes(batch: Sequence[Text]) -> Iterator[_Coded]:
    for text, spans in batch:
        coded = text.encode()
        tokens = np.frombuffer(coded, np.uint8).astype(np.int32)
        role = np.zeros(len(tokens), np.uint8)
        for span in _answers_last(spans):
            first = len(text[: span[0]].encode())
            role[first : first + len(text[span[0] : span[1]].encode())] = _role_of(span)
        kept = np.ones(len(tokens), bool)
        for found in _ANY_SPECIAL.finditer(coded):
            first, stop = found.span()
            roles = role[first:stop]
            tokens[first], role[first] = _SPECIAL[found.group()], ANSWER if ANSWER in roles else roles.max()
            kept[first + 1 : stop] = False
        yield tokens[kept], role[kept]


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text after line ends, where it has them."""
    start = 0
    while len(text) - start > BATCH_CHARACTERS:
        stop = start + BATCH_CHARACTERS
        stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
    yield text[start:]
