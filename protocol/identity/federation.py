"""A federation as its sites agree on it: who they are, where the coordinator is, and what changes between versions.

The coordinator makes each version and sends it to all sites as one file. Its fingerprint covers all of it: name,
version, fingerprint of the version before, address, certificate authority, the coordinator's key, revoked keys, and
every site's signed request. The operators compare the fingerprint over another channel, so that all sites have the same
file. The roster of its cards (`roster.py`) is what the secure sum uses.

A file does not state what changed. Each site computes it from the version that it has installed and the next one:

| change | shown where |
|---|---|
| added | the name is new |
| removed | the name is gone |
| rotated | the name has another key, and the key that the site has installed signed the new request |
| revoked | the key is in the list of revoked keys: the name is gone, or has a key that the old one did not sign |

Another key that is neither signed for nor revoked is refused, and so is a version that does not follow the installed
one. A revoked key never comes back.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cloister.protocol.encoding import pack
from cloister.protocol.errors import CloisterError, RosterError
from cloister.protocol.identity.address import host_of
from cloister.protocol.identity.certificates import read_certificate
from cloister.protocol.identity.document import changed, check_exact, from_base64, table, to_base64, tree_of
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import Roster, check_distinct, check_name, check_public
from cloister.protocol.identity.session import Entrance
from cloister.protocol.plan.threshold import LARGEST

_FEDERATION = "cloister-federation-3"
_TEXTS = ("name", "previous", "door", "authority", "coordinator", "fingerprint")


@dataclass(frozen=True)
class Change:
    """One difference between two versions that follow each other."""

    kind: str
    """`added`, `removed`, `rotated`, `revoked`, or `moved` for the coordinator's address."""
    what: str
    """Name of the site, or `door`."""
    detail: str
    """What a person should know of it."""


