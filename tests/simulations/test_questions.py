"""Questions through the command: what is answered, what is charged, what leaves a site, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from transformers import AutoTokenizer

import cloister
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.audit.lower_bounds import distinguish
from cloister.privacy.ledger.ledger import read_history
from cloister.privacy.ledger.policy import Policy
from cloister.privacy.mechanism.events import Skellam, from_json
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import PlanError, PolicyError, RunFolderError
from cloister.protocol.messages.wire import Buffer
from cloister.protocol.plan.soundness import Plan
from cloister.server.record.folder import RunFiles, RunFolder, read_answer
from cloister.server.record.progress import Event, SiteAnswered
from cloister.server.run import run
from cloister.tests.parties.federation import MODEL, Federation
from cloister.tests.tools.command import done, found, lone_refusal, refusal, set_options
from cloister.tests.tools.kills import kill_while, killed_run
from cloister.tests.tools.mutants import Mutant
from cloister.tests.tools.raises import raises

QUESTION = """[question]
kind = "histogram"
field = "ward"
values = ["a", "b", "c", "d"]
[privacy]
unit = "record"
noise_multiplier = 8.0
delta = 1e-6
[cohort]
sites = 4
[aggregation]
colluders = 0.0
[simulation]
source = "{}"
partition = "iid"
durable = false
"""


WORDS = 'kind = "vocabulary"\nfield = "text"\nwords = 8\nbuckets = 16384'


def one_answered(event: Event) -> bool:
    """A moment at which a site has charged and sent its vector, and no share is revealed."""
    return isinstance(event, SiteAnswered)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """A question, and 2,000 records of which 1,000 are of ward a."""
    random.seed(1)
    wards = ["a"] * 1000 + ["b"] * 600 + ["c"] * 398 + ["e"] * 2
    random.shuffle(wards)
    data = tmp_path / "wards.jsonl"
    data.write_text("".join(json.dumps({"ward": ward}) + "\n" for ward in wards))
    plan = tmp_path / "question.toml"
    plan.write_text(QUESTION.format(data))
    return plan


def test_the_answer_is_the_count_with_noise_of_the_stated_size(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = found(capsys, "plan", "check", str(asked))
    told = found(capsys, "ask", str(asked), "--out", str(tmp_path / "run"), "--workers", "1")
    answer = told["answer"]
    deviation = answer["noise"]
    assert deviation == pytest.approx(8 * math.sqrt(4 / 3))  # of four sites, of which three are counted on
    assert checked["expected_errors"]["500"]["a"] == pytest.approx(deviation)
    for name, count in (("a", 1000), ("b", 600), ("c", 398), ("other", 2), ("d", 0)):
        assert abs(answer["cells"][name] - count) < 5 * deviation
    values = {each["name"]: each["value"] for each in answer["figures"]}
    assert values["d"] is None  # it is not told apart from none
    assert values["share of a"] == pytest.approx(0.5, abs=0.03)
    assert told["epsilon"] == pytest.approx(checked["epsilon"])
    # Each site and the coordinator charged one release on records.
    files = RunFiles(tmp_path / "run")
    for path in (files.ledger, *files.sites.ledgers().values()):
        for entry in read_history(path).entries:
            (event,) = from_json(entry.charge.event)
            assert isinstance(event, Skellam)
            assert event.unit == "record"
    assert len(files.sites.ledgers()) == 4
    shown = done(capsys, "ask", str(tmp_path / "run"))
    assert "Answer of 4 sites" in shown
    report = done(capsys, "report", str(tmp_path / "run"))
    whole = json.loads(files.report_data.read_text())
    assert whole["asked"]["against_all"]["epsilon"] == pytest.approx(checked["against_all_epsilon"])
    assert [(row["name"], row["value"]) for row in whole["answer"]["figures"]] == [*values.items()]
    assert [row["name"] for row in whole["answer"]["figures"] if row["drawn"]] == [*answer["cells"]]
    assert "the answer" in report
    assert "models" not in report
    with raises(RunFolderError, str(tmp_path / "run")):
        done(capsys, "--traceback", "generate", str(tmp_path / "run"), "--prompt", "x")


EVALUATED = f"""[question]
kind = "evaluate"
figures = ["accuracy", "loss"]
{MODEL}[data]
sequence_length = 32
{QUESTION[QUESTION.index("[privacy]") :]}"""


def test_public_records_are_evaluated_beside_the_sites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are read before a site is charged, and are in the answer, its table and the report."""
    texts = [f"note {number} of a patient in bed {number % 7}" for number in range(400)]
    public, sites, plan = tmp_path / "public.jsonl", tmp_path / "sites.jsonl", tmp_path / "question.toml"
    sites.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plan.write_text(EVALUATED.format(sites))
    beside, out = f"server.evaluation={public}", tmp_path / "run"
    public.write_text(json.dumps({"text": ""}) + "\n")
    refusal(capsys, "ask", str(plan), "--set", beside, "--out", str(out), "--workers", "1")
    assert not any(read_history(path).entries for path in out.rglob("ledger*.sqlite"))
    public.write_text("".join(json.dumps({"text": f"public {text}"}) + "\n" for text in texts[:30]))
    shutil.rmtree(out, ignore_errors=True)
    told = found(capsys, "ask", str(plan), "--set", beside, "--out", str(out), "--workers", "1")
    exact = told["answer"]["public"]
    assert exact["units"] == pytest.approx(30)
    assert 4 < exact["loss"] < 8  # of an untrained model, nats per byte
    assert "public records" in done(capsys, "ask", str(out))
    shutil.rmtree(RunFiles(out).final)
    done(capsys, "resume", str(out))  # the answer is written again, with the same figures beside it
    assert read_answer(RunFiles(out)).public == exact
    done(capsys, "report", str(out))
    rows = json.loads(RunFiles(out).report_data.read_text())["answer"]["figures"]
    assert {row["name"]: row["public"] for row in rows} == exact
    assert [row["name"] for row in rows if row["drawn"]] == ["accuracy"]
    line = refusal(capsys, "plan", "check", str(plan), "--set", "server.evaluation=sites")
    assert "server.evaluation" in line


