"""A whole federation from one file: for a rehearsal, or for one operator of all machines, who then has all keys.

It does what the sites and the coordinator do each on its own machine (`clients/setup/enrolment.py`,
`server/federation/registry.py`), in one folder for each party, which can be copied to its machine. No person compares
a fingerprint, because the files pass no channel.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cloister.clients.setup.enrolment import consider, install, make_request
from cloister.protocol.errors import RosterError
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.roster import check_distinct
from cloister.protocol.machine.storage import check_empty, write_folder
from cloister.protocol.plan.settings import Section, Settings
from cloister.server.federation.registry import Name, Registry, Terms


class SiteSection(Section):
    """One site."""

    name: Name
    """Its name."""
    contact: Annotated[str, Field(min_length=1, max_length=200)]
    """Who answers for the site, and how to reach them."""


class Provision(Terms):
    """A federation: what the coordinator decides, and its sites."""

    site: Annotated[list[SiteSection], Field(min_length=1)]
    """The sites."""


PROVISION = Settings(Provision, "federation", RosterError)


def provision(settings: Provision, out: Path, now: datetime.datetime) -> Federation:
    """Make a federation in `out`: the folders `coordinator` and `sites/NAME`, whole or not at all.

    Args:
        settings: The federation.
        out: The folder; missing, or empty.
        now: The present time, with a zone.

    Raises:
        CloisterError: the folder is not empty, or a name is taken or not allowed.
        StorageError: the disk refuses; nothing is left.
    """
    check_empty(out, "folder", RosterError)
    names: list[tuple[str | bytes, str]] = [(site.name.casefold(), site.name) for site in settings.site]
    check_distinct("site.name", "site for each name", names)
    made: list[Federation] = []

    def fill(folder: Path) -> None:  # the folder is synced as a whole
        folder.chmod(0o700)
        (folder / "sites").mkdir(mode=0o700)
        sites = {site.name: (folder / "sites" / site.name, site.contact) for site in settings.site}
        made.append(parties(folder / "coordinator", settings, sites, now))

    write_folder(out, fill)
    return made[0]


def parties(
    coordinator: Path, terms: Terms, sites: Mapping[str, tuple[Path, str]], now: datetime.datetime
) -> Federation:
    """Do what each party does in its own folder: the sites' requests, the first version, its installations; unsynced.

    Args:
        coordinator: The coordinator's folder.
        terms: Its decisions.
        sites: By name the folder and the contact of each site.
        now: The present time, with a zone.

    Raises:
        CloisterError: as for `make_request`, `Registry.create` and `consider`.
    """
    day = now.date()
    requests = [
        make_request(at, name, contact, day, durable=False)[0] for name, (at, contact) in sites.items()
    ]
    made = Registry.create(coordinator, terms, requests, now, durable=False).federation
    for folder, _ in sites.values():
        install(consider(folder, made, now), durable=False)
    return made
