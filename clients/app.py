"""A site as a Flower `ClientApp`: the only part of `clients/` that knows Flower's messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.clients.site import Site, load_site
from cloister.protocol.errors import BudgetError, CloisterError, PlanError, PolicyError, SecureSumError
from cloister.protocol.messages import Agree, Evaluate, Join, Reply, Train
from cloister.protocol.records import from_records, private_of, to_records

_log = logging.getLogger(__name__)

REFUSED = 100
"""Code of the error reply by which a site says, in one line, why it does not do what it was asked."""


def reticent(error: Exception) -> str:
    """What a coordinator may hear of an error: a refusal of the protocol, which is about its own messages, in full.

    The text of any other error may quote records, losses or paths of the site; that stays in the site's log.
    """
    if isinstance(error, SecureSumError):
        return str(error)
    return f"{type(error).__name__}: the reason is in the site's own log"


def client_app(
    open_site: Callable[[Context], Site], explain: Callable[[Exception], str] = reticent
) -> ClientApp:
    """A `ClientApp` that serves the site which `open_site` finds for a context.

    Args:
        open_site: Finds the site.
        explain: The line that the coordinator gets for an error.
    """
    app = ClientApp()

    def answer(message: Message, context: Context, act: Callable[[Site, RecordDict], Reply]) -> Message:
        site = None
        try:
            site = open_site(context)
            return Message(to_records(act(site, message.content)), reply_to=message)
        except (PolicyError, BudgetError) as error:
            _log.warning("refused: %s", error)
            if site is None:
                return Message(Error(REFUSED, explain(error)), reply_to=message)
            return Message(to_records(_refusal(site, message.content, error)), reply_to=message)
        except CloisterError as error:
            _log.warning("refused: %s", error)
            return Message(Error(REFUSED, explain(error)), reply_to=message)
        except Exception as error:  # a defect; its text would leave the site if it left this function
            _log.exception("failed")
            return Message(Error(REFUSED, explain(error)), reply_to=message)

    @app.query("join")
    def join(message: Message, context: Context) -> Message:
        return answer(message, context, lambda site, said: site.join(from_records(Join, said)))

    @app.query("agree")
    def agree(message: Message, context: Context) -> Message:
        return answer(
            message, context, lambda site, said: site.agree(from_records(Agree, said), private_of(said))
        )

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(
            message, context, lambda site, said: site.train(from_records(Train, said), private_of(said))
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(
            message, context, lambda site, said: site.evaluate(from_records(Evaluate, said), private_of(said))
        )

    return app


def _refusal(site: Site, said: RecordDict, error: PolicyError | BudgetError) -> Reply:
    fields = said["fields"]
    plan, run = fields["plan"], fields["run"]  # every request has them, and they were read before
    assert isinstance(plan, str)
    assert isinstance(run, str)
    return site.refuse(plan, run, error)


def site_of_node(context: Context) -> Site:
    """The site whose TOML the node's configuration names under `site`.

    Raises:
        PlanError: it names none, or the file is wrong.
    """
    path = context.node_config.get("site")
    if not isinstance(path, str):
        raise PlanError(
            "node-config", dict(context.node_config), expected="site = the path of the site's TOML"
        )
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        changed = 0  # what is wrong with it, reading it will say
    return _site(path, changed)


@lru_cache(maxsize=256)
def _site(path: str, changed: int) -> Site:
    """A site's configuration, read again only when its file has changed."""
    return load_site(Path(path))


app = client_app(site_of_node)
