"""What a model is made from, besides the plan: a digest of what all parties must have alike.

A site's update depends on the frozen base under an adapter, on the configuration and on the tokenizer. They are read
from a folder or from the hub, where a branch may move between the downloads of two sites. So the digest is a part of
what the sites of a secure sum sign (`clients/site.py`, `server/sum/sum.py`), of the facts of a kept update, and of what
a site carries from round to round: masks of sites with other models do not cancel.

It is of what was loaded, in the memory of this process, and not of files: which files a library reads follows from
their contents, and they may change between two readings. The memory is the process's own (`model.py`), so that no more
of a file than its values reaches training. Weights that are all trained are not in it: each round's
global model replaces them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cloister.lm.text.tokenizer import tokenizer_digest
from cloister.protocol.encoding import pack
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import ModelSection

_ELSEWHERE = ("transformers_version", "_name_or_path", "_commit_hash")
"""Fields of a configuration that tell where a model comes from: sites may have it in other folders."""


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

    Raises:
        ModelError: the configuration has values that cannot be compared between sites.
    """
    digest = blake3()
    # A class of models of a package may read what it likes when it is built.
    own = bool(model.type) or not model.name.startswith("builtin:")
    if own:
        config: Any = module.config  # under an adapter that of its base
        digest.update(pack("configuration", _canonical(config), type(plain(module)).__name__))
        # The plan's seed gives the frozen factors of an adapter, and their last bits are those of a processor.
        drawn = _of_adapter(module)
        for name, value in sorted(dict((*module.named_parameters(), *module.named_buffers())).items()):
            if name not in trained and id(value) not in drawn and not value.is_meta:
                digest.update(pack(name, str(value.dtype), *value.shape))
                digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    if model.tokenizer_name != "bytes":
        digest.update(pack("tokenizer", tokenizer_digest(tokenizer)))
    return digest.hexdigest() if own or model.tokenizer_name != "bytes" else ""


def _of_adapter(module: nn.Module) -> set[int]:
    """Identities of the parameters that PEFT has added."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, BaseTunerLayer)
        for name in layer.adapter_layer_names
        for parameter in getattr(layer, name).parameters()
    }


def plain(module: nn.Module) -> nn.Module:
    """The model of transformers without its adapter."""
    get_base: Any = getattr(module, "get_base_model", None)
    plain: nn.Module = module if get_base is None else get_base()
    return plain


def _canonical(config: PreTrainedConfig) -> str:
    """Every attribute of a configuration as JSON, also those that it would not save."""

    def fields(value: Any) -> Any:
        if isinstance(value, PreTrainedConfig):
            known = {name: each for name, each in vars(value).items() if name not in _ELSEWHERE}
            # Fields alone do not tell two types of models apart; beside them no field can take the type's place.
            return {"class": type(value).__name__, "fields": known}
        if isinstance(value, set):
            return sorted(map(str, value))
        if isinstance(value, torch.dtype):
            return str(value)
        raise ModelError(
            "model.name",
            type(value).__name__,
            expected="a model whose configuration has numbers, texts, lists and tables only, which sites can compare",
        )

    return json.dumps(fields(config), sort_keys=True, default=fields)
