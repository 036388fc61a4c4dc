"""Token classification: which words of a text are entities, and of which type, by a head that is trained.

A record has a text and its entities, as places in characters (`data.spans_field`), or a list of words with a tag for
each. The words of a text are its runs of letters, digits and underscores, and each other character that is no white
space, whatever the tokenizer is; words of a list are joined by spaces. A word that an entity touches belongs to it
whole: its first word has the tag B and its type, the others have I, and all other words have O.

The first token of a word has the word's tag as its label and the other tokens have none, as is usual with transformers.
A token that is the first one of several words has the tag of the first of them, and the others have no label. A text is
cut to the sequence length; figures are of the words that have a label there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloister.lm.measures.entities import Entities, count, spans_of, tags_of
from cloister.lm.tasks.auto import TOKEN_CLASSIFIER
from cloister.lm.tasks.classify import named_outputs
from cloister.lm.tasks.task import HeldOut, Pass, Task
from cloister.lm.text.examples import ANSWER, Encoder, Example, Places, Spans, Text, value_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED
from cloister.lm.text.special import Surround
from cloister.protocol.errors import DataError

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_WORD = re.compile(r"\w+|[^\w\s]")
_O = 0


class TokenClassify(Task):
    """Texts with entities."""

    auto = TOKEN_CLASSIFIER
    ends = False

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the tokenizer tells the places of its tokens in a text."""
        if not tokenizer.is_fast:
            raise DataError(
                "data.task",
                self.data.task,
                expected="a tokenizer that gives the offsets of its tokens in a text",
                fix="set model.tokenizer to a fast tokenizer (of the tokenizers library)",
            )

    def sample(self) -> dict[str, Any]:
        """A text with an entity."""
        entity = {"start": 0, "end": 3, "label": self.data.classes[0]}
        return {self.data.text_field: "...", self.data.spans_field: [entity]}

    @property
    def content(self) -> tuple[str, ...]:
        """The text, whatever its entities are."""
        return (self.data.text_field,)

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """The text, with the places of its words."""
        without = f"without a text or a list of words in {self.data.text_field!r}"
        text = unusable.tried(without, self._words, place, record)
        return None if text is None else (text,)

    def beside(self, unusable: Unusable, place: str, record: Record) -> dict[str, Any] | None:
        """The tags of the words, as indices of the model's outputs."""
        without = f"without entities in {self.data.spans_field!r}, or with some that overlap or are not in data.classes"
        tags = unusable.tried(without, self._tags, place, record)
        return None if tags is None else {"labels": tags}

    def _words(self, place: str, record: Record) -> Text:
        value = value_in(record, place, self.data.text_field)
        if isinstance(value, str):
            return value, [found.span() for found in _WORD.finditer(value)]
        if not (isinstance(value, list) and all(isinstance(word, str) and word for word in value)):
            wanted = "a text, or a list of words that are not empty"
            raise DataError(f"{place}, field {self.data.text_field}", value, expected=wanted)
        ends = np.cumsum([len(word) + 1 for word in value]) - 1
        return " ".join(value), [
            (int(end) - len(word), int(end)) for word, end in zip(value, ends, strict=True)
        ]

    def _tags(self, place: str, record: Record) -> NDArray[np.int32]:
        field, value = (
            f"{place}, field {self.data.spans_field}",
            value_in(record, place, self.data.spans_field),
        )
        text, words = self._words(place, record)
        if not isinstance(value, list):
            raise DataError(field, value, expected="a list")
        if isinstance(record[self.data.text_field], str):
            return self._tags_of(value, text, words, field)
        known = tags_of(self.data.classes)
        if len(value) != len(words) or not all(isinstance(tag, str) and tag in known for tag in value):
            raise DataError(field, value, expected=f"for each word one of {', '.join(known)}")
        return np.array([known.index(tag) for tag in value], np.int32)

    def _tags_of(self, entities: Iterable[Any], text: str, words: Spans, field: str) -> NDArray[np.int32]:
        """The tags of the words that entities of a text touch."""
        begins, ends = np.array(words, np.int64).reshape(-1, 2).T
        tags = np.full(len(words), _O, np.int32)
        for entity in entities:
            found = (
                [entity.get(key) for key in ("start", "end", "label")] if isinstance(entity, Mapping) else []
            )
            start, end, label = found or (None, None, None)
            if not (type(start) is type(end) is int and 0 <= start < end <= len(text)):
                raise DataError(field, entity, expected="{start, end, label}, with places in the text")
            if label not in self.data.classes:
                raise DataError(field, label, expected=f"one of data.classes: {', '.join(self.data.classes)}")
            touched = slice(np.searchsorted(ends, start, "right"), np.searchsorted(begins, end, "left"))
            if not len(tags[touched]) or tags[touched].any():
                raise DataError(field, entity, expected="an entity of words that no other one has")
            tags[touched] = 2 + 2 * self.data.classes.index(label)
            tags[touched.start] -= 1
        return tags

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """Texts between the special tokens of the tokenizer, in at most a sequence. The labels are the numbers of the
        words of which a token is the first one, else -1."""
        encode, around = Encoder(tokenizer, whole=False, close=False), Surround(tokenizer, self.data)

        def cut(places: Places, words: Spans) -> Example:
            text, first = places[0][: around.room], _first_tokens(places, words)
            tokens = around(text) if len(text) else text
            labels, shown = np.full(len(tokens), -1, np.int32), (first >= 0) & (first < len(text))
            labels[first[shown] + len(around.start)] = np.flatnonzero(shown)
            return Example(tokens, np.full(len(tokens), ANSWER, np.uint8), 0.0, labels)

        return lambda batch: [
            cut(places, words)
            for places, (_, words) in zip(encode.places([text for text, _ in batch]), batch, strict=True)
        ]

    def merged(self, parts: Sequence[Example], beside: Mapping[str, Any]) -> Example:
        """The tags of the words at their first tokens."""
        (only,) = parts
        assert only.labels is not None
        return replace(only, labels=np.append(beside["labels"], np.int32(NOT_LEARNED))[only.labels])

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Name the tags, and the padding's token."""
        named_outputs(config, tags_of(self.data.classes), tokenizer)

    def outputs(
        self, forward: Pass, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, L, tags). The model may attend in both directions, so it is told where the padding begins."""
        return forward.logits(input_ids=tokens, attention_mask=forward.before_padding(tokens)), targets

    def counters(self) -> tuple[str, ...]:
        """For each type the entities that are right, that the model gives, and that are true."""
        return Entities.names(len(self.data.classes))

    def count(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The entities of a batch."""
        return count(logits.argmax(-1), targets, len(self.data.classes))

    def predicted(self, module: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> list[dict[str, Any]]:
        """The entities of a text, by their places in characters."""
        import torch

        words = [found.span() for found in _WORD.finditer(text)]
        (example,) = self.encoder(tokenizer)([(text, words)])
        if not len(example):
            return []
        assert example.labels is not None
        with torch.no_grad():
            tags = module(input_ids=torch.from_numpy(example.tokens)[None].long()).logits[0].argmax(-1)
        shown = example.labels >= 0
        numbers, tags = example.labels[shown], tags[torch.from_numpy(shown)]
        found = []
        for first, last, kind in zip(*(each.tolist() for each in spans_of(tags, tags * 0)), strict=True):
            start, end = words[numbers[first]][0], words[numbers[last]][1]
            found.append(
                {"start": start, "end": end, "label": self.data.classes[kind], "text": text[start:end]}
            )
        return found

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """Loss and accuracy of words; precision, recall and F1 of entities."""
        entities = Entities.counted(held_out.counts, len(self.data.classes))
        return {"loss": held_out.loss, "accuracy": held_out.accuracy} | entities.figures()

    def wanting(self) -> tuple[str, str]:
        """The field of the text."""
        return "data.text_field", "check that the texts have words"


def _first_tokens(places: Places, words: Spans) -> NDArray[np.int64]:
    """For each word its first token; -1 of a word that has none, or one that is the first of a word before it."""
    _, begin, end = places
    starts, stops = np.array(words, np.int64).reshape(-1, 2).T
    first = np.searchsorted(np.maximum.accumulate(end), starts, "right")
    there = np.flatnonzero(np.append(begin, stops.max(initial=0))[first] < stops)
    _, own = np.unique(first[there], return_index=True)
    found = np.full(len(words), -1)
    found[there[own]] = first[there[own]]
    return found
