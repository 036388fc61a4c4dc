"""The audit with unit site: the sum of one round, taken many times, with or without one site's update in it.

In each run one site's update is `FAR` clipping norms along one coordinate or, by a fair coin, zero. The other honest
sites of the smallest sum send zero, and colluders add no noise: the worst case. A run's score is that coordinate of the
release. Noise is independent between coordinates (AES in counter mode, `privacy/noise.py`), so one vector of the
others' noise serves as many runs as it has coordinates; the confidence depends on that. With adaptive clipping the
count of unclipped sites is not attacked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.stats import norm

from cloister.aggregation.average import WEIGHT
from cloister.aggregation.sums import training_layout
from cloister.clients.release import Finished, Protected, contribution
from cloister.privacy.audit import distinguish
from cloister.privacy.correlated import CorrelatedNoise
from cloister.privacy.report import AuditRow
from cloister.privacy.terms import Terms
from cloister.protocol.plan import Plan
from cloister.simulations.audited import FAR, Audited, Progress, Streams

_WIDTH = 64
"""Coordinates of the sums."""


def audit_sites(
    plan: Plan,
    terms: Terms,
    dimension: int,
    rounds: int,
    runs: int,
    confidence: float,
    streams: Streams,
    progress: Progress,
) -> Audited:
    """Take one round's sum `runs` times, with a canary or, by a fair coin, zero as one site's update.

    Args:
        plan: The plan.
        terms: Its terms, at the dimension of its model.
        dimension: Coordinates of an update.
        rounds: Rounds of the run's own claim.
        runs: How often the sum is taken.
        confidence: Probability with which the bound is true.
        streams: Noise and coins.
        progress: Receives the progress of the audit.
    """
    assert terms.mechanism is not None, "unit site has a mechanism"
    mechanism = replace(terms.mechanism, dimension=_WIDTH)
    layout = replace(training_layout(plan, dimension), size=_WIDTH)
    sites = plan.honest() if mechanism.variance else plan.quorum()
    clip = plan.privacy.clip
    zero = Finished(np.zeros(_WIDTH, np.float32), 0, 0.0)
    included = streams().child("coins").generator().random(runs) < 0.5
    scores = np.empty(runs)
    for first in range(0, runs, _WIDTH):
        others = np.zeros(layout.length, layout.ring.dtype)
        for _ in range(sites - 1):
            np.add(others, contribution(Protected(layout, mechanism, clip, streams()), zero), out=others)
        for run in range(first, min(runs, first + _WIDTH)):
            place = run - first
            update = zero.vector.copy()
            update[place] = FAR * clip if included[run] else 0.0
            code = Protected(layout, mechanism, clip, streams())
            own = contribution(code, Finished(update, 0, 0.0))
            opened = layout.open(np.add(others, own))
            summed = opened.counters[WEIGHT]
            noise, parts = streams(), mechanism.contributors or summed
            drawn = (
                noise
                if mechanism.correlation is None
                else CorrelatedNoise(mechanism.correlation, noise, _WIDTH).row(1)
            )
            mean, _ = mechanism.decode(opened.mean, summed, clip, drawn)
            scores[run] = mean[place] * parts / clip
        progress(min(runs, first + _WIDTH), runs)
    threshold, at_half_noise = _threshold(mechanism.deviation, runs, terms.delta, confidence)
    said = scores > threshold
    present = int(included.sum())
    false_positives, false_negatives = int((said & ~included).sum()), int((~said & included).sum())
    bound = (
        distinguish(false_positives, runs - present, false_negatives, present, terms.delta, confidence)
        if 0 < present < runs
        else 0.0
    )
    claimed = terms.epsilon(1)
    what = f"one round's sum, taken {runs} times, with one site's update far beyond the clip in it or not"
    right = runs - false_positives - false_negatives
    return Audited(
        what,
        AuditRow(runs, runs, right, confidence, bound, claimed, what),
        claimed,
        terms.epsilon(rounds),
        terms.delta,
        at_half_noise,
    )


def _threshold(deviation: float, runs: int, delta: float, confidence: float) -> tuple[float, float]:
    """The threshold that gives the largest bound if the noise is half of the claimed, and that bound.

    Args:
        deviation: Claimed standard deviation of the noise, in clipping norms.
        runs: Runs, with and without the canary together.
        delta: Delta of the claim.
        confidence: Confidence of the bound.
    """
    half, each = deviation / 2, max(1, runs // 2)
    candidates = 0.5 + np.linspace(-4, 4, 161) * max(half, 0.125)
    best = (0.5, 0.0)
    for threshold in candidates:
        wrong = round(each * float(norm.sf(threshold / half)))
        missed = round(each * float(norm.cdf((threshold - 1) / half)))
        bound = distinguish(wrong, each, missed, each, delta, confidence)
        if bound > best[1]:
            best = (float(threshold), bound)
    return best
