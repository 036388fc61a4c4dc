"""Exactly the answers are learned, whatever the tokenizer and its chat template do to a text."""

import contextlib
import re
import time
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import datasets  # type: ignore[import-untyped]  # it ships no types
import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cloister.lm.tasks.registry import task_of
from cloister.lm.text.chat import compiled, render
from cloister.lm.text.examples import ANSWER, CONTEXT, Encoder, Example
from cloister.lm.text.records import Records, Unusable, read_each, read_records
from cloister.lm.text.tokenizer import END, PAD, byte_tokenizer, tokenizer_digest
from cloister.protocol.errors import DataError
from cloister.protocol.plan.plan import DataSection
from cloister.tests.tools.raises import raises

Format = Literal["text", "prompt", "messages"]

BYTES = byte_tokenizer()
EOS = 256
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|"))
CODED = st.lists(PLAIN | st.sampled_from([END, PAD, "<|en", "d|>"]), max_size=4).map("".join)


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


def examples(
    records: Records, tokenizer: PreTrainedTokenizerBase = BYTES, format_: Format = "text"
) -> list[Example]:
    """The examples of all records; refuses one that cannot be used."""
    unusable = Unusable()
    found = [
        example for _, example in task_of(DataSection(format=format_)).examples(records, tokenizer, unusable)
    ]
    if unusable.first is not None:
        raise unusable.first
    return found


def learned(example: Example) -> list[str]:
    """The runs of learned tokens of a byte tokenizer, as text."""
    is_learned = example.role != CONTEXT
    borders = np.flatnonzero(np.diff(is_learned)) + 1
    runs = zip(np.split(example.tokens, borders), np.split(is_learned, borders), strict=True)
    return [str(BYTES.decode(tokens.tolist())) for tokens, run in runs if run.any()]


def learned_bytes(example: Example) -> float:
    return example.bytes_each * np.count_nonzero(example.role == ANSWER)


@settings(deadline=None)
@given(prompt=PLAIN, completion=PLAIN)
def test_a_completion_and_its_end_are_learned(prompt: str, completion: str) -> None:
    (example,) = examples([{"prompt": prompt, "completion": completion}], format_="prompt")
    whole = prompt + completion
    assert example.tokens.tolist() == ([*whole.encode(), EOS] if whole else [])
    assert learned(example) == ([completion + END] if whole else [])
    assert learned_bytes(example) == pytest.approx(len(completion.encode()))


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
    (example,) = examples([{"messages": chat}], tokenizer, "messages")
    assert learned(example) == ["yes[/]\n", "well</think>no[/]\n"]


def test_an_end_that_the_template_gives_only_once_is_learned_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}{{ '<|end|>' }}"
    chat = [{"role": role, "content": role.upper()} for role in ["user", "assistant"] * 2]
    (example,) = examples([{"messages": chat}], tokenizer, "messages")
    assert learned(example) == ["ASSISTANT", "ASSISTANT" + END]


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
    found = examples(read_records(str(file)), tokenizer, "messages")
    assert [BYTES.decode(example.tokens.tolist()) for example in found] == ["aTOOL", "bcc"]
    assert learned(found[1]) == ["cc"]


SLOW = byte_tokenizer()
SLOW.add_special_tokens({"additional_special_tokens": ["<never in a text>"]})


def test_another_special_token_makes_another_tokenizer() -> None:
    assert tokenizer_digest(SLOW) != tokenizer_digest(BYTES)  # so that its bytes are not read off


@pytest.mark.parametrize("format_", ["text", "prompt", "messages"])
@settings(deadline=None)
@given(texts=st.lists(st.tuples(CODED, CODED), min_size=1, max_size=5))
def test_reading_off_bytes_equals_the_tokenizer(format_: Format, texts: list[tuple[str, str]]) -> None:
    rows = [
        {
            "text": first,
            "prompt": first,
            "completion": second + "!",
            "messages": [{"role": "user", "content": first}, {"role": "assistant", "content": second}],
        }
        for first, second in texts
    ]
    fast, other = (examples(rows, tokenizer, format_) for tokenizer in (BYTES, SLOW))
    for one, two in zip(fast, other, strict=True):
        assert np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.role, two.role)
        assert one.bytes_each == two.bytes_each


