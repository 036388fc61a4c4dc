"""One site: its own configuration, and what it does when it is asked.

A site's configuration is a TOML file on its own machine; nothing of it travels. Its state folder holds what outlives a
message: the tokenised data, kept optimizer state, and the finished update of the round at hand, so that a second
attempt at a round does not train again.
"""

from __future__ import annotations

import hashlib
import logging
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated

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
from cloister.clients.pins import Pins
from cloister.clients.train import Trainer
from cloister.lm.data import Prepared, cached, prepare, prepared_key
from cloister.lm.evaluate import HeldOut, evaluate
from cloister.lm.model import LanguageModel, device_for, load_model
from cloister.lm.records import read_records
from cloister.protocol.cohort import draw
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import DataError, MemberError, PlanError, RosterError, StaleError, UpdateError
from cloister.protocol.messages import Agree, Agreed, Contribution, Evaluate, Join, Joined, Train
from cloister.protocol.plan import SMALLEST_COHORT, Plan, Section
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
            "data": str(data) if data.exists() or config.data.startswith((".", "/")) else config.data,
            **{
                name: str(path.parent / value)
                for name in ("state", "identity", "roster")
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
        """Check the plan, and get model and data ready.

        Raises:
            CloisterError: why this site cannot take part.
        """
        plan = _plan(request.plan)
        self._check_plan(plan)
        if plan.aggregation.secure:
            self._pins.join(plan, request.run)
        resident = _resident(request.plan, self.config.device)
        prepared = self._prepared(resident)
        if not len(prepared.train):
            raise DataError(f"data of {self.config.name}", self.config.data, expected="records to train on")
        return Joined(self.config.name, resident.model.layout.size)

    def agree(self, request: Agree, private: bytes) -> Agreed:
        """The site's part of one step of the secure sum.

        Raises:
            CloisterError: why it refuses.
        """
        resident = self._open(request)
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
        _check_model(request.model, request.model_hash)
        layout = training_layout(resident.plan, resident.model.layout.size)

        def make() -> RingVector:
            update = self._finished_update(resident, request) or self._new_update(resident, request)
            weight = update.tokens if resident.plan.aggregation.weighting == "tokens" else 1
            counters = {TOKENS: update.tokens, LOSS: count_of_loss(update.loss * update.tokens)}
            # Public, so that a second attempt rounds alike: what hides the vector is its mask.
            random = np.random.Generator(
                np.random.SFC64(self._seed(resident.plan, "rounding", request.round))
            )
            return layout.contribution(update.vector, weight, counters, random)

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
        _check_model(request.model, request.model_hash)
        layout = evaluation_layout(resident.plan)

        def make() -> RingVector:
            found = self.held_out(resident.plan, request.model)
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
        if plan.aggregation.secure:
            self._pins.check(plan, request.run)
        return _resident(request.plan, self.config.device)

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
        contract = contract_for(purpose, plan, self._roster(), run, layout.size, layout.digest())
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

    def held_out(self, plan: Plan, weights: Vector) -> HeldOut:
        """The model's sums on the site's held-out records; for the site's own eyes.

        Raises:
            CloisterError: why there are none.
        """
        resident = _resident(plan.to_json(), self.config.device)
        resident.model.layout.scatter(weights, resident.model.module)
        sequences = self._prepared(resident).held_out
        return evaluate(
            resident.model.module, sequences, plan.local.batch_size, resident.device, plan.local.precision
        )

    def sequences(self, plan: Plan) -> int:
        """Number of the site's training sequences; for the site's own eyes."""
        return len(self._prepared(_resident(plan.to_json(), self.config.device)).train)

    def _prepared(self, resident: _Resident) -> Prepared:
        """The site's records as sequences: tokenised once, mapped from disk after that."""
        source, split, seed = self.config.data, self.config.split, resident.plan.run.seed
        tokenizer, data = resident.model.tokenizer, resident.plan.data
        cache = self._state / "data"

        def make() -> Prepared:
            made = prepare(read_records(source, split=split, cache=cache), tokenizer, data, seed=seed)
            if made.dropped:
                _log.warning("%s: nothing can be learned from %d records", self.config.name, made.dropped)
            return made

        key = prepared_key(source, tokenizer, data, seed=seed, split=split)
        known = resident.prepared.get(self._state)
        if known is None or known[0] != key:
            if len(resident.prepared) >= _MOST_PREPARED:
                resident.prepared.clear()
            known = resident.prepared[self._state] = key, cached(cache, key, make)
        return known[1]

    def _new_update(self, resident: _Resident, request: Train) -> _Update:
        local = resident.trainer.train(
            request.model,
            self._prepared(resident).train,
            round=request.round,
            site_seed=(self._seed(resident.plan, "training", request.round),),
            state=self._state,
        )
        update = _Update(local.vector, local.tokens, local.loss)
        facts = {
            "plan": resident.plan.digest(),
            "model": request.model_hash,
            "tokens": str(update.tokens),
            "loss": update.loss.hex(),
        }
        # Losing this file only costs training again, so it is not synced to disk.
        kept = update_path(self._state, request.round)
        write_file(
            kept, lambda path: save_file({"update": update.vector}, path, metadata=facts), durable=False
        )
        for old in self._state.glob("update-*.safetensors"):
            if old != kept:
                old.unlink(missing_ok=True)
        return update

    def _finished_update(self, resident: _Resident, request: Train) -> _Update | None:
        try:
            with safe_open(update_path(self._state, request.round), framework="np") as file:
                facts, vector = file.metadata() or {}, file.get_tensor("update")
        except (OSError, SafetensorError):
            return None
        if (facts.get("plan"), facts.get("model")) != (resident.plan.digest(), request.model_hash):
            return None
        if vector.shape != (resident.model.layout.size,):
            return None
        return _Update(vector, int(facts["tokens"]), float.fromhex(facts["loss"]))

    @property
    def _state(self) -> Path:
        return Path(self.config.state)

    def _seed(self, plan: Plan, purpose: str, round_number: int) -> int:
        """A public seed that is different for every purpose, site and round of a run, on any machine."""
        text = f"{purpose}/{plan.run.seed}/{self.config.name}/{round_number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


@dataclass(frozen=True)
class _Update:
    vector: Vector
    tokens: int
    loss: float


@dataclass(frozen=True)
class _Resident:
    """What a process keeps between messages, for all sites that it runs."""

    plan: Plan
    model: LanguageModel
    trainer: Trainer
    device: torch.device
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
def _resident(plan_json: str, device_name: str) -> _Resident:
    plan = _plan(plan_json)
    torch.set_num_threads(plan.local.threads)
    device = device_for(device_name)
    model = load_model(plan)
    model.module.to(device)
    return _Resident(plan, model, Trainer(plan, model, device), device)
