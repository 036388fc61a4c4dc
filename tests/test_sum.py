"""A sum over a cohort as the adapters carry it: both ends real, the channel in this process."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloister.aggregation.graph import parameters
from cloister.aggregation.secure_messages import Begin, Masked, from_bytes, to_bytes
from cloister.aggregation.sums import TRAIN, contract_for, training_layout
from cloister.clients.attempt import Attempts, Member
from cloister.lm.layout import Layout
from cloister.protocol.digest import vector_hash
from cloister.protocol.errors import CloisterError, StaleError, StepError
from cloister.protocol.messages import Agree, Agreed, Contribution, Failure, Reply, Request, Train
from cloister.protocol.plan import Plan, parse
from cloister.protocol.roster import Card, Roster, new_identity
from cloister.server import journal as steps
from cloister.server.journal import Journal
from cloister.server.progress import AttemptFailed, Event, SiteFailed
from cloister.server.sum import Failed, Party, Total, sum_over

NAMES = [f"site-{number:03d}" for number in range(12)]
IDENTITIES = {name: new_identity() for name in NAMES}
MODEL = np.linspace(-1, 1, 50, dtype=np.float32)
LAYOUT = Layout.of([("weights", torch.nn.Parameter(torch.zeros(50)))])
STEPS = ["advertise", "share", "update", "confirm", "unmask"]
RUN = "0123"


def update_of(name: str) -> np.ndarray:
    return np.random.default_rng(NAMES.index(name)).normal(0, 0.1, 50).astype(np.float32)


class Sites:
    """The sites of a cohort, each with its own folder; every message is handled as by a new process."""

    def __init__(self, folder: Path, plan: Plan, names: list[str]) -> None:
        self.folder = folder
        self.plan = plan
        self.sites = names
        self.refusals: list[Failure] = []
        self.roster = Roster.of(Card.of(name, IDENTITIES[name]) for name in names)
        self.down: set[tuple[str, str, int]] = set()
        """Site, step and try at which it does not answer."""
        self.tamper: Callable[[str, Reply], Reply] = lambda _step, reply: reply
        self.asked: list[str] = []
        self.live: dict[Path, Any] | None = None
        """Attempts in memory, for a process that lives on; None for a new process at every message."""

    def attempts(self, name: str) -> Attempts:
        contract = contract_for(TRAIN, self.plan, self.roster, RUN, LAYOUT.size, LAYOUT.digest())
        live = {} if self.live is None else self.live
        return Attempts(self.folder / name, contract, Member(name, IDENTITIES[name], 3), live)

    def vector(self, name: str) -> np.ndarray:
        layout = training_layout(self.plan, LAYOUT.size)
        counters = {"tokens": 100 + NAMES.index(name), "loss": 7}
        values, clipped = layout.encode(update_of(name), counters["tokens"], NAMES.index(name))
        tail = layout.tail({"weight": counters["tokens"], "clipped": clipped, **counters})
        return np.concatenate([values, tail])

    def ask(
        self,
        sites: Iterable[str],
        request: Request,
        deadline_s: float,
        private: Mapping[str, bytes] | None = None,
    ) -> Iterator[Reply | Failure]:
        for name in sites:
            if isinstance(request, Agree):
                step = {1: "advertise", 2: "share", 4: "confirm", 5: "unmask"}[request.step]
            else:
                step = "update"
            self.asked.append(f"{step} {name}")
            if (name, step, request.tries) in self.down:  # type: ignore[union-attr]  # never a Join here
                yield Failure(name, "it is down")
                continue
            try:
                yield self.tamper(step, self.answer(name, request, private[name] if private else b""))
            except CloisterError as error:
                yield Failure(name, str(error))

    def answer(self, name: str, request: Request, private: bytes) -> Reply:
        if isinstance(request, Agree):
            return Agreed(name, self.attempts(name).agree(request.step, private, request.round))
        assert isinstance(request, Train)
        statement, vector = b"", self.vector(name)
        if self.plan.aggregation.secure:
            model = vector_hash(request.model)
            statement, vector = self.attempts(name).mask(private, request.round, model, 1, lambda: vector)
        return Contribution(name, request.round, request.model_hash, statement, vector)


class Run:
    """A coordinator's party for one sum."""

    def __init__(self, folder: Path, sites: Sites) -> None:
        self.events: list[Event] = []
        self.journal = Journal(folder / "journal")
        self.sites = sites
        self.party = Party(
            sites.plan, RUN, sites.roster, LAYOUT, sites, self.journal, self.events.append, clock=lambda: 0.0
        )

    def sum(self, number: int = 1) -> Total | Failed:
        plan = self.sites.plan
        return sum_over(
            self.party,
            TRAIN,
            self.sites.sites,
            plan.cohort.needed(),
            lambda tries: Train(plan.to_json(), number, tries, RUN, vector_hash(MODEL).hex(), MODEL),
        )


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def open_(sites: int = 6, **options: Any) -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        settings_ = [f"cohort.sites={sites}", "cohort.quorum=0.5", "local.steps=1", *options.get("set", [])]
        plan = parse("", settings_)
        runs.append(Run(folder, Sites(folder, plan, NAMES[:sites])))
        return runs[-1]

    yield open_
    for run in runs:
        run.journal.__exit__()


