"""A plan, or other settings, as TOML to edit: each field with its meaning, read from the docstrings of the sections.

`docs/plan.md` has the same sentences (`make docs`), so nothing is said twice.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cloister.protocol.plan.settings import Only

_WIDTH = 110


def to_toml(settings: BaseModel, *, comments: bool) -> str:
    """A plan, or other settings, as TOML, from which equal ones are read back.

    Args:
        settings: The plan.
        comments: Write the meaning of each field before it, and fields without a value as comments.
    """
    return "\n".join(_section(settings, (), "", comments)).strip() + "\n"


def inner_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, or holds several of; None: it holds a value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _section(section: BaseModel, path: tuple[str, ...], header: str, comments: bool) -> Iterator[str]:
    """The lines of a section: its values, then its mappings and the sections below it, as TOML demands."""
    if header:
        yield header
    fields = type(section).model_fields
    below = []
    for name, field in fields.items():
        value = getattr(section, name)
        if inner_of(field) is not None or isinstance(value, Mapping):
            below.append(name)
            continue
        if comments:
            yield _comment(told(field))
        if value is not None:
            yield f"{name} = {toml_value(value)}"
        elif comments:
            yield f"# {name} ="
    for name in below:
        field, value, inner = fields[name], getattr(section, name), inner_of(fields[name])
        table = (*path, name)
        several = isinstance(value, tuple)
        if comments:
            yield ""
            yield _comment(told(field) if inner is None else meaning(inner, field))
        if inner is not None and not value:
            yield from _unset(inner, table, several) if comments else ()
        elif isinstance(value, Mapping):
            yield f"[{'.'.join(table)}]"
            yield from (f"{json.dumps(key)} = {toml_value(each)}" for key, each in value.items())
        elif several:
            for each in value:
                yield from _section(each, table, f"[[{'.'.join(table)}]]", comments)
        else:
            yield from _section(value, table, f"[{'.'.join(table)}]", comments)


def _unset(section: type[BaseModel], path: tuple[str, ...], several: bool) -> Iterator[str]:
    """A section without a value, as comments."""
    yield f"# [[{'.'.join(path)}]]" if several else f"# [{'.'.join(path)}]"
    for name, field in section.model_fields.items():
        inner = inner_of(field)
        if inner is None:
            yield filled(f"{name}: {told(field)}", "#   ", "#     ")
        else:
            yield from _unset(inner, (*path, name), several=False)


def toml_value(value: Any) -> str:
    """A value as TOML, which has JSON's strings, numbers and lists.

    Characters that a terminal would act on and not show are escaped: DEL, which JSON allows in a string, is refused by
    TOML, and marks of the direction of writing would show another value.
    """
    said = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in said)


def meaning(section: type[BaseModel], field: FieldInfo) -> str:
    """What a section is: its docstring, and where it may be absent the sentence of the field that holds it."""
    return _said(section.__doc__) + ("" if field.get_default() else f" {told(field)}")


def told(field: FieldInfo) -> str:
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


def filled(text: str, first: str = "", rest: str = "") -> str:
    """A text in lines of the width of a page; `first` and `rest` go before its first line and the others."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _comment(text: str | None) -> str:
    return filled(_said(text), "# ", "# ")
