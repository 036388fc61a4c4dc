"""One site: its own configuration, and what it does when it is asked.

A site's configuration is a TOML file on its own machine; nothing of it travels. Its state folder holds what outlives a
message: the tokenised data, kept optimizer state, and the finished update of the round at hand, so that a second
attempt at a round does not train again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cloister.aggregation.ring import RingVector
from cloister.aggregation.secure_messages import Begin, from_bytes
from cloister.aggregation.sums import (
    BYTES,
    CORRECT,
    EVALUATE,
    LOSS,
    TOKENS,
    TRAIN,
    contract_for,
    count_of_loss,
    evaluation_layout,
    training_layout,
)
from cloister.clients.attempt import ADVERTISE, Attempts, Live, Member
from cloister.clients.dpsgd import PrivateTrainer
from cloister.clients.pins import Pins
from cloister.clients.release import Finished, code_for, contribution
from cloister.lm.data import Prepared, cached, prepare, prepared_key, unit_in_words, unit_rule
from cloister.lm.evaluate import HeldOut, evaluate
from cloister.lm.model import LanguageModel, count_parameters, device_for, load_model
from cloister.lm.records import read_records
from cloister.lm.train import Trainer
from cloister.privacy.accounting import composed, epsilon_of
from cloister.privacy.events import Event, from_json, to_json
from cloister.privacy.ledger import Budget, Charge, Entry, Ledger
from cloister.privacy.noise import NoiseStream
from cloister.privacy.policy import Policy, Refusal, load_policy, offer_of
from cloister.privacy.terms import Terms, terms_of
from cloister.protocol.cohort import draw
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import (
    BudgetError,
    DataError,
    MemberError,
    PlanError,
    PolicyError,
    RosterError,
    StaleError,
    StorageError,
    UpdateError,
)
from cloister.protocol.messages import (
    Agree,
    Agreed,
    Contribution,
    Evaluate,
    Join,
    Joined,
    Refused,
    Train,
)
from cloister.protocol.plan import LARGEST_CLIP, SMALLEST_CLIP, SMALLEST_COHORT, Plan, Section
from cloister.protocol.roster import Roster, load_identity, load_roster
from cloister.protocol.storage import write_file

Vector = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)

_MOST_PREPARED = 64  # sites whose sequences a process keeps mapped: each takes a few open files


class SiteConfig(Section):
    """What belongs to one site alone."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """The site's name in the federation."""
    data: Annotated[str, Field(min_length=1)]
    """Its records: a file, a folder of files, or a hub name."""
    split: str = "train"
    """Split of a hub data set."""
    state: Annotated[str, Field(min_length=1)]
    """Folder for what the site keeps between messages."""
    identity: str = ""
    """File of its Ed25519 identity key, for the secure sum."""
    roster: str = ""
    """File of the roster that the sites agreed on."""
    roster_hash: str = ""
    """Hash of that roster, in hex: the site refuses any other."""
    plan: str = ""
    """Digest of the one plan under masks that it takes part in (`cloister plan check` prints it); empty: the first."""
    secure: bool = True
    """Take part only in plans that sum under masks; `false` lets whoever runs the coordinator see every update."""
    minimum_cohort: Annotated[int, Field(ge=SMALLEST_COHORT)] = SMALLEST_COHORT
    """Fewest sites whose sum it takes part in."""
    policy: str = ""
    """File of the site's policy (`privacy/policy.py`); empty: it demands no more than the keys here."""
    dataset: str = ""
    """Name under which the ledger keeps what this data has spent; empty: what `data` says. Data that is moved or grows
    is the same data: keep its name."""
    ledger: str = ""
    """File of the site's privacy ledger; empty: `ledger.sqlite` in the state folder. It must outlive runs."""
    device: str = "auto"
    """`auto` (the first GPU this process sees, else the CPU), or a torch device such as `cuda:1` or `cpu`."""


