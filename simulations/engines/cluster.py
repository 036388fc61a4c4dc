"""The running Ray cluster of a simulation: join it, and check its nodes.

A site's next message may go to another node, and Flower's runtime has no place for a site. So the run folder, in which
the sites keep their records and their state, must be on a file system that all nodes share, and on which a write and a
lock of one node hold for the others at once. `check_nodes` tries both on each node before the run begins. Alternative
refused: folders that stay on the node where a site first ran, because a run could not be resumed without that node, nor
its report be read.

Ray listens on all addresses of a machine, and who reaches its ports runs code as its owner; its logs hold the errors of
sites, and with them perhaps records. A cluster is what its owner has made of it. Alternative refused: a cluster that a
run starts for itself on one machine, where `LocalGrid` is faster.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cloister.protocol.errors import EngineError, one_line
from cloister.simulations.engines.process import environment

ANSWER_S = 10.0
_CHECK_S = 90.0  # for a node to start a process that imports this package
# RFC 9113, 3.4: the preface and SETTINGS.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; without it Ray warns
}
_RUNS = ("protocol", "privacy", "lm", "aggregation", "clients", "server", "simulations")
_SAME = ("ray", "flwr", "torch", "transformers", "peft", "numpy")


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Connect this process to Ray; at exit, disconnect it.

    Args:
        address: HOST:PORT of a running cluster of which this machine is a node.

    Raises:
        EngineError: the cluster does not answer, or has another version of Ray or Python.
    """
    try:
        _check_answers(address)
        with environment(_ENVIRONMENT):
            _join(address)
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # Ray raises classes of every kind here
        raise EngineError(
            "--ray-address",
            address,
            expected="a cluster with the same Ray and Python, of which this machine is a node "
            f"({one_line(error)})",
        ) from error


def _check_answers(address: str) -> None:
    """Refuse an address at which no gRPC server answers: Ray itself tries for minutes, and logs each try."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise EngineError("--ray-address", address, expected="HOST:PORT of a running Ray cluster")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as peer:
            peer.sendall(_HTTP2)
            peer.recv(1)
    except (OSError, OverflowError) as error:
        raise EngineError(
            "--ray-address",
            address,
            expected=f"a Ray cluster that answers within {ANSWER_S:g} s ({one_line(error)})",
            fix="start its first node: ray start --head --port PORT",
        ) from error


# What the nodes have room for.


@dataclass(frozen=True)
class Room:
    """How many workers a cluster has room for, and what Ray reserves for each."""

    workers: int
    cpus: float
    gpus: float


def room(threads: int, workers_per_gpu: int) -> Room:
    """The room of the cluster that this process has joined: by its GPUs if it has any, else by its CPUs.

    Args:
        threads: CPU threads of a worker; fewer are reserved if no node has as many CPUs.
        workers_per_gpu: Workers that share a GPU.

    Raises:
        EngineError: no node has a CPU.
    """
    cpus = [node["Resources"].get("CPU", 0.0) for node in _nodes()]
    gpus = [node["Resources"].get("GPU", 0.0) for node in _nodes()]
    if any(gpus):
        return Room(sum(int(count * workers_per_gpu) for count in gpus), 0.0, 1 / workers_per_gpu)
    if max(cpus, default=0.0) < 1:
        raise EngineError("Ray cluster", expected="a node with a CPU or a GPU")
    each = min(float(threads), max(cpus))
    return Room(sum(int(count // each) for count in cpus), each, 0.0)


def _nodes() -> list[dict[str, Any]]:
    """Ray's description of each node that is alive, sorted by name."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray annotates no result
    return sorted((node for node in nodes if node["Alive"]), key=_name)


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeName']} ({node['NodeManagerHostname']})"


# What each node must have.


