"""`README.md` and `docs/*.md`: no sentence is longer than 35 words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MOST = 35
"""Words of a sentence."""

FENCE = re.compile(r"\s*(```|~~~)")
SKIPPED = re.compile(r"\s*(#{1,6}\s.*|\|[\s|:-]*)?$")
"""A heading, the separator row of a table, or an empty line: each ends a block."""
ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s+")
UNIT = re.compile(r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)|!?\[[^\[\]]*\]\([^()]*\)", re.DOTALL)
"""A code span, or a link: one word."""
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bal)[.!?][\"')*_]*(?=\s|$)")


class Sentence(NamedTuple):
    """A sentence of a page.

    Args:
        line: The line on which it begins, from 1.
        words: Its words; a code span and a link are one word each.
        text: The sentence in one line.
    """

    line: int
    words: int
    text: str


def sentences(page: str) -> Iterator[Sentence]:
    """The sentences of a Markdown page: of paragraphs, list items and table cells; none of headings and code blocks."""
    for line, text in blocks(page):
        masked = UNIT.sub(lambda unit: "x" * len(unit[0]), text)
        start = 0
        for end in [*(found.end() for found in END.finditer(masked)), len(masked)]:
            counted = [word for word in masked[start:end].split() if re.search(r"\w", word)]
            if counted:
                start += len(masked[start:end]) - len(masked[start:end].lstrip())
                said = " ".join(text[start:end].split())
                yield Sentence(line + text[:start].count("\n"), len(counted), said)
            start = end


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table cells, each with its first line and without its marker."""
    closing, first, block = "", 0, list[str]()
    for number, line in enumerate([*page.splitlines(), ""], 1):
        fence = FENCE.match(line)
        ends = bool(closing or fence or SKIPPED.match(line))
        item = ITEM.match(line)
        row = line.lstrip().startswith("|")
        if block and (ends or item or row):
            yield first, "\n".join(block)
            block = []
        if fence:
            closing = "" if closing == fence[1] else closing or fence[1]
        elif ends:
            continue
        elif row:
            yield from ((number, cell) for cell in re.split(r"(?<!\\)\|", line) if cell.strip())
        else:
            first = first if block else number
            block.append(line[item.end() :] if item else line)


def too_long(page: str) -> list[Sentence]:
    return [sentence for sentence in sentences(page) if sentence.words > MOST]


def words(count: int) -> str:
    return " ".join(["word"] * count)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_sentence_is_long(path: Path) -> None:
    found = too_long(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT)
    assert not found, "\n" + "\n".join(
        f"{name}:{each.line}: {each.words} words: {each.text}" for each in found
    )


@pytest.mark.parametrize(
    ("page", "line"),
    [
        (f"# A heading\n\n{words(40)}.\n", 3),
        (f"Short. {words(36)}", 1),
        (f"Short.\n\n- {words(20)}\n  {words(16)}\n- short\n", 3),
        (f"Short.\n1. short\n2. {words(36)}\n", 3),
        (f"| a | b |\n|---|:--|\n| c | {words(36)} |\n", 3),
        (f"Short, e.g. here.\nIt is 1.5 `x. y` {words(31)}, e.g. \none.\n", 2),
        (f"{words(20)}; {words(8)}: ({words(8)})\n", 1),
        (f"```\nx\n```\n{words(36)}\n```\nx\n```\n", 4),
        (f"{words(17)} `in\ncode` {words(18)}\n", 1),
    ],
    ids=["paragraph", "second", "item", "number", "cell", "points", "colon", "between", "span"],
)
def test_a_long_sentence_is_found_at_its_line(page: str, line: int) -> None:
    (found,) = too_long(page)
    assert found.line == line


@pytest.mark.parametrize(
    "page",
    [
        f"{words(35)}.\n",
        f"{words(35)}. {words(35)}! {words(35)}? (And {words(34)}.) **{words(35)}.**\n{words(35)}\n",
        f"# {words(40)}\n",
        f"```sh\n{words(40)}\n```\n",
        f"~~~\n```\n{words(40)}\n~~~\n",
        f"{words(34)} `{words(40)}`.\n",
        f"{words(33)} ``{words(20)} ` {words(20)}`` [{words(20)} `x`](page.md#{words(20)}).\n",
        f"- {words(20)}\n- {words(20)}\n1. {words(20)}\n2. {words(20)}\n",
        f"{words(20)}\n- {words(20)}\n\n{words(20)}\n## {words(20)}\n{words(20)}\n",
        f"| {words(20)} | {words(20)} |\n|---|---|\n| {words(20)} \\| x | {words(20)} |\n",
        f"{words(35)} + - = -> · \n",
    ],
    ids=["most", "ends", "heading", "code", "fence", "span", "link", "items", "blocks", "cells", "signs"],
)
def test_other_text_is_accepted(page: str) -> None:
    assert too_long(page) == []


def test_sentences_are_those_of_the_page() -> None:
    page = (
        "# Page\n\nOne `a. b`. Two [c. d](e.md)\nends here.\n\n"
        "- **Item.** Text\n  of 1.5.\n\n"
        "| a | b. c |\n|---|---|\n"
    )
    assert list(sentences(page)) == [
        (3, 2, "One `a. b`."),
        (3, 4, "Two [c. d](e.md) ends here."),
        (6, 1, "**Item.**"),
        (6, 3, "Text of 1.5."),
        (9, 1, "a"),
        (9, 1, "b."),
        (9, 1, "c"),
    ]
