"""Each record is used once, exactly the learnable tokens are labelled, and the cache equals the sequences made."""

import errno
import itertools
import os
import random
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from cloister.lm.data.prepare import Preparation, Prepared, UnitRule, check_usable, prepare, unit_rule
from cloister.lm.data.store import cached, load_prepared, write_prepared
from cloister.lm.text.records import Unusable
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, batches
from cloister.lm.text.tokenizer import END, byte_tokenizer
from cloister.protocol.errors import DataError, StorageError
from cloister.protocol.plan.plan import DataSection, PrivacySection
from cloister.tests.parties.federation import PRIVATE, changed, tiny
from cloister.tests.tools.raises import raises

BYTES = byte_tokenizer()
EOS = 256
EMPTY = "without a learnable token within data.sequence_length"
PAD = 257
OWNER = ["privacy.unit=owner", "data.owner=who", "privacy.sampling_rate=0.5"]
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|"))
FORMATS: tuple[Literal["text", "prompt", "messages"], ...] = ("text", "prompt", "messages")


def learned(sequences: Sequences) -> list[str]:
    """The runs of learned labels, as text."""
    runs = []
    for labels in sequences.labels:
        for is_learned, run in itertools.groupby(labels.tolist(), key=lambda label: label != NOT_LEARNED):
            if is_learned:
                runs.append(bytes_of(list(run)))
    return runs


def bytes_of(tokens: list[int]) -> str:
    return str(BYTES.decode(tokens))


def check(sequences: Sequences, length: int) -> None:
    """What holds for all sequences, whatever they were made of."""
    tokens, labels, positions = sequences.tokens, sequences.labels, sequences.positions
    assert tokens.shape == labels.shape == (len(sequences), length)
    assert tokens.dtype == labels.dtype == np.int32
    is_learned = labels != NOT_LEARNED
    assert np.array_equal(labels[is_learned], tokens[is_learned])
    assert not is_learned[:, 0].any()
    assert is_learned.any(axis=1).all()
    assert sequences.n_tokens == is_learned.sum()
    assert not (labels == PAD).any()
    if positions is not None:
        assert positions.shape == tokens.shape
        assert positions.dtype == np.int32
        assert not (is_learned & (positions == 0)).any()
        steps = np.diff(positions, axis=1)
        assert (positions[:, 0] == 0).all()
        assert ((steps == 1) | (positions[:, 1:] == 0)).all()


# Tokens and labels


@settings(deadline=None)
@given(texts=st.lists(PLAIN, min_size=1, max_size=12), length=st.integers(2, 40))
def test_packed_text_is_the_documents_joined(texts: list[str], length: int) -> None:
    data = DataSection(sequence_length=length, held_out=0)
    if not any(texts):
        with raises(DataError, "data.text_field", says="learnable"):
            prepare([{"text": text} for text in texts], BYTES, data, seed=0)
        return
    prepared = prepare([{"text": text} for text in texts], BYTES, data, seed=0)
    check(prepared.train, length)
    assert prepared.left_out.get(EMPTY, 0) == sum(not text for text in texts)
    assert len(prepared.held_out) == 0
    assert prepared.held_out.tokens.shape == (0, length)
    stream = [token for text in texts if text for token in [*text.encode(), EOS]]
    if len(stream) % length == 1:
        stream.pop()  # one token alone teaches nothing
    flat = prepared.train.tokens.ravel().tolist()
    assert flat[: len(stream)] == stream
    assert set(flat[len(stream) :]) <= {PAD}
    expected = [token for at in range(0, len(stream), length) for token in stream[at + 1 : at + length]]
    assert prepared.train.labels[prepared.train.labels != NOT_LEARNED].tolist() == expected
    assert prepared.train.n_bytes == sum(token != EOS for token in expected)
    assert prepared.train.positions is None


@settings(deadline=None)
@given(texts=st.lists(PLAIN, min_size=1, max_size=8).filter(any), length=st.integers(2, 40))
def test_unpacked_text_keeps_each_record_to_itself(texts: list[str], length: int) -> None:
    data = DataSection(sequence_length=length, held_out=0, packing=False)
    train = prepare([{"text": text} for text in texts], BYTES, data, seed=0).train
    check(train, length)
    windows = []
    for text in filter(None, texts):
        whole = [*text.encode(), EOS]
        windows += [whole[at : at + length] for at in range(0, len(whole), length)]
    assert [[token for token in row if token != PAD] for row in train.tokens.tolist()] == [
        window for window in windows if len(window) > 1
    ]
    assert train.positions is None


