"""The process of a deployed site: what a service manager sees of it, and the proxy that it finds."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cloister.clients.deployed import DeployedSite
from cloister.clients.setup.enrolment import consider, install, make_request
from cloister.protocol.errors import EngineError
from cloister.protocol.machine.flower import use_proxy
from cloister.server.federation.registry import Registry, Terms
from cloister.tests.tools.command import ran
from cloister.tests.tools.raises import raises

NOW = datetime.datetime.now(datetime.UTC)

pytestmark = pytest.mark.usefixtures("unsynced")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The TOML of an installed site."""
    folders = [tmp_path / name for name in ("north", "east", "south")]
    requests = [make_request(folder, folder.name, "a person", NOW.date())[0] for folder in folders]
    terms = Terms(name="oncology", superlink="127.0.0.1:9", exchange="127.0.0.1:9")
    made = Registry.create(tmp_path / "federation", terms, requests, NOW, durable=False).federation
    install(consider(folders[0], made, NOW), durable=False)
    return folders[0] / "site.toml"


@pytest.mark.slow
def test_a_site_that_takes_no_messages_ends_as_a_failure(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a defect; its service manager starts it again. It would look well to the coordinator's SuperLink otherwise."""

    def broken(*_: object) -> None:
        return

    monkeypatch.setattr("cloister.clients.deployed.serve_tasks", broken)
    with raises(EngineError, "messages of the SuperNode"):
        DeployedSite(site, lambda _line: None).run(threading.Event())


def test_a_probe_of_a_site_is_light(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is run every minute: torch and Flower, which take seconds to import, stay out."""
    assert ran(capsys, "status", str(site), "--probe")[:2] == (1, "its process does not run\n")
    code = "import sys, cloister.cli.main as main\n"
    code += "main.main(['status', sys.argv[1], '--probe'])\n"
    code += "print([name for name in ('flwr', 'torch', 'grpc', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, str(site)], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["its process does not run", "[]"]


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"HTTPS_PROXY": "proxy.example:3128"}, "http://proxy.example:3128"),
        ({"HTTPS_PROXY": "http://proxy.example:3128"}, "http://proxy.example:3128"),
        (
            {"https_proxy": "http://small.example:1", "HTTPS_PROXY": "http://capital.example:1"},
            "http://small.example:1",
        ),
        ({}, None),
        ({"HTTPS_PROXY": ""}, None),
    ],
)
def test_grpc_finds_the_proxy_as_python_does(named: dict[str, str], found: str | None) -> None:
    environment = {"NO_PROXY": "intern.example,localhost", **named}
    use_proxy(environment)
    assert environment.get("https_proxy") == found
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intern.example,localhost,127.0.0.1"
