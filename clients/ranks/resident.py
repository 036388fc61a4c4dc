"""State that a process keeps in memory for all the sites that it serves; its app owns one `Resident`.

A deployed process serves one site, a simulation's worker serves many in turn. They share the plan's model and trainer,
because a round starts from the global model and does not depend on earlier work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation.sums import Sums
from cloister.clients.ranks.device_mesh import mesh_for, several
from cloister.clients.state.attempt import Attempts
from cloister.clients.training.ask import Asked
from cloister.clients.training.dpsgd import PrivateTrainer
from cloister.clients.training.work import Here, Work
from cloister.lm.data.prepare import Prepared
from cloister.lm.model.layout import Vector
from cloister.lm.model.model import LanguageModel, device_for, load_model
from cloister.lm.training.train import Trainer
from cloister.protocol.identity.roster import Roster, load_identity, load_roster
from cloister.protocol.messages.messages import SumId
from cloister.protocol.plan.plan import MeshSection, Plan
from cloister.protocol.plan.soundness import from_json

_MOST_PREPARED = 64  # sites whose sequences a process keeps mapped: each needs a few open files


@dataclass(frozen=True)
class Loaded:
    """A plan's model, and who works with it."""

    plan: Plan
    base_hash: bytes
    """Hash of the frozen parameters that the model was built on; empty: those of the plan."""
    model: LanguageModel
    work: Work
    sums: Sums
    """What the run's sums are made of."""
    sequences: dict[Path, tuple[str, Prepared]] = field(default_factory=dict)
    """By state folder: the key of a site's sequences, and the sequences, which are mapped from disk."""

    def prepared(self, state: Path, key: str, make: Callable[[], Prepared]) -> Prepared:
        """The sequences of the site with that state folder; made if this process does not have them."""
        known = self.sequences.get(state)
        if known is None or known[0] != key:
            if len(self.sequences) >= _MOST_PREPARED:
                self.sequences.clear()
            known = self.sequences[state] = key, make()
        return known[1]


class Resident:
    """Rosters, identity keys, plans, the loaded model of one plan, once for each mesh, and attempts under way."""

    def __init__(self) -> None:
        self._rosters = lru_cache(maxsize=4)(lambda path, pinned: load_roster(Path(path)).pinned(pinned))
        self._identities = lru_cache(maxsize=4096)(load_identity)
        self._plans = lru_cache(maxsize=4)(from_json)
        self._serves: object = None
        self._loaded: dict[object, Loaded] = {}
        self.opened: dict[Path, tuple[object, SumId, Attempts]] = {}
        """By a site's state folder: the attempts under way, and before them the configuration and the sum that the site
        has derived and checked them for."""

    def roster(self, path: str, pinned: str) -> Roster:
        """The roster in a file, verified once in a process: the content under one hash cannot change.

        Raises:
            RosterError: the file is damaged, or is not the roster with the hash `pinned`.
        """
        return self._rosters(path, pinned)

    def identity(self, path: str) -> Ed25519PrivateKey:
        """The identity key in a file.

        Raises:
            RosterError: the file is missing or has no key.
        """
        return self._identities(Path(path))

    def plan(self, text: str) -> Plan:
        """The plan of a text in JSON, read and checked once in a process.

        Raises:
            PlanError: the text is no JSON, or the plan is not sound.
        """
        return self._plans(text)

    def load(
        self,
        plan: Plan,
        device_name: str,
        mesh: MeshSection,
        base_hash: bytes,
        read_base: Callable[[], Vector | None],
        base_path: Path,
    ) -> Loaded:
        """The model of a plan, and who works with it; what was loaded for another plan is dropped.

        Args:
            plan: The plan.
            device_name: `auto` or a torch device.
            mesh: How several devices divide the model.
            base_hash: Hash of the frozen parameters to build on; empty: those of the plan.
            read_base: Reads them; called if the model is not loaded yet.
            base_path: Where they are when the first update is asked for.

        Raises:
            CloisterError: the model cannot be loaded, or does not fit the plan or the devices.
        """
        serves = (plan.digest(), base_hash)
        if serves != self._serves:
            self.close()  # free its memory first
            self._serves = serves
        key = (device_name, mesh)
        if key in self._loaded:
            return self._loaded[key]
        torch.set_num_threads(plan.local.threads)
        work: Work
        if plan.question is not None:
            model = load_model(plan)
            work, sums = Asked(plan, model, device_for(device_name)), Sums.over(plan, model.layout, base_hash)
            self._loaded[key] = Loaded(plan, base_hash, model, work, sums)
            return self._loaded[key]
        degrees, devices = mesh_for(plan, mesh, device_name)
        if not several(degrees, mesh):
            model, device = load_model(plan, read_base()), torch.device(devices[0])
            model.module.to(device)
            sums = Sums.over(plan, model.layout, base_hash)
            work = Here(model, device, self.trainer(plan, model, device), sums.terms)
        else:
            # These take a second to import, which one process saves.
            from cloister.clients.ranks.part import Model
            from cloister.clients.ranks.team import Team

            model = load_model(plan, read_base(), empty=True)
            sums, source = Sums.over(plan, model.layout, base_hash), model.layout.source
            model.module.to("meta")  # a frozen base: this process needs names and shapes only
            built = Model(plan.to_json(), base_path, base_hash, source, mesh.checkpointing, mesh.compile)
            over = plan.cohort.attempt_s() * plan.cohort.attempts  # then a round has ended in any case
            work = Team(built, degrees, devices, plan.local.threads, over)
        self._loaded[key] = Loaded(plan, base_hash, model, work, sums)
        return self._loaded[key]

    def close(self) -> None:
        """Drop what is loaded, and end the processes that work with it; idempotent."""
        for loaded in self._loaded.values():
            loaded.work.close()
        self._loaded.clear()
        self.opened.clear()

    def trainer(self, plan: Plan, model: LanguageModel, device: torch.device) -> Trainer | PrivateTrainer:
        """A new trainer of a plan's rounds; an audit makes one that plants canaries.

        Raises:
            PlanError: the model does not fit the plan's privacy.
        """
        return (PrivateTrainer if plan.privacy.dpsgd else Trainer)(plan, model, device)
