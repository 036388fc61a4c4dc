"""A federation's size: seconds to join and for a round, under masks and in clear, and peak memory.

Each case is one run of `simulate` with masks and one in clear, each in a process of its own. A site has seven records,
paragraphs of Python's language reference, and trains all parameters for one step of four sequences of 64 bytes; in the
case of 85 M parameters for one step of one sequence of 32. Sites do not sync (`simulation.durable = false`).

* join_s: from the start of the command to the first round, with imports, the sites' folders and the joins.
* round_s: the slowest round under masks, from its draw to its checkpoint; the first is included.
* clear_round_s: the same in clear.
* peak_gb: largest memory of all processes together at one time (the kernel's PSS), under masks, 1e9 bytes.

The case `pfl` is work that pfl-research 0.6 does as well, where `make peers` has installed it in an environment of its
own: 20 sites, all in every round, two steps of ten sequences of 64 bytes each, and a Llama of 0.46 M parameters. Both
train the same model of transformers from the same weights on the same text, with fused AdamW that starts anew in each
round, gradients clipped to norm 1, and the mean of the updates. pfl-research is one process, with as many threads as
this machine has processors or with one, whichever is faster; this project has a worker with one thread for each
processor, and writes a checkpoint in each round. The runs alternate, and the first rounds of each are left out.

* pfl_ratio: the median of this project's rounds over that of pfl-research's, under masks and in clear; null where
  pfl-research is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


PEER = """
[model.config]
hidden_size = 128
intermediate_size = 344
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 4
max_position_embeddings = 128
[local]
steps = 2
batch_size = 10
schedule = "constant"
[data]
sequence_length = 64
packing = false
held_out = 0.0
"""
PEER_SITES, PEER_SEQUENCES, PEER_LENGTH = 20, 20, 64
PASSES, WARM_UP = 3, 2
PEERS = Path(__file__).resolve().parents[1] / ".venv-pfl" / "bin" / "python"


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
        Case("pfl", PEER_SITES, 1.0, PEER),
    )
}


@dataclass(frozen=True)
class Result:
    case: str
    join_s: float
    round_s: float
    clear_round_s: float
    peak_gb: float


@dataclass(frozen=True)
class Ratio:
    masked: float
    clear: float


@dataclass(frozen=True)
class PeerResult(Result):
    pfl_ratio: Ratio | None


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


def write_source(path: Path, records: int, length: int | None = None) -> None:
    """Paragraphs of the language reference, repeated where there are not enough; of one length, if it is given."""
    from cloister.lm.text.corpus import corpus_records

    texts = [each["text"] for each in corpus_records("builtin:python-docs").records]
    found = [
        part for text in texts for part in text.split("\n\n") if len(part) > (length or 40) and part.isascii()
    ]
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            file.write(json.dumps({"text": f"{number}. {found[number % len(found)]}"[:length]}) + "\n")


class Memory(threading.Thread):
    """Samples the memory of this process and all that it has started."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):  # the kernel adds up a process's pages, which takes time
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


def one(plan: str, started: float) -> dict[str, Any]:
    """Run a plan in this process."""
    from cloister.protocol.plan.soundness import parse
    from cloister.server.record.folder import RunFolder
    from cloister.server.record.progress import RoundDone, Started
    from cloister.simulations.engines import fork_server
    from cloister.simulations.engines.process import collect_rarely

    parsed = parse(plan)
    fork_server.start(parsed)  # as the command does, before its own imports
    from cloister.simulations.federation import simulate

    collect_rarely()  # as the command does
    memory = Memory()
    memory.start()
    joined, rounds, tokens = 0.0, list[float](), list[int | None]()
    before = started

    def observe(event: object) -> None:
        nonlocal joined, before
        now = time.time()
        if isinstance(event, Started):
            joined, before = now - started, now
        elif isinstance(event, RoundDone):
            rounds.append(now - before)
            tokens.append(event.figures.get("tokens"))
            before = now

    with (
        tempfile.TemporaryDirectory() as out,
        RunFolder.create(Path(out) / "run", parsed) as folder,
    ):
        simulate(folder, observe)
    memory.ended.set()
    memory.join()
    return {"join_s": joined, "rounds": rounds, "tokens": tokens, "peak_gb": memory.peak / 1e9}


