"""Models: the same on every party, refused where they do not fit, and saved so that transformers and PEFT read them."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cloister.lm.model import model as model_module
from cloister.lm.model.model import (
    Counts,
    LanguageModel,
    count_parameters,
    device_for,
    load_model,
    save_pretrained,
    seeded,
)
from cloister.lm.model.schedule import Schedule
from cloister.lm.output.generate import generate
from cloister.lm.tasks.auto import CAUSAL
from cloister.protocol.errors import ModelError, StorageError, UpdateError
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse
from cloister.tests.tools.raises import raises

# PEFT asks transformers 5.23 for a property under the name that transformers is phasing out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SITE = [
    "privacy.unit=site",
    "privacy.noise_multiplier=1.0",
    "aggregation.weighting=uniform",
    "server.evaluation=none",
]
LLAMA = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}


def plan_of(
    kind: str = "llama", scheme: str = "full", *overrides: str, config: dict[str, Any] | None = None
) -> Plan:
    config = config if config is not None else (LLAMA if kind == "llama" else SIZES)
    name = kind if "/" in kind or kind.startswith(".") else f"builtin:{kind}"
    settings = [f"model.name={json.dumps(name)}", f"model.adapter.scheme={scheme}", "data.sequence_length=32"]
    if name.startswith("builtin:"):
        settings += [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    adapter = [] if scheme == "full" else ["model.adapter.rank=4"]
    return parse("", [*settings, *adapter, *overrides])


def some_tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module.eval()(input_ids=some_tokens()).logits
    return found


def moved(model: LanguageModel, seed: int = 0) -> np.ndarray:
    """A vector some way from the model's own."""
    start = model.layout.flatten(model.module)
    return start + 0.05 * np.random.default_rng(seed).standard_normal(start.shape, dtype=np.float32)


# --- the same everywhere ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["full", "ffa-lora", "rolora", "lora"])
def test_every_party_loads_the_same_weights_and_no_random_state_is_touched(scheme: str) -> None:
    plan = plan_of("llama", scheme)
    torch.manual_seed(1)
    first = load_model(plan)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3)), "loading drew from the process's generator"
    torch.manual_seed(99)
    second = load_model(plan)
    pairs = zip(first.module.named_parameters(), second.module.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)
    assert first.layout == second.layout
    other = load_model(plan_of("llama", scheme, "run.seed=1"))
    pairs = zip(first.module.named_parameters(), other.module.named_parameters(), strict=True)
    differing = [a for (a, p), (_, q) in pairs if not torch.equal(p, q)]
    assert any("q_proj" in name for name in differing)
    assert (scheme == "full") or any("lora_A" in name for name in differing)


def test_seeded_draws_depend_on_their_parts_alone() -> None:
    def draw(*parts: str | int) -> float:
        with seeded(*parts):
            return float(torch.rand(()))

    assert draw("a", 1) == draw("a", 1)
    assert len({draw("a", 1), draw("a", 2), draw("b", 1), draw("a", 1, 2), draw("a", 2, 1)}) == 5


# --- what is built ----------------------------------------------------------------------------------------------------


def test_a_builtin_model_takes_its_vocabulary_from_the_tokenizer() -> None:
    model = load_model(plan_of())
    config: Any = model.module.config
    assert config.vocab_size == 264  # 258 rounded up to a multiple of 8
    assert config.eos_token_id == model.tokenizer.eos_token_id
    assert config.pad_token_id == model.tokenizer.pad_token_id
    assert config.use_cache is False
    assert all(p.dtype == torch.float32 for p in model.module.parameters())
    assert model.layout.size == sum(p.numel() for p in model.module.parameters())


def test_attention_is_the_fused_one_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = load_model(plan_of()), []
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        return attention(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    model.module(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert len(calls) == SIZES["num_hidden_layers"]


def test_tied_weights_lie_once_in_the_layout() -> None:
    model = load_model(plan_of("gpt2"))
    names = [name for name, _ in model.module.named_parameters()]
    assert sorted(names) == list(model.layout.names)
    assert "transformer.wte.weight" in model.layout.names
    assert "lm_head.weight" not in model.layout.names
    model.layout.scatter(moved(model), model.module)
    module: Any = model.module
    assert module.lm_head.weight is module.transformer.wte.weight


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "bert"])
def test_a_builtin_model_is_causal(kind: str) -> None:
    config = SIZES | ({"num_key_value_heads": 2} if kind == "qwen3" else {})
    model = load_model(plan_of(kind, config=config))
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256
    with torch.no_grad():
        module = model.module.eval()
        here, there = module(input_ids=tokens).logits, module(input_ids=changed).logits
    torch.testing.assert_close(here[:, :8], there[:, :8])
    assert not torch.allclose(here[:, 8:], there[:, 8:])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["full", "ffa-lora", "rolora", "lora"])
