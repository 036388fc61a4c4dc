"""`cloister export`: the folder loads with the field's own libraries, and its card claims what the report claims."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from cloister.clients.ranks.resident import Resident
from cloister.lm.data.prepare import prepare
from cloister.lm.measures.figures import FIGURES
from cloister.lm.model import saved
from cloister.lm.model.layout import Layout
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.corpus import corpus_records
from cloister.privacy.report.figures import at_most
from cloister.server.record.folder import read_plan
from cloister.server.record.report import gather
from cloister.simulations.federation import open_site
from cloister.tests.parties.evaluated import evaluate
from cloister.tests.server.record.test_run_report import edit
from cloister.tests.tools.command import done, found, lone_refusal
from cloister.tests.tools.mutants import Mutant


@pytest.fixture
def copy(private: Path, tmp_path: Path) -> Path:
    """The private run, to be changed."""
    shutil.copytree(private, tmp_path / "run")
    return tmp_path / "run"


def loss_on_public(module: Any, run: Path) -> float:
    """The loss of a loaded model on the records that the run evaluated."""
    from transformers import AutoTokenizer

    plan = read_plan(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    records = corpus_records(str(run / "sites" / "public.jsonl")).records
    data = plan.data.model_copy(update={"held_out": 0.0})
    sequences = prepare(records, tokenizer, data, seed=plan.run.seed).train
    return evaluate(module, sequences, 4, torch.device("cpu")).loss


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text of a card."""
    empty, front, text = (folder / "README.md").read_text().split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(front), text


def plainly(text: str) -> str:
    """A card's text without the backslashes that protect it from Markdown."""
    return text.replace("\\", "")


