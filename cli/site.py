"""`cloister site init`: a site's identity, its card, and a `site.toml` and `policy.toml` to fill in."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from cloister.protocol.errors import CloisterError, RosterError, StorageError
from cloister.protocol.roster import Card, new_identity, save_identity

_SKELETON = """\
# What belongs to this site alone; nothing of it travels. Relative paths start at this file's folder.

# The site's name, as it is on its card.
name = {name}

# Its records: a file, a folder of files, or a hub name.
data = "data.jsonl"

# Folder for what the site keeps between messages, secrets of the attempt at hand among them.
state = "state"

# Its identity key. Who has it can speak for this site.
identity = "identity.pem"

# The roster that the sites agreed on, and its hash: "cloister roster hash roster.toml" prints it.
# Compare the hash with the other sites, by telephone say, before you write it here. The site refuses any other roster.
roster = "roster.toml"
roster_hash = ""

# The one plan that this site takes part in, by its digest (cloister plan check PLAN.toml prints it). Read the plan
# first, then pin it. Left empty, the site takes part in the first plan that it is asked to join, and in no other.
plan = ""

# Take part only in plans that sum under masks. false lets whoever runs the coordinator see every update of this site.
secure = true

# Fewest sites whose sum this site takes part in.
minimum_cohort = 3

# What this site demands of a plan's privacy, and the most that may be spent on its data over all runs.
policy = "policy.toml"

# The name under which the ledger keeps what this data has spent. Data that is moved, or grows, keeps its name.
dataset = {name}

# The ledger. It must outlive runs and state folders: keep it where it is backed up. One that is lost has forgotten.
ledger = "ledger.sqlite"
"""

_POLICY = """\
# What this site demands before it takes part. The site itself checks it, and refuses, signed, what asks for more.

# Units of privacy that are accepted: "record" (a whole record of this site), "window" (a piece of a text: a text of
# twenty pieces is twenty units, and is not protected as a whole), "site" (all that it holds).
units = ["record", "site"]

# Where windows are accepted, the fewest tokens of one.
least_window = 1

# Largest epsilon of this site's data over all runs in its ledger, and largest delta. When the next round would exceed
# it, the site takes no further part.
greatest_epsilon = 4.0
greatest_delta = 1e-5

# true accepts plans in which the coordinator adds the noise: it sees the sum without noise, and no site can check that
# it adds any.
trusted_coordinator = false

# Smallest noise multiplier, fewest sites in a sum that is opened (the quorum of a cohort), most rounds.
least_noise = 0.0
least_cohort = 3
most_rounds = 1000

# Only sums under masks.
secure_required = true

# Models and adapters that are accepted, by name; a pattern such as "meta-llama/*" too. Empty: any.
models = []
adapters = []
"""


def run(arguments: argparse.Namespace) -> int:
    """Make the identity, the card and the skeleton, and print the card; never over another identity."""
    folder = Path(arguments.folder)
    identity = new_identity()
    card = Card.of(arguments.name, identity)
    pem, site, shown = folder / "identity.pem", folder / "site.toml", folder / f"{arguments.name}.card"
    if os.path.lexists(pem):
        raise RosterError(
            "identity",
            str(pem),
            expected="no file there yet",
            fix="keep it, or name another folder with --folder",
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
            _write(site, _SKELETON.format(name=json.dumps(arguments.name)))
        if not demands_kept:
            _write(policy, _POLICY)
        _write(shown, card.text() + "\n")
    except CloisterError:
        pem.unlink(missing_ok=True)  # nobody has seen it
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
    print(f"identity  {pem}: keep it secret, and keep a copy: it cannot be made twice")
    print(f"settings  {site}: {'was there and is as it was' if kept else 'new; fill it in'}")
    print(f"policy    {policy}: what the site demands of a plan; read it, and change it")
    print(f"card      {shown}: public, may be mailed\n\n{card.text()}\n")
    print("next:")
    print("  1. Send the card to the other sites.")
    print("  2. With the cards of all sites: cloister roster build *.card --out roster.toml")
    print(
        "  3. Compare the roster's hash with the other sites by another way than the cards came, by telephone say."
    )
    print(f"  4. Put roster.toml into {folder} and its hash into {site.name} as roster_hash; set data.")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            path.name, str(path), expected=f"a file that can be written ({error.strerror})"
        ) from error
