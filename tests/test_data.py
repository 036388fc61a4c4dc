"""What is read is what is there, each record is used once, and exactly the answers are learned."""

import errno
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import datasets  # type: ignore[import-untyped]  # it ships no types
import httpx
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cloister.lm.data import (
    NOT_LEARNED,
    Prepared,
    Sequences,
    batches,
    cached,
    load_prepared,
    prepare,
    prepared_key,
    read_records,
    save_prepared,
)
from cloister.lm.tokenizer import END, byte_tokenizer
from cloister.protocol import storage
from cloister.protocol.errors import DataError, StorageError
from cloister.protocol.plan import DataSection

BYTES = byte_tokenizer()
EOS = 256
PAD = 257
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|"))
FORMATS: tuple[Literal["text", "prompt", "messages"], ...] = ("text", "prompt", "messages")


def merged() -> PreTrainedTokenizerFast:
    """A tokenizer with merges, a beginning-of-text token, and words that swallow the space before them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the answer to the question is the other answer"] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # its constructor has no annotations
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=BYTES.chat_template,
    )


MERGED = merged()


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


# Reading


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffhé\n\nllo\n".encode())
    assert list(read_records(str(file))) == [{"text": "hé\n\nllo\n"}]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "README.md").write_text("not data")
    assert [record["text"] for record in read_records(str(tmp_path))] == ["a", "b", "c"]


@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("name", ["odd [1]*.jsonl", "list.json", "table.parquet"])
def test_tables(name: str, with_cache: bool, tmp_path: Path) -> None:
    rows = [{"text": f"é{index}\u2028\n", "n": index} for index in range(50)]
    file = tmp_path / name
    if file.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    records = read_records(str(file), cache=tmp_path / "cache" if with_cache else None)
    assert len(records) == 50
    assert records[7] == rows[7]
    assert list(records) == rows
    assert bool(getattr(records, "cache_files", [])) == with_cache


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes('\ufeff{"text": "é"}\n'.encode())
    assert list(read_records(str(file))) == [{"text": "é"}]


def test_private_files_stay_out_of_the_global_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "global"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", elsewhere)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "secret"}\n')
    for cache in (None, tmp_path / "own"):
        assert read_records(str(file), cache=cache)[0] == {"text": "secret"}
    assert not elsewhere.exists()


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for text in ("one", "two", "six"):
        file.write_text(json.dumps({"text": text}))
        assert read_records(str(file), cache=tmp_path / "cache")[0] == {"text": text}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b"", "expected a file with records, and this one is empty"),
        ("a.jsonl", b"\n \n", "a file with records, and this one has none"),
        (
            "a.jsonl",
            b'{"a": "x"}\n\n{"a": "y"\n{"a": "z"}\n',
            r"a\.jsonl, line 3: expected one JSON object \(Expecting",
        ),
        (
            "a.jsonl",
            b'{"a": "x"}\n{"a": "cut o',
            r"a\.jsonl, line 2: expected one JSON object \(Unterminated",
        ),
        ("a.jsonl", b'{"a": "x"}\n"y"\n', r"a\.jsonl, line 2 is 'y': expected one JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', r"a\.jsonl, line 1: expected one JSON object"),
        ("a.json", b'[\n{"a": "x"},\n{"a" "y"}\n]', r"a\.json, line 3: expected a JSON list of objects"),
        ("a.json", b'[{"a": "x"}, 3]', r"a\.json, record 2 is 3: expected one JSON object"),
        ("a.json", b"[]", "expected .*record"),
        ("a.parquet", b"PAR1 this is none", "expected readable parquet records"),
        ("a.txt", b"", "this one is empty"),
        ("a.txt", b"abc\xff", "expected UTF-8 text, and byte 3 is not"),
        ("a.csv", b"a,b", r"expected a file that ends in \.txt, \.jsonl"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(
    name: str, content: bytes, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(DataError, match=complaint) as refused:
            read_records(str(file), cache=cache)
        assert "\n" not in str(refused.value)


def test_a_folder_without_data_or_with_two_kinds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a folder with files that end in"):
        read_records(str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    with pytest.raises(DataError, match="this folder mixes json, text"):
        read_records(str(tmp_path))


@pytest.mark.parametrize(
    "missing", ["nothing.jsonl", "/nowhere/data", "./nowhere", "~/nowhere-at-all", "a/b/c"]
)
def test_a_missing_file_is_refused(missing: str) -> None:
    with pytest.raises(DataError, match=r"^data is .*: expected an existing file or folder"):
        read_records(missing)


def test_without_a_hub_it_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def repo_info(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no network")

    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    with pytest.raises(DataError, match=r"^data is 'no-such/data:en': .*the hub cannot be reached"):
        read_records("no-such/data:en", cache=tmp_path)


# Tokens and labels


@settings(deadline=None)
@given(texts=st.lists(PLAIN, min_size=1, max_size=12), length=st.integers(2, 40))
def test_packed_text_is_the_documents_joined(texts: list[str], length: int) -> None:
    data = DataSection(sequence_length=length, held_out=0)
    if not any(texts):
        with pytest.raises(DataError, match="at least one record with something to learn"):
            prepare([{"text": text} for text in texts], BYTES, data, seed=0)
        return
    prepared = prepare([{"text": text} for text in texts], BYTES, data, seed=0)
    check(prepared.train, length)
    assert prepared.dropped == sum(not text for text in texts)
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
    assert prepared.dropped == dropped
    assert prepared.train.n_bytes == sum(token != EOS for token in expected)
    assert (prepared.train.positions is not None) == packing


TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PLAIN), min_size=1, max_size=6)


@settings(deadline=None)
@given(chats=st.lists(TURNS, min_size=1, max_size=5), packing=st.booleans())
def test_assistant_turns_and_nothing_else_are_learned(
    chats: list[list[tuple[str, str]]], packing: bool
) -> None:
    data = DataSection(format="messages", sequence_length=400, held_out=0, packing=packing)
    rows = [{"messages": [{"role": role, "content": said} for role, said in chat]} for chat in chats]
    expected = [said + END for chat in chats for role, said in chat if role == "assistant"]
    if not expected:
        with pytest.raises(DataError):
            prepare(rows, BYTES, data, seed=0)
        return
    prepared = prepare(rows, BYTES, data, seed=0)
    check(prepared.train, 400)
    assert learned(prepared.train) == expected
    assert prepared.dropped == sum(all(role != "assistant" for role, _ in chat) for chat in chats)
    assert prepared.train.n_bytes == sum(
        len(said.encode()) for said in expected
    )  # the end token is in the template


# A template like Qwen3's: thoughts stay only in what follows the last question, and what was said is stripped.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and '</think>' in m.content %}
        {%- set said = m.content.split('</think>')[-1].strip() %}
        {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}
    {%- else %}{% set said = m.content.strip() %}{% set thought = '' %}{% endif %}
    {{- '[' + m.role + ']' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>' + thought + '</think>' }}{% endif %}
    {{- said + '[/]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""


def test_turns_are_found_in_a_template_that_rewrites_them() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    said = ["yes", "<think>hm</think> yes ", "no", "<think>well</think>\nno\n"]
    chat = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=True)
    ]
    data = DataSection(format="messages", sequence_length=200, held_out=0)
    assert learned(prepare([{"messages": chat}], tokenizer, data, seed=0).train) == [
        "yes[/]\n",
        "well</think>no[/]\n",
    ]


def test_an_end_that_the_template_gives_only_once_is_learned_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}{{ '<|end|>' }}"
    chat = [{"role": role, "content": role.upper()} for role in ["user", "assistant"] * 2]
    data = DataSection(format="messages", sequence_length=200, held_out=0)
    train = prepare([{"messages": chat}], tokenizer, data, seed=0).train
    assert learned(train) == ["ASSISTANT", "ASSISTANT" + END]


def test_arrow_fills_of_missing_keys_do_not_reach_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool is defined %}TOOL{% endif %}{% endfor %}"
    )
    chats = [
        [{"role": "assistant", "content": "a", "tool": "t"}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "cc"}],
    ]
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(file)
    data = DataSection(format="messages", sequence_length=20, held_out=0, packing=False)
    train = prepare(read_records(str(file)), tokenizer, data, seed=0).train
    assert learned(train) == ["TOOL", "cc"]


@pytest.mark.parametrize("format_", FORMATS)
@settings(deadline=None)
@given(texts=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=5))
def test_reading_off_bytes_equals_the_tokenizer(
    format_: Literal["text", "prompt", "messages"], texts: list[tuple[str, str]]
) -> None:
    slow = byte_tokenizer()
    slow.add_special_tokens(
        {"additional_special_tokens": ["<never in a text>"]}
    )  # not known as the byte tokenizer
    data = DataSection(format=format_, sequence_length=64, held_out=0)
    rows = [
        {
            "text": first,
            "prompt": first,
            "completion": second + "!",
            "messages": [{"role": "user", "content": first}, {"role": "assistant", "content": second}],
        }
        for first, second in [*texts, ("some", "thing")]
    ]
    fast, other = (prepare(rows, tokenizer, data, seed=0) for tokenizer in (BYTES, slow))
    assert np.array_equal(fast.train.tokens, other.train.tokens)
    assert np.array_equal(fast.train.labels, other.train.labels)
    assert fast.train.n_bytes == other.train.n_bytes


def test_special_tokens_written_in_a_text_are_tokens() -> None:
    data = DataSection(sequence_length=8, held_out=0)
    train = prepare([{"text": f"a{END}b"}, {"text": f"c{END}"}], BYTES, data, seed=0).train
    assert train.tokens.tolist() == [[97, EOS, 98, EOS, 99, EOS, PAD, PAD]]


def test_a_tokenizer_with_a_beginning_token_gets_it() -> None:
    data = DataSection(sequence_length=64, held_out=0, packing=False)
    text = "the answer é"
    (row,) = prepare([{"text": text}], MERGED, data, seed=0).train.tokens.tolist()
    ids = MERGED(text)["input_ids"]
    assert ids[0] == 0
    assert row[: len(ids) + 1] == [*ids, 1]


def test_a_token_across_the_border_belongs_to_the_answer() -> None:
    data = DataSection(format="prompt", sequence_length=64, held_out=0)
    train = prepare([{"prompt": "the question is ", "completion": "the answer"}], MERGED, data, seed=0).train
    (labels,) = train.labels.tolist()
    assert MERGED.decode([label for label in labels if label != NOT_LEARNED]) == " the answer<eos>"
    assert train.n_bytes == len("the answer")


def test_bytes_are_counted_whatever_the_tokens() -> None:
    data = DataSection(sequence_length=4096, held_out=0)
    text = "the answer to the é€😀 question " * 20
    train = prepare([{"text": text}] * 3, MERGED, data, seed=0).train
    assert train.n_bytes == 3 * len(text.encode())  # the first token learned is the first after <bos>
    assert train.n_tokens < train.n_bytes / 2


def test_long_texts_go_to_the_tokenizer_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataSection(sequence_length=32, held_out=0)
    text = "the answer to the question\n" * 50
    whole = prepare([{"text": text}], MERGED, data, seed=0).train
    monkeypatch.setattr("cloister.lm.data._BATCH_CHARACTERS", 100)
    assert np.array_equal(prepare([{"text": text}], MERGED, data, seed=0).train.tokens, whole.tokens)


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
    with pytest.raises(DataError, match="expected two records or more, of which one can be held out"):
        prepare([row], BYTES, DataSection(format=format_), seed=0)


# Wrong records


@pytest.mark.parametrize(
    ("format_", "row", "complaint"),
    [
        (
            "text",
            {"body": "x", "n": 1, "text": None},
            "^record 2: expected a field 'text', and it has body, n; name the",
        ),
        ("text", {}, "^record 2: expected a field 'text', and it has none"),
        ("text", {"text": 3}, "^record 2, field text is 3: expected text"),
        ("text", "abc", "^record 2 is 'abc': expected an object with named fields"),
        (
            "prompt",
            {"prompt": "x", "answer": "y"},
            "^record 2: expected a field 'completion', and it has answer, prompt",
        ),
        (
            "messages",
            {"messages": "hi"},
            r"^record 2, field messages is 'hi': expected a list of \{role, content\}",
        ),
        (
            "messages",
            {"messages": [{"role": "user"}]},
            "^record 2, field messages .*a text role and a text content",
        ),
        ("messages", {"messages": ["hi"]}, "^record 2, field messages"),
    ],
)
def test_a_wrong_record_is_refused(
    format_: Literal["text", "prompt", "messages"], row: dict[str, Any], complaint: str
) -> None:
    good = {
        "text": "x",
        "prompt": "x",
        "completion": "y",
        "messages": [{"role": "assistant", "content": "x"}],
    }
    with pytest.raises(DataError, match=complaint):
        prepare([good, row], BYTES, DataSection(format=format_), seed=0)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"^data\.format is 'messages'.*has no chat template"):
        prepare([{"messages": []}], tokenizer, DataSection(format="messages"), seed=0)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", r"^record 1: .*roles must alternate"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "^record 1: expected a chat template that keeps"),
    ],
)
def test_a_chat_that_its_template_refuses_is_refused(template: str, complaint: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    rows = [{"messages": [{"role": "assistant", "content": "x"}]}]
    with pytest.raises(DataError, match=complaint):
        prepare(rows, tokenizer, DataSection(format="messages"), seed=0)


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
    pairs = [(first.train, second.train), (first.held_out, second.held_out)]
    return first.dropped == second.dropped and all(
        a.n_bytes == b.n_bytes
        and np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.labels, b.labels)
        and (a.positions is None) == (b.positions is None)
        and (a.positions is None or b.positions is None or np.array_equal(a.positions, b.positions))
        for a, b in pairs
    )


@pytest.mark.parametrize("held_out", [0.0, 0.2])
@pytest.mark.parametrize("packing", [True, False])
def test_saved_sequences_are_mapped(held_out: float, packing: bool, tmp_path: Path) -> None:
    rows = [{"text": "abc" * index} for index in range(9)]
    prepared = prepare(rows, BYTES, DataSection(held_out=held_out, packing=packing), seed=0)
    save_prepared(tmp_path / "x", prepared)
    again = load_prepared(tmp_path / "x")
    assert same(prepared, again)
    assert isinstance(again.train.tokens, np.memmap)
    assert not again.train.tokens.flags.writeable


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
    save_prepared(tmp_path / "x", some)
    file = tmp_path / "x" / "train-labels.npy"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match=r"^prepared data is .*remove the folder"):
        load_prepared(tmp_path / "x")
    with pytest.raises(DataError, match=r"^prepared data is"):
        load_prepared(tmp_path / "y")


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, some: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(storage, "_sync", full)
    with pytest.raises(StorageError, match="No space left"):
        cached(tmp_path, "key", lambda: some)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_the_key_follows_all_that_the_tokens_depend_on(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}')
    other_template = byte_tokenizer()
    other_template.chat_template = "other"

    def key(
        data: DataSection | None = None,
        tokenizer: PreTrainedTokenizerBase = BYTES,
        seed: int = 0,
        split: str = "train",
    ) -> str:
        return prepared_key(str(file), tokenizer, data or DataSection(), seed=seed, split=split)

    first = key()
    assert first == key(tokenizer=byte_tokenizer())
    keys = [
        first, key(DataSection(packing=False)), key(tokenizer=MERGED), key(tokenizer=other_template),
        key(seed=1), key(split="test"),
    ]  # fmt: skip
    file.write_text('{"text": "b"}')
    keys.append(key())
    assert len(set(keys)) == len(keys)


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


@pytest.mark.parametrize(("n", "batch_size"), [(0, 1), (1, 0)])
def test_batches_of_nothing_are_refused(n: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        batches(n, batch_size, (0,))
