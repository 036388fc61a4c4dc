"""The `cloister` command: finds the verb, and turns every refusal into one line and exit code 2.

Verbs are imported when they are called, so that `cloister --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from cloister.protocol.errors import CloisterError

_PLAN_HELP = "the plan: a TOML file, or a shipped one: default, not-private, private-sites (default: default)"
_SET_HELP = "override a field of the plan, such as local.steps=50 (repeatable)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 2 refused, 3 an audit's alarm, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")  # a mark for what the terminal cannot show ends no run
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = int(importlib.import_module(f"cloister.cli.{arguments.verb}").run(arguments))
        sys.stdout.flush()  # so that it fails here or not at all
        return code
    except CloisterError as error:
        if arguments.traceback:
            raise
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("cloister: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output is gone, such as `head`; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if arguments.traceback:
            raise
        if error.errno == errno.ENOSPC:
            return _refuse(
                f"disk is full ({error.filename or 'unknown file'}): expected room to write; free space"
            )
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error) or type(error).__name__
        return _refuse(f"{what}; --traceback shows what was being done")


def _refuse(line: str) -> int:
    print(f"cloister: {' '.join(line.split())}", file=sys.stderr)
    return 2


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cloister", description="Train language models across sites that may not share their data."
    )
    parser.add_argument("--traceback", action="store_true", help="on an error, show the Python traceback too")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    simulate = verbs.add_parser(
        "simulate",
        help="run a whole federation on this machine",
        description="Run a whole federation on this machine: every site with records of its own, the coordinator, "
        "and between them the same messages as between machines. What comes of it is kept in the run folder.",
    )
    simulate.set_defaults(verb="simulate")
    simulate.add_argument("plan", nargs="?", metavar="PLAN", help=_PLAN_HELP)
    simulate.add_argument("--out", metavar="DIR", help="run folder, new or empty (default: runs/NAME)")
    simulate.add_argument("--rounds", type=int, metavar="N", help="number of rounds (run.rounds)")
    simulate.add_argument("--sites", type=int, metavar="N", help="sites in the federation (cohort.sites)")
    simulate.add_argument("--seed", type=int, metavar="N", help="public seed (run.seed)")
    simulate.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP)
    _add_engine(simulate)

    resume = verbs.add_parser(
        "resume",
        help="go on with a run that was stopped",
        description="Go on with a run that was stopped, killed or interrupted, from the last round that was done.",
    )
    resume.set_defaults(verb="resume")
    resume.add_argument("run", metavar="RUN", help="the run's folder")
    _add_engine(resume)

    report = verbs.add_parser(
        "report",
        help="what a run may claim about privacy, as a page to read and sign",
        description="Write report.html and report.json: the guarantee of a run in one sentence, or that there is "
        "none, with its assumptions, its charges and what it does not cover. A run that is not finished is reported as "
        "far as it has come.",
    )
    report.set_defaults(verb="report")
    report.add_argument("run", metavar="RUN", help="the run's folder")
    report.add_argument("--output", metavar="DIR", help="where to write (default: the run's folder)")
    report.add_argument("--json", action="store_true", help="print one line of JSON")

    generate = verbs.add_parser(
        "generate",
        help="let the final model of a run write",
        description="Print the prompt and what the final model of a finished run makes of it.",
    )
    generate.set_defaults(verb="generate")
    generate.add_argument("run", metavar="RUN", help="the run's folder")
    generate.add_argument("--prompt", required=True, help="text to go on from")
    generate.add_argument(
        "--tokens", type=int, default=200, metavar="N", help="tokens to write (default: 200)"
    )
    generate.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    generate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)"
    )

    plan = verbs.add_parser(
        "plan",
        help="work with plans",
        description="Work with plans: what the parties agree on before a run.",
    ).add_subparsers(metavar="ACTION", required=True)
    check = plan.add_parser(
        "check",
        help="print a plan as it will run, and what it will cost; refuse it if unsound",
        description="Print a plan as it will run, with every default, its digest, and what it will cost each side. "
        "A plan that is not sound is refused with the field that is wrong.",
    )
    check.set_defaults(verb="plan")
    check.add_argument("plan", nargs="?", metavar="PLAN", help=_PLAN_HELP)
    check.add_argument("--sites", type=int, metavar="N", help="sites in the federation (cohort.sites)")
    check.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP)
    check.add_argument("--json", action="store_true", help="print one line of JSON")

    _add_budget(verbs)
    _add_site(
        verbs.add_parser(
            "site",
            help="set up a site",
            description="Set up a site: its identity, its settings, and the card that it shows to the others.",
        )
    )
    _add_roster(
        verbs.add_parser(
            "roster",
            help="work with rosters: who the sites are",
            description="Work with rosters: the cards of all sites in one file, whose hash every site pins.",
        )
    )
    _add_ledger(
        verbs.add_parser(
            "ledger",
            help="check a ledger, and show what was spent",
            description="Work with ledgers: the durable lists of every release that was paid for.",
        )
    )
    _add_audit(
        verbs.add_parser(
            "audit",
            help="attack a run's mechanism with canaries, and compare with what it claims",
            description="Attack the mechanism of a simulated run with canaries, and hold the lower bound on epsilon "
            "that this proves against the claim. What is found is kept in audit.json. Exit code 3 where the claim is "
            "refuted.",
        )
    )
    return parser


def _add_audit(audit: argparse.ArgumentParser) -> None:
    audit.set_defaults(verb="audit")
    audit.add_argument("run", metavar="RUN", help="the run's folder")
    audit.add_argument(
        "--canaries",
        type=int,
        metavar="M",
        help="canaries among the records, or times that a round's sum is taken (default: what tells most)",
    )
    audit.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="of the bound (default: 0.95)"
    )
    audit.add_argument(
        "--steps", type=int, metavar="N", help="local steps to take, at most (default: all of the run's)"
    )
    audit.add_argument("--json", action="store_true", help="print one line of JSON")


def _add_budget(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    budget = verbs.add_parser(
        "budget",
        help="what privacy will cost, or the noise that a budget needs",
        description="Print the epsilon of a noise multiplier, the noise multiplier for an epsilon, or a table of both; "
        "nothing is trained. Unit record: DP-SGD on records drawn with --sampling-rate, or --batch-size of --examples, "
        "for --steps, or --rounds of --steps-per-round. Unit site: whole updates, each clipped, for --rounds.",
    )
    budget.set_defaults(verb="budget")
    budget.add_argument("--unit", choices=("record", "site"), required=True, help="what is protected")
    budget.add_argument(
        "--noise-multiplier", type=float, metavar="Z", help="noise in units of the clipping norm"
    )
    budget.add_argument(
        "--target-epsilon",
        type=float,
        metavar="E",
        help="epsilon of the whole run, for which to find the noise",
    )
    budget.add_argument("--delta", type=float, default=1e-5, metavar="D", help="(default: 1e-5)")
    budget.add_argument("--rounds", type=int, metavar="R", help="rounds")
    budget.add_argument("--accountant", choices=("pld", "rdp"), default="pld", help="(default: pld)")
    record = budget.add_argument_group("unit record")
    record.add_argument(
        "--sampling-rate", type=float, metavar="Q", help="probability of a record to be in a step"
    )
    record.add_argument(
        "--batch-size", type=int, metavar="B", help="expected records in a step; with --examples"
    )
    record.add_argument(
        "--examples", type=int, metavar="N", help="records of the smallest site; with --batch-size"
    )
    record.add_argument("--steps", type=int, metavar="S", help="steps of the whole run, instead of --rounds")
    record.add_argument("--steps-per-round", type=int, metavar="K", help="steps of a round (default: 1)")
    site = budget.add_argument_group("unit site")
    site.add_argument("--central", action="store_true", help="a trusted coordinator adds Gaussian noise")
    site.add_argument("--sites", type=int, metavar="N", help="sites in a round (default: 8)")
    site.add_argument(
        "--quorum", type=float, metavar="F", help="fraction of them in the smallest sum (default: 0.75)"
    )
    site.add_argument(
        "--colluders", type=float, metavar="F", help="fraction of them without noise (default: 0.1)"
    )
    site.add_argument("--clip", type=float, metavar="C", help="clipping norm of an update (default: 1)")
    site.add_argument("--dimension", type=int, metavar="P", help="parameters of an update (default: 1000000)")
    budget.add_argument("--json", action="store_true", help="print one line of JSON")


def _add_site(parser: argparse.ArgumentParser) -> None:
    init = parser.add_subparsers(metavar="ACTION", required=True).add_parser(
        "init",
        help="make a site's identity and settings, and print its card",
        description="Make a site's identity key and a site.toml to fill in, and print the card to send to the others. "
        "An identity that is there is never replaced.",
    )
    init.set_defaults(verb="site")
    init.add_argument(
        "--name", required=True, help="the site's name: letters, digits, dots, dashes, underscores"
    )
    init.add_argument(
        "--folder", default=".", metavar="DIR", help="the site's own folder (default: the current one)"
    )
    init.add_argument("--json", action="store_true", help="print one line of JSON")


def _add_roster(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    build = actions.add_parser(
        "build",
        help="make a roster of the cards of all sites",
        description="Make a roster of the cards of all sites, in whatever order they are given, and print its hash.",
    )
    build.add_argument("cards", nargs="*", metavar="CARD", help="a file with one site's card")
    build.add_argument("--out", default="roster.toml", metavar="FILE", help="(default: roster.toml)")
    show = actions.add_parser(
        "show",
        help="print names, keys and hash",
        description="Print the name and the public key of every site in a roster, and the roster's hash.",
    )
    hash_ = actions.add_parser(
        "hash",
        help="print the hash that every site pins",
        description="Print a roster's hash, which every site compares with the others and pins.",
    )
    verify = actions.add_parser(
        "verify",
        help="check that a roster is the one that was agreed",
        description="Check that a roster has the hash that was agreed; otherwise refuse it.",
    )
    verify.add_argument("--hash", required=True, metavar="HEX", help="the hash that was agreed")
    for name, action in {"build": build, "show": show, "hash": hash_, "verify": verify}.items():
        action.set_defaults(verb="roster", action=name)
        if action is not build:
            action.add_argument("roster", metavar="FILE", help="the roster")
        action.add_argument("--json", action="store_true", help="print one line of JSON")


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify",
        help="check that a ledger was not altered",
        description="Check the hash chain of a ledger, and print its entries and its head. Exit code 1 and the "
        "reason where it does not hold.",
    )
    verify.add_argument("--head", metavar="HEX", help="a head noted earlier, such as a report's")
    show = actions.add_parser(
        "show",
        help="print what was spent, by dataset and run",
        description="Print what a ledger holds: the epsilon of each run, and of all runs together, by dataset.",
    )
    for name, action in {"verify": verify, "show": show}.items():
        action.set_defaults(verb="ledger", action=name)
        action.add_argument("ledger", metavar="PATH", help="a ledger, or a run folder")
        action.add_argument("--json", action="store_true", help="print one line of JSON")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, metavar="N", help="worker processes (default: what the machine has)"
    )
    parser.add_argument(
        "--engine",
        choices=("local", "flower"),
        default="local",
        help="what carries the messages (default: local)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one last line of JSON")


if __name__ == "__main__":
    sys.exit(main())
