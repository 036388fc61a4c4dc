"""Settings from TOML or JSON: a frozen section, or one line that says what is wrong.

A plan, a site's configuration and a site's policy are sections: pydantic models that are frozen, strict about types and
closed to unknown keys. `Settings` reads any of them. A refusal is one `CloisterError` about the first wrong field; it
names the field, its value and what was expected, and for an unknown key the nearest known one ("did you mean").

Refused: pydantic's own report, which spans several lines and names Python types.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from cloister.protocol.errors import CloisterError


class Section(BaseModel):
    """A group of settings: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


@dataclass(frozen=True)
class InWords:
    """What a text must be, as annotation of a field with a pattern or a choice: errors show this instead."""

    expected: str
    """Such as `64 hexadecimal digits`."""


Because = Literal["charge", "mask", "definition"]
"""Why settings are refused together. `charge`: something would be released that no charge covers, or what is charged
would not be what is done. `mask`: the secure sum would not hide a vector, or could not be opened. `definition`: the
settings contradict what they mean, or one has no effect."""

_UNSET = ((None,), ("",), ((),))


@dataclass(frozen=True)
class Only:
    """Annotation of a field that has an effect, and is valid, only where another field has certain values."""

    field: str
    """The other field, such as `privacy.unit`."""
    values: tuple[Any, ...] = ()
    """The values with which this field is valid; empty: any but those of `but`."""
    but: tuple[Any, ...] = ()
    """Values with which it is not."""
    begins: str = ""
    """What a text begins with, instead of values."""
    required: str = ""
    """An example, such as `0.1`, of the value that this field must have then; empty: it may have none."""
    when: tuple[Any, ...] = ()
    """The values of this field that are only valid then; empty: every value but its default."""
    unless: str = ""
    """A third field, which makes them valid too where it is set."""
    because: Because = "definition"
    why: str = ""
    """The reason, which an error gives. A field that has one is refused, and never dropped by an override."""
    fix: str = ""
    """What to do; empty: what follows from the fields."""

    def applies(self, value: Any, default: Any) -> bool:
        """Whether a value of this field is one that the condition is for."""
        return value in self.when if self.when else value != default

    def holds(self, value: Any) -> bool:
        """Whether the field is valid.

        Args:
            value: That of the other field.
        """
        if self.begins:
            return str(value).startswith(self.begins)
        return value in self.values if self.values else value not in self.but

    @property
    def words(self) -> str:
        """The condition, as an error or a page says it."""
        if self.begins:
            return f"a {self.begins} name in {self.field}"
        if self.values in _UNSET or self.but in _UNSET:
            return f"{self.field} {'not set' if self.values else 'set'}"
        values = " or ".join(json.dumps(value) for value in self.values or self.but)
        unless = f", or {self.unless} set" if self.unless else ""
        return (f"{self.field} = {values}" if self.values else f"{self.field} other than {values}") + unless

    @property
    def remedy(self) -> str:
        """What to do so that the condition holds."""
        if self.values in _UNSET:
            return f"remove {self.field}"
        if self.but in _UNSET:
            return f"set {self.field}" if self.but == ("",) else f"add [{self.field}]"
        return f"set {self.words}"


S = TypeVar("S", bound=Section)

Overrides: TypeAlias = Iterable[str] | Mapping[str, Any]
"""Values of some fields: texts such as `local.steps=50`, or values by field, of which None stands for the default."""

_KINDS: dict[int | str, str] = {
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}
"""Kinds of values of a field that may have several, as Pydantic calls them, and in words."""


