"""The rows of tables: CSV, Parquet and Arrow files. No row decides how another is read.

A CSV file is read as RFC 4180 has it, by Python's reader: the first line names the fields, all values are text, and a
text in quotes may have several lines. It is not for `datasets` or Arrow, which infer a type of a column from its rows.
A row with a quote too many takes rows after it with it, up to the next such row.
"""

from __future__ import annotations

import codecs
import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types

from cloister.protocol.errors import DataError, one_line

Row: TypeAlias = tuple[str, Callable[[], Mapping[str, Any]]]
"""Where in the file it is, and what reads it; that raises if the row cannot be read."""

_AT_ONCE = 64  # rows of a Parquet file that are decoded at a time


def csv_rows(file: Path, largest: int) -> Iterator[Row]:
    """The rows of a CSV file in UTF-8 that are not blank.

    Args:
        file: The file.
        largest: Most bytes of a row that can be read.

    Raises:
        DataError: the file cannot be read, or its first line does not name the fields, each once.
    """
    # The limit is the process's. Python's is 131,072 characters a field, below that of a long note.
    csv.field_size_limit(max(csv.field_size_limit(), largest))
    try:
        with open(file, "rb") as lines:
            rows = _csv_lines(lines.readline, largest)
            number, first = next(rows, (1, b""))
            fields = _header(f"{file}, line {number}", first, largest)
            for number, row in rows:
                if row.strip():
                    place = f"line {number}"
                    yield place, partial(_csv_row, f"{file}, {place}", fields, row, largest)
    except OSError as error:
        raise _unreadable(file, "csv", error) from error


def _csv_lines(readline: Callable[[int], bytes], largest: int) -> Iterator[tuple[int, bytes]]:
    """The line on which each row begins, and the row: a row ends with a line before whose end there are no quotes or an
    even number. Of a row above the limit no more than that and a line is kept."""
    number, begin, row, inside = 1, 1, bytearray(), False
    while line := readline(largest + 1):
        inside ^= bool(line.count(b'"') % 2)
        if len(row) <= largest:
            row += line
        number += line.endswith(b"\n")
        if line.endswith(b"\n") and not inside:
            yield begin, bytes(row)
            begin = number
            row.clear()
    if row:
        yield begin, bytes(row)


def _header(place: str, row: bytes, largest: int) -> list[str]:
    """The names of the fields."""
    fields = _values(place, row.removeprefix(codecs.BOM_UTF8), largest)
    twice = [name for name, count in Counter(fields).items() if count > 1 or not name.strip()]
    if not fields or twice:
        raise DataError(place, twice[0] if twice else "", expected="the names of the fields, each once")
    return fields


def _csv_row(place: str, fields: list[str], row: bytes, largest: int) -> Mapping[str, str]:
    values = _values(place, row, largest)
    if len(values) != len(fields):
        raise DataError(place, len(values), expected=f"{len(fields)} values, as the first line names fields")
    return dict(zip(fields, values, strict=True))


def _values(place: str, row: bytes, largest: int) -> list[str]:
    """The values of one row."""
    if len(row) > largest:
        raise DataError(place, expected=f"a row of at most {largest} bytes")
    try:
        return next(csv.reader([row.decode()], strict=True), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(place, expected=f"a row of CSV in UTF-8 ({one_line(error)})") from error


def parquet_rows(file: Path, largest: int) -> Iterator[Row]:
    """The rows of a Parquet file; arguments and errors as for `csv_rows`."""
    try:
        with pq.ParquetFile(file) as table:
            groups = (_group_rows(table, group) for group in range(table.num_row_groups))
            for number, row in enumerate(itertools.chain.from_iterable(groups), start=1):
                place = f"record {number}"
                yield place, partial(_arrow_row, f"{file}, {place}", row, largest)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, "parquet", error) from error


def _group_rows(table: pq.ParquetFile, group: int) -> Iterator[pa.RecordBatch | pa.ArrowException]:
    """The rows of a row group, each as a batch of one, or as the reason why it cannot be decoded.

    Rows are decoded `_AT_ONCE` at a time. Arrow refuses several rows whose nested texts have more than 2 GiB together,
    which each of them alone has not: the rest is then decoded one by one. After a row that it refuses alone, a reader
    cannot go on, since its columns may stand at different rows: the later rows of the group are not readable either.
    """
    done, count = 0, table.metadata.row_group(group).num_rows
    try:
        for batch in table.iter_batches(batch_size=_AT_ONCE, row_groups=[group]):
            for index in range(batch.num_rows):
                done += 1
                yield batch.slice(index, 1)
    except OSError:
        raise  # the file is damaged, whatever its rows are
    except pa.ArrowException as together:
        reason = together
    else:
        return
    try:
        for row in itertools.islice(table.iter_batches(batch_size=1, row_groups=[group]), done, None):
            done += 1
            yield row
    except OSError:
        raise
    except pa.ArrowException as alone:
        reason = alone
    for _ in range(done, count):
        yield reason


def arrow_rows(file: Path, largest: int) -> Iterator[Row]:
    """The rows of an Arrow file, in the format of files or of streams; arguments and errors as for `csv_rows`."""
    try:
        with pa.memory_map(str(file)) as source:
            number = 0
            for batch in _batches(source):
                for index in range(batch.num_rows):
                    number += 1
                    place = f"record {number}"
                    yield place, partial(_arrow_row, f"{file}, {place}", batch.slice(index, 1), largest)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file, "arrow", error) from error


def _batches(source: Any) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file, each when its turn has come."""
    try:
        table = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # no file ends like this: a stream, which `datasets` writes
        source.seek(0)
        yield from pa.ipc.open_stream(source)
        return
    for number in range(table.num_record_batches):
        yield table.get_batch(number)


def _arrow_row(place: str, row: pa.RecordBatch | pa.ArrowException, largest: int) -> Mapping[str, Any]:
    """The row; its size is that of its own values, as `row.nbytes` counts what rows share."""
    try:
        if isinstance(row, pa.ArrowException):
            raise row
        found: Mapping[str, Any] = row.to_pylist()[0]
    except (pa.ArrowException, ValueError) as error:
        raise DataError(place, expected=f"a row that can be decoded ({one_line(error)})") from error
    if (size := _bytes(found)) > largest:
        raise DataError(place, size, expected=f"a row of at most {largest} bytes")
    return found


def _bytes(value: Any) -> int:
    """Bytes of a row's value, 8 for each number."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_bytes(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 8


def _unreadable(file: Path, kind: str, error: Exception) -> DataError:
    reason = str(error).strip().partition("\n")[0]
    return DataError("data", str(file), expected=f"readable {kind} records ({reason})")


ROWS: Mapping[str, Callable[[Path, int], Iterator[Row]]] = {
    "csv": csv_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
}
"""What reads the rows of a kind of table."""
