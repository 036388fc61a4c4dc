"""Installed packages: what of them is hashed, what is compared before an import, and what a site refuses."""

import json
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

from cloister.lm.data.prepare import prepare, unit_rule
from cloister.lm.model.own import know
from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.registry import Pin, task_of
from cloister.lm.text.records import Unusable
from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.lm.training.optimizer import optimizer_of
from cloister.protocol.errors import ConsentError, PackageError, PlanError, PolicyError
from cloister.protocol.machine.packages import _PINS, _loaded, check, installed, load
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import changed, parse
from cloister.tests.parties.federation import Federation, tiny
from cloister.tests.tools.raises import raises

CODE = "from cloister.lm.tasks.causal import Causal\n\n\nclass Own(Causal):\n    pass\n"


class Package:
    """A package that is installed in a folder on the path."""

    def __init__(self, folder: Path, name: str, **origin: object) -> None:
        self.name, self.folder = name, folder
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        self.put("__init__.py", "")
        self.put("own.py", CODE)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[cloister.tasks]\nown = {name}.own:Own\nnone = {name}.own:Causal\n"
            f"[cloister.models]\nown = {name}.own:Own\n[cloister.optimizers]\nown = {name}.own:Own\n"
        )
        (info / "INSTALLER").write_text("pip\n")
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))
        files = [f"{name}/__init__.py", f"{name}/own.py", f"{name}/own.cpython-311.pyc", "../../bin/tool"]
        files += [f"{info.name}/{each}" for each in ("METADATA", "entry_points.txt", "INSTALLER", "RECORD")]
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    def put(self, file: str, content: str) -> None:
        path = self.folder / self.name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)

    @property
    def pin(self) -> tuple[str, str]:
        return installed(self.name)[:2]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Package:
    """Of a name of its own: what is imported stays in this process."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Package(tmp_path / "site", f"own_{abs(hash(request.node.name))}")


def plan_of(package: Package, *settings: str) -> Plan:
    version, sha256 = package.pin
    pin = f'data.package={{version="{version}", sha256="{sha256}"}}'
    return tiny(f"data.task={package.name}:own", pin, *settings)


def test_the_hash_is_of_what_is_imported_and_not_of_where(package: Package) -> None:
    before = installed(package.name)
    assert (before.version, before.editable) == ("1.0", False)
    (package.folder / f"{package.name}-1.0.dist-info" / "INSTALLER").write_text("uv\n")
    package.put("own.cpython-311.pyc", "compiled")
    assert installed(package.name) == before
    for file in ("own.py", "__init__.py"):
        package.put(file, "other = 1\n")
        assert installed(package.name).sha256 != before.sha256
        package.put(file, CODE if file == "own.py" else "")
    assert installed(package.name) == before


def test_every_file_that_a_wheel_brings_is_in_the_hash(package: Package) -> None:
    """Data beside the packages, and folders that are named as metadata; a script has the place of Python."""
    record = package.folder / f"{package.name}-1.0.dist-info" / "RECORD"
    files = {
        "../../share/stay/rules.txt": True,
        f"{package.name}/x.dist-info/code.py": True,
        "../../bin/tool": False,
    }
    files |= {f"{package.name}-1.0.dist-info/LICENSE": True, f"{package.name}-1.0.dist-info/REQUESTED": False}
    record.write_text(record.read_text() + "".join(f"{file},,\n" for file in files if "bin" not in file))
    for file in files:
        place = package.folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("before")
    before = installed(package.name)
    for file, counts in files.items():
        (package.folder / file).write_text("after")
        assert (installed(package.name).sha256 != before.sha256) == counts, file
        (package.folder / file).write_text("before")


def test_a_folder_of_sources_is_in_place(package: Package) -> None:
    assert not installed(package.name).editable
    (package.folder / f"{package.name}-1.0.dist-info").rename(package.folder / f"{package.name}.egg-info")
    info = package.folder / f"{package.name}.egg-info"
    (info / "METADATA").rename(info / "PKG-INFO")
    (info / "RECORD").unlink()
    (info / "SOURCES.txt").write_text(f"{package.name}/own.py\n")
    assert installed(package.name).editable


def test_nothing_of_another_package_is_imported(package: Package) -> None:
    pin = package.pin
    package.put("own.py", "raise SystemExit\n")
    with raises(PackageError, "data.task"):
        load("data.task", "cloister.tasks", f"{package.name}:own", pin)
    assert f"{package.name}.own" not in sys.modules
    with raises(PackageError, "data.task"):
        check("data.task", package.name, ("1.1", package.pin[1]))


def test_a_task_is_what_a_package_registers_as_one(package: Package) -> None:
    plan = plan_of(package)
    assert type(task_of(plan.data)).__module__ == f"{package.name}.own"
    for name in ("other", "absent"):
        with raises(PackageError, "data.task"):
            load("data.task", "cloister.tasks", f"{package.name}:{name}", package.pin)
    with raises(PackageError, "package"):
        installed("no-such-package")
    with raises(PlanError, "data.package"):
        parse(f'[data]\ntask = "{package.name}:own"')
    for wrong in ('privacy.method="opacus"', 'data.classes=["a", "b"]'):
        with raises(PlanError, wrong.partition("=")[0]):
            plan_of(package, wrong, *DPSGD)
    with raises(PlanError, "data.options"):
        tiny("data.options={a=1}")


DPSGD = (
    *(
        "privacy.unit=record",
        "privacy.noise_multiplier=1.0",
        "privacy.delta=1e-4",
        "privacy.sampling_rate=0.2",
    ),
    *("aggregation.weighting=uniform", "data.held_out=0.0", "server.evaluation=none"),
)


def forget(package: Package) -> None:
    """Let this process, where the coordinator has imported the package, be that of a site that has not."""
    _loaded.cache_clear()
    _PINS.clear()
    sys.modules.pop(f"{package.name}.own", None)


def test_a_site_runs_only_what_its_policy_lists(package: Package, tmp_path: Path) -> None:
    federation = Federation(tmp_path / "sites", plan_of(package, "aggregation.secure=false"))
    forget(package)
    policy = 'units = ["none"]\nsecure_required = false\nleast_cohort = 1\n'
    for listed in ("", 'packages = ["another"]\n'):
        with raises(PolicyError, "package"):
            federation.site(policy=policy + listed).join(federation.join_request())
    assert f"{package.name}.own" not in sys.modules
    joined = federation.joined(policy=f'{policy}packages = ["{package.name}"]\n')
    assert f"{package.name}.own" in sys.modules
    assert joined.contribute(federation.request()).spans
    # The persons of the site take the package off the list: the next message finds that, in a new process too.
    forget(package)
    with raises(PolicyError, "package"):
        federation.site(policy=policy).contribute(federation.request(number=2))
    assert f"{package.name}.own" not in sys.modules


def test_a_site_that_did_not_consent_tells_nothing_of_its_policy_or_packages(
    package: Package, tmp_path: Path
) -> None:
    """Consent comes first; and of a policy that cannot be read the coordinator learns no line."""
    federation = Federation(tmp_path / "sites", plan_of(package, "aggregation.secure=false"))
    policy = 'units = ["none"]\nsecure_required = false\nleast_cohort = 1\n'
    listing = federation.site(policy=f'{policy}packages = ["hiv-registry"]\n', pinned=False)
    with pytest.raises(ConsentError):
        listing.join(federation.join_request())
    for pinned in (False, True):
        site = federation.site(policy='least_cohort = "ask Dr Miller"\n', pinned=pinned)
        with pytest.raises(PlanError) as raised:
            site.join(federation.join_request())
        assert "Miller" not in str(raised.value)


def test_a_process_imports_one_version_of_a_package(package: Package) -> None:
    before = package.pin
    load("data.task", "cloister.tasks", f"{package.name}:own", before)
    package.put("own.py", f"{CODE}\n\nclass Another(Own):\n    pass\n")
    with raises(PackageError, "data.task"):
        load("data.task", "cloister.tasks", f"{package.name}:own", package.pin)


SHAPED = f"""import numpy as np

