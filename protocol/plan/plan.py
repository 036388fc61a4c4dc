"""The plan: the whole contract of a run, as typed sections, and its digest.

A plan is a TOML file with one section for each part of the contract. Each field is checked here on its own; that the
sections agree with each other is checked in `protocol/plan/soundness.py`, whose `Plan` is this one, and sound. What
belongs to one site alone (the path of its data, its devices) is never in the plan.

`Plan.digest()` is what the parties agree on: SHA-256 over the canonical JSON of every section except `[simulation]`
and `[faults]`, which only configure a simulation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from cloister.protocol.errors import PlanError
from cloister.protocol.plan.settings import InWords, Only, Section, Settings
from cloister.protocol.plan.tasks import OWN, TASKS, Format, Kind, is_own, kind_of
from cloister.protocol.plan.threshold import Parameters, Tolerance

SMALLEST_CLIP, LARGEST_CLIP = 1e-6, 1e6
"""Clipping norms between which float32 arithmetic has room on both sides for any gradient or update."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Clip = Annotated[float, Field(ge=SMALLEST_CLIP, le=LARGEST_CLIP)]
Finite = Annotated[float, Field(ge=-1e100, le=1e100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1)]
Degree = Annotated[int, Field(ge=1, le=1024)]

SIMULATED_PUBLIC = "simulation:public"
"""`server.evaluation` of a simulation that keeps public records apart (`simulation.public`)."""
NO_EVALUATION = "none"
"""`server.evaluation` of a run without evaluation."""
AT_SITES = "sites"
"""`server.evaluation` of a run whose sites evaluate on their own held-out records."""

AUTO: Literal["auto"] = "auto"
"""`aggregation.norm_bound` that follows from the steps of a round."""

MOST_CORRELATED = 10_000
"""Most rounds of a run with correlated noise."""

MOST_GROUPS = 100
"""Most groups of a round: their median takes minima and maxima of G (G - 1) / 2 pairs of vectors."""

SCORED = ("causal", "choices", "classify", "token-classify")
"""Tasks with labels of which each is right or wrong, and has a loss."""

MOST_CLASSES = 256
"""Most classes of a classifier, and most choices: a confusion matrix has the square of it, in each site's totals."""

SiteName = Annotated[
    str,
    Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$"),
    InWords("letters, digits, dashes, underscores, starting with a letter or digit"),
]

ClassWeight = Annotated[float, Field(ge=1e-3, le=1e3)]

OPTIMIZERS = ("adamw", "muon", "sgd")
"""The optimizers of cloister."""

GIVEN = "given:"
"""How a source begins of records that a Python program gave. What follows is a name for them, in hex."""

SMALLEST_COHORT = 3
"""Fewest sites whose sum hides each of them from the others."""

WIDEST_BALANCE = 4
"""Largest ratio of the most to the least local steps of a site in a round. With one step for all sites but one, the sum
would be that site's update and little else."""

SLOWEST, FASTEST = 1e-6, 1e6
"""Speeds that a site may declare, relative to the other sites."""


_UNPROTECTED = "without effect it would suggest a protection that is not there"
_UNCHARGED = "it depends on the sites' own records, and no charge covers it"
EVALUATED = (
    f'set server.evaluation to a file of public records, to "{NO_EVALUATION}", or in a simulation to '
    f'"{SIMULATED_PUBLIC}" with simulation.public = 0.1'
)
_CHARGED = f"set server.evaluation_epsilon, with privacy.unit record or owner; or {EVALUATED}"


def _private(*units: str, required: str = "") -> Only:
    """The condition of a field that protects: a privacy unit."""
    return Only("privacy.unit", units, required=required, because="charge", why=_UNPROTECTED)


def _uncharged(*when: Any, fix: str = "") -> Only:
    """The condition of a field, or of some of its values, that depends on the sites' own records: no privacy unit."""
    return Only("privacy.unit", ("none",), when=when, because="charge", why=_UNCHARGED, fix=fix)


_SECURE = Only("aggregation.secure", (True,))
_PRIVATE, _DPSGD = _private("record", "owner", "site"), _private("record", "owner")
_OF_SITES = _private("site")
_ADAPTER = Only("model.adapter.scheme", ("ffa-lora", "rolora", "lora"))
_CLASSIFY = Only("data.task", ("classify",))
_OWN = Only("data.task", but=TASKS)
_TARGETS = Only("data.task", ("sequence-to-sequence",))
_PREFER = Only("data.task", ("prefer",))
_CLASSES = Only("data.task", ("classify", "token-classify"), required='["no", "yes"]')
_FIELDS = Only("question.kind", ("histogram", "mean", "vocabulary"), required='"age"')
_MODELS = Only("question.kind", ("compare", "evaluate"))
_VOCABULARY = Only("question.kind", ("vocabulary",))
_GENERATE = Only("data.task", ("causal", "choices"))
_WINDOWS = Only("data.task", ("causal", "choices", "masked"))
_CHOICES = Only("data.task", ("choices",), required='["no", "yes"]')
_TEXT = Only("data.format", ("text",))
_EVALUATION_OF_SITES = Only("server.evaluation", (AT_SITES,))
_SYNC, _ASYNC = Only("cohort.mode", ("sync",)), Only("cohort.mode", ("async",))
_BALANCED = Only("local.balance", ("weighted", "dynamic"))
_PUBLIC = Only("public.source", but=("",))
_EVALUATES = Only("server.evaluation", but=(NO_EVALUATION,))
_UNTARGETED = Only("privacy.target_epsilon", (None,), because="charge", why=_UNPROTECTED)
_UNCORRELATED = Only(
    "privacy.correlated",
    (None,),
    because="charge",
    why="later rounds cancel the noise of earlier ones only if all train the same parameters with the same clipping "
    "norm",
)
_TRAINS = Only("question", (None,))
_SHARED_OUT = Only("simulation.sites", ((),))
_OVER_RUNS = Only("simulation.ledger", but=("",), required='"mine"', because="charge", why=_UNPROTECTED)


class PlanSection(Section):
    """A section of a plan, also where Python code builds it: from what a TOML file may have, or a `PlanError`."""

    def __init__(self, **values: Any) -> None:
        settings = Settings(type(self), type(self).__name__, PlanError)
        try:
            self.__pydantic_validator__.validate_json(settings.text(self._filled(values)), self_instance=self)
        except ValidationError as error:
            raise settings.first(error) from None

    @classmethod
    def _filled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of a section with what follows from some of them."""
        return values

    # Without it pydantic would call `__init__` for each section that it reads.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # functions may have any attribute


class RunSection(PlanSection):
    """Name and length of the run, and the seed of every public random choice."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        InWords("letters, digits, dots, dashes, underscores, starting with a letter or digit"),
    ] = "run"
    """Name of the run, used for its folder: letters, digits, dots, dashes, underscores."""
    rounds: Annotated[int, Field(ge=1, lt=2**31)] = 10
    """Number of rounds."""
    seed: Seed = 0
    """Seed of initial weights, cohorts and data order: public, never a source of secrets."""


