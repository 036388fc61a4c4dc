"""What several tests share: a federation small enough to run in seconds."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # it imports Flower, which most tests do not need
    from cloister.tests.parties.grid_sites import Events, Open


# Without bytecode on disk each process of a test compiles this package again, and pytest rewrites each test module.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests wait for tens of thousands of syncs, which cost nothing in memory.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

LONGEST = ("up", "mesh_privacy", "cluster", "resume", "mesh", "team", "simulate", "dataset", "run_report")
"""Files that take longest, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: `make test` gives each process whole files, and neither shall wait for the other."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


MOMENTUM = """
[server]
optimizer = "nesterov"
learning_rate = 0.7
momentum = 0.6
"""

PRIVATE_ADAPTER = (
    "run.rounds=1",
    "local.learning_rate=0.3",
    "model.adapter.scheme=ffa-lora",
    "data.held_out=0.0",
    "aggregation.weighting=uniform",
    "aggregation.colluders=0.25",
    "privacy.unit=record",
    "privacy.noise_multiplier=1.5",
    "privacy.sampling_rate=0.2",
    "server.evaluation=simulation:public",
    "simulation.public=0.1",
    "public.steps=4",
)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A suite that was started in the background ignores SIGINT, and so would the processes that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _fork_server(_interruptible: None) -> None:
    """Start the fork server with all that any test needs: one that a light test starts has nothing for later ones, and
    each of their processes imports torch and transformers for itself. Nothing waits for its imports."""
    from cloister.protocol.plan.soundness import parse
    from cloister.simulations.engines import fork_server

    fork_server.start(parse("model.adapter.scheme = 'ffa-lora'"))


@pytest.fixture(scope="module", autouse=True)
def _descriptors() -> Iterator[None]:
    """Close what the tests of a file have left in cycles, such as mapped sequences: many systems allow 1,024 files."""
    yield
    open_files = Path("/proc/self/fd")
    if open_files.is_dir() and len(os.listdir(open_files)) > 150:
        with warnings.catch_warnings():
            # Ray leaves the processes that it started and their streams to the collector.
            warnings.filterwarnings("ignore", "subprocess .* is still running", ResourceWarning)
            warnings.filterwarnings("ignore", "unclosed file .*name='/dev/null'", ResourceWarning)
            gc.unfreeze()  # a command that simulates takes what was there before it from the collector
            gc.collect()


@pytest.fixture(autouse=True)
def _proxies() -> Iterator[None]:
    """Restore the proxy's variables: a process that stays sets them for itself, and a test may be that process."""
    names = ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread, where numbers are compared that depend on it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unsynced() -> Iterator[None]:
    """Do not sync files, where a test writes many and none about power cuts."""
    from cloister.protocol.machine.storage import sync_to_disk

    sync_to_disk(False)
    yield
    sync_to_disk(True)


@pytest.fixture(scope="session")
def small_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny plan as a file, with the file of its records beside it; do not change them.

    Its server optimizer has a state, which a resumed run must restore.
    """
    from cloister.tests.parties.federation import TINY, write_records

    folder = tmp_path_factory.mktemp("tiny")
    path = folder / "tiny.toml"
    records = write_records(folder / "records.jsonl")
    model = TINY.replace("num_hidden_layers = 1", "num_hidden_layers = 2")
    path.write_text(f'{model}source = "{records}"\n{MOMENTUM}')
    return path


@pytest.fixture(scope="session")
def whole(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an undisturbed run of the tiny plan prints; do not change its folder."""
    from cloister.cli.main import main

    out = tmp_path_factory.mktemp("whole") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["simulate", str(small_plan), "--out", str(out), "--workers", "2", "--json"]) == 0
    found = json.loads(printed.getvalue().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="session")
def private(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one round that trains an adapter after public text, with the unit `record`; do not change
    it."""
    from cloister.cli.main import main
    from cloister.tests.tools.command import set_options

    folder = tmp_path_factory.mktemp("private")
    (folder / "public.txt").write_text("The public text of a test. It has a few lines.\n\n" * 40)
    settings = (*PRIVATE_ADAPTER, f"public.source={folder / 'public.txt'}")
    arguments = [*set_options(settings), "--out", str(folder / "run"), "--workers", "1"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["simulate", str(small_plan), *arguments]) == 0
    return folder / "run"


@pytest.fixture
def open_grid(tmp_path: Path) -> Iterator[Open]:
    """Opens grids for the sites of `grid_sites.py` in `tmp_path` and closes them."""
    from cloister.tests.parties.grid_sites import opener

    with opener(tmp_path) as open_grid:
        yield open_grid


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    """What the sites in `tmp_path` report."""
    from cloister.tests.parties.grid_sites import Events

    events = Events(tmp_path)
    yield events
    events.close()


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may make as many calls in a connection, and as many connections, as a test wants."""
    monkeypatch.setattr("cloister.server.door.front._CALLS_BEFORE", 2**20)
    monkeypatch.setattr("cloister.server.door.front._ARRIVALS_S", 2.0**20)


@pytest.fixture
def before_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The secure sum without its masks: a test can then look at the vector that goes into it."""
    # Most tests do not need these, which take seconds to import.
    from cloister.aggregation.vector.span import manifest_of
    from cloister.clients.state.attempt import Attempts
    from cloister.clients.state.kept import Written
    from cloister.protocol.messages.messages import NOTHING_CARRIED

    def mask(_self: Attempts, _inbox: Any, _round: int, _told: bytes, make: Any, *_: Any, **__: Any) -> Any:
        pieces = make(NOTHING_CARRIED)
        return None, Written(manifest_of(pieces), pieces)

    monkeypatch.setattr(Attempts, "mask", mask)
