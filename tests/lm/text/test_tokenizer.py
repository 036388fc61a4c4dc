"""Bytes as tokens lose nothing; an unavailable tokenizer is refused at once."""

import json
import time
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Wav2Vec2CTCTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cloister.lm.text.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_digest
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import ModelSection
from cloister.tests.tools.raises import raises

BYTES = byte_tokenizer()
UNREACHABLE = httpx.ConnectError("no network")


def words(**special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # its constructor has no annotations
        tokenizer_object=backend, unk_token="<unk>", **special
    )


def hub(monkeypatch: pytest.MonkeyPatch, answer: Exception) -> None:
    def repo_info(*_: object, **__: object) -> None:
        raise answer

    monkeypatch.setattr(HfApi, "repo_info", repo_info)


@settings(deadline=None)
@given(st.text())
def test_tokens_are_the_bytes_and_give_the_text_back(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    if "<|" not in text:
        assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_every_byte_is_named_as_in_gpt2() -> None:
    reference = bytes_to_unicode()  # type: ignore[no-untyped-call]  # it has no annotations
    assert {byte: BYTES.convert_ids_to_tokens(byte) for byte in range(256)} == reference


def test_special_tokens() -> None:
    assert (len(BYTES), BYTES.eos_token_id, BYTES.pad_token_id) == (258, 256, 257)
    assert BYTES("a<|end|>")["input_ids"] == [97, 256]
    assert BYTES.decode([97, 256, 257], skip_special_tokens=True) == "a"


def test_chat_template() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert BYTES.apply_chat_template(chat, tokenize=False) == "user\nhi<|end|>assistant\nho<|end|>"
    asked = BYTES.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "user\nhi<|end|>assistant\n"


@pytest.mark.parametrize("text", ["  a , b .\r\n\x00", "é€😀 עברית \u200d", "'s n't <|end|> \ufffd"])
def test_a_saved_one_is_the_same(text: str, tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    for again in (
        AutoTokenizer.from_pretrained(tmp_path),
        load_tokenizer(ModelSection(tokenizer=str(tmp_path))),
    ):
        assert again(text)["input_ids"] == BYTES(text)["input_ids"]
        assert again.decode(again(text)["input_ids"]) == text
        assert (again.eos_token, again.pad_token, again.chat_template) == (
            "<|end|>",
            "<|pad|>",
            BYTES.chat_template,
        )


@pytest.mark.parametrize("model", [ModelSection(), ModelSection(name="gpt2", tokenizer="bytes")])
def test_bytes_need_no_files(model: ModelSection) -> None:
    assert load_tokenizer(model).get_vocab() == BYTES.get_vocab()


def test_a_tokenizer_that_cuts_at_random_is_refused(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["dropout"] = 0.1
    file.write_text(json.dumps(content))
    with raises(ModelError, "model.tokenizer", says="in one way"):
        load_tokenizer(ModelSection(tokenizer=str(tmp_path)))


def test_without_a_padding_token_it_pads_with_its_end(tmp_path: Path) -> None:
    words(eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelSection(name=str(tmp_path)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_without_an_end_token_it_is_refused(tmp_path: Path) -> None:
    words().save_pretrained(tmp_path)
    with raises(ModelError, "model.name", says="end-of-text"):
        load_tokenizer(ModelSection(name=str(tmp_path)))


@pytest.mark.parametrize("missing", ["/nowhere/model", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder_is_refused(missing: str) -> None:
    with raises(ModelError, "model.tokenizer", says="existing folder"):
        load_tokenizer(ModelSection(tokenizer=missing))


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with raises(ModelError, "model.tokenizer", says="existing folder"):
        load_tokenizer(ModelSection(tokenizer=str(file)))


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with raises(ModelError, "model.name") as refused:
        load_tokenizer(ModelSection(name=str(tmp_path)))
    assert "\n" not in str(refused.value)
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with raises(ModelError, "model.name"):
        load_tokenizer(ModelSection(name=str(tmp_path)))


@pytest.mark.parametrize(
    "answer", [UNREACHABLE, httpx.ConnectTimeout("slow"), OfflineModeIsEnabled("offline")]
)
def test_without_a_hub_it_is_refused_at_once(answer: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, answer)
    began = time.monotonic()
    with raises(ModelError, "model.name", says=("no-such/model", "cannot be reached")) as refused:
        load_tokenizer(ModelSection(name="no-such/model"))
    assert time.monotonic() - began < 5
    assert "\n" not in str(refused.value)


def test_a_name_that_the_hub_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    hub(monkeypatch, RepositoryNotFoundError("no", response=response))
    with raises(ModelError, "model.name", says=("revision v1", "404")):
        load_tokenizer(ModelSection(name="no-such/model", revision="v1"))


def test_a_name_that_no_hub_can_have_is_refused() -> None:
    with raises(ModelError, "model.tokenizer", says="owner/name"):
        load_tokenizer(ModelSection(tokenizer="not a name!"))


# The digest of a tokenizer.


def test_the_digest_of_a_tokenizer_is_of_what_it_saves_and_not_of_its_place_or_last_call(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer()
    known = tokenizer_digest(tokenizer)
    tokenizer("a longer text", truncation=True, max_length=2, padding="max_length")
    tokenizer_digest.cache_clear()
    assert tokenizer_digest(tokenizer) == known
    tokenizer.save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "other")
    again = [tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path / place)) for place in ("one", "other")]
    assert again[0] == again[1]


def test_every_setting_of_a_tokenizer_is_in_its_digest() -> None:
    digests = {tokenizer_digest(byte_tokenizer())}
    for change in ("split", "template", "templates", "special", "token called padding"):
        tokenizer = byte_tokenizer()
        match change:
            case "split":
                tokenizer.init_kwargs["split_special_tokens"] = True
            case "template":
                tokenizer.chat_template = "{{ messages }}"
            case "templates":
                tokenizer.chat_template = {"default": "{{ messages }}", "other": "{{ messages[0] }}"}
            case "special":
                tokenizer.pad_token = tokenizer.eos_token
            case _:
                tokenizer.add_tokens(["padding"])
        digests.add(tokenizer_digest(tokenizer))
    assert len(digests) == 6


def test_a_vocabulary_is_in_the_digest_whatever_its_tokens_are_called(tmp_path: Path) -> None:
    """Fields are left out by the file that they are in: in a vocabulary `padding` is a token, or a language."""
    digests = set()
    for number in (3, 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        vocabulary = {"padding": {"<pad>": 0, "<s>": 1, "</s>": 2, "a": number, "<unk>": 7 - number}}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        file = str(folder / "vocab.json")
        made = Wav2Vec2CTCTokenizer(file, target_lang="padding")  # type: ignore[no-untyped-call]  # its constructor has no annotations
        digests.add(tokenizer_digest(made))
    assert len(digests) == 2


def pieces(folder: Path, *, twice: bool) -> Path:
    """A tokenizer with an added token that is special in memory and not where it is saved, if it is listed twice."""
    words = ["[UNK]", "<eos>", *(f"{begin}{each}" for each in "thfvrisow abcd" for begin in ("", "##"))]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    kinds = [
        ("<eos>", 1, True),
        *([("e", len(vocabulary), True)] if twice else []),
        ("e", len(vocabulary), False),
    ]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": index, "content": word, "special": special, **plain} for word, index, special in kinds]
    model: dict[str, object] = {
        "type": "WordPiece",
        "vocab": vocabulary,
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
    }
    model["max_input_chars_per_word"] = 1000
    saved = {"version": "1.0", "added_tokens": added, "model": model}
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(dict.fromkeys(names) | saved))
    settings = {
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "unk_token": "[UNK]",
        "split_special_tokens": True,
    }
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tokenizers_of_one_digest_cut_texts_in_one_way(tmp_path: Path) -> None:
    """Sites compare digests: with equal ones and other tokens, a crafted model would learn at one site alone."""
    folders = [pieces(tmp_path / str(twice), twice=twice) for twice in (True, False)]
    as_read = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    assert tokenizer_digest(as_read[0]) == tokenizer_digest(as_read[1])
    assert as_read[0]("the fever").input_ids != as_read[1]("the fever").input_ids, "as files have it"
    loaded = [load_tokenizer(ModelSection(tokenizer=str(folder))) for folder in folders]
    assert tokenizer_digest(loaded[0]) == tokenizer_digest(loaded[1])
    assert loaded[0]("the fever").input_ids == loaded[1]("the fever").input_ids
    assert [each.name_or_path for each in loaded] == [str(folder) for folder in folders]
