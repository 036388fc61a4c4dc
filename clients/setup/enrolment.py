"""A site's part in a federation: it makes its key and its request, installs versions, and replaces its key.

| file in the site's folder | what it is |
|---|---|
| `identity.pem` | its secret key; after a rotation `identity-2.pem`, ... |
| `NAME.request` | its request, public; after a rotation `NAME-2.request`, ... |
| `site.toml`, `policy.toml` | its settings |
| `federation/1-89abcdef/` | each version that it installed: `federation.toml`, `roster.toml`, `authority.pem` |

`site.toml` names the installed version and the key that belongs to it. To install a version is to replace that one
file: everything that it names is on disk before. Nothing that an earlier version uses is removed, because a run that
has begun goes on with it (`kept.py`).

A command that was interrupted is completed by running it again: a file that is there is kept.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.clients.setup.config import SiteConfig, read_config
from cloister.clients.setup.templates import new_policy, new_settings, with_values
from cloister.protocol.errors import RosterError, StorageError
from cloister.protocol.identity.certificates import certificate_to_pem, check_authority, read_certificate
from cloister.protocol.identity.document import read_document
from cloister.protocol.identity.federation import Change, Federation
from cloister.protocol.identity.request import Request, check_contact
from cloister.protocol.identity.roster import Card, load_identity, new_identity, save_identity
from cloister.protocol.machine.storage import lock, on_disk, write_bytes

_NUMBERED = re.compile(r"(.+)-([0-9]+)")


@dataclass(frozen=True)
class Offer:
    """A version that a site may install, after every check but that of the fingerprint by a person."""

    folder: Path
    """The site's folder."""
    federation: Federation
    """The version."""
    installed: Federation | None
    """The version that is installed; None: none is."""
    changes: tuple[Change, ...]
    """What is different from the installed version; empty in the first installation, or for the installed version."""
    identity: str
    """File of the identity key that belongs to it, relative to the folder unless it is elsewhere."""


def make_request(
    folder: Path, name: str, contact: str, day: datetime.date, *, durable: bool = True
) -> tuple[Request, Path]:
    """Make a site's key, settings and request, as far as they are not there.

    Args:
        folder: The site's folder; made if missing, for its owner only.
        name: The site's name.
        contact: Who answers for the site, and how to reach them.
        day: Today.
        durable: Sync each file before this returns.

    Returns:
        The request, and its file. A request that is there is returned again.

    Raises:
        RosterError: a value is not allowed, a key is damaged or can be read by others, or the folder is another site's.
        StorageError: the disk refuses.
    """
    path = folder / f"{name}.request"
    identity = new_identity()
    Card.of(name, identity)  # refuses a wrong name before anything is written
    check_contact(contact)
    settings = folder / "site.toml"
    if os.path.lexists(settings) and (there := read_config(settings).name) != name:
        raise RosterError(
            "--name", name, expected=f"{there}, as {settings} says", fix="or choose another --folder"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            "--folder", str(folder), expected=f"a folder that can be made ({error.strerror})"
        ) from error
    identity_file = folder / "identity.pem"
    if not os.path.lexists(identity_file):
        save_identity(identity, identity_file, durable=durable)
    identity = load_identity(identity_file)
    for template, text in (("site.toml", new_settings(name)), ("policy.toml", new_policy())):
        if not os.path.lexists(folder / template):
            write_bytes(folder / template, text.encode(), durable=durable)
    if not os.path.lexists(path):
        made = Request.of(name, identity, contact, day)
        write_bytes(path, made.to_toml().encode(), durable=durable)
    request = _read_request(path)
    if (request.key, request.contact) != (identity.public_key().public_bytes_raw(), contact):
        raise RosterError(
            "request",
            str(path),
            expected="one with the key in this folder and this --contact",
            fix="keep it if it was sent; else remove it, and run this again",
        )
    return request, path


