"""What `cloister doctor` checks at the coordinator: its federation's folder, releases, disk, name and port."""

from __future__ import annotations

import datetime
import errno
import socket
import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cloister.protocol.errors import CertificateError, MachineError
from cloister.protocol.identity.address import everywhere, host_of, port_of, resolve
from cloister.protocol.identity.certificates import names_of, read_certificate
from cloister.protocol.machine.findings import Hop
from cloister.protocol.machine.prerequisites import check_releases, check_space
from cloister.protocol.plan.plan import Plan
from cloister.server.federation.registry import Registry


@dataclass
class CoordinatorDoctor:
    """The hops of a coordinator."""

    path: Path
    """The folder of the federation."""
    limit_s: float
    """Seconds of each wait."""
    plan: Plan | None
    """The plan that is to be run; None: it is not known."""

    def hops(self) -> list[Hop]:
        """The hops, in their order."""
        dns = f"ask for this name in your DNS, or name another: cloister coordinator renew {self.path} --address"
        port = "stop the other program, or use another port: cloister coordinator renew"
        backup, opened = "restore the file from its backup", ("federation",)
        return [
            Hop("federation", self._opened, "restore the folder from its backup"),
            Hop("certificates", self._certificates, backup, needs=opened),
            Hop("releases", check_releases, "install cloister again"),
            Hop("disk", self._disk, "free space"),
            Hop("DNS", self._name, dns, self.limit_s, opened),
            Hop("port", self._port, port, self.limit_s, ("certificates",)),
        ]

    @cached_property
    def _known(self) -> Registry:
        return Registry.open(self.path)

    def _opened(self) -> str:
        federation = self._known.federation
        return f"{federation.name}, version {federation.version}, of {len(federation.sites)} sites"

    def _certificates(self) -> str:
        self._known.check_certificates(datetime.datetime.now(datetime.UTC))
        host = host_of(self._known.federation.door)
        if host not in names_of(self._known.certificate("door")):
            raise CertificateError(
                "certificate of the door",
                str(self.path / "door.pem"),
                expected=f"one for {host}, its address",
                fix=f"cloister coordinator renew {self.path}",
            )
        until = [(self._known.certificate(name).not_valid_after_utc, name) for name in ("authority", "door")]
        return ", ".join(f"{name} until {last:%Y-%m-%d}" for last, name in until)

    def _disk(self) -> str:
        needed = coordinator_bytes(self.plan) if self.plan else None
        return check_space(self.path, needed, "needed by the plan's run")

    def _name(self) -> str:
        address = self._known.federation.door
        found = resolve(host_of(address), port_of(address), self.limit_s)
        return f"{host_of(address)} is {', '.join(dict.fromkeys(each.ip for each in found))}"

    def _port(self) -> str:
        """Whether the port of the door is free, or used by the door."""
        bind = everywhere(self._known.federation.door)
        try:
            with _bound(bind):
                return f"{bind} is free: nothing listens there now"
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise MachineError(
                    "port",
                    bind,
                    expected=f"one that can be listened on ({error.strerror})",
                    fix="use a port above 1023 (cloister coordinator renew), or give cloister the right to it",
                ) from error
        return self._served(bind)

    def _served(self, bind: str) -> str:
        other = MachineError(
            "port",
            bind,
            expected="free, or used by the coordinator, but another program has it",
            fix=f"find it with ss -ltnp 'sport = :{port_of(bind)}' and stop it",
        )
        try:
            pem = ssl.get_server_certificate(("127.0.0.1", port_of(bind)), timeout=self.limit_s)
            shown = read_certificate(pem.encode(), "the server's")
        except (OSError, ValueError, CertificateError) as error:
            raise other from error
        if shown != self._known.certificate("door"):
            raise other
        return f"{bind} is served with door.pem"


def _bound(bind: str) -> socket.socket:
    """A socket that is bound, and does not listen.

    Raises:
        OSError: the address cannot be had.
    """
    host = host_of(bind)
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # as gRPC does
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((host, port_of(bind)))
    except OSError:
        made.close()
        raise
    return made


def coordinator_bytes(plan: Plan) -> int:
    """Bytes that the coordinator needs on disk for a run.

    With P parameters, T of them trained, in float32, U bytes of a coded update (`aggregation.sums.Sums.training`), N
    sites in a cohort and K = `server.keep_checkpoints`:

        12 T (K + 2)  checkpoints with at most two vectors of the optimizer: K, the initial one, the one being written
      + 4 P           the final model
      + N U           uploads of a round, until they are summed

    Raises:
        ModelError: the plan's model does not exist.
    """
    from cloister.aggregation.sums import Sums
    from cloister.lm.model.model import count_parameters

    everything, trained, summed = count_parameters(plan)
    update = Sums(plan, summed, most=trained).update_bytes
    kept = plan.server.keep_checkpoints + 2
    return 12 * trained * kept + 4 * everything + plan.cohort.size() * update
