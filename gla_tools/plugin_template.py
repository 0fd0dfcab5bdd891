"""`gla new-backend`: copies the template of a plugin and renames it. It imports torch only to ask for names."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from pathlib import Path

_NAME, _EXAMPLE = "gla_plugin_template", "my_softmax"
"""The name of the template, and the name of the new backend in its README."""


def create(name: str, where: Path) -> Path:
    """Copies the template into a new folder `where / name`, renamed throughout.

    Args:
        name: name of the backend, its package and its folder; the distribution has dashes in place of underscores.

    Returns:
        The new folder.

    Raises:
        ValueError: the name is not usable, or the folder exists.
        OSError: a file cannot be written.
    """
    if not re.fullmatch("[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?", name) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} cannot be the name of a package; expected letters, digits and underscores, such as my_softmax"
        )
    folder = where / name
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another name, or remove it")
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"a Python package named {name!r} is installed already; choose another name")
    _check_free(name)
    made_by_tools = ("__pycache__", ".*_cache", ".venv", "dist")
    shutil.copytree(_template(), folder, ignore=shutil.ignore_patterns(*made_by_tools))
    for old, new in ((_NAME, name), ("README.md", "TUTORIAL.md"), ("README.template.md", "README.md")):
        (folder / old).rename(folder / new)
    for path in filter(Path.is_file, folder.rglob("*")):
        path.write_text(_renamed(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    return folder


def _check_free(name: str) -> None:
    """Raises ValueError for a name that means something in a request: that of a backend or of a plugin, or auto."""
    from gla_core import backends  # not before the other checks, because it imports torch
    from gla_core.dispatch.request import AUTO

    if name == AUTO:
        raise ValueError(f"{name!r} asks for the best backend, and is the name of none; choose another name")
    if name in {taken for info in backends() for taken in (info.name, info.plugin)}:
        raise ValueError(f"a backend or plugin named {name!r} is installed already; choose another name")


def next_steps(name: str) -> str:
    """Returns the next steps for the folder that `create` made, in words."""
    return f"""Created the folder {name}, a backend with one op, online_softmax. Next:
  cd {name}
  pip install --editable .
  gla conformance {name}
Its TUTORIAL.md explains each step and what to change; README.md is for those who use it."""


def _template() -> Path:
    carried = Path(__file__).with_name("template")  # in a wheel; see pyproject.toml
    return carried if carried.is_dir() else Path(__file__).parents[1] / "plugins" / _NAME


def _renamed(text: str, name: str) -> str:
    new = dict.fromkeys((_NAME, _EXAMPLE), name)
    new |= {old.replace("_", "-"): name.replace("_", "-") for old in new}
    return re.sub("|".join(new), lambda match: new[match[0]], text)