@settings(deadline=None)
@given(
    records=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=10),
    length=st.integers(2, 40),
    packing=st.booleans(),
)
def test_completions_and_nothing_else_are_learned(
    records: list[tuple[str, str]], length: int, packing: bool
) -> None:
    data = DataSection(format="prompt", sequence_length=length, held_out=0, packing=packing)
    expected, dropped = [], 0
    for prompt, completion in records:
        whole = [*(prompt + completion).encode(), EOS][:length] if prompt + completion else []
        answer = whole[max(1, len(prompt.encode())) :]
        dropped += not answer
        expected += answer
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in records]
    if not expected:
        with pytest.raises(DataError):
            prepare(rows, BYTES, data, seed=0)
        return
    prepared = prepare(rows, BYTES, data, seed=0)
    check(prepared.train, length)
    assert prepared.train.labels[prepared.train.labels != NOT_LEARNED].tolist() == expected
    assert prepared.left_out.get(EMPTY, 0) == dropped
    assert prepared.train.n_bytes == sum(token != EOS for token in expected)
    assert (prepared.train.positions is not None) == packing


TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PLAIN), min_size=1, max_size=6)


@settings(deadline=None)
@given(chats=st.lists(TURNS, min_size=1, max_size=5), packing=st.booleans())
def test_assistant_turns_and_nothing_else_are_learned(
    chats: list[list[tuple[str, str]]], packing: bool
) -> None:
    data = DataSection(format="messages", sequence_length=4000, held_out=0, packing=packing)
    rows = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in chats]
    expected = [said + END for chat in chats for role, said in chat if role == "assistant"]
    if not expected:
        with pytest.raises(DataError):
            prepare(rows, BYTES, data, seed=0)
        return
    prepared = prepare(rows, BYTES, data, seed=0)
    check(prepared.train, 4000)
    assert learned(prepared.train) == expected
    assert prepared.left_out.get(EMPTY, 0) == sum(
        all(role != "assistant" for role, _ in chat) for chat in chats
    )
    own = sum(len(said.encode()) for said in expected) - len(expected) * len(END)  # which the template adds
    assert prepared.train.n_bytes == own


# Held-out records


@settings(deadline=None)
@given(
    n=st.integers(2, 40),
    held_out=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**63 - 1),
    format_=st.sampled_from(FORMATS),
)
def test_a_record_is_trained_on_or_held_out(
    n: int, held_out: float, seed: int, format_: Literal["text", "prompt", "messages"]
) -> None:
    names = [f"[{index}]" for index in range(n)]
    rows = [
        {
            "text": name,
            "prompt": "?",
            "completion": name,
            "messages": [{"role": "assistant", "content": name}],
        }
        for name in names
    ]
    data = DataSection(format=format_, held_out=held_out, sequence_length=64)
    prepared = prepare(rows, BYTES, data, seed=seed)
    seen: Counter[str] = Counter()
    for part in (prepared.train, prepared.held_out):
        text = bytes_of(part.tokens.ravel().tolist())
        seen.update({name: text.count(name) for name in names})
        assert len(part) > 0
    # a name may be cut in two by the border of two sequences only where documents are joined, and those are adjacent
    assert all(seen[name] == 1 for name in names)
    assert seen.total() == n
    again = prepare(rows, BYTES, data, seed=seed)
    assert np.array_equal(again.held_out.tokens, prepared.held_out.tokens)


def test_the_seed_chooses_what_is_held_out() -> None:
    rows = [{"text": f"[{index}]"} for index in range(100)]
    first, second = (prepare(rows, BYTES, DataSection(), seed=seed).held_out.tokens for seed in (1, 2))
    assert not np.array_equal(first, second)


@settings(deadline=None)
@given(text=PLAIN.filter(lambda text: len(text.encode()) >= 3), held_out=st.floats(0.01, 0.99))
def test_one_single_text_is_divided(text: str, held_out: float) -> None:
    prepared = prepare([{"text": text}], BYTES, DataSection(held_out=held_out, sequence_length=16), seed=0)
    parts = [
        [token for token in part.tokens.ravel().tolist() if token != PAD]
        for part in (prepared.train, prepared.held_out)
    ]
    whole = [*text.encode(), EOS]
    assert all(part.n_tokens >= 1 for part in (prepared.train, prepared.held_out))
    joined = parts[0] + parts[1]
    # a last window of one token teaches nothing and is left out
    assert len(whole) - len(joined) <= 2
    if len(joined) == len(whole):
        assert joined == whole


