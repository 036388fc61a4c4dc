"""The report: what it claims and when it claims nothing, rounding, JSON, hostile names, and the command."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import re
import sys
import types
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cli import report as command
from cloister.privacy import report as privacy_report
from cloister.privacy.report import (
    LARGEST_EPSILON,
    UNCLAIMED_DELTA,
    AuditRow,
    Ledger,
    LedgerRow,
    RoundRow,
    RunReport,
    SecureSum,
    SiteRow,
    Tick,
    at_least,
    at_most,
    from_json,
    meaning,
    plot,
    scientific,
    to_html,
    to_json,
    verdict,
)
from cloister.protocol.errors import CloisterError

SITES = (
    "charite-berlin",
    "ospedale-maggiore",
    "st-thomas",
    "karolinska",
    "clinic-barcelona",
    "uz-leuven",
    "rigshospitalet",
    "mayo-rochester",
)
EPSILONS = (0.61, 0.78, 0.90, 1.00, 1.10, 1.19, 1.27, 1.35, 1.42, 1.49, 1.56, 1.6795)
LOSSES = (2.680, 2.651, 2.630, 2.610, 2.595, 2.580, 2.565, 2.552, 2.540, 2.530, 2.519, 2.511)


def realistic(*, site: str = SITES[0], **changes: Any) -> RunReport:
    """Eight sites, twelve rounds, a hundred charges; `changes` replace fields, `site` the name of the first site."""
    names = (site, *SITES[1:])
    rows: list[LedgerRow] = []
    head = ""
    for number in range(100):
        head = hashlib.sha256(f"{head}/{number}".encode()).hexdigest()
        written = f"2026-03-14T{9 + number // 60:02d}:{number % 60:02d}:00Z"
        event = f"round {number // 8 + 1}: 5 Poisson-sampled Gaussian steps, rate 0.0029, noise 0.6"
        rows.append(
            LedgerRow(number + 1, written, names[number % 8], event, EPSILONS[min(11, number // 8)], head)
        )
    notes = {
        3: "round 5: did not answer before the deadline",
        6: "round 2: refused a second list of survivors",
    }
    whole = RunReport(
        run="discharge-letters",
        run_id="9f2c41d07ab84e53",
        created="2026-03-14T10:52:00Z",
        plan_digest=hashlib.sha256(b"plan").hexdigest(),
        plan='[run]\nname = "discharge-letters"\nrounds = 12\n\n[privacy]\nunit = "record"\nnoise_multiplier = 0.6\n',
        roster_hash=hashlib.sha256(b"roster").hexdigest(),
        versions={"cloister": "0.1.0", "dp-accounting": "0.6.0", "torch": "2.13.0"},
        unit="record",
        unit_in_words="one discharge letter (one line of a site's JSONL file)",
        relation="adding or removing one such letter",
        mechanism="DP-SGD in each site: the gradient of each letter is clipped to norm C, and Gaussian noise is added.",
        method="gradients of each record by Opacus",
        clip=1.0,
        noise_multiplier=0.60009,
        sampling_rate=0.0029,
        accountant="privacy loss distributions, composed over every step of a site",
        delta=1e-5,
        epsilon=1.6795,
        budget=2.0,
        stopped_by_budget=False,
        declared_noise=False,
        rounds=tuple(
            RoundRow(at + 1, epsilon, loss, 7 if at == 4 else 8)
            for at, (epsilon, loss) in enumerate(zip(EPSILONS, LOSSES, strict=True))
        ),
        sites=tuple(
            SiteRow(
                name,
                11 if at == 3 else 12,
                55 if at == 3 else 60,
                1.61 if at == 3 else 1.6795,
                notes.get(at, ""),
            )
            for at, name in enumerate(names)
        ),
        assumptions=(
            "Batches are Poisson-sampled: each letter is in a batch with probability 0.0029, on its own.",
            "Arithmetic is in 32-bit floating point; the guarantee is of real arithmetic.",
        ),
        trusted=("Each site, with its own letters: it runs the code that clips and adds noise.",),
        not_covered=(
            "Choosing hyperparameters by looking at other runs over the same letters.",
            "What the base model learned before the run, from public text.",
        ),
        secure=SecureSum(sites=8, neighbours=7, threshold=5, dropouts=1, colluders=1, ring_bits=32),
        ledger=Ledger(tuple(rows), head, verified=True),
        audit=AuditRow(canaries=1000, guesses=100, correct=75, confidence=0.95, epsilon=0.6729),
    )
    return dataclasses.replace(whole, **changes)


def without_privacy(**changes: Any) -> RunReport:
    whole = realistic()
    return dataclasses.replace(
        whole,
        unit="none",
        epsilon=None,
        delta=None,
        audit=None,
        rounds=tuple(dataclasses.replace(row, epsilon=None) for row in whole.rounds),
        sites=tuple(dataclasses.replace(row, epsilon=None) for row in whole.sites),
        ledger=Ledger((), "", verified=True),
        **changes,
    )


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
    sentence = (
        "This run protects one discharge letter (one line of a site's JSONL file): every model that it released over "
        "rounds 1 to 12 is differentially private with epsilon 1.68 and delta 1 × 10⁻⁵ between data sets that differ "
        "by adding or removing one such letter, provided that every assumption on this page holds."
    )
    assert verdict(realistic()).holds
    assert verdict(realistic()).sentence == sentence
    read = Reader(to_html(realistic()))
    assert sentence in read.text
    before = read.text[: read.text.index(sentence)]
    assert before.endswith("The guarantee ")
    assert "epsilon" not in before


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (without_privacy(), "This run gives no privacy guarantee"),
        (realistic(declared_noise=True), "declared seed"),
        (realistic(epsilon=None), "no finite epsilon"),
        (realistic(rounds=()), "no round of it was finished"),
        (realistic(rounds=(RoundRow(1, 0.61, 2.7, 0),)), "no round of it was finished"),
        (realistic(ledger=Ledger((), "", verified=False, problem="row 7 was changed")), "row 7 was changed"),
        (realistic(ledger=Ledger((), "", verified=True)), "its ledger holds no charge"),
        (
            realistic(ledger=Ledger((LedgerRow(9, "", "a", "", 1.7, ""),), "", verified=True)),
            "row 9 of the ledger is at epsilon 1.70, above the 1.68",
        ),
        (
            realistic(audit=AuditRow(9, 9, 9, 0.95, 1.6999)),
            "epsilon is above 1.69, and 1.68 would be claimed",
        ),
        (realistic(delta=0.01), "with a chance of 1 in 100 would meet its delta, which is 1 × 10⁻²"),
        (realistic(epsilon=10.001), "its epsilon is 10.01, and above 10 a guess"),
    ],
    ids=[
        "no unit",
        "declared noise",
        "no epsilon",
        "no round",
        "only a round that was given up",
        "broken ledger",
        "empty ledger",
        "ledger above",
        "audit",
        "large delta",
        "large epsilon",
    ],
)
def test_nothing_is_claimed_where_something_speaks_against_it(report: RunReport, says: str) -> None:
    found = verdict(report)
    assert not found.holds
    assert says in found.sentence
    read = Reader(to_html(report))
    assert "No guarantee " + found.sentence in read.text
    for words in (
        "This run protects",
        "What epsilon means",
        "Epsilon over rounds",
        "I have read the guarantee",
    ):
        assert words in Reader(to_html(realistic())).text
        assert words not in read.text


def test_epsilon_is_claimed_up_to_ten_and_a_guess_may_then_be_all_but_certain() -> None:
    for epsilon in (9.9, LARGEST_EPSILON):
        assert verdict(realistic(epsilon=epsilon)).holds
    assert not verdict(realistic(epsilon=math.nextafter(LARGEST_EPSILON, math.inf))).holds
    odds = math.exp(LARGEST_EPSILON)
    assert odds / (odds + 1) > 0.9999  # as the sentence says


@pytest.mark.parametrize("count", [49, 101, 120, 4999])  # 49 * (1 / 49) is below 1 in float64
def test_a_delta_that_a_run_which_publishes_one_site_would_meet_is_not_claimed(count: int) -> None:
    sites = tuple(SiteRow(f"site-{at:03d}", 1, 5, 1.0) for at in range(count))
    met = realistic(unit="site", sites=sites, delta=1 / count)
    assert not verdict(met).holds
    below = min(math.nextafter(1 / count, 0), math.nextafter(UNCLAIMED_DELTA, 0))
    assert verdict(dataclasses.replace(met, delta=below)).holds
    if count > 100:
        assert f"publishes one of its {count:,} sites, drawn at random" in verdict(met).sentence
        assert verdict(dataclasses.replace(met, unit="record")).holds  # the sites are not its units


def test_delta_is_claimed_below_one_in_a_hundred() -> None:
    assert verdict(realistic(delta=math.nextafter(UNCLAIMED_DELTA, 0))).holds
    assert not verdict(realistic(delta=UNCLAIMED_DELTA)).holds
    assert not verdict(realistic(delta=0.5)).holds


def test_without_the_guard_a_broken_ledger_would_be_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail: with the objections removed the same report claims its epsilon."""
    broken = realistic(ledger=Ledger((), "", verified=False, problem="row 7 was changed"))
    monkeypatch.setattr(privacy_report, "_objection", lambda report: "")
    assert verdict(broken).holds


