"""A site's use of the coordinator's probe: who it is, then the bytes of an echo each way, timed."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from cloister.clients.exchange import open_channel
from cloister.protocol.address import host_of
from cloister.protocol.errors import ConnectionFailedError, MachineError, MemberError
from cloister.protocol.exchange_pb2 import About, FromProbe, Hello, Proof, ToProbe
from cloister.protocol.findings import Skipped
from cloister.protocol.probe import ECHO, METHOD, VERSION, prove
from cloister.protocol.refusal import printable
from cloister.protocol.transfer import CHUNK

_INSTALL = "install the newest version: cloister site install FILE, with the file that the coordinator sends"


@dataclass(frozen=True)
class Echo:
    """What a probe measured, and what the coordinator said of itself."""

    about: About
    """As the coordinator sent it; texts in it are not yet made printable."""
    ahead_s: float
    """Seconds by which its clock is ahead of this one, give or take half a round trip."""
    round_trip_s: float
    """Of a small message, with a signature that is made and verified."""
    up_s: float
    """Seconds until the coordinator had the bytes."""
    down_s: float
    """Seconds until as many had come back."""


class _Progress:
    """How far an echo is, and when it moved last."""

    def __init__(self) -> None:
        self.up = self.down = 0
        self.at = time.monotonic()
        self.stalled = False

    def moved(self, *, up: int | None = None, down: int = 0) -> None:
        self.up, self.down, self.at = self.up if up is None else up, self.down + down, time.monotonic()

    @contextmanager
    def watched(self, call: grpc.RpcContext, stall_s: float) -> Iterator[None]:
        """Cancel a call that does not move."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(stall_s / 8):
                if time.monotonic() - self.at >= stall_s:
                    self.stalled = True
                    call.cancel()
                    return

        thread = threading.Thread(target=watch, name="probe-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            call.cancel()

    def __str__(self) -> str:
        return f"{self.up / 1e6:.1f} MB up and {self.down / 1e6:.1f} MB down"


def echo(
    address: str,
    root: bytes,
    fingerprint: bytes,
    identity: Ed25519PrivateKey,
    name: str,
    *,
    stall_s: float,
    limit_s: float,
) -> Echo | Skipped:
    """Use the probe at an address.

    Args:
        address: HOST:PORT of the exchange.
        root: Certificate of the federation's authority, in PEM.
        fingerprint: SHA-256 of the server's certificate, which was verified.
        identity: The site's identity key.
        name: The site's name.
        stall_s: Seconds without a message of the coordinator after which the echo is given up.
        limit_s: Seconds for all of it.

    Returns:
        What was measured; skipped, if the server is an exchange that serves a run.

    Raises:
        MemberError: the coordinator does not know the site or its key.
        MachineError: the coordinator has another release of the probe.
        ConnectionFailedError: the connection broke or stalled, or the coordinator refuses the probe now.
    """
    unsent: queue.SimpleQueue[FromProbe | None] = queue.SimpleQueue()
    progress = _Progress()
    first = os.urandom(CHUNK)

    messages = (message.SerializeToString() for message in iter(unsent.get, None))
    with open_channel(address, host_of(address), root) as channel:
        call = channel.stream_stream(METHOD)(messages, timeout=limit_s)
        answers = _Answers(call, progress)
        try:
            with progress.watched(call, stall_s):
                unsent.put(FromProbe(hello=Hello(version=VERSION)))
                nonce = answers.next("challenge").challenge.nonce
                public = identity.public_key().public_bytes_raw()
                signature = prove(identity, fingerprint, nonce, name)
                asked, asked_at = time.monotonic(), time.time()
                unsent.put(FromProbe(proof=Proof(name=name, key=public, signature=signature)))
                about = answers.next("about").about
                round_trip = time.monotonic() - asked
                ahead = about.time - (asked_at + round_trip / 2)
                started = time.monotonic()
                for _ in range(0, ECHO, CHUNK):
                    unsent.put(FromProbe(data=first))
                while not (held := answers.next("held").held).whole:
                    progress.moved(up=held.size)
                progress.moved(up=held.size)
                half = time.monotonic()
                for _ in range(0, ECHO, CHUNK):
                    data = answers.next("data").data
                    if data != first:
                        raise ConnectionFailedError(
                            "echo",
                            str(progress),
                            expected="the bytes that were sent",
                            fix=_fix_between(address),
                        )
                    progress.moved(down=len(data))
                down = time.monotonic() - half
                unsent.put(None)
                answers.end()  # gRPC's server keeps some bytes of each call that is cancelled
                return Echo(about, ahead, round_trip, half - started, down)
        except grpc.RpcError as error:
            return _judged(error, address, progress, limit_s)
        finally:
            unsent.put(None)


class _Answers:
    """The coordinator's messages."""

    def __init__(self, call: Iterator[bytes], progress: _Progress) -> None:
        self._call = call
        self._progress = progress

    def next(self, kind: str) -> ToProbe:
        """The next message, which must be of that kind.

        Raises:
            ConnectionFailedError: it is another, or there is none.
            grpc.RpcError: the call failed.
        """
        try:
            message: ToProbe = ToProbe.FromString(next(self._call))
        except (StopIteration, DecodeError):
            message = ToProbe()
        if message.WhichOneof("said") != kind:
            raise ConnectionFailedError(
                "answer",
                message.WhichOneof("said") or "none",
                expected=f"{kind}, as a probe of this release sends it",
                fix="install the same release of cloister at the coordinator and at the sites",
            )
        self._progress.moved()
        return message

    def end(self) -> None:
        """Read the end of the call.

        Raises:
            ConnectionFailedError: there is another message.
            grpc.RpcError: the call failed.
        """
        for data in self._call:
            raise ConnectionFailedError(
                "answer",
                f"{len(data)} bytes after the echo",
                expected="the end of the echo",
                fix="install the same release of cloister at the coordinator and at the sites",
            )


def _judged(error: grpc.RpcError, address: str, progress: _Progress, limit_s: float) -> Skipped:
    """What a call that failed says.

    Raises:
        CloisterError: it is a fault.
    """
    code, details = error.code(), printable(error.details() or "no reason given")
    if progress.stalled:
        raise ConnectionFailedError(
            "echo",
            f"stalled after {progress}",
            expected=f"{ECHO / 1e6:.1f} MB each way",
            fix=_fix_between(address),
        ) from None
    match code:
        case grpc.StatusCode.UNIMPLEMENTED:
            return Skipped("the exchange serves a run, and no probe")
        case grpc.StatusCode.PERMISSION_DENIED:
            raise MemberError(
                "site", expected=f"one that the coordinator knows by this key ({details})", fix=_INSTALL
            ) from None
        case grpc.StatusCode.FAILED_PRECONDITION:
            raise MachineError(
                "release of cloister",
                details,
                expected="the coordinator's",
                fix="install the same release of cloister at the coordinator and at the sites",
            ) from None
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise ConnectionFailedError(
                "probe", details, expected="one that is free", fix="wait a minute, and run this again"
            ) from None
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            raise ConnectionFailedError(
                "echo",
                f"{progress} in {limit_s:g} s",
                expected=f"{ECHO / 1e6:.1f} MB each way in {limit_s:g} s",
                fix="the line is slow: a round sends a model each way; run this with a larger --timeout to measure it",
            ) from None
    raise ConnectionFailedError(
        "echo",
        f"broken off after {progress}: {details}",
        expected=f"{ECHO / 1e6:.1f} MB each way",
        fix=_fix_between(address),
    ) from None


def _fix_between(address: str) -> str:
    return (
        "a device between ends or holds long connections: ask your network's administrator about proxies, inspection "
        f"and limits of size and time for {address}; the MTU of a VPN may be too large"
    )
