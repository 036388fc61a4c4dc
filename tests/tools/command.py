"""The command line as tests run it: in this process, with its output and exit code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from cloister.cli.main import main


def set_options(settings: Iterable[str]) -> list[str]:
    """The options of a command that set these keys."""
    return [part for setting in settings for part in ("--set", setting)]


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    code = main(list(arguments))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def done(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of a command that succeeds."""
    code, out, err = ran(capsys, *arguments)
    assert code == 0, err
    return out


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a command that succeeds: its last line."""
    answer = json.loads(done(capsys, *arguments, "--json").splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line of a command that is refused; progress may stand before it."""
    code, _, err = ran(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("cloister: ")
    return last


def lone_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that is refused before it does anything."""
    code, out, err = ran(capsys, *arguments)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("cloister: ")
    return line
