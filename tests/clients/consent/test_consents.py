"""A consent is taken by one run, whatever the coordinator calls its runs, and wherever a process dies."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from cloister.cli.main import main
from cloister.clients.consent.admission import consents_to
from cloister.clients.consent.consents import Consents
from cloister.clients.setup.config import read_config
from cloister.clients.setup.templates import with_values
from cloister.privacy.ledger.policy import load_policy
from cloister.protocol.errors import CloisterError, ConsentError, PinnedError, PlanError, StorageError
from cloister.protocol.plan.plan import Plan
from cloister.tests.parties.federation import SKELLAM, Federation, changed, tiny
from cloister.tests.tools.command import found, lone_refusal, ran
from cloister.tests.tools.power import Power
from cloister.tests.tools.raises import raises

PLAN, OTHER = "ab" * 32, "cd" * 32


def consents(state: Path, plan: str = PLAN) -> Consents:
    return Consents(state, "north", plan)


def taken(state: Path, run: str) -> str:
    """The run, if it has taken the consent of the TOML; empty if it was refused."""
    try:
        consents(state).take(PLAN, run)
    except ConsentError:
        return ""
    return run


def test_a_consent_is_taken_by_the_first_run_only(tmp_path: Path) -> None:
    site = consents(tmp_path / "state")
    for _ in range(2):  # it joins again, as after a restart of the coordinator
        site.take(PLAN, "one")
    for renamed in ("two", "one ", "one\r", "ONE", ""):
        with pytest.raises(ConsentError):
            site.check_free(PLAN, renamed)
        with pytest.raises(ConsentError):
            site.take(PLAN, renamed)
        with pytest.raises(PinnedError):
            site.check(PLAN, renamed)
    site.check(PLAN, "one")
    assert site.give(PLAN)
    site.take(PLAN, "one")
    assert not site.give(PLAN), "the run that has joined before takes no second one"
    site.take(PLAN, "two\r")
    site.take(PLAN, "two\r")
    assert site.runs(PLAN) == ["one", "two\r"]


def test_no_plan_is_accepted_that_nobody_has_named(tmp_path: Path) -> None:
    for site in (consents(tmp_path / "new", ""), consents(tmp_path / "other", OTHER)):
        with pytest.raises(ConsentError):
            site.take(PLAN, "one")


def test_a_consent_that_is_free_is_not_given_twice(tmp_path: Path) -> None:
    named, site = consents(tmp_path / "named"), consents(tmp_path / "state", "")
    assert not named.give(PLAN)
    assert [site.give(PLAN), site.give(PLAN)] == [True, False]
    site.take(PLAN, "one")
    with pytest.raises(ConsentError):
        site.take(PLAN, "two")


def test_a_run_has_the_plan_with_which_it_has_joined(tmp_path: Path) -> None:
    site = consents(tmp_path / "state")
    site.take(PLAN, "one")
    site.give(OTHER)
    with pytest.raises(PinnedError):
        site.take(OTHER, "one")
    with pytest.raises(PinnedError):
        site.check(OTHER, "one")
    site.take(OTHER, "two")


def processes() -> Executor:
    return ProcessPoolExecutor(4, multiprocessing.get_context("spawn"))


@pytest.mark.parametrize(
    "pool",
    [partial(ThreadPoolExecutor, 4), pytest.param(processes, marks=pytest.mark.slow)],
    ids=["threads", "processes"],
)
def test_of_runs_that_ask_at_once_one_takes_the_consent(tmp_path: Path, pool: Callable[[], Executor]) -> None:
    with pool() as workers:
        for number in range(8):
            state = tmp_path / f"state-{number}"
            asked = list(workers.map(taken, [state] * 8, [f"run-{number}" for number in range(8)]))
            assert [run for run in asked if run] == consents(state).runs(PLAN)
            assert len(consents(state).runs(PLAN)) == 1


@pytest.mark.parametrize(
    "how", ["power cut", "killed, then power cut", "killed, asked again, then power cut"]
)
def test_a_consent_survives_a_stop_at_any_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What was answered for one run is never answered for another, also where the answer did not leave."""
    sync, ended = 0, [0]
    while ended:
        (disk := tmp_path / f"disk-{sync}").mkdir()
        state = disk / "state"
        with Power(disk, monkeypatch) as power:
            with power.stopped_at(sync) as ended:
                consents(state).take(PLAN, "one")
            if ended and how == "power cut":
                power.cut()
            elif "again" in how:
                consents(state).take(PLAN, "one")
            answered = not ended
            try:  # a message of the run, which another process answers without a new join
                consents(state).check(PLAN, "one")
                answered = True
            except PinnedError:
                assert ended
            power.cut()
            if answered:
                assert not taken(state, "two")
            else:
                assert taken(state, "one") or taken(state, "two")
            assert len(consents(state).runs(PLAN)) == 1
        sync += 1
    assert sync > 4