def test_a_claim_below_what_was_spent_cannot_be_made() -> None:
    with pytest.raises(CloisterError, match=r"epsilon is 1\.5: expected at least the 1\.56 of round 11"):
        realistic(epsilon=1.5)
    sites = (SiteRow("far", 1, 1, 1.68),)
    with pytest.raises(CloisterError, match=r"at least the 1\.68 of site far"):
        realistic(sites=sites)
    with pytest.raises(CloisterError, match="because unit is 'none'"):
        realistic(unit="none")
    with pytest.raises(CloisterError, match="delta is None"):
        realistic(delta=None)
    for name in ("unit_in_words", "relation", "mechanism", "accountant"):
        with pytest.raises(CloisterError, match=name):
            realistic(**{name: " "})


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((4,), "round 4"),
        ((1, 2, 3), "rounds 1 to 3"),
        ((1, 3), "2 rounds from 1 to 3"),
    ],
)
def test_the_rounds_are_named(numbers: tuple[int, ...], words: str) -> None:
    rounds = tuple(RoundRow(number, 1.0, None, 8) for number in numbers)
    assert f"released over {words} is" in verdict(realistic(rounds=rounds)).sentence


@given(st.floats(0, 1e6))
def test_losses_are_rounded_up_and_strengths_down_but_not_far(value: float) -> None:
    exact, above, below = Decimal(repr(value)), Decimal(at_most(value)), Decimal(at_least(value))
    near = Decimal("0.01") if exact >= Decimal("0.1") or exact == 0 else exact / 10
    assert exact <= above < exact + near or above == exact
    assert exact - near < below <= exact or below == exact


