"""One site: what it answers to the coordinator's requests, from its own data.

`config.py` is what the site's people wrote, `admission.py` what it demands, `spending.py` its ledger, `kept.py` its
files, `attempt.py` its side of the secure sum, `release.py` the only exit of an update. This file puts them together.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.aggregation.ring import RingVector
from cloister.aggregation.sums import (
    BYTES,
    CORRECT,
    LOSS,
    TOKENS,
    contract_for,
    count_of_loss,
    evaluation_layout,
    training_layout,
)
from cloister.clients.admission import Admission
from cloister.clients.attempt import Attempts
from cloister.clients.config import SiteConfig
from cloister.clients.dpsgd import PrivateTrainer
from cloister.clients.kept import Kept
from cloister.clients.release import Finished, for_site_unit, in_clear_units
from cloister.clients.resident import Loaded, Resident
from cloister.clients.spending import Spending
from cloister.lm.data import Prepared, cached, prepare, prepared_key, unit_rule
from cloister.lm.evaluate import HeldOut, evaluate
from cloister.lm.layout import Vector
from cloister.lm.records import read_records
from cloister.privacy.noise import NoiseStream
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import BudgetError, DataError, PolicyError, StaleError, UpdateError
from cloister.protocol.messages import (
    EVALUATE,
    TRAIN,
    Agree,
    Begin,
    Contribute,
    Contribution,
    Join,
    Joined,
    Masked,
    Refused,
    Reply,
    Request,
    SumId,
)
from cloister.protocol.plan import LARGEST_CLIP, SMALLEST_CLIP, Plan
from cloister.protocol.soundness import from_json

_log = logging.getLogger(__name__)

Noise = Callable[[int], NoiseStream]
"""Gives, for a round, a stream that no other training has had or will have."""


class Site:
    """Answers the coordinator's requests.

    Args:
        config: The site's configuration.
        resident: What the process has in memory for its sites.
        noise: Source of the site's noise; a simulation that is to be repeated passes another.
        bases: Folder of base models; by default the state folder.
    """

    def __init__(
        self,
        config: SiteConfig,
        resident: Resident,
        *,
        noise: Noise = lambda _round: NoiseStream.fresh(),
        bases: Path | None = None,
    ) -> None:
        self.config = config
        self.name = config.name
        self._resident = resident
        self._noise = noise
        self._kept = Kept(config.folder, bases or config.folder)
        self._spending = Spending(config)
        self._admission = Admission(config, resident, self._spending)

    def answer(self, request: Request) -> Reply:
        """What the site replies to a request.

        Raises:
            CloisterError: why it does not do what it was asked.
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
            plan = bytes.fromhex(from_json(request.plan).digest())
            return self._admission.refuse(request.run, plan, error)
        return self._admission.refuse(request.sum.run, request.sum.plan, error)

    def join(self, request: Join) -> Joined:
        """Check the plan against the site's demands, and get model and data ready.

        Raises:
            PolicyError, BudgetError: the site does not take part, by its own policy.
            CloisterError: why this site cannot take part.
        """
        plan = from_json(request.plan)
        self._admission.check_new(plan, request.run)
        self._kept.remember(request, bytes.fromhex(plan.digest()))
        loaded = self._load(plan, request.base_hash)
        # Last: what was refused above is refused at every later message too, because the site has not joined.
        self._admission.pin(plan, request.run)
        if not len(self._prepared(loaded).train):
            raise DataError(f"data of {self.name}", self.config.data, expected="records to train on")
        return Joined(self.name, loaded.model.layout.size)

    def agree(self, request: Agree) -> Reply:
        """The site's part of a step of the secure sum that carries no vector.

        Raises:
            CloisterError: why it refuses.
        """
        loaded = self._open(request.sum)
        self._admission.check_unpaid(loaded.plan, request.sum.purpose)
        if isinstance(request.told, Begin):
            self._admission.check_begin(loaded.plan, request.sum.purpose, request.told)
        return self._attempts(loaded, request.sum).agree(request.told, request.sum.round)

    def contribute(self, request: Contribute) -> Contribution:
        """The site's part of a sum, under its masks where the plan sums securely. There is no other exit.

        Raises:
            CloisterError: why there is none.
        """
        loaded = self._open(request.sum)
        plan, purpose = loaded.plan, request.sum.purpose
        self._admission.check_unpaid(plan, purpose)
        if purpose == TRAIN and not 1 <= request.sum.round <= plan.run.rounds:
            raise StaleError("round", request.sum.round, expected=f"one of the plan's {plan.run.rounds}")
        _check_model(request.model, request.model_hash)
        if purpose == TRAIN and loaded.terms is not None and loaded.terms.mechanism is not None:
            _check_clip(request.clip)

        def make() -> RingVector:
            return self._totals(loaded, request) if purpose == EVALUATE else self._update(loaded, request)

        statement: Masked | None = None
        if plan.aggregation.secure:
            if request.inbox is None:
                raise UpdateError(
                    "inbox", "missing", expected="the shares of the other sites, under the secure sum"
                )
            statement, vector = self._attempts(loaded, request.sum).mask(
                request.inbox, request.sum.round, request.model_hash, plan.local.threads, make
            )
        else:
            vector = make()
        return Contribution(self.name, request.sum, request.model_hash, statement, vector)

    # For the site's own eyes.

    def held_out(self, plan: Plan, weights: Vector, base_hash: bytes = b"") -> HeldOut:
        """The model's sums on the site's held-out records.

        Raises:
            CloisterError: why there are none.
        """
        loaded = self._load(plan, base_hash)
        loaded.model.layout.scatter(weights, loaded.model.module)
        sequences, local = self._prepared(loaded).held_out, plan.local
        return evaluate(loaded.model.module, sequences, local.batch_size, loaded.device, local.precision)

    def sequences(self, plan: Plan, base_hash: bytes = b"") -> int:
        """Number of the site's training sequences."""
        return len(self._prepared(self._load(plan, base_hash)).train)

    # What a message is about.

    def _open(self, sum_id: SumId) -> Loaded:
        """Model and trainer for a message, after its plan and run were found to be those that the site has joined."""
        plan, base_hash = self._kept.recall(sum_id.run, sum_id.plan, self._resident.plan)
        self._admission.check(plan, sum_id.run)
        return self._load(plan, base_hash)

    def _load(self, plan: Plan, base_hash: bytes) -> Loaded:
        return self._resident.load(plan, self.config.device, base_hash, lambda: self._kept.base(base_hash))

    def _attempts(self, loaded: Loaded, sum_id: SumId) -> Attempts:
        plan, layout, purpose = loaded.plan, loaded.model.layout, sum_id.purpose
        model = layout.digest() + loaded.base_hash.hex()
        contract = contract_for(purpose, plan, self._admission.roster(), sum_id.run, layout.size, model)
        needed = plan.cohort.needed() if purpose == TRAIN else plan.cohort.needed_to_evaluate()
        # A folder for each run: what was answered in one is remembered while others go on.
        folder = (
            self.config.folder / "secure" / purpose / hashlib.sha256(sum_id.run.encode()).hexdigest()[:32]
        )
        return Attempts(folder, contract, self._admission.member(needed), loaded.live)

    def _prepared(self, loaded: Loaded) -> Prepared:
        """The site's records as sequences: tokenised once, mapped from disk after that."""
        source, split, seed = self.config.data, self.config.split, loaded.plan.run.seed
        tokenizer, data = loaded.model.tokenizer, loaded.plan.data
        cache = self.config.folder / "data"
        units = unit_rule(data, loaded.plan.privacy)

        def make() -> Prepared:
            records = read_records(source, split=split, cache=cache)
            made = prepare(records, tokenizer, data, seed=seed, units=units)
            if made.dropped:
                _log.warning("%s: nothing can be learned from %d records", self.name, made.dropped)
            return made

        key = prepared_key(source, tokenizer, data, seed=seed, split=split, units=units)
        return loaded.prepared(self.config.folder, key, lambda: cached(cache, key, make))

    # What is summed.

    def _totals(self, loaded: Loaded, request: Contribute) -> RingVector:
        """Totals of the model on the site's held-out records."""
        found = self.held_out(loaded.plan, request.model, loaded.base_hash)
        counters = {
            LOSS: count_of_loss(found.loss_nats),
            CORRECT: found.correct,
            TOKENS: found.tokens,
            BYTES: found.bytes,
        }
        layout = evaluation_layout(loaded.plan)
        return layout.ring.encode_counters([counters[name] for name in layout.counters])

    def _update(self, loaded: Loaded, request: Contribute) -> RingVector:
        """The update of the round: kept from an earlier attempt, or trained now.

        Under privacy it is charged before it is trained, and synced to disk before it leaves: a site that trained again
        would release twice.
        """
        plan, terms, round_number = loaded.plan, loaded.terms, request.sum.round
        layout = training_layout(plan, loaded.model.layout.size)
        facts = {
            "plan": plan.digest(),
            "run": request.sum.run,
            "model": request.model_hash.hex(),
            "clip": request.clip.hex(),
        }
        kept = self._kept.update(round_number, facts, layout.length, layout.ring.dtype)
        if kept is not None:
            return kept
        noise = None
        if terms is not None:
            rounds, policy = self._admission.rounds(plan), self._admission.policy()
            self._spending.pay(plan, terms, request.sum.run, round_number, rounds, policy)
            noise = self._noise(round_number)
        try:
            finished = self._trained(loaded, request, noise)
        except UpdateError as error:
            if terms is None or terms.mechanism is None:
                raise
            # Whether an update is finite depends on the data, and a failure would show it: send zeros with noise.
            _log.warning("round %d: zeros are sent: %s", round_number, error)
            finished = Finished(np.zeros_like(request.model), 0, 0.0)
        vector: RingVector
        if terms is not None and terms.mechanism is not None:
            assert noise is not None
            vector = for_site_unit(finished, layout, terms.mechanism, request.clip, noise)
        else:
            # Public, so that a second attempt rounds alike: what hides the vector is its mask.
            random = np.random.Generator(np.random.SFC64(self._seed(plan, "rounding", round_number)))
            vector = in_clear_units(finished, layout, random, weighted=plan.aggregation.weighting == "tokens")
        tensors: dict[str, npt.NDArray[Any]] = {"contribution": vector}
        if plan.model.adapter.scheme == "lora":
            tensors["update"] = finished.vector  # for `simulations/inspection.py`: the error of that scheme
        facts["tokens"] = str(finished.tokens)
        self._kept.keep_update(round_number, tensors, facts, durable=terms is not None)
        return vector

    def _trained(self, loaded: Loaded, request: Contribute, noise: NoiseStream | None) -> Finished:
        sequences, round_number = self._prepared(loaded).train, request.sum.round
        trainer, terms, state = loaded.trainer, loaded.terms, self.config.folder
        if isinstance(trainer, PrivateTrainer):
            assert noise is not None
            assert terms is not None
            local = trainer.train(
                request.model,
                sequences,
                round=round_number,
                noise=noise,
                noise_multiplier=terms.noise_multiplier,
                state=state,
            )
        else:
            seed = (self._seed(loaded.plan, "training", round_number),)
            local = trainer.train(request.model, sequences, round=round_number, site_seed=seed, state=state)
        return Finished(local.vector, local.tokens, local.loss)

    def _seed(self, plan: Plan, what: str, round_number: int) -> int:
        """A public seed that is different for each use, site and round of a run, and the same on any machine."""
        text = f"{what}/{plan.run.seed}/{self.name}/{round_number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def _check_model(model: Vector, named: bytes) -> None:
    """The hash binds the masks to the model, so the site computes it itself.

    A model that is not finite is refused before any record is used: what training made of it would depend on them.
    """
    own = vector_hash(model)
    if own != named:
        raise UpdateError("global model", own.hex(), expected=f"the model with the hash {named.hex()}")
    if not np.isfinite(model).all():
        raise UpdateError("global model", "non-finite", expected="finite weights")


def _check_clip(clip: float) -> None:
    if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
        raise UpdateError("clipping norm", clip, expected=f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:g}")
