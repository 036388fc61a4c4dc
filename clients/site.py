"""One site: it answers the coordinator's requests from its own data.

`config.py` has its configuration, `admission.py` its demands, `spending.py` its ledger, `kept.py` its files,
`attempt.py` its side of the secure sum, and `release.py` the only exit of an update. This file combines them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from transformers import PreTrainedTokenizerBase

from cloister.aggregation import evaluation
from cloister.aggregation.evaluation import CORRECT
from cloister.aggregation.features.feature import Me, Secrets
from cloister.aggregation.features.in_clear import LOSS, TOKENS, count_of_loss
from cloister.aggregation.features.registry import Orders
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector import sketch
from cloister.aggregation.vector.ring import RingVector
from cloister.aggregation.vector.span import Piece, manifest_digest, manifest_of
from cloister.clients.consent.admission import Admission
from cloister.clients.consent.spending import Spending
from cloister.clients.network.guard import Guard
from cloister.clients.ranks.resident import Loaded, Resident
from cloister.clients.setup.config import SiteConfig
from cloister.clients.state.attempt import Attempts
from cloister.clients.state.attempt_files import AttemptFiles
from cloister.clients.state.carried import Carried
from cloister.clients.state.kept import (
    Kept,
    Written,
    base_path,
    check_sent,
    checked_base,
    read_base,
    run_folder,
    update_path,
    write_pieces,
)
from cloister.clients.training.release import MUST_STAY
from cloister.clients.training.work import Task, masking
from cloister.lm.data.prepare import Preparation, Prepared
from cloister.lm.data.store import cached, load_prepared, prepared_path
from cloister.lm.model.layout import Vector
from cloister.lm.tasks.registry import task_of
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.records import check_source, read_each
from cloister.lm.training.moments import Carry
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import BudgetError, DataError, PolicyError, StaleError, UpdateError
from cloister.protocol.identity.audit_log import NO_AUDIT_LOG, AuditLog, Fact, What
from cloister.protocol.machine.storage import sync_folders
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import (
    EVALUATE,
    NOTHING_CARRIED,
    TRAIN,
    Agree,
    Begin,
    Contribute,
    Contribution,
    Instructions,
    Join,
    Joined,
    Purpose,
    Refused,
    Reply,
    Request,
    SumId,
    Unmask,
)
from cloister.protocol.plan.plan import Plan

_log = logging.getLogger(__name__)

Noise = Callable[[int], NoiseStream]
"""Returns, for a round, a stream that no other training uses."""


@dataclass(frozen=True)
class Simulated:
    """What a simulation, or an audit, gives a site; a deployed site has the defaults, and shares nothing."""

    noise: Noise = lambda _round: NoiseStream.fresh()
    """Source of the site's noise; a repeatable simulation has another."""
    bases: Path | None = None
    """Folder of the base models of all sites; None: the site's state folder."""
    dataset: DatasetLedger | None = None
    """The ledger over runs that all sites charge."""
    sequences: Callable[[], Prepared | None] = lambda: None
    """Gives the site's sequences, if they were made for all sites together; picklable."""
    one_owner: bool = False
    """Whether one person has started all sites: what a policy must list (packages, sketches) needs no policy."""
    task: Callable[[Task], Task] = lambda task: task
    """The task of an update as this site does it: a poisoned site changes it."""


DEPLOYED = Simulated()