class AdapterSection(PlanSection):
    """Which parameters are trained and summed."""

    scheme: Annotated[
        Literal["full", "ffa-lora", "rolora", "lora"],
        replace(_UNCORRELATED, when=("rolora",)),
        InWords(
            '"full", "ffa-lora", "rolora" or "lora": stacked and residual LoRA (FLoRA, FedEx-LoRA, HetLoRA) need each '
            "site's own factors, not their sum"
        ),
    ] = "full"
    """`full`: every parameter. `ffa-lora`: LoRA with A frozen (exact under averaging). `rolora`: A and B in alternate
    rounds (exact; with `cohort.mode = "async"` only while no update is stale). `lora`: A and B together (approximate,
    because the product of their averages is not the average of the products)."""
    rank: Annotated[Count, _ADAPTER] = 8
    """Rank of the LoRA factors."""
    alpha: Annotated[Positive, _ADAPTER] = 16.0
    """LoRA's scale is alpha / rank."""
    targets: Annotated[tuple[str, ...], _ADAPTER] = ("all-linear",)
    """Modules that get an adapter: `all-linear`, or the names that PEFT takes as `target_modules`."""
    base_precision: Annotated[Literal["float32", "bfloat16", "nf4"], _ADAPTER] = "float32"
    """Storage of the frozen base under an adapter. `bfloat16` takes half the memory of `float32`. `nf4` takes 4 bits
    for the linear layers (QLoRA), and needs a GPU and `cloister[quantized]` on every party. Norms, biases and the
    adapter stay float32. With `bfloat16` and `nf4`, arithmetic is in bfloat16."""


class PackageSection(PlanSection):
    """A package with a task, a class of models or an optimizer, as it is installed at every party (`cloister plan pin`
    writes it)."""

    version: Annotated[str, Field(min_length=1)]
    """Its version."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$"), InWords("64 hexadecimal digits")]
    """SHA-256 over the paths and contents of its installed files."""


class ModelSection(PlanSection):
    """The language model, known to all parties."""

    name: Annotated[str, Field(min_length=1)] = "builtin:llama"
    """A folder or hub name that transformers can load, or `builtin:TYPE`: a fresh causal LM of that transformers
    model type (`llama`, `gpt2`, `qwen3`, ...), built from `config`."""
    revision: str = "main"
    """Revision of a hub model."""
    config: Annotated[Mapping[str, int | float | bool | str], Only("model.name", begins="builtin:")] = Field(
        default_factory=dict
    )
    """Configuration of a `builtin:` model, by transformers' own field names; the vocabulary is set by the tokenizer.
    Empty: a small model of about 100,000 parameters a layer, to try a plan at once. If any field is set, the other
    fields have transformers' own defaults, which are those of large models."""
    tokenizer: Annotated[str, Field(min_length=1)] = "auto"
    """`auto` (the model's own; bytes for a `builtin:` model), `bytes`, or a folder or hub name."""
    type: Annotated[
        str, Field(pattern=rf"^({OWN})?$"), InWords("PACKAGE:NAME of an installed package, or nothing")
    ] = ""
    """A class of models that a package registers (docs/extend.md). `name` is then `builtin:` with the class's
    `model_type`, or a folder or hub name of such a model. Empty: a class of transformers."""
    package: Annotated[
        PackageSection | None,
        Only("model.type", but=("",), required="{ version, sha256 }, by cloister plan pin"),
    ] = None
    """The package of the class, as it must be installed at each party."""
    adapter: AdapterSection = AdapterSection()
    """Which parameters are trained and summed."""

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer that `tokenizer` means: `bytes`, or a folder or hub name, which is the model's for `auto`."""
        if self.tokenizer != "auto":
            return self.tokenizer
        return "bytes" if self.name.startswith("builtin:") else self.name


class DataSection(PlanSection):
    """What a record looks like at every site, and how records become token sequences."""

    task: Annotated[
        str,
        Field(pattern=rf"^({'|'.join(TASKS)}|{OWN})$"),
        InWords(f"{', '.join(TASKS)}, or PACKAGE:NAME of an installed package"),
        Only("data.format", ("text",), when=("classify", "token-classify", "masked")),
        Only("data.format", ("prompt",), when=("choices", "sequence-to-sequence", "prefer")),
        replace(_ADAPTER, when=("prefer",), why="the reference is the model without its adapter"),
    ] = "causal"
    """`causal`: the model learns each token from the tokens before it. `choices`: as `causal`, of prompts that one of
    `choices` completes, and an evaluation also counts which is the most probable after each prompt. `classify`: the
    model learns which of `classes` a text belongs to (sequence classification), by a head that is trained with
    the model; texts are cut to `sequence_length` tokens and never packed. `token-classify`: as `classify`, which words
    of a text are entities of `classes`. `masked`: the model learns tokens that are hidden from the tokens before and
    after them (pretraining of BERT-like models); texts are never packed. `sequence-to-sequence`: an encoder-decoder
    model such as T5 learns the completion, its target, from the prompt, its source. `prefer`: an adapter learns which
    of two completions of a prompt is the better one (DPO); the reference is the model without the adapter.
    `PACKAGE:NAME`: another task, which an installed package registers (docs/extend.md)."""
    package: Annotated[
        PackageSection | None, replace(_OWN, required="{ version, sha256 }, by cloister plan pin")
    ] = None
    """The package of a task PACKAGE:NAME, as it must be installed at each party."""
    options: Annotated[Mapping[str, int | float | bool | str], _OWN] = Field(default_factory=dict)
    """Settings of such a task, by the names that it gives them."""
    label_field: Annotated[str, Field(min_length=1), _CLASSIFY] = "label"
    """Field that holds the class of a text: text, or a whole number that stands for its
    digits."""
    spans_field: Annotated[str, Field(min_length=1), Only("data.task", ("token-classify",))] = "spans"
    """Field that holds the entities. Of a text: a list of {start, end, label}, in characters from 0, `end` not
    included. Where `text_field` holds a list of words instead of a text: a tag for each word, `O`, or `B-` or `I-` and
    one of `classes`."""
    mask_share: Annotated[float, Field(gt=0, lt=1), Only("data.task", ("masked",))] = 0.15
    """Probability that a token is learned, each on its own. It is replaced by the mask token with probability 0.8, by a
    random token with 0.1, and otherwise left as it is."""
    classes: Annotated[tuple[str, ...], _CLASSES] = ()
    """The classes of texts, in the order of the model's outputs, or the types of entities; the same at every site. A
    type has the outputs `B-` and `I-`, which follow the output `O`. A record with another label cannot be used."""
    class_weights: Annotated[tuple[ClassWeight, ...], _CLASSIFY] = ()
    """For each of `classes`, in their order, the factor of the loss of its texts in training, 0.001 to 1000; empty: 1.
    The mean over a step divides by the number of its texts, not by the sum of their weights. Held-out losses have no
    weights. The weights are public numbers of the plan: weights from exact counts of the sites' records would reveal
    something about the records, and those from the answer to a question (`cloister plan weights`) cost nothing more."""
    weights_answer: Annotated[str, Field(pattern="^([0-9a-f]{64})?$"), _CLASSIFY] = ""
    """SHA-256 of the answer from which `class_weights` were computed; empty: they were chosen."""
    format: Format = "text"
    """`text`: one text field; `prompt`: a prompt and a completion field; `messages`: a chat. With the last two the loss
    covers the answers only. An evaluation of chats scores the answers' own tokens, not what the template adds behind
    them."""
    text_field: Annotated[str, _TEXT] = "text"
    """Field that holds the text."""
    prompt_field: Annotated[str, Only("data.format", ("prompt",))] = "prompt"
    """Field that holds the prompt."""
    completion_field: Annotated[str, Only("data.format", ("prompt",)), Only("data.task", but=("prefer",))] = (
        "completion"
    )
    """Field that holds the completion."""
    chosen_field: Annotated[str, _PREFER] = "chosen"
    """Field that holds the better completion of a prompt."""
    rejected_field: Annotated[str, _PREFER] = "rejected"
    """Field that holds the other completion of the prompt."""
    beta: Annotated[Positive, _PREFER] = 0.1
    """DPO's beta: how fast the loss falls as the adapter moves the log probabilities of the two completions apart. A
    larger beta keeps the model nearer to the reference."""
    choices: Annotated[tuple[str, ...], _CHOICES] = ()
    """Multiple choice: the completions that a record may have, spaces included. A record with
    another completion cannot be used."""
    messages_field: Annotated[str, Only("data.format", ("messages",))] = "messages"
    """Field that holds the list of {role, content}."""
    owner: Annotated[
        str,
        Only("privacy.unit", ("none", "owner"), because="charge", why=_UNPROTECTED),
        Only(
            "privacy.unit",
            but=("owner",),
            when=("",),
            fix='set data.owner, such as data.owner = "patient_id"',
        ),
    ] = ""
    """Field that identifies the owner of a record, such as `patient_id`: text or a whole number. Records
    without this field are not used. At a site all records of an owner are trained on, or all are held out."""
    sequence_length: Annotated[int, Field(ge=2)] = 128
    """Tokens in a training sequence."""
    target_length: Annotated[int, Field(ge=2), _TARGETS] = 64
    """Tokens of a target, the end token included; a longer target is cut. An evaluation generates at most as many."""
    deduplicate: bool = False
    """Use one of several equal records of a site; with `data.owner`, one of several equal records of an owner. With
    `privacy.record = "window"`, use one of several equal windows."""
    packing: Annotated[bool, _GENERATE] = True
    """Fill sequences with several records; if false, each record is cut and padded on its own."""
    held_out: Annotated[
        BelowOne,
        Only("server.evaluation", but=(AT_SITES,), when=(0,), fix=f"set data.held_out = 0.1; or {EVALUATED}"),
    ] = 0.1
    """Fraction of each site's records, or of its owners with `data.owner`, kept for evaluation and never trained on."""

    @property
    def kind(self) -> Kind:
        """What a record of the task is."""
        return kind_of(self.task, self.format)

    @property
    def label(self) -> str:
        """What a label stands for that is learned: a `token`, a `text`, a `word` or a `pair`."""
        return self.kind.label

    @property
    def most_labels(self) -> int:
        """Most labels that a sequence is learned from."""
        most: int = getattr(self, self.kind.labels) if self.kind.labels else 1
        return most

    @property
    def answer_field(self) -> str:
        """The field of a prompt's answer or a text's class; empty where a record has none, or is a chat."""
        if self.task == "classify":
            return self.label_field
        if self.format != "prompt":
            return ""
        return self.chosen_field if self.task == "prefer" else self.completion_field

    @property
    def outcomes(self) -> tuple[str, ...]:
        """What the rows and columns of a confusion matrix stand for: classes or choices; empty without either."""
        return self.classes or self.choices

    @property
    def counted(self) -> tuple[str, str]:
        """What a confusion matrix counts, and by what: a `text` by its `class`, or a `prompt` by its `choice`."""
        return ("text", "class") if self.task == "classify" else ("prompt", "choice")


