"""Text <-> tokens: bytes or a trained tokenizer for fresh weights, a checkpoint's own tokenizer for pretrained ones.

Bytes as tokens need no file, no training and no network, are lossless, and make a loss per token a loss per byte. The
byte tokenizer is built with the same library as every other tokenizer here, so any program that loads a saved model
(`AutoTokenizer`, an inference server) loads it too; a class of our own would require this package there.

The hub is asked once, with a short timeout, before any library call that would retry for a minute.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
from blake3 import blake3
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cloister.protocol.encoding import pack
from cloister.protocol.errors import CloisterError, ModelError
from cloister.protocol.plan.plan import ModelSection

END = "<|end|>"
PAD = "<|pad|>"
MASK = "<|mask|>"
_CHAT = (
    "{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
_HUB_TIMEOUT_S = 5.0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer with the bytes of UTF-8 as tokens 0..255, `<|end|>` (eos) as 256, `<|pad|>` as 257.

    Encoding then decoding gives back any text exactly. `<|end|>` and `<|pad|>` written out in a text become their
    token, as the special tokens of every tokenizer do.
    """
    # Byte-level BPE names each byte by a printable character: itself where it is printable, else the next from 256.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend)


SMALLEST_VOCABULARY = 258
"""The bytes, `<|end|>` and `<|pad|>`."""
LARGEST_VOCABULARY = 2**24
"""Far above that of any model."""


