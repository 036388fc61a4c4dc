"""Sites and a coordinator that provision a federation as their operators do: by commands, and by files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cloister.protocol.identity.document import read_document
from cloister.protocol.identity.federation import Federation
from cloister.tests.tools.command import done, found

NAMES = ("a-hospital", "b.bank", "c-lab")
FOUNDING = ("--name", "oncology", "--address", "fl.example.org:9443")


class Parties:
    """Folders of sites and of a coordinator, and the commands of their operators.

    Args:
        path: Where the folders are.
        capsys: Captures what the commands print.
    """

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.capsys = capsys
        self.coordinator = path / "coordinator"

    def folder(self, name: str) -> Path:
        """A site's folder."""
        return self.path / name

    def request(self, name: str, contact: str = "Dr Ada Example, +44 20 7946 0000") -> dict[str, Any]:
        """A site makes its request."""
        folder = str(self.folder(name))
        return found(self.capsys, "site", "request", "--name", name, "--contact", contact, "--folder", folder)

    def rotate(self, name: str) -> dict[str, Any]:
        """A site makes the request for a new key."""
        return found(self.capsys, "site", "rotate", "--folder", str(self.folder(name)))

    def approve(self, *requests: dict[str, Any]) -> dict[str, Any]:
        """The coordinator approves requests; before the first time it makes the federation."""
        return found(self.capsys, *self.approving(*requests))

    def approving(self, *requests: dict[str, Any]) -> list[str]:
        """The command that approves requests."""
        told = [word for request in requests for word in ("--fingerprint", request["fingerprint"])]
        if not self.coordinator.exists():
            found(self.capsys, "coordinator", "create", str(self.coordinator), *FOUNDING)
        files = [request["request"] for request in requests]
        return ["coordinator", "approve", str(self.coordinator), *files, *told]

    def change(self, action: str, *arguments: str) -> dict[str, Any]:
        """The coordinator removes, revokes or renews."""
        return found(self.capsys, "coordinator", action, *arguments, str(self.coordinator))

    def install(self, name: str, version: dict[str, Any]) -> dict[str, Any]:
        """A site installs a version."""
        return found(self.capsys, *self.installing(name, version))

    def installing(self, name: str, version: dict[str, Any]) -> list[str]:
        """The command that installs a version at a site."""
        folder = str(self.folder(name))
        return [
            "site",
            "install",
            version["file"],
            "--fingerprint",
            version["fingerprint"],
            "--folder",
            folder,
        ]

    def shown(self, name: str, version: dict[str, Any]) -> str:
        """What a site's operator sees at an installation."""
        return done(self.capsys, *self.installing(name, version))

    def made(self) -> dict[str, Any]:
        """A federation of three sites that is installed at each."""
        version = self.approve(*(self.request(name) for name in NAMES))
        for name in NAMES:
            self.install(name, version)
        return version

    def read(self, version: dict[str, Any]) -> Federation:
        """A version, as its file has it."""
        return Federation.from_toml(read_document(Path(version["file"]), "federation"))

    def forged(self, federation: Federation) -> dict[str, Any]:
        """A version that a lying coordinator has made, with its right fingerprint."""
        path = self.path / f"forged-{federation.fingerprint.hex()[:8]}.toml"
        path.write_text(federation.to_toml(), encoding="utf-8")
        return {"file": str(path), "fingerprint": federation.fingerprint.hex()}

    def copied(self, path: Path) -> Parties:
        """The same parties in a copy of their folders."""
        shutil.copytree(self.path, path, dirs_exist_ok=True)
        return Parties(path, self.capsys)


def state(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
