"""The report's page: what it shows first, that it refers to nothing outside, hostile names, plots; and the command."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cli.verbs import report as command
from cloister.privacy.report import page as privacy_page
from cloister.privacy.report.page import MOST_POINTS, Tick, plot, to_html
from cloister.privacy.report.report import RunReport, to_json, verdict
from cloister.protocol.errors import CloisterError
from cloister.tests.privacy.report.test_report import OBJECTIONS, SENTENCE, read, realistic, without_privacy
from cloister.tests.tools.raises import raises


class Reader(HTMLParser):
    """The page as a reader has it: its text, its tags in order, and whether they close as they opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def test_the_first_thing_is_the_guarantee() -> None:
    read = Reader(to_html(realistic()))
    assert SENTENCE in read.text
    before = read.text[: read.text.index(SENTENCE)]
    assert before.endswith("The guarantee ")
    assert "epsilon" not in before


@pytest.mark.parametrize("report", [report for report, _ in OBJECTIONS.values()], ids=OBJECTIONS)
def test_a_page_without_a_guarantee_shows_the_reason_and_nothing_that_reads_as_one(report: RunReport) -> None:
    read = Reader(to_html(report))
    assert "No guarantee " + verdict(report).sentence in read.text
    for words in (
        "This run protects",
        "What epsilon means",
        "Epsilon over rounds",
        "I have read the guarantee",
    ):
        assert words in Reader(to_html(realistic())).text
        assert words not in read.text


def test_the_page_rounds_the_noise_down_and_says_when_epsilon_says_little() -> None:
    assert "<dd>0.6000</dd>" not in to_html(realistic())
    assert re.search(r"noise multiplier</dt><dd>0\.6<", to_html(realistic()))  # 0.60009, rounded down
    assert "says little by itself" in to_html(realistic(epsilon=8.0, budget=None))
    assert "says little by itself" not in to_html(realistic())


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    for report in (realistic(), without_privacy(), realistic(declared_noise=True)):
        page = to_html(report)
        read = Reader(page)
        assert not {"script", "link", "img", "iframe", "object", "base", "form"} & {
            tag for tag, _ in read.tags
        }
        assert not re.search(r"url\(|@import|https?:|//[a-z]", page)
        links = [value for _, found in read.tags for name, value in found.items() if name in ("src", "href")]
        assert all(link and link.startswith("#") for link in links)
        names = [found["id"] for _, found in read.tags if "id" in found]
        assert len(set(names)) == len(names)
        referred = [found["aria-labelledby"] or "" for _, found in read.tags if "aria-labelledby" in found]
        assert {part for value in referred for part in value.split()} <= set(names)


def test_it_can_be_heard() -> None:
    """Headings in order, headed tables, and a title and a description for each drawing."""
    read = Reader(to_html(realistic()))
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(found.get("scope") in ("col", "row") for found in read.named("th"))
    assert len(read.named("svg")) == len(read.named("desc")) == 2
    assert all(found.get("role") == "img" for found in read.named("svg"))
    assert "Epsilon over rounds: 0.61 after round 1, 1.68 after round 12; budget 2 at 2." in read.text
    assert read.named("html") == [{"lang": "en"}]


def test_everything_that_is_known_is_on_the_page() -> None:
    report = realistic(stopped_by_budget=True)
    text = Reader(to_html(report)).text
    plain = [
        report.run,
        report.run_id,
        report.plan_digest,
        report.roster_hash,
        report.created,
        report.mechanism,
    ]
    plain += [report.method, report.accountant, report.ledger.head, "5.37 times", "84.3 %", "at least 0.67"]
    plain += [*report.assumptions, *report.trusted, *report.not_covered, *report.versions.values()]
    plain += [site.name for site in report.sites] + [site.notes for site in report.sites]
    plain += [row.hash[:12] for row in report.ledger.rows] + ["would have exceeded the budget", "100 rows"]
    assert [words for words in plain if words and words not in text] == []
    assert "above the budget" not in text
    assert "above the budget" in Reader(to_html(realistic(budget=1.0))).text
    assert "saw the update of every site" in Reader(to_html(realistic(secure=None))).text


HOSTILE = """<script>alert(1)</script>"><img src=x onerror='x'>{{ 7 * 7 }}&amp;</style>"""


