"""State that one site of a sum does not carry: the coordinator makes what the others carry drown their updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cloister.aggregation.secure.secure_coordinator import SecureCoordinator
from cloister.aggregation.secure.secure_site import SecureSite
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector import compression
from cloister.aggregation.vector.average import SumLayout
from cloister.aggregation.vector.rotation import ROTATED, hadamard_transform, signs
from cloister.clients.ranks.resident import Resident
from cloister.clients.site import Site
from cloister.clients.state.carried import Carried
from cloister.clients.state.kept import Kept, run_folder, update_path
from cloister.lm.model.layout import Vector
from cloister.lm.training.moments import Carry
from cloister.lm.training.train import Bench
from cloister.protocol.errors import AgreementError, StepError, UpdateError
from cloister.protocol.messages.digest import instructions_digest
from cloister.protocol.messages.messages import (
    NOTHING_CARRIED,
    TRAIN,
    Advertise,
    Agree,
    Begin,
    Confirm,
    Inbox,
    Instructions,
    Reveal,
    Shares,
)
from cloister.protocol.messages.wire import encode
from cloister.tests.parties.federation import RECORD, RUN, SKELLAM, Federation, changed, tiny, whole
from cloister.tests.tools.raises import raises

pytestmark = pytest.mark.usefixtures("one_thread")

SITES = 3
UNIFORM = [
    f"cohort.sites={SITES}",
    "aggregation.colluders=0.0",
    "cohort.quorum=0.6",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
]
EIGHT_BITS = [
    *UNIFORM,
    "aggregation.ring_bits=8",
    "aggregation.compression={}",
    "local.weight_decay=10.0",
]


class Rounds:
    """A coordinator that chooses who takes part in a round, and says of no site that its history is another one.

    Args:
        folder: Of the federation.
        settings: Of the plan.
    """

    def __init__(self, folder: Path, *settings: str) -> None:
        self.federation = Federation(folder, tiny(*settings))
        self.sites = [self.federation.joined(index, minimum_cohort=2) for index in range(SITES)]
        *self.others, self.victim = self.sites

    def begin(
        self, told: Instructions, sites: Sequence[Site], attempt: int = 1
    ) -> tuple[SecureCoordinator, dict[str, Inbox]]:
        """The steps of a round until these sites hold each other's shares."""
        plan, layout = self.federation.plan, self.federation.layout
        contract = Sums(plan, layout.size, layout.digest()).contract(TRAIN, RUN, self.federation.roster)
        digest = instructions_digest(told)
        coordinator = SecureCoordinator(contract, told.sum.round, attempt, digest, fresh=True)
        for site in sites:
            advertised = site.agree(Agree(told.sum, coordinator.begin))
            assert isinstance(advertised, Advertise)
            coordinator.advertised(advertised)
        peers = coordinator.peers()
        for site in sites:
            shares = site.agree(Agree(told.sum, peers))
            assert isinstance(shares, Shares)
            coordinator.shared(shares)
        return coordinator, coordinator.inboxes()

    def round(
        self, number: int, sites: Sequence[Site], model: Vector, *, attempt: int = 1, **told: Any
    ) -> npt.NDArray[np.int64]:
        """A round of some sites; the opened sum of their vectors, as signed integers, without counters."""
        about: dict[str, Any] = {"number": number, "fresh": False, **told}
        instructions = self.federation.told(model=model, **about)
        coordinator, inboxes = self.begin(instructions, sites, attempt)
        for site in sites:
            sent = site.contribute(self.federation.request(model=model, inbox=inboxes[site.name], **about))
            assert sent.statement is not None
            coordinator.fold(sent.statement, [(0, whole(sent))])
        survivors = coordinator.survivors()
        for site in sites:
            confirmed = site.agree(Agree(instructions.sum, survivors))
            assert isinstance(confirmed, Confirm)
            coordinator.confirmed(confirmed)
        requests = coordinator.request()
        for site in sites:
            revealed = site.agree(Agree(instructions.sum, requests[site.name]))
            assert isinstance(revealed, Reveal)
            coordinator.revealed(revealed)
        return self.integers(coordinator.sum())

    def refused(self, number: int, model: Vector, *, attempt: int = 1, **told: Any) -> None:
        """All sites refuse a round that all of them are asked for, before they train."""
        about: dict[str, Any] = {"model": model, "number": number, "fresh": False, **told}
        _, inboxes = self.begin(self.federation.told(**about), self.sites, attempt)
        for site in self.sites:
            with raises(AgreementError, "history of carried state"):
                site.contribute(self.federation.request(inbox=inboxes[site.name], **about))
            assert not update_path(run_folder(site.config.folder, RUN), number).exists()

    def of(self, site: Site, number: int) -> npt.NDArray[np.int64]:
        """What a site has sent in a round, without its masks."""
        path = update_path(run_folder(site.config.folder, RUN), number)
        return self.integers(np.fromfile(path, self.layout.ring.dtype, self.layout.length))

    @property
    def layout(self) -> SumLayout:
        return Sums(self.federation.plan, self.federation.layout.size).training

    def integers(self, vector: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        layout = self.layout
        size = layout.blocks.size if layout.blocks is not None else layout.size
        signed: npt.NDArray[Any] = vector[:size].view(layout.ring.signed_dtype)
        return signed.astype(np.int64)


def cosine(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    return float(one @ other / np.sqrt(float(one @ one) * float(other @ other)))


def unguarded(patch: pytest.MonkeyPatch) -> None:
    """Take 4e out."""
    patch.setattr(SecureSite, "_check_one_history", lambda _site: None)


# Moments: the victim is absent while the others' moments grow by large gradients; then all gradients are small.

KEPT = [
    *UNIFORM,
    "local.optimizer_state=keep",
    "local.steps=15",
    "local.batch_size=1",
    "local.learning_rate=1e-5",
    "run.rounds=5",
]
LAST = 5


def grow_moments(rounds: Rounds) -> Vector:
    """Rounds without the victim; the model of the last one, whose gradients are small."""
    small: Vector = np.float32(1e-4) * rounds.federation.model
    rounds.round(1, rounds.others, rounds.federation.model)
    for number in range(2, LAST):
        rounds.round(number, rounds.others, small)
    return small


def test_moments_of_large_gradients_do_not_single_out_a_site_that_was_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(tmp_path, *KEPT)
    small = grow_moments(rounds)
    rounds.refused(LAST, small)
    unguarded(monkeypatch)
    total = rounds.round(LAST, rounds.sites, small, attempt=2)
    assert cosine(total, rounds.of(rounds.victim, LAST)) >= 0.9
    assert max(cosine(total, rounds.of(site, LAST)) for site in rounds.others) < 0.9


@pytest.mark.parametrize("settings", [KEPT, EIGHT_BITS], ids=["moments", "residuals"])
def test_a_site_of_another_history_refuses_before_it_charges(tmp_path: Path, settings: list[str]) -> None:
    private = [*RECORD, "aggregation.secure=true", "local.steps=1", "local.batch_size=4"]
    rounds = Rounds(tmp_path, *settings, *private)
    rounds.round(1, rounds.others, rounds.federation.model)
    rounds.refused(2, rounds.federation.model)
    assert [len(rounds.federation.entries(index)) for index in range(SITES)] == [1, 1, 0]
    rounds.round(2, rounds.sites, rounds.federation.model, attempt=2, fresh=True)
    assert [len(rounds.federation.entries(index)) for index in range(SITES)] == [2, 2, 1]


def test_an_earlier_round_that_ends_after_the_histories_were_checked_changes_no_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim is still training for another attempt of round 2, alone and fresh, when round 3 has begun."""
    rounds = two_rounds(tmp_path)
    _, inboxes = rounds.begin(rounds.federation.told(**THIRD), rounds.sites)
    turn = Kept.turn

    @contextmanager
    def late(kept: Kept, run: str) -> Iterator[None]:
        with turn(kept, run):
            end_late(rounds)
            yield

    monkeypatch.setattr(Kept, "turn", late)
    makes_no_update(rounds, inboxes)


def test_a_begin_that_is_repeated_has_one_answer_whatever_the_site_carries_by_then(tmp_path: Path) -> None:
    """Two signed answers would be keys of which the site refuses one, and a history that its update does not have."""
    rounds = two_rounds(tmp_path)
    told = rounds.federation.told(**THIRD)
    begin = Agree(told.sum, Begin(3, 1, instructions_digest(told)))
    first = encode(rounds.victim.answer(begin))
    end_late(rounds)
    anew = rounds.federation.site(SITES - 1, resident=Resident(), minimum_cohort=2)
    assert [encode(site.answer(begin)) for site in (rounds.victim, anew)] == [first, first]
    _, inboxes = rounds.begin(told, rounds.sites)
    makes_no_update(rounds, inboxes)


THIRD: dict[str, Any] = {"number": 3, "fresh": False}


def two_rounds(folder: Path) -> Rounds:
    rounds = Rounds(folder, *KEPT, "local.steps=1")
    for number in (1, 2):
        rounds.round(number, rounds.sites, rounds.federation.model, fresh=number == 1)
    return rounds


def end_late(rounds: Rounds) -> None:
    """An update of the victim for round 2, alone and fresh, ends now."""
    alone = rounds.federation.told(number=2, fresh=True)
    federation = rounds.federation
    model = Sums.over(federation.plan, federation.layout, b"").model
    carried = Carried(run_folder(rounds.victim.config.folder, RUN), federation.plan.digest(), model)
    carried.make(alone, NOTHING_CARRIED, lambda _carry: None, durable=False)


def makes_no_update(rounds: Rounds, inboxes: dict[str, Inbox]) -> None:
    """The victim refuses round 3 before it trains."""
    with raises(StepError, "carried state"):
        rounds.victim.answer(rounds.federation.request(inbox=inboxes[rounds.victim.name], **THIRD))
    assert not update_path(run_folder(rounds.victim.config.folder, RUN), 3).exists()


@pytest.mark.parametrize(("settings", "file"), [(KEPT, "moments"), (EIGHT_BITS, "residual")])
def test_a_site_whose_carried_state_is_damaged_carries_nothing(
    tmp_path: Path, settings: list[str], file: str
) -> None:
    """One byte of it, whose file keeps its size; also where the site has advertised the state before."""
    rounds = Rounds(tmp_path, *settings, "local.steps=1")
    model, victim = rounds.federation.model, rounds.victim
    rounds.round(1, rounds.sites, model, fresh=True)
    about: dict[str, Any] = {"number": 2, "fresh": False}
    _, inboxes = rounds.begin(rounds.federation.told(**about), rounds.sites)
    path = run_folder(victim.config.folder, RUN) / "carried" / "00001" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with raises(StepError, "carried state"):
        victim.answer(rounds.federation.request(inbox=inboxes[victim.name], **about))
    carries_nothing(rounds)


def carries_nothing(rounds: Rounds) -> None:
    """The victim is apart from the others in round 2, until it is fresh."""
    told = rounds.federation.told(number=2, fresh=False)
    begin = Agree(told.sum, Begin(2, 2, instructions_digest(told)))
    histories = [site.answer(begin).history for site in rounds.sites]  # type: ignore[union-attr]  # Advertise
    assert histories[-1] == NOTHING_CARRIED
    assert len(set(histories)) == 2
    rounds.refused(2, rounds.federation.model, attempt=3)
    rounds.round(2, rounds.sites, rounds.federation.model, attempt=4, fresh=True)
    rounds.round(3, rounds.sites, rounds.federation.model)


@pytest.mark.parametrize("settings", [KEPT, EIGHT_BITS], ids=["moments", "residuals"])
def test_a_site_that_was_in_another_run_meanwhile_carries_on(tmp_path: Path, settings: list[str]) -> None:
    """With the same state folder, for a plan that its owner has accepted in between."""
    rounds = Rounds(tmp_path, *settings, "local.steps=1")
    federation = rounds.federation
    rounds.round(1, rounds.sites, federation.model, fresh=True)
    other: dict[str, Any] = {"plan": changed(federation.plan, "aggregation", secure=False), "run": "other"}
    elsewhere = federation.joined(SITES - 1, pinned=False, secure=False, **other)
    elsewhere.answer(federation.request(**other))
    rounds.round(2, rounds.sites, federation.model)


def test_a_history_does_not_depend_on_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under unit `site`: an update that was not finite leaves no moments, and no other history, which has no noise."""
    rounds = Rounds(tmp_path, *KEPT, *SKELLAM, "local.steps=1")
    real, name = Bench.round, rounds.victim.name

    def train(bench: Bench, *args: Any, carry: Carry, **about: Any) -> Any:
        if about["round"] == 1 and name in carry.after.parts:
            raise UpdateError("update", "non-finite", expected="finite numbers")
        return real(bench, *args, carry=carry, **about)

    monkeypatch.setattr(Bench, "round", train)
    rounds.round(1, rounds.sites, rounds.federation.model, fresh=True)
    left = [sorted(path.name for path in moments.iterdir()) for moments in carried_folders(rounds)]
    assert left == [["history.json", "moments"], ["history.json", "moments"], ["history.json"]]
    rounds.round(2, rounds.sites, rounds.federation.model)


def carried_folders(rounds: Rounds) -> list[Path]:
    return [run_folder(site.config.folder, RUN) / "carried" / "00001" for site in rounds.sites]


# Residuals of 8 bits: weight decay of large weights exceeds the small bounds of round 1, and much is left out; the
# bounds of round 2 are smaller than what is left, and larger than an update.


def drown(rounds: Rounds) -> tuple[Vector, npt.NDArray[np.float32]]:
    """A round without the victim; the large model, and what an update of it is, rotated, which is the same at all."""
    size, code = rounds.federation.layout.size, rounds.layout.blocks
    assert code is not None
    large: Vector = (10 * signs(5)[:size]).astype(np.float32)
    rounds.round(1, rounds.others, large, scales=bounds(0.1))
    local = rounds.federation.plan.local
    decay = np.zeros((1, ROTATED), np.float32)
    decay[0, :size] = -local.steps * local.learning_rate * local.weight_decay * large
    decay *= signs(code.seed)
    rotated = hadamard_transform(decay, np.empty_like(decay), np.full(1, 2.0**-7, np.float32))
    return large, rotated[0]


def bounds(bound: float) -> bytes:
    """One block has them all."""
    return np.full(1, bound, "<f4").tobytes()


def singled_out(rounds: Rounds, drift: npt.NDArray[np.float32], **told: Any) -> float:
    """The part of the coordinates at which the victim's integer follows from the sum and what is public, exactly."""
    total = rounds.round(2, rounds.sites, rounds.federation.model, scales=bounds(0.02), **told)
    sure = np.abs(drift) > 0.25
    constants = len(rounds.others) * rounds.layout.ring.levels * np.sign(drift).astype(np.int64)
    found = (total - constants == rounds.of(rounds.victim, 2)) & sure
    return float(found.sum() / sure.sum())


def test_residuals_of_large_updates_do_not_single_out_a_site_that_was_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MOST_KEPT", 4.0)  # takes the cut of a residual out
    rounds = Rounds(tmp_path, *EIGHT_BITS)
    _, drift = drown(rounds)
    rounds.refused(2, rounds.federation.model, scales=bounds(0.02))
    unguarded(monkeypatch)
    assert singled_out(rounds, drift, attempt=2) > 0.99


def test_a_residual_that_is_cut_does_not_single_out_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second guard: it takes at most a quarter of the range of the bounds in force."""
    unguarded(monkeypatch)
    rounds = Rounds(tmp_path, *EIGHT_BITS)
    _, drift = drown(rounds)
    assert singled_out(rounds, drift) < 0.1
