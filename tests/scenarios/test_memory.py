"""The memory that a round takes beside the model, in vectors of the model's size, as docs/scale.md states it.

The kernel's peak of resident memory is reset before the work and read after it, so that an array of torch counts as one
of NumPy. The same work was done twice before, so that nothing is imported or opened for the first time. Each measure is
made in a new process: what earlier tests freed, the allocator would use again, unseen.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest import mock

import numpy as np
import pytest

from cloister.aggregation.secure.secure_site import Member
from cloister.aggregation.sums import Sums
from cloister.clients.state.attempt import Attempts
from cloister.clients.training.release import contribution
from cloister.lm.model.layout import Layout
from cloister.lm.training.train import LocalUpdate
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.identity.roster import Card, Roster, new_identity
from cloister.protocol.messages.messages import TRAIN
from cloister.protocol.plan.soundness import parse
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder
from cloister.server.record.journal import Journal
from cloister.server.record.progress import Event, RoundDone, Started
from cloister.server.round.evaluate import Evaluations, nowhere
from cloister.server.round.round import RoundContext, run_round
from cloister.server.run import run
from cloister.server.sum.members import Members
from cloister.server.sum.party import Party
from cloister.tests.parties.federation import CENTRAL, RUN, SKELLAM, TINY, Federation, Loopback, VectorSite
from cloister.tests.tools.codes import code_for
from cloister.tests.tools.seeds import seed_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own figures of a process")

LARGE = [
    "model.config.hidden_size=512",
    "model.config.intermediate_size=2048",
    "model.config.num_hidden_layers=1",
    "local.steps=1",
    "local.batch_size=1",
    "run.rounds=1",
]
"""4.5 million parameters, so that a vector is far above what else a round takes, in matrices of 1 MB and more."""
D = 10_000_000
"""Elements of the vectors of sites without a model."""
SLACK = 0.35
"""Vectors: blocks, activations, and what Python and SQLite take."""
REUSED = 0.5
"""Vectors: pages that the allocator had kept from the second call, which the third one takes first. With it and `SLACK`
one vector more or less is still found."""


M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


P = ParamSpec("P")
T = TypeVar("T")


def keep_nothing_freed() -> None:
    """glibc keeps arrays of this size for later ones; those of a large model it returns at once."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def give_back_what_is_freed() -> None:
    """Garbage in circles, and pages that glibc keeps at the ends of its threads' arenas, are not held."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def apart(measure: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `measure` returns in a process in which no test has run."""
    with ProcessPoolExecutor(1, get_context("forkserver"), keep_nothing_freed) as pool:
        return pool.submit(measure, *args, **kwargs).result()


def resident(figure: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(figure))


def beside(work: Callable[[], object], size: int) -> float:
    """The most memory that the third call of `work` took beside what was there, in float32 vectors of `size`."""
    work()
    work()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / (4 * size)


# A site.


def of_a_site(tmp_path: Path) -> float:
    federation = Federation(tmp_path, parse(TINY, [*LARGE, *CENTRAL]))
    sites = iter([federation.joined(number) for number in range(3)])
    request = federation.request()
    return beside(lambda: next(sites).contribute(request), federation.layout.size)


@pytest.mark.slow
def test_a_site_takes_gradients_and_moments_and_less_after_them(tmp_path: Path) -> None:
    """Its weights and the global model in the request are there before. When it makes the update, gradients are gone;
    when it clips and releases it, so are the moments."""
    assert 3 - REUSED < apart(of_a_site, tmp_path) < 3 + SLACK


def of_noise() -> float:
    code = code_for(
        Sums(parse(TINY, SKELLAM), D),
        rounding=seed_of(1),
        noise=NoiseStream.from_declared_seed(1),
    )
    update = LocalUpdate(np.full(D, 1e-3, np.float32), 1, 1.0)
    return beside(lambda: contribution(code, update), D)


