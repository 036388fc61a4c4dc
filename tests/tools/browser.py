"""Pages in a real Chromium, as tests look at them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cloister.tests.tools.descriptors import readable

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(
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
            ready = readable(self._from, max(0.0, until - time.monotonic()))
            assert ready, f"chromium did not answer within {ANSWER_S} s"
            more = os.read(self._from, 1 << 20)
            assert more, "chromium ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, address: str) -> None:
        """Load a page, and wait until everything that it asked for is there or refused."""
        self.events.clear()
        self.call("Page.navigate", url=address)
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

    def errors(self) -> list[dict[str, Any]]:
        """What the browser has complained about since the page was opened."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown")
        return [event for event in self.events if event.get("method") in kinds]

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
