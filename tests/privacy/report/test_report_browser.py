"""The report's page in a real Chromium: it fits phone, desktop and paper, in light and dark, and asks for nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.privacy.report.page import to_html
from cloister.privacy.report.report import verdict
from cloister.tests.privacy.report.test_report import realistic
from cloister.tests.tools.browser import FITS, NEEDS_CHROMIUM, WIDTHS, Page, faint, luminance

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    opened = Page(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(to_html(realistic()), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_can_be_read(page: Page, file: Path, width: int, dark: bool) -> None:
    page.show(width, dark=dark)
    page.open(file.as_uri())
    assert page.ask("innerWidth") == width
    assert page.ask(FITS)
    ground = luminance(page.ask("getComputedStyle(document.body).backgroundColor"))
    assert ground < 0.02 if dark else ground > 0.9
    assert faint(page) == []
    box = page.ask("(() => { const r = document.querySelector('.sentence').getBoundingClientRect();"
                   " return [r.left, r.top, r.right, r.bottom]; })()")  # fmt: skip
    assert 0 <= box[0] < box[2] <= width
    assert 0 <= box[1] < box[3] <= 900  # on the first screen, without scrolling
    assert verdict(realistic()).sentence in page.ask("document.body.innerText")
    smallest = page.ask("Math.min(...[...document.querySelectorAll('svg')].map(s => "
                        "11 * s.getBoundingClientRect().width / 360))")  # fmt: skip
    assert smallest > 9  # pixels of the plots' text


def test_the_page_asks_for_nothing_but_itself(page: Page, file: Path) -> None:
    page.show(1280)
    page.open(file.as_uri())
    assert page.requests() == [file.as_uri()]
    assert page.errors() == []


def test_hostile_names_neither_run_nor_push_the_page_wide(page: Page, tmp_path: Path) -> None:
    attack = '<script>document.title="taken"</script><img src=x onerror=alert(1)>' + "w" * 400
    hostile = tmp_path / "hostile.html"
    hostile.write_text(to_html(realistic(run=attack, site=attack)), encoding="utf-8")
    for width in WIDTHS:
        page.show(width)
        page.open(hostile.as_uri())
        assert page.ask("document.querySelectorAll('script, img').length") == 0
        assert page.ask("document.title").startswith("Privacy report: <script>")
        assert page.ask(FITS)
        assert page.requests() == [hostile.as_uri()]


def test_the_checks_fail_on_a_page_that_is_wrong(page: Page, file: Path, tmp_path: Path) -> None:
    """A wide element, faint text, a picture from elsewhere, a script that the policy stops."""
    spoiled = tmp_path / "spoiled.html"
    text = file.read_text(encoding="utf-8")
    extra = '<p style="width: 1400px; color: #999; background: #aaa">wide and faint</p>'
    extra += "<script>document.title = 1</script>"
    spoiled.write_text(text.replace("<main>", f"<main>{extra}"), encoding="utf-8")
    page.show(390)
    page.open(spoiled.as_uri())
    assert not page.ask(FITS)
    assert faint(page) == ["P"]
    assert page.ask("document.title") == "Privacy report: discharge-letters"
    (tmp_path / "x.png").write_bytes(b"")
    asking = text.replace('<meta http-equiv="Content-Security-Policy"', '<meta name="none"')
    spoiled.write_text(asking.replace("<main>", '<main><img src="x.png">'), encoding="utf-8")
    page.open(spoiled.as_uri())
    assert [Path(url).name for url in page.requests()] == ["spoiled.html", "x.png"]


def test_it_prints_on_paper_in_light_colours_with_every_row(page: Page, file: Path) -> None:
    page.show(794, dark=True, medium="print")  # A4 at 96 dots to the inch
    page.open(file.as_uri())
    assert luminance(page.ask("getComputedStyle(document.body).backgroundColor")) == pytest.approx(1)
    assert page.ask(FITS)
    assert faint(page) == []
    tables = "[...document.querySelectorAll('.scroll')].every(s => s.scrollWidth <= s.clientWidth)"
    assert page.ask(tables)  # paper does not scroll
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
    pdf = base64.b64decode(page.call("Page.printToPDF", **paper)["data"])
    assert pdf.startswith(b"%PDF-")
    assert 4 <= pdf.count(b"/Type /Page\n") <= 12
