"""`cloister tokenizer`: train a tokenizer on public text.

Train a tokenizer for a model with fresh weights (model.tokenizer).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloister.cli.options.shared_options import Parser, add_action, tell
from cloister.lm.text.sources import places
from cloister.protocol.errors import CloisterError, DataError
from cloister.protocol.machine.storage import check_empty, write_folder


def options(parser: Parser) -> None:
    """The action `train`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    train = add_action(actions, _train)
    train.value(
        "files FILE",
        "public text: .txt, .jsonl, .json, .csv, .parquet or .arrow files, folders of them, or builtin:python-docs",
        nargs="+",
    )
    train.value("--field NAME", "field of the text", "text")
    train.value("--kind", "algorithm", "bpe", choices=("bpe", "unigram"))
    train.value("--vocab N", "tokens, at least 258", 8192)
    train.value("--out DIR", "folder to write, new or empty", required=True)
    train.add_json()


def _train(arguments: argparse.Namespace) -> int:
    """Train a tokenizer on public text.

    The text may be of any language; the folder that is written is for model.tokenizer of a plan. Every byte is a token,
    so any text comes back whole. All parties get the tokenizer, and its vocabulary shows words of the text: train it on
    public text only.
    """
    target = Path(arguments.out)
    check_empty(target, "--out", CloisterError)
    for file in arguments.files:
        check_public(Path(file), "FILE")
    from cloister.lm.text.corpus import corpus_records
    from cloister.lm.text.tokenizer import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, train_tokenizer

    if not SMALLEST_VOCABULARY <= arguments.vocab <= LARGEST_VOCABULARY:
        expected = f"from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}"
        raise CloisterError("--vocab", arguments.vocab, expected=expected)
    count = {"records": 0, "characters": 0, "bytes": 0}

    def texts() -> Iterator[str]:
        for file in arguments.files:
            for record in corpus_records(file).records:
                text: Any = record.get(arguments.field)
                try:
                    size = len(text.encode()) if isinstance(text, str) else None
                except UnicodeEncodeError:  # JSON can name half of a surrogate pair
                    size = None
                if size is None:
                    raise DataError(f"{file}: field {arguments.field}", text, expected="text in each record")
                if text and not count["characters"]:
                    told = (
                        f"training a tokenizer of {arguments.vocab:,} tokens on {' '.join(arguments.files)}"
                    )
                    print(told, file=sys.stderr, flush=True)
                count["records"] += 1
                count["characters"] += len(text)
                count["bytes"] += size
                yield text

    trained = train_tokenizer(texts(), arguments.kind, arguments.vocab)
    write_folder(target, trained.save_pretrained)
    return tell(
        arguments,
        {"folder": str(target), "kind": arguments.kind, "vocabulary": len(trained), **count},
        f"{len(trained):,} tokens, from {count['characters']:,} characters of {count['records']:,} records",
        f"folder  {target}\nplan    model.tokenizer = {json.dumps(str(target))}",
    )


def check_public(file: Path, field: str) -> None:
    """Check that neither a file's name, nor a link on the way to it, nor its place is in a site's folder of records.

    Args:
        file: The file or folder; a name of something else is none.
        field: The option that named it.

    Raises:
        DataError: it does, or a link leads nowhere.
    """
    for place in places(file, field):
        if any((folder / "site.toml").exists() for folder in (place, *place.parents)):
            raise DataError(field, str(file), expected="public text, and this is in a site's folder")
