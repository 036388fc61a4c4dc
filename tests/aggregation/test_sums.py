"""What the sums of a plan are made of."""

import numpy as np
import pytest

from cloister.aggregation.features.in_clear import TOKENS
from cloister.aggregation.features.site_unit import mechanism_of
from cloister.aggregation.sums import CORRECT, Sums
from cloister.aggregation.vector.average import WEIGHT, PlainSum
from cloister.protocol.errors import UpdateError
from cloister.protocol.plan.soundness import parse
from cloister.tests.parties.federation import CENTRAL, SKELLAM, tiny


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
def test_values_of_unit_site_are_checked_unless_the_sites_add_noise(adaptive: list[str]) -> None:
    """The largest value of an honest site, scale, is within the ring's levels; the count beside it is not checked."""
    for settings, noised in ((CENTRAL, False), (SKELLAM, True)):
        layout = Sums(tiny(*settings, *adaptive), 7).training
        assert layout.extra == len(adaptive)
        assert layout.noised == noised
        if not noised:
            assert mechanism_of(Sums(tiny(*settings, *adaptive), 7)).scale <= layout.ring.levels
        beyond = np.full(7, -layout.ring.levels - 1, np.int32).view(np.uint32)
        tail = layout.tail({WEIGHT: 1}, [2**30] * layout.extra)
        total = PlainSum(layout)
        if noised:
            total.add([(0, np.concatenate([beyond, tail]))])
        else:
            with pytest.raises(UpdateError, match="steps of a value"):
                total.add([(0, np.concatenate([beyond, tail]))])
            total.add([(0, np.concatenate([np.zeros(7, np.uint32), tail]))])
