"""`cloister generate`: see what the model of a run learned."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from cloister.protocol.errors import CloisterError, RunFolderError
from cloister.server.folder import RunFiles, read_plan


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and what the final model makes of it."""
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
    read_plan(folder)
    if not RunFiles(folder).final.is_dir():
        raise RunFolderError(
            str(folder),
            expected="a finished run, with final/ in it",
            fix=f"finish it: cloister resume {shlex.quote(str(folder))}",
        )
    from cloister.lm.generate import generate

    print(
        generate(
            RunFiles(folder).final,
            arguments.prompt,
            max_new_tokens=arguments.tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
    )
    return 0
