"""Fragments: what a round sums, against the algorithm written out, and what crashes and absences do to it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cloister.aggregation.sums import contract_for, training_layout
from cloister.clients.config import read_config
from cloister.clients.places import mesh_for
from cloister.clients.site import preparation_of
from cloister.lm.layout import Layout
from cloister.lm.model import count_parameters, load_model
from cloister.lm.parts import parts_of
from cloister.lm.train import Trainer
from cloister.privacy.terms import terms_of
from cloister.protocol.blocks import Span
from cloister.protocol.cohort import draw_of
from cloister.protocol.errors import CloisterError, ModelError, PlanError
from cloister.protocol.messages import TRAIN
from cloister.protocol.plan import MeshSection, Plan
from cloister.protocol.roster import Card, Roster, new_identity
from cloister.server.checkpoint import Checkpoints
from cloister.server.cost import cost
from cloister.server.folder import RunFolder
from cloister.server.progress import AttemptFailed, Event, RoundDone, SiteAnswered
from cloister.server.report import gather
from cloister.simulations.audit import audit
from cloister.tests.federation import CENTRAL, RECORD, SKELLAM, Federation, tiny, whole
from cloister.tests.test_compressed_run import Run, StoppedError, final

pytestmark = pytest.mark.usefixtures("one_thread")

Floats = npt.NDArray[np.float32]
FRAGMENTS = [
    "aggregation.fragments=2",
    "run.rounds=4",
    "local.steps=1",
    "local.optimizer=sgd",  # whose steps magnify no rounding
    "local.learning_rate=0.5",
    "server.evaluation=none",
    "server.optimizer=nesterov",
    "server.learning_rate=0.7",
]
CLEAR = [*FRAGMENTS, "aggregation.secure=false"]
LOSSY = [*FRAGMENTS, "aggregation.dropouts=0.25", "aggregation.colluders=0", "cohort.quorum=0.5"]


def seed_of(plan: Plan, site: str, number: int) -> tuple[int, ...]:
    text = f"training/{plan.run.seed}/{site}/{number}"
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little"),)


def streaming(run: Run, unsummed: Mapping[int, str] | None = None) -> list[Floats]:
    """The global model after each round, by the algorithm written out.

    Args:
        run: A run that has ended: its plan, sites, and which rounds the gate refused.
        unsummed: By round a site of the cohort whose update was made and is not in the sum, under masks.
    """
    plan, model = run.plan, load_model(run.plan)
    layout, fragments = model.layout, plan.aggregation.fragments
    parts = parts_of(plan, layout).spans
    trainer = Trainer(plan, model, torch.device("cpu"))
    weights = layout.flatten(model.module)
    local = {name: weights.copy() for name in run.states}
    """Each site's own model: where a fragment was not sent, it goes on from there."""
    momentum = [np.zeros(part.size, np.float64) for part in parts]
    last = dict.fromkeys(run.states, 0)
    sequences = {}
    for name, state in run.states.items():
        config = read_config(state.parent / "site.toml")
        sequences[name] = preparation_of(config, plan, model.tokenizer).make().train
    models = []
    refused = {event.round for event in run.of(RoundDone) if event.refused}
    for number in range(1, plan.run.rounds + 1):
        part = parts[(number - 1) % fragments]
        updates, counts = [], []
        for name in draw_of(plan, TRAIN).cohort(tuple(run.states), number):
            begin = local[name].copy()
            for earlier in range(max(last[name], number - fragments), number):
                if earlier:
                    moved = parts[(earlier - 1) % fragments]
                    begin[moved.start : moved.stop] = weights[moved.start : moved.stop]
            done = trainer.train(begin, sequences[name], round=number, site_seed=seed_of(plan, name, number))
            if (unsummed or {}).get(number) == name:
                continue
            local[name], last[name] = begin + done.vector, number
            updates.append((local[name] - weights)[part.start : part.stop])
            counts.append(done.tokens)
        if number not in refused:
            mean = np.average(np.array(updates, np.float64), axis=0, weights=counts)
            own = momentum[(number - 1) % fragments]
            own *= plan.server.momentum
            own += mean
            weights[part.start : part.stop] += plan.server.learning_rate * (mean + plan.server.momentum * own)
        models.append(weights.copy())
    return models


