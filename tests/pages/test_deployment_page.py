"""`docs/deployment.md`: every command on the page is run, word for word, in its order, and does what the page says.

The commands that need the processes of all parties are run by `deployment_operators.py`.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.clients.setup.config import read_config
from cloister.protocol.identity.address import free_port
from cloister.protocol.identity.roster import load_roster
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.federation.registry import Registry
from cloister.tests.parties.door_parties import Relay
from cloister.tests.tools.command import done, found

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
HERE = re.sub(
    r"^## (Join a federation|Run it|A second run|Services)\n.*?(?=^## )",
    "",
    PAGE,
    flags=re.MULTILINE | re.DOTALL,
)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", HERE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]
ACTIONS = [
    *(f"coordinator {action}" for action in ("create", "approve", "remove", "revoke", "renew", "show")),
    *(f"site {action}" for action in ("request", "install", "rotate")),
    "flower bundle",
    "provision",
    "doctor",
]
FILES = ["identity.pem", "site.toml", "policy.toml", "authority.key", "authority.pem", "door.key", "door.pem"]
FILES += ["coordinator.key", "federation-1.toml"]

pytestmark = pytest.mark.usefixtures("unsynced")


class Operators:
    """The persons at the sites and at the coordinator; the current folder has what they sent.

    Args:
        capsys: Captures what the commands print.
        bind: Where the proxy of the sites connects to.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], bind: str) -> None:
        self.capsys = capsys
        self.bind = bind
        self.told: dict[str, str] = {}
        """Fingerprints that were read aloud, by the words for them on the page."""
        self.versions = 0
        """Versions that were sent."""

    def run(self, command: str) -> None:
        """Run a command of the page, and send and tell what comes of it."""
        words = [self.told.get(word, word) for word in shlex.split(command)]
        assert words[0] == "cloister"
        assert not [word for word in words if word.startswith("HEX-OF-")], command
        with contextlib.ExitStack() as stack:
            if words[1] == "doctor" and words[2].endswith("site.toml"):
                pem, key = (Path(f"federation/door.{kind}").read_bytes() for kind in ("pem", "key"))
                newest = Registry.open(Path("federation")).federation
                stack.enter_context(Door(lambda: ServerCertificate(pem, key), lambda: newest, self.bind))
            printed = done(self.capsys, *words[1:])
        match words[1:3]:
            case ["site", "request" | "rotate"]:
                folder = Path(words[words.index("--folder") + 1])
                request = max(folder.glob("*.request"), key=lambda path: path.stat().st_mtime_ns)
                self.tell(folder.name if words[2] == "request" else request.stem, printed)
                if not Path(request.name).exists():
                    shutil.copy(request, Path())
            case ["coordinator", _]:
                self.tell("federation", printed)
                self.send()

    def tell(self, whose: str, printed: str) -> None:
        """Read the fingerprint aloud that a command has printed last."""
        groups = r"fingerprint +((?:[0-9a-f]{4}-){15}[0-9a-f]{4})\n"
        self.told[f"HEX-OF-{whose.upper()}"] = re.findall(groups, printed)[-1]

    def send(self) -> None:
        """Send the newest version, if it is new; every site installs it, but for the installation that the page has."""
        version = found(self.capsys, "coordinator", "show", "federation")
        if version["version"] == self.versions:
            return
        self.versions += 1
        assert version["version"] == self.versions
        file = shutil.copy(version["file"], Path())
        for site in version["sites"]:
            new = Path(f"{site}-new")
            folder = str(new if new.exists() else site)
            if (site, self.versions) != ("north-hospital", 1):
                told = self.told["HEX-OF-FEDERATION"]
                done(self.capsys, "site", "install", str(file), "--folder", folder, "--fingerprint", told)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The names of the page are known at the coordinator; sites reach it by a proxy."""
    bind, known = f"127.0.0.1:{free_port()}", socket.getaddrinfo

    def resolved(host: str, *others: Any, **options: Any) -> Any:
        return known("127.0.0.1" if host.startswith("fl.example.") else host, *others, **options)

    monkeypatch.setattr("socket.getaddrinfo", resolved)
    for user in ("server.federation.doctor", "protocol.identity.address"):
        monkeypatch.setattr(f"cloister.{user}.everywhere", lambda _address: bind)
    with Relay(bind, proxy=True) as relay:
        monkeypatch.setenv("https_proxy", f"http://{relay.address}")
        monkeypatch.setenv("no_proxy", "")
        yield bind


@pytest.mark.slow
def test_every_command_of_the_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], network: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (settings,) = [block for kind, block in BLOCKS if kind == "toml"]
    Path("rehearsal.toml").write_text(settings, encoding="utf-8")
    operators = Operators(capsys, network)
    for name in ("east-clinic", "south-lab", "west-institute"):  # the first command, at the other sites
        operators.run(COMMANDS[0].replace("north-hospital", name))
    for command in COMMANDS:
        operators.run(command)
    version = found(capsys, "coordinator", "show", "federation")
    assert version["sites"] == ["east-clinic", "north-hospital", "south-lab"]
    assert version["version"] == operators.versions == 6  # made, added, removed, rotated, revoked, moved
    for folder in ("east-clinic", "north-hospital", "south-lab-new"):
        config = read_config(Path(folder, "site.toml"))
        assert config.roster_hash == version["roster_hash"] == load_roster(Path(config.roster)).hash.hex()
    assert Path(read_config(Path("north-hospital/site.toml")).identity).name == "identity-2.pem"
    assert sorted(path.name for path in Path("rehearsal/sites").iterdir()) == version["sites"]


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_is_on_the_page(action: str) -> None:
    """A command that the page does not have is not run as an operator runs it."""
    assert any(f"cloister {action} " in command for command in COMMANDS)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE
