"""`docs/scale.md`: the figures under "Deployments" are those of the code and of the rates on the page."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from cloister.aggregation.secure.secure_sum import traffic
from cloister.aggregation.vector import masks
from cloister.clients.network.door import MOST_BYTES
from cloister.protocol.errors import MaskError, PlanError, TransferError
from cloister.protocol.messages.messages import MOST_SPANS, Advertise, Peers
from cloister.protocol.messages.transfer import (
    CHUNK,
    MESSAGE,
    SLOWEST,
    SMALL,
    STALL_S,
    Arrivals,
    check_vectors,
    part_of,
)
from cloister.protocol.messages.wire import LONGEST, to_bytes
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.protocol.plan.threshold import LARGEST, Parameters
from cloister.server.door.grid import most_bytes_of
from cloister.server.federation.cost import cost
from cloister.tests.tools.raises import raises

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## Deployments\n")[2].partition("\n## ")[0]
TABLES = [
    [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", SECTION, re.MULTILINE)
]
RATES, SITES, PARAMETERS, ROUNDS, LIMITS = TABLES

NAME = 8
"""Characters of a site's name."""
COUNTS = (8, 100, 1000)
TRAINED = {"1 M": 10**6, "100 M": 10**8, "1 B": 10**9, "70 B": 70 * 10**9}
RATE = {cells[0]: float(cells[1].split()[0].replace(",", "")) for cells in RATES}
"""By what is measured, as the page states it; in the unit that follows the number."""
UP, DOWN, MASKS = RATE["door, up"] * 1e6, RATE["door, down"] * 1e6, RATE["masks"] * 1e9
SITE_LINE, LINE = 100e6 / 8, 10e9 / 8
"""Bytes a second of a site's line and of the coordinator's."""
HOUR = 3600


def plan_of(sites: int, bits: int = 32, secure: str = "true") -> Plan:
    return parse(f"[cohort]\nsites = {sites}\n[aggregation]\nring_bits = {bits}\nsecure = {secure}\n")


def sizes(sites: int, trained: int, bits: int = 32) -> tuple[int, int]:
    """Bytes down and up of one site in a round; the same in clear, where no length is refused."""
    found = cost(plan_of(sites, bits, "false"), trained, trained)
    return found.bytes_down, found.bytes_up


def removed(found: Parameters, dropouts: int) -> int:
    """Masks that the coordinator removes at most: one of each survivor, and those that dropouts share."""
    return found.n - dropouts + dropouts * found.k


def most_dropouts(sites: int) -> int:
    """Sites that may drop out without ending an attempt."""
    return sites - plan_of(sites).quorum()


def digits(value: float) -> str:
    """Two significant digits."""
    places = 1 - math.floor(math.log10(value))
    text = f"{round(value, places):,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def amount(size: float) -> str:
    """Bytes."""
    power = min(int(math.log10(size) / 3 + 1e-9), 4)
    return f"{digits(size / 1000**power)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def time_of(seconds: float) -> str:
    for unit, length in (("d", 24 * HOUR), ("h", HOUR), ("min", 60)):
        if seconds >= 2 * length:
            return f"{digits(seconds / length)} {unit}"
    return f"{digits(seconds)} s"


def rows_of_sites() -> Iterator[list[str]]:
    key = bytes(32)
    advertised = Advertise(key, "x" * NAME, key, key, key, bytes(64))
    for sites in COUNTS:
        found = plan_of(sites).threshold()
        sent, received = traffic(found, NAME)
        requests = sites * (received - len(to_bytes(Peers(key, (advertised,) * sites))))
        yield [
            f"{sites}",
            f"{found.k}",
            f"{found.threshold}",
            f"{amount(sent)}, {amount(received)}",
            amount(sites * (sent + received)),
            amount(sites * sent),
            amount(requests),
            f"{removed(found, 0):,}",
            f"{removed(found, most_dropouts(sites)):,} with {most_dropouts(sites)}",
            time_of(sites * RATE[f"rebuild, t = {found.threshold}"] / 1000),
        ]


def rows_of_parameters() -> Iterator[list[str]]:
    for label, trained in TRAINED.items():
        (down, up), (_, half) = sizes(1000, trained), sizes(1000, trained, 16)
        yield [
            label,
            amount(down),
            f"{amount(up)}, {amount(half)}",
            time_of(down / SITE_LINE),
            f"{time_of(up / SITE_LINE)}, {time_of(half / SITE_LINE)}",
            amount(down + up),
            f"{amount(8 * trained)} to {amount(16 * trained)}",
            amount(16 * trained),
            f"{digits(UP * HOUR / up)}, {digits(LINE * HOUR / up)}",
        ]


