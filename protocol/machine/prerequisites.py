"""What `cloister doctor` checks of a party's own machine: releases of what is installed, and free space."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import ssl
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from cloister.protocol.errors import CloisterError, MachineError

_ENOUGH = 10**9
"""Bytes that have to be free where no plan says what a run needs."""
_SHOWN = ("cloister", "flwr", "grpcio")
"""Packages whose releases parties compare."""
_INSTALL = "install cloister again with its dependencies, such as pip install --upgrade cloister"


def releases(packages: Iterable[str]) -> dict[str, str]:
    """The releases of Python and of some packages, by name."""
    return {"python": platform.python_version(), **{name: _release(name) or "absent" for name in packages}}


def check_releases() -> str:
    """Check every package against the ranges in cloister's metadata.

    Returns:
        The releases, in one line.

    Raises:
        MachineError: a package is absent, or a release is outside its range.
    """
    try:
        asked = requires("cloister") or []
    except PackageNotFoundError:
        raise MachineError("cloister", expected="an installed package", fix=_INSTALL) from None
    for requirement in map(Requirement, asked):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        has = _release(requirement.name)
        if has is None or not requirement.specifier.contains(has, prereleases=True):
            raise MachineError(
                f"release of {requirement.name}",
                has or "absent",
                expected=str(requirement.specifier) or "any",
                fix=f"install it: pip install '{requirement.name}{requirement.specifier}'",
            )
    found = ", ".join(f"{name} {release}" for name, release in releases(_SHOWN).items())
    libc = " ".join(platform.libc_ver()).strip() or "an unknown libc"
    return f"{found}, {libc}, {ssl.OPENSSL_VERSION}"


def check_extra(package: str, extra: str, kind: type[CloisterError], *about: object) -> None:
    """Check that a package of an extra is installed.

    Args:
        package: Its name, as it is imported.
        extra: The extra of `cloister` that has it.
        kind: The class of the error.
        about: What needs it: the error's field, and its value if it has one.

    Raises:
        CloisterError: of class `kind`: it is not.
    """
    if importlib.util.find_spec(package) is None:
        expected = f"the package {package}, which is not installed"
        raise kind(*map(str, about), expected=expected, fix=f"pip install 'cloister[{extra}]'")


def check_space(folder: Path, needed: int | None, why: str) -> str:
    """Check that a folder can be written to, and that its file system has free space.

    Args:
        folder: The folder; where it is missing, the one in which it will be made.
        needed: Bytes that have to be free; None: no plan says it, and a small run is taken.
        why: What they are for.

    Returns:
        The free space, in one line.

    Raises:
        MachineError: it has less, or cannot be written to.
    """
    if needed is None:
        needed, why = _ENOUGH, "needed by a small run; --plan says more exactly"
    there = folder.absolute()
    try:
        there = next(each for each in (there, *there.parents) if each.exists())
        free = shutil.disk_usage(there).free
        if free >= needed:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"0")
    except OSError as error:
        raise MachineError(
            "folder",
            str(folder),
            expected=f"one that can be written to ({error.strerror})",
            fix=f"give the user of cloister the right to write to {there}",
        ) from error
    if free < needed:
        raise MachineError(
            "free space",
            f"{size(free)} at {there}",
            expected=f"{size(needed)} {why}",
            fix="free space, or move the folder to a larger file system",
        )
    return f"{size(free)} free at {there}; {size(needed)} {why}"


def size(count: float) -> str:
    """A number of bytes, for people: three digits and a unit."""
    for name in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {name}"
        count /= 1000
    return f"{count:.3g} TB"


def _release(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