@settings(deadline=None)
@given(CODED)
def test_places_read_off_bytes_equal_those_of_the_tokenizer(text: str) -> None:
    encoders = (Encoder(tokenizer, whole=False, close=False) for tokenizer in (BYTES, SLOW))
    fast, other = (next(encode.places([text])) for encode in encoders)
    np.testing.assert_array_equal(np.stack(fast), np.stack(other))


def test_special_tokens_written_in_a_text_are_tokens() -> None:
    found = examples([{"text": f"a{END}b"}, {"text": f"c{END}"}])
    assert [example.tokens.tolist() for example in found] == [[97, EOS, 98, EOS], [99, EOS]]


def test_a_tokenizer_with_a_beginning_token_gets_it() -> None:
    text = "the answer é"
    ids = MERGED(text)["input_ids"]
    assert ids[0] == 0
    (example,) = examples([{"text": text}], MERGED)
    assert example.tokens.tolist() == [*ids, 1]
    assert example.role[0] == CONTEXT


def test_a_token_across_the_border_belongs_to_the_answer() -> None:
    row = {"prompt": "the question is ", "completion": "the answer"}
    (example,) = examples([row], MERGED, "prompt")
    assert MERGED.decode(example.tokens[example.role != CONTEXT].tolist()) == " the answer<eos>"
    assert learned_bytes(example) == pytest.approx(len("the answer"))


def test_bytes_are_counted_whatever_the_tokens() -> None:
    text = "the answer to the é€😀 question " * 20
    (example,) = examples([{"text": text}], MERGED)
    assert learned_bytes(example) == pytest.approx(len(text.encode()))
    assert len(example) < len(text.encode()) / 2


def test_long_texts_go_to_the_tokenizer_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"text": "the answer to the question\n" * 50}]
    (whole,) = examples(records, MERGED)
    monkeypatch.setattr("cloister.lm.text.examples.BATCH_CHARACTERS", 100)
    (in_pieces,) = examples(records, MERGED)
    assert np.array_equal(in_pieces.tokens, whole.tokens)


