"""The final model of a run as a folder for others: a full model, an adapter, or the model with its adapter merged.

The files of a full model or of an adapter are those of the run, byte for byte. Before they are given out, the hash of
the trained parameters is compared with the one that the run recorded, because a model card states it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np

from cloister.lm.model import saved
from cloister.lm.model.layout import Layout, Vector, params_sha256
from cloister.lm.model.model import BUILTIN, load_saved, no_progress_bars
from cloister.lm.text.tokenizer import looks_like_path, on_hub
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import ModelSection

Form = Literal["full", "adapter", "merged"]
"""What a folder holds: a model whose parameters were all trained, an adapter, or a base with its adapter added."""


def write_model(
    final: Path, folder: Path, place: Path, section: ModelSection, digest: str, *, merge: bool
) -> Form:
    """Write a run's final model to a folder, with its tokenizer.

    A merged model has the weights W + (alpha / rank) B A in float32, and needs no PEFT.

    Args:
        final: The run's final model.
        folder: Where it is written: a new folder.
        place: Where that folder will lie in the end: the configuration of an adapter names its own base by that path.
        section: The plan's section for the model.
        digest: `params_sha256` of the trained parameters, as the run recorded it.
        merge: Add the adapter to its base.

    Raises:
        ModelError: the final model is missing, damaged or not that of the run, or `merge` for a model without adapter.
    """
    adapted = section.adapter.scheme != "full"
    if merge and not adapted:
        raise ModelError(
            "--merge", expected="a run that trained an adapter, and this one trained every parameter"
        )
    saved.check(final)
    found = params_sha256(_trained(final, section))
    if found != digest:
        raise ModelError(
            "model",
            str(final),
            expected=f"weights with the SHA-256 that the run recorded, {digest}, but it is {found}",
        )
    if merge:
        module, tokenizer = load_saved(final)
        with no_progress_bars():
            module.merge_and_unload().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return "merged"
    shutil.copytree(
        final, folder, ignore=shutil.ignore_patterns(saved.RECORD, "README.md"), dirs_exist_ok=True
    )
    if not adapted:
        return "full"
    if (final / "base").is_dir():
        file = folder / saved.ADAPTER
        config = json.loads(file.read_bytes())
        config["base_model_name_or_path"] = str(place.absolute() / "base")
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return "adapter"


def base_name(section: ModelSection) -> str:
    """The hub name of the base model; empty if the weights began fresh or came from a folder."""
    name = section.name
    local = looks_like_path(name) or Path(name).is_dir()
    return "" if local or name.startswith(BUILTIN) else name


def base_licence(section: ModelSection) -> str:
    """The licence that the base model's own card states; empty if there is none, or if the card cannot be read."""
    from huggingface_hub import hf_hub_download, metadata_load

    try:
        card = Path(section.name).expanduser() / "README.md"
        if base_name(section):
            online = on_hub(
                section.name, kind="model", revision=section.revision, field="model.name", error=ModelError
            )
            card = Path(
                hf_hub_download(
                    section.name, "README.md", revision=section.revision, local_files_only=not online
                )
            )
        return str((metadata_load(card) or {}).get("license") or "")
    except Exception:  # a card is free text: the hub's library and YAML raise many types
        return ""


def _trained(final: Path, section: ModelSection) -> Vector:
    """The trained parameters of a saved model, in layout order; the base under an adapter is not read."""
    if section.adapter.scheme == "full":
        module, _ = load_saved(final)
        return Layout.of(module.named_parameters()).flatten(module)
    from peft import load_peft_weights

    frozen = ".lora_A." if section.adapter.scheme == "ffa-lora" else None
    parts = {
        name: part
        for name, part in load_peft_weights(str(final), device="cpu").items()
        if frozen is None or frozen not in name
    }
    return np.concatenate([parts[name].numpy().reshape(-1) for name in sorted(parts)])
