"""A request in frames -> the reply in frames, or a refusal: one site's side of every transport.

No exception of a site leaves this file, and of an error's text only the part that the coordinator may know
(`reticent`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cloister.protocol.errors import BudgetError, CloisterError, PolicyError, SecureSumError
from cloister.protocol.messages.messages import Failed, Join, Refused, Reply, Request
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.wire import Buffer, decode_request, encode

_log = logging.getLogger(__name__)


class Served(Protocol):
    """A site as its transport sees it: `clients.site.Site` or a wrapper of one."""

    @property
    def name(self) -> str:
        """The site's name."""

    def answer(self, request: Request) -> Reply:
        """The site's reply to a request.

        Raises:
            CloisterError: the site does not do what it was asked.
        """

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        """The site's signed refusal of a request that its policy or budget forbids."""


def reticent(error: Exception) -> str:
    """The part of an error that a coordinator may know.

    An error of the secure sum is about the coordinator's own messages and is shown in full. The text of any other error
    may quote records, losses or paths of the site; it stays in the site's log.
    """
    if isinstance(error, SecureSumError):
        return str(error)
    return f"{type(error).__name__}: the reason is in the site's own log"


def serve(
    open_site: Callable[[], Served],
    frames: Sequence[Buffer],
    explain: Callable[[Exception], str] = reticent,
) -> list[Buffer]:
    """Answer one request.

    Args:
        open_site: Finds the site.
        frames: The request (`protocol/messages/wire.py`).
        explain: Turns an error into the line that the coordinator receives.

    Returns:
        The reply's frames.
    """
    name, about = "", dict[str, object]()
    try:
        site = open_site()
        name = site.name
        request = decode_request(frames)
        about = _about(request)
        return encode(_answer(site, request))
    except CloisterError as error:
        _log.warning("refused: %s", error, extra=about)
        return encode(Failed(name, printable(explain(error))))
    except Exception as error:  # a defect: raised further, its text would leave the site
        _log.exception("failed", extra=about)
        return encode(Failed(name, printable(explain(error))))


def _answer(site: Served, request: Request) -> Reply:
    try:
        return site.answer(request)
    except (PolicyError, BudgetError) as error:
        _log.warning("refused: %s", error, extra=_about(request))
        return site.refuse(request, error)


def _about(request: Request) -> dict[str, object]:
    """What a request is about, for a line of the log."""
    if isinstance(request, Join):
        return {"run": request.run}
    return {"run": request.sum.run, "round": request.sum.round, "attempt": request.tries}
