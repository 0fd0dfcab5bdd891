"""Docstrings begin with a verb or name their thing, as docs/contributing.md asks."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SOURCE = {"__pycache__", "build", "dist", "site"}
"""Folders of generated files; hidden folders are left out as well."""
DIVIDED = {"backends", "gla_core", "plugins", "tests"}
"""Top-level folders of which each subfolder is a case of its own."""
FIRST_WORDS = {"as", "how", "if", "of", "that", "those", "what", "where", "whether", "which", "who", "whose"}
PHRASES = ("so many", "is had", "that which", "what of")


def source_files() -> dict[str, list[Path]]:
    """Returns the Python files of the repository by folder, without git."""
    paths: dict[str, list[Path]] = {}
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in NOT_SOURCE)
        parts = Path(folder).relative_to(ROOT).parts
        if parts:
            group = "/".join(parts[: 2 if parts[0] in DIVIDED else 1])
            paths.setdefault(group, []).extend(Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    return {group: files for group, files in paths.items() if files}


FILES = source_files()


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and text of the docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


def faults(text: str) -> list[str]:
    """Returns the words of a docstring that make it hard to read."""
    first = re.match(r"\W*(\w*)", text)
    begins = first[1] if first else ""
    flat = " ".join(text.lower().split())
    problems = [f"it begins with {begins!r}"] if begins.lower() in FIRST_WORDS else []
    return problems + [f"it has {phrase!r}" for phrase in PHRASES if re.search(rf"\b{phrase}\b", flat)]


@pytest.mark.parametrize("folder", FILES)
def test_docstrings_read_at_once(folder):
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {fault}: {text.splitlines()[0]}"
        for path in FILES[folder]
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        for fault in faults(text)
    ]
    assert not problems, "begin with a verb, or name the thing (docs/contributing.md):\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Returns whether the call can run.", []),
        ("Whether the call can run.", ["it begins with 'Whether'"]),
        ('"As `scan`, backwards."', ["it begins with 'As'"]),
        ("Segments of so\n    many tokens.", ["it has 'so many'"]),
        ("", []),
    ],
)
def test_faults(text, expected):
    assert faults(text) == expected
