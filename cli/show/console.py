"""A console for standard output or standard error that survives a broken pipe; and the tables that verbs print."""

from __future__ import annotations

import os
from contextlib import suppress

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text


class PipedConsole(Console):
    """A console whose reader may close the pipe, as `head` does: later output is dropped, and the run continues."""

    def on_broken_pipe(self) -> None:
        """Drop all later output; rich would end the process."""
        self.quiet = True
        with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stream without a file descriptor
            os.dup2(nowhere.fileno(), self.file.fileno())  # a flush of what is buffered would fail again

    def say(self, line: str, style: str = "") -> None:
        """Print a line as it is: without markup, and not cut at the width of the terminal."""
        self.print(Text(line, style=style), soft_wrap=True)


def columns(*headings: str, title: str | None = None, left: int = 1) -> Table:
    """A table: its first `left` columns are words, the others are numbers. One without headings is a list of facts."""
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for index, heading in enumerate(headings):
        style = "cyan" if not index and not table.show_header else ""
        justify: JustifyMethod = "left" if index < left else "right"
        table.add_column(Text(heading), style=style, justify=justify, overflow="fold")
    return table