@dataclass(frozen=True)
class Federation:
    """One version. Create it with `Federation.first`, a step from another version, or `Federation.from_toml`."""

    name: str
    """Name of the federation: letters, digits, dots, dashes, underscores, at most 64."""
    version: int
    """1 for the first; 0 before there is a site: then no site installs it."""
    previous: bytes
    """Fingerprint of the version before, 32 bytes; empty in the versions 0 and 1."""
    door: str
    """Where sites reach the coordinator, as HOST:PORT."""
    authority: bytes
    """Certificate of the coordinator's authority, DER."""
    coordinator: bytes
    """Ed25519 public key with which the coordinator signs its requests, 32 bytes."""
    revoked: tuple[bytes, ...]
    """Identity keys that no site may have again, sorted."""
    sites: tuple[Request, ...]
    """The approved requests, sorted by name."""

    @classmethod
    def first(
        cls, name: str, door: str, authority: bytes, coordinator: bytes, requests: Iterable[Request]
    ) -> Federation:
        """The first version; without requests the version 0.

        Raises:
            RosterError: a value is not allowed, or two requests have the same name or the same key.
        """
        sites = _sorted(requests)
        return cls(name, 1 if sites else 0, b"", door, authority, coordinator, (), sites).verified()

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over all of it, 32 bytes."""
        sites = tuple(site.packed for site in self.sites)
        values = (self.name, self.version, self.previous, self.door, self.authority, self.coordinator)
        return hashlib.sha256(pack(_FEDERATION, *values, self.revoked, sites)).digest()

    @functools.cached_property
    def roster(self) -> Roster:
        """The roster of its cards."""
        return Roster.of(site.card for site in self.sites)

    @property
    def entrance(self) -> Entrance:
        """Where sites reach the coordinator, and which authority its certificate is of."""
        return Entrance(self.name, self.door, self.authority)

    def site(self, name: str) -> Request | None:
        """The request of the site `name`; None where it is no member."""
        return self._by_name.get(name)

    # Steps to the next version.

    def approving(self, requests: Iterable[Request]) -> Federation:
        """The next version, in which the sites of `requests` are added, or have new keys that their old ones signed.

        Raises:
            RosterError: a name or key is taken, or a key is revoked.
        """
        sites = dict(self._by_name)
        for request in requests:
            known = sites.get(request.name)
            if known is not None and not request.rotates(known.key):
                raise RosterError(
                    f"request of {request.name}",
                    expected="a name that is not taken, or a signature with the key that this site has now",
                    fix=f"to replace the key of {request.name}, run `cloister site rotate` there; if the key is lost, "
                    f"`cloister coordinator revoke {request.name}`",
                )
            if known is None and request.rotation:
                raise RosterError(
                    f"request of {request.name}",
                    expected="a site of the federation, because it replaces a key",
                )
            sites[request.name] = request
        return self._next(sites=_sorted(sites.values()))

    def removing(self, name: str) -> Federation:
        """The next version, without the site `name`; its key may come back.

        Raises:
            RosterError: there is no such site, or no other one.
        """
        self._member(name)
        return self._next(sites=tuple(site for site in self.sites if site.name != name))

    def revoking(self, name: str, request: Request | None = None) -> Federation:
        """The next version, in which the key of the site `name` is revoked.

        Args:
            name: The site.
            request: Its new request, which the old key need not have signed; None: the site leaves.

        Raises:
            RosterError: there is no such site, the request is of another, or its key is taken or revoked.
        """
        old = self._member(name)
        if request is not None and request.name != name:
            raise RosterError(
                "request", request.name, expected=f"the request of {name}, whose key is revoked"
            )
        sites = [site for site in self.sites if site.name != name]
        sites += [] if request is None else [request]
        return self._next(sites=_sorted(sites), revoked=tuple(sorted({*self.revoked, old.key})))

    def moving(self, door: str) -> Federation:
        """The next version, with the coordinator at another address.

        Raises:
            RosterError: it is no address.
        """
        return self._next(door=door)

    def changes_since(self, installed: Federation) -> tuple[Change, ...]:
        """What is different from the version before.

        Args:
            installed: The version before.

        Raises:
            RosterError: this version does not follow it, or has a change that no rule allows.
        """
        self._check_follows(installed)
        found = []
        if self.door != installed.door:
            found.append(Change("moved", "door", f"from {installed.door} to {self.door}"))
        revoked = set(self.revoked)
        for name in sorted(installed._by_name.keys() | self._by_name.keys()):
            before, after = installed.site(name), self.site(name)
            if before == after:
                continue
            if before is None:
                found.append(Change("added", name, f"contact: {after.contact}" if after else ""))
            elif after is None:
                gone = "its key is revoked, and the site left"
                key = before.key in revoked
                found.append(Change("revoked", name, gone) if key else Change("removed", name, "left"))
            elif after.rotates(before.key):
                found.append(Change("rotated", name, "its old key signed the new one"))
            elif before.key != after.key and before.key in revoked:
                unsigned = "its key is revoked; its old key did NOT sign the new one"
                found.append(Change("revoked", name, f"{unsigned}: call the site before you agree"))
            else:
                raise RosterError(
                    f"request of {name}",
                    expected="the installed one, or another that its installed key signed, or a revocation of that key",
                    fix="do not install it: ask the coordinator which step was made",
                )
        added = revoked - set(installed.revoked)
        if not revoked >= set(installed.revoked) or not added <= {site.key for site in installed.sites}:
            raise RosterError(
                "revoked keys", expected="those of the installed version, and keys that sites had in it"
            )
        for what, field in (("certificate authority", "authority"), ("coordinator's key", "coordinator")):
            if getattr(self, field) != getattr(installed, field):
                expected = "that of the installed version"
                raise RosterError(what, expected=expected, fix="ask the coordinator")
        return tuple(found)

    # The file.

    def to_toml(self) -> str:
        """The version as a document."""
        head: dict[str, str | int | list[str]] = {
            "format": _FEDERATION,
            "name": self.name,
            "version": self.version,
            "previous": self.previous.hex(),
            "door": self.door,
            "authority": to_base64(self.authority),
            "coordinator": to_base64(self.coordinator),
            "revoked": [to_base64(key) for key in self.revoked],
            "fingerprint": self.fingerprint.hex(),
        }
        return "".join([table(head), *(f"\n[[site]]\n{site.lines}" for site in self.sites)])

    @classmethod
    def from_toml(cls, text: str, origin: str = "federation") -> Federation:
        """Read a document that `to_toml` wrote, and check all of it.

        Raises:
            RosterError: it was damaged or edited, or a value or signature is wrong.
        """
        what = "federation"
        tree = tree_of(text, what, origin)
        if tree.get("format") != _FEDERATION:
            raise RosterError(what, origin, expected=f"a file that begins with format = {_FEDERATION!r}")
        sites, revoked, version = tree.get("site", []), tree.get("revoked"), tree.get("version")
        if (
            not all(isinstance(tree.get(key), str) for key in _TEXTS)
            or type(version) is not int
            or not isinstance(sites, list)
            or not all(isinstance(site, dict) for site in sites)
            or not isinstance(revoked, list)
            or not all(isinstance(key, str) for key in revoked)
        ):
            raise changed(what, origin, "a value is missing or of another type")
        requests = tuple(Request.from_table(site, what, origin) for site in sites)
        try:
            federation = cls(
                tree["name"],
                version,
                bytes.fromhex(tree["previous"]),
                tree["door"],
                from_base64(tree["authority"], "authority"),
                from_base64(tree["coordinator"], "coordinator"),
                tuple(from_base64(key, "revoked") for key in revoked),
                requests,
            ).verified()
        except (CloisterError, ValueError) as error:
            raise changed(what, origin, str(error)) from error
        check_exact(text, federation.to_toml(), what, origin)
        return federation

    def verified(self) -> Federation:
        """This version, if all of it is allowed.

        Raises:
            CloisterError: it is not.
        """
        check_name(self.name, "name of the federation")
        if not 0 <= self.version < 2**32 or len(self.previous) != (32 if self.version > 1 else 0):
            raise RosterError(
                "version", self.version, expected="1, or more with the fingerprint of the one before"
            )
        host_of(self.door)
        read_certificate(self.authority, "authority")
        check_public(self.coordinator, "coordinator")
        least, most = (1, LARGEST) if self.version else (0, 0)
        if not least <= len(self.sites) <= most:
            fix = "" if self.sites else "approve a site first: cloister coordinator approve"
            raise RosterError("sites", len(self.sites), expected=f"{least} to {most}", fix=fix)
        check_distinct(
            "sites", "site for each name", [(site.name.casefold(), site.name) for site in self.sites]
        )
        check_distinct("sites", "site for each identity key", [(site.key, site.name) for site in self.sites])
        revoked = set(self.revoked)
        if tuple(sorted(revoked)) != self.revoked:
            raise RosterError("revoked", expected="each key once, sorted")
        for site in self.sites:
            if site.key in revoked:
                raise RosterError(
                    f"key of {site.name}",
                    expected="one that was not revoked",
                    fix="make a new key: `cloister site request` in a new folder",
                )
        if self.sites != _sorted(self.sites):
            raise RosterError("sites", expected="sorted by name")
        if self.sites:
            _ = self.roster  # its own checks
        return self

    @functools.cached_property
    def _by_name(self) -> dict[str, Request]:
        return {site.name: site for site in self.sites}

    def _member(self, name: str) -> Request:
        site = self.site(name)
        if site is None:
            raise RosterError("site", name, expected=f"one of {', '.join(self._by_name)}")
        return site

    def _next(self, **changed: Any) -> Federation:
        return replace(self, version=self.version + 1, previous=self._link, **changed).verified()

    @property
    def _link(self) -> bytes:
        """What the next version has as `previous`."""
        return self.fingerprint if self.version else b""

    def _check_follows(self, installed: Federation) -> None:
        have = f"{installed.name}, version {installed.version}"
        if self.name != installed.name:
            raise RosterError(
                "name of the federation",
                self.name,
                expected=f"{installed.name}, which is installed here",
                fix="a site of two federations has two folders, each with keys of its own",
            )
        following = installed.version + 1
        if self.version != following:
            why = f"{have} is installed" + (", and this file is older" if self.version < following else "")
            fix = "ask the coordinator for the newest file, and why there is another one"
            if self.version == installed.version:
                why = f"this is another version {self.version} than the installed one"
            elif self.version > following:
                fix = f"install the file of version {following} first"
            raise RosterError("version", self.version, expected=f"{following}: {why}", fix=fix)
        if self.previous != installed._link:
            raise RosterError(
                "previous",
                self.previous.hex(),
                expected=f"{installed.fingerprint.hex()}, the fingerprint of the installed version",
                fix="this file does not follow the installed one: ask the coordinator, and do not install it",
            )


def _sorted(requests: Iterable[Request]) -> tuple[Request, ...]:
    return tuple(sorted(requests, key=lambda request: request.name))