def load_site(path: Path) -> Site:
    """Read a site's TOML; relative paths in it are relative to its folder.

    Raises:
        PlanError: the file is missing, or a field is wrong.
    """
    try:
        config = SiteConfig(**tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise PlanError("site", str(path), expected=f"a readable TOML file ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError("site", str(path), expected=f"valid TOML ({error})") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"{path}: {field}", first["input"], expected=first["msg"]) from error
    data = path.parent / config.data
    config = config.model_copy(
        update={
            "dataset": config.dataset or config.data,
            "data": str(data) if data.exists() or config.data.startswith((".", "/")) else config.data,
            **{
                name: str(path.parent / value)
                for name in ("state", "identity", "roster", "policy", "ledger")
                if (value := getattr(config, name))
            },
        }
    )
    return Site(config)


def update_path(state: Path, round_number: int) -> Path:
    """Where a site with a state folder keeps its finished update of a round."""
    return state / f"update-{round_number:05d}.safetensors"


@dataclass(frozen=True)
class Site:
    """Answers the coordinator's requests from its own data.

    Model and trainer stay resident in the process and serve every site that runs in it.
    """

    config: SiteConfig

    def join(self, request: Join) -> Joined:
        """Check the plan against the site's demands, and get model and data ready.

        Raises:
            PolicyError, BudgetError: the site does not take part, by its own policy.
            CloisterError: why this site cannot take part.
        """
        plan = _plan(request.plan)
        self._check_plan(plan)
        self._pins.check_free(plan, request.run)
        self._check_policy(plan, request.run)
        if request.base_hash:
            self._keep_base(request)
        resident = self._resident(request.plan, request.base_hash)
        self._pins.join(plan, request.run)  # last: what was refused here stays refused at every later message
        prepared = self._prepared(resident)
        if not len(prepared.train):
            raise DataError(f"data of {self.config.name}", self.config.data, expected="records to train on")
        return Joined(self.config.name, resident.model.layout.size)

    def refuse(self, plan_json: str, run: str, error: PolicyError | BudgetError) -> Refused:
        """The site's signed word that it does not do what it was asked.

        What it has spent elsewhere is nobody's business: of a budget only that it is spent is said.
        """
        if isinstance(error, BudgetError) or "epsilon" in error.field:
            reason = "the privacy budget of its data does not allow it"
        else:
            reason = str(error)
        name = self.config.name
        if not self.config.identity:
            return Refused(name, reason.encode())
        signed = Refusal.sign(
            _identity(self.config.identity),
            site=name,
            run=run,
            plan_digest=_plan(plan_json).digest(),
            reason=reason,
        )
        return Refused(name, signed.to_bytes())

    def agree(self, request: Agree, private: bytes) -> Agreed:
        """The site's part of one step of the secure sum.

        Raises:
            CloisterError: why it refuses.
        """
        resident = self._open(request)
        _check_free(resident.plan, request.purpose)
        attempts = self._attempts(resident, request.purpose, request.run)
        if request.step == ADVERTISE:
            self._check_begin(resident.plan, request.purpose, from_bytes(Begin, private))
        return Agreed(self.config.name, attempts.agree(request.step, private, request.round))

    def train(self, request: Train, private: bytes = b"") -> Contribution:
        """The site's contribution to a round: trained, or taken from an earlier attempt at the same round.

        Args:
            request: The round and its global model.
            private: Under the secure sum, the shares that other sites have for this one.

        Raises:
            CloisterError: why there is none.
        """
        resident = self._open(request)
        if not 1 <= request.round <= resident.plan.run.rounds:
            raise StaleError("round", request.round, expected=f"one of the plan's {resident.plan.run.rounds}")
        _check_model(request.model, request.model_hash)
        if resident.terms is not None and resident.terms.mechanism is not None:
            _check_clip(request.clip)

        def make() -> RingVector:
            finished = self._finished_vector(resident, request)
            return self._new_vector(resident, request) if finished is None else finished

        return self._contribution(resident, TRAIN, request, private, make)

    def evaluate(self, request: Evaluate, private: bytes = b"") -> Contribution:
        """Totals of the model on the site's held-out records.

        Args:
            request: The global model.
            private: As for `train`.

        Raises:
            CloisterError: why there are none.
        """
        resident = self._open(request)
        _check_free(resident.plan, EVALUATE)
        _check_model(request.model, request.model_hash)
        layout = evaluation_layout(resident.plan)

        def make() -> RingVector:
            found = self.held_out(resident.plan, request.model, request.base)
            counters = {
                LOSS: count_of_loss(found.loss_nats),
                CORRECT: found.correct,
                TOKENS: found.tokens,
                BYTES: found.bytes,
            }
            return layout.ring.encode_counters([counters[name] for name in layout.counters])

        return self._contribution(resident, EVALUATE, request, private, make)

    def _contribution(
        self,
        resident: _Resident,
        purpose: str,
        request: Train | Evaluate,
        private: bytes,
        make: Callable[[], RingVector],
    ) -> Contribution:
        """What leaves the site: the vector, under its masks where the plan says so. There is no other way out."""
        plan = resident.plan
        statement = b""
        if plan.aggregation.secure:
            attempts = self._attempts(resident, purpose, request.run)
            model = bytes.fromhex(request.model_hash)
            statement, vector = attempts.mask(private, request.round, model, plan.local.threads, make)
        else:
            vector = make()
        return Contribution(self.config.name, request.round, request.model_hash, statement, vector)

    def _open(self, request: Agree | Train | Evaluate) -> _Resident:
        """Model and trainer for a message, once its plan and run are found to be those that the site has joined."""
        plan = _plan(request.plan)
        self._check_plan(plan)
        self._pins.check(plan, request.run)
        return self._resident(request.plan, request.base)

    def _resident(self, plan_json: str, base_hash: str) -> _Resident:
        base = str(self._base_path(base_hash)) if base_hash else ""
        return _resident(plan_json, self.config.device, base, base_hash)

    def _base_path(self, base_hash: str) -> Path:
        """Where the site keeps the frozen parameters that came from public training."""
        if len(base_hash) != 64 or not all(digit in "0123456789abcdef" for digit in base_hash):
            raise UpdateError("hash of the base model", base_hash, expected="64 hexadecimal digits")
        return self._state / f"base-{base_hash}.npy"

    def _keep_base(self, request: Join) -> None:
        path = self._base_path(request.base_hash)
        if path.exists():
            return
        own = vector_hash(request.base).hex()
        if own != request.base_hash:
            raise UpdateError("base model", own, expected=f"the model with the hash {request.base_hash}")
        if not np.isfinite(request.base).all():
            raise UpdateError("base model", "not finite", expected="finite weights")
        write_file(path, lambda temporary: save_vector(temporary, request.base))

    def _policy(self) -> Policy | None:
        """The site's demands, read anew each time: whoever tightens them need not stop the site.

        Raises:
            PlanError: it has some, and they cannot be read. What is wrong with it is not the coordinator's to know.
        """
        if not self.config.policy:
            return None
        try:
            return load_policy(Path(self.config.policy))
        except PolicyError as error:
            _log.error("%s", error)
            raise PlanError("policy of the site", expected="a policy that can be read") from error

    def _check_policy(self, plan: Plan, run: str) -> None:
        """What the site's own policy demands, before anything else is done for a plan."""
        policy = self._policy()
        if policy is None:
            return
        if policy.greatest_epsilon is not None:
            self._check_ledger()
        terms = terms_of(plan, count_parameters(plan)[1])
        noise, epsilon = 0.0, math.inf
        if terms is not None:
            left = self._rounds_of(plan) - len({e.charge.round for e in self._ledger.entries(run)})
            charge = self._charge(plan, run, 0, terms.round_events * max(1, left))
            noise, epsilon = terms.noise_multiplier, self._ledger.would_spend([charge], policy.greatest_delta)
        offer = offer_of(
            plan,
            noise_multiplier=noise,
            epsilon_after=epsilon,
            cohort=plan.cohort.needed(),
            roster_hash=self._roster().hash.hex() if self.config.roster else "",
        )
        policy.check(offer)

    def _check_ledger(self) -> None:
        """A limit over runs needs a ledger and a name of the data that outlive runs."""
        config = self.config
        if not config.dataset:
            raise PlanError(
                f"dataset of {config.name}",
                expected="a name in the site's TOML, because its policy limits the epsilon of its data",
            )
        if not config.ledger or Path(config.ledger).absolute().is_relative_to(self._state.absolute()):
            raise PlanError(
                f"ledger of {config.name}",
                config.ledger,
                expected="a file outside the state folder, because the site's policy limits epsilon over runs",
            )

    def _rounds_of(self, plan: Plan) -> int:
        """Rounds of the plan that draw this site; all of them where it does not know the others."""
        if not self.config.roster or plan.cohort.fraction == 1:
            return plan.run.rounds
        names, name = self._roster().names, self.config.name
        return sum(name in draw(plan, names, number) for number in range(1, plan.run.rounds + 1))

    @property
    def _ledger(self) -> Ledger:
        path = Path(self.config.ledger) if self.config.ledger else self._state / "ledger.sqlite"
        path.parent.mkdir(parents=True, exist_ok=True)
        return Ledger(path, self.config.name, composed)

    def _charge(self, plan: Plan, run: str, round_number: int, events: Sequence[Event]) -> Charge:
        """One charge for one training: done again, after a crash that lost the update, it is another release."""
        unit = (
            unit_in_words(plan.data, plan.privacy)
            if plan.privacy.unit == "record"
            else "all data of the site"
        )
        return Charge(
            id=f"{run}/{round_number}/{secrets.token_hex(8)}",
            dataset=self.config.dataset or self.config.data,
            run=run,
            round=round_number,
            attempt=0,
            what=f"update, per {unit}",
            event=to_json(events),
            delta=plan.privacy.delta,
        )

    def _pay(self, plan: Plan, terms: Terms, run: str, round_number: int) -> None:
        """Charge the site's ledger for the round, durably, before any record is looked at.

        Raises:
            BudgetError: the site's policy, or the plan itself, does not allow it; nothing was charged.
        """
        budget = None
        policy = self._policy()
        if policy is not None and policy.greatest_epsilon is not None:
            budget = Budget(policy.greatest_epsilon, policy.greatest_delta or terms.delta)
        most = terms.budget
        if most is None:  # what the plan comes to, with room for updates that crashes have lost
            most = terms.epsilon(self._rounds_of(plan) + plan.cohort.attempts)

        def check_run(entries: tuple[Entry, ...]) -> None:
            """The plan bounds what one run may cost, whatever the coordinator asks for."""
            before = [event for e in entries if e.charge.run == run for event in from_json(e.charge.event)]
            spent = epsilon_of((*before, *terms.round_events), terms.delta, terms.accountant)
            if spent > most:
                raise BudgetError(
                    f"epsilon of {self.config.name} in this run",
                    spent,
                    expected=f"at most the {most:g} that the plan allows for it",
                )

        charge = self._charge(plan, run, round_number, terms.round_events)
        self._ledger.charge(charge, budget, check_run)

    def _noise(self, plan: Plan, run: str, round_number: int) -> NoiseStream:
        """A stream that no other training has had or will have."""
        return NoiseStream.fresh()

    def _check_plan(self, plan: Plan) -> None:
        """What the site demands of a plan, at every message: it comes from a coordinator that may lie."""
        if plan.aggregation.secure:
            self._member()
        elif self.config.secure:
            raise PlanError(
                "aggregation.secure",
                False,
                expected=f"true: {self.config.name} takes part in no sum in clear",
                fix="only the site itself can allow it, by secure = false in its TOML",
            )

    def _check_begin(self, plan: Plan, purpose: str, begin: Begin) -> None:
        """A round of the plan, and a cohort that the plan draws for it."""
        if not (1 if purpose == TRAIN else 0) <= begin.round <= plan.run.rounds:
            raise StaleError("round", begin.round, expected=f"one of the plan's {plan.run.rounds}")
        names = self._roster().names
        drawn = draw(plan, names, begin.round) if purpose == TRAIN else names
        strangers = sorted(set(begin.cohort).difference(drawn))
        if strangers:
            raise MemberError(
                "cohort", strangers[0], expected=f"only sites that the plan draws for round {begin.round}"
            )

    def _attempts(self, resident: _Resident, purpose: str, run: str) -> Attempts:
        if purpose not in (TRAIN, EVALUATE):
            raise UpdateError("purpose of the sum", purpose, expected=f"{TRAIN} or {EVALUATE}")
        plan, layout = resident.plan, resident.model.layout
        model = layout.digest() + resident.base_hash
        contract = contract_for(purpose, plan, self._roster(), run, layout.size, model)
        needed = plan.cohort.needed() if purpose == TRAIN else plan.cohort.needed_to_evaluate()
        # A folder for each run: what was answered in one is remembered while others go on.
        folder = self._state / "secure" / purpose / hashlib.sha256(run.encode()).hexdigest()[:32]
        return Attempts(folder, contract, self._member(needed), resident.attempts)

    @property
    def _pins(self) -> Pins:
        return Pins(self._state / "secure" / "pins", self.config.name, self.config.plan)

    def _member(self, needed: int = 0) -> Member:
        if not self.config.identity:
            raise PlanError(
                f"identity of {self.config.name}",
                expected="a key in the site's TOML, because the plan sums securely",
                fix="make one: cloister site init",
            )
        identity = _identity(self.config.identity)
        name = self.config.name
        if identity.public_key() != self._roster().key(name):
            raise RosterError(f"identity of {name}", expected="the key that the roster has for it")
        return Member(name, identity, max(self.config.minimum_cohort, needed))

    def _roster(self) -> Roster:
        return _pinned_roster(self.config.roster, self.config.roster_hash)

    def held_out(self, plan: Plan, weights: Vector, base_hash: str = "") -> HeldOut:
        """The model's sums on the site's held-out records; for the site's own eyes.

        Raises:
            CloisterError: why there are none.
        """
        resident = self._resident(plan.to_json(), base_hash)
        resident.model.layout.scatter(weights, resident.model.module)
        sequences = self._prepared(resident).held_out
        return evaluate(
            resident.model.module, sequences, plan.local.batch_size, resident.device, plan.local.precision
        )

    def sequences(self, plan: Plan, base_hash: str = "") -> int:
        """Number of the site's training sequences; for the site's own eyes."""
        return len(self._prepared(self._resident(plan.to_json(), base_hash)).train)

    def _prepared(self, resident: _Resident) -> Prepared:
        """The site's records as sequences: tokenised once, mapped from disk after that."""
        source, split, seed = self.config.data, self.config.split, resident.plan.run.seed
        tokenizer, data = resident.model.tokenizer, resident.plan.data
        cache = self._state / "data"
        units = unit_rule(data, resident.plan.privacy)

        def make() -> Prepared:
            records = read_records(source, split=split, cache=cache)
            made = prepare(records, tokenizer, data, seed=seed, units=units)
            if made.dropped:
                _log.warning("%s: nothing can be learned from %d records", self.config.name, made.dropped)
            return made

        key = prepared_key(source, tokenizer, data, seed=seed, split=split, units=units)
        known = resident.prepared.get(self._state)
        if known is None or known[0] != key:
            if len(resident.prepared) >= _MOST_PREPARED:
                resident.prepared.clear()
            known = resident.prepared[self._state] = key, cached(cache, key, make)
        return known[1]

    def _new_vector(self, resident: _Resident, request: Train) -> RingVector:
        """Train, and make the vector that leaves; under privacy it is paid for first.

        It is kept for later attempts at the round. Under privacy it is synced to disk before it leaves: whoever trained
        again would release twice.
        """
        plan, terms = resident.plan, resident.terms
        noise = None
        if terms is not None:
            self._pay(plan, terms, request.run, request.round)
            noise = self._noise(plan, request.run, request.round)
        try:
            finished = self._trained(resident, request, noise)
        except UpdateError as error:
            if terms is None or terms.mechanism is None:
                raise
            # That an update is not finite tells of the data, and would be seen: zeros with noise tell nothing.
            _log.warning("round %d: zeros are sent: %s", request.round, error)
            finished = Finished(np.zeros_like(request.model), 0, 0.0)
        code = code_for(
            plan,
            terms,
            resident.model.layout.size,
            rounding=self._seed(plan, "rounding", request.round),
            clip_norm=request.clip,
            noise=noise,
        )
        vector = contribution(code, finished)
        facts = {
            "plan": plan.digest(),
            "run": request.run,
            "model": request.model_hash,
            "clip": request.clip.hex(),
            "tokens": str(finished.tokens),
        }
        tensors: dict[str, npt.NDArray[Any]] = {"contribution": vector}
        if plan.model.adapter.scheme == "lora":
            tensors["update"] = finished.vector  # for `simulations/inspection.py`: the error of that scheme
        kept = update_path(self._state, request.round)
        write_file(kept, lambda path: save_file(tensors, path, metadata=facts), durable=terms is not None)
        for old in self._state.glob("update-*.safetensors"):
            if old != kept:
                old.unlink(missing_ok=True)
        return vector

    def _trained(self, resident: _Resident, request: Train, noise: NoiseStream | None) -> Finished:
        sequences = self._prepared(resident).train
        trainer, terms = resident.trainer, resident.terms
        if isinstance(trainer, PrivateTrainer):
            assert noise is not None
            assert terms is not None
            local = trainer.train(
                request.model,
                sequences,
                round=request.round,
                noise=noise,
                noise_multiplier=terms.noise_multiplier,
                state=self._state,
            )
        else:
            seed = (self._seed(resident.plan, "training", request.round),)
            local = trainer.train(
                request.model, sequences, round=request.round, site_seed=seed, state=self._state
            )
        return Finished(local.vector, local.tokens, local.loss)

    def _finished_vector(self, resident: _Resident, request: Train) -> RingVector | None:
        try:
            with safe_open(update_path(self._state, request.round), framework="np") as file:
                facts, vector = file.metadata() or {}, file.get_tensor("contribution")
        except (OSError, SafetensorError):
            return None
        made = (resident.plan.digest(), request.run, request.model_hash, request.clip.hex())
        if tuple(facts.get(name) for name in ("plan", "run", "model", "clip")) != made:
            return None
        layout = training_layout(resident.plan, resident.model.layout.size)
        if vector.shape != (layout.length,) or vector.dtype != layout.ring.dtype:
            return None
        found: RingVector = vector
        return found

    @property
    def _state(self) -> Path:
        return Path(self.config.state)

    def _seed(self, plan: Plan, purpose: str, round_number: int) -> int:
        """A public seed that is different for every purpose, site and round of a run, on any machine."""
        text = f"{purpose}/{plan.run.seed}/{self.config.name}/{round_number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


@dataclass(frozen=True)
class _Resident:
    """What a process keeps between messages, for all sites that it runs."""

    plan: Plan
    model: LanguageModel
    trainer: Trainer | PrivateTrainer
    device: torch.device
    terms: Terms | None
    base_hash: str
    attempts: Live = field(default_factory=dict)
    prepared: dict[Path, tuple[str, Prepared]] = field(default_factory=dict)
    """By state folder the key of the site's sequences, and the sequences: mapped from disk."""


def _check_model(model: Vector, named: str) -> None:
    """The hash binds the masks to the model, so it is the site's own of what it received.

    A model that is not finite is refused before any record is seen: what training made of it would tell of them.
    """
    own = vector_hash(model).hex()
    if own != named:
        raise UpdateError("global model", own, expected=f"the model with the hash {named}")
    if not np.isfinite(model).all():
        raise UpdateError("global model", "not finite", expected="finite weights")


def _check_free(plan: Plan, purpose: str) -> None:
    """Under privacy nothing leaves that is not paid for, whatever the coordinator asks."""
    if purpose == EVALUATE and plan.privacy.unit != "none":
        raise PolicyError(
            "evaluation at a site",
            plan.privacy.unit,
            expected="no privacy unit: losses on a site's records are a release that nobody has paid for",
        )


def _check_clip(clip: float) -> None:
    if not SMALLEST_CLIP <= clip <= LARGEST_CLIP:
        raise UpdateError("clipping norm", clip, expected=f"{SMALLEST_CLIP:g} to {LARGEST_CLIP:g}")


@lru_cache(maxsize=256)
def _identity(path: str) -> Ed25519PrivateKey:
    """A site's key, read once in a process."""
    return load_identity(Path(path))


@lru_cache(maxsize=4)
def _pinned_roster(path: str, pinned: str) -> Roster:
    """The roster, verified once in a process: what its hash names cannot change."""
    return load_roster(Path(path)).pinned(pinned)


@lru_cache(maxsize=4)
def _plan(plan_json: str) -> Plan:
    """The plan of a message, read and checked once in a process."""
    return Plan.from_json(plan_json)


@lru_cache(maxsize=1)
def _resident(plan_json: str, device_name: str, base_path: str, base_hash: str) -> _Resident:
    plan = _plan(plan_json)
    torch.set_num_threads(plan.local.threads)
    device = device_for(device_name)
    model = load_model(plan, _load_base(base_path, base_hash) if base_hash else None)
    model.module.to(device)
    kind = PrivateTrainer if plan.privacy.unit == "record" else Trainer
    terms = terms_of(plan, model.layout.size)
    return _Resident(plan, model, kind(plan, model, device), device, terms, base_hash)


def _load_base(path: str, base_hash: str) -> Vector:
    try:
        base: Vector = np.load(path)
    except (OSError, ValueError) as error:
        raise StorageError(path, expected=f"the base model that this site was given ({error})") from error
    if vector_hash(base).hex() != base_hash:
        raise StorageError(path, expected="the base model that this site was given, and it has changed")
    return base


def save_vector(path: Path, vector: Vector) -> None:
    """Write what `_load_base` reads."""
    with path.open("wb") as file:
        np.save(file, vector)
