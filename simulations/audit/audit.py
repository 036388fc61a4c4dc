"""An audit of a run: canaries attack the real code and prove a lower bound on epsilon, and what leaves is measured.

An audit plays a run again, with new noise, coins and ledgers, and without the run's own secrets, through the
functions that a run calls: `Site.join` and `Site.contribute` with unit record and owner
(`simulations/audit/records.py`), and `server.run.run` over real sites, under masks if the plan has them, with unit site
(`simulations/audit/sites.py`) and for a question (`simulations/audit/questions.py`). The canaries are planted in the
trainer that a site calls; in a question they are records. The adversary sees the noised sums of each step, round or
answer; it is the strongest one that the claim covers and that needs no lie.

It raises an alarm for two reasons:

- the canaries' coins are guessed more often than the charged epsilon allows (`privacy/audit/lower_bounds.py`); or
- what was released is not what was charged (`privacy/audit/fit.py`): less noise, or noise that follows from other
noise, a
  unit that changes a sum by more than the clipping norm, draws that do not have the sampling rate or depend on each
  other, steps or rounds that no ledger was charged for, and anything that leaves and does not follow from the noised
  sums.

The charge is read from the ledgers that the audit's sites have kept. An audit of honest code raises an alarm with a
probability of 1e-4 at most, half of it for each reason, whatever the confidence of the reported bound.

Not played: other processes and carriers, a lying coordinator, dropouts, tokenisation, the count of adaptive clipping
with groups, and under units record and owner the sum over sites, which get noised updates. Not found: an accountant
that is wrong, or randomness that can be predicted.

The number of guesses and the threshold are fixed before any score is seen: they would give the largest bound if the
noise had half of its standard deviation. That bound is reported with the result, because a weak audit
that finds nothing proves little. Refused: canaries made of text, a weaker adversary at the same cost; and canaries that
a plan or a message can request: they exist only in the files of the audit.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from cloister.clients.setup.config import SiteConfig, read_config
from cloister.lm.model.model import load_model
from cloister.privacy.accounting.terms import terms_of
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import CloisterError, RunFolderError
from cloister.protocol.machine.storage import without_syncs, write_bytes
from cloister.protocol.plan.plan import Plan
from cloister.server.record.checkpoint import Checkpoints
from cloister.server.record.folder import RunFolder, SitesFolder
from cloister.server.record.public import base_of, public_model
from cloister.server.record.report import audit_row, most_charges
from cloister.simulations.audit.audited import Audited, Progress, Streams
from cloister.simulations.audit.questions import QuestionGame
from cloister.simulations.audit.records import RecordGame
from cloister.simulations.audit.rounds import Federation
from cloister.simulations.audit.sites import SiteGame
from cloister.simulations.federation import noise_of
from cloister.simulations.partition import name_of

_TEMPORARY = "audit-played-"


def audit(
    folder: RunFolder,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    streams: Streams | None = None,
    progress: Progress = lambda _done, _of: None,
) -> Audited:
    """Audit the mechanism of a simulated run, and write the result to its `audit.json`.

    Args:
        folder: The run.
        canaries: Units record and owner: canaries; by default one for each coordinate, but at most 10,000 and at
            most 0.1 / delta (far above it Theorem 3.1 of the paper proves nothing). Unit site: honest sites' updates,
            at least; by default so many that 500 updates are made. With correlated noise one for each site. A question:
            its answers, each with one unit or without it; by default so many that sites make 500 vectors.
        steps: Units record and owner: the most local steps to take; by default all that a site of the run took. More
            steps than one round has are rounded down to whole rounds.
        confidence: Probability with which the reported bound is true; an alarm has its own.
        streams: Noise, coins and batches: an unused stream at each call. By default coins are fresh, and noise and
            batches come from where a run has them (`federation.noise_of`).
        progress: Receives the progress of the audit.

    Raises:
        CloisterError: the plan has no privacy unit, an option is out of range, or the run is missing.
    """
    plan = folder.plan
    _check(plan, canaries, steps, confidence)
    _check_quiet(folder)
    coins = streams or NoiseStream.fresh
    noises = (lambda _who, _round: streams()) if streams else partial(noise_of, plan)
    rounds = 1 if plan.question is not None else _rounds_paid_for(folder)
    site = _first_site(folder.plan, folder.sites)
    public = public_model(folder, lambda _event: None)
    base = base_of(plan, public)
    model = load_model(plan, base)
    terms = terms_of(plan, model.layout.size)
    assert terms is not None, "a plan with a unit has terms"
    for left in folder.path.glob(f"{_TEMPORARY}*"):  # of an audit that was killed: the run folder is locked
        shutil.rmtree(left, ignore_errors=True)
    with without_syncs(), tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=folder.path) as temporary:
        own = Path(temporary).absolute()
        if plan.question is not None:
            question = QuestionGame(plan, terms, model, site, own)
            found = question.audit(canaries, confidence, coins, noises, progress)
        elif terms.unit == "site":
            sites = SiteGame(plan, terms, Federation(model, public, site), own)
            found = sites.audit(rounds, canaries, confidence, coins, noises, progress)
        else:
            kept = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
            start = kept.load(0).weights
            records = RecordGame(plan, terms, model, base, start, site, own)
            found = records.audit(rounds, canaries, steps, confidence, coins, noises, progress)
    write_bytes(folder.audit, (json.dumps(asdict(found), indent=1) + "\n").encode())
    return found


def _check(plan: Plan, canaries: int | None, steps: int | None, confidence: float) -> None:
    """Refuse what cannot be audited, and options that are out of range; as for `audit`."""
    if plan.privacy.unit == "none":
        raise CloisterError(
            "privacy.unit",
            "none",
            expected="record, owner or site, because without a unit there is no claim to audit",
        )
    if plan.privacy.unit == "site" and plan.scheduled:
        raise CloisterError(
            "aggregation.part" if plan.aggregation.part < 1 else "model.adapter.scheme",
            plan.aggregation.part if plan.aggregation.part < 1 else plan.model.adapter.scheme,
            expected="rounds that train all parameters, because an audit of unit site puts its canaries along all",
            fix="audit a run of the same plan with aggregation.part = 1, or with another adapter scheme",
        )
    if not 0 < confidence < 1:
        raise CloisterError("--confidence", confidence, expected="between 0 and 1")
    if canaries is not None and canaries < 1:
        raise CloisterError("--canaries", canaries, expected="1 or more")
    if steps is not None and (steps < 1 or not plan.privacy.dpsgd or plan.question is not None):
        expected = "1 or more, and only in training with privacy.unit = 'record' or 'owner'"
        raise CloisterError("--steps", steps, expected=expected)


def _check_quiet(folder: RunFolder) -> None:
    """Check that no audit of the run has raised an alarm: a weaker or a lucky one would take it back.

    Raises:
        RunFolderError: one has.
    """
    found = None
    with suppress(RunFolderError):  # a damaged file is replaced
        found = audit_row(folder.audit)
    if found is not None and (found.problem or found.refutes(math.inf)):
        raise RunFolderError(
            str(folder.audit),
            expected="no alarm of an earlier audit, which another one would replace",
            fix="release nothing from this run; to audit it again anyway, move the file away",
        )


def _rounds_paid_for(folder: RunFolder) -> int:
    """Charged rounds of the site that has spent the most: the rounds of the run's own claim.

    Raises:
        RunFolderError: nothing was charged in the run.
        LedgerError: its ledger is damaged.
    """
    _, most = most_charges(folder)
    if not most:
        raise RunFolderError(
            str(folder.path),
            expected="a run with charges in its ledger, but this one has none",
            fix=f"run it first: {folder.resume_command()}",
        )
    return most


def _first_site(plan: Plan, sites: SitesFolder) -> SiteConfig:
    """The configuration of the first simulated site.

    Raises:
        RunFolderError: it is missing.
    """
    path = sites.config(name_of(plan, 0))
    if not path.is_file():
        raise RunFolderError(
            str(path),
            expected="the folder of a simulated site, whose records the audit uses",
            fix="audit a simulation of the same plan",
        )
    return read_config(path)
