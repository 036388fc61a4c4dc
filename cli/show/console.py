"""A console for standard output or standard error that survives a broken pipe."""

from __future__ import annotations

import os
from contextlib import suppress

from rich.console import Console


class PipedConsole(Console):
    """A console whose reader may close the pipe, as `head` does: later output is dropped, and the run continues."""

    def on_broken_pipe(self) -> None:
        """Drop all later output; rich would end the process."""
        self.quiet = True
        with suppress(OSError):  # a stream without a file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self.file.fileno())  # a flush of what is buffered would fail again
            finally:
                os.close(nowhere)