@pytest.mark.parametrize(
    "row",
    [
        {"text": "ab"},
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "assistant", "content": "b"}]},
    ],
)
def test_one_single_record_that_cannot_be_divided_is_refused(row: dict[str, Any]) -> None:
    format_: Literal["text", "prompt", "messages"] = (
        "text" if "text" in row else "prompt" if "prompt" in row else "messages"
    )
    with raises(DataError, f"data.{format_}", says="two records"):
        prepare([row], BYTES, DataSection(format=format_), seed=0)


# Units of record-level privacy


def rows_of(sequences: Sequences) -> list[tuple[tuple[int, ...], ...]]:
    """The rows of each unit, without padding."""
    assert sequences.starts is not None
    assert sequences.positions is None
    assert sequences.starts[0] == 0
    assert sequences.starts[-1] == len(sequences)
    assert (np.diff(sequences.starts) > 0).all()
    return [
        tuple(tuple(token for token in row if token != PAD) for row in sequences.tokens[begin:end].tolist())
        for begin, end in itertools.pairwise(sequences.starts)
    ]


def windows_of(text: str, length: int) -> list[tuple[int, ...]]:
    """A text's windows, but for a last one of one token, which teaches nothing."""
    whole = (*text.encode(), EOS) if text else ()
    cut = [whole[at : at + length] for at in range(0, len(whole), length)]
    return [window for window in cut if len(window) > 1]


@settings(deadline=None)
@given(
    texts=st.lists(PLAIN, min_size=1, max_size=10).filter(any),
    length=st.integers(2, 20),
    windows=st.integers(1, 4),
    packing=st.booleans(),
)
def test_a_record_is_one_unit_of_its_first_windows(
    texts: list[str], length: int, windows: int, packing: bool
) -> None:
    data = DataSection(sequence_length=length, held_out=0, packing=packing)
    rule = UnitRule("record", windows)
    prepared = prepare([{"text": text} for text in texts], BYTES, data, seed=0, units=rule)
    check(prepared.train, length)
    expected = [tuple(windows_of(text, length)[:windows]) for text in texts if text]
    assert rows_of(prepared.train) == expected
    assert prepared.left_out.get(EMPTY, 0) == sum(not text for text in texts)
    assert rows_of(prepared.held_out) == []
    learned_bytes = sum(token != EOS for unit in expected for row in unit for token in row[1:])
    assert prepared.train.n_bytes == learned_bytes


@settings(deadline=None)
@given(texts=st.lists(PLAIN, min_size=1, max_size=10).filter(any), length=st.integers(2, 20))
def test_a_window_is_a_unit_and_of_one_text(texts: list[str], length: int) -> None:
    data = DataSection(sequence_length=length, held_out=0)
    rows = [{"text": text} for text in texts]
    train = prepare(rows, BYTES, data, seed=0, units=UnitRule("window", 1)).train
    check(train, length)
    assert rows_of(train) == [(window,) for text in texts for window in windows_of(text, length)]


@settings(deadline=None)
@given(
    records=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=8),
    length=st.integers(2, 16),
    windows=st.integers(1, 3),
)
def test_the_windows_of_a_completion_stay_with_their_prompt(
    records: list[tuple[str, str]], length: int, windows: int
) -> None:
    data = DataSection(format="prompt", sequence_length=length, held_out=0)
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in records]
    expected, answers = [], []
    for prompt, completion in records:
        whole = (*(prompt + completion).encode(), EOS)[: windows * length] if prompt + completion else ()
        begin = len(prompt.encode())
        kept = []
        for at in range(0, len(whole), length):
            taught = [token for place, token in enumerate(whole[at : at + length], at) if at < place >= begin]
            if taught:
                kept.append(whole[at : at + length])
                answers += taught
        if kept:
            expected.append(tuple(kept))
    prepared = prepare(rows, BYTES, data, seed=0, units=UnitRule("record", windows))
    assert rows_of(prepared.train) == expected
    assert prepared.train.labels[prepared.train.labels != NOT_LEARNED].tolist() == answers
    assert prepared.left_out.get(EMPTY, 0) == len(records) - len(expected)


