"""What a question asks at a site: its records -> the vectors of its units (`protocol/questions/` has the cells).

The vector of a unit is a function of that unit alone. No record raises, because a failure would be seen: one that
cannot be read, or on which the model fails, counts as zeros or as `other`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cloister.lm.data.prepare import Prepared
from cloister.lm.model.model import LanguageModel
from cloister.lm.text.records import Record, Unusable, owner_of
from cloister.protocol.plan.plan import Plan
from cloister.protocol.questions.vectors import Sparse, Vectors

_log = logging.getLogger(__name__)

AT_ONCE = 2**20
"""Numbers of vectors that are made before they are summed."""


@dataclass(frozen=True)
class Held:
    """What a site has for a question."""

    records: Callable[[Unusable], Iterator[Record]]
    """Reads its records, one by one."""
    prepared: Callable[[], Prepared]
    """Its records as sequences, with those that are held out."""
    device: torch.device
    """Where models are evaluated."""


Question = Callable[[Plan, Held, tuple[LanguageModel, ...]], Iterator[Vectors | Sparse]]
"""From what a site has to the vectors of its units; the models are those that are asked about."""


def by_unit(plan: Plan, vectors: Iterable[tuple[bytes, Vectors]]) -> Iterator[Vectors]:
    """The vectors of units from those of records.

    Args:
        plan: The question.
        vectors: For each record its owner, which is empty without unit `owner`, and its vector (K,).

    Returns:
        Rows (U, K): of each record; or the mean over the records of each owner, or over all of them with unit `site`.
    """
    if plan.privacy.unit != "record":
        owned: dict[bytes, tuple[Vectors, int]] = {}
        for owner, vector in vectors:
            total, count = owned.get(owner, (np.zeros_like(vector), 0))
            owned[owner] = total + vector, count + 1
        yield from _stacked(total / count for total, count in owned.values())
    else:
        yield from _stacked(vector for _, vector in vectors)


def owned_records(plan: Plan, held: Held) -> Iterator[tuple[bytes, Record]]:
    """The records that can be read, each with its owner; without an owner a record is not used."""
    unusable, field = Unusable(), plan.data.owner if plan.privacy.unit == "owner" else ""
    for record in held.records(unusable):
        owner = unusable.tried("without an owner", owner_of, record, field) if field else b""
        if owner is not None:
            yield owner, record


def of_records(
    plan: Plan, held: Held, make: Callable[[Record], Vectors], otherwise: Vectors
) -> Iterator[tuple[bytes, Vectors]]:
    """The vector of each record, with its owner.

    Args:
        plan: The question.
        held: What the site has.
        make: Makes a vector.
        otherwise: The vector of a record for which it raises, which would tell that the record is there.
    """
    for owner, record in owned_records(plan, held):
        try:
            vector = make(record)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of any type, and each would reveal that the record is there
            _log.warning("a record counts as none of the cells, which must stay at this site: %s", error)
            vector = otherwise
        yield owner, vector


def _stacked(vectors: Iterable[Vectors]) -> Iterator[Vectors]:
    part: list[Vectors] = []
    for vector in vectors:
        part.append(vector)
        if len(part) * vector.size >= AT_ONCE:
            yield np.stack(part)
            part = []
    if part:
        yield np.stack(part)
