"""The persons of `docs/deployment.md`: each types the page's commands, word for word, at a machine of its own.

What the page says in prose is done here: files are sent, fingerprints are read aloud, settings are filled in.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cloister.clients.setup.templates import with_values
from cloister.tests.parties.federation import write_records

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
SITE = "north-hospital"
"""The site whose commands the page has; the other sites type the same with their own name."""
OTHERS = ("east-clinic", "south-lab")
COORDINATOR = "coordinator"
WAIT_S = 120.0
"""Seconds within which a command that stays is ready, and within which it ends."""

_SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
_CODE = re.compile(r"^code +([0-9A-Z]{4}-[0-9A-Z]{4})$", re.MULTILINE)
_FINGERPRINT = re.compile(r"fingerprint +((?:[0-9a-f]{4}-){15}[0-9a-f]{4})\n")


def blocks(section: str, kind: str = "") -> list[str]:
    """The blocks of a kind in a section of the page: `toml`, `sh` for other programs, or empty for commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", _SECTIONS[section], re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == kind]


def commands(section: str) -> list[str]:
    """The commands in a section of the page."""
    return [line for block in blocks(section) for line in block.splitlines()]


class Machine(Protocol):
    """A party's machine."""

    folder: Path
    """Where its person types commands."""

    def run(self, words: Sequence[str]) -> str:
        """What a command prints that succeeds."""

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """A command that stays; it logs to `stays.log` in the folder."""


def start(
    folder: Path, words: Sequence[str], before: Sequence[str] = (), **variables: str
) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own, whose output goes to `stays.log` in the folder.

    What its person types goes to `stdin` of what is returned, a terminal.

    Args:
        folder: Its current directory.
        words: The command, from `cloister` on.
        before: What is typed before it, such as a program that enters a network.
        variables: Environment variables besides those of this process.
    """
    assert words[0] == "cloister"
    ours, theirs = pty.openpty()
    with (folder / "stays.log").open("wb") as log, os.fdopen(theirs) as terminal:
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "cloister.cli.main", *words[1:]],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | variables,
            stdin=terminal,
            stdout=log,
            stderr=log,
        )
    process.stdin = os.fdopen(ours, "wb", buffering=0)
    return process


class Operators:
    """All persons.

    Args:
        machines: Of the coordinator and of each site.
        instead: Words that are typed instead of words of the page, such as addresses of another network.
    """

    def __init__(self, machines: Mapping[str, Machine], instead: Mapping[str, str] | None = None) -> None:
        self.machines = machines
        self.sites = [name for name in machines if name != COORDINATOR]
        self.coordinator = machines[COORDINATOR]
        self.told = dict(instead or {})
        """Besides: fingerprints that were read aloud, by the words for them on the page."""
        self.printed: dict[str, str] = {}
        """What each command of the page has printed last."""
        self.staying: dict[str, subprocess.Popen[bytes]] = {}
        """The command that stays on each machine."""

    def join(self) -> None:
        """Follow the section that makes the federation: then all parties are connected."""
        for command in commands("Join a federation"):
            self.type(command)
            match shlex.split(command)[1:3]:
                case ["coordinator", "start"]:
                    self.wait_for_log(COORDINATOR, "ready: ")
                case ["site", "join"]:
                    for site in self.sites:  # the first call
                        (code,) = _CODE.findall(self.wait_for_log(site, "Waiting for the coordinator"))
                        self.told[f"{site}=CODE-OF-{site.upper()}"] = f"{site}={code}"
                        self._fill_in(site)
                case ["coordinator", "approve"]:
                    self._hear("federation", self.printed[command])
                    for site in self.sites:  # the second call
                        self.wait_for_log(site, "Type the fingerprint")
                        terminal = self.staying[site].stdin
                        assert terminal is not None
                        terminal.write(self.told["HEX-OF-FEDERATION"].encode() + b"\n")
                        self.wait_for_log(site, "connected to ")

    def type(self, command: str, site: str = "") -> None:
        """Type a command of the page where it belongs: at one site, at every site, or at the coordinator.

        Args:
            command: It.
            site: The only site that types it; empty: every one, if it is a command of sites.
        """
        if SITE not in command or command.startswith("cloister coordinator"):
            self._type(COORDINATOR, command)
            return
        for name in [site] if site else self.sites:
            self._type(name, command.replace(SITE, name))

    def write_plan(self) -> None:
        """Write the plan of the page at the coordinator, and send it to every site."""
        (plan,) = blocks("Run it", "toml")
        (self.coordinator.folder / "first.toml").write_text(plan, encoding="utf-8")
        for site in self.sites:
            self._send(COORDINATOR, site, "first.toml")

    def accept_plan(self, digest: str) -> None:
        """Read the digest of the plan that the page's next command names."""
        self.told["DIGEST"] = digest

    def set(self, site: str, **values: str) -> None:
        """Change settings in a site's TOML."""
        path = self.machines[site].folder / site / "site.toml"
        path.write_text(with_values(path.read_text(encoding="utf-8"), values, str(path)), encoding="utf-8")

    def wait_for_log(self, party: str, words: str) -> str:
        """Wait until the command that stays at a party has logged some words; returns all that it has logged."""
        log = self.machines[party].folder / "stays.log"
        until, look = time.monotonic() + WAIT_S, threading.Event()
        while words not in (text := log.read_text(encoding="utf-8", errors="replace")):
            assert self.staying[party].poll() is None, text
            assert time.monotonic() < until, text
            look.wait(0.1)
        return text

    def end(self, party: str) -> int:
        """Send SIGTERM to the command that stays at a party; returns its exit code."""
        process = self.staying.pop(party)
        with process:
            process.send_signal(signal.SIGTERM)
            return process.wait(WAIT_S)

    def end_all(self) -> None:
        """End all commands that stay, however the test has ended."""
        for process in self.staying.values():
            process.terminate()
        for process in self.staying.values():
            with process:
                process.wait(WAIT_S)

    def _type(self, party: str, command: str) -> None:
        words = [self.told.get(word, word) for word in shlex.split(command)]
        assert not [word for word in words if "-OF-" in word], command
        if words[1:3] in (["coordinator", "start"], ["site", "join"], ["site", "start"]):
            if party in self.staying:  # the page starts it again
                assert self.end(party) == 130
            self.staying[party] = self.machines[party].start(words)
        else:
            self.printed[command] = self.machines[party].run(words)

    def _hear(self, whose: str, printed: str) -> None:
        self.told[f"HEX-OF-{whose.upper()}"] = _FINGERPRINT.findall(printed)[-1]

    def _send(self, one: str, other: str, file: str) -> None:
        shutil.copy(self.machines[one].folder / file, self.machines[other].folder)

    def _fill_in(self, site: str) -> None:
        """Put the records where `site.toml` says."""
        write_records(self.machines[site].folder / site / "data.jsonl")


def digest_in(printed: str) -> str:
    """The digest that `cloister plan check` has printed."""
    (digest,) = re.findall(r"^digest ([0-9a-f]{64})$", printed, re.MULTILINE)
    assert isinstance(digest, str)
    return digest


def events(run: Path) -> list[dict[str, object]]:
    """The events of a run, with their times."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
