"""`cloister ledger`: verify a ledger, and show what was spent.

Work with ledgers: durable lists of every release that was charged.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

from rich.text import Text

from cloister.cli.options.shared_options import Parser, add_action, tell
from cloister.cli.show.console import PipedConsole, columns
from cloister.privacy.accounting.accountant import Spent, over_runs, spent
from cloister.privacy.accounting.trust import Shares, shares
from cloister.privacy.ledger.ledger import Entry, History, read_history
from cloister.privacy.mechanism.events import from_json
from cloister.protocol.errors import LedgerError
from cloister.protocol.messages.messages import EVALUATE, TRAIN, Purpose
from cloister.server.record.folder import RunFiles

_PARTS = {
    "against_all": "  against all others together",
    "questions": "  questions alone",
    "rest": "  all else alone",
}
"""Rows of a dataset with questions."""
_TRUSTED = (
    "figures with questions hold against those who know the noise of no more sites than their plans assume; against "
    "the coordinator and all other sites together, a site's own noise alone counts; parts need not add up"
)


def options(parser: Parser) -> None:
    """The actions `verify` and `show`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = add_action(actions, _verify)
    verify.value("--head HEX", "a head noted earlier, for example from a report")
    show = add_action(actions, _show)
    for action in (verify, show):
        action.value("ledger PATH", "a ledger, or a run folder")
        action.add_json()


def rounded_up(epsilon: float | None) -> str:
    """Epsilon in five digits, rounded up; None is no bound."""
    if epsilon is None:
        return "no bound"

    return f"{Context(prec=5, rounding=ROUND_CEILING).create_decimal(epsilon).normalize():f}"


def _find(path: Path) -> Path:

    inside = RunFiles(path).ledger
    found = inside if path.is_dir() else path
    if not found.is_file():
        raise LedgerError("ledger", str(path), expected=f"a ledger, or a run folder with {inside.name} in it")
    return found


def _verify(arguments: argparse.Namespace) -> int:
    """Check that a ledger was not altered.

    Check the hash chain of a ledger, and print the number of its entries and its head. Exit code 1, and the reason, if
    the ledger was altered.
    """
    path, noted = _find(Path(arguments.ledger)), arguments.head
    if noted is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", noted):
        raise LedgerError("--head", noted, expected="64 hexadecimal digits")

    try:
        verified = read_history(path).verified(noted)
    except LedgerError as error:
        if arguments.traceback:
            raise
        if arguments.json:
            print(json.dumps({"ledger": str(path), "ok": False, "problem": str(error)}))
        print(f"cloister: {error}", file=sys.stderr)
        return 1
    return tell(
        arguments,
        {"ledger": str(path), "entries": verified.entries, "head": verified.head, "ok": True},
        f"entries {verified.entries}\nhead {verified.head}",
        "ok: the hash chain verifies, and contains the noted head"
        if noted is not None
        else "ok: the hash chain verifies. Only a head noted elsewhere (--head) shows that no entries are missing at "
        "its end.",
    )


def _show(arguments: argparse.Namespace) -> int:
    """Print what was spent, by dataset and run.

    Print the epsilon of each run, and of all runs together, by dataset.
    """

    path = _find(Path(arguments.ledger))
    history = read_history(path)
    datasets = [_dataset(history, name) for name in history.datasets()]
    if arguments.json:
        found = {"ledger": str(path), "entries": len(history.entries), "head": history.head.hex()}
        print(json.dumps(found | {"datasets": datasets}))
        return 0
    _print(history, datasets)
    return 0


def _dataset(history: History, name: str) -> dict[str, Any]:
    """What a dataset has spent, at the smallest delta among its entries, or over runs whose mechanisms differ at twice
    that delta; with questions also their share, and the cost against all other parties together."""

    entries = [entry for entry in history.entries if entry.charge.dataset == name]
    delta, charges = min(entry.charge.delta for entry in entries), [entry.charge.event for entry in entries]
    parts = shares(charges, delta)
    runs: dict[str, list[Entry]] = {}
    for entry in entries:
        runs.setdefault(entry.charge.run, []).append(entry)
    return {
        "dataset": name,
        **_epsilon(over_runs(charges, delta)),
        **({} if parts is None else {"asked": _asked(parts)}),
        "runs": [
            {
                "run": run,
                "entries": len(charged),
                "rounds": _of(charged, TRAIN),
                "evaluations": _of(charged, EVALUATE),
                **_epsilon(
                    spent([event for each in charged for event in from_json(each.charge.event)], delta)
                ),
            }
            for run, charged in runs.items()
        ],
    }


def _asked(parts: Shares) -> dict[str, Any]:
    """What questions make of the cost, by row; null means that there is no such figure."""
    figures = {"against_all": parts.against_all, "questions": parts.questions, "rest": parts.rest}
    found = {name: None if cost is None else _epsilon(cost) for name, cost in figures.items()}
    return found | {"why_not": parts.why_not}


def _epsilon(spent: Spent) -> dict[str, Any]:
    """For JSON, which has no infinity: null means that there is no bound."""
    epsilon = spent.epsilon if math.isfinite(spent.epsilon) else None
    return {"epsilon": epsilon, "delta": spent.delta, "accountant": spent.accountant, "note": spent.note}


def _of(charged: list[Entry], purpose: Purpose) -> list[int]:
    """The rounds that were charged for a purpose."""
    return sorted({entry.charge.round for entry in charged if entry.charge.purpose == purpose})


def _charged(run: dict[str, Any]) -> str:
    """What a run was charged for, in words."""
    trained, evaluated = run["rounds"], len(run["evaluations"])
    rounds = [_rounds(trained)] if trained else []
    evaluations = [f"{evaluated} evaluation{'s' * (evaluated > 1)}"] if evaluated else []
    return " and ".join(rounds + evaluations)


def _rounds(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        return str(first) if first == last else f"{first} to {last}"
    return f"{len(numbers)} from {first} to {last}"


def _print(history: History, datasets: list[dict[str, Any]]) -> None:

    console = PipedConsole()
    if not datasets:
        console.print("nothing was charged yet")
        return
    headings = ("dataset", "run", "rounds", "entries", "epsilon", "delta")
    table = columns(*headings, title=f"Ledger of {history.entries[0].owner}", left=2)
    for dataset in datasets:
        name = dataset["dataset"]
        for run in dataset["runs"]:
            cells = (
                name,
                run["run"],
                _charged(run),
                f"{run['entries']:,}",
                rounded_up(run["epsilon"]),
                f"{run['delta']:g}",
            )
            table.add_row(*map(Text, cells))
        count = f"{sum(run['entries'] for run in dataset['runs']):,}"
        cost = rounded_up(dataset["epsilon"]), f"{dataset['delta']:g}"
        together = (name, "all runs together", "", count, *cost)
        table.add_row(*(Text(cell, style="bold") for cell in together))
        for field, label in _PARTS.items():
            if part := dataset.get("asked", {}).get(field):
                cells = name, label, "", "", rounded_up(part["epsilon"]), f"{part['delta']:g}"
                table.add_row(*map(Text, cells))
        table.add_section()
    console.print(table)
    for dataset in datasets:
        if dataset["note"]:
            console.say(f"{dataset['dataset']}: {dataset['note']}")
        if "asked" in dataset:
            console.say(f"{dataset['dataset']}: {_TRUSTED}")
        if why := dataset.get("asked", {}).get("why_not"):
            console.say(f"{dataset['dataset']}: no figure against all others together: {why}")
    console.say(
        "of what was charged; if results decided how much, a limit that was fixed beforehand holds", "dim"
    )
    console.say(f"head {history.head.hex()}", "dim")