RECORD_OR_WINDOW: list[Literal["record", "window"]] = ["record", "window"]


@settings(deadline=None)
@given(
    texts=st.lists(PLAIN.filter(bool), min_size=2, max_size=20),
    held_out=st.floats(0, 0.9),
    seed=st.integers(0, 2**63 - 1),
    record=st.sampled_from(RECORD_OR_WINDOW),
    which=st.integers(0, 19),
)
def test_one_record_less_changes_the_units_of_no_other(
    texts: list[str], held_out: float, seed: int, record: Literal["record", "window"], which: int
) -> None:
    data = DataSection(sequence_length=8, held_out=held_out)

    def sides(texts: list[str]) -> tuple[Counter[Any], Counter[Any]]:
        rows = [{"text": text} for text in texts]
        prepared = prepare(rows, BYTES, data, seed=seed, units=UnitRule(record, 2))
        return Counter(rows_of(prepared.train)), Counter(rows_of(prepared.held_out))

    which %= len(texts)
    whole, without = sides(texts), sides(texts[:which] + texts[which + 1 :])
    own = sides([texts[which]])
    assert whole == (without[0] + own[0], without[1] + own[1])
    if record == "record":
        assert (own[0] + own[1]).total() == 1


@given(
    texts=st.lists(st.text("ab", min_size=1, max_size=24), min_size=1, max_size=20),
    held_out=st.floats(0, 0.9),
    record=st.sampled_from(RECORD_OR_WINDOW),
)
def test_of_equal_units_one_is_used_and_no_other_unit_changes(
    texts: list[str], held_out: float, record: Literal["record", "window"]
) -> None:
    """So one unit more or less, which may equal others, changes the set that is used by one at most."""
    rows = [{"text": text} for text in texts]

    def sides(deduplicate: bool) -> list[Counter[Any]]:
        data = DataSection(sequence_length=8, held_out=held_out, deduplicate=deduplicate)
        prepared = prepare(rows, BYTES, data, seed=0, units=UnitRule(record, 2))
        return [Counter(rows_of(part)) for part in (prepared.train, prepared.held_out)]

    assert sides(True) == [Counter(dict.fromkeys(side, 1)) for side in sides(False)]


def test_no_duplicate_is_trained_on_and_held_out() -> None:
    rows = [{"text": f"[{index % 30}]"} for index in range(90)]
    found = {}
    for deduplicate in (False, True):
        data = DataSection(sequence_length=8, held_out=0.5, packing=False, deduplicate=deduplicate)
        prepared = prepare(rows, BYTES, data, seed=0)
        train, held_out = (
            set(map(tuple, part.tokens.tolist())) for part in (prepared.train, prepared.held_out)
        )
        found[deduplicate] = len(train & held_out), prepared.records, dict(prepared.left_out)
    assert found[False][0] > 0
    assert found[True] == (0, 30, {"equal to an earlier one": 60})


def test_the_usual_draw_would_shuffle_the_others() -> None:
    """What the units' own draw is for: one record less, and others change sides."""
    rows = [{"text": f"[{index}]"} for index in range(40)]
    data = DataSection(sequence_length=8, packing=False)
    one, other = (
        {tuple(row) for row in prepare(some, BYTES, data, seed=0).held_out.tokens.tolist()}
        for some in (rows, rows[:-1])
    )
    assert len(one ^ other) > 1


def test_units_are_held_out_with_the_probability_of_the_plan() -> None:
    rows = [{"text": f"[{index}]"} for index in range(3000)]
    data = DataSection(sequence_length=16, held_out=0.2)
    sides = [prepare(rows, BYTES, data, seed=seed, units=UnitRule("record", 1)) for seed in (1, 2)]
    for prepared in sides:
        assert abs(len(prepared.held_out) - 600) < 6.2 * (3000 * 0.2 * 0.8) ** 0.5
        assert len(prepared.train) + len(prepared.held_out) == 3000
    assert rows_of(sides[0].held_out) != rows_of(sides[1].held_out)


