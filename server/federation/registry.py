"""The coordinator's folder of a federation: its certificate authority, the door's certificate, and every version.

| file | what it is |
|---|---|
| `federation-1.toml`, `federation-2.toml`, ... | each version, public: the file that sites install |
| `federation-0.toml` | the version without a site, with which the folder may begin |
| `authority.key`, `authority.pem` | the certificate authority |
| `door.key`, `door.pem` | key and certificate of the door, the server that sites connect to |
| `coordinator.key` | the key that signs every request to a site |

The folder is made whole or not at all. After that a version is published by one new file, which is never replaced, and
a certificate is renewed by one file, under the same key: so a crash leaves nothing half-done.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import Certificate
from pydantic import Field

from cloister.protocol.errors import CertificateError, RosterError
from cloister.protocol.identity.address import Address, Host, host_of
from cloister.protocol.identity.certificates import (
    certificate_to_pem,
    check_valid,
    issue,
    issued_by,
    key_from_pem,
    key_to_pem,
    names_of,
    new_authority,
    new_key,
    read_certificate,
)
from cloister.protocol.identity.document import read_document
from cloister.protocol.identity.federation import Federation
from cloister.protocol.identity.request import Request
from cloister.protocol.identity.roster import NAME, check_private, load_identity, new_identity, save_identity
from cloister.protocol.machine.storage import check_empty, readable, write_bytes, write_folder, write_new
from cloister.protocol.plan.settings import InWords, Section

_SIGNING = "coordinator.key"
_VERSION = re.compile(r"federation-(0|[1-9][0-9]*)\.toml")

Name = Annotated[
    str, Field(pattern=f"^{NAME.pattern}$"), InWords("1 to 64 letters, digits, dots, dashes, underscores")
]
"""Name of a federation or of a site."""


class Terms(Section):
    """What the coordinator decides when it makes a federation."""

    name: Name
    """Name of the federation."""
    door: Address
    """Where sites reach the coordinator, as HOST:PORT."""
    certificate_names: tuple[Host, ...] = ()
    """DNS names and IP addresses in the door's certificate, besides the host of its address."""
    authority_days: Annotated[int, Field(ge=1, le=36500)] = 3650
    """Days for which the certificate authority is valid; a new one is a new federation."""
    certificate_days: Annotated[int, Field(ge=1, le=36500)] = 398
    """Days for which the door's certificate is valid; `cloister coordinator renew` makes it again."""


class Renewal(Section):
    """What the coordinator decides when it makes the door's certificate again, or moves the door."""

    door: Address | None = None
    """Another address of the door; None: the present one."""
    certificate_names: tuple[Host, ...] | None = None
    """Names besides the host of the address; None: those of the present certificate."""
    certificate_days: Annotated[int, Field(ge=1, le=36500)] = 398
    """Days for which the certificate is valid."""


