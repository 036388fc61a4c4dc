"""Entities in tagged words, and their precision, recall and F1, as seqeval 1.2.2 counts them by default.

The tag O is 0, and the type k has the tags B-k, 1 + 2 k, and I-k, 2 + 2 k. A word begins an entity if its tag is a B,
or an I after O, after another type or at the beginning of its text; the entity ends before the next word that is O or
begins one. So an I without its B counts as an entity (the default of seqeval, not its strict mode). An entity is right
if the other tags have one of the same type with the same first and last word. With the sums over all texts

    precision = right / given,    recall = right / true,    F1 = 2 right / (given + true)

and 0 where a denominator is 0. Each figure is a function of exact sums; means of the sites' figures would be others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cloister.lm.measures.confusion import ClassFigures, share
from cloister.lm.text.sequences import NOT_LEARNED

if TYPE_CHECKING:  # it takes seconds to import
    import torch

ENTITIES = "entities"
"""The name of the counts beside the figures of an evaluation: (right, given, true) for each type."""
_COUNTED = ("right", "given", "true")


def tags_of(types: Sequence[str]) -> tuple[str, ...]:
    """The tags of types of entities, in the order of their numbers."""
    return ("O", *(f"{place}-{each}" for each in types for place in "BI"))


@dataclass(frozen=True)
class Entities:
    """Numbers of entities of C types."""

    counts: tuple[tuple[int, int, int], ...]
    """(C, 3): entities that the model gives and that are true, that it gives, and that are true."""

    @staticmethod
    def names(size: int) -> tuple[str, ...]:
        """The names of the counters of so many types, those of a type one after the other."""
        return tuple(f"entities of type {kind}, {what}" for kind in range(size) for what in _COUNTED)

    @classmethod
    def counted(cls, counts: Mapping[str, int], size: int) -> Entities:
        """The numbers by the names of their counters."""
        each = iter([counts.get(name, 0) for name in cls.names(size)])
        return cls(tuple(zip(each, each, each, strict=True)))

    def by_class(self) -> list[ClassFigures]:
        """The figures of each type, in their order."""
        return [
            ClassFigures(share(right, given), share(right, true), share(2 * right, given + true), true)
            for right, given, true in self.counts
        ]

    def micro(self) -> ClassFigures:
        """The figures of all types together."""
        right, given, true = (sum(each) for each in zip(*self.counts, strict=True))
        return Entities(((right, given, true),)).by_class()[0]

    def figures(self) -> dict[str, Any]:
        """The figures of all types together, and the counts, by their names in `figures.py`."""
        micro = self.micro()
        named = {"entity_precision": micro.precision, "entity_recall": micro.recall, "entity_f1": micro.f1}
        return named | {ENTITIES: self.counts}

    def to_json(self, types: Sequence[str]) -> dict[str, Any]:
        """The figures of all types together and of each, for a program.

        Args:
            types: Their names.
        """
        each = zip(types, self.counts, self.by_class(), strict=True)
        return {
            "types": list(types),
            "micro": asdict(self.micro()),
            "by_type": [
                {"type": name, **dict(zip(_COUNTED, counts, strict=True)), **asdict(figures)}
                for name, counts, figures in each
            ],
        }


def count(given: torch.Tensor, true: torch.Tensor, size: int) -> torch.Tensor:
    """Count the entities of rows of tags.

    Args:
        given: (B, T) int64, the model's tags.
        true: (B, T) int64, the tags of the words, in their order, -100 at tokens that are no word's first one.
        size: C, the number of types.

    Returns:
        (3 C,) int64, in the order of `Entities.names`.
    """
    import torch

    words = true != NOT_LEARNED
    rows = words.nonzero()[:, 0]
    spans = [spans_of(tags[words], rows) for tags in (given, true)]
    found = torch.zeros(size, 3, dtype=torch.int64, device=true.device)
    (first, last, kind), (true_first, true_last, true_kind) = spans
    ends = torch.full((len(rows),), -1, dtype=torch.int64, device=true.device)
    kinds = ends.clone()
    ends[true_first], kinds[true_first] = true_last, true_kind
    right = (ends[first] == last) & (kinds[first] == kind)
    for column, each in enumerate((kind[right], kind, true_kind)):
        found[:, column] = each.bincount(minlength=size)
    return found.flatten()


def spans_of(tags: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The entities of words (W,) with their rows: first words, last words and types, (E,) each, in order."""
    import torch

    edge = torch.ones(1, dtype=torch.bool, device=tags.device)
    new_row = torch.cat([edge, rows[1:] != rows[:-1]]) if len(rows) else edge[:0]
    kinds = (tags - 1).div(2, rounding_mode="floor")  # -1 of O
    other_kind = torch.cat([edge, kinds[1:] != kinds[:-1]]) if len(rows) else edge[:0]
    inside = tags > 0
    begins = inside & ((tags % 2 == 1) | other_kind | new_row)
    stops = torch.cat([(~inside | begins)[1:], edge]) if len(rows) else edge[:0]
    first, last = begins.nonzero()[:, 0], (inside & stops).nonzero()[:, 0]
    return first, last, kinds[first]
