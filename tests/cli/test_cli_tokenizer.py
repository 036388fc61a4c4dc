"""`cloister tokenizer`, and a run on Chinese text: any text comes back whole, and no character is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from cloister.tests.tools.command import done, found, lone_refusal, set_options

CHINESE = (
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。闰余成岁，律吕调阳。",
    "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？人不知而不愠，不亦君子乎？",
    "道可道，非常道。名可名，非常名。无名天地之始，有名万物之母。",
    "上善若水。水善利万物而不争，处众人之所恶，故几于道。 as English says: water.",
)
MIXED = "天地 and 𠮷野家, naïve 😀 e\u0301\n\t学 <end>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chinese records, some with English words."""
    path = tmp_path_factory.mktemp("chinese") / "chinese.jsonl"
    lines = [
        json.dumps({"text": f"{text}第{n}章"}, ensure_ascii=False) for n in range(12) for text in CHINESE
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(corpus: Path) -> dict[str, Path]:
    """A folder with a tokenizer of each kind."""
    from cloister.cli.main import main

    folders = {}
    for kind in ("bpe", "unigram"):
        folders[kind] = corpus.parent / kind
        given = [str(corpus), "--kind", kind, "--vocab", "400", "--out", str(folders[kind])]
        assert main(["tokenizer", "train", *given]) == 0
    return folders


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_trained_tokenizer_shortens_its_language_and_gives_any_text_back(
    kind: str, trained: dict[str, Path]
) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(trained[kind])
    size = len(CHINESE[0].encode())
    assert len(loaded(CHINESE[0])["input_ids"]) < size / (2 if kind == "bpe" else 1.2)
    assert 258 < len(loaded) <= 400
    assert loaded.decode(loaded(MIXED)["input_ids"]) == MIXED
    assert {loaded.eos_token, loaded.pad_token} == {"<|end|>", "<|pad|>"}

    @settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
    @given(st.text())
    def every_text_comes_back(text: str) -> None:
        if "<|" not in text:
            assert loaded.decode(loaded(text)["input_ids"]) == text

    every_text_comes_back()


def test_a_run_on_chinese_text_counts_bytes_and_writes_whole_characters(
    corpus: Path,
    trained: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    small = (
        *("run.rounds=1", "cohort.sites=3", "local.steps=2", "local.warmup_steps=0", "simulation.public=0.2"),
        *(
            "model.config.hidden_size=16",
            "model.config.intermediate_size=32",
            "model.config.num_hidden_layers=1",
        ),
        *(
            f"model.tokenizer={trained['bpe']}",
            f"simulation.source={corpus}",
            "data.packing=false",
            "data.sequence_length=128",
        ),
    )
    given_settings = set_options(small)
    outcome = found(capsys, "simulate", "chinese", *given_settings, "--out", str(run), "--workers", "1")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    loaded: Any = AutoTokenizer.from_pretrained(run / "final")
    texts = [json.loads(line)["text"] for line in (run / "sites" / "public.jsonl").read_text().splitlines()]
    # In a sequence the first token is not scored, and the one after the text is; each fits into one sequence.
    sizes = [(len(loaded(text)["input_ids"]), len(text.encode())) for text in texts]
    assert max(tokens for tokens, _ in sizes) < 128
    tokens = sum(tokens for tokens, _ in sizes)
    n_bytes = sum(size * (tokens - 1) / tokens for tokens, size in sizes)
    expected = outcome["final_loss"] * tokens / (0.6931471805599453 * n_bytes)
    assert row["bits_per_byte"] == pytest.approx(expected, rel=2e-3)
    cut = 0
    for length in range(1, 9):
        arguments = ("generate", str(run), "--prompt", "天地", "--tokens", str(length), "--temperature", "2")
        text = done(capsys, *arguments).removesuffix("\n")
        assert text.startswith("天地")
        assert not text.endswith("\ufffd")
        cut += text == "天地"
    assert cut, "a first token that is no whole character"


def test_what_is_no_public_text_or_too_small_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "made"))
    assert "--vocab is 257: expected from 258 to 16777216" in lone_refusal(
        capsys, "tokenizer", "train", str(corpus), "--vocab", "257", *out
    )
    site = tmp_path / "site"
    site.mkdir()
    (site / "site.toml").touch()
    (site / "records.jsonl").write_text('{"text": "private"}\n')
    (site / "away.jsonl").symlink_to(corpus)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "text.jsonl").symlink_to(site / "records.jsonl")
    (site / "out").symlink_to(corpus.parent)
    (tmp_path / "in").symlink_to("site")
    through = tmp_path / "through"
    through.mkdir()
    (through / "text.jsonl").symlink_to("../in/away.jsonl")
    (tmp_path / "folder").symlink_to("through/../in/out")
    for private in (
        *(site / "records.jsonl", site, site / "away.jsonl", linked / "text.jsonl", linked),
        *(through / "text.jsonl", through, tmp_path / "folder" / corpus.name, tmp_path / "folder"),
    ):
        said = lone_refusal(capsys, "tokenizer", "train", str(corpus), str(private), *out)
        assert "expected public text, and this is in a site's folder" in said
    (public := tmp_path / "public").mkdir()
    (public / "text.jsonl").symlink_to(corpus)
    (loop := public / "loop.jsonl").symlink_to(loop)
    for looped in (loop, public):
        said = lone_refusal(capsys, "tokenizer", "train", str(looped), *out)
        assert f"FILE is '{loop}': expected a file or folder" in said
    assert "field wrong is None: expected text in each record" in lone_refusal(
        capsys, "tokenizer", "train", str(corpus), "--field", "wrong", *out
    )
    half = tmp_path / "half.jsonl"
    half.write_text(json.dumps({"text": "a\ud800"}))
    assert "expected text in each record" in lone_refusal(capsys, "tokenizer", "train", str(half), *out)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_no_text_and_no_such_vocabulary_are_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, out = tmp_path / "empty.jsonl", ["--kind", kind, "--out", str(tmp_path / "made")]
    empty.write_text('{"text": ""}\n')
    said = lone_refusal(capsys, "tokenizer", "train", str(empty), *out)
    assert "expected at least one character" in said
    said = lone_refusal(capsys, "tokenizer", "train", str(empty), *out, "--vocab", str(10**21))
    assert "expected from 258 to 16777216" in said
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_tokenizer_learns_what_a_private_model_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing of a model without a guarantee."""
    config = ("hidden_size=16", "intermediate_size=32", "num_hidden_layers=1", "num_attention_heads=2")
    small = [
        *("run.rounds=1", "cohort.sites=3", "local.steps=2", "simulation.durable=false"),
        *(f"model.config.{each}" for each in (*config, "num_key_value_heads=2")),
    ]
    run, open_run = str(tmp_path / "run"), str(tmp_path / "open")
    private = set_options([*small, "public.steps=60"])
    done(capsys, "simulate", "private-code", *private, "--out", run, "--workers", "1")
    train = ("tokenizer", "train", "--samples", "70", "--vocab", "300", "--from-model")
    made = found(capsys, *train, run, "--out", str(tmp_path / "tokenizer"))
    assert made["records"] == 70
    assert made["characters"] > 70
    assert 258 < made["vocabulary"] <= 300
    again = found(capsys, *train, run, "--out", str(tmp_path / "again"))
    assert again["bytes"] == made["bytes"]  # samples of one seed
    done(capsys, "simulate", "not-private", *set_options(small), "--out", open_run, "--workers", "1")
    said = lone_refusal(capsys, *train, open_run, "--out", str(tmp_path / "none"))
    assert "privacy unit" in said
    assert "--samples" in lone_refusal(
        capsys, "tokenizer", "train", "--samples", "0", "--from-model", run, "--out", str(tmp_path / "none")
    )