def test_the_rule_of_units() -> None:
    data = DataSection(sequence_length=128)
    private = PrivacySection(unit="record", windows=4)
    assert unit_rule(data, PrivacySection(unit="site")) is None
    assert unit_rule(data, private) == UnitRule("record", 4)
    owned = DataSection(owner="who")
    assert unit_rule(owned, PrivacySection(unit="owner", records=3)) == UnitRule("record", 4, "who", 3)
    window = PrivacySection(unit="record", record="window")
    assert unit_rule(data, window) == UnitRule("window", 4)


# Owners


def owned(texts: Iterable[tuple[object, str]]) -> list[dict[str, object]]:
    return [{"text": text, "who": who} for who, text in texts]


def by_owner(sequences: Sequences) -> Counter[tuple[Any, ...]]:
    """The rows of each unit with their shares: what training sees of it."""
    assert sequences.starts is not None
    assert sequences.shares is not None
    shares = np.split(sequences.shares, sequences.starts[1:-1])
    return Counter(
        (rows, tuple(each.tolist())) for rows, each in zip(rows_of(sequences), shares, strict=False)
    )


OWNED = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", 1, 2]), PLAIN.filter(bool)), min_size=1, max_size=30
)


@settings(deadline=None)
@given(
    records=OWNED,
    held_out=st.floats(0, 0.9),
    seed=st.integers(0, 2**63 - 1),
    record=st.sampled_from(RECORD_OR_WINDOW),
    most=st.integers(1, 4),
    chance=st.randoms(),
    deduplicate=st.booleans(),
)
def test_one_owner_less_changes_no_other_owner(
    records: list[tuple[object, str]],
    held_out: float,
    seed: int,
    record: Literal["record", "window"],
    most: int,
    chance: random.Random,
    deduplicate: bool,
) -> None:
    """Wherever its records stand, and in whatever order: each owner is one unit, on one side, by its records alone."""
    data = DataSection(sequence_length=8, held_out=held_out, deduplicate=deduplicate)
    rule = UnitRule(record, 2, "who", most)

    def sides(records: list[tuple[object, str]]) -> tuple[Counter[Any], Counter[Any]]:
        prepared = prepare(owned(records), BYTES, data, seed=seed, units=rule)
        return by_owner(prepared.train), by_owner(prepared.held_out)

    owners = {who for who, _ in records}
    alone = {who: sides([each for each in records if each[0] == who]) for who in owners}
    assert all(train.total() + held.total() == 1 for train, held in alone.values())
    chance.shuffle(records)
    whole = sides(records)
    for at in (0, 1):
        assert whole[at] == sum((alone[who][at] for who in owners), Counter())


@pytest.mark.parametrize("most", [1, 3, 5])
def test_an_owner_has_at_most_so_many_records_and_each_the_same_share(most: int) -> None:
    data, rule = DataSection(sequence_length=8, held_out=0), UnitRule("record", 3, "who", most)
    records = owned(("one", letter * size) for letter, size in zip("abcd", (3, 9, 17, 40), strict=True))
    train = prepare([*records, *owned([("two", "z" * 9)])], BYTES, data, seed=0, units=rule).train
    one, two = by_owner(train)
    assert sum(two[1]) == pytest.approx(1)
    shares = Counter[int]()
    for row, share in zip(*one, strict=True):
        shares[row[0]] += share
    assert len(shares) == min(most, 4)
    assert all(share == pytest.approx(1 / len(shares)) for share in shares.values())


def test_other_records_of_one_owner_are_used_with_another_seed() -> None:
    records = owned(("one", f"{number:03}") for number in range(50))
    data, rule = DataSection(sequence_length=8, held_out=0), UnitRule("record", 1, "who", 5)
    chosen = [by_owner(prepare(records, BYTES, data, seed=seed, units=rule).train) for seed in (0, 1)]
    assert chosen[0] != chosen[1]


def test_owners_are_held_out_whole_and_with_the_probability_of_the_plan() -> None:
    records = owned((number % 1500, f"[{number}]") for number in range(6000))
    data, rule = DataSection(sequence_length=16, held_out=0.2), UnitRule("record", 1, "who", 4)
    prepared = prepare(records, BYTES, data, seed=0, units=rule)
    held = by_owner(prepared.held_out).total()
    assert abs(held - 300) < 6.2 * (1500 * 0.2 * 0.8) ** 0.5
    assert by_owner(prepared.train).total() == 1500 - held
    assert len(prepared.train) + len(prepared.held_out) == 6000


