"""The words of a field's texts, at most so many different ones of each unit."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
from tokenizers import pre_tokenizers

from cloister.lm.model.model import LanguageModel
from cloister.lm.questions.question import Held, owned_records
from cloister.lm.text.records import Record
from cloister.protocol.plan.plan import Plan, QuestionSection
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.vectors import Sparse
from cloister.protocol.questions.vocabulary import LONGEST, cells_of, weights_of

_log = logging.getLogger(__name__)
_MOST_TEXT = 2**20
"""Characters of a text whose words count."""
_MOST_WORDS = 2**16
"""Words of a record of which a site counts in how many records they are."""
_MOST_KNOWN = 2**20
"""Words of a site that are counted; with twice as many the rarest are forgotten."""
_PART = 2**16
"""Characters that are cut into words together; a word at the end of a part is cut there."""
_AT_ONCE = 512
"""Units whose cells are found together."""
_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
"""Where `train_tokenizer` cuts words."""


def vocabulary(plan: Plan, held: Held, models: tuple[LanguageModel, ...] = ()) -> Iterator[Sparse]:
    """The cells of each unit's words."""
    units = _units(plan, held)
    while part := list(itertools.islice(units, _AT_ONCE)):
        words = list(set().union(*part))
        places = {word: at for at, word in enumerate(words)}
        cells = cells_of(words, question_of(plan).buckets)
        for unit in part:
            mine = np.unique(cells[[places[word] for word in unit]])
            mine = mine[mine >= 0]
            yield Sparse(mine, weights_of(mine, question_of(plan).buckets))


def _units(plan: Plan, held: Held) -> Iterator[set[bytes]]:
    """The words that count of each unit that has any."""
    question, owners = question_of(plan), dict[bytes, set[bytes]]()
    if plan.privacy.unit == "site":
        yield from filter(
            None, [_most_frequent(question, (record for _, record in owned_records(plan, held)))]
        )
        return
    for owner, record in owned_records(plan, held):
        if plan.privacy.unit == "owner":
            owners[owner] = _words_of(record, question, owner, owners.get(owner, set()))
        elif words := _words_of(record, question, None, set()):
            yield words
    yield from filter(None, owners.values())


def _most_frequent(question: QuestionSection, records: Iterable[Record]) -> set[bytes]:
    """The words of a site that count: those of most of its records."""
    counts = Counter[bytes]()
    for record in records:
        counts.update(_words_of(record, question, None, set(), _MOST_WORDS))
        if len(counts) > 2 * _MOST_KNOWN:
            counts = Counter(dict(counts.most_common(_MOST_KNOWN)))
    return set(heapq.nsmallest(question.words, counts, key=lambda word: (-counts[word], word)))


def split(text: str, ngram: int) -> set[bytes]:
    """The different words of a text that count, in UTF-8.

    Args:
        text: The text.
        ngram: 0, or the characters of each word, which then overlap.
    """
    if ngram:
        runs = text.split()
        found = {run[at : at + ngram] for run in runs for at in range(len(run) - ngram + 1)}
    else:
        found = {text[begin:end] for _, (begin, end) in _SPLIT.pre_tokenize_str(text)}
    words = {word.encode() for word in found}
    return {word for word in words if 0 < len(word) <= LONGEST and 0 not in word}


def _words_of(
    record: Record, question: QuestionSection, unit: bytes | None, words: set[bytes], most: int = 0
) -> set[bytes]:
    """The words of a unit that count, with those of a further record.

    Args:
        record: The record.
        question: The question.
        unit: By which words are drawn; None: by the text, so that it differs between texts.
        words: Those of the records before.
        most: How many count at most; 0: as many as of a unit.
    """
    try:
        text = record.get(question.field)
        if isinstance(text, str):
            drawn = text.encode(errors="surrogatepass") if unit is None else unit
            # Part by part, so that a long text needs no more memory.
            for begin in range(0, min(len(text), _MOST_TEXT), _PART):
                found = split(text[begin : begin + _PART], question.ngram)
                words = _drawn(words | found, most or question.words, drawn)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a tokenizer too: each would reveal that the record is there
        _log.warning("words of a record do not count, which must stay at this site: %s", error)
    return words


def _drawn(words: set[bytes], most: int, unit: bytes) -> set[bytes]:
    """The words of a unit that count. What is drawn of a part of them and the rest is drawn of all together."""
    if len(words) <= most:
        return words
    key = blake2b(unit, digest_size=32).digest()
    return set(heapq.nsmallest(most, words, key=lambda word: blake2b(word, key=key, digest_size=16).digest()))
