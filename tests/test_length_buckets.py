"""Length buckets: batches of records of similar length, what they save, and what they leave as it is."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from cloister.clients.places import mesh_for
from cloister.lm.data import Sequences, batches, length_buckets, prepare
from cloister.lm.model import LanguageModel, load_model
from cloister.lm.train import LocalUpdate, Trainer
from cloister.protocol.errors import ModelError, PlanError
from cloister.protocol.plan import MeshSection, Plan
from cloister.protocol.soundness import parse
from cloister.tests.federation import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

LETTERS = "the quick brown fox jumps over the lazy dog"
Rows = npt.NDArray[np.int64]
PADDED = ["data.sequence_length=32", "data.packing=false", "data.held_out=0", "server.evaluation=none"]
PROMPT = [*PADDED, "data.format=prompt"]
CLASSIFY = [*PADDED, "data.task=classify", 'data.classes=["a", "b"]']
STEPS = ["local.steps=6", "local.batch_size=4"]


def records(count: int = 48) -> list[dict[str, Any]]:
    """Records whose texts have 1 to 28 bytes, in an order that does not follow their length."""
    return [
        {"prompt": "q", "completion": LETTERS[:length], "text": LETTERS[:length], "label": "ab"[length % 2]}
        for length in (1 + 11 * number % 28 for number in range(count))
    ]


class Made:
    """A plan, its model and its data."""

    def __init__(self, *settings: str) -> None:
        self.plan: Plan = parse(TINY, [*STEPS, *settings])
        self.model: LanguageModel = load_model(self.plan)
        data, tokenizer = self.plan.data, self.model.tokenizer
        self.sequences: Sequences = prepare(records(), tokenizer, data, seed=0).train
        self.shapes: list[tuple[int, ...]] = []
        """Rows and columns of each micro-batch that went through the model."""

    def train(self) -> LocalUpdate:
        start = self.model.layout.flatten(self.model.module)
        self.model.module.register_forward_pre_hook(
            lambda _module, _given, named: self.shapes.append(tuple(named["input_ids"].shape)),
            with_kwargs=True,
        )
        return Trainer(self.plan, self.model, torch.device("cpu")).train(
            start, self.sequences, round=1, site_seed=(5,)
        )

    def computed(self) -> int:
        """Tokens that went through the model."""
        return sum(rows * length for rows, length in self.shapes)

    def drawn(self) -> Rows:
        """The rows of each step's batch, as the plan draws them."""
        lengths, most = (
            self.sequences.lengths(self.model.tokenizer.pad_token_id),
            self.plan.data.length_buckets,
        )
        buckets = None if most is None else length_buckets(lengths, most)
        per_step = self.plan.local.batch_size * self.plan.local.accumulation
        made = batches(len(self.sequences), per_step, (self.plan.run.seed, 1, 5), buckets)
        return np.stack([next(made) for _ in range(self.plan.local.steps)])


@pytest.mark.parametrize("settings", [PROMPT, CLASSIFY], ids=["prompt", "classify"])
def test_most_of_the_padding_is_not_computed(settings: list[str]) -> None:
    """Exact counts over an epoch, each record once: tokens that went through the model over tokens that count."""
    ratios = {}
    for buckets in (None, 1, 4):
        setting = [] if buckets is None else [f"data.length_buckets={buckets}"]
        made = Made(*settings, "local.steps=12", *setting)
        made.train()
        assert sorted(made.drawn().ravel()) == list(range(48))
        lengths = made.sequences.lengths(made.model.tokenizer.pad_token_id)[made.drawn()]
        assert lengths.min() < 8
        assert lengths.max() > 25
        expected = lengths.size * 32 if buckets is None else 4 * int(lengths.max(axis=1).sum())
        assert made.computed() == expected
        ratios[buckets] = expected / int(lengths.sum())
    assert ratios[None] > 1.7
    assert ratios[1] < ratios[None]
    assert ratios[4] < 1.25, ratios


