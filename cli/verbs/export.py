"""`cloister export`: write the final model of a run to a folder for others, with a model card.

Write the final model of a finished run to a folder that from_pretrained of transformers loads, or that of PEFT if the
run trained an adapter, with its tokenizer and a model card (README.md): data, training, evaluation, and what the run
may claim about privacy, as in its privacy report.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.options.shared_options import Parser, tell
from cloister.lm.measures.figures import FIGURES
from cloister.protocol.errors import CloisterError, ModelError, RunFolderError
from cloister.protocol.machine.storage import check_empty, write_bytes, write_folder
from cloister.server.record.folder import RunFiles, trained_plan
from cloister.server.record.history import run_history
from cloister.server.record.report import gather


def options(parser: Parser) -> None:
    """Run folder, target folder, merge."""
    parser.add_run()
    parser.value("folder DIR", "folder to write, new or empty")
    parser.flag("--merge", "add the adapter to its base, so that transformers alone loads the model")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, and print what it may claim and where it is."""

    source, target = Path(arguments.run), Path(arguments.folder)
    plan, files = trained_plan(source), RunFiles(source)
    check_empty(target, "DIR", CloisterError)
    from cloister.cli.show.card import claim, claim_facts, to_card
    from cloister.lm.model.own import know
    from cloister.lm.output.export import Form, base_licence, write_model
    from cloister.server.record.outcome import outcome

    know(plan)
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
            simulated=run_history(files).simulated,
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

    confusion, entities = figures.confusion, figures.entities
    facts = claim_facts(report) | {
        "run": str(source),
        "folder": str(target),
        "form": forms[0],
        "final_loss": figures.final_loss,
        **figures.values(FIGURES),
        "classification": None if confusion is None else confusion.to_json(plan.data.outcomes),
        "entities": None if entities is None else entities.to_json(plan.data.classes),
        "params_sha256": figures.params_sha256,
    }
    made = f"model   {target} ({forms[0]})\ncard    {target / 'README.md'}"
    return tell(arguments, facts, claim(report).sentence, made)
