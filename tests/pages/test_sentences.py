"""The sentences of errors are in one file, and tests compare errors by class and field (`tests/tools/raises.py`)."""

import ast
from collections.abc import Callable

import pytest

from cloister.protocol.errors import CloisterError, PlanError, SecureSumError, StepError
from cloister.tests.pages import sentences
from cloister.tests.test_imports import ROOT
from cloister.tests.tools.raises import raises

REASONS = {
    "AssertionError": "a defect, which no user sees; the text tells the asserts of a function apart",
    "TypeError": "a sentence of Python",
    "ValueError": "a sentence of NumPy, JSON or Flower",
    "ssl.SSLCertVerificationError": "a sentence of OpenSSL",
}
"""The classes of which a test may compare the text with `match=`: why."""


def test_the_sentences_are_those_of_the_source() -> None:
    kept = (ROOT / "tests" / "pages" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    assert kept == "".join(sentences.lines()).splitlines(), (
        "read the difference, then: python -m cloister.tests.pages.sentences > tests/pages/sentences.txt"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise PlanError("a", b, expected="c")', "PlanError: a is {…}: expected c"),
        (
            'error = PlanError(f"a{b!r}", expected=f"{c:.3g} d", fix="e  f")',
            "PlanError: a{…}: expected {…} d; e f",
        ),
        ('LEAST = 2\nraise PlanError("a", "b", expected=f"{LEAST} c")', "PlanError: a is b: expected 2 c"),
        (
            'raise PlanError("a" if b else "c", expected="d" + e())',
            "PlanError: (a | c): expected d{…}",
        ),
        ("raise PlanError(*about, expected=expected)", "PlanError: {…}: expected {…}"),
        ('raise _no_model(name, "a model", fix="b")', "_no_model: {…}, a model, fix=b"),
        ('yield Refusal("a", f"b {c}", "d", "mask")', "Refusal: a: expected b {…}; d"),
        ("raise error from None\nreason(a)", None),
    ],
)
def test_a_sentence_is_read_from_the_source(source: str, expected: str | None) -> None:
    assert sentences.sentences(source) == ([] if expected is None else [expected])


def matched(source: str) -> list[str]:
    """The classes of the `pytest.raises(..., match=...)` of a file."""
    return [
        ast.unparse(node.args[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and any(each.arg == "match" for each in node.keywords)
    ]


def test_only_sentences_of_others_and_of_defects_are_matched() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): kinds
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (kinds := matched(path.read_text(encoding="utf-8")))
    }
    assert {path: kinds for path, kinds in found.items() if not set(kinds) <= set(REASONS)} == {}
    assert set(REASONS) == {kind for kinds in found.values() for kind in kinds}, (
        "nothing needs these any more"
    )
    assert sum(map(len, found.values())) < 30


def plan_error() -> None:
    raise PlanError("local.steps", 3, expected="more", fix="raise local.steps")


def file_error() -> None:
    raise CloisterError("/a/run/plan.json: run", expected="a name")


def other_error() -> None:
    raise ValueError("out has 5 elements: expected 4")


def test_an_error_is_known_by_its_class_and_field() -> None:
    with raises(PlanError, "local.steps") as caught:
        plan_error()
    assert caught.value.value == 3
    with raises(PlanError, "local.optimizer", "local.steps", says=("3", "more")):
        plan_error()
    for field in ("plan.json: run", "run/plan.json: run", "/a/run/plan.json: run"):
        with raises(CloisterError, field):
            file_error()
    with raises(ValueError, "out", says="5 elements"):
        other_error()


@pytest.mark.parametrize(
    ("kind", "fields", "says", "act"),
    [
        (CloisterError, ("local.steps",), "", plan_error),
        (PlanError, ("steps",), "", plan_error),
        (PlanError, ("local.steps is 3",), "", plan_error),
        (PlanError, ("local",), "", plan_error),
        (PlanError, (), "", plan_error),
        (PlanError, ("local.steps",), "less", plan_error),
        (PlanError, ("local.steps",), ("3", "less"), plan_error),
        (CloisterError, ("json: run",), "", file_error),
        (CloisterError, ("/plan.json: run",), "", file_error),
        (ValueError, ("out has 5 elements",), "", other_error),
    ],
)
def test_another_error_is_told_apart(
    kind: type[Exception], fields: tuple[str, ...], says: str | tuple[str, ...], act: Callable[[], None]
) -> None:
    with pytest.raises(AssertionError), raises(kind, *fields, says=says):
        act()


def test_an_error_of_another_class_or_none_fails() -> None:
    with pytest.raises(PlanError), raises(StepError, "local.steps"):
        plan_error()
    with pytest.raises(pytest.fail.Exception), raises(SecureSumError, "local.steps"):
        pass
