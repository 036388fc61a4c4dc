"""A whole federation from one file: for a rehearsal, or for one operator of all machines, who then has all keys.

It does what the sites and the coordinator do each on its own machine (`clients/setup/enrolment.py`,
`server/federation/registry.py`), in one folder for each party, which can be copied to its machine. No person compares
a fingerprint, because the files pass no channel.
"""

from __future__ import annotations

import datetime
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
        sites = {site.name: folder / "sites" / site.name for site in settings.site}
        (folder / "sites").mkdir(mode=0o700)
        requests = [
            make_request(sites[site.name], site.name, site.contact, now.date(), durable=False)[0]
            for site in settings.site
        ]
        terms = Terms.model_validate(settings.model_dump(exclude={"site"}))
        federation = Registry.create(folder / "coordinator", terms, requests, now, durable=False).federation
        for site in sites.values():
            install(consider(site, federation, now), durable=False)
        made.append(federation)

    write_folder(out, fill)
    return made[0]
