"""What several tests share: a federation small enough to run in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it imports Flower, which most tests do not need
    from cloister.tests.grid_sites import Events, Open

SMALL_PLAN = """
[run]
name = "small"
rounds = 3

[model.config]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2

[data]
sequence_length = 32
held_out = 0.2

[local]
steps = 2
batch_size = 4
learning_rate = 3e-3

[cohort]
sites = 4

[server]
optimizer = "nesterov"
learning_rate = 0.7
momentum = 0.6

[simulation]
partition = "iid"
"""


@pytest.fixture(scope="session")
def small_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file for four sites with a few sentences each; do not change it."""
    folder = tmp_path_factory.mktemp("small")
    records = [
        {"text": f"record {number}: the quick brown fox jumps over {number} lazy dogs. " * 3}
        for number in range(40)
    ]
    data = folder / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    path = folder / "small.toml"
    path.write_text(f'{SMALL_PLAN}source = "{data}"\n')
    return path


@pytest.fixture(scope="session")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short records that nobody else should see; do not change them."""
    path = tmp_path_factory.mktemp("patients") / "records.jsonl"
    records = [{"text": f"patient {number} was seen on day {number * 7}. " * 2} for number in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def open_grid(tmp_path: Path) -> Iterator[Open]:
    """Opens grids for the sites of `grid_sites.py` in `tmp_path` and closes them."""
    from cloister.tests.grid_sites import opener

    with opener(tmp_path) as open_grid:
        yield open_grid


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    """What the sites in `tmp_path` report."""
    from cloister.tests.grid_sites import Events

    events = Events(tmp_path)
    yield events
    events.close()
