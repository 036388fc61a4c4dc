"""`cloister generate`: write text with the final model of a run.

Print a prompt and the text with which the final model of a finished run continues it. Of a sequence-to-sequence model
the prompt is the source, and what it writes is the target.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.options.shared_options import Parser
from cloister.protocol.errors import CloisterError, ModelError, RunFolderError
from cloister.server.record.folder import RunFiles, trained_plan


def options(parser: Parser) -> None:
    """Run folder, prompt, sampling."""
    parser.add_run()
    parser.value(
        "--prompt TEXT",
        "text to continue; of a model of chats what a user says, of sequence to sequence the source",
        required=True,
    )
    parser.value("--tokens N", "tokens to write", 200)
    parser.value("--temperature T", "sampling temperature; 0 always takes the most probable token", 0.8)
    parser.value("--seed N", "seed of the sampling", 0)


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation, the answer in a chat, or the target of a source."""
    if arguments.tokens < 1:
        raise CloisterError("--tokens", arguments.tokens, expected="1 or more")
    if not 0 <= arguments.temperature <= 100:
        raise CloisterError("--temperature", arguments.temperature, expected="from 0 to 100")
    if not 0 <= arguments.seed < 2**63:
        raise CloisterError("--seed", arguments.seed, expected="from 0 to 2^63 - 1")
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError:
        raise CloisterError("--prompt", arguments.prompt, expected="text in UTF-8") from None

    folder = Path(arguments.run)
    plan = trained_plan(folder)  # refuses a folder that holds no run
    if not plan.data.kind.writes:
        raise CloisterError(
            "data.task",
            plan.data.task,
            expected="a task whose model writes text",
            fix=f"see what it gives for a text: cloister predict {arguments.run}",
        )
    final, resume = RunFiles(folder).final, RunFiles(folder).resume_command()
    if not final.is_dir():
        raise RunFolderError(
            str(folder), expected="a finished run, with final/ in it", fix=f"finish it: {resume}"
        )
    from cloister.lm.model.own import know
    from cloister.lm.output.generate import generate

    know(plan)
    try:
        text = generate(
            final,
            arguments.prompt,
            chat=plan.data.format == "messages",
            max_new_tokens=arguments.tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
    except ModelError as error:
        if not error.field.startswith("model"):
            raise
        raise RunFolderError(str(final), expected=error.expected, fix=f"make it again: {resume}") from error
    print(text)
    return 0
