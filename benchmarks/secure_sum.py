"""The cost of the secure sum: masking against the bare keystream, a round against Flower's, growth, and peak memory.

    python benchmarks/secure_sum.py [--json] [--quick] [--case bits|sketch]

(a) `mask_ratio`: coordinates masked per second over the bare keystream rate of the same cipher, one thread,
measured in turns; the least over 2, 9 and 64 masks on one vector (a site has two at least). `mask` has every
row, including one mask, where only the vector's memory traffic adds time.

(b) `flower_ratio`: seconds of a round of Flower's SecAgg+ (`flower_round_s`, by `flower_secagg.py`) over those of a
round here (`round_s`), 9 sites of 1e6 coordinates, both in simulation with as many worker processes as CPUs; each in a
process of its own, twice in turns, medians. A round here is the whole of `run_round` on `LocalGrid`: from drawing the
cohort to the checkpoint on disk, with sites that keep their finished update and check the model's hash, as in any run.
Only `Trainer.train` is replaced: on both sides a float32 vector is returned at once, and is coded as integers inside
the round. `sum_s` is the part that Flower's round also has, from the first request to the decoded mean. In Flower's
example a client has two neighbours; `flower_complete_ratio` and `flower_complete_round_s` are with all of them as
neighbours, which is the graph here. The mean is checked in every round.

(c) `growth`: seconds of one site and of the coordinator for one attempt, in the core without any transport, from
`begin` to the sum; the sites that are not timed send what the coordinator needs, unmasked.

(d) `memory`: peak bytes beyond the vectors that the caller holds, as Python and NumPy allocate them.

(e) `bits`, with `--case bits` alone: a masked round of 9 sites with 1e7 coordinates, compressed to 8 bits against 32
bits, in turns. `parts`: seconds of processor time of all sites and the coordinator in one process, without transport:
coding (with the rotation, and the residuals that are read and written), the files of the updates, masks, hashes, the
sum of the masked vectors, its unmasking, and decoding; `part_ratio` compares their totals. `bytes_up` is one vector.
`round_s` and `round_ratio`: seconds of whole rounds on `LocalGrid`, as in (b).

(f) `sketch`, with `--case sketch` alone: seconds of a sketch of 1e6 coordinates (`aggregation.norm_bound`) against the
nine masks of the same vector, one thread, in turns; minimum, median and maximum of each, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import numpy.typing as npt
from flwr.app import Context
from flwr.clientapp import ClientApp
from rich.console import Console
from rich.table import Table

from cloister.aggregation.features.compression import NAME as COMPRESSION
from cloister.aggregation.features.compression import Scales
from cloister.aggregation.features.feature import Code, Me, Secrets
from cloister.aggregation.features.registry import Orders
from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import Member, SecureSite
from cloister.aggregation.secure.secure_sum import Contract
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector import masks
from cloister.aggregation.vector.compression import FINEST
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.rotation import ROTATED
from cloister.aggregation.vector.sketch import Lengths
from cloister.aggregation.vector.span import check_received, manifest_digest, manifest_of
from cloister.clients.app import client_app
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig, read_config
from cloister.clients.site import Site
from cloister.clients.state.kept import write_pieces
from cloister.clients.training.release import contribution
from cloister.lm.model.model import load_model
from cloister.lm.text.sequences import Sequences
from cloister.lm.training.moments import Carry
from cloister.lm.training.train import LocalUpdate, Trainer
from cloister.protocol.identity.roster import (
    Card,
    Roster,
    load_identity,
    new_identity,
    save_identity,
    save_roster,
)
from cloister.protocol.machine.storage import sync_to_disk
from cloister.protocol.messages.cohort import Draw
from cloister.protocol.messages.envelope import Sender
from cloister.protocol.messages.messages import TRAIN, Masked, Signed
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.protocol.plan.threshold import Tolerance
from cloister.server.federation.app import GridChannel
from cloister.server.record.attempt import KeptAttempt
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.journal import Journal
from cloister.server.record.progress import RoundDone
from cloister.server.round.evaluate import Evaluations, nowhere
from cloister.server.round.round import RoundContext, run_round
from cloister.server.sum.channel import Failure
from cloister.server.sum.members import Members
from cloister.server.sum.party import Party
from cloister.simulations.engines.grid import LocalGrid

MODEL = bytes(32)
SITES, COORDINATES = 9, 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller vectors and cohorts, fewer rounds")
    parser.add_argument("--rounds", type=int, metavar="N", help="measure that many rounds here, and no more")
    parser.add_argument("--case", choices=["all", "bits", "sketch"], default="all", help="(e) or (f) alone")
    parser.add_argument("--bits", type=int, choices=[8, 32], help="with --rounds, those of (e)")
    options = parser.parse_args()
    if options.rounds:
        print(json.dumps(own_rounds(options.rounds, options.bits, quick=options.quick)))
        return
    if options.case != "all":
        quick = options.quick
        found = against_32_bits(quick=quick) if options.case == "bits" else sketch_rows(COORDINATES)
        print(json.dumps(found) if options.json else json.dumps(found, indent=1))
        return
    rows = mask_rows(1 << 22 if options.quick else 1 << 25)
    aes = [row for row in rows if row["threads"] == 1 and row["seeds"] > 1]
    result: dict[str, Any] = {
        "mask_ratio": min(row["ratio"] for row in aes),
        "mask": rows,
        **against_flower(2 if options.quick else 5),
        "growth": growth_rows(options.quick),
        "memory": memory(100_000 if options.quick else 4_000_000),
    }
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


def show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"masking: {result['mask_ratio']:.2f} of the keystream's rate\n"
        f"round, {SITES} sites x {COORDINATES} coordinates: {result['round_s']:.3f} s"
        f" ({result['sum_s']:.3f} s to the sum)\n"
        f"Flower SecAgg+, two neighbours: {result['flower_round_s']:.2f} s, {result['flower_ratio']:.1f} x\n"
        f"Flower SecAgg+, all neighbours: {result['flower_complete_round_s']:.2f} s,"
        f" {result['flower_complete_ratio']:.1f} x\n",
        highlight=False,
    )
    for name in ("mask", "growth"):
        console.print(table(name, result[name]))
    memory_rows = [{"what": key, "bytes": f"{value:,}"} for key, value in result["memory"].items()]
    console.print(table("memory", memory_rows))


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    shown = Table(*rows[0], title=title, title_justify="left", box=None)
    for column in shown.columns:
        column.justify = "right"
    for row in rows:
        shown.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    return shown


# (a) Masking.


def keystream_rate(nbytes: int) -> float:
    """Bytes per second of the bare keystream, into a buffer that stays in cache."""
    zeros, into = bytes(masks.BLOCK), bytearray(masks.BLOCK)
    stream = masks.keystream(os.urandom(32), 0)
    start = time.perf_counter()
    for _ in range(nbytes // masks.BLOCK):
        stream.update_into(memoryview(zeros), memoryview(into))
    return nbytes / (time.perf_counter() - start)


def mask_rate(seeds: int, vector: masks.Ring, threads: int) -> float:
    """Bytes of mask per second."""
    add = [os.urandom(32) for _ in range((seeds + 1) // 2)]
    subtract = [os.urandom(32) for _ in range(seeds // 2)]
    start = time.perf_counter()
    masks.apply(vector, add, subtract, threads=threads)
    return vector.nbytes * seeds / (time.perf_counter() - start)


def mask_rows(length: int) -> list[dict[str, Any]]:
    whole = np.ones(length, np.uint32)
    rows: list[dict[str, Any]] = []
    for seeds, threads in ((1, 1), (2, 1), (9, 1), (64, 1), (9, 2)):
        vector = whole[: max(1 << 20, length // seeds)]
        pairs = []
        for _ in range(9):
            bare = keystream_rate(1 << 27)
            pairs.append((mask_rate(seeds, vector, threads), bare))
        rows.append(
            {
                "seeds": seeds,
                "threads": threads,
                "ratio": statistics.median(masked / bare for masked, bare in pairs),
                "coordinates_per_s": statistics.median(masked for masked, _ in pairs) / 4,
                "keystream_bytes_per_s": statistics.median(bare for _, bare in pairs),
            }
        )
    return rows


# (f) A sketch.


def sketch_rows(length: int, turns: int = 9) -> list[dict[str, Any]]:
    rows = []
    for bits in (32, 8):
        vector = np.frombuffer(os.urandom(length * bits // 8), f"u{bits // 8}").copy()
        weights = None if bits == 32 else np.full(-(-length // ROTATED), FINEST, np.int64)
        lengths = Lengths(length, 1.0, weights)
        seconds: dict[str, list[float]] = {"sketch": [], "masks": []}
        for _ in range(turns):
            start = time.perf_counter()
            lengths.sketch([(0, vector)], os.urandom(32))
            between = time.perf_counter()
            mask_rate(9, vector, 1)
            seconds["sketch"].append(between - start)
            seconds["masks"].append(time.perf_counter() - between)
        row: dict[str, Any] = {"bits": bits}
        for name, taken in seconds.items():
            row |= {f"{name} {of.__name__}": of(taken) for of in (min, statistics.median, max)}
        rows.append(row | {"ratio": row["sketch median"] / row["masks median"]})
    return rows


# (b) A round against Flower's.


def against_flower(rounds: int) -> dict[str, float]:
    """Medians of a round here and of one of Flower's, with both of its graphs, measured in turns."""
    beside = [str(Path(__file__).resolve().with_name("flower_secagg.py")), "--json", "--rounds", str(rounds)]
    beside += ["--sites", str(SITES), "--coordinates", str(COORDINATES)]
    own: list[tuple[float, float]] = []
    flower: list[float] = []
    complete: list[float] = []
    for _ in range(2):
        own += json.loads(printed_by([__file__, "--rounds", str(rounds)]))
        flower += json.loads(printed_by(beside))["rounds"]
        complete += json.loads(printed_by([*beside, "--shares", "1.0", "--threshold", "0.5"]))["rounds"]
    round_s = statistics.median(whole for whole, _ in own)
    return {
        "flower_ratio": statistics.median(flower) / round_s,
        "flower_complete_ratio": statistics.median(complete) / round_s,
        "flower_round_s": statistics.median(flower),
        "flower_complete_round_s": statistics.median(complete),
        "round_s": round_s,
        "sum_s": statistics.median(summed for _, summed in own),
    }


