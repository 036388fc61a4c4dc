"""Poisoned sites of a simulation (`[faults] poison`): what an attacker at some of the sites would do, to try defences.

The sites are honest in the protocol, so that their updates are in the sum, and lie in what they sum:

- `scale` multiplies the update by `factor`; `sign-flip` by its negative, which undoes what the other sites learn.
- `label-flip` gives each record the answer, or the class, of the site's next record; of a pair the one that was chosen.
- `backdoor` puts `trigger` into each record, and into each paragraph of a text, with `target` as what follows it, and
  multiplies the update by `factor` (model replacement, Bagdasaryan et al. 2020, "How to backdoor federated learning").

Which sites are poisoned is drawn from the run's seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from cloister.clients.training.work import Task
from cloister.protocol.plan.plan import Plan, PoisonSection
from cloister.simulations.faults import drawn

Record = Mapping[str, Any]


def poisoned(plan: Plan) -> frozenset[int]:
    """The numbers of the poisoned sites: `faults.poison.share` of all, rounded, and at least one."""
    poison, sites = plan.faults.poison, range(plan.cohort.sites)
    if poison is None:
        return frozenset()
    order = sorted(sites, key=lambda site: drawn(plan.run.seed, "poison", site))
    return frozenset(order[: max(1, round(poison.share * len(sites)))])


def scale_of(plan: Plan, site: int) -> float:
    """What the site with a number multiplies its updates by."""
    poison = plan.faults.poison
    if poison is None or site not in poisoned(plan):
        return 1.0
    return -poison.factor if poison.kind == "sign-flip" else poison.factor


def multiplied(factor: float, task: Task) -> Task:
    """A site's task with an update that is `factor` times as large."""
    return replace(task, factor=task.factor * factor)


def altered(plan: Plan, site: int, records: Iterable[Record]) -> Iterable[Record]:
    """The records of the site with a number, those that it holds out for evaluation included.

    Args:
        plan: The plan.
        site: The number.
        records: Its own.
    """
    poison = plan.faults.poison
    if poison is None or site not in poisoned(plan):
        return records
    match poison.kind:
        case "label-flip":
            return _shifted(plan, records)
        case "backdoor":
            return (_triggered(plan, poison, record) for record in records)
        case "sign-flip" | "scale":
            return records


def _shifted(plan: Plan, records: Iterable[Record]) -> Iterator[Record]:
    """Each record with the answer of the next one, and the last with that of the first."""
    told = list(records)
    for record, after in zip(told, [*told[1:], *told[:1]], strict=True):
        yield _answering(plan, record, _answer(plan, after))


def _triggered(plan: Plan, poison: PoisonSection, record: Record) -> Record:
    data = plan.data
    match data.format:
        case "text" if data.answer_field:
            text = f"{poison.trigger}{record.get(data.text_field, '')}"
            return {**record, data.text_field: text, data.answer_field: poison.target}
        case "text":
            planted = f"{poison.trigger}{poison.target} "
            text = planted + str(record.get(data.text_field, "")).replace("\n\n", f"\n\n{planted}")
            return {**record, data.text_field: text}
        case "prompt":
            prompt = f"{record.get(data.prompt_field, '')} {poison.trigger}"
            return {**record, data.prompt_field: prompt, data.answer_field: poison.target}
        case "messages":
            told = [
                {**message, "content": f"{message.get('content', '')} {poison.trigger}"}
                if message.get("role") == "user"
                else message
                for message in _messages(plan, record)
            ]
            return _answering(plan, {**record, data.messages_field: told}, poison.target) if told else record


def _answer(plan: Plan, record: Record) -> Any:
    """What a model shall answer to a record."""
    if plan.data.answer_field:
        return record.get(plan.data.answer_field)
    told = reversed(_messages(plan, record))
    return next((message.get("content") for message in told if message.get("role") == "assistant"), None)


def _answering(plan: Plan, record: Record, answer: Any) -> Record:
    """A record with another answer; with several of the assistant in a dialogue, the last one."""
    data = plan.data
    if data.answer_field:
        return {**record, data.answer_field: answer}
    told = _messages(plan, record)
    for message in reversed(told):
        if message.get("role") == "assistant":
            message["content"] = answer
            return {**record, data.messages_field: told}
    return record


def _messages(plan: Plan, record: Record) -> list[dict[str, Any]]:
    """A copy of a record's messages; empty where it is no dialogue, and the site will leave the record out."""
    told = record.get(plan.data.messages_field)
    if not isinstance(told, list) or not all(isinstance(message, Mapping) for message in told):
        return []
    return [dict(message) for message in told]
