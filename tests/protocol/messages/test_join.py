"""No single record decides what a site answers: the join reads none, and a training leaves out what it cannot use."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it ships no types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.span import manifest_of
from cloister.cli.main import main
from cloister.clients.consent.spending import Spending
from cloister.clients.network.serve import answered
from cloister.clients.site import Site
from cloister.clients.state.attempt import Attempts
from cloister.clients.state.kept import Written
from cloister.lm.data.prepare import Prepared
from cloister.lm.data.store import load_prepared
from cloister.lm.text import examples, records
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.protocol.errors import DataError, ModelError
from cloister.protocol.messages.messages import NOTHING_CARRIED, Contribution, Failed, Inbox, Joined, Request
from cloister.protocol.messages.wire import decode_reply, encode, view
from cloister.tests.parties.federation import (
    CENTRAL,
    PRIVATE,
    RECORD,
    SKELLAM,
    Federation,
    changed,
    tiny,
    whole,
)
from cloister.tests.tools.command import set_options
from cloister.tests.tools.overheard import Overheard
from cloister.tests.tools.raises import raises

OWNER = [
    *PRIVATE,
    "aggregation.secure=false",
    "privacy.unit=owner",
    "data.owner=patient",
    "privacy.sampling_rate=0.5",
]
UNITS = pytest.mark.parametrize("unit", [RECORD, OWNER, CENTRAL], ids=["record", "owner", "site"])

TEMPLATE = """{%- macro again(n) %}{{ again(n + 1) }}{% endmacro -%}
{%- for m in messages %}
    {%- if 'Alice' in m.content %}{{ raise_exception('no such name') }}{% endif %}
    {%- if 'adds' in m.content %}{{ m.content + 1 }}{% endif %}
    {%- if 'recurs' in m.content %}{{ again(0) }}{% endif %}
    {{- m.role + '\\n' + ('' if 'vanishes' in m.content else m.content) + '<|end|>' }}
{%- endfor %}"""
"""It looks for what a record says, and fails in several ways."""

VALID: list[dict[str, object]] = [
    {
        "patient": f"p{number % 3}",
        "text": f"patient {number} was seen on day {number * 7}",
        "prompt": f"who is {number}? ",
        "completion": f"patient {number}",
        "messages": [
            {"role": "user", "content": f"who is {number}?"},
            {"role": "assistant", "content": f"patient {number}"},
        ],
    }
    for number in range(6)
]


EVENTS = ("open", "os.listdir", "os.scandir")


class Opened:
    """The paths that this process opens or lists while it is watched; an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.watched: list[str] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watched is not None and event in EVENTS and arguments:
            self.watched.append(str(arguments[0]))

    @contextmanager
    def during(self) -> Iterator[list[str]]:
        found: list[str] = []
        self.watched = found
        try:
            yield found
        finally:
            self.watched = None


@pytest.fixture(scope="module")
def opened() -> Opened:
    return Opened()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with that template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


class Sites:
    """Sites of one name, each with data of its own, as their coordinator meets them: frames in, frames out.

    Args:
        folder: Where everything is.
        changes: The plan, as settings.
    """

    def __init__(self, folder: Path, *changes: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        source = lines(folder / "all.jsonl", map(json.dumps, VALID * 2))
        self.folder = folder
        self.federation = Federation(
            folder, tiny(*changes, f"simulation.source={source}", "local.steps=1", "data.sequence_length=40")
        )
        self.made = 0

    def site(self, data: Path, noise: Any = None) -> Site:
        self.made += 1
        state = self.folder / f"state-{self.made}"
        return self.federation.site(
            data=str(data), state=str(state), ledger=str(state / "ledger.sqlite"), noise=noise
        )

    def join(self, site: Site) -> bytes:
        return everything(site, self.federation.join_request())

    def trained(self, site: Site) -> Prepared:
        """The sequences of a site that has made its first contribution, to a sum in clear."""
        reply = decode_reply(answered(lambda: site, encode(self.federation.request())))
        assert isinstance(reply, Contribution), reply
        (made,) = (site.config.folder / "data").glob("tokens-*")
        return load_prepared(made)


def everything(site: Site, request: Request) -> bytes:
    """All that leaves."""
    return b"".join(bytes(view(frame)) for frame in answered(lambda: site, encode(request)))


def lines(path: Path, content: Iterable[str | bytes]) -> Path:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in content))
    return path


