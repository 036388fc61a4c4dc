"""The privacy report of a run as a value that a notebook shows, and that is written as a page."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from cloister.privacy.report.page import to_html
from cloister.privacy.report.report import RunReport, to_json, verdict
from cloister.privacy.report.summary import plain
from cloister.protocol.machine.storage import write_bytes
from cloister.server.federation.deployment import check_newest
from cloister.server.record.folder import RunFiles
from cloister.server.record.report import gather


@dataclass(frozen=True)
class Report:
    """What may be claimed about the privacy of a run, at the time when it was read."""

    facts: RunReport
    """All figures."""

    @classmethod
    def of(cls, folder: Path) -> Report:
        """The report of the run in a folder; of an unfinished run up to its last round.

        Raises:
            RunFolderError: there is no run, or a record of it is damaged.
        """
        check_newest(RunFiles(folder))
        return cls(gather(folder))

    @property
    def epsilon(self) -> float | None:
        """Epsilon of the unit that is protected; None where the run claims no guarantee."""
        return self.facts.epsilon if verdict(self.facts).holds else None

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write `report.html` and `report.json` to a folder; returns both paths.

        Raises:
            StorageError: the disk refuses it.
        """
        files = RunFiles(folder)
        write_bytes(files.report_data, to_json(self.facts).encode())
        write_bytes(files.report_page, to_html(self.facts).encode())
        return files.report_page, files.report_data

    def lines(self) -> list[str]:
        """The claim, and what it means, for a terminal."""
        lines = [verdict(self.facts).sentence]
        for part in plain(self.facts):
            if part.lines:
                lines += [f"\n{part.title}", *(f"  {line}" for line in part.lines)]
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style does not reach the notebook."""
        page = html.escape(to_html(self.facts))
        return f'<iframe srcdoc="{page}" sandbox width="100%" height="600" style="border: 0"></iframe>'