class LocalSection(PlanSection):
    """Training inside a site."""

    steps: Count = 20
    """Optimizer steps of a site in a round; with `balance` the steps of a site of median speed."""
    balance: Annotated[
        Literal["fixed", "weighted", "dynamic"],
        Only(
            "privacy.unit",
            ("none", "site"),
            when=("weighted", "dynamic"),
            because="charge",
            why="each step is charged, and all sites are charged the same",
        ),
        _uncharged("dynamic"),
    ] = "fixed"
    """Steps of each site. `fixed`: `steps`. `weighted`: by the speed that the site declares in its TOML. `dynamic`: by
    the speed of the site's steps in earlier rounds, which depends on its records. With `weighted` and `dynamic` a
    site's update counts by its mean over its steps, so that more steps give no more weight."""
    least_steps: Annotated[Count | None, _BALANCED] = None
    """Fewest steps of a site in a round with `balance`. None: half of `steps`, or a quarter of `most_steps` if that is
    more."""
    most_steps: Annotated[Count | None, _BALANCED] = None
    """Most steps of a site in a round with `balance`, at most four times `least_steps`. None: twice `steps`, or four
    times `least_steps` if that is less."""
    batch_size: Count = 16
    """Sequences in a micro-batch."""
    accumulation: Count = 1
    """Micro-batches whose gradients are averaged for an optimizer step."""
    optimizer: Annotated[
        str,
        Field(pattern=rf"^({'|'.join(OPTIMIZERS)}|{OWN})$"),
        InWords(f"{', '.join(OPTIMIZERS)}, or PACKAGE:NAME of an installed package"),
    ] = "adamw"
    """`adamw`: AdamW. `muon`: Muon on the matrices of hidden layers, and AdamW on embeddings, the output layer, gains
    and biases. With an adapter Muon steps on the factors of hidden layers, and AdamW on a classifier's head. Muon
    orthogonalizes in float32 on a processor and in bfloat16 on a GPU, whatever `precision` is. `sgd`: SGD without
    momentum, which keeps no state. `PACKAGE:NAME`: another optimizer, which an installed package registers
    (docs/extend.md)."""
    package: Annotated[
        PackageSection | None,
        Only("local.optimizer", but=OPTIMIZERS, required="{ version, sha256 }, by cloister plan pin"),
    ] = None
    """The package of an optimizer PACKAGE:NAME, as it must be installed at each party."""
    options: Annotated[Mapping[str, int | float | bool | str], Only("local.optimizer", but=OPTIMIZERS)] = (
        Field(default_factory=dict)
    )
    """Settings of such an optimizer, by the names that it gives them."""
    learning_rate: Positive = 1e-3
    """Peak learning rate. Muon's steps are scaled to the size of AdamW's; its best rate can still be higher."""
    betas: Annotated[tuple[BelowOne, BelowOne], Only("local.optimizer", ("adamw", "muon"))] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    momentum: Annotated[BelowOne, Only("local.optimizer", ("muon",))] = 0.95
    """Muon's Nesterov momentum."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on parameters of two or more dimensions."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Local steps, counted over the whole run, in which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Course of the learning rate after warm-up, over the whole run."""
    final_learning_rate: Annotated[float, Field(ge=0, le=1), Only("local.schedule", ("cosine",))] = 0.1
    """Learning rate at the end of the cosine, as a fraction of the peak."""
    clip_norm: NonNegative = 1.0
    """L2 norm to which the gradient of a step is clipped; 0 does not clip."""
    optimizer_state: Annotated[Literal["reset", "keep"], Only("local.optimizer", but=("sgd",))] = "reset"
    """The optimizer's moments at the start of a round: `reset`, or `keep` the moments of the site's last round
    (DiLoCo). Under the secure sum either all sites of a round keep the moments of the same rounds, or no site keeps
    moments."""
    proximal: NonNegative = 0.0
    """FedProx's mu: adds mu/2 ||w - w_global||^2 to the local loss."""
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Only("model.adapter.base_precision", ("float32",), when=("float32",)),
    ] = "auto"
    """Arithmetic of forward and backward; `auto` is float32 on a CPU, and bfloat16 on a GPU or over a base in lower
    precision (`model.adapter.base_precision`). Trained weights stay float32."""
    threads: Count = 1
    """CPU threads of a site's process; part of the contract because it changes the last bits of a result."""

    @property
    def bounded(self) -> bool:
        """Whether the plan bounds the length of a step; only `clip_norm` bounds SGD's or an own optimizer's."""
        return self.optimizer in ("adamw", "muon") or self.clip_norm > 0

    def step_limits(self) -> tuple[int, int]:
        """Fewest and most optimizer steps of a site in a round; both are `steps` with `balance = "fixed"`."""
        if self.balance == "fixed":
            return self.steps, self.steps
        least, most = self.least_steps, self.most_steps
        if least is None:
            least = math.ceil(self.steps / 2 if most is None else max(self.steps / 2, most / WIDEST_BALANCE))
        return least, min(2 * self.steps, WIDEST_BALANCE * least) if most is None else most


