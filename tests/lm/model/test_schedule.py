"""Which parameters a round trains and sums."""

import numpy as np
import pytest

from cloister.lm.model.layout import Layout
from cloister.lm.model.model import outline
from cloister.lm.model.schedule import Schedule
from cloister.protocol.messages.blocks import Span
from cloister.protocol.plan.plan import Plan
from cloister.protocol.plan.soundness import parse


def plan_of(*settings: str) -> Plan:
    layers = ["model.config.num_hidden_layers=7", "model.config.hidden_size=16", "data.sequence_length=16"]
    small = ["model.config.intermediate_size=24", "model.config.num_attention_heads=2"]
    return parse("", ["model.name=builtin:llama", *layers, *small, *settings])


def schedule_of(*settings: str) -> Schedule:
    plan = plan_of(*settings)
    return Schedule.of(plan, outline(plan).layout)


def test_a_round_trains_the_share_of_the_blocks_of_layers_and_all_of_each() -> None:
    schedule = schedule_of("aggregation.part=0.25")
    seen = set[str]()
    for number in range(1, 40):
        names = schedule.of_round(number).names
        blocks = {name.split(".")[2] if ".layers." in name else "" for name in names}
        assert len(blocks) == 2, "a quarter of seven layers and what is outside of them"
        for name in schedule.layout.names:
            block = name.split(".")[2] if ".layers." in name else ""
            assert (name in names) == (block in blocks)
        seen |= blocks
    assert len(seen) == 8


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_a_round_trains_something(part: float) -> None:
    schedule = schedule_of(f"aggregation.part={part}", "model.adapter.scheme=rolora")
    for number in (1, 2):
        layout = schedule.of_round(number)
        assert layout.size
        assert all((".lora_B." if number % 2 else ".lora_A.") in name for name in layout.names)


def test_the_draw_follows_from_seed_and_round_alone() -> None:
    one, same = schedule_of("aggregation.part=0.5"), schedule_of("aggregation.part=0.5")
    other = schedule_of("aggregation.part=0.5", "run.seed=1")
    rounds = range(1, 30)
    drawn = [one.of_round(number).names for number in rounds]
    assert drawn == [same.of_round(number).names for number in rounds]
    assert len(set(drawn)) > 20
    assert drawn != [other.of_round(number).names for number in rounds]


def test_a_plan_without_a_schedule_trains_all_of_its_layout() -> None:
    schedule = schedule_of()
    assert all(schedule.of_round(number) is schedule.layout for number in (1, 2, 3))


def test_a_part_of_a_vector_goes_to_its_places_and_back() -> None:
    layout = Layout(("a", "b", "c", "d"), ((2, 3), (4,), (), (5,)))
    part = layout.only(["d", "a", "b"])
    assert part.names == ("a", "b", "d")
    assert layout.spans(part) == (Span(0, 10), Span(11, 16))
    assert layout.spans(layout) == (Span(0, 16),)
    vector = np.arange(1, 17, dtype=np.float32)
    picked = layout.pick(vector, part)
    np.testing.assert_array_equal(picked, [*range(1, 11), *range(12, 17)])
    assert layout.pick(vector, layout) is vector
    spread = layout.spread(picked, part)
    np.testing.assert_array_equal(spread, np.where(vector == 11, 0, vector))
