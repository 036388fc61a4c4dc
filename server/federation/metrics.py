"""Metrics of the coordinator's process for Prometheus: what the events of the present run say, counted nowhere else.

The figures are a function of the events in the run's folder, so they are right after a restart too. They are read by
`GET /metrics` and have no personal data, but they name the sites: without a flag they are served on loopback alone.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.tasks.figures import FIGURES as EVALUATED
from cloister.protocol.errors import EngineError, RosterError
from cloister.protocol.identity.address import host_of
from cloister.server.record import progress

_TIMEOUT_S = 10.0
"""Seconds for which a connection may say nothing."""
_CONNECTIONS = 16
"""Connections at once; a further one is closed."""


class Metrics(Collector):
    """The metrics of the run that runs, or of the last one, so that its end is read too; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin("")
        self.end()

    def begin(self, run: str) -> None:
        """Another run begins, or the same is started again, under this label."""
        with self._lock:
            self._run = run
            self._running = True
            self._rounds = self._of = self._attempts_failed = 0
            self._connected = progress.Connected((), {})
            self._moved = progress.Moved({}, {})
            self._seconds: Counter[str] = Counter()
            self._figures: dict[str, float] = {}
            self._epsilon: float | None = None
            self._budget: float | None = None

    def end(self) -> None:
        """The run has ended; its figures stay until another one begins."""
        with self._lock:
            self._running = False

    def take(self, event: progress.Event) -> None:
        """Take the next event of the run."""
        with self._lock:
            match event:
                case progress.Started(plan, done=done):
                    self._rounds, self._of = done, plan.run.rounds
                    self._budget = plan.privacy.target_epsilon or plan.privacy.budget
                case progress.AttemptFailed():
                    self._attempts_failed += 1
                case progress.Connected():
                    self._connected = event
                case progress.Moved():
                    self._moved = event
                case progress.RoundDone() | progress.RoundAbandoned():
                    self._rounds, self._epsilon = event.round, event.epsilon
                    self._seconds.update(event.phase_seconds)
                    if isinstance(event, progress.RoundDone):
                        self._add(event.figures)
                case progress.Evaluated():
                    self._add(event.figures)

    def _add(self, figures: Mapping[str, Any]) -> None:
        """Take the figures of a round: those that are sums over rounds add up, others are the newest."""
        for figure in (*FIGURES, *EVALUATED):
            value = figures.get(figure.name)
            if isinstance(value, int | float):
                before = self._figures.get(figure.name, 0) if figure.over == "sum" else 0
                self._figures[figure.name] = before + value

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        with self._lock:
            yield GaugeMetricFamily("cloister_running", "1 while a run goes on", float(self._running))
            if not self._run:
                return
            counters = {
                "rounds_done": ("Rounds that are done", {"": self._rounds}, ""),
                "attempts_failed": ("Attempts at a sum that failed", {"": self._attempts_failed}, ""),
                "sent_bytes": ("Bytes that a site was sent by the run's process", self._moved.sent, "site"),
                "received_bytes": ("Bytes that came from a site", self._moved.received, "site"),
                "phase_seconds": ("Seconds of finished rounds by phase", self._seconds, "phase"),
            }
            for name, (help_, values, label) in counters.items():
                labels = ["run", label] if label else ["run"]
                counter = CounterMetricFamily(f"cloister_{name}", help_, labels=labels)
                for value, count in values.items():
                    counter.add_metric([self._run, value][: len(labels)], count)
                yield counter
            gauges: dict[str, tuple[str, float | None]] = {
                "rounds": ("Rounds of the plan", self._of or None),
                "sites_connected": ("Sites that are connected", len(self._connected.sites)),
                "sites_missing": ("Sites that are not connected", len(self._connected.missing)),
                "epsilon": ("Largest epsilon of a site, by the coordinator's ledger", self._epsilon),
                "epsilon_budget": ("Epsilon that the plan allows", self._budget),
            }
            for name, (help_, value_) in gauges.items():
                gauge = GaugeMetricFamily(f"cloister_{name}", help_, labels=["run"])
                if value_ is not None:
                    gauge.add_metric([self._run], value_)
                yield gauge
            for figure in (*FIGURES, *EVALUATED):
                if figure.name in self._figures:
                    family = CounterMetricFamily if figure.over == "sum" else GaugeMetricFamily
                    shown = family(f"cloister_{figure.name}", figure.named("token"), labels=["run"])
                    shown.add_metric([self._run], self._figures[figure.name])
                    yield shown


@contextmanager
def served(metrics: Metrics, address: str, *, on_network: bool) -> Iterator[str]:
    """A context in which metrics are served.

    Args:
        metrics: The metrics.
        address: HOST:PORT; port 0: one that is free.
        on_network: Whether the host may be another than loopback.

    Returns:
        Where they are.

    Raises:
        EngineError: the address is wrong or not free, or not of loopback.
    """
    host, _, port = address.rpartition(":")
    try:
        host = host_of(f"{host}:{port if port != '0' else '1'}")
    except RosterError as error:
        raise EngineError("--metrics", address, expected=error.expected) from None
    if not on_network and not _loopback(host):
        raise EngineError(
            "--metrics",
            address,
            expected="an address of loopback, such as 127.0.0.1:9464, because the metrics are not protected and name "
            "the sites",
            fix="add --metrics-on-network if others may read them",
        )
    registry = CollectorRegistry()
    registry.register(metrics)
    shown = f"[{host}]" if ":" in host else host
    try:
        app = make_wsgi_app(registry)
        served = app if on_network else _of_this_machine(app)
        server = make_server(host, int(port), served, _V6 if ":" in host else _Server, _Handler)
    except OSError as error:
        raise EngineError(
            "--metrics", address, expected=f"an address that is free ({error.strerror or error})"
        ) from error
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(WSGIRequestHandler):
    """A connection that logs nothing and does not stay silent."""

    timeout = _TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingWSGIServer):
    """A thread for each connection, and few of them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = threading.BoundedSemaphore(_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _V6(_Server):
    address_family = socket.AF_INET6


def _of_this_machine(app: WSGIApplication) -> WSGIApplication:
    """Refuses requests by another name, as a page in a browser sends them whose name was made one of loopback."""

    def answered(environ: WSGIEnvironment, start: StartResponse) -> Any:
        name = urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname or ""
        if name == "localhost" or _loopback(name):
            return app(environ, start)
        start("403 Forbidden", [])
        return []

    return answered


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # also "localhost", which a resolver may give any address