@pytest.mark.parametrize("settings", [PROMPT, CLASSIFY], ids=["prompt", "classify"])
def test_a_batch_that_is_cut_gives_the_same_update(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucketed = [*settings, "data.length_buckets=4", "local.accumulation=2", "local.optimizer=sgd"]
    made = Made(*bucketed)
    cut = made.train()
    assert made.computed() < len(made.shapes) * 4 * 32
    monkeypatch.setattr("cloister.lm.train._cut", lambda columns, _length: columns)
    whole = Made(*bucketed)
    padded = whole.train()
    assert whole.computed() == len(whole.shapes) * 4 * 32
    assert cut.tokens == padded.tokens
    assert cut.loss == pytest.approx(padded.loss, rel=1e-5)
    np.testing.assert_allclose(cut.vector, padded.vector, rtol=0, atol=1e-5 * np.abs(padded.vector).max())


def test_without_the_setting_nothing_is_cut_or_drawn_differently() -> None:
    made = Made(*PROMPT)
    made.train()
    assert set(made.shapes) == {(4, 32)}
    plain = batches(len(made.sequences), 4, (made.plan.run.seed, 1, 5))
    np.testing.assert_array_equal(made.drawn(), np.stack([next(plain) for _ in range(6)]))


@examples(max_examples=40)
@given(n=st.integers(1, 60), size=st.integers(1, 9), buckets=st.integers(1, 70), seed=st.integers(0, 99))
def test_each_record_is_drawn_in_the_same_epochs_as_without_buckets(
    n: int, size: int, buckets: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 30, n)
    of = length_buckets(lengths, buckets)
    sizes = Counter(of.tolist())
    assert max(sizes.values()) - min(sizes.values()) <= 1
    for bucket in set(sizes) - {max(sizes)}:
        assert lengths[of == bucket].max() <= lengths[of > bucket].min()
    mine, plain = batches(n, size, (seed, 1), of), batches(n, size, (seed, 1))
    done = waiting = 0
    for _ in range(3):  # epochs
        count, waiting = divmod(waiting + n, size)
        ours = [next(mine) for _ in range(count)]
        theirs = [next(plain) for _ in range(count)]
        assert all(len(batch) == size for batch in ours)
        assert Counter(itertools.chain(*ours)) == Counter(itertools.chain(*theirs))
        done += count
        mixed = sum(len(set(of[batch].tolist())) > 1 for batch in ours)
        assert mixed < len(sizes)  # batches of one bucket, but for those where two buckets meet
    again = batches(n, size, (seed, 1), of)
    np.testing.assert_array_equal(next(again), next(batches(n, size, (seed, 1), of)))


def test_batches_do_not_come_by_length() -> None:
    """In a part of an epoch each record is drawn with the same probability: batches are in random order."""
    of, found = length_buckets(np.arange(40), 4), np.zeros(40)
    for seed in range(400):
        made = batches(40, 5, (seed,), of)
        for _ in range(2):
            found[next(made)] += 1
    # Each of 40 counts is Binomial(400, 1/4): within five standard deviations of its mean.
    assert np.abs(found - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "packing = true"),
        (["privacy.unit=record", "privacy.sampling_rate=0.1", "data.packing=false"], "Poisson sampling"),
        (
            ["privacy.unit=owner", "data.owner=patient", "privacy.sampling_rate=0.1", "data.packing=false"],
            "Poisson sampling",
        ),
        (["privacy.unit=site", "data.packing=false"], "the time of a round"),
    ],
)
def test_plans_whose_batches_may_not_follow_lengths_are_refused(settings: list[str], words: str) -> None:
    if settings:
        settings = [*settings, "privacy.noise_multiplier=1.0", "aggregation.weighting=uniform"]
    with pytest.raises(PlanError) as refused:
        parse("", [*settings, "server.evaluation=none", "data.length_buckets=4"])
    assert str(refused.value).startswith("data.length_buckets is 4")
    assert words in str(refused.value)


def test_ranks_take_one_length() -> None:
    plan = parse("", [*PADDED, "data.length_buckets=4"])
    for section in (MeshSection(replicate=2), MeshSection(compile=True)):
        with pytest.raises(ModelError, match="ranks and compiled blocks take one length"):
            mesh_for(plan, section, "cpu")
