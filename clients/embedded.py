"""A site's process in a Python program: what `cloister site start` runs.

Importing it costs nothing; a site that is made imports torch, transformers and gRPC.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cloister.protocol.errors import CloisterError
from cloister.protocol.machine.storage import own_files

_log = logging.getLogger("cloister")


class Site:
    """A site that is installed, from its TOML.

    It logs to the logger `cloister`. While it is set up and serves, only this user reads the files that this process
    makes.

    Args:
        config: The site's TOML.

    Raises:
        CloisterError: the site is not set up, or another process serves it.
    """

    def __init__(self, config: str | Path) -> None:
        from cloister.clients.deployed import DeployedSite
        from cloister.clients.setup.config import read_config

        path = Path(config)
        read = read_config(path)
        close_folder(read.folder)
        self.name = read.name
        """Its name."""
        for problem in _open_settings(read.data, read.policy):
            _log.warning("the site can join no run yet: %s", problem)
        with own_files():
            self._site = DeployedSite(path)
        self._stopped = threading.Event()

    def serve(self) -> bool:
        """Connect to the coordinator, and take part in its runs, until `stop` is called in another thread, or Ctrl-C.

        Returns:
            Whether nothing is left at work: a training that goes on is begun again when the site is back.

        Raises:
            EngineError: the site is at the door no more, by a defect.
        """
        with own_files():
            return self._site.run(self._stopped)

    def stop(self) -> None:
        """Let `serve` end."""
        self._stopped.set()


def close_folder(state: Path) -> None:
    """Close a site's state folder, which may hold records, to others, if it is this user's."""
    with suppress(OSError):
        if state.stat().st_uid == os.geteuid():
            state.chmod(0o700)


def _open_settings(data: str, policy: str) -> Iterator[str]:
    """What the site cannot join a run with; each may be set while it runs."""
    from cloister.privacy.ledger.policy import load_policy

    path = Path(data)
    if (path.is_absolute() or path.suffix) and not path.exists():
        yield f"data is {data!r}, which does not exist beside site.toml"
    try:
        if policy:
            load_policy(Path(policy))
    except CloisterError as error:
        yield str(error)
