"""Seconds by phase: no moment is counted twice."""

import pytest

from cloister.server.record.phases import Phase, Phases, added


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_inside_another_interrupts_it() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now += 1  # no phase
    with phases.during(Phase.SUM):
        clock.now += 2
        with phases.during(Phase.TRAIN):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert phases.lap() == {"sum": 10, "train": 4}
    assert phases.lap() == {}


def test_a_lap_counts_the_phase_that_is_running_up_to_now() -> None:
    clock = Clock()
    phases = Phases(clock)
    with phases.during(Phase.EVALUATE):
        clock.now += 1
        assert phases.lap() == {"evaluate": 1}
        clock.now += 2
    assert phases.lap() == {"evaluate": 2}


def test_an_exception_ends_its_phase() -> None:
    clock = Clock()
    phases = Phases(clock)

    def fail() -> None:
        with phases.during(Phase.TRAIN):
            clock.now += 1
            raise ZeroDivisionError

    with phases.during(Phase.SUM):
        with pytest.raises(ZeroDivisionError):
            fail()
        clock.now += 2
    assert phases.lap() == {"train": 1, "sum": 2}


def test_laps_add_up_in_the_order_of_phases() -> None:
    total = added({"train": 1.0, "prepare": 2.0}, {}, {"train": 4.0, "checkpoint": 0.5})
    assert list(total.items()) == [("prepare", 2.0), ("train", 5.0), ("checkpoint", 0.5)]
