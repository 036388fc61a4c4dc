"""Mutants: one defect each, planted into the source of one function between a plan and what it releases.

A mutant is a line of text that is replaced, so that it runs where the right line would have run.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutant:
    """A defect."""

    where: str
    """Module and qualified name of the function, without `cloister.`."""
    old: str
    """Text of the function, which it has once."""
    new: str

    def __str__(self) -> str:
        return f"{self.where.partition(':')[2]}: {self.new}".replace("\n", " ")

    def _found(self) -> tuple[ModuleType, Any, list[str], str]:
        """The module, what has the function, the names of its classes, and its name."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(f"cloister.{module_name}")
        owner: Any = module
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        return module, owner, classes, name

    def _changed(self, source: str) -> str:
        """The source of the function with the defect."""
        assert source.count(self.old) == 1, f"{self.where} has {self.old!r} {source.count(self.old)} times"
        return source.replace(self.old, self.new)

    def write(self, root: Path) -> None:
        """Replace the function in a copy of the source tree."""
        file = root / f"{self.where.partition(':')[0].replace('.', '/')}.py"
        _, owner, _, name = self._found()
        text, source = file.read_text(encoding="utf-8"), inspect.getsource(getattr(owner, name))
        assert text.count(source) == 1
        file.write_text(text.replace(source, self._changed(source)), encoding="utf-8")

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Replace the function, wherever it was imported to, until the patch is undone."""
        module, owner, classes, name = self._found()
        right = getattr(owner, name)
        source = self._changed(textwrap.dedent(inspect.getsource(right)))
        code = compile(
            source,
            f"<mutant of {self.where}>",
            "exec",
            __future__.annotations.compiler_flag,
        )
        made: dict[str, Any] = {}
        exec(code, module.__dict__, made)
        if classes:
            patch.setattr(owner, name, made[name])
            return
        for other in [each for key, each in sys.modules.items() if key.startswith("cloister.")]:
            if other.__dict__.get(name) is right:
                patch.setattr(other, name, made[name])


STEPS = "clients.training.dpsgd:PrivateTrainer._steps"
TERMS = "privacy.accounting.terms:_round"
ENCODE = "privacy.mechanism.site_noise:SiteMechanism.encode"
TAIL = "privacy.mechanism.site_noise:SiteMechanism.tail"
ADD_NOISE = "privacy.mechanism.site_noise:SiteMechanism.add_noise"
ADD = "add_steps(part, stream.gaussian(part.size, sigma, begin))"
PROTECT = "aggregation.features.site_unit:_AtCoordinator.protect"
PROTECTED = "self._on(total.size).add_noise(total, noise)"

LESS_NOISE_IN_STEPS = [
    Mutant(
        "clients.training.work:train",
        "noise_multiplier=terms.noise_multiplier",
        "noise_multiplier=0.5 * terms.noise_multiplier",
    ),
    Mutant(
        "clients.training.work:train",
        "noise_multiplier=terms.noise_multiplier",
        "noise_multiplier=1e-6 * terms.noise_multiplier",
    ),
    Mutant(STEPS, "noise_multiplier * privacy.clip", "0.5 * noise_multiplier * privacy.clip"),
    Mutant(
        "clients.training.dpsgd:ClippedSum.release",
        "(values[begin:end], sigma,",
        "(values[begin:end], 0.5 * sigma,",
    ),
    Mutant("privacy.mechanism.noise:NoiseStream.add_gaussian", "(samples, sigma,", "(samples, 0.5 * sigma,"),
]
"""Half of the noise, or less, on the way to a step of DP-SGD."""
OTHER_STEPS = [
    Mutant("clients.training.work:train", "noise_multiplier=terms.noise_multiplier", "noise_multiplier=1.0"),
    Mutant(STEPS, "n_units, self._rate", "n_units, 2 * self._rate"),
    Mutant(STEPS, "range(local.steps)", "range(local.steps + 1)"),
    Mutant(STEPS, 'noise.child(f"step-{step + 1}")', 'noise.child("step")'),
    Mutant("privacy.mechanism.noise:NoiseStream.child", '"child", purpose', '"child", ""'),
    Mutant(
        "clients.training.dpsgd:PrivateTrainer.new_sum",
        "self.plan.privacy.clip",
        "2 * self.plan.privacy.clip",
    ),
    Mutant(TERMS, "SampledGaussian(noise,", "SampledGaussian(2 * noise,"),
    Mutant(TERMS, "privacy.sampling_rate, plan", "privacy.sampling_rate / 2, plan"),
    Mutant(TERMS, "plan.local.steps", "plan.local.steps // 2"),
]
"""Other noise, batches, clips or steps than are charged."""
LESS_NOISE_OF_SITES = [
    Mutant(ENCODE, "self.variance, offset", "self.variance / 4, offset"),
    Mutant(ENCODE, "self.variance, offset", "self.variance / 16, offset"),
    Mutant(ENCODE, "if self.variance:", "if False:"),
    Mutant(ENCODE, "(scaled, self.scale,", "(scaled, 2 * self.scale,"),
    Mutant(
        "privacy.mechanism.noise:NoiseStream.skellam",
        "positive[skip:], negative[skip:]",
        "positive[skip:], positive[skip:]",
    ),
]
"""Less noise in the vector of a site, or a longer update under the same noise."""
LESS_NOISE_OF_THE_COORDINATOR = [
    Mutant(PROTECT, PROTECTED, "pass"),
    Mutant(
        PROTECT,
        "self._on(total.size).add_noise(",
        '__import__("dataclasses").replace(self._mechanism, deviation=0.5 * self._mechanism.deviation).add_noise(',
    ),
    Mutant(ADD_NOISE, ADD, "pass"),
    Mutant(ADD_NOISE, ADD, ADD.replace("sigma", "0.5 * sigma")),
    Mutant("privacy.mechanism.noise:add_steps", "np.rint(samples)", "np.rint(0.5 * samples)"),
    Mutant(PROTECT, "self._noise(summed.round)", "NoiseStream.from_declared_seed(1)"),
]
"""Less noise of a trusted coordinator, or the same noise in two rounds."""
UNCHARGED = Mutant(
    "clients.consent.spending:Spending.pay", "terms.cost(purpose, len(set(rounds_paid)))", "()"
)
"""Rounds are recorded, and cost nothing."""
CHARGE = "return self._noted(self._ledger.charge("
UNPAID_ROUND = Mutant("clients.consent.spending:Spending.pay", CHARGE, f"if round_number == 1: {CHARGE}")
"""A site's second round and later ones are charged for nothing."""
