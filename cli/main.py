"""The `cloister` command: find the verb, parse its options, run it; every refusal becomes one line and an exit code.

| code | meaning |
|---|---|
| 0 | done, also when the reader of the output closed its end of the pipe |
| 1 | `ledger verify`, `logs`: the chain is broken; `status --probe`: it is not well; `doctor`: a hop fails |
| 2 | refused: wrong usage, wrong input, or the system failed a call |
| 3 | `audit`: the claim is refuted |
| 4 | `site check`: the mesh suits the plan, but its devices are absent |
| 130 | interrupted by SIGINT or SIGTERM |

Only the module of the verb that is given is imported. It imports at its top nothing that takes seconds (torch,
transformers, Flower, gRPC), but inside its functions.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from cloister.cli.options.shared_options import Parser, said
from cloister.protocol.errors import CloisterError

VERBS = [
    "simulate", "resume", "tune", "ask",  # a federation on this machine
    "report", "generate", "predict", "export", "compress",  # what a finished run has made
    "tokenizer", "plan", "budget",  # before a run
    "site", "coordinator", "provision", "doctor",  # the parties of a deployment
    "up", "flower", "submit", "status", "track", "stop", "logs",  # runs of a deployment
    "ledger", "audit",  # privacy
]  # fmt: skip
"""The verbs in the order of `--help`; each is a module of `cli/verbs`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process); returns the exit code.

    Raises:
        SystemExit: after `--help` (0), or on wrong usage (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")  # a character that the terminal cannot encode ends no run
    words = sys.argv[1:] if argv is None else argv
    verb = next((word for word in words if not word.startswith("-") or word in ("-h", "--help")), "")
    arguments = argparse.Namespace(traceback=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # The imports of a verb take most of a second, in which Ctrl-C may come.
        parser = command_parser([verb]) if verb in VERBS else command_parser(options=False)
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            arguments.parser.error(f"unknown arguments: {' '.join(unknown)}")
        code = int(arguments.act(arguments))
        sys.stdout.flush()  # a write that fails must fail here, inside the try
        return code
    except CloisterError as error:
        if arguments.traceback:
            raise
        return _refuse(str(error), arguments)
    except KeyboardInterrupt:
        _say("interrupted", arguments)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. The interpreter flushes once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if arguments.traceback:
            raise
        if error.errno == errno.ENOSPC:
            return _refuse(
                f"disk is full ({error.filename or 'unknown file'}): free space, then run it again", arguments
            )
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error) or type(error).__name__
        return _refuse(f"{what}; --traceback before the verb shows which call failed", arguments)


def command_parser(names: Sequence[str] = VERBS, *, options: bool = True) -> argparse.ArgumentParser:
    """The parser of the whole command line, or of some of its verbs; its arguments have the verb's function, `act`.

    Args:
        names: The verbs.
        options: Import each verb's module for its options; otherwise only its help line is read.
    """
    parser = Parser(
        prog="cloister", description="Train language models across sites that may not share their data."
    )
    parser.flag("--traceback", "on an error, show the Python traceback")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name in names:
        if options:
            verb = import_module(f"cloister.cli.verbs.{name}")
            of_verb = verbs.add_parser(name, **said(verb.__doc__))
            of_verb.set_defaults(act=getattr(verb, "run", None))
            verb.options(of_verb)
        else:
            with open(
                os.path.join(os.path.dirname(__file__), "verbs", f"{name}.py"), encoding="utf-8"
            ) as file:
                verbs.add_parser(name, **said(file.read().split('"""', 2)[1]))
    return parser


def _refuse(line: str, arguments: argparse.Namespace) -> int:
    _say(" ".join(line.split()), arguments)
    return 2


def _say(line: str, arguments: argparse.Namespace) -> None:
    """Say why the command ends: as a line of text, or in the log of a process that stays (`cli/verbs/logs.py`)."""
    if getattr(arguments, "log_format", "text") == "json":
        import logging  # so that --help takes a tenth of a second

        logging.getLogger("cloister").error("%s", line)
    else:
        print(f"cloister: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
