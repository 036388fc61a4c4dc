"""Held-out sums: what they count, and that neither batches nor packing nor padding change them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from cloister.aggregation.features.in_clear import TOKENS
from cloister.aggregation.sums import Sums
from cloister.lm.model.model import LanguageModel, load_model
from cloister.lm.tasks.task import HeldOut
from cloister.lm.text.sequences import NOT_LEARNED, Sequences, next_tokens
from cloister.lm.training.evaluate import subset
from cloister.privacy.accounting.terms import terms_of
from cloister.protocol.errors import PlanError
from cloister.protocol.messages.messages import EVALUATE
from cloister.protocol.plan.soundness import parse
from cloister.server.round.evaluate import at_coordinator
from cloister.simulations.audit.audited import played
from cloister.tests.parties.evaluated import CAUSAL, evaluate
from cloister.tests.parties.federation import RECORD, Federation, tiny, whole, write_records
from cloister.tests.tools.raises import raises

CPU = torch.device("cpu")
CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def load(kind: str = "llama", **config: float) -> LanguageModel:
    if kind == "llama":
        config = {"intermediate_size": 64} | config  # its default has 2 million parameters
    config = CONFIG | config
    settings = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    model = load_model(parse("", [f"model.name=builtin:{kind}", "data.sequence_length=16", *settings]))
    torch.manual_seed(0)
    with torch.no_grad():  # far enough from the uniform distribution that accuracies and losses differ
        for parameter in model.module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load()


def some(n: int = 7, length: int = 16, seed: int = 0) -> Sequences:
    """Random tokens, of which about a third is not learned."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 256, (n, length)).astype(np.int32)
    labels = np.where(random.random((n, length)) < 0.3, NOT_LEARNED, tokens).astype(np.int32)
    labels[:, 0] = NOT_LEARNED
    return Sequences(tokens, labels, None, n_bytes=50)


def test_sums_equal_a_loop_over_single_labels(model: LanguageModel) -> None:
    sequences = some()
    loss, correct, count = 0.0, 0, 0
    for tokens, labels in zip(sequences.tokens, sequences.labels, strict=True):
        with torch.no_grad():
            rows = model.module.eval()(input_ids=torch.tensor(tokens[None], dtype=torch.long)).logits[0]
        for position in range(1, len(tokens)):
            if labels[position] != NOT_LEARNED:
                logs = functional.log_softmax(rows[position - 1].double(), dim=0)
                loss -= float(logs[labels[position]])
                correct += int(logs.argmax() == labels[position])
                count += 1
    found = evaluate(model.module, sequences, 3, CPU)
    assert found.loss_nats == pytest.approx(loss, rel=1e-6)
    assert (found.correct, found.tokens, found.counts) == (correct, count, {"bytes": 50})
    assert count == sequences.n_tokens


def test_predictable_text_is_predicted(model: LanguageModel) -> None:
    """Sequences that the model writes itself, greedily, are all correct."""
    tokens = np.full((2, 16), 65, np.int64)
    tokens[1, 0] = 66
    with torch.no_grad():
        for end in range(1, 16):
            rows = model.module.eval()(input_ids=torch.from_numpy(tokens[:, :end])).logits[:, -1]
            tokens[:, end] = rows.argmax(-1).numpy()
    own = tokens.astype(np.int32)
    assert evaluate(model.module, Sequences(own, own, None, 1), 2, CPU).accuracy == 1.0


def test_a_first_label_is_not_scored(model: LanguageModel) -> None:
    sequences = some()
    with_first = sequences.labels.copy()
    with_first[:, 0] = sequences.tokens[:, 0]
    found = evaluate(model.module, replace(sequences, labels=with_first), 4, CPU)
    assert found == evaluate(model.module, sequences, 4, CPU)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 100])
def test_the_batch_size_changes_nothing(model: LanguageModel, batch_size: int) -> None:
    whole, found = evaluate(model.module, some(), 7, CPU), evaluate(model.module, some(), batch_size, CPU)
    assert found.loss_nats == pytest.approx(whole.loss_nats, rel=1e-6)
    assert replace(found, loss_nats=0) == replace(whole, loss_nats=0)


