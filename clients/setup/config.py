"""A site's own configuration: a TOML file on its machine, which never leaves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, PrivateAttr

from cloister.protocol.errors import PlanError
from cloister.protocol.plan.plan import FASTEST, SLOWEST, SMALLEST_COHORT, MeshSection
from cloister.protocol.plan.settings import InWords, Section, Settings


class Membership(NamedTuple):
    """As whom a site takes part: what `cloister site install` changes, and a run that has begun keeps."""

    identity: str
    """File of its identity key."""
    roster: str
    """File of the roster."""
    roster_hash: str
    """Hash of that roster, in hex."""


class SiteConfig(Section):
    """The settings of one site. Other parties see the name; the speed, where a plan asks for it; and by the parts of an
    update how many devices it has."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """The site's name, as on its card."""
    data: Annotated[str, Field(min_length=1)]
    """Its records: a file, a folder of files, or the name of a dataset on the hub. Relative paths start at this file's
    folder."""
    split: str = "train"
    """Split of a hub data set."""
    state: Annotated[str, Field(min_length=1)]
    """Folder for what the site keeps between messages, such as the secrets of the current attempt."""
    identity: str = ""
    """File of its Ed25519 identity key. Anyone who has it can impersonate this site."""
    federation: str = ""
    """File of the federation that is installed; the certificate of the coordinator's authority, `authority.pem`, is
    beside it. Empty: none is. `cloister site install` sets it, the roster and the roster's hash, after it has compared
    the federation's fingerprint."""
    coordinator: Annotated[str, Field(pattern="^([0-9a-f]{64})?$"), InWords("64 hexadecimal digits")] = ""
    """Public key of the coordinator, in hex: the site serves no request without a signature of it. `cloister site
    install` sets it."""
    roster: str = ""
    """File of the roster that the sites agreed on."""
    roster_hash: str = ""
    """Hash of that roster, in hex: the site refuses any other."""
    plan: str = ""
    """Digest of a plan: consent to its first run. `cloister plan check PLAN.toml` prints it; read the plan first.
    `cloister site accept` consents to further runs, and to other plans. Empty: to none."""
    secure: bool = True
    """Take part only in plans that sum under masks; `false` lets the coordinator see every update."""
    minimum_cohort: Annotated[int, Field(ge=SMALLEST_COHORT)] = SMALLEST_COHORT
    """Smallest number of sites in a sum in which it takes part; a large cohort may split into smaller sums."""
    policy: str = ""
    """File of what the site demands of a plan's privacy, and the most that may be spent on its data over all runs;
    empty: it demands no more than the keys here."""
    dataset: str = ""
    """Name under which the ledger keeps what this data has spent; empty: the value of `data`. Data that is moved or
    grows is the same data: keep its name."""
    ledger: str = ""
    """File of the site's privacy ledger; empty: `ledger.sqlite` in the state folder. It must outlive runs and state
    folders: keep it where it is backed up. A lost ledger loses what was spent."""
    device: str = "auto"
    """`auto` (the GPUs this process sees, else the CPU), or a torch device such as `cuda:1` or `cpu`."""
    speed: Annotated[float, Field(ge=SLOWEST, le=FASTEST)] = 1.0
    """How fast its hardware trains, relative to the other sites: 2 is twice as fast as 1. Only for plans with
    `local.balance = "weighted"`, whose coordinator is told."""
    mesh: MeshSection = MeshSection()
    """Degrees by which several devices, of the kind that `device` names, divide the model."""

    _data: str = PrivateAttr("")
    """`data` as the file has it, where it was read from one."""

    @property
    def data_name(self) -> str:
        """The name under which the ledger keeps what the data has spent."""
        return self.dataset or self._data or self.data

    @property
    def folder(self) -> Path:
        """The state folder."""
        return Path(self.state)

    @property
    def membership(self) -> Membership | None:
        """As whom the site joins a run; None where no federation is installed: there is only one roster."""
        return Membership(self.identity, self.roster, self.roster_hash) if self.federation else None


_SETTINGS = Settings(SiteConfig, "site", PlanError)


def read_config(path: Path) -> SiteConfig:
    """Read a site's TOML, or `site.toml` of a folder; relative paths in it are relative to its folder.

    Raises:
        PlanError: the file is missing, or a field is wrong.
    """
    path = path / "site.toml" if (path / "site.toml").is_file() else path
    config = _SETTINGS.load(path)
    data = path.parent / config.data
    # A file of that name elsewhere is not meant, wherever the command was started.
    is_file = data.exists() or config.data.startswith((".", "/")) or Path(config.data).exists()
    read = config.model_copy(
        update={
            "data": str(data) if is_file else config.data,
            **{
                name: str(path.parent / value)
                for name in ("state", "identity", "federation", "policy", "ledger")
                if (value := getattr(config, name))
            },
            # Sites on one machine name one file in many ways, and a process verifies each path once.
            "roster": config.roster and os.path.realpath(path.parent / config.roster),
        }
    )
    read._data = config.data
    return read