def test_a_full_model_loads_and_has_the_loss_of_the_run(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, target = Path(whole["run"]), tmp_path / "made" / "model"
    facts = found(capsys, "export", str(run), str(target))
    assert (facts["form"], facts["guarantee"], facts["epsilon"]) == ("full", False, None)
    evaluated = {figure.name for figure in FIGURES} - {"loss"}
    assert {name: facts[name] for name in evaluated} == {name: whole[name] for name in evaluated}
    loading: Any = AutoModelForCausalLM
    module = loading.from_pretrained(target)
    weights = Layout.of(module.named_parameters()).flatten(module)
    assert hashlib.sha256(weights.tobytes()).hexdigest() == facts["params_sha256"] == whole["params_sha256"]
    plan, total = read_plan(run), HeldOut()
    for index in range(4):
        total += open_site(run / "sites", plan, index, Resident()).held_out(plan, weights)
    assert total.loss == pytest.approx(whole["final_loss"], rel=1e-4) == facts["final_loss"]
    assert AutoTokenizer.from_pretrained(target)("aé")["input_ids"] == [97, 195, 169]
    front, text = card_of(target)
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["cloister", "federated-learning"],
    }
    assert "This run gives no privacy guarantee" in text
    assert "epsilon |" not in text
    assert "Treat the models of this run as if they could repeat the data" in text
    for fact in (f"{whole['final_loss']:.4f}", whole["params_sha256"], "records.jsonl", "secure sum"):
        assert fact in text
    assert not any(name in text for name in ("site-000", "site-003", "patient"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by PEFT
def test_an_adapter_loads_with_peft_and_merged_without_it_and_both_have_the_loss_of_the_run(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    loading: Any = AutoModelForCausalLM
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    facts = found(capsys, "export", str(private), str(adapter))
    assert facts["form"] == "adapter"
    assert found(capsys, "export", str(private), str(merged), "--merge")["form"] == "merged"
    assert facts["final_loss"] == json.loads((private / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
    expected = pytest.approx(facts["final_loss"], rel=1e-5)
    assert loss_on_public(AutoPeftModelForCausalLM.from_pretrained(adapter), private) == expected
    base = loading.from_pretrained(adapter / "base")
    assert loss_on_public(base, private) != expected
    shutil.move(adapter, tmp_path / "moved")  # then as the card says
    base = loading.from_pretrained(tmp_path / "moved" / "base")
    assert loss_on_public(PeftModel.from_pretrained(base, tmp_path / "moved"), private) == expected
    assert not list(merged.glob("adapter*"))
    assert loss_on_public(loading.from_pretrained(merged), private) == expected
    assert card_of(tmp_path / "moved")[0]["library_name"] == "peft"
    assert card_of(merged)[0]["library_name"] == "transformers"


def test_the_card_of_a_private_run_claims_what_its_report_claims(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = gather(private)
    assert report.epsilon is not None

    def complete(name: str) -> bool:
        facts = found(capsys, "export", str(private), str(tmp_path / name))
        front, text = card_of(tmp_path / name)
        assert facts["guarantee"]
        assert facts["epsilon"] == report.epsilon
        assert "differential-privacy" in front["tags"]
        assert f"| epsilon | {at_most(report.epsilon or 0)} |" in text
        assert not any(site.name in text for site in report.sites)
        lists = (report.not_covered, report.assumptions, report.trusted)
        return all(f"- {item}\n" in plainly(f"{text}\n") for items in lists for item in items)

    assert complete("model")
    mutants = [
        Mutant(
            "cli.show.card:_template",
            'read_text(encoding="utf-8")',
            f'read_text(encoding="utf-8").replace("{{{{ listed(report.{part}) }}}}", "")',
        )
        for part in ("not_covered", "assumptions", "trusted")
    ]
    for number, mutant in enumerate(mutants):
        with monkeypatch.context() as patch:
            mutant.plant(patch)
            assert not complete(str(number)), mutant


@pytest.mark.parametrize("declared", [True, False])
def test_a_card_claims_nothing_where_the_report_does_not(
    declared: bool, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise of a declared seed, and a ledger that does not have the charge of a site."""
    plan = json.loads((copy / "plan.json").read_text())
    if declared:
        plan["simulation"]["noise_seed"] = 7
        (copy / "plan.json").write_text(json.dumps(plan))
    else:
        edit(copy / "ledger.sqlite", "DELETE FROM entries WHERE number > 2")
        assert "site-002" in gather(copy).ledger.problem
    facts = found(capsys, "export", str(copy), str(tmp_path / "model"))
    front, text = card_of(tmp_path / "model")
    assert (facts["guarantee"], facts["epsilon"], facts["delta"]) == (False, None, None)
    assert "differential-privacy" not in front["tags"]
    assert ("declared seed" if declared else "its ledger does not verify") in text
    assert "epsilon |" not in text
    assert "### What is not covered" in text
    assert not any(name in plainly(text) for name in ("site-002", str(copy / "sites"), str(copy / "ledger")))


@pytest.mark.parametrize("kind", ["folder", "hub"])
def test_a_card_names_a_base_of_the_hub_and_a_licence_that_is_known(
    kind: str,
    copy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The base of the run is in its folder: only what the plan names is another."""

    def unreachable(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(HfApi, "repo_info", unreachable)
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nA base.\n")
    plan = json.loads((copy / "plan.json").read_text())
    plan["model"] |= {
        "name": str(base) if kind == "folder" else "owner/base",
        "config": {},
        "tokenizer": "bytes",
    }
    (copy / "plan.json").write_text(json.dumps(plan))
    done(capsys, "export", str(copy), str(tmp_path / "model"))
    front, text = card_of(tmp_path / "model")
    assert "license" not in front
    licence = "| licence of the base model, by its own card | {} |"
    if kind == "folder":
        assert "base_model" not in front
        assert licence.format("apache-2.0") in text
    else:
        assert (front["base_model"], front["base_model_relation"]) == ("owner/base", "adapter")
        assert licence.format("not known") in text
    assert "- What the base model learned before the run" in text


def test_what_a_party_has_named_cannot_change_the_card(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads((copy / "plan.json").read_text())
    named = "a | b `c`\n## Privacy\n<b>safe</b>"
    plan["simulation"]["source"] = plan["public"]["source"] = named
    (copy / "plan.json").write_text(json.dumps(plan))
    done(capsys, "export", str(copy), str(tmp_path / "model"))
    _, text = card_of(tmp_path / "model")
    assert text.count("\n## Privacy\n") == 1
    assert "| records of the sites | ``a \\| b `c` ## Privacy <b>safe</b>`` |" in text
    assert "before the first round: a \\| b \\`c\\` ## Privacy \\<b\\>safe" in text


def test_a_folder_is_written_whole_or_not_at_all(
    copy: Path, whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    (target / "mine").mkdir(parents=True)
    assert "expected a new folder, or an empty one" in lone_refusal(capsys, "export", str(copy), str(target))
    (target / "mine").rmdir()
    said = lone_refusal(capsys, "export", whole["run"], str(target), "--merge")
    assert "--merge: expected a run that trained an adapter" in said
    weights = copy / "final" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if ".lora_B." in name)
    save_file(tensors | {name: tensors[name] + 1e-3}, weights)
    assert "the files that were saved, but adapter_model.safetensors" in lone_refusal(
        capsys, "export", str(copy), str(target)
    )
    (copy / "final" / saved.RECORD).unlink()
    saved.record(copy / "final")  # as somebody does who can write the folder
    assert "weights with the SHA-256 that the run recorded" in lone_refusal(
        capsys, "export", str(copy), str(target)
    )
    assert list(target.iterdir()) == []
    assert not list(tmp_path.glob(".model*"))
    (copy / "journal.sqlite").unlink()
    assert "expected" in lone_refusal(capsys, "export", str(copy), str(target))


def test_a_run_that_is_not_finished_is_refused(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copy / "journal.sqlite", "DELETE FROM entries WHERE step = 'finished'")
    said = lone_refusal(capsys, "export", str(copy), str(tmp_path / "model"))
    assert f"expected a finished run; cloister resume {copy}" in said
    assert not (tmp_path / "model").exists()
