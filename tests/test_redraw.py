"""An adapter that is drawn again: phases of a run, what each sums and trains, and the one adapter that is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import AutoPeftModelForCausalLM

from cloister.aggregation.sums import training_layout
from cloister.clients.dpsgd import PrivateTrainer
from cloister.clients.places import mesh_for
from cloister.lm.export import write_model
from cloister.lm.layout import phase_of
from cloister.lm.model import load_model, load_saved
from cloister.lm.parts import parts_of
from cloister.privacy.noise import NoiseStream
from cloister.privacy.terms import terms_of
from cloister.protocol.errors import ModelError, PlanError
from cloister.protocol.plan import MeshSection
from cloister.server.checkpoint import Checkpoints
from cloister.server.progress import RoundDone, SiteAnswered
from cloister.tests.federation import CENTRAL, RECORD, SKELLAM, Federation, tiny, whole
from cloister.tests.test_compressed_run import Run, final

# PEFT asks transformers 5.23 for a property under the name that transformers is phasing out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

Floats = npt.NDArray[np.float32]
REDRAWN = [
    "model.adapter.scheme=ffa-lora",
    "model.adapter.rank=2",
    "model.adapter.alpha=3",
    "model.adapter.redraw=1",
    "run.rounds=3",
    "local.steps=1",
    "server.evaluation=none",
    "server.optimizer=nesterov",
]
CLEAR = [*REDRAWN, "aggregation.secure=false"]


def weights(run: Run, number: int) -> Floats:
    return Checkpoints(run.folder / "checkpoints", load_model(run.plan).layout, 9).load(number).weights


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run under masks that nothing disturbed."""
    made = Run(tmp_path_factory.mktemp("masked"), *REDRAWN, "server.keep_checkpoints=9")
    made.go()
    return made


def test_each_round_sums_and_changes_the_factors_of_its_phase_alone(masked: Run) -> None:
    layout = load_model(masked.plan).layout
    parts = parts_of(masked.plan, layout)
    slower = parts_of(tiny(*REDRAWN, "run.rounds=5", "model.adapter.redraw=2"), layout)
    assert [slower.spans.index(slower.of(number)) for number in range(1, 6)] == [0, 0, 1, 1, 2]
    assert [parts.spans.index(parts.of(number)) for number in range(1, 4)] == [0, 1, 2]
    assert [phase_of(name) for name in layout.names] == sorted(phase_of(name) for name in layout.names)
    assert [span.size * 3 for span in parts.spans] == [layout.size] * 3
    assert not weights(masked, 0).any()
    for number, span in enumerate(parts.spans, 1):
        moved = np.flatnonzero(weights(masked, number) != weights(masked, number - 1))
        assert moved.size
        assert span.start <= moved[0]
        assert moved[-1] < span.stop
    sent = (next(iter(masked.states.values())) / "update-00003.ring").stat().st_size
    assert 4 * parts.largest < sent < 4 * parts.largest + 100  # and counters


def test_each_phase_draws_another_a_from_the_seed() -> None:
    plan = tiny(*REDRAWN)
    once, again = (dict(load_model(plan).module.named_parameters()) for _ in range(2))
    other = dict(load_model(tiny(*REDRAWN, "run.seed=1")).module.named_parameters())
    first = [name for name in once if ".lora_A.default." in name]
    assert first
    for name in first:
        names = [name, *(name.replace("default", f"phase{number}") for number in (1, 2))]
        for each in names:
            assert torch.equal(once[each], again[each])
            assert not torch.equal(once[each], other[each])
        assert not torch.equal(once[names[0]], once[names[1]])
        assert not torch.equal(once[names[1]], once[names[2]])
    one = dict(
        load_model(tiny(*[each for each in REDRAWN if "redraw" not in each])).module.named_parameters()
    )
    assert torch.equal(one[first[0]], once[first[0]])


def logits(module: torch.nn.Module) -> torch.Tensor:
    module.eval()
    with torch.no_grad():
        found: torch.Tensor = module(input_ids=torch.arange(12).reshape(1, 12)).logits
    return found


def dense(run: Run) -> torch.nn.Module:
    """The base with s B A of all phases added to its weights, computed here in float64."""
    model = load_model(run.plan)
    parameters = {name: each.detach() for name, each in model.module.named_parameters()}
    for name, part in model.layout.split(weights(run, 3)).items():
        parameters[name] = torch.from_numpy(part.copy())
    adapter = run.plan.model.adapter
    state = {}
    for name, tensor in parameters.items():
        if ".lora_" in name:
            continue
        total = tensor.double()
        for phase in ("default", "phase1", "phase2"):
            b = name.replace("base_layer.weight", f"lora_B.{phase}.weight")
            if b != name:
                a = b.replace("lora_B", "lora_A")
                total = total + adapter.alpha / adapter.rank * parameters[b].double() @ parameters[a].double()
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        state[plain] = total.float()
    module = load_model(tiny()).module
    module.load_state_dict(state, strict=False)
    return module


