"""The language model of a plan: build or load it, add its adapter, lay it out, save it for `transformers`.

`load_model` gives every party the same model for the same plan: fresh weights and adapters are drawn from the plan's
public seed, without changing the process's own random state, and a parameter that is missing from a checkpoint is an
error, never silently initialised. The plan's adapter scheme selects what is trained:

- `full`: every parameter.
- `ffa-lora`: LoRA with A frozen at its public initial value, so that the mean of the B's is exact (Sun et al. 2024,
  "Improving LoRA in privacy-preserving federated learning").
- `rolora`: B and A in alternate rounds (`schedule.py`).
- `lora`: both at once (Hu et al. 2021); the mean of factors is not the factor of means.

A classifier (`lm/tasks/`) is the same with a head in the place of the output layer. The head is new where the
checkpoint has none for the plan's classes. It is trained with every scheme, as a whole and in every round, because no
factor of low rank could stand for what begins at random; its mean is exact.

Code that comes with a model repository is never run.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import shutil
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cloister.lm.model import frozen, saved
from cloister.lm.model.layout import Layout, Vector
from cloister.lm.model.origin import origin, plain
from cloister.lm.model.own import know
from cloister.lm.model.schedule import HEAD, LOOKED_AT, Schedule
from cloister.lm.model.writes import names_of, writes_of
from cloister.lm.tasks.auto import Auto, auto_of, auto_of_adapter
from cloister.lm.tasks.registry import task_of, tokenizer_of
from cloister.lm.text.tokenizer import looks_like_path, on_hub, read_tokenizer, tokenizer_digest
from cloister.protocol.errors import ModelError
from cloister.protocol.machine.storage import write_folder
from cloister.protocol.plan.plan import AdapterSection, ModelSection, Plan
from cloister.protocol.questions.kind import question_of
from cloister.protocol.questions.registry import kind_of

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BUILTIN = "builtin:"
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "d_kv": 24,
    "d_ff": 256,
}
"""Configuration of a `builtin:` model whose plan has none, of the fields that its type knows."""


@dataclass(frozen=True)
class LanguageModel:
    """The model of a plan's task, with its tokenizer and the layout of what is trained."""

    module: nn.Module
    """The transformers model, inside a PEFT model when the plan names an adapter; what is trained is float32, and a
    frozen base has the plan's precision (`frozen.py`)."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""
    layout: Layout
    """Layout of every parameter that some round trains."""
    section: ModelSection
    """The plan's section for it."""
    own_base: bool = False
    """Whether the weights under its adapter are not those of a named checkpoint."""
    written: frozenset[str] = frozenset()
    """The parameters and buffers that a pass writes to; all if it cannot be followed (`writes.py`)."""
    about: tuple[LanguageModel, ...] = ()
    """The models that a question is about, whose answer is then `module`."""

    def trainable(self, part: Layout | None = None) -> list[tuple[str, nn.Parameter]]:
        """Set `requires_grad` for what a round trains; return its names and parameters in layout order.

        Args:
            part: The part of the layout that the round trains (`schedule.py`), the rest of which is frozen; None: all.
        """
        parameters = dict(self.module.named_parameters())
        chosen = set((self.layout if part is None else part).names)
        for name in self.layout.names:
            parameters[name].requires_grad_(name in chosen)
        return [(name, parameters[name]) for name in self.layout.names if name in chosen]


