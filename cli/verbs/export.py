"""`cloister export`: the final model of a run as a folder for others, with a model card."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.options.shared_options import add_json, add_run
from cloister.protocol.errors import CloisterError, ModelError, RunFolderError

if TYPE_CHECKING:
    from cloister.privacy.report.report import RunReport, Verdict
    from cloister.protocol.plan.plan import Plan
    from cloister.server.record.outcome import Outcome

HELP = "write the final model of a run to a folder for others, with a model card"


def options(parser: argparse.ArgumentParser) -> None:
    """Run folder, target folder, merge."""
    parser.description = (
        "Write the final model of a finished run to a folder that from_pretrained of transformers loads, or that of "
        "PEFT if the run trained an adapter, with its tokenizer and a model card (README.md): data, training, "
        "evaluation, and what the run may claim about privacy, as in its privacy report."
    )
    add_run(parser)
    parser.add_argument("folder", metavar="DIR", help="folder to write, new or empty")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add the adapter to its base, so that transformers alone loads the model",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, and print what it may claim and where it is."""
    from cloister.protocol.plan.soundness import recorded
    from cloister.server.record.folder import RunFiles, read_plan

    source, target = Path(arguments.run), Path(arguments.folder)
    plan, files = read_plan(source, recorded), RunFiles(source)
    check_new(target, "DIR")
    from cloister.cli.show.card import claim, to_card
    from cloister.lm.output.export import Form, base_licence, write_model
    from cloister.protocol.machine.storage import write_bytes, write_folder
    from cloister.server.record.outcome import outcome
    from cloister.server.record.report import gather

    report = gather(source)
    figures = outcome(files)  # refuses a run that is not finished
    licence = base_licence(plan.model)
    forms: list[Form] = []

    def fill(staging: Path) -> None:
        form = write_model(
            files.final, staging, target, plan.model, figures.params_sha256, merge=arguments.merge
        )
        card = to_card(
            report,
            plan,
            figures,
            form,
            simulated=files.sites.path.is_dir(),
            licence=licence,
            own_base=(staging / "base").is_dir(),
        )
        write_bytes(staging / "README.md", card.encode(), durable=False)
        forms.append(form)

    try:
        write_folder(target, fill)
    except ModelError as error:
        if error.field != "model":
            raise
        fix = f"move {files.final} away, and make it again: {files.resume_command()}"
        raise RunFolderError(str(files.final), expected=error.expected, fix=fix) from error
    found = claim(report)
    if arguments.json:
        made = {"run": str(source), "folder": str(target), "form": forms[0]}
        print(json.dumps(made | _facts(plan, found, report, figures)))
        return 0
    print(found.sentence)
    print(f"model   {target} ({forms[0]})\ncard    {target / 'README.md'}")
    return 0


def _facts(plan: Plan, found: Verdict, report: RunReport, figures: Outcome) -> dict[str, object]:
    """What the model may claim, and how good it is, as JSON."""
    from cloister.lm.tasks.figures import FIGURES

    confusion = figures.confusion
    return {
        "guarantee": found.holds,
        "sentence": found.sentence,
        "epsilon": report.epsilon if found.holds else None,
        "delta": report.delta if found.holds else None,
        "final_loss": figures.final_loss,
        **figures.values(FIGURES),
        "classification": None if confusion is None else confusion.to_json(plan.data.outcomes),
        "params_sha256": figures.params_sha256,
    }


def check_new(folder: Path, name: str) -> None:
    """Check that a folder does not exist, or is empty.

    Raises:
        CloisterError: it holds something, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CloisterError(name, str(folder), expected="a new or empty folder")
