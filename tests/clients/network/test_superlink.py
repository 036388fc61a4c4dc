"""The keys by which Flower's SuperLink lets SuperNodes connect, when sites leave and come back."""

from __future__ import annotations

import contextlib
import datetime
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloister.clients.setup.enrolment import make_request
from cloister.protocol.identity.address import free_port
from cloister.server.federation.app import SuperLink
from cloister.server.federation.coordinator import Coordinator
from cloister.server.federation.registry import Registry, Terms

NOW = datetime.datetime.now(datetime.UTC)
WAIT_S = 120.0

# Flower 1.39 calls pathspec by a name that it has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),
    pytest.mark.usefixtures("unsynced"),
]


@contextlib.contextmanager
def coordinator(folder: Path) -> Iterator[Callable[[str], str]]:
    """A coordinator that is ready; gives what waits until it has told something, and returns the line."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    bind = f"127.0.0.1:{free_port()}"
    process = Coordinator(folder, told.put, superlink_bind=bind, exchange_bind=f"127.0.0.1:{free_port()}")
    thread = threading.Thread(target=process.run)
    thread.start()

    def wait_for(words: str) -> str:
        while words not in (line := told.get(timeout=WAIT_S)):
            pass
        return line

    try:
        yield wait_for
    finally:
        process.stop()
        thread.join(WAIT_S)


@pytest.mark.slow
def test_a_site_that_was_removed_comes_back(tmp_path: Path) -> None:
    names = ("north", "east", "south", "west")
    requests = [make_request(tmp_path / name, name, "a person", NOW.date())[0] for name in names]
    address = f"fl.example.org:{free_port()}"
    terms = Terms(name="oncology", superlink=address, exchange=address)
    registry = Registry.create(tmp_path / "federation", terms, requests, NOW, durable=False)
    keys = {site.name: site.supernode for site in registry.federation.sites}
    with coordinator(registry.path) as wait_for:
        (port,) = re.findall(r"--port ([0-9]+)", wait_for("started: "))
        wait_for("ready: ")
        secret = (registry.path / "flower" / "secret").read_bytes()
        with SuperLink(f"127.0.0.1:{port}", secret, registry.certificate_bytes("authority")) as superlink:
            without = {name: key for name, key in keys.items() if name != "west"}
            for _ in range(2):  # the second time it is removed already
                assert superlink.admit(without)
            assert not superlink.admit(keys)  # Flower does not take it back
    with coordinator(registry.path) as wait_for:
        (port,) = re.findall(r"--port ([0-9]+)", wait_for("started: "))
        wait_for("empty database")
        wait_for("ready: ")
        secret = (registry.path / "flower" / "secret").read_bytes()
        with SuperLink(f"127.0.0.1:{port}", secret, registry.certificate_bytes("authority")) as superlink:
            assert superlink.admit(keys)