@given(st.floats(1e-300, 0.999))
def test_delta_is_rounded_up_to_three_digits(value: float) -> None:
    mantissa, exponent = scientific(value).split(" × 10")
    assert re.fullmatch(r"[1-9](\.\d{1,2})?", mantissa)
    back = exponent.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    shown, exact = Decimal(mantissa).scaleb(int(back)), Decimal(repr(value))
    assert exact <= shown <= exact * Decimal("1.01")


def test_numbers_that_are_round_stay_as_they_are() -> None:
    assert [at_most(value) for value in (0.0, 0.1, 1.0, 1.68, 1.6800001)] == [
        "0.00",
        "0.10",
        "1.00",
        "1.68",
        "1.69",
    ]
    assert [at_most(value) for value in (0.0123, 0.099, 0.0999)] == ["0.013", "0.099", "0.100"]
    assert [scientific(value) for value in (1e-5, 2.5e-7, 0.9999)] == ["1 × 10⁻⁵", "2.5 × 10⁻⁷", "1 × 10⁰"]
    assert "<dd>0.6000</dd>" not in to_html(realistic())
    assert re.search(r"noise multiplier</dt><dd>0\.6<", to_html(realistic()))  # 0.60009, rounded down


def test_the_meaning_is_true_of_randomised_response_and_no_smaller() -> None:
    """The mechanism that meets the bounds: leak the bit with probability delta, else answer with odds e^epsilon."""
    epsilon, delta = 1.2, 0.01
    right = delta + (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    found = meaning(epsilon, delta)
    assert math.exp(epsilon) <= float(found.factor) <= math.exp(epsilon) + 0.01
    assert right <= float(found.guess) / 100 <= right + 0.001
    assert meaning(0.0, 1e-9).guess == "50.1"
    assert [meaning(value, 1e-5).weak for value in (4.5, 4.7, 1e9)] == [False, True, True]
    assert meaning(9.0, 1e-5).factor == "8,104"
    assert meaning(1e9, 1e-5).factor == "more than 10³⁰⁰"
    assert "says little by itself" in to_html(realistic(epsilon=8.0, budget=None))
    assert "says little by itself" not in to_html(realistic())


def test_json_gives_the_report_back() -> None:
    for report in (
        realistic(),
        without_privacy(),
        realistic(audit=None, secure=None, roster_hash=None, budget=None),
    ):
        assert from_json(to_json(report)) == report
        assert to_json(from_json(to_json(report))) == to_json(report)
    assert json.loads(to_json(realistic()))["ledger"]["rows"][99]["number"] == 100


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda found: found.pop("delta"), r"delta: expected .*\(field required\)"),
        (lambda found: found.update(extra=1), "extra"),
        (lambda found: found.update(epsilon=float("nan")), "epsilon"),
        (lambda found: found.update(epsilon="1"), "epsilon"),
        (lambda found: found.update(epsilon=-1), "epsilon"),
        (lambda found: found["ledger"]["rows"][3].update(hash=None), r"ledger\.rows\.3\.hash"),
        (lambda found: found.update(format=2), "format"),
    ],
)
def test_a_report_that_is_none_is_refused_by_name(change: Any, names: str) -> None:
    found = json.loads(to_json(realistic()))
    change(found)
    with pytest.raises(CloisterError, match=rf"report\.json: .*{names}"):
        from_json(json.dumps(found))


