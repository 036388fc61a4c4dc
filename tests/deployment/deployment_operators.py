"""`docs/deployment.md`: three sites and a coordinator run a plan with the page's commands, in real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cloister.protocol.identity.address import free_port
from cloister.tests.parties.operators import (
    COORDINATOR,
    OTHERS,
    SITE,
    Operators,
    commands,
    digest_in,
    start,
)
from cloister.tests.parties.provisioned import FOUNDING
from cloister.tests.tools.command import done, refusal

pytestmark = pytest.mark.usefixtures("unsynced")


class Here:
    """A machine of which all commands but those that stay run in this process.

    Args:
        folder: Where its person types.
        capsys: Captures what commands print.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder.mkdir()
        self.folder = folder
        self._capsys = capsys

    def run(self, words: Sequence[str]) -> str:
        assert words[0] == "cloister"
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            return done(self._capsys, *words[1:])

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        return start(self.folder, words)


def all_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Operators]:
    """All persons at one machine, each in a folder; their commands that stay are ended at the end."""
    machines = {name: Here(folder / name, capsys) for name in (COORDINATOR, SITE, *OTHERS)}
    operators = Operators(machines, {FOUNDING[-1]: f"localhost:{free_port()}"})
    yield operators
    operators.end_all()


@pytest.fixture
def operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Operators]:
    yield from all_here(tmp_path, capsys)


def test_the_page_runs_a_federation(operators: Operators) -> None:
    operators.join()
    operators.write_plan()
    for command in commands("Run it"):
        operators.type(command)
        printed = operators.printed.get(command, "")
        match command.split()[1:]:
            case ["coordinator", "start", *_]:
                operators.wait_for_log(COORDINATOR, "ready: ")
            case ["plan", "check", *_]:
                operators.accept_plan(digest_in(printed))
            case ["stop", *_]:
                assert printed.startswith("stopped ")
            case ["status", "federation", "--follow"]:
                assert "finished 3 rounds" in printed
            case ["logs", *_]:
                assert printed.count("join") >= 3
            case ["report", *_]:
                assert "1.19" in printed
    for command in commands("A second run"):
        operators.type(command)
    assert "joined     " in operators.printed[command]
    operators.type("cloister status federation --follow")
    for command in commands("Services"):
        operators.type(command)
    for party in (SITE, COORDINATOR, *OTHERS):
        assert operators.end(party) == 130


def test_three_sites_take_seven_commands_at_most() -> None:
    typed = commands("Join a federation")
    assert sum(3 if command.startswith("cloister site ") else 1 for command in typed) <= 7


def test_a_coordinator_that_refuses_to_start_ends_a_rehearsal(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with its reason."""
    arguments = ["--out", str(tmp_path / "run"), "--metrics", "198.51.100.1:9"]
    line = refusal(capsys, "up", str(small_plan), *arguments)
    assert "coordinator: expected one that starts (" in line
    assert "--metrics" in line


@pytest.mark.parametrize(
    "action", ["coordinator start", "site start", "submit", "status", "stop", "logs", "report"]
)
def test_every_action_of_a_run_is_on_the_page(action: str) -> None:
    """A command that the page does not have is not run as an operator runs it."""
    assert any(f"cloister {action} " in command for command in commands("Run it"))
