"""What a monitoring system reads of a coordinator: metrics in Prometheus's text, and gRPC's health."""

from __future__ import annotations

import queue
import socket
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from prometheus_client.parser import text_string_to_metric_families

from cloister.protocol.errors import EngineError
from cloister.server.door import door as server_door
from cloister.server.federation import metrics as server_metrics
from cloister.server.federation.metrics import Metrics, served
from cloister.server.record.progress import (
    AttemptFailed,
    Connected,
    Event,
    Moved,
    RoundAbandoned,
    RoundDone,
    Started,
)
from cloister.tests.parties.door_parties import NAME, WAIT_S, entrance_at, open_channel
from cloister.tests.parties.federation import RECORD, tiny
from cloister.tests.parties.provisioned import Parties
from cloister.tests.tools.command import refusal
from cloister.tests.tools.raises import raises


def done(number: int, epsilon: float | None, **seconds: float) -> RoundDone:
    return RoundDone(
        round=number,
        attempts=1,
        sites=3,
        dropouts=0,
        seconds=1.0,
        update_norm=1.0,
        params_sha256="",
        epsilon=epsilon,
        phase_seconds=seconds,
        figures={"too_stale": 2, "mean_staleness": 0.5, "staleness": {"a": [1, 0]}},
    )


EVENTS: list[Event] = [
    Started(tiny(*RECORD, "privacy.budget=2.0"), ("a", "b", 'c"\\\n'), 10, 1),
    Connected(("a", "b"), {"c": "invited"}),
    AttemptFailed(2, 1, "too few sites"),
    done(2, 0.5, train=2.0, sum=0.5),
    Moved({"a": 5, 'c"\\\n': 7}, {"a": 3}),
    RoundAbandoned(3, 1, "", 0.75, phase_seconds={"train": 1.0}),
]


def read(address: str) -> dict[tuple[str, ...], float]:
    """Each sample of a scrape by name and label values, without the run's."""
    with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels.get("run") == "letters" for sample in samples if sample.labels)
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "run")): sample.value
        for sample in samples
    }


def test_the_metrics_are_what_the_events_say() -> None:
    metrics = Metrics()
    with served(metrics, "127.0.0.1:0", on_network=False) as address:
        assert read(address) == {("cloister_running",): 0.0}
        metrics.begin("letters")
        for event in EVENTS:
            metrics.take(event)
        assert read(address) == {
            ("cloister_running",): 1.0,
            ("cloister_rounds_done_total",): 3.0,
            ("cloister_rounds",): 3.0,
            ("cloister_attempts_failed_total",): 1.0,
            ("cloister_too_stale_total",): 2.0,
            ("cloister_mean_staleness",): 0.5,
            ("cloister_sites_connected",): 2.0,
            ("cloister_sites_missing",): 1.0,
            ("cloister_sent_bytes_total", "a"): 5.0,
            ("cloister_sent_bytes_total", 'c"\\\n'): 7.0,
            ("cloister_received_bytes_total", "a"): 3.0,
            ("cloister_phase_seconds_total", "train"): 3.0,
            ("cloister_phase_seconds_total", "sum"): 0.5,
            ("cloister_epsilon",): 0.75,
            ("cloister_epsilon_budget",): 2.0,
        }
        metrics.end()
        last = read(address)
        assert (last[("cloister_running",)], last[("cloister_epsilon",)]) == (0.0, 0.75)
        metrics.begin("letters")
        assert read(address)[("cloister_rounds_done_total",)] == 0.0, "another run"
    with pytest.raises(URLError):
        urllib.request.urlopen(address, timeout=WAIT_S)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:9464", "localhost:9464"])
def test_metrics_are_served_on_loopback_alone(address: str) -> None:
    with (
        raises(EngineError, "--metrics", says="loopback"),
        served(Metrics(), address, on_network=False),
    ):
        pass