def rows_of_rounds() -> Iterator[list[str]]:
    for sites in COUNTS:
        found = plan_of(sites).threshold()
        for label, trained in TRAINED.items():
            down, up = sizes(sites, trained)
            one = trained / MASKS
            yield [
                f"{sites} × {label}",
                amount(sites * up),
                time_of(sites * up / LINE),
                f"{time_of(sites * down / DOWN)}, {time_of(sites * up / UP)}",
                time_of((found.k + 1) * one),
                time_of(removed(found, 0) * one),
                time_of(removed(found, most_dropouts(sites)) * one),
            ]


def rows_of_limits() -> Iterator[list[str]]:
    key = bytes(32)
    advertised = Advertise(key, "x" * NAME, key, key, key, bytes(64))
    peers, more = (len(to_bytes(Peers(key, (advertised,) * sites))) for sites in (1000, LARGEST))
    down, up = sizes(1000, TRAINED["70 B"])
    yield ["`threshold.LARGEST`", f"{LARGEST:,} sites", "1,000", "yes"]
    yield ["`masks.LONGEST`", "2^38 elements", f"{TRAINED['70 B']:,}", "yes"]
    yield ["`MOST_BYTES` of a site", "2^40 bytes of a request", amount(down), "yes"]
    yield ["`most_bytes_of` the plan", f"{amount(up)} of a reply", amount(up), "yes"]
    yield [
        "`MOST_SPANS`",
        f"{MOST_SPANS:,} spans of a vector",
        "ranks of a site + 1",
        f"yes, to {MOST_SPANS - 1} ranks",
    ]
    yield ["`CHUNK`", "2^18 bytes of a part", f"{math.ceil(up / CHUNK):,} parts", "yes: not counted"]
    yield ["`MESSAGE`", f"{MESSAGE:,} bytes", f"{len(part_of(memoryview(bytes(CHUNK)))):,}", "yes"]
    yield ["`wire.LONGEST`", "2^22 bytes of fields", amount(peers), f"yes ({amount(more)} for 10,000 sites)"]
    yield ["`SMALL`", "2^18 bytes in a session", amount(peers), "yes; longer fields travel as a vector"]
    yield ["`SLOWEST`", "2^16 bytes/s after the deadline", f"{amount(up)} in {time_of(up / SLOWEST)}", "yes"]
    yield ["`STALL_S`", f"{STALL_S:g} s for a chunk", f"{amount(CHUNK / STALL_S)}/s", "yes"]


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (SITES, rows_of_sites),
        (PARAMETERS, rows_of_parameters),
        (ROUNDS, rows_of_rounds),
        (LIMITS, rows_of_limits),
    ],
    ids=["sites", "parameters", "rounds", "limits"],
)
def test_figures_are_those_of_the_code(
    table: list[list[str]], rows: Callable[[], Iterator[list[str]]]
) -> None:
    assert table == list(rows())


def test_a_drawn_cohort_has_the_parameters_that_the_page_states() -> None:
    found = parse("[cohort]\nsites = 1000\nfraction = 0.1\n").threshold()
    assert f"{found.n} of 1000 drawn" in SECTION
    assert f"k = {found.k} and t = {found.threshold}" in SECTION


def test_the_sizes_pass_and_one_above_the_limits_is_refused() -> None:
    down, up = sizes(1000, TRAINED["70 B"])
    one = np.zeros(1, np.uint32)
    assert masks.LONGEST == 2**38
    masks.check(one, masks.LONGEST - 1)
    with pytest.raises(MaskError):
        masks.check(one, masks.LONGEST)
    assert (MOST_BYTES, CHUNK, SMALL, LONGEST, SLOWEST) == (2**40, 2**18, 2**18, 2**22, 2**16)
    check_vectors([(bytes(32), down)], MOST_BYTES)
    with raises(PlanError, "trained parameters"):
        most_bytes_of(plan_of(1000), masks.LONGEST)
    assert most_bytes_of(plan_of(1000), TRAINED["70 B"]) == up
    assert most_bytes_of(plan_of(1000, secure="false"), TRAINED["70 B"]) == up
    check_vectors([(bytes(32), up // 1000)] * MOST_SPANS, up)
    with pytest.raises(TransferError):
        check_vectors([(bytes(32), 2**40 + 1)], MOST_BYTES)


def test_a_reply_that_waits_to_be_added_holds_an_open_file(tmp_path: Path) -> None:
    data = bytes(1000)
    arrivals = Arrivals(tmp_path, len(data))
    arrival = arrivals.begin(blake3(data).digest(), len(data))
    turn, _ = arrival.take()
    arrival.add(turn, [memoryview(data)])
    arrival.finish(turn)
    before = len(os.listdir("/proc/self/fd"))
    mapped = arrivals.open(arrival.name, len(data))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert mapped == data
