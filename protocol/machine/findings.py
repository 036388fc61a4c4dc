"""What a check of a party found, hop by hop: which is the first that fails, why, and what to do (`cloister doctor`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from cloister.protocol.errors import CloisterError, one_line, visible


@dataclass(frozen=True)
class Hop:
    """One thing to check."""

    name: str
    """Its name, such as `TCP`."""
    look: Callable[[], str]
    """Checks it and returns what was found; raises a `CloisterError` where it fails."""
    fix: str
    """What to do where it fails and the error does not say it."""
    limit_s: float = 0.0
    """Seconds that it waits at most for others; 0: for nothing."""
    needs: tuple[str, ...] = ()
    """Names of earlier hops without which this one cannot be checked."""


@dataclass(frozen=True)
class Finding:
    """What was found at a hop."""

    hop: str
    """Its name."""
    state: Literal["ok", "failed", "skipped"]
    what: str
    """What is there, why it fails, or why it was skipped: one printable line."""
    fix: str = ""
    """What to do; not empty where it fails."""


def examine(hops: Iterable[Hop]) -> Iterator[Finding]:
    """Check hops in their order; one is skipped where a hop that it needs is not ok."""
    lacking: dict[str, str] = {}
    """For each hop that is not ok, why others that need it are skipped."""
    for hop in hops:
        why = next((lacking[name] for name in hop.needs if name in lacking), None)
        finding = _looked(hop) if why is None else Finding(hop.name, "skipped", why)
        if finding.state != "ok":
            lacking[hop.name] = why or f"{hop.name} failed"
        yield finding


def _looked(hop: Hop) -> Finding:
    try:
        found = hop.look()
    except CloisterError as error:
        own = visible(error.fix)
        return Finding(hop.name, "failed", str(error).removesuffix(f"; {own}"), own or hop.fix)
    except OSError as error:
        return Finding(hop.name, "failed", one_line(error), hop.fix)
    return Finding(hop.name, "ok", visible(found))
