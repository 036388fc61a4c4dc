"""The options that several verbs share, what they say of themselves, and the plan that the plan options choose.

Imported for `cloister --help`: nothing heavy at the top.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from cloister.protocol.errors import CloisterError

if TYPE_CHECKING:
    from cloister.protocol.plan.soundness import Plan

Actions: TypeAlias = "argparse._SubParsersAction[Parser]"

_DEFAULT = "private-code"
"""The shipped plan of a command without one."""


class Parser(argparse.ArgumentParser):
    """Reports wrong usage as one line, and names itself in the arguments: the parser of the innermost action wins."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(2, f"cloister: {' '.join(message.split())}; see {self.prog} --help\n")

    def value(
        self, name: str, told: str, default: object = None, *, several: bool = False, **more: Any
    ) -> None:
        """Add an argument with a value.

        Args:
            name: Its names and what stands for its value in `--help`, such as `-n --lines N` or `plan PLAN`.
            told: The help, which gets the default where it does not say it.
            default: The default; the value is of its class.
            several: Whether it may be given several times.
            more: More of what argparse takes; `to`, the group of options that has it.
        """
        *names, metavar = name.split() if " " in name else (name, None)
        if several:
            more |= {"action": "append", "default": []}
        elif default is not None:
            shown = f"{default:g}" if isinstance(default, float) else default
            told = told if default == "" or "(default: " in told else f"{told} (default: {shown})"
            more |= {"default": default, "type": type(default)}
        more.pop("to", self).add_argument(*names, metavar=metavar, help=told, **more)

    def flag(self, name: str, told: str, to: argparse._ActionsContainer | None = None) -> None:
        """Add an option without a value; as `value`."""
        (to or self).add_argument(*name.split(), action="store_true", help=told)

    def add_federation(self, told: str = "the folder of the federation") -> None:
        """FEDERATION: the coordinator's folder of a federation."""
        self.value("federation FEDERATION", told)

    def add_run(self) -> None:
        """RUN: the folder of a run."""
        self.value("run RUN", "the run folder")

    def add_json(self) -> None:
        """--json: output for programs."""
        self.flag("--json", "print one line of JSON")

    def add_log_format(self) -> None:
        """--log-format: how a process that stays logs."""
        self.value(
            "--log-format",
            "log lines of text, or one JSON object a line, with run, round, attempt and site where they are known",
            "text",
            choices=("text", "json"),
        )

    def add_metrics(self) -> None:
        """--metrics and --metrics-on-network: where a coordinator serves metrics."""
        self.value(
            "--metrics HOST:PORT",
            "serve metrics for Prometheus on this address of loopback; port 0: one that is free (default: not)",
            "",
        )
        self.flag(
            "--metrics-on-network",
            "accept another address than one of loopback; metrics are not encrypted, and name the sites",
        )

    def add_plan(self, default: str = _DEFAULT) -> None:
        """PLAN, --sites and --set: a plan, and values that replace its own; `default` is what is taken without PLAN."""
        self.value(
            "plan PLAN",
            "a TOML file, or the name of a shipped plan: private-code, not-private, private-sites, correlated-sites, "
            "classify, clinical-notes, masked, summarize, prefer, "
            f"chinese, flowertune-general, -finance, -medical, -code (default: {default})",
            nargs="?",
        )
        self.value("--sites N", "sites in the federation (cohort.sites)", type=int)
        self.value(
            "--set SECTION.KEY=VALUE",
            "override a field of the plan, such as local.steps=50; repeatable",
            several=True,
        )

    def add_deployed(self, runs: str) -> None:
        """PLAN and the options of a deployed run, or --again alone.

        Args:
            runs: Where run folders are made, for the help text.
        """
        self.add_plan()
        self.value("--rounds N", "number of rounds (run.rounds)", type=int)
        self.value("--out DIR", f"run folder, new or empty (default: {runs}/NAME)")
        self.value(
            "--again RUN",
            "instead of a new run: continue this one, which has failed or was stopped, as it began",
        )

    def add_engine(self) -> None:
        """--workers and --ray-address: what runs the sites and carries the messages."""
        self.value("--workers N", "worker processes (default: what the machine or cluster has)", type=int)
        self.value(
            "--ray-address HOST:PORT",
            "a running Ray cluster, whose nodes share the run folder, for Flower's simulation runtime "
            "(default: worker processes of this machine)",
        )


def said(docstring: str | None) -> dict[str, Any]:
    """The help and the description of a verb or an action, from the docstring of its module or function: the first
    line, and what follows it up to a section such as `Raises:`."""
    first, *rest = re.split(r"\n\s*\n", (docstring or "").strip(), maxsplit=1)
    line = first.rpartition("`: ")[2].rstrip(".")
    described = re.split(r"^\s*(?:Args|Returns|Raises):", "".join(rest), flags=re.MULTILINE)[0]
    return {"help": line[:1].lower() + line[1:], "description": " ".join(described.split())}


def add_action(actions: Actions, act: Callable[[argparse.Namespace], int]) -> Parser:
    """The parser of an action, which has the name of its function."""
    parser: Parser = actions.add_parser(act.__name__.removeprefix("_"), **said(act.__doc__))
    parser.set_defaults(act=act)
    return parser


def tell(arguments: argparse.Namespace, facts: Mapping[str, object], *lines: str) -> int:
    """Print what a verb has done: facts as one line of JSON with `--json`, else lines. Returns 0, the exit code."""
    print(json.dumps(dict(facts)) if arguments.json else "\n".join(lines))
    return 0


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
    from cloister.server.record.folder import RunFiles, free_path

    first = folder / name
    path = Path(out) if out else free_path(folder, name)
    if out or path == first:
        return path
    goes_on = (
        f"cloister tune --again {shlex.quote(str(first))}"
        if (first / "search.json").exists()
        else RunFiles(first).resume_command()
    )
    earlier = f"the earlier one goes on with: {goes_on}"
    print(f"{first} exists, so this run goes to {path}; {earlier}", file=sys.stderr)
    return path


def chosen_plan(
    arguments: argparse.Namespace, fields: Mapping[str, object] | None = None, *, default: str = _DEFAULT
) -> Plan:
    """The plan that the options of `Parser.add_plan` choose: a file, a shipped plan, or the default.

    Args:
        arguments: The parsed options.
        fields: Further overrides by field, such as `run.rounds`; None leaves the field as it is.
        default: The shipped plan that is taken without PLAN; empty: the plan with the defaults of all fields.

    Raises:
        PlanError: the plan is missing or unsound.
    """
    from cloister.protocol.plan.soundness import Plan, shipped_plans

    options = {**(fields or {}), "cohort.sites": arguments.sites}
    given = [f"{field}={value}" for field, value in options.items() if value is not None]
    overrides = [*arguments.set, *given]
    if arguments.plan is not None:
        return Plan.load(arguments.plan, overrides)
    text = shipped_plans()[default] if default else ""
    return Plan.parse(text, overrides, origin=f"the shipped plan {default}")
