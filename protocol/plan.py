"""The plan: the whole contract of a run, typed, checked when it is built, and hashed.

A plan is a TOML file with one section for each part of the contract. It is sound or it is refused: `load` and `parse`
either return a `Plan` whose sections agree with each other, or raise `PlanError` naming the field, its value, what was
expected and the fix. What belongs to one site alone (its data's path, its devices) is never in the plan.

`Plan.digest()` is what the parties agree on: SHA-256 over the canonical JSON of every section except `[simulation]`
and `[faults]`, which only say how one machine plays the federation.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from cloister.aggregation.graph import LARGEST, assumed, parameters, tolerated
from cloister.protocol.errors import ParameterError, PlanError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]

SIMULATED_PUBLIC = "simulation:public"
"""`server.evaluation` of a simulation that keeps public records apart (`simulation.public`)."""
NO_EVALUATION = "none"
"""`server.evaluation` of a run whose model nobody evaluates."""

SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6
"""Clipping norms between which float32 arithmetic has room on both sides for any gradient or update."""

SMALLEST_COHORT = 3
"""Fewest sites whose sum hides each of them from the others."""


class Section(BaseModel):
    """A part of the plan: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class RunSection(Section):
    """What the run is called, how long it goes on, and the seed of every public random choice."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run, used for its folder: letters, digits, dots, dashes."""
    rounds: Annotated[int, Field(ge=1, lt=2**31)] = 10
    """Number of rounds."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, cohorts, data order and rounding: public, never a source of secrets."""


class AdapterSection(Section):
    """Which parameters are trained and summed."""

    scheme: Literal["full", "ffa-lora", "rolora", "lora"] = "full"
    """`full`: every parameter; `ffa-lora`: LoRA with A frozen (exact under averaging); `rolora`: A and B in alternate
    rounds (exact); `lora`: A and B together (their averages are not the average of the products: approximate)."""
    rank: Count = 8
    """Rank of the LoRA factors."""
    alpha: Positive = 16.0
    """LoRA's scale is alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter: `all-linear`, or the names that PEFT takes as `target_modules`."""


class ModelSection(Section):
    """The language model, known to all parties."""

    name: Annotated[str, Field(min_length=1)] = "builtin:llama"
    """A folder or hub name that transformers can load, or `builtin:TYPE`: a fresh causal LM of that transformers
    model type (`llama`, `gpt2`, `qwen3`, ...), built from `config`."""
    revision: str = "main"
    """Revision of a hub model."""
    config: Mapping[str, int | float | bool | str] = Field(default_factory=dict)
    """Configuration of a `builtin:` model, by transformers' own field names; the vocabulary is set by the tokenizer."""
    tokenizer: Annotated[str, Field(min_length=1)] = "auto"
    """`auto` (the model's own; bytes for a `builtin:` model), `bytes`, or a folder or hub name."""
    adapter: AdapterSection = AdapterSection()
    """Which parameters are trained and summed."""


class DataSection(Section):
    """What a record looks like at every site and how it becomes token sequences."""

    format: Literal["text", "prompt", "messages"] = "text"
    """`text`: one text field; `prompt`: a prompt and a completion field; `messages`: a chat. Of the last two only the
    answers are learned."""
    text_field: str = "text"
    """Field that holds the text when format is `text`."""
    prompt_field: str = "prompt"
    """Field that holds the prompt when format is `prompt`."""
    completion_field: str = "completion"
    """Field that holds the completion when format is `prompt`."""
    messages_field: str = "messages"
    """Field that holds the list of {role, content} when format is `messages`."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens in a training sequence."""
    packing: bool = True
    """Fill sequences with several records; otherwise each record is cut and padded on its own."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of each site's records kept for evaluation and never trained on."""


