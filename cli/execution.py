"""Execute the plan of a run folder under a display; a failed run either leaves no folder or says how to continue."""

from __future__ import annotations

import argparse
import json
import shlex
import time

from rich.console import Console
from rich.text import Text

from cloister.cli.console import PipedConsole
from cloister.cli.display import Display, LineDisplay, LiveDisplay
from cloister.protocol.errors import CloisterError, RunFolderError, StorageError
from cloister.server.folder import RunFolder
from cloister.server.journal import DONE
from cloister.simulations import fork_server


def execute(folder: RunFolder, arguments: argparse.Namespace, *, new: bool) -> int:
    """Execute a folder's plan, show it, and print the outcome; returns the exit code.

    Args:
        folder: The run folder, new or with some rounds done.
        arguments: `engine`, `workers` and `json`, as the verb parsed them.
        new: Whether this command made the folder. A new run that is refused before its first round leaves no folder,
            unless the disk refused a write: then the run can be resumed.
    """
    console = PipedConsole(stderr=arguments.json)
    live = console.is_terminal and not arguments.json
    display: Display = LiveDisplay(console, folder) if live else LineDisplay(console)
    started = time.monotonic()
    try:
        if arguments.engine == "local":
            fork_server.start(folder.plan)
        from cloister.simulations.federation import simulate  # takes seconds, in which Ctrl-C may come

        with display:
            outcome = simulate(
                folder, display.event, engine=arguments.engine, workers=arguments.workers, watch=display.watch
            )
    except KeyboardInterrupt:
        _print_how_to_continue(console, folder)
        raise
    except CloisterError as error:
        if not _begun(folder):
            if new and not isinstance(error, StorageError):
                folder.discard()
        elif not isinstance(error, RunFolderError):
            _print_how_to_continue(console, folder)
        raise
    from cloister.cli.outcome import print_outcome, to_json

    if arguments.json:
        print(json.dumps(to_json(folder, outcome, seconds=time.monotonic() - started)))
    else:
        print_outcome(console, folder, outcome)
    return 0


def _begun(folder: RunFolder) -> bool:
    """Whether the folder holds results; a journal that cannot be read may list some."""
    from cloister.server.history import reached

    try:
        return reached(folder, DONE)
    except RunFolderError:
        return True


def _print_how_to_continue(console: Console, folder: RunFolder) -> None:
    command = f"cloister resume {shlex.quote(str(folder.path))}"
    console.print(Text(f"stopped; continue with: {command}", style="yellow"), soft_wrap=True)
