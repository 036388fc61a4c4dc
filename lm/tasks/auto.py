"""The automatic classes of transformers that tasks train, and by which saved models are loaded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Auto:
    """An automatic class of transformers."""

    name: str
    """Its name."""
    known: str
    """The name of the mapping from the model types that it knows, in transformers' `modeling_auto`."""
    called: str
    """What such a model is called."""
    ends: tuple[str, ...]
    """How the names of its models' classes end."""
    peft: str | None
    """PEFT's task type; None: it has none."""
    pipeline: str
    """The task of a model card, by the hub's name."""
    head: bool = False
    """Whether a model has a head that its checkpoint may lack, and that is trained as a whole beside an adapter."""

    @property
    def with_adapter(self) -> str:
        """The name of PEFT's class that loads an adapter together with its base."""
        return self.name.replace("AutoModel", "AutoPeftModel") if self.peft else "AutoPeftModel"

    @property
    def cls(self) -> Any:
        """The class, which transformers leaves untyped."""
        import transformers

        return getattr(transformers, self.name)

    def types(self) -> Mapping[str, Any]:
        """The model types that it knows."""
        from transformers.models.auto import modeling_auto

        types: Mapping[str, Any] = getattr(modeling_auto, self.known)
        return types


CAUSAL = Auto(
    "AutoModelForCausalLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "causal LM",
    ("ForCausalLM", "LMHeadModel"),
    "CAUSAL_LM",
    "text-generation",
)
SEQUENCE_CLASSIFIER = Auto(
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "sequence classifier",
    ("ForSequenceClassification",),
    "SEQ_CLS",
    "text-classification",
    head=True,
)
SEQUENCE_TO_SEQUENCE = Auto(
    "AutoModelForSeq2SeqLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence-to-sequence LM",
    # Models of images and sounds have names with the second half of T5's too, and some of those are causal LMs.
    (
        *(
            f"{name}ForConditionalGeneration"
            for name in (
                "T5",
                "T5Gemma",
                "T5Gemma2",
                "Bart",
                "Pegasus",
                "PegasusX",
                "LED",
                "M2M100",
                "Blenderbot",
            )
        ),
        *(
            f"{name}ForConditionalGeneration"
            for name in ("BlenderbotSmall", "ProphetNet", "SwitchTransformers", "NllbMoe", "FSMT", "Mvp")
        ),
        "MarianMTModel",
    ),
    "SEQ_2_SEQ_LM",
    "text2text-generation",
)

TOKEN_CLASSIFIER = Auto(
    "AutoModelForTokenClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "token classifier",
    ("ForTokenClassification",),
    "TOKEN_CLS",
    "token-classification",
    head=True,
)
MASKED = Auto(
    "AutoModelForMaskedLM",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "masked LM",
    ("ForMaskedLM",),
    None,
    "fill-mask",
)

AUTO = (CAUSAL, SEQUENCE_CLASSIFIER, SEQUENCE_TO_SEQUENCE, TOKEN_CLASSIFIER, MASKED)


def auto_of(architectures: Sequence[str] | None) -> Auto:
    """The class of a model by the names of its model's classes: a causal LM if none is known."""
    names = [name for name in architectures or () if name]
    return next((auto for auto in AUTO if any(name.endswith(auto.ends) for name in names)), CAUSAL)


def auto_of_adapter(task_type: str | None, base: str | None) -> Auto:
    """The class of an adapter's base model, by PEFT's task type, or without one by the name of its class."""
    if task_type is None:
        return auto_of([base or ""])
    return next((auto for auto in AUTO if auto.peft == task_type), CAUSAL)
