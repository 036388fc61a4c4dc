"""`cloister watch`: the page of a run, over HTTP and in a real Chromium, while the run goes on."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloister.cli.shared_options import shipped_plans
from cloister.cli.view import Watched
from cloister.protocol.soundness import parse
from cloister.server import journal as steps
from cloister.server.deployment import Deployment
from cloister.server.events import to_json
from cloister.server.folder import RunFiles
from cloister.server.journal import Journal
from cloister.server.progress import (
    AttemptFailed,
    Connected,
    Event,
    Moved,
    RoundStarted,
    SiteAnswered,
    SiteFailed,
    Started,
)
from cloister.tests.browser import FITS, NEEDS_CHROMIUM, WIDTHS, Page, faint, luminance
from cloister.tests.command import lone_refusal

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>" + "w" * 300
FIELDS = ["run.name=discharge-letters", "cohort.sites=5", "privacy.budget=2.0"]
NAMES = tuple(f"hospital-{letter}" for letter in "abcde")
WAIT_S = 60.0


@dataclass
class Run:
    """A run folder that is written as a run of seven rounds writes it."""

    files: RunFiles

    def row(self, number: int, **fields: object) -> None:
        """Add a line of metrics."""
        with self.files.metrics_file.open("a") as file:
            file.write(json.dumps({"round": number} | fields) + "\n")

    def tell(self, *events: Event) -> None:
        """Add events, each one second after the one before."""
        lines = self.files.events.read_bytes().count(b"\n") if self.files.events.exists() else 0
        start = datetime(2026, 11, 22, 14, 5, 20, tzinfo=UTC)
        with self.files.events.open("a") as file:
            for number, event in enumerate(events, lines):
                at = (start + timedelta(seconds=number)).isoformat()
                file.write(json.dumps({"at": at} | json.loads(to_json(event))) + "\n")


def run_of(path: Path, *, deployed: bool) -> Run:
    """A run after seven rounds, in the eighth of which a site with a hostile reason has failed."""
    files = RunFiles(path)
    path.mkdir()
    plan = parse(shipped_plans()["default"], FIELDS)
    files.plan_file.write_text(plan.to_json())
    run = Run(files)
    run.row(0, loss=2.712, perplexity=15.06, bits_per_byte=3.91, phase_seconds={"prepare": 30.0})
    for number in range(1, 8):
        run.row(
            number, attempts=1 + (number == 3), sites=5 - (number == 3), dropouts=int(number == 3), tokens=None,
            seconds=20.5, epsilon=0.6 + 0.09 * number, loss=2.7 - 0.02 * number, perplexity=14.0 - number / 10,
            bits_per_byte=3.9 - 0.02 * number, phase_seconds={"train": 18.0, "sum": 6.0},
        )  # fmt: skip
    if deployed:
        Deployment(1, "exchange", 30.0).write(files)
        run.tell(
            Started(plan, NAMES, 43_008, 0),
            Connected(NAMES[:4], {NAMES[4]: "its SuperNode is not connected"}),
            Moved(dict.fromkeys(NAMES, 12_000_000), dict.fromkeys(NAMES, 3_500_000)),
            AttemptFailed(3, 1, "too few sites: 2, expected at least 4"),
            RoundStarted(8, 1, "train", NAMES[:4]),
            SiteAnswered(8, NAMES[0]),
            SiteFailed(8, NAMES[1], HOSTILE),
        )
    else:
        with Journal(files.journal) as journal:
            journal.record(3, 1, f"train {steps.FAILED}", {"reason": "too few sites"})
            journal.record(8, 1, f"train {steps.BEGUN}", {"cohort": list(NAMES)})
            journal.record(8, 1, steps.REFUSED, {"site": NAMES[1], "reason": HOSTILE})
    return run


class Watch:
    """The command in a process of its own."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "cloister.cli.main", "watch", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/ ", line)
        assert found, line
        self.port = int(found[1])

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.end()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, path: str = "/", method: str = "GET", host: str | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found

    def events(self) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        connection.request("GET", "/events")
        return connection.getresponse()

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C; the exit code and what it has printed as an error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, errors


