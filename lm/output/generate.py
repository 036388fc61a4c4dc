"""Generate text from a saved model, to see what a run has learned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from cloister.lm.model.model import class_of, load_saved, seeded
from cloister.lm.tasks.auto import CAUSAL, SEQUENCE_TO_SEQUENCE, Auto
from cloister.protocol.errors import ModelError


def generate(
    folder: Path,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    fit: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
) -> str:
    """Continue `prompt` with the model in `folder`, as `lm.model.model.save_pretrained` writes it, on the CPU; of a
    sequence-to-sequence model the prompt is the source, and its target is written.

    Args:
        folder: A full model, or an adapter with its base in `folder/base` or named in its configuration.
        prompt: Text to continue, or a source; an empty prompt starts from the tokenizer's bos token, else eos, else
            token 0.
        chat: Take the prompt as the first turn of a user, by the tokenizer's chat template.
        max_new_tokens: Maximum number of tokens to add; fewer if the model ends the text.
        fit: Add fewer where the model has not as many positions, instead of an error.
        temperature: Divides the logits before sampling from all tokens; 0 always takes the most likely token.
        seed: Seed of the sampling; the process's own random state is unchanged.

    Returns:
        The prompt and its continuation, of a chat the answer and of a source the target alone; without special tokens,
        and without the bytes of a character that was cut at the end.

    Raises:
        ModelError: the folder has no model or a damaged one, its model writes no text, or prompt and new tokens
            together exceed its positions.
    """
    device = torch.device("cpu")
    module, tokenizer = _loaded(folder, CAUSAL, SEQUENCE_TO_SEQUENCE)
    apart = class_of(module) is SEQUENCE_TO_SEQUENCE  # the encoder's positions are not the decoder's
    tokens: list[int] = tokenizer(prompt)["input_ids"] if prompt else _first(tokenizer)
    if chat:
        turn = [{"role": "user", "content": prompt}]
        asked: Any = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
        tokens = list(asked["input_ids"])
    config = module.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    taken = 0 if apart else len(tokens)
    if fit and isinstance(longest, int) and 0 < len(tokens) < longest:
        max_new_tokens = min(max_new_tokens, longest - taken)
    if isinstance(longest, int) and 0 < longest < max(len(tokens), taken + max_new_tokens):
        raise ModelError(
            "prompt",
            f"{len(tokens)} tokens plus {max_new_tokens} new tokens",
            expected=f"at most the {longest} positions of the model in total",
        )
    given = torch.tensor([tokens], device=device)  # (1, T)
    with seeded("generate", seed, device=device):
        output = _continued(module, tokenizer, given, max_new_tokens, temperature)
    text = _text(tokenizer, output[0, taken:])
    return text if chat or apart else prompt + text


def samples(folder: Path, count: int, *, max_new_tokens: int = 256, seed: int = 0) -> Iterator[str]:
    """Texts that the causal model in `folder` writes from nothing, at temperature 1, on the CPU.

    Args:
        folder: As for `generate`.
        count: Number of texts.
        max_new_tokens: Most tokens of each; fewer if the model has not as many positions.
        seed: As for `generate`.

    Raises:
        ModelError: the folder has no model or a damaged one, or its model is no causal LM.
    """
    module, tokenizer = _loaded(folder, CAUSAL)
    longest = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and longest > 0:
        max_new_tokens = min(max_new_tokens, longest - 1)
    for begin in range(0, count, _AT_ONCE):
        given = torch.tensor([_first(tokenizer)] * min(_AT_ONCE, count - begin))
        with seeded("samples", seed, begin):  # not around `yield`: the caller's random state is its own
            rows = _continued(module, tokenizer, given, max_new_tokens, 1.0)
        for row in rows:
            yield _text(tokenizer, row[1:])


_AT_ONCE = 64
"""Texts that are written together."""


def _loaded(folder: Path, *accepted: Auto) -> tuple[Any, PreTrainedTokenizerBase]:
    module, tokenizer = load_saved(folder)
    if (auto := class_of(module)) not in accepted:
        raise ModelError(
            "model", str(folder), expected=f"a causal LM, but it is a {auto.called}, which writes no text"
        )
    return module.to(torch.device("cpu")).eval(), tokenizer


def _first(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token from which a text begins."""
    return [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, 0) if token is not None][:1]


def _continued(
    module: Any, tokenizer: PreTrainedTokenizerBase, given: torch.Tensor, tokens: int, temperature: float
) -> torch.Tensor:
    """Rows of tokens (B, T), each with at most so many more; the random state is the caller's."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    beyond = list(range(len(tokenizer), module.config.get_text_config().vocab_size))  # rows that only pad
    end = tokenizer.eos_token_id
    with torch.no_grad():
        output: torch.Tensor = module.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=tokens,
            use_cache=True,
            pad_token_id=end if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            suppress_tokens=beyond or None,
            **sampling,
        )
    return output


def _text(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor) -> str:
    """Tokens as text, without what a decoder writes for bytes that are no whole character at the end."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")
