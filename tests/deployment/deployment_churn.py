"""Sites that come and leave for an hour: the coordinator's memory, files, sockets and threads stay what they were.

The door and the run behind it are a process of their own. Three sites stay in rounds that do nothing. A fourth comes
every minute in a new process, and leaves in one of five ways. What the coordinator holds is compared between rounds,
after the same way of leaving, just before the guest comes again.

`make test-deployment` runs three minutes of it, with sixty times the visits; `make test-hour` the hour. With
`pytest -s` they print what the coordinator holds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cloister.tests.deployment.churn_parties import WAYS, Churn, Held, resident

MEMORY = 5 * 10**6
"""Bytes by which resident memory may grow."""
ALLOCATED = 300_000
"""Bytes by which what is allocated by malloc may grow: gRPC's server keeps some of each call that is cut off."""
BLOCKS = 600
"""Blocks of memory by which what Python has allocated may grow: five for each visit."""
_WINDOW = 6
"""Turns of which the lowest value counts: what a round has under way comes and goes, up to 1,000 blocks of Python."""
_SAMPLE_S = 10.0


def churned(folder: Path, visits: int, every_s: float) -> list[Held]:
    """What the coordinator holds after each turn of all ways to leave."""
    found: list[Held] = []
    with Churn(folder, deadline_s=0.3, pause_s=min(1.0, every_s / 50)) as churn:
        over = threading.Event()
        began = time.monotonic()

        def sample() -> None:
            while not over.wait(_SAMPLE_S):
                print(f"{time.monotonic() - began:.0f} s: {resident(churn.pid) / 1e6:.2f} MB", flush=True)

        sampling = threading.Thread(target=sample)
        sampling.start()
        try:
            for number in range(visits):
                churn.visit(WAYS[number % len(WAYS)], every_s / 2)
                over.wait(began + (number + 1) * every_s - time.monotonic())
                if (number + 1) % len(WAYS) == 0:
                    found.append(churn.held())
                    print(f"{time.monotonic() - began:.0f} s, {number + 1} visits: {found[-1]}", flush=True)
        finally:
            over.set()
            sampling.join()
    return found


def check(first: Sequence[Held], last: Sequence[Held]) -> None:
    """Check that nothing has grown from the first turns to the last."""
    assert last[-1].answers > 2.5 * last[-1].rounds  # the three that stay are heard
    most = {
        "allocated": ALLOCATED,
        "blocks": BLOCKS,
        "sockets": 0,
        "descriptors": 0,
        "threads": 0,
        "spooled": 0,
    }
    for what, more in most.items():
        before, after = (min(getattr(held, what) for held in turns) for turns in (first, last))
        assert after <= before + more, what


@pytest.mark.deployment
@pytest.mark.timeout(900)
def test_three_minutes_of_a_visit_each_second(tmp_path: Path) -> None:
    """Resident memory is not compared: in so short a time it is what malloc keeps for later."""
    found = churned(tmp_path, visits=180, every_s=1.0)
    check(found[6 : 6 + _WINDOW], found[-_WINDOW:])


@pytest.mark.deployment
@pytest.mark.skipif("CLOISTER_HOUR" not in os.environ, reason="it takes an hour: make test-hour")
@pytest.mark.timeout(5400)
def test_an_hour_of_a_visit_each_minute(tmp_path: Path) -> None:
    found = churned(tmp_path, visits=60, every_s=60.0)
    check(found[1:4], found[-3:])  # after ten minutes
    assert found[-1].resident <= found[1].resident + MEMORY