def units_of(prepared: Prepared) -> list[bytes]:
    """The rows of each unit, in order."""
    train = prepared.train
    if train.starts is None:
        return [row.tobytes() for row in train.tokens]
    return [part.tobytes() for part in np.split(train.tokens, train.starts[1:-1])] if len(train) else []


# Malformed records

NAMES = st.sampled_from(["text", "prompt", "completion", "messages", "patient", "", "role", "\ud800", "n"])
SAID = st.sampled_from(
    ["Alice", "adds", "recurs", "vanishes", "<|end|>", "\ud800", "", "\x00", "é\u2028", "a" * 999]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), SAID, st.text(max_size=5),
    st.sampled_from([10**400, -(2**63), 2**64, float("nan"), float("inf")]),
)  # fmt: skip
TURNS = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.one_of(st.sampled_from(["user", "assistant"]), SCALARS), "content": SCALARS}
    ),
    max_size=4,
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
SHAPED = st.fixed_dictionaries(
    {},
    optional={
        "patient": SCALARS,
        "text": SCALARS,
        "prompt": SCALARS,
        "completion": SCALARS,
        "messages": TURNS | JSON,
        "also": JSON,
    },
)
DEEP = [b"[" * 100_000, b'{"text":' * 100_000, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"]
BROKEN = [
    b"",
    b" ",
    b"{",
    b"}",
    b"null",
    b"[]",
    b'"text"',
    b"\xef\xbb\xbf{}",
    b'{"text": "\xff"}',
    b'{"text": "cut o',
]
HUGE = [b'{"text": ' + b"9" * 5000 + b"}", b'{"text": "' + b"a" * 10_000 + b'"}', b'{"patient": 1e999}']
MALFORMED: st.SearchStrategy[bytes] = st.one_of(
    st.sampled_from([*DEEP, *BROKEN, *HUGE]),
    st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"")),
    st.one_of(JSON, SHAPED).map(lambda value: json.dumps(value).encode()),
    SHAPED.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")),
)


