"""Faults of the machines of a whole deployment: full disks, certificates that have expired.

It takes minutes, and the disks need root, so it is no part of the suite; `make test-deployment` runs it. The processes
are those of `cloister up`: a coordinator and its sites, on one machine.

A full disk is a small file system (tmpfs) that is filled. A later time is what Python tells a process: a
`sitecustomize` module, which Python imports first, shifts `datetime.now` in the processes whose command line names the
party. Code in C, such as the checks of certificates in TLS, sees the machine's clock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.protocol.errors import EngineError
from cloister.protocol.plan.soundness import load
from cloister.server.federation.control import command
from cloister.server.record.events import from_json
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.server.record.progress import Event, RoundDone, RoundStarted, SiteFailed
from cloister.simulations.rehearsal.rehearsal import prepare, running
from cloister.tests.tools.command import found

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]

WAIT_S = 240.0
_SHIFTED = """
import datetime, pathlib
if {whose!r}.encode() in pathlib.Path("/proc/self/cmdline").read_bytes():
    class datetime_(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(seconds={by_s})
        @classmethod
        def utcnow(cls):
            return super().utcnow() + datetime.timedelta(seconds={by_s})
    datetime.datetime = datetime_
"""
"""What the checks of certificates see. Not `time.time`, from which gRPC for Python makes deadlines
that its core compares with the machine's own clock."""


class Disk:
    """A small file system.

    Args:
        path: Its folder, made if missing.
        megabytes: Its size.
    """

    def __init__(self, path: Path, megabytes: int) -> None:
        self._path = path
        self._full = threading.Event()
        self._filling: threading.Thread | None = None
        path.mkdir(parents=True, exist_ok=True)
        if os.geteuid():
            pytest.skip("it needs root, to mount a small file system")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
        mounted = subprocess.run(mount, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"cannot mount: {mounted.stderr.strip()}")

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
        subprocess.run(["umount", "--lazy", str(self._path)], check=True)

    def fill(self) -> None:
        """Leave no free byte, also of those that others free, until `free`."""
        self._full.set()
        self._filling = threading.Thread(target=self._fill)
        self._filling.start()

    def _fill(self) -> None:
        pause = threading.Event()
        with (self._path / "fill").open("wb", buffering=0) as file:
            while self._full.is_set():
                with contextlib.suppress(OSError):
                    while file.write(bytes(2**12)):
                        pass
                pause.wait(0.005)

    def free(self) -> None:
        """Leave what there was; idempotent."""
        self._full.clear()
        if self._filling is not None:
            self._filling.join()
            self._filling = None
            (self._path / "fill").unlink()


class Deployed:
    """A rehearsal that is prepared.

    Args:
        path: The run folder, new or empty.
        plan: The plan.
        rounds: How many.
    """

    def __init__(self, path: Path, plan: Path, rounds: int = 3) -> None:
        self.files, self.plan = RunFiles(path.absolute()), load(plan, [f"run.rounds={rounds}"])
        self.federation = self.files.federation
        self.ended: list[str] = []
        """A line for each time that a process of a party has ended."""
        with RunFolder.create(path, self.plan) as folder:
            prepare(folder, lambda _event: None)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """All its processes."""
        return running(self.files, self.plan, self.ended.append)

    def log(self, site: str) -> str:
        """The log of a site."""
        return (self.files.sites.site(site) / "site.log").read_text(errors="replace")

    def follow(self) -> Iterator[Event | dict[str, Any]]:
        """The events of the run, and its state where it ends; goes on where its coordinator starts again."""
        shown, look = 0, threading.Event()
        until = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < until, self.ended
            with contextlib.suppress(EngineError):  # the coordinator is not there
                seen = 0
                for line in command(self.federation, do="follow", run=str(self.files.path)):
                    if "line" in line:
                        seen += 1
                        if seen > shown:
                            shown = seen
                            yield from_json(line["line"])
                    elif "state" in line:
                        yield dict(line)
                        if line["state"] == "done":
                            return
                        break
            look.wait(0.5)


def started(event: object, number: int) -> bool:
    """Whether an event is the start of a round of training."""
    return isinstance(event, RoundStarted) and (event.purpose, event.round) == ("train", number)


def wait_for(seen: Callable[[], bool]) -> None:
    until, look = time.monotonic() + WAIT_S, threading.Event()
    while not seen():
        assert time.monotonic() < until
        look.wait(0.2)


def refused(*words: str, python_path: Path) -> str:
    """The one line with which a command refuses, in a process with more on Python's path."""
    path = f"{python_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "cloister.cli.main", *words],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def shifted(folder: Path, whose: str, by_s: int) -> Path:
    """A folder for Python's path, by which a party's clock is off by some seconds."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SHIFTED.format(whose=whose, by_s=by_s))
    return folder


def test_the_disk_of_the_coordinator_is_full(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uploads wait, and the sites' logs say why, or the run stops and says so; after space is freed it goes on where it
    was. Its rounds are as many as are not over before the disk is full."""
    reasons, done, filled, rounds = [], [], False, 60
    simulated = [
        "simulate",
        str(small_plan),
        "--set",
        f"run.rounds={rounds}",
        "--out",
        str(tmp_path / "whole"),
    ]
    whole = found(capsys, *simulated)
    with Disk(tmp_path / "run", 16) as disk:
        deployed = Deployed(tmp_path / "run", small_plan, rounds)
        sites = deployed.files.sites.path
        shutil.move(sites, tmp_path / "sites")
        sites.symlink_to(tmp_path / "sites")  # they have disks of their own
        with deployed.running():
            for event in deployed.follow():
                if started(event, 2) and not filled:
                    filled = True
                    disk.fill()
                    frees = threading.Timer(20.0, disk.free)
                    frees.start()
                elif isinstance(event, RoundDone):
                    done.append(event)
                elif isinstance(event, dict) and event["state"] == "failed":
                    reasons.append(event["reason"])
                    frees.join()
                    list(command(deployed.federation, do="submit", run=str(deployed.files.path)))
        logs = (deployed.files.path / "federation.log", deployed.files.coordinator_log)
        log = "".join(path.read_text() for path in logs)
        told = "".join(path.read_text(errors="replace") for path in (tmp_path / "sites").glob("*/site.log"))
    assert [event.round for event in done] == list(range(1, rounds + 1))
    if all(event.sites == 4 for event in done):  # a site may come back too late for a round
        assert done[-1].params_sha256 == whole["params_sha256"]
    said = [line for line in [*reasons, *log.splitlines()] if "No space left on device" in line]
    waited = "the coordinator cannot write to its disk" in told
    assert said or waited, "nobody was told of the full disk, on which the coordinator's own logs are"
    assert all("expected a disk that accepts the write" in line for line in said)
    assert "Traceback" not in log


def test_the_disk_of_a_site_is_full(small_plan: Path, tmp_path: Path) -> None:
    """It is a dropout, of which the others are told at once, and takes part again after space is freed."""
    failed: list[SiteFailed] = []
    done: dict[int, int] = {}
    deployed = Deployed(
        tmp_path / "run", small_plan, rounds=300
    )  # forty end before a heartbeat finds the disk full
    with Disk(deployed.files.sites.state("site-001"), 4) as disk, deployed.running():
        for event in deployed.follow():
            if started(event, 2):
                disk.fill()
            elif started(event, 3):
                wait_for(lambda: "heartbeat.json: expected a disk" in deployed.log("site-001"))
                disk.free()
            elif isinstance(event, SiteFailed):
                failed.append(event)
            elif isinstance(event, RoundDone):
                done[event.round] = event.sites
    assert (done[1], done[2], done[300]) == (4, 3, 4)
    assert {event.site for event in failed} == {"site-001"}
    assert all("StorageError" in event.reason for event in failed)
    assert not deployed.ended


def test_certificates_that_have_expired(small_plan: Path, tmp_path: Path) -> None:
    """Neither party starts; the line names the certificate, its end, and what to do."""
    deployed = Deployed(tmp_path / "run", small_plan)
    site, federation = deployed.files.sites.config("site-001"), deployed.federation
    year = 400 * 86_400
    later = shifted(tmp_path / "later", str(tmp_path), year)
    line = refused("coordinator", "start", str(federation), python_path=later)
    assert "certificate of the door is 'expired on 20" in line
    assert f"cloister coordinator renew {federation}" in line
    much_later = shifted(tmp_path / "much later", str(tmp_path), 10 * year)
    for words in (("coordinator", "start", str(federation)), ("site", "start", str(site))):
        line = refused(*words, python_path=much_later)
        assert "certificate of the authority is 'expired on 20" in line
        assert "the coordinator has to make a new federation" in line
