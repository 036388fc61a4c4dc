"""A probe at the coordinator, for `cloister doctor`: sites of the federation check with it the way to the exchange.

It listens where the exchange does, while no run goes on, with the certificate `exchange.pem` of the federation. A site
sends its name and key, with a signature by its identity key (`protocol/probe.py`). The key must be the one that the
newest version of the federation has for that name. The answer is the coordinator's clock, its releases and its version
of the federation. Connections, their age and the size of a message are limited.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from cloister.protocol.errors import EngineError, ExchangeError
from cloister.protocol.exchange_pb2 import About, Proof
from cloister.protocol.invitation import fingerprint_of
from cloister.protocol.machine import releases
from cloister.protocol.probe import signed
from cloister.protocol.refusal import printable
from cloister.protocol.transfer import HANDSHAKE_S
from cloister.server.rate import Rate
from cloister.server.registry import Registry

_CONNECTIONS = 16
_BURST, _RATE = 20, 0.2
"""Lines about sites that may be told at once, and a second after that."""
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 2**10),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.max_metadata_size", 2**12),
    ("grpc.absolute_max_metadata_size", 2**13),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a compressed message could be any size
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_age_ms", int(HANDSHAKE_S * 1000)),  # a silent peer does not keep its place
    ("grpc.max_connection_age_grace_ms", 0),
    ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
    ("grpc.so_reuseport", 0),
)


@contextmanager
def probe(
    registry: Registry,
    bind: str,
    *,
    tell: Callable[[str], None] = lambda _line: None,
    clock: Callable[[], float] = time.time,
) -> Iterator[str]:
    """Serve a probe, and yield the HOST:PORT on which it listens.

    Args:
        registry: The coordinator's folder of the federation, whose certificates were checked.
        bind: HOST:PORT on which it listens; port 0: any.
        tell: Called with one line for each question, at a limited rate; in another thread.
        clock: Seconds since 1970.

    Raises:
        EngineError: it cannot listen there.
    """
    federation, rate = registry.federation, Rate(_BURST, _RATE)
    key, certificate = ((registry.path / f"exchange.{kind}").read_bytes() for kind in ("key", "pem"))
    fingerprint = fingerprint_of(certificate)

    def answer(data: bytes, context: grpc.ServicerContext) -> About:
        proof = Proof()
        try:
            proof.ParseFromString(data)
            known = federation.site(proof.name)
            if known is None or known.key != proof.key:
                raise ValueError
            Ed25519PublicKey.from_public_bytes(proof.key).verify(proof.signature, signed(fingerprint))
        except (DecodeError, ValueError, InvalidSignature):
            name = printable(proof.name)[:64]
            why = f"{name} is no site of version {federation.version} of the federation, with its key"
            say(f"refused: {why}")
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        say(f"{proof.name} reaches the exchange")
        return About(
            time=clock(),
            releases=releases(),
            version=federation.version,
            fingerprint=federation.fingerprint,
        )

    def say(line: str) -> None:
        with suppress(ExchangeError):
            rate.take()
            tell(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {line}")

    server = grpc.server(ThreadPoolExecutor(_CONNECTIONS, "probe"), options=_OPTIONS)
    method = grpc.unary_unary_rpc_method_handler(answer, None, About.SerializeToString)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("cloister.Probe", {"Ask": method}),)
    )
    try:
        port = server.add_secure_port(bind, grpc.ssl_server_credentials([(key, certificate)]))
    except RuntimeError as error:  # the port is taken
        raise EngineError(
            "exchange",
            bind,
            expected="an address that is free",
            fix="a run goes on, or another program listens there: run `cloister doctor` without --listen",
        ) from error
    server.start()
    try:
        yield f"{bind.rpartition(':')[0]}:{port}"
    finally:
        server.stop(0).wait()
