"""`docs/getting-started.md`: every command is run, word for word, in its order; its plans are then shortened."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from cloister.tests.tools.command import done

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
SHORT = {"rounds": "1", "steps": "1", "warmup_steps": "0"}

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.mark.slow
def test_every_command_of_the_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = next(block for kind, block in BLOCKS if kind == "sh" and "notes.txt" in block)
    assert shlex.split(text)[:2] == ["python", "-c"]
    exec(shlex.split(text)[2])
    Path("notes.txt").write_text(capsys.readouterr().out[:40_000], encoding="utf-8")
    (chats,) = (block for kind, block in BLOCKS if kind == "json")
    assert all(json.loads(line) for line in chats.splitlines())
    Path("chats.jsonl").write_text(chats * 8, encoding="utf-8")
    printed = {}
    for command in COMMANDS:
        words, _, file = command.partition(" > ")
        program, *arguments = shlex.split(words)
        assert program == "cloister"
        printed[command] = done(capsys, *arguments)
        if file:
            short = printed[command]
            for name, value in SHORT.items():  # the first of each name: those of [run] and [local]
                short = re.sub(rf"^{name} = \d+$", f"{name} = {value}", short, count=1, flags=re.MULTILINE)
            if "private-code" in command:
                short = short.replace("steps = 250\n", "steps = 1\n")  # of [public]
            Path(file).write_text(short, encoding="utf-8")
    assert "no privacy guarantee" in printed["cloister report runs/notes"]
    assert "A window of 128 tokens of a text." in printed["cloister report runs/private-notes"]
    (program,) = (block for kind, block in BLOCKS if kind == "python")
    capsys.readouterr()
    exec(program, {})
    assert capsys.readouterr().out.startswith("The ")


def test_the_readme_is_short_and_its_table_has_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"\(docs/([\w-]+\.md)\)", readme.partition("## Pages")[2])) == pages