class Site:
    """Answers the coordinator's requests.

    Args:
        config: The site's configuration.
        resident: The state that the process has in memory for its sites.
        simulated: What a simulation gives the site.
        audit_log: Has a line for each join, refusal, release and charge before its effect.
        clock: Seconds, for how long a training takes.
    """

    def __init__(
        self,
        config: SiteConfig,
        resident: Resident,
        *,
        simulated: Simulated = DEPLOYED,
        audit_log: AuditLog = NO_AUDIT_LOG,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.name = config.name
        self._resident = resident
        self._simulated = simulated
        self._audit_log = audit_log
        self._clock = clock
        self._bases = simulated.bases or config.folder
        self._kept = Kept(config.folder, self._bases)
        self._spending = Spending(config, simulated.dataset)
        self._admission = Admission(config, resident, self._spending)
        self._folder = config.folder

    @property
    def guard(self) -> Guard:
        """Which requests are the coordinator's own."""
        return Guard(self.name, self.config.coordinator, self.config.folder, self._identity)

    def answer(self, request: Request) -> Reply:
        """The site's reply to a request.

        Raises:
            CloisterError: the site does not do what it was asked.
        """
        match request:
            case Join():
                return self.join(request)
            case Agree():
                return self.agree(request)
            case Contribute():
                return self.contribute(request)

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        """The site's signed refusal of a request that its policy or budget forbids."""
        if isinstance(request, Join):
            run, plan = request.run, bytes.fromhex(self._resident.plan(request.plan).digest())
            fact = Fact("refusal", run, plan.hex(), 0, 0, self.name, str(error))
        else:
            run, plan = request.sum.run, request.sum.plan
            fact = self._fact("refusal", request.sum, str(error), request.tries)
        self._audit_log.record(fact)
        return self._demands(run).refuse(run, plan, error)

    def join(self, request: Join) -> Joined:
        """Check the plan against the site's demands, and prepare the model and, without a privacy unit, the data.

        Under a privacy unit no record is read here, so that neither answer nor time depends on one: data is prepared
        at the first training, after the charge.

        Raises:
            PolicyError, BudgetError: the site does not take part, by its own policy or budget.
            CloisterError: the site cannot take part.
        """
        plan = self._resident.plan(request.plan)
        demands = self._demands(request.run)
        demands.check_consent(plan, request.run)
        if not self._simulated.one_owner:
            demands.check_listed(plan)
        demands.check_new(plan, request.run)
        base = checked_base(request, plan)
        again = demands.has_joined(plan, request.run)
        # Before anything that is loaded is dropped.
        self._kept.check(request, bytes.fromhex(plan.digest()), again=again)
        loaded = self._load(plan, request.base_hash, lambda: base)
        if plan.aggregation.secure:
            # First: where the plan is kept, these files must exist.
            self._open_attempts(request.run, again=again)
        self._kept.remember(request, bytes.fromhex(plan.digest()), demands.membership)
        # Last: after a refusal above, every later message is refused too, because the site has not joined.
        demands.take_consent(plan, request.run)
        if loaded.sums.terms is not None:
            check_source(self.config.data, split=self.config.split)
            task_of(plan.data).check(loaded.model.tokenizer)
        elif not len(self._prepared(loaded).train):
            raise DataError(f"data of {self.name}", self.config.data, expected="records to train on")
        self._audit_log.record(Fact("join", request.run, plan.digest(), site=self.name))
        return demands.joined(request, plan)

    def agree(self, request: Agree) -> Reply:
        """The site's part of a step of the secure sum that carries no vector.

        `Begin` checks plan, consent and policy, and derives the contract of the attempt. Later steps use what this
        process has derived, and do not read plan and consent again; another process derives all of it anew. Each step
        reads the marks and the length of the attempt's file; it reads the messages in the file only if either has
        changed.

        Raises:
            CloisterError: the site refuses.
        """
        told, about, opened = request.told, request.sum, self._resident.opened
        if isinstance(told, Begin):
            opened.pop(self._folder, None)
        attempts = self._under_way(about)
        if attempts is None:
            loaded, demands = self._open(about), self._demands(about.run)
            demands.check_unpaid(loaded.plan, about.purpose)
            if isinstance(told, Begin):
                demands.check_policy(loaded.plan, about.run, loaded.sums.terms)
                demands.check_round(loaded.plan, about, told.round)
            attempts = self._attempts(loaded, about)
        answer = attempts.agree(told, about.round, partial(self._sketch, about, request.tries))
        if isinstance(told, Unmask):  # which ends the attempt
            opened.pop(self._folder, None)
        else:  # now only: a message that is refused takes the place of no attempt
            opened[self._folder] = self.config, about, attempts
        return answer

    def contribute(self, request: Contribute) -> Contribution:
        """The site's part of a sum, masked if the plan sums securely. No other function returns an update; `agree`
        returns sketches of one.

        Raises:
            CloisterError: the site cannot contribute, or refuses.
        """
        loaded, demands = self._open(request.sum), self._demands(request.sum.run)
        plan, purpose = loaded.plan, request.sum.purpose
        demands.check_unpaid(plan, purpose)
        demands.check_policy(plan, request.sum.run, loaded.sums.terms)
        demands.check_round(plan, request.sum, request.sum.round)
        told, digest = request.told, instructions_digest(request.told)
        check_sent("global model", request.model, told.model)
        sums = loaded.sums.of_round(purpose, told.sum.round)
        orders, seconds = _orders(sums, told, Me(self.name, partial(demands.cohort, plan, told.sum))), 0.0

        def make(history: bytes) -> list[Piece]:
            nonlocal seconds
            with self._kept.turn(told.sum.run):
                made = self._made(loaded, told, request.model, orders, history, request.tries)
            seconds = made.seconds
            return made.pieces

        mask, statement = masking(digest), None
        if purpose == TRAIN:
            path = update_path(run_folder(self.config.folder, told.sum.run), told.sum.round)
            mask = loaded.work.masking(path, sums.training.size, digest, plan.local.threads)
        if plan.aggregation.secure:
            if request.inbox is None:
                raise UpdateError(
                    "inbox", "missing", expected="the shares of the other sites, under the secure sum"
                )
            statement, sent = self._attempts(loaded, told.sum).mask(
                request.inbox, told.sum.round, digest, make, mask, fresh=told.fresh
            )
        else:
            pieces = make(self._history(loaded, told.sum))
            sent = Written(manifest_of(pieces), pieces)
        spans = tuple(vector for _, vector in sent.pieces if vector.size)
        if not orders.timed:
            seconds = 0.0
        # Of a vector without mask or noise of the site a digest would tell others whether it is that of no records.
        bare = statement is None and plan.privacy.unit == "site"
        vector = "vector" if bare else f"vector {manifest_digest(sent.manifest).hex()}"
        self._audit_log.record(self._fact("release", told.sum, f"{purpose}, {vector}", request.tries))
        return Contribution(self.name, told.sum, digest, statement, sent.manifest, spans, seconds)

    # For the site alone: not sent.

    def held_out(self, plan: Plan, weights: Vector, base_hash: bytes = b"") -> HeldOut:
        """The model's sums on the site's held-out records, or on the subset of `server.evaluation_sequences`.

        Raises:
            CloisterError: the model or the data cannot be loaded.
        """
        loaded = self._load(plan, base_hash)
        return loaded.work.held_out(plan, weights, self._opener(loaded))

    def sequences(self, plan: Plan, base_hash: bytes = b"") -> int:
        """Number of the site's training sequences."""
        return len(self._prepared(self._load(plan, base_hash)).train)

    # The model and data that a message refers to.

    def _demands(self, run: str) -> Admission:
        """The site's demands in a run, with the identity and roster with which it has joined it.

        So a version of the federation that is installed during a run does not change the run.
        """
        if not self.config.federation:
            return self._admission
        kept = self._kept.membership(run)
        config = self.config.model_copy(update=kept._asdict()) if kept else self.config
        return Admission(config, self._resident, self._spending)

    def _identity(self, run: str) -> Ed25519PrivateKey:
        """The site's identity key, as it has joined a run, or would.

        Raises:
            RosterError: it cannot be read.
        """
        return self._resident.identity((self._kept.membership(run) or self.config).identity)

    def _open(self, sum_id: SumId) -> Loaded:
        """Model and trainer for a message, after a check that the site has joined its plan and run."""
        plan, base_hash = self._kept.recall(sum_id.run, sum_id.plan, self._resident.plan)
        demands = self._demands(sum_id.run)
        demands.check(plan, sum_id.run)
        if not self._simulated.one_owner:  # before the package is imported
            demands.check_listed(plan)
        return self._load(plan, base_hash)

    def _load(self, plan: Plan, base_hash: bytes, base: Callable[[], Vector | None] | None = None) -> Loaded:
        path = base_path(self._bases, base_hash)
        read = base or partial(read_base, path, base_hash)
        return self._resident.load(plan, self.config.device, self.config.mesh, base_hash, read, path)

    def _under_way(self, about: SumId) -> Attempts | None:
        """The attempts at a sum, if this process has derived them since the site's last `Begin`."""
        known = self._resident.opened.get(self._folder)
        return known[2] if known is not None and known[:2] == (self.config, about) else None

    def _attempts(self, loaded: Loaded, sum_id: SumId) -> Attempts:
        """The attempts at a sum, derived if this process does not have them."""
        if (known := self._under_way(sum_id)) is not None:
            return known
        purpose, sums = sum_id.purpose, loaded.sums.of_round(sum_id.purpose, sum_id.round)
        demands = self._demands(sum_id.run)
        roster = demands.roster()
        group = sums.draw(purpose, sum_id.division).group_of(self.name, roster.names, sum_id.round)
        contract = sums.contract(purpose, sum_id.run, roster, group, sum_id.division)
        folder = self._attempts_folder(purpose, sum_id.run)
        member = demands.member(sums.quorum(purpose, group, sum_id.division))
        history, most = partial(self._history, loaded, sum_id), loaded.plan.cohort.attempts
        return Attempts(folder, contract, member, history, most)

    def _sketch(self, about: SumId, tries: int, seed: bytes, count: int) -> bytes:
        """The sketch of the vector that the site has made for a sum, before its masks; `count` sketches with it.

        Raises:
            StaleError: the vector is lost.
            PolicyError: the site's policy does not allow it any more.
        """
        loaded, demands = self._open(about), self._demands(about.run)
        demands.check_policy(loaded.plan, about.run, loaded.sums.terms)  # as it is now
        sums = loaded.sums.of_round(about.purpose, about.round)
        layout = sums.layout(about.purpose)
        shape = layout.length, layout.ring.dtype
        made = self._kept.made(about, {}, *shape)
        if made is None:
            lost = "the one that this site has masked, which is lost"
            raise StaleError(f"update of round {about.round}", expected=lost)
        me = Me(self.name, partial(demands.cohort, sums.plan, about))
        lengths = layout.lengths(Orders.read(sums, self._kept.told(about, *shape), me).blocks)
        assert lengths is not None, "a contract with sketches has a bound"
        found = lengths.sketch(made.pieces, seed)
        self._audit_log.record(self._fact("release", about, f"sketch {count}, seed {seed.hex()}", tries))
        return sketch.to_bytes(found)

    def _history(self, loaded: Loaded, sum_id: SumId) -> bytes:
        """The history of what the site carries into a sum."""
        if sum_id.purpose != TRAIN or not loaded.plan.carries:
            return NOTHING_CARRIED
        return self._carried(loaded, sum_id.run).history(sum_id.round)

    def _carried(self, loaded: Loaded, run: str) -> Carried:
        return Carried(run_folder(self.config.folder, run), loaded.plan.digest(), loaded.sums.model)

    def _attempts_folder(self, purpose: Purpose, run: str) -> Path:
        return run_folder(self.config.folder, run) / "secure" / purpose

    def _open_attempts(self, run: str, *, again: bool) -> None:
        """Create the files of a run's attempts at its first join; at a later one, check that they are there.

        A site whose consent the run has taken (`again`), or that keeps its plan, and has lost those files, may have
        answered.
        """
        joined = again or self._kept.knows(run)
        for purpose in (TRAIN, EVALUATE):
            folder = self._attempts_folder(purpose, run)
            if not joined:
                AttemptFiles.create(folder, self.config.folder.parent)
            with AttemptFiles.turn(folder, run) as files:
                files.state(None)
            if joined:  # an earlier join may have been killed between a folder and its sync
                sync_folders(folder.parent, self.config.folder.parent)

    def _prepared(self, loaded: Loaded) -> Prepared:
        """The site's records as sequences: tokenised once, mapped from disk after that.

        Under a privacy unit this may be called only after the charge: how long it takes depends on the records.
        """
        made_before = self._simulated.sequences()
        if made_before is not None:
            return made_before
        preparation = preparation_of(self.config, loaded.plan, loaded.model.tokenizer)
        key = preparation.key()

        def make() -> Prepared:
            made = preparation.make()
            level = logging.WARNING if made.left_out else logging.INFO
            _log.log(level, "%s: %s: %s", self.name, MUST_STAY, made.summary())
            if not len(made.train):
                nothing = "NO RECORD IS TRAINED ON: the site adds noise alone to each sum"
                _log.error("%s: %s: %s", self.name, MUST_STAY, nothing)
            return made

        return loaded.prepared(self.config.folder, key, lambda: cached(preparation.folder, key, make))

    def _opener(self, loaded: Loaded) -> Callable[[], Prepared]:
        """Opens the site's sequences, and can be sent to another process if the work is done there."""
        if not loaded.work.elsewhere:
            return partial(self._prepared, loaded)
        self._prepared(loaded)  # so that they are on disk
        if self._simulated.sequences() is not None:
            return partial(_made, self._simulated.sequences)
        preparation = preparation_of(self.config, loaded.plan, loaded.model.tokenizer)
        return partial(load_prepared, prepared_path(preparation.folder, preparation.key()))

    # Contributions to a sum.

    def _totals(self, loaded: Loaded, weights: Vector) -> RingVector:
        """Totals of the model on the site's held-out records."""
        found = self.held_out(loaded.plan, weights, loaded.base_hash)
        counters = {
            LOSS: count_of_loss(found.loss_nats),
            CORRECT: found.correct,
            TOKENS: found.tokens,
            **found.counts,
        }
        layout = loaded.sums.evaluation
        return layout.ring.encode_counters([counters.get(name, 0) for name in layout.names])

    def _made(
        self, loaded: Loaded, told: Instructions, weights: Vector, orders: Orders, history: bytes, tries: int
    ) -> Written:
        """The update or totals of the round: kept from an earlier attempt, or made now.

        Under privacy an update is charged before it is trained, and synced to disk before it is sent: training again
        would be a second release. What is masked is synced first: it may be masked again, and must be the same then. A
        round has one update: from a second one, by other instructions or with other noise, a coordinator that sums both
        with the same others could compute the difference.

        Raises:
            StaleError: the site has made them by other instructions or from other state, or masked and lost them.
            StepError: what the site carries is no longer what it has advertised.
        """
        plan, purpose, round_number = loaded.plan, told.sum.purpose, told.sum.round
        layout = loaded.sums.of_round(purpose, round_number).layout(purpose)
        facts = {
            "plan": plan.digest(),
            "model": loaded.sums.model,
            "instructions": instructions_digest(told).hex(),
        }
        if not told.fresh:
            facts["carried"] = history.hex()
        kept = self._kept.made(told.sum, facts, layout.length, layout.ring.dtype)
        if kept is not None:
            if loaded.sums.terms is not None:
                self._spending.check_paid(told.sum.run, round_number, purpose)
            return kept
        if plan.aggregation.secure and self._attempts(loaded, told.sum).masked_in(round_number):
            raise StaleError(
                f"{'update' if purpose == TRAIN else 'evaluation'} of round {round_number}",
                expected="the one that this site has masked, which is lost: it makes no second one",
            )

        def write(path: Path) -> Written:
            if purpose == EVALUATE:
                return self._evaluated(loaded, told, weights, path, tries)
            update = partial(self._update, loaded, told, weights, orders, path, tries)
            if not plan.carries:
                return update(None)
            return self._carried(loaded, told.sum.run).make(told, history, update, durable=durable)

        durable = loaded.sums.terms is not None or plan.aggregation.secure
        return self._kept.keep(told.sum, write, facts, told.features, durable=durable)

    def _update(
        self,
        loaded: Loaded,
        told: Instructions,
        weights: Vector,
        orders: Orders,
        path: Path,
        tries: int,
        carry: Carry | None,
    ) -> Written:
        """Train the update of the round into a file, after the charge."""
        plan, round_number = loaded.plan, told.sum.round
        noise = self._charged(loaded, told.sum, tries)
        rounding = self._seed(plan, "rounding", round_number, self._kept.rounding_key(told.sum.run))
        seed = (int.from_bytes(self._seed(plan, "training", round_number)[:16], "little"),)
        sums = loaded.sums.of_round(TRAIN, round_number)
        code, part = orders.code(sums.training, Secrets(rounding, noise, carry)), sums.trained
        steps, sequences = orders.steps(plan.local.steps), self._opener(loaded)
        records = partial(read_each, self.config.data, split=self.config.split)
        part = loaded.model.layout if part is None else part
        task = Task(round_number, part, sequences, records, carry, steps, orders.factor, seed, code, noise)
        started = self._clock()
        written = loaded.work.update(self._simulated.task(task), weights, path)
        return replace(written, seconds=self._clock() - started)

    def _evaluated(
        self, loaded: Loaded, told: Instructions, weights: Vector, path: Path, tries: int
    ) -> Written:
        """Evaluate the global model into a file: exact totals, or under a privacy unit, after the charge, the noised
        sum of the units' vectors."""
        if loaded.sums.terms is None:
            return write_pieces(path, [(0, self._totals(loaded, weights))])
        assert loaded.plan.charged_evaluations, "other evaluations under a privacy unit were refused"
        noise = self._charged(loaded, told.sum, tries)
        assert noise is not None, "there is a privacy unit"
        code = evaluation.code(loaded.sums, noise)
        return loaded.work.measured(code, weights, self._opener(loaded), path)

    def _charged(self, loaded: Loaded, about: SumId, tries: int) -> NoiseStream | None:
        """Charge the site's ledger for its part of a sum, durably. Returns the secret stream of that round, or None
        without a privacy unit."""
        plan, terms = loaded.plan, loaded.sums.terms
        if terms is None:
            return None
        rounds, policy = self._demands(about.run).rounds(plan), self._admission.policy()
        paid = self._spending.pay(plan, terms, about.run, about.round, rounds, policy, about.purpose)
        if self._audit_log:
            head = f"head of the ledger {paid.hash.hex()}"
            self._audit_log.record(self._fact("charge", about, head, tries))
        return self._simulated.noise(about.round)

    def _fact(self, what: What, about: SumId, detail: str, tries: int) -> Fact:
        return Fact(what, about.run, about.plan.hex(), about.round, tries, self.name, detail)

    def _seed(self, plan: Plan, what: str, round_number: int, key: bytes = b"") -> bytes:
        """A seed for each use, site and round of a run, the same on any machine: public, or secret by `key`."""
        text = f"{what}/{plan.run.seed}/{self.name}/{round_number}"
        return hmac.digest(key, text.encode(), "sha256") if key else hashlib.sha256(text.encode()).digest()


def _made(sequences: Callable[[], Prepared | None]) -> Prepared:
    made = sequences()
    assert made is not None
    return made


def preparation_of(config: SiteConfig, plan: Plan, tokenizer: PreTrainedTokenizerBase) -> Preparation:
    """How the records of a site become sequences under a plan.

    Args:
        config: The site's configuration.
        plan: The plan.
        tokenizer: The plan's tokenizer.
    """
    return Preparation(plan, tokenizer, config.data, config.split, config.folder / "data")


def _orders(sums: Sums, told: Instructions, me: Me) -> Orders:
    """What the features of the plan tell the site to do for an update; an evaluation has none.

    Raises:
        CloisterError: the plan does not allow what they tell.
    """
    if told.sum.purpose == TRAIN:
        return Orders.read(sums, told.features, me)
    if told.features:
        raise UpdateError("instructions of features", len(told.features), expected="none for an evaluation")
    return Orders(())
