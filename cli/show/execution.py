"""Execute the plan of a run folder under a display; a failed run either leaves no folder or says how to continue.

A run that came to its end ends with exit code 0, whatever cannot be shown of it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from cloister.cli.show.console import PipedConsole
from cloister.cli.show.display import Absent, display_for
from cloister.protocol.errors import CloisterError, RunFolderError, StorageError
from cloister.server.record.folder import RunFolder
from cloister.server.record.history import reached
from cloister.server.record.journal import DONE
from cloister.server.record.progress import Event
from cloister.simulations.engines import fork_server
from cloister.simulations.engines.process import collect_rarely

if TYPE_CHECKING:
    from cloister.server.record.outcome import Outcome


def execute(folder: RunFolder, arguments: argparse.Namespace, *, new: bool) -> int:
    """Execute a folder's plan, show it, and print the outcome; returns the exit code.

    Args:
        folder: The run folder, new or with some rounds done.
        arguments: `workers`, `ray_address`, `json`, and of `resume` `per_site`, as the verb parsed them.
        new: Whether this command made the folder. A new run that is refused before its first round leaves no folder,
            unless the disk refused a write: then the run can be resumed.
    """
    console = PipedConsole(stderr=arguments.json)
    display = display_for(console, folder.plan, json_=arguments.json)
    started = time.monotonic()
    outcome: Outcome | None = None
    absent = Absent()

    def observe(event: Event) -> None:
        absent.event(event)
        display.event(event)

    try:
        with display:
            if arguments.ray_address is None:
                fork_server.start(folder.plan)
            from cloister.simulations.federation import simulate  # takes seconds, in which Ctrl-C may come

            collect_rarely()
            outcome = simulate(
                folder,
                observe,
                workers=arguments.workers,
                ray_address=arguments.ray_address,
                watch=display.watch,
            )
            seconds = time.monotonic() - started
            from cloister.cli.show.outcome import losses_of_sites, print_outcome, to_json

            if arguments.json:  # first, so that it depends on nothing that follows
                print(json.dumps(to_json(folder, outcome, absent, seconds=seconds)), flush=True)
            losses = None
            if folder.plan.simulation.per_site or getattr(arguments, "per_site", False):
                losses = losses_of_sites(console, folder, display, arguments.workers)
        if not arguments.json:
            print_outcome(console, folder, outcome, losses, absent)
    except KeyboardInterrupt:
        if outcome is None:
            _print_how_to_continue(console, folder)
        else:
            show = f"show its outcome with: {folder.resume_command()}"
            console.say(f"the run is finished, and its model is in {folder.final}; {show}", "yellow")
        raise
    except CloisterError as error:
        if not _begun(folder):
            if new and not isinstance(error, StorageError):
                folder.discard()
        elif not isinstance(error, RunFolderError):
            _print_how_to_continue(console, folder)
        raise
    return 0


def _begun(folder: RunFolder) -> bool:
    """Whether the folder holds results; a journal that cannot be read may list some."""

    try:
        return reached(folder, DONE)
    except RunFolderError:
        return True


def _print_how_to_continue(console: PipedConsole, folder: RunFolder) -> None:
    console.say(f"stopped; continue with: {folder.resume_command()}", "yellow")
