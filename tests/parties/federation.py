"""The one tiny plan, and the one federation in this process: real sites, real messages, no processes and no sockets.

`Loopback` is a `Channel` like any other: every message goes through its bytes and every site is served as by a carrier.
It can take sites down at a step, show requests before they arrive and change replies: what attacks in these tests need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.aggregation.features.balance import LocalSteps
from cloister.aggregation.features.compression import Scales
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.span import manifest_of
from cloister.clients.consent.consents import Consents
from cloister.clients.network.serve import Served, answered
from cloister.clients.ranks.resident import Resident
from cloister.clients.setup.config import read_config
from cloister.clients.site import Noise, Simulated, Site
from cloister.clients.state.attempt import Attempts
from cloister.clients.training.work import masking
from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.model import load_model
from cloister.privacy.accounting.accountant import composed
from cloister.privacy.ledger.dataset import DatasetLedger
from cloister.privacy.ledger.ledger import Entry, Ledger, Verified, read_history
from cloister.protocol.errors import BudgetError, PolicyError
from cloister.protocol.identity.roster import Roster, load_roster
from cloister.protocol.messages.cohort import draw_of
from cloister.protocol.messages.digest import instructions_digest, vector_hash
from cloister.protocol.messages.joining import sign_joined
from cloister.protocol.messages.messages import (
    TRAIN,
    Agree,
    ByFeature,
    Contribute,
    Contribution,
    Inbox,
    Instructions,
    Join,
    Purpose,
    Refused,
    Reply,
    Request,
    Step,
    SumId,
)
from cloister.protocol.messages.wire import Buffer, encode
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import from_json, parse
from cloister.server.sum.channel import Failure, reply_in
from cloister.server.sum.members import Members
from cloister.simulations.federation import lay_out
from cloister.tests.tools.codes import told_by

RUN = "0a1b2c"
CHALLENGE = bytes(range(32))

MODEL = """[model.config]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
"""
"""A model of some thousand parameters."""
TINY = f"""
[run]
name = "tiny"
rounds = 3

{MODEL}
[data]
sequence_length = 16
held_out = 0.2

[local]
steps = 2
batch_size = 4
learning_rate = 3e-3

[cohort]
sites = 4

