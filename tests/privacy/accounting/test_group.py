"""Several units together: the figures of a report are upper bounds that rise."""

from __future__ import annotations

import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from cloister.privacy.accounting import group
from cloister.privacy.accounting.accountant import Spent, spent
from cloister.privacy.mechanism.events import Event, Gaussian, SampledGaussian
from cloister.privacy.mechanism.site_noise import distributed

STEPS = SampledGaussian(1.0, 0.01, 500)


def rows(events: list[Event], delta: float = 1e-5, largest: float = 10.0) -> dict[int, float | None]:
    return group.epsilons(events, delta, spent(events, delta).epsilon, largest)


@pytest.mark.slow
def test_figures_are_the_accountants_from_a_coarser_grid_and_never_below() -> None:
    found = rows([STEPS])
    assert list(found) == [1, 2, 5, 10, 100]
    assert found[1] == spent([STEPS], 1e-5).epsilon
    exact = spent([STEPS], 1e-5, group=2).epsilon
    assert found[2] is not None
    assert exact <= found[2] <= 1.02 * exact
    assert found[5] is not None
    assert 6.2431 < found[5] < 10  # that of four records is below that of five
    assert (found[10], found[100]) == (None, None)


def test_one_noise_for_several_is_a_gaussian_of_so_many_times_the_sensitivity() -> None:
    """By an independent accountant, also for as many as a hundred."""
    found = rows([Gaussian(200.0, 4)], 1e-4)
    for size in group.SIZES:
        reference = PLDAccountant()
        reference.compose(SelfComposedDpEvent(GaussianDpEvent(200.0 / size), 4))
        assert found[size] == pytest.approx(reference.get_epsilon(1e-4), rel=1e-3)


def test_skellam_noise_and_nothing() -> None:
    mechanism = distributed(40.0, 1000, 20, 15, 32, None)
    found = rows([mechanism.event], 1e-4)
    known = [epsilon for epsilon in found.values() if epsilon is not None]
    assert known == sorted(known)
    assert len(known) >= 3
    assert found[2] == spent([mechanism.event], 1e-4, group=2).epsilon
    assert set(rows([]).values()) == {0.0}


def test_no_row_is_below_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of two accountants may cross; a group protects no more than a part of it."""
    monkeypatch.setattr(group, "spent", lambda *_events, group, points: Spent(5.0 - group, 1e-5, "pld"))
    assert rows([STEPS])[5] == 3.0
    assert group.epsilons([STEPS], 1e-5, 20.0, 10.0) == dict.fromkeys(group.SIZES)
