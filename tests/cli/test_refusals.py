"""Errors of users and disks: one line that states the fix, and no data is lost."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloister.cli.main import VERBS, command_parser, main
from cloister.cli.show.console import PipedConsole
from cloister.cli.show.execution import execute
from cloister.cli.verbs import generate
from cloister.cli.verbs.plan import warnings
from cloister.lm.text.sources import overlap
from cloister.protocol.errors import PlanError, QuorumError, RunFolderError, StorageError
from cloister.protocol.plan import soundness
from cloister.protocol.plan.soundness import parse
from cloister.server.display import LineDisplay
from cloister.server.federation.deployment import Deployment
from cloister.server.record.folder import RunFolder, read_plan
from cloister.server.record.journal import CREATED, DONE, Journal
from cloister.server.record.progress import SiteFailed
from cloister.simulations import federation
from cloister.tests.parties.federation import CENTRAL, TINY, write_records
from cloister.tests.tools.command import lone_refusal, ran, set_options
from cloister.tests.tools.raises import raises

LONG = "x" * 300
"""A name that no file system takes."""


def field_of(*overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        parse("", overrides)
    return f"{caught.value.field}: {caught.value.expected}"


# run folders


def test_a_deployed_run_is_not_continued_as_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder.create(tmp_path / "run", parse("")) as folder:
        Deployment(1, 0.0).write(folder)
    before = sorted(path.name for path in folder.path.iterdir())
    line = lone_refusal(capsys, "resume", str(folder.path))
    assert line.endswith(f"continue it with: cloister submit --to FEDERATION --again {folder.path}")
    (folder.path / "federation").mkdir()
    line = lone_refusal(capsys, "resume", str(folder.path))
    assert line.endswith(f"continue it with: cloister up --again {folder.path}")
    assert sorted(path.name for path in folder.path.iterdir()) == sorted([*before, "federation"])


@pytest.mark.parametrize("field", ["public.source", "server.evaluation"])
@pytest.mark.parametrize(
    ("source", "public", "split"),
    [
        ("{}/data/records.jsonl", "data/records.jsonl", "train"),
        ("{}/data/records.jsonl", "data/records.jsonl", "test"),  # a file has no splits
        ("{}/data", "data/records.jsonl", "train"),
        ("data/records.jsonl", "{}/data", "train"),
        ("data", "link.jsonl", "train"),
        ("links", "data/records.jsonl", "train"),
    ],
)
def test_records_of_sites_are_not_public_under_a_unit(
    field: str,
    source: str,
    public: str,
    split: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where one path is relative and the other is not, where one has the other, and through links."""
    plan = tmp_path / "plan.toml"
    plan.write_text(TINY)
    (tmp_path / "data").mkdir()
    (tmp_path / "links").mkdir()
    for link in (tmp_path / "link.jsonl", tmp_path / "links" / "link.jsonl"):
        link.symlink_to(write_records(tmp_path / "data" / "records.jsonl"))
    monkeypatch.chdir(tmp_path)
    source, public = source.format(tmp_path), public.format(tmp_path)
    fields = [*CENTRAL, f"simulation.source={source}", f"{field}={public}", f"simulation.split={split}"]
    options = set_options(fields)
    code, _, err = ran(capsys, "simulate", str(plan), *options, "--out", str(tmp_path / "run"))
    assert code == 2
    assert f"{field} is {public!r}: expected public records, and these are records of the sites" in err
    assert not (tmp_path / "run").exists()


def test_a_hub_data_set_is_the_same_one_in_another_configuration() -> None:
    plan = parse(TINY, [*CENTRAL, "simulation.source=letters/ward", "public.source=Letters/ward:2024"])
    with raises(PlanError, "public.source", says="these are records of the sites"):
        federation.divided(plan)
    assert not overlap("letters/wards", "letters/ward", "public.source")


@pytest.mark.parametrize(
    ("own", "public"), [("train", "train[:90%]"), ("train+test", "test"), ("all", "train")]
)
def test_splits_of_a_hub_data_set_that_may_have_the_same_records_are_not_apart(own: str, public: str) -> None:
    for splits in ((own, public), (public, own)):
        settings = [f"simulation.split={splits[0]}", f"public.split={splits[1]}"]
        same = ["simulation.source=letters/ward", "public.source=letters/ward"]
        with raises(PlanError, "public.source", says="these are records of the sites"):
            federation.divided(parse(TINY, [*CENTRAL, *same, *settings]))


