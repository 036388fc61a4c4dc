"""A site as a Flower `ClientApp`: the only file in `clients/` that imports Flower."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from cloister.clients.network.serve import Served, reticent, serve
from cloister.clients.ranks.resident import Resident
from cloister.protocol.errors import CloisterError, EngineError
from cloister.protocol.machine.flower import INVITATION, INVITE, REASON, Tasks, heartbeat
from cloister.protocol.messages.refusal import printable
from cloister.protocol.messages.wire import Buffer, view

_log = logging.getLogger(__name__)

_POLL_S = 0.5
"""Seconds between two questions for a task; Flower's local API cannot wait for one."""
_WARN_S = 60.0
"""Seconds for which a SuperNode that starts again may not answer before a line says so."""


def client_app(
    open_site: Callable[[Context, Resident], Served],
    explain: Callable[[Exception], str] = reticent,
    invited: Callable[[bytes], None] | None = None,
) -> ClientApp:
    """A `ClientApp` that serves the site which `open_site` finds for a context.

    Args:
        open_site: Finds the site, given the state that the process has in memory.
        explain: Turns an error into the line that the coordinator receives.
        invited: Receives an invitation to the exchange, and returns at once; None: the app takes none.
    """
    app, resident = ClientApp(), Resident()

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        def find() -> Served:
            return open_site(context, resident)

        return Message(_records(serve(find, _frames(message.content), explain)), reply_to=message)

    if invited is None:
        return app

    @app.query(INVITE)
    def invite(message: Message, _context: Context) -> Message:
        reason = ""
        try:
            record = message.content.get(INVITE)
            invitation = record.get(INVITATION) if isinstance(record, ConfigRecord) else None
            invited(invitation if isinstance(invitation, bytes) else b"")
        except CloisterError as error:
            _log.warning("invitation: %s", error)
            reason = printable(explain(error))
        return Message(RecordDict({INVITE: ConfigRecord({REASON: reason})}), reply_to=message)

    return app


def serve_tasks(tasks: Tasks, app: ClientApp, stopped: threading.Event, alive: Callable[[], None]) -> None:
    """Run an app for each message that a SuperNode has, one after the other, until `stopped` is set.

    Args:
        tasks: The SuperNode's.
        app: The app; the bundle that a coordinator has sent is not opened.
        stopped: Ends it, after the message that is handled.
        alive: Called again and again while the SuperNode answers.
    """
    failing_s = 0.0
    while not stopped.wait(_POLL_S):
        try:
            taken = tasks.take("flwr-clientapp")
        except EngineError as error:
            failing_s += _POLL_S
            if failing_s == _WARN_S:
                _log.warning("the SuperNode does not answer: %s", error)
            continue
        failing_s = 0.0
        alive()
        if taken is not None:
            client, _ = taken
            try:
                _handle(client, app)
            except (httpx.HTTPError, ValueError, RuntimeError) as error:  # Flower's own, of its local API
                _log.warning("a message of Flower was lost: %s", printable(str(error)))
            finally:
                client.close()


def _handle(client: RuntimeHttpClient, app: ClientApp) -> None:
    """One message: fetch it, answer it, and finish its task."""
    message, context, _run, _bundle = pull_task_input(client)
    status, details = SubStatus.COMPLETED, ""
    with heartbeat(client):
        try:
            reply = app(message, context)
        except (
            Exception
        ) as error:  # no handler for it, or a defect: its text may quote what is the site's own
            _log.exception("a message of Flower failed")
            status, details = SubStatus.FAILED, type(error).__name__
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, details), reply_to=message)
        push_message(client, reply, context)
    push_task_output(client, context, status, details)


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
