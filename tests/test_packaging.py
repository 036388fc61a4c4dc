"""The wheel, the source distribution and the editable install: every package is in them, under its one name."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"tests", "benchmarks", "docs"}


def built(source: Path, what: str, out: Path) -> Path:
    """What the build backend makes of a folder: `wheel`, `sdist` or `editable`."""
    out.mkdir()
    code = f"from setuptools.build_meta import build_{what} as build; build({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    (file,) = out.iterdir()
    return file


def inside(wheel: Path) -> set[Path]:
    """The files of the package in a wheel; nothing else is at its top but its metadata."""
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.parts[0] for name in names} == {"cloister", f"{wheel.name.split('-py3')[0]}.dist-info"}
    return {name.relative_to("cloister") for name in names if name.parts[0] == "cloister"}


@pytest.mark.slow
def test_every_way_to_install_has_every_package_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # as a clone has it: with the links of .src/cloister
    ignored = shutil.ignore_patterns(".[!s]*", "build", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=ignored, symlinks=True)
    modules = {path.relative_to(ROOT) for path in ROOT.glob("*/**/*") if path.suffix in (".py", ".toml")}
    expected = {path for path in modules if path.parts[0] not in LEFT_OUT and path.parts[0][0] != "."}
    expected = {path for path in expected if path.parts[0] not in ("build", "runs")}
    packages = {path.parent for path in expected if path.name == "__init__.py" and len(path.parts) == 2}
    links = {path.name for path in (ROOT / ".src" / "cloister").iterdir() if path.is_symlink()}
    assert links == {*map(str, packages), "tests", "benchmarks"}
    expected |= {Path("__init__.py"), Path("py.typed"), *(package / "py.typed" for package in packages)}
    with tarfile.open(built(source, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for number, folder in enumerate((source, unpacked)):
        found = inside(built(folder, "wheel", tmp_path / f"wheel-{number}"))
        assert expected <= found
        assert not {path.parts[0] for path in found} & LEFT_OUT
    with zipfile.ZipFile(built(source, "editable", tmp_path / "editable")) as editable:
        (pth,) = (name for name in editable.namelist() if name.endswith(".pth"))
        path = editable.read(pth).decode().strip()
    assert path == str(source / ".src")
    code = "import cloister.tests.test_packaging, cloister.server.run as run; print(run.__file__)"
    env = {**os.environ, "PYTHONPATH": path}
    found_in = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, check=True, text=True
    )
    assert found_in.stdout.strip() == f"{path}/cloister/server/run.py"
