"""Every record goes to one site, every site gets some, and each way of parting does what it says."""

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.lm.text.corpus import corpus_records
from cloister.lm.text.records import owner_of
from cloister.protocol.errors import DataError, StorageError
from cloister.protocol.plan.plan import SimulationSection
from cloister.simulations.federation import lay_out_records
from cloister.simulations.partition import partition, site_name, write_sites
from cloister.tests.parties.federation import RECORD, tiny
from cloister.tests.tools.raises import raises

Way = Literal["natural", "iid", "dirichlet", "size"]  # and "auto"
WAYS: tuple[Way, ...] = ("natural", "iid", "dirichlet", "size")


def numbered(groups: list[int]) -> list[dict[str, Any]]:
    return [{"text": "x" * (index % 7), "group": group} for index, group in enumerate(groups)]


@settings(deadline=None)
@given(
    way=st.sampled_from(WAYS),
    groups=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    sites=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_record_goes_to_one_site_and_none_is_empty(
    way: Way, groups: list[int], sites: int, seed: int
) -> None:
    records = numbered(groups)
    simulation = SimulationSection(partition=way, field="group", alpha=5.0)
    try:
        parts = partition(records, simulation, sites, seed)
    except DataError as refused:
        if way == "natural":
            assert len(set(groups)) < sites
        elif way != "dirichlet":
            assert len(groups) < sites
        assert "a record for site-0" in str(refused)  # noqa: PT017 - which of the two happens is drawn
        return
    assert sorted(index for part in parts for index in part) == list(range(len(groups)))
    assert len(parts) == sites
    assert all(parts)
    assert all(part == sorted(part) for part in parts)
    assert parts == partition(records, simulation, sites, seed)
    if way == "natural":
        owners = [{groups[index] for index in part} for part in parts]
        assert sum(len(owner) for owner in owners) == len(set(groups))
    if way == "iid":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("way", ["iid", "dirichlet", "size"])
def test_another_seed_gives_another_partition(way: Way) -> None:
    records = numbered([index % 3 for index in range(200)])
    simulation = SimulationSection(partition=way, field="group", alpha=5.0)
    assert partition(records, simulation, 4, 1) != partition(records, simulation, 4, 2)


def test_without_a_field_auto_divides_at_random_and_with_one_by_it() -> None:
    records = numbered([index % 3 for index in range(30)])
    ways: dict[str, Way] = {"": "iid", "group": "natural"}
    for field, way in ways.items():
        chosen = SimulationSection(partition=way, field=field)
        assert partition(records, SimulationSection(field=field), 3, 1) == partition(records, chosen, 3, 1)


def test_a_number_and_its_text_are_one_group() -> None:
    """As they are one owner, who is then at one site, and pays there alone (`privacy/ledger/dataset.py`)."""
    records = [{"text": "x", "owner": value} for value in [7, 7, 7, 7, 8, 8, 8, "7"]]
    parts = partition(records, SimulationSection(partition="natural", field="owner"), 2, 0)
    assert [{owner_of(records[index], "owner") for index in part} for part in parts] == [{b"7"}, {b"8"}]


def test_natural_groups_are_balanced_by_bytes() -> None:
    corpus = corpus_records("builtin:python-docs")
    parts = partition(corpus.records, SimulationSection(), 8, 0, field=corpus.field)
    sizes = [sum(len(corpus.records[index]["text"]) for index in part) for part in parts]
    largest_topic = max(len(record["text"]) for record in corpus.records)
    # Graham 1969: the largest load is at most 4/3 of the best one, and that is at least the mean and the largest group.
    assert max(sizes) <= 4 / 3 * max(sum(sizes) / 8, largest_topic)


@pytest.mark.parametrize("between", ["\n\n", "\n"])
def test_one_text_file_serves_four_sites(between: str, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text(between.join(f"part {number}" for number in range(10)))
    corpus = corpus_records(str(file))
    parts = partition(corpus.records, SimulationSection(partition="iid"), 4, 0, field=corpus.field)
    assert sorted(map(len, parts)) == [2, 2, 3, 3]
    write_sites(tmp_path, corpus.records, parts)
    paths = tmp_path.glob("site-00[0-3]/data.jsonl")
    texts = [json.loads(line)["text"] for path in paths for line in path.read_text().splitlines()]
    assert sorted(texts) == [f"part {number}" for number in range(10)]


def test_the_field_of_the_plan_wins() -> None:
    records = [{"a": index % 2, "b": index // 2} for index in range(4)]
    by_b = partition(records, SimulationSection(field="b"), 2, 0, field="a")
    assert sorted(by_b) == [[0, 1], [2, 3]]


def test_sizes_grow_with_the_number_of_the_site() -> None:
    parts = partition(numbered([0] * 1004), SimulationSection(partition="size"), 4, 0)
    assert [len(part) for part in parts] == [101, 201, 301, 401]


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_variance_of_the_distribution(alpha: float) -> None:
    sites, labels, of_each = 5, 400, 50
    groups = [index % labels for index in range(labels * of_each)]
    simulation = SimulationSection(partition="dirichlet", field="group", alpha=alpha)
    parts = partition([{"group": group} for group in groups], simulation, sites, 3)
    counts = np.array(
        [[Counter(groups[index] for index in part)[label] for label in range(labels)] for part in parts]
    )
    expected = (
        (1 / sites) * (1 - 1 / sites) / (sites * alpha + 1)
    )  # variance of one share of Dirichlet(alpha, ...)
    assert np.var(counts / of_each) == pytest.approx(expected, rel=0.15)


def test_too_few_groups_are_refused() -> None:
    with raises(
        DataError,
        "simulation.partition",
        says=("site-003", "3 values of 'group' for 5 sites", "cohort.sites = 3"),
    ):
        partition(numbered([0, 1, 2] * 5), SimulationSection(field="group"), 5, 0)


@pytest.mark.parametrize("way", WAYS)
def test_too_few_records_are_refused(way: Way) -> None:
    with raises(DataError, "simulation.partition", says=("site-002", "2 records for 5 sites")):
        partition(numbered([0, 1]), SimulationSection(partition=way, field="group"), 5, 0)


def test_a_dirichlet_that_starves_a_site_is_refused() -> None:
    simulation = SimulationSection(partition="dirichlet", field="group", alpha=1e-3)
    with raises(DataError, "simulation.partition", says=("alpha 0.001", "simulation.alpha")):
        partition(numbered([0] * 50), simulation, 20, 0)


@pytest.mark.parametrize("way", ["natural", "dirichlet"])
def test_a_field_must_be_named_and_there(way: Way) -> None:
    with raises(DataError, "simulation.field"):
        partition(numbered([0, 1]), SimulationSection(partition=way), 2, 0)
    with raises(DataError, "builtin:python-docs, record 2", says="'group'"):
        partition(
            [{"group": 1}, {"text": "x", "group": None}],
            SimulationSection(partition=way, field="group"),
            2,
            0,
        )


@settings(deadline=None)
@given(
    records=st.lists(
        st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.none()), min_size=2, max_size=5
    )
)
def test_written_records_are_read_back(
    records: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sites")
    write_sites(folder, records, [[0], list(range(1, len(records)))])
    paths = [folder / "site-000" / "data.jsonl", folder / "site-001" / "data.jsonl"]
    again = [[json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] for path in paths]
    assert again == [records[:1], records[1:]]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with raises(StorageError, "site-000/data.jsonl", says="No space left"):
        write_sites(tmp_path, [{"text": "x"}], [[0]])
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_names_of_sites_sort() -> None:
    assert [site_name(index) for index in (0, 12, 999)] == ["site-000", "site-012", "site-999"]


@pytest.mark.parametrize("last", [1000.5, "unknown", "\ud800", None])
@pytest.mark.parametrize("pid", ["7", '"1910-01-02T00:00:00Z"'])
def test_no_record_of_a_simulation_decides_how_the_sites_read_the_others(
    pid: str, last: object, tmp_path: Path
) -> None:
    """Otherwise an owner `1000.5` would make every other owner a fraction, which is no owner."""
    file = tmp_path / "records.jsonl"
    owner = (*RECORD, "privacy.unit=owner", "data.owner=pid", f"simulation.source={file}")
    lines = [f'{{"text": "patient {number} was seen", "pid": {pid}}}\n' for number in range(40)]
    own = json.dumps({"text": "the last", "pid": last}) + "\n"
    found = []
    for name, text in (("without", lines), ("with", [*lines, own])):
        file.write_text("".join(text))
        lay_out_records(tiny(*owner), tmp_path / name)
        written = [path.read_text() for path in sorted((tmp_path / name).glob("*/data.jsonl"))]
        found.append("".join(written).splitlines(keepends=True))
    assert sorted(found[0]) == sorted(lines)
    assert sorted(found[1]) == sorted([*lines, own])
