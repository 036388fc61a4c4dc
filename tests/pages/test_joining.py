"""Sites join a federation with the commands of their persons, in real processes, and what goes wrong is one line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloister.clients.setup.config import read_config
from cloister.server.federation.registry import Registry
from cloister.tests.deployment.deployment_operators import all_here
from cloister.tests.parties.operators import COORDINATOR, OTHERS, SITE, WAIT_S, Operators
from cloister.tests.parties.provisioned import FOUNDING
from cloister.tests.tools.command import done, found, refusal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unsynced")]


@pytest.fixture
def operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Operators]:
    yield from all_here(tmp_path, capsys)


def test_three_sites_join(operators: Operators) -> None:
    """With the page's commands, until all are connected."""
    operators.join()
    folder = operators.coordinator.folder / "federation"
    newest = Registry.open(folder).federation
    assert (newest.version, [site.name for site in newest.sites]) == (1, sorted([SITE, *OTHERS]))
    for site in (SITE, *OTHERS):
        config = read_config(operators.machines[site].folder / site / "site.toml")
        assert config.roster_hash == newest.roster.hash.hex()
        assert operators.end(site) == 130
    assert operators.end(COORDINATOR) == 130


def test_a_site_goes_on_where_it_was(
    operators: Operators, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C, a wrong code, and a wrong fingerprint; and a site that is there installs the next version."""
    federation = str(operators.coordinator.folder / "federation")
    address = operators.told[FOUNDING[-1]]
    done(capsys, "coordinator", "create", federation, "--name", "oncology", "--address", address)
    operators.type("cloister coordinator start federation")
    operators.wait_for_log(COORDINATOR, "ready: ")
    join = f"cloister site join {address} --name {SITE} --contact x --folder {SITE}"
    folder = operators.machines[SITE].folder / SITE

    codes, keys = [], set()
    for _ in range(2):
        operators.type(join, SITE)
        codes += re.findall("^code +(.*)$", operators.wait_for_log(SITE, "Waiting for"), re.MULTILINE)
        keys.add((folder / "identity.pem").read_bytes())
        if len(codes) == 1:
            with operators.staying.pop(SITE) as waiting:
                waiting.send_signal(signal.SIGINT)
                assert waiting.wait(WAIT_S) == 130
    assert (len(set(codes)), len(keys)) == (2, 1), "another code, the same key"

    assert found(capsys, "coordinator", "approve", federation)["waiting"][0]["tries"] == 2
    approve = ["coordinator", "approve", federation, "--code"]
    for wrong in (f"{SITE}={codes[0]}", f"{SITE}=", f"other={codes[1]}", codes[1]):
        assert "code" in refusal(capsys, *approve, wrong)
    told = refusal(capsys, *approve, f"other={codes[1]}", "--code", f"{SITE}={codes[1]}")
    assert "other" in told, "a wrong code is refused, and takes nothing from the right one"
    first = found(capsys, "coordinator", "show", federation)["fingerprint"]

    operators.wait_for_log(SITE, "Type the fingerprint")
    with operators.staying.pop(SITE) as refusing:
        assert refusing.stdin is not None
        refusing.stdin.write(b"0" * 64 + b"\n")
        assert refusing.wait(WAIT_S) == 2
    assert not read_config(folder / "site.toml").federation
    words = [*join.split()[1:-1], str(folder)]
    assert "installed" in done(capsys, *words, "--fingerprint", first)
    assert "next" in done(capsys, *words)  # it is done

    operators.type(join, OTHERS[0])
    (code,) = re.findall("^code +(.*)$", operators.wait_for_log(OTHERS[0], "Waiting for"), re.MULTILINE)
    with monkeypatch.context() as patch:  # a terminal, at which the person types nothing, and then the code
        typed = iter(["", code])
        patch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        patch.setattr("builtins.input", lambda prompt: next(typed) if OTHERS[0] in prompt else "")
        assert "version" not in done(capsys, *approve[:-1])
        assert "oncology, version 2\n" in done(capsys, *approve[:-1])
    second = found(capsys, "coordinator", "show", federation)["fingerprint"]
    install = ["site", "install", "--folder", str(folder), "--fingerprint"]
    assert "fingerprint" in refusal(capsys, *install, first)
    assert found(capsys, *install, second)["version"] == 2
    _catches_up(capsys, federation, folder)


def _catches_up(capsys: pytest.CaptureFixture[str], federation: str, folder: Path) -> None:
    """A site that missed a version, and whose next key was approved since, installs each, by its own fingerprint."""
    request = found(capsys, "site", "rotate", "--folder", str(folder))
    third = found(capsys, "coordinator", "remove", OTHERS[0], federation)["fingerprint"]
    approve = ["coordinator", "approve", federation, request["request"], "--fingerprint"]
    fourth = found(capsys, *approve, request["fingerprint"])["fingerprint"]
    shown = found(capsys, "coordinator", "show", federation, "--version", "3")
    assert (shown["version"], shown["fingerprint"]) == (3, third)
    assert "1 to 4" in refusal(capsys, "coordinator", "show", federation, "--version", "5")
    install = ["site", "install", "--folder", str(folder), "--fingerprint"]
    assert "--version 3" in refusal(capsys, *install, fourth)
    assert "version 4 of 4 waits" in done(capsys, *install, third)
    assert Path(read_config(folder / "site.toml").identity).name == "identity.pem"
    assert found(capsys, *install, fourth)["version"] == 4
    assert Path(read_config(folder / "site.toml").identity).name == "identity-2.pem"
    assert "waits" not in done(capsys, *install, fourth)
