"""A site as a Flower `ClientApp`: with `flower.py` all that imports Flower in `clients/`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.clients.network.serve import Guarded, reticent, serve
from cloister.clients.ranks.resident import Resident
from cloister.protocol.errors import CloisterError
from cloister.protocol.messages.wire import Buffer, view

_log = logging.getLogger(__name__)


def client_app(
    open_site: Callable[[Context, Resident], Guarded],
    explain: Callable[[Exception], str] = reticent,
    *,
    sealed: bool = False,
) -> ClientApp:
    """A `ClientApp` that serves the site which `open_site` finds for a context.

    Args:
        open_site: Finds the site, given the state that the process has in memory.
        explain: Turns an error into the line that the coordinator receives.
        sealed: Refuse a request whose reply would not be sealed: others carry it.
    """
    app, resident = ClientApp(), Resident()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        def find() -> Guarded:
            return open_site(context, resident)

        if "hello" in message.content:  # of anybody: the name is in the federation's file
            return Message(_hello(find), reply_to=message)
        signed, frames = _signed(message.content), _frames(message.content)
        return Message(_records(serve(find, signed, frames, explain, sealed=sealed)), reply_to=message)

    return app


def _hello(find: Callable[[], Guarded]) -> RecordDict:
    """The site's name, for a grid that does not know it."""
    try:
        name = find().name
    except CloisterError as error:
        _log.warning("hello: %s", error)
        name = ""
    return RecordDict({"hello": ConfigRecord({"site": name})})


def _signed(records: RecordDict) -> bytes:
    """The envelope of a request; empty if the records have none, which `serve` then refuses."""
    record = records.get("envelope")
    signed = record.get("signed") if isinstance(record, ConfigRecord) else None
    return signed if isinstance(signed, bytes) else b""


def _frames(records: RecordDict) -> list[Buffer]:
    """The frames of a request; empty if the records are something else, which `serve` then refuses."""
    frames = records.get("frames")
    return [frames[name].data for name in sorted(frames)] if isinstance(frames, ArrayRecord) else []


def _records(frames: Sequence[Buffer]) -> RecordDict:
    record = ArrayRecord()
    for number, frame in enumerate(map(view, frames)):
        array = Array("uint8", (frame.nbytes,), "cloister.frame", b"")
        # Flower's constructor requires bytes, which would be a copy.
        array.data = frame  # type: ignore[assignment]  # Flower's transport accepts any buffer
        record[f"{number:04d}"] = array
    return RecordDict({"frames": record})
