"""`cloister track`: send a run's metrics to Weights & Biases or MLflow.

Send the figures of a run's rounds, the epsilon spent among them, and the fields of its plan to an experiment tracker.
A run that goes on is sent to its newest round but one; the command continues where it ended before. TensorBoard needs
no command: tensorboard --logdir RUN/tensorboard.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path

from cloister.cli.options.shared_options import Parser
from cloister.protocol.errors import EngineError
from cloister.server.record.folder import RunFiles
from cloister.server.record.tracking import Mlflow, Wandb, send

_LOOK_S = 1.0
"""Seconds between two looks at a run that goes on."""


def options(parser: Parser) -> None:
    """RUN, --to, --project, --uri, --offline, --follow, --json."""
    parser.add_run()
    parser.value("--to", "the tracker", required=True, choices=("wandb", "mlflow"))
    parser.value("--project NAME", "project or experiment there", "cloister")
    parser.value("--uri URI", "address of the MLflow server (default: MLFLOW_TRACKING_URI)", "")
    parser.flag(
        "--offline",
        "write Weights & Biases' own files into the run folder, to be sent later with `wandb sync`",
    )
    parser.flag("-f --follow", "go on until the run is finished, or Ctrl-C")
    parser.add_json()


def run(arguments: argparse.Namespace) -> int:
    """Send it."""

    if arguments.uri and arguments.to != "mlflow":
        raise EngineError("--uri", expected="no address; it is only valid with --to mlflow")
    if arguments.offline and arguments.to != "wandb":
        raise EngineError("--offline", expected="only with --to wandb")
    files = RunFiles(Path(arguments.run))

    def ended() -> bool:
        if arguments.follow:
            time.sleep(_LOOK_S)  # not an event: the run's files do not tell that they have changed
        return not arguments.follow

    place = " ".join((arguments.to, arguments.project, *(["offline"] if arguments.offline else [])))
    if arguments.to == "mlflow":  # a hash, because an address may have a password
        uri = arguments.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        place += f" {hashlib.sha256(uri.encode()).hexdigest()[:16]}"
    wandb = partial(Wandb, arguments.project, files.path, arguments.offline)
    opener = wandb if arguments.to == "wandb" else partial(Mlflow, arguments.project, arguments.uri)
    sent = []
    for number in send(files, place, opener, ended=ended):
        sent.append(number)
        if not arguments.json:
            print(f"sent the {'initial model' if number == 0 else f'round {number}'}", flush=True)
    if arguments.json:
        print(json.dumps({"to": arguments.to, "sent": sent}))
    elif not sent:
        print("all rounds were sent before")
    return 0
