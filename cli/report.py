"""`cloister report`: what a run may claim about privacy, as a page to read and sign and as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cloister.protocol.errors import CloisterError
from cloister.protocol.storage import write_bytes


def run(arguments: argparse.Namespace) -> int:
    """Write `report.html` and `report.json`, and print what the report claims and where it is."""
    folder = Path(arguments.run)
    output = folder if arguments.output is None else Path(arguments.output)
    if output.exists() and not output.is_dir():
        raise CloisterError("--output", str(output), expected="a folder, and this is a file")
    from cloister.privacy.page import to_html
    from cloister.privacy.report import to_json, verdict
    from cloister.server.folder import RunFiles
    from cloister.server.report import gather

    report = gather(folder)
    page, data = RunFiles(output).report_page, RunFiles(output).report_data
    write_bytes(data, to_json(report).encode())
    write_bytes(page, to_html(report).encode())
    claim = verdict(report)
    if arguments.json:
        facts = {
            "run": str(folder),
            "guarantee": claim.holds,
            "sentence": claim.sentence,
            "epsilon": report.epsilon if claim.holds else None,
            "delta": report.delta if claim.holds else None,
            "html": str(page),
            "json": str(data),
        }
        print(json.dumps(facts))
        return 0
    print(claim.sentence)
    if not report.ledger.verified:
        print(f"ledger  {report.ledger.problem}")
    print(f"report  {page}\n        {data}")
    return 0
