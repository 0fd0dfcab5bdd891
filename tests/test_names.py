"""Identifiers are the field's standard words, as docs/contributing.md asks."""

import ast
import re

import pytest

from tests.test_docstrings import FILES, ROOT

FORBIDDEN = ("found", "given", "own")
VAGUE = re.compile(rf"\b_*(of_|({'|'.join(FORBIDDEN)})\b)", re.IGNORECASE)
"""Matches every file with a vague name, and most with such a word elsewhere; only these files are parsed."""
FIELDS = {("gla_core/dispatch/backend.py", "given")}
"""Fields of the contract with backends: `OpCall.given`."""


def identifiers(tree):
    """Yields line and name of each function, class, argument, variable, attribute and alias that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)) | ast.ClassDef(name=str(name)):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def is_vague(name):
    return name.lower().lstrip("_").startswith("of_") or name in FORBIDDEN


@pytest.mark.parametrize("folder", FILES)
def test_names_say_what_a_thing_is(folder):
    texts = ((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in FILES[folder])
    vague = [
        f"{file}:{line}: {name}"
        for file, text in texts
        if VAGUE.search(text)
        for line, name in identifiers(ast.parse(text))
        if is_vague(name) and (file, name) not in FIELDS
    ]
    assert not vague, "say what it is, such as results, matches or arguments (docs/contributing.md):\n" + "\n".join(
        vague
    )


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "for i, (own, _) in x: pass",
        "def f(*, given): pass",
        "def _of_gates(): pass",
        "class Of_Gates: pass",
        "import x as found",
        "self.found += 1",
        "with x as OF_KEYS: pass",
        "y = [own for own in x]",
        "(found := 1)",
        "try:\n    pass\nexcept ValueError as found:\n    pass",
        "match x:\n    case [*found]:\n        pass",
    ],
)
def test_a_vague_name_is_seen_wherever_it_is_defined(source):
    assert VAGUE.search(source)
    assert [name for _, name in identifiers(ast.parse(source)) if is_vague(name)]


def test_names_of_others_and_longer_names_may_be_used():
    source = "from hypothesis import given\nf(given=x.found)\noffset = owner = founder = sum_of_gates = offsets_of = 1"
    assert not [name for _, name in identifiers(ast.parse(source)) if is_vague(name)]
