"""An audit of a run: canaries attack the real code, and prove a lower bound to compare with the claimed epsilon.

The audit runs the code of a site or of the coordinator with new noise and without the run's own secrets. The
adversary is the strongest one that the claim covers. The games are `simulations/audit_records.py` (units record and
owner, one run) and `simulations/audit_sites.py` (unit site, many runs); `privacy/audit.py` turns their guesses into
bounds.

The number of guesses and the threshold are fixed before any score is seen: they would give the largest bound if the
noise had half of its standard deviation. That bound is reported with the result, because a weak audit
that finds nothing proves little. Refused: canaries made of text, a weaker adversary at the same cost; and canaries that
a plan or a message can request: they exist only in the files of the audit.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict

import torch

from cloister.clients.config import read_config
from cloister.clients.site import preparation_of
from cloister.lm.data import Sequences, cached
from cloister.lm.model import LanguageModel, device_for, load_model
from cloister.privacy.ledger import read_history
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import terms_of
from cloister.protocol.errors import CloisterError, RunFolderError
from cloister.protocol.plan import Plan
from cloister.protocol.storage import write_bytes
from cloister.server.checkpoint import Checkpoints
from cloister.server.folder import RunFolder, SitesFolder
from cloister.server.public import base_of, public_model
from cloister.simulations.audit_records import RecordGame
from cloister.simulations.audit_sites import audit_sites
from cloister.simulations.audited import Audited, Progress, Streams
from cloister.simulations.partition import site_name

_RUNS = 20_000
"""Runs of one round with unit `site`, unless the caller says otherwise."""


def audit(
    folder: RunFolder,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    streams: Streams = NoiseStream.fresh,
    progress: Progress = lambda _done, _of: None,
) -> Audited:
    """Audit the mechanism of a simulated run, and write the result to its `audit.json`.

    Args:
        folder: The run.
        canaries: Units record and owner: canaries; by default one for each coordinate, but at most 10,000 and at
            most 0.1 / delta (far above it Theorem 3.1 of the paper proves nothing). Unit site: runs of one round.
        steps: Units record and owner: the most local steps to take; by default all that a site of the run took. More
            steps than one round has are rounded down to whole rounds.
        confidence: Probability with which the bound is true.
        streams: Noise, coins and batches: an unused stream at each call.
        progress: Receives the progress of the audit.

    Raises:
        CloisterError: the plan has no privacy unit, an option is out of range, or the run is missing.
    """
    plan = folder.plan
    if plan.privacy.unit == "none":
        raise CloisterError(
            "privacy.unit",
            "none",
            expected="record, owner or site, because without a unit there is no claim to audit",
        )
    if not 0 < confidence < 1:
        raise CloisterError("--confidence", confidence, expected="between 0 and 1")
    if canaries is not None and canaries < 1:
        raise CloisterError("--canaries", canaries, expected="1 or more")
    if steps is not None and (steps < 1 or not plan.privacy.dpsgd):
        expected = "1 or more, and only with privacy.unit = 'record' or 'owner'"
        raise CloisterError("--steps", steps, expected=expected)
    rounds = _rounds_paid_for(folder)
    public = public_model(folder, lambda _event: None)
    model = load_model(plan, base_of(plan, public))
    terms = terms_of(plan, model.layout.size)
    assert terms is not None, "a plan with a unit has terms"
    if terms.unit == "site":
        found = audit_sites(
            plan, terms, model.layout.size, rounds, canaries or _RUNS, confidence, streams, progress
        )
    else:
        kept = Checkpoints(folder.checkpoints, model.layout, plan.server.keep_checkpoints)
        start = kept.load(0).weights
        device, sequences = _first_site(folder.sites, plan, model)
        game = RecordGame(plan, terms, model, sequences, start, device)
        found = game.audit(rounds, canaries, steps, confidence, streams, progress)
    shown = {
        "row": asdict(found.row),
        "claimed": found.claimed,
        "what": found.what,
        "delta": found.delta,
        "at_half_noise": found.at_half_noise,
    }
    write_bytes(folder.audit, (json.dumps(shown, indent=1) + "\n").encode())
    return found


def _rounds_paid_for(folder: RunFolder) -> int:
    """Charged rounds of the site that has spent the most: the rounds of the run's own claim.

    Raises:
        RunFolderError: nothing was charged in the run.
        LedgerError: its ledger is damaged.
    """
    entries = read_history(folder.ledger).entries if folder.ledger.exists() else ()
    if not entries:
        raise RunFolderError(
            str(folder.path),
            expected="a run with charges in its ledger, but this one has none",
            fix=f"run it first: cloister resume {shlex.quote(str(folder.path))}",
        )
    return max(Counter(entry.charge.dataset for entry in entries).values())


def _first_site(sites: SitesFolder, plan: Plan, model: LanguageModel) -> tuple[torch.device, Sequences]:
    """The device of the first simulated site, and its training sequences in its own layout."""
    path = sites.config(site_name(0))
    if not path.is_file():
        raise RunFolderError(
            str(path),
            expected="the folder of a simulated site, whose records the audit uses",
            fix="audit a simulation of the same plan",
        )
    site = read_config(path)
    preparation = preparation_of(site, plan, model.tokenizer)
    return device_for(site.device), cached(preparation.folder, preparation.key(), preparation.make).train
