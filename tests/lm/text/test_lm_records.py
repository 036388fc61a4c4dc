"""Records are read exactly, and unreadable sources are refused in one line."""

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]  # it ships no types
import httpx
import pandas as pd
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
import pytest
from huggingface_hub import HfApi

from cloister.lm.text import records
from cloister.lm.text.records import Unusable, check_source, fingerprint, read_each, read_records
from cloister.protocol.errors import DataError
from cloister.tests.tools.raises import raises


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffhé\n\nllo\n".encode())
    assert list(read_records(str(file))) == [{"text": "hé\n\nllo\n"}]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "README.md").write_text("not data")
    assert [record["text"] for record in read_records(str(tmp_path))] == ["a", "b", "c"]


def test_one_by_one_the_same_records_are_read(tmp_path: Path) -> None:
    rows = [{"text": f"é{index}\u2028\n", "n": index} for index in range(50)]
    (tmp_path / "a.jsonl").write_text("\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes("\ufeffhé\r\nllo".encode())
    unusable = Unusable()
    for file in tmp_path.iterdir():
        assert list(read_each(str(file), unusable)) == list(read_records(str(file)))
    assert len(list(read_each(str(tmp_path), unusable))) == 101


def test_a_file_that_is_broken_as_a_whole_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is none")
    with raises(DataError, "data", says=("a.parquet", "readable parquet")):
        list(read_each(str(tmp_path), Unusable()))


@pytest.mark.parametrize(("more", "lost"), [([], 0), ([60], 0), ([40, 60, 60], 0), ([200], 31)])
def test_rows_that_arrow_does_not_decode_together_are_decoded_alone(
    more: list[int], lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's limit is 2 GiB of nested texts; here it is 100 characters. One row above it hides those of its group."""
    read = pq.ParquetFile.iter_batches

    def limited(table: pq.ParquetFile, **options: Any) -> Iterator[pa.RecordBatch]:
        for batch in read(table, **options):
            if sum(len(row["turns"][0]) for row in batch.to_pylist()) > 100:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented")
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", limited)
    sizes = [*[1] * 70, *more, *[1] * (200 - 70 - len(more))]
    rows = [{"n": number, "turns": ["x" * size]} for number, size in enumerate(sizes)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=101)
    unusable = Unusable()
    found = list(read_each(str(tmp_path), unusable))
    assert found == [*rows[:70], *rows[70 + lost :]]
    assert unusable.left_out.total() == lost


def test_a_parquet_file_that_is_damaged_after_its_first_rows_is_refused(tmp_path: Path) -> None:
    rows = [{"n": number, "text": f"{number:032}" * 4} for number in range(2000)]
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=1000)
    content, middle = bytearray(file.read_bytes()), pq.read_metadata(file).row_group(1).column(1)
    begin = middle.dictionary_page_offset or middle.data_page_offset
    content[begin : begin + 40] = bytes(40)
    file.write_bytes(content)
    with raises(DataError, "data", says=("a.parquet", "readable parquet")):
        list(read_each(str(file), Unusable()))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_matter_of_a_record(stop: type[BaseException]) -> None:
    def act() -> None:
        raise stop

    with pytest.raises(stop):
        Unusable().tried("stopped", act)


def test_the_first_record_that_cannot_be_used_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"text": "x"}\n\nno object\n7\n')
    unusable = Unusable()
    assert list(read_each(str(file), unusable)) == [{"text": "x"}]
    assert unusable.left_out == {"not readable": 2}
    assert unusable.places == {"not readable": f"{file}, line 4"}
    assert str(unusable.first).startswith(
        f"{file}, line 4 is 'no object': expected one JSON object (Expecting"
    )


def test_a_list_is_one_document_only_where_no_record_is_protected(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('\n [{"text": "x"},\n{"text": 1}]')
    assert list(read_each(str(file), Unusable(), documents=True)) == [{"text": "x"}, {"text": 1}]
    assert list(read_each(str(file), Unusable())) == []


def test_no_server_is_told_that_a_file_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx.Client, "send", lambda _client, request, **_: asked.append(str(request.url)))
    datasets.Dataset.from_list([{"text": "private"}]).to_parquet(tmp_path / "a.parquet")
    assert list(read_records(str(tmp_path / "a.parquet"))) == [{"text": "private"}]
    assert asked == []