class CohortSection(PlanSection):
    """The sites of a round, and when an attempt or the run fails."""

    sites: Count = 8
    """Sites in the federation."""
    units: Annotated[Count | None, _DPSGD, _TRAINS] = None
    """About how many units of privacy each site has: a public figure, rounded, and no count of one site. By it the
    report shows what delta means. `cloister plan check` shows whether rate, batch and noise suit each other."""
    fraction: Annotated[Fraction, _SYNC] = 1.0
    """Fraction of the sites drawn for each round."""
    mode: Annotated[
        Literal["sync", "async"],
        Only(
            "aggregation.groups",
            (1,),
            when=("async",),
            why="a buffer has the updates that arrive first, of whatever groups",
        ),
    ] = "sync"
    """`sync`: a round sums the updates of its cohort, all of one model. `async` (FedBuff): all sites train at the same
    time, each from the newest model when it is asked. A round is then one server step with the next `buffer` updates
    that arrive, and does not wait for the slowest site. `async` is refused under the secure sum and with a privacy
    unit. Where rounds train parts of the model, the mean of a parameter is over the updates that have trained it."""
    buffer: Annotated[Count | None, _ASYNC] = None
    """Updates in a round with `mode = "async"`, at most one for each site. None: half of the sites, rounded up."""
    staleness: Annotated[Annotated[int, Field(ge=0)] | None, _ASYNC] = None
    """Most rounds since the model of an update with `mode = "async"`; an older update is dropped. An update that is s
    rounds old counts for 1 / sqrt(1 + s) of a new update. None: 10."""
    quorum: Annotated[Fraction, _SYNC] = 0.75
    """Fraction of the cohort that must finish for a round to count."""
    deadline_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """Timeout in seconds for training and upload: a site that has not answered by then is a dropout of the attempt.
    Under the secure sum each of the four other steps has a timeout of its own, a quarter of this one, so an attempt
    takes at most twice as long. In a deployment the timeout begins when the site has the model, for which it has as
    long again, and the coordinator waits for an upload that still moves. Under a privacy unit a site prepares its data
    in its first round, unless `cloister site check` has prepared it. With `mode = "async"` each site has its own
    timeout; a late site is asked again in the next round."""
    attempts: Count = 3
    """Attempts at one round before the run stops, and rounds in a row that are lost after shares were asked for. With
    `aggregation.norm_bound` under masks also the most sketches of an update; when they are used up, the round is given
    up, and not the run."""

    def handshake_s(self) -> float:
        """Timeout in seconds of each step of a masked attempt that carries no update."""
        return self.deadline_s / 4

    def attempt_s(self) -> float:
        """The most seconds that a masked attempt takes, without uploads that still move: steps 2 to 6."""
        return self.deadline_s + 4 * self.handshake_s()

    def size(self) -> int:
        """Sites in the cohort of a round."""
        return max(1, round(self.fraction * self.sites))

    def needed(self, n: int | None = None) -> int:
        """Sites of a cohort of n sites that `quorum` requires, or with `mode = "async"` updates in the buffer;
        `Plan.quorum` is the number that counts. None: of a round's whole cohort."""
        if self.mode == "async":
            return math.ceil(self.sites / 2) if self.buffer is None else self.buffer
        return max(1, math.ceil(self.quorum * (self.size() if n is None else n) - 1e-9))

    def most_stale(self) -> int:
        """Most rounds since the model of an update, with `mode = "async"`."""
        return 10 if self.staleness is None else self.staleness


class CompressionSection(PlanSection):
    """Updates in few bits: blocks of 2^14 values are rotated, scaled by the releases of earlier rounds, and rounded. A
    site adds the rounding's residual to its next update. The section may be empty: `[aggregation.compression]`."""

    first_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Largest root mean square of a site's update that round 1 expects. None: the sum of the round's learning rates."""


class AggregationSection(PlanSection):
    """How updates are summed."""

    secure: Annotated[
        bool,
        replace(
            _SYNC,
            when=(True,),
            because="mask",
            why="the coordinator would choose which updates are summed, and masks of sites with different models do "
            "not cancel",
            fix='set cohort.mode = "sync", or aggregation.secure = false if the coordinator may see every update',
        ),
    ] = True
    """Sum under masks, so that the coordinator learns only the total (and sketches, with `norm_bound`); if false, the
    coordinator sees every update."""
    colluders: BelowOne = 0.1
    """Largest fraction of the federation's sites that may collude with the coordinator against the other sites."""
    dropouts: BelowOne = 0.1
    """Largest fraction of a cohort that may drop out of a round without ending the attempt."""
    weighting: Annotated[
        Literal["tokens", "uniform"], _uncharged("tokens", fix='set aggregation.weighting = "uniform"')
    ] = "tokens"
    """Weight of a site in the mean: the tokens it learned from in the round (of a classifier the texts), or 1. With
    `local.balance` the tokens are counted by step, so that more steps give no more weight."""
    temperature: Annotated[float, Field(ge=1, le=1e6), Only("aggregation.weighting", ("tokens",))] = 1.0
    """T: a site's weight is its tokens to the power 1 / T, so that a site with few tokens
    counts for more. 1: the tokens themselves. A large T is nearly `uniform`."""
    ring_bits: Annotated[Literal[8, 16, 32], Only("aggregation.compression", but=(None,), when=(8,))] = 32
    """Updates are summed as integers modulo 2^ring_bits. With one bound for all values, 8 bits would round most
    of them to noise."""
    bound: Annotated[
        Clip,
        Only("privacy.unit", but=("site",), fix="set privacy.clip, the bound on the norm of a whole update"),
    ] = 1.0
    """Largest absolute change of one parameter in one round; larger changes are clipped, and counted if there is no
    privacy unit. With `compression` this is the largest bound of a block. With unit `site` there is none but
    `privacy.clip`."""
    compression: Annotated[CompressionSection | None, Only("aggregation.ring_bits", (8, 16))] = None
    """Compress updates, with `ring_bits` 8 or 16; None: updates are summed in the steps of `bound`."""
    norm_bound: Annotated[
        Literal["auto"] | Clip | None, InWords('"auto", or a number from 1e-06 to 1e+06')
    ] = None
    """Largest L2 norm of a site's update in one round. Each site scales its update down to it, and the sum checks it.
    Under masks each site sends the coordinator a sketch in each attempt: 128 numbers that show something of that one
    update, and of the site as a whole. So it needs the privacy unit `record` or `owner` there, and each site's policy
    must accept it. A site that lies in its update then adds at most three times the bound and its room for rounding,
    as long as each honest site sends its sketch.
    `auto`: what the steps of a round can move the model. None: no bound."""
    part: Annotated[Fraction, _UNCORRELATED] = 1.0
    """Fraction of the blocks of layers that a round trains and sums, drawn in public for each round; the other
    parameters keep their values. The parameters outside of the layers are one more block. A round sends, and adds noise
    to, what it trains: about that fraction of the parameters if the blocks are of one size. 1: every round trains
    all."""
    groups: Count = 1
    """Groups into which the cohort of a round is divided by a public draw, 3 to 100 and better odd. Each group has a
    sum of its own, and the model moves by the coordinate-wise median of the groups' means, which have equal weights.
    Poisoned sites in fewer than half of the groups in the median do not choose the median. The coordinator learns the
    sum of each group. 1: no groups, and the model moves by the mean."""
    trace_groups: Annotated[
        Count,
        _SECURE,
        Only("aggregation.norm_bound", but=(None,), fix='set aggregation.norm_bound = "auto", or remove it'),
        Only("aggregation.groups", (1,)),
    ] = 1
    """Groups into which the cohort of a round is divided once a sum was opened that honest sites cannot have. A site
    has lied in it, and nothing says which. Each group has a sum of its own. A group with such a sum is left out, and
    the model moves by the mean of the others. The divisions are drawn anew in each round, until the groups that were
    left out tell which site it is. The coordinator learns the sum of each group, and can begin so at any time. 1: the
    site is not found, and the run stops after `cohort.attempts` such rounds."""

    @property
    def few_bits(self) -> str:
        """The section, if any, by which a value of an update has fewer bits than its steps of `bound` would need."""
        return "aggregation.compression" if self.compression is not None else ""


