"""Records by name: an embedded corpus or a user's source, for simulated sites and public training.

The embedded corpora need no download. Each has natural groups that differ as sites do. Every Python has the language
reference by topic, the standard library's source by package, passages of both, for a classifier, by what they are, and
functions of the library in parts, by package; clinical notes by ward are made up (`notes.py`). Any other source is read
as a site reads its own data.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import math
import os
import re
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister.lm.text import notes
from cloister.lm.text.records import Record, Records, check_source, read_records
from cloister.protocol.errors import DataError, one_line
from cloister.protocol.plan.plan import GIVEN

_NOT_SOURCE = {
    "site-packages", "dist-packages",  # not the standard library
    "test", "tests", "idlelib", "turtledemo",  # tests and demonstrations
    "pydoc_data",  # the other embedded corpus
    "__pycache__",
}  # fmt: skip

_EVERY = 4
"""Of so many files of the library one gives passages: parsing all takes seconds."""
_SHORTEST = 80
"""Characters of the shortest passage."""


@dataclass(frozen=True)
class Corpus:
    """Records to distribute over sites, and the field that names their natural group."""

    records: Records
    """The records."""
    field: str = ""
    """Field with the group of a record; empty if the source has no such field."""


_BUILTIN = (
    "builtin:python-docs",
    "builtin:python-stdlib",
    "builtin:python-passages",
    "builtin:python-functions",
    "builtin:clinical-notes",
    "builtin:clinical-letters",
)


@contextmanager
def _of_field(field: str) -> Iterator[None]:
    """Let errors about a source as a whole name the field that has it."""
    try:
        yield
    except DataError as error:
        if error.field != "data":
            raise
        fix = (
            error.fix
            or f"set {field} to a .txt, .jsonl, .json, .csv, .parquet or .arrow file, a folder of them, or a hub name"
        )
        raise DataError.of(error, field, fix=fix) from error


def given_records(given: Any, field: str) -> Records:
    """Records as a Python program gives them, in memory.

    Args:
        given: A source as `corpus_records` reads it, mappings one by one, a table of pandas, Arrow or another library
            with Arrow's stream protocol, or a split of `datasets`. None of these libraries is imported for it.
        field: What errors call it.

    Raises:
        DataError: it cannot be read, a record is no mapping, or there is none.
    """
    if isinstance(given, str | os.PathLike):
        return corpus_records(os.fspath(given), field=field).records
    rows: list[Record]
    if hasattr(given, "itertuples"):
        # Of pandas, row by row: Arrow would make one type of a column of objects, so that a row changed others.
        found = given.itertuples(index=False, name=None)
        rows = [dict(zip(map(str, given.columns), map(_plain, row), strict=True)) for row in found]
    elif hasattr(given, "__arrow_c_stream__"):
        import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

        try:
            rows = pa.table(given).to_pylist()
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                field, expected=f"a table whose columns have one type each ({one_line(error)})"
            ) from error
    elif isinstance(given, Mapping) or not isinstance(given, Iterable):
        shown = type(given).__name__
        raise DataError(field, shown, expected="records one by one, a table, or one split of a data set")
    else:
        plain = getattr(given, "with_format", None)  # of `datasets`, without tensors in its rows
        rows = list(given if plain is None else plain(None))
    for number, record in enumerate(rows, 1):
        if not isinstance(record, Mapping):
            raise DataError(f"{field}, record {number}", record, expected="a mapping of fields to values")
    if not rows:
        raise DataError(field, expected="at least one record")
    return rows


def _plain(value: Any) -> Any:
    """A value of a DataFrame as Python has it; None where there is none."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and math.isnan(value)
    )
    return None if missing else value


def check_corpus(source: str, *, field: str, split: str = "train") -> None:
    """Check that `corpus_records` will find a source, without a look at any record; errors as `check_source`."""
    if source.startswith("builtin:"):
        _check_builtin(source, field)
        return
    _check_not_given(source, field)
    with _of_field(field):
        check_source(source, split=split)


def _check_not_given(source: str, field: str) -> None:
    if source.startswith(GIVEN):
        raise DataError(
            field,
            source,
            expected="a source that can be read; these records were given to cloister.simulate",
            fix="give them again, or go on with the run in whose folder they are",
        )


def _check_builtin(source: str, field: str) -> None:
    if source not in _BUILTIN:
        nearest = difflib.get_close_matches(source, _BUILTIN, n=1, cutoff=0)
        raise DataError(
            field, source, expected=f"one of {', '.join(_BUILTIN)}", fix=f"did you mean {nearest[0]}?"
        )


