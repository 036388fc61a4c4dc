"""A site as a Flower `ClientApp`: the only file in `clients/` that imports Flower."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cloister.clients.network.serve import Served, reticent, serve
from cloister.clients.ranks.resident import Resident
from cloister.protocol.messages.wire import Buffer, view


def client_app(
    open_site: Callable[[Context, Resident], Served],
    explain: Callable[[Exception], str] = reticent,
) -> ClientApp:
    """A `ClientApp` that serves the site which `open_site` finds for a context.

    Args:
        open_site: Finds the site, given the state that the process has in memory.
        explain: Turns an error into the line that the coordinator receives.
    """
    app, resident = ClientApp(), Resident()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        def find() -> Served:
            return open_site(context, resident)

        return Message(_records(serve(find, _frames(message.content), explain)), reply_to=message)

    return app


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