[simulation]
partition = "iid"
"""
"""A model of a few thousand parameters for four sites; without a privacy unit, summed under masks."""

PRIVATE = [
    "data.held_out=0.0",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
    "privacy.noise_multiplier=1.0",
    "privacy.delta=1e-3",
]
RECORD = [*PRIVATE, "aggregation.secure=false", "privacy.unit=record", "privacy.sampling_rate=0.5"]
"""Settings that make it private by record."""
CENTRAL = [*PRIVATE, "aggregation.secure=false", "privacy.unit=site", "privacy.trusted_coordinator=true"]
"""Private by site, with noise of the coordinator."""
SKELLAM = [*PRIVATE, "privacy.unit=site"]
"""Private by site, with noise of the sites."""


def tiny(*settings: str) -> Plan:
    """The tiny plan with some settings changed."""
    return parse(TINY, settings)


def changed(plan: Plan, section: str, **values: Any) -> Plan:
    """A plan with fields of one section changed, unchecked."""
    return plan.model_copy(update={section: getattr(plan, section).model_copy(update=values)})


def write_records(path: Path, count: int = 40) -> Path:
    """Short private records, as JSONL."""
    records = [{"text": f"patient {number} was seen on day {number * 7}. " * 2} for number in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def whole(reply: Reply) -> npt.NDArray[Any]:
    """The vector of a contribution, its spans put together."""
    assert isinstance(reply, Contribution)
    return np.concatenate(reply.spans)


def contribution_of(request: Contribute, site: str, vector: npt.NDArray[Any]) -> Contribution:
    """A contribution in clear: the answer of a site whose vector is given, in one span."""
    told = instructions_digest(request.told)
    return Contribution(site, request.sum, told, None, manifest_of([(0, vector)]), (vector,))


def step_of(request: Request) -> str:
    """The label of the step that a request is of, or `join`."""
    match request:
        case Join():
            return "join"
        case Contribute():
            return Step.UPDATE.label
        case Agree():
            return str(request.told.STEP.label)


class Loopback:
    """A `Channel` to sites in this process.

    Args:
        sites: For each site, in the order of their nodes, what finds it for one message.
    """

    def __init__(self, sites: Mapping[str, Callable[[], Served]]) -> None:
        self.names = list(sites)
        self.sites = dict(sites)
        self.down: Callable[[str, str, Request], bool] = lambda _site, _step, _request: False
        """Given site and step: whether the site does not answer."""
        self.before: Callable[[str, Request], None] = lambda _site, _request: None
        """Told of each request before the site is asked."""
        self.tamper: Callable[[str, Reply], Reply] = lambda _step, reply: reply
        """Given step and reply: the reply that arrives."""
        self.garble: Callable[[str, str, list[Buffer]], list[Buffer]] = lambda _site, _step, frames: frames
        """Given site, step and the reply's frames: the frames that arrive."""
        self.turn: Callable[[list[str]], str] = lambda waiting: waiting[0]
        """In a stream, given the sites that are asked, in their order: the one whose answer arrives next."""
        self.asked: list[tuple[str, str]] = []
        """(step, site) of every request."""
        self.explain: Callable[[Exception], str] = str
        """The line that the coordinator gets for an error; a deployed site's app takes `reticent`."""

    def nodes(self) -> range:
        return range(len(self.names))

    def ask(
        self, requests: Mapping[int, Request], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        for node, request in requests.items():
            name, step = self.names[node], step_of(request)
            self.asked.append((step, name))
            if self.down(name, step, request):
                yield node, Failure(name, "it is down")
                continue
            self.before(name, request)
            frames = answered(self.sites[name], encode(request), self.explain)
            reply = reply_in(self.garble(name, step, frames), node)
            yield node, reply if isinstance(reply, Failure) else self.tamper(step, reply)

    def stream(
        self, requests: Callable[[], Mapping[int, Request]], deadline_s: float, *, group: str
    ) -> Iterator[tuple[int, Reply | Failure]]:
        waiting: dict[int, Request] = {}
        while True:
            coming = requests()
            assert waiting.keys().isdisjoint(coming), "a site with an unanswered request was asked"
            waiting |= coming
            if not waiting:
                return
            node = self.names.index(self.turn([self.names[each] for each in waiting]))
            yield from self.ask({node: waiting.pop(node)}, deadline_s, group=group)

    def lose(self, *lost: tuple[str, str, int]) -> None:
        """Let a site not answer: (site, step, try)."""
        gone = set(lost)

        def down(site: str, step: str, request: Request) -> bool:
            return not isinstance(request, Join) and (site, step, request.tries) in gone

        self.down = down


class Federation:
    """The sites of a plan in folders of their own, and what a coordinator, honest or not, may send them.

    Args:
        folder: Where the sites' folders are made.
        plan: The plan; without a source of records it gets forty short ones.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if plan.simulation.source.startswith("builtin:"):
            source = write_records(folder / "records.jsonl")
            plan = changed(plan, "simulation", source=str(source))
        self.folder = folder
        self.plan = plan
        self.sites_folder = folder / "sites"
        lay_out(plan, self.sites_folder)
        self.roster: Roster = load_roster(self.sites_folder / "roster.toml")
        self.resident = Resident()
        loaded = load_model(plan)
        self.layout: Layout = loaded.layout
        self.model: Vector = loaded.layout.flatten(loaded.module)
        self.channel = Loopback({name: self._opener(name) for name in self.roster.names})

    def _opener(self, name: str) -> Callable[[], Site]:
        return lambda: self.site(self.roster.names.index(name))

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names, sorted."""
        return tuple(self.roster.names)

    def site(
        self,
        index: int = 0,
        *,
        policy: str = "",
        pinned: bool = True,
        resident: Resident | None = None,
        noise: Noise | None = None,
        **config: Any,
    ) -> Site:
        """A site, with some of its configuration changed; its ledger outlives its state folder.

        Args:
            index: Its number.
            policy: Its policy, as TOML; empty: it has none.
            pinned: Whether its TOML names the federation's plan; otherwise it consents to none.
            resident: What its process has in memory; by default all sites share one process.
            noise: Source of its noise.
            config: Fields of its `SiteConfig`.
        """
        home = self.sites_folder / self.names[index]
        config = {"ledger": str(home / "ledger.sqlite"), "dataset": "data.jsonl", **config}
        if not pinned:
            config["plan"] = ""
        if policy:
            (home / "policy.toml").write_text(policy)
            config["policy"] = str(home / "policy.toml")
        changed_config = read_config(home / "site.toml").model_copy(update=config)
        owned = self.plan.sketches and not policy  # which a site without a policy refuses otherwise
        simulated = Simulated(dataset=DatasetLedger.of(self.plan), one_owner=owned)
        if noise is not None:
            simulated = replace(simulated, noise=noise)
        return Site(changed_config, resident or self.resident, simulated=simulated)

    def consenting(self, index: int = 0, *, plan: Plan | None = None, **options: Any) -> Site:
        """A site whose TOML names no plan, and which has consented to one run of this one, unless it has before."""
        site = self.site(index, pinned=False, **options)
        digest, consents = (plan or self.plan).digest(), consents_of(site)
        if not consents.runs(digest):
            consents.give(digest)
        return site

    def entries(self, index: int = 0) -> tuple[Entry, ...]:
        """What a site's ledger has, read by another connection: what is committed."""
        name = self.names[index]
        path = self.sites_folder / name / "ledger.sqlite"
        return Ledger(path, name, composed).entries() if path.exists() else ()

    def joined(
        self, index: int = 0, *, plan: Plan | None = None, run: str = RUN, pinned: bool = True, **options: Any
    ) -> Site:
        """A site that has joined the run; one whose TOML names no plan has consented to one run of this one."""
        site = self.site(index, **options) if pinned else self.consenting(index, plan=plan, **options)
        site.join(self.join_request(plan, run))
        return site

    # What a coordinator may send.

    def join_request(self, plan: Plan | None = None, run: str = RUN, base: Vector | None = None) -> Join:
        """The request to join."""
        base_hash = b"" if base is None else vector_hash(base)
        sent = np.empty(0, np.float32) if base is None else base
        return Join(run, (plan or self.plan).to_json(), CHALLENGE, base_hash, sent)

    def sum_id(
        self,
        *,
        plan: Plan | None = None,
        run: str = RUN,
        purpose: Purpose = TRAIN,
        number: int = 1,
    ) -> SumId:
        """What a message is about."""
        return SumId(run, bytes.fromhex((plan or self.plan).digest()), purpose, number)

    def told(
        self,
        *,
        model: Vector | None = None,
        clip: float | None = None,
        steps: LocalSteps | None = None,
        scales: bytes | None = None,
        fresh: bool | None = None,
        **about: Any,
    ) -> Instructions:
        """The instructions of a sum."""
        sum_id = self.sum_id(**about)
        plan = about.get("plan") or self.plan
        trains = sum_id.purpose == TRAIN
        features: ByFeature = ()
        if trains or clip or steps is not None or scales is not None:
            if steps is None and trains:
                steps = self.steps(sum_id.round) or None
            features = told_by(Sums(plan, self.layout.size), clip=clip, steps=steps, scales=scales)
        if fresh is None:
            fresh = not (trains and plan.carries and not plan.aggregation.secure)
        digest = vector_hash(self.model if model is None else model)
        return Instructions(sum_id, digest, features, "fresh" if fresh else "carried")

    def request(
        self, *, model: Vector | None = None, inbox: Inbox | None = None, tries: int = 1, **told: Any
    ) -> Contribute:
        """The request for a contribution; its model hash is right."""
        weights = self.model if model is None else model
        return Contribute(self.told(model=weights, **told), tries, inbox, weights)

    def scales(self) -> bytes:
        """The scales of round 1; empty where the plan compresses nothing."""
        if self.plan.aggregation.compression is None:
            return b""
        return Scales.first(self.plan, self.layout.size).to_bytes()

    def steps(self, number: int = 1) -> LocalSteps:
        """A list of local steps that the plan allows in a round, with different numbers; empty where it has none."""
        local = self.plan.local
        if local.balance == "fixed":
            return ()
        least, most = local.step_limits()
        cohort = draw_of(self.plan, TRAIN).cohort(self.names, number)
        return tuple(
            (name, least + (most - least) * index // len(cohort)) for index, name in enumerate(cohort)
        )

    # An honest coordinator.

    def members(self, run: str = RUN, refused: Callable[[Failure], None] = lambda _failure: None) -> Members:
        """The sites, joined."""
        return Members(self.channel, self.plan, run, refused, roster=self.roster)


def consents_of(site: Site) -> Consents:
    """What a site has consented to."""
    return Consents(site.config.folder, site.name, site.config.plan)


class VectorSite:
    """A site without a model: its part in the secure sum is real, and its vector is given.

    Args:
        name: Its name.
        identity: Its identity key.
        attempts: Its side of the secure sum.
        vector: Makes its ring vector.
        roster: Hash of the roster that it has pinned.
        secure: Whether it masks the vector.
    """

    def __init__(
        self,
        name: str,
        identity: Ed25519PrivateKey,
        attempts: Attempts,
        vector: Callable[[], Any],
        *,
        roster: bytes,
        secure: bool,
    ) -> None:
        self.name = name
        self.identity = identity
        self.attempts = attempts
        self._vector = vector
        self._roster = roster
        self._secure = secure

    def answer(self, request: Request) -> Reply:
        match request:
            case Join():
                plan = bytes.fromhex(from_json(request.plan).digest())
                return sign_joined(self.identity, request, site=self.name, plan=plan, roster=self._roster)
            case Agree():
                return self.attempts.agree(request.told, request.sum.round)
            case Contribute():
                statement, pieces = None, [(0, self._vector())]
                if self._secure:
                    assert request.inbox is not None
                    digest = instructions_digest(request.told)
                    statement, masked = self.attempts.mask(
                        request.inbox,
                        request.sum.round,
                        digest,
                        lambda _history: [(0, self._vector())],
                        masking(digest),
                        fresh=request.told.fresh,
                    )
                    pieces = masked.pieces
                spans = tuple(vector for _, vector in pieces)
                told = instructions_digest(request.told)
                return Contribution(self.name, request.sum, told, statement, manifest_of(pieces), spans)

    def refuse(self, request: Request, error: PolicyError | BudgetError) -> Refused:
        raise AssertionError("a site without a policy refuses nothing")


def verified(ledger: Ledger, noted: str | None = None) -> Verified:
    """A ledger as its file has it, verified."""
    return read_history(ledger.path).of_owner(ledger.owner).verified(noted)


def spent_on(ledger: Ledger, dataset: str, delta: float) -> float:
    """What a dataset has spent by a ledger's own composition."""
    events = read_history(ledger.path).of_owner(ledger.owner).events(dataset)
    return ledger._compose(events, delta) if events else 0.0
