"""A report in words: the page for a reader who is not an engineer, and the questions of NIST SP 800-226."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from typing import Any

import pytest

from cloister.privacy.report.page import to_html
from cloister.privacy.report.report import CostRow, GroupRow, RunReport, meaning, verdict
from cloister.privacy.report.summary import Part, plain, questions, shares
from cloister.tests.privacy.report.test_page import Reader
from cloister.tests.privacy.report.test_report import (
    OBJECTIONS,
    SENTENCE,
    over_runs,
    realistic,
    with_questions,
    without_privacy,
)


def text(parts: tuple[Part, ...]) -> str:
    return " ".join(" ".join((part.title, *part.lines)) for part in parts)


def test_a_site_that_trained_in_no_round_took_no_part() -> None:
    report = realistic()
    first, *others = report.sites
    idle = realistic(sites=(replace(first, rounds=0), *others))
    assert f"{len(others)} sites took part" in text(plain(idle))


def test_the_plain_page_has_the_figures_of_the_run_as_odds() -> None:
    words = text(plain(realistic()))
    for fact in (
        "One discharge letter (one line of a site's JSONL file).",
        "8 sites took part",
        "Of 100 guesses at most 84.3 are right. Without the models, 50 are.",
        "Of guesses about 2 discharge letters of one person, all used or none, at most 95.0 of 100 are right.",
        "For 10 or more discharge letters of one person, there is no protection to speak of.",
        "about 1 in 100,000",
        "this run alone",
        *realistic().responsible,
        realistic().protected_from,
    ):
        assert fact in words, fact
    assert "epsilon" not in words
    assert "delta" not in words
    assert not any(unicodedata.name(letter, "").startswith("GREEK") for letter in words)
    assert len(words.split()) < 400  # half a page


def test_the_plain_page_counts_all_runs_where_a_ledger_does() -> None:
    words = text(plain(realistic(dataset=over_runs())))
    assert f"all 3 runs on this data, at most {meaning(2.1512, 1e-5).guess} of 100" in words
    assert "this run alone" not in words
    assert "the ledger /srv/letters.sqlite, under the name letters" in words
    lost = text(plain(realistic(dataset=over_runs(epsilon=None, problem="missing"))))
    assert "this run alone" in lost
    for epsilon in (None, 10.5):
        weak = text(plain(realistic(dataset=over_runs(epsilon=epsilon))))
        assert "All 3 runs on this data together leave no protection to speak of." in weak


COSTS = "How do the costs of several releases and runs add up?"


def test_with_questions_the_pages_say_whom_the_figures_trust_and_which_share_questions_took() -> None:
    report = realistic(dataset=with_questions())
    words = text(plain(report))
    assert f"all 3 runs on this data, at most {meaning(2.1512, 1e-5).guess} of 100" in words
    together = "If the coordinator and all other sites work together against one site, at most"
    assert f"{together} {meaning(2.9, 2e-6).guess} of 100 guesses are right." in words
    said = " ".join(shares(report))
    for fact in (
        "no more sites than the plan of each question assumes to collude",
        "What the reports of all these runs assume must be true as well.",
        "Then the epsilon over all runs is 2.90 at delta 2 × 10⁻⁶.",
        "The questions alone have epsilon 0.53 at delta 2 × 10⁻⁶, all else alone 1.80 at delta 1 × 10⁻⁶.",
        "These two need not add up to the epsilon over all runs.",
    ):
        assert fact in said
    (costs,) = (part for part in questions(report) if part.title == COSTS)
    assert said in " ".join(costs.lines)
    page = to_html(report)
    assert "<dt>epsilon, all runs, against all others together</dt><dd>2.90 at delta 2 × 10⁻⁶</dd>" in page
    assert "Whom epsilon trusts, and the share of questions" in page
    assert all(line in Reader(page).text for line in shares(report))


def test_without_questions_or_a_claim_no_page_has_their_figures() -> None:
    lost = replace(with_questions(), problem="missing", epsilon=None, asked=None)
    for report in (
        realistic(),
        realistic(dataset=over_runs()),
        realistic(dataset=lost),
        realistic(dataset=with_questions(), declared_noise=True),
    ):
        page = Reader(to_html(report)).text
        for words in (
            "all others together",
            "all other sites together",
            "The questions alone",
            "trusts, and",
        ):
            assert words not in page
        assert "all other sites work together" not in text(plain(report))


def test_a_figure_against_all_others_that_protects_nobody_or_is_missing_is_said_to() -> None:
    for weak in (CostRow(10.5, 2e-6), CostRow(None, 2e-6), CostRow(2.9, 0.01)):
        report = realistic(dataset=with_questions(against_all=weak))
        assert "work together against one site, there is no protection to speak of." in text(plain(report))
        assert "no protection to speak of. The questions alone" in " ".join(shares(report))
    report = realistic(dataset=with_questions(against_all=None, why_not="it is of an earlier version"))
    assert "this report has no figure: it is of an earlier version." in text(plain(report))
    assert "together there is no figure: it is of an earlier version." in " ".join(shares(report))
    assert "<dd>no figure</dd>" in to_html(report)
    alone = realistic(dataset=with_questions(rest=None))
    assert "All of these runs are questions." in shares(alone)
    assert "add up to" not in " ".join(shares(alone))


@pytest.mark.parametrize(("unit", "words"), [("owner", "patients together"), ("site", "patients together")])
def test_units_of_several_people_are_not_of_one_person(unit: Any, words: str) -> None:
    report = realistic(unit=unit, units="patients", delta=1e-3)
    assert f"2 {words}" in text(plain(report))
    assert "of one person" not in text(plain(report))
    assert f"What holds for several {words}" in to_html(report)


@pytest.mark.parametrize("report", [report for report, _ in OBJECTIONS.values()], ids=OBJECTIONS)
def test_without_a_guarantee_nothing_is_promised(report: RunReport) -> None:
    words = text(plain(report))
    assert "Nothing is claimed." in words
    assert "guesses" not in words
    asked = text(questions(report))
    assert "guesses" not in asked
    assert (verdict(report).sentence in asked) == (report.unit != "none")
    page = to_html(report)
    assert "What holds for several" not in page
    assert "guesses of 100" not in page


def test_the_questions_have_the_facts_of_the_run() -> None:
    report = realistic(dataset=over_runs())
    answers = {part.title: " ".join(part.lines) for part in questions(report)}
    assert all(answers.values())
    for question, facts in {
        "What is the privacy unit?": ["One discharge letter"],
        "When are two data sets neighbours?": [report.relation],
        "What is the trust model?": [report.trust_model],
        "How large is epsilon?": ["1.68, this run:", "84.3 of 100", "The budget was 2."],
        "How large is delta?": [
            "1 × 10⁻⁵, about 1 in 100,000",
            "discharge letters, which only the sites know",
        ],
        "How do the costs of several releases and runs add up?": [
            report.accountant,
            "3 runs on letters together have epsilon 2.16 at delta 2 × 10⁻⁶, with a limit of 2.5",
            "/srv/letters.sqlite",
            "ab" * 32,
        ],
        "Which mechanism, and is the implementation right?": [report.mechanism, "at least 0.67"],
        "Which side channels remain?": ["durations"],
        "How exposed is the data before a release?": [report.exposure],
        "What does the noise cost in usefulness?": ["2.511 nats per token"],
        "What is not covered?": ["2 points"],
    }.items():
        for fact in facts:
            assert fact in answers[question], question
    alone = {part.title: " ".join(part.lines) for part in questions(realistic())}
    assert "1.68, this run alone" in alone["How large is epsilon?"]
    assert (
        "this report is of this run alone" in alone["How do the costs of several releases and runs add up?"]
    )
    sites = {part.title: " ".join(part.lines) for part in questions(realistic(unit="site"))}
    assert "sites, of which there are 8" in sites["How large is delta?"]
    assert questions(without_privacy()) == ()


def test_both_are_on_the_page_and_the_plain_words_come_before_the_technical_ones() -> None:
    report = realistic(dataset=over_runs())
    shown = Reader(to_html(report)).text
    for part in (*plain(report), *questions(report)):
        assert part.title in shown
        assert all(line in shown for line in part.lines)
    places = [
        shown.index(words)
        for words in (
            SENTENCE[:40],
            "For a reader who is not an engineer",
            "What epsilon means",
            "What holds for several discharge letters of one person",
            "The questions of NIST SP 800-226",
            "Appendix A",
        )
    ]
    assert places == sorted(places)
    table = re.sub("<[^>]*>", " ", to_html(report)).split("right guesses of 100")[1].split()
    rows = " ".join(table)
    assert rows.startswith(
        "1 1.68 1 × 10⁻⁵ at most 84.3 2 2.94 1 × 10⁻⁵ at most 95.0 5 5.99 1 × 10⁻⁵ at most 99.8"
    )
    assert "10 above 10 1 × 10⁻⁵ no protection to speak of 100 above 10" in rows
    bare = realistic(groups=(GroupRow(1, 1.6795),))
    assert "no protection to speak of" not in Reader(to_html(bare)).text
