"""`cloister watch RUN`: a page on this machine that shows a run while it goes on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cloister.cli.shared_options import add_json, add_run
from cloister.protocol.errors import EngineError

HELP = "show a run as a page in the browser, which updates itself"


def options(parser: argparse.ArgumentParser) -> None:
    """RUN, --port, --json."""
    parser.description = (
        "Serve a page that shows a run: its plan in words, progress, loss, epsilon, sites, bytes, failures. It updates "
        "itself until Ctrl-C, can change nothing, and is served on 127.0.0.1 alone, to every user of this machine. For "
        "a run on another machine, forward the port: ssh -L PORT:127.0.0.1:PORT MACHINE."
    )
    add_run(parser)
    add_json(parser)
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port (default: one that is free)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until it is interrupted, which is its usual end: exit code 0."""
    if not 0 <= arguments.port < 2**16:
        raise EngineError("--port", arguments.port, expected="0 to 65535")
    from cloister.cli.page_server import PageServer
    from cloister.cli.run_page import content
    from cloister.cli.view import Watched

    watched = Watched(Path(arguments.run))
    try:
        server = PageServer(arguments.port, lambda: content(watched.view()))
    except OSError as error:
        raise EngineError(
            "--port", arguments.port, expected=f"a free port ({error.strerror})", fix="leave it out"
        ) from error
    with server:
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            words = f"{address} shows {arguments.run} until Ctrl-C"
            print(json.dumps({"address": address}) if arguments.json else words, flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            pass
    return 0
