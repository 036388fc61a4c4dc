"""What commands write into a plan's text: versions and hashes of packages, and weights of classes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister.protocol.errors import PackageError, PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.settings import Settings
from cloister.protocol.plan.tasks import is_own

_NAMES = {"data": "task", "model": "type", "local": "optimizer"}
"""The fields that may name something of a package, by section."""
_TABLE = re.compile(rf"^\[({'|'.join(_NAMES)})\.package\][^\[]*", re.MULTILINE)


def read_text(path: Path) -> str:
    """The text of a plan; errors as `Settings.read`."""
    return Settings(Plan, "plan", PlanError).read(path)


def packages_in(text: str, origin: str) -> dict[str, str]:
    """The packages that a plan's text names something of, by section.

    Raises:
        PackageError: it is no TOML, or names nothing of a package.
    """
    try:
        tree: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PackageError("plan", origin, expected=f"TOML ({error})") from error
    found = {}
    for section, field in _NAMES.items():
        fields = tree.get(section, {})
        name = fields.get(field, "") if isinstance(fields, Mapping) else ""
        if isinstance(name, str) and is_own(name):
            found[section] = name.partition(":")[0]
    if not found:
        fields = ", ".join(".".join(each) for each in _NAMES.items())
        raise PackageError(
            "plan", origin, expected=f"PACKAGE:NAME of an installed package in one of {fields}"
        )
    return found


def pinned(text: str, pins: Mapping[str, tuple[str, str]]) -> str:
    """A plan's text with the version and hash of a package for each section that names one; earlier ones go."""
    parts = [_TABLE.sub("", text).rstrip()]
    for section, (version, sha256) in pins.items():
        parts.append(f'[{section}.package]\nversion = "{version}"\nsha256 = "{sha256}"')
    return "\n\n".join(parts) + "\n"


_DATA = re.compile(r"^\[data\][^\n]*\n", re.MULTILINE)
_WEIGHTS = re.compile(r"^(class_weights|weights_answer)\s*=\s*(\[[^\]]*\]|\"[^\"]*\")[^\n]*\n", re.MULTILINE)


def weighted(text: str, weights: Mapping[str, float], answer: str) -> str:
    """A plan's text with the weights of its classes and the digest of the answer that they are from.

    Raises:
        PlanError: it has no table `[data]`.
    """
    text = _WEIGHTS.sub("", text)
    found = _DATA.search(text)
    if found is None:
        raise PlanError(
            "data", expected="a table [data] with the classes", fix="write [data] on a line of its own"
        )
    listed = ", ".join(f"{weight:g}" for weight in weights.values())
    lines = f'class_weights = [{listed}]\nweights_answer = "{answer}"\n'
    return text[: found.end()] + lines + text[found.end() :]
