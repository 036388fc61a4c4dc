"""`cloister site`: set a site up (`init`: identity, card, `site.toml`, `policy.toml`), and check its data and devices
(`check`)."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.cli.shared_options import add_json, add_plan, chosen_plan
from cloister.protocol.errors import CloisterError, DataError, RosterError, StorageError

if TYPE_CHECKING:
    from cloister.cli.devices import Devices
    from cloister.clients.config import SiteConfig
    from cloister.lm.data import Prepared
    from cloister.protocol.plan import Plan

HELP = "set up a site, and check its data and devices"

_SETTINGS = """\
# The settings of this site alone; none of them but "speed" is sent. Relative paths start at this file's folder.

# The site's name, as on its card.
name = {name}

# Its records: a file, a folder of files, or the name of a dataset on the hub.
data = "data.jsonl"

# Folder for what the site keeps between messages, such as the secrets of the current attempt.
state = "state"

# Its identity key. Anyone who has it can impersonate this site.
identity = "identity.pem"

# The roster on which the sites agreed, and its hash: "cloister roster hash roster.toml" prints it. Before you write the
# hash here, compare it with the other sites over another channel, such as the telephone. The site refuses any other
# roster.
roster = "roster.toml"
roster_hash = ""

# The digest of the one plan in which this site takes part; "cloister plan check PLAN.toml" prints it. Read the plan
# first, then set its digest. If this is empty, the site accepts the first plan that it is asked to join, and no other.
plan = ""

# Accept only plans with a secure sum. With false, the coordinator may see every update of this site.
secure = true

# Smallest number of sites in a sum in which this site takes part.
minimum_cohort = 3

# What this site demands of a plan's privacy, and the most that may be spent on its data over all runs.
policy = "policy.toml"

# The name under which the ledger records what was spent on this data. Keep it when the data is moved or grows.
dataset = {name}

# The ledger. It must outlive runs and state folders: keep it where it is backed up. A lost ledger loses what was spent.
ledger = "ledger.sqlite"

# What it trains on: "auto" (the GPUs that it sees, else the CPU), or one device such as "cuda:1".
device = "auto"

# How fast it trains relative to the other sites, such as 0.5 or 2. A coordinator is told if its plan has
# local.balance = "weighted": sites take local steps by speed.
speed = 1.0

# How several devices divide a model. Without a degree, a site uses all of its GPUs where the plan allows it.
[mesh]
# replicate = 1
# shard = 1
# tensor = 1
# pipeline = 1
"""

_POLICY = """\
# What this site demands before it takes part. The site itself checks it, and sends a signed refusal to any plan that
# asks for more.

# Accepted units of privacy: "record" (a whole record of this site), "window" (a piece of a text: a text of twenty
# pieces is twenty units, and is not protected as a whole), "owner" (all records of one person, whom a field of the
# records names), "site" (everything that the site holds).
units = ["record", "owner", "site"]

# Where windows are accepted, the smallest length of one in tokens.
least_window = 1

# Fields that may say who a record belongs to, such as "patient_id", where the unit is an owner. Empty: any.
owner_fields = []

# Largest epsilon of this site's data over all runs in its ledger, and largest delta. The site takes part in no round
# that would exceed them.
greatest_epsilon = 4.0
greatest_delta = 1e-5

# true accepts plans in which the coordinator adds the noise: it sees the sum without noise, and no site can check that
# it adds any.
trusted_coordinator = false

# Smallest noise multiplier, smallest number of sites in a sum that is opened (the quorum of a cohort), most rounds.
least_noise = 0.0
least_cohort = 3
most_rounds = 1000

# Accept only plans with a secure sum.
secure_required = true

# Accepted models and adapters, by name or by a pattern such as "meta-llama/*". Empty: any.
models = []
adapters = []

