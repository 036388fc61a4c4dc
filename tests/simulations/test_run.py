"""The Python API: what is public, records as objects, runs that are refused, stopped, resumed and read."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]  # it ships no types
import pytest
from transformers import PreTrainedTokenizerBase

import cloister
from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.registry import using
from cloister.lm.text.corpus import given_records
from cloister.lm.text.examples import Text
from cloister.lm.text.records import Record, Unusable
from cloister.protocol.errors import AccountingError, DataError, PackageError, PlanError, RunFolderError
from cloister.server.display import LineDisplay
from cloister.server.record.progress import Event, RoundStarted
from cloister.tests.parties.federation import Federation
from cloister.tests.tools.raises import raises

RECORDS = {
    name: [{"text": f"The {name} wind blows over hill {number} to the sea."} for number in range(20)]
    for name in ("north", "south", "west")
}
SMALL: dict[str, Any] = {
    "run": {"rounds": 1},
    "model": cloister.plan.ModelSection(
        config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    ),
    "data": {"sequence_length": 32},
    "local": cloister.plan.LocalSection(steps=2, batch_size=2),
}
PRIVATE = {
    "privacy.unit": "record",
    "privacy.noise_multiplier": 1.0,
    "privacy.sampling_rate": 0.2,
    "aggregation.weighting": "uniform",
    "server.evaluation": "none",
    "data.held_out": 0,
}


def test_public_names_need_no_torch() -> None:
    """How long it takes is in docs/performance.md."""
    code = """if True:
        import sys, cloister
        assert not any(name.startswith("cloister.") for name in sys.modules)
        cloister.Plan.load("private-sites")
        assert sorted(cloister.__all__) == dir(cloister)
        assert all(getattr(cloister, name) for name in cloister.__all__)
        assert not {"torch", "transformers", "flwr", "grpc", "pandas", "datasets"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError):
        cloister.simulat  # noqa: B018  # that is the test


def test_a_plan_is_sound_however_it_is_built() -> None:
    plan = cloister.Plan(**SMALL)
    assert plan == cloister.Plan.parse("").changed(**SMALL)
    assert plan.changed(local={"steps": 5}).local.batch_size == 2
    assert cloister.Plan.load("private-code", {"privacy.noise_multiplier": 3}).privacy.noise_multiplier == 3
    target = {"privacy.noise_multiplier": None, "privacy.target_epsilon": 2.0}
    assert cloister.Plan.load("private-code", target).changed({"local.steps": None}).local.steps == 20
    with raises(PlanError, "stepss"):
        cloister.plan.LocalSection(stepss=3)  # type: ignore[call-arg]  # that is the test
    with raises(PlanError, "aggregation.weighting"):
        plan.changed({"privacy.unit": "record"})
    with raises(PlanError, "aggregation.weighting"):
        cloister.Plan(
            privacy=cloister.plan.PrivacySection(unit="record", noise_multiplier=1.0, sampling_rate=0.1)
        )
    with raises(PlanError, "Plan"):
        cloister.Plan(local=object())  # type: ignore[arg-type]  # that is the test
    given = {"simulation.source": "given:00", "simulation.sites": ["a", "b", "c"], "cohort.sites": 3}
    assert plan.changed({"simulation.field": "text"}).changed(given).simulation.field == ""
    with raises(PlanError, "simulation.field"):  # which would say that the sites are divided by it
        cloister.Plan.parse("", {**given, "simulation.field": "owner"})
    with raises(PlanError, "simulation.sites"):
        plan.changed({**given, "simulation.sites": ["a", "a", "b"]})


def test_an_epsilon_is_planned_without_a_run() -> None:
    plan = cloister.calibrate(cloister.Plan.load("private-code", {"privacy.accountant": "rdp"}), epsilon=1.5)
    assert 1.4 < cloister.epsilon(plan) <= 1.5 < cloister.epsilon(plan, group=2)
    with raises(AccountingError, "privacy.unit"):
        cloister.calibrate(cloister.Plan(), epsilon=1.5)


