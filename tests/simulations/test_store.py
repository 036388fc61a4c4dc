"""The sequences of all simulated sites: those that each site would make itself, in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.clients.ranks.resident import Resident
from cloister.clients.site import preparation_of
from cloister.lm.data.prepare import Preparation, Prepared
from cloister.lm.data.store import Store
from cloister.lm.text.tokenizer import load_tokenizer
from cloister.privacy.accounting.claims import PROSE
from cloister.protocol.errors import DataError
from cloister.protocol.machine import storage
from cloister.server.record.folder import RunFolder
from cloister.server.run import run
from cloister.simulations import federation as federations
from cloister.simulations import store
from cloister.simulations.federation import make_client_app, open_site
from cloister.tests.parties.federation import RECORD, SKELLAM, Federation, tiny, write_records
from cloister.tests.tools.raises import raises

PLANS: dict[str, list[str]] = {
    "none": ["data.held_out=0.2"],
    "packed": ["data.packing=true", "data.sequence_length=64"],
    "record": RECORD,
    "window": [*RECORD, "privacy.record=window", "data.sequence_length=8"],
    "site": SKELLAM,
}


def made(federation: Federation) -> Store:
    names, folder = federation.names, federation.sites_folder
    paths = [folder / name / "data.jsonl" for name in names]
    store.make(folder / "sequences", federation.plan, load_tokenizer(federation.plan.model), paths)
    return Store(folder / "sequences")


def arrays(prepared: Prepared) -> dict[str, Any]:
    return {
        f"{part}.{kind}": getattr(getattr(prepared, part), kind)
        for part in ("train", "held_out")
        for kind in ("tokens", "labels", "positions", "n_bytes", "starts", "shares")
    }


@pytest.mark.parametrize("settings", PLANS.values(), ids=PLANS)
def test_each_site_has_what_it_would_make_itself(tmp_path: Path, settings: list[str]) -> None:
    federation = Federation(tmp_path, tiny(*settings))
    found, tokenizer = made(federation), load_tokenizer(federation.plan.model)
    for index in range(len(federation.names)):
        own = preparation_of(federation.site(index).config, federation.plan, tokenizer).make()
        other = found.site(index)
        assert other is not None
        assert (other.records, other.left_out) == (own.records, own.left_out)
        for name, array in arrays(own).items():
            np.testing.assert_array_equal(arrays(other)[name], array, err_msg=name)
        assert own.train.tokens.dtype == other.train.tokens.dtype


def test_a_simulated_site_uses_them_and_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, tiny())
    made(federation)
    federations._store.cache_clear()
    monkeypatch.setattr(Preparation, "make", lambda _self: pytest.fail("the site reads its records"))
    site = open_site(federation.sites_folder, federation.plan, 0, Resident())
    site.join(federation.join_request())
    assert site.sequences(federation.plan) > 0


@pytest.mark.slow
def test_a_run_has_the_same_weights_as_with_deployed_sites(tmp_path: Path) -> None:
    """Those read their own files and share nothing; the simulated ones share sequences."""
    found = []
    for way in ("deployed", "simulated"):
        federation = Federation(tmp_path / way, tiny("run.rounds=1", "simulation.durable=false"))
        plan, folder = federation.plan, federation.sites_folder
        if way == "simulated":
            made(federation)
            federations._store.cache_clear()
            for index, name in enumerate(federation.names):
                site = partial(open_site, folder, plan, index, federation.resident)
                federation.channel.sites[name] = site
        RunFolder.create(tmp_path / f"run-{way}", plan).close()
        with RunFolder.reopen(tmp_path / f"run-{way}") as run_folder:
            outcome = run(run_folder, federation.channel, lambda _event: None, roster=federation.roster)
        found.append((outcome.params_sha256, outcome.final_loss))
    assert found[0] == found[1]
    assert found[0][1] is not None


def test_a_site_whose_records_cannot_be_used_says_so_itself(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny())
    (federation.sites_folder / federation.names[1] / "data.jsonl").write_text(json.dumps({"other": 1}) + "\n")
    found = made(federation)
    assert found.site(0) is not None
    assert found.site(1) is None
    federations._store.cache_clear()
    site = open_site(federation.sites_folder, federation.plan, 1, Resident())
    with raises(DataError, "site-001/data.jsonl, line 1, field text", says="other"):
        site.join(federation.join_request())


@pytest.mark.parametrize(
    "harm", [lambda path: path.write_text("{"), lambda path: path.unlink()], ids=["damaged", "missing"]
)
def test_a_store_that_is_damaged_is_one_line(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    federation = Federation(tmp_path, tiny())
    made(federation)
    harm(federation.sites_folder / "sequences" / "index.json")
    with raises(DataError, "prepared data"):
        Store(federation.sites_folder / "sequences")


# What may be lost in a power cut.


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "tokens.bin").write_bytes(bytes((folder / "tokens.bin").stat().st_size)),
        lambda folder: (folder / "tokens.bin").write_bytes(b""),
        lambda folder: (folder / "saved.json").unlink(),
    ],
    ids=["zeros", "empty", "no record"],
)
def test_a_run_that_goes_on_makes_a_damaged_store_again(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    plan = tiny(f"simulation.source={write_records(tmp_path / 'records.jsonl')}")
    with RunFolder.create(tmp_path / "run", plan) as run_folder:
        federations._prepare(run_folder, lambda _event: None)
        made_once = (run_folder.sites.sequences / "tokens.bin").read_bytes()
        assert any(made_once)
        harm(run_folder.sites.sequences)
        federations._prepare(run_folder, lambda _event: None)
        assert (run_folder.sites.sequences / "tokens.bin").read_bytes() == made_once


def test_only_a_simulation_that_says_so_does_not_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(storage, "_syncing", True)
    plans = {durable: tiny(f"simulation.durable={durable}") for durable in ("true", "false")}
    counts = {}
    for durable, plan in plans.items():
        federation = Federation(tmp_path / durable, plan)
        make_client_app(federation.sites_folder, federation.plan)
        synced.clear()
        federation.joined()
        counts[durable] = len(synced)
    assert counts["true"] > 10
    assert counts["false"] == 0
    # The field is not in the plan's digest, and a deployed site does not read it.
    assert plans["true"].digest() == plans["false"].digest()
    monkeypatch.setattr(storage, "_syncing", True)
    Federation(tmp_path / "deployed", plans["false"]).joined()
    assert len(synced) > 10


def test_files_that_are_removed_anyway_are_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(storage, "_syncing", True)
    with storage.without_syncs():
        storage.write_bytes(tmp_path / "removed", b"content")
        assert not synced
    storage.write_bytes(tmp_path / "kept", b"content")
    assert synced


def test_the_report_names_it() -> None:
    told = [
        PROSE.said("not_covered", tiny(*RECORD, f"simulation.durable={durable}"))
        for durable in ("true", "false")
    ]
    assert ["simulation.durable = false" in " ".join(each) for each in told] == [False, True]


def test_the_files_of_a_site_are_whole_without_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_syncing", False)
    storage.write_bytes(tmp_path / "a" / "file", b"content")

    def fill(path: Path) -> None:
        (path / "file").write_bytes(b"content")

    storage.write_folder(tmp_path / "b", fill)
    assert (tmp_path / "a" / "file").read_bytes() == (tmp_path / "b" / "file").read_bytes() == b"content"
