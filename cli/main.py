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

_SET_HELP = "override a field of the plan, such as local.steps=50 (repeatable)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 2 refused, 130 interrupted."""
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
    simulate.add_argument("plan", nargs="?", metavar="PLAN.toml", help="the plan (default: the shipped one)")
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
    check.add_argument("plan", nargs="?", metavar="PLAN.toml", help="the plan (default: the shipped one)")
    check.add_argument("--sites", type=int, metavar="N", help="sites in the federation (cohort.sites)")
    check.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP)
    check.add_argument("--json", action="store_true", help="print one line of JSON")

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
    return parser


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
