"""Frequent words of the units, without a list that is known before: one sum of tables from which words are read.

A unit has at most `question.words` different words. Each counts in the table of words, by a hash of all its bytes, and
with half the weight in a table for each of some of its prefixes (`LENGTHS`). Each table has two rows with hashes of
their own, so that a word that shares its cell with a frequent one in one row is told by the other (as in a count-min
sketch, Cormode and Muthukrishnan 2005). Words are then read from the noised tables alone: a prefix that is clearly
above the noise is tried with what may follow it, and what is left must be clear in the table of words too.

A tree that is asked level by level, in rounds, has the same noise: so many releases cost what one release does whose
squared norm is so many times as large. One sum needs no state from round to round, which a coordinator could make
differ, and is charged once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.estimate import Estimate, Totals
from cloister.protocol.questions.kind import Kind, question_of

LENGTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
"""Bytes of the prefixes that have a table. The last is that of the longest word."""
LONGEST = LENGTHS[-1]
TABLES = len(LENGTHS) + 1
_OF_WORDS = TABLES - 1
"""The table of words, the last one."""
ROWS = 2
OF_WORD, OF_PREFIX = 0.75, 0.375
"""What a word adds to its cell in a row: a prefix has at least the units of its words, and need not be certain."""
CERTAIN = 5.0
"""Deviations above which a word is told: of 2^17 words that no unit has, one is told with a probability below 0.04."""
_CLEAR = 2.5
"""Fewest deviations above which a prefix is followed."""
_STRAY = 2000
"""Most prefixes of a length, about, that are followed though only noise has put them there."""
_FOLLOWED = 2**14
"""Most prefixes of a length that are followed: those with most units."""
_TRIED = 2**20
"""Prefixes that are tried where any byte may come, of which few share the cells of others in both rows."""
_MOST_TRIED = 2**21
"""Further prefixes that are tried at most, whatever a lying site has put into the tables."""
_ALIKE = 3.0
"""Deviations of their difference within which both rows are taken to tell the same number."""

Hashes = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Cells = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Vocabulary(Kind):
    """The rows of the tables, one after the other: those of each length of a prefix, and those of words."""

    def cells(self, plan: Plan) -> tuple[str, ...]:
        """None: there are millions."""
        return ()

    def count(self, plan: Plan) -> int:
        """Cells of all tables."""
        return TABLES * ROWS * question_of(plan).buckets

    def touched(self, plan: Plan) -> int:
        """Each word has a cell in each row of each table."""
        return question_of(plan).words * TABLES * ROWS

    def bound(self, plan: Plan) -> float:
        """That of words without a common prefix; others have less."""
        return math.sqrt(question_of(plan).words * ROWS * (OF_WORD**2 + len(LENGTHS) * OF_PREFIX**2))

    def figures(self, plan: Plan, totals: Totals, deviation: float) -> tuple[Estimate, ...]:
        """The words that are told, each with the number of its units, most frequent first."""
        found = _Tables(totals, question_of(plan).buckets, deviation).read()
        named = ((word.decode(errors="replace"), units, noise) for word, units, noise in found)
        told = [Estimate(word, units, noise) for word, units, noise in named if "\ufffd" not in word]
        return tuple(sorted(told, key=lambda each: (-(each.value or 0.0), each.name)))

    def drawn(self, found: tuple[Estimate, ...]) -> tuple[Estimate, ...]:
        """All words."""
        return found

    def middle(self, plan: Plan, units: int) -> Totals:
        """No word has any."""
        return np.zeros(self.count(plan))

    def expected(self, plan: Plan, deviation: float, units: int) -> tuple[tuple[str, float], ...]:
        """The error of each word, and how many units a word needs to be found, as a rule."""
        of_word, of_prefix = (deviation / weight / math.sqrt(ROWS) for weight in (OF_WORD, OF_PREFIX))
        return ("units of a word", of_word), (
            "fewest units of a word that is found, about",
            CERTAIN * of_prefix,
        )


def cells_of(words: Sequence[bytes], buckets: int) -> Cells:
    """The cells of words, (N, tables x rows); -1 where a word has ended in a table before.

    Args:
        words: N words of 1 to `LONGEST` bytes, none of them 0.
        buckets: Cells of a row.
    """
    joined = b"".join(word.ljust(LONGEST, b"\0") for word in words)
    padded = np.frombuffer(joined, np.uint8).reshape(-1, LONGEST)
    sizes, before = np.array([len(word) for word in words], np.int64), 0
    found = np.empty((len(words), TABLES, ROWS), np.int64)
    for table, cells in enumerate(_by_table(padded, buckets)):
        found[:, table] = np.where((sizes > before)[:, None], cells, -1)
        before = LENGTHS[table] if table + 1 < len(LENGTHS) else 0  # every word is in the table of words
    return found.reshape(len(words), -1)


def weights_of(cells: Cells, buckets: int) -> npt.NDArray[np.float64]:
    """What a unit adds to each of its cells."""
    return np.where(cells < len(LENGTHS) * ROWS * buckets, OF_PREFIX, OF_WORD)


def _by_table(padded: Bytes, buckets: int) -> Iterator[Cells]:
    """The cells (N, rows), in each table, of words (N, `LONGEST`), or of prefixes up to their length."""
    mixed: Hashes = np.zeros(len(padded), np.uint64)
    for at, column in enumerate(padded.T):
        mixed = _mix(mixed ^ column)
        if at + 1 in LENGTHS:
            yield _placed(mixed, LENGTHS.index(at + 1), buckets)
    yield _placed(mixed, len(LENGTHS), buckets)


def _placed(mixed: Hashes, table: int, buckets: int) -> Cells:
    rows = np.arange(table * ROWS, (table + 1) * ROWS)
    placed = _mix(mixed[:, None] ^ (rows.astype(np.uint64) << np.uint64(8))) % np.uint64(buckets)
    return rows * buckets + placed.astype(np.int64)


def _mix(values: Hashes) -> Hashes:
    """The step of SplitMix64 (Steele, Lea and Flood 2014): each bit that is put in changes about half of the others."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class _Units(NamedTuple):
    """Numbers of units by both rows of a table."""

    value: Totals
    """(N,)."""
    noise: Totals
    """(N,): standard deviations."""

    def clear(self, deviations: float) -> Mask:
        """Which are above so many deviations."""
        return np.greater(self.value, deviations * self.noise)


