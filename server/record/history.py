"""The history of a run from its journal: its identity, its progress, and the events of its rounds."""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloister.protocol.errors import RunFolderError
from cloister.protocol.identity.roster import Roster
from cloister.server.record import journal as steps
from cloister.server.record.folder import RunFiles, read_plan, stored_checkpoints
from cloister.server.record.journal import Journal


@dataclass(frozen=True)
class RunHistory:
    """The history of a run, finished or under way, from its journal."""

    run: str
    """Its identity."""
    roster_hash: str | None
    """Hash of the roster with which the run was created, in hex; None if it has none."""
    done: Mapping[int, Mapping[str, Any]]
    """The rounds that are done, without the initial model, and their facts; a round given up has no `sites`."""
    asked: Mapping[str, frozenset[int]]
    """For each site the rounds in which an attempt began with it."""
    survivors: Mapping[int, frozenset[str]]
    """For each round the sites whose sum was last opened, or that were last asked for shares."""
    evaluated: Mapping[int, frozenset[str]]
    """For each round whose model the sites evaluated, the sites whose sum was last opened, or that were last asked for
    shares; 0 is the initial model."""
    refusals: Mapping[str, tuple[str, ...]]
    """For each site its refusals, in words, each once."""
    left_out: Mapping[str, str]
    """Sites that lied in a secure sum, each with when and what, in words."""
    plan: str
    """Digest of the plan with which it began; empty: it is not known."""
    plan_file: str
    """SHA-256 of that plan's file, as `hash_of_plan`; empty: it is not known."""
    simulated: bool
    """Whether the run's sites are in its folder, or were when it began: then their own ledgers are of this run."""
    finished: bool
    """Whether the run is finished."""
    stopped: str
    """Why it ended before its last round: `budget`, `dataset` (the limit over all runs) or
    `refused`; empty if it did not."""

    @property
    def summed(self) -> list[int]:
        """The rounds that are done of which a sum was opened, in order, also where none of them made a mean."""
        return sorted(
            number for number, facts in self.done.items() if facts.get("opened") or facts.get("sites")
        )


def run_history(files: RunFiles) -> RunHistory:
    """Read the journal of a run, without a lock.

    Raises:
        RunFolderError: the run has not begun, or its journal is damaged.
    """
    begun = RunFolderError(
        str(files.path),
        expected="a run that has begun, with its journal",
        fix=f"run it first: {files.resume_command()}",
    )
    if not files.journal.exists():
        raise begun
    with Journal(files.journal) as journal:
        entries = journal.entries()
    created = next((entry.detail for entry in entries if entry.step == steps.CREATED), None)
    if created is None:
        raise begun
    asked: defaultdict[str, set[int]] = defaultdict(set)
    refusals: defaultdict[str, list[str]] = defaultdict(list)
    left_out: dict[str, str] = {}
    opened: defaultdict[int, dict[int, frozenset[str]]] = defaultdict(dict)
    evaluated: dict[int, frozenset[str]] = {}
    for entry in entries:
        if entry.step.startswith(f"train {steps.BEGUN}"):  # of each group
            for site in entry.detail["cohort"]:
                asked[site].add(entry.round)
        elif entry.step.startswith((f"train {steps.UNMASKING}", f"train {steps.OPENING}")):
            group = steps.group_of_sum(entry.step)
            opened[entry.round][group] = frozenset(entry.detail["survivors"])
        elif entry.step.startswith((f"evaluate {steps.UNMASKING}", f"evaluate {steps.OPENING}")):
            evaluated[entry.round] = frozenset(entry.detail["survivors"])
        elif entry.step == steps.REFUSED:
            # An attempt at a round is refused in it (`Plain.drop`), a join after the last round that is done.
            when = "in" if entry.attempt else "after"
            when = f"{when} round {entry.round}" if entry.round or entry.attempt else "before the first round"
            refusals[entry.detail["site"]].append(f"{when}: {entry.detail['reason']}")
        elif entry.step == steps.LEFT_OUT:
            left_out[entry.detail["site"]] = f"in round {entry.round}: {entry.detail['reason']}"
    done = {entry.round: entry.detail for entry in entries if entry.step == steps.DONE and entry.round}
    survivors = {number: _summed(groups, done.get(number)) for number, groups in opened.items()}
    end = next((entry.detail for entry in reversed(entries) if entry.step == steps.FINISHED), None)
    return RunHistory(
        run=str(created["run"]),
        roster_hash=created.get("roster"),
        done=done,
        asked={site: frozenset(rounds) for site, rounds in asked.items()},
        survivors=survivors,
        evaluated=evaluated,
        left_out=left_out,
        refusals={site: tuple(dict.fromkeys(reasons)) for site, reasons in refusals.items()},
        plan=created.get("plan", ""),
        plan_file=created.get("plan_file", ""),
        simulated=created["simulated"],
        finished=end is not None,
        stopped="" if end is None else end.get("stopped", ""),
    )


