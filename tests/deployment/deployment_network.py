"""`docs/deployment.md`, followed word for word over a network: each party has its own address, and sites a firewall.

It needs root, `ip netns` and nftables, and takes some minutes, so it is not part of the suite. With `pytest -s` it
prints what it has measured.

A bridge connects network namespaces. The firewall of a site lets it open connections to the coordinator's port and to
nothing else, and lets no connection in. One site knows a proxy only. The firewall of the coordinator lets connections
to the port in, and lets it open none. What they drop is counted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloister.tests.parties.operators import (
    COORDINATOR,
    OTHERS,
    PAGE,
    SITE,
    Operators,
    commands,
    digest_in,
    events,
    start,
)

PARTIES = (COORDINATOR, SITE, *OTHERS)
NAME = "fl.example.org"
BEHIND = OTHERS[0]
"""The site that reaches the coordinator through a proxy alone, and does not know its name."""
PROXY = "proxy.hospital.example"
PORT = 9443
WAIT_S = 300.0
CUT_S = 60.0

_FIREWALL = """
table inet cloister {{
  counter dropped {{ }}
  chain cut {{ }}
  chain input {{
    type filter hook input priority 0; policy accept;
    jump cut
    iif lo accept
    ct state established,related accept
    meta l4proto ipv6-icmp accept
    {inbound}
    counter name dropped drop
  }}
  chain output {{
    type filter hook output priority 0; policy accept;
    jump cut
    oif lo accept
    ct state established,related accept
    meta l4proto {{ ipv6-icmp, igmp }} accept
    {outbound}
    counter name dropped drop
  }}
}}
"""
_SLOW = """
[run]
name = "slow"
rounds = 2
[model.config]
hidden_size = 96
intermediate_size = 256
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 4
[data]
sequence_length = 32
held_out = 0.0
[local]
steps = 2
batch_size = 4
[cohort]
sites = 3
deadline_s = 300
[server]
evaluation = "none"
"""
"""A model of 1.5 MB: its upload over a slow link takes half a minute."""


def _missing() -> str:
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    for program in ("ip", "nft", "tc"):
        if not shutil.which(program):
            return f"it needs {program} (Debian: iproute2, nftables)"
    made = subprocess.run(["ip", "netns", "add", "cloister-try"], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", "cloister-try"], check=True)
    return ""


_MISSING = _missing()
pytestmark = [
    pytest.mark.deployment,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING),
]


def _ran(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout


class Network:
    """Namespaces of all parties, each with an address on one bridge, a firewall, and the coordinator's name.

    Args:
        prefix: Of the names of the namespaces.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.addresses = {party: f"10.213.7.{number}" for number, party in enumerate(PARTIES, 1)}
        self.proxy = "10.213.7.100"

    def name(self, party: str) -> str:
        """The namespace of a party."""
        return f"{self.prefix}-{party}"

    def inside(self, party: str, *command: str, text: str | None = None) -> str:
        """Run a command in a party's network."""
        return _ran("ip", "netns", "exec", self.name(party), *command, text=text)

    def open(self) -> None:
        """Make it."""
        _ran("ip", "netns", "add", self.name("bridge"))
        self.inside("bridge", "ip", "link", "add", "bridge", "type", "bridge")
        self.inside("bridge", "ip", "address", "add", f"{self.proxy}/24", "dev", "bridge")
        self.inside("bridge", "ip", "link", "set", "bridge", "up")
        self._hosts("bridge", NAME, self.addresses[COORDINATOR])
        for party, address in self.addresses.items():
            name, port = self.name(party), f"to{address.rpartition('.')[2]}"
            _ran("ip", "netns", "add", name)
            if party == BEHIND:
                self._hosts(party, PROXY, self.proxy)
            else:
                self._hosts(party, NAME, self.addresses[COORDINATOR])
            link = ("type", "veth", "peer", "name", port, "netns", self.name("bridge"))
            self.inside(party, "ip", "link", "add", "net", *link)
            self.inside("bridge", "ip", "link", "set", port, "master", "bridge", "up")
            self.inside(party, "ip", "address", "add", f"{address}/24", "dev", "net")
            self.inside(party, "ip", "link", "set", "lo", "up")
            self.inside(party, "ip", "link", "set", "net", "up")
            inbound, outbound = "", f"ip daddr {self.addresses[COORDINATOR]} tcp dport {PORT} accept"
            if party == COORDINATOR:
                inbound, outbound = f"tcp dport {PORT} accept", ""
            elif party == BEHIND:
                outbound = f"ip daddr {self.proxy} tcp dport 3128 accept"
            self.inside(party, "nft", "-f", "-", text=_FIREWALL.format(inbound=inbound, outbound=outbound))

    def _hosts(self, party: str, name: str, address: str) -> None:
        """Let a party know one name."""
        folder = Path("/etc/netns", self.name(party))
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")

    def close(self) -> None:
        """Remove it."""
        for party in ("bridge", *PARTIES):
            subprocess.run(["ip", "netns", "delete", self.name(party)], capture_output=True)
            shutil.rmtree(Path("/etc/netns", self.name(party)), ignore_errors=True)

    def dropped(self, party: str) -> int:
        """Packets that a party's firewall has dropped, besides those of `cut`."""
        found = json.loads(self.inside(party, "nft", "--json", "list", "counters"))
        return sum(each["counter"]["packets"] for each in found["nftables"] if "counter" in each)

    def cut(self, party: str) -> None:
        """Drop all packets of a party's network."""
        self.inside(party, "nft", "add", "rule", "inet", "cloister", "cut", "oif", "net", "drop")
        self.inside(party, "nft", "add", "rule", "inet", "cloister", "cut", "iif", "net", "drop")

    def mend(self, party: str) -> None:
        """Let packets pass again."""
        self.inside(party, "nft", "flush", "chain", "inet", "cloister", "cut")

    def slow_down(self, party: str, rate: str) -> None:
        """Limit what a party sends to a rate."""
        limit = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        self.inside(party, "tc", "qdisc", "add", "dev", "net", "root", *limit)

    def speed_up(self, party: str) -> None:
        """Remove the limit."""
        self.inside(party, "tc", "qdisc", "delete", "dev", "net", "root")


