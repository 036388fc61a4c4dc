"""`cloister compress`: write a smaller copy of the final model of a run, and show what it costs.

Write a smaller copy of the final model of a finished run, with its adapter merged, to a folder that from_pretrained of
transformers loads; then load it and show size, loss and speed before and after. It costs no privacy: it uses the
model, which is public in the sense of the guarantee, and public text.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from cloister.cli.options.shared_options import Parser
from cloister.cli.show.console import PipedConsole, columns
from cloister.cli.verbs.tokenizer import check_public
from cloister.lm.measures.figures import FIGURES
from cloister.lm.text.sources import overlap, places
from cloister.protocol.errors import CloisterError, DataError, ModelError
from cloister.protocol.machine.prerequisites import check_extra, size
from cloister.protocol.machine.storage import check_empty, write_folder
from cloister.protocol.plan.plan import AT_SITES, NO_EVALUATION, DataSection, Plan
from cloister.server.record.folder import RunFiles, trained_plan
from cloister.server.record.history import run_history
from cloister.simulations import given

if TYPE_CHECKING:
    from cloister.lm.output.compress import Measured
    from cloister.lm.text.sequences import Sequences

    Text: TypeAlias = tuple[str, str, DataSection]
    """Source, split, and what the records are."""


def options(parser: Parser) -> None:
    """Run folder, method, public text, target folder."""
    parser.add_run()
    method = parser.add_mutually_exclusive_group(required=True)
    parser.value(
        "--prune SHARE", "set this share of the weights of linear layers to zero", type=float, to=method
    )
    parser.flag("--int8", "store the weights in 8 bits (extra: compress)", to=method)
    parser.value(
        "--distil CONFIG",
        "train a smaller model to give the same distributions; CONFIG: JSON with the fields of the configuration "
        "that it changes, such as num_hidden_layers",
        to=method,
    )
    parser.value(
        "--text SOURCE",
        "public text: a file, a folder, a hub name or builtin:python-docs (default: the public records that the "
        "run evaluated, and with --distil the plan's public.source to learn from)",
    )
    parser.value("--steps N", "steps of --distil (default: 200)", type=int)
    parser.value("--out DIR", "folder to write, new or empty (default: compressed in RUN)")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Write the copy, and print the table."""
    _check_options(arguments)

    source = Path(arguments.run)
    plan, files = trained_plan(source), RunFiles(source)
    target = files.compressed if arguments.out is None else Path(arguments.out)
    check_empty(target, "--out", CloisterError)
    if plan.data.kind.writes != "continuation":
        raise CloisterError(
            "data.task",
            plan.data.task,
            expected="causal, choices or prefer: only a causal LM can be compressed",
            fix="export the model (cloister export)",
        )
    if arguments.text is not None:
        check_public(Path(arguments.text), "--text")
        check_other(plan, files, arguments.text)
    from cloister.lm.model.model import load_saved
    from cloister.lm.model.own import know
    from cloister.lm.output import compress
    from cloister.lm.output.export import write_model
    from cloister.server.record.outcome import outcome

    if arguments.int8:
        check_extra("torchao", "compress", ModelError, "--int8")
    know(plan)
    figures = outcome(files)  # refuses a run that is not finished
    measured_on, learned_from = _sources(plan, files, arguments)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".compress-", dir=target.parent) as work:
        model, made = Path(work) / "model", Path(work) / "made"
        adapted = plan.model.adapter.scheme != "full"
        write_model(files.final, model, model, plan.model, figures.params_sha256, merge=adapted)
        _, tokenizer = load_saved(model)
        train, held_out = _prepared(plan, tokenizer, measured_on)
        scored = held_out if measured_on[2].held_out else train
        if arguments.int8:
            compress.to_8_bits(model, made)
        elif learned_from is None:
            compress.prune(model, made, arguments.prune)
        else:
            if learned_from != measured_on:
                train, _ = _prepared(plan, tokenizer, learned_from)
            _distil(arguments, plan, model, made, train)
        before = compress.measure(model, scored, plan.local.batch_size)
        after = compress.measure(made, scored, plan.local.batch_size)

        def fill(staging: Path) -> None:
            for file in made.iterdir():
                file.rename(staging / file.name)

        write_folder(target, fill)
    _print(arguments, target, measured_on[0], before, after)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.prune is not None and not 0 < arguments.prune < 1:
        raise CloisterError("--prune", arguments.prune, expected="a share between 0 and 1")
    if arguments.steps is not None and arguments.distil is None:
        raise CloisterError("--steps", arguments.steps, expected="only with --distil")
    if arguments.steps is not None and arguments.steps < 1:
        raise CloisterError("--steps", arguments.steps, expected="1 or more")


