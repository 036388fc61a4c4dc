"""Models that write to their own weights and buffers in a pass: nothing of it reaches another unit, or an update."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BigBirdConfig, PreTrainedConfig, ReformerConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from cloister.clients.ranks.resident import Resident
from cloister.clients.training.dpsgd import PrivateTrainer, check_method
from cloister.lm.model import writes
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.model.writes import names_of
from cloister.lm.text.sequences import Sequences
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.errors import ModelError, PlanError, UpdateError
from cloister.protocol.messages.messages import EVALUATE
from cloister.protocol.plan.plan import MeshSection, Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.parties.federation import TINY, Federation, whole
from cloister.tests.tools.command import ran
from cloister.tests.tools.raises import raises

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
FORWARD: Any = LlamaMLP.forward
LENGTH = 12
NOTHING = torch.zeros(())
CONFIG = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**CONFIG, "num_key_value_heads": 1}
GEMMA_3N = {
    **LLAMA,
    "head_dim": 8,
    "num_kv_shared_layers": 1,
    "laurel_rank": 4,
    "vocab_size_per_layer_input": 264,
    "hidden_size_per_layer_input": 8,
}
IBERT = {**CONFIG, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "quant_mode": "true"}
MIXTRAL = {**LLAMA, "num_local_experts": 2}
RWKV = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 7, "attention_hidden_size": 16}
CLASSIFY = ("data.task=classify", 'data.classes=["a","b"]')
FFA = ("model.adapter.scheme=ffa-lora", "model.adapter.rank=2")
UNITS: dict[str, list[str]] = {
    "none": [],
    "site": ["unit=site", "noise_multiplier=1", "delta=1e-3", "trusted_coordinator=true"],
    "record": ["unit=record", "noise_multiplier=1", "delta=1e-3", "sampling_rate=1.0"],
}


def plan_of(kind: str, config: dict[str, Any], *overrides: str, unit: str = "record") -> Plan:
    settings = [f"model.config.{key}={value}" for key, value in config.items()]
    plain = ["aggregation.secure=false", "aggregation.weighting=uniform", "server.evaluation=none"]
    local = ["local.steps=1", f"data.sequence_length={LENGTH}"]
    privacy = [f"privacy.{setting}" for setting in UNITS[unit]]
    return parse("", [f"model.name=builtin:{kind}", *settings, *plain, *local, *privacy, *overrides])


def some(units: int, *, classes: int = 0) -> Sequences:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 60, (units, LENGTH)).astype(np.int32)
    labels = random.integers(0, classes, (units, 1)).astype(np.int32) if classes else tokens
    return Sequences(tokens, labels, None, 1, np.arange(units + 1))


def trained(plan: Plan, model: LanguageModel) -> np.ndarray[Any, Any]:
    """An update by three units, all of which are drawn."""
    start = model.layout.flatten(model.module)
    trainer, noise = PrivateTrainer(plan, model, CPU), NoiseStream.from_declared_seed(1)
    return trainer.train(start, some(3), round=1, noise=noise, noise_multiplier=1.0).vector


@pytest.mark.parametrize("scheme", [(), pytest.param(FFA, marks=pytest.mark.slow)], ids=["full", "ffa-lora"])
def test_what_a_pass_writes_reaches_no_update(scheme: tuple[str, ...]) -> None:
    """Gemma 3n clamps weights to 120: a coordinator that sends 1000 would learn from them that a unit was drawn."""
    plan = plan_of("gemma3n_text", GEMMA_3N, *scheme)
    model = load_model(plan)
    parameters = dict(model.module.named_parameters())
    clamped = {name for name in parameters if "prediction_coefs" in name and "lora" not in name}
    assert model.written == clamped
    for name in clamped:
        parameters[name].data.fill_(1000.0)
    assert 0 < np.abs(trained(plan, model)).max() < 1
    assert all(float((parameters[name].detach() - 1000).abs().max()) < 1 for name in clamped)


def test_a_unit_has_the_same_gradient_whatever_was_before_it() -> None:
    """I-BERT in integers keeps the ranges of activations in buffers. Its passes cannot be followed without values."""
    plan = plan_of("ibert", IBERT, *CLASSIFY)
    model = load_model(plan)
    assert model.written == names_of(model.module)
    trainer, data = PrivateTrainer(plan, model, CPU), some(6, classes=2)
    model.module.train()
    before = {name: each.clone() for name, each in model.module.state_dict().items()}
    with trainer.per_unit_gradients(model.trainable()) as gradients:
        (alone,), (*_, after) = (list(gradients(data, np.array(units))) for units in ([5], [0, 3, 5]))
    assert all(torch.equal(one, other) for one, other in zip(alone.gradients, after.gradients, strict=True))
    assert any(one.any() for one in alone.gradients)
    assert all(torch.equal(each, before[name]) for name, each in model.module.state_dict().items())


def of_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FORWARD(self, x) * (1 + self.state)
    if self.training:
        self.state.data = (x.detach().mean() * 5e4).clone()
    return made


def of_nothing(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FORWARD(self, x)
    if self.training:
        made = made if self.state is None else made * (1 + self.state)
        self.state = x.detach().mean() * 5e4
    return made


def of_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FORWARD(self, x) * (1 + self.state)
    if self.training and len(x) > 1:
        self.state.copy_(x.detach().mean() * 5e4)
    return made


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A Llama whose layers keep a trace of a pass in a buffer."""
    construct: Any = LlamaMLP.__init__
    forward = request.param

    def constructed(self: Any, *arguments: Any, **settings: Any) -> None:
        construct(self, *arguments, **settings)
        self.register_buffer("state", None if forward is of_nothing else torch.zeros(()))
        self.total = torch.zeros(())

    monkeypatch.setattr(LlamaMLP, "__init__", constructed)
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setattr(writes, "_KNOWN", {})


