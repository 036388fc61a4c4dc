"""The log of a process that stays, as JSON; and its last line, when it refuses to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloister.server.display import Absent
from cloister.server.record.progress import NotJoined, Preparing

WAIT_S = 120.0

PROGRAM = """
import logging, sys, warnings
from cloister.cli.verbs.logs import log_to_stderr
known = {"site": "a"}
log_to_stderr("json", known)
log = logging.getLogger("cloister")
log.info("first\\n%s", "\\u2028")
known["run"] = "r"
log.warning("second", extra={"site": "b", "round": 2, "attempt": 1})
warnings.warn("third")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("fourth")
logging.getLogger("httpx").info("not shown")
"""


def lines_of(*command: str) -> tuple[int, list[dict[str, object]]]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == ""
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_each_message_is_one_object_with_what_is_known() -> None:
    _, (first, second, third, fourth) = lines_of("-c", PROGRAM)
    assert str(first.pop("time")).endswith("+00:00")
    assert first == {"level": "INFO", "logger": "cloister", "message": "first\n\u2028", "site": "a"}
    about = {field: second.get(field) for field in ("run", "round", "attempt", "site", "level")}
    assert about == {"run": "r", "round": 2, "attempt": 1, "site": "b", "level": "WARNING"}
    assert "third" in str(third["message"])
    assert "ZeroDivisionError" in str(fourth["exception"])


@pytest.mark.slow
def test_a_refusal_to_start_is_logged_too(tmp_path: Path) -> None:
    start = (
        "-m",
        "cloister.cli.main",
        "coordinator",
        "start",
        str(tmp_path / "none"),
        "--log-format",
        "json",
    )
    code, (line,) = lines_of(*start)
    assert code == 2
    assert (line["level"], line["logger"]) == ("ERROR", "cloister")
    assert str(tmp_path / "none") in str(line["message"])


def test_a_site_that_joins_a_later_process_is_not_absent() -> None:
    """Before its answer is verified it has another name than its own."""
    absent = Absent()
    absent.event(NotJoined("node 1 (unverified name: a)", "ConsentError"))
    assert absent
    absent.event(Preparing("sites"))
    assert not absent
