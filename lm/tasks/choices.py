"""Multiple choice: prompts with completions, of which an evaluation also counts the most probable one.

Training is that of prompts. A prompt x counts as answered by the choice c with the largest sum of log p over the tokens
of c and the token that ends the text, each given x and the tokens before it: log p(c | x), where c ends there. There is
no division by the length. The choices exclude each other, so the most probable one is the best guess of a model that
learned their probabilities, as training has it; a mean per token would favour long choices, whose later tokens follow
from the first ones. Of equally probable choices, the first counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.lm.measures.confusion import Confusion
from cloister.lm.tasks.causal import Causal
from cloister.lm.tasks.task import HeldOut, Scoring
from cloister.lm.text.examples import CONTEXT, Example, text_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences
from cloister.protocol.errors import DataError

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedTokenizerBase

_NOT_COMPARED = "in comparing choices, because one does not fit or has no token before it"


class Choices(Causal):
    """Prompts with one of `data.choices`."""

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """As for prompts; and no two choices have the same tokens, so that neither could be more probable."""
        super().check(tokenizer)
        known: dict[tuple[int, ...], str] = {}
        for choice in self.data.choices:
            other = known.setdefault(tuple(tokenizer(choice, add_special_tokens=False)["input_ids"]), choice)
            if other != choice:
                raise DataError(
                    "data.choices",
                    choice,
                    expected=f"other tokens than those of the choice {other!r}, which the tokenizer makes equal to it",
                    fix="keep one of the two, or set model.tokenizer to another one",
                )

    def sample(self) -> dict[str, Any]:
        """A prompt with the first choice."""
        return super().sample() | {self.data.completion_field: self.data.choices[0]}

    def beside(self, unusable: Unusable, place: str, record: Record) -> dict[str, Any] | None:
        """The prompt, and the choice that completes it, an index of `data.choices`."""
        wrong = "with a completion that is not in data.choices"
        question = unusable.tried(wrong, self._question, place, record)
        return None if question is None else {"beside": question}

    def _question(self, place: str, record: Record) -> tuple[str, int]:
        data = self.data
        completion = text_in(record, place, data.completion_field)
        if completion not in data.choices:
            raise DataError(
                f"{place}, field {data.completion_field}",
                completion,
                expected=f"one of data.choices: {', '.join(map(repr, data.choices))}",
                fix="add the completion to data.choices, or correct the record",
            )
        return text_in(record, place, data.prompt_field), data.choices.index(completion)

    def asked(
        self, held_out: Sequence[Example], tokenizer: PreTrainedTokenizerBase, unusable: Unusable
    ) -> Sequences:
        """The prompt of each example with each choice, in a sequence of its own. A prompt that does not fit with one of
        them is left out, because choices of which one is cut cannot be compared."""
        length, pad = self.data.sequence_length, tokenizer.pad_token_id
        size = len(self.data.choices)
        tokens = np.full((len(held_out) * size, length), pad, np.int32)
        labels = np.full(tokens.shape, NOT_LEARNED, np.int32)
        answers: list[int] = []
        for answer, completed, first in self._compared(held_out, tokenizer):
            # The first token of a sequence has no context to be predicted from.
            if first == 0 or max(map(len, completed)) > length:
                unusable.leave_out(_NOT_COMPARED)
                continue
            for row, example in enumerate(completed, len(answers) * size):
                tokens[row, : len(example)] = example.tokens
                labels[row, first : len(example)] = example.tokens[first:]
            answers.append(answer)
        used = slice(len(answers) * size)
        return Sequences(tokens[used], labels[used], None, 0, answers=np.array(answers, np.int32))

    def _compared(
        self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[tuple[int, list[Example], int]]:
        """Complete the prompt of each example with each choice, to compare how probable they are.

        The examples of one prompt are compared from the first token that any of the choices changes: where the end of
        the prompt and the beginning of a choice are one token, prompts alone would end at different places. All tokens
        before it are the same, so the sum of log p over the tokens from it on is, up to a term that the choices share,
        the log probability of the whole text.

        Yields:
            The choice that is an example's own; its prompt with each of the C choices, whole; the token from which they
            are compared.
        """
        data = self.data
        for prompt, answer in (example.beside for example in examples):
            variants = ({data.prompt_field: prompt, data.completion_field: each} for each in data.choices)
            completed = [example for _, example in self.examples(variants, tokenizer, Unusable())]
            if len(completed) < len(data.choices):  # the tokenizer refuses one: nothing is compared
                yield answer, completed, 0
                continue
            first = min(int(np.argmax(example.role != CONTEXT)) for example in completed)
            for example in completed[1:]:
                differs = np.flatnonzero(example.tokens[:first] != completed[0].tokens[:first])
                first = int(differs[0]) if len(differs) else first
            yield answer, completed, first

    def counters(self) -> tuple[str, ...]:
        """The bytes, and the prompts of each choice that the model answers with each."""
        return (*super().counters(), *Confusion.names("choice", len(self.data.choices)))

    def answers(self, scoring: Scoring, asked: Sequences) -> HeldOut:
        """For each of R prompts the most probable of C choices, in R C rows of `asked`."""
        import torch

        assert asked.answers is not None
        size = len(self.data.choices)
        nats = torch.zeros(len(asked), dtype=torch.float64, device=scoring.device)

        def score(rows: slice, targets: torch.Tensor, logits: torch.Tensor) -> None:
            nats[rows] += self.row_losses(logits, targets)

        scoring.each_batch(score, asked, trim=True)
        # Of each row, one part of the mesh has the sum and the others have 0.
        given = scoring.sum(nats).cpu().numpy().reshape(-1, size).argmin(1)
        cells = np.bincount(asked.answers.astype(np.int64) * size + given, minlength=size * size)
        return HeldOut(counts=dict(zip(Confusion.names("choice", size), cells.tolist(), strict=True)))

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """As of prompts, of tokens; and of the choices accuracy, macro figures and the confusion matrix."""
        confusion = Confusion.counted(held_out.counts, "choice", len(self.data.choices))
        chosen = {"choice_accuracy": confusion.accuracy} if confusion.records else {}
        return super().figures(held_out) | chosen | confusion.figures()
