"""TOML of a site and of its policy: the first wrong field in one line, and the key that was probably meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, model_validator

from cloister.clients.setup.config import read_config
from cloister.privacy.ledger.policy import load_policy
from cloister.protocol.errors import CloisterError, PlanError, PolicyError
from cloister.protocol.plan.settings import InWords, Section, Settings
from cloister.tests.tools.raises import raises

SITE = 'name = "a"\ndata = "d.jsonl"\nstate = "s"\n'
DOORS: dict[str, tuple[Callable[[Path], object], type[CloisterError]]] = {
    "site": (read_config, PlanError),
    "policy": (load_policy, PolicyError),
}


def test_a_sites_data_is_no_file_of_the_folder_in_which_a_command_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site" / "site.toml"
    site.parent.mkdir()
    site.write_text(SITE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"text": "of somebody else"}\n')
    assert read_config(site).data == str(tmp_path / "site" / "d.jsonl")
    site.write_text(SITE.replace("d.jsonl", "owner/name"))
    assert read_config(site.parent).data == "owner/name", "a name on the hub, in the site.toml of a folder"


def refusal(path: Path, door: str, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return refusal_of(path, door)


def refusal_of(path: Path, door: str) -> str:
    load, error = DOORS[door]
    with pytest.raises(CloisterError) as caught:
        load(path)
    assert type(caught.value) is error
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


@pytest.mark.parametrize(
    ("door", "text", "key", "meant"),
    [
        ("site", SITE + 'roster_hsah = ""', "roster_hsah", "roster_hash"),
        ("site", SITE + "minimal_cohort = 4", "minimal_cohort", "minimum_cohort"),
        ("policy", "least_cohorts = 4", "least_cohorts", "least_cohort"),
        ("policy", "secure_require = true", "secure_require", "secure_required"),
    ],
)
def test_a_wrong_key_gets_did_you_mean(path: Path, door: str, text: str, key: str, meant: str) -> None:
    line = refusal(path, door, text)
    assert line.startswith(f"{path}: {key}: expected one of the keys (")
    assert line.endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("door", DOORS)
def test_a_key_like_no_other_gets_the_list(path: Path, door: str) -> None:
    line = refusal(path, door, "zzz = 1" if door == "policy" else SITE + "zzz = 1")
    assert line.endswith(")")
    assert "did you mean" not in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "a"\nstate = "s"', "data: expected a value; none is given"),
        (SITE + "minimum_cohort = 2", "minimum_cohort is 2: expected greater than or equal to 3"),
        (SITE + 'secure = "no"', "secure is 'no': expected a boolean"),
        ('name = ""\ndata = "d"\nstate = "s"', "name is '': expected at least 1 character"),
    ],
)
def test_a_wrong_field_of_a_site_is_named_with_its_file(path: Path, text: str, said: str) -> None:
    assert refusal(path, "site", text) == f"{path}: {said}"


@pytest.mark.parametrize("door", DOORS)
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, door: str) -> None:
    for name, content, part in [
        ("broken.toml", b"name = ", "valid TOML"),
        ("binary.toml", b"\xff\xfe\x00", "readable TOML"),
        ("date.toml", b"name = 2020-01-01", "no dates"),
        ("empty.toml", b" \n", "this file is empty"),
    ]:
        (tmp_path / name).write_bytes(content)
        assert part in refusal_of(tmp_path / name, door)
    assert "an existing TOML file" in refusal_of(tmp_path / "missing.toml", door)
    assert "a readable TOML file" in refusal_of(tmp_path, door)


class Inner(Section):
    depth: int = 0


class Outer(Section):
    """Any settings: what is read here is not known to `settings.py`."""

    title: Annotated[str, Field(pattern="^[a-z]+$"), InWords("small letters")] = "a"
    inner: tuple[Inner, ...] = ()
    below: Inner | None = None

    @model_validator(mode="after")
    def _not_sealed(self) -> Outer:
        if self.title == "sealed":
            raise PolicyError("title", self.title, expected="another", fix="rename it")
        return self


OUTER = Settings(Outer, "letter", PolicyError)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"title": "A"}', "title is 'A': expected small letters"),
        (
            '{"inner": [{"depth": 1}, {"dept": 1}]}',
            "inner[1].dept: expected one of the keys of [inner] (depth); did you mean inner[1].depth?",
        ),
        ('{"inner": [{"depth": 1}, {"depth": "1"}]}', "inner[1].depth is '1': expected an integer"),
        ('{"depth": 1}', "depth: expected one of the keys (below, inner, title); did you mean inner.depth?"),
        ('{"below": {"titel": 1}}', "below.titel: expected one of the keys of [below] (depth)"),
        ('{"below": 3}', "below is 3: expected a section with keys of its own"),
        ("[]", "letter is []: expected a section with keys of its own"),
        ('{"title": "sealed"}', "title is 'sealed': expected another; rename it"),
    ],
)
def test_a_complaint_is_one_line_with_or_without_a_file(text: str, line: str) -> None:
    for origin, begin in (("", ""), ("x.toml", "x.toml: ")):
        with pytest.raises(PolicyError) as caught:
            OUTER.from_json(text, origin=origin)
        assert str(caught.value) == begin + line


def test_overrides_are_applied_in_order_over_the_text() -> None:
    text = OUTER.to_json('title = "a"', ["below.depth=1", "below.depth = 2"], origin="x")
    assert OUTER.from_json(text) == Outer(title="a", below=Inner(depth=2))
    with raises(PolicyError, "--set", says="single value"):
        OUTER.to_json('title = "a"', ["title.depth=1"], origin="x")
