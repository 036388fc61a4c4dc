"""The figures of evaluations, and how they are shown: each task gives those that follow from its sums.

This module imports no task: displays import it, and they must not wait for torch.
"""

from __future__ import annotations

from cloister.protocol.figure import Figure

FIGURES: tuple[Figure, ...] = (
    Figure("loss", "held-out loss", ".3f", unit="nats per {label}", better="lower"),
    Figure("perplexity", "perplexity", ".2f", better="lower"),
    Figure("accuracy", "accuracy", ".1%", better="higher"),
    Figure("bits_per_byte", "bits per byte", ".3f", better="lower"),
    Figure("exact_match", "exact match", ".1%", better="higher"),
    Figure("rouge_l", "ROUGE-L", ".3f", better="higher"),
    Figure("preference_accuracy", "preference accuracy", ".1%", better="higher"),
    Figure("choice_accuracy", "choice accuracy", ".1%", better="higher"),
    Figure("macro_precision", "macro precision", ".3f", better="higher"),
    Figure("macro_recall", "macro recall", ".3f", better="higher"),
    Figure("macro_f1", "macro F1", ".3f", better="higher"),
    Figure("entity_precision", "precision of entities", ".3f", better="higher"),
    Figure("entity_recall", "recall of entities", ".3f", better="higher"),
    Figure("entity_f1", "F1 of entities", ".3f", better="higher"),
)
"""The order in which they are shown."""

UNITS = "held_out_units"
"""The noised number of units in an evaluation by the sites of a private run; of metrics alone."""


def noise_of(name: str) -> str:
    """The name of the standard deviation of a figure's noise."""
    return f"{name}_noise"