def spoiled(text: str) -> RunReport:
    """A report in which every text is this one."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(each) for key, each in value.items()}
        if isinstance(value, list):
            return [spoil(each) for each in value]
        return text if isinstance(value, str) else value

    found = spoil(json.loads(to_json(realistic())))
    return read(json.dumps(found | {"unit": "record", "released": "models", "versions": {text: text}}))


def test_no_text_becomes_a_tag() -> None:
    calm, read = Reader(to_html(spoiled("calm"))), Reader(to_html(spoiled(HOSTILE)))
    assert read.tags == calm.tags
    assert "<script>alert(1)</script>" in read.text
    assert "{{ 7 * 7 }}&amp;" in read.text


def test_without_escaping_the_same_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **options: whole(**{**options, "autoescape": False}))
    copy = runpy.run_path(privacy_page.__file__)  # of the module, without a cached template
    assert "<script>alert" in copy["to_html"](spoiled(HOSTILE))


@given(
    st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=40),
    st.integers(1, 1000),
    st.one_of(st.none(), st.floats(1e-3, 1e4)),
    st.booleans(),
)
def test_a_plot_holds_all_points_in_their_order(
    values: list[float], first: int, limit: float | None, from_zero: bool
) -> None:
    rows = [(first + at, value) for at, value in enumerate(values)]
    line = Tick(limit, "limit") if limit else None
    found = plot("Loss", "nats", rows, write=str, from_zero=from_zero, limit=line)
    assert found is not None
    assert len(found.points) == len(values)
    heights = [y for _, y in found.points] + ([found.limit.at] if found.limit else [])
    assert all(found.top - 0.01 <= y <= found.bottom + 0.01 for y in heights)
    across = [x for x, _ in found.points]
    assert across == sorted(set(across))
    assert found.left <= across[0] <= across[-1] <= found.right
    for (_, one), (_, other), y, z in zip(rows, rows[1:], heights, heights[1:], strict=False):
        assert (y - z) * (other - one) >= -1e-6 * abs(other)  # larger is higher
    assert 1 <= len(found.x_ticks) <= 8
    assert 2 <= len(found.y_ticks) <= 7
    labels = [tick.label for tick in found.y_ticks]
    assert len(set(labels)) == len(labels)
    assert all(found.top - 0.01 <= tick.at <= found.bottom + 0.01 for tick in found.y_ticks)


def test_ticks_say_what_the_line_says() -> None:
    """Linear axes: a point at a tick's height has its value."""
    found = plot("Loss", "nats", [(1, 2.5), (2, 2.7)], write=str, from_zero=False)
    assert found is not None
    at = {tick.label: tick.at for tick in found.y_ticks}
    assert (found.points[0][1], found.points[1][1]) == (at["2.50"], at["2.70"])
    assert plot("Loss", "nats", [], write=str, from_zero=False) is None


def test_a_plot_of_many_rounds_has_few_points_with_the_first_and_the_last() -> None:
    rows = [(number, 5.0 + number) for number in range(1, 5001)]
    found = plot("Loss", "nats", rows, write=str, from_zero=False)
    assert found is not None
    assert len(found.points) == MOST_POINTS
    assert list(found.points) == sorted(set(found.points), key=lambda point: point[0])
    assert (found.points[0][0], found.points[-1][0]) == (found.left, found.right)
    assert (found.last, found.description) == ("5005.0", "Loss: 6.0 after round 1, 5005.0 after round 5000.")
    few = plot("Loss", "nats", rows[:MOST_POINTS], write=str, from_zero=False)
    assert few is not None
    assert len(few.points) == MOST_POINTS


def test_the_same_report_gives_the_same_bytes() -> None:
    assert to_html(realistic()) == to_html(read(to_json(realistic())))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What `cloister report` was asked for, in place of a run's report."""
    asked: list[Path] = []

    def gather(folder: Path) -> RunReport:
        asked.append(folder)
        return realistic()

    monkeypatch.setattr("cloister.simulations.report.gather", gather)
    return asked


@pytest.mark.parametrize("output", [None, "elsewhere"])
def test_the_command_writes_both_files_and_says_what_is_claimed(
    gathered: list[Path], tmp_path: Path, output: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    where = tmp_path / output if output else run
    arguments = argparse.Namespace(json=False, run=str(run), output=str(where) if output else None)
    assert command.run(arguments) == 0
    assert gathered == [run]
    assert (where / "report.html").read_text(encoding="utf-8") == to_html(realistic())
    assert read((where / "report.json").read_bytes()) == realistic()
    printed = capsys.readouterr().out
    assert verdict(realistic()).sentence in printed
    assert str(where / "report.html") in printed


def test_the_command_refuses_a_file_as_its_folder(gathered: list[Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with raises(CloisterError, "--output"):
        command.run(argparse.Namespace(json=False, run=str(tmp_path), output=str(taken)))
    assert taken.read_text() == "mine"