def check(run: Run, unsummed: Mapping[int, str] | None = None) -> None:
    """The last two models are those of the algorithm."""
    expected = streaming(run, unsummed)
    layout, rounds = load_model(run.plan).layout, run.plan.run.rounds
    kept = Checkpoints(run.folder / "checkpoints", layout, 2)
    start = kept.load(0).weights
    for number in (rounds - 1, rounds):
        moved = float(np.abs(expected[number - 1] - start).max())
        np.testing.assert_allclose(kept.load(number).weights, expected[number - 1], rtol=0, atol=2e-4 * moved)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run under masks that nothing disturbed."""
    made = Run(tmp_path_factory.mktemp("masked"), *FRAGMENTS)
    made.go()
    return made


def test_a_run_is_the_algorithm_written_out(masked: Run) -> None:
    check(masked)


def test_the_masked_sum_and_its_clear_twin_have_the_same_bits(masked: Run, tmp_path: Path) -> None:
    clear = Run(tmp_path, *CLEAR)
    clear.go()
    assert [event.params_sha256 for event in clear.of(RoundDone)] == [
        event.params_sha256 for event in masked.of(RoundDone)
    ]


def test_a_site_sends_and_the_coordinator_counts_the_fragment_alone(masked: Run) -> None:
    layout = load_model(masked.plan).layout
    first, second = parts_of(masked.plan, layout).spans
    assert first.stop == second.start
    assert (first.start, second.stop) == (0, layout.size)
    state = next(iter(masked.states.values()))
    sent = (state / "update-00004.ring").stat().st_size  # of round 4, which sums the second fragment
    assert 4 * second.size < sent < 4 * second.size + 100  # and counters
    counted = count_parameters(masked.plan)
    assert counted == (layout.size, layout.size, max(first.size, second.size))
    found = cost(masked.plan, *counted)
    assert found.bytes_up == 4 * counted.summed + sent - 4 * second.size
    assert found.bytes_down == 4 * layout.size
    drift = np.fromfile(state / "drift-00004", np.float32)
    assert drift.size == layout.size
    assert not drift[second.start :].any()
    assert np.abs(drift[: first.stop]).max() > 0


def test_each_fragment_has_its_own_momentum_and_count_of_steps(masked: Run) -> None:
    layout = load_model(masked.plan).layout
    first, second = parts_of(masked.plan, layout).spans
    state = Checkpoints(masked.folder / "checkpoints", layout, 2).load(4).optimizer
    sizes = {name: tensor.numel() for name, tensor in state.items()}
    assert sizes == {"0/momentum_buffer": first.size, f"{second.start}/momentum_buffer": second.size}


def test_a_run_that_stopped_and_was_repeated_goes_on_to_the_same_weights(masked: Run, tmp_path: Path) -> None:
    """The first attempt at each round fails after all sites made their updates; the next one sums the same."""

    def again() -> Run:
        made = Run(tmp_path, *FRAGMENTS)
        made.channel.lose(*((name, "confirm", 1) for name in list(made.states)[:2]))
        return made

    failed = 0
    for moment in (
        lambda event: isinstance(event, SiteAnswered) and event.round == 1,
        lambda event: isinstance(event, RoundDone) and event.round == 2,
        lambda event: isinstance(event, SiteAnswered) and event.round == 4,
    ):

        def stop(event: Event, moment: Callable[[Event], bool] = moment) -> None:
            if moment(event):
                raise StoppedError

        party = again()
        with pytest.raises(StoppedError):
            party.go(stop)
        failed += len(party.of(AttemptFailed))
    party = again()
    party.go()
    assert failed + len(party.of(AttemptFailed)) == 4
    assert final(party) == final(masked)


def test_an_update_that_is_made_again_starts_with_the_same_drift(tmp_path: Path) -> None:
    """The site's update file is lost after it was sent; under masks it must be the same again."""
    federation = Federation(tmp_path, tiny(*CLEAR))
    site, folder = federation.joined(), federation.sites_folder / federation.names[0]
    site.contribute(federation.request())
    request = federation.request(number=2)
    before = whole(site.contribute(request))
    for lost in folder.rglob("update-00002.*"):
        lost.unlink()
    np.testing.assert_array_equal(whole(site.contribute(request)), before)


def test_a_site_that_was_not_summed_forgets_what_it_trained_and_what_has_moved(tmp_path: Path) -> None:
    """In round 3 the first site trains, and its masked update does not arrive: so it is no survivor."""
    party = Run(tmp_path, *LOSSY)
    lost = party.cut_upload(3)
    party.go()
    assert [event.sites for event in party.of(RoundDone)] == [4, 4, 3, 4]
    check(party, {3: lost})