@pytest.mark.slow
@UNITS
@pytest.mark.parametrize("format_", ["text", "messages"])
def test_no_record_decides_what_a_site_answers(
    unit: list[str], format_: str, template: str, opened: Opened, tmp_path: Path
) -> None:
    """Neighbouring data: the same bytes join, from no look at the data; both train, and no other record changes."""
    sites = Sites(tmp_path, *unit, f"data.format={format_}", f"model.tokenizer={template}")
    valid = [json.dumps(record).encode() for record in VALID]
    without = sites.site(lines(tmp_path / "without.jsonl", valid))
    answer = sites.join(without)
    assert isinstance(decode_reply([answer]), Joined)
    units = units_of(sites.trained(without))

    @settings(
        max_examples=20, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(one=MALFORMED, at=st.integers(0, len(valid)))
    def check(one: bytes, at: int) -> None:
        data = lines(tmp_path / f"with-{sites.made}.jsonl", [*valid[:at], one, *valid[at:]])
        site = sites.site(data)
        with opened.during() as paths:
            assert sites.join(site) == answer
        assert paths
        assert str(data) not in paths
        found = sites.trained(site)
        if unit is CENTRAL:  # all that a site holds is one unit, and packed
            return
        changed = [each for each in units_of(found) if each not in units]
        assert len(changed) <= 1
        if unit is RECORD:
            assert [each for each in units_of(found) if each not in changed] == units
        else:
            # The malformed record may be of an owner who has others.
            assert len(units) - 1 <= len([each for each in units_of(found) if each in units]) <= len(units)

    check()


@UNITS
def test_a_template_that_raises_on_a_name_gives_nothing_away(
    unit: list[str], template: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator's plan with that template: data with Alice and without her answer alike, join and training."""
    sites = Sites(tmp_path, *unit, "data.format=messages", f"model.tokenizer={template}")
    alice = {"patient": "x", "messages": [{"role": "assistant", "content": "Alice is ill"}]}
    without, with_her = (
        sites.site(lines(tmp_path / f"{name}.jsonl", map(json.dumps, found)))
        for name, found in (("without", VALID), ("with", [alice, *VALID]))
    )
    assert sites.join(without) == sites.join(with_her)
    others = sites.trained(without)
    with caplog.at_level(logging.INFO):
        found = sites.trained(with_her)
    assert units_of(found) == units_of(others)
    assert found.left_out == {"refused by the chat template": 1}
    (told,) = (message for message in caplog.messages if "records are used" in message)
    assert told.startswith("site-000: must stay at this site: 6 records are used")
    assert told.endswith("left out: 1 refused by the chat template")
    assert "Alice" not in caplog.text


def test_without_a_unit_a_record_costs_no_place_and_data_without_use_is_named_by_line(
    template: str, tmp_path: Path
) -> None:
    """There is no guarantee to keep, and a person to help."""
    clear = ["aggregation.secure=false", "data.format=messages", f"model.tokenizer={template}"]
    sites = Sites(tmp_path, *clear)
    alice = {"messages": [{"role": "assistant", "content": "Alice is ill"}]}
    strays = ['{"messages": 7}', "no object", '{"messages": null}']
    site = sites.site(lines(tmp_path / "with.jsonl", [*map(json.dumps, [*VALID, alice]), *strays]))
    assert site.join(sites.federation.join_request()).site == site.name
    alone = sites.site(lines(tmp_path / "alone.jsonl", ["", json.dumps(alice), *strays]))
    with raises(DataError, "alone.jsonl, line 2", says="template"):
        alone.join(sites.federation.join_request())


# The charge comes first.


@UNITS
def test_data_is_read_after_the_charge(
    unit: list[str], opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites(tmp_path, *unit)
    data = lines(tmp_path / "data.jsonl", map(json.dumps, VALID))
    site = sites.site(data)
    pay = Spending.pay

    def paid(*arguments: Any) -> None:
        pay(*arguments)
        assert opened.watched is not None
        opened.watched.append("paid")

    monkeypatch.setattr(Spending, "pay", paid)
    with opened.during() as paths:
        sites.join(site)
        sites.trained(site)
    assert 0 < paths.index("paid") < paths.index(str(data))
    # A refused charge leaves the data closed.
    poor = sites.site(data)
    sites.join(poor)
    monkeypatch.setattr(Spending, "pay", refuse)
    with opened.during() as paths:
        assert isinstance(decode_reply(answered(lambda: poor, encode(sites.federation.request()))), Failed)
    assert str(data) not in paths


def refuse(*_: object) -> None:
    raise DataError("charge", expected="no charge")


@UNITS
def test_a_join_still_names_data_that_is_not_there(unit: list[str], tmp_path: Path) -> None:
    sites = Sites(tmp_path, *unit)
    (tmp_path / "data.xml").write_text("a,b")
    for data, says in (
        ("nowhere.jsonl", "existing file"),
        ("data.xml", "ends in"),
    ):
        with raises(DataError, "data", says=says):
            sites.site(tmp_path / data).join(sites.federation.join_request())


def test_a_join_still_refuses_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    sites = Sites(tmp_path, *RECORD, "data.format=messages", f"model.tokenizer={tmp_path / 'tokenizer'}")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for path in (tmp_path / "tokenizer").glob("*.jinja"):
        path.unlink()
    with raises(DataError, "data.format", says="chat template"):
        sites.site(lines(tmp_path / "data.jsonl", map(json.dumps, VALID))).join(
            sites.federation.join_request()
        )


# Sites with nothing to train on


NOTHING: dict[str, Callable[[Path], Path]] = {
    "an empty file": lambda folder: lines(folder / "data.jsonl", []),
    "blank lines": lambda folder: lines(folder / "data.jsonl", ["", " "]),
    "no record of use": lambda folder: lines(folder / "data.jsonl", ['{"body": "x"}', "{", '{"text": ""}']),
    "an empty folder": lambda folder: folder,
    "a text that is no UTF-8": lambda folder: lines(folder / "data.txt", [b"\xff"]),
    "a table without rows": lambda folder: parquet(folder / "data.parquet", []),
}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([("text", pa.string())])), path)
    return path


@UNITS
@pytest.mark.parametrize("make", NOTHING.values(), ids=NOTHING)
def test_a_site_with_nothing_to_train_on_gives_noise_alone(
    unit: list[str], make: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sites = Sites(tmp_path / "sites", *unit)
    (tmp_path / "own").mkdir()
    stream = Overheard.from_declared_seed(3)
    site = sites.site(make(tmp_path / "own"), noise=lambda _round: stream)
    assert isinstance(site.answer(sites.federation.join_request()), Joined)
    vector = whole(site.answer(sites.federation.request()))
    assert "NO RECORD IS TRAINED ON" in caplog.text
    if unit is CENTRAL:
        layout = Sums(sites.federation.plan, sites.federation.layout.size).training
        assert not layout.open(vector, 1).mean.any()  # to which the coordinator adds noise
    else:
        assert stream.sigmas
        assert not any(total.any() for total in stream.sums)


def test_a_site_with_nothing_to_train_on_adds_its_share_of_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Attempts,
        "mask",
        lambda *given, **_: (None, Written(manifest_of(made := given[-2](NOTHING_CARRIED)), made)),
    )
    sites = Sites(tmp_path, *SKELLAM)
    site = sites.site(lines(tmp_path / "data.jsonl", []))
    site.join(sites.federation.join_request())
    vector = whole(site.contribute(sites.federation.request(inbox=Inbox(bytes(32), (), (), ()))))
    assert np.count_nonzero(vector) > len(vector) / 2


# How records are read


def read(sites: Sites, data: Path) -> Prepared:
    site = sites.site(data)
    sites.join(site)
    return sites.trained(site)


@pytest.fixture
def by_record(tmp_path: Path) -> Sites:
    return Sites(tmp_path / "sites", *RECORD)


@pytest.mark.parametrize(
    "stray",
    [
        "{",
        '{"text": 7}',
        '{"text": ["a"]}',
        '{"text": {"a": 1}}',
        "7",
        "[1, 2]",
        "\ufeff",
        '{"text": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_a_line_of_another_type_is_no_matter_of_the_others(
    by_record: Sites, stray: str, name: str, tmp_path: Path
) -> None:
    """Arrow would refuse the file, or turn every text into another type."""
    valid = [json.dumps(record) for record in VALID]
    for at in (0, 3, 6):
        found = read(by_record, lines(tmp_path / f"{at}-{name}", [*valid[:at], stray, *valid[at:]]))
        assert (found.records, sum(found.left_out.values())) == (6, 1)
        assert units_of(found) == units_of(read(by_record, lines(tmp_path / "others.jsonl", valid)))


def test_a_folder_is_read_file_by_file(by_record: Sites, tmp_path: Path) -> None:
    """One text more, whatever it is, changes neither the kind of the folder nor another text."""
    folder = tmp_path / "own"
    folder.mkdir()
    lines(folder / "a.jsonl", map(json.dumps, VALID))
    (folder / "b.txt").write_text("a text of its own")
    others = read(by_record, folder)
    assert others.records == 7
    for name, add in (
        ("c.txt", lambda path: path.write_bytes(b"\xff\xfe")),
        ("d.txt", lambda path: path.mkdir()),
        ("e.txt", lambda path: path.symlink_to("gone")),
        ("f.txt", lambda path: path.touch()),
        ("g.jsonl", lambda path: path.touch()),
        ("h.parquet", lambda path: parquet(path, [{"text": None}])),
    ):
        add(folder / name)
        assert units_of(read(by_record, folder)) == units_of(others)
    assert read(by_record, folder).left_out == {
        "not readable": 3,
        "without a learnable token within data.sequence_length": 1,
        "without the fields of data.format 'text'": 1,
    }


def test_a_row_of_a_table_that_cannot_be_read_is_left_out(by_record: Sites, tmp_path: Path) -> None:
    def table(name: str, values: list[bytes]) -> Path:
        raw = pa.array(values, pa.binary())
        column = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())  # which does not check UTF-8
        pq.write_table(pa.table({"text": column}), tmp_path / name)
        return tmp_path / name

    others = read(by_record, table("others.parquet", [b"one text", b"another"]))
    found = read(by_record, table("all.parquet", [b"one text", b"\xff\xff", b"another"]))
    assert units_of(found) == units_of(others)
    assert found.left_out == {"not readable": 1}


def test_a_huge_record_is_left_out(by_record: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = [json.dumps(record) for record in VALID]
    monkeypatch.setattr(records, "LARGEST_RECORD", 400)
    for huge in (json.dumps({"text": "a" * 2000}), json.dumps({"text": "a"}) + " " * 2000):
        found = read(by_record, lines(tmp_path / "a.jsonl", [*valid[:3], huge, *valid[3:]]))
        assert (found.records, found.left_out) == (6, {"not readable": 1})
    pq.write_table(pa.table({"text": ["short", "a" * 2000, "short too"]}), tmp_path / "a.parquet")
    found = read(by_record, tmp_path / "a.parquet")
    assert (found.records, found.left_out) == (2, {"not readable": 1})
    (tmp_path / "own").mkdir()
    for name, size in (("a.txt", 400), ("b.txt", 401)):
        (tmp_path / "own" / name).write_text("a" * size)
    assert (read(by_record, tmp_path / "own").records) == 1


def test_a_prompt_that_takes_much_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no place of a token is asked for: whether one is must not decide about another record."""
    sites = Sites(tmp_path, "data.format=prompt", *RECORD)
    monkeypatch.setattr(examples, "LONGEST_WITH_PLACES", 400)
    prompts = [json.dumps({"prompt": "q" * 9, "completion": "a" * size}) for size in (9, 391, 392, 9)]
    found = read(sites, lines(tmp_path / "a.jsonl", prompts))
    assert (found.records, found.left_out) == (3, {"refused by the tokenizer": 1})


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), "dictionary", "inside"])
def test_the_size_of_a_row_is_its_own(
    kind: Any, by_record: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows share in memory: a dictionary of distinct values, or a batch's buffers."""
    monkeypatch.setattr(records, "LARGEST_RECORD", 400)
    texts = [str(number) + "a" * 250 for number in range(8)]

    def left(texts: list[str]) -> tuple[int, dict[str, int]]:
        if kind == "inside":
            rows = [{"text": text, "more": {"tags": [text[:9]]}} for text in texts]
            tags = pa.struct([("tags", pa.list_(pa.dictionary(pa.int32(), pa.string())))])
            table = pa.Table.from_pylist(rows, pa.schema([("text", pa.string()), ("more", tags)]))
        else:
            column = pa.array(texts)
            table = pa.table(
                {"text": column.dictionary_encode() if kind == "dictionary" else column.cast(kind)}
            )
        pq.write_table(table, tmp_path / "a.parquet")
        found = read(by_record, tmp_path / "a.parquet")
        return found.records, dict(found.left_out)

    assert left(texts) == (8, {})
    assert left([*texts, "b" * 2000]) == (8, {"not readable": 1})


def test_a_tokenizer_with_a_gap_in_its_ids_is_refused_before_any_record(tmp_path: Path) -> None:
    """A record with that token would make the round fail: the coordinator would choose the token, and learn of it."""
    folder = tmp_path / "tokenizer"
    byte_tokenizer().save_pretrained(folder)
    facts = json.loads((folder / "tokenizer.json").read_text())
    facts["model"]["vocab"]["Q"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    federation = Federation(tmp_path / "federation", tiny(*RECORD))
    plan = changed(federation.plan, "model", tokenizer=str(folder))
    site = federation.site(plan=plan.digest())
    with raises(ModelError, "model.tokenizer", says="5000"):
        site.join(federation.join_request(plan))


def test_a_chat_that_would_be_rendered_for_hours_is_left_out(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = Sites(tmp_path, *RECORD, "data.format=messages", f"model.tokenizer={template}")
    monkeypatch.setattr(examples, "MOST_RENDERED", 400)
    long = {"messages": [{"role": "assistant", "content": "yes"}] * 20}
    found = read(sites, lines(tmp_path / "a.jsonl", map(json.dumps, [long, *VALID])))
    assert (found.records, found.left_out) == (6, {"refused by the chat template": 1})


def test_a_single_prompt_is_trained_on_where_nothing_can_be_held_out(tmp_path: Path) -> None:
    """Under the unit `site`: an error would tell that there is one record."""
    sites = Sites(tmp_path, *CENTRAL, "data.held_out=0.2", "data.format=prompt")
    found = read(sites, lines(tmp_path / "a.jsonl", [json.dumps(VALID[0])]))
    assert len(found.train)
    assert not len(found.held_out)


# For the people


def test_a_plan_that_fits_no_record_is_refused_before_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sites would train on nothing, without an error; here one person owns all records."""
    data = lines(tmp_path / "all.jsonl", map(json.dumps, VALID))
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'[cohort]\nsites = 3\n[data]\ntext_field = "note"\n[simulation]\nsource = "{data}"\npartition = "iid"\n'
        '[privacy]\nunit = "record"\nnoise_multiplier = 1.0\nsampling_rate = 0.5\n[server]\nevaluation = "none"\n'
        '[aggregation]\nweighting = "uniform"\n[model.config]\nhidden_size = 16\n'
        "num_hidden_layers = 1\nnum_attention_heads = 2\nnum_key_value_heads = 2\n"
    )
    assert main(["simulate", str(plan), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert (
        "line 1, field note: expected a field of that name; the fields of the record: completion, messages"
        in said
    )
    assert "such as data.text_field" in said


def test_a_site_checks_its_data_before_a_run(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(tmp_path / "data.jsonl", [*map(json.dumps, VALID), "{"])
    (tmp_path / "site.toml").write_text('name = "a"\ndata = "data.jsonl"\nstate = "state"\n')
    private = set_options(RECORD)
    call = ["site", "check", str(tmp_path / "site.toml"), str(small_plan), *private, "--only", "data"]
    marked = "must stay at this site: "
    line = "6 records are used: 6 units to train on, 0 held out; left out: 1 not readable"
    (tmp_path / "state").mkdir(mode=0o755)
    before = os.umask(0o022)
    assert main(call) == 0
    assert os.umask(before) == 0o022, "the files of other commands are as before"
    made = list((tmp_path / "state").rglob("*"))
    assert any(path.suffix == ".bin" for path in made)
    closed = [tmp_path / "state", *made]
    assert not [path for path in closed if path.stat().st_mode & 0o077], "records, which others cannot read"
    assert capsys.readouterr().out.strip() == marked + line
    assert main([*call, "--json"]) == 0
    (key, found), *others = json.loads(capsys.readouterr().out).items()
    assert (key, others) == ("must_stay_at_this_site", []), "all counts are under the mark"
    assert (found["summary"], found["records"], found["left_out"]) == (line, 6, {"not readable": 1})
    (tmp_path / "policy.toml").write_text("greatest_epsilom = 1.0\n")
    with (tmp_path / "site.toml").open("a") as file:
        file.write('policy = "policy.toml"\n')
    assert main(call) == 2
    assert "greatest_epsilom" in capsys.readouterr().err
    (tmp_path / "policy.toml").unlink()
    (tmp_path / "site.toml").write_text('name = "a"\ndata = "data.jsonl"\nstate = "state"\n')
    assert main([*call, "--set", "data.text_field=note"]) == 2
    assert f"({marked}0 records are used: 0 units to train on, 0 held out" in capsys.readouterr().err