{CODE}
    def beside(self, unusable, place, record):
        return {{"labels": np.array(record["codes"], np.int32)}}

    def rows(self, example):
        return example.labels[:1] >= 0
"""


def test_no_record_ends_the_preparation_of_an_own_task(package: Package) -> None:
    package.put("own.py", SHAPED)
    data = plan_of(package).data
    strange: list[dict[str, object]] = [{"codes": 5}, {"codes": [[1], [2]]}, {"codes": []}]
    records: list[dict[str, object]] = [{"text": "some words", "codes": [1, 2]}]
    records += [{"text": "some words", **each} for each in strange]
    unusable = Unusable()
    made = list(task_of(data).examples(records, byte_tokenizer(), unusable, "codes"))
    assert [record["codes"] for record, _ in made] == [[1, 2], []]
    assert unusable.left_out.total() == 2


NAIVE = f"""import numpy as np
from dataclasses import replace

{CODE}
    def texts(self, tokenizer, unusable, place, record):
        return ((record["text"], [(0, 1)]),)

    def beside(self, unusable, place, record):
        return {{"beside": int(record["days"])}}

    def lay_out(self, examples, pad, *, packing):
        made = super().lay_out(examples, pad, packing=packing)
        days = np.array([100 // each.beside for each in examples], np.int32)
        return replace(made, labels=np.where(made.labels < 0, made.labels, days[:, None]))
"""


def test_no_record_of_a_naive_task_ends_the_preparation(package: Package) -> None:
    """Neither by a text that is none, nor where its rows are laid out."""
    package.put("own.py", NAIVE)
    plan = plan_of(package, *DPSGD)
    good = [{"text": f"some words {number}", "days": number} for number in range(1, 5)]
    strange: list[Any] = [5, None, ["x"], {"a": 1}, True]
    records = [*good, {"text": "no days", "days": 0}, *({"text": each, "days": 3} for each in strange)]
    unusable = Unusable()
    rule = unit_rule(plan.data, plan.privacy)
    made = prepare(records, byte_tokenizer(), plan.data, seed=0, units=rule, unusable=unusable)
    assert made.records == 4
    assert unusable.left_out.total() == 6


def test_records_that_a_task_lays_out_otherwise_are_not_the_same(package: Package) -> None:
    """One record more would else take another with it, and neighbours differ by two units."""
    package.put("own.py", NAIVE)
    plan = plan_of(package, "data.deduplicate=true", *DPSGD)
    rule = unit_rule(plan.data, plan.privacy)
    rows = [
        [{"text": "same words", "days": days} for days in (20, *others)] for others in ([], [50], [50, 20])
    ]
    made = [prepare(each, byte_tokenizer(), plan.data, seed=0, units=rule).train for each in rows]
    assert [len(each) for each in made] == [1, 2, 2]
    assert sorted(made[1].labels.max(1)) == [2, 5]


def test_a_site_refuses_a_package_that_is_installed_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    origin = {"url": f"file://{tmp_path / 'site' / 'own_in_place'}", "dir_info": {"editable": True}}
    package = Package(tmp_path / "site", "own_in_place", **origin)
    assert installed(package.name).editable
    federation = Federation(tmp_path / "sites", plan_of(package))
    forget(package)
    policy = f'units = ["none"]\nsecure_required = false\nleast_cohort = 1\npackages = ["{package.name}"]\n'
    with raises(PackageError, "data.task"):
        federation.site(policy=policy).join(federation.join_request())
    assert "own_in_place.own" not in sys.modules


def test_the_hash_of_a_class_in_a_notebook_is_of_its_newest_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    hashes = []
    for number, body in enumerate(("pass", "ends = False", "pass")):
        cell, file = f"# a cell\nclass Cell(Causal):\n    {body}\n", f"/nowhere/ipykernel/{number}.py"
        linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
        names: dict[str, Any] = {"Causal": Causal, "__name__": "__main__"}
        exec(compile(cell, file, "exec"), names)
        assert Pin.of(names["Cell"]).task == "object:Cell"
        hashes.append(Pin.of(names["Cell"]).sha256)
    assert hashes[0] == hashes[2] != hashes[1]
    with raises(PackageError, "task"):
        Pin.of(type("NoCell", (Causal,), {"__module__": "__main__"}))


MODEL = """from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel


class Config(PreTrainedConfig):
    model_type = "own-of-a-test"


class {}(PreTrainedModel):
    config_class = {}


Own = {}
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (CODE, "PreTrainedModel"),
        (MODEL.format("MineForCausalLM", "LlamaConfig", "MineForCausalLM"), "none of transformers"),
        (MODEL.format("MineForCausalLM", "None", "MineForCausalLM"), "none of transformers"),
        (MODEL.format("Mine", "Config", "Mine"), "ends in ForCausalLM"),
    ],
)
def test_a_class_of_models_is_refused_that_transformers_would_not_find(
    code: str, says: str, package: Package
) -> None:
    """One with the type of transformers' own would take its place in this process."""
    package.put("own.py", code)
    version, sha256 = package.pin
    named = {"model.type": f"{package.name}:own", "model.package": {"version": version, "sha256": sha256}}
    with raises(PackageError, "model.type", says=says):
        know(changed(tiny(), named))


def test_a_task_with_more_labels_than_the_sums_have_room_for_is_refused(package: Package) -> None:
    """Else the totals of honest sites would be taken for those of a liar."""
    package.put("own.py", CODE.replace("pass", "labels_each = 17"))
    plan = plan_of(package)
    assert plan.data.sequence_length == 16
    with raises(PackageError, "data.task", says="17"):
        task_of(plan.data)
    assert task_of(plan_of(package, "data.sequence_length=17").data).labels_each == 17


def test_an_optimizer_of_a_package_is_a_kind(package: Package) -> None:
    version, sha256 = package.pin
    pin = {"version": version, "sha256": sha256}
    plan = changed(tiny(), {"local.optimizer": f"{package.name}:own", "local.package": pin})
    with raises(PackageError, "local.optimizer", says="Kind"):
        optimizer_of(plan.local)
    for field, name in (("local", "optimizer"), ("model", "type")):
        with raises(PlanError, f"{field}.package"):
            changed(tiny(), {f"{field}.{name}": f"{package.name}:own"})
