"""A site as a Flower `ClientApp`: the only part of `clients/` that knows Flower's messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.clients.site import Site, load_site
from cloister.protocol.errors import CloisterError, PlanError
from cloister.protocol.messages import Agree, Evaluate, Join, Reply, Train
from cloister.protocol.records import from_records, private_of, to_records

REFUSED = 100
"""Code of the error reply by which a site says, in one line, why it does not do what it was asked."""


def client_app(open_site: Callable[[Context], Site]) -> ClientApp:
    """A `ClientApp` that serves the site which `open_site` finds for a context."""
    app = ClientApp()

    def answer(message: Message, context: Context, act: Callable[[Site, RecordDict], Reply]) -> Message:
        try:
            return Message(to_records(act(open_site(context), message.content)), reply_to=message)
        except CloisterError as error:
            return Message(Error(REFUSED, str(error)), reply_to=message)

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
    return load_site(Path(path))


app = client_app(site_of_node)