@dataclass(frozen=True)
class Registry:
    """A folder that was read. Create it with `Registry.create` or `Registry.open`."""

    path: Path
    """The folder."""
    federation: Federation
    """The newest version."""

    @classmethod
    def create(
        cls,
        path: Path,
        terms: Terms,
        requests: Sequence[Request],
        now: datetime.datetime,
        *,
        durable: bool = True,
    ) -> Registry:
        """Make the folder, with the first version.

        Args:
            path: The folder; missing, or empty.
            terms: The coordinator's decisions.
            requests: The requests that it approves; none: the folder has the version 0.
            now: The present time, with a zone.
            durable: Sync all of it before this returns.

        Raises:
            RosterError: the folder is not empty, or the requests do not make a federation.
            StorageError: the disk refuses; nothing is left.
        """
        check_empty(path, "folder", RosterError)
        keys = {name: new_key() for name in ("authority", "door")}
        authority = new_authority(keys["authority"], terms.name, now, terms.authority_days)
        der, signing = authority.public_bytes(Encoding.DER), new_identity()
        coordinator = signing.public_key().public_bytes_raw()
        federation = Federation.first(terms.name, terms.door, der, coordinator, requests)

        def fill(folder: Path) -> None:
            folder.chmod(0o700)
            names = _names(terms.door, terms.certificate_names)
            made = issue(authority, keys["authority"], keys["door"], names, now, terms.certificate_days)
            for name, certificate in (("authority", authority), ("door", made)):
                # not synced: the folder is, as a whole
                write_new(folder / f"{name}.key", key_to_pem(keys[name]), durable=False)
                (folder / f"{name}.pem").write_bytes(certificate_to_pem(certificate))
            save_identity(signing, folder / _SIGNING, durable=False)
            _version_path(folder, federation.version).write_text(federation.to_toml(), encoding="utf-8")

        write_folder(path, fill, durable=durable)
        return cls(path, federation)

    @classmethod
    def open(cls, path: Path) -> Registry:
        """Read the folder, and check that every version follows the one before.

        Raises:
            RosterError: it is not such a folder, or a file in it was damaged or edited.
        """
        try:
            found = [_VERSION.fullmatch(entry.name) for entry in path.iterdir()]
        except OSError as error:
            raise RosterError(
                "folder of the federation",
                str(path),
                expected=f"a folder that can be read ({error.strerror})",
            ) from error
        numbers = sorted(int(match[1]) for match in found if match)
        if not numbers or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise RosterError(
                "folder of the federation",
                str(path),
                expected="the versions 1, 2, ... that `cloister coordinator` writes, without a gap",
            )
        federation = _read_version(path, numbers[0])
        for number in numbers[1:]:
            following = _read_version(path, number)
            following.changes_since(federation)
            federation = following
        return cls(path, federation)

    @property
    def file(self) -> Path:
        """The file of the newest version, which sites install."""
        return _version_path(self.path, self.federation.version)

    @property
    def following(self) -> Path:
        """Where the next version will be."""
        return _version_path(self.path, self.federation.version + 1)

    def version(self, number: int) -> Federation:
        """An earlier version, or the newest.

        Raises:
            RosterError: there is none with that number.
        """
        if not 1 <= number <= self.federation.version:
            raise RosterError("version", number, expected=f"1 to {self.federation.version}")
        return _read_version(self.path, number)

    def publish(self, following: Federation) -> Registry:
        """Write the next version.

        Args:
            following: A step from the newest version.

        Raises:
            RosterError: it does not follow, or another process published that version.
            StorageError: the disk refuses; the newest version stays as it was.
        """
        following.changes_since(self.federation)
        text = following.to_toml()
        path = _version_path(self.path, following.version)
        write_new(path, text.encode())
        if path.read_text(encoding="utf-8") != text:
            raise RosterError(
                "version",
                following.version,
                expected="one process at a time that makes it",
                fix="run it again",
            )
        return Registry(self.path, following)

    def renew(self, renewal: Renewal, now: datetime.datetime) -> Registry:
        """Make the door's certificate again, and where its address changes, a new version.

        Args:
            renewal: What the coordinator decides.
            now: The present time, with a zone.

        Raises:
            RosterError: a key can be read by others.
            CertificateError: a file is damaged, or the authority has expired.
            StorageError: the disk refuses; the certificate is the old one or the new one.
        """
        authority, authority_key = self.certificate("authority"), self._key("authority")
        before = self.federation.door
        door, more = renewal.door or before, renewal.certificate_names
        if more is None:
            more = tuple(name for name in names_of(self.certificate("door")) if name != host_of(before))
        names, days = _names(door, more), renewal.certificate_days
        made = issue(authority, authority_key, self._key("door"), names, now, days)
        following = None if door == before else self.federation.moving(door)
        write_bytes(self.path / "door.pem", certificate_to_pem(made))
        return self if following is None else self.publish(following)

    def check_certificates(self, now: datetime.datetime) -> None:
        """Check that authority and certificates are valid now, belong together, and that their keys are private.

        Raises:
            RosterError: a key can be read by others.
            CertificateError: a file is damaged or missing, of another federation, or has expired.
        """
        authority = self.certificate("authority")
        if authority.public_bytes(Encoding.DER) != self.federation.authority:
            raise CertificateError(
                str(self.path / "authority.pem"), expected="the authority that the federation's file names"
            )
        check_valid(authority, now, "certificate of the authority")
        self.signing_key()
        for name in ("authority", "door"):
            certificate = self.certificate(name)
            path = str(self.path / f"{name}.pem")
            if certificate.public_key() != self._key(name).public_key():
                raise CertificateError(path, expected=f"the certificate of {name}.key")
            if not issued_by(certificate, authority):
                raise CertificateError(path, expected="a certificate of this federation's authority")
            check_valid(
                certificate, now, f"certificate of the {name}", fix=f"cloister coordinator renew {self.path}"
            )

    def signing_key(self) -> Ed25519PrivateKey:
        """The key that signs every request to a site.

        Raises:
            RosterError: its file is missing, can be read by others, or has another key than the federation names.
        """
        path = self.path / _SIGNING
        key = load_identity(path)
        if key.public_key().public_bytes_raw() != self.federation.coordinator:
            raise RosterError(str(path), expected="the key that the federation's file names")
        return key

    def certificate(self, name: str) -> Certificate:
        """The certificate of the `authority` or the `door`.

        Raises:
            CertificateError: its file is missing or damaged.
        """
        path = self.path / f"{name}.pem"
        return read_certificate(_read(path), str(path))

    def _key(self, name: str) -> EllipticCurvePrivateKey:
        path = self.path / f"{name}.key"
        check_private(path, f"key of the {name}")
        key = key_from_pem(_read(path))
        if not isinstance(key, EllipticCurvePrivateKey):
            raise CertificateError(str(path), expected="an unencrypted private ECDSA key in PEM")
        return key


def _names(address: str, more: Sequence[str]) -> list[str]:
    """The names in the certificate of the door at `address`, each once."""
    return list(dict.fromkeys([host_of(address), *more]))


def _version_path(folder: Path, version: int) -> Path:
    return folder / f"federation-{version}.toml"


def _read_version(folder: Path, version: int) -> Federation:
    path = _version_path(folder, version)
    federation = Federation.from_toml(read_document(path, "federation"), str(path))
    if federation.version != version:
        raise RosterError("version", federation.version, expected=f"{version}, as the name of {path} says")
    return federation


def _read(path: Path) -> bytes:
    with readable(path, "file of the federation", CertificateError, "restore it from a backup"):
        return path.read_bytes()
