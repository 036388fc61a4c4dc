"""`cloister up`: rehearse a deployment on this machine, with real processes.

Run a plan as a deployment does, on this machine: it provisions a federation, starts the coordinator and every site,
over TLS with the keys of each party, runs the plan, and ends all of it. The run folder is that of `cloister simulate`,
with the same final weights if no noise is drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cloister.cli.options.shared_options import Parser, check_again, chosen_plan, folder_for
from cloister.cli.show.console import PipedConsole
from cloister.cli.show.follow import follow
from cloister.protocol.errors import RunFolderError
from cloister.server.display import describe
from cloister.server.record.folder import RunFiles, RunFolder, read_plan
from cloister.server.record.progress import Event


def options(parser: Parser) -> None:
    """Plan, run folder, --again."""
    parser.add_deployed("runs")
    parser.add_log_format()
    parser.add_metrics()
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Prepare, run and show it."""
    from cloister.simulations.rehearsal.rehearsal import prepare, running

    check_again(arguments, RunFolderError)
    console = PipedConsole(stderr=arguments.json)

    def told(line: str) -> None:
        console.say(line, "yellow")

    def observe(event: Event) -> None:
        console.say(describe(event))

    if arguments.again:
        files = RunFiles(Path(arguments.again))
        read_plan(files.path)  # refuses a folder that holds no run
        if not files.federation.exists():
            raise RunFolderError(
                str(files.path),
                expected="a rehearsal, and this run is not one",
                fix=f"continue it with: {files.resume_command()}",
            )
    else:
        chosen = chosen_plan(arguments, {"run.rounds": arguments.rounds})
        out = folder_for(arguments.out, Path("runs"), chosen.run.name)
        with RunFolder.create(out, chosen) as folder:
            try:
                prepare(folder, observe)
            except BaseException:
                folder.discard()
                raise
        files = RunFiles(out)
    plan = read_plan(files.path)
    console.say(f"starting the coordinator and {plan.cohort.sites} sites; their logs are in {files.path}")
    try:
        metrics = ["--metrics", arguments.metrics] if arguments.metrics else []
        metrics += ["--metrics-on-network"] if arguments.metrics_on_network else []
        with running(files, plan, told, log_format=arguments.log_format, metrics=metrics):
            return follow(files.federation, files.path.absolute(), json_=arguments.json)
    except KeyboardInterrupt:
        told(f"stopped; continue with: {files.resume_command()}")
        raise
