"""Installed packages that a plan names: found by their entry points, and compared by version and files before import.

No code comes from another party. A plan names a package, its version and the hash of its files; each party compares
them with what is installed on its own machine, and imports nothing of the package before.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from cloister.protocol.errors import PackageError

_OF_THE_INSTALLATION = (
    *("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"),
    *("uv_cache.json", "uv_build.json"),
)
"""The files of a package's metadata that tell how and where it was installed; others are the wheel's."""


class Installed(NamedTuple):
    """A package that is installed."""

    version: str
    sha256: str
    """SHA-256, in hex, over the paths and contents of its files, sorted by path, but compiled ones (`.pyc`), scripts,
    and what tells where it is installed."""
    editable: bool
    """Whether it is installed in place, so that its files may change under a running process."""


def installed(name: str, field: str = "package") -> Installed:
    """What is installed under a name. Its files are read; nothing is imported. What it depends on is not covered.

    Args:
        name: The package.
        field: The field of a plan that names it.

    Raises:
        PackageError: there is no such package, or a file of it cannot be read.
    """
    found = _distribution(field, name)
    digest = hashlib.sha256()
    if not (files := _files(found)):
        raise PackageError(field, name, expected="installed files", fix="install it again")
    try:
        for path, file in files:
            content = file.read_bytes()
            digest.update(f"{path}\0{len(content)}\0".encode() + content)
    except OSError as error:
        expected = f"a package with files that can be read ({error})"
        raise PackageError(field, name, expected=expected, fix="install it again") from error
    return Installed(found.version, digest.hexdigest(), _is_editable(found))


def load(field: str, group: str, name: str, wanted: tuple[str, str]) -> Any:
    """What a package registers under a name, imported after its files were compared.

    Args:
        field: The field of a plan that names it.
        group: Group of entry points, such as `cloister.tasks`.
        name: PACKAGE:NAME.
        wanted: Version and SHA-256 of the package's files.

    Raises:
        PackageError: another version or other files are installed, or the package registers no such name; or the name
            is imported from elsewhere than those files.
    """
    return _loaded(field, group, name, wanted)


_PINS: dict[str, tuple[str, str]] = {}
"""The version and files of each package that this process has imported."""


@lru_cache(maxsize=64)
def _loaded(field: str, group: str, named: str, wanted: tuple[str, str]) -> Any:
    package, _, name = named.partition(":")
    check(field, package, wanted)
    if _PINS.setdefault(package, wanted) != wanted:
        raise PackageError(
            field,
            f"{package} {wanted[0]}",
            expected="the files that this process has imported, because Python imports a module once",
            fix="start the process again",
        )
    found = _distribution(field, package)
    entry = next((each for each in found.entry_points if (each.group, each.name) == (group, name)), None)
    if entry is None:
        known = ", ".join(each.name for each in found.entry_points if each.group == group) or "none"
        raise PackageError(field, named, expected=f"a name that {package} registers in {group} ({known})")
    return _imported(field, entry, found)


def check(field: str, package: str, wanted: tuple[str, str]) -> Installed:
    """Compare a package with the version and hash that a plan names; imports nothing.

    Raises:
        PackageError: it is absent or another one.
    """
    has = installed(package, field)
    if (has.version, has.sha256) != wanted:
        raise PackageError(
            field,
            f"{package} {wanted[0]} with the files {wanted[1][:16]}...",
            expected=f"what is installed: {has.version} with the files {has.sha256[:16]}...",
            fix="install the version of the plan, or pin the plan again: cloister plan pin PLAN",
        )
    return has


def _imported(field: str, entry: EntryPoint, found: Distribution) -> Any:
    value = entry.load()
    module = Path(str(__import__(entry.module, fromlist=["_"]).__file__)).resolve()
    if not _is_editable(found) and module not in {file.resolve() for _, file in _files(found)}:
        raise PackageError(
            field, entry.value, expected="a module among the installed files of its package", fix=str(module)
        )
    return value


def _distribution(field: str, name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        # No command: an index may have a stranger's package of that name.
        raise PackageError(
            field,
            name,
            expected="an installed package",
            fix="install the wheel that the plan was pinned with",
        ) from None


def _files(found: Distribution) -> list[tuple[str, Path]]:
    """The files that a package brings, by their paths in the installation; of an editable one those of its folder."""
    if (folder := _folder_of(found)) is not None:
        inside = (file for file in folder.rglob("*.py") if ".venv" not in file.parts)
        return sorted((file.relative_to(folder).as_posix(), file) for file in inside)
    listed = []
    for path in found.files or ():
        # Scripts begin with the place of Python.
        script = path.parts[0] == ".." and path.parent.name in ("bin", "Scripts")
        own = (
            len(path.parts) == 2
            and path.parts[0].endswith(".dist-info")
            and path.name in _OF_THE_INSTALLATION
        )
        if not (script or own or path.suffix == ".pyc"):
            listed.append((path.as_posix(), Path(str(path.locate()))))
    return sorted(listed)


def _is_editable(found: Distribution) -> bool:
    """Whether its files may change in place: it is installed so, or is a folder of sources, which has no record."""
    return _folder_of(found) is not None or found.read_text("RECORD") is None


def _folder_of(found: Distribution) -> Path | None:
    """The folder of a package that is installed in place."""
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not (isinstance(origin, dict) and origin.get("dir_info", {}).get("editable")):
        return None
    return Path(url2pathname(urlsplit(str(origin.get("url", ""))).path))