def test_the_saved_model_is_one_adapter_that_adds_up_all_phases(masked: Run, tmp_path: Path) -> None:
    expected, before = logits(dense(masked)), logits(load_model(tiny()).module)
    folder = masked.folder / "final"
    saved = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert saved.peft_config["default"].r == 6
    torch.testing.assert_close(logits(saved), expected, rtol=0, atol=1e-6)
    assert float((expected - before).abs().max()) > 1e-4
    digest = final(masked)
    for merge in (True, False):
        out = tmp_path / str(merge)
        write_model(folder, out, out, masked.plan.model, digest, merge=merge)
        torch.testing.assert_close(logits(load_saved(out)[0]), expected, rtol=0, atol=1e-6)


def test_the_clear_twin_has_the_same_bits_also_where_it_stopped(masked: Run, tmp_path: Path) -> None:
    party = Run(tmp_path, *CLEAR).stop_at(
        lambda event: isinstance(event, RoundDone) and event.round == 1,
        lambda event: isinstance(event, SiteAnswered) and event.round == 2,
    )
    assert final(party) == final(masked)


# Privacy


def test_unit_site_clips_the_update_of_the_phase(tmp_path: Path) -> None:
    federation = Federation(tmp_path, tiny(*REDRAWN, *CENTRAL, "local.learning_rate=50"))
    plan, parts, site = federation.plan, parts_of(federation.plan, federation.layout), federation.joined()
    for number in (1, 2):
        sent = whole(site.contribute(federation.request(number=number)))
        coded = training_layout(plan, parts.of(number).size, parts.largest)
        norm = float(np.linalg.norm(coded.open(sent).mean))  # in clipping norms
        assert norm == pytest.approx(1, abs=1e-3)


def test_a_private_run_noises_the_factors_of_the_phase_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, *REDRAWN, *SKELLAM, "model.adapter.redraw=2", "server.keep_checkpoints=9")
    outcome = run.go()
    parts = parts_of(run.plan, load_model(run.plan).layout)
    terms = terms_of(run.plan, parts.largest)
    assert terms is not None
    assert outcome.epsilon == pytest.approx(terms.epsilon(3), rel=1e-9)
    for number, phase in enumerate((0, 0, 1), 1):
        moved = np.flatnonzero(weights(run, number) != weights(run, number - 1))
        span = parts.spans[phase]
        assert moved.size > 0.5 * span.size
        assert span.start <= moved[0]
        assert moved[-1] < span.stop


def test_gradients_of_single_records_are_those_of_the_phase_by_both_methods(tmp_path: Path) -> None:
    """In the second phase; Opacus hooks the trained layers, beside the frozen ones of the first phase."""
    federation = Federation(tmp_path, tiny(*REDRAWN, *RECORD, "privacy.windows=1"))
    site = federation.joined()
    sequences = site._prepared(site._load(federation.plan, b"")).train
    start = np.random.default_rng(0).normal(0, 0.01, federation.layout.size).astype(np.float32)
    updates = []
    for method in ("reference", "opacus"):
        plan = tiny(*REDRAWN, *RECORD, "privacy.windows=1", f"privacy.method={method}")
        trainer = PrivateTrainer(plan, load_model(plan), torch.device("cpu"))
        assert trainer.method.name == method
        noise = NoiseStream.from_declared_seed(5)
        updates.append(trainer.train(start, sequences, round=2, noise=noise, noise_multiplier=1e-6).vector)
    span = parts_of(federation.plan, federation.layout).of(2)
    np.testing.assert_allclose(updates[0], updates[1], rtol=0, atol=1e-6)
    assert np.abs(span.of(updates[0])).max() > 1e-4
    span.of(updates[0])[:] = 0
    assert not updates[0].any()


# What is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.adapter.scheme=lora"], "only valid with"),
        (["model.adapter.redraw=3"], "1 to 2 for 3 rounds"),
        (["run.rounds=1000"], "16 to 999 for 1000 rounds"),
        (["local.optimizer_state=keep"], "trains another factor in each phase"),
        (["aggregation.compression={}", "aggregation.ring_bits=8"], "scales and remainders"),
        (["cohort.mode=async", "aggregation.secure=false"], "different parts of the model"),
        (["aggregation.fragments=2"], "a run has one"),
        (["data.task=classify", 'data.classes=["no", "yes"]'], "is of no phase"),
        (
            ["local.control_variates=true", "local.optimizer=sgd", "aggregation.weighting=uniform"],
            "c follows",
        ),
    ],
)
def test_what_does_not_fit_phases_is_refused(settings: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        tiny(*REDRAWN, *settings)


def test_a_site_with_a_mesh_refuses() -> None:
    with pytest.raises(ModelError, match=r"because model\.adapter\.redraw is set"):
        mesh_for(tiny(*REDRAWN), MeshSection(shard=2), "cpu")
