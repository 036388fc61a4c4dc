"""A deployed site: one process that stays, its SuperNode, and its stay on the exchange of a run.

The SuperNode is Flower's. It connects to the coordinator's SuperLink by the key of the site, and is started again when
it ends. What Flower's messages bring is an invitation to the exchange of a run, which this process accepts at once: it
then stays there until the run is over, whatever happens to SuperNode and SuperLink. With `--transport flower` the
messages are the run's own requests.

A site is in one run at a time. An invitation to another run ends the stay in the one before.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cloister.clients.app import client_app, serve_tasks
from cloister.clients.checks.heartbeat import heartbeat_path
from cloister.clients.network.door import ExchangeSite
from cloister.clients.network.superlink import refuses_clock
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import SiteConfig, read_config
from cloister.clients.setup.enrolment import read_installed
from cloister.clients.site import Site
from cloister.clients.state.kept import Kept
from cloister.protocol.errors import CloisterError, EngineError, InvitationError, RosterError, StorageError
from cloister.protocol.identity.address import free_port
from cloister.protocol.identity.audit_log import NAME as AUDIT_LOG
from cloister.protocol.identity.audit_log import AuditLog
from cloister.protocol.identity.certificates import check_valid, read_certificate
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.invitation import Invitation
from cloister.protocol.identity.roster import check_private, load_identity
from cloister.protocol.machine.child import Child
from cloister.protocol.machine.flower import QUIET, SECRET, Tasks, use_proxy
from cloister.protocol.machine.storage import lock, write_bytes

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0
"""Seconds between two heartbeats."""
_END_S = 5.0
"""Seconds for which a request that is handled may still go on when the site is stopped."""


class Stay:
    """A site in the run of an invitation: on its exchange, until the run is over or `end` is called.

    Args:
        invitation: The first invitation.
        config: Reads the site's configuration, as it is now.
    """

    def __init__(self, invitation: Invitation, config: Callable[[], SiteConfig]) -> None:
        self.run = invitation.run
        self._newest: Invitation | None = invitation
        """The newest invitation that was not used."""
        self._ended = False
        self._changed = threading.Condition()
        """Guards the two fields above, and is notified when one changes."""
        self._config = config
        self._resident = Resident()
        now = config()
        membership = Kept(now.folder, now.folder).membership(self.run) or now
        self._folder = now.folder / "exchange" / self.run
        self._site = ExchangeSite(
            now.name,
            load_identity(Path(membership.identity)),
            lambda: _site(self._config(), self._resident),
            self._next,
            self._folder,
        )
        self._thread = threading.Thread(target=self._stay, name="stay", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    @property
    def leaving(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    @property
    def connected(self) -> bool:
        """Whether the site has a session now."""
        return self._site.connected

    def invite(self, invitation: Invitation) -> None:
        """Give it another invitation to the same run, for when its session has broken."""
        with self._changed:
            self._newest = invitation
            self._changed.notify_all()
        self._site.invited()

    def end(self, wait_s: float | None = None) -> None:
        """Leave; returns when the request that is handled is done, or after `wait_s` seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._site.stop()
        self.wait(wait_s)

    def wait(self, wait_s: float | None = None) -> None:
        """Wait until it has ended, or `wait_s` seconds."""
        self._thread.join(wait_s)

    def _next(self, why: CloisterError | None) -> Invitation:
        """The newest invitation; waits for one."""
        if why is not None:
            _log.info("run %s: waiting for another invitation: %s", self.run, why, extra={"run": self.run})
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._ended)
            newest, self._newest = self._newest, None
            if newest is None or self._ended:
                raise InvitationError("invitation", expected="one, and the site is stopping")
            return newest

    def _stay(self) -> None:
        _log.info("run %s: invited", self.run, extra={"run": self.run})
        try:
            self._site.run()
        except CloisterError as error:
            _log.info("run %s: left: %s", self.run, error, extra={"run": self.run})
        except Exception:  # a defect: the next invitation starts another stay
            _log.exception("run %s: failed", self.run, extra={"run": self.run})
        else:
            _log.info("run %s: %s", self.run, "left" if self.leaving else "over", extra={"run": self.run})
            if not self.leaving:
                shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            self._resident.close()