@pytest.mark.parametrize(("share", "expected"), [(0.2, 12), (0.001, 1), (0.999, 59)])
def test_without_a_unit_owners_are_held_out_whole(share: float, expected: int) -> None:
    records = owned((number % 60, f"x{number % 60} has {number}") for number in range(300))
    data = DataSection(sequence_length=32, held_out=share, owner="who", packing=False)

    def owners(sequences: Sequences) -> set[str]:
        return {each.partition(" ")[0] for each in learned(sequences)}

    prepared = prepare(records, BYTES, data, seed=3)
    held, trained = owners(prepared.held_out), owners(prepared.train)
    assert (len(held), len(trained)) == (expected, 60 - expected)
    assert not held & trained
    assert len(prepared.held_out) + len(prepared.train) == 300
    assert owners(prepare(records, BYTES, data, seed=4).held_out) != held
    by_record = prepare(records, BYTES, data.model_copy(update={"owner": "", "held_out": 0.2}), seed=3)
    assert owners(by_record.held_out) & owners(by_record.train), "a split by record divides owners"


def test_a_single_owner_is_not_divided() -> None:
    records = owned([("one", "a"), ("one", "b")])
    with raises(DataError, "data.owner", says="two owners"):
        prepare(records, BYTES, DataSection(sequence_length=8, owner="who"), seed=0)
    whole = prepare(records, BYTES, DataSection(sequence_length=8, owner="who", held_out=0.0), seed=0)
    assert len(whole.held_out) == 0
    stray = prepare(
        [*records, {"text": "of no one"}],
        BYTES,
        DataSection(sequence_length=8, owner="who", held_out=0.0),
        seed=0,
    )
    assert stray.left_out == {"without an owner in 'who', text or a whole number": 1}


def test_public_records_need_no_owner() -> None:
    data = DataSection(sequence_length=8, owner="who")
    assert prepare([{"text": "a"}, {"text": "b"}], BYTES, data, seed=0, evaluated=True).records == 2


def test_an_owner_stays_on_its_side_when_its_records_change() -> None:
    data, rule = DataSection(sequence_length=16, held_out=0.5), UnitRule("record", 1, "who", 1)
    owners = [f"owner {number}" for number in range(60)]

    def held(what: str) -> list[bool]:
        alone = (prepare(owned([(who, f"{what} {who}")]), BYTES, data, seed=0, units=rule) for who in owners)
        return [bool(len(prepared.held_out)) for prepared in alone]

    assert held("old") == held("new")
    assert 10 < sum(held("old")) < 50


def test_a_number_and_its_text_are_one_owner() -> None:
    records = owned([(7, "one"), ("7", "two"), (8, "three")])
    data, rule = DataSection(sequence_length=8, held_out=0), UnitRule("record", 1, "who", 2)
    assert by_owner(prepare(records, BYTES, data, seed=0, units=rule).train).total() == 2


NOBODY: list[object] = [None, "", True, 1.5, ["a"], {"id": 1}]


@pytest.mark.parametrize("value", [*NOBODY, "\ud800", "absent"])
def test_a_record_without_an_owner_is_left_out(value: object) -> None:
    """An error would tell whether the record is there."""
    records = owned([("a", "one"), ("b", "two"), ("a", "three")])
    data, rule = DataSection(sequence_length=8, held_out=0), UnitRule("record", 1, "who", 2)
    stray: dict[str, object] = (
        {"text": "of no one"} if value == "absent" else {"text": "of no one", "who": value}
    )
    without = prepare(records, BYTES, data, seed=0, units=rule)
    assert without.left_out == {}
    found = prepare([records[0], stray, *records[1:]], BYTES, data, seed=0, units=rule)
    assert same_rows(found, without)
    assert (found.records, found.left_out) == (3, {"without an owner in 'who', text or a whole number": 1})


def test_a_plan_by_which_no_record_is_of_use_is_refused_to_the_owner_of_all_records() -> None:
    records = owned([("a", "one"), ("b", "two")])

    def check_(records: list[dict[str, object]], **fields: str) -> None:
        plan = changed(tiny(*PRIVATE, *OWNER), "data", **fields)
        check_usable(records, BYTES, plan, Unusable())

    check_([*owned([(None, "x")]), *records], owner="who")
    for records_, fields, field, says in (
        (records, {"owner": "patient"}, "field patient", ("text or a whole number",)),
        (records, {"owner": "who", "text_field": "body"}, "record 1, field body", ("text, who",)),
        (
            owned([("a", "")]),
            {"owner": "who"},
            "data.text_field",
            ("learnable", "64 tokens", "none of the 1"),
        ),
    ):
        with raises(DataError, field, says=says):
            check_(records_, **fields)


