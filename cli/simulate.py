"""`cloister simulate`: a whole federation on this machine."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from cloister.cli.display import show_run
from cloister.protocol.plan import Plan
from cloister.protocol.soundness import load, parse
from cloister.server.folder import RunFolder


def run(arguments: argparse.Namespace) -> int:
    """Run the plan in a new folder."""
    options = {"run.rounds": arguments.rounds, "run.seed": arguments.seed, "cohort.sites": arguments.sites}
    overrides = [f"{field}={value}" for field, value in options.items() if value is not None]
    plan = find_plan(arguments.plan, [*arguments.set, *overrides])
    out = Path(arguments.out) if arguments.out else next(path for path in _names(plan) if not path.exists())
    with RunFolder.create(out, plan) as folder:
        return show_run(folder, arguments, new=True)


def find_plan(path: str | None, overrides: list[str]) -> Plan:
    """The plan in a file, a shipped plan by its name, or the shipped default, with overrides on top.

    Raises:
        PlanError: it is missing or unsound.
    """
    shipped = shipped_plans()
    name = path or "default"
    if path is not None and (Path(path).exists() or path not in shipped):
        return load(Path(path), overrides)
    return parse(shipped[name], overrides, origin=f"the shipped plan {name}")


def shipped_plans() -> dict[str, str]:
    """The plans that come with the program, by name."""
    folder = files("cloister.simulations.plans")
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def _names(plan: Plan) -> Iterator[Path]:
    yield Path("runs") / plan.run.name
    for number in itertools.count(2):
        yield Path("runs") / f"{plan.run.name}-{number}"