@pytest.mark.parametrize("other", ["builtin:python-docs", "builtin:python-stdlib"])
def test_passages_of_a_corpus_are_records_of_it(other: str) -> None:
    passages = "builtin:python-passages"
    for records, public in ((other, passages), (passages, other)):
        plan = parse(TINY, [*CENTRAL, f"simulation.source={records}", f"public.source={public}"])
        with raises(PlanError, "public.source", says="these are records of the sites"):
            federation.divided(plan)
    assert not overlap("builtin:python-docs", "builtin:python-stdlib", "public.source")


def test_functions_are_records_of_the_library_and_not_of_the_manual() -> None:
    functions = "builtin:python-functions"
    for other in ("builtin:python-stdlib", "builtin:python-passages", functions):
        assert overlap(functions, other, "public.source")
        assert overlap(other, functions, "public.source")
    assert not overlap(functions, "builtin:python-docs", "public.source")


def test_a_simulation_is_not_continued_as_a_rehearsal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(tmp_path / "run", parse("")).close()
    line = lone_refusal(capsys, "up", "--again", str(tmp_path / "run"))
    assert line.endswith(f"continue it with: cloister resume {tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["not-private"], "PLAN"),
        (["--sites", "3"], "--sites"),
        (["--set", "run.rounds=2"], "--set"),
        (["--rounds", "2", "--out", "x"], "--rounds, --out"),
    ],
)
@pytest.mark.parametrize("verb", [["up"], ["submit", "--to", "none"]])
def test_a_run_is_continued_as_it_began(
    verb: list[str], given: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = lone_refusal(capsys, *verb, *given, "--again", "runs/mine")
    assert f"--again is 'runs/mine': expected it without {named}: " in line


@pytest.mark.parametrize(
    "setting", ["simulation.noise_seed=3", "simulation.ledger=over.sqlite"], ids=["noise seed", "ledger"]
)
def test_a_rehearsal_refuses_what_only_a_simulation_charges_or_declares(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--set", "simulation.dataset=mine"] if "ledger" in setting else []
    out = tmp_path / "run"
    line = lone_refusal(capsys, "up", "private-code", "--set", setting, *more, "--out", str(out))
    assert line.startswith(f"cloister: {setting.partition('=')[0]} is ")
    assert not out.exists()


def test_folders_that_the_system_refuses_are_one_line(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / LONG, tmp_path / LONG / "run"):
        assert "a folder that can be made" in lone_refusal(
            capsys, "simulate", str(small_plan), "--out", str(path)
        )
        assert "can be read" in lone_refusal(capsys, "resume", str(path))
        assert "can be read" in lone_refusal(capsys, "generate", str(path), "--prompt", "x")
    run = tmp_path / "run"
    RunFolder.create(run, parse("")).close()
    (run / ".lock").unlink()
    (run / ".lock").mkdir()  # cannot be opened for writing, by root neither
    line = lone_refusal(capsys, "resume", str(run))
    assert str(run) in line
    assert "a disk that accepts the write" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, parse("")).close()
    (run / ".lock").unlink()
    run.chmod(0o500)
    assert "a disk that accepts the write" in lone_refusal(capsys, "resume", str(run))


@pytest.mark.parametrize(
    "content", [b"", b'{"run": {"na', b"\x00\xff\xfe\x80", b"[]", b'{"run": {"rounds": 0}}']
)
def test_a_damaged_plan_is_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, parse("")).close()
    (run / "plan.json").write_bytes(content)
    line = lone_refusal(capsys, "resume", str(run))
    assert str(run / "plan.json") in line
    assert "a whole plan (" in line
    assert "restore it from a backup" in line
    assert "pydantic" not in line


def test_a_damaged_journal_is_named_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        for number in range(2000):
            journal.record(number, 1, DONE, {"round": number})
    whole = path.read_bytes()
    page = 4096
    # Every page but the first, which says what tables there are: then each method finds it out for itself.
    path.write_bytes(whole[:page] + b"\xff" * (len(whole) - page))
    calls: list[Callable[[Journal], object]] = [
        lambda journal: journal.newest(DONE),
        lambda journal: journal.newest(CREATED, 3),
        lambda journal: journal.entries(),
        lambda journal: journal.count(DONE, 1),
        lambda journal: journal.record(1, 1, DONE),
    ]
    for call in calls:
        with Journal(path) as journal, pytest.raises(RunFolderError) as caught:
            call(journal)
        assert str(path) in str(caught.value)
        assert "restore it from a backup, or start a new run" in str(caught.value)
    path.write_bytes(b"no journal at all" * 100)
    with raises(RunFolderError, "journal.sqlite"):
        Journal(path)


