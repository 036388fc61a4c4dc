"""Records that a Python program gives to a simulation: for each site, and public ones.

They are read once, into memory. Those of a site go to its folder in the run folder, the public ones to `given/`, so a
run goes on without the objects. In place of a source the plan has `given:` and, of public records, their SHA-256, in
the order and the form in which they are written. Of the sites' records it has a name drawn for the run: plan and report
go to others, and a hash without a key tells those who know all records but one what that one is.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloister.lm.tasks.registry import task_of
from cloister.lm.text.corpus import corpus_records, given_records
from cloister.lm.text.examples import present
from cloister.lm.text.records import Record, Records, read_records
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import AT_SITES, GIVEN, NO_EVALUATION, SIMULATED_PUBLIC, DataSection
from cloister.protocol.plan.plan import Plan as Contract
from cloister.protocol.plan.soundness import Plan, changed
from cloister.server.record.folder import RunFiles
from cloister.simulations.partition import line_of, write_records

_PUBLIC = {"public": "public.source", "evaluation": "server.evaluation"}
"""The field of the plan for each kind of public records."""


@dataclass(frozen=True)
class Given:
    """Records that were given, and the plan that names them."""

    plan: Plan
    sites: Mapping[str, Records]
    """The records of each site, by its name; empty: the plan's own source is divided over the sites."""
    public: Mapping[str, Records]
    """Public records that were given as objects, by the field of the plan."""

    @classmethod
    def of(cls, plan: Contract, sites: Mapping[str, Any] | None, **public: Any) -> Given:
        """Read what was given, and name it in the plan.

        Args:
            plan: The plan.
            sites: Records by the name of the site, as `given_records` reads them; None: the plan's own source.
            public: `public` and `evaluation`: a source as the plan names it, or records; None: the plan's own.

        Raises:
            DataError: they cannot be read.
            PlanError: the plan is not sound with them.
        """
        changes: dict[str, Any] = {}
        objects: dict[str, Records] = {}
        for kind, field in _PUBLIC.items():
            value = public.get(kind)
            if isinstance(value, str | Path):
                changes[field] = str(Path(value).absolute()) if Path(value).exists() else str(value)
            elif value is not None:
                objects[field] = given_records(value, kind)
                changes[field] = GIVEN + _digest(objects[field])
        read: dict[str, Records] = {}
        if sites is not None:
            read = {name: given_records(sites[name], f"sites[{name!r}]") for name in sorted(sites)}
            _check_columns(plan, sites, read)
            changes |= {"cohort.sites": len(read), "simulation.sites": list(read)}
            changes["simulation.source"] = GIVEN + secrets.token_hex(16)
        return cls(changed(plan, changes), read, objects)

    @property
    def any(self) -> bool:
        """Whether there are objects, which a run that goes on would not have."""
        return bool(self.sites or self.public)

    def write_public(self, files: RunFiles) -> None:
        """Write the public records to a run folder."""
        for field, records in self.public.items():
            source = {
                "public.source": self.plan.public.source,
                "server.evaluation": self.plan.server.evaluation,
            }
            path = Path(files.place(source[field]))
            path.parent.mkdir(exist_ok=True)
            write_records(path, records)


def _check_columns(plan: Contract, sites: Mapping[str, Any], read: Mapping[str, Records]) -> None:
    """Refuse a table whose owners or labels are fractional: one missing value makes all of a column so.

    Raises:
        DataError: there is one. Its records could not be used, and one record would have decided that.
    """
    fields = [plan.data.owner, plan.data.label_field if plan.data.kind.single else ""]
    if plan.question is not None and plan.question.values:
        fields.append(plan.question.field)
    for name, records in read.items():
        if isinstance(sites[name], str | Path | list | tuple):
            continue
        for field in filter(None, fields):
            if any(isinstance(record.get(field), float) for record in records):
                raise DataError(
                    f"sites[{name!r}], column {field}",
                    "fractional numbers",
                    expected="texts or whole numbers; one missing value makes a whole column fractional",
                    fix="convert the column to texts, or give a list of dictionaries",
                )


def _digest(records: Records) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(f"{line_of(record)}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()


def check_apart(plan: Contract, given: Given, theirs: Iterable[Record]) -> None:
    """Check that no record that a plan with a privacy unit names as public is one of its sites.

    Two records are equal if what the plan or its public training learns from is, as one text without white space:
    texts, words, prompts with completions, or contents of messages. A public record that is a part of a site's, or says
    the same in other words, is not found.

    Args:
        plan: The plan.
        given: What was given.
        theirs: The records of the sites.

    Raises:
        DataError: there is one: training or evaluation on it would be a release without a charge.
    """
    if plan.privacy.unit == "none":
        return
    known = _contents(theirs, plan.data)
    evaluation = plan.server.evaluation
    sources = {
        "public.source": (plan.public.source, plan.public.split),
        "server.evaluation": (evaluation, "train"),
    }
    for field, (source, split) in sources.items():
        if source in ("", AT_SITES, NO_EVALUATION, SIMULATED_PUBLIC):
            continue
        records = given.public.get(field) or corpus_records(source, field=field, split=split).records
        _check(records, known, plan.data, field)


def check_other(plan: Contract, files: RunFiles, text: str, field: str) -> None:
    """Check that a source has no record that a site of a run was given; the rest as `check_apart`.

    Args:
        plan: The plan of the run.
        files: Its folder.
        text: The source.
        field: The option that named it.
    """
    sites = [str(files.sites.site(name) / "data.jsonl") for name in plan.simulation.sites]
    known = _contents((record for path in sites for record in read_records(path)), plan.data)
    if known:
        _check(corpus_records(text, field=field).records, known, plan.data, field)


def _check(records: Iterable[Record], known: Set[str], data: DataSection, field: str) -> None:
    for number, record in enumerate(records, 1):
        if not known.isdisjoint(_contents([record], data)):
            raise DataError(
                field,
                expected=f"public records, and record {number} is also one of a site",
                fix="give other records; server.evaluation may be simulation:public, which no site has",
            )


def _contents(records: Iterable[Record], data: DataSection) -> Set[str]:
    """What a plan, and its public training, learns from in each record that has some of it."""
    tasks = task_of(data), task_of(task_of(data).in_public())
    read = [(task.data.task, task.content) for task in tasks]
    found = set()
    for record in records:
        for task, fields in read:
            learned = "".join("".join(_text(present(record.get(field))) for field in fields).split())
            if learned:
                found.add(f"{task}:{learned}")
    return found


def _text(value: Any) -> str:
    """All text in a field's value, one after the other; of a message its content."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return _text(
            value["content"] if "content" in value else [value[key] for key in sorted(value, key=str)]
        )
    if isinstance(value, list | tuple):
        return "".join(map(_text, value))
    return "" if value is None else json.dumps(value, default=str)