def train_tokenizer(
    texts: Iterable[str], kind: Literal["bpe", "unigram"], vocabulary: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on public text: its vocabulary shows what the text contains.

    Both kinds work on the bytes of UTF-8 and have every byte as a token, so that a text of any language comes back
    whole; neither has an unknown token. `bpe` merges the most frequent pair of tokens again and again (Sennrich
    et al. 2016, "Neural machine translation of rare words with subword units"); `unigram` drops pieces of a large
    vocabulary by their likelihood (Kudo 2018, "Subword regularization").

    Args:
        texts: The texts.
        kind: The algorithm.
        vocabulary: Number of tokens, with the bytes, `<|end|>` (eos) and `<|pad|>`; fewer if the text has no more.

    Raises:
        ModelError: there is no text.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "special_tokens": [END, PAD],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    model = models.BPE() if kind == "bpe" else models.Unigram()
    trainer = trainers.BpeTrainer(**options) if kind == "bpe" else trainers.UnigramTrainer(**options)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = (each for each in texts if each)
    first = next(text, None)
    if first is None:
        raise ModelError("text", expected="at least one character to train on")
    backend.train_from_iterator(itertools.chain([first], text), trainer)
    return _fast(backend)


def load_tokenizer(model: ModelSection, *, ends: bool = True, masks: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the plan names; it has a padding token, and an end-of-text token if texts end with it.

    A tokenizer without a padding token pads with its end-of-text token: padding comes last in a sequence and is
    never learned, so the choice of token makes no difference. A tokenizer without a mask token gets `<|mask|>` for a
    fresh model, which has an embedding for it.

    Args:
        model: The plan's section.
        ends: Whether texts end with the end-of-text token; texts that are classified do not.
        masks: Whether tokens are hidden by a mask token.

    Raises:
        ModelError: the folder has no tokenizer, the hub does not have the name, the hub cannot be reached and its
            cache has no copy, or the tokenizer has no end-of-text token, where texts end with it or pad with it, or no
            mask token, where a checkpoint needs it.
    """
    name, own = model.tokenizer_name, model.tokenizer == "auto"
    field = "model.name" if own else "model.tokenizer"
    tokenizer = (
        byte_tokenizer() if name == "bytes" else _named_tokenizer(model, field, name, own=own, ends=ends)
    )
    if masks and tokenizer.mask_token_id is None:
        if not model.name.startswith("builtin:"):
            raise ModelError(
                field,
                name,
                expected="a tokenizer with a mask token (mask_token), as models that learned hidden tokens have",
                fix='set model.name to a masked LM, or data.task = "causal"',
            )
        tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer if name == "bytes" else _as_saved(tokenizer, field)


def _as_saved(tokenizer: PreTrainedTokenizerBase, field: str) -> PreTrainedTokenizerBase:
    """The tokenizer that reads what a tokenizer saves.

    The digest that sites compare is of what is saved. What was read from a file can have more in memory, such as two
    words with one id, of which one is saved, and so cut texts otherwise under an equal digest.
    """
    name = tokenizer.name_or_path
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        again = read_tokenizer(field, folder, "main", local=True)
    again.name_or_path = name
    if "name_or_path" in again.init_kwargs:
        again.init_kwargs["name_or_path"] = name
    return again


def _named_tokenizer(
    model: ModelSection, field: str, name: str, *, own: bool, ends: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; errors as `load_tokenizer`."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        tokenizer = read_tokenizer(field, str(folder), "main", local=True)
    elif folder.exists() or looks_like_path(name):
        raise ModelError(field, name, expected="an existing folder that holds a tokenizer, or a hub name")
    else:
        revision = model.revision if own else "main"
        online = on_hub(name, kind="model", revision=revision, field=field, error=ModelError)
        tokenizer = read_tokenizer(field, name, revision, local=not online)
    # Others keep files, not values: what they have loaded cannot be compared between sites.
    if not tokenizer.is_fast:
        raise ModelError(
            field,
            name,
            expected=f"a tokenizer of the tokenizers library (tokenizer.json), not {type(tokenizer).__name__}",
            fix="convert it, or choose another tokenizer: model.tokenizer",
        )
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise ModelError(
            field,
            name,
            expected="a tokenizer that cuts a text in one way, and its model has a dropout",
            fix="set dropout to null in its tokenizer.json",
        )
    if tokenizer.eos_token_id is None and (ends or tokenizer.pad_token_id is None):
        raise ModelError(
            field,
            name,
            expected="a tokenizer with an end-of-text token (eos_token)",
            fix="set eos_token in its tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


_NOT_OF_TOKENS = {
    "tokenizer_config.json": ("name_or_path", "transformers_version", "is_local", "local_files_only"),
    "tokenizer.json": ("truncation", "padding"),
}
"""Fields of a saved tokenizer that tell where it comes from, or that its last call has set, by file."""


@lru_cache(maxsize=8)  # with hundreds of sites in a process, each asks
def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """BLAKE3, in hex, over everything that a tokenizer saves: vocabulary, merges, settings, chat templates.

    It is of the tokenizer in memory, whatever files it was read from, and that has nothing which it does not save
    (`load_tokenizer`). A tokenizer is not changed after it was loaded.

    Args:
        tokenizer: As `load_tokenizer` returned it.
    """
    digest = blake3()
    with TemporaryDirectory() as folder:
        for path in sorted(map(Path, tokenizer.save_pretrained(folder))):
            name, content = path.relative_to(folder).as_posix(), path.read_bytes() if path.is_file() else b""
            if name in _NOT_OF_TOKENS:
                fields = json.loads(content)
                kept = {key: each for key, each in fields.items() if key not in _NOT_OF_TOKENS[name]}
                content = json.dumps(kept, sort_keys=True).encode()
            digest.update(pack(type(tokenizer).__name__, name, content))
    return digest.hexdigest()


def _fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer for `transformers`, with the special tokens and the chat template of this package."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # its constructor has no annotations
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        chat_template=_CHAT,
        clean_up_tokenization_spaces=False,
    )


def looks_like_path(name: str) -> bool:
    """Whether `name` can only be a path: no hub name is absolute, relative, or has two slashes."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name


def on_hub(
    name: str, *, kind: Literal["model", "dataset"], revision: str, field: str, error: type[CloisterError]
) -> bool:
    """Ask the hub for `name`, once, with a timeout of 5 s: True if it has it, False if it cannot be reached.

    Raises:
        error: the hub answers that the repository or revision does not exist, or that it is not public.
    """
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        raise error(field, name, expected="a hub name such as owner/name, or an existing path") from None
    except HfHubHTTPError as answer:
        status = answer.response.status_code
        if status == 429 or status >= 500:
            return False
        raise error(
            field,
            name,
            expected=f"an existing path, or a {kind} that the hub has at revision {revision} (HTTP status {status})",
            fix="check the name, and set HF_TOKEN if it is not public",
        ) from None
    except (httpx.HTTPError, OSError):
        return False
    return True


def read_tokenizer(field: str, name: str, revision: str, *, local: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or of a hub name, as transformers loads it.

    Args:
        field: What errors call it.
        name: The folder, or the hub name.
        revision: Commit, branch or tag of a hub name.
        local: Whether the hub must not be asked.

    Raises:
        ModelError: it cannot be loaded, or is empty.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=revision, local_files_only=local, trust_remote_code=False
        )
    except Exception as error:  # the library raises many types for a file that it cannot read
        if local and not Path(name).expanduser().is_dir():
            expected = "a name in the hub's local cache, because the hub cannot be reached"
            raise ModelError(
                field, name, expected=expected, fix="download it first, or give a folder"
            ) from error
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            field, name, expected=f"a tokenizer that transformers can load ({reason})"
        ) from error
    if len(tokenizer) == 0:
        raise ModelError(field, name, expected="a folder with a tokenizer, but its vocabulary is empty")
    return tokenizer
