"""A request in frames -> the reply in frames, or a refusal: one site's side of every transport.

No exception of a site leaves this file, and of an error's text only the part that the coordinator may know
(`reticent`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cloister.clients.network.guard import Guard
from cloister.protocol.errors import BudgetError, CloisterError, PolicyError, SecureSumError, StaleError
from cloister.protocol.messages.envelope import Envelope
from cloister.protocol.messages.messages import Failed, Join, Joined, Refused, Reply, Request
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.wire import Buffer, decode_request, encode

_log = logging.getLogger(__name__)


class Served(Protocol):
    """A site: `clients.site.Site` or a wrapper of one."""

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


class Guarded(Served, Protocol):
    """A site as its transport sees it."""

    @property
    def guard(self) -> Guard:
        """Which requests it serves."""


def reticent(error: Exception) -> str:
    """The part of an error that a coordinator may know.

    An error of the secure sum is about the coordinator's own messages and is shown in full. The text of any other error
    may quote records, losses or paths of the site; it stays in the site's log.
    """
    if isinstance(error, SecureSumError):
        return str(error)
    return f"{type(error).__name__}: the reason is in the site's own log"


def serve(
    open_site: Callable[[], Guarded],
    signed: bytes,
    frames: Sequence[Buffer],
    explain: Callable[[Exception], str] = reticent,
    *,
    sealed: bool = False,
) -> Sequence[Buffer]:
    """Answer one request of the coordinator; of any other, nothing is decoded.

    Args:
        open_site: Finds the site.
        signed: The request's envelope (`protocol/messages/envelope.py`).
        frames: The request (`protocol/messages/wire.py`).
        explain: Turns an error into the line that the coordinator receives.
        sealed: Refuse a request whose reply would not be sealed.

    Returns:
        The reply's frames, sealed where the envelope wants it.
    """
    admitted: list[tuple[Guard, Envelope]] = []

    def open_admitted() -> Served:
        site = open_site()
        admitted.append((site.guard, site.guard.admit(signed, frames, sealed=sealed)))
        return site

    def answer(site: Served, request: Request) -> Reply:
        guard, envelope = admitted[0]
        run, named = envelope.run, _about(request)["run"]
        if run != named:
            raise StaleError("run of the request", str(named), expected=f"{run}, for which it is signed")
        reply = _answer(site, request)
        if isinstance(reply, Joined):  # which has made the run's folder: an older join is refused from now on
            guard.mark(envelope, signed)
        return reply

    reply = answered(open_admitted, frames, explain, answer)
    if not admitted:
        return reply
    guard, envelope = admitted[0]
    try:
        return guard.sealed(envelope, signed, reply)
    except Exception as error:  # a defect too, as in `answered`
        _log.exception("the reply cannot be sealed")
        return encode(Failed("", printable(explain(error))))


def _answer(site: Served, request: Request) -> Reply:
    try:
        return site.answer(request)
    except (PolicyError, BudgetError) as error:
        _log.warning("refused: %s", error, extra=_about(request))
        return site.refuse(request, error)


def answered(
    open_site: Callable[[], Served],
    frames: Sequence[Buffer],
    explain: Callable[[Exception], str] = reticent,
    answer: Callable[[Served, Request], Reply] = _answer,
) -> list[Buffer]:
    """Answer one request of a caller in this process, or of one that `open_site` and `answer` have proved.

    Args:
        open_site: Finds the site.
        frames: The request.
        explain: As for `serve`.
        answer: Asks the site; raises for a request that is not to be answered.

    Returns:
        The reply's frames.
    """
    name, about = "", dict[str, object]()
    try:
        site = open_site()
        name = site.name
        request = decode_request(frames)
        about = _about(request)
        return encode(answer(site, request))
    except CloisterError as error:
        _log.warning("refused: %s", error, extra=about)
        return encode(Failed(name, printable(explain(error))))
    except Exception as error:  # a defect: raised further, its text would leave the site
        _log.exception("failed", extra=about)
        return encode(Failed(name, printable(explain(error))))


def _about(request: Request) -> dict[str, object]:
    """What a request is about, for a line of the log."""
    if isinstance(request, Join):
        return {"run": request.run}
    return {"run": request.sum.run, "round": request.sum.round, "attempt": request.tries}
