"""A coordinator's process in a Python program: what `cloister coordinator start` runs.

Importing it costs nothing; a coordinator that is made imports gRPC.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cloister.protocol.machine.storage import own_files
from cloister.server.door.process import prepare


class Coordinator:
    """The coordinator of a federation: a door to which sites connect, and the queue of the runs that are submitted.

    It logs to the logger `cloister`. While it serves, only this user reads the files that this process makes. It sets
    gRPC's environment variables, so it is made before the program imports gRPC.

    Args:
        federation: The federation's folder.
        bind: HOST:PORT on which the door listens; empty: all interfaces, and the port of the federation's address.
        metrics: HOST:PORT on which metrics for Prometheus are served; empty: they are not.
        metrics_on_network: Whether that may be another address than one of loopback.
        log_format: How the processes of runs log: `text` or `json`.

    Raises:
        CloisterError: the folder is not that of a federation, a certificate is not valid, or another process serves it.
    """

    def __init__(
        self,
        federation: str | Path,
        *,
        bind: str = "",
        metrics: str = "",
        metrics_on_network: bool = False,
        log_format: str = "text",
    ) -> None:
        prepare()
        from cloister.server.federation import coordinator

        with own_files():
            self._coordinator = coordinator.Coordinator(
                Path(federation),
                logging.getLogger("cloister").info,
                bind=bind,
                metrics_bind=metrics,
                metrics_on_network=metrics_on_network,
                options=("--log-format", log_format),
            )

    def serve(self) -> None:
        """Serve until `stop` is called in another thread, or Ctrl-C; a run that runs goes on at the next start.

        Raises:
            EngineError: the door cannot listen there, or metrics cannot be served.
        """
        with own_files():
            try:
                self._coordinator.run()
            finally:
                self._coordinator.stop()

    def stop(self) -> None:
        """Let `serve` end."""
        self._coordinator.stop()
