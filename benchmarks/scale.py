"""A federation's size: seconds to join and for a round, under masks and in clear, and peak memory.

Each case is one run of `simulate` with masks and one in clear, each in a process of its own. A site has seven records,
paragraphs of Python's language reference, and trains all parameters for one step of four sequences of 64 bytes; in the
case of 85 M parameters for one step of one sequence of 32. Sites do not sync (`simulation.durable = false`).

* join_s: from the start of the command to the first round, with imports, the sites' folders and the joins.
* round_s: the slowest round under masks, from its draw to its checkpoint; the first is included.
* clear_round_s: the same in clear.
* peak_gb: largest memory of all processes together at one time (the kernel's PSS), under masks, 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RECORDS = 7
SMALL = """
[model.config]
hidden_size = 64
intermediate_size = 176
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 128
[local]
steps = 1
batch_size = 4
[data]
sequence_length = 64
held_out = 0.0
"""
LARGE = """
[model.config]
hidden_size = 768
intermediate_size = 2048
num_hidden_layers = 12
num_attention_heads = 12
num_key_value_heads = 12
max_position_embeddings = 128
[local]
steps = 1
batch_size = 1
[data]
sequence_length = 32
held_out = 0.0
"""


@dataclass(frozen=True)
class Case:
    name: str
    sites: int
    fraction: float
    model: str


CASES = {
    case.name: case
    for case in (
        Case("100", 100, 0.2, SMALL),
        Case("1000", 1000, 0.2, SMALL),
        Case("2000", 2000, 0.2, SMALL),
        Case("4 x 85 M", 4, 1.0, LARGE),
    )
}


@dataclass(frozen=True)
class Result:
    case: str
    join_s: float
    round_s: float
    clear_round_s: float
    peak_gb: float


def plan_of(case: Case, source: Path, *, secure: bool, rounds: int) -> str:
    return f"""
[run]
name = "scale"
rounds = {rounds}
{case.model}
[cohort]
sites = {case.sites}
fraction = {case.fraction}
quorum = 0.5
deadline_s = 3600
[aggregation]
secure = {str(secure).lower()}
colluders = 0.02
dropouts = 0.05
[server]
evaluation = "none"
[simulation]
source = "{source}"
partition = "iid"
durable = false
"""


def write_source(path: Path, records: int) -> None:
    """Paragraphs of the language reference, repeated where there are not enough."""
    from cloister.lm.corpus import corpus_records

    texts = [each["text"] for each in corpus_records("builtin:python-docs").records]
    found = [part for text in texts for part in text.split("\n\n") if len(part) > 40]
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            file.write(json.dumps({"text": f"{number}. {found[number % len(found)]}"}) + "\n")


class Memory(threading.Thread):
    """Samples the memory of this process and all that it has started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            self.peak = max(self.peak, sum(map(_pss, _session())))


def _session() -> list[Path]:
    """The processes whose ancestor is this one."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    found, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return [Path("/proc") / str(pid) for pid in found]


def _pss(process: Path) -> int:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def one(plan: str, started: float) -> dict[str, float]:
    """Run a plan in this process."""
    from cloister.protocol.soundness import parse
    from cloister.server.folder import RunFolder
    from cloister.server.progress import RoundDone, Started
    from cloister.simulations.federation import simulate

    memory = Memory()
    memory.start()
    joined, rounds = 0.0, list[float]()
    before = started

    def observe(event: object) -> None:
        nonlocal joined, before
        now = time.time()
        if isinstance(event, Started):
            joined, before = now - started, now
        elif isinstance(event, RoundDone):
            rounds.append(now - before)
            before = now

    with (
        tempfile.TemporaryDirectory() as out,
        RunFolder.create(Path(out) / "run", parse(plan)) as folder,
    ):
        simulate(folder, observe)
    memory.ended.set()
    memory.join()
    return {"join_s": joined, "round_s": max(rounds), "peak_gb": memory.peak / 1e9}


def measure(case: Case, rounds: int) -> Result:
    found = {}
    for secure in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "records.jsonl"
            write_source(source, RECORDS * case.sites)
            plan = plan_of(case, source, secure=secure, rounds=rounds)
            command = [sys.executable, __file__, "--one", plan]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise SystemExit(f"{case.name}: {answer.stderr[-2000:]}")
        found[secure] = json.loads(answer.stdout.splitlines()[-1])
    masked, clear = found[True], found[False]
    return Result(case.name, masked["join_s"], masked["round_s"], clear["round_s"], masked["peak_gb"])


def show(console: Console, results: list[Result]) -> None:
    table = Table()
    for column in ("sites", "join, s", "round, s", "round in clear, s", "peak, GB"):
        table.add_column(column, justify="right")
    for each in results:
        figures = (each.join_s, each.round_s, each.clear_round_s, each.peak_gb)
        table.add_row(each.case, *(f"{figure:.2f}" for figure in figures))
    console.print(table)


def main() -> None:
    started = time.time()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--case", action="append", choices=CASES, help="a case; repeatable (default: all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each run (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--one", metavar="PLAN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, started)))
        return
    results = [measure(CASES[name], arguments.rounds) for name in arguments.case or CASES]
    if arguments.json:
        print(json.dumps([asdict(each) for each in results]))
    else:
        show(Console(), results)


if __name__ == "__main__":
    main()