def of_an_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FORWARD(self, x) * (1 + getattr(self, "longest", 0.0))
    if self.training:
        self.longest = x.detach().mean().item() * 5e4
    return made


def of_a_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FORWARD(self, x) * (1 + getattr(self, "before", NOTHING))
    if self.training:
        self.before = x.detach().mean() * 5e4
    return made


def of_a_tensor_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = FORWARD(self, x) * (1 + self.total)
    if self.training:
        self.total += x.detach().mean() * 5e4
    return made


@pytest.mark.parametrize(
    ("remembering", "written"),
    [(of_data, 2), (of_rows, 2), (of_an_attribute, 25), (of_a_tensor, 0), (of_a_tensor_in_place, 0)],
    indirect=["remembering"],
)
def test_a_trace_of_a_unit_is_put_back(remembering: None, written: int) -> None:
    """A buffer gets other data, also where only passes of several rows give it some. Or an attribute has it: a number,
    so that passes cannot be followed, as those of rotary positions that grow, or a tensor, which is replaced or
    changed in place.
    """
    plan = plan_of("llama", LLAMA)
    model = load_model(plan)
    assert len(model.written) == written
    trainer, data = PrivateTrainer(plan, model, CPU), some(6)
    model.module.train()
    with trainer.per_unit_gradients(model.trainable()) as gradients:
        (alone,), (*_, after) = (list(gradients(data, np.array(units))) for units in ([5], [0, 3, 5]))
    assert all(torch.equal(one, other) for one, other in zip(alone.gradients, after.gradients, strict=True))


@pytest.mark.parametrize("remembering", [of_nothing], indirect=True)
def test_a_model_whose_passes_make_a_buffer_is_refused(remembering: None) -> None:
    with raises(ModelError, "model.name", says="an evaluation leaves as it is"):
        load_model(plan_of("llama", LLAMA))


@pytest.fixture
def processes() -> Iterator[tuple[Resident, Resident]]:
    """The memory of two processes of a site."""
    both = Resident(), Resident()
    yield both
    for each in both:
        each.close()


def with_records(folder: Path, records: list[dict[str, str]]) -> list[str]:
    """Settings of plans with these records, half of which sites hold out and evaluate on."""
    path = folder / "records.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    return ["data.held_out=0.5", "server.evaluation=sites", f"simulation.source={path}"]


CLAMPED = {**GEMMA_3N, "altup_coef_clip": 1e-3}


@pytest.mark.parametrize(
    ("kind", "config", "settings", "mesh"),
    [
        pytest.param("ibert", IBERT, CLASSIFY, MeshSection(), id="buffers"),
        pytest.param("gemma3n_text", CLAMPED, FFA, MeshSection(), id="frozen"),
        pytest.param(
            "gemma3n_text", CLAMPED, FFA, MeshSection(replicate=2), id="in ranks", marks=pytest.mark.slow
        ),
    ],
)
def test_an_evaluation_does_not_depend_on_whether_the_process_has_trained(
    kind: str,
    config: dict[str, Any],
    settings: tuple[str, ...],
    mesh: MeshSection,
    tmp_path: Path,
    processes: tuple[Resident, Resident],
) -> None:
    """Else a coordinator that leaves one site out of a round has its totals alone in the next evaluation's sum."""
    data = with_records(tmp_path, [{"text": f"record {n}", "label": "ab"[n % 2]} for n in range(80)])
    federation = Federation(tmp_path / "sites", plan_of(kind, config, *settings, *data, unit="none"))
    trained, absent = (federation.joined(resident=each, mesh=mesh, secure=False) for each in processes)
    with contextlib.suppress(AssertionError, UpdateError):  # a training that fails leaves its traces too
        trained.contribute(federation.request(model=federation.model * np.float32(50)))
    first, second = (  # of two rounds: a site keeps what it has made for one
        whole(site.contribute(federation.request(purpose=EVALUATE, number=number)))
        for number, site in enumerate((trained, absent), 1)
    )
    assert np.array_equal(first, second)


