"""The main job, from the command line: real processes, real training, real crashes."""

import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cloister.aggregation.features.in_clear import TOKENS
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import SumLayout
from cloister.protocol.identity.roster import new_identity, save_identity
from cloister.protocol.plan.soundness import load
from cloister.server.record.folder import RunFolder, read_plan
from cloister.server.record.journal import DONE, Journal
from cloister.server.record.progress import (
    Evaluated,
    Event,
    RoundStarted,
    SiteFailed,
)
from cloister.simulations.federation import simulate
from cloister.tests.tools.command import found, ran, refusal


def tokens_of_update(path: Path, layout: SumLayout) -> int:
    """What a site has counted itself, in the tail of the vector that it keeps."""
    vector = np.fromfile(path, layout.ring.dtype, layout.length)
    return layout.ring.decode_counters(vector[layout.size :])[layout.names.index(TOKENS)]


def test_the_run_folder_holds_what_it_promises(whole: dict[str, Any]) -> None:
    folder = Path(whole["run"])
    assert whole["rounds"] == 3
    assert whole["epsilon"] is None
    assert whole["delta"] is None
    assert 0 < whole["final_loss"] < whole["initial_loss"]
    assert whole["perplexity"] == pytest.approx(np.exp(whole["final_loss"]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert all(0 < row["tokens"] <= 4 * 2 * 4 * 15 for row in rows[1:])
    layout = Sums(read_plan(folder), 13_648).training
    updates = list(folder.glob("sites/*/state/runs/*/update-00003.ring"))
    assert len(updates) == 4
    assert rows[-1]["tokens"] == sum(tokens_of_update(path, layout) for path in updates)
    # Imported here: a killed run imports this file, and need not wait for TensorBoard.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [0, 1, 2, 3]
    # The digest is that of the parameters that are on disk, by name in sorted order.
    tensors = load_file(folder / "checkpoints" / "round-00003.safetensors")
    model = [tensors[name].ravel() for name in sorted(tensors) if name.startswith("model/")]
    assert hashlib.sha256(np.concatenate(model).tobytes()).hexdigest() == whole["params_sha256"]


def test_the_final_model_loads_with_transformers_and_writes(
    whole: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = Path(whole["run"]) / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.decode(tokenizer("héllo").input_ids) == "héllo"
    tensors = load_file(Path(whole["run"]) / "checkpoints" / "round-00003.safetensors")
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), tensors["model/" + name])
    arguments = [
        "generate",
        whole["run"],
        "--prompt",
        "patient",
        "--tokens",
        "8",
        "--temperature",
        "0",
    ]
    code, out, _ = ran(capsys, *arguments)
    assert code == 0
    assert out.startswith("patient")
    assert ran(capsys, *arguments)[1] == out


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_weights(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = found(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "alone"), "--workers", "1")
    assert alone["params_sha256"] == whole["params_sha256"]
    other = found(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "other"), "--seed", "1")
    assert other["params_sha256"] != whole["params_sha256"]


# Where evaluation happens, dropouts, refusals


