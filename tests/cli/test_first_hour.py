"""What a newcomer meets with own records: counts, refusals with a fix, and what a run says at its end."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from cloister.protocol.errors import DataError
from cloister.tests.tools.command import done, found, ran, refusal, set_options

pytestmark = pytest.mark.usefixtures("unsynced")

CHATS = ["data.format=messages", "data.sequence_length=64", "simulation.partition=iid", "run.rounds=1"]
UNIT = [
    "privacy.unit=record",
    "privacy.noise_multiplier=1",
    "privacy.sampling_rate=0.5",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
]


def chat(said: object) -> str:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": said}]
    return json.dumps({"messages": turns})


def options(folder: Path, lines: list[str], *settings: str) -> list[str]:
    """The options of a command on chats of one's own."""
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return set_options([*CHATS, f"simulation.source={path}", *settings])


def test_a_check_counts_the_records_of_each_source_and_names_those_that_are_not_used(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public = tmp_path / "public.jsonl"
    public.write_text("\n".join(chat("Nobody.") for _ in range(7)))
    lines = [chat("Me."), chat(7), chat("x" * 100 + "Y"), *[chat("You.")] * 10, chat(8)]
    lines[2] = json.dumps(
        {"messages": [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": ""}]}
    )
    given = options(tmp_path, lines, f"public.source={public}")
    checked = found(capsys, "plan", "check", str(small_plan), *given)
    assert checked["records"] == {"simulation.source": 14, "fewest at a site": 3, "public.source": 7}
    source = tmp_path / "chats.jsonl"
    assert checked["not_used"] == (
        f"not used: 1 without a learnable token within data.sequence_length (the first: {source}, line 3), "
        f"2 without the fields of data.format 'messages' (the first: {source}, line 2, field messages)"
    )
    shown = done(capsys, "plan", "check", str(small_plan), *given)
    assert re.search(r"records: simulation\.source +│ +14 ", shown)
    assert re.search(r"records: public\.source +│ +7 ", shown)
    assert checked["not_used"] in shown
    private = found(capsys, "plan", "check", str(small_plan), *given, *set_options(UNIT))
    assert (private["records"], private["not_used"]) == (checked["records"], "")


def test_a_check_says_what_a_bound_on_updates_is_worth(
    small_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = set_options([*UNIT, "aggregation.norm_bound=2.0", "local.batch_size=4", "local.accumulation=1"])
    checked = found(capsys, "plan", "check", str(small_plan), *given)
    share = 1 / math.sqrt(1 + (checked["noise_multiplier"] / 4) ** 2 * checked["trained_parameters"])
    assert checked["norm_bound"] == 2.0
    with_room = checked["norm_bound_with_rounding"]
    assert 2.0 < with_room < 2.001
    auto = found(
        capsys, "plan", "check", str(small_plan), *given, *set_options(["aggregation.norm_bound=auto"])
    )
    honest = share * min(2.0, auto["norm_bound"])
    assert checked["liar_reach"] == pytest.approx(3 * with_room / honest)
    assert auto["liar_reach"] == pytest.approx(3 / share, rel=1e-3)
    assert checked["sketched"] == 128 * 3
    shown = done(capsys, "plan", "check", str(small_plan), *given)
    assert re.search(r"bound on an update's L2 norm +│ +2 ", shown)
    assert "the coordinator sees up to 384 numbers of each site's own noised update" in shown
    line = refusal(
        capsys, "plan", "check", str(small_plan), *set_options([*UNIT, "aggregation.norm_bound=0"])
    )
    assert '"auto", or a number from 1e-06 to 1e+06' in line
    without = found(capsys, "plan", "check", str(small_plan), *set_options(UNIT))
    assert without.keys().isdisjoint({"norm_bound", "liar_reach"})
    more = checked["overhead_bytes_up"] - without["overhead_bytes_up"]
    assert 1024 <= more < 1250


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("verb", [["plan", "check"], ["simulate"]])
def test_too_few_records_for_the_sites_are_refused_before_a_run(
    small_plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    verb: list[str],
    count: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["--traceback", *verb, str(small_plan), *options(tmp_path, [chat("Me.")] * count)]
    with pytest.raises(DataError) as refused:
        ran(capsys, *command)
    assert refused.value.field == "simulation.partition"
    assert "add records" in refused.value.fix
    assert not (tmp_path / "runs" / "tiny").exists()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.format=prompt", "data.prompt_field=asked"],
        ["data.format=text", "data.text_field=note"],
        ["data.format=text", "data.task=classify", 'data.classes=["no", "yes"]'],
    ],
)
def test_a_line_that_is_no_json_is_quoted_with_a_line_that_the_plan_takes(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str]
) -> None:
    given = options(tmp_path, ["question,answer", '"Who?","Me."'], *settings)
    line = refusal(capsys, "plan", "check", str(small_plan), *given)
    assert f"{tmp_path / 'chats.jsonl'}, line 1 is 'question,answer'" in line
    such = line[line.index("{") :]
    done(capsys, "plan", "check", str(small_plan), *options(tmp_path, [such] * 8, *settings))


@pytest.mark.parametrize("private", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_end_of_a_run_on_chats_counts_what_is_not_used_and_shows_how_to_ask(
    small_plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    private: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = options(tmp_path, [chat("Me."), chat(7), *[chat("You.")] * 10, chat(8)], *UNIT * private)
    code, out, err = ran(capsys, "simulate", str(small_plan), *given)
    assert (code, err) == (0, "")
    end = out[out.index("Outcome") :]
    (line,) = (line for line in end.splitlines() if "not used" in line)
    assert "2 without the fields of data.format 'messages'" in line
    # the partition is drawn, so one site has both of them or two sites have one each
    places = re.findall(r"([^ ]*/data\.jsonl), line (\d+)", line)
    if private:
        assert not places
        assert "must stay at this site" in line
    else:
        assert "(the first: " in line
        firsts = [Path(file).read_text().splitlines()[int(number) - 1] for file, number in places]
        assert firsts
        assert set(firsts) <= {chat(7), chat(8)}
    assert "the final model answers 'Hello'" in end
    assert " ".join(done(capsys, "resume", "runs/tiny").split()).count(line) == 1
    (hint,) = (line for line in end.splitlines() if line.startswith("try "))
    program, *arguments = shlex.split(hint)[1:]
    assert program == "cloister"
    assert not done(capsys, *arguments).startswith("Hello")


def test_a_second_run_of_a_plan_says_where_it_goes_and_why(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/tiny").mkdir(parents=True)
    code, out, err = ran(capsys, "simulate", str(small_plan), "--rounds", "1")
    assert code == 0
    (line,) = err.splitlines()
    assert "runs/tiny exists" in line
    assert "runs/tiny-2" in line
    assert "cloister resume runs/tiny" in line
    assert "run     runs/tiny-2" in out


def test_a_tokenizer_says_that_it_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "public.txt").write_text("a text of the public\n" * 50)
    command = [
        "tokenizer",
        "train",
        str(tmp_path / "public.txt"),
        "--vocab",
        "260",
        "--out",
        str(tmp_path / "out"),
    ]
    code, _, err = ran(capsys, *command)
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("training a tokenizer of 260 tokens on ")


def test_a_run_that_too_few_sites_finish_ends_with_the_reason_of_one(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = set_options(["faults.update=1", "cohort.attempts=1"])
    line = refusal(capsys, "simulate", str(small_plan), "--out", str(tmp_path / "run"), *faults)
    assert re.search(r"to finish in one of them \(site-00\d: .*faults.*\)", line), line


def test_a_file_is_no_run(small_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected the folder of a run" in refusal(capsys, "report", str(small_plan))


def test_chats_without_an_assistant_are_told_so(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = '{"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}'
    line = refusal(
        capsys, "plan", "check", str(small_plan), *options(tmp_path, [turn] * 8, "data.format=messages")
    )
    assert "data.messages_field" in line
    assert "the role 'assistant'" in line


def test_others_may_read_a_saved_model(whole: dict[str, Any]) -> None:
    modes = {path.stat().st_mode for path in (Path(whole["run"]) / "final").iterdir()}
    assert len(modes) == 1


def test_a_check_says_how_long_the_noise_is_beside_the_signal(
    small_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = set_options([*UNIT, "local.batch_size=4", "local.accumulation=1", "cohort.sites=4"])
    unknown = found(capsys, "plan", "check", str(small_plan), *given)
    assert "signal" not in unknown
    assert "set cohort.units" in done(capsys, "plan", "check", str(small_plan), *given)
    more = set_options(["cohort.units=56", "privacy.delta=0.01"])
    signal = found(capsys, "plan", "check", str(small_plan), *given, *more)["signal"]
    assert signal["batch"] == 28
    assert len(signal["advice"]) == 3, "batch size, noise and delta"
    shown = done(capsys, "plan", "check", str(small_plan), *given, *more)
    assert re.search(r"expected units of a batch +│ +28 of about 56 at a site", shown)
    assert all(line in shown for line in signal["advice"])
    line = refusal(capsys, "plan", "check", str(small_plan), *set_options(["cohort.units=56"]))
    assert line.startswith("cloister: cohort.units is 56")


def test_a_run_says_what_is_wrong_with_its_noise_and_that_its_loss_does_not_fall(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start, in the run and at its end."""
    lost = [
        "server.evaluation=simulation:public",
        "simulation.public=0.3",
        "data.held_out=0.0",
        "run.rounds=4",
    ]
    given = set_options([*UNIT[:-1], *lost, "cohort.units=500", "local.learning_rate=0.9"])
    folder = tmp_path / "run"
    shown = done(capsys, "simulate", str(small_plan), *given, "--out", str(folder), "--workers", "1")
    start, _, rest = shown.partition("round 0: held-out loss")
    assert "units at a site" in start
    assert "exact counts, which no charge covers" in start
    assert "warning: the noise in the mean of a round is" in start
    in_the_run, _, end = rest.partition("finished 4 rounds")
    assert in_the_run.count("warning: the held-out loss has not fallen in 3 evaluations") == 1
    assert "it did not fall" in end
    done(capsys, "report", str(folder))
    report = json.loads((folder / "report.json").read_bytes())
    assert report["protected"] == 500 * report["federation"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "of all sites, as the plan states" in page