def make_rotation(folder: Path, day: datetime.date) -> tuple[Request, Path]:
    """Make a new key for a site, and the request, signed with the old key, to replace the old one.

    The new key is used once a version with it is installed.

    Args:
        folder: The site's folder.
        day: Today.

    Returns:
        The request, and its file. One that is there and was not installed is returned again.

    Raises:
        RosterError: no federation is installed, or a key is damaged or can be read by others.
        StorageError: the disk refuses.
    """
    config = read_config(folder / "site.toml")
    installed = read_installed(config)
    entry = installed.site(config.name) if installed else None
    if entry is None:
        raise RosterError(
            "federation", expected="an installed one that has this site", fix="cloister site install FILE"
        )
    old = load_identity(Path(config.identity))
    if old.public_key().public_bytes_raw() != entry.key:
        raise RosterError(
            "identity", config.identity, expected="the key that the installed federation has for it"
        )
    identity_file = _next(Path(config.identity))
    if not os.path.lexists(identity_file):
        save_identity(new_identity(), identity_file)
    identity = load_identity(identity_file)
    path = folder / f"{config.name}-{_numbered(identity_file)[1]}.request"
    if not os.path.lexists(path):
        made = Request.of(config.name, identity, entry.contact, day, replaces=old)
        write_bytes(path, made.to_toml().encode())
    request = _read_request(path)
    if request.key != identity.public_key().public_bytes_raw() or not request.rotates(entry.key):
        raise RosterError(
            "request", str(path), expected=f"one of {identity_file.name} that the installed key signed"
        )
    return request, path


def consider(folder: Path, federation: Federation, now: datetime.datetime) -> Offer:
    """Check, at a site, a version that it may install; nothing is written.

    1. The version follows the installed one, or is it.
    2. The site's own request is in it, unchanged: the installed one, or one that this site made.
    3. The private key of that request is in the site's folder, readable by its owner only.
    4. The certificate of the coordinator's authority is valid.

    Args:
        folder: The site's folder.
        federation: The version.
        now: The present time, with a zone.

    Raises:
        CloisterError: a check fails.
    """
    config = read_config(folder / "site.toml")
    installed = read_installed(config)
    changes: tuple[Change, ...] = ()
    if installed is not None and installed.fingerprint != federation.fingerprint:  # 1
        changes = federation.changes_since(installed)
    entry = federation.site(config.name)
    if entry is None:
        raise RosterError(
            "federation",
            f"{federation.name}, version {federation.version}",
            expected=f"one that has this site, {config.name}",
            fix="this site is not, or no longer, a member: ask the coordinator",
        )
    identity, own = _own(folder, config, installed, entry)  # 3
    if entry != own:  # 2
        raise RosterError(
            f"request of {config.name} in the federation",
            entry.fingerprint.hex(),
            expected=f"{own.fingerprint.hex()}, the request that this site made",
            fix="do not install it: ask the coordinator which request of this site was approved",
        )
    check_authority(read_certificate(federation.authority, "authority"), now)  # 4
    return Offer(folder, federation, installed, changes, identity)


def install(offer: Offer, *, durable: bool = True) -> Path:
    """Install a version that a person has agreed to; idempotent.

    Args:
        offer: The version.
        durable: Sync each file before this returns.

    Returns:
        The file of the installed federation.

    Raises:
        PlanError: `site.toml` cannot be changed.
        StorageError: the disk refuses; the installed version stays as it was.
    """
    folder, federation = offer.folder, offer.federation
    settings = folder / "site.toml"
    relative = Path("federation") / f"{federation.version}-{federation.fingerprint.hex()[:8]}"
    contents = {
        "federation.toml": federation.to_toml().encode(),
        "roster.toml": federation.roster.to_toml().encode(),
        "authority.pem": certificate_to_pem(read_certificate(federation.authority, "authority")),
    }
    values = {
        "federation": str(relative / "federation.toml"),
        "coordinator": federation.coordinator.hex(),
        "roster": str(relative / "roster.toml"),
        "roster_hash": federation.roster.hash.hex(),
        "identity": offer.identity,
    }
    text = settings.read_text(encoding="utf-8")
    changed = with_values(text, values, str(settings))
    (folder / "federation").mkdir(mode=0o700, exist_ok=True)
    (folder / relative).mkdir(mode=0o700, exist_ok=True)
    for name, content in contents.items():
        path = folder / relative / name
        if not path.exists() or path.read_bytes() != content:
            write_bytes(path, content, durable=durable)
    if changed != text:
        write_bytes(settings, changed.encode(), durable=durable)
    return folder / relative / "federation.toml"