@pytest.mark.slow
def test_the_coordinator_evaluates_where_it_has_records(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text('{"text": "patient 3 was seen on day 21. patient 3 was seen on day 21."}\n' * 3)
    arguments = ["--out", str(tmp_path / "run"), "--set", "data.held_out=0.0"]
    code, out, err = ran(
        capsys, "simulate", str(small_plan), *arguments, "--set", f"server.evaluation={public}"
    )
    assert code == 0, err
    assert "nan" not in out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert not (tmp_path / "run" / "sites.json").exists()
    with Journal(tmp_path / "run" / "journal.sqlite") as journal:
        assert not any(entry.step.startswith("evaluate") for entry in journal.entries())  # no site was asked


# The secure sum


def test_the_secure_sum_does_not_change_the_weights(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clear = ["--set", "aggregation.secure=false", "--out", str(tmp_path / "clear")]
    assert found(capsys, "simulate", str(small_plan), *clear)["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_dropouts_by_the_plan_leave_the_weights_of_those_who_stay(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = ["cohort.sites=6", "cohort.quorum=0.5", "faults.update=0.2", "run.rounds=2"]
    results = []
    for secure in ("true", "false"):
        out = ["--out", str(tmp_path / secure), "--set", f"aggregation.secure={secure}"]
        for setting in faults:
            out += ["--set", setting]
        results.append(found(capsys, "simulate", str(small_plan), *out))
        rows = [json.loads(line) for line in (tmp_path / secure / "metrics.jsonl").read_text().splitlines()]
        assert sum(row["dropouts"] for row in rows[1:]) > 0
    assert results[0]["params_sha256"] == results[1]["params_sha256"]


@pytest.mark.slow
def test_dropouts_at_every_step_do_not_end_a_run(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path / "run"), "--set", "cohort.sites=8", "--set", "cohort.quorum=0.5"]
    arguments += ["--set", "cohort.attempts=8"]
    for step in ("advertise", "share", "update", "confirm", "unmask"):
        arguments += ["--set", f"faults.{step}=0.06"]
    code, out, err = ran(capsys, "simulate", str(small_plan), *arguments)
    assert code == 0, err
    for step in ("advertise", "share", "update", "confirm", "unmask"):
        assert f"[faults] {step} made it drop out" in out, step


def test_a_run_whose_sites_never_reveal_shares_stops_and_says_so(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path / "run"), "--rounds", "9", "--set", "cohort.attempts=2"]
    code, out, err = ran(capsys, "simulate", str(small_plan), *arguments, "--set", "faults.unmask=1.0")
    assert code == 2
    assert "rounds 1 to 2 is 'given up': expected survivors that reveal their shares" in err
    assert "round 0: not evaluated, after 2 attempts" in out
    assert "round 1: given up after 2 attempts; the model is unchanged" in out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len({row["params_sha256"] for row in rows}) == 1


@pytest.mark.slow
def test_a_killed_worker_is_a_dropout(small_plan: Path, tmp_path: Path) -> None:
    failed: list[str] = []
    working: list[str] = []
    ready = [False]

    def observe(event: Event) -> None:
        ready[0] |= isinstance(event, RoundStarted) and (event.round, event.purpose) == (2, "train")
        if isinstance(event, SiteFailed):
            failed.append(event.reason)

    def kill_one(site: str, at_work: bool) -> None:
        working.append(site)
        if at_work and ready[0] and not failed and len(working) % 5 == 0:
            children = [child for child in multiprocessing.active_children() if "cloister" in child.name]
            if children and children[0].pid:
                os.kill(children[0].pid, signal.SIGKILL)

    plan = load(small_plan, ["cohort.quorum=0.5", "cohort.attempts=10"])
    with RunFolder.create(tmp_path / "run", plan) as folder:
        outcome = simulate(folder, observe, workers=2, watch=kill_one)
    assert outcome.rounds == 3
    assert any("killed by SIGKILL" in reason for reason in failed)


def test_a_site_without_its_place_in_the_roster_is_refused(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another identity, another roster, too small a cohort: each site refuses by itself, and says why."""
    out = tmp_path / "run"

    def stop(event: Event) -> None:
        if isinstance(event, Evaluated):
            raise KeyboardInterrupt

    with RunFolder.create(out, load(small_plan)) as folder, pytest.raises(KeyboardInterrupt):
        simulate(folder, stop, workers=2)
    sites = out / "sites"
    (sites / "site-000" / "identity.pem").unlink()
    save_identity(new_identity(), sites / "site-000" / "identity.pem")
    toml = (sites / "site-001" / "site.toml").read_text()
    pinned = toml.split('roster_hash = "')[1].split('"')[0]
    (sites / "site-001" / "site.toml").write_text(toml.replace(pinned, "0" * 64))
    (sites / "site-002" / "site.toml").write_text(
        (sites / "site-002" / "site.toml").read_text() + "minimum_cohort = 9\n"
    )
    code, printed, err = ran(capsys, "resume", str(out))
    assert code == 2
    assert "identity of site-000: expected the key that the roster has for it" in printed
    assert "0000000000" in printed
    assert "Traceback" not in printed + err


# What a person gets wrong


def test_wrong_inputs_are_one_line_each(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.toml").touch()
    (tmp_path / "model.toml").write_text(f"[model]\nname = '{tmp_path}/no-model'\n")
    base = ["simulate", str(small_plan), "--out", str(tmp_path / "refused")]
    for arguments, parts in [
        (["simulate", str(tmp_path / "none.toml")], ["none.toml", "an existing TOML file"]),
        (["simulate", str(tmp_path / "empty.toml")], ["empty.toml", "empty"]),
        (["simulate", "private-cod"], ["'private-cod'", "a shipped plan", " private-code,"]),
        (
            [*base, "--set", "data.held_out=0"],
            ["data.held_out", '"simulation:public" with simulation.public = 0.1'],
        ),
        ([*base, "--set", "local.stepz=1"], ["local.stepz", "did you mean local.steps?"]),
        ([*base, "--set", "local.steps=few"], ["local.steps", "'few'", "integer"]),
        (["simulate", str(tmp_path / "model.toml"), *base[2:]], ["no-model", "existing"]),
        ([*base, "--rounds", "0"], ["run.rounds", "0"]),
        ([*base, "--workers", "0"], ["--workers", "0", "1 or more"]),
        (["resume", str(tmp_path / "nowhere")], ["nowhere", "the folder of a run"]),
        (["generate", str(tmp_path / "nowhere"), "--prompt", "x"], ["nowhere", "the folder of a run"]),
    ]:
        line = refusal(capsys, *arguments)
        for part in parts:
            assert part in line, line


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("simulation.source={folder}/none.jsonl", ["none.jsonl", "existing"]),
        ("simulation.source={folder}/empty.jsonl", ["empty.jsonl", "empty"]),
        ("simulation.source=builtin:python-doc", ["builtin:python-doc", "did you mean builtin:python-docs?"]),
        ("simulation.source={folder}/two.jsonl", ["4 sites", "cohort.sites"]),
        ("data.text_field=body", ["body", "text"]),
        ("model.name=builtin:lama", ["lama", "llama"]),
        ("model.config.hidden_sise=32", ["hidden_sise", "hidden_size"]),
        ("model.config.intermediate_size=10000000000", ["parameters", "GB of memory", "[model.config]"]),
        ("data.sequence_length=100000", ["sequence_length"]),
    ],
)
def test_what_cannot_be_run_is_refused_and_can_be_mended(
    override: str, parts: list[str], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "two.jsonl").write_text('{"text": "one record"}\n{"text": "another record"}\n')
    out = tmp_path / "refused"
    setting = override.format(folder=tmp_path)
    line = refusal(capsys, "simulate", str(small_plan), "--out", str(out), "--set", setting)
    for part in parts:
        assert part in line, line
    assert not out.exists()


def test_plan_check_finds_wrong_records_before_any_site_is_made(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('\n{"note": "a", "ward": "x"}\n' * 4 + '{"note": "a"}\n')
    for settings, said in (
        (
            [f"simulation.source={path}", "data.text_field=note", "simulation.field="],
            'simulation.partition is "natural"; the fields of its first record: note, ward; set simulation.field',
        ),
        (["simulation.source=gone.jsonl"], "simulation.source is 'gone.jsonl': expected an existing file"),
        (
            [f"simulation.source={path}"],
            f"{path}, line 2, field text: expected a field of that name; the fields of the record: note",
        ),
        (
            [f"simulation.source={path}", "data.text_field=note", "simulation.field=ward"],
            f"{path}, record 5: expected a field 'ward'",
        ),
    ):
        options = [part for setting in settings for part in ("--set", setting)]
        line = refusal(
            capsys, "plan", "check", str(small_plan), "--set", "simulation.partition=natural", *options
        )
        assert said in line


def test_a_site_that_is_lost_for_its_data_is_named_at_the_end(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wards.jsonl"
    rows = [
        {"text": 7 if ward == "c" else f"note {number}", "ward": ward}
        for number in range(8)
        for ward in "abcd"
    ]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"text": True, "ward": "a"}]))
    settings = [f"simulation.source={path}", "simulation.partition=natural", "simulation.field=ward"]
    options = [part for setting in (*settings, "run.rounds=1") for part in ("--set", setting)]
    code, out, _ = ran(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "run"), *options)
    assert code == 0
    lost = [line for line in out.splitlines() if "took no part in the run" in line]
    assert len(lost) == 1
    assert re.search(
        r"^node \d \(unverified name: site-00\d\) took no part .*/data\.jsonl, line 1, field text is 7: expected text",
        lost[0],
    )
    assert "not used: 1 without the fields of data.format 'text'" in out


def test_a_fork_server_that_cannot_start_is_one_line_and_leaves_no_folder(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", refuse)
    line = refusal(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "refused"))
    assert "its fork server does not answer (OSError: AF_UNIX path too long)" in line
    assert not (tmp_path / "refused").exists()


def test_a_folder_with_another_run_is_left_alone(
    whole: dict[str, Any], small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (Path(whole["run"]) / "metrics.jsonl").read_bytes()
    line = refusal(capsys, "simulate", str(small_plan), "--out", whole["run"])
    assert "holds another run" in line
    assert "cloister resume" in line
    assert (Path(whole["run"]) / "metrics.jsonl").read_bytes() == before


def test_updates_that_are_not_finite_are_dropouts_and_no_quorum_ends_the_run(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path / "nan"), "--set", "local.learning_rate=1e38"]
    code, out, err = ran(capsys, "simulate", str(small_plan), *arguments)
    assert code == 2
    assert "dropped out" in out
    assert "non-finite" in out
    assert "3 of 4 sites to finish" in err.splitlines()[-1]
    assert "Traceback" not in out + err
    with Journal(tmp_path / "nan" / "journal.sqlite") as journal:
        assert journal.newest(DONE) is not None


def test_help_is_fast_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom cloister.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'flwr', 'numpy', 'datasets', 'rich', 'pydantic', 'sqlite3'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "simulate" in done.stdout


def test_displays_know_all_figures_without_torch() -> None:
    """A run imports torch while its workers do; a display that imported it before would make a person wait twice."""
    code = (
        "import sys\nfrom cloister.aggregation.features.registry import FIGURES\n"
        "import cloister.server.display, cloister.cli.show.execution, cloister.cli.show.follow\n"
        "assert FIGURES\n"
        "heavy = {'torch', 'transformers', 'dp_accounting', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_plan_check_prints_the_plan_and_its_cost(
    small_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ran(capsys, "plan", "check", str(small_plan), "--json", "--sites", "5")
    assert code == 0
    found = json.loads(out)
    assert found["plan"]["cohort"]["sites"] == 5
    assert found["cohort"] == 5
    assert found["bytes_down"] == 4 * found["trained_parameters"]
    assert found["trained_parameters"] == found["parameters"] > 0
    code, out, _ = ran(capsys, "plan", "check", str(small_plan))
    assert code == 0
    assert f"{found['parameters']:,}" in out
    assert "learning_rate = 0.003" in out
    assert "did you mean" in refusal(capsys, "plan", "check", str(small_plan), "--set", "run.round=3")


PRIVATE = [
    *("--set", "aggregation.weighting=uniform", "--set", "server.evaluation=none", "--rounds", "2"),
    *("--set", "privacy.noise_multiplier=1.0", "--set", "privacy.delta=1e-3"),
]
BY_UNIT = {
    "record": ["--set", "privacy.unit=record", "--set", "privacy.sampling_rate=0.2"],
    "site": ["--set", "privacy.unit=site"],
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", BY_UNIT)
def test_private_runs_are_the_same_where_the_noise_is_declared_and_only_there(
    unit: str, small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(name: str, workers: str, *more: str) -> str:
        out = ["--out", str(tmp_path / name), "--workers", workers]
        result = found(capsys, "simulate", str(small_plan), *PRIVATE, *BY_UNIT[unit], *out, *more)
        assert (result["epsilon"] is None) == bool(more)  # anyone with the seed can remove the noise
        return str(result["params_sha256"])

    declared = ["--set", "simulation.noise_seed=3"]
    assert weights("one", "1", *declared) == weights("two", "2", *declared)
    assert weights("secret", "2") != weights("secret again", "2")
