"""The bundle of a plan for a Flower federation that is there already."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from cloister.clients import flower as client
from cloister.clients.ranks.resident import Resident
from cloister.protocol.errors import PlanError, StorageError
from cloister.protocol.machine.storage import lock
from cloister.protocol.plan.soundness import from_json, load
from cloister.server.federation import flower as coordinator
from cloister.server.federation.deployment import Deployment
from cloister.server.federation.registry import Registry
from cloister.server.record.folder import RunFiles, RunFolder
from cloister.simulations.rehearsal.rehearsal import prepare
from cloister.tests.tools.command import found, lone_refusal, set_options
from cloister.tests.tools.raises import raises


@pytest.fixture
def parties(small_plan: Path, tmp_path: Path) -> RunFiles:
    path = tmp_path / "parties"
    with RunFolder.create(path, load(small_plan)) as folder:
        prepare(folder, lambda _event: None)
    return RunFiles(path)


def bundling(parties: RunFiles, plan: Path, out: Path, *settings: str) -> list[str]:
    return ["flower", "bundle", str(parties.federation), str(plan), *set_options(settings), "--out", str(out)]


def test_a_bundle_names_the_installed_apps_and_brings_no_code(
    parties: RunFiles, small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    told = found(capsys, *bundling(parties, small_plan, out))
    assert [path.name for path in out.rglob("*")] == ["pyproject.toml"]
    flower = tomllib.loads((out / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    kinds = {}
    for component, where in flower["components"].items():
        module, _, name = where.partition(":")
        kinds[component] = type(getattr(import_module(module), name))
    assert kinds == {"serverapp": ServerApp, "clientapp": ClientApp}
    plan = from_json(flower["config"]["plan"])
    assert plan.digest() == told["plan"] == load(small_plan).digest()
    assert flower["config"]["federation"] == str(parties.federation)
    assert "new folder" in lone_refusal(capsys, *bundling(parties, small_plan, out))


def test_a_model_above_the_limit_is_refused_before_anything_is_made(
    parties: RunFiles, small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    large = ("model.config.hidden_size=4096", "model.config.intermediate_size=32768")
    assert "at most 2,147,483,647" in lone_refusal(capsys, *bundling(parties, small_plan, out, *large))
    assert not out.exists()


def test_the_folder_of_a_run_names_the_federation_whose_audit_log_has_it(
    parties: RunFiles, small_plan: Path
) -> None:
    """Else a restored folder would not be found: see `check_newest`."""
    said = {"plan": load(small_plan).to_json(), "run": "", "wait": "1"}
    with coordinator._folder(said, Registry.open(parties.federation)) as folder:
        assert Deployment.read(folder).federation == str(parties.federation)


def test_a_supernode_serves_the_site_that_its_own_configuration_names(
    parties: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(config: dict[str, str]) -> str:
        return client._open(Context(1, 1, dict(config), RecordDict(), {}), Resident()).name

    path = parties.sites.config("site-001")
    monkeypatch.setattr(client, "_locks", {})
    monkeypatch.setattr(client, "_TURN_S", 0.0)
    for wrong in ({}, {"site": "site.toml"}):
        with raises(PlanError, "site in the SuperNode's --node-config"):
            opened(wrong)
    with lock(parties.sites.state("site-001") / "lock", "this test"), pytest.raises(StorageError):
        opened({"site": str(path)})
    assert opened({"site": str(path)}) == "site-001"
    client._locks.popitem()[1].close()
