"""`cloister ask`: ask the sites of a federation on this machine a question, by one noised sum.

Ask the sites of a federation on this machine a question: a plan with a [question] (docs/questions.md). Each site sums a
bounded vector of each of its units and adds a part of the noise; only the noised sum over all sites is opened, and the
cost is charged before. `cloister plan check` prints the expected error before anything is spent. With a run folder, the
answer that is in it is printed again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cloister.cli.options.shared_options import Parser, chosen_plan
from cloister.cli.verbs.simulate import add_start, start, start_fields
from cloister.protocol.errors import PlanError, RunFolderError
from cloister.server.record.folder import RunFiles, read_answer, read_plan


def options(parser: Parser) -> None:
    """Plan, run folder, engine."""
    parser.add_plan(default="no plan: a question must be asked")
    add_start(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, or show the answer in a run folder."""
    if arguments.plan and RunFiles(Path(arguments.plan)).plan_file.is_file():
        return _show(RunFiles(Path(arguments.plan)), arguments)
    plan = chosen_plan(arguments, start_fields(arguments), default="")
    if plan.question is None:
        raise PlanError(
            "question",
            expected="a plan with a [question], or the run folder of one",
            fix="write a plan with a [question] (docs/questions.md), or train: cloister simulate",
        )
    return start(plan, arguments)


def _show(files: RunFiles, arguments: argparse.Namespace) -> int:
    """Print the answer of a finished question."""
    if read_plan(files.path).question is None:
        raise RunFolderError(
            str(files.path), expected="a run that asked a question; this one trained a model"
        )
    from cloister.cli.show.answer import print_answer
    from cloister.cli.show.console import PipedConsole
    from cloister.server.record.outcome import outcome

    outcome(files)  # refuses a run that is not finished
    if arguments.json:
        print(json.dumps(read_answer(files).to_json()))
    else:
        print_answer(PipedConsole(), files)
    return 0
