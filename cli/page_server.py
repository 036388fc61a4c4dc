"""The server of `cloister watch`: a page on loopback that shows a run and updates itself by Server-Sent Events.

It answers GET alone, and has nothing that changes the run. A request whose Host header is another name is refused:
a page of another site, whose name is made to mean 127.0.0.1 (DNS rebinding), could otherwise read the run through the
browser of the person who watches. The page asks for nothing but its own events, and its policy (CSP) forbids the rest.
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from cloister.cli.run_page import Content, whole

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at the run, and so between two updates of the page."""
_ALIVE_S = 15.0
"""Seconds after which a browser is told that nothing has changed, so that one that has gone is noticed."""
_MOST = 16
"""Pages that are kept up to date at the same time."""
_REQUEST_S = 10.0
"""Timeout of a request in seconds."""


class PageServer(ThreadingHTTPServer):
    """Serves a page on loopback until it is closed; pages that are open end with the process.

    Args:
        port: The port; 0: one that is free.
        read: Returns what the page shows; called in one thread at a time.

    Raises:
        OSError: the port is not free.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, read: Callable[[], Content]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._shown: Content | None = None
        self._shown_at = 0.0
        self.pages = threading.Semaphore(_MOST)
        """One for each page that may still be opened."""
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the Host header that are accepted."""
        return tuple(f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost"))

    def now(self) -> Content:
        """What the page shows now; read again at most once a second, for all browsers together."""
        with self._lock:
            if self._shown is None or time.monotonic() - self._shown_at >= _LOOK_S:
                self._shown, self._shown_at = self._read(), time.monotonic()
            return self._shown

    def handle_error(self, request: object, client_address: object) -> None:
        """Report a defect, but not a browser that has gone."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request failed")


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version = "cloister"
    sys_version = ""

    def parse_request(self) -> bool:
        """Refuse what is not a GET by the name under which this server is known."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self.send_error(405, "only GET")
        elif self.headers.get_all("Host", []) not in [[host] for host in self._of.hosts]:
            self.send_error(421, "the Host header is not the address of this page")
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Answer."""
        if self.path == "/":
            self._page()
        elif self.path == "/events":
            self._events()
        else:
            self.send_error(404)

    def end_headers(self) -> None:
        """Forbid every answer to be kept, framed or taken for something else."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal shows the address."""

    @property
    def _of(self) -> PageServer:
        return cast(PageServer, self.server)

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        body = whole(self._of.now(), nonce).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
        self.end_headers()
        self.wfile.write(body)

    def _events(self) -> None:
        """The content of the page, and again after each change, until the browser or this process ends."""
        if not self._of.pages.acquire(blocking=False):
            self.send_error(503, f"{_MOST} pages are open")
            return
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            told: Content | None = None
            told_at = 0.0
            while True:
                now = self._of.now()
                if now != told:
                    told, told_at = now, time.monotonic()
                    line = json.dumps({"title": now.title, "main": now.main})
                    self.wfile.write(f"data: {line}\n\n".encode())
                elif time.monotonic() - told_at >= _ALIVE_S:
                    told_at = time.monotonic()
                    self.wfile.write(b": nothing has changed\n\n")
                time.sleep(_LOOK_S)  # not an event: the run's files do not tell that they have changed
        finally:
            self._of.pages.release()
