"""The files that a model is made from, besides the plan: a digest of what all parties must have alike.

A site's update depends on the frozen base under an adapter, on the configuration and on the tokenizer. They are read
from a folder or from the hub, where a branch may move between the downloads of two sites. So the digest is a part of
what the sites of a secure sum sign (`clients/site.py`, `server/round/sum.py`): masks of sites with other files do not
cancel. Weights that are all trained are not in it: each round's global model replaces them.
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3
from huggingface_hub import snapshot_download

from cloister.protocol.encoding import pack
from cloister.protocol.plan.plan import ModelSection

_CONFIGURATION = ("config.json",)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_TOKENIZER = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.jinja",
)


def origin(model: ModelSection, *, weights: bool) -> str:
    """BLAKE3, in hex, over names and contents of the files; empty where the plan alone decides.

    Args:
        model: The plan's section, whose model and tokenizer this process has loaded.
        weights: Whether values of a named checkpoint stay in use after the first global model.
    """
    read: list[tuple[str, str, tuple[str, ...]]] = []
    if not model.name.startswith("builtin:"):
        read.append((model.name, model.revision, _CONFIGURATION + (_WEIGHTS if weights else ())))
    if model.tokenizer_name != "bytes":
        revision = model.revision if model.tokenizer == "auto" else "main"
        read.append((model.tokenizer_name, revision, _TOKENIZER))
    if not read:
        return ""
    digest = blake3()
    for name, revision, patterns in read:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
            digest.update(pack(path.name, blake3().update_mmap(path).digest()))
    return digest.hexdigest()