# What a model sees


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("format_", ["prompt", "messages"])
def test_packed_examples_do_not_see_each_other(
    attention: str, format_: Literal["prompt", "messages"]
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    texts = [("what?", "this"), ("", "x"), ("and then", "that and more"), ("é", "€😀")] * 4
    rows = [
        {
            "prompt": a,
            "completion": b,
            "messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}],
        }
        for a, b in texts
    ]
    packed, alone = (
        prepare(
            rows, BYTES, DataSection(format=format_, sequence_length=96, held_out=0, packing=packing), seed=0
        ).train
        for packing in (True, False)
    )
    assert len(packed) < len(alone) == len(rows)
    assert packed.positions is not None

    def run(sequences: Sequences, **options: torch.Tensor) -> tuple[torch.Tensor, float]:
        labels = torch.tensor(sequences.labels).long()
        with torch.no_grad():
            out = model(torch.tensor(sequences.tokens).long(), labels=labels, use_cache=False, **options)
        shifted = torch.tensor(sequences.labels[:, 1:] != NOT_LEARNED)
        return out.logits[:, :-1][shifted], float(out.loss)

    together, loss_together = run(packed, position_ids=torch.tensor(packed.positions).long())
    apart, loss_apart = run(alone)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)
    assert loss_together == pytest.approx(loss_apart, rel=1e-5)
    assert packed.n_tokens == alone.n_tokens == len(apart)
    assert packed.n_bytes == alone.n_bytes
    mixed, _ = run(packed)  # without positions they do see each other: the check above can fail
    assert not torch.allclose(mixed, apart, rtol=1e-2, atol=1e-3)


# On disk


@pytest.fixture(scope="module")
def some() -> Prepared:
    rows = [{"prompt": "a", "completion": "b" * index} for index in range(30)]
    return prepare(rows, BYTES, DataSection(format="prompt", sequence_length=16), seed=0)


def same(first: Prepared, second: Prepared) -> bool:
    counts = (first.records, first.left_out), (second.records, second.left_out)
    return counts[0] == counts[1] and same_rows(first, second)


def same_rows(first: Prepared, second: Prepared) -> bool:
    pairs = [(first.train, second.train), (first.held_out, second.held_out)]
    return all(
        a.n_bytes == b.n_bytes
        and np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.labels, b.labels)
        and (a.positions is None) == (b.positions is None)
        and (a.positions is None or b.positions is None or np.array_equal(a.positions, b.positions))
        and (a.starts is None) == (b.starts is None)
        and (a.starts is None or b.starts is None or np.array_equal(a.starts, b.starts))
        and (a.shares is None) == (b.shares is None)
        and (a.shares is None or b.shares is None or np.array_equal(a.shares, b.shares))
        for a, b in pairs
    )


@pytest.mark.parametrize("held_out", [0.0, 0.2])
@pytest.mark.parametrize("packing", [True, False])
def test_saved_sequences_are_mapped(held_out: float, packing: bool, tmp_path: Path) -> None:
    rows = [{"text": "abc" * index} for index in range(9)]
    prepared = prepare(rows, BYTES, DataSection(held_out=held_out, packing=packing), seed=0)
    (tmp_path / "x").mkdir()
    write_prepared(tmp_path / "x", [prepared])
    again = load_prepared(tmp_path / "x")
    assert same(prepared, again)
    assert isinstance(again.train.tokens, np.memmap)
    assert not again.train.tokens.flags.writeable


