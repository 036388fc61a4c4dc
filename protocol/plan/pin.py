"""The pin of a task's package in a plan's text: its version and the hash of its files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from cloister.protocol.errors import PackageError, PlanError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.settings import Settings
from cloister.protocol.plan.tasks import is_own

_TABLE = re.compile(r"^\[data\.package\][^\[]*", re.MULTILINE)


def read_text(path: Path) -> str:
    """The text of a plan; errors as `Settings.read`."""
    return Settings(Plan, "plan", PlanError).read(path)


def package_in(text: str, origin: str) -> str:
    """The package of the task that a plan's text names.

    Raises:
        PackageError: it is no TOML, or its task is not that of a package.
    """
    try:
        task = tomllib.loads(text).get("data", {}).get("task", "")
    except (tomllib.TOMLDecodeError, AttributeError) as error:
        raise PackageError("plan", origin, expected=f"TOML ({error})") from error
    if not (isinstance(task, str) and is_own(task)):
        raise PackageError(
            "data.task", task, expected="PACKAGE:NAME of an installed package: tasks of cloister need no pin"
        )
    return task.partition(":")[0]


def pinned(text: str, version: str, sha256: str) -> str:
    """A plan's text with the pin of its package; an earlier one is replaced."""
    kept = _TABLE.sub("", text).rstrip()
    return f'{kept}\n\n[data.package]\nversion = "{version}"\nsha256 = "{sha256}"\n'
