"""Rosters from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest

from cloister.cli.main import main
from cloister.protocol.document import to_base64
from cloister.protocol.errors import RosterError
from cloister.protocol.roster import Card, Roster, new_identity, save_roster
from cloister.tests.command import done, found, lone_refusal

ROSTER = Roster.of(Card.of(name, new_identity()) for name in ("c-lab", "a-hospital", "b.bank"))


@pytest.fixture
def roster(tmp_path: Path) -> Path:
    path = tmp_path / "roster.toml"
    save_roster(ROSTER, path)
    return path


def test_a_roster_is_shown_and_verified(roster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, "roster", "show", str(roster))
    assert answer["hash"] == ROSTER.hash.hex()
    assert answer["sites"] == [{"name": card.name, "key": to_base64(card.public)} for card in ROSTER.cards]
    assert done(capsys, "roster", "hash", str(roster)) == answer["hash"] + "\n"
    assert found(capsys, "roster", "verify", str(roster), "--hash", answer["hash"].upper()) == answer
    shown = done(capsys, "roster", "show", str(roster))
    for site in answer["sites"]:
        assert f"{site['name']:<10}  {site['key']}\n" in shown
    assert shown.endswith(f"hash {answer['hash']}\n")
    assert "3 sites" in done(capsys, "roster", "verify", str(roster), "--hash", answer["hash"])


def test_wrong_rosters_are_refused(tmp_path: Path, roster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = ROSTER.hash.hex()
    assert right in lone_refusal(capsys, "roster", "verify", str(roster), "--hash", "0" * 64)
    for wrong in ("", right[:-1], right + "0", "x" * 64):
        assert "--hash" in lone_refusal(capsys, "roster", "verify", str(roster), "--hash", wrong)
    bad = tmp_path / "bad.toml"
    text = roster.read_text()
    for content in ("", "hash", text.replace("b.bank", "b.banc"), text.replace(right, "0" * 64), text * 2):
        bad.write_text(content)
        for action in (["show"], ["hash"], ["verify", "--hash", right]):
            lone_refusal(capsys, "roster", *action, str(bad))
    assert "missing" in lone_refusal(capsys, "roster", "show", str(tmp_path / "missing"))
    with pytest.raises(RosterError):
        main(["--traceback", "roster", "show", str(tmp_path / "missing")])


def test_help_needs_no_cryptography() -> None:
    code = (
        "import sys\nfrom cloister.cli.main import main\ntry:\n    main(['coordinator', 'approve', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name in ('cryptography', 'torch', 'numpy', 'pydantic')])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--out" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "[]"
