"""`cloister up --transport flower`: Flower's own messages carry a whole deployment, to the weights of a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloister.tests.tools.command import found


def test_flowers_own_messages_carry_a_run(
    small_plan: Path, whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    outcome = found(capsys, "up", str(small_plan), "--out", out, "--transport", "flower")
    assert outcome["params_sha256"] == whole["params_sha256"]