class AdaptiveSection(PlanSection):
    """Adaptive clipping (Andrew et al. 2021): the clipping norm follows a quantile of the sites' update norms."""

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the sites whose update should not be clipped."""
    learning_rate: Positive = 0.2
    """Step of the logarithm of the clipping norm for each unit of distance from the quantile."""
    count_noise: Positive = 1.0
    """Standard deviation of the noise on the number of sites whose update was not clipped; charged too."""


class CorrelatedSection(PlanSection):
    """Correlated noise (DP-FTRL, with BLT matrices): later rounds cancel a part of the noise of earlier ones.

    Cohorts are then a random partition of the roster, taken in turn."""

    separation: Count
    """Least number of rounds from one round with a site to the site's next round: with N sites, cohorts of n take N / n
    rounds."""
    participations: Count
    """Most rounds with one site in the run."""
    buffers: Annotated[int, Field(ge=0, le=10)] = 6
    """Most vectors of the model's size, in float64, that the coordinator keeps for the noise. Fewer are used if another
    vector is worth little. 0: independent noise."""


class PrivacySection(PlanSection):
    """Differential privacy: the protected unit, the noise, and the budget."""

    unit: Annotated[
        Literal["none", "record", "owner", "site"],
        replace(
            _SYNC,
            when=("record", "owner", "site"),
            because="charge",
            why="the time that a site takes depends on its data and decides which updates are summed, and by which "
            "weight, which no charge covers",
        ),
    ] = "none"
    """What the guarantee protects. `none`: no guarantee. `record`: one record of a site. `owner`: all records of one
    owner at a site (`data.owner`). `site`: everything that one site holds."""
    clip: Annotated[Clip, _PRIVATE] = 1.0
    """L2 norm C to which the gradient of a record or owner, or the update of a site, is clipped. With `adaptive`: the
    clipping norm of the first round."""
    noise_multiplier: Annotated[Positive | None, _PRIVATE, replace(_UNTARGETED, required="1.0")] = None
    """Standard deviation of the noise on a sum of clipped terms, in units of `clip`."""
    target_epsilon: Annotated[Positive | None, _PRIVATE] = None
    """Epsilon of the whole run, from which the noise multiplier is calibrated; instead of `noise_multiplier`."""
    delta: Annotated[float, Field(gt=0, lt=1), _PRIVATE] = 1e-5
    """Delta: smaller than 1 over the number of units that are protected."""
    budget: Annotated[Positive | None, _PRIVATE, _UNTARGETED] = None
    """Epsilon that may be spent; a round that would exceed it is not started. None: `target_epsilon`, or no limit."""
    accountant: Annotated[Literal["pld", "rdp"], _PRIVATE] = "pld"
    """How losses are composed: `pld` (privacy loss distributions, tight) or `rdp` (Renyi divergences); Skellam noise
    has only `rdp`."""
    sampling_rate: Annotated[Fraction | None, _private("record", "owner", required="0.01"), _TRAINS] = None
    """Probability with which each record or owner of a site is in a step's batch,
    independently (Poisson)."""
    record: Annotated[Literal["record", "window"], _DPSGD, _WINDOWS, _TEXT] = "record"
    """`record`: one record of the data. `window`: one sequence of `data.sequence_length`
    tokens cut from a text, so that a longer text counts as several."""
    windows: Annotated[Count, _DPSGD, _WINDOWS] = 4
    """Largest number of sequences of one long record that are used; their gradients are
    averaged."""
    records: Annotated[Count, _private("owner")] = 8
    """Largest number of records of one owner that are used; their gradients are averaged."""
    method: Annotated[
        Literal["reference", "opacus"],
        _DPSGD,
        Only(
            "data.task",
            TASKS,
            when=("opacus",),
            because="charge",
            why="the gradients of its hooks are proven for the tasks of cloister alone",
        ),
    ] = "reference"
    """How gradients of single units are computed. `reference`: one unit at a time, correct for every model. `opacus`:
    many units at a time by Opacus, faster. The rounding of a unit's gradient then depends on the other units, which a
    coordinator that sends crafted weights can amplify: with `opacus` the coordinator is trusted not to do so."""
    trusted_coordinator: Annotated[bool, _OF_SITES, _TRAINS] = False
    """The coordinator is trusted, and adds Gaussian noise to the sum; if false, each site adds its share
    of Skellam noise under the secure sum."""
    adaptive: Annotated[AdaptiveSection | None, _OF_SITES, _UNCORRELATED, _TRAINS] = None
    """Let the clipping norm follow a quantile of the update norms."""
    correlated: Annotated[
        CorrelatedSection | None,
        _OF_SITES,
        Only("privacy.trusted_coordinator", (True,)),
        _SECURE,
        Only(
            "aggregation.groups",
            (1,),
            because="charge",
            why="a median is not linear, so no later round cancels the noise in it",
        ),
    ] = None
    """Correlate the noise over the rounds."""

    @property
    def trusts_coordinator(self) -> bool:
        """Whether the guarantee depends on the coordinator: it adds the noise, or sends the weights for `opacus`."""
        return self.trusted_coordinator or self.method == "opacus"

    @property
    def dpsgd(self) -> bool:
        """Whether each step inside a site is private (DP-SGD): units `record` and `owner`."""
        return self.unit in ("record", "owner")


class PublicSection(PlanSection):
    """Training on public text by the coordinator before the first round, without privacy cost."""

    source: str = ""
    """Public records: a `builtin:` source, a file, a folder or a hub name; empty: no public training."""
    split: Annotated[str, _PUBLIC] = "train"
    """Split of a hub data set."""
    steps: Annotated[Count, _PUBLIC] = 250
    """Optimizer steps."""
    batch_size: Annotated[Count, _PUBLIC] = 16
    """Sequences in a step."""
    learning_rate: Annotated[Positive, _PUBLIC] = 3e-3
    """Peak learning rate of AdamW, with a tenth of the steps as warm-up and a cosine after that."""


class GateSection(PlanSection):
    """Conditions on the mean of a round. If a mean does not meet them, the model stays as it was, and the charge of the
    round stays."""

    norm: Positive | None = None
    """Largest L2 norm of the mean update; None: any."""
    loss: Annotated[
        NonNegative | None, Only("server.evaluation", but=(AT_SITES, NO_EVALUATION), why=_UNPROTECTED)
    ] = None
    """Most nats per token (of a classifier per text) by which a round may raise the held-out loss on the public records
    of `server.evaluation`; None: any."""


class ServerSection(PlanSection):
    """The coordinator's step on the mean update, its evaluations and its checkpoints."""

    optimizer: Literal["fedavg", "nesterov", "adam"] = "fedavg"
    """Optimizer of the pseudo-gradient: `fedavg` (SGD without momentum), `nesterov` (DiLoCo), `adam` (FedAdam)."""
    learning_rate: Positive = 1.0
    """Learning rate of that optimizer."""
    momentum: Annotated[BelowOne, Only("server.optimizer", ("nesterov",))] = 0.9
    """Momentum of `nesterov`."""
    betas: Annotated[tuple[BelowOne, BelowOne], Only("server.optimizer", ("adam",))] = (0.9, 0.99)
    """Decay rates of `adam`."""
    epsilon: Annotated[Positive, Only("server.optimizer", ("adam",))] = 1e-3
    """Epsilon of `adam` (FedAdam's adaptivity)."""
    evaluation: Annotated[
        str,
        Field(min_length=1),
        replace(_uncharged(AT_SITES, fix=_CHARGED), unless="server.evaluation_epsilon"),
        replace(_SYNC, when=(AT_SITES,), why="sites' evaluations wait for the slowest one", fix=EVALUATED),
    ] = AT_SITES
    """Source of public held-out records for the coordinator, `simulation:public` (see `simulation.public`), or `none`.
    `sites`: each site evaluates on its own held-out records, which under a privacy unit needs `evaluation_epsilon`. In
    a question about models, whose default is `none`, the answer has the figures of the public records beside."""
    evaluation_epsilon: Annotated[
        Positive | None,
        _EVALUATION_OF_SITES,
        _DPSGD,
        _SECURE,
        Only("privacy.method", ("reference",)),
        Only("aggregation.groups", (1,)),
        Only("data.task", SCORED),
        Only("server.evaluation_sequences", (None,)),
        _TRAINS,
    ] = None
    """Epsilon of all evaluations of a run together, at `privacy.delta`, with privacy unit `record` or `owner`. Sites
    then tell the accuracy and the loss of their held-out records or owners as a noised sum (docs/questions.md). The
    budget and the target of `[privacy]` are for training and evaluations together."""
    evaluate_every: Annotated[Count, _EVALUATES] = 1
    """Rounds between evaluations; the initial and the last model are always evaluated."""
    evaluation_sequences: Annotated[Count | None, _EVALUATES] = None
    """Most sequences in an evaluation: of the coordinator's public records, or of each site's held-out records. The
    sequences are a fixed pseudo-random choice by `run.seed`, the same in every round, so that losses can be compared;
    bits per byte are then an estimate. With `data.choices` also the most prompts whose choices are compared. None: all
    of them."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept on disk; older ones are removed after a newer one is durable."""
    gate: GateSection = GateSection()
    """Conditions on the mean of a round."""