@dataclass(frozen=True)
class Settings(Generic[S]):
    """Reads sections of one class.

    A validator of the class may raise `error` itself; other exceptions of validators become `error` here.
    """

    section: type[S]
    """The class to read."""
    name: str
    """What errors call the whole, such as `plan`."""
    error: type[CloisterError]
    """Class of every refusal."""

    def load(self, path: Path) -> S:
        """Read the TOML file at `path`; an error about a field begins with the path.

        Raises:
            CloisterError: of class `error`: the file cannot be read, is blank or no TOML, or a field is wrong.
        """
        return self.from_json(self.to_json(self.read(path), origin=str(path)), origin=str(path))

    def read(self, path: Path) -> str:
        """The text of the TOML file at `path`.

        Raises:
            CloisterError: of class `error`: the file does not exist, cannot be read, is not UTF-8, or is blank.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise self.error(self.name, str(path), expected="an existing TOML file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(self.name, str(path), expected=f"a readable TOML file ({error})") from error
        if not text.strip():
            raise self.error(self.name, str(path), expected="a TOML file with settings; this file is empty")
        return text

    def to_json(self, text: str, overrides: Overrides = (), *, origin: str) -> str:
        """TOML text as JSON, with overrides on top.

        Args:
            text: The TOML.
            overrides: What `--set` was given, in order, or values by field.
            origin: Where the text is from, for errors.

        Raises:
            CloisterError: of class `error`: the text is no TOML, has a date, or an override cannot be applied.
        """
        try:
            tree: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self.error(self.name, origin, expected=f"valid TOML ({error})") from error
        self.put(tree, overrides)
        return self.text(tree, origin)

    def put(self, tree: dict[str, Any], overrides: Overrides) -> None:
        """Set fields of a tree of values; None removes one, so that it has its default.

        Raises:
            CloisterError: of class `error`: one cannot be set.
        """
        for option, field, value in self._values(overrides):
            self._put(tree, option, field, value)

    def text(self, tree: Mapping[str, Any], *shown: str) -> str:
        """Values as JSON: those that JSON has, sections, paths, and numbers of NumPy.

        Raises:
            CloisterError: of class `error`, with `shown` as the value: there are others.
        """
        try:
            return json.dumps(dict(tree), default=_plain)
        except (AttributeError, TypeError, ValueError):
            raise self.error(
                self.name, *shown, expected="only numbers, strings, booleans and lists as values, no dates"
            ) from None

    def from_json(self, text: str | bytes, *, origin: str = "") -> S:
        """Read a section from JSON.

        Args:
            text: The JSON, in UTF-8 where it is bytes.
            origin: The file that an error about a field names; empty: none.

        Raises:
            CloisterError: of class `error`: the text is no JSON, or the first field that is wrong.
        """
        try:
            return self.section.model_validate_json(text)
        except (ValidationError, self.error) as error:  # the second is of a validator of the class
            found = self.first(error) if isinstance(error, ValidationError) else error
            raise self.error.of(found, f"{origin}: {found.field}" if origin else "") from error

    def _values(self, overrides: Overrides) -> Iterator[tuple[str, str, Any]]:
        """Each override as it was given, its field, and its value; a value of an option that is no TOML is text."""
        if isinstance(overrides, Mapping):
            yield from ((field, field, value) for field, value in overrides.items())
            return
        for override in overrides:
            field, equals, text = override.partition("=")
            if not equals:
                raise self._wrong(override)
            try:
                value = tomllib.loads(f"value = {text}")["value"]
            except tomllib.TOMLDecodeError:
                value = text.strip()  # a bare word is a string: --set model.name=gpt2
            yield override, field, value

    def _wrong(self, option: str) -> CloisterError:
        return self.error("--set", option, expected="section.key=value, such as local.steps=50")

    def _put(self, tree: dict[str, Any], option: str, field: str, value: Any) -> None:
        keys = [key.strip() for key in field.split(".")]
        if len(keys) < 2 or not all(keys):
            raise self._wrong(option)
        for key in keys[:-1]:
            below = tree.setdefault(key, {})
            if not isinstance(below, dict):
                raise self.error(
                    "--set", option, expected=f"a section before the last dot; {key} is a single value"
                )
            tree = below
        if value is None:
            tree.pop(keys[-1], None)
        else:
            tree[keys[-1]] = value

    def first(self, invalid: ValidationError) -> CloisterError:
        """Pydantic's first complaint in the section's words: field, its value if that helps, what was expected, fix."""
        errors = invalid.errors(include_url=False)
        error = errors[0]
        location, value = error["loc"], error["input"]
        # Pydantic names each kind of value that a field may have as if it were a key of the field.
        kinds = [each["loc"][-1] for each in errors if location and each["loc"][:-1] == location[:-1]]
        if len(kinds) > 1 and all(kind in _KINDS for kind in kinds):
            told = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
            return self.error(_dotted(location[:-1]), value, expected=told)
        if len(kinds) > 1 and len(location) > 1 and (words := self._in_words(location[:-1])):
            return self.error(_dotted(location[:-1]), value, expected=words)
        field = _dotted(location)
        match error["type"]:
            case "extra_forbidden":
                expected, fix = self._known(location)
                return self.error(field, expected=expected, fix=fix)
            case "json_invalid":
                return self.error(self.name, expected=f"whole JSON in UTF-8 ({error['ctx']['error']})")
            case "missing":
                return self.error(field, expected="a value; none is given")
            case "model_type":
                return self.error(field or self.name, value, expected="a section with keys of its own")
            case "string_pattern_mismatch" | "string_too_short" | "literal_error" if words := self._in_words(
                location
            ):
                return self.error(field, value, expected=words)
        return self.error(field or self.name, value, expected=in_words(error["msg"]))

    def _known(self, location: tuple[int | str, ...]) -> tuple[str, str]:
        """The keys that are known where an unknown one is, and the known key that was probably meant."""
        path = _path(location)
        known = {at: set(section.model_fields) for at, section in _sections(self.section, ())}
        here, name = known[path], str(location[-1])
        nearest = difflib.get_close_matches(name, here, n=1)
        meant = [_dotted((*location[:-1], key)) for key in nearest]
        meant += [_dotted((*at, name)) for at, names in known.items() if name in names]
        if path:
            where = f"the keys of [{'.'.join(path)}]"
        else:
            where = "the sections" if all((key,) in known for key in here) else "the keys"
        return f"one of {where} ({', '.join(sorted(here))})", f"did you mean {meant[0]}?" if meant else ""

    def _in_words(self, location: tuple[int | str, ...]) -> str:
        section = dict(_sections(self.section, ())).get(_path(location))
        field = section.model_fields.get(str(location[-1])) if section else None
        return (
            next((each.expected for each in field.metadata if isinstance(each, InWords)), "") if field else ""
        )


def _plain(value: Any) -> object:
    """What JSON has for a value that it does not know."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, PurePath):
        return str(value)
    return value.item()  # of NumPy's numbers; others have none, or several values


def in_words(message: str) -> str:
    """What pydantic expects, of "Input should be a valid integer" or "String should have at most 64 characters"."""
    message = re.sub(r"^\w+ should (be|have) ", "", message)
    message = re.sub(r"^a valid (?=(\w))", lambda match: "an " if match[1] in "aeiou" else "a ", message)
    return message[0].lower() + message[1:]


def _path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The sections that a place is in, without the numbers of those in a list."""
    return tuple(part for part in location[:-1] if isinstance(part, str))


def _dotted(location: tuple[int | str, ...]) -> str:
    """A place in the settings, such as `simulation.profiles[1].speed`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _sections(
    section: type[BaseModel], path: tuple[str, ...]
) -> Iterable[tuple[tuple[str, ...], type[BaseModel]]]:
    """A section and every section below it, by their path."""
    yield path, section
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind, (*path, name))
