"""`cloister report`: write what a run may claim about privacy, as a page to sign.

Write report.html and report.json: the privacy guarantee of a run in one sentence, or that there is none, with its
assumptions, its charges and what it does not cover. An unfinished run is reported up to its last round.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from cloister.cli.options.shared_options import Parser, tell
from cloister.privacy.report.report import verdict
from cloister.protocol.errors import CloisterError
from cloister.simulations.report import Report


def options(parser: Parser) -> None:
    """Run folder, output folder."""
    parser.add_run()
    parser.value("--output DIR", "folder to write to (default: the run folder)")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Write `report.html` and `report.json`, and print the claim and the paths."""
    folder = Path(arguments.run)
    output = folder if arguments.output is None else Path(arguments.output)
    if output.exists() and not output.is_dir() and output != folder:
        raise CloisterError("--output", str(output), expected="a folder, not a file")
    from cloister.cli.show.card import claim_facts

    told = Report.of(folder)
    page, data = told.write(output)
    report, claim = told.facts, verdict(told.facts)
    facts = claim_facts(report) | {
        "run": str(folder),
        "groups": {row.units: row.epsilon for row in report.groups} if claim.holds else None,
        "dataset": asdict(report.dataset) if claim.holds and report.dataset is not None else None,
        "html": str(page),
        "json": str(data),
    }
    lines = [*told.lines(), ""]
    if not report.ledger.verified:
        lines.append(f"ledger  {report.ledger.problem}")
    if report.dataset is not None and report.dataset.problem:
        lines.append(f"dataset {report.dataset.problem}")
    return tell(arguments, facts, *lines, f"report  {page}\n        {data}")