def _summed(groups: Mapping[int, frozenset[str]], done: Mapping[str, Any] | None) -> frozenset[str]:
    """The survivors of a round, of those of its groups whose sum was opened; of all before the round is done."""
    kept = groups if done is None else done.get("opened", groups)
    return frozenset(site for group, sites in groups.items() if group in kept for site in sites)


def reached(files: RunFiles, step: str) -> bool:
    """Whether the journal has an entry of a step; no journal has none."""
    if not files.journal.exists():
        return False
    with Journal(files.journal) as journal:
        return journal.newest(step) is not None


def identity(files: RunFiles, roster: Roster | None = None) -> str:
    """The run's identity: 16 random bytes in hex, drawn once and journaled.

    It distinguishes the messages of this run from those of every other run of the same plan.

    Args:
        files: The run folder.
        roster: The sites' identities, whose hash is journaled with a new identity.

    Raises:
        RunFolderError: the folder holds a run whose journal is missing, or another plan than the run began with.
    """
    with Journal(files.journal) as journal:
        if journal.newest(steps.CREATED) is None:
            _check_nothing_lost(files)
            simulated, plan = files.sites.path.is_dir(), read_plan(files.path).digest()
            facts = {"run": secrets.token_hex(16), "simulated": simulated, "plan": plan}
            facts |= {"plan_file": hash_of_plan(files)}
            if roster is not None:
                facts["roster"] = roster.hash.hex()
            journal.record(0, 0, steps.CREATED, facts)
        created = journal.newest(steps.CREATED)
    assert created is not None
    if created.detail.get("plan_file") not in (None, hash_of_plan(files)):
        raise RunFolderError(
            str(files.plan_file),
            "another plan",
            expected="the plan with which the run began",
            fix="restore the file; for another plan begin a new run",
        )
    return str(created.detail["run"])


def hash_of_plan(files: RunFiles) -> str:
    """SHA-256, in hex, of the plan's file: of the whole plan, also of what only a simulation reads."""
    return hashlib.sha256(files.plan_file.read_bytes()).hexdigest()


def next_start(files: RunFiles) -> int:
    """The number of this start of the coordinator in the run, from 1, durable before this returns.

    The counters of its requests begin with it, so that no site takes one of them for an earlier request.
    """
    with Journal(files.journal) as journal:
        last = journal.newest(steps.STARTED)
        number = (last.detail["number"] if last else 0) + 1
        journal.record(0, 0, steps.STARTED, {"number": number})
    return int(number)


def _check_nothing_lost(files: RunFiles) -> None:
    """Refuse an empty journal beside the checkpoints or metrics of finished rounds: it is not that run's journal.

    Raises:
        RunFolderError: there are such checkpoints or metrics; nothing was changed.
    """
    later = [number for number in stored_checkpoints(files.checkpoints) if number > 0]
    if later or files.metrics():
        raise RunFolderError(
            str(files.journal),
            expected="the journal of this run, which is missing",
            fix="restore it from a backup, or start a new run with another --out",
        )
