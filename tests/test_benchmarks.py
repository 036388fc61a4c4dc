"""The benchmark of the secure sum runs: it replaces the training of real sites, and a change there may end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.slow
def test_rounds_of_the_secure_sum_are_timed_and_their_mean_is_right() -> None:
    """It ends with an error where the mean is not that of all sites."""
    command = [sys.executable, str(BENCHMARKS / "secure_sum.py"), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ((whole, summed),) = json.loads(done.stdout)
    assert whole > summed > 0