def test_parameters_are_counted_without_weights(kind: str, scheme: str) -> None:
    plan = plan_of(kind, scheme)
    model = load_model(plan)
    everything = sum(p.numel() for p in model.module.parameters())
    summed = max(Schedule.of(plan, model.layout).of_round(number).size for number in (1, 2))
    assert count_parameters(plan) == Counts(everything, model.layout.size, summed)
    assert (summed < model.layout.size) == (scheme == "rolora")


def test_counting_a_model_larger_than_memory() -> None:
    plan = plan_of(config={"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126})
    total, trained, summed = count_parameters(plan)
    assert summed == trained
    assert total == trained > 10**11


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_ffa_lora_trains_b_alone() -> None:
    model = load_model(plan_of("llama", "ffa-lora"))
    assert all(name.endswith("lora_B.default.weight") for name in model.layout.names)
    assert len(model.layout.names) == 2 * 7
    trained = {name for name, p in model.module.named_parameters() if p.requires_grad}
    assert trained == set(model.layout.names)
    first = next(p for name, p in model.module.named_parameters() if "lora_A" in name)
    assert first.abs().max() > 0


def test_rolora_alternates() -> None:
    plan = plan_of("llama", "rolora")
    model = load_model(plan)
    assert len(model.layout.names) == 2 * 2 * 7
    for round, half in [(1, "lora_B"), (2, "lora_A"), (3, "lora_B")]:
        trained = model.trainable(Schedule.of(plan, model.layout).of_round(round))
        assert len(trained) == 14
        assert all(half in name and p.requires_grad for name, p in trained)
        assert sum(p.requires_grad for p in model.module.parameters()) == 14


@pytest.mark.parametrize("scheme", ["full", "ffa-lora", "lora"])
def test_other_schemes_train_all_of_the_layout_in_every_round(scheme: str) -> None:
    plan = plan_of("llama", scheme)
    model = load_model(plan)
    for round in (1, 2):
        assert Schedule.of(plan, model.layout).of_round(round) is model.layout
    assert tuple(name for name, _ in model.trainable()) == model.layout.names


def test_named_targets() -> None:
    model = load_model(plan_of("llama", "lora", "model.adapter.targets=['q_proj', 'v_proj']"))
    assert {name.split(".")[-4] for name in model.layout.names} == {"q_proj", "v_proj"}


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_full_model_is_read_by_transformers(kind: str, tmp_path: Path) -> None:
    plan = plan_of(kind)
    model = load_model(plan)
    vector = moved(model)
    save_pretrained(model, vector, tmp_path / "deep" / "final")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "final")
    np.testing.assert_array_equal(model.layout.flatten(model.module), vector)
    assert torch.equal(logits(read), logits(model.module))
    assert read.config.use_cache is True
    config: Any = model.module.config
    assert config.use_cache is False
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "deep" / "final")
    assert tokenizer.decode(tokenizer("Grüße, 世界")["input_ids"]) == "Grüße, 世界"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["final"]
    again = load_model(plan_of(str(tmp_path / "deep" / "final")))
    np.testing.assert_array_equal(again.layout.flatten(again.module), vector)
    assert count_parameters(plan_of(str(tmp_path / "deep" / "final"))) == Counts(
        vector.size, vector.size, vector.size
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["ffa-lora", "lora"])
def test_an_adapter_of_a_fresh_model_is_read_by_peft(kind: str, scheme: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel

    model = load_model(plan_of(kind, scheme))
    save_pretrained(model, moved(model), tmp_path / "final")
    expected = logits(model.module)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final")), expected)
    moved_folder = (tmp_path / "final").rename(tmp_path / "elsewhere")
    base = AutoModelForCausalLM.from_pretrained(moved_folder / "base")
    assert not torch.equal(logits(base), expected)
    assert torch.equal(logits(PeftModel.from_pretrained(base, moved_folder)), expected)
    generate(moved_folder, "The", max_new_tokens=2)
    model.trainable()
    assert torch.equal(logits(model.module), expected), "saving disturbed the model"


def test_an_adapter_of_a_folder_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import AutoPeftModelForCausalLM

    base = load_model(plan_of())
    save_pretrained(base, moved(base), tmp_path / "base-model")
    monkeypatch.chdir(tmp_path)
    model = load_model(plan_of("./base-model", "ffa-lora"))
    save_pretrained(model, moved(model), Path("final"))
    monkeypatch.chdir("/")
    assert not (tmp_path / "final" / "base").exists()
    read = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "final")
    assert torch.equal(logits(read), logits(model.module))