def test_records_are_read_from_what_programs_have(tmp_path: Path) -> None:
    import datasets  # type: ignore[import-untyped]  # it ships no types
    import pandas as pd
    import pyarrow as pa

    rows = RECORDS["north"]
    (tmp_path / "north.jsonl").write_text("\n".join(map(json.dumps, rows)))
    frame, table, split = pd.DataFrame(rows), pa.Table.from_pylist(rows), datasets.Dataset.from_list(rows)
    for given in (tmp_path / "north.jsonl", str(tmp_path / "north.jsonl"), rows, frame, table, split):
        assert [dict(record) for record in given_records(given, "north")] == rows
    for wrong in ({"train": split}, 3, [], ["text"]):
        with raises(DataError, "north", "north, record 1"):
            given_records(wrong, "north")


def simulated(out: Path, plan: cloister.Plan, **given: Any) -> cloister.Run:
    return cloister.simulate(plan, out=out, workers=2, quiet=True, **given)


@pytest.mark.slow
def test_runs_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run, one in the folder that another run had, and one after a run that failed are as the first."""
    import gc

    import torch

    plan, out = cloister.Plan(**SMALL), tmp_path / "run"
    before = torch.get_num_threads(), gc.get_threshold()
    with raises(DataError, "sites['west']"):
        simulated(out, plan, sites={**RECORDS, "west": []})
    with pytest.raises(DataError):
        simulated(out, plan, sites={name: [{"txt": "no text"}] for name in RECORDS})
    with pytest.raises(cloister.errors.ModelError):
        simulated(out, plan.changed({"model.name": "builtin:no-model"}), sites=RECORDS)
    assert not out.exists()
    first = simulated(out, plan, sites=RECORDS)
    found = first.outcome.params_sha256
    assert first.plan.simulation.sites == ("north", "south", "west")
    assert first.plan.cohort.sites == 3
    assert first.epsilon is None
    assert "no privacy guarantee" in str(first.report)
    assert "iframe" in first.report._repr_html_()
    assert list(first.history["round"]) == [0, 1]
    assert (
        first.model().generate(**first.tokenizer()("The", return_tensors="pt"), max_new_tokens=2).shape[0]
        == 1
    )
    shutil.rmtree(out)
    other = {name: records[::-1] for name, records in RECORDS.items()}
    second = simulated(out, plan, sites=other)
    assert second.outcome.params_sha256 != found
    assert second.plan.digest() == plan.changed({"cohort.sites": 3}).digest()
    with raises(RunFolderError, str(out)):
        simulated(out, plan, sites=RECORDS)
    backwards = dict(reversed(RECORDS.items()))
    assert simulated(tmp_path / "again", plan, sites=backwards).outcome.params_sha256 == found
    assert cloister.Run.open(tmp_path / "again").resume(quiet=True).outcome.params_sha256 == found
    assert (torch.get_num_threads(), gc.get_threshold()) == before
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_records_of_a_site_are_not_public(tmp_path: Path) -> None:
    plan = cloister.Plan(**SMALL).changed(PRIVATE)
    public = [{"text": "Nobody owns this sentence, which all may read."}] * 4
    (tmp_path / "public.jsonl").write_text("\n".join(map(json.dumps, [*public, *RECORDS["west"][:1]])))
    for field, given in (
        ("public.source", {"public": [*public, {"more": 1, **RECORDS["south"][3]}]}),
        ("server.evaluation", {"evaluation": tmp_path / "public.jsonl"}),
    ):
        with raises(DataError, field):
            simulated(tmp_path / "run", plan, sites=RECORDS, **given)
    with raises(DataError, "public.source"):
        stories = tmp_path / "stories.jsonl"
        stories.write_text("\n".join(json.dumps(each) for own in RECORDS.values() for each in own))
        changed = {"simulation.source": str(stories), "cohort.sites": 3}
        simulated(tmp_path / "run", plan.changed(changed), public=RECORDS["south"])
    # Arrow gives each message the keys of all, and no order of keys is another message.
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "North."}]
    chats = {name: [{"messages": turns}] * 4 for name in ("a", "b", "c")}
    odd = [{"messages": [*turns, {"role": "user", "content": "Why?", "name": "x"}]}]
    as_table = pyarrow.Table.from_pylist([*chats["a"], *odd])
    turned = [{"messages": [dict(reversed(turn.items())) for turn in turns]}]
    for theirs, ours in ((as_table, chats["a"]), (chats["a"], turned), (as_table, turned)):
        chat = plan.changed({"data.format": "messages"})
        with raises(DataError, "server.evaluation"):
            simulated(tmp_path / "run", chat, sites={**chats, "a": theirs}, evaluation=ours)
    assert not (tmp_path / "run").exists()
    run = simulated(
        tmp_path / "run",
        plan.changed(public={"source": "builtin:python-docs", "steps": 2}),
        sites=RECORDS,
        public=public,
        evaluation=public,
    )
    assert run.plan.public.source == run.plan.server.evaluation
    assert run.epsilon is not None
    assert set(run.ledger["dataset"]) == set(RECORDS)
    assert run.history["loss"].notna().all()


@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_goes_on(small_plan: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    code = f"import cloister; cloister.simulate(cloister.Plan.load({str(small_plan)!r}), out={str(out)!r}, workers=1)"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("round 1: ") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert f"stopped; continue with: cloister.Run.open({str(out)!r}).resume()" in said
    run = cloister.Run.open(out)
    with raises(RunFolderError, str(out)):
        run.model()
    assert run.resume(workers=1, quiet=True).outcome.params_sha256 == whole["params_sha256"]


class Backwards(Causal):
    """Texts from their end."""

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        return super().texts(tokenizer, unusable, place, {"text": record["text"][::-1]})


class Another(Backwards):
    pass


Another.__name__ = "Backwards"


@pytest.mark.slow
def test_a_task_that_is_given_as_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = cloister.Plan(**SMALL)
    run = simulated(tmp_path / "run", plan, sites=RECORDS, task=Backwards)
    turned = {name: [{"text": each["text"][::-1]} for each in own] for name, own in RECORDS.items()}
    assert run.outcome.params_sha256 == simulated(tmp_path / "as", plan, sites=turned).outcome.params_sha256
    assert run.plan.data.task == "object:Backwards"
    assert run.plan.digest() != plan.changed({"cohort.sites": 3}).digest()
    assert run.plan.data.package is not None
    page, facts = run.report.write(tmp_path / "report")
    assert run.plan.data.package.sha256 in facts.read_text() + page.read_text()
    assert run.model().config.hidden_size == 16

    # A run that was stopped does not go on without the class, or with another of its name.
    def stop(display: LineDisplay, event: Event) -> None:
        if isinstance(event, RoundStarted):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LineDisplay, "event", stop)
        with pytest.raises(KeyboardInterrupt):
            simulated(tmp_path / "stopped", plan, sites=RECORDS, task=Backwards)
    stopped = cloister.Run.open(tmp_path / "stopped")
    for other in (None, Another):
        with raises(PackageError, "data.task"):
            stopped.resume(quiet=True, workers=1, task=other)
    resumed = stopped.resume(quiet=True, workers=1, task=Backwards)
    assert resumed.outcome.params_sha256 == run.outcome.params_sha256
    # No site takes part in a deployment with it, whatever its policy lists, even if its process knows the class.
    policy = 'units = ["none"]\nsecure_required = false\nleast_cohort = 1\npackages = ["object"]\n'
    with using(Backwards):
        federation = Federation(
            tmp_path / "sites", run.plan.model_copy(update={"simulation": plan.simulation})
        )
        with raises(PackageError, "data.task"):
            federation.site(policy=policy).join(federation.join_request())
