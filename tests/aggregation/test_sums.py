"""What the sums of a plan are made of."""

import pytest

from cloister.aggregation.features.in_clear import TOKENS
from cloister.aggregation.sums import CORRECT, Sums
from cloister.protocol.errors import UpdateError
from cloister.protocol.plan.soundness import parse


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
