"""A figure of a round's mean is one file, and sees what was released alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cloister.aggregation.features import registry
from cloister.aggregation.features.feature import AtCoordinator, Feature, Figures, Summed
from cloister.aggregation.vector.rotation import Floats
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.server.record.folder import RunFolder
from cloister.server.run import run
from cloister.tests.parties.federation import CENTRAL, Federation, tiny


class Largest(AtCoordinator):
    def before_step(self, mean: Floats, sums: Sequence[Summed]) -> Figures:
        with pytest.raises(ValueError, match="read-only"):
            mean[0] = 0
        return {"largest_change": float(np.abs(mean).max())}


@pytest.mark.parametrize("settings", [[], ["server.gate.norm=1e-9"]], ids=["moves", "refused"])
def test_a_figure_of_the_mean_is_of_the_mean_with_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    added = Feature("largest", wanted=lambda _basis: True, coordinator=Largest)
    monkeypatch.setattr(registry, "FEATURES", (*registry.FEATURES, added))
    noisy = ("privacy.noise_multiplier=50.0", "privacy.adaptive={count_noise=30.0}", "run.rounds=1")
    federation = Federation(tmp_path, tiny(*CENTRAL, *noisy, *settings))
    RunFolder.create(tmp_path / "run", federation.plan).close()
    released: list[float] = []
    with RunFolder.reopen(tmp_path / "run") as folder:
        run(
            folder,
            federation.channel,
            lambda _event: None,
            noise=NoiseStream.from_declared_seed,
            released=lambda _group, mean, _sites: released.append(float(np.abs(mean).max())),
        )
        row = folder.metrics()[-1]
    assert [row["largest_change"]] == released
    assert bool(row["refused"]) == bool(settings)