def load_model(plan: Plan, base: Vector | None = None, *, empty: bool = False) -> LanguageModel:
    """Build or load the plan's model on the CPU: the same on every party whose `layout.source` is the same.

    Args:
        plan: The plan.
        base: Every parameter of the model without its adapter, in layout order; replaces the weights that the plan
            gives.
        empty: Where every parameter is trained, leave them without memory and values (device `meta`): each round's
            global model gives the values, and a rank needs memory for its part only. Buffers have their values.

    Raises:
        ModelError: the model does not exist, its files are incomplete, or it does not fit the plan or this machine.
        UpdateError: `base` is of another model.
    """
    if plan.question is not None:
        return _asked(plan)
    precision = plan.model.adapter.base_precision
    frozen.check_machine(precision)
    config, place = _configure(plan)
    auto, tokenizer = task_of(plan.data).auto, tokenizer_of(plan)
    _check_fits(plan, config, tokenizer)
    own = plan.model.name.startswith(BUILTIN) or base is not None
    module: nn.Module | None = None
    if empty and plan.model.adapter.scheme == "full":
        with _without_memory():
            module = _build(plan, config)
        if place is not None and _stored_buffers(module):
            module = None
    if module is None:
        with seeded("weights", plan.run.seed):
            if place is None:
                module = _build(plan, config)
            elif auto.head:
                module, new_head = _headed_from(place, config, auto)
                own = own or new_head
            else:
                module = from_pretrained(place, auto, config)
        if place is None or plan.privacy.unit != "none":
            _check_runs(plan, module, tokenizer)
        if base is not None:
            module.requires_grad_(True)
            Layout.of(module.named_parameters()).scatter(base, module)
    module, layout = _adapt(module, plan)
    written = _written(plan, module)
    layout = replace(layout, source=origin(plan.model, module, tokenizer, layout.names))
    own = frozen.lower(module, precision) or own
    return LanguageModel(module, tokenizer, layout, plan.model, own, written)


class _Answer(nn.Module):
    """What a question fills in: its answer, in place of a model's parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.answer = nn.Parameter(torch.zeros(count))


def _asked(plan: Plan, *, outlined: bool = False) -> LanguageModel:
    """What a question sums; and the models that it is about, which all sites have alike.

    Args:
        plan: The question.
        outlined: Load no weights.
    """
    kind, tokenizer = kind_of(plan), tokenizer_of(plan)
    module, about, source = _Answer(kind.count(plan)), list[LanguageModel](), ""
    layout = Layout.of(module.named_parameters())
    for name in (plan.model.name, *question_of(plan).others) if kind.of_model else ():
        section = plan.model.model_copy(update={"name": name})
        of = plan.model_copy(update={"question": None, "model": section})
        _check_head(of, "model.name" if name == plan.model.name else "question.others")
        about.append(outline(of) if outlined else load_model(of))
        if tokenizer_digest(about[-1].tokenizer) != tokenizer_digest(tokenizer):
            raise ModelError(
                "question.others",
                name,
                expected=f"a model with the tokenizer of {plan.model.name}: both are asked about the same labels",
            )
        source += "" if outlined else origin(section, about[-1].module, tokenizer, ())
    if question_of(plan).measure == "tokens":
        source = tokenizer_digest(tokenizer)
    return LanguageModel(module, tokenizer, replace(layout, source=source), plan.model, about=tuple(about))


def _check_head(plan: Plan, field: str) -> None:
    """Refuse to ask how a checkpoint does whose head would be new and random: an answer would tell nothing of it.

    Args:
        plan: The plan of the model that is asked about.
        field: Where the question names it.

    Raises:
        ModelError: it lacks the head.
    """
    from transformers import AutoConfig

    auto, (_, place) = task_of(plan.data).auto, _configure(plan)
    if place is None or not auto.head:
        return
    stored = AutoConfig.from_pretrained(place.name, **place.options())
    if auto_of(stored.architectures) is not auto:
        found = " or ".join(stored.architectures or ())
        raise ModelError(
            field,
            place.name,
            expected=f"a model with a trained head, a {auto.called}, and this is {found}",
            fix=f"name the model of a run with data.task = {plan.data.task!r}",
        )


class Counts(NamedTuple):
    """Numbers of parameters of a model."""

    parameters: int
    """All, with those of its adapter."""
    trained: int
    """Those that some round trains."""
    summed: int
    """Those that the largest of the first rounds trains and sums."""


def count_parameters(plan: Plan) -> Counts:
    """Count the parameters of the plan's model with its adapter; allocates no weights.

    Raises:
        ModelError: as `load_model`, for everything that can be checked without the weights.
    """
    model = outline(plan)
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    parts = Schedule.of(plan, model.layout).layouts(min(plan.run.rounds, LOOKED_AT))
    return Counts(parameters, model.layout.size, max(part.size for part in parts))


def outline(plan: Plan) -> LanguageModel:
    """The plan's model with its adapter, without memory: every parameter and buffer is on device `meta`, in float32.

    Raises:
        ModelError: as `load_model`, for everything that can be checked without the weights.
    """
    if plan.question is not None:
        return _asked(plan, outlined=True)
    config, _ = _configure(plan)
    tokenizer = tokenizer_of(plan)
    _check_fits(plan, config, tokenizer)
    with torch.device("meta"):
        module, layout = _adapt(_build(plan, config), plan)
    return LanguageModel(module, tokenizer, layout, plan.model)


def configuration(plan: Plan) -> PreTrainedConfig:
    """The configuration of the plan's model.

    Raises:
        ModelError: the model does not exist, or its configuration does not fit the plan.
    """
    return _configure(plan)[0]


def device_for(name: str) -> torch.device:
    """The device that `auto` (the first GPU, else the CPU) or a torch device name such as `cuda:1` means.

    Raises:
        ModelError: this machine has no such device.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda:0" if count else "cpu"
    present = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if name not in present and not (name == "cuda" and count):
        raise ModelError("device", name, expected=f"auto, or a device of this machine: {', '.join(present)}")
    return torch.device(name)