class LocalSection(Section):
    """Training inside a site."""

    steps: Count = 20
    """Optimizer steps of a site in a round."""
    batch_size: Count = 16
    """Sequences in a micro-batch."""
    accumulation: Count = 1
    """Micro-batches whose gradients are averaged for an optimizer step."""
    learning_rate: Positive = 1e-3
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay, on parameters of two or more dimensions."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Local steps, counted over the whole run, in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Course of the learning rate after warm-up, over the whole run."""
    final_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    clip_norm: NonNegative = 1.0
    """L2 norm to which the gradient of a step is clipped; 0 does not clip."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """AdamW's moments at the start of a round: `reset`, or `keep` those of the site's last round (DiLoCo)."""
    proximal: NonNegative = 0.0
    """FedProx's mu: adds mu/2 ||w - w_global||^2 to the local loss."""
    sampler: Literal["auto", "shuffle", "poisson"] = "auto"
    """How a step's batch is drawn: `shuffle` (epochs), `poisson` (each record on its own, which record-level privacy
    assumes), or `auto`: `poisson` under record-level privacy, else `shuffle`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of forward and backward; `auto` is bfloat16 on a GPU and float32 on a CPU. Weights stay float32."""
    threads: Count = 1
    """CPU threads of a site's process; fixed here because it changes the last bits of a result."""


class CohortSection(Section):
    """Who takes part in a round, and when a round is given up."""

    sites: Count = 8
    """Sites in the federation."""
    fraction: Fraction = 1.0
    """Fraction of the sites drawn for each round."""
    quorum: Fraction = 0.75
    """Fraction of the cohort that must finish for a round to count."""
    deadline_s: Positive = 600.0
    """Seconds after which a site that has not answered is a dropout of the attempt."""
    attempts: Count = 3
    """Tries at one round before the run stops."""

    def size(self) -> int:
        """Sites in the cohort of a round."""
        return max(1, round(self.fraction * self.sites))

    def needed(self) -> int:
        """Sites of the cohort that must finish for the round to count."""
        return max(1, math.ceil(self.quorum * self.size()))

    def needed_to_evaluate(self) -> int:
        """Sites of the federation that must answer for an evaluation to count."""
        return max(1, math.ceil(self.quorum * self.sites))


class AggregationSection(Section):
    """How updates are summed."""

    secure: bool = True
    """Sum under masks, so that the coordinator learns the total alone; otherwise it sees every update."""
    colluders: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Largest fraction of a cohort that may collude with the coordinator against the other sites."""
    dropouts: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Largest fraction of a cohort that may drop out of a round without ending the attempt."""
    cipher: Literal["aes-256-ctr", "chacha20"] = "aes-256-ctr"
    """Keystream of the masks; ChaCha20 is faster on processors without AES instructions."""
    weighting: Literal["tokens", "uniform"] = "tokens"
    """Weight of a site in the mean: the tokens it learned from in the round, or 1."""
    ring_bits: Literal[16, 32] = 32
    """Updates are summed as integers modulo 2^ring_bits."""
    bound: Positive = 1.0
    """Largest absolute change of one parameter in one round that is carried; larger ones are clipped and counted."""


class AdaptiveSection(Section):
    """Adaptive clipping (Andrew et al. 2021): the clipping norm follows a quantile of the sites' update norms."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the sites whose update should not be clipped."""
    learning_rate: Positive = 0.2
    """Step of the logarithm of the clipping norm for each unit of distance from the quantile."""
    count_noise: Positive = 1.0
    """Standard deviation of the noise on the number of sites whose update was not clipped: it is paid for too."""


