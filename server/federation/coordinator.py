"""The coordinator's process, which stays: the door, the queue of runs, and the commands that ask about them.

It runs one run at a time, each in a process of its own (`cloister coordinator run`). A run whose process was killed is
started again, and so are, when this process itself is started again, the run that was interrupted and those that wait.
A run that stopped with a reason, or on demand, waits until it is submitted again.

| file in the federation's folder | what it is |
|---|---|
| `queue.json` | the runs that were submitted, and what became of them |
| `control.json` | where commands reach this process, while it runs |
| `lock` | that one process serves the folder |
| `runs/` | run folders, unless they were made elsewhere |
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from cloister.protocol.errors import EngineError, RunFolderError, StorageError
from cloister.protocol.identity.address import everywhere
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.heads import Heads
from cloister.protocol.machine.child import append_to, spawn
from cloister.protocol.machine.fork_server import ending
from cloister.protocol.machine.storage import lock, on_disk, write_bytes
from cloister.server.door.door import Door, ServerCertificate
from cloister.server.federation.control import Answer, Control
from cloister.server.federation.deployment import Deployment, check_deployable, refusal_in
from cloister.server.federation.metrics import Metrics, served
from cloister.server.federation.registry import Registry
from cloister.server.record.events import from_json, with_time
from cloister.server.record.folder import RunFiles, read_plan
from cloister.server.record.progress import Event, RoundDone

State = Literal["waiting", "running", "done", "failed", "stopped"]

_CRASHES = 5
"""Times that a run's process may crash without a finished round between."""
_FIRST_S = 2.0
"""Seconds before a run whose process has crashed is started again; doubled each time."""
_END_S = 30.0
"""Seconds for which the process of a run may end by itself after SIGTERM."""
_HEARTBEAT_S = 10.0
"""Seconds between two lines to a command that follows a run, so that its end is seen."""


@dataclass
class Entry:
    """A run that was submitted."""

    run: str
    """Its folder, absolute."""
    state: State = "waiting"
    reason: str = ""
    """Why it is failed; empty otherwise."""


class Queue:
    """The runs that were submitted, in order; durable.

    Args:
        path: Its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else "[]"
            self._entries = {entry["run"]: Entry(**entry) for entry in json.loads(text)}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(
                str(path), expected=f"the list of runs ({error})", fix="remove it, and submit the runs again"
            ) from error

    def entries(self) -> list[Entry]:
        """All of them."""
        return [Entry(**asdict(entry)) for entry in self._entries.values()]

    def next(self) -> Entry | None:
        """The run that is to run: the one that was interrupted, or the first that waits."""
        due = [entry for entry in self._entries.values() if entry.state in ("running", "waiting")]
        return min(due, key=lambda entry: entry.state != "running", default=None)

    def add(self, run: str) -> None:
        """Let a run wait at the end; also one that has failed or was stopped."""
        if self.state(run) in ("running", "waiting"):
            raise EngineError("run", run, expected="one that is not in the queue already")
        self._entries.pop(run, None)
        self._entries[run] = Entry(run)
        self._write()

    def set(self, run: str, state: State, reason: str = "") -> None:
        """Note what became of a run."""
        entry = self._entries[run]
        if (entry.state, entry.reason) != (state, reason):
            entry.state, entry.reason = state, reason
            self._write()

    def state(self, run: str) -> str:
        """What became of a run; empty if it was never submitted."""
        entry = self._entries.get(run)
        return "" if entry is None else entry.state

    def _write(self) -> None:
        text = json.dumps([asdict(entry) for entry in self._entries.values()], indent=1)
        write_bytes(self._path, text.encode())


@dataclass
class _Running:
    """The run that runs."""

    process: subprocess.Popen[bytes] | None = None
    stop: bool = False
    """Whether it is to stop."""
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last event of each kind, as JSON."""
    lines: int = 0
    """Events in its file."""


