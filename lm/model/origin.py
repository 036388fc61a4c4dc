"""What a model is made from, besides the plan: a digest of what all parties must have alike.

A site's update depends on the frozen base under an adapter, on the configuration and on the tokenizer. They are read
from a folder or from the hub, where a branch may move between the downloads of two sites. So the digest is a part of
what the sites of a secure sum sign (`clients/site.py`, `server/sum/sum.py`), of the facts of a kept update, and of what
a site carries from round to round: masks of sites with other models do not cancel.

It is of what was loaded, in the memory of this process, and not of files: which files a library reads follows from
their contents, and they may change between two readings. Weights that are all trained are not in it: each round's
global model replaces them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from transformers import PreTrainedTokenizerBase

from cloister.protocol.encoding import pack
from cloister.protocol.plan.plan import ModelSection

_ELSEWHERE = ("transformers_version", "name_or_path", "is_local", "local_files_only")
"""Fields that tell where a model comes from, and by which release: sites may have it in other folders."""
_OF_A_CALL = ("truncation", "padding")
"""Fields of a tokenizer that its last call has set."""


def origin(
    model: ModelSection, module: nn.Module, tokenizer: PreTrainedTokenizerBase, trained: Collection[str]
) -> str:
    """BLAKE3, in hex, over configuration, frozen values and tokenizer; empty where the plan alone decides.

    Args:
        model: The plan's section.
        module: The model with its adapter, before its base is lowered; parameters that some round trains may be on
            device `meta`.
        tokenizer: Its tokenizer.
        trained: Names of the parameters that some round trains.
    """
    digest = blake3()
    own = not model.name.startswith("builtin:")
    if own:
        digest.update(pack("configuration", _canonical(_plain(module).config.to_dict())))
        # Buffers that are not stored follow from the configuration.
        for name, value in sorted(dict((*module.named_parameters(), *module.named_buffers())).items()):
            if name not in trained and not value.is_meta:
                digest.update(pack(name, str(value.dtype), *value.shape))
                digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    if model.tokenizer_name != "bytes":
        with tempfile.TemporaryDirectory() as folder:
            for path in sorted(map(Path, tokenizer.save_pretrained(folder))):
                if path.is_file():
                    content = path.read_bytes()
                    known = _canonical(json.loads(content)) if path.suffix == ".json" else content
                    digest.update(pack(path.relative_to(folder).as_posix(), known))
    return digest.hexdigest() if own or model.tokenizer_name != "bytes" else ""


def _plain(module: nn.Module) -> Any:
    get_base: Any = getattr(module, "get_base_model", None)
    return module if get_base is None else get_base()


def _canonical(fields: Any) -> str:
    """Fields as JSON in one order, without those that do not decide what is computed."""
    if not isinstance(fields, dict):
        return json.dumps(fields)
    decisive = {
        name: each for name, each in fields.items() if name.strip("_") not in (*_ELSEWHERE, *_OF_A_CALL)
    }
    return json.dumps(decisive, sort_keys=True, default=str)
