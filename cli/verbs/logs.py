"""`cloister logs`: print the events of a run, or the audit log of a coordinator or a site.

Print the last events of a deployed run, for the run folder. With --audit: every join, refusal, release and charge, of a
coordinator (the folder of its federation) or a site (its TOML file). A coordinator and a site log to their standard
error themselves.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from cloister.cli.options.shared_options import Parser
from cloister.cli.show.display import describe
from cloister.clients.setup.config import read_config
from cloister.protocol.errors import AuditLogError, EngineError, RunFolderError
from cloister.protocol.identity.audit_log import FIRST, NAME, in_words, read_lines
from cloister.server.record.events import from_json
from cloister.server.record.folder import RunFiles

FIELDS = ("run", "round", "attempt", "site")
"""What a message may be about: the identity of the run, and so on."""
_LOOK_S = 0.5
"""Seconds between two looks at a file that is followed."""


def options(parser: Parser) -> None:
    """PATH, --lines, --follow, --json."""
    parser.value("path PATH", "a run folder; with --audit: the folder of a federation, or a site's TOML file")
    parser.value("-n --lines N", "lines to print", 50)
    parser.flag("-f --follow", "go on printing until Ctrl-C")
    parser.flag("--json", "print the events of a run, or the audit log, as JSON")
    parser.flag(
        "--audit",
        "print the audit log of a coordinator or a site instead, and verify its hash chain: exit code 1 if it "
        "does not verify",
    )
    parser.value("--head HEX", "with --audit: a head noted earlier", "")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    path = Path(arguments.path)
    if arguments.audit:
        return _audit(path, arguments)

    file = RunFiles(path).events
    if not file.exists():
        raise RunFolderError(
            str(path),
            expected="the folder of a run that has events",
            fix="a coordinator and a site log to their standard error: see journalctl, or the logs of the container",
        )
    for line in _lines(file, arguments.lines, follow=arguments.follow):
        shown = line if arguments.json else _in_words(line)
        if shown:
            print(shown, flush=True)
    return 0


def log_to_stderr(form: str, known: Mapping[str, object]) -> None:
    """Log to standard error, as a process that stays does.

    Args:
        form: `text`: one line for each message with its time; `json`: one JSON object, with the fields `time`, `level`,
            `logger` and `message`, and of `run`, `round`, `attempt` and `site` those that are known.
        known: What is known of them in the whole process; it may change. A message's own (`extra`) comes first.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    handler.setFormatter(_Json(known) if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(form == "json")
    for noisy in ("httpx", "httpcore", "flwr", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Json(logging.Formatter):
    """A message as one JSON object."""

    def __init__(self, known: Mapping[str, object]) -> None:
        super().__init__()
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= self._known
        line |= {field: getattr(record, field) for field in FIELDS if hasattr(record, field)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _audit(path: Path, arguments: argparse.Namespace) -> int:
    """Print an audit log, and verify it."""

    if path.is_dir():
        path /= NAME
    elif path.suffix == ".toml":
        path = read_config(path).folder / NAME
    try:
        lines = read_lines(path, arguments.head)
    except FileNotFoundError:
        raise RunFolderError(str(path), expected="an audit log, and nothing has been logged") from None
    except AuditLogError as error:
        if arguments.traceback:
            raise
        print(f"cloister: {error}", file=sys.stderr)
        return 1
    shown = lines[-arguments.lines :] if arguments.lines else ()
    for text in (line.text() for line in shown) if arguments.json else in_words(shown):
        print(text)
    head = lines[-1].hash if lines else FIRST.hex()
    print(f"ok: the hash chain of {len(lines)} lines verifies; head {head}", file=sys.stderr)
    return 0


def _lines(path: Path, last: int, *, follow: bool) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=last):
            yield line.rstrip("\n")
        while follow:
            line = file.readline()
            if line:
                yield line.rstrip("\n")
            else:
                time.sleep(_LOOK_S)  # not an event: a file does not tell that it has grown


def _in_words(line: str) -> str:
    """An event as a person reads it; empty for those that are too frequent."""

    try:
        at = json.loads(line).get("at", "")
        words = describe(from_json(line))
    except (ValueError, AttributeError, EngineError):  # of another release
        return line
    return f"{at}  {words}" if words else ""