def corpus_records(source: str, *, field: str = "data", split: str = "train") -> Corpus:
    """Read one of the embedded corpora (`builtin:` names), or any source that `read_records` reads.

    A single `.txt` file would be one record, which cannot be divided among sites. Its records are its paragraphs, which
    end at blank lines, or its lines if it is one paragraph.

    Args:
        source: The source.
        field: What errors about the source as a whole call it, such as a field of the plan.
        split: As for `read_records`.

    Raises:
        DataError: the `builtin:` name is unknown, or as `read_records`.
    """
    if not source.startswith("builtin:"):
        _check_not_given(source, field)
        with _of_field(field):
            records = read_records(source, split=split)
            if Path(source).suffix == ".txt" and Path(source).expanduser().is_file():
                records = _paragraphs(records[0]["text"])
            if not len(records):
                raise DataError("data", source, expected="a text, but it has only white space")
        return Corpus(records)
    _check_builtin(source, field)
    made = (
        _python_docs,
        _python_stdlib,
        _python_passages,
        _python_functions,
        _clinical_notes,
        _clinical_letters,
    )
    return dict(zip(_BUILTIN, made, strict=True))[source]()


def _paragraphs(text: str) -> list[Record]:
    parts = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) == 1:
        parts = [line for line in text.split("\n") if line.strip()]
    return [{"text": part} for part in parts]


def _python_docs() -> Corpus:
    """The language reference as `help()` shows it: about 80 topics, 0.5 MB of English prose."""
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    return Corpus([{"text": text, "topic": topic} for topic, text in sorted(topics.items())], "topic")


def _python_stdlib(every: int = 1) -> Corpus:
    """The standard library's source without its tests: about 700 files, 11 MB, 200 packages and modules; or one of
    `every` so many files."""
    root = Path(sysconfig.get_path("stdlib"))
    records = []
    paths = [file.relative_to(root) for file in sorted(root.rglob("*.py"))]
    for path in [each for each in paths if not _NOT_SOURCE & set(each.parts)][::every]:
        with tokenize.open(root / path) as source:  # reads the encoding that the file declares
            text = source.read()
        if text:
            records.append({"text": text, "path": path.as_posix(), "package": path.with_suffix("").parts[0]})
    if not records:
        raise DataError("simulation.source", "builtin:python-stdlib", expected=f"Python source in {root}")
    return Corpus(records, "package")


def _python_passages() -> Corpus:
    """Passages with their kind as `label`, as many of each: a paragraph of the `manual`, the `docstring` of a function
    of the standard library, or the `code` of a function that has none; each of at least 80 characters."""
    texts = [str(record["text"]) for record in _python_docs().records]
    manual = [part["text"] for text in texts for part in _paragraphs(text)]
    docstrings, code = [], []
    for _, lines, node in _functions():
        docstring = ast.get_docstring(node)
        if docstring is None:
            code.append("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        else:
            docstrings.append(docstring)
    kinds = {
        name: [text for text in texts if len(text) >= _SHORTEST]
        for name, texts in (("manual", manual), ("docstring", docstrings), ("code", code))
    }
    each = min(map(len, kinds.values()))
    records = [
        {"text": text, "label": name}
        for name, texts in kinds.items()
        for text in (texts[index * len(texts) // each] for index in range(each))
    ]
    return Corpus(records, "label")


def _functions() -> Iterator[tuple[Record, list[str], ast.FunctionDef]]:
    """The functions of the standard library, each with the record of its file and the file's lines."""
    for record in _python_stdlib(_EVERY).records:
        lines = record["text"].splitlines()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the library's own strings
            module = ast.parse(record["text"])
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                yield record, lines, node


def _python_functions() -> Corpus:
    """Functions of the standard library that have a docstring and statements: the `code` without the docstring, the
    `signature` with which it begins, the `summary`, which is the first paragraph of the docstring in one line, the
    first `statement`, and the `package`."""
    records = []
    for record, lines, node in _functions():
        docstring = (ast.get_docstring(node) or "").strip()
        if not docstring or len(node.body) < 2:
            continue
        told, first = node.body[:2]
        signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : told.lineno - 1]))
        body = textwrap.dedent("\n".join(lines[first.lineno - 1 : node.end_lineno]))
        records.append(
            {
                "code": f"{signature}\n{textwrap.indent(body, '    ')}\n",
                "signature": f"{signature}\n",
                "summary": " ".join(docstring.partition("\n\n")[0].split()),
                "statement": body.partition("\n")[0],
                "package": record["package"],
            }
        )
    return Corpus(records, "package")


def _clinical_notes() -> Corpus:
    """Made-up notes of wards with their entities and patients: 8,000 of 3,200 patients."""
    return Corpus(notes.notes(), "ward")


def _clinical_letters() -> Corpus:
    """Made-up sentences of letters with entities of the same types, as a textbook has them: 2,000 records."""
    return Corpus(notes.letters())
