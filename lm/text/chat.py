"""A chat as text, by the chat template that comes with a tokenizer.

A template is a program of a stranger, in Jinja. `transformers` runs it in a sandbox, where it can still see more than
its own chat: the clock, Python's random numbers, and in the text of an object (`<generator object at 0x7f...>`) where
memory is free, which earlier chats have left behind. Here it sees its chat alone, so one record cannot change another:

- the clock stands still, in no time zone and one language, and there are no random numbers: a template that uses the
  filter `random` or `lipsum` is refused, chat by chat;
- a set is a sorted list, because its own order is random in each process;
- an iterator is a list at once, and a function, method or class is a value without an address and attributes: on a
  class a template could leave a mark that later chats find.

Stack, memory and time are not bounded: a template may multiply a text, and its reader has to see that it does not. How
much stack and memory there is differs between sites (`Unusable`).

Otherwise the text is that of `PreTrainedTokenizerBase.apply_chat_template`, with which tests compare it.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

NOW = datetime.datetime(2025, 1, 1)
"""The time in each template, without a time zone."""

_DIRECTIVES = {directive: NOW.strftime(f"%{directive}") for directive in "%DFHIMSTYdefjmy"} | {
    "A": "Wednesday",
    "B": "January",
    "a": "Wed",
    "b": "Jan",
    "p": "AM",
    "-d": "1",
    "-m": "1",
}
"""What `strftime_now` gives for `NOW`; any other directive may depend on the machine."""


def _time(form: str) -> str:
    return re.sub(
        r"%(-?.)", lambda found: _DIRECTIVES.get(found[1]) or _refuse(f"%{found[1]} of the time"), form
    )


class _Value:
    """A function or class as a template sees it: it can be called, takes no attribute, and is not printed by its
    address."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _plain(self._call(*arguments, **named))

    def __repr__(self) -> str:
        return f"<function {getattr(self._call, '__name__', '')}>"


class _Joiner(jinja2.utils.Joiner):
    def __repr__(self) -> str:
        return "<joiner>"


class _Cycler(jinja2.utils.Cycler):
    def __repr__(self) -> str:
        return "<cycler>"


_PRINTED_ALIKE = (jinja2.Undefined, jinja2.runtime.Macro, _Value, _Joiner, _Cycler)


def _plain(value: Any) -> Any:
    """The value, so that neither its text nor its order says anything of the process."""
    if isinstance(value, _PRINTED_ALIKE):
        return value
    if isinstance(value, Iterator):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return _Value(value) if callable(value) else value


class _Environment(ImmutableSandboxedEnvironment):
    """Every value that is not of the chat or written in the template comes from one of these four."""

    intercepted_binops = frozenset({"-"})  # of two sets of keys

    def getattr(self, obj: Any, attribute: str) -> Any:
        return _plain(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return _plain(super().getitem(obj, argument))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _plain(super().call_binop(context, operator, left, right))

    def call(self, *arguments: Any, **named: Any) -> Any:
        return _plain(super().call(*arguments, **named))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which a template marks what the model says: its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # declared as a set; nobody adds to it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _without_iterators(kept: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kept)
    def made(*arguments: Any, **named: Any) -> Any:
        return _plain(kept(*arguments, **named))

    return made


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """A chat template, ready to be rendered.

    Raises:
        jinja2.TemplateError: it is no template, or has a filter that is not there.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    del environment.filters["random"]
    environment.filters["tojson"] = _json
    for name, each in environment.filters.items():
        environment.filters[name] = _without_iterators(each)
    environment.globals = {
        "range": _Value(safe_range),
        "dict": _Value(dict),
        "namespace": _Value(jinja2.utils.Namespace),
        "joiner": _Value(_Joiner),
        "cycler": _Value(_Cycler),
        "raise_exception": _Value(_refuse),
        "strftime_now": _Value(_time),
    }
    return environment.from_string(template)


def _thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The turn with what was thought before it under each name that templates read, as `transformers` gives it."""
    named = (message.get(name) for name in ("reasoning_content", "thinking", "reasoning"))
    thought = next((each for each in named if each is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def render(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str | list[str]]
) -> str:
    """The text of a chat.

    Args:
        template: In Jinja.
        messages: The turns, whose values are those of JSON.
        special_tokens: Such as `bos_token`, by name.

    Raises:
        Exception: of any type; a template is a program.
    """
    return compiled(template).render(
        messages=[_thought(message) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=False,
        **special_tokens,
    )