class Coordinator:
    """The process; `run` serves until it is stopped.

    Args:
        folder: The federation's folder.
        told: Receives lines for the operator.
        bind: HOST:PORT on which the door listens; empty: all interfaces, and the port of its address.
        metrics_bind: HOST:PORT on which metrics are served (`metrics.py`); empty: they are not.
        metrics_on_network: Whether that may be another address than one of loopback.
        options: More options of the command that runs a run.

    Raises:
        CloisterError: the folder is not that of a federation, a certificate is not valid, or another process serves it.
    """

    def __init__(
        self,
        folder: Path,
        told: Callable[[str], None],
        *,
        bind: str = "",
        metrics_bind: str = "",
        metrics_on_network: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        self.folder = folder.absolute()
        self._told = told
        registry = Registry.open(self.folder)
        registry.check_certificates(datetime.now(UTC))
        self._registry = registry
        self._bind = bind or everywhere(registry.federation.door)
        self._options = options
        self._metrics = Metrics()
        self._metrics_bind = metrics_bind
        self._metrics_on_network = metrics_on_network
        self._lock = lock(self.folder / "lock", "a federation that no other coordinator's process serves")
        self._changed = threading.Condition()
        """Guards the fields below, and is notified when one changes."""
        self._queue = Queue(self.folder / "queue.json")
        self._stopping = False
        self._run = _Running()

    def stop(self) -> None:
        """End: the run that runs is ended, and goes on at the next start."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            _end(self._run.process)

    def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            EngineError: the door cannot listen there, or metrics cannot be served.
        """
        with self._lock, ExitStack() as opened:
            if self._metrics_bind:
                where = served(self._metrics, self._metrics_bind, on_network=self._metrics_on_network)
                self._told(f"metrics: {opened.enter_context(where)}")
            heads = Heads(self.folder / AUDIT_LOG, self.folder / "heads")
            door = Door(
                self._certificate,
                self._newest,
                self._bind,
                heads,
                lambda number: self._registry.version(number),
            )
            opened.enter_context(door)
            control = Control(self.folder, self._answer)
            opened.callback(control.close)
            self._door = door
            self._told(f"ready: the door is open on {door.address}")
            while (entry := self._wait_for_run()) is not None:
                self._execute(Path(entry.run), door)

    def _certificate(self) -> ServerCertificate:
        """That of the door as it is on disk now: `renew` may have made a new one."""
        with on_disk(self.folder):
            pem, key = ((self.folder / f"door.{kind}").read_bytes() for kind in ("pem", "key"))
        return ServerCertificate(pem, key)

    def _newest(self) -> Federation:
        """The newest version: another process may have published one."""
        if self._registry.following.exists():
            self._registry = Registry.open(self.folder)
        return self._registry.federation

    def _wait_for_run(self) -> Entry | None:
        with self._changed:
            while not self._stopping:
                entry = self._queue.next()
                if entry is not None:
                    return entry
                self._changed.wait()
        return None

    def _execute(self, path: Path, door: Door) -> None:
        """Run one run, in as many processes as it takes."""
        files = RunFiles(path)
        with self._changed:
            self._queue.set(str(path), "running")
            self._run = _Running()
        self._metrics.begin(path.name)
        for line in _lines_from(files.events, 0)[0]:  # of earlier processes
            with suppress(EngineError):
                self._metrics.take(from_json(line))
        self._told(f"run {path}: started")
        crashes = 0
        while True:
            rounds, status = self._process_of(files, door)
            crashes = 1 if rounds else crashes + 1
            with self._changed:
                if self._stopping:
                    return
                state: State
                if status == 0:
                    state, reason = "done", ""
                elif self._run.stop:
                    state, reason = "stopped", ""
                elif status == 2:
                    state, reason = "failed", refusal_in(files.coordinator_log) or "see coordinator.log"
                elif crashes >= _CRASHES:
                    state, reason = "failed", f"its process {ending(status)} {crashes} times"
                else:
                    wait = _FIRST_S * 2 ** (crashes - 1)
                    self._told(f"run {path}: its process {ending(status)}; it starts again in {wait:g} s")
                    self._changed.wait_for(lambda: self._stopping or self._run.stop, wait)
                    if self._stopping:
                        return
                    if not self._run.stop:
                        continue
                    state, reason = "stopped", ""
                self._metrics.end()
                self._queue.set(str(path), state, reason)
                self._changed.notify_all()
            self._told(f"run {path}: {state}" + (f": {reason}" if reason else ""))
            return

    def _process_of(self, files: RunFiles, door: Door) -> tuple[int, int]:
        """One process of a run: the rounds that it has done, and its exit status."""
        rounds = 0
        arguments = ["coordinator", "run", str(self.folder), str(files.path)]
        arguments += self._options
        near, far = socket.socketpair()
        arguments += ["--door", str(far.fileno())]
        with far, append_to(files.coordinator_log) as log, append_to(files.events) as events:
            with self._changed:
                if self._stopping or self._run.stop:
                    near.close()
                    return 0, 130
                process = spawn(
                    "cloister",
                    arguments,
                    os.environ,
                    output=subprocess.PIPE,
                    log=log,
                    inherited=(far.fileno(),),
                )
                far.close()
                door.serve(near)
                self._run.process = process
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                with suppress(EngineError):
                    event = from_json(line)
                    rounds += isinstance(event, RoundDone)
                    self._keep(event, line, events, files.events)
            status = process.wait()
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            process.stdout.close()
            with self._changed:
                self._run.process = None
        return rounds, status

    def _keep(self, event: Event, line: bytes, file: IO[bytes], path: Path) -> None:
        """Keep an event in the run's folder, and tell those who follow."""
        with on_disk(path):
            file.write(with_time(line))
            file.flush()
        self._metrics.take(event)
        with self._changed:
            self._run.last[type(event).__name__] = json.loads(line)
            self._run.lines += 1
            self._changed.notify_all()

    # Commands, each in a thread of its own.

    def _answer(self, request: Mapping[str, Any]) -> Answer:
        match request:
            case {"do": "submit", "run": str(run)}:
                yield from self._submit(Path(run))
            case {"do": "status"}:
                with self._changed:
                    runs = [asdict(entry) for entry in self._queue.entries()]
                    now = dict(self._run.last)
                yield {"runs": runs, "now": now, "sites": self._door.states(), "address": self._door.address}
            case {"do": "refresh"}:
                self._door.refresh()
                yield {"connected": self._door.connected()}
            case {"do": "waiting"}:
                waiting, failed = self._door.waiting()
                yield {"waiting": waiting, "failed": failed}
            case {"do": "compare", "name": str(name), "code": str(code)}:
                yield {"request": self._door.compare(name, code)}
            case {"do": "stop", "run": str(run)}:
                yield from self._stop(run)
            case {"do": "follow", "run": str(run)}:
                yield from self._follow(RunFiles(Path(run)))
            case _:
                raise EngineError("command", expected="one of this release of cloister")

    def _submit(self, path: Path) -> Answer:
        files, registry = RunFiles(path), Registry.open(self.folder)
        deployment = Deployment.read(files)
        check_deployable(read_plan(path), registry.version(deployment.version), files)
        with self._changed:
            if self._queue.state(str(path)) == "done":
                raise RunFolderError(str(path), expected="a run that is not finished")
            self._queue.add(str(path))
            self._changed.notify_all()
        yield {"submitted": str(path)}

    def _stop(self, run: str) -> Answer:
        with self._changed:
            state = self._queue.state(run)
            if state == "waiting":
                self._queue.set(run, "stopped")
            elif state == "running":
                self._run.stop = True
                _end(self._run.process)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue.state(run) != "running", _END_S + 5)
            else:
                raise EngineError(
                    "run", run, expected=f"one that runs or waits, and it is {state or 'not known here'}"
                )
            state = self._queue.state(run)
        yield {"state": state}

    def _follow(self, files: RunFiles) -> Answer:
        """All events of a run, those that are to come too, and at last its state."""
        if not self._queue.state(str(files.path)):
            raise RunFolderError(str(files.path), expected="a run that was submitted here")
        at = 0
        while True:
            with self._changed:
                entry = next(each for each in self._queue.entries() if each.run == str(files.path))
                seen = (self._run.lines, entry.state)
            lines, at = _lines_from(files.events, at)
            for line in lines:
                yield {"line": line}
            if entry.state in ("done", "failed", "stopped"):
                yield {"state": entry.state, "reason": entry.reason}
                return
            with self._changed:
                if (self._run.lines, self._queue.state(entry.run)) == seen:
                    self._changed.wait(_HEARTBEAT_S)
            yield {"alive": True}


def _lines_from(path: Path, at: int) -> tuple[list[str], int]:
    """The whole lines of a file from an offset on, and the offset after them."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            data = file.read()
    except FileNotFoundError:
        return [], at
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), at + len(whole)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Ask a process to end, and kill it when it does not."""
    if process is None or process.poll() is not None:
        return
    process.terminate()

    def kill() -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
