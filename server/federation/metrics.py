"""Metrics of the coordinator's process for Prometheus: what the events of the present run say, counted nowhere else.

The figures are a function of the events in the run's folder, so they are right after a restart too. They are read by
`GET /metrics` and have no personal data, but they name the sites: without a flag they are served on loopback alone.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.measures.figures import FIGURES as EVALUATED
from cloister.protocol.errors import EngineError, RosterError
from cloister.protocol.identity.address import host_of
from cloister.server.record import progress

_TIMEOUT_S = 10.0
"""Seconds for which a connection may say nothing."""
_CONNECTIONS = 16
"""Connections at once; a further one is closed."""
_FAMILIES: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str]] = {
    "rounds_done": (CounterMetricFamily, "Rounds that are done", ""),
    "attempts_failed": (CounterMetricFamily, "Attempts at a sum that failed", ""),
    "sent_bytes": (CounterMetricFamily, "Bytes that a site was sent by the run's process", "site"),
    "received_bytes": (CounterMetricFamily, "Bytes that came from a site", "site"),
    "phase_seconds": (CounterMetricFamily, "Seconds of finished rounds by phase", "phase"),
    "rounds": (GaugeMetricFamily, "Rounds of the plan", ""),
    "sites_connected": (GaugeMetricFamily, "Sites that are connected", ""),
    "sites_missing": (GaugeMetricFamily, "Sites that are not connected", ""),
    "epsilon": (GaugeMetricFamily, "Largest epsilon of a site, by the coordinator's ledger", ""),
    "epsilon_budget": (GaugeMetricFamily, "Epsilon that the plan allows", ""),
    **{
        figure.name: (
            CounterMetricFamily if figure.over == "sum" else GaugeMetricFamily,
            figure.named("token"),
            "",
        )
        for figure in (*FIGURES, *EVALUATED)
    },
}
"""By name: the kind, what it is, and the label beside that of the run, if it has one."""
_FROM_ZERO = ("rounds_done", "attempts_failed", "sites_connected", "sites_missing")


class Metrics(Collector):
    """The metrics of the run that runs, or of the last one, so that its end is read too; for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin("")
        self.end()

    def begin(self, run: str) -> None:
        """Another run begins, or the same is started again, under this label."""
        with self._lock:
            self._run, self._running = run, True
            self._values: defaultdict[str, Counter[str]] = defaultdict(Counter)
            self._values |= {name: Counter({"": 0}) for name in _FROM_ZERO}

    def end(self) -> None:
        """The run has ended; its figures stay until another one begins."""
        with self._lock:
            self._running = False

    def take(self, event: progress.Event) -> None:
        """Take the next event of the run."""
        with self._lock:
            match event:
                case progress.Started(plan, done=done):
                    budget = plan.privacy.target_epsilon or plan.privacy.budget
                    self._set(rounds_done=done, rounds=plan.run.rounds, epsilon_budget=budget)
                case progress.AttemptFailed():
                    self._values["attempts_failed"][""] += 1
                case progress.Connected():
                    self._set(sites_connected=len(event.sites), sites_missing=len(event.missing))
                case progress.Moved():
                    self._values["sent_bytes"] = Counter(event.sent)
                    self._values["received_bytes"] = Counter(event.received)
                case progress.Finished():
                    self._set(epsilon=event.epsilon)
                case progress.RoundDone() | progress.RoundAbandoned():
                    self._set(rounds_done=event.round, epsilon=event.epsilon)
                    self._values["phase_seconds"].update(event.phase_seconds)
            for name, value in getattr(event, "figures", {}).items():
                if name in _FAMILIES and isinstance(value, int | float):
                    sums = _FAMILIES[name][0] is CounterMetricFamily
                    self._set(**{name: value + (self._values[name][""] if sums else 0)})

    def _set(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._values[name] = Counter({"": value})

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        with self._lock:
            yield GaugeMetricFamily("cloister_running", "1 while a run goes on", float(self._running))
            for name, (family, help_, label) in _FAMILIES.items() if self._run else ():
                found = family(f"cloister_{name}", help_, labels=["run", label] if label else ["run"])
                for value, count in self._values[name].items():
                    found.add_metric([self._run, value] if label else [self._run], count)
                yield found


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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing of a peer that stays silent or breaks off; errors of the metrics are logged by WSGI."""


class _V6(_Server):
    address_family = socket.AF_INET6


def _of_this_machine(app: WSGIApplication) -> WSGIApplication:
    """Refuses requests by another name, as a page in a browser sends them whose name was made one of loopback."""

    def answered(environ: WSGIEnvironment, start: StartResponse) -> Any:
        name = ""
        with suppress(ValueError):  # no name, such as one with a single bracket
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
