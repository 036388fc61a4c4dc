"""A new site's `site.toml` and `policy.toml`, written from the docstrings of their fields; changes of settings."""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
import tomllib
from collections.abc import Mapping

from cloister.clients.setup.config import SiteConfig
from cloister.privacy.ledger.policy import Policy
from cloister.protocol.errors import PlanError
from cloister.protocol.plan.settings import Section
from cloister.protocol.plan.template import to_toml


def new_settings(name: str) -> str:
    """The `site.toml` of a new site, with the meaning of each setting."""
    return _written(
        SiteConfig(
            name=name,
            data="data.jsonl",
            state="state",
            identity="identity.pem",
            policy="policy.toml",
            dataset=name,
            ledger="ledger.sqlite",
        )
    )


def new_policy() -> str:
    """The `policy.toml` of a new site, with the meaning of each demand."""
    return _written(Policy(greatest_epsilon=4.0, greatest_delta=1e-5, most_rounds=1000))


def _written(settings: Section) -> str:
    head = textwrap.wrap(" ".join((settings.__doc__ or "").split()), 108)
    return "".join(f"# {line}\n" for line in head) + "\n" + to_toml(settings, comments=True)


def with_values(text: str, values: Mapping[str, str], origin: str) -> str:
    """A TOML text in which some settings of the top level have other values; all else stays, comments too.

    Args:
        text: The TOML.
        values: Strings by key; a key that the text does not have is added.
        origin: Its file, for errors.

    Raises:
        PlanError: the text is not TOML, or one of the settings is written in a way that cannot be replaced.
    """
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError("site", origin, expected=f"valid TOML ({error})") from error
    lines = text.splitlines(keepends=True)
    end = next((at for at, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        there = [at for at in range(end) if re.match(rf"{key}\s*=", lines[at])]
        if there:
            lines[there[0]] = line
        else:
            lines.insert(0, line)
            end += 1
    after = "".join(lines)
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(after) == {**before, **values}:
            return after
    raise PlanError(
        "site",
        origin,
        expected="each of these settings on a line of its own: " + ", ".join(values),
        fix="write them so, with any value, and run it again",
    )