LAST: dict[str, tuple[list[Any], Any]] = {
    "a part of a number": ([{"pid": 7}, {"pid": 8}], {"pid": 1000.5}),
    "no time": ([{"pid": "1910-01-02T00:00:00Z"}, {"pid": "1911-01-02"}], {"pid": "unknown"}),
    "text beside numbers": ([{"pid": 7}, {"pid": 2**70}], {"pid": "eight"}),
    "a field below": ([{"a": {"b": 1}}, {"a": {"b": 2}}], {"a": {"b": 2.5, "c": None}}),
    "a field of its own": ([{"pid": 7}, {"pid": 8}], {"pid": 9, "note": "x"}),
    "half a surrogate pair": ([{"text": "x"}, {"text": "y"}], {"text": "\ud800"}),
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "list.json"])
@pytest.mark.parametrize("case", LAST)
def test_no_record_of_json_decides_how_others_are_read(case: str, suffix: str, tmp_path: Path) -> None:
    rows, last = LAST[case]
    file, brackets = tmp_path / f"a.{suffix}", ("[", ",", "]") if suffix == "list.json" else ("", "", "")
    for written in (rows, [*rows, last]):
        text = f"{brackets[1]}\n".join(json.dumps(row) for row in written)
        file.write_text(f"{brackets[0]}{text}{brackets[2]}")
        read = list(read_records(str(file)))
        assert repr(read) == repr(written)  # `==` would not see that 7 reads as 7.0


def test_lines_of_a_folder_are_read_in_their_order(tmp_path: Path) -> None:
    rows = [{"n": index, "text": "é" * (index % 7)} for index in range(200)]
    for name, part in (("a.jsonl", rows[:70]), ("b.json", rows[70:71]), ("c.jsonl", rows[71:])):
        lines = (json.dumps(row, ensure_ascii=False) for row in part)
        (tmp_path / name).write_bytes("\r\n \n".join(["\ufeff" + next(lines), *lines]).encode())
    records = read_records(str(tmp_path))
    assert (len(records), list(records)) == (200, rows)


@pytest.mark.parametrize("name", ["odd [1]*.jsonl", "list.json", "table.parquet"])
def test_tables(name: str, tmp_path: Path) -> None:
    rows = [{"text": f"é{index}\u2028\n", "n": index} for index in range(50)]
    file = tmp_path / name
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    records = read_records(str(file))
    assert len(records) == 50
    assert records[7] == rows[7]
    assert list(records) == rows


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"text": "é"}\n'.encode())
    assert list(read_records(str(file))) == [{"text": "é"}]


def test_private_files_leave_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "global"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", elsewhere)
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"text": "secret"}]).to_parquet(file)
    assert list(read_records(str(file))) == [{"text": "secret"}]
    assert sorted(tmp_path.iterdir()) == [file]


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    for text in ("one", "two", "six"):
        datasets.Dataset.from_list([{"text": text}]).to_parquet(file)
        assert read_records(str(file))[0] == {"text": text}