def check_nodes(folder: Path) -> None:
    """Check that each node has the same software as this process, and shares a folder with it.

    1. Each node says which software it has, reads a file of the folder, looks for one that is not there, and writes
       one.
    2. This process reads what the nodes wrote, replaces the first file, makes the second, and takes two locks.
    3. Each node must see both changes at once, and must not get the locks. A client of NFS with the default caching of
       attributes fails this: it may see a change of another node after seconds.

    Args:
        folder: An existing folder, the run folder.

    Raises:
        EngineError: a node lacks something; the error names it.
    """
    probe = folder.absolute() / f".nodes-{secrets.token_hex(8)}"
    nodes = {node["NodeID"]: f"node {_name(node)}" for node in _nodes()}
    probe.mkdir()
    try:
        (probe / "changed").write_text("before")
        own = software()
        for node, (theirs, problem) in _on_each(nodes, _look, str(probe)).items():
            wrong = [f"{name} {theirs[name]}, not {own[name]}" for name in own if theirs[name] != own[name]]
            if wrong:
                raise EngineError(nodes[node], ", ".join(wrong), expected="the same software as here")
            if not problem and not (probe / node).exists():
                problem = "its write does not arrive here"
            if problem:
                raise _not_shared(nodes[node], folder, problem)
        (probe / "after").write_text("after")
        os.replace(probe / "after", probe / "changed")
        (probe / "new").write_text("")
        with (probe / "flock").open("wb") as flock, (probe / "lockf").open("wb") as lockf:
            fcntl.flock(flock, fcntl.LOCK_EX)
            fcntl.lockf(lockf, fcntl.LOCK_EX)
            for node, problem in _on_each(nodes, _look_again, str(probe)).items():
                if problem:
                    raise _not_shared(nodes[node], folder, problem)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _not_shared(node: str, folder: Path, problem: str) -> EngineError:
    return EngineError(
        node,
        expected=f"it to share the run folder {folder.absolute()} with this machine, but {problem}",
        fix="put the run on a file system that all nodes mount at the same path (docs/scale.md)",
    )


def _on_each(nodes: Mapping[str, str], function: Callable[..., Any], folder: str) -> dict[str, Any]:
    """The results of a function of a folder and a node's id on each node, by that id."""
    task = ray.remote(function)
    asked = {
        node: task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(folder, node)
        for node in nodes
    }
    until = time.monotonic() + _CHECK_S
    results = {}
    for node, result in asked.items():
        try:
            results[node] = ray.get(result, timeout=max(0.0, until - time.monotonic()))
        except GetTimeoutError as error:
            raise EngineError(nodes[node], expected=f"an answer within {_CHECK_S:g} s") from error
        except RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise EngineError(nodes[node], expected=f"this package to run there ({reason})") from error
    return results


def software() -> dict[str, str]:
    """The versions on which a run's weights may depend, by name; of this package, with a hash of its source."""
    root = Path(__file__).parents[2]
    source = hashlib.sha256()
    for file in (file for part in _RUNS for file in sorted((root / part).rglob("*.py"))):
        source.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
        source.update(file.read_bytes())
    # A build may differ: with a GPU, without.
    public = {name: metadata.version(name).partition("+")[0] for name in _SAME}
    return {
        "python": platform.python_version(),
        **public,
        "cloister": f"{metadata.version('cloister')} (source {source.hexdigest()[:8]})",
    }


def _look(folder: str, node: str) -> tuple[dict[str, str], str]:
    """Step 1 of `check_nodes`, on a node: its software, and what is wrong with the folder."""
    path, problem = Path(folder), ""
    try:
        (path / "changed").read_text()
        (path / "new").exists()
        (path / node).write_text("")
    except FileNotFoundError:
        problem = "it is not there"
    except OSError as error:
        problem = f"it cannot be written ({one_line(error)})"
    return software(), problem


def _look_again(folder: str, _node: str) -> str:
    """Step 3 of `check_nodes`, on a node: what is wrong with the folder."""
    path = Path(folder)
    try:
        if (path / "changed").read_text() != "after" or not (path / "new").exists():
            return "a change is seen there too late"
        for name, take in (("flock", fcntl.flock), ("lockf", fcntl.lockf)):
            with (path / name).open("wb") as file:
                try:
                    take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    continue
                return f"a lock that is taken here ({name}) does not hold there"
    except OSError as error:
        return f"it cannot be read ({one_line(error)})"
    return ""
