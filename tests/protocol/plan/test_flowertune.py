"""The plans for the tasks of the FlowerTune leaderboard, checked with a small model in the place of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloister.lm.text.tokenizer import byte_tokenizer
from cloister.tests.tools.command import found


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of the benchmark's type, without its size."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("mistral")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model("mistral", vocab_size=264, num_key_value_heads=2, **shape).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("task", "sites", "cohort"), [("general", 20, 2), ("finance", 50, 5), ("medical", 20, 2), ("code", 10, 2)]
)
def test_a_task_s_plan_is_sound(
    task: str,
    sites: int,
    cohort: int,
    mistral: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [json.dumps({"prompt": "q", "completion": f" {number}"}) for number in range(200)]
    (tmp_path / f"flowertune-{task}.jsonl").write_text("\n".join(records))
    cost = found(capsys, "plan", "check", f"flowertune-{task}", "--set", f"model.name={mistral}")
    plan = cost["plan"]
    assert (plan["cohort"]["sites"], cost["cohort"]) == (sites, cohort)
    assert cost["trained_parameters"] == 2 * 32 * (32 + 32 + 32 + 16)  # layers x rank x the sides of q and v
    # The benchmark sums the bytes of the arrays of each message, to the sites of a round and back.
    assert cost["bytes_of_run"] == 200 * cohort * 2 * 4 * cost["trained_parameters"]
    assert plan["model"]["adapter"]["base_precision"] == "nf4"
    assert plan["simulation"]["source"] == f"flowertune-{task}.jsonl"
    rate = plan["local"]["learning_rate"]
    assert rate * plan["local"]["final_learning_rate"] == pytest.approx(1e-6)
