"""The embedded corpora are in every Python, and an unknown one is refused with the nearest known."""

import ast
from pathlib import Path

import pytest

from cloister.lm.text.corpus import corpus_records
from cloister.protocol.errors import DataError
from cloister.tests.tools.raises import raises


def test_python_docs() -> None:
    corpus = corpus_records("builtin:python-docs")
    assert corpus.field == "topic"
    topics = [record["topic"] for record in corpus.records]
    assert len(topics) == len(set(topics)) > 60
    assert topics == sorted(topics)
    text = {record["topic"]: record["text"] for record in corpus.records}
    assert 'The "for" statement is used to iterate' in text["for"]
    assert sum(len(text) for text in text.values()) > 300_000


@pytest.mark.slow
def test_python_stdlib() -> None:
    corpus = corpus_records("builtin:python-stdlib")
    assert corpus.field == "package"
    by_path = {record["path"]: record for record in corpus.records}
    assert len(by_path) == len(corpus.records) > 500
    assert list(by_path) == [record["path"] for record in corpus_records("builtin:python-stdlib").records]
    assert by_path["asyncio/tasks.py"]["package"] == "asyncio"
    assert by_path["argparse.py"]["package"] == "argparse"
    assert not any({"tests", "site-packages", "idlelib"} & set(path.split("/")) for path in by_path)
    assert all(record["text"] for record in corpus.records)
    ast.parse(by_path["json/decoder.py"]["text"])


def test_other_sources_are_read_as_a_site_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("hello")
    corpus = corpus_records(str(file))
    assert [dict(record) for record in corpus.records] == [{"text": "hello"}]
    assert corpus.field == ""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("\none\n  more\n\n  two\n \t\n\n\nthree\n\n", ["one\n  more", "  two", "three"]),
        ("\n\none\n  two\nthree\u2028still three\n\n", ["one", "  two", "three\u2028still three"]),
    ],
)
def test_a_single_text_file_is_distributed_by_paragraphs_or_lines(
    text: str, parts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text)
    assert corpus_records(str(file)).records == [{"text": part} for part in parts]
    assert [record["text"] for record in corpus_records(str(tmp_path)).records] == [text]


@pytest.mark.parametrize(
    ("name", "nearest"), [("builtin:python-doc", "python-docs"), ("builtin:stdlib", "python-stdlib")]
)
def test_an_unknown_builtin_is_refused(name: str, nearest: str) -> None:
    with raises(DataError, "public.source", says=(f"'{name}'", f"mean builtin:{nearest}")):
        corpus_records(name, field="public.source")


@pytest.mark.slow
def test_python_passages_are_as_many_of_each_kind() -> None:
    corpus = corpus_records("builtin:python-passages")
    assert corpus.field == "label"
    of = {
        kind: [r["text"] for r in corpus.records if r["label"] == kind]
        for kind in ("manual", "docstring", "code")
    }
    sizes = {len(texts) for texts in of.values()}
    assert len(sizes) == 1
    assert 300 < sizes.pop() == len(corpus.records) / 3
    assert min(len(record["text"]) for record in corpus.records) >= 80
    assert sum(text.lstrip().startswith("def ") for text in of["code"]) == len(of["code"])
    topics = "\n".join(record["text"] for record in corpus_records("builtin:python-docs").records)
    assert all(text in topics for text in of["manual"][::100])
    assert not set(of["docstring"]) & set(of["manual"])


@pytest.mark.slow
def test_python_functions_are_taken_apart() -> None:
    corpus = corpus_records("builtin:python-functions")
    assert corpus.field == "package"
    assert len(corpus.records) > 1000
    for record in corpus.records:
        assert all(record[part].strip() for part in ("code", "signature", "summary", "statement", "package"))
        assert record["code"].startswith(record["signature"])
        assert record["statement"] in record["code"]
        assert "\n" not in record["summary"]
    simple = [
        record for record in corpus.records if '"""' not in record["code"] and "'" not in record["summary"]
    ]
    assert not any(record["summary"] in record["code"] for record in simple if len(record["summary"]) > 40)