def printed_by(command: list[str]) -> str:
    """The last line that a script of Python prints."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout.splitlines()[-1]


BITS: dict[int, tuple[str, ...]] = {
    8: (
        "aggregation.weighting=uniform",
        "aggregation.ring_bits=8",
        "aggregation.compression.first_scale=0.3",
    ),
    32: ("aggregation.weighting=uniform",),
}
"""What (e) compares."""
LARGE = ("hidden_size=320", "intermediate_size=872", "num_hidden_layers=8")
"""A model of about 1e7 parameters."""
RMS = 0.1
"""Of the values of an update in the parts of (e)."""


def plan_of(rounds: int, settings: Sequence[str] = ()) -> Plan:
    """A plan whose model has exactly 1e6 parameters; all else is the default, without `settings`."""
    return parse(
        f"""
        run.rounds = {rounds}
        cohort.sites = {SITES}
        [model.config]
        hidden_size = 100
        intermediate_size = 317
        num_hidden_layers = 7
        num_attention_heads = 5
        num_key_value_heads = 5
        """,
        settings,
    )


def update(site: int, size: int = COORDINATES) -> npt.NDArray[np.float32]:
    """(size,) float32 in ±0.5, a different one for each site; the same as in `flower_secagg.py`."""
    vector = np.full(size, (site + 1) / (2 * SITES), np.float32)
    vector[::1000] *= np.linspace(-1, 1, len(vector[::1000]))
    return vector


def at_once(_: Trainer, start: npt.NDArray[np.float32], sequences: Sequences, **__: Any) -> LocalUpdate:
    """Replaces `Trainer.train` for the site of the message that this process answers."""
    return LocalUpdate(made_once(answering["site"], start.size), tokens=len(sequences), loss=1.0)


answering = {"site": 0}
"""The number of the site whose message this process answers; it answers one at a time."""


@lru_cache(maxsize=SITES)
def made_once(site: int, size: int) -> npt.NDArray[np.float32]:
    """What `update` makes, read-only: to make it in each round took a twelfth of a round of (e)."""
    vector = update(site, size)
    vector.flags.writeable = False
    return vector


def make_client_app() -> ClientApp:
    """The app of a deployed site, in a worker process where training is replaced."""
    mock.patch.object(Trainer, "train", at_once).start()
    sync_to_disk(False)

    def open_site(context: Context, resident: Resident) -> Site:
        config = _config(str(context.node_config["site"]))
        answering["site"] = int(config.name.removeprefix("site-"))
        return Site(config, resident)

    return client_app(open_site)


@lru_cache(maxsize=256)
def _config(path: str) -> SiteConfig:
    return read_config(Path(path))


def lay_out(folder: Path, plan: Plan) -> tuple[Roster, list[Path]]:
    """Give each site an identity, a record and its TOML; the roster, and the TOMLs."""
    names = [f"site-{site}" for site in range(SITES)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, identity) for name, identity in identities.items())
    save_roster(roster, folder / "roster.toml")
    coordinator = new_identity()
    save_identity(coordinator, folder / "coordinator.pem")
    (folder / "data.txt").write_text("All sites have the same record.\n" * 99, encoding="utf-8")
    paths = []
    for site, name in enumerate(names):
        save_identity(identities[name], folder / f"{name}.pem")
        keys = {
            "name": name,
            "data": "data.txt",
            "state": f"states/{site}",
            "identity": f"{name}.pem",
            "coordinator": coordinator.public_key().public_bytes_raw().hex(),
            "roster": "roster.toml",
            "roster_hash": roster.hash.hex(),
            "plan": plan.digest(),
            "device": "cpu",
        }
        paths.append(folder / f"{name}.toml")
        paths[-1].write_text("".join(f'{key} = "{value}"\n' for key, value in keys.items()), encoding="utf-8")
    return roster, paths


def own_rounds(rounds: int, bits: int | None = None, *, quick: bool = False) -> list[tuple[float, float]]:
    """Seconds of whole rounds and of the sums in them, after one round that does not count.

    Args:
        rounds: Rounds that count.
        bits: Of the ring, for (e), with a larger model; None: those of the default plan.
        quick: As the option.
    """
    settings = () if bits is None else BITS[bits]
    if bits is not None and not quick:
        settings += tuple(f"model.config.{setting}" for setting in LARGE)
    plan = plan_of(rounds + 1, settings)
    model = load_model(plan)
    size = model.layout.size
    assert bits is not None or size == COORDINATES
    expected = sum((update(site, size) for site in range(SITES)), np.zeros(size)) / SITES
    most_off = 1e-5 if plan.aggregation.compression is None else 0.2  # a few steps of one site's code
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    spent = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        roster, paths = lay_out(folder, plan)
        with (
            LocalGrid(
                make_client_app,
                [{"site": str(path)} for path in paths],
                workers=[{"OMP_NUM_THREADS": "1"}] * cpus,
                preload=["cloister.clients.app"],
            ) as grid,
            Journal(folder / "journal.sqlite") as journal,
        ):
            sender = Sender(load_identity(folder / "coordinator.pem"), "run", 1)
            names = {node: f"site-{node - 1}" for node in range(1, SITES + 1)}
            members = Members(GridChannel(grid, sender, names), plan, "run", refuse, roster=roster)
            weights = np.zeros(size, np.float32)
            checkpoints = Checkpoints(folder / "checkpoints", model.layout, plan.server.keep_checkpoints)
            kept = KeptAttempt(folder / "attempt")
            sums = Sums.over(plan, model.layout, b"")
            party = Party(sums, "run", roster, members, journal, kept, lambda event: None)
            context = RoundContext(party, checkpoints, weights, Evaluations(nowhere))
            for number in range(1, rounds + 2):
                before = weights.copy()
                start = time.perf_counter()
                done = run_round(context, number)
                whole = time.perf_counter() - start
                furthest = float(np.abs(weights - before - expected).max())
                if not isinstance(done, RoundDone) or done.sites != SITES or furthest > most_off:
                    raise SystemExit(
                        f"the mean is off by {furthest:.3g}, or not that of {SITES} sites: {done}"
                    )
                spent.append((whole, done.seconds))
    return spent[1:]


def refuse(failure: Failure) -> None:
    raise SystemExit(f"{failure.site}: {failure.reason}")


# (c) Growth.


class Untimed(SecureSite):
    """A site whose cost is not measured: it skips the checks of others' signatures."""

    def _check_signatures(self, messages: Sequence[Signed]) -> None:
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


