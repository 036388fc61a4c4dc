"""`cloister tokenizer`: train a tokenizer.

Train a tokenizer for a model with fresh weights (model.tokenizer).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cloister.cli.options.shared_options import Parser, add_action, tell
from cloister.lm.text.sources import places
from cloister.protocol.errors import CloisterError, DataError, RunFolderError
from cloister.protocol.machine.storage import check_empty, write_folder
from cloister.server.record.folder import RunFiles, read_answer


def options(parser: Parser) -> None:
    """The action `train`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    train = add_action(actions, _train)
    train.value(
        "files FILE",
        "public text: .txt, .jsonl, .json, .csv, .parquet or .arrow files, folders of them, or builtin:python-docs",
        nargs="*",
    )
    train.value(
        "--from-question RUN", "run folder of a vocabulary question, whose words are learned from", ""
    )
    train.value("--from-model RUN", "run folder of a private model, from which texts are sampled", "")
    train.value("--samples N", "texts that are sampled", 2000)
    train.value("--field NAME", "field of the text", "text")
    train.value("--kind", "algorithm", "bpe", choices=("bpe", "unigram"))
    train.value("--vocab N", "tokens, at least 258", 8192)
    train.value("--out DIR", "folder to write, new or empty", required=True)
    train.add_json()


def _train(arguments: argparse.Namespace) -> int:
    """Train a tokenizer on public text, on the words of a question, or on texts of a private model.

    The text may be of any language; the folder that is written is for model.tokenizer of a plan. Every byte is a token,
    so any text comes back whole. All parties get the tokenizer, and its vocabulary shows words of the text: train it on
    public text only, or on what a private question or a private model has told, which costs nothing more.
    """
    target = Path(arguments.out)
    check_empty(target, "--out", CloisterError)
    for file in arguments.files:
        check_public(Path(file), "FILE")
    if not (arguments.files or arguments.from_question or arguments.from_model):
        raise CloisterError("FILE", "", expected="text, --from-question or --from-model")
    if arguments.samples < 1:
        raise CloisterError("--samples", arguments.samples, expected="1 or more")
    from cloister.lm.text.tokenizer import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, train_tokenizer

    if not SMALLEST_VOCABULARY <= arguments.vocab <= LARGEST_VOCABULARY:
        expected = f"from {SMALLEST_VOCABULARY} to {LARGEST_VOCABULARY}"
        raise CloisterError("--vocab", arguments.vocab, expected=expected)
    sources: list[Iterator[str]] = []
    if arguments.from_question:
        sources.append(_words(arguments.from_question))
    if arguments.from_model:
        sources.append(_samples(arguments.from_model, arguments.samples))
    sources += (_texts(file, arguments.field) for file in arguments.files)
    count = {"records": 0, "characters": 0, "bytes": 0}

    def counted() -> Iterator[str]:
        for text in itertools.chain.from_iterable(sources):
            if text and not count["characters"]:
                of = filter(None, [arguments.from_question, arguments.from_model, *arguments.files])
                told = f"training a tokenizer of {arguments.vocab:,} tokens on {' '.join(of)}"
                print(told, file=sys.stderr, flush=True)
            count["records"] += 1
            count["characters"] += len(text)
            count["bytes"] += len(text.encode())
            yield text

    trained = train_tokenizer(counted(), arguments.kind, arguments.vocab)
    write_folder(target, trained.save_pretrained)
    return tell(
        arguments,
        {"folder": str(target), "kind": arguments.kind, "vocabulary": len(trained), **count},
        f"{len(trained):,} tokens, from {count['characters']:,} characters of {count['records']:,} texts",
        f"folder  {target}\nplan    model.tokenizer = {json.dumps(str(target))}",
    )


def _texts(file: str, field: str) -> Iterator[str]:
    """The texts of public records."""
    from cloister.lm.text.corpus import corpus_records

    for record in corpus_records(file).records:
        text: Any = record.get(field)
        try:
            size = len(text.encode()) if isinstance(text, str) else None
        except UnicodeEncodeError:  # JSON can name half of a surrogate pair
            size = None
        if size is None:
            raise DataError(f"{file}: field {field}", text, expected="text in each record")
        yield text


_LEARNED_WORDS = 2**22
"""Words that are learned from, about: those of a question weigh as a long text does, beside any public text."""


def _words(run: str) -> Iterator[str]:
    """The words of a vocabulary, each in proportion to its units."""
    from cloister.server.record.outcome import private_plan

    plan = private_plan(RunFiles(Path(run)))
    if plan.question is None or plan.question.kind != "vocabulary":
        raise RunFolderError(run, expected='the run of a question with question.kind = "vocabulary"')
    told = {each.name: each.value or 0.0 for each in read_answer(RunFiles(Path(run))).figures}
    if not told:
        raise RunFolderError(run, expected="an answer with words; in this one the noise hides all of them")
    scale = _LEARNED_WORDS / sum(told.values())
    for word, units in told.items():
        yield from itertools.repeat(word, max(1, round(units * scale)))


def _samples(run: str, count: int) -> Iterator[str]:
    """Texts of the model of a run."""
    from cloister.server.record.outcome import private_plan

    plan = private_plan(RunFiles(Path(run)))
    if plan.question is not None or not plan.data.kind.writes:
        raise RunFolderError(run, expected="the run of a model that writes text")
    from cloister.lm.model.own import know
    from cloister.lm.output.generate import samples

    know(plan)
    yield from samples(RunFiles(Path(run)).final, count)


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