class PrivacySection(Section):
    """Differential privacy: what is protected, by how much noise, and how much may be spent."""

    unit: Literal["none", "record", "site"] = "none"
    """What the guarantee protects: `none` (there is no guarantee), one `record` of a site, or everything one `site`
    holds."""
    clip: Annotated[float, Field(ge=SMALLEST_CLIP, le=LARGEST_CLIP)] = 1.0
    """L2 norm C to which the gradient of a record, or the update of a site, is clipped; with `adaptive` the first."""
    noise_multiplier: Positive | None = None
    """Standard deviation of the noise on a sum of clipped terms, in units of `clip`."""
    target_epsilon: Positive | None = None
    """Epsilon of the whole run, from which the noise multiplier is calibrated; instead of `noise_multiplier`."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Delta: smaller than 1 over the number of units that are protected."""
    budget: Positive | None = None
    """Epsilon that may be spent; a round that would exceed it is not begun. None: `target_epsilon`, or no limit."""
    accountant: Literal["pld", "rdp"] = "pld"
    """How losses are composed: privacy loss distributions (tight), or Renyi divergences; Skellam noise has only RDP."""
    sampling_rate: Fraction | None = None
    """Unit `record`: probability with which each of a site's records is in a step's batch, on its own (Poisson)."""
    record: Literal["record", "window"] = "record"
    """Unit `record`: `record` is one record as the data has them; `window` is one sequence of
    `data.sequence_length` tokens cut from a text, and then a longer text counts as several."""
    windows: Count = 4
    """Unit `record`: most sequences of one long record that are learned from; their gradients are averaged."""
    method: Literal["auto", "reference", "opacus"] = "auto"
    """Unit `record`: per-record gradients one at a time (`reference`: right for every model), by Opacus (faster), or
    `auto`: by Opacus where it is right."""
    trusted_coordinator: bool = False
    """Unit `site`: the coordinator adds Gaussian noise to the sum, and is trusted to; otherwise each site adds its
    part of Skellam noise under the secure sum."""
    adaptive: AdaptiveSection | None = None
    """Unit `site`: let the clipping norm follow a quantile of the update norms."""


class PublicSection(Section):
    """Training on public text before the first round: by the coordinator, without privacy cost."""

    source: str = ""
    """Public records: a `builtin:` source, a file, a folder or a hub name; empty: no public training."""
    split: str = "train"
    """Split of a hub data set."""
    steps: Count = 250
    """Optimizer steps."""
    batch_size: Count = 16
    """Sequences in a step."""
    learning_rate: Positive = 3e-3
    """Peak learning rate of AdamW, with a tenth of the steps as warm-up and a cosine after that."""


class ServerSection(Section):
    """The coordinator's step on the mean update, and what it keeps."""

    optimizer: Literal["fedavg", "nesterov", "adam"] = "fedavg"
    """Optimizer of the pseudo-gradient: `fedavg` (SGD without momentum), `nesterov` (DiLoCo), `adam` (FedAdam)."""
    learning_rate: Positive = 1.0
    """Its learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of `nesterov`."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay rates of `adam`."""
    epsilon: Positive = 1e-3
    """Epsilon of `adam` (FedAdam's adaptivity)."""
    evaluation: str = ""
    """Source of public held-out records for the coordinator, `simulation:public` (see `simulation.public`), or `none`;
    empty: each site evaluates on its own held-out records, which no privacy unit allows."""
    evaluate_every: Count = 1
    """Rounds between evaluations; the initial and the last model are always evaluated."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept on disk; older ones are removed once a newer one is whole."""


class ProfileSection(Section):
    """How some of the simulated sites differ from the rest."""

    share: Fraction
    """Fraction of the sites with this profile, taken in order of their number."""
    speed: Fraction = 1.0
    """Speed of the site's hardware relative to this machine: at 0.5 local training takes twice as long."""
    slots: Count = 1
    """Worker slots the site takes while it works, as one with more of the machine to itself would."""