@pytest.mark.parametrize(
    ("name", "content", "field", "says"),
    [
        ("a.jsonl", b"", "data", "at least one record"),
        ("a.jsonl", b"\n \n", "data", "at least one record"),
        (
            "a.jsonl",
            b'{"a": "x"}\n\n{"a": "y"\n{"a": "z"}\n',
            "a.jsonl, line 3",
            "Expecting",
        ),
        (
            "a.jsonl",
            b'{"a": "x"}\n{"a": "cut o',
            "a.jsonl, line 2",
            "Unterminated",
        ),
        ("a.jsonl", b'{"a": "x"}\n"y"\n', "a.jsonl, line 2", "'y'"),
        ("a.jsonl", b'{"a": "\xff"}\n', "a.jsonl, line 1", "one JSON object"),
        ("a.json", b'[\n{"a": "x"},\n{"a" "y"}\n]', "a.json, line 3", "a JSON list"),
        ("a.json", b'[{"a": "x"}, 3]', "a.json, record 2", "3"),
        ("a.json", b"[]", "data", "record"),
        ("a.parquet", b"PAR1 this is none", "data", "readable parquet"),
        ("a.txt", b"abc\xff", "data", ("UTF-8", "byte 3")),
        ("a.xml", b"a,b", "data", "ends in .txt, .jsonl"),
        ("a.csv", b"", "a.csv, line 1", "names of the fields"),
        ("a.csv", b"text,label,text\nx,y,z\n", "a.csv, line 1", "each once"),
        ("a.csv", b"text,label\n", "data", "at least one record"),
        ("a.csv", b'text,label\n"a\nb",1\nc,2,3\n', "a.csv, line 4", "2 values"),
        ("a.csv", b"text,label\na,1\n\xff,2\n", "a.csv, line 3", "UTF-8"),
        ("a.csv", b'text,label\n"a"b,1\n', "a.csv, line 2", "row of CSV"),
        ("a.csv", b'text,label\na,1\n"b,2\n', "a.csv, line 3", "row of CSV"),
        ("a.arrow", b"ARROW1 this is none", "data", "readable arrow"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(
    name: str, content: bytes, field: str, says: str | tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with raises(DataError, field, says=says) as refused:
        read_records(str(file))
    assert "\n" not in str(refused.value)


TEXTS = [
    "plain",
    'with "quotes", and, commas',
    "two\nlines\r\nand three",
    " spaces ",
    "日本語 \u2028 x",
    "a" * 200_000,
]


def test_csv_is_read_as_it_is_written(tmp_path: Path) -> None:
    rows = [{"text": text, "label": str(number)} for number, text in enumerate(TEXTS)]
    file = tmp_path / "a.csv"
    with open(file, "w", newline="", encoding="utf-8-sig") as lines:  # as spreadsheets write it
        writer = csv.DictWriter(lines, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows)
    assert list(read_records(str(file))) == rows
    pd.DataFrame(rows).to_csv(file, index=False)
    assert list(read_records(str(file))) == rows


def test_a_row_of_csv_decides_of_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among rows as RFC 4180 has them; its size, its bytes and its number of fields are its own."""
    monkeypatch.setattr(records, "LARGEST_RECORD", 400)
    good = [b"one,1\r\n", b'"two\nlines",2\r\n', b'"a ""word""",3\r\n']
    bad = [
        b"four,4,5\r\n",
        b"\xff,5\r\n",
        b"x" * 500 + b",6\r\n",
        b'"' + b"y" * 900 + b'",7\r\n',
        b"eight\r\n",
    ]
    file = tmp_path / "a.csv"
    expected = ["one", "two\nlines", 'a "word"']
    for others in itertools.chain.from_iterable(itertools.combinations(bad, n) for n in range(3)):
        mixed = [*good[:1], *others[:1], *good[1:2], *others[1:], *good[2:]]
        file.write_bytes(b"text,label\r\n" + b"".join(mixed))
        unusable = Unusable()
        assert [each["text"] for each in read_each(str(file), unusable)] == expected, others
        assert unusable.left_out.total() == len(others)


def test_arrow_is_read_as_datasets_saves_it(tmp_path: Path) -> None:
    rows = [{"text": text, "spans": [{"start": 0, "end": number}]} for number, text in enumerate(TEXTS)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert list(read_records(str(tmp_path / "saved"))) == rows
    # What was made of it later is beside it, in the same format.
    again = datasets.load_from_disk(str(tmp_path / "saved")).map(lambda row: {"text": row["text"].upper()})
    assert len(again) == len(rows)
    assert len(list((tmp_path / "saved").glob("*.arrow"))) == 2
    assert list(read_records(str(tmp_path / "saved"))) == rows
    (tmp_path / "saved" / "state.json").write_text("{}")
    with raises(DataError, "data", says="state.json"):
        read_records(str(tmp_path / "saved"))
    table = pa.Table.from_pylist(rows)
    for name, writer in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        file = tmp_path / f"{name}.arrow"
        with writer(str(file), table.schema) as out:
            out.write_table(table, max_chunksize=2)
        assert list(read_records(str(file))) == rows
        unusable = Unusable()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records, "LARGEST_RECORD", 400)
            assert list(read_each(str(file), unusable)) == rows[:-1]
        assert unusable.left_out.total() == 1


def test_a_folder_without_data_is_refused_and_one_may_mix_kinds(tmp_path: Path) -> None:
    with raises(DataError, "data", says="files that end in"):
        read_records(str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    assert list(read_records(str(tmp_path))) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    "missing", ["nothing.jsonl", "/nowhere/data", "./nowhere", "~/nowhere-at-all", "a/b/c"]
)
def test_a_missing_file_is_refused(missing: str) -> None:
    with raises(DataError, "data", says="existing file"):
        read_records(missing)


def test_without_a_hub_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def repo_info(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    for look in (read_records, check_source):
        with raises(DataError, "data", says=("no-such/data:en", "cannot be reached")):
            look("no-such/data:en")


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_what_the_system_does_not_let_be_read_is_refused(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{suffix}").symlink_to(tmp_path / "gone")
    with raises(DataError, "data", says=(f"a.{suffix}", "No such file")):
        read_records(str(tmp_path))


def test_a_folder_with_the_name_of_a_text_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with raises(DataError, "data", says="a file of text") as refused:
        read_records(str(tmp_path))
    assert "inf" not in str(refused.value).removeprefix(str(tmp_path))


def test_a_fingerprint_follows_the_content(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}')
    same = [fingerprint(str(file)), fingerprint(str(file))]
    prints = [same[0], fingerprint(str(file), split="test"), fingerprint(str(tmp_path))]
    file.write_text('{"text": "b"}')
    prints.append(fingerprint(str(file)))
    assert same[0] == same[1]
    assert len(set(prints)) == len(prints)
