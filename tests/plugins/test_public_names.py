"""The plugins of this repository import public names of gla_core alone, as those of others have to."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "plugins").glob("*/**/*.py") if "tests" not in path.parts)
API = re.search(r"^API: .*? = ({.*?^})", (ROOT / "docs/site_pages.py").read_text(), re.M | re.S)
PAGES = list(ast.literal_eval(API[1]))
"""The modules that are documented."""


def is_public(module, name):
    """Returns whether the site documents the name: all of a module without `__all__` is documented."""
    if module not in PAGES:
        return False
    value = importlib.import_module(module)
    public = getattr(value, "__all__", [name for name in vars(value) if not name.startswith("_")])
    return name in public


def core_names(tree):
    """Yields the modules and names of gla_core that a file imports, or takes from `import gla_core as gla`."""
    alias = None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("gla_core."):
            yield from ((node.module, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            for each in node.names:
                alias = each.asname if each.name == "gla_core" else alias
                if each.name.startswith("gla_core."):
                    yield each.name, ""
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == alias:
            yield "gla_core", node.attr


@pytest.mark.parametrize("plugin", sorted({path.relative_to(ROOT / "plugins").parts[0] for path in SOURCES}))
def test_plugins_import_public_names(plugin):
    paths = [path for path in SOURCES if plugin in path.parts]
    names = {(path.name, *name) for path in paths for name in core_names(ast.parse(path.read_text()))}
    assert names
    assert [name for name in names if not is_public(*name[1:])] == []


@pytest.mark.parametrize(
    "line",
    [
        "from gla_core.nn.merged import added",
        "from gla_core.nn import merged",
        "import gla_core.nn.merged",
        "import gla_core as gla\ngla._cpu",
        "from gla_core.dispatch import registry",
    ],
)
def test_an_import_of_another_name_would_be_seen(line):
    (name,) = core_names(ast.parse(line))
    assert not is_public(*name)


def test_what_the_plugins_are_made_of_is_what_they_import():
    made_of = importlib.import_module("gla_core.extension").__all__
    imported = {name for path in SOURCES for module, name in core_names(ast.parse(path.read_text())) if "ext" in module}
    assert sorted(set(made_of) - imported) == ["Kernels"]  # the type of an argument