# Accepted tokenizers, in the same way; "bytes" is the built-in one, and a model's own has the model's name. A tokenizer
# brings the chat template, a program that sees every record. Empty: any.
tokenizers = []
"""


def options(parser: argparse.ArgumentParser) -> None:
    """The actions `init` and `check`."""
    parser.description = (
        "Set up a site: its identity, its settings and its card for the other sites; and check its data and "
        "its devices."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    init = actions.add_parser(
        "init",
        help="make a site's identity and settings, and print its card",
        description="Make a site's identity key, and a site.toml and a policy.toml to fill in, and print the card to "
        "send to the other sites. An existing identity is never replaced.",
    )
    init.add_argument(
        "--name", required=True, help="the site's name: letters, digits, dots, dashes, underscores"
    )
    init.add_argument(
        "--folder", default=".", metavar="DIR", help="the site's own folder (default: the current one)"
    )
    init.set_defaults(act=_init)
    add_json(init)
    check = actions.add_parser(
        "check",
        help="check a site's data and devices for a plan",
        description="Check a site for a plan before the run; nothing is sent and nothing is charged. First its data: "
        "it is prepared, as the first training would do it, and the number of records that are used and that are not "
        "is printed, with the reasons. Under a privacy unit a record that cannot be used is left out without an "
        "error. What is prepared is kept in the site's state folder, and the run does not prepare it again. Then its "
        "devices: what each rank of the site's mesh will hold, and, where the devices are here, the time and memory "
        "of a step that the ranks take on random tokens. Exit code 4: the mesh suits the plan, but its devices are "
        "absent here, so that no step was taken.",
    )
    check.add_argument("site", metavar="SITE", help="the site's TOML file")
    add_plan(check)
    check.add_argument(
        "--only", choices=("data", "devices"), help="check only the data, or only the devices (default: both)"
    )
    check.add_argument(
        "--device",
        metavar="NAME",
        help="check for this device instead of the site's own, such as cuda for the GPUs of another machine",
    )
    check.set_defaults(act=_check)
    add_json(check)


def run(arguments: argparse.Namespace) -> int:
    """Do what the action says."""
    return int(arguments.act(arguments))


def _check(arguments: argparse.Namespace) -> int:
    """Check the data, the devices, or both; a mesh that does not fit the plan is refused before data is prepared."""
    plan = chosen_plan(arguments)
    from cloister.clients.config import read_config

    config = read_config(Path(arguments.site))
    devices = None
    if arguments.only != "data":
        from cloister.cli.devices import Devices

        devices = Devices.of(plan, config.mesh, arguments.device or config.device)
    found: dict[str, object] = {}
    if arguments.only != "devices":
        made = _prepared(config, plan)
        found |= {"records": made.records, "left_out": made.left_out, "sequences": len(made.train)}
        found |= {"summary": made.summary()}
        if not arguments.json:
            print(made.summary(), flush=True)
    return _finish(arguments, found, devices)


def _prepared(config: SiteConfig, plan: Plan) -> Prepared:
    """Prepare the site's data; refuse data of which nothing is trained on."""
    from cloister.clients.site import preparation_of
    from cloister.lm.data import cached
    from cloister.lm.tokenizer import load_tokenizer

    preparation = preparation_of(config, plan, load_tokenizer(plan.model))
    made = cached(preparation.folder, preparation.key(), preparation.make)
    if not len(made.train):
        raise DataError(
            "data",
            config.data,
            expected=f"records to train on ({made.summary()})",
            fix="compare the records with [data] of the plan",
        )
    return made


def _finish(arguments: argparse.Namespace, found: dict[str, object], devices: Devices | None) -> int:
    """Say what the devices will hold, run a step on them if they are here, and print what was found."""
    from cloister.cli.console import PipedConsole

    if devices is None:
        if arguments.json:
            print(json.dumps(found))
        return 0
    from cloister.cli.devices import ABSENT

    console, absent = PipedConsole(), devices.absent
    if not arguments.json:
        devices.show(console)
    devices.check_memory()
    measured = [] if absent else devices.run()
    if arguments.json:
        print(json.dumps(found | devices.as_json(measured)))
    elif absent:
        console.print(
            f"[bold yellow]devices absent: not run here[/]: this machine lacks {len(absent)} of the "
            f"{len(devices.names)} devices. The mesh suits the plan; compare what is needed with their memory.",
            soft_wrap=True,
        )
    else:
        devices.show_run(console, measured)
        console.print("[bold green]the devices train the plan[/]")
    return ABSENT if absent else 0


def _init(arguments: argparse.Namespace) -> int:
    """Make the identity, the settings and the card, and print the card; refuse to replace an identity."""
    from cloister.protocol.roster import Card, new_identity, save_identity

    folder = Path(arguments.folder)
    identity = new_identity()
    card = Card.of(arguments.name, identity)
    pem, site, shown = folder / "identity.pem", folder / "site.toml", folder / f"{arguments.name}.card"
    if os.path.lexists(pem):
        raise RosterError(
            "identity",
            str(pem),
            expected="no identity in this folder yet",
            fix="keep this one, or choose another folder with --folder",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            "--folder", str(folder), expected=f"a folder that can be made ({error.strerror})"
        ) from error
    save_identity(identity, pem)
    kept = os.path.lexists(site)
    policy = folder / "policy.toml"
    demands_kept = os.path.lexists(policy)
    try:
        if not kept:
            _write(site, _SETTINGS.format(name=json.dumps(arguments.name)))
        if not demands_kept:
            _write(policy, _POLICY)
        _write(shown, card.text() + "\n")
    except CloisterError:
        pem.unlink(missing_ok=True)  # no card of it was printed or sent
        for path, was_there in ((site, kept), (policy, demands_kept)):
            if not was_there:
                path.unlink(missing_ok=True)
        raise
    if arguments.json:
        found = {
            "name": card.name,
            "card": card.text(),
            "card_file": str(shown),
            "site_made": not kept,
            "policy": str(policy),
        }
        print(json.dumps({**found, "identity": str(pem), "site": str(site)}))
        return 0
    print(f"identity  {pem}: keep it secret, and keep a backup: it cannot be made again")
    print(f"settings  {site}: {'kept as it was' if kept else 'new; fill it in'}")
    print(
        f"policy    {policy}: {'kept as it was' if demands_kept else 'new; the demands on a plan, to be edited'}"
    )
    print(f"card      {shown}: public; send it to the other sites\n\n{card.text()}\n")
    print("next:")
    print("  1. Send the card to the other sites.")
    print("  2. With the cards of all sites: cloister roster build *.card --out roster.toml")
    print("  3. Compare the roster's hash with the other sites over another channel, such as the telephone.")
    print(f"  4. Put roster.toml into {folder}; set roster_hash and data in {site.name}.")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            path.name, str(path), expected=f"a file that can be written ({error.strerror})"
        ) from error
