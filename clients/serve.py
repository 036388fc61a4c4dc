"""A request in frames -> the reply in frames, or a refusal: one site's side of every carrier.

Nothing that happens in a site leaves this file as an exception, and of an error's text only what the coordinator may
know: `reticent` says what that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cloister.protocol.errors import BudgetError, CloisterError, PolicyError, SecureSumError
from cloister.protocol.messages import Failed, Refused, Reply, Request
from cloister.protocol.refusal import printable
from cloister.protocol.wire import Buffer, decode_request, encode

_log = logging.getLogger(__name__)


class Served(Protocol):
    """A site, as its carriers see it: `clients.site.Site`, or that with something around it."""

    @property
    def name(self) -> str:
        """The site's name."""

    def answer(self, request: Request) -> Reply:
        """What the site replies to a request.

        Raises:
            CloisterError: why it does not do what it was asked.
        """

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        """The site's signed refusal of a request that its policy or budget forbids."""


def reticent(error: Exception) -> str:
    """What a coordinator may know of an error: a refusal of the secure sum, which is about its own messages, in full.

    The text of any other error may quote records, losses or paths of the site; that stays in the site's log.
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
        frames: The request (`protocol/wire.py`).
        explain: The line that the coordinator gets for an error.

    Returns:
        The reply's frames.
    """
    name = ""
    try:
        site = open_site()
        name = site.name
        request = decode_request(frames)
        reply = _answer(site, request)
    except CloisterError as error:
        _log.warning("refused: %s", error)
        reply = Failed(name, printable(explain(error)))
    except Exception as error:  # a defect; its text would leave the site if it left this function
        _log.exception("failed")
        reply = Failed(name, printable(explain(error)))
    return encode(reply)


def _answer(site: Served, request: Request) -> Reply:
    try:
        return site.answer(request)
    except (PolicyError, BudgetError) as error:
        _log.warning("refused: %s", error)
        return site.refuse(request, error)