def federation(
    n: int, d: int, timed: int, bits: Literal[8, 16, 32] = 32
) -> tuple[SecureCoordinator, dict[str, SecureSite]]:
    names = [f"site-{number:04d}" for number in range(n)]
    identities = {name: new_identity() for name in names}
    roster = Roster.of(Card.of(name, identity) for name, identity in identities.items())
    draw = Draw(0, TRAIN, n)
    contract = Contract("run", roster, bytes(32), draw, Tolerance(0.1, 0.1), bits, d, b"")
    sites = {
        name: (SecureSite if place < timed else Untimed)(
            contract, Member(name, identities[name], 2), random=os.urandom, answered=lambda mark: None
        )
        for place, name in enumerate(names)
    }
    return SecureCoordinator(contract, 1, 1, MODEL), sites


def attempt(n: int, d: int, dropouts: int, timed: int) -> dict[str, Any]:
    """An attempt; the last `dropouts` sites drop out after step 3. Vectors are zero, so is their sum."""
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
            clock.run(name, sites[name].mask, [(0, vector)], instructions=MODEL)
        else:
            sites[name].take_seeds(instructions=MODEL)
        message = clock.run(name, sites[name].masked, bytes(32))
        clock.run("coordinator", coordinator.fold, message, [(0, vector)])
    survivors = clock.run("coordinator", coordinator.survivors)
    for name in alive:
        message = clock.run(name, sites[name].confirm, survivors)
        clock.run("coordinator", coordinator.confirmed, message)
    requests = clock.run("coordinator", coordinator.request)
    for name in alive:
        message = clock.run(name, sites[name].unmask, requests[name])
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
            extra = max(extra, peak(site.mask, [(0, vector)], instructions=MODEL))
            statements.append(site.masked(bytes(32)))
        found[f"site_beyond_vector_n{n}"] = extra
        found[f"coordinator_n{n}"] = peak(finish, coordinator, list(sites.values()), statements, vector)
    return found