def test_a_site_is_checked_for_a_question_by_its_fields(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it counts is for its own people; no model is divided over devices."""
    federation = Federation(tmp_path / "sites", Plan.load(asked))
    site = federation.sites_folder / federation.names[0] / "site.toml"
    checked = found(capsys, "site", "check", str(site), str(asked))["must_stay_at_this_site"]
    assert checked["records"] == checked["with_field"] == 500


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["privacy.unit=none"], "privacy.noise_multiplier"),
        (["aggregation.secure=false"], "aggregation.secure"),
        (["privacy.sampling_rate=0.1"], "privacy.sampling_rate"),
        (["run.rounds=2"], "run.rounds"),
        (["local.steps=3"], "local.steps"),
        (["public.source=builtin:python-docs"], "public.source"),
        (["aggregation.weighting=tokens"], "aggregation.weighting"),
        (["server.evaluation=builtin:python-docs"], "server.evaluation"),
        (["aggregation.groups=3"], "aggregation.groups"),
        (["cohort.fraction=0.75"], "cohort.fraction"),
        (["privacy.clip=2.0"], "privacy.clip"),
        (["privacy.record=window"], "privacy.record"),
        (["question.values=[]", "question.edges=[nan]"], "question.edges"),
        (["privacy.unit=site", "privacy.trusted_coordinator=true"], "privacy.trusted_coordinator"),
        (["privacy.unit=site", "question.sites_of_owner=2"], "question.sites_of_owner"),
        (['question.values=["a", "other"]'], "question.values"),
        (['question.values=["a", "share of a"]'], "question.values"),
        (["question.kind=mean", "question.values=[]", "question.range=[0.0, 5e-324]"], "question.range"),
        (
            ["question.kind=mean", "question.values=[]", "question.range=[1e9, 1000000000.5]"],
            "question.range",
        ),
        (['question.values=["a", "a"]'], "question.values"),
        (["question.edges=[1, 2]"], "question.values"),
        (["question.values=[]", "question.edges=[2, 1]"], "question.edges"),
        (["question.values=[]", 'question.edges=[1, "b"]'], "question.edges"),
        (["question.values=[]", "question.edges=[1, 1]"], "question.edges"),
        (["question.kind=mean", "question.values=[]"], "question.range"),
        (["question.kind=mean", "question.values=[]", "question.range=[1, 1]"], "question.range"),
        (["question.most_units=10000000", "cohort.sites=100"], "question.most_units"),
    ],
)
def test_what_is_unsound_in_a_question_is_refused(
    asked: Path, capsys: pytest.CaptureFixture[str], settings: list[str], field: str
) -> None:
    line = refusal(capsys, "plan", "check", str(asked), *set_options(settings))
    assert f" {field} is " in line or f" {field}: " in line


def test_a_question_is_no_run_and_a_run_no_question(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cloister ask" in lone_refusal(capsys, "simulate", str(asked))
    assert "question" in lone_refusal(capsys, "ask", "private-code")
    assert "question.field" in refusal(capsys, "ask", str(asked), "--set", "question.field=wrd")
    plan = Plan.load(asked)
    with raises(PlanError, "question"):
        cloister.simulate(plan)
    with raises(PlanError, "question"):
        cloister.ask(cloister.Plan())


def test_a_policy_lists_the_kinds_of_questions(asked: Path) -> None:
    plan = Plan.load(asked)
    offer: dict[str, Any] = {"noise": 8.0, "epsilon": 1.0, "cohort": 3, "roster_hash": "", "asked": 0.6}
    with raises(PolicyError, "question.kind"):
        Policy(units=("record",)).check(plan, **offer)
    Policy(units=("record",), questions=("histogram",), models=("org/llm",)).check(plan, **offer)
    listed = Policy(questions=("histogram",), tokenizers=("org/llm",))
    listed.check(plan, **offer)
    with raises(PolicyError, "model.tokenizer"):
        listed.check(
            Plan.load(asked, ["question.measure=tokens", "question.values=[]", "question.edges=[9]"]), **offer
        )
    with raises(PolicyError, "epsilon of the question"):
        Policy(questions=("histogram",), greatest_question_epsilon=0.5, greatest_delta=1e-5).check(
            plan, **offer
        )
    with raises(PolicyError, "greatest_question_epsilon"):
        Policy(questions=("histogram",), greatest_question_epsilon=0.5)


def test_records_and_owners_are_asked_from_python(tmp_path: Path) -> None:
    given: dict[str, Any] = {  # as mappings, of which pydantic makes sections
        "question": {"kind": "mean", "field": "age", "range": [0, 100]},
        "data": {"owner": "patient"},
        "privacy": {"unit": "owner", "noise_multiplier": 2.0, "delta": 1e-6},
        "simulation": {"durable": False},
    }
    plan = cloister.Plan(**given)
    random.seed(2)
    ages = {patient: random.uniform(20, 80) for patient in range(900)}
    sites = {
        name: [
            {"age": ages[patient], "patient": patient}
            for patient in range(at, 900, 3)
            for _ in range(1 + patient % 4)
        ]
        for at, name in enumerate(("east", "north", "west"))
    }
    run = cloister.ask(plan, sites=sites, out=tmp_path / "run", workers=1, quiet=True)
    figures = {each.name: each for each in run.answer.figures}
    mean = figures["mean"]
    assert mean.value is not None
    assert abs(mean.value - sum(ages.values()) / 900) < 5 * mean.noise
    assert abs((figures["units"].value or 0) - 900) < 5 * figures["units"].noise
    assert run.epsilon == pytest.approx(cloister.epsilon(plan), rel=1e-6)
    with raises(RunFolderError, str(tmp_path / "run")):
        run.model()


def test_no_count_of_a_site_is_in_what_leaves_it(tmp_path: Path) -> None:
    """In no integer or float of four bytes or more; by chance one is there with a probability below 1e-6."""
    counts = {"south": 91_237, "east": 60_111}
    data = tmp_path / "wards.jsonl"
    wards = [(site, ward) for site, count in counts.items() for ward in ["a"] * count + ["b"] * 20_000]
    wards += [(site, "a") for site in ("north", "west") for _ in range(30)]
    data.write_text("".join(json.dumps({"site": site, "ward": ward}) + "\n" for site, ward in wards))
    text = QUESTION.format(data).replace('partition = "iid"', 'partition = "natural"\nfield = "site"')
    plan = Plan.parse(text, ["question.most_units=120000"])
    federation, sent = Federation(tmp_path / "sites", plan), list[bytes]()

    def keep(_site: str, _step: str, frames: list[Buffer]) -> list[Buffer]:
        sent.extend(bytes(frame) for frame in frames)
        return frames

    federation.channel.garble = keep
    with RunFolder.create(tmp_path / "run", plan) as folder:
        run(folder, federation.channel, lambda _event: None, roster=federation.roster)
    answer = read_answer(RunFiles(tmp_path / "run"))
    assert abs(answer.cells["a"] - sum(counts.values()) - 60) < 6 * answer.deviation
    terms = terms_of(plan, 1)
    assert terms is not None
    assert terms.asked is not None
    codings = set()
    for count in counts.values():
        for number in (count, int(count * terms.asked.scale) % 2**32):
            for order in "<>":
                codings |= {struct.pack(f"{order}{kind}", number) for kind in "IQfd"}
    assert (
        len(b"".join(sent)) * len(codings) / 2**32 < 1e-2
    )  # of random bytes; most of these are longer or shorter
    assert not [coding for coding in codings for frame in sent if coding in frame]


@pytest.mark.parametrize("unit", ["record", "site"])
def test_an_answer_that_a_crash_interrupts_is_charged_once(
    unit: str, asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the charges and the release: it goes on with the vectors that were charged."""
    out = tmp_path / "run"
    asked.write_text(asked.read_text().replace('unit = "record"', f'unit = "{unit}"'))
    kill_while(killed_run, asked, out, one_answered)
    files = RunFiles(out)
    assert not files.final.exists()
    told = found(capsys, "resume", str(out), "--workers", "1")
    assert told["answer"]["sites"] == 4
    for path in files.sites.ledgers().values():
        assert len(read_history(path).entries) == 1
    assert sorted(entry.charge.dataset for entry in read_history(files.ledger).entries) == sorted(
        files.sites.ledgers()
    )
    # The answer is made again from the checkpoint, and is the same.
    before = (files.final / "answer.json").read_bytes()
    shutil.rmtree(files.final)
    done(capsys, "resume", str(out))
    assert (files.final / "answer.json").read_bytes() == before


def test_questions_on_one_dataset_are_composed_and_limited(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = ["--ledger", str(tmp_path / "over.sqlite"), "--dataset", "wards", "--workers", "1"]
    one = found(capsys, "ask", str(asked), *over, "--out", str(tmp_path / "one"))
    assert one["dataset"]["epsilon"] == pytest.approx(one["epsilon"], rel=0.2)
    two = found(capsys, "ask", str(asked), *over, "--out", str(tmp_path / "two"))
    assert two["epsilon"] < two["dataset"]["epsilon"] < 2 * two["epsilon"]
    limit = ["--set", f"simulation.greatest_epsilon={two['dataset']['epsilon'] * 1.01}"]
    line = refusal(capsys, "ask", str(asked), *over, *limit, "--out", str(tmp_path / "three"))
    assert "epsilon of the dataset 'wards'" in line
    # Owners who may be at several sites would have several vectors in one sum.
    owners = set_options(["privacy.unit=owner", "data.owner=ward"])
    assert "simulation.field" in refusal(capsys, "ask", str(asked), *over, *owners)


HALF = Mutant("privacy.mechanism.unit_sum:UnitSum.encode", "self.variance)", "self.variance / 4)")
ALL = Mutant("privacy.accounting.terms:_asked", "plan.honest()", "plan.cohort.size()")


@pytest.mark.parametrize(
    "mutant", [None, HALF, ALL], ids=["as it is", "half the noise", "noise of all sites"]
)
def test_a_unit_that_is_left_out_is_no_better_told_than_is_claimed(
    asked: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant | None
) -> None:
    """20,000 sums of the honest sites with and without one unit: the best test between them stays below the claim. With
    half the noise, or where every site adds as much as if all were honest, it refutes it."""
    monkeypatch.setattr("cloister.protocol.plan.plan.Plan.honest", lambda _plan: 1)
    trials = 20_000
    plan = Plan.load(asked, ["privacy.noise_multiplier=1.0", "privacy.delta=0.01"])
    terms = terms_of(plan, 1)
    assert terms is not None
    claimed = terms.epsilon(1)
    if mutant is not None:
        mutant.plant(monkeypatch)
    from cloister.privacy.accounting import terms as module

    made = module._asked(plan, 1.0)
    many = replace(made, shape=made.shape._replace(cells=trials))
    worlds = []
    for there in (0.0, 1.0):
        out = np.empty(trials, np.uint32)
        # One coordinate of each trial: a unit whose vector is 1 in it, at the one site that is counted on.
        noise = NoiseStream.from_declared_seed(int(there))
        many.encode([], noise, out)
        worlds.append(out.view(np.int32) / many.scale + there)
    without, with_ = worlds
    best = max(
        distinguish(int((without > at).sum()), trials, int((with_ <= at).sum()), trials, 0.01, 0.999)
        for at in np.linspace(-2, 3, 21)
    )
    assert (best > claimed) is (mutant is not None)


MANY = 2500


def test_noise_of_a_whole_federation_is_that_of_the_charge(tmp_path: Path) -> None:
    """2,501 independent figures of one federation, whose exact values are known."""
    given: dict[str, Any] = {
        "question": {
            "kind": "histogram",
            "field": "ward",
            "values": [f"w{number}" for number in range(MANY)],
        },
        "privacy": {"unit": "record", "noise_multiplier": 3.0, "delta": 1e-6},
        "cohort": {"quorum": 1.0},
        "aggregation": {"colluders": 0.0, "dropouts": 0.0},
        "simulation": {"durable": False},
    }
    plan = cloister.Plan(**given)
    sites = {f"s{site}": [{"ward": f"w{number}"} for number in range(site, 200)] for site in range(4)}
    run = cloister.ask(plan, sites=sites, out=tmp_path / "run", workers=1, quiet=True)
    exact = np.array([min(number + 1, 4) if number < 200 else 0 for number in range(MANY)] + [0])
    noise = np.array(list(run.answer.cells.values())) - exact
    terms = terms_of(run.plan, 1)
    assert terms is not None
    assert terms.asked is not None
    assert run.answer.deviation == pytest.approx(3.0)  # all four sites are counted on, and all are in the sum
    assert abs(noise.mean()) < 3 * 3.0 / math.sqrt(noise.size)
    assert noise.std() == pytest.approx(3.0, rel=0.05)
    assert stats.kstest(noise / 3.0, "norm").pvalue > 1e-4


def test_a_plan_takes_the_weights_of_its_classes_from_an_answer(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, "ask", str(asked), "--out", str(tmp_path / "run"), "--workers", "1")
    plan, answer = tmp_path / "plan.toml", tmp_path / "run" / "final" / "answer.json"
    plan.write_text(
        '[data]  # of notes\nclass_weights = "from-question"\ntask = "classify"\nclasses = ["a", "b", "d"]\n'
    )
    shown = done(capsys, "plan", "weights", str(plan), "--from-question", str(tmp_path / "run"))
    assert "d " in shown
    assert "hides" in shown
    done(capsys, "plan", "weights", str(plan), "--from-question", str(tmp_path / "run"))  # again
    data = Plan.load(plan).data
    assert data.weights_answer == hashlib.sha256(answer.read_bytes()).hexdigest()
    cells = json.loads(answer.read_text())["cells"]
    assert data.class_weights[1] / data.class_weights[0] == pytest.approx(cells["a"] / cells["b"], rel=1e-3)
    assert data.class_weights[2] > 10 * data.class_weights[1]
    assert "# of notes" in plan.read_text()
    plan.write_text('[data]\ntask = "classify"\nclasses = ["a", "z"]\n')
    with raises(RunFolderError, str(tmp_path / "run")):
        done(capsys, "--traceback", "plan", "weights", str(plan), "--from-question", str(tmp_path / "run"))


def test_words_are_asked_for_and_a_tokenizer_learns_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, plan, run = tmp_path / "notes.jsonl", tmp_path / "words.toml", tmp_path / "run"
    draw = random.Random(5)
    drugs = ["Amlodipin", "Bisoprolol", "Candesartan", "Dabigatran"]
    notes = [f"gibt {draw.choice(drugs)} und misst" for _ in range(1500)] + ["Zyklosporin einmal"]
    data.write_text("".join(json.dumps({"text": note}) + "\n" for note in notes))
    text = QUESTION.format(data).replace(
        'kind = "histogram"\nfield = "ward"\nvalues = ["a", "b", "c", "d"]', WORDS
    )
    plan.write_text(text.replace("noise_multiplier = 8.0", "target_epsilon = 4.0"))
    told = found(capsys, "ask", str(plan), "--out", str(run), "--workers", "1")
    assert told["epsilon"] <= 4.0
    words = {each["name"]: each["value"] for each in told["answer"]["figures"]}
    assert {"gibt", " und", " misst", *(f" {drug}" for drug in drugs)} <= words.keys()
    assert "Zyklosporin" not in words
    assert abs(words[" und"] - 1500) < 5 * told["answer"]["figures"][0]["noise"]
    assert told["answer"]["cells"] == {}
    shown = done(capsys, "ask", str(run))
    assert '" Bisoprolol"' in shown
    made = found(
        capsys,
        "tokenizer",
        "train",
        "--from-question",
        str(run),
        "--vocab",
        "600",
        "--out",
        str(tmp_path / "t"),
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(made["folder"])
    assert len(tokenizer("gibt Candesartan und misst")["input_ids"]) == 4
    assert len(tokenizer("Zyklosporin")["input_ids"]) > 3
    assert "writes text" in lone_refusal(
        capsys, "tokenizer", "train", "--from-model", str(run), "--out", str(tmp_path / "u")
    )
