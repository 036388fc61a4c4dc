"""The sentences of all errors, read from the source.

`python -m cloister.tests.pages.sentences > tests/pages/sentences.txt` writes them where a test looks for them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from cloister.tests.test_imports import ROOT, modules

GAP = "{…}"
"""Stands for what is known only when the error is made."""
ERROR = re.compile(r"\wError$|\bRefusal$")
"""What an error's class is called; `Error` itself is one of Flower's messages."""
REFUSAL = ("field", "expected", "fix", "because", "value")
"""The fields of the `Refusal` of a plan, which becomes a `PlanError`."""


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The texts that a module gives names to."""
    return {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.JoinedStr | ast.Constant)
    }


def template(node: ast.expr, known: Mapping[str, ast.expr]) -> str:
    """An expression as text, with a gap for each part that the source does not give."""
    match node:
        case ast.Constant(value):
            return str(value)
        case ast.JoinedStr(values):
            return "".join(template(each, known) for each in values)
        case ast.FormattedValue(value):
            return template(value, known)
        case ast.BinOp(left, ast.Add(), right):
            return template(left, known) + template(right, known)
        case ast.IfExp(_, body, orelse):
            return f"({template(body, known)} | {template(orelse, known)})"
        case ast.Name(name) if name in known:
            return template(known[name], known)
    return GAP


def sentence(call: ast.Call, known: Mapping[str, ast.expr]) -> str:
    """The sentence that `CloisterError` makes of these arguments, or the arguments of another class or function."""
    kind = ast.unparse(call.func)
    given = [template(each, known) for each in call.args]
    named = {each.arg: template(each.value, known) for each in call.keywords}
    if kind == "Refusal":
        named |= dict(zip(REFUSAL, given, strict=False))
        given = given[:1]
    if "expected" in named:
        about = " is ".join(given) or GAP
        text = f"{about}: expected {named['expected']}" + (f"; {named['fix']}" if named.get("fix") else "")
    else:
        text = ", ".join([*given, *(f"{name}={value}" for name, value in named.items())])
    return " ".join(f"{kind}: {text}".split())


def sentences(source: str) -> list[str]:
    """All calls in a module that make an error, sorted, each with its sentence."""
    tree = ast.parse(source)
    raised = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            node in raised
            or any(each.arg == "expected" for each in node.keywords)
            or ERROR.search(ast.unparse(node.func))
        )
    ]
    known = constants(tree)
    return sorted(sentence(call, known) for call in calls)


def lines() -> Iterator[str]:
    """The lines of `tests/pages/sentences.txt`."""
    for path in modules():
        if found := sentences(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(ROOT).as_posix()}\n"
            yield from (f"  {each}\n" for each in found)
            yield "\n"


if __name__ == "__main__":
    print("".join(lines()), end="")
