"""Templates of a new site's `site.toml` and `policy.toml`, with a comment for each setting; changes of settings."""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Mapping

from cloister.protocol.errors import PlanError

SETTINGS = """\
# The settings of this site alone. Others learn its name, its "speed" if a plan asks for it, and from the parts of an
# update how many devices it has. Relative paths start at this file's folder.

# The site's name, as on its card.
name = {name}

# Its records: a file, a folder of files, or the name of a dataset on the hub.
data = "data.jsonl"

# Folder for what the site keeps between messages, such as the secrets of the current attempt.
state = "state"

# Its identity key. Anyone who has it can impersonate this site.
identity = "identity.pem"

# The key by which the coordinator's SuperLink knows this site's SuperNode.
supernode_key = "supernode.key"

# The federation that is installed, its roster, and the roster's hash: the site refuses any other roster.
# "cloister site install" sets all three, after it has compared the federation's fingerprint.
federation = ""
roster = ""
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
"""The settings; `{name}` is the name as TOML."""

POLICY = """\
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
"""The policy."""


def new_settings(name: str) -> str:
    """The `site.toml` of a new site."""
    return SETTINGS.format(name=json.dumps(name))


def with_values(text: str, values: Mapping[str, str], origin: str) -> str:
    """A TOML text in which some settings of the top level have other values; all else stays, comments too.

    Args:
        text: The TOML.
        values: Strings by key; a key that the text does not have is added.
        origin: Its file, for errors.

    Raises:
        PlanError: the text is not TOML, or one of the settings is written in a way that cannot be replaced.
    """
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError("site", origin, expected=f"valid TOML ({error})") from error
    lines = text.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        there = [at for at in range(end) if re.match(rf"{key}\s*=", lines[at])]
        if there:
            lines[there[0]] = line
        else:
            lines.insert(0, line)
            end += 1
    after = "".join(lines)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(after) == {**before, **values}:
            return after
    raise PlanError(
        "site",
        origin,
        expected="each of these settings on a line of its own: " + ", ".join(values),
        fix="write them so, with any value, and run it again",
    )