class There:
    """A machine on the network.

    Args:
        network: The network.
        party: Whose machine.
        folder: Where its person types.
    """

    def __init__(self, network: Network, party: str, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._party = party
        self._before = ["ip", "netns", "exec", network.name(party)]

    def run(self, words: Sequence[str]) -> str:
        assert words[0] == "cloister"
        done = subprocess.run(
            [*self._before, sys.executable, "-m", "cloister.cli.main", *words[1:]],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        variables = {"HTTPS_PROXY": f"http://{PROXY}:3128"} if self._party == BEHIND else {}
        return start(self.folder, words, self._before, **variables)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    network = Network(f"cloister-{os.getpid()}")
    try:
        network.open()
        yield network
    finally:
        network.close()


@pytest.fixture(scope="module")
def proxy(network: Network) -> Iterator[list[str]]:
    """What the proxy is asked for."""
    command = [
        "ip",
        "netns",
        "exec",
        network.name("bridge"),
        sys.executable,
        "-m",
        "cloister.tests.parties.connect_proxy",
    ]
    process = subprocess.Popen([*command, network.proxy, "3128"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    asked: list[str] = []
    lines = process.stdout
    reading = threading.Thread(target=lambda: asked.extend(lines), daemon=True)
    reading.start()
    yield asked
    process.terminate()
    process.wait()
    reading.join()
    lines.close()


@pytest.fixture(scope="module")
def operators(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    folder = tmp_path_factory.mktemp("network")
    operators = Operators({party: There(network, party, folder / party) for party in PARTIES})
    yield operators
    operators.end_all()


def _report(what: str, seconds: float) -> None:
    print(f"\n{what}: {seconds:.1f} s", flush=True)


def test_the_page_word_for_word(network: Network, operators: Operators, proxy: list[str]) -> None:
    """With the page's own addresses; the firewalls have had nothing to drop."""
    for said in (f"`{NAME}:{PORT}`", f"`HTTPS_PROXY=http://{PROXY}:3128`"):
        assert said in PAGE
    began = time.monotonic()
    operators.join()
    _report("join", time.monotonic() - began)
    operators.write_plan()
    for command in commands("Run it"):
        began = time.monotonic()
        if (
            "submit first.toml" in command
        ):  # else the run may end before the persons have looked and stopped it
            network.slow_down(BEHIND, "64kbit")
        operators.type(command)
        if "stop" in command:
            network.speed_up(BEHIND)
        printed = operators.printed.get(command, "")
        if "coordinator start" in command:
            operators.wait_for_log(COORDINATOR, "ready: ")
        elif "plan check" in command:
            operators.accept_plan(digest_in(printed))
        elif "--follow" in command:
            assert "finished 3 rounds" in printed
        _report(command, time.monotonic() - began)
    for command in commands("Services"):
        operators.type(command)
    assert {party: network.dropped(party) for party in PARTIES} == dict.fromkeys(PARTIES, 0)
    assert set(proxy) == {f"CONNECT {NAME}:{PORT}\n"}


@pytest.fixture(scope="module")
def federation(operators: Operators, proxy: list[str]) -> Operators:
    """All persons, of whose federation the processes run."""
    if not operators.staying:
        operators.join()
    return operators


class Run:
    """A run that was submitted besides those of the page.

    Args:
        operators: The persons.
        name: Its name, that of its plan.
        plan: The plan, without a privacy unit.
    """

    def __init__(self, operators: Operators, name: str, plan: str) -> None:
        self.coordinator = operators.coordinator
        self.path = self.coordinator.folder / "federation" / "runs" / name
        file = f"{name}.toml"
        (self.coordinator.folder / file).write_text(plan)
        checked = self.coordinator.run(["cloister", "plan", "check", file])
        for site in operators.sites:
            operators.set(site, policy="", plan=digest_in(checked))
        self.coordinator.run(["cloister", "submit", file, "--to", "federation"])

    def wait_for(self, what: str, seen: Any) -> float:
        """Wait until the events are as `seen` says; returns the time."""
        until, look = time.monotonic() + WAIT_S, threading.Event()
        while not seen(events(self.path) if (self.path / "events.jsonl").exists() else []):
            assert time.monotonic() < until, f"{what}: {events(self.path)[-5:]}"
            look.wait(0.1)
        return time.monotonic()


def _moved(found: list[dict[str, Any]], site: str = SITE) -> list[int]:
    """The bytes that the coordinator has received from a site, each time that they are told."""
    return [int(event["received"].get(site, 0)) for event in found if event["event"] == "Moved"]


def _count(found: list[dict[str, Any]], kind: str) -> int:
    return sum(event["event"] == kind for event in found)


def test_a_cut_of_a_minute_in_an_upload(network: Network, federation: Operators) -> None:
    """The upload goes on where it broke off, in the same attempt."""
    network.slow_down(SITE, "400kbit")
    run = Run(federation, "slow", _SLOW)
    run.wait_for("the upload has begun", lambda found: max(_moved(found), default=0) > 400_000)
    before = _moved(events(run.path))[-1]
    network.cut(SITE)
    cut = time.monotonic()
    threading.Event().wait(CUT_S)
    held = _moved(events(run.path))[-1]
    network.mend(SITE)
    mended = time.monotonic()
    print(f"\nthe upload had {before} bytes before the cut of {mended - cut:.0f} s, {held} after it")
    goes_on = run.wait_for("the upload goes on", lambda found: _moved(found)[-1] > held)
    _report("from the end of the cut until the upload goes on", goes_on - mended)
    network.speed_up(SITE)
    run.coordinator.run(["cloister", "status", "federation", "--follow"])
    found = events(run.path)
    assert _count(found, "RoundDone") == 2
    assert [event for event in found if event["event"] in ("AttemptFailed", "SiteFailed")] == []
    received = {site: _moved(found, site)[-1] for site in (SITE, *OTHERS)}
    print(f"\nreceived: {received}")
    assert len(set(received.values())) == 1, "no byte was received twice"


def _children(pid: int) -> dict[int, str]:
    """The children of a process, with their command lines."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text().split()]
    return {
        child: Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode() for child in children
    }


def _kill(operators: Operators, party: str, of: str) -> None:
    """Kill a process that a party's command has started; empty: the command itself, and start it again."""
    if of:
        (pid,) = [pid for pid, line in _children(operators.staying[party].pid).items() if of in line]
        os.kill(pid, signal.SIGKILL)
        return
    process = operators.staying.pop(party)
    process.kill()
    process.wait()
    assert process.stdin is not None, "its terminal"
    process.stdin.close()
    site = "" if party == COORDINATOR else party
    (command,) = [one for one in commands("Run it") if f"cloister {'site' if site else party} start" in one]
    operators.type(command, site)


KILLS = {
    "process of the run": (COORDINATOR, "coordinator run"),
    "process of a site": (SITE, ""),
    "process of the coordinator": (COORDINATOR, ""),
}


def test_each_process_killed(federation: Operators) -> None:
    """The run goes on each time: how long it takes until two more rounds are done."""
    run = Run(federation, "long", _SLOW.replace("rounds = 2", "rounds = 100000").replace('"slow"', '"long"'))
    took: dict[str, float] = {}

    def wait_for_rounds(more: int) -> float:
        since = _count(events(run.path), "RoundDone") if (run.path / "events.jsonl").exists() else 0
        return run.wait_for("rounds", lambda found: _count(found, "RoundDone") >= since + more)

    wait_for_rounds(3)
    for what, (party, of) in KILLS.items():
        began = time.monotonic()
        took["two rounds without a kill"] = wait_for_rounds(2) - began
        killed = time.monotonic()
        _kill(federation, party, of)
        took[what] = wait_for_rounds(2) - killed
        failed = _count(events(run.path), "AttemptFailed")
        print(
            f"\n{what} killed: {took[what]:.1f} s until two rounds are done; {failed} attempts failed so far"
        )
    _report("two rounds without a kill", took["two rounds without a kill"])
    federation.coordinator.run(["cloister", "stop", "federation"])
