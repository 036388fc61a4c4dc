"""Flower's local API: a process takes the tasks that a SuperLink or a SuperNode has for an app.

By default Flower starts an app itself, and imports it from the bundle that was submitted with the run. So a coordinator
could send code to a site. Here SuperLink and SuperNode are started with `--isolation process`: they start nothing, and
wait for a process that takes their tasks. That process runs the app that is installed, and does not open the bundle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

from cloister.protocol.errors import EngineError, one_line
from cloister.protocol.machine.closing import Closing

INVITE, INVITATION, REASON = "invite", "invitation", "reason"
"""The message by which a coordinator invites a site to the exchange, what is in it, and what is in the answer: why the
site does not come; empty if it does."""

SECRET = 32
"""Bytes of the secret that is shared with a SuperLink or SuperNode: without it nothing can take their tasks."""

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Environment of Flower's processes: they report to no third party."""

_BEAT_S = 15.0
"""Seconds between two heartbeats of a task; Flower gives it up after about four times as many."""
_TAKE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def use_proxy(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let Flower's processes find the proxy that the environment names, and reach this machine without it.

    Python reads `HTTPS_PROXY` and `NO_PROXY` in capital and small letters and prefers the small ones; gRPC, by which a
    SuperNode connects, reads the small ones only, and a proxy only with a scheme.
    """
    proxy = environment.get("https_proxy") or environment.get("HTTPS_PROXY")
    if proxy:
        environment["https_proxy"] = proxy if "://" in proxy else f"http://{proxy}"
    named = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    direct = ",".join(dict.fromkeys([*filter(None, named), "127.0.0.1", "localhost"]))
    environment["no_proxy"] = environment["NO_PROXY"] = direct


class Tasks(Closing):
    """The tasks of a SuperLink or SuperNode; a context manager.

    Args:
        address: HOST:PORT of its local API.
        secret: The secret that it was started with.
        certificate: The root of its certificate, in PEM; None: it is without TLS, which is for loopback.
    """

    def __init__(self, address: str, secret: bytes, certificate: bytes | None = None) -> None:
        self._address = address
        self._certificate = certificate
        self._client = self._connect(
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_TAKE)
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def take(self, kind: str) -> tuple[RuntimeHttpClient, str] | None:
        """Take the oldest task that waits.

        Args:
            kind: `flwr-serverapp` or `flwr-clientapp`.

        Returns:
            A client for the API calls of this task, which the caller closes, and the task's token; None if no task
            waits.

        Raises:
            EngineError: the API does not answer, or refuses.
        """
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                "Flower's local API", self._address, expected=f"an answer ({one_line(error)})"
            ) from error
        if not found.HasField("task") or not found.token:
            return None
        return self._connect(RuntimeTokenHttpInterceptor(found.token)), found.token

    def _connect(
        self, authority: RuntimeTokenHttpInterceptor | SuperExecAuthHttpInterceptor
    ) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            server_address=self._address,
            insecure=self._certificate is None,
            root_certificates=self._certificate,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="cloister"), authority],
        )


@contextmanager
def heartbeat(client: RuntimeHttpClient, lost: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Show Flower that a task is worked on, for as long as the context lasts.

    Args:
        client: That of the task.
        lost: Called in a thread, once, if Flower has given the task up.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_BEAT_S):
            try:
                alive = client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
            except httpx.HTTPStatusError as error:
                alive = error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
            except httpx.HTTPError:
                continue  # the SuperLink may be starting again
            if not alive:
                lost()
                return

    thread = threading.Thread(target=beat, name="flower-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
