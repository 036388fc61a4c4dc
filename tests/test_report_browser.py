"""The report's page in a real Chromium: it fits phone, desktop and paper, in light and dark, and asks for nothing."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloister.privacy.page import to_html
from cloister.privacy.report import verdict
from cloister.tests.test_report import realistic

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)"
)
ANSWER_S = 60.0
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
WIDTHS = (390, 1280)


class Page:
    """One page of a headless Chromium, driven by DevTools messages over a pair of pipes: no port, no sockets."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read_commands, self._to = os.pipe()
        self._from, write_answers = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"]
        options += [f"--user-data-dir={profile}", "--disable-background-networking", "--hide-scrollbars"]
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # Chromium's sandbox refuses root
        # The protocol is fixed to descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, CHROMIUM, *options],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is kept in `events`."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + ANSWER_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"chromium did not answer within {ANSWER_S} s"
            more = os.read(self._from, 1 << 20)
            assert more, "chromium ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, file: Path) -> None:
        """Load a file, and wait until everything that it asked for is there or refused."""
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def show(self, width: int, *, dark: bool = False, medium: str = "") -> None:
        """Give the page a width in CSS pixels, a colour scheme and a medium."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[scheme])

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; the page's own policy, which allows no script, does not bind us."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def close(self) -> None:
        """End the browser."""
        try:
            self._session = {}
            self.call("Browser.close")
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)


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


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


CONTRASTS = """
[...document.querySelectorAll('h1, h2, h3, p, li, dt, dd, th, td, caption, figcaption, code, pre, svg text')].map(e => {
  let ground = e;
  while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
  const style = getComputedStyle(e);
  return [e.tagName, e instanceof SVGElement ? style.fill : style.color, getComputedStyle(ground).backgroundColor];
}).filter((x, i, all) => all.findIndex(y => y.join() === x.join()) === i)
"""


def faint(page: Page) -> list[str]:
    """Text whose contrast with what is behind it is below WCAG's AA (4.5 to 1)."""
    found = page.ask(CONTRASTS)
    assert len(found) > 8
    pairs = [(tag, sorted((luminance(ink), luminance(ground)))) for tag, ink, ground in found]
    return [tag for tag, (low, high) in pairs if (high + 0.05) / (low + 0.05) < 4.5]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_can_be_read(page: Page, file: Path, width: int, dark: bool) -> None:
    page.show(width, dark=dark)
    page.open(file)
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
    page.open(file)
    assert page.requests() == [file.as_uri()]
    errors = [
        event for event in page.events if event.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
    ]
    assert errors == []


def test_hostile_names_neither_run_nor_push_the_page_wide(page: Page, tmp_path: Path) -> None:
    attack = '<script>document.title="taken"</script><img src=x onerror=alert(1)>' + "w" * 400
    hostile = tmp_path / "hostile.html"
    hostile.write_text(to_html(realistic(run=attack, site=attack)), encoding="utf-8")
    for width in WIDTHS:
        page.show(width)
        page.open(hostile)
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
    page.open(spoiled)
    assert not page.ask(FITS)
    assert faint(page) == ["P"]
    assert page.ask("document.title") == "Privacy report: discharge-letters"
    (tmp_path / "x.png").write_bytes(b"")
    asking = text.replace('<meta http-equiv="Content-Security-Policy"', '<meta name="none"')
    spoiled.write_text(asking.replace("<main>", '<main><img src="x.png">'), encoding="utf-8")
    page.open(spoiled)
    assert [Path(url).name for url in page.requests()] == ["spoiled.html", "x.png"]


def test_it_prints_on_paper_in_light_colours_with_every_row(page: Page, file: Path) -> None:
    page.show(794, dark=True, medium="print")  # A4 at 96 dots to the inch
    page.open(file)
    assert luminance(page.ask("getComputedStyle(document.body).backgroundColor")) == pytest.approx(1)
    assert page.ask(FITS)
    assert faint(page) == []
    tables = "[...document.querySelectorAll('.scroll')].every(s => s.scrollWidth <= s.clientWidth)"
    assert page.ask(tables)  # paper does not scroll
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
    pdf = base64.b64decode(page.call("Page.printToPDF", **paper)["data"])
    assert pdf.startswith(b"%PDF-")
    assert 4 <= pdf.count(b"/Type /Page\n") <= 12
