"""Sentences in a template, each under the condition that says where it belongs: how a module gets them as lines.

A template has macros. A macro says paragraphs, which blank lines divide, and whose lines may break anywhere.
"""

from __future__ import annotations

import re
from functools import cached_property
from importlib import resources
from typing import Any

import jinja2

_KEPT, _GIVEN_BACK = str.maketrans(" \n", "\ue000\ue001"), str.maketrans("\ue000\ue001", " \n")
"""White space of a value that a sentence quotes has stand-ins while the lines of a paragraph are joined."""


class Prose:
    """The macros of a template.

    Args:
        package: The package in whose folder the template is.
        file: The template's name.
        known: What its macros know beside what they are given, by name. A value that a party chose is given to the
            filter `exact`, which keeps its white space.
    """

    def __init__(self, package: str, file: str, **known: object) -> None:
        self._package = package
        self._file = file
        self._known = known

    def said(self, macro: str, *about: object) -> tuple[str, ...]:
        """The paragraphs of a macro, each in one line."""
        paragraphs = re.split(r"\n\s*\n", getattr(self._macros, macro)(*about))
        lines = (re.sub(r"[ \n]+", " ", paragraph).strip() for paragraph in paragraphs)
        return tuple(line.translate(_GIVEN_BACK) for line in lines if line)

    def line(self, macro: str, *about: object) -> str:
        """All that a macro says, in one line."""
        return " ".join(self.said(macro, *about))

    @cached_property
    def _macros(self) -> Any:
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters |= {"repr": repr, "exact": lambda value: value.translate(_KEPT)}
        environment.globals |= self._known
        source = resources.files(self._package).joinpath(self._file).read_text(encoding="utf-8")
        return environment.from_string(source).module
