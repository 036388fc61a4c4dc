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
    bare,
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
            st.sampled_from(["", "coordinator"]),
        ),
        st.builds(Gaussian, st.floats(1e-3, 1e9), st.integers(1, 2**40)),
        st.builds(
            Skellam,
            st.floats(1e-9, 1e30),
            st.floats(1e-9, 1e30),
            st.floats(1e-9, 1e30),
            st.integers(1, 99),
            st.lists(st.tuples(*[st.floats(1e-9, 1e30)] * 3), max_size=2).map(tuple),
            st.sampled_from(["record", "owner", "site"]),
            st.integers(0, 99),
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


OLD = (
    '[{"mechanism":"sampled-gaussian","noise_multiplier":1.0,"sampling_rate":0.5,"steps":2,"unit":"record"},'
    '{"count":1,"extra":[[9.0,1.0,1.0]],"l1":4.0,"l2":2.0,"mechanism":"skellam","variance":16.0},'
    '{"count":1,"extra":[],"l1":4.0,"l2":2.0,"mechanism":"skellam","unit":"owner","variance":16.0}]'
)
"""What ledgers have that do not say whom an event trusts."""


def test_ledgers_that_do_not_say_whom_an_event_trusts_are_read_and_written_as_they_were() -> None:
    steps, sites, owners = from_json(OLD)
    assert (steps, sites, owners) == (
        SampledGaussian(1.0, 0.5, 2),
        Skellam(16.0, 2.0, 4.0, 1, ((9.0, 1.0, 1.0),)),
        Skellam(16.0, 2.0, 4.0, 1, unit="owner"),
    )
    assert hash(sites) == hash(Skellam(16.0, 2.0, 4.0, 1, ((9.0, 1.0, 1.0),), "site", 0))
    assert to_json([steps, sites, owners]) == OLD
    with raises(AccountingError, "events", says="canonical"):
        from_json(OLD.replace('"extra":[],', '"extra":[],"honest":0,'))


def test_a_ledger_says_whom_an_event_trusts() -> None:
    told: list[Event] = [SampledGaussian(1.0, 0.5, 2, "record", "coordinator")]
    told.append(Skellam(16.0, 2.0, 4.0, 1, honest=6))
    text = to_json(told)
    assert '"trusts":"coordinator"' in text
    assert '"honest":6' in text
    assert from_json(text) == tuple(told)
    earlier: list[Event] = [SampledGaussian(1.0, 0.5, 2), Skellam(16.0, 2.0, 4.0, 1)]
    for event, before in zip(told, earlier, strict=True):
        assert event != before
        assert bare(event) == bare(before) == before


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
        '[{"count":1,"extra":[],"honest":-1,"l1":1.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        '[{"count":1,"extra":[],"honest":1.5,"l1":1.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        '[{"count":1,"extra":5,"l1":1.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        '[{"count":1,"extra":[],"l1":0.0,"l2":1.0,"mechanism":"skellam","variance":1.0}]',
        "[" * 100_000,
    ],
)
def test_what_is_no_list_of_events_is_refused(text: str) -> None:
    with pytest.raises(AccountingError) as refused:
        from_json(text)
    assert "\n" not in str(refused.value)
