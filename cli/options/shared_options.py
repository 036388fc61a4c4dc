"""The options that several verbs share, what they say of themselves, and the plan that the plan options choose.

Imported for `--help`: nothing heavy at the top.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from cloister.protocol.errors import CloisterError
    from cloister.protocol.plan.plan import Plan

    Actions: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

_DEFAULT = "private-code"
"""The shipped plan of a command without one."""


def said(subject: object) -> dict[str, Any]:
    """The help and the description of a verb (its module) or an action (its function): the docstring's first line, and
    what follows it up to a section such as `Raises:`."""
    first, _, rest = (inspect.getdoc(subject) or "").partition("\n\n")
    line = first.rpartition("`: ")[2].rstrip(".")
    described = re.split(r"^(?:Args|Returns|Raises):", rest, flags=re.MULTILINE)[0]
    return {"help": line[:1].lower() + line[1:], "description": " ".join(described.split())}


def add_action(actions: Actions, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """The parser of an action, which has the name of its function."""
    parser: argparse.ArgumentParser = actions.add_parser(act.__name__.removeprefix("_"), **said(act))
    parser.set_defaults(act=act)
    return parser


def tell(arguments: argparse.Namespace, facts: Mapping[str, object], *lines: str) -> int:
    """Print what a verb has done: facts as one line of JSON with `--json`, else lines. Returns 0, the exit code."""
    print(json.dumps(dict(facts)) if arguments.json else "\n".join(lines))
    return 0


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN: the folder of a run."""
    parser.add_argument("run", metavar="RUN", help="the run folder")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json: output for programs."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def add_log_format(parser: argparse.ArgumentParser) -> None:
    """--log-format: how a process that stays logs."""
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="log lines of text, or one JSON object a line, with run, round, attempt and site where they are known "
        "(default: text)",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """--metrics and --metrics-on-network: where a coordinator serves metrics."""
    parser.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="serve metrics for Prometheus on this address of loopback; port 0: one that is free (default: not)",
    )
    parser.add_argument(
        "--metrics-on-network",
        action="store_true",
        help="accept another address than one of loopback; metrics are not encrypted, and name the sites",
    )


def add_per_site(parser: argparse.ArgumentParser) -> None:
    """--per-site: what the sites' own records say of the run."""
    parser.add_argument(
        "--per-site",
        action="store_true",
        help="when the run is finished, evaluate the initial and the final model on each site's own held-out records "
        "(simulation.per_site); not under a privacy unit",
    )


def add_plan(parser: argparse.ArgumentParser, default: str = _DEFAULT) -> None:
    """PLAN, --sites and --set: a plan, and values that replace its own; `default` is what is taken without PLAN."""
    parser.add_argument(
        "plan",
        nargs="?",
        metavar="PLAN",
        help="a TOML file, or the name of a shipped plan: private-code, not-private, private-sites, correlated-sites, "
        f"classify, chinese, flowertune-general, -finance, -medical, -code (default: {default})",
    )
    parser.add_argument("--sites", type=int, metavar="N", help="sites in the federation (cohort.sites)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override a field of the plan, such as local.steps=50; repeatable",
    )


def add_deployed(parser: argparse.ArgumentParser, runs: str) -> None:
    """PLAN and the options of a deployed run, or --again alone.

    Args:
        parser: The parser.
        runs: Where run folders are made, for the help text.
    """
    add_plan(parser)
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds (run.rounds)")
    parser.add_argument("--out", metavar="DIR", help=f"run folder, new or empty (default: {runs}/NAME)")
    parser.add_argument(
        "--again",
        metavar="RUN",
        help="instead of a new run: continue this one, which has failed or was stopped, as it began",
    )


def check_again(arguments: argparse.Namespace, error: type[CloisterError]) -> None:
    """Check that `--again` comes without what a run or a search keeps from its beginning.

    Raises:
        CloisterError: of class `error`: it does not.
    """
    given = []
    for name in ("plan", "search", "set", "sites", "rounds", "out", "wait", "dry_run"):
        value = getattr(arguments, name, None)
        if value is not None and value is not False and value != []:
            given.append(name.upper() if name in ("plan", "search") else f"--{name.replace('_', '-')}")
    if arguments.again and given:
        raise error(
            "--again", arguments.again, expected=f"it without {', '.join(given)}: they stay as they began"
        )


def folder_for(out: str | None, folder: Path, name: str) -> Path:
    """The folder that `--out` names, or a path in `folder` that nothing has: `name`, or `name-2` and so on, and then a
    line tells why."""
    first = Path(out) if out else folder / name
    if out or not first.exists():
        return first
    paths = (folder / f"{name}-{number}" for number in itertools.count(2))
    path = next(path for path in paths if not path.exists())
    from cloister.server.record.folder import RunFiles

    earlier = f"the earlier one goes on with: {RunFiles(first).resume_command()}"
    print(f"{first} exists, so this run goes to {path}; {earlier}", file=sys.stderr)
    return path


def chosen_plan(
    arguments: argparse.Namespace, fields: Mapping[str, object] | None = None, *, default: str = _DEFAULT
) -> Plan:
    """The plan that the options of `add_plan` choose: a file, a shipped plan, or the default.

    Args:
        arguments: The parsed options.
        fields: Further overrides by field, such as `run.rounds`; None leaves the field as it is.
        default: The shipped plan that is taken without PLAN; empty: the plan with the defaults of all fields.

    Raises:
        PlanError: the plan is missing or unsound.
    """
    from cloister.protocol.errors import PlanError
    from cloister.protocol.plan.soundness import load, parse

    options = {**(fields or {}), "cohort.sites": arguments.sites}
    given = [f"{field}={value}" for field, value in options.items() if value is not None]
    overrides = [*arguments.set, *given]
    shipped = shipped_plans()
    name = arguments.plan or default
    if not name:
        return parse("", overrides)
    if arguments.plan is not None and (
        Path(name).is_file() or Path(name).suffix or len(Path(name).parts) > 1
    ):
        return load(Path(name), overrides)
    if name not in shipped:
        known = ", ".join(sorted(shipped))
        raise PlanError("plan", name, expected=f"an existing TOML file, or a shipped plan: {known}")
    return parse(shipped[name], overrides, origin=f"the shipped plan {name}")


def shipped_plans() -> dict[str, str]:
    """The text of each plan that comes with the program, by name."""

    folder = files("cloister.simulations.plans")
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--workers and --ray-address: what runs the sites and carries the messages."""
    parser.add_argument(
        "--workers", type=int, metavar="N", help="worker processes (default: what the machine or cluster has)"
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="a running Ray cluster, whose nodes share the run folder, for Flower's simulation runtime "
        "(default: worker processes of this machine)",
    )