@pytest.mark.parametrize("held_out", [0.0, 0.2])
@pytest.mark.parametrize("rule", [UnitRule("record", 2), UnitRule("record", 2, "who", 2)])
def test_saved_units_are_mapped(held_out: float, rule: UnitRule, tmp_path: Path) -> None:
    rows = [{"text": "abc" * index, "who": index // 2} for index in range(9)]
    data = DataSection(held_out=held_out, sequence_length=8)
    prepared = prepare(rows, BYTES, data, seed=0, units=rule)
    (tmp_path / "x").mkdir()
    write_prepared(tmp_path / "x", [prepared])
    again = load_prepared(tmp_path / "x")
    assert same(prepared, again)
    assert again.train.starts is not None
    assert again.train.starts.dtype == np.int64


def test_they_are_made_once(tmp_path: Path, some: Prepared) -> None:
    made = []

    def make() -> Prepared:
        made.append(1)
        return some

    def ask() -> None:
        assert same(cached(tmp_path / "state", "k" * 64, make), some)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    cached(tmp_path / "state", "other" * 16, make)
    assert len(made) == 2


def test_damage_is_named(tmp_path: Path, some: Prepared) -> None:
    (tmp_path / "x").mkdir()
    write_prepared(tmp_path / "x", [some])
    file = tmp_path / "x" / "labels.bin"
    file.write_bytes(file.read_bytes()[:200])
    with raises(DataError, "prepared data"):
        load_prepared(tmp_path / "x")
    with raises(DataError, "prepared data"):
        load_prepared(tmp_path / "y")


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, some: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with raises(StorageError, tmp_path / "tokens-3-key", says="No space left"):
        cached(tmp_path, "key", lambda: some)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_the_key_follows_all_that_the_tokens_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}')
    other_template = byte_tokenizer()
    other_template.chat_template = "other"

    def key(*settings: str, tokenizer: PreTrainedTokenizerBase = BYTES, split: str = "train") -> str:
        return Preparation(tiny(*settings), tokenizer, str(file), split, tmp_path / "cache").key()

    private = [*PRIVATE, "privacy.sampling_rate=0.5"]
    owner = [*private, "privacy.unit=owner"]
    first = key()
    assert first == key(tokenizer=byte_tokenizer())
    keys = [
        first, key("data.packing=false"), key(tokenizer=other_template), key("run.seed=1"), key(split="test"),
        key(*PRIVATE, "privacy.unit=site"), key("data.held_out=0.0", "server.evaluation=none"),
        key(*private, "privacy.unit=record"),
        key(*private, "privacy.unit=record", "privacy.windows=2"),
        key(*private, "privacy.unit=record", "privacy.record=window"),
        key(*owner, "data.owner=a"), key(*owner, "data.owner=b"), key(*owner, "data.owner=b", "privacy.records=2"),
    ]  # fmt: skip
    file.write_text('{"text": "b"}')
    keys.append(key())
    for name in ("cloister", "tokenizers", "transformers"):
        with monkeypatch.context() as patch:  # another release may make other sequences of the same records
            patch.setattr(
                "cloister.lm.data.prepare.releases",
                lambda names, name=name: {**dict.fromkeys(names), name: "9"},
            )
            keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "large",
    ['{"text": [' + "{}," * 200_000 + "{}]}", '{"text": "a note", "scan": "' + "A" * 2_000_000 + '"}'],
    ids=["of no use", "with a large field"],
)
def test_no_record_takes_memory_while_another_is_read(large: str, tmp_path: Path) -> None:
    """Else one record more would decide that another one is not readable."""
    peaks = []
    for count in (2, 12):
        file = tmp_path / f"{count}.jsonl"
        file.write_text(f"{large}\n" * count + '{"text": "a note"}\n')
        preparation = Preparation(
            tiny(*PRIVATE, "privacy.sampling_rate=0.5", "privacy.unit=record"),
            BYTES,
            str(file),
            "train",
            tmp_path,
        )
        tracemalloc.start()
        preparation.make()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


# Batches


@settings(deadline=None)
@given(
    n=st.integers(1, 50),
    batch_size=st.integers(1, 60),
    seed=st.tuples(st.integers(0, 2**63), st.integers(0, 99)),
)
def test_each_epoch_visits_each_index_once(n: int, batch_size: int, seed: tuple[int, ...]) -> None:
    count = 3 * n // batch_size + 1
    drawn = list(itertools.islice(batches(n, batch_size, seed), count))
    assert all(batch.shape == (batch_size,) for batch in drawn)
    stream = np.concatenate(drawn)
    for epoch in range(len(stream) // n):
        assert sorted(stream[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    again = itertools.islice(batches(n, batch_size, seed), count)
    assert all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_epochs_and_seeds_differ() -> None:
    first, second = itertools.islice(batches(100, 100, (1, 2)), 2)
    other = next(batches(100, 100, (1, 3)))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
