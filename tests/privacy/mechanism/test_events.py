"""Events: canonical JSON that a ledger can hash, and refusals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.privacy.mechanism.events import (
    Event,
    Gaussian,
    SampledGaussian,
    Skellam,
    from_json,
    to_json,
)
from cloister.protocol.errors import AccountingError
from cloister.tests.tools.raises import raises

EVENTS = st.lists(
    st.one_of(
        st.builds(
            SampledGaussian,
            st.floats(1e-3, 1e9),
            st.floats(1e-9, 1),
            st.integers(1, 2**40),
            st.sampled_from(["record", "owner"]),
        ),
        st.builds(Gaussian, st.floats(1e-3, 1e9), st.integers(1, 2**40)),
        st.builds(
            Skellam,
            st.floats(1e-9, 1e30),
            st.floats(1e-9, 1e30),
            st.floats(1e-9, 1e30),
            st.integers(1, 99),
            st.lists(st.tuples(*[st.floats(1e-9, 1e30)] * 3), max_size=2).map(tuple),
        ),
    ),
    max_size=5,
)


@given(EVENTS)
def test_json_gives_equal_events_back(events: list[Event]) -> None:
    text = to_json(events)
    assert from_json(text) == tuple(events)
    assert to_json(from_json(text)) == text


def test_json_is_canonical() -> None:
    text = '[{"count":3,"mechanism":"gaussian","noise_multiplier":1.0}]'
    assert to_json([Gaussian(1, 3)]) == text
    for other in (
        text.replace(",", ", "),
        text.replace("1.0", "1"),
        text.replace("1.0", "1.00"),
        '[{"mechanism":"gaussian","count":3,"noise_multiplier":1.0}]',
    ):
        assert json.loads(other) == json.loads(text)
        with raises(AccountingError, "events", says="canonical"):
            from_json(other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '[{"count":3}]',
        '[{"count":3,"mechanism":"laplace","noise_multiplier":1.0}]',
        '[{"count":3,"mechanism":"gaussian","noise_multiplier":1.0,"seed":1}]',
        '[{"count":3,"mechanism":"gaussian"}]',
        '[{"count":0,"mechanism":"gaussian","noise_multiplier":1.0}]',
        '[{"count":2.5,"mechanism":"gaussian","noise_multiplier":1.0}]',
        '[{"count":true,"mechanism":"gaussian","noise_multiplier":1.0}]',
        '[{"count":3,"mechanism":"gaussian","noise_multiplier":-1.0}]',
        '[{"count":3,"mechanism":"gaussian","noise_multiplier":"1.0"}]',
        '[{"count":3,"mechanism":"gaussian","noise_multiplier":1e999}]',
        '[{"count":3,"mechanism":"gaussian","noise_multiplier":NaN}]',
        '[{"mechanism":"sampled-gaussian","noise_multiplier":1.0,"sampling_rate":1.5,"steps":1}]',
        '[{"mechanism":"sampled-gaussian","noise_multiplier":1.0,"sampling_rate":0.5,"steps":1,"unit":"site"}]',
        '[{"mechanism":"sampled-gaussian","noise_multiplier":1.0,"sampling_rate":0.5,"steps":1}]',
        '[{"count":1,"extra":[[1.0,2.0]],"l1":1.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        '[{"count":1,"extra":5,"l1":1.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        '[{"count":1,"extra":[],"l1":0.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        "[" * 100_000,
    ],
)
def test_what_is_no_list_of_events_is_refused(text: str) -> None:
    with pytest.raises(AccountingError) as refused:
        from_json(text)
    assert "\n" not in str(refused.value)