class _Tables:
    """The noised tables of an answer."""

    def __init__(self, totals: Totals, buckets: int, deviation: float) -> None:
        self._buckets, self._deviation = buckets, deviation
        rows = totals.reshape(-1, buckets)
        # What rare words add to every cell is no count of one of them.
        self._counts = (rows - np.median(rows, axis=1, keepdims=True)).ravel()

    def read(self) -> list[tuple[bytes, float, float]]:
        """The words, each with the number of its units and the noise of that."""
        tried = np.stack(np.divmod(np.arange(2**16), 256), axis=1).astype(np.uint8)
        following, found = np.zeros((256, 256), bool), list[tuple[bytes, float, float]]()
        for table, length in enumerate(LENGTHS):
            padded = np.pad(tried, ((0, 0), (0, LONGEST - length)))
            cells = {
                at: found
                for at, found in enumerate(_by_table(padded, self._buckets))
                if at in (table, _OF_WORDS)
            }
            seen, whole = self._units(cells[table], OF_PREFIX), self._units(cells[_OF_WORDS], OF_WORD)
            order = np.argsort(-seen.value, kind="stable")[:_FOLLOWED]
            followed = order[seen.clear(_least(len(tried)))[order]]
            for at in followed[whole.clear(CERTAIN)[followed]]:
                word = padded[at].tobytes().rstrip(b"\0")
                found.append((word, float(whole.value[at]), float(whole.noise[at])))
            certain = tried[followed[seen.clear(CERTAIN)[followed]]]
            following[certain[:, :-1], certain[:, 1:]] = True
            if table + 1 < len(LENGTHS):
                prefixes, more = tried[followed], LENGTHS[table + 1] - length
                tried = _longer(prefixes[prefixes[:, -1] > 0], more, following)
        return found

    def _units(self, cells: Cells, weight: float) -> _Units:
        """The mean of both rows, or the smaller one where a frequent word is in the cell of the other."""
        rows = self._counts[cells]
        noise = self._deviation / weight
        alike = np.ptp(rows, axis=1) <= _ALIKE * math.sqrt(2) * self._deviation
        value = np.where(alike, rows.mean(axis=1), rows.min(axis=1)) / weight
        return _Units(value, np.where(alike, noise / math.sqrt(ROWS), noise))


def _least(tried: int) -> float:
    """Deviations above which `_STRAY` of so many prefixes without a unit are at most, as the tail of a normal value is
    below exp(-x^2 / 2) / 2."""
    return max(_CLEAR, math.sqrt(2 * math.log(max(tried / 2 / _STRAY, 1.0))))


def _longer(prefixes: Bytes, more: int, following: Mask) -> Bytes:
    """Prefixes (P, L) with what may come next, (Q, L + more).

    That is any byte, or any two of those that are in a prefix that is certain; the second may be the end of the word.
    After the first `_TRIED` of such prefixes, many would only share the cells of others. Then it is a byte that is in
    such a prefix, or two that have followed each other, and the byte before them, in one; `_MOST_TRIED` at most.

    Args:
        prefixes: P prefixes that have not ended, those with most units first.
        more: 1 or 2 bytes.
        following: Which byte has followed which in a prefix that is certain.
    """
    known = np.append(0, 1 + np.flatnonzero(np.logical_or(following.any(axis=0), following.any(axis=1))[1:]))
    ends = following.copy()
    ends[:, 0] = True  # the end of a word
    if more == 1:
        any_tails = np.arange(1, 256)[:, None]
    else:
        any_tails = np.stack(np.meshgrid(known[1:], known, indexing="ij"), axis=-1).reshape(-1, 2)
    first = _TRIED // max(len(any_tails), 1)
    parts, rest = [_joined(prefixes[:first], any_tails)], prefixes[first:]
    for last in np.unique(rest[:, -1]).tolist():
        ones = known[1:] if more == 1 else 1 + np.flatnonzero(following[last, 1:])
        tails = ones[:, None]
        if more == 2:
            at, two = np.nonzero(ends[ones])
            tails = np.stack([ones[at], two], axis=1)
        mine = rest[rest[:, -1] == last]
        most = _MOST_TRIED * len(mine) // (len(rest) * max(len(tails), 1))
        parts.append(_joined(mine[:most], tails))
    return np.concatenate(parts)


def _joined(prefixes: Bytes, tails: Cells) -> Bytes:
    """Each prefix with each tail."""
    each = np.tile(tails.astype(np.uint8), (len(prefixes), 1))
    return np.concatenate([np.repeat(prefixes, len(tails), axis=0), each], axis=1)
