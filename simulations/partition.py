"""Distribute a corpus over sites: by natural groups, at random, or with a controlled imbalance.

Flower's partitioners were tried and refused: importing them loads matplotlib, seaborn and scipy (4 s), they do not
balance whole groups over fewer sites, and their Dirichlet split fails with an error that names no site. NumPy does all
four ways in a few lines each.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from cloister.lm.text.records import Records
from cloister.lm.text.sequences import shuffled
from cloister.protocol.errors import DataError
from cloister.protocol.machine.storage import write_file
from cloister.protocol.plan.plan import Plan, SimulationSection

T = TypeVar("T")

_DRAWS = 100


def name_of(plan: Plan, index: int) -> str:
    """Name of a plan's simulated site with this number: the given one, or `site_name`."""
    names = plan.simulation.sites
    return names[index] if names else site_name(index)


def site_name(index: int) -> str:
    """Name of the simulated site with this number, from 0: `site-000`, `site-001`, ..."""
    return f"site-{index:03d}"


Alter: TypeAlias = Callable[[int, Iterable[Mapping[str, Any]]], Iterable[Mapping[str, Any]]]


def unaltered(_site: int, records: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The records as they are."""
    return records


def partition(
    records: Records, simulation: SimulationSection, sites: int, seed: int, *, field: str = "", least: int = 1
) -> list[list[int]]:
    """Give every record to exactly one site, and every site at least `least` records.

    - `auto`: `natural` with a field, else `iid`.
    - `natural`: all records of one value of the field go to the same site; largest groups first, each to the site
      with the fewest bytes so far.
    - `iid`: at random, the same number of records to each site, give or take one.
    - `dirichlet`: the records of each label are divided in proportions drawn from Dirichlet(alpha, ..., alpha) over the
      sites (Hsu et al. 2019, arXiv:1909.06335, the other way round: over sites for each label, as Li et al. 2021,
      arXiv:2102.02079). A draw that leaves a site too few is drawn again, at most 100 times.
    - `size`: at random; one record to each site, and the rest in proportion to 1, 2, 3, ...

    Args:
        records: The records to distribute.
        simulation: The way to partition; its `field` takes precedence over the argument.
        sites: Number of sites.
        seed: The same seed and records give the same partition.
        field: The source's own field with the group of a record.
        least: Records that a site needs.

    Returns:
        For each site the indices of its records, ascending.

    Raises:
        DataError: a site would have too few, the field is not named, or a record lacks it.
    """
    if (most := len(records) // least) < sites:
        fix = f"lower cohort.sites to {most} or add records" if most > 1 else "add records"
        raise _too_few(most, f"{len(records)} records for {sites} sites", fix, least)
    field = simulation.field or field
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, sites])))
    way = simulation.partition
    if way == "natural" or (way == "auto" and field):
        parts = _natural(records, field, sites, simulation.source)
    elif way == "dirichlet":
        parts = _dirichlet(
            _groups(records, field, simulation.source, "dirichlet"), simulation.alpha, sites, random, least
        )
    else:
        weights = np.arange(1, sites + 1) if way == "size" else np.ones(sites)
        ends = np.arange(1, sites + 1) + np.rint((len(records) - sites) * np.cumsum(weights) / weights.sum())
        shuffled = random.permutation(len(records))
        parts = [part.tolist() for part in np.split(shuffled, ends[:-1].astype(np.int64))]
    for site, part in enumerate(parts):
        if len(part) < least:
            raise _too_few(
                site,
                f"{len(part)} of {len(records)}",
                'set simulation.partition = "iid" or add records',
                least,
            )
    return [sorted(part) for part in parts]


def keep_apart(records: Sequence[T], fraction: float, seed: int) -> tuple[Sequence[T], list[T]]:
    """Split records into those for the sites and those that no site gets.

    Args:
        records: All records.
        fraction: The fraction to keep apart, chosen at random; more than 0 keeps at least one record apart.
        seed: The same seed and records give the same choice.
    """
    if not fraction:
        return records, []
    count = min(max(1, round(fraction * len(records))), len(records) - 1)
    order = shuffled((seed, 0x70), len(records))
    apart = sorted(order[:count].tolist())
    chosen = set(apart)
    kept = [records[index] for index in range(len(records)) if index not in chosen]
    return kept, [records[index] for index in apart]


def write_sites(
    folder: Path,
    records: Records,
    parts: Sequence[Sequence[int]],
    alter: Alter = unaltered,
    name: Callable[[int], str] = site_name,
) -> None:
    """Write each site's records to `data.jsonl` in the folder of its name.

    A line is one record as a JSON object (`line_of`). A file is written whole or not at all.

    Args:
        folder: Folder of the sites; created if missing.
        records: All records.
        parts: For each site the indices of its records, as `partition` returns them.
        alter: Makes of a site's number and its records those that are written.
        name: Makes of a site's number its name.

    Raises:
        StorageError: the disk is full or refuses the write.
    """
    for index, part in enumerate(parts):
        written = alter(index, [records[number] for number in part])
        write_records(folder / name(index) / "data.jsonl", written)


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records to a JSONL file, whole or not at all, unsynced; errors as `write_sites`."""

    def write(temporary: Path) -> None:
        # A surrogate without its pair has no UTF-8; replaced by its escape in JSON it reads as the same text.
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
            for record in records:
                file.write(line_of(record) + "\n")

    write_file(path, write, durable=False)  # the folder of all sites is synced as a whole


def line_of(record: Mapping[str, Any]) -> str:
    """A record as it is written; a value without a JSON type (such as Parquet's dates) becomes text."""
    return json.dumps(dict(record), ensure_ascii=False, default=str)


def _natural(records: Records, field: str, sites: int, source: str) -> list[list[int]]:
    groups = _groups(records, field, source, "natural")
    if len(groups) < sites:
        raise _too_few(
            len(groups),
            f"{len(groups)} values of {field!r} for {sites} sites",
            f"set cohort.sites = {len(groups)} or simulation.partition = 'iid'",
        )
    sizes = [_size(record) for record in records]
    weight = {value: sum(sizes[index] for index in members) for value, members in groups.items()}
    parts: list[list[int]] = [[] for _ in range(sites)]
    lightest = [(0, site) for site in range(sites)]
    for value in sorted(groups, key=lambda value: (-weight[value], value)):
        size, site = lightest[0]
        parts[site].extend(groups[value])
        heapq.heapreplace(lightest, (size + weight[value], site))
    return parts


def _dirichlet(
    groups: Mapping[str, Sequence[int]], alpha: float, sites: int, random: np.random.Generator, least: int
) -> list[list[int]]:
    for _ in range(_DRAWS):
        parts: list[list[int]] = [[] for _ in range(sites)]
        for value in sorted(groups):
            members = random.permutation(groups[value])
            ends = np.rint(np.cumsum(random.dirichlet(np.full(sites, alpha))) * len(members)).astype(np.int64)
            for part, share in zip(parts, np.split(members, ends[:-1]), strict=True):
                part.extend(share.tolist())
        if all(len(part) >= least for part in parts):
            return parts
    raise _too_few(
        next(site for site, part in enumerate(parts) if len(part) < least),
        f"alpha {alpha:g} and {sites} sites in each of {_DRAWS} draws",
        "raise simulation.alpha or lower cohort.sites",
        least,
    )


def _groups(records: Records, field: str, source: str, way: str) -> dict[str, list[int]]:
    """Indices of the records by the value of their field, as text."""
    if not field:
        raise DataError(
            "simulation.field",
            "",
            expected=f'the field to divide {source} by, because simulation.partition is "{way}"; the fields of its '
            f"first record: {', '.join(sorted(records[0]))}",
            fix='set simulation.field to one of them, or simulation.partition = "iid"',
        )
    groups: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        value = record.get(field)
        if value is None:
            has = ", ".join(sorted(key for key, other in record.items() if other is not None)) or "none"
            raise DataError(
                f"{source}, record {index + 1}",
                expected=f"a field {field!r}; the fields of the record: {has}",
                fix="set simulation.field to a field of every record",
            )
        groups[str(value)].append(index)
    return dict(groups)


def _size(record: Mapping[str, Any]) -> int:
    return len(line_of(record).encode(errors="backslashreplace"))


def _too_few(site: int, why: str, fix: str, least: int = 1) -> DataError:
    what = "a record" if least == 1 else f"{least} records, one of which is held out,"
    return DataError(
        "simulation.partition", expected=f"{what} for {site_name(site)}, but there are {why}", fix=fix
    )