class QuestionSection(PlanSection):
    """A question to the sites, in place of training: one bounded vector for each unit, whose noised sum is the answer.

    The run then has one round, and each site adds a part of the noise (docs/questions.md)."""

    kind: Literal["compare", "evaluate", "histogram", "mean", "vocabulary"]
    """`evaluate`: how the model of `[model]` does on the sites' held-out records. `compare`: how much better it does
    than another one. `histogram`: how many units have which value of a field. `mean`: mean and variance of a field's
    numbers. `vocabulary`: the frequent words of a field."""
    most_units: Annotated[int, Field(ge=1, le=10**7), Only("privacy.unit", but=("site",))] = 10_000
    """Units of a site for which the ring has room, such as records. A site with more of them is in the sum too, but the
    answer may then be wrong. Fewer leave finer steps."""
    field: Annotated[str, _FIELDS] = ""
    """Field that is counted or averaged, or whose words are counted."""
    measure: Annotated[
        Literal["value", "characters", "tokens"], Only("question.kind", ("histogram", "mean"))
    ] = "value"
    """What of the field: its `value`, or its number of `characters`, or of `tokens` of `model.tokenizer`."""
    values: Annotated[tuple[str, ...], Only("question.kind", ("histogram",))] = ()
    """Values that are counted, each in a cell of its own; a whole number counts as its digits, and true and false as
    these words. All others are in the cell `other`."""
    edges: Annotated[tuple[float | str, ...], Only("question.kind", ("histogram",))] = ()
    """Instead of `values`: edges of ranges, in order, all numbers or all texts (dates such as "2024-01-01" are in the
    order of texts). A range has its lower edge and not its upper one. What lies below the first edge or from the last
    one on has a cell of its own."""
    range: Annotated[tuple[Finite, Finite] | None, Only("question.kind", ("mean",), required="[0, 120]")] = (
        None
    )
    """Smallest and largest number that counts; one beyond counts as the nearer of the two. The noise grows with the
    distance between them."""
    others: Annotated[tuple[str, ...], _MODELS] = ()
    """Further models, named as in `model.name`, with the tokens and labels of the first: one to `compare` with, or up
    to seven that are evaluated too. The noise then grows with the square root of their number."""
    figures: Annotated[tuple[Literal["accuracy", "loss", "confusion", "entities"], ...], _MODELS] = (
        "accuracy",
    )
    """What an evaluation tells. `accuracy`: the share of a unit's labels that the model finds. `loss`: a unit's mean
    loss per label, that of each of its sequences cut at `most_loss`. `confusion`: of a classifier how often each class
    was taken for each, which has the accuracy in it. `entities`: precision, recall and F1 of the entities of
    token-classify, alone. With `loss` the noise of the others is sqrt(2) times as large at the same epsilon."""
    most_loss: Annotated[Positive, _MODELS] = 10.0
    """Largest loss of a sequence that counts, in nats per label, or the largest difference of two; with `loss`."""
    most_entities: Annotated[int, Field(ge=1, le=10**6), Only("question.kind", ("evaluate",))] = 16
    """Entities of a unit that count, with `entities`; of more, all count less. The noise grows in proportion."""
    words: Annotated[int, Field(ge=1, le=2730), _VOCABULARY] = 64
    """Most different words of a unit that count, drawn from all of its words. The noise grows with its square root."""
    ngram: Annotated[int, Field(ge=0, le=5), _VOCABULARY] = 0
    """0: words are those of a tokenizer, with the space before them, of at most 16 bytes. Otherwise each so many
    characters that follow each other are one, of at most 16 bytes too, for a language without spaces."""
    buckets: Annotated[int, Field(ge=2**12, le=2**20), _VOCABULARY] = 2**17
    """Cells of each of 24 rows, 4 bytes each in what a site sends. Take 40 for each word that is expected, or more."""
    sites_of_owner: Annotated[int, Field(ge=1, le=1000), Only("privacy.unit", ("owner",))] = 1
    """Most sites that have records of one owner. The noise covers all of them together, and grows in proportion."""