class SimulationSection(Section):
    """How one machine plays the federation; not part of the contract, and not in the digest."""

    source: str = "builtin:python-docs"
    """Records to distribute: `builtin:python-docs`, `builtin:python-stdlib`, a .txt/.jsonl/.json/.parquet file, a
    folder of such files, or a hub name. A single .txt file is distributed by its paragraphs, which end at blank lines
    (without blank lines: by its lines); in a folder each .txt file is one record."""
    split: str = "train"
    """Split of a hub data set."""
    partition: Literal["natural", "iid", "dirichlet", "size"] = "natural"
    """`natural`: whole groups of `field` to one site; `iid`: at random; `dirichlet`: label proportions per site drawn
    from Dirichlet(alpha); `size`: at random with site sizes proportional to 1, 2, 3, ..."""
    field: str = ""
    """Field that holds the group (`natural`) or label (`dirichlet`); empty: the source's own (`topic`, `package`)."""
    alpha: Positive = 0.5
    """Concentration of the Dirichlet partition: smaller is less even."""
    public: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the records that no site gets: the public records of `server.evaluation = "simulation:public"`."""
    noise_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Declared seed of all noise, so that a private simulation can be repeated: who has it can take the noise off, so
    nothing is then protected, and the report says so. None: secret noise."""
    workers_per_gpu: Count = 1
    """Worker processes placed on each GPU, where there are GPUs."""
    profiles: tuple[ProfileSection, ...] = ()
    """Sites that are slower or take more of the machine than the rest."""


class FaultsSection(Section):
    """Dropouts that a simulation makes, to see a plan under them; not part of the contract, nor in the digest.

    Each is the probability that a site of the cohort fails at that step of an attempt, drawn from the run's seed.
    """

    advertise: Probability = 0.0
    """Before it sends its keys."""
    share: Probability = 0.0
    """Before it sends its shares."""
    update: Probability = 0.0
    """Before its update has arrived."""
    confirm: Probability = 0.0
    """Before it signs the list of survivors."""
    unmask: Probability = 0.0
    """Before it reveals shares."""


class Plan(Section):
    """The contract of a run. Build it with `load`, `parse` or `from_json`, which check that it is sound."""

    run: RunSection = RunSection()
    """Name, length and seed."""
    model: ModelSection = ModelSection()
    """The language model."""
    data: DataSection = DataSection()
    """What a record is."""
    local: LocalSection = LocalSection()
    """Training inside a site."""
    cohort: CohortSection = CohortSection()
    """Who takes part."""
    aggregation: AggregationSection = AggregationSection()
    """How updates are summed."""
    privacy: PrivacySection = PrivacySection()
    """Differential privacy."""
    public: PublicSection = PublicSection()
    """Training on public text before the first round."""
    server: ServerSection = ServerSection()
    """The coordinator's step."""
    simulation: SimulationSection = SimulationSection()
    """How one machine plays the federation."""
    faults: FaultsSection = FaultsSection()
    """Dropouts that a simulation makes."""

    def digest(self) -> str:
        """SHA-256, in hex, over the canonical JSON of what the parties agree on (not `[simulation]` and `[faults]`)."""
        return self._digest

    def to_json(self) -> str:
        """The whole plan as canonical JSON; `from_json` reads it back to an equal plan."""
        return self._json

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy, unchecked, with a digest of its own."""
        copied = super().model_copy(update=update, deep=deep)
        for cached in ("_digest", "_json"):
            copied.__dict__.pop(cached, None)
        return copied

    @cached_property
    def _digest(self) -> str:
        agreed = self.model_dump(mode="json", exclude={"simulation", "faults"})
        return hashlib.sha256(_canonical(agreed)).hexdigest()

    @cached_property
    def _json(self) -> str:
        return _canonical(self.model_dump(mode="json")).decode()

    def most_tokens(self) -> int:
        """Largest number of tokens that one site can learn from in one round: the largest weight."""
        local = self.local
        return local.steps * local.batch_size * local.accumulation * self.data.sequence_length

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a plan from JSON and check it.

        Raises:
            PlanError: the first thing that is wrong with it.
        """
        try:
            plan = cls.model_validate_json(text)
        except ValidationError as error:
            raise _explain(error.errors(include_url=False)[0]) from error
        _check_sound(plan)
        return plan


