"""What the sums of a plan are made of."""

import numpy as np
import pytest

from cloister.aggregation.evaluation import CORRECT
from cloister.aggregation.features.in_clear import TOKENS
from cloister.aggregation.features.site_unit import mechanism_of
from cloister.aggregation.sums import Sums
from cloister.aggregation.vector.average import WEIGHT, PlainSum
from cloister.privacy.mechanism.clip import rounded_l2
from cloister.protocol.errors import UpdateError
from cloister.protocol.plan.soundness import parse
from cloister.tests.parties.federation import CENTRAL, tiny
from cloister.tests.tools.raises import raises


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        (["server.evaluation_sequences=10", "data.sequence_length=64"], 640),
        (["server.evaluation_sequences=10", "data.task=classify", 'data.classes=["a", "b"]'], 10),
    ],
)
@pytest.mark.parametrize("name", [CORRECT, TOKENS])
def test_no_site_evaluates_more_labels_than_the_plan_lets_it(
    settings: list[str], labels: int, name: str
) -> None:
    layout = Sums(parse("", settings), 7).evaluation
    for count, refused in ((labels, False), (labels + 1, True)):
        tail = layout.tail({**dict.fromkeys(layout.names, 0), name: count})
        if refused:
            with pytest.raises(UpdateError) as error:
                layout.counted(tail, 1)
            assert (error.value.field, error.value.value) == (f"total of {name}", count)
        else:
            assert layout.counted(tail, 1)[name] == count


ADAPTIVE = ["privacy.adaptive={}"]


@pytest.mark.parametrize("adaptive", [[], ADAPTIVE], ids=["fixed", "adaptive"])
def test_values_of_unit_site_are_checked_in_clear(adaptive: list[str]) -> None:
    """The norm of an honest site's integers is that of a clipped update, rounded, and its count is one step."""
    sums = Sums(tiny(*CENTRAL, *adaptive), 7)
    layout, mechanism = sums.training, mechanism_of(sums)
    assert layout.extra == len(adaptive)
    assert mechanism.scale <= layout.ring.levels

    def add(values: list[int], count: int) -> None:
        update = np.array(values + [0] * (7 - len(values)), np.int32).view(np.uint32)
        tail = layout.tail({WEIGHT: 1}, [count] * layout.extra)
        PlainSum(layout).add([(0, np.concatenate([update, tail]))])

    most, step = int(mechanism.scale), mechanism.count_step
    norm = int(rounded_l2(mechanism.scale, 7))
    assert most <= norm < 1.1 * most < layout.ring.levels / 2
    for sign in (1, -1):
        add([sign * most], sign * step)
        add([0, sign * norm], 0)
        for further in ([sign * (norm + 1)], [0, sign * most, most // 2], [sign * most // 2] * 7):
            with raises(UpdateError, "norm of the update, in steps"):
                add(further, 0)
        with raises(UpdateError, "steps of a value of the update"):
            add([sign * (layout.ring.levels + 1)], 0)
        for beyond in (step + 1, 2**30):
            if adaptive:
                with raises(UpdateError, "steps of a value beside the update"):
                    add([], sign * beyond)