def takes_positions(module: nn.Module) -> bool:
    """Whether the forward pass takes `position_ids`; without them packed records attend to each other."""
    return "position_ids" in inspect.signature(plain(module).forward).parameters


def class_of(module: nn.Module) -> Auto:
    """The automatic class of a model."""
    # Sharding gives the class a new name, with the old one at its end.
    return auto_of([type(plain(module)).__name__])


@contextmanager
def seeded(*parts: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's random draws inside from `parts` alone; afterwards restore the random state from before.

    Covers the CPU's default generator, and that of `device` if it is a CUDA device.
    """
    digest = hashlib.sha256("/".join(["cloister", *map(str, parts)]).encode()).digest()
    seed = int.from_bytes(digest[:8], "big")
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


# --- where the model comes from ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A checkpoint that can be read: a folder, or a hub name at a commit."""

    name: str
    """Folder or hub name."""
    revision: str = "main"
    """Commit, branch or tag of a hub name."""
    local_files_only: bool = True
    """Whether the hub must not be asked, because the name is a folder or the hub cannot be reached."""

    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` for transformers and PEFT."""
        return {
            "revision": self.revision,
            "local_files_only": self.local_files_only,
            "trust_remote_code": False,
        }


def _configure(plan: Plan) -> tuple[PreTrainedConfig, Place | None]:
    """The configuration of the plan's model and the place of its weights: None for a fresh model."""
    section, own = plan.model, know(plan)
    if section.name.startswith(BUILTIN):
        return _builtin_config(plan, own), None
    place = locate(section.name, section.revision)
    from transformers import AutoConfig

    auto = task_of(plan.data).auto
    known, what = own or auto.types(), auto.called
    try:
        config = AutoConfig.from_pretrained(place.name, **place.options())
    except Exception as error:  # transformers raises many types for a file that it cannot read
        raise _no_model(section.name, f"a {what} of transformers ({short(error)})") from error
    if config.model_type not in known:
        raise _no_model(section.name, f"a {what} of transformers, but its type is {config.model_type}")
    if getattr(config, "quantization_config", None) is not None:
        raise _no_model(
            section.name,
            "a model that is not quantized; model.adapter.base_precision lowers the base under an adapter",
        )
    return _for_training(config, plan), place


def _builtin_config(plan: Plan, own: Mapping[str, str]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING, AutoConfig

    section, auto = plan.model, task_of(plan.data).auto
    types, what = own or auto.types(), auto.called
    kind = section.name.removeprefix(BUILTIN)
    if kind not in types:
        nearest = difflib.get_close_matches(kind, types, n=3) or [*own] or ["llama", "gpt2", "qwen3"]
        raise _no_model(
            section.name,
            f"builtin: followed by a {what} type of {plan.model.type or 'transformers'}",
            fix=f"did you mean {' or '.join(BUILTIN + name for name in nearest)}?",
        )
    cls = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    known |= {"rope_theta"} if "rope_parameters" in known else set()
    known -= {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "dtype"}
    known -= {"num_labels", "id2label", "label2id", "problem_type"}
    for key, value in section.config.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            raise ModelError(
                f"model.config.{key}",
                value,
                expected=f"a field that a plan may set in the configuration of {kind}",
                fix=f"did you mean {nearest[0]}?" if nearest else f"known fields: {', '.join(sorted(known))}",
            )
    tokenizer = tokenizer_of(plan)
    chosen: dict[str, Any] = {
        **(section.config or {key: value for key, value in SMALL.items() if key in known}),
        "vocab_size": -(-len(tokenizer) // 8) * 8,  # a multiple of 8 keeps the matrix products on fast paths
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        config = AutoConfig.for_model(kind, **chosen)
    except Exception as error:  # each of transformers' 200 model types raises its own types
        raise _inconsistent(section, error) from error
    return _for_training(config, plan)


def _for_training(config: PreTrainedConfig, plan: Plan) -> PreTrainedConfig:
    config.use_cache = False
    task_of(plan.data).configure(config, tokenizer_of(plan))
    return config


def locate(name: str, revision: str = "main") -> Place:
    """Find a checkpoint; if the hub cannot be reached within a few seconds, look only in its local cache.

    Raises:
        ModelError: the name is a folder without a model, or a hub name that neither the hub nor the cache has.
    """
    folder = Path(name).expanduser()
    if folder.exists() or looks_like_path(name):
        if not folder.is_dir():
            raise _no_model(name, "an existing folder with a model, or a hub name")
        if not (folder / "config.json").is_file():
            raise _no_model(name, "a folder that holds config.json, as save_pretrained writes")
        return Place(str(folder))
    if on_hub(name, kind="model", revision=revision, field="model.name", error=ModelError):
        return Place(name, revision, local_files_only=False)
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        raise _no_model(
            name,
            "an existing folder, or a name in the hub's local cache, because the hub cannot be reached",
            fix="download the model on a machine with a network, copy it here and give its folder",
        )
    return Place(name, revision)


# --- the module -------------------------------------------------------------------------------------------------------


def _build(plan: Plan, config: PreTrainedConfig) -> PreTrainedModel:
    try:
        return from_config(config, task_of(plan.data).auto)
    except Exception as error:  # see `_builtin_config`
        raise _inconsistent(plan.model, error) from error


@contextmanager
def _without_memory() -> Iterator[None]:
    """A context in which new parameters have no memory (device `meta`), one after the other; buffers are as always."""

    def emptied(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    replace: Any = emptied  # torch's type for such a hook has no result
    hook = register_module_parameter_registration_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def _stored_buffers(module: nn.Module) -> set[str]:
    """The buffers that a checkpoint has values of; the others are functions of the configuration."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return set(module.state_dict()) - parameters


def from_config(config: PreTrainedConfig, auto: Auto) -> PreTrainedModel:
    """A model of a class with fresh weights in float32."""
    return cast("PreTrainedModel", auto.cls.from_config(config, dtype=torch.float32))


def _headed_from(place: Place, config: PreTrainedConfig, auto: Auto) -> tuple[PreTrainedModel, bool]:
    """A model with a head on a checkpoint, and whether it is another model than that: without a head there, it is new.

    Raises:
        ModelError: the checkpoint has a head for other classes, or as `from_pretrained`.
    """
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(place.name, **place.options())
    if auto_of(stored.architectures) is not auto:
        return from_pretrained(place, auto, config, new_head=True), True
    names, classes = ([str(name) for name in (each.id2label or {}).values()] for each in (stored, config))
    unnamed = names == [f"LABEL_{index}" for index in range(len(classes))]
    if names != classes and not unnamed:
        raise ModelError(
            "data.classes",
            classes,
            expected=f"the classes for which {place.name} has a head, in their order: {', '.join(names)}",
            fix="set data.classes to them, or model.name to a model without a head",
        )
    module = from_pretrained(place, auto, config)
    other = unnamed or stored.get_text_config().pad_token_id != config.get_text_config().pad_token_id
    return module, other


def from_pretrained(
    place: Place, auto: Auto, config: PreTrainedConfig | None = None, *, new_head: bool = False
) -> PreTrainedModel:
    """Load a complete checkpoint in float32.

    Args:
        place: Where it is.
        auto: The class of the model.
        config: The configuration to give the model; None: the checkpoint's own.
        new_head: Whether the checkpoint may lack the head, which is then new.

    Raises:
        ModelError: the weights cannot be read, or a parameter is missing or has another shape.
    """
    # For a checkpoint on the hub without safetensors transformers would ask a service to convert it.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
    try:
        with no_progress_bars():
            module, info = auto.cls.from_pretrained(
                place.name, config=config, dtype=torch.float32, output_loading_info=True, **place.options()
            )
    except Exception as error:  # see `_configure`
        raise _no_model(place.name, f"a complete checkpoint of a {auto.called} ({short(error)})") from error
    if getattr(module, "_hf_peft_config_loaded", False):
        raise _no_model(
            place.name,
            "a model without an adapter of its own (adapter_config.json)",
            fix="merge the adapter into the model first: cloister export --form merged, or merge_and_unload() of PEFT",
        )
    missing = set(info["missing_keys"])
    head = {
        name for name, _ in module.named_parameters() if not name.startswith(f"{module.base_model_prefix}.")
    }
    absent = sorted(missing - head if new_head and head <= missing else missing)
    absent += sorted(str(key[0]) for key in info["mismatched_keys"])
    if absent or info.get("error_msgs"):
        named = ", ".join(absent[:3]) or short(info["error_msgs"][0])
        raise _no_model(
            place.name,
            f"a checkpoint with every parameter in its shape, but {max(len(absent), 1)} are not ({named})",
        )
    _own_memory(module)
    return cast("PreTrainedModel", module)


def _own_memory(module: nn.Module) -> None:
    """Give each parameter and buffer contiguous memory of its own, aligned by torch.

    A checkpoint's tensors are views of its file: of the file's alignment and strides, perhaps two of one memory, and
    with a mapped file they change as it does. All of that is in the file and not in the values, whose digest the sites
    of a sum compare (`origin.py`); but steps on two parameters of one memory are other steps, and products of other
    alignment round differently. Tied weights are one parameter, and stay so.
    """
    for each in (*module.parameters(), *module.buffers()):
        each.data = each.data.clone(memory_format=torch.contiguous_format)


def _check_fits(plan: Plan, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    builtin = plan.model.name.startswith(BUILTIN)
    if isinstance(longest, int) and 0 < longest < task_of(plan.data).longest:
        raise _too_long(plan, f"at most the {longest} positions of {plan.model.name}")
    # The largest id and not their number: with a gap, one record could have a token that the model does not know.
    largest = max(tokenizer.get_vocab().values(), default=-1) + 1
    if max(largest, len(tokenizer)) > text.vocab_size:
        raise ModelError(
            "model.tokenizer",
            plan.model.tokenizer,
            expected=f"ids below {text.vocab_size}, the tokens of {plan.model.name}, but they go up to "
            f"{max(largest, len(tokenizer)) - 1}",
        )
    heads, groups = (getattr(text, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if builtin and isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ModelError(
            "model.config.num_key_value_heads", groups, expected=f"a divisor of num_attention_heads = {heads}"
        )


def _check_runs(plan: Plan, module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run two tokens and a full row without padding through a model: many types detect an inconsistent configuration,
    or a row that they do not take, only here. In training one long record would end in an error, and the site with it.
    Where the plan trains without dropout, two tokens go back too: Reformer does that in training mode alone.
    """
    token, inputs = 0 if tokenizer.pad_token_id != 0 else 1, task_of(plan.data).inputs
    module.eval()
    try:
        with torch.no_grad():
            for length in (2, plan.data.sequence_length):
                module(**inputs(torch.full((1, length), token)))
    except Exception as error:  # see `_builtin_config`
        if length > 2:
            raise _too_long(plan, f"a length that {plan.model.name} takes ({short(error)})") from error
        raise _inconsistent(plan.model, error) from error
    if plan.privacy.dpsgd:
        return
    needs = [(each, each.requires_grad) for each in module.parameters()]
    try:
        module.requires_grad_(False)  # the gradients of all would take as much memory as the model
        cast("PreTrainedModel", module).get_input_embeddings().requires_grad_(True)
        module(**inputs(torch.full((1, 2), token))).logits.sum().backward()
    except Exception as error:  # each of transformers' 200 model types raises its own types
        expected = f"a model that trains without dropout, in torch's evaluation mode ({short(error)})"
        raise ModelError("model.name", plan.model.name, expected=expected) from error
    finally:
        module.zero_grad(set_to_none=True)
        for each, needed in needs:
            each.requires_grad_(needed)


def _written(plan: Plan, module: nn.Module) -> frozenset[str]:
    """`LanguageModel.written`; refuses models whose weights an evaluation changes, or whose training depends on it."""
    private = plan.privacy.dpsgd
    length, rows = (plan.data.sequence_length, plan.local.batch_size) if private else (2, 1)
    writes = writes_of(module, task_of(plan.data).inputs, length, rows=rows, again=private)
    if writes is None:
        return names_of(module)
    changed = sorted(writes.evaluation & {name for name, _ in module.named_parameters()})
    if changed or not writes.repeats:
        what = f"write to {changed[0]}" if changed else "change how it trains"
        raise ModelError(
            "model.name",
            plan.model.name,
            expected=f"a model that an evaluation leaves as it is, but its passes {what}",
            fix="set model.config.rescale_every = 0" if hasattr(module.config, "rescale_every") else "",
        )
    return writes.training | writes.evaluation


def _check_positions(plan: Plan, module: nn.Module) -> None:
    """Check the models that number positions from the padding's id on, such as RoBERTa, without running them."""
    for each in module.modules():
        if isinstance(table := getattr(each, "position_embeddings", None), nn.Embedding):
            positions = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
            if positions < plan.data.sequence_length:
                raise _too_long(
                    plan, f"at most the {positions} positions of {plan.model.name} after the padding's id"
                )


def _too_long(plan: Plan, expected: str) -> ModelError:
    fix = "raise model.config.max_position_embeddings or " if plan.model.name.startswith(BUILTIN) else ""
    return ModelError(
        "data.sequence_length",
        plan.data.sequence_length,
        expected=expected,
        fix=f"{fix}lower data.sequence_length",
    )


def _adapt(module: nn.Module, plan: Plan) -> tuple[nn.Module, Layout]:
    """Add the adapter, select the trained parameters, and lay them out."""
    _check_positions(plan, module)
    adapter = plan.model.adapter
    if adapter.scheme == "full":
        module.requires_grad_(True)
        return module, Layout.of(module.named_parameters())
    targets = _targets(module, adapter)
    from peft import LoraConfig, get_peft_model

    auto = task_of(plan.data).auto
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=cast(int, adapter.alpha),  # PEFT only divides it by the rank: a float works
        target_modules=targets,
        task_type=auto.peft,
        modules_to_save=heads_of(module) if auto.head else None,
        revision=None if plan.model.name.startswith(BUILTIN) else plan.model.revision,
    )
    with warnings.catch_warnings(), seeded("adapter", plan.run.seed):
        # PEFT warns that it sets its own switch for GPT-2's transposed layers, and it reads a deprecated property of
        # transformers. A user can act on neither warning.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False", category=UserWarning)
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
        )
        adapted = get_peft_model(cast("PreTrainedModel", module), config)
    trained = ".lora_B." if adapter.scheme == "ffa-lora" else ".lora_"
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(trained in name or HEAD in name)
    return adapted, Layout.of(adapted.named_parameters())


def heads_of(module: Any) -> list[str]:
    """The names of the modules of a model, without an adapter, outside of its base model that have parameters."""
    return [
        name
        for name, child in module.named_children()
        if name != module.base_model_prefix and any(True for _ in child.parameters())
    ]


def _targets(module: nn.Module, adapter: AdapterSection) -> str | list[str]:
    """PEFT's `target_modules`; every name must be a linear layer of the model."""
    from transformers.pytorch_utils import Conv1D

    if adapter.targets == ("all-linear",):
        return "all-linear"
    heads = tuple(heads_of(module)) if class_of(module).head else ()
    linear = {
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and name.partition(".")[0] not in heads
    }
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in adapter.targets:
        hit = {name for name, _ in module.named_modules() if name == target or name.endswith(f".{target}")}
        if not hit or not hit <= linear:
            nearest = difflib.get_close_matches(target, known, n=1)
            raise ModelError(
                "model.adapter.targets",
                target,
                expected=f"all-linear alone, or names of linear layers of the model ({', '.join(known)})",
                fix=f"did you mean {nearest[0]}?" if nearest else "",
            )
    if not adapter.targets:
        raise ModelError("model.adapter.targets", [], expected=f"all-linear, or some of {', '.join(known)}")
    return list(adapter.targets)


# --- a saved model ----------------------------------------------------------------------------------------------------


def load_saved(folder: Path) -> tuple[Any, Any]:
    """The model in a folder that `save_pretrained` has written, on the CPU in float32, and its tokenizer.

    Args:
        folder: A full model, or an adapter with its base in `folder/base` or named in its configuration.

    Raises:
        ModelError: the folder has no model or tokenizer, or a damaged one.
    """
    saved.check(folder)
    module: Any
    if (folder / saved.ADAPTER).is_file():
        from peft import PeftConfig, PeftModel

        config = PeftConfig.from_pretrained(str(folder))
        base = str(folder / "base") if (folder / "base").is_dir() else str(config.base_model_name_or_path)
        named = (getattr(config, "auto_mapping", None) or {}).get("base_model_class")
        auto = auto_of_adapter(cast("str | None", config.task_type), named)
        plain = from_pretrained(locate(base, config.revision or "main"), auto)
        with warnings.catch_warnings():
            # PEFT reads a deprecated property of transformers.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
            module = PeftModel.from_pretrained(plain, str(folder))
    elif folder.is_dir():
        place = locate(str(folder))
        stored = json.loads((folder / "config.json").read_bytes())
        module = from_pretrained(place, auto_of(stored.get("architectures")))
    else:
        raise ModelError("model", str(folder), expected="a folder with a saved model")
    return module, read_tokenizer("model", str(folder), "main", local=True)


# --- saving -----------------------------------------------------------------------------------------------------------


def save_pretrained(model: LanguageModel, vector: Vector, folder: Path) -> None:
    """Load `vector` into the model and save it with its tokenizer as `folder`, for `transformers` or PEFT.

    A full model is read by `AutoModelForCausalLM.from_pretrained(folder)`, an adapter by
    `AutoPeftModelForCausalLM.from_pretrained(folder)`; a model of another task by the classes of that task.
    For the adapter of a base that is no named checkpoint, or whose
    lower precision changed the checkpoint's values, the base is saved in `folder/base`, in float32 with the values that
    the run computed with, and the adapter's configuration names it by the absolute path of the final folder. If the
    folder has moved, `PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder/"base"), folder)` reads it.

    The folder is replaced as a whole (`protocol.machine.storage`), and has a record of its files (`saved.py`).

    Raises:
        StorageError: the disk is full or refuses the write; an existing folder is unchanged.
        UpdateError: the vector does not have the model's layout.
    """
    model.layout.scatter(vector, model.module)
    folder = folder.absolute()
    with no_progress_bars():
        write_folder(folder, lambda staging: _write(model, staging, folder))


def _write(model: LanguageModel, staging: Path, final: Path) -> None:
    module: Any = model.module
    module.config.use_cache = True  # a saved model is loaded for generation
    try:
        if model.section.adapter.scheme == "full":
            module.save_pretrained(staging)
        else:
            base = model.section.name
            if model.own_base:
                base = str(final / "base")
                _without_adapter(module).save_pretrained(staging / "base")
                model.tokenizer.save_pretrained(staging / "base")
            elif Path(base).expanduser().is_dir():
                base = str(Path(base).expanduser().absolute())
            module.peft_config["default"].base_model_name_or_path = base
            module.save_pretrained(staging, save_embedding_layers=False)
        model.tokenizer.save_pretrained(staging)
        for weights in staging.rglob("*.safetensors"):  # which are written for their owner alone
            shutil.copymode(staging / "tokenizer_config.json", weights)
        saved.record(staging)
    finally:
        module.config.use_cache = False


def _without_adapter(module: Any) -> PreTrainedModel:
    """The base model of a PEFT model, without its adapters, in float32; it shares the weights that are."""
    adapted = module.get_base_model()
    weights = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in frozen.in_float32(adapted).items()
        if ".lora_" not in name and HEAD not in name
    }
    with torch.device("meta"):
        plain = from_config(adapted.config, class_of(adapted))
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    return plain


def _no_model(name: str, expected: str, fix: str = "") -> ModelError:
    return ModelError("model.name", name, expected=expected, fix=fix)


def _inconsistent(section: ModelSection, error: Exception) -> ModelError:
    return ModelError(
        "model.config",
        dict(section.config),
        expected=f"a configuration that {section.name.removeprefix(BUILTIN)} can be built from ({short(error)})",
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars: many sites load at once, and a run shows its own progress."""
    from transformers.utils import logging as module

    logging: Any = module  # partly untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def short(error: object) -> str:
    """A message, or the name of an error without one, as one line of at most 200 characters."""
    return textwrap.shorten(str(error), 200, placeholder="...") or type(error).__name__