def next_told(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """The next event."""
    while not (line := answer.readline()).startswith(b"data: "):
        assert line, "the server has ended"
    found = json.loads(line.removeprefix(b"data: "))
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_of(tmp_path_factory.mktemp("watched") / "run", deployed=True)


@pytest.fixture(scope="module")
def watch(run: Run) -> Iterator[Watch]:
    with Watch(run.files.path) as watch:
        yield watch


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    opened = Page(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_the_page_shows_the_run(watch: Watch) -> None:
    status, headers, body = watch.ask()
    assert status == 200
    text = " ".join(re.sub(r"<[^>]*>", " ", body).split())
    for words in (
        "discharge-letters", "7 of 12 rounds", "about 2 min left", "round 8, training: 1 of 4 sites have answered",
        "held-out loss 2.560", "epsilon spent 1.23 of a budget of 2", "sites connected 4 of 5",
        "received from sites 17.5 MB", "attempts that failed 1", "hospital-a has answered 12 MB 3.5 MB",
        "hospital-e not connected: its SuperNode is not connected", "hospital-c asked",
        "round 3: attempt 1 failed", "2026-11-22 14:05:26 UTC", "12 rounds of 5 sites, all of them in each",
        "which train 43,008 parameters", "Updates are summed under masks.", "epsilon of at most 2",
    ):  # fmt: skip
        assert words in text, words
    assert headers["Cache-Control"] == "no-store"


def test_it_answers_nothing_but_get_by_its_own_name(watch: Watch) -> None:
    """A page of another site reaches this server by its own name, if that is made to mean 127.0.0.1."""
    for host in (
        "evil.example",
        f"evil.example:{watch.port}",
        "127.0.0.1",
        f"127.0.0.1.evil:{watch.port}",
        "",
    ):
        for path in ("/", "/events"):
            status, _, body = watch.ask(path, host=host)
            assert status == 421, host
            assert "discharge" not in body
    assert watch.ask(host=f"localhost:{watch.port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
        assert watch.ask(method=method)[0] == 405
    for path in ("/plan.json", "/../plan.json", "/%2e%2e/plan.json", "//etc/passwd", "/events/"):
        assert watch.ask(path)[0] == 404


def test_it_listens_on_loopback_alone(watch: Watch) -> None:
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f"{watch.port:04X}"
    assert re.findall(rf"^ *\d+: ([0-9A-F]+):{port} 0+:0000 0A", listening, re.MULTILINE) == ["0100007F"]


def test_its_policy_allows_its_own_script_alone(watch: Watch) -> None:
    (_, first, body), (_, second, _) = watch.ask(), watch.ask()
    policy = dict(part.split(" ", 1) for part in first["Content-Security-Policy"].split("; "))
    nonce = policy["script-src"].removeprefix("'nonce-").removesuffix("'")
    assert len(nonce) > 20
    assert policy == {
        "default-src": "'none'",
        "style-src": f"'nonce-{nonce}'",
        "script-src": f"'nonce-{nonce}'",
        "connect-src": "'self'",
        "img-src": "data:",
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
    }
    assert re.findall(r"<(?:script|style)[^>]*>", body) == [
        f'<style nonce="{nonce}">',
        f'<script nonce="{nonce}">',
    ]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", body)
    assert nonce not in second["Content-Security-Policy"]


def test_text_of_a_site_does_not_become_markup(watch: Watch) -> None:
    for text in (watch.ask()[2], next_told(watch.events())["main"]):
        assert "<script>document.title" not in text
        assert "<img" not in text
        assert text.count("&lt;script&gt;document.title") == 2  # the site's state, and the failure


def test_a_simulation_is_shown_from_its_metrics_and_journal(tmp_path: Path) -> None:
    """And one that is finished."""
    run = run_of(tmp_path / "run", deployed=False)
    with Watch(run.files.path) as watch:
        body = watch.ask()[2]
        assert "round 8, training<" in body
        assert "round 3: attempt 1: too few sites" in body
        assert "hospital-b refused: &lt;script&gt;" in body
        assert '<h2 id="sites">' not in body
        told = watch.events()
        with Journal(run.files.journal) as journal:
            journal.record(7, 1, steps.FINISHED, {"stopped": "budget"})
        while "exceeded the privacy budget" not in (found := next_told(told))["main"]:
            pass
        assert found["title"] == "finished · discharge-letters"
        watch.process.send_signal(signal.SIGINT)
        assert told.read().strip() == b"", "a page that is open ends too"
        assert watch.end() == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        "cloister: sites is 2: expected at least 4",
        '{"level": "ERROR", "logger": "cloister", "message": "sites is 2: expected at least 4"}',
    ],
)
def test_a_run_whose_process_has_ended_says_why(tmp_path: Path, line: str) -> None:
    run = run_of(tmp_path / "run", deployed=True)
    log = run.files.coordinator_log
    log.write_text(f"round 7: 4 sites\n{line}\n")
    view = Watched(run.files.path).view()
    assert (view.state, view.status) == ("stopped", "stopped: sites is 2: expected at least 4")
    log.write_text(f'{line}\n{{"level": "INFO", "logger": "cloister", "message": "round 7: 4 sites"}}\n')
    assert Watched(run.files.path).view().state == "running"
    log.write_text(f"{line}\n")
    os.utime(log, (0, 0))  # an earlier process wrote it, and the run goes on
    assert Watched(run.files.path).view().state == "running"


def test_wrong_use_is_refused(
    run: Run, watch: Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the folder of a run" in lone_refusal(capsys, "watch", str(tmp_path))
    path = str(run.files.path)
    assert "a free port" in lone_refusal(capsys, "watch", path, "--port", str(watch.port))
    assert "0 to 65535" in lone_refusal(capsys, "watch", path, "--port", "65536")


@NEEDS_CHROMIUM
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_can_be_read_in_a_browser(page: Page, watch: Watch, width: int, dark: bool) -> None:
    page.show(width, dark=dark)
    page.open(watch.address)
    assert page.ask("innerWidth") == width
    assert page.ask(FITS)
    ground = luminance(page.ask("getComputedStyle(document.body).backgroundColor"))
    assert ground < 0.02 if dark else ground > 0.9
    assert faint(page) == []
    assert page.ask("document.querySelector('progress').value") == 7
    assert page.ask("document.querySelectorAll('svg').length") == 2
    assert page.ask("getComputedStyle(document.querySelector('.lost')).display") == "none"
    assert page.ask("document.title") == "7/12 · discharge-letters"
    assert page.ask("document.querySelectorAll('main script, img').length") == 0
    assert set(page.requests()) <= {watch.address, f"{watch.address}events", "data:,"}
    assert page.errors() == []


@NEEDS_CHROMIUM
def test_the_page_follows_the_run_and_says_when_it_cannot(page: Page, run: Run, watch: Watch) -> None:
    """Last, because it ends the server."""
    page.show(1280)
    page.open(watch.address)
    run.row(
        8,
        attempts=1,
        sites=5,
        dropouts=0,
        seconds=20.0,
        epsilon=1.33,
        loss=2.5,
        phase_seconds={"train": 20.0},
    )
    run.tell(RoundStarted(9, 2, "train", NAMES), SiteAnswered(9, NAMES[2]))
    changed = """new Promise(done => { const look = () => document.title.startsWith('8/') ?
      done(document.querySelector('.now').innerText) : setTimeout(look, 50); look(); })"""
    told = page.call("Runtime.evaluate", expression=changed, awaitPromise=True, returnByValue=True)
    assert told["result"]["value"] == "round 9, training, attempt 2: 1 of 5 sites have answered"
    assert page.errors() == []
    assert watch.end() == (0, "")
    lost = """new Promise(done => { const look = () => document.body.className == 'is-lost' ?
      done(getComputedStyle(document.querySelector('.lost')).display) : setTimeout(look, 50); look(); })"""
    shown = page.call("Runtime.evaluate", expression=lost, awaitPromise=True, returnByValue=True)
    assert shown["result"]["value"] == "block"