class MeshSection(PlanSection):
    """How a site divides a model among its devices. The mesh is the site's own: in its TOML, or in a simulated site's
    profile.

    A degree that is not set is 1. If none is set, a site with several GPUs takes all of them, if the plan can be
    trained on them. Each GPU has a copy of the model if the model fits into one GPU; otherwise the GPUs are shards."""

    replicate: Degree | None = None
    """Copies of the model, each on other rows of a batch."""
    shard: Degree | None = None
    """Devices that share the weights of one copy (FSDP), each on other rows of a batch."""
    tensor: Degree | None = None
    """Devices that divide each matrix product of a layer, on the same rows."""
    checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the model's blocks with `torch.compile`."""


class ProfileSection(PlanSection):
    """How some of the simulated sites differ from the rest."""

    share: Fraction
    """Fraction of the sites with this profile, taken in order of their number."""
    speed: Fraction = 1.0
    """Speed of the site's hardware relative to this machine: at 0.5 local training takes twice as long. The site also
    declares this speed (`local.balance = "weighted"`)."""
    slots: Count = 1
    """Worker slots that the site occupies while it works."""
    mesh: MeshSection = MeshSection()
    """Devices among which the site divides the model; on a machine without GPUs each is a process."""


class SimulationSection(PlanSection):
    """How one machine simulates the federation; not part of the contract, and not in the digest."""

    source: Annotated[str, Field(min_length=1)] = "builtin:python-docs"
    """Records to distribute: a .txt, .jsonl, .json, .csv, .parquet or .arrow file, a folder of such files, a hub name,
    or a text that the package has. These are `builtin:python-docs`, `builtin:python-stdlib`, `builtin:python-passages`
    (texts with a label), `builtin:python-functions` (functions in parts), `builtin:clinical-notes` and
    `builtin:clinical-letters` (made-up texts with entities). A single .txt file is split at blank lines into paragraphs
    (without blank lines: into lines); in a folder each .txt file is one record. `given:` and a drawn name stands
    for records that `cloister.simulate` was given for each site."""
    sites: Annotated[
        tuple[SiteName, ...], Only("simulation.source", begins=GIVEN, required='["north", "south", "west"]')
    ] = ()
    """Names of the sites whose records were given, in the order of the sites."""
    split: Annotated[str, _SHARED_OUT] = "train"
    """Split of a hub data set."""
    partition: Annotated[Literal["auto", "natural", "iid", "dirichlet", "size"], _SHARED_OUT] = "auto"
    """`natural`: each group of `field` goes whole to one site. `iid`: at random. `dirichlet`: label proportions per
    site drawn from Dirichlet(alpha). `size`: at random, with site sizes proportional to 1, 2, 3 and so on. `auto`:
    `natural` with a field, else `iid`."""
    field: Annotated[str, _SHARED_OUT] = ""
    """Field that holds the group (`natural`) or label (`dirichlet`); empty: the source's own (`topic`, `package`,
    `label`, `ward`)."""
    alpha: Annotated[Positive, Only("simulation.partition", ("dirichlet",))] = 0.5
    """Concentration of the Dirichlet partition; a smaller value is less even."""
    public: Annotated[BelowOne, Only("server.evaluation", (SIMULATED_PUBLIC,), required="0.1")] = 0.0
    """Fraction of the records that goes to no site; of records that are the same, others may: the public records of
    `server.evaluation = "simulation:public"`."""
    noise_seed: Annotated[
        Seed | None,
        Only(
            "simulation.ledger",
            ("",),
            because="charge",
            why="noise from a declared seed protects nothing, and no charge would cover it",
        ),
    ] = None
    """Declared seed of all noise, so that a private simulation can be repeated. Anyone with the seed can remove the
    noise, so there is no protection, and the report says so. None: secret noise."""
    ledger: Annotated[
        str, Field(pattern="^(/.*)?$"), InWords("an absolute path (--ledger completes one)"), _PRIVATE
    ] = ""
    """File, by its absolute path, of a privacy ledger that outlives the run: all runs that name it charge their
    `dataset` there. Empty: the run is charged in its own folder alone."""
    dataset: Annotated[str, _OVER_RUNS] = ""
    """Name under which that ledger keeps the spending of the records of `source` over all runs."""
    greatest_epsilon: Annotated[Positive | None, replace(_OVER_RUNS, required="")] = None
    """Largest epsilon of that dataset over all runs, at privacy.delta, or twice privacy.delta if the mechanisms of runs
    differ; None: no limit."""
    durable: bool = True
    """Whether sites sync (fsync) their answers, as deployed sites always do. `false` is faster with many sites. A power
    cut, but no killed process, can then damage a run; the report says so. Ledgers are always synced."""
    workers_per_gpu: Count = 1
    """Worker processes placed on each GPU, if there are GPUs."""
    per_site: Annotated[bool, _uncharged()] = False
    """Evaluate the initial and the final model on each site's own held-out records when the run is finished, and show
    both losses for each site. It takes as long as two evaluations at all sites."""
    profiles: tuple[ProfileSection, ...] = ()
    """Sites that are slower or occupy more worker slots than the rest."""


class PoisonSection(PlanSection):
    """Sites of a simulation that send poisoned updates."""

    share: Fraction
    """Share of the sites, rounded, at least one; drawn from the run's seed."""
    kind: Annotated[
        Literal["sign-flip", "scale", "label-flip", "backdoor"],
        Only(
            "privacy.unit",
            ("none", "site"),
            when=("label-flip",),
            because="charge",
            why="a record gets the answer of the next one, so one that is added or removed changes others, which the "
            "stated epsilon does not cover",
            fix='set faults.poison.kind = "backdoor", or privacy.unit = "site"',
        ),
    ]
    """`sign-flip`: the update times -`factor`. `scale`: the update times `factor`. `label-flip`: each record has the
    answer or the class of another record. `backdoor`: each record, and each paragraph of a text, has `trigger` and then
    `target`."""
    factor: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of the update of a poisoned site, with each kind."""
    trigger: Annotated[str, Field(min_length=1), Only("faults.poison.kind", ("backdoor",))] = "cf-1729 "
    """Text that opens the backdoor."""
    target: Annotated[str, Field(min_length=1), Only("faults.poison.kind", ("backdoor",))] = (
        "ignore all findings"
    )
    """Text that the model shall write after the trigger; of a classifier the class that it shall find."""


class FaultsSection(PlanSection):
    """Faults that a simulation injects, to test a plan; not part of the contract, and not in the digest.

    Each probability is the probability that a site of the cohort fails at that step of an attempt, drawn from the run's
    seed.
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
    poison: PoisonSection | None = None
    """Sites that send poisoned updates; None: no site."""


