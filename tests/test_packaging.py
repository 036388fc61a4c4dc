"""The wheel: every package is in it, under its one name."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"tests", "benchmarks", "docs"}


@pytest.mark.slow
def test_the_wheel_holds_every_package_and_nothing_else_at_the_top(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.parts[0] for name in names} == {"cloister", f"{wheel.name.split('-py3')[0]}.dist-info"}
    modules = {path.relative_to(ROOT) for path in ROOT.glob("*/**/*") if path.suffix in (".py", ".toml")}
    expected = {path for path in modules if path.parts[0] not in LEFT_OUT and path.parts[0][0] != "."}
    inside = {name.relative_to("cloister") for name in names if name.parts[0] == "cloister"}
    assert {path for path in expected if path.parts[0] not in ("build", "runs")} <= inside
    packages = {path.parent for path in expected if path.name == "__init__.py" and len(path.parts) == 2}
    assert all(package / "py.typed" in inside for package in packages)
    assert not {path.parts[0] for path in inside} & LEFT_OUT
