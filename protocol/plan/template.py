"""Every field of a plan with its meaning: a plan as TOML to edit, and the page `docs/plan.md`.

Both are written from the sections of `protocol/plan/plan.py`: their docstrings, types and defaults. Nothing is said
twice.

`python -m cloister.protocol.plan.template` prints the page.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cloister.protocol.plan.pairs import to_table
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.settings import InWords, Only

_WIDTH = 110
_HEAD = """# The fields of a plan

A plan is one TOML file with the sections below. `cloister plan new` prints one with every field and its meaning;
`cloister plan check` prints how a plan will run. Unknown fields, wrong types and combinations that contradict each
other are refused, with the fix. A section or field that is left out has its default; "not set" is a field without a
value. An override (`--set`) drops the fields of the file that it leaves without effect. Fields that protect, or
that name a charge or a mask, are refused instead, and the error says what to change. They are those of `[privacy]`,
`data.owner`, `aggregation.cipher`, the ledger over runs and the bound of the gate, and values that no unit allows.

This page is made from `protocol/plan/plan.py` by `make docs`.
"""
_KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
_LIMITS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
}


def to_toml(settings: BaseModel, *, comments: bool) -> str:
    """A plan, or other settings, as TOML, from which equal ones are read back.

    Args:
        settings: The plan.
        comments: Write the meaning of each field before it, and fields without a value as comments.
    """
    return "\n".join(_section(settings, (), "", comments)).strip() + "\n"


def to_page() -> str:
    """The page of all fields, as Markdown."""
    parts = [_HEAD]
    for path, section, holder in _sections(Plan, ()):
        parts.append(f"## `[{'.'.join(path)}]`\n\n{_filled(_meaning(section, holder))}\n")
        schema = section.model_json_schema()
        for name, field in section.model_fields.items():
            if _inner(field) is None:
                said = f"**`{name}`** ({_kind(schema, name, field)}): {_told(field)}"
                parts.append(_filled(said, first="- ", rest="  "))
        if parts[-1].startswith("- "):
            parts[-1] += "\n"
    parts.append(f"\n## Features that go together\n\n{to_table()}")
    return "\n".join(parts).rstrip() + "\n"


def _inner(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, or holds several of; None: it holds a value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _sections(
    section: type[BaseModel], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], type[BaseModel], FieldInfo]]:
    """The sections below a section, with their paths and the fields that hold them."""
    for name, field in section.model_fields.items():
        inner = _inner(field)
        if inner is not None:
            yield (*path, name), inner, field
            yield from _sections(inner, (*path, name))


def _section(section: BaseModel, path: tuple[str, ...], header: str, comments: bool) -> Iterator[str]:
    """The lines of a section: its values, then its mappings and the sections below it, as TOML demands."""
    if header:
        yield header
    fields = type(section).model_fields
    below = []
    for name, field in fields.items():
        value = getattr(section, name)
        if _inner(field) is not None or isinstance(value, Mapping):
            below.append(name)
            continue
        if comments:
            yield _comment(_told(field))
        if value is not None:
            yield f"{name} = {_value(value)}"
        elif comments:
            yield f"# {name} ="
    for name in below:
        field, value, inner = fields[name], getattr(section, name), _inner(fields[name])
        table = (*path, name)
        several = isinstance(value, tuple)
        if comments:
            yield ""
            yield _comment(_told(field) if inner is None else _meaning(inner, field))
        if inner is not None and not value:
            yield from _unset(inner, table, several) if comments else ()
        elif isinstance(value, Mapping):
            yield f"[{'.'.join(table)}]"
            yield from (f"{json.dumps(key)} = {_value(each)}" for key, each in value.items())
        elif several:
            for each in value:
                yield from _section(each, table, f"[[{'.'.join(table)}]]", comments)
        else:
            yield from _section(value, table, f"[{'.'.join(table)}]", comments)


def _unset(section: type[BaseModel], path: tuple[str, ...], several: bool) -> Iterator[str]:
    """A section without a value, as comments."""
    yield f"# [[{'.'.join(path)}]]" if several else f"# [{'.'.join(path)}]"
    for name, field in section.model_fields.items():
        inner = _inner(field)
        if inner is None:
            yield _filled(f"{name}: {_told(field)}", "#   ", "#     ")
        else:
            yield from _unset(inner, (*path, name), several=False)


def _value(value: Any) -> str:
    """A value as TOML, which has JSON's strings, numbers and lists; but JSON allows the character DEL in a string."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _meaning(section: type[BaseModel], field: FieldInfo) -> str:
    """What a section is: its docstring, and where it may be absent the sentence of the field that holds it."""
    return _said(section.__doc__) + ("" if field.get_default() else f" {_told(field)}")


def _told(field: FieldInfo) -> str:
    """What a field means, and with which values of other fields it is valid."""
    tags = [each for each in field.metadata if isinstance(each, Only)]
    whole = " and ".join(f"`{each.words}`" for each in tags if not each.when)
    some = [
        f"{' or '.join(f'`{json.dumps(value)}`' for value in each.when)} only with `{each.words}`."
        for each in tags
        if each.when
    ]
    return " ".join([_said(field.description), *([f"Only with {whole}."] if whole else ()), *some])


def _said(text: str | None) -> str:
    """A docstring in one line, in the words of a file: it has no None."""
    said = " ".join((text or "").split())
    return re.sub(r"(?<=\. )None:", "Not set:", said).replace("None:", "not set:")


def _filled(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _comment(text: str | None) -> str:
    return _filled(_said(text), "# ", "# ")


def _kind(schema: Mapping[str, Any], name: str, field: FieldInfo) -> str:
    """The type, limits and default of a field, in words."""
    known = schema["properties"][name]
    known |= next((each for each in known.get("anyOf", ()) if each.get("type") != "null"), {})
    if "enum" in known:
        kind = " or ".join(f"`{json.dumps(each)}`" for each in known["enum"])
    elif known.get("type") == "array":
        kind = "list"
    elif known.get("type") == "object":
        kind = "table"
    else:
        words = (each.expected for each in field.metadata if isinstance(each, InWords))
        kind = next(words, _KINDS[known["type"]])
    limits = [f"{word} {known[limit]:,}" for limit, word in _LIMITS.items() if limit in known]
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "not set" if value is None else f"default `{_value(value)}`"
    return "; ".join([", ".join([kind, *limits]), default])


if __name__ == "__main__":
    print(to_page(), end="")
