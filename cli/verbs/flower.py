"""`cloister flower`: run a plan in a Flower federation that is there already.

A bundle is Flower's app of one plan. It names the installed package and has no code of its own, so SuperLink and
SuperNodes need cloister installed. Other accounts of the SuperLink may run other apps there: see docs/deployment.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from cloister.cli.options.shared_options import Parser, add_action, chosen_plan, tell
from cloister.protocol.errors import EngineError
from cloister.protocol.machine.storage import check_empty, write_folder
from cloister.server.federation.deployment import check_deployable
from cloister.server.federation.registry import Registry

_BUNDLE = """\
[project]
name = "cloister-run"
version = "1.0.0"
description = "One run of a plan, by the installed package"
license = "Apache-2.0"
dependencies = ["flwr>=1.40,<2"]

[tool.flwr.app]
publisher = "cloister"

[tool.flwr.app.components]
serverapp = "cloister.server.federation.flower:app"
clientapp = "cloister.clients.flower:app"

[tool.flwr.app.config]
"""


def options(parser: Parser) -> None:
    """The action `bundle`."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    bundle = add_action(actions, _bundle)
    bundle.add_federation()
    bundle.add_plan()
    bundle.value("--out FOLDER", "the folder of the bundle, which is made", required=True)
    bundle.value(
        "--federation-path PATH",
        "where the folder of the federation is on the SuperLink's machine (default: where it is here)",
    )
    bundle.value(
        "--wait SECONDS",
        "how long to wait for all sites before the run begins with those that the plan needs",
        600.0,
    )
    bundle.add_json()


def _bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle of a plan, for `flwr run`.

    Write the app that runs a plan over the sites of a federation. `flwr run FOLDER` starts it on a SuperLink of Flower
    1.40 or later. Each site's SuperNode is started with the path of its site.toml.
    """
    from cloister.server.federation.flower import check_carried

    registry = Registry.open(Path(arguments.federation))
    if arguments.wait < 0:
        raise EngineError("--wait", arguments.wait, expected="0 or more seconds")
    plan = chosen_plan(arguments)
    check_deployable(plan, registry.federation)
    check_carried(plan)
    out = Path(arguments.out)
    check_empty(out, "--out", EngineError)
    there = arguments.federation_path or str(registry.path.absolute())
    values = {"federation": there, "plan": plan.to_json(), "run": "", "wait": arguments.wait}
    config = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    write_folder(out, lambda folder: (folder / "pyproject.toml").write_text(_BUNDLE + config, "utf-8"))
    return tell(
        arguments,
        {"bundle": str(out), "plan": plan.digest()},
        f"bundle      {out}",
        f"plan        {plan.digest()}",
        f"run it      flwr run {shlex.quote(str(out))} SUPERLINK --stream",
        "each site   flower-supernode --node-config 'site=\"/PATH/site.toml\"' ...",
    )
