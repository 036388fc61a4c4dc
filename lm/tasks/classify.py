"""Classification: to which of the plan's classes a text belongs, learned by a head that is trained with the model.

A text is cut to the sequence length and has the special tokens that the tokenizer adds by itself, because users of the
saved model call it on the same tokens. It has one label, its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cloister.lm.measures.confusion import Confusion
from cloister.lm.tasks.auto import SEQUENCE_CLASSIFIER
from cloister.lm.tasks.task import HeldOut, Pass, Task
from cloister.lm.text.examples import Example, Text, in_one_sequence, text_in, value_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED
from cloister.protocol.errors import DataError

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class Classify(Task):
    """Texts with a class."""

    auto = SEQUENCE_CLASSIFIER
    ends = False

    def sample(self) -> dict[str, Any]:
        """A text with its label."""
        return {self.data.text_field: "...", self.data.label_field: self.data.classes[0]}

    @property
    def content(self) -> tuple[str, ...]:
        """The text, whatever its label is."""
        return (self.data.text_field,)

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """The text."""
        without = f"without the fields of data.format {self.data.format!r}"
        text = unusable.tried(without, text_in, record, place, self.data.text_field)
        return None if text is None else ((text, [(0, len(text))]),)

    def beside(self, unusable: Unusable, place: str, record: Record) -> dict[str, Any] | None:
        """The class of a record, as an index of `data.classes`."""
        label = unusable.tried("without a label in data.classes", self._label, place, record)
        return None if label is None else {"labels": np.array([label], np.int32)}

    def _label(self, place: str, record: Record) -> int:
        data = self.data
        value = value_in(record, place, data.label_field)
        name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not (isinstance(name, str) and name in data.classes):
            raise DataError(
                f"{place}, field {data.label_field}",
                value,
                expected=f"one of data.classes: {', '.join(data.classes)}",
                fix="add the class to data.classes, or correct the record",
            )
        return data.classes.index(name)

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """Texts between the special tokens of the tokenizer, in at most a sequence."""
        return in_one_sequence(tokenizer, self.data)

    @property
    def labels_each(self) -> int:
        """The class."""
        return 1

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Name the classes, and the token by which the model finds the end of a text."""
        named_outputs(config, self.data.classes, tokenizer)
        config.problem_type = "single_label_classification"

    def outputs(
        self, forward: Pass, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, 1, C). The model may attend in both directions, so it is told where the padding begins."""
        logits = forward.logits(input_ids=tokens, attention_mask=forward.before_padding(tokens))
        return logits[:, None], targets

    def factors(self, targets: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """The weight of a text's class."""
        if not self.data.class_weights:
            return None
        weights = np.array(self.data.class_weights, np.float32)
        return np.where(targets[:, 0] == NOT_LEARNED, np.float32(0), weights[np.maximum(targets[:, 0], 0)])

    def counters(self) -> tuple[str, ...]:
        """The texts of each class that the model takes for each."""
        return Confusion.names("class", len(self.data.classes))

    def count(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The confusion matrix of a batch, its rows one after the other."""
        classes = len(self.data.classes)
        cells = (targets * classes + logits.argmax(-1))[targets != NOT_LEARNED]
        return cells.bincount(minlength=classes * classes)

    def predicted(self, module: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> list[dict[str, Any]]:
        """The classes with their probabilities, the most probable first."""
        import torch

        (example,) = self.encoder(tokenizer)([(text, [(0, len(text))])])
        if not len(example):
            raise DataError("text", text, expected="a text that is not empty")
        with torch.no_grad():
            shares = module(input_ids=torch.from_numpy(example.tokens)[None].long()).logits[0].softmax(-1)
        named = zip(self.data.classes, shares.tolist(), strict=True)
        return [
            {"class": name, "probability": share} for name, share in sorted(named, key=lambda each: -each[1])
        ]

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """Loss and accuracy of texts, macro figures and the confusion matrix."""
        confusion = Confusion.counted(held_out.counts, "class", len(self.data.classes))
        return {"loss": held_out.loss, "accuracy": held_out.accuracy} | confusion.figures()


def named_outputs(config: PreTrainedConfig, names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Name the outputs of a model's head, which sets their number, and the padding's token."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
