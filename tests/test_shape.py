"""How long a function, how wide a signature and how large a class may be, and what may be larger."""

import ast
from collections.abc import Iterator

import pytest

from cloister.tests.test_imports import ROOT, modules

LINES = 60
"""Of a function, from its `def` to its end, without its docstring."""
PARAMETERS = 8
"""Of a function, without `self` and `cls`."""
ATTRIBUTES = 15
"""Of a class: annotated fields, and what its methods assign to `self`."""

EXCEPTIONS: dict[str, str] = {
    "clients/setup/config.py:SiteConfig": "a settings file: its attributes are its fields",
    "privacy/ledger/policy.py:Policy": "a settings file: its attributes are its fields",
    "privacy/report/report.py:RunReport": "the report's JSON: its attributes are its fields",
    "protocol/plan/plan.py:DataSection": "a section of the plan: its attributes are its fields",
    "protocol/plan/plan.py:LocalSection": "a section of the plan: its attributes are its fields",
    "server/run.py:run": "the entry point: each parameter is a setting of its own, the body the order of a run",
    "server/sum/party.py:Party": "what all sums of a run share",
    "simulations/run.py:simulate": "the public entry point: each parameter is a choice of its own",
}
"""By file and name: why it may be larger."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Definition]]:
    """All functions and classes, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield f"{inside}{node.name}", node
            yield from definitions(node, f"{inside}{node.name}.")
        else:
            yield from definitions(node, inside)


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first, end = function.body[0], function.end_lineno
    assert end is not None
    docstring = 0
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        docstring = first.end_lineno - first.lineno + 1
    return end - function.lineno + 1 - docstring


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    return sum(
        each.arg not in ("self", "cls") for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]
    )


def attributes(kind: ast.ClassDef) -> int:
    fields = {
        each.target.id
        for each in kind.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(kind)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return len(fields | assigned)


def too_large(source: str) -> dict[str, str]:
    """The functions and classes of a module that exceed a limit, by name: by what."""
    found: dict[str, list[str]] = {}
    for name, node in definitions(ast.parse(source)):
        sizes = (
            [(attributes(node), ATTRIBUTES, "attributes")]
            if isinstance(node, ast.ClassDef)
            else [(lines(node), LINES, "lines"), (parameters(node), PARAMETERS, "parameters")]
        )
        for size, most, what in sizes:
            if size > most:
                found.setdefault(name, []).append(f"{size} {what}, at most {most}")
    return {name: "; ".join(said) for name, said in found.items()}


def test_no_function_or_class_is_too_large() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}": said
        for path in modules()
        for name, said in too_large(path.read_text(encoding="utf-8")).items()
    }
    assert {name: said for name, said in found.items() if name not in EXCEPTIONS} == {}
    assert set(EXCEPTIONS) - set(found) == set(), "these are not too large any more"
    assert all(EXCEPTIONS.values())


DOCSTRING = '    """One.\n\n    Two.\n    """\n'
FIELDS = "".join(f"    a{number}: int\n" for number in range(ATTRIBUTES))


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("def f():\n" + DOCSTRING + "    pass\n" * (LINES - 1), "f", ""),
        ("async def f():\n" + DOCSTRING + "    pass\n" * LINES, "f", "61 lines"),
        ("class A:\n    def f(self, a, b, /, c, d, *, e, f, g, h):\n        pass\n", "A.f", ""),
        (
            "class A:\n    def f(self, a, b, /, c, d, *, e, f, g, h, i):\n        pass\n",
            "A.f",
            "9 parameters",
        ),
        (f"class A:\n{FIELDS}    def f(self):\n        self.a0, other.b = 1, 2\n", "A", ""),
        (f"class A:\n{FIELDS}    def f(self):\n        self.a0, self.b = 1, 2\n", "A", "16 attributes"),
        (
            f"class A:\n{FIELDS}    def f(self):\n        with open('') as self.b:\n            pass\n",
            "A",
            "16",
        ),
    ],
)
def test_what_is_too_large_is_found(source: str, name: str, said: str) -> None:
    assert too_large(source).get(name, "")[: len(said) or None] == said
