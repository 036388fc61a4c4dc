"""Features of a plan that go together, and the reasons of the others."""

from __future__ import annotations

from typing import get_args

import pytest

from cloister.protocol.plan.settings import Because
from cloister.protocol.plan.soundness import refusals
from cloister.tests.pages.plan_page import FEATURES, Feature, pairs, plan_of

REFUSED = 36
"""It does not grow: a new feature goes together with the others, or takes the place of another one. The four of the
norm bound are those in which a sketch would show a part of one update without all of its noise."""


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_feature_is_sound_alone(feature: Feature) -> None:
    assert not list(refusals(plan_of(feature)))


def test_no_more_pairs_are_refused_and_each_for_one_of_three_reasons() -> None:
    refused = [pair for pair in pairs() if pair.because is not None]
    assert len(refused) <= REFUSED
    assert {pair.because for pair in refused} == set(get_args(Because))


def test_every_refusal_of_a_plan_has_one_of_three_reasons() -> None:
    for one in FEATURES:
        for other in FEATURES:
            assert all(found.because in get_args(Because) for found in refusals(plan_of(one, other)))