def test_a_damaged_journal_ends_a_resume_in_one_line(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, parse("")).close()
    (run / "journal.sqlite").write_bytes(b"no journal at all" * 100)
    code, out, err = ran(capsys, "resume", str(run))
    assert code == 2
    assert out == ""  # no advice to resume what cannot be resumed
    assert "journal.sqlite" in err.splitlines()[-1]


@pytest.mark.parametrize("line", [b"[1]", b"3", b'{"loss": 1.0}', b'{"round": "3"}', b'{"round": \xff}', b""])
def test_metrics_end_at_the_first_line_that_is_none(line: bytes, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", parse("")) as folder:
        folder.add_metrics({"round": 0})
        with (folder.path / "metrics.jsonl").open("ab") as file:
            file.write(line + b"\n")
        folder.add_metrics({"round": 1})
        assert folder.metrics() == [{"round": 0}]
        folder.truncate_metrics(5)
        assert (folder.path / "metrics.jsonl").read_text() == '{"round": 0}\n'


def test_discarding_takes_away_what_the_run_made_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "thesis").touch()
    for path, made in ((tmp_path / "new", True), (tmp_path / "empty", False), (tmp_path / "link", False)):
        if not made:
            target = tmp_path / f"{path.name}-target" if path.name == "link" else path
            target.mkdir()
            if target != path:
                path.symlink_to(target)
        folder = RunFolder.create(path, parse(""))
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "one").touch()
        (path / "sites").symlink_to(tmp_path / "outside")
        folder.discard()
        assert path.exists() is not made
        if not made:
            assert list(path.iterdir()) == []
            RunFolder.create(path, parse("")).close()  # as new
    assert (tmp_path / "outside" / "thesis").exists()


def test_a_folder_whose_plan_cannot_be_written_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise StorageError(str(path), expected="a disk that accepts the write", fix="resume")

    monkeypatch.setattr("cloister.server.record.folder.write_bytes", full)
    with raises(RunFolderError, tmp_path / "run", says="disk"):
        RunFolder.create(tmp_path / "run", parse(""))
    assert not (tmp_path / "run").exists()