def finish(
    coordinator: SecureCoordinator, sites: list[SecureSite], statements: list[Masked], vector: masks.Ring
) -> None:
    for statement in statements:
        coordinator.fold(statement, [(0, vector)])
    survivors = coordinator.survivors()
    for site in sites:
        coordinator.confirmed(site.confirm(survivors))
    requests = coordinator.request()
    for site in sites:
        coordinator.revealed(site.unmask(requests[site.name]))
    coordinator.sum()


# (e) Fewer bytes.


def against_32_bits(*, quick: bool) -> dict[str, Any]:
    """Compressed to 8 bits against 32 bits, in turns: the parts of a round without transport, and whole rounds."""
    size, turns = (10**6, 2) if quick else (10**7, 3)
    parts: dict[int, list[dict[str, float]]] = {bits: [] for bits in BITS}
    rounds: dict[int, list[float]] = {bits: [] for bits in BITS}
    sent: dict[int, int] = {}
    for turn in range(3 * turns):
        for bits, settings in BITS.items():
            found, sent[bits] = parts_of_a_round(plan_of(1, settings), size, turn)
            parts[bits].append(found)
    for _ in range(turns):
        for bits in BITS:
            command = [__file__, "--rounds", "2", "--bits", str(bits), *(["--quick"] if quick else [])]
            rounds[bits] += [whole for whole, _ in json.loads(printed_by(command))]
    shown = {
        bits: {part: statistics.median(each[part] for each in of) for part in of[0]}
        for bits, of in parts.items()
    }
    totals = {bits: statistics.median(sum(each.values()) for each in of) for bits, of in parts.items()}
    whole = {bits: statistics.median(of) for bits, of in rounds.items()}
    return {
        "sites": SITES,
        "coordinates": size,
        "part_ratio": totals[32] / totals[8],
        "parts_s": totals,
        "parts": shown,
        "bytes_up": sent,
        "round_ratio": whole[32] / whole[8],
        "round_s": whole,
    }


