"""Metrics of the coordinator's process for Prometheus: what the events of the present run say, counted nowhere else.

The figures are a function of the events in the run's folder, so they are right after a restart too. They are read by
`GET /metrics` and have no personal data, but they name the sites: without a flag they are served on loopback alone.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cloister.aggregation.features.registry import FIGURES
from cloister.lm.tasks.figures import FIGURES as EVALUATED
from cloister.protocol.errors import EngineError, RosterError
from cloister.protocol.identity.address import host_of
from cloister.server.record import progress

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
    try:
        server, thread = start_http_server(int(port), host, registry)
    except OSError as error:
        raise EngineError(
            "--metrics", address, expected=f"an address that is free ({error.strerror or error})"
        ) from error
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # also "localhost", which a resolver may give any address
