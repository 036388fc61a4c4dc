"""What `cloister doctor` checks at the coordinator: its federation's folder, releases, disk, name and port."""

from __future__ import annotations

import datetime
import errno
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cloister.protocol.errors import CertificateError, MachineError
from cloister.protocol.identity.address import everywhere, host_of, port_of, resolve
from cloister.protocol.identity.certificates import names_of
from cloister.protocol.machine.findings import Hop
from cloister.protocol.machine.prerequisites import check_releases, check_space
from cloister.protocol.machine.storage import is_locked
from cloister.protocol.plan.plan import Plan
from cloister.server.door.front import listening
from cloister.server.federation.control import command
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
        """Whether the coordinator runs, or the port of the door is free for it."""
        bind = everywhere(self._known.federation.door)
        if is_locked(self.path / "lock"):
            (found,) = command(self.path, do="status")
            at = str(found["address"])
            sites = f"; sites connect to port {port_of(bind)}: start it again, unless that is forwarded"
            return f"`cloister coordinator start` listens on {at}{sites * (port_of(at) != port_of(bind))}"
        try:
            with listening(bind):
                return f"{bind} is free: nothing listens there now"
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            find = f"find the other program with ss -ltnp 'sport = :{port_of(bind)}' and stop it"
            other = "use a port above 1023 (cloister coordinator renew), or give cloister the right to it"
            why = "another program has it" if taken else error.strerror
            expected = f"one that can be listened on ({why})"
            raise MachineError("port", bind, expected=expected, fix=find if taken else other) from error


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