@pytest.mark.parametrize(
    ("format_", "row", "field", "says"),
    [
        (
            "text",
            {"body": "x", "n": 1, "text": None},
            "record 2, field text",
            "body, n",
        ),
        ("text", {}, "record 2, field text", "none"),
        ("text", {"text": 3}, "record 2, field text", "3"),
        ("text", "abc", "record 2", "an object"),
        (
            "prompt",
            {"prompt": "x", "answer": "y"},
            "record 2, field completion",
            "answer, prompt",
        ),
        (
            "messages",
            {"messages": "hi"},
            "record 2, field messages",
            ("'hi'", "a list"),
        ),
        (
            "messages",
            {"messages": [{"role": "user"}]},
            "record 2, field messages",
            "a text role",
        ),
        ("messages", {"messages": ["hi"]}, "record 2, field messages", "hi"),
    ],
)
def test_a_wrong_record_is_refused(format_: Format, row: dict[str, Any], field: str, says: str) -> None:
    good = {
        "text": "x",
        "prompt": "x",
        "completion": "y",
        "messages": [{"role": "assistant", "content": "x"}],
    }
    with raises(DataError, field, says=says):
        examples([good, row], BYTES, format_)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with raises(DataError, "data.format", says="chat template"):
        examples([{"messages": []}], tokenizer, "messages")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", ("accepts", "str")),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "keeps"),
    ],
)
def test_a_chat_that_its_template_refuses_is_refused(template: str, says: str | tuple[str, ...]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    rows = [{"messages": [{"role": "assistant", "content": "x"}]}]
    with raises(DataError, "record 1", says=says):
        examples(rows, tokenizer, "messages")


# One record and the others


def chat_of(said: str) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": said}]}


@pytest.mark.parametrize(
    "reads",
    [
        "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}",
        "{% macro f() %}{{ strftime_now('%f') }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(n=n) %}{% set ns.n = 1 %}{% set n = 2 %}{{ n }}{{ ns.n }}",
        "{{ cycler('a', 'b').next() }}",
        "{{ messages[0].keys() - ['role'] }}{{ (messages[0].items() - []) | list }}",
    ],
)
def test_no_rendering_sees_another(reads: str) -> None:
    """A template that uses the clock for one record alone would tell the others of it."""
    assert len(set(rendered(reads))) == 1


LASTING = ("range", "dict", "namespace", "joiner", "cycler", "raise_exception", "strftime_now")
MADE = (
    "''",
    "1",
    "[]",
    "joiner()",
    "cycler('a')",
    "cycler('a').next",
    "namespace()",
    "messages.count",
    "f",
    "self",
)


@pytest.mark.parametrize(
    "of", ["cycler", "cycler('a')", "joiner", "joiner()", "namespace()", "dict", "range(1)"]
)
@pytest.mark.parametrize(
    "name", ["reset", "next", "__call__", "__init__", "__setattr__", "__setitem__", "update"]
)
def test_no_chat_leaves_a_mark_on_what_others_see(of: str, name: str) -> None:
    """A class's own function would set an attribute of anything that it is given, such as another class."""
    see = "".join(f"{{{{ {each}.pos is defined }}}}{{{{ {each}.used is defined }}}}" for each in LASTING)
    for thing in (*LASTING, *MADE):
        mark = f"{{% if messages[0].content == 'mark' %}}{{% set _ = {of}.{name}({thing}, 'pos', 1) %}}{{% endif %}}"
        for touch in (mark, mark.replace(", 'pos', 1", "")):
            template = f"{{% macro f() %}}{{% endmacro %}}{see}{touch}{see}"
            before = render(template, [{"role": "user", "content": "x"}], {})
            with contextlib.suppress(Exception):  # most are no functions, or refuse what they are given
                render(template, [{"role": "user", "content": "mark"}], {})
            assert render(template, [{"role": "user", "content": "x"}], {}) == before
            assert "True" not in render(see, [], {}), "another template sees it"


def test_what_lasts_takes_no_attribute() -> None:
    made = compiled("")
    assert set(made.globals) == set(LASTING)
    for value in made.globals.values():
        with pytest.raises(AttributeError):
            value.pos = 0


def test_the_order_of_a_set_is_not_that_of_the_process() -> None:
    """Python's own is drawn anew in each process, and a template could choose by it what a site learns."""
    names = dict.fromkeys("cdgfahbe", "x")
    some = "{% for n in messages[0].keys() - ['c'] %}{{ n }}{% endfor %}"
    template = f"{{{{ messages[0].keys() - ['role'] }}}}|{some}|{{{{ 3 - 1 }}}}"
    assert render(template, [names], {}) == f"{sorted(names)}|abdefgh|2"


@pytest.mark.parametrize("directive", ["%s", "%Z", "%z", "%c", "%x", "%X", "%G"])
def test_a_template_that_asks_for_what_the_machine_decides_is_refused(directive: str) -> None:
    """The seconds since 1970 are those of the machine's time zone, and names those of its language."""
    with pytest.raises(jinja2.TemplateError):
        render(f"{{{{ strftime_now('{directive}') }}}}", [], {})


def rendered(reads: str) -> list[str]:
    """Three equal chats, by a template that also writes something else."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{reads}"
    found = examples([chat_of("x")] * 3, tokenizer, "messages")
    return [str(BYTES.decode(example.tokens.tolist())) for example in found]


SEEN = [
    "joiner()",
    "cycler('a')",
    "namespace(a=1)",
    "namespace",
    "range",
    "dict",
    "raise_exception",
    "strftime_now",
    "messages[0].items",
    "messages[0]['items']",
    "messages[0]|attr('items')",
    "messages[0].items()",
    "messages[0].keys().__iter__",
    "messages[0].content.join",
    "messages.append",
    "messages|map(attribute='role')",
    "messages|map('upper')",
    "messages|select",
    "messages|batch(1)",
    "messages|groupby('role')",
    "messages|reverse",
    "'a'|reverse",
    "'ab'|slice(1)",
    "messages[0]|items",
    "messages[0]|dictsort",
    "[messages[0].items]",
    "{'a': messages[0].items}",
    "dict(a=joiner())",
    "namespace(a=joiner())",
    "[messages|map('upper')]",
    "(joiner, cycler)",
    "loop",
    "self",
    "self.a",
    "caller",
    "f",
    "f.name",
    "unknown",
    "messages.unknown",
    "messages[0].items.__self__",
    "''.format",
    "''.format_map",
    "'a'|escape",
    "'a'.__class__",
    "range(3)",
]
WAYS = [
    "{{ % }}",
    "{{ %|string }}",
    "{{ % ~ '' }}",
    "{{ '%s'|format(%) }}",
    "{{ '%r'|format(%) }}",
    "{{ '{}'.format(%) }}",
    "{{ '{0!r}'.format(%) }}",
    "{{ [%]|join }}",
    "{{ [%]|string }}",
    "{{ (%)|pprint }}",
    "{{ [%]|map('string')|join }}",
    "{{ '{a}'.format_map({'a': %}) }}",
    "{% filter upper %}{{ % }}{% endfilter %}",
    "{% set a %}{{ % }}{% endset %}{{ a }}",
    "{{ (%)|tojson }}",
    "{{ (%)|urlize }}{{ (%)|indent }}{{ (%)|replace('a', 'b') }}",
    "{{ (%)|xmlattr }}",
    "{{ (%)|hash }}",
    "{{ (%).__hash__() }}",
    "{{ [%]|sort|string }}",
    "{{ [%, %]|unique|map('string')|join }}",
    "{% for a in [%] recursive %}{{ loop }}{{ loop.__call__ }}{{ loop.cycle }}{{ a }}{% endfor %}",
    "{% macro f() %}{{ caller }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f }}{% call f(%) %}x{% endcall %}",
]


@pytest.mark.parametrize("way", WAYS)
def test_no_template_sees_where_something_is_in_memory(way: str) -> None:
    """Memory is what earlier chats have left: a template that prints addresses would tell of them."""
    written = [way.replace("'%s'", "'§s'").replace("'%r'", "'§r'").replace("%}", "§}").replace("{%", "{§")]
    for seen in SEEN:
        template = written[0].replace("%", seen).replace("§", "%")
        try:
            texts = rendered(template)
        except DataError:
            continue
        assert len(set(texts)) == 1, template
        assert not re.search("0x[0-9a-f]{6}|[0-9]{9}", texts[0]), (template, texts[0])


@pytest.mark.parametrize("reads", ["{{ range(10 ** 5) | random }}", "{{ lipsum(1) }}"])
def test_a_template_has_no_random_numbers(reads: str) -> None:
    with pytest.raises(DataError):
        rendered(reads)


LIKE_LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set said = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set said = "" %}{%- endif %}
{{- "<|start|>system\n" + said + "<|end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '\n' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MARKED = """{% for m in messages if m.content %}{% if loop.index > 6 %}{% break %}{% endif %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ loop.cycle('<', '>') }}{{ m.content.split('<')[-1].strip() }}{% endif %}
{% endfor %}{{ tools is none }}{{ messages | map(attribute='role') | join(', ') }}
{{ {'b': ['é'], 'a': 1} | tojson(indent=2) }}
{%- set j = joiner(', ') %}{% for key, value in messages[0].items() %}{{ j() }}{{ key }}={{ value }}{% endfor %}
{%- macro last(list) %}{{ list[-1].content }}{% endmacro %}{{ last(messages) }}
{{ messages[-1].reasoning_content }}{{ messages[-1] }}
{{ messages | selectattr('role', 'eq', 'user') | list | length }}
{%- for role, turns in messages | groupby('role') %}{{ role }}{{ turns | length }}{% endfor %}
{{ messages | batch(2) | list | length }}"""
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <kind>. "},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "<think>so</think> yes"},
    {"role": "user", "content": "and 'x'\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {"z": "ü", "a": [1, None]}}}],
    },
    {"role": "assistant", "content": "no", "reasoning": "well"},
]


@pytest.mark.parametrize("template", [THINKING, LIKE_LLAMA, MARKED, BYTES.chat_template])
def test_a_chat_is_rendered_as_by_its_tokenizer(template: str) -> None:
    text = render(template, TURNS, MERGED.special_tokens_map)
    expected = MERGED.apply_chat_template(TURNS, tokenize=False, chat_template=template)
    assert re.sub(r"01 Jan 2025", time.strftime("%d %b %Y"), text) == expected


def test_a_template_has_a_date() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "\n{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date }} {{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (example,) = examples([chat_of("x")], tokenizer, "messages")
    assert BYTES.decode(example.tokens.tolist()) == "\n01 Jan 2025 2025-01-01x"


DEEP = "{% macro down(n) %}{% if n %}{{ down(n - 1) }}{% endif %}{% endmacro %}{{ down(messages[0].content|length) }}"


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_a_template_that_lacks_stack_or_memory_leaves_out_no_chat_of_a_site_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sites have more of both, and the coordinator chooses the template. Under a privacy unit an error would tell
    that the chat is there."""
    tokenizer = merged()
    tokenizer.chat_template = DEEP
    if error is MemoryError:
        monkeypatch.setattr("cloister.lm.text.chat.render", Mock(side_effect=MemoryError))
    rows, data = [chat_of("x" * 5000)], DataSection(format="messages")
    with raises(DataError, "record 1"):
        list(task_of(data).examples(rows, tokenizer, Unusable(open_=True)))
    unusable = Unusable()
    assert list(task_of(data).examples(rows, tokenizer, unusable)) == []
    assert unusable.left_out == {"refused by the chat template": 1}