SMALL: dict[str, Any] = {"vocab_size": 264, "hidden_size": 16, "num_attention_heads": 2, "is_decoder": True}
BIG_BIRD = BigBirdConfig(
    **SMALL, intermediate_size=32, num_hidden_layers=2, block_size=2, num_random_blocks=1
)
REFORMER = ReformerConfig(
    **SMALL,
    attention_head_size=8,
    feed_forward_size=32,
    axial_pos_embds=False,
    attn_layers=["lsh", "lsh"],
    lsh_attn_chunk_length=4,
    num_buckets=4,
    max_position_embeddings=32,
)


@pytest.mark.parametrize("config", [BIG_BIRD, REFORMER], ids=["attributes", "draws"])
def test_an_evaluation_does_not_depend_on_earlier_ones(
    config: PreTrainedConfig, tmp_path: Path, processes: tuple[Resident, Resident]
) -> None:
    """Big Bird changes to attention without blocks, for good, when it sees a short row, such as a prompt with a choice.
    Reformer draws in evaluations too."""
    auto: Any = AutoModelForCausalLM  # partly untyped
    auto.from_config(config).save_pretrained(tmp_path / "model")
    asked = [
        "data.format=prompt",
        "data.task=choices",
        'data.choices=["yes","no"]',
        "data.sequence_length=32",
    ]
    model = [f"model.name={tmp_path / 'model'}", "model.tokenizer=bytes", "aggregation.secure=false"]
    records = [{"prompt": "?" * (1 + n % 3), "completion": ("yes", "no")[n % 2]} for n in range(80)]
    federation = Federation(tmp_path / "sites", parse("", [*model, *asked, *with_records(tmp_path, records)]))
    site = federation.joined(resident=processes[0], secure=False)
    first, second = (
        whole(site.contribute(federation.request(purpose=EVALUATE, number=number))) for number in (1, 2)
    )
    assert np.array_equal(first, second)


@pytest.mark.parametrize("unit", ["none", "site", pytest.param("record", marks=pytest.mark.slow)])
def test_a_model_whose_weights_an_evaluation_changes_is_refused(unit: str) -> None:
    """RWKV rescales them in the first evaluation after training, and back in the first training after it."""
    short = "data.sequence_length=2"  # it goes through tokens one by one
    with raises(ModelError, "model.name", says="rescale_every = 0"):
        load_model(plan_of("rwkv", RWKV, short, unit=unit))
    model = load_model(plan_of("rwkv", {**RWKV, "rescale_every": 0}, short, unit=unit))
    assert not model.written


def test_a_simulation_of_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model.name=builtin:rwkv", *(f"model.config.{key}={value}" for key, value in RWKV.items())]
    path = tmp_path / "plan.toml"
    path.write_text(TINY.replace(TINY[TINY.index("[model") : TINY.index("[data]")], ""))
    options = [each for setting in settings for each in ("--set", setting)]
    code, _, err = ran(capsys, "simulate", str(path), *options, "--out", str(tmp_path / "run"))
    assert code == 2
    assert "rescale_every = 0" in err


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("kind", "config"), [("llama", LLAMA), ("gemma3n_text", GEMMA_3N), ("mixtral", MIXTRAL)]
)
def test_loading_leaves_the_weights_as_they_began(
    kind: str, config: dict[str, Any], unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(kind, config, unit=unit)
    loaded = load_model(plan)
    monkeypatch.setattr("cloister.lm.model.model._check_runs", lambda *_: None)
    monkeypatch.setattr("cloister.lm.model.model._written", lambda *_: frozenset())
    fresh = load_model(plan).module.state_dict()
    assert all(torch.equal(each, fresh[name]) for name, each in loaded.module.state_dict().items())


def test_an_ordinary_model_writes_to_nothing_with_or_without_memory() -> None:
    for empty in (False, True):
        assert load_model(plan_of("llama", LLAMA), empty=empty).written == frozenset()
        assert len(load_model(plan_of("gemma3n_text", GEMMA_3N), empty=empty).written) == 2


def test_opacus_is_refused_for_a_model_that_writes() -> None:
    plan = plan_of("llama", LLAMA, "privacy.method=opacus")
    model = load_model(plan)
    check_method(plan, model)
    with raises(PlanError, "privacy.method", says="lm_head"):
        check_method(plan, LanguageModel(**{**vars(model), "written": frozenset({"lm_head.weight"})}))
