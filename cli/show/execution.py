"""Execute the plan of a run folder under a display, and print its outcome.

A run that came to its end ends with exit code 0, whatever cannot be shown of it.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from cloister.cli.show.console import PipedConsole
from cloister.protocol.errors import CloisterError
from cloister.server.display import display_for
from cloister.server.record.folder import RunFolder
from cloister.simulations import run

if TYPE_CHECKING:
    from cloister.server.record.outcome import Outcome


def execute(folder: RunFolder, arguments: argparse.Namespace, *, new: bool) -> int:
    """Execute a folder's plan, show it, and print the outcome; returns the exit code.

    Args:
        folder: The run folder, new or with some rounds done.
        arguments: `workers`, `ray_address`, `json`, and of `resume` `per_site`, as the verb parsed them.
        new: Whether this command made the folder.
    """
    console = PipedConsole(stderr=arguments.json)
    display = display_for(console, folder.plan, json_=arguments.json)
    started = time.monotonic()
    outcome: Outcome | None = None
    try:
        with display:
            outcome = run.execute(
                folder,
                display,
                workers=arguments.workers,
                ray_address=arguments.ray_address,
                new=new,
                again=folder.resume_command(),
            )
            seconds = time.monotonic() - started
            from cloister.cli.show.outcome import losses_of_sites, print_outcome, to_json

            if arguments.json:  # first, so that it depends on nothing that follows
                facts = to_json(folder, outcome, display.absent, seconds=seconds)
                print(json.dumps(facts), flush=True)
            losses = None
            if folder.plan.simulation.per_site or getattr(arguments, "per_site", False):
                losses = losses_of_sites(console, folder, display, arguments.workers)
        if not arguments.json:
            print_outcome(console, folder, outcome, losses, display.absent)
    except (CloisterError, KeyboardInterrupt) as stopped:
        for note in getattr(stopped, "__notes__", ()):
            console.say(note, "yellow")
        if outcome is not None and isinstance(stopped, KeyboardInterrupt):
            show = f"show its outcome with: {folder.resume_command()}"
            console.say(f"the run is finished, and its model is in {folder.final}; {show}", "yellow")
        raise
    return 0
