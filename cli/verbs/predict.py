"""`cloister predict`: what the final model of a run finds in a text.

Print what the final model of a finished run finds in a text: its class, its entities, or the words behind its mask
tokens. A model that writes text has `cloister generate`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cloister.cli.options.shared_options import Parser, tell
from cloister.protocol.errors import CloisterError, DataError, ModelError, RunFolderError
from cloister.server.record.folder import RunFiles, trained_plan


def options(parser: Parser) -> None:
    """Run folder, text."""
    parser.add_run()
    parser.value("--text TEXT", "text to read, of which no more is used than of a record", required=True)
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each thing that is found."""
    folder = Path(arguments.run)
    plan = trained_plan(folder)  # refuses a folder that holds no run
    final, resume = RunFiles(folder).final, RunFiles(folder).resume_command()
    if not final.is_dir():
        raise RunFolderError(
            str(folder), expected="a finished run, with final/ in it", fix=f"finish it: {resume}"
        )
    from cloister.lm.model.model import load_saved
    from cloister.lm.model.own import know
    from cloister.lm.tasks.registry import task_of

    know(plan)
    try:
        module, tokenizer = load_saved(final)
    except ModelError as error:
        raise RunFolderError(str(final), expected=error.expected, fix=f"make it again: {resume}") from error
    try:
        arguments.text.encode()
        found = task_of(plan.data).predicted(module.eval(), tokenizer, arguments.text)
    except (UnicodeEncodeError, DataError) as error:
        wanted = error.expected if isinstance(error, DataError) else "text in UTF-8"
        raise CloisterError("--text", arguments.text, expected=wanted) from None
    if found is None:
        raise CloisterError(
            "data.task",
            plan.data.task,
            expected="a task whose model finds something in a text: the model of this run writes text",
            fix=f"cloister generate {arguments.run}",
        )
    lines = ("  ".join(map(_shown, row.values())) for row in found)
    return tell(arguments, {"run": str(folder), "found": found}, "\n".join(lines))


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
