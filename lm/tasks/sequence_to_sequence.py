"""Sequence to sequence: an encoder reads a prompt, the source, and a decoder learns its completion, the target.

A source is cut to the sequence length and has the special tokens that the tokenizer adds by itself, because users of
the saved model call it on the same tokens. The learned tokens are those of the target and the end token, each given the
source and the target's tokens before it; a target that is cut has no end token.

An evaluation also generates the target of each held-out source, and compares it with the record's as a text:

- exact match: both texts are equal.
- ROUGE-L (Lin 2004, "ROUGE: A package for automatic evaluation of summaries", section 3.1): the F measure of a longest
  common subsequence of words, as rouge-score 0.1.2 computes it for one text without a stemmer. Its words are the runs
  of a-z and 0-9 in the text in lower case. The figure is the mean over the examples: a sum in millionths, which adds up
  exactly over batches, ranks and sites.

Generation is greedy: the most probable token, at most `data.target_length` times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.lm.tasks.auto import SEQUENCE_TO_SEQUENCE
from cloister.lm.tasks.task import HeldOut, Pass, Scoring, Task
from cloister.lm.text.examples import Encoder, Example, Text, in_one_sequence, text_in
from cloister.lm.text.records import Record, Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, one_each

if TYPE_CHECKING:  # they take seconds to import
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_GENERATED, _EXACT, _ROUGE_L = "generated targets", "exact matches", "ROUGE-L in millionths"
_MILLION = 10**6


class SequenceToSequence(Task):
    """Prompts with completions, for encoder-decoder models."""

    auto = SEQUENCE_TO_SEQUENCE

    def sample(self) -> dict[str, Any]:
        """A prompt with its completion."""
        return {self.data.prompt_field: "...", self.data.completion_field: "..."}

    def texts(
        self, tokenizer: PreTrainedTokenizerBase, unusable: Unusable, place: str, record: Record
    ) -> tuple[Text, ...] | None:
        """The source, of which nothing is learned, and the target."""
        without = f"without the fields of data.format {self.data.format!r}"
        return unusable.tried(without, self._texts, place, record)

    def _texts(self, place: str, record: Record) -> tuple[Text, ...]:
        source, target = (
            text_in(record, place, name) for name in (self.data.prompt_field, self.data.completion_field)
        )
        return (source, []), (target, [(0, len(target))])

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Text]], list[Example]]:
        """Sources between the special tokens of the tokenizer, and targets with the end token."""
        of_source = in_one_sequence(tokenizer, self.data)
        of_target = Encoder(tokenizer, whole=True, close=True)

        def encode(batch: Sequence[Text]) -> list[Example]:
            pairs = zip(of_source(batch[::2]), of_target(batch[1::2]), strict=True)
            return [example for pair in pairs for example in pair]

        return encode

    def merged(self, parts: Sequence[Example], beside: Any) -> Example:
        """The source, with the tokens of the target as labels."""
        source, target = parts
        return replace(source, labels=target.tokens[: self.data.target_length])

    @property
    def labels_each(self) -> int:
        """The tokens of a target."""
        return self.data.target_length

    def asked(
        self, held_out: Sequence[Example], tokenizer: PreTrainedTokenizerBase, unusable: Unusable
    ) -> Sequences:
        """The held-out sources with their targets."""
        assert isinstance(tokenizer.pad_token_id, int)
        return one_each(held_out, self.tokens_each, self.labels_each, tokenizer.pad_token_id)

    def configure(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Name the padding's token, the end token, and the token that a target begins after: where the model has none,
        the padding's, as T5 does."""
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = tokenizer.pad_token_id

    @property
    def longest(self) -> int:
        """A source or a target."""
        return max(self.data.sequence_length, self.data.target_length)

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sources, with targets as long as they, or of full sources with full targets."""
        import torch

        length, most = tokens.shape[1], self.data.target_length
        width = most if length >= self.data.sequence_length else min(length, most)
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "decoder_input_ids": tokens[:, :1].repeat(1, width),
        }

    def outputs(
        self, forward: Pass, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, M, V) of the targets, each token from those before it: the decoder gets them shifted by one."""
        import torch

        config: Any = forward.module.config
        first = torch.full_like(targets[:, :1], config.decoder_start_token_id)
        given = torch.cat([first, targets[:, :-1]], 1)
        logits = forward.logits(
            input_ids=tokens,
            attention_mask=forward.before_padding(tokens),
            decoder_input_ids=given.masked_fill(given == NOT_LEARNED, config.pad_token_id),
        )
        return logits, targets

    def counters(self) -> tuple[str, ...]:
        """The targets that were generated, those that equal the record's, and the sum of their ROUGE-L."""
        return _GENERATED, _EXACT, _ROUGE_L

    def answers(self, scoring: Scoring, asked: Sequences) -> HeldOut:
        """Generate a target for each row of `asked`, and compare it with the row's own."""
        import torch

        tokenizer = scoring.tokenizer
        assert tokenizer is not None
        found = [0, 0, 0]

        def compare(_: slice, tokens: torch.Tensor, targets: torch.Tensor, __: torch.Tensor | None) -> None:
            for own, other in zip(targets.tolist(), self._generated(scoring, tokens), strict=True):
                if own[0] == NOT_LEARNED:  # the row of a rank that has none
                    continue
                wanted, given = (
                    str(tokenizer.decode([each for each in some if each >= 0], skip_special_tokens=True))
                    for some in (own, other)
                )
                found[0] += 1
                found[1] += wanted == given
                found[2] += round(_MILLION * rouge_l(wanted, given))

        scoring.each_rows(compare, asked)
        sums = scoring.sum(torch.tensor(found, dtype=torch.int64, device=scoring.device))
        return HeldOut(counts=dict(zip(self.counters(), sums.tolist(), strict=True)))

    def _generated(self, scoring: Scoring, tokens: torch.Tensor) -> list[list[int]]:
        """The greedy targets of sources (B, L), with padding after the end token.

        Every rank takes as many steps as the one with the longest target, because the ranks of a mesh pass together.
        """
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        forward, tokenizer = scoring.forward, scoring.tokenizer
        config: Any = forward.module.config
        assert tokenizer is not None
        mask = forward.before_padding(tokens)
        last = torch.full_like(tokens[:, :1], config.decoder_start_token_id)
        inputs: dict[str, Any] = {"input_ids": tokens}
        given, going = [], torch.ones_like(last, dtype=torch.bool)
        for _ in range(self.data.target_length):
            made = forward.outputs(**inputs, attention_mask=mask, decoder_input_ids=last, use_cache=True)
            # Rows behind the tokenizer's only pad the vocabulary.
            best = made.logits[:, -1:, : len(tokenizer)].argmax(-1)
            last = torch.where(going, best, config.pad_token_id)
            given.append(last)
            going = going & (last != tokenizer.eos_token_id)
            if not scoring.sum(going.sum()).item():
                break
            if "input_ids" in inputs:
                inputs = {"encoder_outputs": BaseModelOutput(made.encoder_last_hidden_state)}
            inputs["past_key_values"] = made.past_key_values
        rows: list[list[int]] = torch.cat(given, 1).tolist()
        return rows

    def figures(self, held_out: HeldOut) -> dict[str, Any]:
        """Loss, accuracy and perplexity of the targets' tokens; exact match and ROUGE-L of generated targets."""
        figures = {"loss": held_out.loss, "accuracy": held_out.accuracy, "perplexity": held_out.perplexity}
        generated, exact, rouge = (held_out.counts.get(name, 0) for name in self.counters())
        if not generated:
            return figures
        return figures | {"exact_match": exact / generated, "rouge_l": rouge / generated / _MILLION}

    def wanting(self) -> tuple[str, str]:
        """The field of the target."""
        return "data.completion_field", "check the records"


def rouge_l(target: str, given: str) -> float:
    """ROUGE-L's F measure of a text that was given for a target: 2 P R / (P + R), where P and R are the length of a
    longest common subsequence of words over the words of `given` and of `target`; 0 without words."""
    wanted, found = (re.findall(r"[a-z0-9]+", text.lower()) for text in (target, given))
    if not (wanted and found):
        return 0.0
    row = np.zeros(len(found) + 1, np.int64)
    for word in wanted:
        before = row.copy()
        for at, other in enumerate(found, 1):
            row[at] = before[at - 1] + 1 if word == other else max(before[at], row[at - 1])
    common = int(row[-1])
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall) if common else 0.0