class DeployedSite:
    """A site's process; `run` serves until it is stopped.

    Args:
        path: The site's TOML.
        told: Receives lines for the operator.

    Raises:
        CloisterError: the site is not set up, or another process serves it.
    """

    def __init__(self, path: Path, told: Callable[[str], None]) -> None:
        self._config = partial(read_config, path)
        config = self._config()
        self._told = told
        self._stay: Stay | None = None
        federation = _installed(config)
        authority = Path(config.federation).parent / "authority.pem"
        _check_authority(authority)
        check_private(Path(config.supernode_key), "supernode_key")
        check_private(Path(config.identity), "identity")
        self._folder = config.folder / "flower"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                "state", config.state, expected=f"a folder that can be made ({error.strerror})"
            ) from error
        self._lock = lock(self._folder / "lock", "a site that no other process serves")
        self._superlink = federation.superlink, authority.read_bytes()
        self._secret = os.urandom(SECRET)
        secret = self._folder / "secret"
        write_bytes(secret, self._secret, durable=False)
        secret.chmod(0o600)
        self._address = f"127.0.0.1:{free_port()}"
        self._arguments = [
            *("--superlink", federation.superlink),
            *("--root-certificates", str(authority)),
            *("--auth-supernode-private-key", config.supernode_key),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(secret)),
            *("--host", "127.0.0.1", "--port", self._address.rpartition(":")[2]),
        ]
        self._answered_at = time.monotonic()
        self._unshown = False
        """Whether the last heartbeat could not be written."""

    def run(self, stopped: threading.Event) -> bool:
        """Serve until `stopped` is set.

        Returns:
            Whether nothing is left at work: a training that goes on does not keep the process from ending, because
            the site is asked again when it is back.

        Raises:
            EngineError: Flower's SuperNode is not installed, or its messages are no longer taken, by a defect.
        """
        use_proxy()
        resident = Resident()
        app = client_app(lambda _context, _resident: _site(self._config(), resident), invited=self._invited)
        with (
            self._lock,
            Child(
                "flower-supernode",
                self._arguments,
                self._folder / "supernode.log",
                environment={**QUIET, "FLWR_HOME": str(self._folder)},
                ended=self._ended,
            ) as supernode,
            Tasks(self._address, self._secret) as tasks,
        ):
            self._told(f"started: {supernode.command}")
            serving = threading.Thread(
                target=serve_tasks, args=(tasks, app, stopped, self._answered), name="tasks", daemon=True
            )
            serving.start()
            try:
                while not stopped.wait(_HEARTBEAT_S):
                    if not serving.is_alive():
                        raise EngineError(
                            "messages of the SuperNode", expected="a thread that takes them; it failed"
                        )
                    self._show(supernode.pid)
            finally:
                stopped.set()
                stay = self._stay
                if stay is not None:
                    stay.end(_END_S)
                serving.join(_END_S)
                heartbeat_path(self._config()).unlink(missing_ok=True)
        resident.close()
        return (stay is None or stay.over) and not serving.is_alive()

    def _invited(self, data: bytes) -> None:
        """Accept an invitation."""
        invitation = accepted(data, _installed(self._config()))
        stay = self._stay
        if stay is not None and stay.run == invitation.run and not (stay.over or stay.leaving):
            stay.invite(invitation)
            return
        if stay is not None:
            stay.end(_END_S)
            if not stay.over:
                raise InvitationError(
                    "run of the invitation",
                    invitation.run,
                    expected=f"the request of run {stay.run} to be finished first; the site stops after it",
                )
        self._stay = Stay(invitation, self._config)

    def _ended(self, line: str) -> None:
        """Tell that the SuperNode has ended, and why if it is the clock, which Flower does not say."""
        self._told(line)
        with contextlib.suppress(
            OSError, ValueError
        ):  # it is a hint: the SuperNode is started again whatever it says
            self._tell_of_clock()

    def _tell_of_clock(self) -> None:
        if refuses_clock(*self._superlink, datetime.datetime.now(datetime.UTC)):
            _log.error(
                "the coordinator's SuperLink refuses this site: clock is %s: expected that of the coordinator, give or "
                "take a few seconds; set the wrong one of the two by NTP, such as timedatectl set-ntp true",
                f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
            )

    def _answered(self) -> None:
        self._answered_at = time.monotonic()

    def _show(self, supernode: int) -> None:
        """Write a heartbeat for `cloister status`, if the SuperNode has answered."""
        stay = self._stay
        running = stay is not None and not stay.over
        seen = {
            "pid": os.getpid(),
            "supernode": supernode,
            "supernode_answered_s": round(time.monotonic() - self._answered_at, 1),
            "run": stay.run if stay is not None and running else "",
            "connected": stay is not None and running and stay.connected,
        }
        try:
            write_bytes(heartbeat_path(self._config()), json.dumps(seen).encode(), durable=False)
        except StorageError as error:  # the site goes on, and answers what it can: others wait for no dropout
            if not self._unshown:
                _log.warning("%s", error)
            self._unshown = True
        else:
            self._unshown = False


def accepted(data: bytes, federation: Federation) -> Invitation:
    """The invitation in a message, if it is to the exchange whose address the site has installed.

    A coordinator could else have the site connect to any machine of the site's network.

    Raises:
        InvitationError: it is not.
    """
    invitation = Invitation.from_bytes(data)
    if invitation.address != federation.exchange:
        raise InvitationError(
            "address of the exchange",
            invitation.address,
            expected=f"{federation.exchange}, as in the installed federation",
            fix="if the coordinator has moved, install its newest version",
        )
    return invitation


def _site(config: SiteConfig, resident: Resident) -> Site:
    return Site(config, resident, audit_log=AuditLog(config.folder / AUDIT_LOG))


def _installed(config: SiteConfig) -> Federation:
    federation = read_installed(config)
    if federation is None:
        raise RosterError(
            "federation",
            config.federation,
            expected="the file of an installed federation",
            fix="install it: cloister site install FILE",
        )
    return federation


def _check_authority(path: Path) -> None:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise RosterError(
            str(path),
            expected=f"the certificate of the authority ({error.strerror})",
            fix="install the federation again",
        ) from error
    certificate = read_certificate(pem, str(path))
    check_valid(certificate, datetime.datetime.now(datetime.UTC), "certificate of the authority")