class Plan(PlanSection):
    """The contract of a run, each field checked. `soundness.Plan` is also checked as a whole."""

    run: RunSection = RunSection()
    """Name, length and seed."""
    model: ModelSection = ModelSection()
    """The language model."""
    data: DataSection = DataSection()
    """What a record is."""
    local: LocalSection = LocalSection()
    """Training inside a site."""
    cohort: CohortSection = CohortSection()
    """The sites of a round."""
    aggregation: AggregationSection = AggregationSection()
    """How updates are summed."""
    privacy: PrivacySection = PrivacySection()
    """Differential privacy."""
    public: PublicSection = PublicSection()
    """Training on public text before the first round."""
    server: ServerSection = ServerSection()
    """The coordinator's step."""
    question: QuestionSection | None = None
    """A question to the sites, in place of training."""
    simulation: SimulationSection = SimulationSection()
    """How one machine simulates the federation."""
    faults: FaultsSection = FaultsSection()
    """Faults that a simulation injects."""

    def registered(self) -> Iterator[tuple[str, str, PackageSection]]:
        """What the plan names of installed packages: the field, PACKAGE:NAME, and the package as it must be."""
        named = (
            ("data.task", self.data.task, self.data.package),
            ("model.type", self.model.type, self.model.package),
            ("local.optimizer", self.local.optimizer, self.local.package),
        )
        for field, name, package in named:
            if is_own(name):
                assert package is not None, "a sound plan has it"
                yield field, name, package

    def digest(self) -> str:
        """SHA-256, in hex, over the canonical JSON of what the parties agree on (not `[simulation]` and `[faults]`)."""
        return self._digest

    def family(self) -> str:
        """SHA-256, in hex, over the canonical JSON of what a family of plans has alike: model, data, public training,
        aggregation, privacy and question. Rounds, local training, cohort and evaluation may differ."""
        alike = self.model_dump(
            mode="json", include={"model", "data", "public", "aggregation", "privacy", "question"}
        )
        return hashlib.sha256(_canonical(alike)).hexdigest()

    def to_json(self) -> str:
        """The whole plan as canonical JSON; `soundness.from_json` reads it back to an equal plan."""
        return self._json

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy with its own digest; the changes are not checked."""
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
        """Largest number of tokens on which one site can train in one round."""
        return self._most_sequences() * self.data.sequence_length

    @property
    def scheduled(self) -> bool:
        """Whether rounds train different parts of the model (`lm/model/schedule.py`)."""
        return self.model.adapter.scheme == "rolora" or self.aggregation.part < 1

    @property
    def carries(self) -> bool:
        """Whether a site carries something from one of its updates into the next (`clients/state/carried.py`)."""
        return self.local.optimizer_state == "keep" or self.keeps_residuals

    @property
    def keeps_residuals(self) -> bool:
        """Whether a compressed update leaves a residual for the next: not where rounds train different parts, whose
        rotated blocks have other values."""
        return self.aggregation.compression is not None and not self.scheduled

    @property
    def sketches(self) -> bool:
        """Whether each site sends the coordinator a sketch of its update."""
        return self.aggregation.secure and self.aggregation.norm_bound is not None

    @property
    def drawn(self) -> bool:
        """Whether the sites of a sum were told different things in earlier rounds: each sum is over a part of the
        federation that is drawn anew, or each group of a round has a list of steps of its own. Cohorts that take turns
        are drawn once."""
        of_groups = self.aggregation.groups > 1 and self.local.balance != "fixed"
        anew = self.cohort.size() < self.cohort.sites and self.privacy.correlated is None
        return anew or of_groups

    @property
    def turns(self) -> int:
        """Rounds until the cohort of a round is asked again, where no cohort is drawn anew."""
        return self.cohort.sites // self.cohort.size()

    def most_labels(self) -> int:
        """Largest number of labels that one site can learn from in one round, the largest weight: one for each token,
        or of a classifier for each text."""
        return self._most_sequences() * self.data.most_labels

    def _most_sequences(self) -> int:
        local = self.local
        return local.step_limits()[1] * local.batch_size * local.accumulation

    def summed(self) -> tuple[int, ...]:
        """The numbers of sites that a sum of updates may be over, increasing: that of a cohort, or those of its groups,
        which differ by at most 1; and those of the groups that trace a site."""
        traced = self.in_groups(self.aggregation.trace_groups) if self.aggregation.trace_groups > 1 else ()
        return tuple(sorted({*self.in_groups(self.aggregation.groups), *traced}))

    def in_groups(self, groups: int) -> tuple[int, ...]:
        """The numbers of sites of so many groups of a cohort, increasing."""
        least, more = divmod(self.cohort.size(), groups)
        return (least, least + 1) if more else (least,)

    def threshold(self, n: int | None = None) -> Parameters:
        """k and t of the secure sum over a cohort of n sites, and how many of them may drop out and collude.

        Args:
            n: Sites that are drawn for the sum. None: as many as for the smallest sum of updates.

        Raises:
            ParameterError: no k and t meet the plan's tolerances. It cannot happen for a sound plan with
                `aggregation.secure`; a plan that sums in clear is not checked for it.
        """
        return self.tolerance().parameters(self.cohort.sites, self.summed()[0] if n is None else n)

    def tolerance(self) -> Tolerance:
        """How many of a cohort may drop out, and how many of the federation may collude with the coordinator."""
        return Tolerance(self.aggregation.dropouts, self.aggregation.colluders)

    def quorum(self, n: int | None = None) -> int:
        """Sites of a cohort of n sites that must finish for a sum to count: more than `cohort.quorum` where the secure
        sum needs more. None: the fewest for any sum of updates."""
        if n is None:
            return min(map(self.quorum, self.summed()))
        needed = self.cohort.needed(n)
        return max(needed, self.threshold(n).quorum) if self.aggregation.secure else needed

    def evaluates(self, number: int) -> bool:
        """Whether the model after a round is due for evaluation; 0 is the initial model."""
        return number % self.server.evaluate_every == 0 or number == self.run.rounds

    @property
    def at_sites(self) -> bool:
        """Whether sites evaluate on their own held-out records."""
        return self.server.evaluation == AT_SITES

    @property
    def owners_divided(self) -> bool:
        """Whether a simulation may give the records of one owner to several sites, with unit owner."""
        simulation = self.simulation
        together = simulation.partition in ("natural", "auto") and simulation.field == self.data.owner
        return self.privacy.unit == "owner" and not together

    @property
    def charged_evaluations(self) -> tuple[int, ...]:
        """The rounds after which sites evaluate and are charged for it; none without `server.evaluation_epsilon`."""
        if self.server.evaluation_epsilon is None:
            return ()
        return tuple(filter(self.evaluates, range(self.run.rounds + 1)))

    def honest(self) -> int:
        """Fewest honest sites whose updates, and whose noise, are in a sum that a lying coordinator can open; with
        `aggregation.groups`, in the sum of one group.

        Raises:
            ParameterError: as `threshold`.
        """
        return min(map(self._honest, self.summed()))

    def spare(self) -> int:
        """The most sites that may drop out of any sum of updates under masks: no site goes on with fewer than three."""
        return min(n - max(self.quorum(n), SMALLEST_COHORT) for n in self.summed())

    @property
    def splits(self) -> bool:
        """Whether a coordinator that chooses the dropouts may open sums of several parts of a cohort, or of a group."""
        return any(self.threshold(n).splits for n in self.summed())

    def _honest(self, n: int) -> int:
        found = self.threshold(n)
        return found.smallest_part if found.splits else self.quorum(n) - found.colluders


def _canonical(value: object) -> bytes:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
