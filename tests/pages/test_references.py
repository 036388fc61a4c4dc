"""What docstrings, comments and pages name is there: files, modules, what modules have, fields of the plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from cloister.protocol.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "privacy", "lm", "aggregation", "clients", "server", "simulations", "cli")
_DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
_FILE = re.compile(r"`((?:\w+/)*\w+\.py)`")


def is_field(path: str) -> bool:
    """Whether it is a field of the plan, or a property of one of its sections."""
    section: Any = Plan
    for part in path.split("."):
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return hasattr(section, part)
        kinds = (fields[part].annotation, *get_args(fields[part].annotation))
        section = next((each for each in kinds if hasattr(each, "model_fields")), None)
    return True


def is_code(path: str) -> bool:
    """Whether it is a package, a module or a name in one."""
    at, parts = ROOT, path.split(".")
    for index, part in enumerate(parts):
        if (at / part).is_dir():
            at /= part
            continue
        file = at / f"{part}.py"
        names = parts[index + 1 :]
        return file.is_file() and all(re.search(rf"\b{name}\b", file.read_text()) for name in names)
    return True


def test_what_is_named_is_there() -> None:
    product = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    others = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    paths = {f"/{file.relative_to(ROOT)}" for file in (*product, *others)}
    missing = []
    for file in (*product, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        text = file.read_text().partition("\n## Removed, and why")[0]
        missing += [
            (file.name, name) for name in _DOTTED.findall(text) if not (is_code(name) or is_field(name))
        ]
        missing += [
            (file.name, name)
            for name in _FILE.findall(text)
            if not any(path.endswith(f"/{name}") for path in paths)
        ]
    assert missing == []


def test_what_is_not_there_is_found() -> None:
    assert is_code("protocol.messages.blocks.BLOCK")
    assert is_field("privacy.clip")
    for gone in ("protocol.blocks.BLOCK", "protocol.messages.blocks.BRICK", "privacy.clip.Gather"):
        assert not is_code(gone)
        assert not is_field(gone)
