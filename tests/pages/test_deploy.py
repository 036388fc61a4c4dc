"""The files of `deploy/`: the commands in them are commands of this release, and the page names each file."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from cloister.cli.main import command_parser
from cloister.protocol.identity.address import port_of
from cloister.tests.parties.operators import PAGE, SITE
from cloister.tests.parties.provisioned import FOUNDING

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
STATEFUL = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
PROBE = ["cloister", "status", "/cloister/site.toml", "--probe"]
HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ReadWritePaths": "/var/lib/cloister",
    "ProtectHome": "read-only",  # records may be in a home
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "UMask": "0077",
    "User": "cloister",
}


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments of a command line of this release."""
    arguments, unknown = command_parser().parse_known_args(words)
    assert not unknown
    return arguments


def unit_of(path: Path) -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # the way to keep the case of keys
    unit.read_string(path.read_text(encoding="utf-8"))
    return unit


def instruction(name: str) -> str:
    """The last instruction of a name in the Dockerfile, on one line."""
    found: list[str] = re.findall(rf"^{name} ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    return found[-1].replace("\\\n", " ")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_service_runs_a_command_of_this_release_as_a_confined_user(path: Path) -> None:
    service = unit_of(path)["Service"]
    program, *words = shlex.split(service["ExecStart"].replace("%i", "north-hospital"))
    assert program == "/opt/cloister/bin/cloister"
    assert parsed(words).act
    assert dict(service).items() >= HARDENED.items()
    assert (service["Restart"], service["SuccessExitStatus"]) == ("on-failure", "130")
    assert (
        service["KillMode"] == "mixed"
    )  # else the children are ended at the same time as what supervises them


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text(encoding="utf-8").replace("/opt/cloister/bin/cloister", "/bin/true")
        (tmp_path / path.name.replace("@", "@north-hospital")).write_text(text)
    names = sorted(str(path) for path in tmp_path.iterdir())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_has_every_package_and_probes_itself() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    folders = {name.split(".")[1] for name in packages if "." in name}
    copied = {
        one for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for one in line.split()
    }
    assert folders <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert instruction("USER") == "cloister"
    path = dict(re.findall(r"^ENV (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))["CLOISTER_PATH"]
    probe = instruction("HEALTHCHECK").partition("CMD ")[2].removesuffix(" || exit 1")
    assert shlex.split(probe.replace("$CLOISTER_PATH", path)) == PROBE
    assert parsed(PROBE[1:]).probe
    assert json.loads(instruction("ENTRYPOINT")) == ["cloister"]
    assert parsed(json.loads(instruction("CMD"))).act


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_a_composed_service_probes_what_it_runs(service: str) -> None:
    found = COMPOSE["services"][service]
    arguments = parsed(found["command"])
    assert (
        found["environment"]["CLOISTER_PATH"]
        == vars(arguments)[{"coordinator": "federation"}.get(service, service)]
    )
    (volume,) = found["volumes"]
    ((of_machine, mounted),) = re.findall(r"^\$\{[A-Z]+:-(.*)\}:(.*)$", volume)
    assert Path(found["environment"]["CLOISTER_PATH"]).is_relative_to(mounted)
    assert (DEPLOY / of_machine).resolve() == ROOT / {"coordinator": "federation", "site": SITE}[service]
    build = (DEPLOY / found["build"]["context"] / found["build"]["dockerfile"]).resolve()
    assert build == DEPLOY / "Dockerfile"
    port = port_of(FOUNDING[-1])
    assert found.get("ports") == ([f"{port}:{port}"] if service == "coordinator" else None)  # a site has none


def test_kubernetes_probes_a_site_by_a_command() -> None:
    (container,) = STATEFUL["spec"]["template"]["spec"]["containers"]
    assert parsed(container["args"]).act
    assert container["readinessProbe"]["exec"]["command"] == PROBE
    # It fails while the coordinator is away: a site must not be killed then, in the middle of its training.
    assert not {"startupProbe", "livenessProbe"} & container.keys()
    assert "fsGroup" not in json.dumps(
        STATEFUL
    )  # a group could read the keys, and the site would refuse them


def test_containers_run_as_the_user_of_the_image() -> None:
    (user,) = re.findall(r"--uid (\d+)", DOCKERFILE)
    assert STATEFUL["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(user)
    assert user in (DEPLOY / "compose.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.iterdir()))
def test_the_page_names_every_file(name: str) -> None:
    assert f"deploy/{name}" in PAGE
