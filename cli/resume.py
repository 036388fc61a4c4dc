"""`cloister resume`: go on with a run that was stopped, killed or interrupted."""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.display import show_run
from cloister.server.folder import RunFolder


def run(arguments: argparse.Namespace) -> int:
    """Go on from the last round that was done."""
    with RunFolder.reopen(Path(arguments.run)) as folder:
        return show_run(folder, arguments, new=False)
