"""docs/extend.md as it stands: the package is built, installed, tested, pinned and run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"
PLAN = """[run]
name = "stay"
rounds = 2
[data]
task = "stay:days"
sequence_length = 32
held_out = 0.2
[local]
steps = 3
batch_size = 4
[cohort]
sites = 3
[aggregation]
colluders = 0.25
[simulation]
source = "notes.jsonl"
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


class Place:
    """A folder with the page's package, which is installed beside cloister and not in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / "installed"
        package = folder / "stay"
        (package / "stay").mkdir(parents=True)
        entry_points = [block for block in blocks("toml")[1:] if "entry-points" in block]
        assert len(entry_points) == 2
        (package / "pyproject.toml").write_text("\n".join([blocks("toml")[0], *entry_points]))
        (package / "stay" / "__init__.py").touch()
        task, test, model, optimizer = blocks("python")
        (package / "stay" / "days.py").write_text(task)
        (package / "stay" / "bag.py").write_text(model)
        (package / "stay" / "lion.py").write_text(optimizer)
        (folder / "test_days.py").write_text(test)
        (folder / "plan.toml").write_text(PLAN)
        notes = ({"text": f"bed {bed}: " + "walked " * (bed % 7), "days": bed % 9} for bed in range(60))
        (folder / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
        self.install()

    def install(self) -> None:
        pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--upgrade", "--no-compile"]
        self.run(*pip, "--target", str(self.site), str(self.folder / "stay"))

    def run(self, *arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        paths = [str(self.site), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def cloister(self, *arguments: str, code: int = 0) -> str:
        return self.run("-m", "cloister.cli.main", *arguments, code=code)


@pytest.mark.slow
def test_the_page_as_it_stands(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert len(blocks("python")[0].splitlines()) + len(blocks("toml")[0].splitlines()) <= 65
    place.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_days.py")
    refused = place.cloister("plan", "check", "plan.toml", code=2)
    assert "data.package" in refused
    assert "cloister plan pin" in refused
    place.cloister("plan", "pin", "plan.toml")
    assert "packages" in blocks("toml")[2]
    told = place.cloister("simulate", "plan.toml", "--out", "run", "--json", "--workers", "1")
    found = json.loads(next(line for line in told.splitlines() if line.startswith("{")))
    assert found["final_loss"] < found["initial_loss"]
    # One other byte in the package, and nothing of it is imported.
    (tmp_path / "stay" / "stay" / "days.py").write_text("raise SystemExit(7)\n" + blocks("python")[0])
    place.install()
    refused = place.cloister("simulate", "plan.toml", "--out", "again", code=2)
    assert "data.task" in refused
    # A loss that couples rows is found.
    coupled = blocks("python")[0].replace("(error * (targets >= 0)).sum(1)", "(error * error.mean()).sum(1)")
    (tmp_path / "stay" / "stay" / "days.py").write_text(coupled)
    place.install()
    assert "beside other rows" in place.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_days.py", code=1
    )


CLASSES = """[data]
task = "classify"
classes = ["calm", "ill"]
sequence_length = 32
held_out = 0.2
{}
[cohort]
sites = 3
[run]
rounds = 3
[aggregation]
colluders = 0.25
[simulation]
source = "labels.jsonl"
"""


@pytest.mark.slow
def test_the_model_and_the_optimizer_of_the_page(tmp_path: Path) -> None:
    place = Place(tmp_path)
    model, optimizer = (block for block in blocks("toml") if "[model]" in block or "[local]" in block)
    tail = f'{model}\n{optimizer}steps = 8\nlearning_rate = 0.02\noptimizer_state = "keep"\n'
    (tmp_path / "plan.toml").write_text(CLASSES.format(tail))
    words = ("slept", "calm"), ("fever", "ill")
    pairs = ((bed, *words[bed % 2]) for bed in range(90))
    named = ({"text": f"bed {bed}: {word} {word}", "label": label} for bed, word, label in pairs)
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(text) + "\n" for text in named))
    refused = place.cloister("plan", "check", "plan.toml", code=2)
    assert "model.package" in refused
    place.cloister("plan", "pin", "plan.toml")
    told = place.cloister("simulate", "plan.toml", "--out", "run", "--json", "--workers", "1")
    found = json.loads(next(line for line in told.splitlines() if line.startswith("{")))
    assert found["accuracy"] == 1.0
    assert "ill" in place.cloister("predict", "run", "--text", "bed 5: fever fever")
    place.cloister("export", "run", "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "bag"
    # A file of the package changes: neither the model nor the optimizer is imported.
    for module in ("bag", "lion"):
        file = tmp_path / "stay" / "stay" / f"{module}.py"
        before = file.read_text()
        file.write_text("raise SystemExit(7)\n" + before)
        place.install()
        assert "model.type" in place.cloister("predict", "run", "--text", "fever", code=2)
        file.write_text(before)
    place.install()
    place.cloister("predict", "run", "--text", "fever")
