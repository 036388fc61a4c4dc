"""Identities, cards and rosters from the command line."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.cli.main import main
from cloister.clients.config import read_config
from cloister.protocol.errors import StorageError
from cloister.protocol.roster import Card, load_identity, load_roster
from cloister.tests.command import done, found, lone_refusal


@pytest.fixture
def cards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Files with the cards of three sites, not in the order of their names."""
    return [
        str(found(capsys, "site", "init", "--name", name, "--folder", str(tmp_path / name))["card_file"])
        for name in ("c-lab", "a-hospital", "b.bank")
    ]


@pytest.fixture
def roster(tmp_path: Path, cards: list[str], capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "roster.toml"
    done(capsys, "roster", "build", *cards, "--out", str(out))
    return out


def test_a_site_gets_an_identity_a_card_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "site"
    printed = done(capsys, "site", "init", "--name", "ward-7", "--folder", str(folder))
    pem = folder / "identity.pem"
    assert stat.S_IMODE(pem.stat().st_mode) == 0o600
    card = Card.of("ward-7", load_identity(pem))
    assert card.text() in printed.splitlines()
    assert (folder / "ward-7.card").read_text() == card.text() + "\n"
    config = read_config(folder / "site.toml")
    assert (config.name, config.data, config.state) == ("ward-7", "data.jsonl", str(folder / "state"))
    assert (config.identity, config.roster) == (str(pem), str(folder / "roster.toml"))
    assert (config.roster_hash, config.minimum_cohort, config.secure) == ("", 3, True)


def test_init_tells_programs_where_everything_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, "site", "init", "--name", "x", "--folder", str(tmp_path))
    assert answer == {
        "name": "x",
        "card": (tmp_path / "x.card").read_text().strip(),
        "card_file": str(tmp_path / "x.card"),
        "site_made": True,
        "identity": str(tmp_path / "identity.pem"),
        "site": str(tmp_path / "site.toml"),
        "policy": str(tmp_path / "policy.toml"),
    }


def test_settings_that_are_there_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.toml").write_text("mine")
    assert not found(capsys, "site", "init", "--name", "x", "--folder", str(tmp_path))["site_made"]
    assert (tmp_path / "site.toml").read_text() == "mine"


def test_an_identity_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("site", "init", "--name", "x", "--folder", str(tmp_path))
    done(capsys, *arguments)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "identity.pem" in lone_refusal(capsys, *arguments)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_init_refuses_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", "two words", "../up", "x" * 65, "ä"):
        assert "card name" in lone_refusal(capsys, "site", "init", "--name", name, "--folder", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "--folder" in lone_refusal(
        capsys, "site", "init", "--name", "x", "--folder", str(tmp_path / "file")
    )
    assert "--folder" in lone_refusal(
        capsys, "site", "init", "--name", "x", "--folder", str(tmp_path / "file/b")
    )
    blocked = tmp_path / "blocked"
    (blocked / "x.card").mkdir(parents=True)
    assert "x.card" in lone_refusal(capsys, "site", "init", "--name", "x", "--folder", str(blocked))
    assert sorted(path.name for path in blocked.iterdir()) == ["x.card"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "ermission" in lone_refusal(capsys, "site", "init", "--name", "x", "--folder", str(tmp_path))


def test_a_roster_has_every_card_in_any_order(
    tmp_path: Path, cards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    answer = found(capsys, "roster", "build", *cards, "--out", str(one))
    again = found(capsys, "roster", "build", *reversed(cards), "--out", str(other))
    assert answer["hash"] == again["hash"] == load_roster(one).hash.hex()
    assert [site["name"] for site in answer["sites"]] == ["a-hospital", "b.bank", "c-lab"]
    assert found(capsys, "roster", "show", str(one)) == answer
    assert done(capsys, "roster", "hash", str(one)) == answer["hash"] + "\n"
    assert found(capsys, "roster", "verify", str(one), "--hash", answer["hash"].upper()) == answer
    shown = done(capsys, "roster", "show", str(one))
    for site in answer["sites"]:
        assert f"{site['name']:<10}  {site['key']}\n" in shown
    assert shown.endswith(f"hash {answer['hash']}\n")
    assert "3 sites" in done(capsys, "roster", "verify", str(one), "--hash", answer["hash"])
    assert str(one) in done(capsys, "roster", "build", *cards, "--out", str(one))


def test_a_card_may_come_by_mail(
    tmp_path: Path, cards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mailed = tmp_path / "mailed.txt"
    mailed.write_text("\ufeff\r\n" + Path(cards[0]).read_text().replace(" ", "\r\n "), encoding="utf-8")
    answer = found(capsys, "roster", "build", str(mailed), "--out", str(tmp_path / "roster.toml"))
    assert [site["name"] for site in answer["sites"]] == ["c-lab"]


def test_a_roster_is_not_replaced_by_another(
    roster: Path, cards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = roster.read_bytes()
    assert "--out" in lone_refusal(capsys, "roster", "build", *cards[:2], "--out", str(roster))
    assert "--out" in lone_refusal(capsys, "roster", "build", *cards, "--out", cards[0])
    assert "--out" in lone_refusal(capsys, "roster", "build", *cards, "--out", str(roster.parent))
    assert "--out" in lone_refusal(capsys, "roster", "build", *cards, "--out", "")
    assert roster.read_bytes() == before


def test_wrong_cards_are_refused(
    tmp_path: Path, cards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "roster.toml"

    def build(*files: str) -> str:
        return lone_refusal(capsys, "roster", "build", *files, "--out", str(out))

    assert "at least one card" in build()
    assert "missing.card" in build(cards[0], str(tmp_path / "missing.card"))
    assert str(tmp_path) in build(str(tmp_path))
    bad = tmp_path / "bad.card"
    text = Path(cards[0]).read_text()
    for content in (b"", b"hello", b"\xff\xfe", text.replace("c-lab", "d-lab").encode(), text[:-9].encode()):
        bad.write_bytes(content)
        assert "bad.card" in build(cards[1], str(bad))
    assert "one card for each name" in build(cards[0], cards[0])
    namesake = Card.of("c-lab", load_identity(Path(cards[1]).parent / "identity.pem"))
    bad.write_text(namesake.text())
    assert "one card for each name" in build(cards[0], str(bad))
    assert "one card for each key" in build(cards[1], str(bad))
    assert not out.exists()


def test_wrong_rosters_are_refused(
    tmp_path: Path, roster: Path, cards: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    right = load_roster(roster).hash.hex()
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
    nowhere = str(tmp_path / "missing" / "roster.toml")
    assert nowhere in lone_refusal(capsys, "roster", "build", *cards, "--out", nowhere)
    with pytest.raises(StorageError):
        main(["--traceback", "roster", "build", *cards, "--out", nowhere])


def test_help_needs_no_cryptography() -> None:
    code = (
        "import sys\nfrom cloister.cli.main import main\ntry:\n    main(['roster', 'build', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name in ('cryptography', 'torch', 'numpy', 'pydantic')])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--out" in answer.stdout
    assert answer.stdout.splitlines()[-1] == "[]"