def identities(config: SiteConfig) -> Iterator[Ed25519PrivateKey]:
    """The keys that the coordinator may know the site by: the installed one, then that of a rotation that was made.

    Raises:
        RosterError: a key is missing or damaged, or can be read by others.
    """
    path = Path(config.identity)
    yield load_identity(path)
    if _next(path).exists():
        yield load_identity(_next(path))


def read_installed(config: SiteConfig) -> Federation | None:
    """The version that is installed.

    Raises:
        RosterError: its file was damaged, or `site.toml` pins another roster or coordinator.
    """
    if not config.federation:
        return None
    path = Path(config.federation)
    federation = Federation.from_toml(read_document(path, "federation"), str(path))
    for field, value in (("roster_hash", federation.roster.hash), ("coordinator", federation.coordinator)):
        if (here := getattr(config, field)) != value.hex():
            raise RosterError(field, here, expected=f"{value.hex()}, as in the installed {path}")
    return federation


def must_be_installed(config: SiteConfig) -> Federation:
    """The version that is installed.

    Raises:
        RosterError: none is; or as for `read_installed`.
    """
    federation = read_installed(config)
    if federation is None:
        raise RosterError(
            "federation",
            config.federation,
            expected="the file of an installed federation",
            fix="install it: cloister site install FILE",
        )
    return federation


def take(config: SiteConfig) -> IO[bytes]:
    """Take a site for this process, until the returned file is closed; its state folder is made.

    Raises:
        StorageError: another process serves it, or the disk refuses.
    """
    with on_disk(config.folder):
        config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return lock(config.folder / "lock", "a site that no other process serves")


def _own(
    folder: Path, config: SiteConfig, installed: Federation | None, entry: Request
) -> tuple[str, Request]:
    """The key that belongs to the site's entry in a version, as `site.toml` names it, and the request with it.

    It is the present one, or the next one, if that of a rotation was made and the entry has it.

    Raises:
        RosterError: the key or the request is missing, damaged, can be read by others, or they do not belong together.
    """
    identity = Path(config.identity or folder / "identity.pem")
    following = _next(identity)
    if installed is None:
        own = _read_request(folder / f"{config.name}.request")
    elif following.exists() and _public(following) == entry.key:
        identity = following
        own = _read_request(folder / f"{config.name}-{_numbered(following)[1]}.request")
    else:
        present = installed.site(config.name)
        if present is None:
            raise RosterError("installed federation", expected=f"one that has this site, {config.name}")
        own = present
    if _public(identity) != own.key:
        raise RosterError("identity", str(identity), expected="the key of the request that this site made")
    return str(identity.relative_to(folder) if identity.is_relative_to(folder) else identity), own


def _public(path: Path) -> bytes:
    """The public key of an identity."""
    return load_identity(path).public_key().public_bytes_raw()


def _read_request(path: Path) -> Request:
    return Request.from_toml(read_document(path, "request"), str(path))


def _next(path: Path) -> Path:
    """Where the key after one is kept: `identity.pem`, then `identity-2.pem`."""
    stem, number = _numbered(path)
    return path.with_name(f"{stem}-{number + 1}{path.suffix}")


def _numbered(path: Path) -> tuple[str, int]:
    found = _NUMBERED.fullmatch(path.stem)
    return (found[1], int(found[2])) if found else (path.stem, 1)
