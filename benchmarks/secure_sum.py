"""What the secure sum costs: masking against the bare keystream, a round as it grows, and peak memory.

    python benchmarks/secure_sum.py [--json] [--quick]

(a) `mask_ratio`: coordinates masked per second over the bare keystream rate of the same cipher, one thread,
measured in turns; the least over 2, 9 and 64 masks on one vector (a site has two at least). `mask` has every
row, with one mask too, which only the vector's trip to memory and back slows. (c) `growth`: seconds of one
site and of the coordinator for one attempt, in the core without any transport, from `begin` to the sum; the
sites that are not timed send what the coordinator needs, unmasked. (d) `memory`: peak bytes beyond the
vectors that the caller holds, as Python and NumPy allocate them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cloister.aggregation import masks
from cloister.aggregation.secure_messages import Masked
from cloister.aggregation.secure_sum import Contract, Coordinator, Site
from cloister.protocol.roster import Card, Roster, new_identity

MODEL = bytes(32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller vectors and cohorts")
    options = parser.parse_args()
    rows = mask_rows(1 << 22 if options.quick else 1 << 25)
    aes = [row for row in rows if row["cipher"] == "aes-256-ctr" and row["threads"] == 1 and row["seeds"] > 1]
    found = memory(100_000 if options.quick else 4_000_000)
    result: dict[str, Any] = {
        "mask_ratio": min(row["ratio"] for row in aes),
        "mask": rows,
        "growth": growth_rows(options.quick),
        "memory": found,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"mask_ratio {result['mask_ratio']:.2f}")
    for name in ("mask", "growth"):
        print(f"\n{name}")
        for row in result[name]:
            print("  " + "  ".join(f"{key} {show(value)}" for key, value in row.items()))
    print("\nmemory")
    for key, value in found.items():
        print(f"  {key} {value}")


def show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# (a) Masking.


def keystream_rate(cipher: masks.Cipher, nbytes: int) -> float:
    """Bytes per second of the bare keystream, into a buffer that stays in cache."""
    zeros, into = bytes(masks.BLOCK), bytearray(masks.BLOCK)
    stream = masks.keystream(os.urandom(32), 0, cipher)
    start = time.perf_counter()
    for _ in range(nbytes // masks.BLOCK):
        stream.update_into(zeros, into)
    return nbytes / (time.perf_counter() - start)


def mask_rate(cipher: masks.Cipher, seeds: int, vector: masks.Ring, threads: int) -> float:
    """Bytes of mask per second."""
    add = [os.urandom(32) for _ in range((seeds + 1) // 2)]
    subtract = [os.urandom(32) for _ in range(seeds // 2)]
    start = time.perf_counter()
    masks.apply(vector, add, subtract, cipher=cipher, threads=threads)
    return vector.nbytes * seeds / (time.perf_counter() - start)


def mask_rows(length: int) -> list[dict[str, Any]]:
    whole = np.ones(length, np.uint32)
    rows: list[dict[str, Any]] = []
    cases: list[tuple[masks.Cipher, int, int]] = [
        *(("aes-256-ctr", seeds, 1) for seeds in (1, 2, 9, 64)),
        *(("chacha20", seeds, 1) for seeds in (1, 2, 9, 64)),
        ("aes-256-ctr", 9, 2),
    ]
    for cipher, seeds, threads in cases:
        vector = whole[: max(1 << 20, length // seeds)]
        pairs = []
        for _ in range(9):
            bare = keystream_rate(cipher, 1 << 27)
            pairs.append((mask_rate(cipher, seeds, vector, threads), bare))
        rows.append(
            {
                "cipher": cipher,
                "seeds": seeds,
                "threads": threads,
                "ratio": statistics.median(masked / bare for masked, bare in pairs),
                "coordinates_per_s": statistics.median(masked for masked, _ in pairs) / 4,
                "keystream_bytes_per_s": statistics.median(bare for _, bare in pairs),
            }
        )
    return rows


# (c) Growth.


class Untimed(Site):
    """A site whose cost is not measured: it spares itself the checks of others' signatures."""

    def _check_signatures(self, messages: Sequence[Any]) -> None:
        pass