def test_a_site_that_was_away_drops_the_drift_of_what_has_moved(tmp_path: Path) -> None:
    """Each round draws two of four sites, so some are away for one round, and some for more than all fragments."""
    party = Run(tmp_path, *CLEAR, "cohort.fraction=0.5", "run.rounds=6", "aggregation.fragments=3")
    party.go()
    check(party)
    cohorts = [draw_of(party.plan, TRAIN).cohort(tuple(party.states), number) for number in range(1, 7)]
    away = [
        after - before
        for name in party.states
        for before, after in itertools.pairwise(
            number for number, cohort in enumerate(cohorts) if name in cohort
        )
    ]
    assert {1, 2} < set(away)


def test_a_mean_that_the_gate_refuses_leaves_the_model_and_the_drift_of_other_fragments(
    masked: Run, tmp_path: Path
) -> None:
    norms = [event.update_norm for event in masked.of(RoundDone)]
    party = Run(tmp_path, *CLEAR, f"server.gate.norm={sorted(norms)[-2] * 1.001}")
    party.go()
    refused = [event.round for event in party.of(RoundDone) if event.refused]
    assert refused
    assert len(refused) < 4
    check(party)


# Which fragments


def layout_of(sizes: list[int]) -> Layout:
    return Layout.ordered((f"layers.{number:03d}.weight", (size,)) for number, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("sizes", "fragments"),
    [([5, 1, 1, 1, 1, 1], 3), ([1, 2, 9, 2, 1, 4], 4), ([3, 3, 3, 3], 2), ([7, 1, 1], 3)],
)
def test_fragments_are_as_equal_as_whole_layers_allow(sizes: list[int], fragments: int) -> None:
    found = [
        span.size
        for span in parts_of(
            tiny(f"aggregation.fragments={fragments}", "run.rounds=9"), layout_of(sizes)
        ).spans
    ]
    cuts = itertools.combinations(range(1, len(sizes)), fragments - 1)
    best = min(
        sum(sum(sizes[begin:end]) ** 2 for begin, end in itertools.pairwise((0, *cut, len(sizes))))
        for cut in cuts
    )
    assert sum(found) == sum(sizes)
    assert sum(size**2 for size in found) == best


def test_a_layer_is_not_cut() -> None:
    plan = tiny("model.config.num_hidden_layers=3", "aggregation.fragments=4", "run.rounds=4")
    layout = load_model(plan).layout
    edges = {span.start for span in parts_of(plan, layout).spans}
    names = [layout.names[layout.offsets.index(edge)] for edge in sorted(edges)]
    for name in names[1:]:
        before = layout.names[layout.names.index(name) - 1]
        assert name.split(".")[:3] != before.split(".")[:3]


def test_more_fragments_than_layers_are_refused_with_their_number() -> None:
    plan = tiny("aggregation.fragments=6", "run.rounds=6")
    with pytest.raises(PlanError, match=r"aggregation.fragments.*6.*at most 4, the layers") as refused:
        load_model(plan)
    assert "set aggregation.fragments = 4 or less" in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("run.rounds=1", "at most 1, the rounds of the run"),
        ("local.proximal=0.1", "its anchor would be"),
        ("aggregation.compression={}", "scales and remainders"),
        ("model.adapter.scheme=rolora", "unsent change"),
    ],
)
def test_what_does_not_fit_fragments_is_refused(setting: str, said: str) -> None:
    more = {
        "aggregation.compression={}": ["aggregation.ring_bits=8"],
        "model.adapter.scheme=rolora": ["server.optimizer=fedavg"],
    }
    with pytest.raises(PlanError, match=said):
        tiny(*FRAGMENTS, *more.get(setting, []), setting)


@pytest.mark.parametrize(
    "settings",
    [
        ["local.balance=weighted", "aggregation.weighting=uniform"],
        ["local.control_variates=true", "aggregation.weighting=uniform"],
        ["cohort.mode=async", "aggregation.secure=false"],
        [*CENTRAL, "aggregation.secure=true", "cohort.fraction=0.5", "cohort.sites=6",
         "privacy.correlated.separation=2", "privacy.correlated.participations=3"],
    ],
)  # fmt: skip
def test_what_is_not_sound_with_fragments_is_refused(settings: list[str]) -> None:
    tiny(*(each for each in FRAGMENTS if "fragments" not in each), *settings)
    with pytest.raises(PlanError, match=r"with aggregation\.fragments"):
        tiny(*FRAGMENTS, *settings)


