"""The model after public training: trained once, kept in the run folder, and checked when it is read."""

from __future__ import annotations

from safetensors.numpy import save_file

from cloister.lm.model.layout import Vector, params_sha256
from cloister.lm.training.public import train_in_public
from cloister.protocol.errors import RunFolderError
from cloister.protocol.machine.storage import write_file
from cloister.protocol.plan.plan import Plan
from cloister.server.record.folder import RunFolder, opened
from cloister.server.record.progress import Observer, Preparing, Step

_AGAIN = "remove the file to train it again"


def public_model(folder: RunFolder, observe: Observer) -> Vector | None:
    """The model after public training, made once and kept in the run folder; None if the plan has no public training.

    It is made before the sites are asked to join, because sites that train an adapter receive it (`base_of`).

    Raises:
        CloisterError: it cannot be trained.
        RunFolderError: the kept model is damaged.
    """
    plan = folder.plan
    if not plan.public.source:
        return None
    path = folder.public
    if not path.exists():
        observe(Preparing("the model with public text"))
        trained = train_in_public(
            plan,
            folder.place(plan.public.source),
            lambda step: observe(Step("steps of public training", step, plan.public.steps)),
        )
        facts = {"plan": plan.digest(), "params_sha256": params_sha256(trained)}
        write_file(path, lambda temporary: save_file({"model": trained}, temporary, metadata=facts))
    with opened(path, expected="the publicly trained model", fix=_AGAIN) as file:
        kept: Vector = file.get_tensor("model")
        facts = file.metadata() or {}
    if facts.get("params_sha256") != params_sha256(kept):
        raise RunFolderError(
            str(path), expected="weights with the SHA-256 that was recorded with them", fix=_AGAIN
        )
    return kept


def base_of(plan: Plan, public: Vector | None) -> Vector | None:
    """The base parameters for the sites after public training: the whole model with an adapter, otherwise none.

    Without an adapter the publicly trained model is the run's initial model, which the sites receive anyway.
    """
    return None if plan.model.adapter.scheme == "full" else public