def test_a_report_that_contradicts_itself_is_not_read() -> None:
    found = json.loads(to_json(realistic()))
    found["epsilon"] = 0.5
    with pytest.raises(CloisterError, match="at least the"):
        from_json(json.dumps(found))
    with pytest.raises(CloisterError, match=r"report\.json: text"):
        from_json("{")


def test_nan_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(realistic(rounds=(RoundRow(1, 1.0, math.nan, 8),)))


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
    return from_json(json.dumps(found | {"unit": "record", "versions": {text: text}}))


def test_no_text_becomes_a_tag() -> None:
    calm, read = Reader(to_html(spoiled("calm"))), Reader(to_html(spoiled(HOSTILE)))
    assert read.tags == calm.tags
    assert "<script>alert(1)</script>" in read.text
    assert "{{ 7 * 7 }}&amp;" in read.text


def test_without_escaping_the_same_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jinja2.Environment
    monkeypatch.setattr(jinja2, "Environment", lambda **options: whole(**{**options, "autoescape": False}))
    privacy_report._template.cache_clear()
    try:
        assert "<script>alert" in to_html(spoiled(HOSTILE))
    finally:
        privacy_report._template.cache_clear()


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


def test_the_same_report_gives_the_same_bytes() -> None:
    assert to_html(realistic()) == to_html(from_json(to_json(realistic())))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for `cloister.server.report`, and remembers what was asked for."""
    asked: list[Path] = []

    def gather(folder: Path) -> RunReport:
        asked.append(folder)
        return realistic()

    stand_in = types.ModuleType("cloister.server.report")
    stand_in.gather = gather  # type: ignore[attr-defined]  # a module is built as it goes
    monkeypatch.setitem(sys.modules, "cloister.server.report", stand_in)
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
    assert from_json((where / "report.json").read_bytes()) == realistic()
    printed = capsys.readouterr().out
    assert verdict(realistic()).sentence in printed
    assert str(where / "report.html") in printed


def test_the_command_refuses_a_file_as_its_folder(gathered: list[Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(CloisterError, match="--output"):
        command.run(argparse.Namespace(json=False, run=str(tmp_path), output=str(taken)))
    assert taken.read_text() == "mine"