class Panic(BaseException):
    """As a panic of the tokenizers library: no `Exception`."""


class Panics(PreTrainedTokenizerFast):
    """Its native code fails on a name, or fails by an exception."""

    def __call__(self, text: Any = None, *more: Any, **options: Any) -> Any:
        for name, kind in (("Alice", Panic), ("Bob", MemoryError)):
            if any(name in each for each in ([text] if isinstance(text, str) else text)):
                raise kind(name)
        return super().__call__(text, *more, **options)


@pytest.mark.parametrize("name", ["Alice", "Bob", "\ud800"])
@pytest.mark.parametrize("format_", ["text", "prompt", "messages"])
def test_a_record_on_which_a_tokenizer_fails_is_left_out_alone(name: str, format_: Format) -> None:
    tokenizer = Panics(  # type: ignore[no-untyped-call]  # its constructor has no annotations
        tokenizer_object=MERGED.backend_tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=MERGED.chat_template,
    )
    rows = [
        {"text": said, "prompt": "q", "completion": said, **chat_of(said)}
        for said in ("one", name, "two", "x")
    ]
    data, unusable = DataSection(format=format_), Unusable()
    found = list(task_of(data).examples(rows, tokenizer, unusable, "text"))
    assert [record["text"] for record, _ in found] == ["one", "two", "x"]
    assert unusable.left_out == {"refused by the tokenizer": 1}
    others = task_of(data).examples([rows[0], *rows[2:]], tokenizer, Unusable())
    for (_, one), (_, two) in zip(found, others, strict=True):
        assert np.array_equal(one.tokens, two.tokens)


