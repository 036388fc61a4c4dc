"""Words without a list: what a unit adds to the tables, and which words are read from them."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from cloister.lm.questions.registry import asked_by
from cloister.lm.questions.vocabulary import split
from cloister.protocol.plan.soundness import Plan
from cloister.protocol.questions.registry import kind_of
from cloister.protocol.questions.vectors import Sparse
from cloister.protocol.questions.vocabulary import OF_WORD, ROWS, _longer
from cloister.tests.lm.questions.test_questions_at_a_site import OWNERS, PRIVATE, held, question

WORDS = 'kind = "vocabulary"\nfield = "text"\nwords = {}\nbuckets = 16384\n'


def units(plan: Plan, records: list[Any]) -> list[Sparse]:
    made = list(asked_by(plan)(plan, held(records), ()))
    assert all(isinstance(each, Sparse) for each in made)
    return [each for each in made if isinstance(each, Sparse)]


def totals(plan: Plan, records: list[Any]) -> np.typing.NDArray[np.float64]:
    total = np.zeros(kind_of(plan).count(plan))
    for unit in units(plan, records):
        total[unit.at] += unit.values
    return total


def texts(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Each has about 20 of 300 words, some of them far more often than others."""
    draw = random.Random(seed)
    syllables = [one + two for one in "bdfgklmnprstwzß" for two in "aeiouäö"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 5))) for _ in range(300)]
    chances = [1 / (1 + at) for at in range(300)]
    return [{"text": " ".join(draw.choices(words, chances, k=20))} for _ in range(count)]


@pytest.mark.parametrize("words", [4, 64])
def test_no_unit_is_longer_than_the_bound(words: int) -> None:
    """Whatever its text is: many words, words with one prefix, long ones, none."""
    plan = question(WORDS.format(words), PRIVATE)
    odd = [
        " ".join(f"{at:05}{at * 7919:05}" for at in range(500)),
        "aaaaaaaaaaaaaaaa" * 9,
        "",
        "\0",
        "x" * 10**6,
    ]
    records = texts(50) + [{"text": text} for text in odd] + [{"text": 7}, {}, {"text": "\ud800"}]
    made = units(plan, records)
    kind = kind_of(plan)
    for unit in made:
        assert (np.diff(unit.at) > 0).all()
        assert len(unit.at) <= kind.touched(plan)
        assert 0 <= unit.at[0] <= unit.at[-1] < kind.count(plan)
        assert np.linalg.norm(unit.values) <= kind.bound(plan)
        assert (unit.values == OF_WORD).sum() <= words * ROWS  # cells of words
    assert max(float(np.linalg.norm(unit.values)) for unit in made) > 0.8 * kind.bound(plan) or words > 4


def test_words_that_are_frequent_are_read_with_their_units() -> None:
    plan, records, deviation = question(WORDS.format(64)), texts(4000), 12.0
    exact = Counter(word.decode() for record in records for word in split(record["text"], 0))
    noise = np.random.default_rng(1).normal(0, deviation, kind_of(plan).count(plan))
    figures = kind_of(plan).figures(plan, totals(plan, records) + noise, deviation)
    told = {each.name: each.value or 0.0 for each in figures}
    needed = dict(kind_of(plan).expected(plan, deviation, 4000))[
        "fewest units of a word that is found, about"
    ]
    clear = {word for word, count in exact.items() if count > 1.6 * needed and len(word.encode()) <= 16}
    assert len(clear) > 50
    assert len(clear - told.keys()) <= len(clear) / 50
    assert len(told.keys() - exact.keys()) <= 3
    off = [told[word] - exact[word] for word in told if word in exact]
    assert np.std(off) < 1.3 * deviation
    assert [each.value for each in figures] == sorted(told.values(), reverse=True)


def test_noise_alone_has_no_words() -> None:
    plan = question(WORDS.format(64))
    noise = np.random.default_rng(2).normal(0, 5.0, kind_of(plan).count(plan))
    assert len(kind_of(plan).figures(plan, noise, 5.0)) <= 2


def test_an_owner_has_as_many_words_as_a_record() -> None:
    """Drawn from all of its texts, in whatever order they come."""
    plan = question(WORDS.format(8), OWNERS)
    records = [{"text": record["text"], "patient": at % 3} for at, record in enumerate(texts(60))]
    made = units(plan, records)
    again = units(plan, records[::-1])
    assert len(made) == 3
    assert {unit.at.tobytes() for unit in made} == {unit.at.tobytes() for unit in again}
    assert all(
        8 * ROWS - 2 <= (unit.values == OF_WORD).sum() <= 8 * ROWS for unit in made
    )  # two may share a cell


def test_which_words_of_a_text_count_differs_between_texts() -> None:
    """Otherwise a frequent word might count of no text."""
    plan, common = question(WORDS.format(4)), [f" word{chr(97 + at)}" for at in range(12)]
    records = [{"text": "".join(common) + f" {at}"} for at in range(600)]
    total = totals(plan, records)
    counts = total[-16384:][total[-16384:] > 100] / OF_WORD
    assert len(counts) == 12
    assert all(abs(count - 600 * 4 / 13) < 5 * math.sqrt(600 * 4 / 13) for count in counts)


def test_words_are_those_of_a_tokenizer_or_runs_of_characters() -> None:
    assert split("it's a  test\n", 0) == {b"it", b"'s", b" a", b" ", b" test", b"\n"}
    assert split("über uns", 2) == {"üb".encode(), b"be", b"er", b"un", b"ns"}
    assert split("東京都", 2) == {"東京".encode(), "京都".encode()}
    assert split("x" * 17 + " " + "y" * 15, 0) == {b" " + b"y" * 15}


def test_a_lying_site_does_not_make_the_reading_endless() -> None:
    """Whatever it puts into the tables: at most so many prefixes are tried, in memory that does not grow with them."""
    plan, draw = question(WORDS.format(64)), np.random.default_rng(3)
    count = kind_of(plan).count(plan)
    lied = np.where(draw.random(count) < 0.5, 1e6, 0.0)
    assert len(kind_of(plan).figures(plan, lied, 5.0)) < 2**21
    every = np.stack(np.divmod(np.arange(2**14), 256), axis=1).astype(np.uint8) + np.uint8(1)
    for more in (1, 2):
        tried = _longer(every, more, np.ones((256, 256), bool))
        assert 0 < len(tried) <= 2**20 + 2**21
        assert tried.shape[1] == 2 + more
