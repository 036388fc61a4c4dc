"""Classes of models that an installed package registers in the group `cloister.models`: made known to transformers."""

from __future__ import annotations

from collections.abc import Mapping

from cloister.lm.tasks.auto import Auto
from cloister.lm.tasks.registry import task_of
from cloister.protocol.errors import PackageError
from cloister.protocol.machine.packages import load
from cloister.protocol.plan.plan import Plan


def know(plan: Plan) -> Mapping[str, str]:
    """Let transformers build and load the class of models that a plan names of a package, in this process.

    The package is imported once its files were compared with the plan.

    Returns:
        By its model type the name of the class; nothing if the plan names none.

    Raises:
        PackageError: the package is absent, or another one than the plan names; or its name is no class of models for
            the plan's task.
    """
    section = plan.model
    if not section.type:
        return {}
    auto = task_of(plan.data).auto
    assert section.package is not None, "a sound plan names its version and files"
    found = load(
        "model.type", "cloister.models", section.type, (section.package.version, section.package.sha256)
    )
    kind = _checked(section.type, found, auto)
    from transformers import AutoConfig

    AutoConfig.register(kind, found.config_class, exist_ok=True)
    auto.cls.register(found.config_class, found, exist_ok=True)
    return {kind: found.__name__}


def _checked(named: str, found: object, auto: Auto) -> str:
    """The model type of what a package registers."""
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto import configuration_auto as transformers_own

    def refused(expected: str) -> PackageError:
        return PackageError("model.type", named, expected=expected)

    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise refused("a subclass of transformers.PreTrainedModel")
    config = found.config_class
    kind = config.model_type if isinstance(config, type) and issubclass(config, PreTrainedConfig) else ""
    if not kind or kind in vars(transformers_own)["CONFIG_MAPPING_NAMES"]:
        raise refused("a class whose config_class has a model_type that is none of transformers")
    if not found.__name__.endswith(auto.ends):
        raise refused(f"a {auto.called}, whose name ends in {' or '.join(auto.ends)}")
    return kind