def _prepared(plan: Plan, tokenizer: Any, text: Text) -> tuple[Sequences, Sequences]:
    """The sequences to learn from and the held-out ones of a text."""
    from cloister.lm.data.prepare import prepare
    from cloister.lm.text.corpus import corpus_records

    source, split, section = text
    section = section.model_copy(update={"owner": ""})  # a public text has none
    prepared = prepare(corpus_records(source, split=split).records, tokenizer, section, seed=plan.run.seed)
    return prepared.train, prepared.held_out


def _distil(
    arguments: argparse.Namespace, plan: Plan, model: Path, made: Path, learned_from: Sequences
) -> None:
    from cloister.lm.output import compress

    steps = 200 if arguments.steps is None else arguments.steps
    recipe = compress.Recipe(steps, plan.local.batch_size, plan.public.learning_rate, plan.run.seed)
    compress.distil(
        model, made, Path(arguments.distil), learned_from, recipe, progress=lambda step: _say(step, steps)
    )


def check_other(plan: Plan, files: RunFiles, text: str) -> None:
    """Check that text is not what the sites of a simulation with a privacy unit were given, as far as names show it,
    or the contents of records that a Python program gave.

    A file is compared by its name alone too: a relative path of the plan is one of the folder where the run began.

    Raises:
        DataError: it is.
    """

    if plan.privacy.unit == "none" or not run_history(files).simulated:
        return
    file = Path(text).expanduser()
    if file.resolve() == files.sites.public_records.resolve():
        return
    given.check_other(plan, files, text, "--text")
    private = any(overlap(text, each, "--text") for each in (plan.simulation.source, str(files.sites.path)))
    if file.exists():
        private |= Path(plan.simulation.source).name in (place.name for place in places(file, "--text"))
    if private:
        raise DataError(
            "--text",
            text,
            expected="public text: these are records of the sites, and a loss on them or a model that learns from them "
            "would be a release that no ledger was charged for",
        )


def _sources(plan: Plan, files: RunFiles, arguments: argparse.Namespace) -> tuple[Text, Text | None]:
    """What losses are measured on, and what a student learns from."""

    plain = DataSection(sequence_length=plan.data.sequence_length, held_out=0.0)
    if arguments.text is not None:
        if arguments.distil is None:
            return (arguments.text, "train", plain), None
        both = (arguments.text, "train", plain.model_copy(update={"held_out": 0.1}))
        return both, both
    source = files.evaluated_on(plan)
    if source in (AT_SITES, NO_EVALUATION):
        raise DataError("--text", expected="public text, because the run evaluated no public records")
    measured_on = (source, "train", plan.data.model_copy(update={"held_out": 0.0}))
    if arguments.distil is None:
        return measured_on, None
    if not plan.public.source:
        raise DataError("--text", expected="public text to learn from, because the plan has no public.source")
    return measured_on, (files.place(plan.public.source), plan.public.split, plain)


def _say(step: int, steps: int) -> None:
    if step % max(1, steps // 10) == 0:
        print(f"{step} of {steps} steps", file=sys.stderr)


def _print(arguments: argparse.Namespace, target: Path, text: str, before: Measured, after: Measured) -> None:

    if arguments.json:
        found = {"run": arguments.run, "folder": str(target), "text": text}
        facts = {name: asdict(each) for name, each in (("before", before), ("after", after))}
        print(json.dumps(found | {name: each | each.pop("figures") for name, each in facts.items()}))
        return

    table = columns("", "before", "after")
    both = (before, after)
    table.add_row("weights on disk", *(size(each.weight_bytes) for each in both))
    table.add_row("weights that are zero", *(f"{each.zeros:.1%}" for each in both))
    for figure in FIGURES:
        if figure.name in before.figures:
            table.add_row(figure.named("token"), *(figure.shown(each.figures[figure.name]) for each in both))
    table.add_row("tokens/s", *(f"{each.tokens_per_second:,.0f}" for each in both))
    console = PipedConsole()
    console.print(table)
    console.say(f"model   {target}\ntext    {text}")
