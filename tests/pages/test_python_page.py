"""`docs/python.md`: its blocks are run, word for word, in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cloister.protocol.identity.address import free_port
from cloister.tests.tools.command import done

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("unsynced")
def test_every_block_of_the_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    port, program, kinds = str(free_port()), dict[str, Any](), set[str]()
    for kind, block in BLOCKS:
        block = block.replace("7443", port)
        kinds.add(kind)
        match kind:
            case "python":
                exec(compile(block, "docs/python.md", "exec"), program)
            case "toml":
                Path("rehearsal.toml").write_text(block, encoding="utf-8")
            case "sh":
                done(capsys, *shlex.split(block)[1:])
    assert kinds == {"python", "toml", "sh"}
    assert program["run"].outcome.rounds == 2
    assert 0 < program["guarded"].epsilon <= 4
    assert Path("runs/private/report.html").exists()
    assert not program["serving"].is_alive()
