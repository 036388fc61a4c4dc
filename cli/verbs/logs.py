"""`cloister logs`: print the audit log of a coordinator or a site, and verify it.

Print every join, refusal, release and charge, of a coordinator (the folder of its federation) or a site (its TOML
file), and verify the hash chain: exit code 1 if it does not verify. A coordinator and a site log to standard error
themselves, and the process of a run to coordinator.log in the run folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from cloister.cli.options.shared_options import Parser
from cloister.clients.setup.config import read_config
from cloister.protocol.errors import AuditLogError, RunFolderError
from cloister.protocol.identity.audit_log import FIRST, NAME, in_words, read_lines

FIELDS = ("run", "round", "attempt", "site")
"""What a message may be about: the identity of the run, and so on."""


def options(parser: Parser) -> None:
    """PATH, --lines, --json, --head."""
    parser.value("path PATH", "the folder of a federation, or a site's TOML file")
    parser.value("-n --lines N", "lines to print", 50)
    parser.flag("--json", "print the lines as JSON")
    parser.value("--head HEX", "a head noted earlier", "")


def run(arguments: argparse.Namespace) -> int:
    """Print the lines."""
    path = Path(arguments.path)
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