def test_saving_replaces_and_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(plan_of())
    first, second = moved(model, 1), moved(model, 2)
    final = tmp_path / "final"
    save_pretrained(model, first, final)
    (final / "stale").touch()
    save_pretrained(model, second, final)
    assert not (final / "stale").exists()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model.module, "save_pretrained", refuse)
    with raises(StorageError, tmp_path / "final", says="No space left"):
        save_pretrained(model, first, final)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    read = load_model(plan_of(str(final)))
    np.testing.assert_array_equal(read.layout.flatten(read.module), second)


def test_a_vector_of_another_model_is_not_saved(tmp_path: Path) -> None:
    model = load_model(plan_of())
    with pytest.raises(UpdateError):
        save_pretrained(model, np.zeros(3, np.float32), tmp_path / "final")
    assert not any(tmp_path.iterdir())


# --- generation -------------------------------------------------------------------------------------------------------


def test_generation_repeats_itself_and_stays_in_the_vocabulary(tmp_path: Path) -> None:
    model = load_model(plan_of())
    vector = model.layout.flatten(model.module)
    parts = model.layout.split(vector)
    parts["lm_head.weight"][256:] = 10 * parts["lm_head.weight"][:1]  # tempt it with what is no byte
    save_pretrained(model, vector, tmp_path / "final")

    def told(prompt: str = "The", **options: Any) -> str:
        return generate(tmp_path / "final", prompt, **({"max_new_tokens": 12} | options))

    torch.manual_seed(5)
    sampled = told(seed=3)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    assert sampled.startswith("The")
    assert sampled == told(seed=3)
    assert sampled != told(seed=4)
    greedy = told(temperature=0)
    assert greedy == told(temperature=0, seed=9)
    tokens: Any = model.tokenizer("The")["input_ids"]
    model.module.eval()
    while len(tokens) < 3 + 12:
        with torch.no_grad():
            row = model.module(input_ids=torch.tensor([tokens])).logits[0, -1, :258]
        tokens.append(int(row.argmax()))
        if tokens[-1] == model.tokenizer.eos_token_id:
            break
    assert greedy == f"The{model.tokenizer.decode(tokens[3:], skip_special_tokens=True)}"
    told("")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x" * 60, {"max_new_tokens": 10}, "prompt"),
    ],
)
def test_generation_refuses(tmp_path: Path, prompt: str, options: dict[str, Any], field: str) -> None:
    model = load_model(plan_of())
    save_pretrained(model, moved(model), tmp_path / "final")
    with raises(ModelError, field):
        generate(tmp_path / "final", prompt, **options)
    with raises(ModelError, "model", says="saved model"):
        generate(tmp_path / "none", prompt)


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(plan: Plan) -> str:
    """The line that loading gives; counting gives the same."""
    with pytest.raises(ModelError) as loading:
        load_model(plan)
    with pytest.raises(ModelError) as counting:
        count_parameters(plan)
    assert str(loading.value) == str(counting.value)
    assert "\n" not in str(loading.value)
    return str(loading.value)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral", "phi3"])
def test_a_plan_without_a_configuration_has_a_model_that_is_trained_at_once(kind: str) -> None:
    assert count_parameters(parse(f"model.name = 'builtin:{kind}'")).parameters < 10**6


def test_an_unknown_type() -> None:
    line = refusal(plan_of("lama"))
    assert line.startswith("model.name is 'builtin:lama'")
    assert "builtin:llama" in line


