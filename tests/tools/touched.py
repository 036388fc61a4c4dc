"""The product's files and functions that run in a block: how much a reader of it has to open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

from cloister.tests.test_imports import ROOT


@dataclass
class Touched:
    """What has run in this thread."""

    code: set[CodeType] = field(default_factory=set)

    @property
    def functions(self) -> set[tuple[str, str]]:
        """File, relative to the tree, and qualified name of each function but those of tests."""
        root = ROOT.resolve()
        paths = {code: Path(code.co_filename).resolve() for code in self.code if code.co_filename[0] != "<"}
        return {
            (str(path.relative_to(root)), code.co_qualname)
            for code, path in paths.items()
            if path.is_relative_to(root) and not path.is_relative_to(root / "tests")
        }

    @property
    def files(self) -> set[str]:
        """The files of these functions."""
        return {file for file, _ in self.functions}


@contextmanager
def touched() -> Iterator[Touched]:
    """Note each call in the block."""
    found = Touched()

    def called(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            found.code.add(frame.f_code)

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)