def test_a_site_with_a_mesh_refuses() -> None:
    with pytest.raises(ModelError, match=r"because aggregation\.fragments is set"):
        mesh_for(tiny(*FRAGMENTS), MeshSection(shard=2), "cpu")


# Privacy


def test_unit_site_clips_what_is_sent(tmp_path: Path) -> None:
    """The site's steps are long, so both fragments are clipped; a clip of the whole update would leave less of each."""
    federation = Federation(tmp_path, tiny(*FRAGMENTS, *CENTRAL, "local.learning_rate=50"))
    plan, parts, site = federation.plan, parts_of(federation.plan, federation.layout), federation.joined()
    for number, part in enumerate(parts.spans, 1):
        sent = whole(site.contribute(federation.request(number=number)))
        coded = training_layout(plan, part.size, parts.largest)
        assert sent.size == coded.length
        norm = float(np.linalg.norm(coded.open(sent).mean))  # in clipping norms
        assert norm == pytest.approx(1, abs=1e-3)
    assert len(federation.entries()) == 2


BY_RECORD = [
    *RECORD,
    "privacy.sampling_rate=0.1",
    "privacy.accountant=rdp",
    "privacy.method=reference",
]


@pytest.mark.parametrize("unit", [SKELLAM, CENTRAL, BY_RECORD])
def test_each_round_is_charged_as_one_of_the_largest_fragment(unit: list[str], tmp_path: Path) -> None:
    run = Run(tmp_path, *FRAGMENTS, *unit, "run.rounds=2")
    outcome = run.go()
    layout = load_model(run.plan).layout
    parts = parts_of(run.plan, layout)
    terms = terms_of(run.plan, parts.largest)
    assert terms is not None
    assert len({span.size for span in parts.spans}) == 2
    assert outcome.epsilon == pytest.approx(terms.epsilon(2), rel=1e-9)
    if terms.mechanism is not None:
        for span in parts.spans:
            alone = terms_of(run.plan, span.size)
            assert alone is not None
            assert terms.epsilon(2) >= alone.epsilon(2)
        norms = [event.update_norm for event in run.of(RoundDone)]
        noise = terms.mechanism.deviation * run.plan.privacy.clip / 4
        if terms.mechanism.variance:  # only the noise of honest sites is counted on
            noise *= math.sqrt(4 / run.plan.honest())
        for span, norm in zip(parts.spans, norms, strict=True):
            assert norm == pytest.approx(noise * math.sqrt(span.size), rel=0.1)
        assert not gather(run.folder).ledger.problem


def test_a_site_whose_training_is_not_finite_sends_zeros_and_begins_again_without_drift(
    tmp_path: Path,
) -> None:
    federation = Federation(tmp_path, tiny(*FRAGMENTS, *CENTRAL))
    parts, site = parts_of(federation.plan, federation.layout), federation.joined()
    site.contribute(federation.request(number=1))
    huge = np.full(federation.layout.size, 1e30, np.float32)
    sent = whole(site.contribute(federation.request(number=2, model=huge)))
    coded = training_layout(federation.plan, parts.of(2).size, parts.largest)
    assert not coded.open(sent).mean.any()
    (drift,) = federation.sites_folder.rglob("drift-00002")
    assert drift.stat().st_size == 4 * federation.layout.size
    assert not np.fromfile(drift, np.float32).any()


def test_a_sum_of_another_part_has_another_contract() -> None:
    plan, roster = tiny(*FRAGMENTS), Roster.of([Card.of("site-000", new_identity())])
    whole_one, first, second = (
        contract_for(TRAIN, plan, roster, "run", 20, "model", part, 10)
        for part in (None, Span(0, 10), Span(10, 20))
    )
    assert (whole_one.length, first.length) == (second.length + 10, second.length)
    assert len({whole_one.layout, first.layout, second.layout}) == 3


def test_an_audit_refuses_a_run_whose_rounds_sum_parts(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path / "run", tiny(*FRAGMENTS, *CENTRAL)) as folder,
        pytest.raises(CloisterError, match="an audit compares whole updates"),
    ):
        audit(folder)