class Clock:
    """Seconds spent by each party."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def run(self, who: str, what: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        done = what(*args, **options)
        self.spent[who] = self.spent.get(who, 0.0) + time.perf_counter() - start
        return done


def federation(n: int, d: int, timed: int) -> tuple[Coordinator, dict[str, Site]]:
    names = [f"site-{number:04d}" for number in range(n)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, identity) for name, identity in identities.items())
    contract = Contract("run", roster, bytes(32), 0.1, 0.1, 32, d, b"")
    sites = {
        name: (Site if place < timed else Untimed)(
            contract, name, identities[name], minimum=2, random=os.urandom, answered=lambda mark: None
        )
        for place, name in enumerate(names)
    }
    return Coordinator(contract, 1, 1, MODEL, names), sites


def attempt(n: int, d: int, dropouts: int, timed: int) -> dict[str, Any]:
    """An attempt; the last `dropouts` sites drop out after step 2. Vectors are zero, so is their sum."""
    coordinator, sites = federation(n, d, timed)
    clock, names = Clock(), list(sites)
    alive = names[: n - dropouts]
    every = timed >= len(alive)

    for name in names:
        message = clock.run(name, sites[name].advertise, coordinator.begin)
        clock.run("coordinator", coordinator.advertised, message)
    peers = clock.run("coordinator", coordinator.peers)
    for name in names:
        message = clock.run(name, sites[name].share, peers)
        clock.run("coordinator", coordinator.shared, message)
    inboxes = clock.run("coordinator", coordinator.inboxes)
    vector = np.ones(d, np.uint32)  # touched: a fresh vector's page faults are not masking
    for place, name in enumerate(alive):
        clock.run(name, sites[name].receive, inboxes[name])
        if place < timed:
            vector[:] = 0
            clock.run(name, sites[name].mask, vector, model=MODEL)
        else:
            sites[name].take_seeds(model=MODEL)
        message = clock.run(name, sites[name].masked, bytes(32))
        clock.run("coordinator", coordinator.fold, message, vector)
    survivors = clock.run("coordinator", coordinator.survivors)
    for name in alive:
        message = clock.run(name, sites[name].confirm, survivors)
        clock.run("coordinator", coordinator.confirmed, message)
    request = clock.run("coordinator", coordinator.request)
    for name in alive:
        message = clock.run(name, sites[name].unmask, request)
        clock.run("coordinator", coordinator.revealed, message)
    total = clock.run("coordinator", coordinator.sum)
    if every and total.any():
        raise SystemExit("the sum of zeros is not zero")
    parameters = coordinator.attempt.parameters
    return {
        "n": n,
        "d": d,
        "dropouts": dropouts,
        "k": parameters.k,
        "t": parameters.threshold,
        "site_s": statistics.median(clock.spent[name] for name in names[: min(timed, len(alive))]),
        "coordinator_s": clock.spent["coordinator"],
    }


def growth_rows(quick: bool) -> list[dict[str, Any]]:
    sizes = (4, 8, 16, 64) if quick else (4, 8, 16, 32, 64, 65, 128, 256)
    lengths = (10**4, 10**5) if quick else (10**5, 10**6, 10**7, 10**8)
    rows = []
    for n in sizes:
        for dropouts in (0, 2) if n > 4 else (0, 1):
            rows.append(attempt(n, 10**5 if quick else 10**6, dropouts, 8 if n <= 8 else 3))
    for d in lengths:
        for dropouts in (0, 2):
            rows.append(attempt(8, d, dropouts, 8 if d <= 10**6 else 2))
    return rows


# (d) Memory.


def peak(what: Callable[..., Any], *args: Any, **options: Any) -> int:
    tracemalloc.start()
    what(*args, **options)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def memory(d: int) -> dict[str, Any]:
    """Peak bytes of masking at a site, and of folding and unmasking at the coordinator, for two cohorts."""
    found: dict[str, Any] = {"d": d, "vector": 4 * d}
    for n in (4, 32):
        coordinator, sites = federation(n, d, n)
        for site in sites.values():
            coordinator.advertised(site.advertise(coordinator.begin))
        peers = coordinator.peers()
        for site in sites.values():
            coordinator.shared(site.share(peers))
        inboxes = coordinator.inboxes()
        vector = np.zeros(d, np.uint32)
        statements: list[Masked] = []
        extra = 0
        for name, site in sites.items():
            site.receive(inboxes[name])
            extra = max(extra, peak(site.mask, vector, model=MODEL))
            statements.append(site.masked(bytes(32)))
        found[f"site_beyond_vector_n{n}"] = extra
        found[f"coordinator_n{n}"] = peak(finish, coordinator, list(sites.values()), statements, vector)
    return found


def finish(coordinator: Coordinator, sites: list[Site], statements: list[Masked], vector: masks.Ring) -> None:
    for statement in statements:
        coordinator.fold(statement, vector)
    survivors = coordinator.survivors()
    for site in sites:
        coordinator.confirmed(site.confirm(survivors))
    request = coordinator.request()
    for site in sites:
        coordinator.revealed(site.unmask(request))
    coordinator.sum()


if __name__ == "__main__":
    main()