def test_a_tokenizer_that_pads_or_cuts_does_not_join_the_texts_of_a_batch(tmp_path: Path) -> None:
    """A tokenizer's file can ask for padding to the longest text beside it."""
    asks = merged()
    asks.backend_tokenizer.enable_padding(length=None)
    asks.backend_tokenizer.enable_truncation(4)
    asks.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rows = [{"prompt": "the", "completion": " answer"}, {"prompt": "", "completion": "the question " * 9}]
    together = examples(rows, tokenizer, "prompt")
    for row, example in zip(rows, together, strict=True):
        assert np.array_equal(examples([row], tokenizer, "prompt")[0].tokens, example.tokens)


def test_no_chat_adds_a_key_to_another(tmp_path: Path) -> None:
    """Arrow gives each object the keys of all objects at its place, at any depth."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.calls | tojson }}{% endfor %}"
    chats = [[{"role": "user", "content": "a", "calls": [{"name": n}]}] for n in ("f", "g")]
    other = [{"role": "user", "content": "b", "calls": [{"name": "h", "age": 7}]}]

    def texts(name: str, chats: list[Any]) -> list[str]:
        file = tmp_path / name
        datasets.Dataset.from_list([{"messages": chat} for chat in chats]).to_parquet(file)
        rows = read_each(str(file), Unusable())
        return [
            str(BYTES.decode(each.tokens.tolist())) for each in examples(list(rows), tokenizer, "messages")
        ]

    assert texts("with.parquet", [*chats, other])[:2] == texts("without.parquet", chats)
