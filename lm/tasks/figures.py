"""The figures of an evaluation: what follows from its sums, and how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloister.lm.tasks.confusion import Confusion
from cloister.protocol.figure import Figure

if TYPE_CHECKING:  # torch takes seconds to import
    from cloister.lm.tasks.evaluate import HeldOut

FIGURES: tuple[Figure, ...] = (
    Figure("loss", "held-out loss", ".3f", unit="nats per {label}", better="lower"),
    Figure("perplexity", "perplexity", ".2f", better="lower"),
    Figure("accuracy", "accuracy", ".1%", better="higher"),
    Figure("bits_per_byte", "bits per byte", ".3f", better="lower"),
    Figure("choice_accuracy", "choice accuracy", ".1%", better="higher"),
    Figure("macro_precision", "macro precision", ".3f", better="higher"),
    Figure("macro_recall", "macro recall", ".3f", better="higher"),
    Figure("macro_f1", "macro F1", ".3f", better="higher"),
)
"""The order in which they are shown."""

CONFUSION = "confusion"
"""The confusion matrix beside them, a table: records of class or choice i, the row, taken for j, the column."""


def figures_of(held_out: HeldOut, *, classified: bool) -> dict[str, Any]:
    """The figures of sums on held-out records, and the confusion matrix; those that there are.

    Args:
        held_out: The sums.
        classified: Whether texts are classified: their labels have no text, and accuracy is that of classes. With
            choices `accuracy` is that of tokens, and `choice_accuracy` the fraction of prompts whose most probable
            choice is their own.
    """
    found: dict[str, Any] = {"loss": held_out.loss, "accuracy": held_out.accuracy}
    if not classified:
        found |= {"perplexity": held_out.perplexity, "bits_per_byte": held_out.bits_per_byte}
    if held_out.confusion:
        confusion = Confusion(held_out.confusion)
        macro = confusion.macro()
        if confusion.records and not classified:
            found["choice_accuracy"] = confusion.accuracy
        found |= {"macro_precision": macro.precision, "macro_recall": macro.recall, "macro_f1": macro.f1}
        found[CONFUSION] = confusion.counts
    return found