def answer_of(name: str, *command: str) -> Any:
    """What a process prints in its last line, as JSON."""
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{name}: {answer.stderr[-2000:]}")
    return json.loads(answer.stdout.splitlines()[-1])


def run_case(case: Case, source: Path, rounds: int, *, secure: bool) -> dict[str, Any]:
    plan = plan_of(case, source, secure=secure, rounds=rounds)
    found: dict[str, Any] = answer_of(case.name, sys.executable, __file__, "--one", plan)
    return found


def measure(case: Case, rounds: int) -> Result:
    if case.model == PEER:
        return measure_beside_peer(case, rounds)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "records.jsonl"
        write_source(source, RECORDS * case.sites)
        masked, clear = (run_case(case, source, rounds, secure=secure) for secure in (True, False))
    return Result(case.name, masked["join_s"], max(masked["rounds"]), max(clear["rounds"]), masked["peak_gb"])


def measure_beside_peer(case: Case, rounds: int) -> PeerResult:
    """The case of pfl-research: its rounds and this project's, in turn."""
    installed = PEERS.exists()
    if not installed:
        print("pfl-research is not installed: run `make peers`; pfl_ratio is null", file=sys.stderr)
    ours: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    theirs: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, model, sequences = (Path(folder) / name for name in ("records.jsonl", "model", "tokens.npy"))
        write_source(source, PEER_SITES * PEER_SEQUENCES, PEER_LENGTH - 1)  # and the token that ends a text
        write_for_peer(case, source, model, sequences)
        for _ in range(PASSES):
            for secure in (True, False):
                ours[secure].append(run_case(case, source, rounds + WARM_UP, secure=secure))
            for threads in {1, os.cpu_count() or 1} if installed else ():
                command = (
                    str(PEERS),
                    str(Path(__file__).resolve().with_name("pfl_rounds.py")),
                    str(model),
                    str(sequences),
                )
                options = ("--rounds", str(rounds + WARM_UP), "--threads", str(threads))
                theirs.setdefault(threads, []).extend(answer_of("pfl", *command, *options)[WARM_UP:])
    learned = {count for each in (*ours[True], *ours[False]) for count in each["tokens"]}
    step_tokens = 10 * (PEER_LENGTH - 1)
    assert learned == {PEER_SITES * 2 * step_tokens}, f"not the same tokens as pfl-research: {learned}"
    medians = {
        secure: statistics.median(seconds for run in runs for seconds in run["rounds"][WARM_UP:])
        for secure, runs in ours.items()
    }
    best = min((statistics.median(seconds) for seconds in theirs.values()), default=None)
    return PeerResult(
        case.name,
        join_s=max(run["join_s"] for run in ours[True]),
        round_s=max(seconds for run in ours[True] for seconds in run["rounds"]),
        clear_round_s=max(seconds for run in ours[False] for seconds in run["rounds"]),
        peak_gb=max(run["peak_gb"] for run in ours[True]),
        pfl_ratio=None if best is None else Ratio(medians[True] / best, medians[False] / best),
    )


def write_for_peer(case: Case, source: Path, model: Path, sequences: Path) -> None:
    """The model of a plan, with its initial weights, and the tokens of its records, for pfl-research."""
    import numpy as np

    from cloister.lm.model.model import load_model
    from cloister.protocol.plan.soundness import parse

    loaded: Any = load_model(parse(plan_of(case, source, secure=False, rounds=1)))
    loaded.module.save_pretrained(model)
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()]
    tokenizer = loaded.tokenizer
    tokens = np.array([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts], np.int64)
    np.save(sequences, tokens.reshape(PEER_SITES, PEER_SEQUENCES, PEER_LENGTH))


def show(console: Console, results: list[Result]) -> None:
    table = Table()
    for column in ("sites", "join, s", "round, s", "round in clear, s", "peak, GB"):
        table.add_column(column, justify="right")
    for each in results:
        figures = (each.join_s, each.round_s, each.clear_round_s, each.peak_gb)
        table.add_row(each.case, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    for each in results:
        if isinstance(each, PeerResult) and each.pfl_ratio is not None:
            ratio = each.pfl_ratio
            console.print(
                f"seconds over pfl-research's: {ratio.masked:.2f} masked, {ratio.clear:.2f} in clear"
            )


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
