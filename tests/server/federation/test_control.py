"""How commands reach a coordinator's process: strangers and silent peers do not hold it up."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloister.protocol.errors import EngineError
from cloister.server.federation import control
from cloister.server.federation.control import Answer, Control, command
from cloister.tests.tools.raises import raises


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    def answer(request: object) -> Answer:
        yield {"asked": request}

    served = Control(tmp_path, answer)
    yield tmp_path
    served.close()


def port(folder: Path) -> int:
    found = json.loads((folder / "control.json").read_bytes())["port"]
    assert isinstance(found, int)
    return found


def test_silent_strangers_are_cut_and_then_a_command_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are answered at the same time; each sends a byte, so that none is idle."""
    monkeypatch.setattr(control, "_REQUEST_S", 1.0)
    with ExitStack() as opened:
        for _ in range(control._MOST + 8):
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port(folder)), 30))
            stranger.send(b"\0")
        assert list(command(folder, do="status")) == [{"asked": {"do": "status"}}]


def test_a_coordinator_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_SILENCE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "control.json").write_text(
            json.dumps({"port": silent.getsockname()[1], "key": "00" * 32})
        )
        with raises(EngineError, "coordinator", says="within 1 s"):
            list(command(tmp_path, do="status"))


def test_one_that_says_nothing_more_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_SILENCE_S", 1)
    over = threading.Event()

    def answer(_request: object) -> Answer:
        yield {"line": 1}
        over.wait(60)

    served = Control(tmp_path, answer)
    lines = command(tmp_path, do="follow")
    assert next(lines) == {"line": 1}
    with raises(EngineError, "coordinator", says="within 1 s"):
        next(lines)
    over.set()
    served.close()


def test_a_connection_that_ends_without_an_answer_is_one_line(tmp_path: Path) -> None:
    """As where the coordinator is stopped meanwhile."""

    def answer(_request: object) -> Answer:
        yield from ()

    served = Control(tmp_path, answer)
    with raises(EngineError, "coordinator", says=("goes on running", "cloister status")):
        list(command(tmp_path, do="stop"))
    served.close()


@pytest.mark.slow
def test_a_command_that_takes_no_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends: a terminal that was suspended while it follows a run holds nothing for longer."""
    monkeypatch.setattr(control, "_SILENCE_S", 1)
    ended = threading.Event()

    def answer(_request: object) -> Answer:
        try:
            while True:
                yield {"line": "x" * 2**16}
        finally:
            ended.set()

    served = Control(tmp_path, answer)
    lines = command(tmp_path, do="follow")
    next(lines)
    assert ended.wait(30)
    lines.close()  # type: ignore[attr-defined]  # a generator
    served.close()


def test_a_stranger_without_the_secret_is_refused(folder: Path) -> None:
    found = json.loads((folder / "control.json").read_bytes())
    assert (folder / "control.json").stat().st_mode & 0o777 == 0o600
    (folder / "control.json").write_text(json.dumps(found | {"key": os.urandom(32).hex()}))
    with raises(EngineError, "coordinator", says="this machine"):
        list(command(folder, do="status"))
