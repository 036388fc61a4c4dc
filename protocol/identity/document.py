"""Text files that parties send each other, such as a site's request: read by one rule.

A document is TOML. Mail may change its line ends, and put a mark at its beginning or empty lines at its end; otherwise
it must be, character by character, what the program writes for its content. So nothing in it is ignored: no unknown
key, no comment, no second spelling of a value.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloister.protocol.errors import RosterError
from cloister.protocol.machine.storage import readable
from cloister.protocol.plan.threshold import LARGEST

LONGEST = 64 * 2**20  # bytes; a federation of 10,000 sites takes 8 MB
_MOST_LINES = 16 * LARGEST  # a site of a federation takes ten
_LONGEST_LINE = 2**20  # characters; the list of 10,000 revoked keys takes half of it
_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_LINE = re.compile(rf"(?:\[\[site\]\]|[a-z]+ = (?:[0-9]{{1,10}}|{_TEXT}|\[(?:{_TEXT}(?:, {_TEXT})*)?\]))?\s*")


def read_document(path: Path, what: str) -> str:
    """The text of the document at `path`.

    Args:
        path: Its file.
        what: What it should be, for errors, such as `request`.

    Raises:
        RosterError: the file is missing, unreadable, too large or not UTF-8.
    """
    with readable(path, what, RosterError), path.open("rb") as file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise RosterError(what, str(path), expected=f"a file of at most {LONGEST} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RosterError(what, str(path), expected="text in UTF-8") from None


def tree_of(text: str, what: str, origin: str) -> dict[str, Any]:
    """The tables of a document.

    The text is only parsed if its lines have the shape of those that `table` writes: nested or dotted TOML of a few
    hundred kilobytes can cost minutes and gigabytes.

    Raises:
        RosterError: the text is not such TOML.
    """
    lines = text.split("\n", _MOST_LINES)  # the last one has all that follow
    for number, line in enumerate(lines, 1):
        if len(line) > _LONGEST_LINE or not _LINE.fullmatch(line):
            raise changed(what, origin, f"line {number} is not one that the program writes")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise changed(what, origin, f"no valid TOML: {error}") from error


def check_exact(text: str, written: str, what: str, origin: str) -> None:
    """Check that a text is what the program writes for the content that was read from it.

    Raises:
        RosterError: it is not.
    """
    if "\n".join(text.split("\r\n")).strip() != written.strip():
        raise changed(what, origin, "its text is not the one that the program writes for these values")


def changed(what: str, origin: str, why: str) -> RosterError:
    """The error for a document that is torn or was edited."""
    return RosterError(
        what, origin, expected=f"the whole file, unchanged ({why})", fix="ask its sender for the file again"
    )


def table(values: Mapping[str, str | int | list[str]]) -> str:
    """Lines of TOML, one for each value."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def to_base64(data: bytes) -> str:
    """Bytes as base64 (RFC 4648, section 4)."""
    return base64.b64encode(data).decode()


def from_base64(text: str, what: str) -> bytes:
    """Read base64 that `to_base64` wrote.

    Raises:
        RosterError: it is not the one encoding of some bytes.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if to_base64(data) != text:  # also where unused bits of the last digit are set
        raise RosterError(what, text, expected="base64")
    return data