@pytest.mark.slow
def test_noise_of_a_site_is_added_where_its_vector_is() -> None:
    """One vector is what leaves, the other the clipped update."""
    assert 2 - REUSED < apart(of_noise) < 2 + SLACK


# The coordinator.


def of_a_round(tmp_path: Path, settings: list[str]) -> float:
    plan = parse(TINY, [*settings, "aggregation.secure=false"])
    layout, sum_layout = Layout(("weights",), ((D,),)), Sums(plan, D).training
    vector = np.ones(sum_layout.length, sum_layout.ring.dtype)
    counters = dict.fromkeys(sum_layout.names, 1)
    vector[D:] = sum_layout.tail(counters, np.zeros(sum_layout.extra, np.int64))
    identities = {f"site-{number:03d}": new_identity() for number in range(plan.cohort.sites)}
    roster = Roster.of(Card.of(name, identity) for name, identity in identities.items())
    contract = Sums(plan, D, layout.digest()).contract(TRAIN, RUN, roster)

    def site(name: str) -> VectorSite:
        attempts = Attempts(tmp_path / name, contract, Member(name, identities[name], 3))
        return VectorSite(name, identities[name], attempts, lambda: vector, roster=roster.hash, secure=False)

    channel = Loopback({name: partial(site, name) for name in identities})
    with Journal(tmp_path / "journal") as journal:
        members = Members(channel, plan, RUN, lambda _failure: None, roster=roster)
        kept = KeptAttempt(tmp_path / "attempt")
        party = Party(
            Sums.over(plan, layout, b""),
            RUN,
            roster,
            members,
            journal,
            kept,
            lambda _event: None,
            clock=lambda: 0.0,
        )
        context = RoundContext(
            party,
            Checkpoints(tmp_path / "checkpoints", layout, 1),
            np.zeros(D, np.float32),
            Evaluations(nowhere),
        )
        rounds = iter((1, 2, 3))

        def go() -> None:
            assert isinstance(run_round(context, next(rounds)), RoundDone)

        with mock.patch.object(os, "fsync"):
            return beside(go, D)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [["server.optimizer=fedavg"], ["server.optimizer=nesterov"], ["server.optimizer=adam"], CENTRAL],
    ids=["fedavg", "nesterov", "adam", "central"],
)
def test_a_round_takes_the_accumulator(tmp_path: Path, settings: list[str]) -> None:
    """Model and moments are there before, and the vector that all sites send."""
    assert 1 - REUSED < apart(of_a_round, tmp_path, settings) < 1 + SLACK


def of_a_run(tmp_path: Path) -> tuple[float, float, float]:
    """What is held at the start of a run, after its round, and when it goes on; vectors."""
    federation = Federation(tmp_path, parse(TINY, [*LARGE, "aggregation.secure=false"]))
    held: dict[type[Event], float] = {}

    def go(federation: Federation, reopen: Callable[[Path], RunFolder]) -> None:
        give_back_what_is_freed()
        before = resident("VmRSS")

        def observe(event: Event) -> None:
            give_back_what_is_freed()
            held[type(event)] = (resident("VmRSS") - before) / (4 * federation.layout.size)

        with reopen(federation.folder / "run") as folder, mock.patch.object(os, "fsync"):
            run(folder, federation.channel, observe)

    def create(out: Path) -> RunFolder:
        return RunFolder.create(out, federation.plan)

    go(federation, create)
    again = Federation(tmp_path / "again", federation.plan)
    again.resident = federation.resident  # the sites' model is there before
    go(again, create)
    started, done = held[Started], held[RoundDone]
    go(again, RunFolder.reopen)
    return started, done, held[Started]


@pytest.mark.slow
def test_a_run_holds_one_copy_of_the_model(tmp_path: Path) -> None:
    """From its start and after a round, beside the accumulator; and where it goes on from a checkpoint."""
    started, done, resumed = apart(of_a_run, tmp_path)
    assert 1 - REUSED < started < 1 + SLACK
    assert done < 2 + SLACK
    assert 1 - REUSED < resumed < 1 + SLACK
