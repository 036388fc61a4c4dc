"""The control variates of SCAFFOLD (Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1), from updates alone.

Site i has a control variate c_i, the coordinator their mean c over all N sites; all begin at zero. From the global
model x a site takes K steps with gradients g_k, each clipped to `local.clip_norm`, and learning rates eta_k, which may
change from step to step:

    y_0 = x,    y_k+1 = y_k - eta_k (g_k - c_i + c),    update u_i = y_K - x,    H = eta_0 + ... + eta_K-1.

The steps add up to -u_i / H = (sum_k eta_k g_k) / H - c_i + c. So option II of the algorithm, with H instead of K eta,

    c_i+ = c_i - c - u_i / H,

is the mean of the gradients of the round, weighted by their learning rates, exactly. What is clipped is the gradient
and not the corrected one: scaled steps would leave a part of c - c_i in c_i+. Weight decay is a part of the gradient.

The algorithm also sends c_i+ - c_i = -c - u_i / H. H follows from the plan and is the same for all sites, so the mean
over the sites S of a sum follows from the mean update, which is known anyway, and no site sends anything more:

    c+ = c + |S| / N mean over S of (c_i+ - c_i) = c + |S| / N (-c - mean over S of u_i / H).

Under masks the coordinator learns the mean update, as in every run, and c; no c_i and no update of one site. A site
takes u_i as it was coded for the sum, clipped and rounded, so that c stays the mean of the c_i up to float32.

A site that is in no later sum keeps its share of c. The paper's rates hold where each site is drawn again and again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cloister.protocol.blocks import cut

Vector = npt.NDArray[np.float32]


def move(variate: Vector, common: Vector, update: Vector, sizes: float, share: float = 1.0) -> None:
    """Add `share` × (-common - update / sizes) to a control variate, in place and in float64.

    Args:
        variate: (d,) float32: c_i with the site's update, or c with the mean update.
        common: (d,) float32: c; it may be `variate` itself.
        update: (d,) float32: as it is decoded from the sum.
        sizes: H, the sum of the round's learning rates, above 0.
        share: |S| / N at the coordinator, 1 at a site.
    """
    for begin, end, _, _ in cut(0, variate.size):
        change = np.divide(update[begin:end], -sizes, dtype=np.float64)
        change -= common[begin:end]
        variate[begin:end] += share * change