def test_the_losses_of_each_site_are_refused_under_a_privacy_unit(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stand beside the epsilon, exact and uncharged: for a new run, and for one that is resumed."""
    monkeypatch.setattr(federation, "simulate", lambda *_, **__: pytest.fail("a run was begun"))
    private = parse("", CENTRAL)
    run = tmp_path / "run"
    refused = 'simulation.per_site is True: expected no value; only valid with privacy.unit = "none"'
    arguments = ("simulate", str(small_plan), *set_options([*CENTRAL, "simulation.per_site=true"]))
    assert refused in lone_refusal(capsys, *arguments, "--out", str(run))
    assert not run.exists()
    RunFolder.create(run, private).close()
    assert refused in lone_refusal(capsys, "resume", str(run), "--per-site")


# what is printed when a run stops


def stop(path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, *, begun: bool) -> None:
    """Show a new run that has done a round or not, and then raises."""

    def simulate(folder: RunFolder, *_: Any, **__: Any) -> None:
        with Journal(folder.journal) as journal:
            journal.record(0, 0, DONE if begun else CREATED)
        raise error

    monkeypatch.setattr(federation, "simulate", simulate)
    options = argparse.Namespace(json=False, workers=1, ray_address=None, per_site=False)
    with RunFolder.create(path, parse("")) as folder, pytest.raises(type(error)):
        execute(folder, options, new=True)


@pytest.mark.parametrize(
    ("error", "begun", "kept", "advised"),
    [
        (QuorumError("round", expected="sites"), True, True, True),
        (QuorumError("round", expected="sites"), False, False, False),
        (StorageError("disk", expected="room"), True, True, True),
        (StorageError("disk", expected="room"), False, True, False),
        (RunFolderError("checkpoint", expected="a whole one"), True, True, False),
        (KeyboardInterrupt(), False, True, True),
    ],
)
def test_a_stopped_run_is_kept_where_there_is_something_to_go_on_with(
    error: BaseException,
    begun: bool,
    kept: bool,
    advised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run [red]of[/red] :smile: mine [/]"
    stop(path, monkeypatch, error, begun=begun)
    assert path.exists() is kept
    command = f"stopped; continue with: cloister resume {shlex.quote(str(path))}\n"
    assert (capsys.readouterr().out == command) is advised


def test_ctrl_c_during_the_imports_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "cloister.simulations.federation", Interrupted())
    options = argparse.Namespace(json=False, workers=1, ray_address=None, per_site=False)
    with RunFolder.create(tmp_path / "run", parse("")) as folder, pytest.raises(KeyboardInterrupt):
        execute(folder, options, new=True)
    assert "stopped; continue with" in capsys.readouterr().out


def test_ctrl_c_during_the_imports_of_a_verb_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cloister.cli.main.import_module", interrupted)
    assert main(["stop", "federation"]) == 130
    assert capsys.readouterr().err == "cloister: interrupted\n"


def test_commands_are_printed_as_a_shell_takes_them(
    small_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run [1]"
    RunFolder.create(run, parse("")).close()
    quoted = f"cloister resume {shlex.quote(str(run))}"
    assert quoted in lone_refusal(capsys, "simulate", str(small_plan), "--out", str(run))
    assert quoted in lone_refusal(capsys, "generate", str(run), "--prompt", "x")


def test_events_are_printed_as_they_are() -> None:
    shown = io.StringIO()
    LineDisplay(Console(file=shown)).event(SiteFailed(1, "site-000", "no [bold]:smile:[/] in /a[b]"))
    assert shown.getvalue() == "round 1: site-000 dropped out: no [bold]:smile:[/] in /a[b]\n"


# the command line


def test_what_the_system_refuses_anywhere_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(error: OSError) -> list[str]:
        def fail(_: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr(generate, "run", fail)
        return ["generate", "run", "--prompt", "x"]

    line = lone_refusal(capsys, *run(PermissionError(errno.EACCES, "Permission denied", "/some/file")))
    assert "/some/file: Permission denied" in line
    assert "two lines" in lone_refusal(capsys, *run(OSError("two\nlines")))
    assert "disk is full" in lone_refusal(capsys, *run(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(PermissionError):
        main(["--traceback", *run(PermissionError(errno.EACCES, "Permission denied"))])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--prompt", "caf\udce9"], "--prompt is 'caf\\udce9': expected text in UTF-8"),
        (["--prompt", "x", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "x", "--seed", str(2**63)], "--seed"),
    ],
)
def test_generate_refuses(options: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in lone_refusal(capsys, "generate", "nowhere", *options)


def test_a_terminal_that_cannot_show_a_character_gets_a_mark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(_: argparse.Namespace) -> int:
        print("caf\u00e9")
        return 0

    monkeypatch.setattr(generate, "run", write)
    written = io.BytesIO()
    with closing(io.TextIOWrapper(written, encoding="ascii")) as ascii_only:
        monkeypatch.setattr(sys, "stdout", ascii_only)
        assert main(["generate", "run", "--prompt", "x"]) == 0
        assert written.getvalue() == b"caf?\n"
        monkeypatch.undo()


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        console = PipedConsole(file=file)
        for _ in range(3):
            console.print("a line")
    assert console.quiet


@pytest.mark.parametrize("verb", VERBS)
def test_wrong_usage_is_one_line_that_names_the_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    action = {
        "plan": ["check"],
        "site": ["request", "--name", "x", "--contact", "x"],
        "coordinator": ["show", "x"],
        "flower": ["bundle", "x", "--out", "x"],
        "roster": ["show", "x"],
        "ledger": ["show", "x"],
        "tokenizer": ["train", "x", "--out", "x"],
    }
    required = {
        "generate": ["x", "--prompt", "x"],
        "export": ["x", "x"],
        "predict": ["x", "--text", "x"],
        "compress": ["x", "--int8"],
        "provision": ["x", "--out", "x"],
        "simulate": [],
        "submit": ["x", "--to", "x"],
        "track": ["x", "--to", "mlflow"],
    }
    given = action.get(verb, required.get(verb, ["x"]))
    for wrong, part in (
        ([*given, "--bogus"], "unknown arguments: --bogus"),
        ([*given, "--json=x", "--tokens=x"], "argument --"),
        ([*given, *["surplus"] * 2], "surplus"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([verb, *wrong])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        named = " ".join([verb, *given[: verb in action]])
        assert line.startswith("cloister: ")
        assert part in line
        assert line.endswith(f"; see cloister {named} --help")


@pytest.mark.parametrize(("usage", "part"), [([], "VERB"), (["bogus"], "'bogus'"), (["site"], "ACTION")])
def test_a_missing_or_unknown_verb_is_one_line(
    usage: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(usage)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


def test_help_before_a_verb_lists_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help", VERBS[0]])
    assert ended.value.code == 0
    words = capsys.readouterr().out.split()
    assert set(VERBS) <= set(words)


def test_every_verb_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    construct = argparse.ArgumentParser.__init__

    def collect(self: argparse.ArgumentParser, *arguments: Any, **settings: Any) -> None:
        construct(self, *arguments, **settings)
        parsers.append(self)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", collect)
    command_parser()
    assert {f"cloister {verb}" for verb in VERBS} < {parser.prog for parser in parsers}
    assert [parser.prog for parser in parsers if not parser.description] == []


# plans


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cohort.sites=2", "cohort.sites: at least 3 sites in each sum"),
        ("cohort.sites=100000", "cohort.sites: at most 10000 sites with aggregation.secure"),
        ("cohort.fraction=0.25", "cohort.fraction: at least 3 sites in each sum"),
        ("run.rounds=2147483648", "run.rounds: less than 2147483648"),
        (
            "run.name='../x'",
            "run.name: letters, digits, dots, dashes, underscores, starting with a letter or",
        ),
        ("run.name=''", "run.name: letters, digits, dots, dashes, underscores, starting with a letter or"),
        (f"run.name={'x' * 65}", "run.name: at most 64 characters"),
        ("model.name=''", "model.name: at least 1 character"),
        ("local.steps=few", "local.steps: an integer"),
        ("local.learning_rate=few", "local.learning_rate: a number"),
        ("local.packing=1", "local.packing: one of the keys"),
        ("data.packing=few", "data.packing: a boolean"),
        ("data.text_field=3", "data.text_field: a string"),
        ("local.betas=[0.1,0.2,0.3]", "local.betas: at most 2 items"),
        ("model.targets=3", "model.targets"),
    ],
)
def test_plan_refusals_are_in_plain_words(override: str, said: str) -> None:
    assert field_of(override).startswith(said)


def test_sites_in_clear_are_not_bound_by_the_secure_sum() -> None:
    assert parse("", ["cohort.sites=100000", "aggregation.secure=false"]).cohort.sites == 100000


def test_text_that_is_no_json_is_refused_in_plain_words() -> None:
    for text in ("", '{"run": ', b"\xff", json.dumps({"run": {"name": "\udcff"}})):
        with raises(PlanError, "plan", says="JSON"):
            soundness.from_json(text)
    with raises(PlanError, "plan", says="section"):
        soundness.from_json("[]")


def test_a_folder_without_a_plan_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with raises(RunFolderError, path, says="plan.json"):
            read_plan(path)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], 1),
        (["aggregation.secure=false"], 2),
        (["local.balance=weighted"], 2),
        (["local.balance=weighted", "aggregation.secure=false"], 2),
    ],
)
def test_what_a_plan_does_not_protect_is_told(settings: list[str], told: int) -> None:
    """Unequal steps let a crafted model single out a site; in clear each update is seen anyway."""
    assert len(warnings(parse("", settings))) == told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["simulation.field=patient"], 0),
        (["simulation.field=patient", "simulation.partition=natural"], 0),
        (["simulation.field=ward"], 1),
        (["simulation.field=patient", "simulation.partition=dirichlet"], 1),
        ([], 1),
        (["question.sites_of_owner=2"], 0),
        (["simulation.source=builtin:python-docs"], 0),
        (["privacy.unit=record", "data.owner="], 0),
    ],
)
def test_owners_whom_a_simulation_divides_are_told(settings: list[str], told: int) -> None:
    text = """[question]
kind = "mean"
field = "age"
range = [0, 100]
[data]
owner = "patient"
[privacy]
unit = "owner"
noise_multiplier = 3.0
[simulation]
source = "patients.jsonl"
"""
    assert len(warnings(parse(text, settings))) == told
