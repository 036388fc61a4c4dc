"""The code of a site's update, through the orders that the site reads."""

import numpy as np
import numpy.typing as npt

from cloister.aggregation.features import balance, compression, site_unit
from cloister.aggregation.features.compression import Scales
from cloister.aggregation.features.feature import Basis, Code, Me, Secrets
from cloister.aggregation.features.registry import Orders, features_of
from cloister.aggregation.sums import Sums
from cloister.lm.training.moments import Carry
from cloister.privacy.mechanism.noise import NoiseStream
from cloister.protocol.messages.messages import ByFeature
from cloister.protocol.messages.wire import to_bytes


def told_by(
    basis: Basis,
    *,
    clip: float | None = None,
    steps: balance.LocalSteps | None = None,
    scales: bytes | None = None,
) -> ByFeature:
    """What an honest coordinator's features tell, with other contents, or contents that the plan has no feature for."""
    told = {feature.name: b"" for feature in features_of(basis) if feature.tells}
    if clip or site_unit.NAME in told:
        told[site_unit.NAME] = site_unit.told_clip(basis.plan.privacy.clip if clip is None else clip)
    if scales is not None or compression.NAME in told:
        told[compression.NAME] = (
            Scales.first(basis.plan, basis.parameters).to_bytes() if scales is None else scales
        )
    if steps is not None:
        told[balance.NAME] = to_bytes(balance.Steps(steps))
    return tuple(sorted(told.items()))


def code_for(
    sums: Sums,
    *,
    rounding: bytes,
    clip: float | None = None,
    noise: NoiseStream | None = None,
    carry: Carry | None = None,
    bounds: npt.NDArray[np.float32] | None = None,
) -> Code:
    """The code of a site's update under a plan.

    Args:
        sums: The sums of the plan.
        rounding: As in `Secrets`.
        clip: C of the round; None: the plan's.
        noise: As in `Secrets`.
        carry: As in `Secrets`.
        bounds: Those of a compressed update; None: those of round 1.
    """
    told = told_by(sums, clip=clip, scales=None if bounds is None else bounds.astype("<f4").tobytes())
    orders = Orders.read(sums, told, Me("site-000", lambda: None))
    return orders.code(sums.training, Secrets(rounding, noise, carry))