def test_an_unknown_field_of_the_configuration() -> None:
    line = refusal(plan_of(config={"hiden_size": 32}))
    assert line.startswith("model.config.hiden_size is 32")
    assert "did you mean hidden_size?" in line


def test_the_vocabulary_is_not_the_plans_to_choose() -> None:
    assert refusal(plan_of(config={"vocab_size": 300})).startswith("model.config.vocab_size")


@pytest.mark.parametrize(
    ("kind", "config", "told"),
    [
        ("llama", {"hidden_size": 30, "num_attention_heads": 4}, "30"),
        ("gpt2", {"hidden_size": 30, "num_attention_heads": 4}, "30"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
        ("gpt2", {"num_hidden_layers": 1.5}, "float"),
        ("llama", LLAMA | {"num_key_value_heads": 3}, "divisor of num_attention_heads = 4"),
        ("llama", LLAMA | {"hidden_act": "nothing"}, "nothing"),
        ("gpt2", SIZES | {"hidden_size": -4}, "-4"),
    ],
)
def test_an_inconsistent_configuration(kind: str, config: dict[str, Any], told: str) -> None:
    line = refusal(plan_of(kind, config=config))
    assert line.startswith("model.config")
    assert told in line


def test_a_configuration_that_only_the_forward_pass_contradicts() -> None:
    with raises(ModelError, "model.config"):
        load_model(plan_of(config=LLAMA | {"head_dim": 7}))  # rotary embeddings turn pairs


@pytest.mark.parametrize("unit", [[], SITE], ids=["none", "site"])
def test_a_model_that_trains_in_training_mode_alone_is_refused(unit: list[str]) -> None:
    """Else, under unit `site`, each update would be zeros with noise, and the run would say nothing."""
    small = {"axial_pos_embds": False, "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8}
    with raises(ModelError, "model.name"):
        load_model(plan_of("reformer", "full", *unit, config=small))


def test_the_check_of_training_leaves_no_gradient() -> None:
    parameters = list(load_model(plan_of()).module.parameters())
    assert all(each.requires_grad and each.grad is None for each in parameters)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sequences_longer_than_the_positions(kind: str) -> None:
    line = refusal(plan_of(kind, "full", "data.sequence_length=65"))
    assert line.startswith("data.sequence_length is 65: expected at most the 64 positions")
    assert "max_position_embeddings" in line


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        ("['q_porj']", "did you mean q_proj?"),
        ("['q_proj', 'nope']", "'nope'"),
        ("['embed_tokens']", "'embed_tokens'"),
        ("['input_layernorm']", "'input_layernorm'"),
        ("['all-linear', 'q_proj']", "all-linear alone"),
        ("[]", "all-linear, or some of"),
    ],
)
def test_targets_that_are_no_linear_layers(targets: str, told: str) -> None:
    line = refusal(plan_of("llama", "lora", f"model.adapter.targets={targets}"))
    assert line.startswith("model.adapter.targets")
    assert told in line


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "expected an existing folder" in refusal(plan_of(str(tmp_path / "none")))
    (tmp_path / "file").touch()
    assert "expected an existing folder" in refusal(plan_of(str(tmp_path / "file")))


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert "config.json" in refusal(plan_of(str(tmp_path)))


@pytest.mark.parametrize(
    "content",
    ['{"model_type": "llama", ', "[]", "{}", '{"model_type": "none-such"}', '{"model_type": "vit"}'],
)
def test_a_configuration_that_is_not_one(tmp_path: Path, content: str) -> None:
    save_pretrained(model := load_model(plan_of()), moved(model), tmp_path / "final")
    (tmp_path / "final" / "config.json").write_text(content)
    assert refusal(plan_of(str(tmp_path / "final"))).startswith("model.name is")