def load(path: Path, overrides: Iterable[str] = ()) -> Plan:
    """Read the TOML plan at `path`, with `section.key=value` overrides on top, and check it.

    Raises:
        PlanError: the file is missing or no TOML, or the plan is not sound.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError("plan", str(path), expected="an existing TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError("plan", str(path), expected=f"a readable TOML file ({error})") from error
    if not text.strip():
        raise PlanError(
            "plan", str(path), expected="a TOML file with at least one section, and this one is empty"
        )
    return parse(text, overrides, origin=str(path))


def parse(text: str, overrides: Iterable[str] = (), *, origin: str = "plan") -> Plan:
    """Read a plan from TOML text, with `section.key=value` overrides on top, and check it.

    Raises:
        PlanError: it is no TOML, or not sound.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError("plan", origin, expected=f"valid TOML ({error})") from error
    for override in overrides:
        _override(tree, override)
    try:
        encoded = json.dumps(tree)
    except TypeError:
        raise PlanError(
            "plan", origin, expected="numbers, strings, booleans and lists, and no dates"
        ) from None
    return Plan.from_json(encoded)


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or len(keys) < 2 or not all(keys):
        raise PlanError("--set", override, expected="section.key=value, such as local.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: --set model.name=gpt2
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise PlanError("--set", override, expected=f"{key} to be a section of the plan")
        tree = below
    tree[keys[-1]] = value


def _check_sound(plan: Plan) -> None:
    """Refuse what each section allows alone but the sections do not allow together."""
    sites, bits = plan.cohort.sites, plan.aggregation.ring_bits
    if sites * 2 > 2 ** (bits - 1) - 1:
        raise PlanError(
            "aggregation.ring_bits",
            bits,
            expected=f"a ring in which the sum of {sites} sites cannot wrap",
            fix="set aggregation.ring_bits = 32",
        )
    if plan.aggregation.secure:
        _check_secure(plan)
    if plan.privacy.unit == "none":
        _check_not_private(plan)
    else:
        _check_private(plan)
    if (plan.server.evaluation == SIMULATED_PUBLIC) != (plan.simulation.public > 0):
        raise PlanError(
            "simulation.public",
            plan.simulation.public,
            expected=f"more than 0 just where server.evaluation is {SIMULATED_PUBLIC!r}, and that is "
            f"{plan.server.evaluation!r}",
        )
    if plan.model.config and not plan.model.name.startswith("builtin:"):
        raise PlanError(
            "model.config",
            dict(plan.model.config),
            expected="no configuration for a model that is loaded with its own",
            fix="remove [model.config] or use a builtin: model",
        )
    if plan.local.warmup_steps >= plan.run.rounds * plan.local.steps and plan.local.warmup_steps:
        raise PlanError(
            "local.warmup_steps",
            plan.local.warmup_steps,
            expected=f"fewer than the run's {plan.run.rounds * plan.local.steps} local steps",
            fix="lower local.warmup_steps or raise run.rounds",
        )
    if plan.model.adapter.scheme == "rolora" and plan.local.optimizer_state == "keep":
        raise PlanError(
            "local.optimizer_state",
            "keep",
            expected="reset with the adapter scheme rolora, whose trained factor changes every round",
            fix="set local.optimizer_state = 'reset'",
        )
    if plan.model.adapter.scheme == "rolora" and plan.server.optimizer != "fedavg":
        raise PlanError(
            "server.optimizer",
            plan.server.optimizer,
            expected="fedavg with the adapter scheme rolora: momentum would move the factor that is frozen",
            fix="set server.optimizer = 'fedavg'",
        )
    if plan.data.held_out == 0 and not plan.server.evaluation:
        raise PlanError(
            "data.held_out",
            0.0,
            expected="records to evaluate on",
            fix="set data.held_out = 0.1, or name public records in server.evaluation",
        )
    if sum(profile.share for profile in plan.simulation.profiles) > 1 + 1e-9:
        raise PlanError(
            "simulation.profiles",
            sum(profile.share for profile in plan.simulation.profiles),
            expected="shares that add up to at most 1",
        )


def _check_not_private(plan: Plan) -> None:
    """Refuse what only means something with a privacy unit: it would look like a guarantee, and there is none."""
    default = PrivacySection()
    for name in PrivacySection.model_fields:
        value = getattr(plan.privacy, name)
        if value != getattr(default, name):
            raise PlanError(
                f"privacy.{name}",
                value if not isinstance(value, Section) else "set",
                expected="nothing there without a privacy unit",
                fix="set privacy.unit = 'record' or 'site', or remove it",
            )
    if plan.local.sampler == "poisson":
        raise PlanError(
            "local.sampler",
            "poisson",
            expected="shuffle or auto without record-level privacy",
            fix="set local.sampler = 'auto'",
        )


def _check_private(plan: Plan) -> None:
    """Refuse a plan whose guarantee would not be what it says, or would be spent beside the ledger."""
    privacy, local = plan.privacy, plan.local
    record = privacy.unit == "record"
    given = [name for name in ("noise_multiplier", "target_epsilon") if getattr(privacy, name) is not None]
    if len(given) != 1:
        both = given or ["neither"]
        raise PlanError(
            "privacy",
            " and ".join(both),
            expected="either noise_multiplier or target_epsilon: one follows from the other",
            fix="keep one of them" if given else "set one of them; `cloister budget` shows what it means",
        )
    if privacy.budget is not None and privacy.target_epsilon is not None:
        raise PlanError(
            "privacy.budget",
            privacy.budget,
            expected="no budget beside target_epsilon, which is the budget",
            fix="remove privacy.budget",
        )
    if plan.aggregation.weighting != "uniform":
        raise PlanError(
            "aggregation.weighting",
            plan.aggregation.weighting,
            expected="uniform under privacy: a weight by tokens depends on the data, and breaks the sensitivity of the "
            "mean",
            fix="set aggregation.weighting = 'uniform'",
        )
    if not plan.server.evaluation:
        raise PlanError(
            "server.evaluation",
            "",
            expected="public records, or none, under privacy: losses on the sites' own records would be released "
            "without being paid for",
            fix="name public records in server.evaluation, or set server.evaluation = 'none'",
        )
    if record and privacy.sampling_rate is None:
        raise PlanError(
            "privacy.sampling_rate",
            expected="the probability with which a record is in a batch, and there is none",
            fix="set privacy.sampling_rate to the expected batch size over the records of a site",
        )
    if record and local.sampler == "shuffle":
        raise PlanError(
            "local.sampler",
            "shuffle",
            expected="poisson under record-level privacy: it is what the accountant assumes",
            fix="set local.sampler = 'auto'",
        )
    if not record and local.sampler == "poisson":
        raise PlanError("local.sampler", "poisson", expected="shuffle or auto where the unit is the site")
    if not record and privacy.sampling_rate is not None:
        raise PlanError(
            "privacy.sampling_rate",
            privacy.sampling_rate,
            expected="none where the unit is the site: cohorts are public, so drawing them amplifies nothing",
            fix="remove privacy.sampling_rate",
        )
    for name, default in (("record", "record"), ("windows", 4), ("method", "auto")):
        if not record and getattr(privacy, name) != default:
            raise PlanError(
                f"privacy.{name}", getattr(privacy, name), expected="nothing there where the unit is the site"
            )
    if record and privacy.record == "window" and plan.data.format != "text":
        raise PlanError(
            "privacy.record",
            "window",
            expected=f"record where data.format is {plan.data.format}: only a text can be cut into records",
            fix="set privacy.record = 'record'",
        )
    if not record and plan.model.adapter.scheme == "rolora":
        raise PlanError(
            "model.adapter.scheme",
            "rolora",
            expected="another where the unit is the site: its noise would move the factor that a round holds still",
            fix="set model.adapter.scheme = 'ffa-lora'",
        )
    if record and (privacy.trusted_coordinator or privacy.adaptive is not None):
        name = "trusted_coordinator" if privacy.trusted_coordinator else "adaptive"
        raise PlanError(
            f"privacy.{name}",
            "set",
            expected="it only where the unit is the site",
            fix=f"remove privacy.{name}",
        )
    if not record and not privacy.trusted_coordinator and not plan.aggregation.secure:
        raise PlanError(
            "aggregation.secure",
            False,
            expected="true where the unit is the site: the noise of one site alone is too little to protect its update",
            fix="set aggregation.secure = true, or privacy.trusted_coordinator = true where it really is",
        )


def _check_secure(plan: Plan) -> None:
    """Refuse a secure sum that would protect nobody, or whose threshold its own dropouts could not meet."""
    if plan.cohort.sites > LARGEST:
        raise PlanError(
            "cohort.sites",
            plan.cohort.sites,
            expected=f"up to {LARGEST} sites under the secure sum",
            fix="lower it, or set aggregation.secure = false where everybody may see every update",
        )
    for field, n in (("cohort.sites", plan.cohort.sites), ("cohort.fraction", plan.cohort.size())):
        if n < SMALLEST_COHORT:
            raise PlanError(
                field,
                plan.cohort.fraction if field == "cohort.fraction" else n,
                expected=f"a cohort of at least {SMALLEST_COHORT} sites under the secure sum, and this is {n}: "
                "of two, each could tell the other's update from the sum",
                fix="raise it, or set aggregation.secure = false where everybody may see every update",
            )
        try:
            parameters(n, tolerated(n, plan.aggregation.dropouts), assumed(n, plan.aggregation.colluders))
        except ParameterError as error:
            raise PlanError(error.field, error.value, expected=error.expected, fix=error.fix) from error


_UNSUMMABLE = ("flora", "fedex-lora", "hetlora", "stacked-lora", "residual-lora")
"""Adapter schemes from the literature that stack the sites' factors or need their residuals."""


def _canonical(value: object) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _explain(error: ErrorDetails) -> PlanError:
    """Turn pydantic's first complaint into one line in the plan's own words."""
    location = error["loc"]
    field = (
        "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
        or "plan"
    )
    if error["type"] == "extra_forbidden":
        return _unknown_key(tuple(str(part) for part in location))
    if error["type"] == "json_invalid":
        return PlanError("plan", expected=f"whole JSON in UTF-8 ({error['ctx']['error']})")
    value = error["input"]
    if field == "model.adapter.scheme" and value in _UNSUMMABLE:
        expected = f"a scheme that can be summed: {value} needs each site's own factors, which no sum gives"
        return PlanError(field, value, expected=expected, fix="set model.adapter.scheme = 'ffa-lora'")
    if field == "run.name" and error["type"] in ("string_pattern_mismatch", "string_too_short"):
        name = "letters, digits, dots, dashes, underscores, starting with a letter or digit"
        return PlanError(field, value, expected=name)
    # "Input should be a valid integer", "String should have at most 64 characters"
    message = re.sub(r"^\w+ should (be|have) ", "", error["msg"])
    message = re.sub(r"^a valid (?=(\w))", lambda match: "an " if match[1] in "aeiou" else "a ", message)
    if error["type"] == "missing":
        return PlanError(field, expected="a value, and there is none")
    if error["type"] == "model_type":
        return PlanError(field, value, expected="a section with keys of its own")
    return PlanError(field, value, expected=message[0].lower() + message[1:])


def _unknown_key(location: tuple[str, ...]) -> PlanError:
    known = dict(_keys(Plan, ()))
    section = tuple(part for part in location[:-1] if not part.isdigit())  # profiles are numbered
    here, name = known[section], location[-1]
    nearest = difflib.get_close_matches(name, here, n=1)
    elsewhere = [".".join((*path, name)) for path, names in known.items() if name in names]
    if nearest:
        fix = f"did you mean {'.'.join((*location[:-1], nearest[0]))}?"
    elif elsewhere:
        fix = f"did you mean {elsewhere[0]}?"
    else:
        fix = ""
    where = f"the keys of [{'.'.join(section)}]" if section else "the sections"
    return PlanError(".".join(location), expected=f"one of {where} ({', '.join(sorted(here))})", fix=fix)


def _keys(section: type[BaseModel], path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], set[str]]]:
    """The keys of a section and of every section below it, by their path."""
    yield path, set(section.model_fields)
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, (*path, name))
