"""A plan as TOML is read back to the same plan, and says of each field what it means, as `docs/plan.md` does."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.protocol.plan.template import to_toml
from cloister.tests.pages.plan_page import to_page
from cloister.tests.tools.command import done

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plan.md"
SHIPPED = sorted(Path(str(files("cloister.protocol.plan.shipped"))).glob("*.toml"))
FULL = """
[data]
classes = ["a \\u007f \\"b\\"", "é\\n"]
task = "classify"
class_weights = [1.5, 1e-3]
[aggregation]
ring_bits = 8
[aggregation.compression]
first_scale = 1e-5
[server.gate]
norm = 2.0
[[simulation.profiles]]
share = 0.25
[[simulation.profiles]]
share = 0.5
[simulation.profiles.mesh]
shard = 2
[faults]
share = 0.125
[faults.poison]
share = 0.5
kind = "sign-flip"
"""


def fields() -> list[tuple[str, str]]:
    """The section of each field that has a value, as its schema names it, and its name."""
    schema = Plan.model_json_schema()
    return [
        (section, name)
        for section, each in schema["$defs"].items()
        for name, field in each["properties"].items()
        if "Section" not in str({key: value for key, value in field.items() if key != "description"})
    ]


@pytest.mark.parametrize("comments", [True, False])
@pytest.mark.parametrize("text", [*(path.read_text("utf-8") for path in SHIPPED), FULL, ""])
def test_a_plan_as_toml_is_read_back_to_the_same_plan(text: str, comments: bool) -> None:
    plan = parse(text)
    assert parse(to_toml(plan, comments=comments)) == plan


def test_each_field_has_its_sentence_in_the_file_and_on_the_page() -> None:
    assert len(fields()) > 120
    file, page = (
        " ".join(text.replace("#", " ").split()) for text in (to_toml(Plan(), comments=True), to_page())
    )
    schema = Plan.model_json_schema()["$defs"]
    for section, name in fields():
        said = " ".join(schema[section]["properties"][name]["description"].split())
        said = said.replace(" None:", " Not set:").replace("; Not set:", "; not set:")
        assert said in file, (section, name)
        assert f"**`{name}`**" in page
        assert said in page, (section, name)


def test_the_page_is_that_of_this_release() -> None:
    assert PAGE.read_text(encoding="utf-8") == to_page(), "run: make docs"


def test_a_new_plan_is_printed_with_what_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    printed = done(capsys, "plan", "new", "--set", "run.name=mine", "--set", "simulation.source=notes.txt")
    assert parse(printed) == parse('[run]\nname = "mine"\n[simulation]\nsource = "notes.txt"')
    assert re.search(r"^# .*\nname = \"mine\"$", printed, re.MULTILINE)
    assert tomllib.loads(done(capsys, "plan", "new", "not-private"))["run"]["name"] == "not-private"