def test_the_command_accepts_one_run_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.toml"
    site.write_text('name = "north"\ndata = "data.jsonl"\nstate = "state"\n')
    command = ("site", "accept", str(site))
    assert "the coordinator has not asked for such a plan" in ran(capsys, *command, PLAN.upper())[1]
    (
        tmp_path / "state" / "consents" / f"{PLAN}.1.given"
    ).unlink()  # what the page says of a consent to take back
    assert found(capsys, *command, PLAN.upper()) == {"plan": PLAN, "added": True, "taken": 0}
    assert found(capsys, *command, PLAN) == {"plan": PLAN, "added": False, "taken": 0}
    consents(tmp_path / "state", "").take(PLAN, "one")
    with pytest.raises(ConsentError) as refused:
        consents(tmp_path / "state", "").take(PLAN, "two")
    words = refused.value.fix.removesuffix("`").split("cloister ")[-1].split()
    assert main([str(site) if word == "SITE.toml" else word for word in words]) == 0, "what the refusal says"
    consents(tmp_path / "state", "").take(PLAN, "two")
    for wrong in ("ab", PLAN + "0", "../" + PLAN[3:]):
        assert "DIGEST" in lone_refusal(capsys, *command, wrong)


def test_a_damaged_consent_is_no_consent(tmp_path: Path) -> None:
    site = consents(tmp_path / "state")
    site.take(PLAN, "one")
    (file,) = (tmp_path / "state" / "consents").glob("*.taken")
    file.write_bytes(b"")
    for run in ("one", "two"):
        with pytest.raises(CloisterError):
            site.take(PLAN, run)
    file.write_bytes(b"\xff")
    for asked in (site.take, site.check, site.check_free):
        with raises(StorageError, str(file)):
            asked(PLAN, "one")


def test_consents_that_are_lost_let_no_second_run_of_the_plan_in(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny())
    site = federation.joined()
    shutil.rmtree(site.config.folder / "consents")
    with raises(StorageError, str(site.config.folder / "consents")):
        site.join(federation.join_request(run="another"))
    site.join(federation.join_request())  # the same run goes on


def test_a_run_whose_plan_and_roster_are_lost_is_not_joined_again(tmp_path: Path) -> None:
    """The site would go on under the roster of today."""
    federation = Federation(tmp_path, tiny())
    site = federation.joined()
    (file,) = site.config.folder.glob("runs/*/joined.json")
    for lose in (lambda: file.write_bytes(b"{}"), file.unlink):
        lose()
        with raises(StorageError, str(file)):
            site.join(federation.join_request())


def test_the_newest_plans_that_were_asked_for_are_listed_with_their_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = Federation(tmp_path, tiny(*SKELLAM))
    site = federation.site(pinned=False)
    path = federation.sites_folder / site.name / "site.toml"
    path.write_text(with_values(path.read_text(), {"plan": ""}, str(path)))
    names = [f"plan-{number}" for number in range(10)]
    for name in names:
        with pytest.raises(ConsentError):
            site.join(federation.join_request(changed(federation.plan, "run", name=name)))
    listed = found(capsys, "site", "plans", str(path))["plans"]
    assert [each["name"] for each in listed] == names[:1:-1]
    assert not any(each["accepted"] for each in listed)
    assert all("epsilon of one site" in " ".join(each["cost"]) for each in listed)
    assert found(capsys, "site", "accept", str(path), listed[0]["plan"])["added"]
    assert site.join(federation.join_request(changed(federation.plan, "run", name=names[-1])))
    (newest, other, *_) = found(capsys, "site", "plans", str(path))["plans"]
    assert (newest["accepted"], newest["taken"]) == (False, 1)
    assert newest["differs"] == []
    assert other["differs"] == ['run.name is "plan-8", was "plan-9"']


def test_a_policy_consents_to_one_run_of_each_plan_of_a_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = Federation(tmp_path, tiny(*SKELLAM))
    limits = 'units = ["site"]\ngreatest_epsilon = 1000.0\ngreatest_delta = 0.1\nleast_cohort = 2\n'
    site = federation.site(pinned=False, policy=limits)
    path = federation.sites_folder / site.name / "site.toml"
    policy = path.parent / "policy.toml"
    path.write_text(with_values(path.read_text(), {"plan": "", "policy": str(policy)}, str(path)))
    one, two = (changed(federation.plan, "run", name=name) for name in ("one", "two"))
    other = changed(one, "privacy", clip=one.privacy.clip * 2)
    family = one.family()
    assert family == two.family() != other.family()

    def refused(plan: Plan, run: str) -> bool:
        try:
            site.join(dataclasses.replace(federation.join_request(plan), run=run))
        except ConsentError:
            return True
        return False

    assert refused(one, "first")
    policy.write_text(f'{limits}families = ["{family}"]\n')
    (listed,) = found(capsys, "site", "plans", str(path))["plans"]
    assert (listed["family"], listed["accepted"]) == (family, True)
    assert not refused(one, "first")
    assert not refused(one, "first"), "the run that has taken the consent"
    assert refused(one, "second"), "one run of each plan"
    assert not refused(two, "second")
    assert refused(other, "third")
    trusting = changed(two, "privacy", trusted_coordinator=True)
    mine = load_policy(policy).model_copy(update={"families": (trusting.family(),)})
    config = read_config(path)
    assert not consents_to(trusting, config, mine).is_free(trusting.digest()), "no site would add noise"
    assert consents_to(two, config, mine.model_copy(update={"families": (two.family(),)})).runs(two.digest())
    policy.write_text(f'families = ["{family}"]\n')
    with raises(PlanError, "policy of the site"):
        site.join(federation.join_request(other))