def test_parts_add_up(model: LanguageModel) -> None:
    sequences = some()
    parts = [
        Sequences(sequences.tokens[rows], sequences.labels[rows], None, n_bytes)
        for rows, n_bytes in ((slice(0, 2), 20), (slice(2, 7), 30))
    ]
    summed = evaluate(model.module, parts[0], 2, CPU) + evaluate(model.module, parts[1], 2, CPU)
    whole = evaluate(model.module, sequences, 2, CPU)
    assert summed.loss_nats == pytest.approx(whole.loss_nats)
    assert replace(summed, loss_nats=0) == replace(whole, loss_nats=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_packed_record_is_scored_as_if_it_were_alone(kind: str) -> None:
    module = load(kind).module
    left, right = some(1, 6, seed=1), some(1, 10, seed=2)
    packed = Sequences(
        np.concatenate([left.tokens, right.tokens], axis=1),
        np.concatenate([left.labels, right.labels], axis=1),
        np.array([[*range(6), *range(10)]], np.int32),
        n_bytes=100,
    )
    apart = evaluate(module, left, 1, CPU) + evaluate(module, right, 1, CPU)
    together = evaluate(module, packed, 1, CPU)
    assert together.loss_nats == pytest.approx(apart.loss_nats, rel=1e-5)
    assert together == replace(apart, loss_nats=together.loss_nats)
    seeing = evaluate(module, replace(packed, positions=None), 1, CPU)
    assert seeing.loss_nats != pytest.approx(apart.loss_nats, rel=1e-3), "the test would not see a leak"


def test_padding_changes_nothing(model: LanguageModel) -> None:
    short = some(3, 10)
    padding = np.full((3, 6), 257, np.int32)
    padded = Sequences(
        np.concatenate([short.tokens, padding], axis=1),
        np.concatenate([short.labels, np.full_like(padding, NOT_LEARNED)], axis=1),
        None,
        short.n_bytes,
    )
    alone, found = evaluate(model.module, short, 3, CPU), evaluate(model.module, padded, 3, CPU)
    assert found.loss_nats == pytest.approx(alone.loss_nats, rel=1e-6)
    assert replace(found, loss_nats=0) == replace(alone, loss_nats=0)


def test_read_only_memory_is_read(model: LanguageModel) -> None:
    sequences = some()
    expected = evaluate(model.module, sequences, 4, CPU)
    for array in (sequences.tokens, sequences.labels):
        array.setflags(write=False)
    assert evaluate(model.module, sequences, 4, CPU) == expected


def test_the_module_keeps_its_mode_and_gets_no_gradients() -> None:
    module = load("gpt2").module  # it has dropout
    for training in (True, False):
        module.train(training)
        first, second = evaluate(module, some(), 4, CPU), evaluate(module, some(), 4, CPU)
        assert first == second, "dropout was on"
        assert module.training is training
    assert all(parameter.grad is None for parameter in module.parameters())


def test_bfloat16_is_close_to_float32_and_is_not_it(model: LanguageModel) -> None:
    exact = evaluate(model.module, some(), 4, CPU, "float32")
    assert evaluate(model.module, some(), 4, CPU, "auto") == exact
    rounded = evaluate(model.module, some(), 4, CPU, "bfloat16")
    assert rounded.loss_nats != exact.loss_nats
    assert rounded.loss_nats == pytest.approx(exact.loss_nats, rel=0.02)


def test_nothing_to_score(model: LanguageModel) -> None:
    none = np.zeros((0, 16), np.int32)
    empty = evaluate(model.module, Sequences(none, none, None, 0), 4, CPU)
    assert empty == HeldOut(counts={"bytes": 0})
    assert all(map(math.isnan, CAUSAL.figures(empty).values()))


def test_derived_figures() -> None:
    sums = HeldOut(loss_nats=math.log(2) * 60, correct=5, tokens=20, counts={"bytes": 30})
    assert sums.loss == pytest.approx(3 * math.log(2))
    assert sums.perplexity == pytest.approx(8)
    assert sums.accuracy == 0.25
    assert CAUSAL.figures(sums)["bits_per_byte"] == pytest.approx(2)
    assert HeldOut(loss_nats=1e6, tokens=1).perplexity == math.inf


def test_targets_are_labels_moved_by_one() -> None:
    labels = np.array([[NOT_LEARNED, 5, 6], [7, NOT_LEARNED, 8]], np.int32)
    expected = [[5, 6, NOT_LEARNED], [NOT_LEARNED, 8, NOT_LEARNED]]
    np.testing.assert_array_equal(next_tokens(labels), expected)


# A subset: `server.evaluation_sequences`


def chosen(n: int, most: int | None, seed: int = 0) -> list[int]:
    """The numbers of the sequences that are chosen from n."""
    tokens = np.repeat(np.arange(n, dtype=np.int32)[:, None], 4, axis=1)
    return [int(row[0]) for row in subset(Sequences(tokens, tokens, None, 0), most, seed).tokens]


def test_a_subset_is_fixed_by_the_seed_and_grows_with_its_size() -> None:
    assert chosen(10, 3) == [2, 3, 4]  # a change would make the losses of a resumed run jump
    assert set(chosen(10, 3)) < set(chosen(10, 4))
    assert chosen(10, 3, seed=1) != chosen(10, 3)
    assert chosen(10, 10) == chosen(10, 11) == chosen(10, None) == list(range(10))
    counts = np.zeros(10)
    for seed in range(2000):
        counts[chosen(10, 3, seed)] += 1
    # Binomial(2000, 0.3): standard deviation 20.5.
    assert np.abs(counts - 600).max() < 5 * 20.5


def test_a_subset_has_the_labels_and_positions_of_its_rows_and_their_part_of_the_bytes() -> None:
    every = replace(some(50), positions=np.arange(800, dtype=np.int32).reshape(50, 16), n_bytes=7000)
    few = subset(every, 20, seed=3)
    assert few.positions is not None
    rows = few.positions[:, 0] // 16
    assert (len(few), list(rows)) == (20, sorted(rows))
    np.testing.assert_array_equal(few.tokens, every.tokens[rows])
    np.testing.assert_array_equal(few.labels, every.labels[rows])
    assert few.n_bytes == round(7000 * few.n_tokens / every.n_tokens)


def test_the_coordinator_evaluates_on_the_subset_in_every_round(tmp_path: Path) -> None:
    records = str(write_records(tmp_path / "records.jsonl"))
    found = {}
    for most in ("5", "100000"):
        plan = tiny(
            f"server.evaluation={records}", f"server.evaluation_sequences={most}", "data.held_out=0.0"
        )
        loaded = load_model(plan)
        weights = loaded.layout.flatten(loaded.module)
        held_out = at_coordinator(plan, loaded, records)
        measured = held_out(0, weights)
        assert measured is not None
        assert held_out(7, weights) == measured
        found[most] = measured.held_out
    few, all_ = found["5"], found["100000"]
    assert few is not None
    assert all_ is not None
    assert 0 < few.tokens <= 5 * 15 < all_.tokens
    assert few.loss == pytest.approx(all_.loss, rel=0.1)


def test_a_site_evaluates_on_the_subset_in_every_round(tmp_path: Path) -> None:
    totals = {}
    for most in (2, 100_000):
        settings = ["aggregation.secure=false", f"server.evaluation_sequences={most}"]
        federation = Federation(tmp_path / str(most), tiny(*settings))
        site, layout = federation.joined(), Sums(federation.plan, 0).evaluation
        first, later = (
            whole(site.contribute(federation.request(purpose=EVALUATE, number=number))) for number in (0, 1)
        )
        np.testing.assert_array_equal(first, later)
        totals[most] = layout.ring.decode_counters(first)[layout.names.index(TOKENS)]
    assert 0 < totals[2] <= 2 * 15 < totals[100_000]


def test_a_subset_of_no_evaluation_is_refused() -> None:
    with raises(PlanError, "server.evaluation_sequences", says="no value"):
        tiny("server.evaluation=none", "server.evaluation_sequences=5")
    with raises(PlanError, "server.evaluation_sequences"):
        tiny("server.evaluation_sequences=0")


def test_an_audit_plays_a_plan_whose_evaluation_has_a_subset() -> None:
    public = [setting for setting in RECORD if setting != "server.evaluation=none"]
    plan = tiny(*public, "server.evaluation=builtin:python-docs", "server.evaluation_sequences=5")
    terms = terms_of(plan, 11_056)
    assert terms is not None
    assert played(plan, terms).server.evaluation_sequences is None