def test_code_in_a_model_folder_is_never_run(tmp_path: Path) -> None:
    save_pretrained(model := load_model(plan_of()), moved(model), tmp_path / "final")
    (tmp_path / "final" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    path = tmp_path / "final" / "config.json"
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "own", "auto_map": auto_map}))
    assert refusal(plan_of(str(tmp_path / "final"))).startswith("model.name is")
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_cut_off_or_not_all_there(tmp_path: Path) -> None:
    from safetensors.torch import load, save_file

    save_pretrained(model := load_model(plan_of()), moved(model), tmp_path / "final")
    plan, path = plan_of(str(tmp_path / "final")), tmp_path / "final" / "model.safetensors"
    whole = path.read_bytes()
    tensors = load(whole)
    path.write_bytes(whole[: len(whole) // 2])
    with raises(ModelError, "model.name", says="a complete"):
        load_model(plan)
    absent = "model.layers.1.mlp.up_proj.weight"
    save_file({name: t for name, t in tensors.items() if name != absent}, path, metadata={"format": "pt"})
    with raises(ModelError, "model.name", says=absent):
        load_model(plan)
    save_file(tensors | {absent: tensors[absent][:-1].clone()}, path, metadata={"format": "pt"})
    with raises(ModelError, "model.name"):
        load_model(plan)
    path.unlink()
    with raises(ModelError, "model.name"):
        load_model(plan)


def test_a_quantized_model(tmp_path: Path) -> None:
    save_pretrained(model := load_model(plan_of()), moved(model), tmp_path / "final")
    path = tmp_path / "final" / "config.json"
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantized))
    assert "not quantized" in refusal(plan_of(str(tmp_path / "final")))


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    save_pretrained(model := load_model(plan_of()), moved(model), tmp_path / "final")
    tokenizer = model.tokenizer
    tokenizer.add_tokens([f"<extra {i}>" for i in range(10)])
    tokenizer.save_pretrained(tmp_path / "final")
    line = refusal(plan_of(str(tmp_path / "final")))
    assert line.startswith("model.tokenizer is 'auto': expected ids below 264")


def test_a_hub_name_without_a_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    begin = time.monotonic()
    line = refusal(plan_of("some-owner/some-model"))
    assert time.monotonic() - begin < 5
    assert line.startswith("model.name is 'some-owner/some-model'")
    assert "cannot be reached" in line


def test_a_hub_name_in_the_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(model := load_model(plan_of()), moved(model), tmp_path / "final")
    asked: list[dict[str, Any]] = []
    real = AutoModelForCausalLM.from_pretrained

    def from_cache(name: str, **options: Any) -> Any:
        assert os.environ.pop("DISABLE_SAFETENSORS_CONVERSION"), "no service is asked to convert it"
        asked.append(options)
        return real(str(tmp_path / "final"), **options)

    monkeypatch.setattr(model_module, "on_hub", lambda *_, **__: False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "config.json")
    place = model_module.locate("owner/name", "v1")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_cache)
    model_module.from_pretrained(place, CAUSAL)
    assert asked[0]["local_files_only"] is True
    assert asked[0]["revision"] == "v1"
    assert asked[0]["trust_remote_code"] is False


def test_devices() -> None:
    assert device_for("cpu") == torch.device("cpu")
    assert device_for("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "gpu", "cpu:x", ""):
        with raises(ModelError, "device"):
            device_for(name)


def test_a_model_of_chats_is_asked_by_its_template(tmp_path: Path) -> None:
    model = load_model(plan_of("llama"))
    save_pretrained(model, model.layout.flatten(model.module), tmp_path / "final")
    turn = [{"role": "user", "content": "When?"}]
    asked = model.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    answer = generate(tmp_path / "final", "When?", chat=True, max_new_tokens=6, temperature=0)
    assert str(asked) != "When?"
    assert generate(tmp_path / "final", str(asked), max_new_tokens=6, temperature=0) == f"{asked}{answer}"


@pytest.mark.parametrize("how", [load_model, count_parameters, "run"])
def test_a_model_that_numbers_positions_from_the_padding_on_has_fewer(
    how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoBERTa's first position is that after the padding's id, 257. A record that is longer than the rest would end the
    training of its site, and so show that it is there."""

    def plan(positions: int) -> Plan:
        settings = [f"model.config.{key}={value}" for key, value in SIZES.items()]
        return parse(
            "",
            [
                *settings,
                "model.name=builtin:roberta",
                "model.config.intermediate_size=48",
                f"model.config.max_position_embeddings={positions}",
                "data.sequence_length=64",
            ],
        )

    load = load_model if how == "run" else how
    load(plan(258 + 64))
    if how == "run":
        monkeypatch.setattr(model_module, "_check_positions", lambda *_: None)
    with pytest.raises(ModelError) as refused:
        load(plan(258 + 63))
    assert (refused.value.field, refused.value.value) == ("data.sequence_length", 64)
