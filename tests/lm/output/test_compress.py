"""`cloister compress`: the folder loads again and has the loss of the table, and no text of a site is used."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from cloister.lm.data.prepare import prepare
from cloister.lm.model.model import load_saved
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.corpus import corpus_records
from cloister.server.record.folder import read_plan
from cloister.tests.parties.evaluated import evaluate
from cloister.tests.tools.command import done, found, lone_refusal

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT reads it
)


def loaded(folder: str) -> Any:
    """The model of a folder, as a user loads it."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def held_out(module: Any, run: Path) -> HeldOut:
    """The sums of a loaded model on the public records of a run."""
    from transformers import AutoTokenizer

    plan = read_plan(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    records = corpus_records(str(run / "sites" / "public.jsonl")).records
    data = plan.data.model_copy(update={"held_out": 0.0})
    sequences = prepare(records, tokenizer, data, seed=plan.run.seed).train
    return evaluate(module, sequences, 4, torch.device("cpu"))


def check(facts: dict[str, Any], run: Path) -> Any:
    """The model that a table is of: it loads again and has the table's figures; the first loss is that of the run."""
    module = loaded(facts["folder"])
    again, after = held_out(module, run), facts["after"]
    assert again.loss == pytest.approx(after["loss"], rel=1e-5)
    assert again.loss / math.log(2) * again.tokens / again.counts["bytes"] == pytest.approx(
        after["bits_per_byte"]
    )
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert facts["before"]["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert after["tokens_per_second"] > 0
    files = Path(facts["folder"]).glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == after["weight_bytes"]
    return module


@pytest.mark.slow
def test_half_of_the_weights_are_zero(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = found(capsys, "compress", str(private), "--prune", "0.5", "--out", str(tmp_path / "made"))
    module = check(facts, private)
    assert facts["before"]["zeros"] < 0.01  # the embedding of the padding token
    assert facts["after"]["loss"] != facts["before"]["loss"]
    layers = [layer for name, layer in module.named_modules() if name.endswith("_proj")]
    assert len(layers) == 14
    for layer in layers:
        weight = layer.weight.detach().abs().flatten().sort().values
        assert int((weight == 0).sum()) == weight.numel() // 2
    table = done(capsys, "compress", str(private), "--prune", "0.25", "--out", str(tmp_path / "other"))
    for row in (
        "weights on disk",
        "weights that are zero",
        "loss, nats per token",
        "bits per byte",
        "tokens/s",
    ):
        assert row in table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torchao's own imports
def test_8_bits_are_smaller_and_nearly_as_good(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("compress", str(private), "--int8", "--out", str(tmp_path / "made"))
    if importlib.util.find_spec("torchao") is None:
        said = lone_refusal(capsys, *arguments)
        assert said.endswith("not installed; pip install 'cloister[compress]'")
        assert not (tmp_path / "made").exists()
        return
    facts = found(capsys, *arguments)
    check(facts, private)
    assert facts["after"]["weight_bytes"] < facts["before"]["weight_bytes"]
    assert facts["after"]["loss"] == pytest.approx(facts["before"]["loss"], rel=1e-2)


@pytest.mark.slow
def test_a_smaller_model_learns_from_public_text(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "small.json"
    config.write_text('{"num_hidden_layers": 1, "intermediate_size": 24}')
    teacher, tokenizer = load_saved(private / "final")
    tokens = torch.tensor([tokenizer("The public text of a test. It has a few lines.")["input_ids"]])
    wanted = teacher(input_ids=tokens).logits.detach().log_softmax(-1)
    distances = []
    for steps in ("1", "200"):
        facts = found(
            capsys,
            *("compress", str(private), "--distil", str(config), "--steps", steps),
            *("--out", str(tmp_path / steps)),
        )
        found_by = check(facts, private)(input_ids=tokens).logits.detach().log_softmax(-1)
        distances.append(functional.kl_div(found_by, wanted, reduction="batchmean", log_target=True).item())
        assert facts["after"]["weight_bytes"] < facts["before"]["weight_bytes"]
    assert distances[1] < 0.7 * distances[0]  # the noise of the run is drawn anew each time
    said = lone_refusal(capsys, "compress", str(private), "--distil", str(tmp_path / "none.json"))
    assert "--distil is" in said
    for wrong, part in (
        ({"num_hidden_layer": 1}, "did you mean num_hidden_layers?"),
        ({"vocab_size": 300}, "--distil: vocab_size"),
        ({"hidden_size": "small"}, "expected a configuration of a model"),
        ({"num_key_value_heads": 3, "num_hidden_layers": 1}, "expected a configuration of a model"),
        ({"return_dict": False, "num_hidden_layers": 1}, "expected a configuration of a model"),
        ({"hidden_size": 64}, "expected fewer than the"),
    ):
        config.write_text(json.dumps(wrong))
        assert part in lone_refusal(capsys, "compress", str(private), "--distil", str(config))
    assert not (private / "compressed").exists()


@pytest.mark.parametrize("method", [("--prune", "0.5"), ("--distil", "config.json")])
def test_the_records_of_sites_are_refused_under_a_unit(
    method: tuple[str, str],
    private: Path,
    small_plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = small_plan.parent / "records.jsonl"
    sites = private / "sites"
    for text in (source, source.parent, sites, next(sites.glob("site-000/*.jsonl")), private.parent):
        said = lone_refusal(capsys, "compress", str(private), *method, "--text", str(text))
        assert "expected public text" in said, text
    shutil.copy(source, tmp_path)  # as a relative path of the plan, seen from another folder
    for name in (str(tmp_path / source.name), str(sites / "site-000" / "site.toml")):
        assert "expected public text" in lone_refusal(
            capsys, "compress", str(private), *method, "--text", name
        )
    for target in (source, next(sites.glob("site-000/*.jsonl"))):
        linked = tmp_path / f"of {target.parent.name}"
        linked.mkdir()
        for link in (linked / "text.jsonl").symlink_to, (linked / "same.jsonl").hardlink_to:
            link(target)
            said = lone_refusal(capsys, "compress", str(private), *method, "--text", str(linked))
            assert "expected public text" in said
            next(linked.iterdir()).unlink()
    shutil.copytree(private, without := tmp_path / "without", ignore=shutil.ignore_patterns("sites"))
    said = lone_refusal(capsys, "compress", str(without), *method, "--text", str(source))
    assert "expected public text" in said


@pytest.mark.slow
def test_text_may_be_given_and_must_be_where_the_run_has_no_public_records(
    whole: dict[str, Any], private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = whole["run"], str(tmp_path / "made")
    said = lone_refusal(capsys, "compress", run, "--prune", "0.5", "--out", target)
    assert "--text: expected public text, because the run evaluated no public records" in said
    text = str(private.parent / "public.txt")
    facts = found(capsys, "compress", run, "--prune", "0.5", "--text", text, "--out", target)
    assert facts["text"] == text
    assert math.isfinite(facts["after"]["loss"])
    assert "expected a new folder, or an empty one" in lone_refusal(
        capsys, "compress", run, "--prune", "0.5", "--text", text, "--out", target
    )
    assert "a share between 0 and 1" in lone_refusal(capsys, "compress", run, "--prune", "1")
    shutil.copytree(private, tmp_path / "run")
    done(capsys, "compress", str(tmp_path / "run"), "--prune", "0.5")
    assert (tmp_path / "run" / "compressed" / "config.json").is_file()
    done(capsys, "generate", str(tmp_path / "run"), "--prompt", "The ", "--tokens", "4")