def expected(names: Iterable[str]) -> dict[str, Any]:
    weights = np.array([100 + NAMES.index(name) for name in names])
    mean = np.average([update_of(name).astype(np.float64) for name in names], axis=0, weights=weights)
    return {"mean": mean, "tokens": int(weights.sum())}


@given(
    bits=st.sampled_from([16, 32]),
    sites=st.integers(7, 11),  # of which two may drop out
    down=st.lists(
        st.tuples(st.integers(0, 10), st.sampled_from(STEPS)), max_size=2, unique_by=lambda d: d[0]
    ),
    lives_on=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_secure_sum_is_the_plain_sum_to_the_last_bit(
    open_run: Callable[..., Run], bits: int, sites: int, down: list[tuple[int, str]], lives_on: bool
) -> None:
    ring = f"aggregation.ring_bits={bits}"
    secure, plain = open_run(sites, set=[ring]), open_run(sites, set=[ring, "aggregation.secure=false"])
    secure.sites.live = {} if lives_on else None
    lost = {NAMES[index % sites]: step for index, step in down}
    secure.sites.down = {(name, step, 1) for name, step in lost.items()}
    # Who drops out after its vector is in still counts.
    counted = [name for name in NAMES[:sites] if lost.get(name) not in ("advertise", "share", "update")]
    plain.sites.down = {(name, "update", 1) for name in set(NAMES[:sites]) - set(counted)}
    masked, clear = secure.sum(), plain.sum()
    assert isinstance(masked, Total)
    assert isinstance(clear, Total)
    assert masked.sites == clear.sites == len(counted)
    assert np.array_equal(masked.opened.mean, clear.opened.mean)
    assert masked.opened.counters == clear.opened.counters
    assert masked.opened.counters["tokens"] == expected(counted)["tokens"]
    np.testing.assert_allclose(
        masked.opened.mean, expected(counted)["mean"], atol=0.02 if bits == 16 else 1e-6
    )


def test_what_arrives_is_masked_and_differs_in_every_attempt(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    seen: list[np.ndarray] = []

    def watch(step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution):
            seen.append(reply.vector.copy())
        return reply

    run.sites.tamper = watch
    # Too few sign in the first try: all vectors are sent again, under new masks.
    run.sites.down = {(name, "confirm", 1) for name in NAMES[:4]}
    total = run.sum()
    assert isinstance(total, Total)
    assert total.attempts == 2
    assert len(seen) == 12
    for name, first, second in zip(NAMES, seen[:6], seen[6:], strict=False):
        plain = run.sites.vector(name)
        assert not np.any(first == plain)
        assert not np.any(first == second)


def test_too_few_sites_end_the_attempt_with_nothing_revealed(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    run.sites.down = {(name, "confirm", tries) for name in NAMES[:4] for tries in range(1, 9)}
    failed = run.sum()
    assert failed == Failed(3, bound=False)
    assert not any(asked.startswith("unmask") for asked in run.sites.asked)
    assert all(not (run.sites.folder / name / "answered").exists() for name in NAMES[:6])
    # A later process tries again, with tries that go on.
    assert run.sum() == Failed(6, bound=False)


def test_once_shares_were_asked_for_only_those_survivors_are_asked_again(
    open_run: Callable[..., Run],
) -> None:
    run = open_run(6)
    run.sites.down = {("site-005", "update", 1)} | {(name, "unmask", 1) for name in NAMES[:3]}
    total = run.sum()
    assert isinstance(total, Total)
    assert (total.attempts, total.sites, total.cohort) == (2, 5, 5)
    assert "update site-005" not in run.sites.asked[run.sites.asked.index("unmask site-004") :]


def test_a_round_whose_survivors_are_lost_is_bound(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    run.sites.down = {(name, "unmask", 1) for name in NAMES[:3]}
    run.sites.down |= {("site-000", "update", tries) for tries in range(2, 9)}
    assert run.sum() == Failed(3, bound=True)
    # The sites that answered refuse another list: the difference of two sums would be one site's update.
    reasons = [event.reason for event in run.events if isinstance(event, SiteFailed)]
    assert any("the difference of two sums would open updates" in reason for reason in reasons)
    # The next round is not bound.
    run.sites.down = set()
    assert isinstance(run.sum(2), Total)


def test_a_crash_of_the_coordinator_after_unmasking_began_goes_on_with_those_survivors(
    open_run: Callable[..., Run],
) -> None:
    run = open_run(6)
    run.sites.down = {("site-002", "update", 1)}

    def crash(step: str, reply: Reply) -> Reply:
        if step == "unmask" and isinstance(reply, Agreed) and reply.site == "site-004":
            raise KeyboardInterrupt
        return reply

    run.sites.tamper = crash
    with pytest.raises(KeyboardInterrupt):
        run.sum()
    run.sites.tamper = lambda _step, reply: reply
    run.sites.down = set()
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 5
    assert total.opened.counters["tokens"] == expected([n for n in NAMES[:6] if n != "site-002"])["tokens"]


def test_a_vector_that_is_not_the_signed_one_is_left_out(open_run: Callable[..., Run]) -> None:
    run = open_run(6)

    def swap(step: str, reply: Reply) -> Reply:
        if isinstance(reply, Contribution) and reply.site == "site-001":
            vector = reply.vector.copy()
            vector[0] += 1
            return dataclasses.replace(reply, vector=vector)
        return reply

    run.sites.tamper = swap
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 5
    assert total.opened.counters["tokens"] == expected([n for n in NAMES[:6] if n != "site-001"])["tokens"]
    (reason,) = [event.reason for event in run.events if isinstance(event, SiteFailed)]
    assert "the bytes that the site signed" in reason


def test_a_site_that_speaks_for_another_is_left_out(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    stolen: list[Agreed] = []

    def impersonate(step: str, reply: Reply) -> Reply:
        if step == "advertise" and isinstance(reply, Agreed):
            stolen.append(reply)
            if reply.site == "site-001":
                return Agreed("site-001", stolen[0].body)
        return reply

    run.sites.tamper = impersonate
    total = run.sum()
    assert isinstance(total, Total)
    assert total.sites == 5


def test_an_attempt_that_failed_says_why(open_run: Callable[..., Run]) -> None:
    run = open_run(6)
    run.sites.down = {(name, "advertise", 1) for name in NAMES[:4]}
    assert isinstance(run.sum(), Total)
    (failed,) = [event for event in run.events if isinstance(event, AttemptFailed)]
    assert "sites" in failed.reason
    assert run.journal.count(f"{TRAIN} {steps.FAILED}", 1) == 1


# The site's side, across processes.


def begun(open_run: Callable[..., Run]) -> tuple[Sites, bytes, dict[str, bytes]]:
    """Sites whose shares are dealt; the inbox of each."""
    from cloister.aggregation.secure_messages import Advertise, Shares
    from cloister.aggregation.secure_sum import Coordinator

    sites = open_run(4).sites
    contract = contract_for(TRAIN, sites.plan, sites.roster, RUN, LAYOUT.size, LAYOUT.digest())
    coordinator = Coordinator(contract, 1, 1, vector_hash(MODEL), sites.sites)
    for name in sites.sites:
        body = sites.attempts(name).agree(1, to_bytes(coordinator.begin), 1)
        assert sites.attempts(name).agree(1, to_bytes(coordinator.begin), 1) == body  # asked twice
        coordinator.advertised(from_bytes(Advertise, body))
    peers = to_bytes(coordinator.peers())
    for name in sites.sites:
        coordinator.shared(from_bytes(Shares, sites.attempts(name).agree(2, peers, 1)))
    return sites, peers, {name: to_bytes(inbox) for name, inbox in coordinator.inboxes().items()}


def test_a_vector_is_masked_once_in_an_attempt_even_by_another_process(open_run: Callable[..., Run]) -> None:
    sites, _, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)
    statement, vector = sites.attempts(name).mask(inboxes[name], 1, model, 1, lambda: sites.vector(name))
    assert from_bytes(Masked, statement).digest == vector_hash(vector)
    with pytest.raises(StepError, match="once in an attempt"):
        sites.attempts(name).mask(inboxes[name], 1, model, 1, lambda: sites.vector(name))


def test_a_crash_while_masking_never_leads_to_a_second_vector_under_one_mask(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, _, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cloister.aggregation.masks.apply", crash)
        with pytest.raises(KeyboardInterrupt):
            sites.attempts(name).mask(inboxes[name], 1, model, 1, lambda: sites.vector(name))
    with pytest.raises(StepError, match="once in an attempt"):
        sites.attempts(name).mask(inboxes[name], 1, model, 1, lambda: sites.vector(name))


def test_secrets_are_for_the_site_alone_and_wiped_when_it_has_answered(open_run: Callable[..., Run]) -> None:
    run = open_run(4)
    kept: list[bytes] = []

    def look(step: str, reply: Reply) -> Reply:
        path = run.sites.folder / reply.site / "attempt"
        assert path.stat().st_mode & 0o077 == 0
        kept.append(path.read_bytes())
        return reply

    run.sites.tamper = look
    assert isinstance(run.sum(), Total)
    assert len(kept[0]) > 100
    for name in NAMES[:4]:
        assert len((run.sites.folder / name / "attempt").read_bytes()) < 150
        with pytest.raises(StepError, match="joined and not yet answered"):
            run.sites.attempts(name).agree(5, b"", 1)


def test_a_vector_of_one_round_is_not_masked_for_another(open_run: Callable[..., Run]) -> None:
    """Else one update could be summed in two rounds, over different sites."""
    sites, _, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)
    with pytest.raises(StaleError, match="which the attempt is at"):
        sites.attempts(name).mask(inboxes[name], 2, model, 1, lambda: sites.vector(name))
    begin = to_bytes(Begin(5, 1, model, tuple(NAMES[:4]), 3))
    with pytest.raises(StaleError, match="which the attempt is at"):
        sites.attempts(name).agree(1, begin, 1)


def test_only_the_steps_of_the_protocol_can_be_asked_for(open_run: Callable[..., Run]) -> None:
    sites, _, inboxes = begun(open_run)
    name = NAMES[0]
    for step, body in ((3, inboxes[name]), (6, bytes(32)), (0, b""), (7, b"")):
        with pytest.raises(StepError, match="1, 2, 4 or 5"):
            sites.attempts(name).agree(step, body, 1)
    model = vector_hash(MODEL)
    assert sites.attempts(name).mask(inboxes[name], 1, model, 1, lambda: sites.vector(name))


def test_two_messages_at_once_mask_one_vector(open_run: Callable[..., Run]) -> None:
    """While one vector is being made, another process is asked for the same update."""
    sites, _, inboxes = begun(open_run)
    name, model = NAMES[0], vector_hash(MODEL)
    inside: list[tuple[bytes, Any]] = []

    def make() -> Any:
        inside.append(sites.attempts(name).mask(inboxes[name], 1, model, 1, lambda: sites.vector(name) + 1))
        return sites.vector(name)

    with pytest.raises(StepError, match="as it was before the vector was made"):
        sites.attempts(name).mask(inboxes[name], 1, model, 1, make)
    assert len(inside) == 1


def test_a_torn_file_costs_one_attempt(open_run: Callable[..., Run]) -> None:
    run = open_run(5)
    assert isinstance(run.sum(1), Total)
    for name in NAMES[:5]:
        (run.sites.folder / name / "attempt").write_bytes(b"")
    with pytest.raises(StaleError):  # the durable mark still says which round was answered
        run.sites.attempts("site-000").agree(
            1, to_bytes(Begin(1, 1, bytes(32), tuple(NAMES[:5]), parameters(5, 0, 1).threshold)), 1
        )
    assert isinstance(run.sum(2), Total)