def test_a_flag_allows_the_network_and_a_wrong_address_is_said() -> None:
    with served(Metrics(), "0.0.0.0:0", on_network=True) as address:
        port = address.rpartition(":")[2].removesuffix("/metrics")
        assert read(f"http://127.0.0.1:{port}/metrics")
        with (
            raises(EngineError, "--metrics", says="is free"),
            served(Metrics(), f"127.0.0.1:{port}", on_network=False),
        ):
            pass
    for wrong in ("9464", "127.0.0.1", "127.0.0.1:99999", "http://127.0.0.1:1"):
        with raises(EngineError, "--metrics", says="HOST:PORT"), served(Metrics(), wrong, on_network=True):
            pass


@pytest.mark.parametrize(
    ("host", "code"), [("evil.example", 403), ("[evil", 403), ("localhost", 200), ("127.0.0.1:1", 200)]
)
def test_on_loopback_requests_by_another_name_are_refused(host: str, code: int) -> None:
    with served(Metrics(), "127.0.0.1:0", on_network=False) as address:
        asked = urllib.request.Request(address, headers={"Host": host})
        try:
            with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
                found = answer.status
        except HTTPError as error:
            found = error.code
        assert found == code


def test_connections_that_are_silent_are_few_and_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_metrics, "_CONNECTIONS", 2)
    assert server_metrics._Handler.timeout == server_metrics._TIMEOUT_S
    monkeypatch.setattr(server_metrics._Handler, "timeout", 0.3)
    with served(Metrics(), "127.0.0.1:0", on_network=False) as address, ExitStack() as opened:
        url = urlsplit(address)
        assert url.hostname
        assert url.port
        for _ in range(3):
            silent = opened.enter_context(socket.create_connection((url.hostname, url.port), WAIT_S))
        assert silent.recv(1) == b"", "it has no place, and is closed at once"
        for _ in range(2):
            opened.enter_context(socket.create_connection((url.hostname, url.port), WAIT_S))
        until = time.monotonic() + WAIT_S
        while True:
            try:
                assert read(address) == {("cloister_running",): 0.0}
                break
            except OSError:
                assert time.monotonic() < until
    assert capfd.readouterr().err == ""


def test_a_coordinator_does_not_start_with_metrics_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unsynced: None
) -> None:
    parties = Parties(tmp_path, capsys)
    parties.made()
    start = ("coordinator", "start", str(parties.coordinator), "--metrics", "0.0.0.0:0")
    assert "an address of loopback" in refusal(capsys, *start)


# gRPC health


@pytest.mark.usefixtures("talkative")
def test_the_door_is_healthy_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by gRPC's own client, which proves nothing."""
    monkeypatch.setattr(server_door, "HANDSHAKE_S", 0.3)
    with open_channel(tmp_path) as channel:
        credentials = grpc.ssl_channel_credentials(entrance_at(channel.address).root)
        options = [("grpc.ssl_target_name_override", NAME)]
        with grpc.secure_channel(channel.address, credentials, options) as peer:
            stub, silent = HealthStub(peer), peer.stream_stream("/grpc.health.v1.Health/Check")
            unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            for service in ("", "cloister.Door"):
                found = stub.Check(HealthCheckRequest(service=service), timeout=WAIT_S)
                assert found.status == HealthCheckResponse.SERVING
            for ask, code in (
                (lambda: stub.Check(HealthCheckRequest(service="other"), timeout=WAIT_S), "NOT_FOUND"),
                # A call that stays, as often as anybody likes.
                (lambda: list(stub.Watch(HealthCheckRequest(), timeout=WAIT_S)), "UNIMPLEMENTED"),
                # A call that says nothing ends.
                (lambda: list(silent(iter(unsent.get, None), timeout=WAIT_S)), "DEADLINE_EXCEEDED"),
            ):
                with pytest.raises(grpc.RpcError) as raised:
                    ask()
                assert raised.value.code().name == code
                assert "Deadline Exceeded" not in raised.value.details(), "the server has ended it"
            unsent.put(None)
        with grpc.secure_channel(channel.address, credentials, options) as peer:
            channel.close()
            with pytest.raises(grpc.RpcError) as raised:
                HealthStub(peer).Check(HealthCheckRequest(), timeout=WAIT_S)
            assert raised.value.code().name == "UNAVAILABLE"