def _coded(
    folder: Path, code: Callable[[Carry | None], Code], finished: LocalUpdate, number: int
) -> RingVector:
    """The vector of a round, with what the one before has left out."""
    after = folder / f"{number}"
    after.mkdir()
    carry = Carry(folder / f"{number - 1}" if number > 1 else None, after)
    return contribution(code(carry), finished)


def parts_of_a_round(plan: Plan, size: int, turn: int) -> tuple[dict[str, float], int]:
    """Seconds of processor time by part, of all sites and the coordinator; and the bytes of one site's vector."""
    spent = dict.fromkeys(("code", "files", "masks", "hashes", "sum", "unmask", "decode"), 0.0)

    def timed(part: str, what: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.process_time()
        done = what(*args, **options)
        spent[part] += time.process_time() - start
        return done

    sums = Sums(plan, size)
    layout = sums.training
    # Bounds of three root mean squares: what rounds aim at (aggregation/features/compression.py), so that some
    # values are clipped.
    blocks = layout.blocks.blocks if layout.blocks else 0
    bounds = Scales(np.full(blocks, 3 * RMS, np.float32), 0.0).to_bytes()
    orders = Orders.read(sums, ((COMPRESSION, bounds),) if blocks else (), Me("site", lambda: None))

    def code(number: int, carry: Carry | None) -> Code:
        return orders.code(layout, Secrets(number.to_bytes(32), None, carry))

    coordinator, sites = federation(SITES, layout.length, SITES, plan.aggregation.ring_bits)
    for site in sites.values():
        coordinator.advertised(site.advertise(coordinator.begin))
    peers = coordinator.peers()
    for site in sites.values():
        coordinator.shared(site.share(peers))
    inboxes = coordinator.inboxes()
    vector: Any
    for number, (name, site) in enumerate(sites.items()):
        with tempfile.TemporaryDirectory() as temporary:
            folder, values = Path(temporary), np.random.default_rng([turn, number])
            finished = LocalUpdate(RMS * values.standard_normal(size, np.float32), 100, 1.0)
            if not blocks:
                vector = timed("code", contribution, code(number, None), finished)
            else:
                coded = partial(_coded, folder, partial(code, number), finished)
                coded(1)
                vector = timed("code", coded, 2)  # which has a residual to add
            timed("files", write_pieces, folder / "update", [(0, vector)])
            site.receive(inboxes[name])
            timed("masks", site.mask, [(0, vector)], instructions=MODEL)
            manifest = timed("hashes", manifest_of, [(0, vector)])
            statement = site.masked(manifest_digest(manifest))
            timed("hashes", check_received, manifest, [vector], layout.length, layout.ring.dtype)
            timed("sum", coordinator.fold, statement, [(0, vector)])
    survivors = coordinator.survivors()
    for site in sites.values():
        coordinator.confirmed(site.confirm(survivors))
    requests = coordinator.request()
    for name, site in sites.items():
        coordinator.revealed(site.unmask(requests[name]))
    total = timed("unmask", coordinator.sum)
    opened = timed(
        "decode", layout.open, total, SITES, np.full(blocks, 3 * RMS, np.float32) if blocks else None
    )
    if not RMS / 5 < float(np.sqrt(np.mean(np.square(opened.mean)))) < RMS / 2:  # a third: the mean of nine
        raise SystemExit("the mean is not that of the sites")
    return spent, layout.length * np.dtype(layout.ring.dtype).itemsize


if __name__ == "__main__":
    main()
