"""gla new-backend: the template of a backend, copied and renamed."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from gla_tools import plugin_template

TEMPLATE = Path(__file__).parents[2] / "plugins" / "gla_plugin_template"
NAME = "my_softmax_2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(folder, run):
    result = run("new-backend", NAME)
    assert result.exit_code == 0, result.output
    assert f"  cd {NAME}\n  pip install --editable .\n  gla conformance {NAME}\n" in result.output
    return folder / NAME


def files(folder):
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_copied_and_nothing_of_the_old_name_is_left(made):
    names = {"README.md": "TUTORIAL.md", "README.template.md": "README.md"}
    copied = [names.get(name, name) for name in files(TEMPLATE) if "__pycache__" not in name]
    assert sorted(files(made)) == sorted(name.replace("gla_plugin_template", NAME) for name in copied)
    assert {".gitignore", ".github/workflows/test.yml", "tests/test_conformance.py"} <= files(made).keys()
    text = "".join(path.read_text() for path in files(made).values())
    assert re.findall(r"plugin.template|my.softmax(?![-_]2)", text) == []


def test_its_pages_speak_of_itself(made):
    assert f"gla new-backend {NAME}\ncd {NAME}\n" in (made / "TUTORIAL.md").read_text()
    readme = (made / "README.md").read_text()
    assert readme.startswith(f"# {NAME.replace('_', '-')}\n")
    assert "ten minutes" not in readme


def test_it_is_a_plugin_that_registers_under_its_name(made, monkeypatch):
    project = tomllib.loads((made / "pyproject.toml").read_text())
    assert project["project"]["name"] == NAME.replace("_", "-")
    assert project["project"]["dependencies"] == ["gla-core>=0.1,<0.2"]
    assert project["project"]["entry-points"]["gla_core.backends"] == {NAME: NAME}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [NAME]
    monkeypatch.syspath_prepend(made)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        (backend,) = importlib.import_module(NAME).gla_register_backends()
        assert (backend.name, list(backend.ops)) == (NAME, ["online_softmax"])
        assert importlib.import_module(f"{NAME}.token_loop").CAPABILITIES
    finally:
        for module in [module for module in sys.modules if module.partition(".")[0] == NAME]:
            del sys.modules[module]


def test_a_wheel_carries_the_template_beside_the_command(tmp_path, monkeypatch):
    carried = tmp_path / "template" / "gla_plugin_template"
    carried.mkdir(parents=True)
    (carried / "online_softmax.py").write_text("# my_softmax\n")
    (carried / "__pycache__").mkdir()
    (carried.parent / "README.md").write_text("tutorial")
    (carried.parent / "README.template.md").write_text("my_softmax")
    monkeypatch.setattr(plugin_template, "__file__", str(tmp_path / "plugin_template.py"))
    made = plugin_template.create("other", tmp_path)
    texts = {name: path.read_text() for name, path in files(made).items()}
    assert texts == {"other/online_softmax.py": "# other\n", "README.md": "other", "TUTORIAL.md": "tutorial"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2fast", "'2fast' cannot be the name of a package; expected letters, digits and underscores"),
        ("a-b", "'a-b' cannot be the name of a package"),
        ("../up", "'../up' cannot be the name of a package"),
        ("größe", "'größe' cannot be the name of a package"),
        ("class", "'class' cannot be the name of a package"),
        ("_private", "'_private' cannot be the name of a package"),
        ("torch", "a Python package named 'torch' is installed already; choose another name"),
        ("auto", "'auto' asks for the best backend, and is the name of none; choose another name"),
        ("reference", "a backend or plugin named 'reference' is installed already; choose another name"),
        ("broken", "a backend or plugin named 'broken' is installed already; choose another name"),
        ("there", "there exists already; choose another name, or remove it"),
    ],
)
@pytest.mark.usefixtures("broken_plugin")
def test_bad_usage(run, folder, name, message):
    (folder / "there").mkdir()
    result = run("new-backend", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"gla new-backend: {message}" in result.stderr
    assert [path.name for path in folder.iterdir() if path.name != "cache"] == ["there"]
