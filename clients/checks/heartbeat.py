"""A heartbeat: the file that a site's process writes again every few seconds, and by which it is probed.

A site listens on nothing that could be probed. This module is light, because a probe reads the file every minute.
"""

from __future__ import annotations

from pathlib import Path

from cloister.clients.setup.config import SiteConfig

DEAD_S = 60.0
"""Seconds after which a site that has written no heartbeat is taken for dead."""
UNHEARD_S = 180.0
"""Seconds after which a site that has not heard its coordinator is not well."""


def heartbeat_path(config: SiteConfig) -> Path:
    """The file."""
    return config.folder / "heartbeat.json"
