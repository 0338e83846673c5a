"""Messages, help, docs/, the comments and docstrings of src, and those of tests use the project's terms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pages import ROOT, pages

INSTEAD = {
    r"anew|once more": "again, restart",
    r"mend(s|ed|ing)?|remed(y|ies)": "fix",
    r"nobody|somebody|whoever": "no worker, any worker, whichever",
    r"meanwhile": "(nothing)",
    r"be it|as it were": "(nothing)",
    r"(and|or) (its|the|their) like": "and similar",
    r"there is no such|(?<!there )is (none|no(?! (longer|more|less|better|worse)\b))": "is not a, unknown, there is no",
    r"last words": "last output, error message",
    r"good end": "end without an error",
    r"by hand": "manually",
    r"(was|were|is|are) told|tells? (of|it|all|every)|has word of": "reported, logged, passed",
    r"of its own accord": "by itself",
    r"begun|has ended|to its end": "started, exited, finished",
    r"(?<!that )was lost": "disconnected, died",
    r"(behavi|col|fav|hon|lab|neighb)our\w*|grey|centre|catalogue": "the American spelling",
    r"(final|initial|maxim|minim|normal|optim|parallel|real|recogn|serial|summar|synchron)is(e|es|ed|ing|ation)": (
        "the American spelling"
    ),
}
IN_SRC = {  # persons for processes
    r"hears?|heard": "is notified, receives",
    r"news(?![._=(\[])": "message",
    r"knows?|knew": "has, finds",
}
RULES = [(re.compile(rf"\b({words})\b", re.IGNORECASE), better) for words, better in INSTEAD.items()]
RULES_OF_SRC = [(re.compile(rf"\b({words})\b", re.IGNORECASE), better) for words, better in IN_SRC.items()]
NO_FAULTS = r"\bis None\b|\"Colour Schemes\"|^ *meanwhile: "  # a value, a title, an argument
OF_HOROVOD = ("Horovod has been shut down",)  # texts that scripts match
MAX_NAME_LENGTH = 60


def _faults(text: str, rules: Sequence[tuple[re.Pattern[str], str]] = RULES) -> Iterator[str]:
    for pattern, better in rules:
        for found in pattern.finditer(text):
            start, end = max(0, found.start() - 40), found.end() + 40
            yield f"{found[0]!r} in {text[start:end]!r}: use {better}"


def _of_test(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of a test module and the names of its tests, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            yield getattr(node, "lineno", 1), re.sub(r"<!--.*?-->", "", ast.get_docstring(node) or "")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


def _read_by_developers(text: str) -> Iterator[tuple[int, str]]:
    """The comments and the docstrings of a module, without code, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield getattr(node, "lineno", 1), re.sub(r"`[^`\n]*`", "", ast.get_docstring(node) or "")


def _read_by_users(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The literals of a module, with their lines: messages, and the docstrings of fields, which are help texts."""
    documented = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {id(node.body[0].value) for node in nodes if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "src/lockstep").iterdir() if path.is_dir()))
def test_messages_and_help_use_the_glossary(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted((ROOT / "src/lockstep" / folder).rglob("*.py"))
        for line, text in _read_by_users(ast.parse(path.read_text()))
        if not text.startswith(OF_HOROVOD)
        for fault in _faults(text)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "src/lockstep").iterdir() if path.is_dir()))
def test_comments_and_docstrings_use_the_glossary(folder: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted((ROOT / "src/lockstep" / folder).rglob("*.py"))
        for line, text in _read_by_developers(path.read_text())
        for fault in _faults(re.sub(NO_FAULTS, "", text, flags=re.MULTILINE), [*RULES, *RULES_OF_SRC])
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()])
def test_pages_use_the_glossary(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```|`[^`\n]*`|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    faults = list(_faults(" ".join(text.split())))
    assert not faults, "\n".join(faults)


def test_names_and_docstrings_of_tests_use_the_glossary() -> None:
    tests = ROOT / "tests"
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in sorted(tests.rglob("*.py"))
        for line, text in _of_test(ast.parse(path.read_text()))
        for fault in (*_faults(text), *_too_long(text))
    ]
    assert not faults, "\n".join(faults)


def _too_long(text: str) -> Iterator[str]:
    if text.startswith("test ") and len(text) > MAX_NAME_LENGTH:
        yield f"{text!r} is longer than {MAX_NAME_LENGTH} characters"
